"""Time scripts by their command line: steps per second of every backup, and their ratios.

    python tools/speed.py
    python tools/speed.py --scripts gb_rainbow_atari --variants default bf16=true
    python tools/speed.py --scripts gb_dqn_minigrid old/gb_dqn_minigrid.py --backups graph

Short runs take turns, A B C A B C, so that whatever else the machine does slows all of them alike.
Rates are those that a run logs (charts/SPS) once it has learned for --warm-up-steps. Read the
ratios: each is taken within a turn, and its median over the turns is shown.
"""

import itertools
import platform
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from gbtools.recorded import load_script
from gbtools.runs import flags_in, markdown, read_rows, words_of
from scipy import stats

from gbcore.run import Count, NonNegative, fail, one_line_errors

STEPS = {"gb_rainbow_atari": (100, 200)}  # of learning before the clock starts, and on the clock


@dataclass
class Args:
    scripts: tuple[str, ...] = ("gb_dqn_minigrid", "gb_dqn_minatar", "gb_rainbow_atari")
    """names or paths; of two with the same name, the first is what the other is compared with"""
    env_ids: tuple[str, ...] = ()  # tasks, of each script; none: the script's own
    backups: tuple[str, ...] = ("one-step", "n-step", "tree", "graph", "graph-mixed")
    """the first is what the others are compared with"""
    variants: tuple[str, ...] = ("default",)  # flags of each backup in turn: default bf16=true
    turns: Count = 3  # runs of each
    warm_up_steps: NonNegative = 0
    """steps of learning before the clock starts; 0 = 1,000, with Atari 100"""
    steps: NonNegative = 0
    """on the clock; 0 = 8,000 (a period of the target network), with Atari 200"""


def rate(run, first_step):
    """Steps per second of a finished run, of its rows that begin at some step or later."""
    rows = read_rows(run / "metrics.csv")
    ends = np.array([0] + [int(row["global_step"]) for row in rows])
    rates = np.array([float(row["charts/SPS"]) for row in rows])
    counted = ends[:-1] >= first_step
    return stats.hmean(rates[counted], weights=np.diff(ends)[counted])


def timed(args, script, env_id, backup, variant):
    """Run a script: its task and steps per second."""
    stem = Path(script).stem
    warm_up, steps = STEPS.get(stem, (1_000, 8_000))
    warm_up, steps = args.warm_up_steps or warm_up, args.steps or steps
    module = load_script(script)
    flags = {"backup": backup, "eval_frequency": 0, "eval_episodes": 1, "save_model": False}
    words = words_of(flags | ({"env_id": env_id} if env_id else {}) | flags_in(variant))
    known = tyro.cli(module.Args, args=words)
    first_step = known.learning_starts + warm_up
    words += words_of({"total_timesteps": first_step + steps, "log_frequency": max(steps // 8, 1)})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, module.__file__, *words, "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or "failed").splitlines()[-1]
            fail(f"{stem} {shlex.join(words)}: {reason}")
        (run,) = Path(folder).iterdir()
        result, task = rate(run, first_step), module.task_of(known.env_id)
    print(script, task, backup, variant, result, file=sys.stderr)
    return task, result


def table(rates):
    """Markdown of name -> steps per second of each turn."""
    first, lines = next(iter(rates)), []
    for name, turns in rates.items():
        low, middle, high = np.quantile(turns, [0, 0.5, 1])
        least, ratio, most = np.quantile(np.divide(turns, rates[first]), [0, 0.5, 1])
        cell = f"**{middle:,.1f}** ({low:,.1f} to {high:,.1f})"
        lines.append([name, cell, f"{ratio:.2f} ({least:.2f} to {most:.2f})"])
    return markdown(["backup", "steps/s (range)", f"of {first} (range)"], lines)


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    if not (args.backups and args.variants):
        fail("Require one or more --backups and --variants")
    rates = {}  # script's name, task -> name of a row -> steps per second of each turn
    contestants = args.scripts, args.env_ids or [""], args.backups, args.variants
    for script, env_id, backup, variant in [*itertools.product(*contestants)] * args.turns:
        task, result = timed(args, script, env_id, backup, variant)
        name = backup + f", {variant}" * (variant != "default") + f" ({script})" * ("/" in script)
        rates.setdefault(f"`{Path(script).stem}.py`, {task}", {}).setdefault(name, []).append(
            result
        )
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"{hardware}; torch {torch.__version__}")
    for title, of_task in rates.items():
        print(f"\n{title}\n\n{table(of_task)}")


if __name__ == "__main__":
    main()
