"""What no formula says, in the four scripts: the explorer, tasks and seeds, minibatches, schedules, gradients, what is
logged, evaluation. Each test names the bug it would catch and was seen to fail with it; #n is a public report."""

# ruff: noqa: F401, F811 (fixtures: imported, and named again as arguments)

import inspect
import itertools
import json
import re
import sys
import time
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import bugfix_env as gym  # noqa: E402
import gigpo  # noqa: E402
import grpo  # noqa: E402
import ppo  # noqa: E402
import reinforce  # noqa: E402
import test_rollout as tr  # noqa: E402
from bugfix_env import TASK_0, BugFixEnv, bugfix_task  # noqa: E402
from test_algorithms import any_script, in_training, on_rollouts, results  # noqa: E402
from test_grpo import FixedLogits, random_batch  # noqa: E402
from test_run import SIZE, minibatches, on_training_rollouts, run, same, start, with_reward  # noqa: E402

# ---- Environment and warm start


def test_explorer_before_read_does_not_know_the_source():
    """Catches a demonstrator that peeks: until it has read, what it does must not depend on the source."""
    tasks = [bugfix_task("train", i) for i in range(20)]
    for seed in range(100):
        actions = set()
        for task in tasks:
            env = BugFixEnv()
            env.reset(task)
            actions.add(env.explore(np.random.default_rng(seed)))
        assert len(actions) == 1, actions


def test_explorer_goes_on_after_an_undo():
    """Catches an explorer that tests and undoes the same edit for ever: after the undo it tries another one."""
    task = next(
        t for i in range(99) if len(gym.applicable((t := bugfix_task("train", i)).source)) > 3
    )
    env, actions = BugFixEnv(max_turns=9), []
    for seed in range(300):
        env.reset(task)
        wrong = next(op for op in gym.applicable(task.source) if op not in task.pair)
        for call in ("read", f"edit {wrong}", "test", f"edit {wrong}"):
            env.step(f"<call> {call} </call>")
        assert env.source == task.source
        actions.append(env.explore(np.random.default_rng(seed)))
    others = [f"<call> edit {op} </call>" for op in gym.applicable(task.source) if op != wrong]
    assert sum(action in others for action in actions) > 0.8 * 300


def test_tasks_of_one_index_differ_between_splits():
    """Catches a split left out of the task's seed: index i would be one function, bug and wording in every split."""
    for a, b in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert sum(bugfix_task(a, i).fix == bugfix_task(b, i).fix for i in range(60)) < 10


def test_each_warm_start_step_has_its_own_episodes():
    """Catches an explorer whose noise leaves the step out: the imitation would see one batch, over and over."""
    options = dict(max_turns=6, num_bugs=1)
    a, b, again = (
        grpo.explorer_episodes(tr.WORDS, BugFixEnv, options, seed=1, step=step, num_episodes=8)[0]
        for step in (0, 1, 0)
    )
    assert torch.equal(a, again)
    rows = [{tuple(row[row > 0].tolist()) for row in x} for x in (a, b)]
    assert len(rows[0]) == len(rows[1]) == 8 and not rows[0] & rows[1]


def test_learning_rates_of_the_warm_start(monkeypatch):
    """Catches a schedule shifted by a step: step 1 must learn already, and the last one at a small rate."""
    seen, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self, *a, **k: (seen.append(self.param_groups[0]["lr"]), step(self, *a, **k))[1],
    )
    model = grpo.TinyAgent(len(tr.WORDS.words), **SIZE)
    grpo.warm_start(
        model,
        tr.WORDS,
        BugFixEnv,
        dict(max_turns=6, num_bugs=1),
        seed=1,
        steps=200,
        batch_size=1,
        learning_rate=0.01,
        observations=True,
        device="cpu",
    )
    assert (
        seen[0] == pytest.approx(0.01 / 50)
        and seen[49] == seen[100] == pytest.approx(0.01)
        and seen[-1] == pytest.approx(0.01 * 2 / 200)
    )


def test_explorer_kinds_name_the_tool():
    """Catches warm_start/loss_read that is the loss on another tool's replies."""
    tokens, kinds = grpo.explorer_episodes(
        tr.WORDS, BugFixEnv, dict(max_turns=6, num_bugs=1), seed=1, step=0, num_episodes=16
    )
    found = set()
    for ids, kind in zip(tokens.tolist(), kinds.tolist()):
        runs = [
            (k, [i for i, _ in g]) for k, g in itertools.groupby(zip(ids, kind), key=lambda p: p[1])
        ]
        assert runs[0][0] == 0
        for (k, call), (k2, answer) in zip(runs[1::2], runs[2::2]):
            tool = re.match(r"<call> (\w+)", tr.WORDS.decode(call))[1]
            assert (
                k == 1
                and k2 == 2 + BugFixEnv.tools.index(tool)
                and tr.WORDS.decode(answer).startswith("<result>")
            )
            found.add(tool)
    assert found == set(BugFixEnv.tools)


# ---- rollout


def test_more_rows_than_one_part_of_the_prefill():
    """Catches rows beyond the first 64 that read the lengths or places of the first: theirs must be score's too."""
    model, B = tr.random_model(), 150
    tasks = [bugfix_task("train", i) for i in range(B)]
    batch = tr.rollout(model, tasks, grpo.draw_uniforms(2, 1, B, 24), max_turns=4)
    assert len(set(batch.lengths.tolist())) > 10
    with torch.no_grad():
        logprobs = grpo.score(model, batch.tokens, batch.loss_mask, 1.0)[0]
    assert (logprobs - batch.logprobs).abs().max() < 1e-4


def test_a_tool_call_that_errs_is_none(monkeypatch):
    """Catches charts/tool_calls that counts `read twice`, which did nothing."""
    batch, _ = tr.play_script(
        monkeypatch,
        [["<call> read read </call>", tr.READ, "<call> test test </call>", tr.SUBMIT]],
        [TASK_0],
    )
    assert (batch.infos[0]["tool_calls"], batch.infos[0]["errors"], batch.infos[0]["turns"]) == (
        1,
        2,
        4,
    )


def test_env_seconds_are_those_of_all_turns(monkeypatch):
    class Slow(tr.SpyEnv):
        def step(self, action):
            time.sleep(0.01)
            return super().step(action)

    batch, _ = tr.play_script(monkeypatch, [[tr.READ] * 4 + [tr.SUBMIT]], [TASK_0], env_class=Slow)
    assert batch.infos[0]["env_seconds"] > 0.05


# ---- losses of all scripts against grpo's, which is held to other codebases


def loss_of(s, logits, ref_logits, *, clip_high, kl, ent):
    tokens, mask, A, old, _, _ = random_batch()
    new, entropy, _ = s.score(FixedLogits(logits), tokens, mask, 1.0)
    old = new.detach() if s is reinforce else old
    ref = s.score(FixedLogits(ref_logits), tokens, mask, 1.0)[0]
    w, z = mask / mask.sum(), torch.zeros_like(mask)
    if s is ppo:
        loss, m = s.compute_loss(
            new,
            z,
            entropy,
            old,
            z,
            A,
            z,
            mask,
            w,
            ref,
            clip_coef=0.2,
            clip_vloss=False,
            vf_coef=0.0,
            kl_coef=kl,
            ent_coef=ent,
        )
    else:
        loss, m = s.compute_loss(
            new,
            entropy,
            old,
            A,
            mask,
            w,
            ref,
            kl_coef=kl,
            ent_coef=ent,
            **({} if s is reinforce else dict(clip_coef=0.2, clip_coef_high=clip_high)),
        )
    return torch.autograd.grad(loss, logits)[0], m


@pytest.mark.parametrize("kl, ent", ((0.0, 0.0), (0.1, 0.0), (0.0, 0.01)))
@pytest.mark.parametrize("s", (reinforce, ppo, gigpo), ids=lambda s: s.__name__)
def test_gradient_of_the_loss_is_grpos(s, kl, ent):
    """Catches a sign, a direction or a bound that is wrong in one script alone: the terms that the scripts share have
    the gradient that they have in grpo.py (reinforce: at ratio 1)."""
    _, _, _, _, logits, ref_logits = random_batch()
    high = 0.28 if s is gigpo else 0.2
    ours, m = loss_of(s, logits, ref_logits, clip_high=high, kl=kl, ent=ent)
    if s is reinforce:
        tokens, mask, A, _, _, _ = random_batch()
        new, entropy, _ = grpo.score(FixedLogits(logits), tokens, mask, 1.0)
        ref = grpo.score(FixedLogits(ref_logits), tokens, mask, 1.0)[0]
        loss, n = grpo.compute_loss(
            new,
            entropy,
            new.detach(),
            A,
            mask,
            mask / mask.sum(),
            ref,
            clip_coef=0.2,
            clip_coef_high=0.2,
            kl_coef=kl,
            ent_coef=ent,
        )
        theirs = torch.autograd.grad(loss, logits)[0]
    else:
        theirs, n = loss_of(grpo, logits, ref_logits, clip_high=high, kl=kl, ent=ent)
    assert_close(ours, theirs, atol=1e-12, rtol=1e-9)
    assert ours.norm() > 0.01
    for key in m.keys() & n.keys() - {"losses/policy_loss"}:
        assert_close(m[key], n[key])


# ---- train()


def spied_losses(monkeypatch, s):
    inner, seen = s.compute_loss, []

    def spy(*args, **kwargs):
        out = inner(*args, **kwargs)
        seen.append((inspect.signature(inner).bind(*args, **kwargs).arguments, out[1]))
        return out

    monkeypatch.setattr(s, "compute_loss", spy)
    return seen


def test_gradients_do_not_pile_up(any_script, start, tmp_path, monkeypatch):
    """Catches a forgotten zero_grad: the same batch at (nearly) the same weights has the same gradient again."""
    batches, grads, clip = [], [], torch.nn.utils.clip_grad_norm_

    def again(rollout, *args, **kwargs):
        batches.append(batches[0] if batches else rollout(*args, **kwargs))
        return batches[0]

    def spy(parameters, *args):
        parameters = list(parameters)
        if sys._getframe(1).f_code.co_name == "train":
            grads.append(torch.cat([p.grad.flatten().clone() for p in parameters]))
        return clip(parameters, *args)

    on_rollouts(monkeypatch, any_script, again)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
    run(
        any_script,
        tmp_path,
        init_from=start,
        learning_rate=1e-12,
        kl_coef=0.0,
        num_iterations=2,
        num_groups=8,
        **minibatches(any_script, 1),
    )
    assert len(grads) == 2 and grads[0].norm() > 1e-4
    assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-3)


def test_weights_without_a_gradient_stay(any_script, start, tmp_path):
    """Catches AdamW's default weight decay: nothing reads the embedding of <pad>, so that training leaves it alone."""
    _, state = run(any_script, tmp_path, init_from=start, learning_rate=1e-2)
    before = torch.load(start, weights_only=True)["model"]["embed.weight"]
    assert torch.equal(state["model"]["embed.weight"][0], before[0]) and not torch.equal(
        state["model"]["embed.weight"][1:], before[1:]
    )


@pytest.mark.parametrize("s", (ppo, grpo, gigpo), ids=lambda s: s.__name__)
def test_minibatches_are_shuffled_anew(s, start, tmp_path, monkeypatch):
    """Catches minibatches in the order of the batch, of whole groups, and one order for all epochs and iterations."""
    seen = spied_losses(monkeypatch, s)

    def number(rollout, *args, **kwargs):
        batch = rollout(*args, **kwargs)
        batch.logprobs[:, 0] = torch.arange(
            32.0
        )  # the prompt's first token, which is masked, names the episode
        return batch

    on_rollouts(monkeypatch, s, number)
    run(
        s,
        tmp_path,
        init_from=start,
        num_iterations=2,
        num_groups=8,
        num_minibatches=4,
        update_epochs=2,
        micro_batch_size=32,
    )
    orders = [sorted(given["logprobs"][:, 0].int().tolist()) for given, _ in seen]
    for k in range(0, 16, 4):
        assert sorted(sum(orders[k : k + 4], [])) == list(range(32))
    assert len({str(orders[k : k + 4]) for k in range(0, 16, 4)}) == 4
    assert all(len({b // 4 for b in order}) > 2 for order in orders)


@pytest.mark.parametrize("s", (ppo, grpo, gigpo), ids=lambda s: s.__name__)
def test_logged_losses_are_means_over_the_minibatches(s, start, tmp_path, monkeypatch):
    """Catches metrics of the last minibatch only."""
    seen = spied_losses(monkeypatch, s)
    _, line = run(
        s,
        tmp_path,
        init_from=start,
        num_iterations=1,
        num_groups=8,
        num_minibatches=4,
        micro_batch_size=32,
        learning_rate=1e-2,
    )[0]
    assert len(seen) == 4
    for key in seen[0][1]:
        each = [
            m[key].item() / (1 if key == "losses/policy_loss" else given["loss_mask"].sum().item())
            for given, m in seen
        ]
        assert line[key] == pytest.approx(sum(each) / 4, rel=1e-4, abs=1e-8), key
    assert len({m["losses/entropy"].item() for _, m in seen}) == 4


def test_constant_groups_are_counted_by_group(any_script, start, tmp_path, monkeypatch):
    """Catches charts/frac_zero_std_groups over the wrong axis, or over rows that are no group. Planted returns: equal
    in each group of 4 to 15, their parity, and different in groups 0 to 3."""

    def plant(rollout, *args, **kwargs):
        batch = rollout(*args, **kwargs)
        ids = batch.group_ids
        member = (ids[:, None] == ids[None, :]).tril(-1).sum(1)  # first or second of its group
        rewards = torch.zeros_like(batch.rewards)
        rewards[:, 0] = torch.where(ids < 4, member, ids % 2).float()
        return batch._replace(rewards=rewards)

    on_rollouts(monkeypatch, any_script, plant)
    lines, _ = run(
        any_script, tmp_path, init_from=start, num_groups=16, group_size=2, num_iterations=1
    )
    assert lines[1]["charts/frac_zero_std_groups"] == 0.75


def test_the_seed_decides_tasks_and_noise(any_script, start, tmp_path, monkeypatch):
    """#74: catches tasks or noise that are the same for every seed."""
    seen = []

    def keep(rollout, model, tokenizer, envs, tasks, group_ids, uniforms, **k):
        seen.append((tasks, uniforms))
        return rollout(model, tokenizer, envs, tasks, group_ids, uniforms, **k)

    on_rollouts(monkeypatch, any_script, keep)
    for seed in (1, 2):
        run(
            any_script,
            tmp_path / str(seed),
            init_from=start,
            num_iterations=1,
            num_groups=8,
            seed=seed,
        )
    (tasks, noise), (other_tasks, other_noise) = seen
    assert tasks != other_tasks and (noise == other_noise).float().mean() < 0.01


def test_a_tool_cost_of_zero_is_zero(any_script, start, tmp_path, monkeypatch):
    """Catches `--tool-cost 0` taken for not given."""
    costs = set()
    on_training_rollouts(
        monkeypatch,
        any_script,
        before=lambda n, model, envs: costs.update(env.tool_cost for env in envs),
    )
    run(any_script, tmp_path, init_from=start, num_iterations=1, tool_cost=0.0)
    assert costs == {0.0}


@pytest.mark.parametrize("end", ("turn_limit", "context_limit"))
def test_filtered_episodes(any_script, end, tmp_path):
    """#47: as test_filtered_episodes_vote_but_are_not_trained, for ppo and for the context too."""
    A, mask = in_training(
        any_script,
        tmp_path,
        rewards=[[1.0], [0.0], [0.0], [0.0]],
        turns=[[(2, 1)]] * 4,
        groups=[0] * 4,
        filter_truncated=True,
        ends=["submitted"] * 3 + [end],
    )
    assert mask.sum(1).tolist() == [2, 2, 2, 0] and not A[3].any() and A[0].any()


def test_all_gradients_are_clipped_together(any_script, start, tmp_path, monkeypatch):
    """Catches a critic's gradient that is left out of the clip."""
    norms, step = [], torch.optim.AdamW.step

    def spy(self, *a, **k):
        if sys._getframe(1).f_code.co_name == "train" or len(self.param_groups[0]["params"]) > 2:
            norms.append(
                torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]])
                .norm()
                .item()
            )
        return step(self, *a, **k)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    run(
        any_script,
        tmp_path,
        init_from=start,
        num_iterations=2,
        num_groups=8,
        max_grad_norm=1e-3,
        **({"critic_warmup_steps": 0, "vf_coef": 5.0} if any_script is ppo else {}),
    )
    assert norms and max(norms) < 1.001e-3


@pytest.mark.parametrize("s", (reinforce, grpo, gigpo), ids=lambda s: s.__name__)
def test_constant_groups_still_pay_the_kl(s, start, tmp_path, monkeypatch):
    """Catches a KL penalty that is dropped where the rewards teach nothing."""
    states = []

    def before(n, model, envs):
        states.append(deepcopy(model.state_dict()))
        for env in envs if n > 1 else []:
            with_reward(env, lambda terminated: 0.0)

    on_training_rollouts(monkeypatch, s, before=before)
    lines, state = run(
        s,
        tmp_path,
        init_from=start,
        num_iterations=3,
        num_groups=8,
        kl_coef=1.0,
        learning_rate=1e-2,
    )
    assert not same(states[1], states[2]) and lines[2]["losses/grad_norm"] > 0


def test_logged_advantages_are_those_of_trained_tokens(any_script, tmp_path):
    """#26: catches means over padding and observations."""
    A, mask = in_training(
        any_script,
        tmp_path,
        rewards=[[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]],
        turns=[[(2, 1), (3, 2)], [(1, 4)], [(4, 1)], [(1, 1)]],
        groups=[0] * 4,
    )
    line = results(tmp_path / any_script.__name__)[0][1]
    assert line["losses/advantage_mean"] == pytest.approx(A[mask > 0].mean().item(), abs=1e-6)
    assert line["losses/advantage_std"] == pytest.approx(
        A[mask > 0].std(correction=0).item(), abs=1e-6
    )


# ---- evaluation

OPTIONS = dict(
    max_turns=3, num_bugs=1, reward="hidden", tool_cost=0.0, process_reward=0.0, malformed="error"
)


def test_evaluation_is_greedy():
    """Catches an evaluation that samples: every token it wrote is the likeliest."""
    model = tr.random_model()
    _, batches = grpo.evaluate(
        model, tr.WORDS, BugFixEnv, OPTIONS, split="dev", num_tasks=16, context_length=400
    )
    for batch in batches:
        with torch.no_grad():
            best = model(batch.tokens).argmax(-1)
        where = batch.loss_mask[:, 1:] > 0
        assert (best[:, :-1][where] == batch.tokens[:, 1:][where]).float().mean() > 0.99


def planned(monkeypatch, success):
    """Puts success(task, how many times this task was seen before in the call) in the place of play()."""
    calls = []

    def play(model, tokenizer, env_class, env_options, tasks, *, temperature, seed, context_length):
        seen, infos = {}, []
        for task in tasks:
            n = seen[task] = seen.get(task, -1) + 1
            infos.append(
                dict(
                    success=success(task, n, temperature),
                    hacked=False,
                    turns=1,
                    tool_calls=0,
                    errors=0,
                    truncated=False,
                )
            )
        calls.append((tasks, temperature))
        empty = torch.zeros(len(tasks), 1)
        return [grpo.Batch(*[empty] * 9, [], infos)]

    monkeypatch.setattr(grpo, "play", play)
    return calls


def test_pass_at_8_and_the_tasks_of_an_evaluation(monkeypatch):
    """Catches pass@8 over the wrong axis, all for any, greedy samples, and unseen pairs of another split."""
    tasks = [grpo.bugfix_task("dev", i) for i in range(32)]
    lucky = {tasks[0], tasks[2], tasks[3]}
    calls = planned(
        monkeypatch, lambda task, n, temperature: task in lucky and (temperature == 0 or n == 5)
    )
    metrics, _ = grpo.evaluate(
        None, None, grpo.BugFixEnv, OPTIONS, split="dev", num_tasks=32, context_length=400
    )
    assert metrics["eval/success_rate"] == 3 / 32 and metrics["eval/pass@8"] == 3 / 4
    assert metrics["eval/unseen_pairs_success_rate"] == 0
    (all_tasks, t0), (repeated, t1), (unseen, t2) = calls
    assert all_tasks == tasks and (t0, t1, t2) == (0, 1, 0) and len(repeated) == 32
    assert unseen == [grpo.bugfix_task("unseen", i) for i in range(8)]


def test_describe_start(monkeypatch):
    """Catches counts per task over the wrong axis. Of 64 tasks 16 are always solved, 8 never, 40 at times."""
    tasks = [grpo.bugfix_task("train", i) for i in range(64)]

    def success(task, n, temperature):
        i = tasks.index(task)
        return True if i < 16 else False if i < 24 else n % 2 == 0

    planned(monkeypatch, success)
    metrics = grpo.describe_start(
        None, None, grpo.BugFixEnv, OPTIONS, group_size=4, context_length=400
    )
    assert (
        metrics["start/tasks_always_solved"] == 16 / 64
        and metrics["start/tasks_never_solved"] == 8 / 64
    )
    assert metrics["start/tasks_sometimes_solved"] == 40 / 64 and metrics[
        "start/success_rate"
    ] == pytest.approx(36 / 64)
    assert metrics["start/informative_groups"] == pytest.approx(
        40 / 64 * (1 - 2 / 70)
    )  # 1 - 2 C(4, 4) / C(8, 4)


def test_episode_metrics_by_hand():
    """Catches truncated episodes left out of a mean, and errors per episode instead of per turn."""

    def row(success, hacked, turns, calls, errors, cut):
        return dict(
            success=success,
            hacked=hacked,
            turns=turns,
            tool_calls=calls,
            errors=errors,
            truncated=cut,
        )

    def batch(infos, R, n):
        z = torch.zeros(1)
        return grpo.Batch(
            z, z, torch.ones(len(infos), n), z, z, torch.tensor(R), z, z, z, [], infos
        )

    infos = [
        row(True, False, 2, 1, 0, False),
        row(False, True, 3, 2, 1, False),
        row(False, False, 1, 0, 1, True),
        row(False, False, 6, 5, 1, False),
    ]
    m = grpo.episode_metrics(
        [batch(infos[:3], [[1.0], [0.25], [0.0]], 4), batch(infos[3:], [[0.5]], 8)]
    )
    assert m == pytest.approx(
        dict(
            success_rate=1 / 4,
            episodic_return=1.75 / 4,
            episodic_length=3,
            hack_rate=1 / 4,
            tool_calls=2,
            invalid_action_rate=3 / 12,
            truncation_rate=1 / 4,
            tokens_per_episode=5,
        )
    )


def test_play_plays_every_task():
    """Catches a last, smaller batch that is dropped."""
    tasks = [grpo.NumberEnv.task("dev", i) for i in range(300)]
    batches = grpo.play(
        tr.random_model(grpo.NumberEnv),
        tr.TOKENIZERS[grpo.NumberEnv],
        grpo.NumberEnv,
        OPTIONS | dict(malformed="end"),
        tasks,
        temperature=1,
        seed=0,
        context_length=20,
    )
    assert [len(batch.infos) for batch in batches] == [256, 44]
    assert sum((batch.infos for batch in batches), []) and [
        i["pair"] for b in batches for i in b.infos
    ] == [str(t) for t in tasks]


def test_a_saved_iteration_is_logged(any_script, start, tmp_path, monkeypatch):
    """Catches a checkpoint written before the iteration's line: a kill in between costs the line for good."""
    inner = any_script.save_checkpoint

    def spy(path, **state):
        lines = [
            json.loads(line)["iteration"]
            for line in (path.parent / "metrics.jsonl").read_text().splitlines()
        ]
        assert lines == list(range(state["iteration"] + 1))
        return inner(path, **state)

    monkeypatch.setattr(any_script, "save_checkpoint", spy)
    run(any_script, tmp_path, init_from=start, save_every=1)


def test_gather_pads_turn_ids_as_the_rollout_does(any_script, monkeypatch):
    """Catches padding of a process with shorter episodes that --no-mask-observations would train on."""

    def part(T, B=2):
        z = torch.ones(B, T)
        return any_script.Batch(
            z.long(),
            torch.full((B,), T),
            z,
            z,
            z.long(),
            torch.ones(B, 3),
            torch.ones(B) > 0,
            torch.ones(B) < 0,
            torch.arange(B),
            [[]] * B,
            [{}] * B,
        )

    parts = [part(4), part(7)]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def all_gather(out, mine):
        out[:] = [list(parts[0]), list(parts[1])]

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)
    batch = any_script.gather(parts[0], "cpu")
    assert (
        batch.turn_ids.shape == (4, 7)
        and (batch.turn_ids[:2, 4:] == -1).all()
        and (batch.loss_mask[:2, 4:] == 0).all()
    )
    assert batch.lengths.tolist() == [4, 4, 7, 7] and len(batch.infos) == 4


@pytest.mark.parametrize("s", (reinforce, grpo, gigpo), ids=lambda s: s.__name__)
def test_without_a_signal_no_step_is_taken(s, start, tmp_path, monkeypatch, capsys):
    """Catches a step on zero gradients (torchrun fills them in, and Adam's momentum moves the weights)."""
    steps, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *a, **k: (steps.append(1), step(self, *a, **k))[1]
    )
    on_training_rollouts(
        monkeypatch,
        s,
        before=lambda n, model, envs: [with_reward(env, lambda terminated: 0.0) for env in envs],
    )
    run(s, tmp_path, init_from=start, num_iterations=2, kl_coef=0.0)
    assert not steps and capsys.readouterr().out.count("no optimizer step was taken") == 2
