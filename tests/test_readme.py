"""What README and pages promise: commands, files, snippets that pass the type checker."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, command, jitted

README = (ROOT / "README.md").read_text()

pytestmark = jitted


def test_the_agent_of_the_frontier_page_tries_everything_and_learns(capsys):
    page = (ROOT / "docs" / "frontier.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(snippet, {})
    out, _ = capsys.readouterr()
    assert "untried pairs: 0, states: 64 of 64" in out
    reached, best = map(float, re.findall(r"[01]\.\d+", out))
    assert reached == best


def test_ci_runs_the_readme_test_command():
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    (typed,) = [block.strip() for block in blocks if "tests/run_all.py" in block]
    assert typed in (ROOT / ".ci" / "run").read_text()


def test_every_file_that_the_readme_names_exists():
    for name in re.findall(r"`([\w/]+\.py)`", README) + re.findall(
        r"\]\(((?:docs|benchmark)/[^)]+)\)", README
    ):
        assert (ROOT / name).exists() or (ROOT / "tests" / name).exists(), name


def commands():
    """Flags that the pages give to each script."""
    flags_of = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text().replace("\\\n", " ")
        for name, words in re.findall(r"python ([\w/]+\.py)([^`#\n]*)", text):
            flags_of.setdefault(name, set()).update(re.findall(r" --([a-z0-9-]+)", words))
    return {name: flags for name, flags in flags_of.items() if flags}


@pytest.mark.parametrize("name", commands())
def test_every_flag_that_a_page_uses_exists(name, capsys):
    module = re.sub("^(tools|reproduce)/", "", name).removesuffix(".py").replace("/", ".")
    assert command(importlib.import_module(module), "--help") == 0
    about, first, others = capsys.readouterr().out.partition("-h, --help")
    assert f"python {name}" in about  # from the docstring, which says what the command is for
    named = set(re.findall(r"--([a-z0-9-]+)", first + others))
    assert commands()[name] <= named


def check(*words):
    """What basedpyright finds: a dict."""
    pytest.importorskip("basedpyright", reason="pip install -r requirements-dev.txt")
    base = [sys.executable, *"-m basedpyright --outputjson --pythonpath".split(), sys.executable]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([*base, *words], stdout=subprocess.PIPE, check=False, env=environment)
    return json.loads(done.stdout)


def test_public_names_have_types():
    report = check("--verifytypes", "gbcore", "--ignoreexternal")["typeCompleteness"]
    unknown = [symbol["name"] for symbol in report["symbols"] if not symbol["isTypeKnown"]]
    assert report["completenessScore"] >= 0.98, unknown


def test_snippets_of_the_pages_pass(tmp_path):
    """Also parts of programs, whose other names are not theirs to define."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        codes = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for number, code in enumerate(codes):
            indented = "if True:\n" * code.startswith(" ") + code
            (tmp_path / f"{page.stem}_{number}.py").write_text(indented)
    config = {"typeCheckingMode": "standard", "reportUndefinedVariable": "none"}
    config |= {"include": ["."], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    errors = check("--project", str(tmp_path))["generalDiagnostics"]
    messages = [f"{one['file'].rpartition('/')[2]}: {one['message']}" for one in errors]
    # Gymnasium's own types refuse a class as entry_point, which its pages give.
    assert [text for text in messages if '"entry_point"' not in text] == []
