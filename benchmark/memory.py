"""Memory of a replay that forgets.

    python benchmark/memory.py

The environment is synthetic and never repeats itself for long: a random walk over a line without
end, with random numbers of 16 bits in view. Replay, graph and leaf values are those of the scripts;
the network is a stand-in that reads its observation, so that a leaf value of another state shows.
Exit status 1 if anything is stale.
"""

import multiprocessing
import re
import sys
import time
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from output import fail

from gbcore import LeafTable, Replay, TransitionGraph, q_targets

NUM_ACTIONS = 6


def megabytes():
    """What this process has now."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 / 1e6


def walk(rng, frame_stack):
    """Observations that drift, rewards and ends: a state is seen a few times, then never again."""
    frames, place = [np.zeros((8, 8), np.uint8)] * 4, 0
    while True:
        place += int(rng.integers(-2, 5))
        noise = int(rng.integers(4))
        number = 4 * place + noise
        numbers = np.array([number, number * 7919 % 65_537, 0, 0, 0, 0, 0, 0])
        frames = [*frames[1:], numbers.view(np.uint8).reshape(8, 8)]
        obs = np.stack(frames) if frame_stack else frames[-1].reshape(64)
        yield obs, float(noise == 0), bool(rng.random() < 0.01)


def values(obs):
    """A stand-in for a network: float32 [n, NUM_ACTIONS], from the newest frame."""
    numbers = np.ascontiguousarray(obs.reshape(len(obs), -1)[:, -64:]).view(np.int64)[:, 1]
    return (numbers[:, None] + np.arange(NUM_ACTIONS)).astype(np.float32)


def faults(graph, leaves):
    """Leaf values that are not those of their states; broken invariants of the graph.

    Counted in a fork of this process, so that its memory does not count here.
    """
    context = multiprocessing.get_context("fork")
    found = context.Array("q", [-1, -1])

    def count():
        known = np.flatnonzero(leaves.known)
        stale = (leaves.values(known) != values(graph.observations_of(known))).any(axis=1).sum()
        found[:] = int(stale), len(graph.check_valid())

    child = context.Process(target=count)
    child.start()
    child.join()
    return list(found)


def forgetting(
    steps: int = 5_000_000,
    capacity: int = 100_000,
    report_frequency: int = 1_000_000,
    frame_stack: bool = False,
):
    """Memory and time per step over millions of transitions.

    Args:
        steps: transitions
        capacity: of the replay
        report_frequency: transitions between two rows
        frame_stack: observations are stacks of 4 frames, each stored once, as in Atari
    """
    if not 1 <= report_frequency <= steps or capacity < 1:
        fail("require 1 <= --report-frequency <= --steps and --capacity >= 1")
    rng = np.random.default_rng(0)
    walked = walk(rng, frame_stack)
    obs, _, _ = next(walked)
    graph = TransitionGraph(
        NUM_ACTIONS, obs.shape, frame_stack=frame_stack, capacity=2 * capacity + 2
    )
    replay, leaves = Replay(graph, capacity), LeafTable(graph, values)
    node, at_start = graph.node(obs), megabytes()
    rows, begin = [], time.process_time()
    for step in range(1, steps + 1):
        obs, reward, terminated = next(walked)
        next_node = graph.node(obs)
        replay.add(node, int(rng.integers(NUM_ACTIONS)), reward, next_node, terminated)
        if terminated:
            replay.end_episode()
        node = next_node
        if step % 8 == 0 and replay.size >= 32:
            batch = replay.sample(32, rng)
            subgraphs = graph.expand(batch.nodes, batch.actions, 5, 20, rng)
            q_targets(subgraphs, leaves.values(subgraphs.nodes), 0.99)
        if step % report_frequency == 0:
            memory, seconds = megabytes(), time.process_time() - begin
            stale, problems = faults(graph, leaves)
            row = {"transitions": step, "above_start_mb": round(memory - at_start, 1)}
            row |= {"us_per_step": round(1e6 * seconds / report_frequency, 2)}
            row |= {"nodes": graph.num_nodes, "edges": graph.num_edges, "ids": graph.num_ids}
            row |= {"ids_given_out": graph.num_ids + int(graph.generations.sum())}
            rows.append(row | {"stale_leaf_values": stale, "problems": problems})
            print(", ".join(f"{name} {value:,}" for name, value in rows[-1].items()), flush=True)
            begin = time.process_time()
        if step % 32_000 == 0:
            leaves.forget_all()  # a new target network
    sys.exit(any(row["problems"] or row["stale_leaf_values"] for row in rows))


if __name__ == "__main__":
    tyro.cli(forgetting, description=__doc__)
