"""Runs on levels that change: their rows, a table and a picture.

    python reproduce/levels.py runs/RUN runs/OTHER

Every evaluation of a run is a row of results/levels.csv. Its trained network plays 100 more
held-out episodes, alone and on a graph of the episode under way, and an untrained network plays on
such a graph. Rows that are there already stay. Without runs the table and the picture are made
anew. The baseline is of levels_sb3.py.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro
from folders import RESULTS, ROOT, replace_block
from gbtools import recorded
from gbtools.runs import markdown, read_result
from report_figures import draw_curves

from gbcore import EpisodeGraph
from gbcore.run import one_line_errors

ROWS = RESULTS / "levels.csv"
LAST = 100  # episodes of the trained network
ENOUGH = 0.9  # of the best return


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # folders of finished runs


def write_rows(rows):
    """Append rows, dicts; those that are there already are left out."""
    have = pd.read_csv(ROWS, dtype=str, keep_default_na=False)
    table = pd.concat([have, pd.DataFrame(rows).astype(str)])
    table.drop_duplicates().to_csv(ROWS, index=False, lineterminator="\n")


def same_of(task, agent, flags, commit, seconds, exploration=""):
    """The columns that all rows of a run share; flags: the script's."""
    return {
        "task": task, "agent": agent, "exploration": exploration, "view": flags.view,
        "num_levels": flags.num_levels, "seed": flags.seed, "commit": commit,
        "wall_seconds": round(seconds, 1),
    }  # fmt: skip


def row_of(same, act_on, step, returns):
    """One evaluation: the mean return and how many episodes had a reward."""
    mean, solved = round(float(np.mean(returns)), 4), int(np.sum(np.array(returns) > 0))
    row = {"act_on": act_on, "step": step, "mean_return": mean, "solved": solved}
    return same | row | {"episodes": len(returns)}


def collect(folder):
    """Rows of a run: its evaluations, the trained network's, an untrained one's."""
    run, result = recorded.read(folder), read_result(folder)
    args, learner = run.args, run.learner
    how = run.task, args.backup, args, result["versions"]["commit"], result["wall_seconds"]
    same = same_of(*how, args.exploration)

    def played(same, act_on, step, policy):
        seed = [args.seed, args.total_timesteps, 2]
        returns, _ = run.module.evaluate(args, run.task, policy, seed, LAST)
        return row_of(same, act_on, step, returns)

    def on_graph(network, first_tries=None):
        q = functools.partial(learner.values, network)
        return EpisodeGraph(q, run.graph.num_actions, args.gamma, args.prior, first_tries)

    curve = pd.read_csv(folder / "evaluations.csv").groupby("global_step").episodic_return
    rows = [row_of(same, args.eval_act_on, step, returns) for step, returns in curve]
    rows.append(played(same, "network", args.total_timesteps, learner.act_on_network))
    policy = on_graph(learner.online, learner.leaves.first_tries)
    rows.append(played(same, "graph", args.total_timesteps, policy))
    torch.manual_seed(args.seed)
    network = run.module.make_network(args, run.graph.obs_shape, run.graph.num_actions)
    same |= {"agent": "untrained", "exploration": "", "wall_seconds": ""}
    return [*rows, played(same, "graph", 0, on_graph(network))]


def names_of(rows):
    """Each row's agent, as table and picture call it."""
    explores = np.where(rows.exploration == "frontier", ", frontier", "")
    sees = np.where(rows["view"] == "partial", ", 7x7 view", "")
    levels = np.where(rows.num_levels > 0, ", " + rows.num_levels.astype(str) + " levels", "")
    return rows.agent + explores + sees + levels


def returns_of(rows, agent):
    """Task -> mean return of the search, or of untrained networks on their own graph."""
    return rows[rows.agent == agent].groupby("task").mean_return.mean()


def table(rows):
    """Of docs/levels.md: when each agent got to ENOUGH, and where it ended; medians."""
    result, best, untrained = [], returns_of(rows, "search"), returns_of(rows, "untrained")
    is_own = rows.agent + rows.exploration == "whole-graphfrontier"
    rows = rows[is_own | rows.agent.isin(["ppo", "dqn"])]
    for (task, name), part in rows.groupby([rows.task, names_of(rows)]):
        curves, enough = part[part.episodes != LAST], ENOUGH * best.get(task, 1.0)
        reached = curves[curves.mean_return >= enough].groupby("seed").step.min()
        steps = reached.reindex(part.seed.unique()).fillna(np.inf).median()
        steps = f"> {part.step.max():,}" if steps == np.inf else f"{steps:,.0f}"
        ends = [f"{mean[task]:.2f}" if task in mean else "" for mean in (best, untrained)]
        cells = [task.removeprefix("MiniGrid-"), *ends, name, str(part.seed.nunique()), steps]
        last = part[part.step == part.groupby("seed").step.transform("max")]
        last = last.sort_values("episodes").groupby(["act_on", "seed"]).tail(1)
        for act_on in ("graph", "network"):
            ends = last[last.act_on == act_on]
            solved = f"({ends.solved.sum()} of {ends.episodes.sum()})"
            cells.append(f"{ends.mean_return.median():.2f} {solved}" if len(ends) else "")
        result.append(cells)
    header = ["task", "best", "untrained", "agent", "seeds", "steps to 0.9 of the best"]
    return markdown([*header, "own graph, in the end", "network alone"], result)


def draw(rows):
    """Write docs/levels.png: mean return by step, a panel a task, whole-graph beside PPO."""
    best, tasks = returns_of(rows, "search"), {}
    rows = rows[(rows.episodes != LAST) & (rows.num_levels == 0)]
    rows = rows[(rows.agent == "ppo") | (rows.agent + rows.exploration == "whole-graphfrontier")]
    for (task, name), part in rows.groupby([rows.task, names_of(rows)]):
        part = part[part.act_on == part.act_on.min()]  # graph, where there is one
        curves = part.pivot_table("mean_return", "step", "seed")
        curves = curves.ffill() if name == "ppo" else curves  # a seed that ended had enough
        middle = curves.median(axis=1)
        error = [middle - curves.min(axis=1), curves.max(axis=1) - middle]
        panel = tasks.setdefault(task.removeprefix("MiniGrid-"), {})
        panel[name] = middle, error, 0
        if task in best:
            panel["best, by search"] = middle * 0 + best[task], 0, 1
    draw_curves(
        ROOT / "docs" / "levels.png", tasks, 12, dots=False, columns=5, xscale="log",
        xlim=(rows.step.min(), rows.step.max()), ylim=(0, 1),
    )  # fmt: skip


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    for folder in args.runs:
        write_rows(collect(folder))
    rows = pd.read_csv(ROWS, keep_default_na=False)
    draw(rows)
    replace_block(ROOT / "docs" / "levels.md", "rows", "levels.py", table(rows))


if __name__ == "__main__":
    main()
