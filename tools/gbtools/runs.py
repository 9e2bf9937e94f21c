"""Flags and results in run folders; tables."""

import csv
import json
from pathlib import Path

# Flags that say where and how a run is computed, not what.
WITHOUT_EFFECT = set(
    "run_dir resume track wandb_project_name wandb_entity capture_video save_model threads cuda "
    "cuda_graphs torch_deterministic log_frequency checkpoint_frequency".split()
)


def words_of(flags):
    """Words of a command line that give a script these flags, name -> value."""
    words = []
    for name, value in flags.items():
        flag, is_switch = name.replace("_", "-"), isinstance(value, bool)
        words.append(f"--{'' if value else 'no-'}{flag}" if is_switch else f"--{flag}={value}")
    return words


def flags_in(variant):
    """Name -> text or bool, of flags as a variant has them: depth=3 bf16=true; of default none."""
    parts = (part.partition("=") for part in variant.removeprefix("default").split())
    switch = {"true": True, "false": False}
    return {name.replace("-", "_"): switch.get(text.lower(), text) for name, _, text in parts}


def read_rows(path):
    """Whole rows of a CSV file: dicts of text. OSError where it cannot be read."""
    with open(path, newline="", encoding="utf-8") as file:
        # The last row may be cut, as a run goes on.
        return [row for row in csv.DictReader(file) if None not in row.values()]


def markdown(header, rows):
    """A table of rows of text."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def read_config(folder):
    """All flags of a run, and the script that made it."""
    return json.loads((Path(folder) / "config.json").read_text())


def read_result(folder):
    """What a run measured that went to its end; None of another. result.json is written last."""
    path = Path(folder) / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {"interrupted": True}
    return None if result["interrupted"] else result


def run_folders(run_dir):
    """run_dir, its folders and theirs that are of a run, in order of their names."""
    places = ("config.json", "*/config.json", "*/*/config.json")
    return sorted(path.parent for place in places for path in Path(run_dir).glob(place))
