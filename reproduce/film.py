"""The film of the README: a task, its graph as it grows, and what two backups make of it.

    python reproduce/film.py                            # docs/film.webp

One agent explores: half of its episodes go to what was never tried. Two tables of values learn from
the same batches of its transitions, 16 per step, one by one-step targets and one by graph's.
"""

import io
from pathlib import Path

import networkx
import numpy as np
import tyro
from folders import ROOT
from picture import collections, plt
from PIL import Image

import gb_dqn_minigrid as script
from gbcore import FrontierEpisodes, Replay, TransitionGraph, q_targets

GAMMA = 0.95
AGENT = script.OBJECT_TO_IDX["agent"]


def play(env_id, steps, frames, seed):
    """The graph of a run, its pairs of states in the order they were found, and its moments.

    Of a moment: the step, its picture uint8 [H, W, 3], the number of pairs, and the states' values
    float64 [num_nodes] by backup.
    """
    rng = np.random.default_rng(seed)
    env = script.Task(script.task_of(env_id), seed, "rgb_array")
    obs = env.reset()
    graph = TransitionGraph(env.num_actions, obs.shape, obs.dtype)
    replay, frontier = Replay(graph, steps), FrontierEpisodes(graph, 0.5)
    q = {name: np.zeros((steps + 2, env.num_actions)) for name in ("one-step", "graph")}
    shown = np.linspace(0, steps - 1, frames).astype(int)
    edges, moments, node, starts = {}, [], graph.node(obs), True
    for step in range(steps):
        action = frontier.act(node, rng, starts)
        if action is None:
            action = int(rng.integers(env.num_actions))
        obs, reward, terminated, truncated = env.step(action)
        next_node = graph.node(obs)
        replay.add(node, action, float(reward > 0), next_node, terminated)
        edges.setdefault((node, next_node))
        node, starts = next_node, terminated or truncated
        if starts:
            replay.end_episode()
            node = graph.node(env.reset())
        batch = replay.sample(16, rng)
        for name, depth, source in (("one-step", 1, "trajectory"), ("graph", 5, "graph")):
            subgraphs = replay.subgraphs(batch, source, depth)
            targets = q_targets(subgraphs, q[name][subgraphs.nodes], GAMMA)
            q[name][batch.nodes, batch.actions] = targets
        if step in shown:
            values = {name: q[name][: graph.num_nodes].max(axis=1) for name in q}
            moments.append((step + 1, env.render(), len(edges), values))
    return graph, list(edges), moments


def heat(graph, values):
    """The best value of a cell over the states with the agent there: [H, W], NaN where none was."""
    found = np.full(graph.obs_shape[:2], np.nan)
    at = (graph.observations[: len(values), :, :, 0] == AGENT).reshape(len(values), -1)
    np.fmax.at(found.reshape(-1), at.argmax(axis=1)[at.any(axis=1)], values[at.any(axis=1)])
    return found.T


def draw(moment, graph, edges, layout):
    """A picture, as an image of PIL."""
    step, grid, num_edges, values = moment
    figure, axes = plt.subplots(1, 4, figsize=(11, 3.1), dpi=80, layout="constrained")
    looks = {"cmap": "inferno", "vmin": 0, "vmax": 1}
    axes[0].imshow(grid)
    known = layout[np.array(edges[:num_edges])]
    axes[1].add_collection(collections.LineCollection(known, colors="0.75", linewidths=0.6))
    num_nodes = len(values["graph"])
    axes[1].scatter(*layout[:num_nodes].T, c=values["graph"], s=14, zorder=2, **looks)
    axes[1].set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), aspect="equal")
    for ax, of_states in zip(axes[2:], values.values(), strict=True):
        ax.imshow(heat(graph, of_states), **looks)
        ax.set_facecolor("0.85")
    names = (f"values by {name} targets" for name in values)
    titles = (f"step {step:,}", f"the graph: {num_nodes} states", *names)
    for ax, title in zip(axes, titles, strict=True):
        ax.set(xticks=[], yticks=[], title=title)
    file = io.BytesIO()
    figure.savefig(file)
    plt.close(figure)
    return Image.open(file).convert("RGB")


def main(
    env_id: str = "SimpleCrossingS9N2",
    steps: int = 1_000,
    frames: int = 100,
    seed: int = 5,
    out: Path = ROOT / "docs" / "film.webp",
):
    """Write the film of so many environment steps."""
    graph, edges, moments = play(env_id, steps, frames, seed)
    positions = networkx.kamada_kawai_layout(networkx.Graph(edges))
    layout = np.array([positions[node] for node in range(graph.num_nodes)])
    layout /= np.abs(layout).max()
    images = [draw(moment, graph, edges, layout) for moment in moments]
    lengths = [90] * (len(images) - 1) + [3_000]
    images[0].save(
        out, save_all=True, append_images=images[1:], duration=lengths, loop=0, quality=70
    )
    print(f"{out}: {len(images)} pictures, {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
