"""Run the scripts of another copy of this code and ours with the same flags, and compare the runs.

    python benchmark/same_runs.py ../before --scripts gb_dqn_minigrid --backups graph tree

Metrics (but for charts/SPS), evaluations, weights and graph have to be the same, bit for bit. Exit
status 1 if anything differs.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from gbtools import ROOT
from gbtools.output import arguments, lasting_output
from kill_and_resume import outcome

FLAGS = {
    "gb_dqn_minigrid": "--env-id DoorKey-5x5 --total-timesteps 3000 --learning-starts 500",
    "gb_dqn_minatar": "--env-id asterix --total-timesteps 3000 --learning-starts 500",
    "gb_rainbow_atari": "--env-id Breakout --total-timesteps 600 --learning-starts 400 "
    "--curve-episodes 1 --eval-episodes 2 --exploration-steps 300 --no-cuda",
    "examples/gb_dqn_gymnasium": "--env-id Taxi-v4 --total-timesteps 3000 --learning-starts 500",
}
SMALL = "--target-network-frequency 700 --eval-frequency 290 --log-frequency 100 --threads 1"


@dataclass
class Args:
    other: tyro.conf.Positional[Path]  # folder of the other copy
    scripts: tuple[str, ...] = tuple(FLAGS)  # without .py
    backups: tuple[str, ...] = ("one-step", "n-step", "tree", "graph", "graph-mixed")
    explorations: tuple[str, ...] = ("epsilon-greedy", "frontier")
    flags: str = ""  # more of them, for all


def run_of(root, script, flags):
    """What a run leaves."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, root / f"{script}.py", *flags, "--run-dir", folder]
        how = {"stdout": subprocess.DEVNULL, "env": os.environ | {"PYTHONPATH": str(root)}}
        subprocess.run(command, cwd=root, check=True, **how)
        return outcome(*Path(folder).iterdir())


@lasting_output()
def main():
    args, failed = arguments(Args, __doc__), False
    for script, *choice in itertools.product(args.scripts, args.backups, args.explorations):
        flags = [*FLAGS[script].split(), *SMALL.split(), *args.flags.split()]
        flags += ["--backup", choice[0], "--exploration", choice[1]]
        found = [run_of(root, script, flags) for root in (args.other.resolve(), ROOT)]
        differ = [name for name in found[0] if found[0][name] != found[1][name]]
        failed |= bool(differ)
        print(script, *choice, "differs in" if differ else "the same", *differ, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
