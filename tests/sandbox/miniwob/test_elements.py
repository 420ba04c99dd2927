"""Elements: from the page's answer, under a point, and in the history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.sandbox.miniwob.elements import Element, element_at, from_dom, history_entry

ROW = {"kind": "link", "name": "ut", "color": "", "node": 7, "classes": ["alink"], "value": "", "options": []}
SMALL = Element("icon", "star Abbe", (20, 20, 30, 30), pieces=((20, 20, 30, 30),))
LARGE = Element("item", "Abbe", (0, 0, 100, 50), pieces=((0, 0, 100, 50),))


def test_a_link_over_two_lines_has_both_pieces_and_its_larger_one_as_box() -> None:
    (element,) = from_dom([{**ROW, "pieces": [[150, 52, 160, 63], [2, 63, 40, 74]]}])
    assert element.box == (2, 63, 40, 74)
    assert len(element.pieces) == 2
    assert element.centre == (21, 68.5)


@given(st.floats(0, 120), st.floats(0, 60))
def test_the_smallest_element_under_a_point_is_returned(x: float, y: float) -> None:
    element = element_at([LARGE, SMALL], (x, y))
    if 20 <= x <= 30 and 20 <= y <= 30:
        assert element is SMALL
    else:
        assert element is (LARGE if x <= 100 and y <= 50 else None)


def test_history_is_mind2webs_form() -> None:
    assert history_entry(SMALL, "CLICK", "") == "[icon] star Abbe -> CLICK"
    assert history_entry(Element("field", "", (0, 0, 9, 9)), "TYPE", "Tora") == "[field] -> TYPE: Tora"
    assert history_entry(None, "CLICK", "") == "[page] -> CLICK"
