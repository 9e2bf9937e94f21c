"""The type checker on gbcore's public names and on the snippets of the pages."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, jitted

pytestmark = jitted


def check(*words):
    """What basedpyright finds: a dict."""
    pytest.importorskip("basedpyright", reason="pip install -r requirements-dev.txt")
    command = [sys.executable, *"-m basedpyright --outputjson --pythonpath".split(), sys.executable]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    how = {"capture_output": True, "text": True, "check": False, "env": environment}
    done = subprocess.run([*command, *words], **how)
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
    messages = [f"{Path(one['file']).name}: {one['message']}" for one in errors]
    # Gymnasium's own types refuse a class as entry_point, which its pages give.
    assert [text for text in messages if '"entry_point"' not in text] == []
