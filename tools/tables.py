"""Rows of results by suite, beside the paper's numbers, and the words for them."""

import contextlib
import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import aggregate
import numpy as np
from output import read_rows
from run_records import RESULTS, SUITES, Records, script_of

PAPER = RESULTS / "paper"
OF_THE_PAPER = ("one-step", "n-step", "tree", "graph")
FRONTIER = "graph, frontier"
TITLES = {
    ("minigrid", ""): "MiniGrid",
    ("minigrid-hard", ""): "MiniGrid, harder tasks",
    ("minatar", "fixed"): "MinAtar, fixed episode seeds",
    ("minatar", "fresh"): "MinAtar, fresh episodes",
    ("minatar-1m", "fixed"): "MinAtar, 1,000,000 steps, fixed episode seeds",
    ("minatar-1m", "fresh"): "MinAtar, 1,000,000 steps, fresh episodes",
    ("atari100k", ""): "Atari 100K",
}


@dataclass(eq=False)  # hashed by identity, for caches
class Protocol:
    """The runs of one suite and one episode seeding, and what the paper has for it."""

    suite: str
    episode_seed: str
    tasks: list
    runs: dict  # setting -> task -> {seed: dict with numbers, and a curve}
    paper: dict  # backup -> task -> (mean, std)
    scales: dict  # task -> score that counts as 1

    @property
    def title(self):
        return TITLES[self.suite, self.episode_seed]

    @property
    def slug(self):
        return "_".join(filter(None, (self.suite.replace("-", "_"), self.episode_seed)))

    def settings(self):
        """Those of the paper first, then by name."""
        others = sorted(self.runs.keys() - {*OF_THE_PAPER, *self.released()})
        return [name for name in OF_THE_PAPER if self.paper or name in self.runs] + others

    def released(self):
        """Settings with the released code's update, which have a table of their own."""
        return sorted(name for name in self.runs if name.endswith("as released"))

    def scores(self, setting, step=None):
        """task -> {seed: score}, at the end or after a step."""
        found = {}
        for task, seeds in self.runs.get(setting, {}).items():
            scores = {
                seed: run["score"] if step is None else aggregate.score_at(run["curve"], step)
                for seed, run in seeds.items()
            }
            found[task] = {seed: score for seed, score in scores.items() if score is not None}
        return found

    def columns(self, setting, normalised=False, step=None):
        """An array of scores per task; None until every task has a run."""
        scales = self.scales if normalised else dict.fromkeys(self.tasks, 1.0)
        return aggregate.columns(self.scores(setting, step), self.tasks, scales)

    def mean(self, setting, step=None):
        """Mean of the tasks' means; None until every task has a run."""
        found = self.columns(setting, step=step)
        return None if found is None else float(aggregate.mean_of_tasks(*found))

    def paper_mean(self, backup):
        means = [self.paper.get(backup, {}).get(task, (np.nan,))[0] for task in self.tasks]
        return float(np.mean(means))  # nan if one is missing

    @functools.cache  # noqa: B019
    def estimate(self, statistic, setting, normalised=False):
        found = self.columns(setting, normalised)
        return None if found is None else aggregate.estimate(statistic, found)

    @functools.cache  # noqa: B019
    def gain(self, setting, other, tasks=None, normalised=False):
        """Estimate of the mean difference over tasks, on the seeds of both; None without any."""
        tasks = self.tasks if tasks is None else tasks
        scales = self.scales if normalised else dict.fromkeys(tasks, 1.0)
        return aggregate.difference(self.scores(setting), self.scores(other), tasks, scales)

    def cell(self, setting, task):
        """Summary of our scores; None without runs."""
        return aggregate.summary(self.scores(setting).get(task, {}).values())

    def verdict(self, setting, task):
        """inside, above or below the paper's; "" without runs or without the paper's number."""
        paper = self.paper.get(backup_of(setting), {}).get(task)
        is_comparable = setting in OF_THE_PAPER or setting in self.released()
        cell = self.cell(setting, task)
        return aggregate.verdict(cell.mean, *paper) if cell and paper and is_comparable else ""

    def distance(self, setting):
        """Mean distance of our normalised means from the paper's; None without all tasks."""
        found = self.columns(setting, normalised=True)
        if found is None:
            return None
        return np.mean([
            abs(column.mean() - self.paper[backup_of(setting)][task][0] / self.scales[task])
            for task, column in zip(self.tasks, found, strict=True)
        ])  # fmt: skip

    def best(self, task, seed):
        """The best evaluation of any run of the task and the seed."""
        runs = [seeds[seed] for of in self.runs.values() for seeds in [of.get(task, {})]
                if seed in seeds]  # fmt: skip
        return max((max(run["curve"].values(), default=0.0) for run in runs), default=0.0)

    def of_all(self, *settings):
        """Every run of these settings."""
        return [run for name in settings for seeds in self.runs.get(name, {}).values()
                for run in seeds.values()]  # fmt: skip

    def curves(self, settings):
        """Task -> setting -> `aggregate.band` of its runs, where there are any with curves."""
        found = {}
        for task, setting in itertools.product(self.tasks, settings):
            runs = self.runs.get(setting, {}).get(task, {}).values()
            curves = [run["curve"] for run in runs if run["curve"]]
            if curves:
                found.setdefault(short_task(task), {})[setting] = aggregate.band(curves)
        return found

    def novel_ratio(self, task):
        """graph's mean novel state ratio; nan without runs."""
        runs = self.runs.get("graph", {}).get(task, {}).values()
        return float(np.mean([run["novel_state_ratio"] for run in runs])) if runs else np.nan


def backup_of(setting):
    return setting.partition(",")[0]


def setting_of(backup, variant):
    """graph, breadth 0; graph, frontier, share 0.1."""
    words = [
        {"exploration=frontier": "frontier", "persist_targets=True": "persistent"}.get(word)
        or word.removeprefix("frontier_").replace("_", " ").replace("=", " ")
        for word in variant.split()
    ]
    return ", ".join([backup, *words])


def read_paper():
    """suite -> backup -> task -> (mean, std)."""
    found = {}
    for row in read_rows(PAPER / "paper_results.csv"):
        if row["metric"] != "raw_score":
            backups = found.setdefault(row["suite"], {})
            cell = float(row["mean"]), float(row["std"])
            backups.setdefault(row["backup"], {})[row["task"]] = cell
    return found


def new_protocol(suite, episode_seed, paper):
    numbers = paper.get(suite, {})
    tasks = list(numbers.get("graph", ())) or [
        script_of(suite).task_of(task) for task in SUITES[suite].tasks
    ]
    scales = dict.fromkeys(tasks, 100.0 if suite == "atari100k" else 1.0)
    if suite.startswith("minatar"):
        scales = {t: max(numbers[b][t][0] for b in OF_THE_PAPER) for t in tasks}
    return Protocol(suite, episode_seed, tasks, {}, numbers, scales)


def read_protocols(results_dir):
    """Every protocol that has rows, in the order of TITLES."""
    records, paper, found = Records(results_dir), read_paper(), {}
    human = {
        row["game"]: (float(row["random"]), float(row["human"]))
        for row in read_rows(PAPER / "atari_reference_scores.csv")
    }
    for suite in SUITES:
        curves = records.curves(suite)
        for key, text in records.rows(suite).items():
            where = suite, key.episode_seed
            protocol = found.setdefault(where, new_protocol(*where, paper))
            run = {name: float(text[name]) if text[name] else None for name in (
                "score", "wall_seconds", "novel_state_ratio", "states", "first_reward_step",
            )} | {"commit": text["commit"], "curve": curves.get(key, {})}  # fmt: skip
            if suite == "atari100k":  # the paper's tables are in percent of human
                low, high = human[key.task]
                run["score"] = 100 * (run["score"] - low) / (high - low)
            of_task = protocol.runs.setdefault(setting_of(key.backup, key.variant), {})
            of_task.setdefault(key.task, {})[key.seed] = run
    with contextlib.suppress(FileNotFoundError):
        for row in read_rows(Path(results_dir) / "released_n_step.csv"):
            released = ", as released" if row["update"] == "released" else ""
            setting = f"n-step, depth {row['depth']}{released}"
            if protocol := found.get((row["suite"], row["episode_seed"])):
                of_task = protocol.runs.setdefault(setting, {}).setdefault(row["task"], {})
                of_task[int(row["seed"])] = {"score": float(row["score"]), "curve": {}}
    return [found[where] for where in TITLES if where in found]


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def short(value):
    """Two decimals; no minus sign before zero, a dash for nothing."""
    return "-" if value is None or np.isnan(value) else f"{round(value, 2) + 0.0:.2f}"


def cell_text(scores):
    """0.38 ± 0.47 (5); of one seed 0.96 (1)."""
    cell = aggregate.summary(scores)
    if cell is None:
        return "-"
    spread = f" ± {short(cell.std)}" if cell.number > 1 else ""
    return f"{short(cell.mean)}{spread} ({cell.number})"


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


def count(n, noun):
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(words):
    """a; a and b; a, b and c."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
