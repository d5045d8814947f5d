"""Whole runs of the scripts: same seed, kill and resume, bad input, tracking, failures in the middle, logs, learning.

Every test runs on each script that exists. Most call train() in the test's own process with a tiny model; `cli`
executes the file as `python script.py` would, and a subprocess is used only where the process is the point. Each test
says which bug it would catch; #n is a public report of that bug.
"""

import gc
import importlib
import inspect
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tinyagent  # noqa: E402

SCRIPTS = [name for name in ("reinforce", "ppo", "grpo", "gigpo") if (ROOT / f"{name}.py").exists()]
SIZE = dict(d_model=16, n_layers=1, n_heads=2)

# Metric keys of an iteration of BugFix with evaluation: those of all scripts, and each script's own
COMMON_KEYS = """
    iteration global_step charts/episodic_return charts/episodic_length charts/success_rate charts/hack_rate
    charts/tool_calls charts/invalid_action_rate charts/truncation_rate charts/tokens_per_episode
    charts/learning_rate charts/SPS charts/total_tokens charts/total_episodes losses/policy_loss
    losses/entropy losses/grad_norm losses/old_approx_kl losses/approx_kl losses/advantage_mean
    losses/advantage_std time/rollout time/env time/update eval/success_rate eval/episodic_return
    eval/hack_rate eval/tool_calls eval/pass@8 eval/unseen_pairs_success_rate
""".split()
GROUP_KEYS = ["charts/frac_zero_std_groups", "losses/clipfrac", "losses/ref_kl"]
OWN_KEYS = {
    "reinforce": ["charts/frac_zero_std_groups", "losses/ref_kl"],
    "ppo": [*GROUP_KEYS, "losses/value_loss", "losses/explained_variance"],
    "grpo": GROUP_KEYS,
    "gigpo": [*GROUP_KEYS, "charts/step_group_size", "charts/frac_singleton_step_groups"],
}
START_KEYS = """
    iteration warm_start/episodes warm_start/tokens warm_start/seconds warm_start/loss_policy
    warm_start/loss_read warm_start/loss_edit warm_start/loss_test warm_start/loss_submit start/success_rate
    start/hack_rate start/tool_calls start/tasks_never_solved start/tasks_sometimes_solved
    start/tasks_always_solved start/informative_groups eval/success_rate eval/episodic_return eval/hack_rate
    eval/tool_calls eval/pass@8 eval/unseen_pairs_success_rate
""".split()
OWN_START_KEYS = {"ppo": ["warm_start/critic_episodes", "warm_start/critic_loss"]}


@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """Checkpoint of tinyagent.py on the hidden number: a start that sometimes succeeds, so that groups have a
    signal."""
    path = tmp_path_factory.mktemp("start") / "tinyagent.pt"
    tinyagent.main(
        tinyagent.Args(
            env_id="number",
            warm_start_steps=60,
            warm_start_batch_size=16,
            warm_start_learning_rate=0.02,
            output=path,
            **SIZE,
        )
    )
    return path


def make_args(script, runs_dir, **flags):
    """Args of a tiny run. Skips the test where the script has no such flag."""
    tiny = dict(
        env_id="number",
        warm_start_steps=20,
        warm_start_batch_size=8,
        warm_start_learning_rate=0.02,
        num_iterations=2,
        num_groups=4,
        group_size=4,
        eval_tasks=16,
        runs_dir=runs_dir,
    )
    known = script.Args.__dataclass_fields__
    missing = [name for name in flags if name not in known]
    if missing:
        pytest.skip(f"{script.__name__}.py has no flag {missing[0]}")
    return script.Args(**tiny | SIZE | flags)


def minibatches(script, n):
    """The flag for n optimizer steps a batch, where the script has it: REINFORCE always takes one."""
    return {"num_minibatches": n} if hasattr(script.Args, "num_minibatches") else {}


def folder(runs_dir):
    (run_dir,) = runs_dir.iterdir()
    return run_dir


def read_metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_times(lines, also=()):
    drop = lambda key: key.startswith(("time/", *also)) or key.endswith(("seconds", "SPS"))  # noqa: E731
    return [{key: value for key, value in line.items() if not drop(key)} for line in lines]


def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def run(script, runs_dir, **flags):
    """Metrics and final checkpoint of a tiny run."""
    script.train(make_args(script, runs_dir, **flags))
    return read_metrics(folder(runs_dir)), load(folder(runs_dir))


def same(a, b):
    """Equality of nested states, bit for bit."""
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def on_training_rollouts(
    monkeypatch, script, *, before=lambda n, model, envs: None, after=lambda n, batch: None
):
    """Calls back around the n-th rollout of the training loop, n = 1, 2, ...; those of evaluations pass unseen."""
    rollout, count = script.rollout, 0

    def spy(model, tokenizer, envs, *args, **kwargs):
        nonlocal count
        if sys._getframe(1).f_code.co_name != "train":
            return rollout(model, tokenizer, envs, *args, **kwargs)
        count += 1
        before(count, model, envs)
        batch = rollout(model, tokenizer, envs, *args, **kwargs)
        after(count, batch)
        return batch

    monkeypatch.setattr(script, "rollout", spy)


def with_reward(env, reward_of):
    """Replaces the rewards of this environment: reward_of(terminated)."""
    step = env.step

    def changed(action):
        observation, _, terminated, truncated, info = step(action)
        return observation, reward_of(terminated), terminated, truncated, info

    env.step = changed


def cli(script, monkeypatch, *argv):
    """Executes the file as `python script.py argv` does. Returns the exit code."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, argv)])
    try:
        runpy.run_path(script.__file__, run_name="__main__")
    except SystemExit as stop:
        return stop.code
    return 0


def refused(script, capsys, args):
    """The one line on standard error with which train refuses these args."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script.train(args)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


# ---- Same seed ---------------------------------------------------------------------------------------------------


def test_same_seed_same_run(script, tmp_path):
    """Catches unseeded noise, global generators and set order in results (#72), a seed that changes nothing, and an
    evaluation that draws from the training's noise or leaves the model changed."""
    a, a_state = run(script, tmp_path / "a", eval_every=1)
    torch.manual_seed(12345)  # whatever ran before must not matter
    torch.rand(100)
    b, b_state = run(script, tmp_path / "b", eval_every=1)
    assert without_times(a) == without_times(b) and same(a_state["model"], b_state["model"])
    rare, rare_state = run(script, tmp_path / "rare", eval_every=1000)
    assert without_times(rare, ["eval/"]) == without_times(a, ["eval/"]) and same(
        a_state["model"], rare_state["model"]
    )
    assert (
        "eval/success_rate" in a[1]
        and "eval/success_rate" not in rare[1]
        and "eval/success_rate" in rare[-1]
    )
    other, other_state = run(script, tmp_path / "other", seed=2)
    assert other[1]["losses/entropy"] != a[1]["losses/entropy"] and not same(
        a_state["model"], other_state["model"]
    )


def test_micro_batch_size_does_not_change_training(script, start, tmp_path, monkeypatch):
    """Catches denominators counted over a micro-batch, a step per micro-batch, and rows lost in the split."""
    tokens = []
    on_training_rollouts(monkeypatch, script, after=lambda n, batch: tokens.append(batch.tokens))
    flags = dict(init_from=start, ent_coef=0.01) | minibatches(script, 2)
    whole, whole_state = run(script, tmp_path / "whole", micro_batch_size=32, **flags)
    split, split_state = run(script, tmp_path / "split", micro_batch_size=3, **flags)
    assert torch.equal(tokens[0], tokens[2])  # iteration 1 of both runs
    for key in [key for key in whole[1] if key.startswith("losses/")]:
        assert [line[key] for line in split[1:]] == pytest.approx(
            [line[key] for line in whole[1:]], abs=1e-4
        ), key
    for name, value in whole_state["model"].items():
        torch.testing.assert_close(split_state["model"][name], value, atol=1e-4, rtol=0)


# ---- Kill and resume ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"kl_coef": 0.05}], ids=["plain", "kl"])
def test_a_killed_run_resumes_to_the_same_end(script, flags, tmp_path, monkeypatch):
    """Catches optimizer state, critic, counters, learning rate schedule, noise or the KL's frozen reference lost on
    resume, lines that stand twice, and a last line that the kill cut in the middle."""
    flags = dict(num_iterations=4, save_every=2, eval_every=2, learning_rate=5e-3) | flags
    a, a_state = run(script, tmp_path / "a", **flags)

    def kill(n, model, envs):
        if n == 4:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        on_training_rollouts(patch, script, before=kill)
        run(script, tmp_path / "b", **flags)
    run_dir = folder(tmp_path / "b")
    assert load(run_dir)["iteration"] == 2 and read_metrics(run_dir)[-1]["iteration"] == 3
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 4, "charts/epis')
    b, b_state = run(script, tmp_path / "b", resume=run_dir / "checkpoint.pt", **flags)
    assert [line["iteration"] for line in b] == [0, 1, 2, 3, 4]
    assert without_times(a) == without_times(b)
    for key in (
        "model",
        "optimizer",
        "reference",
        "totals",
        "iteration",
        *["value_head"] * (script.__name__ == "ppo"),
    ):
        assert same(a_state[key], b_state[key]), key
    assert any(
        line["losses/grad_norm"] > 0 for line in a[1:]
    )  # otherwise this test compares nothing


def test_resume_refuses_what_does_not_fit(script, start, tmp_path, capsys):
    """Catches a resumed run that silently goes on with other flags, a traceback on files that are no run's checkpoint,
    and a refusal that first cuts the metrics. A checkpoint of tinyagent.py belongs to --init-from, and is told so."""
    run(script, tmp_path / "runs")
    checkpoint = folder(tmp_path / "runs") / "checkpoint.pt"
    before = (checkpoint.parent / "metrics.jsonl").read_bytes()

    def resume(path, **flags):
        return refused(script, capsys, make_args(script, tmp_path / "runs", resume=path, **flags))

    for name, value in [
        ("learning_rate", 0.5),
        ("num_iterations", 9),
        ("seed", 2),
        ("env_id", "bugfix"),
        ("d_model", 32),
    ]:
        assert f"--{name.replace('_', '-')}" in resume(checkpoint, **{name: value})
    assert "give --anneal-kl" in resume(checkpoint, anneal_kl=False)  # what tyro accepts
    assert "leave --max-turns out" in resume(checkpoint, max_turns=3)
    assert (checkpoint.parent / "metrics.jsonl").read_bytes() == before
    assert "--init-from" in resume(start)
    torch.save([1, 2], tmp_path / "list.pt")
    assert "--resume" in resume(tmp_path / "list.pt")
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_resume_away_from_its_folder(script, tmp_path, capsys):
    """Catches a FileNotFoundError on metrics.jsonl where the checkpoint alone was copied to another folder."""
    run(script, tmp_path / "runs", num_iterations=1)
    (tmp_path / "alone").mkdir()
    shutil.copy(folder(tmp_path / "runs") / "checkpoint.pt", tmp_path / "alone")
    args = make_args(
        script, tmp_path / "runs", num_iterations=1, resume=tmp_path / "alone" / "checkpoint.pt"
    )
    error = refused(script, capsys, args)
    assert "--resume" in error and "metrics.jsonl" in error


def test_a_run_begun_with_init_from_resumes(script, start, tmp_path, capsys):
    """Catches a resume that demands --init-from again, or refuses it beside --resume, or takes another start's."""
    run(script, tmp_path, init_from=start, num_iterations=2, save_every=1)
    run_dir = folder(tmp_path)
    lines = read_metrics(run_dir)
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    torch.save(state | {"iteration": 1}, run_dir / "checkpoint.pt")
    for given in (None, start):
        flags = dict(
            resume=run_dir / "checkpoint.pt", init_from=given, num_iterations=2, save_every=1
        )
        again, state = run(script, tmp_path, **flags)
        assert [line["iteration"] for line in again] == [line["iteration"] for line in lines]
        assert state["args"]["init_from"] == str(start)
    assert "--init-from" in refused(
        script, capsys, make_args(script, tmp_path, **flags | {"init_from": tmp_path})
    )


def test_init_from_begins_with_those_weights(script, start, tmp_path, monkeypatch):
    """Catches a warm start on top of --init-from, and weights that are not loaded."""
    seen = []
    on_training_rollouts(
        monkeypatch, script, before=lambda n, model, envs: seen.append(deepcopy(model.state_dict()))
    )
    metrics, _ = run(script, tmp_path, init_from=start, num_iterations=1)
    saved = torch.load(start, weights_only=True)["model"]
    assert all(torch.equal(seen[0][key], value) for key, value in saved.items())
    warm = {key for key in metrics[0] if key.startswith("warm_start/")}
    assert (
        warm == set(OWN_START_KEYS.get(script.__name__, []))
        and metrics[0]["start/success_rate"] > 0.1
    )


def test_checkpoints_are_written_atomically(script, tmp_path, monkeypatch):
    """Catches a kill in the middle of torch.save that leaves no readable checkpoint."""
    path = tmp_path / "checkpoint.pt"
    script.save_checkpoint(path, model={"w": torch.ones(3)}, iteration=1)

    def half(state, file):
        Path(file).write_bytes(b"PK\x03\x04 half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        script.save_checkpoint(path, model={"w": torch.zeros(3)}, iteration=2)
    assert load(tmp_path)["iteration"] == 1


# ---- Bad input ---------------------------------------------------------------------------------------------------

BAD_FLAGS = [
    dict(seed=-1),
    dict(learning_rate=math.nan),
    dict(learning_rate=math.inf),
    dict(learning_rate=0.0),
    dict(temperature=0.0),
    dict(num_groups=0),
    dict(group_size=0),
    dict(group_size=1),
    dict(num_minibatches=5),
    dict(num_minibatches=0),
    dict(num_iterations=-1),
    dict(max_turns=0),
    dict(gamma=2.0),
    dict(gamma=-0.1),
    dict(gae_lambda=1.1),
    dict(gae_lambda=-0.1),
    dict(clip_coef=0.0),
    dict(vf_coef=-0.5),
    dict(vf_coef=math.nan),
    dict(critic_warmup_steps=-1),
    dict(micro_batch_size=0),
    dict(update_epochs=0),
    dict(context_length=0),
    dict(eval_every=0),
    dict(save_every=0),
    dict(eval_tasks=4),
    dict(kl_coef=-1.0),
    dict(ent_coef=math.nan),
    dict(warm_start_steps=-1),
    dict(warm_start_batch_size=0),
    dict(tool_cost=-1.0),
    dict(max_grad_norm=0.0),
    dict(n_layers=0),
    dict(d_model=10, n_heads=4),
    dict(num_bugs=2),
    dict(reward="public"),
    dict(num_bugs=4, env_id="bugfix"),
    dict(reward="similarity", malformed="error", env_id="bugfix"),
]


@pytest.mark.parametrize(
    "flags", BAD_FLAGS, ids=lambda flags: "-".join(f"{key}={value}" for key, value in flags.items())
)
def test_bad_flags_are_refused(script, flags, tmp_path, capsys):
    """Catches a crash with a traceback minutes later, or a run that silently means something else (#49): one line,
    exit 2, names the flag and one that works, nothing written."""
    if flags == {"group_size": 1} and script.__name__ == "ppo":
        pytest.skip("its baseline needs no group")
    error = refused(
        script,
        capsys,
        make_args(
            script,
            tmp_path / "runs",
            **({"num_groups": 2} if "num_minibatches" in flags else {}) | flags,
        ),
    )
    names = [f"--{name.replace('_', '-')}" for name in flags if name != "env_id"]
    assert all(name in error for name in names) and len(error) < 250, error
    if "num_minibatches" in flags and flags["num_minibatches"] == 5:
        assert all(
            name in error for name in ("--num-groups", "--group-size", " 8", "--num-minibatches 1")
        )
    assert not (tmp_path / "runs").exists()


def test_bad_paths_are_refused(script, start, tmp_path, capsys):
    """Catches a traceback, a run folder left behind and a warm start that is paid before a path is found wrong."""
    corrupt, taken, runs = tmp_path / "corrupt.pt", tmp_path / "file", tmp_path / "runs"
    corrupt.write_bytes(start.read_bytes()[:1000])
    taken.write_text("")
    for flags, names in [
        (dict(resume=tmp_path / "none.pt"), ["--resume", "none.pt"]),
        (dict(init_from=tmp_path / "none.pt"), ["--init-from", "none.pt"]),
        (dict(init_from=corrupt), ["--init-from", "corrupt.pt"]),
        (dict(resume=corrupt), ["--resume", "corrupt.pt"]),
        (dict(init_from=start, env_id="bugfix"), ["--init-from", "--env-id"]),
        (dict(init_from=start, d_model=32), ["--init-from"]),
        (dict(init_from=start, n_heads=4), ["--init-from"]),  # the weights' shapes are the same
        (dict(runs_dir=taken), ["--runs-dir"]),
        (dict(runs_dir=taken / "runs"), ["--runs-dir"]),
    ]:
        error = refused(script, capsys, make_args(script, **{"runs_dir": runs} | flags))
        assert all(name in error for name in names), error
        assert not runs.exists() or not list(runs.iterdir()), f"{flags} left a folder behind"


@pytest.mark.parametrize(
    "argv, name",
    [
        (["--cuda", "False"], "False"),
        (["--cuda=false"], "false"),
        (["--env-id", "foo"], "--env-id"),
        (["--num-groups", "many"], "--num-groups"),
        (["--no-such-flag", "1"], "--no-such-flag"),
        (["--group_size", "0"], "--group-size"),
        (["--group-size", "0"], "--group-size"),
    ],
)
def test_bad_command_lines(script, argv, name, tmp_path, monkeypatch, capsys):
    """Catches `--cuda False` that runs on the GPU (#81), an environment looked up by a raw KeyError, and an underscore
    spelling that is not understood."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli(script, monkeypatch, *argv) == 2
    error = capsys.readouterr().err
    assert name in error.replace("_", "-") and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_cuda_without_a_gpu_is_refused(script, tmp_path):
    """Catches a silent fallback to the CPU, a driver's traceback, and a refusal that takes a minute (#82)."""
    begin = time.time()
    done = subprocess.run(
        [sys.executable, ROOT / f"{script.__name__}.py", "--cuda"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == "" and time.time() - begin < 20
    assert done.stderr.startswith("error: --cuda") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_no_cuda_call_on_the_cpu(script, start, tmp_path, monkeypatch):
    """Catches code that asks CUDA something although the run is on the CPU, and dies without a driver (#82)."""

    def forbidden(*_args, **_kwargs):
        raise AssertionError("a CUDA call")

    for name in (
        "_lazy_init",
        "get_device_properties",
        "get_device_capability",
        "synchronize",
        "is_available",
    ):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    run(script, tmp_path, init_from=start, num_iterations=1)


def test_help_says_everything_once(script, monkeypatch, capsys):
    """Catches a flag without help, one that --help leaves out, and a default written in the text and again by tyro."""
    monkeypatch.setenv("COLUMNS", "200")
    assert cli(script, monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    entries = {}
    for entry in re.split(r"^[│| ]{1,3}(?=-)", text, flags=re.M)[1:]:
        entry = " ".join(re.sub(r"[│|]\s*$|[╭╮╰╯─]", " ", entry, flags=re.M).split())
        entries[re.match(r"(?:-h, )?(--[\w-]+)", entry)[1]] = entry
    for name in script.Args.__dataclass_fields__:
        entry = entries[f"--{name.replace('_', '-')}"]
        words = re.sub(r"\(default: .*?\)$", "", entry)
        assert words != entry and "default" not in words.lower(), entry
        assert len(words.split()) > 3, f"no help: {entry}"


def commands():
    """(file, script, flags) of every command in README.md and the docstrings, and of the flag lines in the latter."""
    found = []
    for path in [ROOT / f"{name}.py" for name in [*SCRIPTS, "tinyagent"]] + [ROOT / "README.md"]:
        if not path.exists():
            continue
        text = path.read_text()
        text = text.split('"""')[1] if path.suffix == ".py" else text.replace("\\\n", " ")
        for name, rest in re.findall(r"\b(?:python|uv run) (\w+)\.py\b([^\n#;&|>`)]*)", text):
            if name in (*SCRIPTS, "tinyagent"):
                found.append((path.name, name, re.sub(r"\$\{?\w+\}?", "1", rest)))
        if path.stem in SCRIPTS:
            found += [
                (path.name, path.stem, flags)
                for flags in re.findall(r"^ {4}\w.*? {2,}(--\w[^#\n]*)$", text, re.M)
            ]
    return found


@pytest.mark.parametrize("file, name, rest", commands())
def test_documented_commands_parse(file, name, rest):
    """Catches a README or docstring that advertises a flag, or a value, that was renamed or removed."""
    args = tyro.cli(importlib.import_module(name).Args, args=shlex.split(rest))
    if name in SCRIPTS and not args.cuda:
        importlib.import_module(name).check_args(args)


# ---- Tracking ----------------------------------------------------------------------------------------------------


def test_track_without_a_key_goes_offline(script, tmp_path):
    """Catches a prompt for a key that waits for ever, or a crash of the run (#88)."""
    pytest.importorskip("wandb")
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    flags = make_args(script, tmp_path / "runs", num_iterations=1)
    argv = [
        word
        for name in (
            "env_id",
            "num_iterations",
            "num_groups",
            "group_size",
            "eval_tasks",
            "warm_start_steps",
            "runs_dir",
        )
        for word in (f"--{name.replace('_', '-')}", str(getattr(flags, name)))
    ]
    done = subprocess.run(
        [sys.executable, ROOT / f"{script.__name__}.py", "--track", *argv],
        env=env | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert [line["iteration"] for line in read_metrics(folder(tmp_path / "runs"))] == [0, 1]
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_track_without_the_package_warns(script, start, tmp_path, monkeypatch, capsys):
    """Catches an ImportError that ends the run, and metrics silently not tracked (#88)."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    metrics, _ = run(script, tmp_path, init_from=start, track=True)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "--track" in line]
    assert len(warnings) == 1 and warnings[0].startswith("warning: ") and len(metrics) == 3


def test_tracked_steps_and_finish(script, start, tmp_path, monkeypatch):
    """Catches steps that go backwards or shift when an evaluation joins (#90), and a tracker whose finish hangs before
    the last checkpoint is written (#89)."""
    logged, finished = [], []

    class Tracker:
        def log(self, metrics, step):
            logged.append({"iteration": step} | metrics)

        def finish(self):
            finished.append(load(folder(tmp_path))["iteration"])

    monkeypatch.setattr(script, "start_tracking", lambda args, run_name: Tracker())
    metrics, _ = run(script, tmp_path, init_from=start, track=True, num_iterations=3, eval_every=2)
    assert logged == metrics and finished == [3]
    assert [line["iteration"] for line in metrics] == [0, 1, 2, 3]
    assert ["eval/success_rate" in line for line in metrics] == [True, False, True, True]


def test_the_tracker_gets_project_entity_and_flags(script, tmp_path, monkeypatch):
    """Catches runs that land in another project, and a run without a key that asks for one and waits (#88)."""
    given = {}

    class Wandb:
        api = type("Api", (), {"api_key": None})
        Settings = staticmethod(lambda **settings: settings)
        init = staticmethod(lambda **options: given.update(options))

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    args = make_args(script, tmp_path, track=True, wandb_project_name="mine", wandb_entity="team")
    script.start_tracking(args, "a run")
    assert (given["project"], given["entity"], given["name"], given["mode"]) == (
        "mine",
        "team",
        "a run",
        "offline",
    )
    assert given["config"]["num_groups"] == 4


@pytest.mark.parametrize("wanted", [True, False])
def test_torch_deterministic(script, start, tmp_path, monkeypatch, wanted):
    """Catches a flag that does the opposite of what it says, and a missing workspace variable (#73)."""
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run(script, tmp_path, init_from=start, num_iterations=0, torch_deterministic=wanted)
    assert asked == [True] * wanted
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if wanted else None)


@pytest.mark.parametrize("anneal, expected", [(True, [0.4, 0.3, 0.2, 0.1]), (False, [0.4] * 4)])
def test_the_kl_penalty_fades(script, start, tmp_path, monkeypatch, anneal, expected):
    """Catches a penalty that stays when it should fade, or is gone one iteration early."""
    compute_loss, seen = script.compute_loss, []

    def spy(*args, **kwargs):
        seen.append(kwargs["kl_coef"])
        return compute_loss(*args, **kwargs)

    monkeypatch.setattr(script, "compute_loss", spy)
    flags = dict(num_iterations=4, kl_coef=0.4, anneal_kl=anneal) | minibatches(script, 1)
    run(script, tmp_path, init_from=start, **flags)
    assert seen == pytest.approx(expected)


# ---- Failures in the middle --------------------------------------------------------------------------------------


def test_a_nan_gradient_stops_the_run(script, start, tmp_path, monkeypatch):
    """Catches a run that goes on with NaN weights for hours, and one that saves them (#52)."""
    compute_loss, states = script.compute_loss, []
    on_training_rollouts(
        monkeypatch,
        script,
        before=lambda n, model, envs: states.append(deepcopy(model.state_dict())),
    )

    def planted(*args, **kwargs):
        loss, metrics = compute_loss(*args, **kwargs)
        return loss * (math.nan if len(states) == 2 else 1.0), metrics

    monkeypatch.setattr(script, "compute_loss", planted)
    with pytest.raises(SystemExit) as stop:
        script.train(
            make_args(
                script, tmp_path, init_from=start, num_iterations=4, num_groups=8, save_every=1
            )
        )
    error = stop.value.code  # printed by the interpreter, which then exits with 1
    assert error.startswith("error: ") and "iteration 2" in error and "\n" not in error
    assert [line["iteration"] for line in read_metrics(folder(tmp_path))] == [0, 1]
    saved = load(folder(tmp_path))
    assert same(saved["model"], states[1]) and all(
        value.isfinite().all() for value in saved["model"].values()
    )
    assert saved["iteration"] == 1


def test_a_policy_of_nan_stops_the_run(script, start, tmp_path, monkeypatch):
    """Catches a diverged policy that is not noticed: all its groups fail, so there is no gradient that could tell."""

    def diverge(n, model, envs):
        if n == 2:
            model.head.weight.data.fill_(math.nan)

    on_training_rollouts(monkeypatch, script, before=diverge)
    args = make_args(script, tmp_path, init_from=start, num_iterations=3, save_every=1, kl_coef=0.0)
    with pytest.raises(SystemExit) as stop:
        script.train(args)
    assert (
        "error: " in str(stop.value.code)
        and "iteration 2" in stop.value.code
        and "nan" in stop.value.code
    )
    assert [line["iteration"] for line in read_metrics(folder(tmp_path))] == [0, 1]


def test_weights_of_nan_are_not_saved(script, tmp_path):
    """Catches a checkpoint of NaN, called finite, after a warm start that diverged."""
    with pytest.raises(SystemExit) as stop:
        script.train(make_args(script, tmp_path, num_iterations=0, warm_start_learning_rate=1e9))
    assert "--warm-start-learning-rate" in stop.value.code
    assert not (folder(tmp_path) / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    "flags",
    [
        dict(seed=-1),
        dict(n_layers=0),
        dict(d_model=6),
        dict(warm_start_learning_rate=math.nan),
        dict(output=ROOT),
    ],
    ids=str,
)
def test_tinyagent_refuses_bad_flags(flags, capsys):
    """Catches a traceback, and an --output found unwritable when the training is over."""
    with pytest.raises(SystemExit) as stop:
        tinyagent.main(tinyagent.Args(env_id="number", warm_start_steps=10**9, **flags))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: --") and error.count("\n") == 1
    assert all(name.replace("_", "-") in error for name in flags)


@pytest.mark.parametrize("reward", [math.nan, -math.inf, None])
def test_a_reward_that_is_no_number_is_named(script, reward, start, tmp_path, monkeypatch):
    """Catches a NaN that spreads through the group into every weight while the run "succeeds" (#67)."""
    on_training_rollouts(
        monkeypatch,
        script,
        before=lambda n, model, envs: with_reward(envs[3], lambda terminated: reward),
    )
    with pytest.raises(ValueError, match=rf"episode 3\b.*turn 0.*reward is {reward}"):
        run(script, tmp_path, init_from=start)


def test_an_environment_that_raises_stops_the_run(script, start, tmp_path, monkeypatch):
    """Catches a broad except that turns a broken environment into an honest-looking reward 0 (#66)."""

    def broken(action):
        raise OSError("sandbox is gone")

    on_training_rollouts(
        monkeypatch, script, before=lambda n, model, envs: setattr(envs[3], "step", broken)
    )
    with pytest.raises(OSError, match="sandbox is gone"):
        run(script, tmp_path, init_from=start)


def test_constant_groups_leave_the_weights_alone(script, start, tmp_path, monkeypatch, capsys):
    """Catches advantages out of rounding, a step on momentum alone, a loop that waits for groups that differ (#48),
    and a run that says nothing (#46). Iteration 1 has a signal, so that momentum is there; from 2 on every reward is
    0.7."""
    if script.__name__ == "ppo":
        pytest.skip("its critic learns from constant rewards")
    states = []

    def before(n, model, envs):
        states.append(deepcopy(model.state_dict()))
        for env in envs if n > 1 else []:
            with_reward(env, lambda terminated: 0.7 * terminated)

    on_training_rollouts(monkeypatch, script, before=before)
    flags = dict(num_iterations=3, num_groups=8, kl_coef=0.0)
    flags |= (
        {"step_gamma": 1.0} if hasattr(script.Args, "step_gamma") else {}
    )  # a discount tells early from late turns
    metrics, state = run(script, tmp_path, init_from=start, **flags)
    assert not same(states[0], states[1])
    assert same(states[1], states[2]) and same(states[2], state["model"])
    assert capsys.readouterr().out.count("warning: every group is constant") == 2
    for line in metrics[2:]:
        assert (
            line["losses/grad_norm"]
            == line["losses/policy_loss"]
            == line["losses/advantage_std"]
            == 0
        )
        assert line.get("charts/frac_zero_std_groups", 1) == 1 and line[
            "charts/episodic_return"
        ] == pytest.approx(0.7)


def test_a_context_too_short_is_told(script, start, tmp_path, capsys):
    """Catches a run that does nothing because every episode is cut before its answer, without a word (#46)."""
    metrics, state = run(script, tmp_path, init_from=start, context_length=3)
    assert capsys.readouterr().out.count("warning: every episode was cut") == 2
    assert all(
        line["charts/truncation_rate"] == 1 and line["charts/success_rate"] == 0
        for line in metrics[1:]
    )
    assert all(math.isfinite(value) for line in metrics for value in line.values())


def test_memory_does_not_grow(script, start, tmp_path, monkeypatch):
    """Catches rollouts that record a graph, and metrics or batches kept over iterations (#80)."""
    counts = []

    def count(n, model, envs):
        if n in (2, 4):
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    def no_graph(n, batch):
        assert not any(value.requires_grad for value in batch if torch.is_tensor(value))

    on_training_rollouts(monkeypatch, script, before=count, after=no_graph)
    run(script, tmp_path, init_from=start, num_iterations=4)
    assert counts[1] <= counts[0]


# ---- Metrics -----------------------------------------------------------------------------------------------------


def test_bugfix_metric_keys(script, tmp_path):
    """Catches a metric that was renamed, dropped, or written by one script only, and NaN in a log (not even JSON)."""
    metrics, _ = run(script, tmp_path, env_id="bugfix", eval_every=1, warm_start_steps=10)
    assert set(metrics[0]) == {*START_KEYS, *OWN_START_KEYS.get(script.__name__, [])}
    for line in metrics[1:]:
        assert set(line) == {*COMMON_KEYS, *OWN_KEYS[script.__name__]}
    assert all(
        isinstance(value, (int, float)) and math.isfinite(value)
        for line in metrics
        for value in line.values()
    )
    assert [line["iteration"] for line in metrics] == [0, 1, 2]


def test_ref_kl_is_logged_where_it_is_used(script, start, tmp_path):
    """Catches a KL to a reference that moves with the policy: it is 0 before the first step, positive later."""
    flags = dict(kl_coef=0.1, learning_rate=1e-2, num_groups=8) | minibatches(script, 1)
    metrics, _ = run(script, tmp_path, init_from=start, **flags)
    assert (
        metrics[1]["losses/ref_kl"] == pytest.approx(0, abs=1e-6)
        and metrics[2]["losses/ref_kl"] > 1e-4
    )


@pytest.mark.parametrize("mask_observations", [True, False])
def test_before_the_first_step_the_ratio_is_one(script, start, mask_observations, tmp_path):
    """#17, #18: catches a loss that scores at another temperature, position or mask than was sampled at, or a reference
    that does; observations without their log pi_old; and a batch that gives no gradient would hide it."""
    flags = dict(
        num_iterations=1, temperature=0.7, num_groups=8, mask_observations=mask_observations
    )
    flags |= minibatches(script, 1)
    _, line = run(script, tmp_path, init_from=start, **flags)[0]
    assert abs(line["losses/old_approx_kl"]) < 1e-5 and abs(line["losses/approx_kl"]) < 1e-8
    assert (
        line["losses/ref_kl"] < 1e-8
        and line.get("losses/clipfrac", 0) == 0
        and line["losses/grad_norm"] > 0
    )


def test_logged_losses_are_means_over_the_sampled_tokens(script, start, tmp_path, monkeypatch):
    """#3, #6: catches observations, padding or micro-batches in a denominator: every loss but the policy's is the sum
    over micro-batches by the number of tokens that the policy sampled."""
    compute_loss, batches, sums = script.compute_loss, [], []

    def spy(*args, **kwargs):
        sums.append(compute_loss(*args, **kwargs)[1])
        return compute_loss(*args, **kwargs)

    on_training_rollouts(monkeypatch, script, after=lambda n, batch: batches.append(batch))
    monkeypatch.setattr(script, "compute_loss", spy)
    flags = dict(num_iterations=1, micro_batch_size=5, temperature=0.5) | minibatches(script, 1)
    _, line = run(script, tmp_path, init_from=start, **flags)[0]
    for key in sums[0]:
        count = 1 if key == "losses/policy_loss" else int(batches[0].loss_mask.sum())
        assert line[key] == pytest.approx(
            sum(part[key].item() for part in sums) / count, rel=1e-5, abs=1e-7
        ), key
    assert len(sums) == 4 and line["losses/entropy"] > 0


@pytest.mark.parametrize("loss_agg", ["token-mean", "seq-mean-token-mean", "constant"])
def test_weights_count_sampled_tokens(script, loss_agg, start, tmp_path, monkeypatch):
    """Catches --loss-agg weights over observations or padding, or over a micro-batch: those of a batch sum to 1, or to
    the share of the token budget that was spent."""
    compute_loss, weights, masks = script.compute_loss, [], []

    def spy(*args, **kwargs):
        given = inspect.signature(compute_loss).bind(*args, **kwargs).arguments
        weights.append(given["weights"]), masks.append(given["loss_mask"])
        return compute_loss(*args, **kwargs)

    monkeypatch.setattr(script, "compute_loss", spy)
    flags = dict(num_iterations=1, micro_batch_size=5, num_minibatches=1, loss_agg=loss_agg)
    run(script, tmp_path, init_from=start, **flags)
    total = (
        sum(mask.sum().item() for mask in masks) / (16 * 10) if loss_agg == "constant" else 1
    )  # 5 turns of 2 tokens
    assert sum(part.sum().item() for part in weights) == pytest.approx(total) and len(weights) == 4
    assert all((part[mask == 0] == 0).all() for part, mask in zip(weights, masks))


def test_counters_add_up(script, start, tmp_path, monkeypatch):
    """Catches counters that restart, count padding or observations, or forget episodes that were cut."""
    batches = []
    on_training_rollouts(monkeypatch, script, after=lambda n, batch: batches.append(batch))
    metrics, _ = run(script, tmp_path, init_from=start, num_iterations=3, context_length=6)
    turns = tokens = 0
    for n, (line, batch) in enumerate(zip(metrics[1:], batches, strict=True), 1):
        here = sum(
            len(set(ids[mask > 0].tolist())) for ids, mask in zip(batch.turn_ids, batch.loss_mask)
        )
        turns, tokens = turns + here, tokens + int((batch.loss_mask > 0).sum())
        assert (
            line["global_step"],
            line["charts/total_tokens"],
            line["charts/total_episodes"],
        ) == (
            turns,
            tokens,
            16 * n,
        )
        assert line["charts/episodic_length"] == here / 16
        assert line["charts/tokens_per_episode"] == (batch.loss_mask > 0).sum() / 16
        assert line["charts/episodic_return"] == pytest.approx(
            batch.rewards.sum().item() / 16, abs=1e-6
        )
        assert line["charts/truncation_rate"] == batch.truncated.float().mean()
        assert line["charts/learning_rate"] == pytest.approx(
            script.Args.learning_rate * (4 - n) / 3
        )


def test_one_rare_tool_leaves_the_log_finite(script, tmp_path):
    """Catches the mean over no token, NaN, for a tool that the last warm-start batches never call."""
    metrics, _ = run(
        script, tmp_path, warm_start_steps=10, warm_start_batch_size=1, num_iterations=1, seed=7
    )
    assert all(math.isfinite(value) for line in metrics for value in line.values())


# ---- Flags do what they say --------------------------------------------------------------------------------------


def test_zero_iterations_stop_after_the_warm_start(script, tmp_path, capsys):
    """Catches a division by zero in the schedule, and a run that leaves nothing."""
    script.train(make_args(script, tmp_path, num_iterations=0))
    (line,) = read_metrics(folder(tmp_path))
    assert (
        line["iteration"] == 0
        and line["warm_start/episodes"] == 160
        and "eval/success_rate" in line
    )
    assert json.loads((folder(tmp_path) / "args.json").read_text())["num_iterations"] == 0
    assert "done in" in capsys.readouterr().out


@pytest.fixture(scope="session")
def plain_runs():
    return {}


CHANGES = [
    dict(mask_observations=False),
    dict(filter_truncated=True),
    dict(temperature=0.7),
    dict(ent_coef=0.05),
    dict(max_turns=2),
    dict(process_reward=0.1),
    dict(tool_cost=0.2),
    dict(tool_cost_warmup=9),
    dict(malformed="error"),
    dict(max_grad_norm=1e-3),
    dict(gamma=0.8),
    dict(credit="turn"),
    dict(credit="episode"),
    dict(baseline="mean"),
    dict(norm="std"),
    dict(kl_coef=1.0),
    dict(loss_agg="token-mean"),
    dict(loss_agg="seq-mean-token-mean"),
    dict(update_epochs=3),
    dict(num_minibatches=1),
    dict(clip_coef=0.01),
    dict(clip_coef_high=0.01),
    dict(context_length=7),
    dict(learning_rate=1e-3),
    dict(gae_unit="turn"),
    dict(gae_lambda=0.5),
    dict(norm_adv=False),
    dict(vf_coef=0.0),
    dict(clip_vloss=True),
    dict(critic_warmup_steps=5),
]


@pytest.mark.parametrize(
    "flags", CHANGES, ids=lambda flags: "-".join(f"{key}={value}" for key, value in flags.items())
)
def test_each_flag_changes_the_result(script, flags, start, plain_runs, tmp_path, tmp_path_factory):
    """Catches a flag that is parsed and never used. (max_turns 3, so that some episodes run out of turns.)"""
    base = dict(
        init_from=start, num_iterations=2, num_groups=8, max_turns=3, learning_rate=2e-2
    )  # a KL needs a step
    base |= minibatches(script, 2)
    base |= (
        {"update_epochs": 2} if hasattr(script.Args, "update_epochs") else {}
    )  # so that ratios leave their bounds
    args = make_args(script, tmp_path, **base | flags)
    if all(
        getattr(args, name) == getattr(script.Args, name) and name not in base for name in flags
    ):
        pytest.skip("the default")
    if script not in plain_runs:
        plain_runs[script] = run(script, tmp_path_factory.mktemp("plain"), **base)
    script.train(args)
    assert not same(load(folder(tmp_path))["model"], plain_runs[script][1]["model"])
    assert all(math.isfinite(value) for value in read_metrics(folder(tmp_path))[1].values())


def test_warm_start_observations_change_the_warm_start(script, tmp_path):
    """Catches a warm start that ignores --no-warm-start-observations: then the tools' replies are not learned."""
    losses = []
    for on in (True, False):
        script.train(
            make_args(
                script,
                tmp_path / str(on),
                num_iterations=0,
                warm_start_steps=40,
                warm_start_observations=on,
            )
        )
        losses.append(read_metrics(folder(tmp_path / str(on)))[0]["warm_start/loss_call"])
    assert losses[0] < losses[1] - 0.3


@pytest.mark.parametrize("reward, num_bugs", [("public", 2), ("partial", 1), ("similarity", 1)])
def test_reward_kinds_and_two_bugs_reach_the_environment(
    script, reward, num_bugs, tmp_path, monkeypatch
):
    """Catches --reward or --num-bugs that stop on the way to the environment, and a turn limit that does not grow."""
    seen = []
    on_training_rollouts(
        monkeypatch,
        script,
        before=lambda n, model, envs: seen.extend(envs),
        after=lambda n, batch: batches.append(batch),
    )
    batches = []
    metrics, _ = run(
        script,
        tmp_path,
        env_id="bugfix",
        reward=reward,
        num_bugs=num_bugs,
        num_iterations=1,
        warm_start_steps=10,
    )
    assert {env.reward for env in seen} == {reward} and {env.max_turns for env in seen} == {
        6 if num_bugs == 1 else 8
    }
    assert batches[0].rewards.shape[1] == (6 if num_bugs == 1 else 8)
    assert {info["pair"].count("+") for info in batches[0].infos} == {num_bugs - 1}
    assert all(math.isfinite(value) for value in metrics[-1].values())


def test_tool_cost_warms_up(script, start, tmp_path, monkeypatch):
    """Catches a tool cost that is full from the start (a policy then drops the tool), or never gets there."""
    costs = []
    on_training_rollouts(
        monkeypatch,
        script,
        before=lambda n, model, envs: costs.append({env.tool_cost for env in envs}),
    )
    run(script, tmp_path, init_from=start, tool_cost=0.4, tool_cost_warmup=4, num_iterations=5)
    assert [min(cost) for cost in costs] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4]) and all(
        len(cost) == 1 for cost in costs
    )


def test_groups_are_episodes_of_one_task_and_noise_differs(script, start, tmp_path, monkeypatch):
    """Catches groups that mix tasks, the same tasks in every iteration, and rows that share their noise."""
    batches = []
    on_training_rollouts(monkeypatch, script, after=lambda n, batch: batches.append(batch))
    run(script, tmp_path, init_from=start, num_groups=8)
    tasks = [[info["pair"] for info in batch.infos] for batch in batches]
    for batch, pairs in zip(batches, tasks):
        assert batch.group_ids.bincount().tolist() == [4] * 8
        assert len(set(zip(batch.group_ids.tolist(), pairs))) == 8
        assert len({tuple(row) for row in batch.tokens.tolist()}) > 16
    assert tasks[0] != tasks[1]


def test_more_epochs_clip(script, start, tmp_path):
    """Catches old log-probabilities that are taken again in each epoch: the ratio would stay 1 and nothing be
    clipped."""
    metrics, _ = run(script, tmp_path, init_from=start, update_epochs=4, learning_rate=1e-2)
    assert max(line["losses/clipfrac"] for line in metrics[1:]) > 0


def test_only_training_tasks_train(script, tmp_path, monkeypatch):
    """Catches test tasks in the warm start or the training, and an evaluation on another split than --eval-split
    says."""
    stage, splits = ["train"], {"warm_start": set(), "train": set(), "evaluate": set()}
    for name in ("warm_start", "evaluate"):

        def staged(*args, name=name, inner=getattr(script, name), **kwargs):
            stage.append(name)
            result = inner(*args, **kwargs)
            stage.pop()
            return result

        monkeypatch.setattr(script, name, staged)
    task = script.NumberEnv.task

    def spy(split, index, num_bugs=1):
        splits[stage[-1]].add(split)
        return task(split, index, num_bugs)

    monkeypatch.setattr(script.NumberEnv, "task", staticmethod(spy))
    run(script, tmp_path, eval_split="dev", num_iterations=1)
    assert (
        splits["warm_start"] == splits["train"] == {"train"}
        and splits["evaluate"] <= {"dev", "unseen"}
        and "dev" in splits["evaluate"]
    )


# ---- Learning ----------------------------------------------------------------------------------------------------


def test_it_learns(script, tmp_path):
    """Catches a sign, a mask or an alignment that is wrong although every number stays finite. Sampled success on the
    hidden number, mean over the last 768 of 4096 episodes with the default flags, from a shorter warm start: 0.33 to
    0.38; with a learning rate of nothing it stays where it was."""
    path = tmp_path / "start.pt"
    tinyagent.main(tinyagent.Args(env_id="number", warm_start_steps=150, output=path))
    ends = []
    steps = 32 // script.Args.num_groups  # iterations of smaller batches for one of the others
    for learning_rate, iterations in [(script.Args.learning_rate, 16 * steps), (1e-9, 3 * steps)]:
        runs_dir = tmp_path / str(learning_rate)
        script.train(
            script.Args(
                env_id="number",
                init_from=path,
                learning_rate=learning_rate,
                num_iterations=iterations,
                eval_tasks=8,
                eval_every=1000,
                runs_dir=runs_dir,
            )
        )
        lines = read_metrics(folder(runs_dir))
        last = [line["charts/success_rate"] for line in lines[-3 * steps :]]
        ends.append(sum(last) / len(last) - lines[0]["start/success_rate"])
    assert ends[0] > 0.12 and abs(ends[1]) < 0.08


def test_the_readme_environment_trains(tmp_path, monkeypatch):
    """Catches an interface that the README's example of a new environment no longer fits."""
    code = re.search(
        r"```python\n(class EchoEnv.*?)\n\n\nENVS", (ROOT / "README.md").read_text(), re.S
    )[1]
    namespace = {}
    exec(code, namespace)
    grpo = importlib.import_module("grpo")
    monkeypatch.setitem(grpo.ENVS, "echo", namespace["EchoEnv"])
    args = dict(
        env_id="echo",
        num_iterations=8,
        warm_start_steps=30,
        num_groups=8,
        eval_tasks=16,
        runs_dir=tmp_path,
    )
    grpo.train(grpo.Args(**args))
    assert read_metrics(folder(tmp_path))[-1]["eval/success_rate"] == 1
