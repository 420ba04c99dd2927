"""Which part of a full-page screenshot becomes a step's screenshot: deterministic rules, recorded with the row.

`target_block`: UGround's vertical blocks (1280 × 1000 px, overlap 200); the first block that holds a target box entirely.
`target_crop`: a crop of the block size, centred on the first target box as far as the page allows.
`page`: all of it.
`scroll`: for training `target_block`; elsewhere all of it, through which an agent scrolls (`inference.scrolling`).
A box that reaches over the edge of the page fits into a crop if its part on the page does. A block, as in UGround, must
hold all of it. Without a target both rules give the first block; targets that fit into no view count as absent. Where no
block holds a target, `target_block` falls back to the crop (UGround crops at a random place there); the recorded rule
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

BoxTuple = tuple[float, float, float, float]
View = tuple[int, int, int, int]
Rule = Literal["target_block", "target_crop", "page", "scroll"]

BLOCK_WIDTH: Final = 1280
BLOCK_HEIGHT: Final = 1000
OVERLAP: Final = 200


def blocks(width: int, height: int) -> list[View]:
    """UGround's blocks of a page, from the top: (x1, y1, x2, y2) in page pixels, (height − 200) // 800 + 1 of them."""
    right = min(width, BLOCK_WIDTH)
    stride = BLOCK_HEIGHT - OVERLAP
    count = max(1, (height - OVERLAP) // stride + 1)
    return [(0, i * stride, right, min(i * stride + BLOCK_HEIGHT, height)) for i in range(count)]


def held(boxes: Sequence[BoxTuple], view: View) -> list[BoxTuple]:
    """The boxes that lie in a view entirely; both in page pixels."""
    return [box for box in boxes if _inside(box, view)]


def _inside(box: BoxTuple, view: View) -> bool:
    return view[0] <= box[0] and box[2] <= view[2] and view[1] <= box[1] and box[3] <= view[3]


def _meets(box: BoxTuple, view: View) -> bool:
    return box[0] <= view[2] and view[0] <= box[2] and box[1] <= view[3] and view[1] <= box[3]


def _cut(box: BoxTuple, view: View) -> BoxTuple:
    """The part of `box` that lies in `view`; they must overlap."""
    return max(box[0], view[0]), max(box[1], view[1]), min(box[2], view[2]), min(box[3], view[3])


def target_crop(box: BoxTuple, width: int, height: int) -> View:
    """A view of the block size centred on `box`, shifted to stay within the page."""
    w, h = min(width, BLOCK_WIDTH), min(height, BLOCK_HEIGHT)
    x = min(max(round((box[0] + box[2] - w) / 2), 0), width - w)
    y = min(max(round((box[1] + box[3] - h) / 2), 0), height - h)
    return (x, y, x + w, y + h)


def choose(boxes: Sequence[BoxTuple], width: int, height: int, rule: Rule) -> tuple[View, list[BoxTuple], str]:
    """(view, the target boxes that lie in it entirely, the rule as recorded), all in page pixels.

    Where no target fits into a view: the first block, and no boxes.
    """
    if rule in ("page", "scroll"):
        return (0, 0, width, height), list(boxes), rule
    tiles = blocks(width, height)
    if not boxes:
        return tiles[0], [], "block 0"
    if rule == "target_block":
        for i, view in enumerate(tiles):
            if inside := held(boxes, view):
                return view, inside, f"block {i}"
    page = (0, 0, width, height)
    parts = [(box, _cut(box, page)) for box in boxes if _meets(box, page)]
    for _, target in parts:
        view = target_crop(target, width, height)
        inside = [box for box, part in parts if _inside(part, view)]
        if inside:
            return view, inside, "target crop"
    return tiles[0], [], "block 0"
