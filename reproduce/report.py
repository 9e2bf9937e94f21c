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
import report_figures
import tyro
from folders import RESULTS, ROOT
from gbtools.runs import markdown, read_rows
from tables import (
    ATARI,
    FRONTIER,
    PAPER_BACKUPS,
    RELEASED,
    SAME_RATE,
    WHOLE,
    backup_of,
    cell_text,
    chance_text,
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


def claims(protocol):
    """(better, worse) -> the protocol of the tasks that have both, where there are any.

    They are the paper's orders, and the whole graph against its backups, also at the same rate.
    """
    ranked = sorted(PAPER_BACKUPS, key=protocol.paper_mean, reverse=True) if protocol.paper else ()
    others = [n for n in protocol.settings() if n in PAPER_BACKUPS or n.endswith(SAME_RATE)]
    pairs = [*itertools.combinations(ranked, 2), *((WHOLE, name) for name in others)]
    result = {pair: protocol.with_both(*pair) for pair in pairs}
    return {pair: both for pair, both in result.items() if both.tasks}


def of_the_paper(protocol, setting, game):
    """The paper's score of an Atari game, which is so many percent of human."""
    low, high = REFERENCE_SCORES[game]
    return low + protocol.paper[setting][game][0] / 100 * (high - low)


def mean_of(runs, name):
    return np.mean([run[name] for run in runs]) if runs else np.nan


def hours(runs):
    return mean_of(runs, "wall_seconds") / 3600


def of_whole_graph(protocol):
    """Estimate of WHOLE, or else of the plainest setting of whole-graph with all tasks; or None."""
    first = (WHOLE, backup_of(WHOLE), f"{backup_of(WHOLE)}, frontier")
    others = [name for name in protocol.settings() if backup_of(name) == backup_of(WHOLE)]
    names = dict.fromkeys((*first, *others))
    result = (protocol.estimate(aggregate.mean_of_tasks, name) for name in names)
    return next(filter(None, result), None)


def summary(protocols, whole=()):
    """What the README shows, too: a row per suite, the paper's means in brackets.

    whole: protocols of whole-graph's own runs, which stand in where there are no others. Any other
    backup that was run by itself, as one that a user added, has a column as well, and tree at the
    learning rate of WHOLE, beside which that is to be read.
    """
    alone = (name for p in protocols for name in p.settings() if name == backup_of(name))
    own = sorted({*alone} - {*PAPER_BACKUPS, backup_of(WHOLE)})
    own, same = (
        [n for n in item if any(p.estimate(aggregate.mean_of_tasks, n) for p in protocols)]
        for item in (own, [f"tree{SAME_RATE}"])
    )
    names = [*PAPER_BACKUPS, *own, FRONTIER, *same, backup_of(WHOLE)]
    own = {protocol.title: of_whole_graph(protocol) for protocol in whole}
    rows = []
    for protocol in protocols:
        result = [protocol.estimate(aggregate.mean_of_tasks, name) for name in names[:-1]]
        result.append(of_whole_graph(protocol) or own.get(protocol.title))
        if not any(result):
            continue
        cells = [short(item and item.value) for item in result]
        for i, paper in enumerate(map(protocol.paper_mean, names)):
            cells[i] += "" if np.isnan(paper) else f" ({short(paper)})"
        seeds = sorted({item.seeds for item in result if item})
        of_human = f", {len(protocol.tasks)} games, % of human"
        title = protocol.title + of_human * (protocol.suite == ATARI)
        rows.append([title, *cells, " to ".join(map(str, {seeds[0]: 0, seeds[-1]: 0}))])
    if not rows:
        return "No setting has rows of all tasks yet."
    return markdown(["mean score (the paper's)", *names, "seeds"], rows)


def in_short(protocols, folder, whole=()):
    """The head of the report: a picture and the summary."""
    panels = [panel(p) for p in protocols if p.paper and p.suite != ATARI]
    panels = [parts for parts in panels if any(result for result, _ in parts[2].values())]
    if panels:
        report_figures.draw_summary(folder / "report_summary.png", panels)
        yield "![Mean scores of every backup, ours and the paper's](report_summary.png)"
        yield (
            "Bars: mean of the tasks, 95% interval; pale: fewer than "
            f"{aggregate.FEWEST_SEEDS} seeds. Diamonds: the paper. "
            "Normalised: divided by the paper's best."
        )
    yield summary(protocols, whole)


def panel(protocol):
    """Title, label and setting -> (Estimate, the paper's mean or nan) of a panel of the picture."""
    bars = {}
    for name in dict.fromkeys((*PAPER_BACKUPS, *protocol.settings())):
        result = protocol.estimate(aggregate.mean_of_tasks, name, True)
        if name in PAPER_BACKUPS or (result is not None and not name.endswith(RELEASED)):
            bars[name] = result, protocol.paper_mean(name, normalised=True)
    label = "mean score / the paper's best" if protocol.scales else "mean return"
    return protocol.title.replace(", ", ",\n"), label, bars


def judged(gain):
    """The difference, and what it says."""
    text = f"{aggregate.support(gain)}, p {chance_text(gain.p)}"
    return interval(gain), text


def claims_table(protocol):
    """The paper's orders of the means, and whether they hold here."""
    header = ["claim", "paper", "here (seeds of both)", "difference", "verdict"]
    rows = []
    for pair, both in claims(protocol).items():
        here, gain = ", ".join(map(short, both.means(*pair))), both.gain(*pair)
        paper, seeds = ", ".join(map(short, map(both.paper_mean, pair))), str(gain.seeds)
        if len(both.tasks) < len(protocol.tasks):
            seeds += f"; {len(both.tasks)} of {len(protocol.tasks)} tasks"
        rows.append([" > ".join(pair), paper, f"{here} ({seeds})", *judged(gain)])
        if protocol.scales:
            rows[-1] += judged(both.gain(*pair, normalised=True))
    return markdown(header + ["normalised", "verdict"] * bool(protocol.scales), rows)


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
        mean = protocol.estimate(aggregate.mean_of_tasks, name)
        iqm = protocol.estimate(aggregate.interquartile_mean, name, True)
        gain = None if name == backup_of(name) else protocol.gain(name, backup_of(name))
        cells = [protocol.cell(name, task) for task in protocol.tasks]
        rows.append([f"**{name}**", *cells, *map(interval, (mean, iqm, gain))])
        if name in protocol.paper:
            cells = [paper_text(*protocol.paper[name][task]) for task in protocol.tasks]
            rows.append(["paper", *cells, short(protocol.paper_mean(name)), "", ""])
    ratios = [
        mean_of(protocol.runs_of("graph", task), "novel_state_ratio") for task in protocol.tasks
    ]
    cells = [f"{ratio:.3f}".replace("nan", "-") for ratio in (*ratios, np.mean(ratios))]
    rows.append(["novel state ratio of graph", *cells, "", ""])
    return markdown([*header, "gain over the backup alone"], rows)


def paper_text(mean, std):
    return f"{short(mean)} ± {short(std)}"


def games_table(protocol):
    """Atari's: a row per game and setting that was run."""
    measured = read_rows(RESULTS / "targets_unlike_tree.csv")
    unlike = {row["game"]: f"{float(row['unlike_tree']):.1%}" for row in measured}
    rows = []
    for game, name in itertools.product(protocol.tasks, protocol.settings()):
        runs, paper = protocol.runs_of(name, game), protocol.paper.get(name)
        if runs:
            of_paper = f"{of_the_paper(protocol, name, game):,.1f}" if paper else "-"
            score, network = (
                mean_of(runs, "game_score"),
                "bfloat16" if runs[0]["bf16"] else "float32",
            )
            row = [game, name, network, f"{score:,.1f}", of_paper, protocol.cell(name, game)]
            row += [paper_text(*paper[game]) if paper else "-"]
            row += [f"{mean_of(runs, 'novel_state_ratio'):.3f}", unlike.get(game, "-")]
            row += [f"{mean_of(runs, 'steps_per_second'):.1f}", f"{hours(runs):.1f}"]
            rows.append(row)
    header = ["game", "setting", "network in", "game score", "paper", "% of human", "paper"]
    header += ["novel state ratio", "targets unlike tree's", "steps/s", "hours per run"]
    return markdown(header, rows)


def section(protocol, folder):
    """Tables and pictures of one protocol."""
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
        yield f"Lines: mean of the seeds{'' if is_atari else ', over five evaluations'}; {LINES}"


def soon_table(protocols):
    """A row per task and setting: how soon runs are near their best, and whether they stay there.

    Near is 0.9 of a run's best evaluation. In some layouts no way is worth more than 0.75.
    """
    rows = []
    for p in (p for p in protocols if p.suite.startswith("minigrid")):
        for task, setting in itertools.product(p.tasks, p.settings()):
            runs = p.runs_of(setting, task)
            curves = [np.array(sorted(run["curve"].items())) for run in runs]  # [evaluations, 2]
            curves = [curve for curve in curves if curve[:, 1].max() > 0]
            near = [curve[:, 1] >= 0.9 * curve[:, 1].max() for curve in curves]
            after = [curve[item.argmax() :] for curve, item in zip(curves, near, strict=True)]
            steps = [curve[0, 0] for curve in after] + [np.inf] * (len(runs) - len(after))
            if runs:
                message = [
                    f"{item(steps):,.0f}".replace("inf", "-")
                    for item in (np.min, np.median, np.max)
                ]
                least = min((curve[:, 1].min() for curve in after), default=np.nan)
                scores = [run["score"] for run in runs]
                cells = [f"{len(after)} of {len(runs)}", *message, short(least), cell_text(scores)]
                rows.append([short_task(task), setting, *cells])
    header = ["", "setting", "seeds near their best", "first after", "median", "last after"]
    return markdown([*header, "least evaluation then", "score"], rows)


def draw_whole_graph(path, whole, others):
    """Its curves beside other backups', of runs five times as long."""
    setting = next(name for name in whole.settings() if name.startswith("whole-graph, frontier"))
    result = others.curves(["one-step", "tree", "graph", FRONTIER], window=1)
    for task, curves in whole.curves([setting], window=1).items():
        result[task]["whole-graph, frontier"] = curves[setting]
    report_figures.draw_curves(path, result, 8, dots=False, xscale="log")


def origin(protocols):
    runs = [run for p in protocols for item in p.runs.values() for run in item.values()]
    runs = [run for run in runs if "commit" in run]
    commits = sorted({run["commit"] or "an unknown commit" for run in runs})
    return (
        f"Written by `python reproduce/report.py` from the rows of {len(runs)} runs, made in "
        f"{hours(runs) * len(runs):,.1f} hours by the code at {', '.join(commits)}."
    )


def claims_of(protocols):
    """A table of claims for each protocol, in parts."""
    claimed = [p for p in protocols if claims(p)]
    if claimed:
        yield "## The paper's claims"
    for protocol in claimed:
        yield f"**{protocol.title}**"
        yield claims_table(protocol)


def scores_of(protocols, folder):
    """Tables of scores, in parts; draws the learning curves into the folder."""
    return itertools.chain(*(section(protocol, folder) for protocol in protocols))


def replace_block(path, name, parts):
    """Put parts between the two markers of that name in a page."""
    begin, end = f"<!-- {name}: python reproduce/report.py -->", f"<!-- end of {name} -->"
    content = path.read_text()
    if content.count(begin) != 1 or content.count(end) != 1:
        raise ValueError(f"{path} has no {begin!r} and {end!r} to write between")
    head, rest = content.split(begin)
    path.write_text(f"{head}{begin}\n" + "\n\n".join(parts) + f"\n{end}{rest.split(end)[1]}")


def write_pages(protocols):
    """The repository's own."""
    docs, whole = ROOT / "docs", read_protocols(RESULTS / "whole_graph")
    curves = protocols[0].curves(["graph", FRONTIER])
    report_figures.draw_curves(docs / "frontier_minigrid_curves.png", curves)
    replace_block(
        docs / "report.md", "findings", [*in_short(protocols, docs, whole), origin(protocols)]
    )
    replace_block(docs / "report.md", "claims", claims_of(protocols))
    replace_block(docs / "report.md", "whole graph", [soon_table(whole)])
    draw_whole_graph(docs / "whole_graph_curves.png", whole[0], protocols[0])
    replace_block(docs / "scores.md", "scores", scores_of(protocols, docs))
    replace_block(ROOT / "README.md", "results", [summary(protocols, whole)])
    return "docs/report.md docs/scores.md README.md"


def write_report(protocols, folder):
    """A page of a folder's rows, beside them."""
    parts = [*in_short(protocols, folder), origin(protocols)]
    parts += [f"How to read it: {ROOT / 'docs' / 'report.md'}", *claims_of(protocols)]
    parts += scores_of(protocols, folder)
    (folder / "report.md").write_text("\n\n".join(["# Does it reproduce?", *parts]) + "\n")
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
