"""Draw the transition graph of a run, as in the paper (Jiang et al. 2022, Figure 5).

    pip install -r requirements-draw.txt
    python tools/draw_graph.py runs/RUN --out graph.png graph.svg graph.html

Edges are drawn and states are not; a circle is a transition of a state to itself. Up to 400
states are laid out by springs, so that states lie about as far apart as there are transitions
between them. Larger graphs have the paper's radial layout: in the centre a hypothetical
meta-initial state that points to all initial states (`recorded.py` says which these are), each
state on the ring of its distance from it. The page is HTML without a program: click a state to see
its observation, values and transitions, and follow these. The browser's zoom enlarges it.
"""

import base64
import io
import os
import re
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from gbtools import measures, recorded
from gbtools.output import arguments, fail, lasting_output
from gbtools.picture import cm, collections, colors, plt, wrapped, write_figure
from PIL import Image

from gbcore.run import Count

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
SHOWN = 20_000  # states that can be clicked in the page: of Atari, 2 to 4 kB each
STYLE = """
body { font: 13px/1.45 system-ui, sans-serif; margin: 10px 350px 40px 10px; }
h1 { font-size: 14px; } h3 { font-size: 12px; margin: 10px 0 3px; color: #5c636a; }
main { position: relative; } path { fill: none; } circle { fill: transparent; }
a:hover circle { fill: #0d6efd; } #gradient { display: inline-block; width: 120px; height: 9px; }
section { position: absolute; display: none; scroll-margin: 40vh 40vw; }
section:target { display: block; }  /* it lies where its state does, and has the marks there */
section > svg { position: absolute; overflow: visible; width: 1px; height: 1px; }
section > svg { pointer-events: none; stroke: #d6336c; stroke-width: 2px; }
section > div { position: fixed; right: 0; top: 0; width: 310px; height: 100vh; padding: 0 12px; }
section > div { overflow-y: auto; background: #fff; border-left: 1px solid #dee2e6; }
img { width: 100%; image-rendering: pixelated; } pre { white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; } td { text-align: right; padding: 1px 5px; }
td:first-child { text-align: left; }
"""


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
    max_states: Count = 100_000  # of a larger graph the states nearest to the start are drawn


@dataclass
class Layout:
    """What is drawn: n states, E edges between them, where, and how."""

    states: np.ndarray  # int64 [n], ids of the graph, in increasing order
    edges: dict  # as TransitionGraph.edges(), [E]; source and next are positions in states
    initial: np.ndarray  # int64, positions of the initial states
    xy: np.ndarray  # float64 [n, 2], of about 1 per transition; of rings n + 1, the last the centre
    title: str
    notes: list  # lines that explain
    scale: cm.ScalarMappable | None = None  # of the edges' colours
    whose: str = "network"  # values: or of the graph

    def lines(self, xy):
        """Ends of the lines [E, 2, 2] where the states lie at xy, and of those from the centre."""
        pairs = np.stack([self.edges["source"], self.edges["next"]], axis=1)
        return xy[pairs], [(start, xy[i]) for start in xy[len(self.states) :] for i in self.initial]

    def marks(self, xy):
        """What gets a +: the centre, or else the initial states. [k, 2]"""
        return xy[len(self.states) :] if len(xy) > len(self.states) else xy[self.initial]


def lay_out(run, max_states=100_000, layout="auto"):
    """`Layout` of a run's graph, or of what lies nearest to its start, without colours."""
    edges, title, notes = run.graph.edges(), run.name, []
    states = np.unique(np.concatenate([edges["source"], edges["next"]]))
    if len(states) > max_states:
        notes = [f"drawn: the {max_states:,} of {len(states):,} states nearest to the start"]
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
    if run.steps and not notes:
        title += f" in {run.steps:,} steps"
    title = title.encode(errors="replace").decode()  # a folder's name need not be UTF-8
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
    # SVG has the positions with the most digits; the programs warn of every large graph.
    head = f'strict graph {{ graph [root="{num - 1}", ranksep=1]; edge [style=invis]; '
    head += 'node [label="", shape=point, width=0.01, height=0.01, fixedsize=true]; '
    lines = [*map(str, range(num)), *(f"{a}--{b}" for a, b in pairs if a != b)]
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
        label = f"the {layout.whose}'s value of the state that a transition leaves"
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
    (lines, spokes), colour = layout.lines(layout.xy), layout.edges["colour"]
    width = float(np.clip(110 / np.sqrt(len(lines)), 0.35, 1.5))
    loop = layout.edges["source"] == layout.edges["next"]
    draw = collections.LineCollection
    axis.add_collection(draw(spokes, colors="#868e96", linewidths=0.7 * width))
    axis.add_collection(draw(lines[~loop], colors=colour[~loop], linewidths=width))
    ring = {"facecolors": "none", "edgecolors": colour[loop], "linewidths": 0.6 * width}
    axis.scatter(*lines[loop, 0].T, s=(5 * width) ** 2, zorder=2, **ring)
    axis.plot(*layout.marks(layout.xy).T, "+", color="black", markersize=11, markeredgewidth=2)
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


def observation_html(run, state):
    """A state's observation as a PNG, or its numbers."""
    (obs,) = run.graph.observations_of(np.array([state]))
    picture, file = picture_of(run, obs), io.BytesIO()
    if picture is None:
        text = np.array2string(obs, precision=4, threshold=200, max_line_width=45)
        return f"<pre>{escape(text)}</pre>"
    Image.fromarray(picture).save(file, "png")
    return f'<img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def path_of(lines, radius):
    """SVG commands of lines between places, and of a circle where both are one."""
    half = f"a{radius} {radius} 0 1 0"
    circle = f"m{-radius} 0{half} {2 * radius} 0{half} {-2 * radius} 0"
    return "".join(
        f"M{x:.1f} {y:.1f}" + (circle if (x, y) == (x2, y2) else f"L{x2:.1f} {y2:.1f}")
        for (x, y), (x2, y2) in lines
    )


def section(run, layout, i, out, into, names, q):
    """What the page shows of state i. out, into: its edges. q: values [n, A] or None."""
    edges, states = layout.edges, layout.states

    def link(j):
        return "itself" if j == i else f'<a href="#s{states[j]}">{states[j]}</a>'

    def table(rows):
        cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"

    leaving, arriving = [], []
    for a, name in enumerate(map(escape, names)):
        taken = out[edges["action"][out] == a]
        value = "" if q is None else f"{q[i, a]:.4g}"
        best = q is not None and q[i, a] == q[i].max()
        leaving.append((f"<b>{name}</b>" if best else name, value, edges["count"][taken].sum()))
        for e in taken[np.argsort(-edges["count"][taken])]:
            end = " (end)" * bool(edges["terminated"][e])
            to = f"&rarr; {link(edges['next'][e])}{end}"
            leaving.append((to, f"{edges['reward'][e]:.4g}", edges["count"][e]))
    for e in into[:300]:
        name, reward = escape(names[edges["action"][e]]), f"{edges['reward'][e]:.4g}"
        arriving.append((link(edges["source"][e]), name, reward, edges["count"][e]))
    yield f"<h1>State {states[i]}</h1>acted in {edges['count'][out].sum()} times, arrived at "
    yield f"{edges['count'][into].sum()} times{'; an initial state' * (i in layout.initial)}"
    yield observation_html(run, states[i])
    value = f"the {layout.whose}'s value, " * (q is not None)
    yield f"<h3>actions ({value}times taken), and where they led (reward, times seen)</h3>"
    yield table(leaving)
    yield "<h3>transitions to here (action, reward, times seen)</h3>" + table(arriving)


def page_of(run, layout, q):
    """The page, in parts. q: values [n, A] or None."""
    size = np.ptp(layout.xy, axis=0)
    pixels = float(np.clip(1000 / max(size.max(), 1), 3, 100))  # of a transition
    xy = ((layout.xy - layout.xy.min(axis=0)) * pixels + 20).round(1)
    (width, height), radius = (size * pixels + 40).round().tolist(), round(min(pixels / 5, 9), 1)
    edges, scale = layout.edges, layout.scale
    title, gradient = escape(layout.title), ",".join(COLOURS[scale.cmap.name])
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f"<style>{STYLE}</style><h1>{title}</h1>"
    yield "".join(f"<div>{escape(note)}</div>" for note in layout.notes)
    low, high = (f"{end:,.4g}" for end in scale.get_clim())
    style = f"background: linear-gradient(90deg,{gradient})"
    yield f'<div>{low} <i id="gradient" style="{style}"></i> {high}</div>'
    if run.suite == "minatar":
        channels = import_module(f"minatar.environments.{run.task}").Env().channels
        for name, k in channels.items():
            yield f'<span style="color: {colors.to_hex(f"C{k}")}">&#9632; {escape(name)}</span> '
    line = np.clip(pixels / 25, 0.5, 2)
    yield f'<main><svg width="{width}" height="{height}" stroke-width="{line}">'
    lines, spokes = layout.lines(xy)
    yield f'<path stroke="#adb5bd" d="{path_of(spokes, radius)}"/>'
    for colour in dict.fromkeys(edges["colour"].tolist()):  # the last is drawn on top
        here = edges["colour"] == colour
        yield f'<path stroke="{colour}" d="{path_of(lines[here].tolist(), radius)}"/>'
    crosses = "".join(f"M{x - 6} {y}h12M{x} {y - 6}v12" for x, y in layout.marks(xy).tolist())
    yield f'<path stroke="#000" stroke-width="2" d="{crosses}"/>'
    shown, names = layout.states[:SHOWN].tolist(), run.action_names()
    for state, (x, y) in zip(shown, xy.tolist(), strict=False):
        yield f'<a href="#s{state}"><circle cx="{x}" cy="{y}" r="{max(radius, 4)}">'
        yield f"<title>State {state}</title></circle></a>"
    yield "</svg>"
    of_state = []  # edges from and to each: sorted once, since a page may have 20,000 states
    for states in (edges["source"], edges["next"]):
        order = np.argsort(states, kind="stable")
        limits = np.searchsorted(states[order], np.arange(1, len(shown) + 1))
        of_state.append(np.split(order, limits))
    for i, (state, (x, y)) in enumerate(zip(shown, xy.tolist(), strict=False)):
        out, into = of_state[0][i], of_state[1][i]
        marks = path_of((lines[out] - xy[i]).tolist(), radius)
        yield f'<section id="s{state}" style="left: {x}px; top: {y}px"><svg>'
        yield f'<path d="{marks}"/><circle r="5" style="fill: #d6336c"/></svg><div>'
        yield from section(run, layout, i, out, into, names, q)
        yield "</div></section>"
    yield "</main></html>"


def write_page(run, layout, q, path):
    try:
        path.write_text("\n".join(page_of(run, layout, q)))
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror or error}")


@lasting_output()
def main():
    args = arguments(Args, __doc__)
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
        q, layout.whose = run.acting_values(layout.states)
    paint(layout, args.color_by, q)
    for path in outs:
        if path in pages:
            write_page(run, layout, q, path)
        else:
            draw_picture(layout, path)
    found = measures.crossovers(run.graph)
    shares = "{crossed:.1%} of the states have several predecessors; {self_loops:.1%} of the "
    shares += "transitions are self-loops; novel state ratio {novel_state_ratio:.3f}"
    print("\n".join([layout.title, shares.format(**found), *layout.notes[2:]]))
    if pages and run.missing:
        print(f"the page has no values: {run.missing}")
    print(f"wrote {', '.join(map(str, outs))}")


if __name__ == "__main__":
    main()
