"""REINFORCE and GiGPO beside GRPO: numbers of other codebases, worked examples, enumeration, and what all four share.

golden_algorithms.json holds outputs of the peers' own functions, each with repository, commit and function. Each test
says which bug it would catch; #n is a public report of that bug. Everything runs on the CPU in seconds.
"""

import importlib
import inspect
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gigpo  # noqa: E402
import grpo  # noqa: E402
import ppo  # noqa: E402
import reinforce  # noqa: E402
from test_grpo import FixedLogits, TablePolicy, enumerate_toy, exact_gradient, random_batch  # noqa: E402

GOLDEN = {case["name"]: case for case in json.loads((Path(__file__).parent / "golden_algorithms.json").read_text())}
PLAIN = dict(clip_coef=0.2, clip_coef_high=0.28, kl_coef=0.0, ent_coef=0.0)
PLAIN_PPO = dict(clip_coef=0.2, clip_vloss=False, vf_coef=0.0, kl_coef=0.0, ent_coef=0.0)
STEP_CASES = ("gigpo/three_groups/g1.0_w1.0", "gigpo/three_groups/g0.95_w1.0", "gigpo/random_walk/g0.9_w1")
NORMS = (("none", "mean_norm"), ("std", "mean_std_norm"))
CREDITS, BASELINES = ("episode", "turn"), ("none", "batch", "mean", "loo")


@pytest.fixture(params=(reinforce, grpo, gigpo), ids=lambda script: script.__name__)
def script(request):
    """The scripts that compare episodes of a group. ppo.py asks its critic instead: see test_ppo.py."""
    return request.param


@pytest.fixture(params=(reinforce, ppo, grpo, gigpo), ids=lambda script: script.__name__)
def any_script(request):
    return request.param


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def labels(names):
    """Integers for names, in order of appearance."""
    order = list(dict.fromkeys(names))
    return torch.tensor([order.index(name) for name in names])


def layout(*episodes):
    """turn_ids and loss_mask (B, T) of episodes: a prompt of one token, then each turn's (sampled, observed) tokens."""
    rows = [[(-1, 0)] + [(k, m) for k, (sampled, observed) in enumerate(turns) for m in [1] * sampled + [0] * observed]
            for turns in episodes]  # fmt: skip
    T = max(map(len, rows))
    padded = torch.tensor([row + [(-1, 0)] * (T - len(row)) for row in rows])
    return padded[..., 0], padded[..., 1].float()


def advantages(script, rewards, groups, turn_ids=None, mask=None, *, norm="none", **options):
    """compute_advantages of the script, (B, T). Without turn_ids: one token a turn, (B, K)."""
    rewards, groups = torch.as_tensor(rewards), torch.as_tensor(groups)
    if turn_ids is None:
        turn_ids, mask = torch.arange(rewards.shape[1]).expand_as(rewards), torch.ones_like(rewards)
    options = dict(credit="episode", gamma=1.0, baseline="loo") | options
    if script is not reinforce:
        options["norm"] = norm
    return script.compute_advantages(rewards, turn_ids, mask, groups, **options)


def loss_of(script, newlogprobs, entropy, logprobs, *args):
    """The policy's loss alone; args: advantages, loss_mask, weights."""
    if script is ppo:
        zeros = torch.zeros_like(entropy)
        advantages, *rest = args
        return ppo.compute_loss(newlogprobs, zeros, entropy, logprobs, zeros, advantages, zeros, *rest, **PLAIN_PPO)[0]
    options = dict(kl_coef=0.0, ent_coef=0.0) if script is reinforce else PLAIN
    return script.compute_loss(newlogprobs, entropy, logprobs, *args, **options)[0]


def make_args(script, runs_dir, **flags):
    """Args of a tiny run, without the flags that the script has not."""
    tiny = dict(
        env_id="number", d_model=16, n_layers=1, n_heads=2, warm_start_steps=5, warm_start_batch_size=8,
        num_iterations=1, num_groups=4, group_size=4, eval_tasks=16, learning_rate=1e-3, runs_dir=runs_dir,
    )  # fmt: skip
    known = script.Args.__dataclass_fields__
    return script.Args(**{name: value for name, value in (tiny | flags).items() if name in known})


def results(runs_dir):
    """Metrics and checkpoint of the only run in the folder."""
    (run_dir,) = runs_dir.iterdir()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return lines, torch.load(run_dir / "checkpoint.pt", weights_only=True)


def on_rollouts(monkeypatch, script, change):
    """Replaces the training loop's rollouts by change(rollout, *args, **kwargs); evaluations pass."""
    rollout = script.rollout

    def spy(*args, **kwargs):
        training = sys._getframe(1).f_code.co_name == "train"
        return change(rollout, *args, **kwargs) if training else rollout(*args, **kwargs)

    monkeypatch.setattr(script, "rollout", spy)


def unique_anchors(rollout, *args, **kwargs):
    """A batch in which no state occurs twice."""
    batch = rollout(*args, **kwargs)
    return batch._replace(anchors=[[object() for _ in states] for states in batch.anchors])


def in_training(script, tmp_path, *, rewards, turns, groups, anchors=None, size=None, ends=None, tokens=None,
                warm_up=lambda *args, **kwargs: {}, **flags):  # fmt: skip
    """What train() hands to its loss if the rollout brings these episodes: advantages and loss_mask (B, T). PPO's
    critic is warmed up by warm_up: by default it stays zero, so that with lambda 1 the advantage is the return."""
    turn_ids, mask = layout(*turns)
    rewards, B = torch.as_tensor(rewards, dtype=torch.float32), len(turns)
    infos = [dict(end=end, truncated=end == "context_limit", success=False, hacked=False, turns=len(episode),
                  tool_calls=0, errors=0, tools=[], pair="", env_seconds=0.0)
             for end, episode in zip(ends or ["submitted"] * B, turns)]  # fmt: skip
    batch = script.Batch(
        tokens=torch.ones_like(turn_ids) if tokens is None else tokens,
        lengths=torch.tensor([1 + sum(map(sum, episode)) for episode in turns]),
        loss_mask=mask, logprobs=-1.0 - torch.arange(B)[:, None].expand_as(mask), turn_ids=turn_ids, rewards=rewards,
        terminated=torch.tensor([not info["truncated"] for info in infos]),
        truncated=torch.tensor([info["truncated"] for info in infos]),
        group_ids=torch.as_tensor(groups), infos=infos,
        anchors=anchors or [[object() for _ in episode] for episode in turns],
    )  # fmt: skip
    compute_loss, seen = script.compute_loss, {}

    def spy(*args, **kwargs):
        given = inspect.signature(compute_loss).bind(*args, **kwargs).arguments
        for row, old in enumerate(given["logprobs"][:, 1].tolist()):  # the first sampled token names the episode
            seen[round(-old) - 1] = given["advantages"][row], given["loss_mask"][row]
        return compute_loss(*args, **kwargs)

    num_groups, group_size = size or (1, B)
    flags = dict(
        num_groups=num_groups, group_size=group_size, max_turns=rewards.shape[1], warm_start_steps=0,
        num_minibatches=1, micro_batch_size=B, kl_coef=0.0, baseline="loo", norm="none", gamma=1.0,
        gae_lambda=1.0, norm_adv=False,
    ) | flags  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        on_rollouts(patch, script, lambda *args, **kwargs: batch)
        patch.setattr(script, "compute_loss", spy)
        patch.setattr(script, "describe_start", lambda *args, **kwargs: {})  # it takes most of the time
        patch.setattr(script, "warm_up_critic", warm_up, raising=False)
        script.train(make_args(script, tmp_path / script.__name__, **flags))
    assert sorted(seen) == list(range(B))
    pad = lambda row: torch.nn.functional.pad(row, (0, mask.shape[1] - len(row)))  # noqa: E731 minibatches are cut
    return tuple(torch.stack([pad(seen[b][n]) for b in range(B)]) for n in range(2))


# ---- Numbers of other codebases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("rloo/verl-project/loop", "rloo/rllm"))
def test_leave_one_out_equals_verl_and_rllm(script, name):
    """Catches a mean that includes oneself, n/(n-1) upside down, a baseline across groups, groups found by position.
    Group p2 has one member: both peers return its raw reward, ours 0."""
    inputs, outputs = GOLDEN[name]["inputs"], GOLDEN[name]["outputs"]
    ids, mask = labels(inputs["index"]), double(inputs["mask"])
    turn_ids = torch.zeros_like(mask, dtype=torch.int64)
    ours = advantages(script, double(inputs["scores"])[:, None], ids, turn_ids, mask)
    expected = double(outputs["tokens"]) if "tokens" in outputs else double(outputs["advantage"])[:, None] * mask
    lone = torch.tensor([uid == "p2" for uid in inputs["index"]])
    assert lone.sum() == 1 and (ours[lone] == 0).all()
    assert_close(ours[~lone], expected[~lone], atol=1e-9, rtol=0)


def test_leave_one_out_equals_trl(script):
    """As above, groups of 4 in order. TRL then normalises over the batch, which here is done to ours as well. (Its case
    with unscorable episodes is left out: here an environment that cannot score raises.)"""
    case = GOLDEN["rloo/trl/plain/normalize_True"]
    groups = torch.arange(12) // case["inputs"]["num_generations"]
    ours = advantages(script, double(case["inputs"]["rewards"])[:, None], groups)[:, 0]
    ours = (ours - ours.mean()) / (ours.std() + 1e-4)
    assert_close(ours, double(case["outputs"]["advantage"]), atol=2e-7, rtol=0)


def test_leave_one_out_counts_episodes_not_turns(script):
    """Catches statistics over turns or tokens, in which a long episode counts more and stays in its own baseline: what
    verl-agent does by default; this is its other mode. Episodes of 1 to 5 turns in groups of 2 to 4."""
    case = GOLDEN["rloo/verl_agent_step_rows/per_trajectory"]
    trajectories = case["inputs"]["trajectory"]
    b, turns = labels(trajectories), list(Counter(trajectories).values())
    R = double(case["inputs"]["episode_return"])
    rewards, groups = torch.zeros(len(turns), 5, dtype=torch.float64), torch.zeros(len(turns), dtype=torch.int64)
    rewards[b, 0], groups[b] = R, labels(case["inputs"]["group"])
    turn_ids, mask = layout(*[[(1, 1)] * n for n in turns])
    ours = advantages(script, rewards, groups, turn_ids, mask)
    assert_close(ours[mask > 0], double(case["outputs"]["per_trajectory"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("a_turn_is", ("a token", "a run of tokens"))
@pytest.mark.parametrize("kind", ("terminal", "per_turn"))
def test_reward_to_go_equals_verl(script, kind, a_turn_is):
    """Catches a return that restarts at an observation, an index shifted by a turn, and a reward that its own turn does
    not get. verl counts tokens: without a discount, so does a turn of one token, and a run between observations."""
    case = GOLDEN[f"reinforce_pp/verl-project/{kind}/g1.0"]
    paid, mask = double(case["inputs"]["rewards"]), double(case["inputs"]["mask"])
    begins = mask if a_turn_is == "a token" else mask * (mask.roll(1, 1) == 0)
    begins[:, 0] = mask[:, 0]
    turn_ids = (begins.cumsum(1) - 1).long()
    assert (paid[mask == 0] == 0).all() and paid.any(1).all() and (turn_ids.amax(1) > 0).any()
    rewards = torch.zeros(6, 12, dtype=torch.float64).scatter_add(1, turn_ids.clamp(min=0), paid)
    if script is reinforce:
        ours = advantages(script, rewards, torch.zeros(6), turn_ids, mask, credit="turn", baseline="none")
    else:
        ours = script.returns_to_go(rewards, gamma=1.0).gather(1, turn_ids.clamp(min=0)) * mask
    assert_close(ours, double(case["outputs"]["returns"]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("loss_agg", ("token-mean", "seq-mean-token-mean"))
def test_reinforce_loss_equals_verl(loss_agg):
    """Values and gradients. Catches a wrong sign, a ratio (the old log-probs are garbage here), and advantages or
    weights that are not those of the token."""
    case = GOLDEN[f"reinforce_loss/{loss_agg}"]
    newlogprobs, mask = double(case["inputs"]["log_prob"]).requires_grad_(), double(case["inputs"]["mask"])
    per_row = mask.sum() if loss_agg == "token-mean" else mask.sum(1, keepdim=True) * len(mask)
    garbage, zeros = torch.full_like(mask, -300.0), torch.zeros_like(mask)
    A = double(case["inputs"]["advantages"])
    loss, metrics = reinforce.compute_loss(
        newlogprobs, zeros, garbage, A, mask, mask / per_row, kl_coef=0.0, ent_coef=0.0
    )
    loss.backward()
    assert_close(loss.detach(), double(case["outputs"]["loss"]), atol=1e-8, rtol=0)
    assert_close(metrics["losses/policy_loss"], loss.detach())
    assert_close(newlogprobs.grad, double(case["outputs"]["grad_log_prob"]), atol=1e-9, rtol=0)


def step_rows(name):
    """A case's step rows as episodes: rewards and played (B, K), anchors, group ids; and the (b, k) of each row."""
    inputs = GOLDEN[name]["inputs"]
    b, k = labels(inputs["trajectory"]), torch.tensor(inputs["step"])
    rewards = torch.zeros(int(b.max()) + 1, int(k.max()) + 1, dtype=torch.float64)
    played, groups = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=torch.int64)
    anchors = [[] for _ in rewards]
    rewards[b, k], played[b, k], groups[b] = double(inputs["reward"]), 1, labels(inputs["group"])
    for episode, step, state in zip(b.tolist(), k.tolist(), inputs["anchor"]):
        assert len(anchors[episode]) == step
        anchors[episode].append(state)
    return rewards, played, anchors, groups, (b, k)


@pytest.mark.parametrize(
    "name", (*STEP_CASES, "gigpo/degenerate/singletons", "gigpo/roll/three_groups_disjoint_anchors/g0.95_w1")
)
def test_step_returns_groups_and_advantages_equal_verl_agent_and_roll(name):
    """Catches a discount per token or from the padded end, step groups across tasks or by turn number, revisits left
    out, a biased standard deviation, and turns that were not played counted in. Anchors recur within episodes."""
    case = GOLDEN[name]
    rewards, played, anchors, groups, (b, k) = step_rows(name)
    returns = gigpo.returns_to_go(rewards, gamma=case["inputs"]["gamma"])
    assert_close(returns[b, k], double(case["outputs"]["step_returns"]), atol=2e-6, rtol=0)
    if "step_group" in case["outputs"]:
        ours = {turn: n for n, turns in enumerate(gigpo.step_groups(played, anchors, groups)) for turn in turns}
        assert [ours[turn] for turn in zip(b.tolist(), k.tolist())] == case["outputs"]["step_group"]
    for norm, peer in NORMS:
        step = gigpo.step_advantages(returns, played, anchors, groups, norm=norm)
        assert_close(step[b, k], double(case["outputs"][peer]["step_adv"]), atol=2e-5, rtol=0)
        assert (step[played == 0] == 0).all()


def test_step_groups_never_cross_tasks():
    """Catches a key without the task: ROLL's normalisation merges equal observations of different tasks."""
    case = GOLDEN["gigpo/anchor_hash/same_anchor_two_groups"]
    anchors, groups = [[state] for state in case["inputs"]["anchors"]], labels(case["inputs"]["index"])
    assert gigpo.step_groups(torch.ones(4, 1), anchors, groups) == [[(0, 0), (2, 0)], [(1, 0), (3, 0)]]
    assert case["outputs"]["step_group"] == [0, 1, 0, 1]


@pytest.mark.parametrize("norm, peer", NORMS)
@pytest.mark.parametrize("name", (*STEP_CASES, "gigpo/degenerate/singletons"))
@pytest.mark.parametrize("script", (grpo, gigpo), ids=("grpo", "gigpo"))
def test_episode_advantages_equal_verl_agent(script, name, norm, peer):
    """Catches episode statistics over turns (the peer's default; this is its mode after eq. 3). A lone episode gets its
    raw return there (groups A and B of "singletons"), here 0."""
    rewards, played, _, groups, (b, k) = step_rows(name)
    turn_ids = torch.where(played > 0, torch.arange(played.shape[1]), -1)
    ours = advantages(script, rewards, groups, turn_ids, played, baseline="mean", norm=norm)
    lone = (groups[:, None] == groups).sum(1)[b] == 1
    theirs = double(GOLDEN[name]["outputs"][peer]["episode_adv_per_trajectory"])
    assert_close(ours[b, k][~lone], theirs[~lone], atol=2e-5, rtol=0)
    assert (ours[b, k][lone] == 0).all() and (theirs[lone] != 0).all() and lone.any() == ("singletons" in name)


@pytest.mark.parametrize("norm, peer", NORMS)
@pytest.mark.parametrize("name, size", list(zip(STEP_CASES, ((3, 3), (3, 3), (4, 5)))))
def test_total_advantage_in_training_equals_verl_agent(name, size, norm, peer, tmp_path):
    """Catches, in train() itself: step advantages of another turn, of other discount, norm or sign than the flags say,
    or on observations; step statistics over a minibatch; turns that were not played counted in."""
    rewards, played, anchors, groups, (b, k) = step_rows(name)
    turns = [[(1, 1)] * len(states) for states in anchors]
    gamma = GOLDEN[name]["inputs"]["gamma"]
    ours, mask = in_training(gigpo, tmp_path, rewards=rewards, turns=turns, groups=groups, anchors=anchors, size=size,
                             baseline="mean", norm=norm, step_gamma=gamma)  # fmt: skip
    assert torch.equal(mask, layout(*turns)[1]) and (ours[mask == 0] == 0).all()
    joint = double(GOLDEN[name]["outputs"][peer]["joint_per_trajectory"])
    assert_close(ours[b, 1 + 2 * k].double(), joint, atol=2e-5, rtol=0)  # a prompt token, then two tokens a turn


# ---- Worked examples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observed", (2, 4, 40))
def test_discount_counts_turns_not_tokens(script, observed):
    """#7: a running return multiplied by the mask never reaches what precedes an observation. Two turns of two tokens,
    1 at the end, discount .9: .9 and 1 whatever the observation's length. One turn a token: .729, .81, .9, 1."""
    turn_ids, mask = layout([(2, observed), (2, 0)], [(2, observed), (2, 0)])
    options = dict(credit="turn", gamma=0.9)  # the second episode fails: the first one's baseline is 0
    ours = advantages(script, [[0.0, 1.0], [0.0, 0.0]], [0, 0], turn_ids, mask, **options)
    assert_close(ours[0, mask[0] > 0], torch.tensor([0.9, 0.9, 1.0, 1.0]))
    turn_ids, mask = layout(*[[(1, 0), (1, observed), (1, 0), (1, 0)]] * 2)
    ours = advantages(script, [[0.0, 0, 0, 1], [0.0] * 4], [0, 0], turn_ids, mask, **options)
    assert_close(ours[0, mask[0] > 0], torch.tensor([0.729, 0.81, 0.9, 1.0]))


@pytest.mark.parametrize("credit", CREDITS)
def test_a_last_observation_does_not_swallow_the_reward(script, credit, tmp_path):
    """#10: a reward placed on the last token, then masked. The same actions paid 1, with and without an observation
    after the last: same advantages, in train() too."""
    rewards, groups = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), [0, 0]
    seen = []
    for last in (0, 3):
        turns = [[(2, 2), (2, last)], [(2, 2), (2, 0)]]
        turn_ids, mask = layout(*turns)
        ours = advantages(script, rewards, groups, turn_ids, mask, credit=credit)
        seen.append(ours[mask > 0])
        found, mask = in_training(script, tmp_path / str(last), rewards=rewards, turns=turns, groups=groups,
                                  credit=credit)  # fmt: skip
        assert torch.equal(found[mask > 0], seen[-1])  # no state recurs: GiGPO has no step advantage
    assert torch.equal(*seen) and (seen[0][:4] == 1).all() and (seen[0][4:] == -1).all()


def test_every_trained_token_carries_its_turns_advantage(script, tmp_path):
    """#31: turns but the last got a row that was already masked, all zeros. #32: only the last reward counted. Turns of
    2, 7 and 3 tokens paid .2, .3, .5, against an episode paid nothing, which starts in the same state."""
    turns, anchors = [[(2, 3), (7, 1), (3, 2)]] * 2, [["s", "t", "u"], ["s", "v", "w"]]
    ours, mask = in_training(script, tmp_path, rewards=[[0.2, 0.3, 0.5], [0.0, 0.0, 0.0]], turns=turns, groups=[0, 0],
                             anchors=anchors, credit="turn" if script is reinforce else "episode",
                             step_gamma=1.0)  # fmt: skip
    expected = {
        "reinforce": ((1.0, 0.8, 0.5), (-1.0, -1.0, -1.0)),  # reward-to-go minus the other's return
        "grpo": ((1.0, 1.0, 1.0), (-1.0, -1.0, -1.0)),
        "gigpo": ((1.5, 1.0, 1.0), (-1.5, -1.0, -1.0)),  # +-.5 more in the state that both were in
    }[script.__name__]
    assert (ours != 0).sum() == mask.sum() == 24
    for row, values in enumerate(expected):
        assert_close(ours[row][mask[row] > 0], torch.tensor(values).repeat_interleave(torch.tensor([2, 7, 3])))


def test_rewards_of_all_turns_count(script):
    """#32: per-turn rewards overwritten, only the last one counted."""
    rewards = torch.tensor([[0.2, 0.3, 0.5]])
    assert_close(script.returns_to_go(rewards, gamma=1.0), torch.tensor([[1.0, 0.8, 0.5]]))
    assert_close(script.returns_to_go(rewards, gamma=0.5), torch.tensor([[0.475, 0.55, 0.5]]))
    assert torch.equal(rewards, torch.tensor([[0.2, 0.3, 0.5]]))


GIGPO_STATES = ["ABC", "ABB", "AD", "AEA"]
GIGPO_REWARDS = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
GIGPO_STEP = torch.tensor([[0.10, 1 / 3, 0.0], [-0.15, -1 / 6, -1 / 6], [0.35, 0.0, 0.0], [-0.15, 0.0, -0.15]])
GIGPO_PLAYED = torch.tensor([[1.0, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]])


def gigpo_example(order=(0, 1, 2, 3), *, rename=lambda state: state, norm="none"):
    """Step advantages (B, K) of the example in #33, its episodes in this order."""
    order = list(order)
    returns = gigpo.returns_to_go(GIGPO_REWARDS[order], gamma=0.5)
    anchors = [[rename(state) for state in GIGPO_STATES[b]] for b in order]
    return gigpo.step_advantages(returns, GIGPO_PLAYED[order], anchors, torch.zeros(4), norm=norm)


def test_gigpo_worked_example(tmp_path):
    """#33, and #35: groups are by state, not by turn number: e1's visits to B in turns 1 and 2 are in one group, e3's
    revisit to A counts. Then the totals in train(), with omega 1 and .5: catches an omega that is not used."""
    assert_close(gigpo_example(), GIGPO_STEP)
    groups = gigpo.step_groups(GIGPO_PLAYED, GIGPO_STATES, torch.zeros(4))
    assert groups[:2] == [[(0, 0), (1, 0), (2, 0), (3, 0), (3, 2)], [(0, 1), (1, 1), (1, 2)]]
    assert [len(turns) for turns in groups] == [5, 3, 1, 1, 1]
    turns = [[(2, 1)] * len(states) for states in GIGPO_STATES]
    for omega in (1.0, 0.5):
        ours, mask = in_training(
            gigpo, tmp_path / str(omega), rewards=GIGPO_REWARDS, turns=turns, groups=[0] * 4, baseline="mean",
            anchors=[list(states) for states in GIGPO_STATES], step_gamma=0.5, step_adv_coef=omega,
        )  # fmt: skip
        total = torch.tensor([0.5, -0.5, 0.5, -0.5])[:, None] + omega * GIGPO_STEP
        assert_close(ours[mask > 0], total[GIGPO_PLAYED > 0].repeat_interleave(2))


@pytest.mark.parametrize("norm", ("none", "std"))
def test_gigpo_does_not_depend_on_order_or_kind_of_anchors(norm):
    """#36: keys that fail or collide on None, tuples, sets and numbers, or follow an object's identity. Also catches a
    dependence on the order of the episodes."""
    expected = gigpo_example(norm=norm)
    for order in itertools.permutations(range(4)):
        assert_close(gigpo_example(order, norm=norm), expected[list(order)])
    for kinds in ({"A": None, "B": (), "C": frozenset({1, 2}), "D": ("text", ("a", 1)), "E": ("text", ("a", 2))},
                  {"A": "1", "B": 1, "C": "", "D": (1,), "E": ("1",)},
                  {"A": (0, 7), "B": (7, 0), "C": (0, 0), "D": (7, 7), "E": (1, 7)}):  # fmt: skip
        copy = lambda state: eval(repr(kinds[state]))  # equal, but not the same object  # noqa: E731, B023
        assert torch.equal(gigpo_example(rename=copy, norm=norm), expected)


def test_gigpo_by_std_worked_example():
    """Catches the biased standard deviation, and one over all turns. A pair of returns 0 and 1: +-.7071; the third turn
    is alone in its state."""
    step = gigpo.step_advantages(torch.tensor([[1.0], [0.0], [5.0]]), torch.ones(3, 1), ["A", "A", "B"], torch.zeros(3),
                                 norm="std")  # fmt: skip
    assert_close(step[:, 0], torch.tensor([0.5**0.5, -(0.5**0.5), 0.0]), atol=2e-6, rtol=0)


def test_baselines_by_hand():
    """Catches a baseline of another scope. Returns 1, 0, 0 and 3, 1 in two groups: the batch's mean is 1, those of the
    groups are 1/3 and 2; and a lone episode of 4 in a batch of two."""
    rewards, groups = [[1.0], [0.0], [0.0], [3.0], [1.0]], [8, 8, 8, 2, 2]
    for baseline, expected in (
        ("none", [1.0, 0.0, 0.0, 3.0, 1.0]),
        ("batch", [0.0, -1.0, -1.0, 2.0, 0.0]),
        ("mean", [2 / 3, -1 / 3, -1 / 3, 1.0, -1.0]),
        ("loo", [1.0, -0.5, -0.5, 2.0, -2.0]),
    ):
        assert_close(advantages(reinforce, rewards, groups, baseline=baseline)[:, 0], torch.tensor(expected))
    for baseline, expected in (("none", [4.0, 0.0]), ("batch", [2.0, -2.0]), ("mean", [0.0, 0.0]), ("loo", [0.0, 0.0])):
        assert advantages(reinforce, [[4.0], [0.0]], [0, 1], baseline=baseline)[:, 0].tolist() == expected


# ---- No signal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", CREDITS)
def test_groups_without_signal_give_exactly_zero(script, credit):
    """#28, #34: a lone episode must not get its raw reward; seven float32 rewards of .7 differ from their mean by
    rounding. These are paid in the last turn, so that every turn's reward-to-go is the return."""
    equal = torch.tensor([[0.0, 0.7]] * 7)
    zero = lambda rewards, groups, **options: (  # noqa: E731
        advantages(script, rewards, groups, credit=credit, **options) == 0
    ).all()
    for baseline in ("batch", "mean", "loo") if script is reinforce else ("mean", "loo"):
        for norm in ("none",) if script is reinforce else ("none", "std"):
            options = dict(baseline=baseline, norm=norm)
            assert zero(equal, [3] * 7, **options)
            assert zero([[0.5, 0.7]], [3], **options)
            if baseline != "batch":
                assert zero([[0.5, 0.7], [-1.0, 1.0], [2.0, -3.0]], [0, 1, 2], **options)
                mixed = torch.cat([equal, torch.tensor([[0.0, 1.0], [0.0, 0.0]])])
                ours = advantages(script, mixed, [0] * 7 + [1, 1], credit=credit, **options)
                assert (ours[:7] == 0).all() and (ours[7:] != 0).all()
    if script is reinforce:
        assert zero(torch.zeros(4, 2), [0] * 4, baseline="none")


@pytest.mark.parametrize("norm", ("none", "std"))
def test_step_groups_without_signal_give_exactly_zero(norm):
    """#34, #28: as above, in one state. Catches NaN, the standard deviation of one number, and equal returns whose
    rounding is divided by 1e-6."""
    step = lambda returns, anchors: gigpo.step_advantages(  # noqa: E731
        returns, torch.ones_like(returns), anchors, torch.zeros(len(returns)), norm=norm
    )
    equal = torch.full((7, 2), 0.7)
    assert (step(equal, [["s", "s"]] * 7) == 0).all()
    rounded = equal.clone()
    rounded[::2] = torch.nextafter(rounded[::2], torch.tensor(1.0))
    assert (rounded != equal).any() and (step(rounded, [["s", "s"]] * 7) == 0).all()
    assert (step(torch.arange(8.0).view(4, 2), [list(pair) for pair in ("ab", "cd", "ef", "gh")]) == 0).all()
    lone = gigpo.step_advantages(torch.ones(2, 1), torch.ones(2, 1), ["s", "s"], torch.tensor([0, 1]), norm=norm)
    assert (lone == 0).all()
    nothing = gigpo.step_advantages(torch.ones(2, 3), torch.zeros(2, 3), [[], []], torch.zeros(2), norm=norm)
    assert (nothing == 0).all() and gigpo.step_groups(torch.zeros(2, 3), [[], []], torch.zeros(2)) == []


def test_masked_batch_and_rows(script):
    """#29: a batch without any trained token is 0/0 = NaN. A masked row votes in the baseline and has no gradient."""
    tokens, mask, _, old, logits, _ = random_batch()
    turn_ids, rewards = torch.zeros_like(tokens), torch.arange(8, dtype=torch.float64)[:, None]
    for m in (torch.zeros_like(mask), mask):
        A = advantages(script, rewards, [0, 0, 0, 0, 1, 1, 1, 1], turn_ids, m, baseline="mean")
        newlogprobs, entropy, _ = script.score(FixedLogits(logits), tokens, m, 1.0)
        loss = loss_of(script, newlogprobs, entropy, newlogprobs.detach(), A, m, m / m.sum().clamp(min=1))
        gradient = torch.autograd.grad(loss, logits)[0]
        assert A.isfinite().all() and gradient.isfinite().all()
        assert (A[m == 0] == 0).all() and (gradient[m.sum(1) == 0] == 0).all()
        assert (gradient[m.sum(1) > 0].abs().amax((1, 2)) > 0).all()
        assert m.any() or loss == 0
    assert (mask[2] == 0).all() and A[0, mask[0] > 0].unique().tolist() == [-1.5]  # 0 against a mean of 0, 1, 2, 3


def test_filtered_episodes_vote_but_are_not_trained(script, tmp_path):
    """#47: one mask zeroed and not the other, in train(). Of 1, 0, 0 and a 0 that ran out of turns, the failures get
    -1/3 (without its vote -1/2). GiGPO: all begin in one state, so that the mean of 1/4 comes off again."""
    ours, mask = in_training(
        script, tmp_path, rewards=[[1.0], [0.0], [0.0], [0.0]], turns=[[(2, 1)]] * 4, groups=[0] * 4,
        anchors=[["s"]] * 4, filter_truncated=True, ends=["submitted"] * 3 + ["turn_limit"],
    )  # fmt: skip
    expected = torch.tensor([1.0, -1 / 3, -1 / 3, 0.0])
    if script is gigpo:
        expected += torch.tensor([0.75, -0.25, -0.25, 0.0])
    assert mask[:3].sum(1).tolist() == [2, 2, 2] and not mask[3].any()
    assert_close(ours, mask * expected[:, None])


# ---- Observations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", (True, False), ids=("mask-observations", "no-mask-observations"))
def test_observations_have_a_gradient_only_without_the_mask(any_script, masked, tmp_path):
    """Catches a mask that is not applied, applied when it should not be, or shifted by one. Rows of logits whose next
    token is an observation get exactly zero gradient with the mask, and some without; prompt and padding never do."""
    turns, rewards = [[(2, 3), (1, 1)], [(3, 2)]], [[0.5, 0.5], [-1.0, 0.0]]
    A, mask = in_training(any_script, tmp_path, rewards=rewards, turns=turns, groups=[0, 0], mask_observations=masked)
    turn_ids, sampled = layout(*turns)
    assert torch.equal(mask, sampled if masked else (turn_ids >= 0).float())
    tokens = torch.randint(6, mask.shape, generator=torch.Generator().manual_seed(0))
    logits = torch.randn(*mask.shape, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    newlogprobs, entropy, _ = any_script.score(FixedLogits(logits), tokens, mask, 1.0)
    loss = loss_of(any_script, newlogprobs, entropy, newlogprobs.detach(), A, mask, mask / mask.sum())
    gradient = torch.autograd.grad(loss, logits)[0][:, :-1].abs().amax(2)  # row t scores token t + 1
    observed = ((turn_ids >= 0) & (sampled == 0))[:, 1:]
    assert observed.sum() == 6 and ((gradient[observed] == 0) if masked else (gradient[observed] > 0)).all()
    assert (gradient[sampled[:, 1:] > 0] > 0).all() and (gradient[turn_ids[:, 1:] < 0] == 0).all()


# ---- The gradient against the exact gradient of the expected return ----------------------------------------------


def expected_update(policy, toy, groups, **options):
    """Exact expectation of minus the gradient of REINFORCE's loss, over all batches of episodes in these groups."""
    tokens, mask, turn_ids, rewards, chances = toy
    with torch.no_grad():
        probabilities = chances * reinforce.score(policy, tokens, mask, 1.0)[0].sum(1).exp()  # of each episode
    batches = torch.cartesian_prod(*[torch.arange(len(tokens))] * len(groups))
    A = torch.cat([advantages(reinforce, rewards[rows], groups, turn_ids[rows], mask[rows], **options)
                   for rows in batches])  # fmt: skip
    rows, chance_of_batch = batches.flatten(), probabilities[batches].prod(1).repeat_interleave(len(groups))
    assert chance_of_batch.sum().item() == pytest.approx(len(groups), abs=1e-12)
    weights = mask[rows] / len(groups) * chance_of_batch[:, None]
    newlogprobs, entropy, _ = reinforce.score(policy, tokens[rows], mask[rows], 1.0)
    loss = loss_of(reinforce, newlogprobs, entropy, newlogprobs.detach(), A, mask[rows], weights)
    return [-gradient for gradient in torch.autograd.grad(loss, policy.params)]


@pytest.mark.parametrize("V, groups", ((3, (0, 0)), (2, (0, 1, 0, 1)), (2, (5, 5, 5))), ids=("2", "2+2", "3"))
@pytest.mark.parametrize("credit, baseline", list(itertools.product(CREDITS, BASELINES)))
def test_reinforce_is_the_exact_policy_gradient(credit, baseline, V, groups):
    """Catches any bias of the baseline, the credit, the mask, the shift or the sign. In exact expectation the update is
    the gradient of the expected return without a baseline and with loo; a mean over n episodes that includes oneself
    scales it by (n - 1)/n, n being the size of the group (mean) or of the batch (batch)."""
    policy, toy = TablePolicy(V), enumerate_toy(V)
    n = {"mean": groups.count(groups[0]), "batch": len(groups)}.get(baseline)
    scale = (n - 1) / n if n else 1
    update = expected_update(policy, toy, groups, credit=credit, baseline=baseline)
    for ours, exact in zip(update, exact_gradient(policy, toy)):
        assert_close(ours, scale * exact, atol=1e-12, rtol=0)
    assert exact.norm() > 0.01  # of the shared vector


# ---- The scripts against each other ------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline, credit", list(itertools.product(("mean", "loo"), CREDITS)))
def test_reinforce_has_the_gradient_of_grpo_at_ratio_one(baseline, credit):
    """Catches a sign, a scale, a mask or a baseline that differs between the two."""
    tokens, mask, _, _, logits, _ = random_batch()
    turn_ids, rewards = torch.arange(12).expand(8, 12) // 4, torch.randn(8, 3, dtype=torch.float64)
    gradients = []
    for script in (reinforce, grpo):
        A = advantages(script, rewards, [0, 1] * 4, turn_ids, mask, baseline=baseline, credit=credit, gamma=0.9)
        newlogprobs, entropy, _ = script.score(FixedLogits(logits), tokens, mask, 1.0)
        loss = loss_of(script, newlogprobs, entropy, newlogprobs.detach(), A, mask, mask / (8 * 20))
        gradients.append(torch.autograd.grad(loss, logits)[0])
    assert gradients[0].norm() > 0.01
    assert_close(*gradients, atol=1e-14, rtol=1e-12)


def test_reinforce_trains_as_grpo_with_one_step_does(tmp_path, monkeypatch):
    """As above in train(): one step of a whole batch, constant weights, no KL, no norm. Catches other weights, and
    episodes or tokens that one of them leaves out."""
    gradients, clip = {}, torch.nn.utils.clip_grad_norm_

    def spy(parameters, *args):
        parameters = list(parameters)
        if sys._getframe(1).f_code.co_name == "train":
            gradients[script].append([p.grad.clone() for p in parameters])
        return clip(parameters, *args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
    flags = dict(credit="episode", baseline="loo", norm="none", loss_agg="constant", kl_coef=0.0, num_minibatches=1)
    for script in (reinforce, grpo):
        gradients[script] = []
        script.train(make_args(script, tmp_path / script.__name__, process_reward=0.1, **flags))
    (ours,), (theirs,) = gradients.values()
    assert sum(g.abs().sum() for g in ours) > 1e-3
    for a, b in zip(ours, theirs):
        assert_close(a, b, atol=1e-7, rtol=1e-4)


def test_gigpo_without_shared_states_is_grpo(tmp_path, monkeypatch, capsys):
    """Whole runs of two iterations, bit for bit: catches anything but the step advantages in which the two scripts
    differ. Such a run warns, and logs why."""
    flags = dict(num_iterations=2, process_reward=0.1, norm="std")
    grpo.train(make_args(grpo, tmp_path / "grpo", **flags))
    assert "alone in its state" not in capsys.readouterr().out
    on_rollouts(monkeypatch, gigpo, unique_anchors)
    gigpo.train(make_args(gigpo, tmp_path / "gigpo", **flags))
    assert capsys.readouterr().out.count("warning: nearly every turn is alone in its state") == 2
    (theirs, their_state), (ours, our_state) = results(tmp_path / "grpo"), results(tmp_path / "gigpo")
    for a, b in zip(ours[1:], theirs[1:]):
        own = {"charts/step_group_size": 1.0, "charts/frac_singleton_step_groups": 1.0}
        drop = [key for key in a if key.startswith("time/") or key.endswith("SPS")]
        a, b = ({key: value for key, value in line.items() if key not in drop} for line in (a, b))
        assert a == b | own and b["losses/grad_norm"] > 0
    assert all(torch.equal(value, our_state["model"][name]) for name, value in their_state["model"].items())


def test_gigpo_logs_its_step_groups(tmp_path, monkeypatch, capsys):
    """#34: how many turns are alone in their state is not logged. Counted here from the batch."""
    batches = []

    def keep(rollout, *args, **kwargs):
        batches.append(rollout(*args, **kwargs))
        return batches[-1]

    on_rollouts(monkeypatch, gigpo, keep)
    gigpo.train(make_args(gigpo, tmp_path))
    (batch,), (_, line) = batches, results(tmp_path)[0]
    groups = batch.group_ids.tolist()
    sizes = Counter((g, state) for g, states in zip(groups, batch.anchors) for state in states).values()
    assert sum(sizes) == sum(map(len, batch.anchors)) == line["global_step"] and max(sizes) > 1
    assert line["charts/step_group_size"] == pytest.approx(sum(sizes) / len(sizes))
    assert line["charts/frac_singleton_step_groups"] == pytest.approx(list(sizes).count(1) / len(sizes))
    assert "alone in its state" not in capsys.readouterr().out


def test_scripts_begin_alike(tmp_path, monkeypatch):
    """Catches a network, a draw or a shuffle in one script that moves another's random numbers: for one seed all begin
    the first iteration with equal weights, tasks and noise, and sample the same tokens."""
    names = [name for name in ("reinforce", "ppo", "grpo", "gigpo") if (ROOT / f"{name}.py").exists()]
    seen = {}
    for name in names:

        def keep(rollout, model, tokenizer, envs, tasks, group_ids, uniforms, **kwargs):
            state = {key: value.clone() for key, value in model.state_dict().items()}
            batch = rollout(model, tokenizer, envs, tasks, group_ids, uniforms, **kwargs)
            seen[name] = state, tasks, uniforms, batch.tokens, batch.logprobs, batch.rewards  # noqa: B023
            return batch

        module = importlib.import_module(name)
        on_rollouts(monkeypatch, module, keep)
        module.train(make_args(module, tmp_path / name))
    state, tasks, *tensors = seen["reinforce"]
    assert len(seen) == len(names) and len(set(tasks)) > 1
    for other_state, other_tasks, *others in seen.values():
        assert all(torch.equal(value, other_state[key]) for key, value in state.items())
        assert other_tasks == tasks and all(map(torch.equal, others, tensors))
