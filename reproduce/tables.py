"""Rows of results by suite, beside the paper's numbers, and the words for them."""

import itertools
import re
from dataclasses import dataclass

import aggregate
import numpy as np
import pandas as pd
from folders import RESULTS
from suites import curve_of, read_table, script_of, tasks_of

PAPER_BACKUPS = ("one-step", "n-step", "tree", "graph")
FRONTIER = "graph, frontier"
RELEASED = ", as released"  # with the update of the code that the authors released
SAME_RATE = ", rate 2.5e-4"  # of learning
WHOLE = f"whole-graph{SAME_RATE}, prior 0.3"  # docs/minatar.md
SUMMARY = [*PAPER_BACKUPS, FRONTIER, f"tree{SAME_RATE}", "whole-graph"]  # columns
ATARI, BF16 = "atari100k", "bf16=True"
NAMED = {"exploration=frontier": "frontier", "persist_targets=True": "persistent"}
NAMED |= {"learning_rate=0.00025": "rate 2.5e-4", "update=released": "as released"}
TITLES = {
    ("minigrid", ""): "MiniGrid",
    ("minigrid-hard", ""): "MiniGrid, harder tasks",
    ("minatar", "fixed"): "MinAtar, fixed episode seeds",
    ("minatar", "fresh"): "MinAtar, fresh episodes",
    ("minatar-1m", "fixed"): "MinAtar, 1,000,000 steps, fixed episode seeds",
    ("minatar-1m", "fresh"): "MinAtar, 1,000,000 steps, fresh episodes",
    (ATARI, ""): "Atari 100K",
}


@dataclass
class Protocol:
    """The runs of one suite and one episode seeding, beside the paper's numbers."""

    suite: str
    episode_seed: str
    runs: pd.DataFrame  # rows of results, each with its setting
    means: pd.DataFrame  # the paper's, a row for each of its backups and a column for each task
    stds: pd.DataFrame

    @property
    def title(self):
        return TITLES[self.suite, self.episode_seed]

    @property
    def tasks(self):
        return [*self.means]

    @property
    def in_paper(self):
        return bool(self.means.notna().any(axis=None))

    @property
    def is_scaled(self):
        """Do tasks differ in what a score is worth?"""
        return self.suite.startswith("minatar")

    def settings(self):
        """Those of the paper first, then by name."""
        result = set(self.runs.setting)
        return [n for n in PAPER_BACKUPS if n in result] + sorted(result - set(PAPER_BACKUPS))

    def runs_of(self, setting, task):
        """Rows, in the order of their seeds."""
        return self.runs[(self.runs.setting == setting) & (self.runs.task == task)]

    def scores(self, setting, normalised=False):
        """A row for each seed and a column for each task."""
        runs = self.runs[self.runs.setting == setting]
        table = runs.pivot(index="seed", columns="task", values="score")
        table = table.reindex(columns=self.tasks)
        return table / self.means.max() if normalised and self.is_scaled else table

    def gains(self, setting, other, normalised=False):
        """Scores less another setting's, of the seeds that both have."""
        return self.scores(setting, normalised) - self.scores(other, normalised)

    def paper_mean(self, setting, tasks=None):
        """Mean over tasks, all by default, of the paper's numbers; nan if one is missing."""
        means = self.means.reindex(index=[setting], columns=tasks or self.tasks)
        return float(means.mean(axis=1, skipna=False).iloc[0])

    def paper_cell(self, backup, task):
        """The paper's mean and std."""
        return self.means.loc[backup, task], self.stds.loc[backup, task]

    def verdict(self, setting, task):
        """inside, above or below the paper's; "" without runs or without the paper's number."""
        scores = self.runs_of(setting, task).score
        is_compared = setting in PAPER_BACKUPS or setting.endswith(RELEASED)
        if not (self.in_paper and is_compared and len(scores)):
            return ""
        return aggregate.verdict(scores.mean(), *self.paper_cell(backup_of(setting), task))

    def cell(self, setting, task):
        """0.38 ± 0.47 (5), inside"""
        text = cell_text(self.runs_of(setting, task).score)
        return ", ".join(filter(None, (text, self.verdict(setting, task))))

    def curves(self, settings):
        """Task -> setting -> mean, error and number of seeds of what runs with curves scored."""
        result, window = {}, 1 if self.suite == ATARI else 5  # evaluations
        for task, setting in itertools.product(self.tasks, settings):
            if curves := [*map(curve_of, filter(None, self.runs_of(setting, task).curve))]:
                table = (
                    pd.concat(curves, axis=1, join="inner").rolling(window, min_periods=1).mean()
                )
                curve = table.mean(axis=1), table.sem(axis=1), len(curves)
                result.setdefault(short_task(task), {})[setting] = curve
        return result


def backup_of(setting):
    return setting.partition(",")[0]


def setting_of(backup, variant):
    """graph, breadth 0; graph, frontier, share 0.1; in bfloat16 the same."""
    words = [word for word in variant.split() if word != BF16]
    words = [NAMED.get(w, re.sub("[_=]", " ", w.removeprefix("frontier_"))) for w in words]
    return ", ".join([backup, *words])


def read_paper(suite):
    """Means and stds of the paper, as in `Protocol`; Atari's in percent of human."""
    table = pd.read_csv(RESULTS / "paper" / "paper_results.csv")
    table = table[(table.suite == suite) & (table.metric != "raw_score")]
    tasks = [*(table.task.unique() if len(table) else tasks_of(suite))]
    tables = (table.pivot(index="backup", columns="task", values=name) for name in ("mean", "std"))
    return [part.reindex(index=PAPER_BACKUPS, columns=tasks) for part in tables]


def read_protocols(*folders):
    """Every protocol that has rows, in the order of TITLES.

    Runs in bfloat16 stand in where there are no others of their setting and seed.
    """
    table, result = pd.concat(map(read_table, folders)), []
    table["setting"] = [*map(setting_of, table.backup, table.variant)]
    table = table.sort_values("variant", key=lambda text: text.str.contains(BF16), kind="stable")
    table = table.drop_duplicates(["suite", "task", "setting", "episode_seed", "seed"])
    for suite, episode_seed in TITLES:
        means, stds = read_paper(suite)
        runs = table[(table.suite == suite) & (table.episode_seed == episode_seed)]
        runs = runs[runs.task.isin(means)].copy()
        if suite == ATARI:  # the paper's tables are in percent of human, of 26 games
            percent = map(script_of(ATARI).human_normalized, runs.task, runs.score)
            runs["score"] = [100 * score for score in percent]
            means, stds = (part[[n for n in part if n in set(runs.task)]] for part in (means, stds))
        if len(runs):
            result.append(Protocol(suite, episode_seed, runs, means, stds))
    return result


def short(value):
    """Two decimals; no minus sign before zero, a dash for nothing."""
    return "-" if value is None or np.isnan(value) else f"{round(value, 2) + 0.0:.2f}"


def cell_text(scores):
    """0.38 ± 0.47 (5); of one seed 0.96 (1). The deviation is the population's, as the paper's."""
    if not len(scores):
        return "-"
    spread = f" ± {short(np.std(np.asarray(scores)))}" if len(scores) > 1 else ""
    return f"{short(np.mean(scores))}{spread} ({len(scores)})"


def interval(estimate):
    """0.58 [0.40, 0.71]; without the interval from few seeds."""
    if estimate is None:
        return "-"
    limits = f" [{short(estimate.low)}, {short(estimate.high)}]"
    return short(estimate.value) + ("" if np.isnan(estimate.low) else limits)


def short_task(task):
    return re.sub(r"-v\d+$", "", task.removeprefix("MiniGrid-"))
