"""The repository's folders and pages; to import this module makes scripts and tools/ importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "reproduce" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]


def replace_block(path, name, script, text):
    """Put text between the two marks of that name in a page."""
    begin, end = f"<!-- {name}: python reproduce/{script} -->\n", f"\n<!-- end of {name} -->"
    content = path.read_text()
    if content.count(begin) != 1 or content.count(end) != 1:
        raise ValueError(f"{path} has no {begin!r} and {end!r} to write between")
    head, rest = content.split(begin)
    path.write_text(head + begin + text + end + rest.split(end)[1])
