"""Run a grid of runs on Ray: suites x backups x variants x seeds, on this machine or a cluster.

    pip install -r requirements-sweep.txt
    python reproduce/sweep.py --suites minigrid --seeds 1 2 3 4 5
    python reproduce/sweep.py --suites minatar --episode-seeds fresh fixed --dry-run
    python reproduce/sweep.py --suites minigrid-hard --backups graph \\
        --variants default exploration=frontier
    python reproduce/sweep.py --suites atari100k --address auto --gpus-per-run 0.25
    python reproduce/sweep.py --collect-only --run-dir runs

Each run is a process of the script itself, in a folder of its own under --run-dir. A run that is
finished there, or has a row in --results-dir, is not run again. A run that crashed or whose worker
was killed is tried again from its checkpoint. Stop the sweep as you like, and start it again with
the same command: it goes on from the checkpoints. On a cluster, --run-dir must be on a file system
that all machines share, and this repository at the same path on each of them.
"""

import fcntl
import functools
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import run_records
from folders import ROOT
from gbtools.output import arguments, fail, lasting_output
from gbtools.play import plain
from gbtools.runs import words_of
from run_records import SUITES, Key, Records, flags_of, key_of

from gbcore.run import Amount, Count
from gbcore.run.flags import check_flags, read_flags

LOG = "log.txt"  # of a run: what the script printed
RETRIES = 2  # of a run that fails


@dataclass
class Args:
    suites: tuple[Literal[tuple(SUITES)], ...] = ()
    """what to run; --collect-only: all by default"""
    tasks: tuple[str, ...] = ()  # only these of the suites
    backups: tuple[str, ...] = ("graph", "tree", "n-step", "one-step")
    """the bootstrap targets: what --backup of the suites' scripts takes"""
    variants: tuple[str, ...] = ("default",)
    """settings that are run besides each other, as in: default breadth=0 exploration=frontier"""
    episode_seeds: tuple[Literal["fresh", "fixed"], ...] = ("fresh",)  # MinAtar's
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds; the first one of all tasks comes first"""
    overrides: tuple[str, ...] = ()
    """flags of the scripts for every run, as in: depth=3 learning_rate=1e-4"""

    run_dir: Path = Path("runs")  # where runs leave their folders
    results_dir: Path | None = None
    """where their rows are collected, as CSV; the folder results of --run-dir by default"""
    checkpoint_frequency: Count = 10_000  # steps between checkpoints

    workers: Amount = 0  # runs at a time on this machine; 0 = as many as its processors allow
    threads: Annotated[int, (1, 1024)] = 1  # CPU threads of each run
    gpus_per_run: Annotated[float, (0, 1024)] = 0.0  # GPUs of each run, or a part of one
    address: str | None = None
    """a Ray cluster to run on, as in auto or 10.0.0.1:6379; none = this machine"""

    dry_run: bool = False
    """print the commands of what is not finished, and run nothing (without Ray)"""
    collect_only: bool = False
    """collect the rows of finished runs of --run-dir, and run nothing (without Ray)"""


class Run(NamedTuple):
    key: Key
    command: tuple  # of a new run; without --run-dir
    free: tuple  # words of it that a resumed run takes, too
    folder: Path  # the run's own folder is in it
    total_timesteps: int


def check_args(args):
    """Refuse what cannot run, before anything is written."""
    if not (args.suites or args.collect_only):
        fail(f"--suites must name one or more of {', '.join(SUITES)}")
    if not (args.backups and args.variants and args.seeds):
        fail("Require one or more --backups, --variants and --seeds")
    for seed in args.seeds:
        if not 0 <= seed < 2**30:
            fail(f"--seeds must be at least 0 and below 2**30, got {seed}")
    for suite, backup in itertools.product(args.suites, args.backups):
        if backup not in (known := run_records.backups_of(suite)):
            fail(f"--backups {backup!r} is none that {suite} has: {', '.join(known)}")
    known = [name for suite in args.suites for name in SUITES[suite].tasks]
    for task in args.tasks if args.suites else ():
        if plain(task) not in map(plain, known):
            fail(f"--tasks {task!r} is none of {', '.join(known)}")
    if args.collect_only and not args.run_dir.is_dir():
        fail(f"--run-dir {str(args.run_dir)!r} is no folder")


def make_grid(args):
    """Key -> Run of all that was asked for, the first seed of everything first."""
    grid = {}
    for seed, suite in itertools.product(args.seeds, args.suites):
        for task, flags in itertools.product(chosen_tasks(args, suite), settings(args, suite)):
            run = make_run(args, suite, {"env_id": task, "seed": seed} | flags)
            grid.setdefault(run.key, run)
    return grid


def chosen_tasks(args, suite):
    """The suite's tasks, or those of them that --tasks names, whatever case and hyphens."""
    asked = [*map(plain, args.tasks)]
    return [name for name in SUITES[suite].tasks if not asked or plain(name) in asked]


def settings(args, suite):
    """Flags of every combination of episode seed, backup and variant."""
    seeds = args.episode_seeds if "episode_seed" in flags_of(suite) else ()
    seedings = [{"episode_seed": seed} for seed in seeds] or [{}]
    for seeding, backup, variant in itertools.product(seedings, args.backups, args.variants):
        words = (*args.overrides, *(() if variant == "default" else variant.split()))
        changed = overrides(suite, backup, words, on_gpu=args.gpus_per_run > 0)
        yield seeding | changed | {"backup": backup}


# The sweep has flags of its own for them, or knows best.
OF_THE_SWEEP = (
    "env_id seed backup run_dir resume threads cuda checkpoint_frequency save_model".split()
)


@functools.cache
def overrides(suite, backup, words, on_gpu):
    """Flags given as name=value, in the script's types and ranges, and fit for the backup."""
    given = {name.replace("-", "_"): value for name, _, value in (w.partition("=") for w in words)}
    for name, value in given.items():
        if not value:
            fail(f"Require name=value, got {name}")
        if name in OF_THE_SWEEP:
            fail(f"{name} is no override: the sweep chooses it (--help)")
    flags_class, normal = run_records.script_of(suite).Args, flags_of(suite, backup=backup)
    default = flags_class(**normal | {"cuda": normal["cuda"] and on_gpu})
    args = read_flags(
        flags_class, [*words_of(given, flags_class), "--backup", backup], default=default
    )
    check_flags(args)
    return {name: getattr(args, name) for name in given}


def make_run(args, suite, flags):
    key = key_of(suite, flags)
    steps = flags.get("total_timesteps", SUITES[suite].total_timesteps)
    how = {name: getattr(args, name) for name in ("checkpoint_frequency", "threads")}
    free = tuple(words_of(how | {"cuda": args.gpus_per_run > 0}))
    words = words_of(flags | {"total_timesteps": steps, "save_model": False})
    name = "__".join(str(part).replace(" ", "_").replace("/", "_") for part in key if part != "")
    command = (f"{SUITES[suite].script}.py", *words, *free)
    return Run(key, command, free, args.run_dir.resolve() / name, steps)


def execute(run):
    """Run the script to its end, from the newest checkpoint if there is one. In a Ray worker.

    Returns what the run measured, and its curve. All that it calls is of `run_records`, whose
    import makes tools/ importable in the worker.
    """
    run.folder.mkdir(parents=True, exist_ok=True)

    def found():
        return run_records.finished_runs(run.folder, [run.key.suite], [run.key]).get(run.key)

    with (run.folder / "lock").open("w") as lock, (run.folder / LOG).open("a+") as log:
        # The process inherits the lock. One that outlived its worker still writes a checkpoint.
        fcntl.flock(lock, fcntl.LOCK_EX)
        commands = [(*run.command, "--run-dir", str(run.folder))]
        saved = sorted(run.folder.glob("*/checkpoint.npz"), key=lambda path: path.stat().st_mtime)
        if saved:
            commands.insert(0, (run.command[0], "--resume", str(saved[-1].parent), *run.free))
        for words in [] if found() else commands:
            print("$", shlex.join(words), file=log, flush=True)
            # Not subprocess.run: where the worker is stopped, that kills the run at once.
            status = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", sys.executable, *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            ).wait()
            if status != 2:  # else the checkpoint cannot be used
                break
        if (measured := found()) is None:
            log.seek(0)
            raise RuntimeError(f"status {status}: {log.read().strip().splitlines()[-1]}")
        for path in run.folder.glob("*/checkpoint.npz"):
            path.unlink()
        return measured


def first_line(error):
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def start_ray(args):
    """The ray module, connected."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")  # runs save first
    try:
        import ray
    except ImportError:
        fail(
            "a sweep needs ray: pip install -r requirements-sweep.txt; --dry-run prints the "
            "commands without it"
        )
    options = {"log_to_driver": False, "logging_level": "warning"}
    if args.address is None:
        workers = args.workers or max(1, len(os.sched_getaffinity(0)) // args.threads)
        options |= {"num_cpus": workers * args.threads, "include_dashboard": False}
        options["object_store_memory"] = 100 * 2**20
    try:
        ray.init(address=args.address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        fail(f"no Ray at --address {args.address}: {first_line(error)}")
    if args.gpus_per_run and ray.cluster_resources().get("GPU", 0) < args.gpus_per_run:
        fail(f"--gpus-per-run {args.gpus_per_run:g}, but Ray finds no such GPU")
    return ray


def make_runs(args, records, todo):
    """Make the runs on Ray; Ctrl-C and SIGTERM end the program. Returns those given up."""
    ray, given_up, left, begin = start_ray(args), [], {}, time.monotonic()
    task = ray.remote(execute).options(
        num_cpus=args.threads,  # and as many threads of NumPy's libraries
        num_gpus=args.gpus_per_run,
        max_retries=RETRIES,
        retry_exceptions=True,  # not only where the worker was killed
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        left |= {task.remote(run): run for run in todo}  # Ray queues what has no room
        while left:
            for reference in ray.wait(list(left), timeout=1.0)[0]:
                run = left.pop(reference)
                try:
                    row, curve = ray.get(reference)
                except ray.exceptions.RayError as error:  # it failed, or the worker was killed
                    given_up.append(run)
                    reason = first_line(getattr(error, "cause", None) or error)
                    say(f"given up {run.key}: {reason}; see {run.folder / LOG}")
                    continue
                records.add({run.key: (row, curve)})
                minutes = (time.monotonic() - begin) / (len(todo) - len(left)) * len(left) / 60
                say(
                    f"done {run.key}: score {row['score']:g}, {row['wall_seconds']:.0f} s "
                    f"({len(left)} of {len(todo)} runs are left, {minutes:,.0f} min)"
                )
    except (OSError, ValueError) as error:  # rows cannot be written: runs are kept in --run-dir
        fail(error)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would cut Ray's end short
        ray.shutdown()
        print(
            f"stopped; {len(left)} of {len(todo)} runs are left. Those under way write their "
            "checkpoints; the same command goes on"
        )
        sys.exit(130)
    ray.shutdown()
    return given_up


def say(text):
    print(time.strftime("%H:%M:%S"), text, flush=True)


@lasting_output()
def main():
    args = arguments(Args, __doc__)
    check_args(args)
    results = args.results_dir or args.run_dir / "results"
    suites, grid = args.suites or tuple(SUITES), make_grid(args) if args.suites else {}
    records = Records(results)
    try:
        for suite in suites:
            records.checked_defaults(suite)
        own = records.rows(*suites)
        finished = run_records.finished_runs(args.run_dir, suites, grid, own)
        if not args.dry_run:
            found = {key: measured for key, measured in finished.items() if measured}
            print(f"{records.add(found)} rows collected from {args.run_dir} to {results}")
    except KeyError as error:
        fail(f"a CSV file in {results} has no column {error}")
    except (OSError, ValueError) as error:
        fail(error)
    if args.collect_only:
        return
    todo = [run for key, run in grid.items() if key not in own and key not in finished]
    if not todo:
        print(f"nothing to do: all {len(grid)} runs are finished", file=sys.stderr)
    if args.dry_run:
        for run in todo:
            print("python", shlex.join((*run.command, "--run-dir", str(args.run_dir))))
        return
    given_up = make_runs(args, records, todo) if todo else []
    folder = shlex.quote(str(results))
    print(f"scores and curves: python reproduce/report.py --results-dir {folder}")
    sys.exit(1 if given_up else 0)


if __name__ == "__main__":
    main()
