"""`jit`: Numba's `njit` with a cache on the disk that sees edits of helpers, too.

Numba's own cache looks at the file of the kernel alone: after an edit of a helper in another file
it returns the old numbers. This one looks at gbcore's kernels and at all files beside the kernel's.
"""

import functools
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache

WITHOUT = (
    "gbcore is compiled anew in this process, as no folder for Numba's cache can be used; "
    "set NUMBA_CACHE_DIR to one that can be written"
)
HERE = Path(__file__).parent
_told: list[BaseException] = []


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function, and keep the result for other processes where a folder can be written.

    It is compiled anew where a file of gbcore's kernels, or one beside its own, has changed. A
    kernel holds the GIL: other threads wait.
    """
    if function is None:
        return functools.partial(jit, **options)
    kernel = njit(function, **options)
    if not config.DISABLE_JIT:
        try:
            cache = FunctionCache(function)
            cache._cache_file._source_stamp = stamp_of(function.__code__.co_filename)
            kernel._cache = cache
        except (RuntimeError, OSError) as error:  # no folder that can be written
            if not _told:
                _told.append(error)
                warnings.warn(f"{WITHOUT}: {error!r}", RuntimeWarning, stacklevel=2)
    return kernel


# `jit` of a kernel that makes no arrays, as those that are called for every node and edge. No
# references to the arrays of its arguments are counted: nine tenths of the time of a backup.
# Division by 0 gives inf or NaN, as in NumPy. forceinline=True: part of the kernels that call it.
jit_in_place: Callable[..., Any] = functools.partial(jit, _nrt=False, error_model="numpy")


@functools.cache  # as they were when imported: a file may be edited before a kernel is called
def stamp_of(file: str) -> str:
    """Digest of gbcore's kernels, and of the files beside this one: its helpers are there."""
    files = {
        HERE / "subgraph.py",
        *(HERE / "kernels").glob("*.py"),
        *Path(file).parent.glob("*.py"),
    }
    digest = hashlib.sha256(Path(file).name.encode())  # of a notebook, by its content
    for path in filter(Path.is_file, sorted(files)):  # an editor's lock is a link to nowhere
        digest.update(path.read_bytes())
    return digest.hexdigest()
