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

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import networkx as nx
import numpy as np
import pandas as pd
import tyro
from gbtools import recorded
from gbtools.picture import cm, collections, colors, plt, wrapped, write_figure

from gbcore.run import Count, fail, one_line_errors
from gbcore.run.flags import require_package

KNOWN = ["action", "reward", "terminated", "count"]  # of an edge
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


def lay_out(run, max_states=100_000, layout="auto"):
    """`Layout` of a run's graph, or of what lies nearest to its start."""
    edges = run.graph.edges()
    states = np.unique(np.concatenate([edges["source"], edges["next"]]))
    known = f"{len(states):,} states"
    if len(states) > max_states:
        known = f"the {max_states:,} of {known} nearest to the start"
        links = nx.DiGraph(zip(edges["source"], edges["next"], strict=True))
        near = nx.multi_source_dijkstra_path_length(links, {*run.initial_states})  # in this order
        states = np.sort([*near][:max_states])
    inside = np.isin(edges["source"], states) & np.isin(edges["next"], states)
    if not inside.any():
        fail(f"no transition joins the {max_states} states nearest to the start: draw more of them")
    edges = {name: column[inside] for name, column in edges.items()}
    edges |= {name: np.searchsorted(states, edges[name]) for name in ("source", "next")}
    n, initial = len(states), np.searchsorted(states, np.intersect1d(run.initial_states, states))
    title = f"{run.task}, {run.flags['backup']} backup: {known}, "
    title += f"{inside.sum():,} distinct transitions in {run.steps:,} steps"
    links = nx.Graph(zip(edges["source"].tolist(), edges["next"].tolist(), strict=True))
    links.add_nodes_from(range(n))
    how = {"prog": "neato", "args": "-Nshape=point -Nwidth=0.01 -Granksep=1 "}
    if layout == "rings" or (layout == "auto" and n > SPRINGS):
        links.add_edges_from((n, i) for i in initial.tolist())
        how |= {"prog": "twopi", "root": n}
    require_package("pygraphviz")
    place = nx.nx_agraph.graphviz_layout(links, **how)
    xy = np.array([place[i] for i in range(len(links))]) / 72  # points, an inch a rank
    return Layout(states, edges, initial, xy - xy[n:].sum(axis=0), title)


def draw_picture(layout, color_by, value, path):
    """A PNG or SVG. value: [n] of the states, or None."""
    edges = layout.edges
    number, label, norm = edges["count"], "times seen", colors.LogNorm(1, edges["count"].max() + 1)
    if color_by != "visits":
        number = value[edges["source"]] if color_by == "value" else edges["reward"]
        label, norm = (
            f"{color_by} of the state left",
            colors.Normalize(*np.quantile(number, [0, 1])),
        )
    order = np.argsort(number, kind="stable")  # what stands out is drawn last
    colour = cm.plasma(norm(number))[order]
    source, target = (layout.xy[edges[name][order]] for name in ("source", "next"))
    loop = (edges["source"] == edges["next"])[order]
    figure, axis = plt.subplots(figsize=(9, 9.7), layout="constrained")
    width = float(np.clip(110 / np.sqrt(len(loop)), 0.35, 1.5))
    lines = np.stack([source, target], axis=1)[~loop]  # [E, 2, 2]
    axis.add_collection(collections.LineCollection(lines, colors=colour[~loop], linewidths=width))
    ring = {"facecolors": "none", "edgecolors": colour[loop], "linewidths": 0.6 * width}
    axis.scatter(*source[loop].T, s=(5 * width) ** 2, zorder=2, **ring)
    initial, centre = layout.xy[layout.initial], layout.xy[len(layout.states) :]  # of rings
    for start in centre:
        spokes = [(start, end) for end in initial]
        axis.add_collection(collections.LineCollection(spokes, colors="grey", linewidths=width))
    marks = centre if len(centre) else initial
    axis.plot(*marks.T, "+", color="black", markersize=11, markeredgewidth=2)
    axis.set_aspect("equal", adjustable="datalim")
    axis.axis("off")
    slim = {"location": "bottom", "fraction": 0.03, "shrink": 0.45, "aspect": 35}
    bar = figure.colorbar(cm.ScalarMappable(norm, cm.plasma), ax=axis, format="{x:,.6g}", **slim)
    marks = "lines: transitions; circles: transitions of a state to itself; +: the start"
    bar.set_label(f"colour: {label}\n{marks}", fontsize=9)
    axis.set_title(wrapped(layout.title, 9, 11), fontsize=11)
    write_figure(figure, path, 120)


def write_graphml(layout, names, value, path):
    """Nodes: id, x, y, initial, value. Edges: action, reward, terminated, count."""
    edges, ids = pd.DataFrame(layout.edges), layout.states
    edges = edges.assign(action=np.array(names)[edges.action], source=ids[edges.source])
    edges["next"] = ids[edges["next"]]
    graph = nx.from_pandas_edgelist(edges, "source", "next", KNOWN, nx.MultiDiGraph)
    nodes = pd.DataFrame(layout.xy[: len(ids)], ids, columns=["x", "y"])
    nodes = nodes.assign(initial=np.isin(ids, ids[layout.initial]), value=value)
    nx.set_node_attributes(graph, nodes.to_dict("index"))
    graph.graph["name"] = layout.title
    nx.write_graphml(graph, path)


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    for path in args.out:
        if path.suffix not in (".png", ".svg", ".graphml"):
            fail(f"--out must end in .png, .svg or .graphml, got {path}")
    run = recorded.read(args.run)
    layout, value = lay_out(run, args.max_states, args.layout), None
    if args.color_by == "value" or any(path.suffix == ".graphml" for path in args.out):
        value, _ = run.state_values(layout.states)
    for path in args.out:
        if path.suffix == ".graphml":
            write_graphml(layout, run.action_names(), value, path)
        else:
            draw_picture(layout, args.color_by, value, path)
    print(f"{layout.title}; novel state ratio {run.graph.novel_state_ratio:.3f}")
    print(f"wrote {', '.join(map(str, args.out))}")


if __name__ == "__main__":
    main()
