"""Multimodal-Mind2Web's protocols, and the embedded MiniWoB++ benchmark's: Ele.Acc, Op.F1, Step SR.

Common core: a step has an operation (CLICK, TYPE, SELECT), a value (empty for every CLICK) and zero, one or several
target boxes. Step SR is 1 where Ele.Acc is 1 and Op.F1 is exactly 1. Where the public scripts differ, each is followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from coepg_dagster.evaluation.case import Action, Case, Notes, Protocol, ScoringError, Unread, Verdict, skipped
from coepg_dagster.evaluation.metrics import inside, inside_any, operation_f1

METRICS: Final = ("ele_acc", "op_f1", "step_sr")
MISS: Final = Verdict((0.0, 0.0, 0.0))
OPERATIONS: Final = ("CLICK", "TYPE", "SELECT")
MAX_RANK: Final = 50
"""`mind2web/seeact` counts only candidates that the ranker put before this rank."""


def _verdict(element: bool, f1: float) -> Verdict:
    return Verdict((float(element), f1, float(element and f1 == 1.0)))


def operation_text(action: Action | None) -> str:
    """The string whose tokens Op.F1 compares: "OP value"; empty where there is no action."""
    return "" if action is None else f"{action.type} {action.value}"


def judge_miniwob(case: Case) -> Verdict:
    """Point in any target box, borders included; no lower-casing; a step without target is skipped."""
    if not case.boxes:
        return skipped("no_target")
    point = case.prediction.point if case.prediction else None
    element = point is not None and inside_any(point, case.boxes)
    return _verdict(element, operation_f1(operation_text(case.prediction), operation_text(case.label)))


def judge_seeact(case: Case) -> Verdict:
    """Choice of element. Facts: `positives`, the (backend_node_id, rank) of all positive candidates, and `element`.

    `element` is the predicted backend_node_id; None is "none of the above", which scores 0 / 0 / 0.
    """
    positives = case.facts.get("positives")
    if positives is None or "element" not in case.facts:
        raise ScoringError(
            f"step {case.step_id}: mind2web/seeact scores a chosen element, but the prediction holds none; "
            "give `positives` and `element`, or score points with mind2web/uground"
        )
    known = {node for node, rank in positives if rank < MAX_RANK}
    element = case.facts["element"]
    if not known or element is None or case.prediction is None:
        return MISS
    label, predicted = (
        Action(a.type if a.type in OPERATIONS else "", "" if a.type == "CLICK" and a is case.label else a.value)
        for a in (case.label, case.prediction)
    )
    return _verdict(element in known, operation_f1(operation_text(predicted), operation_text(label)))


def judge_uground(case: Case, *, lowercase: bool = True, empty_boxes: str = "fail") -> Verdict:
    """Point in any box of the chosen block, borders included; a missing point counts as (0, 0), a value "None" as none.

    `case.boxes` are those of the block that the planner chose: none where the target is in another block. The switches are
    variants of the field; the protocol lower-cases and fails steps without boxes. Fact `oracle`: no grounder was run,
    and the element counts as right wherever this is true (a grounding query exists).
    """
    if case.padding:
        return MISS
    if empty_boxes == "skip" and case.facts.get("no_label_boxes", not case.boxes):
        return skipped("no_boxes")
    predicted = case.prediction
    if predicted is not None and predicted.value.lower() == "none":
        predicted = replace(predicted, value="")
    f1 = operation_f1(operation_text(predicted), operation_text(case.label), lowercase=lowercase, drop_punctuation=True)
    if "oracle" in case.facts:
        return _verdict(bool(case.facts["oracle"]), f1)
    point = (predicted.point if predicted else None) or (0.0, 0.0)
    return _verdict(inside_any(point, case.boxes), f1)


_SEECLICK_CODES: Final = {"CLICK": "4", "SELECT": "2", "TYPE": "3"}


def judge_seeclick(case: Case) -> Verdict:
    """Point (0..1) in the one box of the step, normalised and rounded to three decimals; borders included.

    Operations compare as integers; only the value is lower-cased, and never appended to a CLICK. Of several boxes the
    first is the step's.
    """
    if not case.boxes:
        return skipped("no_target")
    if case.size is None:
        raise ScoringError(f"step {case.step_id}: mind2web/seeclick needs the screenshot's width and height")
    if case.label.type not in _SEECLICK_CODES:
        raise ScoringError(f"step {case.step_id}: label operation {case.label.type!r} is none of {OPERATIONS}")
    if case.prediction is None:
        return MISS
    width, height = case.size
    x1, y1, x2, y2 = case.boxes[0]
    box = (round(x1 / width, 3), round(y1 / height, 3), round(x2 / width, 3), round(y2 / height, 3))
    point = case.prediction.point
    if point is None:
        return MISS
    texts = []
    for action in (case.prediction, case.label):
        code = _SEECLICK_CODES.get(action.type, action.type)
        texts.append(f"{code} {action.value.lower()}" if code in ("2", "3") else code)
    return _verdict(inside((point[0] / width, point[1] / height), box), operation_f1(*texts))


def pad(cases: Iterable[Case | Unread], notes: Notes | None = None) -> Iterator[Case | Unread]:
    """`cases`, then for each task 0 / 0 / 0 rows up to its `episode_steps` (`mind2web/uground`); `notes` get their number."""
    counts, last = Counter[str | None](), dict[str | None, Case]()
    for case in cases:
        if isinstance(case, Case):
            counts[case.episode_id] += 1
            if case.episode_steps is not None:
                last[case.episode_id] = case
        yield case
    padded = 0
    for case in last.values():
        for i in range(counts[case.episode_id], case.episode_steps or 0):
            padded += 1
            step_id = f"{case.episode_id}/lost_{i}"
            yield replace(
                case, step_id=step_id, padding=True, prediction=None, lacks="", boxes=(), label=Action(""), facts={}
            )
    if padded and notes is not None:
        notes["padded"] = padded


MINIWOB_POINT: Final = Protocol(
    name="miniwob/point",
    metrics=METRICS,
    judge=judge_miniwob,
    element="point in any target box, borders included",
    text="F1 over sets of tokens of “OP value”, case and punctuation kept",
    denominator="steps with a target; the others are skipped",
    averages="macro over episodes, micro beside it",
    source="this project (embedded benchmark)",
)
SEEACT: Final = Protocol(
    name="mind2web/seeact",
    metrics=METRICS,
    judge=judge_seeact,
    element="chosen backend_node_id is a positive candidate of rank < 50",
    text="F1 over sets of tokens of “OP value”, case and punctuation kept; other operations are empty",
    denominator="all steps; no positive candidate or no answer: 0 / 0 / 0",
    averages="micro, and macro over tasks",
    source="OSU-NLP-Group/Mind2Web metric.py, OSU-NLP-Group/SeeAct evaluation_utils.py",
    needs="chosen element and positive candidates",
)
UGROUND: Final = Protocol(
    name="mind2web/uground",
    metrics=METRICS,
    judge=judge_uground,
    element="point in any target box of the chosen 1280 × 1000 block, borders included; no answer is (0, 0)",
    text="as seeact, lower-cased, tokens of mere punctuation dropped; a predicted value “None” is none; "
    "no boxes: Ele.Acc 0, Op.F1 still counts",
    denominator="all steps, each task padded with 0 / 0 / 0 to its full length",
    averages="micro, and macro over tasks",
    source="OSU-NLP-Group/UGround offline_evaluation/Multimodal-Mind2Web/eval.py",
)
SEECLICK: Final = Protocol(
    name="mind2web/seeclick",
    metrics=METRICS,
    judge=judge_seeclick,
    element="point in the one box, both in 0..1, box rounded to 3 decimals, borders included",
    text="F1 over operation number and lower-cased value; no value for CLICK",
    denominator="steps with a box and an image",
    averages="micro Ele.Acc and Step SR; Op.F1 is the mean of the three class means; macro beside them",
    source="njucckevin/SeeClick agent_tasks/mind2web_test.py, showlab/ShowUI main/eval_mind2web.py",
)
