"""Kill a script with SIGKILL at random moments, resume it, and compare it with a run left alone.

python benchmark/kill_and_resume.py --script gb_rainbow_atari

Of twenty kills three come while the script starts, nine while it trains, and eight are aimed at
the writing of a checkpoint. Exit status 1 if anything that the two runs leave behind differs.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from output import fail, read_rows

ROOT = Path(__file__).resolve().parents[1]

SMALL = [
    "--batch-size", "8", "--breadth", "5", "--threads", "1", "--no-cuda", "--log-frequency", "100",
]  # fmt: skip
DQN = [
    "--total-timesteps", "6000", "--learning-starts", "200", "--target-network-frequency", "700",
    "--eval-frequency", "1000", "--eval-episodes", "2", "--checkpoint-frequency", "70", *SMALL,
]  # fmt: skip
FLAGS = {
    "gb_dqn_minigrid": ["--env-id", "DoorKey-5x5", "--buffer-size", "500", "--end-e", "0.5", *DQN],
    "gb_dqn_minatar": ["--env-id", "asterix", "--buffer-size", "2000", *DQN],
    "gb_rainbow_atari": [
        "--env-id", "Breakout", "--buffer-size", "500", "--total-timesteps", "1500",
        "--learning-starts", "100", "--train-frequency", "5", "--eval-frequency", "1000",
        "--eval-episodes", "1", "--eval-epsilon", "1", "--checkpoint-frequency", "40", *SMALL,
    ],
}  # fmt: skip
MOMENTS = ["start"] * 3 + ["training"] * 9 + ["checkpoint"] * 8


@dataclass
class Args:
    script: str = "gb_dqn_minigrid"
    """the script, without .py"""
    kills: int = 20
    """how often to kill it"""
    steps: int = 0
    """environment steps; 0 = enough for twenty kills"""
    seed: int = 0
    """of the moments"""


def left_behind(run):
    """All that a finished run leaves, times aside: what must not depend on interruptions."""
    metrics = read_rows(run / "metrics.csv")
    for row in metrics:
        row.pop("charts/SPS")
    state = json.loads((run / "checkpoint" / "state.json").read_text())
    state["logged"].pop()
    # Checksums hold times, and torch.save writes no canonical form.
    for name in ("training_seconds", "tensors_crc32", "state_crc32"):
        state.pop(name)
    result = json.loads((run / "result.json").read_text())
    for name in ("sps", "training_seconds", "wall_seconds"):
        result.pop(name)
    weights = torch.load(run / "model.pt", weights_only=True)
    with np.load(run / "checkpoint" / "arrays.npz") as file:
        replay = {name: array.tobytes() for name, array in file.items()}
    with np.load(run / "checkpoint" / "graph.npz") as file:
        graph = {name: array.tobytes() for name, array in file.items()}
    return {
        "metrics": metrics,
        "evaluations": (run / "evaluations.csv").read_text(),
        "state": state,
        "result": result,
        "weights": {name: tensor.numpy().tobytes() for name, tensor in weights.items()},
        "replay": replay,
        "graph": graph,
    }


def run_in(folder):
    """The folder of the only run in a folder, or None."""
    runs = list(folder.iterdir()) if folder.exists() else []
    return runs[0] if runs else None


class Process:
    """One start of a script: a new run in an empty folder, or the one that is there, resumed."""

    def __init__(self, script, flags, folder):
        run = run_in(folder)
        flags = ["--resume", str(run)] if run else [*flags, "--run-dir", str(folder)]
        self.folder, self.log = folder, folder.with_name("log")
        self._log_file = self.log.open("w")
        self.popen = subprocess.Popen(
            [sys.executable, "-u", str(ROOT / f"{script}.py"), *flags],
            stdout=self._log_file, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait_until(self, holds):
        """Until something holds. False if the script ended before."""
        while not holds():
            if self.popen.poll() is not None:
                return False
            time.sleep(0.0005)
        return True

    def trains(self):
        return "step/s" in self.log.read_text()

    def is_saving(self):
        run = run_in(self.folder)
        return run is not None and (run / "checkpoint.new").exists()

    def end(self):
        """Wait for the end, which has to be a good one."""
        if self.popen.wait() != 0:
            raise RuntimeError(f"{self.popen.args}:\n{self.log.read_text()}")
        self._log_file.close()

    def kill_at(self, moment, rng, pause):
        """Kill it. Returns what it was at, or None if it ended before.

        pause: seconds, the longest wait after the moment came.
        """
        if moment != "start":
            if not self.wait_until(self.trains):
                return None
            if moment == "training":
                time.sleep(rng.uniform(0, pause))
            else:
                for _ in range(rng.integers(1, 4)):
                    if not self.wait_until(lambda: not self.is_saving()):
                        return None
                    if not self.wait_until(self.is_saving):
                        return None
                time.sleep(rng.uniform(0, 0.005))
        else:
            time.sleep(rng.uniform(0, pause))
        if self.popen.poll() is not None:
            return None
        self.popen.kill()
        self.popen.wait()
        self._log_file.close()
        run = run_in(self.folder)
        if run is not None and (run / "checkpoint.old").exists():
            return "swapping checkpoints"
        if run is not None and (run / "checkpoint.new").exists():
            return "writing a checkpoint"
        return "starting" if moment == "start" else "training"


def has_checkpoint(run):
    return any((run / name / "state.json").exists() for name in ("checkpoint", "checkpoint.old"))


def main():
    args = tyro.cli(Args)
    if args.script not in FLAGS:
        fail(f"--script must be one of {', '.join(FLAGS)}, got {args.script!r}")
    if args.kills < 1:
        fail(f"--kills must be >= 1, got {args.kills}")
    rng = np.random.default_rng(args.seed)
    flags = FLAGS[args.script] + (["--total-timesteps", str(args.steps)] if args.steps else [])
    moments = rng.permutation(np.resize(rng.permutation(MOMENTS), args.kills)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "alone" / "runs"
        alone.parent.mkdir()
        begin = time.perf_counter()
        Process(args.script, flags, alone).end()
        seconds = time.perf_counter() - begin
        expected = left_behind(run_in(alone))
        training = expected_seconds(run_in(alone))
        print(
            f"{args.script}: left alone it takes {seconds:.0f} s, {training:.1f} s of it training"
        )

        kills, num_runs, differences, from_scratch = Counter(), 0, [], 0
        while moments:
            num_runs += 1
            runs = Path(folder) / f"killed_{num_runs}" / "runs"
            runs.parent.mkdir()
            while True:
                process = Process(args.script, flags, runs)
                if not moments:
                    process.end()
                    break
                pause = seconds - training if moments[-1] == "start" else 2 * training / args.kills
                killed_at = process.kill_at(moments[-1], rng, pause)
                if killed_at is None:
                    process.end()
                    break
                moments.pop()
                kills[killed_at] += 1
                run = run_in(runs)
                if run is None or not has_checkpoint(run):
                    from_scratch += 1
                    runs = runs.with_name(f"{runs.name}_")
                else:
                    print(f"  killed while {killed_at}", flush=True)
            got = left_behind(run_in(runs))
            differences += [name for name in expected if got[name] != expected[name]]
    print(
        f"{sum(kills.values())} kills ({', '.join(f'{n} {what}' for what, n in kills.items())}), "
        f"{from_scratch} before there was a checkpoint, in {num_runs} runs: "
        f"{'differences in ' + ', '.join(differences) if differences else 'no difference'}"
    )
    sys.exit(bool(differences))


def expected_seconds(run):
    return json.loads((run / "result.json").read_text())["training_seconds"]


if __name__ == "__main__":
    main()
