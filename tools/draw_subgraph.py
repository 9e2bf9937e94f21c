"""Draw one subgraph that was backed up, level by level, with the values that were nested.

    python tools/draw_subgraph.py runs/RUN --out subgraph.png
    python tools/draw_subgraph.py runs/RUN --state 12 --action forward --depth 3 --breadth 0

For one pair (s, a) `expand` is asked for the subgraph and `pair_q_values` for its nested values,
with the run's depth, breadth, discount and target network, without its prior. Unless it is given,
the pair is that of the transition whose target differs most from tree backup's, of 2,000 that are
sampled (Atari: 256). What the target reads is printed as sums, so that it can be checked by hand.
Of a run of whole-graph with a checkpoint, whose targets are nested without end, it prints the way
that its values choose; the picture shows graph backup's target all the same.
Atari runs learn distributions; here their expectations are nested, without noise and clipping.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from gbtools import recorded
from gbtools.output import arguments, fail, lasting_output, warn
from gbtools.picture import plt, wrapped, write_figure

from gbcore import pair_q_values, trajectory_subgraphs
from gbcore.graph import MAX_DEPTH
from gbcore.run import Amount, Share

SAMPLED, OF_ATARI = 2_000, 256  # rows of the replay that are compared
LINES = 36  # of sums: with the rest at most 39
DRAWN = 20  # levels of a picture
OF_LEVELS = "depth", "breadth", "gamma", "leaves"  # flags


@dataclass
class Args:
    run: tyro.conf.Positional[Path]
    """a run's folder, finished or running (with a checkpoint), or a graph file"""
    out: Path | None = None  # the picture, .png or .svg; none: only the sums are printed
    state: int | None = None  # the root's; none: of a transition where graph and tree backup differ
    action: str = ""  # the root's action, by name (by number where it has none)
    depth: Annotated[int, (0, MAX_DEPTH)] = 0  # nested backups; 0 = the run's, or 5
    breadth: Amount | None = None
    """transitions followed per level, 0 = all; default: the run's (20 for a bare graph)"""
    gamma: Share | None = None  # the discount; default: the run's (0.99 for a bare graph)
    leaves: Literal["target", "online", "zero"] = "target"
    """leaf values: of which network; zero: rewards alone"""
    seed: Amount = 1  # of all sampling


class Nested:
    """One root's subgraph, with values; vertices are numbered as in `Subgraphs`.

    M leaves, V expanded ones, the end of an episode (its state is -1), and the root, which is -1.
    """

    def __init__(self, run, args, state, action, rng):
        sub = self.sub = run.graph.expand(
            np.array([state]), np.array([action]), args.depth, args.breadth, rng
        )
        self.pair_q, leaf_q, selector_q = backed_up(run, sub, args)
        self.names, self.gamma, num_leaves = run.action_names(), args.gamma, len(sub.nodes)
        self.end = num_leaves + len(sub.vertex_row)
        vertex = num_leaves + sub.pair_vertex
        rows = np.concatenate([np.arange(num_leaves), sub.vertex_row])
        q = leaf_q[rows]
        q[vertex, sub.pair_action[1:]] = self.pair_q[1:]
        self.best = (q if selector_q is None else selector_q[rows]).argmax(axis=1)
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
                term = f"{sub.outcome_reward[o]:g}"
                if vertex == self.end:
                    term += ", the end"
                else:
                    kind = "leaf" if vertex < len(sub.nodes) else "V"
                    action = self.names[self.best[vertex]]  # the one that is the vertex's value
                    term += f" + {self.gamma:g} {kind}({self.state[vertex]}: {action})"
                    term += f" {self.value[vertex]:.4f}"
                terms.append(f"({term})" if weight == 1 else f"{weight:.3g} ({term})")
            if len(terms) > 6:
                terms[5:] = [f"{len(terms) - 5} more"]
            name = f"G({self.state[self.pair_vertex[pair]]}, {self.names[sub.pair_action[pair]]})"
            text = " + ".join(terms) if terms else "never seen: leaf"
            yield f"level {self.level[pair]}: {name} = {self.pair_q[pair]:.4f} = {text}"


def backed_up(run, sub, args):
    """Nested values of the pairs of a subgraph, the leaf values under them, and the selector's."""
    leaf_q, selector_q = np.zeros((len(sub.nodes), run.graph.num_actions)), None
    if args.leaves != "zero":
        leaf_q = run.q_values(sub.nodes, args.leaves).astype(np.float64)
        if run.module.BACKUPS["graph"][1] == "double":
            selector_q = run.q_values(sub.nodes, "online").astype(np.float64)
    rule = "greedy" if selector_q is None else "double"
    return pair_q_values(sub, leaf_q, args.gamma, rule, selector_q), leaf_q, selector_q


def draw(nested, title, path):
    """Levels from left to right: circles are expanded states, squares leaves."""
    sub, names, num_levels = nested.sub, nested.names, len(nested.sub.level_pairs) - 1
    # One mark per (column, vertex) that outcomes of the column before lead to.
    level_of = nested.level[sub.outcome_pair]
    columns = [dict.fromkeys(sub.outcome_vertex[level_of == k]) for k in range(num_levels)]
    tallest = max(map(len, columns))
    xy = {(0, -1): (0, 0.0)}
    for column, vertices in enumerate(columns, 1):
        for k, vertex in enumerate(vertices):
            xy[column, vertex] = column, ((len(vertices) - 1) / 2 - k) * tallest / len(vertices)
    size = 2.7 * num_levels + 1.8, float(np.clip(0.42 * tallest + 1.2, 3.2, 13))
    figure, axis = plt.subplots(figsize=size, layout="tight")
    for o in np.argsort(nested.read[sub.outcome_pair], kind="stable"):
        pair, level = sub.outcome_pair[o], level_of[o]
        ends = xy[level, nested.pair_vertex[pair]], xy[level + 1, sub.outcome_vertex[o]]
        colour, width = ("#d9480f", 1.8) if nested.read[pair] else ("#ced4da", 0.8)
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": width}
        axis.annotate("", *ends[::-1], arrowprops=arrow | {"shrinkA": 8, "shrinkB": 8})
        if nested.read[pair]:
            reward, weight = sub.outcome_reward[o], sub.outcome_weight[o]
            text = names[sub.pair_action[pair]] + (f" {reward:+g}" if reward else "")
            text += f" x{weight:.2g}" if weight < 1 else ""
            at = (0.62, 0.45)[o % 2]  # neighbours keep out of each other's way
            place = np.average(ends, axis=0, weights=(1 - at, at))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
            look = {"fontsize": 7, "ha": "center", "va": "center", "color": colour, "bbox": box}
            axis.text(*place, text, zorder=5, **look)
    for (_, vertex), place in xy.items():
        root, end, leaf = vertex == -1, vertex == nested.end, -1 < vertex < len(sub.nodes)
        colour = "#2b8a3e" if end else "#868e96" if leaf else "#1864ab"
        axis.plot(*place, "s" if leaf or end else "o", markersize=7, zorder=4, color=colour)
        text = "end" if end else f"{nested.state[vertex]}: {nested.value[vertex]:.3f}"
        if root:
            text = f"({nested.state[-1]}, {names[sub.pair_action[0]]})\nG = {nested.value[-1]:.3f}"
        if root or end or tallest <= 26:
            axis.annotate(text, place, (0, 7), textcoords="offset points", ha="center", fontsize=7)
    for column in range(num_levels + 1):
        label = f"{'V' if column else 'G'}$_{{{num_levels - column}}}$"
        look = {"fontsize": 9, "ha": "center", "color": "#5c636a", "parse_math": True}
        axis.text(column, -tallest / 2 - 0.9, label, **look)
    axis.set_title(wrapped(title, size[0], 10), fontsize=10)
    axis.set(xlim=(-0.45, num_levels + 0.4), ylim=(-tallest / 2 - 1.2, tallest / 2 + 0.6))
    axis.axis("off")
    write_figure(figure, path)


def root_of(run, args, rng):
    """The pair to back up, and tree backup's target of it, where it was a row of the replay."""
    edges, names = run.graph.edges(), run.action_names()
    if args.state is None:
        if run.replay is None:
            fail(f"{run.name} has no replay to sample a transition from: require --state")
        num_rows = len(run.replay["node"])
        most = min(num_rows, OF_ATARI if run.suite == "atari" else SAMPLED)
        rows = rng.choice(num_rows, most, replace=False)
        nodes, actions = run.replay["node"][rows], run.replay["action"][rows]
        sub = run.graph.expand(nodes, actions, args.depth, args.breadth, rng)
        targets = backed_up(run, sub, args)[0][: len(rows)]
        columns = [run.replay[name] for name in recorded.COLUMNS]
        sub = trajectory_subgraphs(rows, args.depth, *columns)
        tree = backed_up(run, sub, args)[0][: len(rows)]
        k = abs(targets - tree).argmax()
        return nodes[k], actions[k], tree[k]
    here = edges["source"] == args.state
    if not here.any():
        most = edges["source"].max()
        fail(f"no state {args.state}: require one with outgoing transitions, 0 to {most}")
    if not args.action:
        return args.state, edges["action"][here][edges["count"][here].argmax()], None
    if args.action not in names:
        fail(f"no action {args.action!r}: require one of {', '.join(names)}")
    return args.state, names.index(args.action), None


def way_of(run, state, action):
    """The likeliest way on from a pair, as the values of the whole graph choose: lines."""
    values, edges, names = run.graph_values(), run.graph.edges(), run.action_names()
    target = values.targets([state], [action])[0]
    yield f"the whole graph's target of ({state}, {names[action]}): {target:.4f}; its way"
    met = set()
    while (state, action) not in met and len(met) < LINES:
        met.add((state, action))
        here = np.flatnonzero((edges["source"] == state) & (edges["action"] == action))
        if len(here) == 0:
            yield f"{state}: {'nothing was' if action < 0 else f'{names[action]}, never'} tried"
            return
        most = here[edges["count"][here].argmax()]
        share, after = edges["count"][most] / edges["count"][here].sum(), edges["next"][most]
        step = f"{state}: {names[action]} {edges['reward'][most]:+g}"
        step += f" x{share:.2g}" if share < 1 else ""
        if edges["terminated"][most]:
            yield f"{step}, the end"
            return
        yield f"{step}, to {after}: V = {values.values([after])[0]:.4f}"
        state, action = after, values.actions([after])[0]
    yield "and so on"


@lasting_output()
def main():
    args = arguments(Args, __doc__)
    if args.out is not None and args.out.suffix not in (".png", ".svg"):
        fail(f"--out must end in .png or .svg, got {args.out}")
    if args.action and args.state is None:
        fail("--action needs --state")
    run = recorded.read(args.run)
    if args.leaves != "zero" and run.missing:
        fail(f"{run.missing}; --leaves zero backs up its rewards alone")
    flags = run.config or {}
    has_way = run.learner is not None and not run.missing  # of whole-graph, with a checkpoint
    given = [f"--{name}" for name in OF_LEVELS if getattr(args, name) != getattr(Args, name)]
    if given and has_way and args.state is not None and args.out is None:
        told = f"{' and '.join(given)} change nothing without --out"
        warn(f"{told}: the way is of the values that the run keeps")
    of_the_run = 1 if flags.get("backup") == "one-step" else flags.get("depth")
    args.depth = args.depth or of_the_run or 5
    if args.out is not None and args.depth > DRAWN:
        fail(f"--out draws {DRAWN} levels at most: require --depth <= {DRAWN}, got {args.depth}")
    args.breadth = flags.get("breadth", 20) if args.breadth is None else args.breadth
    args.gamma = flags.get("gamma", 0.99) if args.gamma is None else args.gamma
    rng = np.random.default_rng(args.seed)
    state, action, tree = root_of(run, args, rng)
    nested = Nested(run, args, state, action, rng)
    found = f"graph backup's target of ({state}, {nested.names[action]}): {nested.value[-1]:.4f}"
    found += "" if tree is None else f" (tree backup: {tree:.4f})"
    about = f"depth {args.depth}, breadth {args.breadth or 'all'}, gamma {args.gamma:g}, "
    about += f"leaf values: {args.leaves}"
    if flags.get("backup", "graph") != "graph" or flags.get("prior"):
        about += "; the run learned from other targets"
    if args.out is not None:
        draw(nested, f"{run.task or run.name}\n{found}\n{about}", args.out)
    sub, lines = nested.sub, list(nested.sums())
    told = f"{found}; {about}; {len(sub.outcome_pair)} transitions, {len(sub.nodes)} states"
    if has_way:
        lines = list(way_of(run, state, action))
    else:
        print(f"{told}; it reads")
    print("\n".join(lines[:LINES]))
    if len(lines) > LINES:
        print(f"and {len(lines) - LINES} more")
    if args.out is not None:
        print(f"wrote {args.out}" + f": {told}" * has_way)


if __name__ == "__main__":
    main()
