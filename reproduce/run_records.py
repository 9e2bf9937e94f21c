"""What identifies a run, and the rows that finished runs leave in a folder of results.

A run is one script with one set of flags. Its key is (suite, task, backup, variant, episode seed,
seed); the variant names every flag that can change a result and is not at its default. Two runs
with one key make the same experiment, wherever and on whatever they run; on one machine, with one
number of threads, they compute the same digits.
"""

import fcntl
import functools
import importlib
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import folders  # noqa: F401  (the tools)
from gbtools.output import read_rows, warn, write_rows
from gbtools.runs import (
    WITHOUT_EFFECT,
    read_columns,
    read_config,
    read_json,
    read_result,
    read_returns,
    run_folders,
)

from gbcore.run.flags import idle_flags


class Suite(NamedTuple):
    script: str
    tasks: list
    total_timesteps: int


MINIGRID = "Empty-8x8 DoorKey-6x6 KeyCorridorS3R1 SimpleCrossingS9N2 LavaCrossingS9N2".split()
HARD = "KeyCorridorS3R3 MultiRoom-N4-S5 DoorKey-8x8 LavaCrossingS9N3 FourRooms".split()
MINATAR = "seaquest breakout asterix freeway space_invaders".split()
ATARI = (
    "freeway breakout kangaroo krull qbert "  # on these backups differ most
    "alien amidar assault asterix bank_heist battle_zone boxing chopper_command crazy_climber "
    "demon_attack frostbite gopher hero jamesbond kung_fu_master ms_pacman pong private_eye "
    "road_runner seaquest up_n_down"
).split()
SUITES = {
    "minigrid": Suite("gb_dqn_minigrid", MINIGRID, 100_000),
    "minigrid-hard": Suite("gb_dqn_minigrid", HARD, 200_000),
    "minatar": Suite("gb_dqn_minatar", MINATAR, 100_000),
    "minatar-1m": Suite("gb_dqn_minatar", MINATAR, 1_000_000),
    "atari100k": Suite("gb_rainbow_atari", ATARI, 100_000),
}
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


NUMBERS = "score steps wall_seconds steps_per_second novel_state_ratio".split()
ROW = [*Key._fields, *NUMBERS, "states", "commit"]


def script_of(suite):
    """The script's module."""
    return importlib.import_module(SUITES[suite].script)


@functools.cache
def tasks_of(suite):
    """Names of a suite's tasks, as its script writes them."""
    return tuple(map(script_of(suite).task_of, SUITES[suite].tasks))


def backups_of(suite):
    """What --backup of the suite's script takes."""
    return get_args(get_type_hints(script_of(suite).Args)["backup"])


def flags_of(suite, **changed):
    """All flags of a run of a suite, as config.json holds them; others at the backup's defaults.

    Raises:
        KeyError: for a flag that the script does not have.
    """
    flags_class = script_of(suite).Args
    decide = {name: changed[name] for name in ("backup", "num_levels") if name in changed}
    args = asdict(flags_class(**decide))
    for name in changed.keys() - args.keys() - {"script"}:
        raise KeyError(name)
    return args | {"total_timesteps": SUITES[suite].total_timesteps} | changed


def key_of(suite, config):
    """Key of a run with these flags; a flag that is missing is at its default."""
    if config["backup"] not in backups_of(suite):
        raise ValueError(f"Require a backup of {suite}, got {config['backup']!r}")
    script = script_of(suite)
    decide = {name: config[name] for name in ("backup", "num_levels") if name in config}
    normal, config = flags_of(suite, **decide), flags_of(suite, **config)
    if "num_levels" in decide:  # it decides other defaults, and is in the variant itself
        normal["num_levels"] = script.Args.num_levels
    config.pop("script", None)
    idle = WITHOUT_EFFECT | IN_KEY | idle_flags(script.Args(**config)).keys()
    changed = [name for name in sorted(normal.keys() - idle) if config[name] != normal[name]]
    variant = " ".join(f"{name}={config[name]}" for name in changed)
    task, episode_seed = script.task_of(config["env_id"]), config.get("episode_seed", "")
    return Key(suite, task, config["backup"], variant, episode_seed, config["seed"])


def measurements(folder):
    """What a finished run measured: a dict of the columns of ROW after the key, and the curve.

    Raises:
        ValueError: for a file that is damaged.
    """
    result = read_result(folder)
    states = read_columns(folder / "metrics.csv", "graph/nodes")
    row = {
        "score": result["score"],
        "steps": result["steps"],
        # Of a resumed run, result.json has the last part's wall time but all of the training's.
        "wall_seconds": round(max(result["wall_seconds"], result["training_seconds"]), 1),
        "steps_per_second": round(result["sps"], 1),
        "novel_state_ratio": round(result["novel_state_ratio"], 5),
        "states": int(states[-1][1]) if states else "",
        "commit": dict(result.get("versions", {})).get("commit") or "",
    }
    means = {step: math.fsum(found) / len(found) for step, found in read_returns(folder).items()}
    return row, means


def finished_runs(run_dir, suites, wanted=(), known=()):
    """Key -> measurements of every finished run in run_dir that belongs to one of the suites.

    A run belongs to a suite by its script, number of steps and task, or if its key is wanted. Of a
    known key nothing is measured: None. A damaged run is left out, and named.
    """
    found, others = {}, 0
    for folder in run_folders(run_dir):
        try:
            if (result := read_result(folder)) is None:
                continue
            config, belongs = read_config(folder), False
            for suite in (name for name in suites if SUITES[name].script == result.get("script")):
                key = key_of(suite, config)
                same_steps = config["total_timesteps"] == SUITES[suite].total_timesteps
                is_asked_for = (same_steps and key.task in tasks_of(suite)) or key in wanted
                belongs |= is_asked_for
                if is_asked_for and key not in found:
                    found[key] = None if key in known else measurements(folder)
            others += not belongs
        except (Exception, SystemExit) as error:  # whatever a damaged run raises, by name
            reason = error if isinstance(error, (OSError, ValueError)) else repr(error)
            warn(f"left out: {folder}: {reason}")
    if others and not wanted:
        print(f"left out: {others} finished runs of other scripts, tasks or steps than the suites'")
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

    def rows(self, *suites):
        """Key -> row, a dict of text whose NUMBERS are such; others are left out, and named."""
        return self._read("", NUMBERS[:1], suites)

    def curves(self, suite):
        """Key -> curve, a dict step -> mean return."""
        found = {}
        for key, row in self._read("_curves", (), [suite]).items():
            steps = [step for step in row.keys() - set(Key._fields) if row[step]]
            found[key] = {int(step): float(row[step]) for step in steps}
        return found

    def _read(self, ending, numbers, suites):
        found = {}
        for path in (self.folder / f"{suite}{ending}.csv" for suite in suites):
            for number, row in enumerate(read_rows(path) if path.exists() else (), 2):
                try:
                    parts = {field: row[field] for field in Key._fields}
                    key = Key(**parts | {"seed": int(row["seed"])})
                    if not all(math.isfinite(float(row[name])) for name in numbers):
                        raise ValueError("a number that is not finite")
                    found[key] = row
                except ValueError as error:
                    warn(f"left out: {path}, line {number}: {error}")
        return found

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
                good, rows = self.rows(suite), self._read("", (), [suite])
                curves = self._read("_curves", (), [suite])
                for key, (row, curve) in found.items():
                    if key.suite == suite and key not in good:
                        number += 1
                        rows[key] = key._asdict() | {n: str(value) for n, value in row.items()}
                        means = {str(step): f"{mean:.4g}" for step, mean in curve.items()}
                        curves[key] = key._asdict() | means
                # Curves first: a row says that the run is recorded, and is not added again.
                steps = {c for row in curves.values() for c in row if c not in Key._fields}
                columns = (*Key._fields, *sorted(steps, key=int))
                self._write(f"{suite}_curves", columns, curves)
                older = [name for row in rows.values() for name in row]  # columns of older code
                self._write(suite, dict.fromkeys([*ROW, *older]), rows)
        finally:
            os.close(lock)
        return number

    def checked_defaults(self, suite):
        """Content of defaults.json with those of the suite's script.

        Flags that the script no longer has are left out; without a row they are at the default.
        """
        script = SUITES[suite].script
        path = self.folder / "defaults.json"
        known = read_json(path) if path.exists() else {}
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
