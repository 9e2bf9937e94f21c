"""Tables and curves of docs/frontier.md: every setting with the frontier and without."""

import dataclasses

import aggregate
import numpy as np
import report_figures
from tables import (
    FRONTIER,
    chance_text,
    interval,
    markdown,
    short,
    short_task,
)

JUDGED = {"supported": "better", "contradicted": "worse"}


def pairs(protocol):
    """(setting with the frontier, the same without) of those that both have runs."""
    for setting in sorted(protocol.runs, key=lambda name: (name != FRONTIER, name)):
        without = setting.split(", frontier")[0]
        if setting != without and without in protocol.runs:
            yield setting, without


def explored(protocols):
    """Protocols with runs of graph with and without the frontier, of every task."""
    return [p for p in protocols if p.gain(FRONTIER, "graph")]


def findings(protocols):
    """MiniGrid: 0.54 and 0.96 (better, p < 0.001)"""
    for p in explored(protocols):
        gain = p.gain(FRONTIER, "graph")
        support, chance = aggregate.support(gain), chance_text(gain.p)
        yield (
            f"{p.title}: {short(p.mean('graph'))} and {short(p.mean(FRONTIER))} "
            f"({JUDGED.get(support, support)}, p {chance if '<' in chance else f'= {chance}'})"
        )


def in_short(protocols, folder):
    """The head of the page: a picture of the first suite, and a line of each."""
    for p in explored(protocols)[:1]:
        name = f"frontier_{p.slug}_curves.png"
        report_figures.draw_curves(folder / name, p.curves(["graph", FRONTIER]))
        yield f"![Learning curves with and without frontier episodes, {p.title}]({name})"
        yield "Mean score of `graph` over the tasks of a suite, without and with frontier episodes:"
    yield "\n".join(f"- {text}" for text in findings(protocols))


def row(protocol, setting, without, tasks, label):
    """What the frontier changes on a task, or in the mean of several; None where runs miss."""
    gain = protocol.gain(setting, without, tasks)
    if gain is None:
        return None
    tables = aggregate.on_the_same_seeds(*map(protocol.scores, (without, setting)))
    cells, states, firsts = [], [], []
    for name, table in zip((without, setting), tables, strict=True):
        runs = [(protocol.runs[name][t][s], protocol.best(t, s)) for t in tasks for s in table[t]]
        solved = sum(run["score"] >= aggregate.SOLVED * best > 0 for run, best in runs)
        mean = short(np.mean([np.mean(list(table[task].values())) for task in tasks]))
        is_solvable = protocol.suite.startswith("minigrid")
        cells.append(f"{mean}, {solved} of {len(runs)}" if is_solvable else mean)
        states.append(f"{np.median([run['states'] for run, _ in runs]):,.0f}")
        steps = [run["first_reward_step"] or np.inf for run, _ in runs]
        firsts.append("-" if np.isinf(np.median(steps)) else f"{np.median(steps):,.0f}")
    gains = [tables[1][t][s] - old for t in tasks for s, old in tables[0][t].items()]
    higher, lower = (sum(sign * change > 0 for change in gains) for sign in (1, -1))
    support = aggregate.support(gain)
    found = [" → ".join(pair) for pair in (states, firsts)] if len(tasks) == 1 else ["", ""]
    return [label, *cells, interval(gain), f"{higher} : {lower}", chance_text(gain.p),
            JUDGED.get(support, support), *found]  # fmt: skip


HEADER = ["", "off", "frontier", "difference", "higher : lower", "p", "", "states",
          "first reward at step"]  # fmt: skip


def rows_of(protocol):
    """graph task by task, and the mean of all tasks; of other settings that, or the tasks run."""
    tasks = tuple(protocol.tasks)
    for setting, without in pairs(protocol):
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
        for task, runs in new.runs[FRONTIER].items():
            both = dataclasses.replace(old, runs={
                name: {task: old.runs[name][task] | new.runs[name][task]}
                for name in (FRONTIER, "graph")
            })  # fmt: skip
            for protocol, seeds in ((new, runs), (both, both.runs[FRONTIER][task])):
                label = f"{new.title}: {short_task(task)}, seeds {min(seeds)} to {max(seeds)}"
                yield row(protocol, FRONTIER, "graph", (task,), label)


def tables(protocols, more):
    """The tables of the page, in parts."""
    for p in (p for p in protocols if any(pairs(p))):
        yield f"### {p.title}"
        yield markdown(HEADER, filter(None, rows_of(p)))
        half = max(max(run["curve"], default=0) for run in p.of_all("graph", FRONTIER)) // 2
        means = [p.mean(name, half) for name in ("graph", FRONTIER)]
        if None not in means:
            yield f"After {half:,} steps the means are {short(means[0])} and {short(means[1])}."
    found = list(filter(None, repetitions(protocols, more)))
    if found:
        yield "### Further seeds"
        yield "Of tasks chosen after the tables above were known, alone and with the seeds above."
        yield markdown(HEADER, found)
