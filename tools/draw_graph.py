"""Draw the transition graph of a run, as in the paper (Jiang et al. 2022, Figure 5).

    pip install -r requirements-draw.txt
    python tools/draw_graph.py runs/RUN --out graph.png graph.svg graph.html

Edges are drawn and states are not; a circle is a transition of a state to itself. Up to 400
states are laid out by springs, so that states lie about as far apart as there are transitions
between them. Larger graphs have the paper's radial layout: in the centre a hypothetical
meta-initial state that points to all initial states (`recorded.py` says which these are), each
state on the ring of its distance from it. The web page needs no network: zoom, hover a state, click
it and follow its transitions.
"""

import base64
import io
import json
import os
import re
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal

import measures
import numpy as np
import recorded
import tyro
from output import fail, lasting_output
from picture import cm, collections, colors, plt, wrapped, write_figure
from PIL import Image

from gbcore.run.flags import read_flags

try:
    import pygraphviz
except ImportError as missing:
    fail(f"no {missing.name}: pip install -r requirements-draw.txt")

COLOURS = {
    "visits": ("#5b9bd5", "#7a4fb0", "#d9480f"),
    "value": ("#2b2d8f", "#b5367a", "#fb8861", "#e8c11c"),
    "reward": ("#1c4fd8", "#c8ccd2", "#d9480f"),
}
SUFFIXES = (".png", ".svg", ".html")
SPRINGS = 400  # states: a thousand take a minute or more
TILE = 12  # pixels of a MiniGrid cell in the page
OBSERVED = 40_000  # states whose observations the page has: of Atari, 1 to 2 kB each
PAGE = Path(__file__).with_name("graph_page.html")


@dataclass
class Args:
    run: tyro.conf.Positional[Path]
    """a run's folder, finished or running (with a checkpoint), or a graph file"""
    out: list[Path] = field(default_factory=list)
    """pictures (.png, .svg) and pages (.html); default: graph.png and graph.html in the run"""
    color_by: Literal["visits", "value", "reward"] = "visits"
    """what an edge's colour tells; a value is that of the state it leaves"""
    layout: Literal["auto", "springs", "rings"] = "auto"
    """auto: springs for up to 400 states, else rings around the start"""
    max_states: int = 100_000  # of a larger graph the states nearest to the start are drawn


@dataclass
class Layout:
    """What is drawn: n states, E edges between them, where, and how."""

    states: np.ndarray  # int64 [n], ids of the graph, in increasing order
    edges: dict  # as TransitionGraph.edges(), [E]; source and next are positions in states
    initial: np.ndarray  # int64, positions of the initial states
    crosses: np.ndarray  # int64, positions that are marked
    spokes: np.ndarray  # int64, positions of what the centre points to
    xy: np.ndarray  # float64 [n, 2], of about 1 per transition; of rings n + 1, the last the centre
    title: str
    notes: list  # lines that explain
    scale: cm.ScalarMappable | None = None  # of the edges' colours

    @property
    def pairs(self):
        """Ends of the edges: [E, 2]."""
        return np.stack([self.edges["source"], self.edges["next"]], axis=1)


def lay_out(run, max_states=100_000, layout="auto"):
    """`Layout` of a run's graph, or of what lies nearest to its start, without colours."""
    edges, title, left_out = run.graph.edges(), run.name, []
    states = np.unique(np.concatenate([edges["source"], edges["next"]]))
    if len(states) > max_states:
        left_out = [f"drawn: the {max_states:,} of {len(states):,} states nearest to the start"]
        ends = edges["source"], edges["next"]
        distance = recorded.distances(run.graph.num_ids, *ends, run.initial_states)
        states = np.sort(states[np.argsort(distance[states], kind="stable")[:max_states]])
    inside = np.isin(edges["source"], states) & np.isin(edges["next"], states)
    if not inside.any():
        fail(f"no transition joins the {max_states} states nearest to the start: draw more of them")
    edges = {name: column[inside] for name, column in edges.items()}
    edges |= {name: np.searchsorted(states, edges[name]) for name in ("source", "next")}
    n, initial = len(states), np.searchsorted(states, np.intersect1d(run.initial_states, states))
    if run.config is not None:
        title = f"{run.task}, {run.config['backup']} backup"
    title += f": {n:,} states, {inside.sum():,} distinct transitions"
    if run.steps and not left_out:
        title += f" in {run.steps:,} steps"
    found = Layout(states, edges, initial, initial, initial[:0], None, title, left_out)
    note = "lines: transitions; circles: transitions of a state to itself; +: "
    if layout == "springs" or (layout == "auto" and n <= SPRINGS):
        found.xy = graphviz("neato", found.pairs, n)
        found.notes.insert(0, f"{note}initial states")
    else:
        found.crosses, found.spokes = np.array([n]), initial
        to_initial = np.stack([np.full(len(initial), n), initial], axis=1)
        found.xy = graphviz("twopi", np.concatenate([to_initial, found.pairs]), n + 1)
        found.xy -= found.xy[n]
        found.notes.insert(0, f"{note}the start, which points to the initial states")
    return found


def graphviz(program, pairs, num):
    """Positions float64 [num, 2] in a layout; the last is the root of a radial one."""
    # SVG has the positions with the most digits; the programs warn of every large graph.
    head = f'strict graph {{ graph [root="{num - 1}", ranksep=1]; edge [style=invis]; '
    head += 'node [label="", shape=point, width=0.01, height=0.01, fixedsize=true]; '
    lines = [*map(str, range(num)), *(f"{a}--{b}" for a, b in pairs.tolist() if a != b)]
    graph = pygraphviz.AGraph(string=head + "\n".join(lines) + "}")
    copy, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)  # the C library's lines
    try:
        svg = graph.draw(format="svg", prog=program).decode()
    finally:
        os.dup2(copy, 2)
    found = re.findall(r'<title>(\d+)</title>\s*<ellipse [^>]*cx="([-\d.]+)" cy="([-\d.]+)"', svg)
    numbers = np.array(found, np.float64)
    return numbers[np.argsort(numbers[:, 0]), 1:] / 72


def paint(layout, color_by, q):
    """Give the edges colours, and sort them: what stands out is drawn last. q: [n, A] or None."""
    edges = layout.edges
    if color_by == "visits":
        number, label = edges["count"], "times seen (log scale)"
        norm = colors.LogNorm(1, max(number.max(), 2))
    elif color_by == "value":
        number = q.max(axis=1)[edges["source"]]
        label = "the network's value of the state that a transition leaves"
        norm = colors.Normalize(*np.quantile(number, [0.01, 0.99]))
    else:
        number, label = edges["reward"], "reward"
        norm = colors.CenteredNorm(0, max(abs(number).max(), 1e-9))
    colour_map = colors.LinearSegmentedColormap.from_list(color_by, COLOURS[color_by], N=25)
    edges["colour"] = np.array([colors.to_hex(one) for one in colour_map(norm(number))])
    order = np.argsort(abs(number) if color_by == "reward" else number, kind="stable")
    layout.edges = {name: column[order] for name, column in edges.items()}
    layout.scale = cm.ScalarMappable(norm, colour_map)
    layout.notes.insert(0, f"colour: {label}")


def draw_picture(layout, path):
    """A PNG or SVG."""
    figure, axis = plt.subplots(figsize=(9, 9.7), layout="constrained")
    xy, pairs, colour = layout.xy, layout.pairs, layout.edges["colour"]
    width = float(np.clip(110 / np.sqrt(len(pairs)), 0.35, 1.5))
    loop = pairs[:, 0] == pairs[:, 1]
    spokes = np.stack([np.full(len(layout.spokes), len(xy) - 1), layout.spokes], axis=1)
    draw = collections.LineCollection
    axis.add_collection(draw(xy[spokes], colors="#868e96", linewidths=0.7 * width))
    axis.add_collection(draw(xy[pairs[~loop]], colors=colour[~loop], linewidths=width))
    ring = {"facecolors": "none", "edgecolors": colour[loop], "linewidths": 0.6 * width}
    axis.scatter(*xy[pairs[loop, 0]].T, s=(5 * width) ** 2, zorder=2, **ring)
    axis.plot(*xy[layout.crosses].T, "+", color="black", markersize=11, markeredgewidth=2)
    axis.set_aspect("equal", adjustable="datalim")
    axis.margins(0.02)
    axis.invert_yaxis()  # as in the page
    axis.axis("off")
    slim = {"location": "bottom", "fraction": 0.03, "shrink": 0.45, "aspect": 35}
    bar = figure.colorbar(layout.scale, ax=axis, format="{x:,.6g}", **slim)
    bar.set_label(wrapped("\n".join(layout.notes), 9, 9), fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    axis.set_title(wrapped(layout.title, 9, 11), fontsize=11)
    write_figure(figure, path, 120)


def picture_of(run, obs):
    """uint8 [height, width(, 3)], what the page shows of an observation; None: it is numbers."""
    if run.suite == "minigrid":  # as the environment draws it
        ((x, y),) = np.argwhere(obs[:, :, 0] == 10).tolist()  # the agent
        grid, _ = import_module("minigrid.core.grid").Grid.decode(obs)
        grid.set(x, y, None)
        return grid.render(TILE, (x, y), int(obs[x, y, 2]))
    if run.suite == "minatar":
        shown = (obs * np.arange(1, obs.shape[2] + 1)).max(axis=2)  # of several channels the last
        palette = [(0, 0, 0), *(colors.to_rgb(f"C{k}") for k in range(obs.shape[2]))]
        return (255 * np.array(palette)[shown]).astype(np.uint8)
    if run.suite == "atari":  # the newest frame below, on the right
        return np.block([[obs[0], obs[1]], [obs[2], obs[3]]])
    image = obs.squeeze()
    is_image = image.ndim > 1 and image.shape[2:] in ((), (3,)) and min(image.shape[:2]) > 4
    return image if is_image and obs.dtype == np.uint8 else None


def observation_text(run, state):
    """What the page shows of a state's observation: the data URI of a PNG, or its numbers."""
    (obs,) = run.graph.observations_of(np.array([state]))
    picture, file = picture_of(run, obs), io.BytesIO()
    if picture is None:
        return np.array2string(obs, precision=4, threshold=200, max_line_width=45)
    Image.fromarray(picture).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def write_page(run, layout, q, path):
    """The page: data, program and style in one file. q: values [n, A] or None."""
    channels = {}
    if run.suite == "minatar":
        channels = import_module(f"minatar.environments.{run.task}").Env().channels
    corner, scale = layout.xy.min(axis=0), layout.scale
    data = {
        "title": layout.title,
        "notes": layout.notes,
        "scale": [f"{end:,.4g}" for end in scale.get_clim()],
        "gradient": COLOURS[scale.cmap.name],
        "actions": run.action_names(),
        "channels": {name: colors.to_hex(f"C{k}") for name, k in channels.items()},
        "ids": layout.states,
        "xy": (layout.xy - corner).round(3),
        "size": np.maximum(layout.xy.max(axis=0) - corner, 1),
        "crosses": layout.crosses,
        "spokes": layout.spokes,
        "initial": layout.initial,
        "q": None if q is None else q.astype(np.float64).round(5),
        "observations": [observation_text(run, state) for state in layout.states[:OBSERVED]],
    } | layout.edges
    text = json.dumps(data, default=np.ndarray.tolist, separators=(",", ":"))
    # "<!--<script>" in a name would swallow the program.
    page = PAGE.read_text().replace("/*DATA*/null", text.replace("<", "\\u003c"))
    try:
        path.write_text(page)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


def describe(run):
    """What one sees, in numbers: lines."""
    found = measures.crossovers(run.graph)
    yield (
        f"novel state ratio {found['novel_state_ratio']:.3f}; initial states: "
        f"{len(run.initial_states):,}; {found['self_loops']:.1%} of the transitions are self-loops"
    )
    yield f"{found['crossed']:.1%} of the states have more than one predecessor:"
    for low, high, number, share in measures.crossed_by_distance(run):
        yield f"  {low} to {high} steps from the start: {share:.1%} of {number:,} states"


@lasting_output()
def main():
    args = read_flags(Args, sys.argv[1:], description=__doc__)
    if args.max_states < 1:
        fail(f"--max-states must be >= 1, got {args.max_states}")
    for path in args.out:
        if path.suffix not in SUFFIXES:
            fail(f"--out must end in one of {', '.join(SUFFIXES)}, got {path}")
    run, q = recorded.read(args.run), None
    folder = args.run if args.run.is_dir() else args.run.parent
    outs = args.out or (folder / "graph.png", folder / "graph.html")
    pages = [path for path in outs if path.suffix == ".html"]
    if args.color_by == "value" and run.missing:
        fail(f"--color-by value needs a network: {run.missing}")
    layout = lay_out(run, args.max_states, args.layout)
    if args.color_by == "value" or (pages and not run.missing):
        q = run.q_values(layout.states)
    paint(layout, args.color_by, q)
    for path in outs:
        if path in pages:
            write_page(run, layout, q, path)
        else:
            draw_picture(layout, path)
    print("\n".join([layout.title, *describe(run), *layout.notes[2:]]))
    if pages and run.missing:
        print(f"the page has no values: {run.missing}")
    print(f"wrote {', '.join(map(str, outs))}")


if __name__ == "__main__":
    main()
