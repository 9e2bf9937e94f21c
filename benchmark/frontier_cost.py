"""What a slice of the frontier planner costs on a graph of a million states.

    python benchmark/frontier_cost.py

Processor time of the thread, so that whatever else the machine does hardly counts. A graph is
walked on of which every change sets off as much planning as the budget allows. What the planner
costs a script is another question: `tools/speed.py --variants default exploration=frontier`.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gbcore import FrontierPlanner, TransitionGraph


@dataclass
class Args:
    states: int = 1_000_000  # of the graph
    slices: int = 5_000  # steps on it
    budget: int = 2_000  # edges that the planner reads per step at most


def large_graph(num_states, rng):
    """A square of rooms without doors, all but one pair tried; every tenth step slips."""
    side = int(num_states**0.5)
    graph = TransitionGraph(4, (1,), np.int64, capacity=side**2)
    for s in range(side**2):
        graph.node(np.array([s]))
    x, y = np.divmod(np.arange(side**2), side)
    for a, (dx, dy) in enumerate([(1, 0), (-1, 0), (0, 1), (0, -1)]):
        to = np.clip(x + dx, 0, side - 1) * side + np.clip(y + dy, 0, side - 1)
        slips = rng.random(side**2) < 0.1
        for s, s2, slip in zip(range(side**2), to.tolist(), slips.tolist(), strict=True):
            if (s, a) != (0, 0):
                graph.add(s, a, 0.0, s2, False)
            if slip:
                graph.add(s, a, 0.0, s, False)
    return graph


def slice_cost(args):
    """Microseconds of one step's planning: an array; those of the first plan; graph, planner."""
    rng = np.random.default_rng(0)
    graph = large_graph(args.states, rng)
    planner = FrontierPlanner(graph)
    node, times = 0, []
    for budget in [None, *[args.budget] * args.slices]:
        begin = time.thread_time()
        planner.plan(budget)
        times.append(1e6 * (time.thread_time() - begin))
        action = planner.act(node, rng)
        action = int(rng.integers(4)) if action is None else action
        known = graph.expand(np.array([node]), np.array([action]), 1).nodes
        next_node = int(known[0] if len(known) else rng.integers(graph.num_nodes))
        graph.add(node, action, 0.0, next_node, False)
        node = next_node
    return np.array(times[1:]), times[0], graph, planner


def main():
    times, first, graph, planner = slice_cost(tyro.cli(Args))
    median, high = np.percentile(times, [50, 99])
    print("| states | edges | first plan, s | slice, median us | 99% | longest | states waiting |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {graph.num_nodes:,} | {graph.num_edges:,} | {1e-6 * first:.1f} | {median:.0f} "
        f"| {high:.0f} | {times.max():.0f} | {planner.num_waiting:,} |"
    )


if __name__ == "__main__":
    main()
