"""What a run must survive: SIGKILL, several processes and the death of one, odd flags, bad input, a
full disk, no network.

    SURVIVAL_KILLS=20            kills of a run
    SURVIVAL_COMBINATIONS=25     random combinations of flags a script
    SURVIVAL_SLOW=1              also what waits for a dead tracking server

The processes are real ones, forked from a server that has torch imported: a start costs little.
"""

import contextlib
import importlib
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import typing
from pathlib import Path
from unittest.mock import Mock

import helpers as h
import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

KILLS = int(os.environ.get("SURVIVAL_KILLS", 2))
COMBINATIONS = int(os.environ.get("SURVIVAL_COMBINATIONS", 3))
slow = pytest.mark.skipif("SURVIVAL_SLOW" not in os.environ, reason="takes long: SURVIVAL_SLOW=1")

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["test_survival", "torch._dynamo"])


def process(output, function, *args):
    """A process that calls function(*args) and prints into the file."""
    begun = server.Process(target=begin, args=(output, torch.get_num_threads(), function, *args))
    begun.start()
    return begun


def begin(output, threads, function, *args):
    sys.stdout = sys.stderr = open(output, "w", buffering=1)
    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))  # 8 GB, whatever a script asks for
    function(*args)


def execute(*argv):
    """python script.py flags"""
    sys.argv = [str(word) for word in argv]
    runpy.run_path(sys.argv[0], run_name="__main__")


# ---- Kills


def test_a_killed_run_resumes_to_the_same_end(script, start, tmp_path, monkeypatch):
    """Catches a kill that costs a line, doubles one, leaves half of one or no readable checkpoint;
    optimizer state, critic, counters, schedules, noise or the KL's reference lost by a resume, one
    that is killed while metrics.jsonl is empty, flags or a start that must be there again."""
    copy, runs_dir, output = tmp_path / "start.pt", tmp_path / "b", tmp_path / "output"
    flags = h.TINY | dict(num_iterations=4 * KILLS + 4, eval_every=3, save_every=2)
    flags |= dict(init_from=shutil.copy(start, copy), learning_rate=5e-3)
    a = h.run(script, tmp_path / "a", **flags)
    argv, rng = h.to_argv(**flags, runs_dir=runs_dir), random.Random(script.__name__)

    def is_time(kill, moment):
        lines = [line for file in runs_dir.glob("*/metrics.jsonl") for line in open(file)]
        return moment == "start" or len(lines) >= 4 * kill + 2

    for kill in range(KILLS):
        moment = ("loop", "loop", "start")[kill % 3]
        begun, end = process(output, execute, script.__file__, *argv), time.time() + 120
        while not is_time(kill, moment):
            assert begun.is_alive() and time.time() < end, output.read_text()
            time.sleep(0.001)
        time.sleep(rng.uniform(0, dict(loop=0.05, start=0.5)[moment]))
        begun.kill(), begun.join()
        assert begun.exitcode == -signal.SIGKILL
        path = h.folder(runs_dir) / "checkpoint.pt"
        print(f"kill {kill + 1} ({moment}), checkpoint of {h.load(path.parent)['iteration']}")
        argv = ["--resume", path]
    copy.unlink()
    with open(path.with_name("metrics.jsonl"), "a") as file:
        file.write('{"iteration": 9, "charts/epis')

    def killed(path, data, write_bytes=Path.write_bytes):
        write_bytes(path, data[: len(data) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Path, "write_bytes", killed)
        h.command(script, *argv)
    assert h.command(script, *argv) == 0
    b = h.results(runs_dir)
    assert h.iterations(b[0]) == list(range(4 * KILLS + 5))
    assert any(line["losses/grad_norm"] > 0 for line in b[0][1:])
    h.assert_same_end(a, b)
    assert not path.with_name("checkpoint.pt.tmp").exists()


def test_a_finished_run_is_left_alone(script, finished, capsys):
    """Catches a resume that writes, evaluates again or ends without a word where none is due."""
    before = h.contents(finished[script])
    capsys.readouterr()
    assert h.command(script, "--resume", finished[script] / "checkpoint.pt") == 0
    out, error = capsys.readouterr()
    assert int(re.search(r"--num-iterations (\d+)", out)[1]) > 1
    assert out.count("\n") == 1 and not error and h.contents(finished[script]) == before


# ---- Several processes

SHARED = dict(num_groups=6, group_size=2, micro_batch_size=3, ent_coef=0.01, kl_coef=0.1)
SHARED |= dict(learning_rate=5e-3, eval_tasks=8, eval_every=100)
FOUR = SHARED | dict(num_iterations=4, save_every=1)


def gradients(script, runs_dir, start):
    """The gradients of each optimizer step of two iterations in float64: a list of lists."""
    steps, clip = [], torch.nn.utils.clip_grad_norm_

    def spy(parameters, max_norm):
        steps.append([p.grad.clone() for p in parameters])
        return clip(parameters, max_norm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
        try:
            torch.set_default_dtype(torch.float64)
            h.run(script, runs_dir, init_from=start, **SHARED, **h.minibatches(script, 2))
        finally:
            torch.set_default_dtype(torch.float32)
    return steps


def worker(path, start):
    """A process of the job: float64 gradients of all scripts, and a tracked run of GRPO in whose
    fourth rollout the second process dies."""
    rank, open_group = os.environ["RANK"], dist.init_process_group
    dist.init_process_group = lambda name: dist.is_initialized() or open_group(name)  # one for all
    dist.destroy_process_group = lambda: None
    for name in h.SCRIPTS:
        steps = gradients(importlib.import_module(name), path / name, start)
        torch.save(steps, path / f"{name}-{rank}.pt")
    grpo, sys.modules["wandb"] = importlib.import_module("grpo"), Mock()

    def planted(n, model, envs):
        if n == 4:
            (path / f"tracked-{rank}").write_text(str(sys.modules["wandb"].init.call_count))
            assert rank == "0", "planted"

    with pytest.MonkeyPatch.context() as patch:
        h.on_training_rollouts(patch, grpo, before=planted)
        h.run(grpo, path / "dying", init_from=start, track=True, **FOUR)


def job(path, start):
    """What torchrun does with worker(), forking."""
    options = dict(run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    elastic_launch(LaunchConfig(1, 1, 2, start_method="fork", **options), worker)(path, start)


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory, start):
    """Folder, exit code and end of one job of two processes that run worker()."""
    path = tmp_path_factory.mktemp("job")
    launched = process(path / "output", job, path, start)
    launched.join(120)
    return path, launched.exitcode, time.time()


@pytest.mark.parametrize("name", h.SCRIPTS)
def test_gradients_of_two_processes(name, two_processes, start, tmp_path):
    """Catches gradients that are averaged instead of summed, groups played twice, and denominators
    of one process's share; in float64 nothing hides in rounding."""
    one = gradients(importlib.import_module(name), tmp_path, start)
    two, again = (torch.load(two_processes[0] / f"{name}-{rank}.pt") for rank in (0, 1))
    assert len(one) == (2 if name == "reinforce" else 4) and one[0][0].dtype == torch.float64
    assert all(grad.abs().max() > 0 for grad in one[0]) and h.same(two, again)
    torch.testing.assert_close(one, two, atol=1e-10, rtol=0)


def test_metrics_of_two_processes(two_processes, start, tmp_path):
    """Catches metrics of one process's episodes only, counted twice, or drifting apart."""
    one, _ = h.run(importlib.import_module("grpo"), tmp_path, init_from=start, **FOUR)
    two, _ = h.results(two_processes[0] / "dying")
    for a, b in zip(h.without_times(one[:4]), h.without_times(two), strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert one[3]["losses/grad_norm"] > 0


def test_one_process_writes_and_one_dies(two_processes):
    """Catches a folder or a tracked run for each process, lines that stand or print twice, and a
    job that hangs in a collective, or ends with 0, after a process died."""
    path, exitcode, end = two_processes
    for name, iterations in [*((name, [0, 1, 2]) for name in h.SCRIPTS), ("dying", [0, 1, 2, 3])]:
        files = sorted(file.name for file in h.folder(path / name).iterdir())
        assert files == ["args.json", "checkpoint.pt", "metrics.jsonl"]
        metrics, state = h.results(path / name)
        assert h.iterations(metrics) == iterations and state["iteration"] == iterations[-1]
    output = (path / "output").read_text()
    assert output.count("done in") == len(h.SCRIPTS) and output.count("\n  3/4: ") == 1
    assert [(path / f"tracked-{rank}").read_text() for rank in (0, 1)] == ["1", "0"]
    assert exitcode not in (0, None) and end - (path / "tracked-1").stat().st_mtime < 60


# ---- Flags

# Values that change the result in the runs of test_each_flag_changes_the_result, and others
CHANGES = dict(temperature=[0.1, 5.0], max_turns=[1, 6], context_length=[4, 9], malformed=["error"])
CHANGES |= dict(mask_observations=[False], filter_truncated=[True], process_reward=[0.1, 3.0])
CHANGES |= dict(tool_cost=[0.0, 3.0], tool_cost_warmup=[50], ent_coef=[1e-3, 1.0], norm=["std"])
CHANGES |= dict(kl_coef=[0.0, 5.0], anneal_kl=[False], credit=["episode", "turn"], gamma=[0.0, 0.9])
CHANGES |= dict(baseline=["none", "batch", "mean"], step_gamma=[0.0, 1.0], step_adv_coef=[0, 9])
CHANGES |= dict(loss_agg=["token-mean", "seq-mean-token-mean"], clip_coef=[1e-3])
CHANGES |= dict(clip_coef_high=[1e-3], update_epochs=[1, 3], learning_rate=[1e-9, 0.3])
CHANGES |= dict(gae_unit=["turn"], gae_lambda=[0.0, 1.0], norm_adv=[False], vf_coef=[0.0, 10.0])
CHANGES |= dict(clip_vloss=[True], critic_warmup_steps=[0, 50], max_grad_norm=[1e-6])
OTHERS = dict(seed=[0, 2**63], num_groups=[1, 5], group_size=[2, 3], num_minibatches=[1, 2])
OTHERS |= dict(eval_every=[1, 100], eval_tasks=[8, 33], eval_split=["dev"], save_every=[1])
OTHERS |= dict(micro_batch_size=[2, 1000], torch_deterministic=[False], warm_start_steps=[0, 7])
OTHERS |= dict(warm_start_batch_size=[1, 5], warm_start_learning_rate=[1e-6, 0.5])
OTHERS |= dict(
    dual_clip=[1.5, 9.0],
    warm_start_observations=[False],
    d_model=[8, 24],
    n_layers=[2, 3],
    n_heads=[1],
)
FIXED = dict(env_id=["bugfix"], num_bugs=[2], reward=["public"], init_from=["a"], runs_dir=["b"])


def known(script, table):
    """The table's flags that the script has, with their values that it knows."""
    for name, values in table.items():
        if kind := script.Args.__annotations__.get(name):
            literal = typing.get_origin(kind) is typing.Literal
            yield name, [x for x in values if not literal or x in typing.get_args(kind)]


def test_each_flag_changes_the_result(script, start, tmp_path):
    """Catches a flag that is parsed and never used. Three turns, so that some episodes run out of
    them; two epochs of large steps, so that ratios leave their bounds and the KL is not 0."""
    flags = dict(init_from=start, num_groups=8, max_turns=3, learning_rate=2e-2)
    flags |= {} if script.__name__ == "reinforce" else dict(num_minibatches=2, update_epochs=2)
    _, plain = h.run(script, tmp_path / "plain", **flags)
    for name, values in known(script, CHANGES):
        for value in {*values} - {getattr(script.Args, name)}:
            _, state = h.run(script, tmp_path / f"{name}={value}", **flags | {name: value})
            assert not h.same(state["model"], plain["model"]), f"{name}={value}"


@pytest.mark.parametrize("number", range(COMBINATIONS))
def test_random_flags(script, number, start, tmp_path):
    """Catches two flags that do not get along: a crash, NaN, noise of no seed, or flags that
    args.json lacks. Each keeps its default with probability a half; half of the runs warm up."""
    rng, ends = random.Random(f"{script.__name__} {number}"), []
    flags = h.TINY | dict(warm_start_steps=7, num_groups=3, group_size=2)
    table = known(script, CHANGES | OTHERS)
    flags |= {name: rng.choice(values) for name, values in table if rng.random() < 0.5}
    flags |= h.minibatches(script, flags["group_size"])  # which divides the episodes
    flags |= h.SIZE | dict(init_from=str(start)) if number % 2 else {}
    print(" ".join(h.to_argv(**flags)))
    for again in "ab":
        assert h.command(script, *h.to_argv(**flags, runs_dir=tmp_path / again)) == 0
        ends.append(h.results(tmp_path / again))
    h.assert_same_end(*ends)
    assert h.iterations(ends[0][0]) == [0, 1, 2] and h.finite(ends[0][0])
    written = json.loads((h.folder(tmp_path / "a") / "args.json").read_text())
    assert written.items() >= flags.items()
    assert written.keys() == script.Args.__dataclass_fields__.keys()


# ---- Bad input

MAY_BE_ZERO = """
    seed num_iterations warm_start_steps ent_coef kl_coef tool_cost tool_cost_warmup process_reward
    gamma step_gamma gae_lambda step_adv_coef vf_coef critic_warmup_steps
""".split()


@pytest.mark.parametrize("value", [-1, 0, math.nan, math.inf])
@pytest.mark.parametrize("name", [*h.SCRIPTS, "tinyagent"])
def test_numbers_out_of_range(name, value, tmp_path, monkeypatch, capsys):
    """Catches a crash with a traceback minutes later, or a run that silently means something else
    (#49), for any number among the flags: one line that names the flag, nothing written."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    for flag, kind in module.Args.__annotations__.items():
        is_number = {int, float} & {kind, *typing.get_args(kind)}
        if is_number and not (value == 0 and flag in MAY_BE_ZERO):
            train = module.main if name == "tinyagent" else module.train
            error = h.refused(capsys, train, module.Args(**{flag: value}))
            assert f"--{flag.replace('_', '-')} {value}" in error and len(error) < 250, error
    assert not os.listdir()


# What one may type by mistake; after # what the error must name, if not the first flag. A context
# must hold the shortest prompt and turn: 2 + 2 tokens, or an issue of 11 and the 3 of `submit`.
BAD_LINES = """
    --num-groups
    --num-groups 2.5
    --num-groups 4 5  # 5
    --num-groups 1 --num-minibatches 5  # --num-minibatches --group-size 8
    --num-groups 3 WORLD_SIZE=2 RANK=0  # --num-groups 2 processes
    --num-groups 3 WORLD_SIZE=2 RANK=1  # --num-groups 2 processes
    --group_size 0  # --group-size
    --group-size 1 --baseline loo
    --seed 18446744073709551616
    --gamma 1.0001
    --step-gamma 2
    --gae-lambda 1.1
    --context-length 3 --env-id number  # --context-length 4
    --context-length 13  # --context-length 14
    --eval-tasks 4
    --env-id Number
    --reward similarity --malformed error
    --reward public --env-id number
    --num-bugs 2 --env-id number
    --num-bugs 4
    --track yes  # yes
    --cuda
    --cuda False  # False
    --no-such-flag 1
    --d-model 6 --n-heads 2
    --n-heads 64 --d-model 64
    --runs-dir file
    --resume=
    --init-from start.pt  # --env-id
    --init-from start.pt --env-id number
    --init-from start.pt --env-id number --d-model 16 --n-layers 1 --n-heads 4
""".strip().splitlines()


@pytest.mark.parametrize("line", [line.strip() for line in BAD_LINES])
def test_bad_lines(line, start, tmp_path, monkeypatch, capsys):
    """Catches a traceback, a silent other meaning, `--cuda False` that runs on the GPU (#81),
    --cuda that falls back to the CPU (#82), a refusal after a minute, a folder left behind, and
    with torchrun groups that are dropped, or a process that waits for one that refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shutil.copy(start, "start.pt"), Path("file").touch()
    for name, value in re.findall(r" ([A-Z_]+)=(\d)", line):
        monkeypatch.setenv(name, value)
    typed, _, named = re.sub(r" [A-Z_]+=\d", "", line).partition("  # ")
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", typed)}
    for script in map(importlib.import_module, h.SCRIPTS):
        if flags - {"no_such_flag"} <= script.Args.__dataclass_fields__.keys():
            before = time.time()
            assert h.command(script, *typed.split()) == 2 and time.time() - before < 5
            out, error = capsys.readouterr()
            assert out == "" and "Traceback" not in error and len(error.splitlines()) < 20
            assert all(name in error for name in named.split() or re.findall("^--[a-z-]+", typed))
            if not error.startswith("error: "):
                assert "───" in error or "---" in error
                break  # tyro's box, the same for all scripts
            assert error.count("\n") == 1 and len(error) < 250
    assert sorted(os.listdir()) == ["file", "start.pt"]


@pytest.mark.parametrize("flag", ["max-turns", "num-groups", "group-size", "d-model", "n-layers"])
def test_sizes_that_cannot_fit(script, flag, tmp_path):
    """Catches a traceback out of the allocator, or a machine that swaps itself to death."""
    argv = ["--env-id", "number", f"--{flag}", 10**9, "--runs-dir", tmp_path / "runs"]
    begun = process(tmp_path / "output", execute, script.__file__, *argv)
    begun.join(30), begun.kill()
    error = (tmp_path / "output").read_text()
    assert begun.exitcode == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert f"--{flag}" in error


@pytest.fixture(scope="session")
def finished(tmp_path_factory, start):
    """The folder of a finished run of each script."""
    folders = {}
    for script in map(importlib.import_module, h.SCRIPTS):
        runs_dir = tmp_path_factory.mktemp(script.__name__)
        h.run(script, runs_dir, init_from=start, num_iterations=1, group_size=2)
        folders[script] = h.folder(runs_dir)
    return folders


@pytest.mark.parametrize("flag", ["--resume", "--init-from"])
def test_files_that_are_no_checkpoint(script, flag, finished, tmp_path, capsys):
    """Catches a traceback, random weights without a word, or a metrics.jsonl that was cut."""
    run_dir = shutil.copytree(finished[script], tmp_path / "run")
    good, weights = (run_dir / "checkpoint.pt").read_bytes(), h.load(run_dir)["model"]
    files = dict(empty=b"", text=b"hello\n", half=good[: len(good) // 2], cut=good[:-10])
    files |= dict(command=pickle.dumps(print, protocol=2), tensor=torch.ones(3), number=5, dict={})
    files |= dict(weights=weights, others={"model": {"x": torch.ones(3)}})
    files["narrow"] = {"model": {key: value[..., :1] for key, value in weights.items()}}
    for name, content in files.items():
        path = run_dir / name
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    (run_dir / "directory").mkdir()
    before = h.contents(tmp_path)
    for name in [*files, "directory", "missing"]:
        argv = h.to_argv(**h.TINY, runs_dir=tmp_path / "runs") if flag == "--init-from" else []
        error = h.refused(capsys, h.command, script, flag, run_dir / name, *argv)
        assert error.startswith(f"error: {flag} {run_dir / name}")
    assert h.contents(tmp_path) == before


def test_checkpoints_that_do_not_belong_there(script, finished, start, capsys):
    """Catches a run that goes on with another algorithm in the same metrics.jsonl, a KeyError on
    its critic. One of tinyagent.py belongs to --init-from, and is told so."""

    def resume(path):
        return h.refused(capsys, h.command, script, "--resume", path, "--num-iterations", 2)

    before = [h.contents(path) for path in finished.values()]
    others = [path / "checkpoint.pt" for other, path in finished.items() if other is not script]
    for path in [*others, start]:
        error = resume(path)
        assert error.startswith("error: --resume") and "--init-from" in error
    assert [h.contents(path) for path in finished.values()] == before


MAY_CHANGE = """
    num_iterations learning_rate eval_every eval_tasks eval_split save_every micro_batch_size cuda
    torch_deterministic track wandb_project_name wandb_entity resume
""".split()


def test_flags_that_a_resume_cannot_change(script, finished, capsys):
    """Catches a run that goes on as another one, or a flag beside --resume that is left out without
    a word: each flag but those of MAY_CHANGE."""
    path, tried = finished[script] / "checkpoint.pt", set(MAY_CHANGE)
    before, args = h.contents(path.parent), h.load(path.parent)["args"]
    for name, values in known(script, CHANGES | OTHERS | FIXED):
        if name not in MAY_CHANGE:
            other = next(x for x in values if x != args[name])
            argv = ["--resume", path, "--num-iterations", 2, *h.to_argv(**{name: other})]
            error = h.refused(capsys, h.command, script, *argv).replace("--no-", "--")
            assert f"--{name.replace('_', '-')}" in error, error
            tried.add(name)
    assert tried == script.Args.__dataclass_fields__.keys() and h.contents(path.parent) == before


# ---- A full disk, a tracker without a network


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize("file", ["metrics.jsonl.tmp", "checkpoint.pt.tmp"])
def test_a_full_disk(script, file, start, tmp_path, monkeypatch, capsys):
    """Catches a traceback, an error without file and reason, and a checkpoint lost to a half
    written one. The kernel itself refuses: given a path, torch.save makes a RuntimeError of it."""

    def fill(n, model, envs):
        path = h.folder(tmp_path) / file
        if n == 2:
            for link in Path("/proc/self/fd").iterdir():
                if link.exists() and path.exists() and link.samefile(path):
                    os.dup2(os.open("/dev/full", os.O_WRONLY), int(link.name))
            path.unlink(missing_ok=True)
            path.symlink_to("/dev/full")

    h.on_training_rollouts(monkeypatch, script, before=fill)
    args = h.make_args(script, tmp_path, init_from=start, save_every=1)
    assert h.exit_code(script.train, args) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and file.split(".")[0] in error
    assert "No space left on device" in error and h.load(h.folder(tmp_path))["iteration"] == 1


@pytest.mark.parametrize("kind", ["no key", pytest.param("no answer", marks=slow)])
def test_tracking_without_a_network(kind, start, tmp_path):
    """Catches a run that asks for a key and waits for ever, waits for a server, ends with its
    error, or never ends after "done" (#88, #89)."""
    pytest.importorskip("wandb")
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    argv = h.to_argv(**h.TINY, init_from=start, track=True, runs_dir=tmp_path / "runs")
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, never answers
        if kind == "no answer":
            env["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
            env["WANDB_API_KEY"] = "a" * 40
        options = dict(cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        options |= dict(env=env | {"HOME": str(tmp_path)}, timeout=60)
        done = subprocess.run([sys.executable, h.ROOT / "grpo.py", *argv], **options)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: --track")]
    assert len(warnings) == (kind == "no answer"), warnings
    assert h.iterations(h.results(tmp_path / "runs")[0]) == [0, 1, 2]
    assert kind != "no key" or list((tmp_path / "wandb").glob("offline-run-*"))
