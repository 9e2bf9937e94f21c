"""--resume in all scripts: the same run as one that was never interrupted, or one clear line."""

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import jitted, only_run
from kill_and_resume import left_behind

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore import TransitionGraph, run_directory

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
]  # fmt: skip
# So small a budget that changes wait in every checkpoint.
FRONTIER = ["--exploration", "frontier", "--frontier-share", "0.9", "--frontier-budget", "3"]
CASES = {
    "minigrid": (gb_dqn_minigrid, ["--env-id", "DoorKey-5x5", *DQN]),
    "minigrid, random environment": (
        gb_dqn_minigrid,
        ["--env-id", "Dynamic-Obstacles-5x5", "--persist-targets", "--buffer-size", "50", *DQN],
    ),
    "minatar": (gb_dqn_minatar, ["--env-id", "asterix", "--train-frequency", "7", *DQN]),
    "minatar, fixed": (
        gb_dqn_minatar,
        ["--env-id", "breakout", "--episode-seed", "fixed", "--backup", "tree", *DQN],
    ),
    "minigrid, frontier": (
        gb_dqn_minigrid,
        ["--env-id", "LavaCrossingS9N1", "--buffer-size", "90", *FRONTIER, *DQN],
    ),
    "minatar, frontier": (
        gb_dqn_minatar,
        ["--env-id", "breakout", "--frontier-prior", "1", *FRONTIER, *DQN],
    ),
    "atari": (
        gb_rainbow_atari,
        ["--env-id", "Breakout", "--buffer-size", "100", *FRONTIER, *ATARI],
    ),
}
all_scripts = pytest.mark.parametrize("case", ["minigrid", "minatar", "atari"])


def command(script, *flags):
    """Exit status of a run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *flags])
        try:
            script.main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Function of a case: the folder of its undisturbed run, made once; and what that leaves."""
    runs = {}

    def get(case):
        if case not in runs:
            script, flags = CASES[case]
            folder = tmp_path_factory.mktemp("undisturbed")
            assert command(script, *flags, "--run-dir", str(folder)) == 0
            runs[case] = only_run(folder), left_behind(only_run(folder))
        return runs[case]

    return get


def signal_at(monkeypatch, script, step, number=signal.SIGTERM):
    """Let a signal come in the middle of a step, or of the evaluation after it (step + 0.5)."""
    add, evaluate, added = script.Replay.add, script.evaluate, []

    def adding(replay, *transition):
        added.append(add(replay, *transition))
        if len(added) == step:
            signal.raise_signal(number)

    def evaluating(*arguments):
        if len(added) == int(step) != step:
            signal.raise_signal(number)
        return evaluate(*arguments)

    # The first transitions are those of warm_up.
    warm_up = script.warm_up
    monkeypatch.setattr(script, "warm_up", lambda *args: (warm_up(*args), added.clear()))
    monkeypatch.setattr(script.Replay, "add", adding)
    monkeypatch.setattr(script, "evaluate", evaluating)


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_run_ends_as_an_undisturbed_one(case, undisturbed, tmp_path):
    """Interrupted four times: in two steps, in an evaluation, and in the last one of all."""
    script, flags = CASES[case]
    _, expected = undisturbed(case)
    flags = [*flags, "--run-dir", str(tmp_path)]
    moments = [
        (47, signal.SIGTERM),
        (36, signal.SIGINT),
        (17.5, signal.SIGTERM),
        (140.5, signal.SIGINT),
    ]
    for steps, number in moments:  # 47, 83, 100 in an evaluation, 240 in the last
        with pytest.MonkeyPatch.context() as patch:
            signal_at(patch, script, steps, number)
            assert command(script, *flags) == 130
        run = only_run(tmp_path)
        result = json.loads((run / "result.json").read_text())
        assert (result["interrupted"], result["score"]) == (True, None)
        flags = ["--resume", str(run)]
    assert result["steps"] == 240
    assert command(script, *flags) == 0
    got = left_behind(run)
    for name in expected:
        assert got[name] == expected[name], name
    assert TransitionGraph.load(run / "graph.npz").check_valid() == []


def test_a_signal_while_the_next_game_begins(undisturbed, tmp_path, monkeypatch):
    """In Atari the step in which a game begins makes no transition."""
    script, flags = CASES["atari"]
    reset, seeds = script.Game.reset, []

    def resetting(game, seed):
        seeds.append(seed)
        if len(seeds) == 2:
            signal.raise_signal(signal.SIGTERM)
        return reset(game, seed)

    monkeypatch.setattr(script.Game, "reset", resetting)
    assert command(script, *flags, "--run-dir", str(tmp_path)) == 130
    assert len(seeds) == 2
    assert command(script, "--resume", str(only_run(tmp_path))) == 0
    assert left_behind(only_run(tmp_path)) == undisturbed("atari")[1]


@all_scripts
def test_no_evaluation_counts_as_training(case, tmp_path, monkeypatch):
    script, flags = CASES[case]
    flags = [*flags, "--total-timesteps", "110", "--eval-frequency", "100"]
    evaluate, clock, late = script.evaluate, script.time.perf_counter, [0.0]

    def evaluating(*arguments):
        late[0] += 1_000
        return evaluate(*arguments)

    monkeypatch.setattr(script, "evaluate", evaluating)
    monkeypatch.setattr(script.time, "perf_counter", lambda: clock() + late[0])
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, script, 100.5)
        assert command(script, *flags, "--run-dir", str(tmp_path)) == 130
    assert command(script, "--resume", str(only_run(tmp_path))) == 0
    result = json.loads((only_run(tmp_path) / "result.json").read_text())
    assert 0 < result["training_seconds"] < 1_000 <= result["wall_seconds"]


ENVIRONMENTS = {
    "minigrid": [*map(gb_dqn_minigrid.task_of, ("KeyCorridorS3R1", "Dynamic-Obstacles-6x6"))],
    "minatar": gb_dqn_minatar.GAMES,
    "minatar, fixed": gb_dqn_minatar.GAMES,
    "atari": ["breakout", "pong", "kung_fu_master"],
}


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, names in ENVIRONMENTS.items() for name in names]
)
def test_a_restored_environment_goes_on_the_same(case, name):
    """After several episodes, in the middle of one: what follows is the same, for ever."""
    script, rng = CASES[case][0], np.random.default_rng(0)

    def make(seed):
        if case == "atari":
            return script.Game(name)
        args = script.Args(**({"episode_seed": "fixed"} if case == "minatar, fixed" else {}))
        return script.make_envs(args, name, np.random.default_rng(seed), 1)[0]

    def reset(env):
        return env.reset(int(rng.integers(2**31))) if case == "atari" else env.reset()

    env, last = make(0), None
    reset(env)
    for _ in range(700):
        last = env.step(int(rng.integers(env.num_actions)))
        if last is None or (case != "atari" and (last[2] or last[3])):
            reset(env)
            last = env.step(0)
    other = make(1)
    obs = other.restore(json.loads(json.dumps(env.state())))
    np.testing.assert_array_equal(obs, last[0])
    for _ in range(200):
        action = int(rng.integers(env.num_actions))
        moved, again = env.step(action), other.step(action)
        assert (moved is None) == (again is None)
        if moved is None or (case != "atari" and (moved[2] or moved[3])):
            break
        np.testing.assert_array_equal(moved[0], again[0])
        assert moved[1:] == again[1:]


def test_killed_and_resumed():
    """The small version of benchmark/kill_and_resume.py."""
    command = [sys.executable, "benchmark/kill_and_resume.py", "--kills", "2", "--steps", "500"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout


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


@all_scripts
def test_resuming_a_finished_run_changes_nothing(case, finished, capsys):
    script, run = finished(case)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert command(script, "--resume", str(run)) == 0
    assert "is finished: score" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


@all_scripts
def test_a_run_killed_in_its_last_moment_repeats_no_evaluation(case, finished, undisturbed):
    script, run = finished(case)
    (run / "result.json").unlink()
    (run / "model.pt").unlink()
    assert command(script, "--resume", str(run)) == 0
    assert left_behind(run) == undisturbed(case)[1]


@all_scripts
def test_a_finished_run_goes_on_to_a_larger_total(case, finished, capsys):
    script, run = finished(case)
    resume = ["--resume", str(run)]
    assert command(script, *resume, "--total-timesteps", "300") == 0
    got = left_behind(run)
    assert got["result"]["steps"] == 300
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


@all_scripts
@pytest.mark.parametrize("flag", ["--learning-rate", "--seed", "--frontier-budget"])
def test_flags_that_resume_cannot_honour_are_refused(case, flag, finished, capsys):
    script, run = finished(case)
    capsys.readouterr()
    assert command(script, "--resume", str(run), flag, "7") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert flag in err
    assert "7" in err


@all_scripts
def test_a_finished_run_leaves_what_it_was_not_asked_for_before(case, finished, undisturbed):
    script, run = finished(case)
    (run / "model.pt").unlink()
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"save_model": False}))
    assert command(script, "--resume", str(run)) == 0
    assert not (run / "model.pt").exists()
    assert command(script, "--resume", str(run), "--save-model") == 0
    assert left_behind(run) == undisturbed(case)[1]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "no config.json"),
        ("nowhere", "no config.json"),
        ("other", "max_grad_norm is no flag"),
    ],
)
def test_what_is_no_run_of_this_script_is_refused(path, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    config = {"env_id": "Breakout", "max_grad_norm": 10}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert command(gb_dqn_minatar, "--resume", path) == 2
    assert words in capsys.readouterr().err


def test_the_total_is_not_lowered(finished, capsys):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    assert command(script, "--resume", str(run), "--total-timesteps", "239") == 2
    assert "can only be raised with --resume: the run has 240, got 239" in capsys.readouterr().err


def test_a_total_that_there_is_no_memory_for(finished, capsys):
    script, run = finished("minigrid")
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert command(script, "--resume", str(run), "--total-timesteps", str(10**15)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no memory for 1,000,000,000,000,000 transitions" in line
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_what_an_earlier_end_left_is_gone_when_a_run_goes_on(finished):
    script, run = finished("minigrid")
    assert (run / "model.pt").exists()
    assert (run / "graph.npz").exists()
    (run / "episode.mp4").write_bytes(b"the old network's")
    words = ("--resume", str(run), "--total-timesteps", "260", "--no-save-model")
    assert command(script, *words) == 0
    assert json.loads((run / "result.json").read_text())["steps"] == 260
    assert not any((run / name).exists() for name in ("model.pt", "graph.npz", "episode.mp4"))


def test_a_run_of_a_gpu_goes_on_without_one_and_says_so(finished, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script, run = finished("minigrid")
    words = ("--resume", str(run), "--total-timesteps", "260", "--cuda")
    assert command(script, *words) == 0
    assert "no CUDA device" in capsys.readouterr().err


def test_a_finished_run_of_another_script_is_refused(finished, capsys):
    _, run = finished("minigrid")
    assert command(gb_dqn_minatar, "--resume", str(run)) == 2
    assert "it is a run of gb_dqn_minigrid.py" in capsys.readouterr().err


@all_scripts
def test_a_flag_of_another_type_is_refused(case, finished, capsys):
    script, run = finished(case)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"batch_size": "big"}))
    is_refused(script, run, capsys, "Require batch_size like 32, got 'big'")


def test_two_processes_cannot_go_on_with_one_run(finished, capsys, monkeypatch):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    config = json.loads((run / "config.json").read_text())
    other = run_directory.RunDirectory(run, config, script.METRICS, resume_step=240)
    monkeypatch.setattr(script, "load_checkpoint", None)  # it is not read, while it may change
    assert command(script, "--resume", str(run)) == 2
    assert "another process" in capsys.readouterr().err
    close = other._writer.close

    def close_late():
        with pytest.raises(OSError, match="another process"):
            run_directory._lock(run)
        close()

    monkeypatch.setattr(other._writer, "close", close_late)
    other.close()
    os.close(run_directory._lock(run))


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted" / "runs")
    with pytest.raises(FileExistsError, match="runs"):
        run_directory.RunDirectory(tmp_path / "runs" / "run", {}, ())


def test_ctrl_c_in_the_video_leaves_a_finished_run(tmp_path, monkeypatch):
    script, flags = CASES["minigrid"]

    def record(*arguments):
        arguments[-1].write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "record_video", record)
        flags = [*flags, "--total-timesteps", "50", "--capture-video", "--run-dir", str(tmp_path)]
        assert command(script, *flags) == 0
    run = only_run(tmp_path)
    assert not json.loads((run / "result.json").read_text())["interrupted"]
    assert not list(run.glob("*.mp4"))
    assert command(script, "--resume", str(run)) == 0  # which makes it anew
    assert (run / "episode.mp4").stat().st_size > 4


# --------------------------------------------------------------------------------------------------
# Damage
# --------------------------------------------------------------------------------------------------


def is_refused(script, run, capsys, *words):
    """One line on stderr, status 2, and nothing in the folder is changed."""
    tables = [(run / name).read_bytes() for name in ("metrics.csv", "evaluations.csv")]
    capsys.readouterr()
    assert command(script, "--resume", str(run)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for word in ("cannot resume", *words):
        assert word in err
    assert [(run / name).read_bytes() for name in ("metrics.csv", "evaluations.csv")] == tables


def signed(state):
    """The content of a state.json with its checksum set right."""
    return run_directory.with_checksum({k: v for k, v in state.items() if k != "state_crc32"})


@all_scripts
@pytest.mark.parametrize("name", ["state.json", "tensors.pt", "arrays.npz", "graph.npz"])
def test_a_damaged_checkpoint_is_refused(case, name, finished, capsys):
    script, run = finished(case)
    (run / "result.json").unlink()
    path = run / "checkpoint" / name
    whole = path.read_bytes()
    path.write_bytes(b"")
    is_refused(script, run, capsys)
    for share in (0.1, 0.5, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        is_refused(script, run, capsys)
    if name != "state.json":  # one bit in the middle of the largest member
        with zipfile.ZipFile(io.BytesIO(whole)) as file:
            member = max(file.infolist(), key=lambda member: member.file_size)
        bytes_ = bytearray(whole)
        bytes_[member.header_offset + 200 + member.file_size // 2] ^= 16
        path.write_bytes(bytes_)
        is_refused(script, run, capsys)
    path.unlink()
    is_refused(script, run, capsys)


@all_scripts
def test_what_is_whole_but_not_of_this_code_is_refused(case, finished, capsys):
    script, run = finished(case)
    (run / "result.json").unlink()
    path = run / "checkpoint" / "state.json"
    whole = json.loads(path.read_text())
    other = whole["environment"] | {"actions": []}
    for change, words in (
        ({"format_version": 1}, "format 2, got 1"),
        ({"environment": other}, "environment"),
        ({"node": whole["node"] + 1}, "environment"),
    ):
        path.write_text(json.dumps(whole | change))
        is_refused(script, run, capsys, words if "format_version" in change else "checksum")
        path.write_text(json.dumps(signed(whole | change)))
        is_refused(script, run, capsys, words)


def test_damaged_rows_are_left_out_and_other_columns_refused(finished, undisturbed, capsys):
    script, run = finished("minigrid")
    (run / "result.json").unlink()
    path = run / "metrics.csv"
    header, *rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, rows[0], "45,1,2\n", rows[0][:-1] + ",9\n", "x\n", *rows[1:]]))
    assert command(script, "--resume", str(run)) == 0
    assert left_behind(run) == undisturbed("minigrid")[1]
    (run / "result.json").unlink()
    path.write_text("global_step,other\n30,1\n")
    capsys.readouterr()
    assert command(script, "--resume", str(run)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "metrics.csv has other columns" in line


@pytest.mark.parametrize("table", ["metrics.csv", "evaluations.csv"])
def test_a_refused_table_leaves_a_finished_run_as_it_is(table, finished, capsys):
    script, run = finished("minigrid")
    (run / table).write_text("global_step,other\n30,1\n")
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert command(script, "--resume", str(run), "--total-timesteps", "260") == 2
    assert f"{table} has other columns" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_game_that_ends_before_its_actions_is_refused(finished, capsys, monkeypatch):
    script, run = finished("atari")
    (run / "result.json").unlink()
    monkeypatch.setattr(script.Game, "step", lambda *_: None)
    is_refused(script, run, capsys, "play the episode under way otherwise")


def test_a_checkpoint_runs_no_code(finished, capsys, tmp_path):
    """A pickle that would write a file when loaded, in each place where a pickle could be."""
    script, run = finished("minigrid")
    (run / "result.json").unlink()

    class Trap:
        def __reduce__(self):
            return (Path.write_text, (tmp_path / "trapped", "ha"))

    folder = run / "checkpoint"
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    state = json.loads(whole["state.json"])
    torch.save({"online": Trap()}, folder / "tensors.pt")
    checksum = run_directory.zlib.crc32((folder / "tensors.pt").read_bytes())
    (folder / "state.json").write_text(json.dumps(signed(state | {"tensors_crc32": checksum})))
    is_refused(script, run, capsys)
    for name in ("tensors.pt", "state.json"):
        (folder / name).write_bytes(whole[name])
    for name in ("arrays.npz", "graph.npz"):
        np.savez(folder / name, place=np.array([Trap()], object), format_version=np.int64(2))
        is_refused(script, run, capsys)
        (folder / name).write_bytes(whole[name])
    assert not (tmp_path / "trapped").exists()


# --------------------------------------------------------------------------------------------------
# Full disk
# --------------------------------------------------------------------------------------------------


def without_progress(err):
    return [line for line in err.splitlines() if line and "step/s" not in line]


WRITES = {
    "a row of metrics.csv": (run_directory._Table, "write"),
    "TensorBoard": (run_directory.RunDirectory, "flush"),
    "the folder of the checkpoint": (Path, "mkdir"),
    "its tensors": (Path, "write_bytes"),
    "its arrays": (np, "savez"),
    "its state": (Path, "write_text"),
    "sync": (os, "fsync"),
    "rename": (Path, "rename"),
    "model.pt, result.json": (Path, "replace"),
}


@pytest.mark.parametrize("place", WRITES)
def test_a_disk_that_fills_up_ends_a_run_with_one_line(place, undisturbed, tmp_path, capsys):
    script, flags = CASES["minigrid"]
    owner, name = WRITES[place]
    write, saves, save = getattr(owner, name), [], script.save

    def full(*args, **options):
        if saves:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "save", lambda *args: (save(*args), saves.append(True)))
        patch.setattr(owner, name, full)
        flags = [*flags, "--checkpoint-frequency", "60", "--run-dir", str(tmp_path)]
        assert command(script, *flags) == 1
    run = only_run(tmp_path)
    (line,) = without_progress(capsys.readouterr().err)
    assert "No space left on device" in line
    assert str(run) in line
    assert not (run / "checkpoint.new").exists() or place == "rename"
    assert command(script, "--resume", str(run)) == 0
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
