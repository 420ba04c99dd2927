"""A real Chromium for the tests of this folder; skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

SNAPSHOT = Path(__file__).parents[3] / "data" / "miniwob"


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    pytest.importorskip("selenium")
    pytest.importorskip("miniwob")
    from coepg_dagster.sandbox.miniwob.browser import Browser, BrowserMissing, find_programs

    try:
        find_programs()
    except BrowserMissing as missing:
        pytest.skip(str(missing))
    with Browser() as started:
        yield started
