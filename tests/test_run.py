"""Whole runs of the scripts: same seed, resume, what is logged, tracking, failures, learning.

Most tests run on each script, call train() or the command line in their own process and use a tiny
model. Each says which bug it would catch; #n is a public report of that bug.
"""

import gc
import importlib
import json
import math
import os
import re
import shlex
import sys
import types
from collections import Counter
from copy import deepcopy
from unittest.mock import Mock

import helpers as h
import pytest
import torch
import tyro

import tinyagent

# Metric keys of BugFix: of an evaluation, of an iteration with one, of the start, of single scripts
EVALUATION = """
    eval/success_rate eval/episodic_return eval/hack_rate eval/tool_calls eval/pass@8
    eval/unseen_pairs_success_rate
""".split()
KEYS = """
    iteration global_step charts/episodic_return charts/episodic_length charts/success_rate
    charts/hack_rate charts/tool_calls charts/invalid_action_rate charts/truncation_rate
    charts/tokens_per_episode charts/learning_rate charts/SPS charts/total_tokens
    charts/total_episodes charts/frac_zero_std_groups losses/policy_loss losses/entropy
    losses/grad_norm losses/old_approx_kl losses/approx_kl losses/ref_kl losses/advantage_mean
    losses/advantage_std time/rollout time/env time/update
""".split()
START_KEYS = """
    iteration warm_start/episodes warm_start/tokens warm_start/seconds warm_start/loss_policy
    warm_start/loss_read warm_start/loss_edit warm_start/loss_test warm_start/loss_submit
    start/success_rate start/hack_rate start/tool_calls start/tasks_never_solved
    start/tasks_sometimes_solved start/tasks_always_solved start/informative_groups
""".split()
OWN_START_KEYS = {"ppo": ["warm_start/critic_episodes", "warm_start/critic_loss"]}
OWN_KEYS = {
    "reinforce": [],
    "ppo": ["losses/clipfrac", "losses/value_loss", "losses/explained_variance"],
    "grpo": ["losses/clipfrac"],
    "gigpo": "losses/clipfrac charts/step_group_size charts/frac_singleton_step_groups".split(),
}


# ---- Same seed, more iterations


def test_same_seed_same_run(script, tmp_path):
    """Catches unseeded noise, global generators and set order in results (#72), a seed that changes
    nothing, and an evaluation that draws from the training's noise or leaves the model changed."""
    a, a_state = h.run(script, tmp_path / "a", eval_every=1)
    torch.manual_seed(12345)  # whatever ran before must not matter
    b, b_state = h.run(script, tmp_path / "b", eval_every=1000)
    assert h.without_times(a, ["eval/"]) == h.without_times(b, ["eval/"])
    assert h.same(a_state["model"], b_state["model"])
    assert ["eval/success_rate" in line for line in a + b] == [True] * 4 + [False, True]
    c, c_state = h.run(script, tmp_path / "c", seed=2)
    assert c[1]["losses/entropy"] != a[1]["losses/entropy"]
    assert not h.same(a_state["model"], c_state["model"])


def test_micro_batch_size_does_not_change_training(script, start, tmp_path, monkeypatch):
    """Catches denominators counted over a micro-batch, a step for each, rows lost in the split."""
    tokens, flags = [], dict(init_from=start, ent_coef=0.01) | h.minibatches(script, 2)
    h.on_training_rollouts(monkeypatch, script, after=lambda n, batch: tokens.append(batch.tokens))
    whole, whole_state = h.run(script, tmp_path / "whole", micro_batch_size=32, **flags)
    split, split_state = h.run(script, tmp_path / "split", micro_batch_size=3, **flags)
    assert torch.equal(tokens[0], tokens[2])  # iteration 1 of both runs
    for a, b in zip(whole[1:], split[1:], strict=True):
        for key in (key for key in a if key.startswith("losses/")):
            assert b[key] == pytest.approx(a[key], abs=1e-4), key
    torch.testing.assert_close(split_state["model"], whole_state["model"], atol=1e-4, rtol=0)


def test_a_longer_run_with_other_flags(script, start, tmp_path, capsys, monkeypatch):
    """Catches schedules that still end at the first num_iterations, flags beside --resume that are
    ignored, not told, told where they are the same, or forgotten by the next resume."""
    flags = dict(num_iterations=3, save_every=2, learning_rate=5e-3, kl_coef=0.4, init_from=start)
    h.run(script, tmp_path, **flags, **h.minibatches(script, 1))
    changes = dict(num_iterations=6, learning_rate=6e-3, eval_every=2, eval_tasks=24, save_every=1)
    changes |= dict(eval_split="dev", micro_batch_size=99, torch_deterministic=False)
    changes |= dict(wandb_project_name="mine", wandb_entity="team")
    calls, argv = h.spied(monkeypatch, script, "compute_loss"), h.to_argv(**changes)
    capsys.readouterr()
    path = h.folder(tmp_path) / "checkpoint.pt"
    assert h.command(script, "--resume", path, "--no-cuda", *argv) == 0
    lines = capsys.readouterr().out.replace("_", "-").splitlines()
    (told,) = [line for line in lines if "num-iterations" in line]
    assert all(name.replace("_", "-") in told for name in changes) and "cuda" not in told
    metrics, state = h.results(tmp_path)
    assert h.iterations(metrics) == [0, 1, 2, 3, 4, 5, 6] and state["iteration"] == 6
    assert state["args"].items() >= changes.items()
    rates = [5e-3, 5e-3 * 2 / 3, 5e-3 / 3, 6e-3 * 3 / 6, 6e-3 * 2 / 6, 6e-3 / 6]
    assert [line["charts/learning_rate"] for line in metrics[1:]] == pytest.approx(rates)
    kl_coefs = [given["kl_coef"] for given, _ in calls]
    assert kl_coefs == pytest.approx([0.4 * 3 / 6, 0.4 * 2 / 6, 0.4 / 6])
    assert ["eval/success_rate" in line for line in metrics[3:]] == [True, True, False, True]


# ---- What is logged


@pytest.fixture(scope="module", params=h.SCRIPTS)
def logged(request, start, tmp_path_factory):
    """A run of five iterations, one optimizer step each, of which everything is kept. Code that
    asks CUDA something in a run on the CPU, and dies without a driver (#82), dies here too."""
    script = importlib.import_module(request.param)
    kept = types.SimpleNamespace(script=script, models=[], envs=[], batches=[])

    def before(n, model, envs):
        kept.models.append(deepcopy(model.state_dict())), kept.envs.append(envs)

    def after(n, batch):
        kept.batches.append(batch)

    flags = dict(num_iterations=5, num_groups=8, context_length=10, micro_batch_size=5)
    flags |= dict(temperature=0.7, kl_coef=0.4, learning_rate=1e-2, tool_cost=0.4)
    flags |= dict(tool_cost_warmup=4, init_from=start) | h.minibatches(script, 1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_lazy_init", "get_device_properties", "synchronize", "is_available"):
            patch.setattr(torch.cuda, name, Mock(side_effect=AssertionError("a CUDA call")))
        h.on_training_rollouts(patch, script, before=before, after=after)
        calls = h.spied(patch, script, "compute_loss")
        kept.metrics, kept.state = h.run(script, tmp_path_factory.mktemp("logged"), **flags)
    kept.losses = [calls[n : n + 7] for n in range(0, 35, 7)]  # 32 episodes, 5 at a time
    return kept


def test_init_from_begins_with_those_weights(logged, start):
    """Catches a warm start on top of --init-from, weights that are not loaded, and a KL to a
    reference that moves with the policy."""
    saved = torch.load(start, weights_only=True)["model"]
    assert h.same(logged.models[0], saved) and h.same(logged.state["reference"], saved)
    warm = {key for key in logged.metrics[0] if key.startswith("warm_start/")}
    assert warm == set(OWN_START_KEYS.get(logged.script.__name__, []))
    first, second, *_ = (line["losses/ref_kl"] for line in logged.metrics[1:])
    assert first == pytest.approx(0, abs=1e-6) and second > 1e-4


def test_groups_are_episodes_of_one_task_and_noise_differs(logged):
    """Catches groups that mix tasks, the same tasks in each iteration, rows that share noise."""
    tasks = [[info["pair"] for info in batch.infos] for batch in logged.batches]
    pairs = zip((batch.group_ids.tolist() for batch in logged.batches), tasks, strict=True)
    counts = [Counter(zip(groups, names, strict=True)) for groups, names in pairs]
    assert all(list(count.values()) == [4] * 8 for count in counts) and tasks[0] != tasks[1]
    assert len({tuple(row) for row in logged.batches[0].tokens.tolist()}) > 16


def test_counters_add_up(logged):
    """Catches counters that restart, count padding or observations, or forget cut episodes."""
    turns = tokens = 0
    for n, (line, batch) in enumerate(zip(logged.metrics[1:], logged.batches, strict=True), 1):
        sampled = batch.loss_mask > 0
        played = [ids[m].unique().numel() for ids, m in zip(batch.turn_ids, sampled, strict=True)]
        turns, tokens = turns + sum(played), tokens + int(sampled.sum())
        keys = ("global_step", "charts/total_tokens", "charts/total_episodes")
        assert [line[key] for key in keys] == [turns, tokens, 32 * n]
        assert line["charts/episodic_length"] == sum(played) / 32
        assert line["charts/tokens_per_episode"] == sampled.sum() / 32
        returns = batch.rewards.sum().item() / 32
        assert line["charts/episodic_return"] == pytest.approx(returns, abs=1e-6)
        assert line["charts/truncation_rate"] == batch.truncated.float().mean()
    assert any(batch.truncated.any() for batch in logged.batches)


def test_schedules(logged):
    """Catches a learning rate or a KL penalty that stays, or is gone an iteration early, and a tool
    cost that is full from the start (a policy then drops the tool) or never gets there."""
    fades = [1.0, 0.8, 0.6, 0.4, 0.2]
    rates = [line["charts/learning_rate"] for line in logged.metrics[1:]]
    assert rates == pytest.approx([0.01 * x for x in fades])
    kl_coefs = [given["kl_coef"] for calls in logged.losses for given, _ in calls]
    assert kl_coefs == pytest.approx([0.4 * x for x in fades for _ in range(7)])
    costs = [env.tool_cost for envs in logged.envs for env in envs]
    assert costs == pytest.approx([x for x in (0.1, 0.2, 0.3, 0.4, 0.4) for _ in range(32)])


def test_losses_count_sampled_tokens(logged):
    """#3, #6: catches observations, padding or micro-batches in a denominator: every loss but the
    policy's is its sum by the number of sampled tokens, and the weights of a batch sum to 1 (ppo),
    or to the share of the token budget, 5 turns of 2 tokens, that was spent."""
    for line, batch, calls in zip(logged.metrics[1:], logged.batches, logged.losses, strict=True):
        count = int(batch.loss_mask.sum())
        for key in calls[0][1][1]:
            total = sum(metrics[key].item() for _, (_, metrics) in calls)
            total /= 1 if key == "losses/policy_loss" else count
            assert line[key] == pytest.approx(total, rel=1e-5, abs=1e-7), key
        weights = sum(given["weights"].sum().item() for given, _ in calls)
        budget = count if logged.script.__name__ == "ppo" else 32 * 5 * 2
        assert weights == pytest.approx(count / budget) and line["losses/entropy"] > 0
        assert all((given["weights"][given["loss_mask"] == 0] == 0).all() for given, _ in calls)


@pytest.mark.parametrize("mask_observations", [True, False])
def test_before_the_first_step_the_ratio_is_one(script, start, mask_observations, tmp_path):
    """#17, #18: catches a loss that scores at another temperature, position or mask than was
    sampled at, and observations without their log pi_old. With more epochs it must leave 1: catches
    old log-probabilities that are taken again in each."""
    flags = dict(num_groups=8, temperature=0.7, mask_observations=mask_observations)
    flags |= dict(init_from=start, num_iterations=1, learning_rate=1e-2)
    flags |= h.minibatches(script, 1)
    _, line = h.run(script, tmp_path / "one", **flags)[0]
    assert abs(line["losses/old_approx_kl"]) < 1e-5 and abs(line["losses/approx_kl"]) < 1e-8
    assert line.get("losses/clipfrac", 0) == 0 < line["losses/grad_norm"]
    if script.__name__ != "reinforce":
        _, line = h.run(script, tmp_path / "four", update_epochs=4, **flags)[0]
        assert line["losses/clipfrac"] > 0 and line["losses/approx_kl"] > 1e-4


def test_bugfix_with_two_bugs(script, tmp_path, monkeypatch):
    """Catches a metric that was renamed, dropped, or written by one script only, NaN (not even
    JSON), --reward or --num-bugs that stop on the way, a turn limit that does not grow."""
    envs = []
    h.on_training_rollouts(monkeypatch, script, before=lambda n, model, new: envs.extend(new))
    flags = dict(env_id="bugfix", reward="partial", num_bugs=2, eval_every=1, warm_start_steps=10)
    metrics, _ = h.run(script, tmp_path, **flags)
    own_start_keys = OWN_START_KEYS.get(script.__name__, [])
    assert set(metrics[0]) == {*EVALUATION, *START_KEYS, *own_start_keys}
    for line in metrics[1:]:
        assert set(line) == {*EVALUATION, *KEYS, *OWN_KEYS[script.__name__]}
    assert h.iterations(metrics) == [0, 1, 2] and h.finite(metrics)
    seen = {(env.reward, env.max_turns, env.goal.pair.count("+")) for env in envs}
    assert seen == {("partial", 8, 1)}


def test_memory_does_not_grow(script, start, tmp_path, monkeypatch):
    """Catches rollouts that record a graph, and metrics or batches kept over iterations (#80)."""
    counts = []

    def after(n, batch):
        assert not any(value.requires_grad for value in batch if torch.is_tensor(value))
        gc.collect()
        counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))

    h.on_training_rollouts(monkeypatch, script, after=after)
    h.run(script, tmp_path, init_from=start, num_iterations=4)
    assert counts[3] <= counts[1]


def test_only_training_tasks_train(script, tmp_path, monkeypatch):
    """Catches test tasks in the warm start or the training, and another split than --eval-split;
    and NaN, the mean over no token, for a tool that the last warm-start batches do not call."""
    task, asked = script.NumberEnv.task, {"warm_start": set(), "train": set(), "evaluate": set()}

    def spy(env, split, index):
        frame = sys._getframe(1)
        while frame.f_code.co_name not in asked:
            frame = frame.f_back
        asked[frame.f_code.co_name].add(split)
        return task(env, split, index)

    monkeypatch.setattr(script.NumberEnv, "task", spy)
    flags = dict(warm_start_steps=10, warm_start_batch_size=1, seed=7)
    assert h.finite(h.run(script, tmp_path, eval_split="dev", num_iterations=1, **flags)[0])
    assert asked == {"warm_start": {"train"}, "train": {"train"}, "evaluate": {"dev"}}


def test_the_warm_start_alone(script, tmp_path, monkeypatch):
    """Catches a division by zero in a schedule of no iterations, a run that leaves nothing, and
    flags ignored or turned round: --no-warm-start-observations (the tools' replies are not learned
    then), --no-torch-deterministic (#73: a product raises on a GPU without the variable)."""
    losses, asked = [], []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    for on in (False, True):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        flags = dict(num_iterations=0, warm_start_steps=40, torch_deterministic=on)
        (line,), _ = h.run(script, tmp_path / str(on), warm_start_observations=on, **flags)
        losses.append(line["warm_start/loss_call"])
        assert line["iteration"] == 0 and line["warm_start/episodes"] == 320
        assert "eval/success_rate" in line and asked == [True] * on
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if on else None)
        args = json.loads((h.folder(tmp_path / str(on)) / "args.json").read_text())
        assert args["num_iterations"] == 0 and args["torch_deterministic"] == on
    assert losses[1] < losses[0] - 0.3


# ---- Tracking


def fake_wandb(monkeypatch):
    """In the place of the package, which has no key."""
    wandb = Mock()
    wandb.api.api_key = None
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return wandb


def test_a_tracked_run_and_its_resume(script, start, tmp_path, monkeypatch):
    """Catches runs in another project, a run without a key that asks for one and waits (#88), steps
    that shift or go back (#90), a finish that hangs before the last checkpoint is there (#89), and
    a resumed run that is a second one to the tracker."""
    ends, wandb = [], fake_wandb(monkeypatch)
    tracker = wandb.init.return_value
    tracker.finish = lambda: ends.append(h.load(h.folder(tmp_path))["iteration"])
    flags = dict(wandb_project_name="mine", wandb_entity="team", init_from=start, num_iterations=3)
    h.run(script, tmp_path, track=True, eval_every=2, **flags)
    run_dir = h.folder(tmp_path)
    assert h.command(script, "--resume", run_dir / "checkpoint.pt", "--num-iterations", 4) == 0
    expected = dict(project="mine", entity="team", mode="offline", name=run_dir.name)
    expected |= dict(id=run_dir.name, resume="allow")
    for call in wandb.init.call_args_list:
        assert expected.items() <= call.kwargs.items() and call.kwargs["config"]["num_groups"] == 4
    lines = [{"iteration": call.kwargs["step"], **call.args[0]} for call in tracker.log.mock_calls]
    assert lines == h.read_metrics(run_dir) and h.iterations(lines) == [0, 1, 2, 3, 4]
    assert ["eval/success_rate" in line for line in lines] == [True, False, True, True, True]
    assert wandb.init.call_count == 2 and ends == [3, 4]


@pytest.mark.parametrize("broken", ["package", "init", "log", "finish"])
def test_a_tracker_that_breaks(script, broken, start, tmp_path, monkeypatch, capsys):
    """Catches a run that ends or lacks lines because of its tracker, or says nothing (#88, #89)."""
    wandb = fake_wandb(monkeypatch)
    if broken == "package":
        monkeypatch.setitem(sys.modules, "wandb", None)
    method = wandb.init if broken == "init" else getattr(wandb.init.return_value, broken)
    method.side_effect = ConnectionError("the server\nis gone")
    metrics, state = h.run(script, tmp_path, init_from=start, track=True)
    out = capsys.readouterr().out.splitlines()
    warnings = [line for line in out if line.startswith("warning: --track")]
    error = "ModuleNotFoundError" if broken == "package" else "ConnectionError"
    assert warnings and all(error in line for line in warnings)
    assert h.iterations(metrics) == [0, 1, 2] and state["iteration"] == 2


# ---- Failures in the middle


@pytest.mark.parametrize("what, last", [("gradient", 1), ("policy", 1), ("warm start", -1)])
def test_a_diverged_run_stops(script, what, last, start, tmp_path, monkeypatch, capsys):
    """Catches a run that goes on with NaN for hours, and one that saves it (#52) as finite. All
    groups of a policy of NaN fail: there is no gradient that could tell."""
    states = []

    def before(n, model, envs):
        states.append(deepcopy(model.state_dict()))
        if n == 2 and what == "policy":
            model.head.weight.data.fill_(math.nan)
        elif n == 2:
            model.head.weight.register_hook(lambda gradient: gradient * math.nan)

    h.on_training_rollouts(monkeypatch, script, before=before)
    flags = dict(num_iterations=3, num_groups=8, save_every=1, kl_coef=0.0)
    flags |= dict(init_from=start) if last > 0 else dict(warm_start_learning_rate=1e6)
    assert h.exit_code(script.train, h.make_args(script, tmp_path, **flags)) == 1
    error, run_dir = capsys.readouterr().err, h.folder(tmp_path)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert f"iteration {last + 1}" in error or "--warm-start-learning-rate" in error
    assert (run_dir / "checkpoint.pt").exists() == (last > 0)
    if last > 0:
        assert h.iterations(h.read_metrics(run_dir)) == [0, 1] and h.load(run_dir)["iteration"] == 1
        assert (
            h.same(h.load(run_dir)["model"], states[1])
            and states[1]["head.weight"].isfinite().all()
        )


def test_a_broken_environment_stops_the_run(script, start, tmp_path, monkeypatch):
    """Catches a broad except that turns a broken sandbox into a reward of 0 (#66), a full disk, or
    whatever else. (A reward that is no number raises, too: see test_rollout.py.)"""

    def before(n, model, envs):
        envs[3].step = Mock(side_effect=OSError("sandbox is gone"))

    h.on_training_rollouts(monkeypatch, script, before=before)
    with pytest.raises(OSError, match="sandbox is gone"):
        h.run(script, tmp_path, init_from=start)


@pytest.mark.parametrize("script", ["reinforce", "grpo", "gigpo"], indirect=True)
def test_constant_groups_leave_the_weights_alone(script, start, tmp_path, monkeypatch, capsys):
    """Catches advantages out of rounding, a step on momentum alone, a loop that waits for groups
    that differ (#48), and a run that says nothing (#46). Iteration 1 has a signal, so that momentum
    is there; from 2 on every reward is 0.7. (Constant rewards still teach ppo's critic.)"""
    states = []

    def before(n, model, envs):
        states.append(deepcopy(model.state_dict()))
        for env in envs if n > 1 else []:
            h.with_reward(env, lambda terminated: 0.7 * terminated)

    h.on_training_rollouts(monkeypatch, script, before=before)
    flags = dict(num_iterations=3, num_groups=8, kl_coef=0.0, init_from=start)
    flags |= {"step_gamma": 1.0} if script.__name__ == "gigpo" else {}  # else early turns differ
    metrics, state = h.run(script, tmp_path, **flags)
    assert not h.same(states[0], states[1])
    assert h.same(states[1], states[2]) and h.same(states[2], state["model"])
    told = "every group is constant: its rewards teach nothing, no optimizer step was taken"
    assert capsys.readouterr().out.count(f"warning: {told}") == 2
    for line in metrics[2:]:
        assert line["losses/grad_norm"] == line["losses/advantage_std"] == 0
        assert line["charts/frac_zero_std_groups"] == 1


def test_a_run_whose_episodes_are_all_cut(script, start, tmp_path, monkeypatch, capsys):
    """Catches a run that does nothing because nothing ends, without a word (#46), and NaN in it."""
    endless = " <tool> higher", 0.0, False, False, {"tool": "call", "error": False}
    monkeypatch.setattr(script.NumberEnv, "step", lambda env, action: endless)
    metrics, _ = h.run(script, tmp_path, init_from=start, context_length=4)
    assert capsys.readouterr().out.count("warning: every episode was cut") == 2
    assert h.finite(metrics) and all(line["charts/truncation_rate"] == 1 for line in metrics[1:])


# ---- Help, documentation, tinyagent.py, learning


def test_help_says_everything_once(script, monkeypatch, capsys):
    """Catches a flag without help, and a default in the text, which tyro writes again."""
    monkeypatch.setenv("COLUMNS", "200")
    assert h.command(script, "--help") == 0
    text = " ".join(re.sub(r"[│|╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for name in script.Args.__dataclass_fields__:
        flag = name.replace("_", "-")
        words = re.search(rf" --{flag}\b(?:, --no-{flag})?(.*?)\(default: ", text)[1]
        assert not re.search("--|default", words) and len(words.split()) > 2, f"{flag}: {words}"


def commands():
    """(script, flags) of all commands in README.md and the docstrings, and of flags alone there."""
    scripts = "|".join([*h.SCRIPTS, "tinyagent"])
    texts = [(path.stem, path.read_text().split('"""')[1]) for path in h.ROOT.glob("*.py")]
    texts += [("README", (h.ROOT / "README.md").read_text().replace("\\\n", " "))]
    for home, text in sorted(texts):
        yield from re.findall(rf"\b(?:python|uv run) ({scripts})\.py\b([^\n#;&|>`)]*)", text)
        alone = re.findall(r"^ {4}\w.*? {2,}(--\w[^#\n]*)$", text, re.M)
        yield from ((home, flags) for flags in alone if home in h.SCRIPTS)


@pytest.mark.parametrize("name, flags", list(commands()))
def test_documented_commands_parse(name, flags):
    """Catches a README or docstring that advertises a flag, or a value, that was renamed."""
    module = importlib.import_module(name)
    args = tyro.cli(module.Args, args=shlex.split(flags))
    if name in h.SCRIPTS and not args.cuda:
        module.check_args(args, module.ENVS[args.env_id](num_bugs=args.num_bugs))


@pytest.mark.parametrize("flags", [dict(d_model=6), dict(output=h.ROOT)], ids=str)
def test_tinyagent_refuses_bad_flags(flags, capsys):
    """Catches a traceback, and an --output found unwritable when the training is over."""
    args = tinyagent.Args(env_id="number", warm_start_steps=10**9, **flags)
    error = h.refused(capsys, tinyagent.main, args)
    assert all(f"--{name.replace('_', '-')}" in error for name in flags)


def test_it_learns(script, tmp_path):
    """Catches a sign, a mask or an alignment that is wrong although every number stays finite.
    Sampled success on the hidden number, mean over the last 768 of 4096 episodes with the default
    flags, from a shorter warm start: 0.33 to 0.38; with a learning rate of nothing it stays."""
    path, ends = tmp_path / "start.pt", []
    tinyagent.main(tinyagent.Args(env_id="number", warm_start_steps=150, output=path))
    steps = 32 // script.Args.num_groups  # iterations of smaller batches for one of the others
    flags = dict(env_id="number", init_from=path, eval_tasks=8, eval_every=1000)
    for rate, num_iterations in [(script.Args.learning_rate, 16 * steps), (1e-9, 3 * steps)]:
        flags |= dict(learning_rate=rate, num_iterations=num_iterations)
        script.train(script.Args(runs_dir=tmp_path / str(rate), **flags))
        lines = h.read_metrics(h.folder(tmp_path / str(rate)))
        last = [line["charts/success_rate"] for line in lines[-3 * steps :]]
        ends.append(sum(last) / len(last) - lines[0]["start/success_rate"])
    assert ends[0] > 0.12 and abs(ends[1]) < 0.08


def test_the_readme_environment_trains(tmp_path, monkeypatch):
    """Catches an interface that the README's example of a new environment no longer fits."""
    grpo = importlib.import_module("grpo")
    text, namespace = (h.ROOT / "README.md").read_text(), {"ToolEnv": grpo.ToolEnv}
    exec(re.search(r"```python\n(class EchoEnv.*?)\n\n\nENVS", text, re.S)[1], namespace)
    monkeypatch.setitem(grpo.ENVS, "echo", namespace["EchoEnv"])
    flags = dict(num_iterations=8, warm_start_steps=30, num_groups=8, eval_tasks=16)
    grpo.train(grpo.Args(env_id="echo", runs_dir=tmp_path, **flags))
    assert h.read_metrics(h.folder(tmp_path))[-1]["eval/success_rate"] == 1
