"""JSON that other programs wrote, and JSON lines: UTF-8, with or without a byte order mark.

A line ends at a line feed and nowhere else: `str.splitlines` and text files also break at U+2028, U+0085 or a carriage return,
all of which may stand within JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any, Final

MAX_LINE: Final = 1 << 26
"""Bytes that a line may have; of a longer one no more is read."""
_MARK: Final = b"\xef\xbb\xbf"
_INT64_DIGITS: Final = 19


class NotJson(ValueError):
    """Text that is no JSON; the message says why."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises NotJson.

    A whole number of more digits than 64 bits hold is read as a float, infinite where it must be, so that it is refused where
    it stands and does not spoil its document.
    """
    try:
        if isinstance(text, bytes):
            if len(text) > MAX_LINE:
                raise NotJson(f"longer than {MAX_LINE:,} bytes")
            text = text.decode("utf-8")
        return _DECODER.decode(text.removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise NotJson(f"not UTF-8 text ({error}): save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise NotJson(f"invalid JSON ({error})") from error
    except RecursionError as error:
        raise NotJson("nested too deeply") from error


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits.lstrip("-")) <= _INT64_DIGITS else float(digits)


_DECODER: Final = json.JSONDecoder(parse_int=_whole)


def lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number from 0, content) of each line of a JSON-lines file that is not blank, for `parse`."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        rest = line
        while len(rest) > MAX_LINE and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE + 1)
        if line.removeprefix(_MARK).strip():
            yield number, line
        number += 1
