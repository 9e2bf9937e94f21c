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
from pathlib import Path

import kill_and_resume
import numpy as np
import pytest
import torch
from conftest import command, files_in, jitted, only_run, write_checkpoint
from kill_and_resume import as_bytes, left_behind

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore import Replay, TransitionGraph, frontier
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
    "minigrid, levels and views": (
        gb_dqn_minigrid, ["--env-id", "DoorKey-5x5", "--num-levels", "0", "--view", "partial",
                          "--buffer-size", "90", *ON_GRAPH, *DQN]
    ),
    "minatar": (gb_dqn_minatar, ["--env-id", "asterix", "--train-frequency", "7", "--backup",
                                 "graph-mixed", *FRONTIER, *DQN]),
    "atari": (gb_rainbow_atari, ["--buffer-size", "100", *FRONTIER, *ATARI]),
}  # fmt: skip


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
    killed as it writes a checkpoint.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kill_and_resume, "MOMENTS", ["writing"] * 20)
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


@pytest.mark.parametrize("case", ["minigrid", "atari"])
def test_a_finished_run_goes_on_to_a_larger_total(case, finished, capsys):
    script, run = finished(case)
    before = files_in(run)
    assert command(script, "--resume", f"{run}/") == 0  # as shells complete it
    assert "is finished: score" in capsys.readouterr().out
    assert files_in(run) == before
    (run / "episode.mp4").write_bytes(b"the old network's")
    how = ["--no-cuda-graphs"] if case == "atari" else []  # it changes nothing that is learned
    assert command(script, "--resume", run, "--total-timesteps", "300", *how) == 0
    got = left_behind(run)
    assert got["result"]["steps"] == 300
    assert not (run / "episode.mp4").exists()
    assert [row["global_step"] for row in got["metrics"]][-3:] == ["240", "270", "300"]
    steps = [int(line.split(",")[0]) for line in got["evaluations"].splitlines()[1:]]
    assert steps == sorted([*set(steps)] * (1 if case == "atari" else 2))
    graph = TransitionGraph.load(run / "graph.npz")
    assert graph.check_valid() == []
    assert graph.num_transitions == (100 if case == "atari" else 300)
    capsys.readouterr()
    assert command(script, "--resume", run) == 0  # the larger total is remembered
    assert "is finished: score" in capsys.readouterr().out


def test_a_finished_run_leaves_what_it_was_not_asked_for_before(finished, undisturbed):
    script, run = finished("minigrid")
    (run / "model.pt").unlink()
    edit_json("config.json", save_model=False)(run)
    assert command(script, "--resume", run) == 0
    assert not (run / "model.pt").exists()
    assert command(script, "--resume", run, "--save-model") == 0
    assert left_behind(run) == undisturbed("minigrid")[1]


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
    other = directory.RunDirectory(run)
    with monkeypatch.context() as patch:  # a checkpoint is not read, while it may change
        patch.setattr(run_module, "load_checkpoint", None)
        assert command(script, "--resume", run) == 2
    assert "another process" in capsys.readouterr().err
    other.close()
    directory.RunDirectory(run).close()


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
# What is refused: in one line, with status 2, and nothing in the folder is changed
# --------------------------------------------------------------------------------------------------


def is_refused(script, run, capsys, *words, flags=()):
    before = files_in(run)
    capsys.readouterr()
    assert command(script, "--resume", run, *flags) == 2
    *_, line = capsys.readouterr().err.splitlines()
    for word in ("error: cannot resume", *words):
        assert word in line
    assert files_in(run) == before


def edit_json(name, **changes):
    def edit(run):
        content = json.loads((run / name).read_text()) | changes
        (run / name).write_text(json.dumps(content))

    return edit


def edit_rows(name, change):
    """change: function of the lines of a table, header first."""

    def edit(run):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(change(lines)))

    return edit


def put(tree, place, value):
    """A copy of a tree with another value, a function of its own, at a place: a tuple of keys."""
    key, *rest = place
    return tree | {key: put(tree[key], rest, value) if rest else value(tree[key])}


def edit_tree(*place, value):
    def edit(run):
        write_checkpoint(run, put(checkpoint.load_checkpoint(run), place, value))

    return edit


def replace(name, make):
    """make: function of a path where no file is, and of one elsewhere."""

    def edit(run):
        elsewhere = run.parent / "elsewhere"
        elsewhere.write_bytes((run / name).read_bytes() if (run / name).exists() else b"")
        (run / name).unlink(missing_ok=True)
        make(run / name, elsewhere)

    return edit


class Trap:
    """A pickle that would end the tests when loaded."""

    def __reduce__(self):
        return (os._exit, (99,))


def with_pickle(run):
    with np.load(run / checkpoint.NAME) as file:
        arrays = dict(file) | {"replay/rows/node": np.array([Trap()], object)}
    np.savez(run / checkpoint.NAME, **arrays)


METRICS, TABLES = "metrics.csv", ("metrics.csv", "evaluations.csv")
BIAS, OTHER = "layers.0.bias", {"script": gb_dqn_minatar.__file__}
LINK = {"make": lambda path, elsewhere: path.symlink_to(elsewhere)}
PIPE = {"make": lambda path, _: os.mkfifo(path)}
REFUSED = [  # what is done to a run that was killed at its end, words that are told
    (edit_json("config.json", script=7), ["it names no script"]),
    (edit_json("config.json", **OTHER), ["run of gb_dqn_minatar.py", gb_dqn_minatar.__file__]),
    (edit_json("config.json", max_grad_norm=10), ["max_grad_norm"]),
    (edit_json("config.json", batch_size="big"), ["config.json", "batch_size 'big', not 4"]),
    (edit_json("config.json", seed=2), ["config.json", "got seed 2, not 1"]),
    (edit_json("config.json", total_timesteps="all"), ["config.json", "total_timesteps 'all'"]),
    (edit_json("config.json", cuda=None), ["config.json", "cuda None"]),
    *((edit_rows(name, lambda lines: lines[:1]), [name]) for name in TABLES),
    (edit_rows(METRICS, lambda lines: ["step,x\n", *lines[1:]]), [METRICS]),
    (edit_rows(METRICS, lambda lines: [*lines[:1], "9" + lines[1]]), [METRICS]),
    (lambda run: (run / METRICS).unlink(), [METRICS]),
    (lambda run: (run / "config.json").unlink(), ["config.json"]),
    (lambda run: (run / checkpoint.NAME).unlink(), ["Require a checkpoint"]),
    *((replace(name, **LINK), [f"{name} in it is a link"]) for name in
      ("new.config.json", checkpoint.NAME, METRICS)),
    *((replace(name, **PIPE), [name]) for name in ("config.json", checkpoint.NAME, METRICS)),
    (with_pickle, ["allow_pickle=False"]),
    (edit_tree("learner", "adam", value=lambda _: {}), ["adam"]),
    (edit_tree("learner", "online", BIAS, value=lambda of: of[:3]), [BIAS]),
    (edit_tree("learner", "adam", BIAS, "exp_avg", value=lambda of: of[:1]),
     ["Require exp_avg of float32 (16,)", "(1,)"]),
    (edit_tree("learner", "adam", BIAS, "step", value=lambda of: of.repeat(3)), ["step", "(3,)"]),
    (edit_tree("learner", "adam", BIAS, value=lambda of: {**of, "x": of["step"]}), ["exp_avg_sq"]),
    (edit_tree("learner", "num_updates", value=lambda _: "x"), ["learner/num_updates"]),
    (edit_tree("counters", "evaluations", value=lambda _: None), ["counters/evaluations"]),
    (edit_tree("run", "charts", "charts/epsilon", value=lambda _: "x"), ["charts/epsilon"]),
    (edit_tree("run", "charts", value=lambda of: {**of, "x": 1}), ["Require charts with"]),
    (edit_tree("run", "flags", value=lambda _: "[]"), ["Require flags by name"]),
    (edit_tree("run", "torch", value=lambda state: state[:9]), []),
    (edit_tree("counters", "step", value=lambda _: 241), ["Require 0 to 240 steps, got 241"]),
    (edit_tree("run", "obs", value=lambda obs: obs ^ 1), ["plays otherwise"]),
    (edit_tree("replay", "rows", "node", value=lambda node: node + 10**6), []),
    (edit_tree("graph", "edge_next", value=lambda node: node + 10**6), []),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), REFUSED)
def test_what_is_damaged_or_not_the_run_s_own_is_refused(damage, words, finished, capsys):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    damage(run)
    is_refused(script, run, capsys, *words)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("begin", "inner", "state", "pos"), 625, ["624 words"]),
        (("begin", "outer", "state", "pos"), -1, ["624 words"]),
        (("last_action",), 6, ["last action"]),
        (("last_action",), -1, ["last action"]),
    ],
)
def test_a_game_that_cannot_be_is_refused(place, value, words, finished, capsys):
    script, run = finished("minatar")
    (run / "result.json").unlink()
    edit_tree("env", *place, value=lambda _: value)(run)
    is_refused(script, run, capsys, *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learning-rate", "7"], ["Require --learning-rate 0.001", "got 7"]),
        (["--seed", "7"], ["Require --seed 1", "got 7"]),
        (["--total-timesteps", "239"], ["240", "can only be raised"]),
    ],
)
def test_flags_that_a_run_does_not_have_are_refused(flags, words, finished, capsys):
    is_refused(*finished("minigrid"), capsys, *words, flags=flags)


def test_a_run_killed_in_its_last_moment_repeats_its_last_evaluation(finished, undisturbed):
    """And cuts what came into its tables after the checkpoint."""
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    (run / "model.pt").unlink()
    for table in TABLES:
        with (run / table).open("a") as file:
            file.write("270,1,2\nx\n27")
    assert command(script, "--resume", run) == 0
    assert left_behind(run) == undisturbed("minigrid")[1]


def test_the_folder_itself_may_be_a_link(finished, tmp_path):
    script, run = finished("minigrid")
    (tmp_path / "link").symlink_to(run)
    assert command(script, "--resume", tmp_path / "link", "--total-timesteps", "260") == 0


def test_a_checkpoint_of_another_format_is_refused(finished, capsys, monkeypatch):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    tree = checkpoint.load_checkpoint(run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT_VERSION", 2)
        write_checkpoint(run, tree)
    is_refused(script, run, capsys, "format 7, got 2")


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


# --------------------------------------------------------------------------------------------------
# Full disk
# --------------------------------------------------------------------------------------------------


def without_progress(err):
    return [line for line in err.splitlines() if "warning" not in line]


WRITES = {
    "a row of metrics.csv": (directory.RunDirectory, "_write"),
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
