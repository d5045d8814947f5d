"""Advantages of REINFORCE, GRPO and GiGPO, which compare episodes of a group: numbers of other
codebases, worked examples, and what train() hands to the loss. test_ppo.py has those of a critic.

golden.json holds outputs of the peers' own functions, each with repository, commit and function.
Each test says which bug it would catch; #n is a public report of that bug.
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from helpers import (
    GOLDEN,
    advantages,
    golden,
    in_training,
    layout,
    name,
    on_rollouts,
    run,
    same,
    without_times,
)
from torch.testing import assert_close

import gigpo
import grpo
import ppo
import reinforce

BASELINES = {
    reinforce: ("none", "batch", "mean", "loo"),
    grpo: ("mean", "loo"),
    gigpo: ("mean", "loo"),
}
STEP_CASES = {  # groups and members of a group
    "gigpo/three_groups/g1.0_w1.0": (3, 3),
    "gigpo/three_groups/g0.95_w1.0": (3, 3),
    "gigpo/random_walk/g0.9_w1": (4, 5),
}
NORMS = {"none": "mean_norm", "std": "mean_std_norm"}  # ours and verl-agent's name
VERL = {
    ("mean", "none"): "verl-project/loop/std_False",
    ("mean", "std"): "verl-project/loop/std_True",
    ("loo", "none"): "rloo/verl-project/loop",
}


def norms_of(script):
    return ("none",) if script is reinforce else ("none", "std")


def labels(names):
    """Integers for names, in order of appearance."""
    order = list(dict.fromkeys(names))
    return torch.tensor([order.index(name) for name in names])


# ---- Numbers of other codebases


@pytest.mark.parametrize(
    "script, baseline, norm",
    [(s, *options) for s in BASELINES for options in VERL if options[1] in norms_of(s)],
    ids=name,
)
def test_advantages_equal_verl(script, baseline, norm):
    """Catches a biased standard deviation, a leave-one-out mean that includes oneself or n/(n-1)
    upside down, a baseline across groups, groups found by position, and advantages on masked
    tokens. Group p2 has one member: verl returns its raw reward, ours is 0."""
    inputs, outputs = golden(VERL[baseline, norm])
    rewards, mask = inputs["scores"][:, None], inputs["mask"]
    turn_ids, groups = torch.zeros_like(mask, dtype=torch.int64), labels(inputs["index"])
    ours = advantages(script, rewards, groups, turn_ids, mask, baseline=baseline, norm=norm)
    lone = torch.tensor([uid == "p2" for uid in inputs["index"]])
    assert lone.sum() == 1 and (ours[lone] == 0).all()
    assert_close(ours[~lone], outputs["tokens"][~lone], atol=2e-6, rtol=0)


def step_rows(case):
    """A case's step rows as episodes: rewards and played (B, K), anchors, group ids; the (b, k) of
    each row; and the outputs."""
    inputs, outputs = golden(case)
    b, k = labels(inputs["trajectory"]), inputs["step"].long()
    rewards = torch.zeros(int(b.max()) + 1, int(k.max()) + 1, dtype=torch.float64)
    played, groups = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=torch.int64)
    rewards[b, k], played[b, k], groups[b] = inputs["reward"], 1, labels(inputs["group"])
    anchors = [[] for _ in rewards]
    for episode, step, state in zip(b.tolist(), k.tolist(), inputs["anchor"], strict=True):
        assert len(anchors[episode]) == step
        anchors[episode].append(state)
    return rewards, played, anchors, groups, (b, k), outputs


@pytest.mark.parametrize("case", [case for case in GOLDEN if case.startswith("gigpo/")])
def test_step_returns_groups_and_advantages_equal_verl_agent_and_roll(case):
    """Catches a discount per token or from the padded end, step groups across tasks or by turn
    number, revisits left out (#33, #35), a biased standard deviation, and turns that were not
    played counted in."""
    rewards, played, anchors, groups, (b, k), outputs = step_rows(case)
    returns = gigpo.returns_to_go(rewards, gamma=golden(case)[0]["gamma"])
    assert_close(returns[b, k], outputs["step_returns"], atol=2e-6, rtol=0)
    if "step_group" in outputs:
        ours = torch.full_like(rewards, -1)
        for n, turns in enumerate(gigpo.step_groups(played, anchors, groups)):
            ours[tuple(zip(*turns, strict=True))] = n
        assert torch.equal(ours[b, k], outputs["step_group"])
    for norm, peer in NORMS.items():
        ours = gigpo.step_advantages(returns, played, anchors, groups, norm=norm)
        assert_close(ours[b, k], outputs[peer]["step_adv"], atol=2e-5, rtol=0)
        assert (ours[played == 0] == 0).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", STEP_CASES)
def test_total_advantage_in_training_equals_verl_agent(case, norm, tmp_path):
    """Catches, in train() itself: episode statistics over turns, in which a long episode counts
    more; step advantages of another turn, of other discount, norm or coefficient than the flags
    say, or on observations; step statistics over a minibatch; turns that were not played counted
    in."""
    rewards, _, anchors, groups, (b, k), outputs = step_rows(case)
    turns = [[(1, 1)] * len(states) for states in anchors]
    num_groups, group_size = STEP_CASES[case]
    ours, mask = in_training(
        gigpo,
        tmp_path,
        rewards,
        turns,
        groups=groups,
        anchors=anchors,
        num_groups=num_groups,
        group_size=group_size,
        baseline="mean",
        norm=norm,
        step_gamma=golden(case)[0]["gamma"].item(),
        step_adv_coef=0.5,
    )
    assert torch.equal(mask, layout(*turns)[1]) and (ours[mask == 0] == 0).all()
    ours, theirs = ours[b, 1 + 2 * k].double(), outputs[NORMS[norm]]  # prompt, two tokens a turn
    expected = theirs["episode_adv_per_trajectory"] + 0.5 * theirs["step_adv"]
    assert_close(ours, expected, atol=2e-5, rtol=0)


# ---- Worked examples


@pytest.mark.parametrize(
    "script, baseline", [(s, b) for s in BASELINES for b in BASELINES[s]], ids=name
)
def test_baselines_by_hand(script, baseline):
    """#23, #38, #39: a baseline of another scope. Returns 1, 0, 0 and 3, 1 in two groups, and a
    lone 1: the batch's mean is 1, those of the groups are 1/3 and 2. Also catches groups found by
    position: ids are arbitrary and interleaved."""
    rewards, groups = [[1.0], [3.0], [0.0], [1.0], [0.0], [1.0]], [70, -3, 70, -3, 70, 10**12]
    expected = {
        "none": [1.0, 3.0, 0.0, 1.0, 0.0, 1.0],
        "batch": [0.0, 2.0, -1.0, 0.0, -1.0, 0.0],
        "mean": [2 / 3, 1.0, -1 / 3, -1.0, -1 / 3, 0.0],
        "loo": [1.0, 2.0, -0.5, -2.0, -0.5, 0.0],
    }[baseline]
    ours = advantages(script, rewards, groups, baseline=baseline)[:, 0]
    assert_close(ours, torch.tensor(expected))


@pytest.mark.parametrize("script", BASELINES, ids=name)
def test_turn_credit_by_hand(script):
    """#7: catches a discount per token, which an observation's length would change, a baseline per
    turn, a discount from the padded end, and reading the wrong turn. Four episodes of 4, 2, 4 and 5
    turns, paid 1, 0, 1, 0 in the fourth, discount .8: R = .512, 0, .512, 0 with mean .256."""
    rewards = torch.zeros(4, 5)
    rewards[[0, 2], 3] = 1
    turn_ids, mask = layout(*[[(2, n)] * n for n in (4, 2, 4, 5)])
    options = dict(gamma=0.8, baseline="mean")
    ours = advantages(script, rewards, [0] * 4, turn_ids, mask, credit="turn", **options)
    won, lost = (0.256, 0.384, 0.544, 0.744), (-0.256,) * 5
    for row, sampled, turns in zip(ours, mask > 0, (won, lost[:2], won, lost), strict=True):
        assert_close(row[sampled], torch.tensor(turns).repeat_interleave(2), atol=1e-6, rtol=0)
    assert (ours[mask == 0] == 0).all()
    ours = advantages(script, rewards, [0] * 4, turn_ids, mask, credit="episode", **options)
    expected = mask * torch.tensor([0.256, -0.256, 0.256, -0.256])[:, None]
    assert_close(ours, expected, atol=1e-6, rtol=0)


STATES = [list("ABC"), list("ABB"), list("AD"), list("AEA")]
REWARDS = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
PLAYED = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
STEP = torch.tensor(
    [[0.10, 1 / 3, 0.0], [-0.15, -1 / 6, -1 / 6], [0.35, 0.0, 0.0], [-0.15, 0.0, -0.15]]
)


def step_example(order=(0, 1, 2, 3), *, states=STATES, norm="none"):
    """Step advantages (B, K) of the example in #33, its episodes in this order."""
    order = list(order)
    returns = gigpo.returns_to_go(REWARDS[order], gamma=0.5)
    anchors = [states[b] for b in order]
    return gigpo.step_advantages(returns, PLAYED[order], anchors, torch.zeros(4), norm=norm)


@pytest.mark.parametrize("norm", ("none", "std"))
def test_gigpo_does_not_depend_on_order_or_kind_of_anchors(norm):
    """#36: keys that fail or collide on None, tuples, sets and numbers, or follow an object's
    identity. Also catches a dependence on the order of the episodes. By hand (#33, #35): the second
    episode's visits to B in turns 1 and 2 are in one group, the fourth's revisit to A counts."""
    expected = step_example(norm=norm)
    if norm == "none":
        assert_close(expected, STEP)
    for order in itertools.permutations(range(4)):
        assert_close(step_example(order, norm=norm), expected[list(order)])
    for kinds in (
        (None, (), frozenset({1, 2}), ("text", ("a", 1)), ("text", ("a", 2))),
        ("1", 1, "", (1,), ("1",)),
        ((0, 7), (7, 0), (0, 0), (7, 7), (1, 7)),
    ):
        kinds = dict(zip("ABCDE", map(repr, kinds), strict=True))
        states = [[eval(kinds[state]) for state in row] for row in STATES]  # equal, another object
        assert torch.equal(step_example(states=states, norm=norm), expected)


@pytest.mark.parametrize(
    "script, baseline", [(s, b) for s in BASELINES for b in BASELINES[s]], ids=name
)
def test_an_episode_that_never_acted_has_no_vote(script, baseline):
    """An episode that the context cut before its first sampled token is no outcome of the policy:
    its 0 must not move the others. One whose tokens --filter-truncated masked keeps its vote."""
    turn_ids = torch.tensor([[-1, 0], [-1, 0], [-1, 0], [-1, -1]])
    rewards, mask = torch.tensor([[1.0], [0.0], [0.0], [0.0]]), (turn_ids >= 0).float()
    three = advantages(script, rewards[:3], [0] * 3, turn_ids[:3], mask[:3], baseline=baseline)
    cut = advantages(script, rewards, [0] * 4, turn_ids, mask, baseline=baseline)
    assert torch.equal(cut[:3], three) and not cut[3].any()
    turn_ids[3, 1] = 0
    filtered = advantages(script, rewards, [0] * 4, turn_ids, mask, baseline=baseline)
    assert torch.equal(filtered[:3], three) == (baseline == "none") and not filtered[3].any()


def test_step_advantages_read_only_turns_that_were_played():
    """Catches returns of turns that do not exist in a sum: 0 * NaN is NaN."""
    played, anchors = torch.tensor([[1, 1], [1, 0]]), [["A", "B"], ["A"]]
    returns = torch.tensor([[1.0, 0.5], [0.0, math.nan]])
    steps = gigpo.step_advantages(returns, played, anchors, torch.zeros(2), norm="none")
    assert torch.equal(steps, torch.tensor([[0.5, 0.0], [-0.5, 0.0]]))


def test_informative_share_is_unbiased():
    """Catches the plug-in estimate 1 - p^8 - (1 - p)^8 with p = s/n, which is biased low, and a
    missing term."""
    for p in (0, 0.01, 0.05, 0.2, 0.5, 0.9, 0.99):
        chances = [math.comb(16, s) * p**s * (1 - p) ** (16 - s) for s in range(17)]
        mean = sum(chance * grpo.informative_share(s, 16, 8) for s, chance in enumerate(chances))
        assert mean == pytest.approx(1 - p**8 - (1 - p) ** 8, abs=1e-12)


# ---- No signal


@pytest.mark.parametrize("credit", ("episode", "turn"))
@pytest.mark.parametrize(
    "script, baseline",
    [(s, b) for s in BASELINES for b in BASELINES[s] if b != "none"],
    ids=name,
)
def test_groups_without_signal_give_exactly_zero(script, baseline, credit):
    """#28, #34: a lone episode must not get its raw reward. Seven float32 rewards of .7 differ from
    their mean by rounding, which a division by 1e-6 blows up to +-.06. They are paid in the last
    turn, so that every turn's reward-to-go is the return."""
    equal, mixed = [[0.0, 0.7]] * 7, [[0.0, 1.0], [0.0, 0.0]]
    for norm in norms_of(script):
        options = dict(baseline=baseline, credit=credit, norm=norm)
        assert (advantages(script, equal, [3] * 7, **options) == 0).all()
        assert (advantages(script, [[0.5, 0.7]], [3], **options) == 0).all()
        if baseline != "batch":
            alone = advantages(script, [[0.5, 0.7], [-1.0, 1.0], [2.0, -3.0]], [0, 1, 2], **options)
            assert (alone == 0).all()
            ours = advantages(script, equal + mixed, [0] * 7 + [1] * 2, **options)
            assert (ours[:7] == 0).all() and (ours[7:] != 0).all()


@pytest.mark.parametrize("norm", ("none", "std"))
def test_step_groups_without_signal_give_exactly_zero(norm):
    """#28, #34: as above, in one state. Catches NaN, the standard deviation of one number, and
    equal returns whose rounding is divided by 1e-6."""
    rounded = torch.full((7, 2), 0.7)
    rounded[::2] = torch.nextafter(rounded[::2], torch.tensor(1.0))
    for returns, anchors, groups in (
        (rounded, [["s", "s"]] * 7, [0] * 7),
        (torch.arange(4.0).view(2, 2), [["a", "b"], ["c", "d"]], [0, 0]),
        (torch.arange(2.0).view(2, 1), [["s"], ["s"]], [0, 1]),
        (torch.ones(2, 3), [[], []], [0, 0]),
    ):
        played = torch.tensor([[k < len(states) for k in range(3)] for states in anchors]).float()
        played, groups = played[:, : returns.shape[1]], torch.tensor(groups)
        ours = gigpo.step_advantages(returns, played, anchors, groups, norm=norm)
        assert (ours == 0).all()


# ---- In train()


@pytest.mark.parametrize(
    "script, flags, won, lost",
    (
        (reinforce, dict(credit="turn"), (1.0, 0.8, 0.5), -1.0),  # reward-to-go minus the other's R
        (grpo, dict(credit="episode"), (1.0, 1.0, 1.0), -1.0),
        (gigpo, dict(credit="episode", step_gamma=1.0), (1.0, 1.0, 1.0), -1.0),
        (ppo, dict(gae_unit="token"), (1.0, 0.8, 0.5), 0.0),
        (ppo, dict(gae_unit="turn"), (1.0, 0.8, 0.5), 0.0),
    ),
    ids=name,
)
def test_every_trained_token_carries_its_turns_advantage(script, flags, won, lost, tmp_path):
    """#31: turns but the last got a row that was already masked, all zeros. #32: only the last
    reward counted. #10: a reward placed on the last token, which is an observation's and masked.
    Turns of 2, 7 and 3 tokens paid .2, .3, .5, against an episode paid nothing."""
    rewards, turns = [[0.2, 0.3, 0.5], [0.0, 0.0, 0.0]], [[(2, 3), (7, 1), (3, 2)]] * 2
    ours, mask = in_training(script, tmp_path, rewards, turns, **flags)
    assert mask.sum() == 24 and (ours[mask == 0] == 0).all()
    won = torch.tensor(won).repeat_interleave(torch.tensor([2, 7, 3]))
    assert_close(ours[mask > 0], torch.cat([won, torch.full((12,), lost)]))


@pytest.mark.parametrize("end", ("turn_limit", "context_limit"))
def test_filtered_episodes_vote_but_are_not_trained(script, end, tmp_path):
    """#47: one mask zeroed and not the other. Of 1, 0, 0 and a 0 that was cut, the failures get
    -1/3 (without its vote -1/2). PPO has no vote: its critic is zero."""
    rewards, turns, ends = [[1.0], [0.0], [0.0], [0.0]], [[(2, 1)]] * 4, ["submitted"] * 3 + [end]
    ours, mask = in_training(script, tmp_path, rewards, turns, ends=ends, filter_truncated=True)
    failed = 0.0 if script is ppo else -1 / 3
    assert mask.sum(1).tolist() == [2, 2, 2, 0]
    assert_close(ours, mask * torch.tensor([1.0, failed, failed, 0.0])[:, None])


@pytest.mark.parametrize("masked", (True, False))
def test_observations_are_trained_only_without_the_mask(script, masked, tmp_path):
    """Catches a mask that is not applied, or when it should not be, and one over prompt or padding:
    --no-mask-observations trains on exactly what the turns hold."""
    rewards, turns = [[0.5, 0.5], [-1.0, 0.0]], [[(2, 3), (1, 1)], [(3, 2)]]
    ours, mask = in_training(script, tmp_path, rewards, turns, mask_observations=masked)
    turn_ids, sampled = layout(*turns)
    assert torch.equal(mask, sampled if masked else (turn_ids >= 0).float())
    assert torch.equal(ours != 0, mask > 0)


# ---- The scripts against each other


def test_reinforce_trains_as_grpo_with_one_step_does(tmp_path):
    """One step of a whole batch, constant weights, no KL, no norm: the gradients are equal. Catches
    other weights, and episodes or tokens that one of them leaves out. Adam's first moment is then a
    tenth of the clipped gradient."""
    flags = dict(credit="episode", baseline="loo", kl_coef=0.0, process_reward=0.1)
    own = dict(norm="none", loss_agg="constant", num_minibatches=1)
    (_, ours), our_state = run(reinforce, tmp_path / "reinforce", num_iterations=1, **flags)
    (_, theirs), their_state = run(grpo, tmp_path / "grpo", num_iterations=1, **flags, **own)
    assert ours["losses/grad_norm"] == pytest.approx(theirs["losses/grad_norm"], rel=1e-4)
    assert theirs["losses/grad_norm"] > 1e-3
    ours, theirs = our_state["optimizer"]["state"], their_state["optimizer"]["state"]
    for n in ours:
        assert_close(ours[n]["exp_avg"], theirs[n]["exp_avg"], atol=1e-8, rtol=1e-4)


def test_gigpo_without_shared_states_is_grpo(tmp_path, monkeypatch, capsys):
    """Whole runs of two iterations, bit for bit: catches anything but the step advantages in which
    the two scripts differ. Such a run warns, and logs why."""

    def without_shared_states(rollout, *args, **kwargs):
        batch = rollout(*args, **kwargs)
        return batch._replace(anchors=[[object() for _ in states] for states in batch.anchors])

    warning = "warning: nearly every turn is alone in its state"
    theirs, their_state = run(grpo, tmp_path / "grpo", process_reward=0.1, norm="std")
    assert warning not in capsys.readouterr().out
    on_rollouts(monkeypatch, gigpo, without_shared_states)
    ours, our_state = run(gigpo, tmp_path / "gigpo", process_reward=0.1, norm="std")
    assert capsys.readouterr().out.count(warning) == 2
    own = {"charts/step_group_size": 1.0, "charts/frac_singleton_step_groups": 1.0}
    for a, b in zip(without_times(ours)[1:], without_times(theirs)[1:], strict=True):
        assert a == b | own and b["losses/grad_norm"] > 0
    assert same(our_state["model"], their_state["model"])


def test_gigpo_logs_its_step_groups(tmp_path, monkeypatch, capsys):
    """#34: how many turns are alone in their state is not logged. Counted here from the batch."""
    batches = []

    def keep(rollout, *args, **kwargs):
        batches.append(rollout(*args, **kwargs))
        return batches[-1]

    on_rollouts(monkeypatch, gigpo, keep)
    (_, line), _ = run(gigpo, tmp_path, num_iterations=1)
    (batch,) = batches
    groups = zip(batch.group_ids.tolist(), batch.anchors, strict=True)
    sizes = Counter((group, state) for group, states in groups for state in states).values()
    assert sum(sizes) == line["global_step"] and max(sizes) > 1
    assert line["charts/step_group_size"] == pytest.approx(sum(sizes) / len(sizes))
    lone = list(sizes).count(1) / len(sizes)
    assert line["charts/frac_singleton_step_groups"] == pytest.approx(lone)
    assert "alone in its state" not in capsys.readouterr().out


def test_scripts_begin_alike(tmp_path, monkeypatch):
    """Catches a network, a draw or a shuffle in one script that moves another's random numbers: for
    one seed all begin the first iteration with equal weights, tasks and noise, and sample the same
    tokens."""
    seen = []

    def keep(rollout, model, tokenizer, envs, tasks, group_ids, uniforms, **kwargs):
        state = {key: value.clone() for key, value in model.state_dict().items()}
        batch = rollout(model, tokenizer, envs, tasks, group_ids, uniforms, **kwargs)
        seen.append((state, tasks, uniforms, batch.tokens, batch.logprobs, batch.rewards))
        return batch

    for script in (reinforce, ppo, grpo, gigpo):
        on_rollouts(monkeypatch, script, keep)
        run(script, tmp_path / script.__name__, num_iterations=1)
    assert len(seen) == 4 and all(same(seen[0], other) for other in seen)
    assert len(set(seen[0][1])) > 1
