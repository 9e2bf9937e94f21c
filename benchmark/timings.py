"""Time the graph and its targets on one core. Each command prints a table.

python benchmark/timings.py targets     # expand and targets of a batch
python benchmark/timings.py frontier    # a slice of the planner on a million states
"""

import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import play
from output import markdown

from gbcore import FrontierPlanner, TransitionGraph, categorical_targets, q_targets

BATCH = 32


def seconds(function, *arguments, clock=time.perf_counter):
    """What a call takes, and what it returns."""
    begin = clock()
    found = function(*arguments)
    return clock() - begin, found


def targets(transitions: int = 20_000, batches: int = 1_000):
    """`expand` and targets of a batch of 32 on four graphs, Atari's of 51 atoms."""
    rng, rows = np.random.default_rng(1), []
    for suite, task, depth, breadth in (
        ("minigrid", "MiniGrid-Empty-8x8-v0", 5, 50),
        ("minigrid", "MiniGrid-Empty-8x8-v0", 5, 0),
        ("minatar", "freeway", 5, 20),
        ("minatar", "breakout", 5, 20),
        ("atari", "freeway", 10, 10),
    ):
        stream = play.stream(suite, task, np.random.default_rng(0))
        run = play.record_by_keys(*stream, transitions, task, {"": lambda obs, action: obs})[""]
        graph, times = run.graph, []
        leaf_q = rng.random((graph.num_ids, graph.num_actions), np.float32)
        selector_q, support = torch.rand(leaf_q.shape), torch.linspace(-10, 10, 51)
        leaf_pmf = torch.rand(*leaf_q.shape, 51).softmax(-1)
        for _ in range(50 + batches):
            batch = rng.integers(len(run.replay["node"]), size=BATCH)
            roots = run.replay["node"][batch], run.replay["action"][batch]
            expand, sub = seconds(graph.expand, *roots, depth, breadth, rng)
            # To read the leaves is the network's part, and not timed.
            if suite == "atari":
                arguments = leaf_pmf[sub.nodes], support, 0.99, "double", selector_q[sub.nodes]
                backup, _ = seconds(categorical_targets, sub, *arguments)
            else:
                backup, _ = seconds(q_targets, sub, leaf_q[sub.nodes], 0.99)
            times.append((expand, backup, len(sub.outcome_pair)))
        expand, backup, sizes = np.array(times[50:]).T
        low, median, high = 1e3 * np.percentile(expand + backup, [25, 50, 75])
        about = [f"{suite} {task}", f"{graph.num_nodes:,}", str(depth), str(breadth or "all")]
        spread, share = f"({low:.3f} to {high:.3f})", expand.sum() / (expand + backup).sum()
        rows.append([*about, f"{sizes.mean():.0f}", f"**{median:.3f}** {spread}", f"{share:.0%}"])
    names = ("graph", "states", "depth", "breadth", "transitions", "ms", "of it expand")
    print(markdown(names, rows))


def large_graph(num_states, rng):
    """A square of rooms without doors, all but one pair tried; every tenth step slips."""
    side = int(num_states**0.5)
    graph = TransitionGraph(4, (1,), np.int64, capacity=side**2)
    states = graph.nodes(np.arange(side**2)[:, None])
    x, y = np.divmod(states, side)
    for a, (dx, dy) in enumerate([(1, 0), (-1, 0), (0, 1), (0, -1)]):
        to = np.clip(x + dx, 0, side - 1) * side + np.clip(y + dy, 0, side - 1)
        slips = states[rng.random(side**2) < 0.1]
        for source, target in ((states[a == 0 :], to[a == 0 :]), (slips, slips)):
            zeros = np.zeros(len(source))
            graph.add(source, zeros.astype(np.int64) + a, zeros, target, zeros > 0)
    return graph


def plan_slices(num_states, slices, budget):
    """Seconds of the first plan and of each step's: an array; graph and planner."""
    rng = np.random.default_rng(0)
    graph = large_graph(num_states, rng)
    planner = FrontierPlanner(graph)
    node, times = 0, []
    for edges in [None, *[budget] * slices]:
        times.append(seconds(planner.plan, edges, clock=time.thread_time)[0])
        action = planner.act(node, rng)
        action = int(rng.integers(4)) if action is None else action
        known = graph.expand(np.array([node]), np.array([action]), 1).nodes
        next_node = int(known[0] if len(known) else rng.integers(graph.num_nodes))
        graph.add(node, action, 0.0, next_node, False)
        node = next_node
    return np.array(times), graph, planner


def frontier(states: int = 1_000_000, slices: int = 5_000, budget: int = 2_000):
    """A slice of the frontier planner on a graph of which every change sets off as much planning as
    the budget allows. Processor time of the thread, so that whatever else the machine does hardly
    counts. What the planner costs a script is another question: `tools/speed.py --variants default
    exploration=frontier`.

    Args:
        states: of the graph
        slices: steps on it
        budget: edges that the planner reads per step at most
    """
    (first, *times), graph, planner = plan_slices(states, slices, budget)
    median, high, most = 1e6 * np.percentile(times, [50, 99, 100])
    found = {"states": f"{graph.num_nodes:,}", "edges": f"{graph.num_edges:,}"}
    found |= {"first plan, s": f"{first:.1f}", "slice, median us": f"{median:.0f}"}
    found |= {"99%": f"{high:.0f}", "longest": f"{most:.0f}"}
    found |= {"states waiting": f"{planner.num_waiting:,}"}
    print(markdown(list(found), [list(found.values())]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one core\n")
    tyro.extras.subcommand_cli_from_dict({"targets": targets, "frontier": frontier})
