"""ScreenSpot's protocols: is the predicted point in the box?

Both print the accuracy over items (micro) and the mean of the group accuracies (macro); they differ in the border rule
and in which of the two their owner reports.
"""

from __future__ import annotations

from typing import Final

from coepg_dagster.evaluation.case import Case, Protocol, Verdict
from coepg_dagster.evaluation.metrics import inside_any, strictly_inside

METRICS: Final = ("acc",)
GROUPS: Final = ("mobile_text", "mobile_icon", "desktop_text", "desktop_icon", "web_text", "web_icon")


def judge_gui_r1(case: Case) -> Verdict:
    """Point strictly inside the box."""
    point = case.prediction.point if case.prediction else None
    return Verdict((float(point is not None and any(strictly_inside(point, box) for box in case.boxes)),))


def judge_uground(case: Case) -> Verdict:
    """Point in any box, borders included; no point is wrong. Exact for labels and points in the same space."""
    point = case.prediction.point if case.prediction else None
    return _RIGHT if point is not None and inside_any(point, case.boxes) else _WRONG


_RIGHT: Final = Verdict((1.0,))
_WRONG: Final = Verdict((0.0,))


GUI_R1: Final = Protocol(
    name="screenspot/gui_r1",
    metrics=METRICS,
    judge=judge_gui_r1,
    element="point strictly inside the box, borders excluded",
    text="–",
    denominator="all items",
    averages="micro over the 1,272 items",
    source="ritzz-ai/GUI-R1 guir1/eval/eval_screenspot.py",
    macro="group",
    group_of=lambda case: case.group,
)
UGROUND: Final = Protocol(
    name="screenspot/uground",
    metrics=METRICS,
    judge=judge_uground,
    element="point divided by `scale` inside the box, borders included",
    text="–",
    denominator="all items",
    averages="macro: mean of the six group accuracies",
    source="OSU-NLP-Group/UGround offline_evaluation/ScreenSpot/eval.py",
    macro="group",
    groups=GROUPS,
    group_of=lambda case: case.group,
)
