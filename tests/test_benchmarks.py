"""The benchmarks: controls that control for what they say, right statistics, a comparison that can be redrawn."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402
from grpo import TASK_0, BugFixEnv, bugfix_task  # noqa: E402


def benchmark(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- Controls ----------------------------------------------------------------------------------------------------


def test_swapped_observations_come_from_the_other_task():
    """Catches a control that swaps the reward too, or nothing at all."""
    own, other = TASK_0, bugfix_task("test", 1)
    env = benchmark("controls").SwappedEnv()
    assert env.reset((own, other))[0] == own.issue
    assert env.step("<call> read </call>")[0] == f"<result>{other.source}</result>"
    env.step("<call> edit swap_minmax </call>")
    _, reward, done, _, info = env.step("<call> submit </call>")
    assert (reward, done, info["success"]) == (1.0, True, True)


def test_withheld_observations_say_nothing():
    """Catches a control that still shows something, or that takes the reward away too."""
    env = benchmark("controls").WithheldEnv()
    assert env.reset(TASK_0)[0] == TASK_0.issue
    calls = ["read", "test", "nonsense", "edit swap_minmax", "submit"]
    results = [env.step(f"<call> {call} </call>") for call in calls]
    assert {observation for observation, *_ in results} == {"<result></result>"}
    assert results[-1][1] == 1.0 and results[-1][4]["success"]
    assert set(grpo.PIECES.findall("<result></result>")) <= set(BugFixEnv.vocabulary())


def test_shuffled_rewards_stay_in_their_group():
    """Catches a control that moves rewards to another group, whose mean they would change, or moves nothing."""
    group_ids = torch.tensor([0, 1] * 6)  # not in order
    rewards = torch.arange(24.0).view(12, 2)
    batch = grpo.Batch(*[None] * 6, None, None, None, None, None)._replace(
        tokens=torch.ones(12, 3), rewards=rewards, group_ids=group_ids)  # fmt: skip
    shuffled = benchmark("controls").shuffled(lambda: batch)().rewards
    assert not torch.equal(shuffled, rewards)
    for group in (0, 1):
        ours, theirs = shuffled[group_ids == group], rewards[group_ids == group]
        assert sorted(ours.tolist()) == sorted(theirs.tolist())


# ---- Signal and noise --------------------------------------------------------------------------------------------


def test_coin_flips_are_those_of_the_paper():
    """Catches a baseline, a credit or a sign that is wrong in REINFORCE: the numbers are known in closed form."""
    for K in (2, 9):
        (signal, noise), (turn_signal, turn_noise) = benchmark("signal_to_noise").coin_flips(K)
        assert signal == pytest.approx(1 / 16, rel=0.02) and noise == pytest.approx(
            (K - 1) / 16, rel=0.03
        )
        assert turn_signal == pytest.approx(1 / 16, rel=0.06) and turn_noise == pytest.approx(
            1 / 16, rel=0.03
        )


def test_gradients_are_those_of_the_whole_batch():
    """Catches micro-batches in a denominator, rows mixed up by sorting, or a scheme that gets another's advantages."""
    module = benchmark("signal_to_noise")
    torch.manual_seed(0)
    tokenizer = grpo.Tokenizer(BugFixEnv.vocabulary())
    model = grpo.TinyAgent(len(tokenizer.words), d_model=16, n_layers=1, n_heads=2)
    tasks = [bugfix_task("train", i // 2) for i in range(6)]
    batch = grpo.rollout(model, tokenizer, [BugFixEnv(max_turns=2) for _ in tasks], tasks, torch.arange(6) // 2,
                         grpo.draw_uniforms(1, 1, 6, 12), temperature=1.0, context_length=400)  # fmt: skip
    batch = batch._replace(rewards=torch.arange(12.0).view(6, 2))
    values = torch.randn_like(batch.loss_mask)
    found = module.schemes(batch, values)
    assert len({tuple(A.flatten().tolist()) for A in found.values()}) == len(found), (
        "two schemes are the same"
    )
    each, mean = module.gradients(model, batch, batch.loss_mask, found, episodes=4)
    for name, A in found.items():
        logprobs, _, _ = grpo.score(model, batch.tokens, batch.loss_mask, 1.0)
        objective = (A * batch.loss_mask * logprobs).sum() / 6
        expected = torch.cat(
            [g.flatten() for g in torch.autograd.grad(objective, list(model.parameters()))]
        )
        assert torch.allclose(each[name], expected, atol=1e-5), name
    assert mean == pytest.approx((logprobs.sum() / batch.loss_mask.sum()).item(), rel=1e-5)
    observed = (batch.turn_ids >= 0).float() - batch.loss_mask
    assert observed.sum() > 0 and observed.min() == 0
    sampled, tools, both = (module.gradients(model, batch, mask, {"A": module.leave_one_out(batch, mask)})[0]["A"]
                            for mask in (batch.loss_mask, observed, batch.loss_mask + observed))  # fmt: skip
    assert tools.norm() > 0 and torch.allclose(sampled + tools, both, atol=1e-5), (
        "the mask does not part the gradient"
    )


def test_the_table_of_signal_and_noise(tmp_path):
    """Catches a mean over schemes or policies instead of seeds, and a ratio the wrong way round."""
    compare = benchmark("compare")
    lines = [
        "policy,seed,scheme,success,informative_groups,signal,noise,cosine,norm,tokens,logprob"
    ]
    for policy in ("start", "late"):
        for seed in (1, 2):
            lines += [f"{policy},{seed},return,0.5,0.9,{seed},6,0.25,2,10,-1",
                      f"{policy},{seed},GiGPO,0.5,0.9,2,2,0.75,2,10,-1"]  # fmt: skip
    (tmp_path / "signal.csv").write_text("\n".join(lines) + "\n")
    table = compare.signal_table(compare.Args(results=tmp_path))
    assert table.count("| return | 4.5 [3, 6] | 0.25 [0.25, 0.25] |") == 2, table
    assert table.count("| GiGPO | 1 [1, 1] | 0.75 [0.75, 0.75] |") == 2 and "2 of 3 seeds" in table
    run_dir = compare.folder(tmp_path, compare.STUDIES["signal"].runs["start"], 1) / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "wall.json").write_text("{}")
    (run_dir / "signal.csv").write_text(
        lines[0].split(",", 2)[2] + "\nreturn,0.5,0.9,3,6,0.25,2,10,-1\n"
    )
    compare.measure_signal(compare.Args(results=tmp_path, runs_dir=tmp_path))
    rows = [
        (row["policy"], row["seed"], row["signal"]) for row in compare.read(tmp_path / "signal.csv")
    ]
    assert rows[:3] == [("start", "1", "3"), ("start", "2", "2"), ("start", "2", "2")], (
        "the new one replaces its own"
    )
    assert [policy for policy, *_ in rows[3:]] == ["late"] * 4, (
        "measurements made elsewhere are lost"
    )


# ---- The comparison ----------------------------------------------------------------------------------------------


def test_statistics():
    """Catches an interval over the wrong axis, an area that depends on the spacing, a threshold met too early."""
    compare = benchmark("compare")
    mean, low, high = compare.interval([[0.0, 1.0], [1.0, 1.0]] * 10)
    assert (
        mean.tolist() == [0.5, 1.0]
        and low[1] == high[1] == 1.0
        and 0.2 < low[0] < 0.4 < 0.6 < high[0] < 0.8
    )
    episodes, values = np.array([0.0, 100.0, 400.0]), np.array([0.0, 0.8, 1.0])
    assert compare.area(episodes, values, 400) == pytest.approx((100 * 0.4 + 300 * 0.9) / 400)
    assert compare.area(episodes, values, 200) == pytest.approx(
        (100 * 0.4 + 100 * (0.8 + 0.2 / 6)) / 200
    ), "budget"
    assert compare.area(episodes + 100, values, 400) == pytest.approx(
        (100 * 0.4 + 200 * (0.8 + 0.2 / 3)) / 400
    ), "late"
    assert compare.episodes_to(0.9, episodes, values) == pytest.approx(250)
    assert compare.episodes_to(0.4, episodes, values) == pytest.approx(50)
    assert compare.episodes_to(0.0, episodes, values) == 0 and np.isinf(
        compare.episodes_to(1.1, episodes, values)
    )


def test_the_table_of_a_study(monkeypatch):
    """Catches a column under another's name, pass@1 of the whole run or of its last iteration alone, a threshold that
    is not the study's, and pairs that are not of one seed."""
    compare = benchmark("compare")
    study = compare.Study("Tiny", {"a": "grpo", "b": "gigpo"}, threshold=0.5)
    monkeypatch.setattr(compare, "STUDIES", {"tiny": study})
    rows = [
        {key: "" for key in compare.COLUMNS} | {"iteration": n, "episodes": 10 * n}
        for n in range(21)
    ]
    for row in rows[1:]:
        row |= {"charts/success_rate": row["iteration"] / 20, "charts/episodic_length": 3}
    rows[0] |= {"eval/success_rate": 0.2}
    rows[-1] |= {"eval/success_rate": 0.8, "eval/pass@8": 0.9, "eval/unseen_pairs_success_rate": 0.1,
                 "eval/hack_rate": 0.05, "eval/tool_calls": 2, "seconds": 7}  # fmt: skip
    better = [row | ({"eval/success_rate": 0.9} if row["iteration"] == 20 else {}) for row in rows]
    text = compare.tables("tiny", {"grpo": {1: rows, 2: better}, "gigpo": {2: better}})
    assert (
        "| b | 1 | 0.900 | 0.900 | 0.975 | 0.900 | 0.100 | 0.050 | 3.00 | 2.00 | 0.550 | 86 | 7 |"
        in text
    ), text
    assert (
        "| a | 2 | 0.850 [0.800, 0.900] | 0.800 | 0.975 [0.975, 0.975] |" in text
        and "episodes to 0.5" in text
    )
    assert "- a minus b: +0.000; +0.000" in text


def test_a_comparison_trains_what_is_missing_and_redraws_without(tmp_path, monkeypatch, capsys):
    """Catches a study that trains again what was done, starts its algorithms from different policies, loses a run in
    the CSV, or needs the runs to draw."""
    pytest.importorskip("matplotlib")
    compare = benchmark("compare")
    tiny = ("--env-id number --num-iterations 2 --num-groups 2 --group-size 2 --eval-tasks 8 --eval-every 1 "
            "--d-model 16 --num-minibatches 1")  # fmt: skip
    study = compare.Study("Tiny", {"a": f"grpo {tiny}", "b": f"gigpo {tiny}"}, seeds=1)
    monkeypatch.setattr(compare, "STUDIES", {"tiny": study})
    monkeypatch.setattr(compare, "start_of", lambda command: None if "--num-iterations 0" in command else
                        "reinforce --num-iterations 0 --env-id number --eval-tasks 8 --d-model 16 "
                        "--warm-start-steps 40 --warm-start-learning-rate 0.02")  # fmt: skip
    args = compare.Args(
        studies=("tiny",), workers=2, runs_dir=tmp_path / "runs", results=tmp_path / "results"
    )
    compare.main(args)
    files = sorted((tmp_path / "runs").glob("*/*/*/metrics.jsonl"))
    assert len(files) == 3, "a start, two runs"
    lines = [json.loads(file.read_text().splitlines()[0]) for file in files]
    starts = [
        [line[f"eval/{key}"] for key in ("episodic_return", "tool_calls", "pass@8")]
        for line in lines
    ]
    assert starts[0] == starts[1] == starts[2] and any(starts[0]), "algorithms start apart"
    table = (tmp_path / "results" / "tables.md").read_text()
    assert (
        "| a | 1 |" in table and "a minus b" in table and "python gigpo.py --env-id number" in table
    )
    before = {file: file.stat().st_mtime_ns for file in files}
    compare.main(args)
    assert {
        file: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*/*/*/metrics.jsonl")
    } == before
    redraw = compare.Args(redraw=True, runs_dir=tmp_path / "none", results=tmp_path / "results")
    picture = (tmp_path / "results" / "tiny.svg").read_bytes()
    (tmp_path / "results" / "tiny.svg").unlink()
    compare.main(redraw)
    assert (tmp_path / "results" / "tiny.svg").read_bytes() == picture, "a redrawn figure differs"
    assert (tmp_path / "results" / "tables.md").read_text() == table
    compare.collect(redraw)
    assert len(compare.load(redraw)) == 2, "runs made elsewhere are lost"
    with pytest.raises(SystemExit):
        compare.main(compare.Args(redraw=True, results=tmp_path / "none"))
    assert "no runs.csv to draw from" in capsys.readouterr().err
    assert all(
        (tmp_path / "results" / f"tiny.{kind}").stat().st_size > 1000 for kind in ("svg", "png")
    )
    with pytest.raises(SystemExit):
        compare.main(compare.Args(studies=("nonsense",)))
    assert "error: --studies nonsense: choose from tiny" in capsys.readouterr().err
    for flags in (dict(seeds=0), dict(workers=0)):
        with pytest.raises(SystemExit):
            compare.main(compare.Args(**flags))
        assert f"error: --{[*flags][0]} 0" in capsys.readouterr().err
