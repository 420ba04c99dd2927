"""AndroidControl: the GZIP TFRecords of google-research, with splits.json and test_subsplits.json beside them.

Labels hold a point. The box is that of the smallest clickable node of the accessibility tree that contains the point,
borders included; of equal ones the deepest. Actions get the canonical names, in capitals; a scroll's value is the
direction in which the content view moves on, as labelled.

Levels: `high` asks with the goal alone; `low` appends the step's own instruction to the goal.
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
    Item,
    ReaderError,
    Reject,
    RejectedRow,
    Step,
    checked_box,
    numbers,
    parse_json,
    step,
)
from coepg_dagster.readers.tasks import Task
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
        """From splits.json and, where it is there, test_subsplits.json, which are noted in `files`. Raises ReaderError."""
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


def rows(path: Path, splits: Splits, level: Level, resize: Resize, shrink: bool) -> Iterator[Task | Reject]:
    """A task per episode of one TFRecord file, which gives an item per step."""
    for record in records(path):
        if isinstance(record, Reject):
            yield record
        else:
            number, data = record
            yield Task(str(path), str(number), partial(convert, data, path, number, splits, level, resize, shrink))


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
    lists = {name: _feature(features, name, kind) for name, kind in _LISTS.items()}
    actions, instructions = (_feature(features, n, "bytes_list") for n in ("actions", "step_instructions"))
    lengths = {name: len(values) for name, values in lists.items()}
    lengths |= {"actions + 1": len(actions) + 1, "step_instructions + 1": len(instructions) + 1}
    if len(set(lengths.values())) != 1:
        raise RejectedRow("lengths_differ", ", ".join(f"{name}: {n}" for name, n in lengths.items()))
    episode = int(ids[0])
    if episode not in splits.split:
        raise RejectedRow("not_in_splits", f"episode {episode} is not in splits.json")
    items: list[Item] = []
    history: list[str] = []
    for i, action in enumerate(actions):
        row = f"{number}/{i}"
        try:
            values = {name: lists[name][i] for name in _LISTS}
            done, described = _step(
                episode, i, goals[0], instructions[i], action, values, splits, level, resize, shrink
            )
            done.values["history"] = list(history)
            done.values["episode_steps"] = len(actions)
            items.append(replace(done, row=row))
        except RejectedRow as rejected:
            items.append(Reject(str(path), row, rejected.reason, rejected.detail))
            described = f"step {i + 1} (not readable)"
        history.append(described)
    return items


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RejectedRow("bad_field", f"{what} is not UTF-8 text") from error


def _step(
    episode: int,
    index: int,
    goal: bytes,
    instruction: bytes,
    action: bytes,
    values: Mapping[str, Any],
    splits: Splits,
    level: Level,
    resize: Resize,
    shrink: bool,
) -> tuple[Step, str]:
    """One step, and how the history of the following ones names it."""
    split = splits.split[episode]
    data = parse_json(action, "the action")
    name = data.get("action_type") if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in ACTIONS:
        raise RejectedRow("unknown_action", f"{name!r} is none of {', '.join(ACTIONS)}")
    value = ""
    if name in VALUES:
        given = data.get(VALUES[name])
        if not isinstance(given, str):
            raise RejectedRow("bad_field", f"{VALUES[name]!r} of a {name} must be text, not {given!r:.80}")
        value = normal_value(given)
        if name == "scroll" and value.lower() not in DIRECTIONS:
            raise RejectedRow("bad_field", f"scroll direction {value!r} is none of {', '.join(sorted(DIRECTIONS))}")
    source = values["screenshots"]
    image = opened(source)
    if image.size != (values["screenshot_widths"], values["screenshot_heights"]):
        stated = f"{values['screenshot_widths']} x {values['screenshot_heights']}"
        raise RejectedRow(
            "bad_field", f"the screenshot has {image.size[0]} x {image.size[1]} px, the record says {stated}"
        )
    point, box, label = None, None, ""
    noticed: list[str] = [f"subsplit {name}" for name in splits.subsplits.get(episode, ())]
    if name in POINTED:
        x, y = numbers([data.get("x"), data.get("y")], 2, f"x and y of a {name}")
        point = (x, y)
        found = enclosing_node(parsed(Forest, values["accessibility_trees"], "the accessibility tree"), point)
        if found is None and split in TRAINED:
            raise RejectedRow("no_enclosing_node", f"no clickable node contains {point}")
        if found is None:
            noticed.append("no_enclosing_node")
        else:
            box, label = checked_box(found[0], image.size), found[1]
            if too_small(box, image.size, resize):
                noticed.append("target_too_small")
    ready = prepared(image, source, boxes=[] if box is None else [box], point=point, resize=resize if shrink else None)
    asked = _text(goal, "the goal")
    own = _text(instruction, "the step instruction")
    done = step(
        step_id=f"{episode}_{index}",
        split=split,
        episode_id=str(episode),
        step_index=index,
        family="android",
        goal=f"{asked}\nCurrent step: {own}" if level == "low" else asked,
        history=[],
        screenshot=ready.screenshot,
        size=ready.size,
        boxes=ready.boxes,
        action_type=ACTIONS[name],
        value=value,
        point=None if ready.point is None else list(ready.point),
        instruction=own,
        noticed=tuple(noticed),
    )
    return done, " ".join(part for part in (ACTIONS[name], f"[{label}]" if label else "", value) if part)


def enclosing_node(forest: Any, point: tuple[float, float]) -> tuple[tuple[float, float, float, float], str] | None:
    """(box, text or description) of the smallest clickable node that contains `point`, of equal ones the deepest."""
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
