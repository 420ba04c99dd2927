"""JSON that other programs wrote, and JSON lines: UTF-8, with or without a byte order mark.

A line ends at a line feed and nowhere else: `str.splitlines` and text files also break at U+2028, U+0085 or a carriage return,
all of which may stand within JSON.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator
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
        text = text.removeprefix("\ufeff").strip(_BLANKS)
        value, end = _DECODER.raw_decode(text)
        if end != len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        return value
    except UnicodeDecodeError as error:
        raise NotJson(f"not UTF-8 text ({error}): save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise NotJson(f"invalid JSON ({error})") from error
    except RecursionError as error:
        raise NotJson("nested too deeply") from error


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits.lstrip("-")) <= _INT64_DIGITS else float(digits)


_DECODER: Final = json.JSONDecoder(parse_int=_whole)
_BLANKS: Final = " \t\n\r"


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


PIECE: Final = 1 << 16
"""Characters of a document that are read at once; more where one value is longer."""


def members(file: IO[bytes], lists: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(path, element) of each list of a JSON document that is named in `lists`, and (path, value) of every other value.

    A path is the names of the objects around, joined by dots; that of a document which is a list itself is "". Objects are
    entered, other lists are values. The document is read in pieces, and memory holds one value at a time; invalid UTF-8 becomes
    lone surrogates. Raises NotJson, after what came before the fault.
    """
    document = _Document(file)
    try:
        match document.next():
            case "[":
                yield from document.elements("")
            case "{":
                yield from document.object("", lists)
            case _:
                raise NotJson("neither an object nor a list")
    except RecursionError as error:
        raise NotJson("nested too deeply") from error
    if document.next():
        raise NotJson("more text after its end")


class _Document:
    """A JSON document, of which a piece is held at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._more()
        self._text = self._text.removeprefix("\ufeff")

    def _more(self, size: int = PIECE) -> None:
        """Reads on; what lies behind is forgotten."""
        piece = self._file.read(size)
        self._ended = not piece
        self._text, self._at = self._text[self._at :] + self._decoder.decode(piece, final=self._ended), 0

    def next(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            self._at = _BLANK.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def _take(self, *wanted: str) -> str:
        found = self.next()
        if found not in wanted:
            raise NotJson(f"invalid JSON ({found or 'the end'!r} where {' or '.join(wanted)} was expected)")
        self._at += 1
        return found

    def _value(self) -> Any:
        size = PIECE
        self.next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise NotJson(f"invalid JSON ({error.msg})") from error
                if len(self._text) - self._at > MAX_LINE:
                    raise NotJson(f"a value is invalid, or longer than {MAX_LINE:,} characters") from error
            else:
                if end < len(self._text) or self._ended:  # a number may go on in the next piece
                    self._at = end
                    return value
            self._more(size)
            size *= 2

    def elements(self, path: str) -> Iterator[tuple[str, Any]]:
        """The elements of the list that comes next, at this path."""
        self._take("[")
        if self.next() == "]":
            self._at += 1
            return
        while True:
            yield path, self._value()
            if self._take(",", "]") == "]":
                return

    def object(self, path: str, lists: Collection[str]) -> Iterator[tuple[str, Any]]:
        """The members of the object that comes next, at this path; see `members`."""
        self._take("{")
        if self.next() == "}":
            self._at += 1
            return
        while True:
            if self.next() != '"':
                raise NotJson("invalid JSON (a member of an object needs a name)")
            name = self._value()
            self._take(":")
            opened, inner = self.next(), f"{path}.{name}" if path else name
            if opened == "[" and name in lists:
                yield from self.elements(inner)
            elif opened == "{":
                yield from self.object(inner, lists)
            else:
                yield inner, self._value()
            if self._take(",", "}") == "}":
                return


_BLANK: Final = re.compile(f"[{_BLANKS}]*")
