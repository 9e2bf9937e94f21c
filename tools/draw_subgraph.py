"""Draw one subgraph that was backed up, level by level, with the values that were nested.

    python tools/draw_subgraph.py runs/RUN --out subgraph.png
    python tools/draw_subgraph.py runs/RUN --state 12 --action forward --depth 3 --breadth 0

For one pair (s, a) `expand` is asked for the subgraph and `pair_q_values` for its nested values,
with the run's depth, breadth, discount and target network, without its prior. What the target reads
is printed as sums, so that it can be checked by hand. Atari runs learn distributions; here their
expectations are nested, without noise and clipping.
"""

import html
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from gbtools import recorded

from gbcore import pair_q_values
from gbcore.run import Depth, NonNegative, fail, one_line_errors
from gbcore.run.flags import require_package


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # a run's folder, with a checkpoint
    out: Path | None = None  # the picture, .png or .svg; none: only the sums are printed
    state: int | None = None  # the root's; none: the first one that the run was in
    action: str | None = None  # the root's action, by name; none: the one that was taken most often
    depth: Depth | None = None  # nested backups; default: the run's
    breadth: NonNegative | None = None
    """transitions followed per level, 0 = all; default: the run's"""


class Nested:
    """One root's subgraph, with values; vertices are numbered as in `Subgraphs`.

    M leaves, V expanded ones, the end of an episode (its state is -1), and the root, which is -1.
    """

    def __init__(self, run, args, state, action):
        rng, rule = np.random.default_rng(1), run.module.BACKUPS["graph"][1]
        sub = run.graph.expand([state], [action], args.depth, args.breadth, rng)
        leaf_q = run.q_values(sub.nodes, "target").astype(np.float64)
        selector_q = run.q_values(sub.nodes, "online").astype(np.float64)
        self.sub, self.names, self.gamma = sub, run.action_names(), run.flags["gamma"]
        self.pair_q = pair_q_values(sub, leaf_q, self.gamma, rule, selector_q)
        self.end = len(sub.nodes) + len(sub.vertex_row)
        vertex = len(sub.nodes) + sub.pair_vertex
        rows = np.append(np.arange(len(sub.nodes)), sub.vertex_row)
        q = leaf_q[rows]
        q[vertex, sub.pair_action[1:]] = self.pair_q[1:]
        self.best = (selector_q[rows] if rule == "double" else q).argmax(axis=1)
        self.state = np.concatenate([sub.nodes[rows], [-1, state]])
        self.value = np.concatenate([q[np.arange(len(q)), self.best], [0.0, self.pair_q[0]]])
        self.pair_vertex = np.append(-1, vertex)
        self.level = np.repeat(np.arange(len(sub.level_pairs) - 1), np.diff(sub.level_pairs))
        # What the root's target depends on.
        self.read = np.arange(len(self.pair_q)) == 0
        for pair in range(1, len(self.pair_q)):
            arrives = sub.outcome_pair[sub.outcome_vertex == self.pair_vertex[pair]]
            chosen = self.best[self.pair_vertex[pair]] == sub.pair_action[pair]
            self.read[pair] = chosen and self.read[arrives].any()

    def sums(self):
        """The values that the target reads as sums, level by level: lines."""
        sub = self.sub
        for pair in np.flatnonzero(self.read):
            terms = []
            for o in np.flatnonzero(sub.outcome_pair == pair):
                vertex, weight = sub.outcome_vertex[o], sub.outcome_weight[o]
                following = ", the end"
                if vertex != self.end:
                    kind = "leaf" if vertex < len(sub.nodes) else "V"
                    action = self.names[self.best[vertex]]  # the one that is the vertex's value
                    following = f" + {self.gamma:g} {kind}({self.state[vertex]}: {action})"
                    following += f" {self.value[vertex]:.4f}"
                term = f"({sub.outcome_reward[o]:g}{following})"
                terms.append(term if weight == 1 else f"{weight:.3g} {term}")
            name = f"G({self.state[self.pair_vertex[pair]]}, {self.names[sub.pair_action[pair]]})"
            text = " + ".join(terms) if terms else "never seen: leaf"
            yield f"level {self.level[pair]}: {name} = {self.pair_q[pair]:.4f} = {text}"


def draw(nested, title, path):
    """Levels from left to right: ellipses are expanded states, boxes leaves; with values."""
    require_package("pygraphviz")
    import pygraphviz

    # Graphviz reads entities, escapes and, between < and >, HTML: a text of a user's is a text.
    names = [html.escape(name).replace("\\", "\\\\") for name in (*nested.names, title)]
    sub, title = nested.sub, names.pop()
    graph = pygraphviz.AGraph(directed=True, rankdir="LR", ranksep=0.8, label=title, labelloc="t")
    graph.node_attr.update(fontsize=9, height=0, margin=0.04, color="blue")
    graph.edge_attr.update(fontsize=9, color="grey", arrowsize=0.6)
    root = f"({nested.state[-1]}, {names[sub.pair_action[0]]})\\nG = {nested.value[-1]:.3f}"
    graph.add_node("0 -1", label=root)
    for o in np.argsort(nested.read[sub.outcome_pair], kind="stable"):  # what is read comes last
        pair, vertex, reward = sub.outcome_pair[o], sub.outcome_vertex[o], sub.outcome_reward[o]
        start = f"{nested.level[pair]} {nested.pair_vertex[pair]}"
        end, look = f"{nested.level[pair] + 1} {vertex}", {}
        label = f"{nested.state[vertex]}: {nested.value[vertex]:.3f}"
        label = "end" if vertex == nested.end else label
        is_leaf = vertex < len(sub.nodes) or vertex == nested.end
        graph.add_node(end, label=label, shape="box" if is_leaf else "ellipse")
        if nested.read[pair]:
            weight = sub.outcome_weight[o]
            label = names[sub.pair_action[pair]] + (f" {reward:+g}" if reward else "")
            label += f" x{weight:.2g}" if weight < 1 else ""
            look = {"color": "orangered", "fontcolor": "orangered", "penwidth": 2, "label": label}
        graph.add_edge(start, end, **look)
    graph.draw(path, prog="dot")


def root_of(run, args):
    """The pair to back up: a state and an action."""
    edges, names = run.graph.edges(), run.action_names()
    state = int(run.replay["node"][0]) if args.state is None else args.state
    here = edges["source"] == state
    if not here.any():
        fail(f"no state {state}: require one that was acted in, 0 to {edges['source'].max()}")
    if args.action is None:
        return state, edges["action"][here][edges["count"][here].argmax()]
    if args.action not in names:
        fail(f"no action {args.action!r}: require one of {', '.join(names)}")
    return state, names.index(args.action)


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    run = recorded.read(args.run)
    args.depth = args.depth or (1 if run.flags["backup"] == "one-step" else run.flags["depth"])
    args.breadth = run.flags["breadth"] if args.breadth is None else args.breadth
    if args.out is not None and args.out.suffix not in (".png", ".svg"):
        fail(f"--out must end in .png or .svg, got {args.out}")
    state, action = root_of(run, args)
    nested = Nested(run, args, state, action)
    result = f"graph backup's target of ({state}, {nested.names[action]}): {nested.value[-1]:.4f}"
    about = f"depth {args.depth}, breadth {args.breadth or 'all'}, gamma {nested.gamma:g}"
    if run.flags["backup"] != "graph" or run.flags["prior"]:
        about += "; the run learned from other targets"
    lines = list(nested.sums())
    print(f"{result}; {about}; sums that it reads: {len(lines)}", *lines[:36], sep="\n")
    if args.out is not None:
        draw(nested, f"{run.task}\n{result}\n{about}", args.out)
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
