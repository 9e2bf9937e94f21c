"""Kill a script with SIGKILL at random moments, resume it, and compare it with a run left alone.

    python benchmark/kill_and_resume.py --script gb_rainbow_atari

Of twenty kills twelve come at any moment of the start and of the training that follows, and eight
are aimed at the writing of a checkpoint. Up to half of the episodes explore with the frontier.
Exit status 1 if anything that the two runs leave behind differs.
"""

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

from gbtools import ROOT
from gbtools.output import arguments, lasting_output
from gbtools.runs import read_metrics

from gbcore.run import Amount, Count, load_checkpoint

SMALL = "--batch-size 8 --breadth 5 --threads 1 --no-cuda --log-frequency 100"
DQN = (
    "--total-timesteps 6000 --learning-starts 200 --target-network-frequency 700 "
    f"--eval-frequency 1000 --eval-episodes 2 --checkpoint-frequency 70 {SMALL}"
)
FLAGS = {
    "gb_dqn_minigrid": f"--env-id DoorKey-5x5 --buffer-size 500 --end-e 0.5 {DQN}",
    "gb_dqn_minatar": f"--env-id asterix --buffer-size 2000 {DQN}",
    "examples/gb_dqn_gymnasium": f"--env-id Taxi-v4 --key-last-action --buffer-size 500 {DQN}",
    "gb_rainbow_atari": "--env-id Breakout --buffer-size 500 --total-timesteps 1500 "
    "--learning-starts 100 --train-frequency 5 --eval-frequency 1000 --eval-episodes 1 "
    f"--curve-episodes 1 --eval-epsilon 1 --checkpoint-frequency 40 {SMALL}",
}
SAVED, NEW = "checkpoint.npz", "new.checkpoint.npz"
MOMENTS = ["any"] * 12 + ["writing"] * 8


@dataclass
class Args:
    script: Literal[tuple(FLAGS)] = "gb_dqn_minigrid"  # without .py
    backup: str = "graph"  # the script's
    exploration: str = "frontier"  # the script's
    kills: Count = 20  # how often to kill it
    steps: Amount = 0  # environment steps; 0 = enough for twenty kills
    seed: Amount = 0  # of the moments


def outcome(run):
    """What a run learned and wrote, times aside."""
    with np.load(run / "graph.npz") as graph:
        return {
            "metrics": read_metrics(run),
            "evaluations": (run / "evaluations.csv").read_text(),
            "weights": as_bytes(torch.load(run / "model.pt", weights_only=True)),
            "graph": as_bytes(dict(graph)),
        }


def left_behind(run):
    """All that a finished run leaves, times aside: what must not depend on interruptions."""
    tree = load_checkpoint(run)
    tree["counters"]["logged"].pop()
    del tree["counters"]["training_seconds"], tree["tables"]  # metrics.csv has a column of time
    result = json.loads((run / "result.json").read_text())
    for name in ("sps", "training_seconds", "wall_seconds"):
        result.pop(name)
    return outcome(run) | {"result": result} | as_bytes(tree)


def as_bytes(part):
    """A tree whose arrays are compared bit for bit."""
    if isinstance(part, dict):
        return {name: as_bytes(value) for name, value in part.items()}
    if isinstance(part, torch.Tensor):
        part = part.numpy()
    return (part.dtype, part.shape, part.tobytes()) if isinstance(part, np.ndarray) else part


def path_in(folder, name=""):
    """A file of the only run in a folder; nowhere before there is a run."""
    return next(folder.glob("*"), folder / "none") / name


def start(script, flags, folder):
    """A process: of a new run in an empty folder, or of the run that is there, resumed."""
    run = path_in(folder)
    flags = ["--resume", run] if run.exists() else [*flags, "--run-dir", folder]
    with open(f"{folder}.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, ROOT / f"{script}.py", *flags], stdout=log, stderr=subprocess.STDOUT
        )


def finish(process, folder):
    """Wait for the end, which has to be a good one; what the run left behind."""
    if process.wait() != 0:
        raise RuntimeError(Path(f"{folder}.log").read_text())
    return left_behind(path_in(folder))


def kill(process, folder, moment, seconds, rng):
    """Kill it, within seconds or as it writes a checkpoint. False if it ended before."""
    until = time.monotonic() + rng.uniform(0, seconds)
    number, is_there = rng.integers(1, 4), True
    while number if moment == "writing" else time.monotonic() < until:
        if process.poll() is not None:
            return False
        was_there, is_there = is_there, path_in(folder, NEW).exists()
        number -= is_there > was_there
        time.sleep(0.0005)
    if moment == "writing":
        time.sleep(rng.uniform(0, 0.005))
    process.kill()
    return process.wait() == -signal.SIGKILL


def kill_runs(script, flags, moments, folder, rng):
    """What differs from a run left alone; how often runs were killed at what."""
    alone, begin = folder / "alone", time.perf_counter()
    expected = finish(start(script, flags, alone), alone)
    seconds = time.perf_counter() - begin
    training = json.loads(path_in(alone, "result.json").read_text())["training_seconds"]
    print(f"{script}: left alone it takes {seconds:.0f} s, {training:.1f} s of it training")
    seconds += 2 * training / len(MOMENTS) - training
    kills, differences = Counter(), []
    while moments:
        runs = folder / f"killed_{len(moments)}"
        process = start(script, flags, runs)
        while moments and kill(process, runs, moments[-1], seconds, rng):
            moments.pop()
            at = "writing a checkpoint" if path_in(runs, NEW).exists() else "starting or training"
            kills[at] += 1
            print(f"  killed while {at}", flush=True)
            if not path_in(runs, SAVED).exists():  # nothing to go on with
                shutil.rmtree(runs, ignore_errors=True)
            process = start(script, flags, runs)
        got = finish(process, runs)
        differences += [name for name in expected if got[name] != expected[name]]
    return differences, kills


@lasting_output()
def main():
    args = arguments(Args, __doc__)
    rng = np.random.default_rng(args.seed)
    flags = [*FLAGS[args.script].split(), "--backup", args.backup]
    flags += ["--exploration", args.exploration]
    flags += ["--total-timesteps", str(args.steps)] * (args.steps > 0)
    moments = rng.permutation(np.resize(rng.permutation(MOMENTS), args.kills)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        differences, kills = kill_runs(args.script, flags, moments, Path(folder), rng)
    told = ", ".join(f"{number} {at}" for at, number in kills.items())
    found = f"differences in {', '.join(differences)}" if differences else "no difference"
    print(f"{sum(kills.values())} kills ({told}): {found}")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
