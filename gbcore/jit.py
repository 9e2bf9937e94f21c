"""`jit`: Numba's `njit` with a cache on the disk that sees edits in every file a kernel uses.

Numba's own cache looks at the file of the kernel alone: after an edit of a helper in another file
it returns the old numbers.
"""

import functools
import hashlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

WITHOUT = (
    "gbcore is compiled anew in this process, as no folder for Numba's cache can be used; "
    "set NUMBA_CACHE_DIR to one that can be written"
)
LIBRARIES = ("builtins", "math", "numba", "numpy")  # their kernels change with their versions
_sources: dict[Callable[..., Any], str] = {}  # function -> digest of its file, when imported
_told: list[BaseException] = []


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function, and keep the result for other processes where a folder can be written.

    A kernel holds the GIL: other threads wait.
    """
    if function is None:
        return functools.partial(jit, **options)
    kernel = njit(function, **options)
    if not config.DISABLE_JIT:
        _sources[function] = _digest(function.__code__.co_filename)
        try:
            kernel._cache = _Cache(function)
        except (RuntimeError, OSError) as error:  # no folder that can be written
            if not _told:
                _told.append(error)
                warnings.warn(f"{WITHOUT}: {error!r}", RuntimeWarning, stacklevel=2)
    return kernel


# `jit` of a kernel that makes no arrays, as those that are called for every node and edge. No
# references to the arrays of its arguments are counted: nine tenths of the time of a backup.
# Division by 0 gives inf or NaN, as in NumPy. forceinline=True: part of the kernels that call it.
jit_in_place: Callable[..., Any] = functools.partial(jit, _nrt=False, error_model="numpy")


class _Cache(FunctionCache):
    """Numba's cache of one function, void where anything that the function names has changed."""

    def load_overload(self, sig, target_context):
        # Not before the first call: then all that is named is there.
        self._cache_file._source_stamp = stamp_of(self._py_func)
        return super().load_overload(sig, target_context)


def stamp_of(function: Callable[..., Any]) -> str:
    """Digest of the files of a function and of all functions and classes that it names, in turn,
    and of the constants that these name.
    """
    met, waiting, parts = set(), [function], set()
    while waiting:
        function = waiting.pop()
        if function in met:
            continue
        met.add(function)
        parts.add(_sources.get(function) or _digest(function.__code__.co_filename))
        for name, value in _named_in(function):
            value = value.py_func if isinstance(value, Dispatcher) else value
            if getattr(value, "__module__", "").partition(".")[0] in LIBRARIES:
                continue
            if isinstance(value, types.FunctionType):
                waiting.append(value)
            elif isinstance(value, type):
                parts.add(_digest(sys.modules[value.__module__].__file__))
            else:
                is_array = isinstance(value, np.ndarray)
                parts.add(f"{name} {value.tobytes() if is_array else ''} {value!r}")
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _named_in(function) -> Iterator[tuple[str, Any]]:
    """Names in a function's code, and their values: globals, variables that it closes over, and
    attributes of modules that it names.
    """
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    names = {name for code in codes for name in (*code.co_names, *code.co_freevars)}
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    scopes = [function.__globals__ | {name: cell.cell_contents for name, cell in cells.items()}]
    for scope in scopes:
        for name in names & scope.keys():
            value = scope[name]
            if not isinstance(value, types.ModuleType):
                yield name, value
            elif value.__name__.partition(".")[0] not in LIBRARIES and not any(
                vars(value) is known for known in scopes
            ):
                scopes.append(vars(value))


def _digest(path):
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, TypeError):  # from an archive, or a notebook
        return repr(path)
