"""Progress: where a run stands, as a bar on a terminal and as a plain line every 30 s elsewhere."""

import os
import sys
import time
from datetime import timedelta

from tqdm import tqdm

LINE_EVERY = 30.0  # seconds
WINDOW = 20.0  # seconds over which the rate of steps is taken


class Progress:
    """Shows steps made and the time that is left, at the rate of the phase that runs.

    Before learning starts, steps are many times quicker: no time left is shown then.
    """

    def __init__(self, step, total, learning_starts):
        self.step, self.total, self.learning_starts = step, total, learning_starts
        self.note, self._warned = "", False
        self._bar = tqdm(
            total=total, initial=step, unit="step", mininterval=0.5, disable=None,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
        )  # fmt: skip
        self._shown_at = self._window_at = time.monotonic()
        self._window_step, self._rate = step, None

    def update(self, step):
        """The run has come to a step."""
        self.step = step
        self._bar.update()
        if step == self.learning_starts + 1:
            self._window_at, self._window_step, self._rate = time.monotonic(), step, None
        if step % 8 == 0 or self._rate is None:
            self._show()

    def warn_of_company(self, threads):
        """One line, once, where more wants to run than there are cores for a run's threads."""
        cores, load = os.cpu_count(), os.getloadavg()[0]  # over the last minute
        if threads > 1 and load > cores + 0.5 and not self._warned:
            self._warned = True
            tqdm.write(
                f"{load:.1f} threads want to run on {cores} cores, and the {threads} of this run "
                "wait for each other: beside other work --threads 1 is quicker",
                file=sys.stderr,
            )

    def close(self):
        """Nothing more comes."""
        self._bar.close()

    def _show(self):
        now = time.monotonic()
        seconds, steps = now - self._window_at, self.step - self._window_step
        if steps > 0 and (seconds >= WINDOW or (self._rate is None and seconds >= 1)):
            self._rate = steps / seconds
            if seconds >= WINDOW:
                self._window_at, self._window_step = now, self.step
        if not self._bar.disable:
            self._bar.set_postfix_str(self._text(), refresh=False)
        elif now - self._shown_at >= LINE_EVERY:
            self._shown_at = now
            print(f"{self.step:,} of {self.total:,} steps, {self._text()}", flush=True)

    def _text(self):
        if self.step <= self.learning_starts < self.total:
            left = f"learning starts after {self.learning_starts:,}"
        elif self._rate is None:
            left = "timing"
        else:
            seconds = timedelta(seconds=round((self.total - self.step) / self._rate))
            left = f"{self._rate:,.3g} steps/s, {seconds} left"
        return f"{left}, {self.note}" if self.note else left
