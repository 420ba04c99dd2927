"""The rate and the expected end of long work."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.progress import Pace, local_time, span_text


@given(
    counts=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 200), st.floats(0, 1e6)), min_size=1, max_size=8),
    start=st.floats(0, 4e9),
)
def test_no_count_is_misread(counts: list[tuple[int, int, float]], start: float) -> None:
    """Counts that fall, totals that change, no time between two, more done than there is: never a negative rate or end."""
    pace, now = Pace(), start
    for done, of, seconds in counts:
        now += seconds
        text = pace.text(done, of, now)
        assert text.startswith(f"{done}/{of}") and "-" not in text.partition("ends about")[0]
        end = re.search(r"ends about (.*)", text)
        assert end is None or (done < of and end[1] >= local_time(now)[:-3])


def test_the_rate_is_of_this_attempt() -> None:
    pace = Pace()
    assert pace.text(30, 40, 1000.0) == "30/40"
    assert pace.text(36, 40, 1060.0) == f"36/40, 6/min, ends about {local_time(1100.0)[:-3]}"
    assert pace.text(40, 40, 1100.0) == "40/40, 6/min"
    assert pace.text(1, 8, 1200.0) == "1/8"
    assert pace.text(2, 8, 1200.0 + 7200) == f"2/8, 0.5/h, ends about {local_time(8400 + 6 * 7200)[:-3]}"
    assert pace.text(8, 8, 8400.5).endswith("/h")


def test_lengths_of_time() -> None:
    spans = {0.04: "0.0 s", 9.97: "10 s", 59.4: "59 s", 60: "1 min 0 s", 3599.6: "1 h 0 min", 90_061: "25 h 1 min"}
    assert {span: span_text(span) for span in spans} == spans
