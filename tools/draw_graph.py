"""Draw the transition graph of a run, as in the paper (Jiang et al. 2022, Figure 5).

    pip install -r requirements-draw.txt
    python tools/draw_graph.py runs/RUN --out graph.png graph.svg graph.graphml

Edges are drawn and states are not; a circle is a transition of a state to itself. Up to 400
states are laid out by springs. Larger graphs have the paper's radial layout: in the centre a
hypothetical meta-initial state that points to all initial states, each state on the ring of its
distance from it. GraphML has nodes with positions and values, and edges with all that is known of
them: Gephi, Cytoscape and networkx read it.
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

CENTRE = -1  # of rings, the meta-initial state
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
    """What is drawn, and where: x and y are of about 1 per transition."""

    nodes: pd.DataFrame  # x, y, initial, by id; also value, where it was asked for
    edges: pd.DataFrame  # as TransitionGraph.edges(), with names of actions
    centre: np.ndarray  # float64 [1, 2] of rings, else [0, 2]
    title: str


def lay_out(run, max_states=100_000, layout="auto"):
    """`Layout` of a run's graph, or of what lies nearest to its start."""
    edges = pd.DataFrame(run.graph.edges())
    ids = np.union1d(edges["source"], edges["next"])
    known = f"{len(ids):,} states"
    if len(ids) > max_states:
        known = f"the {max_states:,} of {known} nearest to the start"
        links = nx.from_pandas_edgelist(edges, "source", "next", create_using=nx.DiGraph)
        near = nx.multi_source_dijkstra_path_length(links, {*run.initial_states})  # in this order
        ids = np.sort([*near][:max_states])
        edges = edges[edges["source"].isin(ids) & edges["next"].isin(ids)]
    if edges.empty:
        fail(f"no transition joins the {max_states} states nearest to the start: draw more of them")
    edges = edges.assign(action=np.array(run.action_names())[edges["action"]])
    title = f"{run.task}, {run.flags['backup']} backup: {known}, {len(edges):,} distinct "
    title += f"transitions in {run.steps:,} steps"
    is_initial = np.isin(ids, run.initial_states)
    links = nx.from_pandas_edgelist(edges, "source", "next")
    links.add_nodes_from(ids)
    how = {"prog": "neato", "args": "-Nshape=point -Nwidth=0.01 -Granksep=1 "}
    if layout == "rings" or (layout == "auto" and len(ids) > SPRINGS):
        links.add_edges_from((CENTRE, node) for node in ids[is_initial])
        how |= {"prog": "twopi", "root": CENTRE}
    require_package("pygraphviz")
    place = nx.nx_agraph.graphviz_layout(links, **how)
    xy = pd.DataFrame.from_dict(place, "index", columns=["x", "y"]) / 72  # an inch a transition
    centre = xy[xy.index == CENTRE]
    nodes = (xy.loc[ids] - centre.sum()).assign(initial=is_initial)
    return Layout(nodes, edges, np.zeros((len(centre), 2)), title)


def draw_picture(layout, color_by, path):
    """A PNG or SVG."""
    nodes, edges = layout.nodes, layout.edges.assign(visits=layout.edges["count"])
    if color_by == "value":
        edges["value"] = nodes["value"][edges["source"]].to_numpy()
    edges = edges.sort_values(color_by, kind="stable")  # what stands out is drawn last
    norm = (
        colors.LogNorm(1, edges["visits"].max() + 1) if color_by == "visits" else colors.Normalize()
    )
    colour = cm.plasma(norm(edges[color_by].to_numpy()))
    source, target = (nodes.loc[edges[end], ["x", "y"]].to_numpy() for end in ("source", "next"))
    loop = (edges["source"] == edges["next"]).to_numpy()
    figure, axis = plt.subplots(figsize=(9, 9.7), layout="constrained")
    width = float(np.clip(110 / np.sqrt(len(loop)), 0.35, 1.5))
    lines = np.stack([source, target], axis=1)[~loop]  # [E, 2, 2]
    axis.add_collection(collections.LineCollection(lines, colors=colour[~loop], linewidths=width))
    ring = {"facecolors": "none", "edgecolors": colour[loop], "linewidths": 0.6 * width}
    axis.scatter(*source[loop].T, s=(5 * width) ** 2, zorder=2, **ring)
    initial = nodes.loc[nodes["initial"], ["x", "y"]].to_numpy()
    spokes = [(start, end) for start in layout.centre for end in initial]
    axis.add_collection(collections.LineCollection(spokes, colors="grey", linewidths=width))
    marks = layout.centre if len(spokes) else initial
    axis.plot(*marks.T, "+", color="black", markersize=11, markeredgewidth=2)
    axis.set_aspect("equal", adjustable="datalim")
    axis.axis("off")
    slim = {"location": "bottom", "fraction": 0.03, "shrink": 0.45, "aspect": 35}
    bar = figure.colorbar(cm.ScalarMappable(norm, cm.plasma), ax=axis, format="{x:,.6g}", **slim)
    marks = "lines: transitions; circles: transitions of a state to itself; +: the start"
    bar.set_label(f"colour: {color_by}\n{marks}", fontsize=9)
    axis.set_title(wrapped(layout.title, 9, 11), fontsize=11)
    write_figure(figure, path, 120)


def write_graphml(layout, path):
    """Nodes: id, x, y, initial, value. Edges: action, reward, terminated, count."""
    known = ["action", "reward", "terminated", "count"]
    graph = nx.from_pandas_edgelist(layout.edges, "source", "next", known, nx.MultiDiGraph)
    nx.set_node_attributes(graph, layout.nodes.to_dict("index"))
    graph.graph["name"] = layout.title
    nx.write_graphml(graph, path)


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    for path in args.out:
        if path.suffix not in (".png", ".svg", ".graphml"):
            fail(f"--out must end in .png, .svg or .graphml, got {path}")
    run = recorded.read(args.run)
    layout = lay_out(run, args.max_states, args.layout)
    if args.color_by == "value" or any(path.suffix == ".graphml" for path in args.out):
        layout.nodes["value"] = run.state_values(layout.nodes.index.to_numpy())
    for path in args.out:
        if path.suffix == ".graphml":
            write_graphml(layout, path)
        else:
            draw_picture(layout, args.color_by, path)
    print(f"{layout.title}; novel state ratio {run.graph.novel_state_ratio:.3f}")
    print(f"wrote {', '.join(map(str, args.out))}")


if __name__ == "__main__":
    main()
