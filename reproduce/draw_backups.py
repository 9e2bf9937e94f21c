"""Draw docs/backups.png: what each backup reads to compute one target.

    python reproduce/draw_backups.py

Two trajectories meet in one state. The subgraphs are those that gbcore returns, and the targets are
those that it computes, with all leaf values 0.
"""

import itertools

import numpy as np
from folders import ROOT
from picture import draw_arrow, plt, write_figure

from gb_dqn_minigrid import BACKUPS
from gbcore import Replay, TransitionGraph, q_targets

# State -> place. The lower trajectory is the sampled one; the upper one reaches the goal.
PLACES = {"s": (0, 0), "a": (1, 0.35), "x": (2, 1), "b": (3, 0.35), "c": (4, 0), "d": (5, 0)}
PLACES |= {"p": (0, 2), "q": (1, 1.65), "y": (3, 1.65), "z": (4, 2), "goal": (5, 2)}
UPPER = [("p", 0), ("q", 0), ("x", 1), ("y", 0), ("z", 0), ("goal", None)]
LOWER = [("s", 0), ("a", 0), ("x", 0), ("b", 0), ("c", 0), ("d", None)]
DEPTH, GAMMA, NUM_ACTIONS = 5, 0.9, 2


def build():
    """The replay of both trajectories, with its graph, and the names of its nodes."""
    graph = TransitionGraph(NUM_ACTIONS, (1,), np.int64)
    ids = {name: graph.node(np.array([i])) for i, name in enumerate(PLACES)}
    replay = Replay(graph, len(UPPER) + len(LOWER) - 2)
    for trajectory in (UPPER, LOWER):
        for (state, action), (next_state, _) in itertools.pairwise(trajectory):
            done = next_state == "goal"
            replay.add(ids[state], action, float(done), ids[next_state], done)
        replay.end_episode()
    return replay, {node: name for name, node in ids.items()}


def backed_up(replay, backup):
    """The target of (s, 0), and the transitions that it reads: (state, next state) ids."""
    source, rule = BACKUPS[backup]
    batch = replay.batch_of(np.array([len(UPPER) - 1]))  # the row of (s, 0)
    subgraphs = replay.subgraphs(batch, source, 1 if backup == "one-step" else DEPTH)
    leaf_q = np.zeros((len(subgraphs.nodes), NUM_ACTIONS))
    target = q_targets(subgraphs, leaf_q, GAMMA, rule)[0]
    pairs = set(zip(subgraphs.pair_nodes, subgraphs.pair_action, strict=True))
    edges = replay.graph.edges()
    edges = zip(*(edges[name] for name in ("source", "action", "next")), strict=True)
    return target, {(state, following) for state, did, following in edges if (state, did) in pairs}


def main():
    replay, names = build()
    figure, axes = plt.subplots(1, len(BACKUPS), figsize=(15, 2.9), sharey=True)
    for axis, backup in zip(axes, BACKUPS, strict=True):
        target, read = backed_up(replay, backup)
        edges = replay.graph.edges()
        for state, following in zip(edges["source"], edges["next"], strict=True):
            used = (state, following) in read
            of_other = (names[state], names[following]) in itertools.pairwise(s for s, _ in UPPER)
            colour, width = ("#d9480f", 2.2) if used else ("#adb5bd", 1.4)
            ends = PLACES[names[state]], PLACES[names[following]]
            line = (0, (2, 1.5)) if of_other else "-"
            draw_arrow(axis, *ends, colour, width, linestyle=line)
        colours = {"goal": "#2b8a3e", "s": "#1864ab"}
        for name, place in PLACES.items():
            axis.scatter(*place, s=90, color=colours.get(name, "#adb5bd"), zorder=3)
        axis.text(5, 1.62, "+1", ha="center", fontsize=10, color="#2b8a3e")
        axis.set_title(f"{backup}: target {target:.2f}", fontsize=12)
        axis.set(xlim=(-0.4, 5.4), ylim=(-0.4, 2.4))
        axis.axis("off")
    figure.tight_layout()
    write_figure(figure, ROOT / "docs" / "backups.png")


if __name__ == "__main__":
    main()
