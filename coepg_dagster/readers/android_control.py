"""AndroidControl: the GZIP TFRecords of google-research, with splits.json and test_subsplits.json beside them.

Labels hold a point. The box is that of the smallest clickable node of the accessibility tree that contains the point,
borders included; of equally small ones the deepest. Actions get the canonical names, in capitals; a scroll's value is the
direction in which the content view moves on, as labelled.

Levels: at `high` models see the goal alone; at `low` the step's own instruction too, which is null at `high`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from coepg_dagster.prompts import normal_value
from coepg_dagster.readers.files import Files, files_below
from coepg_dagster.readers.images import Resize, opened, prepared, too_small
from coepg_dagster.readers.rows import (
    TRAINED,
    BoxTuple,
    Item,
    ReaderError,
    Reject,
    RejectedRow,
    Step,
    numbers,
    parse_json,
    part_of,
    target_boxes,
)
from coepg_dagster.readers.source_rows import SourceRow
from coepg_dagster.readers.tfrecord import Example, Forest, parsed, records

Level = Literal["high", "low"]
ACTIONS: Final = {
    "click": "CLICK",
    "long_press": "LONG_PRESS",
    "type": "TYPE",
    "input_text": "TYPE",
    "scroll": "SCROLL",
    "open_app": "OPEN_APP",
    "navigate_back": "BACK",
    "navigate_home": "HOME",
    "wait": "WAIT",
}
VALUES: Final = {"type": "text", "input_text": "text", "scroll": "direction", "open_app": "app_name"}
POINTED: Final = frozenset({"click", "long_press", "type"})
DIRECTIONS: Final = frozenset({"up", "down", "left", "right"})
_LISTS: Final = {
    "screenshots": "bytes_list",
    "accessibility_trees": "bytes_list",
    "screenshot_widths": "int64_list",
    "screenshot_heights": "int64_list",
}


def files(source: Path) -> list[Path]:
    """The TFRecord files of a local copy, in order of name."""
    return [source] if source.is_file() else files_below(source, lambda name: "-of-" in name)


@dataclass(frozen=True)
class Splits:
    """Which split each episode is in; test episodes are also in sub-splits (IDD, app_unseen, …)."""

    split: Mapping[int, str]
    subsplits: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(cls, folder: Path, files: Files | None = None) -> Splits:
        """From splits.json and, if present, test_subsplits.json; `files` records both. Raises ReaderError."""
        for name in ("splits.json", "test_subsplits.json"):
            if files is not None:
                files.note(folder / name)
        split = {episode: name for name, ids in _lists(folder / "splits.json").items() for episode in ids}
        subsplits: dict[int, tuple[str, ...]] = {}
        if (folder / "test_subsplits.json").is_file():
            for name, ids in _lists(folder / "test_subsplits.json").items():
                for episode in ids:
                    subsplits[episode] = (*subsplits.get(episode, ()), name)
        return cls(split, subsplits)


def _lists(path: Path) -> dict[str, list[int]]:
    try:
        data = parse_json(path.read_bytes(), str(path))
    except (OSError, RejectedRow) as error:
        raise ReaderError(f"{path}: cannot be read ({error}); it comes with the dataset") from error
    if not isinstance(data, dict) or not all(
        isinstance(ids, list) and all(type(episode) is int for episode in ids) for ids in data.values()
    ):
        raise ReaderError(f"{path}: must map split names to lists of episode ids")
    return data


def rows(path: Path, splits: Splits, level: Level, resize: Resize, shrink: bool) -> Iterator[SourceRow | Reject]:
    """A SourceRow per episode of one TFRecord file; it gives an item per step."""
    for record in records(path):
        if isinstance(record, Reject):
            yield record
        else:
            number, data = record
            yield SourceRow(str(path), str(number), partial(convert, data, path, number, splits, level, resize, shrink))


def _feature(features: Any, name: str, kind: str) -> Sequence[Any]:
    if name not in features:
        raise RejectedRow("missing_column", f"{name!r} is missing")
    return getattr(features[name], kind).value  # type: ignore[no-any-return]


def convert(
    data: bytes, path: Path, number: int, splits: Splits, level: Level, resize: Resize, shrink: bool
) -> list[Item]:
    """The steps of one episode; a record that is damaged as a whole raises RejectedRow."""
    features = parsed(Example, data, "the record").features.feature
    ids = _feature(features, "episode_id", "int64_list")
    goals = _feature(features, "goal", "bytes_list")
    if len(ids) != 1 or len(goals) != 1:
        raise RejectedRow("bad_field", "episode_id and goal must be single values")
    episode = int(ids[0])
    if episode not in splits.split:
        raise RejectedRow("not_in_splits", f"episode {episode} is not in splits.json")
    split = splits.split[episode]
    actions = _feature(features, "actions", "bytes_list")
    with part_of(split, len(actions)):
        lists = {name: _feature(features, name, kind) for name, kind in _LISTS.items()}
        instructions = _feature(features, "step_instructions", "bytes_list")
        lengths = {name: len(values) for name, values in lists.items()}
        lengths |= {"actions + 1": len(actions) + 1, "step_instructions + 1": len(instructions) + 1}
        if len(set(lengths.values())) != 1:
            raise RejectedRow("lengths_differ", ", ".join(f"{name}: {n}" for name, n in lengths.items()))
        goal = _text(goals[0], "the goal")
    subsplits = tuple(f"subsplit {name}" for name in splits.subsplits.get(episode, ()))
    items: list[Item] = []
    history: list[str] = []
    for i, encoded in enumerate(actions):
        described = f"step {i + 1} (not readable)"
        try:
            with part_of(split):
                action = _action(encoded)
                described = action.described()
                about = {
                    "step_id": f"{episode}_{i}",
                    "split": split,
                    "episode_id": str(episode),
                    "step_index": i,
                    "goal": goal,
                    "history": list(history),
                    "instruction": _text(instructions[i], "the step instruction") if level == "low" else None,
                    "episode_steps": len(actions),
                }
                values = {name: lists[name][i] for name in _LISTS}
                done, label = _step(action, values, about, subsplits, resize, shrink)
            described = action.described(label)
            items.append(replace(done, row=f"{number}/{i}"))
        except RejectedRow as rejected:
            items.append(rejected.reject(str(path), f"{number}/{i}"))
        history.append(described)
    return items


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RejectedRow("bad_field", f"{what} is not UTF-8 text") from error


@dataclass(frozen=True)
class AndroidAction:
    """A labelled action, in canonical names; `point` in pixels of the screenshot, None where it has none."""

    type: str
    value: str
    point: tuple[float, float] | None

    def described(self, element: str = "") -> str:
        """How the history of later steps names it, with the text of the element where it acted."""
        return " ".join(part for part in (self.type, f"[{element}]" if element else "", self.value) if part)


def _action(encoded: bytes) -> AndroidAction:
    data = parse_json(encoded, "the action")
    name = data.get("action_type") if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in ACTIONS:
        raise RejectedRow("unknown_action", f"{name!r} is none of {', '.join(ACTIONS)}")
    value, point = "", None
    if name in VALUES:
        given = data.get(VALUES[name])
        if not isinstance(given, str):
            raise RejectedRow("bad_field", f"{VALUES[name]!r} of a {name} must be text, not {given!r:.80}")
        value = normal_value(given)
        if name == "scroll" and value.lower() not in DIRECTIONS:
            raise RejectedRow("bad_field", f"scroll direction {value!r} is none of {', '.join(sorted(DIRECTIONS))}")
    if name in POINTED:
        x, y = numbers([data.get("x"), data.get("y")], 2, f"x and y of a {name}")
        point = (x, y)
    return AndroidAction(ACTIONS[name], value, point)


def _step(
    action: AndroidAction,
    values: Mapping[str, Any],
    about: Mapping[str, Any],
    noticed: tuple[str, ...],
    resize: Resize,
    shrink: bool,
) -> tuple[Step, str]:
    """The step of an action, with the columns `about`, and the text of the element where it acted."""
    source, split = values["screenshots"], about["split"]
    image = opened(source)
    stated = values["screenshot_widths"], values["screenshot_heights"]
    if image.size != stated:
        if split in TRAINED:
            detail = (
                f"the screenshot has {image.size[0]} x {image.size[1]} px, the record says {stated[0]} x {stated[1]}"
            )
            raise RejectedRow("bad_field", detail)
        noticed = (*noticed, "another_size_stated")
    boxes, element = list[BoxTuple](), ""
    if action.point is not None:
        box, element = _target(values["accessibility_trees"], action.point)
        boxes, faults = target_boxes([box], image.size, trained=split in TRAINED)
        small = bool(boxes) and too_small(boxes[0], image.size, resize)
        noticed = (*noticed, *faults, *(("target_too_small",) if small else ()))
    ready = prepared(image, source, boxes=boxes, point=action.point, resize=resize if shrink else None)
    done = ready.step(
        **about,
        family="android",
        action_type=action.type,
        value=action.value,
        noticed=noticed,
    )
    return done, element


def _target(tree: bytes, point: tuple[float, float]) -> tuple[BoxTuple | RejectedRow, str]:
    """(box, text) of the node that was acted on; instead of the box a RejectedRow where there is none."""
    try:
        node = enclosing_node(parsed(Forest, tree, "the accessibility tree"), point)
    except RejectedRow as damaged:
        return damaged, ""
    return node or (RejectedRow("no_enclosing_node", f"no clickable node contains {point}"), "")


def enclosing_node(forest: Any, point: tuple[float, float]) -> tuple[tuple[float, float, float, float], str] | None:
    """(box, text or description) of the smallest clickable node that contains `point`; ties: the deepest."""
    best = None
    for window in forest.windows:
        for node in window.tree.nodes:
            r = node.bounds_in_screen
            if not node.is_clickable or not (r.left <= point[0] <= r.right and r.top <= point[1] <= r.bottom):
                continue
            area = (r.right - r.left) * (r.bottom - r.top)
            if area <= 0:
                continue
            key = (area, -node.depth)
            if best is None or key < best[0]:
                box = (float(r.left), float(r.top), float(r.right), float(r.bottom))
                best = (key, box, node.text or node.content_description)
    return None if best is None else (best[1], best[2])
