"""Do the savings of the scripts cost anything? Learning curves with and without them.

    python benchmark/fast_and_plain.py
    python benchmark/fast_and_plain.py --script gb_dqn_minatar
    python benchmark/fast_and_plain.py --script gb_rainbow_atari --bf16 \
        --tasks Krull --steps 8000 --evaluations 8 --eval-episodes 5 --parallel 2

The plain path of the DQN scripts evaluates every leaf of every update under the target network; the
fast one remembers values by node until that network changes. The plain path of gb_rainbow_atari
evaluates all states of a batch's subgraphs; on a CPU the fast one evaluates those that the greedy
paths read, and on a GPU it replays a captured graph, which the plain one does without. With --bf16
both take the fast path, and one of them evaluates target values in bfloat16.

Runs of one seed draw the same numbers on both paths, so that the two curves differ by rounding
alone, or not at all. Where rounding has grown, their ranges over the seeds are compared.
"""

import importlib
import itertools
import multiprocessing
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from output import fail, write_rows
from run_records import ROOT, read_curve
from tether import end_with

sys.path.insert(0, str(ROOT))

TASKS = {
    "gb_dqn_minigrid": ("Empty-8x8", "DoorKey-6x6"),
    "gb_dqn_minatar": ("breakout", "space_invaders"),
    "gb_rainbow_atari": ("Krull", "Breakout"),
}
COLUMNS = ("script", "task", "backup", "seed", "path", "step", "episodic_return")


@dataclass
class Args:
    script: Literal["gb_dqn_minigrid", "gb_dqn_minatar", "gb_rainbow_atari"] = "gb_dqn_minigrid"
    """whose two paths"""
    tasks: tuple[str, ...] = ()
    """tasks of it; two by default"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """runs of each"""
    backup: str = "graph"
    """the bootstrap target"""
    steps: int = 20_000
    """environment steps of a run"""
    evaluations: int = 20
    """points of a curve"""
    eval_episodes: int = 3
    """episodes of each"""
    bf16: bool = False
    """compare bfloat16 target values (fast) with those in float32 (plain), on Atari"""
    parallel: int = 1
    """runs at a time"""
    threads: int = 1
    """CPU threads of a run"""
    out: Path | None = None
    """CSV file of the curves; by default benchmark/results/fast_and_plain_<script>[_bf16].csv"""


def take_plain_path(script):
    """Undo the savings, for this process."""
    learner = script.Learner
    if script.__name__ == "gb_rainbow_atari":
        make = learner.__init__

        def make_plain(self, args, *rest):
            make(self, args, *rest)
            args.cuda_graphs = False
            self.padded = True

        learner.__init__ = make_plain
    else:
        targets = learner.targets

        def plain_targets(self, *rest):
            self.leaves.forget_all()
            return targets(self, *rest)

        learner.targets = plain_targets


def train(args, task, seed, path, folder):
    """A run of the script in a process of its own."""
    end_with(multiprocessing.parent_process().pid)
    script = importlib.import_module(args.script)
    if path == "plain" and not args.bf16:
        take_plain_path(script)
    sys.argv = [
        f"{args.script}.py", "--env-id", task, "--seed", str(seed), "--backup", args.backup,
        "--total-timesteps", str(args.steps), "--run-dir", str(folder), "--no-save-model",
        "--threads", str(args.threads),
        "--eval-frequency", str(args.steps // args.evaluations),
        "--eval-episodes", str(args.eval_episodes),
        *(["--bf16-targets"] if path == "fast" and args.bf16 else []),
    ]  # fmt: skip
    script.main()


def curve(args, run):
    """Step -> mean return of each evaluation of a new run: a task, a seed and a path."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=train, args=(args, *run, folder))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
        (left,) = Path(folder).iterdir()
        return read_curve(left)


def compare(fast, plain):
    """One sentence about curves [seeds, steps] of the two paths."""
    if (fast == plain).all():
        return "equal in every evaluation of every seed"
    equal = (fast == plain).all(axis=0)
    inside = np.ones(len(equal), np.bool_)
    for one, other in ((fast, plain), (plain, fast)):
        mean = one.mean(axis=0)
        inside &= (other.min(axis=0) <= mean) & (mean <= other.max(axis=0))
    return (
        f"{equal.sum()} of {len(equal)} evaluations equal for every seed; the means lie between "
        f"the other path's lowest and highest seed in {(inside | equal).sum()}; over all "
        f"evaluations they are {fast.mean():.4g} (fast) and {plain.mean():.4g} (plain)"
    )


def main():
    args = tyro.cli(Args)
    if not args.seeds or not 0 < args.evaluations <= args.steps or args.parallel < 1:
        fail("Require at least one of --seeds, 0 < --evaluations <= --steps and --parallel >= 1")
    if args.bf16 and args.script != "gb_rainbow_atari":
        fail("--bf16 is for --script gb_rainbow_atari: the others have no such targets")
    name = f"fast_and_plain_{args.script}{'_bf16' if args.bf16 else ''}.csv"
    out = args.out or ROOT / "benchmark" / "results" / name
    rows = []
    with ThreadPoolExecutor(args.parallel) as pool:
        for task in args.tasks or TASKS[args.script]:
            runs = list(itertools.product([task], args.seeds, ("fast", "plain")))
            curves = {"fast": [], "plain": []}
            for run, found in zip(runs, pool.map(partial(curve, args), runs), strict=True):
                about = {"script": args.script, "backup": args.backup}
                about |= dict(zip(("task", "seed", "path"), run, strict=True))
                curves[about["path"]].append(list(found.values()))
                rows += [
                    about | {"step": step, "episodic_return": score}
                    for step, score in found.items()
                ]
                write_rows(out, COLUMNS, rows)
            verdict = compare(np.array(curves["fast"]), np.array(curves["plain"]))
            print(f"{task}, {args.backup}, {len(args.seeds)} seeds: {verdict}", flush=True)


if __name__ == "__main__":
    main()
