"""Draw the transition graph of a run, as in the paper (Jiang et al. 2022, Figure 5).

    pip install -r requirements-draw.txt
    python tools/draw_graph.py runs/RUN --out graph.png graph.svg graph.graphml

Edges are drawn and states are not; a circle is a transition of a state to itself. Up to 400
states are laid out by springs, so that states lie about as far apart as there are transitions
between them. Larger graphs have the paper's radial layout: in the centre a hypothetical
meta-initial state that points to all initial states, each state on the ring of its distance from
it. GraphML has nodes with positions and values, and edges with all that is known of them: Gephi,
Cytoscape and networkx read it.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import networkx as nx
import numpy as np
import tyro
from gbtools import measures, recorded
from gbtools.picture import cm, collections, colors, draw_quietly, plt, wrapped, write_figure
from scipy import sparse

from gbcore.run import Count, fail, one_line_errors
from gbcore.run.flags import require_package

COLOURS = {
    "visits": ("#5b9bd5", "#7a4fb0", "#d9480f"),
    "value": ("#2b2d8f", "#b5367a", "#fb8861", "#e8c11c"),
    "reward": ("#1c4fd8", "#c8ccd2", "#d9480f"),
}
KNOWN = "action", "reward", "terminated", "count"  # of an edge
SPRINGS = 400  # states: a thousand take a minute or more


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # a run's folder, with a checkpoint
    out: list[Path] = field(default_factory=lambda: [Path("graph.png")])
    """pictures (.png, .svg) and .graphml"""
    color_by: Literal["visits", "value", "reward"] = "visits"
    """what an edge's colour tells; a value is that of the state it leaves"""
    layout: Literal["auto", "springs", "rings"] = "auto"
    """auto: springs for up to 400 states, else rings around the start"""
    max_states: Count = 100_000  # of a larger graph the states nearest to the start are drawn


@dataclass
class Layout:
    """What is drawn: n states, E edges between them, and where."""

    states: np.ndarray  # int64 [n], ids of the graph, in increasing order
    edges: dict  # as TransitionGraph.edges(), [E]; source and next are positions in states
    initial: np.ndarray  # int64, positions of the initial states
    xy: np.ndarray  # float64 [n, 2], of about 1 per transition; of rings n + 1, the last the centre
    title: str
    notes: list  # lines that explain


def lay_out(run, max_states=100_000, layout="auto"):
    """`Layout` of a run's graph, or of what lies nearest to its start."""
    edges, notes = run.graph.edges(), []
    states = np.unique(np.concatenate([edges["source"], edges["next"]]))
    if len(states) > max_states:
        notes = [f"drawn: the {max_states:,} of {len(states):,} states nearest to the start"]
        ends, size = (edges["source"], edges["next"]), (run.graph.num_ids,) * 2
        links = sparse.csr_array((np.ones(len(ends[0])), ends), shape=size)
        how = {"indices": run.initial_states, "unweighted": True, "min_only": True}
        distance = sparse.csgraph.dijkstra(links, **how)[states]
        states = np.sort(states[np.argsort(distance, kind="stable")[:max_states]])
    inside = np.isin(edges["source"], states) & np.isin(edges["next"], states)
    if not inside.any():
        fail(f"no transition joins the {max_states} states nearest to the start: draw more of them")
    edges = {name: column[inside] for name, column in edges.items()}
    edges |= {name: np.searchsorted(states, edges[name]) for name in ("source", "next")}
    n, initial = len(states), np.searchsorted(states, np.intersect1d(run.initial_states, states))
    title = f"{run.task}, {run.flags['backup']} backup: {n:,} states, "
    title += f"{inside.sum():,} distinct transitions in {run.steps:,} steps"
    pairs = [*zip(edges["source"].tolist(), edges["next"].tolist(), strict=True)]
    if layout == "springs" or (layout == "auto" and n <= SPRINGS):
        xy, mark = graphviz("neato", pairs, n), "initial states"
    else:
        xy = graphviz("twopi", [(n, i) for i in initial.tolist()] + pairs, n + 1)
        xy, mark = xy - xy[n], "the start, which points to the initial states"
    notes.insert(0, f"lines: transitions; circles: transitions of a state to itself; +: {mark}")
    return Layout(states, edges, initial, xy, title, notes)


def graphviz(program, pairs, num):
    """Positions float64 [num, 2] in a layout; the last is the root of a radial one."""
    require_package("pygraphviz")
    import pygraphviz

    # SVG has the positions with the most digits.
    head = f'strict graph {{ graph [root="{num - 1}", ranksep=1]; edge [style=invis]; '
    head += 'node [label="", shape=point, width=0.01, height=0.01, fixedsize=true]; '
    lines = [*map(str, range(num)), *(f"{a}--{b}" for a, b in pairs if a != b)]
    graph = pygraphviz.AGraph(string=head + "\n".join(lines) + "}")
    svg = draw_quietly(graph, program, "svg").decode()
    result = re.findall(r'<title>(\d+)</title>\s*<ellipse [^>]*cx="([-\d.]+)" cy="([-\d.]+)"', svg)
    numbers = np.array(result, np.float64)
    return numbers[np.argsort(numbers[:, 0]), 1:] / 72


def draw_picture(layout, color_by, value, whose, path):
    """A PNG or SVG. value: [n] of the states, or None."""
    edges = layout.edges
    if color_by == "visits":
        number, label = edges["count"], "times seen (log scale)"
        norm = colors.LogNorm(1, max(number.max(), 2))
    elif color_by == "value":
        number, label = value[edges["source"]], f"the {whose}'s value of the state left"
        norm = colors.Normalize(*np.quantile(number, [0.01, 0.99]))
    else:
        number, label = edges["reward"], "reward"
        norm = colors.CenteredNorm(0, max(abs(number).max(), 1e-9))
    colour_map = colors.LinearSegmentedColormap.from_list(color_by, COLOURS[color_by])
    order = np.argsort(abs(number) if color_by == "reward" else number, kind="stable")
    colour = colour_map(norm(number))[order]  # what stands out is drawn last
    source, target = (layout.xy[edges[name][order]] for name in ("source", "next"))
    loop = (edges["source"] == edges["next"])[order]
    centre = layout.xy[len(layout.states) :]  # of rings
    initial = layout.xy[layout.initial]
    spokes = [(start, end) for start in centre for end in initial]
    figure, axis = plt.subplots(figsize=(9, 9.7), layout="constrained")
    width = float(np.clip(110 / np.sqrt(len(loop)), 0.35, 1.5))
    draw = collections.LineCollection
    axis.add_collection(draw(spokes, colors="#868e96", linewidths=0.7 * width))
    lines = np.stack([source, target], axis=1)[~loop]  # [E, 2, 2]
    axis.add_collection(draw(lines, colors=colour[~loop], linewidths=width))
    ring = {"facecolors": "none", "edgecolors": colour[loop], "linewidths": 0.6 * width}
    axis.scatter(*source[loop].T, s=(5 * width) ** 2, zorder=2, **ring)
    marks = centre if len(centre) else initial
    axis.plot(*marks.T, "+", color="black", markersize=11, markeredgewidth=2)
    axis.set_aspect("equal", adjustable="datalim")
    axis.margins(0.02)
    axis.invert_yaxis()  # as Graphviz has it
    axis.axis("off")
    slim = {"location": "bottom", "fraction": 0.03, "shrink": 0.45, "aspect": 35}
    bar = figure.colorbar(cm.ScalarMappable(norm, colour_map), ax=axis, format="{x:,.6g}", **slim)
    bar.set_label(wrapped("\n".join([f"colour: {label}", *layout.notes]), 9, 9), fontsize=9)
    bar.outline.set_visible(False)
    axis.set_title(wrapped(layout.title, 9, 11), fontsize=11)
    write_figure(figure, path, 120)


def write_graphml(layout, names, value, path):
    """Nodes: id, x, y, initial, value. Edges: action, reward, terminated, count."""
    graph, states = nx.MultiDiGraph(name=layout.title), layout.states.tolist()
    edges = {name: column.tolist() for name, column in layout.edges.items()}
    edges["action"] = [names[action] for action in edges["action"]]
    initial = set(layout.initial.tolist())
    for i, (state, (x, y)) in enumerate(zip(states, layout.xy.tolist(), strict=False)):
        graph.add_node(state, x=x, y=y, initial=i in initial, value=float(value[i]))
    for source, target, *known in zip(*map(edges.get, ("source", "next", *KNOWN)), strict=True):
        graph.add_edge(states[source], states[target], **dict(zip(KNOWN, known, strict=True)))
    nx.write_graphml(graph, path)


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    for path in args.out:
        if path.suffix not in (".png", ".svg", ".graphml"):
            fail(f"--out must end in .png, .svg or .graphml, got {path}")
    run = recorded.read(args.run)
    layout, value, whose = lay_out(run, args.max_states, args.layout), None, ""
    if args.color_by == "value" or any(path.suffix == ".graphml" for path in args.out):
        value, whose = run.state_values(layout.states)
    for path in args.out:
        if path.suffix == ".graphml":
            write_graphml(layout, run.action_names(), value, path)
        else:
            draw_picture(layout, args.color_by, value, whose, path)
    result = measures.crossovers(run.graph)
    shares = "{crossed:.1%} of the states have several predecessors; {self_loops:.1%} of the "
    shares += "transitions are self-loops; novel state ratio {novel_state_ratio:.3f}"
    print("\n".join([layout.title, shares.format(**result), *layout.notes[1:]]))
    print(f"wrote {', '.join(map(str, args.out))}")


if __name__ == "__main__":
    main()
