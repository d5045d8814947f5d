"""What several test modules use: tiny runs and what they leave, command lines, spies, environments,
episodes made by hand, numbers of other codebases."""

import inspect
import json
import math
import re
import sys
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch

import grpo
import reinforce

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("reinforce", "ppo", "grpo", "gigpo")
GOLDEN = {case["name"]: case for case in json.loads((ROOT / "tests/golden.json").read_text())}
SIZE = dict(d_model=16, n_layers=1, n_heads=2)
TINY = dict(env_id="number", num_iterations=2, num_groups=4, group_size=4, eval_tasks=16, **SIZE)
TINY |= dict(warm_start_steps=20, warm_start_batch_size=8, warm_start_learning_rate=0.02)


def make_args(script, runs_dir, **flags):
    """Args of a tiny run. Skips the test where the script has no such flag."""
    for name in flags.keys() - script.Args.__dataclass_fields__.keys():
        pytest.skip(f"{script.__name__}.py has no flag {name}")
    return script.Args(**TINY | {"runs_dir": runs_dir} | flags)


def minibatches(script, n):
    """The flag for n optimizer steps a batch, where the script has it: REINFORCE takes one."""
    return {"num_minibatches": n} if hasattr(script.Args, "num_minibatches") else {}


def run(script, runs_dir, **flags):
    """Metrics and final checkpoint of a tiny run, the only one in the folder."""
    script.train(make_args(script, runs_dir, **flags))
    return results(runs_dir)


# ---- What a run leaves


def folder(runs_dir):
    (run_dir,) = runs_dir.iterdir()
    return run_dir


def read_metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def results(runs_dir):
    """Metrics and checkpoint of the only run in the folder."""
    return read_metrics(folder(runs_dir)), load(folder(runs_dir))


def iterations(lines):
    return [line["iteration"] for line in lines]


def finite(lines):
    return all(math.isfinite(value) for line in lines for value in line.values())


def without_times(lines, also=()):
    """The log without what no seed decides, and without keys that start with `also`."""
    times = re.compile("|".join(("time/", ".*seconds$", ".*SPS$", *also)))
    return [{key: x for key, x in line.items() if not times.match(key)} for line in lines]


def same(a, b):
    """Equality of nested states, bit for bit."""
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_end(a, b):
    """Two runs, each metrics and checkpoint, that logged the same and ended in the same state."""
    assert without_times(a[0]) == without_times(b[0])
    for key in a[1].keys() - {"args", "lines"}:
        assert same(a[1][key], b[1][key]), key


def contents(path):
    """Bytes and time of each file under the folder."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


# ---- Command lines


def to_argv(**flags):
    """The flags as a command line has them."""
    argv = []
    for name, value in flags.items():
        no = "no-" if value is False else ""
        argv.append(f"--{no}{name.replace('_', '-')}")
        argv += [] if isinstance(value, bool) else [str(value)]
    return argv


def exit_code(function, *args):
    """What a process that calls this ends with; sys.exit's text goes where it would go."""
    try:
        return function(*args) or 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0


def command(script, *argv):
    """Exit code of `python script.py argv`, run in this process."""
    return exit_code(lambda: script.train(script.parse_args([str(word) for word in argv])))


def refused(capsys, function, *args):
    """The one line on standard error with which function(*args) refuses them: exit code 2."""
    capsys.readouterr()
    code, error = exit_code(function, *args), capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, (code, error)
    return error


# ---- Spies


def spied(monkeypatch, module, name):
    """Keeps each call of a function: the arguments by name, and the result."""
    inner, calls = getattr(module, name), []

    def spy(*args, **kwargs):
        result = inner(*args, **kwargs)
        calls.append((inspect.signature(inner).bind(*args, **kwargs).arguments, result))
        return result

    monkeypatch.setattr(module, name, spy)
    return calls


def on_training_rollouts(patch, script, *, before=lambda n, model, envs: None, after=None):
    """Calls back around the n-th rollout of the training loop, n = 1, 2, ...; others pass."""
    rollout, count = script.rollout, 0

    def spy(model, tokenizer, envs, *args, **kwargs):
        nonlocal count
        if sys._getframe(1).f_code.co_name != "collect":
            return rollout(model, tokenizer, envs, *args, **kwargs)
        count += 1
        before(count, model, envs)
        batch = rollout(model, tokenizer, envs, *args, **kwargs)
        if after:
            after(count, batch)
        return batch

    patch.setattr(script, "rollout", spy)


def with_reward(env, reward_of):
    """Replaces the rewards of this environment: reward_of(terminated)."""
    step = env.step

    def changed(action):
        observation, _, terminated, truncated, info = step(action)
        return observation, reward_of(terminated), terminated, truncated, info

    env.step = changed


# ---- Environments


@lru_cache
def tokenizer_of(env_class):
    return grpo.Tokenizer(env_class.vocabulary())


WORDS = tokenizer_of(grpo.BugFixEnv)


def env_maker(env_class=grpo.BugFixEnv, **options):
    """What the scripts' functions take to make environments, to be passed on with a star."""
    return (partial(env_class, **options),)


def tasks_of(env_class, split, count):
    env = env_class()
    return [env.task(split, i) for i in range(count)]


def partial_batch(**fields):
    """A Batch that has only these fields."""
    return grpo.Batch(**dict.fromkeys(grpo.Batch._fields) | fields)


# ---- Episodes by hand


def name(value):
    """For parametrize(ids=name): a script's name."""
    return getattr(value, "__name__", None)


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
