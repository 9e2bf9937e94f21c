"""End a process when its parent does, however that dies (Linux): it gets SIGTERM.

python tools/tether.py PARENT_PID COMMAND [ARGUMENT ...]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent):
    """Of the calling process, whose parent has that id. Kept over exec."""
    # The scripts write a checkpoint at this signal.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # died before we asked
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
