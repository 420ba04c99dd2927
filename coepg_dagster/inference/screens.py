"""The screenshots of a step table, decoded and resized once for a model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import pyarrow as pa
from PIL import Image

from coepg_dagster.geometry import Box, Size, Space, Viewport, smart_resize
from coepg_dagster.inference.files import IncompleteCheckpoint
from coepg_dagster.pictures import MAX_PIXELS, BadPicture, picture
from coepg_dagster.refusal import Refusal


def resize_of(processor: Any) -> tuple[int, int, int]:
    """(factor, min_pixels, max_pixels) of a processor, for `geometry.smart_resize`. Raises IncompleteCheckpoint."""
    images = processor.image_processor
    low, high = (images.size[edge] for edge in ("shortest_edge", "longest_edge"))
    numbers = images.patch_size, images.merge_size, low, high
    if not all(type(number) is int and 0 < number <= MAX_PIXELS for number in numbers) or low > high:
        raise IncompleteCheckpoint(
            f"the image processor has patches of {images.patch_size} px, {images.merge_size} to a side, for {low} to {high} px: "
            "these must be whole numbers above 0, in order; copy its files from the model that this one was made from"
        )
    return images.patch_size * images.merge_size, low, high


def visual_tokens(processor: Any, image: Image.Image) -> int:
    """The number of tokens of a resized image. Raises ValueError if the model would resize it again."""
    factor, low, high = resize_of(processor)
    size = Size(*image.size)
    if smart_resize(size, factor=factor, min_pixels=low, max_pixels=high) != size:
        raise ValueError(f"the model would resize an image of {size}: resize it with `geometry.smart_resize` first")
    return size.width * size.height // factor**2


class UnreadableScreenshot(Refusal, ValueError):
    """A screenshot that cannot be decoded; the message names the step."""


def decode(step_id: str, encoded: bytes) -> Image.Image:
    """The screenshot as viewers show it (see `pictures`), RGB. Raises UnreadableScreenshot."""
    try:
        return picture(encoded).convert("RGB")
    except BadPicture as error:
        raise UnreadableScreenshot(f"step {step_id}: the screenshot cannot be decoded: {error}") from error


def _refuse(*_: object) -> None:
    raise TypeError("screens are not copied: make them where they are needed, from the step table")


class Screens:
    """Images and target boxes of the steps of a table (STEP_SCHEMA), for models with one kind of resize.

    Args:
        resize: (factor, min_pixels, max_pixels) of the model's image processor.
        cached_bytes: bytes of decoded images that are kept, the newest ones.
    """

    def __init__(self, steps: pa.Table, resize: tuple[int, int, int], cached_bytes: int = 1 << 29) -> None:
        self._rows = {step_id: row for row, step_id in enumerate(steps["step_id"].to_pylist())}
        self._encoded = steps["screenshot"]
        self._boxes = steps["boxes"].to_pylist()
        self._sizes = list(zip(steps["width"].to_pylist(), steps["height"].to_pylist(), strict=True))
        self._resize, self._room = resize, cached_bytes
        self._images: OrderedDict[str, Image.Image] = OrderedDict()
        self._lock = threading.Lock()  # grounders that work at the same time share screens

    def __reduce__(self) -> tuple[object, ...]:
        """Screens are never sent to another process. `datasets` pickles them only to hash them, without any screenshot."""
        return _refuse, (len(self._rows), self._resize)

    def viewport(self, step_id: str) -> Viewport:
        """Original and resized size of a step's screenshot, px. Raises UnreadableScreenshot if it cannot be resized."""
        factor, low, high = self._resize
        try:
            original = Size(*self._sizes[self._rows[step_id]])
            return Viewport(original, smart_resize(original, factor=factor, min_pixels=low, max_pixels=high))
        except ValueError as error:
            raise UnreadableScreenshot(f"step {step_id}: {error}") from error

    def image(self, step_id: str) -> Image.Image:
        """The screenshot of a step, RGB, resized for the model. Raises UnreadableScreenshot."""
        with self._lock:
            return self._image(step_id)

    def _image(self, step_id: str) -> Image.Image:
        if step_id in self._images:
            self._images.move_to_end(step_id)
            return self._images[step_id]
        image = decode(step_id, self._encoded[self._rows[step_id]].as_py())
        viewport = self.viewport(step_id)
        if image.size != (viewport.original.width, viewport.original.height):
            raise UnreadableScreenshot(
                f"step {step_id}: the image is {image.size} px, its row says {viewport.original}"
            )
        target = (viewport.resized.width, viewport.resized.height)
        if image.size != target:
            image = image.resize(target, Image.Resampling.BICUBIC)
        self._images[step_id] = image
        self._room -= image.width * image.height * 3
        while self._room < 0 and len(self._images) > 1:
            _, old = self._images.popitem(last=False)
            self._room += old.width * old.height * 3
        return image

    def boxes(self, step_id: str) -> list[Box]:
        """The target boxes of a step, in pixels of the stored screenshot; empty: the action has no target."""
        return [Box(x1, y1, x2, y2, Space.ORIGINAL) for x1, y1, x2, y2 in self._boxes[self._rows[step_id]]]
