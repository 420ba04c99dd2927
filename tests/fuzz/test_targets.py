"""The targets of `make fuzz` without atheris: on their seeds, on changed seeds, and on what fuzzing found."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.mutation import changed
from tests.fuzz.targets import TARGETS

FINDINGS = {
    # half a surrogate pair in the id of a grounding log
    "predictions": [
        b'\x1e\x01{"bbox": [0, 0, 9, 9], "pred": [5, 5], "id": "\\ud800", "group": "CAD", "ui_type": "text"}'
    ],
}
"""Target → inputs on which it once failed, made small."""


@pytest.mark.parametrize("name", list(TARGETS))
def test_seeds_changed_seeds_and_findings(name: str) -> None:
    target, rng = TARGETS[name], random.Random(name)
    seeds = list(target.seeds())
    for seed in [*seeds, *FINDINGS.get(name, [])]:
        target.run(seed)
    head = 0 if name == "mark" else 2 if name == "predictions" else 1
    for _ in range(30):
        seed = rng.choice(seeds)
        if target.json:
            seed = seed[:head] + changed(seed[head:].decode(), rng).encode(errors="replace")
        else:
            at = rng.randrange(len(seed))
            seed = seed[:at] + rng.randbytes(rng.randint(0, 3)) + seed[at + rng.randint(0, 3) :]
        target.run(seed)


def test_a_line_that_is_nested_too_deeply_is_left_as_it_is() -> None:
    """The mutator must not raise: libFuzzer would end there."""
    deep = "[" * 1200 + "]" * 1200  # json reads it since Python 3.12, whose code cannot walk through it
    for seed in range(20):
        assert changed(deep, random.Random(seed)).startswith(deep)
