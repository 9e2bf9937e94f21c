"""Flags, rows and tables of the commands."""

import csv

import tyro

from gbcore.run import fail, one_line_errors, warn  # noqa: F401


def arguments(args_class, about):
    """Flags of the command line, a dataclass."""
    return tyro.cli(args_class, description=about)


def read_rows(path):
    """Whole rows of a CSV file: dicts of text. OSError where it cannot be read."""
    with open(path, newline="", encoding="utf-8") as file:
        # The last row may be cut, as a run goes on.
        return [row for row in csv.DictReader(file) if None not in row.values()]


def write_rows(path, columns, rows):
    """Write dicts as CSV, real numbers with six digits."""
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow({n: f"{v:.6g}" if isinstance(v, float) else v for n, v in row.items()})


def markdown(header, rows):
    """A table of rows of text."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
