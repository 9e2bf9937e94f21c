"""Checkpoints: all that a run needs to go on, bit for bit.

A part of a checkpoint has `state()`, which returns a tree, and `restore(tree)`. A tree is made of
dicts, lists and tuples, and at its ends of arrays, tensors and all that JSON can hold. On disk it
is one NumPy archive, whose zip format has a checksum of each array: a damaged one is noticed.
(torch.load and safetensors notice no changed bit.)
"""

import contextlib
import functools
import json
import os
import random
import sys
import types
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gbcore.run.output import warn

NAME, TREE = "checkpoint.npz", "tree"  # the file; its entry that is no array, as JSON
FORMAT_VERSION = 12


class Checkpoint:
    """RUN/checkpoint.npz: the state of a run's parts and of all random numbers.

    Args:
        args: the script's flags.
        script: the script's __file__.
        rng: the np.random.Generator of all sampling.
        path: the run's folder.
        parts: each with `state` and `restore`, in the order in which they are restored; "env" has
            `obs`, the observation that it is in.
    """

    path: Path

    def __init__(
        self, args: Any, script: str, rng: np.random.Generator, path: str | Path, **parts: Any
    ) -> None:
        self.path, self._args, self._script, self._rng = Path(path), args, script, rng
        self._parts = parts

    def save(self) -> None:
        """Write the state of all parts. OSError without room for it; the last one is kept."""
        tree = {name: part.state() for name, part in self._parts.items()}
        tree["flags"] = {"script": str(Path(self._script).resolve()), **vars(self._args)}
        tree["module"] = module_file(self._args.env_id)
        tree["obs"] = np.ascontiguousarray(self._parts["env"].obs)
        tree["rng"] = {
            "numpy": self._rng.bit_generator.state,
            "torch": torch.get_rng_state(),
            "random": random.getstate(),  # a user's own code may draw from these two
            "global": np.random.get_state(legacy=False),  # noqa: NPY002
        }
        if torch.cuda.is_available():
            tree["rng"]["cuda"] = torch.cuda.get_rng_state()
        save_checkpoint(self.path, tree)

    def load(self) -> None:
        """Give all parts the state that was saved.

        Raises:
            OSError, ValueError: as `load_checkpoint`; ValueError where a part cannot take what was
                saved, as a network of another size, or the environment is in another state.
        """
        tree = load_checkpoint(self.path)
        require_module(self.path, self._args.env_id, tree["module"])
        for name, part in self._parts.items():
            try:
                part.restore(tree[name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                message = f"cannot go on with {self.path}: {name}: {type(error).__name__}: {error}"
                raise ValueError(message) from error
        if not np.array_equal(self._parts["env"].obs, tree["obs"]):
            raise ValueError(
                f"cannot go on with {self.path}: the episode under way plays otherwise: other "
                "versions of the environment, or chance in it that reset(seed) does not govern"
            )
        self._rng.bit_generator.state = tree["rng"]["numpy"]
        torch.set_rng_state(tree["rng"]["torch"])
        np.random.set_state(tree["rng"]["global"])  # noqa: NPY002
        version, numbers, gauss = tree["rng"]["random"]
        random.setstate((version, tuple(numbers), gauss))
        if torch.cuda.is_available() and "cuda" in tree["rng"]:
            torch.cuda.set_rng_state(tree["rng"]["cuda"])


def module_file(task: str) -> str | None:
    """The file that the module of a task `module:Id-v0` was imported from; None of others."""
    return getattr(sys.modules.get(task.rpartition(":")[0]), "__file__", None)


def require_module(run_path: str | Path, task: str, file: str | None) -> None:
    """ValueError where a run's task is of this file, and another folder has given another one."""
    if file and file != (own := module_file(task)) and os.path.exists(file):
        raise ValueError(f"Require {file}, which {run_path} plays, got {own}: go to its folder")


class LearnerState:
    """Base of a learner: a checkpoint holds all of it that learning changes.

    These are, among its attributes, numbers, tensors, arrays, random generators, whatever has
    `state_dict`, as modules and optimisers, or `state`, as a `LeafTable`; and lists, deques and
    dicts of them. Of others a warning is given. Graph and replay are parts of a checkpoint by
    themselves.
    """

    APART: tuple[str, ...] = ("args", "graph", "replay")  # and whatever learning does not change

    def state(self) -> dict[str, Any]:
        """A tree for `restore`."""
        own = {name: value for name, value in vars(self).items() if name not in self.APART}
        for name, value in own.items():
            if not (_is_saved(value) or isinstance(value, CONSTANT) or name in _told):
                _told.add(name)
                advice = "give it state_dict, or name it in APART"
                warn(f"checkpoints leave out learner.{name}; {advice}")
        return {name: _state_of(value) for name, value in own.items() if _is_saved(value)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a tree of `state`."""
        for name, saved in state.items():
            setattr(self, name, _restored(getattr(self, name, None), saved))


PLAIN = bool, int, float, str, type(None), np.generic, np.ndarray, torch.Tensor
GENERATORS = np.random.Generator, torch.Generator
CONSTANT = (
    torch.device, torch.dtype, type, functools.partial, types.FunctionType, types.MethodType,
    types.ModuleType,
)  # fmt: skip
_told: set[str] = set()  # attributes that were warned of


def _is_saved(value):
    if isinstance(value, (list, tuple, deque, dict)):
        return all(map(_is_saved, value.values() if isinstance(value, dict) else value))
    has_state = all(hasattr(value, name) for name in ("state_dict", "load_state_dict"))
    has_state |= all(hasattr(value, name) for name in ("state", "restore"))
    return has_state or isinstance(value, PLAIN + GENERATORS)


def _state_of(value):
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if hasattr(value, "restore"):
        return value.state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return {name: _state_of(one) for name, one in value.items()}
    return [*map(_state_of, value)] if isinstance(value, (list, tuple, deque)) else value


def _restored(own, saved):
    """The restored attribute: the same object, where it can be changed."""
    if isinstance(own, torch.optim.Optimizer):
        _restore_optimizer(own, saved)
    elif hasattr(own, "load_state_dict"):
        own.load_state_dict(saved)
    elif hasattr(own, "restore"):
        own.restore(saved)
    elif isinstance(own, np.random.Generator):
        own.bit_generator.state = saved
    elif isinstance(own, torch.Generator):
        own.set_state(saved)
    elif isinstance(own, deque):
        return deque(saved, own.maxlen)
    elif isinstance(own, torch.Tensor) and own.shape == saved.shape:
        own.detach().copy_(saved)
    elif isinstance(own, dict):
        return {name: _restored(own.get(name), one) for name, one in saved.items()}
    elif isinstance(own, (list, tuple)) and len(own) == len(saved):
        return type(own)(map(_restored, own, saved))
    else:
        return saved
    return own


def _restore_optimizer(optimizer, saved):
    """With the flags of this device, and moments that lie in memory as their parameters do."""
    groups = []
    for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        names = own.keys() & {"fused", "foreach", "capturable"}
        groups.append(group | {name: own[name] for name in names})
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter).copy_(value)


def save_checkpoint(run_path: str | Path, tree: dict[str, Any]) -> None:
    """Write a tree to RUN/checkpoint.npz.

    The new checkpoint is complete and on disk before it takes the place of the old one: there is
    room for two on the disk, or an error and the old one.
    """
    arrays: dict[str, Any] = {}
    content = {"format_version": FORMAT_VERSION, "tree": _encoded(tree, arrays, "")}
    text = json.dumps(content).encode()
    with replacing(Path(run_path) / NAME) as new:
        np.savez(new, **{TREE: np.frombuffer(text, np.uint8)}, **arrays)
        _sync(new)
    _sync(run_path)


def load_checkpoint(run_path: str | Path, arrays: bool = True) -> dict[str, Any]:
    """The tree that `save_checkpoint` wrote; without its arrays, in no time, if not asked for.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: for another format version, or a file that is cut short or damaged.
    """
    path = Path(run_path) / NAME
    try:
        with np.load(path, allow_pickle=False) as file:  # compares checksums
            content = json.loads(bytes(file[TREE]))
            if (version := content["format_version"]) != FORMAT_VERSION:
                raise ValueError(f"Require format {FORMAT_VERSION}, got {version}")
            return _decoded(content["tree"], file if arrays else None)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"Require a checkpoint in {run_path}, found none (see --checkpoint-frequency)"
        ) from error
    except (
        ValueError,
        KeyError,
        EOFError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as e:
        raise ValueError(f"Require a whole checkpoint, got {path}: {e}") from e


def _encoded(value, arrays, name):
    """As JSON, with the names of its arrays in their places."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        arrays[name] = value
        if isinstance(value, np.ndarray):
            return {"array": name}
        is_odd = value.dtype == torch.bfloat16  # NumPy has none
        arrays[name] = (value.float() if is_odd else value).numpy(force=True)
        return {"tensor": name, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, np.generic):  # JSON would make a float32 a float
        return {"scalar": value.item(), "dtype": value.dtype.str}
    if isinstance(value, dict):
        pairs = [[key, _encoded(one, arrays, f"{name}|{key}")] for key, one in value.items()]
        return {"dict": pairs}  # keys may be other than text
    if isinstance(value, (list, tuple)):
        return [_encoded(one, arrays, f"{name}|{i}") for i, one in enumerate(value)]
    return value


def _decoded(value, file):
    if isinstance(value, list):
        return [_decoded(one, file) for one in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: _decoded(one, file) for key, one in value["dict"]}
    if "scalar" in value:
        return np.dtype(value["dtype"]).type(value["scalar"])
    if file is None:
        return None
    if "array" in value:
        return file[value["array"]]
    return torch.from_numpy(file[value["tensor"]]).to(getattr(torch, value["dtype"]))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, in place of path: nobody ever sees half a file."""
    new = path.with_name("new." + path.name)  # writers of videos go by the ending
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
