"""Pictures as a browser shows them: every kind of PNG, orientations, CMYK, and what shows nothing definite."""

from __future__ import annotations

import contextlib
import io
import random
import tracemalloc
import zlib
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from coepg_dagster.inference.screens import decode
from coepg_dagster.pictures import BadPicture, TooManyPixels, picture
from coepg_dagster.readers.images import opened, prepared
from coepg_dagster.readers.rows import RejectedRow
from coepg_dagster.reports.html import image_type

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
KINDS = [(colour, depth) for colour, depths in DEPTHS.items() for depth in depths]
SIZE = (9, 5)


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


def png(samples: np.ndarray[Any, Any], colour: int, depth: int, *more: bytes) -> bytes:
    """A PNG of `samples` (height, width, channels), written by the specification and not by Pillow."""
    height, width, channels = samples.shape
    bits = (samples.reshape(height, width * channels, 1) >> np.arange(depth - 1, -1, -1)) & 1
    rows = np.packbits(bits.reshape(height, -1).astype(np.uint8), axis=1)
    header = width.to_bytes(4) + height.to_bytes(4) + bytes([depth, colour, 0, 0, 0])
    content = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), *more, chunk(b"IDAT", content), chunk(b"IEND", b"")]
    )


def eight(samples: np.ndarray[Any, Any], depth: int) -> np.ndarray[Any, Any]:
    return samples >> 8 if depth == 16 else samples * 255 // (2**depth - 1)


def on_white(rgb: np.ndarray[Any, Any], alpha: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(rgb * (alpha / 255) + 255 * (1 - alpha / 255))


@pytest.mark.parametrize(("colour", "depth"), KINDS)
@pytest.mark.parametrize("clear", [False, True], ids=["", "with a transparent colour"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8)
def test_every_kind_of_png_is_seen_on_white(colour: int, depth: int, clear: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = rng.integers(0, 2**depth, (*SIZE[::-1], CHANNELS[colour]), dtype=np.int64)
    more, alpha = [], np.full((*SIZE[::-1], 1), 255)
    rgb = eight(samples[..., :3], depth) if colour in (2, 6) else eight(samples[..., :1], depth).repeat(3, 2)
    if colour == 3:
        palette, weights = rng.integers(0, 256, (2**depth, 3)), rng.integers(0, 256, 2**depth)
        rgb = palette[samples[..., 0]]
        more = [chunk(b"PLTE", palette.astype(np.uint8).tobytes())]
        if clear:
            more.append(chunk(b"tRNS", weights.astype(np.uint8).tobytes()))
            alpha = weights[samples]
    elif colour in (4, 6):
        alpha = eight(samples[..., -1:], depth)
    elif clear:
        one = samples[0, 0]
        more = [chunk(b"tRNS", b"".join(int(v).to_bytes(2) for v in one))]
        alpha = np.where((samples == one).all(2, keepdims=True), 0, 255)
    encoded = png(samples, colour, depth, *more)
    if (colour, depth, clear) == (2, 16, True):  # Pillow keeps eight of the bits that are compared
        with pytest.raises(BadPicture, match="transparent colour"):
            picture(encoded)
        return
    seen = np.asarray(decode("s", encoded)).astype(float)
    assert seen.shape == (*SIZE[::-1], 3)
    assert np.abs(seen - on_white(rgb, alpha)).max() <= 1


def encoded(image: Image.Image, kind: str, **more: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def marked() -> Image.Image:
    image = Image.new("RGB", (48, 32), "white")
    image.paste("black", (0, 0, 16, 8))
    return image


@pytest.mark.parametrize(("kind", "turn"), list(product(("PNG", "JPEG", "WEBP"), range(1, 9))))
def test_an_orientation_turns_the_picture_and_boxes_are_on_what_is_shown(kind: str, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    source = encoded(marked(), kind, exif=exif.tobytes(), quality=95)
    shown = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(source))).convert("RGB"))
    assert np.array_equal(np.asarray(decode("s", source)), shown)
    image = opened(source)
    ready = prepared(image, source, boxes=[(0.0, 0.0, 8.0, 8.0)])
    assert ready.size == image.size == ((32, 48) if turn >= 5 else (48, 32))
    assert (ready.screenshot == source) == (turn == 1)
    stored = Image.open(io.BytesIO(ready.screenshot))  # by a program that knows no orientation
    assert stored.size == ready.size and np.array_equal(np.asarray(stored.convert("RGB")), shown)


def test_other_modes() -> None:
    cmyk = decode("s", encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(np.asarray(cmyk, dtype=int) - (255, 0, 0)).max() < 8
    half = decode("s", encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "WEBP", lossless=True))
    assert set(half.get_flattened_data()) == {(127, 127, 127)}
    first = encoded(marked(), "MPO", save_all=True, append_images=[Image.new("RGB", (48, 32), "red")])
    assert decode("s", first).getpixel((40, 24)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_moving_picture_shows_no_single_state(kind: str) -> None:
    moving = encoded(marked(), kind, save_all=True, append_images=[Image.new("RGB", (48, 32), "red")])
    with pytest.raises(BadPicture, match="moving"):
        picture(moving)
    with pytest.raises(RejectedRow, match="bad_image"):
        opened(moving)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "LA"])
def test_an_opaque_picture_keeps_its_bytes(mode: str) -> None:
    source = encoded(marked().convert(mode), "PNG")
    assert prepared(opened(source), source).screenshot == source


def test_a_transparent_picture_is_stored_as_it_is_shown() -> None:
    image = marked().convert("RGBA")
    image.putalpha(100)
    source = encoded(image, "PNG")
    ready = prepared(opened(source), source)
    stored = Image.open(io.BytesIO(ready.screenshot))
    assert stored.mode == "RGB" and np.array_equal(np.asarray(stored), np.asarray(decode("s", source)))
    part = prepared(opened(source), source, view=(0, 0, 24, 24))
    assert np.array_equal(np.asarray(decode("s", part.screenshot)), np.asarray(stored)[:24, :24])


SAMPLES = [
    encoded(marked().convert(mode), kind, **more)
    for mode, kind in [("RGB", "PNG"), ("P", "PNG"), ("LA", "PNG"), ("RGB", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "WEBP")]
    for more in ({}, {"exif": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"})
]


@given(st.sampled_from(SAMPLES), st.randoms(use_true_random=False))
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_refused_or_shown_and_nothing_else(sample: bytes, rng: random.Random) -> None:
    content = bytearray(sample)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content))
        content[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    try:
        picture(bytes(content)).convert("RGB")
    except BadPicture as error:
        assert " at 0x" not in str(error)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((encoded(marked(), kind), rf"no PNG, JPEG or WebP, .*begins with b'{kind[:2]}") for kind in ("GIF", "BMP")),
        (encoded(marked(), "TIFF"), "no PNG, JPEG or WebP, .*begins with b'II"),
        (b"<!DOCTYPE html><title>404</title>", "no PNG, JPEG or WebP, .*begins with b'<!DOCTYP'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "run `git lfs pull`"),
        (b"\x89PNG\r\n\x1a\n", "or a damaged one"),
    ],
)
def test_a_file_of_another_format_is_named_by_its_start(content: bytes, why: str) -> None:
    with pytest.raises(RejectedRow, match=rf"^bad_image: .*{why}") as refused:
        opened(content)
    assert " at 0x" not in str(refused.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pages_name_the_type_of_a_stored_screenshot(kind: str) -> None:
    assert image_type(encoded(marked(), kind)[:4]) == kind.lower()


def test_too_many_pixels_are_not_decoded() -> None:
    header = (60000).to_bytes(4) * 2 + bytes([8, 2, 0, 0, 0])
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
    with pytest.raises(TooManyPixels):
        picture(bomb + chunk(b"IEND", b""))


def test_a_jpeg_of_endless_scans_is_not_decoded() -> None:
    """Each scan costs time for every pixel and takes some hundred bytes."""
    content = encoded(marked().resize((900, 900)), "JPEG", progressive=True)
    scan = content[content.rindex(b"\xff\xda") : -2]
    picture(content)
    for kind in (b"", b"Exif\0\0"):
        bomb = content[:2] + (b"\xff\xe1\0\x08" + kind if kind else b"") + content[2:-2] + 200 * scan + b"\xff\xd9"
        with pytest.raises(BadPicture, match="more than 100 scans"):
            picture(bomb)


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_texts_and_profiles_that_unpack_to_much_more_are_refused(kind: bytes) -> None:
    packed = zlib.compress(bytes(1 << 27), 9)
    text = {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0"}[kind]
    plain = encoded(marked(), "PNG")
    at = plain.index(b"IDAT") - 4
    tracemalloc.start()
    with contextlib.suppress(BadPicture):
        picture(plain[:at] + chunk(kind, text + packed) + plain[at:])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 * len(text + packed) + (1 << 24)
