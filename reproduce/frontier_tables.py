"""Tables and curves of docs/frontier.md: every setting with the frontier and without."""

import dataclasses

import aggregate
import folders  # noqa: F401  (the tools)
import numpy as np
import report_figures
from output import markdown
from tables import FRONTIER, chance_text, interval, short, short_task

SOLVED = 0.9  # of the best evaluation that any run had on the same task and seed
JUDGED = {"supported": "better", "contradicted": "worse"}
HEADER = ["", "off", "frontier", "difference", "higher : lower", "p", "", "states",
          "first reward at step"]  # fmt: skip


def findings(protocols, setting=FRONTIER, without="graph"):
    """MiniGrid: 0.54 and 0.96 (better, p < 0.001, 5 seeds)"""
    for p in protocols:
        gain = p.gain(setting, without)
        if gain is not None:
            found, means = judged(gain), " and ".join(map(short, p.means(without, setting)))
            normalised = judged(p.gain(setting, without, normalised=True))
            if normalised.split(",")[0] != found.split(",")[0]:
                found += f"; normalised {normalised}"
            yield f"{p.title}: {means} ({found}, {gain.seeds} seed{'s' * (gain.seeds > 1)})"


def judged(gain):
    """better, p < 0.001"""
    support, chance = aggregate.support(gain), chance_text(gain.p)
    return f"{JUDGED.get(support, support)}, p {'= ' * ('<' not in chance)}{chance}"


def in_short(protocols, folder):
    """The head of the page: a picture of the first suite, and a line of each."""
    name, first = f"frontier_{protocols[0].slug}_curves.png", protocols[0]
    report_figures.draw_curves(folder / name, first.curves(["graph", FRONTIER]))
    yield f"![Learning curves with and without frontier episodes, {first.title}]({name})"
    yield "Mean score of `graph` over the tasks of a suite, without and with frontier episodes:"
    yield "\n".join(f"- {text}" for text in findings(protocols))


def row(protocol, setting, without, tasks, label):
    """What the frontier changes on a task, or in the mean of several; None where runs miss."""
    gain = protocol.gain(setting, without, tasks)
    if gain is None:
        return None
    runs_of = protocol.runs
    pairs = [(t, s) for t in tasks for s in runs_of[setting, t] if s in runs_of[without, t]]
    cells, states, firsts, scores = [], [], [], []
    for name in (without, setting):
        runs = [runs_of[name, task][seed] for task, seed in pairs]
        scores.append(np.array([run["score"] for run in runs]))
        means = [scores[-1][[task == t for t, _ in pairs]].mean() for task in tasks]
        cells.append(short(np.mean(means)))
        if protocol.suite.startswith("minigrid"):
            bests = [best(protocol, *pair) for pair in pairs]
            solved = [score >= SOLVED * b > 0 for score, b in zip(scores[-1], bests, strict=True)]
            cells[-1] += f", {sum(solved)} of {len(runs)}"
        states.append(f"{np.median([run['states'] for run in runs]):,.0f}")
        first = np.median([run["first_reward_step"] or np.inf for run in runs])
        firsts.append("-" if np.isinf(first) else f"{first:,.0f}")
    old, new = scores
    support = aggregate.support(gain)
    found = [" → ".join(pair) for pair in (states, firsts)] if len(tasks) == 1 else ["", ""]
    return [label, *cells, interval(gain), f"{sum(new > old)} : {sum(new < old)}",
            chance_text(gain.p), JUDGED.get(support, support), *found]  # fmt: skip


def best(protocol, task, seed):
    """The best evaluation of any run of the task and the seed."""
    runs = [seeds[seed] for (_, t), seeds in protocol.runs.items() if t == task and seed in seeds]
    return max(max(run["curve"].values(), default=0.0) for run in runs)


def rows_of(protocol):
    """graph task by task, and the mean of all tasks; of other settings that, or the tasks run."""
    tasks, given = tuple(protocol.tasks), {setting for setting, _ in protocol.runs}
    for setting in sorted(given, key=lambda name: (name != FRONTIER, name)):
        without = setting.split(", frontier")[0]
        if setting == without or without not in given:
            continue
        name = setting.replace(", frontier", "").removeprefix("graph")
        name = f", {name.removeprefix(', ')}" if name else ""
        whole = row(protocol, setting, without, tasks, f"**mean of tasks{name}**")
        if setting == FRONTIER or whole is None:
            for task in tasks:
                yield row(protocol, setting, without, (task,), short_task(task) + name)
        yield whole


def repetitions(protocols, more):
    """Rows of further seeds of single tasks, alone and with the seeds of the tables."""
    for new in more:
        (old,) = (p for p in protocols if p.title == new.title)
        joined = {where: old.runs[where] | runs for where, runs in new.runs.items()}
        for task in dict.fromkeys(task for _, task in new.runs):
            for protocol in (new, dataclasses.replace(old, runs=joined)):
                seeds = protocol.runs[FRONTIER, task]
                label = f"{new.title}: {short_task(task)}, seeds {min(seeds)} to {max(seeds)}"
                yield row(protocol, FRONTIER, "graph", (task,), label)


def tables(protocols, more):
    """The tables of the page, in parts."""
    parts = [(f"### {p.title}", list(filter(None, rows_of(p)))) for p in protocols]
    parts.append((
        "### Further seeds\n\n"
        "Of tasks chosen after the tables above were known, alone and with the seeds above.",
        list(filter(None, repetitions(protocols, more))),
    ))  # fmt: skip
    for title, rows in parts:
        if rows:
            yield title
            yield markdown(HEADER, rows)
