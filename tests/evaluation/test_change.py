"""Before and after on the same steps."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.evaluation.change import change_of, change_text, rises
from coepg_dagster.evaluation.score import compare, score_steps
from tests.conftest import step, step_table

PAIRS = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), min_size=1, max_size=40)


@given(PAIRS)
def test_a_change_is_the_paired_comparison_of_evaluation(pairs: list[tuple[bool, bool, int]]) -> None:
    """The same rates, difference and interval as `coepg compare`, macro over episodes."""
    import pyarrow as pa

    steps = step_table(*(step(f"s{i}", episode_id=f"e{e}") for i, (_, _, e) in enumerate(pairs)))

    def judged(which: int) -> pa.Table:
        rows = [
            {"step_id": f"s{i}", "action_type": "CLICK", "value": "", "x": 15.0 if pair[which] else 80.0, "y": 15.0}
            for i, pair in enumerate(pairs)
        ]
        return pa.Table.from_pylist(rows)

    one, two = (score_steps("miniwob/point", steps, judged(which)) for which in (0, 1))
    expected = compare(one, two).differences["step_sr"]
    change = change_of([p[0] for p in pairs], [p[1] for p in pairs], [f"e{p[2]}" for p in pairs])
    assert change is not None and json.loads(json.dumps(change)) == change, "it is kept in a record"
    assert change["before"] == pytest.approx(one.metrics["step_sr"].macro)
    assert change["difference"] == pytest.approx(expected.macro)
    assert (change["ci95"] is None) == (expected.ci95 is None)
    if expected.ci95 is not None:
        assert change["ci95"] == pytest.approx(expected.ci95)
    assert f"{change['before']:.1f} → {change['after']:.1f}" in change_text(change)


@given(PAIRS)
def test_what_rises_one_way_falls_the_other(pairs: list[tuple[bool, bool, int]]) -> None:
    before, after, episodes = zip(*((a, b, f"e{e}") for a, b, e in pairs), strict=True)
    up, down, still = (
        change_of(x, y, episodes) for x, y in ((before, after), (after, before), (before, before))
    )  # fmt: skip
    assert up and down and still
    assert up["difference"] == pytest.approx(-down["difference"])
    assert not (rises(up) and rises(down)) and not rises(still)
    assert not rises(up) or (up["difference"] > 0 and len(set(episodes)) > 1)


def test_no_steps_are_no_change() -> None:
    assert change_of([], [], []) is None
