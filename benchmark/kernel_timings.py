"""Time expansion and targets of a batch of 32 against plain Python, on one core.

    python benchmark/kernel_timings.py

Prints two tables: `expand` + targets on four graphs, beside the oracle of the tests (dictionaries
and recursion) on the same graphs and a few batches of the same kind; and the cost of `add` and
`expand` as the number of states grows a hundredfold.
"""

import itertools
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

import naive  # noqa: E402
import play  # noqa: E402

from gbcore import TransitionGraph, categorical_targets, q_targets  # noqa: E402

BATCH = 32
NUM_STEPS = 20_000
SIZES = (10_000, 100_000, 1_000_000)  # states of the second table


def chain(num_states, num_actions, reuse=0.07):
    """Atari-like rows as those of play.stream: mostly chains, a share of the states seen before."""
    rng = np.random.default_rng(0)
    state, newest = 0, 0
    while newest < num_states - 1:
        if rng.random() < reuse:
            next_state = int(rng.integers(newest + 1))
        else:
            newest += 1
            next_state = newest
        reward = float(rng.choice([-1, 0, 1], p=[0.02, 0.93, 0.05]))
        action, done = int(rng.integers(num_actions)), bool(rng.random() < 0.002)
        yield np.array([state]), action, reward, np.array([next_state]), done, False
        state = next_state


def build(num_actions, rows):
    """The same transitions in a TransitionGraph and in the oracle's dictionaries, and its pairs."""
    graph = oracle = None
    pairs = []
    for obs, action, reward, next_obs, done, _ in itertools.islice(rows, NUM_STEPS):
        if graph is None:
            graph = TransitionGraph(num_actions, obs.shape, obs.dtype)
            oracle = naive.NaiveGraph(num_actions, obs.shape, obs.dtype)
        for store in (graph, oracle):
            store.add(store.node(obs), action, reward, store.node(next_obs), done)
        pairs.append((graph.node(obs), action))
    return graph, oracle, np.array(pairs)


def milliseconds(call, repetitions, skipped=1):
    """Times of a call, which may return those of its parts: array [repetitions] or [.., parts]."""
    times = []
    for _ in range(skipped + repetitions):
        start = time.perf_counter()
        parts = call()
        times.append(parts or time.perf_counter() - start)
    return 1e3 * np.array(times[skipped:])


def compare(name, graph, oracle, pairs, depth, breadth, n_atoms=None):
    """One row: gbcore and the oracle on the same batches."""
    rng = np.random.default_rng(1)
    size = (graph.num_ids, graph.num_actions)
    leaf_q, selector_q = rng.random(size, np.float32), rng.random(size)
    values, rule = naive.Scalars(leaf_q.astype(np.float64), 0.99), ("greedy",)
    if n_atoms:
        support = torch.linspace(-10, 10, n_atoms)
        leaf_pmf, online = torch.rand(*size, n_atoms).softmax(-1), torch.from_numpy(selector_q)
        values = naive.Categoricals(leaf_pmf.double().numpy(), support.double().numpy(), 0.99)
        rule = ("double", selector_q)
    judge, sizes = naive.Oracle(oracle, values, *rule), []

    def batch():
        rows = pairs[rng.integers(len(pairs), size=BATCH)]
        return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])

    def ours():
        nodes, actions = batch()
        start = time.perf_counter()
        sub = graph.expand(nodes, actions, depth, breadth, rng)
        middle = time.perf_counter()
        if n_atoms:  # reading leaves is the network's part: not timed
            leaves = leaf_pmf[sub.nodes], online[sub.nodes]
            restart = time.perf_counter()
            categorical_targets(sub, leaves[0], support, 0.99, "double", leaves[1])
        else:
            leaves = leaf_q[sub.nodes]
            restart = time.perf_counter()
            q_targets(sub, leaves, 0.99)
        sizes.append(len(sub.outcome_pair))
        return middle - start, time.perf_counter() - restart

    def kept_of_batch():
        for node, action in zip(*(column.tolist() for column in batch()), strict=True):
            kept = naive.draw_kept(oracle, node, action, depth, breadth, rng)
            kept_roots.append((node, action, kept))

    def targets_of_batch():
        kept_roots.clear()
        kept_of_batch()
        for root in kept_roots:
            judge.limited_target(*root)

    kept_roots = []
    times = milliseconds(ours, 1000, skipped=50)
    median, low, high = np.percentile(times.sum(axis=1), [50, 25, 75])
    print(
        f"| {name} | {graph.num_nodes:,} | {depth} | {breadth or 'all'} | {np.mean(sizes):.0f} "
        f"| **{median:.3f}** ({low:.3f} to {high:.3f}) | {times[:, 0].sum() / times.sum():.0%} "
        f"| {np.median(milliseconds(kept_of_batch, 5)):.0f} "
        f"| {np.median(milliseconds(targets_of_batch, 3)):.0f} |",
        flush=True,
    )


def growth():
    """Cost of add and expand on chains with 10^4 to 10^6 distinct states.

    The work of `expand` does not depend on the size of the graph, but its arrays outgrow the
    processor's caches. Roots from a window of 10^4 neighbouring states tell the two apart.
    """
    graph = TransitionGraph(18, (1,), np.int64)
    rng = np.random.default_rng(0)
    pairs, add_times = [], []

    def expand_time(table):
        def call():
            nodes, actions = np.ascontiguousarray(table[rng.integers(len(table), size=BATCH)].T)
            graph.expand(nodes, actions, 10, 10, rng)

        return 1e3 * np.median(milliseconds(call, 500, skipped=500))

    for obs, action, reward, next_obs, done, _ in chain(SIZES[-1] + 10, 18, 0.0):
        node, next_node = graph.node(obs), graph.node(next_obs)
        start = time.perf_counter()
        graph.add(node, action, reward, next_node, done)
        add_times.append(time.perf_counter() - start)
        pairs.append((node, action))
        if graph.num_nodes in SIZES and len(pairs) + 1 == graph.num_nodes:
            table = np.array(pairs)
            print(
                f"| {graph.num_nodes:,} | {1e6 * np.median(add_times[-5000:]):.2f} "
                f"| {1e6 * np.mean(add_times):.2f} | {expand_time(table):.0f} "
                f"| {expand_time(table[-10_000:]):.0f} |",
                flush=True,
            )


def main():
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one core; batch {BATCH}")
    print()
    print(
        "| graph | states | depth | breadth | transitions | ms | of it expand "
        "| Python, expand alone, ms | Python, both, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    grid = build(*play.stream("minigrid", "MiniGrid-Empty-8x8-v0", rng))
    compare("MiniGrid Empty-8x8", *grid, depth=5, breadth=50)
    compare("MiniGrid Empty-8x8", *grid, depth=5, breadth=0)
    for game in ("freeway", "breakout"):
        compare(f"MinAtar {game}", *build(*play.stream("minatar", game, rng)), depth=5, breadth=20)
    chains = build(18, chain(20_000, 18))
    compare("Atari-like, 51 atoms", *chains, depth=10, breadth=10, n_atoms=51)
    print()
    print(
        "| distinct states | add, median us | add, mean us (growth included) | expand, median us "
        "| roots from 10,000 neighbours |"
    )
    print("|---|---|---|---|---|")
    growth()


if __name__ == "__main__":
    main()
