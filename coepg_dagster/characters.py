"""One form for characters that look the same: for values that are compared, and for answers that are read.

The rule: format characters without width are dropped; full-width forms of ASCII become ASCII; every blank of Unicode
becomes a space; typographic quotes, hyphens and the minus sign become " ' and -; then NFC. Nothing else is changed:
NFKC would also make "x²" "x2" and "½" "1⁄2". Stored texts stay as they were generated.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console


def _each(characters: str, written: str) -> dict[int, str]:
    return {ord(character): written for character in characters}


SAME: Final[dict[int, str]] = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full-width "!" to "~"
    **_each("\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))), " "),
    **_each("‘’‚‛", "'"),
    **_each("“”„‟", '"'),
    **_each("\u2010\u2011\u2212", "-"),  # hyphen, non-breaking hyphen, minus
}
"""Character → the ASCII character that it counts as."""

WITHOUT_WIDTH: Final = frozenset(
    "\xad\u034f\u061c\u180e\ufeff\ufe0e\ufe0f"
    + "".join(map(chr, (*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070))))
)
"""Soft hyphen, zero-width blanks and joiners, marks of direction, byte order mark, variation selectors."""

_NORMAL: Final = SAME | dict.fromkeys(map(ord, WITHOUT_WIDTH))


def normal_text(text: str) -> str:
    """`text` by the rule above: two texts that look the same are equal. Case and blanks in a row are kept."""
    return unicodedata.normalize("NFC", text.translate(_NORMAL))


_STEERING: Final = {
    code: f"⟨U+{code:04X}⟩"
    for code in (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_LINE_ENDS: Final = dict.fromkeys(map(ord, "\n\u2028\u2029"), "⏎")


def visible(text: str, *, one_line: bool = False) -> str:
    """`text` as people can judge it: what steers a terminal or turns the direction of writing is spelt, as in ⟨U+202E⟩.

    Such characters in a plan make it look like another one. `one_line`: line ends become ⏎, so that no text adds a line.
    """
    return text.translate(_STEERING | _LINE_ENDS if one_line else _STEERING)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Prints a line of text as it is: `visible`, and to Rich neither `[/INST]` nor `:smile:` means anything."""
    console.print(visible(text), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
