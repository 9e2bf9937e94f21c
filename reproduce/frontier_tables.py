"""Tables of docs/frontier_scores.md: every setting with the frontier and without."""

import dataclasses

import aggregate
import folders  # noqa: F401  (the tools)
import numpy as np
from output import markdown
from tables import FRONTIER, chance_text, interval, short, short_task

SOLVED = 0.9  # of the best evaluation that any run had on the same task and seed
JUDGED = {"supported": "better", "contradicted": "worse"}
HEADER = ["", "off", "frontier", "difference", "higher : lower", "p", "", "states"]
HEADER += ["first reward at step"]


def row(protocol, setting, without, tasks, label):
    """What the frontier changes on a task, or in the mean of several; None where runs miss."""
    gain, runs_of = protocol.gain(setting, without, tasks), protocol.runs
    if gain is None:
        return None
    pairs = [(t, s) for t in tasks for s in runs_of[setting, t] if s in runs_of[without, t]]
    runs = [[runs_of[name, t][s] for t, s in pairs] for name in (without, setting)]
    old, new = (np.array([run["score"] for run in of]) for of in runs)
    cells = list(map(short, protocol.means(without, setting, tasks=tasks)))
    if protocol.suite.startswith("minigrid"):
        bests = np.array([best(protocol, *pair) for pair in pairs])
        for i, scores in enumerate((old, new)):
            solved = (scores >= SOLVED * bests) & (bests > 0)
            cells[i] += f", {solved.sum()} of {len(pairs)}"
    medians = ["", ""]
    if len(tasks) == 1:
        states = (np.median([run["states"] for run in of]) for of in runs)
        firsts = (np.median([run["first_reward_step"] or np.inf for run in of]) for of in runs)
        medians = [" → ".join(f"{n:,.0f}" for n in found) for found in (states, firsts)]
    support = aggregate.support(gain)
    ratio = f"{sum(new > old)} : {sum(new < old)}"
    cells += [interval(gain), ratio, chance_text(gain.p), JUDGED.get(support, support), *medians]
    return [label, *(cell.replace("inf", "-") for cell in cells)]


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
    about = "Of tasks chosen after the tables above were known, alone and with the seeds above."
    parts = [(f"### {p.title}", rows_of(p)) for p in protocols]
    parts += [(f"### Further seeds\n\n{about}", repetitions(protocols, more))]
    for title, rows in parts:
        if rows := list(filter(None, rows)):
            yield title
            yield markdown(HEADER, rows)
