"""n-step as the authors released it: does that make the paper's scores?

    python experiments/released_n_step.py --parallel 2
    python experiments/released_n_step.py --suites minigrid --depth 10  # the released command's

Three things differ from the paper in the n-step backup that they released for MiniGrid and MinAtar
(n_step_Q_backup of gridworld/core/backup.py, and the replay that it reads):

- The value that is moved towards the return is that of the *last* pair that it reads, which its
  loop leaves behind, and not that of the sampled one.
- In MiniGrid a return goes on across a time limit, with the first steps of the next episode.
- A return that ends at one bootstraps from the highest value of any state: the state after it is
  blank, has no index, and NumPy takes an index of None for the whole table.

The scripts run with these changes in their learner, all else under the report's protocol. (A time
limit of MinAtar is a termination there.) Runs whose rows --out has are not run again. Where rows
say `paper`, the depth alone was changed: a sweep with --overrides depth=10 does that.
"""

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import numpy as np
import tyro
from output import fail, read_rows, write_rows
from run_records import RESULTS, SUITES, measurements, run_folders, script_of

COLUMNS = ("suite", "episode_seed", "task", "depth", "update", "seed", "score", "first_reward_step",
           "commit")  # fmt: skip


@dataclass
class Args:
    suites: tuple[Literal["minatar", "minigrid"], ...] = ("minatar", "minigrid")
    """of them all tasks; MinAtar's with fixed episode seeds, as in the authors' code"""
    depth: int = 5
    """steps of a return; the paper has 5, the released command for MiniGrid 10"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """runs of each"""
    parallel: int = 1
    """runs at a time"""
    out: Path = RESULTS / "released_n_step.csv"
    """CSV file with a row per run"""


def ends_of(replay, time_limit_is_terminal):
    """Where nothing follows, and where another episode does: two bool [N]. No row was forgotten."""
    time_limit = replay.cut & ~replay.terminated
    time_limit[replay.size - 1 :] = False
    if time_limit_is_terminal:
        return replay.terminated | time_limit, np.zeros_like(time_limit)
    return replay.terminated, time_limit


def released_returns(replay, terminal, rows, depth, gamma):
    """Discounted rewards float64 [B] from each row on, and the last row int64 [B] of each."""
    returns, last, goes_on = np.zeros(len(rows)), rows, np.ones(len(rows), np.bool_)
    for step in range(depth):
        last = np.where(goes_on, rows + step, last)
        returns += goes_on * gamma**step * replay.reward[last]
        goes_on &= ~terminal[last] & (last != replay.size - 1)
    return returns, last


def released_update(learner, batch, time_limit_is_terminal):
    """The pairs whose values are moved, and where to, float32 [B]."""
    args, replay, values_of = learner.args, learner.replay, learner.leaves.values
    terminal, time_limit = ends_of(replay, time_limit_is_terminal)
    returns, last = released_returns(replay, terminal, batch.rows, args.depth, args.gamma)
    values = values_of(replay.next_node[last]).max(axis=1)
    if time_limit[last].any():
        highest = values_of(np.arange(learner.graph.num_ids)).max()
        values[time_limit[last]] = max(highest, 0.0)  # rows without a state are 0
    values[terminal[last]] = 0.0
    targets = (returns + args.gamma**args.depth * values).astype(np.float32)
    return replay.batch_of(last), targets


def measure(suite, task, depth, seed):
    """The row of a new run."""
    script = script_of(suite)

    class Learner(script.Learner):
        def update(self, batch, rng):
            batch, self.released = released_update(self, batch, suite == "minatar")
            return super().update(batch, rng)

        def targets(self, batch, rng):
            return self.released

    with tempfile.TemporaryDirectory() as folder:
        words = [
            script.__file__, "--env-id", task, "--seed", seed, "--backup", "n-step",
            "--depth", depth, "--total-timesteps", SUITES[suite].total_timesteps, "--run-dir",
            folder, "--no-save-model", "--threads", 1, "--no-cuda",
            *(["--episode-seed", "fixed"] if suite == "minatar" else []),
        ]  # fmt: skip
        with (
            patch.object(script, "Learner", Learner),
            patch.object(sys, "argv", [str(word) for word in words]),
        ):
            script.main()
        measured, _ = measurements(run_folders(folder)[0])
    about = key(suite, task, depth, seed)
    return about | {name: measured[name] for name in COLUMNS if name not in about}


def key(suite, task, depth, seed):
    """The columns that say which run a row is of, as a CSV file has them."""
    return {
        "suite": suite, "task": script_of(suite).task_of(task), "depth": str(depth),
        "seed": str(seed), "update": "released",
        "episode_seed": "fixed" if suite == "minatar" else "",
    }  # fmt: skip


def main():
    args = tyro.cli(Args)
    if min(args.parallel, args.depth, len(args.seeds)) < 1:
        fail("Require --seeds, --parallel >= 1 and --depth >= 1")
    rows = read_rows(args.out) if args.out.exists() else []
    chosen = [
        (suite, task, args.depth, seed) for seed in args.seeds for suite in args.suites
        for task in SUITES[suite].tasks
    ]  # fmt: skip
    missing = [run for run in chosen if not any(key(*run).items() <= row.items() for row in rows)]
    with ProcessPoolExecutor(args.parallel) as pool:
        for running in [pool.submit(measure, *run) for run in missing]:
            row = running.result()
            rows.append(row)
            write_rows(args.out, COLUMNS, rows)
            print(f"{row['task']}, seed {row['seed']}: {row['score']:.3g}", flush=True)


if __name__ == "__main__":
    main()
