"""benchmark/speed.py: it runs, its file and its tables agree, and its limits are what they say."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import speed
import torch
from conftest import JIT, jitted
from output import read_rows

import gb_rainbow_atari as atari
from gbcore import TransitionGraph

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "--warm-up-steps", "70", "--learning-starts", "34", "--threads", "1", "--no-cuda",
    "--repetitions", "2",
]  # fmt: skip


def command(*flags):
    return subprocess.run(
        [sys.executable, ROOT / "benchmark" / "speed.py", *flags],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.skipif(not JIT, reason="times compiled code")
@pytest.mark.parametrize(
    ("script", "task", "steps"),
    [
        ("gb_dqn_minigrid", "MiniGrid-Empty-8x8-v0", 30),
        ("gb_dqn_minatar", "freeway", 30),
        ("gb_rainbow_atari", "freeway", 2),
    ],
)
def test_rates_phases_and_limits(script, task, steps, tmp_path):
    out = tmp_path / "speed.csv"
    flags = ("--scripts", script, "--backups", "one-step", "graph", "--steps", str(steps))
    done = command(*flags, "--bf16", *SMALL, "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = read_rows(out)
    assert speed.table(rows) in done.stdout
    assert speed.summary(rows) in done.stdout
    names = [speed.ENVIRONMENT, speed.GRADIENT, "one-step", "graph"]
    bf16 = ["one-step, bfloat16", "graph, bfloat16"] if script == speed.ATARI else []
    assert [row["backup"] for row in rows] == names + bf16
    assert {(row["script"], row["task"], row["steps"]) for row in rows} == {
        (script, task, str(steps))
    }
    environment, gradient, one_step, graph = rows[:4]
    assert float(one_step["of_one_step"]) == float(gradient["of_gradient"]) == 1
    for row in rows:
        rates = [float(row[name]) for name in ("lowest", "steps_per_second", "highest")]
        assert 0 < rates[0] <= rates[1] <= rates[2]
    for row in (one_step, graph):
        phases = {name: float(row[name]) for name in row if name.startswith("microseconds_")}
        whole = 1e6 / float(row["steps_per_second"])
        assert sum(phases.values()) == pytest.approx(whole, rel=1e-3)
        idle = {name for name, value in phases.items() if value <= 0}
        # Atari's first actions are random ones.
        assert idle <= ({"microseconds_act"} if script == "gb_rainbow_atari" else set())
        assert float(row["steps_per_second"]) < float(environment["steps_per_second"])
    bare, whole = (
        sum(float(row[f"microseconds_{p}"]) for p in ("expand", "leaf_evaluation", "targets"))
        for row in (gradient, graph)
    )
    assert bare < 0.3 * whole  # nothing but the calls themselves
    assert float(gradient["evaluated_per_update"]) == 0


@pytest.mark.skipif(not JIT, reason="times compiled code")
def test_processes_side_by_side(tmp_path):
    out = tmp_path / "parallel.csv"
    flags = ("--scripts", "gb_dqn_minatar", "--backups", "graph", "--parallel", "1", "2")
    done = command(*flags, *SMALL, "--parallel-seconds", "0.5", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = read_rows(out)
    assert [int(row["processes"]) for row in rows] == [1, 2]
    for row in rows:
        total, number = float(row["steps_per_second"]), int(row["processes"])
        assert number * float(row["slowest"]) <= total + 1e-3
        assert total <= number * float(row["fastest"]) + 1e-3
    assert speed.parallel_table(rows) in done.stdout


@jitted
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--warm-up-steps", "40"), "got 40"),
        (("--learning-starts", "20000"), "> learning starts + 32 = 20032"),
        (("--steps", "-1"), "--steps"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words, named):
    done = command(*words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_clocks_come_off_a_function_that_copies_share(tmp_path):
    script = SimpleNamespace(
        __name__="script", METRICS=(), pair_q_values=len,
        RunDirectory=lambda *args: SimpleNamespace(close=lambda: None),
    )  # fmt: skip
    learner = SimpleNamespace(device=torch.device("cpu"))
    agents = [speed.Agent(script, None, "", learner, None, None, None, tmp_path) for _ in range(2)]
    for agent in agents:
        agent.clock(script, "pair_q_values", "targets")
    agents[1].on_the_clock = True
    assert script.pair_q_values([1, 2, 3]) == 3
    assert agents[0].seconds["targets"] == 0 < agents[1].seconds["targets"]
    for agent in reversed(agents):
        agent.close()
    assert script.pair_q_values is len


def test_the_gradient_limit_is_one_step_on_a_gpu_too():
    """What is captured there, run here without capture, against what a CPU does."""
    torch.set_num_threads(1)
    results = []
    for padded in (False, True):
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        graph = TransitionGraph(3, (4, 84, 84), frame_stack=True)
        args = atari.Args(cuda=False, backup="one-step", batch_size=4)
        replay = atari.Replay(graph, 50, 0.5)
        learner = atari.Learner(args, graph, replay, 3, torch.device("cpu"))
        obs = rng.integers(256, size=(8, 4, 84, 84), dtype=np.uint8)
        nodes = [graph.node(o) for o in obs]
        for i in range(40):
            replay.add(nodes[i % 8], i % 3, 0.0, nodes[(3 * i) % 8], False, False)
        learner.padded = padded
        if padded:
            learner.make_room_for_frames()
        speed.remove_atari_targets(learner)
        torch.manual_seed(1)
        batch = replay.sample(4, 0.5, rng)
        results.append(learner.update(batch, learner.subgraphs(batch, rng)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_tables_of_the_pages_are_those_of_the_file():
    results, page = ROOT / "results", (ROOT / "docs" / "speed.md").read_text()
    for name in ("speed.csv", "speed_bf16.csv", "speed_long_paths.csv"):
        assert speed.table(read_rows(results / name)).strip() in page
    rows = read_rows(results / "speed.csv")
    assert speed.summary(rows) in (ROOT / "README.md").read_text()


def test_a_copy_that_is_timed_has_the_flags_of_its_name(tmp_path, torch_settings):
    own = {name: getattr(atari, name) for name in ("save", "tqdm", "categorical_targets")}
    flags = SimpleNamespace(
        threads=1, learning_starts=34, warm_up_steps=35, cuda=False, parallel=(), steps=2
    )
    agent = speed.make_agent(flags, speed.ATARI, "Freeway", tmp_path / "first")
    expected = {
        "graph": ("graph", torch.float32),
        "tree, bfloat16": ("tree", torch.bfloat16),
        speed.GRADIENT: ("one-step", torch.float32),
    }
    for i, (name, its_flags) in enumerate(expected.items()):
        copied = speed.branch(agent, name, tmp_path / str(i))
        assert (copied.learner.args.backup, copied.learner.target_dtype) == its_flags
        copied.close()
    agent.close()
    assert {name: getattr(atari, name) for name in own} == own  # other tests run the script, too
