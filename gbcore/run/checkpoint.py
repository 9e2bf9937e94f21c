"""Checkpoints: all that a run needs to go on, bit for bit.

A checkpoint is a tree: dicts with names, and at their ends arrays and what JSON can hold. Whatever
has `state()`, which returns such a tree, and `restore(tree)` can be a part of one. On disk it is
one NumPy archive, whose zip format has a checksum of each array: a damaged one is noticed, and no
code in it is run. (torch.load and safetensors notice no changed bit.)
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gbcore.arrays import check_array

NAME, TREE = "checkpoint.npz", "tree"  # the file; its entry that is no array, as JSON
FORMAT_VERSION = 7

Tree = dict[str, Any]


def save_checkpoint(run_path: str | Path, parts: Mapping[str, Any]) -> None:
    """Write the state of all parts to RUN/checkpoint.npz.

    The new checkpoint is complete and on disk before it takes the place of the old one: there is
    room for two on the disk, or an error and the old one.

    Raises:
        OSError: for a folder that cannot be written to. The last checkpoint is still there.
    """
    states = {name: part.state() for name, part in parts.items()}
    leaves = dict(_leaves(states))
    arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
    rest = {name: leaf for name, leaf in leaves.items() if name not in arrays}
    content = {"format_version": FORMAT_VERSION, "leaves": rest}
    content = json.dumps(content, default=np.generic.item).encode()
    with replacing(Path(run_path) / NAME) as new:
        np.savez(new, **{TREE: np.frombuffer(content, np.uint8)}, **arrays)
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
    if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
        raise ValueError(f"Require a checkpoint that is a regular file, got {path}")
    try:
        with np.load(path, allow_pickle=False) as file:  # compares checksums
            content = json.loads(bytes(file[TREE]))
            if (version := content["format_version"]) != FORMAT_VERSION:
                raise ValueError(f"Require format {FORMAT_VERSION}, got {version}")
            leaves, tree = content["leaves"], {}
            if arrays:
                leaves |= {name: file[name] for name in file.files if name != TREE}
        for name, leaf in leaves.items():
            *where, last = name.split("|")
            branch = tree
            for step in where:
                branch = branch.setdefault(step, {})
            branch[last] = leaf
        return tree
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"Require a checkpoint in {run_path}, found none (see --checkpoint-frequency)"
        ) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # json, zipfile and NumPy have no error in common
        raise ValueError(f"Require a whole checkpoint, got {path}: {error}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, in place of path: nobody ever sees half a file."""
    new = path.with_name("new." + path.name)  # writers of videos go by the ending
    new.unlink(missing_ok=True)
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def check_numbers(name: str, saved: Any, fresh: Mapping[str, Any]) -> None:
    """ValueError for other names than those of a fresh run's numbers, or for values of other types.

    A fresh None may have become a number; a list holds numbers.
    """
    if not isinstance(saved, dict) or saved.keys() != fresh.keys():
        raise ValueError(f"Require {name} with {sorted(fresh)}")
    for key, value in fresh.items():
        types = (type(None), int, float) if value is None else (type(value),)
        numbers = saved[key] if type(value) is type(saved[key]) is list else ()
        if type(saved[key]) not in types or any(type(n) not in (int, float) for n in numbers):
            raise ValueError(f"Require {name}/{key} like {value!r}, got {saved[key]!r}")


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
            tensors = {key: torch.from_numpy(array) for key, array in state[name].items()}
            network = getattr(self, name)
            network.load_state_dict(tensors)
            if any(tensors[key].dtype != own.dtype for key, own in network.state_dict().items()):
                raise ValueError(f"Require the dtypes of the network {name}")
        options = self.optimizer.param_groups[0]
        on_device = options["capturable"] or options["fused"]
        for name, parameter in self.online.named_parameters():
            of_adam, shape = state["adam"][name], tuple(parameter.shape)
            if of_adam.keys() != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError(f"Require step, exp_avg and exp_avg_sq of {name}")
            for key, array in of_adam.items():  # copy_ would stretch another shape
                check_array(key, array, np.float32, () if key == "step" else shape)
            saved = {key: torch.from_numpy(array) for key, array in of_adam.items()}
            self.optimizer.state[parameter] = {
                "step": saved.pop("step").to(parameter.device if on_device else "cpu").clone(),
                **{key: torch.empty_like(parameter).copy_(value) for key, value in saved.items()},
            }
        for name in self.SAVED:
            if isinstance(getattr(self, name), int):
                check_numbers("learner", {name: state[name]}, {name: getattr(self, name)})
                setattr(self, name, state[name])
            elif getattr(self, name) is not None:
                getattr(self, name).restore(state[name])


def _leaves(tree, *place):
    """Name and value of each end of a tree, a tensor as an array."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, *place, key)
        else:
            is_tensor = isinstance(value, torch.Tensor)
            yield "|".join((*place, key)), value.numpy(force=True) if is_tensor else value


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
