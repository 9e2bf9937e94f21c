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
import tables
import tyro
from folders import RESULTS, ROOT, replace_block
from gbtools.runs import markdown
from tables import PAPER_BACKUPS, SAME_RATE, interval, read_protocols, short, short_task

from gbcore.run import fail, one_line_errors

LINES = "bands: its standard error. Dashed: one seed. Dotted: a backup with other flags."


@dataclass
class Args:
    results_dir: Path = RESULTS
    """where the rows are; of others than the repository's, the report is written beside them"""


def summary(protocols):
    """What the README shows, too: a row per suite, the paper's means in brackets.

    The last column is of WHOLE, or else of the plainest setting of whole-graph with all tasks.
    """
    names, rows = tables.SUMMARY, []
    for protocol in protocols:
        scores = {name: protocol.scores(name) for name in protocol.settings()}
        scores = {name: table for name, table in scores.items() if table.notna().any().all()}
        whole = [name for name in scores if tables.backup_of(name) == names[-1]]
        whole = min(whole, key=lambda name: (name != tables.WHOLE, len(name)), default=None)
        found = [scores.get(name) for name in (*names[:-1], whole)]
        if seeds := {table.count().min() for table in found if table is not None}:
            cells = ["-" if table is None else short(table.mean().mean()) for table in found]
            for i, paper in enumerate(map(protocol.paper_mean, names)):
                cells[i] += "" if np.isnan(paper) else f" ({short(paper)})"
            of_human = f", {len(protocol.tasks)} games, % of human"
            title = protocol.title + of_human * (protocol.suite == tables.ATARI)
            rows.append([title, *cells, " to ".join(map(str, sorted({min(seeds), max(seeds)})))])
    if not rows:
        return "No setting has rows of all tasks yet."
    return markdown(["mean score (the paper's)", *names, "seeds"], rows)


def claims_table(protocol):
    """Do the paper's orders hold here, and does the whole graph lead, also at the same rate?

    Of the tasks and seeds that both have; "" where nothing can be compared.
    """
    ranked = sorted(PAPER_BACKUPS, key=protocol.paper_mean, reverse=True)
    others = [n for n in protocol.settings() if n in PAPER_BACKUPS or n.endswith(SAME_RATE)]
    pairs = [*itertools.combinations(ranked if protocol.in_paper else (), 2)]
    rows = []
    for pair in pairs + [(tables.WHOLE, name) for name in others]:
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
        mean = aggregate.estimate(aggregate.mean_of_tasks, protocol.scores(name))
        iqm = aggregate.estimate(aggregate.interquartile_mean, protocol.scores(name, True))
        gain = aggregate.difference(protocol.gains(name, tables.backup_of(name)))
        cells = [protocol.cell(name, task) for task in protocol.tasks]
        rows.append([f"**{name}**", *cells, interval(mean), interval(iqm)])
        rows[-1].append("-" if name == tables.backup_of(name) else interval(gain))
        if protocol.in_paper and name in PAPER_BACKUPS:
            cells = [protocol.paper_cell(name, task) for task in protocol.tasks]
            cells = [" ± ".join(map(short, cell)) for cell in cells]
            rows.append(["paper", *cells, short(protocol.paper_mean(name)), "", ""])
    ratios = [protocol.runs_of("graph", task).novel_state_ratio.mean() for task in protocol.tasks]
    cells = [f"{ratio:.3f}".replace("nan", "-") for ratio in (*ratios, np.mean(ratios))]
    rows.append(["novel state ratio of graph", *cells, "", ""])
    return markdown([*header, "gain over the backup alone"], rows)


def origin(protocols):
    runs = pd.concat([protocol.runs for protocol in protocols]).dropna(subset="wall_seconds")
    commits = ", ".join(sorted(set(runs.commit.replace("", "an unknown commit"))))
    return (
        f"Written by `python reproduce/report.py` from the rows of {len(runs)} runs, made in "
        f"{runs.wall_seconds.sum() / 3600:,.1f} hours by the code at {commits}."
    )


def claims_of(protocols):
    """A table of claims for each protocol, in parts."""
    texts = {protocol.title: claims_table(protocol) for protocol in protocols}
    if any(texts.values()):
        yield "## The paper's claims"
    for title in filter(texts.get, texts):
        yield f"**{title}**"
        yield texts[title]


def scores_of(protocols, folder):
    """Tables of scores, in parts; draws the learning curves into the folder."""
    for protocol in protocols:
        yield f"## {protocol.title}"
        if verdicts := verdicts_text(protocol):
            yield verdicts
        yield score_table(protocol)
        if curves := protocol.curves(protocol.settings()):
            item = (protocol.suite.replace("-", "_"), protocol.episode_seed)
            name = f"report_{'_'.join(filter(None, item))}_curves.png"
            report_figures.draw_curves(folder / name, curves)
            yield f"![Learning curves, {protocol.title}]({name})"
            over = "" if protocol.suite == tables.ATARI else ", over five evaluations"
            yield f"Lines: mean of the seeds{over}; {LINES}"


def write_pages(protocols):
    """The repository's own."""
    docs = ROOT / "docs"
    curves = protocols[0].curves(["graph", tables.FRONTIER])
    report_figures.draw_curves(docs / "frontier_minigrid_curves.png", curves)
    table = summary(read_protocols(RESULTS, RESULTS / "whole_graph"))
    for page, name, parts in (
        (docs / "report.md", "findings", [table, origin(protocols)]),
        (docs / "report.md", "claims", claims_of(protocols)),
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
