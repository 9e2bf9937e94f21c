"""LearnerState: what a checkpoint holds of a learner, whatever its author has put there."""

import copyreg
import functools
import io
import itertools
import pickle
import sys
import types
from typing import Any, BinaryIO, ClassVar

import cloudpickle
import numpy as np
import torch
from torch.nn.utils.parametrize import is_parametrized

from gbcore.run.output import warn

ADVICE = "give it __getstate__, or name it in APART"
DEVICE_FLAGS = {"fused", "foreach", "capturable"}  # of an optimizer: only some devices take them
IN_PLACE = torch.nn.Module, torch.optim.Optimizer
_warned_of: set[str] = set()  # attributes


class LearnerState:
    """Base of a learner: a checkpoint holds all of it that learning changes.

    That is a pickle of its attributes, in which what is one object stays one; lambdas and closures
    are saved too. Networks and optimizers are restored in place, as others may hold them. What
    cannot be pickled, as an open file, is left out with a warning; a network or an optimizer raises
    ValueError. Graph and replay are parts of a checkpoint by themselves.
    """

    APART: tuple[str, ...] = ("args", "graph", "replay")  # and whatever learning does not change
    outside: ClassVar[dict[str, Any]] = {}  # parts of the run that attributes may refer to

    def state(self) -> dict[str, Any]:
        """A tree for `restore`."""
        names = vars(self).keys() - {*self.APART, "outside"}
        try:
            return self._state(names)
        except Exception:  # pickle promises no single one
            for name in sorted(names):
                try:
                    self._state({name})
                except Exception as error:
                    why = f"learner.{name}: {error}; {ADVICE}"
                    if isinstance(vars(self)[name], IN_PLACE):
                        raise ValueError(f"cannot save {why}") from error
                    names.discard(name)
                    if name not in _warned_of:
                        _warned_of.add(name)
                        warn(f"checkpoints leave out {why}")
        return self._state(names)

    def _state(self, names):
        own = vars(self)
        known = {id(value): ("outside", name) for name, value in self._outside().items()}
        in_place = {n: one for n, one in own.items() if isinstance(one, IN_PLACE)}
        for name, one in in_place.items():  # the pickle has its name wherever it is held
            known.setdefault(id(one), ("in place", name, type(one)))
        contents = {n: _content_of(in_place[n]) for n in in_place.keys() & names}
        file = io.BytesIO()
        values = {name: own[name] for name in own if name in names}
        _Pickler(file, known, type(self).__module__).dump((values, contents))
        return {"pickle": np.frombuffer(file.getvalue(), np.uint8), "device": _device_of(self)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a tree of `state`.

        Raises ValueError where a network has other sizes, KeyError where an object is not there.
        """
        own, moved = vars(self), state["device"] != _device_of(self)
        sizes = {n: _sizes_of(one) for n, one in own.items() if isinstance(one, torch.nn.Module)}
        file = io.BytesIO(state["pickle"].tobytes())
        values, contents = _Unpickler(file, self, state["device"]).load()
        for name, content in contents.items():
            groups = getattr(values[name], "param_groups", []) if moved else []
            flags = [{n: group[n] for n in DEVICE_FLAGS & group.keys()} for group in groups]
            vars(values[name]).update(content)
            for group, here in zip(content.get("param_groups", []), flags, strict=False):
                group.update(here)
        own.update(values)
        for name, before in sizes.items():
            now = _sizes_of(own[name]) if name in values else before
            for part, size in before.items():  # it may have grown
                if now.get(part) != size:
                    raise ValueError(f"Require {name}.{part} of shape {size}, got {now.get(part)}")

    def _outside(self):
        """What attributes may refer to and a pickle does not hold, by name."""
        apart = {name: vars(self)[name] for name in self.APART if name in vars(self)}
        before = itertools.takewhile(lambda item: item[1] is not self, self.outside.items())
        within = {
            f"{part}.{name}": value
            for part, owner in before  # parts that are restored by now
            for name, value in getattr(owner, "__dict__", {}).items()
            if isinstance(value, (list, dict, np.ndarray))
        }
        return {**within, **self.outside, **apart, "self": self}


def dump(tree: Any, file: BinaryIO) -> None:
    """Pickle a tree with tensors of any device."""
    _Pickler(file).dump(tree)


def load(file: BinaryIO) -> Any:
    """The tree that `dump` wrote; its tensors are on the CPU."""
    return _Unpickler(file).load()


def _content_of(value):
    """All attributes, but for an optimizer's own `step`, which a schedule made."""
    is_optimizer = isinstance(value, torch.optim.Optimizer)
    return {name: one for name, one in vars(value).items() if not is_optimizer or name != "step"}


def _device_of(learner):
    return getattr(learner, "device", torch.device("cpu")).type


def _sizes_of(module):
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


class _Pickler(cloudpickle.Pickler):
    """Pickles known objects as their names, and tensors that share memory as views of one array."""

    def __init__(self, file, known=None, module=None):
        super().__init__(file, protocol=5)
        self._known, self._module, self._memory = known or {}, module, {}

    def persistent_id(self, value):
        if isinstance(value, torch.device):
            return "device", str(value)
        is_code = isinstance(value, (type, types.FunctionType))  # as __main__ or imported
        if is_code and value.__module__ == self._module and "<" not in value.__qualname__:
            return "script", value.__qualname__
        return self._known.get(id(value))

    def reducer_override(self, value):
        if isinstance(value, torch.Generator):
            return _generator, (str(value.device), value.get_state())
        if isinstance(value, torch.nn.Module) and is_parametrized(value):  # itself it refuses
            return copyreg.__newobj__, (type(value),), vars(value)
        if isinstance(value, torch.optim.Optimizer):  # its own state lacks what a subclass adds
            return copyreg.__newobj__, (type(value),), _content_of(value)
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return super().reducer_override(value)
        memory = value.untyped_storage()
        key = value.device, memory.data_ptr(), memory.nbytes()
        if key not in self._memory:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(memory)
            self._memory[key] = whole.numpy(force=True)
        layout = value.dtype, value.storage_offset(), tuple(value.shape), value.stride()
        is_parameter = isinstance(value, torch.nn.Parameter)
        has_grad = value.is_leaf and value.requires_grad
        how = is_parameter, has_grad, value.grad if has_grad else None
        return _tensor, (self._memory[key], value.device.type, layout, how)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, learner=None, device="cpu"):
        super().__init__(file)
        self._learner, self._in_place, self._memory = learner, {}, {}
        self._device, self._device_here = device, _device_of(learner)  # then and now

    def find_class(self, module, name):
        if (module, name) == (__name__, "_tensor"):
            return self._tensor
        return super().find_class(module, name)

    def persistent_load(self, pid):
        kind, name, *wanted = pid
        if kind == "device":
            is_own = torch.device(name).type == self._device
            return torch.device(self._device_here if is_own else name)
        if kind == "script":
            module = sys.modules[type(self._learner).__module__]
            return functools.reduce(getattr, name.split("."), module)
        own = vars(self._learner).get(name)
        if kind == "outside":  # tools make a learner without the rest of the run
            return self._learner._outside().get(name, own)
        if name not in self._in_place:
            (kind,) = wanted
            is_taken = any(own is one for one in self._in_place.values())
            is_own = type(own) is kind and not is_taken
            self._in_place[name] = own if is_own else kind.__new__(kind)
        return self._in_place[name]

    def _tensor(self, memory, device, layout, how):
        if id(memory) not in self._memory:
            to = self._device_here if device == self._device else "cpu"
            self._memory[id(memory)] = memory, torch.from_numpy(memory).to(to)
        whole = self._memory[id(memory)][1]
        dtype, offset, shape, stride = layout
        tensor = torch.empty(0, dtype=dtype, device=whole.device)
        tensor.set_(whole.untyped_storage(), offset, shape, stride)
        is_parameter, has_grad, grad = how
        tensor = torch.nn.Parameter(tensor, has_grad) if is_parameter else tensor
        tensor.requires_grad_(has_grad).grad = grad
        return tensor


def _tensor(*_):
    """Name of `_Unpickler._tensor` in a pickle."""


def _generator(device, state):
    generator = torch.Generator(device if torch.cuda.is_available() else "cpu")
    generator.set_state(state)
    return generator
