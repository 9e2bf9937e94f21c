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

from gbcore.run import Count, Depth, NonNegative, fail, one_line_errors
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
    depth: Depth | None = None  # nested backups per target; default: the run's or script's, or 5
    breadth: NonNegative | None = None
    """transitions followed per level; 0 = all; default: the run's or its script's, else 20"""
    sampled: Count = 2_000  # targets compared
    seed: NonNegative = 1  # seed of the environment and of all sampling


PLAIN = "the observation"
TASK_FLAGS = "env_kwargs", "time_limit", "leave_out"  # flags of what is played, as its script's
LEAST = 200  # transitions, for a verdict
RARE = 0.001  # share of rewarded steps below which exploration comes first
FIRST = 500  # rows that are looked at for the keys to try
FEW = 0.05  # share of targets unlike tree backup's below which there is nothing to gain
MANY = 0.3
GAMMA = 0.99  # of the targets compared
HIDDEN = 0.01  # share of the uncertainty that the step before may explain
JUDGED = 0.05, 200  # share and number of steps of pairs that came again, to say so at least
ELSEWHERE = 10, 0.9, 0.2, 0.1  # of levels that change: least episodes, starts, within; most across
STILL = 0.5  # share of the steps that may change nothing under a key


def keys_for(rows):
    """Keys to try for rows like these, of `play.stream`: by the flag that sets it, three at most.

    A key is a function of an observation and of the action before it.
    """
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
    """By key what was recorded or played, the script's flags, and what was played: its suite, task
    and flags, or None."""
    path = Path(args.task)
    if path.exists() or path.parts[:1] == ("runs",):
        run = recorded.read(path)
        return {PLAIN: run}, run.flags, None
    suite, task = play.suite_of(args.task)
    more = {name: value for name in TASK_FLAGS if (value := getattr(args, name)) is not None}
    is_any = suite == "gymnasium"
    if more and not is_any:
        flag = f"--{next(iter(more)).replace('_', '-')}"
        fail(f"{flag} is for environments that {play.SUITES['gymnasium'][0]} plays")
    num_actions, rows = play.stream(suite, task, rng, args.seed, **more)
    first = list(itertools.islice(rows, min(FIRST, args.steps)))
    keys = keys_for(first)
    keys = keys if is_any else {PLAIN: keys[PLAIN]}  # no other script takes a key
    result = play.record_by_keys(num_actions, itertools.chain(first, rows), args.steps, task, keys)
    return result, vars(play.script_of(suite).Args()), (suite, task, more)


def measure(run, depth, breadth, sampled, rng):
    """Everything that the verdict is made from."""
    graph, replay = run.graph, run.replay
    parts = {
        "": measures.crossovers(graph) | {"depth": depth},
        "targets_": measures.target_changes(graph, replay, depth, breadth, GAMMA, rng, sampled),
        "levels_": measures.recurrence(replay),
        "markov_": measures.markov_violation(replay, rng),
    }
    return {f"{kind}{name}": part[name] for kind, part in parts.items() for name in part}


def hides_something(result):
    """Does the step before tell more about an outcome than chance would?"""
    explained = result.get("markov_explained")
    return explained is not None and result["markov_p"] < 0.01 and explained > HIDDEN


def is_judged(result):
    """Did enough pairs come again to tell whether states hide something?"""
    share, rows = JUDGED
    return result["markov_judged"] >= max(share, rows / result["transitions"])


def levels_change(result):
    """Does an episode meet its states again, and those of other episodes hardly ever?"""
    names = ("episodes", "starts", "within", "across")
    found = [result[f"levels_{name}"] for name in names]
    return all(np.greater_equal(found, ELSEWHERE) == (True, True, True, False))


def objection(result, still=0.0):
    """Why a key does not pass for what makes a state, by its measures; "" where it does.

    still: share of self-loops without a key.
    """
    if result["acted_in"] < 2:
        return "one state"
    if result["self_loops"] > max(still, STILL):
        return "too coarse"
    if not is_judged(result):
        return "too few repetitions"
    return "not Markovian" if hides_something(result) else ""


def coarsest(by_key, why="", least=0.0):
    """The key with the fewest states of those that pass, or to which this alone is objected.

    least: share of the targets that have to be unlike tree backup's. None where there is no such.
    """
    still = by_key[PLAIN]["self_loops"]
    chosen = [
        key
        for key, result in by_key.items()
        if objection(result, still) == why and result["targets_read"] >= least
    ]
    return min(chosen, key=lambda key: by_key[key]["states"], default=None)


def judge(result):
    """Which assumptions fail, and the verdict: sentences."""
    failing, hides = [], hides_something(result)
    if result["transitions"] < LEAST:
        return failing, f"No verdict: require {LEAST} steps, got {result['transitions']:,}."
    if result["acted_in"] < 2:
        failing.append("States: all that was done was done in one state.")
        return failing, "No: where all observations are alike there is nothing to nest."
    ratio, changed = result["novel_state_ratio"], result["targets_read"]
    if result["real_numbers"] and ratio > 0.9:
        failing.append(
            "Crossovers: observations are real numbers that hardly ever come again (novel state "
            f"ratio {ratio:.3f}). Without a coarser key there is no graph."
        )
    elif changed < FEW:
        failing.append(
            f"Crossovers: {changed:.1%} of the targets differ from tree backup's at all."
            + " Nearly all states are new: is a clock in what is observed?" * (ratio > 0.9)
        )
    if hides:
        failing.append(
            f"Markov: the step before explains {result['markov_explained']:.1%} of what is "
            f"uncertain about an outcome (p {result['markov_p']:.3f}). Perhaps the state hides "
            "something: a velocity, a timer, the last action where actions stick. Digits that were "
            "rounded away and states that are rare look the same: more --steps tell."
        )
    if changed < FEW:
        return failing, "No: at this depth Graph Backup is tree backup here, and slower."
    verdict, zero = f"{changed:.0%} of the targets are not tree backup's", result["targets_zero"]
    if changed < MANY:
        verdict = f"Perhaps, a little: {verdict}. Expect its score, or slightly more."
    elif zero >= 0.0005:
        verdict = f"Worth trying: {verdict}; {zero:.1%} are higher by rewards that it misses."
    else:
        verdict = (
            f"Worth trying: {verdict}; but hardly one is higher by a reward that it misses. "
            "Collect more transitions before you trust this."
        )
    if hides:
        verdict += " But states that hide something are averaged over: compare with tree backup."
    elif not is_judged(result):
        verdict += " Too few steps came again to tell whether states hide something."
    if (rewarded := result["rewarded"]) < RARE:
        met = f"{rewarded:.3%} of the steps had one" if rewarded else "none was met"
        verdict += f" First of all, exploration has to find a reward: {met}."
    if levels_change(result):
        verdict += " Each episode is in a level of its own (docs/levels.md)."
    return failing, verdict


# The backup that won in a suite's tasks where many targets differ: docs/whole_graph.md.
BEST = {
    "minigrid": "whole-graph --exploration frontier",
    "minatar": "whole-graph --prior 0.3 --learning-rate 2.5e-4",
    "atari": "graph",
    "gymnasium": "whole-graph",
}


def command(result, suite, task, more, flag="", backup=""):
    """The command that is advised for what was found under a key, which the flag sets."""
    changed = result["targets_read"]
    if changed < FEW or result["acted_in"] < 2:
        backup, flag = "tree", ""
    elif not backup:  # a short nesting trusts less the states that --round merged
        backup = BEST[suite] if changed >= MANY and "--round" not in flag else "graph"
        if suite == "gymnasium" and changed >= MANY and levels_change(result):
            backup += " --exploration frontier --num-levels 0"
        elif suite == "gymnasium" and changed >= MANY and result["rewarded"] < RARE:
            backup += " --exploration frontier"
    script = ROOT / f"{play.SUITES[suite][0].removesuffix('.py')}.py"
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    words = ["python", str(script), "--env-id", task]
    for name, value in more.items():
        words.append(f"--{name.replace('_', '-')}={value}")
    return shlex.join([*words, *flag.split(), "--backup", *backup.split()])


def report(name, by_key, played=None):
    """The measures and the verdict as text: lines.

    played: suite, task and flags of what was played: it gets advice.
    """
    result = by_key[PLAIN]
    failing, verdict = judge(result)

    def share(name, result=result):
        return "-" if result[name] is None else f"{result[name]:.1%}"

    yield name
    for label, value in (
        ("states / transitions", f"{result['states']:,} / {result['transitions']:,}"),
        ("novel state ratio", f"{result['novel_state_ratio']:.3f}   (paper's averages: MiniGrid "
         "0.006, MinAtar 0.298, Atari 0.927)"),
        ("steps to a state of the same episode", f"{share('levels_within')}   (an episode's states "
         f"that an earlier one met: {share('levels_across')})"),
        ("states with several predecessors", share("crossed")),
        ("self-loops, rewarded transitions", f"{share('self_loops')}, "
         f"{100 * result['rewarded']:.3g}%"),
        (f"targets of depth {result['depth']} unlike tree backup's", f"{share('targets_read')}   "
         f"(what is read); {share('targets_value')} (the value, where leaves are random)"),
        ("  higher by rewards that tree backup misses", share("targets_zero")),
        ("transitions per target", f"{result['targets_mean_size']:.1f} on average, "
         f"{result['targets_max_size']} at most"),
        ("uncertainty that the step before explains", share("markov_explained")),
    ):  # fmt: skip
        yield f"  {label:<46} {value}"
    yield from (f"fails: {line}" for line in failing or ["no assumption that can be seen here"])
    yield f"verdict: {verdict}"
    if result["transitions"] < LEAST:
        return
    if result["acted_in"] < 2:
        by_key = {PLAIN: result}  # no key tells apart what looks the same
    best = PLAIN
    if len(by_key) > 1:
        head = "states   unlike tree backup's   explained by the step before"
        yield f"  {'what makes a state':<36} {head}"
        for key, one in by_key.items():
            why = objection(one, result["self_loops"])
            shares = f"{share('targets_read', one):>14} {share('markov_explained', one):>22}"
            yield f"  {key:<36} {one['states']:>6,} {shares}" + (f" ({why})" if why else "")
        best = coarsest(by_key)
        passed = f"{best}: of those that pass it has the fewest states"
        yield f"key: {passed if best else 'none of these passes'}"
        if best not in (None, PLAIN):
            yield f"verdict with that key: {judge(by_key[best])[1]}"
    if played:
        near = None if best else coarsest(by_key, "not Markovian", MANY)
        if near not in (None, PLAIN):  # docs/environments.md: in MountainCar and Acrobot it wins
            yield f"compare: {command(by_key[near], *played, near, 'graph')}"
        best = best or PLAIN
        yield f"try: {command(by_key[best], *played, '' if best == PLAIN else best)}"


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    rng = np.random.default_rng(args.seed)
    runs, flags, played = collect(args, rng)
    depth = args.depth or flags.get("depth", 5)
    breadth = flags.get("breadth", 20) if args.breadth is None else args.breadth
    by_key = {key: measure(run, depth, breadth, args.sampled, rng) for key, run in runs.items()}
    print("\n".join(report(with_file(runs[PLAIN].name), by_key, played)))


if __name__ == "__main__":
    main()
