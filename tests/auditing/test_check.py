"""Everything of a loop, byte for byte and row for row."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coepg_dagster.artifacts import DATASET
from coepg_dagster.auditing.archive import NotFound
from coepg_dagster.auditing.check import check
from coepg_dagster.provenance import Ref
from tests.auditing.loop import LOOP_NAME, Hand


def test_an_untouched_loop_is_whole(hand: Hand) -> None:
    report = check(hand.archive, LOOP_NAME)
    assert report == {"artifacts": len(hand.records), "files": len(hand.records) + 2, "rows": 4, "tampered": []}


def test_every_row_is_checked(hand: Hand) -> None:
    file = hand.store.root / hand.newest[Ref("dataset", 1)].folder / DATASET
    table = pq.read_table(file)
    at = table.schema.get_field_index("box")
    boxes = [table["box"][0].as_py(), [0.0, 0.0, 1.0, 1.0]]
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(boxes, table.schema.field(at).type)), file)
    lines = check(hand.archive, LOOP_NAME)["tampered"]
    assert any("dataset.parquet has other content" in line for line in lines)
    [row] = [line for line in lines if "its box" in line]
    assert table["row_id"][1].as_py() in row and "(step t)" in row and row.startswith("hand/s1/dataset/1: ")


def test_a_table_that_cannot_be_read_does_not_hide_the_rest(hand: Hand) -> None:
    (hand.store.root / hand.newest[Ref("verdicts", 0)].folder / "verdicts.parquet").write_bytes(b"nonsense")
    (hand.store.root / hand.newest[Ref("planner", 1)].folder / "model.safetensors").write_text("other")
    lines = check(hand.archive, LOOP_NAME)["tampered"]
    assert any("planner[1]" in line for line in lines)
    assert any("dataset[0]: its rows cannot be checked" in line for line in lines)


def test_a_loop_without_artifacts_says_so(hand: Hand) -> None:
    with pytest.raises(NotFound, match="hand/s2 has no artifacts yet"):
        check(hand.archive, "hand/s2")
