"""Checkpoints: all that a run needs to go on, bit for bit.

A checkpoint is a tree: dicts with names, and at their ends arrays and what JSON can hold. Whatever
has `state()`, which returns such a tree, and `restore(tree)` can be a part of one. On disk it is
one NumPy archive, whose zip format has a checksum of each array: a damaged one is noticed, and no
code in it is run. (torch.load and safetensors notice no changed bit.)
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gbcore.arrays import Rows, check_array
from gbcore.run.directory import replacing

NAME, TREE = "checkpoint.npz", "tree"  # the file; its entry that has all but the arrays, as JSON
FORMAT_VERSION = 6

Tree = dict[str, Any]


def save_checkpoint(run_path: str | Path, parts: Mapping[str, Any]) -> None:
    """Write the state of all parts to RUN/checkpoint.npz.

    The new checkpoint is complete and on disk before it takes the place of the old one: there is
    room for two on the disk, or an error and the old one.

    Raises:
        OSError: for a folder that cannot be written to. The last checkpoint is still there.
    """
    arrays = {}
    tree = {name: _without_arrays(part.state(), name, arrays) for name, part in parts.items()}
    content = json.dumps({"format_version": FORMAT_VERSION} | tree, default=np.generic.item)
    with replacing(Path(run_path) / NAME) as new:
        np.savez(new, **{TREE: np.frombuffer(content.encode(), np.uint8)}, **arrays)
        _sync(new)
    _sync(run_path)


def load_checkpoint(run_path: str | Path, arrays: bool = True) -> Tree:
    """The tree that `save_checkpoint` wrote; without its arrays, in no time, if not asked for.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: for another format version, or a file that is cut short or damaged.
        MemoryError: for more than there is memory for.
    """
    path = Path(run_path) / NAME
    try:
        with np.load(path, allow_pickle=False) as file:  # compares checksums
            tree = json.loads(bytes(file[TREE]))
            version = tree.pop("format_version")
            if version != FORMAT_VERSION:
                raise ValueError(f"Require format {FORMAT_VERSION}, got {version}")
            for name in set(file.files) - {TREE} if arrays else ():
                *where, last = name.split("/")
                branch = tree
                for step in where:
                    branch = branch[step]
                branch[last] = file[name]
        return tree
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"Require a checkpoint in {run_path}, found none (see --checkpoint-frequency)"
        ) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # json, zipfile and NumPy have no error in common
        raise ValueError(f"Require a whole checkpoint, got {path}: {error}") from error


def check_like(found: Any, wanted: Any, name: str = "checkpoint") -> None:
    """Raise ValueError, naming the place, for other names, types or shapes than a fresh run's."""
    if isinstance(wanted, torch.Tensor):
        wanted = wanted.numpy(force=True)
    if isinstance(wanted, np.generic):
        wanted = wanted.item()
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            raise ValueError(f"Require {name} with {sorted(wanted)}")
        for key, value in wanted.items():
            of_fresh, of_run = value, found[key]
            if isinstance(wanted, Rows) and value.ndim and np.ndim(of_run) == value.ndim:
                of_fresh, of_run = value[:0], of_run[:0]
            check_like(of_run, of_fresh, f"{name}/{key}")
    elif isinstance(wanted, np.ndarray):
        check_array(name, found, wanted.dtype, wanted.shape)
    elif isinstance(wanted, list):
        if not isinstance(found, list) or not all(type(v) in (int, float) for v in found):
            raise ValueError(f"Require a list of numbers in {name}")
    elif type(found) is not type(wanted) and not (wanted is None and type(found) in (int, float)):
        raise ValueError(f"Require {name} like {wanted!r}, got {found!r}")


class LearnerState:
    """What a checkpoint holds of a learner: its networks, Adam, and what it names in SAVED.

    A learner sets in its own __init__ the networks `online` and `target`, `optimizer`, and each
    attribute that SAVED names: a number, a table with `state` and `restore`, or None.
    """

    SAVED: tuple[str, ...] = ("num_updates",)
    online: torch.nn.Module
    target: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> Tree:
        """What `restore` takes back."""
        adam = {}
        for name, parameter in self.online.named_parameters():
            zeros = torch.zeros_like(parameter)  # moments before the first step
            begin = {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros}
            adam[name] = begin | dict(self.optimizer.state[parameter])
        saved = {name: of for name in self.SAVED if (of := getattr(self, name)) is not None}
        return {
            "online": dict(self.online.state_dict()),
            "target": dict(self.target.state_dict()),
            "adam": adam,
            **{name: of if isinstance(of, int) else of.state() for name, of in saved.items()},
        }

    def restore(self, state: Tree) -> None:
        """Go on from what `state` returned. ValueError or RuntimeError for what cannot be."""
        for name in ("online", "target"):
            arrays = state[name].items()
            getattr(self, name).load_state_dict({key: torch.from_numpy(a) for key, a in arrays})
        options = self.optimizer.param_groups[0]
        on_device = options["capturable"] or options["fused"]
        for name, parameter in self.online.named_parameters():
            saved = {key: torch.from_numpy(array) for key, array in state["adam"][name].items()}
            self.optimizer.state[parameter] = {
                "step": saved.pop("step").to(parameter.device if on_device else "cpu").clone(),
                **{key: torch.empty_like(parameter).copy_(value) for key, value in saved.items()},
            }
        for name in self.SAVED:
            if isinstance(getattr(self, name), int):
                setattr(self, name, state[name])
            elif getattr(self, name) is not None:
                getattr(self, name).restore(state[name])


def _without_arrays(tree, name, arrays):
    """The tree as JSON takes it; its arrays go to `arrays` by their places."""
    if isinstance(tree, torch.Tensor):
        tree = tree.numpy(force=True)
    if isinstance(tree, dict):
        plain = {k: _without_arrays(value, f"{name}/{k}", arrays) for k, value in tree.items()}
        return {k: value for k, value in plain.items() if f"{name}/{k}" not in arrays}
    if isinstance(tree, np.ndarray):
        arrays[name] = tree
    return tree


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
