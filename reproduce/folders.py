"""The repository's folders; to import this module makes scripts and tools/ importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "reproduce" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
