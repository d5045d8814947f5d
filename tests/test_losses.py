"""Losses of all four scripts, their weights and metrics: numbers of other codebases, by hand, and
against the exact gradient of the expected return. At the end the sampler.

golden.json holds outputs of the peers' own functions, each with repository, commit and function.
Each test says which bug it would catch; #n is a public report of that bug.
"""

import itertools
import math

import pytest
import torch
from helpers import FixedLogits, advantages, compute_loss, double, golden, name, random_batch, same
from torch.testing import assert_close

import gigpo
import grpo
import ppo
import reinforce

ALL_TERMS = dict(clip_vloss=True, vf_coef=0.5, kl_coef=0.1, ent_coef=0.01)
POLICY_LOSSES = [
    (reinforce, "reinforce_loss/token-mean", "token-mean"),
    (reinforce, "reinforce_loss/seq-mean-token-mean", "seq-mean-token-mean"),
    (ppo, "ppo/token_adv/token-mean/low0.2_high0.2_dual3", "token-mean"),
]
for clipped in (grpo, gigpo):
    POLICY_LOSSES += [
        (clipped, "ppo/token_adv/token-mean/low0.2_high0.28_dual3", "token-mean"),
        (clipped, "ppo/seq_adv/token-mean/low0.2_high0.28_dual1e+09", "token-mean"),
        (clipped, "dapo/beta0", "token-mean"),
        (clipped, "grpo/beta0", "seq-mean-token-mean"),
        (clipped, "dr_grpo/beta0", "constant"),
    ]


# ---- Numbers of other codebases


@pytest.mark.parametrize("script, case, loss_agg", POLICY_LOSSES, ids=name)
def test_policy_loss_equals_verl_and_trl(script, case, loss_agg):
    """Values and gradients. Catches swapped clip bounds, max for min, a wrong sign, a ratio in
    REINFORCE (its old log-probs are garbage here), and a wrong denominator: a fully masked row
    counts as a row. Three cases have dual clipping: it must cap the loss of a bad token at 3 times
    its advantage, without a gradient, and leave good tokens alone."""
    inputs, outputs = golden(case)
    mask, newlogprobs = inputs["mask"], inputs["log_prob"].requires_grad_()
    old = inputs.get("old_log_prob", torch.full_like(mask, -300.0))
    A = inputs["advantages"].view(len(mask), -1).expand_as(mask)  # TRL: one an episode
    loss_weights = getattr(script, "loss_weights", grpo.loss_weights)
    weights = loss_weights(mask, loss_agg=loss_agg, token_budget=100)  # TRL's maximum length
    dual_clip = float(inputs.get("dual_clip", math.inf))
    bites = ((A < 0) & ((newlogprobs - old).exp() > dual_clip) & (mask > 0)).any()
    assert bites == (dual_clip == 3)
    loss, metrics = compute_loss(
        script,
        loss_mask=mask,
        weights=weights,
        newlogprobs=newlogprobs,
        logprobs=old,
        advantages=A,
        dual_clip=dual_clip if bites else None,
    )
    loss.backward()
    assert_close(loss.detach(), outputs["loss"], atol=1e-8, rtol=0)
    assert_close(metrics["losses/policy_loss"], loss.detach())
    assert_close(newlogprobs.grad, outputs["grad_log_prob"], atol=1e-9, rtol=0)
    if "ppo_kl" in outputs:
        k1 = metrics["losses/old_approx_kl"] / mask.sum()
        assert_close(k1, outputs["ppo_kl"], atol=1e-8, rtol=0)


@pytest.mark.parametrize("clip", ("0.2", "0.5", "1e+09", "off"))
def test_value_loss_equals_verl(clip):
    """Value and gradient: catches min for max, a clip around the target, halving twice, a value
    loss that is not masked, and --no-clip-vloss that clips."""
    inputs, outputs = golden(f"verl/token-mean/clip{'1e+09' if clip == 'off' else clip}")
    newvalues, mask = inputs["vpreds"].requires_grad_(), inputs["mask"]
    loss, metrics = compute_loss(
        ppo,
        loss_mask=mask,
        newvalues=newvalues,
        values=inputs["values_old"],
        returns=inputs["returns"],
        vf_coef=0.7,
        clip_vloss=clip != "off",
        clip_coef=0.01 if clip == "off" else float(clip),
    )
    loss.backward()
    assert_close(loss.detach() / 0.7, outputs["loss"], atol=2e-8, rtol=0)  # verl: count + 1e-8
    assert_close(metrics["losses/value_loss"] / mask.sum(), outputs["loss"], atol=2e-8, rtol=0)
    assert_close(newvalues.grad / 0.7, outputs["grad_vpreds"], atol=1e-9, rtol=0)


def test_kl_penalty_equals_verl_k3(script):
    """#42: which KL is it? Catches another estimator and a swapped sign of d. verl clamps the value
    to 10: where it does, the tokens are masked here."""
    inputs, outputs = golden("verl/k3")
    newlogprobs, mask = inputs["log_prob"].requires_grad_(), (outputs["kl"] < 10).double()
    loss, _ = compute_loss(
        script,
        loss_mask=mask,
        weights=mask,
        newlogprobs=newlogprobs,
        ref_logprobs=inputs["ref_log_prob"],
        kl_coef=1.0,
    )
    loss.backward()
    assert mask.mean() > 0.9
    assert_close(loss.detach(), (mask * outputs["kl"]).sum(), atol=1e-9, rtol=0)
    assert_close(newlogprobs.grad, mask * outputs["grad_log_prob"], atol=1e-9, rtol=0)


# ---- By hand


@pytest.mark.parametrize("script", (grpo, gigpo), ids=name)
def test_loss_weights_by_hand(script):
    """Catches exchanged denominators, division by the padded width, the longest episode or the rows
    that have tokens. Three episodes of 1, 3 and 0 trained tokens. #29: a batch of none is 0/0."""
    mask = torch.tensor([[0.0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    for loss_agg, rows in (
        ("token-mean", (1 / 4, 1 / 4)),
        ("seq-mean-token-mean", (1 / 3, 1 / 9)),
        ("constant", (1 / 30, 1 / 30)),
    ):
        options = dict(loss_agg=loss_agg, token_budget=10)
        expected = mask * torch.tensor([*rows, 0.0])[:, None]
        assert_close(script.loss_weights(mask, **options), expected)
        assert (script.loss_weights(torch.zeros(3, 4), **options) == 0).all()


def test_metrics_by_hand(script):
    """Catches k1 and k3 exchanged, a wrong sign, and metrics over masked tokens. Ratios 1.5, .5,
    1.1, and a masked one of e; an entropy of 1 everywhere (#51)."""
    ratio, mask = torch.tensor([[1.5, 0.5, 1.1, math.e]]), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    ones = torch.ones(1, 4)
    _, metrics = compute_loss(script, loss_mask=mask, newlogprobs=ratio.log(), entropy=ones)
    product = math.log(1.5 * 0.5 * 1.1)
    assert metrics["losses/old_approx_kl"].item() == pytest.approx(-product, abs=1e-6)
    assert metrics["losses/approx_kl"].item() == pytest.approx(0.1 - product, abs=1e-6)
    assert metrics["losses/entropy"] == 3 and metrics.get("losses/clipfrac", 2) == 2


@pytest.mark.parametrize("advantage", (0.0, -1.0, 1.0))
def test_loss_is_finite_when_the_ratio_overflows(script, advantage):
    """#41: exp(log-ratio) = inf, and inf * 0 = NaN, though the clipped branch is fine. float32."""
    newlogprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss, metrics = compute_loss(
        script,
        loss_mask=torch.ones(1, 2),
        newlogprobs=newlogprobs,
        logprobs=torch.tensor([[-200.0, -1.0]]),
        advantages=torch.full((1, 2), advantage),
    )
    loss.backward()
    assert loss.isfinite() and newlogprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


# ---- Score, mask, terms


def test_score_reads_the_row_before_each_token(script):
    """#4: off by one between logits and mask: row t of logits scores token t + 1. #17: another
    temperature than the sampler's, or none. #51: "entropy" as the sampled token's surprise."""
    tokens, mask, _, _, logits, _ = random_batch()
    logprobs, entropy, hidden = script.score(FixedLogits(logits), tokens, mask, 0.7)
    expected = torch.distributions.Categorical(logits=logits[:, :-1] / 0.7)
    assert_close(logprobs[:, 1:], expected.log_prob(tokens[:, 1:]) * mask[:, 1:])
    assert_close(entropy[:, 1:], expected.entropy() * mask[:, 1:])
    assert not logprobs[:, 0].any() and not entropy[:, 0].any()
    assert torch.equal(hidden, logits[:, :-1][mask[:, 1:] > 0])


def random_loss(script, rows=slice(None), *, change=dict, empty=False):
    """compute_loss, all terms, of helpers.random_batch: loss, metrics, and the gradients by logits
    and by PPO's new values. empty: with a mask of zeros."""
    tokens, mask, A, old, logits, ref_logits = random_batch()
    generator = torch.Generator().manual_seed(2)
    new, values, returns = torch.randn(3, *mask.shape, generator=generator, dtype=torch.float64)
    mask = mask * (not empty)
    newlogprobs, entropy, _ = script.score(FixedLogits(logits), tokens, mask, 1.0)
    ref_logprobs, _, _ = script.score(FixedLogits(ref_logits), tokens, mask, 1.0)
    tensors = change(
        newlogprobs=newlogprobs,
        newvalues=new.requires_grad_(),
        entropy=entropy,
        logprobs=old,
        values=values,
        advantages=A,
        returns=returns,
        ref_logprobs=ref_logprobs,
        weights=mask / mask.sum().clamp(min=1),
    )
    tensors |= dict(loss_mask=mask)
    tensors = {key: tensor[rows] for key, tensor in tensors.items()}
    loss, metrics = compute_loss(script, **tensors, **ALL_TERMS)
    return loss, metrics, *torch.autograd.grad(loss, (logits, new), materialize_grads=True)


@pytest.mark.parametrize("content", (0.0, -300.0, math.nan, math.inf, -math.inf))
def test_loss_and_metrics_read_only_what_the_mask_covers(script, content):
    """#3, #6, #11: catches log-probs, KL, entropy, values or ratios of observations and padding in
    the loss, its gradients or the metrics, whatever they hold: 0 * NaN and 0 * inf are NaN. Also
    catches a mask shifted by one."""
    mask = random_batch()[1]

    def spoil(**tensors):
        return {key: torch.where(mask > 0, x, content) for key, x in tensors.items()}

    plain = random_loss(script)
    assert same(plain, random_loss(script, change=spoil))
    _, _, by_logits, by_values = plain
    assert torch.equal((by_logits[:, :-1] != 0).any(2), mask[:, 1:] > 0)
    assert not by_logits[:, -1].any() and not by_values[mask == 0].any()
    assert by_values.any() == (script is ppo)


@pytest.mark.parametrize("distance", (-199.0, 199.0))
@pytest.mark.parametrize("field", ("logprobs", "ref_logprobs"))
def test_a_distant_policy_has_a_finite_loss(script, field, distance):
    """#41: a log ratio of 199, of the old policy or of the reference, overflows the exponential:
    the loss and its gradient are infinite, and then the weights NaN."""
    mask = torch.ones(1, 2)
    new = torch.full((1, 2), -1.0, requires_grad=True)
    tensors = dict(newlogprobs=new, logprobs=new.detach(), ref_logprobs=new.detach())
    tensors[field] = new.detach() + distance
    loss, metrics = compute_loss(
        script, loss_mask=mask, advantages=torch.tensor([[1.0, -1.0]]), kl_coef=0.1, **tensors
    )
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def test_micro_batches_add_up(script):
    """Catches a denominator taken per micro-batch, in the loss, its gradients or the metrics."""
    whole = random_loss(script)
    parts = [random_loss(script, rows) for rows in (slice(0, 3), slice(3, 4), slice(4, 8))]
    for n in (0, 2, 3):
        assert_close(sum(part[n] for part in parts), whole[n], atol=1e-12, rtol=0)
    for key, value in whole[1].items():
        assert_close(sum(part[1][key] for part in parts), value, atol=1e-12, rtol=0)


def test_signs_of_the_terms(script):
    """Catches an entropy penalty and a KL bonus: the loss falls with entropy and rises with the KL,
    and with the error of the values."""
    loss, metrics, _, _ = random_loss(script)
    terms = 0.1 * metrics["losses/ref_kl"] - 0.01 * metrics["losses/entropy"]
    terms = terms + 0.5 * metrics.get("losses/value_loss", 0.0)
    expected = metrics["losses/policy_loss"] + terms / random_batch()[1].sum()
    assert_close(loss.detach(), expected)
    assert metrics["losses/ref_kl"] > 0 and metrics["losses/entropy"] > 0


def test_a_batch_without_a_trained_token_is_zero(script):
    """#29: 0/0 = NaN, which ruins the weights."""
    loss, metrics, *gradients = random_loss(script, empty=True)
    assert loss == 0 and all(value == 0 for value in metrics.values())
    assert not any(gradient.any() for gradient in gradients)


# ---- The gradient against the exact gradient of the expected return


class TablePolicy:
    """A language model of episodes (start, action, observation, action): a logit per context and
    symbol, plus a vector that all contexts share. Like a language model, it also gives the
    observation a probability."""

    def __init__(self, V):
        generator = torch.Generator().manual_seed(0)
        self.params = [
            torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in ((V,), (V, V), (V, V, V), (V,))
        ]

    def __call__(self, tokens, at=None, return_hidden=False):
        first, observation, second, shared = self.params
        action, observed = tokens[:, 1], tokens[:, 2]
        first = first.expand(len(tokens), -1)
        logits = torch.stack([first, observation[action], second[action, observed]], 1) + shared
        return logits if at is None else logits[torch.arange(len(tokens))[:, None], at]

    def head(self, hidden):
        return hidden


def enumerate_toy(V):
    """All episodes of a two-turn environment, with the probability of what the environment did.
    Action 0 ends the episode at once; otherwise an observation, which depends on the action, and a
    second action follow. Each turn pays."""
    generator = torch.Generator().manual_seed(1)
    chances = torch.rand(V, V, generator=generator, dtype=torch.float64) + 0.1
    chances = chances / chances.sum(1, keepdim=True)
    pay_first = torch.rand(V, generator=generator, dtype=torch.float64)
    pay_second = torch.rand(V, V, V, generator=generator, dtype=torch.float64)
    rest = itertools.product(range(1, V), range(V), range(V))
    tokens = torch.tensor([(0, 0, 0, 0), *((0, *episode) for episode in rest)])
    a, o, b = tokens[:, 1:].T
    short = a == 0
    rewards = torch.stack([pay_first[a], torch.where(short, 0.0, pay_second[a, o, b])], 1)
    shapes = torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, -1]]), double([[0, 1, 0, 1], [0, 1, 0, 0]])
    turn_ids, mask = (shape[short.long()] for shape in shapes)
    return tokens, mask, turn_ids, rewards, torch.where(short, 1.0, chances[a, o])


def assert_policy_gradient(script, V, advantages_of, *, members=1, scale=1.0):
    """Minus the gradient of the script's loss, in exact expectation over all batches of episodes,
    is scale times the gradient of the expected return. advantages_of(toy): of one batch."""
    policy, toy = TablePolicy(V), enumerate_toy(V)
    tokens, mask, _, rewards, chances = toy
    logprobs = policy(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    probabilities = chances * (logprobs * mask[:, 1:]).sum(1).exp()  # of each episode
    expected_return = (probabilities * rewards.sum(1)).sum()
    exact = torch.autograd.grad(expected_return, policy.params, materialize_grads=True)
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-12) and exact[-1].norm() > 0.01
    batches = list(itertools.product(range(len(tokens)), repeat=members))
    A = torch.cat([advantages_of([tensor[list(rows)] for tensor in toy]) for rows in batches])
    rows = torch.tensor(batches)
    chance_of_batch = probabilities.detach()[rows].prod(1).repeat_interleave(members)
    rows = rows.flatten()
    newlogprobs, _, _ = script.score(policy, tokens[rows], mask[rows], 1.0)
    loss, _ = compute_loss(
        script,
        loss_mask=mask[rows],
        weights=mask[rows] * chance_of_batch[:, None] / members,
        newlogprobs=newlogprobs,
        logprobs=newlogprobs.detach(),
        advantages=A,
    )
    ours = torch.autograd.grad(loss, policy.params)
    for a, b in zip(ours, exact, strict=True):
        assert_close(-a, scale * b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("V, groups", ((3, (0, 0)), (2, (0, 1, 0, 1)), (2, (5, 5, 5))))
@pytest.mark.parametrize("credit", ("episode", "turn"))
@pytest.mark.parametrize(
    "script, baseline",
    [
        (reinforce, "none"),
        (reinforce, "batch"),
        *itertools.product((reinforce, grpo, gigpo), ("mean", "loo")),
    ],
    ids=name,
)
def test_update_is_the_exact_policy_gradient(script, baseline, credit, V, groups):
    """Catches any bias of the baseline, the credit, the mask, the shift or the sign, and training
    on observations, on whose logits the return does not depend. A mean over n episodes that
    includes oneself scales the gradient by (n - 1)/n, n being the size of the group (mean) or of
    the batch (batch)."""
    n = {"mean": groups.count(groups[0]), "batch": len(groups)}.get(baseline)
    scale = (n - 1) / n if n else 1.0
    options = dict(credit=credit, baseline=baseline)

    def relative_to_the_group(toy):
        _, mask, turn_ids, rewards, _ = toy
        return advantages(script, rewards, groups, turn_ids, mask, **options)

    assert_policy_gradient(script, V, relative_to_the_group, members=len(groups), scale=scale)


@pytest.mark.parametrize("unit", ("token", "turn"))
@pytest.mark.parametrize("V", (2, 3))
def test_update_is_the_exact_policy_gradient_whatever_the_critic(V, unit):
    """Catches a value that knows the action it should judge (read at the token, not before it):
    that biases the update. With lambda 1 and no discount its exact expectation is the gradient of
    the expected return, the critic being an arbitrary function of the tokens so far."""

    def gae(toy):
        tokens, mask, turn_ids, rewards, _ = toy
        prefixes = [(tokens[:, :t] * 7 ** torch.arange(t)).sum(1) + 1000 * t for t in range(4)]
        values = torch.sin(torch.stack(prefixes, 1).double() ** 2)  # of the state before token t
        return ppo.compute_gae(
            ppo.token_rewards(rewards, turn_ids, mask),
            values,
            mask,
            torch.zeros_like(values[:, 0]),
            turn_ids=turn_ids if unit == "turn" else None,
            gamma=1.0,
            gae_lambda=1.0,
        )[0]

    assert_policy_gradient(ppo, V, gae)


# ---- Sampling


def test_impossible_tokens_are_never_sampled():
    """Catches `<` for `<=` at uniform 0, and a cumulative sum that ends below 1: at the largest
    float32 below 1 sampling would run off the end, or into a token of probability 0. First, middle
    and last tokens have probability 0. At temperature 0 the largest logit wins, whatever the
    uniform: catches a division by zero."""
    logits = 3 * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    logits[:, [0, 1, 500, 998, 999]] = -torch.inf
    logits[::2, [0, 999]] = -1e6  # exp gives 0 as well
    for uniform in (0.0, 0.5, 1 - 2**-24):
        for temperature in (1.0, 0.7, 0):
            ids, logprobs = grpo.sample_tokens(logits, torch.full((200,), uniform), temperature)
            assert (ids >= 2).all() and (ids < 998).all() and (ids != 500).all()
            assert (logprobs > -200).all()
        assert torch.equal(ids, logits.argmax(1))
