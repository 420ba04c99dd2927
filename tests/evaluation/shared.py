"""Where the published predictions and samples lie; tests skip without them. They are read, never copied."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from coepg_dagster.evaluation.case import Case, Notes
from coepg_dagster.evaluation.formats import each_prediction
from coepg_dagster.evaluation.protocols import PROTOCOLS
from coepg_dagster.evaluation.result import Result
from coepg_dagster.evaluation.score import PredictionFile, score_predictions
from coepg_dagster.evaluation.tables import MISSING, Table, half_up

DATA = Path(os.environ.get("COEPG_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (DATA / "published_predictions").is_dir(),
    reason=f"published predictions not found in {DATA}; set COEPG_SHARED_DATA to their folder",
)
PREDICTIONS = DATA / "published_predictions"
SAMPLES = DATA / "benchmark_samples"


def read_predictions(path: Path, format: str, protocol: str, **files: Path) -> tuple[list[Case], Notes]:
    """All readable cases of a file, and what its reader notices."""
    rows, notes = each_prediction(path, format, protocol, **files)
    return [row for row in rows if isinstance(row, Case)], notes


def score_file(
    path: Path, format: str, protocol: str, *, labels: Path | None = None, answers: Path | None = None, seed: int = 0
) -> Result:
    """A file of predictions judged by one protocol, whose points are in the space that its format says."""
    return score_predictions(PredictionFile(path, format, labels, answers), protocol, seed=seed)


def score_under_all(path: Path, format: str, family: str) -> dict[str, Result]:
    """The same predictions under every protocol of `family` ("android_control") that they hold enough for, by name."""
    names = [name for name, rule in PROTOCOLS.items() if name.split("/")[0] == family and not rule.needs]
    return {name: score_file(path, format, name) for name in names}


def protocols_table(results: Mapping[str, Result]) -> Table:
    """The same predictions under several protocols, to show how far they are apart; the one table that mixes them."""
    metrics = list(dict.fromkeys(name for result in results.values() for name in result.metrics))
    header = ["Protocol", "Scored", "Skipped"]
    for name in metrics:
        header += [f"{name} micro", f"{name} macro", f"{name} steps"]
    rows = []
    for protocol, result in results.items():
        cells = [protocol, str(result.scored), str(sum(result.skipped.values()))]
        for name in metrics:
            value = result.metrics.get(name)
            if value is None:
                cells += [MISSING] * 3
            else:
                cells += [half_up(value.micro, 2), half_up(value.macro, 2), str(value.n)]
        rows.append(tuple(cells))
    return Table("The same predictions under each protocol, per cent", tuple(header), tuple(rows))
