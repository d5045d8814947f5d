"""PPO's advantages and critic against numbers of other codebases, by hand and plain loops, and in
train(). test_losses.py has its loss, and its update against the exact policy gradient.

golden.json holds outputs of the peers' own functions, each with repository, commit and function.
Each test says which bug it would catch; #n is a public report of that bug.
"""

import functools
import inspect
import math
import sys
from copy import deepcopy
from functools import partial

import pytest
import torch
from helpers import GOLDEN, golden, in_training, layout, nothing, results, run, same
from torch.testing import assert_close

import ppo

UNITS = ("token", "turn")
GARBAGE = (1e9, math.nan)
TOKEN_CASES = [case for case in GOLDEN if case.startswith(("verl_gap_aware", "miles_packed"))]
TURN_CASES = [case for case in GOLDEN if case.startswith("oat_turn_level")]


def gae(rewards, values, mask, turn_ids, bootstrap=None, *, unit, gamma=1.0, gae_lambda=1.0):
    """compute_gae, of episodes that terminated if no bootstrap values are given."""
    bootstrap = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap
    options = dict(gamma=gamma, gae_lambda=gae_lambda)
    options["turn_ids"] = turn_ids if unit == "turn" else None
    return ppo.compute_gae(rewards, values, mask, bootstrap, **options)


# ---- Numbers of other codebases


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("case", TOKEN_CASES)
def test_token_advantages_and_targets_equal_verl_and_miles(case, garbage):
    """#8, #9: catches decay across observations, values read there or in the padding, a bootstrap
    at the end, and whitening over padding, of the targets, or with the biased deviation."""
    inputs, outputs = golden(case)
    rewards, mask = inputs["rewards"], inputs["mask"]
    if "terminal_rewards" in inputs:  # miles adds it at the last sampled token
        last = (mask * torch.arange(1, 13)).argmax(1)
        rewards = rewards.scatter_add(1, last[:, None], inputs["terminal_rewards"][:, None])
    values = torch.where(mask > 0, inputs["values"], garbage)
    options = dict(unit="token", gamma=inputs["gamma"], gae_lambda=inputs["lam"])
    ours, targets = gae(rewards, values, mask, None, **options)
    assert_close(ours, outputs["advantages_raw"], atol=1e-9, rtol=0)
    assert_close(targets, outputs["returns"], atol=1e-9, rtol=0)
    if "advantages_whitened" in outputs:
        whitened = ppo.whiten(torch.where(mask > 0, ours, 1e3), mask)
        assert_close(whitened, outputs["advantages_whitened"], atol=1e-9, rtol=0)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("case", TURN_CASES)
def test_turn_advantages_and_targets_equal_oat(case, garbage):
    """Catches a turn's value read elsewhere than before its first token, decay within a turn, and a
    bootstrap dropped at truncation or taken at termination; turns of 1 to 4 tokens, every value
    that is not read is garbage."""
    inputs, outputs = golden(case)
    sampled, observed = [3, 1, 4, 2, 2], [2, 0, 5, 1, 3]
    turn_ids, mask = layout(list(zip(sampled, observed, strict=True)))
    *turn_values, bootstrap = inputs["turn_values_plus_bootstrap"]
    values = torch.full_like(mask, garbage, dtype=torch.float64)
    for k, value in enumerate(turn_values):
        values[0, 1 + sum(sampled[:k]) + sum(observed[:k])] = value
    rewards = ppo.token_rewards(inputs["turn_rewards"][None], turn_ids, mask)
    bootstrap = (bootstrap * (inputs["dones"][-1] == 0))[None]
    options = dict(unit="turn", gamma=inputs["gamma"], gae_lambda=inputs["lam"])
    both = gae(rewards, values, mask, turn_ids, bootstrap, **options)
    for ours, expected in zip(both, (outputs["advantages"], outputs["returns"]), strict=True):
        expected = expected.repeat_interleave(torch.tensor(sampled))
        assert_close(ours[mask > 0], expected, atol=1e-5, rtol=0)
        assert (ours[mask == 0] == 0).all()


# ---- Plain loops


@pytest.mark.parametrize("value", (0.0, 0.1, 1 / 3, -1e-3, 123.4))
def test_equal_advantages_whiten_to_zero(value):
    """Rounding of the mean of 0.1, 0.1, ... is no spread: divided by 1e-4 it was 1e-3, with one
    sign for all tokens. What the mask does not cover may hold anything."""
    for n in (1, 2, 7, 1000):
        ours = ppo.whiten(torch.full((n, 3), value), torch.ones(n, 3))
        assert torch.equal(ours, torch.zeros(n, 3))
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    expected = ppo.whiten(torch.tensor([[0.0, 1.0, 2.0, 0.0]]), mask)
    assert_close(expected[0, 1:3], torch.tensor([-1.0, 1.0]) * 0.5**0.5, atol=1e-6, rtol=0)
    for content in (math.nan, math.inf, -math.inf):
        advantages = torch.tensor([[content, 1.0, 2.0, content]])
        assert torch.equal(ppo.whiten(advantages, mask), expected)


@pytest.mark.parametrize("unit", ("token", "turn"))
@pytest.mark.parametrize("content", (math.nan, math.inf, -math.inf))
def test_gae_reads_only_what_the_mask_covers(content, unit):
    """Catches rewards or values of observations and padding in a sum: 0 * NaN is NaN."""
    turn_ids, mask = layout([(2, 3), (1, 2)], [(1, 0)])
    rewards, values = torch.rand(*mask.shape), torch.rand(*mask.shape)
    options = dict(turn_ids=turn_ids if unit == "turn" else None, gamma=0.9, gae_lambda=0.8)
    fill = lambda x, content: torch.where(mask > 0, x, content)  # noqa: E731
    zeros = torch.zeros(len(mask))
    results = [
        ppo.compute_gae(fill(rewards, c), fill(values, c), mask, zeros, **options)
        for c in (0.0, content)
    ]
    assert same(*results) and results[0][0].isfinite().all()


def test_a_single_token_whitens_to_zero():
    """#30: the standard deviation of one number is NaN. Also a batch without a trained token, and
    equal advantages."""
    for mask in ([[0.0, 1, 0]], [[0.0, 0, 0]], [[1.0, 1, 1]]):
        ours = ppo.whiten(torch.full((1, 3), 5.0), torch.tensor(mask))
        assert ours.tolist() == [[0, 0, 0]]


def plain_loops(rewards, values, mask, turn_ids, bootstrap, *, unit, gamma, gae_lambda):
    """Sums (gamma * lambda)^i delta[s + i] over an episode's later steps, in plain Python, over
    lists of the steps that one finds by walking along the tokens; rewards (B, K). Returns
    advantages and targets (B, T)."""
    advantages, targets = torch.zeros_like(mask), torch.zeros_like(mask)
    for b in range(len(mask)):
        steps = []  # (turn, tokens)
        for t in mask[b].nonzero()[:, 0].tolist():
            turn = turn_ids[b, t].item()
            if unit == "turn" and steps and steps[-1][0] == turn:
                steps[-1][1].append(t)
            else:
                steps.append((turn, [t]))
        turns = [turn for turn, _ in steps]
        V = [values[b, tokens[0]].item() for _, tokens in steps] + [bootstrap[b].item()]
        r = [rewards[b, k].item() * (k not in turns[s + 1 :]) for s, k in enumerate(turns)]
        deltas = [r[s] + gamma * V[s + 1] - V[s] for s in range(len(steps))]
        for s, (_, tokens) in enumerate(steps):
            A = sum((gamma * gae_lambda) ** i * delta for i, delta in enumerate(deltas[s:]))
            advantages[b, tokens], targets[b, tokens] = A, A + V[s]
    return advantages, targets


@pytest.mark.parametrize("gamma, gae_lambda", ((1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 0.7)))
@pytest.mark.parametrize("unit", UNITS)
def test_gae_equals_plain_loops(unit, gamma, gae_lambda):
    """#7, #45: catches any other place where rewards, values or bootstraps are read, decay in the
    wrong unit, rows that read each other, a row that starts late or ends early, and observation
    tokens that are (with --no-mask-observations: are not) steps. Episodes of 1 to 4 turns of 1 to 4
    sampled and 0 to 3 observed tokens; half of them were truncated."""
    options = dict(unit=unit, gamma=gamma, gae_lambda=gae_lambda)
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for _ in range(20):
        turns = [[(draw(1, 5), draw(0, 4)) for _ in range(draw(1, 5))] for _ in range(6)]
        turn_ids, sampled = layout(*turns)
        rewards, values, bootstrap = randn(6, 5), randn(*sampled.shape), randn(6)
        bootstrap[::2] = 0
        for mask in (sampled.double(), (turn_ids >= 0).double()):
            expected = plain_loops(rewards, values, mask, turn_ids, bootstrap, **options)
            paid = ppo.token_rewards(rewards, turn_ids, mask)
            ours = gae(paid, values, mask, turn_ids, bootstrap, **options)
            assert_close(ours, expected, atol=1e-12, rtol=0)


# ---- The critic in train()


def random_head(model, value_head, *args, **kwargs):
    """In the place of warm_up_critic: a critic whose values differ from state to state."""
    generator = torch.Generator().manual_seed(3)
    torch.nn.init.normal_(value_head.weight, generator=generator)
    torch.nn.init.normal_(value_head.bias, generator=generator)
    return {}


def busy_run(tmp_path, monkeypatch, **flags):
    """A tiny run on the hidden number in which every message is paid something, a third of them end
    the episode, and no other does; without its costly description of the start."""
    step = ppo.NumberEnv.step

    def busy(env, action):
        observation, _, _, truncated, info = step(env, action)
        code, terminated = sum(map(ord, action)), "end" in info
        if code % 3 == 0 or terminated:
            terminated = True
            info |= dict(end="submitted", success=False, hacked=False)
        return observation, (code % 5 + 1) / 5, terminated, truncated, info

    with monkeypatch.context() as patch:
        patch.setitem(ppo.NumberEnv.defaults, "malformed", "error")
        patch.setattr(ppo.NumberEnv, "step", busy)
        patch.setattr(ppo, "describe_start", nothing)
        return run(ppo, tmp_path, **flags)


def spied(monkeypatch, *names):
    """Records the calls of these functions but for those that play() and warm_up_critic() make: the
    arguments by name, networks copied after the call, and the result."""
    calls = {name: [] for name in names}
    for name, inner in {name: getattr(ppo, name) for name in names}.items():

        def spy(*args, inner=inner, name=name, **kwargs):
            result = inner(*args, **kwargs)
            if sys._getframe(1).f_code.co_name not in ("play", "warm_up_critic"):
                given = inspect.signature(inner).bind(*args, **kwargs).arguments
                for key, value in given.items():
                    given[key] = deepcopy(value) if isinstance(value, torch.nn.Module) else value
                calls[name].append((given, result))
            return result

        monkeypatch.setattr(ppo, name, spy)
    return calls


@pytest.mark.parametrize("unit", UNITS)
def test_values_and_bootstrap_are_those_of_the_states(unit, tmp_path, monkeypatch):
    """#45, #43: catches values shifted by one (a baseline must not know the action), a bootstrap at
    termination, none at truncation, or one read elsewhere than after the last token; --gae-unit,
    --gamma or --gae-lambda that do not arrive; and new values that stand at another token than the
    old ones."""
    monkeypatch.setattr(ppo, "warm_up_critic", random_head)
    calls = spied(monkeypatch, "warm_up_critic", "rollout", "compute_gae", "compute_loss")
    flags = dict(gae_unit=unit, gamma=0.9, gae_lambda=0.8, context_length=12, micro_batch_size=5)
    busy_run(tmp_path, monkeypatch, num_iterations=1, num_groups=8, **flags)
    ((started, _),), ((played, batch),), ((given, _),), ((first, _), *_) = calls.values()
    assert (given["gamma"], given["gae_lambda"]) == (0.9, 0.8)
    assert given["turn_ids"] is (batch.turn_ids if unit == "turn" else None)
    assert_close(given["rewards"].sum(1), batch.rewards.sum(1))
    assert torch.equal(given["loss_mask"], batch.loss_mask)
    values, bootstrap = given["values"], given["bootstrap_values"]
    assert not values.requires_grad and batch.truncated.any() and batch.terminated.any()
    assert torch.equal(bootstrap != 0, batch.truncated)
    for b, n in enumerate(batch.lengths.tolist()):
        hidden = played["model"](batch.tokens[b : b + 1, :n], return_hidden=True)
        after = started["value_head"](hidden)[0, :, 0].detach()  # V after token t
        assert_close(values[b, 1:n], after[:-1], atol=1e-5, rtol=0)
        assert_close(bootstrap[b], after[-1] * batch.truncated[b], atol=1e-5, rtol=0)
    old, new = first["values"] * first["loss_mask"], first["newvalues"].detach()
    assert_close(new, old, atol=1e-5, rtol=0)


def test_the_value_loss_trains_the_model_too(tmp_path, monkeypatch):
    """Catches a critic that is cut off from the network: then only its head learns. Seen in Adam's
    first moments, where the value loss alone has a gradient."""
    compute_loss = ppo.compute_loss

    @functools.wraps(compute_loss)
    def values_only(newlogprobs, *args, **kwargs):
        return compute_loss(newlogprobs.detach(), *args, **kwargs)

    monkeypatch.setattr(ppo, "compute_loss", values_only)
    rewards, turns = [[0.5, 0.5], [-1.0, 0.0]], [[(2, 3), (1, 1)], [(3, 2)]]
    flags = dict(ent_coef=0.0, warm_up=random_head)
    in_training(ppo, tmp_path, rewards, turns, **flags)
    _, state = results(tmp_path / "ppo")
    assert state["optimizer"]["state"][0]["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize("norm_adv", (True, False))
def test_advantages_are_whitened_once_a_batch_and_targets_never(norm_adv, tmp_path, monkeypatch):
    """Catches whitening in each minibatch, of the targets or with observations counted,
    --no-norm-adv that whitens, values or targets that are taken again after a step, observations in
    the denominator of the losses, and --vf-coef or --clip-vloss that do not arrive."""
    calls = spied(monkeypatch, "compute_gae", "whiten", "compute_loss")
    flags = dict(num_minibatches=2, update_epochs=2, vf_coef=0.3, clip_vloss=norm_adv)
    busy_run(tmp_path, monkeypatch, norm_adv=norm_adv, num_iterations=2, **flags)
    assert [len(calls[name]) for name in calls] == [2, 2 * norm_adv, 8]
    losses = [given for given, _ in calls["compute_loss"]]
    assert {(given["vf_coef"], given["clip_vloss"]) for given in losses} == {(0.3, norm_adv)}
    for given in losses:  # token-mean, over the sampled ones
        assert_close(given["weights"], given["loss_mask"] / given["loss_mask"].sum())

    def tokens(mask, *tensors):
        return torch.stack([tensor[mask > 0] for tensor in tensors], 1).tolist()

    for n, (given, (raw, targets)) in enumerate(calls["compute_gae"]):
        mask, expected = given["loss_mask"], raw
        if norm_adv:
            whitened, expected = calls["whiten"][n]
            assert whitened["advantages"] is raw and whitened["loss_mask"] is mask
        for a, b in (losses[4 * n :][:2], losses[4 * n + 2 :][:2]):  # the minibatches of an epoch
            keys = ("loss_mask", "advantages", "returns", "values")
            seen = [row for part in (a, b) for row in tokens(*(part[key] for key in keys))]
            assert sorted(seen) == sorted(tokens(mask, expected, targets, given["values"]))


@pytest.mark.parametrize("norm_adv", (True, False))
@pytest.mark.parametrize("turns", ([[(1, 0)]], [[(1, 2)], [(1, 0)], [(1, 1)], [(2, 1)]]))
def test_one_token_leaves_the_weights_finite(turns, norm_adv, tmp_path):
    """#30: minibatches of one episode with exactly one trained token, or, filtered, with none."""
    B = len(turns)
    ends = (["submitted"] * 3 + ["turn_limit"])[:B]
    flags = dict(num_minibatches=B, filter_truncated=True, norm_adv=norm_adv)
    in_training(ppo, tmp_path, [[1.0]] * B, turns, ends=ends, **flags)
    (_, line), state = results(tmp_path / "ppo")
    weights = [*state["model"].values(), *state["value_head"].values()]
    assert all(x.isfinite().all() for x in weights)
    assert all(math.isfinite(x) for x in line.values()) and line["losses/grad_norm"] > 0


def test_a_constant_return_is_learned(tmp_path, monkeypatch, capsys):
    """#44: values stored as plain numbers give the value loss no gradient, and all looks normal.
    The value loss falls below a tenth of its start within 60 iterations, explained variance is
    logged, and that the rewards teach nothing is told."""
    step = ppo.NumberEnv.step

    def constant(env, action):
        observation, _, terminated, truncated, info = step(env, action)
        return observation, 0.7 * terminated, terminated, truncated, info

    monkeypatch.setattr(ppo.NumberEnv, "step", constant)
    monkeypatch.setattr(ppo, "describe_start", nothing)
    monkeypatch.setattr(ppo, "warm_up_critic", nothing)  # the head starts at zero
    flags = dict(gae_lambda=1.0, eval_every=100, learning_rate=2e-3)
    lines, state = run(ppo, tmp_path, num_iterations=60, **flags)
    losses = [line["losses/value_loss"] for line in lines[1:]]
    assert losses[0] == pytest.approx(0.5 * 0.7**2, rel=0.3) and losses[-1] < 0.1 * losses[0]
    assert state["value_head"]["weight"].abs().sum() > 0 and state["value_head"]["bias"] != 0
    assert capsys.readouterr().out.count("warning: every episode has the same return") == 60
    assert all(math.isfinite(line["losses/explained_variance"]) for line in lines[1:])


@pytest.mark.parametrize(
    "scale, shift, expected", ((0, 0.0, 0.0), (1, 0.0, 1.0), (0, 0.4, 0.0), (-1, 0.0, -3.0))
)
def test_explained_variance(scale, shift, expected, tmp_path, monkeypatch):
    """Catches its sign, whitened advantages in it, and padding or observations counted: a critic of
    zero or of a constant explains nothing, a perfect one all, its opposite -3."""
    compute_gae = ppo.compute_gae

    def planted(rewards, V, mask, bootstrap, **options):
        _, returns = compute_gae(rewards, torch.zeros_like(V), mask, bootstrap, **options)
        V = torch.where(mask > 0, scale * returns + shift, 50.0)
        return compute_gae(rewards, V, mask, bootstrap, **options)

    monkeypatch.setattr(ppo, "compute_gae", planted)
    rewards = [[0.5, 0.5], [0.25, 0.0], [0.0, -1.0]]
    turns = [[(2, 3), (1, 1)], [(3, 2)], [(1, 0), (1, 4)]]
    in_training(ppo, tmp_path, rewards, turns, norm_adv=True)
    (_, line), _ = results(tmp_path / "ppo")
    assert line["losses/explained_variance"] == pytest.approx(expected, abs=1e-5)


# ---- Its warm-up


@pytest.mark.parametrize("unit", UNITS)
def test_warm_up_regresses_on_the_state_before_each_sampled_token(unit):
    """#43: a target one token off, on observations, discounted per token by turns, or rewards lost.
    The mean squared error is taken here from the hidden states and plain returns, for a head of
    random weights."""
    tokenizer = ppo.Tokenizer(ppo.NumberEnv.vocabulary())
    torch.manual_seed(0)
    model = ppo.TinyAgent(len(tokenizer.words), d_model=16, n_layers=1, n_heads=2)
    head = torch.nn.Linear(16, 1)
    env = dict(max_turns=3, process_reward=0.3, malformed="error", tool_cost=0.0)
    make_env = partial(ppo.NumberEnv, **env)
    tasks = [make_env().task("train", i) for i in range(32)]
    options = dict(temperature=1.0, seed=0, context_length=60)
    (batch,) = ppo.play(model, tokenizer, make_env, tasks, **options)
    rewards, mask, turn_ids = batch.rewards, batch.loss_mask, batch.turn_ids
    zeros, options = torch.zeros_like(mask), dict(unit=unit, gamma=0.9, gae_lambda=1.0)
    _, targets = plain_loops(rewards, zeros, mask, turn_ids, zeros[:, 0], **options)
    errors = []
    for b, t in mask.nonzero().tolist():
        hidden = model(batch.tokens[b : b + 1, :t], return_hidden=True)[0, -1]
        errors.append(0.5 * (head(hidden) - targets[b, t]).item() ** 2)
    metrics = ppo.warm_up_critic(model, head, [batch], steps=1, gamma=0.9, turn_unit=unit == "turn")
    assert rewards.abs().sum() > 0 and metrics["warm_start/critic_episodes"] == 32
    assert metrics["warm_start/critic_loss"] == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_the_warm_up_in_train(tmp_path, monkeypatch):
    """#44: a loss without a gradient, or that is not logged. Also catches a warm-up on other
    episodes than the start's, at another discount or unit, or on episodes whose end
    --context-length hides, as if they had earned 0; one that moves the model; and 0 steps that warm
    up all the same."""
    losses, models = [], []
    for steps in (0, 1, 200):
        with monkeypatch.context() as patch:
            calls = spied(patch, "warm_up_critic", "rollout")
            flags = dict(critic_warmup_steps=steps, gamma=0.9, gae_unit="turn", context_length=6)
            lines, _ = busy_run(tmp_path / str(steps), patch, num_iterations=1, **flags)
        models.append(calls["rollout"][0][0]["model"].state_dict())
        assert len(calls["warm_up_critic"]) == (steps > 0)
        for given, metrics in calls["warm_up_critic"]:
            assert (given["steps"], given["gamma"], given["turn_unit"]) == (steps, 0.9, True)
            assert sum(len(batch.tokens) for batch in given["batches"]) == 32
            assert not any(batch.truncated.any() for batch in given["batches"])
            assert metrics.items() <= lines[0].items()
            losses.append(metrics["warm_start/critic_loss"])
        assert ("warm_start/critic_loss" in lines[0]) == (steps > 0)
    assert 0 < losses[1] < 0.7 * losses[0]
    assert same(models[0], models[1]) and same(models[0], models[2])
