"""A tab of real Chromium that opens pages as files, without network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chromium import ARGUMENTS, CHROMIUM


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    """A Playwright page; errors of a page's scripts fail the test that opened it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright (extra `dev`)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1400, "height": 900}, offline=True)
        page.set_default_timeout(30_000)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        yield page
        browser.close()
        assert not errors
