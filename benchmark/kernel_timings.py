"""Time expansion and targets of a batch of 32 against plain Python, on one core.

    python benchmark/kernel_timings.py

Prints two tables: `expand` + targets on four graphs, beside the oracle of the tests (dictionaries
and recursion) on the same graphs and a few batches of the same kind; and the cost of `add` and
`expand` as the number of states grows a hundredfold. The work of `expand` does not depend on it,
but its arrays outgrow the processor's caches: roots from 10^4 neighbours tell the two apart.
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
SIZES = (10_000, 100_000, 1_000_000)  # states of the second table


def chain(num_states, reuse):
    """Atari-like rows as those of play.stream: mostly chains, a share of the states seen before."""
    rng, state, newest = np.random.default_rng(0), 0, 0
    while newest < num_states - 1:
        seen = rng.random() < reuse
        newest += not seen
        next_state = int(rng.integers(newest + 1)) if seen else newest
        reward = float(rng.choice([-1, 0, 1], p=[0.02, 0.93, 0.05]))
        action, done = int(rng.integers(18)), bool(rng.random() < 0.002)
        yield np.array([state]), action, reward, np.array([next_state]), done, False
        state = next_state


def milliseconds(call, repetitions, skipped=1):
    """Times of a call, or of its parts where it returns these: array [repetitions, ...]."""
    times = []
    for _ in range(skipped + repetitions):
        start = time.perf_counter()
        parts = call()
        times.append(parts or time.perf_counter() - start)
    return 1e3 * np.array(times[skipped:])


def compare(name, num_actions, rows, depth, breadth, n_atoms=0):
    """One row: gbcore and the oracle on the same batches of the same 20,000 transitions."""
    rows = list(itertools.islice(rows, 20_000))
    stores = [
        kind(num_actions, rows[0][0].shape, rows[0][0].dtype)
        for kind in (TransitionGraph, naive.NaiveGraph)
    ]
    for store, (obs, action, reward, next_obs, done, _) in itertools.product(stores, rows):
        store.add(store.node(obs), action, reward, store.node(next_obs), done)
    graph, oracle = stores
    pairs = np.array([(graph.find(row[0]), row[1]) for row in rows])
    rng, sizes = np.random.default_rng(1), []
    leaf_q, selector_q = rng.random((2, graph.num_ids, num_actions), np.float32)
    values, rule = naive.Scalars(leaf_q.astype(np.float64), 0.99), ("greedy",)
    if n_atoms:
        support, online = torch.linspace(-10, 10, n_atoms), torch.from_numpy(selector_q)
        leaf_pmf = torch.rand(*leaf_q.shape, n_atoms).softmax(-1)
        values = naive.Categoricals(leaf_pmf.double().numpy(), support.double().numpy(), 0.99)
        rule = ("double", selector_q)
    judge = naive.Oracle(oracle, values, *rule)

    def batch():
        return pairs[rng.integers(len(pairs), size=BATCH)]

    def ours():
        nodes, actions = np.ascontiguousarray(batch().T)
        start = time.perf_counter()
        sub = graph.expand(nodes, actions, depth, breadth, rng)
        expand = time.perf_counter() - start
        # To read the leaves is the network's part, and not timed.
        leaves = (leaf_pmf[sub.nodes], online[sub.nodes]) if n_atoms else leaf_q[sub.nodes]
        start = time.perf_counter()
        if n_atoms:
            categorical_targets(sub, leaves[0], support, 0.99, "double", leaves[1])
        else:
            q_targets(sub, leaves, 0.99)
        sizes.append(len(sub.outcome_pair))
        return expand, time.perf_counter() - start

    def python_expand():
        for s, a in batch().tolist():
            naive.draw_kept(oracle, s, a, depth, breadth, rng)

    def python_both():
        for s, a in batch().tolist():
            kept = naive.draw_kept(oracle, s, a, depth, breadth, rng)
            judge.limited_target(s, a, kept)

    times = milliseconds(ours, 1000, skipped=50)
    median, low, high = np.percentile(times.sum(axis=1), [50, 25, 75])
    plain = [np.median(milliseconds(call, 3)) for call in (python_expand, python_both)]
    print(
        f"| {name} | {graph.num_nodes:,} | {depth} | {breadth or 'all'} | {np.mean(sizes):.0f} "
        f"| **{median:.3f}** ({low:.3f} to {high:.3f}) | {times[:, 0].sum() / times.sum():.0%} "
        f"| {plain[0]:.0f} | {plain[1]:.0f} |",
        flush=True,
    )


def growth():
    """Cost of add and expand on chains with 10^4 to 10^6 distinct states."""
    graph, rng = TransitionGraph(18, (1,), np.int64), np.random.default_rng(0)
    pairs, add_times = [], []

    def expand_time(table):
        def call():
            nodes, actions = np.ascontiguousarray(table[rng.integers(len(table), size=BATCH)].T)
            graph.expand(nodes, actions, 10, 10, rng)

        return 1e3 * np.median(milliseconds(call, 500, skipped=500))

    for obs, action, reward, next_obs, done, _ in chain(SIZES[-1] + 10, 0.0):
        node, next_node = graph.node(obs), graph.node(next_obs)
        start = time.perf_counter()
        graph.add(node, action, reward, next_node, done)
        add_times.append(time.perf_counter() - start)
        pairs.append((node, action))
        if graph.num_nodes in SIZES:
            table = np.array(pairs)
            print(
                f"| {graph.num_nodes:,} | {1e6 * np.median(add_times[-5000:]):.2f} "
                f"| {expand_time(table):.0f} | {expand_time(table[-10_000:]):.0f} |",
                flush=True,
            )


def main():
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one core; batch {BATCH}")
    print(
        "\n| graph | states | depth | breadth | transitions | ms | of it expand | Python, expand "
        "alone, ms | Python, both, ms |\n|---|---|---|---|---|---|---|---|---|"
    )
    for breadth in (50, 0):
        rows = play.stream("minigrid", "MiniGrid-Empty-8x8-v0", np.random.default_rng(0))
        compare("MiniGrid Empty-8x8", *rows, depth=5, breadth=breadth)
    for game in ("freeway", "breakout"):
        rows = play.stream("minatar", game, np.random.default_rng(0))
        compare(f"MinAtar {game}", *rows, depth=5, breadth=20)
    compare("Atari-like, 51 atoms", 18, chain(20_000, 0.07), depth=10, breadth=10, n_atoms=51)
    print(
        "\n| distinct states | add, median us | expand, median us | roots from 10,000 neighbours |"
        "\n|---|---|---|---|"
    )
    growth()


if __name__ == "__main__":
    main()
