"""Writes the table of all baselines into docs/performance.md, between its two markers: `python -m benchmarks.table`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.baseline import FOLDER

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- baselines -->", "<!-- end of baselines -->"
HEAD = "| Benchmark | Device | Value | Against | Ratio | Commit |\n|---|---|---|---|---|---|"


def row(facts: Mapping[str, Any]) -> str:
    """One baseline as a table row; without a value, the reason takes its place."""
    against = facts["against"]
    compared = _number(against) if isinstance(against, int | float) else against or "–"
    if what := facts.get("against_what"):
        compared = f"{compared}: {what}"
    value = f"not run: {facts['reason']}" if facts["value"] is None else f"{_number(facts['value'])} {facts['unit']}"
    ratio = "–" if facts["ratio"] is None else _number(facts["ratio"])
    name = f"[`{facts['name']}`](../benchmarks/baselines/{facts['name']}.json)"
    return f"| {name} | {facts['device']} | {value} | {compared} | {ratio} | {(facts['commit'] or '–')[:7]} |"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(folder: Path = FOLDER) -> str:
    return "\n".join([HEAD, *(row(json.loads(file.read_text())) for file in sorted(folder.glob("*.json")))])


def put(page: str, rows: str) -> str:
    """`page` with `rows` between its markers. Raises ValueError where a marker is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no markers {BEGIN} and {END} around its table: put them back")
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(put(PAGE.read_text(), table()))
