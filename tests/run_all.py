"""Everything that CI checks: lint, format, the suite, and the suite again without JIT.

python tests/run_all.py
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# They compile most kernels, once for all, and take as long as the suite without JIT.
COMPILING = "tests/test_dqn_scripts.py", "tests/test_examples.py", "tests/test_graph.py"
BOTH_CORES = "--numprocesses", "2", "--dist", "worksteal"


def run(*commands, **environment):
    """Modules with their arguments, side by side, the first one with these variables."""
    running = []
    for number, command in enumerate(commands):
        print("$", *command, flush=True)
        # One thread per process: there is a process per core.
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment if number == 0 else {})
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if number else {}
        words = [sys.executable, "-m", *command]
        running.append(subprocess.Popen(words, cwd=ROOT, env=variables, text=True, **output))
    for process in running:
        print(process.communicate()[0] or "", end="", flush=True)
    if any(process.returncode for process in running):
        sys.exit(1)


def main():
    run(["ruff", "check", "."])
    run(["ruff", "format", "--check", "."])
    run(["pytest"], ["pytest", *COMPILING], NUMBA_DISABLE_JIT="1")
    run(["pytest", *BOTH_CORES, *(f"--ignore={path}" for path in COMPILING)])


if __name__ == "__main__":
    main()
