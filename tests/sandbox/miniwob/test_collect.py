"""Collection: what a shard is, that finished ones are skipped, and that their content is repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from coepg_dagster.sandbox.miniwob.splits import KNOWN_FAMILIES, SEEDS, StepKey, assert_disjoint, held_out

pytest.importorskip("selenium")
pytest.importorskip("miniwob")

from coepg_dagster.sandbox.miniwob import collect as collecting
from coepg_dagster.sandbox.miniwob.collect import (
    SEEDS_PER_SHARD,
    SHARD_SCHEMA,
    Progress,
    Shard,
    benchmark_plan,
    collect,
    plan,
    play_shard,
    read_shards,
)
from coepg_dagster.steps import STEP_SCHEMA

if TYPE_CHECKING:
    from coepg_dagster.sandbox.miniwob.browser import Browser


def test_shards_cover_disjoint_seeds_in_their_range() -> None:
    shards = plan("train", 3)
    assert len(shards) == 3 * len(KNOWN_FAMILIES)
    mine = [s for s in shards if s.family == "click-link"]
    assert [s.seeds.start for s in mine] == [0, SEEDS_PER_SHARD, 2 * SEEDS_PER_SHARD]
    assert all(s.seeds.stop <= s.seeds.start + SEEDS_PER_SHARD for s in mine)
    assert {s.split for s in benchmark_plan()} == {"train", "validation", "test_seed", "test_text", "test_family"}
    with pytest.raises(ValueError, match="validation has no block 100"):
        _ = Shard(100, "validation", "click-link").seeds


def test_reading_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="coepg collect miniwob"):
        read_shards(tmp_path, "train")


def test_shards_have_the_columns_of_labelled_steps() -> None:
    assert [SHARD_SCHEMA.field(name) for name in STEP_SCHEMA.names] == list(STEP_SCHEMA)


def step_keys(shards: pa.Table) -> Iterator[StepKey]:
    """What the split rule needs to know of each step of `read_shards`, for `assert_disjoint`."""
    for batch in shards.to_batches(max_chunksize=512):
        for row in batch.to_pylist():
            yield StepKey.of(row, (row["elements"][index]["name"] for index in row["targets"]))


@pytest.mark.browser
@pytest.mark.usefixtures("browser")  # skips where there is no Chromium
def test_a_second_run_skips_finished_shards(tmp_path: Path) -> None:
    shards = [Shard(0, "validation", "click-test-2"), Shard(0, "validation", "login-user")]
    seen: list[int] = []
    done = collect(tmp_path, shards, processes=1, progress=lambda state: seen.append(state.steps))
    assert (done.shards, done.skipped, seen[-1]) == (2, 0, done.steps)
    assert not list(tmp_path.rglob("*.partial"))
    again = collect(tmp_path, shards, processes=1)
    assert (again.shards, again.skipped) == (0, 2)
    table = read_shards(tmp_path, "validation")
    assert table.schema.equals(SHARD_SCHEMA)
    assert assert_disjoint(step_keys(table))["validation"]["families"] == 2


@pytest.mark.browser
def test_a_shard_is_the_same_each_time(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(collecting.STEPS_PER_SHARD, "pretrain", 6)
    shard = Shard(3, "pretrain", "click-option")
    first, _ = play_shard(browser, shard)
    play_shard(browser, Shard(4, "pretrain", "click-option"))
    again, _ = play_shard(browser, shard)
    assert pa.Table.from_pylist(first, SHARD_SCHEMA).equals(pa.Table.from_pylist(again, SHARD_SCHEMA))
    assert all(row["seed"] in SEEDS["pretrain"] for row in first)
    assert not any(held_out(element["name"]) for row in first for element in row["elements"])
    for row in first:
        assert row["elements"][row["target"]]["box"] in row["boxes"]


def test_progress_starts_empty() -> None:
    assert Progress().steps == 0
