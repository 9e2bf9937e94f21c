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
import json
import os
import re
import sys
import time
import zlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import measures
import numpy as np
import recorded
import tyro
from output import fail, pyplot, write_figure

try:
    import matplotlib.collections
    import pygraphviz
except ImportError as missing:
    fail(f"no {missing.name}: pip install -r requirements-draw.txt")

COLOURS = {
    "visits": ("#5b9bd5", "#7a4fb0", "#d9480f"),
    "value": ("#2b2d8f", "#b5367a", "#fb8861", "#e8c11c"),
    "reward": ("#1c4fd8", "#c8ccd2", "#d9480f"),
}
CHANNELS = (
    "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#ffffff",
    "#808080", "#9467bd",
)  # fmt: skip
SUFFIXES = (".png", ".svg", ".html")
SPRINGS = 400  # states: a thousand take a minute or more
TILE = 12  # pixels of a MiniGrid cell in the page
CHUNK = 64  # observations that are compressed together
PAGE_BYTES = 2**26  # of compressed observations; more are left out
PAGE = Path(__file__).with_name("graph_page.html")


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]
    """a run's folder, finished or running (with a checkpoint), or a graph file"""
    out: tuple[Path, ...] = ()
    """pictures (.png, .svg) and pages (.html); default: graph.png and graph.html in the run"""
    color_by: Literal["visits", "value", "reward"] = "visits"
    """what an edge's colour tells; a value is that of the state it leaves"""
    layout: Literal["auto", "springs", "rings"] = "auto"
    """auto: springs for up to 400 states, else rings around the start"""
    max_states: int = 100_000  # of a larger graph the states nearest to the start are drawn
    rings: int = 0  # a picture ends at this distance from the centre; 0 = shows all


@dataclass
class Layout:
    """What is drawn: n states, E edges between them, and where. Position n is the centre."""

    states: np.ndarray  # int64 [n], ids of the graph, in increasing order
    edges: dict  # as TransitionGraph.edges(), [E]; source and next are positions in states
    initial: np.ndarray  # int64, positions of the initial states
    is_rings: bool  # around the centre, which points to the initial states
    xy: np.ndarray  # float32 [n + 1, 2], of about 1 per transition
    left_out: str  # a line, or nothing

    @property
    def crosses(self):
        """Positions that are marked."""
        return np.array([len(self.states)]) if self.is_rings else self.initial

    @property
    def spokes(self):
        """Positions that the centre points to."""
        return self.initial if self.is_rings else np.empty(0, np.int64)


# --------------------------------------------------------------------------------------------------
# What is drawn, and where
# --------------------------------------------------------------------------------------------------


def lay_out(run, max_states=100_000, layout="auto"):
    """`Layout` of a run's graph, or of what lies nearest to its start."""
    edges, left_out = run.graph.edges(), ""
    states = np.unique(np.concatenate([edges["source"], edges["next"]]))
    if len(states) > max_states:
        left_out = f"drawn: the {max_states:,} of {len(states):,} states nearest to the start"
        distance = recorded.distances(
            run.graph.num_ids, edges["source"], edges["next"], run.initial_states
        )
        states = np.sort(states[np.argsort(distance[states], kind="stable")[:max_states]])
    inside = np.isin(edges["source"], states) & np.isin(edges["next"], states)
    edges = {name: column[inside] for name, column in edges.items()}
    for name in ("source", "next"):
        edges[name] = np.searchsorted(states, edges[name])
    initial = np.searchsorted(states, np.intersect1d(run.initial_states, states))
    is_rings = layout == "rings" or (layout == "auto" and len(states) > SPRINGS)
    pairs = np.stack([edges["source"], edges["next"]], axis=1)
    if is_rings:
        spokes = np.stack([np.full(len(initial), len(states)), initial], axis=1)
        pairs = np.concatenate([spokes, pairs])
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    xy = graphviz("twopi" if is_rings else "neato", pairs, len(states))
    return Layout(states, edges, initial, is_rings, xy, left_out)


def graphviz(program, pairs, n):
    """Positions float32 [n + 1, 2] of a layout, the centre's at 0."""
    # SVG has the positions with the most digits; the programs warn of every large graph.
    head = f'strict graph {{ graph [root="{n}", ranksep=1]; edge [style=invis]; '
    head += 'node [label="", shape=point, width=0.01, height=0.01, fixedsize=true]; '
    names = range(n) if program == "neato" else [n]  # also what no other state is joined to
    lines = [*map(str, names), *(f"{a}--{b}" for a, b in pairs.tolist())]
    graph = pygraphviz.AGraph(string=head + "\n".join(lines) + "}")
    copy, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)  # the C library's lines
    svg = graph.draw(format="svg", prog=program).decode()
    os.dup2(copy, 2)
    found = re.findall(r'<title>(\d+)</title>\s*<ellipse [^>]*cx="([-\d.]+)" cy="([-\d.]+)"', svg)
    numbers = np.array(found, np.float64)
    xy = np.zeros((n + 1, 2))
    xy[numbers[:, 0].astype(np.int64)] = numbers[:, 1:] / 72
    return (xy - xy[n]).astype(np.float32)


# --------------------------------------------------------------------------------------------------
# Pictures
# --------------------------------------------------------------------------------------------------


def title_of(run, layout):
    """What a picture shows, in words."""
    drawn = f"{len(layout.states):,} states, {len(layout.edges['count']):,} distinct transitions"
    if run.config is None:
        return f"{run.name}: {drawn}"
    steps = f" in {run.steps:,} steps" if run.steps and not layout.left_out else ""
    return f"{run.task}, {run.config['backup']} backup: {drawn}{steps}"


def legend_of(layout):
    """What the marks mean, a line."""
    cross = "the start, which points to the initial states" if layout.is_rings else "initial states"
    return f"lines: transitions; circles: transitions of a state to itself; +: {cross}"


def edge_colours(layout, values, color_by):
    """Numbers in 0 .. 1 per edge, and the scale (least, greatest, label)."""
    if color_by == "visits":
        count = layout.edges["count"]
        top = max(int(count.max()), 2)
        return np.log(count) / np.log(top), (1, top, "times seen (log scale)")
    if color_by == "value":
        v = values[layout.edges["source"]]
        low, high = np.quantile(v, [0.01, 0.99])
        number = np.clip((v - low) / max(high - low, 1e-9), 0, 1)
        return number, (low, high, "the network's value of the state that a transition leaves")
    reward = layout.edges["reward"]
    top = max(np.abs(reward).max(), 1e-9)
    return 0.5 + 0.5 * reward / top, (-top, top, "reward")


def draw_picture(layout, values, args, title, path):
    """A PNG or SVG: edges of one colour are one path, whatever their number."""
    figure, axis = pyplot().subplots(figsize=(9, 9.7))
    xy, edges, by = layout.xy, layout.edges, args.color_by
    number, (low, high, label) = edge_colours(layout, values, by)
    colours = matplotlib.colors.LinearSegmentedColormap.from_list(by, COLOURS[by])
    bins = np.minimum((number * 24).astype(np.int64), 23)
    width = float(np.clip(110 / np.sqrt(len(bins)), 0.35, 1.5))
    loop = edges["source"] == edges["next"]
    spokes = np.stack([np.full(len(layout.spokes), len(layout.states)), layout.spokes], axis=1)
    add_lines(axis, xy, spokes, "#868e96", 0.7 * width)
    # What stands out is drawn last: many visits, high values, any reward.
    rank = np.abs(np.arange(24) - 11.5) if by == "reward" else np.arange(24)
    for k in np.argsort(rank, kind="stable"):
        colour = colours((k + 0.5) / 24)
        chosen = (bins == k) & ~loop
        pairs = np.stack([edges["source"][chosen], edges["next"][chosen]], axis=1)
        add_lines(axis, xy, pairs, colour, width)
        loops = xy[edges["source"][(bins == k) & loop]]
        axis.plot(
            *loops.T, "o", markersize=5 * width, markerfacecolor="none", markeredgecolor=colour,
            markeredgewidth=0.6 * width,
        )  # fmt: skip
    axis.plot(*xy[layout.crosses].T, "+", color="black", markersize=11, markeredgewidth=2)
    shown = xy if layout.is_rings else xy[:-1]
    if args.rings:
        shown = shown[np.hypot(*shown.T) <= args.rings]
    low_corner, high_corner = shown.min(axis=0), shown.max(axis=0)
    middle = (low_corner + high_corner) / 2
    reach = 0.52 * max(float((high_corner - low_corner).max()), 1.0)
    axis.set(
        xlim=(middle[0] - reach, middle[0] + reach), ylim=(middle[1] - reach, middle[1] + reach),
        aspect="equal",
    )  # fmt: skip
    axis.axis("off")
    norm = matplotlib.colors.LogNorm if by == "visits" else matplotlib.colors.Normalize
    bar = figure.colorbar(
        matplotlib.cm.ScalarMappable(norm(low, high), colours), ax=axis, format="{x:,.6g}",
        orientation="horizontal", fraction=0.03, pad=0.0, shrink=0.45, aspect=35,
    )  # fmt: skip
    bar.set_label(f"{label}\n{legend_of(layout)}", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    axis.set_title(title, fontsize=11)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.95, bottom=0.07)
    write_figure(figure, path, 120)


def add_lines(axis, xy, pairs, colour, width):
    """Straight edges, as one collection."""
    lines = matplotlib.collections.LineCollection(xy[pairs], colors=[colour], linewidths=width)
    axis.add_collection(lines, autolim=False)


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------


def packed(array):
    """Deflated bytes, as text."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 6)).decode()


def observation_items(run, states):
    """What the page shows of states: (items uint8 [k, bytes], which [n, per state], shape).

    Items are pictures of a shape [height, width, 1 or 3], or numbers float64 where that is None.
    The frames of a stack are items of their own, each once.
    """
    obs = run.graph.observations_of(states)
    one_each, shape = np.arange(len(states))[:, None], obs.shape[1:]
    if run.suite == "minigrid":
        items = np.stack([grid_picture(one) for one in obs])
    elif run.suite == "minatar":
        colours = np.array([[0, 0, 0], *map(matplotlib.colors.to_rgb, CHANNELS)])
        used = np.arange(1, shape[2] + 1) % len(colours)
        items = (255 * colours[(obs * used).max(axis=3)]).astype(np.uint8)
    elif len(shape) == 3 and shape[0] == 4 and obs.dtype == np.uint8:
        frames, which = np.unique(obs.reshape(-1, *shape[1:]), axis=0, return_inverse=True)
        return frames.reshape(len(frames), -1), which.reshape(-1, 4), (*shape[1:], 1)
    elif obs.dtype == np.uint8 and shape[2:] in ((), (1,), (3,)) and min(shape[:2]) > 4 < obs.ndim:
        items = obs.reshape(*obs.shape[:3], -1)
    else:
        numbers = obs.reshape(len(obs), -1).astype(np.float64)
        return numbers.view(np.uint8), one_each, None
    return items.reshape(len(items), -1), one_each, items.shape[1:]


def grid_picture(obs):
    """uint8 [height, width, 3] of a MiniGrid observation, as the environment draws it."""
    from minigrid.core.grid import Grid

    ((x, y),) = np.argwhere(obs[:, :, 0] == 10)  # the agent
    grid, _ = Grid.decode(obs)
    grid.set(int(x), int(y), None)
    return grid.render(TILE, (int(x), int(y)), int(obs[x, y, 2]))


def chunks_of(items):
    """Items in compressed chunks, each item the difference to the one before it in its chunk."""
    chunks, size = [], 0
    for i in range(0, len(items), CHUNK):
        part = items[i : i + CHUNK].copy()
        part[1:] ^= items[i : i + CHUNK - 1][: len(part) - 1]
        chunks.append(packed(part))
        size += len(chunks[-1])
        if size > PAGE_BYTES:
            return chunks[:-1]
    return chunks


def channel_names(run):
    """Names of MinAtar's channels, in their order."""
    channels = import_module(f"minatar.environments.{run.task}").Env().channels
    return sorted(channels, key=channels.get)


def write_page(run, layout, q, args, title, path):
    """The page: data, program and style in one file. Returns a line on what was left out, or ''."""
    items, which, shape = observation_items(run, layout.states)
    chunks = chunks_of(items)
    missing = int((which >= len(chunks) * CHUNK).any(axis=1).sum())
    line = f"observations of {missing:,} states were left out of the page" if missing else ""
    channels = channel_names(run) if run.suite == "minatar" else ()
    columns = {"ids": layout.states, "source": layout.edges["source"], "next": layout.edges["next"]}
    columns |= {"spokes": layout.spokes, "count": layout.edges["count"], "which": which}
    data = {
        "title": title,
        "notes": [text for text in (legend_of(layout), layout.left_out, line) if text],
        "color_by": args.color_by,
        "colours": COLOURS,
        "actions": run.action_names(),
        "image": shape,
        "legend": list(zip(channels, CHANNELS, strict=False)),
        "chunk": CHUNK,
        "item_bytes": items.shape[1],
        "crosses": layout.crosses.tolist(),
        "initial": layout.initial.tolist(),
        "xy": packed(layout.xy),
        "action": packed(layout.edges["action"].astype(np.int16)),
        "reward": packed(layout.edges["reward"].astype(np.float32)),
        "terminated": packed(layout.edges["terminated"].astype(np.uint8)),
        "q": None if q is None else packed(q.astype(np.float32)),
        "chunks": chunks,
    } | {name: packed(column.astype(np.int32)) for name, column in columns.items()}
    page = PAGE.read_text().replace("/*DATA*/null", json.dumps(data).replace("</", "<\\/"))
    try:
        path.write_text(page)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    return line


# --------------------------------------------------------------------------------------------------
# Main
# --------------------------------------------------------------------------------------------------


def describe(run):
    """What one sees, in numbers: lines."""
    graph = run.graph
    found = measures.crossovers(graph)
    yield (
        f"{graph.num_nodes:,} states, {graph.num_edges:,} distinct of {graph.num_transitions:,} "
        f"transitions, novel state ratio {graph.novel_state_ratio:.3f}; "
        f"{len(run.initial_states):,} initial states"
    )
    yield (
        f"{found['crossed']:.1%} of the states have more than one predecessor; "
        f"{found['self_loops']:.1%} of the transitions are self-loops"
    )
    for low, high, number, share in measures.crossed_by_distance(run):
        yield f"  {low} to {high} steps from the start: {share:.1%} of {number:,} states"
    parts = measures.groups(run)
    sizes = ", ".join(f"{size:,} states from {starts} initial ones" for starts, size in parts[:4])
    yield (
        f"{len(parts):,} groups of trajectories that nothing joins but the centre: {sizes}"
        + (", ..." if len(parts) > 4 else "")
    )


def main():
    args = tyro.cli(Args)
    if args.max_states < 1 or args.rings < 0:
        fail("require --max-states >= 1 and --rings >= 0")
    for path in args.out:
        if path.suffix not in SUFFIXES:
            fail(f"--out must end in one of {', '.join(SUFFIXES)}, got {path}")
    begin = time.perf_counter()
    run = recorded.read(args.run)
    folder = args.run if args.run.is_dir() else args.run.parent
    outs = args.out or (folder / "graph.png", folder / "graph.html")
    is_page = [path.suffix == ".html" for path in outs]
    if args.color_by == "value" and run.missing:
        fail(f"--color-by value needs a network: {run.missing}")
    layout = lay_out(run, args.max_states, args.layout)
    q = None
    if args.color_by == "value" or (any(is_page) and not run.missing):
        q = run.q_values(layout.states)
    values = None if q is None else q.max(axis=1)
    title = title_of(run, layout)
    for line in describe(run):
        print(line)
    for path, page in zip(outs, is_page, strict=True):
        if page:
            note = write_page(run, layout, q, args, title, path)
            if note:
                print(note)
        else:
            draw_picture(layout, values, args, title, path)
    if layout.left_out:
        print(layout.left_out)
    if any(is_page) and run.missing:
        print(f"the page has no values: {run.missing}")
    if args.rings and not all(is_page):
        outside = np.hypot(*layout.xy.T) > args.rings + 0.5
        print(f"beyond the edge of the picture: {outside.sum():,} of {len(outside) - 1:,} states")
    print(f"{', '.join(map(str, outs))}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
