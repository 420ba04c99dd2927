"""Numbers in metadata, as people read them."""

from __future__ import annotations

import math

import pytest
from coepg_dagster.assets.stage import rounded
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.00006610104901483282, "6.61e-05"),
        (56.71234, "56.71"),
        (12345.678, "12345.68"),
        (0.123456, "0.1235"),
        (3, "3"),
        (0.0, "0.0"),
    ],
)
def test_a_number_has_two_decimals_or_four_digits(value: float, shown: str) -> None:
    assert str(rounded(value)) == shown


@given(st.floats())
def test_any_number_stays_near_what_it_was(value: float) -> None:
    now = rounded(value)
    assert (math.isnan(now) and math.isnan(value)) or now == value or abs(now - value) <= max(5e-4 * abs(value), 5e-324)
