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

from gbcore.graph import TransitionGraph
from gbcore.run.output import warn


class LearnerState:
    """Base of a learner: a checkpoint holds all of it that learning changes.

    That is a pickle of its attributes, in which what is one object stays one; lambdas and closures
    are saved too. Objects that the script makes are restored in place, as others may hold them.
    What cannot be pickled, as an open file, is left out with a warning; a network or an optimizer
    raises ValueError. Graph and replay are parts of a checkpoint by themselves.
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
                    if isinstance(vars(self)[name], (torch.nn.Module, torch.optim.Optimizer)):
                        raise ValueError(f"cannot save {why}") from error
                    names.discard(name)
                    if name not in _warned_of:
                        _warned_of.add(name)
                        warn(f"checkpoints leave out {why}")
        return self._state(names)

    # An attribute is saved as a shell or as a value. A shell is an object with a state of its own
    # (a network, an optimizer, a generator). The pickle has that state once, and its name wherever
    # it is held. The state is restored into the script's own object, or into a new one.

    def _state(self, names):
        known = {id(value): ("outside", name) for name, value in self._outside().items()}
        values, shells = {}, {}
        for name, value in vars(self).items():
            if id(value) not in known and (state := _state_of(value)) is not None:
                known[id(value)] = "shell", name, *_kind_of(value)
                if name in names:
                    shells[name] = value, state
            elif name in names:
                values[name] = value
        file = io.BytesIO()
        _Pickler(file, known, type(self).__module__).dump((values, shells))
        return {"pickle": np.frombuffer(file.getvalue(), np.uint8), "device": _device_of(self)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a tree of `state`.

        Raises ValueError where a network has other sizes, KeyError where an object is not there.
        """
        own = vars(self)
        modules = {name: one for name, one in own.items() if isinstance(one, torch.nn.Module)}
        sizes = {name: _sizes_of(one) for name, one in modules.items()}
        file = io.BytesIO(state["pickle"].tobytes())
        values, shells = _Unpickler(file, self, state["device"]).load()
        for name, (value, content) in shells.items():
            flags = _device_flags(value) if value is own.get(name) else []
            _set_state(value, content)
            if flags and state["device"] != _device_of(self):
                for group, flags_here in zip(value.param_groups, flags, strict=False):
                    group.update(flags_here)
            values[name] = value
        for name in [name for name in sizes if name in values]:
            found = _sizes_of(values[name])
            for part, size in sizes[name].items():  # it may have grown
                if found.get(part) != size:
                    raise ValueError(
                        f"Require {name}.{part} of shape {size}, got {found.get(part)}"
                    )
        own.update(values)

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


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """A tree for `set_generator`: the numbers to come, and those of generators to be spawned."""
    bits = rng.bit_generator
    return {"bits": bits.state, "seeds": getattr(bits.seed_seq, "state", None)}


def set_generator(rng: np.random.Generator, state: dict[str, Any]) -> None:
    """Have a generator go on from a tree of `generator_state`."""
    seeds = state["seeds"] and np.random.SeedSequence(**state["seeds"])
    rng.bit_generator.__setstate__((state["bits"], seeds))


ADVICE = "give it __getstate__, or name it in APART"
_warned_of: set[str] = set()  # attributes


def _state_of(value):
    """What `_set_state` gives an empty object of the class; None if it is not made in that way."""
    if isinstance(value, np.random.Generator):
        return generator_state(value)
    if isinstance(value, (np.ndarray, torch.Tensor, TransitionGraph)):  # whole before it is used
        return None
    try:
        make, arguments, state, *items = value.__reduce_ex__(2)
    except Exception:  # it cannot be pickled, or is a constant
        return None
    if isinstance(value, torch.optim.Optimizer):  # its own state lacks what a subclass adds
        state = {name: one for name, one in vars(value).items() if name != "step"}
    is_shell = make is copyreg.__newobj__ and len(arguments) == 1 and not any(items)
    return state if is_shell and state is not None else None


def _kind_of(value):
    """Arguments of `_new`."""
    is_generator = isinstance(value, np.random.Generator)
    return (type(value), type(value.bit_generator)) if is_generator else (type(value),)


def _new(kind, *bits):
    """An empty object of a class, for `_set_state`."""
    return kind(bits[0]()) if bits else kind.__new__(kind)


def _set_state(value, state):
    if isinstance(value, np.random.Generator):
        set_generator(value, state)
    elif hasattr(type(value), "__setstate__"):
        value.__setstate__(state)
    else:
        own, slots = state if isinstance(state, tuple) else (state, None)
        if own is not None:
            vars(value).clear()
            vars(value).update(own)
        for name, one in (slots or {}).items():
            object.__setattr__(value, name, one)


def _device_flags(optimizer):
    """Of each group, flags that only some devices take."""
    names = {"fused", "foreach", "capturable"}
    groups = getattr(optimizer, "param_groups", [])
    return [{name: group[name] for name in names & group.keys()} for group in groups]


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
        self._learner, self._shells, self._memory = learner, {}, {}
        self._device, self._device_here = device, _device_of(learner)  # then and now

    def find_class(self, module, name):
        if (module, name) == (__name__, "_tensor"):
            return self._tensor
        if module == "__main__" and self._learner is not None:  # the script, when it was run
            module = type(self._learner).__module__
        return super().find_class(module, name)

    def persistent_load(self, pid):
        kind, name, *wanted = pid
        if kind == "device":
            is_own = torch.device(name).type == self._device
            return torch.device(self._device_here if is_own else name)
        if kind == "script":
            module = sys.modules[type(self._learner).__module__]
            return functools.reduce(getattr, name.split("."), module)
        if kind == "shell":
            own = vars(self._learner).get(name)
            if name not in self._shells:
                is_taken = any(own is shell for shell in self._shells.values())
                is_own = _kind_of(own) == tuple(wanted) and not is_taken
                self._shells[name] = own if is_own else _new(*wanted)
            return self._shells[name]
        # Tools make a learner without the rest of the run.
        return self._learner._outside().get(name, vars(self._learner).get(name))

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
