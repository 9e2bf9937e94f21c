"""What identifies a run, and the rows that finished runs leave in results.

A run is one script with one set of flags. Its key is (suite, task, backup, variant, episode seed,
seed); the variant names every flag that can change a result and is not at its default. Two runs
with one key make the same experiment, wherever and on whatever they run; on one machine, with one
number of threads, they compute the same digits.
"""

import contextlib
import csv
import fcntl
import importlib
import io
import json
import math
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

from output import read_rows

ROOT = Path(__file__).resolve().parents[1]

MINIGRID = ("Empty-8x8", "DoorKey-6x6", "KeyCorridorS3R1", "SimpleCrossingS9N2", "LavaCrossingS9N2")
MINIGRID_HARD = (
    "KeyCorridorS3R3",
    "MultiRoom-N4-S5",
    "DoorKey-8x8",
    "LavaCrossingS9N3",
    "FourRooms",
)
MINATAR = ("seaquest", "breakout", "asterix", "freeway", "space_invaders")
# The five on which the paper's backups differ most come first.
ATARI100K = (
    "freeway", "breakout", "kangaroo", "krull", "qbert", "alien", "amidar", "assault", "asterix",
    "bank_heist", "battle_zone", "boxing", "chopper_command", "crazy_climber", "demon_attack",
    "frostbite", "gopher", "hero", "jamesbond", "kung_fu_master", "ms_pacman", "pong",
    "private_eye", "road_runner", "seaquest", "up_n_down",
)  # fmt: skip


class Suite(NamedTuple):
    script: str
    tasks: tuple
    total_timesteps: int


SUITES = {
    "minigrid": Suite("gb_dqn_minigrid", MINIGRID, 100_000),
    "minigrid-hard": Suite("gb_dqn_minigrid", MINIGRID_HARD, 200_000),
    "minatar": Suite("gb_dqn_minatar", MINATAR, 100_000),
    "minatar-1m": Suite("gb_dqn_minatar", MINATAR, 1_000_000),
    "atari100k": Suite("gb_rainbow_atari", ATARI100K, 100_000),
}
BACKUPS = ("graph", "tree", "n-step", "one-step", "graph-mixed")

# Flags that say where and how a run is computed, not what.
WITHOUT_EFFECT = {
    "run_dir", "resume", "track", "wandb_project_name", "wandb_entity", "capture_video",
    "save_model", "threads", "cuda", "cuda_graphs", "torch_deterministic", "log_frequency",
    "checkpoint_frequency",
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


# --------------------------------------------------------------------------------------------------
# What identifies a run
# --------------------------------------------------------------------------------------------------


def script_of(suite):
    """The script's module."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(SUITES[suite].script)


def flags_of(suite, **changed):
    """All flags of a run of a suite, as config.json holds them.

    Raises:
        KeyError: for a flag that the script does not have.
    """
    args = asdict(script_of(suite).Args())
    if "buffer_size" in changed and changed["buffer_size"] == changed.get("total_timesteps"):
        changed = changed | {"buffer_size": 0}
    for name in changed:
        if name not in args:
            raise KeyError(name)
    return args | {"total_timesteps": SUITES[suite].total_timesteps} | changed


def key_of(suite, config):
    """Key of a run with these flags; a flag that is missing is at its default."""
    script = script_of(suite)
    task_of = getattr(script, "task_of", None) or script.game_of
    normal, config = flags_of(suite), flags_of(suite, **config)
    backup = config["backup"]
    idle = set()  # flags that this backup does not read
    if script.BACKUPS[backup][0] == "trajectory":
        idle.add("breadth")
    if backup == "one-step":
        idle.add("depth")
    if config["exploration"] != "frontier":
        idle |= {name for name in config if name.startswith("frontier_")}
    changed = [
        f"{name}={config[name]}"
        for name in sorted(normal)
        if name not in WITHOUT_EFFECT | IN_KEY | idle and config[name] != normal[name]
    ]
    return Key(
        suite, task_of(config["env_id"]), backup, " ".join(changed),
        config.get("episode_seed", ""), config["seed"],
    )  # fmt: skip


def parse_override(suite, text):
    """Name and value of a flag given as name=value, the value in the flag's own type.

    Raises:
        KeyError: for a flag that the script does not have.
        ValueError: for a value that is none, or of another type.
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    types = {field.name: field.type for field in fields(script_of(suite).Args)}
    if name not in types:
        raise KeyError(name)
    if not equals:
        raise ValueError(f"require name=value, got {text!r}")
    if types[name] is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return name, value.lower() == "true"
    if types[name] in (int, float):
        try:
            return name, types[name](value)
        except ValueError:
            raise ValueError(
                f"{name} must be of type {types[name].__name__}, got {value!r}"
            ) from None
    return name, value


# --------------------------------------------------------------------------------------------------
# What a run's folder says
# --------------------------------------------------------------------------------------------------


def read_json(path):
    """Content of a JSON file; None where there is none, or half of one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def run_folders(run_dir):
    """Folders of runs in run_dir and in its folders, in order of their names."""
    found = [*Path(run_dir).glob("*/config.json"), *Path(run_dir).glob("*/*/config.json")]
    return sorted(path.parent for path in found)


def is_finished(folder):
    """Whether the run went to its end: result.json is written last."""
    result = read_json(folder / "result.json")
    return bool(result) and not result["interrupted"] and result["score"] is not None


def checkpoint_step(folder):
    """Step of the checkpoint that a run can be resumed from; None without one."""
    for name in ("checkpoint", "checkpoint.old"):
        state = read_json(folder / name / "state.json")
        if state is not None:
            return state["step"]
    return None


def progress_of(folder):
    """Last step and its rate, of metrics.csv; zeros before the first row."""
    try:
        with (folder / "metrics.csv").open(newline="") as file:
            header = next(csv.reader(file))
            file.seek(max(0, os.path.getsize(file.name) - 2_000))
            lines = file.read().splitlines()[1:]  # of the first one, part may be missing
    except (OSError, StopIteration):
        return 0, 0.0
    for line in reversed(lines):
        row = dict(zip(header, line.split(","), strict=False))
        with contextlib.suppress(KeyError, ValueError):
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
    return row, read_curve(folder)


def read_curve(folder):
    """Step -> mean return of the evaluation after that step."""
    returns = {}
    for row in read_rows(folder / "evaluations.csv"):
        returns.setdefault(int(row["global_step"]), []).append(float(row["episodic_return"]))
    return {step: math.fsum(values) / len(values) for step, values in sorted(returns.items())}


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


# --------------------------------------------------------------------------------------------------
# results
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder):
    """Wait until no other process has the folder locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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

    def keys(self):
        """Keys of all rows."""
        return {key for suite in SUITES for key in self.rows(suite)}

    def rows(self, suite):
        """Key -> row, a dict of text."""
        return dict(self._read(self.folder / f"{suite}.csv"))

    def curves(self, suite):
        """Key -> curve, a dict step -> mean return."""
        return {
            key: {int(name): float(text) for name, text in row.items()
                  if name not in Key._fields and text}
            for key, row in self._read(self.folder / f"{suite}_curves.csv")
        }  # fmt: skip

    def add(self, found):
        """Add what is not there yet. found: Key -> (measurements, curve). Returns how many."""
        if not found:
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 0
        with locked(self.folder):  # other sweeps may write here, too
            for suite in dict.fromkeys(key.suite for key in found):
                self._write_defaults(self._checked_defaults(suite))
                rows = self.rows(suite)
                curves = dict(self._read(self.folder / f"{suite}_curves.csv"))
                new = {k: v for k, v in found.items() if k.suite == suite and k not in rows}
                number += len(new)
                for key, (row, curve) in new.items():
                    rows[key] = key._asdict() | row
                    curves[key] = key._asdict() | {
                        str(step): f"{mean:.4g}" for step, mean in curve.items()
                    }
                # Curves first: a row says that the run is recorded, and is not added again.
                given = {c for row in curves.values() for c in row if c not in Key._fields}
                steps = sorted(given, key=int)
                self._write(self.folder / f"{suite}_curves.csv", (*Key._fields, *steps), curves)
                self._write(self.folder / f"{suite}.csv", ROW, rows)
        return number

    def check_defaults(self, suites):
        """Raise where rows of the scripts of these suites were made with other defaults."""
        for suite in suites:
            self._checked_defaults(suite)

    def _checked_defaults(self, suite):
        """Content of defaults.json with those of the suite's script."""
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

    def _write_defaults(self, defaults):
        _replace(self.folder / "defaults.json", json.dumps(defaults, indent=1) + "\n")

    @staticmethod
    def _read(path):
        if not path.exists():
            return
        for row in read_rows(path):
            parts = {name: row[name] for name in Key._fields} | {"seed": int(row["seed"])}
            yield Key(**parts), row

    @staticmethod
    def _write(path, columns, rows):
        file = io.StringIO(newline="")
        table = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        table.writeheader()
        table.writerows(rows[key] for key in sorted(rows))
        _replace(path, file.getvalue())


def _replace(path, text):
    """Write a file of which nobody ever sees half."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def finished_runs(run_dir, suites, wanted=()):
    """Key -> folder of every finished run in run_dir that belongs to one of the suites.

    A run belongs to a suite by its script and its number of steps, or if its key is wanted.
    """
    found = {}
    for folder in run_folders(run_dir):
        if not is_finished(folder):
            continue
        config, result = read_json(folder / "config.json"), read_json(folder / "result.json")
        if not isinstance(config, dict) or "total_timesteps" not in config:
            print(f"left out: {folder}, whose config.json is damaged", file=sys.stderr)
            continue
        for suite in suites:
            if result["script"] != SUITES[suite].script:
                continue
            try:
                key = key_of(suite, config)
            except KeyError as flag:
                print(f"left out: {folder}, whose flag {flag} is not known here", file=sys.stderr)
                continue
            except SystemExit:  # the script has said that it does not know the task
                print(f"left out: {folder}", file=sys.stderr)
                break
            same_steps = config["total_timesteps"] == SUITES[suite].total_timesteps
            if (same_steps or key in wanted) and key not in found:
                found[key] = folder
    return found
