"""Kill a script with SIGKILL at random moments, resume it, and compare it with a run left alone.

    python benchmark/kill_and_resume.py --script gb_rainbow_atari

Of twenty kills three come while the script starts, nine while it trains, and eight are aimed at the
writing of a checkpoint; every second one hits a run with frontier exploration. Exit status 1 if
anything that the two runs leave behind differs.
"""

import json
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
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from output import fail, read_rows  # noqa: E402

from gbcore.run import load_checkpoint  # noqa: E402

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
    f"--eval-epsilon 1 --checkpoint-frequency 40 {SMALL}",
}
EXPLORATIONS = ("epsilon-greedy", "frontier")
MOMENTS = ["start"] * 3 + ["training"] * 9 + ["checkpoint"] * 8


@dataclass
class Args:
    script: Literal["gb_dqn_minigrid", "gb_dqn_minatar", "gb_rainbow_atari"] = "gb_dqn_minigrid"
    """the script, without .py"""
    kills: int = 20  # how often to kill it
    steps: int = 0  # environment steps; 0 = enough for twenty kills
    seed: int = 0  # of the moments


def left_behind(run):
    """All that a finished run leaves, times aside: what must not depend on interruptions."""
    metrics = read_rows(run / "metrics.csv")
    for row in metrics:
        row.pop("charts/SPS")
    tree = load_checkpoint(run)
    tree["counters"]["logged"].pop()
    tree["counters"].pop("training_seconds")
    result = json.loads((run / "result.json").read_text())
    for name in ("sps", "training_seconds", "wall_seconds"):
        result.pop(name)
    with np.load(run / "graph.npz") as file:
        graph = dict(file)
    found = {
        "metrics": metrics,
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


def run_in(folder):
    """The folder of the only run in a folder, or None."""
    runs = list(folder.iterdir()) if folder.exists() else []
    return runs[0] if runs else None


class Process:
    """One start of a script: a new run in an empty folder, or the one that is there, resumed."""

    def __init__(self, script, flags, folder):
        run = run_in(folder)
        flags = ["--resume", str(run)] if run else [*flags, "--run-dir", str(folder)]
        self.folder, self.begin = folder, time.time_ns()
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.log = folder.with_name("log")
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, str(ROOT / f"{script}.py"), *flags],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_until(self, holds):
        """Until something holds. False if the script ended before."""
        while not holds():
            if self.popen.poll() is not None:
                return False
            time.sleep(0.0005)
        return True

    def file(self, name):
        """Where a file of the run is; nowhere before there is a run."""
        return (run_in(self.folder) or self.folder / "none") / name

    def trains(self):
        """Has it written a checkpoint of its own?"""
        try:
            return self.file("checkpoint/state.json").stat().st_mtime_ns > self.begin
        except FileNotFoundError:
            return False

    def end(self):
        """Wait for the end, which has to be a good one."""
        if self.popen.wait() != 0:
            raise RuntimeError(f"{self.popen.args}:\n{self.log.read_text()}")

    def kill_at(self, moment, rng, pause):
        """Kill it. Returns what it was at, or None if it ended before.

        pause: seconds, the longest wait after the moment came.
        """
        if moment != "start" and not self.wait_until(self.trains):
            return None
        if moment == "checkpoint":
            writes = self.file("checkpoint.new").exists
            for _ in range(rng.integers(1, 4)):
                if not (self.wait_until(lambda: not writes()) and self.wait_until(writes)):
                    return None
            pause = 0.005
        time.sleep(rng.uniform(0, pause))
        if self.popen.poll() is not None:
            return None
        self.popen.kill()
        self.popen.wait()
        if self.file("checkpoint.old").exists():
            return "swapping checkpoints"
        if self.file("checkpoint.new").exists():
            return "writing a checkpoint"
        return "starting" if moment == "start" else "training"


def kill_runs(script, flags, moments, folder, rng):
    """What differs from a run left alone; how often runs were killed at what."""
    begin = time.perf_counter()
    Process(script, flags, folder / "alone" / "runs").end()
    seconds = time.perf_counter() - begin
    alone = run_in(folder / "alone" / "runs")
    training = json.loads((alone / "result.json").read_text())["training_seconds"]
    expected, kills, differences, number = left_behind(alone), Counter(), [], 0
    print(f"{script}: left alone it takes {seconds:.0f} s, {training:.1f} s of it training")
    while moments:
        number += 1
        runs = folder / f"killed_{number}" / "runs"
        while True:
            process = Process(script, flags, runs)
            pause = 2 * training / len(MOMENTS)
            if moments and moments[-1] == "start":
                pause = seconds - training
            killed_at = process.kill_at(moments[-1], rng, pause) if moments else None
            if killed_at is None:
                process.end()
                break
            moments.pop()
            kills[killed_at] += 1
            print(f"  killed while {killed_at}", flush=True)
            if not any(process.file(f"{name}/state.json").exists()
                       for name in ("checkpoint", "checkpoint.old")):  # fmt: skip
                kills["before there was a checkpoint"] += 1
                runs = runs.with_name(f"{runs.name}_")
        got = left_behind(run_in(runs))
        differences += [name for name in expected if got[name] != expected[name]]
    return differences, kills


def main():
    args = tyro.cli(Args)
    if args.kills < 1:
        fail(f"--kills must be >= 1, got {args.kills}")
    rng = np.random.default_rng(args.seed)
    flags = FLAGS[args.script].split() + ["--total-timesteps", str(args.steps)] * (args.steps > 0)
    moments = rng.permutation(np.resize(rng.permutation(MOMENTS), args.kills)).tolist()
    kills, differences = Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for i, exploration in enumerate(EXPLORATIONS[: args.kills]):
            found = kill_runs(
                args.script, [*flags, "--exploration", exploration],
                moments[i :: len(EXPLORATIONS)], Path(folder) / exploration, rng,
            )  # fmt: skip
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
