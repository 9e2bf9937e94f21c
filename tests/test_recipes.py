"""docs/recipes.md: the patches apply to the code as it is, and what they make runs."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, SHORT, interpreted, only_run, result_of

pytestmark = interpreted  # a copy of gbcore has kernels of its own to compile


@pytest.fixture
def patched(tmp_path):
    """Function of a recipe's name: a copy of the script and gbcore, with its patch applied."""

    def apply(name):
        ignored = shutil.ignore_patterns("__pycache__")  # other processes write there
        for folder in ("gbcore", "tools", "reproduce"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
        for script in ROOT.glob("gb_*.py"):
            shutil.copy(script, tmp_path)
        patch = ROOT / "docs" / "recipes" / f"{name}.patch"
        subprocess.run(["git", "apply", "--unsafe-paths", patch], cwd=tmp_path, check=True)
        return tmp_path

    return apply


def run(folder, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SIXTH = """
import contextlib, io, runpy, shlex, sys
sys.path[:0] = ["reproduce", "tools"]
import numpy as np
from gbcore import TransitionGraph, q_targets
graph = TransitionGraph(2, (1,), np.int64)
a, b = (graph.node(np.array([i])) for i in range(2))
graph.add(a, 0, 1.0, b, False)
sub = graph.expand([a], [0], 2)
print("target", float(q_targets(sub, np.array([[0.2, 0.3]]), 0.5, "softmax")[0]))

def run(file, *words):
    sys.argv = [file, *words]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(file, run_name="__main__")
    return out.getvalue()

words = sys.argv[1:]
(typed,) = run("reproduce/sweep.py", *words, "--dry-run").splitlines()
run(*shlex.split(typed)[1:])
print(run("reproduce/sweep.py", *words, "--collect-only"))
run("reproduce/report.py", "--results-dir", "runs/results")
"""


def test_a_sixth_backup(patched):
    """It has its own target; script, sweep and report know it."""
    folder = patched("softmax")
    words = ["--suites", "minigrid", "--tasks", "Empty-8x8", "--seeds", "1", "--overrides"]
    words += [f"{SHORT[i][2:]}={SHORT[i + 1]}" for i in range(0, len(SHORT), 2)]
    words += ["--backups", "graph-softmax", "--run-dir", "runs"]
    out = run(folder, "-c", SIXTH, *words)
    weights = np.exp(np.array([0.2, 0.3]) / 0.1)
    expected = 1 + 0.5 * (weights @ [0.2, 0.3]) / weights.sum()
    np.testing.assert_allclose(float(re.search("target (.*)", out)[1]), expected)
    assert "1 rows added" in out
    assert "| **graph-softmax, " in (folder / "runs" / "results" / "report.md").read_text()


def test_another_environment(patched):
    folder = patched("taxi")
    run(folder, "gb_dqn_minigrid.py", "--run-dir", "runs", *SHORT)
    result = result_of(only_run(folder / "runs"))
    assert (result["env_id"], result["steps"]) == ("Taxi-v4", 60)
