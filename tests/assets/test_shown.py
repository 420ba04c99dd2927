"""The metadata of artifacts, as people read them."""

from __future__ import annotations

import math

import pytest
from coepg_dagster.assets.shown import rounded, shown
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.artifacts import VERDICTS, write_table
from coepg_dagster.provenance import Ref
from tests.assets.conftest import InProcess
from tests.auditing.loop import GIVEN


def test_the_rows_of_a_table_are_counted_and_none_where_it_is_damaged(light: InProcess) -> None:
    light.make(0)
    record = light.loop.record(light.instance, Ref("verdicts", 0))
    assert record is not None
    file = light.project.store / record.folder / VERDICTS
    write_table(GIVEN[0], file)
    assert shown(light.loop, light.project.store, record)["dagster/row_count"] == GIVEN[0].num_rows
    file.write_bytes(b"no table")
    assert "dagster/row_count" not in shown(light.loop, light.project.store, record)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00006610104901483282, "6.61e-05"),
        (56.71234, "56.71"),
        (12345.678, "12345.68"),
        (0.123456, "0.1235"),
        (3, "3"),
        (0.0, "0.0"),
    ],
)
def test_a_number_has_two_decimals_or_four_digits(value: float, text: str) -> None:
    assert str(rounded(value)) == text


@given(st.floats())
def test_any_number_stays_near_what_it_was(value: float) -> None:
    now = rounded(value)
    assert (math.isnan(now) and math.isnan(value)) or now == value or abs(now - value) <= max(5e-4 * abs(value), 5e-324)
