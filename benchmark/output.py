"""What the commands of this folder write. What cannot be written is one line, exit status 2."""

import csv
import sys


def fail(message):
    """One line on stderr, exit status 2."""
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def write_figure(figure, path, dpi=110):
    """Write a matplotlib figure; the suffix of path says in which format."""
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        fail(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")


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
