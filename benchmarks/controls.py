"""Controls of grpo.py: each must fail the way it should.

    python benchmarks/controls.py swap runs/*/checkpoint.pt    # shows trained policies another task's tool output
    python benchmarks/controls.py shuffle --seed 1             # trains on rewards shuffled within each group
    python benchmarks/controls.py withhold --seed 1            # trains on BugFix whose tools answer nothing

swap: greedy success on the test tasks as they are, and with every observation replaced by what the same call would have
returned in the next task. A policy that reads loses; one that edits by habit or by the prompt does not. shuffle and
withhold take the flags of grpo.py; withheld observations are so in warm start, training and evaluation alike.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo  # noqa: E402
from grpo import BugFixEnv, TinyAgent, Tokenizer, episode_metrics, longest_episode, play  # noqa: E402


class SwappedEnv(BugFixEnv):
    """Acts on its own task, shows the observations of another: reset takes the pair (own, other)."""

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
        order, generator = (
            torch.arange(len(batch.rewards)),
            torch.Generator().manual_seed(int(batch.tokens.sum())),
        )
        for group in batch.group_ids.unique():
            (rows,) = torch.where(batch.group_ids == group)
            order[rows] = rows[torch.randperm(len(rows), generator=generator)]
        return batch._replace(rewards=batch.rewards[order])

    return wrapper


@dataclass
class Args:
    checkpoints: tyro.conf.Positional[tuple[Path, ...]]  # checkpoint.pt files of BugFix runs
    num_tasks: int = 512  # test tasks


def swap(args):
    drops = []
    for path in args.checkpoints:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        flags = checkpoint["args"]
        tokenizer = Tokenizer(BugFixEnv.vocabulary())
        sizes = {name: flags[name] for name in ("d_model", "n_layers", "n_heads")}
        model = TinyAgent(len(tokenizer.words), **sizes)
        model.load_state_dict(checkpoint["model"])
        num_bugs = flags["num_bugs"]
        options = dict(
            max_turns=flags["max_turns"] or BugFixEnv.default_turns(num_bugs), num_bugs=num_bugs
        )
        tasks = [BugFixEnv.task("test", i, num_bugs) for i in range(args.num_tasks)]
        success = []
        for env_class, played in (
            (BugFixEnv, tasks),
            (SwappedEnv, list(zip(tasks, tasks[1:] + tasks[:1]))),
        ):
            batches = play(model, tokenizer, env_class, options, played, temperature=0, seed=0,
                           context_length=longest_episode(BugFixEnv, options["max_turns"]))  # fmt: skip
            success.append(episode_metrics(batches)["success_rate"])
        drops.append(success[0] - success[1])
        print(f"{path}: success {success[0]:.3f}, with another task's observations {success[1]:.3f}, "
              f"drop {drops[-1]:.3f}")  # fmt: skip
    if len(drops) > 1:
        print(f"drop over {len(drops)} checkpoints: min {min(drops):.3f}, median {median(drops):.3f}, "
              f"max {max(drops):.3f}")  # fmt: skip


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
