"""What the commands in tools/ share, under a name that no module of a user's has."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # gbcore and the scripts
