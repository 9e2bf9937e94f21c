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

Copies of the scripts run with these changes, all else under the report's protocol. (A time limit of
MinAtar is a termination there.) Runs whose rows --out has are not run again. Where rows say
`paper`, the depth alone was changed: a sweep with --overrides depth=10 does that.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import numpy as np
import tyro
from output import fail, read_rows, write_rows
from run_records import RESULTS, ROOT, SUITES, measurements, run_folders, script_of

COLUMNS = ("suite", "episode_seed", "task", "depth", "update", "seed", "score", "first_reward_step",
           "commit")  # fmt: skip
# What a copy of a script has in the place of a line of its own.
CHANGES = {
    "import copy\n": "import copy\nfrom released_n_step import released_update\n",
    "        targets = torch.from_numpy(self.targets(batch, rng)).to(self.device)\n": (
        "        batch, targets = released_update(self, batch, __file__)\n"
        "        targets = torch.from_numpy(targets).to(self.device)\n"
    ),
}


@dataclass
class Args:
    suites: tuple[Literal["minatar", "minigrid"], ...] = ("minatar", "minigrid")
    """of them all tasks; MinAtar's with fixed episode seeds, as in the authors' code"""
    tasks: tuple[str, ...] = ()
    """these tasks only"""
    depth: int = 5
    """steps of a return; the paper has 5, the released command for MiniGrid 10"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """runs of each"""
    parallel: int = 1
    """runs at a time"""
    out: Path = RESULTS / "released_n_step.csv"
    """CSV file with a row per run"""


class Trajectories(NamedTuple):
    """What a return reads of a replay, row by row in time order."""

    reward: np.ndarray  # float64 [N]
    terminal: np.ndarray  # bool [N], nothing follows
    time_limit: np.ndarray  # bool [N], another episode follows
    newest: int  # the last row


def trajectories_of(replay, time_limit_is_terminal):
    """`Trajectories` of a replay that has not forgotten any row."""
    newest, terminal = replay.size - 1, replay.terminated
    time_limit = replay.cut & ~replay.terminated
    time_limit[newest:] = False
    if time_limit_is_terminal:
        terminal, time_limit = terminal | time_limit, np.zeros_like(time_limit)
    return Trajectories(replay.reward, terminal, time_limit, newest)


def released_returns(read, rows, depth, gamma):
    """Discounted rewards float64 [B] from each row on, and the last row int64 [B] of each."""
    returns, last = np.zeros(len(rows)), rows.copy()
    for i in range(len(rows)):
        for step in range(depth):
            row = last[i] = rows[i] + step
            returns[i] += gamma**step * read.reward[row]
            if read.terminal[row] or row == read.newest:
                break
    return returns, last


def released_update(learner, batch, script):
    """The pairs whose values are moved, and where to, float32 [B]."""
    args, replay, values_of = learner.args, learner.replay, learner.leaves.values
    read = trajectories_of(replay, Path(script).stem == SUITES["minatar"].script)
    returns, last = released_returns(read, batch.rows, args.depth, args.gamma)
    values = values_of(replay.next_node[last]).max(axis=1)
    if read.time_limit[last].any():
        highest = values_of(np.arange(learner.graph.num_ids)).max()
        values[read.time_limit[last]] = max(highest, 0.0)  # rows without a state are 0
    values[read.terminal[last]] = 0.0
    targets = (returns + args.gamma**args.depth * values).astype(np.float32)
    return replay.batch_of(last), targets


def changed_script(script):
    """Text of the copy of a script that updates as released."""
    text = (ROOT / f"{script}.py").read_text()
    for line, other in CHANGES.items():
        if text.count(line) != 1:
            fail(f"{script}.py has not one line {line.strip()!r}")
        text = text.replace(line, other)
    return text


def measure(suite, task, depth, seed):
    """The row of a new run."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / f"{SUITES[suite].script}.py"
        copied.write_text(changed_script(copied.stem))
        words = [
            "--env-id", task, "--seed", seed, "--backup", "n-step", "--depth", depth,
            "--run-dir", f"{folder}/runs", "--total-timesteps", SUITES[suite].total_timesteps,
            "--no-save-model", "--threads", 1, "--no-cuda",
            *(["--episode-seed", "fixed"] if suite == "minatar" else []),
        ]  # fmt: skip
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tools", ROOT / "experiments")))
        status = subprocess.run(
            [sys.executable, copied, *map(str, words)], env=os.environ | {"PYTHONPATH": paths},
            check=False, stdout=subprocess.DEVNULL,
        ).returncode  # fmt: skip
        if status:
            fail(f"{task}, seed {seed}: exit status {status}")
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
        for task in args.tasks or SUITES[suite].tasks
    ]  # fmt: skip
    missing = [run for run in chosen if not any(key(*run).items() <= row.items() for row in rows)]
    with ThreadPoolExecutor(args.parallel) as pool:
        for row in pool.map(lambda run: measure(*run), missing):
            rows.append(row)
            write_rows(args.out, COLUMNS, rows)
            print(f"{row['task']}, seed {row['seed']}: {row['score']:.3g}", flush=True)


if __name__ == "__main__":
    main()
