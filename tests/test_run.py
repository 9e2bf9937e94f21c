"""gbcore.run: what all scripts share of the command line, a run's folder and its end."""

import errno
import fcntl
import importlib
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import command, interpreted, is_one_line, jitted, only_run
from gbtools.runs import read_metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore.run import (
    StopSignal,
    fail,
    load_checkpoint,
    one_line_errors,
    parse_flags,
    play_episodes,
    save_checkpoint,
    warn,
)
from gbcore.run.flags import check_flags

pytestmark = pytest.mark.usefixtures("torch_settings")
SCRIPTS = (gb_dqn_minigrid, gb_dqn_minatar, gb_rainbow_atari)
script = gb_dqn_minatar
SMALL = [
    "--env-id", "breakout", "--total-timesteps", "60", "--learning-starts", "30", "--batch-size",
    "4", "--eval-frequency", "0", "--eval-episodes", "1", "--log-frequency", "10", "--breadth", "5",
]  # fmt: skip


def test_evaluations_play_one_episode_in_each_environment():
    class Countdown:
        num_actions = 3

        def __init__(self, length):
            self.length = length

        def reset(self):
            self.t = 0

        def step(self, action):
            self.t += 1
            return self.obs, float(action), self.t == self.length, False

        @property
        def obs(self):
            return np.full(1, self.t, np.uint8)

    sizes = []

    def policy(obs):
        sizes.append(len(obs))
        assert (obs == len(sizes) - 1).all()
        return np.full(len(obs), 2)

    envs = [Countdown(n) for n in (3, 1, 2)]
    result = play_episodes(policy, envs, np.random.default_rng(0), 0.0)
    assert result == ([6.0, 2.0, 4.0], [3, 1, 2])
    assert sizes == [3, 2, 1]


# --------------------------------------------------------------------------------------------------
# Flags
# --------------------------------------------------------------------------------------------------


UNREAD = [  # script, flags, words that are told: tyro shows the flag and its help
    (script, "--backup grph", "grph graph-mixed"),
    (script, "--bakcup graph", "--bakcup --backup"),
    (script, "--depth", "--depth"),
    (script, "--depth two", "--depth two"),
    (script, "--depth 1.5e0", "--depth 1.5e0 integer"),
    (script, "--depth 0", "--depth least 1"),
    (script, f"--threads {2**32}", f"--threads {2**32} 1024"),
    (script, f"--total-timesteps {2**63}", f"--total-timesteps {2**31 - 1}"),
    (script, "--learning-rate 1e30", "--learning-rate 1e30"),
    (script, "--gamma nan", "--gamma nan"),
    (script, "--episode-seed 2", "--episode-seed fresh fixed"),
    (gb_dqn_minigrid, "--batch-size 0", "--batch-size least 1"),  # which may be None
    (gb_rainbow_atari, "--n-atoms 1", "--n-atoms 1"),
]


@pytest.mark.parametrize(("script", "flags", "words"), UNREAD)
def test_a_flag_that_cannot_be_read_is_named_with_its_range(script, flags, words, capsys):
    assert command(script, *flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for word in words.split():
        assert word in err


BAD_INPUT = [  # script, flags, words that are told
    (script, "--buffer-size 31", "31 32"),
    (script, "--total-timesteps 31", "31 32"),
    (script, "--resume /nowhere", "/nowhere"),
    (script, "--env-id freewy", "freewy freeway"),
    (gb_dqn_minigrid, "--env-id DorKey-6x6", "DorKey-6x6 MiniGrid-DoorKey-6x6-v0"),
    (gb_dqn_minigrid, "--env-id CartPole-v1", "CartPole-v1 grid examples/"),
    (gb_dqn_minigrid, "--env-id Ant-v5", "Ant-v5 examples/"),
    (gb_dqn_minigrid, "--backup whole-graph --gamma 1", "--gamma below 1"),
    (gb_dqn_minigrid, "--act-on graph", "--act-on graph whole-graph"),
    (gb_rainbow_atari, "--env-id Freewy", "Freewy freeway"),
    (gb_rainbow_atari, "--v-min 3 --v-max 3", "--v-min 3.0"),
]


@pytest.mark.parametrize(("script", "flags", "words"), BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(script, flags, words, capsys):
    assert command(script, *flags.split()) == 2
    assert is_one_line(capsys, *words.split())


@pytest.mark.parametrize("folder", ["/proc/nowhere", Path(__file__) / "runs"])
def test_a_folder_that_cannot_be_written_to(folder, capsys):
    assert command(script, *SMALL, "--run-dir", folder) == 2
    assert is_one_line(capsys, "error: [Errno ", str(Path(folder).parent))


def test_an_error_of_the_algorithm_is_shown_whole(tmp_path, monkeypatch, capsys):
    """Its author wants to see where it came from."""

    def update(*_):
        raise ValueError("of a loss that somebody wrote")

    monkeypatch.setattr(script.Learner, "update", update)
    assert command(script, *SMALL, "--run-dir", tmp_path) == 1
    assert "in update\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--x 1e5", "--x=100_000", "--x=1E+5", "--x 1.0e5"])
def test_integers_as_people_write_them(words, monkeypatch):
    words = words.replace("x", "total-timesteps").split()
    monkeypatch.setattr(sys, "argv", [script.__file__, *words, "--learning-rate", "1e-3"])
    args = parse_flags(script.Args, script.__file__)
    assert (args.total_timesteps, args.learning_rate) == (100_000, 1e-3)
    assert type(args.total_timesteps) is int


def test_a_copy_that_postpones_its_annotations_can_be_resumed(tmp_path, monkeypatch):
    source = (
        Path(script.__file__)
        .read_text()
        .replace("gamma: gb.Fraction = 0.99", "gamma: gb.Fraction = 1")
    )
    (tmp_path / "postponed.py").write_text(f"from __future__ import annotations\n{source}")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("postponed")
    monkeypatch.setattr(sys, "argv", ["postponed.py", "--total-timesteps", "1e3"])
    args = parse_flags(mine.Args, mine.__file__)
    assert (args.total_timesteps, args.gamma) == (1000, 1)
    save_checkpoint(tmp_path, {"flags": asdict(args) | {"script": mine.__file__}})
    monkeypatch.setattr(sys, "argv", ["postponed.py", "--resume", str(tmp_path)])
    assert asdict(parse_flags(mine.Args, mine.__file__)) == asdict(args) | {"resume": str(tmp_path)}


def test_where_the_network_is_never_trained_is_said(capsys):
    check_flags(script.Args(total_timesteps=100, cuda=False))
    assert is_one_line(capsys, "--learning-starts", "the network is never trained")


@pytest.mark.parametrize("allocate", [np.empty, torch.empty])
def test_too_little_memory_is_one_line(allocate, capsys):
    @one_line_errors
    def main():
        allocate(10**17, dtype={np.empty: np.uint8, torch.empty: torch.uint8}[allocate])

    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert is_one_line(capsys, "allocate", "--buffer-size")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("script", SCRIPTS)
def test_cuda_where_there_is_none(script, capsys):
    assert command(script, "--cuda") == 2
    assert is_one_line(capsys, "CUDA")


# --------------------------------------------------------------------------------------------------
# While it runs, and at its end
# --------------------------------------------------------------------------------------------------


@jitted
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loss_that_is_not_finite_ends_a_run(script, tmp_path, monkeypatch, capsys):
    """Its last checkpoint is from before."""
    update = script.Learner.update

    def poisoned(learner, batch, rng):
        result = update(learner, batch, rng)
        if learner.num_updates < 30:
            return result
        return (
            result * np.nan if isinstance(result, torch.Tensor) else (result[0] * np.nan, result[1])
        )

    monkeypatch.setattr(script.Learner, "update", poisoned)
    flags = [*SMALL, "--checkpoint-frequency", "7", "--threads", "1", "--updates-per-train", "2",
             "--train-frequency", "1", "--env-id", "Empty-5x5" if script is gb_dqn_minigrid else
             "breakout", "--no-cuda", "--run-dir", tmp_path]  # fmt: skip
    assert command(script, *flags) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: losses/td_loss is nan after \d+ steps:", line)
    assert "--learning-rate" in line
    run = only_run(tmp_path)
    tree = load_checkpoint(run)
    assert tree["logger"]["step"] == 42
    assert np.isfinite(tree["logger"]["charts"]["losses/td_loss"])
    assert not (run / "result.json").exists()
    assert all(row["losses/td_loss"] != "nan" for row in read_metrics(run))


def test_what_is_told_away_from_a_terminal(tmp_path, capsys):
    """A plain line with each row of metrics.csv; how long it takes once it learns."""
    flags = ("--log-frequency", "20", "--learning-starts", "20", "--run-dir", tmp_path)
    assert command(script, *SMALL, *flags) == 0
    out, err = capsys.readouterr()
    assert (err, "\r" in out) == ("", False)
    rows = [line for line in out.splitlines() if re.match(r"\d+ of 60 steps, ", line)]
    assert [line.split()[0] for line in rows] == ["20", "40", "60"]
    shown = r"steps, [\d,.]+ steps/s, (0:\d\d:\d\d left, )?return (-|[\d.]{1,8}), states new \d"
    assert [bool(re.search(shown, row)[1]) for row in rows] == [False, True, True]


def test_tensorboard_has_the_rows_and_every_episode(tmp_path):
    flags = ("--total-timesteps", "200", "--eval-frequency", "100", "--eval-epsilon", "1")
    assert command(script, *SMALL, *flags, "--run-dir", tmp_path) == 0
    run = only_run(tmp_path)
    events, replay = EventAccumulator(str(run)).Reload(), load_checkpoint(run)["replay"]
    rows = [(int(row["global_step"]), float(row["graph/nodes"])) for row in read_metrics(run)]
    assert [(event.step, event.value) for event in events.Scalars("graph/nodes")] == rows
    ends = (np.flatnonzero(replay["rows"]["cut"]) + 1).tolist()
    ends = ends if replay["ended"] else ends[:-1]
    assert [event.step for event in events.Scalars("charts/episodic_return")] == ends
    assert [event.step for event in events.Scalars("eval/episodic_return")] == [100, 200]


def test_a_tracked_run_begins_and_ends_at_wandb(tmp_path, monkeypatch, capsys):
    """One that cannot begin leaves no folder."""
    monkeypatch.setitem(sys.modules, "wandb", wandb := Mock())
    wandb.init.side_effect = RuntimeError("api_key not configured")
    assert command(script, *SMALL, "--track", "--run-dir", tmp_path) == 2
    assert "api_key not configured" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    wandb.init.reset_mock(side_effect=True)
    flags = ("--track", "--wandb-entity", "me", "--run-dir", tmp_path)
    assert command(script, *SMALL, *flags) == 0
    (begun,) = wandb.init.call_args_list
    asked = [begun.kwargs[name] for name in ("id", "project", "entity", "sync_tensorboard")]
    assert asked == [only_run(tmp_path).name, "graph-backup", "me", True]
    wandb.init.return_value.finish.assert_called_once_with()
    monkeypatch.chdir(only_run(tmp_path))
    assert command(script, "--resume", ".", "--total-timesteps", 70) == 0
    assert wandb.init.call_args.kwargs["id"] == only_run(tmp_path).name


# --------------------------------------------------------------------------------------------------
# The end of its output
# --------------------------------------------------------------------------------------------------

LONG = [*SMALL, "--total-timesteps", "300", "--eval-epsilon", "1", "--train-frequency", "60"]


@interpreted
@pytest.mark.parametrize(
    "line",
    [
        "({}; echo $? > {}) | head -1",
        "({} 2>&1; echo $? > {}) | true",
        "{} >&- 2>&- <&-; echo $? > {}",
        "{} > /dev/full 2>&1; echo $? > {}",
    ],
    ids=["head", "closed at once", "none from the start", "a full disk"],
)
def test_a_run_outlives_its_output(line, tmp_path):
    words = shlex.join(
        [sys.executable, script.__file__, *LONG, "--run-dir", str(tmp_path / "runs")]
    )
    status = tmp_path / "status"
    line = line.format(words, status)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert status.read_text() == "0\n", done
    assert "Error" not in done.stderr
    run = only_run(tmp_path / "runs")
    assert json.loads((run / "result.json").read_text())["steps"] == 300
    assert load_checkpoint(run)["logger"]["step"] == 300


def on_terminal(words, hang_up):
    """A process on a terminal of its own, which is closed once it trains. Its status."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if hang_up else None,
    )  # fmt: skip
    os.close(slave)
    seen = b""
    while b"results go to" not in seen:
        seen += os.read(master, 1000)
    time.sleep(0.5)
    os.close(master)  # sends SIGHUP to the process whose terminal it is; all else is EIO
    return process.wait(timeout=300)


@interpreted
@pytest.mark.parametrize(("hang_up", "status"), [(True, 130), (False, 0)])
def test_a_terminal_that_is_gone_ends_no_run_without_a_checkpoint(hang_up, status, tmp_path):
    words = [sys.executable, script.__file__, *LONG, "--total-timesteps", "3000", "--run-dir"]
    assert on_terminal([*words, str(tmp_path)], hang_up) == status
    result = json.loads((only_run(tmp_path) / "result.json").read_text())
    assert result["interrupted"] == hang_up
    assert load_checkpoint(only_run(tmp_path))["logger"]["step"] == result["steps"]


def test_what_cannot_be_printed_is_dropped(monkeypatch):
    class Gone(io.StringIO):
        def write(self, *_):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        flush = write

    @one_line_errors
    def main():
        print("nobody reads this", flush=True)
        warn("nor this")
        fail("nor this", 3)

    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", Gone())
    with pytest.raises(SystemExit, match="3"):
        main()


def test_signals_end_a_run_and_nohup_is_kept():
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        with StopSignal() as stop:
            signal.raise_signal(number)
            assert stop.asked
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.asked
    signal.signal(signal.SIGHUP, before)


# --------------------------------------------------------------------------------------------------
# Arithmetic
# --------------------------------------------------------------------------------------------------


def test_denormals_are_flushed_before_anything_is_played(tmp_path, monkeypatch):
    """Also where a run goes on: the episode under way is played again."""
    found, reset = [], script.Game._begin

    def resetting(game, seed):
        found.append(float(torch.tensor(1e-40) * 1))
        return reset(game, seed)

    monkeypatch.setattr(script.Game, "_begin", resetting)
    for words in ((*SMALL, "--run-dir", tmp_path), ("--total-timesteps", "70", "--resume")):
        words = words if "--run-dir" in words else (*words, only_run(tmp_path))
        torch.set_flush_denormal(False)
        assert command(script, *words) == 0
    assert found
    assert not any(found)


def test_numpy_does_not_warn_of_flushed_denormals():
    code = "import gbcore.run as gb; gb.flush_denormals(); import scipy.stats, matplotlib.pyplot"
    run = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=False,
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_a_run_without_a_reward_says_so(tmp_path, capsys, monkeypatch):
    step = script.Game.step

    def without_reward(game, action):
        obs, _, *ends = step(game, action)
        return obs, 0.0, *ends

    monkeypatch.setattr(script.Game, "step", without_reward)
    assert command(script, *SMALL, "--run-dir", tmp_path) == 0
    assert "No reward was seen in 60 steps" in capsys.readouterr().out


def test_a_printed_command_quotes_its_path(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "train", lambda *parts: parts[-1].__setattr__("asked", True))
    assert command(script, *SMALL, "--run-dir", tmp_path / "my runs") == 130
    line = capsys.readouterr().out.rpartition("go on with: ")[2].strip()
    python, file, resume, run = shlex.split(line)
    assert Path.cwd() / python == Path(sys.executable)  # a path from here, where it lies below
    assert Path(file).resolve() == Path(script.__file__)
    assert (resume, Path(run)) == ("--resume", only_run(tmp_path / "my runs"))
