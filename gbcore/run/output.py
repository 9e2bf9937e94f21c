"""Streams whose end does not end what writes to them."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Around a command's main: its output may end before it does, as in `... | head -2`.

    What can no longer be written, of a closed pipe, a terminal that is gone or a full disk, is
    dropped. This holds for all that prints, to the last flush.
    """
    for descriptor in range(3):  # else a file of the run could be opened in place of a closed one
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Lasting(stream or io.StringIO()) for stream in streams)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams


class _Lasting:
    """A text stream to which writing and flushing never fail."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # an older locale, or the name of a file
            return self.write(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError):
            self._drop()
            return len(text)

    def flush(self):
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._drop()

    def _drop(self):
        """Nobody reads: have what is held back, and all that follows, go nowhere."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
            self._stream.flush()
