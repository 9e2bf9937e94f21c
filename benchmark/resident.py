"""Memory of this process."""

import resource
import threading
import time


def resident_mb():
    """MB that this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


class Peak:
    """The most memory that this process has while the block runs, in MB."""

    def __enter__(self):
        self.mb, self._over = resident_mb(), False
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over:
            self.mb = max(self.mb, resident_mb())
            time.sleep(0.002)

    def __exit__(self, *_):
        self._over = True
        self._thread.join()
