"""Checks screenshots, crops them to a view and resizes them once.

A screenshot that is neither cropped nor resized keeps its bytes, unless other programs would show it differently: then
`pictures` changes its pixels and it is stored as PNG. A cropped or resized one is stored in its original format (PNG
lossless, JPEG at quality 95), or as PNG where `pictures` changed its pixels.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image

from coepg_dagster.geometry import Box, Point, Size, Space, Viewport, smart_resize
from coepg_dagster.pictures import BadPicture, TooManyPixels, picture
from coepg_dagster.readers.rows import RejectedRow, Step, assert_storable


@dataclass(frozen=True)
class Resize:
    """A model's resize (see `geometry.smart_resize`); the default is the web setting of the paper map."""

    factor: int = 28
    min_pixels: int = 3136
    max_pixels: int = 1_843_200

    def of(self, size: tuple[int, int]) -> tuple[int, int]:
        """The (width, height) that the model sees; raises RejectedRow where it cannot take an image of `size`."""
        try:
            target = smart_resize(
                Size(*size), factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels
            )
        except ValueError as error:
            raise RejectedRow("extreme_aspect", str(error)) from error
        return target.width, target.height


def opened(encoded: bytes | None) -> Image.Image:
    """The picture as it is shown (see `pictures`). Raises RejectedRow where it is null, too large, damaged or cut short."""
    if not encoded:
        raise RejectedRow("no_screenshot", "there are no bytes")
    try:
        return picture(encoded)
    except TooManyPixels as error:
        raise RejectedRow("image_too_large", str(error)) from error
    except BadPicture as error:
        raise RejectedRow("bad_image", str(error)) from error


def encoded(image: Image.Image, format: str) -> bytes:
    """`image` as bytes of `format`."""
    out = io.BytesIO()
    if format == "JPEG":
        image.convert("RGB").save(out, "JPEG", quality=95)
    else:
        image.save(out, "PNG", compress_level=3)
    return out.getvalue()


@dataclass(frozen=True)
class Prepared:
    """A screenshot as it is stored; boxes (x1, y1, x2, y2) and point (x, y) in its pixels."""

    screenshot: bytes
    size: tuple[int, int]
    boxes: list[tuple[float, float, float, float]]
    point: tuple[float, float] | None

    def step(self, noticed: tuple[str, ...], **columns: Any) -> Step:
        """The row of this screenshot with the other columns of READER_SCHEMA, of which nullable ones may be left out.

        Raises RejectedRow where READER_SCHEMA cannot hold one of them.
        """
        mine = {"screenshot": self.screenshot, "width": self.size[0], "height": self.size[1], "boxes": self.boxes}
        values = mine | {"point": self.point and list(self.point)} | columns
        assert_storable(values)
        return Step(values, noticed)


def prepared(
    image: Image.Image,
    source: bytes,
    *,
    view: tuple[int, int, int, int] | None = None,
    boxes: Sequence[tuple[float, float, float, float]] = (),
    point: tuple[float, float] | None = None,
    resize: Resize | None = None,
) -> Prepared:
    """`image` (`opened` from `source`) cropped to `view` and resized; boxes and point, in pixels of `image`, are mapped along.

    Raises RejectedRow where the model cannot take an image of that size.
    """
    x0, y0, x1, y1 = view or (0, 0, *image.size)
    cut = Size(x1 - x0, y1 - y0)
    seen_size = (resize or Resize()).of((cut.width, cut.height))
    target = Size(*seen_size) if resize else cut
    if (x0, y0, x1, y1) == (0, 0, *image.size) and target == cut:
        kept = source if image.format else encoded(image, "PNG")
        return Prepared(kept, image.size, list(boxes), point)
    seen = image.crop((x0, y0, x1, y1))
    if target != cut:
        mode = "RGB" if seen.mode not in ("RGB", "L") else seen.mode
        seen = seen.convert(mode).resize((target.width, target.height), Image.Resampling.BICUBIC)
    port = Viewport(cut, target)

    def moved(x: float, y: float) -> tuple[float, float]:
        place = port.point(Point(x - x0, y - y0, Space.ORIGINAL), Space.RESIZED)
        return place.x, place.y

    out = []
    for b in boxes:
        box = port.box(Box(b[0] - x0, b[1] - y0, b[2] - x0, b[3] - y0, Space.ORIGINAL), Space.RESIZED)
        out.append((box.x1, box.y1, box.x2, box.y2))
    return Prepared(
        encoded(seen, image.format or "PNG"),
        (target.width, target.height),
        out,
        None if point is None else moved(*point),
    )


LEGIBLE: Final = 8.0
"""Pixels that the smaller side of a target must have after the resize."""


def too_small(box: tuple[float, float, float, float], size: tuple[int, int], resize: Resize) -> bool:
    """Whether a box on a screenshot of `size` has a side below LEGIBLE px in the image that the model sees."""
    width, height = resize.of(size)
    return min((box[2] - box[0]) * width / size[0], (box[3] - box[1]) * height / size[1]) < LEGIBLE
