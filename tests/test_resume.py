"""--resume in all scripts: the same run as one that was never interrupted, or one clear line."""

import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import evaluate
import numpy as np
import pytest
import torch
from conftest import SHORT, as_bytes, command, jitted, only_run, read_metrics, refuses, result_of
from gbtools import recorded
from gbtools.runs import read_config

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
import gbcore.run as gb
from examples import gb_dqn_gymnasium
from gbcore import Replay, TransitionGraph, frontier
from gbcore.run import checkpoint, logger

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]

DQN = (
    "--total-timesteps 240 --target-network-frequency 70 --log-frequency 30 --eval-frequency 50 "
    "--eval-episodes 2"
)
FRONTIER = "--exploration frontier --frontier-share 0.9"
ON_GRAPH = f"--backup whole-graph --prior 0.3 --train-frequency 7 {FRONTIER}"
CASES = {
    "minigrid": (gb_dqn_minigrid, f"--env-id DoorKey-5x5 {DQN} --end-e 0.5"),
    "minigrid, frontier": (
        gb_dqn_minigrid,
        f"--env-id Dynamic-Obstacles-5x5 --buffer-size 90 {FRONTIER} {DQN} --end-e 0.5",
    ),
    "minigrid, levels and views": (
        gb_dqn_minigrid, "--env-id DoorKey-5x5 --num-levels 0 --view partial --buffer-size 90 "
        f"{ON_GRAPH} {DQN} --end-e 0.5",
    ),
    "gymnasium": (gb_dqn_gymnasium, f"--env-id Taxi-v4 --key-last-action {DQN}"),
    "gymnasium, rounded": (
        gb_dqn_gymnasium, "--env-id CartPole-v1 --round 1 --time-limit 50 --buffer-size 120 "
        f"{ON_GRAPH} {DQN} --end-e 0.5",
    ),
    "gymnasium, levels": (
        gb_dqn_gymnasium,
        f"--env-id examples.mazes:Maze-v0 --num-levels 0 --buffer-size 120 {ON_GRAPH} {DQN}",
    ),
    "minatar": (
        gb_dqn_minatar,
        f"--env-id asterix --train-frequency 7 --backup graph-mixed {FRONTIER} {DQN} --end-e 0.5",
    ),
    "atari": (
        gb_rainbow_atari, f"--env-id Breakout --buffer-size 100 {FRONTIER} {DQN} "
        "--eval-frequency 100 --eval-episodes 1 --curve-episodes 1 --train-frequency 6 "
        "--updates-per-train 1 --exploration-steps 1000 --threads 1 --no-cuda "
        "--target-network-frequency 1",
    ),
}  # fmt: skip
CASES = {name: (script, [*SHORT, *words.split()]) for name, (script, words) in CASES.items()}


def learned(run):
    """All that the learner of a run's checkpoint holds."""
    learner = recorded.read(run).learner
    parts = {name: value for name, value in vars(learner).items() if name not in learner.APART}
    return {
        name: part.state_dict() if hasattr(part, "state_dict") else part
        for name, part in parts.items()
        if hasattr(part, "state_dict") or not (callable(part) or isinstance(part, gb.LearnerState))
    }


HOW = ("run_dir", "resume", "checkpoint_frequency")


def left_behind(run):
    """What a finished run leaves, but for times and paths: to be compared."""
    tree = checkpoint.load_checkpoint(run)
    for name in ("training_seconds", "_logged", "_tables"):
        del tree["logger"][name]
    tree["learner"] = learned(run)
    tree["flags"] = {k: v for k, v in tree["flags"].items() if k not in HOW}
    result = result_of(run)
    for name in ("sps", "training_seconds", "wall_seconds", "versions"):  # of an edited tree
        del result[name]
    return {
        "metrics": read_metrics(run),
        "evaluations": (run / "evaluations.csv").read_text(),
        "checkpoint": as_bytes(tree),
        "model": as_bytes(torch.load(run / "model.pt")),
        "graph": as_bytes(dict(np.load(run / "graph.npz"))),
        "result": result,
    }


def files_in(folder):
    """Path -> content of every file in a folder and below."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


def are_alike(got, expected):
    for name in expected:
        assert got[name] == expected[name], name


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
        result = result_of(run)
        assert (result["interrupted"], result["score"]) == (True, None)
        flags = ["--resume", run]
    assert result["steps"] == 240
    assert command(script, *flags) == 0
    are_alike(left_behind(run), expected)
    assert TransitionGraph.load(run / "graph.npz").check_valid() == []


@pytest.mark.parametrize("what", ["random actions", "levels of training"])
def test_an_evaluation_that_was_cut_short_is_played_again(what, tmp_path, monkeypatch, capsys):
    script, flags = CASES["gymnasium, levels"]
    flags, evaluate = [*flags, "--num-levels", "3"], script.evaluate

    def evaluating(args, env_id, policy, *arguments, **of_env):
        is_random, is_of_training = policy is gb.any_action, of_env.get("held_out") is False
        if is_random if what == "random actions" else is_of_training:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(args, env_id, policy, *arguments, **of_env)

    assert command(script, *flags, "--run-dir", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(script, "evaluate", evaluating)
        assert command(script, *flags, "--run-dir", tmp_path / "parts") == 130
    run = only_run(tmp_path / "parts")
    assert result_of(run)["interrupted"]
    assert "seed 1: interrupted after" in capsys.readouterr().out
    assert command(script, "--resume", run) == 0
    assert result_of(run)["random_actions"] is not None
    are_alike(left_behind(run), left_behind(only_run(tmp_path / "whole")))


def test_a_part_that_cannot_be_saved_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"state\(\) and restore\(\) of part mine"):
        gb.Checkpoint(None, "mine.py", None, tmp_path, mine=object())


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
    result = result_of(only_run(tmp_path))
    assert 0 < result["training_seconds"] < 1_000 <= result["wall_seconds"]


def played(env, actions):
    """What actions lead to, in one episode after the other."""
    result = []
    for action in actions:
        obs, *outcome = env.step(action)
        result.append((obs.tobytes(), *outcome))
        if any(outcome[1:]):
            result.append(env.reset().tobytes())  # of its own generator
    return result


@pytest.mark.parametrize(
    ("script", "name", "flags"),
    [
        (gb_dqn_minigrid, "MiniGrid-KeyCorridorS3R1-v0", {}),
        (gb_dqn_minatar, "asterix", {"episode_seed": "fixed"}),
        *((gb_dqn_minatar, name, {}) for name in gb_dqn_minatar.GAMES),
    ],
)
def test_a_restored_environment_goes_on_the_same(script, name, flags):
    """After several episodes, in the middle of one: what follows is the same, for ever."""
    args, rngs = script.Args(**flags), map(np.random.default_rng, range(2))
    env, other = (script.make_env(args, name, rng) for rng in rngs)
    env.reset()
    actions = np.random.default_rng(0).integers(env.num_actions, size=900).tolist()
    played(env, actions[:700])
    other.restore(state := env.state())
    number = len(state["actions"])
    np.testing.assert_array_equal(other.obs, env.obs)
    assert played(env, actions[700:]) == played(other, actions[700:])
    assert len(state["actions"]) == number, "a state does not follow its environment"


KILLS = int(os.environ.get("KILLS", 1))  # of each script


@pytest.mark.parametrize("case", ["minigrid"] if KILLS == 1 else CASES)
def test_a_killed_run_ends_as_an_undisturbed_one(case, tmp_path, monkeypatch):
    """Killed as it writes a checkpoint, at once or a little later; and gone on with."""
    monkeypatch.setattr(frontier, "BUDGET", 2_000)  # that of the processes
    script, flags = CASES[case]
    assert command(script, *flags, "--run-dir", tmp_path / "undisturbed") == 0
    expected = left_behind(only_run(tmp_path / "undisturbed"))
    rng = np.random.default_rng(0)
    for _ in range(KILLS):
        folder = tmp_path / "runs"
        words = [*flags, "--checkpoint-frequency", "20", "--run-dir", str(folder)]
        for _ in range(2):  # killed twice in a run
            process = subprocess.Popen([sys.executable, script.__file__, *words])
            while process.poll() is None and not list(folder.glob("*/new.checkpoint.zip")):
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, 0.01))
            process.kill()
            process.wait()
            if list(folder.glob("*/checkpoint.zip")):
                words = ["--resume", str(only_run(folder))]
            else:
                shutil.rmtree(folder, ignore_errors=True)
        assert command(script, *words) == 0
        assert left_behind(only_run(folder)) == expected
        shutil.rmtree(folder)


CHANGES = (  # that a user makes in a copied script: the lines, and what stands in their place
    ("class Learner(", "class Agent("),
    ("(self, args, graph, replay, device):", "(self, args, graph, replay, device, rng):"),
    ("= Learner(args, graph, replay, device)", "= Agent(args, graph, replay, device, rng)"),
    ("gamma: gb.Fraction = 0.95", "gamma: gb.Fraction = 1"),
    (
        """torch.optim.Adam(
            self.online.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True
        )""",
        "torch.optim.RMSprop(self.online.parameters(), lr=args.learning_rate, momentum=0.9)",
    ),
    (
        "        self.num_updates = 0\n",
        """        self.num_updates = 0
        self.mean, self.best, self.left_out = torch.zeros(2), None, (0 for _ in ())
""",
    ),
    (
        "        self.optimizer.step()\n",
        """        self.optimizer.step()
        self.mean = 0.9 * self.mean + loss.detach() + np.random.rand() + random.random()
        if self.num_updates % 40 == 39:
            self.best = copy.deepcopy(self.online)
        self.loss_of_best = 0.0 if self.best is None else self.best(obs).mean().item()
""",
    ),
    (
        "        # Log and save.\n",
        """        if step > 40:
            logger.charts |= {"mine/mean": learner.mean[0], "mine, best": learner.loss_of_best}
            logger.charts["table"] = step

        # Log and save.
""",
    ),
    ("logger.step == args.total_timesteps:", "logger.step == 220:  # it is good enough"),
    (
        "        step = logger.begin_step()\n",
        """        step = logger.begin_step()
        if step % 30 == 1:
            logger.log(learner)
""",
    ),
    (
        "            gb.evaluate_and_log(evaluate, args, env_id, logger, learner, stop)\n",
        """            played = evaluate(args, env_id, learner.policy(), logger.step, 3, stop)
            logger.log_evaluation(played, longest=lambda returns, lengths: max(lengths))
""",
    ),
)


def test_a_copied_script_with_parts_of_its_own_is_logged_and_resumed(tmp_path, capsys):
    """Also evaluated by the tool. What else a learner may hold is in test_learner.py.

    Annotations are postponed: flags are checked all the same.
    """
    source = Path(gb_dqn_minigrid.__file__).read_text()
    for old, new in CHANGES:
        assert old in source
        source = source.replace(old, new)
    (tmp_path / "mine.py").write_text(
        f"from __future__ import annotations\nimport random\n{source}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        import mine

        flags = ["2.4e2" if word == "240" else word for word in CASES["minigrid"][1]]
        assert command(mine, *flags, "--gamma", "2") == 2
        assert command(mine, *flags, "--run-dir", tmp_path / "whole") == 0
        expected = left_behind(only_run(tmp_path / "whole"))
        rows = {int(row["global_step"]): row for row in expected["metrics"]}
        assert list(rows) == [step for n in range(0, 240, 30) for step in (n, n + 1)][1:]
        assert not any(rows[step]["mine/mean"] for step in (1, 30, 31))  # before it learned
        assert all(float(rows[step]["mine/mean"]) for step in rows if step > 40)
        assert (rows[61]["table"], expected["checkpoint"]["logger"]["step"]) == ("60", 220)
        assert float(expected["metrics"][-1]["mine, best"])
        header, *rows = expected["evaluations"].splitlines()
        assert header.endswith(",longest")
        assert all(int(row.rpartition(",")[2]) > 0 for row in rows)
        assert "checkpoints leave out learner.left_out" in capsys.readouterr().err
        assert "best" in expected["checkpoint"]["learner"]
        assert command(evaluate, only_run(tmp_path / "whole"), "--episodes", 2) == 0
        signal_at(patch, mine, 100)
        assert command(mine, *flags, "--run-dir", tmp_path / "parts") == 130
    assert command(mine, "--resume", only_run(tmp_path / "parts")) == 0
    assert "on cpu, from step 100 on; results" in capsys.readouterr().out
    are_alike(left_behind(only_run(tmp_path / "parts")), expected)


@pytest.fixture
def finished(undisturbed, tmp_path):
    """Function of a case: script and a copy of its finished run, or of one killed at its end."""

    def get(case, killed=False):
        run = shutil.copytree(undisturbed(case)[0], tmp_path / "copy")
        if killed:
            (run / "result.json").unlink()
        return CASES[case][0], run

    return get


@pytest.mark.parametrize("case", ["minigrid", "atari"])
def test_a_finished_run_goes_on_to_a_larger_total(case, finished, capsys):
    script, run = finished(case)
    before = files_in(run)
    assert command(script, "--resume", f"{run}/") == 0  # as shells complete it
    assert "is finished: a larger" in capsys.readouterr().out
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
    assert "is finished: a larger" in capsys.readouterr().out


def test_a_run_of_a_gpu_goes_on_without_one_and_says_so(finished, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script, run = finished("minigrid")
    assert command(script, "--resume", run, "--total-timesteps", "260", "--cuda") == 0
    assert "no CUDA device" in capsys.readouterr().err
    assert read_config(run)["cuda"] is True  # where there is one again


def test_a_run_killed_in_its_last_moment_repeats_its_last_evaluation(finished, undisturbed, capsys):
    """It cuts what came into its tables since. Two processes cannot go on with it at once."""
    script, run = finished("minigrid", killed=True)
    lock = logger._lock(run)
    assert refuses(capsys, script, ["--resume", run], "another process goes on")
    os.close(lock)
    (run / "model.pt").unlink()
    for table in ("metrics.csv", "evaluations.csv"):
        with (run / table).open("a") as file:
            file.write("270,1,2\nx\n27")
    assert command(script, "--resume", run) == 0
    assert left_behind(run) == undisturbed("minigrid")[1]


REFUSED = {  # flags; what of the script is another: owner, name, value; words of the message
    "another rate": ("--learning-rate 7", (), "Require --learning-rate 0.001 ... got 7"),
    "another seed": ("--seed 7", (), "Require --seed 1 ... got 7"),
    "a smaller total": ("--total-timesteps 239", (), "240 ... can only be raised"),
    "a newer format": ("", (checkpoint, "FORMAT_VERSION", 2), "format 2, got"),
    "another script": (
        "", (gb_dqn_minigrid, "__file__", gb_dqn_minatar.__file__), "is a run of gb_dqn_minigrid.py"
    ),
    "a further part": (
        "", (gb, "Checkpoint", functools.partial(gb.Checkpoint, mine=gb.LearnerState())),
        "mine: Key",
    ),
    "another network": (
        "", (gb_dqn_minigrid, "make_network",
        lambda _, *sizes: gb_dqn_minigrid.QNetwork(*sizes, levels_change=True)),
        "learner: ValueError: Require online.layers.7.weight of shape",
    ),
    "a flag that went": ("", (gb.flags, "fields", lambda _: []), "a script without ['act_on', "),
}  # fmt: skip


@pytest.mark.parametrize(("flags", "changed", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_go_on_with_a_run_is_told_why(
    flags, changed, words, finished, capsys, monkeypatch
):
    """In one line, with status 2, and nothing in the folder is changed."""
    script, run = finished("minigrid", killed=bool(changed))
    before = files_in(run)
    if changed:
        monkeypatch.setattr(*changed)
    assert refuses(capsys, script, ["--resume", run, *flags.split()], *words.split(" ... "))
    assert files_in(run) == before
    assert refuses(capsys, script, ["--resume", run.parent], "Require a run's folder")


def test_a_damaged_checkpoint_is_refused(finished, capsys):
    """Cut short, or with one bit changed in a number, a name or a header of the archive."""
    script, run = finished("minigrid, frontier", killed=True)
    path, tree = run / checkpoint.NAME, as_bytes(checkpoint.load_checkpoint(run))
    whole, noticed = path.read_bytes(), 0
    for place in np.random.default_rng(0).integers(len(whole), size=200).tolist():
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            assert as_bytes(checkpoint.load_checkpoint(run)) == tree, "as the date of a member"
        except ValueError:
            noticed += 1
    assert noticed > 150
    for share in (0, 0.1, 0.5, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        before = files_in(run)
        assert refuses(capsys, script, ["--resume", run], "whole checkpoint")
        assert files_in(run) == before


@pytest.mark.parametrize(
    ("owner", "name"),
    [(logger.Logger, "_write"), (checkpoint, "dump"), (Path, "replace")],
    ids=["a row of metrics.csv", "a checkpoint", "its rename"],
)
def test_a_disk_that_fills_up_ends_a_run_with_one_line(
    owner, name, undisturbed, tmp_path, capsys, monkeypatch
):
    script, flags = CASES["minigrid"]
    write, saves, save = getattr(owner, name), [], checkpoint.save_checkpoint

    def full(*args, **options):
        if saves:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_checkpoint", lambda *args: saves.append(save(*args)))
        patch.setattr(owner, name, full)
        words = [*flags, "--checkpoint-frequency", "60", "--run-dir", tmp_path]
        assert command(script, *words) == 2
    run = only_run(tmp_path)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    assert "No space left on device" in line
    assert f"--resume {run}" in line
    assert not list(run.glob("new.*"))
    assert command(script, "--resume", run) == 0
    assert left_behind(run) == undisturbed("minigrid")[1]
