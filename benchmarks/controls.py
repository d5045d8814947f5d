"""Controls of grpo.py: each must fail the way it should.

    python benchmarks/controls.py swap runs/*/checkpoint.pt    # another task's tool output
    python benchmarks/controls.py shuffle --seed 1             # rewards shuffled in each group
    python benchmarks/controls.py withhold --seed 1            # BugFix whose tools answer nothing

swap: greedy success of trained policies on the test tasks as they are, and with every observation
replaced by what the same call would have returned in the next task. A policy that reads loses; one
that edits by habit or by the prompt does not. shuffle and withhold train, with the flags of
grpo.py; withheld observations are so in warm start, training and evaluation alike.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo  # noqa: E402
from grpo import BugFixEnv, TinyAgent, Tokenizer, longest_episode, play  # noqa: E402


class SwappedEnv(BugFixEnv):
    """Acts on its own task, shows those of another: reset takes the pair (own, other)."""

    def reset(self, tasks):
        own, other = tasks
        self.other = BugFixEnv(max_turns=self.max_turns)
        self.other.reset(other)
        return super().reset(own)

    def step(self, action):
        _, *result = super().step(action)
        if not self.other.done:
            self.observation, *_ = self.other.step(action)
        return self.observation, *result


class WithheldEnv(BugFixEnv):
    """Acts, and shows nothing of it."""

    def step(self, action):
        _, *result = super().step(action)
        return "<result></result>", *result


def shuffled(rollout):
    """The rollout with its episodes' rewards dealt out anew among the members of each group."""

    def wrapper(*inputs, **options):
        batch = rollout(*inputs, **options)
        order = torch.arange(len(batch.rewards))
        generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
        for group in batch.group_ids.unique():
            (rows,) = torch.where(batch.group_ids == group)
            order[rows] = rows[torch.randperm(len(rows), generator=generator)]
        return batch._replace(rewards=batch.rewards[order])

    return wrapper


@dataclass
class Args:
    checkpoints: tyro.conf.Positional[tuple[Path, ...]]  # checkpoint.pt files of BugFix runs
    num_tasks: int = 512  # test tasks


def success_rate(model, tokenizer, make_env, tasks):
    """Share of the tasks that the policy solves, greedily."""
    settings = dict(temperature=0, seed=0, context_length=longest_episode(make_env()))
    batches = play(model, tokenizer, make_env, tasks, **settings)
    return grpo.episode_metrics(batches)["success_rate"]


def swap(args):
    drops = []
    for path in args.checkpoints:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        flags = checkpoint["args"]
        tokenizer = Tokenizer(BugFixEnv.vocabulary())
        sizes = {name: flags[name] for name in ("d_model", "n_layers", "n_heads")}
        model = TinyAgent(len(tokenizer.words), **sizes)
        model.load_state_dict(checkpoint["model"])
        options = {name: flags[name] for name in ("max_turns", "num_bugs")}
        env = BugFixEnv(**options)
        tasks = [env.task("test", i) for i in range(args.num_tasks)]
        pairs = list(zip(tasks, tasks[1:] + tasks[:1], strict=True))
        own = success_rate(model, tokenizer, partial(BugFixEnv, **options), tasks)
        other = success_rate(model, tokenizer, partial(SwappedEnv, **options), pairs)
        drops.append(own - other)
        print(f"{path}: success {own:.3f}, with another task's observations {other:.3f}, ", end="")
        print(f"drop {drops[-1]:.3f}")
    if len(drops) > 1:
        spread = f"min {min(drops):.3f}, median {median(drops):.3f}, max {max(drops):.3f}"
        print(f"drop over {len(drops)} checkpoints: {spread}")


if __name__ == "__main__":
    control, *flags = sys.argv[1:] or ["--help"]
    if control == "swap":
        swap(tyro.cli(Args, args=flags))
    elif control == "shuffle":
        grpo.rollout = shuffled(grpo.rollout)
        grpo.train(tyro.cli(grpo.Args, args=flags))
    elif control == "withhold":
        grpo.ENVS["bugfix"] = WithheldEnv
        grpo.train(tyro.cli(grpo.Args, args=flags))
    else:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
