"""What all scripts share: their flags, what a command refuses, a run's folder and its end."""

import dataclasses
import enum
import re
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import conftest
import gymnasium
import numpy as np
import pytest
import report
import speed
import suites
import sweep
import torch
from conftest import SHORT, command, is_one_line, jitted, only_run, refuses, result_of, short_run
from gbtools.runs import read_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from examples import gb_dqn_gymnasium
from gbcore import TransitionGraph
from gbcore.run import load_checkpoint, parse_flags, play_episodes
from gbcore.run.flags import check_flags

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]
SCRIPTS = (gb_dqn_minigrid, gb_dqn_minatar, gb_rainbow_atari)
script = gb_dqn_minatar


def test_evaluations_play_one_episode_in_each_environment():
    class Countdown:
        num_actions = 3

        def __init__(self, length):
            self.length = length

        def reset(self):
            self.obs = np.zeros(1, np.uint8)

        def step(self, action):
            self.obs = self.obs + 1
            return self.obs, float(action), self.obs[0] == self.length, False

    sizes = []

    def policy(obs):
        sizes.append(len(obs))
        assert (obs == len(sizes) - 1).all()
        return np.full(len(obs), 2)

    envs = [Countdown(n) for n in (3, 1, 2)]
    result = play_episodes(policy, envs, np.random.default_rng(0), 0.0)
    assert result == ([6.0, 2.0, 4.0], [3, 1, 2])
    assert sizes == [3, 2, 1]


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


BAD_INPUT = [  # command, flags, and what of the line counts, with " ... " between
    (script, "--buffer-size 31", "31 ... 32"),
    (script, "--total-timesteps 31", "31 ... 32"),
    (script, "--resume /nowhere", "/nowhere"),
    (script, "--env-id freewy", "freewy ... freeway"),
    (gb_dqn_minigrid, "--env-id DorKey-6x6", "DorKey-6x6 ... MiniGrid-DoorKey-6x6-v0"),
    (gb_dqn_minigrid, "--env-id CartPole-v1", "CartPole-v1 ... grid ... examples/"),
    (gb_dqn_minigrid, "--env-id Ant-v5", "Ant-v5 ... examples/"),
    (gb_dqn_minigrid, "--backup whole-graph --gamma 1", "--gamma ... below 1"),
    (gb_dqn_minigrid, "--act-on graph", "--act-on graph ... whole-graph"),
    (gb_rainbow_atari, "--env-id Freewy", "freewy ... freeway"),
    (gb_rainbow_atari, "--v-min 3 --v-max 3", "--v-min ... 3.0"),
    (script, "--run-dir /proc/nowhere", "[Errno ... /proc"),
    (script, f"--run-dir {__file__}/runs", f"[Errno ... {__file__}"),
    (sweep, "--dry-run", "--suites must name one or more"),
    (sweep, "--dry-run --suites minigrid --tasks Emty", "--tasks 'Emty' is none of Empty-8x8"),
    (sweep, "--dry-run --suites minigrid --overrides gamma=1 --backups whole-graph",
     "--gamma must"),
    (report, "--results-dir /nowhere", f"/nowhere/{suites.TABLE}"),
    (speed, "--scripts gb_dqn_minigrad", "no script gb_dqn_minigrad"),
    (speed, "--scripts gb_dqn_minigrid --env-ids Emty-5x5", "unknown task 'Emty-5x5'"),
]  # fmt: skip
if not torch.cuda.is_available():
    BAD_INPUT += [(script, "--cuda", "CUDA") for script in SCRIPTS]


@pytest.mark.parametrize(("script", "flags", "words"), BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(script, flags, words, capsys):
    assert refuses(capsys, script, flags.split(), *words.split(" ... "))


class Mode(enum.Enum):
    FAST, SLOW = "fast", "slow"


@dataclasses.dataclass
class OwnArgs(script.Args):
    mode: Mode = Mode.FAST


def test_a_flag_of_a_class_in_the_script_is_refused(capsys):
    """A checkpoint's pickle would bring another class, and `args.mode is Mode.FAST` be false."""
    with pytest.raises(SystemExit):
        check_flags(OwnArgs())
    assert is_one_line(capsys, "error: --mode: ", "Mode; use Literal")


def test_an_error_of_the_algorithm_is_shown_whole(tmp_path, monkeypatch, capsys):
    """Its author wants to see where it came from."""

    def update(*_):
        raise ValueError("of a loss that somebody wrote")

    monkeypatch.setattr(script.Learner, "update", update)
    assert command(script, *SHORT, "--env-id", "breakout", "--run-dir", tmp_path) == 1
    assert "in update\n" in capsys.readouterr().err


SPELLINGS = [
    (gb_dqn_minigrid, "MiniGrid-Empty-8x8-v0", "minigrid-empty-8x8 EMPTY8x8-v0"),
    (gb_dqn_minigrid, "MiniGrid-MultiRoom-N4-S5-v1", "MultiRoom-N4-S5"),
    (gb_dqn_minigrid, "BabyAI-GoToRedBall-v0", "GoToRedBall"),
    (gb_dqn_minigrid, "MiniGrid-Unlock-v0", "Unlock"),
    (gb_dqn_minigrid, "BabyAI-Unlock-v0", "babyai-unlock"),
    (gb_dqn_minatar, "space_invaders", "MinAtar/SpaceInvaders-v1 SpaceInvaders space_invaders"),
    (gb_rainbow_atari, "freeway", "Freeway freeway ALE/Freeway-v5 FreewayNoFrameskip-v4"),
    (gb_rainbow_atari, "ms_pacman", "MsPacman ms_pacman"),
    (gb_dqn_gymnasium, "FrozenLake-v1", "FrozenLake-v1 frozen_lake"),
    (gb_dqn_gymnasium, "Taxi-v4", "taxi"),
    (gb_dqn_gymnasium, "CartPole-v0", "CartPole-v0"),
    (gb_dqn_gymnasium, "minigrid:MiniGrid-Empty-5x5-v0",
     "minigrid:MiniGrid-Empty-5x5-v0 minigrid:minigrid-empty-5x5"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "task", "spellings"), SPELLINGS)
def test_spellings_of_a_task(script, task, spellings):
    assert {script.task_of(f" {typed} ") for typed in spellings.split()} == {task}


@pytest.mark.parametrize("words", ["--x 1e5", "--x=100_000", "--x=1E+5", "--x 1.0e5"])
def test_integers_as_people_write_them(words, monkeypatch):
    words = words.replace("x", "total-timesteps").split()
    monkeypatch.setattr(sys, "argv", [script.__file__, *words, "--learning-rate", "1e-3"])
    args = parse_flags(script.Args, script.__file__)
    assert (args.total_timesteps, args.learning_rate) == (100_000, 1e-3)
    assert type(args.total_timesteps) is int


def test_where_the_network_is_never_trained_is_said(capsys):
    check_flags(script.Args(total_timesteps=100, cuda=False))
    assert is_one_line(capsys, "--learning-starts", "the network is never trained")


RUNS = {
    "minigrid": (gb_dqn_minigrid, "--env-id DoorKey-5x5"),
    "minatar": (gb_dqn_minatar, "--env-id breakout --capture-video"),
    "atari": (
        gb_rainbow_atari,
        "--env-id breakout --curve-episodes 1 --exploration-steps 20 --threads 1 --no-cuda",
    ),
}
for backup in (*gb_dqn_gymnasium.BACKUPS, "whole-graph"):
    RUNS[backup] = gb_dqn_gymnasium, f"--env-id FrozenLake-v1 --backup {backup} --time-limit 50"


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_leaves(name, tmp_path, capsys):
    """That it is the same for the same seed is in test_resume.py."""
    script, words = RUNS[name]
    words += " --buffer-size 20 --train-frequency 2 --target-network-frequency 40"
    words += f" --eval-frequency 25 --eval-episodes {1 + (name != 'atari')}"
    run = short_run(script, tmp_path, *words.split())
    told = "No reward was seen in 60 steps" in capsys.readouterr().out
    assert told or name != "minigrid"  # where a key has to be found first
    assert len(conftest.read_metrics(run)) == 6
    rows = read_rows(run / "evaluations.csv")
    steps = [row["global_step"] for row in rows]
    assert steps == sorted(["25", "50", "60"] * (1 if name == "atari" else 2))
    result = result_of(run)
    assert (result["script"], result["steps"]) == (script.__name__.split(".")[-1], 60)
    last = [float(row["episodic_return"]) for row in rows if row["global_step"] == "60"]
    assert result["score"] == np.mean(last)
    if name == "atari":
        assert result["human_normalized_score"] == (result["score"] - 1.7) / 28.8
    if script is gb_dqn_gymnasium:
        assert (result["env_id"], result["backup"]) == ("FrozenLake-v1", name)
        assert result["versions"]["gymnasium"] == gymnasium.__version__
    left = {path.name.partition(".1")[0] for path in run.iterdir()}
    expected = "config.json result.json checkpoint.zip model.pt graph.npz metrics.csv "
    expected += "evaluations.csv events.out.tfevents" + " episode.mp4" * (name == "minatar")
    assert left == set(expected.split())
    assert name != "minatar" or (run / "episode.mp4").stat().st_size > 1_000
    graph = TransitionGraph.load(run / "graph.npz")
    assert graph.num_transitions == 20
    assert graph.check_valid() == []


def test_a_folder_in_a_script_s_own_default_may_be_the_user_s():
    assert script.Args(run_dir="~/mine").run_dir == str(Path.home() / "mine")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loss_that_is_not_finite_ends_a_run(script, tmp_path, monkeypatch, capsys):
    """Its last checkpoint is from before."""
    update = script.Learner.update

    def poisoned(learner, batch, rng):
        result = update(learner, batch, rng)
        if learner.num_updates < 30:
            return result
        return result * np.nan if script is gb_rainbow_atari else (result[0] * np.nan, result[1])

    monkeypatch.setattr(script.Learner, "update", poisoned)
    task = "Empty-5x5" if script is gb_dqn_minigrid else "breakout"
    words = "--checkpoint-frequency 7 --threads 1 --updates-per-train 2 --train-frequency 1"
    words = f"{words} --no-cuda --env-id {task} --run-dir {tmp_path}".split()
    assert command(script, *SHORT, *words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: losses/td_loss is nan after \d+ steps:", line)
    assert "--learning-rate" in line
    run = only_run(tmp_path)
    tree = load_checkpoint(run)
    assert tree["logger"]["step"] == 42
    assert np.isfinite(tree["logger"]["charts"]["losses/td_loss"])
    assert not (run / "result.json").exists()
    assert all(row["losses/td_loss"] != "nan" for row in conftest.read_metrics(run))


def test_what_is_told(tmp_path, capsys):
    """A line with each row of metrics.csv; how long it takes once it learns."""
    flags = "--env-id breakout --log-frequency 20 --learning-starts 20".split()
    short_run(script, tmp_path, *flags)
    out, err = capsys.readouterr()
    assert (err, "\r" in out) == ("", False)
    rows = [line for line in out.splitlines() if re.match(r"\d+ of 60 steps, ", line)]
    assert [line.split()[0] for line in rows] == ["20", "40", "60"]
    shown = r"steps, [\d,.]+ steps/s, (0:\d\d:\d\d left, )?return (-|[\d.]{1,8}), states new \d"
    assert [bool(re.search(shown, row)[1]) for row in rows] == [False, True, True]


def test_tensorboard_has_the_rows_and_every_episode(tmp_path):
    flags = "--env-id breakout --total-timesteps 200 --eval-frequency 100".split()
    run = short_run(script, tmp_path, *flags)
    events, replay = EventAccumulator(str(run)).Reload(), load_checkpoint(run)["replay"]
    rows = [
        (int(row["global_step"]), float(row["graph/nodes"])) for row in conftest.read_metrics(run)
    ]
    assert [(event.step, event.value) for event in events.Scalars("graph/nodes")] == rows
    ends = (np.flatnonzero(replay["rows"]["cut"]) + 1).tolist()
    ends = ends if replay["ended"] else ends[:-1]
    assert [event.step for event in events.Scalars("charts/episodic_return")] == ends
    assert [event.step for event in events.Scalars("eval/episodic_return")] == [100, 200]


def test_a_tracked_run_begins_and_ends_at_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := Mock())
    flags = ("--env-id", "breakout", "--track", "--wandb-entity", "me")
    run = short_run(script, tmp_path, *flags)
    (begun,) = wandb.init.call_args_list
    asked = [begun.kwargs[name] for name in ("id", "project", "entity", "sync_tensorboard")]
    assert asked == [run.name, "graph-backup", "me", True]
    wandb.init.return_value.finish.assert_called_once_with()
    monkeypatch.chdir(run)
    assert command(script, "--resume", ".", "--total-timesteps", 70) == 0
    assert wandb.init.call_args.kwargs["id"] == run.name


def test_denormals_are_flushed_before_anything_is_played(tmp_path, monkeypatch):
    """Also where a run goes on: the episode under way is played again."""
    denormals, tiny = [], torch.tensor(1e-40)
    torch.set_flush_denormal(False)
    conftest.spy(monkeypatch, script.Game, "_begin", lambda *_: denormals.append(float(tiny * 1)))
    run = short_run(script, tmp_path, "--env-id", "breakout")
    torch.set_flush_denormal(False)
    assert command(script, "--resume", run, "--total-timesteps", "70") == 0
    assert len(denormals) > 1
    assert not any(denormals)


def test_a_printed_command_quotes_its_path(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "train", lambda *parts: parts[-1].__setattr__("asked", True))
    folder = tmp_path / "my runs"
    assert command(script, *SHORT, "--env-id", "breakout", "--run-dir", folder) == 130
    line = capsys.readouterr().out.rpartition("go on with: ")[2].strip()
    # It works from any folder.
    assert shlex.split(line) == [sys.executable, script.__file__, "--resume", f"{only_run(folder)}"]
