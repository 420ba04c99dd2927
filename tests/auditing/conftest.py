"""The loop written by hand, fresh for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.auditing.loop import Hand


@pytest.fixture
def hand(tmp_path: Path) -> Hand:
    return Hand(tmp_path).whole()
