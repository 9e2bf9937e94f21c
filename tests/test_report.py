"""tools/aggregate.py against numbers worked out by hand, and what tools/report.py says."""

import itertools
import math
import re
import sys

import aggregate
import frontier_tables
import numpy as np
import output
import pytest
import report
import tables
from conftest import jitted
from output import read_rows
from run_records import RESULTS, ROOT, Key, Records, script_of

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
    ("mean", "paper", "expected"),
    [
        (0.38, (0.38, 0.47), "inside"), (0.85, (0.38, 0.47), "inside"),
        (0.86, (0.38, 0.47), "above"), (-0.09, (0.38, 0.47), "inside"),
        (-0.1, (0.38, 0.47), "below"),
        # 0.96 +- 0.00 in print; 0.9613 rounds to it.
        (0.9613, (0.96, 0.0), "inside"), (0.9652, (0.96, 0.0), "above"),
        (0.955, (0.96, 0.0), "inside"), (0.954, (0.96, 0.0), "below"),
    ],
)  # fmt: skip
def test_verdict(mean, paper, expected):
    assert aggregate.verdict(mean, *paper) == expected


def test_columns_are_scaled_and_need_every_task():
    table = {"a": {3: 30.0, 1: 10.0, 2: 20.0}, "b": {5: 5.0, 4: 3.0}}
    one, other = aggregate.columns(table, ["a", "b"], {"a": 10.0, "b": 0.5})
    assert (one.tolist(), other.tolist()) == ([1.0, 2.0, 3.0], [6.0, 10.0])
    assert aggregate.mean_of_tasks(one, other) == (2 + 8) / 2
    assert aggregate.columns({"a": {1: 1.0}}, ["a", "b"], {"a": 1.0, "b": 1.0}) is None


def test_backups_are_compared_on_the_seeds_that_both_have():
    one = {"a": {1: 0.1, 2: 0.2}, "b": {3: 0.3}, "c": {1: 0.0}}
    other = {"a": {2: 0.8, 3: 0.9}, "b": {1: 0.7}}
    assert aggregate.on_the_same_seeds(one, other) == [
        {"a": {2: 0.2}, "b": {}}, {"a": {2: 0.8}, "b": {}}
    ]  # fmt: skip
    assert aggregate.difference(one, other, ["a", "b"], {"a": 1.0, "b": 1.0}) is None
    assert aggregate.difference(one, other, ["a"], {"a": 0.5}).value == pytest.approx(-1.2)


def test_the_interquartile_mean_is_the_mean_of_the_middle_half():
    columns = np.array([100.0, 3.0, 5.0, 1.0]), np.array([2.0, 4.0, -50.0, 0.0])
    assert aggregate.interquartile_mean(*columns) == 2.5  # -50 0 | 1 2 3 4 | 5 100


def test_a_difference_is_of_pairs():
    seeds = range(5)
    other = {"a": {s: float(s * s) for s in seeds}, "b": {s: 7.0 - s for s in seeds}}
    one = {"a": {s: score + 1 for s, score in other["a"].items()}, "b": other["b"]}
    found = aggregate.difference(one, other, ["a", "b"], {"a": 1.0, "b": 1.0})
    assert found[:4] == (0.5, 0.5, 0.5, 5)
    assert found.p == found.strict_p == 1 / 32
    assert aggregate.difference(one, other, ["b"], {"b": 1.0}).p == 1.0


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([1, 1, 1, 1, 1], 1 / 32),
        ([-1, -1, -1, -1, -1], 1 / 32),
        ([2, 2, 2, -1], 2 / 16),  # + + + - and + + + +
        ([1, 1, 1, 0, 0], 1 / 8),
        ([1, 1, 1, 1e-3, 1e-3], 1 / 8),
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


def test_an_interval_is_stratified_and_reproducible():
    # Tasks differ by 100, seeds do not differ: resampling over tasks would show.
    flat = aggregate.estimate(aggregate.mean_of_tasks, [np.zeros(5), np.full(7, 100.0)])
    assert flat[:4] == (50.0, 50.0, 50.0, 5)
    spread = [np.arange(5.0), 100 + np.arange(5.0)]
    one, two = (aggregate.estimate(aggregate.mean_of_tasks, spread) for _ in range(2))
    assert one[:4] == two[:4]
    assert 50 <= one.low < one.value == 52 < one.high <= 54


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
    tables_of = [{"a": dict.fromkeys(range(seeds), score)} for score in (2.0, 1.0)]
    found = aggregate.difference(*tables_of, ["a"], {"a": 1.0})
    assert found.value == 1.0
    assert np.isnan([found.low, found.high]).all()
    assert aggregate.support(found) == "open"
    assert tables.interval(found) == "1.00"


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
    assert (steps.tolist(), seeds) == ([1, 2, 3], 2)
    assert mean.tolist() == [1.0, 2.0, 5.5]  # of (0, 1, 3) and (2, 3, 8)
    np.testing.assert_allclose(error, [1.0, 1.0, 2.5])
    assert np.isnan(aggregate.band(curves[:1])[2]).all()


def test_score_at_a_step_is_that_of_a_run_that_ends_there():
    curve = {1000 * i: float(i) for i in range(1, 101)}
    assert aggregate.score_at(curve, 100_000) == np.mean(range(91, 101))
    assert aggregate.score_at(curve, 50_000) == np.mean(range(46, 51))
    assert aggregate.score_at(curve, 101_000) is aggregate.score_at({}, 10) is None


def test_shortfall_sorts_runs_by_the_stage_that_failed():
    runs = [
        {"score": score, "first_reward_step": first, "curve": curve}
        for score, first, curve in (
            (0, None, {1: 0}), (0.2, 100, {1: 0.4, 2: 0.2}), (0.3, 300, {1: 0.8, 2: 0.8}),
            (0.9, 50, {1: 0.9}), (0.1, 50, {1: 0.1}),
        )
    ]  # fmt: skip
    assert aggregate.shortfall(runs, 0.5) == (1, 2, 1)


# --------------------------------------------------------------------------------------------------
# What the report says
# --------------------------------------------------------------------------------------------------

MINIGRID = list(tables.read_paper()["minigrid"]["graph"])
MINATAR = list(tables.read_paper()["minatar"]["graph"])


def test_the_reference_scores_are_those_of_the_script():
    rows = read_rows(tables.PAPER / "atari_reference_scores.csv")
    found = {row["game"]: (float(row["random"]), float(row["human"])) for row in rows}
    assert found == script_of("atari100k").REFERENCE_SCORES


def write_rows(folder, scores, tasks, suite="minigrid", episode_seed="", seeds=5, first=1):
    """Rows of made-up runs. scores: (backup, variant) -> score of a seed and a task."""
    found = {}
    for (backup, variant), score_of in scores.items():
        for task, seed in itertools.product(tasks, range(first, first + seeds)):
            score = score_of(seed, task)
            row = {
                "score": score, "steps": 100_000, "wall_seconds": 9, "steps_per_second": 9,
                "novel_state_ratio": 0.25, "states": 40, "commit": "abc1234",
                "first_reward_step": 700 if score > 0.7 else "",
            }  # fmt: skip
            curve = {1000 * i: score if i > 45 else 0.0 for i in range(1, 101)}
            found[Key(suite, task, backup, variant, episode_seed, seed)] = (row, curve)
    Records(folder).add(found)


def make_report(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report.py", "--results-dir", str(tmp_path)])
    report.main()
    return (tmp_path / "report.md").read_text()


def rows_of(text, first):
    """Cells after the first of every row that begins with it."""
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    return [row[1:] for row in rows if row and row[0] == first]


def test_claims_follow_the_data_whichever_way_they_point(tmp_path, monkeypatch):
    scores = {
        ("graph", ""): lambda seed, _: 0.5 + 0.01 * seed,
        ("tree", ""): lambda seed, _: 0.2 + 0.01 * seed,
        ("n-step", ""): lambda seed, _: 0.7 + 0.01 * seed,
        ("one-step", ""): lambda seed, _: 0.52 + 0.1 * (seed - 3),
    }
    write_rows(tmp_path, scores, MINIGRID)
    text = make_report(tmp_path, monkeypatch)
    ((paper, here, difference, verdict),) = rows_of(text, "graph > tree")
    assert (paper, here, difference) == ("0.58, 0.20", "0.53, 0.23", "0.30 [0.30, 0.30]")
    assert verdict == "supported, p < 0.001"
    assert rows_of(text, "tree > n-step")[0][-1] == "contradicted, p < 0.001"
    assert rows_of(text, "graph > one-step")[0][-1].startswith("undecided, p ")
    assert "`graph` 0.53 (0.58), `tree` 0.23 (0.20)" in text
    assert "graph > tree holds. The paper's other orders: " in text
    assert "Atari 100K: 0 of 26 games" in text
    assert "100 runs, made in 0.2 hours by the code at abc1234" in text  # 9 s each
    # graph is below the paper in Empty-8x8 (0.96 +- 0) alone; no run met a reward.
    (low,) = rows_of(text.split("### Where graph")[1], "Empty-8x8")
    assert low[:6] == ["0.53", "0.96", "5", "0", "0", "0"]
    assert low[-1] == "exploration (5 runs met no reward)"
    for picture in re.findall(r"\]\((\w+\.png)\)", text):
        assert (tmp_path / picture).stat().st_size > 5_000


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
    gains = {
        name: None if p is None else aggregate.Estimate(0.5, 0.0, 1.0, 5, p)
        for name, p in zip(report.REMEDIES, chances, strict=True)
    }
    assert report.what_helps(no_reward, gains) == expected


def test_n_step_as_released_stands_beside_ours_and_the_papers(tmp_path, monkeypatch):
    write_rows(tmp_path, {("n-step", ""): lambda *_: 0.9}, MINIGRID)
    of_run = {"suite": "minigrid", "episode_seed": "", "update": "released"}
    rows = [
        of_run | {"task": task, "depth": depth, "seed": seed, "score": 0.1 if depth == 10 else 0.5}
        for depth, tasks in ((5, MINIGRID), (10, ["MiniGrid-Empty-8x8-v0"]))
        for task in tasks for seed in (1, 2)
    ]  # fmt: skip
    output.write_rows(tmp_path / "released_n_step.csv", rows[0], rows)
    text = make_report(tmp_path, monkeypatch)
    assert "25 runs, made" in text
    part = text.split("### n-step as the authors released it")[1]
    assert rows_of(part, "n-step")[0][1] == "0.90 ± 0.00 (5), above"
    (five,), (ten,) = (rows_of(part, f"n-step, depth {n}, as released") for n in (5, 10))
    assert (five[1], *five[-2:]) == ("0.50 ± 0.00 (2), above", "0.50", "0.48")
    assert (ten[1], *ten[-2:]) == ("0.10 ± 0.00 (2), inside", "-", "-")
    assert rows_of(part, "paper")[0][1] == "0.11 ± 0.07"


def test_any_variant_has_a_row_and_is_compared_with_its_backup(tmp_path, monkeypatch):
    write_rows(tmp_path, {("graph", ""): lambda seed, _: 0.9 if seed == 1 else 0.0}, MINIGRID)
    write_rows(tmp_path, {("graph", "breadth=0"): lambda *_: 0.95}, MINIGRID, seeds=1)
    strange = ("tree", "learning_rate=0.01 total_timesteps=5000")
    write_rows(tmp_path, {strange: lambda *_: 0.1}, MINIGRID[:1], seeds=2)
    text = make_report(tmp_path, monkeypatch)
    assert rows_of(text, "**graph, breadth 0**")[0][-3:] == ["0.95", "0.95", "0.05"]  # of seed 1
    (row,) = rows_of(text, "**tree, learning rate 0.01, total timesteps 5000**")
    assert row == ["0.10 ± 0.00 (2)", *("-" * 7)]


def test_rows_of_a_sweep_with_overrides_alone_make_a_report(tmp_path, monkeypatch, capsys):
    write_rows(tmp_path, {("tree", "gamma=0.5"): lambda *_: 0.1}, MINIGRID[:1], seeds=2)
    text = make_report(tmp_path, monkeypatch)
    assert rows_of(text, "**tree, gamma 0.5**")[0][0] == "0.10 ± 0.00 (2)"
    assert rows_of(text, "graph > tree")[0][-1] == "not enough runs"
    assert "Only one" not in text
    write_rows(tmp_path, {("tree", ""): lambda *_: 0.1}, ["FourRooms"], "minigrid-hard", seeds=2)
    assert "## MiniGrid, harder tasks" in make_report(tmp_path, monkeypatch)  # not in the paper
    assert f"wrote {tmp_path / 'report.md'}\n" in capsys.readouterr().out


def test_both_episode_seedings_are_compared(tmp_path, monkeypatch):
    paper = tables.read_paper()["minatar"]

    def near(shift):
        return {
            (backup, ""): lambda seed, task, b=backup: paper[b][task][0] + shift + 0.001 * seed
            for backup in tables.OF_THE_PAPER
        }

    write_rows(tmp_path, near(0.0), MINATAR, "minatar", "fixed")
    assert "## Which episode seeding" not in make_report(tmp_path, monkeypatch)
    write_rows(tmp_path, near(-0.5), MINATAR, "minatar", "fresh")
    text = make_report(tmp_path, monkeypatch)
    assert "under **MinAtar, fixed episode seeds** are nearer" in text
    part = text.split("## Which episode seeding")[1]
    assert rows_of(part, "MinAtar, fixed episode seeds")[0] == [*["0.00"] * 5, "0.250"]


def test_no_rows_is_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        make_report(tmp_path, monkeypatch)
    assert stopped.value.code == 2
    assert f"no rows in {tmp_path}" in capsys.readouterr().err


def test_the_committed_pages_are_of_the_committed_rows(monkeypatch):
    monkeypatch.setattr(aggregate, "REPETITIONS", 5_000)
    text, readme, page = (
        (ROOT / name).read_text() for name in ("docs/report.md", "README.md", "docs/frontier.md")
    )
    protocols, more = map(tables.read_protocols, (RESULTS, RESULTS / "more_seeds"))
    assert report.HOW in text
    for protocol in protocols:
        assert report.score_table(protocol) in text
        assert not protocol.paper or report.claims_table(protocol) in text
    bullets = list(report.findings(protocols))
    assert len(bullets) == 3
    assert all(bullet in text and bullet in readme for bullet in bullets)
    assert len(text.split("## ")[0].splitlines()) <= 20
    assert all(part in page for part in frontier_tables.tables(protocols, more))
    assert all(f"- {line}" in page for line in frontier_tables.findings(protocols))
    assert len(page.splitlines()) <= 200
    # What is said of these rows elsewhere by hand.
    said = " ".join(readme.split())
    hard = next(p for p in protocols if p.suite == "minigrid-hard")
    means = [tables.short(hard.mean(name)) for name in ("graph", tables.FRONTIER)]
    assert f"go from {means[0]} to {means[1]}" in said
    released = " ".join((ROOT / "docs" / "released_code.md").read_text().split())
    empty = rows_of(text.split("### n-step as")[1], "n-step, depth 10, as released")[0][1]
    assert empty.startswith("0.11 ± 0.07 (5), inside")
    assert "0.11 ± 0.07 (paper 0.11 ± 0.07)" in released


# --------------------------------------------------------------------------------------------------
# The tables of the frontier page
# --------------------------------------------------------------------------------------------------


def test_frontier_tables(tmp_path):
    last = {("one-step", ""): (0, 0), ("graph", ""): (0.9, 0.0)}
    last |= {("graph", "exploration=frontier"): (0.9, 0.8)}
    last |= {("graph", "exploration=frontier frontier_share=0.1"): (0.9, 0.84)}
    scores = {name: lambda seed, _, of=of: of[(seed - 1) % 5] for name, of in last.items()}
    task = "MiniGrid-DoorKey-6x6-v0"
    write_rows(tmp_path, scores, [task], seeds=2)
    write_rows(tmp_path / "more", scores, [task], seeds=2, first=6)
    protocols, more = map(tables.read_protocols, (tmp_path, tmp_path / "more"))
    assert list(frontier_tables.findings(protocols)) == []  # not every task was run
    text = "\n".join(frontier_tables.tables(protocols, more))
    (row,) = rows_of(text, "DoorKey-6x6")
    assert row == [
        "0.45, 1 of 2", "0.85, 2 of 2", "0.40", "1 : 0", "0.500", "open", "40 → 40", "- → 700",
    ]  # fmt: skip
    assert rows_of(text, "DoorKey-6x6, share 0.1")[0][1] == "0.87, 2 of 2"
    for seeds, number in (("6 to 7", 2), ("1 to 7", 4)):
        (row,) = rows_of(text, f"MiniGrid: DoorKey-6x6, seeds {seeds}")
        assert row[:3] == [
            f"0.45, {number // 2} of {number}",
            f"0.85, {number} of {number}",
            "0.40",
        ]
    write_rows(tmp_path, scores, MINIGRID, seeds=2)
    (whole,) = tables.read_protocols(tmp_path)
    assert list(frontier_tables.findings([whole])) == ["MiniGrid: 0.45 and 0.85 (open, p = 0.031)"]
    assert "After 50,000 steps the means are 0.45 and 0.85." in list(
        frontier_tables.tables([whole], [])
    )
