"""Would Graph Backup help on this environment? Play it for a while, and look at the graph.

    python benchmark/would_it_help.py CartPole-v1
    python benchmark/would_it_help.py MinAtar/freeway --steps 50000
    python benchmark/would_it_help.py runs/RUN                       # the graph that a run recorded
    python benchmark/would_it_help.py runs/RUN --actions trained     # its network plays on

Graph Backup (Jiang et al. 2022) assumes that trajectories cross and that observations are Markovian
states. Where they never cross it is tree backup; where an observation hides something it averages
over what differs. This prints measures of both, says which assumption fails, and gives a verdict.
It tells whether targets change, not by how much a score does: the paper found a correlation of only
-0.22 (Atari) and -0.29 (all tasks) between the novel state ratio and the gain.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import measures
import numpy as np
import play
import recorded
import tyro


@dataclass
class Args:
    task: Annotated[str, tyro.conf.Positional]
    """a run's folder, a task of the three scripts, or any Gymnasium id (also module:Id-v0)"""
    steps: int = 20_000
    """environment steps to play"""
    actions: Annotated[str, tyro.conf.arg(metavar="{recorded,random,trained}")] = ""
    """recorded: no play, the run's own graph (a run's default); random (a task's default);
    trained: the run's network"""
    epsilon: float = 0.02
    """share of random actions among trained ones"""
    depth: int = 0
    """nested backups per target; 0 = the run's, else 5 (Atari 10)"""
    breadth: int = -1
    """transitions followed per level; 0 = all; -1 = the run's, else 20 (Atari 10, MiniGrid 50)"""
    gamma: float = 0.99
    """the discount of the targets compared"""
    sampled: int = 2_000
    """targets compared"""
    seed: int = 1
    """seed of the environment and of all sampling"""
    json: bool = False
    """print the measures as JSON, and no verdict"""


DEFAULTS = {"minigrid": (5, 50), "minatar": (5, 20), "atari": (10, 10), "gymnasium": (5, 20)}


def collect(args, rng):
    """The graph asked for, and the suite it is from."""
    path = Path(args.task)
    is_run = path.exists() or path.parts[:1] == ("runs",) or path.suffix == ".npz"
    actions = args.actions or ("recorded" if is_run else "random")
    if not is_run:
        if actions != "random":
            recorded.fail(f"--actions {actions} needs a run's folder, got {args.task!r}")
        suite, task = play.suite_of(args.task)
        rows = play.stream(suite, task, rng, seed=args.seed)
        return play.record(*rows, args.steps, task), suite
    run = recorded.read(path)
    suites = {script: suite for suite, script in play.SUITES.items()}
    suite = suites[run.script]
    if actions == "recorded":
        return run, suite
    if run.script is None:
        recorded.fail(f"{path} does not say which script made it: only its graph can be read")
    policy = None
    if actions == "trained":
        if run.tensors is None:
            recorded.fail(f"{path} has no network: --actions trained needs one")
        policy = greedy(run, args.epsilon)
    rows = play.stream(suite, run.task, rng, policy, args.seed, run.config)
    played = play.record(*rows, args.steps, run.task)
    played.config, played.script = run.config, run.script
    return played, suite


def greedy(run, epsilon):
    """The run's network as a policy."""
    network = run.network()

    def policy(obs, rng):
        if rng.random() < epsilon:
            return int(rng.integers(run.graph.num_actions))
        return int(network(obs[None])[0].argmax())

    return policy


def measure(run, depth, breadth, gamma, sampled, rng):
    """Everything that the verdict is made from: a dict that JSON can hold."""
    graph = run.graph
    found = {
        "states": graph.num_nodes,
        "transitions": graph.num_transitions,
        "distinct_transitions": graph.num_edges,
        "novel_state_ratio": graph.novel_state_ratio,
        "obs_dtype": graph.obs_dtype.name,
        "rewarded": float((run.graph.edges()["reward"] != 0).mean()),
        "depth": depth,
        "breadth": breadth,
    }
    found |= measures.crossovers(graph)
    if run.replay is not None:
        leaf_q = run.q_values(np.arange(graph.num_ids), "target") if few_enough(run) else None
        changes = measures.target_changes(
            graph, run.replay, depth, breadth, gamma, rng, leaf_q, sampled
        )
        found |= {f"targets_{name}": value for name, value in changes.items()}
        found["leaf_values"] = "random" if leaf_q is None else "of the run's network"
        found |= {f"memory_{name}": v for name, v in measures.memory(run.replay, rng).items()}
    return found


def few_enough(run):
    """Can the network evaluate every state in a moment? Freed ids have no observation."""
    graph = run.graph
    return graph.num_ids == graph.num_nodes and np.prod(graph.obs_shape) * graph.num_ids < 1e8


def judge(found):
    """Which assumptions fail, and the verdict: sentences."""
    failing, doubts = [], []
    ratio, changed = found["novel_state_ratio"], found.get("targets_read")
    if found["obs_dtype"].startswith("float") and ratio > 0.9:
        failing.append(
            "Crossovers: observations are real numbers that hardly ever come again "
            f"({found['obs_dtype']}, novel state ratio {ratio:.3f}). States match by their bytes; "
            "discretise or round the observations, or there is no graph. (Then add 0.0: -0.0 is "
            "another state than 0.0.)"
        )
    elif changed is not None and changed < 0.05:
        failing.append(
            f"Crossovers: {changed:.1%} of the targets differ from tree backup's at all."
        )
    explained, p = found.get("memory_explained"), found.get("memory_p")
    if explained is not None and p < 0.01 and explained > 0.01:
        failing.append(
            f"Markov: the step before explains {explained:.1%} of what is uncertain about an "
            f"outcome (p {p:.3f}), so the observation hides something: a velocity, a timer, the "
            "last action where actions stick."
        )
    if found["mixed_loops"] is not None and found["mixed_loops"] > 0.1:
        doubts.append(
            f"{found['mixed_loops']:.0%} of the repeated pairs that leave a state as it is also "
            "lead elsewhere: chance, or a clock that the observation does not show."
        )
    if found["contradictions"] is not None and found["contradictions"] > 0.001:
        doubts.append(
            f"{found['contradictions']:.1%} of the triples (s, a, s') come with different rewards "
            "or ends: something that decides these is not observed (a time limit reported as "
            "termination, say)."
        )
    if found["rewarded"] == 0:
        doubts.append("no reward was met: there is nothing to propagate yet, by any backup.")
    not_markov = any(line.startswith("Markov") for line in failing)
    if changed is None:
        verdict = "No verdict: a graph without its replay cannot be compared with tree backup."
    elif changed < 0.05:
        verdict = (
            "No: at this depth Graph Backup is tree backup here, at a little more cost per update."
        )
    elif changed < 0.3:
        verdict = (
            f"Perhaps, a little: {changed:.0%} of the targets are not tree backup's. Expect tree "
            "backup's score, or slightly more."
        )
    else:
        verdict = f"Worth trying: {changed:.0%} of the targets are not tree backup's; "
        if found["targets_zero"] >= 0.0005:
            verdict += f"{found['targets_zero']:.1%} are higher by rewards that it misses."
        else:
            verdict += (
                "but hardly one is higher by a reward that it misses. Collect more transitions "
                "before you trust this."
            )
    if changed is not None and changed >= 0.05 and not_markov:
        verdict += " But states that hide something are averaged over: compare with tree backup."
    if found["rewarded"] == 0 and changed is not None and changed >= 0.05:
        verdict += " First of all, exploration has to find a reward."
    return failing, doubts, verdict


def percent(value):
    return "-" if value is None else f"{value:.1%}"


def report(name, found, size_note):
    """The measures and the verdict as text."""
    rows = [
        ("states / transitions", f"{found['states']:,} / {found['transitions']:,}"),
        ("novel state ratio", f"{found['novel_state_ratio']:.3f}   (paper's averages: MiniGrid "
         "0.006, MinAtar 0.298, Atari 0.927)"),
        ("states with several predecessors", percent(found["crossed"])),
        ("rewarded transitions", percent(found["rewarded"])),
    ]  # fmt: skip
    if "targets_read" in found:
        rows += [
            (f"targets of depth {found['depth']} unlike tree backup's",
             f"{percent(found['targets_read'])}   (what is read); {percent(found['targets_value'])}"
             f" (the value, leaf values {found['leaf_values']})"),
            ("  higher by rewards that tree backup misses", percent(found["targets_zero"])),
            (f"subgraph, {size_note}", f"{found['targets_mean_size']:.1f} transitions on average, "
             f"{found['targets_max_size']} at most"),
        ]  # fmt: skip
    rows += [
        ("self-loops", f"{percent(found['self_loops'])} of the transitions; "
         f"{percent(found['mixed_loops'])} of the repeated looping pairs also lead elsewhere"),
        ("repeated pairs (s, a) with several outcomes", percent(found["several_outcomes"])),
        ("(s, a, s') with different rewards or ends", percent(found["contradictions"])),
    ]  # fmt: skip
    if found.get("memory_explained") is not None:
        rows.append(
            ("uncertainty that the step before explains",
             f"{found['memory_explained']:.1%} (p {found['memory_p']:.3f}, "
             f"{found['memory_rows']:,} rows)")
        )  # fmt: skip
    elif "memory_rows" in found:
        rows.append(("uncertainty that the step before explains", "- (no pair had two outcomes)"))
    failing, doubts, verdict = judge(found)
    lines = [name] + [f"  {label:<46} {value}" for label, value in rows]
    lines += [f"fails: {line}" for line in failing] or [
        "fails: no assumption that can be seen here"
    ]
    lines += [f"note: {line}" for line in doubts]
    return "\n".join([*lines, f"verdict: {verdict}"])


def main():
    args = tyro.cli(Args)
    if args.actions not in ("", "recorded", "random", "trained"):
        recorded.fail(f"--actions must be recorded, random or trained, got {args.actions!r}")
    for name, least in (("steps", 1), ("sampled", 1), ("seed", 0)):
        if getattr(args, name) < least:
            recorded.fail(f"--{name} must be >= {least}, got {getattr(args, name)}")
    if args.depth < 0 or args.breadth < -1:
        recorded.fail(f"--depth and --breadth must be >= 0, got {args.depth} and {args.breadth}")
    if not 0 <= args.gamma <= 1 or not 0 <= args.epsilon <= 1:
        recorded.fail("--gamma and --epsilon must be in [0, 1]")
    rng = np.random.default_rng(args.seed)
    run, suite = collect(args, rng)
    config = run.config or {}
    depth = args.depth or config.get("depth", DEFAULTS[suite][0])
    breadth = config.get("breadth", DEFAULTS[suite][1]) if args.breadth < 0 else args.breadth
    found = measure(run, depth, breadth, args.gamma, args.sampled, rng)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(report(run.name, found, f"depth {depth}, breadth {breadth or 'all'}"))


if __name__ == "__main__":
    main()
