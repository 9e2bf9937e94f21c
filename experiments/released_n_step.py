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

Here the scripts run with these changes, all else under the report's protocol. (A time limit of
MinAtar is a termination there.) Runs whose rows --out has are not run again.
"""

import importlib
import multiprocessing
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
from recorded import load_script
from run_records import ROOT, SUITES, measurements
from tether import end_with

OUT = ROOT / "results" / "released_n_step.csv"
COLUMNS = (
    "suite", "episode_seed", "task", "depth", "update", "seed", "score", "first_reward_step",
    "commit",
)  # fmt: skip


class Run(NamedTuple):
    suite: str
    task: str
    depth: int
    update: str
    seed: int


@dataclass
class Args:
    suites: tuple[str, ...] = ("minatar", "minigrid")
    """of them all tasks; MinAtar's with fixed episode seeds, as in the authors' code"""
    tasks: tuple[str, ...] = ()
    """these tasks only"""
    depth: int = 5
    """steps of a return; the paper has 5, the released command for MiniGrid 10"""
    update: Literal["released", "paper"] = "released"
    """whose; the paper's tells what the depth alone does"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """runs of each"""
    parallel: int = 1
    """runs at a time"""
    out: Path = OUT
    """CSV file with a row per run"""


class Trajectories(NamedTuple):
    """What a return reads of a replay, row by row in time order."""

    reward: np.ndarray  # float64 [N]
    terminal: np.ndarray  # bool [N], nothing follows
    time_limit: np.ndarray  # bool [N], another episode follows
    newest: int  # the last row


def released_returns(replay, rows, depth, gamma):
    """Discounted rewards float64 [B] from each row on, and the last row int64 [B] of each."""
    returns, last = np.zeros(len(rows)), rows.copy()
    for i in range(len(rows)):
        for step in range(depth):
            row = last[i] = rows[i] + step
            returns[i] += gamma**step * replay.reward[row]
            if replay.terminal[row] or row == replay.newest:
                break
    return returns, last


def trajectories_of(replay, time_limit_is_terminal):
    """`Trajectories` of a script's replay that has not forgotten any row."""
    newest = replay.size - 1
    time_limit = replay.cut & ~replay.terminated
    time_limit[newest:] = False
    terminal = replay.terminated
    if time_limit_is_terminal:
        terminal, time_limit = terminal | time_limit, np.zeros_like(time_limit)
    return Trajectories(replay.reward, terminal, time_limit, newest)


def take_released_update(script):
    """Let n-step be what was released, in this process."""
    update = script.Learner.update

    def released_update(self, batch, subgraphs):
        args, replay = self.args, self.replay
        read = trajectories_of(replay, time_limit_is_terminal=script.__name__ == "gb_dqn_minatar")
        returns, last = released_returns(read, batch.rows, args.depth, args.gamma)
        values = self.leaves.values(replay.next_node[last]).max(axis=1)
        if read.time_limit[last].any():
            highest = self.leaves.values(np.arange(self.graph.num_ids)).max()
            values[read.time_limit[last]] = max(highest, 0.0)  # rows without a state are 0
        values[read.terminal[last]] = 0.0
        targets = (returns + args.gamma**args.depth * values).astype(np.float32)
        self.targets = lambda *_: targets
        moved = script.Batch(last, replay.node[last], replay.action[last])
        return update(self, moved, subgraphs)

    script.Learner.update = released_update


def train(run, folder):
    """A run of the suite's script in a process of its own."""
    end_with(multiprocessing.parent_process().pid)
    script = importlib.import_module(SUITES[run.suite].script)
    if run.update == "released":
        take_released_update(script)
    sys.argv = [
        f"{SUITES[run.suite].script}.py", "--env-id", run.task, "--seed", str(run.seed),
        "--backup", "n-step", "--depth", str(run.depth), "--run-dir", folder,
        "--total-timesteps", str(SUITES[run.suite].total_timesteps),
        "--no-save-model", "--threads", "1", "--no-cuda",
        *(["--episode-seed", "fixed"] if run.suite == "minatar" else []),
    ]  # fmt: skip
    script.main()


def measure(run):
    """The row of a new run."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=train, args=(run, folder))
        process.start()
        process.join()
        if process.exitcode:
            fail(f"{run}: exit status {process.exitcode}")
        measured, _ = measurements(next(Path(folder).iterdir()))
    about = key(run)
    return about | {name: measured[name] for name in COLUMNS if name not in about}


def key(run):
    """The columns that say which run a row is of, as a CSV file has them."""
    about = run._asdict() | {
        "task": load_script(SUITES[run.suite].script).task_of(run.task),
        "episode_seed": "fixed" if run.suite == "minatar" else "",
    }
    return {name: str(value) for name, value in about.items()}


def main():
    args = tyro.cli(Args)
    unknown = set(args.suites) - {"minigrid", "minatar"}
    if unknown or min(args.parallel, args.depth) < 1 or not args.seeds:
        fail("Require --suites minigrid or minatar, --seeds, --parallel >= 1 and --depth >= 1")
    rows = read_rows(args.out) if args.out.exists() else []
    chosen = [
        Run(suite, task, args.depth, args.update, seed) for seed in args.seeds
        for suite in args.suites for task in args.tasks or SUITES[suite].tasks
    ]  # fmt: skip
    missing = [run for run in chosen if not any(key(run).items() <= row.items() for row in rows)]
    with ThreadPoolExecutor(args.parallel) as pool:
        for row in pool.map(measure, missing):
            rows.append(row)
            write_rows(args.out, COLUMNS, rows)
            print(f"{row['task']}, seed {row['seed']}: {row['score']:.3g}", flush=True)


if __name__ == "__main__":
    main()
