"""Draw one subgraph that was backed up, level by level, with the values that were nested.

    python benchmark/draw_subgraph.py runs/RUN --out subgraph.png
    python benchmark/draw_subgraph.py runs/RUN --state 12 --action forward --depth 3 --breadth 0

For one pair (s, a), drawn from the replay or given, `expand` is asked for the subgraph and
`pair_q_values` for its nested values, with the run's depth, breadth, discount and target network.
The same is printed as sums, so that a target can be checked by hand. Atari runs learn
distributions; here their expectations are nested, without noise and clipping.
"""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import recorded
import tyro
from output import write_figure

from gbcore import pair_q_values


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]
    """a run's folder, finished or running (with a checkpoint), or a graph file"""
    out: Path | None = None
    """the picture, .png or .svg; none: only the sums are printed"""
    state: int | None = None
    """the root's state; none: a transition is drawn from the replay"""
    action: str = ""
    """the root's action, by name or number"""
    depth: int = 0
    """nested backups; 0 = the run's (5 for a bare graph)"""
    breadth: int = -1
    """transitions followed per level, 0 = all; -1 = the run's (20 for a bare graph)"""
    gamma: float = -1.0
    """the discount; -1 = the run's (0.99 for a bare graph)"""
    leaves: Annotated[str, tyro.conf.arg(metavar="{target,online,zero}")] = "target"
    """leaf values: of which network, or 0 (a bare graph's always are)"""
    seed: int = 1
    """of the root that is drawn, and of breadth's sampling"""


class Nested:
    """One root's subgraph, with values; numbering as in `Subgraphs`.

    vertices: M leaves first, then V expanded ones, then the end of an episode.
    """

    def __init__(self, sub, leaf_q, pair_q, selector_q=None):
        self.sub, self.pair_q = sub, pair_q
        num_leaves, num_vertices = len(sub.nodes), len(sub.vertex_row)
        # State, values of all actions and value of every vertex; of the end, -1 and 0.
        self.state = np.concatenate([sub.nodes, sub.nodes[sub.vertex_row], [-1]])
        q = np.concatenate([leaf_q, leaf_q[sub.vertex_row]])
        for v in range(num_vertices):
            for pair in range(sub.vertex_pairs[v], sub.vertex_pairs[v + 1]):
                q[num_leaves + v, sub.pair_action[pair]] = pair_q[pair]
        rows = np.concatenate([np.arange(num_leaves), sub.vertex_row])
        self.best = (q if selector_q is None else selector_q[rows]).argmax(axis=1)
        self.q, self.end = q, num_leaves + num_vertices
        self.value = np.append(q[np.arange(len(q)), self.best], 0.0)
        pair_vertex = np.repeat(np.arange(num_vertices), np.diff(sub.vertex_pairs)) + num_leaves
        self.pair_vertex = np.append(np.full(sub.num_roots, -1), pair_vertex)  # the root is -1

    def pairs_read(self):
        """bool [P]: does the root's target depend on the pair?"""
        sub = self.sub
        read = np.zeros(len(sub.pair_action), np.bool_)
        read[0] = True
        for pair in range(len(read)):
            if pair >= sub.num_roots:
                vertex = self.pair_vertex[pair]
                arrives = sub.outcome_pair[sub.outcome_vertex == vertex]
                read[pair] = read[arrives].any() and self.best[vertex] == sub.pair_action[pair]
        return read

    def depth_of(self):
        """Level of every pair: int64 [P]."""
        levels = self.sub.level_pairs
        return np.repeat(np.arange(len(levels) - 1), np.diff(levels))


def nest(run, state, action, depth, breadth, gamma, leaves, rng):
    """`Nested` of one root."""
    graph = run.graph
    sub = graph.expand(np.array([state]), np.array([action]), depth, breadth, rng)
    shape = (len(sub.nodes), graph.num_actions)
    leaf_q = np.zeros(shape)
    if leaves != "zero" and run.tensors is not None:
        leaf_q = run.q_values(sub.nodes, leaves).astype(np.float64)
    selector_q = None
    if run.script == "gb_rainbow_atari":
        selector_q = leaf_q
        if leaves == "target":
            selector_q = run.q_values(sub.nodes, "online").astype(np.float64)
    rule = "greedy" if selector_q is None else "double"
    return Nested(sub, leaf_q, pair_q_values(sub, leaf_q, gamma, rule, selector_q), selector_q)


def sums(nested, names, gamma, root_state):
    """Every nested value as a sum, lines: level by level, what the target reads marked with *."""
    sub, read = nested.sub, nested.pairs_read()
    num_leaves = len(sub.nodes)
    for pair, level in enumerate(nested.depth_of()):
        if pair and level != nested.depth_of()[pair - 1]:
            yield f"level {level}"
        state = root_state if pair < sub.num_roots else nested.state[nested.pair_vertex[pair]]
        terms = []
        for o in np.flatnonzero(sub.outcome_pair == pair):
            vertex = sub.outcome_vertex[o]
            term = f"{sub.outcome_reward[o]:g}"
            if vertex != nested.end:
                kind = "leaf" if vertex < num_leaves else "V"
                action = names[nested.best[vertex]]  # the one that is the vertex's value
                term += f" + {gamma:g} {kind}({nested.state[vertex]}: {action})"
                term += f" {nested.value[vertex]:.4f}"
            else:
                term += ", the end"
            weight = sub.outcome_weight[o]
            terms.append(f"({term})" if weight == 1 else f"{weight:.3g} ({term})")
        value = nested.pair_q[pair]
        mark = "*" if read[pair] else " "
        sum_text = " + ".join(terms) if terms else "never seen: leaf"
        yield f"{mark} G({state}, {names[sub.pair_action[pair]]}) = {value:.4f} = {sum_text}"


def label_places(labels):
    """Where on its line each label covers the earlier ones least: (x, y) of each.

    labels: (start, end, words, ...) of each line, in columns and rows.
    """
    width, height = 0.023, 0.36  # of a letter, in columns; of a line of text, in rows
    places = []
    for (x, y), (end_x, end_y), words, *_ in labels:
        best, most_room = None, -1.0
        for at in (0.62, 0.5, 0.7, 0.4, 0.3):
            place = x + at * (end_x - x), y + at * (end_y - y)
            room = 1.0  # 1: free
            for other, (_, _, other_words, *_) in zip(places, labels, strict=False):
                letters = (len(words) + len(other_words)) / 2
                beside = abs(place[0] - other[0]) / (width * letters)
                room = min(room, max(beside, abs(place[1] - other[1]) / height))
            if room > most_room:
                best, most_room = place, room
        places.append(best)
    return places


def draw(nested, names, root_state, title, path):
    """Levels from left to right: circles are expanded states, squares leaves."""
    try:
        import matplotlib
    except ImportError as missing:
        recorded.fail(f"no {missing.name}: pip install -r requirements-draw.txt")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sub, read = nested.sub, nested.pairs_read()
    level_of_pair = nested.depth_of()
    num_levels = len(sub.level_pairs) - 1
    # One mark per (level, state or end): where outcomes of that level lead.
    places = {}  # (column, vertex) -> order of arrival
    for o, vertex in enumerate(sub.outcome_vertex):
        column = level_of_pair[sub.outcome_pair[o]] + 1
        places.setdefault((int(column), int(vertex)), None)
    columns = [[v for c, v in places if c == column] for column in range(1, num_levels + 1)]
    tallest = max(map(len, columns))
    xy = {(0, -1): (0.0, 0.0)}
    for column, vertices in enumerate(columns, start=1):
        step = tallest / max(len(vertices), 1)
        for k, vertex in enumerate(vertices):
            xy[column, vertex] = (column, (len(vertices) - 1) / 2 * step - k * step)
    labelled = tallest <= 26
    height = float(np.clip(0.42 * tallest + 1.2, 3.2, 13))
    figure, axis = plt.subplots(figsize=(2.7 * num_levels + 1.8, height))
    busy = {}
    for o in np.argsort(read[sub.outcome_pair], kind="stable"):
        pair, vertex = int(sub.outcome_pair[o]), int(sub.outcome_vertex[o])
        level = int(level_of_pair[pair])
        a, b = xy[level, int(nested.pair_vertex[pair])], xy[level + 1, vertex]
        colour = "#d9480f" if read[pair] else "#adb5bd"
        axis.annotate(
            "", b, a, zorder=2 + read[pair],
            arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 9, "shrinkB": 9,
                        "linewidth": 1.8 if read[pair] else 0.8},
        )  # fmt: skip
        # Actions that join the same two states share one label.
        reward = sub.outcome_reward[o]
        text = names[sub.pair_action[pair]] + (f" {reward:+g}" if reward else "")
        if sub.outcome_weight[o] < 1:
            text += f" x{sub.outcome_weight[o]:.2g}"
        busy.setdefault((a, b), []).append((text, bool(read[pair])))
    labels = []
    for (a, b), texts in busy.items():
        used = any(read_here for _, read_here in texts)
        if labelled or used:
            texts = [text for text, read_here in texts if read_here or not used]
            words = ", ".join(texts[:2]) + (f", {len(texts) - 2} more" if len(texts) > 2 else "")
            labels.append((a, b, words, used))
    for (x, y), (_, _, words, used) in zip(label_places(labels), labels, strict=True):
        axis.text(
            x, y, words, fontsize=7, ha="center", va="center", zorder=5,
            color="#d9480f" if used else "#5c636a",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )  # fmt: skip
    for (_, vertex), (x, y) in xy.items():
        if vertex == -1:
            value = f"G = {nested.pair_q[0]:.3f}"
            axis.scatter(x, y, s=110, color="#1864ab", zorder=4)
            axis.annotate(
                f"({root_state}, {names[sub.pair_action[0]]})\n{value}", (x, y), (0, 13),
                textcoords="offset points", ha="center", fontsize=9,
            )  # fmt: skip
            continue
        leaf, end = vertex < len(sub.nodes), vertex == nested.end
        axis.scatter(
            x, y, s=46, marker="s" if leaf or end else "o", zorder=4,
            color="#2b8a3e" if end else "#868e96" if leaf else "#1864ab",
        )  # fmt: skip
        if labelled or end:
            text = "end" if end else f"{nested.state[vertex]}: {nested.value[vertex]:.3f}"
            axis.annotate(text, (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=7)
    for column in range(num_levels + 1):
        left = num_levels - column
        label = f"G$_{{{left}}}$(s, a)" if column == 0 else f"V$_{{{left}}}$"
        axis.text(column, -tallest / 2 - 0.9, label, ha="center", fontsize=9, color="#5c636a")
    axis.set_title(title, fontsize=10)
    axis.set_xlim(-0.45, num_levels + 0.4)
    axis.set_ylim(-tallest / 2 - 1.2, tallest / 2 + 0.6)
    axis.axis("off")
    figure.tight_layout()
    write_figure(figure, path)
    plt.close(figure)


def root_of(run, args, names, rng):
    """The pair to back up: given, or drawn from the replay."""
    graph = run.graph
    edges = graph.edges()
    if args.state is None:
        if args.action:
            recorded.fail("--action needs --state")
        if run.replay is not None:
            row = rng.integers(len(run.replay["node"]))
            return int(run.replay["node"][row]), int(run.replay["action"][row])
        edge = rng.choice(len(edges["count"]), p=edges["count"] / edges["count"].sum())
        return int(edges["source"][edge]), int(edges["action"][edge])
    here = edges["source"] == args.state
    if not here.any():
        recorded.fail(
            f"no state {args.state}: require a state with outgoing transitions, "
            f"0 to {edges['source'].max()}"
        )
    if not args.action:
        return args.state, int(edges["action"][here][edges["count"][here].argmax()])
    if args.action in names:
        return args.state, names.index(args.action)
    if args.action.isdigit() and int(args.action) < graph.num_actions:
        return args.state, int(args.action)
    recorded.fail(f"no action {args.action!r}: require one of {', '.join(names)}")


def main():
    args = tyro.cli(Args)
    if args.leaves not in ("target", "online", "zero"):
        recorded.fail(f"--leaves must be target, online or zero, got {args.leaves!r}")
    if args.out is not None and args.out.suffix not in (".png", ".svg"):
        recorded.fail(f"--out must end in .png or .svg, got {args.out}")
    if args.seed < 0:
        recorded.fail(f"--seed must be >= 0, got {args.seed}")
    run = recorded.read(args.run)
    config = run.config or {}
    depth = args.depth or config.get("depth", 5)
    breadth = config.get("breadth", 20) if args.breadth == -1 else args.breadth
    gamma = config.get("gamma", 0.99) if args.gamma == -1 else args.gamma
    if depth < 1 or breadth < 0 or not 0 <= gamma <= 1:
        recorded.fail(
            f"require depth >= 1, breadth >= 0 and 0 <= gamma <= 1, got {depth}, {breadth}, {gamma}"
        )
    rng = np.random.default_rng(args.seed)
    names = run.action_names()
    state, action = root_of(run, args, names, rng)
    nested = nest(run, state, action, depth, breadth, gamma, args.leaves, rng)
    if args.out is not None:
        title = f"{run.name}: ({state}, {names[action]}), depth {depth}, breadth {breadth or 'all'}"
        draw(nested, names, state, title, args.out)
    print(
        f"target of ({state}, {names[action]}): {nested.pair_q[0]:.4f}; depth {depth}, breadth "
        f"{breadth or 'all'}, gamma {gamma:g}, {len(nested.sub.outcome_pair)} transitions, "
        f"{len(nested.sub.nodes)} states; * is what it reads\nlevel 0"
    )
    for line in sums(nested, names, gamma, state):
        print(line)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the sums are long: `| head` may end them
    main()
