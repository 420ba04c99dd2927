"""Files of predictions, by other people and our own, as `Case`s.

A row that breaks its format is an error with file, row and field: a score over fewer rows than the file has would be
another number. A wrong answer of the *model*, whatever it is, is a case like any other, and the protocol judges it. The
parts of it that cannot be read count as absent, and `Case.lacks` says so.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Final

from coepg_dagster import jsonlines
from coepg_dagster.evaluation.android_control import POINTED, TreeNode, canonical
from coepg_dagster.evaluation.case import Action, Case, Notes, ScoringError, Unread, point_of
from coepg_dagster.evaluation.grounding_logs import read_mai_ui
from coepg_dagster.evaluation.metrics import BoxTuple, Point, direction
from coepg_dagster.evaluation.rows import AnswerReader, PredictionRow, read_json, read_jsonl, readable_rows, rows_of
from coepg_dagster.geometry import Point as PlacedPoint
from coepg_dagster.geometry import Size, Space, Viewport
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


def read_gui_r1(path: Path, protocol: str) -> tuple[list[Case], Notes]:
    """GUI-R1's prediction files (JSON lines): label, image sizes, and the prediction in original pixels.

    AndroidControl: with `history` in the rows (high) the goal `instruction` is the task; without (low) it is the step's
    own and there is no task. Values stay as written ("no input text" included), because the owner's F1 compares them so; an
    action that the file has as null could not be read. Some files lack the original size (`orig_w`, `orig_h`).
    """
    if _family(protocol) not in ("android_control", "screenspot"):
        raise ScoringError(f"{path}: gui_r1 files hold AndroidControl or ScreenSpot predictions, not {protocol}'s")
    cases, ids = [], Counter[str]()
    for row in read_jsonl(path):
        instruction = row.text("instruction")
        label_fields = ("instruction", "history", "gt_action", "gt_bbox", "gt_input_text", "group", "ui_type")
        step_id = _content_id(row, label_fields, ids)
        reader, place = AnswerReader(), row.data.get("pred_coord")
        predicted = reader.point(place[:2] if isinstance(place, list) else place)
        if _family(protocol) == "screenspot":
            (box,) = row.xyxy_boxes([row.get("gt_bbox", list)], "gt_bbox")
            cases.append(
                Case(
                    step_id=step_id,
                    episode_id=None,
                    label=Action("click"),
                    prediction=Action("click", "", predicted),
                    boxes=(box,),
                    group=f"{row.text('group')}_{row.text('ui_type')}",
                    lacks=reader.lacks,
                )
            )
            continue
        names = row.text("gt_action"), reader.text(row.data.get("pred_action"))
        label, action = (_GUI_R1_NAMES.get(name, name) for name in names)
        truth = row.point("gt_bbox") if label in POINTED else None
        cases.append(
            Case(
                step_id=step_id,
                episode_id=instruction if "history" in row.data else None,
                label=Action(label, row.text("gt_input_text"), truth),
                prediction=Action(action, reader.text(row.data.get("pred_input_text")), predicted),
                size=row.width_height("orig_w", "orig_h") if "orig_w" in row.data else None,
                seen_size=row.size("image_size"),
                group=row.text("group"),
                lacks=reader.lacks,
            )
        )
    return cases, {}


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
        reader.unreadable()
        return None
    name = reader.text(arguments["action"]).lower()
    points = [reader.point(arguments.get(key)) for key in ("coordinate", "coordinate2")]
    value = next((arguments[k] for k in ("text", "direction", "button", "status") if k in arguments), "")
    if name == "swipe" and "direction" not in arguments:
        value = _swipe_direction(points[0], points[1])
    action = Action(name, str(value), points[0])
    return action if name in ("swipe", "system_button") else canonical(action)


def _swipe_direction(start: Point | None, end: Point | None) -> str:
    """The finger's direction; "right" where a point is missing, as UI-Genie's script has it."""
    return "right" if start is None or end is None else direction(start, end)


def read_ui_genie(path: Path, protocol: str) -> tuple[list[Case], Notes]:
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
    data = read_json(path)
    if not isinstance(data, dict):
        raise ScoringError(f"{path}: must be one JSON object")
    whole = PredictionRow(f"{path}", data)
    cases, notes = [], {k: v for k, v in data.items() if isinstance(v, int)}
    for part, details in (
        ("actiontype_notmatch_gt", "actiontype_notmatch_details"),
        ("actiontype_match_gt", "actiontype_match_details"),
    ):
        listed = whole.inner(part, whole.get(part, dict))
        for i, entry in enumerate(listed.get(details, list), start=1):
            row = listed.inner(f"{details} {i}", entry)
            label_reader, reader = AnswerReader(), AnswerReader()
            label = _genie_action(row.text("gt"), label_reader)
            if label is None or label_reader.lacks:
                raise row.fail("field 'gt' holds no action, or one that cannot be read")
            step_id = row.text("questionID")
            episode, _, index = step_id.rpartition("_")
            answer = reader.text(row.data.get("answer"))
            cases.append(
                Case(
                    step_id=step_id,
                    episode_id=episode,
                    step_index=int(index) if re.fullmatch("[0-9]{1,9}", index) else None,
                    label=label,
                    prediction=_genie_action(answer, reader) if answer else None,
                    facts={"listed_wrong": True},
                    lacks=reader.lacks,
                )
            )
    return cases, {f"owner's {key}": value for key, value in notes.items()}


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
            reader.unreadable()
            return None
    point = reader.point(output or None)
    return None if point is None else point_of(point[0] / scale, point[1] / scale)


def read_uground(
    path: Path, protocol: str, *, labels: Path | None = None, answers: Path | None = None
) -> tuple[list[Case], Notes]:
    """UGround's files. Mind2Web: plans; `answers` are the grounder's, `labels` the sample (blocks) file.

    Without `labels` the plans' own label fields count and the padding stands for steps without plan, which scores the
    same. ScreenSpot: items with `output`. AndroidControl: plans, with `labels` (the sample file) and `answers`.
    """
    family = _family(protocol)
    if family == "mind2web":
        return _read_uground_mind2web(read_jsonl(path), labels, answers)
    if family == "screenspot":
        ids = Counter[str]()
        return [_uground_screenspot_case(row, ids) for row in read_jsonl(path)], {}
    if family == "android_control":
        if labels is None or answers is None:
            raise ScoringError(f"{path}: {protocol} needs the sample file as labels and the grounder's answers")
        return _read_uground_android_control(read_jsonl(path), labels, answers), {}
    raise ScoringError(f"{path}: uground files cannot be scored under {protocol}")


def _uground_screenspot_case(row: PredictionRow, ids: Counter[str]) -> Case:
    boxes = row.xywh_boxes([row.get("bbox", list)], "bbox")
    image, reader = row.text("img_filename" if "img_filename" in row.data else "image"), AnswerReader()
    return Case(
        step_id=f"{image}-{_content_id(row, ('image', 'img_filename', 'instruction', 'bbox'), ids)}",
        episode_id=None,
        label=Action("click"),
        prediction=Action("click", "", _output_point(row, reader)),
        boxes=boxes,
        group=f"{row.text('platform')}_{row.text('data_type')}",
        lacks=reader.lacks,
    )


def _mind2web_id(row: PredictionRow) -> str:
    return f"{row.text('annotation_id')}_{row.text('action_uid')}"


def _by_id(rows: Iterable[PredictionRow], key: Callable[[PredictionRow], Any]) -> dict[Any, PredictionRow]:
    """Rows by key; of several with one key the first counts, as in UGround's scripts."""
    out: dict[Any, PredictionRow] = {}
    for row in rows:
        out.setdefault(key(row), row)
    return out


def _read_uground_mind2web(
    plans: Sequence[PredictionRow], labels: Path | None, answers: Path | None
) -> tuple[list[Case], Notes]:
    by_id = _by_id(plans, _mind2web_id)
    notes: Notes = {"plans that repeat a step, not counted": n} if (n := len(plans) - len(by_id)) else {}
    samples = list(by_id.values()) if labels is None else read_jsonl(labels)
    if labels is not None:
        known = {_mind2web_id(row) for row in samples}
        if strange := [row for step, row in by_id.items() if step not in known]:
            raise strange[0].fail(f"this step is not in {labels}; give the sample file that the plans were made from")
    answer_rows = {} if answers is None else _by_id(read_jsonl(answers), lambda row: row.text("id"))
    embedded = any(row.data.get("output") for row in plans)
    oracle = not embedded and not any(row.data.get("output") for row in answer_rows.values())
    cases = []
    for sample in samples:
        step_id = _mind2web_id(sample)
        plan = by_id.get(step_id)
        prediction, boxes, reader = None, tuple[BoxTuple, ...](), AnswerReader()
        facts = {"no_label_boxes": not sample.get("bbox", list)}
        if oracle:
            facts["oracle"] = plan is not None and (step_id in answer_rows if answers is not None else _has_query(plan))
        if plan is not None:
            answer = plan if embedded else answer_rows.get(step_id)
            point = None if answer is None else _output_point(answer, reader)
            boxes = () if answer is None else answer.xywh_boxes(answer.get("bbox", list), "bbox")
            value = reader.text(plan.data.get("gpt_value"))
            action = reader.text(plan.data.get("gpt_action"))
            prediction = Action(action, "" if value.lower() == "none" else value, point)
        cases.append(
            Case(
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
        )
    return cases, notes | ({"grounder": ORACLE} if oracle else {})


def _has_query(plan: PredictionRow) -> bool:
    """Whether UGround queries its grounder: the chosen block holds a target and the plan describes an element."""
    description, chosen = plan.data.get("description"), str(plan.data.get("ans_block"))
    described = isinstance(description, str) and description not in ("", "None")
    return chosen in plan.get("target_blocks", dict) and described


_UGROUND_VALUES: Final = ("text", "app_name", "direction", "goal_status")


def _uground_action(data: Any, reader: AnswerReader) -> Action:
    """The action of a sample or a plan; with an empty type where there is none."""
    if data is not None and not (isinstance(data, dict) and isinstance(data.get("action_type"), str)):
        reader.unreadable()
    if not isinstance(data, dict):
        return Action("")
    value = next((str(data[key]) for key in _UGROUND_VALUES if data.get(key) is not None), "")
    x, y = data.get("x"), data.get("y")
    point = None if x is None and y is None else reader.point([x, y])
    return canonical(Action(reader.text(data.get("action_type")), value, point))


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


def _read_uground_android_control(plans: Sequence[PredictionRow], labels: Path, answers: Path) -> list[Case]:
    def key(row: PredictionRow) -> tuple[str, int | None]:
        episode = row.data.get("episode_id")
        return str(episode) if isinstance(episode, int) else row.text("episode_id"), row.whole("step")

    samples = _by_id(rows_of(labels, read_json(labels)), key)
    answered = _by_id(read_jsonl(answers), key)
    if not any(row.data.get("output") for row in answered.values()):
        raise ScoringError(f"{answers}: no row has an output; give the grounder's answers, not its queries")
    cases = []
    for plan in _by_id(plans, key).values():
        sample, answer = samples.get(key(plan)), answered.get(key(plan))
        if sample is None:
            continue
        label_reader, reader = AnswerReader(), AnswerReader()
        label = _uground_action(sample.data.get("action"), label_reader)
        if label_reader.lacks:
            raise sample.fail("field 'action' must be an object with an action_type, and numbers where it has x and y")
        predicted = _uground_action(plan.data.get("action"), reader)
        point = None if answer is None else _output_point(answer, reader)
        episode, step = key(plan)
        cases.append(
            Case(
                step_id=f"{episode}_{step}",
                episode_id=episode,
                step_index=step,
                label=label,
                prediction=Action(predicted.type, predicted.value, point),
                facts={"nodes": _nodes(sample, sample.get("accessibility_tree", list))},
                lacks=reader.lacks,
            )
        )
    return cases


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
_LABEL_KEYS: Final = frozenset(["action_type", "value", "point", "end", "boxes", "positives"])
_PREDICTION_KEYS: Final = frozenset(["action_type", "value", "point", "end", "element"])


def _unknown(row: PredictionRow, keys: frozenset[str]) -> ScoringError | None:
    """The error for a row with fields other than `keys`; None where there are none."""
    strange = set(row.data) - keys
    if not strange:
        return None
    return row.fail(f"field {min(strange)!r} is not known; the fields are {', '.join(sorted(keys))}")


def read_coepg(path: Path, protocol: str, report: Report | None = None) -> Iterator[Case]:
    """Our own format: JSON lines, each a label and a prediction. Points and boxes in pixels of the stored screenshot.

    {"step_id": "…", "episode_id": "…" or null, "step_index": 0, "width": 1080, "height": 2400,
     "label": {"action_type": "click", "value": "", "point": [x, y] or null, "boxes": [[x1, y1, x2, y2]]},
     "prediction": {"action_type": "click", "value": "", "point": [x, y] or null} or null}
    A field of a prediction that has another type counts as absent (`Case.lacks`). Further fields that some protocols need:
    `group` (ScreenSpot), `episode_steps` (mind2web/uground's padding), `seen_width`, `seen_height`, label `positives`
    [[backend_node_id, rank]] and prediction `element` (mind2web/seeact), `nodes` [{"box", "text", "content_description"}]
    (android_control/uground500), `groups` {"application": "word"} (classes of averages), `end` beside `point` (second
    point of a drag). Points of a prediction are in the row's `space` (`geometry.Space`; default original: pixels of the
    stored screenshot). Unknown fields are errors; in predictions only where all have some, which is then no fault of the
    model.
    """
    mobile = "android_control" in protocol
    strange, predictions = list[ScoringError](), 0
    for row in readable_rows(path, report):
        truth = row.inner("label", row.get("label", dict))
        if error := _unknown(row, _ROW_KEYS) or _unknown(truth, _LABEL_KEYS):
            raise error
        label = Action(
            truth.text("action_type"), truth.text("value", optional=True), truth.point("point", optional=True)
        )
        prediction, answer, reader = None, row.data.get("prediction"), AnswerReader()
        if isinstance(answer, dict):
            predictions += 1
            if error := _unknown(row.inner("prediction", answer), _PREDICTION_KEYS):
                strange.append(error)
                reader.unreadable()
            action_type, value = (reader.text(answer.get(key)) for key in ("action_type", "value"))
            prediction = Action(action_type, value, _placed(row, reader.point(answer.get("point"))))
        elif answer is not None:
            reader.unreadable()
        if mobile:
            label, prediction = canonical(label), prediction and canonical(prediction)
        facts: dict[str, Any] = {}
        if "positives" in truth.data:
            facts["positives"] = [
                (str(pair[0]), pair[1])
                for pair in truth.get("positives", list)
                if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int)
            ]
            if len(facts["positives"]) != len(truth.data["positives"]):
                raise truth.fail("field 'positives' must be a list of [backend_node_id, rank]")
            facts["element"] = reader.text(answer.get("element")) or None if isinstance(answer, dict) else None
        if "nodes" in row.data:
            facts["nodes"] = [_node(row.inner("nodes", node)) for node in row.get("nodes", list)]
        if "end" in truth.data:
            facts["label_end"] = truth.point("end", optional=True)
        if isinstance(answer, dict) and "end" in answer:
            facts["predicted_end"] = _placed(row, reader.point(answer["end"]))
        if "groups" in row.data:
            classes = row.inner("groups", row.get("groups", dict))
            facts |= {key: classes.text(key) for key in classes.data}
        yield (
            Case(
                step_id=row.text("step_id"),
                episode_id=None if row.data.get("episode_id") is None else row.text("episode_id"),
                label=label,
                prediction=prediction,
                boxes=truth.xyxy_boxes(truth.get("boxes", list, optional=True) or [], "boxes"),
                size=None if row.data.get("width") is None else row.width_height("width", "height"),
                seen_size=None if row.data.get("seen_width") is None else row.width_height("seen_width", "seen_height"),
                group=row.text("group", optional=True),
                step_index=row.whole("step_index", optional=True),
                episode_steps=row.whole("episode_steps", MOST_STEPS, optional=True),
                facts=facts,
                lacks=reader.lacks,
            )
        )
    if strange and len(strange) == predictions:
        raise strange[0]


def _placed(row: PredictionRow, point: Point | None) -> Point | None:
    """A point in the row's space, in pixels of the stored screenshot, to a millionth: a border stays a border."""
    name = row.text("space", optional=True) or Space.ORIGINAL.value
    if name not in list(Space):
        raise row.fail(f"field 'space' must be one of {', '.join(Space)}, not {shown(name)}")
    if point is None or name == Space.ORIGINAL:
        return point
    original = Size(*row.width_height("width", "height"))
    seen = Size(*row.width_height("seen_width", "seen_height")) if name == Space.RESIZED else original
    placed = Viewport(original, seen).point(PlacedPoint(*point, Space(name)), Space.ORIGINAL)
    return point_of(round(placed.x, 6), round(placed.y, 6))


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
    report: Report | None = None,
) -> tuple[Iterable[Case | Unread], Notes]:
    """The cases of a file in one of FORMATS, and notes for the reader of their score, complete after the last case.

    Formats coepg and mai_ui are read row by row, and call `report` as `rows.each_row` does.
    """
    if format != "uground" and (labels is not None or answers is not None):
        raise ScoringError(f"labels and answers belong to format uground; {format} files hold both")
    match format:
        case "coepg":
            return read_coepg(path, protocol, report), {}
        case "gui_r1":
            return read_gui_r1(path, protocol)
        case "mai_ui":
            return read_mai_ui(path, protocol, report)
        case "ui_genie":
            return read_ui_genie(path, protocol)
        case "uground":
            return read_uground(path, protocol, labels=labels, answers=answers)
        case _:
            raise ScoringError(f"format {format!r} is not known; choose from {', '.join(FORMATS)}")
