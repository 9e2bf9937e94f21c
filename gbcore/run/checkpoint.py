"""Checkpoints: all that a run needs to go on, bit for bit, and nothing that is trusted.

A checkpoint is a tree: dicts with names, and at their ends arrays and what JSON can hold. Whatever
has `state()`, which returns such a tree, and `restore(tree)` can be a part of one. A tree that was
read is compared with the one that the same flags would write, names, types and shapes, before a
part sees it; each part then checks what its own values mean.
"""

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch

from gbcore.interner import Rows, check_array

FORMAT_VERSION = 3


def save_checkpoint(run_path, parts):
    """Write the state of all parts to RUN/checkpoint.

    The new checkpoint is complete and on disk before it takes the place of the old one: there is
    room for two on the disk, or an error and the old one.

    Args:
        run_path: the run's folder.
        parts: name -> what has `state()`.

    Raises:
        OSError: for a folder that cannot be written to. The last checkpoint is still there.
    """
    arrays = {}
    tree = {name: _without_arrays(part.state(), name, arrays) for name, part in parts.items()}
    target = Path(run_path) / "checkpoint"
    new, old = target.with_name("checkpoint.new"), target.with_name("checkpoint.old")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        np.savez(new / "arrays.npz", **arrays)
        tree = {"format_version": FORMAT_VERSION, "names": sorted(arrays), **tree}
        content = json.dumps(tree, default=np.generic.item)
        checksum = zlib.crc32(content.encode())
        (new / "state.json").write_text(f'{{"crc32": {checksum}, "content": {content}}}\n')
        for path in (*new.iterdir(), new):
            _sync(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    new.rename(target)
    _sync(target.parent)  # else a power cut may bring the old names back, without their files
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(run_path):
    """The tree that `save_checkpoint` wrote. Runs no code from the files.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: for another format version, or a file that is missing, cut short or damaged.
        MemoryError: for more than there is memory for.
    """
    path = Path(run_path) / "checkpoint"
    if not path.exists():  # killed between the two renames
        path = path.with_name("checkpoint.old")
    if not path.exists():
        raise FileNotFoundError(
            f"Require a checkpoint in {run_path}, found none (see --checkpoint-frequency)"
        )
    try:
        state = json.loads((path / "state.json").read_text())
        tree = state["content"]
        version = tree.pop("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"Require format {FORMAT_VERSION}, got {version}")
        content = json.dumps({"format_version": version, **tree})
        if zlib.crc32(content.encode()) != state["crc32"]:
            raise ValueError("state.json has another checksum than it says")
        names = tree.pop("names")
        with np.load(path / "arrays.npz", allow_pickle=False) as file:  # compares checksums, too
            if sorted(file.files) != names:
                raise ValueError("arrays.npz is of another checkpoint than state.json")
            for name in names:
                *where, last = name.split("/")
                branch = tree
                for step in where:
                    branch = branch[step]
                branch[last] = file[name]
        return tree
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise ValueError(f"Require a whole checkpoint, got {path} without {name}") from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # json, zipfile and NumPy have no error in common
        raise ValueError(f"Require a whole checkpoint, got {path}: {error}") from error


def check_like(found, wanted, name="checkpoint"):
    """Raise ValueError, naming the place, where a tree is not like the one of a fresh run."""
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
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise ValueError(f"Require finite numbers in {name}")
    elif isinstance(wanted, list):
        if not isinstance(found, list) or not all(_is_number(value) for value in found):
            raise ValueError(f"Require a list of numbers in {name}")
    elif isinstance(wanted, str):
        if found != wanted:
            raise ValueError(f"Require {name} of {wanted!r}, got {found!r}")
    elif wanted is None or isinstance(wanted, float):
        if not (_is_number(found) or (wanted is None and found is None)):
            raise ValueError(f"Require a finite number in {name}, got {found!r}")
    elif type(found) is not type(wanted) or not 0 <= found < 2 ** (63 if wanted < 2**63 else 128):
        raise ValueError(f"Require {name} like {wanted!r}, got {found!r}")


class RandomStates:
    """The generators of a run, as a part of its checkpoint: NumPy's, torch's, and the GPU's."""

    def __init__(self, rng, device):
        self.rng, self.device = rng, device

    def state(self):
        """What `restore` takes back."""
        on_gpu = self.device.type == "cuda"
        of_gpu = torch.cuda.get_rng_state() if on_gpu else torch.zeros(0, dtype=torch.uint8)
        return {
            "numpy": self.rng.bit_generator.state,
            "torch": torch.get_rng_state(),
            "cuda": Rows(state=of_gpu),
        }

    def restore(self, saved):
        """Go on from what `state` returned; on another device the GPU's own generator is kept.

        Raises ValueError for what no generator can have.
        """
        torch_state, numpy_state = saved["torch"], saved["numpy"]
        # Of the Mersenne Twister: words left of 624, and the place of the next; (1, 0) as seeded.
        left, place = torch_state[8:12].view(np.int32)[0], torch_state[16:24].view(np.int64)[0]
        if not (1 <= left <= 624 and (left + place == 625 or (left, place) == (1, 0))):
            raise ValueError("Require a state of torch's generator within its 624 words")
        if numpy_state["uinteger"] >= 2**32 or numpy_state["state"]["inc"] % 2 == 0:
            raise ValueError("Require a state that NumPy's generator can be in")
        self.rng.bit_generator.state = numpy_state
        torch.set_rng_state(torch.from_numpy(torch_state))
        gpu_state = saved["cuda"]["state"]
        if self.device.type == "cuda" and len(gpu_state):
            torch.cuda.set_rng_state(torch.from_numpy(gpu_state))


def adam_state(network, optimizer):
    """Steps and moments of Adam by the name of the parameter; zeros before its first step."""
    saved = {}
    for name, parameter in network.named_parameters():
        state, zeros = optimizer.state[parameter], torch.zeros_like(parameter)
        saved[name] = {
            "step": state.get("step", torch.zeros(())),
            "exp_avg": state.get("exp_avg", zeros),
            "exp_avg_sq": state.get("exp_avg_sq", zeros),
        }
    return saved


def restore_adam(network, optimizer, saved):
    """Take back what `adam_state` returned. ValueError for steps or moments that cannot be."""
    for name, parameter in network.named_parameters():
        moments = {key: torch.from_numpy(array) for key, array in saved[name].items()}
        if not (moments["step"] >= 0 and (moments["exp_avg_sq"] >= 0).all()):
            raise ValueError(f"Require steps and second moments >= 0 of {name}")
        capturable = optimizer.param_groups[0]["capturable"] or optimizer.param_groups[0]["fused"]
        step_device = parameter.device if capturable else "cpu"
        optimizer.state[parameter] = {
            "step": moments["step"].to(step_device).clone(),
            **{
                key: torch.empty_like(parameter).copy_(moments[key])
                for key in ("exp_avg", "exp_avg_sq")
            },
        }


class LearnerState:
    """What a checkpoint holds of a learner: networks, Adam, counters and the tables it has."""

    leaves = graph_values = recent = None  # where the learner has them
    num_fresh = 0  # states that targets had evaluated, those kept in `leaves` not counted

    @property
    def num_evaluated(self):
        """States that targets had evaluated."""
        return self.num_fresh + (0 if self.leaves is None else self.leaves.num_evaluated)

    def state(self):
        """What `restore` takes back."""
        saved = {
            "online": dict(self.online.state_dict()),
            "target": dict(self.target.state_dict()),
            "adam": adam_state(self.online, self.optimizer),
            "num_updates": self.num_updates,
            "num_fresh": self.num_fresh,
        }
        return saved | {name: table.state() for name, table in self._tables()}

    def restore(self, state):
        """Go on from what `state` returned. ValueError for what cannot be."""
        for name in ("online", "target"):
            arrays = state[name].items()
            getattr(self, name).load_state_dict({key: torch.from_numpy(a) for key, a in arrays})
        restore_adam(self.online, self.optimizer, state["adam"])
        for name, table in self._tables():
            table.restore(state[name])
        self.num_updates, self.num_fresh = state["num_updates"], state["num_fresh"]

    def _tables(self):
        tables = {name: getattr(self, name) for name in ("leaves", "graph_values", "recent")}
        return [(name, table) for name, table in tables.items() if table is not None]


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


def _is_number(value):
    return type(value) in (int, float) and -1e30 <= value <= 1e30


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
