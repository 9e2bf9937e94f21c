"""What a run tells while it lasts: progress, on streams whose end does not end it."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from tqdm import tqdm

LINE_EVERY = 30.0  # seconds


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


class Progress:
    """Where a run stands: a bar on a terminal, a plain line every 30 s elsewhere."""

    def __init__(self, step: int, total: int, learning_starts: int) -> None:
        self._learning_starts = learning_starts  # before, steps are many times quicker
        self._bar = tqdm(
            total=total, initial=step, unit="step", mininterval=0.5, smoothing=0.02, disable=None
        )
        self._told = time.monotonic(), step

    def update(self, step: int, note: Callable[[], str]) -> None:
        """The run has come to a step, of which the note tells more."""
        self._bar.update()
        if step % 64:
            return
        if not self._bar.disable:
            self._bar.set_postfix_str(note(), refresh=False)
        elif (seconds := time.monotonic() - self._told[0]) >= LINE_EVERY:
            rate = (step - self._told[1]) / seconds
            self._told = time.monotonic(), step
            shown = f"{step:,} of {self._bar.total:,} steps, {rate:,.3g} steps/s, "
            if step > self._learning_starts:
                shown += f"{timedelta(seconds=round((self._bar.total - step) / rate))} left, "
            print(shown + note(), flush=True)

    def close(self) -> None:
        """Nothing more comes."""
        self._bar.close()
