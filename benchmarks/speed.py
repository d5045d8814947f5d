"""How fast grpo.py is on this machine: its own rollout and update, inside its own training loop.

    python benchmarks/speed.py                # the default run's shape
    python benchmarks/speed.py --batch 4      # four times the episodes
    python benchmarks/speed.py --model 4      # about four times the parameters (twice the width)
    python benchmarks/speed.py --context 4    # four times the turns, all of them played
    # turns of 5 sampled and 35 observed tokens
    python benchmarks/speed.py --shape peers --env-id number --groups 16
    # hidden number, 128 episodes, one update
    python benchmarks/speed.py --env-id number --groups 16 --minibatches 1

Prints medians over the iterations, minimum and maximum beside them. The machine's own fp32 matrix
rate is measured between the iterations, at 1024 cubed and at the model's shapes: compare machines
by the ratio to it, not by seconds. Arithmetic is counted as two operations a weight and token,
three times that with the backward pass, plus attention: what is needed, without padding, and in the
last block beyond keys and values only where a token was sampled. Let nothing else run: a second
process on the same cores costs two threads far more than half.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo  # noqa: E402


@dataclass
class Args:
    cuda: bool = False  # measure the GPU
    env_id: Literal["bugfix", "number"] = "bugfix"  # environment
    shape: Literal["env", "peers"] = "env"  # the environment's own episodes, or of a fixed shape
    groups: int = 32  # groups of 8 episodes before --batch multiplies them
    batch: int = 1  # times as many groups
    context: int = 1  # times as many turns
    model: int = 1  # times as many parameters, about: the width grows by the root
    iterations: int = 10  # iterations to measure, after two that are not
    minibatches: int = 4  # optimizer steps an iteration


class PeersEnv(grpo.NumberEnv):
    """Episodes of a fixed shape: a prompt of 20 tokens, turns of 5 sampled, 35 observed tokens."""

    turn_tokens, max_prompt, max_observation, shortest = 5, 20, 35, 25
    defaults = grpo.NumberEnv.defaults | dict(max_turns=4)

    def reset(self, task):
        self.turn, self.anchor = 0, 0
        return "<bos>" + " ?" * 19, {}

    def step(self, action):
        self.turn += 1
        done = self.turn == self.max_turns
        info = {
            "tool": "call",
            "error": False,
            "end": "turn_limit",
            "success": False,
            "hacked": False,
        }
        return " higher" * 35, float(" 3" in action), done, False, info

    def explore(self, rng):
        return " call 1 2 3 4"


class LongEnv(grpo.BugFixEnv):
    """BugFix whose `submit` is an unknown tool: every episode plays all its turns."""

    def step(self, action):
        return super().step(action.replace("submit", "read read"))


def matrix_rate(device, m, k, n):
    """fp32 operations a second of an (m, k) by (k, n) product, the best of a few."""
    a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
    best = 0.0
    for _ in range(8):
        start = now(device)
        for _ in range(repeats := max(1, 2**27 // (m * k * n))):
            a @ b
        best = max(best, 2 * m * k * n * repeats / (now(device) - start))
    return best


def now(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def refuse(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def main(args):
    device = "cuda" if args.cuda else "cpu"
    if args.cuda and not torch.cuda.is_available():
        refuse("--cuda: this machine has no usable GPU; run without --cuda")
    for flag in ("groups", "batch", "context", "model", "minibatches"):
        if getattr(args, flag) < 1:
            refuse(f"--{flag} {getattr(args, flag)} must be positive; try --{flag} 1")
    if args.iterations < 2:
        few = f"--iterations {args.iterations} is too few for the page faults between two"
        refuse(f"{few}; try --iterations 2")
    if args.shape == "peers":
        grpo.ENVS[args.env_id] = PeersEnv
    elif args.context > 1:
        grpo.ENVS["bugfix"] = LongEnv
    env_class, seen, rates = grpo.ENVS[args.env_id], [], {"1024 cubed": [], "model": []}
    d_model = 64 * max(1, round(args.model**0.5))
    rollout, score = grpo.rollout, grpo.score

    def timed(function, kind):
        def wrapper(*inputs, **options):
            start = now(device)
            result = function(*inputs, **options)
            if seen and seen[-1]["open"]:
                seen[-1][kind] += now(device) - start
            return result

        return wrapper

    def spy_rollout(model, *inputs, **options):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        record = {"open": True, "model": 0.0, "cache": 0.0, "padded": 0}
        seen.append(record | {"faults": usage.ru_minflt, "peak": usage.ru_maxrss})
        start = now(device)
        batch = rollout(model, *inputs, **options)
        seen[-1] |= {
            "open": False,
            "rollout": now(device) - start,
            "episodes": len(batch.tokens),
            "sampled": int(batch.loss_mask.sum()),
            "lengths": batch.lengths.tolist(),
            "positions": int(batch.loss_mask.nonzero()[:, 1].sum()),
            "env": sum(info["env_seconds"] for info in batch.infos),
        }
        start = now(device)
        rates["1024 cubed"].append(matrix_rate(device, 1024, 1024, 1024))
        rates["model"].append(matrix_rate(device, 2048, d_model, 4 * d_model))
        seen[-1]["matrices"] = now(device) - start  # the script's own clock runs on
        return batch

    def spy_score(model, tokens, *inputs):
        if torch.is_grad_enabled():
            seen[-1]["padded"] += tokens.numel()
        return score(model, tokens, *inputs)

    grpo.rollout, grpo.score = spy_rollout, spy_score
    grpo.TinyAgent.forward = timed(grpo.TinyAgent.forward, "model")
    grpo.sample_tokens = timed(grpo.sample_tokens, "model")
    grpo.TinyAgent.make_cache = timed(grpo.TinyAgent.make_cache, "cache")
    torch.index_select = timed(torch.index_select, "cache")
    turns = env_class().max_turns * args.context
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(open(os.devnull, "w")):
        options = grpo.Args(
            cuda=args.cuda,
            env_id=args.env_id,
            num_groups=args.groups * args.batch,
            max_turns=turns,
            num_minibatches=args.minibatches,
            d_model=d_model,
            learning_rate=1e-6,
            kl_coef=0.1,
            num_iterations=args.iterations + 2,
            eval_every=10**6,
            eval_tasks=8,
            runs_dir=Path(folder),
            warm_start_steps=150 if args.shape == "env" else 1,
        )
        grpo.train(options)
        (metrics,) = Path(folder).glob("*/metrics.jsonl")
        updates = [json.loads(line) for line in metrics.read_text().splitlines()][3:]
    # evaluations do not train
    seen = [record for record in seen if "lengths" in record and record["padded"]][2:]
    model = grpo.TinyAgent(len(grpo.Tokenizer(env_class.vocabulary()).words), d_model=d_model)
    weights = sum(p.numel() for block in model.blocks for p in block.parameters())
    head = model.head.weight.numel()

    def show(name, values, unit=""):
        spread = f"[{min(values):,.4g} - {max(values):,.4g}]"
        print(f"{name:<52} {statistics.median(values):>12,.4g} {unit}  {spread}")

    def operations(record):  # of one forward pass over the episodes' tokens
        tokens, sampled = sum(record["lengths"]), record["sampled"]
        block, projections = weights / len(model.blocks), 3 * d_model**2
        attention = sum(2 * length * (length + 1) for length in record["lengths"]) * d_model
        last = 2 * projections * tokens + 2 * (block - projections) * sampled
        last += 4 * d_model * record["positions"]
        return (
            (len(model.blocks) - 1) * (2 * block * tokens + attention) + last + 2 * head * sampled
        )

    rate = statistics.median(rates["model"])
    threads = f"{torch.get_num_threads()} CPU threads"
    hardware = torch.cuda.get_device_name() if args.cuda else threads
    episodes = f"{seen[0]['episodes']} episodes of {statistics.mean(seen[0]['lengths']):.0f} tokens"
    print(f"{hardware}, torch {torch.__version__}, {weights + head:,} weights, {episodes}")
    show("matrix rate, 1024 cubed", [r / 1e9 for r in rates["1024 cubed"]], "GFLOP/s")
    shape = f"2048 x {d_model} x {4 * d_model}"
    show(f"matrix rate, {shape}", [r / 1e9 for r in rates["model"]], "GFLOP/s")
    show("rollout, episodes a second", [r["episodes"] / r["rollout"] for r in seen])
    show("rollout, sampled tokens a second", [r["sampled"] / r["rollout"] for r in seen])
    speeds = [operations(r) / r["rollout"] for r in seen]
    show("rollout, share of the matrix rate", [speed / rate for speed in speeds])
    show("rollout, share of environment", [r["env"] / r["rollout"] for r in seen])
    cache = [r["cache"] / r["rollout"] for r in seen]
    show("rollout, share of allocating and copying the cache", cache)
    python = [1 - (r["model"] + r["cache"]) / r["rollout"] for r in seen]
    show("rollout, share of environment and Python", python)
    pairs = list(zip(seen, updates, strict=False))
    show("update, real tokens a second", [sum(r["lengths"]) / u["time/update"] for r, u in pairs])
    show("update, padding per real token", [r["padded"] / sum(r["lengths"]) - 1 for r in seen])
    speeds = [4 * operations(r) / u["time/update"] for r, u in pairs]
    show("update with reference, share of the matrix rate", [speed / rate for speed in speeds])
    seconds = [u["time/rollout"] - r["matrices"] + u["time/update"] for r, u in pairs]
    both = [r["episodes"] / s for r, s in zip(seen, seconds, strict=False)]
    show("rollout and update, episodes a second", both)
    show("page faults an iteration", [b["faults"] - a["faults"] for a, b in pairwise(seen)])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if args.cuda else peak
    print(f"{'peak memory':<52} {peak / 2**20:>12,.0f} MiB")
    if len(seen) > 20 and not args.cuda:
        # taken when iteration 21 began: the first of seen is iteration 3
        before = seen[18]["peak"] * 1024
        print(f"{'peak memory, to that of iteration 20':<52} {peak / before:>12,.3f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
