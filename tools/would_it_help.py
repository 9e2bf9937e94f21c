"""Would Graph Backup help on this environment? Play it for a while, and look at the graph.

    python tools/would_it_help.py CartPole-v1
    python tools/would_it_help.py MinAtar/freeway --steps 50000 --out verdict.png
    python tools/would_it_help.py runs/RUN                       # the graph that a run recorded
    python tools/would_it_help.py runs/RUN --actions trained     # its network plays on

Graph Backup (Jiang et al. 2022) assumes that trajectories cross and that observations are Markovian
states. Where they never cross it is tree backup; where an observation hides something it averages
over what differs. This prints measures of both, says which assumption fails, and gives a verdict.
What is played is looked at under other keys, too: what else could make two observations one state
(see `TransitionGraph`). It tells whether targets change, not by how much a score does: the paper
found a correlation of only -0.22 (Atari) and -0.29 (all tasks) between the novel state ratio and
the gain.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import measures
import numpy as np
import play
import recorded
import tyro
from output import fail, pyplot, write_figure


@dataclass
class Args:
    task: Annotated[str, tyro.conf.Positional]
    """a run's folder, a task of the three scripts, or any Gymnasium id (also module:Id-v0)"""
    steps: int = 20_000  # environment steps to play
    actions: Literal["auto", "recorded", "random", "trained"] = "auto"
    """recorded: no play, the run's own graph (a run's default); random (a task's default);
    trained: the run's network"""
    epsilon: float = 0.02  # share of random actions among trained ones
    depth: int = 0  # nested backups per target; 0 = the run's or its script's, else 5
    breadth: int = -1
    """transitions followed per level; 0 = all; -1 = the run's or its script's, else 20"""
    gamma: float = 0.99  # the discount of the targets compared
    sampled: int = 2_000  # targets compared
    seed: int = 1  # seed of the environment and of all sampling
    out: Path | None = None  # a picture of the verdict, .png or .svg


PLAIN = "the observation"
FEW = 0.05  # share of targets unlike tree backup's below which there is nothing to gain
MANY = 0.3
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
    """By key what was recorded or played, and the script's own depth and breadth."""
    path = Path(args.task)
    is_run = path.exists() or path.parts[:1] == ("runs",) or path.suffix == ".npz"
    actions = args.actions
    if actions == "auto":
        actions = "recorded" if is_run else "random"
    run, policy = None, None
    if is_run:
        run = recorded.read(path)
        if actions == "recorded":
            return {PLAIN: run}, run.config or {}
        suite, task = run.suite, run.task
        if run.path is None or (actions == "trained" and run.missing):
            fail(f"--actions {actions}: {run.missing}")
        if actions == "trained":
            policy = greedy(run, args.epsilon)
    elif actions != "random":
        fail(f"--actions {actions} needs a run's folder, got {args.task!r}")
    else:
        suite, task = play.suite_of(args.task)
    num_actions, rows = play.stream(suite, task, rng, policy, args.seed, run)
    first = next(rows)
    rows, keys = itertools.chain([first], rows), keys_for(first[0])
    found = play.record_by_keys(num_actions, rows, args.steps, task, keys)
    return found, run.config if run else vars(play.script_of(suite).Args())


def greedy(run, epsilon):
    """The run's network as a policy."""
    network = run.network()

    def policy(obs, rng):
        if rng.random() < epsilon:
            return int(rng.integers(run.graph.num_actions))
        return int(network(obs[None])[0].argmax())

    return policy


def measure(run, depth, breadth, gamma, sampled, rng):
    """Everything that the verdict is made from."""
    graph = run.graph
    found = {
        "states": graph.num_nodes,
        "transitions": graph.num_transitions,
        "novel_state_ratio": graph.novel_state_ratio,
        "obs_dtype": graph.obs_dtype.name,
        "rewarded": float((graph.edges()["reward"] != 0).mean()),
        "depth": depth,
    }
    found |= measures.crossovers(graph)
    if run.replay is not None:
        few = graph.num_ids == graph.num_nodes and np.prod(graph.obs_shape) * graph.num_ids < 1e8
        known = run.networks and not run.missing and few
        leaf_q = run.q_values(np.arange(graph.num_ids), "target") if known else None
        changes = measures.target_changes(
            graph, run.replay, depth, breadth, gamma, rng, leaf_q, sampled
        )
        found |= {f"targets_{name}": value for name, value in changes.items()}
        found["leaf_values"] = "random" if leaf_q is None else "of the run's network"
        found |= {f"memory_{name}": v for name, v in measures.memory(run.replay, rng).items()}
    return found


def hides_something(found):
    """Does the step before tell more about an outcome than chance would?"""
    explained = found.get("memory_explained")
    return explained is not None and found["memory_p"] < 0.01 and explained > HIDDEN


def coarsest(by_key):
    """The Markovian key with the fewest states, or None."""
    markovian = [key for key, found in by_key.items() if not hides_something(found)]
    return min(markovian, key=lambda key: by_key[key]["states"], default=None)


def judge(found):
    """Which assumptions fail, what else is odd, and the verdict: sentences."""
    failing, doubts = [], []
    ratio, changed = found["novel_state_ratio"], found.get("targets_read")
    if found["obs_dtype"].startswith("float") and ratio > 0.9:
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
    if (found["mixed_loops"] or 0) > 0.1:
        doubts.append(
            f"{found['mixed_loops']:.0%} of the repeated pairs that leave a state as it is also "
            "lead elsewhere: chance, or a clock that the observation does not show."
        )
    if (found["contradictions"] or 0) > 0.001:
        doubts.append(
            f"{found['contradictions']:.1%} of the triples (s, a, s') come with different rewards "
            "or ends, which something decides that is not observed (a time limit, say)."
        )
    if changed is None:
        return failing, doubts, "No verdict: tree backup needs the replay, which is not here."
    if changed < FEW:
        return failing, doubts, "No: at this depth Graph Backup is tree backup here, and slower."
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
    return failing, doubts, verdict


def percent(value):
    return "-" if value is None else f"{value:.1%}"


def report(name, by_key):
    """The measures and the verdict as text."""
    found = by_key[PLAIN]
    rows = {
        "states / transitions": f"{found['states']:,} / {found['transitions']:,}",
        "novel state ratio": f"{found['novel_state_ratio']:.3f}   (paper's averages: MiniGrid "
        "0.006, MinAtar 0.298, Atari 0.927)",
        "states with several predecessors": percent(found["crossed"]),
        "rewarded transitions": percent(found["rewarded"]),
    }
    if "targets_read" in found:
        rows |= {
            f"targets of depth {found['depth']} unlike tree backup's": percent(
                found["targets_read"]
            ) + f"   (what is read); {percent(found['targets_value'])} (the value, leaf values "
            f"{found['leaf_values']})",
            "  higher by rewards that tree backup misses": percent(found["targets_zero"]),
            "transitions per target": f"{found['targets_mean_size']:.1f} on average, "
            f"{found['targets_max_size']} at most",
        }  # fmt: skip
    rows |= {
        "self-loops": f"{percent(found['self_loops'])} of the transitions; "
        f"{percent(found['mixed_loops'])} of the repeated looping pairs also lead elsewhere",
        "repeated pairs (s, a) with several outcomes": percent(found["several_outcomes"]),
        "(s, a, s') with different rewards or ends": percent(found["contradictions"]),
        "uncertainty that the step before explains": percent(found.get("memory_explained")),
    }
    failing, doubts, verdict = judge(found)
    lines = [name, *(f"  {label:<46} {value}" for label, value in rows.items())]
    lines += [f"fails: {line}" for line in failing or ["no assumption that can be seen here"]]
    lines += [f"note: {line}" for line in doubts]
    lines.append(f"verdict: {verdict}")
    if len(by_key) == 1:
        return "\n".join(lines)
    head = "states   unlike tree backup's   explained by the step before"
    lines.append(f"  {'what makes a state':<36} {head}")
    for key, one in by_key.items():
        shares = percent(one["targets_read"]), percent(one["memory_explained"])
        mark = " (not Markovian)" if hides_something(one) else ""
        lines.append(f"  {key:<36} {one['states']:>6,} {shares[0]:>14} {shares[1]:>22}{mark}")
    best = coarsest(by_key)
    passed = f"{best}: of those that pass for Markovian it has the fewest states"
    lines.append(f"key: {passed if best else 'none of these is Markovian by this test'}")
    if best not in (None, PLAIN):
        lines.append(f"verdict with that key: {judge(by_key[best])[2]}")
    return "\n".join(lines)


def draw(name, by_key, path):
    """Bars of what the two assumptions come to, for every key."""
    plt = pyplot()
    panels = (
        ("targets_read", "Do trajectories cross?\ntargets unlike tree backup's", (FEW, MANY)),
        ("memory_explained", "Is a state all there is?\nexplained by the step before", (HIDDEN,)),
    )
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(9, 2 + 0.4 * len(by_key)))
    for axis, (column, title, limits) in zip(axes, panels, strict=True):
        values = [100 * max(found[column] or 0, 0) for found in by_key.values()]
        bad = [hides_something(f) if column[0] == "m" else f[column] < FEW for f in by_key.values()]
        colours = ["#d9480f" if one else "#2b8a3e" for one in bad]
        bars = axis.barh(list(by_key), values, color=colours, height=0.6)
        axis.bar_label(bars, [f"{value:.1f}%" for value in values], padding=3, fontsize=8)
        for limit in limits:
            axis.axvline(100 * limit, color="#868e96", linestyle=":")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("%; dotted: where the verdict changes", fontsize=8)
        axis.set_xlim(0, 1.18 * max(*values, 200 * limits[0]))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    verdict = judge(by_key[PLAIN])[2].partition(": ")[0]
    best = coarsest(by_key)
    with_key = f"; {best}: {judge(by_key[best])[2].partition(': ')[0]}" if best else ""
    figure.suptitle(f"{name}: {verdict}{with_key if best != PLAIN else ''}", fontsize=11)
    figure.tight_layout()
    write_figure(figure, path)


def main():
    args = tyro.cli(Args)
    for name, least in (("steps", 1), ("sampled", 1), ("seed", 0), ("depth", 0), ("breadth", -1)):
        if getattr(args, name) < least:
            fail(f"--{name} must be >= {least}, got {getattr(args, name)}")
    if not 0 <= args.gamma <= 1 or not 0 <= args.epsilon <= 1:
        fail("--gamma and --epsilon must be in [0, 1]")
    if args.out is not None and args.out.suffix not in (".png", ".svg"):
        fail(f"--out must end in .png or .svg, got {args.out}")
    rng = np.random.default_rng(args.seed)
    runs, flags = collect(args, rng)
    depth = args.depth or flags.get("depth", 5)
    breadth = flags.get("breadth", 20) if args.breadth < 0 else args.breadth
    by_key = {
        key: measure(run, depth, breadth, args.gamma, args.sampled, rng)
        for key, run in runs.items()
    }
    print(report(runs[PLAIN].name, by_key))
    if args.out is not None:
        if "targets_read" not in by_key[PLAIN]:
            fail("no picture: a graph without its replay cannot be compared with tree backup")
        draw(runs[PLAIN].name, by_key, args.out)


if __name__ == "__main__":
    main()
