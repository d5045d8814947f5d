# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy>=1.26", "tyro>=0.9", "wandb>=0.18"]
# ///
"""PPO (Proximal Policy Optimization, 1707.06347) for a language model that uses tools over many
turns.

    for iteration in range(num_iterations):
        play group_size episodes on each of num_groups tasks        # what tools write: loss_mask 0
        delta[t] = r[t] + gamma * V[t + 1] - V[t]                   # t counts sampled tokens only
        A[t] = delta[t] + gamma * gae_lambda * A[t + 1]             # GAE; truncated: V goes on
        for each minibatch: ascend min(ratio * A, clip(ratio) * A) - vf_coef * 0.5 * (V - R)^2
    start from imitation of an explorer that knows no answer; evaluate greedily on test tasks

What reinforce.py has not: a critic, whose value of the state before a token (or turn) replaces the
group's mean; a clipped ratio, so that a batch serves several steps. What tools write is part of the
state, never a step: it does not decay the advantage and its values are not read. The critic is a
linear head on the policy's hidden states, fitted alone to the start's episodes before the first
update, so that its first errors do not disturb the imitated policy.

Where implementations differ, the default here: bootstrap at truncation, not at a turn limit, which
is part of the task; whitening once per batch over sampled tokens; no value clipping (--clip-vloss:
that of OpenAI baselines) and no dual clipping (verl: --dual-clip 3); token-mean of both losses; one
value a sampled token (--gae-unit turn: one a turn, read before it).

Shapes: B episodes = num_groups x group_size (G), K turns, T tokens, V vocabulary, D hidden size.

    python ppo.py                    # BugFix on the CPU, a few minutes
    python ppo.py --cuda --seed 2
    python ppo.py --env-id number    # hidden number, seconds
"""

import difflib
import itertools
import json
import math
import os
import re
import sys
import textwrap
import time
import zlib
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple, Optional

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro

# ---- 1. Args -------------------------------------------------------------------------------------


@dataclass
class Args:
    seed: int = 1  # decides weights, warm start, order of training tasks and sampling noise
    cuda: bool = False  # run on the GPU; without one the script stops
    torch_deterministic: bool = True  # use deterministic kernels only
    track: bool = False  # log to Weights & Biases too; offline where there is no key
    wandb_project_name: str = "agentic-rl"  # Weights & Biases project
    wandb_entity: Optional[str] = None  # Weights & Biases team
    env_id: Literal["bugfix", "number"] = "bugfix"  # BugFix gym or hidden number
    num_iterations: int = 50  # iterations of rollout and update; 0 stops after the warm start
    num_groups: int = 32  # groups in a batch, each on one task
    group_size: int = 8  # episodes in a group
    max_turns: Optional[int] = None  # turn limit of an episode (None: the environment's)
    learning_rate: float = 2e-3  # learning rate of AdamW, decaying linearly to zero
    max_grad_norm: float = 1.0  # gradient norm is clipped to this
    temperature: float = 1.0  # sampling temperature, in the rollout and in the loss
    ent_coef: float = 0.0  # coefficient of the entropy bonus
    kl_coef: float = 0.1  # coefficient of the KL penalty to the frozen starting policy
    anneal_kl: bool = True  # let it fade linearly to zero, like the learning rate
    mask_observations: bool = True  # keep tool output out of the loss; the ablation trains on it
    filter_truncated: bool = False  # no loss on episodes out of turns or context; they still vote
    warm_start_steps: int = 400  # gradient steps of imitation before the first iteration
    warm_start_batch_size: Optional[int] = None  # episodes in such a step (None: the environment's)
    warm_start_learning_rate: float = 6e-3  # peak learning rate of the imitation
    warm_start_observations: bool = True  # imitate tool output too, not the explorer's tokens only
    eval_every: int = 25  # iterations between evaluations
    eval_tasks: int = 512  # tasks in an evaluation, played greedily
    eval_split: Literal["dev", "test"] = "test"  # tune on dev, report on test
    save_every: int = 10  # iterations between checkpoints
    init_from: Optional[Path] = None  # checkpoint to begin with instead of a warm start
    resume: Optional[Path] = None  # checkpoint of the run to go on with, with the run's own flags
    runs_dir: Path = Path("runs")  # folder of the runs
    micro_batch_size: Optional[int] = None  # episodes in a forward pass (None: by length; GPU: all)
    d_model: int = 64  # width of the model
    n_layers: int = 2  # its blocks
    n_heads: int = 2  # its attention heads
    context_length: Optional[int] = None  # its context (None: the environment's longest episode)
    num_bugs: int = 1  # BugFix: bugs in a task
    reward: Literal["hidden", "public", "partial", "similarity"] = "hidden"  # BugFix: what pays
    tool_cost: Optional[float] = None  # cost of an executed call (None: BugFix 0, number 0.05)
    tool_cost_warmup: int = 0  # iterations over which the tool cost rises to its value
    process_reward: float = 0.0  # reward of a well-formed call
    malformed: Optional[Literal["error", "end"]] = None  # call (None: BugFix error, number end)

    # Algorithm specific arguments
    gae_unit: Literal["token", "turn"] = "token"  # a step of GAE: a sampled token, or a turn
    gamma: float = 1.0  # discount per step
    gae_lambda: float = 0.95  # 1: returns minus values; 0: one-step differences of values
    norm_adv: bool = True  # whiten the advantages over the batch's sampled tokens
    clip_coef: float = 0.2  # ratio is clipped to [1 - clip_coef, 1 + clip_coef]
    dual_clip: Optional[float] = None  # where A < 0, the loss is at most -A times this
    vf_coef: float = 0.5  # coefficient of the value loss
    clip_vloss: bool = False  # clip the value's change like the ratio
    critic_warmup_steps: int = 300  # gradient steps on the value head alone, before iteration 1
    update_epochs: int = 1  # passes over a batch
    num_minibatches: int = 4  # optimizer steps in a pass


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


# ---- 3. Model ------------------------------------------------------------------------------------


class Tokenizer:
    """Closed vocabulary of words with the space before them: decode(encode(text)) == text. Ids are
    only ever appended to an episode: what the model wrote is never encoded again."""

    def __init__(self, vocabulary):
        self.words = ["<pad>", *vocabulary]
        self.ids = {word: i for i, word in enumerate(self.words)}

    @lru_cache(maxsize=1 << 13)  # noqa: B019
    def encode(self, text):
        """Text to a tuple of ids. Raises ValueError naming a word outside the vocabulary."""
        words = PIECES.findall(text)
        unknown = [word for word in words if word not in self.ids]
        if unknown or "".join(words) != text:
            raise ValueError(f"not in the vocabulary: {(unknown or [text])[0]!r} in {text!r}")
        return tuple(self.ids[word] for word in words)

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)


def rotate(x, rotation):
    """Rotary position embedding (2104.09864): turns each pair of neighbouring features of x
    (B, T, ..., D/H) by its position's angle, a product with rotation (B or 1, T, ..., D/H/2)."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotation).flatten(
        -2
    )


class Block(nn.Module):
    """Pre-norm transformer block, at first nearly the identity: its projections start at zero."""

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
        """x (B, T, D) -> (B, T, D), or (B, Q, D) at the positions at (B, Q). See TinyAgent."""
        B, T, _ = x.shape
        rows = torch.arange(B, device=x.device)[:, None]
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.n_heads, -1)
        (q, k), v, query_slots = rotate(qkv[:, :, :2], rotation).unbind(2), qkv[:, :, 2], slots
        if at is not None:  # keys and values of all positions, queries of these
            x, q, query_slots = x[rows, at], q[rows, at], slots[rows, at]
        if cache is not None:
            cache[0][rows, :, slots], cache[1][rows, :, slots] = k, v
        k, v = (k.transpose(1, 2), v.transpose(1, 2)) if cache is None else cache
        mask = None  # causal; k and v are (B, H, T or S, D/H)
        if cache is not None or at is not None:
            seen = torch.arange(k.shape[2], device=x.device) <= query_slots[..., None]
            mask = torch.where(seen, 0.0, -torch.inf)[:, None]  # (B, 1, T or Q, T or S)
        q = q.transpose(1, 2)  # (B, H, T or Q, D/H)
        if cache is not None and q.shape[2] == 1:  # decoding: the fused kernel takes twice as long
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
        frequencies = 1000.0 ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("frequencies", frequencies)  # (D/H/2,)

    def forward(self, tokens, cache=None, slots=None, *, at=None, return_hidden=False):
        """tokens (B, T) -> logits (B, T, V), row t predicting token t + 1, or hidden states
        (B, T, D) before the head. With at (B, Q), at these positions only: nobody reads what would
        follow a token of the tools, so the last block takes its key and value and spares the rest.

        With a cache (L, 2, B, H, S, D/H), token t of row b stands at position slots[b, t] (B, T):
        its key and value are written there and it attends to slots up to its own, in prefill as in
        decoding. Padding goes to the last slot, S - 1, which no real token may use.
        """
        B, T = tokens.shape
        if slots is None:
            slots = torch.arange(T, device=tokens.device)[None]  # (1, T)
        angles = (slots[..., None] * self.frequencies)[:, :, None, None]  # (1 or B, T, 1, 1, D/H/2)
        rotation, slots = torch.polar(torch.ones_like(angles), angles), slots.expand(B, T)
        x = self.embed(tokens)  # (B, T, D)
        for i, block in enumerate(self.blocks):
            is_last = i == len(self.blocks) - 1
            x = block(
                x, slots, rotation, None if cache is None else cache[i], at if is_last else None
            )
        hidden = self.norm(x)
        return hidden if return_hidden else self.head(hidden)

    def make_cache(self, batch_size, num_slots):
        heads, size = self.blocks[0].n_heads, self.embed.weight.shape[1]
        shape = (len(self.blocks), 2, batch_size, heads, num_slots, size // heads)
        return self.embed.weight.new_zeros(shape)


def sample_tokens(logits, uniforms, temperature):
    """Inverse-CDF sampling: logits (N, V), CPU uniforms (N,) in [0, 1) -> ids (N,) and their
    log-probabilities (N,). Draws the first token whose cumulative probability exceeds uniform *
    total, hence never one of probability zero. Temperature 0 is greedy."""
    logprobs = F.log_softmax(logits / (temperature or 1.0), dim=-1)
    ids = logits.argmax(-1)
    if temperature:
        cdf = logprobs.double().exp().cpu().cumsum(-1)  # CUDA has no deterministic cumsum
        ids = (cdf <= uniforms.double()[:, None] * cdf[:, -1:]).sum(-1).to(logits.device)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def sample_turn(model, cache, starts, pending, uniforms, *, budgets, stop_id, temperature):
    """Absorbs each row's pending ids in one pass, then samples its message until it closes (with
    stop_id, if any) or its budget is spent. Returns N lists of ids and their log-probabilities.

    starts (N,): cached tokens; pending: N lists of ids not yet in the cache, best sorted by length,
    since 64 rows at a time are padded; uniforms (N, longest budget); budgets (N,) in tokens. The
    last sampled id is not in the cache: it has to be the first of the next pending ids.
    """
    device, N = starts.device, len(pending)
    lengths = torch.tensor([len(ids) for ids in pending], device=device)
    trash = cache.shape[-2] - 1  # padding and closed rows write to a slot that is never read
    last_logits = []
    for part in (slice(n, n + 64) for n in range(0, N, 64)):
        chunk = np.array(list(itertools.zip_longest(*pending[part], fillvalue=0)), np.int64).T
        chunk = torch.from_numpy(chunk).to(device)  # (n, C)
        columns = torch.arange(chunk.shape[1], device=device)
        slots = torch.where(columns < lengths[part, None], starts[part, None] + columns, trash)
        logits = model(chunk, cache[:, :, part], slots, at=lengths[part, None] - 1)
        last_logits.append(logits[:, 0])
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
    return [x[:n] for x, n in zip(ids, counts)], [x[:n] for x, n in zip(logprobs, counts)]


# ---- 4. Rollout ----------------------------------------------------------------------------------


class Batch(NamedTuple):
    """B episodes of up to K turns and T tokens. What the policy did not sample has loss_mask 0."""

    tokens: torch.Tensor  # (B, T) int64, padded with 0
    lengths: torch.Tensor  # (B,)
    loss_mask: torch.Tensor  # (B, T) 1 = sampled by the policy, the closing token included
    logprobs: torch.Tensor  # (B, T) log pi_old of token t at the sampling temperature, masked
    turn_ids: torch.Tensor  # (B, T) -1 on prompt and padding; an observation has its turn's
    rewards: torch.Tensor  # (B, K)
    terminated: torch.Tensor  # (B,) bool: submitted, malformed or out of turns, part of the task
    truncated: torch.Tensor  # (B,) bool: out of context, or the environment said so
    group_ids: torch.Tensor  # (B,)
    anchors: list  # B lists: the state before each turn
    infos: (
        list  # B dicts: end, success, hacked, pair, tools, turns, tool_calls, errors, env_seconds
    )


def derive_seed(*key):
    """One 63-bit seed from a tuple of integers: every random number is a function of its key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def draw_uniforms(seed, iteration, num_rows, num_tokens):
    """A uniform for each token that may be sampled, (rows, tokens), keyed by (seed, iteration)."""
    generator = torch.Generator().manual_seed(derive_seed(seed, iteration))
    return torch.rand(num_rows, num_tokens, generator=generator)


@torch.no_grad()
def rollout(model, tokenizer, envs, tasks, group_ids, uniforms, *, temperature, context_length):
    """Plays one episode in each environment, all together, turn by turn. Returns a Batch.

    uniforms (B, max_turns * turn_tokens) decide the samples. What an environment raises is raised.
    """
    device, env = next(model.parameters()).device, envs[0]
    stop_id = tokenizer.ids[env.stop] if env.stop else None
    tokens = [list(tokenizer.encode(e.reset(t)[0])[:context_length]) for e, t in zip(envs, tasks)]
    pending = [list(ids) for ids in tokens]  # not in the cache yet
    segments = [[len(ids)] for ids in tokens]  # lengths: prompt, then message and answer in turn
    logprobs, anchors = [[] for _ in envs], [[] for _ in envs]
    rewards = [[0.0] * env.max_turns for _ in envs]
    zeros = dict(turns=0, tool_calls=0, errors=0, env_seconds=0.0, success=False, hacked=False)
    infos = [{"pair": getattr(t, "pair", str(t)), "end": None, "tools": [], **zeros} for t in tasks]
    truncated = torch.zeros(len(envs), dtype=torch.bool)
    live, kept, cache = list(range(len(envs))), None, None
    for turn in range(env.max_turns + 1):  # the last absorbs the observation of a truncated episode
        room = [min(env.turn_tokens, context_length - len(tokens[b])) for b in live]
        budgets = [0 if infos[b]["end"] else n for b, n in zip(live, room)]
        starts = [len(tokens[b]) - len(pending[b]) for b in live]
        num_slots = max(len(tokens[b]) for b in live) + env.turn_tokens + 1
        old, cache = cache, model.make_cache(len(live), num_slots)
        if old is not None:  # finished episodes leave the batch
            old, rows = old[..., : max(starts), :], torch.tensor(kept, device=device)
            torch.index_select(old, 2, rows, out=cache[..., : max(starts), :])
        first = min(turn, env.max_turns - 1) * env.turn_tokens
        messages, message_logprobs = sample_turn(
            model, cache, torch.tensor(starts, device=device), [pending[b] for b in live],
            uniforms[live, first : first + env.turn_tokens], stop_id=stop_id,
            budgets=torch.tensor(budgets, device=device), temperature=temperature,
        )  # fmt: skip
        kept = []
        for n, b in enumerate(live):
            info, message = infos[b], messages[n]
            tokens[b] += message
            segments[b].append(len(message))
            logprobs[b] += message_logprobs[n]
            if len(message) < env.turn_tokens and (not message or message[-1] != stop_id):
                info["end"] = info["end"] or "context_limit"  # cut: neither executed nor malformed
                truncated[b] = True
                continue
            anchors[b].append(envs[b].anchor)
            start = time.perf_counter()
            observation, reward, is_over, is_cut, result = envs[b].step(tokenizer.decode(message))
            info["env_seconds"] += time.perf_counter() - start
            if reward is None or not math.isfinite(reward):
                where = f"episode {b} (task {info['pair']}), turn {turn}"
                raise ValueError(f"{where}: the environment's reward is {reward}")
            rewards[b][turn] = float(reward)
            tool, error = result["tool"], result["error"]
            info["turns"] += 1
            info["tools"].append(tool)
            info["errors"] += error
            info["tool_calls"] += tool in ("read", "test", "call") and not error
            if is_over or is_cut:
                info |= {key: result[key] for key in ("end", "success", "hacked")}
            if is_over:
                continue
            answer = tokenizer.encode(observation)[: context_length - len(tokens[b])]
            pending[b] = [message[-1], *answer]  # the last sampled token is not in the cache either
            tokens[b] += answer
            segments[b].append(len(answer))
            kept.append(n)
        kept.sort(key=lambda n: len(pending[live[n]]))  # sample_turn pads them in parts
        live = [live[n] for n in kept]
        if not live:
            break
    lengths = [len(row) for row in tokens]
    # Segment of each token: 0 the prompt, then odd numbers messages and even ones their answers
    segment_ids = [i for row in segments for i in range(len(row))]
    segment = np.repeat(segment_ids, [n for row in segments for n in row])
    sampled, flat_logprobs = segment % 2 == 1, np.zeros(len(segment), np.float32)
    flat_logprobs[sampled] = np.fromiter(itertools.chain(*logprobs), np.float32)

    def pad(flat, value=0):
        rows = torch.from_numpy(flat).split(lengths)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value).to(device)

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
    """Log-probability (B, T) of token t given those before it, and entropy (B, T) of the softmax it
    came from, at the sampling temperature, where mask is 1; zero elsewhere. Row t - 1 of the logits
    scores token t. Also returns the hidden states (N, D) that the N masked tokens came from."""
    is_target = mask[:, 1:] > 0
    b, t = is_target.nonzero(as_tuple=True)
    count = is_target.sum(1).max()
    at = (~is_target).long().argsort(dim=1, stable=True)[:, :count]  # (B, Q) targets first
    hidden = model(tokens[:, :-1], at=at, return_hidden=True)[is_target.gather(1, at)]  # (N, D)
    all_logprobs = F.log_softmax(model.head(hidden) / temperature, dim=-1)  # (N, V)
    logprobs = all_logprobs.gather(1, tokens[b, t + 1, None])[:, 0]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    empty = torch.zeros_like(tokens, dtype=logprobs.dtype)
    return *(empty.index_put((b, t + 1), x) for x in (logprobs, entropy)), hidden


# ---- 5. Warm start -------------------------------------------------------------------------------


def explorer_episodes(tokenizer, make_env, *, seed, step, num_episodes):
    """Episodes of the scripted explorer on 1,024 training tasks. Returns tokens (B, T) and kinds
    (B, T): 0 prompt and padding, 1 the explorer's own, 2 + i the answer of env.tools[i]."""
    rng = np.random.default_rng([seed, step, 1])
    rows, row_kinds = [], []
    for _ in range(num_episodes):
        env, done = make_env(), False
        ids = list(tokenizer.encode(env.reset(env.task("train", int(rng.integers(1024))))[0]))
        kinds = [0] * len(ids)
        while not done:
            action = env.explore(rng)
            observation, _, done, _, info = env.step(action)
            for text, kind in ((action, 1), (observation, 2 + env.tools.index(info["tool"]))):
                ids += tokenizer.encode(text)
                kinds += [kind] * (len(ids) - len(kinds))
        rows.append(torch.from_numpy(np.array(ids)))
        row_kinds.append(torch.from_numpy(np.array(kinds)))
    return [nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (rows, row_kinds)]


def warm_start(model, tokenizer, make_env, args):
    """Imitates the explorer: language modelling of its whole episodes, tool output included (or of
    its own tokens only). It knows no answer: this teaches the format, the tools, and what `read`
    and `test` will say after an edit. Returns metrics, the losses those of the last tenth."""
    start, num_tokens, losses, env = time.time(), 0, {}, make_env()
    device, steps = next(model.parameters()).device, args.warm_start_steps
    batch_size = args.warm_start_batch_size or env.warm_start_batch_size
    peak = args.warm_start_learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.0, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
        episodes = explorer_episodes(
            tokenizer, make_env, seed=args.seed, step=step, num_episodes=batch_size
        )
        tokens, kinds = (x.to(device) for x in episodes)
        is_target = (kinds > 0) if args.warm_start_observations else (kinds == 1)
        b, t = (kinds > 0).nonzero(as_tuple=True)
        hidden = model(tokens[:, :-1], return_hidden=True)  # (B, T - 1, D)
        nll = F.cross_entropy(model.head(hidden[b, t - 1]), tokens[b, t], reduction="none")
        if step >= int(0.9 * steps):
            for kind, name in enumerate(("policy", *env.tools), 1):
                losses.setdefault(name, []).append(nll[kinds[b, t] == kind].detach())
        optimizer.zero_grad()
        (nll * is_target[b, t]).sum().div(is_target.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_tokens += len(b)
    metrics = {"episodes": steps * batch_size, "tokens": num_tokens, "seconds": time.time() - start}
    losses = {name: torch.cat(values) for name, values in losses.items()}
    metrics |= {f"loss_{name}": x.mean().item() for name, x in losses.items() if len(x)}
    return {f"warm_start/{key}": value for key, value in metrics.items()}


# ---- 6. Advantages -------------------------------------------------------------------------------


def token_rewards(rewards, turn_ids, loss_mask):
    """Each turn's reward on its last sampled token: rewards (B, K) -> (B, T)."""
    turns = torch.where(loss_mask > 0, turn_ids, -1)
    last = (turns >= 0) & (F.pad(turns, (0, 1), value=-1)[:, 1:] != turns)
    return rewards.gather(1, turns.clamp(min=0)) * last


def compute_gae(rewards, values, loss_mask, bootstrap_values, *, turn_ids=None, gamma, gae_lambda):
    """Generalized advantage estimation (eq. 16 of 1506.02438) over sampled tokens, or turns if
    turn_ids is given.

    rewards, loss_mask, turn_ids (B, T); values (B, T): of the state before each token;
    bootstrap_values (B,): of the state after the last token where an episode was truncated, 0 where
    it terminated. What the tools wrote is no step: it decays nothing and its values are not read.
    Returns advantages and value targets A + V, (B, T), zero where the mask is; every token of a
    turn has its turn's, whose value is read before its first token.
    """
    sampled = loss_mask > 0
    steps = sampled.cumsum(1) - 1 if turn_ids is None else turn_ids  # (B, T) an answer: its turn
    is_first = sampled & (steps > F.pad(steps, (1, 0), value=-1)[:, :-1])  # where V is read
    steps = steps.clamp(min=0)
    count = int(steps.max()) + 1
    pack = lambda x: x.new_zeros(len(x), count).scatter_add(1, steps, x)  # noqa: E731 (B, S)
    step_rewards = pack(torch.where(sampled, rewards, 0.0))
    step_values = pack(torch.where(is_first, values, 0.0))
    exists, step_advantages = pack(is_first.int()) > 0, torch.zeros_like(step_values)
    running, next_value = torch.zeros_like(bootstrap_values), bootstrap_values
    for k in reversed(range(count)):  # an episode's steps begin at 0, those after its end are none
        delta = step_rewards[:, k] + gamma * next_value - step_values[:, k]
        running = torch.where(exists[:, k], delta + gamma * gae_lambda * running, running)
        next_value = torch.where(exists[:, k], step_values[:, k], next_value)
        step_advantages[:, k] = running
    advantages = step_advantages.gather(1, steps) * sampled
    return advantages, advantages + step_values.gather(1, steps) * sampled


def whiten(advantages, loss_mask):
    """Mean 0 and standard deviation 1 over the mask, zero elsewhere; equal advantages, one among
    them, give exactly 0: what rounding leaves of them is not divided by 1e-4."""
    advantages = torch.where(loss_mask > 0, advantages, 0.0)
    count = loss_mask.sum()
    mean = advantages.sum() / count.clamp(min=1)
    centered = (advantages - mean) * loss_mask
    centered = centered * (centered.abs().amax() > 1e-6 * (1 + mean.abs()))
    return centered * ((centered**2).sum() / (count - 1).clamp(min=1) + 1e-8).rsqrt()


# ---- 7. Loss -------------------------------------------------------------------------------------


def compute_loss(newlogprobs, newvalues, entropy, logprobs, values, advantages, returns, loss_mask,
                 weights, ref_logprobs=None, *, clip_coef, dual_clip=None, clip_vloss, vf_coef,
                 kl_coef, ent_coef):  # fmt: skip
    """Clipped policy loss (eq. 7 of 1707.06347), value loss (eq. 9), KL penalty and entropy bonus.
    dual_clip bounds the loss of negative advantages (eq. 5 of 1912.09729).

    All tensors (B, T), ref_logprobs where kl_coef > 0; where loss_mask is 0 they may hold anything.
    Returns the weighted sum over tokens and a dict of sums over the mask, to be divided by the
    token count of the optimizer batch: so micro-batches add up to the same loss and metrics.
    """
    keep = lambda x: torch.where(loss_mask > 0, x, 0.0)  # noqa: E731 0 * NaN would be NaN
    newlogprobs, entropy, advantages = keep(newlogprobs), keep(entropy), keep(advantages)
    newvalues, values, returns = keep(newvalues), keep(values), keep(returns)
    logratio = (newlogprobs - keep(logprobs)).clamp(-20, 20)  # no overflow of the exponential
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped)
    if dual_clip is not None:
        pg_loss = torch.where(advantages < 0, pg_loss.min(-advantages * dual_clip), pg_loss)
    v_error = (newvalues - returns) ** 2
    if clip_vloss:  # as OpenAI baselines, not the paper
        v_clipped = values + (newvalues - values).clamp(-clip_coef, clip_coef)
        v_error = torch.max(v_error, (v_clipped - returns) ** 2)
    v_loss = 0.5 * v_error
    loss = (keep(weights) * (pg_loss + vf_coef * v_loss - ent_coef * entropy)).sum()
    metrics = {
        "losses/policy_loss": (keep(weights) * pg_loss).sum(),
        "losses/value_loss": (loss_mask * v_loss).sum(),
        "losses/entropy": (loss_mask * entropy).sum(),
        "losses/old_approx_kl": (loss_mask * -logratio).sum(),  # k1 of joschu.net/blog/kl-approx
        "losses/approx_kl": (loss_mask * (ratio - 1 - logratio)).sum(),  # k3
        "losses/clipfrac": (loss_mask * (ratio != clipped)).sum(),
    }
    if kl_coef > 0:
        d = (keep(ref_logprobs) - newlogprobs).clamp(-20, 20)  # no overflow of the exponential
        ref_kl = d.exp() - d - 1  # k3, eq. 4 of 2402.03300
        loss = loss + kl_coef * (keep(weights) * ref_kl).sum()
        metrics["losses/ref_kl"] = (loss_mask * ref_kl).sum()
    return loss, {key: value.detach() for key, value in metrics.items()}


def warm_up_critic(model, value_head, batches, *, steps, gamma, turn_unit):
    """Fits the value head alone to the returns of the batches, by mean squared error. Returns
    metrics. The episodes should not be cut: what they would still have earned counts as 0."""
    features, targets = [], []
    for batch in batches:
        mask, turn_ids = batch.loss_mask, batch.turn_ids
        rewards = token_rewards(batch.rewards, turn_ids, mask)
        zeros = torch.zeros_like(rewards)
        options = dict(turn_ids=turn_ids if turn_unit else None, gamma=gamma, gae_lambda=1.0)
        targets.append(compute_gae(rewards, zeros, mask, zeros[:, 0], **options)[1][mask > 0])
        with torch.no_grad():
            features.append(score(model, batch.tokens, mask, 1.0)[2])  # of the states before tokens
    features, targets, losses = torch.cat(features), torch.cat(targets), [torch.zeros(())]
    optimizer = torch.optim.AdamW(value_head.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        errors = value_head(features)[:, 0] - targets
        losses.append(0.5 * (errors**2).sum() / max(1, len(targets)))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    episodes, loss = sum(len(batch.tokens) for batch in batches), losses[-1].item()
    return {"warm_start/critic_episodes": episodes, "warm_start/critic_loss": loss}


@torch.no_grad()
def compute_values(model, value_head, batch, size):
    """V (B, T + 1) of the state before token t, in micro-batches of rows of like length."""
    B, T = batch.tokens.shape
    values = torch.zeros(B, T + 1, device=batch.tokens.device)
    for inds in batch.lengths.argsort().split(size):
        length = batch.lengths[inds].max()
        hidden = model(batch.tokens[inds, :length], return_hidden=True)
        values[inds, 1 : length + 1] = value_head(hidden)[..., 0]
    return values


# ---- 8. Evaluation -------------------------------------------------------------------------------


def play(model, tokenizer, make_env, tasks, *, temperature, seed, context_length):
    """Episodes on the tasks, in Batches of up to 256, with noise that training never notices."""
    batches = []
    for i in range(0, len(tasks), 256):
        envs = [make_env() for _ in tasks[i : i + 256]]
        num_tokens = envs[0].max_turns * envs[0].turn_tokens
        uniforms = draw_uniforms(seed, 10**9 + i, len(envs), num_tokens)
        options = dict(temperature=temperature, context_length=context_length)
        ids = torch.arange(len(envs))
        batches.append(
            rollout(model, tokenizer, envs, tasks[i : i + 256], ids, uniforms, **options)
        )
    return batches


def episode_metrics(batches):
    """Means over all episodes of the batches; without the truncated ones they would flatter."""
    infos = [info for batch in batches for info in batch.infos]
    mean = lambda key: sum(info[key] for info in infos) / len(infos)  # noqa: E731
    total = lambda key: sum(getattr(batch, key).sum().item() for batch in batches)  # noqa: E731
    return {
        "success_rate": mean("success"),
        "episodic_return": total("rewards") / len(infos),
        "episodic_length": mean("turns"),
        "hack_rate": mean("hacked"),
        "tool_calls": mean("tool_calls"),
        "invalid_action_rate": mean("errors") / max(mean("turns"), 1e-9),
        "truncation_rate": total("truncated") / len(infos),
        "tokens_per_episode": total("loss_mask") / len(infos),
    }


def solved(batches, samples):
    """Success (tasks, samples) of episodes that play each task `samples` times in a row."""
    return torch.tensor([info["success"] for b in batches for info in b.infos]).view(-1, samples)


def evaluate(model, tokenizer, make_env, *, split, num_tasks, context_length):
    """Greedy episodes on num_tasks of the split, the same for all scripts and seeds; greedy success
    on a quarter as many of the unseen pairs; pass@8 at temperature 1 on an eighth of the tasks.
    Returns (metrics, greedy Batches)."""
    env, options = make_env(), dict(temperature=0, seed=0, context_length=context_length)
    tasks = [env.task(split, i) for i in range(num_tasks)]
    batches = play(model, tokenizer, make_env, tasks, **options)
    keys = ("success_rate", "episodic_return", "hack_rate", "tool_calls")
    metrics = {f"eval/{key}": episode_metrics(batches)[key] for key in keys}
    tasks = [task for task in tasks[: num_tasks // 8] for _ in range(8)]
    sampled = play(model, tokenizer, make_env, tasks, **options | {"temperature": 1})
    metrics["eval/pass@8"] = solved(sampled, 8).any(1).float().mean().item()
    if isinstance(env, BugFixEnv):
        tasks = [env.task("unseen", i) for i in range(num_tasks // 4)]
        unseen = play(model, tokenizer, make_env, tasks, **options)
        metrics["eval/unseen_pairs_success_rate"] = episode_metrics(unseen)["success_rate"]
    return metrics, batches


def informative_share(successes, samples, group_size):
    """Unbiased chance, from samples >= group_size, that a group has both a success and a failure:
    1 - C(f, G)/C(n, G) - C(s, G)/C(n, G). (1 - p^G - (1 - p)^G with p = s/n is biased low.)"""
    ways = math.comb(samples - successes, group_size) + math.comb(successes, group_size)
    return 1 - ways / math.comb(samples, group_size)


def describe_start(model, tokenizer, make_env, *, group_size, context_length):
    """Metrics of the starting policy: 64 training tasks, 2 * group_size samples each."""
    env, n = make_env(), 2 * group_size
    tasks = [env.task("train", i) for i in range(64) for _ in range(n)]
    options = dict(temperature=1, seed=1, context_length=context_length)
    batches = play(model, tokenizer, make_env, tasks, **options)
    keys = ("success_rate", "hack_rate", "tool_calls")
    metrics = {key: episode_metrics(batches)[key] for key in keys}
    successes = solved(batches, n).sum(1).tolist()  # (64,)
    metrics["tasks_never_solved"] = successes.count(0) / 64
    metrics["tasks_always_solved"] = successes.count(n) / 64
    metrics["tasks_sometimes_solved"] = sum(0 < s < n for s in successes) / 64
    shares = [informative_share(s, n, group_size) for s in successes]
    metrics["informative_groups"] = sum(shares) / len(shares)
    return {f"start/{key}": value for key, value in metrics.items()}


def transcript(tokenizer, batch, row):
    """One episode as text, a message or observation a line, trained tokens in brackets."""
    text, trained = "", 0
    ids = batch.tokens[row, : batch.lengths[row]].tolist()
    for token, mask in zip(ids, batch.loss_mask[row].tolist()):
        if mask != trained:
            text, trained = text + ("\n⟦" if mask else "⟧\n"), mask
        text += tokenizer.decode([token])
    text += "⟧" * bool(trained)
    total, info = batch.rewards[row].sum().item(), batch.infos[row]
    return f"{text}\nreturn {total:.3g}, success {info['success']}, end: {info['end']}"


# ---- 9. Training ---------------------------------------------------------------------------------


def refuse(message):
    """Bad input: one line on standard error, exit 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# Flags that may be 0, the others may not; and largest values other than a million
MAY_BE_ZERO = """seed num_iterations warm_start_steps ent_coef kl_coef tool_cost tool_cost_warmup
    process_reward gamma step_gamma gae_lambda step_adv_coef vf_coef critic_warmup_steps""".split()
AT_MOST = dict(seed=2**64 - 1, gamma=1, step_gamma=1, gae_lambda=1, num_bugs=2, max_turns=1000)


def check_args(args, env):
    """Refuses flags that cannot work, naming them and a value that does."""
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            high, low = AT_MOST.get(name, 10**6), "positive"
            low = "at least 0" if name in MAY_BE_ZERO else low
            if not 0 <= value <= high or (value == 0 and low == "positive"):
                bounds = f"must be {low} and at most {high}; the default is {getattr(Args, name)}"
                refuse(f"--{name.replace('_', '-')} {value} {bounds}")
    context = args.context_length or longest_episode(env)
    if args.cuda and not torch.cuda.is_available():
        refuse("--cuda: this machine has no usable GPU; run without --cuda")
    if args.d_model % (2 * args.n_heads):
        good = f"a multiple of twice --n-heads, e.g. --d-model {32 * args.n_heads}"
        refuse(f"--d-model {args.d_model} must be {good}")
    if context < env.shortest:
        good = f"try --context-length {env.shortest} or more"
        refuse(f"--context-length {context} is shorter than any episode; {good}")
    episodes, parts = args.num_groups * args.group_size, getattr(args, "num_minibatches", 1)
    if episodes % parts:
        size = f"--num-groups {args.num_groups} x --group-size {args.group_size}"
        good = f"try --num-minibatches {math.gcd(episodes, parts)}"
        refuse(f"--num-minibatches {parts} does not divide {size} = {episodes}; {good}")
    if episodes * context > 10**8:
        size = f"--num-groups {args.num_groups} x --group-size {args.group_size} x {context} tokens"
        refuse(f"{size} are too many; try --num-groups 32 --group-size 8")
    if args.eval_tasks < 8:
        refuse(f"--eval-tasks {args.eval_tasks} is too few for pass@8; try --eval-tasks 64")
    if args.env_id == "number" and (args.num_bugs != 1 or args.reward != "hidden"):
        refuse("--num-bugs and --reward belong to --env-id bugfix; leave them out")
    if args.reward == "similarity" and args.malformed == "error":
        refuse("--reward similarity ends an episode at a bad call; leave out --malformed error")
    if args.num_groups % (count := processes()[1]):
        refuse(f"--num-groups {args.num_groups}, {count} processes; try --num-groups {8 * count}")


def parse_args(argv=None):
    """The command line. With --resume the flags of that run are the defaults."""
    args = tyro.cli(Args, args=argv)
    if args.resume:
        flags = dict(load_checkpoint(args.resume, "--resume")["args"])
        if flags.keys() != vars(args).keys():
            refuse(f"--resume {args.resume}: of another version; begin a run with --init-from")
        for name in ("init_from", "runs_dir"):
            flags[name] = flags[name] and Path(flags[name])
        args = tyro.cli(Args, args=argv, default=Args(**flags))
    return args


def processes():
    """This process's rank and the number of processes, as torchrun set them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def start_process(args):
    """Sets kernels, joins the other processes. Returns the device; all but rank 0 are silent."""
    rank, world_size = processes()
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a tenth of a run, for nothing
    if world_size > 1:
        if args.cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.cuda else "gloo")
    if rank > 0:
        sys.stdout = open(os.devnull, "w")
    return torch.device("cuda" if args.cuda else "cpu")


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
        padding = -1 if name == "turn_ids" else 0
        return nn.utils.rnn.pad_sequence(rows, True, padding).to(device)

    return Batch(*map(join, Batch._fields, zip(*parts)))


def load_checkpoint(path, flag):
    """A checkpoint as a dict, through torch's safe loader: tensors and plain values only."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        refuse(f"{flag} {path}: no such file; checkpoints are runs/<run>/checkpoint.pt")
    except Exception as error:  # torch raises many types for a file that is not a checkpoint
        problem = f"not a readable checkpoint ({type(error).__name__})"
        refuse(f"{flag} {path}: {problem}; give a runs/<run>/checkpoint.pt")
    if not isinstance(checkpoint, dict) or "model" not in checkpoint:
        refuse(f"{flag} {path}: holds no model; give a runs/<run>/checkpoint.pt")
    script = checkpoint.get("script", "tinyagent")
    if flag == "--resume" and script != Path(__file__).stem:
        refuse(f"--resume {path}: a run of {script}.py; try --init-from to begin one with it")
    return checkpoint


class Run:
    """A run's folder (args.json, metrics.jsonl, checkpoint.pt) and tracker; only rank 0 writes."""

    # What a resumed run may change; all else decided what its iterations so far were
    may_change = """num_iterations learning_rate eval_every eval_tasks eval_split save_every
        micro_batch_size cuda torch_deterministic track wandb_project_name wandb_entity""".split()

    def __init__(self, args, modules):
        """modules: name -> what a checkpoint holds the state of; a resumed run restores them."""
        self.is_first, self.iteration, self.lines = processes()[0] == 0, 0, []
        self.args = json.loads(json.dumps(vars(args) | {"resume": None}, default=str))
        name = [Path(__file__).stem, args.env_id, args.seed, f"{time.time():.0f}_{os.getpid()}"]
        self.dir = args.runs_dir / "__".join(map(str, name))
        if args.resume:
            self.restore(args.resume, modules)
        try:
            if self.is_first:
                self.dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse(f"--runs-dir {args.runs_dir}: {error.strerror}; try --runs-dir /tmp/runs")
        self.write("args.json", json.dumps(self.args, indent=2).encode())
        self.tracker = self.track(self.start_tracking) if args.track and self.is_first else None

    def restore(self, path, modules):
        """Goes on from a checkpoint, in its folder; later metrics are computed again."""
        checkpoint, self.dir = load_checkpoint(path, "--resume"), path.parent
        old, self.lines, self.iteration = (checkpoint[k] for k in ("args", "lines", "iteration"))
        changed = [name for name in old if old[name] != self.args[name]]
        for name in changed:
            if name not in self.may_change:
                flag, was = f"--{name.replace('_', '-')}", f"the run has {old[name]}"
                refuse(f"--resume: {flag} {self.args[name]}: {was} and keeps it; leave {flag} out")
        if self.iteration >= self.args["num_iterations"]:
            more = f"to go on, give --num-iterations {2 * self.iteration or 50}"
            print(f"{path}: its last iteration, {self.iteration}, is done; {more}")
            sys.exit()
        changes = ", ".join(f"{name} {old[name]} -> {self.args[name]}" for name in changed)
        note = f" with {changes}; schedules follow num_iterations" if changed else ""
        print(f"resumed after iteration {self.iteration}{note}", flush=True)
        for name, module in modules.items():
            module.load_state_dict(checkpoint[name])

    def write(self, name, data):
        """Atomic: after a kill or on a full disk the previous file is still whole."""
        path, new = self.dir / name, self.dir / f"{name}.tmp"
        try:
            if self.is_first:
                new.write_bytes(data)
                os.replace(new, path)
        except OSError as error:
            new.unlink(missing_ok=True)
            advice = f"free some space, then go on with --resume {self.dir}/checkpoint.pt"
            sys.exit(f"error: {path}: {error.strerror}; {advice}")

    def track(self, call, *args, **kwargs):
        """A call into the tracker: whatever it raises is a warning and must not cost the run."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            line = f"warning: --track: {type(error).__name__}: {error}".splitlines()[0]
            print(f"{line}; metrics stay local", flush=True)

    def start_tracking(self):
        """A Weights & Biases run, offline without a key; a resumed run goes on in its own."""
        import wandb

        args, name = self.args, self.dir.name
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        where = dict(project=args["wandb_project_name"], entity=args["wandb_entity"], mode=mode)
        settings = wandb.Settings(init_timeout=15, silent=True)
        where |= dict(name=name, id=name, resume="allow")
        return wandb.init(**where, config=args, settings=settings)

    def log(self, iteration, metrics):
        self.lines.append({"iteration": iteration} | metrics)
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        self.write("metrics.jsonl", text.encode())
        if self.tracker:
            self.track(self.tracker.log, metrics, step=iteration)

    def close(self):
        if self.tracker:
            self.track(self.tracker.finish)
        if dist.is_initialized():
            dist.destroy_process_group()

    def save(self, iteration, modules):
        if not all(x.isfinite().all() for x in modules["model"].state_dict().values()):
            advice = "try a lower --learning-rate or --warm-start-learning-rate"
            sys.exit(f"error: weights of iteration {iteration} not finite and not saved; {advice}")
        state = {name: module.state_dict() for name, module in modules.items()}
        state |= {"script": Path(__file__).stem, "args": self.args, "lines": self.lines}
        torch.save(state | {"iteration": iteration}, buffer := BytesIO())
        self.write("checkpoint.pt", buffer.getvalue())


def load_start(model, args):
    """The weights of --init-from."""
    try:
        model.load_state_dict(load_checkpoint(args.init_from, "--init-from")["model"])
    except (KeyError, TypeError, RuntimeError):
        problem = f"does not fit --env-id {args.env_id} and the flags of the model's size"
        refuse(f"--init-from {args.init_from}: {problem}; give a checkpoint made with the same")


def collect(model, tokenizer, make_env, args, iteration, context_length):
    """group_size episodes on each of num_groups tasks; each process plays its share of groups."""
    (rank, world_size), env = processes(), make_env()
    tool_cost = env.tool_cost * min(1.0, iteration / max(1, args.tool_cost_warmup))
    indices = np.random.default_rng([args.seed, iteration]).integers(2**31, size=args.num_groups)
    share = args.num_groups // world_size
    groups = torch.arange(rank * share, (rank + 1) * share).repeat_interleave(args.group_size)
    tasks = [env.task("train", int(indices[group])) for group in groups]
    envs = [make_env(tool_cost=tool_cost) for _ in tasks]
    episodes, num_tokens = args.num_groups * args.group_size, env.max_turns * env.turn_tokens
    uniforms = draw_uniforms(args.seed, iteration, episodes, num_tokens)
    uniforms = uniforms[rank * len(tasks) :][: len(tasks)]
    options = dict(temperature=args.temperature, context_length=context_length)
    batch = rollout(model, tokenizer, envs, tasks, groups, uniforms, **options)
    return gather(batch, batch.tokens.device) if world_size > 1 else batch


def micro_batch_size(args, batch):
    """Episodes in a forward pass: by default what fits a CPU's cache, and on a GPU all of them."""
    by_length = len(batch.tokens) if args.cuda else max(16, 2048 // batch.tokens.shape[1])
    return args.micro_batch_size or by_length


def choose_mask(model, batch, args):
    """Which tokens are trained: the sampled ones. Returns the batch and their mask (B, T).

    Without mask_observations what the tools wrote is trained too, and the batch gets its
    log pi_old; with filter_truncated no token of an episode out of turns or context is.
    """
    loss_mask = batch.loss_mask
    if not args.mask_observations:
        loss_mask, size = (batch.turn_ids >= 0).float(), micro_batch_size(args, batch)
        parts = zip(batch.tokens.split(size), loss_mask.split(size))
        with torch.no_grad():
            logprobs = torch.cat([score(model, *rows, args.temperature)[0] for rows in parts])
        logprobs = torch.where(batch.loss_mask > 0, batch.logprobs, logprobs)
        batch = batch._replace(logprobs=logprobs)
    if args.filter_truncated:
        late = torch.tensor([info["end"] == "turn_limit" for info in batch.infos])
        loss_mask = loss_mask * ~(batch.truncated | late.to(loss_mask.device))[:, None]
    return batch, loss_mask


def update(
    model, value_head, reference, optimizer, batch, loss_mask, estimates, args, iteration, kl_coef
):
    """update_epochs passes over the batch, each of num_minibatches gradient steps. Returns metrics,
    means over the minibatches, and the number of steps. estimates: advantages, values, returns.

    A minibatch goes through the model in micro-batches of rows of like length; rows without a
    trained token are sorted apart and take the forward pass only.
    """
    (rank, world_size), size = processes(), micro_batch_size(args, batch)
    parameters, device = optimizer.param_groups[0]["params"], loss_mask.device
    has_signal = loss_mask.any(1)
    minibatches = []
    for epoch in range(args.update_epochs):
        generator = torch.Generator().manual_seed(derive_seed(args.seed, iteration, 1 + epoch))
        shuffled = torch.randperm(len(loss_mask), generator=generator).to(device)
        minibatches += shuffled.chunk(args.num_minibatches)
    logs, num_steps = {}, 0
    for mb_inds in minibatches:
        # Denominators of the whole minibatch: micro_batch_size does not change the objective
        token_count = loss_mask[mb_inds].sum().clamp(min=1)
        weights = loss_mask[mb_inds] / token_count
        sums = {"losses/grad_norm": torch.zeros((), device=device)}
        optimizer.zero_grad()
        order = (batch.lengths[mb_inds] + 10**6 * has_signal[mb_inds]).argsort()[rank::world_size]
        for micro in order.split(size):
            inds = mb_inds[micro]
            length = batch.lengths[inds].max()
            tokens, mask, old, A, values, returns = (
                x[inds, :length] for x in (batch.tokens, loss_mask, batch.logprobs, *estimates)
            )
            ref_logprobs = None
            if kl_coef > 0:
                with torch.no_grad():
                    ref_logprobs, _, _ = score(reference, tokens, mask, args.temperature)
            with torch.set_grad_enabled(bool(has_signal[inds].any())):
                newlogprobs, entropy, hidden = score(model, tokens, mask, args.temperature)
                places, V = mask.nonzero(as_tuple=True), value_head(hidden)[:, 0]
                newvalues = torch.zeros_like(newlogprobs).index_put(places, V)
                loss, micro_sums = compute_loss(
                    newlogprobs, newvalues, entropy, old, values, A, returns, mask,
                    weights[micro, :length], ref_logprobs, clip_coef=args.clip_coef,
                    dual_clip=args.dual_clip, clip_vloss=args.clip_vloss, vf_coef=args.vf_coef,
                    kl_coef=kl_coef, ent_coef=args.ent_coef,
                )  # fmt: skip
            if loss.requires_grad:
                loss.backward()
            for key, value in micro_sums.items():
                mean = value if key == "losses/policy_loss" else value / token_count
                sums[key] = sums.get(key, 0.0) + mean
        if world_size > 1:  # the sum over processes is what one process computes
            for p in parameters:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            for tensor in (*(p.grad for p in parameters), *sums.values()):
                dist.all_reduce(tensor)
        has_step = has_signal[mb_inds].any()  # without a signal Adam's momentum alone would move
        if has_step:
            sums["losses/grad_norm"] = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        for key in ("losses/grad_norm", "losses/entropy"):  # a NaN policy may have no signal at all
            if not sums[key].isfinite():
                where = "its folder has the last metrics and a checkpoint, which is finite"
                sys.exit(f"error: {key} is {sums[key].item()} in iteration {iteration}; {where}")
        if has_step:
            optimizer.step()
            num_steps += 1
        for key, value in sums.items():
            logs.setdefault(key, []).append(value)
    return {key: torch.stack(values).mean().item() for key, values in logs.items()}, num_steps


def batch_metrics(batch, advantages, last, args):
    """Means over the iteration's episodes and over the advantages (N,) of its trained tokens, and
    totals of the run, from its last metrics."""
    returns = batch.rewards.sum(1).view(args.num_groups, args.group_size)
    is_constant = returns.amax(1) - returns.amin(1) < 1e-6
    advantages = advantages if len(advantages) else torch.zeros(1)
    counts = {
        "global_step": sum(info["turns"] for info in batch.infos),
        "charts/total_tokens": int(batch.loss_mask.sum()),
        "charts/total_episodes": len(batch.infos),
    }
    return {
        **{key: last.get(key, 0) + count for key, count in counts.items()},
        **{f"charts/{key}": value for key, value in episode_metrics([batch]).items()},
        "charts/frac_zero_std_groups": is_constant.float().mean().item(),
        "losses/advantage_mean": advantages.mean().item(),
        "losses/advantage_std": advantages.std(correction=0).item(),
        "time/env": sum(info["env_seconds"] for info in batch.infos),
    }


def report(title, metrics):
    values = "  ".join(f"{key.split('/')[1]} {value:.4g}" for key, value in metrics.items())
    print(f"  {title}: {values}", flush=True)


def report_iteration(iteration, num_iterations, seconds, metrics):
    keys = ("success_rate", "episodic_return", "tool_calls", "frac_zero_std_groups")
    shown = {f"charts/{key}": metrics[f"charts/{key}"] for key in keys}
    shown |= {key: metrics[key] for key in ("losses/entropy", "losses/approx_kl")}
    shown |= {"/seconds": seconds, "/seconds_left": seconds * (num_iterations - iteration)}
    report(f"{iteration}/{num_iterations}", shown)


def train(args):
    make_env = partial(ENVS[args.env_id], **{key: getattr(args, key) for key in ToolEnv.defaults})
    env = make_env()
    check_args(args, env)
    start_time, device = time.time(), start_process(args)
    context_length = args.context_length or longest_episode(env)
    tokenizer = Tokenizer(env.vocabulary())
    torch.manual_seed(args.seed)
    sizes = dict(d_model=args.d_model, n_layers=args.n_layers, n_heads=args.n_heads)
    model = TinyAgent(len(tokenizer.words), **sizes).to(device)
    reference = deepcopy(model).requires_grad_(False)  # pi_ref of the KL penalty: the start
    value_head = nn.Linear(args.d_model, 1).to(device)  # V of the state after a token
    nn.init.zeros_(value_head.weight), nn.init.zeros_(value_head.bias)
    parameters = [*model.parameters(), *value_head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.0, fused=True)
    modules = {"model": model, "optimizer": optimizer, "reference": reference}
    modules["value_head"] = value_head
    if args.init_from and not args.resume:
        load_start(model, args)
    run = Run(args, modules)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{run.dir} on {device}: {num_parameters:,} parameters, context {context_length}")

    def run_evaluation(iteration):
        options = dict(num_tasks=args.eval_tasks, context_length=context_length)
        metrics, batches = evaluate(model, tokenizer, make_env, split=args.eval_split, **options)
        report(f"{args.eval_split} tasks", metrics)
        if iteration in (0, args.num_iterations):
            print(transcript(tokenizer, batches[0], 0), flush=True)
        return metrics

    if not args.resume:
        metrics = {}
        if not args.init_from:
            metrics = warm_start(model, tokenizer, make_env, args)
            report("warm start", metrics)
        if args.critic_warmup_steps:
            tasks = [env.task("train", i) for i in range(2 * args.num_groups * args.group_size)]
            options = dict(seed=2, context_length=longest_episode(env))
            options |= dict(temperature=args.temperature)
            batches = play(model, tokenizer, make_env, tasks, **options)
            options = dict(steps=args.critic_warmup_steps, gamma=args.gamma)
            options |= dict(turn_unit=args.gae_unit == "turn")
            metrics |= warm_up_critic(model, value_head, batches, **options)
        options = dict(group_size=args.group_size, context_length=context_length)
        start = describe_start(model, tokenizer, make_env, **options)
        report("start", start)
        run.log(0, metrics | start | run_evaluation(0))
        if dist.is_initialized():
            for p in parameters:  # one start for all processes, whatever their rounding
                dist.broadcast(p.data, 0)
        reference.load_state_dict(model.state_dict())
        run.save(0, modules)

    for iteration in range(run.iteration + 1, args.num_iterations + 1):
        begin, left = time.time(), 1 - (iteration - 1) / args.num_iterations
        optimizer.param_groups[0]["lr"] = args.learning_rate * left
        kl_coef = args.kl_coef * (left if args.anneal_kl else 1)

        # (1) Rollout: group_size episodes on each of num_groups tasks
        batch = collect(model, tokenizer, make_env, args, iteration, context_length)
        times = {"time/rollout": time.time() - begin}

        # (2) Mask: which tokens are trained
        batch, loss_mask = choose_mask(model, batch, args)

        # (3) Advantages, from the critic's values of the states as they were acted in
        update_begin = time.time()
        values = compute_values(model, value_head, batch, micro_batch_size(args, batch))
        last_values = values.gather(1, batch.lengths[:, None])[:, 0] * batch.truncated
        rewards, values = token_rewards(batch.rewards, batch.turn_ids, loss_mask), values[:, :-1]
        options = dict(turn_ids=batch.turn_ids if args.gae_unit == "turn" else None)
        options |= dict(gamma=args.gamma, gae_lambda=args.gae_lambda)
        raw_advantages, returns = compute_gae(rewards, values, loss_mask, last_values, **options)
        advantages = whiten(raw_advantages, loss_mask) if args.norm_adv else raw_advantages

        # (4) Update
        estimates = (advantages, values, returns)
        losses, num_steps = update(
            model, value_head, reference, optimizer, batch, loss_mask, estimates, args, iteration,
            kl_coef,
        )  # fmt: skip
        times["time/update"] = time.time() - update_begin

        # (5) Log: means over all the iteration's episodes, and over all minibatches
        trained = raw_advantages[loss_mask > 0]
        metrics = losses | times | batch_metrics(batch, trained, run.lines[-1], args)
        targets = returns[loss_mask > 0]
        variance = targets.var(correction=0) if len(targets) else 0.0
        explained = (1 - trained.var(correction=0) / variance).item() if variance > 0 else 0.0
        metrics["losses/explained_variance"] = explained
        seconds = time.time() - begin
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["charts/SPS"] = metrics["charts/episodic_length"] * len(batch.tokens) / seconds
        report_iteration(iteration, args.num_iterations, seconds, metrics)
        if metrics["charts/truncation_rate"] == 1:
            print("warning: every episode was cut by the context; raise --context-length")
        elif batch.rewards.sum(1).amax() - batch.rewards.sum(1).amin() < 1e-6:
            skipped = "" if num_steps else ", no optimizer step was taken"
            print(f"warning: every episode has the same return: it teaches nothing{skipped}")
        is_last = iteration == args.num_iterations
        if iteration % args.eval_every == 0 or is_last:
            metrics |= run_evaluation(iteration)
        run.log(iteration, metrics)
        if iteration % args.save_every == 0 or is_last:
            run.save(iteration, modules)
    print(f"done in {time.time() - start_time:.0f}s: {run.dir}", flush=True)
    run.close()


if __name__ == "__main__":
    train(parse_args())
