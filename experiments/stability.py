"""How stable are the targets of a state? The paper's appendix, "Stable Value Estimate".

    python experiments/stability.py --csv results/stability.csv --out docs/stability.png
    python experiments/stability.py --draw results/stability.csv --out docs/stability.png

5,000 random transitions of MiniGrid-Empty-5x5; each backup learns from these alone. Whenever a pair
(s, a) is sampled its target is one more estimate. Of the last 10 estimates of each pair: their mean
and standard deviation, averaged over the pairs that have 10, as optimisation goes on. The paper
does not say how often the target network was updated, and its own MiniGrid setting, every 8,000
steps, is longer than its curves: so several intervals are tried. The line q* is the mean over all
pairs of the data, by value iteration on them; at first not all pairs have 10 estimates.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import aggregate
import numpy as np
import report_figures
import torch
import tyro
from output import fail, read_rows, write_rows
from run_records import script_of
from tables import markdown

from gbcore import LeafTable, Replay, TransitionGraph, q_targets

LAST = 10  # estimates
VARIANTS = {
    "one-step": {"backup": "one-step"},
    "n-step": {"backup": "n-step"},
    "tree": {"backup": "tree"},
    "graph": {"backup": "graph"},
    "graph, all transitions": {"backup": "graph", "breadth": 0},
}
KINDS = {"interval": int, "backup": str, "seed": int, "update": int, "mean": float, "std": float,
         "pairs": int, "optimum": float}  # fmt: skip


@dataclass
class Args:
    out: Path | None = None
    """the picture"""
    csv: Path | None = None
    """the numbers"""
    draw: Annotated[Path | None, tyro.conf.arg(metavar="CSV")] = None
    """compute nothing: draw the numbers of this file"""
    updates: int = 3_000
    """optimisation steps"""
    intervals: tuple[int, ...] = (1, 100, 8_000)
    """updates between two copies of the online network into the target network"""
    seeds: int = 3
    """runs of each, with data and networks of their own"""


def random_data(script, seed, transitions=5_000):
    """A Replay of random actions."""
    rng = np.random.default_rng(seed)
    env = script.make_env(script.Args(seed=seed), script.task_of("Empty-5x5"), rng)
    obs = env.reset()
    graph = TransitionGraph(env.num_actions, obs.shape, obs.dtype)
    replay, node = Replay(graph, transitions), graph.node(obs)
    for _ in range(transitions):
        action = int(rng.integers(env.num_actions))
        obs, reward, terminated, truncated = env.step(action)
        next_node = graph.node(obs)
        replay.add(node, action, float(reward > 0), next_node, terminated)
        node = next_node
        if terminated or truncated:
            replay.end_episode()
            node = graph.node(env.reset())
    return replay


def optimum(graph, gamma):
    """Mean of q* of the MDP that the data are, over the pairs seen. Rewards are not negative."""
    edges = graph.edges()
    nodes, actions = np.unique(np.stack([edges["source"], edges["action"]]), axis=1)
    subgraphs = graph.expand(nodes, actions, depth=500)
    return q_targets(subgraphs, np.zeros((len(subgraphs.nodes), graph.num_actions)), gamma).mean()


def estimates(script, replay, variant, interval, updates, seed, every=25):
    """Learn from the data; yields (update, mean, standard deviation, pairs) over the pairs."""
    args, graph = script.Args(seed=seed, **VARIANTS[variant]), replay.graph
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    online = script.make_network(args, graph.obs_shape, graph.num_actions)
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=args.learning_rate, eps=args.adam_eps)
    with_target = torch.inference_mode()(lambda obs: target(torch.from_numpy(obs)).numpy())
    leaves = LeafTable(graph, with_target)
    source, rule = script.BACKUPS[args.backup]
    depth = 1 if args.backup == "one-step" else args.depth
    last = np.full((graph.num_ids * graph.num_actions, LAST), np.nan)
    times = np.zeros(len(last), np.int64)
    for update in range(1, updates + 1):
        batch = replay.sample(args.batch_size, rng)
        subgraphs = replay.subgraphs(batch, source, depth, args.breadth, rng)
        targets = q_targets(subgraphs, leaves.values(subgraphs.nodes), args.gamma, rule)
        pairs = batch.nodes * graph.num_actions + batch.actions
        for pair, value in zip(pairs.tolist(), targets.tolist(), strict=True):
            last[pair, times[pair] % LAST] = value
            times[pair] += 1
        q = online(torch.from_numpy(replay.observations(batch)))
        q = q.gather(1, torch.from_numpy(batch.actions)[:, None])[:, 0]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(q, torch.from_numpy(targets)).backward()
        optimizer.step()
        if update % interval == 0:
            target.load_state_dict(online.state_dict())
            leaves.forget_all()
        full = last[times >= LAST]
        if update % every == 0 and len(full):
            yield update, full.mean(), full.std(axis=1).mean(), len(full)


def compute(args):
    """Rows of the CSV: dicts."""
    script = script_of("minigrid")
    for seed in range(1, args.seeds + 1):
        replay = random_data(script, seed)
        best = optimum(replay.graph, script.Args().gamma)
        for interval in args.intervals:
            for variant in VARIANTS:
                for update, *found in estimates(
                    script, replay, variant, interval, args.updates, seed
                ):
                    row = (interval, variant, seed, update, *found, best)
                    yield dict(zip(KINDS, row, strict=True))


def panels(rows):
    """Curves as `draw_curves` takes them: means, then standard deviations, for each interval."""
    found = {}
    for row in rows:
        for name, lines in (
            ("mean", {row["backup"]: row["mean"], "q*": row["optimum"]}),
            ("std", {row["backup"]: row["std"]}),
        ):
            panel = found.setdefault(f"{name}, target network every {row['interval']:,}", {})
            for line, value in lines.items():
                curves = panel.setdefault(line, {})
                curves.setdefault(row["seed"], {})[row["update"]] = value
    return {
        title: {line: aggregate.band(list(curves.values()), 1) for line, curves in of.items()}
        for title, of in sorted(found.items())
    }


def summary(rows):
    """Markdown: of the last fifth of the steps, mean over seeds."""
    late, found = 0.8 * max(row["update"] for row in rows), {}
    for row in (row for row in rows if row["update"] > late):
        errors = found.setdefault((row["interval"], row["backup"]), [])
        errors.append((row["mean"] - row["optimum"], row["std"]))
    lines = [[f"{interval:,}", variant, f"{bias:+.4f}", f"{deviation:.5f}"]
             for (interval, variant), errors in sorted(found.items())
             for bias, deviation in [np.mean(errors, axis=0)]]  # fmt: skip
    return markdown(["target network every", "backup", "mean - q*", "standard deviation"], lines)


def main():
    args = tyro.cli(Args)
    if min(args.updates, args.seeds, *args.intervals) < 1:
        fail("--updates, --seeds and --intervals must be >= 1")
    torch.set_num_threads(1)
    if args.draw is None:
        rows = list(compute(args))
    else:
        try:
            found = read_rows(args.draw)
            rows = [{name: kind(row[name]) for name, kind in KINDS.items()} for row in found]
        except (OSError, ValueError, KeyError) as error:
            fail(f"{args.draw} is no file of this command: {error!r}")
    if not rows:
        fail("no rows: no pair has 10 estimates yet; require more --updates")
    if args.csv:
        write_rows(args.csv, KINDS, rows)
    if args.out:
        report_figures.draw_curves(args.out, panels(rows), "estimates", "optimisation steps")
    print(summary(rows))


if __name__ == "__main__":
    main()
