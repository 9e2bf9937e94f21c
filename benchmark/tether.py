"""Become a command that gets SIGTERM when its parent dies, however that dies (Linux).

python benchmark/tether.py PARENT_PID COMMAND [ARGUMENT ...]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # Kept over exec. The scripts write a checkpoint at this signal.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # died before we asked
        sys.exit(128 + signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
