"""What identifies a run, and the rows that finished runs leave in a folder of results.

A run is one script with one set of flags. Its key is (suite, task, backup, variant, episode seed,
seed); the variant names every flag that can change a result and is not at its default. Two runs
with one key make the same experiment, wherever and on whatever they run; on one machine, with one
number of threads, they compute the same digits.
"""

import contextlib
import fcntl
import functools
import importlib
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import folders  # noqa: F401  (the tools)
from output import read_rows, write_rows
from runs import WITHOUT_EFFECT, read_json, read_returns, run_folders

from gbcore.run.flags import idle_flags


class Suite(NamedTuple):
    script: str
    tasks: tuple
    total_timesteps: int


MINATAR = ("seaquest", "breakout", "asterix", "freeway", "space_invaders")
SUITES = {
    "minigrid": Suite(
        "gb_dqn_minigrid",
        ("Empty-8x8", "DoorKey-6x6", "KeyCorridorS3R1", "SimpleCrossingS9N2", "LavaCrossingS9N2"),
        100_000,
    ),
    "minigrid-hard": Suite(
        "gb_dqn_minigrid",
        ("KeyCorridorS3R3", "MultiRoom-N4-S5", "DoorKey-8x8", "LavaCrossingS9N3", "FourRooms"),
        200_000,
    ),
    "minatar": Suite("gb_dqn_minatar", MINATAR, 100_000),
    "minatar-1m": Suite("gb_dqn_minatar", MINATAR, 1_000_000),
    "atari100k": Suite(
        "gb_rainbow_atari",
        (
            "freeway", "breakout", "kangaroo", "krull", "qbert",  # on these backups differ most
            "alien", "amidar", "assault", "asterix", "bank_heist", "battle_zone", "boxing",
            "chopper_command", "crazy_climber", "demon_attack", "frostbite", "gopher", "hero",
            "jamesbond", "kung_fu_master", "ms_pacman", "pong", "private_eye", "road_runner",
            "seaquest", "up_n_down",
        ),
        100_000,
    ),
}  # fmt: skip

IN_KEY = {"env_id", "seed", "backup", "episode_seed"}  # by themselves, not in the variant


class Key(NamedTuple):
    suite: str
    task: str
    backup: str
    variant: str
    episode_seed: str
    seed: int

    def __str__(self):
        return " ".join(str(part) for part in (*self[:-1], f"seed {self.seed}") if part != "")


ROW = (*Key._fields, "score", "steps", "wall_seconds", "steps_per_second", "novel_state_ratio",
       "states", "first_reward_step", "commit")  # fmt: skip


def script_of(suite):
    """The script's module."""
    return importlib.import_module(SUITES[suite].script)


@functools.cache
def tasks_of(suite):
    """Names of a suite's tasks, as its script writes them."""
    return tuple(map(script_of(suite).task_of, SUITES[suite].tasks))


def flags_of(suite, **changed):
    """All flags of a run of a suite, as config.json holds them.

    Raises:
        KeyError: for a flag that the script does not have.
    """
    args = asdict(script_of(suite).Args())
    for name in changed.keys() - args.keys() - {"script"}:
        raise KeyError(name)
    return args | {"total_timesteps": SUITES[suite].total_timesteps} | changed


def key_of(suite, config):
    """Key of a run with these flags; a flag that is missing is at its default."""
    script = script_of(suite)
    normal, config = flags_of(suite), flags_of(suite, **config)
    config.pop("script", None)
    idle = WITHOUT_EFFECT | IN_KEY | idle_flags(script.Args(**config)).keys()
    variant = [
        f"{name}={config[name]}" for name in sorted(normal)
        if name not in idle and config[name] != normal[name]
    ]  # fmt: skip
    return Key(
        suite, script.task_of(config["env_id"]), config["backup"], " ".join(variant),
        config.get("episode_seed", ""), config["seed"],
    )  # fmt: skip


def is_finished(folder):
    """Whether the run went to its end: result.json is written last."""
    result = read_json(folder / "result.json")
    return bool(result) and result.get("interrupted") is False and result.get("score") is not None


def checkpoint_step(folder):
    """Step of the checkpoint that a run can be resumed from; None without one."""
    for name in ("checkpoint", "checkpoint.old"):
        with contextlib.suppress(KeyError, TypeError):
            return read_json(folder / name / "state.json")["content"]["counters"]["step"]
    return None


def progress_of(folder):
    """Last step and its rate, of metrics.csv; zeros before the first row."""
    with contextlib.suppress(OSError):
        for row in reversed(read_rows(folder / "metrics.csv")):
            with contextlib.suppress(ValueError):  # a row that is written just now
                return int(row["global_step"]), float(row["charts/SPS"])
    return 0, 0.0


def measurements(folder):
    """What a finished run measured: a dict of the columns of ROW after the key, and the curve."""
    result = read_json(folder / "result.json")
    states = [row["graph/nodes"] for row in read_rows(folder / "metrics.csv")]
    row = {
        "score": result["score"],
        "steps": result["steps"],
        # Of a resumed run, result.json has the last part's wall time but all of the training's.
        "wall_seconds": round(max(result["wall_seconds"], result["training_seconds"]), 1),
        "steps_per_second": round(result["sps"], 1),
        "novel_state_ratio": round(result["novel_state_ratio"], 5),
        "states": int(states[-1]) if states else "",
        "first_reward_step": first_reward_step(folder),
        "commit": result["versions"].get("commit") or "",
    }
    means = {step: math.fsum(found) / len(found) for step, found in read_returns(folder).items()}
    return row, means


def first_reward_step(folder):
    """Step at which the first training episode with a return above 0 ended; "" if none did."""
    from tensorboard.backend.event_processing import event_accumulator

    # metrics.csv holds one episode per 500 steps, the events hold all of them.
    events = event_accumulator.EventAccumulator(str(folder), {event_accumulator.SCALARS: 0})
    events.Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        return ""
    episodes = events.Scalars("charts/episodic_return")
    return min((episode.step for episode in episodes if episode.value > 0), default="")


def finished_runs(run_dir, suites, wanted=()):
    """Key -> folder of every finished run in run_dir that belongs to one of the suites.

    A run belongs to a suite by its script, number of steps and task, or if its key is wanted.
    """
    found = {}
    for folder in filter(is_finished, run_folders(run_dir)):
        config, result = (read_json(folder / name) for name in ("config.json", "result.json"))
        for suite in (suite for suite in suites if SUITES[suite].script == result["script"]):
            try:
                same_steps = config["total_timesteps"] == SUITES[suite].total_timesteps
                key = key_of(suite, config)
            except (KeyError, TypeError, SystemExit) as error:  # of a flag, or of the task
                print(f"left out: {folder}, config.json is of no run: {error!r}", file=sys.stderr)
                break
            if (same_steps and key.task in tasks_of(suite)) or key in wanted:
                found.setdefault(key, folder)
    return found


class Records:
    """The rows and curves of finished runs: <suite>.csv and <suite>_curves.csv in a folder.

    Rows are only ever added. A curve is one line, its evaluations in columns named by their steps.
    defaults.json holds the defaults that the variants of the rows refer to.

    Raises:
        OSError: where the folder cannot be written to.
        ValueError: where a default of a script is another one now than when rows were made.
    """

    def __init__(self, folder):
        self.folder = Path(folder)

    def rows(self, *names):
        """Key -> row, a dict of text, of the files of these names, as a suite's."""
        found = {}
        for path in (self.folder / f"{name}.csv" for name in names):
            for row in read_rows(path) if path.exists() else ():
                parts = {field: row[field] for field in Key._fields} | {"seed": int(row["seed"])}
                found[Key(**parts)] = row
        return found

    def curves(self, suite):
        """Key -> curve, a dict step -> mean return."""
        return {
            key: {
                int(step): float(row[step]) for step in row.keys() - set(Key._fields) if row[step]
            }
            for key, row in self.rows(f"{suite}_curves").items()
        }

    def add(self, found):
        """Add what is not there yet. found: Key -> (measurements, curve). Returns how many."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not found:
            return 0
        number, lock = 0, os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other sweeps may write here, too
            for suite in dict.fromkeys(key.suite for key in found):
                defaults = json.dumps(self.checked_defaults(suite), indent=1)
                (self.folder / "defaults.new").write_text(defaults + "\n")
                (self.folder / "defaults.new").replace(self.folder / "defaults.json")
                rows, curves = self.rows(suite), self.rows(f"{suite}_curves")
                for key, (row, curve) in found.items():
                    if key.suite == suite and key not in rows:
                        number += 1
                        rows[key] = key._asdict() | {n: str(value) for n, value in row.items()}
                        means = {str(step): f"{mean:.4g}" for step, mean in curve.items()}
                        curves[key] = key._asdict() | means
                # Curves first: a row says that the run is recorded, and is not added again.
                steps = {c for row in curves.values() for c in row if c not in Key._fields}
                columns = (*Key._fields, *sorted(steps, key=int))
                self._write(f"{suite}_curves", columns, curves)
                self._write(suite, ROW, rows)
        finally:
            os.close(lock)
        return number

    def checked_defaults(self, suite):
        """Content of defaults.json with those of the suite's script.

        Flags that the script no longer has are left out; without a row they are at the default.
        """
        script = SUITES[suite].script
        known = read_json(self.folder / "defaults.json") or {}
        now = {k: v for k, v in flags_of(suite).items() if k not in WITHOUT_EFFECT | IN_KEY}
        del now["total_timesteps"]  # the suite says
        for name, value in known.get(script, {}).items():
            if now.get(name, value) != value:
                raise ValueError(
                    f"{script}.py has --{name.replace('_', '-')} {now[name]} by default, the rows "
                    f"in {self.folder} were made with {value}; keep new rows in another folder"
                )
        return known | {script: now}

    def _write(self, name, columns, rows):
        new = self.folder / f"{name}.new"
        write_rows(new, columns, [rows[key] for key in sorted(rows)])
        new.replace(self.folder / f"{name}.csv")
