"""Time `expand` and the targets of a batch of 32 on four graphs, on one core: a table.

python benchmark/timings.py
"""

import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from gbtools import play
from gbtools.output import markdown

from gbcore import categorical_targets, q_targets

BATCH = 32


def seconds(function, *arguments):
    """The seconds of a call, and its result."""
    begin = time.perf_counter()
    found = function(*arguments)
    return time.perf_counter() - begin, found


def targets(transitions: int = 20_000, batches: int = 1_000):
    """A row per graph, Atari's of 51 atoms."""
    rng, rows = np.random.default_rng(1), []
    for suite, task, depth, breadth in (
        ("minigrid", "MiniGrid-Empty-8x8-v0", 5, 50),
        ("minigrid", "MiniGrid-Empty-8x8-v0", 5, 0),
        ("minatar", "freeway", 5, 20),
        ("minatar", "breakout", 5, 20),
        ("atari", "freeway", 10, 10),
    ):
        stream = play.stream(suite, task, np.random.default_rng(0))
        run = play.record_by_keys(*stream, transitions, task, {"": lambda obs, action: obs})[""]
        graph, times = run.graph, []
        leaf_q = rng.random((graph.num_ids, graph.num_actions), np.float32)
        selector_q, support = torch.rand(leaf_q.shape), torch.linspace(-10, 10, 51)
        leaf_pmf = torch.rand(*leaf_q.shape, 51).softmax(-1)
        for _ in range(50 + batches):
            batch = rng.integers(len(run.replay["node"]), size=BATCH)
            roots = run.replay["node"][batch], run.replay["action"][batch]
            expand, sub = seconds(graph.expand, *roots, depth, breadth, rng)
            # To read the leaves is the network's part, and not timed.
            if suite == "atari":
                arguments = leaf_pmf[sub.nodes], support, 0.99, "double", selector_q[sub.nodes]
                backup, _ = seconds(categorical_targets, sub, *arguments)
            else:
                backup, _ = seconds(q_targets, sub, leaf_q[sub.nodes], 0.99)
            times.append((expand, backup, len(sub.outcome_pair)))
        expand, backup, sizes = np.array(times[50:]).T
        low, median, high = 1e3 * np.percentile(expand + backup, [25, 50, 75])
        about = [f"{suite} {task}", f"{graph.num_nodes:,}", str(depth), str(breadth or "all")]
        spread, share = f"({low:.3f} to {high:.3f})", expand.sum() / (expand + backup).sum()
        rows.append([*about, f"{sizes.mean():.0f}", f"**{median:.3f}** {spread}", f"{share:.0%}"])
    names = ("graph", "states", "depth", "breadth", "transitions", "ms", "of it expand")
    print(markdown(names, rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one core\n")
    tyro.cli(targets, description=__doc__)
