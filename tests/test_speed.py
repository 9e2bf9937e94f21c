"""tools/speed.py: scripts take turns by their command line, and ratios are those within turns."""

import shutil

import pytest
import speed
from conftest import ROOT, command, jitted

from benchmark import timings


@jitted
def test_a_copy_of_a_script_is_timed(tmp_path, capsys):
    copy = shutil.copy(ROOT / "gb_dqn_minigrid.py", tmp_path)
    (tmp_path / "gbcore").symlink_to(ROOT / "gbcore")
    words = "--env-ids Empty-5x5 --backups graph --variants learning_starts=40 --turns 1 "
    words = (words + "--warm-up-steps 10 --steps 16").split()
    assert command(speed, *words, "--scripts", copy) == 0
    out, err = capsys.readouterr()
    *row, rate = err.split()
    # 16 steps are eight rows of two; the clock starts with the first row that begins after 50.
    assert row == [copy, "MiniGrid-Empty-5x5-v0", "graph", "learning_starts=40", "16"]
    assert float(rate) > 0
    assert "`gb_dqn_minigrid.py`, MiniGrid-Empty-5x5-v0" in out
    assert "| graph, learning_starts=40 | **" in out


def test_scripts_and_backups_take_turns(monkeypatch):
    made = []

    def timed(args, *contestant):
        made.append(contestant)
        names = ("script", "task", "backup", "variant")
        return dict(zip(names, contestant, strict=True)) | {"steps": 1, "steps_per_second": 1}

    monkeypatch.setattr(speed, "timed", timed)
    assert command(speed, "--scripts", "a", "b", "--backups", "x", "y", "--turns", "2") == 0
    assert made == [(s, "", b, "default") for _ in range(2) for s in "ab" for b in "xy"]


def test_rates_count_from_a_step_on(tmp_path):
    rates = ((10, 1000), (20, 10), (30, 5), (35, 5))
    lines = ["global_step,charts/SPS", *(f"{step},{rate}" for step, rate in rates)]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    assert speed.rate(tmp_path, 10) == (pytest.approx(25 / 4), 25)
    assert speed.rate(tmp_path, 11) == (pytest.approx(15 / 3), 15)


def test_ratios_are_those_within_turns():
    common = {"script": "a", "task": "x", "variant": "default"}
    rates = {"one-step": (100, 10, 50), "graph": (50, 9, 40)}
    rows = [
        common | {"backup": backup, "steps_per_second": rate}
        for backup, of_turns in rates.items()
        for rate in of_turns
    ]
    text = speed.tables(rows)
    assert "| one-step | **50** (10 to 100) | 1.00 (1.00 to 1.00) |" in text
    assert "| graph | **40** (9 to 50) | 0.80 (0.50 to 0.90) |" in text


@jitted
def test_targets_are_timed(capsys):
    timings.targets(transitions=200, batches=20)
    assert capsys.readouterr().out.count("\n| ") == 5  # and the header
    timings.curve(1_000, 1_000)
    assert "\n| 1,000 | " in capsys.readouterr().out
