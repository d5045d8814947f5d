"""ppo.py: its advantages, critic and loss against numbers of other codebases, plain loops, enumeration, and in train().

golden_ppo.json holds outputs of the peers' own functions, each with repository, commit and function. Each test says
which bug it would catch; #n is a public report of that bug. Everything runs on the CPU in seconds.
"""

import functools
import inspect
import json
import math
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import ppo  # noqa: E402
import reinforce  # noqa: E402
from test_algorithms import PLAIN_PPO, double, in_training, layout, make_args, on_rollouts, results  # noqa: E402
from test_grpo import FixedLogits, TablePolicy, enumerate_toy, exact_gradient, random_batch  # noqa: E402

GOLDEN = {case["name"]: case for case in json.loads((Path(__file__).parent / "golden_ppo.json").read_text())}
ALL_TERMS = PLAIN_PPO | dict(clip_vloss=True, vf_coef=0.5, kl_coef=0.1, ent_coef=0.01)
UNITS = ("token", "turn")
GARBAGE = (1e9, math.nan)


def golden(name):
    """Inputs and outputs of a case as float64 tensors, and its tolerance."""
    case = GOLDEN[name]
    tensors = lambda values: {k: double(v) for k, v in values.items() if not isinstance(v, str)}  # noqa: E731
    return tensors(case["inputs"]), tensors(case["outputs"]), float(case["atol"])


def gae(rewards, values, mask, bootstrap=0.0, *, turn_ids=None, gamma=1.0, gae_lambda=1.0):
    """compute_gae of lists or tensors; bootstrap may be one number for all rows."""
    rewards, values, mask = (torch.atleast_2d(torch.as_tensor(x)) for x in (rewards, values, mask))
    bootstrap = torch.as_tensor(bootstrap, dtype=values.dtype).expand(len(values)).contiguous()
    return ppo.compute_gae(rewards, values, mask, bootstrap, turn_ids=turn_ids, gamma=gamma, gae_lambda=gae_lambda)


def random_episodes(seed, *, B=6):
    """Episodes of 1 to 4 turns of 1 to 4 sampled and 0 to 3 observed tokens, padded: rewards (B, K), values (B, T) of
    the state before each token, loss_mask, turn_ids, bootstrap values (half of them 0), and the turns."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    turns = [[(draw(1, 5), draw(0, 4)) for _ in range(draw(1, 5))] for _ in range(B)]
    turn_ids, mask = layout(*turns)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    played = torch.arange(5) < torch.tensor([len(episode) for episode in turns])[:, None]
    bootstrap = randn(B) * (torch.arange(B) % 2)
    return randn(B, 5) * played, randn(*mask.shape), mask.double(), turn_ids, bootstrap, turns


def of_unit(unit, turn_ids):
    return turn_ids if unit == "turn" else None


def value_loss(newvalues, values, returns, mask, *, vf_coef=1.0, clip_vloss=False, clip_coef=0.2):
    """compute_loss with nothing but the value loss, by token mean; and its metrics."""
    zeros = torch.zeros_like(mask)
    options = PLAIN_PPO | dict(vf_coef=vf_coef, clip_vloss=clip_vloss, clip_coef=clip_coef)
    return ppo.compute_loss(zeros, newvalues, zeros, zeros, values, zeros, returns, mask, mask / mask.sum(), **options)


def random_loss(rows=slice(None), *, change=lambda **tensors: tensors, **options):
    """compute_loss on the batch of test_grpo.random_batch, with values of a leaf: loss, metrics, logits, new values."""
    tokens, mask, advantages, old, logits, ref_logits = random_batch()
    generator = torch.Generator().manual_seed(2)
    newvalues, values, returns = torch.randn(3, *mask.shape, generator=generator, dtype=torch.float64)
    newvalues.requires_grad_()
    newlogprobs, entropy, _ = ppo.score(FixedLogits(logits), tokens, mask, 1.0)
    ref_logprobs, _, _ = ppo.score(FixedLogits(ref_logits), tokens, mask, 1.0)
    tensors = change(newlogprobs=newlogprobs, newvalues=newvalues, entropy=entropy, logprobs=old, values=values,
                     advantages=advantages, returns=returns, ref_logprobs=ref_logprobs)  # fmt: skip
    tensors |= dict(loss_mask=mask, weights=mask / mask.sum())
    loss, metrics = ppo.compute_loss(**{key: x[rows] for key, x in tensors.items()}, **ALL_TERMS | options)
    return loss, metrics, logits, newvalues


# ---- Numbers of other codebases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith(("verl_gap_aware", "miles_packed"))])
def test_token_advantages_and_targets_equal_verl_and_miles(name, garbage):
    """#8: catches decay across observations, values read there, a bootstrap at the end, and whitening over padding, of
    the targets, or with the biased standard deviation."""
    inputs, outputs, atol = golden(name)
    rewards, mask = inputs["rewards"], inputs["mask"]
    if "terminal_rewards" in inputs:  # miles adds it at the last sampled token
        last = (mask * torch.arange(1, 13)).argmax(1)
        rewards = rewards.scatter_add(1, last[:, None], inputs["terminal_rewards"][:, None])
    values = torch.where(mask > 0, inputs["values"], garbage)
    ours, targets = gae(rewards, values, mask, gamma=inputs["gamma"], gae_lambda=inputs["lam"])
    assert_close(ours, outputs["advantages_raw"], atol=atol, rtol=0)
    assert_close(targets, outputs["returns"], atol=atol, rtol=0)
    if "advantages_whitened" in outputs:
        assert_close(ppo.whiten(ours, mask), outputs["advantages_whitened"], atol=atol, rtol=0)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("oat_turn_level")])
def test_turn_advantages_and_targets_equal_oat(name, garbage):
    """Catches a turn's value read elsewhere than before its first token, decay within a turn, and a bootstrap dropped
    at truncation or taken at termination; turns of 1 to 4 tokens, every value that is not read is garbage."""
    inputs, outputs, atol = golden(name)
    sampled, observed = [3, 1, 4, 2, 2], [2, 0, 5, 1, 3]
    turn_ids, mask = layout(list(zip(sampled, observed)))
    mask = mask.double()
    first = torch.tensor([1 + sum(sampled[:k]) + sum(observed[:k]) for k in range(5)])
    *values, bootstrap = inputs["turn_values_plus_bootstrap"]
    V = torch.full_like(mask, garbage)
    V[0, first] = torch.stack(values)
    rewards = ppo.token_rewards(inputs["turn_rewards"][None], turn_ids, mask)
    ours, targets = gae(rewards, V, mask, bootstrap * (inputs["dones"][-1] == 0), turn_ids=turn_ids,
                        gamma=inputs["gamma"], gae_lambda=inputs["lam"])  # fmt: skip
    repeats = torch.tensor(sampled)
    assert_close(ours[mask > 0], outputs["advantages"].repeat_interleave(repeats), atol=atol, rtol=0)
    assert_close(targets[mask > 0], outputs["returns"].repeat_interleave(repeats), atol=atol, rtol=0)
    assert (ours[mask == 0] == 0).all() and (targets[mask == 0] == 0).all()


def test_whitening_equals_trl():
    """Catches a mean or a standard deviation that counts padding or observations, or is not subtracted."""
    inputs, outputs, _ = golden("trl/masked_whiten")
    x, mask = inputs["x"], inputs["mask"]
    for garbage in (0.0, 1e9):
        ours = ppo.whiten(torch.where(mask > 0, x, garbage), mask)
        assert_close(ours, outputs["shift"] * mask, atol=2e-9, rtol=0)  # TRL adds 1e-8 to the count as well
        assert (ours[mask == 0] == 0).all()


@pytest.mark.parametrize("clip", ("0.2", "0.5", "1e+09", "off"))
def test_value_loss_equals_verl(clip):
    """Value and gradient: catches min for max, a clip around the target, halving twice, a value loss that is not
    masked, and --no-clip-vloss that clips."""
    inputs, outputs, atol = golden(f"verl/token-mean/clip{clip if clip != 'off' else '1e+09'}")
    newvalues, mask = inputs["vpreds"].requires_grad_(), inputs["mask"]
    options = dict(clip_vloss=False) if clip == "off" else dict(clip_vloss=True, clip_coef=float(clip))
    loss, metrics = value_loss(newvalues, inputs["values_old"], inputs["returns"], mask, vf_coef=0.7, **options)
    loss.backward()
    assert_close(loss.detach() / 0.7, outputs["loss"], atol=2e-8, rtol=0)  # verl adds 1e-8 to the count
    assert_close(metrics["losses/value_loss"] / mask.sum(), outputs["loss"], atol=2e-8, rtol=0)
    assert_close(newvalues.grad / 0.7, outputs["grad_vpreds"], atol=atol, rtol=0)


def test_clipped_value_loss_equals_cleanrl():
    """As above, without a mask; CleanRL too clips the value by the policy's coefficient."""
    inputs, outputs, atol = golden("cleanrl/clip_True")
    newvalues = inputs["vpreds"].requires_grad_()
    loss, _ = value_loss(newvalues, inputs["values_old"], inputs["returns"], torch.ones_like(newvalues).detach(),
                         clip_vloss=True, clip_coef=float(inputs["clip_coef"]))  # fmt: skip
    loss.backward()
    assert_close(loss.detach(), outputs["loss"], atol=1e-8, rtol=0)
    assert_close(newvalues.grad, outputs["grad_vpreds"], atol=atol, rtol=0)


def test_policy_loss_equals_verl():
    """Value and gradient: catches a missing clip, min for max, a wrong sign or denominator. verl also caps the loss of
    a bad token at 3 times its advantage, without a gradient; the two tokens where this bites get it here by hand."""
    inputs, outputs, atol = golden("ppo/token_adv/token-mean/low0.2_high0.2_dual3")
    newlogprobs, old = inputs["log_prob"].requires_grad_(), inputs["old_log_prob"]
    A, mask = inputs["advantages"], inputs["mask"]
    capped = mask * ((A < 0) & ((newlogprobs - old).exp() > 3))
    zeros, weights = torch.zeros_like(mask), mask / mask.sum()
    loss, metrics = ppo.compute_loss(newlogprobs, zeros, zeros, old, zeros, A, zeros, mask, weights * (1 - capped),
                                     **PLAIN_PPO)  # fmt: skip
    loss.backward()
    by_hand = (weights * capped * -3 * A).sum()
    assert capped.sum() == 2
    assert_close(loss.detach() + by_hand, outputs["loss"], atol=1e-9, rtol=0)
    assert_close(metrics["losses/policy_loss"], loss.detach())
    assert_close(newlogprobs.grad, outputs["grad_log_prob"], atol=atol, rtol=0)
    assert_close(metrics["losses/old_approx_kl"] / mask.sum(), outputs["ppo_kl"], atol=1e-8, rtol=0)


# ---- Worked examples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", (9.0, 1000.0, *GARBAGE))
@pytest.mark.parametrize("pads", (0, 3))
def test_observations_and_padding_are_no_steps(garbage, pads):
    """#8, #9: catches decay over observations, their values (the naive loop gives 2.116, 2.842, .328, .4), and a value
    on a padded slot that leaks back as a bootstrap or into the value loss."""
    mask = torch.tensor([[1.0, 1, 0, 0, 1, 1] + [0] * pads])
    values = torch.tensor([[0.2, 0.3, garbage, garbage, 0.5, 0.6] + [100.0] * pads])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 1] + [0] * pads])
    turn_ids = torch.tensor([[0, 0, 0, 0, 1, 1] + [-1] * pads])
    ours, targets = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    assert_close(ours[0, :6], torch.tensor([0.348035, 0.386160, 0, 0, 0.328, 0.4]), atol=1e-6, rtol=0)
    assert (ours[0, 6:] == 0).all() and (targets[mask == 0] == 0).all()
    loss, metrics = value_loss(values, values, targets, mask)
    expected = 0.5 * ours.square().sum()
    assert_close(loss, expected / 4)
    assert_close(metrics["losses/value_loss"], expected)
    by_turn, _ = gae(rewards, values, mask, turn_ids=turn_ids, gamma=0.9, gae_lambda=0.8)
    assert_close(by_turn[mask > 0], torch.tensor([0.61, 0.61, 0.5, 0.5]))  # .9 * .5 - .2 + .72 * (1 - .5)


@pytest.mark.parametrize("observed", (0, 2, 4, 40))
def test_discount_counts_sampled_tokens_or_turns(observed):
    """#7: a running return multiplied by the mask never reaches what precedes an observation. Two turns of two tokens,
    1 at the end, discount .9, no critic: .729, .81, .9, 1 by tokens, .9, 1 by turns, however long the observation."""
    turn_ids, mask = layout([(2, observed), (2, 0)])
    rewards = ppo.token_rewards(torch.tensor([[0.0, 1.0]]), turn_ids, mask)
    for unit, expected in (("token", [0.729, 0.81, 0.9, 1.0]), ("turn", [0.9, 0.9, 1.0, 1.0])):
        ours, _ = gae(rewards, torch.zeros_like(mask), mask, turn_ids=of_unit(unit, turn_ids), gamma=0.9)
        assert_close(ours[mask > 0], torch.tensor(expected))


@pytest.mark.parametrize("unit", UNITS)
def test_a_last_observation_does_not_swallow_the_reward(unit, tmp_path):
    """#10: a reward placed on the last token, then masked. The same actions, with and without an observation after the
    last: same advantages, in train() too, and the rewards of the tokens sum to those of the turns."""
    rewards, seen = torch.tensor([[0.25, 1.0], [0.5, 0.0]]), []
    for last in (0, 3):
        turns = [[(2, 2), (2, last)], [(3, last)]]
        turn_ids, mask = layout(*turns)
        paid = ppo.token_rewards(rewards, turn_ids, mask)
        assert torch.equal(paid.sum(1), rewards.sum(1)) and (paid[mask == 0] == 0).all()
        values = torch.where(mask > 0, mask.cumsum(1) / 8, 1e9)
        ours, _ = gae(paid, values, mask, turn_ids=of_unit(unit, turn_ids), gamma=0.9, gae_lambda=0.8)
        found, mask = in_training(ppo, tmp_path / str(last), rewards=rewards, turns=turns, groups=[0, 0], gae_unit=unit)
        assert found[mask > 0].tolist() == [1.25, 1.25, 1.0, 1.0, 0.5, 0.5, 0.5]
        seen.append(ours[mask > 0])
    assert torch.equal(*seen)


@pytest.mark.parametrize("unit", UNITS)
def test_every_trained_token_carries_its_reward_to_go(unit, tmp_path):
    """#31: turns but the last got a row that was already masked. #32: only the last reward counted. Turns of 2, 7 and 3
    tokens paid .2, .3, .5 get 1, .8 and .5, in train()."""
    ours, mask = in_training(ppo, tmp_path, rewards=[[0.2, 0.3, 0.5]], turns=[[(2, 3), (7, 1), (3, 2)]], groups=[0],
                             gae_unit=unit)  # fmt: skip
    assert mask.sum() == 12
    assert_close(ours[mask > 0], torch.tensor([1.0, 0.8, 0.5]).repeat_interleave(torch.tensor([2, 7, 3])))


@pytest.mark.parametrize("unit", UNITS)
def test_truncated_and_terminated(unit):
    """#45: a time limit treated like a true end. Rewards 0, values .2, .3, .5, discount .9, lambda .8: truncated before
    a state of value .7 .245392, .2436, .13, terminated -.0812, -.21, -.5; both in one batch, of one token a turn."""
    turn_ids, mask = layout(*[[(1, 2), (1, 0), (1, 1)]] * 2)
    values = torch.zeros_like(mask).masked_scatter(mask > 0, torch.tensor([0.2, 0.3, 0.5] * 2))
    ours, targets = gae(torch.zeros_like(mask), values, mask, [0.7, 0.0], turn_ids=of_unit(unit, turn_ids), gamma=0.9,
                        gae_lambda=0.8)  # fmt: skip
    expected = torch.tensor([0.245392, 0.2436, 0.13, -0.0812, -0.21, -0.5])
    assert_close(ours[mask > 0], expected, atol=1e-6, rtol=0)
    assert_close(targets, (values + ours) * mask)


def test_a_single_token_whitens_to_zero():
    """#30: the standard deviation of one number is NaN. Also a batch without a trained token, and equal advantages."""
    for mask in ([[0.0, 1, 0]], [[0.0, 0, 0]], [[1.0, 1, 1]]):
        assert ppo.whiten(torch.full((1, 3), 5.0), torch.tensor(mask)).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("norm_adv", (True, False))
@pytest.mark.parametrize("turns", ([[(1, 0)]], [[(1, 2)], [(1, 0)]]), ids=("one token in all", "one a minibatch"))
def test_one_token_leaves_the_weights_finite(turns, norm_adv, tmp_path):
    """#30: in train(), minibatches of one episode with exactly one trained token."""
    B = len(turns)
    in_training(ppo, tmp_path, rewards=[[1.0]] * B, turns=turns, groups=[0] * B, num_minibatches=B, norm_adv=norm_adv)
    (_, line), state = results(tmp_path / "ppo")
    assert all(x.isfinite().all() for part in ("model", "value_head") for x in state[part].values())
    assert all(math.isfinite(x) for x in line.values()) and line["losses/grad_norm"] > 0


def test_minibatches_of_one_episode(tmp_path):
    """#30: as above where the environment plays, and filtered episodes leave minibatches without any token."""
    flags = dict(num_groups=2, group_size=2, num_minibatches=4, update_epochs=2, context_length=6)
    ppo.train(make_args(ppo, tmp_path, filter_truncated=True, **flags))
    lines, state = results(tmp_path)
    assert all(x.isfinite().all() for part in ("model", "value_head") for x in state[part].values())
    assert all(math.isfinite(x) for line in lines for x in line.values())


# ---- compute_gae: properties -------------------------------------------------------------------------------------


def brute_force(rewards, values, mask, bootstrap, turn_ids, *, unit, gamma, gae_lambda):
    """Sums (gamma * lambda)^i delta[s + i] over an episode's later steps, in plain Python, over lists of the steps that
    one finds by walking along the tokens. Returns advantages and targets (B, T)."""
    advantages, targets = torch.zeros_like(mask), torch.zeros_like(mask)
    for b in range(len(mask)):
        steps = []  # (turn, tokens)
        for t in mask[b].nonzero()[:, 0].tolist():
            turn = turn_ids[b, t].item()
            if unit == "turn" and steps and steps[-1][0] == turn:
                steps[-1][1].append(t)
            else:
                steps.append((turn, [t]))
        V = [values[b, tokens[0]].item() for _, tokens in steps] + [bootstrap[b].item()]
        turns = [turn for turn, _ in steps]
        r = [rewards[b, turn].item() if turn not in turns[s + 1 :] else 0.0 for s, turn in enumerate(turns)]
        for s, (_, tokens) in enumerate(steps):
            A = sum((gamma * gae_lambda) ** (i - s) * (r[i] + gamma * V[i + 1] - V[i]) for i in range(s, len(steps)))
            advantages[b, tokens], targets[b, tokens] = A, A + V[s]
    return advantages, targets


@pytest.mark.parametrize("gamma, gae_lambda", ((1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 0.7)))
@pytest.mark.parametrize("unit", UNITS)
def test_gae_equals_plain_loops(unit, gamma, gae_lambda):
    """Catches any other place where rewards or values are read, decay in the wrong unit, a row that starts late or ends
    early, and observation tokens that are (with --no-mask-observations: are not) steps."""
    for seed in range(20):
        rewards, values, mask, turn_ids, bootstrap, _ = random_episodes(seed)
        for m in (mask, (turn_ids >= 0).double()):
            paid = ppo.token_rewards(rewards, turn_ids, m)
            options = dict(gamma=gamma, gae_lambda=gae_lambda)
            ours = gae(paid, values, m, bootstrap, turn_ids=of_unit(unit, turn_ids), **options)
            expected = brute_force(rewards, values, m, bootstrap, turn_ids, unit=unit, **options)
            for a, b in zip(ours, expected):
                assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("unit", UNITS)
def test_values_that_are_not_read_change_nothing(unit):
    """Catches 0 * inf and 0 * NaN, and values read at observations, padding or (by turns) inside a turn; bit for bit,
    whitened too."""
    for seed in range(5):
        rewards, values, mask, turn_ids, bootstrap, _ = random_episodes(seed)
        first = (mask > 0) & ((F.pad(mask, (1, 0))[:, :-1] == 0) | (F.pad(turn_ids, (1, 0))[:, :-1] != turn_ids))
        read = first if unit == "turn" else mask > 0
        paid, options = ppo.token_rewards(rewards, turn_ids, mask), dict(turn_ids=of_unit(unit, turn_ids), gamma=0.9)
        expected = gae(paid, values, mask, bootstrap, **options)
        for garbage in GARBAGE:
            ours = gae(paid, torch.where(read, values, garbage), mask, bootstrap, **options)
            assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("unit", UNITS)
def test_lengths_of_observations_and_order_of_rows_do_not_matter(unit):
    """#7: catches anything that counts observation tokens, and rows that read each other's bootstrap or length."""
    rewards, values, mask, turn_ids, bootstrap, turns = random_episodes(0)
    long_ids, long_mask = layout(*[[(sampled, 2 * observed + 3) for sampled, observed in episode] for episode in turns])
    long_mask = long_mask.double()
    long_values = torch.full_like(long_mask, 7.0).masked_scatter(long_mask > 0, values[mask > 0])

    def run(values, mask, turn_ids, rows=slice(None)):
        paid = ppo.token_rewards(rewards[rows], turn_ids[rows], mask[rows])
        ids = of_unit(unit, turn_ids[rows])
        return gae(paid, values[rows], mask[rows], bootstrap[rows], turn_ids=ids, gamma=0.9, gae_lambda=0.8)

    order = torch.tensor([3, 0, 5, 1, 4, 2])
    plain, long = run(values, mask, turn_ids), run(long_values, long_mask, long_ids)
    for a, b, c in zip(plain, long, run(values, mask, turn_ids, order)):
        assert torch.equal(a[mask > 0], b[long_mask > 0]) and torch.equal(a[order], c)


@pytest.mark.parametrize("unit", UNITS)
def test_without_a_critic_it_is_reinforce(unit):
    """With lambda 1, no discount and values of zero the advantage is REINFORCE's reward-to-go: catches a reward that a
    token of its own turn, or of an earlier one, does not get."""
    rewards, values, mask, turn_ids, _, _ = random_episodes(1)
    ours, targets = gae(ppo.token_rewards(rewards, turn_ids, mask), torch.zeros_like(values), mask,
                        turn_ids=of_unit(unit, turn_ids))  # fmt: skip
    theirs = reinforce.compute_advantages(rewards, turn_ids, mask, torch.zeros(6), credit="turn", gamma=1.0,
                                          baseline="none")  # fmt: skip
    expected = reinforce.returns_to_go(rewards, gamma=1.0).gather(1, turn_ids.clamp(min=0)) * mask
    for other in (targets, theirs, expected):
        assert_close(ours, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("V", (2, 3))
def test_update_is_the_exact_policy_gradient_whatever_the_critic(V, unit):
    """Catches a value that knows the action it should judge (read at the token, not before it): that biases the update.
    With lambda 1 and no discount its exact expectation is the gradient of the expected return, the critic being an
    arbitrary function of the tokens so far."""
    policy, (tokens, mask, turn_ids, rewards, chances) = TablePolicy(V), enumerate_toy(V)
    with torch.no_grad():
        probabilities = chances * ppo.score(policy, tokens, mask, 1.0)[0].sum(1).exp()
    prefixes = torch.stack([(tokens[:, :t] * 7 ** torch.arange(t)).sum(1) + 1000 * t for t in range(4)], 1)
    values = torch.sin(prefixes.double() ** 2)  # of the state before token t
    A, targets = gae(ppo.token_rewards(rewards, turn_ids, mask), values, mask, turn_ids=of_unit(unit, turn_ids))
    newlogprobs, entropy, _ = ppo.score(policy, tokens, mask, 1.0)
    loss, _ = ppo.compute_loss(newlogprobs, values, entropy, newlogprobs.detach(), values, A, targets, mask,
                               mask * probabilities[:, None], **PLAIN_PPO)  # fmt: skip
    ours, exact = torch.autograd.grad(loss, policy.params), exact_gradient(policy, enumerate_toy(V))
    for a, b in zip(ours, exact):
        assert_close(-a, b, atol=1e-12, rtol=0)
    assert exact[-1].norm() > 0.01


# ---- compute_loss: properties ------------------------------------------------------------------------------------


def test_loss_and_metrics_read_only_what_the_mask_covers():
    """#3, #11: catches KL, entropy, values or ratios of observations and padding in the loss, its gradients or the
    metrics, NaN there included."""
    mask = random_batch()[1]
    spoil = lambda x, garbage: torch.where(mask > 0, x, garbage)  # noqa: E731

    def change(**tensors):
        for n, key in enumerate(("newvalues", "logprobs", "values", "returns", "ref_logprobs")):
            tensors[key] = spoil(tensors[key], math.nan if n % 2 else 1e9)
        return tensors | {key: spoil(tensors[key], -300.0) for key in ("newlogprobs", "entropy", "advantages")}

    gradients, all_metrics = [], []
    for run in (random_loss(), random_loss(change=change)):
        loss, metrics, logits, newvalues = run
        gradients.append([loss.detach(), *torch.autograd.grad(loss, (logits, newvalues))])
        all_metrics.append(metrics)
    assert all(map(torch.equal, *gradients)) and len(metrics) == 7
    assert all(torch.equal(all_metrics[0][key], all_metrics[1][key]) for key in metrics)
    by_logits, by_values = (x.abs() > 0 for x in gradients[0][1:])
    assert not by_logits.any(2)[:, :-1][mask[:, 1:] == 0].any() and by_logits.any(2)[:, :-1][mask[:, 1:] > 0].all()
    assert not by_values[mask == 0].any() and by_values.any()


def test_micro_batches_add_up():
    """Catches a denominator taken per micro-batch, in the loss, its gradients or the metrics."""
    whole, parts = random_loss(), [random_loss(rows) for rows in (slice(0, 3), slice(3, 4), slice(4, 8))]
    gradients = lambda run: torch.autograd.grad(run[0], run[2:], retain_graph=True)  # noqa: E731
    assert_close(sum(part[0] for part in parts), whole[0], atol=1e-12, rtol=0)
    for n, gradient in enumerate(gradients(whole)):
        assert gradient.norm() > 0.01
        assert_close(sum(gradients(part)[n] for part in parts), gradient, atol=1e-12, rtol=0)
    for key, value in whole[1].items():
        assert_close(sum(part[1][key] for part in parts), value, atol=1e-12, rtol=0)


def test_at_ratio_one_the_policy_gradient_is_reinforces():
    """Catches a sign, a scale or a mask that differs between the two."""
    tokens, mask, A, _, logits, _ = random_batch()
    newlogprobs, entropy, _ = ppo.score(FixedLogits(logits), tokens, mask, 1.0)
    old, zeros, weights = newlogprobs.detach(), torch.zeros_like(mask), mask / mask.sum()
    ours, _ = ppo.compute_loss(newlogprobs, zeros, entropy, old, zeros, A, zeros, mask, weights, **PLAIN_PPO)
    theirs, _ = reinforce.compute_loss(newlogprobs, entropy, old, A, mask, weights, kl_coef=0.0, ent_coef=0.0)
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
    assert gradients[0].norm() > 0.01
    assert_close(*gradients, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("advantage", (0.0, -1.0, 1.0))
def test_loss_is_finite_when_the_ratio_overflows(advantage):
    """#41: exp(log-ratio) = inf, and inf * 0 = NaN, though the clipped branch is fine. float32, old -200, new -1."""
    newlogprobs, ones, zeros = torch.tensor([[-1.0, -1.0]], requires_grad=True), torch.ones(1, 2), torch.zeros(1, 2)
    old = torch.tensor([[-200.0, -1.0]])
    loss, metrics = ppo.compute_loss(newlogprobs, zeros, zeros, old, zeros, advantage * ones, zeros, ones, ones / 2,
                                     **PLAIN_PPO)  # fmt: skip
    loss.backward()
    assert loss.isfinite() and newlogprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


# ---- The critic --------------------------------------------------------------------------------------------------


def small_agent(*, d_model=16):
    """A model, a tokenizer, hidden-number environment options, a value head of zeros."""
    tokenizer = ppo.Tokenizer(ppo.NumberEnv.vocabulary())
    torch.manual_seed(0)
    model = ppo.TinyAgent(len(tokenizer.words), d_model=d_model, n_layers=1, n_heads=2)
    options = dict(max_turns=3, num_bugs=1, reward="hidden", process_reward=0.3, malformed="error", tool_cost=0.0)
    head = torch.nn.Linear(d_model, 1)
    torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
    return model, tokenizer, options, head


def small_batches(model, tokenizer, options):
    tasks = [ppo.NumberEnv.task("train", i, 1) for i in range(32)]
    return ppo.play(model, tokenizer, ppo.NumberEnv, options, tasks, temperature=1.0, seed=0, context_length=60)


@pytest.mark.parametrize("unit", UNITS)
def test_warm_up_fits_the_head_and_leaves_the_model_alone(unit):
    """#44: a critic that never learns, because its loss has no gradient; and one whose warm-up trains the policy's
    weights. A constant return is learned in 100 steps to a tenth of the first error, another one better than by its
    mean."""
    model, tokenizer, options, _ = small_agent()
    batches, before = small_batches(model, tokenizer, options), deepcopy(model.state_dict())
    sampled = batches[0].loss_mask.sum(1)
    assert sampled.min() < sampled.max()
    for rewards in (torch.tensor([0.7, 0.0, 0.0]).expand(32, 3), torch.rand(32, 3)):
        constant = F.one_hot(torch.tensor([info["turns"] - 1 for info in batches[0].infos]), 3) * 0.7
        batch = batches[0]._replace(rewards=rewards if rewards[0, 1] else constant)
        losses = []
        for steps in (1, 100):
            head = small_agent()[3]
            metrics = ppo.warm_up_critic(model, head, [batch], steps=steps, gamma=1.0, turn_unit=unit == "turn")
            assert head.weight.abs().sum() > 0 and head.bias != 0
            assert metrics["warm_start/critic_episodes"] == 32 and metrics.keys() == {
                "warm_start/critic_episodes", "warm_start/critic_loss"}  # fmt: skip
            losses.append(metrics["warm_start/critic_loss"])
        assert losses[1] < (0.5 if rewards[0, 1] else 0.1) * losses[0]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("unit", UNITS)
def test_warm_up_regresses_on_the_state_before_each_sampled_token(unit, monkeypatch):
    """#43: a target one token off, on observations, discounted per token by turns, or rewards lost. The mean squared
    error is taken here from the hidden states and plain returns, for a head of random weights."""
    model, tokenizer, options, head = small_agent()
    (batch,) = small_batches(model, tokenizer, options)
    torch.nn.init.normal_(head.weight), torch.nn.init.normal_(head.bias)
    zeros = torch.zeros_like(batch.loss_mask)
    _, targets = brute_force(batch.rewards, zeros, batch.loss_mask, zeros[:, 0], batch.turn_ids, unit=unit, gamma=0.9,
                             gae_lambda=1.0)  # fmt: skip
    with torch.no_grad():
        errors = [0.5 * (head(model(batch.tokens[b : b + 1, :t], return_hidden=True)[0, -1]) - targets[b, t]) ** 2
                  for b, t in batch.loss_mask.nonzero().tolist()]  # fmt: skip
    metrics = ppo.warm_up_critic(model, head, [batch], steps=1, gamma=0.9, turn_unit=unit == "turn")
    assert batch.rewards.abs().sum() > 0
    assert metrics["warm_start/critic_loss"] == pytest.approx(torch.cat(errors).mean().item(), rel=1e-5)


def test_value_loss_reaches_only_the_rows_before_a_sampled_token(tmp_path, monkeypatch):
    """#43: a critic's mask that is not aligned with values that were already shifted. In train() the value loss alone
    has a gradient on exactly those hidden states whose next token was sampled, and each value stands at that token."""
    score, compute_loss, seen = ppo.score, ppo.compute_loss, []

    def keep(model, tokens, mask, temperature):
        result = score(model, tokens, mask, temperature)
        result[2].retain_grad()
        seen.append((model(tokens, return_hidden=True).detach(), mask, result[2]))
        return result

    @functools.wraps(compute_loss)
    def values_only(newlogprobs, newvalues, *args, **kwargs):
        seen.append(newvalues.detach())
        return compute_loss(newlogprobs.detach(), newvalues, *args, **kwargs)

    monkeypatch.setattr(ppo, "score", keep)
    monkeypatch.setattr(ppo, "compute_loss", values_only)
    turns = [[(2, 3), (1, 1)], [(3, 2)]]
    in_training(ppo, tmp_path, rewards=[[0.5, 0.5], [-1.0, 0.0]], turns=turns, groups=[0, 0], warm_up=random_head)
    (states, mask, hidden), newvalues = seen
    assert sorted(mask.tolist()) == sorted(layout(*turns)[1].tolist())
    assert_close(hidden.detach(), states[:, :-1][mask[:, 1:] > 0], atol=1e-5, rtol=0)  # the states before the tokens
    assert (hidden.grad.abs().sum(1) > 0).all() and torch.equal(newvalues != 0, mask > 0)


def test_before_the_first_step_the_new_values_are_the_old(tmp_path, monkeypatch):
    """#43: catches new values that stand at another token than those the advantages were computed from."""
    compute_loss, seen = ppo.compute_loss, []

    @functools.wraps(compute_loss)
    def spy(newlogprobs, newvalues, entropy, logprobs, values, *args, **kwargs):
        seen.append((newvalues.detach(), values, args[2]))
        return compute_loss(newlogprobs, newvalues, entropy, logprobs, values, *args, **kwargs)

    monkeypatch.setattr(ppo, "compute_loss", spy)
    monkeypatch.setattr(ppo, "warm_up_critic", random_head)
    tiny_run(tmp_path, monkeypatch, num_iterations=1)
    newvalues, values, mask = seen[0]
    assert_close(newvalues, values * mask, atol=1e-5, rtol=0)
    assert values[mask > 0].unique().numel() > 4


def random_head(model, value_head, *args, **kwargs):
    """In the place of warm_up_critic: a critic whose values differ from state to state."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        value_head.weight.normal_(generator=generator), value_head.bias.normal_(generator=generator)
    return {}


def spied(monkeypatch, *names):
    """Records each call that train() itself makes of these functions: the arguments by name, networks copied after the
    call, and the result."""
    calls = {name: [] for name in names}
    for name in names:

        def spy(*args, inner=getattr(ppo, name), name=name, **kwargs):
            result = inner(*args, **kwargs)
            if sys._getframe(1).f_code.co_name == "train":
                bound = inspect.signature(inner).bind(*args, **kwargs).arguments
                bound |= {key: deepcopy(value) for key, value in bound.items() if isinstance(value, torch.nn.Module)}
                calls[name].append((bound, result))
            return result

        monkeypatch.setattr(ppo, name, spy)
    return calls


@pytest.mark.parametrize("unit", UNITS)
def test_the_value_before_an_action_does_not_know_the_action(unit, tmp_path, monkeypatch):
    """#43: the baseline must be the value before the action. Changing the id at t changes no value up to t, and all
    those that follow it directly."""
    calls = spied(monkeypatch, "compute_gae")
    turns, t = [[(2, 2), (2, 1)]] * 2, 2
    for last in (1, 3):
        tokens = torch.full((2, 8), 2)
        tokens[:, t] = last
        in_training(ppo, tmp_path / str(last), rewards=[[0.0, 1.0], [0.0, 0.0]], turns=turns, groups=[0, 0],
                    gae_unit=unit, tokens=tokens, warm_up=random_head)  # fmt: skip
    a, b = (given["values"] for given, _ in calls["compute_gae"])
    assert torch.equal(a[:, : t + 1], b[:, : t + 1]) and (a[:, t + 1] != b[:, t + 1]).all()


# ---- In train() --------------------------------------------------------------------------------------------------


def busy_environment(monkeypatch):
    """The hidden number, but every message is paid something, a third of them end the episode, and no other does."""
    step = ppo.NumberEnv.step

    def busy(env, action):
        observation, _, _, truncated, info = step(env, action)
        code, terminated = sum(map(ord, action)), "end" in info
        if code % 3 == 0 or terminated:
            terminated, info["end"], info["success"], info["hacked"] = True, "submitted", False, False
        return observation, (code % 5 + 1) / 5, terminated, truncated, info

    monkeypatch.setattr(ppo.NumberEnv, "malformed", "error")
    monkeypatch.setattr(ppo.NumberEnv, "step", busy)


def tiny_run(tmp_path, monkeypatch, *, environment=busy_environment, **flags):
    """Metrics and checkpoint of a tiny run in busy_environment, without its costly description of the start."""
    environment(monkeypatch)
    monkeypatch.setattr(ppo, "describe_start", lambda *args, **kwargs: {})
    ppo.train(make_args(ppo, tmp_path, **flags))
    return results(tmp_path)


@pytest.mark.parametrize("unit", UNITS)
def test_values_and_bootstrap_are_those_of_the_states(unit, tmp_path, monkeypatch):
    """#45, #43: catches values shifted by one, a bootstrap at termination, none at truncation, or one read elsewhere
    than after the last token; and --gae-unit, --gamma or --gae-lambda that do not arrive."""
    batches, heads, checked, compute_gae = [], [], [], ppo.compute_gae
    monkeypatch.setattr(ppo, "warm_up_critic", lambda *args, **kwargs: heads.append(args[:2]) or random_head(*args))

    def keep(rollout, *args, **kwargs):
        batches.append(rollout(*args, **kwargs))
        return batches[-1]

    def spy(rewards, values, loss_mask, bootstrap_values, *, turn_ids, gamma, gae_lambda):
        batch, (model, head) = batches[-1], heads[-1]
        assert (gamma, gae_lambda) == (0.9, 0.8) and turn_ids is (batch.turn_ids if unit == "turn" else None)
        assert_close(rewards.sum(1), batch.rewards.sum(1))
        assert torch.equal(loss_mask, batch.loss_mask)
        with torch.no_grad():
            for b, n in enumerate(batch.lengths.tolist()):
                after = head(model(batch.tokens[b : b + 1, :n], return_hidden=True))[0, :, 0]  # V after token t
                assert_close(values[b, 1:n], after[:-1], atol=1e-5, rtol=0)
                assert_close(bootstrap_values[b], after[-1] * batch.truncated[b], atol=1e-5, rtol=0)
        assert not values.requires_grad and batch.truncated.any() and batch.terminated.any()
        assert torch.equal(bootstrap_values != 0, batch.truncated)
        checked.append(1)
        return compute_gae(rewards, values, loss_mask, bootstrap_values, turn_ids=turn_ids, gamma=gamma,
                           gae_lambda=gae_lambda)  # fmt: skip

    on_rollouts(monkeypatch, ppo, keep)
    monkeypatch.setattr(ppo, "compute_gae", spy)
    tiny_run(tmp_path, monkeypatch, gae_unit=unit, gamma=0.9, gae_lambda=0.8, context_length=12, num_iterations=2,
             micro_batch_size=5, num_groups=8)  # fmt: skip
    assert len(checked) == 2


@pytest.mark.parametrize("norm_adv", (True, False))
def test_advantages_are_whitened_once_a_batch_and_targets_never(norm_adv, tmp_path, monkeypatch):
    """Catches whitening in each minibatch, of the targets or with observations counted, --no-norm-adv that whitens,
    values or targets that are taken again after a step, and observations in the denominator of the losses."""
    calls = spied(monkeypatch, "compute_gae", "whiten", "compute_loss")
    tiny_run(tmp_path, monkeypatch, norm_adv=norm_adv, num_iterations=2, num_minibatches=2, update_epochs=2)
    assert [len(calls[name]) for name in calls] == [2, 2 * norm_adv, 8]
    for n, (given, (raw, targets)) in enumerate(calls["compute_gae"]):
        mask, advantages = given["loss_mask"], raw
        if norm_adv:
            (whitened, advantages) = calls["whiten"][n]
            assert whitened["advantages"] is raw and whitened["loss_mask"] is mask
            assert_close(advantages[mask > 0].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
            assert_close(advantages[mask > 0].std(), torch.tensor(1.0), atol=1e-3, rtol=0)
        tokens = lambda mask, *tensors: sorted(zip(*(x[mask > 0].tolist() for x in tensors)))  # noqa: E731
        for epoch in range(2):
            parts = [part for part, _ in calls["compute_loss"][4 * n + 2 * epoch : 4 * n + 2 * epoch + 2]]
            seen = sum((tokens(*(part[key] for key in ("loss_mask", "advantages", "returns", "values")))
                        for part in parts), [])  # fmt: skip
            assert sorted(seen) == tokens(mask, advantages, targets, given["values"])
            for part in parts:  # token-mean, over the sampled ones
                assert_close(part["weights"], part["loss_mask"] / part["loss_mask"].sum())


def test_a_constant_return_is_learned(tmp_path, monkeypatch, capsys):
    """#44: values stored as plain numbers give the value loss no gradient, and all looks normal. In train() the value
    loss falls below a tenth of its start within 60 iterations, explained variance is logged, and that the rewards teach
    nothing is told."""
    step = ppo.NumberEnv.step

    def constant(env, action):
        observation, _, terminated, truncated, info = step(env, action)
        return observation, 0.7 * terminated, terminated, truncated, info

    monkeypatch.setattr(ppo.NumberEnv, "step", constant)
    monkeypatch.setattr(ppo, "warm_up_critic", lambda *args, **kwargs: {})  # the head starts at zero
    flags = dict(num_iterations=60, gae_lambda=1.0, eval_every=100, learning_rate=2e-3)
    lines, state = tiny_run(tmp_path, monkeypatch, environment=lambda patch: None, **flags)
    losses = [line["losses/value_loss"] for line in lines[1:]]
    assert losses[0] == pytest.approx(0.5 * 0.7**2, rel=0.3) and losses[-1] < 0.1 * losses[0]
    assert state["value_head"]["weight"].abs().sum() > 0 and state["value_head"]["bias"] != 0
    assert capsys.readouterr().out.count("warning: every episode has the same return") == 60
    assert all(math.isfinite(line["losses/explained_variance"]) for line in lines[1:])


@pytest.mark.parametrize("values, expected", (("zero", 0.0), ("perfect", 1.0), ("mean", 0.0), ("opposite", -3.0)))
def test_explained_variance(values, expected, tmp_path, monkeypatch):
    """Catches its sign, whitened advantages in it, and padding or observations counted: a critic of zero or of a
    constant explains nothing, a perfect one all, its opposite -3."""
    compute_gae = ppo.compute_gae

    def planted(rewards, V, mask, bootstrap, **options):
        _, returns = compute_gae(rewards, torch.zeros_like(V), mask, bootstrap, **options)
        V = {"zero": 0 * returns, "perfect": returns, "mean": 0 * returns + 0.4, "opposite": -returns}[values]
        return compute_gae(rewards, torch.where(mask > 0, V, 50.0), mask, bootstrap, **options)

    monkeypatch.setattr(ppo, "compute_gae", planted)
    turns = [[(2, 3), (1, 1)], [(3, 2)], [(1, 0), (1, 4)]]
    in_training(ppo, tmp_path, rewards=[[0.5, 0.5], [0.25, 0.0], [0.0, -1.0]], turns=turns, groups=[0] * 3,
                norm_adv=True)  # fmt: skip
    assert results(tmp_path / "ppo")[0][1]["losses/explained_variance"] == pytest.approx(expected, abs=1e-5)


def test_the_warm_up_in_train(tmp_path, monkeypatch):
    """Catches a warm-up on other episodes than the start's, at another discount or unit, one that moves the model, and
    a loss that does not fall, or is not logged."""
    losses = []
    for steps in (1, 200):
        with monkeypatch.context() as patch:
            calls = spied(patch, "warm_up_critic", "rollout")
            lines, _ = tiny_run(tmp_path / str(steps), patch, critic_warmup_steps=steps, gamma=0.9, gae_unit="turn")
        ((given, metrics),) = calls["warm_up_critic"]
        assert (given["steps"], given["gamma"], given["turn_unit"]) == (steps, 0.9, True)
        assert metrics == {key: lines[0][key] for key in metrics} and metrics["warm_start/critic_episodes"] == 32
        assert sum(len(batch.tokens) for batch in given["batches"]) == 32
        losses.append((metrics["warm_start/critic_loss"], calls["rollout"][0][0]["model"].state_dict()))
    (first, before), (last, after) = losses
    assert 0 < last < 0.7 * first
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_the_warm_up_is_not_cut_by_the_context(tmp_path, monkeypatch):
    """Catches a critic fitted to episodes whose end --context-length hides, as if they had earned 0; and 0 steps that
    play episodes all the same."""
    calls = spied(monkeypatch, "warm_up_critic", "play")
    tiny_run(tmp_path / "cut", monkeypatch, context_length=6, critic_warmup_steps=1)
    ((given, _),) = calls["warm_up_critic"]
    assert not any(batch.truncated.any() for batch in given["batches"])
    lines, _ = tiny_run(tmp_path / "none", monkeypatch, critic_warmup_steps=0)
    assert len(calls["play"]) == 1 and "warm_start/critic_episodes" not in lines[0]


def test_value_coefficient_and_value_clip(tmp_path, monkeypatch):
    """Catches --vf-coef or --clip-vloss that does not arrive: at 0 the critic stays what the warm-up made it, a clip of
    1e-4 stops it after the first step, and the policy is trained all the same."""
    heads, flags = {}, dict(num_minibatches=1, update_epochs=8, kl_coef=0.0)
    own = {"off": dict(vf_coef=0.0), "clipped": dict(clip_vloss=True, clip_coef=1e-4), "plain": dict(clip_coef=1e-4)}
    for name, extra in own.items():
        with monkeypatch.context() as patch:
            calls = spied(patch, "warm_up_critic", "compute_loss")
            lines, state = tiny_run(tmp_path / name, patch, **flags | extra)
        start = calls["warm_up_critic"][0][0]["value_head"].state_dict()
        given = [call for call, _ in calls["compute_loss"]]
        assert all((g["vf_coef"], g["clip_vloss"]) == (extra.get("vf_coef", 0.5), "clip_vloss" in extra) for g in given)
        heads[name] = sum((value - start[key]).abs().sum() for key, value in state["value_head"].items())
        moved = [(g["newvalues"] - g["values"])[g["loss_mask"] > 0].abs().mean() for g in given]
        assert moved[0] < 1e-5 < moved[-1] and lines[1]["losses/grad_norm"] > 0
    assert heads["off"] == 0 and 0 < heads["clipped"] and 0 < heads["plain"] and heads["clipped"] != heads["plain"]
