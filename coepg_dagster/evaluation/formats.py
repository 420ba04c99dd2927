"""Files of predictions, by other people and our own, as `Case`s.

Files are read row by row. A row whose label cannot be read costs itself and is an `Unread`, which the result counts by its
reason. A wrong answer of the *model*, whatever it is, is a case like any other, and the protocol judges it. The parts of it that
cannot be read count as absent, and `Case.lacks` says so. A damaged file is an error.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Final

from coepg_dagster import jsonlines
from coepg_dagster.evaluation.android_control import POINTED, TreeNode, canonical
from coepg_dagster.evaluation.case import (
    MOST_LISTED,
    Action,
    Case,
    Notes,
    Rows,
    ScoringError,
    Unread,
    point_of,
)
from coepg_dagster.evaluation.exclusions import QUESTION, question
from coepg_dagster.evaluation.grounding_logs import NO_ANSWER, read_mai_ui
from coepg_dagster.evaluation.labels import NO_ITEM, BoardLabels
from coepg_dagster.evaluation.metrics import BoxTuple, Point, direction
from coepg_dagster.evaluation.rows import (
    BAD_LABEL,
    REPEATED,
    AnswerReader,
    PredictionRow,
    each_case,
    each_row,
    entry_row,
    list_elements,
    placed,
)
from coepg_dagster.evaluation.spaces import Readings
from coepg_dagster.evaluation.step_boards import StepAction, script_action
from coepg_dagster.geometry import Space
from coepg_dagster.progress import Report

MOST_STEPS: Final = 10_000
"""Most steps that a task may have, since each missing one becomes a row (`mind2web/uground`)."""


def _family(protocol: str) -> str:
    return protocol.split("/")[0]


# --- gui_r1 -----------------------------------------------------------------------------------------------------------

_GUI_R1_NAMES: Final = {"press_back": "back", "press_home": "home", "complete": "finish"}


def _content_id(row: PredictionRow, fields: Iterable[str], seen: Counter[str]) -> str:
    """An id for a row that has none, from its label's fields: files in another order can be compared."""
    digest = hashlib.sha256(repr([row.data.get(field) for field in fields]).encode()).hexdigest()[:16]
    seen[digest] += 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def read_gui_r1(path: Path, protocol: str, report: Report | None = None) -> Iterator[Case | Unread]:
    """GUI-R1's prediction files (JSON lines): label, image sizes, and the prediction in original pixels.

    AndroidControl: with `history` in the rows (high) the goal `instruction` is the task; without (low) it is the step's
    own and there is no task. Values stay as written ("no input text" included), because the owner's F1 compares them so; an
    action that the file has as null could not be read. Some files lack the original size (`orig_w`, `orig_h`).
    """
    family = _family(protocol)
    if family not in ("android_control", "screenspot"):
        raise ScoringError(f"{path}: gui_r1 files hold AndroidControl or ScreenSpot predictions, not {protocol}'s")
    ids = Counter[str]()
    one = _gui_r1_screenspot if family == "screenspot" else _gui_r1_android_control
    return each_case(each_row(path, report), lambda row: one(row, ids))


_GUI_R1_LABEL: Final = ("instruction", "history", "gt_action", "gt_bbox", "gt_input_text", "group", "ui_type")


def _gui_r1_point(row: PredictionRow, reader: AnswerReader) -> Point | None:
    place = row.data.get("pred_coord")
    return reader.point(place[:2] if isinstance(place, list) else place, "pred_coord")


def _gui_r1_screenspot(row: PredictionRow, ids: Counter[str]) -> Case:
    reader, instruction, device = AnswerReader(row), row.text("instruction"), row.text("group")
    predicted = _gui_r1_point(row, reader)
    return Case(
        boxes=row.xyxy_boxes([row.get("gt_bbox", list)], "gt_bbox"),
        group=f"{device}_{row.text('ui_type')}",
        step_id=_content_id(row, _GUI_R1_LABEL, ids),
        episode_id=None,
        label=Action("click"),
        prediction=Action("click", "", predicted),
        lacks=reader.lacks,
        facts={QUESTION: question(device, instruction)},
    )


def _gui_r1_android_control(row: PredictionRow, ids: Counter[str]) -> Case:
    reader, instruction = AnswerReader(row), row.text("instruction")
    predicted = _gui_r1_point(row, reader)
    names = row.text("gt_action"), reader.text(row.data.get("pred_action"), "pred_action")
    label, action = (_GUI_R1_NAMES.get(name, name) for name in names)
    truth = row.point("gt_bbox") if label in POINTED else None
    return Case(
        label=Action(label, row.text("gt_input_text"), truth),
        size=row.width_height("orig_w", "orig_h") if "orig_w" in row.data else None,
        seen_size=row.size("image_size"),
        group=row.text("group"),
        step_id=_content_id(row, _GUI_R1_LABEL, ids),
        episode_id=instruction if "history" in row.data else None,
        prediction=Action(action, reader.text(row.data.get("pred_input_text"), "pred_input_text"), predicted),
        lacks=reader.lacks,
    )


# --- ui_genie ---------------------------------------------------------------------------------------------------------


def _genie_action(text: str, reader: AnswerReader) -> Action | None:
    """UI-Genie's `{"action": …}` object, bare or as the arguments of a tool call; None where it cannot be parsed."""
    body = text.split("<tool_call>")[-1].split("</tool_call>")[0].strip()
    try:
        data = jsonlines.parse(body)
    except jsonlines.NotJson:
        data = None
    arguments = data.get("arguments", data) if isinstance(data, dict) else None
    if not isinstance(arguments, dict) or not isinstance(arguments.get("action"), str):
        reader.unreadable("answer", 'an object {"action": …}', text)
        return None
    name = reader.text(arguments["action"], "action").lower()
    points = [reader.point(arguments.get(key), key) for key in ("coordinate", "coordinate2")]
    value = next((arguments[k] for k in ("text", "direction", "button", "status") if k in arguments), "")
    if name == "swipe" and "direction" not in arguments:
        value = _swipe_direction(points[0], points[1])
    action = Action(name, str(value), points[0])
    return action if name in ("swipe", "system_button") else canonical(action)


def _swipe_direction(start: Point | None, end: Point | None) -> str:
    """The finger's direction; "right" where a point is missing, as UI-Genie's script has it."""
    return "right" if start is None or end is None else direction(start, end)


_GENIE_LISTS: Final = ("actiontype_notmatch_details", "actiontype_match_details")


def read_ui_genie(path: Path, protocol: str, report: Report | None = None) -> tuple[Iterator[Case | Unread], Notes]:
    """UI-Genie's `TYPE_badcase.json`: every step of one action type that its owner judged wrong.

    Coordinates are pixels of the resized image, whose size the file does not give. Only `android_control/ui_genie` can
    judge such rows. The file's totals are noted; the right steps are not listed, so the accuracy over the listed is 0.
    """
    if protocol.removeprefix("sop/") != "android_control/ui_genie":
        raise ScoringError(
            f"{path}: ui_genie files lack what {protocol} needs; score them with android_control/ui_genie"
        )
    if path.is_dir():
        raise ScoringError(f"{path}: is a folder; give one of its *_badcase.json files")
    notes: Notes = {}
    return each_case(_genie_rows(path, notes, report), _genie_case), notes


def _genie_rows(path: Path, notes: Notes, report: Report | None) -> Iterator[PredictionRow | Unread]:
    """The listed steps; the totals become notes."""
    counts, empty = Counter[str](), True
    for name, value in list_elements(path, _GENIE_LISTS, report):
        empty = False
        listed = name.rpartition(".")[2]
        if listed in _GENIE_LISTS:
            counts[listed] += 1
            yield entry_row(f"{path}: {listed} {counts[listed]}", value)
        elif "." not in name and isinstance(value, int):
            notes[f"owner's {name}"] = value
    if empty or not counts:
        raise ScoringError(
            f"{path}: holds no list {' or '.join(_GENIE_LISTS)} with a step; is it a *_badcase.json file?"
        )


def _genie_case(row: PredictionRow) -> Case:
    label_reader, reader = AnswerReader(row), AnswerReader(row)
    label = _genie_action(row.text("gt"), label_reader)
    if label is None or label_reader.lacks:
        raise row.fail("field 'gt' holds no action, or one that cannot be read")
    step_id = row.text("questionID")
    episode, _, index = step_id.rpartition("_")
    answer = reader.text(row.data.get("answer"), "answer")
    return Case(
        step_id=step_id,
        episode_id=episode,
        step_index=int(index) if re.fullmatch("[0-9]{1,9}", index) else None,
        label=label,
        prediction=_genie_action(answer, reader) if answer else None,
        facts={"listed_wrong": True},
        lacks=reader.lacks,
    )


# --- uground ----------------------------------------------------------------------------------------------------------

ORACLE: Final = "oracle: no grounder's answers were given; an element counts as right wherever a grounding query exists"


def _output_point(row: PredictionRow, reader: AnswerReader) -> Point | None:
    """The grounder's "(x, y)" divided by `scale`: pixels of the block or screenshot. None where there is no such output."""
    scale = row.get("scale", int, float, optional=True)
    scale = 1.0 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise row.fail(f"field 'scale' must be positive, not {scale}")
    output = row.data.get("output")
    if isinstance(output, str) and output:
        try:
            output = [float(v) for v in output.strip().strip("()").split(",")]
        except ValueError:
            reader.unreadable("output", "(x, y)", output)
            return None
    point = reader.point(output or None, "output")
    return None if point is None else point_of(point[0] / scale, point[1] / scale)


def read_uground(
    path: Path,
    protocol: str,
    report: Report | None = None,
    *,
    labels: Path | None = None,
    answers: Path | None = None,
) -> tuple[Iterable[Case | Unread], Notes]:
    """UGround's files. Mind2Web: plans; `answers` are the grounder's, `labels` the sample (blocks) file.

    Without `labels` the plans' own label fields count and the padding stands for steps without plan, which scores the
    same. ScreenSpot: items with `output`. AndroidControl: plans, with `labels` (the sample file) and `answers`. Files that are
    joined by id are held in memory; all others are read row by row.
    """
    family = _family(protocol)
    if family == "mind2web":
        return _read_uground_mind2web(path, labels, answers, report)
    if family == "screenspot":
        ids = Counter[str]()
        return each_case(each_row(path, report), lambda row: _uground_screenspot_case(row, ids)), {}
    if family == "android_control":
        if labels is None or answers is None:
            raise ScoringError(f"{path}: {protocol} needs the sample file as labels and the grounder's answers")
        return _read_uground_android_control(path, labels, answers, report), {}
    raise ScoringError(f"{path}: uground files cannot be scored under {protocol}")


def _uground_screenspot_case(row: PredictionRow, ids: Counter[str]) -> Case:
    boxes = row.xywh_boxes([row.get("bbox", list)], "bbox")
    image, reader = row.text("img_filename" if "img_filename" in row.data else "image"), AnswerReader(row)
    asked = row.data.get("instruction")
    return Case(
        step_id=f"{image}-{_content_id(row, ('image', 'img_filename', 'instruction', 'bbox'), ids)}",
        episode_id=None,
        label=Action("click"),
        prediction=Action("click", "", _output_point(row, reader)),
        boxes=boxes,
        group=f"{row.text('platform')}_{row.text('data_type')}",
        lacks=reader.lacks,
        facts={QUESTION: question(row.text("platform"), asked)} if isinstance(asked, str) else {},
    )


def _mind2web_id(row: PredictionRow) -> str:
    return f"{row.text('annotation_id')}_{row.text('action_uid')}"


def _by_id(
    path: Path, key: Callable[[PredictionRow], Any], unread: list[Unread], reason: str = BAD_LABEL
) -> tuple[dict[Any, PredictionRow], int]:
    """Rows by key, of which the first of several counts, as in UGround's scripts; and how many repeat one.

    Rows that cannot be read are appended to `unread`, with the `reason` where it is their key that cannot.
    """
    out: dict[Any, PredictionRow] = {}
    repeated = 0
    for row in each_row(path):
        if isinstance(row, Unread):
            unread.append(row)
            continue
        try:
            name = key(row)
        except ScoringError as error:
            unread.append(row.unread(error, reason))
            continue
        repeated += name in out
        out.setdefault(name, row)
    return out, repeated


REPEATED_PLANS: Final = "plans that repeat a step, not counted"
BAD_ANSWERS: Final = "rows of the grounder's answers that cannot be read"
BAD_SAMPLES: Final = "rows of the sample file that cannot be read"


def _read_uground_mind2web(
    path: Path, labels: Path | None, answers: Path | None, report: Report | None
) -> tuple[Iterator[Case | Unread], Notes]:
    unread: list[Unread] = []
    notes: Notes = {}
    answer_rows, _ = ({}, 0) if answers is None else _by_id(answers, lambda row: row.text("id"), unread, BAD_ANSWERS)
    embedded = any(isinstance(row, PredictionRow) and row.data.get("output") for row in each_row(path))
    oracle = not embedded and not any(row.data.get("output") for row in answer_rows.values())
    if oracle:
        notes["grounder"] = ORACLE
    plans: dict[str, PredictionRow] | None = None
    if labels is not None:
        plans, repeated = _by_id(path, _mind2web_id, unread)
        if repeated:
            notes[REPEATED_PLANS] = repeated

    def case_of(sample: PredictionRow, step_id: str, plan: PredictionRow | None) -> Case:
        prediction, boxes, reader = None, tuple[BoxTuple, ...](), AnswerReader(plan or sample)
        facts = {"no_label_boxes": not sample.get("bbox", list)}
        if oracle:
            facts["oracle"] = plan is not None and (step_id in answer_rows if answers is not None else _has_query(plan))
        if plan is not None:
            answer = plan if embedded else answer_rows.get(step_id)
            point = None if answer is None else _output_point(answer, reader)
            boxes = () if answer is None else answer.xywh_boxes(answer.get("bbox", list), "bbox")
            value, action = (reader.text(plan.data.get(key), key) for key in ("gpt_value", "gpt_action"))
            prediction = Action(action, value, point)
        return Case(
            step_id=step_id,
            episode_id=sample.text("annotation_id"),
            label=Action(sample.text("operation"), sample.text("value")),
            prediction=prediction,
            boxes=boxes,
            step_index=sample.whole("step"),
            episode_steps=sample.whole("total_steps", MOST_STEPS),
            facts=facts,
            lacks=reader.lacks,
        )

    def cases() -> Iterator[Case | Unread]:
        seen: set[str] = set()
        repeated = 0
        for row in each_row(labels or path, report):
            if isinstance(row, Unread):
                yield row
                continue
            try:
                step_id = _mind2web_id(row)
                if step_id in seen and plans is None:
                    repeated += 1
                    continue
                yield case_of(row, step_id, row if plans is None else plans.get(step_id))
                seen.add(step_id)
            except ScoringError as error:
                yield row.unread(error)
        yield from unread
        for step_id, plan in (plans or {}).items():
            if step_id not in seen:
                detail = f"step {step_id} is not in {labels}; give the sample file that the plans were made from"
                yield Unread(plan.where, NO_ITEM, detail)
        if repeated:
            notes[REPEATED_PLANS] = repeated

    return cases(), notes


def _has_query(plan: PredictionRow) -> bool:
    """Whether UGround queries its grounder: the chosen block holds a target and the plan describes an element."""
    description, chosen = plan.data.get("description"), str(plan.data.get("ans_block"))
    described = isinstance(description, str) and description not in ("", "None")
    return chosen in plan.get("target_blocks", dict) and described


_UGROUND_VALUES: Final = ("text", "app_name", "direction", "goal_status")


def _uground_action(data: Any, reader: AnswerReader) -> Action:
    """The action of a sample or a plan; with an empty type where there is none."""
    if data is not None and not (isinstance(data, dict) and isinstance(data.get("action_type"), str)):
        reader.unreadable("action", "an object with an action_type", data)
    if not isinstance(data, dict):
        return Action("")
    value = next((str(data[key]) for key in _UGROUND_VALUES if data.get(key) is not None), "")
    x, y = data.get("x"), data.get("y")
    point = None if x is None and y is None else reader.point([x, y], "x, y")
    return canonical(Action(reader.text(data.get("action_type"), "action_type"), value, point))


def _nodes(row: PredictionRow, tree: Any) -> list[TreeNode]:
    """The nodes of an accessibility tree: dictionaries with `bbox_pixels`, in lists of any depth."""
    out: list[TreeNode] = []
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(reversed(item))
        elif isinstance(item, dict):
            box = item.get("bbox_pixels")
            if not isinstance(box, dict):
                raise row.fail("a node of the accessibility tree has no bbox_pixels")
            corners = [box.get(key) for key in ("x_min", "y_min", "x_max", "y_max")]
            x1, y1, x2, y2 = row.numbers("bbox_pixels of a node", corners, 4)
            node = row.inner("node", item)
            texts = (node.text(key, optional=True) for key in ("text", "content_description"))
            out.append(TreeNode((x1, y1, x2, y2), *texts))
        else:
            raise row.fail(f"a node of the accessibility tree must be an object, not {shown(item)}")
    return out


def _read_uground_android_control(
    path: Path, labels: Path, answers: Path, report: Report | None
) -> Iterator[Case | Unread]:
    def key(row: PredictionRow) -> tuple[str, int | None]:
        episode = row.data.get("episode_id")
        return str(episode) if isinstance(episode, int) else row.text("episode_id"), row.whole("step")

    unread: list[Unread] = []
    samples, _ = _by_id(labels, key, unread, BAD_SAMPLES)
    answered, _ = _by_id(answers, key, unread, BAD_ANSWERS)
    if not any(row.data.get("output") for row in answered.values()):
        raise ScoringError(f"{answers}: no row has an output; give the grounder's answers, not its queries")

    def case_of(plan: PredictionRow) -> Case | None:
        sample, answer = samples.get(key(plan)), answered.get(key(plan))
        if sample is None:
            return None
        label_reader, reader = AnswerReader(sample), AnswerReader(plan)
        label = _uground_action(sample.data.get("action"), label_reader)
        if label_reader.lacks:
            raise sample.fail("field 'action' must be an object with an action_type, and numbers where it has x and y")
        predicted = _uground_action(plan.data.get("action"), reader)
        point = None if answer is None else _output_point(answer, reader)
        episode, step = key(plan)
        return Case(
            step_id=f"{episode}_{step}",
            episode_id=episode,
            step_index=step,
            label=label,
            prediction=Action(predicted.type, predicted.value, point),
            facts={"nodes": _nodes(sample, sample.get("accessibility_tree", list))},
            lacks=reader.lacks,
        )

    def cases() -> Iterator[Case | Unread]:
        seen: set[str] = set()
        for row in each_row(path, report):
            if isinstance(row, Unread):
                yield row
                continue
            try:
                case = case_of(row)
            except ScoringError as error:
                yield row.unread(error)
                continue
            # as in UGround's script, plans of steps that are not sampled do not count, and of several the first does
            if case is not None and case.step_id not in seen:
                seen.add(case.step_id)
                yield case
        yield from unread

    return cases()


# --- coepg ------------------------------------------------------------------------------------------------------------

_ROW_KEYS: Final = frozenset(
    [
        "step_id",
        "episode_id",
        "step_index",
        "episode_steps",
        "width",
        "height",
        "seen_width",
        "seen_height",
        "group",
        "label",
        "prediction",
        "nodes",
        "groups",
        "space",
    ]
)
_LABEL_KEYS: Final = frozenset(["action_type", "value", "point", "end", "boxes", "positives", "actions"])
_PREDICTION_KEYS: Final = frozenset(["action_type", "value", "point", "end", "element", "box", "actions"])


def _unknown(row: PredictionRow, keys: frozenset[str]) -> ScoringError | None:
    """The error for a row with fields other than `keys`; None where there are none."""
    strange = set(row.data) - keys
    if not strange:
        return None
    return row.fail(f"field {min(strange)!r} is not known; the fields are {', '.join(sorted(keys))}")


def _unknown_in_row(row: PredictionRow) -> ScoringError | None:
    """The error for a row whose own fields or label's are none of this format: the script that wrote it is to be mended."""
    truth = row.data.get("label")
    return _unknown(row, _ROW_KEYS) or (
        _unknown(row.inner("label", truth), _LABEL_KEYS) if isinstance(truth, dict) else None
    )


def read_coepg(
    path: Path, protocol: str, report: Report | None = None, *, labels: BoardLabels | None = None
) -> tuple[Iterator[Case | Unread], Notes]:
    """Our own format: JSON lines, each a label and a prediction. Points and boxes in pixels of the stored screenshot.

    {"step_id": "…", "episode_id": "…" or null, "step_index": 0, "width": 1080, "height": 2400,
     "label": {"action_type": "click", "value": "", "point": [x, y] or null, "boxes": [[x1, y1, x2, y2]]},
     "prediction": {"action_type": "click", "value": "", "point": [x, y] or null} or null}
    A field of a prediction that has another type counts as absent (`Case.lacks`). Further fields that some protocols need:
    `group` (ScreenSpot), `episode_steps` (mind2web/uground's padding), `seen_width`, `seen_height`, label `positives`
    [[backend_node_id, rank]] and prediction `element` (mind2web/seeact), `nodes` [{"box", "text", "content_description"}]
    (android_control/uground500), `groups` {"application": "word"} (classes of averages), `end` beside `point` (second
    point of a drag), prediction `box` (aitz/action_matching), `actions` instead of the fields of one action (guiact/steps,
    omniact/action_score). Points of a prediction are in the row's `space` (`geometry.Space`; default original: pixels of the
    stored screenshot). Unknown fields are errors; in predictions only where all have some, which is then no fault of the model.

    With the `labels` of a grounding board a row needs `step_id` and `prediction` only.
    """
    mobile = "android_control" in protocol
    notes: Notes = {}

    def cases() -> Iterator[Case | Unread]:
        strange, predictions = list[ScoringError](), 0
        readings, unanswered = Readings(), dict(labels.items) if labels is not None else {}
        unread: dict[str, Unread] = {}  # the first by reason

        def left_out(row: Unread) -> Unread:
            return unread.setdefault(row.reason, row) and row

        for row in each_row(path, report):
            if isinstance(row, Unread):
                yield left_out(row)
                continue
            if labels is None and (error := _unknown_in_row(row)):
                raise error
            answer = row.data.get("prediction")
            if isinstance(answer, dict):
                predictions += 1
                if error := _unknown(row.inner("prediction", answer), _PREDICTION_KEYS):
                    strange.append(error)
            try:
                case = _coepg_case(row, mobile) if labels is None else _of_board(row, labels)
            except ScoringError as error:
                yield left_out(row.unread(error))
                continue
            if case is None:
                detail = f"{row.data.get('step_id')!r:.80} is no item of {labels and labels.source}"
                yield left_out(Unread(row.where, NO_ITEM, detail))
            elif labels is not None and unanswered.pop(case.step_id, None) is None:
                yield Unread(row.where, REPEATED, f"item {case.step_id} has a row already; only its first counts")
            else:
                readings.add(case, stated=bool(row.data.get("space")))
                yield case
        if strange and len(strange) == predictions:
            raise strange[0]
        if labels is not None:
            labels.require(labels.items.keys() - unanswered.keys(), path, unread)
            yield from unanswered.values()
            yield from labels.unread
            if unanswered:
                notes[NO_ANSWER] = Rows(len(unanswered), list(unanswered)[:MOST_LISTED])
        readings.check(str(path), _NAME_THE_SPACE)

    return cases(), notes


_NAME_THE_SPACE: Final = f"say in each row which it is: `space` is one of {', '.join(Space)}"


def _of_board(row: PredictionRow, labels: BoardLabels) -> Case | None:
    """The case of a row that holds a prediction only; None where it is for no item."""
    item = labels.item_of(row.data)
    if item is None:
        return None
    case, reader = labels.items[item], AnswerReader(row)
    answer = row.data.get("prediction")
    prediction = _coepg_action(row, answer, reader, case.size) if isinstance(answer, dict) else None
    if answer is not None and prediction is None:
        reader.unreadable("prediction", "an object or null", answer)
    return replace(case, prediction=prediction, lacks=reader.lacks)


def _coepg_action(
    row: PredictionRow, answer: Mapping[str, Any], reader: AnswerReader, size: tuple[int, int] | None
) -> Action:
    action_type, value = (reader.text(answer.get(key), key) for key in ("action_type", "value"))
    return Action(action_type, value, _placed(row, reader.point(answer.get("point"), "point"), size))


def _placed(row: PredictionRow, point: Point | None, size: tuple[int, int] | None) -> Point | None:
    """A point in the row's space, in pixels of the stored screenshot."""
    space = row.text("space", optional=True) or Space.ORIGINAL
    if point is not None and space != Space.ORIGINAL and size is None and row.data.get("width") is not None:
        size = row.width_height("width", "height")
    return placed(row, point, space, size)


def _placed_box(row: PredictionRow, box: BoxTuple | None, size: tuple[int, int] | None) -> BoxTuple | None:
    """A box in the row's space, in pixels of the stored screenshot."""
    if box is None:
        return None
    corners = [_placed(row, corner, size) for corner in (box[:2], box[2:])]
    return (*corners[0], *corners[1]) if corners[0] and corners[1] else None


_MOST_ACTIONS: Final = 1000
_ACTION_KEYS: Final = frozenset(["action_type", "value", "point", "end", "box", "element"])


def _label_actions(row: PredictionRow, truth: PredictionRow) -> list[StepAction]:
    """`actions` of a label: objects with the fields of one action, or lines of a PyAutoGUI script."""
    found = []
    for i, entry in enumerate(truth.get("actions", list)[:_MOST_ACTIONS], start=1):
        reader = AnswerReader(truth)
        action = _step_action(row, entry, None, reader, Space.ORIGINAL)
        if reader.problem or not action.type:
            raise truth.fail(f"action {i} of `actions` cannot be read: {shown(entry)}")
        found.append(action)
    if not found:
        raise truth.fail("field 'actions' holds no action")
    return found


def _predicted_actions(
    row: PredictionRow, value: Any, size: tuple[int, int] | None, reader: AnswerReader
) -> list[StepAction]:
    """`actions` of a prediction; one that cannot be read has no name, and so is wrong."""
    if not isinstance(value, list):
        reader.unreadable("actions", "a list", value)
        return []
    return [_step_action(row, entry, size, reader, None) for entry in value[:_MOST_ACTIONS]]


def _step_action(
    row: PredictionRow, entry: Any, size: tuple[int, int] | None, reader: AnswerReader, space: Space | None
) -> StepAction:
    """One of several actions; `space` None: that of the row."""

    def there(point: Point | None) -> Point | None:
        return point if space is not None else _placed(row, point, size)

    if isinstance(entry, str):
        action = script_action(entry)
        if action is None:
            reader.unreadable("actions", "lines of PyAutoGUI", entry)
            return StepAction("")
        reader.text(entry, "actions")
        return replace(action, point=there(action.point), end=there(action.end))
    if not isinstance(entry, dict) or not entry.keys() <= _ACTION_KEYS:
        reader.unreadable("actions", f"objects with {', '.join(sorted(_ACTION_KEYS))}", entry)
        return StepAction("")
    box, element = reader.box(entry.get("box"), "box"), reader.text(entry.get("element"), "element")
    return StepAction(
        reader.text(entry.get("action_type"), "action_type"),
        reader.text(entry.get("value"), "value"),
        there(reader.point(entry.get("point"), "point")),
        there(reader.point(entry.get("end"), "end")),
        box if space is not None else _placed_box(row, box, size),
        frozenset([element] if element else []),
    )


def _coepg_case(row: PredictionRow, mobile: bool) -> Case:
    data = row.data
    truth = row.inner("label", row.get("label", dict))
    label = Action(
        truth.text("action_type", optional="actions" in truth.data),
        truth.text("value", optional=True),
        truth.point("point", optional=True),
    )
    prediction, answer, reader = None, data.get("prediction"), AnswerReader(row)
    size = None if data.get("width") is None else row.width_height("width", "height")
    facts: dict[str, Any] = {}
    if isinstance(answer, dict):
        if not answer.keys() <= _PREDICTION_KEYS:
            reader.unreadable("prediction", f"an object with {', '.join(sorted(_PREDICTION_KEYS))}", answer)
        prediction = _coepg_action(row, answer, reader, size)
        if "end" in answer:
            facts["predicted_end"] = _placed(row, reader.point(answer["end"], "end"), size)
        if "box" in answer:
            facts["predicted_box"] = _placed_box(row, reader.box(answer["box"], "box"), size)
        if "actions" in answer:
            facts["predicted_actions"] = _predicted_actions(row, answer["actions"], size, reader)
    elif answer is not None:
        reader.unreadable("prediction", "an object or null", answer)
    if mobile:
        label, prediction = canonical(label), prediction and canonical(prediction)
    if "positives" in truth.data:
        facts["positives"] = _positives(truth)
        facts["element"] = reader.text(answer.get("element"), "element") or None if isinstance(answer, dict) else None
    if "nodes" in data:
        facts["nodes"] = [_node(row.inner("nodes", node)) for node in row.get("nodes", list)]
    if "end" in truth.data:
        facts["label_end"] = truth.point("end", optional=True)
    if "actions" in truth.data:
        facts["label_actions"] = _label_actions(row, truth)
    if "groups" in data:
        classes = row.inner("groups", row.get("groups", dict))
        facts |= {key: classes.text(key) for key in classes.data}
    return Case(
        step_id=row.text("step_id"),
        episode_id=None if data.get("episode_id") is None else row.text("episode_id"),
        label=label,
        prediction=prediction,
        boxes=truth.xyxy_boxes(truth.get("boxes", list, optional=True) or [], "boxes"),
        size=size,
        seen_size=None if data.get("seen_width") is None else row.width_height("seen_width", "seen_height"),
        group=row.text("group", optional=True),
        step_index=row.whole("step_index", optional=True),
        episode_steps=row.whole("episode_steps", MOST_STEPS, optional=True),
        facts=facts,
        lacks=reader.lacks,
    )


def _positives(truth: PredictionRow) -> list[tuple[str, int]]:
    """[[backend_node_id, rank], …]"""
    found = [
        (str(pair[0]), pair[1])
        for pair in truth.get("positives", list)
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int)
    ]
    if len(found) != len(truth.data["positives"]):
        raise truth.fail("field 'positives' must be a list of [backend_node_id, rank]")
    return found


def _node(row: PredictionRow) -> TreeNode:
    (box,) = row.xyxy_boxes([row.get("box", list)], "box")
    return TreeNode(box, row.text("text", optional=True), row.text("content_description", optional=True))


FORMATS: Final = ("coepg", "gui_r1", "mai_ui", "ui_genie", "uground")


def each_prediction(
    path: Path,
    format: str,
    protocol: str,
    *,
    labels: Path | None = None,
    answers: Path | None = None,
    space: Space | None = None,
    report: Report | None = None,
) -> tuple[Iterable[Case | Unread], Notes]:
    """The cases of a file in one of FORMATS, one after the other, and notes for the reader of their score.

    The notes are complete after the last case. `report` is called as `rows.each_row` does. `labels`: UGround's sample file, or
    for coepg and mai_ui the label files of a grounding board; `answers`: UGround's; `space`: of a mai_ui log's points.
    """
    if answers is not None and format != "uground":
        raise ScoringError("answers belong to format uground")
    if labels is not None and format not in ("uground", "coepg", "mai_ui"):
        raise ScoringError(f"labels belong to formats coepg, mai_ui and uground; {format} files hold them")
    if space is not None and format != "mai_ui":
        raise ScoringError(
            f"a space belongs to format mai_ui; a row of coepg names its own, and {format} files have one"
        )
    match format:
        case "coepg":
            board = None if labels is None else BoardLabels.read(_family(protocol), labels)
            return read_coepg(path, protocol, report, labels=board)
        case "gui_r1":
            return read_gui_r1(path, protocol, report), {}
        case "mai_ui":
            return read_mai_ui(path, protocol, report, labels=labels, space=space)
        case "ui_genie":
            return read_ui_genie(path, protocol, report)
        case "uground":
            return read_uground(path, protocol, report, labels=labels, answers=answers)
        case _:
            raise ScoringError(f"format {format!r} is not known; choose from {', '.join(FORMATS)}")
