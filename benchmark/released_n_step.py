"""n-step as the authors released it: does that make the paper's scores?

    python benchmark/released_n_step.py --parallel 2

In the code that they released for MiniGrid and MinAtar (gridworld/core/backup.py, n_step_Q_backup)
the target is the paper's, the return from the sampled pair on; but the value that is moved towards
it is that of the *last* pair that the return reads, which its loop leaves behind. Here the scripts
run with this one change, under the report's protocol. Runs whose rows --out has are not run again.
"""

import importlib
import itertools
import multiprocessing
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
from output import fail, read_rows, write_rows
from recorded import task_name
from run_records import ROOT, SUITES, measurements
from tether import end_with

sys.path.insert(0, str(ROOT))

OUT = ROOT / "benchmark" / "results" / "released_n_step.csv"
COLUMNS = ("suite", "episode_seed", "task", "seed", "score", "first_reward_step", "commit")


@dataclass
class Args:
    suites: tuple[str, ...] = ("minatar", "minigrid")
    """of them all tasks; MinAtar's with fixed episode seeds, as in the authors' code"""
    tasks: tuple[str, ...] = ()
    """these tasks only"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """runs of each"""
    parallel: int = 1
    """runs at a time"""
    out: Path = OUT
    """CSV file with a row per run"""


def last_rows(rows, depth, cut):
    """Row of the last transition that an n-step target from each of the rows reads, int64 [B].

    cut: bool, True where a trajectory ends.
    """
    last = rows.copy()
    for _ in range(depth - 1):
        last += ~cut[last]
    return last


def move_last_pair(script):
    """Let n-step move the value of the last pair in place of the sampled one, in this process."""
    update = script.Learner.update

    def update_last(self, batch, subgraphs):
        last = last_rows(batch.rows, self.args.depth, self.replay.cut)
        nodes, actions = self.replay.node[last], self.replay.action[last]
        return update(self, script.Batch(last, nodes, actions), subgraphs)

    script.Learner.update = update_last


def train(suite, task, seed, folder):
    """A run of the suite's script in a process of its own."""
    end_with(multiprocessing.parent_process().pid)
    script = importlib.import_module(SUITES[suite].script)
    move_last_pair(script)
    sys.argv = [
        f"{SUITES[suite].script}.py", "--env-id", task, "--seed", str(seed), "--backup", "n-step",
        "--total-timesteps", str(SUITES[suite].total_timesteps), "--run-dir", folder,
        "--no-save-model", "--threads", "1", "--no-cuda",
        *(["--episode-seed", "fixed"] if suite == "minatar" else []),
    ]  # fmt: skip
    script.main()


def measure(run):
    """The row of a new run: a suite, a task and a seed."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=train, args=(*run, folder))
        process.start()
        process.join()
        if process.exitcode:
            fail(f"{run}: exit status {process.exitcode}")
        measured, _ = measurements(next(Path(folder).iterdir()))
    about = key(run)
    return about | {name: measured[name] for name in COLUMNS if name not in about}


def key(run):
    """The columns that say which run a row is of."""
    suite, task, seed = run
    return {
        "suite": suite,
        "episode_seed": "fixed" if suite == "minatar" else "",
        "task": task_name(SUITES[suite].script, task),
        "seed": str(seed),
    }


def main():
    args = tyro.cli(Args)
    unknown = set(args.suites) - {"minigrid", "minatar"}
    if unknown or args.parallel < 1 or not args.seeds:
        fail("Require --suites minigrid or minatar, at least one of --seeds and --parallel >= 1")
    rows = read_rows(args.out) if args.out.exists() else []
    chosen = [
        run for seed in args.seeds for suite in args.suites
        for run in itertools.product([suite], args.tasks or SUITES[suite].tasks, [seed])
    ]  # fmt: skip
    missing = [run for run in chosen if not any(key(run).items() <= row.items() for row in rows)]
    with ThreadPoolExecutor(args.parallel) as pool:
        for row in pool.map(measure, missing):
            rows.append(row)
            write_rows(args.out, COLUMNS, rows)
            print(f"{row['task']}, seed {row['seed']}: {row['score']:.3g}", flush=True)


if __name__ == "__main__":
    main()
