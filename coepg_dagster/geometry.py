"""Coordinate spaces as types, and Qwen-VL's resize.

A number pair means nothing without its space: Qwen2.5-VL answers in pixels of the *resized* image, Qwen2-VL and
Qwen3-VL in 0..1000, labels are in pixels of the stored screenshot. `Point` and `Box` carry their space; mixing raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Space(StrEnum):
    """The unit and frame of a coordinate."""

    ORIGINAL = "original"  # pixels of the stored screenshot
    RESIZED = "resized"  # pixels of the image that the model sees
    NORM_1000 = "norm_1000"  # thousandths of width and height
    UNIT = "unit"  # 0..1 of width and height


class SpaceMismatch(ValueError):
    """An operation on two coordinates of different spaces."""


@dataclass(frozen=True)
class Size:
    """Width and height in pixels, both positive."""

    width: int
    height: int

    def __post_init__(self) -> None:
        if self.width <= 0 or self.height <= 0:
            raise ValueError(f"an image of {self.width} x {self.height} px has no area")


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    space: Space


@dataclass(frozen=True)
class Box:
    """(x1, y1) the upper left and (x2, y2) the lower right corner; borders belong to the box."""

    x1: float
    y1: float
    x2: float
    y2: float
    space: Space

    def __post_init__(self) -> None:
        if not (self.x1 <= self.x2 and self.y1 <= self.y2):
            raise ValueError(f"box {(self.x1, self.y1, self.x2, self.y2)}: corners are not in order")

    @property
    def centre(self) -> Point:
        return Point((self.x1 + self.x2) / 2, (self.y1 + self.y2) / 2, self.space)

    def contains(self, point: Point) -> bool:
        """Eq. 3: whether the point is in the box, borders included. Raises SpaceMismatch if their spaces differ."""
        if point.space is not self.space:
            raise SpaceMismatch(f"a point in {point.space} space was tested against a box in {self.space} space")
        return self.x1 <= point.x <= self.x2 and self.y1 <= point.y <= self.y2


@dataclass(frozen=True)
class Viewport:
    """Sizes of a screenshot, px: as stored, and resized for a model. Converts points and boxes between all spaces."""

    original: Size
    resized: Size

    def _extent(self, space: Space) -> tuple[float, float]:
        match space:
            case Space.ORIGINAL:
                return self.original.width, self.original.height
            case Space.RESIZED:
                return self.resized.width, self.resized.height
            case Space.NORM_1000:
                return 1000.0, 1000.0
            case Space.UNIT:
                return 1.0, 1.0

    def point(self, point: Point, to: Space) -> Point:
        """The same place, measured in `to`."""
        (from_w, from_h), (to_w, to_h) = self._extent(point.space), self._extent(to)
        return Point(point.x * to_w / from_w, point.y * to_h / from_h, to)

    def box(self, box: Box, to: Space) -> Box:
        """The same rectangle, measured in `to`."""
        a = self.point(Point(box.x1, box.y1, box.space), to)
        b = self.point(Point(box.x2, box.y2, box.space), to)
        return Box(a.x, a.y, b.x, b.y, to)


MAX_ASPECT: Final = 200
"""Qwen2.5-VL's processor refuses images whose sides differ by more than this factor."""


def smart_resize(size: Size, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """The size to which Qwen2-VL's, Qwen2.5-VL's and Qwen3-VL's processors resize an image of `size`.

    Both sides become multiples of `factor` (patch size x merge size: 28 for Qwen2.5-VL, 32 for Qwen3-VL), the area lies
    within [min_pixels, max_pixels] and the aspect ratio stays as near as that allows. Source: `smart_resize` of
    transformers' Qwen2-VL image processor, with which a property test compares it. Raises ValueError beyond MAX_ASPECT.
    """
    width, height = size.width, size.height
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise ValueError(f"image of {width} x {height} px: one side is over {MAX_ASPECT} times the other; crop it")
    new_h, new_w = round(height / factor) * factor, round(width / factor) * factor
    if new_h * new_w > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        new_h = max(factor, math.floor(height / beta / factor) * factor)
        new_w = max(factor, math.floor(width / beta / factor) * factor)
    elif new_h * new_w < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_h, new_w = math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return Size(new_w, new_h)
