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


def check_args(args):
    """Refuse what cannot run, before anything is written."""
    if not args.suites and not args.collect_only:
        fail(f"--suites must name one or more of {', '.join(SUITES)}")
    for name in ("backups", "variants", "episode_seeds", "seeds"):
        if not getattr(args, name):
            fail(f"--{name.replace('_', '-')} must name at least one")
    least = {"threads": 1, "checkpoint_frequency": 1, "workers": 0, "retries": 0, "gpus_per_run": 0}
    for name, value in [*((n, getattr(args, n)) for n in least), ("seeds", min(args.seeds))]:
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


class Sweep:
    """Runs what is queued; a live table on a terminal, elsewhere a line per event."""

    def __init__(self, args, ray, records, todo, num_finished):
        self.args, self.ray, self.records = args, ray, records
        self.queue, self.running = collections.deque(todo), {}  # running: Ray's reference -> Run
        self.num_finished, self.num_runs = num_finished, num_finished + len(todo)
        self.attempts, self.given_up = collections.Counter(), []
        self.start_anew = set()  # keys of runs whose checkpoint could not be read
        self.widest = max(len(str(run.key)) for run in todo)
        self.begin, self.steps_made, self.live = time.monotonic(), 0, None

    def run(self):
        """Until nothing is queued and nothing runs."""
        args, ray = self.args, self.ray
        task = ray.remote(execute).options(
            num_cpus=args.threads, num_gpus=args.gpus_per_run, max_retries=0
        )
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(self.table(), auto_refresh=False)
            self.live.start()
        try:
            while self.queue or self.running:
                while self.queue and len(self.running) < self.slots():
                    run = self.queue.popleft()
                    self.attempts[run.key] += 1
                    anew = run.key in self.start_anew
                    reference = task.remote(run, args.threads, anew, args.keep_checkpoints)
                    self.start_anew.discard(run.key)
                    self.running[reference] = run
                    self.say(f"start {run.key}")
                ready, _ = ray.wait(list(self.running), timeout=1.0)
                for reference in ready:
                    run = self.running.pop(reference)
                    try:
                        outcome = ray.get(reference)
                    except ray.exceptions.RayError as error:  # the worker was killed
                        outcome = Outcome(None, None, -1, f"worker lost: {first_line(error)}")
                    self.settle(run, outcome)
                if self.live:
                    self.live.update(self.table(), refresh=True)
        finally:
            if self.live:
                self.live.stop()

    def settle(self, run, outcome):
        """Keep the row of a run that finished, queue one that failed again."""
        resumed = outcome.resumed_from is not None
        if resumed:
            self.say(f"{run.key} went on from step {outcome.resumed_from}")
        if outcome.finished:
            self.records.add({run.key: outcome.finished})
            self.num_finished += 1
            self.attempts.pop(run.key)
            row = outcome.finished[0]
            self.steps_made += row["steps"] - (outcome.resumed_from or 0)
            self.say(f"done {run.key}: score {row['score']:g}, {row['wall_seconds']:.0f} s "
                     f"({self.num_finished} of {self.num_runs})")  # fmt: skip
            return
        if resumed and outcome.status == 2:
            self.start_anew.add(run.key)  # its checkpoint cannot be used
        reason = f"status {outcome.status}: {outcome.last_line}"
        if self.attempts[run.key] <= self.args.retries:
            self.queue.appendleft(run)
            self.say(f"try again {run.key}, {reason}")
        else:
            self.given_up.append(run)
            self.say(f"given up {run.key}, {reason}; see {run.folder / LOG}")

    def slots(self):
        """How many runs fit at a time."""
        args, have = self.args, self.ray.cluster_resources()
        fit = have.get("CPU", 0) / args.threads
        if args.gpus_per_run:
            fit = min(fit, have.get("GPU", 0) / args.gpus_per_run)
        return args.workers or max(1, int(fit + 1e-9))

    def say(self, text):
        line = f"{time.strftime('%H:%M:%S')} {text}"
        if self.live:
            self.live.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def table(self):
        from rich.table import Table

        rows = []
        for run in self.running.values():
            folders = run_records.run_folders(run.folder)
            rows.append((run, *(run_records.progress_of(folders[-1]) if folders else (0, 0.0))))
        done = self.steps_made + sum(step for _, step, _ in rows)
        left = sum(run.total_timesteps for run in (*self.queue, *self.running.values()))
        left -= done - self.steps_made
        so_far = time.monotonic() - self.begin
        to_go = f"{so_far * left / done / 60:,.0f} min" if done else "?"
        table = Table(
            title=f"{self.num_finished} of {self.num_runs} runs done, {len(rows)} run, "
            f"{len(self.queue)} wait, {len(self.given_up)} given up; "
            f"{so_far / 60:,.0f} min so far, {to_go} to go",
            title_justify="left",
        )
        table.add_column("run", min_width=self.widest)  # also without a row
        for name in ("step", "of", "steps/s", "try"):
            table.add_column(name, justify="right", min_width=9)
        for run, step, rate in rows:
            table.add_row(str(run.key), f"{step:,}", f"{run.total_timesteps:,}", f"{rate:.1f}",
                          str(self.attempts[run.key]))  # fmt: skip
        return table

    def wait_for_processes(self):
        """Until every process has written its checkpoint and let go of its lock."""
        for run in self.running.values():
            path = run.folder / "lock"
            if path.exists():
                with path.open("a") as lock:  # on NFS only a file open for writing can be locked
                    fcntl.flock(lock, fcntl.LOCK_EX)


def first_line(error):
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


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
        workers = args.workers or max(1, len(os.sched_getaffinity(0)) // args.threads)
        options |= {"num_cpus": workers * args.threads, "include_dashboard": False,
                    "object_store_memory": 100 * 2**20}  # fmt: skip
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
    sweep = Sweep(args, ray, records, todo, len(grid) - len(todo))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        sweep.run()
    except (OSError, ValueError) as error:  # rows cannot be written: runs are kept in --run-dir
        ray.shutdown()
        fail(error)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("stopping: runs write their checkpoints ...", flush=True)
        ray.shutdown()
        sweep.wait_for_processes()
        left = sweep.num_runs - sweep.num_finished
        print(f"stopped; {left} of {len(grid)} runs are left, the same command goes on")
        sys.exit(130)
    ray.shutdown()
    print(f"{sweep.num_finished} of {sweep.num_runs} runs are finished")
    print_scores(args, grid, theirs | own_rows())
    for run in sweep.given_up:
        print(f"given up: {run.key}; see {run.folder / LOG}")
    sys.exit(1 if sweep.given_up else 0)


if __name__ == "__main__":
    main()
