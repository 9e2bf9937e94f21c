"""Checkpoints: all that a run needs to go on, bit for bit.

A part of a checkpoint has `state()`, which returns a tree, and `restore(tree)`. A tree is made of
Python's own containers, and at its ends of arrays, tensors, numbers and text. On disk it is a zip
archive with a pickle of each part: zip's checksums tell a damaged one.
"""

import contextlib
import functools
import itertools
import os
import pickle
import random
import sys
import types
import zipfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gbcore.run.output import warn

NAME = "checkpoint.zip"
FORMAT_VERSION = 13


class Checkpoint:
    """RUN/checkpoint.zip: the state of a run's parts and of all random numbers.

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
        random.setstate(tree["rng"]["random"])
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

    These are, among its attributes, numbers, text, tensors, arrays, random generators; whatever has
    `state_dict`, as modules and optimisers, or `state`, as a `LeafTable`; objects of plain Python
    classes; and lists, tuples, sets, deques and dicts of them. Of others a warning is given. Graph
    and replay are parts of a checkpoint by themselves.
    """

    APART: tuple[str, ...] = ("args", "graph", "replay")  # and whatever learning does not change

    def state(self) -> dict[str, Any]:
        """A tree for `restore`."""
        result = {}
        for name, value in _changing(self):
            try:
                if name not in self.APART:
                    result[name] = _state_of(value)
            except (TypeError, RecursionError) as error:
                if name not in _told:
                    _told.add(name)
                    advice = "give it state_dict, or name it in APART"
                    warn(f"checkpoints leave out learner.{name}: {error}; {advice}")
        return result

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a tree of `state`. ValueError where an object is not there, or another one."""
        for name, saved in state.items():
            vars(self)[name] = _restored(vars(self).get(name), saved)


class State(NamedTuple):
    """The state of an object that the script makes: it is restored in place."""

    kind: str  # name of its class
    tree: Any


PLAIN = bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, torch.Tensor
CONSTANT = (
    torch.device, torch.dtype, type, functools.partial, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, types.ModuleType, np.ufunc,
)  # fmt: skip
# Of modules and optimisers, of ours, of torch's and of Python's random generators.
METHODS = (
    ("state_dict", "load_state_dict"), ("state", "restore"), ("get_state", "set_state"),
    ("getstate", "setstate"),
)  # fmt: skip
_told: set[str] = set()  # attributes that were warned of


def _changing(owner):
    """Attributes that may change: name and value."""
    return [item for item in vars(owner).items() if not isinstance(item[1], CONSTANT)]


def _methods_of(value):
    """Those that tell its state and take it back, if it has any."""
    for names in METHODS:
        methods = [getattr(value, name, None) for name in names]
        if all(map(callable, methods)):
            return methods
    return None


def _state_of(value):
    """The value, with a `State` in place of each object."""
    kind = type(value)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return {name: _state_of(one) for name, one in value.items()}
    if kind is deque:
        return deque(map(_state_of, value), value.maxlen)
    if kind in (list, tuple, set, frozenset):
        return kind(map(_state_of, value))
    if methods := _methods_of(value):
        return State(kind.__name__, methods[0]())
    if isinstance(value, np.random.Generator):
        return State(kind.__name__, value.bit_generator.state)
    if kind.__new__ is object.__new__ and kind.__reduce_ex__ is object.__reduce_ex__:
        return State(kind.__name__, {name: _state_of(one) for name, one in _changing(value)})
    raise TypeError(f"no state of a {kind.__name__} is known")


def _restored(own, saved):
    """The saved value, in the objects and containers of `own`, as others may hold these."""
    if isinstance(saved, State):
        _restore_object(own, *saved)
        return own
    if isinstance(saved, torch.Tensor) and isinstance(own, torch.Tensor):
        return own.copy_(saved) if own.shape == saved.shape else saved
    if isinstance(saved, dict):
        owns = own if isinstance(own, dict) else {}
        new = {name: _restored(owns.get(name), one) for name, one in saved.items()}
    elif isinstance(saved, (list, tuple, deque)):
        is_alike = isinstance(own, type(saved)) and len(own) == len(saved)
        new = [*map(_restored, own if is_alike else itertools.repeat(None), saved)]
    else:
        return saved
    if isinstance(own, type(saved)) and not isinstance(own, tuple):
        own.clear()
        (own.update if isinstance(own, dict) else own.extend)(new)
        return own
    return deque(new, saved.maxlen) if isinstance(saved, deque) else type(saved)(new)


def _restore_object(own, kind, tree):
    if type(own).__name__ != kind:
        raise ValueError(f"Require a {kind}, as when it was saved, got {type(own).__name__}")
    if isinstance(own, torch.optim.Optimizer):
        _restore_optimizer(own, tree)
    elif methods := _methods_of(own):
        methods[1](tree)
    elif isinstance(own, np.random.Generator):
        own.bit_generator.state = tree
    else:
        LearnerState.restore(own, tree)


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
    """Write a tree to RUN/checkpoint.zip, an entry for each part.

    The new checkpoint is complete and on disk before it takes the place of the old one: there is
    room for two on the disk, or an error and the old one.
    """
    with replacing(Path(run_path) / NAME) as new:
        with zipfile.ZipFile(new, "w") as file:
            for name, part in {"format_version": FORMAT_VERSION, **tree}.items():
                with file.open(name, "w", force_zip64=True) as entry:
                    _Pickler(entry, protocol=5).dump(part)
        _sync(new)
    _sync(run_path)


def load_checkpoint(run_path: str | Path, *names: str) -> dict[str, Any]:
    """The tree that `save_checkpoint` wrote; of names, only these parts.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: for another format version, or a file that is cut short or damaged.
    """
    path = Path(run_path) / NAME
    try:
        with zipfile.ZipFile(path) as file:
            if (version := _load(file, "format_version")) != FORMAT_VERSION:
                raise ValueError(f"Require format {FORMAT_VERSION}, got {version}")
            return {name: _load(file, name) for name in names or file.namelist()[1:]}
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"Require a checkpoint in {run_path}, found none (see --checkpoint-frequency)"
        ) from error
    except (ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        raise ValueError(f"Require a whole checkpoint, got {path}: {error}") from error


def _load(file, name):
    with file.open(name) as entry:
        while entry.read(2**24):  # to its end, where checksums are compared
            pass
    with file.open(name) as entry:
        return pickle.load(entry)


class _Pickler(pickle.Pickler):
    """With tensors of any device as arrays."""

    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        is_odd = value.dtype == torch.bfloat16  # NumPy has none
        return _tensor, ((value.float() if is_odd else value).numpy(force=True), value.dtype)


def _tensor(array, dtype):
    return torch.from_numpy(array).to(dtype)


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
