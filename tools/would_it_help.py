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

import numpy as np
import tyro
from gbtools import ROOT, measures, play, recorded

from gbcore.run import Count, NonNegative, fail, one_line_errors
from gbcore.run.environment import rounded
from gbcore.run.logger import with_file


@dataclass
class Args:
    task: tyro.conf.Positional[str]
    """a run's folder, a task of the three scripts, or any Gymnasium id (also module:Id-v0)"""
    env_kwargs: str | None = None  # of a Gymnasium id: what gymnasium.make takes, as JSON
    time_limit: Count | None = None  # of a Gymnasium id: steps of an episode
    leave_out: str | None = None  # of a Gymnasium id: parts of observations, as in a,b
    steps: Count = 20_000  # random actions to play; of a run's folder none
    sampled: Count = 2_000  # targets compared
    seed: NonNegative = 1  # seed of the environment and of all sampling


PLAIN = "the observation"
TASK_FLAGS = "env_kwargs", "time_limit", "leave_out"  # flags of what is played, as its script's
LEAST = 200  # transitions, for a verdict, and steps of pairs that came again, to judge by
FIRST = 500  # rows that are looked at for the keys to try
FEW, MANY = 0.05, 0.3  # share of targets unlike tree backup's: nothing to gain below, much above
RARE = 0.001  # share of rewarded steps below which exploration comes first
# The backup that won in a suite's tasks where many targets differ: docs/whole_graph.md.
BEST = {
    "minigrid": "whole-graph --exploration frontier",
    "minatar": "whole-graph --prior 0.3 --learning-rate 2.5e-4",
    "atari": "graph",
    "gymnasium": "whole-graph",
}


def keys_for(rows):
    """Keys by the flag that sets each: functions of an observation and the action before it."""
    obs = np.stack([row[0] for row in rows])
    keys = {PLAIN: lambda obs, _: obs}
    spread = float(np.ptp(obs.reshape(len(obs), -1).astype(np.float64), axis=0).max())
    if obs.dtype.kind != "f":
        keys["--key-last-action"] = lambda obs, action: np.append(obs.astype(np.int64), action)
    elif spread > 0:  # the widest number gets about 1,000, 100 and 10 values
        digits = -int(np.floor(np.log10(spread)))
        for n in range(min(digits + 2, 9), max(digits, -9) - 1, -1):
            keys[f"--round={n}"] = lambda obs, _, n=n: rounded(obs, n)
    return keys


def collect(args, rng):
    """`Recorded` by key, flags of the script, and suite, task and flags of what was played."""
    path = Path(args.task)
    if path.exists() or path.parts[:1] == ("runs",):
        run = recorded.read(path)
        return {PLAIN: run}, run.flags, None
    suite, task = play.suite_of(args.task)
    more = {name: value for name in TASK_FLAGS if (value := getattr(args, name)) is not None}
    is_any = suite == "gymnasium"
    if more and not is_any:
        flag, example = next(iter(more)).replace("_", "-"), play.SUITES["gymnasium"][0]
        fail(f"--{flag} is for environments that {example} plays")
    num_actions, rows = play.stream(suite, task, rng, args.seed, **more)
    first = list(itertools.islice(rows, min(FIRST, args.steps)))
    keys = keys_for(first)
    keys = keys if is_any else {PLAIN: keys[PLAIN]}  # no other script takes a key
    result = play.record_by_keys(num_actions, itertools.chain(first, rows), args.steps, task, keys)
    return result, vars(play.script_of(suite).Args()), (suite, task, more)


def measure(run, flags, sampled, rng):
    """Everything that the verdict is made from. flags: of a script, for its nesting."""
    nesting = {"depth": flags.get("depth", 5), "breadth": flags.get("breadth", 20)}
    changes = measures.target_changes(run.graph, run.replay, *nesting.values(), rng, sampled)
    known = measures.crossovers(run.graph) | nesting | changes
    known["levels_change"] = measures.levels_change(run.replay)
    return known | measures.markov_violation(run.replay, rng)


def objection(result, still=0.0):
    """Why a key does not pass; "" where it does. still: share of self-loops without a key."""
    if result["acted_in"] < 2:
        return "one state"
    if result["self_loops"] > max(still, 0.5):
        return "too coarse"
    if result["judged"] < max(0.05, LEAST / result["transitions"]):
        return "too few repetitions"
    return "not Markovian" if result["p"] < 0.01 and result["explained"] > 0.01 else ""


def coarsest(by_key, why=""):
    """The key with the fewest states of those that pass, or to which this alone is objected."""
    still = by_key[PLAIN]["self_loops"]
    chosen = [key for key, result in by_key.items() if objection(result, still) == why]
    return min(chosen, key=lambda key: by_key[key]["states"], default=None)


def judge(result):
    """Which assumptions fail, and the verdict: sentences."""
    changed, rewarded, failing = result["unlike_tree"], result["rewarded"], []
    why = objection(result, still=1.0)
    if result["transitions"] < LEAST:
        return failing, f"No verdict: require {LEAST} steps, got {result['transitions']:,}."
    if why == "one state":
        return failing, "No: where all observations are alike there is nothing to nest."
    if changed < FEW:
        new = " Nearly all observations are new. Are they real numbers, or is a clock in them?"
        new *= result["novel_state_ratio"] > 0.9
        failing.append(f"Crossovers: trajectories hardly ever meet.{new}")
    if why == "not Markovian":
        failing.append(
            f"Markov: the step before explains {result['explained']:.1%} of what is uncertain. Is "
            "a velocity, a timer or the last action hidden?"
        )
    if changed < FEW:
        return failing, "No: at this depth Graph Backup is tree backup here, and slower."
    verdict = "Worth trying" if changed >= MANY else "Perhaps, a little"
    verdict += f": {changed:.0%} of the targets are not tree backup's"
    verdict += f", {result['missed']:.1%} are higher by rewards that it misses."
    if why == "not Markovian":
        verdict += " But states that hide something are averaged over: compare with tree backup."
    elif why == "too few repetitions":
        verdict += " Too few steps came again to tell whether states hide something."
    if rewarded < RARE:
        met = f"{rewarded:.3%} of the steps had one" if rewarded else "none was met"
        verdict += f" First of all, exploration has to find a reward: {met}."
    if result["levels_change"]:
        verdict += " Each episode is in a level of its own (docs/levels.md)."
    return failing, verdict


def command(result, suite, task, more, flag="", backup=""):
    """The command that is advised for what was found under a key, which the flag sets."""
    changed = result["unlike_tree"]
    if changed < FEW or result["acted_in"] < 2:
        backup, flag = "tree", ""
    elif not backup:  # a short nesting trusts less the states that --round merged
        backup = BEST[suite] if changed >= MANY and "--round" not in flag else "graph"
        explores = result["levels_change"] or result["rewarded"] < RARE
        if suite == "gymnasium" and changed >= MANY and explores:
            backup += " --exploration frontier" + " --num-levels 0" * result["levels_change"]
    script = ROOT / f"{play.SUITES[suite][0].removesuffix('.py')}.py"
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    words = ["python", str(script), "--env-id", task]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in more.items()]
    return shlex.join([*words, *flag.split(), "--backup", *backup.split()])


def report(name, by_key, played=None):
    """The measures and the verdict, line by line. played: as of `collect`; it gets advice."""
    result = by_key[PLAIN]
    failing, verdict = judge(result)
    yield name
    for label, form in (
        ("states / transitions", "{states:,} / {transitions:,}"),
        ("novel state ratio", "{novel_state_ratio:.3f}"),
        ("states with several predecessors", "{crossed:.1%}"),
        ("self-loops, rewarded transitions", "{self_loops:.1%}, {rewarded:.3%}"),
        ("targets of depth {depth} unlike tree backup's", "{unlike_tree:.1%}"),
        ("  higher by rewards that tree backup misses", "{missed:.1%}"),
        ("uncertainty that the step before explains", "{explained:.1%}"),
    ):
        yield f"  {label.format(**result):<46} {form.format(**result)}"
    yield from (f"fails: {line}" for line in failing)
    yield f"verdict: {verdict}"
    if result["transitions"] < LEAST or not played:
        return
    if result["acted_in"] < 2:
        by_key = {PLAIN: result}  # no key tells apart what looks the same
    best = coarsest(by_key)
    if len(by_key) > 1:
        yield "  what makes a state   states   unlike tree backup's   explained by the step before"
        for key, one in by_key.items():
            line = "  {key:<18} {states:>8,} {unlike_tree:>12.1%} {explained:>22.1%}   {why}"
            yield line.format(**one, key=key, why=objection(one, result["self_loops"])).rstrip()
        passed = f"{best}: of those that pass it has the fewest states"
        yield f"key: {passed if best else 'none of these passes'}"
        near = best or coarsest(by_key, "not Markovian")
        if best not in (None, PLAIN):
            yield f"verdict with that key: {judge(by_key[best])[1]}"
        elif near not in (best, PLAIN) and by_key[near]["unlike_tree"] >= MANY:
            # docs/environments.md: in MountainCar and Acrobot it wins.
            yield f"compare: {command(by_key[near], *played, near, 'graph')}"
    best = best or PLAIN
    yield f"try: {command(by_key[best], *played, '' if best == PLAIN else best)}"


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    rng = np.random.default_rng(args.seed)
    runs, flags, played = collect(args, rng)
    by_key = {key: measure(run, flags, args.sampled, rng) for key, run in runs.items()}
    print("\n".join(report(with_file(runs[PLAIN].name), by_key, played)))


if __name__ == "__main__":
    main()
