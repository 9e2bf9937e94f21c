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
from gbtools.runs import markdown, read_rows, words_of

from gbcore.run import Count, NonNegative, fail, one_line_errors

# Script -> task, steps of learning before the clock starts, steps on the clock.
DEFAULTS = {
    "gb_dqn_minigrid": ("Empty-8x8", 1_000, 8_000),
    "gb_dqn_minatar": ("freeway", 1_000, 8_000),
    "gb_rainbow_atari": ("Freeway", 100, 200),
}
OTHER = "", 1_000, 8_000
LOGGED = 8  # rows of metrics.csv on the clock


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(DEFAULTS)
    """names or paths; of two with the same name, the first is what the other is compared with"""
    env_ids: tuple[str, ...] = ()
    """tasks, of each script; none: Empty-8x8, MinAtar's freeway or Freeway"""
    backups: tuple[str, ...] = ("one-step", "n-step", "tree", "graph", "graph-mixed")
    """the first is what the others are compared with"""
    variants: tuple[str, ...] = ("default",)  # flags of each backup in turn: default bf16=true
    turns: Count = 3  # runs of each
    warm_up_steps: NonNegative = 0
    """steps of learning before the clock starts; 0 = 1,000, with Atari 100"""
    steps: NonNegative = 0
    """on the clock; 0 = 8,000 (a period of the target network), with Atari 200"""


def rate(run, first_step):
    """Steps per second of a finished run from some step on, and how many steps these are."""
    rows = read_rows(run / "metrics.csv")
    ends = np.array([0] + [int(row["global_step"]) for row in rows])
    rates = np.array([float(row["charts/SPS"]) for row in rows])
    counted = ends[:-1] >= first_step
    steps = np.diff(ends)[counted]
    return steps.sum() / (steps / rates[counted]).sum(), int(steps.sum())


def timed(args, script, env_id, backup, variant):
    """Run a script: what of it and its steps per second."""
    stem = Path(script).stem
    default_id, warm_up, steps = DEFAULTS.get(stem, OTHER)
    warm_up, steps = args.warm_up_steps or warm_up, args.steps or steps
    module = load_script(script)
    words = ["--backup", backup]
    if env_id or default_id:
        words += ["--env-id", env_id or default_id]
    if variant != "default":
        given = (part.replace("-", "_").partition("=")[::2] for part in variant.split())
        words += words_of(dict(given), module)
    known = tyro.cli(module.Args, args=words)
    first_step = known.learning_starts + warm_up
    length = {"total_timesteps": first_step + steps, "log_frequency": max(steps // LOGGED, 1)}
    words += words_of(length | {"eval_frequency": 0, "eval_episodes": 1, "save_model": False})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, module.__file__, *words, "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or "failed").splitlines()[-1]
            fail(f"{stem} {shlex.join(words)}: {reason}")
        (run,) = Path(folder).iterdir()
        result, counted = rate(run, first_step)
    return {
        "script": script, "task": module.task_of(known.env_id), "backup": backup,
        "variant": variant, "steps": counted, "steps_per_second": result,
    }  # fmt: skip


def tables(rows):
    """Markdown of such rows: a table for each script's name and task."""
    result = []
    for key in dict.fromkeys((Path(row["script"]).stem, row["task"]) for row in rows):
        group = [row for row in rows if (Path(row["script"]).stem, row["task"]) == key]
        several, rates = len({row["script"] for row in group}) > 1, {}  # name -> of each turn
        for row in group:
            name = row["backup"] + f", {row['variant']}" * (row["variant"] != "default")
            name += f" ({row['script']})" * several
            rates.setdefault(name, []).append(row["steps_per_second"])
        first, lines = next(iter(rates)), []
        for name, turns in rates.items():
            low, middle, high = map(short, np.quantile(turns, [0, 0.5, 1]))
            ratios = np.quantile(np.divide(turns, rates[first]), [0.5, 0, 1])
            spread = "{:.2f} ({:.2f} to {:.2f})".format(*ratios)
            lines.append([name, f"**{middle}** ({low} to {high})", spread])
        header = ["backup", "steps/s (range)", f"of {first} (range)"]
        result.append(f"`{key[0]}.py`, {key[1]}\n\n{markdown(header, lines)}\n")
    return "\n".join(result)


def short(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    if not (args.backups and args.variants):
        fail("Require one or more --backups and --variants")
    rows = []
    contestants = args.scripts, args.env_ids or [""], args.backups, args.variants
    for contestant in [*itertools.product(*contestants)] * args.turns:
        rows.append(timed(args, *contestant))
        print(*rows[-1].values(), file=sys.stderr)
    on_gpu = torch.cuda.is_available()
    hardware = torch.cuda.get_device_name() if on_gpu else platform.machine()
    print(f"{hardware}; torch {torch.__version__}\n\n{tables(rows)}")


if __name__ == "__main__":
    main()
