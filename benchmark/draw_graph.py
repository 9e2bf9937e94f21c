"""Draw the transition graph of a run, as in the paper (Jiang et al. 2022, Figure 5).

    pip install -r requirements-draw.txt
    python benchmark/draw_graph.py runs/RUN --out graph.png graph.svg graph.html
    python benchmark/draw_graph.py runs/RUN --around 1234 --radius 8 --out near.png

A radial layout by Graphviz twopi: in the centre a hypothetical meta-initial state that points to
all initial states (`recorded.py` says which these are), each state on the ring of its distance from
it. Edges are drawn and states are not; a circle is a transition of a state to itself. The web page
needs no network: zoom, hover a state, click it and follow its transitions.
"""

import base64
import contextlib
import json
import os
import re
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import measures
import numpy as np
import recorded
import tyro
from output import write_figure

from gbcore.interner import Interner

try:
    import matplotlib
    from matplotlib.path import Path as Outline
except ImportError as missing:
    recorded.fail(f"no {missing.name}: pip install -r requirements-draw.txt")

COLOURS = ("visits", "value", "reward")
SUFFIXES = (".png", ".svg", ".html")
CHUNK = 64  # observations that are compressed together
PAGE = Path(__file__).with_name("graph_page.html")


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]
    """a run's folder, finished or running (with a checkpoint), or a graph file"""
    out: tuple[Path, ...] = ()
    """pictures (.png, .svg) and pages (.html); default: graph.png and graph.html in the run"""
    color_by: Annotated[str, tyro.conf.arg(metavar="{visits,value,reward}")] = "visits"
    """what an edge's colour tells; a value is that of the state it leaves"""
    max_states: int = 100_000
    """a larger graph is sampled: whole episodes, drawn at random, until there are this many"""
    around: int | None = None
    """draw only the neighbourhood of this state, which takes the centre"""
    radius: int = 10
    """transitions, forward or backward, from that state"""
    rings: int = 0
    """a picture ends at this distance from the centre; 0 = shows all"""
    title: str = ""
    """printed above a picture"""
    size: float = 9.0
    """width and height of a picture, in inches"""
    dpi: int = 120
    """pixels per inch"""
    page_megabytes: int = 64
    """observations beyond this, compressed, are left out of a page"""
    seed: int = 0
    """of the sample"""


@dataclass
class Layout:
    """What is drawn: n states, E edges between them, and where.

    The centre has position n: the meta-initial state, or nothing where a state takes the centre.
    """

    states: np.ndarray  # int64 [n], ids of the graph, in increasing order
    edges: dict  # as TransitionGraph.edges(), [E]; source and next are positions in states
    spokes: np.ndarray  # int64, positions of the states that the centre points to
    xy: np.ndarray  # float32 [n + 1, 2], in ring distances, the centre at 0
    left_out: str  # a line, or nothing


# --------------------------------------------------------------------------------------------------
# What is drawn, and where
# --------------------------------------------------------------------------------------------------


def choose(run, max_states, around, radius, rng):
    """States to draw: (ids, the line that says what was left out)."""
    graph = run.graph
    edges = graph.edges()
    source, target = edges["source"], edges["next"]
    states = np.unique(np.concatenate([source, target]))
    if around is not None:
        if not 0 <= around < graph.num_ids or around not in states:
            recorded.fail(
                f"no state {around}: require a state of the graph, 0 to {states[-1]}, "
                "that has a transition"
            )
        both = np.concatenate([source, target]), np.concatenate([target, source])
        distance = recorded.distances(graph.num_ids, *both, np.array([around]), radius)
        near = np.flatnonzero(distance >= 0)
        how = f"the states within {radius} transitions of state {around}"
        if len(near) > max_states:
            near = near[np.argsort(distance[near], kind="stable")[:max_states]]
            how = f"the {max_states:,} states nearest to state {around}"
        chosen = np.sort(near)
    elif len(states) <= max_states:
        return states, ""
    elif run.replay is not None:
        replay = run.replay
        starts = np.flatnonzero(np.append(True, replay["cut"][:-1]))
        ends = np.append(starts[1:], len(replay["node"]))
        kept, drawn, total = np.zeros(graph.num_ids, np.bool_), 0, 0
        order = rng.permutation(len(starts))
        for episode in order:
            rows = slice(starts[episode], ends[episode])
            added = np.union1d(replay["node"][rows], replay["next_node"][rows])
            total += np.count_nonzero(~kept[added])
            if total > max_states and drawn:
                break
            kept[added] = True
            drawn += 1
        chosen = np.flatnonzero(kept)
        how = f"{drawn:,} of {len(starts):,} episodes, drawn at random"
        if len(chosen) > max_states:  # one episode alone is too long
            row = replay["node"][starts[order[0]] : ends[order[0]]]
            first = np.sort(np.unique(row, return_index=True)[1])  # where each state comes first
            chosen = np.sort(row[first[:max_states]])
            how = "the first part of one episode, drawn at random"
    else:
        distance = recorded.distances(graph.num_ids, source, target, run.initial_states)
        chosen = np.sort(states[np.argsort(distance[states], kind="stable")[:max_states]])
        how = "the states nearest to the initial ones"
    inside = np.isin(source, chosen) & np.isin(target, chosen)
    left_out = (
        f"drawn: {how}: {len(chosen):,} of {len(states):,} states and {inside.sum():,} of "
        f"{len(source):,} distinct transitions; the others were left out"
    )
    return chosen, left_out if len(chosen) < len(states) else ""


def lay_out(run, max_states=100_000, around=None, radius=10, seed=0):
    """`Layout` of a run's graph, or of a part of it."""
    rng = np.random.default_rng(seed)
    states, left_out = choose(run, max_states, around, radius, rng)
    edges = run.graph.edges()
    inside = np.isin(edges["source"], states) & np.isin(edges["next"], states)
    edges = {name: column[inside] for name, column in edges.items()}
    for name in ("source", "next"):
        edges[name] = np.searchsorted(states, edges[name])
    n = len(states)
    if around is not None:
        root = int(np.searchsorted(states, around))
        spokes = np.empty(0, np.int64)
    else:
        root = n
        spokes = np.searchsorted(states, np.intersect1d(run.initial_states, states))
        # What a sample cut off from its start hangs on the centre as well.
        both = (
            np.concatenate([edges["source"], edges["next"], np.full(len(spokes), n)]),
            np.concatenate([edges["next"], edges["source"], spokes]),
        )
        while True:
            reached = recorded.distances(n + 1, *both, np.array([n]))[:n] >= 0
            if reached.all():
                break
            loose = np.flatnonzero(~reached)[:1]
            spokes = np.append(spokes, loose)
            both = np.append(both[0], n), np.append(both[1], loose)
    pairs = np.stack([edges["source"], edges["next"]], axis=1)
    pairs = np.concatenate([np.stack([np.full(len(spokes), n), spokes], axis=1), pairs])
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    xy = twopi(pairs, n + 1, root)
    return Layout(states, edges, spokes, xy, left_out)


def twopi(pairs, n, root):
    """Positions float32 [n, 2] of a radial layout about the root, rings at distance 1."""
    try:
        import pygraphviz
    except ImportError:
        recorded.fail("this needs Graphviz: pip install -r requirements-draw.txt")
    # SVG has the positions with the most digits; twopi itself warns of every large graph.
    head = f'strict graph {{ graph [root="{root}", ranksep=1]; edge [style=invis]; '
    head += 'node [label="", shape=point, width=0.01, height=0.01, fixedsize=true]; '
    lines = (f"{a}--{b}" for a, b in pairs.tolist())
    graph = pygraphviz.AGraph(string=head + f"{root};\n" + "\n".join(lines) + "}")
    with quiet():
        svg = graph.draw(format="svg", prog="twopi").decode()
    found = re.findall(r'<title>(\d+)</title>\s*<ellipse [^>]*cx="([-\d.]+)" cy="([-\d.]+)"', svg)
    numbers = np.array(found, np.float64)
    xy = np.zeros((n, 2))
    xy[numbers[:, 0].astype(np.int64)] = numbers[:, 1:] / 72
    return (xy - xy[root]).astype(np.float32)


@contextlib.contextmanager
def quiet():
    """No lines from the C library on stderr."""
    copy, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(copy, 2)
        os.close(copy)
        os.close(sink)


# --------------------------------------------------------------------------------------------------
# Pictures
# --------------------------------------------------------------------------------------------------


def edge_colours(layout, values, color_by):
    """Numbers in 0 .. 1 per edge, colours from 0 to 1, and the scale (least, greatest, label)."""
    if color_by == "visits":
        count = layout.edges["count"]
        top = max(int(count.max()), 2)
        number = np.log(count) / np.log(top)
        return number, ["#5b9bd5", "#7a4fb0", "#d9480f"], (1, top, "times seen (log scale)")
    if color_by == "value":
        v = values[layout.edges["source"]]
        low, high = np.quantile(v, [0.01, 0.99])
        number = np.clip((v - low) / max(high - low, 1e-9), 0, 1)
        colours = ["#2b2d8f", "#b5367a", "#fb8861", "#e8c11c"]
        return number, colours, (low, high, "value of the state")
    reward = layout.edges["reward"]
    top = max(np.abs(reward).max(), 1e-9)
    return 0.5 + 0.5 * reward / top, ["#1c4fd8", "#c8ccd2", "#d9480f"], (-top, top, "reward")


def draw_picture(layout, values, args, title, path):
    """A PNG or SVG: edges of one colour are one path, whatever their number."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(args.size, args.size * 1.06))
    xy, edges = layout.xy, layout.edges
    number, colours, (low, high, label) = edge_colours(layout, values, args.color_by)
    colours = matplotlib.colors.LinearSegmentedColormap.from_list(args.color_by, colours)
    bins = np.minimum((number * 24).astype(np.int64), 23)
    width = float(np.clip(110 / np.sqrt(len(bins)), 0.35, 1.5))
    loop = edges["source"] == edges["next"]
    centre = len(layout.states)
    spokes = np.stack([np.full(len(layout.spokes), centre), layout.spokes], axis=1)
    add_lines(axis, xy, spokes, "#868e96", 0.7 * width)
    # What stands out is drawn last: many visits, high values, any reward.
    rank = np.abs(np.arange(24) - 11.5) if args.color_by == "reward" else np.arange(24)
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
    root = centre if len(spokes) else layout_root(layout)
    axis.plot(*xy[root], "+", color="black", markersize=9)
    shown = xy[np.hypot(*xy.T) <= args.rings] if args.rings else xy
    low_corner, high_corner = shown.min(axis=0), shown.max(axis=0)
    middle = (low_corner + high_corner) / 2
    reach = 0.52 * max(float((high_corner - low_corner).max()), 1.0)
    axis.set(
        xlim=(middle[0] - reach, middle[0] + reach), ylim=(middle[1] - reach, middle[1] + reach),
        aspect="equal",
    )  # fmt: skip
    axis.axis("off")
    norm = matplotlib.colors.LogNorm if args.color_by == "visits" else matplotlib.colors.Normalize
    scale = matplotlib.cm.ScalarMappable(norm(low, high), colours)
    bar = figure.colorbar(
        scale, ax=axis, orientation="horizontal", fraction=0.03, pad=0.0, shrink=0.45, aspect=35
    )
    if args.color_by == "visits":
        bar.set_ticks(np.unique(np.round(np.geomspace(1, high, 4)).astype(np.int64)))
        bar.minorticks_off()
        bar.formatter = matplotlib.ticker.FuncFormatter(lambda count, _: f"{count:,.0f}")
    else:
        bar.locator = matplotlib.ticker.MaxNLocator(4)
    bar.update_ticks()
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    axis.set_title(title, fontsize=12)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.95, bottom=0.05)
    write_figure(figure, path, args.dpi)
    plt.close(figure)


def layout_root(layout):
    """Position of the state in the centre."""
    return int(np.square(layout.xy[:-1]).sum(axis=1).argmin())


def add_lines(axis, xy, pairs, colour, width):
    """Straight edges, 2,000 to a path: the renderer's memory bounds the length of one."""
    for i in range(0, len(pairs), 2_000):
        part = pairs[i : i + 2_000]
        codes = np.tile([Outline.MOVETO, Outline.LINETO], len(part))
        outline = Outline(xy[part].reshape(-1, 2), codes)
        patch = matplotlib.patches.PathPatch(
            outline, facecolor="none", edgecolor=colour, linewidth=width, capstyle="round"
        )
        axis.add_artist(patch)


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------


def packed(array):
    """Deflated bytes, as text."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 6)).decode()


def observation_items(graph, states):
    """What observations are made of: items uint8 [k, bytes], and which ones: int64 [n, per state].

    A stack of frames is its frames, each once; anything else is one item.
    """
    shape = graph.obs_shape
    if len(shape) == 3 and shape[0] == 4 and graph.obs_dtype == np.uint8:
        frames = Interner(shape[1:], graph.obs_dtype, 1024)
        which = np.empty((len(states), shape[0]), np.int64)
        for i in range(0, len(states), 256):
            stacks = graph.observations_of(states[i : i + 256])
            which[i : i + 256] = [[frames.add(frame) for frame in stack] for stack in stacks]
        items = frames.arrays
        return items.reshape(len(items), -1).view(np.uint8), which
    obs = np.ascontiguousarray(graph.observations_of(states))
    items = obs.reshape(len(states), -1).view(np.uint8)
    return items, np.arange(len(states))[:, None]


def chunks_of(items, limit):
    """Items in compressed chunks, each item the difference to the one before it in its chunk."""
    chunks, size = [], 0
    for i in range(0, len(items), CHUNK):
        part = items[i : i + CHUNK].copy()
        part[1:] ^= items[i : i + CHUNK - 1][: len(part) - 1]
        text = packed(part)
        size += len(text)
        if size > limit:
            break
        chunks.append(text)
    return chunks


def channel_names(run):
    """Names of MinAtar's channels, in their order."""
    if run.script != "gb_dqn_minatar":
        return []
    from importlib import import_module

    channels = import_module(f"minatar.environments.{run.task}").Env().channels
    return sorted(channels, key=channels.get)


def write_page(run, layout, q, args, title, path):
    """The page: data, program and style in one file. Returns a line on what was left out, or ''."""
    graph, states = run.graph, layout.states
    items, which = observation_items(graph, states)
    chunks = chunks_of(items, args.page_megabytes * 2**20)
    kept = min(len(items), len(chunks) * CHUNK)
    missing = int((which >= kept).any(axis=1).sum())
    kinds = {"gb_dqn_minigrid": "minigrid", "gb_dqn_minatar": "minatar"}
    frames = which.shape[1] == 4
    edges = layout.edges
    line = f"observations of {missing:,} states were left out of the page" if missing else ""
    data = {
        "title": title,
        "notes": [text for text in (layout.left_out, line) if text],
        "color_by": args.color_by,
        "num_states": len(states),
        "num_edges": len(edges["source"]),
        "num_actions": graph.num_actions,
        "actions": run.action_names(),
        "kind": "frames" if frames else kinds.get(run.script, "array"),
        "shape": list(graph.obs_shape),
        "dtype": graph.obs_dtype.name,
        "channels": channel_names(run),
        "per_state": which.shape[1],
        "chunk": CHUNK,
        "item_bytes": items.shape[1],
        "items_kept": kept,
        "root": len(states) if len(layout.spokes) else layout_root(layout),
        "ids": packed(states.astype(np.int32)),
        "xy": packed(layout.xy.astype(np.float32)),
        "spokes": packed(layout.spokes.astype(np.int32)),
        "source": packed(edges["source"].astype(np.int32)),
        "next": packed(edges["next"].astype(np.int32)),
        "action": packed(edges["action"].astype(np.int16)),
        "reward": packed(edges["reward"].astype(np.float32)),
        "terminated": packed(edges["terminated"].astype(np.uint8)),
        "count": packed(edges["count"].astype(np.int32)),
        "q": None if q is None else packed(q.astype(np.float32)),
        "which": packed(which.astype(np.int32)),
        "chunks": chunks,
    }
    text = json.dumps(data).replace("</", "<\\/")
    page = PAGE.read_text().replace("/*DATA*/null", text)
    try:
        path.write_text(page)
    except OSError as error:
        recorded.fail(f"cannot write {path}: {error.strerror}")
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
    if args.color_by not in COLOURS:
        recorded.fail(f"--color-by must be one of {', '.join(COLOURS)}, got {args.color_by!r}")
    for name in ("max_states", "size", "dpi", "page_megabytes"):
        if not getattr(args, name) > 0:
            recorded.fail(f"--{name.replace('_', '-')} must be > 0, got {getattr(args, name)}")
    for name in ("radius", "rings", "seed"):
        if getattr(args, name) < 0:
            recorded.fail(f"--{name} must be >= 0, got {getattr(args, name)}")
    for path in args.out:
        if path.suffix not in SUFFIXES:
            recorded.fail(f"--out must end in one of {', '.join(SUFFIXES)}, got {path}")
    begin = time.perf_counter()
    run = recorded.read(args.run)
    folder = args.run if args.run.is_dir() else args.run.parent
    outs = args.out or (folder / "graph.png", folder / "graph.html")
    is_page = [path.suffix == ".html" for path in outs]
    if args.color_by == "value" and run.tensors is None:
        recorded.fail(f"{args.run} has no network: require one for --color-by value")
    layout = lay_out(run, args.max_states, args.around, args.radius, args.seed)
    q = None
    if run.tensors is not None and (args.color_by == "value" or any(is_page)):
        q = run.q_values(layout.states)
    values = None if q is None else q.max(axis=1)
    title = args.title or run.name
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
    if args.rings and not all(is_page):
        outside = np.hypot(*layout.xy.T) > args.rings + 0.5
        print(f"beyond the edge of the picture: {outside.sum():,} of {len(outside) - 1:,} states")
    print(f"{', '.join(map(str, outs))}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
