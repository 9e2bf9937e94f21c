"""reproduce/aggregate.py against numbers worked out by hand, and what reproduce/report.py says."""

import itertools
import math
import re

import aggregate
import numpy as np
import pandas as pd
import pytest
import report
import report_figures
import suites
import tables
from conftest import ROOT, command, jitted
from folders import RESULTS

pytestmark = jitted


@pytest.fixture(autouse=True)
def few_repetitions(monkeypatch):
    monkeypatch.setattr(aggregate, "REPETITIONS", 200)


@pytest.mark.parametrize(
    ("mean", "paper", "expected"),
    [
        *((mean, (0.38, 0.47), "inside") for mean in (0.38, 0.85, -0.09)),
        *((mean, (0.96, 0.0), "inside") for mean in (0.9613, 0.955)),  # it rounds to 0.96
        *((mean, paper, "above") for mean, paper in ((0.86, (0.38, 0.47)), (0.9652, (0.96, 0.0)))),
        *((mean, paper, "below") for mean, paper in ((-0.1, (0.38, 0.47)), (0.954, (0.96, 0.0)))),
    ],
)
def test_verdict(mean, paper, expected):
    assert aggregate.verdict(mean, *paper) == expected


def test_cells_have_the_deviation_of_the_population():
    # The paper's LavaCrossing cell, 0.38 +- 0.47, is two of five seeds at 0.96.
    assert tables.cell_text([0.96, 0.96, 0.0, 0.0, 0.0]) == "0.38 ± 0.47 (5)"
    assert (tables.cell_text([0.5]), tables.cell_text([])) == ("0.50 (1)", "-")


def test_backups_are_compared_on_the_seeds_that_both_have():
    one, other = ({"a": {1: 0.1, 2: 0.2}, "b": {3: 0.3}}, {"a": {2: 0.8, 3: 0.9}, "b": {1: 0.7}})
    gains = pd.DataFrame(one) - pd.DataFrame(other)
    assert aggregate.difference(gains[["a"]]).value == pytest.approx(-0.6)
    assert aggregate.difference(gains) is None


def test_the_interquartile_mean_is_the_mean_of_the_middle_half():
    columns = np.array([100.0, 3.0, 5.0, 1.0]), np.array([2.0, 4.0, -50.0, 0.0])
    assert aggregate.interquartile_mean(*columns) == 2.5  # -50 0 | 1 2 3 4 | 5 100


def test_a_difference_is_of_pairs():
    seeds = np.arange(5.0)
    other = pd.DataFrame({"a": seeds**2, "b": 7 - seeds})
    gain = aggregate.difference(other.assign(a=other.a + 1) - other)
    assert gain[:4] == (0.5, 0.5, 0.5, 5)
    assert gain.p == pytest.approx(1 / 32)
    assert aggregate.difference(other - other).p == 1.0


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([-1, -1, -1, -1, -1], 1 / 32),
        ([2, 2, 2, -1], 2 / 16),  # + + + - and + + + +
        ([1, 1, 1, 0, 0], 1 / 8),
        ([1, 1, 1, 1e-3, 1e-3], 1 / 8),  # to two decimals
        ([1], 1 / 2),
    ],
)
def test_permutation_p(gains, expected):
    found = aggregate.permutation_p(pd.DataFrame({"": gains}, dtype=float))
    assert found == pytest.approx(expected)


def test_permutation_p_of_many_gains_is_that_of_the_normal_distribution():
    gains = np.random.default_rng(0).normal(0.2, 1, 60)
    expected = 0.5 * math.erfc(gains.sum() / np.sqrt(2 * (gains**2).sum()))
    assert aggregate.permutation_p(pd.DataFrame({"": gains})) == pytest.approx(expected, abs=0.01)


def test_an_interval_is_stratified_and_reproducible():
    # Tasks differ by 100, seeds do not differ: resampling over tasks would show.
    flat = {"a": pd.Series(np.zeros(5)), "b": pd.Series(np.full(7, 100.0))}
    flat = aggregate.estimate(aggregate.mean_of_tasks, pd.DataFrame(flat))
    assert flat[:4] == (50.0, 50.0, 50.0, 5)
    spread = pd.DataFrame({"a": np.arange(5.0), "b": 100 + np.arange(5.0)})
    one, two = (aggregate.estimate(aggregate.mean_of_tasks, spread) for _ in range(2))
    assert one[:4] == two[:4]
    assert 50 <= one.low < one.value == 52 < one.high <= 54


def test_few_seeds_have_no_interval_and_decide_nothing():
    gain = aggregate.difference(pd.DataFrame({"": [1.0] * 4}))
    assert gain.value == 1.0
    assert np.isnan([gain.low, gain.high]).all()
    assert tables.interval(gain) == "1.00"
    cases = {(0.1, 0.05): "supported", (-0.1, 0.05): "contradicted", (0.1, 0.06): "undecided"}
    for (value, p), expected in (cases | {(0.0, 1.0): "undecided"}).items():
        gain = gain._replace(value=value, p=p)
        assert aggregate.support(gain) == "open"
        assert aggregate.support(gain._replace(seeds=5)) == expected


MINIGRID, MINATAR = (list(tables.read_paper(suite)[0]) for suite in ("minigrid", "minatar"))


def write_rows(folder, scores, tasks, suite="minigrid", episode_seed="", seeds=5, first=1, **more):
    """Add rows of made-up runs. scores: (backup, variant) -> score of a seed and a task."""
    rows, path = [], folder / suites.TABLE
    for (backup, variant), score_of in scores.items():
        for task, seed in itertools.product(tasks, range(first, first + seeds)):
            key = suite, task, backup, variant, episode_seed, seed
            key = dict(zip(suites.KEY, key, strict=True))
            score = score_of(seed, task)
            row = {"score": score, "steps": 100_000, "wall_seconds": 360, "steps_per_second": 9}
            row |= {"novel_state_ratio": 0.25, "states": 40, "commit": "abc1234"}
            row["curve"] = " ".join(f"{1000 * i}:{score if i > 45 else 0}" for i in range(1, 101))
            rows.append(key | row | more)
    rows = pd.DataFrame(rows)
    if path.exists():
        rows = pd.concat([suites.read_table(folder), rows])
    rows.to_csv(path, index=False)


def write_games(folder, backup, variant, scores):
    """The same of Atari's, one run a game, of 1.4 hours. scores: of games."""
    row = {"wall_seconds": 5040, "steps_per_second": 20.05, "novel_state_ratio": 0.9}
    scores_of = {(backup, variant): lambda _, game: scores[game]}
    write_rows(folder, scores_of, scores, tables.ATARI, seeds=1, **row)


def make_report(folder):
    assert command(report, "--results-dir", folder) == 0
    return (folder / "report.md").read_text()


def rows_of(text, first):
    """Cells after the first of every row that begins with it."""
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    return [row[1:] for row in rows if row and row[0] == first]


def test_claims_follow_the_data_whichever_way_they_point(tmp_path):
    scores = {
        ("graph", ""): lambda seed, _: 0.5 + 0.01 * seed,
        ("tree", ""): lambda seed, _: 0.2 + 0.01 * seed,
        ("n-step", ""): lambda seed, _: 0.7 + 0.01 * seed,
        ("one-step", ""): lambda seed, _: 0.52 + 0.1 * (seed - 3),
    }
    write_rows(tmp_path, scores, MINIGRID)
    text = make_report(tmp_path)
    ((paper, here, difference, verdict),) = rows_of(text, "graph > tree")
    assert (paper, here, difference) == ("0.58, 0.20", "0.53, 0.23 (5)", "0.30 [0.30, 0.30]")
    assert verdict == "supported, p < 0.001"
    assert rows_of(text, "tree > n-step")[0][-1] == "contradicted, p < 0.001"
    assert rows_of(text, "graph > one-step")[0][-1].startswith("undecided, p ")
    cells = ["0.52 (0.14)", "0.73 (0.02)", "0.23 (0.20)", "0.53 (0.58)", "-", "-", "-", "5"]
    assert rows_of(text, "MiniGrid") == [cells]
    assert "Atari 100K" not in text
    assert "100 runs, made in 10.0 hours by the code at abc1234" in text
    assert rows_of(text, "novel state ratio of graph")[0][4:6] == ["0.250"] * 2
    assert rows_of(text, "**graph**")[0][1] == "0.53 ± 0.01 (5), below"  # Empty-8x8 has 0.96 +- 0
    mean, error, seeds = tables.read_protocols(tmp_path)[0].curves(["one-step"])["DoorKey-6x6"][
        "one-step"
    ]
    assert seeds == 5
    assert mean[[45_000, 46_000, 50_000]].tolist() == pytest.approx([0, 0.52 / 5, 0.52])
    assert error[50_000] == pytest.approx(0.1 * 0.5**0.5)
    for picture in re.findall(r"\]\((\w+\.png)\)", text):
        assert (tmp_path / picture).stat().st_size > 5_000


def test_a_claim_is_of_the_tasks_and_the_seeds_that_have_both(tmp_path):
    write_rows(tmp_path, {("graph", ""): lambda seed, _: 0.18 * seed}, MINIGRID)
    tree = {("tree", ""): lambda seed, _: 0.08 * seed}
    write_rows(tmp_path, tree, MINIGRID[:2], first=5)  # seed 5 of both
    write_rows(tmp_path, {("n-step", ""): lambda *_: 0.4}, MINIGRID, first=6)
    text = make_report(tmp_path)
    row = ["0.67, 0.48", "0.90, 0.40 (1; 2 of 5 tasks)", "0.50", "open, p 0.250"]
    assert rows_of(text, "graph > tree") == [row]  # the paper's: 0.38, 0.96 and 0.00, 0.96
    assert rows_of(text, "graph > n-step") == []
    assert rows_of(text, "tree > n-step")[0][1] == "0.60, 0.40 (4; 2 of 5 tasks)"


def test_the_whole_graph_is_compared_with_the_backups_and_at_its_own_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(report_figures, "draw_curves", lambda *_, **__: None)
    rate = "learning_rate=0.00025"
    whole = f"{rate} prior=0.3"
    scores = {
        ("whole-graph", whole): lambda seed, _: 5.0 + seed,
        ("whole-graph", whole.replace("0.3", "0.1")): lambda *_: 3.0,
        ("tree", ""): lambda seed, _: 1.0 + seed,
        ("tree", rate): lambda seed, _: 6.0 + seed,
    }
    write_rows(tmp_path, scores, MINATAR, "minatar", "fresh")
    # Of seeds that one of two has alone, a comparison shows nothing.
    others = {("whole-graph", whole): lambda *_: 98.0}
    write_rows(tmp_path, others, MINATAR, "minatar", "fresh", 5, 6)
    text = make_report(tmp_path)
    assert rows_of(text, f"{tables.WHOLE} > tree")[0][:2] == ["-, 6.26", "8.00, 4.00 (5)"]
    assert rows_of(text, f"**{tables.WHOLE}**")[0][5].startswith("53.00 ")
    (row,) = rows_of(text, f"{tables.WHOLE} > tree, rate 2.5e-4")
    assert row[3] == "contradicted, p < 0.001"
    assert rows_of(text, "**whole-graph, rate 2.5e-4, prior 0.1**")
    assert rows_of(text, "MinAtar, fresh episodes")[0][5] == "9.00"  # of tree, at that rate
    others = {("whole-graph", whole): lambda *_: 31.0}
    write_rows(tmp_path, others, MINATAR, "minatar-1m", "fresh", 1)
    row = rows_of(make_report(tmp_path), "MinAtar, 1,000,000 steps, fresh episodes")
    paper = ["- (21.15)", "- (11.46)", "- (15.33)", "- (22.13)"]
    assert row == [[*paper, "-", "-", "31.00", "1"]]
    # Where it was run under other flags alone, the summary has it, too.
    for score, flags in enumerate(("act_on=network", "exploration=frontier", "")):
        write_rows(tmp_path, {("whole-graph", flags): lambda *_, of=score: of}, MINIGRID)
        cells = rows_of(make_report(tmp_path), "MiniGrid")[0]
        assert cells[6:] == [f"{score:.2f}", "5"]  # of those that there are, the plainest


def test_any_variant_has_a_row_and_is_compared_with_its_backup(tmp_path):
    write_rows(tmp_path, {("graph", ""): lambda seed, _: 0.9 if seed == 1 else 0.0}, MINIGRID)
    write_rows(tmp_path, {("graph", "breadth=0"): lambda *_: 0.95}, MINIGRID, seeds=1)
    strange = ("tree", "learning_rate=0.01 total_timesteps=5000")
    write_rows(tmp_path, {strange: lambda *_: 0.1}, MINIGRID[:1], seeds=2)
    text = make_report(tmp_path)
    assert rows_of(text, "**graph, breadth 0**")[0][-3:] == ["0.95", "0.95", "0.05"]  # of seed 1
    (row,) = rows_of(text, "**tree, learning rate 0.01, total timesteps 5000**")
    assert row == ["0.10 ± 0.00 (2)", *("-" * 7)]


def test_rows_of_a_sweep_with_overrides_alone_make_a_report(tmp_path, capsys):
    write_rows(tmp_path, {("tree", "gamma=0.5"): lambda *_: 0.1}, MINIGRID[:1], seeds=2)
    text = make_report(tmp_path)
    assert "No setting has rows of all tasks yet." in text
    assert rows_of(text, "**tree, gamma 0.5**")[0][0] == "0.10 ± 0.00 (2)"
    assert "## The paper's claims" not in text
    rooms = ["MiniGrid-FourRooms-v0"]
    write_rows(tmp_path, {("tree", ""): lambda *_: 0.1}, rooms, "minigrid-hard", seeds=2)
    assert "## MiniGrid, harder tasks" in make_report(tmp_path)  # not in the paper
    assert f"wrote {tmp_path / 'report.md'}\n" in capsys.readouterr().out


def test_atari_runs_in_bfloat16_stand_in_beside_the_paper(tmp_path):
    write_games(tmp_path, "graph", "bf16=True", {"freeway": 21.3, "qbert": 1000.0})
    write_games(tmp_path, "one-step", "bf16=True", {"freeway": 15.0})
    write_games(tmp_path, "one-step", "", {"freeway": 14.8})
    write_games(tmp_path, "graph", "bf16=True", {"space_invaders": 500.0})  # none of the 26
    text = make_report(tmp_path)
    # 100 * 21.3 / 29.6 percent of human; the paper has 64.16 +- 46.23.
    assert rows_of(text, "**graph**")[0][0] == "71.96 (1), inside"
    assert rows_of(text, "**one-step**")[0][:2] == ["50.00 (1), inside", "-"]
    assert [row[0] for row in rows_of(text, "paper")] == ["53.29 ± 38.45", "64.16 ± 46.23"]
    assert rows_of(text, "Atari 100K, 2 games, % of human")[0][0].startswith("- (")
    assert rows_of(text, "graph > one-step")[0][:2] == [
        "64.16, 53.29",
        "71.96, 50.00 (1; 1 of 2 tasks)",
    ]
    assert rows_of(text, "graph > tree") == []
    assert (tmp_path / "report_atari100k_curves.png").stat().st_size > 5_000


def test_the_committed_pages_are_of_the_committed_rows(monkeypatch):
    monkeypatch.setattr(aggregate, "REPETITIONS", 5_000)
    names = "docs/report.md docs/scores.md README.md".split()
    text, scores, readme = ((ROOT / name).read_text() for name in names)
    for protocol in tables.read_protocols(RESULTS):
        assert report.score_table(protocol) in scores
        assert not protocol.in_paper or report.claims_table(protocol) in text
    table = report.summary(tables.read_protocols(RESULTS, RESULTS / "whole_graph"))
    assert table in text
    assert table in readme
