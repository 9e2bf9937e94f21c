"""Write the tables and curves of docs/frontier.md from results/*.csv.

    pip install -r requirements-sweep.txt
    python tools/sweep.py --suites minigrid --backups one-step tree graph \\
        --variants default exploration=frontier
    python tools/sweep.py --suites minigrid-hard minatar --backups graph \\
        --variants default exploration=frontier
    python tools/sweep.py --suites minatar --backups graph --tasks seaquest freeway \\
        --variants default exploration=frontier --seeds 6 7 8 9 10 11 12 13 14 15 \\
        --results-dir results/more_seeds
    python tools/sweep.py --suites minatar --backups graph --episode-seeds fixed \\
        --variants default exploration=frontier
    python tools/sweep.py --suites minatar --backups graph --episode-seeds fixed \\
        --tasks seaquest --variants "exploration=frontier frontier_share=0.1" \\
        "exploration=frontier frontier_share=0.2"
    python tools/sweep.py --suites minatar --backups graph --episode-seeds fixed \\
        --tasks seaquest --variants default exploration=frontier --seeds 6 7 8 9 10 \\
        --results-dir results/more_seeds
    python tools/frontier_report.py

Every number and every judgement is computed from the rows that are there.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from recorded import task_name
from run_records import ROOT, SUITES, Records

try:
    import aggregate
    import report_figures
    from report import (
        RESULTS,
        chance_text,
        count,
        curves_text,
        fail,
        interval,
        markdown,
        replace_between,
        short,
        short_task,
    )  # fmt: skip
except ImportError as missing:
    print(f"error: no {missing.name}: pip install -r requirements-sweep.txt", file=sys.stderr)
    sys.exit(2)

OFF, ON = "", "exploration=frontier"  # variants: without exploration, and with its defaults
BEGIN, END = "<!-- tables: python tools/frontier_report.py -->", "<!-- end of tables -->"
MORE_SEEDS = "more_seeds"  # folder beside the rows: other seeds of single tasks, judged apart

# (suite, episode seed) -> title, steps of the tables, backups.
PARTS = {
    ("minigrid", ""): ("MiniGrid", (50_000, 100_000), ("one-step", "tree", "graph")),
    ("minigrid-hard", ""): (
        "MiniGrid, harder tasks", (100_000, 200_000), ("one-step", "tree", "graph")
    ),
    ("minatar", "fresh"): ("MinAtar, fresh episodes", (100_000,), ("graph",)),
    ("minatar", "fixed"): ("MinAtar, fixed episode seeds", (100_000,), ("graph",)),
}  # fmt: skip


@dataclass
class Args:
    results_dir: Path = RESULTS
    """where the rows are"""
    out: Path | None = None
    """where tables between two markers are replaced, pictures beside it; ours: docs/frontier.md"""


@dataclass
class Run:
    row: dict
    curve: dict  # step -> mean return


def read_part(records, suite, episode_seed):
    """variant -> backup -> task -> {seed: Run}, of rows whose flags are the exploration's alone."""
    curves, found = records.curves(suite), {}
    for key, row in records.rows(suite).items():
        flags = key.variant.split()
        if key.episode_seed == episode_seed and all(
            flag.startswith(("exploration=", "frontier_")) for flag in flags
        ):
            tasks = found.setdefault(key.variant, {}).setdefault(key.backup, {})
            tasks.setdefault(key.task, {})[key.seed] = Run(row, curves.get(key, {}))
    return found


def label(variant):
    """off; frontier; frontier, share 0.1."""
    if not variant:
        return "off"
    flags = [flag.removeprefix("frontier_").replace("=", " ") for flag in variant.split()[1:]]
    return ", ".join(["frontier", *flags])


def score_at(curve, step):
    """Mean over the last 10% of the evaluations until a step, as a run's score; None without."""
    means = [mean for s, mean in sorted(curve.items()) if s <= step]
    if not means or max(curve) < step:
        return None
    return float(np.mean(means[-max(1, round(len(means) / 10)) :]))


def scores_at(runs, step):
    """{seed: score} of {seed: Run}."""
    scores = {seed: score_at(run.curve, step) for seed, run in runs.items()}
    return {seed: score for seed, score in scores.items() if score is not None}


def best_of(part):
    """(task, seed) -> the best evaluation of any run."""
    return aggregate.best_evaluations(
        (task, seed, run.curve) for backups in part.values() for tasks in backups.values()
        for task, runs in tasks.items() for seed, run in runs.items()
    )  # fmt: skip


def cell_text(scores, best, task):
    """0.58 [0.40, 0.71], 3 of 5: mean, interval, seeds solved; (5) seeds where best is None."""
    if not scores:
        return "-"
    found = interval(aggregate.estimate(aggregate.mean, np.array(list(scores.values()))[:, None]))
    if best is None:
        return f"{found} ({len(scores)})"
    solved = sum(s >= aggregate.SOLVED * best[task, seed] > 0 for seed, s in scores.items())
    return f"{found}, {solved} of {len(scores)}"


def score_table(part, tasks, backups, step, is_solvable):
    """One row per task and the mean of all, one column per backup and variant.

    is_solvable: whether a best return is known to be reached, so that seeds can be called solved.
    """
    variants, best = sorted(part), best_of(part) if is_solvable else None
    columns = [(b, v) for b in backups for v in variants if b in part[v]]
    rows = []
    for task in tasks:
        cells = [
            cell_text(scores_at(part[v][b].get(task, {}), step), best, task) for b, v in columns
        ]
        rows.append([short_task(task), *cells])
    means = []
    for backup, variant in columns:
        table = score_table_at(part[variant][backup], tasks, step)
        matrix = aggregate.score_matrix(table, tasks, dict.fromkeys(tasks, (0.0, 1.0)))
        means.append(
            "-" if matrix is None else interval(aggregate.estimate(aggregate.mean, matrix))
        )
    rows.append(["**mean of tasks**", *means])
    return markdown(["task", *(f"{b}, {label(v)}" for b, v in columns)], rows)


def score_table_at(tasks_of_runs, tasks, step):
    """task -> {seed: score}."""
    return {task: scores_at(tasks_of_runs.get(task, {}), step) for task in tasks}


def found_table(part, tasks):
    """What exploration found with `graph`, off and on, on the seeds of both."""
    variants, rows = [v for v in (OFF, ON) if "graph" in part.get(v, {})], []
    for task in tasks:
        runs = [part[v]["graph"].get(task, {}) for v in variants]
        seeds = set.intersection(*map(set, runs))
        cells = []
        for of_variant in runs:
            found = [of_variant[seed].row for seed in seeds]
            firsts = [float(r["first_reward_step"] or "inf") for r in found]
            first = aggregate.median_step(firsts) if found else np.inf
            cells += [
                f"{np.median([float(r['states'] or 'nan') for r in found]):,.0f}" if found else "-",
                f"{np.isfinite(firsts).sum()} of {len(found)}" if found else "-",
                "-" if np.isinf(first) else f"{first:,.0f}",
            ]
        rows.append([short_task(task), *cells])
    header = [f"{what}, {label(v)}" for v in variants
              for what in ("states", "runs with a reward", "first reward at step")]  # fmt: skip
    return markdown(["task", *header], rows)


def difference_table(part, tasks, backup, step):
    """Frontier - off per task and in the mean, on the seeds of both, and what that says."""
    rows = []
    for variant in sorted(part):
        if not variant or backup not in part[variant] or backup not in part.get(OFF, {}):
            continue
        tables = aggregate.on_the_same_seeds(
            *(score_table_at(part[v][backup], tasks, step) for v in (variant, OFF))
        )
        for name, chosen in (*((short_task(t), [t]) for t in tasks), ("**mean of tasks**", tasks)):
            scales = dict.fromkeys(chosen, (0.0, 1.0))
            pair = [aggregate.score_matrix(table, chosen, scales) for table in tables]
            if any(matrix is None for matrix in pair):
                continue
            on, off = pair
            change = aggregate.difference(on, off)
            support = aggregate.support(change)
            judged = {"supported": "better", "contradicted": "worse"}.get(support, support)
            rows.append([
                label(variant), name, short(off.mean()), short(on.mean()), interval(change),
                f"{(on > off).sum()} : {(on < off).sum()}",
                chance_text(change.p).removeprefix("= "), judged, str(change.seeds),
            ])  # fmt: skip
    header = ["variant", "task", "off", "on", "on - off", "runs higher : lower", "p", "", "seeds"]
    return markdown(header, rows) if rows else None


def difference_tables(part, tasks, backups, step):
    """That of each backup, in parts."""
    for backup in backups:
        table = difference_table(part, tasks, backup, step)
        if table is not None:
            yield f"The difference that it makes to `{backup}` after {step:,} steps:"
            yield table


def seeds_of(part, backups):
    """The seed of every run of these backups."""
    return [
        seed for of in part.values() for backup in backups for runs in of.get(backup, {}).values()
        for seed in runs
    ]  # fmt: skip


def with_more_seeds(part, more):
    """The runs of both, of the tasks that have some in the second."""
    return {
        variant: {
            backup: {
                task: part.get(variant, {}).get(backup, {}).get(task, {}) | runs
                for task, runs in tasks.items()
            }
            for backup, tasks in of.items()
        }
        for variant, of in more.items()
    }


def graph_curves(part, tasks):
    """task -> name -> steps, mean, error and seeds of `graph`, off and on, as `draw_curves` has."""
    found = {}
    for task in tasks:
        for name, variant in (("graph", OFF), ("graph, frontier", ON)):
            runs = part.get(variant, {}).get("graph", {}).get(task, {}).values()
            curves = [run.curve for run in runs if run.curve]
            if curves:
                found.setdefault(short_task(task), {})[name] = aggregate.band(curves)
    return found


def parts_of_page(records, folder):
    """The Markdown between the markers, in parts, and its pictures, written into the folder."""
    for (suite, episode_seed), (title, steps, backups) in PARTS.items():
        part = read_part(records, suite, episode_seed)
        if not any(part):
            continue  # nothing was explored with the frontier
        tasks = suite_tasks(suite)
        yield f"### {title}"
        yield f"{count(len(seeds_of(part, backups)), 'run')}."
        curves = graph_curves(part, tasks)
        if curves:
            slug = "_".join(filter(None, (suite.replace("-", "_"), episode_seed)))
            name = f"frontier_{slug}_curves.png"
            report_figures.draw_curves(folder / name, curves, "mean return of 3 episodes")
            yield f"![Learning curves with and without frontier episodes, {title}]({name})"
            yield curves_text(curves)
        for step in steps:
            yield f"After {step:,} steps:"
            yield score_table(part, tasks, backups, step, is_solvable=suite != "minatar")
        yield "What `graph` found, on the seeds of both; the first reward at the median of runs:"
        yield found_table(part, tasks)
        yield from difference_tables(part, tasks, backups, steps[-1])


def repetition(records, more_records):
    """What other seeds say, of tasks chosen by what the first ones said. In parts, as above."""
    for (suite, episode_seed), (title, steps, backups) in PARTS.items():
        more, tasks = read_part(more_records, suite, episode_seed), suite_tasks(suite)
        seeds = seeds_of(more, backups)
        if seeds:
            yield f"### {title}: seeds {min(seeds)} to {max(seeds)}"
            yield f"{count(len(seeds), 'run')}, of tasks chosen after the table above was known."
            yield from difference_tables(more, tasks, backups, steps[-1])
            yield "With the seeds above, of which the choice was made:"
            both = with_more_seeds(read_part(records, suite, episode_seed), more)
            yield from difference_tables(both, tasks, backups, steps[-1])


def suite_tasks(suite):
    """The suite's tasks as the rows name them."""
    script, tasks, _ = SUITES[suite]
    return [task_name(script, task) for task in tasks]


def main():
    args = tyro.cli(Args)
    if args.out is None and args.results_dir.resolve() != RESULTS.resolve():
        fail("--out is needed with another --results-dir: docs/frontier.md is of our rows")
    out = args.out or ROOT / "docs" / "frontier.md"
    try:
        records = Records(args.results_dir)
        parts = list(parts_of_page(records, out.parent))
        if not parts:
            fail(f"no rows with exploration=frontier in {args.results_dir}")
        parts += repetition(records, Records(args.results_dir / MORE_SEEDS))
        out.write_text(replace_between(out, BEGIN, END, "\n\n".join(parts)))
    except (OSError, ValueError, KeyError) as error:
        fail(error)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
