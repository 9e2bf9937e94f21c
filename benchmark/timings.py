"""Time the compiled part on one core, and count its bytes: tables.

python benchmark/timings.py targets              # a batch of 32 on five graphs
python benchmark/timings.py curve                # everything from 10,000 to 10 million states
python benchmark/timings.py curve --most 100000
"""

import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from gbtools import play
from gbtools.runs import markdown

from gbcore import (
    FrontierPlanner,
    GraphValues,
    LeafTable,
    TransitionGraph,
    categorical_targets,
    q_targets,
)

BATCH = 32


def seconds(function, *arguments):
    """The seconds of a call, and its result."""
    begin = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - begin, result


def targets(transitions: int = 20_000, batches: int = 1_000):
    """A row per graph, Atari's of 51 atoms."""
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


# --------------------------------------------------------------------------------------------------
# The curve: a world of states like MinAtar's, of which each is left by two transitions on average
# --------------------------------------------------------------------------------------------------

SHAPE, ACTIONS, PART = (10, 10, 4), 6, 100_000  # of an observation, and states made at a time


def resident():
    """Bytes of memory that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def transitions_of(states, number, rng):
    """Columns of `TransitionGraph.add`: most go on to the next state, the others to one nearby."""
    source = rng.integers(states - 1, size=number)
    near = np.clip(source + rng.integers(-50, 50, size=number), 0, states - 1)
    after = np.where(rng.random(number) < 0.6, source + 1, near)
    rewards = (rng.random(number) < 0.02) * 1.0
    return source, rng.integers(ACTIONS, size=number), rewards, after, rng.random(number) < 0.01


def percentiles(times):
    """Median, 99% and most, in us."""
    return " / ".join(f"{1e6 * t:.0f}" for t in np.percentile(times, [50, 99, 100]))


def seconds_of(function, *arguments):
    """Processor's seconds of a call, and its result."""
    begin = time.process_time()
    found = function(*arguments)
    return time.process_time() - begin, found


def measure(states, rng):
    """A row of the curve."""
    before, weights = resident(), rng.random((np.prod(SHAPE), ACTIONS), np.float32)
    graph, interning = TransitionGraph(ACTIONS, SHAPE, np.bool_), 0.0
    for first in range(0, states, PART):
        packed = rng.integers(256, size=(min(PART, states - first), 50), dtype=np.uint8)
        packed[:, :4] = np.arange(first, first + len(packed), dtype=np.uint32)[:, None].view(
            np.uint8
        )
        obs = np.unpackbits(packed, axis=1).view(np.bool_).reshape(-1, *SHAPE)
        interning += seconds_of(graph.nodes, obs)[0]
    del packed, obs
    with_states, adding = resident(), 0.0
    for first in range(0, 2 * states, PART):
        columns = transitions_of(states, min(PART, 2 * states - first), rng)
        adding += seconds_of(graph.add, *columns)[0]
    del columns
    with_all = resident()
    leaf_q = rng.random((min(graph.num_ids, 1_000_000), ACTIONS), np.float32)
    targets, times = [], {"add": [], "update": [], "planned": []}
    for _ in range(300):
        nodes, actions, *_ = transitions_of(states, BATCH, rng)
        begin = time.process_time()
        sub = graph.expand(nodes, actions, 5, 20, rng)
        targets.append(time.process_time() - begin)
        q_targets(sub, leaf_q[sub.nodes % len(leaf_q)], 0.99)
    leaves = LeafTable(graph, lambda obs: obs.reshape(len(obs), -1) @ weights)
    solving, values = seconds_of(GraphValues, graph, leaves, 0.99, 0.3)
    planning, planner = seconds_of(FrontierPlanner, graph)
    planning += seconds_of(planner.plan)[0]
    for step in range(1_000):
        row = [column.item() for column in transitions_of(states, 1, rng)]
        times["add"].append(seconds_of(graph.add, *row)[0])
        if step % 4 == 0:
            times["update"].append(seconds_of(values.update)[0])
        begin = time.process_time()
        planner.plan(2_000)
        planner.act(row[0], rng)
        times["planned"].append(time.process_time() - begin)
    first_policy = seconds_of(values.seen_policy, None)[0]
    graph.add(*transitions_of(states, states // 100, rng))
    values.update()
    policy = seconds_of(values.seen_policy, None)[0]
    renewing = seconds_of(values.renew)[0]
    return [
        f"{states:,}",
        f"{(with_states - before) / states:.0f} + {(with_all - with_states) / graph.num_edges:.0f}",
        f"{1e6 * interning / states:.2f}",
        f"{1e6 * adding / (2 * states):.2f} / {1e6 * np.median(times['add']):.1f}",
        percentiles(targets),
        percentiles(times["update"]),
        f"{solving:.2f} / {renewing:.2f}",
        f"{first_policy:.2f} / {policy:.2f}",
        percentiles(times["planned"][100:]),
        f"{planning:.2f}",
        f"{resident() / 2**30:.2f}",
    ]


def curve(least: int = 10_000, most: int = 10_000_000):
    """A row for each power of ten of states. Triples are the median, 99% and most in us."""
    names = (
        "states", "bytes a state + a transition", "us to intern one of many",
        "us to add one of many / alone", "expand 5, 20", "update of values",
        "s to solve values / renew", "s of an evaluation's policy / after 1% changed",
        "planned step", "s of the first plan", "GiB in all",
    )  # fmt: skip
    print(markdown(names, []))
    measure(1_000, np.random.default_rng(0))  # compiles
    states = least
    while states <= most:
        print(
            markdown(names, [measure(states, np.random.default_rng(0))]).splitlines()[2], flush=True
        )
        states *= 10


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one core\n")
    tyro.extras.subcommand_cli_from_dict({"targets": targets, "curve": curve}, description=__doc__)
