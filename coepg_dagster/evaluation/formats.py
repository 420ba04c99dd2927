"""Files of predictions, by other people and our own, as `Case`s.

A row that the format does not allow is an error with file, row and field: a score over fewer rows than the file has
would be another number. What a *model* got wrong (no answer, no coordinates) is a case like any other, and the protocol
judges it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from coepg_dagster.evaluation.android_control import POINTED, Node, canonical
from coepg_dagster.evaluation.case import Action, Case, ScoringError
from coepg_dagster.evaluation.metrics import BoxTuple, Point

Notes = dict[str, int | str]


@dataclass(frozen=True)
class Row:
    """One JSON object of a file, with typed access to its fields."""

    where: str  # file and row, for messages
    data: Mapping[str, Any]

    def fail(self, message: str) -> ScoringError:
        return ScoringError(f"{self.where}: {message}")

    def get(self, key: str, *types: type, optional: bool = False) -> Any:
        """The field, of one of `types` (a bool is never a number); None where it is absent or null and `optional`."""
        value = self.data.get(key)
        if value is None and optional:
            return None
        if key not in self.data:
            raise self.fail(f"field {key!r} is missing (there are {', '.join(sorted(self.data))})")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.fail(f"field {key!r} must be {' or '.join(t.__name__ for t in types)}, not {value!r}")
        return value

    def text(self, key: str) -> str:
        return str(self.get(key, str))

    def answer(self, key: str) -> str:
        """What a model wrote; empty where the file has null, because there was nothing to read."""
        return str(self.get(key, str, optional=True) or "")

    def numbers(self, key: str, n: int, *, optional: bool = False) -> tuple[float, ...] | None:
        value = self.get(key, list, optional=optional)
        if value is None:
            return None
        return _numbers(value, n, lambda: self.fail(f"field {key!r} must be {n} numbers, not {value!r}"))

    def point(self, key: str, *, optional: bool = False) -> Point | None:
        xy = self.numbers(key, 2, optional=optional)
        return None if xy is None else (xy[0], xy[1])

    def leading_point(self, key: str) -> Point | None:
        """The first two of a list of numbers; None where the file has null."""
        value = self.get(key, list, optional=True)
        if value is None:
            return None
        xy = _numbers(value[:2], 2, lambda: self.fail(f"field {key!r} must start with two numbers, not {value!r}"))
        return xy[0], xy[1]

    def size(self, key: str) -> tuple[int, int]:
        pair = self.numbers(key, 2)
        assert pair is not None
        return self._positive(key, int(pair[0]), int(pair[1]))

    def _positive(self, key: str, width: int, height: int) -> tuple[int, int]:
        if width <= 0 or height <= 0:
            raise self.fail(f"field {key!r}: a size of {width} x {height} px is none")
        return width, height

    def width_height(self, width: str, height: str) -> tuple[int, int]:
        return self._positive(f"{width}, {height}", self.get(width, int), self.get(height, int))

    def xywh_boxes(self, value: Any, key: str) -> tuple[BoxTuple, ...]:
        """[[x, y, width, height], …] as corners."""
        if not isinstance(value, list):
            raise self.fail(f"field {key!r} must be a list of boxes [x, y, width, height], not {value!r}")
        boxes = []
        for box in value:
            x, y, w, h = _numbers(box, 4, lambda: self.fail(f"field {key!r}: {box!r} is no box [x, y, width, height]"))  # noqa: B023
            boxes.append((x, y, x + w, y + h))
        return tuple(boxes)

    def xyxy_boxes(self, value: Any, key: str) -> tuple[BoxTuple, ...]:
        if not isinstance(value, list):
            raise self.fail(f"field {key!r} must be a list of boxes [x1, y1, x2, y2], not {value!r}")
        boxes = []
        for box in value:
            x1, y1, x2, y2 = _numbers(box, 4, lambda: self.fail(f"field {key!r}: {box!r} is no box [x1, y1, x2, y2]"))  # noqa: B023
            if not (x1 <= x2 and y1 <= y2):
                raise self.fail(f"field {key!r}: the corners of {box!r} are not in order")
            boxes.append((x1, y1, x2, y2))
        return tuple(boxes)


def _numbers(value: Any, n: int, error: Callable[[], ScoringError]) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != n:
        raise error()
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and v == v for v in value):
        raise error()
    return tuple(float(v) for v in value)


def _open(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            yield from lines
    except (EOFError, gzip.BadGzipFile) as error:
        raise ScoringError(f"{path}: damaged or cut-short gzip file ({error}); fetch it again") from error
    except UnicodeDecodeError as error:
        raise ScoringError(f"{path}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise ScoringError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_jsonl(path: Path) -> list[Row]:
    """Every line of a JSON-lines file, or entry of a JSON list, gzipped or not; blank lines are passed over."""
    rows: list[Row] = []
    for i, line in enumerate(_open(path), start=1):
        if i == 1 and line.lstrip().startswith("["):
            entries = read_json(path)
            if not all(isinstance(entry, dict) for entry in entries):
                raise ScoringError(f"{path}: a JSON list must hold objects only")
            rows = [Row(f"{path}: row {n}", entry) for n, entry in enumerate(entries, start=1)]
            break
        if not line.strip():
            continue
        where = f"{path}: row {i}"
        try:
            data = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ScoringError(f"{where}: invalid JSON ({error})") from error
        if not isinstance(data, dict):
            raise ScoringError(f"{where}: must be a JSON object")
        rows.append(Row(where, data))
    if not rows:
        raise ScoringError(f"{path}: holds no rows")
    return rows


def read_json(path: Path) -> Any:
    try:
        return json.loads("".join(_open(path)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ScoringError(f"{path}: invalid JSON ({error})") from error


def _family(protocol: str) -> str:
    return protocol.split("/")[0]


# --- gui_r1 -----------------------------------------------------------------------------------------------------------

_GUI_R1_NAMES: Final = {"press_back": "back", "press_home": "home", "complete": "finish"}


def _content_id(row: Row, fields: Iterable[str], seen: Counter[str]) -> str:
    """An id for a row that has none: of the label's fields, so that runs in another order can be compared."""
    digest = hashlib.sha256(repr([row.data.get(field) for field in fields]).encode()).hexdigest()[:16]
    seen[digest] += 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def read_gui_r1(path: Path, protocol: str) -> tuple[list[Case], Notes]:
    """GUI-R1's prediction files (JSON lines): label, image sizes, and the prediction in original pixels.

    AndroidControl: with `history` in the rows (high) the goal `instruction` is the task; without (low) it is the step's
    own and there is no task. Values stay as written ("no input text" included), for the owner's F1 compares them so; an
    action that the file has as null could not be read. Some files lack the original size (`orig_w`, `orig_h`).
    """
    if _family(protocol) not in ("android_control", "screenspot"):
        raise ScoringError(f"{path}: gui_r1 files hold AndroidControl or ScreenSpot predictions, not {protocol}'s")
    cases, ids = [], Counter[str]()
    for row in read_jsonl(path):
        instruction = row.text("instruction")
        label_fields = ("instruction", "history", "gt_action", "gt_bbox", "gt_input_text", "group", "ui_type")
        step_id = _content_id(row, label_fields, ids)
        predicted = row.leading_point("pred_coord")
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
                )
            )
            continue
        label, action = (_GUI_R1_NAMES.get(name, name) for name in (row.text("gt_action"), row.answer("pred_action")))
        truth = row.point("gt_bbox") if label in POINTED else None
        cases.append(
            Case(
                step_id=step_id,
                episode_id=instruction if "history" in row.data else None,
                label=Action(label, row.text("gt_input_text"), truth),
                prediction=Action(action, row.answer("pred_input_text"), predicted),
                size=row.width_height("orig_w", "orig_h") if "orig_w" in row.data else None,
                seen_size=row.size("image_size"),
                group=row.text("group"),
            )
        )
    return cases, {}


# --- ui_genie ---------------------------------------------------------------------------------------------------------


def _genie_action(row: Row, text: str) -> Action | None:
    """UI-Genie's `{"action": …}` object, bare or as the arguments of a tool call; None where it cannot be parsed."""
    body = text.split("<tool_call>")[-1].split("</tool_call>")[0].strip()
    try:
        data = json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        return None
    arguments = data.get("arguments", data) if isinstance(data, dict) else None
    if not isinstance(arguments, dict) or not isinstance(arguments.get("action"), str):
        return None
    name = arguments["action"].lower()
    xy = arguments.get("coordinate")
    points: list[Point | None] = []
    for value in (xy, arguments.get("coordinate2")):
        if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value):
            points.append((float(value[0]), float(value[1])))
        else:
            points.append(None)
    value = next((arguments[k] for k in ("text", "direction", "button", "status") if k in arguments), "")
    if name == "swipe" and "direction" not in arguments:
        value = _swipe_direction(points[0], points[1])
    action = Action(name, str(value), points[0])
    return action if name in ("swipe", "system_button") else canonical(action)


def _swipe_direction(start: Point | None, end: Point | None) -> str:
    """The finger's direction; "right" where a point is missing, as UI-Genie's script has it."""
    if start is None or end is None:
        return "right"
    dx, dy = end[0] - start[0], end[1] - start[1]
    if abs(dx) > abs(dy):
        return "right" if dx > 0 else "left"
    return "down" if dy > 0 else "up"


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
    cases, notes = [], {k: v for k, v in data.items() if isinstance(v, int)}
    for part, details in (
        ("actiontype_notmatch_gt", "actiontype_notmatch_details"),
        ("actiontype_match_gt", "actiontype_match_details"),
    ):
        listed = Row(f"{path}", data).get(part, dict)
        for i, entry in enumerate(Row(f"{path}: {part}", listed).get(details, list), start=1):
            row = Row(f"{path}: {details} {i}", entry)
            label = _genie_action(row, row.text("gt"))
            if label is None:
                raise row.fail("field 'gt' holds no action")
            step_id = row.text("questionID")
            episode, _, index = step_id.rpartition("_")
            cases.append(
                Case(
                    step_id=step_id,
                    episode_id=episode,
                    step_index=int(index) if index.isdigit() else None,
                    label=label,
                    prediction=_genie_action(row, row.text("answer")),
                    facts={"listed_wrong": True},
                )
            )
    return cases, {f"owner's {key}": value for key, value in notes.items()}


# --- uground ----------------------------------------------------------------------------------------------------------

ORACLE: Final = "oracle: no grounder's answers were given; an element counts as right wherever a grounding query exists"


def _output_point(row: Row) -> Point | None:
    """The grounder's "(x, y)" divided by `scale`: pixels of the block or screenshot. None where there is no output."""
    output = row.get("output", str, list, optional=True)
    if not output:
        return None
    if isinstance(output, str):
        try:
            output = [float(v) for v in output.strip().strip("()").split(",")]
        except ValueError:
            raise row.fail(f"field 'output' must be \"(x, y)\", not {output!r}") from None
    x, y = _numbers(output, 2, lambda: row.fail(f"field 'output' must be two numbers, not {output!r}"))
    scale = row.get("scale", int, float, optional=True)
    scale = 1.0 if scale is None else float(scale)
    if scale <= 0:
        raise row.fail(f"field 'scale' must be positive, not {scale}")
    return x / scale, y / scale


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


def _uground_screenspot_case(row: Row, ids: Counter[str]) -> Case:
    boxes = row.xywh_boxes([row.get("bbox", list)], "bbox")
    image = row.get("img_filename" if "img_filename" in row.data else "image", str)
    return Case(
        step_id=f"{image}-{_content_id(row, ('image', 'img_filename', 'instruction', 'bbox'), ids)}",
        episode_id=None,
        label=Action("click"),
        prediction=Action("click", "", _output_point(row)),
        boxes=boxes,
        group=f"{row.text('platform')}_{row.text('data_type')}",
    )


def _mind2web_id(row: Row) -> str:
    return f"{row.text('annotation_id')}_{row.text('action_uid')}"


def _by_id(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, Row]:
    """Rows by key; of several with one key the first counts, as in UGround's scripts."""
    out: dict[Any, Row] = {}
    for row in rows:
        out.setdefault(key(row), row)
    return out


def _read_uground_mind2web(plans: Sequence[Row], labels: Path | None, answers: Path | None) -> tuple[list[Case], Notes]:
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
        prediction, boxes = None, tuple[BoxTuple, ...]()
        facts = {"no_label_boxes": not sample.get("bbox", list)}
        if oracle:
            facts["oracle"] = plan is not None and (step_id in answer_rows if answers is not None else _has_query(plan))
        if plan is not None:
            answer = plan if embedded else answer_rows.get(step_id)
            point = None if answer is None else _output_point(answer)
            boxes = () if answer is None else answer.xywh_boxes(answer.get("bbox", list), "bbox")
            value = plan.text("gpt_value")
            prediction = Action(plan.text("gpt_action"), "" if value.lower() == "none" else value, point)
        cases.append(
            Case(
                step_id=step_id,
                episode_id=sample.text("annotation_id"),
                label=Action(sample.text("operation"), sample.text("value")),
                prediction=prediction,
                boxes=boxes,
                step_index=sample.get("step", int),
                episode_steps=sample.get("total_steps", int),
                facts=facts,
            )
        )
    return cases, notes | ({"grounder": ORACLE} if oracle else {})


def _has_query(plan: Row) -> bool:
    """Whether UGround asks its grounder: the chosen block holds a target and the plan describes an element."""
    description = plan.get("description", str, optional=True)
    chosen = str(plan.data.get("ans_block"))
    return chosen in plan.get("target_blocks", dict) and bool(description) and description != "None"


_UGROUND_VALUES: Final = ("text", "app_name", "direction", "goal_status")


def _uground_action(row: Row, data: Any) -> Action:
    if not isinstance(data, dict) or not isinstance(data.get("action_type"), str):
        raise row.fail(f"field 'action' must be an object with an action_type, not {data!r}")
    value = next((str(data[key]) for key in _UGROUND_VALUES if data.get(key) is not None), "")
    x, y = data.get("x"), data.get("y")
    point = (float(x), float(y)) if isinstance(x, int | float) and isinstance(y, int | float) else None
    return canonical(Action(data["action_type"], value, point))


def _nodes(row: Row, tree: Any) -> list[Node]:
    """The nodes of an accessibility tree: dictionaries with `bbox_pixels`, in lists of any depth."""
    out: list[Node] = []
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
            x1, y1, x2, y2 = _numbers(corners, 4, lambda: row.fail(f"bbox_pixels {box!r} are not numbers"))  # noqa: B023
            out.append(Node((x1, y1, x2, y2), item.get("text") or "", item.get("content_description") or ""))
    return out


def _read_uground_android_control(plans: Sequence[Row], labels: Path, answers: Path) -> list[Case]:
    def key(row: Row) -> tuple[str, int]:
        return str(row.get("episode_id", int, str)), row.get("step", int)

    data = read_json(labels)
    if not isinstance(data, list):
        raise ScoringError(f"{labels}: must be one JSON list of steps")
    samples = _by_id((Row(f"{labels}: entry {i}", entry) for i, entry in enumerate(data, start=1)), key)
    answered = _by_id(read_jsonl(answers), key)
    if not any(row.data.get("output") for row in answered.values()):
        raise ScoringError(f"{answers}: no row has an output; give the grounder's answers, not its queries")
    cases = []
    for plan in _by_id(plans, key).values():
        sample, answer = samples.get(key(plan)), answered.get(key(plan))
        if sample is None:
            continue
        predicted = _uground_action(plan, plan.data.get("action"))
        point = None if answer is None else _output_point(answer)
        episode, step = key(plan)
        cases.append(
            Case(
                step_id=f"{episode}_{step}",
                episode_id=episode,
                step_index=step,
                label=_uground_action(sample, sample.data.get("action")),
                prediction=Action(predicted.type, predicted.value, point),
                facts={"nodes": _nodes(sample, sample.get("accessibility_tree", list))},
            )
        )
    return cases


# --- our own ----------------------------------------------------------------------------------------------------------

_OWN_KEYS: Final = frozenset(
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
    ]
)
_LABEL_KEYS: Final = frozenset(["action_type", "value", "point", "boxes", "positives"])
_PREDICTION_KEYS: Final = frozenset(["action_type", "value", "point", "element"])


def _own_action(row: Row, keys: frozenset[str], mobile: bool) -> Action:
    if strange := set(row.data) - keys:
        raise row.fail(f"field {min(strange)!r} is not known; the fields are {', '.join(sorted(keys))}")
    action = Action(
        row.text("action_type"), row.get("value", str, optional=True) or "", row.point("point", optional=True)
    )
    return canonical(action) if mobile else action


def read_own(path: Path, protocol: str) -> tuple[list[Case], Notes]:
    """Our own format: JSON lines, each a label and a prediction. Points and boxes in pixels of the stored screenshot.

    {"step_id": "…", "episode_id": "…" or null, "step_index": 0, "width": 1080, "height": 2400,
     "label": {"action_type": "click", "value": "", "point": [x, y] or null, "boxes": [[x1, y1, x2, y2]]},
     "prediction": {"action_type": "click", "value": "", "point": [x, y] or null} or null}
    Besides, where a protocol needs them: `group` (ScreenSpot), `episode_steps` (mind2web/uground's padding),
    `seen_width`, `seen_height`, label `positives` [[backend_node_id, rank]] and prediction `element` (mind2web/seeact),
    `nodes` [{"box", "text", "content_description"}] (android_control/uground500). Unknown fields are errors.
    """
    mobile = "android_control" in protocol
    cases = []
    for row in read_jsonl(path):
        if strange := set(row.data) - _OWN_KEYS:
            raise row.fail(f"field {min(strange)!r} is not known; the fields are {', '.join(sorted(_OWN_KEYS))}")
        label_row = Row(f"{row.where}: label", row.get("label", dict))
        answer = row.get("prediction", dict, optional=True)
        facts: dict[str, Any] = {}
        if "positives" in label_row.data:
            facts["positives"] = [
                (str(pair[0]), pair[1])
                for pair in label_row.get("positives", list)
                if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int)
            ]
            if len(facts["positives"]) != len(label_row.data["positives"]):
                raise label_row.fail("field 'positives' must be a list of [backend_node_id, rank]")
            facts["element"] = None if answer is None else answer.get("element")
        if "nodes" in row.data:
            facts["nodes"] = [_own_node(Row(f"{row.where}: nodes", node)) for node in row.get("nodes", list)]
        seen = None if row.data.get("seen_width") is None else row.width_height("seen_width", "seen_height")
        cases.append(
            Case(
                step_id=row.text("step_id"),
                episode_id=row.get("episode_id", str, optional=True),
                label=_own_action(label_row, _LABEL_KEYS, mobile),
                prediction=None
                if answer is None
                else _own_action(Row(f"{row.where}: prediction", answer), _PREDICTION_KEYS, mobile),
                boxes=label_row.xyxy_boxes(label_row.get("boxes", list, optional=True) or [], "boxes"),
                size=None if row.data.get("width") is None else row.width_height("width", "height"),
                seen_size=seen,
                group=row.get("group", str, optional=True) or "",
                step_index=row.get("step_index", int, optional=True),
                episode_steps=row.get("episode_steps", int, optional=True),
                facts=facts,
            )
        )
    return cases, {}


def own_row(case: Case) -> dict[str, Any]:
    """`case` as an object of our own format, which `read_own` reads back."""
    label: dict[str, Any] = {"action_type": case.label.type, "value": case.label.value, "point": case.label.point}
    label["boxes"] = case.boxes
    prediction: dict[str, Any] | None = None
    if case.prediction is not None:
        action = case.prediction
        prediction = {"action_type": action.type, "value": action.value, "point": action.point}
    row: dict[str, Any] = {"step_id": case.step_id, "episode_id": case.episode_id, "group": case.group}
    row |= {"step_index": case.step_index, "episode_steps": case.episode_steps}
    for prefix, size in (("", case.size), ("seen_", case.seen_size)):
        row |= {f"{prefix}width": size and size[0], f"{prefix}height": size and size[1]}
    if "positives" in case.facts:
        label["positives"] = [list(pair) for pair in case.facts["positives"]]
        if prediction is not None:
            prediction["element"] = case.facts["element"]
    if "nodes" in case.facts:
        row["nodes"] = [asdict(node) for node in case.facts["nodes"]]
    return row | {"label": label, "prediction": prediction}


def _own_node(row: Row) -> Node:
    (box,) = row.xyxy_boxes([row.get("box", list)], "box")
    return Node(
        box, row.get("text", str, optional=True) or "", row.get("content_description", str, optional=True) or ""
    )


FORMATS: Final = ("coepg", "gui_r1", "ui_genie", "uground")


def read_predictions(
    path: Path, format: str, protocol: str, *, labels: Path | None = None, answers: Path | None = None
) -> tuple[list[Case], Notes]:
    """The cases of a file in one of FORMATS, and what a reader of their score must know."""
    if format != "uground" and (labels is not None or answers is not None):
        raise ScoringError(f"labels and answers belong to format uground; {format} files hold both")
    match format:
        case "coepg":
            return read_own(path, protocol)
        case "gui_r1":
            return read_gui_r1(path, protocol)
        case "ui_genie":
            return read_ui_genie(path, protocol)
        case "uground":
            return read_uground(path, protocol, labels=labels, answers=answers)
        case _:
            raise ScoringError(f"format {format!r} is not known; choose from {', '.join(FORMATS)}")
