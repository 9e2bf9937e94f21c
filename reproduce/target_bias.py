"""How far the targets of finished runs lie from the returns that followed, by backup and depth.

    python reproduce/target_bias.py runs/*minatar__graph__1__* --csv bias.csv

For pairs of the last fifth of each run's replay, of episodes that ended, it compares the target of
each backup with the discounted return really obtained from that pair on. Depth 0 is the whole
graph (`GraphValues`, 30 sweeps). The leaves are those of the run's target network. Prints the
differences, which --csv keeps by count c(s, a) as well. The return is that of the policy of that
time, epsilon included, so that a difference says little by itself: what says something is one
backup or depth beside another.
"""

import itertools
from pathlib import Path

import folders  # noqa: F401  (the tools)
import numpy as np
import recorded
import tyro
from output import fail, markdown, write_rows

from gbcore import GraphValues, LeafTable, q_targets, trajectory_subgraphs

SAMPLE = 2_048
BACKUPS = {  # name -> (along a trajectory, rule, prior)
    "n-step": (True, "behaviour", 0),
    "tree": (True, "greedy", 0),
    "graph": (False, "greedy", 0),
    "graph, prior 0.3": (False, "greedy", 0.3),
    "graph, prior 1": (False, "greedy", 1),
    "graph, prior 3": (False, "greedy", 3),
    "graph, prior 10": (False, "greedy", 10),
}
DEPTHS = (1, 2, 3, 5, 0)
COUNTS = (1, 2, 10)  # lower ends of the classes of c(s, a)
COLUMNS = ("task", "agent", "seed", "target", "depth", "count", "pairs", "return", "bias", "rms")


def returns_of(replay, gamma):
    """Discounted return that followed each row of a replay in time order; NaN without an end."""
    returns, following = np.full(len(replay["reward"]), np.nan), np.nan
    for t in range(len(returns) - 1, -1, -1):
        if replay["terminated"][t] or replay["cut"][t]:
            following = 0.0 if replay["terminated"][t] else np.nan
        following = returns[t] = replay["reward"][t] + gamma * following
    return returns


def bias_of(run, gamma):
    """Rows for --csv, without what the run is called."""
    graph, replay = run.graph, run.replay
    returns = returns_of(replay, gamma)
    rows = np.flatnonzero(~np.isnan(returns))
    rows = rows[rows >= len(returns) * 4 // 5]
    if not len(rows):
        return []
    rows = np.random.default_rng(0).choice(rows, SAMPLE)
    columns = [replay[name] for name in recorded.COLUMNS]
    nodes, actions, returns = columns[0][rows], columns[1][rows], returns[rows]
    level = np.searchsorted(COUNTS, graph.expand(nodes, actions, 1).pair_count, side="right") - 1
    classes = {"all": level >= 0} | {f"from {c}": level == i for i, c in enumerate(COUNTS)}
    targets, leaves = {}, LeafTable(graph, run.network("target"))
    for depth in filter(None, DEPTHS):
        chains = trajectory_subgraphs(rows, depth, *columns)
        subgraphs = {True: chains, False: graph.expand(nodes, actions, depth)}
        leaf_q = {of: leaves.values(sub.nodes) for of, sub in subgraphs.items()}
        for name, (of, rule, prior) in BACKUPS.items():
            targets[name, depth] = q_targets(subgraphs[of], leaf_q[of], gamma, rule, prior=prior)
    for name, (of_trajectory, _, prior) in BACKUPS.items():
        if not of_trajectory:
            whole = GraphValues(graph, leaves, gamma, prior)
            targets[name, 0] = whole.targets(nodes, actions)
    table = []
    for ((name, depth), target), (which, here) in itertools.product(
        targets.items(), classes.items()
    ):
        if here.any():
            gap = (target - returns)[here]
            bias, rms = gap.mean(), np.sqrt((gap**2).mean())
            values = (name, depth, which, here.sum(), returns[here].mean(), bias, rms)
            table.append(dict(zip(COLUMNS[3:], values, strict=True)))
    return table


def main(runs: tyro.conf.Positional[tuple[Path, ...]], csv: Path | None = None):
    """Print the differences of these runs' targets; --csv keeps all numbers."""
    kept, biases = [], []
    for path in runs:
        run = recorded.read(path)
        if run.replay is None or run.networks is None:
            fail(f"{path} has no checkpoint")
        agent = run.config["backup"] + ", whole" * (run.config["depth"] == 0)
        called = {"task": run.task, "agent": agent, "seed": run.config["seed"]}
        names = [str(value) for value in called.values()]
        table = bias_of(run, run.config["gamma"])
        kept += [called | row for row in table]
        for name in BACKUPS:
            rows = [row for row in table if (row["target"], row["count"]) == (name, "all")]
            if rows:
                gaps = {row["depth"]: f"{row['bias']:+.2f}" for row in rows}
                gaps = [gaps.get(depth, "-") for depth in DEPTHS]
                biases.append([*names, name, f"{rows[0]['return']:.2f}", *gaps])
    print(markdown([*COLUMNS[:4], "return", *(f"depth {depth}" for depth in DEPTHS)], biases))
    if csv:
        write_rows(csv, COLUMNS, kept)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
