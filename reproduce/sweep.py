"""Run a grid of runs on this machine: suites x backups x variants x seeds.

    pip install -r requirements-draw.txt
    python reproduce/sweep.py --suites minigrid --seeds 1 2 3 4 5
    python reproduce/sweep.py --suites minatar --episode-seeds fresh fixed --dry-run
    python reproduce/sweep.py --suites minigrid-hard --backups graph \\
        --variants default exploration=frontier

Each run is a command of its own, in a folder of its own under --run-dir; --dry-run prints them, for
any other scheduler. A run that is finished there, or has a row in --results-dir, is not run again.
Stop the sweep as you like: runs under way write their checkpoints, and the same command goes on.
"""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro
from folders import ROOT
from gbtools.play import plain
from gbtools.runs import flags_in, read_result, run_folders, words_of
from suites import KEY, SUITES, TABLE, collect, read_table, script_of, variant_of

from gbcore.run import NonNegative, fail, number, one_line_errors
from gbcore.run.flags import check_flags

UNDER_WAY = set()  # processes


@dataclass
class Args:
    suites: tuple[Literal[tuple(SUITES)], ...] = ()  # what to run
    tasks: tuple[str, ...] = ()  # only these of the suites
    backups: tuple[str, ...] = ("graph", "tree", "n-step", "one-step")  # the bootstrap targets
    variants: tuple[str, ...] = ("default",)
    """settings that are run besides each other, as in: default breadth=0 exploration=frontier"""
    episode_seeds: tuple[Literal["fresh", "fixed"], ...] = ("fresh",)  # MinAtar's
    seeds: tuple[Annotated[int, number(int, 0, 2**30 - 1)], ...] = (1, 2, 3, 4, 5)
    """seeds; the first one of all tasks comes first"""
    overrides: tuple[str, ...] = ()
    """flags of the scripts for every run, as in: depth=3 learning_rate=1e-4 cuda=true"""
    run_dir: Path = Path("runs")  # where runs leave their folders
    results_dir: Path | None = None
    """where their rows are collected; the folder results of --run-dir by default"""
    workers: NonNegative = 0  # runs at a time; 0 = as many as this machine's processors allow
    threads: Annotated[int, number(int, 1, 1024)] = 1  # CPU threads of each run
    dry_run: bool = False  # print the commands of what is not finished, and run nothing
    collect_only: bool = False  # collect the rows of finished runs of --run-dir, and run nothing


class Run(NamedTuple):
    key: tuple  # values of KEY
    command: tuple  # of a new run, but for the interpreter
    folder: Path  # the run's own folder is in it


def make_grid(args):
    """All runs that were asked for, the first seed of everything first."""
    asked = {*map(plain, args.tasks)}
    for seed, suite in itertools.product(args.seeds, args.suites):
        module, (script, tasks, total_timesteps) = script_of(suite), SUITES[suite]
        has_seeding = hasattr(module.Args, "episode_seed")
        for task, episode_seed, backup, variant in itertools.product(
            [name for name in tasks if not asked or plain(name) in asked],
            args.episode_seeds if has_seeding else ("",), args.backups, args.variants,
        ):  # fmt: skip
            flags = {"env_id": task, "backup": backup, "seed": seed, "threads": args.threads}
            flags |= {"total_timesteps": total_timesteps, "checkpoint_frequency": 10_000}
            flags |= {"save_model": False} | ({"episode_seed": episode_seed} if has_seeding else {})
            flags |= flags_in(" ".join(args.overrides)) | flags_in(variant)
            words = words_of(flags)
            check_flags(known := tyro.cli(module.Args, args=words))
            key = (
                suite, module.task_of(known.env_id), known.backup, variant_of(suite, vars(known)),
                getattr(known, "episode_seed", ""), known.seed,
            )  # fmt: skip
            name = "__".join(re.sub("[ /]", "_", str(part)) for part in key if part != "")
            folder = args.run_dir.resolve() / name
            command = f"{script.replace('.', '/')}.py", *words, "--run-dir", str(folder)
            yield Run(key, command, folder)


def execute(run):
    """Run the script to its end, from its newest checkpoint if there is one. Returns the status."""
    run.folder.mkdir(parents=True, exist_ok=True)
    saved = sorted(run.folder.glob("*/checkpoint.zip"), key=lambda path: path.stat().st_mtime)
    words = (run.command[0], "--resume", str(saved[-1].parent)) if saved else run.command
    with (run.folder / "log.txt").open("a") as log:
        print("$", shlex.join(words), file=log, flush=True)
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=log, stderr=log)
        UNDER_WAY.add(process)
        status = process.wait()
    UNDER_WAY.remove(process)
    if status == 0:
        for path in run.folder.glob("*/checkpoint.zip"):
            path.unlink()
    return status


def execute_all(runs, workers):
    """How many of the runs failed."""
    failed = 0
    with ThreadPoolExecutor(workers) as pool:
        try:
            for i, (run, status) in enumerate(zip(runs, pool.map(execute, runs), strict=True), 1):
                failed += status != 0
                message = f"status {status}, see {run.folder / 'log.txt'}" if status else "done"
                print(f"{i} of {len(runs)}: {run.folder.name}: {message}", flush=True)
        except KeyboardInterrupt:  # which leaves no run in the queue
            for process in UNDER_WAY.copy():
                process.terminate()  # it writes its checkpoint
            raise
    return failed


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    if not (args.suites or args.collect_only):
        fail(f"--suites must name one or more of {', '.join(SUITES)}")
    known = [name for suite in args.suites for name in SUITES[suite].tasks]
    for task in args.tasks:
        if plain(task) not in map(plain, known):
            fail(f"--tasks {task!r} is none of {', '.join(known)}")
    results = args.results_dir or args.run_dir / "results"
    has_table = (results / TABLE).exists()
    has_row = {*read_table(results)[KEY].itertuples(index=False, name=None)} if has_table else ()
    runs = {} if args.collect_only else {run.key: run for run in make_grid(args)}
    todo = [
        run
        for key, run in runs.items()
        if key not in has_row and not any(map(read_result, run_folders(run.folder)))
    ]
    if args.dry_run:
        for run in todo:
            print(shlex.join(["python", *run.command]))
        return
    print(f"{len(todo)} of {len(runs)} runs are left", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workers = args.workers or max(1, len(os.sched_getaffinity(0)) // args.threads)
    try:
        failed = execute_all(todo, workers)
    finally:
        print(f"{collect(args.run_dir, results)} rows added to {results / TABLE}")
    command = ["python", "reproduce/report.py", "--results-dir", str(results)]
    print(f"scores and curves: {shlex.join(command)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
