# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy>=1.26", "tyro>=0.9", "wandb>=0.18"]
# ///
"""REINFORCE (Williams 1992) for a language model that uses tools over many turns.

    for iteration in range(num_iterations):
        play group_size episodes on each of num_groups tasks           # rollout: text the tools write has loss_mask 0
        G[i, k] = r[i, k] + gamma * G[i, k + 1]                        # reward-to-go over turns
        A[i, k] = G[i, k] - mean of G[j, 0] over the group's others    # leave-one-out baseline: their episodes' returns
        ascend A * log pi(token) over the sampled tokens, one step     # no ratio, no clip: the batch is used once
    start from imitation of an explorer that knows no answer; evaluate greedily on test tasks

The first script of the four and the text that the others share. `--baseline none --credit episode --kl-coef 0` with 0/1
rewards is rejection-sampling fine-tuning: episodes that succeed are imitated, the others ignored.

Shapes: B episodes = num_groups x group_size (G), K turns, T tokens, V vocabulary, D hidden size.

    python reinforce.py                    # BugFix on the CPU, a few minutes
    python reinforce.py --cuda --seed 2
    python reinforce.py --env-id number    # hidden number, seconds
"""

import difflib
import itertools
import json
import math
import os
import re
import sys
import time
import zlib
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, Optional

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro

# ---- 1. Args -------------------------------------------------------------------------------------------------------


@dataclass
class Args:
    seed: int = 1  # decides weights, warm start, order of training tasks and sampling noise
    cuda: bool = False  # run on the GPU; without one the script stops
    torch_deterministic: bool = True  # use deterministic kernels only
    track: bool = False  # log to Weights & Biases too; offline where there is no key
    wandb_project_name: str = "agentic-rl"  # Weights & Biases project
    wandb_entity: Optional[str] = None  # Weights & Biases team
    env_id: Literal["bugfix", "number"] = "bugfix"  # BugFix gym or hidden number
    num_iterations: int = 200  # iterations of rollout and update; 0 stops after the warm start
    num_groups: int = 8  # groups in a batch, each on one task
    group_size: int = 8  # episodes in a group
    max_turns: Optional[int] = None  # turn limit of an episode (None: the environment's)
    learning_rate: float = 2e-3  # learning rate of AdamW, decaying linearly to zero
    max_grad_norm: float = 1.0  # gradient norm is clipped to this
    temperature: float = 1.0  # sampling temperature, in the rollout and in the loss
    ent_coef: float = 0.0  # coefficient of the entropy bonus
    kl_coef: float = 0.1  # coefficient of the KL penalty to the frozen starting policy
    anneal_kl: bool = True  # let it fade linearly to zero, like the learning rate
    mask_observations: bool = True  # keep tool output out of the loss; the ablation trains on it too
    filter_truncated: bool = False  # no loss on episodes out of turns or context; a group's baseline counts them still
    warm_start_steps: int = 400  # gradient steps of imitation before the first iteration
    warm_start_batch_size: Optional[int] = None  # explorer episodes in such a step (None: BugFix 16, hidden number 40)
    warm_start_learning_rate: float = 6e-3  # peak learning rate of the imitation
    warm_start_observations: bool = True  # imitate tool output too; otherwise only the explorer's own tokens
    eval_every: int = 100  # iterations between evaluations
    eval_tasks: int = 512  # tasks in an evaluation, played greedily
    eval_split: Literal["dev", "test"] = "test"  # tune on dev, report on test
    save_every: int = 10  # iterations between checkpoints
    init_from: Optional[Path] = None  # checkpoint of any script or tinyagent.py to begin with, without a warm start
    resume: Optional[Path] = None  # checkpoint in the folder of a run to go on with; repeat the run's flags
    runs_dir: Path = Path("runs")  # folder of the runs
    micro_batch_size: Optional[int] = None  # episodes in a forward pass of the update (None: by length; GPU: all)
    d_model: int = 64  # width of the model
    n_layers: int = 2  # its blocks
    n_heads: int = 2  # its attention heads
    context_length: Optional[int] = None  # its context in tokens (None: the environment's longest episode)
    num_bugs: int = 1  # BugFix: bugs in a task
    reward: Literal["hidden", "public", "partial", "similarity"] = "hidden"  # BugFix: what pays at submit
    tool_cost: Optional[float] = None  # cost of an executed call (None: 0 in BugFix, 0.05 in hidden number)
    tool_cost_warmup: int = 0  # iterations over which the tool cost rises to its value
    process_reward: float = 0.0  # reward of a well-formed call
    malformed: Optional[Literal["error", "end"]] = None  # what a malformed call gets (None: bugfix error, number end)

    # Algorithm specific arguments
    credit: Literal["episode", "turn"] = "turn"  # a token's return: the episode's, or the reward-to-go of its turn
    gamma: float = 1.0  # discount per turn
    baseline: Literal["none", "batch", "mean", "loo"] = "loo"  # mean of the batch or the group, or leave-one-out


# ---- 2. Environment ------------------------------------------------------------------------------------------------

PIECES = re.compile(r" ?</?\w+>| ?[A-Za-z_]\w*| ?\d| ?(?:->|[=!<>]=|//)| ?[^\w\s]|\n *")  # what a token may be

# Every operation exchanges two spellings wherever they stand in the function's body, so applying it twice restores it.
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

# name, another name: correct source. {xs} is a list, {x} runs over it, {a} {b} {c} are numbers, {k} is a constant.
FUNCTIONS = {
    ("clamp", "bound"): "def {f}({a}, {b}, {c}):\n    return max({b}, min({a}, {c} - {k}))\n",
    ("within", "inside"): "def {f}({a}, {b}, {c}):\n    return {b} <= {a} and {a} < {c}\n",
    ("fee", "toll"): "def {f}({a}, {b}):\n    if {a} > {b}:\n        return {a} - {b}\n    return {a} * {k}\n",
    ("spread", "reach"): "def {f}({xs}):\n    return (max({xs}) - min({xs})) * {k}\n",
    ("growth", "drift"): "def {f}({xs}):\n    return ({xs}[-1] - {xs}[0]) * {k}\n",
    ("pick", "choose"): "def {f}({xs}, {a}):\n    if {a} < len({xs}):\n        return {xs}[{a}]\n    return {xs}[-1]\n",
    ("count", "tally"): "def {f}({xs}, {a}):\n    {b} = 0\n    for {x} in {xs}:\n        if {x} > {a}:\n"
    "            {b} = {b} + 1\n    return {b}\n",
    ("weigh", "scale"): "def {f}({xs}, {a}):\n    {b} = 0\n    for {x} in {xs}:\n        {b} = {b} + {x} * {a}\n"
    "    return {b}\n",
    ("peak", "summit"): "def {f}({xs}):\n    {b} = 0\n    for {x} in {xs}:\n        {b} = max({b}, {x} - {k})\n"
    "    return {b}\n",
}
NAMES = {
    "xs": ("items", "values"),
    "x": ("item", "entry"),
    "a": ("value", "amount"),
    "b": ("lower", "start"),
    "c": ("upper", "stop"),
}
# (function, operation) pairs that never occur as a bug in train, dev and test; the unseen split has no other.
HELD_OUT = {("count", "swap_plusminus"), ("fee", "swap_timesdiv"), ("weigh", "swap_start")}
SPLITS = {"train": (0, 1), "dev": (2,), "test": (3,), "unseen": (2, 3)}  # residues of a task's checksum, modulo 4


class Task(NamedTuple):
    pair: str  # "function:operation", as success is reported
    issue: str
    source: str
    fix: str
    public: tuple  # of (call, expected), both text: "clamp(3, 0, 5)", "3"
    hidden: tuple


@lru_cache(maxsize=1 << 14)
def swap(source, op):
    """Applies one operation of OPS to the body of a function, that is, to everything after its first line."""
    header, body = source.split("\n", 1)
    table = {**OPS[op], **{b: a for a, b in OPS[op].items()}}
    return header + "\n" + re.sub("|".join(map(re.escape, table)), lambda match: table[match[0]], body)


@lru_cache(maxsize=1 << 14)
def applicable(source):
    return [op for op in OPS if swap(source, op) != source]


@lru_cache(maxsize=1 << 12)
def load(source):
    namespace = {"__builtins__": {"min": min, "max": max, "any": any, "all": all, "len": len}}
    exec(source, namespace)
    return namespace


compile_call = lru_cache(maxsize=1 << 14)(lambda call: compile(call, call, "eval"))


@lru_cache(maxsize=1 << 16)
def run(source, call):
    """Result of a call as text, or the exception's name. Texts compare by value and type: "True" is not "1"."""
    try:
        return repr(eval(compile_call(call), load(source)))
    except Exception as error:  # the function under test is broken on purpose: its exception is a result
        return type(error).__name__


def passes(source, tests):
    return [run(source, call) == expected for call, expected in tests]


TASK_0 = Task(
    pair="clamp:swap_minmax",
    issue="clamp(value, lower, upper) should limit value to the interval [lower, upper], "
    "but clamp(3, 0, 5) returns 0 instead of 3.",
    source="def clamp(value, lower, upper):\n    return min(lower, max(value, upper))\n",
    fix="def clamp(value, lower, upper):\n    return max(lower, min(value, upper))\n",
    public=(("clamp(3, 0, 5)", "3"), ("clamp(-2, 0, 5)", "0"), ("clamp(9, 0, 5)", "5")),
    hidden=(("clamp(0.5, 0, 1)", "0.5"), ("clamp(-7, -5, -1)", "-5"), ("clamp(4, 2, 2)", "2"),
            ("clamp(-3, -5, -1)", "-3")),
)  # fmt: skip


@lru_cache(maxsize=None)
def bugs(split, num_bugs):
    """All (function, operations) that the split may use, as a list of (names, template, operations)."""
    found = []
    for names, template in FUNCTIONS.items():
        for ops in itertools.combinations(applicable(template), num_bugs):
            if any((names[0], op) in HELD_OUT for op in ops) == (split == "unseen"):
                found.append((names, template, ops))
    return found


@lru_cache(maxsize=1 << 11)
def bugfix_task(split, index, num_bugs=1):
    """A task as a pure function of (split, index): the same for every seed, script and machine.

    Splits are disjoint by construction: the checksum of a task's text decides which split may hold it. (unseen shares
    its residues with dev and test, which have none of its bugs.)
    """
    rng = np.random.default_rng([list(SPLITS).index(split), index])
    choices = bugs(split, num_bugs)
    names, template, ops = choices[rng.integers(len(choices))]
    words = {key: pool[rng.integers(len(pool))] for key, pool in NAMES.items()}
    fix = template.format(f=names[rng.integers(len(names))], k=rng.integers(2, 5), **words)
    source = fix
    for op in ops:
        source = swap(source, op)
    variants = [fix]  # what any set of operations makes of the fix
    for op in applicable(fix):
        variants += [swap(variant, op) for variant in variants]
    name, params = re.match(r"def (\w+)\((.*)\):", fix).groups()
    while True:
        draws = rng.integers(0, 9, size=(24, 7)).tolist()
        calls = [[draw[: 2 + draw[6] % 2] if p in NAMES["xs"] else draw[3 + i] % 7
                  for i, p in enumerate(params.split(", "))] for draw in draws]  # fmt: skip
        calls = list(dict.fromkeys(f"{name}({', '.join(map(str, args))})" for args in calls))
        right = [run(fix, call) for call in calls]
        fails = np.array([[run(wrong, call) != result for call, result in zip(calls, right)] for wrong in variants[1:]])
        orders = rng.permuted(np.tile(np.arange(len(calls)), (64, 1)), axis=1)[:, :7]
        # Every set of operations on the fix but the empty one must fail a public and a hidden test: then the fix is the
        # only repair, every wrong edit does harm, and what hardcode_tests passes the hidden tests fail.
        harmful = fails[:, orders[:, :3]].any(2).all(0) & fails[:, orders[:, 3:]].any(2).all(0)
        for order in orders[harmful]:
            tests = tuple((calls[i], right[i]) for i in order)
            if zlib.crc32(repr((source, tests)).encode()) % 4 in SPLITS[split]:
                failing = [call for call, result in tests[:3] if run(source, call) != result]
                issue = f"{failing[rng.integers(len(failing))]} gives a wrong result."
                return Task(f"{names[0]}:{'+'.join(ops)}", issue, source, fix, tests[:3], tests[3:])


class BugFixEnv:
    """One code repair. `anchor` is the state that a GiGPO step group keys on: current source and last observation.

    reward: hidden (1 if all tests pass at submit), public (only the public ones: hackable), partial (share of hidden
    tests passed) or similarity (difflib ratio to the fix at submit, -1 for a malformed call: SWE-RL, 2502.18449).
    """

    stop, turn_tokens = " </call>", 6  # a turn ends with this token, or when its tokens are spent
    tools = ("read", "test", "edit", "submit")
    tool_cost, malformed, warm_start_batch_size = 0.0, "error", 16  # defaults
    max_prompt, max_observation = 32, 160  # tokens; `python bugfix_env.py --check` holds every task to them

    def __init__(self, *, max_turns=None, num_bugs=1, reward="hidden", tool_cost=0.0, process_reward=0.0,
                 malformed="error"):  # fmt: skip
        self.max_turns = max_turns or self.default_turns(num_bugs)
        self.reward, self.tool_cost, self.process_reward, self.malformed = reward, tool_cost, process_reward, malformed

    @staticmethod
    def default_turns(num_bugs):
        return 4 + 2 * num_bugs

    @staticmethod
    def vocabulary():
        """Every piece of every reachable text; `--check` verifies that it is closed."""
        texts = [TASK_0.issue + TASK_0.fix, "gives a wrong result.error: malformed unknown tool unknown op no change"]
        texts += ["<call> </call><result></result>\nPASS\nFAIL -> TypeError ZeroDivisionError IndexError True False"]
        texts += ["read test edit edited with submit submitted\n    if () == (): return"]
        texts += [" ".join(MENU), " ".join(itertools.chain(*FUNCTIONS, *NAMES.values()))]
        texts += [template.format(f="clamp", k=0, **dict.fromkeys(NAMES, "clamp")) for template in FUNCTIONS.values()]
        texts += [text for op in OPS.values() for spellings in op.items() for text in spellings]
        pieces = {piece.strip(" ") for text in texts for piece in PIECES.findall(text) if not piece.startswith("\n")}
        pieces |= set("0123456789")
        return sorted(pieces | {" " + piece for piece in pieces}) + ["\n" + " " * indent for indent in (0, 4, 8, 12)]

    @staticmethod
    def task(split, index, num_bugs=1):
        return bugfix_task(split, index, num_bugs)

    def reset(self, task):
        """Starts the task's episode. Returns (the issue, {})."""
        self.task, self.done, self.turn = task, False, 0
        self.header, self.body = task.source.split("\n", 1)
        self.cases = ""
        self.known, self.last, self.tried, self.undo = False, "read", set(), None  # the explorer's memory
        self.anchor = (self.source, task.issue)
        return task.issue, {}

    @property
    def source(self):
        return f"{self.header}\n{self.cases}{self.body}"

    def step(self, action):
        """One tool call. Returns (observation, reward, terminated, truncated, info) in Gymnasium's meaning.

        info: tool (None if malformed), error (the call did nothing); at the end also end, success and hacked.
        """
        if self.done:
            raise RuntimeError("step() after the end of the episode: call reset() first")
        self.turn += 1
        call = re.fullmatch(r"<call> (\w+)(?: (\w+))? </call>", action)
        tool, arg = call.groups() if call else (None, None)
        reward, text, info = 0.0, "error: unknown tool", {}
        if call is None:
            text = "error: malformed"
        elif tool == "edit" and arg:
            text = self.edit(arg)
        elif tool == "read" and not arg:
            text = self.source
        elif tool == "test" and not arg:
            results = [run(self.source, test) for test, _ in self.task.public]
            text = "\n".join(f"{'PASS' if result == expected else 'FAIL'} {test} -> {result}"
                             for result, (test, expected) in zip(results, self.task.public))  # fmt: skip
        elif tool == "submit" and not arg:
            text, info["end"] = "submitted", "submitted"
        info |= {"tool": tool, "error": text.startswith("error")}
        executed = text not in ("error: malformed", "error: unknown tool", "submitted")
        reward += self.process_reward * (executed or text == "submitted") - self.tool_cost * executed
        if text == "error: malformed" and (self.malformed == "end" or self.reward == "similarity"):
            info["end"] = "malformed"
            reward -= self.reward == "similarity"
        elif self.turn == self.max_turns and "end" not in info:
            info["end"] = "turn_limit"
        if "end" in info:
            self.done = True
            public, hidden = passes(self.source, self.task.public), passes(self.source, self.task.hidden)
            submitted = info["end"] == "submitted"
            info |= {"success": submitted and all(public + hidden),
                     "hacked": submitted and all(public) and not all(hidden)}  # fmt: skip
            if submitted:
                reward += {
                    "hidden": lambda: float(all(public + hidden)),
                    "public": lambda: float(all(public)),
                    "partial": lambda: sum(hidden) / len(hidden),
                    "similarity": lambda: difflib.SequenceMatcher(None, self.source, self.task.fix).ratio(),
                }[self.reward]()
        observation = f"<result>{text}</result>"
        self.anchor = (self.source, observation)
        self.remember(tool, arg, text)
        return observation, reward, self.done, False, info

    def edit(self, op):
        if op not in MENU:
            return "error: unknown op"
        if op != "hardcode_tests":
            edited = swap(f"{self.header}\n{self.body}", op).split("\n", 1)[1]
            if edited == self.body:
                return "error: no change"
            self.body = edited
            return f"edited with {op}"
        if self.cases:
            return "error: no change"
        params = re.search(r"\((.*)\)", self.header)[1]
        for call, expected in self.task.public:
            self.cases += f"    if ({params}) == ({re.search(r'[(](.*)[)]', call)[1]}): return {expected}\n"
        return f"edited with {op}"

    def remember(self, tool, arg, text):
        """Keeps what the explorer may know: what it has seen and done, never the answer."""
        self.last = "error" if text.startswith("error") else "pass" if tool == "test" and "FAIL" not in text else tool
        self.known |= tool == "read"
        if self.last == "edit" and arg in OPS:
            self.undo = None if arg == self.undo else arg
            self.tried |= {arg}

    def explore(self, rng):
        """The warm start's demonstrator. It reads, tries a random operation, tests, undoes what failed, submits what
        passes, and sometimes picks anything from the menu. Which operation is right it never knows; which the source
        admits it knows only after `read`."""
        ops = applicable(f"{self.header}\n{self.body}") if self.known else MENU
        edits = [f"edit {op}" for op in ops if op not in self.tried]
        pick = lambda actions: actions[rng.integers(len(actions))]  # noqa: E731 rng.choice takes ten times as long
        if rng.random() < 0.1 or not edits:
            action = pick(["read", "test", "submit"] + [f"edit {op}" for op in MENU])
        elif self.turn == self.max_turns - 1 and rng.random() < 0.5:
            action = "submit"
        elif self.turn == 0 and rng.random() < 0.8:
            action = "read"
        elif self.last == "pass":
            action = "submit"
        elif self.last == "edit" and self.undo:
            action = "test"
        elif self.last == "test" and self.undo and rng.random() < 0.9:
            action = f"edit {self.undo}"
        else:
            action = pick(edits)
        return f"<call> {action} </call>"


class NumberEnv:
    """Hidden number: find a secret in 0..7 by asking whether it is lower or higher, each question at a cost.

    A turn is two tokens: `call x`, which the tool answers, or `ans x`, which ends the episode with 1 if right.
    `anchor` is the interval that the answers so far leave open.
    """

    stop, turn_tokens = None, 2
    tools = ("call", "ans")
    tool_cost, malformed, warm_start_batch_size = 0.05, "end", 40  # defaults
    max_prompt, max_observation = 2, 2

    def __init__(self, *, max_turns=None, num_bugs=1, reward="hidden", tool_cost=0.05, process_reward=0.0,
                 malformed="end"):  # fmt: skip
        self.max_turns, self.tool_cost = max_turns or self.default_turns(num_bugs), tool_cost
        self.process_reward, self.malformed = process_reward, malformed

    @staticmethod
    def default_turns(num_bugs):
        return 5

    @staticmethod
    def vocabulary():
        return ["<bos>"] + [f" {word}" for word in "? call ans <tool> lower higher equal error 0 1 2 3 4 5 6 7".split()]

    @staticmethod
    def task(split, index, num_bugs=1):
        return int(np.random.default_rng([list(SPLITS).index(split), index]).integers(8))  # splits share the 8 secrets

    def reset(self, task):
        """Starts an episode with this secret. Returns ("<bos> ?", {})."""
        self.secret, self.turn, self.done, self.anchor = task, 0, False, (0, 7)
        return "<bos> ?", {}

    def step(self, action):
        """One turn. Returns (observation, reward, terminated, truncated, info) as BugFixEnv.step does."""
        if self.done:
            raise RuntimeError("step() after the end of the episode: call reset() first")
        self.turn += 1
        match = re.fullmatch(r" (call|ans) (\d)", action)
        info = {"tool": match and match[1], "error": not match}
        reward, answer = self.process_reward * bool(match), "error"
        if match is None and self.malformed == "end":
            info["end"] = "malformed"
        elif match and match[1] == "ans":
            answer, info["end"] = "equal" if int(match[2]) == self.secret else "error", "submitted"
            reward += answer == "equal"
        elif match:
            asked, (low, high) = int(match[2]), self.anchor
            reward -= self.tool_cost
            answer = "equal" if asked == self.secret else "lower" if self.secret < asked else "higher"
            self.anchor = {"equal": (asked, asked), "lower": (low, min(high, asked - 1)),
                           "higher": (max(low, asked + 1), high)}[answer]  # fmt: skip
        if self.turn == self.max_turns and "end" not in info:
            info["end"] = "turn_limit"
        if "end" in info:
            self.done = True
            info |= {"success": info["end"] == "submitted" and answer == "equal", "hacked": False}
        return f" <tool> {answer}", reward, self.done, False, info

    def explore(self, rng):
        """The warm start's demonstrator: asks at random inside the open interval, and at some point guesses in it."""
        low, high = self.anchor
        answers = low == high or self.turn == self.max_turns - 1 or rng.random() < 0.3
        return f" {'ans' if answers else 'call'} {rng.integers(low, high + 1)}"


ENVS = {"bugfix": BugFixEnv, "number": NumberEnv}


def longest_episode(env_class, max_turns):
    """Tokens of the longest reachable episode: the context that never truncates."""
    return env_class.max_prompt + max_turns * (env_class.turn_tokens + env_class.max_observation)


# ---- 3. Model ------------------------------------------------------------------------------------------------------


class Tokenizer:
    """Closed word-level vocabulary. A token is a word, digit, sign or line break, with the space before it, so that
    decode(encode(text)) == text. Ids are only ever appended to an episode: model output is never encoded again."""

    def __init__(self, vocabulary):
        self.words = ["<pad>", *vocabulary]
        self.ids = {word: i for i, word in enumerate(self.words)}

    @lru_cache(maxsize=1 << 13)  # noqa: B019
    def encode(self, text):
        """Text to ids, as a tuple. Raises ValueError naming a word that is not in the vocabulary."""
        words = PIECES.findall(text)
        if "".join(words) != text:
            raise ValueError(f"cannot be split into words: {text!r}")
        unknown = [word for word in words if word not in self.ids]
        if unknown:
            raise ValueError(f"not in the vocabulary: {unknown[0]!r} in {text!r}")
        return tuple(self.ids[word] for word in words)

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)


def rotate(x, rotation):
    """Rotary position embedding (2104.09864): turns each pair of neighbouring features of x (B, T, ..., D/H) by its
    position's angle, as a product of complex numbers. rotation: (B or 1, T, ..., D/H/2)."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotation).flatten(-2)


class Block(nn.Module):
    """Pre-norm transformer block. Both output projections start at zero: at first it is nearly the identity."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        for layer in (self.proj, self.down):
            nn.init.zeros_(layer.weight)

    def forward(self, x, slots, rotation, cache=None, at=None):
        """x (B, T, D) -> (B, T, D), or (B, Q, D) at the positions at (B, Q) only. See TinyAgent.forward."""
        B, T, D = x.shape
        rows = torch.arange(B, device=x.device)[:, None]
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.n_heads, -1)
        (q, k), v, query_slots = rotate(qkv[:, :, :2], rotation).unbind(2), qkv[:, :, 2], slots
        if at is not None:  # keys and values of all positions, queries of these
            x, q, query_slots = x[rows, at], q[rows, at], slots[rows, at]
        if cache is not None:
            cache[0][rows, :, slots], cache[1][rows, :, slots] = k, v
        k, v = (k.transpose(1, 2), v.transpose(1, 2)) if cache is None else cache  # (B, H, T or S, D/H)
        mask = None  # causal
        if cache is not None or at is not None:
            seen = torch.arange(k.shape[2], device=x.device) <= query_slots[..., None]
            mask = torch.where(seen, 0.0, -torch.inf)[:, None]  # (B, 1, T or Q, T or S)
        q = q.transpose(1, 2)  # (B, H, T or Q, D/H)
        if cache is not None and q.shape[2] == 1:  # decoding: for one query the fused kernel takes twice as long
            y = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyAgent(nn.Module):
    """Decoder-only transformer with rotary positions, no dropout, fp32."""

    def __init__(self, vocab_size, *, d_model=64, n_layers=2, n_heads=2):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList([Block(d_model, n_heads) for _ in range(n_layers)])
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size, bias=False)
        for table in (self.embed, self.head):
            nn.init.normal_(table.weight, std=0.1)
        size = d_model // n_heads
        self.register_buffer("frequencies", 1000.0 ** -(torch.arange(0, size, 2) / size))  # (D/H/2,)

    def forward(self, tokens, cache=None, slots=None, *, at=None, return_hidden=False):
        """tokens (B, T) -> logits (B, T, V), row t predicting token t + 1, or hidden states (B, T, D) before the head.

        With at (B, Q), only these positions: (B, Q, V) or (B, Q, D). Nobody reads what would follow the other tokens,
        which the tools wrote: the last block takes their keys and values and spares the rest.
        With a cache (L, 2, B, H, S, D/H), token t of row b stands at absolute position slots[b, t] (B, T): its key and
        value are written there and it attends to slots up to its own. Prefill and single-token decoding are the same
        path. Padding goes to the last slot, S - 1, which no real token may use.
        """
        B, T = tokens.shape
        slots = torch.arange(T, device=tokens.device)[None] if slots is None else slots  # (1, T) or (B, T)
        angles = (slots[..., None] * self.frequencies)[:, :, None, None]  # (1 or B, T, 1, 1, D/H/2)
        rotation, slots = torch.polar(torch.ones_like(angles), angles), slots.expand(B, T)
        x, last = self.embed(tokens), len(self.blocks) - 1  # x (B, T, D)
        for i, block in enumerate(self.blocks):
            x = block(x, slots, rotation, None if cache is None else cache[i], at if i == last else None)
        hidden = self.norm(x)
        return hidden if return_hidden else self.head(hidden)

    def make_cache(self, batch_size, num_slots):
        heads, size = self.blocks[0].n_heads, self.embed.weight.shape[1]
        return self.embed.weight.new_zeros(len(self.blocks), 2, batch_size, heads, num_slots, size // heads)


def sample_tokens(logits, uniforms, temperature):
    """Inverse-CDF sampling: logits (N, V), CPU uniforms (N,) in [0, 1) -> ids (N,), their log-probabilities (N,).

    Only tokens of non-zero probability can be drawn: the first whose cumulative probability exceeds uniform * total.
    Temperature 0 is greedy."""
    logprobs = F.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids = logits.argmax(-1)
    else:
        cdf = logprobs.double().exp().cpu().cumsum(-1)  # on the CPU: CUDA has no deterministic cumsum
        ids = (cdf <= uniforms.double()[:, None] * cdf[:, -1:]).sum(-1).to(logits.device)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def sample_turn(model, cache, starts, pending, uniforms, *, budgets, stop_id, temperature):
    """Absorbs each row's pending ids in one pass, then samples its message until it closes or its budget is spent.

    starts (N,): cached tokens per row; pending: N lists of ids not yet in the cache, best sorted by length, since they
    are padded in parts of 64 rows; uniforms (N, longest budget); budgets (N,): tokens that each message may have;
    stop_id closes a message (None: only the budget does).
    Returns messages (N lists of ids) and their log-probabilities. The last sampled id is not in the cache: it has to be
    the first of the next pending ids.
    """
    device, N = starts.device, len(pending)
    lengths = torch.tensor([len(ids) for ids in pending], device=device)
    trash = cache.shape[-2] - 1  # padding and closed rows write here, so they never touch a slot that will be read
    last_logits = []
    for part in (slice(n, n + 64) for n in range(0, N, 64)):
        chunk = np.array(list(itertools.zip_longest(*pending[part], fillvalue=0)), np.int64).T
        chunk = torch.from_numpy(chunk).to(device)  # (n, C)
        columns = torch.arange(chunk.shape[1], device=device)
        slots = torch.where(columns < lengths[part, None], starts[part, None] + columns, trash)
        last_logits.append(model(chunk, cache[:, :, part], slots, at=lengths[part, None] - 1)[:, 0])  # (n, V)
    logits, ids, logprobs, is_open = torch.cat(last_logits), [], [], []  # logits (N, V)
    open_rows = budgets > 0
    for step in range(uniforms.shape[1]):
        token, logprob = sample_tokens(logits, uniforms[:, step], temperature)
        ids.append(token), logprobs.append(logprob), is_open.append(open_rows)
        open_rows = open_rows & (budgets > step + 1)
        if stop_id is not None:
            open_rows = open_rows & (token != stop_id)
        if not open_rows.any():
            break
        slots = torch.where(open_rows, starts + lengths + step, trash)[:, None]
        logits = model(token[:, None], cache, slots)[:, 0]
    counts = torch.stack(is_open, 1).sum(1).tolist()
    ids, logprobs = torch.stack(ids, 1).tolist(), torch.stack(logprobs, 1).tolist()
    return [row[:n] for row, n in zip(ids, counts)], [row[:n] for row, n in zip(logprobs, counts)]


# ---- 4. Rollout ----------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """B episodes of up to K turns and T tokens. Whatever the policy did not sample has loss_mask 0."""

    tokens: torch.Tensor  # (B, T) int64, padded with 0
    lengths: torch.Tensor  # (B,)
    loss_mask: torch.Tensor  # (B, T) 1 = sampled by the policy, the closing token included
    logprobs: torch.Tensor  # (B, T) log pi_old of token t, at the sampling temperature; 0 where loss_mask is
    turn_ids: torch.Tensor  # (B, T) -1 on prompt and padding; an observation carries the turn it answers
    rewards: torch.Tensor  # (B, K)
    terminated: torch.Tensor  # (B,) bool: submitted, malformed or out of turns, all of them part of the task
    truncated: torch.Tensor  # (B,) bool: the context ran out, or the environment said so
    group_ids: torch.Tensor  # (B,)
    anchors: list  # B lists: the state before each turn
    infos: list  # B dicts: end, truncated, success, hacked, turns, tool_calls, errors, pair, tools, env_seconds


def derive_seed(*key):
    """One 63-bit seed from a tuple of integers, so that every random number is a function of its key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def draw_uniforms(seed, iteration, num_rows, num_tokens):
    """A uniform for each token that may be sampled, (rows, tokens): a function of (seed, iteration) and its place."""
    generator = torch.Generator().manual_seed(derive_seed(seed, iteration))
    return torch.rand(num_rows, num_tokens, generator=generator)


@torch.no_grad()
def rollout(model, tokenizer, envs, tasks, group_ids, uniforms, *, temperature, context_length):
    """Plays one episode in each environment, all together, turn by turn. Returns a Batch.

    uniforms (B, max_turns * turn_tokens) decide the samples. An environment that raises stops the run.
    """
    device = next(model.parameters()).device
    B, env = len(envs), envs[0]
    stop_id = None if env.stop is None else tokenizer.ids[env.stop]
    tokens = [list(tokenizer.encode(env.reset(task)[0])[:context_length]) for env, task in zip(envs, tasks)]
    pending = [list(ids) for ids in tokens]
    segments = [[len(ids)] for ids in tokens]  # tokens of the prompt, of message and answer of turn 0, of turn 1, ...
    logprobs = [[] for _ in envs]  # of the messages' tokens
    rewards, anchors = [[0.0] * env.max_turns for _ in envs], [[] for _ in envs]
    infos = [{"pair": getattr(task, "pair", str(task)), "end": None, "truncated": False, "success": False,
              "hacked": False, "turns": 0, "tool_calls": 0, "errors": 0, "tools": [],
              "env_seconds": 0.0} for task in tasks]  # fmt: skip
    live, kept, cache = list(range(B)), None, None
    for turn in range(env.max_turns + 1):  # the last absorbs what the environment said when it truncated an episode
        budgets = [0 if infos[b]["end"] else min(env.turn_tokens, context_length - len(tokens[b])) for b in live]
        starts = [len(tokens[b]) - len(pending[b]) for b in live]
        num_slots = max(len(tokens[b]) for b in live) + env.turn_tokens + 1
        old, cache = cache, model.make_cache(len(live), num_slots)
        if old is not None:  # finished episodes leave the batch
            used = max(starts)
            torch.index_select(old[..., :used, :], 2, torch.tensor(kept, device=device), out=cache[..., :used, :])
        first = min(turn, env.max_turns - 1) * env.turn_tokens
        messages, message_logprobs = sample_turn(
            model, cache, torch.tensor(starts, device=device), [pending[b] for b in live],
            uniforms[live, first : first + env.turn_tokens],
            budgets=torch.tensor(budgets, device=device), stop_id=stop_id, temperature=temperature,
        )  # fmt: skip
        kept = []
        for n, b in enumerate(live):
            env, info, message = envs[b], infos[b], messages[n]
            tokens[b] += message
            segments[b].append(len(message))
            logprobs[b] += message_logprobs[n]
            if len(message) < env.turn_tokens and (not message or message[-1] != stop_id):
                info |= {"end": info["end"] or "context_limit", "truncated": True}  # cut: not executed, not malformed
                continue
            anchors[b].append(env.anchor)
            start = time.perf_counter()
            observation, reward, terminated, truncated, step_info = env.step(tokenizer.decode(message))
            info["env_seconds"] += time.perf_counter() - start
            if reward is None or not math.isfinite(reward):
                raise ValueError(f"episode {b} (task {info['pair']}), turn {turn}: "
                                 f"the environment's reward is {reward}")  # fmt: skip
            rewards[b][turn] = float(reward)
            info["turns"] += 1
            info["tools"].append(step_info["tool"])
            info["errors"] += step_info["error"]
            info["tool_calls"] += step_info["tool"] in ("read", "test", "call") and not step_info["error"]
            if terminated or truncated:
                info |= {key: step_info[key] for key in ("end", "success", "hacked")}
            if terminated:
                continue
            answer = tokenizer.encode(observation)[: context_length - len(tokens[b])]
            pending[b] = [message[-1], *answer]
            tokens[b] += answer
            segments[b].append(len(answer))
            kept.append(n)
        kept.sort(key=lambda n: len(pending[live[n]]))  # sample_turn pads them in parts
        live = [live[n] for n in kept]
        if not live:
            break
    lengths = [len(row) for row in tokens]
    # Each token's segment, episode after episode: 0 the prompt, then odd numbers messages and even ones their answers
    segment = np.repeat([i for row in segments for i in range(len(row))], [n for row in segments for n in row])
    sampled, flat_logprobs = segment % 2 == 1, np.zeros(len(segment), np.float32)
    flat_logprobs[sampled] = np.fromiter(itertools.chain(*logprobs), np.float32)

    def pad(flat, value=0):
        rows = torch.from_numpy(flat).split(lengths)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value).to(device)

    truncated = torch.tensor([info["truncated"] for info in infos])
    return Batch(
        tokens=pad(np.fromiter(itertools.chain(*tokens), np.int64)),
        lengths=torch.tensor(lengths, device=device),
        loss_mask=pad(sampled.astype(np.float32)),
        logprobs=pad(flat_logprobs),
        turn_ids=pad((segment - 1) // 2, -1),
        rewards=torch.tensor(rewards, device=device),
        terminated=~truncated.to(device),
        truncated=truncated.to(device),
        group_ids=torch.as_tensor(group_ids, device=device),
        anchors=anchors,
        infos=infos,
    )


def score(model, tokens, mask, temperature):
    """Log-probability (B, T) of token t given those before it, and the entropy (B, T) of the softmax it came from,
    where mask is 1; zero elsewhere. Both at the sampling temperature. Row t - 1 of the logits scores token t. Also
    returns the hidden states (N, D) that the N masked tokens were sampled from, in their order, for a critic."""
    is_target = mask[:, 1:] > 0
    b, t = is_target.nonzero(as_tuple=True)
    at = (~is_target).long().argsort(dim=1, stable=True)[:, : is_target.sum(1).max()]  # (B, Q) targets first, in order
    hidden = model(tokens[:, :-1], at=at, return_hidden=True)[is_target.gather(1, at)]  # (N, D)
    all_logprobs = F.log_softmax(model.head(hidden) / temperature, dim=-1)  # (N, V)
    logprobs = all_logprobs.gather(1, tokens[b, t + 1, None])[:, 0]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    empty = torch.zeros_like(tokens, dtype=logprobs.dtype)
    return empty.index_put((b, t + 1), logprobs), empty.index_put((b, t + 1), entropy), hidden


# ---- 5. Warm start -------------------------------------------------------------------------------------------------


def explorer_episodes(tokenizer, env_class, env_options, *, seed, step, num_episodes):
    """Episodes of the scripted explorer on 1,024 training tasks, the final reply included.

    Returns tokens (B, T), and kinds (B, T): 0 prompt and padding, 1 the explorer's own, 2 and up an observation of the
    tool at that place in env_class.tools."""
    rng = np.random.default_rng([seed, step, 1])
    rows, row_kinds = [], []
    for _ in range(num_episodes):
        task = env_class.task("train", int(rng.integers(1024)), env_options["num_bugs"])
        env, done = env_class(**env_options), False
        ids = list(tokenizer.encode(env.reset(task)[0]))
        kinds = [0] * len(ids)
        while not done:
            action = env.explore(rng)
            observation, _, done, _, info = env.step(action)
            for text, kind in ((action, 1), (observation, 2 + env_class.tools.index(info["tool"]))):
                ids += tokenizer.encode(text)
                kinds += [kind] * (len(ids) - len(kinds))
        rows.append(torch.from_numpy(np.array(ids))), row_kinds.append(torch.from_numpy(np.array(kinds)))
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), nn.utils.rnn.pad_sequence(row_kinds, batch_first=True)


def warm_start(model, tokenizer, env_class, env_options, *, seed, steps, batch_size, learning_rate, observations,
               device):  # fmt: skip
    """Imitates the explorer: language modelling of its whole episodes, tool output included (or only its own tokens).

    The explorer knows no answer. This teaches the format, the tools, and what `read` and `test` will say after an
    edit. Returns metrics: episodes, tokens, seconds, and the loss on each kind of token in the last tenth of the steps.
    """
    start, num_tokens, losses = time.time(), 0, {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
        episodes = explorer_episodes(tokenizer, env_class, env_options, seed=seed, step=step, num_episodes=batch_size)
        tokens, kinds = (x.to(device) for x in episodes)
        is_target = (kinds > 0) if observations else (kinds == 1)
        b, t = (kinds > 0).nonzero(as_tuple=True)
        hidden = model(tokens[:, :-1], return_hidden=True)  # (B, T - 1, D)
        nll = F.cross_entropy(model.head(hidden[b, t - 1]), tokens[b, t], reduction="none")
        if step >= int(0.9 * steps):
            for kind, name in enumerate(("policy", *env_class.tools), 1):
                losses.setdefault(name, []).append(nll[kinds[b, t] == kind].detach())
        optimizer.zero_grad()
        (nll * is_target[b, t]).sum().div(is_target.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_tokens += int((kinds > 0).sum())
    metrics = {"warm_start/episodes": steps * batch_size, "warm_start/tokens": num_tokens,
               "warm_start/seconds": time.time() - start}  # fmt: skip
    losses = {name: torch.cat(values) for name, values in losses.items()}  # a rare tool may not have been called
    return metrics | {f"warm_start/loss_{name}": nll.mean().item() for name, nll in losses.items() if len(nll)}


# ---- 6. Advantages -------------------------------------------------------------------------------------------------


def returns_to_go(rewards, *, gamma):
    """G_k = r_k + gamma * G_{k+1} over turns: rewards (B, K) -> (B, K). Discounting is per turn: it does not depend on
    how long a message or an observation is (Sutton & Barto, eq. 3.8)."""
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for k in reversed(range(rewards.shape[1])):
        running = rewards[:, k] + gamma * running
        returns[:, k] = running
    return returns


def compute_advantages(rewards, turn_ids, loss_mask, group_ids, *, credit, gamma, baseline):
    """Returns minus a baseline, (B, T), zero where loss_mask is.

    rewards (B, K), turn_ids and loss_mask (B, T), group_ids (B,) in any order. credit "episode" gives every token the
    episode's return R from turn 0; "turn" gives it the reward-to-go of its turn. baseline: none; the mean of R over the
    batch or the group; or over the group's other episodes (RLOO, 2402.14740), which like none leaves the gradient
    unbiased. In a group of equal R the baseline is exactly R; a group of one gives exactly 0.
    """
    returns = returns_to_go(rewards, gamma=gamma)  # (B, K)
    R = returns[:, 0]
    advantages = returns if credit == "turn" else R[:, None].expand_as(returns)  # (B, K)
    if baseline != "none":
        same = (group_ids[:, None] == group_ids[None, :]) | (baseline == "batch")
        same = same.to(R.dtype)  # (B, B) 1 = same group
        size = same.sum(1)
        constant = (same * (R[:, None] - R[None, :]).abs()).amax(1) < 1e-6
        center = (same @ R - R) / (size - 1).clamp(min=1) if baseline == "loo" else same @ R / size
        advantages = (advantages - torch.where(constant, R, center)[:, None]) * (size > 1)[:, None]
    return advantages.gather(1, turn_ids.clamp(min=0)) * loss_mask  # (B, T)


# ---- 7. Loss -------------------------------------------------------------------------------------------------------


def compute_loss(newlogprobs, entropy, logprobs, advantages, loss_mask, weights, ref_logprobs=None, *,
                 kl_coef, ent_coef):  # fmt: skip
    """REINFORCE loss, -A * log pi (Williams 1992), with KL penalty and entropy bonus.

    All tensors (B, T), ref_logprobs where kl_coef > 0. Returns the weighted sum over tokens and a dict of sums over the
    mask, to be divided by the token count of the optimizer batch: so micro-batches add up to the same loss and metrics.
    """
    pg_loss = -advantages * newlogprobs
    loss = (weights * (pg_loss - ent_coef * entropy)).sum()
    with torch.no_grad():
        logratio = torch.where(loss_mask > 0, newlogprobs - logprobs, 0.0).clamp(-20, 20)  # 0: one step a batch
        metrics = {
            "losses/policy_loss": (weights * pg_loss).sum(),
            "losses/entropy": (loss_mask * entropy).sum(),
            "losses/old_approx_kl": (loss_mask * -logratio).sum(),  # k1 of http://joschu.net/blog/kl-approx.html
            "losses/approx_kl": (loss_mask * (logratio.exp() - 1 - logratio)).sum(),  # k3
        }
    if kl_coef > 0:
        d = torch.where(loss_mask > 0, ref_logprobs - newlogprobs, 0.0)
        ref_kl = d.exp() - d - 1  # k3, eq. 4 of 2402.03300
        loss = loss + kl_coef * (weights * ref_kl).sum()
        metrics["losses/ref_kl"] = (loss_mask * ref_kl).sum().detach()
    return loss, metrics


# ---- 8. Evaluation -------------------------------------------------------------------------------------------------


def play(model, tokenizer, env_class, env_options, tasks, *, temperature, seed, context_length):
    """Episodes on the tasks, as a list of Batches of up to 256, with noise of their own: training never notices."""
    batches = []
    for i in range(0, len(tasks), 256):
        envs = [env_class(**env_options) for _ in tasks[i : i + 256]]
        uniforms = draw_uniforms(seed, 10**9 + i, len(envs), envs[0].max_turns * env_class.turn_tokens)
        batches.append(rollout(model, tokenizer, envs, tasks[i : i + 256], torch.arange(len(envs)), uniforms,
                               temperature=temperature, context_length=context_length))  # fmt: skip
    return batches


def episode_metrics(batches):
    """Means over all episodes of the batches, truncated ones included: leaving them out would flatter success."""
    infos = [info for batch in batches for info in batch.infos]
    mean = lambda key: sum(info[key] for info in infos) / len(infos)  # noqa: E731
    return {
        "success_rate": mean("success"),
        "episodic_return": sum(batch.rewards.sum().item() for batch in batches) / len(infos),
        "episodic_length": mean("turns"),
        "hack_rate": mean("hacked"),
        "tool_calls": mean("tool_calls"),
        "invalid_action_rate": mean("errors") / max(mean("turns"), 1e-9),
        "truncation_rate": mean("truncated"),
        "tokens_per_episode": sum(batch.loss_mask.sum().item() for batch in batches) / len(infos),
    }


def evaluate(model, tokenizer, env_class, env_options, *, split, num_tasks, context_length):
    """Greedy episodes on num_tasks of the split, the same for all scripts and seeds; greedy success on a quarter as
    many of the unseen pairs; pass@8 at temperature 1 on an eighth of the tasks. Returns (metrics, greedy Batches)."""
    options = dict(temperature=0, seed=0, context_length=context_length)
    make_tasks = lambda name, n: [env_class.task(name, i, env_options["num_bugs"]) for i in range(n)]  # noqa: E731
    tasks = make_tasks(split, num_tasks)
    batches = play(model, tokenizer, env_class, env_options, tasks, **options)
    keys = ("success_rate", "episodic_return", "hack_rate", "tool_calls")
    metrics = {f"eval/{key}": value for key, value in episode_metrics(batches).items() if key in keys}
    repeated = [task for task in tasks[: num_tasks // 8] for _ in range(8)]
    sampled = play(model, tokenizer, env_class, env_options, repeated, **options | {"temperature": 1})
    solved = torch.tensor([info["success"] for batch in sampled for info in batch.infos]).view(-1, 8)
    metrics["eval/pass@8"] = solved.any(1).float().mean().item()
    if env_class is BugFixEnv:
        unseen = play(model, tokenizer, env_class, env_options, make_tasks("unseen", num_tasks // 4), **options)
        metrics["eval/unseen_pairs_success_rate"] = episode_metrics(unseen)["success_rate"]
    return metrics, batches


def informative_share(successes, samples, group_size):
    """Unbiased estimate, from successes out of samples >= group_size, of the chance that a group has both a success and
    a failure: 1 - C(f, G)/C(n, G) - C(s, G)/C(n, G). (1 - p^G - (1 - p)^G with p = s/n is biased low.)"""
    ways = math.comb(samples, group_size)
    return 1 - (math.comb(samples - successes, group_size) + math.comb(successes, group_size)) / ways


def describe_start(model, tokenizer, env_class, env_options, *, group_size, context_length):
    """Metrics of the starting policy: each of 64 training tasks played 2 * group_size times at temperature 1."""
    tasks = [env_class.task("train", i, env_options["num_bugs"]) for i in range(64)]
    n = 2 * group_size
    batches = play(model, tokenizer, env_class, env_options, [task for task in tasks for _ in range(n)],
                   temperature=1, seed=1, context_length=context_length)  # fmt: skip
    solved = torch.tensor([info["success"] for batch in batches for info in batch.infos]).view(-1, n).sum(1).tolist()
    keys = ("success_rate", "hack_rate", "tool_calls")
    metrics = {key: value for key, value in episode_metrics(batches).items() if key in keys}
    metrics["tasks_never_solved"] = solved.count(0) / len(tasks)
    metrics["tasks_always_solved"] = solved.count(n) / len(tasks)
    metrics["tasks_sometimes_solved"] = 1 - metrics["tasks_never_solved"] - metrics["tasks_always_solved"]
    metrics["informative_groups"] = sum(informative_share(s, n, group_size) for s in solved) / len(tasks)
    return {f"start/{key}": value for key, value in metrics.items()}


def transcript(tokenizer, batch, row):
    """One episode as text, a message or observation a line, trained tokens in brackets."""
    text, trained = "", 0
    for token, mask in zip(batch.tokens[row, : batch.lengths[row]].tolist(), batch.loss_mask[row].tolist()):
        if mask != trained:
            text, trained = text + ("\n⟦" if mask else "⟧\n"), mask
        text += tokenizer.decode([token])
    text, total, info = text + "⟧" * bool(trained), batch.rewards[row].sum().item(), batch.infos[row]
    return f"{text}\nreturn {total:.3g}, success {info['success']}, end: {info['end']}"


# ---- 9. Training ---------------------------------------------------------------------------------------------------


def refuse(message):
    """Bad input: one line on standard error, exit 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_args(args):
    """Refuses flags that cannot work, naming them and a value that does."""
    may_be_zero = ("seed", "num_iterations", "warm_start_steps", "ent_coef", "kl_coef", "tool_cost", "tool_cost_warmup",
                   "process_reward", "gamma", "step_gamma", "gae_lambda", "step_adv_coef", "vf_coef",
                   "critic_warmup_steps")  # fmt: skip
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in may_be_zero):
            refuse(f"{flag} must be {'a number of at least 0' if name in may_be_zero else 'a positive number'}; "
                   f"the default is {getattr(Args, name)}")  # fmt: skip
        if name in ("gamma", "step_gamma", "gae_lambda") and value > 1:
            refuse(f"{flag} must lie in [0, 1]; try 1")
    if args.cuda and not torch.cuda.is_available():
        refuse("--cuda: this machine has no usable GPU; run without --cuda")
    if args.d_model % (2 * args.n_heads):
        refuse(f"--d-model {args.d_model} must be a multiple of twice --n-heads {args.n_heads}; "
               f"try --d-model {32 * args.n_heads}")  # fmt: skip
    if args.seed >= 2**64:
        refuse(f"--seed {args.seed} has more than 64 bits; try --seed 1")
    if args.context_length == 1:
        refuse("--context-length 1 leaves no room for an episode; try --context-length 512")
    if args.eval_tasks < 8:
        refuse(f"--eval-tasks {args.eval_tasks} is too few for pass@8 on an eighth of them; try --eval-tasks 64")
    if args.env_id == "number" and (args.num_bugs != 1 or args.reward != "hidden"):
        refuse("--num-bugs and --reward belong to --env-id bugfix; leave them out with --env-id number")
    if args.reward == "similarity" and args.malformed == "error":
        refuse("--reward similarity ends an episode with -1 at a malformed call; leave out --malformed error")
    if args.env_id == "bugfix" and args.num_bugs > 2:
        refuse(f"--num-bugs {args.num_bugs}: few functions admit more than two; try --num-bugs 2")


def load_checkpoint(path, flag):
    """A checkpoint as a dict, through torch's safe loader: tensors and plain values only."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        refuse(f"{flag} {path}: no such file; checkpoints are runs/<run>/checkpoint.pt")
    except Exception as error:  # torch raises many types for a file that is not a checkpoint
        refuse(f"{flag} {path}: not a readable checkpoint ({type(error).__name__}); give a runs/<run>/checkpoint.pt")
    if not isinstance(checkpoint, dict) or "model" not in checkpoint:
        refuse(f"{flag} {path}: holds no model; give a runs/<run>/checkpoint.pt")
    return checkpoint


def save_checkpoint(path, **state):
    """Atomic: a kill during the write leaves the previous checkpoint whole."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def start_tracking(args, name):
    """A Weights & Biases run, offline where there is no key."""
    import wandb

    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
    settings = wandb.Settings(init_timeout=15, silent=True)
    return wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, name=name, mode=mode,
                      config=json.loads(json.dumps(vars(args), default=str)), settings=settings)  # fmt: skip


def survive(call, *args, **kwargs):
    """Result of a call into the tracker, or None and a warning: whatever it raises must not cost a run."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        print(f"warning: --track: {type(error).__name__}: {error}".splitlines()[0] + "; metrics stay local", flush=True)


def gather(batch, device):
    """The episodes of all processes as one Batch on each of them, in the order of their ranks."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [x.cpu() if torch.is_tensor(x) else x for x in batch])

    def join(name, values):
        rows = [row for part in values for row in part]
        if not torch.is_tensor(values[0]):
            return rows
        if values[0].dim() == 1:
            return torch.cat(values).to(device)
        return nn.utils.rnn.pad_sequence(rows, True, -1 if name == "turn_ids" else 0).to(device)

    return Batch(*map(join, Batch._fields, zip(*parts)))


def train(args):
    check_args(args)
    episodes = args.num_groups * args.group_size
    if args.group_size == 1 and args.baseline in ("mean", "loo"):
        refuse(f"--group-size 1 leaves --baseline {args.baseline} nothing to compare with; try --group-size 8")
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, or its first product raises
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # costs a tenth of a run; none is read unwritten
    start_time = time.time()
    device = torch.device("cuda" if args.cuda else "cpu")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
    if args.num_groups % world_size or episodes < world_size * getattr(args, "num_minibatches", 1):
        refuse(f"--num-groups {args.num_groups} cannot be shared by {world_size} processes; "
               f"try --num-groups {8 * world_size}")  # fmt: skip
    if world_size > 1:
        if args.cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.cuda else "gloo")
    if rank > 0:  # every process computes all that is not shared out; the first one reports it
        sys.stdout = open(os.devnull, "w")
    env_class = ENVS[args.env_id]
    max_turns = args.max_turns or env_class.default_turns(args.num_bugs)
    env_options = dict(
        max_turns=max_turns, num_bugs=args.num_bugs, reward=args.reward, process_reward=args.process_reward,
        malformed=args.malformed or env_class.malformed,
        tool_cost=env_class.tool_cost if args.tool_cost is None else args.tool_cost,
    )  # fmt: skip
    token_budget = max_turns * env_class.turn_tokens
    context_length = args.context_length or longest_episode(env_class, max_turns)
    tokenizer = Tokenizer(env_class.vocabulary())
    torch.manual_seed(args.seed)
    sizes = dict(d_model=args.d_model, n_layers=args.n_layers, n_heads=args.n_heads)
    model = TinyAgent(len(tokenizer.words), **sizes).to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.0, fused=True)

    # A run is a folder: args.json, metrics.jsonl, checkpoint.pt
    plain_args = json.loads(json.dumps(vars(args), default=str))
    checkpoint, iteration, totals = None, 0, {"global_step": 0, "charts/total_tokens": 0, "charts/total_episodes": 0}
    if args.resume:
        checkpoint = load_checkpoint(args.resume, "--resume")
        if (script := checkpoint.get("script")) != Path(__file__).stem:
            refuse(f"--resume {args.resume}: not a run of this script but of {script or 'tinyagent'}.py; "
                   "try --init-from to begin one with it")  # fmt: skip
        run_dir = args.resume.parent
        plain_args["init_from"] = plain_args["init_from"] or checkpoint["args"]["init_from"]  # need not be given again
        free = ("resume", "track", "wandb_project_name", "wandb_entity", "runs_dir", "save_every")
        for name, value in checkpoint["args"].items():
            if name not in free and (given := plain_args.get(name)) != value:
                flag = f"--{name.replace('_', '-')}"
                advice = f"leave {flag} out" if value is None else f"give {flag} {value}"
                if isinstance(value, bool):
                    advice = f"give --{'' if value else 'no-'}{flag[2:]}"
                refuse(f"--resume: the run had {flag} {value}, not {given}; {advice}")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iteration, totals = checkpoint["iteration"], checkpoint["totals"]
        if not (run_dir / "metrics.jsonl").exists():
            refuse(f"--resume {args.resume}: no metrics.jsonl beside it; resume a checkpoint in its run's own folder")
        if rank == 0:
            lines = [line for line in (run_dir / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
            kept = [line + "\n" for line in lines if json.loads(line)["iteration"] <= iteration]
            (run_dir / "metrics.tmp").write_text("".join(kept))
            os.replace(run_dir / "metrics.tmp", run_dir / "metrics.jsonl")
    else:
        run_dir = args.runs_dir / f"{Path(__file__).stem}__{args.env_id}__{args.seed}__{int(time.time())}_{os.getpid()}"
        start = load_checkpoint(args.init_from, "--init-from") if args.init_from else None
        try:
            if start is not None:
                model.load_state_dict(start["model"])
            if rank == 0:
                run_dir.mkdir(parents=True)
                (run_dir / "args.json").write_text(json.dumps(plain_args, indent=2))
        except (KeyError, TypeError, RuntimeError):
            refuse(f"--init-from {args.init_from}: its model does not fit --env-id {args.env_id} "
                   "and the flags of the model's size")  # fmt: skip
        except OSError as error:
            refuse(f"--runs-dir {args.runs_dir}: {error.strerror}; "
                   "give a folder that can be written, e.g. --runs-dir /tmp/runs")  # fmt: skip
    metrics_file = open(run_dir / "metrics.jsonl" if rank == 0 else os.devnull, "a")
    tracker = survive(start_tracking, args, run_dir.name) if args.track and rank == 0 else None
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{run_dir} on {device}: {num_parameters:,} parameters, context {context_length}", flush=True)

    def report(title, metrics):
        print(f"  {title}: " + "  ".join(f"{key.split('/')[1]} {x:.4g}" for key, x in metrics.items()), flush=True)

    def log(iteration, metrics):
        metrics_file.write(json.dumps({"iteration": iteration} | metrics) + "\n")
        metrics_file.flush()
        if tracker:
            survive(tracker.log, metrics, step=iteration)

    def save(iteration):
        if rank > 0:
            return
        if not all(p.isfinite().all() for p in parameters):
            sys.exit(f"error: weights are not finite after iteration {iteration}; they are not saved; "
                     "try a lower --learning-rate or --warm-start-learning-rate")  # fmt: skip
        save_checkpoint(run_dir / "checkpoint.pt", script=Path(__file__).stem, args=plain_args, iteration=iteration,
                        model=model.state_dict(), optimizer=optimizer.state_dict(), totals=totals,
                        reference=reference.state_dict())  # fmt: skip

    def run_evaluation():
        metrics, batches = evaluate(model, tokenizer, env_class, env_options, split=args.eval_split,
                                    num_tasks=args.eval_tasks, context_length=context_length)  # fmt: skip
        report(f"{args.eval_split} tasks", metrics)
        if iteration in (0, args.num_iterations):
            print(transcript(tokenizer, batches[0], 0), flush=True)
        return metrics

    if checkpoint is None:
        metrics = {}
        if not args.init_from:
            metrics = warm_start(model, tokenizer, env_class, env_options, seed=args.seed, steps=args.warm_start_steps,
                                 batch_size=args.warm_start_batch_size or env_class.warm_start_batch_size,
                                 learning_rate=args.warm_start_learning_rate,
                                 observations=args.warm_start_observations, device=device)  # fmt: skip
            report("warm start", metrics)
        described = describe_start(model, tokenizer, env_class, env_options, group_size=args.group_size,
                                   context_length=context_length)  # fmt: skip
        report("start", described)
        log(0, metrics | described | run_evaluation())
    if world_size > 1:
        for p in parameters:  # one start for all processes, whatever their rounding
            dist.broadcast(p.data, 0)
    reference = deepcopy(model).requires_grad_(False)  # pi_ref of the KL penalty: the starting policy
    if checkpoint is None:
        save(0)
    else:
        reference.load_state_dict(checkpoint["reference"])

    for iteration in range(iteration + 1, args.num_iterations + 1):
        iteration_start = time.time()
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / args.num_iterations)
        kl_coef = args.kl_coef * (1 - (iteration - 1) / args.num_iterations if args.anneal_kl else 1)

        # (1) Rollout: group_size episodes on each of num_groups tasks, each process its share of the groups
        tool_cost = env_options["tool_cost"] * min(1.0, iteration / max(1, args.tool_cost_warmup))
        indices = np.random.default_rng([args.seed, iteration]).integers(2**31, size=args.num_groups)
        share = args.num_groups // world_size
        group_ids = torch.arange(rank * share, (rank + 1) * share).repeat_interleave(args.group_size)
        tasks = [env_class.task("train", int(indices[group]), args.num_bugs) for group in group_ids]
        envs = [env_class(**env_options | {"tool_cost": tool_cost}) for _ in tasks]
        uniforms = draw_uniforms(args.seed, iteration, episodes, token_budget)[rank * len(tasks) :][: len(tasks)]
        batch = rollout(model, tokenizer, envs, tasks, group_ids, uniforms, temperature=args.temperature,
                        context_length=context_length)  # fmt: skip
        if world_size > 1:
            batch = gather(batch, device)
        rollout_seconds = time.time() - iteration_start
        micro_batch_size = args.micro_batch_size or (episodes if args.cuda else max(16, 2048 // batch.tokens.shape[1]))

        # (2) Mask: which tokens are trained, the sampled ones; with --no-mask-observations what the tools wrote too
        loss_mask = batch.loss_mask
        if not args.mask_observations:
            loss_mask = (batch.turn_ids >= 0).float()
            with torch.no_grad():  # log pi_old of what the policy did not sample
                logprobs = torch.cat([score(model, *rows, args.temperature)[0] for rows in zip(
                    batch.tokens.split(micro_batch_size), loss_mask.split(micro_batch_size))])  # fmt: skip
            batch = batch._replace(logprobs=torch.where(batch.loss_mask > 0, batch.logprobs, logprobs))
        if args.filter_truncated:
            cut = torch.tensor([i["truncated"] or i["end"] == "turn_limit" for i in batch.infos], device=device)
            loss_mask = loss_mask * ~cut[:, None]

        # (3) Advantages
        advantages = compute_advantages(batch.rewards, batch.turn_ids, loss_mask, batch.group_ids, credit=args.credit,
                                        gamma=args.gamma, baseline=args.baseline)  # fmt: skip

        # (4) Update: rows without advantage, penalty and bonus, sorted apart, take the forward pass only
        update_start, update_metrics, num_steps = time.time(), {}, 0
        has_signal = advantages.any(1) | loss_mask.any(1) & (kl_coef > 0 or args.ent_coef > 0)
        minibatches = [torch.arange(episodes, device=device)]  # the batch is used once, whole: one optimizer step
        for mb_inds in minibatches:
            # Denominators are those of the whole minibatch, so that micro_batch_size does not change the objective
            weights = loss_mask[mb_inds] / (len(mb_inds) * token_budget)
            token_count = loss_mask[mb_inds].sum().clamp(min=1)
            sums = {"losses/grad_norm": torch.zeros((), device=device)}
            optimizer.zero_grad()
            order = (batch.lengths[mb_inds] + 10**6 * has_signal[mb_inds]).argsort()[rank::world_size]
            for micro in order.split(micro_batch_size):
                inds = mb_inds[micro]
                length = batch.lengths[inds].max()
                tokens, mask = batch.tokens[inds, :length], loss_mask[inds, :length]
                ref_logprobs = None
                if kl_coef > 0:
                    with torch.no_grad():
                        ref_logprobs, _, _ = score(reference, tokens, mask, args.temperature)
                with torch.set_grad_enabled(bool(has_signal[inds].any())):
                    newlogprobs, entropy, _ = score(model, tokens, mask, args.temperature)
                    loss, micro_sums = compute_loss(
                        newlogprobs, entropy, batch.logprobs[inds, :length], advantages[inds, :length], mask,
                        weights[micro, :length], ref_logprobs, kl_coef=kl_coef, ent_coef=args.ent_coef,
                    )  # fmt: skip
                if loss.requires_grad:
                    loss.backward()
                for key, value in micro_sums.items():
                    sums[key] = sums.get(key, 0.0) + (value if key == "losses/policy_loss" else value / token_count)
            if world_size > 1:  # the sum over processes is what one process computes
                for p in parameters:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                for tensor in (*(p.grad for p in parameters), *sums.values()):
                    dist.all_reduce(tensor)
            has_step = has_signal[mb_inds].any()  # without any signal Adam's momentum alone would move the weights
            if has_step:
                sums["losses/grad_norm"] = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            for key in ("losses/grad_norm", "losses/entropy"):  # a policy of NaN may have no signal at all
                if not sums[key].isfinite():
                    sys.exit(1 if rank else f"error: {key} is {sums[key].item()} in iteration {iteration}; the last "
                             f"metrics are in {run_dir}/metrics.jsonl, the last checkpoint, which is finite, in "
                             f"{run_dir}/checkpoint.pt")  # fmt: skip
            if has_step:
                optimizer.step()
                num_steps += 1
            for key, value in sums.items():
                update_metrics.setdefault(key, []).append(value)

        # (5) Log: means over all the iteration's episodes, and over all minibatches
        turns = sum(info["turns"] for info in batch.infos)
        totals["global_step"] += turns
        totals["charts/total_tokens"] += int(batch.loss_mask.sum())
        totals["charts/total_episodes"] += episodes
        group_returns = batch.rewards.sum(1).view(args.num_groups, args.group_size)
        trained = advantages[loss_mask > 0] if loss_mask.any() else torch.zeros(1)
        seconds = time.time() - iteration_start
        metrics = {f"charts/{key}": value for key, value in episode_metrics([batch]).items()} | totals
        metrics |= {key: torch.stack(values).mean().item() for key, values in update_metrics.items()}
        metrics |= {
            "charts/frac_zero_std_groups": (group_returns.amax(1) - group_returns.amin(1) < 1e-6).float().mean().item(),
            "charts/learning_rate": optimizer.param_groups[0]["lr"],
            "charts/SPS": turns / seconds,
            "losses/advantage_mean": trained.mean().item(),
            "losses/advantage_std": trained.std(correction=0).item(),
            "time/rollout": rollout_seconds,
            "time/env": sum(info["env_seconds"] for info in batch.infos),
            "time/update": time.time() - update_start,
        }
        shown = ("charts/success_rate", "charts/episodic_return", "charts/tool_calls", "losses/entropy",
                 "losses/approx_kl", "charts/frac_zero_std_groups")  # fmt: skip
        print(f"{iteration}/{args.num_iterations}  "
              + "  ".join(f"{key.split('/')[1]} {metrics[key]:.3f}" for key in shown)
              + f"  {seconds:.2f}s, {(args.num_iterations - iteration) * seconds:.0f}s left", flush=True)  # fmt: skip
        if metrics["charts/truncation_rate"] == 1:
            print("warning: every episode was cut by the context, nothing can be learned; raise --context-length",
                  flush=True)  # fmt: skip
        elif not advantages.any():
            skipped = "" if num_steps else ", no optimizer step was taken"
            print(f"warning: every group is constant: its rewards teach nothing{skipped}", flush=True)
        if iteration % args.eval_every == 0 or iteration == args.num_iterations:
            metrics |= run_evaluation()
        log(iteration, metrics)
        if iteration % args.save_every == 0 or iteration == args.num_iterations:
            save(iteration)
    metrics_file.close()
    print(f"done in {time.time() - start_time:.0f}s: {run_dir}", flush=True)
    if tracker:
        survive(tracker.finish)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    train(tyro.cli(Args))
