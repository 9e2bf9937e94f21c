"""--resume in all scripts: the same run as one that was never interrupted, or one clear line."""

import csv
import json
import signal
import sys

import numpy as np
import pytest
import torch

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore import TransitionGraph

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
    "atari": (gb_rainbow_atari, ["--env-id", "Breakout", "--buffer-size", "100", *ATARI]),
}
all_scripts = pytest.mark.parametrize("case", ["minigrid", "minatar", "atari"])


@pytest.fixture(autouse=True)
def torch_settings():
    """What the scripts set for the whole process is taken back."""
    torch.set_num_threads(1)
    yield
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)


def command(script, *flags):
    """Exit status of a run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *flags])
        try:
            script.main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


def only_run(folder):
    (run,) = folder.iterdir()
    return run


def left_behind(run):
    """All that a run leaves, times aside: what must not depend on interruptions."""
    with (run / "metrics.csv").open() as file:
        metrics = list(csv.DictReader(file))
    for row in metrics:
        row.pop("charts/SPS")
    state = json.loads((run / "checkpoint" / "state.json").read_text())
    state["logged"].pop()
    for name in ("training_seconds", "tensors_crc32"):  # torch.save writes no canonical form
        state.pop(name)
    result = json.loads((run / "result.json").read_text())
    for name in ("sps", "training_seconds", "wall_seconds"):
        result.pop(name)
    weights = torch.load(run / "model.pt", weights_only=True)
    with np.load(run / "checkpoint" / "arrays.npz") as file:
        replay = {name: array.tobytes() for name, array in file.items()}
    with np.load(run / "checkpoint" / "graph.npz") as file:
        graph = {name: array.tobytes() for name, array in file.items()}
    return {
        "metrics": metrics,
        "evaluations": (run / "evaluations.csv").read_text(),
        "state": state,
        "result": result,
        "weights": {name: tensor.numpy().tobytes() for name, tensor in weights.items()},
        "replay": replay,
        "graph": graph,
    }


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
