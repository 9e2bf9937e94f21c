"""`pip install .`: what the wheel holds, and what of it runs without torch."""

import email
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from conftest import ROOT, jitted
from packaging.requirements import Requirement

import gbcore

pytestmark = jitted

GRAPH_ALONE = """
import sys
for name in ("torch", "gymnasium", "tyro"):
    sys.modules[name] = None  # as if it were not installed
import numpy as np
from gbcore import FrontierPlanner, Replay
from gbcore.graph import TransitionGraph
graph = TransitionGraph(2, (1,))
node = graph.node(np.zeros(1, np.uint8))
Replay(graph, 4).add(node, 1, 0.5, node, False)
assert graph.num_transitions == 1
try:
    from gbcore import categorical_targets
except ImportError as error:
    assert "pip install torch" in str(error)
from gbcore import q_targets
leaf_q = np.full((1, 2), 2.0)
assert q_targets(graph.expand([node], [1], 3), leaf_q, 0.5)[0] == 0.5 + 0.5 * 2.0
print(__import__("gbcore").__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The zip file, built offline, in a folder of its own."""
    pytest.importorskip("setuptools", minversion="77")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gbcore", source / "gbcore", ignore=ignored)
    words = "-m pip wheel -q --no-deps --no-build-isolation --no-index -w".split()
    subprocess.run([sys.executable, *words, built, source], check=True, timeout=300)
    (path,) = built.iterdir()
    with zipfile.ZipFile(path) as file:
        yield file


def test_the_wheel_holds_the_package_and_py_typed_and_its_bounds_hold_the_pins(wheel):
    names = wheel.namelist()
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "gbcore").rglob("*.py")}
    assert {name for name in names if name.startswith("gbcore/")} == source | {"gbcore/py.typed"}
    (path,) = [name for name in names if name.endswith("METADATA")]
    metadata = email.message_from_bytes(wheel.read(path))
    assert (metadata["Name"], metadata["Version"]) == ("graph-backup", gbcore.__version__)
    requirements = [*map(Requirement, metadata.get_all("Requires-Dist"))]
    needed = [one for one in requirements if "extra" not in str(one.marker)]
    assert sorted(one.name for one in needed) == ["numba", "numpy", "scipy"]
    assert all(">=" in str(one.specifier) for one in needed)
    text = "".join((ROOT / f"requirements{of}.txt").read_text() for of in ("", "-sb3"))
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE))
    for one in requirements:
        assert one.specifier.contains(pins[one.name]), one


def test_graph_and_scalar_targets_of_an_installed_package_need_no_torch(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{GRAPH_ALONE}"
    how = {"capture_output": True, "text": True, "check": False, "timeout": 300}
    command, environment = [sys.executable, "-c", program], {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "site" / "gbcore" / "__init__.py")


def test_every_public_name_is_told():
    assert {*gbcore.__all__} <= {*dir(gbcore)}  # that they are there is in test_api.py
    with pytest.raises(AttributeError, match="no attribute 'graphs'"):
        _ = gbcore.graphs


SCRIPTS = sorted([*ROOT.glob("gb_*.py"), *ROOT.glob("examples/*.py")])
SCRIPTS = [path for path in SCRIPTS if path.stem not in ("sokoban", "mazes", "worlds")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_inline_metadata_is_the_pins(script):
    """`uv run gb_dqn_minigrid.py` (PEP 723)."""
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", script.read_text())
    metadata = tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))
    files = ["requirements.txt", *["requirements-sb3.txt"] * (script.stem == "sb3_dqn")]
    text = "".join((ROOT / name).read_text() for name in files)
    assert metadata["dependencies"] == re.findall(r"(?m)^([\w-]+==[\w.]+)", text)
