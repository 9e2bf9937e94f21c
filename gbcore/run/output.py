"""How a command ends: signals, output that nobody reads any more, errors in one line."""

import contextlib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn


def warn(message: object) -> None:
    """One line on stderr."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def fail(message: object, status: int = 2) -> NoReturn:
    """One line on stderr, and the end."""
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(status)


def one_line_errors(main: Callable[[], None]) -> Callable[[], None]:
    """Decorator of a command's main: an error of a file or a value is one line and status 2.

    Output that has gone, as in `... | head -2`, is dropped, and the command goes on.
    """

    @functools.wraps(main)
    def run():
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = map(_Lasting, streams)
        try:
            main()
        except (OSError, ValueError) as error:
            fail(error)
        except KeyboardInterrupt:
            fail("interrupted at once: the last checkpoint, if there is one, is left", 130)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not re.search(
                "(out of|allocate) memory", f"{error}"
            ):
                raise
            flags = "--batch-size, --buffer-size, --total-timesteps, --depth or --breadth (0: all)"
            fail(f"no memory: {error}; give a smaller {flags}", 1)
        finally:
            sys.stdout.flush()
            sys.stdout, sys.stderr = streams

    return run


class _Lasting:
    """A text stream, or None, to which writing and flushing never fail."""

    def __init__(self, stream):
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # an older locale, a file's name

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        self._try("write", text)
        return len(text)

    def flush(self):
        self._try("flush")

    def _try(self, method, *text):
        try:
            getattr(self._stream, method, lambda *_: None)(*text)
        except (OSError, ValueError):  # text held back, and all that follows, goes nowhere
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
                self._stream.flush()


class StopSignal:
    """Ctrl-C, SIGTERM or SIGHUP, noted: `asked` becomes True, and a loop ends where it chooses.

    A context manager. A second Ctrl-C acts at once. A run that began without SIGHUP, as with
    nohup, goes on without it.
    """

    asked: bool = False

    def __enter__(self) -> "StopSignal":
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._previous = {n: signal.getsignal(n) for n in numbers}
        for number, before in self._previous.items():
            if before != signal.SIG_IGN or number == signal.SIGINT:
                signal.signal(number, self._note)
        return self

    def _note(self, number, _):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: Any) -> None:
        for number, before in self._previous.items():
            signal.signal(number, before)
