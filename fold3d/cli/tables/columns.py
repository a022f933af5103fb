"""A table of words: the first column to the left, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence


def lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the rows, the header first, with columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(pairs)
        ).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
