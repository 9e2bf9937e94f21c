"""Pictures: matplotlib without a screen, imported here alone."""

import os
import textwrap
from pathlib import Path

from gbtools import ROOT

os.environ["MPLBACKEND"] = "agg"  # a notebook names one that need not be installed here

from gbcore.run import fail

try:
    import matplotlib.pyplot as plt
    from matplotlib import cm, collections, colors  # noqa: F401
except ImportError as error:
    fail(f"this needs other packages: pip install -r {ROOT / 'requirements-draw.txt'}: {error}")

plt.rcParams["text.parse_math"] = False  # a $ in the name of a task is a $


def write_figure(figure, path, dpi=110):
    """Write a matplotlib figure; the suffix of path says in which format."""
    if not Path(path).suffix or Path(path).is_dir():  # matplotlib would append .png to it
        fail(f"require the name of a picture, as in curves.png, got {path}")
    figure.savefig(path, dpi=dpi)


def wrapped(text, inches, size):
    """Lines of text that are no wider than a picture, in letters of a size."""
    width = int(inches * 135 / size)
    return "\n".join(textwrap.fill(line, width) for line in text.splitlines())
