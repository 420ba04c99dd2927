"""What an encoded picture shows: the pixels of a browser on a white page, for everything that looks at a screenshot.

1. Formats are PNG, JPEG and WebP, with one picture; of a JPEG with previews (MPO) it is the first. A moving picture shows no
   single state of a screen and is refused.
2. Transparent pixels are laid over white.
3. Sixteen bits a channel become their upper eight; CMYK becomes RGB.
4. The EXIF orientation turns the picture, so its width and height are those after turning.
5. Colour profiles and gamma are not applied: models' own processors do not apply them either.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Final

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

FORMATS: Final = ("PNG", "JPEG", "WEBP")
MAX_PIXELS: Final = 50_000_000
"""Larger pictures are refused before they are decoded. Mind2Web's largest pages have about 40 million pixels."""
MAX_SCANS: Final = 100
"""Scans of a progressive JPEG, which usually has ten. Each costs time for all pixels, and may take a few bytes of the file."""
_SCAN: Final = b"\xff\xda"
LFS_POINTER: Final = b"version https://git-lfs"
"""How the file begins that git-lfs leaves in place of another one."""
_DAMAGED: Final = (
    *(OSError, EOFError, SyntaxError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(AssertionError, RuntimeError, struct.error, zlib.error),
)
"""What Pillow raises on damaged files."""
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_GREY_STEP: Final = {"1": 255, "L;2": 85, "L;4": 17}
"""Pillow spreads greys of fewer than eight bits over 0..255; the transparent grey stays as the file says it."""


class BadPicture(ValueError):
    """A picture that cannot be decoded, or shows nothing definite."""


class TooManyPixels(BadPicture):
    """A picture of more than MAX_PIXELS."""


def picture(encoded: bytes) -> Image.Image:
    """The picture of a file, decoded. Raises BadPicture.

    One whose pixels are shown as they are stored, as nearly all screenshots, is Pillow's own image with its mode and `format`:
    `convert("RGB")` changes nothing that is seen. Any other one is RGB without a `format`: its file must be encoded anew where
    others would show it otherwise.
    """
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise TooManyPixels(f"{image.width} x {image.height} px; at most {MAX_PIXELS} are decoded")
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            raise BadPicture("a moving picture, which shows no single state of a screen")
        if image.format in ("JPEG", "MPO") and encoded.count(_SCAN) > MAX_SCANS:
            raise BadPicture(f"a JPEG of more than {MAX_SCANS} scans")
        stored_as = str(image.tile[0].args) if image.tile else ""
        image.load()
        return _turned(_on_white(image, stored_as), image)
    except BadPicture:
        raise
    except Image.DecompressionBombError as error:
        raise TooManyPixels(str(error)) from error
    except UnidentifiedImageError as error:  # its text holds an address in memory
        if encoded.startswith(LFS_POINTER):
            raise BadPicture("a git-lfs pointer in place of the picture: run `git lfs pull`") from error
        why = f"no PNG, JPEG or WebP, or a damaged one (it begins with {encoded[:8]!r}): save it as one of these"
        raise BadPicture(why) from error
    except _DAMAGED as error:
        raise BadPicture(str(error)) from error


def _on_white(image: Image.Image, stored_as: str) -> Image.Image:
    """`image` itself where it is opaque and no deeper than eight bits of grey or RGB."""
    colour = image.info.get("transparency")
    if image.mode == "I;16" or (colour is not None and image.mode in ("1", "L")):
        grey = np.asarray(image)
        shown = (grey >> 8).astype(np.uint8) if image.mode == "I;16" else np.asarray(image.convert("L"))
        if colour is not None:
            clear = np.asarray(image.convert("L")) if image.mode == "1" else grey
            shown = np.where(clear == colour * _GREY_STEP.get(stored_as, 1), np.uint8(255), shown)
        return Image.fromarray(shown).convert("RGB")
    if colour is not None and stored_as == "RGB;16B":
        raise BadPicture("sixteen bits with one transparent colour, which cannot be distinguished from its neighbours")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        if layer.getchannel("A").getextrema() == (255, 255):
            image.info.pop("transparency", None)
            return image
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), layer).convert("RGB")
    return image.convert("RGB") if image.mode == "CMYK" else image


def _turned(shown: Image.Image, image: Image.Image) -> Image.Image:
    """`shown` as the orientation in the EXIF data of `image` says; data that cannot be read says nothing, as in browsers."""
    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        turn = _TURNS.get(exif.get(ExifTags.Base.Orientation, 1))
    except _DAMAGED:
        return shown
    return shown if turn is None else shown.convert("RGB").transpose(turn)
