"""A user's own data: a JSON-lines file `steps.jsonl` beside a folder of images.

    {"step_id": "shop-17", "episode_id": "shop", "step_index": 0, "split": "train", "family": "shop.example",
     "goal": "Buy a red scarf", "history": ["CLICK [Scarves]"], "image": "images/17.png",
     "boxes": [[100, 40, 180, 72]], "action_type": "CLICK", "value": ""}

Boxes are (x1, y1, x2, y2) in pixels of the image as it is shown, after its EXIF orientation; none where the action has
no target. For training they must lie in the image; other splits keep them as they are, and `check-data` counts them.
`value` is what is typed, chosen, opened, or the direction of a SCROLL. Every way of saying that there is none, such as "None",
becomes "", as in planners' answers; that of an action that takes none is dropped and counted (`value_dropped`).
`history` names the earlier actions, oldest first. Optional: `point` [x, y], `instruction` (the step's own), `episode_steps`.
Models see the image, `goal`, `history` and `instruction`. Unknown fields are errors. Image paths are relative to the file's
folder and stay in it; that folder may hold links to images elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from coepg_dagster import jsonlines
from coepg_dagster.prompts import WITHOUT_VALUE, normal_value
from coepg_dagster.readers.files import Files, files_below
from coepg_dagster.readers.images import Resize, opened, prepared, too_small
from coepg_dagster.readers.rows import (
    ALL_ACTIONS,
    TRAINED,
    BoxTuple,
    Reject,
    RejectedRow,
    Step,
    checked_box,
    checked_point,
    numbers,
    of_picture,
    parse_json,
    part_of,
    position,
    target_boxes,
    texts,
    wanted,
)
from coepg_dagster.readers.source_rows import SourceRow, of_lines
from coepg_dagster.steps import NO_VALUE

FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "step_id": (str,),
    "episode_id": (str,),
    "step_index": (int,),
    "split": (str,),
    "family": (str,),
    "goal": (str,),
    "history": (list,),
    "image": (str,),
    "boxes": (list,),
    "action_type": (str,),
    "value": (str,),
}
OPTIONAL: Final = frozenset({"point", "instruction", "episode_steps"})


def files(source: Path) -> list[Path]:
    """The JSON-lines files of a folder, or the one file."""
    return [source] if source.is_file() else files_below(source, lambda name: name.endswith(".jsonl"), deep=False)


def rows(path: Path, images: Files, resize: Resize, shrink: bool) -> Iterator[SourceRow | Reject]:
    """A SourceRow per line."""
    return of_lines(path, lambda line, _: [convert(line, images, resize, shrink)])


def convert(line: bytes, images: Files, resize: Resize, shrink: bool) -> Step:
    """The step of one line; raises RejectedRow where it breaks the format."""
    data = parse_json(line, "the line")
    if not isinstance(data, dict):
        raise RejectedRow("bad_field", f"a line must be an object, not {data!r:.80}")
    with part_of(wanted(data, "split", str)):
        return _step(data, images, resize, shrink)


def _step(data: Mapping[str, Any], images: Files, resize: Resize, shrink: bool) -> Step:
    if strange := set(data) - set(FIELDS) - OPTIONAL:
        raise RejectedRow("bad_field", f"{min(strange)!r} is not known; the fields are {', '.join(FIELDS)}")
    values = {name: wanted(data, name, *types) for name, types in FIELDS.items()}
    if values["action_type"] not in ALL_ACTIONS:
        raise RejectedRow("unknown_action", f"{values['action_type']!r} is none of {', '.join(sorted(ALL_ACTIONS))}")
    value = normal_value(values["value"])
    dropped = value != NO_VALUE and values["action_type"] in WITHOUT_VALUE
    values["value"] = NO_VALUE if dropped else value
    source = images.image(values["image"])
    boxes, point = [_box(entry) for entry in values["boxes"]], None
    trained = values["split"] in TRAINED
    with of_picture(values["image"]):
        image = opened(source)
        if trained:
            boxes = [checked_box(box, image.size) for box in boxes]  # the user can correct the data
        boxes, faults = target_boxes(boxes, image.size, trained=trained)
        if data.get("point") is not None:
            point = checked_point(numbers(data["point"], 2, "point"), image.size)
        ready = prepared(image, source, boxes=boxes, point=point, resize=resize if shrink else None)
    small = bool(boxes) and all(too_small(box, image.size, resize) for box in boxes)
    plain = {name: values[name] for name in FIELDS if name not in ("image", "boxes", "step_index", "history")}
    return ready.step(
        **plain,
        step_index=position(values["step_index"], "step_index"),
        history=texts(values["history"], "history"),
        instruction=wanted(data, "instruction", str) if data.get("instruction") is not None else None,
        episode_steps=position(data["episode_steps"], "episode_steps")
        if data.get("episode_steps") is not None
        else None,
        noticed=(*faults, *(("target_too_small",) if small else ()), *(("value_dropped",) if dropped else ())),
    )


MANY_OUTSIDE: Final = 20
"""From so many rows on, and one in twenty, boxes that leave their images are a sign of another unit."""


def not_pixels(path: Path, outside: int = 0) -> str | None:
    """Why the boxes or points of a file cannot be pixels; None: they can.

    Args:
        outside: how many of its rows have a box that leaves the image.
    """
    largest = _largest(path)
    for what, found in largest.items():
        if found and max(found) <= 1:
            return (
                f"{path}: all {what} lie in 0..1: the format has pixels of the image; multiply by its width and height"
            )
    boxes = largest["boxes"]
    if outside >= max(MANY_OUTSIDE, len(boxes) / 20) and max(boxes, default=0) <= THOUSAND:
        return (
            f"{path}: {outside} rows have boxes that leave their images, and no coordinate exceeds {THOUSAND}: the format has "
            f"pixels of the image; if these are thousandths, multiply by its width and height, divided by {THOUSAND}"
        )
    return None


THOUSAND: Final = 1000


def may_be_thousandths(path: Path, smallest_side: float) -> str | None:
    """A note where boxes may be thousandths although they lie in the images, whose sides are all larger; None: they are not.

    Args:
        smallest_side: of all images; infinite where none was read.
    """
    largest = _largest(path)["boxes"]
    if not THOUSAND < smallest_side < math.inf or len(largest) < MANY_OUTSIDE or max(largest) > THOUSAND:
        return None
    return (
        f"{path}: no coordinate exceeds {THOUSAND}, and every image is larger: boxes are pixels of the image; look whether "
        "these are thousandths"
    )


def _largest(path: Path) -> dict[str, list[float]]:
    """The largest coordinate of each of the "boxes" and "points" in a file.

    What cannot be read is passed over, as rows report it.
    """
    boxes, points = list[float](), list[float]()
    with suppress(OSError), path.open("rb") as file:  # the import of the file says so
        for _, line in jsonlines.lines(file):
            with suppress(jsonlines.NotJson):
                if isinstance(data := jsonlines.parse(line), dict):
                    given = data.get("boxes")
                    with suppress(RejectedRow):
                        for box in given if isinstance(given, list) else ():
                            boxes.append(max(numbers(box, 4, "boxes")))
                    with suppress(RejectedRow):
                        points.append(max(numbers(data.get("point"), 2, "point")))
    return {"boxes": boxes, "points": points}


def _box(entry: object) -> BoxTuple:
    x1, y1, x2, y2 = numbers(entry, 4, "a box")
    if x1 > x2 or y1 > y2:
        raise RejectedRow("box_without_area", f"box {(x1, y1, x2, y2)} must be x1, y1, x2, y2")
    return x1, y1, x2, y2
