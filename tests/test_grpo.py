"""Advantages, loss and sampling of grpo.py: against numbers computed by other codebases, by hand, and by enumeration.

golden_grpo.json holds outputs of the peers' own functions, each with repository, commit and function. Each test says
which bug it would catch; #n is a public report of that bug. Everything runs on the CPU in seconds.
"""

import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402

GOLDEN = {case["name"]: case for case in json.loads((Path(__file__).parent / "golden_grpo.json").read_text())}
PLAIN = dict(clip_coef=0.2, clip_coef_high=0.28, kl_coef=0.0, ent_coef=0.0)
ALL_TERMS = PLAIN | dict(kl_coef=0.1, ent_coef=0.01)
LOSS_AGGS = ("token-mean", "seq-mean-token-mean", "constant")
NORMS, BASELINES, CREDITS = ("none", "std"), ("mean", "loo"), ("episode", "turn")


def golden(name):
    """Inputs and outputs of a case; what is not text, as float64 tensors."""
    tensors = lambda values: {  # noqa: E731
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in values.items()
        if key not in ("index", "loss_agg_mode")
    }
    return tensors(GOLDEN[name]["inputs"]), tensors(GOLDEN[name]["outputs"])


def advantages_of(rewards, groups=None, *, credit="episode", gamma=1.0, baseline="mean", norm="none"):
    """Advantages (B, K) of episodes with one token a turn: rewards (B, K), or (B,) for one turn."""
    rewards = torch.as_tensor(rewards)
    rewards = rewards[:, None] if rewards.ndim == 1 else rewards
    groups = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else torch.as_tensor(groups)
    turn_ids = torch.arange(rewards.shape[1]).expand_as(rewards)
    return grpo.compute_advantages(
        rewards, turn_ids, torch.ones_like(rewards), groups, credit=credit, gamma=gamma, baseline=baseline, norm=norm
    )


class FixedLogits:
    """A model whose logits (B, T, V) do not depend on the tokens: row t of them scores token t + 1."""

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, tokens, at, return_hidden):
        return self.logits[torch.arange(len(tokens))[:, None], at]

    def head(self, hidden):
        return hidden


def random_batch(*, B=8, T=12, V=5, seed=0):
    """Tokens, mask with gaps (row 2 fully masked), advantages, old log-probs, logits of a policy and a reference."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    tokens = torch.randint(V, (B, T), generator=generator)
    mask = (torch.rand(B, T, generator=generator) < 0.5).double()
    mask[:, 0], mask[:, 1], mask[2] = 0, 1, 0
    logits, ref_logits = randn(B, T, V), randn(B, T, V)
    old = grpo.score(FixedLogits(logits), tokens, mask, 1.0)[0] + 0.3 * randn(B, T)
    return tokens, mask, randn(B, T) * mask, old, logits.requires_grad_(), ref_logits


# ---- Numbers of other codebases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, norm", [("verl-project/loop/std_True", "std"), ("verl-project/loop/std_False", "none")])
def test_advantages_equal_verl(name, norm):
    """Catches a biased standard deviation, a baseline across groups, groups found by position, and advantages on masked
    tokens. Group p2 has one member: verl returns its raw reward, grpo.py 0."""
    inputs, outputs = golden(name)
    ids = torch.tensor([int(uid[1:]) for uid in GOLDEN[name]["inputs"]["index"]])
    rewards, mask = inputs["scores"][:, None], inputs["mask"]
    turn_ids, options = torch.zeros_like(mask, dtype=torch.int64), dict(credit="episode", gamma=1.0, baseline="mean")
    ours = grpo.compute_advantages(rewards, turn_ids, mask, ids, norm=norm, **options)
    lone = ids == 2
    assert lone.sum() == 1 and (ours[lone] == 0).all()
    assert_close(ours[~lone], outputs["tokens"][~lone], atol=2e-6, rtol=0)


@pytest.mark.parametrize("name, norm", [("trl/plain/scale_group", "std"), ("trl/plain/scale_none", "none")])
def test_advantages_equal_trl(name, norm):
    """As above, groups of 4 in order. TRL adds 1e-4 to the standard deviation, not 1e-6: hence the tolerance."""
    inputs, outputs = golden(name)
    groups = torch.arange(12) // int(inputs["num_generations"])
    ours = advantages_of(inputs["rewards"], groups, norm=norm)[:, 0]
    assert_close(ours, outputs["advantage"], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "name, loss_agg",
    [
        ("ppo/seq_adv/token-mean/low0.2_high0.28_dual1e+09", "token-mean"),
        ("grpo/beta0", "seq-mean-token-mean"),
        ("bnpo/beta0", "token-mean"),
        ("dapo/beta0", "token-mean"),
        ("dr_grpo/beta0", "constant"),
    ],
)
def test_policy_loss_equals_verl_and_trl(name, loss_agg):
    """Values and gradients. Catches swapped clip bounds, max for min, a wrong sign, a dual clip, a wrong denominator:
    row 6 is fully masked and counts as a row."""
    inputs, outputs = golden(name)
    mask, newlogprobs = inputs["mask"], inputs["log_prob"].requires_grad_()
    advantages = inputs["advantages"].view(8, -1).expand_as(mask)  # TRL: one an episode
    weights = grpo.loss_weights(mask, loss_agg=loss_agg, token_budget=100)  # TRL's max_completion_length
    loss, metrics = grpo.compute_loss(
        newlogprobs, torch.zeros_like(mask), inputs["old_log_prob"], advantages, mask, weights, **PLAIN
    )
    loss.backward()
    assert_close(loss.detach(), outputs["loss"], atol=1e-9, rtol=0)
    assert_close(metrics["losses/policy_loss"], outputs["loss"], atol=1e-9, rtol=0)
    assert_close(newlogprobs.grad, outputs["grad_log_prob"], atol=1e-9, rtol=0)
    if "ppo_kl" in outputs:
        assert_close(metrics["losses/old_approx_kl"] / mask.sum(), outputs["ppo_kl"], atol=1e-8, rtol=0)


def test_constant_aggregation_equals_oat():
    """Dr. GRPO's authors: all rows count, and the divisor is a constant. Catches division by the padded width, by the
    longest episode, or by the rows that have tokens."""
    inputs, outputs = golden("oat_drgrpo_aggregation")
    mask, zeros = inputs["mask"], torch.zeros_like(inputs["mask"])
    weights = grpo.loss_weights(mask, loss_agg="constant", token_budget=100)
    loss, _ = grpo.compute_loss(zeros, zeros, zeros, -inputs["loss_mat"], mask, weights, **PLAIN)  # ratio 1: loss is -A
    assert_close(loss, outputs["loss"], atol=1e-12, rtol=0)


def kl_only(newlogprobs, ref_logprobs, weights):
    """compute_loss with nothing but the KL penalty, coefficient 1."""
    zeros, ones = torch.zeros_like(newlogprobs), torch.ones_like(newlogprobs)
    return grpo.compute_loss(
        newlogprobs, zeros, newlogprobs.detach(), zeros, ones, weights, ref_logprobs, **PLAIN | dict(kl_coef=1.0)
    )


def test_kl_penalty_equals_verl_k3():
    """Catches another estimator and a swapped sign of d. verl clamps the value to 10, so that its gradient is 0 there;
    ours is clamped here before comparing."""
    inputs, outputs = golden("verl/k3")
    newlogprobs, ref = inputs["log_prob"].requires_grad_(), inputs["ref_log_prob"]
    one = torch.ones(1, dtype=torch.float64)
    kl = torch.stack([kl_only(*pair, one)[0] for pair in zip(newlogprobs.view(-1, 1), ref.view(-1, 1))])
    assert_close(kl.detach().clamp(max=10), outputs["kl"].flatten(), atol=1e-9, rtol=0)
    kl.clamp(max=10).sum().backward()
    assert_close(newlogprobs.grad, outputs["grad_log_prob"], atol=1e-9, rtol=0)


def test_kl_penalty_in_exact_expectation():
    """Over the whole softmax the value is KL(policy || ref), the gradient that of KL(ref || policy), as k3's is (the
    gradient of k1 would be 0)."""
    inputs, values = golden("exact_expectation/values")
    _, gradient = golden("exact_expectation/grad_KL_ref_policy")
    logits = inputs["logits_policy"].requires_grad_()
    newlogprobs = logits.log_softmax(0)
    loss, _ = kl_only(newlogprobs, inputs["logits_ref"].log_softmax(0), newlogprobs.exp().detach())
    loss.backward()
    assert_close(loss.detach(), values["KL_policy_ref"], atol=1e-9, rtol=0)
    assert_close(logits.grad, gradient["grad"], atol=1e-9, rtol=0)


def test_kl_penalty_by_sampling():
    """#42: which KL is it? 200,000 samples of a softmax over 3 symbols, against the exact value and gradient."""
    policy, ref = torch.tensor([0.5, 0.0, -0.5], requires_grad=True), torch.tensor([-0.5, 0.4, 0.1])
    p, q = policy.log_softmax(0), ref.log_softmax(0)
    samples = torch.multinomial(p.detach().exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    loss, metrics = kl_only(p[samples], q[samples], torch.full((200_000,), 1 / 200_000))
    exact = (p.exp() * (p - q)).sum()
    assert_close(loss, exact, rtol=0.02, atol=0)
    assert_close(metrics["losses/ref_kl"] / 200_000, exact.detach(), rtol=0.02, atol=0)
    reverse = torch.autograd.grad((q.exp() * (q - p)).sum(), policy, retain_graph=True)[0]  # KL(ref || policy)
    estimate = torch.autograd.grad(loss, policy)[0]
    assert (estimate - reverse).norm() < 0.05 * reverse.norm()
    for symbol in range(3):  # no sample is negative
        assert kl_only(p[symbol, None].detach(), q[symbol, None], torch.ones(1))[0] >= 0


# ---- Advantages by hand ------------------------------------------------------------------------------------------


def test_advantages_worked_example():
    """#23, #39: a group id of the episode's own gives raw rewards; with or without the standard deviation is a flag.
    #38: a baseline over the whole batch would give -.5 and +.5 where two groups give -.75 and +.75."""
    assert advantages_of([1.0, 0.0, 1.0, 0.0])[:, 0].tolist() == [0.5, -0.5, 0.5, -0.5]
    by_std = advantages_of([1.0, 0.0, 1.0, 0.0], norm="std")[:, 0]
    assert_close(by_std, 0.75**0.5 * torch.tensor([1.0, -1.0, 1.0, -1.0]))
    assert_close(advantages_of([1.0, 0.0, 1.0, 0.0], baseline="loo")[:, 0], torch.tensor([2.0, -2.0, 2.0, -2.0]) / 3)
    two_groups = advantages_of([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0], [0, 0, 0, 0, 1, 1, 1, 1])[:, 0]
    assert two_groups.tolist() == [0.25, 0.25, 0.25, -0.75, -0.25, -0.25, -0.25, 0.75]


def test_turn_credit_worked_example():
    """Catches discounting per token, a baseline per turn, discounting from the padded end, and reading the wrong turn.
    Four episodes of 4, 2, 4 and 5 turns, paid 1, 0, 1, 0 at the end, discount .8: R = .512, 0, .512, 0, mean .256."""
    turns, rewards = (4, 2, 4, 5), torch.zeros(4, 5)
    rewards[0, 3] = rewards[2, 3] = 1
    # Tokens: a prompt, then per turn two sampled tokens and one of observation; padded with turn -1
    turn_ids = torch.full((4, 16), -1)
    for b, n in enumerate(turns):
        turn_ids[b, 1 : 1 + 3 * n] = torch.arange(n).repeat_interleave(3)
    mask = ((turn_ids >= 0) & (torch.arange(16) % 3 != 0)).float()
    options = dict(gamma=0.8, baseline="mean", norm="none")
    ours = grpo.compute_advantages(rewards, turn_ids, mask, torch.zeros(4), credit="turn", **options)
    won = (0.256, 0.384, 0.544, 0.744)
    for b, expected in enumerate((won, (-0.256,) * 2, won, (-0.256,) * 5)):
        row = torch.zeros(16)
        row[1 : 1 + 3 * turns[b]] = torch.tensor(expected).repeat_interleave(3)
        assert_close(ours[b], row * mask[b], atol=1e-6, rtol=0)
    whole = grpo.compute_advantages(rewards, turn_ids, mask, torch.zeros(4), credit="episode", **options)
    assert_close(whole, mask * torch.tensor([0.256, -0.256, 0.256, -0.256])[:, None], atol=1e-6, rtol=0)


def test_rewards_of_all_turns_count():
    """Catches keeping only the last reward, and credit for what was paid before a turn. Here loo subtracts 0."""
    rewards = [[0.2, 0.3, 0.5], [0.0, 0.0, 0.0]]
    assert_close(advantages_of(rewards, baseline="loo")[0], torch.ones(3))
    assert_close(advantages_of(rewards, baseline="loo", credit="turn")[0], torch.tensor([1.0, 0.8, 0.5]))


@pytest.mark.parametrize("norm, baseline", list(itertools.product(NORMS, BASELINES)))
def test_advantages_sum_to_zero_in_each_group_whatever_the_order(norm, baseline):
    """#26: a baseline from the first episode only still half learns. Also catches groups found by position, not by
    id: ids are arbitrary, groups interleaved and of different sizes."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.tensor([70, -3, 70, 5, -3, 70, 5, -3, 70, 10**12, 5, 70])
    rewards = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    ours = advantages_of(rewards, groups, norm=norm, baseline=baseline)
    for group in groups.unique():
        assert ours[groups == group].sum(0).abs().max() < 1e-12
    assert (ours[groups != 10**12].abs() > 1e-3).all()
    perm = torch.randperm(12, generator=generator)
    for credit in CREDITS:
        options = dict(norm=norm, baseline=baseline, credit=credit, gamma=0.9)
        permuted = advantages_of(rewards[perm], groups[perm], **options)
        assert_close(permuted, advantages_of(rewards, groups, **options)[perm])
    alone = advantages_of(rewards[groups == 5], norm=norm, baseline=baseline)  # other groups have no influence
    assert_close(ours[groups == 5], alone)


@pytest.mark.parametrize("norm, baseline, credit", list(itertools.product(NORMS, BASELINES, CREDITS)))
def test_groups_without_signal_give_exactly_zero(norm, baseline, credit):
    """A lone episode must not get its raw reward. Seven float32 rewards of .7 differ from their mean by rounding, which
    a division by 1e-6 blows up to +-.06 for all rows alike (verl's loop)."""
    options = dict(norm=norm, baseline=baseline, credit=credit)
    assert (advantages_of([0.7, 1.0, -3.0], [0, 1, 2], **options) == 0).all()
    assert torch.full((7,), 0.7).dtype == torch.float32
    assert (advantages_of(torch.full((7,), 0.7), **options) == 0).all()
    mixed = advantages_of(torch.cat([torch.full((7,), 0.7), torch.tensor([1.0, 0.0])]), [0] * 7 + [1, 1], **options)
    assert (mixed[:7] == 0).all() and (mixed[7:] != 0).all()


def test_informative_share_is_unbiased():
    """Catches the plug-in estimate 1 - p^8 - (1 - p)^8 with p = s/n, which is biased low, and a missing term."""
    for p, table in ((0, 0.000), (0.01, 0.077), (0.05, 0.337), (0.2, 0.832), (0.5, 0.992), (0.9, 0.570), (0.99, 0.077)):
        binomial = [math.comb(16, s) * p**s * (1 - p) ** (16 - s) for s in range(17)]
        expectation = sum(w * grpo.informative_share(s, 16, 8) for s, w in enumerate(binomial))
        assert expectation == pytest.approx(1 - p**8 - (1 - p) ** 8, abs=1e-12)
        assert expectation == pytest.approx(table, abs=5e-4)


# ---- Mask, loss and metrics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("coefs", (PLAIN, ALL_TERMS), ids=("plain", "kl and entropy"))
@pytest.mark.parametrize("actions", ([2, 3], [1], [4], [1, 4]))
def test_gradient_reaches_only_the_rows_that_score_an_action(actions, coefs):
    """#4: off by one between logits and mask. Row t of logits scores token t + 1; ids 5 to 9, actions at index 2 and
    3, then at the first index that has a row, and at the last."""
    tokens, mask = torch.tensor([[5, 6, 7, 8, 9]]), torch.zeros(1, 5)
    mask[0, actions] = 1
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5, 12, generator=generator, requires_grad=True)
    newlogprobs, entropy, _ = grpo.score(FixedLogits(logits), tokens, mask, 1.0)
    ref_logprobs, _, _ = grpo.score(FixedLogits(torch.randn(1, 5, 12, generator=generator)), tokens, mask, 1.0)
    for t in actions:
        assert_close(newlogprobs[0, t], logits[0, t - 1].log_softmax(0)[tokens[0, t]])
    weights = grpo.loss_weights(mask, loss_agg="token-mean", token_budget=5)
    loss, _ = grpo.compute_loss(newlogprobs, entropy, newlogprobs.detach(), mask, mask, weights, ref_logprobs, **coefs)
    gradient = torch.autograd.grad(loss, logits)[0][0]
    for row in range(5):
        if row + 1 in actions:
            assert gradient[row].argmin() == tokens[0, row + 1]  # descent raises the action's logit, most of all
        else:
            assert (gradient[row] == 0).all()


@pytest.mark.parametrize("coefs", (PLAIN, ALL_TERMS), ids=("plain", "kl and entropy"))
@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_observations_are_out_of_loss_and_metrics(loss_agg, coefs):
    """#3: replacing the observations' ids, their old and reference log-probs and advantages must change nothing, not
    even if those log-probs are NaN."""
    tokens, mask, advantages, old, logits, ref_logits = random_batch()
    noise = torch.Generator().manual_seed(1)

    def run(replace):
        ids, rest, nan = tokens, torch.zeros_like(mask), torch.zeros_like(mask)
        if replace:
            nan[:, ::2] = torch.where(mask[:, ::2] > 0, 0.0, torch.nan)
            ids = torch.where(mask > 0, tokens, torch.randint(5, tokens.shape, generator=noise))
            rest = 300 * torch.randn(mask.shape, generator=noise) * (1 - mask)
            assert (ids != tokens).any()
        newlogprobs, entropy, _ = grpo.score(FixedLogits(logits), ids, mask, 1.0)
        ref_logprobs, _, _ = grpo.score(FixedLogits(ref_logits), ids, mask, 1.0)
        weights = grpo.loss_weights(mask, loss_agg=loss_agg, token_budget=20)
        loss, metrics = grpo.compute_loss(
            newlogprobs + rest, entropy + rest, old - rest + nan, advantages + rest, mask, weights,
            ref_logprobs + 2 * rest + nan, **coefs,
        )  # fmt: skip
        return loss, torch.autograd.grad(loss, logits)[0], metrics

    plain, replaced = run(False), run(True)
    assert torch.equal(plain[0], replaced[0]) and torch.equal(plain[1], replaced[1])
    assert plain[2].keys() == replaced[2].keys() and len(plain[2]) == 5 + (coefs["kl_coef"] > 0)
    for key in plain[2]:
        assert torch.equal(plain[2][key], replaced[2][key]), key


def test_ratio_is_one_before_the_first_step():
    """#6: masked tokens filled with log-prob 1 have a ratio of 1/e and shift the averages. 80 % observations."""
    tokens, _, _, _, logits, _ = random_batch(T=11)
    mask = torch.zeros(8, 11)
    mask[:, [4, 9]] = 1
    newlogprobs, entropy, _ = grpo.score(FixedLogits(logits), tokens, mask, 1.0)
    old = torch.where(mask > 0, newlogprobs.detach(), 1.0)
    weights = grpo.loss_weights(mask, loss_agg="token-mean", token_budget=2)
    loss, metrics = grpo.compute_loss(
        newlogprobs, entropy, old, mask, mask, weights, **PLAIN
    )  # A = 1: loss is -mean ratio
    assert_close(loss.item(), -1.0, atol=1e-6, rtol=0)
    assert metrics["losses/approx_kl"] == metrics["losses/old_approx_kl"] == metrics["losses/clipfrac"] == 0


def test_metrics_by_hand():
    """Catches k1 and k3 exchanged, a wrong sign, and clip fractions counted on masked tokens. Ratios 1.5, .5, 1.1, and
    a masked one of e."""
    ratio = torch.tensor([[1.5, 0.5, 1.1, math.e]])
    mask, zeros = torch.tensor([[1.0, 1.0, 1.0, 0.0]]), torch.zeros(1, 4)
    _, metrics = grpo.compute_loss(ratio.log(), zeros, zeros, zeros, mask, mask / 3, **PLAIN)
    assert_close(metrics["losses/old_approx_kl"], -torch.tensor(1.5 * 0.5 * 1.1).log())
    assert_close(metrics["losses/approx_kl"], torch.tensor(0.5 - 0.5 + 0.1 - math.log(1.5 * 0.5 * 1.1)))
    assert metrics["losses/clipfrac"] == 2


def test_signs_of_entropy_bonus_and_kl_penalty():
    """Catches an entropy penalty and a KL bonus: the loss falls with entropy and rises with the KL."""
    tokens, mask, advantages, old, logits, ref_logits = random_batch()
    newlogprobs, entropy, _ = grpo.score(FixedLogits(logits), tokens, mask, 1.0)
    ref_logprobs, _, _ = grpo.score(FixedLogits(ref_logits), tokens, mask, 1.0)
    weights = grpo.loss_weights(mask, loss_agg="token-mean", token_budget=20)
    loss, metrics = grpo.compute_loss(newlogprobs, entropy, old, advantages, mask, weights, ref_logprobs, **ALL_TERMS)
    bonus, penalty = 0.01 * metrics["losses/entropy"], 0.1 * metrics["losses/ref_kl"]
    assert bonus > 0 and penalty > 0
    assert_close(loss.detach(), metrics["losses/policy_loss"] + (penalty - bonus) / mask.sum())


@pytest.mark.parametrize("observations", (0, 3, 40))
def test_entropy_of_a_uniform_policy(observations):
    """#51: "entropy" as the sampled token's surprise, or summed over padding. Uniform: ln V whatever the padding."""
    V, T = 7, 6 + observations
    tokens, mask = torch.zeros(3, T, dtype=torch.int64), torch.zeros(3, T)
    mask[:, 2:4], mask[0, 5] = 1, 1
    newlogprobs, entropy, _ = grpo.score(FixedLogits(torch.zeros(3, T, V)), tokens, mask, 1.0)
    weights = grpo.loss_weights(mask, loss_agg="token-mean", token_budget=3)
    _, metrics = grpo.compute_loss(newlogprobs, entropy, newlogprobs, mask, mask, weights, **PLAIN)
    assert metrics["losses/entropy"].item() / mask.sum().item() == pytest.approx(math.log(V), abs=1e-5)
    skewed = torch.tensor([3.0, 1, 0, 0, 0, 0, 0]).expand(3, T, V)
    entropy = grpo.score(FixedLogits(skewed), tokens, mask, 0.7)[1]
    assert_close(entropy, mask * torch.distributions.Categorical(logits=skewed[0, 0] / 0.7).entropy())


@pytest.mark.parametrize("advantage", (0.0, -1.0, 1.0))
def test_loss_is_finite_when_the_ratio_overflows(advantage):
    """#41: exp(log-ratio) = inf, and inf * 0 = NaN, though the clipped branch is fine. float32, old -200, new -1."""
    newlogprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    mask = torch.ones(1, 2)
    loss, metrics = grpo.compute_loss(
        newlogprobs, torch.zeros(1, 2), torch.tensor([[-200.0, -1.0]]), advantage * mask, mask, mask / 2, **PLAIN
    )
    loss.backward()
    assert loss.isfinite() and newlogprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_masked_batches_and_rows(loss_agg):
    """#29: a batch without any trained token is 0/0 = NaN, which ruins the weights. A masked row among others: zero."""
    tokens, mask, advantages, old, logits, ref_logits = random_batch()
    for m in (torch.zeros_like(mask), mask):
        newlogprobs, entropy, _ = grpo.score(FixedLogits(logits), tokens, m, 1.0)
        ref_logprobs, _, _ = grpo.score(FixedLogits(ref_logits), tokens, m, 1.0)
        weights = grpo.loss_weights(m, loss_agg=loss_agg, token_budget=20)
        loss, metrics = grpo.compute_loss(newlogprobs, entropy, old, advantages, m, weights, ref_logprobs, **ALL_TERMS)
        gradient = torch.autograd.grad(loss, logits)[0]
        assert gradient.isfinite().all() and (gradient[m.sum(1) == 0] == 0).all()
        if m.any():
            assert loss != 0 and (gradient[m.sum(1) > 0].abs().amax((1, 2)) > 0).all()
        else:
            assert loss == 0 and all(value == 0 for value in metrics.values())


def test_loss_weights_by_hand():
    """Catches exchanged denominators. Three episodes of 1, 3 and 0 trained tokens."""
    mask = torch.tensor([[0.0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    for loss_agg, rows in (
        ("token-mean", (1 / 4, 1 / 4)),
        ("seq-mean-token-mean", (1 / 3, 1 / 9)),
        ("constant", (1 / 30, 1 / 30)),
    ):
        weights = grpo.loss_weights(mask, loss_agg=loss_agg, token_budget=10)
        assert_close(weights, mask * torch.tensor([*rows, 0.0])[:, None])


@pytest.mark.parametrize("coefs", (PLAIN, ALL_TERMS), ids=("plain", "kl and entropy"))
@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_micro_batches_add_up(loss_agg, coefs):
    """Catches a denominator taken per micro-batch: token means of micro-batches are not the token mean of the batch."""
    tokens, mask, advantages, old, logits, ref_logits = random_batch()
    weights = grpo.loss_weights(mask, loss_agg=loss_agg, token_budget=20)

    def run(rows):
        newlogprobs, entropy, _ = grpo.score(FixedLogits(logits[rows]), tokens[rows], mask[rows], 1.0)
        ref_logprobs, _, _ = grpo.score(FixedLogits(ref_logits[rows]), tokens[rows], mask[rows], 1.0)
        return grpo.compute_loss(
            newlogprobs, entropy, old[rows], advantages[rows], mask[rows], weights[rows], ref_logprobs, **coefs
        )

    whole, whole_metrics = run(slice(None))
    parts = [run(rows) for rows in (slice(0, 3), slice(3, 4), slice(4, 8))]
    assert_close(sum(loss for loss, _ in parts), whole, atol=1e-12, rtol=0)
    gradient = lambda loss: torch.autograd.grad(loss, logits, retain_graph=True)[0]  # noqa: E731
    assert_close(sum(gradient(loss) for loss, _ in parts), gradient(whole), atol=1e-12, rtol=0)
    for key, value in whole_metrics.items():
        assert_close(sum(metrics[key] for _, metrics in parts), value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("norm, baseline", list(itertools.product(NORMS, BASELINES)))
def test_constant_groups_have_no_gradient_but_count_as_rows(norm, baseline):
    """#28: one mixed group and three constant ones. These get exactly zero gradient and stay in the denominator, so the
    mixed group's gradient is a quarter of what it is alone."""
    rewards = torch.tensor([1.0, 0, 0, 1] + [0.7] * 4 + [0.0] * 4 + [0.1] * 4)
    groups, mask = torch.arange(16) // 4, torch.tensor([0.0, 1.0, 1.0]).repeat(16, 1)
    tokens, turn_ids = torch.arange(48).view(16, 3) % 5, torch.zeros(16, 3, dtype=torch.int64)

    def gradient(rows):
        logits = torch.zeros(len(tokens[rows]), 3, 5, requires_grad=True)
        options = dict(credit="episode", gamma=1.0, baseline=baseline, norm=norm)
        advantages = grpo.compute_advantages(rewards[rows, None], turn_ids[rows], mask[rows], groups[rows], **options)
        newlogprobs, entropy, _ = grpo.score(FixedLogits(logits), tokens[rows], mask[rows], 1.0)
        weights = grpo.loss_weights(mask[rows], loss_agg="constant", token_budget=2)
        loss, _ = grpo.compute_loss(
            newlogprobs, entropy, newlogprobs.detach(), advantages, mask[rows], weights, **PLAIN
        )
        return torch.autograd.grad(loss, logits)[0]

    whole = gradient(slice(None))
    assert (whole[4:] == 0).all() and (whole[:4, :2] != 0).any()
    assert_close(whole[:4], gradient(slice(4)) / 4)


def test_filtered_episodes_vote_but_are_not_trained():
    """#47: one mask zeroed and not the other. Rewards 1, 0, 0 and a truncated 0: with its vote the failures get -1/3
    (without it -1/2); it has no weight and no part in any metric, so the tokens counted are those of the loss."""
    rewards, turn_ids = torch.tensor([[1.0], [0], [0], [0]]), torch.zeros(4, 3, dtype=torch.int64)
    mask = torch.ones(4, 3) * torch.tensor([1.0, 1, 1, 0])[:, None]
    options = dict(credit="episode", gamma=1.0, baseline="loo", norm="none")
    advantages = grpo.compute_advantages(rewards, turn_ids, mask, torch.zeros(4), **options)
    assert_close(advantages, mask * torch.tensor([1, -1 / 3, -1 / 3, 0])[:, None])
    for loss_agg, weight in (("token-mean", 1 / 9), ("seq-mean-token-mean", 1 / 12), ("constant", 1 / 40)):
        weights = grpo.loss_weights(mask, loss_agg=loss_agg, token_budget=10)
        assert_close(weights, weight * mask)
    _, metrics = grpo.compute_loss(
        -torch.ones(4, 3), torch.ones(4, 3), torch.zeros(4, 3), advantages, mask, weights, **PLAIN
    )
    assert metrics["losses/entropy"] == mask.sum()  # an entropy of 1 everywhere
    assert metrics["losses/old_approx_kl"] == mask.sum()  # a log-ratio of -1 everywhere
    assert metrics["losses/clipfrac"] == mask.sum()  # all of them clipped


# ---- The gradient against the exact gradient of the expected return ----------------------------------------------


class TablePolicy:
    """A language model of episodes (start, action, observation, action): a logit per context and symbol, plus a vector
    that all contexts share. Like a language model, it also gives the observation a probability."""

    def __init__(self, V):
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
                       for shape in ((V,), (V, V), (V, V, V), (V,))]  # fmt: skip

    def __call__(self, tokens, at=None, return_hidden=False):
        first, observation, second, shared = self.params
        action, observed = tokens[:, 1], tokens[:, 2]
        logits = torch.stack([first.expand(len(tokens), -1), observation[action], second[action, observed]], 1)
        return logits + shared if at is None else (logits + shared)[torch.arange(len(tokens))[:, None], at]

    def head(self, hidden):
        return hidden


def enumerate_toy(V):
    """All episodes of a two-turn environment, with observation probabilities given the first action. Action 0 ends
    the episode at once; otherwise an observation follows and a second action. Each turn pays."""
    generator = torch.Generator().manual_seed(1)
    chances = torch.rand(V, V, generator=generator, dtype=torch.float64) + 0.1
    chances = chances / chances.sum(1, keepdim=True)
    pay_first = torch.rand(V, generator=generator, dtype=torch.float64)
    pay_second = torch.rand(V, V, V, generator=generator, dtype=torch.float64)
    episodes = [(0, 0, 0)] + [(a, o, b) for a in range(1, V) for o in range(V) for b in range(V)]
    tokens = torch.tensor([(0, *episode) for episode in episodes])
    short = tokens[:, 1] == 0
    a, o, b = tokens[:, 1:].T
    rewards = torch.stack([pay_first[a], torch.where(short, 0.0, pay_second[a, o, b])], 1)
    turn_ids = torch.where(short[:, None], torch.tensor([-1, 0, -1, -1]), torch.tensor([-1, 0, 0, 1]))
    mask = torch.where(short[:, None], torch.tensor([0, 1, 0, 0]), torch.tensor([0, 1, 0, 1])).double()
    return tokens, mask, turn_ids, rewards, torch.where(short, 1.0, chances[a, o])


def expected_update(policy, toy, G, *, train_observations=False, **options):
    """Exact expectation over all groups of G episodes of minus compute_loss's gradient at ratio 1, times the budget."""
    tokens, mask, turn_ids, rewards, chances = toy
    with torch.no_grad():
        probabilities = chances * grpo.score(policy, tokens, mask, 1.0)[0].sum(1).exp()  # of each episode
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)
    groups = torch.cartesian_prod(*[torch.arange(len(tokens))] * G)  # every sequence of G episodes
    rows, num_groups = groups.flatten(), len(groups)
    loss_mask = ((turn_ids >= 0).double() if train_observations else mask)[rows]
    group_ids = torch.arange(num_groups).repeat_interleave(G)
    options |= dict(gamma=1.0, norm="none")
    advantages = grpo.compute_advantages(rewards[rows], turn_ids[rows], loss_mask, group_ids, **options)
    # A batch is one group: its weights are num_groups times those of all groups in one batch
    chance_of_group = probabilities[groups].prod(1).repeat_interleave(G)[:, None]
    weights = grpo.loss_weights(loss_mask, loss_agg="constant", token_budget=7) * num_groups * chance_of_group
    newlogprobs, entropy, _ = grpo.score(policy, tokens[rows], loss_mask, 1.0)
    loss, _ = grpo.compute_loss(newlogprobs, entropy, newlogprobs.detach(), advantages, loss_mask, weights, **PLAIN)
    return [-7 * gradient for gradient in torch.autograd.grad(loss, policy.params)]


def exact_gradient(policy, toy):
    """Autograd of the expected return, all episodes enumerated."""
    tokens, mask, _, rewards, chances = toy
    logprobs = policy(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    probabilities = chances * (logprobs * mask[:, 1:]).sum(1).exp()
    return torch.autograd.grad((probabilities * rewards.sum(1)).sum(), policy.params, materialize_grads=True)


@pytest.mark.parametrize("V, G", ((3, 2), (2, 3)))
@pytest.mark.parametrize("credit, baseline", list(itertools.product(CREDITS, BASELINES)))
def test_update_is_the_exact_policy_gradient(credit, baseline, V, G):
    """Catches any bias of the baseline, the credit, the mask, the shift, the lengths or the scale. In exact expectation
    the update is the gradient of the expected return with loo, (G - 1)/G of it with a mean that includes oneself."""
    policy, toy = TablePolicy(V), enumerate_toy(V)
    scale = 1 if baseline == "loo" else (G - 1) / G
    update = expected_update(policy, toy, G, credit=credit, baseline=baseline)
    for ours, exact in zip(update, exact_gradient(policy, toy)):
        assert_close(ours, scale * exact, atol=1e-12, rtol=0)
    assert exact.norm() > 0.01  # of the shared vector


@pytest.mark.parametrize("credit, baseline", list(itertools.product(CREDITS, BASELINES)))
def test_update_is_biased_when_observations_are_trained(credit, baseline):
    """The mask matters: an update that also trains on the observation, which the policy did not choose, is another one.
    It pulls at the observation's logits, on which the expected return does not depend, and at what contexts share."""
    policy, toy = TablePolicy(3), enumerate_toy(3)
    scale = 1 if baseline == "loo" else 1 / 2
    ours = expected_update(policy, toy, 2, train_observations=True, credit=credit, baseline=baseline)
    exact = [scale * gradient for gradient in exact_gradient(policy, toy)]
    assert (exact[1] == 0).all() and ours[1].norm() > 0.01  # the observation's logits
    assert (ours[3] - exact[3]).norm() > 0.1 * exact[3].norm()  # the shared vector
    assert_close(ours[0], exact[0], atol=1e-12, rtol=0)  # logits of an action's own context are not concerned


# ---- Sampling ----------------------------------------------------------------------------------------------------


def test_samples_follow_the_softmax_at_the_temperature():
    """Catches a missing temperature in the sampler, or in the log-probs it returns or score computes (#17: a ratio of 2
    before any update), and an inverse CDF shifted by one token."""
    logits, N = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1]), 20_000
    uniforms = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    ids, logprobs = grpo.sample_tokens(logits.expand(N, 5), uniforms, 0.7)
    expected = (logits / 0.7).softmax(0)
    assert_close(ids.bincount(minlength=5) / N, expected, atol=1.5 / N, rtol=0)
    assert (ids.diff() >= 0).all()  # monotone in the uniform
    assert_close(logprobs, expected.log()[ids])
    scored, _, _ = grpo.score(
        FixedLogits(logits.expand(1, 5, 5)), torch.tensor([[0, 0, 1, 2, 3, 4]]), torch.ones(1, 6), 0.7
    )
    assert_close(scored[0, 1:], expected.log())


def test_impossible_tokens_are_never_sampled():
    """Catches `<` for `<=` at uniform 0, and a cumulative sum ending below 1: at the largest float32 below 1 sampling
    would run off the end, or into a token of probability 0. First, middle and last tokens have probability 0."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 1000, generator=generator)
    logits[:, [0, 1, 500, 998, 999]] = -torch.inf
    logits[::2, [0, 999]] = -1e6  # exp gives 0 as well
    for uniform in (0.0, 1 - 2**-24, 0.5):
        for temperature in (1.0, 0.7):
            ids, logprobs = grpo.sample_tokens(logits, torch.full((200,), uniform), temperature)
            assert (ids >= 2).all() and (ids < 998).all() and (ids != 500).all()
            assert (logprobs > -200).all()
    one_possible = torch.full((1, 6), -torch.inf)
    one_possible[0, 3] = 0.0
    for uniform in (0.0, 0.5, 1 - 2**-24):
        ids, logprobs = grpo.sample_tokens(one_possible, torch.tensor([uniform]), 1.0)
        assert ids.item() == 3 and logprobs.item() == 0


def test_temperature_zero_is_greedy():
    """Catches a division by zero, and sampling in evaluation. Whatever the uniform, the largest logit wins."""
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    for uniform in (0.0, 0.5, 1 - 2**-24):
        ids, logprobs = grpo.sample_tokens(logits, torch.full((50,), uniform), 0)
        assert torch.equal(ids, logits.argmax(1))
        assert logprobs.isfinite().all()
