"""Tables with the same bytes, files that appear whole, and steps read back."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coepg_dagster.artifacts import steps_of, whole, write_steps, write_table
from coepg_dagster.steps import VERDICT_SCHEMA
from tests.conftest import step, step_table

VERDICTS = st.lists(
    st.fixed_dictionaries(
        {
            "candidate_id": st.text("ab#", max_size=5),
            "step_id": st.sampled_from(["s", "t"]),
            "verifier": st.just("v"),
            "hit": st.booleans(),
            "x": st.none() | st.floats(0, 99),
            "y": st.none() | st.floats(0, 99),
            "mean_logprob": st.none() | st.floats(-9, 0),
            "tokens": st.integers(0, 9),
            "text": st.text(max_size=5),
            "failure": st.none() | st.just("timeout"),
        }
    ),
    max_size=12,
)


@settings(max_examples=30)
@given(rows=VERDICTS, cuts=st.sets(st.integers(0, 12), max_size=4))
def test_equal_tables_give_equal_bytes_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], cuts: set[int]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = pa.Table.from_pylist(rows, VERDICT_SCHEMA)
    places = sorted({0, len(rows)} | {cut for cut in cuts if cut < len(rows)})
    pieces = [whole.slice(a, b - a) for a, b in itertools.pairwise(places)]
    write_table(whole, folder / "whole.parquet")
    write_table(pa.concat_tables([VERDICT_SCHEMA.empty_table(), *pieces]), folder / "cut.parquet")
    assert (folder / "whole.parquet").read_bytes() == (folder / "cut.parquet").read_bytes()
    assert pq.read_table(folder / "whole.parquet").to_pylist() == whole.to_pylist()


def test_also_where_a_column_takes_several_pages(tmp_path: Path) -> None:
    """Parquet cuts pages along the chunks of a large column: screenshots are such a column."""
    noise = random.Random(0)
    whole = step_table(*(step(f"s{i}", screenshot=noise.randbytes(3000)) for i in range(1000)))
    write_table(whole, tmp_path / "whole.parquet")
    write_table(pa.concat_tables([whole.slice(i, 97) for i in range(0, 1000, 97)]), tmp_path / "cut.parquet")
    assert (tmp_path / "whole.parquet").read_bytes() == (tmp_path / "cut.parquet").read_bytes()


def test_a_file_appears_in_one_piece_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: Any, draft: Path, **__: Any) -> None:
        draft.write_bytes(b"half")
        raise KeyboardInterrupt

    file, empty = tmp_path / "table.parquet", VERDICT_SCHEMA.empty_table()
    monkeypatch.setattr(pq, "write_table", killed)
    with pytest.raises(KeyboardInterrupt):
        write_table(empty, file)
    assert not list(tmp_path.iterdir())
    file.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        write_table(empty, file)
    assert file.read_bytes() == b"before" and list(tmp_path.iterdir()) == [file]


def test_two_who_write_the_same_file_do_not_meet(tmp_path: Path) -> None:
    together = threading.Barrier(2)

    def write(text: str) -> None:
        with whole(tmp_path / "file") as draft:
            draft.write_text(text)
            together.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, ["one", "two"]))
    assert (tmp_path / "file").read_text() in ("one", "two") and len(list(tmp_path.iterdir())) == 1


def test_steps_of_a_split_in_file_order(tmp_path: Path) -> None:
    rows = [step(f"s{i}", split="train" if i % 2 else "test") for i in range(6)]
    write_steps(step_table(*rows), tmp_path / "steps.arrow", ["train", "test"])
    assert steps_of(tmp_path / "steps.arrow", "train")["step_id"].to_pylist() == ["s1", "s3", "s5"]
    some = steps_of(tmp_path / "steps.arrow", "train", 2)["step_id"].to_pylist()
    assert len(some) == 2 and some == sorted(some) and set(some) < {"s1", "s3", "s5"}


def test_a_few_steps_of_a_split_cost_no_memory_for_the_others(tmp_path: Path) -> None:
    screenshot = bytes(20_000)
    rows = [step(f"s{i}", screenshot=screenshot) for i in range(300)]
    write_steps(step_table(*rows), tmp_path / "steps.arrow", ["train"])
    usual = pa.default_memory_pool()
    counting = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(counting)
    try:
        assert steps_of(tmp_path / "steps.arrow", "train", 4).num_rows == 4
    finally:
        pa.set_memory_pool(usual)
    assert counting.max_memory() < 20 * len(screenshot)
