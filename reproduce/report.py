"""Write docs/report.md, the tables of docs/frontier.md and the README's results from results/*.csv.

    python reproduce/report.py
    python reproduce/report.py --results-dir runs/results    # your own: runs/results/report.md

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
from folders import RESULTS, ROOT
from output import fail, markdown
from run_records import script_of
from tables import (
    ATARI,
    FRONTIER,
    OF_THE_PAPER,
    RELEASED,
    SAME_RATE,
    WHOLE,
    backup_of,
    chance_text,
    interval,
    read_protocols,
    short,
    short_task,
)


@dataclass
class Args:
    results_dir: Path = RESULTS
    """where the rows are; of others than the repository's, the report is written beside them"""


def orders(protocol):
    """(better, worse) by the paper -> the difference here, where both were run."""
    ranked = sorted(OF_THE_PAPER, key=protocol.paper_mean, reverse=True) if protocol.paper else ()
    found = {pair: protocol.gain(*pair) for pair in itertools.combinations(ranked, 2)}
    return {pair: gain for pair, gain in found.items() if gain is not None}


def claims(protocol):
    """The paper's orders, and the whole graph against its backups, also at the same rate."""
    others = [n for n in protocol.settings() if n in OF_THE_PAPER or n.endswith(SAME_RATE)]
    ours = {(WHOLE, name): protocol.gain(WHOLE, name) for name in others}
    return orders(protocol) | {pair: gain for pair, gain in ours.items() if gain is not None}


def first_order(protocol):
    """Whether the paper's first order of the means holds here; the others: `claims_table`."""
    for pair, gain in itertools.islice(orders(protocol).items(), 1):
        return f" {' > '.join(pair)} is {aggregate.support(gain)}.".replace("is supported", "holds")
    return ""


def findings(protocols):
    """The README's bullets: MiniGrid, MinAtar, exploration and Atari, as far as there are rows."""
    million = "MinAtar, 1,000,000 steps"
    for name, suite in (("MiniGrid", "minigrid"), ("MinAtar", "minatar"), (million, "minatar-1m")):
        names, parts = (WHOLE,) * (name == million) + OF_THE_PAPER[::-1], []
        for p in (p for p in protocols if p.suite == suite):
            ran = [b for b in names if p.mean(b) is not None]
            if not (seeds := min(map(len, p.shared_seeds(*ran)), default=0)):
                continue
            ours = dict(zip(ran, p.means(*ran), strict=True))  # on the seeds that all of them have
            told = [f"`{b}` {short(ours.get(b))} ({short(p.paper_mean(b))})" for b in names]
            told = ", ".join(told).replace("` - (", "` (").replace(" (-)", "")  # what is not there
            where = p.title.removeprefix(name).removeprefix(", ").capitalize() or "Here"
            text = f"{where}, {seeds} seed{'s' * (seeds != 1)}: {told}."
            parts.append(text + first_order(p))
        if parts:
            yield f"- **{name}**, mean score, in brackets the paper's. {' '.join(parts)}"
    for name, setting, without in (
        ("Frontier exploration**, mean score of `graph` without and with", FRONTIER, "graph"),
        ("The whole graph**, mean score of `tree` and of `graph, whole`", WHOLE, "tree"),
        ("At the same learning rate**, `tree` and `graph, whole`", WHOLE, "tree" + SAME_RATE),
    ):
        if found := "; ".join(frontier_tables.findings(protocols, setting, without)):
            yield f"- **{name}: {found}."
    yield from filter(None, (atari_finding(p) for p in protocols if p.suite == ATARI))


def atari_finding(protocol):
    """The bullet of Atari's games; None without a run of the paper's backups."""
    games, runs = {}, []
    for game, name in itertools.product(protocol.tasks, OF_THE_PAPER[::-1]):
        if of := protocol.of(name, game):
            ours, paper = mean_of(of, "game_score"), of_the_paper(protocol, name, game)
            games.setdefault(game, []).append(f"`{name}` {ours:,.1f} ({paper:,.1f})")
            runs.append(of)
    if not runs:
        return None
    told = "; ".join(f"{game}: {', '.join(scores)}" for game, scores in games.items())
    seeds = " to ".join(map(str, sorted({min(map(len, runs)), max(map(len, runs))})))
    all_runs = list(itertools.chain(*runs))
    precision = {0: "", 1: ", in bfloat16"}.get(mean_of(all_runs, "bf16"), ", some in bfloat16")
    return (
        f"- **Atari 100K**, {len(games)} of 26 games, {seeds} seed{'s' * (seeds != '1')}, mean "
        f"game score, in brackets the paper's, {hours(all_runs):.1f} h per run{precision}. {told}."
    )


def of_the_paper(protocol, setting, game):
    """The paper's score of an Atari game, which is so many percent of human."""
    low, high = script_of(ATARI).REFERENCE_SCORES[game]
    return low + protocol.paper[setting][game][0] / 100 * (high - low)


def mean_of(runs, name):
    return np.mean([run[name] for run in runs]) if runs else np.nan


def hours(runs):
    return mean_of(runs, "wall_seconds") / 3600


def in_short(protocols, folder):
    """What the README shows, too: a picture and bullets, in parts."""
    panels = [panel(p) for p in protocols if p.paper and p.suite != ATARI]
    panels = [parts for parts in panels if any(found for found, _ in parts[2].values())]
    if panels:
        report_figures.draw_summary(folder / "report_summary.png", panels)
        yield "![Mean scores of every backup, ours and the paper's](report_summary.png)"
        yield (
            "Bars: mean of the tasks, 95% interval; pale: fewer than "
            f"{aggregate.FEWEST_SEEDS} seeds. Diamonds: the paper. "
            "Normalised: divided by the paper's best."
        )
    yield "\n".join(findings(protocols))


def panel(protocol):
    """Title, label and setting -> (Estimate, the paper's mean or nan) of a panel of the picture."""
    bars = {}
    for name in dict.fromkeys((*OF_THE_PAPER, *protocol.settings())):
        found = protocol.estimate(aggregate.mean_of_tasks, name, True)
        if name in OF_THE_PAPER or (found is not None and not name.endswith(RELEASED)):
            bars[name] = found, protocol.paper_mean(name, normalised=True)
    label = "mean score / the paper's best" if protocol.scales else "mean return"
    return protocol.title.replace(", ", ",\n"), label, bars


def claims_table(protocol):
    """The paper's orders of the means, and whether they hold here."""

    def judged(gain):
        verdict, strict = (aggregate.support(gain._replace(p=p)) for p in (gain.p, gain.strict_p))
        text = f"{verdict}, p {chance_text(gain.p)}"
        if strict != verdict:
            text += f" (without the tolerance {strict}, p {chance_text(gain.strict_p)})"
        return interval(gain), text

    rows = [
        [
            " > ".join(pair),
            ", ".join(map(short, map(protocol.paper_mean, pair))),
            f"{', '.join(map(short, protocol.means(*pair)))} ({gain.seeds})",
            *judged(gain),
            *(judged(protocol.gain(*pair, normalised=True)) if protocol.scales else ()),
        ]
        for pair, gain in claims(protocol).items()
    ]  # fmt: skip
    header = ["claim", "paper", "here (seeds of both)", "difference", "verdict"]
    return markdown(header + ["normalised", "verdict"] * bool(protocol.scales), rows)


def verdicts_text(protocol):
    """How many cells of the paper's table agree; "" where nothing can be compared."""
    found = [protocol.verdict(b, task) for b in OF_THE_PAPER for task in protocol.tasks]
    if not any(found):
        return ""
    return (
        f"Of {len(found) - found.count('')} means: {found.count('inside')} inside the paper's "
        f"mean ± std, {found.count('above')} above, {found.count('below')} below."
    )


def score_table(protocol):
    """Ours and the paper's, a row per setting."""
    header = ["", *map(short_task, protocol.tasks), "mean of tasks", "normalised IQM",
              "gain over the backup alone"]  # fmt: skip
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
    ratios = [mean_of(protocol.of("graph", task), "novel_state_ratio") for task in protocol.tasks]
    cells = [f"{ratio:.3f}".replace("nan", "-") for ratio in (*ratios, np.mean(ratios))]
    return markdown(header, [*rows, ["novel state ratio of graph", *cells, "", ""]])


def paper_text(mean, std):
    return f"{short(mean)} ± {short(std)}"


def games_table(protocol):
    """Atari's: a row per game and setting that was run."""
    rows = []
    for game, name in itertools.product(protocol.tasks, protocol.settings()):
        runs, paper = protocol.of(name, game), protocol.paper.get(name)
        if runs:
            rows.append([
                game, name, "bfloat16" if runs[0]["bf16"] else "float32",
                f"{mean_of(runs, 'game_score'):,.1f}",
                f"{of_the_paper(protocol, name, game):,.1f}" if paper else "-",
                protocol.cell(name, game), paper_text(*paper[game]) if paper else "-",
                f"{mean_of(runs, 'novel_state_ratio'):.3f}",
                f"{mean_of(runs, 'steps_per_second'):.1f}", f"{hours(runs):.1f}",
            ])  # fmt: skip
    header = ["game", "setting", "network in", "game score", "paper", "% of human", "paper",
              "novel state ratio", "steps/s", "hours per run"]  # fmt: skip
    return markdown(header, rows)


def section(protocol, folder):
    """Tables and pictures of one protocol."""
    is_atari = protocol.suite == ATARI
    yield f"## {protocol.title}"
    if verdicts := verdicts_text(protocol):
        yield verdicts
    yield games_table(protocol) if is_atari else score_table(protocol)
    curves = protocol.curves(protocol.settings())
    if curves:
        name = f"report_{protocol.slug}_curves.png"
        report_figures.draw_curves(folder / name, curves)
        yield f"![Learning curves, {protocol.title}]({name})"
        over = "" if is_atari else ", over five evaluations"
        yield (
            f"Lines: mean of the seeds{over}; bands: its standard error. Dashed: one seed. "
            "Dotted: a backup with other flags."
        )


def origin(protocols):
    runs = [run for p in protocols for of in p.runs.values() for run in of.values()]
    runs = [run for run in runs if "commit" in run]
    commits = sorted({run["commit"] or "an unknown commit" for run in runs})
    return (
        f"Written by `python reproduce/report.py` from the rows of {len(runs)} runs, made in "
        f"{hours(runs) * len(runs):,.1f} hours by the code at {', '.join(commits)}."
    )


def tables(protocols, folder):
    """All tables, in parts; draws the learning curves into the folder."""
    claimed = [p for p in protocols if claims(p)]
    if claimed:
        yield "## The paper's claims"
    for protocol in claimed:
        yield f"**{protocol.title}**"
        yield claims_table(protocol)
    for protocol in protocols:
        yield from section(protocol, folder)


def replace_block(path, name, parts):
    """Put parts between the two markers of that name in a page."""
    begin, end = f"<!-- {name}: python reproduce/report.py -->", f"<!-- end of {name} -->"
    content = path.read_text()
    if content.count(begin) != 1 or content.count(end) != 1:
        raise ValueError(f"{path} has no {begin!r} and {end!r} to write between")
    head, rest = content.split(begin)
    path.write_text(f"{head}{begin}\n" + "\n\n".join(parts) + f"\n{end}{rest.split(end)[1]}")


def main():
    args = tyro.cli(Args, description=__doc__)
    docs, is_ours = ROOT / "docs", args.results_dir.resolve() == RESULTS
    try:
        protocols = read_protocols(args.results_dir)
        if not protocols:
            fail(f"no rows in {args.results_dir}; reproduce/sweep.py makes them")
        folder = docs if is_ours else args.results_dir
        short_parts = list(in_short(protocols, folder))
        head, parts = [*short_parts, origin(protocols)], tables(protocols, folder)
        if not is_ours:
            how = f"How to read it: {docs / 'report.md'}"
            text = "\n\n".join(["# Does it reproduce?", *head, how, *parts])
            (folder / "report.md").write_text(text + "\n")
        else:
            page, more = docs / "frontier.md", read_protocols(RESULTS / "more_seeds")
            replace_block(docs / "report.md", "findings", head)
            replace_block(docs / "report.md", "tables", parts)
            replace_block(page, "findings", frontier_tables.in_short(protocols, docs))
            replace_block(page, "tables", frontier_tables.tables(protocols, more))
            of_readme = [part.replace("](report_", "](docs/report_") for part in short_parts]
            replace_block(ROOT / "README.md", "results", of_readme)
    except KeyError as error:
        fail(f"a CSV file in {args.results_dir} has no column {error}")
    except (OSError, ValueError) as error:
        fail(error)
    print("wrote", folder / "report.md", *(["README.md docs/frontier.md"] if is_ours else []))


if __name__ == "__main__":
    main()
