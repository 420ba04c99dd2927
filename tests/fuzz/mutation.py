"""Changes of JSON texts: another value in some place. Changes of bytes alone seldom give JSON again."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any, Final

STRANGE: Final = (
    "null", "true", "{}", "[]", '""', "0", "-1", "1.5", "1e999", "-1e999", "NaN", "1e300", "9" * 400, "9" * 5000, "2147483648",
    "9223372036854775808", '"\\ud800"', '"\\u0000"', '"\\u202e"', '"<|image_pad|>"', '"<img src=x onerror=alert(1)>"',
    '"../../x"', '"/etc/passwd"', '"²"', '"٣"', '"None"', '"(5, 5)"', '"(1e999, 5)"', "[5, 5]", "[0, 0, 9, 9]", "[[0, 0, 9, 9]]",
    "[" * 300 + "]" * 300, '{"x": 1}', '"' + "x" * 300 + '"',
)  # fmt: skip
"""Values that a reader may not expect, as JSON."""
_HERE: Final = "@here@"


def changed(text: str, rng: random.Random) -> str:
    """`text` with another value in one to three places of one of its lines.

    As it is where that line is no JSON, or nested too deeply.
    """
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    with contextlib.suppress(ValueError, RecursionError):  # no JSON, or nested too deeply to be walked through
        for _ in range(rng.randint(1, 3)):
            value = json.loads(lines[at])
            places = list(_places(value))
            outer, key = rng.choice(places) if places else (None, None)
            action = rng.random()
            if outer is None:
                lines[at] = rng.choice(STRANGE)
            elif action < 0.1:
                del outer[key]
                lines[at] = json.dumps(value)
            elif action < 0.2 and len(places) > 1:
                other, of = rng.choice(places)
                outer[key] = json.loads(json.dumps(other[of]))
                lines[at] = json.dumps(value)
            else:
                outer[key] = _HERE
                lines[at] = json.dumps(value).replace(f'"{_HERE}"', rng.choice(STRANGE))
    if rng.random() < 0.1:
        lines.insert(at, lines[at])
    return "\n".join(lines)


def _places(value: Any) -> Any:
    """(container, key) of each value within `value`."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)
