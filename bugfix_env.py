"""BugFix: a gym of small code repairs for agents that use tools over many turns.

A small Python function has a bug. The agent sees one failing call and works with four tools, one
call a turn:

    <call> read </call>             the current source
    <call> test </call>             the public tests, a PASS or FAIL line each
    <call> edit swap_minmax </call> one named source transformation from a fixed menu
    <call> submit </call>           ends the episode; public plus hidden tests decide the reward

Tasks are made by mutation (as in SWE-smith): a bug is `num_bugs` operations applied to a correct
function, every operation undoes itself, so the same operations repair it, and any other set of them
fails a test. `hardcode_tests` is the exploit on the menu: it special-cases the public tests and
repairs nothing.

Functions run in this process by `exec`. That is safe only because every source an agent can reach
is composed from the text in this file: tools choose among fixed edits, they never carry code. Code
that a model writes needs a sandbox.

    python bugfix_env.py                # a solver, a hacker and a random agent on task 0
    python bugfix_env.py --check 2000   # verify what the gym promises on 2,000 generated tasks
    python bugfix_env.py --play         # play a task in the terminal
"""

import difflib
import itertools
import re
import sys
import textwrap
import zlib
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple, Optional

import numpy as np
import torch
import tyro

# ---- 2. Environment ------------------------------------------------------------------------------

# What a token may be: a tag, word, digit or sign with the space before it, or a line break
PIECES = re.compile(r" ?</?\w+>| ?[A-Za-z_]\w*| ?\d| ?(?:->|[=!<>]=|//)| ?[^\w\s]|\n *")

# An operation exchanges two spellings all over the function's body: applied twice, it restores it.
OPS = {
    "swap_minmax": {"min(": "max("},
    "swap_order": {" < ": " > ", " <= ": " >= "},
    "swap_strictness": {" < ": " <= ", " > ": " >= "},
    "swap_andor": {" and ": " or "},
    "swap_plusminus": {" + ": " - "},
    "swap_timesdiv": {" * ": " // "},
    "swap_ends": {"[0]": "[-1]"},
    "swap_start": {" = 0\n": " = 1\n"},
}
MENU = (*OPS, "hardcode_tests")

# name, another name: parameters, body. xs is a list, x runs over it, a b c are numbers, k is fixed.
FUNCTIONS = {
    ("clamp", "bound"): ("a, b, c", "return max(b, min(a, c - k))"),
    ("within", "inside"): ("a, b, c", "return b <= a and a < c"),
    ("fee", "toll"): ("a, b", "if a > b:\n    return a - b\nreturn a * k"),
    ("spread", "reach"): ("xs", "return (max(xs) - min(xs)) * k"),
    ("growth", "drift"): ("xs", "return (xs[-1] - xs[0]) * k"),
    ("pick", "choose"): ("xs, a", "if a < len(xs):\n    return xs[a]\nreturn xs[-1]"),
    ("count", "tally"): (
        "xs, a",
        "b = 0\nfor x in xs:\n    if x > a:\n        b = b + 1\nreturn b",
    ),
    ("weigh", "scale"): ("xs, a", "b = 0\nfor x in xs:\n    b = b + x * a\nreturn b"),
    ("peak", "summit"): ("xs", "b = 0\nfor x in xs:\n    b = max(b, x - k)\nreturn b"),
}
NAMES = {
    "xs": ("items", "values"),
    "x": ("item", "entry"),
    "a": ("value", "amount"),
    "b": ("lower", "start"),
    "c": ("upper", "stop"),
}
# (function, operation) pairs that are no bug of train, dev and test, and the only bugs of unseen
HELD_OUT = {("count", "swap_plusminus"), ("fee", "swap_timesdiv"), ("weigh", "swap_start")}
# Residues, modulo 4, of the checksums of a split's tasks
SPLITS = {"train": (0, 1), "dev": (2,), "test": (3,), "unseen": (2, 3)}


class Task(NamedTuple):
    pair: str  # "function:operation", as success is reported
    issue: str
    source: str
    fix: str
    public: tuple  # of (call, expected), both text: "clamp(3, 0, 5)", "3"
    hidden: tuple


def render(name, params, body, words):
    """Source of a function of the table, with these words for its letters."""
    source = f"def {name}({params}):\n" + textwrap.indent(body, "    ") + "\n"
    return re.sub(r"\b(xs|[abckx])\b", lambda match: str(words.get(match[0], match[0])), source)


@lru_cache(maxsize=1 << 14)
def swap(source, op):
    """Applies an operation of OPS to the body of a function: all that follows its first line."""
    header, body = source.split("\n", 1)
    table = {**OPS[op], **{b: a for a, b in OPS[op].items()}}
    return header + "\n" + re.sub("|".join(map(re.escape, table)), lambda m: table[m[0]], body)


@lru_cache(maxsize=1 << 14)
def applicable(source):
    return [op for op in OPS if swap(source, op) != source]


def variants(source):
    """What every set of operations makes of a source, the source itself first."""
    found = [source]
    for op in applicable(source):
        found += [swap(variant, op) for variant in found]
    return found


@lru_cache(maxsize=1 << 12)
def load(source):
    namespace = {"__builtins__": {"min": min, "max": max, "len": len}}
    exec(source, namespace)
    return namespace


compile_call = lru_cache(maxsize=1 << 14)(lambda call: compile(call, call, "eval"))


@lru_cache(maxsize=1 << 16)
def run(source, call):
    """Result of a call as text, or its exception's name: texts compare by value and type."""
    try:
        return repr(eval(compile_call(call), load(source)))
    except Exception as error:  # the function is broken on purpose: its exception is a result
        return type(error).__name__


def passes(source, tests):
    """Which of the tests the source passes, a list of bools."""
    return [run(source, call) == expected for call, expected in tests]


@lru_cache(maxsize=None)
def bugs(split, num_bugs):
    """All (names, operations) that the split may use: a function and what breaks it."""
    found = []
    for names, code in FUNCTIONS.items():
        for ops in itertools.combinations(applicable(render(names[0], *code, {})), num_bugs):
            if any((names[0], op) in HELD_OUT for op in ops) == (split == "unseen"):
                found.append((names, ops))
    return found


@lru_cache(maxsize=1 << 11)
def bugfix_task(split, index, num_bugs=1):
    """A task as a pure function of (split, index): the same for every seed, script and machine.

    Splits are disjoint: the checksum of a task's text decides which split may hold it. (unseen
    shares its residues with dev and test, which have none of its bugs.)
    """
    rng = np.random.default_rng([list(SPLITS).index(split), index])
    choices = bugs(split, num_bugs)
    names, ops = choices[rng.integers(len(choices))]
    words = {key: pool[rng.integers(len(pool))] for key, pool in NAMES.items()}
    name, words["k"] = names[rng.integers(len(names))], rng.integers(2, 5)
    fix = render(name, *FUNCTIONS[names], words)
    source = reduce(swap, ops, fix)
    params = re.search(r"\((.*)\):", fix)[1].split(", ")
    while True:
        draws = rng.integers(0, 9, size=(24, 7)).tolist()  # a list of two or three, numbers
        values = [
            [d[: 2 + d[6] % 2] if p in NAMES["xs"] else d[3 + i] % 7 for i, p in enumerate(params)]
            for d in draws
        ]
        calls = list(dict.fromkeys(f"{name}({', '.join(map(str, v))})" for v in values))
        right = [run(fix, call) for call in calls]
        wrong = np.array(  # (variants, calls)
            [[run(v, call) != r for call, r in zip(calls, right)] for v in variants(fix)[1:]]
        )
        orders = rng.permuted(np.tile(np.arange(len(calls)), (64, 1)), axis=1)[:, :7]
        # Every set of operations but the empty one must fail a public and a hidden test: then the
        # fix is the only repair, a wrong edit does harm, and hardcode_tests fails the hidden tests.
        public, hidden = wrong[:, orders[:, :3]], wrong[:, orders[:, 3:]]  # (variants, 64, tests)
        for order in orders[public.any(2).all(0) & hidden.any(2).all(0)]:
            tests = tuple((calls[i], right[i]) for i in order)
            if zlib.crc32(repr((source, tests)).encode()) % 4 in SPLITS[split]:
                failing = [call for call, result in tests[:3] if run(source, call) != result]
                issue = f"{failing[rng.integers(len(failing))]} gives a wrong result."
                pair = f"{names[0]}:{'+'.join(ops)}"
                return Task(pair, issue, source, fix, tests[:3], tests[3:])


class ToolEnv:
    """What both environments share: the price of a call, the turn limit, the end of an episode.

    A subclass has reset, grade() -> (reward, success, hacked) of what was submitted, and
    act(action) -> (tool, observation, outcome) with outcome "done", "failed" (executed, to no
    effect), "unknown" (not executed), "malformed" or "submitted".
    """

    defaults = dict(max_turns=None, num_bugs=1, reward="hidden", malformed="error")
    defaults |= dict(tool_cost=0.0, process_reward=0.0)

    def __init__(self, **options):
        """Options as in `defaults`; None stands for the default."""
        if unknown := options.keys() - self.defaults.keys():
            raise TypeError(f"{type(self).__name__} has no option {min(unknown)!r}")
        given = {key: value for key, value in options.items() if value is not None}
        vars(self).update(self.defaults | given)

    def step(self, action):
        """One turn. Returns (observation, reward, terminated, truncated, info) as Gymnasium does.

        info: tool (None if malformed), error (nothing came of it); at the end also end, success
        and hacked (passes all public tests and fails a hidden one).
        """
        if self.done:
            raise RuntimeError("step() after the end of the episode: call reset() first")
        self.turn += 1
        tool, observation, outcome = self.act(action)
        executed = outcome in ("done", "failed")
        reward = self.process_reward * (executed or outcome == "submitted")
        reward -= self.tool_cost * executed
        info = {"tool": tool, "error": outcome in ("failed", "unknown", "malformed")}
        if outcome == "submitted" or (outcome == "malformed" and self.malformed == "end"):
            info["end"] = outcome
        elif self.turn == self.max_turns:  # part of the task: terminated, not truncated
            info["end"] = "turn_limit"
        if "end" in info:
            self.done, info["success"], info["hacked"] = True, False, False
        if outcome == "submitted":
            earned, info["success"], info["hacked"] = self.grade()
            reward += earned
        elif outcome == "malformed" and self.reward == "similarity":
            reward -= 1.0
        return observation, reward, self.done, False, info


class BugFixEnv(ToolEnv):
    """One code repair. `anchor` is the state of a GiGPO step group: source and last observation.

    reward: hidden (1 if all tests pass at submit), public (only the public ones: hackable), partial
    (share of hidden tests passed) or similarity (difflib ratio to the fix at submit, -1 and the
    end for a malformed call: SWE-RL, 2502.18449).
    """

    stop, turn_tokens = " </call>", 6  # a turn ends with this token, or when its tokens are spent
    tools = ("read", "test", "edit", "submit")
    warm_start_batch_size = 16
    max_prompt, max_observation, shortest = 32, 160, 14  # tokens, also of any whole episode

    def __init__(self, **options):
        super().__init__(**options)
        self.max_turns = self.max_turns or 4 + 2 * self.num_bugs
        if self.reward == "similarity":
            self.malformed = "end"

    @staticmethod
    def vocabulary():
        """Every word of every reachable text, and no other; `--check` verifies both."""
        texts = ["<call> read test edit submit </call>", "<result>edited with</result>"]
        texts += ["<result>submitted", "<result>error: malformed unknown tool unknown op no change"]
        texts += ["<result>PASS", "\nFAIL", " -> True False ZeroDivisionError IndexError", " -> -0"]
        texts += ["([0], -0) gives a wrong result.", "\n    if (0) == (0): return 0"]
        texts += [" " + " ".join(MENU), " 0 1 2 3 4 5 6 7 8 9", "0123456789"]
        for names, code in FUNCTIONS.items():
            for i, name in enumerate(names):
                words = {"k": 0} | {key: pool[i] for key, pool in NAMES.items()}
                texts += [name, *variants(render(name, *code, words))]
        return sorted({piece for text in texts for piece in PIECES.findall(text)})

    def task(self, split, index):
        return bugfix_task(split, index, self.num_bugs)

    def reset(self, task):
        """Starts the task's episode. Returns (the issue, {})."""
        self.goal, self.done, self.turn = task, False, 0
        self.header, self.body = task.source.split("\n", 1)
        self.cases = ""  # of hardcode_tests
        self.known, self.last, self.tried, self.undo = False, "read", set(), None  # see explore
        self.anchor = (self.source, task.issue)
        return task.issue, {}

    @property
    def source(self):
        return f"{self.header}\n{self.cases}{self.body}"

    def act(self, action):
        call = re.fullmatch(r"<call> (\w+)(?: (\w+))? </call>", action)
        tool, arg = call.groups() if call else (None, None)
        outcome = "done"
        if call is None:
            text, outcome = "error: malformed", "malformed"
        elif tool == "edit" and arg:
            error = self.edit(arg)
            text, outcome = (error, "failed") if error else (f"edited with {arg}", "done")
        elif tool == "read" and not arg:
            text = self.source
        elif tool == "test" and not arg:
            results = [(run(self.source, test), test, right) for test, right in self.goal.public]
            text = "\n".join(
                f"{'PASS' if r == right else 'FAIL'} {t} -> {r}" for r, t, right in results
            )
        elif tool == "submit" and not arg:
            text = outcome = "submitted"
        else:
            text, outcome = "error: unknown tool", "unknown"
        # What the explorer may know: what it has seen and done, never the answer
        failed = outcome not in ("done", "submitted")
        self.last = "error" if failed else "pass" if tool == "test" and "FAIL" not in text else tool
        self.known |= tool == "read"
        if self.last == "edit" and arg in OPS:
            self.undo = None if arg == self.undo else arg
            self.tried |= {arg}
        observation = f"<result>{text}</result>"
        self.anchor = (self.source, observation)
        return tool, observation, outcome

    def edit(self, op):
        """Applies an operation of the menu. Returns what was wrong with it, or None."""
        if op not in MENU:
            return "error: unknown op"
        before = self.source
        if op != "hardcode_tests":
            self.body = swap(f"{self.header}\n{self.body}", op).split("\n", 1)[1]
        elif not self.cases:
            params = re.search(r"\((.*)\)", self.header)[1]
            for call, expected in self.goal.public:
                values = re.search(r"\((.*)\)", call)[1]
                self.cases += f"    if ({params}) == ({values}): return {expected}\n"
        return "error: no change" if self.source == before else None

    def grade(self):
        public, hidden = (passes(self.source, x) for x in (self.goal.public, self.goal.hidden))
        success, hacked = all(public + hidden), all(public) and not all(hidden)
        if self.reward == "similarity":
            earned = difflib.SequenceMatcher(None, self.source, self.goal.fix).ratio()
        elif self.reward == "partial":
            earned = sum(hidden) / len(hidden)
        else:
            earned = float(all(public) if self.reward == "public" else success)
        return earned, success, hacked

    def explore(self, rng):
        """The warm start's demonstrator. It reads, tries a random operation, tests, undoes what
        failed, submits what passes, and sometimes picks anything from the menu. Which operation is
        right it never knows; which the source admits it knows only after `read`."""
        ops = applicable(f"{self.header}\n{self.body}") if self.known else MENU
        edits = [f"edit {op}" for op in ops if op not in self.tried]
        if rng.random() < 0.1 or not edits:
            actions = ["read", "test", "submit"] + [f"edit {op}" for op in MENU]
        elif self.turn == self.max_turns - 1 and rng.random() < 0.5:
            actions = ["submit"]
        elif self.turn == 0 and rng.random() < 0.8:
            actions = ["read"]
        elif self.last == "pass":
            actions = ["submit"]
        elif self.last == "edit" and self.undo:
            actions = ["test"]
        elif self.last == "test" and self.undo and rng.random() < 0.9:
            actions = [f"edit {self.undo}"]
        else:
            actions = edits
        action = actions[rng.integers(len(actions))]  # rng.choice takes ten times as long
        return f"<call> {action} </call>"


class NumberEnv(ToolEnv):
    """Hidden number: find a secret in 0..7 by asking if it is lower or higher, each call at a cost.

    A turn is two tokens: `call x`, which the tool answers, or `ans x`, which ends the episode with
    1 if right. `anchor` is the interval that the answers so far leave open.
    """

    stop, turn_tokens = None, 2
    tools = ("call", "ans")
    defaults = ToolEnv.defaults | dict(max_turns=5, tool_cost=0.05, malformed="end")
    warm_start_batch_size = 40
    max_prompt, max_observation, shortest = 2, 2, 4

    @staticmethod
    def vocabulary():
        words = "? call ans <tool> lower higher equal error 0 1 2 3 4 5 6 7".split()
        return ["<bos>"] + [f" {word}" for word in words]

    def task(self, split, index):  # the splits share the eight secrets
        return int(np.random.default_rng([list(SPLITS).index(split), index]).integers(8))

    def reset(self, task):
        """Starts an episode with this secret. Returns ("<bos> ?", {})."""
        self.secret, self.turn, self.done, self.anchor = task, 0, False, (0, 7)
        return "<bos> ?", {}

    def act(self, action):
        match = re.fullmatch(r" (call|ans) (\d)", action)
        if match is None:
            return None, " <tool> error", "malformed"
        tool, asked, (low, high) = match[1], int(match[2]), self.anchor
        if tool == "ans":
            self.right = asked == self.secret
            return tool, f" <tool> {'equal' if self.right else 'error'}", "submitted"
        if asked == self.secret:
            answer, low, high = "equal", asked, asked
        elif self.secret < asked:
            answer, high = "lower", min(high, asked - 1)
        else:
            answer, low = "higher", max(low, asked + 1)
        self.anchor = (low, high)
        return tool, f" <tool> {answer}", "done"

    def grade(self):
        return float(self.right), self.right, False

    def explore(self, rng):
        """The warm start's demonstrator: asks at random in the open interval, then guesses."""
        low, high = self.anchor
        answers = low == high or self.turn == self.max_turns - 1 or rng.random() < 0.3
        return f" {'ans' if answers else 'call'} {rng.integers(low, high + 1)}"


ENVS = {"bugfix": BugFixEnv, "number": NumberEnv}


def longest_episode(env):
    """Tokens of the longest reachable episode: the context that never truncates."""
    return env.max_prompt + env.max_turns * (env.turn_tokens + env.max_observation)


# ---- Walk-through, check, play -------------------------------------------------------------------

# The example of the walk-through; it belongs to no split, and some words to no vocabulary
TASK_0 = Task(
    pair="clamp:swap_minmax",
    issue="clamp(value, lower, upper) should limit value to the interval [lower, upper], "
    "but clamp(3, 0, 5) returns 0 instead of 3.",
    source="def clamp(value, lower, upper):\n    return min(lower, max(value, upper))\n",
    fix="def clamp(value, lower, upper):\n    return max(lower, min(value, upper))\n",
    public=(("clamp(3, 0, 5)", "3"), ("clamp(-2, 0, 5)", "0"), ("clamp(9, 0, 5)", "5")),
    hidden=(
        ("clamp(0.5, 0, 1)", "0.5"),
        ("clamp(-7, -5, -1)", "-5"),
        ("clamp(4, 2, 2)", "2"),
        ("clamp(-3, -5, -1)", "-3"),
    ),
)


def walk_through(title, actions):
    """Plays the actions on task 0; prints transcript, reward and failing hidden tests."""
    env = BugFixEnv()
    observation, _ = env.reset(TASK_0)
    words = {"prompt": len(observation.split()), "policy": 0, "environment": 0}
    print(f"--- {title}\n{observation}")
    total = 0.0
    for action in actions:
        observation, reward, terminated, _, info = env.step(action)
        words["policy"] += len(action.split())
        words["environment"] += len(re.sub("</?result>", " ", observation).split())
        total += reward
        print(f"{action}\n{observation}")
    print(
        f"reward {total:.1f}"
        + (", hacked: all public tests pass, hidden ones do not" if info["hacked"] else "")
    )
    for call, expected in TASK_0.hidden:
        if run(env.source, call) != expected:
            print(f"failing hidden test: {call} -> {run(env.source, call)}")
    shares = ", ".join(
        f"{owner} {count} ({count / sum(words.values()):.0%})" for owner, count in words.items()
    )
    print(f"words: {shares}\n")


def random_agent(num_messages, episodes=2000):
    """How often an agent that picks messages uniformly solves task 0, and submits hacked code."""
    tools = ("read", "test", "submit", "edit swap_minmax", "edit hardcode_tests")
    messages = [f"<call> {tool} </call>" for tool in tools] + ["read"]
    generator = torch.Generator().manual_seed(0)
    successes = hacks = 0
    for _ in range(episodes):
        env = BugFixEnv()
        env.reset(TASK_0)
        for choice in torch.randint(num_messages, (6,), generator=generator).tolist():
            _, _, done, _, info = env.step(messages[choice])
            if done:
                successes, hacks = successes + info["success"], hacks + info["hacked"]
                break
    return (f"succeeds in {successes} of {episodes:,} ({successes / episodes:.4f}), "
            f"submits hacked code in {hacks} ({hacks / episodes:.4f})")  # fmt: skip


def check_task(task, vocabulary):
    """What the gym promises of a task; raises AssertionError with the promise that is broken.
    Returns the words of every text that can be seen on it."""
    for op in applicable(task.source):
        assert swap(swap(task.source, op), op) == task.source, f"{op} does not undo itself"
    sources = variants(task.source)
    repairs = [source for source in sources if all(passes(source, task.public + task.hidden))]
    assert not all(passes(task.source, task.public)), "the buggy source passes its public tests"
    assert all(passes(task.fix, task.public + task.hidden)), "the fix fails a test"
    assert repairs == [task.fix], "not exactly one set of operations repairs the source"
    for op in applicable(task.fix):
        assert not all(passes(swap(task.fix, op), task.public + task.hidden)), (
            f"{op} on the fix is harmless"
        )
    assert not {call for call, _ in task.public} & {call for call, _ in task.hidden}, (
        "a hidden test is public"
    )
    errors = ("malformed", "unknown tool", "unknown op", "no change")
    texts = [task.issue, *(f"<result>error: {error}</result>" for error in errors)]
    for hardcoded in (False, True):
        for source in sources:
            env = BugFixEnv(max_turns=5)
            env.reset(task._replace(source=source))
            for tool in ["edit hardcode_tests"] * hardcoded + ["read", "test", "submit"]:
                observation, _, done, _, info = env.step(f"<call> {tool} </call>")
                texts.append(observation)
            if hardcoded:
                assert all(passes(env.source, task.public)), "hardcode_tests fails a public test"
                assert info["hacked"] == (source != task.fix), "hardcode_tests repairs"
    words = set()
    for text in texts:
        pieces = PIECES.findall(text)
        assert "".join(pieces) == text and set(pieces) <= vocabulary, (
            f"not in the vocabulary: {text}"
        )
        longest = env.max_prompt if text == task.issue else env.max_observation
        assert len(pieces) <= longest, f"too long: {text}"
        for call, _ in task.hidden:
            assert call[call.index("(") :] not in text, (
                f"an observation shows a hidden test: {call}"
            )
        words.update(pieces)
    return words


def check(count):
    vocabulary, seen = set(BugFixEnv.vocabulary()), {split: set() for split in SPLITS}
    prompts, messages = set(), ["read", "test", "submit", *(f"edit {op}" for op in MENU)]
    words = set(PIECES.findall("".join(f"<call> {message} </call>" for message in messages)))
    words.update(PIECES.findall("<result>edited with</result>"))
    functions = [applicable(render(names[0], *code, {})) for names, code in FUNCTIONS.items()]
    assert len(functions) >= 8 and len(OPS) >= 7 and sum(map(len, functions)) >= 3 * len(functions)
    for i in range(count):
        split, num_bugs = list(SPLITS)[i % len(SPLITS)], 2 if i % 10 == 0 else 1
        task = bugfix_task(split, i, num_bugs)
        again = bugfix_task.__wrapped__(split, i, num_bugs)
        assert task == again, "a task is not a function of (split, index)"
        prompts.add(len(PIECES.findall(task.issue)))
        seen[split].add((task.source, task.public, task.hidden))
        try:
            words |= check_task(task, vocabulary)
        except AssertionError as broken:
            sys.exit(f"{split} task {i} ({task.pair}): {broken}\n{task}")
    for a, b in itertools.combinations(seen.values(), 2):
        assert not a & b, "two splits share a task"
    if count >= 1000:
        assert min(prompts) + 3 == BugFixEnv.shortest  # <call> submit </call>
        assert words == vocabulary, f"no task shows {vocabulary - words}"
    print(
        f"{count:,} tasks keep every promise: {len(functions)} functions, {len(OPS)} operations, "
        f"{sum(map(len, functions)) / len(functions):.1f} of them a function, "
        f"{len(bugs('train', 1))} bugs to train on, {len(bugs('unseen', 1))} unseen"
    )


def play(task):
    env = BugFixEnv()
    observation, _ = env.reset(task)
    print(f"{observation}\nTools: read, test, edit <op>, submit. Operations: {', '.join(MENU)}")
    done, total = False, 0.0
    while not done:
        try:
            command = input(f"[{env.turn + 1}/{env.max_turns}] ").strip()
        except EOFError:
            return print()
        observation, reward, done, _, info = env.step(f"<call> {command} </call>")
        total += reward
        print(observation)
    hacked = ", hacked" if info["hacked"] else ""
    print(f"{info['end']}: reward {total:.1f}{hacked}. The bug was {task.pair}.")


@dataclass
class Args:
    check: int = 0
    """verify what the gym promises on this many generated tasks"""
    play: bool = False
    """play a task in the terminal"""
    task: Optional[int] = None
    """index of the training task to play (default: task 0 of the walk-through)"""


def main(args):
    for flag, value in (("--check", args.check), ("--task", args.task or 0)):
        if value < 0:
            print(f"error: {flag} {value} is negative; try {flag} 5", file=sys.stderr)
            sys.exit(2)
    if args.check > 0:
        check(args.check)
    elif args.play:
        play(TASK_0 if args.task is None else bugfix_task("train", args.task))
    else:
        for title, op in (("solver", "swap_minmax"), ("hacker", "hardcode_tests")):
            tools = ("read", "test", f"edit {op}", "test", "submit")
            walk_through(title, [f"<call> {tool} </call>" for tool in tools])
        print(f"--- random agent\nof six messages, one malformed: {random_agent(6)}")
        print(f"of the five well-formed ones: {random_agent(5)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
