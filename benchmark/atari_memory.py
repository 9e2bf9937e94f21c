"""What an Atari replay costs: memory per transition, and to write and to read a checkpoint.

    python benchmark/atari_memory.py

A run of random actions fills the replay and ends in a checkpoint. The script's process is watched
from outside while it writes one; then the checkpoint is read here.
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bounded_memory import resident_mb  # noqa: E402
from output import fail  # noqa: E402

from gbcore import TransitionGraph  # noqa: E402
from gbcore.run import load_checkpoint  # noqa: E402


@dataclass
class Args:
    env_id: str = "Freeway"  # the game
    steps: int = 100_000  # transitions to record
    folder: Path | None = None  # where the run is written; default: the folder for temporary files


def watch(process, folder):
    """Until a process ends: seconds that it wrote its last checkpoint, MB before and at most."""
    before = most = seconds = 0.0
    begin = None
    while process.poll() is None:
        now = resident_mb(process.pid)
        if any(folder.glob("*/checkpoint.new")):
            begin = begin or time.perf_counter()
            seconds, most = time.perf_counter() - begin, max(most, now)
        else:
            before, most, begin = (now, now, None) if begin is None else (before, most, begin)
        time.sleep(0.005)
    return seconds, before, most


def main():
    args = tyro.cli(Args)
    if args.steps < 1:
        fail(f"--steps must be >= 1, got {args.steps}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        flags = {
            "env-id": args.env_id, "total-timesteps": args.steps, "learning-starts": args.steps,
            "end-e": 1, "eval-frequency": 0, "eval-episodes": 1, "threads": 1, "run-dir": folder,
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        process = subprocess.Popen(
            [sys.executable, ROOT / "gb_rainbow_atari.py", *words, "--no-cuda"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        seconds, before, most = watch(process, Path(folder))
        if process.returncode:
            fail(process.stderr.read().strip().splitlines()[-1])
        (run,) = Path(folder).iterdir()
        size = sum(path.stat().st_size for path in (run / "checkpoint").iterdir()) / 1e6
        print(
            f"{args.steps:,} transitions: a checkpoint of {size:.0f} MB written in {seconds:.1f} s "
            f"with {most - before:.0f} MB more memory than {before:.0f}"
        )
        begin, before = time.perf_counter(), resident_mb()
        tree = load_checkpoint(run)
        graph = TransitionGraph.from_state(tree["graph"])
        print(f"read and checked in {time.perf_counter() - begin:.1f} s")
        del tree
        used = 1e6 * (resident_mb() - before)
        print(
            f"{graph.num_nodes:,} states, {graph.num_frames:,} frames: "
            f"{used / args.steps:.0f} bytes per transition"
        )


if __name__ == "__main__":
    main()
