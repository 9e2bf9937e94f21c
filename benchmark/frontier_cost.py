"""What the frontier planner costs: per step of the DQN scripts, and on a graph of a million states.

    python benchmark/frontier_cost.py

Processor time of the thread, so that whatever else the machine does hardly counts. In the first
table the scripts' own training loop runs, after `learning_starts` and before; in the second one a
graph is walked on, of which every change sets off as much planning as the budget allows.
"""

import importlib
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from recorded import task_name

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gbcore import FrontierPlanner, TransitionGraph  # noqa: E402
from gbcore.run_directory import RunDirectory  # noqa: E402

TASKS = (
    ("gb_dqn_minigrid", "LavaCrossingS9N2"), ("gb_dqn_minigrid", "DoorKey-6x6"),
    ("gb_dqn_minigrid", "KeyCorridorS3R3"), ("gb_dqn_minatar", "breakout"),
    ("gb_dqn_minatar", "freeway"),
)  # fmt: skip


@dataclass
class Args:
    steps: int = 10_000
    """steps of each script, half of them with updates"""
    states: int = 1_000_000
    """states of the large graph"""
    slices: int = 5_000
    """steps on it"""
    budget: int = 2_000
    """edges that the planner reads per step at most"""


class Clock:
    """Processor seconds in some calls."""

    def __init__(self):
        self.seconds, self.calls = 0.0, []

    def on(self, owner, name):
        """Time a method of an object."""
        call = getattr(owner, name)

        def timed(*args):
            start = time.thread_time()
            result = call(*args)
            spent = time.thread_time() - start
            self.seconds += spent
            self.calls.append(spent)
            return result

        setattr(owner, name, timed)


def script_cost(name, env_id, args):
    """Processor seconds of a training loop in all, and those of its planner; states known."""
    script = importlib.import_module(name)
    flags = script.Args(
        env_id=env_id, exploration="frontier", frontier_budget=args.budget, eval_frequency=0,
        total_timesteps=args.steps, learning_starts=args.steps // 2,
    )  # fmt: skip
    task, rng = task_name(name, env_id), np.random.default_rng(flags.seed)
    toy = script.make_envs(flags, task, np.random.default_rng(0), 1)[0]
    obs = toy.reset()
    script.warm_up(flags, obs, toy.num_actions)
    graph = TransitionGraph(toy.num_actions, obs.shape, obs.dtype, capacity=2 * args.steps)
    frontier = script.make_frontier(flags, graph)
    replay = script.Replay(graph, args.steps, frontier)
    learner = script.Learner(flags, graph, replay, toy.num_actions, torch.device("cpu"))
    clock = Clock()
    for owner, method in (
        (frontier, "begin"), (frontier, "act"), (frontier, "metrics"),
        (frontier.planner, "changed"),
    ):  # fmt: skip
        clock.on(owner, method)
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run", {}, script.METRICS + frontier.METRICS)
        begin = time.thread_time()
        script.train(flags, task, run, learner, rng, script.Counters())
        spent = time.thread_time() - begin
        run.close()
    return spent, clock.seconds, graph.num_nodes


def large_graph(num_states, num_actions, rng):
    """A square of rooms without doors, all but one pair tried; every tenth step slips."""
    side = int(num_states**0.5)
    graph = TransitionGraph(num_actions, (1,), np.int64, capacity=side**2)
    for s in range(side**2):
        graph.node(np.array([s]))
    x, y = np.divmod(np.arange(side**2), side)
    moves = [(1, 0), (-1, 0), (0, 1), (0, -1)]
    for a in range(num_actions):
        dx, dy = moves[a % 4]
        next_x, next_y = np.clip(x + dx, 0, side - 1), np.clip(y + dy, 0, side - 1)
        to, slips = next_x * side + next_y, rng.random(side**2) < 0.1
        for s, s2, slip in zip(range(side**2), to.tolist(), slips.tolist(), strict=True):
            if (s, a) != (0, 0):
                graph.add(s, a, 0.0, s2, False)
            if slip:
                graph.add(s, a, 0.0, s, False)
    return graph


def slice_cost(args):
    """Microseconds of one step's planning on the large graph: an array; the graph and planner."""
    rng = np.random.default_rng(0)
    graph = large_graph(args.states, 4, rng)
    planner = FrontierPlanner(graph)
    begin = time.thread_time()
    planner.plan()
    whole = time.thread_time() - begin
    clock = Clock()
    clock.on(planner, "plan")
    node = 0
    for _ in range(args.slices):
        action = planner.act(node, rng)
        action = int(rng.integers(4)) if action is None else action
        edges = graph.expand(np.array([node]), np.array([action]), 1)
        next_node = int(rng.integers(graph.num_nodes)) if not len(edges.nodes) else edges.nodes[0]
        graph.add(node, action, 0.0, int(next_node), False)
        planner.changed(node, int(next_node))
        planner.plan(args.budget)
        node = int(next_node)
    return 1e6 * np.array(clock.calls), whole, graph, planner


def main():
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one thread")
    print()
    print("| task | states | us per step | of it the planner | share |")
    print("|---|---|---|---|---|")
    for name, env_id in TASKS:
        spent, planner, states = script_cost(name, env_id, args)
        print(
            f"| {env_id} | {states:,} | {1e6 * spent / args.steps:.0f} "
            f"| {1e6 * planner / args.steps:.0f} | {planner / spent:.1%} |",
            flush=True,
        )
    times, whole, graph, planner = slice_cost(args)
    print()
    print("| states | edges | first plan, s | slice, median us | 99% | longest | states waiting |")
    print("|---|---|---|---|---|---|---|")
    median, high = np.percentile(times, [50, 99])
    print(
        f"| {graph.num_nodes:,} | {graph.num_edges:,} | {whole:.1f} | {median:.0f} | {high:.0f} "
        f"| {times.max():.0f} | {planner.num_waiting:,} |"
    )


if __name__ == "__main__":
    main()
