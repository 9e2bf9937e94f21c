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
from dataclasses import dataclass
from pathlib import Path

import measures
import numpy as np
import play
import recorded
import tyro
from output import fail


@dataclass
class Args:
    task: tyro.conf.Positional[str]
    """a run's folder, a task of the three scripts, or any Gymnasium id (also module:Id-v0)"""
    steps: int = 20_000  # random actions to play; of a run's folder none
    depth: int = 0  # nested backups per target; 0 = the run's or its script's, or 5
    breadth: int = -1
    """transitions followed per level; 0 = all; -1 = the run's or its script's, else 20"""
    sampled: int = 2_000  # targets compared
    seed: int = 1  # seed of the environment and of all sampling


PLAIN = "the observation"
FEW = 0.05  # share of targets unlike tree backup's below which there is nothing to gain
MANY = 0.3
GAMMA = 0.99  # of the targets compared
HIDDEN = 0.01  # share of the uncertainty that the step before may explain


def keys_for(obs):
    """Keys to try for observations like this one: name -> function of it and the action before."""
    keys = {PLAIN: lambda obs, action: obs}
    if obs.dtype.kind == "f":
        for digits in (2, 1):  # -0.0 is another state than 0.0
            name = f"rounded to {digits} digit{'s' * (digits > 1)}"
            keys[name] = lambda obs, action, digits=digits: np.round(obs, digits) + 0.0
    elif obs.ndim >= 2 and min(obs.shape[-2:]) >= 32:
        for side in (21, 12):
            keys[f"newest frame, shrunk to {side}x{side}"] = lambda obs, action, n=side: shrunk(
                obs[-1] if obs.ndim == 3 and obs.shape[0] <= 4 else obs, n
            )
    else:
        keys["with the last action"] = lambda obs, action: np.append(obs.astype(np.int64), action)
    return keys


def shrunk(image, side):
    """An image's means over blocks, in 8 shades: uint8 [side, side, ...]."""
    rows, columns = (n // side for n in image.shape[:2])
    image = image[: side * rows, : side * columns]
    blocks = image.reshape(side, rows, side, columns, *image.shape[2:]).mean(axis=(1, 3))
    return (blocks / 32).astype(np.uint8)


def collect(args, rng):
    """By key what was recorded or played, the script's flags, and the suite of what was played."""
    path = Path(args.task)
    if path.exists() or path.parts[:1] == ("runs",) or path.suffix == ".npz":
        run = recorded.read(path)
        return {PLAIN: run}, run.config or {}, None
    suite, task = play.suite_of(args.task)
    num_actions, rows = play.stream(suite, task, rng, args.seed)
    first = next(rows)
    rows, keys = itertools.chain([first], rows), keys_for(first[0])
    found = play.record_by_keys(num_actions, rows, args.steps, task, keys)
    return found, vars(play.script_of(suite).Args()), suite


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


def coarsest(by_key):
    """The Markovian key with the fewest states, or None."""
    markovian = [key for key, found in by_key.items() if not hides_something(found)]
    return min(markovian, key=lambda key: by_key[key]["states"], default=None)


def judge(found):
    """Which assumptions fail, and the verdict: sentences."""
    failing = []
    ratio, changed = found["novel_state_ratio"], found.get("targets_read")
    if found["real_numbers"] and ratio > 0.9:
        failing.append(
            "Crossovers: observations are real numbers that hardly ever come again (novel state "
            f"ratio {ratio:.3f}). Without a coarser key there is no graph."
        )
    elif changed is not None and changed < FEW:
        failing.append(
            f"Crossovers: {changed:.1%} of the targets differ from tree backup's at all."
        )
    if hides_something(found):
        failing.append(
            f"Markov: the step before explains {found['memory_explained']:.1%} of what is "
            f"uncertain about an outcome (p {found['memory_p']:.3f}), so the state hides "
            "something: a velocity, a timer, the last action where actions stick."
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
    if found["rewarded"] == 0:
        verdict += " First of all, exploration has to find a reward: none was met."
    return failing, verdict


def flags_to_try(found, suite):
    """Flags of what won in the suite's tasks, and its page; None where that was not compared."""
    if found.get("targets_read", 0.0) < MANY:
        return None
    whole = "--depth 0 --act-on graph --prior 0.3 --learning-rate 2.5e-4"
    return {
        "minigrid": ("--backup graph --exploration frontier", "docs/frontier.md"),
        "minatar": (f"--backup graph {whole}", "docs/minatar.md"),
    }.get(suite)


def percent(value):
    return "-" if value is None else f"{value:.1%}"


def report(name, by_key, suite=None):
    """The measures and the verdict as text: lines; with the suite of what was played, advice."""
    found = by_key[PLAIN]
    failing, verdict = judge(found)
    rows = {
        "states / transitions": f"{found['states']:,} / {found['transitions']:,}",
        "novel state ratio": f"{found['novel_state_ratio']:.3f}   (paper's averages: MiniGrid "
        "0.006, MinAtar 0.298, Atari 0.927)",
        "states with several predecessors": percent(found["crossed"]),
        "self-loops, rewarded transitions": f"{found['self_loops']:.1%}, {found['rewarded']:.1%}",
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
    if advice := flags_to_try(found, suite):
        yield "try: {}   ({})".format(*advice)
    if len(by_key) == 1:
        return
    head = "states   unlike tree backup's   explained by the step before"
    yield f"  {'what makes a state':<36} {head}"
    for key, one in by_key.items():
        shares = percent(one["targets_read"]), percent(one["memory_explained"])
        mark = " (not Markovian)" if hides_something(one) else ""
        yield f"  {key:<36} {one['states']:>6,} {shares[0]:>14} {shares[1]:>22}{mark}"
    best = coarsest(by_key)
    passed = f"{best}: of those that pass for Markovian it has the fewest states"
    yield f"key: {passed if best else 'none of these is Markovian by this test'}"
    if best not in (None, PLAIN):
        yield f"verdict with that key: {judge(by_key[best])[1]}"


def main():
    args = tyro.cli(Args, description=__doc__)
    if min(args.steps, args.sampled) < 1 or min(args.seed, args.depth, args.breadth + 1) < 0:
        fail("require --steps and --sampled >= 1, --seed and --depth >= 0, --breadth >= -1")
    rng = np.random.default_rng(args.seed)
    runs, flags, suite = collect(args, rng)
    depth = args.depth or flags.get("depth") or 5  # 0: the whole graph
    breadth = flags.get("breadth", 20) if args.breadth < 0 else args.breadth
    by_key = {key: measure(run, depth, breadth, args.sampled, rng) for key, run in runs.items()}
    print("\n".join(report(runs[PLAIN].name, by_key, suite)))


if __name__ == "__main__":
    main()
