"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with bars in cells escaped; no line end at its end."""
    return "\n".join([_row(header), "|" + "---|" * len(header), *(_row(row) for row in rows)])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
