"""benchmark/fast_and_plain.py: its plain paths are plain, and what it says of curves is so."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fast_and_plain
import numpy as np
import pytest
import torch
from conftest import command, jitted
from test_dqn_scripts import make_learner
from test_sweep import alive, wait_until

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore import TransitionGraph

pytestmark = pytest.mark.usefixtures("torch_settings")


def plain_copy(script):
    """What of a script `take_plain_path` changes, in place of the script."""
    copied = SimpleNamespace(Learner=type("Learner", (script.Learner,), {}))
    copied.__name__ = script.__name__
    fast_and_plain.take_plain_path(copied)
    return copied.Learner


@pytest.mark.parametrize("script", [gb_dqn_minigrid, gb_dqn_minatar])
def test_the_plain_path_evaluates_all_leaves_and_gives_the_same_targets(script):
    task = {"gb_dqn_minigrid": "MiniGrid-Empty-5x5-v0", "gb_dqn_minatar": "breakout"}
    fast = make_learner(script, task[script.__name__])
    graph, size = fast.graph, np.prod(fast.graph.obs_shape)
    obs = np.eye(3, size, dtype=graph.obs_dtype).reshape(3, *graph.obs_shape)
    nodes = [graph.node(one) for one in obs]
    for i in range(3):
        fast.replay.add(nodes[i], 0, 1.0, nodes[(i + 1) % 3], False, False)
    plain = plain_copy(script)(
        fast.args, graph, fast.replay, graph.num_actions, torch.device("cpu")
    )
    plain.target.load_state_dict(fast.target.state_dict())
    rng = np.random.default_rng(0)
    for _ in range(4):
        batch = fast.replay.sample(8, rng)
        subgraphs = fast.subgraphs(batch, rng)
        assert (fast.targets(batch, subgraphs) == plain.targets(batch, subgraphs)).all()
    assert fast.leaves.num_evaluated == 3
    assert plain.leaves.num_evaluated > 3


def test_the_plain_path_of_atari_is_padded_and_not_captured():
    graph = TransitionGraph(3, (4, 84, 84), frame_stack=True)
    args = gb_rainbow_atari.Args(cuda=False)
    replay = gb_rainbow_atari.Replay(graph, 8, 0.5)
    learner = plain_copy(gb_rainbow_atari)(args, graph, replay, 3, torch.device("cpu"))
    assert learner.padded
    assert not learner.args.cuda_graphs


@pytest.mark.parametrize(
    ("path", "bf16", "is_plain", "is_bf16"),
    [
        ("fast", False, False, False),
        ("plain", False, True, False),
        ("fast", True, False, True),
        ("plain", True, False, False),
    ],
)
def test_what_a_path_changes(path, bf16, is_plain, is_bf16, monkeypatch):
    plain, argv = [], []
    script = SimpleNamespace(main=lambda: argv.extend(sys.argv))
    monkeypatch.setattr(fast_and_plain.importlib, "import_module", lambda name: script)
    monkeypatch.setattr(fast_and_plain, "take_plain_path", plain.append)
    monkeypatch.setattr(fast_and_plain, "end_with", lambda parent: None)
    monkeypatch.setattr(
        fast_and_plain.multiprocessing, "parent_process", lambda: SimpleNamespace(pid=0)
    )
    monkeypatch.setattr(sys, "argv", [])
    args = fast_and_plain.Args(script="gb_rainbow_atari", bf16=bf16, steps=100, evaluations=4)
    fast_and_plain.train(args, "Krull", 7, path, "there")
    assert bool(plain) == is_plain
    flags = ["--bf16-targets"] if is_bf16 else []
    assert argv == [
        "gb_rainbow_atari.py", "--env-id", "Krull", "--seed", "7", "--backup", "graph",
        "--total-timesteps", "100", "--run-dir", "there", "--no-save-model", "--threads", "1",
        "--eval-frequency", "25", "--eval-episodes", "3", *flags,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bf16"], "--bf16 is for --script gb_rainbow_atari"),
        (["--parallel", "0"], "Require at least one of --seeds"),
        (["--evaluations", "30000"], "Require at least one of --seeds"),
    ],
)
def test_refusals(flags, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, fast_and_plain, *flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_compare():
    fast = np.array([[0.0, 1.0, 3.0], [1.0, 1.0, 5.0]])
    assert fast_and_plain.compare(fast, fast) == "equal in every evaluation of every seed"
    plain = np.array([[0.0, 1.0, 9.0], [0.5, 1.0, 9.5]])  # step 1: 0.5 in [0, 0.5], 0.25 in [0, 1]
    assert fast_and_plain.compare(fast, plain) == (
        "1 of 3 evaluations equal for every seed; the means lie between the other path's lowest "
        "and highest seed in 2; over all evaluations they are 1.833 (fast) and 3.5 (plain)"
    )


@jitted
def test_a_killed_comparison_leaves_no_process_behind():
    words = [sys.executable, fast_and_plain.__file__, "--tasks", "Empty-5x5", "--parallel", "2"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
        threads = Path(f"/proc/{parent.pid}/task")
        children = wait_until(lambda: [
            pid for listed in threads.glob("*/children") for pid in listed.read_text().split()
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ])  # fmt: skip
        parent.kill()
    wait_until(lambda: not any(map(alive, children)))
