"""How stable are the targets of a state? The paper's appendix, "Stable Value Estimate".

    python experiments/stability.py    # picture and table; first results/stability.csv, if missing

5,000 random transitions of MiniGrid-Empty-5x5; each backup learns from these alone. Whenever a pair
(s, a) is sampled its target is one more estimate. Of the last 10 estimates of each pair: their mean
and standard deviation, averaged over the pairs that have 10, as optimisation goes on. The paper
does not say how often the target network was updated, and its own MiniGrid setting, every 8,000
steps, is longer than its curves: so several intervals are tried. The line q* is the mean over all
pairs of the data, by value iteration on them; at first not all pairs have 10 estimates.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import aggregate
import numpy as np
import play
import report_figures
import torch
from output import read_rows, write_rows
from run_records import RESULTS, ROOT
from tables import markdown

from gbcore import Replay, TransitionGraph, q_targets

LAST = 10  # estimates
UPDATES = 3_000
INTERVALS = (1, 100, 8_000)  # updates between two copies of the online network into the target's
SEEDS = (1, 2, 3)  # with data and networks of their own
VARIANTS = {
    "one-step": {"backup": "one-step"},
    "n-step": {"backup": "n-step"},
    "tree": {"backup": "tree"},
    "graph": {"backup": "graph"},
    "graph, all transitions": {"backup": "graph", "breadth": 0},
}
COLUMNS = ("interval", "backup", "seed", "update", "mean", "std", "pairs", "optimum")


def random_data(seed, transitions=5_000):
    """A Replay of random actions."""
    rng, graph = np.random.default_rng(seed), None
    num_actions, rows = play.stream("minigrid", "MiniGrid-Empty-5x5-v0", rng, seed=seed)
    for obs, action, reward, next_obs, terminated, starts in itertools.islice(rows, transitions):
        if graph is None:
            graph = TransitionGraph(num_actions, obs.shape, obs.dtype)
            replay = Replay(graph, transitions)
        elif starts:
            replay.end_episode()
        replay.add(graph.node(obs), action, reward, graph.node(next_obs), terminated)
    return replay


def optimum(graph, gamma):
    """Mean of q* of the MDP that the data are, over the pairs seen. Rewards are not negative."""
    edges = graph.edges()
    nodes, actions = np.unique(np.stack([edges["source"], edges["action"]]), axis=1)
    subgraphs = graph.expand(nodes, actions, depth=500)
    return q_targets(subgraphs, np.zeros((len(subgraphs.nodes), graph.num_actions)), gamma).mean()


def estimates(replay, variant, interval, updates, seed, every=25):
    """Learn from the data; yields (update, mean, standard deviation, pairs) over the pairs."""
    script, graph = play.script_of("minigrid"), replay.graph
    last = np.full((graph.num_ids * graph.num_actions, LAST), np.nan)
    times = np.zeros(len(last), np.int64)

    class Learner(script.Learner):
        def targets(self, batch, rng):
            targets = super().targets(batch, rng)
            pairs = batch.nodes * graph.num_actions + batch.actions
            for pair, value in zip(pairs.tolist(), targets.tolist(), strict=True):
                last[pair, times[pair] % LAST] = value
                times[pair] += 1
            return targets

    args, rng = script.Args(seed=seed, **VARIANTS[variant]), np.random.default_rng(seed)
    torch.manual_seed(seed)
    learner = Learner(args, graph, replay, torch.device("cpu"))
    for update in range(1, updates + 1):
        learner.update(replay.sample(args.batch_size, rng), rng)
        if update % interval == 0:
            learner.update_target()
        full = last[times >= LAST]
        if update % every == 0 and len(full):
            yield update, full.mean(), full.std(axis=1).mean(), len(full)


def compute():
    """Rows of the CSV: dicts."""
    for seed in SEEDS:
        replay = random_data(seed)
        best = optimum(replay.graph, play.script_of("minigrid").Args.gamma)
        for interval, variant in itertools.product(INTERVALS, VARIANTS):
            for update, *found in estimates(replay, variant, interval, UPDATES, seed):
                row = (interval, variant, seed, update, *found, best)
                yield dict(zip(COLUMNS, row, strict=True))


def panels(rows):
    """Curves as `draw_curves` takes them: means, then standard deviations, for each interval."""
    found = {}
    for row in rows:
        every = f"target network every {row['interval']:,.0f}"
        for name, line, of in (("mean", row["backup"], "mean"), ("mean", "q*", "optimum"),
                               ("std", row["backup"], "std")):  # fmt: skip
            seeds = found.setdefault(f"{name}, {every}", {}).setdefault(line, {})
            seeds.setdefault(row["seed"], {})[row["update"]] = row[of]
    return {
        title: {line: aggregate.band(list(curves.values()), 1) for line, curves in of.items()}
        for title, of in sorted(found.items())
    }


def summary(rows):
    """Markdown: of the last fifth of the steps, mean over seeds."""
    found = {}
    for row in (row for row in rows if row["update"] > 0.8 * UPDATES):
        errors = found.setdefault((row["interval"], row["backup"]), [])
        errors.append((row["mean"] - row["optimum"], row["std"]))
    lines = [[f"{interval:,.0f}", variant, f"{bias:+.4f}", f"{deviation:.5f}"]
             for (interval, variant), errors in sorted(found.items())
             for bias, deviation in [np.mean(errors, axis=0)]]  # fmt: skip
    return markdown(["target network every", "backup", "mean - q*", "standard deviation"], lines)


def main():
    torch.set_num_threads(1)
    path = RESULTS / "stability.csv"
    if not path.exists():
        write_rows(path, COLUMNS, list(compute()))
    rows = [
        {name: text if name == "backup" else float(text) for name, text in row.items()}
        for row in read_rows(path)
    ]
    picture = ROOT / "docs" / "stability.png"
    report_figures.draw_curves(picture, panels(rows), "estimates", "optimisation steps")
    print(summary(rows))


if __name__ == "__main__":
    main()
