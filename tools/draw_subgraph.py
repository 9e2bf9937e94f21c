"""Draw one subgraph that was backed up, level by level, with the values that were nested.

    python tools/draw_subgraph.py runs/RUN --out subgraph.png
    python tools/draw_subgraph.py runs/RUN --state 12 --action forward --depth 3 --breadth 0

For one pair (s, a) `expand` is asked for the subgraph and `pair_q_values` for its nested values,
with the run's depth, breadth, discount and target network. Unless it is given, the pair is the one
of 32 sampled transitions whose target differs most from tree backup's. What the target reads is
printed as sums, so that it can be checked by hand. Atari runs learn distributions; here their
expectations are nested, without noise and clipping.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import recorded
import tyro
from output import fail, pyplot, write_figure

from gbcore import pair_q_values, trajectory_subgraphs

SAMPLED = 32  # rows of the replay
LINES = 36  # of sums: with the rest at most 40


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]
    """a run's folder, finished or running (with a checkpoint), or a graph file"""
    out: Path | None = None  # the picture, .png or .svg; none: only the sums are printed
    state: int | None = None
    """the root's state; none: of a transition where graph and tree backup differ"""
    action: str = ""  # the root's action, by name or number
    depth: int = 0  # nested backups; 0 = the run's (5 for a bare graph)
    breadth: int = -1
    """transitions followed per level, 0 = all; -1 = the run's (20 for a bare graph)"""
    gamma: float = -1.0  # the discount; -1 = the run's (0.99 for a bare graph)
    leaves: Literal["target", "online", "zero"] = "target"
    """leaf values: of which network; zero: rewards alone"""
    seed: int = 1  # of the transitions that are sampled, and of breadth's sampling


class Nested:
    """One root's subgraph, with values; numbering as in `Subgraphs`.

    vertices: M leaves first, then V expanded ones, then the end of an episode.
    """

    def __init__(self, sub, leaf_q, pair_q, selector_q=None):
        self.sub, self.pair_q = sub, pair_q
        num_leaves, num_vertices = len(sub.nodes), len(sub.vertex_row)
        # State, values of all actions and value of every vertex; of the end, -1 and 0.
        self.state = np.concatenate([sub.nodes, sub.nodes[sub.vertex_row], [-1]])
        self.end = num_leaves + num_vertices
        vertex = np.repeat(np.arange(num_leaves, self.end), np.diff(sub.vertex_pairs))
        rows = np.concatenate([np.arange(num_leaves), sub.vertex_row])
        q = leaf_q[rows]
        q[vertex, sub.pair_action[1:]] = pair_q[1:]
        self.best = (q if selector_q is None else selector_q[rows]).argmax(axis=1)
        self.value = np.append(q[np.arange(len(q)), self.best], 0.0)
        self.pair_vertex = np.append(-1, vertex)  # the root is -1
        self.level = np.repeat(np.arange(len(sub.level_pairs) - 1), np.diff(sub.level_pairs))
        # What the root's target depends on.
        self.read = np.arange(len(pair_q)) == 0
        for pair in range(1, len(pair_q)):
            arrives = sub.outcome_pair[sub.outcome_vertex == self.pair_vertex[pair]]
            chosen = self.best[self.pair_vertex[pair]] == sub.pair_action[pair]
            self.read[pair] = chosen and self.read[arrives].any()


def backed_up(run, sub, gamma, leaves):
    """Nested values of the pairs of a subgraph, the leaf values under them, and the selector's."""
    leaf_q, selector_q = np.zeros((len(sub.nodes), run.graph.num_actions)), None
    if leaves != "zero":
        leaf_q = run.q_values(sub.nodes, leaves).astype(np.float64)
        if run.module.BACKUPS["graph"][1] == "double":
            selector_q = run.q_values(sub.nodes, "online").astype(np.float64)
    rule = "greedy" if selector_q is None else "double"
    return pair_q_values(sub, leaf_q, gamma, rule, selector_q), leaf_q, selector_q


def nest(run, state, action, depth, breadth, gamma, leaves, rng):
    """`Nested` of one root."""
    sub = run.graph.expand(np.array([state]), np.array([action]), depth, breadth, rng)
    pair_q, leaf_q, selector_q = backed_up(run, sub, gamma, leaves)
    return Nested(sub, leaf_q, pair_q, selector_q)


def sums(nested, names, gamma, root_state):
    """The values that the target reads as sums, level by level: lines."""
    sub = nested.sub
    for pair in np.flatnonzero(nested.read):
        state = root_state if pair == 0 else nested.state[nested.pair_vertex[pair]]
        terms = []
        for o in np.flatnonzero(sub.outcome_pair == pair):
            vertex, weight = sub.outcome_vertex[o], sub.outcome_weight[o]
            term = f"{sub.outcome_reward[o]:g}"
            if vertex == nested.end:
                term += ", the end"
            else:
                kind = "leaf" if vertex < len(sub.nodes) else "V"
                action = names[nested.best[vertex]]  # the one that is the vertex's value
                term += f" + {gamma:g} {kind}({nested.state[vertex]}: {action})"
                term += f" {nested.value[vertex]:.4f}"
            terms.append(f"({term})" if weight == 1 else f"{weight:.3g} ({term})")
        if len(terms) > 6:
            terms[5:] = [f"{len(terms) - 5} more"]
        name = f"G({state}, {names[sub.pair_action[pair]]})"
        sum_text = " + ".join(terms) if terms else "never seen: leaf"
        yield f"level {nested.level[pair]}: {name} = {nested.pair_q[pair]:.4f} = {sum_text}"


def draw(nested, names, root_state, title, path):
    """Levels from left to right: circles are expanded states, squares leaves."""
    plt = pyplot()
    sub, num_levels = nested.sub, len(nested.sub.level_pairs) - 1
    # One mark per (column, vertex) that outcomes of the column before lead to.
    places = {}
    for o, vertex in enumerate(sub.outcome_vertex):
        places.setdefault(int(nested.level[sub.outcome_pair[o]]) + 1, {})[int(vertex)] = None
    tallest = max(map(len, places.values()))
    xy = {(0, -1): (0.0, 0.0)}
    for column, vertices in places.items():
        for k, vertex in enumerate(vertices):
            xy[column, vertex] = column, ((len(vertices) - 1) / 2 - k) * tallest / len(vertices)
    height = float(np.clip(0.42 * tallest + 1.2, 3.2, 13))
    figure, axis = plt.subplots(figsize=(2.7 * num_levels + 1.8, height))
    labels = {}
    for o in np.argsort(nested.read[sub.outcome_pair], kind="stable"):
        pair, vertex = int(sub.outcome_pair[o]), int(sub.outcome_vertex[o])
        level, used = int(nested.level[pair]), nested.read[pair]
        ends = xy[level, int(nested.pair_vertex[pair])], xy[level + 1, vertex]
        axis.annotate(
            "", ends[1], ends[0], zorder=2 + used,
            arrowprops={"arrowstyle": "-|>", "color": "#d9480f" if used else "#ced4da",
                        "shrinkA": 9, "shrinkB": 9, "linewidth": 1.8 if used else 0.8},
        )  # fmt: skip
        if used:
            reward, weight = sub.outcome_reward[o], sub.outcome_weight[o]
            text = names[sub.pair_action[pair]] + (f" {reward:+g}" if reward else "")
            text += f" x{weight:.2g}" if weight < 1 else ""
            labels.setdefault(ends, []).append(text)
    for k, (((x, y), (end_x, end_y)), texts) in enumerate(labels.items()):
        at = (0.62, 0.45)[k % 2]  # neighbours keep out of each other's way
        axis.text(
            x + at * (end_x - x), y + at * (end_y - y), ", ".join(texts[:2]), fontsize=7,
            ha="center", va="center", zorder=5, color="#d9480f",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )  # fmt: skip
    for (_, vertex), (x, y) in xy.items():
        root, end, leaf = vertex == -1, vertex == nested.end, vertex < len(sub.nodes)
        colour = "#1864ab" if root else "#2b8a3e" if end else "#868e96" if leaf else "#1864ab"
        marker = "s" if (leaf or end) and not root else "o"
        axis.scatter(x, y, s=110 if root else 46, marker=marker, zorder=4, color=colour)
        text = "end" if end else f"{nested.state[vertex]}: {nested.value[vertex]:.3f}"
        if root:
            text = f"({root_state}, {names[sub.pair_action[0]]})\nG = {nested.pair_q[0]:.3f}"
        if root or end or tallest <= 26:
            axis.annotate(
                text, (x, y), (0, 13 if root else 7), textcoords="offset points", ha="center",
                fontsize=9 if root else 7,
            )  # fmt: skip
    for column in range(num_levels + 1):
        label = f"{'V' if column else 'G'}$_{{{num_levels - column}}}$"
        axis.text(column, -tallest / 2 - 0.9, label, ha="center", fontsize=9, color="#5c636a")
    axis.set_title(title, fontsize=10)
    axis.set(xlim=(-0.45, num_levels + 0.4), ylim=(-tallest / 2 - 1.2, tallest / 2 + 0.6))
    axis.axis("off")
    figure.tight_layout()
    write_figure(figure, path)


def root_of(run, args, names, depth, breadth, gamma, rng):
    """The pair to back up, and tree backup's target of it, where it was a row of the replay."""
    edges = run.graph.edges()
    if args.state is None:
        if args.action:
            fail("--action needs --state")
        if run.replay is None:
            edge = rng.choice(len(edges["count"]), p=edges["count"] / edges["count"].sum())
            return int(edges["source"][edge]), int(edges["action"][edge]), None
        rows = rng.integers(len(run.replay["node"]), size=SAMPLED)
        nodes, actions = run.replay["node"][rows], run.replay["action"][rows]
        sub = run.graph.expand(nodes, actions, depth, breadth, rng)
        targets = backed_up(run, sub, gamma, args.leaves)[0][:SAMPLED]
        columns = [run.replay[name] for name in recorded.COLUMNS]
        sub = trajectory_subgraphs(rows, depth, *columns)
        tree = backed_up(run, sub, gamma, args.leaves)[0][:SAMPLED]
        k = int(abs(targets - tree).argmax())
        return int(nodes[k]), int(actions[k]), float(tree[k])
    here = edges["source"] == args.state
    if not here.any():
        most = edges["source"].max()
        fail(f"no state {args.state}: require one with outgoing transitions, 0 to {most}")
    if not args.action:
        return args.state, int(edges["action"][here][edges["count"][here].argmax()]), None
    if args.action in names:
        return args.state, names.index(args.action), None
    if args.action.isdigit() and int(args.action) < run.graph.num_actions:
        return args.state, int(args.action), None
    fail(f"no action {args.action!r}: require one of {', '.join(names)}")


def main():
    args = tyro.cli(Args)
    if args.out is not None and args.out.suffix not in (".png", ".svg"):
        fail(f"--out must end in .png or .svg, got {args.out}")
    run = recorded.read(args.run)
    if args.leaves != "zero" and run.missing:
        fail(f"{run.missing}; --leaves zero backs up its rewards alone")
    config = run.config or {}
    depth = args.depth or config.get("depth", 5)
    breadth = config.get("breadth", 20) if args.breadth == -1 else args.breadth
    gamma = config.get("gamma", 0.99) if args.gamma == -1 else args.gamma
    if depth < 1 or breadth < 0 or not 0 <= gamma <= 1 or args.seed < 0:
        fail("require --depth >= 1, --breadth >= 0, 0 <= --gamma <= 1 and --seed >= 0")
    rng, names = np.random.default_rng(args.seed), run.action_names()
    state, action, tree = root_of(run, args, names, depth, breadth, gamma, rng)
    nested = nest(run, state, action, depth, breadth, gamma, args.leaves, rng)
    beside = "" if tree is None else f" (tree backup: {tree:.4f})"
    found = f"target of ({state}, {names[action]}): {nested.pair_q[0]:.4f}{beside}"
    about = (
        f"depth {depth}, breadth {breadth or 'all'}, gamma {gamma:g}, leaf values: {args.leaves}"
    )
    if args.out is not None:
        draw(nested, names, state, f"{run.task or run.name}\n{found}\n{about}", args.out)
    sub, lines = nested.sub, list(sums(nested, names, gamma, state))
    print(
        f"{found}; {about}; {len(sub.outcome_pair)} transitions, {len(sub.nodes)} states; it reads"
    )
    print("\n".join(lines[:LINES]))
    if len(lines) > LINES:
        print(f"and {len(lines) - LINES} more")


if __name__ == "__main__":
    main()
