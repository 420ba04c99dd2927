"""What the UI shows of an artifact: the metadata of its materialization, in the order in which they are read there.

Both the step that makes an artifact and `coepg recover`, which has its record and its folder alone, take them from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import dagster as dg
import pyarrow.parquet as pq
from coepg_dagster.assets.about import page_link
from coepg_dagster.assets.ledger import RECORD, Loop

from coepg_dagster.artifacts import BOARDS, CANDIDATES, DATASET, PAIRS, PREDICTIONS, THIRD_PARTY, VERDICTS
from coepg_dagster.auditing.marks import VETOES
from coepg_dagster.provenance import Asset, Record

TABLES: Final[Mapping[Asset, str]] = {
    "candidate_plans": CANDIDATES,
    "verdicts": VERDICTS,
    "dataset": DATASET,
    "evaluation": PREDICTIONS,
}
"""The table whose rows Dagster counts."""


def shown(
    loop: Loop,
    store: Path,
    record: Record,
    made: Mapping[str, Any] | None = None,
    worker_seconds: float | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The metadata of an artifact: what, how good, how long, from what, where.

    Args:
        store: the folder of all artifacts.
        made, worker_seconds, overrides: what its step knows beside the record.
    """
    values = numbers(record.figures) if record.asset != "evaluation" else headlines(record.figures)
    values |= {"seconds": record.seconds} | ({} if worker_seconds is None else {"worker_seconds": worker_seconds})
    return {
        **page_link(loop, record.ref),
        **_row_count(store / record.folder, record.asset),
        **(made or {}),
        **{name: rounded(value) for name, value in values.items()},
        "inputs": _inputs_table(record),
        **({"overrides": dg.MetadataValue.json(dict(overrides))} if overrides else {}),
        **({"place": dg.MetadataValue.json(record.place)} if record.place else {}),
        "folder": record.folder,  # below the store, which may be moved
        RECORD: dg.MetadataValue.json(record.model_dump(mode="json")),
    }


def _row_count(folder: Path, asset: Asset) -> dict[str, int]:
    with suppress(OSError, ValueError):  # a recovered version may be gone or damaged
        if asset in TABLES and (file := folder / TABLES[asset]).exists():
            return {"dagster/row_count": pq.read_metadata(file).num_rows}
    return {}


def rounded(value: float) -> float:
    """A number as people read it: two decimals, or as many as show four digits. The record has all digits."""
    if isinstance(value, int) or not math.isfinite(value) or value == 0:
        return value
    return round(value, max(2, 3 - math.floor(math.log10(abs(value)))))


def numbers(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in nested figures, under names like `test_seed/step_sr`, for Dagster's plots."""
    flat: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = value
    return flat


def headlines(figures: Mapping[str, Any]) -> dict[str, float]:
    """`step_sr/test_seed` → macro value, for each metric and split or board of an evaluation; plotted over k in the UI."""
    splits = {name: score for name, score in figures.items() if name not in (PAIRS, BOARDS, THIRD_PARTY)}
    return {
        f"{metric}/{split}": values["macro"]
        for split, score in (splits | figures.get(BOARDS, {})).items()
        for metric, values in score["metrics"].items()
        if values["macro"] is not None
    }


def _inputs_table(record: Record) -> dg.TableMetadataValue:
    rows: list[tuple[str, str, int | None, str]] = [
        (used.asset, used.data_version, used.iteration, used.run_id[:8]) for used in record.inputs
    ]
    if read := record.figures.get(VETOES):
        rows.append((VETOES, read["version"], record.iteration, ""))
    return dg.MetadataValue.table(
        [
            dg.TableRecord({"asset": asset, "partition": str(iteration), "version": version, "run": run})
            for asset, version, iteration, run in rows
        ],
        dg.TableSchema([dg.TableColumn(name) for name in ("asset", "partition", "version", "run")]),
    )
