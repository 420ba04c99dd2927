"""Screenshots: decoded safely, resized once."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coepg_dagster.geometry import Box, Point, Space
from coepg_dagster.inference.screens import Screens, UnreadableScreenshot
from tests.conftest import step, step_table

RESIZE = (28, 3136, 50176)


def encoded(width: int, height: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.effect_noise((width, height), 50).convert(mode).save(out, kind)
    return out.getvalue()


WHOLE = encoded(84, 112)


def screens(width: int, height: int, screenshot: bytes, **more: Any) -> Screens:
    return Screens(step_table(step("web-17", width=width, height=height, screenshot=screenshot)), RESIZE, **more)


def test_a_screen_is_resized_once_to_what_the_model_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda self, *a, **k: calls.append(a) or resize(self, *a, **k))
    seen = screens(500, 333, encoded(500, 333))
    image = seen.image("web-17")
    view = seen.viewport("web-17")
    assert image.size == (view.resized.width, view.resized.height)
    assert image.width % 28 == image.height % 28 == 0
    assert seen.image("web-17") is image
    assert len(calls) == 1


def test_a_screen_of_the_right_size_is_left_as_it_is() -> None:
    stored = Image.open(io.BytesIO(WHOLE))
    assert np.array_equal(np.asarray(screens(84, 112, WHOLE).image("web-17")), np.asarray(stored))


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "P"), ("PNG", "L"), ("PNG", "RGBA"), ("JPEG", "RGB"), ("WEBP", "RGB")]
)
def test_every_common_encoding_becomes_rgb(kind: str, mode: str) -> None:
    assert screens(84, 112, encoded(84, 112, kind, mode)).image("web-17").mode == "RGB"


def test_points_go_from_the_models_pixels_to_the_screenshots() -> None:
    seen = screens(500, 333, b"")
    view = seen.viewport("web-17")
    corner = view.point(Point(view.resized.width, view.resized.height, Space.RESIZED), Space.ORIGINAL)
    assert (corner.x, corner.y) == pytest.approx((500, 333))


def test_boxes_are_those_of_the_row() -> None:
    assert screens(84, 112, b"").boxes("web-17") == [Box(10, 10, 20, 20, Space.ORIGINAL)]


def test_the_cache_keeps_the_newest() -> None:
    rows = [step(f"s{i}", screenshot=encoded(84, 112)) for i in range(3)]
    seen = Screens(step_table(*rows), RESIZE, cached_bytes=2 * 84 * 112 * 3)
    first, second = seen.image("s0"), seen.image("s1")
    seen.image("s2")
    assert seen.image("s1") is second
    assert seen.image("s0") is not first


def bomb() -> bytes:
    """A PNG of 60000 x 60000 px in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def text_bomb() -> bytes:
    """A PNG whose comment unpacks to megabytes, which Pillow answers with a bare ValueError."""
    data = b"comment\0\0" + zlib.compress(b"x" * 20_000_000)
    chunk = struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
    return WHOLE[:33] + chunk + WHOLE[33:]


@pytest.mark.parametrize(
    "screenshot",
    [
        b"",
        b"no image",
        WHOLE[: len(WHOLE) // 2],
        encoded(84, 112, "JPEG")[:700],
        WHOLE[:40] + bytes(100) + WHOLE[140:],
        encoded(84, 112, "GIF", "P"),
        encoded(84, 112, "TIFF"),
        bomb(),
        text_bomb(),
        encoded(84, 113),
    ],
    ids=["empty", "text", "half_png", "half_jpeg", "damaged", "gif", "tiff", "bomb", "text_bomb", "other_size"],
)
def test_what_cannot_be_decoded_names_its_step(screenshot: bytes) -> None:
    with pytest.raises(UnreadableScreenshot, match="step web-17: "):
        screens(84, 112, screenshot).image("web-17")


@pytest.mark.parametrize(("width", "height"), [(0, 10), (20100, 100)])
def test_a_size_that_no_model_can_see_names_its_step(width: int, height: int) -> None:
    with pytest.raises(UnreadableScreenshot, match="step web-17: "):
        screens(width, height, b"").viewport("web-17")


def test_screens_are_hashed_without_their_screenshots_and_not_copied() -> None:
    stored = pickle.dumps(screens(500, 333, encoded(500, 333)))
    assert len(stored) < 500
    with pytest.raises(TypeError, match="make them where they are needed"):
        pickle.loads(stored)  # noqa: S301
