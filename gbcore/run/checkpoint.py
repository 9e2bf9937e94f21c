"""Checkpoints: all that a run needs to go on, bit for bit.

A part of a checkpoint has `state()`, which returns a tree, and `restore(tree)`. A tree is a dict of
what pickle takes, tensors of any device included. On disk it is a zip archive with a pickle of each
part: zip's checksums tell a damaged one.
"""

import contextlib
import os
import random
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gbcore.run.learner import LearnerState, dump, load

NAME = "checkpoint.zip"
FORMAT_VERSION = 18


class Checkpoint:
    """RUN/checkpoint.zip: the state of a run's parts and of all random numbers.

    Args:
        args: the script's flags.
        script: the script's __file__.
        rng: the np.random.Generator of all sampling.
        path: the run's folder.
        parts: each with `state` and `restore`, in the order in which they are restored; "env" has
            `obs`, the observation that it is in.

    Raises ValueError for a part of another entry's name, or a learner that cannot be saved.
    """

    def __init__(
        self, args: Any, script: str, rng: np.random.Generator, path: str | Path, **parts: Any
    ) -> None:
        self.path: Path = Path(path)
        self._args, self._script, self._rng, self._parts = args, script, rng, parts
        if taken := parts.keys() & {"flags", "module", "obs", "rng", "format_version"}:
            raise ValueError(f"Require other names of parts, got {sorted(taken)}")
        for name, part in parts.items():
            if not (hasattr(part, "state") and hasattr(part, "restore")):
                raise ValueError(f"Require state() and restore() of part {name}, got {part!r}")
            if isinstance(part, LearnerState):
                part.outside = {"rng": rng, **parts}
                part.state()  # warns now, before anything is learned

    def save(self) -> None:
        """Write the state of all parts. OSError without room for it; the last one is kept."""
        tree = {name: part.state() for name, part in self._parts.items()}
        tree["flags"] = {"script": str(Path(self._script).resolve()), **vars(self._args)}
        tree["module"] = module_file(self._args.env_id)
        tree["obs"] = np.ascontiguousarray(self._parts["env"].obs)
        tree["rng"] = {
            "numpy": self._rng.bit_generator.__getstate__(),
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
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                message = f"cannot go on with {self.path}: {name}: {type(error).__name__}: {error}"
                raise ValueError(message) from error
        if not np.array_equal(self._parts["env"].obs, tree["obs"]):
            raise ValueError(
                f"cannot go on with {self.path}: the episode under way plays otherwise: another "
                "version of the environment, or what reset(seed) does not govern: chance, numbers "
                "kept between episodes"
            )
        self._rng.bit_generator.__setstate__(tree["rng"]["numpy"])
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


def save_checkpoint(run_path: str | Path, tree: dict[str, Any]) -> None:
    """Write a tree to RUN/checkpoint.zip, an entry for each part.

    The new checkpoint is complete and on disk before it takes the place of the old one: there is
    room for two on the disk, or an error and the old one.
    """
    with replacing(Path(run_path) / NAME) as new:
        with zipfile.ZipFile(new, "w", compresslevel=1) as file:
            for name, part in {"format_version": FORMAT_VERSION, **tree}.items():
                # A learner's tables have room for nodes to come: zeros.
                file.compression = zipfile.ZIP_DEFLATED if name == "learner" else zipfile.ZIP_STORED
                with file.open(name, "w", force_zip64=True) as entry:
                    dump(part, entry)
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
    except (FileNotFoundError, NotADirectoryError) as error:
        how = "Require a run's folder with a checkpoint (--checkpoint-frequency)"
        raise FileNotFoundError(f"{how}, got {run_path}") from error
    except (
        ValueError, LookupError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error,
        AttributeError, ImportError,
    ) as error:  # fmt: skip
        raise ValueError(f"Require a whole checkpoint, got {path}: {error}") from error


def _load(file, name):
    with file.open(name) as entry:
        while entry.read(2**24):  # to its end, where checksums are compared
            pass
    with file.open(name) as entry:
        return load(entry)


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
