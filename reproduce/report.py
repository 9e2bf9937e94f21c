"""Write the tables of docs/report.md and scores.md, the README's, and their pictures.

    python reproduce/report.py
    python reproduce/report.py --results-dir runs/results    # your own: runs/results/report.md

Every number and every judgement is computed from the rows that are there, also where the grid is
not complete yet.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import aggregate
import numpy as np
import pandas as pd
import report_figures
import tyro
from folders import RESULTS, ROOT, replace_block
from gbtools.runs import markdown
from suites import curve_of
from tables import (
    ATARI,
    FRONTIER,
    PAPER_BACKUPS,
    SAME_RATE,
    WHOLE,
    backup_of,
    cell_text,
    interval,
    read_protocols,
    short,
    short_task,
)

from gbcore.run import fail, one_line_errors
from gbcore.run.atari import REFERENCE_SCORES

LINES = "bands: its standard error. Dashed: one seed. Dotted: a backup with other flags."


@dataclass
class Args:
    results_dir: Path = RESULTS
    """where the rows are; of others than the repository's, the report is written beside them"""


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def summary(protocols, whole=()):
    """What the README shows, too: a row per suite, the paper's means in brackets.

    whole: protocols of whole-graph's own runs, which stand in where there are no others. Any other
    backup that was run by itself, as one that a user added, has a column as well, and tree at the
    learning rate of WHOLE, beside which that is to be read.
    """
    last, same = backup_of(WHOLE), f"tree{SAME_RATE}"
    complete = {name for p in protocols for name in p.settings() if p.mean_of_tasks(name)}
    own = sorted(n for n in complete if n == backup_of(n) and n not in (*PAPER_BACKUPS, last))
    names = [*PAPER_BACKUPS, *own, FRONTIER, *[same] * (same in complete), last]
    own = {protocol.title: of_whole_graph(protocol) for protocol in whole}
    rows = []
    for protocol in protocols:
        result = [protocol.mean_of_tasks(name) for name in names[:-1]]
        result.append(of_whole_graph(protocol) or own.get(protocol.title))
        if not any(result):
            continue
        cells = [short(item and item.value) for item in result]
        for i, paper in enumerate(map(protocol.paper_mean, names)):
            cells[i] += "" if np.isnan(paper) else f" ({short(paper)})"
        seeds = [item.seeds for item in result if item]
        of_human = f", {len(protocol.tasks)} games, % of human"
        title = protocol.title + of_human * (protocol.suite == ATARI)
        rows.append([title, *cells, " to ".join(map(str, sorted({min(seeds), max(seeds)})))])
    if not rows:
        return "No setting has rows of all tasks yet."
    return markdown(["mean score (the paper's)", *names, "seeds"], rows)


def of_whole_graph(protocol):
    """Estimate of WHOLE, or else of the plainest setting of whole-graph with all tasks; or None."""
    names = [name for name in protocol.settings() if backup_of(name) == backup_of(WHOLE)]
    names.sort(key=lambda name: (name != WHOLE, len(name)))
    return next(filter(None, map(protocol.mean_of_tasks, names)), None)


def claims_table(protocol):
    """Do the paper's orders hold here, and does the whole graph lead, also at the same rate?

    Of the tasks and seeds that both have; "" where nothing can be compared.
    """
    ranked = sorted(PAPER_BACKUPS, key=protocol.paper_mean, reverse=True)
    others = [n for n in protocol.settings() if n in PAPER_BACKUPS or n.endswith(SAME_RATE)]
    pairs = [*itertools.combinations(ranked if protocol.in_paper else (), 2)]
    rows = []
    for pair in pairs + [(WHOLE, name) for name in others]:
        gains = protocol.gains(*pair).dropna(axis=1, how="all")
        if gains.empty:
            continue
        gain, tasks = aggregate.difference(gains), [*gains]
        here = (protocol.scores(name)[tasks].where(gains.notna()).mean().mean() for name in pair)
        paper = (protocol.paper_mean(name, tasks) for name in pair)
        here, paper = (", ".join(map(short, means)) for means in (here, paper))
        all_tasks = len(protocol.tasks)
        seeds = f"{gain.seeds}" + f"; {len(tasks)} of {all_tasks} tasks" * (len(tasks) < all_tasks)
        rows.append([" > ".join(pair), paper, f"{here} ({seeds})", *judged(gain)])
        if protocol.is_scaled:
            rows[-1] += judged(aggregate.difference(protocol.gains(*pair, True)[tasks]))
    header = ["claim", "paper", "here (seeds of both)", "difference", "verdict"]
    return markdown(header + ["normalised", "verdict"] * protocol.is_scaled, rows) if rows else ""


def judged(gain):
    """The difference, and what it says."""
    chance = "< 0.001" if gain.p < 0.001 else f"{gain.p:.3f}"
    return interval(gain), f"{aggregate.support(gain)}, p {chance}"


def verdicts_text(protocol):
    """How many cells of the paper's table agree; "" where nothing can be compared."""
    result = [protocol.verdict(b, task) for b in PAPER_BACKUPS for task in protocol.tasks]
    if not any(result):
        return ""
    return (
        f"Of {len(result) - result.count('')} means: {result.count('inside')} inside the paper's "
        f"mean ± std, {result.count('above')} above, {result.count('below')} below."
    )


def score_table(protocol):
    """Ours and the paper's, a row per setting."""
    header = ["", *map(short_task, protocol.tasks), "mean of tasks", "normalised IQM"]
    rows = []
    for name in protocol.settings():
        mean = protocol.mean_of_tasks(name)
        iqm = protocol.estimate(aggregate.interquartile_mean, name, True)
        gain = aggregate.difference(protocol.gains(name, backup_of(name)))
        cells = [protocol.cell(name, task) for task in protocol.tasks]
        rows.append([f"**{name}**", *cells, interval(mean), interval(iqm)])
        rows[-1].append("-" if name == backup_of(name) else interval(gain))
        if protocol.in_paper and name in PAPER_BACKUPS:
            cells = [protocol.paper_cell(name, task) for task in protocol.tasks]
            rows.append(
                ["paper", *map(paper_text, cells), short(protocol.paper_mean(name)), "", ""]
            )
    ratios = [protocol.runs_of("graph", task).novel_state_ratio.mean() for task in protocol.tasks]
    cells = [f"{ratio:.3f}".replace("nan", "-") for ratio in (*ratios, np.mean(ratios))]
    rows.append(["novel state ratio of graph", *cells, "", ""])
    return markdown([*header, "gain over the backup alone"], rows)


def paper_text(cell):
    return " ± ".join(map(short, cell))


def games_table(protocol):
    """Atari's: a row per game and setting that was run."""
    unlike = pd.read_csv(RESULTS / "targets_unlike_tree.csv", index_col="game").unlike_tree
    rows = []
    for game, name in itertools.product(protocol.tasks, protocol.settings()):
        runs, score, paper = protocol.runs_of(name, game), "-", "-"
        if not len(runs):
            continue
        if name in PAPER_BACKUPS:  # percent of human tell its score
            low, high = REFERENCE_SCORES[game]
            cell = protocol.paper_cell(name, game)
            score, paper = f"{low + cell[0] / 100 * (high - low):,.1f}", paper_text(cell)
        means = runs.mean(numeric_only=True)
        rows.append([
            game, name, runs.network.iloc[0], f"{means.game_score:,.1f}", score,
            protocol.cell(name, game), paper, f"{means.novel_state_ratio:.3f}",
            f"{unlike[game]:.1%}" if game in unlike else "-", f"{means.steps_per_second:.1f}",
            f"{means.wall_seconds / 3600:.1f}",
        ])  # fmt: skip
    header = ["game", "setting", "network in", "game score", "paper", "% of human", "paper"]
    header += ["novel state ratio", "targets unlike tree's", "steps/s", "hours per run"]
    return markdown(header, rows)


def soon_table(protocols):
    """A row per task and setting: how soon runs are near their best, and whether they stay there.

    Near is 0.9 of a run's best evaluation. In some layouts no way is worth more than 0.75.
    """
    rows = []
    for p in (p for p in protocols if p.suite.startswith("minigrid")):
        for task, setting in itertools.product(p.tasks, p.settings()):
            runs = p.runs_of(setting, task)
            curves = [pd.Series(curve_of(text)) for text in runs.curve]
            after = [c.loc[(c >= 0.9 * c.max()).idxmax() :] for c in curves if c.max() > 0]
            if not curves:
                continue
            steps = [c.index[0] for c in after] + [np.inf] * (len(curves) - len(after))
            when = [f"{item(steps):,.0f}".replace("inf", "-") for item in (min, np.median, max)]
            least = min((c.min() for c in after), default=np.nan)
            cells = [f"{len(after)} of {len(runs)}", *when, short(least), cell_text(runs.score)]
            rows.append([short_task(task), setting, *cells])
    header = ["", "setting", "seeds near their best", "first after", "median", "last after"]
    return markdown([*header, "least evaluation then", "score"], rows)


# --------------------------------------------------------------------------------------------------
# Pages
# --------------------------------------------------------------------------------------------------


def origin(protocols):
    runs = pd.concat([protocol.runs for protocol in protocols]).dropna(subset="wall_seconds")
    commits = ", ".join(sorted(set(runs.commit.replace("", "an unknown commit"))))
    return (
        f"Written by `python reproduce/report.py` from the rows of {len(runs)} runs, made in "
        f"{runs.wall_seconds.sum() / 3600:,.1f} hours by the code at {commits}."
    )


def claims_of(protocols):
    """A table of claims for each protocol, in parts."""
    tables = {protocol.title: claims_table(protocol) for protocol in protocols}
    if any(tables.values()):
        yield "## The paper's claims"
    for title in filter(tables.get, tables):
        yield f"**{title}**"
        yield tables[title]


def scores_of(protocols, folder):
    """Tables of scores, in parts; draws the learning curves into the folder."""
    for protocol in protocols:
        is_atari = protocol.suite == ATARI
        yield f"## {protocol.title}"
        if verdicts := verdicts_text(protocol):
            yield verdicts
        yield games_table(protocol) if is_atari else score_table(protocol)
        if curves := protocol.curves(protocol.settings()):
            item = (protocol.suite.replace("-", "_"), protocol.episode_seed)
            name = f"report_{'_'.join(filter(None, item))}_curves.png"
            report_figures.draw_curves(folder / name, curves)
            yield f"![Learning curves, {protocol.title}]({name})"
            over = "" if is_atari else ", over five evaluations"
            yield f"Lines: mean of the seeds{over}; {LINES}"


def draw_whole_graph(path, whole, others):
    """Its curves beside other backups', of runs five times as long."""
    setting = next(name for name in whole.settings() if name.startswith("whole-graph, frontier"))
    result = others.curves(["one-step", "tree", "graph", FRONTIER], window=1)
    for task, curves in whole.curves([setting], window=1).items():
        result[task]["whole-graph, frontier"] = curves[setting]
    report_figures.draw_curves(path, result, 8, dots=False, xscale="log")


def write_pages(protocols):
    """The repository's own."""
    docs, whole = ROOT / "docs", read_protocols(RESULTS / "whole_graph")
    curves = protocols[0].curves(["graph", FRONTIER])
    report_figures.draw_curves(docs / "frontier_minigrid_curves.png", curves)
    draw_whole_graph(docs / "whole_graph_curves.png", whole[0], protocols[0])
    table = summary(protocols, whole)
    for page, name, parts in (
        (docs / "report.md", "findings", [table, origin(protocols)]),
        (docs / "report.md", "claims", claims_of(protocols)),
        (docs / "report.md", "whole graph", [soon_table(whole)]),
        (docs / "scores.md", "scores", scores_of(protocols, docs)),
        (ROOT / "README.md", "results", [table]),
    ):
        replace_block(page, name, "report.py", "\n\n".join(parts))
    return "docs/report.md docs/scores.md README.md"


def write_report(protocols, folder):
    """A page of a folder's rows, beside them."""
    parts = ["# Does it reproduce?", summary(protocols), origin(protocols)]
    parts += [f"How to read it: {ROOT / 'docs' / 'report.md'}", *claims_of(protocols)]
    parts += scores_of(protocols, folder)
    (folder / "report.md").write_text("\n\n".join(parts) + "\n")
    return folder / "report.md"


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    protocols = read_protocols(args.results_dir)
    if not protocols:
        fail(f"no rows in {args.results_dir}; reproduce/sweep.py makes them")
    is_ours = args.results_dir.resolve() == RESULTS
    print("wrote", write_pages(protocols) if is_ours else write_report(protocols, args.results_dir))


if __name__ == "__main__":
    main()
