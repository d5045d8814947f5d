"""What several test modules share: tiny runs, episodes made by hand, numbers of other codebases.

conftest.py loads this as a plugin, so that its fixtures need no import.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

import pytest
import torch

import grpo
import reinforce

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [name for name in ("reinforce", "ppo", "grpo", "gigpo") if (ROOT / f"{name}.py").exists()]
SIZE = dict(d_model=16, n_layers=1, n_heads=2)
GOLDEN = {case["name"]: case for case in json.loads((ROOT / "tests/golden.json").read_text())}


# ---- Runs


@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture
def any_script(script):
    return script


def make_args(script, runs_dir, **flags):
    """Args of a tiny run. Skips the test where the script has no such flag."""
    tiny = dict(
        env_id="number",
        warm_start_steps=20,
        warm_start_batch_size=8,
        warm_start_learning_rate=0.02,
        num_iterations=2,
        num_groups=4,
        group_size=4,
        eval_tasks=16,
        runs_dir=runs_dir,
    )
    known = script.Args.__dataclass_fields__
    missing = [name for name in flags if name not in known]
    if missing:
        pytest.skip(f"{script.__name__}.py has no flag {missing[0]}")
    return script.Args(**tiny | SIZE | flags)


def folder(runs_dir):
    (run_dir,) = runs_dir.iterdir()
    return run_dir


def read_metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_times(lines, also=()):
    drop = lambda key: key.startswith(("time/", *also)) or key.endswith(("seconds", "SPS"))  # noqa: E731
    return [{key: value for key, value in line.items() if not drop(key)} for line in lines]


def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def run(script, runs_dir, **flags):
    """Metrics and final checkpoint of a tiny run."""
    script.train(make_args(script, runs_dir, **flags))
    return read_metrics(folder(runs_dir)), load(folder(runs_dir))


def same(a, b):
    """Equality of nested states, bit for bit."""
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def name(value):
    """For parametrize(ids=name): a script's name."""
    return getattr(value, "__name__", None)


def results(runs_dir):
    """Metrics and checkpoint of the only run in the folder."""
    return read_metrics(folder(runs_dir)), load(folder(runs_dir))


def known(script, **flags):
    """Those of the flags that the script has."""
    return {name: value for name, value in flags.items() if hasattr(script.Args, name)}


def on_rollouts(monkeypatch, script, change):
    """Puts change(rollout, *args, **kwargs) in the place of the training loop's rollouts; those of
    play(), which evaluations use, stay."""
    rollout = script.rollout

    def spy(*args, **kwargs):
        playing = sys._getframe(1).f_code.co_name == "play"
        return rollout(*args, **kwargs) if playing else change(rollout, *args, **kwargs)

    monkeypatch.setattr(script, "rollout", spy)


def nothing(*args, **kwargs):
    return {}


def in_training(
    script, tmp_path, rewards, turns, *, groups=0, anchors=None, ends=None, warm_up=nothing, **flags
):
    """What train() hands to its loss if the rollout brings these episodes, with rewards (B, K) and
    turns as layout() takes them: advantages and loss_mask (B, T). They are one group by default.
    Flags that the script has not are dropped. PPO's critic is warmed up by warm_up: by default it
    stays zero, so that with lambda 1 the advantage is the return."""
    turn_ids, mask = layout(*turns)
    rewards, B = torch.as_tensor(rewards, dtype=torch.float32), len(turns)
    ends = ends or ["submitted"] * B
    truncated = torch.tensor([end == "context_limit" for end in ends])
    counts = dict(success=False, hacked=False, tool_calls=0, errors=0, tools=[], env_seconds=0.0)
    infos = [
        counts | dict(end=end, truncated=end == "context_limit", turns=len(episode), pair="")
        for end, episode in zip(ends, turns, strict=True)
    ]
    batch = script.Batch(
        tokens=torch.ones_like(turn_ids),
        lengths=torch.tensor([1 + sum(map(sum, episode)) for episode in turns]),
        loss_mask=mask,
        logprobs=-1.0 - torch.arange(B)[:, None].expand_as(mask),  # they name the episode
        turn_ids=turn_ids,
        rewards=rewards,
        terminated=~truncated,
        truncated=truncated,
        group_ids=torch.as_tensor(groups).expand(B),
        infos=infos,
        anchors=anchors or [[object() for _ in episode] for episode in turns],
    )
    inner = script.compute_loss
    advantages, loss_mask, seen = torch.zeros_like(mask), torch.zeros_like(mask), []

    def spy(*args, **kwargs):
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        rows, T = (-given["logprobs"][:, 1]).round().long() - 1, given["loss_mask"].shape[1]
        advantages[rows, :T], loss_mask[rows, :T] = given["advantages"], given["loss_mask"]
        seen.extend(rows.tolist())
        return inner(*args, **kwargs)

    size = dict(num_groups=1, group_size=B, max_turns=rewards.shape[1], micro_batch_size=B)
    once = dict(num_iterations=1, warm_start_steps=0, num_minibatches=1, kl_coef=0.0)
    plain = dict(baseline="loo", norm="none", gamma=1.0, gae_lambda=1.0, norm_adv=False)
    with pytest.MonkeyPatch.context() as patch:
        on_rollouts(patch, script, lambda *args, **kwargs: batch)
        patch.setattr(script, "compute_loss", spy)
        patch.setattr(script, "describe_start", nothing)  # it takes most of the time
        patch.setattr(script, "warm_up_critic", warm_up, raising=False)
        run(script, tmp_path / script.__name__, **known(script, **size | once | plain | flags))
    assert sorted(seen) == list(range(B))
    return advantages, loss_mask


# ---- Tensors


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def golden(name):
    """Inputs and outputs of a case of golden.json: numbers as float64 tensors, text as it is."""

    def convert(value):
        if isinstance(value, dict):
            return {key: convert(x) for key, x in value.items()}
        is_text = isinstance(value[0] if isinstance(value, list) else value, str)
        return value if is_text else double(value)

    return convert(GOLDEN[name]["inputs"]), convert(GOLDEN[name]["outputs"])


def layout(*episodes):
    """turn_ids and loss_mask (B, T) of episodes: a prompt of one token, then each turn's (sampled,
    observed) tokens, then padding."""
    rows = []
    for turns in episodes:
        rows.append([(-1, 0)])
        for k, (sampled, observed) in enumerate(turns):
            rows[-1] += [(k, 1)] * sampled + [(k, 0)] * observed
    T = max(map(len, rows))
    padded = torch.tensor([row + [(-1, 0)] * (T - len(row)) for row in rows])
    return padded[..., 0], padded[..., 1].float()


class FixedLogits:
    """A model whose logits (B, T, V) do not depend on the tokens. Row t scores token t + 1."""

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, tokens, at, return_hidden):
        return self.logits[torch.arange(len(tokens))[:, None], at]

    def head(self, hidden):
        return hidden


def random_batch(*, B=8, T=12, V=5, seed=0):
    """Tokens, mask with gaps (row 2 fully masked), advantages, old log-probs, logits of a policy
    and of a reference."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = torch.randint(V, (B, T), generator=generator)
    mask = (torch.rand(B, T, generator=generator) < 0.5).double()
    mask[:, 0], mask[:, 1], mask[2] = 0, 1, 0
    logits, ref_logits = randn(B, T, V), randn(B, T, V)
    old = grpo.score(FixedLogits(logits), tokens, mask, 1.0)[0] + 0.3 * randn(B, T)
    return tokens, mask, randn(B, T) * mask, old, logits.requires_grad_(), ref_logits


# ---- One call for all four scripts


def advantages(script, rewards, groups, turn_ids=None, mask=None, **options):
    """compute_advantages of any script but ppo, (B, T). Without turn_ids: one token a turn."""
    rewards, groups = torch.as_tensor(rewards), torch.as_tensor(groups)
    if turn_ids is None:
        turn_ids, mask = torch.arange(rewards.shape[1]).expand_as(rewards), torch.ones_like(rewards)
    options = dict(credit="episode", gamma=1.0, baseline="loo", norm="none") | options
    if script is reinforce:
        assert options.pop("norm") == "none"
    return script.compute_advantages(rewards, turn_ids, mask, groups, **options)


def compute_loss(script, *, loss_mask, **given):
    """compute_loss of any script. Tensors that are not given are zero, weights those of the token
    mean; coefficients are those of the clipped policy loss alone. What the script has not is
    dropped."""
    zeros = torch.zeros_like(loss_mask)
    tensors = ("newlogprobs", "newvalues", "entropy", "logprobs", "values", "advantages", "returns")
    tensors = dict.fromkeys(tensors, zeros) | dict(loss_mask=loss_mask)
    weights = loss_mask / loss_mask.sum().clamp(min=1)
    plain = dict(clip_coef=0.2, clip_coef_high=0.28, dual_clip=None, clip_vloss=False)
    plain |= dict(weights=weights, vf_coef=0.0, kl_coef=0.0, ent_coef=0.0)
    given, has = tensors | plain | given, inspect.signature(script.compute_loss).parameters
    return script.compute_loss(**{key: given[key] for key in given if key in has})
