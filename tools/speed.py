"""Time scripts by their command line: steps per second of every backup, and their ratios.

    python tools/speed.py
    python tools/speed.py --scripts gb_rainbow_atari --variants default bf16=true
    python tools/speed.py --scripts gb_dqn_minigrid old/gb_dqn_minigrid.py --backups graph

Short runs take turns, A B C A B C, so that whatever else the machine does slows all of them alike.
Rates are those that a run logs (charts/SPS) once it has learned for --warm-up-steps. Read the
ratios: each is taken within a turn, and its median over the turns is shown.
"""

import itertools
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import tyro
from gbtools.recorded import load_script
from gbtools.runs import markdown, read_rows, words_of, write_rows

from gbcore.run import Count, NonNegative, fail, one_line_errors

# Script -> task, steps of learning before the clock starts, steps on the clock.
DEFAULTS = {
    "gb_dqn_minigrid": ("Empty-8x8", 1_000, 8_000),
    "gb_dqn_minatar": ("freeway", 1_000, 8_000),
    "gb_rainbow_atari": ("Freeway", 100, 200),
}
COLUMNS = "script task backup variant turn steps steps_per_second".split()
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
    out: Path | None = None  # CSV file of all runs


def rate(run, first_step):
    """Steps per second of a finished run from some step on, and how many steps these are."""
    rows = read_rows(run / "metrics.csv")
    ends = np.array([0] + [int(row["global_step"]) for row in rows])
    rates = np.array([float(row["charts/SPS"]) for row in rows])
    counted = ends[:-1] >= first_step
    steps = np.diff(ends)[counted]
    return steps.sum() / (steps / rates[counted]).sum(), int(steps.sum())


def timed(args, script, env_id, backup, variant):
    """Run a script: columns of a row."""
    stem = Path(script).stem
    _, warm_up, steps = DEFAULTS.get(stem, ("", *DEFAULTS["gb_dqn_minigrid"][1:]))
    warm_up, steps = args.warm_up_steps or warm_up, args.steps or steps
    module = load_script(script)
    words = ["--backup", backup, *(["--env-id", env_id] if env_id else [])]
    if variant != "default":
        words += words_of(dict(part.partition("=")[::2] for part in variant.split()))
    known = tyro.cli(module.Args, args=words)
    task, first_step = module.task_of(known.env_id), known.learning_starts + warm_up
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
    values = script, task, backup, variant, counted, result
    return dict(zip([name for name in COLUMNS if name != "turn"], values, strict=True))


def hardware():
    """The GPU that Atari's script would take, or the processor and its cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = re.findall(r"model name\s*: (.*)", info) or [platform.machine()]
    return f"{names[0]}, {len(os.sched_getaffinity(0))} cores"


def tables(rows):
    """Markdown of rows of COLUMNS: a table for each script's name and task."""
    groups, result = {}, []
    for row in rows:
        groups.setdefault((Path(row["script"]).stem, row["task"]), []).append(row)
    for (script, task), group in groups.items():
        rates = {}  # name -> turn -> steps/s
        several = len({row["script"] for row in group}) > 1
        for row in group:
            name = row["backup"] + f", {row['variant']}" * (row["variant"] != "default")
            name += f" ({row['script']})" * several
            rates.setdefault(name, {})[int(row["turn"])] = float(row["steps_per_second"])
        first, lines = next(iter(rates)), []
        for name, turns in rates.items():
            ratios = [turns[t] / rates[first][t] for t in turns if t in rates[first]]
            low, middle, high = (short(f(turns.values())) for f in (min, median, max))
            spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append([name, f"**{middle}** ({low} to {high})", spread])
        header = ["backup", "steps/s (range)", f"of {first} (range)"]
        result.append(f"`{script}.py`, {task}\n\n{markdown(header, lines)}\n")
    return "\n".join(result)


def short(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    if not (args.backups and args.variants):
        fail("Require one or more --backups and --variants")
    rows = []
    for turn, script in itertools.product(range(args.turns), args.scripts):
        default = DEFAULTS.get(Path(script).stem, ("",))[0]
        tasks = args.env_ids or (default,)
        for contestant in itertools.product(tasks, args.backups, args.variants):
            rows.append(timed(args, script, *contestant) | {"turn": turn})
            print(*(rows[-1][name] for name in COLUMNS[3:]), file=sys.stderr)
            if args.out:
                write_rows(args.out, COLUMNS, rows)  # what there is, if it is stopped
    print(f"{hardware()}; torch {torch.__version__}\n\n{tables(rows)}")


if __name__ == "__main__":
    main()
