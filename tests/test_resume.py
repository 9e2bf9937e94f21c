"""--resume in all scripts: the same run as one that was never interrupted, or one clear line."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import kill_and_resume
import numpy as np
import pytest
import recorded
import torch
from conftest import command, files_in, is_one_line, jitted, leaves, only_run, write_checkpoint
from kill_and_resume import as_bytes, left_behind

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore import Replay, TransitionGraph, frontier
from gbcore.arrays import Rows
from gbcore.run import checkpoint, directory
from gbcore.run import run as run_module

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]

DQN = [
    "--total-timesteps", "240", "--learning-starts", "30", "--batch-size", "4", "--breadth", "5",
    "--target-network-frequency", "70", "--log-frequency", "30", "--eval-frequency", "50",
    "--eval-episodes", "2", "--eval-epsilon", "1", "--end-e", "0.5",
]  # fmt: skip
ATARI = [
    "--total-timesteps", "240", "--learning-starts", "30", "--batch-size", "4", "--breadth", "5",
    "--train-frequency", "6", "--log-frequency", "30", "--eval-frequency", "100", "--threads", "1",
    "--eval-episodes", "1", "--eval-epsilon", "1", "--exploration-steps", "1000", "--no-cuda",
    "--curve-episodes", "1", "--updates-per-train", "1", "--env-id", "Breakout",
]  # fmt: skip
FRONTIER = ["--exploration", "frontier", "--frontier-share", "0.9"]
ON_GRAPH = ["--backup", "whole-graph", "--prior", "0.3", "--train-frequency", "7", *FRONTIER]
CASES = {
    "minigrid": (gb_dqn_minigrid, ["--env-id", "DoorKey-5x5", *DQN]),
    "minigrid, frontier": (gb_dqn_minigrid, ["--env-id", "Dynamic-Obstacles-5x5", "--buffer-size",
                                             "90", *FRONTIER, *DQN]),
    "minigrid, values of the whole graph": (
        gb_dqn_minigrid, ["--env-id", "DoorKey-5x5", "--buffer-size", "90", *ON_GRAPH, *DQN]
    ),
    "minatar": (gb_dqn_minatar, ["--env-id", "asterix", "--train-frequency", "7", "--backup",
                                 "graph-mixed", *FRONTIER, *DQN]),
    "atari": (gb_rainbow_atari, ["--buffer-size", "100", *FRONTIER, *ATARI]),
}  # fmt: skip
all_scripts = pytest.mark.parametrize("case", ["minigrid", "minatar", "atari"])


@pytest.fixture(scope="module", autouse=True)
def small_budget():
    """Changes wait in every checkpoint with frontier exploration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier, "BUDGET", 3)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Function of a case: the folder of its undisturbed run, made once; and what that leaves."""
    runs = {}

    def get(case):
        if case not in runs:
            script, flags = CASES[case]
            folder = tmp_path_factory.mktemp("undisturbed")
            assert command(script, *flags, "--run-dir", folder) == 0
            runs[case] = only_run(folder), left_behind(only_run(folder))
        return runs[case]

    return get


def signal_at(monkeypatch, script, step, number=signal.SIGTERM, times=1):
    """Let a signal come in the middle of a step, or of the evaluation after it (step + 0.5)."""
    add, evaluate, added = Replay.add, script.evaluate, []

    def adding(replay, *transition):
        added.append(add(replay, *transition))
        if len(added) == step:
            for _ in range(times + (number != signal.SIGINT)):  # a sweep's worker sends more
                signal.raise_signal(number)

    def evaluating(*arguments):
        if len(added) == int(step) != step:
            signal.raise_signal(number)
        return evaluate(*arguments)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a run before in this process ignored it for good
    monkeypatch.setattr(run_module, "compile_kernels", lambda graph: None)  # it adds transitions
    monkeypatch.setattr(Replay, "add", adding)
    monkeypatch.setattr(script, "evaluate", evaluating)


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_run_ends_as_an_undisturbed_one(case, undisturbed, tmp_path):
    """Interrupted four times: in two steps, in an evaluation, and in the last one of all."""
    script, flags = CASES[case]
    _, expected = undisturbed(case)
    flags = [*flags, "--run-dir", tmp_path]
    moments = (47, "SIGTERM"), (36, "SIGINT"), (17.5, "SIGHUP"), (140.5, "SIGINT")
    for steps, name in moments:  # 47, 83, 100 in an evaluation, 240 in the last
        with pytest.MonkeyPatch.context() as patch:
            signal_at(patch, script, steps, getattr(signal, name))
            assert command(script, *flags) == 130
        run = only_run(tmp_path)
        result = json.loads((run / "result.json").read_text())
        assert (result["interrupted"], result["score"]) == (True, None)
        flags = ["--resume", run]
    assert result["steps"] == 240
    assert command(script, *flags) == 0
    got = left_behind(run)
    for name in expected:
        assert got[name] == expected[name], name
    assert TransitionGraph.load(run / "graph.npz").check_valid() == []


def test_a_second_ctrl_c_acts_at_once(undisturbed, tmp_path, capsys):
    """Without a checkpoint at the end: the run goes on from the last one."""
    script, flags = CASES["minigrid"]
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, script, 47, signal.SIGINT, times=2)
        flags = [*flags, "--checkpoint-frequency", "30", "--run-dir", tmp_path]
        assert command(script, *flags) == 130
    run = only_run(tmp_path)
    assert "interrupted at once" in capsys.readouterr().err
    assert not (run / "result.json").exists()
    assert command(script, "--resume", run) == 0
    assert left_behind(run) == undisturbed("minigrid")[1]


def test_a_signal_while_the_next_game_begins(undisturbed, tmp_path, monkeypatch):
    script, flags = CASES["atari"]
    reset, resets = script.Game.reset, []

    def resetting(game):
        resets.append(game)
        if len(resets) == 2:
            signal.raise_signal(signal.SIGTERM)
        return reset(game)

    monkeypatch.setattr(script.Game, "reset", resetting)
    assert command(script, *flags, "--run-dir", tmp_path) == 130
    assert len(resets) == 2
    assert command(script, "--resume", only_run(tmp_path)) == 0
    assert left_behind(only_run(tmp_path)) == undisturbed("atari")[1]


def test_no_evaluation_counts_as_training(tmp_path, monkeypatch):
    script, flags = CASES["minigrid"]
    flags = [*flags, "--total-timesteps", "110", "--eval-frequency", "100"]
    evaluate, clock, late = script.evaluate, time.perf_counter, [0.0]

    def evaluating(*arguments):
        late[0] += 1_000
        return evaluate(*arguments)

    monkeypatch.setattr(script, "evaluate", evaluating)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, script, 100.5)
        assert command(script, *flags, "--run-dir", tmp_path) == 130
    assert command(script, "--resume", only_run(tmp_path)) == 0
    result = json.loads((only_run(tmp_path) / "result.json").read_text())
    assert 0 < result["training_seconds"] < 1_000 <= result["wall_seconds"]


ENVIRONMENTS = {
    "minigrid": [*map(gb_dqn_minigrid.task_of, ("KeyCorridorS3R1", "Dynamic-Obstacles-6x6"))],
    "minatar": gb_dqn_minatar.GAMES,
    "minatar, fixed": ["asterix", "freeway"],
    "atari": ["breakout", "pong"],
}


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, names in ENVIRONMENTS.items() for name in names]
)
def test_a_restored_environment_goes_on_the_same(case, name):
    """After several episodes, in the middle of one: what follows is the same, for ever."""
    script, rng = CASES[case.partition(",")[0]][0], np.random.default_rng(0)
    args = script.Args(**({"episode_seed": "fixed"} if case == "minatar, fixed" else {}))
    env = script.make_env(args, name, np.random.default_rng(0))
    env.reset()
    for _ in range(700):
        last = env.step(int(rng.integers(env.num_actions)))
        if env.is_over if case == "atari" else last[2] or last[3]:
            env.reset()
            last = env.step(0)
    other = script.make_env(args, name, np.random.default_rng(1))
    other.restore(state := env.state())
    number = len(state["actions"])
    np.testing.assert_array_equal(other.obs, last[0])
    for _ in range(200):
        action = int(rng.integers(env.num_actions))
        moved, again = env.step(action), other.step(action)
        np.testing.assert_array_equal(moved[0], again[0])
        assert moved[1:] == again[1:]
        if env.is_over if case == "atari" else moved[2] or moved[3]:
            break
    assert len(state["actions"]) == number, "a state does not follow its environment"


def test_killed_and_resumed(capsys):
    """The small version of benchmark/kill_and_resume.py: one run left alone, and one that is
    killed while it trains.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kill_and_resume, "MOMENTS", ["training"] * 20)
        assert command(kill_and_resume, "--kills", "1", "--steps", "500") == 0
    assert "1 kills (1 " in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Resuming what is finished, and what may be changed
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(undisturbed, tmp_path):
    """Function of a case: script and a copy of its finished run."""

    def get(case):
        run, _ = undisturbed(case)
        return CASES[case][0], shutil.copytree(run, tmp_path / "copy")

    return get


def test_resuming_a_finished_run_changes_nothing(finished, capsys):
    script, run = finished("minigrid")
    before = files_in(run)
    assert command(script, "--resume", run) == 0
    assert "is finished: score" in capsys.readouterr().out
    assert files_in(run) == before


@all_scripts
def test_a_run_killed_in_its_last_moment_repeats_no_evaluation(case, finished, undisturbed):
    script, run = finished(case)
    (run / "result.json").unlink()
    (run / "model.pt").unlink()
    assert command(script, "--resume", run) == 0
    assert left_behind(run) == undisturbed(case)[1]


@all_scripts
def test_a_finished_run_goes_on_to_a_larger_total(case, finished, capsys):
    script, run = finished(case)
    (run / "episode.mp4").write_bytes(b"the old network's")
    resume = ["--resume", run]
    how = ["--no-cuda-graphs"] if case == "atari" else []  # it changes nothing that is learned
    assert command(script, *resume, "--total-timesteps", "300", *how) == 0
    got = left_behind(run)
    assert got["result"]["steps"] == 300
    assert not (run / "episode.mp4").exists()
    assert [row["global_step"] for row in got["metrics"]][-3:] == ["240", "270", "300"]
    steps = [line.split(",")[0] for line in got["evaluations"].splitlines()[1:]]
    per_evaluation = 1 if case == "atari" else 2
    assert steps == [str(s) for s in sorted({int(s) for s in steps}) for _ in range(per_evaluation)]
    graph = TransitionGraph.load(run / "graph.npz")
    assert graph.check_valid() == []
    assert graph.num_transitions == (100 if case == "atari" else 300)
    assert json.loads((run / "config.json").read_text())["total_timesteps"] == 300
    capsys.readouterr()
    assert command(script, *resume) == 0  # the larger total is remembered
    assert "is finished" in capsys.readouterr().out


def test_a_finished_run_leaves_what_it_was_not_asked_for_before(finished, undisturbed):
    script, run = finished("minigrid")
    (run / "model.pt").unlink()
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"save_model": False}))
    assert command(script, "--resume", run) == 0
    assert not (run / "model.pt").exists()
    assert command(script, "--resume", run, "--save-model") == 0
    assert left_behind(run) == undisturbed("minigrid")[1]


@pytest.mark.parametrize("module", ["evil", "runs.received.evil"])
def test_no_module_of_the_run_s_own_folder_is_imported(module, tmp_path, monkeypatch, capsys):
    script = recorded.load_script("examples/gb_dqn_gymnasium")
    run = tmp_path / "runs" / "received"
    run.mkdir(parents=True)
    (run / "evil.py").write_text("raise SystemExit(99)")
    config = asdict(script.Args(env_id=f"{module}:Evil-v0")) | {"script": script.__file__}
    (run / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(run if module == "evil" else tmp_path)
    assert command(script, "--resume", run) == 2
    assert is_one_line(capsys, "cannot resume", "evil", "in the run's own folder")


@pytest.mark.parametrize("content", [None, "{}", "[1]", "[" * 10**5, "{", b"\xff"])
def test_what_is_no_run_is_refused(content, tmp_path, capsys):
    if content is not None:
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "config.json").write_bytes(content)
    assert command(gb_dqn_minatar, "--resume", tmp_path) == 2
    assert is_one_line(capsys, "no config.json" if content is None else "config.json is of no run")


OTHER = {"script": gb_dqn_minatar.__file__}
REFUSED = [  # flags given, changes of config.json and of result.json (None: without), words
    ("--learning-rate 7", {}, {}, ["--learning-rate", "7"]),
    ("--seed 7", {}, {}, ["--seed", "7"]),
    ("--total-timesteps 239", {}, None, ["only be raised", "the run has 240, got 239"]),
    ("", {"script": 7}, {}, ["it names no script"]),
    ("", OTHER, {}, ["a run of gb_dqn_minatar.py", gb_dqn_minatar.__file__]),
    ("", {"max_grad_norm": 10}, None, ["max_grad_norm is no flag"]),
    ("", {"batch_size": "big"}, None, ["batch_size", "big"]),
    ("", {"gamma": True}, None, ["gamma", "True"]),
    ("", {"gamma": 2.0}, None, ["--gamma", "2.0"]),
    ("", {"backup": 1}, None, ["backup", "1"]),
    ("", {"seed": 1.0}, None, ["seed", "1.0"]),
    ("", {}, {"score": None}, ["result.json is of no run"]),
    ("", {}, {"score": "good"}, ["result.json is of no run"]),
    ("", {}, {"steps": "all"}, ["result.json is of no run"]),
]


@pytest.mark.parametrize(("flags", "config", "result", "words"), REFUSED)
def test_what_cannot_be_resumed_so_is_refused(flags, config, result, words, finished, capsys):
    script, run = finished("minigrid")
    for name, changes in (("config.json", config), ("result.json", result)):
        if changes is None:
            (run / name).unlink()
        else:
            content = json.loads((run / name).read_text()) | changes
            (run / name).write_text(json.dumps(content))
    before = files_in(run)
    capsys.readouterr()
    assert command(script, "--resume", run, *flags.split()) == 2
    assert is_one_line(capsys, *words)
    assert files_in(run) == before


def test_a_total_that_there_is_no_memory_for(finished, capsys, monkeypatch):
    script, run = finished("minigrid")
    before = files_in(run)
    capsys.readouterr()

    def no_room(*_, **__):
        raise MemoryError("Unable to allocate 1.0 TiB")

    monkeypatch.setattr(script, "TransitionGraph", no_room)
    assert command(script, "--resume", run, "--total-timesteps", "1_000") == 1
    assert is_one_line(capsys, "no memory", "1.0 TiB", "--total-timesteps")
    assert files_in(run) == before


def test_a_run_of_a_gpu_goes_on_without_one_and_says_so(finished, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script, run = finished("minigrid")
    words = ("--resume", run, "--total-timesteps", "260", "--cuda")
    assert command(script, *words) == 0
    assert "no CUDA device" in capsys.readouterr().err
    assert json.loads((run / "config.json").read_text())["cuda"] is True  # where there is one again


def test_two_processes_cannot_go_on_with_one_run(finished, capsys, monkeypatch):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    config = json.loads((run / "config.json").read_text())
    other = directory.RunDirectory(run, config, run_module.METRICS, resume_step=240)
    monkeypatch.setattr(run_module, "load_checkpoint", None)  # it is not read, while it may change
    assert command(script, "--resume", run) == 2
    assert "another process" in capsys.readouterr().err
    close = other._writer.close

    def close_late():
        with pytest.raises(OSError, match="another process"):
            directory.lock_folder(run)
        close()

    monkeypatch.setattr(other._writer, "close", close_late)
    other.close()
    os.close(directory.lock_folder(run))


def test_ctrl_c_in_the_video_leaves_a_finished_run(tmp_path, monkeypatch):
    script, flags = CASES["minigrid"]

    def record(*arguments):
        arguments[-1].write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "record_video", record)
        flags = [*flags, "--total-timesteps", "50", "--capture-video", "--run-dir", tmp_path]
        assert command(script, *flags) == 0
    run = only_run(tmp_path)
    assert not json.loads((run / "result.json").read_text())["interrupted"]
    assert not list(run.glob("*.mp4"))
    assert command(script, "--resume", run) == 0  # which makes it anew
    assert (run / "episode.mp4").stat().st_size > 1_000


# --------------------------------------------------------------------------------------------------
# Damage
# --------------------------------------------------------------------------------------------------


def is_refused(script, run, capsys, *words):
    """One line on stderr, status 2, and nothing in the folder is changed."""
    before = files_in(run)
    capsys.readouterr()
    assert command(script, "--resume", run) == 2
    _, err = capsys.readouterr()
    (line,) = err.splitlines()
    for word in ("cannot resume", *words):
        assert word in line
    assert files_in(run) == before


def test_a_damaged_checkpoint_is_refused(finished, capsys):
    """Cut short, or with one bit changed in a number, a name or a header of the archive."""
    script, run = finished("minigrid, frontier")
    (run / "result.json").unlink()
    path, tree = run / checkpoint.NAME, as_bytes(checkpoint.load_checkpoint(run))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        sizes = {member.header_offset + 200: member.file_size for member in file.infolist()}
    in_arrays = [offset + size // 2 for offset, size in sizes.items() if size > 1000]
    anywhere = np.random.default_rng(0).integers(len(whole), size=200).tolist()
    noticed = []
    for place in (*anywhere, *in_arrays):
        changed = bytearray(whole)
        changed[place] ^= 16
        path.write_bytes(changed)
        try:
            found = as_bytes(checkpoint.load_checkpoint(run))
        except ValueError:
            noticed.append(place)
        else:
            assert found == tree, "bits of no meaning, as the date of a member"
    assert set(in_arrays) <= set(noticed)
    assert len(noticed) > len(in_arrays) + 150
    is_refused(script, run, capsys, "whole checkpoint")
    for share in (0, 0.1, 0.5, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        is_refused(script, run, capsys)


def test_a_checkpoint_of_another_format_is_refused(finished, capsys, monkeypatch):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    tree = checkpoint.load_checkpoint(run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT_VERSION", 2)
        write_checkpoint(run, tree)
    is_refused(script, run, capsys, "format 5, got 2")


def put(tree, place, value):
    """A copy of a tree with another value at a place, a tuple of keys."""
    key, *rest = place
    return tree | {key: put(tree[key], rest, value) if rest else value}


@pytest.mark.parametrize("case", ["minigrid, frontier", "minatar"])
def test_a_foreign_tree_is_refused(case, finished, capsys):
    """Each name gone, each type and shape changed, and what the parts themselves refuse."""
    script, run = finished(case)
    (run / "result.json").unlink()
    tree = checkpoint.load_checkpoint(run)
    fresh = put(tree, ("replay", "rows"), Rows(tree["replay"]["rows"]))
    changes = []
    for place, value in leaves(tree):
        if isinstance(value, np.ndarray):
            changes += [(place, value[None]), (place, value.astype("U1")), (place, 0)]
        else:
            changes += [(place, "x" if type(value) is not str else 1), (place, {}), (place, True)]
        changes.append((place[:-1], {}))
    for place, value in changes[:: len(changes) // 100]:
        with pytest.raises(ValueError, match="Require"):
            checkpoint.check_like(put(tree, place, value), fresh)
    node = tree["replay"]["rows"]["node"] + 10**6
    for place, value in (
        (("env", "actions"), [99]), (("counters", "step"), 241), (("replay", "rows", "node"), node),
        (("graph", "edge_next"), tree["graph"]["edge_next"] + 10**6), (("learner", "adam"), {}),
        (("run", "obs"), tree["run"]["obs"] ^ True),
    ):  # fmt: skip
        write_checkpoint(run, put(tree, place, value))
        is_refused(script, run, capsys)


def test_nothing_is_written_through_a_link(finished, tmp_path, capsys):
    """Not where a config would be written, and not for a checkpoint on another disk."""
    script, run = finished("minigrid")
    for name in ("new.config.json", checkpoint.NAME, "metrics.csv"):
        target = tmp_path / "elsewhere"
        target.write_text("mine")
        kept = (run / name).rename(tmp_path / "kept") if (run / name).exists() else None
        (run / name).symlink_to(target)
        capsys.readouterr()
        assert command(script, "--resume", run, "--total-timesteps", "260") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{name} in it is a link" in line
        assert target.read_text() == "mine"
        (run / name).unlink()
        if kept:
            kept.rename(run / name)
    link = tmp_path / "link"
    link.symlink_to(run)  # the user's own
    assert command(script, "--resume", link, "--total-timesteps", "260") == 0


def test_damaged_rows_are_left_out_and_other_columns_refused(finished, undisturbed, capsys):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    path = run / "metrics.csv"
    header, *rows = path.read_text().splitlines(keepends=True)
    damaged = ("45,1,2\n", rows[0][:-1] + ",9\n", "x\n", f"{'9' * 200_000}\n")
    path.write_text("".join([header, rows[0], *damaged, *rows[1:]]))
    assert command(script, "--resume", run) == 0
    assert left_behind(run) == undisturbed("minigrid")[1]
    (run / "result.json").unlink()
    path.write_text("global_step,other\n30,1\n")
    capsys.readouterr()
    assert command(script, "--resume", run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "metrics.csv has other columns" in line


@pytest.mark.parametrize("table", ["metrics.csv", "evaluations.csv"])
def test_a_refused_table_leaves_a_finished_run_as_it_is(table, finished, capsys):
    script, run = finished("minigrid")
    (run / table).write_text("global_step,other\n30,1\n")
    before = files_in(run)
    assert command(script, "--resume", run, "--total-timesteps", "260") == 2
    assert f"{table} has other columns" in capsys.readouterr().err
    assert files_in(run) == before


@pytest.mark.parametrize("table", ["metrics.csv", "evaluations.csv"])
def test_a_table_without_rows_that_the_checkpoint_knows_is_refused(table, finished, capsys):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    header, first, *rest = (run / table).read_text().splitlines(keepends=True)
    damaged = header + first.replace(",", ",x", 1) + "".join(rest)
    for content in (None, "", header, damaged, header + "".join(rest)):
        (run / table).unlink(missing_ok=True)
        if content is not None:
            (run / table).write_text(content)
        is_refused(script, run, capsys, table)


def test_a_config_that_is_not_the_checkpoint_s_is_refused(finished, capsys):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    config = json.loads((run / "config.json").read_text())
    for name, value, words in (("seed", 2, "seed 1"), ("gamma", 0.5, "gamma 0.95")):
        (run / "config.json").write_text(json.dumps(config | {name: value}))
        is_refused(script, run, capsys, "config.json", words, f"got {value}")


@pytest.mark.parametrize("name", ["config.json", "metrics.csv", checkpoint.NAME])
def test_a_pipe_in_place_of_a_file_is_refused(name, finished, capsys):
    script, run = finished("minigrid")
    (run / name).unlink()
    os.mkfifo(run / name)
    assert command(script, "--resume", run, "--total-timesteps", "260") == 2
    assert name in capsys.readouterr().err


def test_a_game_that_ends_before_its_actions_is_refused(finished, capsys, monkeypatch):
    script, run = finished("atari")
    (run / "result.json").unlink()
    step = script.Game.step

    def last_step(game, action):
        step(game, action)
        game.is_over = True

    monkeypatch.setattr(script.Game, "step", last_step)
    is_refused(script, run, capsys, "the game ends earlier")


def test_a_checkpoint_runs_no_code(finished, capsys, tmp_path):
    """A pickle that would write a file when loaded."""
    script, run = finished("minigrid")
    (run / "result.json").unlink()

    class Trap:
        def __reduce__(self):
            return (Path.write_text, (tmp_path / "trapped", "ha"))

    with np.load(run / checkpoint.NAME) as file:
        arrays = dict(file) | {"replay/rows/node": np.array([Trap()], object)}
    np.savez(run / checkpoint.NAME, **arrays)
    is_refused(script, run, capsys)
    assert not (tmp_path / "trapped").exists()


# --------------------------------------------------------------------------------------------------
# Full disk
# --------------------------------------------------------------------------------------------------


def without_progress(err):
    return [line for line in err.splitlines() if "warning" not in line]


WRITES = {
    "a row of metrics.csv": (directory._Table, "write"),
    "TensorBoard": (directory.RunDirectory, "flush"),
    "a checkpoint": (np, "savez"),
    "sync": (os, "fsync"),
    "rename": (Path, "replace"),
}


@pytest.mark.parametrize("place", WRITES)
def test_a_disk_that_fills_up_ends_a_run_with_one_line(place, undisturbed, tmp_path, capsys):
    script, flags = CASES["minigrid"]
    owner, name = WRITES[place]
    write, saves, save = getattr(owner, name), [], run_module.save_checkpoint

    def full(*args, **options):
        if saves:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run_module, "save_checkpoint", lambda *args: (save(*args), saves.append(True))
        )
        patch.setattr(owner, name, full)
        flags = [*flags, "--checkpoint-frequency", "60", "--run-dir", tmp_path]
        assert command(script, *flags) == 1
    run = only_run(tmp_path)
    (line,) = without_progress(capsys.readouterr().err)
    assert "No space left on device" in line
    assert str(run) in line
    assert not list(run.glob("new.*"))
    assert command(script, "--resume", run) == 0
    assert left_behind(run) == undisturbed("minigrid")[1]


def test_a_file_system_that_takes_no_more_bytes(tmp_path):
    """The same with real writes, of which each is cut short in the middle of a file."""
    script, flags = CASES["minigrid"]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    done = subprocess.run(
        [sys.executable, script.__file__, *flags, "--run-dir", str(tmp_path)],
        preexec_fn=limit, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = without_progress(done.stderr)
    assert "File too large" in line
