"""Boards of single grounding queries: is the predicted point in the target?

All count every item, a missing answer as wrong, and include borders. They differ in what a target may be (a polygon,
nothing at all) and in the averages that their pages print. Facts of a case, all optional: `ui_type`, `application`,
`platform`, `target` (texts, classes of averages), `file_says` and `polygon` (corners in order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from coepg_dagster.evaluation.case import Case, Protocol, Verdict
from coepg_dagster.evaluation.metrics import Point, corners_in_order
from coepg_dagster.evaluation.screenspot import METRICS, judge_uground

REFUSAL: Final = "refusal"
TARGET: Final = "target"


def judge_any_order(case: Case) -> Verdict:
    """As `judge_uground`, whichever two opposite corners of a box the label has."""
    return judge_uground(replace(case, boxes=tuple(map(corners_in_order, case.boxes))))


def judge_polygons(case: Case) -> Verdict:
    """Point in the polygon where the label is one, else in the box; without a target, right if there is no answer.

    An answer of two negative coordinates is none. On the sides of a polygon, `in_polygon` decides.
    """
    point = case.prediction.point if case.prediction else None
    if case.facts.get("target") == REFUSAL:
        return Verdict((float(point is None or (point[0] < 0 and point[1] < 0)),))
    if polygon := case.facts.get("polygon"):
        return Verdict((float(point is not None and in_polygon(point, polygon)),))
    return judge_uground(case)


def in_polygon(point: Point, corners: Sequence[Point]) -> bool:
    """Even-odd rule. Of a rectangle, the left and upper side belong to it, the right and lower one do not."""
    x, y = point
    crossings = 0
    for (x1, y1), (x2, y2) in zip(corners, (*corners[1:], corners[0]), strict=True):
        if (y1 > y) != (y2 > y):
            crossings += x < x1 + (x2 - x1) * (y - y1) / (y2 - y1)
    return crossings % 2 == 1


_COMMON: Final[dict[str, Any]] = {
    "metrics": METRICS,
    "judge": judge_uground,
    "element": "point in the box, borders included",
    "text": "–",
    "denominator": "all items, no answer is wrong",
    "macro": "group",
    "group_of": lambda case: case.group,
}

SCREENSPOT_PRO: Final = Protocol(
    **_COMMON,
    name="screenspot_pro/items",
    averages="micro over 1,581 items; text and icon; each group and each application (means of both beside them)",
    source="likaixin2000/ScreenSpot-Pro-GUI-Grounding eval_screenspot_pro.py",
    groupings=("ui_type", "group × ui_type", "application", "platform"),
    items=1581,
)
SCREENSPOT_V2: Final = Protocol(
    **_COMMON,
    name="screenspot_v2/items",
    averages="micro over 1,272 items; the six groups (macro: their mean)",
    source="OS-Copilot/ScreenSpot-v2 (labels); Tongyi-MAI/MAI-UI evaluation/grounding (rule)",
    groupings=("ui_type", "application"),
    items=1272,
)
_OSWORLD_G: Final[dict[str, Any]] = _COMMON | {
    "macro": "episode",
    "element": "point in the box, borders included; of a polygon, in the box that its first four numbers make",
    "denominator": "all items; those without a target (refusals) are wrong whatever the answer, by `target` without them",
    "averages": "micro over 564 items; by `target` the 510 with one; by `ability` where labels have them; macro over "
    "screenshots",
    "source": "Tongyi-MAI/MAI-UI evaluation/grounding, which follows eval_screenspot_pro.py",
    "groupings": ("target", "ability"),
    "items": 564,
}
OSWORLD_G: Final = Protocol(**_OSWORLD_G, name="osworld_g/items")
OSWORLD_G_REFINED: Final = Protocol(**_OSWORLD_G, name="osworld_g_refined/items")
_POLYGONS: Final[dict[str, Any]] = _OSWORLD_G | {
    "judge": judge_polygons,
    "element": "point in the box, borders included, or in the polygon (even-odd); without a target: no point",
    "denominator": "all items; no answer is right without a target (refusal), else wrong",
    "source": "open-compass/VLMEvalKit, class OSWorldG, after xlang-ai/OSWorld-G",
}
OSWORLD_G_POLYGONS: Final = Protocol(**_POLYGONS, name="osworld_g/polygons")
OSWORLD_G_REFINED_POLYGONS: Final = Protocol(**_POLYGONS, name="osworld_g_refined/polygons")
MMBENCH_GUI: Final = Protocol(
    **_COMMON,
    name="mmbench_gui/items",
    averages="mean of basic and advanced (macro); each platform × level; text and icon; micro beside them",
    source="open-compass/MMBench-GUI benchmarks/l2_element_grounding.py and matrics.py",
    groupings=("platform", "platform × group", "platform × group × ui_type", "ui_type", "application"),
    items=3594,
)
UI_VISION: Final = Protocol(
    **_COMMON
    | {"judge": judge_any_order, "element": "point in the box, borders included; corners of the box in any order"},
    name="ui_vision/items",
    averages="micro over each of basic, functional, spatial (macro: the mean of those in the file)",
    source="uivision/UI-Vision eval/grounding/eval_uivision.py",
    groupings=("ui_type", "platform"),
    items=5479,
)
BOARDS: Final = (
    SCREENSPOT_PRO,
    SCREENSPOT_V2,
    OSWORLD_G,
    OSWORLD_G_POLYGONS,
    OSWORLD_G_REFINED,
    OSWORLD_G_REFINED_POLYGONS,
    MMBENCH_GUI,
    UI_VISION,
)
