"""Requests that share a screenshot: one after another, or one ahead of the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.inference.order import grouped


@given(shared=st.lists(st.integers(0, 12)), ahead=st.integers(0, 8))
def test_each_comes_once_and_only_after_so_many_other_leaders(shared: list[int], ahead: int) -> None:
    order = grouped(shared, ahead)
    assert sorted(order) == list(range(len(shared)))
    groups = list(dict.fromkeys(shared))
    seen: list[int] = []
    for position in order:
        group = groups.index(shared[position])
        if group not in seen:
            assert group == len(seen), "leaders keep their order"
            seen.append(group)
        else:
            # as many other leaders lie between, or all that there are
            assert len(seen) >= min(group + ahead + 1, len(groups))


def test_the_others_of_a_group_follow_one_another() -> None:
    assert grouped(["a", "a", "b", "a", "b", "c"], 1) == [0, 2, 1, 3, 5, 4]
    assert grouped(["a", "b", "a", "c", "b"]) == [0, 2, 1, 4, 3]
    assert grouped([], 3) == [] and grouped(["a", "a"], 64) == [0, 1]
