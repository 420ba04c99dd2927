"""The shipped snapshot keeps its promises, and its reader refuses files that do not."""

from __future__ import annotations

import io
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from PIL import Image

from coepg_dagster.sandbox.miniwob.reader import TARGETS_FILE, SnapshotError, load_snapshot, load_targets
from coepg_dagster.sandbox.miniwob.splits import KNOWN_FAMILIES, SPLITS, UNSEEN_FAMILIES
from coepg_dagster.steps import STEP_SCHEMA

from .conftest import SNAPSHOT


@pytest.fixture(scope="module")
def steps() -> pa.Table:
    return load_snapshot(SNAPSHOT)


@pytest.fixture(scope="module")
def few(steps: pa.Table) -> dict[str, pa.Table]:
    """Split → the steps of its first episodes."""
    return {split: steps.filter(pc.equal(steps["split"], split)).slice(0, 12) for split in SPLITS}


def test_size_and_counts(steps: pa.Table) -> None:
    assert sum(file.stat().st_size for file in SNAPSHOT.iterdir()) <= 8_000_000
    assert steps.schema.equals(STEP_SCHEMA)
    counts = Counter(steps["split"].to_pylist())
    assert counts["train"] >= 6000
    assert counts["validation"] >= 500
    assert counts["test_seed"] >= 300
    assert counts["test_text"] >= 200
    assert counts["test_family"] >= 200
    assert sum(n for split, n in counts.items() if split.startswith("test")) >= 900


def test_families_and_actions_are_many(steps: pa.Table) -> None:
    by_split: dict[str, set[str]] = {split: set() for split in SPLITS}
    for split, family in zip(steps["split"].to_pylist(), steps["family"].to_pylist(), strict=True):
        by_split[split].add(family)
    assert by_split["train"] == set(KNOWN_FAMILIES)
    assert by_split["test_family"] == set(UNSEEN_FAMILIES)
    assert len(by_split["test_seed"]) >= 24
    assert len(by_split["test_text"]) >= 15
    assert set(steps["action_type"].to_pylist()) == {"CLICK", "TYPE", "SELECT"}
    train = Counter(steps["family"].to_pylist())
    assert max(train.values()) <= 260


def test_history_is_written_as_in_mind2web_and_follows_the_targets(steps: pa.Table) -> None:
    targets = load_targets(SNAPSHOT)
    past: dict[str, list[str]] = {}
    columns = ["step_id", "episode_id", "history", "action_type", "value"]
    for row in steps.select(columns).to_pylist():
        assert row["history"] == past.setdefault(row["episode_id"], [])
        kind, name, names = targets[row["step_id"]]
        assert name == names[0]
        action = row["action_type"] + (f": {row['value']}" if row["value"] else "")
        past[row["episode_id"]].append(f"[{kind}] {name} -> {action}" if name else f"[{kind}] -> {action}")
        assert re.fullmatch(r"\[[a-z]+\] .*-> (CLICK|(TYPE|SELECT): .+)", past[row["episode_id"]][-1])


def test_the_recipe_counts_what_is_there(steps: pa.Table) -> None:
    text = (SNAPSHOT / "RECIPE.md").read_text("utf-8")
    for split, count in Counter(steps["split"].to_pylist()).items():
        assert re.search(rf"\| {split} \| \d+ \| \d+ \| {count} \|", text)
    assert "MIT License" in (SNAPSHOT / "LICENSE-miniwob.txt").read_text("utf-8")


def shifted(box: list[float]) -> list[float]:
    return [x + 150 for x in box]


def other_size(png: bytes) -> bytes:
    with Image.open(io.BytesIO(png)) as image:
        buffer = io.BytesIO()
        image.resize((10, 10)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda row: row.update(screenshot=b"no picture"), "row 3 .*does not decode"),
        (lambda row: row.update(screenshot=other_size(row["screenshot"])), "row 3 .*is 10 × 10 px, not 168 × 224"),
        (lambda row: row.update(boxes=[shifted(box) for box in row["boxes"]]), "row 3 .*does not lie inside the image"),
        (lambda row: row.update(boxes=[]), "row 3 .*no target box"),
        (lambda row: row.update(action_type="SCROLL"), "row 3 .*unknown action 'SCROLL'"),
        (lambda row: row.update(action_type="TYPE", value=""), "row 3 .*TYPE with the value ''"),
        (lambda row: row.update(split="train"), "row 3 .*split 'train' in the file of validation"),
        (lambda row: row.update(step_index=7), "row 3 .*step_index is 7"),
        (lambda row: row.update(family=UNSEEN_FAMILIES[0]), "does not belong in validation"),
        (lambda row: row.update(seed=0), "the seed 0 is not one of validation"),
    ],
)
def test_a_bad_row_is_named(
    few: dict[str, pa.Table], tmp_path: Path, change: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    shutil.copy(SNAPSHOT / TARGETS_FILE, tmp_path)
    for split, table in few.items():
        rows = table.to_pylist()
        write(rows, tmp_path / f"{split}.parquet")
        if split == "validation":
            bad = rows
    assert load_snapshot(tmp_path).num_rows == 12 * len(SPLITS)
    change(bad[3])
    write(bad, tmp_path / "validation.parquet")
    with pytest.raises(SnapshotError, match=complaint):
        load_snapshot(tmp_path)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows, STEP_SCHEMA), path, compression="zstd")


def test_missing_files_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"targets\.parquet is missing"):
        load_snapshot(tmp_path)
    shutil.copy(SNAPSHOT / "targets.parquet", tmp_path)
    pq.write_table(pa.table({"step_id": ["a"]}), tmp_path / "train.parquet")
    with pytest.raises(SnapshotError, match=r"train\.parquet: columns \['step_id'\]"):
        load_snapshot(tmp_path)
