"""n-step and graph as the authors released them: do these updates make the paper's scores?

    python reproduce/released_updates.py graph minatar freeway --seed 2
    python reproduce/released_updates.py n-step minigrid Empty-8x8 --depth 10  # as they ran it

What they released for MiniGrid and MinAtar (gridworld/core/backup.py and the replay that it reads)
differs from the paper, in `graph` as `back_up_in_place` says, and in `n-step`:

- The value that is moved towards the return is that of the *last* pair that it reads, which its
  loop leaves behind, and not that of the sampled one.
- In MiniGrid a return goes on across a time limit, with the first steps of the next episode.
- A return that ends at one bootstraps from the highest value of any state: the state after it is
  blank, has no index, and NumPy takes an index of None for the whole table.

`persistent` takes one thing alone of the released `graph`: nested values are written into the table
of target values, until the next target network. The script runs with the change in its learner, all
else under the report's protocol, and the run adds a row to --out. (A time limit of MinAtar is a
termination there.) Rows that say `paper` are of the paper's update, at another depth.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import numpy as np
import tyro
from folders import RESULTS
from gbtools.output import arguments, lasting_output, read_rows, write_rows
from gbtools.runs import run_folders, words_of
from numba import njit
from run_records import SUITES, measurements, script_of

from gbcore.run import Amount, Count
from gbcore.targets import pair_q_values

COLUMNS = "suite episode_seed task backup depth update seed score first_reward_step commit".split()


@dataclass
class Args:
    change: tyro.conf.Positional[Literal["n-step", "graph", "persistent"]]  # of the update
    suite: tyro.conf.Positional[Literal["minatar", "minigrid"]]
    """MinAtar's episodes are seeded alike, as in the authors' code"""
    task: tyro.conf.Positional[str]  # of the suite
    depth: Count = 5
    """steps of a return or levels; the paper has 5, the released command for MiniGrid 10"""
    seed: Amount = 1  # of the run
    out: Path = RESULTS / "released_updates.csv"  # CSV file with a row per run


def ends_of(replay, time_limit_is_terminal):
    """Where nothing follows, and where another episode does: two bool [N]. No row was forgotten."""
    time_limit = replay.cut & ~replay.terminated
    time_limit[replay.size - 1 :] = False
    if time_limit_is_terminal:
        return replay.terminated | time_limit, np.zeros_like(time_limit)
    return replay.terminated, time_limit


def released_returns(replay, terminal, rows, depth, gamma):
    """Discounted rewards float64 [B] from each row on, and the last row int64 [B] of each."""
    returns, last, goes_on = np.zeros(len(rows)), rows, np.ones(len(rows), np.bool_)
    for step in range(depth):
        last = np.where(goes_on, rows + step, last)
        returns += goes_on * gamma**step * replay.reward[last]
        goes_on &= ~terminal[last] & (last != replay.size - 1)
    return returns, last


def released_n_step(learner, batch, rng, time_limit_is_terminal):
    """The pairs whose values are moved, and where to, float32 [B]."""
    args, replay, values_of = learner.args, learner.replay, learner.leaves.values
    terminal, time_limit = ends_of(replay, time_limit_is_terminal)
    returns, last = released_returns(replay, terminal, batch.rows, args.depth, args.gamma)
    values = values_of(replay.next_node[last]).max(axis=1)
    if time_limit[last].any():
        highest = values_of(np.arange(learner.graph.num_ids)).max()
        values[time_limit[last]] = max(highest, 0.0)  # rows without a state are 0
    values[terminal[last]] = 0.0
    targets = (returns + args.gamma**args.depth * values).astype(np.float32)
    return replay.batch_of(last), targets


@njit(cache=True)
def back_up_in_place(graph, q, nodes, actions, depth, gamma, draws, targets):
    """Targets [B], one sample after another, written into the table q [N, A] on the way.

    From the sample's state on, each level follows all actions tried, or transitions drawn with
    replacement in proportion to counts, where there are more than draws [B, depth, breadth] has
    (uniform in [0, 1)). Of the pairs met, the deepest come first. A state in which nothing was
    tried counts as an end. Values stay in q until the next target network.
    """
    breadth = draws.shape[2]
    for i in range(len(nodes)):
        level, pairs = nodes[i : i + 1], [(nodes[i], actions[i])][:0]
        for d in range(depth):
            blocks = [(node, graph.block_start[node]) for node in level]
            edges = [(n, start + e) for n, start in blocks for e in range(graph.degree[n])]
            if len(edges) > breadth:
                total = np.cumsum(np.array([graph.edge_count[e] for _, e in edges]))
                drawn = np.searchsorted(total, draws[i, d] * total[-1], side="right")
                edges = [edges[k] for k in drawn]
            pairs += [(node, np.int64(graph.edge_action[e])) for node, e in edges]
            level = np.unique(np.array([np.int64(graph.edge_next[e]) for _, e in edges]))
        for node, action in pairs[::-1]:
            value = 0.0
            for e in range(graph.block_start[node], graph.block_start[node] + graph.degree[node]):
                if graph.edge_action[e] == action:
                    following = graph.edge_next[e]
                    best = q[following].max() if graph.degree[following] else 0.0
                    value += graph.edge_count[e] * (graph.edge_reward[e] + gamma * best)
            q[node, action] = value / graph.pair_count[node, action]
        targets[i] = q[nodes[i], actions[i]]


def released_graph(learner, batch, rng, time_limit_is_terminal):
    """The sampled pairs, and where their values are moved to, float32 [B]."""
    args, leaves, targets = learner.args, learner.leaves, np.empty(len(batch.nodes), np.float32)
    leaves.values(np.flatnonzero(~leaves.known))
    draws = rng.random((len(targets), args.depth, args.breadth))
    table, pairs = (learner.graph.arrays, leaves.q), (batch.nodes, batch.actions)
    back_up_in_place(*table, *pairs, args.depth, args.gamma, draws, targets)
    return batch, targets


def persistent_graph(learner, batch, rng, time_limit_is_terminal):
    """The sampled pairs, and the paper's targets, float32 [B], which stay in the table."""
    args, leaves = learner.args, learner.leaves
    subgraphs = learner.replay.subgraphs(batch, "graph", args.depth, args.breadth, rng)
    pair_q = pair_q_values(subgraphs, leaves.values(subgraphs.nodes), args.gamma)
    leaves.values(np.unique(subgraphs.pair_nodes))  # else later they would be evaluated anew
    places = subgraphs.pair_nodes * learner.graph.num_actions + subgraphs.pair_action
    np.put(leaves.q, places[::-1], pair_q[::-1])  # in order: of a pair's values the first one stays
    return batch, pair_q[: subgraphs.num_roots]


UPDATES = {"n-step": released_n_step, "graph": released_graph, "persistent": persistent_graph}


def measure(args):
    """The row of a new run."""
    script, change = script_of(args.suite), UPDATES[args.change]
    backup = "n-step" if args.change == "n-step" else "graph"
    seeding = {"episode_seed": "fixed"} if args.suite == "minatar" else {}

    class Learner(script.Learner):
        def update(self, batch, rng):
            batch, self.released = change(self, batch, rng, args.suite == "minatar")
            return super().update(batch, rng)

        def targets(self, batch, rng):
            return self.released

    about = {"seed": args.seed, "backup": backup, "depth": args.depth} | seeding
    with tempfile.TemporaryDirectory() as folder:
        flags = {"env_id": args.task, "total_timesteps": SUITES[args.suite].total_timesteps}
        flags |= {"run_dir": folder, "save_model": False, "threads": 1, "cuda": False}
        words = [script.__file__, *words_of(about | flags)]
        with patch.object(script, "Learner", Learner), patch.object(sys, "argv", words):
            script.main()
        measured, _ = measurements(run_folders(folder)[0])
    about |= {"suite": args.suite, "task": script.task_of(args.task)}
    about["update"] = "persistent" if args.change == "persistent" else "released"
    return {name: (measured | about).get(name, "") for name in COLUMNS}


@lasting_output()
def main():
    args = arguments(Args, __doc__)
    row = measure(args)
    write_rows(args.out, COLUMNS, [*(read_rows(args.out) if args.out.exists() else []), row])
    print(f"{row['task']}, seed {row['seed']}: {row['score']:.3g}, added to {args.out}")


if __name__ == "__main__":
    main()
