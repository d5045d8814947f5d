"""Compares the scripts: studies of scripts x flags x seeds, collected into a CSV, as tables and figures.

    python benchmarks/compare.py                          # all studies: trains what is missing, then tables and figures
    python benchmarks/compare.py --studies one-bug        # this one only
    python benchmarks/compare.py --studies one-bug --seeds 2 --workers 4
    python benchmarks/compare.py --redraw                 # from benchmarks/results/runs.csv, trains nothing

Each run is a process with one thread. Runs that are done are skipped, those of a killed comparison start again. For a
seed all algorithms begin with the same checkpoint of the warm start, see the same tasks and play as many episodes. The
CSV keeps what it holds of runs made elsewhere until the same run is done here.
"""

import csv
import json
import os
import platform
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
SCRIPTS = ("reinforce", "ppo", "grpo", "gigpo")


class Study(NamedTuple):
    title: str
    runs: dict  # label: command line without --seed, whose first word is a file without .py
    seeds: int = 5
    metric: str = "eval/success_rate"  # what the figure shows beside test success
    threshold: float = 0.9  # test success whose episodes are counted
    legend: object = "best"  # its place in the figure
    references: tuple = ()  # (label, command or number of bugs) of dashed lines: a run's end, an agent of random calls


GRPO = "grpo --eval-every 10"
IMITATION = "grpo --num-iterations 0 --warm-start-steps 1600"  # as long as the whole of an RL run


def algorithms(flags=""):
    """Each script, evaluated after as many episodes."""
    return {
        name: f"{name} --eval-every {40 if name == 'reinforce' else 10} {flags}".strip()
        for name in SCRIPTS
    }


STUDIES = {
    "one-bug": Study("BugFix, one bug", algorithms(), seeds=10, legend=(0.6, 0.12),
                     references=(("imitation only, as long", IMITATION), ("random calls", 1))),
    "two-bugs": Study("BugFix, two bugs", algorithms("--num-bugs 2"), seeds=10, threshold=0.5,
                      references=(("imitation only, as long", f"{IMITATION} --num-bugs 2"), ("random calls", 2))),
    "controls": Study(
        "Controls (GRPO)",
        {
            "grpo": GRPO,
            "rewards shuffled in the group": "benchmarks/controls shuffle --eval-every 10",
            "observations withheld": "benchmarks/controls withhold --eval-every 10",
            "imitation only": IMITATION,
            "imitation only, two bugs": f"{IMITATION} --num-bugs 2",
        },
    ),
    "rewards": Study(
        "What is rewarded (GRPO)",
        {"hidden": GRPO, "public": f"{GRPO} --reward public", "partial": f"{GRPO} --reward partial",
         "similarity": f"{GRPO} --reward similarity"},
        metric="charts/hack_rate",
    ),
    "mask": Study("Tool output in the loss or not: BugFix (GRPO)",
                  {"mask": GRPO, "no mask": f"{GRPO} --no-mask-observations"}),
    "mask-number": Study(
        "Tool output in the loss or not: hidden number from a weak start (GRPO)",
        {"mask": f"{GRPO} --env-id number --warm-start-steps 100",
         "no mask": f"{GRPO} --env-id number --warm-start-steps 100 --no-mask-observations"},
    ),
    "signal": Study(  # the policies whose gradients signal_to_noise.py measures
        "Signal and noise of the gradient",
        {
            "start": "reinforce --num-iterations 0",
            "middle": f"{GRPO} --num-iterations 15",
            "late": GRPO,
            "number, start": "grpo --env-id number --warm-start-steps 100 --num-iterations 0",
        },
        seeds=3,
    ),
}  # fmt: skip
METRICS = ("charts/success_rate", "charts/hack_rate", "charts/tool_calls", "charts/episodic_length", "losses/entropy",
           "eval/success_rate", "eval/pass@8", "eval/unseen_pairs_success_rate", "eval/hack_rate",
           "eval/tool_calls")  # fmt: skip
LABELS = ("policy", "seed", "scheme")  # columns of signal.csv that are no numbers
COLUMNS = (
    "command",
    "seed",
    "iteration",
    "episodes",
    "sampled_tokens",
    "seconds",
    "commit",
    "hardware",
    *METRICS,
)


@dataclass
class Args:
    studies: tuple[str, ...] = ()  # which of them (default: all)
    seeds: Optional[int] = None  # seeds 1 to this, where a study has more
    workers: int = os.cpu_count() or 1  # processes at a time
    redraw: bool = False  # tables and figures only, from the CSV
    runs_dir: Path = ROOT / "runs" / "compare"  # where the runs go
    results: Path = ROOT / "benchmarks" / "results"  # where the CSV, tables and figures go


# ---- Runs ----------------------------------------------------------------------------------------------------------


def folder(runs_dir, command, seed):
    return runs_dir / command.replace("/", ":").replace(" ", "_") / str(seed)


def finished(path):
    """Folder of the finished run under path, or None."""
    for file in path.glob("*/wall.json"):
        return file.parent


def train(runs_dir, command, seed, start):
    """Runs a command to its end, unless that was done before. Returns its error output, empty if all went well."""
    path = folder(runs_dir, command, seed)
    if finished(path):
        return ""
    file, *flags = command.split()
    line = [f"{file}.py", *flags, "--seed", str(seed), "--runs-dir", str(path)]
    line += ["--init-from", str(finished(start) / "checkpoint.pt")] if start else []
    before, begin = set(path.glob("*")), time.time()
    done = subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    if done.returncode:
        return f"{' '.join(line)}: exit {done.returncode}\n{done.stderr[-2000:]}"
    (run_dir,) = set(path.glob("*")) - before
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    (run_dir / "wall.json").write_text(json.dumps({
        "seconds": time.time() - begin, "commit": commit.stdout.strip(), "hardware": hardware()}))  # fmt: skip
    return ""


def hardware():
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")] \
        if Path("/proc/cpuinfo").exists() else []  # fmt: skip
    return f"{(names or [platform.processor()])[0]}, one thread"


def start_of(command):
    """Command whose checkpoint this one begins with, or None where the run's own warm start belongs to the study."""
    if "--warm-start-steps" in command or "withhold" in command or "--num-iterations 0" in command:
        return None
    return "reinforce --num-iterations 0" + " --num-bugs 2" * ("--num-bugs 2" in command)


def run_studies(args):
    runs = [(command, seed) for name in args.studies for command in STUDIES[name].runs.values()
            for seed in range(1, seeds_of(name, args) + 1)]  # fmt: skip
    runs = sorted(
        dict.fromkeys(runs), key=lambda run: run[1]
    )  # seed by seed: a comparison cut short is still paired
    starts = list(
        dict.fromkeys((start_of(command), seed) for command, seed in runs if start_of(command))
    )
    for title, jobs in (("warm starts", starts), ("runs", runs)):
        jobs = [job for job in jobs if not finished(folder(args.runs_dir, *job))]
        begin = time.time()

        def work(job):
            start = start_of(job[0])
            return job, train(args.runs_dir, *job, start and folder(args.runs_dir, start, job[1]))

        with ThreadPoolExecutor(args.workers) as pool:
            for n, (job, error) in enumerate(pool.map(work, jobs), 1):
                minutes = (time.time() - begin) / 60
                print(f"{title} {n}/{len(jobs)}: {job[0]} --seed {job[1]}, {minutes:.0f} min, "
                      f"{minutes / n * (len(jobs) - n):.0f} min left", flush=True)  # fmt: skip
                if error:
                    print(error, file=sys.stderr)
                elif title == "runs":
                    collect(args)


def measure_signal(args):
    """signal_to_noise.py on each policy of the study, beside its checkpoint; all of them into signal.csv."""
    done = {}
    for label, command in STUDIES["signal"].runs.items():
        for seed in range(1, seeds_of("signal", args) + 1):
            if run_dir := finished(folder(args.runs_dir, command, seed)):
                done[label, seed] = run_dir

    def work(run_dir):
        if not (run_dir / "signal.csv").exists():
            print(f"signal and noise: {run_dir}", flush=True)
            subprocess.run([sys.executable, "benchmarks/signal_to_noise.py", run_dir / "checkpoint.pt", "--csv",
                            run_dir / "signal.csv"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(work, done.values()))
    policies = list(STUDIES["signal"].runs)
    rows = [row for row in read(args.results / "signal.csv")
            if row["policy"] in policies and (row["policy"], int(row["seed"])) not in done]  # fmt: skip
    for (label, seed), run_dir in done.items():
        rows += [{"policy": label, "seed": seed} | row for row in read(run_dir / "signal.csv")]
    for row in rows:
        row.pop("checkpoint", None)
    rows.sort(key=lambda row: (policies.index(row["policy"]), int(row["seed"])))
    if rows:
        write(args.results / "signal.csv", rows, rows[0])


def seeds_of(name, args):
    return min(STUDIES[name].seeds, args.seeds or STUDIES[name].seeds)


def collect(args):
    """Writes every finished run into one CSV, a row an iteration; what it holds of runs made elsewhere stays in it."""
    runs = load(args)
    commands = sorted({command for study in STUDIES.values() for command in study.runs.values()})
    for command in commands:
        for path in folder(args.runs_dir, command, 0).parent.glob("*"):
            if not (run_dir := finished(path)):
                continue
            wall = json.loads((run_dir / "wall.json").read_text())
            lines = [
                json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
            ]
            critic_episodes = lines[0].get(
                "warm_start/critic_episodes", 0
            )  # they count: nobody else plays them
            runs.setdefault(command, {})[int(path.name)] = [{
                "command": command, "seed": path.name, "iteration": line["iteration"],
                "episodes": line.get("charts/total_episodes", 0) + critic_episodes,
                "sampled_tokens": line.get("charts/total_tokens", 0), "seconds": round(wall["seconds"], 1),
                "commit": wall["commit"], "hardware": wall["hardware"],
            } | {key: round(line[key], 5) for key in METRICS if key in line} for line in lines]  # fmt: skip
    rows = [
        row
        for command in commands
        for _, run in sorted(runs.get(command, {}).items())
        for row in run
    ]
    write(args.results / "runs.csv", rows, COLUMNS)


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


# ---- Statistics ----------------------------------------------------------------------------------------------------


def interval(values):
    """Mean over seeds and its 95% bootstrap interval, (mean, low, high); values (seeds, ...)."""
    values = np.asarray(values, dtype=float)
    draws = np.random.default_rng(0).integers(len(values), size=(10000, len(values)))
    means = values[draws].mean(1)
    return values.mean(0), *np.percentile(means, (2.5, 97.5), axis=0)


def curve(rows, key):
    """(episodes, values) of a metric in one run."""
    pairs = [(int(row["episodes"]), float(row[key])) for row in rows if row[key]]
    return np.array(pairs, dtype=float).reshape(-1, 2).T


def area(episodes, values, budget):
    """Mean height of a curve over the first budget episodes, flat before its first point: the area under it."""
    x = np.array([0, *episodes[(0 < episodes) & (episodes < budget)], budget])
    return np.trapezoid(np.interp(x, episodes, values), x) / budget


def episodes_to(threshold, episodes, values):
    """Episodes to the first evaluation from which the curve reaches the threshold, linear in between; inf if never."""
    above = np.flatnonzero(values >= threshold)
    if not len(above):
        return np.inf
    n = above[0]
    if n == 0:
        return episodes[0]
    return np.interp(threshold, values[n - 1 : n + 1], episodes[n - 1 : n + 1])


def random_agent(num_bugs, num_tasks=512):
    """Success on the test tasks of calls drawn uniformly from read, test, submit and every edit."""
    sys.path.insert(0, str(ROOT))
    from bugfix_env import MENU, BugFixEnv

    calls, rng, solved = (
        ["read", "test", "submit", *(f"edit {op}" for op in MENU)],
        np.random.default_rng(0),
        0,
    )
    for i in range(num_tasks):
        env, done = BugFixEnv(num_bugs=num_bugs), False
        env.reset(BugFixEnv.task("test", i, num_bugs))
        while not done:
            _, _, done, _, info = env.step(f"<call> {calls[rng.integers(len(calls))]} </call>")
        solved += info["success"]
    return solved / num_tasks


# ---- Tables and figures --------------------------------------------------------------------------------------------


def tables(name, runs):
    """The study's tables in Markdown: what the runs end with, learning speed, and differences paired by seed."""
    study = STUDIES[name]

    def show(values, form=".3f"):
        mean, low, high = interval(values)
        if np.isnan(mean) or len(values) == 1:  # one seed has no interval
            return "" if np.isnan(mean) else f"{mean:{form}}"
        return f"{mean:{form}} [{low:{form}}, {high:{form}}]"

    header = ("", "seeds", "test success", "min", "pass@1", "pass@8", "unseen pairs", "hack rate", "turns",
              "tool calls", "area under the curve", f"episodes to {study.threshold}", "seconds")  # fmt: skip
    text = f"## {study.title}\n\n| {' | '.join(header)} |\n{'|---' * len(header)}|\n"
    present = {label: command for label, command in study.runs.items() if command in runs}
    trained = [runs[command] for command in present.values() if "--num-iterations 0" not in command]
    budget = min(
        curve(rows, "eval/success_rate")[0, -1] for seeds in trained for rows in seeds.values()
    )
    for label, command in present.items():
        seeds = runs[command]
        last = [rows[-1] for rows in seeds.values()]
        final = lambda key: [float(row[key] or "nan") for row in last]  # noqa: E731
        late = lambda key: [np.mean(curve(rows, key)[1, -max(1, len(rows) // 10) :])  # noqa: E731
                            if curve(rows, key).size else np.nan for rows in seeds.values()]  # fmt: skip
        curves = [curve(rows, "eval/success_rate") for rows in seeds.values()]
        reached = [episodes_to(study.threshold, *each) for each in curves]
        never = sum(np.isinf(reached))
        middle = np.median(reached)
        speed = show(reached, ",.0f") if not never else f"never on {never} of {len(reached)}" + (
            f", median {middle:,.0f}" if middle < np.inf else "")  # fmt: skip
        cells = [label, str(len(seeds)), show(final("eval/success_rate")), f"{min(final('eval/success_rate')):.3f}",
                 show(late("charts/success_rate")), show(final("eval/pass@8")),
                 show(final("eval/unseen_pairs_success_rate")), show(final("eval/hack_rate")),
                 show(late("charts/episodic_length"), ".2f"), show(final("eval/tool_calls"), ".2f"),
                 show([area(*each, budget) for each in curves]), speed,
                 f"{np.median(final('seconds')):.0f}"]  # fmt: skip
        text += f"| {' | '.join(cells)} |\n"
    text += ("\nAt the end, greedy; pass@1 and turns sampled, on training tasks, mean of the last tenth of the "
             f"iterations. Area over the first {budget:,.0f} episodes. Paired by seed, difference of the area and of "
             "test success at the end:\n\n")  # fmt: skip
    labels = list(present)
    for i, a in enumerate(labels):
        for b in labels[i + 1 :]:
            common = sorted(runs[present[a]].keys() & runs[present[b]].keys())
            if "imitation" in b or not common:
                continue
            ends, areas = [], []
            for seed in common:
                first, second = (
                    curve(runs[present[label]][seed], "eval/success_rate") for label in (a, b)
                )
                (
                    ends.append(first[1, -1] - second[1, -1]),
                    areas.append(area(*first, budget) - area(*second, budget)),
                )
            text += f"- {a} minus {b}: {show(areas, '+.3f')}; {show(ends, '+.3f')}\n"
    some = next(iter(next(iter(runs.values())).values()))[-1]
    commits = sorted(
        {rows[-1]["commit"] for command in present.values() for rows in runs[command].values()}
    )
    lines = [
        " ".join(["python", f"{command.split()[0]}.py", *command.split()[1:]])
        for command in present.values()
    ]
    return (f"{text}\nCommit {', '.join(commits)}; {some['hardware']} a run. Commands, each with `--seed S` and one "
            f"start a seed: {', '.join(f'`{line}`' for line in lines)}\n")  # fmt: skip


def signal_table(args):
    """What signal.csv says of each scheme at each policy, mean over seeds with its interval."""
    rows = read(args.results / "signal.csv")
    text = f"## {STUDIES['signal'].title}\n"
    for policy in dict.fromkeys(row["policy"] for row in rows):
        table = {}  # scheme: rows, one a seed
        for row in rows:
            if row["policy"] == policy:
                table.setdefault(row["scheme"], []).append(
                    {k: float(row[k]) for k in row if k not in LABELS}
                )
        column = lambda scheme, key: np.array([row[key] for row in table[scheme]])  # noqa: E731
        form = "{:.3g} [{:.3g}, {:.3g}]" if len(table["return"]) > 1 else "{:.3g}"
        show = lambda values: form.format(*interval(values))  # noqa: E731
        text += (f"\n{policy}: success {show(column('return', 'success'))}, informative groups "
                 f"{show(column('return', 'informative_groups'))}, "
                 f"{len(table['return'])} of {STUDIES['signal'].seeds} seeds\n\n"
                 "| scheme | noise / signal | cosine | length | tokens an episode | log-probability |\n"
                 "|---|---|---|---|---|---|\n")  # fmt: skip
        for scheme in table:
            ratio = column(scheme, "noise") / column(scheme, "signal")
            cells = [
                ratio,
                *(column(scheme, key) for key in ("cosine", "norm", "tokens", "logprob")),
            ]
            text += f"| {scheme} | {' | '.join(map(show, cells))} |\n"
    return text


def figure(name, runs, args):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = name  # the same data, the same file
    study = STUDIES[name]
    keys = dict.fromkeys(("eval/success_rate", study.metric))
    fig, axes = plt.subplots(1, len(keys), figsize=(6.4 * len(keys), 4), squeeze=False)
    for axis, key in zip(axes[0], keys):
        heights = {"oracle": 1.0} if study.references else {}
        for label, command in study.runs.items():
            if command not in runs:
                continue
            curves = [curve(rows, key) for rows in runs[command].values()]
            if curves[0].shape[1] < 2:  # no iterations: a line
                heights[label] = np.mean([each[1, -1] for each in curves])
                continue
            episodes = curves[0][0]
            mean, low, high = interval([np.interp(episodes, *each) for each in curves])
            (line,) = axis.plot(
                episodes, mean, label=f"{label} ({len(curves)} seeds)", linewidth=1.6
            )
            axis.fill_between(episodes, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
            if study.references:
                heights["start"] = mean[0]
        for label, source in study.references:
            if isinstance(source, int):
                heights[label] = random_agent(source)
            elif source in runs:
                heights[label] = np.mean([float(rows[-1][key]) for rows in runs[source].values()])
        labels = {}  # height: text; lines closer than the text is high share theirs
        for label, height in sorted(heights.items(), key=lambda item: item[1]):
            axis.axhline(height, color="gray", linestyle="--", linewidth=1)
            near = next((other for other in labels if height - other < 0.03), None)
            labels[height] = f"{labels.pop(near)}, {label}" if near is not None else label
        for height, label in labels.items():
            axis.annotate(label, (0.99, height), xycoords=("axes fraction", "data"), fontsize=8, ha="right",
                          va="bottom", color="gray")  # fmt: skip
        axis.set(xlabel="episodes", ylabel=key, ylim=(-0.02, 1.07))
        axis.grid(alpha=0.3), axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc=study.legend)
    fig.suptitle(study.title, fontsize=11)
    fig.tight_layout()
    for kind in ("svg", "png"):
        fig.savefig(
            args.results / f"{name}.{kind}",
            dpi=150,
            metadata={"Date": None} if kind == "svg" else None,
        )
    plt.close(fig)


def main(args):
    args.studies = args.studies or tuple(STUDIES)
    unknown = set(args.studies) - set(STUDIES)
    if unknown:
        print(
            f"error: --studies {' '.join(sorted(unknown))}: choose from {' '.join(STUDIES)}",
            file=sys.stderr,
        )
        sys.exit(2)
    for flag, value in (("--seeds", args.seeds), ("--workers", args.workers)):
        if value is not None and value < 1:
            print(f"error: {flag} {value} must be positive; try {flag} 2", file=sys.stderr)
            sys.exit(2)
    if not args.redraw:
        run_studies(args)
        collect(args)
        if "signal" in args.studies:
            measure_signal(args)
    runs = load(args)
    if not runs:
        print(
            f"error: --results {args.results}: no runs.csv to draw from; leave out --redraw",
            file=sys.stderr,
        )
        sys.exit(2)
    text = ""
    for name in STUDIES:
        if name == "signal":
            text += signal_table(args) if (args.results / "signal.csv").exists() else ""
        elif sum(command in runs for command in STUDIES[name].runs.values()) > 1:
            text += tables(name, runs) + "\n"
            figure(name, runs, args)
    (args.results / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
