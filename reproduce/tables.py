"""Rows of results by suite, beside the paper's numbers, and the words for them."""

import contextlib
import functools
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path

import aggregate
import numpy as np
from folders import RESULTS
from gbtools.runs import band, read_rows
from suites import curve_of, read_table, script_of, tasks_of

PAPER_BACKUPS = ("one-step", "n-step", "tree", "graph")
FRONTIER = "graph, frontier"
RELEASED = ", as released"  # with the update of the code that the authors released
SAME_RATE = ", rate 2.5e-4"  # of learning
WHOLE = f"whole-graph{SAME_RATE}, prior 0.3"  # docs/minatar.md
ATARI, BF16 = "atari100k", "bf16=True"
NAMED = {"exploration=frontier": "frontier", "persist_targets=True": "persistent", BF16: "bfloat16"}
NAMED["learning_rate=0.00025"] = "rate 2.5e-4"
NUMBERS = "wall_seconds steps_per_second novel_state_ratio".split()
WITHOUT_SEED = "suite task backup variant episode_seed".split()
TITLES = {
    ("minigrid", ""): "MiniGrid",
    ("minigrid-hard", ""): "MiniGrid, harder tasks",
    ("minatar", "fixed"): "MinAtar, fixed episode seeds",
    ("minatar", "fresh"): "MinAtar, fresh episodes",
    ("minatar-1m", "fixed"): "MinAtar, 1,000,000 steps, fixed episode seeds",
    ("minatar-1m", "fresh"): "MinAtar, 1,000,000 steps, fresh episodes",
    (ATARI, ""): "Atari 100K",
}


@dataclass(eq=False)  # hashed by identity, for caches
class Protocol:
    """The runs of one suite and one episode seeding, and what the paper has for it."""

    suite: str
    episode_seed: str
    tasks: list
    runs: dict  # (setting, task) -> {seed: dict with numbers, and a curve}
    paper: dict  # backup -> task -> (mean, std)
    scales: dict  # task -> score that counts as 1, where it is not 1

    @property
    def title(self):
        return TITLES[self.suite, self.episode_seed]

    def settings(self):
        """Those of the paper first, then by name."""
        result = {setting for setting, _ in self.runs}
        return [n for n in PAPER_BACKUPS if n in result] + sorted(result - set(PAPER_BACKUPS))

    def runs_of(self, setting, task):
        """Runs, in the order of their seeds."""
        return list(self.runs.get((setting, task), {}).values())

    def scores(self, setting, normalised=False):
        """{seed: score} of each task."""
        scales = self.scales if normalised else {}
        result = ((scales.get(t, 1), self.runs.get((setting, t), {})) for t in self.tasks)
        return [
            {seed: run["score"] / scale for seed, run in item.items()} for scale, item in result
        ]

    @functools.cache  # noqa: B019
    def estimate(self, statistic, setting, normalised=False):
        """Estimate of a statistic of the tasks' scores; None until every task has a run."""
        scores = self.scores(setting, normalised)
        return aggregate.estimate(statistic, [np.array(list(item.values())) for item in scores])

    @functools.cache  # noqa: B019
    def gain(self, setting, other, normalised=False):
        """Estimate of the mean difference over tasks, on the seeds of both; None without any."""
        return aggregate.difference(*(self.scores(item, normalised) for item in (setting, other)))

    def with_both(self, setting, other):
        """The protocol of the tasks in which both have a run of one seed."""
        runs = self.runs
        both = (runs.get((setting, t), {}).keys() & runs.get((other, t), {}) for t in self.tasks)
        return replace(self, tasks=[*itertools.compress(self.tasks, both)])

    def means(self, setting, other):
        """Mean of the tasks' means of each, on the seeds that both have: `gain` is of the same."""
        pairs = zip(self.scores(setting), self.scores(other), strict=True)
        columns = (
            [(one[s], two[s]) for s in sorted(one.keys() & two.keys())] for one, two in pairs
        )
        return np.mean([np.mean(column, axis=0) for column in columns], axis=0)

    def paper_mean(self, backup, normalised=False):
        """Mean of the paper's numbers; nan if one is missing."""
        scales = self.scales if normalised else {}
        cells = self.paper.get(backup, {})
        return float(np.mean([cells.get(t, (np.nan,))[0] / scales.get(t, 1) for t in self.tasks]))

    def verdict(self, setting, task):
        """inside, above or below the paper's; "" without runs or without the paper's number."""
        runs, paper = self.runs_of(setting, task), self.paper.get(backup_of(setting), {}).get(task)
        if not (runs and paper and (setting in PAPER_BACKUPS or setting.endswith(RELEASED))):
            return ""
        return aggregate.verdict(np.mean([run["score"] for run in runs]), *paper)

    def cell(self, setting, task):
        """0.38 ± 0.47 (5), inside"""
        text = cell_text([run["score"] for run in self.runs_of(setting, task)])
        return ", ".join(filter(None, (text, self.verdict(setting, task))))

    def curves(self, settings, window=5):
        """Task -> setting -> `band` of its runs, where there are any with curves."""
        result = {}
        for task, setting in itertools.product(self.tasks, settings):
            curves = [run["curve"] for run in self.runs_of(setting, task) if run["curve"]]
            if curves:
                of_task = result.setdefault(short_task(task), {})
                of_task[setting] = band(curves, 1 if self.suite == ATARI else window)
        return result


def backup_of(setting):
    return setting.partition(",")[0]


def setting_of(backup, variant):
    """graph, breadth 0; graph, frontier, share 0.1."""
    words = variant.split()
    words = [NAMED.get(w, re.sub("[_=]", " ", w.removeprefix("frontier_"))) for w in words]
    return ", ".join([backup, *words])


def read_paper():
    """suite -> backup -> task -> (mean, std); Atari's in percent of human."""
    result = {}
    for row in read_rows(RESULTS / "paper" / "paper_results.csv"):
        if row["metric"] != "raw_score":
            of_backup = result.setdefault(row["suite"], {}).setdefault(row["backup"], {})
            of_backup[row["task"]] = float(row["mean"]), float(row["std"])
    return result


def new_protocol(suite, episode_seed, numbers):
    tasks, scales = list(numbers.get("graph", tasks_of(suite))), {}
    if suite.startswith("minatar"):
        scales = {t: max(numbers[b][t][0] for b in PAPER_BACKUPS) for t in tasks}
    return Protocol(suite, episode_seed, tasks, {}, numbers, scales)


def read_protocols(results_dir):
    """Every protocol that has rows, in the order of TITLES."""
    table, paper, result = read_table(results_dir), read_paper(), {}
    alone = set(zip(*(table[name] for name in WITHOUT_SEED), strict=True))
    for row in table.to_dict("records"):
        where = row["suite"], row["episode_seed"]
        if where not in TITLES:
            continue
        protocol = result.get(where) or new_protocol(*where, paper.get(row["suite"], {}))
        if row["task"] not in protocol.tasks:
            continue
        result[where], words = protocol, row["variant"].split()
        run = {name: row[name] for name in (*NUMBERS, "commit", "score")}
        run |= {"bf16": BF16 in words, "curve": curve_of(row["curve"]), "game_score": row["score"]}
        if row["suite"] == ATARI:  # the paper's tables are in percent of human
            normalized = script_of(ATARI).human_normalized(row["task"], row["score"])
            run["score"] = 100 * normalized
        # Runs in bfloat16 are those of their setting where it has no others.
        plain = row | {"variant": " ".join(word for word in words if word != BF16)}
        is_alone = tuple(plain[name] for name in WITHOUT_SEED) not in alone
        setting = setting_of(row["backup"], (plain if is_alone else row)["variant"])
        protocol.runs.setdefault((setting, row["task"]), {})[row["seed"]] = run
    with contextlib.suppress(FileNotFoundError):
        for row in read_rows(Path(results_dir) / "released_updates.csv"):
            if protocol := result.get((row["suite"], row["episode_seed"])):
                released = RELEASED if row["update"] == "released" else ""
                where = f"{row['backup']}, depth {row['depth']}{released}", row["task"]
                run = {"score": float(row["score"]), "curve": {}}
                protocol.runs.setdefault(where, {})[int(row["seed"])] = run
    if atari := result.get((ATARI, "")):  # of 26 games those that were run
        atari.tasks = [game for game in atari.tasks if any(game in where for where in atari.runs)]
    return [result[where] for where in TITLES if where in result]


def short(value):
    """Two decimals; no minus sign before zero, a dash for nothing."""
    return "-" if value is None or np.isnan(value) else f"{round(value, 2) + 0.0:.2f}"


def cell_text(scores):
    """0.38 ± 0.47 (5); of one seed 0.96 (1). The deviation is the population's, as the paper's."""
    if not scores:
        return "-"
    spread = f" ± {short(np.std(scores))}" if len(scores) > 1 else ""
    return f"{short(np.mean(scores))}{spread} ({len(scores)})"


def interval(estimate):
    """0.58 [0.40, 0.71]; without the interval from few seeds."""
    if estimate is None:
        return "-"
    limits = f" [{short(estimate.low)}, {short(estimate.high)}]"
    return short(estimate.value) + ("" if np.isnan(estimate.low) else limits)


def chance_text(p):
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def short_task(task):
    return re.sub(r"-v\d+$", "", task.removeprefix("MiniGrid-"))
