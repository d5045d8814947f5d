"""What a run must survive: SIGKILL, several processes and the death of one, odd flags, bad input, a broken tracker.

The counts below are small; these variables raise them:

    SURVIVAL_KILLS=20            kills of a run (SURVIVAL_SCRIPTS=grpo,ppo says of which scripts)
    SURVIVAL_COMBINATIONS=25     random combinations of flags a script
    SURVIVAL_SLOW=1              also what needs a minute: torchrun's refusal, a tracker whose server never answers

The processes are real ones, forked from a server that has torch imported, so that a start costs little.
"""

# ruff: noqa: F811 (script and start are fixtures)

import importlib
import json
import math
import multiprocessing
import os
import pickle
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tyro
from test_run import (  # noqa: F401 (script and start are fixtures)
    ROOT,
    SCRIPTS,
    SIZE,
    cli,
    folder,
    load,
    make_args,
    minibatches,
    on_training_rollouts,
    read_metrics,
    run,
    same,
    script,
    start,
    without_times,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

KILLS = int(os.environ.get("SURVIVAL_KILLS", 2))
KILLED = os.environ.get("SURVIVAL_SCRIPTS", "grpo").split(",")
COMBINATIONS = int(os.environ.get("SURVIVAL_COMBINATIONS", 3))
slow = pytest.mark.skipif(
    "SURVIVAL_SLOW" not in os.environ, reason="takes a minute: SURVIVAL_SLOW=1"
)


def to_argv(**flags):
    """The flags as a command line has them."""
    argv = []
    for name, value in flags.items():
        name = name.replace("_", "-")
        argv += (
            [f"--{'' if value else 'no-'}{name}"]
            if isinstance(value, bool)
            else [f"--{name}", str(value)]
        )
    return argv


server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["test_survival", "torch._dynamo"])


def process(output, target, *args, threads=1):
    """A process that calls target(*args) and prints into the file."""
    begun = server.Process(target=begin, args=(output, threads, target, *args))
    begun.start()
    return begun


def begin(output, threads, target, *args):
    sys.stdout = sys.stderr = open(output, "w", buffering=1)
    torch.set_num_threads(threads)
    target(*args)


def execute(*argv):
    """python script.py flags"""
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


# ---- SIGKILL -----------------------------------------------------------------------------------------------------


class Killer:
    """Runs a script as a process and kills it: at a random moment of the loop, in the middle of writing a checkpoint,
    or at a random moment of starting again."""

    def __init__(self, script, runs_dir, flags):
        self.command = [script.__file__, *to_argv(**flags, runs_dir=runs_dir)]
        self.runs_dir, self.output = runs_dir, runs_dir.parent / "output"
        self.rng, self.in_write = random.Random(zlib.crc32(script.__name__.encode())), 0

    def start(self, *argv):
        self.begin, threads = time.time(), torch.get_num_threads()
        self.process = process(
            self.output, execute, *self.command, *map(str, argv), threads=threads
        )

    def wait_until(self, condition, every):
        while not condition():
            assert self.process.is_alive(), f"ended by itself: {self.output.read_text()}"
            assert time.time() < self.begin + 120, "no progress"
            time.sleep(every)

    def iteration(self):
        lines = [
            line
            for path in self.runs_dir.glob("*/metrics.jsonl")
            for line in path.read_text().splitlines()
        ]
        return len(lines) - 1 if list(self.runs_dir.glob("*/checkpoint.pt")) else -1

    def kill(self, moment, iteration):
        if moment == "start":
            time.sleep(self.rng.uniform(0, 0.5))
        else:
            self.wait_until(lambda: self.iteration() >= iteration, every=0.01)
            if moment == "write":
                self.wait_until(lambda: list(self.runs_dir.glob("*/checkpoint.tmp")), every=0.0005)
            else:
                time.sleep(self.rng.uniform(0, 0.2))
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL
        self.in_write += bool(list(self.runs_dir.glob("*/checkpoint.tmp")))


@pytest.mark.parametrize("name", KILLED)
def test_sigkill_at_any_moment(name, start, tmp_path):
    """Catches a kill that costs a line, doubles one, leaves no readable checkpoint or changes the result."""
    script = importlib.import_module(name)
    flags = dict(
        env_id="number",
        num_groups=4,
        group_size=4,
        eval_tasks=16,
        num_iterations=4 * KILLS + 4,
        **SIZE,
    )
    flags |= dict(learning_rate=5e-3, eval_every=3, save_every=2)
    a, a_state = run(script, tmp_path / "a", init_from=start, **flags)
    (tmp_path / "b").mkdir()
    killer, beginning = Killer(script, tmp_path / "b", flags), ["--init-from", start]
    for kill in range(KILLS):
        killer.start(*beginning)
        moment = ["loop", "write", "loop", "start"][kill % 4]
        killer.kill(moment, 4 * kill + 1)
        run_dir = folder(tmp_path / "b")
        beginning = ["--resume", run_dir / "checkpoint.pt"]
        print(f"{name}: kill {kill + 1} ({moment}) after {time.time() - killer.begin:.2f}s, in iteration "
              f"{killer.iteration() + 1}, checkpoint of iteration {load(run_dir)['iteration']}")  # fmt: skip
    killer.start(*beginning)
    killer.process.join(300)
    assert killer.process.exitcode == 0, killer.output.read_text()
    print(f"{name}: {KILLS} kills, {killer.in_write} of them left a half-written checkpoint.tmp")
    b, b_state = read_metrics(run_dir), load(run_dir)
    assert [line["iteration"] for line in b] == list(range(4 * KILLS + 5))
    assert without_times(a) == without_times(b)
    for key in (
        "model",
        "optimizer",
        "reference",
        "totals",
        "iteration",
        *["value_head"] * (name == "ppo"),
    ):
        assert same(a_state[key], b_state[key]), key
    assert any(line["losses/grad_norm"] > 0 for line in a[1:])
    assert not (run_dir / "checkpoint.tmp").exists()


def test_a_kill_while_the_metrics_are_cut(script, tmp_path, monkeypatch):
    """Catches a resume that empties metrics.jsonl and is killed before it has written the lines again."""
    metrics, _ = run(script, tmp_path, num_iterations=1, warm_start_steps=1, group_size=2)
    write_text = Path.write_text

    def killed(path, text, *args, **kwargs):
        write_text(
            path, text[: len(text) // 2], *args, **kwargs
        )  # what a kill in the middle leaves
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, SystemExit)):
        patch.setattr(Path, "write_text", killed)
        checkpoint = folder(tmp_path) / "checkpoint.pt"
        run(script, tmp_path, num_iterations=1, warm_start_steps=1, group_size=2, resume=checkpoint)
        raise SystemExit  # it never rewrites the file: fine
    assert read_metrics(folder(tmp_path)) == metrics


# ---- Several processes -------------------------------------------------------------------------------------------

SHARED = dict(
    num_groups=6, group_size=2, micro_batch_size=3, ent_coef=0.01, kl_coef=0.1, learning_rate=5e-3
)
SHARED |= dict(eval_tasks=8, eval_every=100)


def gradients(script, runs_dir, start):
    """The gradients of every optimizer step of two iterations in float64, one list of tensors a step."""
    steps, clip = [], torch.nn.utils.clip_grad_norm_

    def spy(parameters, max_norm):
        steps.append([p.grad.clone() for p in parameters])
        return clip(parameters, max_norm)

    torch.nn.utils.clip_grad_norm_ = spy
    torch.set_default_dtype(torch.float64)
    try:
        run_flags = SHARED | minibatches(script, 2)
        script.train(make_args(script, runs_dir, init_from=start, **run_flags))
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
        torch.set_default_dtype(torch.float32)
    return steps


def worker(folder, start):
    """A process of the job: float64 gradients of all scripts, three iterations of GRPO, and a run in which it dies."""
    rank, open_group, close_group = (
        os.environ["RANK"],
        dist.init_process_group,
        dist.destroy_process_group,
    )
    dist.init_process_group = lambda backend: (
        dist.is_initialized() or open_group(backend)
    )  # one group for all the runs
    dist.destroy_process_group = lambda: None
    for name in SCRIPTS:
        torch.save(
            gradients(importlib.import_module(name), folder / name, start),
            folder / f"{name}-{rank}.pt",
        )
    grpo = importlib.import_module("grpo")
    grpo.train(make_args(grpo, folder / "three", init_from=start, num_iterations=3, **SHARED))

    def planted(n, model, envs):
        if n == 2 and rank == "1":
            (folder / "died").write_text("")
            raise RuntimeError("planted")

    with pytest.MonkeyPatch.context() as patch:
        on_training_rollouts(patch, grpo, before=planted)
        grpo.train(make_args(grpo, folder / "dying", init_from=start, num_iterations=50, **SHARED))
    close_group()


def job(folder, start):
    """What torchrun does with worker(), forking."""
    config = LaunchConfig(1, 1, 2, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
                          max_restarts=0)  # fmt: skip
    elastic_launch(config, worker)(folder, start)


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory, start):
    """Folder, exit code and end of one job of two processes that run worker()."""
    path = tmp_path_factory.mktemp("job")
    launched = process(path / "output", job, path, start)
    launched.join(120)
    return path, launched.exitcode, time.time()


@pytest.mark.parametrize("name", SCRIPTS)
def test_gradients_of_two_processes(name, two_processes, start, tmp_path):
    """Catches gradients that are averaged instead of summed, groups played twice, and denominators of one process's
    share; in float64 nothing hides in rounding."""
    one = gradients(importlib.import_module(name), tmp_path, start)
    two = [torch.load(two_processes[0] / f"{name}-{rank}.pt") for rank in (0, 1)]
    assert len(one) == (2 if name == "reinforce" else 4) and one[0][0].dtype == torch.float64
    assert all(grad.abs().max() > 0 for grad in one[0]) and same(two[0], two[1])
    for step in range(len(one)):
        worst = max(
            (a - b).abs().max().item() for a, b in zip(one[step], two[0][step], strict=True)
        )
        assert worst < 1e-10, f"step {step}: {worst}"


def test_metrics_of_two_processes(two_processes, start, tmp_path):
    """Catches metrics of one process's episodes only, counted twice, or drifting apart over iterations."""
    grpo = importlib.import_module("grpo")
    one, one_state = run(grpo, tmp_path, init_from=start, num_iterations=3, **SHARED)
    two, two_state = (
        read_metrics(folder(two_processes[0] / "three")),
        load(folder(two_processes[0] / "three")),
    )
    for a, b in zip(without_times(one), without_times(two), strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    for name, value in one_state["model"].items():
        torch.testing.assert_close(two_state["model"][name], value, atol=1e-4, rtol=0)
    assert one_state["totals"] == two_state["totals"] and one[-1]["losses/grad_norm"] > 0


def test_one_process_writes(two_processes):
    """Catches a folder a process, lines that stand twice, and a report printed by every process."""
    path, output = two_processes[0], (two_processes[0] / "output").read_text()
    for name in [*SCRIPTS, "three"]:
        run_dir = folder(path / name)
        assert sorted(file.name for file in run_dir.iterdir()) == [
            "args.json",
            "checkpoint.pt",
            "metrics.jsonl",
        ]
        assert [line["iteration"] for line in read_metrics(run_dir)] == list(
            range(4 if name == "three" else 3)
        )
    assert output.count("done in") == len(SCRIPTS) + 1 and output.count("\n3/3 ") == 1


def test_a_process_that_dies_ends_the_job(two_processes):
    """Catches a job that hangs in a collective, or ends with 0, after one of its processes died."""
    path, exitcode, end = two_processes
    assert exitcode not in (0, None) and end - (path / "died").stat().st_mtime < 60
    assert [line["iteration"] for line in read_metrics(folder(path / "dying"))] == [0, 1]
    assert load(folder(path / "dying"))["iteration"] == 0


def test_groups_that_processes_cannot_share(script, tmp_path, monkeypatch, capsys):
    """Catches groups that are dropped, or a process that waits for ever, where the groups do not divide."""
    monkeypatch.chdir(tmp_path)
    for rank in "01":
        monkeypatch.setenv("RANK", rank), monkeypatch.setenv("WORLD_SIZE", "2")
        assert cli(script, monkeypatch, *to_argv(env_id="number", num_groups=3, group_size=8)) == 2
        error = capsys.readouterr().err
        assert (
            error.startswith("error: --num-groups 3")
            and "2 processes" in error
            and error.count("\n") == 1
        )
    assert not list(tmp_path.iterdir())


@slow
def test_torchrun_refuses_groups_that_do_not_divide(tmp_path):
    """Catches a refusal that ends a single process and leaves the job hanging, or a job that ends with 0."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    argv = [ROOT / "grpo.py", *to_argv(env_id="number", num_groups=3, runs_dir=tmp_path / "runs")]
    done = subprocess.run(torchrun + argv, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: --num-groups 3")]
    assert (
        done.returncode != 0
        and lines
        and set(lines) == {lines[0]}
        and not (tmp_path / "runs").exists()
    )


# ---- Random flags ------------------------------------------------------------------------------------------------

EXTREMES = dict(
    seed=[0, 2**63],
    torch_deterministic=[False],
    num_groups=[1, 5],
    group_size=[1, 4],
    max_turns=[1, 6],
    learning_rate=[1e-9, 0.3],
    max_grad_norm=[1e-6, 1e6],
    temperature=[0.1, 5.0],
    ent_coef=[1e-3, 1.0],
    kl_coef=[0.0, 5.0],
    anneal_kl=[False],
    mask_observations=[False],
    filter_truncated=[True],
    warm_start_batch_size=[1, 5],
    warm_start_learning_rate=[1e-6, 0.5],
    warm_start_observations=[False],
    eval_every=[1, 100],
    eval_tasks=[8, 33],
    eval_split=["dev"],
    save_every=[1],
    micro_batch_size=[2, 1000],
    context_length=[2, 3, 9, 200],
    tool_cost=[0.0, 3.0],
    tool_cost_warmup=[1, 50],
    process_reward=[0.1, 3.0],
    malformed=["error", "end"],
    credit=["episode", "turn"],
    gamma=[0.0, 0.9],
    baseline=["none", "batch", "mean", "loo"],
    norm=["std"],
    step_adv_coef=[0.0, 10.0],
    step_gamma=[0.0, 1.0],
    clip_coef=[1e-3, 3.0],
    clip_coef_high=[1e-3, 3.0],
    loss_agg=["token-mean", "seq-mean-token-mean"],
    update_epochs=[2],
    gae_unit=["turn"],
    gae_lambda=[0.0, 1.0],
    norm_adv=[False],
    vf_coef=[0.0, 10.0],
    clip_vloss=[True],
    critic_warmup_steps=[0, 50],
)


def combination(script, number, start):
    """Valid flags: each keeps its default with probability a half, else it is drawn from EXTREMES."""
    rng = random.Random(zlib.crc32(f"{script.__name__} {number}".encode()))
    flags = dict(env_id="number", num_iterations=2, num_groups=3, group_size=2, eval_tasks=16)
    for name, values in EXTREMES.items():
        if name in script.Args.__dataclass_fields__ and rng.random() < 0.5:
            flags[name] = rng.choice([v for v in values if name != "baseline" or script.__name__ == "reinforce"
                                      or v in ("mean", "loo")])  # fmt: skip
    alone = script.__name__ == "ppo" or flags.get("baseline") in ("none", "batch")
    flags["group_size"] = max(flags["group_size"], 1 if alone else 2)
    if hasattr(script.Args, "num_minibatches"):
        episodes = flags["num_groups"] * flags["group_size"]
        flags["num_minibatches"] = rng.choice(
            [n for n in (1, 2, 3, 4, episodes) if episodes % n == 0]
        )
    if rng.random() < 0.5:
        return flags | SIZE | {"init_from": start}
    size = rng.choice([dict(d_model=2, n_heads=1), dict(d_model=24, n_heads=3, n_layers=3)])
    return flags | dict(n_layers=1, warm_start_steps=rng.choice([0, 1, 4])) | size


@pytest.mark.parametrize("number", range(COMBINATIONS))
def test_random_flags(script, number, start, tmp_path):
    """Catches two flags that do not get along: a crash, a NaN, noise of no seed, or flags that args.json has not."""
    flags, ends = combination(script, number, start), []
    print(" ".join(to_argv(**flags)))
    for again in "ab":
        script.train(tyro.cli(script.Args, args=to_argv(**flags, runs_dir=tmp_path / again)))
        ends.append(
            (read_metrics(folder(tmp_path / again)), load(folder(tmp_path / again))["model"])
        )
    (a, a_model), (b, b_model) = ends
    assert [line["iteration"] for line in a] == [0, 1, 2]
    odd = {
        key
        for line in a
        for key, x in line.items()
        if type(x) not in (int, float) or not math.isfinite(x)
    }
    assert not odd and all(value.isfinite().all() for value in a_model.values())
    assert without_times(a) == without_times(b) and same(a_model, b_model)
    written = json.loads((folder(tmp_path / "a") / "args.json").read_text())
    flags |= {"init_from": str(start)} if "init_from" in flags else {}
    assert {name: written[name] for name in flags} == flags
    assert written.keys() == script.Args.__dataclass_fields__.keys()


# ---- Bad input ---------------------------------------------------------------------------------------------------


def command(script, *argv):
    """Exit code of what the last line of the script does with this command line."""
    try:
        script.train(tyro.cli(script.Args, args=list(map(str, argv))))
    except SystemExit as stop:
        return stop.code
    return 0


BAD_LINES = {
    "--num-groups 2.5": "--num-groups",
    "--num-groups 0x10": "--num-groups",
    "--num-groups -4": "--num-groups",
    "--num-groups": "--num-groups",
    "--num-groups 4 5": "5",
    "--micro-batch-size 1e3": "--micro-batch-size",
    "--seed 1.0": "--seed",
    "--seed nan": "--seed",
    "--seed 18446744073709551616": "--seed",
    "--learning-rate=": "--learning-rate",
    "--learning-rate -inf": "--learning-rate",
    "--learning-rate 1e-3,": "--learning-rate",
    "--warm-start-learning-rate 0": "--warm-start-learning-rate",
    "--temperature nan": "--temperature",
    "--gamma nan": "--gamma",
    "--gamma 1.0001": "--gamma",
    "--tool-cost inf": "--tool-cost",
    "--process-reward -0.1": "--process-reward",
    "--tool-cost-warmup -1": "--tool-cost-warmup",
    "--context-length nan": "--context-length",
    "--context-length 1 --env-id number": "--context-length",
    "--eval-tasks -1": "--eval-tasks",
    "--eval-split train": "--eval-split",
    "--env-id Number": "--env-id",
    "--env-id=": "--env-id",
    "--reward all": "--reward",
    "--malformed no": "--malformed",
    "--track yes": "yes",
    "--no-cuda extra": "extra",
    "--d-model 6 --n-heads 2": "--d-model",
    "--n-heads 0": "--n-heads",
    "--n-heads 64 --d-model 64": "--n-heads",
    "--env-id number --reward hidden --num-bugs 2": "--num-bugs",
    "--runs-dir /proc/no/runs": "--runs-dir",
    "--init-from": "--init-from",
    "--init-from=": "--init-from",
    "--resume=": "--resume",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_lines(line, tmp_path, monkeypatch, capsys):
    """Catches a traceback, a silent other meaning, or a folder left behind, for what one may type by mistake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    script, begin = importlib.import_module(SCRIPTS[zlib.crc32(line.encode()) % 4]), time.time()
    argv = line.split()
    argv += ["--warm-start-steps", "1"] if "--context-length 1 " in line else []
    assert command(script, *argv) == 2 and time.time() - begin < 5
    out, error = capsys.readouterr()
    assert BAD_LINES[line] in error and "Traceback" not in error and out == ""
    if error.startswith("error: "):
        assert error.count("\n") == 1 and len(error) < 250
    else:  # tyro's box
        assert ("───" in error or "---" in error) and error.count("\n") < 20
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, start):
    """The folder of a finished run of each script."""
    folders = {}
    for name in SCRIPTS:
        runs_dir = tmp_path_factory.mktemp(name)
        run(
            importlib.import_module(name), runs_dir, init_from=start, num_iterations=1, group_size=2
        )
        folders[name] = folder(runs_dir)
    return folders


def bad_files(good):
    """Name and content (bytes, or what torch.save gets) of files that are no checkpoint of a run."""
    state = torch.load(good, weights_only=True)
    return {
        "empty": b"",
        "text": b"hello\n",
        "json": b'{"model": 1}\n',
        "tenth": good.read_bytes()[: good.stat().st_size // 10],
        "half": good.read_bytes()[: good.stat().st_size // 2],
        "all but ten bytes": good.read_bytes()[:-10],
        "pickle that runs a command": pickle.dumps(print, protocol=2),
        "a tensor": torch.ones(3),
        "a zero": torch.zeros(1),
        "a number": 5,
        "a string": "model optimizer",
        "None": None,
        "empty dict": {},
        "bare weights": state["model"],
        "other weights": {"model": {"x": torch.ones(3)}},
        "weights of another width": {
            "model": {key: value[..., :1] for key, value in state["model"].items()}
        },
    }


FILES = [
    "empty",
    "text",
    "json",
    "tenth",
    "half",
    "all but ten bytes",
    "pickle that runs a command",
    "a tensor",
]
FILES += ["a zero", "a number", "a string", "None", "empty dict", "bare weights", "other weights"]
FILES += ["weights of another width", "a directory", "a missing file"]


@pytest.mark.parametrize("flag", ["--resume", "--init-from"])
@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_no_checkpoint(kind, flag, checkpoints, tmp_path, capsys):
    """Catches a traceback, random weights without a word, or a metrics.jsonl that was cut, for a wrong file."""
    script = importlib.import_module(SCRIPTS[zlib.crc32(kind.encode()) % 4])
    run_dir = shutil.copytree(checkpoints[script.__name__], tmp_path / "run")
    path, before = run_dir / "checkpoint.pt", (run_dir / "metrics.jsonl").read_bytes()
    content = bad_files(path).get(kind)
    path.unlink()
    if kind == "a directory":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif kind != "a missing file":
        torch.save(content, path)
    argv = to_argv(
        env_id="number",
        runs_dir=tmp_path / "runs",
        num_iterations=0,
        group_size=2,
        eval_tasks=8,
        **SIZE,
    )
    capsys.readouterr()
    assert command(script, flag, path, *argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flag}") and error.count("\n") == 1, error
    assert not list(tmp_path.glob("runs/*")) and (run_dir / "metrics.jsonl").read_bytes() == before


PAIRS = [(a, b) for a in SCRIPTS for b in SCRIPTS if a != b]


@pytest.mark.parametrize("wrote, resumes", PAIRS)
def test_checkpoint_of_another_script(wrote, resumes, checkpoints, tmp_path, capsys):
    """Catches a run that goes on with another algorithm in the same metrics.jsonl, or a KeyError on its critic."""
    script, run_dir = (
        importlib.import_module(resumes),
        shutil.copytree(checkpoints[wrote], tmp_path / "run"),
    )
    known, flags = script.Args.__dataclass_fields__, json.loads((run_dir / "args.json").read_text())
    flags = {
        key: x for key, x in flags.items() if x is not None and key in known and key != "init_from"
    }
    before = (run_dir / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert command(script, "--resume", run_dir / "checkpoint.pt", *to_argv(**flags)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --resume") and error.count("\n") == 1
    assert (run_dir / "metrics.jsonl").read_bytes() == before


# ---- A broken tracker --------------------------------------------------------------------------------------------


def test_a_tracker_that_breaks(script, start, tmp_path, monkeypatch, capsys):
    """Catches a run that ends, or lacks lines, because its tracker's log() or finish() raised (#89)."""

    class Run:
        def log(self, metrics, step):
            if step > 0:
                raise ConnectionError("the server\nis gone")

        def finish(self):
            raise TimeoutError("no answer")

    wandb = types.SimpleNamespace(
        api=types.SimpleNamespace(api_key="key"),
        Settings=lambda **settings: settings,
        init=lambda **options: Run(),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = dict(
        env_id="number", init_from=start, num_iterations=2, num_groups=4, group_size=2, eval_tasks=8
    )
    assert cli(script, monkeypatch, "--track", *to_argv(**flags, runs_dir=tmp_path, **SIZE)) == 0
    warnings = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: --track")
    ]
    assert any("ConnectionError" in line for line in warnings) and any(
        "TimeoutError" in line for line in warnings
    )
    assert [line["iteration"] for line in read_metrics(folder(tmp_path))] == [0, 1, 2]
    assert load(folder(tmp_path))["iteration"] == 2


def track(tmp_path, start, **variables):
    """A tracked run of GRPO as a process: what it printed, its metrics and its seconds."""
    began = time.time()
    flags = dict(
        env_id="number",
        init_from=start,
        num_iterations=2,
        num_groups=4,
        group_size=2,
        eval_tasks=8,
        **SIZE,
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, ROOT / "grpo.py", "--track", *to_argv(**flags, runs_dir=tmp_path / "runs")],
        env=clean | {"HOME": str(tmp_path)} | variables, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout, read_metrics(folder(tmp_path / "runs")), time.time() - began


@slow
@pytest.mark.parametrize("kind", ["closed port", "black hole", "malformed key", "disabled"])
def test_tracking_without_a_network(kind, start, tmp_path):
    """Catches a run that waits for a server, ends with its error, or never ends after "done" (#88, #89)."""
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as hole:  # accepts, never answers
        port = hole.getsockname()[1] if kind == "black hole" else 9
        variables = dict(WANDB_API_KEY="a" * 40, WANDB_BASE_URL=f"http://127.0.0.1:{port}")
        variables |= {
            "malformed key": {"WANDB_API_KEY": "x"},
            "disabled": {"WANDB_MODE": "disabled"},
        }.get(kind, {})
        out, metrics, seconds = track(tmp_path, start, **variables)
    warnings = [line for line in out.splitlines() if line.startswith("warning: --track")]
    print(f"{kind}: {seconds:.0f}s", *warnings, sep="\n")
    assert [line["iteration"] for line in metrics] == [0, 1, 2] and seconds < 60
    assert len(warnings) == (kind != "disabled")
