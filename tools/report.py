"""Write docs/report.md, the tables of docs/frontier.md and the README's results from results/*.csv.

    python tools/report.py
    python tools/report.py --results-dir runs/results    # of your own sweep: runs/results/report.md

Every number and every judgement is computed from the rows that are there, also where the grid is
not complete yet.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import aggregate
import frontier_tables
import numpy as np
import report_figures
import tyro
from output import fail
from run_records import RESULTS, ROOT
from tables import (
    FRONTIER,
    OF_THE_PAPER,
    backup_of,
    cell_text,
    chance_text,
    count,
    interval,
    listed,
    markdown,
    read_protocols,
    short,
    short_task,
)

# Changes to graph, of which one may raise its score.
REMEDIES = {
    "graph, persistent": "further propagation",
    "graph, breadth 0": "no sampling of the graph",
    FRONTIER: "frontier episodes",
}


@dataclass
class Args:
    results_dir: Path = RESULTS
    """where the rows are"""
    out: Path | None = None
    """the report, its pictures beside it; docs/report.md, or report.md beside other rows"""


def orders(protocol):
    """(better, worse) by the paper -> (the difference here, the same of normalised scores)."""
    if not protocol.paper:
        return {}
    ranked = sorted(OF_THE_PAPER, key=protocol.paper_mean, reverse=True)
    return {
        pair: (protocol.gain(*pair), protocol.gain(*pair, normalised=True))
        for pair in itertools.combinations(ranked, 2)
    }


def orders_text(protocol):
    """Whether the paper's first order of the means holds here, and how many of the others."""
    (pair, first), *others = orders(protocol).items()
    words = {"supported": "holds", "contradicted": "is contradicted"}
    judged, found = (
        aggregate.support(first[0]),
        [aggregate.support(gain) for _, (gain, _) in others],
    )
    counts = [f"{found.count(name)} {name}" for name in dict.fromkeys(found)]
    return (
        f"{' > '.join(pair)} {words.get(judged, f'is {judged}')}. "
        f"The paper's other orders: {', '.join(counts)}."
    )


def findings(protocols):
    """The README's bullets: MiniGrid, MinAtar and exploration, as far as there are rows."""
    for name, suite in (("MiniGrid", "minigrid"), ("MinAtar", "minatar")):
        parts = []
        for p in (p for p in protocols if p.suite == suite and p.mean("graph") is not None):
            scores = ", ".join(f"`{b}` {short(p.mean(b))} ({short(p.paper_mean(b))})"
                               for b in reversed(OF_THE_PAPER))  # fmt: skip
            where = p.title.removeprefix(name).removeprefix(", ").capitalize()
            parts.append(f"{where}{': ' if where else ''}{scores}. {orders_text(p)}")
        if parts:
            yield f"- **{name}**, mean score, in brackets the paper's. {' '.join(parts)}"
    explored = "; ".join(frontier_tables.findings(protocols))
    if explored:
        yield f"- **Frontier exploration**, mean score of `graph` without and with: {explored}."


def in_short(protocols, folder):
    """What the README shows, too: a picture and bullets."""
    shown = [p for p in protocols if p.paper and p.suite != "atari100k"]
    if shown:
        report_figures.draw_summary(folder / "report_summary.png", list(map(panel, shown)))
        yield "![Mean scores of every backup, ours and the paper's](report_summary.png)"
        yield (
            "Bars: mean of the tasks with its 95% interval, pale of fewer than "
            f"{aggregate.FEWEST_SEEDS} seeds. Diamonds: the paper."
        )
    yield "\n".join(findings(protocols))
    games = {t for p in protocols if p.suite == "atari100k" for of in p.runs.values() for t in of}
    yield f"Atari 100K: {len(games)} of 26 games have been run."


def panel(protocol):
    """Title, label and setting -> (Estimate, the paper's mean or nan) of a panel of the picture."""
    bars = {}
    for name in protocol.settings():
        found = protocol.estimate(aggregate.mean_of_tasks, name, True)
        if found is not None or name in OF_THE_PAPER:
            paper = [protocol.paper.get(name, {}).get(t, (np.nan,))[0] / protocol.scales[t]
                     for t in protocol.tasks]  # fmt: skip
            bars[name] = found, float(np.mean(paper))
    label = "mean return" if protocol.suite == "minigrid" else "mean score / the paper's best"
    return protocol.title.replace(", ", ",\n", 1), label, bars


HOW = f"""\
- **Score**: the mean over the last 10% of a run's evaluations. A cell has the mean ± the standard
  deviation over seeds (of the population, as the paper's), and the number of seeds.
- **Inside, above, below** compare our mean with the paper's mean ± std, with half a unit of its
  last digit for rounding. They describe, they do not test.
- **Normalised**: MinAtar's scores are divided by the highest mean in the paper's table for the
  game. MiniGrid's returns are taken as they are, Atari's scores are in percent of human.
- **Intervals** are 95% percentile intervals of a bootstrap over seeds, by task
  ({aggregate.REPETITIONS:,} samples), of {aggregate.FEWEST_SEEDS} seeds or more. From few seeds
  they are too narrow: were scores normal, those of five seeds would cover the mean of five tasks
  90% of the time and that of one task 84%. IQM is the mean of the middle half of runs.
- **A claim is judged by p**: the chance of so large a difference in its direction if each seed's
  difference had either sign by chance (one-sided paired permutation test, exact up to 40
  differences). Runs with the same seed stay together: in MiniGrid each seed is a layout of its own.
  A sum that is smaller by up to {aggregate.TOLERANCE:.0%} counts as being as large, so that
  differences next to nothing decide nothing. Where a verdict hangs on that, both are given.
  *Supported* and *contradicted* need p <= {aggregate.LEVEL}, else it is *undecided*. With fewer
  than {aggregate.FEWEST_SEEDS} seeds it is *open*. Each claim is judged alone: of twenty between
  equals, about one would be supported and one contradicted.
- **Settings**: what the paper says is the default. Its authors' commands depart from it, and some
  of that is tried. *Persistent* is `--persist-targets`: nested values stay until the next target
  network. *Fixed episode seeds* re-seed the MinAtar game at every episode. *Breadth 0* follows
  every transition in place of a sample. *Frontier* is [exploration with the graph](frontier.md)."""


def claims_table(protocol):
    """The paper's orders of the means, and whether they hold here."""

    def judged(gain):
        if gain is None:
            return "-", "not enough runs"
        verdict, strict = (aggregate.support(gain._replace(p=p)) for p in (gain.p, gain.strict_p))
        text = f"{verdict}, p {chance_text(gain.p)}"
        if strict != verdict:
            text += f" (without the tolerance {strict}, p {chance_text(gain.strict_p)})"
        return interval(gain), text

    has_scales = set(protocol.scales.values()) != {1.0}
    rows = [
        [
            f"{better} > {worse}",
            *(f"{short(mean(better))}, {short(mean(worse))}"
              for mean in (protocol.paper_mean, protocol.mean)),
            *judged(gain), *(judged(scaled) if has_scales else ()),
        ]
        for (better, worse), (gain, scaled) in orders(protocol).items()
    ]  # fmt: skip
    header = ["claim", "paper", "here", "difference", "verdict"]
    return markdown(header + ["normalised", "verdict"] * has_scales, rows)


def verdicts_text(protocol):
    """How many cells of the paper's table agree; "" where it has none."""
    if not protocol.paper:
        return ""
    found = [protocol.verdict(b, task) for b in OF_THE_PAPER for task in protocol.tasks]
    return (
        f"Of {len(found) - found.count('')} means, {found.count('inside')} lie inside the paper's "
        f"mean ± std, {found.count('above')} above and {found.count('below')} below."
    )


def score_table(protocol):
    """Ours and the paper's, a row per setting; of many tasks, a row per task."""
    header = ["", *map(short_task, protocol.tasks), "mean of tasks", "normalised IQM",
              "less the backup alone"]  # fmt: skip
    rows = []
    for name in protocol.settings():
        cells = []
        for task in protocol.tasks:
            verdict = protocol.verdict(name, task)
            cell = cell_text(protocol.scores(name).get(task, {}).values())
            cells.append(f"{cell}, {verdict}" if verdict else cell)
        mean = protocol.estimate(aggregate.mean_of_tasks, name)
        iqm = protocol.estimate(aggregate.interquartile_mean, name, True)
        gain = None if name == backup_of(name) else protocol.gain(name, backup_of(name))
        rows.append([f"**{name}**", *cells, interval(mean), interval(iqm), interval(gain)])
        paper = protocol.paper.get(name, {})
        if paper:
            cells = [f"{short(m)} ± {short(std)}" for m, std in map(paper.get, protocol.tasks)]
            rows.append(["paper", *cells, short(protocol.paper_mean(name)), "", ""])
    if len(protocol.tasks) > 6:
        header, *rows = map(list, zip(header, *rows, strict=True))
    return markdown(header, rows)


def released_text(protocol):
    """n-step, ours and with the released code's update, beside the paper's; in parts."""
    names = ["n-step", *(n for n in protocol.settings() if n.startswith("n-step, depth")),
             *protocol.released()]  # fmt: skip
    rows = []
    for name in names:
        cells = [
            cell_text(protocol.scores(name).get(task, {}).values())
            + (f", {verdict}" if (verdict := protocol.verdict(name, task)) else "")
            for task in protocol.tasks
        ]
        rows.append([name, *cells, short(protocol.mean(name)), short(protocol.distance(name))])
    paper = [protocol.paper["n-step"][task] for task in protocol.tasks]
    rows.append(["paper", *(f"{short(mean)} ± {short(std)}" for mean, std in paper),
                 short(protocol.paper_mean("n-step")), ""])  # fmt: skip
    yield (
        "In the code that the authors released, an n-step return moves the value of the *last* "
        "pair that it reads, and not that of the sampled one. It treats MiniGrid's time limits "
        "otherwise, and its command for MiniGrid has a depth of 10. "
        "`experiments/released_n_step.py` runs it."
    )
    yield markdown(["", *map(short_task, protocol.tasks), "mean of tasks", "distance, normalised"],
                   rows)  # fmt: skip


def shortfall_table(protocol):
    """Where graph is below the paper: what its runs lacked, and what adds to its score."""
    rows = []
    for task in protocol.tasks:
        if protocol.verdict("graph", task) != "below":
            continue
        runs, (mean, std) = protocol.runs["graph"][task].values(), protocol.paper["graph"][task]
        why = aggregate.shortfall(list(runs), mean - std)
        gains = {name: protocol.gain(name, "graph", (task,)) for name in REMEDIES}
        rows.append([
            short_task(task), short(protocol.cell("graph", task).mean), short(mean),
            *map(str, (*why, len(runs) - sum(why))), *map(interval, gains.values()),
            what_helps(why[0], gains),
        ])  # fmt: skip
    header = ["task", "graph", "paper", "no reward met", "met, not learned", "learned, lost",
              "in the paper's range", *(name.removeprefix("graph, ") for name in REMEDIES),
              "what helps"]  # fmt: skip
    return markdown(header, rows) if rows else None


def what_helps(num_without_reward, gains):
    """What graph was short of, as far as the runs tell.

    gains: setting of REMEDIES -> Estimate of what it adds to graph's score, or None.
    """
    support = {name: aggregate.support(gain) for name, gain in gains.items()}
    found = [REMEDIES[name] for name, judged in support.items() if judged == "supported"]
    if num_without_reward:
        found = [name for name in found if name != REMEDIES[FRONTIER]]
        found.append(f"exploration ({count(num_without_reward, 'run')} met no reward)")
    return listed(found) if found else "open" if "open" in support.values() else "none of these"


def seedings_text(fixed, fresh):
    """Which episode seeding of MinAtar reproduces the paper; in parts."""
    rows, means = [], {}
    for protocol in (fixed, fresh):
        found = {name: protocol.distance(name) for name in OF_THE_PAPER}
        if None in found.values():
            yield "Not every backup has been run under both."
            return
        means[protocol.title] = np.mean(list(found.values()))
        ratio = np.mean([protocol.novel_ratio(task) for task in protocol.tasks])
        rows.append([protocol.title, short(means[protocol.title]), *map(short, found.values()),
                     f"{ratio:.3f}"])  # fmt: skip
    yield (
        f"The means under **{min(means, key=means.get)}** are nearer to the paper's. Distance of "
        "normalised means from the paper's, and the novel state ratio of `graph` (paper: 0.298):"
    )
    yield markdown(["", "all", *OF_THE_PAPER, "novel state ratio"], rows)


def section(protocol, folder):
    """Tables and pictures of one protocol."""
    yield f"## {protocol.title}"
    names = OF_THE_PAPER if protocol.paper else protocol.settings()
    numbers = {len(protocol.scores(name).get(t, ())) for name in names for t in protocol.tasks}
    seeds = " to ".join(map(str, sorted({min(numbers), max(numbers)})))
    yield f"Seeds per task and backup: {seeds}. {verdicts_text(protocol)}".strip()
    yield score_table(protocol)
    curves = protocol.curves(protocol.settings())
    if curves:
        name = f"report_{protocol.slug}_curves.png"
        report_figures.draw_curves(folder / name, curves)
        yield f"![Learning curves, {protocol.title}]({name})"
        yield "Mean of the seeds and its standard error, over five evaluations."
    if protocol.released():
        yield "### n-step as the authors released it"
        yield from released_text(protocol)
    short_of = shortfall_table(protocol)
    if short_of is not None:
        yield "### Where graph is below the paper"
        yield (
            "Its runs by what they lacked of the paper's mean - std, and what three changes add to "
            "its mean. *No reward met* is for want of exploration. *Met, not learned*: no mean of "
            "five evaluations reached it. *Learned, lost*: one did, but the score is below it."
        )
        yield short_of


def report(protocols, folder, short_text):
    """The report's Markdown, in parts; draws its pictures into the folder."""
    runs = [run for p in protocols for run in p.of_all(*p.runs) if "commit" in run]
    yield "# Does it reproduce?"
    yield short_text
    yield (
        f"Written by `python tools/report.py` from the rows of {count(len(runs), 'run')}, made in "
        f"{sum(run['wall_seconds'] for run in runs) / 3600:,.1f} hours by the code at "
        f"{listed(sorted({run['commit'] or 'an unknown commit' for run in runs}))}."
    )
    yield "## How to read it"
    yield HOW
    claimed = [p for p in protocols if p.paper]
    if claimed:
        yield "## The paper's claims"
    for protocol in claimed:
        yield f"**{protocol.title}**"
        yield claims_table(protocol)
    pair = [p for p in protocols if p.suite == "minatar"]
    if len(pair) == 2:
        yield "## Which episode seeding reproduces the paper's MinAtar"
        yield from seedings_text(*pair)
    for protocol in protocols:
        yield from section(protocol, folder)
    yield "## Novel state ratio"
    yield (
        "Distinct states acted in per step of `graph`. The paper's means: MiniGrid 0.006, "
        "MinAtar 0.298, Atari 0.927."
    )
    yield markdown(["", "mean", "by task"], [
        [p.title, f"{np.mean(list(ratios.values())):.3f}",
         ", ".join(f"{short_task(task)} {ratio:.3f}" for task, ratio in ratios.items())]
        for p in protocols
        if (ratios := {t: p.novel_ratio(t) for t in p.tasks if not np.isnan(p.novel_ratio(t))})
    ])  # fmt: skip


def replace_block(path, name, parts):
    """Put parts between the two markers of that name in a page."""
    begin, end = f"<!-- {name}: python tools/report.py -->", f"<!-- end of {name} -->"
    content = path.read_text()
    if content.count(begin) != 1 or content.count(end) != 1:
        raise ValueError(f"{path} has no {begin!r} and {end!r} to write between")
    head, rest = content.split(begin)
    path.write_text(f"{head}{begin}\n" + "\n\n".join(parts) + f"\n{end}{rest.split(end)[1]}")


def main():
    args = tyro.cli(Args)
    is_ours = args.results_dir.resolve() == RESULTS and args.out is None
    out = args.out or (ROOT / "docs" if is_ours else args.results_dir) / "report.md"
    try:
        protocols = read_protocols(args.results_dir)
        if not protocols:
            fail(f"no rows in {args.results_dir}; tools/sweep.py makes them")
        out.parent.mkdir(parents=True, exist_ok=True)
        short_parts = list(in_short(protocols, out.parent))
        parts = report(protocols, out.parent, "\n\n".join(short_parts))
        out.write_text("\n\n".join(parts) + "\n")
        if is_ours:
            of_readme = [part.replace("](report_", "](docs/report_") for part in short_parts]
            replace_block(ROOT / "README.md", "results", of_readme)
            page, more = ROOT / "docs" / "frontier.md", read_protocols(RESULTS / "more_seeds")
            replace_block(page, "findings", frontier_tables.in_short(protocols, page.parent))
            replace_block(page, "tables", frontier_tables.tables(protocols, more))
    except (OSError, ValueError, KeyError) as error:
        fail(error)
    print("wrote", out, *(["README.md docs/frontier.md"] if is_ours else []))


if __name__ == "__main__":
    main()
