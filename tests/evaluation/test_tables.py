"""Tables: the paper's rows, half-up rounding, one protocol for each metric in a table."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import pytest

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.tables import TABLE_1, TABLE_2, Cell, half_up, one_protocol, table_of


def mean(values: Sequence[str | None]) -> Decimal | None:
    """The exact mean of decimals; None where one is missing."""
    known = [Decimal(value) for value in values if value is not None]
    return sum(known, Decimal(0)) / len(values) if len(known) == len(values) else None


def test_halves_go_up_on_decimals() -> None:
    assert [half_up(v) for v in (74.05, 81.65, 0.05, 100.0, None)] == ["74.1", "81.7", "0.1", "100.0", "–"]
    assert f"{74.05:.1f}" == "74.0"  # what binary floats would print


def test_printed_averages_follow_from_printed_numbers() -> None:
    for name, (*splits, average) in TABLE_1.items():
        assert half_up(mean([split[2] for split in splits])) == (average or "–"), name  # type: ignore[index]
    for name, (high, low, average) in TABLE_2.items():
        assert half_up(mean([high, low])) == average, name


def cell(protocol: str, metric: str = "step_sr") -> Cell:
    return Cell(metric, 40.0, (35.05, 46.0), protocol)


def test_a_table_names_the_protocol_of_each_metric() -> None:
    rows = [("a", cell("p, macro"), cell("rule any", "purity")), ("b", cell("p, macro (steps lost)"), None)]
    table = table_of("Title", ("name", "Step SR", "purity"), rows)
    assert table.rows == (("a", "40.0 [35.1, 46.0]", "40.0 [35.1, 46.0]"), ("b", "40.0 [35.1, 46.0]", "–"))
    assert table.protocols == "Protocol of step_sr: p, macro (steps lost); of purity: rule any."
    assert table.protocols in table.markdown() and table.markdown().count("\n| ") == 3


def test_a_table_of_two_protocols_is_refused() -> None:
    with pytest.raises(ScoringError, match="step_sr would be by p, macro and by q, macro"):
        table_of("Title", ("name", "Step SR"), [("a", cell("p, macro")), ("b", cell("q, macro"))])
    with pytest.raises(ScoringError, match="step_sr would be by p, macro and by p, micro"):
        one_protocol("step_sr", ["p, macro", "p, micro"])
