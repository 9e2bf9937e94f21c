"""What the README promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import jitted

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FRONTIER = (ROOT / "docs" / "frontier.md").read_text()

pytestmark = jitted


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_agent_of_the_readme_learns(tmp_path):
    (snippet,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, best = map(float, re.findall(r"[01]\.\d+", done.stdout))
    assert found == best


def test_the_agent_of_the_frontier_page_tries_everything_and_learns():
    (snippet,) = re.findall(r"```python\n(.*?)```", FRONTIER, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "untried pairs: 0, states: 64 of 64" in done.stdout
    found, best = map(float, re.findall(r"[01]\.\d+", done.stdout))
    assert found == best


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README + FRONTIER


def test_ci_runs_the_readme_test_command():
    (command,) = [block.strip() for block in blocks("bash") if "tests/run_all.py" in block]
    assert command in (ROOT / ".ci" / "run").read_text()


def test_every_file_that_the_readme_names_exists():
    for name in re.findall(r"`([\w/]+\.py)`", README) + re.findall(
        r"\]\(((?:docs|benchmark)/[^)]+)\)", README
    ):
        assert (ROOT / name).exists() or (ROOT / "tests" / name).exists(), name


@pytest.mark.parametrize("script", sorted(ROOT.glob("gb_*.py")), ids=lambda path: path.stem)
def test_every_flag_that_the_readme_uses_exists(script):
    done = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for block in blocks("bash"):
        for line in block.splitlines():
            if script.name in line:
                for flag in re.findall(r" --([a-z-]+)", line.split("#")[0]):
                    assert f"--{flag}" in done.stdout, flag
