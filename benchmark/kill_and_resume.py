"""Kill a script with SIGKILL at random moments, resume it, and compare it with a run left alone.

    python benchmark/kill_and_resume.py --script gb_rainbow_atari

Of twenty kills three come while the script starts, nine while it trains, and eight are aimed at the
writing of a checkpoint; every second one hits a run with frontier exploration. Exit status 1 if
anything that the two runs leave behind differs.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from output import ROOT, fail, lasting_output
from runs import read_metrics

from gbcore.run import load_checkpoint
from gbcore.run.flags import read_flags

SMALL = "--batch-size 8 --breadth 5 --threads 1 --no-cuda --log-frequency 100"
DQN = (
    "--total-timesteps 6000 --learning-starts 200 --target-network-frequency 700 "
    f"--eval-frequency 1000 --eval-episodes 2 --checkpoint-frequency 70 {SMALL}"
)
FLAGS = {
    "gb_dqn_minigrid": f"--env-id DoorKey-5x5 --buffer-size 500 --end-e 0.5 {DQN}",
    "gb_dqn_minatar": f"--env-id asterix --buffer-size 2000 {DQN}",
    "gb_rainbow_atari": "--env-id Breakout --buffer-size 500 --total-timesteps 1500 "
    "--learning-starts 100 --train-frequency 5 --eval-frequency 1000 --eval-episodes 1 "
    f"--curve-episodes 1 --eval-epsilon 1 --checkpoint-frequency 40 {SMALL}",
}
SAVED, NEW = "checkpoint.npz", "new.checkpoint.npz"
EXPLORATIONS = ("epsilon-greedy", "frontier")
MOMENTS = ["start"] * 3 + ["training"] * 9 + ["checkpoint"] * 8


@dataclass
class Args:
    script: Literal["gb_dqn_minigrid", "gb_dqn_minatar", "gb_rainbow_atari"] = "gb_dqn_minigrid"
    """the script, without .py"""
    backup: str = "graph"  # the script's
    kills: int = 20  # how often to kill it
    steps: int = 0  # environment steps; 0 = enough for twenty kills
    seed: int = 0  # of the moments


def left_behind(run):
    """All that a finished run leaves, times aside: what must not depend on interruptions."""
    tree = load_checkpoint(run)
    tree["counters"]["logged"].pop()
    del tree["counters"]["training_seconds"], tree["tables"]  # metrics.csv has a column of time
    result = json.loads((run / "result.json").read_text())
    for name in ("sps", "training_seconds", "wall_seconds"):
        result.pop(name)
    with np.load(run / "graph.npz") as file:
        graph = dict(file)
    found = {
        "metrics": read_metrics(run),
        "evaluations": (run / "evaluations.csv").read_text(),
        "result": result,
        "weights": torch.load(run / "model.pt", weights_only=True),
        "graph": graph,
        **tree,
    }
    return {name: as_bytes(part) for name, part in found.items()}


def as_bytes(part):
    """A tree whose arrays are compared bit for bit."""
    if isinstance(part, dict):
        return {name: as_bytes(value) for name, value in part.items()}
    if isinstance(part, torch.Tensor):
        part = part.numpy()
    return (part.dtype, part.shape, part.tobytes()) if isinstance(part, np.ndarray) else part


def path_in(folder, name):
    """A file of the only run in a folder; nowhere before there is a run."""
    return next(folder.glob("*"), folder / "none") / name


def written(folder, name):
    """When a file of the run was written; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path_in(folder, name).stat().st_mtime_ns


def start(script, flags, folder):
    """A process: of a new run in an empty folder, or of the run that is there, resumed."""
    run = path_in(folder, "config.json").parent
    flags = ["--resume", run] if run.exists() else [*flags, "--run-dir", folder]
    with open(f"{folder}.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, ROOT / f"{script}.py", *flags], stdout=log, stderr=subprocess.STDOUT
        )


def finish(process, folder):
    """Wait for the end, which has to be a good one; what the run left behind."""
    if process.wait() != 0:
        raise RuntimeError(Path(f"{folder}.log").read_text())
    return left_behind(path_in(folder, ""))


def kill(process, folder, moment, pause, rng):
    """Kill it, at most `pause` seconds after a moment. False if it ended before."""
    before = written(folder, SAVED)
    waits = [] if moment == "start" else [lambda: written(folder, SAVED) != before]  # it trains
    if moment == "checkpoint":
        number = rng.integers(1, 4)
        waits += [lambda: not written(folder, NEW), lambda: written(folder, NEW)] * number
    for holds in waits:
        while not holds():
            if process.poll() is not None:
                return False
            time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.005 if moment == "checkpoint" else pause))
    process.kill()
    return process.wait() == -signal.SIGKILL


def kill_runs(script, flags, moments, folder, rng):
    """What differs from a run left alone; how often runs were killed at what."""
    folder.mkdir()
    alone, begin = folder / "alone", time.perf_counter()
    expected = finish(start(script, flags, alone), alone)
    seconds = time.perf_counter() - begin
    training = json.loads(path_in(alone, "result.json").read_text())["training_seconds"]
    print(f"{script}: left alone it takes {seconds:.0f} s, {training:.1f} s of it training")
    kills, differences = Counter(), []
    while moments:
        runs = folder / f"killed_{len(list(folder.iterdir()))}"
        process = start(script, flags, runs)
        while moments:
            pause = seconds - training if moments[-1] == "start" else 2 * training / len(MOMENTS)
            if not kill(process, runs, moments[-1], pause, rng):
                break
            killed_at = "starting" if moments.pop() == "start" else "training"
            if written(runs, NEW):
                killed_at = "writing a checkpoint"
            kills[killed_at] += 1
            print(f"  killed while {killed_at}", flush=True)
            if not written(runs, SAVED):
                kills["before there was a checkpoint"] += 1
                shutil.rmtree(runs, ignore_errors=True)
            process = start(script, flags, runs)
        got = finish(process, runs)
        differences += [name for name in expected if got[name] != expected[name]]
    return differences, kills


@lasting_output()
def main():
    args = read_flags(Args, sys.argv[1:], description=__doc__)
    if args.kills < 1:
        fail(f"--kills must be >= 1, got {args.kills}")
    rng = np.random.default_rng(args.seed)
    flags = [*FLAGS[args.script].split(), "--backup", args.backup]
    flags += ["--total-timesteps", str(args.steps)] * (args.steps > 0)
    moments = rng.permutation(np.resize(rng.permutation(MOMENTS), args.kills)).tolist()
    kills, differences = Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for i, exploration in enumerate(EXPLORATIONS[: args.kills]):
            words, own = [*flags, "--exploration", exploration], moments[i :: len(EXPLORATIONS)]
            found = kill_runs(args.script, words, own, Path(folder) / exploration, rng)
            differences += found[0]
            kills += found[1]
    too_early = kills.pop("before there was a checkpoint", 0)
    print(
        f"{sum(kills.values())} kills ({', '.join(f'{n} {what}' for what, n in kills.items())}), "
        f"{too_early} before there was a checkpoint: "
        f"{'differences in ' + ', '.join(differences) if differences else 'no difference'}"
    )
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
