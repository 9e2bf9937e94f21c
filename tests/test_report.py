"""tools/aggregate.py against numbers worked out by hand, and what tools/report.py says."""

import itertools
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import jitted

pytest.importorskip("rliable")

import aggregate
import frontier_report
import output
import released_n_step
import report
from output import read_rows
from rliable import metrics
from run_records import Key, Records, script_of

ROOT = Path(__file__).resolve().parents[1]
pytestmark = jitted


@pytest.fixture(autouse=True)
def few_repetitions(monkeypatch):
    monkeypatch.setattr(aggregate, "REPETITIONS", 200)


# --------------------------------------------------------------------------------------------------
# By hand
# --------------------------------------------------------------------------------------------------


def test_summary_has_the_deviation_of_the_population():
    # The paper's LavaCrossing cell, 0.38 +- 0.47, is two of five seeds at 0.96.
    ours = aggregate.summary([0.96, 0.96, 0.0, 0.0, 0.0])
    assert (round(ours.mean, 2), round(ours.std, 2), ours.number) == (0.38, 0.47, 5)
    assert aggregate.summary([]) is None


@pytest.mark.parametrize(
    ("mean", "expected"),
    [(0.38, "inside"), (0.85, "inside"), (0.86, "above"), (-0.09, "inside"), (-0.1, "below")],
)
def test_verdict(mean, expected):
    assert aggregate.verdict(mean, 0.38, 0.47) == expected


def test_verdict_grants_the_paper_its_rounding():
    # 0.96 +- 0.00 in print; 0.9613 rounds to it.
    assert aggregate.verdict(0.9613, 0.96, 0.0) == "inside"
    assert aggregate.verdict(0.9652, 0.96, 0.0) == "above"
    assert aggregate.verdict(0.955, 0.96, 0.0) == "inside"
    assert aggregate.verdict(0.954, 0.96, 0.0) == "below"


def test_score_matrix_scales_tasks_and_takes_as_many_seeds_as_all_have():
    table = {"a": {3: 30.0, 1: 10.0, 2: 20.0}, "b": {5: 5.0, 4: 3.0}}
    matrix = aggregate.score_matrix(table, ["a", "b"], {"a": (10.0, 20.0), "b": (1.0, 5.0)})
    np.testing.assert_array_equal(matrix, [[0.0, 0.5], [1.0, 1.0]])
    assert aggregate.score_matrix({"a": {1: 1.0}}, ["a", "b"], {}) is None


def test_backups_are_compared_on_the_seeds_that_both_have():
    one = {"a": {1: 0.1, 2: 0.2}, "b": {3: 0.3}, "c": {1: 0.0}}
    other = {"a": {2: 0.8, 3: 0.9}, "b": {1: 0.7}}
    assert aggregate.on_the_same_seeds(one, other) == [
        {"a": {2: 0.2}, "b": {}}, {"a": {2: 0.8}, "b": {}}
    ]  # fmt: skip


def test_the_interquartile_mean_is_the_mean_of_the_middle_half():
    matrix = np.array([[100.0, 2.0], [3.0, 4.0], [5.0, -50.0], [1.0, 0.0]])
    # In order: -50 0 | 1 2 3 4 | 5 100
    assert aggregate.interquartile_mean(matrix) == 2.5
    assert aggregate.mean(matrix) == pytest.approx(65 / 8)


def test_probability_of_improvement_counts_a_tie_as_half():
    one, other = np.array([[1.0, 5.0], [2.0, 5.0]]), np.array([[0.0, 5.0], [2.0, 5.0]])
    # First task: 1 > 0, 1 < 2, 2 > 0, 2 = 2: 2.5 of 4. Second: all ties.
    improvement = (0.625 + 0.5) / 2
    assert aggregate.probability_of_improvement(one, other) == pytest.approx(improvement)
    assert metrics.probability_of_improvement(one, other) == pytest.approx(improvement)


def test_a_difference_is_of_pairs():
    other = np.array([[0.0, 5.0], [1.0, 9.0], [7.0, 8.0], [2.0, 0.0], [3.0, 5.0]])
    one = other + np.array([1, 0])  # each seed's gain is 1 in a task and 0 in the other
    found = aggregate.difference(one, other)
    assert found[:4] == (0.5, 0.5, 0.5, 5)
    assert found.p == found.strict_p == 1 / 32
    assert aggregate.difference(one, other, np.array([0.0, 1.0])).p == 1.0
    assert aggregate.difference(one, other, np.array([2.0, -1.0])).value == 2.0


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([1, 1, 1, 1, 1], 1 / 32),
        ([-1, -1, -1, -1, -1], 1 / 32),
        ([2, 2, 2, -1], 2 / 16),  # + + + - and + + + +
        ([1, 1, 1, 0, 0], 1 / 8),
        ([1, 1, 1, 1e-3, 1e-3], 1 / 8),
        ([0, 0], 1.0),
        ([3], 1 / 2),
        ([], 1.0),
        ([1] * 25 + [0], 1 / 2**25),
        ([1] * 41, 1 / 10_001),
    ],
)
def test_sign_flip_p(gains, expected):
    assert aggregate.sign_flip_p(np.array(gains, np.float64)) == pytest.approx(expected)


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.2])
def test_sign_flip_p_is_the_share_of_all_choices_of_signs(tolerance):
    rng = np.random.default_rng(0)
    for number in range(1, 12):
        gains = rng.normal(0.3, 1, number).round(1)
        sums = [sum(signs) for signs in itertools.product(*((gain, -gain) for gain in gains))]
        least = (1 - tolerance) * abs(sum(gains)) - 1e-9
        expected = np.mean([total >= least for total in sums])
        assert aggregate.sign_flip_p(gains, tolerance) == pytest.approx(expected)


def test_sign_flip_p_of_many_gains_is_that_of_the_normal_distribution():
    gains = np.random.default_rng(0).normal(0.2, 1, 60)
    expected = 0.5 * math.erfc(gains.sum() / np.sqrt(2 * (gains**2).sum()))
    assert aggregate.sign_flip_p(gains) == pytest.approx(expected, abs=0.01)


def test_an_interval_is_stratified_reproducible_and_leaves_the_generator_alone():
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.get_state()[1].copy()  # noqa: NPY002
    # Tasks differ by 100, seeds do not differ: resampling over tasks would show.
    flat = aggregate.estimate(aggregate.mean, np.array([[0.0, 100.0]] * 5))
    assert flat[:4] == (50.0, 50.0, 50.0, 5)
    spread = np.array([[0.0, 100.0]] * 5) + np.arange(5)[:, None]
    one, two = (aggregate.estimate(aggregate.mean, spread) for _ in range(2))
    assert one[:4] == two[:4]
    assert 50 <= one.low < one.value == 52 < one.high <= 54
    assert (np.random.get_state()[1] == expected).all()  # noqa: NPY002


@pytest.mark.parametrize("num_tasks", [1, 5])
def test_how_often_an_interval_of_five_seeds_covers_is_what_the_page_says(num_tasks):
    """Normal scores, a hundred experiments at a time."""
    rng, num_seeds, covered = np.random.default_rng(0), 5, []
    size = (1_000, num_tasks, num_seeds)
    for _ in range(200):
        drawn = rng.multinomial(num_seeds, [1 / num_seeds] * num_seeds, size[:-1])
        scores = rng.normal(size=(100, *size[1:])).reshape(100, -1)
        means = scores @ (drawn.reshape(len(drawn), -1).T / (num_tasks * num_seeds))
        low, high = np.percentile(means, [2.5, 97.5], axis=1)  # [100]
        covered += [(low <= 0) & (high >= 0)]
    said = " ".join(report.HOW.split())
    said = re.search(r"mean of five tasks (\d+)% of the time and that of one task (\d+)%", said)
    assert int(said[1 + (num_tasks == 1)]) == pytest.approx(100 * np.mean(covered), abs=0.7)


def test_how_often_one_of_five_tasks_is_judged_by_chance_is_what_the_page_says():
    either_way = 2 * aggregate.sign_flip_p(np.ones(5))
    page = " ".join((ROOT / "docs" / "frontier.md").read_text().split())
    assert f"by chance once in {1 / either_way:.0f}" in page
    assert f"at least one is judged {100 * (1 - (1 - either_way) ** 5):.0f}% of the time" in page


@pytest.mark.parametrize("seeds", [1, 4])
def test_few_seeds_have_no_interval(seeds):
    found = aggregate.difference(np.full((seeds, 1), 2.0), np.ones((seeds, 1)))
    assert found.value == 1.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert aggregate.support(found) == "open"
    assert report.interval(found) == "1.00"


@pytest.mark.parametrize(
    ("value", "p", "expected"),
    [(0.1, 0.05, "supported"), (-0.1, 0.05, "contradicted"), (0.1, 0.06, "undecided"),
     (0.0, 1.0, "undecided")],
)  # fmt: skip
def test_support(value, p, expected):
    assert aggregate.support(aggregate.Estimate(value, -1.0, 1.0, 5, p)) == expected
    assert aggregate.support(aggregate.Estimate(value, -1.0, 1.0, 4, p)) == "open"


def test_band_is_the_mean_and_standard_error_of_running_means():
    curves = [{1: 0.0, 2: 2.0, 3: 4.0}, {1: 2.0, 2: 4.0, 3: 12.0, 4: 99.0}]
    steps, mean, error, seeds = aggregate.band(curves, window=2)
    assert seeds == 2
    assert steps.tolist() == [1, 2, 3]
    assert mean.tolist() == [1.0, 2.0, 5.5]  # of (0, 1, 3) and (2, 3, 8)
    np.testing.assert_allclose(error, [1.0, 1.0, 2.5])
    assert np.isnan(aggregate.band(curves[:1])[2]).all()


def test_shortfall_sorts_runs_by_the_stage_that_failed():
    def row(score, first):
        return {"score": score, "first_reward_step": first, "states": 10}

    rows = [row(0, None), row(0.2, 100), row(0.3, 300), row(0.9, 50)]
    curves = [{1: 0}, {1: 0.4, 2: 0.2}, {1: 0.8, 2: 0.8}, {1: 0.9}]
    assert aggregate.shortfall(rows, curves, 0.5) == (1, 1, 1, 1, 200.0, 10.0)
    assert aggregate.shortfall(rows[:2], curves[:2], 0.5).first_reward == math.inf


def test_profiles_are_shares_of_runs_above():
    matrix = np.array([[0.0, 1.0], [0.5, 1.0]])
    ((values, interval),) = aggregate.profiles({"x": matrix}, np.array([0.25, 0.75])).values()
    assert values.tolist() == [0.75, 0.5]
    assert interval.shape == (2, 2)


# --------------------------------------------------------------------------------------------------
# What the report says
# --------------------------------------------------------------------------------------------------

MINIGRID = list(report.read_paper()["minigrid"]["graph"])
MINATAR = list(report.read_paper()["minatar"]["graph"])


def test_the_reference_scores_are_those_of_the_script():
    rows = read_rows(report.PAPER / "atari_reference_scores.csv")
    found = {row["game"]: (float(row["random"]), float(row["human"])) for row in rows}
    assert found == script_of("atari100k").REFERENCE_SCORES


def write_rows(folder, scores, tasks, suite="minigrid", episode_seed="", seeds=5):
    """Rows of made-up runs. scores: (backup, variant) -> score of a seed and a task."""
    found = {}
    for (backup, variant), score_of in scores.items():
        for task in tasks:
            for seed in range(1, seeds + 1):
                score = score_of(seed, task)
                row = {
                    "score": score, "steps": 100_000, "wall_seconds": 9, "steps_per_second": 9,
                    "novel_state_ratio": 0.25, "states": 40, "first_reward_step": "",
                    "commit": "abc1234",
                }  # fmt: skip
                key = Key(suite, task, backup, variant, episode_seed, seed)
                found[key] = (row, {1000: 0.0, 2000: score})
    Records(folder).add(found)


def make_report(tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    words = ["report.py", "--results-dir", tmp_path, "--out", tmp_path / "docs" / "report.md",
             "--readme", readme]  # fmt: skip
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    report.main()
    return (tmp_path / "docs" / "report.md").read_text(), readme.read_text()


def claim(text, name):
    (line,) = re.findall(rf"^- \*\*{re.escape(name)}.*$", text, re.MULTILINE)
    return line


def test_claims_follow_the_data_whichever_way_they_point(tmp_path, monkeypatch):
    scores = {
        ("graph", ""): lambda seed, _: 0.5 + 0.01 * seed,
        ("tree", ""): lambda seed, _: 0.2 + 0.01 * seed,
        ("n-step", ""): lambda seed, _: 0.7 + 0.01 * seed,
        ("one-step", ""): lambda seed, _: 0.52 + 0.1 * (seed - 3),
    }
    write_rows(tmp_path, scores, MINIGRID)
    text, readme = make_report(tmp_path, monkeypatch)
    assert "0.53 and 0.23, difference 0.30 [" in claim(text, "graph > tree")
    assert claim(text, "graph > tree").endswith("supported (5 seeds).")
    assert claim(text, "tree > n-step").endswith("contradicted (5 seeds).")
    assert claim(text, "graph > one-step").endswith("undecided (5 seeds).")
    assert "| MiniGrid | graph | 5 | 0.53 | 0.58 |" in text
    assert "Atari 100K: no run" in text
    assert "100 runs, made by the code at abc1234 in 0.2 hours" in text  # 9 s each
    assert re.search(r"orders of the means: graph > tree supported; .* contradicted", readme)
    assert "`graph` 0 of 25, and solved 0" in text
    # graph is below the paper in Empty-8x8 (0.96 +- 0) alone; no run met a reward.
    assert "| Empty-8x8 | graph | 0.53 (5) | 0.96 | 5 | 0 | 0 | 0 | none | 40 |" in text
    assert readme.startswith("before\n")
    assert readme.endswith("after\n")
    assert "| MiniGrid | graph | 5 | 0.53 | 0.58 |" in readme
    assert "old" not in readme
    for picture in re.findall(r"\]\((\w+\.png)\)", text):
        assert (tmp_path / "docs" / picture).stat().st_size > 5_000
    assert "report_profiles.png" in text


@pytest.mark.parametrize(
    ("no_reward", "chances", "expected"),
    [
        (0, (0.01, 1, 1), "further propagation"),
        (0, (0.01, None, 0.01), "further propagation and frontier episodes"),
        (2, (1, 0.01, 1), "no sampling of the graph and exploration (2 runs met no reward)"),
        (2, (1, 1, 0.01), "exploration (2 runs met no reward)"),
        (0, (1, 1, 1), "none of these"),
        (0, (1, None, 1), "open"),
    ],
)
def test_what_helps(no_reward, chances, expected):
    why = aggregate.Shortfall(no_reward, 5 - no_reward, 0, 0, 100.0, 40.0)
    gains = {
        column: None if p is None else aggregate.Estimate(0.5, 0.0, 1.0, 5, p)
        for column, p in zip(report.REMEDIES, chances, strict=True)
    }
    assert report.what_helps(why, gains) == expected


def test_runs_that_met_a_reward_and_solved():
    def row(score, first, best=1.0):
        return {"score": score, "first_reward_step": first, "curve": {1000: best}}

    protocol = report.new_protocol("minigrid", "", report.read_paper())
    protocol.cells = {
        "graph": {"a": {1: row(0.9, 10), 2: row(0.0, 20), 3: row(0.0, None)}},
        "tree": {"a": {1: row(0.89, 10), 2: row(0.0, None, 0.0)}},
    }
    text = report.exploration_text(protocol)
    assert "`tree` 1 of 2, and solved 0; `graph` 2 of 3, and solved 1." in text


def test_a_low_score_is_set_beside_what_would_mend_it(tmp_path, monkeypatch):
    scores = {
        ("graph", ""): lambda seed, _: 0.01 * seed,
        ("graph", "exploration=frontier"): lambda seed, _: 20 + 0.01 * seed,
        ("tree", "exploration=frontier"): lambda *_: 30.0,  # not of this report
    }
    write_rows(tmp_path, scores, ["freeway"], "minatar", "fresh")
    text, _ = make_report(tmp_path, monkeypatch)
    assert "5 runs, made by" in text
    exploration = "exploration (5 runs met no reward)"
    assert "| freeway | graph | 0.03 (5) | 30.28 | 5 |" in text
    (row,) = re.findall(r"^\| freeway \| 30.25 .*$", text, re.MULTILINE)
    assert re.sub(r" \[.*\]", "", row) == f"| freeway | 30.25 | - | - | 20.00 (5) | {exploration} |"


def test_n_step_as_released_stands_beside_ours_and_the_papers(tmp_path, monkeypatch):
    write_rows(tmp_path, {("n-step", ""): lambda *_: 0.9}, MINIGRID)
    of_run = {"suite": "minigrid", "episode_seed": "", "first_reward_step": "", "commit": "x",
              "update": "released"}  # fmt: skip
    rows = [
        of_run | {"task": task, "depth": depth, "seed": seed, "score": 0.1 if depth == 10 else 0.5}
        for depth, tasks in ((5, MINIGRID), (10, ["MiniGrid-Empty-8x8-v0"]))
        for task in tasks for seed in (1, 2)
    ]  # fmt: skip
    output.write_rows(tmp_path / "released_n_step.csv", released_n_step.COLUMNS, rows)
    text, readme = make_report(tmp_path, monkeypatch)
    assert "25 runs, made by" in text
    deep = "n-step, as released, depth"
    assert f"| task | n-step | {deep} 5 | {deep} 10 | paper |" in text
    scores = "0.90 ± 0.00 (5), above | 0.50 ± 0.00 (2), above | 0.10 ± 0.00 (2), inside"
    assert f"| Empty-8x8 | {scores} | 0.11 ± 0.07 |" in text
    assert f"0 of `n-step`, 0 of `{deep} 5`, 1 of `{deep} 10`." in text
    assert "| **mean of tasks** | 0.90 | 0.50 | - | 0.02 |" in text
    assert "| mean distance, normalised | 0.88 | 0.48 | - |  |" in text
    assert "as released" not in readme


def test_one_seed_of_a_variant_is_compared_with_that_seed(tmp_path, monkeypatch):
    write_rows(tmp_path, {("graph", ""): lambda seed, _: 0.9 if seed == 1 else 0.0}, MINIGRID)
    write_rows(tmp_path, {("graph", "breadth=0"): lambda *_: 0.95}, MINIGRID, seeds=1)
    text, readme = make_report(tmp_path, monkeypatch)
    assert "| MiniGrid | graph | 5 | 0.18 | 0.58 | 0.18 |" in readme
    assert "| MiniGrid | graph, breadth 0 | 1 | 0.95 |  | 0.90 |" in readme
    assert "| graph, breadth 0 | 0.00 | -0.05 |" in text


def test_a_partial_grid_says_what_is_missing(tmp_path, monkeypatch):
    write_rows(tmp_path, {("graph", ""): lambda *_: 0.96}, MINIGRID[:2], seeds=2)
    write_rows(tmp_path, {("tree", "gamma=0.5"): lambda *_: 0.1}, MINIGRID[:1], seeds=1)
    text, _ = make_report(tmp_path, monkeypatch)
    assert claim(text, "graph > tree").endswith("not enough runs yet.")
    assert "0 to 2 seeds per task and backup" in text.lower()
    assert "| MiniGrid | graph | - | - | 0.58 | - |" in text
    assert "| - | - | - | 0.96 ± 0.00 (2), above |" in text
    assert "1 row with other flags: not shown" in text
    assert "episode seeding" not in text
    write_rows(tmp_path, {("graph", ""): lambda *_: 1.0}, MINATAR[:1], "minatar", "fresh")
    assert "Only one of the two has been run." in make_report(tmp_path, monkeypatch)[0]


def test_both_episode_seedings_are_compared(tmp_path, monkeypatch):
    paper = report.read_paper()["minatar"]

    def near(shift):
        return {
            (backup, ""): lambda seed, task, b=backup: paper[b][task][0] + shift + 0.001 * seed
            for backup in report.OF_THE_PAPER
        }

    write_rows(tmp_path, near(0.0), MINATAR, "minatar", "fixed")
    write_rows(tmp_path, near(-0.5), MINATAR, "minatar", "fresh")
    text, _ = make_report(tmp_path, monkeypatch)
    assert "under **fixed episode seeds** are nearer" in text
    assert "`tree` under fixed episode seeds, `graph` under fixed episode seeds." in text
    assert re.search(
        r"\| fixed episode seeds \| 20 \| 0 \| 0 \| all 0.00, .* \| seaquest 0.00, .* 0.250 \|",
        text,
    )
    fixed, fresh = re.findall(r"^- \*\*Freeway as the main.*$", text, re.MULTILINE)
    assert "(paper: +29.82 in Freeway, -1.96 in the other four)" in fixed
    assert "29.82 [29.82, 29.82] in Freeway, -1.96 [-1.96, -1.96] in the other four" in fixed
    assert fixed.endswith("supported (5 seeds).")
    assert fresh.endswith("supported (5 seeds).")  # both lost 0.5 alike
    assert "is the same under both" not in text


def test_other_rows_have_a_report_of_their_own(tmp_path, monkeypatch, capsys):
    write_rows(tmp_path, {("graph", ""): lambda *_: 0.9}, MINIGRID[:1], seeds=1)
    monkeypatch.setattr(sys, "argv", ["report.py", "--results-dir", str(tmp_path)])
    readme = (ROOT / "README.md").read_bytes()
    report.main()
    assert capsys.readouterr().out == f"wrote {tmp_path / 'report.md'}\n"
    assert "1 run, made by" in (tmp_path / "report.md").read_text()
    assert (ROOT / "README.md").read_bytes() == readme


def test_rows_without_a_column_are_named(tmp_path, monkeypatch, capsys):
    write_rows(tmp_path, {("tree", "gamma=0.5"): lambda *_: 0.1}, MINIGRID[:1], seeds=2)
    with pytest.raises(SystemExit):
        make_report(tmp_path, monkeypatch)
    assert "2 are of others: one-step" in capsys.readouterr().err


def test_no_rows_is_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        make_report(tmp_path, monkeypatch)
    assert stopped.value.code == 2
    assert "no rows" in capsys.readouterr().err


def test_the_committed_report_is_of_the_committed_rows():
    text = (ROOT / "docs" / "report.md").read_text()
    protocols, _ = report.read_protocols(ROOT / "results")
    number = sum(
        len(seeds) for p in protocols for column in p.columns
        for seeds in p.cells.get(column, {}).values()
    )  # fmt: skip
    assert f"{number} runs, made by the code at" in text
    assert report.HOW in text
    for protocol in protocols:
        assert report.task_table(protocol) in text
        if report.released_columns(protocol):
            assert all(part in text for part in report.released_text(protocol))
    shown = (ROOT / "README.md").read_text().split(report.BEGIN)[1].split(report.END)[0]
    assert shown.strip().replace("](docs/", "](") in text


# --------------------------------------------------------------------------------------------------
# The tables of the frontier page
# --------------------------------------------------------------------------------------------------


def frontier_records(folder, first_seed=1):
    """Two seeds of one-step and graph on DoorKey: with the frontier, graph ends at 0.9 and 0.8."""
    found = {}
    for backup, variant, last in (
        ("one-step", "", (0.0, 0.0)), ("graph", "", (0.9, 0.0)),
        ("graph", "exploration=frontier", (0.9, 0.8)),
        ("graph", "breadth=0 exploration=frontier", (0.1, 0.1)),  # not of this page
    ):  # fmt: skip
        for seed, score in enumerate(last, first_seed):
            key = Key("minigrid", "MiniGrid-DoorKey-6x6-v0", backup, variant, "", seed)
            curve = {1000 * i: score if i > 45 else 0.0 for i in range(1, 101)}
            row = {"score": score, "steps": 100_000, "states": 10, "novel_state_ratio": 0.1,
                   "first_reward_step": 700 if score else "", "commit": "abc"}  # fmt: skip
            found[key] = (row, curve)
    records = Records(folder)
    records.add(found)
    return records


def table_rows(text, first):
    """Cells of the rows that begin with a cell."""
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    return [row for row in rows if row and row[0] == first]


def test_frontier_tables(tmp_path):
    records = frontier_records(tmp_path)
    text = "\n".join(frontier_report.parts_of_page(records, tmp_path))
    assert "6 runs." in text
    at_50, at_100, found = table_rows(text, "DoorKey-6x6")
    assert at_50 == at_100  # the last evaluations until 50,000 are as good as the last of all
    assert at_50[1:] == [
        "0.00, 0 of 2", "0.45, 1 of 2", "0.85, 2 of 2"
    ]  # fmt: skip
    header, _ = table_rows(text, "task")[:2]
    assert header[1:] == ["one-step, off", "graph, off", "graph, frontier"]
    assert found[1:] == ["10", "1 of 2", "-", "10", "2 of 2", "700"]
    (empty, *_) = table_rows(text, "Empty-8x8")
    assert empty[1:] == ["-", "-", "-"]
    # Of one task alone a difference can be told: from 0.9 and 0 to 0.9 and 0.8.
    (change,) = table_rows(text, "frontier")
    assert change[1:5] == ["DoorKey-6x6", "0.45", "0.85", "0.40"]
    assert change[5:] == ["1 : 0", "0.500", "open", "2"]
    assert "](frontier_minigrid_curves.png)" in text
    assert (tmp_path / "frontier_minigrid_curves.png").stat().st_size > 0
    # Both are running means of five evaluations.
    part = frontier_report.read_part(records, "minigrid", "")
    (curves,) = frontier_report.graph_curves(part, ["MiniGrid-DoorKey-6x6-v0"]).values()
    steps, mean, _, seeds = curves["graph, frontier"]
    assert (steps[45], seeds) == (46_000, 2)
    np.testing.assert_allclose(mean[[44, 45, 99]], [0, 0.85 / 5, 0.85])
    np.testing.assert_allclose(curves["graph"][1][[44, 45, 99]], [0, 0.45 / 5, 0.45])


def test_frontier_report_replaces_its_tables(tmp_path, monkeypatch, capsys):
    frontier_records(tmp_path / "results")
    frontier_records(tmp_path / "results" / "more_seeds", first_seed=6)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{frontier_report.BEGIN}\nold\n{frontier_report.END}\nafter\n")
    words = ["--results-dir", str(tmp_path / "results"), "--out", str(page)]
    monkeypatch.setattr(sys, "argv", ["frontier_report.py", *words])
    frontier_report.main()
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "0.85, 2 of 2" in text
    first, title, more = text.partition("### MiniGrid: seeds 6 to 7")
    assert "6 runs." in first  # other seeds are not mixed in
    assert title
    change, together = table_rows(more, "frontier")
    assert change[1:5] == together[1:5] == ["DoorKey-6x6", "0.45", "0.85", "0.40"]
    assert (change[-1], together[-1]) == ("2", "4")
    monkeypatch.setattr(sys, "argv", ["frontier_report.py", *words[:2]])
    with pytest.raises(SystemExit):
        frontier_report.main()
    assert "--out is needed" in capsys.readouterr().err  # our page is not of other rows
    words[1] = str(tmp_path / "nothing")
    monkeypatch.setattr(sys, "argv", ["frontier_report.py", *words])
    with pytest.raises(SystemExit) as stop:
        frontier_report.main()
    assert stop.value.code == 2
    assert "no rows" in capsys.readouterr().err


def test_our_rows_by_a_relative_path_through_a_link_are_our_rows(tmp_path, monkeypatch):
    frontier_records(tmp_path / "disk")
    (tmp_path / "results").symlink_to("disk")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "frontier.md"
    page.write_text(f"{frontier_report.BEGIN}\nold\n{frontier_report.END}")
    monkeypatch.setattr(frontier_report, "ROOT", tmp_path)
    monkeypatch.setattr(frontier_report, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["frontier_report.py", "--results-dir", "results"])
    frontier_report.main()
    assert "0.85, 2 of 2" in page.read_text()


def frontier_row(title, task):
    """off, on, difference, runs, p, verdict and seeds of a row in the frontier page's part."""
    page = (ROOT / "docs" / "frontier.md").read_text().split(f"### {title}")[1].split("### ")[0]
    (row,) = re.findall(rf"^\| frontier \| {re.escape(task)} \| .* \|$", page, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")[3:-1]]


def test_the_readme_says_of_minatar_what_the_frontier_page_has():
    readme = " ".join((ROOT / "README.md").read_text().split())
    cells = frontier_row("MinAtar, fixed episode seeds\n", "freeway")
    said = re.search(r"goes from (\S+) to (\S+) \((\d) of (\d) seeds score more\)", readme).groups()
    assert [float(n) for n in said[:2]] == pytest.approx([*map(float, cells[:2])], abs=0.051)
    assert (said[2], said[3]) == (cells[3].split(" : ")[0], cells[-1])
    cells = frontier_row("MinAtar, fixed episode seeds\n", "**mean of tasks**")
    assert f"goes from {cells[0]} to {cells[1]} (the paper's Graph Backup: 11.83)" in readme
    assert cells[5] == "better"
    cells = frontier_row("MinAtar, fresh episodes\n", "**mean of tasks**")
    assert f"its games changes ({cells[0]} to {cells[1]}, p {cells[4]})" in readme
    assert cells[5] == "undecided"


@pytest.mark.parametrize(
    "task", ["KeyCorridorS3R3", "MultiRoom-N4-S5", "DoorKey-8x8", "LavaCrossingS9N3", "FourRooms"]
)
def test_the_readme_says_of_harder_tasks_what_the_frontier_page_has(task):
    readme = " ".join((ROOT / "README.md").read_text().split())
    off, on, *_, seeds = frontier_row("MiniGrid, harder tasks\n", task)
    assert re.search(rf"{on} in {task} \((without it )?{off}[);]", readme)
    assert seeds == "5"


def test_score_at_a_step_is_that_of_a_run_that_ends_there():
    curve = {1000 * i: float(i) for i in range(1, 101)}
    assert frontier_report.score_at(curve, 100_000) == np.mean(range(91, 101))
    assert frontier_report.score_at(curve, 50_000) == np.mean(range(46, 51))
    assert frontier_report.score_at(curve, 101_000) is None
    assert frontier_report.score_at({}, 10) is None


def test_the_readme_answers_whether_it_reproduces_as_the_report_does():
    readme = (ROOT / "README.md").read_text()
    shown = readme.split(report.BEGIN)[1].split(report.END)[0]
    minigrid, fixed, fresh = (
        line.split("orders of the means: ")[1] for line in shown.splitlines()
        if line.startswith("- **Mini") or line.startswith("- **MinAtar")
    )  # fmt: skip
    assert minigrid.startswith("graph > tree, graph > one-step, ")
    assert "; graph > tree contradicted" in fixed
    assert "; graph > tree, tree > n-step undecided" in fresh
    answer = " ".join(readme.split("**Does it reproduce?**")[1].split(report.BEGIN)[0].split())
    assert "`graph` scores what the paper has, and more than tree and one-step backup" in answer
    assert "contradicted with fixed episode seeds and undecided with fresh ones" in answer
    page = (ROOT / "docs" / "report.md").read_text().split("### n-step as the authors released it")
    (row,) = re.findall(r"^\| Empty-8x8 \|.*$", page[1], re.MULTILINE)
    ours, _, released, deep, paper = re.findall(r"\d\.\d\d ± \d\.\d\d", row)
    assert f"({released} in Empty-8x8, as the paper has, for {ours.split()[0]})" in answer
    assert released == paper
    assert deep == ours
