"""What the README promises."""

import importlib
import re
from pathlib import Path

import pytest
from conftest import command, jitted

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FRONTIER = (ROOT / "docs" / "frontier.md").read_text()

pytestmark = jitted


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_agent_of_the_readme_learns(capsys):
    (snippet,) = blocks("python")
    exec(snippet, {})
    found, best = map(float, re.findall(r"[01]\.\d+", capsys.readouterr().out))
    assert found == best


def test_the_agent_of_the_frontier_page_tries_everything_and_learns(capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", FRONTIER, re.DOTALL)
    exec(snippet, {})
    out, _ = capsys.readouterr()
    assert "untried pairs: 0, states: 64 of 64" in out
    found, best = map(float, re.findall(r"[01]\.\d+", out))
    assert found == best


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README + FRONTIER


def test_ci_runs_the_readme_test_command():
    (typed,) = [block.strip() for block in blocks("bash") if "tests/run_all.py" in block]
    assert typed in (ROOT / ".ci" / "run").read_text()


def test_every_file_that_the_readme_names_exists():
    for name in re.findall(r"`([\w/]+\.py)`", README) + re.findall(
        r"\]\(((?:docs|benchmark)/[^)]+)\)", README
    ):
        assert (ROOT / name).exists() or (ROOT / "tests" / name).exists(), name


@pytest.mark.parametrize("script", sorted(ROOT.glob("gb_*.py")), ids=lambda path: path.stem)
def test_every_flag_that_the_readme_uses_exists(script, capsys):
    assert command(importlib.import_module(script.stem), "--help") == 0
    out, _ = capsys.readouterr()
    for block in blocks("bash"):
        for line in block.splitlines():
            if script.name in line:
                for flag in re.findall(r" --([a-z-]+)", line.split("#")[0]):
                    assert f"--{flag}" in out, flag
