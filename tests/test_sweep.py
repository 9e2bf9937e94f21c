"""reproduce/sweep.py: which runs it makes, what rows they leave, and how it goes on."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import suites
import sweep
import tyro
from conftest import ROOT, command, jitted
from gbtools.runs import read_rows

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]


def flags_of(suite, flags):
    """All flags of a suite's run."""
    decide = {name: flags[name] for name in ("backup", "num_levels") if name in flags}
    steps = {"total_timesteps": suites.SUITES[suite].total_timesteps}
    return asdict(suites.script_of(suite).Args(**decide)) | steps | flags


def make_run(folder, suite="minigrid", finished=True, returns=(0.0, 0.5, 1.0), **flags):
    """A run's folder as a script leaves it: two evaluation episodes around each mean return."""
    folder.mkdir(parents=True)
    config = flags_of(suite, flags) | {"script": f"{suites.SUITES[suite].script}.py"}
    (folder / "config.json").write_text(json.dumps(config))
    lines = ["global_step,episode,episodic_return,episodic_length"]
    for i, mean in enumerate(returns, 1):
        lines += [f"{1000 * i},0,{mean - 0.25},7", f"{1000 * i},1,{mean + 0.25},7"]
    (folder / "evaluations.csv").write_text("\n".join(lines) + "\n")
    (folder / "metrics.csv").write_text("global_step,graph/nodes\n500,11\n1000,23\n")
    result = {"script": suites.script_of(suite).__name__, "env_id": config["env_id"]}
    result |= {"steps": config["total_timesteps"], "interrupted": not finished}
    result |= {"score": returns[-1] if finished else None, "novel_state_ratio": 0.25}
    result |= {"sps": 123.456, "training_seconds": 60.0, "wall_seconds": 45.0}
    result |= {"versions": {"commit": "abc1234"}}
    (folder / "result.json").write_text(json.dumps(result))


def test_a_row_holds_what_the_run_measured(tmp_path):
    make_run(tmp_path / "run", env_id="Empty-8x8", seed=3, breadth=0)
    assert list(suites.row_of(tmp_path / "run").values()) == [
        "minigrid", "MiniGrid-Empty-8x8-v0", "graph", "breadth=0", "", 3,
        1.0, 100_000, 60.0, 123.5, 0.25, 23, "abc1234", "1000:0 2000:0.5 3000:1",
    ]  # fmt: skip


def variant(suite="minigrid", **flags):
    return suites.variant_of(suite, flags_of(suite, flags))


def test_a_variant_is_of_all_that_can_change_a_result_and_of_nothing_else():
    same = {"run_dir": "elsewhere", "threads": 4, "save_model": False, "seed": 7}
    assert variant() == variant(**same) == variant(backup="whole-graph") == ""
    assert variant(num_levels=0, exploration="frontier") == "exploration=frontier num_levels=0"
    for name, value in {"breadth": 0, "learning_rate": 1e-4, "total_timesteps": 5_000}.items():
        assert variant(**{name: value}) == f"{name}={value}"


def test_collecting_twice_changes_nothing_and_rows_outlive_their_folders(tmp_path, capsys):
    runs, results = tmp_path / "runs", tmp_path / "results"
    flags = ("--collect-only", "--run-dir", runs, "--results-dir", results)
    make_run(runs / "a", env_id="Empty-8x8", seed=1)
    make_run(runs / "again", env_id="Empty-8x8", seed=1, run_dir="x")  # the same run
    make_run(runs / "half", env_id="Empty-8x8", seed=2, finished=False)
    make_run(runs / "nested" / "b", "minatar", env_id="freeway", episode_seed="fixed")
    make_run(runs / "long", "minatar-1m", env_id="freeway")
    make_run(runs / "game", "atari100k", env_id="space_invaders")  # none of the 26
    assert command(sweep, *flags) == 0
    assert "3 rows added" in capsys.readouterr().out
    first = (results / suites.TABLE).read_bytes()
    assert command(sweep, *flags) == 0
    assert (results / suites.TABLE).read_bytes() == first
    for name in ("a", "again", "long"):
        (runs / name / "result.json").unlink()
    make_run(runs / "c", env_id="Empty-8x8", seed=4, returns=(0.5, 0.5))
    assert command(sweep, *flags) == 0
    table = suites.read_table(results)
    assert table["seed"].tolist() == [1, 1, 1, 4]
    assert suites.curve_of(table["curve"][3]).to_dict() == {1000: 0.5, 2000: 0.5}


def typed(capsys, *words):
    assert command(sweep, "--dry-run", *words) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_dry_run_prints_what_is_not_finished(tmp_path, capsys):
    words = ("--suites", "minigrid", "--tasks", "empty8x8", "--run-dir", tmp_path)
    words += ("--seeds", 1, 2, "--backups", "graph", "tree", "--variants", "default", "breadth=0")
    commands = typed(capsys, *words)
    assert len(commands) == 8
    assert not list(tmp_path.iterdir())
    for python, script, *flags in commands:
        args = tyro.cli(suites.script_of("minigrid").Args, args=flags)
        assert (python, script, args.total_timesteps) == ("python", "gb_dqn_minigrid.py", 100_000)
        assert (args.save_model, args.checkpoint_frequency) == (False, 10_000)
    assert ["--seed=1" in words for words in commands] == [True] * 4 + [False] * 4
    make_run(Path(commands[0][-1]) / "run", env_id="Empty-8x8", seed=1)
    make_run(tmp_path / "elsewhere", env_id="Empty-8x8", seed=2, backup="tree")
    suites.collect(tmp_path / "elsewhere", tmp_path / "results")
    left = typed(capsys, *words)
    assert len(left) == 6
    assert commands[0] not in left


def test_every_suite_is_printed_with_its_own_flags(capsys):
    words = ("--backups", "graph", "--seeds", 1, "--episode-seeds", "fresh", "fixed")
    for suite, number in {"minatar": 10, "atari100k": 26, "gymnasium": 6}.items():
        commands = typed(capsys, "--suites", suite, *words)
        path = f"{suites.SUITES[suite].script.replace('.', '/')}.py"
        assert [line[1] for line in commands] == [path] * number


SMALL = (
    "--suites", "minigrid", "--tasks", "Empty-8x8", "--backups", "tree", "--seeds", "1",
    "--overrides", "total_timesteps=1500", "learning_starts=1490", "eval_frequency=0",
    "eval_episodes=1", "checkpoint_frequency=100",
)  # fmt: skip


def test_a_stopped_sweep_goes_on_and_one_with_nothing_to_do_ends(tmp_path, capsys):
    words = [*SMALL, "--run-dir", str(tmp_path / "runs")]

    def stop():
        while not list(tmp_path.glob("runs/*/*/checkpoint.zip")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert command(sweep, *words) == 130
    (run,) = tmp_path.glob("runs/minigrid*/*/")
    assert command(sweep, *words) == 0
    log = (run.parent / "log.txt").read_text()
    assert f"--resume {run}" in log
    assert not (run / "checkpoint.zip").exists()
    (row,) = read_rows(tmp_path / "runs" / "results" / suites.TABLE)
    assert (row["steps"], row["backup"]) == ("1500", "tree")
    capsys.readouterr()
    assert command(sweep, *words) == 0
    assert "0 of 1 runs are left" in capsys.readouterr().out


def test_a_run_that_fails_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "false")
    assert command(sweep, *SMALL, "--run-dir", tmp_path) == 1
    assert "status 1, see " in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir())[0] == (
        "minigrid__MiniGrid-Empty-8x8-v0__tree__eval_episodes=1_eval_frequency=0_"
        "learning_starts=1490_total_timesteps=1500__1"
    )


def test_rows_that_are_there_stay_as_they_are(tmp_path):
    table = suites.TABLE
    before = (ROOT / "reproduce" / "results" / table).read_bytes()
    (tmp_path / table).write_bytes(before)
    assert suites.collect(tmp_path / "no-runs", tmp_path) == 0
    assert (tmp_path / table).read_bytes() == before
