"""Flags, rows and tables of the commands. What cannot be is one line, exit status 2."""

import csv
import sys
from pathlib import Path

from gbcore.run import fail, lasting_output, warn  # noqa: F401
from gbcore.run.flags import check_values, read_flags


def arguments(args_class, about):
    """Flags of the command line, a dataclass, in the ranges that stand with its types."""
    args = read_flags(args_class, sys.argv[1:], description=about)
    check_values(args)
    return args


def read_rows(path):
    """Whole rows of a CSV file: dicts of text.

    Raises:
        OSError: where it cannot be read.
        ValueError: where it is no CSV file.
    """
    if Path(path).exists() and not Path(path).is_file():  # a pipe would wait for a writer
        raise ValueError(f"{path} is damaged: Require a regular file")
    try:
        with open(path, newline="", encoding="utf-8") as file:
            # The last row may be cut, by a full disk or for now.
            return [row for row in csv.DictReader(file) if None not in row.values()]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def write_rows(path, columns, rows):
    """Write dicts as CSV, real numbers with six digits."""
    try:
        with open(path, "w", newline="") as file:
            table = csv.DictWriter(file, columns, lineterminator="\n")
            table.writeheader()
            for row in rows:
                table.writerow(
                    {n: f"{v:.6g}" if isinstance(v, float) else v for n, v in row.items()}
                )
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


def markdown(header, rows):
    """A table of rows of text."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
