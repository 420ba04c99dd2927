"""The MiniWoB++ snapshot of this repository, read into one table of labelled steps.

It reads and checks the files that `coepg_dagster.sandbox.miniwob.snapshot` writes, and needs neither a browser nor the
miniwob package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from coepg_dagster.pictures import BadPicture, picture
from coepg_dagster.readers.rows import ReaderError
from coepg_dagster.sandbox.miniwob.splits import SPLITS, SplitError, StepKey, assert_disjoint
from coepg_dagster.steps import NO_VALUE, STEP_SCHEMA

REMEDY: Final = "Fetch it again, or make it: `coepg collect miniwob --snapshot data/miniwob`."
ACTIONS_WITH_VALUE: Final = ("TYPE", "SELECT")
TARGETS_FILE: Final = "targets.parquet"
TARGETS_SCHEMA: Final = pa.schema(
    [
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),  # of the element that was acted on
        pa.field("name", pa.string(), nullable=False),
        pa.field("names", pa.list_(pa.string()), nullable=False),  # of all correct elements
    ]
)
"""The names of each step's targets, for the split rule."""


class SnapshotError(ReaderError):
    """A snapshot file is missing or has a row that cannot be used; names file, row and remedy."""


def load_snapshot(path: Path) -> pa.Table:
    """The labelled steps of the snapshot folder `path` (STEP_SCHEMA), in the order of splits and files, checked.

    Checks the columns, that step ids are unique, boxes lie inside the image, actions and values fit together,
    screenshots decode to their stated size and step indices run from 0, and the split rule
    (`coepg_dagster.sandbox.miniwob.splits.assert_disjoint`). Raises SnapshotError.
    """
    tables = []
    keys: list[StepKey] = []
    targets = load_targets(path)
    for split in SPLITS:
        file = path / f"{split}.parquet"
        table = _read(file, STEP_SCHEMA)
        keys += _check(file, table, split, targets)
        tables.append(table)
    try:
        assert_disjoint(keys)
    except SplitError as error:
        raise SnapshotError(f"{path}: {error}. {REMEDY}") from error
    return pa.concat_tables(tables)


def load_labels(path: Path, columns: Sequence[str]) -> pa.Table:
    """These columns of the steps of the snapshot folder `path`, rows unchecked. Raises SnapshotError."""
    files = [path / f"{split}.parquet" for split in SPLITS]
    if missing := [file.name for file in (*files, path / TARGETS_FILE) if not file.is_file()]:
        raise SnapshotError(f"{path}: is no MiniWoB++ snapshot, {missing[0]} is missing; correct `path` or `reader`")
    for file in files:
        there = pq.read_schema(file).names
        if lacking := [name for name in columns if name not in there]:
            raise SnapshotError(
                f"{file}: is no file of a MiniWoB++ snapshot, column {lacking[0]!r} is missing; correct `path` or `reader`"
            )
    # `pq.read_table` imports pandas, a fifth of a second of a short command
    return pa.concat_tables([pq.ParquetFile(file).read(list(columns)) for file in files])


def load_targets(path: Path) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """{step_id: (kind, name, names)} of the snapshot folder `path`. Raises SnapshotError."""
    table = _read(path / TARGETS_FILE, TARGETS_SCHEMA)
    return {row["step_id"]: (row["kind"], row["name"], tuple(row["names"])) for row in table.to_pylist()}


def _read(file: Path, schema: pa.Schema) -> pa.Table:
    if not file.is_file():
        raise SnapshotError(f"{file} is missing. {REMEDY}")
    table = pq.read_table(file)
    if table.schema.names != schema.names:
        raise SnapshotError(f"{file}: columns {table.schema.names} instead of {schema.names}")
    try:
        table = table.cast(schema)
    except (pa.ArrowInvalid, ValueError) as error:
        raise SnapshotError(f"{file}: columns do not fit the schema of labelled steps: {error}") from error
    for name in schema.names:
        if not schema.field(name).nullable and table[name].null_count:
            raise SnapshotError(f"{file}: column {name} has {table[name].null_count} empty cells")
    return table


def _check(
    file: Path, table: pa.Table, split: str, targets: dict[str, tuple[str, str, tuple[str, ...]]]
) -> Iterator[StepKey]:
    """Checks each row and yields its key for the split rule."""
    lengths: dict[str, int] = {}
    number = 0
    for batch in table.to_batches(max_chunksize=256):
        for row in batch.to_pylist():
            where = f"{file}, row {number} ({row['step_id']})"
            _check_row(where, row, split)
            if row["step_index"] != lengths.get(row["episode_id"], 0):
                raise SnapshotError(f"{where}: step_index is {row['step_index']} where the episode goes on differently")
            if len(row["history"]) != row["step_index"]:
                raise SnapshotError(f"{where}: {len(row['history'])} actions of history at step {row['step_index']}")
            lengths[row["episode_id"]] = row["step_index"] + 1
            if row["step_id"] not in targets:
                raise SnapshotError(f"{where}: not in {TARGETS_FILE}")
            yield StepKey.of(row, targets[row["step_id"]][2])
            number += 1


def _check_row(where: str, row: dict[str, Any], split: str) -> None:
    if row["split"] != split:
        raise SnapshotError(f"{where}: split {row['split']!r} in the file of {split}")
    if row["seed"] is None:
        raise SnapshotError(f"{where}: no seed")
    try:
        size = picture(row["screenshot"]).size
    except BadPicture as error:
        raise SnapshotError(f"{where}: the screenshot does not decode: {error}") from error
    if size != (row["width"], row["height"]):
        raise SnapshotError(
            f"{where}: the screenshot is {size[0]} × {size[1]} px, not {row['width']} × {row['height']}"
        )
    if not row["boxes"]:
        raise SnapshotError(f"{where}: no target box")
    for x1, y1, x2, y2 in row["boxes"]:
        if not (0 <= x1 < x2 <= row["width"] and 0 <= y1 < y2 <= row["height"]):
            raise SnapshotError(f"{where}: the box ({x1}, {y1}, {x2}, {y2}) does not lie inside the image")
    takes_value = row["action_type"] in ACTIONS_WITH_VALUE
    if not takes_value and row["action_type"] != "CLICK":
        raise SnapshotError(f"{where}: unknown action {row['action_type']!r}")
    if takes_value == (row["value"] == NO_VALUE):
        raise SnapshotError(f"{where}: {row['action_type']} with the value {row['value']!r}")
