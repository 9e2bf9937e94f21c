"""Time expansion and targets of a batch of 32 against plain Python, on one core.

    python benchmark/targets.py

Prints two tables: `expand` + targets on four graphs, beside the oracle of the tests (dictionaries
and recursion) on the same graphs and a few batches of the same kind; and the cost of `add` and
`expand` as the number of states grows a hundredfold.
"""

import platform
import sys
import time
from pathlib import Path

import gymnasium
import minatar
import minigrid  # noqa: F401  (registers its environments)
import numpy as np
import torch
from minigrid.wrappers import FullyObsWrapper

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import naive  # noqa: E402

from gbcore import TransitionGraph, categorical_targets, q_targets  # noqa: E402

BATCH = 32
NUM_STEPS = 20_000


def minigrid_transitions():
    """NUM_STEPS random transitions of Empty-8x8, fully observed: (obs, a, r, obs', done)."""
    rng = np.random.default_rng(0)
    env = FullyObsWrapper(gymnasium.make("MiniGrid-Empty-8x8-v0"))
    obs = env.reset(seed=1)[0]["image"]
    for _ in range(NUM_STEPS):
        action = int(rng.integers(7))
        next_obs, reward, terminated, truncated, _ = env.step(action)
        yield obs, action, float(reward > 0), next_obs["image"], terminated
        obs = next_obs["image"]
        if terminated or truncated:
            obs = env.reset(seed=1)[0]["image"]


def minatar_transitions(game):
    """NUM_STEPS random transitions of a MinAtar game."""
    rng = np.random.default_rng(0)
    env = minatar.Environment(game, sticky_action_prob=0.1)
    env.seed(1)
    env.reset()
    obs = env.state()
    for _ in range(NUM_STEPS):
        action = int(rng.integers(6))
        reward, done = env.act(action)
        yield obs, action, float(reward), env.state(), done
        obs = env.state()
        if done:
            env.reset()
            obs = env.state()


def chain_transitions(num_states, num_actions, reuse=0.07):
    """Atari-like: mostly chains; a share of the next states was seen before."""
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
        yield np.array([state]), action, reward, np.array([next_state]), done
        state = next_state


def build(transitions, num_actions):
    """The same transitions in a TransitionGraph and in the oracle's dictionaries, and its pairs."""
    graph = oracle = None
    pairs = []
    for obs, action, reward, next_obs, done in transitions:
        if graph is None:
            graph = TransitionGraph(num_actions, obs.shape, obs.dtype)
            oracle = naive.NaiveGraph(num_actions, obs.shape, obs.dtype)
        for store in (graph, oracle):
            node, next_node = store.node(obs), store.node(next_obs)
            store.add(node, action, reward, next_node, done)
        pairs.append((graph.node(obs), action))
    return graph, oracle, np.array(pairs)


def milliseconds(call, repetitions):
    """Median time of one call, after a warm-up."""
    call()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return np.median(times)


def compare(name, graph, oracle, pairs, depth, breadth, n_atoms=None):
    """One row: gbcore and the oracle on the same batches."""
    rng = np.random.default_rng(1)
    size = (graph.num_ids, graph.num_actions)
    leaf_q = rng.random(size, np.float32)
    selector_q = rng.random(size)
    if n_atoms:
        support = torch.linspace(-10, 10, n_atoms)
        leaf_pmf = torch.rand(*size, n_atoms).softmax(-1)
        online = torch.from_numpy(selector_q)

    def batch():
        rows = pairs[rng.integers(len(pairs), size=BATCH)]
        return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])

    spent = np.zeros(2)
    expanded = []

    def ours():
        nodes, actions = batch()
        start = time.perf_counter()
        sub = graph.expand(nodes, actions, depth, breadth, rng)
        middle = time.perf_counter()
        if n_atoms:
            leaves = leaf_pmf[sub.nodes], online[sub.nodes]  # the network's part: not timed
            restart = time.perf_counter()
            categorical_targets(sub, leaves[0], support, 0.99, "double", leaves[1])
        else:
            leaves = leaf_q[sub.nodes]
            restart = time.perf_counter()
            q_targets(sub, leaves, 0.99)
        times.append(1e3 * (middle - start + time.perf_counter() - restart))
        spent[:] += middle - start, time.perf_counter() - restart
        expanded.append(len(sub.outcome_pair))

    times = []
    for _ in range(50):
        ours()
    times.clear()
    spent[:] = 0
    for _ in range(1000):
        ours()
    median, low, high = np.percentile(times, [50, 25, 75])

    if n_atoms:
        values = naive.Categoricals(leaf_pmf.double().numpy(), support.double().numpy(), 0.99)
        judge = naive.Oracle(oracle, values, "double", selector_q)
    else:
        judge = naive.Oracle(oracle, naive.Scalars(leaf_q.astype(np.float64), 0.99), "greedy")

    def kept_of_batch():
        pairs_of_batch = [(int(node), int(action)) for node, action in zip(*batch(), strict=True)]
        if breadth == 0:
            return [(*pair, full_levels(oracle, *pair, depth)) for pair in pairs_of_batch]
        return [
            (*pair, naive.draw_kept(oracle, *pair, depth, breadth, rng)) for pair in pairs_of_batch
        ]

    def targets_of_batch():
        for root in kept_of_batch():
            judge.limited_target(*root)

    python_expand = milliseconds(kept_of_batch, 5)
    python_both = milliseconds(targets_of_batch, 3)
    share = spent[0] / spent.sum()
    label = "all" if breadth == 0 else breadth
    print(
        f"| {name} | {graph.num_nodes:,} | {depth} | {label} | {np.mean(expanded):.0f} "
        f"| **{median:.3f}** ({low:.3f} to {high:.3f}) | {share:.0%} | {python_expand:.0f} "
        f"| {python_both:.0f} |",
        flush=True,
    )


def full_levels(oracle, state, action, depth):
    """All transitions of each level, as `naive.draw_kept` returns a sample of them."""
    kept = [set(oracle.transitions(state, action))]
    for _ in range(depth - 1):
        kept.append(set(naive.next_level(oracle, kept[-1])))
    return kept


def growth():
    """Cost of add and expand on chains with 10^4 to 10^6 distinct states.

    The work of `expand` does not depend on the size of the graph, but its arrays outgrow the
    processor's caches. Roots from a window of 10^4 neighbouring states tell the two apart.
    """
    graph = TransitionGraph(18, (1,), np.int64)
    rng = np.random.default_rng(0)
    pairs = []
    checkpoints = [10_000, 100_000, 1_000_000]
    add_times = []

    def expand_time(table):
        times = []
        for _ in range(1000):
            rows = table[rng.integers(len(table), size=BATCH)]
            nodes, actions = np.ascontiguousarray(rows.T)
            start = time.perf_counter()
            graph.expand(nodes, actions, 10, 10, rng)
            times.append(time.perf_counter() - start)
        return 1e6 * np.median(times[500:])

    for obs, action, reward, next_obs, done in chain_transitions(checkpoints[-1] + 10, 18, 0.0):
        node, next_node = graph.node(obs), graph.node(next_obs)
        start = time.perf_counter()
        graph.add(node, action, reward, next_node, done)
        add_times.append(time.perf_counter() - start)
        pairs.append((node, action))
        if graph.num_nodes == checkpoints[0]:
            checkpoints.pop(0)
            table = np.array(pairs)
            print(
                f"| {graph.num_nodes:,} | {1e6 * np.median(add_times[-5000:]):.2f} "
                f"| {1e6 * np.mean(add_times):.2f} | {expand_time(table):.0f} "
                f"| {expand_time(table[-10_000:]):.0f} |",
                flush=True,
            )
            if not checkpoints:
                return


def main():
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one core; batch {BATCH}")
    print()
    print(
        "| graph | states | depth | breadth | transitions | ms | of it expand "
        "| Python, expand alone, ms | Python, both, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    grid = build(minigrid_transitions(), 7)
    compare("MiniGrid Empty-8x8", *grid, depth=5, breadth=50)
    compare("MiniGrid Empty-8x8", *grid, depth=5, breadth=0)
    compare("MinAtar freeway", *build(minatar_transitions("freeway"), 6), depth=5, breadth=20)
    compare("MinAtar breakout", *build(minatar_transitions("breakout"), 6), depth=5, breadth=20)
    chains = build(chain_transitions(20_000, 18), 18)
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
