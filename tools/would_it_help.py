"""Would Graph Backup help on this environment? Play it for a while, and look at the graph.

    python tools/would_it_help.py CartPole-v1
    python tools/would_it_help.py MinAtar/freeway --steps 50000
    python tools/would_it_help.py runs/RUN                       # the graph that a run recorded

Graph Backup (Jiang et al. 2022) assumes that trajectories cross and that observations are Markovian
states. Where they never cross it is tree backup; where an observation hides something it averages
over what differs. This prints measures of both, says which assumption fails, and gives a verdict.
What is played is looked at under other keys, too: what else could make two observations one state
(see `TransitionGraph`). It tells whether targets change, not by how much a score does.
"""

import itertools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from gbtools import measures, play, recorded
from gbtools.output import arguments, fail, lasting_output, warn

from gbcore.graph import MAX_DEPTH
from gbcore.run import Amount, Count
from gbcore.run.directory import with_file
from gbcore.run.environment import rounded


@dataclass
class Args:
    task: tyro.conf.Positional[str]
    """a run's folder, a task of the three scripts, or any Gymnasium id (also module:Id-v0)"""
    env_kwargs: str | None = None  # of a Gymnasium id: what gymnasium.make takes, as JSON
    time_limit: Count | None = None  # of a Gymnasium id: steps of an episode
    leave_out: str | None = None  # of a Gymnasium id: parts of observations, as in a,b
    steps: Count = 20_000  # random actions to play; of a run's folder none
    depth: Annotated[int, (0, MAX_DEPTH)] = 0
    """nested backups per target; 0 = the run's or its script's, or 5"""
    breadth: Amount | None = None
    """transitions followed per level; 0 = all; default: the run's or its script's, else 20"""
    sampled: Count = 2_000  # targets compared
    seed: Amount = 1  # seed of the environment and of all sampling


PLAIN = "the observation"
OF_TASK = "env_kwargs", "time_limit", "leave_out"  # flags of what is played, as its script's
PLAYED = *OF_TASK, "steps"
LEAST = 200  # transitions, for a verdict
RARE = 0.001  # share of rewarded steps below which exploration comes first
FIRST = 500  # rows that are looked at for the keys to try
SHADES = 8  # of a shrunk image
FEW = 0.05  # share of targets unlike tree backup's below which there is nothing to gain
MANY = 0.3
GAMMA = 0.99  # of the targets compared
HIDDEN = 0.01  # share of the uncertainty that the step before may explain
JUDGED = 0.05, 200  # share and number of steps of pairs that came again, to say so at least
STILL = 0.5  # share of the steps that may change nothing under a key


def keys_for(rows):
    """Keys to try for rows like these, of `play.stream`: by name, the key and its flag or None.

    A key is a function of an observation and of the action before it.
    """
    obs = np.stack([row[0] for row in rows])
    keys = {PLAIN: (lambda obs, _: obs, None)}
    axis, newest = channels_of(rows)
    sides = np.delete(obs.shape[1:], [] if axis is None else axis)
    if len(sides) == 2 and min(sides) >= 32:
        low, high = float(obs.min()), float(obs.max())
        for side in (21, 12):
            name = "newest frame, " * (newest is not None) + f"shrunk to {side}x{side}"
            keys[name] = shrinking(axis, newest, side, low, high), None
        return keys
    spread = float(np.ptp(obs.reshape(len(obs), -1).astype(np.float64), axis=0).max())
    if spread > 0:  # the widest number gets about 1,000, 100 and 10 values
        digits = -int(np.floor(np.log10(spread)))
        for decimals in range(min(digits + 2, 9), max(digits, -9) - 1, -1):
            flag = f"--round={decimals}"
            if obs.dtype.kind == "f" or decimals < 0:
                keys[flag] = (lambda obs, _, n=decimals: rounded(obs, n)), flag
    if obs.dtype.kind != "f":
        keys["with the last action"] = (
            lambda obs, action: np.append(obs.astype(np.int64), action), "--key-last-action"
        )  # fmt: skip
    return keys


def channels_of(rows):
    """Axis of an image's channels or frames, or None; where each step moves them on by one, as a
    stack of frames does, the newest one's index."""
    shape = rows[0][0].shape
    if len(shape) != 3:
        return None, None
    axis = 2 if shape[2] < shape[0] else 0
    pairs = [(np.moveaxis(row[0], axis, 0), np.moveaxis(row[3], axis, 0)) for row in rows]
    changes = any((obs != after).any() for obs, after in pairs)
    if shape[axis] > 1 and changes:
        if all(np.array_equal(obs[1:], after[:-1]) for obs, after in pairs):
            return axis, -1
        if all(np.array_equal(obs[:-1], after[1:]) for obs, after in pairs):
            return axis, 0
    return axis, None


def shrinking(axis, newest, side, low, high):
    """Means over blocks of an image, of its newest frame or of each channel, in SHADES shades."""

    def key(obs, _):
        image = obs[None] if axis is None else np.moveaxis(obs, axis, 0)
        image = (image if newest is None else image[newest][None]).astype(np.float64)
        for of_side in (1, 2):
            length = image.shape[of_side]
            starts = np.arange(side) * length // side
            sizes = np.diff(starts, append=length).reshape((-1,) + (1,) * (2 - of_side))
            image = np.add.reduceat(image, starts, axis=of_side) / sizes
        share = (image - low) / max(high - low, 1e-300)
        return np.clip(share * SHADES, 0, SHADES - 1).astype(np.uint8)

    return key


def collect(args, rng):
    """By key what was recorded or played, the script's flags, and (suite, task, flags of the keys)
    of what was played."""
    path = Path(args.task).expanduser()
    if path.exists() or path.parts[:1] == ("runs",) or path.suffix == ".npz":
        idle = [f"--{n.replace('_', '-')}" for n in PLAYED if getattr(args, n) != getattr(Args, n)]
        if idle:
            warn(f"{' and '.join(idle)} do nothing with a run: its own transitions are looked at")
        run = recorded.read(path)
        return {PLAIN: run}, run.config or {}, None
    suite, task = play.suite_of(args.task)
    more = {name: value for name in OF_TASK if (value := getattr(args, name)) is not None}
    if more and suite != "gymnasium":
        flag = f"--{next(iter(more)).replace('_', '-')}"
        fail(f"{flag} is for environments that {play.SUITES['gymnasium'][0]} plays")
    num_actions, rows = play.stream(suite, task, rng, args.seed, **more)
    first = list(itertools.islice(rows, min(FIRST, args.steps)))
    keys = keys_for(first)
    keyed = {name: key for name, (key, _) in keys.items()}
    found = play.record_by_keys(num_actions, itertools.chain(first, rows), args.steps, task, keyed)
    flags = {name: flag for name, (_, flag) in keys.items() if flag and suite == "gymnasium"}
    return found, vars(play.script_of(suite).Args()), (suite, task, more, flags)


def measure(run, depth, breadth, sampled, rng):
    """Everything that the verdict is made from."""
    graph, replay = run.graph, run.replay
    found = measures.crossovers(graph) | {"depth": depth}
    if replay is None:
        return found
    changes = measures.target_changes(graph, replay, depth, breadth, GAMMA, rng, sampled)
    found |= {f"targets_{name}": value for name, value in changes.items()}
    return found | {f"memory_{name}": v for name, v in measures.memory(replay, rng).items()}


def hides_something(found):
    """Does the step before tell more about an outcome than chance would?"""
    explained = found.get("memory_explained")
    return explained is not None and found["memory_p"] < 0.01 and explained > HIDDEN


def is_judged(found):
    """Did enough pairs come again to tell whether states hide something?"""
    share, rows = JUDGED
    return found["memory_judged"] >= max(share, rows / found["transitions"])


def objection(found, still=STILL):
    """Why a key does not pass for what makes a state; "" where it does."""
    if found["acted_in"] < 2:
        return "one state"
    if found["self_loops"] > max(still, STILL):
        return "too coarse"
    if not is_judged(found):
        return "too few repetitions"
    return "not Markovian" if hides_something(found) else ""


def coarsest(by_key, why="", least=0.0):
    """The key with the fewest states of those that pass, or to which this alone is objected.

    least: share of the targets that have to be unlike tree backup's. None where there is no such.
    """
    still = by_key[PLAIN]["self_loops"]
    chosen = [
        key
        for key, found in by_key.items()
        if objection(found, still) == why and found.get("targets_read", 0.0) >= least
    ]
    return min(chosen, key=lambda key: by_key[key]["states"], default=None)


def judge(found):
    """Which assumptions fail, and the verdict: sentences."""
    failing = []
    if found["transitions"] < LEAST:
        return failing, f"No verdict: require {LEAST} steps, got {found['transitions']:,}."
    ratio, changed = found["novel_state_ratio"], found.get("targets_read")
    if found["acted_in"] < 2:
        failing.append("States: all that was done was done in one state.")
        return failing, "No: where all observations are alike there is nothing to nest."
    if found["real_numbers"] and ratio > 0.9:
        failing.append(
            "Crossovers: observations are real numbers that hardly ever come again (novel state "
            f"ratio {ratio:.3f}). Without a coarser key there is no graph."
        )
    elif changed is not None and changed < FEW:
        failing.append(
            f"Crossovers: {changed:.1%} of the targets differ from tree backup's at all."
            + " Nearly all states are new: is a clock in what is observed?" * (ratio > 0.9)
        )
    if hides_something(found):
        failing.append(
            f"Markov: the step before explains {found['memory_explained']:.1%} of what is "
            f"uncertain about an outcome (p {found['memory_p']:.3f}). Perhaps the state hides "
            "something: a velocity, a timer, the last action where actions stick. Digits that were "
            "rounded away and states that are rare look the same: more --steps tell."
        )
    if changed is None:
        return failing, "No verdict: tree backup needs the replay, which is not here."
    if changed < FEW:
        return failing, "No: at this depth Graph Backup is tree backup here, and slower."
    verdict = f"{changed:.0%} of the targets are not tree backup's"
    if changed < MANY:
        verdict = f"Perhaps, a little: {verdict}. Expect its score, or slightly more."
    elif found["targets_zero"] >= 0.0005:
        zero = found["targets_zero"]
        verdict = f"Worth trying: {verdict}; {zero:.1%} are higher by rewards that it misses."
    else:
        verdict = (
            f"Worth trying: {verdict}; but hardly one is higher by a reward that it misses. "
            "Collect more transitions before you trust this."
        )
    if hides_something(found):
        verdict += " But states that hide something are averaged over: compare with tree backup."
    elif not is_judged(found):
        verdict += " Too few steps came again to tell whether states hide something."
    if found["rewarded"] < RARE:
        met = (
            f"{found['rewarded']:.3%} of the steps had one" if found["rewarded"] else "none was met"
        )
        verdict += f" First of all, exploration has to find a reward: {met}."
    return failing, verdict


# The backup that won in a suite's tasks where many targets differ: docs/whole_graph.md.
BEST = {
    "minigrid": "whole-graph --exploration frontier",
    "minatar": "whole-graph --prior 0.3 --learning-rate 2.5e-4",
    "gymnasium": "whole-graph",
}


def command(found, suite, task, more, flag=None, backup=None):
    """The command that is advised for what was found under a key, of which flag is the flag."""
    changed = found.get("targets_read", 0.0)
    if backup is None and (changed < FEW or found["acted_in"] < 2):
        backup, flag = "tree", None
    elif backup is None:
        merges = flag is not None and "--round" in flag  # a short nesting trusts such states less
        backup = BEST.get(suite, "graph") if changed >= MANY and not merges else "graph"
        if changed >= MANY and found["rewarded"] < RARE and suite == "gymnasium":
            backup += " --exploration frontier"
    words = ["python", f"{play.SUITES[suite][0].removesuffix('.py')}.py", "--env-id", task]
    for name, value in more.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, *filter(None, [flag]), "--backup", *backup.split()])


def percent(value):
    return "-" if value is None else f"{value:.1%}"


def report(name, by_key, played=None):
    """The measures and the verdict as text: lines.

    played: suite, task, flags and the keys' flags of what was played: it gets advice.
    """
    found = by_key[PLAIN]
    failing, verdict = judge(found)
    rows = {
        "states / transitions": f"{found['states']:,} / {found['transitions']:,}",
        "novel state ratio": f"{found['novel_state_ratio']:.3f}   (paper's averages: MiniGrid "
        "0.006, MinAtar 0.298, Atari 0.927)",
        "states with several predecessors": percent(found["crossed"]),
        "self-loops, rewarded transitions": f"{found['self_loops']:.1%}, "
        f"{100 * found['rewarded']:.3g}%",
    }
    if "targets_read" in found:
        read, value, zero = (percent(found[f"targets_{n}"]) for n in ("read", "value", "zero"))
        rows |= {
            f"targets of depth {found['depth']} unlike tree backup's": f"{read}   (what is read); "
            f"{value} (the value, where leaves are random)",
            "  higher by rewards that tree backup misses": zero,
            "transitions per target": f"{found['targets_mean_size']:.1f} on average, "
            f"{found['targets_max_size']} at most",
            "uncertainty that the step before explains": percent(found["memory_explained"]),
        }
    yield name
    yield from (f"  {label:<46} {value}" for label, value in rows.items())
    yield from (f"fails: {line}" for line in failing or ["no assumption that can be seen here"])
    yield f"verdict: {verdict}"
    if found["transitions"] < LEAST:
        return
    if found["acted_in"] < 2:
        by_key = {PLAIN: found}  # no key tells apart what looks the same
    best = PLAIN
    if len(by_key) > 1:
        head = "states   unlike tree backup's   explained by the step before"
        yield f"  {'what makes a state':<36} {head}"
        for key, one in by_key.items():
            shares = percent(one["targets_read"]), percent(one["memory_explained"])
            why = objection(one, found["self_loops"])
            mark = f" ({why})" if why else ""
            yield f"  {key:<36} {one['states']:>6,} {shares[0]:>14} {shares[1]:>22}{mark}"
        best = coarsest(by_key)
        passed = f"{best}: of those that pass it has the fewest states"
        yield f"key: {passed if best else 'none of these passes'}"
        if best not in (None, PLAIN):
            yield f"verdict with that key: {judge(by_key[best])[1]}"
    if played:
        suite, task, more, flags = played
        near = None if best else coarsest(by_key, "not Markovian", MANY)
        if near in flags:  # docs/environments.md: in MountainCar and Acrobot it wins
            yield f"compare: {command(by_key[near], suite, task, more, flags[near], 'graph')}"
        best = best if best in flags else PLAIN
        yield f"try: {command(by_key[best], suite, task, more, flags.get(best))}"


@lasting_output()
def main():
    args = arguments(Args, __doc__)
    rng = np.random.default_rng(args.seed)
    runs, flags, played = collect(args, rng)
    depth = args.depth or flags.get("depth") or 5
    breadth = flags.get("breadth", 20) if args.breadth is None else args.breadth
    by_key = {key: measure(run, depth, breadth, args.sampled, rng) for key, run in runs.items()}
    print("\n".join(report(with_file(runs[PLAIN].name), by_key, played)))


if __name__ == "__main__":
    main()
