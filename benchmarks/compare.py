"""Compares the scripts: studies of scripts x flags x seeds, as a CSV, tables and figures.

    python benchmarks/compare.py                      # all studies: trains what is missing
    python benchmarks/compare.py --studies one-bug    # this one only
    python benchmarks/compare.py --studies one-bug --seeds 2 --workers 4
    python benchmarks/compare.py --redraw             # from results/runs.csv, trains nothing

Each run is a process with one thread. Runs that are done are skipped, those of a killed comparison
start again. For a seed all algorithms begin with the same checkpoint of the warm start, see the
same tasks and play as many episodes. The CSV keeps what it holds of runs made elsewhere until the
same run is done here.
"""

import csv
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent


# ---- Studies -------------------------------------------------------------------------------------


class Study(NamedTuple):
    title: str
    runs: dict  # label: command line without --seed, whose first word is a file without .py
    seeds: int = 5
    metric: str = "eval/success_rate"  # what the figure shows beside test success
    threshold: float = 0.9  # test success whose episodes are counted
    legend: object = "best"  # its place in the figure
    references: dict = {}  # dashed lines, label: the run that ends there, or bugs of random calls


GRPO = "grpo --eval-every 10"
ALGORITHMS = {
    "reinforce": "reinforce --eval-every 40",  # its batches are a quarter: after as many episodes
    "ppo": "ppo --eval-every 10",
    "grpo": GRPO,
    "gigpo": "gigpo --eval-every 10",
}
START = "reinforce --num-iterations 0"
IMITATION = "grpo --num-iterations 0 --warm-start-steps 1600"  # as long as the whole of an RL run
IMITATION_2 = f"{IMITATION} --num-bugs 2"
WEAK_NUMBER = "--env-id number --warm-start-steps 100"

STUDIES = {
    "one-bug": Study(
        "BugFix, one bug",
        ALGORITHMS,
        seeds=10,
        legend=(0.6, 0.12),
        references={"imitation only, as long": IMITATION, "random calls": 1},
    ),
    "two-bugs": Study(
        "BugFix, two bugs",
        {name: f"{command} --num-bugs 2" for name, command in ALGORITHMS.items()},
        seeds=10,
        threshold=0.5,
        references={"imitation only, as long": IMITATION_2, "random calls": 2},
    ),
    "controls": Study(
        "Controls (GRPO)",
        {
            "grpo": GRPO,
            "rewards shuffled in the group": "benchmarks/controls shuffle --eval-every 10",
            "observations withheld": "benchmarks/controls withhold --eval-every 10",
            "imitation only": IMITATION,
            "imitation only, two bugs": IMITATION_2,
        },
    ),
    "rewards": Study(
        "What is rewarded (GRPO)",
        {"hidden": GRPO}
        | {name: f"{GRPO} --reward {name}" for name in ("public", "partial", "similarity")},
        metric="charts/hack_rate",
    ),
    "mask": Study(
        "Tool output in the loss or not: BugFix (GRPO)",
        {"mask": GRPO, "no mask": f"{GRPO} --no-mask-observations"},
    ),
    "mask-number": Study(
        "Tool output in the loss or not: hidden number from a weak start (GRPO)",
        {
            "mask": f"{GRPO} {WEAK_NUMBER}",
            "no mask": f"{GRPO} {WEAK_NUMBER} --no-mask-observations",
        },
    ),
    "signal": Study(  # the policies whose gradients signal_to_noise.py measures
        "Signal and noise of the gradient",
        {
            "start": START,
            "middle": f"{GRPO} --num-iterations 15",
            "late": GRPO,
            "number, start": f"grpo {WEAK_NUMBER} --num-iterations 0",
        },
        seeds=3,
    ),
}
METRICS = """charts/success_rate charts/hack_rate charts/tool_calls charts/episodic_length
    losses/entropy eval/success_rate eval/pass@8 eval/unseen_pairs_success_rate eval/hack_rate
    eval/tool_calls""".split()
COLUMNS = "command seed iteration episodes sampled_tokens seconds commit hardware".split() + METRICS


@dataclass
class Args:
    studies: tuple[str, ...] = ()  # which of them (default: all)
    seeds: Optional[int] = None  # seeds 1 to this, where a study has more
    workers: int = os.cpu_count() or 1  # processes at a time
    redraw: bool = False  # tables and figures only, from the CSV
    runs_dir: Path = ROOT / "runs" / "compare"  # where the runs go
    results: Path = ROOT / "benchmarks" / "results"  # where the CSV, tables and figures go


def planned(name, args):
    """(label, command, seed) of each run of a study."""
    study = STUDIES[name]
    seeds = range(1, min(study.seeds, args.seeds or study.seeds) + 1)
    return [(label, command, seed) for label, command in study.runs.items() for seed in seeds]


def start_of(command):
    """Command whose checkpoint this one begins with, or None where it makes its own start."""
    if any(word in command for word in ("--warm-start-steps", "withhold", "--num-iterations 0")):
        return None
    return f"{START} --num-bugs 2" if "--num-bugs 2" in command else START


# ---- Runs ----------------------------------------------------------------------------------------


def folder(runs_dir, command, seed):
    return runs_dir / command.replace("/", ":").replace(" ", "_") / str(seed)


def finished(path):
    """Folder of the finished run under path, or None."""
    return next((file.parent for file in path.glob("*/wall.json")), None)


def python(*line, **options):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *line], cwd=ROOT, env=env, text=True, **options)


def hardware():
    path = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:(.*)", path.read_text() if path.exists() else "", re.M)
    return f"{name[1].strip() if name else platform.processor()}, one thread"


def train(command, seed, args):
    """Runs a command to its end. Returns its error output, empty if all went well."""
    path = folder(args.runs_dir, command, seed)
    file, *flags = command.split()
    line = [f"{file}.py", *flags, "--seed", str(seed), "--runs-dir", str(path)]
    if start := start_of(command):
        checkpoint = finished(folder(args.runs_dir, start, seed)) / "checkpoint.pt"
        line += ["--init-from", str(checkpoint)]
    before, begin = set(path.glob("*")), time.time()
    done = python(*line, capture_output=True)
    if done.returncode:
        return f"{' '.join(line)}: exit {done.returncode}\n{done.stderr[-2000:]}"
    seconds = time.time() - begin
    (run_dir,) = set(path.glob("*")) - before
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    wall = {"seconds": seconds, "commit": commit, "hardware": hardware()}
    (run_dir / "wall.json").write_text(json.dumps(wall))
    return ""


def run_studies(args):
    runs = [(command, seed) for name in args.studies for _, command, seed in planned(name, args)]
    runs = sorted(dict.fromkeys(runs), key=lambda run: run[1])  # by seed: cut short, still paired
    starts = dict.fromkeys((start_of(command), seed) for command, seed in runs if start_of(command))
    for title, jobs in (("warm starts", starts), ("runs", runs)):
        jobs = [job for job in jobs if not finished(folder(args.runs_dir, *job))]
        begin = time.time()
        with ThreadPoolExecutor(args.workers) as pool:
            errors = pool.map(lambda job: train(*job, args), jobs)
            for n, ((command, seed), error) in enumerate(zip(jobs, errors, strict=True), 1):
                minutes = (time.time() - begin) / 60
                clock = f"{minutes:.0f} min, {minutes / n * (len(jobs) - n):.0f} min left"
                print(f"{title} {n}/{len(jobs)}: {command} --seed {seed}, {clock}", flush=True)
                print(error, file=sys.stderr, end="\n" * bool(error))
                collect(args)


def collect(args):
    """Writes every finished run into runs.csv; what that holds of runs made elsewhere stays."""
    runs = load(args)
    commands = sorted({command for study in STUDIES.values() for command in study.runs.values()})
    for command in commands:
        for path in folder(args.runs_dir, command, 0).parent.glob("*"):
            if run_dir := finished(path):
                rows = rows_of(run_dir, {"command": command, "seed": path.name})
                runs.setdefault(command, {})[int(path.name)] = rows
    found = [runs[command][seed] for command in commands for seed in sorted(runs.get(command, {}))]
    write(args.results / "runs.csv", [row for rows in found for row in rows], COLUMNS)


def rows_of(run_dir, labels):
    """A run's rows of the CSV: one an iteration, the start first."""
    labels |= json.loads((run_dir / "wall.json").read_text())
    labels["seconds"] = round(labels["seconds"], 1)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    critic = lines[0].get("warm_start/critic_episodes", 0)  # they count: nobody else plays them
    return [
        labels
        | {"iteration": line["iteration"]}
        | {"episodes": line.get("charts/total_episodes", 0) + critic}
        | {"sampled_tokens": line.get("charts/total_tokens", 0)}
        | {key: round(line[key], 5) for key in METRICS if key in line}
        for line in lines
    ]


def measure_signal(args):
    """signal_to_noise.py on each policy of the study, beside its checkpoint; all in signal.csv."""
    done = {}  # (label, seed): folder of the run
    for label, command, seed in planned("signal", args):
        if run_dir := finished(folder(args.runs_dir, command, seed)):
            done[label, seed] = run_dir

    def work(run_dir):
        if not (run_dir / "signal.csv").exists():
            print(f"signal and noise: {run_dir}", flush=True)
            line = [run_dir / "checkpoint.pt", "--csv", run_dir / "signal.csv"]
            python("benchmarks/signal_to_noise.py", *line, stdout=subprocess.DEVNULL, check=True)

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(work, done.values()))
    order = list(STUDIES["signal"].runs)
    rows = [row for row in read(args.results / "signal.csv") if row["policy"] in order]
    rows = [row for row in rows if (row["policy"], int(row["seed"])) not in done]
    for (label, seed), run_dir in done.items():
        rows += [{"policy": label, "seed": seed} | row for row in read(run_dir / "signal.csv")]
    for row in rows:
        row.pop("checkpoint", None)
    rows.sort(key=lambda row: (order.index(row["policy"]), int(row["seed"])))
    if rows:
        write(args.results / "signal.csv", rows, rows[0])


def write(path, rows, columns):
    """Writes a CSV file, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".tmp"), "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path.with_suffix(".tmp"), path)


def read(path):
    """Rows of a CSV file, none where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def load(args):
    """{command: {seed: rows}} of runs.csv."""
    runs = {}
    for row in read(args.results / "runs.csv"):
        runs.setdefault(row["command"], {}).setdefault(int(row["seed"]), []).append(row)
    return runs


# ---- Statistics ----------------------------------------------------------------------------------


def interval(values):
    """Mean over seeds and its 95% bootstrap interval, (mean, low, high); values (seeds, ...)."""
    values = np.asarray(values, dtype=float)
    draws = np.random.default_rng(0).integers(len(values), size=(10000, len(values)))
    means = values[draws].mean(1)
    return values.mean(0), *np.percentile(means, (2.5, 97.5), axis=0)


def column(rows, key):
    """A column of the CSV as numbers, nan where it is empty."""
    return np.array([np.nan if row[key] == "" else float(row[key]) for row in rows])


def curve(rows, key):
    """(episodes, values) of a metric in one run."""
    rows = [row for row in rows if row[key]]
    return np.stack([column(rows, "episodes"), column(rows, key)])


def late(rows, key):
    """Mean of a metric over the last tenth of a run's iterations."""
    values = curve(rows, key)[1]
    return np.mean(values[-max(1, len(rows) // 10) :]) if values.size else np.nan


def area(episodes, values, budget):
    """Mean height of a curve over the first budget episodes, flat before its first point."""
    x = np.array([0, *episodes[(0 < episodes) & (episodes < budget)], budget])
    return np.trapezoid(np.interp(x, episodes, values), x) / budget


def episodes_to(threshold, episodes, values):
    """Episodes until the curve first reaches the threshold, linear in between; inf if never."""
    if not (values >= threshold).any():
        return np.inf
    n = np.argmax(values >= threshold)
    return np.interp(threshold, values[: n + 1][-2:], episodes[: n + 1][-2:])


def random_agent(num_bugs, num_tasks=512):
    """Success on the test tasks of calls drawn uniformly from read, test, submit and every edit."""
    sys.path.insert(0, str(ROOT))
    from bugfix_env import MENU, BugFixEnv

    calls = ["read", "test", "submit", *(f"edit {op}" for op in MENU)]
    env, rng, solved = BugFixEnv(num_bugs=num_bugs), np.random.default_rng(0), 0
    for i in range(num_tasks):
        env.reset(env.task("test", i))
        done = False
        while not done:
            _, _, done, _, info = env.step(f"<call> {calls[rng.integers(len(calls))]} </call>")
        solved += info["success"]
    return solved / num_tasks


# ---- Tables and figures --------------------------------------------------------------------------


def show(values, form=".3f"):
    """A mean over seeds with its interval; a single seed has none."""
    mean, low, high = interval(values)
    if np.isnan(mean):
        return ""
    return f"{mean:{form}}" + (f" [{low:{form}}, {high:{form}}]" if len(values) > 1 else "")


def cells(label, seeds, budget, study):
    """A row of a study's table, {header: text}; seeds: the rows of one run each."""
    last = [rows[-1] for rows in seeds]
    success = column(last, "eval/success_rate")
    curves = [curve(rows, "eval/success_rate") for rows in seeds]
    reached = [episodes_to(study.threshold, *each) for each in curves]
    never, middle = sum(np.isinf(reached)), np.median(reached)
    speed = f"never on {never} of {len(reached)}" if never else show(reached, ",.0f")
    speed += f", median {middle:,.0f}" if never and middle < np.inf else ""
    return {
        "": label,
        "seeds": str(len(seeds)),
        "test success": show(success),
        "min": f"{min(success):.3f}",
        "pass@1": show([late(rows, "charts/success_rate") for rows in seeds]),
        "pass@8": show(column(last, "eval/pass@8")),
        "unseen pairs": show(column(last, "eval/unseen_pairs_success_rate")),
        "hack rate": show(column(last, "eval/hack_rate")),
        "turns": show([late(rows, "charts/episodic_length") for rows in seeds], ".2f"),
        "tool calls": show(column(last, "eval/tool_calls"), ".2f"),
        "area under the curve": show([area(*each, budget) for each in curves]),
        f"episodes to {study.threshold}": speed,
        "seconds": f"{np.median(column(last, 'seconds')):.0f}",
    }


def difference(first, second, budget):
    """first minus second, each {seed: rows}, paired by seed: of the area and of the end."""
    ends, areas = [], []
    for seed in sorted(first.keys() & second.keys()):
        a, b = (curve(runs[seed], "eval/success_rate") for runs in (first, second))
        ends.append(a[1, -1] - b[1, -1])
        areas.append(area(*a, budget) - area(*b, budget))
    return f"{show(areas, '+.3f')}; {show(ends, '+.3f')}" if ends else ""


def tables(name, runs):
    """The study's tables in Markdown: ends, learning speed, and differences paired by seed."""
    study = STUDIES[name]
    present = {label: command for label, command in study.runs.items() if command in runs}
    trained = [runs[command] for command in present.values() if "--num-iterations 0" not in command]
    budget = min(column(rows, "episodes")[-1] for seeds in trained for rows in seeds.values())
    rows = [cells(label, [*runs[present[label]].values()], budget, study) for label in present]
    text = f"## {study.title}\n\n| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|\n"
    text += "".join(f"| {' | '.join(row.values())} |\n" for row in rows)
    text += (
        "\nAt the end, greedy; pass@1 and turns sampled, on training tasks, mean of the last tenth "
        f"of the iterations. Area over the first {budget:,.0f} episodes. Paired by seed, "
        "difference of the area and of test success at the end:\n\n"
    )
    for a, b in itertools.combinations(present, 2):
        paired = difference(runs[present[a]], runs[present[b]], budget)
        text += f"- {a} minus {b}: {paired}\n" if paired and "imitation" not in b else ""
    ends = [rows[-1] for command in present.values() for rows in runs[command].values()]
    commits = ", ".join(sorted({row["commit"] for row in ends}))
    some = next(iter(next(iter(runs.values())).values()))[-1]
    lines = [command.split(" ", 1) for command in present.values()]
    lines = ", ".join(f"`{' '.join(['python', f'{file}.py', *flags])}`" for file, *flags in lines)
    return (
        f"{text}\nCommit {commits}; {some['hardware']} a run. Commands, each with `--seed S` and "
        f"one start a seed: {lines}\n"
    )


def signal_table(args):
    """What signal.csv says of each scheme at each policy, mean over seeds with its interval."""
    rows = read(args.results / "signal.csv")
    study = STUDIES["signal"]
    text = f"## {study.title}\n"
    for policy in dict.fromkeys(row["policy"] for row in rows):
        schemes = {}  # scheme: rows, one a seed
        for row in (row for row in rows if row["policy"] == policy):
            schemes.setdefault(row["scheme"], []).append(row)
        seeds = schemes["return"]
        success, informative = (column(seeds, key) for key in ("success", "informative_groups"))
        text += (
            f"\n{policy}: success {show(success, '.3g')}, informative groups "
            f"{show(informative, '.3g')}, {len(seeds)} of {study.seeds} seeds\n\n"
            "| scheme | noise / signal | cosine | length | tokens an episode | log-probability |\n"
            "|---|---|---|---|---|---|\n"
        )
        for scheme, seeds in schemes.items():
            values = [column(seeds, "noise") / column(seeds, "signal")]
            values += [column(seeds, key) for key in ("cosine", "norm", "tokens", "logprob")]
            text += f"| {scheme} | {' | '.join(show(each, '.3g') for each in values)} |\n"
    return text


def panel(axis, key, study, runs):
    """A metric against episodes, mean and interval; dashed lines for what has no curve."""
    heights = {"oracle": 1.0} if study.references else {}
    for label, command in study.runs.items():
        if command not in runs:
            continue
        curves = [curve(rows, key) for rows in runs[command].values()]
        if curves[0].shape[1] < 2:  # no iterations: a line
            heights[label] = np.mean([values[-1] for _, values in curves])
            continue
        episodes = curves[0][0]
        mean, low, high = interval([np.interp(episodes, *each) for each in curves])
        label = f"{label} ({len(curves)} seeds)"
        (line,) = axis.plot(episodes, mean, label=label, linewidth=1.6)
        axis.fill_between(episodes, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        if study.references:
            heights["start"] = mean[0]
    for label, source in study.references.items():
        if isinstance(source, int):
            heights[label] = random_agent(source)
        elif source in runs:
            heights[label] = np.mean([float(rows[-1][key]) for rows in runs[source].values()])
    labels = {}  # height: text; lines closer than the text is high share theirs
    for label, height in sorted(heights.items(), key=lambda item: item[1]):
        axis.axhline(height, color="gray", linestyle="--", linewidth=1)
        near = next((other for other in labels if height - other < 0.03), None)
        labels[height] = label if near is None else f"{labels.pop(near)}, {label}"
    for height, label in labels.items():
        place = dict(xycoords=("axes fraction", "data"), ha="right", va="bottom")
        axis.annotate(label, (0.99, height), fontsize=8, color="gray", **place)
    axis.set(xlabel="episodes", ylabel=key, ylim=(-0.02, 1.07))
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc=study.legend)


def figure(name, runs, args):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = name  # the same data, the same file
    study = STUDIES[name]
    keys = list(dict.fromkeys(("eval/success_rate", study.metric)))
    fig, axes = plt.subplots(1, len(keys), figsize=(6.4 * len(keys), 4), squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        panel(axis, key, study, runs)
    fig.suptitle(study.title, fontsize=11)
    fig.tight_layout()
    fig.savefig(args.results / f"{name}.svg", dpi=150, metadata={"Date": None})
    fig.savefig(args.results / f"{name}.png", dpi=150)
    plt.close(fig)


def refuse(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def main(args):
    args.studies = args.studies or tuple(STUDIES)
    if unknown := sorted(set(args.studies) - set(STUDIES)):
        refuse(f"--studies {' '.join(unknown)}: choose from {' '.join(STUDIES)}")
    for flag, value in (("--seeds", args.seeds), ("--workers", args.workers)):
        if value is not None and value < 1:
            refuse(f"{flag} {value} must be positive; try {flag} 2")
    if not args.redraw:
        run_studies(args)
        collect(args)
        if "signal" in args.studies:
            measure_signal(args)
    runs = load(args)
    if not runs:
        refuse(f"--results {args.results}: no runs.csv to draw from; leave out --redraw")
    text = ""
    for name, study in STUDIES.items():
        if name == "signal":
            text += signal_table(args) if (args.results / "signal.csv").exists() else ""
        elif sum(command in runs for command in study.runs.values()) > 1:
            text += tables(name, runs) + "\n"
            figure(name, runs, args)
    (args.results / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
