"""Everything that CI checks: lint, format, the suite, and the suite again without JIT.

python tests/run_all.py
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*command, **environment):
    print("$", *command, flush=True)
    # One thread per process: the tests use one process per core.
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main():
    run("ruff", "check", ".")
    run("ruff", "format", "--check", ".")
    run("pytest", "--numprocesses", "2", "--dist", "worksteal", NUMBA_DISABLE_JIT="1")
    run("pytest", "--numprocesses", "2", "--dist", "worksteal")


if __name__ == "__main__":
    main()
