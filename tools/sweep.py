"""Run a grid of runs on Ray: suites x backups x variants x seeds, on this machine or a cluster.

    pip install -r requirements-sweep.txt
    python tools/sweep.py --suites minigrid --seeds 1 2 3 4 5
    python tools/sweep.py --suites minatar --episode-seeds fresh fixed --dry-run
    python tools/sweep.py --suites minigrid-hard --backups graph \\
        --variants default exploration=frontier
    python tools/sweep.py --suites atari100k --address auto --gpus-per-run 0.25
    python tools/sweep.py --collect-only --run-dir runs

Each run is a process of the script itself, in a folder of its own under --run-dir. A run that is
finished there, or has a row in --results-dir or in this repository's results, is not run again. A
run that crashed or whose worker was killed is tried again from its checkpoint. Stop the sweep as
you like, and start it again with the same command: it goes on from the checkpoints. On a cluster,
--run-dir must be on a file system that all machines share, and this repository at the same path on
each of them.
"""

import collections
import fcntl
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import run_records
import tyro
from output import fail
from run_records import RESULTS, ROOT, SUITES, Key, Records, flags_of, key_of

LOG = "log.txt"  # of a run: what the script printed


@dataclass
class Args:
    suites: tuple[Literal[tuple(SUITES)], ...] = ()
    """what to run; --collect-only: all by default"""
    tasks: tuple[str, ...] = ()
    """only these tasks of the suites"""
    backups: tuple[Literal["graph", "tree", "n-step", "one-step", "graph-mixed"], ...] = (
        "graph", "tree", "n-step", "one-step",
    )  # fmt: skip
    """the bootstrap targets"""
    variants: tuple[str, ...] = ("default",)
    """settings that are run besides each other, as in: default breadth=0 exploration=frontier;
    only those of the exploration apply to backups other than the graph's"""
    episode_seeds: tuple[Literal["fresh", "fixed"], ...] = ("fresh",)
    """MinAtar's --episode-seed"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds; the first one of all tasks comes first"""
    overrides: tuple[str, ...] = ()
    """flags of the scripts for every run, as in: depth=3 learning_rate=1e-4"""

    run_dir: Path = Path("runs")
    """where runs leave their folders"""
    results_dir: Path | None = None
    """where their rows are collected, as CSV; the folder results of --run-dir by default"""
    repeat: bool = False
    """run also what the rows in this repository's results have already"""
    checkpoint_frequency: int = 10_000
    """steps between checkpoints"""
    keep_checkpoints: bool = False
    """keep the checkpoint of a finished run"""
    retries: int = 2
    """how often a run that fails is tried again"""

    workers: int = 0
    """runs at a time; 0 = as many as the processors, or the cluster, allow"""
    threads: int = 1
    """CPU threads of each run"""
    gpus_per_run: float = 0.0
    """GPUs of each run, also a part of one; 0 = none"""
    address: str | None = None
    """a Ray cluster to run on, as in auto or 10.0.0.1:6379; none = this machine"""

    dry_run: bool = False
    """print the commands of what is not finished, and run nothing (without Ray)"""
    collect_only: bool = False
    """collect the rows of finished runs of --run-dir, and run nothing (without Ray)"""


class Run(NamedTuple):
    key: Key
    command: tuple  # of a new run; without --run-dir
    folder: Path  # the run's own folder is in it
    total_timesteps: int


class Outcome(NamedTuple):
    finished: tuple | None  # run_records.measurements and curve
    resumed_from: int | None  # step of the checkpoint
    status: int
    last_line: str  # of the log


# --------------------------------------------------------------------------------------------------
# The grid
# --------------------------------------------------------------------------------------------------


def check_args(args):
    """Refuse what cannot run, before anything is written."""
    if not args.suites and not args.collect_only:
        fail(f"--suites must name one or more of {', '.join(SUITES)}")
    for name in ("backups", "variants", "episode_seeds", "seeds"):
        if not getattr(args, name):
            fail(f"--{name.replace('_', '-')} must name at least one")
    least = {"threads": 1, "checkpoint_frequency": 1, "workers": 0, "retries": 0, "gpus_per_run": 0}
    for name, value in [(name, getattr(args, name)) for name in least] + [
        ("seeds", min(args.seeds))
    ]:
        if value < least.get(name, 0):
            fail(f"--{name.replace('_', '-')} must be >= {least.get(name, 0)}, got {value}")
    if args.collect_only and not args.run_dir.is_dir():
        fail(f"--run-dir {str(args.run_dir)!r} is no folder")


def make_grid(args):
    """Every run that was asked for, once, the first seed of everything first."""
    grid = {}
    for seed in args.seeds:
        for suite in args.suites:
            for task in chosen_tasks(args, suite):
                for flags in settings(args, suite):
                    run = make_run(args, suite, {"env_id": task, "seed": seed} | flags)
                    grid.setdefault(run.key, run)
    return grid


def chosen_tasks(args, suite):
    """The suite's tasks, or those of them that --tasks names, whatever the case and the hyphens."""

    def letters(name):
        return "".join(c for c in name.lower() if c.isalnum())

    known = [name for s in args.suites for name in SUITES[s].tasks]
    for task in args.tasks:
        if letters(task) not in map(letters, known):
            fail(f"--tasks {task!r} is none of {', '.join(known)}")
    chosen = set(map(letters, args.tasks or known))
    return [name for name in SUITES[suite].tasks if letters(name) in chosen]


def settings(args, suite):
    """Flags of every combination of backup, variant and episode seed."""
    common = overrides(suite, args.overrides)
    seeded = "episode_seed" in flags_of(suite) and "episode_seed" not in common
    for episode_seed in args.episode_seeds if seeded else (None,):
        extra = {} if episode_seed is None else {"episode_seed": episode_seed}
        for backup in args.backups:
            for variant in args.variants:
                changed = {} if variant == "default" else overrides(suite, variant.split())
                if not backup.startswith("graph"):
                    exploration = ("exploration", "frontier_share")
                    changed = {n: v for n, v in changed.items() if n in exploration}
                yield common | extra | changed | {"backup": backup}


# Flags that every run gets from the sweep.
OF_THE_SWEEP = {
    "env_id": "--tasks chooses", "seed": "--seeds chooses", "backup": "--backups chooses",
    "run_dir": "--run-dir chooses", "resume": "the sweep resumes by itself",
    "threads": "--threads chooses", "cuda": "--gpus-per-run chooses",
    "checkpoint_frequency": "--checkpoint-frequency chooses",
    "save_model": "a sweep keeps scores, and with --keep-checkpoints the last checkpoint",
}  # fmt: skip


def overrides(suite, words):
    changed = {}
    for word in words:
        try:
            name, value = run_records.parse_override(suite, word)
        except KeyError as error:
            fail(f"{SUITES[suite].script}.py has no flag {error.args[0]!r}")
        except ValueError as error:
            fail(error)
        if name in OF_THE_SWEEP:
            fail(f"{name} is no override: {OF_THE_SWEEP[name]}")
        changed[name] = value
    return changed


def make_run(args, suite, flags):
    """One run: the flags that differ from the script's defaults make its command."""
    key = key_of(suite, flags)
    flags = {"total_timesteps": SUITES[suite].total_timesteps} | flags | {
        "checkpoint_frequency": args.checkpoint_frequency, "save_model": False,
        "threads": args.threads, "cuda": args.gpus_per_run > 0,
    }  # fmt: skip
    given = ("env_id", "seed", "backup", "threads", "cuda")  # in any case
    defaults, words = vars(run_records.script_of(suite).Args()), [f"{SUITES[suite].script}.py"]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if name in given or defaults[name] != value:
            words += (
                [f"--{flag}" if value else f"--no-{flag}"]
                if isinstance(value, bool)
                else [f"--{flag}", str(value)]
            )
    name = "__".join(str(part).replace(" ", "_").replace("/", "_") for part in key if part != "")
    return Run(key, tuple(words), args.run_dir.resolve() / name, flags["total_timesteps"])


# --------------------------------------------------------------------------------------------------
# On a worker
# --------------------------------------------------------------------------------------------------


def execute(run, threads, start_anew, keep_checkpoints):
    """Run the script to its end, from the newest checkpoint if there is one. Returns an Outcome."""
    run.folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"TQDM_DISABLE": "1"} | {
        f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS", "NUMBA")
    }  # fmt: skip
    with (run.folder / "lock").open("w") as lock:
        # The process inherits the lock. One that outlived its worker still writes a checkpoint.
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun = run_records.run_folders(run.folder)
        step, status, words = None, 0, (*run.command, "--run-dir", str(run.folder))
        if not any(map(run_records.is_finished, begun)):
            resumable = [
                folder for folder in begun if run_records.checkpoint_step(folder) is not None
            ]
            if resumable and not start_anew:
                step = run_records.checkpoint_step(resumable[-1])
                words = (run.command[0], "--resume", str(resumable[-1]))
            with (run.folder / LOG).open("a") as log:
                print("$", shlex.join(words), file=log, flush=True)
                tether = [sys.executable, ROOT / "tools" / "tether.py", str(os.getpid())]
                status = subprocess.Popen(
                    [*tether, sys.executable, *words],
                    cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[lock.fileno()],
                ).wait()  # fmt: skip
        done = [
            folder
            for folder in run_records.run_folders(run.folder)
            if run_records.is_finished(folder)
        ]
        if done:
            found = run_records.measurements(done[-1])
            if not keep_checkpoints:
                shutil.rmtree(done[-1] / "checkpoint", ignore_errors=True)
            return Outcome(found, step, status, "")
    lines = (run.folder / LOG).read_text(errors="replace").strip().splitlines()
    return Outcome(None, step, status, lines[-1] if lines else "")


# --------------------------------------------------------------------------------------------------
# The sweep
# --------------------------------------------------------------------------------------------------


class State:
    """What is queued, runs, is done and failed; what the table shows."""

    def __init__(self, todo, num_finished, seconds_per_step):
        self.queue = collections.deque(todo)
        self.running = {}  # reference of the task -> (run, when it was submitted)
        self.num_finished = num_finished
        self.num_runs = num_finished + len(todo)
        self.attempts = collections.Counter()
        self.start_anew = set()  # keys of runs whose checkpoint could not be read
        self.given_up = []
        self.slots = 1
        self.seconds_per_step = seconds_per_step  # (suite, backup) -> list
        self.widest = max((len(str(run.key)) for run in todo), default=0)

    def progress(self):
        """Of every run that runs: itself, its step, its rate and which try it is."""
        for run, _ in self.running.values():
            folders = run_records.run_folders(run.folder)
            step, rate = run_records.progress_of(folders[-1]) if folders else (0, 0.0)
            yield run, step, rate, self.attempts[run.key]

    def seconds_left(self, progress):
        """Estimate from the wall time of finished runs, else of the rates; None before either."""
        known = self.seconds_per_step
        every = [s for values in known.values() for s in values]
        every += [1 / rate for _, _, rate, _ in progress if rate > 0]
        if not every:
            return None
        left = [(run, run.total_timesteps) for run in self.queue]
        left += [(run, run.total_timesteps - step) for run, step, *_ in progress]
        work = sum(
            steps * statistics.median(known.get((run.key.suite, run.key.backup)) or every)
            for run, steps in left
        )
        return work / max(1, min(self.slots, len(left)))


def sweep(args, state, records, ray):
    """Run what is queued."""
    task = ray.remote(execute).options(
        num_cpus=args.threads, num_gpus=args.gpus_per_run, max_retries=0
    )
    show = Display(state)
    try:
        while state.queue or state.running:
            state.slots = slots(args, ray)
            while state.queue and len(state.running) < state.slots:
                run = state.queue.popleft()
                state.attempts[run.key] += 1
                reference = task.remote(
                    run, args.threads, run.key in state.start_anew, args.keep_checkpoints
                )
                state.start_anew.discard(run.key)
                state.running[reference] = (run, time.monotonic())
                show.event(f"start {run.key}")
            ready, _ = ray.wait(list(state.running), timeout=1.0)
            for reference in ready:
                run, begin = state.running.pop(reference)
                try:
                    outcome = ray.get(reference)
                except ray.exceptions.RayError as error:  # the worker was killed
                    outcome = Outcome(None, None, -1, f"worker lost: {first_line(error)}")
                settle(args, state, records, run, outcome, time.monotonic() - begin, show)
            show.refresh()
    finally:
        show.close()


def settle(args, state, records, run, outcome, seconds, show):
    """Keep the row of a run that finished, queue one that failed again."""
    resumed = outcome.resumed_from is not None
    if resumed:
        show.event(f"{run.key} went on from step {outcome.resumed_from}")
    if outcome.finished:
        records.add({run.key: outcome.finished})
        state.num_finished += 1
        state.attempts.pop(run.key)
        row = outcome.finished[0]
        if not resumed:
            cost = row["wall_seconds"] / max(1, row["steps"])
            state.seconds_per_step[run.key.suite, run.key.backup].append(cost)
        show.event(
            f"done {run.key}: score {row['score']:g}, {seconds:.0f} s "
            f"({state.num_finished} of {state.num_runs})"
        )
        return
    if resumed and outcome.status == 2:
        state.start_anew.add(run.key)  # its checkpoint cannot be used
    reason = f"status {outcome.status}: {outcome.last_line}"
    if state.attempts[run.key] <= args.retries:
        state.queue.appendleft(run)
        show.event(f"try again {run.key}, {reason}")
    else:
        state.given_up.append(run)
        show.event(f"given up {run.key}, {reason}; see {run.folder / LOG}")


def slots(args, ray):
    """How many runs fit at a time."""
    if args.workers:
        return args.workers
    have = ray.cluster_resources()
    fit = have.get("CPU", 0) / args.threads
    if args.gpus_per_run:
        fit = min(fit, have.get("GPU", 0) / args.gpus_per_run)
    return max(1, int(fit + 1e-9))


def first_line(error):
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


class Display:
    """A live table on a terminal; elsewhere a line per event."""

    def __init__(self, state):
        self.state, self.live, self.begin = state, None, time.monotonic()
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(self.table(), auto_refresh=False)
            self.live.start()

    def event(self, text):
        line = f"{time.strftime('%H:%M:%S')} {text}"
        if self.live:
            self.live.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def refresh(self):
        if self.live:
            self.live.update(self.table(), refresh=True)

    def table(self):
        from rich.table import Table

        def duration(seconds):
            minutes = round(seconds / 60)
            hours = f"{minutes // 60} h {minutes % 60:02} min"
            return hours if minutes >= 60 else f"{minutes} min"

        state, progress = self.state, list(self.state.progress())
        left = state.seconds_left(progress)
        table = Table(
            title=f"{state.num_finished} of {state.num_runs} runs done, {len(progress)} run, "
            f"{len(state.queue)} wait, {len(state.given_up)} given up; "
            f"{duration(time.monotonic() - self.begin)} so far, "
            f"{'?' if left is None else duration(left)} to go",
            title_justify="left", min_width=state.widest + 46,  # also without a row
        )  # fmt: skip
        for name in ("run", "step", "of", "steps/s", "try"):
            table.add_column(name, justify="left" if name == "run" else "right")
        for run, step, rate, attempt in progress:
            table.add_row(str(run.key), f"{step:,}", f"{run.total_timesteps:,}", f"{rate:.1f}",
                          str(attempt))  # fmt: skip
        return table

    def close(self):
        if self.live:
            self.refresh()
            self.live.stop()


# --------------------------------------------------------------------------------------------------
# Ray
# --------------------------------------------------------------------------------------------------


def start_ray(args):
    """The ray module, connected."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import rich  # noqa: F401
    except ImportError as error:
        fail(f"a sweep needs {error.name}: pip install -r requirements-sweep.txt; "
             "--dry-run prints the commands without it")  # fmt: skip
    options = {"log_to_driver": False, "logging_level": "warning"}
    if args.address is None:
        processors = len(os.sched_getaffinity(0))
        workers = args.workers or max(1, processors // args.threads)
        options |= {
            "num_cpus": workers * args.threads,
            "include_dashboard": False,
            "object_store_memory": 100 * 2**20,  # rows alone go through it
        }
    host, colon, port = (args.address or "").rpartition(":")
    try:
        if colon and port.isdigit():  # Ray tries for minutes
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address=args.address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        fail(f"no Ray at --address {args.address}: {first_line(error)}")
    if args.gpus_per_run and ray.cluster_resources().get("GPU", 0) < args.gpus_per_run:
        fail(f"--gpus-per-run {args.gpus_per_run:g}, but Ray finds no such GPU")
    return ray


def wait_for_processes(state):
    """Until every process of this sweep has written its checkpoint and let go of its lock."""
    for run, _ in state.running.values():
        path = run.folder / "lock"
        if path.exists():
            with path.open("a") as lock:  # on NFS a file must be open for writing to be locked
                fcntl.flock(lock, fcntl.LOCK_EX)


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------


def rows_of_the_repository(args, suites):
    """Key -> row of runs that are in RESULTS and need not be made."""
    found = {}
    if not args.repeat and args.results_dir.resolve() != RESULTS:
        for suite in suites:
            try:
                Records(RESULTS).checked_defaults(suite)
                found |= Records(RESULTS).rows(suite)
            except ValueError as error:
                print(f"rows of {suite} in {RESULTS} do not count: {error}", file=sys.stderr)
    return found


def rates(rows):
    """Wall seconds per step of finished runs by suite and backup."""
    found = collections.defaultdict(list)
    for key, row in rows.items():
        found[key.suite, key.backup].append(float(row["wall_seconds"]) / float(row["steps"]))
    return found


def print_scores(args, grid, rows):
    """Mean and deviation over the seeds of each setting."""
    from tables import cell_text

    scores = {}
    for key in grid.keys() & rows.keys():
        setting = str(key).removesuffix(f" seed {key.seed}")
        scores.setdefault(setting, []).append(float(rows[key]["score"]))
    width = max(map(len, scores), default=0)
    for name, found in sorted(scores.items()):
        print(f"{name:<{width}}  {cell_text(found)}")
    if args.results_dir.exists():
        print(f"tables and curves: python tools/report.py --results-dir {args.results_dir}")


def interrupt(*_):
    raise KeyboardInterrupt


def main():
    args = tyro.cli(Args)
    check_args(args)
    args.results_dir = args.results_dir or args.run_dir / "results"
    suites = args.suites or tuple(SUITES)
    grid = make_grid(args) if args.suites else {}
    records = Records(args.results_dir)

    def own_rows():
        return {key: row for suite in suites for key, row in records.rows(suite).items()}

    try:
        for suite in suites:
            records.checked_defaults(suite)
        theirs = rows_of_the_repository(args, suites)
        folders = run_records.finished_runs(args.run_dir, suites, grid)
        done = own_rows().keys() | folders.keys()
        number = len(grid.keys() & theirs.keys() - done)
        if number:
            print(
                f"{number} of {len(grid)} runs have rows in {RESULTS}, which came with this "
                "repository, and are not made again; --repeat makes them, too",
                file=sys.stderr,
            )
        todo = [run for key, run in grid.items() if key not in done | theirs.keys()]
        if args.dry_run:
            for run in todo:
                print("python", shlex.join((*run.command, "--run-dir", str(args.run_dir))))
            if not todo:
                print(f"nothing to do: all {len(grid)} runs are finished", file=sys.stderr)
            return
        new = {
            key: run_records.measurements(path)
            for key, path in folders.items()
            if key not in own_rows()
        }
        print(f"{records.add(new)} rows collected from {args.run_dir} to {args.results_dir}")
    except (OSError, ValueError) as error:
        fail(error)
    if args.collect_only:
        return
    if not todo:
        print(f"nothing to do: all {len(grid)} runs are finished")
        print_scores(args, grid, theirs | own_rows())
        return
    ray = start_ray(args)
    state = State(todo, len(grid) - len(todo), rates(theirs | own_rows()))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        sweep(args, state, records, ray)
    except (OSError, ValueError) as error:  # rows cannot be written: runs are kept in --run-dir
        ray.shutdown()
        fail(error)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("stopping: runs write their checkpoints ...", flush=True)
        ray.shutdown()
        wait_for_processes(state)
        left = len(grid.keys() - own_rows().keys() - theirs.keys())
        print(f"stopped; {left} of {len(grid)} runs are left, the same command goes on")
        sys.exit(130)
    ray.shutdown()
    print(f"{state.num_finished} of {state.num_runs} runs are finished")
    print_scores(args, grid, theirs | own_rows())
    for run in state.given_up:
        print(f"given up: {run.key}; see {run.folder / LOG}")
    if state.given_up:
        sys.exit(1)


if __name__ == "__main__":
    main()
