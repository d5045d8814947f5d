"""What no formula says, in the four scripts: the explorer, minibatches, schedules, gradients, what
is logged. Each test names the bug it would catch and was seen to fail with it; #n is a public
report."""

import itertools
import re
from copy import deepcopy
from types import SimpleNamespace

import helpers as h
import numpy as np
import pytest
import torch
from torch.testing import assert_close

import grpo
from grpo import BugFixEnv, applicable

AdamW, WORDS = torch.optim.AdamW, h.WORDS


def watch(monkeypatch, owner, name, look):
    """Lets look(*args, **kwargs) see each call of owner.name before it is made."""
    inner = getattr(owner, name)

    def spy(*args, **kwargs):
        look(*args, **kwargs)
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, spy)


# ---- Warm start


def test_explorer_before_read_does_not_know_the_source():
    """Catches a demonstrator that peeks: what it does must not depend on what it has not read."""
    env, tasks = BugFixEnv(), h.tasks_of(BugFixEnv, "train", 20)
    for seed in range(100):
        actions = {(env.reset(task), env.explore(np.random.default_rng(seed)))[1] for task in tasks}
        assert len(actions) == 1, actions


def test_explorer_goes_on_after_an_undo():
    """Catches an explorer that tests and undoes the same edit for ever."""
    tasks = h.tasks_of(BugFixEnv, "train", 99)
    task = next(task for task in tasks if len(applicable(task.source)) > 3)
    wrong, *_ = (op for op in applicable(task.source) if op not in task.pair)
    others = [f"<call> edit {op} </call>" for op in applicable(task.source) if op != wrong]
    env, goes_on = BugFixEnv(max_turns=9), 0
    for seed in range(300):
        env.reset(task)
        for call in ("read", f"edit {wrong}", "test", f"edit {wrong}"):
            env.step(f"<call> {call} </call>")
        assert env.source == task.source
        goes_on += env.explore(np.random.default_rng(seed)) in others
    assert goes_on > 0.8 * 300


def explorer(step):
    """A batch of the explorer's episodes: tokens and kinds."""
    make_env = h.env_maker(max_turns=6)
    return grpo.explorer_episodes(WORDS, *make_env, seed=1, step=step, num_episodes=16)


def test_each_warm_start_step_has_its_own_episodes():
    """Catches an explorer whose noise leaves the step out: the imitation would see one batch."""
    a, b, again = (explorer(step)[0] for step in (0, 1, 0))
    assert torch.equal(a, again)
    a, b = ({tuple(row[row > 0].tolist()) for row in x} for x in (a, b))
    assert len(a) == len(b) == 16 and not a & b


def test_explorer_kinds_name_the_tool():
    """Catches warm_start/loss_read that is the loss on another tool's replies."""
    found = set()
    for rows in zip(*map(torch.Tensor.tolist, explorer(0)), strict=True):
        parts = itertools.groupby(zip(*rows, strict=True), key=lambda pair: pair[1])
        parts = [(kind, WORDS.decode(token for token, _ in part)) for kind, part in parts]
        for (own, call), (reply, answer) in zip(parts[1::2], parts[2::2], strict=False):
            tool = re.match(r"<call> (\w+)", call)[1]
            assert own == 1 and reply == 2 + BugFixEnv.tools.index(tool)
            assert answer.startswith("<result>") and parts[0][0] == 0
            found.add(tool)
    assert found == set(BugFixEnv.tools)


def test_learning_rates_of_the_warm_start(monkeypatch):
    """Catches a schedule shifted by a step: the first must learn already, the last a little."""
    seen = []
    watch(monkeypatch, AdamW, "step", lambda self, *_: seen.append(self.param_groups[0]["lr"]))
    model = grpo.TinyAgent(len(WORDS.words), **h.SIZE)
    flags = dict(warm_start_steps=200, warm_start_batch_size=1, warm_start_learning_rate=0.01)
    grpo.warm_start(model, WORDS, *h.env_maker(max_turns=6), grpo.Args(**flags))
    assert [seen[i] for i in (0, 49, 100, -1)] == pytest.approx([0.0002, 0.01, 0.01, 0.0001])


# ---- One run of each script, looked at from all sides

FLAGS = dict(num_groups=8, micro_batch_size=32, learning_rate=1e-2, max_grad_norm=1e-3)
FLAGS |= dict(num_minibatches=4, update_epochs=2, critic_warmup_steps=0, vf_coef=5.0)
FLAGS |= dict(save_every=1, tool_cost=0.0)
RECORDS = {}


@pytest.fixture
def record(script, start, tmp_path_factory):
    """A run of two iterations: its rollouts (envs, tasks, uniforms), after one of another seed;
    what compute_loss is given and returns; norms of the gradient that each step takes; iterations
    that are logged at each checkpoint; what the run leaves."""
    if script in RECORDS:
        return RECORDS[script]
    seen = SimpleNamespace(rollouts=[], norms=[], saves=[])

    def roll(rollout, model, tokenizer, envs, tasks, group_ids, uniforms, **options):
        seen.rollouts.append((envs, tasks, uniforms))
        batch = rollout(model, tokenizer, envs, tasks, group_ids, uniforms, **options)
        batch.logprobs[:, 0] = torch.arange(32.0)  # the prompt's first token names the episode
        return batch

    def step(self, *_):
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        seen.norms.append(torch.stack(grads).norm().item())

    def save(run, iteration, modules):
        seen.saves.append((iteration, [line["iteration"] for line in h.read_metrics(run.dir)]))

    with pytest.MonkeyPatch.context() as patch:
        h.on_rollouts(patch, script, roll)
        flags = dict(init_from=start) | h.known(script, **FLAGS)
        h.run(script, tmp_path_factory.mktemp("other"), **flags, seed=2, num_iterations=1)
        seen.losses = h.spied(patch, script, "compute_loss")
        watch(patch, AdamW, "step", step)
        watch(patch, script.Run, "save", save)
        seen.metrics, seen.state = h.run(script, tmp_path_factory.mktemp("record"), **flags)
    return RECORDS.setdefault(script, seen)


def test_minibatches_are_shuffled_anew(script, record):
    """Catches minibatches in the order of the batch, of whole groups, and one order for all epochs
    and iterations."""
    orders = [sorted(given["logprobs"][:, 0].int().tolist()) for given, _ in record.losses]
    n = 1 if script.__name__ == "reinforce" else 4
    passes = [orders[k : k + n] for k in range(0, len(orders), n)]
    assert all(sorted(itertools.chain(*order)) == list(range(32)) for order in passes)
    if n == 4:
        assert len({str(order) for order in passes}) == len(passes) == 4
        assert all(len({row // 4 for row in order}) > 2 for order in orders)


def test_logged_losses_are_means_over_the_minibatches(record):
    """Catches metrics of the last minibatch only."""
    first = record.losses[: len(record.losses) // 2]
    for key in first[0][1][1]:
        per = [1 if key == "losses/policy_loss" else given["loss_mask"].sum() for given, _ in first]
        each = [float(metrics[key] / n) for (_, (_, metrics)), n in zip(first, per, strict=True)]
        mean = sum(each) / len(each)
        assert record.metrics[1][key] == pytest.approx(mean, rel=1e-4, abs=1e-8), key
        assert key != "losses/entropy" or len(set(each)) == len(each)


def test_all_gradients_are_clipped_together(record):
    """Catches a critic's gradient that is left out of the clip."""
    assert len(record.norms) >= 2 and max(record.norms) < 1.001e-3


def test_weights_without_a_gradient_stay(record, start):
    """Catches AdamW's default weight decay: nothing reads the embedding of <pad>."""
    before = torch.load(start, weights_only=True)["model"]["embed.weight"]
    moved = (record.state["model"]["embed.weight"] != before).any(1)
    assert not moved[0] and moved[1:].any()


def test_a_tool_cost_of_zero_is_zero(record):
    """Catches `--tool-cost 0` taken for not given."""
    assert {env.tool_cost for envs, _, _ in record.rollouts for env in envs} == {0.0}


def test_a_saved_iteration_is_logged(record):
    """Catches a checkpoint written before its line: a kill in between costs the line for good."""
    assert record.saves == [(n, list(range(n + 1))) for n in range(3)]


def test_seed_and_iteration_decide_tasks_and_noise(record):
    """#74: catches tasks or noise that are the same for every seed, or in every iteration."""
    assert len(record.rollouts) == 3
    for (_, tasks, noise), (_, others, other) in itertools.combinations(record.rollouts, 2):
        assert tasks != others and (noise == other).float().mean() < 0.01


# ---- Gradients, advantages, processes


def test_gradients_do_not_pile_up(script, start, tmp_path, monkeypatch):
    """Catches a forgotten zero_grad: the same batch has the same gradient again."""
    batches, grads = [], []

    def again(rollout, *args, **kwargs):
        batches.append(batches[0] if batches else rollout(*args, **kwargs))
        return batches[0]

    def look(parameters, *_):
        grads.append(torch.cat([p.grad.flatten() for p in parameters]))

    h.on_rollouts(monkeypatch, script, again)
    watch(monkeypatch, torch.nn.utils, "clip_grad_norm_", look)
    flags = dict(learning_rate=1e-12, kl_coef=0.0, num_minibatches=1, critic_warmup_steps=0)
    h.run(script, tmp_path, init_from=start, num_groups=8, **h.known(script, **flags))
    assert len(grads) == 2 and grads[0].norm() > 1e-4
    assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("script", ["reinforce", "grpo", "gigpo"], indirect=True)
def test_constant_groups_still_pay_the_kl(script, start, tmp_path, monkeypatch):
    """Catches a KL penalty that is dropped where the rewards teach nothing."""
    states = []

    def before(n, model, envs):
        states.append(deepcopy(model.state_dict()))
        for env in envs if n > 1 else []:
            h.with_reward(env, lambda terminated: 0.0)

    h.on_training_rollouts(monkeypatch, script, before=before)
    flags = dict(init_from=start, num_groups=8, kl_coef=1.0, learning_rate=1e-2)
    lines, state = h.run(script, tmp_path, num_iterations=3, **flags)
    assert not h.same(states[1], states[2]) and lines[2]["losses/grad_norm"] > 0


def test_constant_groups_are_counted_by_group(script, tmp_path):
    """Catches charts/frac_zero_std_groups over the wrong axis, or over rows that are no group:
    returns are equal in each group of 4 to 15 and different in groups 0 to 3."""
    rewards = [[float(n if g < 4 else g % 3)] for g in range(16) for n in range(2)]
    groups, size = torch.arange(16).repeat_interleave(2), dict(num_groups=16, group_size=2)
    h.in_training(script, tmp_path, rewards, [[(1, 0)]] * 32, groups=groups, **size)
    (_, line), _ = h.results(tmp_path / script.__name__)
    assert line["charts/frac_zero_std_groups"] == 0.75


def test_logged_advantages_are_those_of_trained_tokens(script, tmp_path):
    """#26: catches means over padding and observations."""
    rewards = [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    turns = [[(2, 1), (3, 2)], [(1, 4)], [(4, 1)], [(1, 1)]]
    A, mask = h.in_training(script, tmp_path, rewards, turns)
    trained, ((_, line), _) = A[mask > 0], h.results(tmp_path / script.__name__)
    assert line["losses/advantage_mean"] == pytest.approx(trained.mean().item(), abs=1e-6)
    assert line["losses/advantage_std"] == pytest.approx(trained.std(correction=0).item(), abs=1e-6)


def test_gather_keeps_groups_and_pads_as_the_rollout_does(script, monkeypatch):
    """Catches group ids by position after gathering, and padding of a process with shorter episodes
    that --no-mask-observations would train on."""

    def part(T, group_ids):
        rows = torch.ones(2, T, dtype=torch.int64), torch.tensor([T, T]), torch.ones(2, T)
        ends = torch.tensor([True, False])
        fields = (*rows, rows[2], rows[0], torch.ones(2, 3), ends, ~ends, torch.tensor(group_ids))
        return script.Batch(*fields, anchors=[[], []], infos=[{}, {}])

    def all_gather(out, mine):
        out[:] = [list(part(4, [5, 2])), list(part(7, [9, 2]))]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)
    batch = script.gather(part(4, [5, 2]), "cpu")
    assert batch.group_ids.tolist() == [5, 2, 9, 2] and batch.lengths.tolist() == [4, 4, 7, 7]
    assert batch.turn_ids.shape == (4, 7) and (batch.turn_ids[:2, 4:] == -1).all()
    assert not batch.loss_mask[:2, 4:].any() and len(batch.infos) == 4
