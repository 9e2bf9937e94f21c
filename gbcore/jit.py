"""`jit`: Numba's `njit` with a cache on the disk, of which no failure ends a program."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache

WITHOUT = (
    "gbcore is compiled anew in this process, as no folder for Numba's cache can be used; "
    "set NUMBA_CACHE_DIR to one that can be written"
)
DAMAGED = "A file of Numba's cache was damaged and is written anew; should this come again,"
_told: set[str] = set()


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function, and keep the result for other processes where a folder can be written.

    A kernel holds the GIL: others that share its arrays wait.
    """
    if function is None:
        return functools.partial(jit, **options)
    kernel = njit(function, **options)
    if not config.DISABLE_JIT:
        try:
            kernel._cache = _Cache(function)
        except (RuntimeError, OSError) as error:  # no folder that can be written
            _warn_once(WITHOUT, error)
    return kernel


class _Cache(FunctionCache):
    """Numba's cache of one function. A file that cannot be read or written is as none."""

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except OSError as error:
            _warn_once(WITHOUT, error)
        except Exception as error:  # pickle promises no single one
            _warn_once(f"{DAMAGED} delete {self.cache_path}", error)
            try:
                self.flush()
            except OSError:
                self.disable()
        return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(WITHOUT, error)


def _warn_once(text, error):
    if text not in _told:
        _told.add(text)
        warnings.warn(f"{text}: {error!r}", RuntimeWarning, stacklevel=2)
