"""The benchmarks: controls that control for what they say, right statistics, a comparison that can
be redrawn."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from helpers import WORDS, partial_batch, tasks_of

import grpo
from benchmarks import compare, controls, signal_to_noise
from bugfix_env import TASK_0, BugFixEnv, bugfix_task

# ---- Controls


def calls(env, *tools):
    return [env.step(f"<call> {tool} </call>") for tool in tools]


def test_swapped_observations_come_from_the_other_task():
    """Catches a control that swaps the reward too, or nothing at all."""
    other, env = bugfix_task("test", 1), controls.SwappedEnv()
    assert env.reset((TASK_0, other))[0] == TASK_0.issue
    read, _, submit = calls(env, "read", "edit swap_minmax", "submit")
    assert read[0] == f"<result>{other.source}</result>"
    assert submit[1:3] == (1.0, True) and submit[4]["success"]


def test_withheld_observations_say_nothing():
    """Catches a control that still shows something, or that takes the reward away too."""
    env = controls.WithheldEnv()
    assert env.reset(TASK_0)[0] == TASK_0.issue
    results = calls(env, "read", "test", "nonsense", "edit swap_minmax", "submit")
    assert {observation for observation, *_ in results} == {"<result></result>"}
    assert results[-1][1] == 1.0 and results[-1][4]["success"] and WORDS.encode("<result></result>")


def test_shuffled_rewards_stay_in_their_group():
    """Catches a control that moves rewards to another group, whose mean they would change, or moves
    nothing."""
    group_ids, rewards = torch.tensor([0, 1] * 6), torch.arange(24.0).view(12, 2)  # not in order
    batch = partial_batch(tokens=torch.ones(12, 3), rewards=rewards, group_ids=group_ids)
    shuffled = controls.shuffled(lambda: batch)().rewards
    assert not torch.equal(shuffled, rewards)
    for group in (group_ids == 0, group_ids == 1):
        assert sorted(shuffled[group].tolist()) == sorted(rewards[group].tolist())


# ---- Signal and noise


@pytest.mark.parametrize("K", [2, 9])
def test_coin_flips_are_those_of_the_paper(K):
    """Catches a baseline, a credit or a sign that is wrong in REINFORCE: the numbers are known in
    closed form."""
    (signal, noise), (turn_signal, turn_noise) = signal_to_noise.coin_flips(K)
    assert signal == pytest.approx(1 / 16, rel=0.02)
    assert noise == pytest.approx((K - 1) / 16, rel=0.03)
    assert turn_signal == pytest.approx(1 / 16, rel=0.06)
    assert turn_noise == pytest.approx(1 / 16, rel=0.03)


def test_gradients_are_those_of_the_whole_batch():
    """Catches micro-batches in a denominator, rows mixed up by sorting, or a scheme that gets
    another's advantages."""
    torch.manual_seed(0)
    model = grpo.TinyAgent(len(WORDS.words), d_model=16, n_layers=1, n_heads=2)
    tasks = [task for task in tasks_of(BugFixEnv, "train", 3) for _ in range(2)]
    envs, uniforms = [BugFixEnv(max_turns=2) for _ in tasks], grpo.draw_uniforms(1, 1, 6, 12)
    play = partial(grpo.rollout, temperature=1.0, context_length=400)
    batch = play(model, WORDS, envs, tasks, torch.arange(6) // 2, uniforms)
    batch = batch._replace(rewards=torch.arange(12.0).view(6, 2))
    found = signal_to_noise.schemes(batch, torch.randn_like(batch.loss_mask))
    assert len({str(A.tolist()) for A in found.values()}) == len(found), "two schemes are the same"
    gradients = partial(signal_to_noise.gradients, model, batch)
    each, mean = gradients(batch.loss_mask, found, episodes=4)
    for name, A in found.items():
        logprobs, _, _ = grpo.score(model, batch.tokens, batch.loss_mask, 1.0)
        expected = torch.autograd.grad((A * logprobs).sum() / 6, list(model.parameters()))
        expected = torch.cat([gradient.flatten() for gradient in expected])
        assert torch.allclose(each[name], expected, atol=1e-5), name
    assert mean == pytest.approx((logprobs.sum() / batch.loss_mask.sum()).item(), rel=1e-5)
    observed = (batch.turn_ids >= 0).float() - batch.loss_mask
    assert observed.sum() > 0 and observed.min() == 0
    sampled, tools, both = (
        gradients(mask, {"A": signal_to_noise.leave_one_out(batch, mask)})[0]["A"]
        for mask in (batch.loss_mask, observed, batch.loss_mask + observed)
    )
    assert tools.norm() > 0 and torch.allclose(sampled + tools, both, atol=1e-5), "no partition"


def test_the_table_of_signal_and_noise(tmp_path):
    """Catches a mean over schemes or policies instead of seeds, a ratio the wrong way round, and a
    new measurement that does not replace its own, or loses those made elsewhere."""
    columns = "scheme,success,informative_groups,signal,noise,cosine,norm,tokens,logprob"
    lines = [f"policy,seed,{columns}"]
    for policy, seed in (("start", 1), ("start", 2), ("late", 1), ("late", 2)):
        lines.append(f"{policy},{seed},return,0.5,0.9,{seed},6,0.25,2,10,-1")
        lines.append(f"{policy},{seed},GiGPO,0.5,0.9,2,2,0.75,2,10,-1")
    (tmp_path / "signal.csv").write_text("\n".join(lines) + "\n")
    table = compare.signal_table(compare.Args(results=tmp_path))
    assert table.count("| return | 4.5 [3, 6] | 0.25 [0.25, 0.25] |") == 2, table
    assert table.count("| GiGPO | 1 [1, 1] | 0.75 [0.75, 0.75] |") == 2 and "2 of 3 seeds" in table
    run_dir = compare.folder(tmp_path, compare.STUDIES["signal"].runs["start"], 1) / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "wall.json").write_text("{}")
    (run_dir / "signal.csv").write_text(f"{columns}\nreturn,0.5,0.9,3,6,0.25,2,10,-1\n")
    compare.measure_signal(compare.Args(results=tmp_path, runs_dir=tmp_path))
    rows = compare.read(tmp_path / "signal.csv")
    rows = [(row["policy"], row["seed"], row["signal"]) for row in rows]
    assert rows[:3] == [("start", "1", "3"), ("start", "2", "2"), ("start", "2", "2")]
    assert [policy for policy, *_ in rows[3:]] == ["late"] * 4


# ---- The comparison


def test_statistics():
    """Catches an interval over the wrong axis, an area that depends on the spacing, a threshold met
    too early."""
    mean, low, high = compare.interval([[0.0, 1.0], [1.0, 1.0]] * 10)
    assert mean.tolist() == [0.5, 1.0] and low[1] == high[1] == 1.0
    assert 0.2 < low[0] < 0.4 < 0.6 < high[0] < 0.8
    x, y = np.array([0.0, 100.0, 400.0]), np.array([0.0, 0.8, 1.0])
    for start, budget, area in (
        (0, 400, 100 * 0.4 + 300 * 0.9),
        (0, 200, 100 * 0.4 + 100 * (0.8 + 0.2 / 6)),  # the budget ends between two points
        (100, 400, 100 * 0.4 + 200 * (0.8 + 0.2 / 3)),  # the curve begins late
    ):
        assert compare.area(x + start, y, budget) == pytest.approx(area / budget)
    for threshold, episodes in ((0.9, 250), (0.4, 50), (0.0, 0), (1.1, np.inf)):
        assert compare.episodes_to(threshold, x, y) == pytest.approx(episodes)


def test_the_table_of_a_study(monkeypatch):
    """Catches a column under another's name, pass@1 of the whole run or of its last iteration
    alone, a threshold that is not the study's, and pairs that are not of one seed."""
    study = compare.Study("Tiny", {"a": "grpo", "b": "gigpo"}, threshold=0.5)
    monkeypatch.setattr(compare, "STUDIES", {"tiny": study})
    rows = []
    for n in range(21):
        row = dict.fromkeys(compare.COLUMNS, "") | {"iteration": n, "episodes": 10 * n}
        trained = {"charts/success_rate": n / 20, "charts/episodic_length": 3}
        rows.append(row | (trained if n else {"eval/success_rate": 0.2}))
    last = {"success_rate": 0.8, "pass@8": 0.9, "unseen_pairs_success_rate": 0.1}
    last |= {"hack_rate": 0.05, "tool_calls": 2}
    rows[-1] |= {"seconds": 7} | {f"eval/{key}": value for key, value in last.items()}
    better = rows[:-1] + [rows[-1] | {"eval/success_rate": 0.9}]
    text = compare.tables("tiny", {"grpo": {1: rows, 2: better}, "gigpo": {2: better}})
    line = (
        "| b | 1 | 0.900 | 0.900 | 0.975 | 0.900 | 0.100 | 0.050 | 3.00 | 2.00 | 0.550 | 86 | 7 |"
    )
    assert line in text and "episodes to 0.5" in text, text
    assert "| a | 2 | 0.850 [0.800, 0.900] | 0.800 | 0.975 [0.975, 0.975] |" in text
    assert "- a minus b: +0.000; +0.000" in text


TINY = "--env-id number --num-iterations 2 --num-groups 2 --group-size 2 --eval-tasks 8"
TINY += " --eval-every 1 --d-model 16 --num-minibatches 1"
START = "reinforce --num-iterations 0 --env-id number --eval-tasks 8 --d-model 16"
START += " --warm-start-steps 40 --warm-start-learning-rate 0.02"


@pytest.fixture
def tiny_study(monkeypatch):
    study = compare.Study("Tiny", {"a": f"grpo {TINY}", "b": f"gigpo {TINY}"}, seeds=1)
    start_of = lambda command: None if command == START else START  # noqa: E731
    monkeypatch.setattr(compare, "STUDIES", {"tiny": study})
    monkeypatch.setattr(compare, "start_of", start_of)


def test_a_comparison_trains_what_is_missing_and_redraws_without(tmp_path, tiny_study):
    """Catches a study that trains again what was done, starts its algorithms from different
    policies, loses a run in the CSV, or needs the runs to draw."""
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    args = compare.Args(studies=("tiny",), workers=2, runs_dir=tmp_path / "runs", results=results)
    runs = lambda: {p: p.stat().st_mtime_ns for p in args.runs_dir.glob("*/*/*/metrics.jsonl")}  # noqa: E731
    compare.main(args)
    before, table = runs(), (results / "tables.md").read_text()
    starts = [json.loads(path.read_text().splitlines()[0]) for path in before]
    keys = ("episodic_return", "tool_calls", "pass@8")
    starts = [[line[f"eval/{key}"] for key in keys] for line in starts]
    assert len(starts) == 3 and starts[0] == starts[1] == starts[2] and any(starts[0])
    assert "| a | 1 |" in table and "a minus b" in table
    assert "python gigpo.py --env-id number" in table
    compare.main(args)
    assert runs() == before
    pictures = [results / "tiny.svg", results / "tiny.png"]
    assert all(path.stat().st_size > 1000 for path in pictures)
    svg = pictures[0].read_bytes()
    pictures[0].unlink()
    redraw = compare.Args(redraw=True, runs_dir=tmp_path / "none", results=results)
    compare.main(redraw)
    assert pictures[0].read_bytes() == svg and (results / "tables.md").read_text() == table
    compare.collect(redraw)
    assert len(compare.load(redraw)) == 2, "runs made elsewhere are lost"


def test_a_comparison_refuses_bad_flags(tmp_path, tiny_study, capsys):
    """Catches a traceback, or an empty table, for a study that is none, no seeds, or no CSV."""
    for flags, error in (
        (dict(redraw=True, results=tmp_path), "no runs.csv to draw from"),
        (dict(studies=("nonsense",)), "error: --studies nonsense: choose from tiny"),
        (dict(seeds=0), "error: --seeds 0"),
        (dict(workers=0), "error: --workers 0"),
    ):
        with pytest.raises(SystemExit):
            compare.main(compare.Args(**flags))
        assert error in capsys.readouterr().err
