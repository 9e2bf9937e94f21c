"""Write docs/report.md, its pictures and the README's results from results/*.csv alone.

    pip install -r requirements-sweep.txt
    python tools/report.py

Every number and every judgement in the report is computed from the rows that are there, also
where the grid is not complete yet.
"""

import contextlib
import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from output import fail, read_rows
from run_records import ROOT, SUITES, Records

try:
    import aggregate
    import report_figures
except ImportError as missing:
    fail(f"no {missing.name}: pip install -r requirements-sweep.txt")

PAPER = ROOT / "results" / "paper"
RESULTS = ROOT / "results"
BEGIN, END = "<!-- results: python tools/report.py -->", "<!-- end of results -->"

# Columns of the tables: (backup, variant) of the rows -> name.
COLUMNS = {
    ("one-step", ""): "one-step",
    ("n-step", ""): "n-step",
    ("tree", ""): "tree",
    ("graph", ""): "graph",
    ("graph-mixed", ""): "graph-mixed",
    ("graph", "breadth=0"): "graph, breadth 0",
    ("graph", "persist_targets=True"): "graph, persistent",
}
OF_THE_PAPER = ("one-step", "n-step", "tree", "graph")

# Rows of released_n_step.py: (update, depth) -> name. No columns of the tables.
N_STEPS = {
    ("released", "5"): "n-step, as released, depth 5",
    ("released", "10"): "n-step, as released, depth 10",
    ("paper", "10"): "n-step, depth 10",
}

# Changes to graph, of which one may raise its score. Frontier episodes are no column of the tables.
FRONTIER = "graph, frontier"
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
    readme: Path | None = None
    """where results between two markers are replaced; README.md if all else is left alone"""


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)  # hashed by identity, for the cache of summary_rows
class Protocol:
    """The rows of one suite and one episode seeding, and what the paper has for it."""

    suite: str
    episode_seed: str
    title: str
    tasks: list
    cells: dict  # column -> task -> {seed: row}; a row is a dict with numbers, and its curve
    paper: dict  # column -> task -> (mean, std)
    scales: dict  # task -> (score that counts as 0, score that counts as 1)
    metric: str  # what the normalised scores are

    @property
    def slug(self):
        return "_".join(filter(None, (self.suite.replace("-", "_"), self.episode_seed)))

    @property
    def columns(self):
        """Those of the paper, and those that have rows."""
        return [c for c in COLUMNS.values() if c in OF_THE_PAPER or c in self.cells]

    def scores(self, column):
        """task -> {seed: score}."""
        cells = self.cells.get(column, {})
        return {t: {s: r["score"] for s, r in seeds.items()} for t, seeds in cells.items()}

    def matrix(self, column, normalised=True):
        """Scores [runs, tasks]; None until every task has a run."""
        return self.as_matrix(self.scores(column), normalised=normalised)

    def as_matrix(self, table, tasks=None, normalised=True):
        """Those of a score table."""
        tasks = tasks or self.tasks
        scales = self.scales if normalised else dict.fromkeys(tasks, (0.0, 1.0))
        return aggregate.score_matrix(table, tasks, scales)

    def matrices(self, columns, tasks=None, normalised=True):
        """Those of two columns, on the seeds that both have."""
        tables = aggregate.on_the_same_seeds(*map(self.scores, columns))
        return [self.as_matrix(table, tasks, normalised) for table in tables]


TITLES = {
    ("minigrid", ""): "MiniGrid",
    ("minatar", "fixed"): "MinAtar, fixed episode seeds",
    ("minatar", "fresh"): "MinAtar, fresh episodes",
    ("minatar-1m", "fixed"): "MinAtar, 1,000,000 steps, fixed episode seeds",
    ("minatar-1m", "fresh"): "MinAtar, 1,000,000 steps, fresh episodes",
    ("atari100k", ""): "Atari 100K",
}


def read_paper():
    """suite -> column -> task -> (mean, std)."""
    found = {}
    for row in read_rows(PAPER / "paper_results.csv"):
        if row["metric"] != "raw_score":
            columns = found.setdefault(row["suite"], {})
            cell = float(row["mean"]), float(row["std"])
            columns.setdefault(row["backup"], {})[row["task"]] = cell
    for columns in found.values():
        columns |= dict.fromkeys(N_STEPS.values(), columns["n-step"])
    return found


def read_protocols(results_dir):
    """Every protocol that has rows, and the number of rows that no column shows."""
    records, paper, found, left_out = Records(results_dir), read_paper(), {}, 0
    human = {
        row["game"]: (float(row["random"]), float(row["human"]))
        for row in read_rows(PAPER / "atari_reference_scores.csv")
    }
    for suite in SUITES:
        if suite not in paper:
            continue
        rows, curves = records.rows(suite), records.curves(suite)
        for key, text in rows.items():
            column = COLUMNS.get((key.backup, key.variant))
            if key.variant.startswith("exploration="):
                if (key.backup, key.variant) != ("graph", "exploration=frontier"):
                    continue  # shown by frontier_report.py
                column = FRONTIER
            if column is None:
                left_out += 1
                continue
            protocol = found.setdefault(
                (suite, key.episode_seed), new_protocol(suite, key.episode_seed, paper)
            )
            row = {name: number(text[name]) for name in (
                "score", "steps", "wall_seconds", "novel_state_ratio", "states",
                "first_reward_step")}  # fmt: skip
            row |= {"commit": text["commit"], "curve": curves.get(key, {})}
            if suite == "atari100k":  # the paper's tables are in percent of human
                low, high = human[key.task]
                row["score"] = 100 * (row["score"] - low) / (high - low)
            seeds = protocol.cells.setdefault(column, {}).setdefault(key.task, {})
            seeds[key.seed] = row
    with contextlib.suppress(FileNotFoundError):
        for text in read_rows(Path(results_dir) / "released_n_step.csv"):
            protocol = found.get((text["suite"], text["episode_seed"]))
            column = N_STEPS.get((text["update"], text["depth"]))
            if protocol is not None and column is not None:
                seeds = protocol.cells.setdefault(column, {}).setdefault(text["task"], {})
                seeds[int(text["seed"])] = {"score": float(text["score"]), "curve": {}}
    return [found[key] for key in TITLES if key in found], left_out


def new_protocol(suite, episode_seed, paper):
    numbers = paper[suite]
    tasks = list(numbers["graph"])
    if suite == "minigrid":
        scales, metric = dict.fromkeys(tasks, (0.0, 1.0)), "return"
    elif suite == "atari100k":
        scales, metric = dict.fromkeys(tasks, (0.0, 100.0)), "human-normalised score"
    else:
        best = {t: max(numbers[b][t][0] for b in OF_THE_PAPER) for t in tasks}
        scales, metric = {t: (0.0, best[t]) for t in tasks}, "score / the paper's best"
    return Protocol(suite, episode_seed, TITLES[suite, episode_seed], tasks, {}, numbers, scales,
                    metric)  # fmt: skip


def number(text):
    """A float; None of an empty field."""
    return float(text) if text else None


# --------------------------------------------------------------------------------------------------
# Words and tables
# --------------------------------------------------------------------------------------------------


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def short(value):
    """Two decimals; no minus sign before zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def interval(estimate):
    """0.58 [0.40, 0.71]."""
    if estimate is None:
        return "-"
    if np.isnan(estimate.low):
        return short(estimate.value)  # of few seeds
    return f"{short(estimate.value)} [{short(estimate.low)}, {short(estimate.high)}]"


def short_task(task):
    return re.sub(r"-v\d+$", "", task.removeprefix("MiniGrid-"))


def count(n, noun):
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def cell_text(summary):
    """0.38 ± 0.47 (5); of one seed 0.96 (1)."""
    if summary is None:
        return "-"
    spread = f" ± {short(summary.std)}" if summary.number > 1 else ""
    return f"{short(summary.mean)}{spread} ({summary.number})"


def cell_summary(protocol, column, task):
    return aggregate.summary(protocol.scores(column).get(task, {}).values())


def cell_verdict(protocol, column, task):
    """inside, above, below; None without runs or without the paper's number."""
    ours, paper = cell_summary(protocol, column, task), paper_cell(protocol, column, task)
    return aggregate.verdict(ours.mean, *paper) if ours and paper else None


def paper_cell(protocol, column, task):
    return protocol.paper.get(column, {}).get(task)


def seeds_text(protocol):
    """5 seeds; 1 to 5 seeds; with what is missing of the paper's grid."""
    numbers = [len(protocol.scores(c).get(t, ())) for c in OF_THE_PAPER for t in protocol.tasks]
    low, high = min(numbers), max(numbers)
    text = count(high, "seed") if low == high else f"{low} to {high} seeds"
    return f"{text} per task and backup"


def task_table(protocol):
    """Ours beside the paper's, one row per task and backup of the paper."""
    header = ["task", *(c for c in protocol.columns)]
    rows = []
    for task in protocol.tasks:
        if not any(task in cells for cells in protocol.cells.values()):
            continue
        ours, theirs = [f"**{short_task(task)}**"], ["paper"]
        for column in protocol.columns:
            cell, paper = cell_summary(protocol, column, task), paper_cell(protocol, column, task)
            verdict = cell_verdict(protocol, column, task)
            ours.append(cell_text(cell) + (f", {verdict}" if verdict else ""))
            theirs.append("" if paper is None else f"{short(paper[0])} ± {short(paper[1])}")
        rows += [ours, theirs]
    return markdown(header, rows)


@functools.cache  # a quarter of the report's time, and both its parts show them
def summary_rows(protocol):
    """Per backup: mean, median over tasks, ours and the paper's, and the interquartile mean."""
    rows = []
    for column in protocol.columns:
        raw = protocol.matrix(column, normalised=False)
        means = None if raw is None else raw.mean(axis=0)
        paper = [paper_cell(protocol, column, task) for task in protocol.tasks]
        paper = None if None in paper else [mean for mean, _ in paper]
        graph = protocol.matrices(("graph", column), normalised=False)[0]
        same_seeds = graph is not None and len(graph) == len(raw)
        rows.append([
            column,
            "-" if raw is None else str(len(raw)),
            "-" if means is None else short(means.mean()),
            "" if paper is None else short(np.mean(paper)),
            short(graph.mean()) if same_seeds else "-",
            "-" if means is None else short(np.median(means)),
            "" if paper is None else short(np.median(paper)),
            interval(estimate(aggregate.mean, protocol.matrix(column))),
            interval(estimate(aggregate.interquartile_mean, protocol.matrix(column))),
        ])  # fmt: skip
    return rows


SUMMARY_HEADER = ["backup", "seeds", "mean of tasks", "paper", "graph, same seeds",
                  "median of tasks", "paper", "normalised mean [95%]",
                  "normalised IQM [95%]"]  # fmt: skip
SAME_SEEDS = SUMMARY_HEADER.index("graph, same seeds")


def summary_table(protocols, chosen, with_title):
    """Some columns of summary_rows; graph's on the same seeds only where a backup has fewer."""
    if not any(map(has_fewer_seeds, protocols)):
        chosen = [i for i in chosen if i != SAME_SEEDS]
    header, rows = [SUMMARY_HEADER[i] for i in chosen], []
    for protocol in protocols:
        title = [protocol.title] if with_title else []
        rows += [[*title, *(row[i] for i in chosen)] for row in summary_rows(protocol)]
    return markdown(["suite", *header] if with_title else header, rows)


def has_fewer_seeds(protocol):
    """Whether a backup has fewer seeds than graph."""
    graph = protocol.matrix("graph")
    shared = [protocol.matrices(("graph", column))[0] for column in protocol.columns]
    return any(matrix is not None and len(matrix) < len(graph) for matrix in shared)


def estimate(statistic, *matrices):
    """None until every matrix is there."""
    if any(matrix is None for matrix in matrices):
        return None
    return aggregate.estimate(statistic, *matrices)


def difference(pair, weights=None):
    """None until both matrices are there."""
    if any(matrix is None for matrix in pair):
        return None
    return aggregate.difference(*pair, weights)


def judged(gain):
    """0.58 [0.40, 0.71], p = 0.010: supported; and what gains next to nothing would change."""
    verdict, strict = (aggregate.support(gain._replace(p=p)) for p in (gain.p, gain.strict_p))
    text = f"{interval(gain)}, p {chance_text(gain.p)}: {verdict}"
    if strict != verdict:
        text += f" (without the tolerance p {chance_text(gain.strict_p)}: {strict})"
    return text


def chance_text(p):
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def released_columns(protocol):
    return [column for column in N_STEPS.values() if column in protocol.cells]


def released_text(protocol):
    """n-step, ours and with the released code's update, beside the paper's; in parts."""
    rows, columns = [], ["n-step", *released_columns(protocol)]
    for task in protocol.tasks:
        cells = []
        for column in columns:
            verdict = cell_verdict(protocol, column, task)
            cells.append(cell_text(cell_summary(protocol, column, task)))
            cells[-1] += f", {verdict}" if verdict else ""
        mean, std = paper_cell(protocol, "n-step", task)
        rows.append([short_task(task), *cells, f"{short(mean)} ± {short(std)}"])
    means, distances_of, inside = [], [], []
    for column in columns:
        matrix = protocol.matrix(column, normalised=False)
        cells = [(column, task) for task in protocol.tasks]
        means.append("-" if matrix is None else short(matrix.mean()))
        distances_of.append("-" if matrix is None else short(distance(protocol, cells)))
        inside.append(f"{verdict_counts(protocol, cells)['inside']} of `{column}`")
    paper = np.mean([paper_cell(protocol, "n-step", task)[0] for task in protocol.tasks])
    rows.append(["**mean of tasks**", *means, short(paper)])
    rows.append(["mean distance, normalised", *distances_of, ""])
    yield (
        "In the code that the authors released for MiniGrid and MinAtar, an n-step return moves "
        "the value of the *last* pair that it reads in place of the sampled one's, and treats "
        "MiniGrid's time limits otherwise; its command for MiniGrid has a depth of 10. "
        "`experiments/released_n_step.py` says what that is, and runs it. Inside the paper's mean "
        f"± std are {', '.join(inside)}."
    )
    yield markdown(["task", *columns, "paper"], rows)


def improvement_table(protocol):
    """P(graph > other), and the difference of the normalised means."""
    rows = []
    for column in protocol.columns:
        if column != "graph":
            pair = protocol.matrices(("graph", column))
            rows.append([
                column,
                interval(estimate(aggregate.probability_of_improvement, *pair)),
                interval(difference(pair)),
            ])  # fmt: skip
    return markdown(["graph against", "P(improvement) [95%]", "normalised mean, difference [95%]"],
                    rows)  # fmt: skip


@functools.cache
def orderings(protocol):
    """(better, worse) by the paper -> the paper's means of tasks; ours.

    Ours are None until both have runs of every task, then the means, the Estimate of their
    difference, and that of normalised scores; None where scores are taken as they are.
    """
    paper = {
        c: np.mean([paper_cell(protocol, c, task)[0] for task in protocol.tasks])
        for c in OF_THE_PAPER
    }
    found = {}
    for names in itertools.combinations(sorted(paper, key=paper.get, reverse=True), 2):
        pair = protocol.matrices(names, normalised=False)
        gain, scaled = difference(pair), None
        if any(scale != (0.0, 1.0) for scale in protocol.scales.values()):
            scaled = difference(protocol.matrices(names))
        ours = None if gain is None else ([matrix.mean() for matrix in pair], gain, scaled)
        found[names] = [paper[name] for name in names], ours
    return found


def order_claims(protocol):
    """A sentence per pair of backups that the paper's means order."""
    for (better, worse), (theirs, ours) in orderings(protocol).items():
        claim = (
            f"**{better} > {worse}** in the mean (paper: {short(theirs[0])} and {short(theirs[1])})"
        )
        if ours is None:
            yield f"- {claim}: not enough runs yet."
            continue
        means, gain, scaled = ours
        text = f"{short(means[0])} and {short(means[1])}, difference {judged(gain)}"
        if scaled is not None:
            text += f"; of normalised scores {judged(scaled)}"
        yield f"- {claim}: {text} ({count(gain.seeds, 'seed')})."


def orders_in_short(protocol):
    """One sentence: which orders of the paper's means hold here."""
    found = {}
    for (better, worse), (_, ours) in orderings(protocol).items():
        _, gain, scaled = ours or (None, None, None)
        name = aggregate.support(gain) if gain else "open"
        order = f"{better} > {worse}"
        if scaled and aggregate.support(scaled) != name:
            order += f" (of normalised scores {aggregate.support(scaled)})"
        found.setdefault(name, []).append(order)
    parts = [
        f"{', '.join(found[name])} {name}"
        for name in ("supported", "contradicted", "undecided", "open") if name in found
    ]  # fmt: skip
    return f"The paper's orders of the means: {'; '.join(parts)}."


def freeway_claim(protocol):
    """Is graph's lead over tree mostly freeway's?"""
    others = [task for task in protocol.tasks if task != "freeway"]
    tasks = ["freeway", *others]
    pair = protocol.matrices(("graph", "tree"), tasks, normalised=False)
    claim = "**Freeway as the main contributor** to graph's lead over tree"
    paper = [
        paper_cell(protocol, "graph", t)[0] - paper_cell(protocol, "tree", t)[0] for t in tasks
    ]
    claim += f" (paper: {paper[0]:+.2f} in Freeway, {sum(paper[1:]):+.2f} in the other four)"
    if any(matrix is None for matrix in pair):
        return f"- {claim}: not enough runs yet."

    in_freeway = np.array([1.0, *(0.0 for _ in others)])
    freeway = difference(pair, in_freeway)
    rest = difference(pair, 1 - in_freeway)
    lead = difference(pair, 2 * in_freeway - 1)
    support = aggregate.support(lead)
    if freeway.value + rest.value <= 0:
        support = "graph has no lead here"
    elif support == "supported" != aggregate.support(freeway):
        support = "undecided"
    return (
        f"- {claim}: {interval(freeway)} in Freeway, {interval(rest)} in the other four; the first "
        f"less the second {interval(lead)}, p {chance_text(lead.p)}: {support} "
        f"({count(lead.seeds, 'seed')})."
    )


def verdict_counts(protocol, cells):
    verdicts = [cell_verdict(protocol, *cell) for cell in cells]
    return {name: verdicts.count(name) for name in ("inside", "above", "below")}


def shown_verdicts(protocol):
    """One sentence: how many cells of the paper's table agree."""
    cells = [(c, t) for c in OF_THE_PAPER for t in protocol.tasks if cell_summary(protocol, c, t)]
    counts = verdict_counts(protocol, cells)
    return (
        f"Of {len(cells)} means, {counts['inside']} lie inside the paper's mean ± std, "
        f"{counts['above']} above and {counts['below']} below."
    )


def shortfalls(protocol, column):
    """task -> what its runs lacked, where their mean is below the paper's mean ± std of graph."""
    found = {}
    for task, seeds in protocol.cells.get(column, {}).items():
        paper = paper_cell(protocol, "graph", task)
        ours = cell_summary(protocol, column, task)
        if paper and aggregate.verdict(ours.mean, *paper) == "below":
            rows, (mean, std) = list(seeds.values()), paper
            found[task] = aggregate.shortfall(rows, [row["curve"] for row in rows], mean - std)
    return found


def shortfall_table(protocol):
    """For every graph cell below the paper, what its runs lacked. None if there is no such cell."""
    rows = []
    for column in (c for c in protocol.columns if c.startswith("graph")):
        found = shortfalls(protocol, column)
        for task in (task for task in protocol.tasks if task in found):
            ours, why = cell_summary(protocol, column, task), found[task]
            rows.append([
                short_task(task), column, f"{short(ours.mean)} ({ours.number})",
                short(paper_cell(protocol, "graph", task)[0]),
                str(why.no_reward), str(why.never_learned), str(why.lost), str(why.fine),
                "none" if np.isinf(why.first_reward) else f"{why.first_reward:,.0f}",
                f"{why.states:,.0f}",
            ])  # fmt: skip
    header = ["task", "backup", "ours", "paper", "no reward met", "met, not learned",
              "learned, lost", "in the paper's range", "first reward at step",
              "states"]  # fmt: skip
    return markdown(header, rows) if rows else None


def remedy_table(protocol):
    """For every task where graph is below the paper: by how much, and what adds to its score.

    None if there is no such task.
    """
    found, rows = shortfalls(protocol, "graph"), []
    for task in (task for task in protocol.tasks if task in found):
        gains = {
            column: difference(protocol.matrices((column, "graph"), [task], normalised=False))
            for column in REMEDIES
        }
        missing = (
            paper_cell(protocol, "graph", task)[0] - cell_summary(protocol, "graph", task).mean
        )
        rows.append([
            short_task(task), short(missing),
            *(interval(gain) + (f" ({gain.seeds})" if gain else "") for gain in gains.values()),
            what_helps(found[task], gains),
        ])  # fmt: skip
    header = ["task", "below by", *(c.removeprefix("graph, ") for c in REMEDIES), "what helps"]
    return markdown(header, rows) if rows else None


def what_helps(why, gains):
    """What graph was short of, as far as the runs tell.

    Args:
        why: the Shortfall of graph's runs.
        gains: column of REMEDIES -> Estimate of what it adds to graph's score, or None.
    """
    support = {c: aggregate.support(gain) if gain else "open" for c, gain in gains.items()}
    found = [REMEDIES[column] for column, judged in support.items() if judged == "supported"]
    if why.no_reward:
        found = [name for name in found if name != REMEDIES[FRONTIER]]
        found.append(f"exploration ({count(why.no_reward, 'run')} met no reward)")
    if found:
        return " and ".join(found)
    return "open" if "open" in support.values() else "none of these"


def exploration_text(protocol):
    """How many runs met a reward, and how many of those solved the task. Of returns within [0, 1].

    Solved: a score of SOLVED or more of the best evaluation of any run of the task and seed.
    """
    best = aggregate.best_evaluations(
        (task, seed, row["curve"]) for cells in protocol.cells.values()
        for task, seeds in cells.items() for seed, row in seeds.items()
    )  # fmt: skip
    parts = []
    for column in OF_THE_PAPER:
        runs = [
            (row, best[task, seed]) for task, seeds in protocol.cells.get(column, {}).items()
            for seed, row in seeds.items()
        ]  # fmt: skip
        met = [(row, top) for row, top in runs if row["first_reward_step"] is not None]
        solved = sum(row["score"] >= aggregate.SOLVED * top > 0 for row, top in met)
        parts.append(f"`{column}` {len(met)} of {len(runs)}, and solved {solved}")
    return (
        "Runs that met a reward, and those of them that solved the task, with "
        f"{aggregate.SOLVED} or more of the best evaluation of any run of that task and seed: "
        f"{'; '.join(parts)}."
    )


def comparison(fixed, fresh):
    """Which episode seeding of MinAtar reproduces the paper, and what changes under the other."""
    both = [
        (c, t) for c in OF_THE_PAPER for t in fixed.tasks
        if cell_summary(fixed, c, t) and cell_summary(fresh, c, t)
    ]  # fmt: skip
    if not both:
        return "No cell has runs under both yet."
    rows, of_backups = [], {}
    for protocol in (fixed, fresh):
        counts, name = verdict_counts(protocol, both), protocol.title.removeprefix("MinAtar, ")
        of_task = distances(protocol, both, lambda cell: cell[1])
        of_backups[name] = distances(protocol, both, lambda _: "all")
        of_backups[name] |= distances(protocol, both, lambda cell: cell[0])
        ratio = novel_ratio(protocol)
        rows.append([
            name, *(str(counts[verdict]) for verdict in ("inside", "above", "below")),
            *(", ".join(f"{key} {short(value)}" for key, value in of.items())
              for of in (of_backups[name], of_task)),
            "-" if ratio is None else f"{ratio:.3f}",
        ])  # fmt: skip
    header = ["MinAtar", "inside the paper's ± std", "above", "below",
              "mean distance (normalised)", "by task",
              "novel state ratio, graph (paper: 0.298)"]  # fmt: skip
    nearer = {
        key: min(of_backups, key=lambda name: of_backups[name][key])
        for key in next(iter(of_backups.values()))
    }
    fewest = min(cell_summary(p, c, t).number for p in (fixed, fresh) for c, t in both)
    text = (
        f"On the {count(len(both), 'cell')} (task and backup) that have runs under both, the means "
        f"under **{nearer.pop('all')}** are nearer to the paper's ({count(fewest, 'seed')} at "
        f"least). By backup: {', '.join(f'`{key}` under {name}' for key, name in nearer.items())}."
    )
    for name, protocol in zip(of_backups, (fixed, fresh), strict=True):
        (better, worse), (_, ours) = next(iter(orderings(protocol).items()))
        verdict = aggregate.support(ours[1]) if ours else "open"
        text += f" Under {name} the paper's first order, {better} > {worse}, is {verdict}."
    same = [task for task in fixed.tasks if same_runs(fixed, fresh, task)]
    if same:
        text += (
            f" Every run of {', '.join(same)} is the same under both, evaluation by evaluation: "
            "re-seeding the game changes nothing there."
        )
    changes = []
    for column in fixed.columns:
        tables = aggregate.on_the_same_seeds(fresh.scores(column), fixed.scores(column))
        whole = difference([fresh.as_matrix(table) for table in tables])
        per_task = []
        for task in fixed.tasks:
            pair = [fresh.as_matrix(table, [task], normalised=False) for table in tables]
            found = difference(pair)
            per_task.append("the same" if found and task in same else interval(found))
        if whole is not None or set(per_task) != {"-"}:
            changes.append([column, *per_task, interval(whole)])
    table = markdown(["fresh - fixed", *fixed.tasks, "normalised mean"], changes)
    return f"{text}\n\n{markdown(header, rows)}\n\nWhat changes from fixed to fresh:\n\n{table}"


def distance(protocol, cells):
    """Mean distance of our means from the paper's, in normalised scores, over (column, task)s."""
    return np.mean([
        abs(cell_summary(protocol, c, t).mean - paper_cell(protocol, c, t)[0])
        / protocol.scales[t][1] for c, t in cells
    ])  # fmt: skip


def distances(protocol, cells, group):
    """group(cell) -> the distance of these cells."""
    return {
        key: distance(protocol, [cell for cell in cells if group(cell) == key])
        for key in dict.fromkeys(map(group, cells))
    }


def same_runs(one, other, task):
    """Whether all runs of a task that both have, and there are some, have equal curves."""
    pairs = [
        (row["curve"], other.cells[column][task][seed]["curve"])
        for column, cells in one.cells.items()
        for seed, row in cells.get(task, {}).items()
        if seed in other.cells.get(column, {}).get(task, {})
    ]
    return bool(pairs) and all(a == b for a, b in pairs)


def novel_ratio(protocol):
    """Mean over tasks of graph's novel state ratio; None until every task has a run."""
    cells = protocol.cells.get("graph", {})
    if any(task not in cells for task in protocol.tasks):
        return None
    return np.mean([
        np.mean([row["novel_state_ratio"] for row in cells[task].values()])
        for task in protocol.tasks
    ])  # fmt: skip


def ratio_table(protocols):
    paper = {"minigrid": "0.006", "minatar": "0.298", "atari100k": "0.927"}
    rows = []
    for protocol in protocols:
        by_task = []
        for task in protocol.tasks:
            cell = protocol.cells.get("graph", {}).get(task, {}).values()
            if cell:
                mean = np.mean([row["novel_state_ratio"] for row in cell])
                by_task.append(f"{short_task(task)} {mean:.3f}")
        ratio = novel_ratio(protocol)
        rows.append([
            protocol.title, "-" if ratio is None else f"{ratio:.3f}",
            paper.get(protocol.suite, "-"), ", ".join(by_task) or "-",
        ])  # fmt: skip
    return markdown(["graph", "mean of tasks", "paper", "by task"], rows)


# --------------------------------------------------------------------------------------------------
# Pictures
# --------------------------------------------------------------------------------------------------


def summary_panel(protocol):
    backups = {}
    for column in protocol.columns:
        paper = [
            (paper_cell(protocol, column, t)[0] - protocol.scales[t][0])
            / (protocol.scales[t][1] - protocol.scales[t][0])
            for t in protocol.tasks if paper_cell(protocol, column, t)
        ]  # fmt: skip
        ours = protocol.matrix(column)
        graph = protocol.matrices(("graph", column))[0]
        is_fewer = graph is not None and len(graph) < len(protocol.matrix("graph"))
        backups[column] = (
            estimate(aggregate.mean, ours),
            np.mean(paper) if paper else None,
            graph.mean() if is_fewer and len(graph) == len(ours) else None,
        )
    return protocol.title.replace(", ", ",\n", 1), f"mean {protocol.metric}", backups


def curves_of(protocol):
    tasks = {}
    for task in protocol.tasks:
        found = {}
        for column in protocol.columns:
            rows = protocol.cells.get(column, {}).get(task, {}).values()
            curves = [row["curve"] for row in rows if row["curve"]]
            if curves:
                found[column] = aggregate.band(curves)
        if found:
            tasks[short_task(task)] = found
    return tasks


def profile_panel(protocol):
    """None until two backups have two runs of every task."""
    matrices = {c: protocol.matrix(c) for c in protocol.columns}
    matrices = {c: m for c, m in matrices.items() if m is not None and len(m) > 1}
    if len(matrices) < 2:
        return None
    top = max(1.0, max(np.quantile(m, 0.97) for m in matrices.values()))
    thresholds = np.linspace(0, top, 60)
    found = aggregate.profiles(matrices, thresholds)
    return protocol.title, protocol.metric, thresholds, found


# --------------------------------------------------------------------------------------------------
# The report
# --------------------------------------------------------------------------------------------------

HOW = f"""\
How to read it: a score is the mean over the last 10% of a run's evaluations; a cell is the mean ±
the standard deviation over seeds (of the population, as the paper's), and the number of seeds.
*Inside*, *above* and *below* compare our mean with the paper's mean ± std, with half a unit of its
last digit for rounding: a description, not a test. Where the paper's std is 0.00, one seed that
solves the task is *above*.

Intervals are 95% percentile intervals of a bootstrap over seeds, stratified by task
([rliable](https://github.com/google-research/rliable), {aggregate.REPETITIONS:,} samples), of
{aggregate.FEWEST_SEEDS} seeds or more. From few they are too narrow: were scores normal, those of
five seeds would cover the mean of five tasks 90% of the time and that of one task 84%. Where tasks
have different numbers of seeds, statistics over tasks use the first so many that all of them have.
Two backups are compared on the seeds that both have, and their runs with the same seed stay
together: in MiniGrid each seed is a layout of its own. P(improvement) is the chance that a run of
`graph` is better than one of the other backup, of any seed; IQM the mean of the middle half.

So it is not the interval of a difference that judges a claim, but p: the chance of so large a
difference in its direction if each seed's difference had either sign by chance (one-sided paired
permutation test; exact up to 40 differences). A sum that is smaller by up to
{aggregate.TOLERANCE:.0%} counts as being as large, so that differences next to nothing decide
nothing; where a verdict hangs on that, both are given. *Supported*, or *contradicted*:
p <= {aggregate.LEVEL} in the claim's direction, or against it; *undecided*: neither; *open*: fewer
than {aggregate.FEWEST_SEEDS} seeds. On one task five seeds decide only if all five agree (1/32).
Each claim is judged alone: of twenty between equals, up to one would be supported and one
contradicted on average.

MiniGrid's returns are taken as they are. MinAtar's are divided by the highest mean in the paper's
table for the game, so that 1 is the paper's best backup there. (The paper divides by the scores of
a DQN after 5,000,000 steps, which it does not print.) Means of raw MinAtar scores, as in the
paper's summary, are shown too; Freeway and Space Invaders make most of them.

What the paper says is the default here. The commands that its authors released depart from it, and
some of that is tried beside it: `graph, persistent` is `--persist-targets`, nested values that
stay until the next target network, as in their DQN; *fixed episode seeds* re-seed the MinAtar game
at every episode, as they do. Their depth of 10 in MiniGrid (the paper's, and ours: 5) was run for
n-step alone. `graph, breadth 0` is `--breadth 0`, every transition."""


def curves_text(tasks):
    """What the lines of these curves are."""
    drawn = {(name, seeds) for curves in tasks.values() for name, (*_, seeds) in curves.items()}
    return (
        "Mean of the seeds and its standard error, over five evaluations"
        + ("; dotted: variants of `graph`" if any(", " in name for name, _ in drawn) else "")
        + ("; dashed: one seed only." if any(seeds == 1 for _, seeds in drawn) else ".")
    )


def section(protocol, folder):
    """Tables and pictures of one protocol."""
    yield f"## {protocol.title}"
    yield f"{seeds_text(protocol).capitalize()}. {shown_verdicts(protocol)}"
    yield task_table(protocol)
    yield summary_table([protocol], range(len(SUMMARY_HEADER)), with_title=False)
    yield improvement_table(protocol)
    if protocol.suite == "minigrid":
        yield exploration_text(protocol)
    if released_columns(protocol):
        yield "### n-step as the authors released it"
        yield from released_text(protocol)
    curves = curves_of(protocol)
    if curves:
        name = f"report_{protocol.slug}_curves.png"
        episodes = "an evaluation" if protocol.suite == "atari100k" else "3 episodes"
        report_figures.draw_curves(folder / name, curves, f"mean return of {episodes}")
        yield f"![Learning curves, {protocol.title}]({name})"
        yield curves_text(curves)
    if protocol.suite == "atari100k":
        return
    short_of = shortfall_table(protocol)
    if short_of is None:
        yield "No mean of a graph backup lies below the paper's mean ± std of `graph`."
        return
    yield "### Where graph is below the paper"
    yield (
        "Runs by what they lacked of the paper's mean - std. *No reward met*: exploration. *Met, "
        "not learned*: propagation or fitting; no mean of five evaluations reached it. *Learned, "
        "lost*: fitting; one did, but the score is below it. The first reward is the median of all "
        "runs, *none* where half of them have none."
    )
    yield short_of
    remedies = remedy_table(protocol)
    if remedies is None:
        return
    yield (
        "What would mend it: by how much the mean of `graph` grows, on the seeds that both have "
        "(their number in brackets), with `--persist-targets`, with `--breadth 0`, and with "
        "`--exploration frontier` ([docs/frontier.md](frontier.md); made by a later version). "
        "A change *helps* if that is supported as a claim is, each alone, and exploration is what "
        "was missing where runs met no reward. Persistent targets change the bias of targets, too: "
        "where they do not help, propagation may still be short. If none of these helps, fitting "
        "is left, or what the paper does not say of its protocol; with fewer than "
        f"{aggregate.FEWEST_SEEDS} seeds it is *open*."
    )
    yield remedies


def atari_line(protocols):
    found = [p for p in protocols if p.suite == "atari100k"]
    if not found:
        return "Atari 100K: no run of 100,000 steps has been made, so there are no numbers."
    games = {task for cells in found[0].cells.values() for task in cells}
    return f"Atari 100K: {len(games)} of 26 games, {seeds_text(found[0])}."


def report(protocols, left_out, folder, in_short):
    """The report's Markdown, in parts; draws its pictures into the folder."""
    runs = [row for p in protocols for c in p.columns for seeds in p.cells.get(c, {}).values()
            for row in seeds.values()]  # fmt: skip
    remedies = [row for p in protocols for task in shortfalls(p, "graph")
                for row in p.cells.get(FRONTIER, {}).get(task, {}).values()]  # fmt: skip
    commits, later = (sorted({row["commit"] for row in rows}) for rows in (runs, remedies))
    yield "# Does it reproduce?"
    yield (
        "Written by `python tools/report.py` from `results/*.csv`: "
        f"{count(len(runs), 'run')}, made by the code at {', '.join(commits) or '-'} in "
        f"{sum(row['wall_seconds'] for row in runs) / 3600:,.1f} hours, pauses included."
        + (
            f" {count(len(remedies), 'run')} with frontier episodes, of {', '.join(later)}, stand "
            "beside them where `graph` is below the paper."
            if remedies
            else ""
        )
        + (f" {count(left_out, 'row')} with other flags: not shown." if left_out else "")
    )
    yield HOW
    yield "## In short"
    yield in_short
    by_name = {(p.suite, p.episode_seed): p for p in protocols}
    claimed = [p for p in protocols if p.suite != "minatar-1m"]
    if claimed:
        yield "## The paper's claims"
    for protocol in claimed:
        yield f"**{protocol.title}**, {seeds_text(protocol)}:"
        lines = list(order_claims(protocol))
        if protocol.suite == "minatar":
            lines.append(freeway_claim(protocol))
        yield "\n".join(lines)
    pair = [by_name.get(("minatar", name)) for name in ("fixed", "fresh")]
    if any(pair):
        yield "## Which episode seeding reproduces the paper's MinAtar"
        yield comparison(*pair) if all(pair) else "Only one of the two has been run."
    for protocol in protocols:
        yield from section(protocol, folder)
    panels = [p for p in map(profile_panel, protocols) if p]
    if panels:
        report_figures.draw_profiles(folder / "report_profiles.png", panels)
        yield "## Performance profiles"
        yield "![Share of runs above each normalised score](report_profiles.png)"
        yield "For each score, the share of runs (seeds and tasks) above it; bands: 95% intervals."
    yield "## Novel state ratio"
    yield ratio_table(protocols)
    yield "## Atari"
    yield atari_line(protocols)


def summary_text(protocols, folder):
    """Tables and the picture that the README shows, too."""
    parts = []
    shown = [p for p in protocols if p.suite in ("minigrid", "minatar")]
    if shown:
        report_figures.draw_summary(
            folder / "report_summary.png", [summary_panel(p) for p in shown]
        )
        parts.append("![Mean scores of every backup, ours and the paper's](report_summary.png)")
        dotted = ""
        if any(map(has_fewer_seeds, shown)):
            dotted = "; dotted: `graph` on the seeds of that bar, where they are fewer"
        parts.append(
            "Bars: mean over tasks, with its 95% interval, pale where there are fewer than "
            f"{aggregate.FEWEST_SEEDS} seeds; diamonds: the paper{dotted}. Normalised scores of "
            "MinAtar, in the picture and the last column, are divided by the best mean that the "
            "paper has for the game; IQM: the mean of the middle half of runs. *Fixed*: the game "
            "is re-seeded alike at every episode, as in the authors' released code; *fresh*: it is "
            "not. *Breadth 0* follows every transition instead of a sample; *persistent* keeps "
            "nested values until the next target network."
        )
    parts.append(summary_table(protocols, [*range(SAME_SEEDS + 1), -1], with_title=True))
    parts.append("\n".join(
        f"- **{p.title}**, {seeds_text(p)}: {shown_verdicts(p)} {orders_in_short(p)}"
        for p in protocols
    ))  # fmt: skip
    parts.append(
        f"Each order is judged alone, by a paired permutation test (p <= {aggregate.LEVEL})."
    )
    parts.append(atari_line(protocols))
    return "\n\n".join(parts)


def replace_between(path, begin, end, text):
    """Content of a file with a new text between two markers."""
    content = path.read_text()
    if content.count(begin) != 1 or content.count(end) != 1:
        raise ValueError(f"{path} has no {begin!r} and {end!r} to write between")
    head, rest = content.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main():
    args = tyro.cli(Args)
    out, readme = args.out, args.readme
    if args.results_dir.resolve() == RESULTS.resolve() and out is None and readme is None:
        out, readme = ROOT / "docs" / "report.md", ROOT / "README.md"
    elif out is None:
        out = args.results_dir / "report.md"
    try:
        protocols, left_out = read_protocols(args.results_dir)
        if not protocols and left_out:
            columns = ", ".join(COLUMNS.values())
            fail(f"no row in {args.results_dir} has a column, {left_out} are of others: {columns}")
        if not protocols:
            fail(f"no rows in {args.results_dir}; tools/sweep.py makes them")
        out.parent.mkdir(parents=True, exist_ok=True)
        in_short = summary_text(protocols, out.parent)
        parts = report(protocols, left_out, out.parent, in_short)
        out.write_text("\n\n".join(parts) + "\n")
        if readme is not None:
            text = in_short.replace("](report_", "](docs/report_")
            readme.write_text(replace_between(readme, BEGIN, END, text))
    except (OSError, ValueError, KeyError) as error:
        fail(error)
    print("wrote", *filter(None, (out, readme)))


if __name__ == "__main__":
    main()
