"""Plug-ins are found by kind and name; two of one name, and none of a name, are refused."""

from __future__ import annotations

import pytest

from coepg_dagster import plugins
from coepg_dagster.plugins import NoPlugin, find, plugin


@pytest.fixture(autouse=True)
def _own_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_known", {})


def test_a_decorated_function_is_found_with_its_settings() -> None:
    @plugin("reward", "a paper")
    def half(points: list[float], *, share: float = 0.5) -> float:
        return share * len(points)

    found = find("reward", "half")
    assert found.function is half and found.source == "a paper" and found.settings == {"share": (float, 0.5)}
    assert plugins.plugins() == [found]


def test_a_name_is_unique_within_its_kind() -> None:
    @plugin("reward", "a paper", name="one")
    def first() -> float:
        return 1.0

    with pytest.raises(NoPlugin, match="two plug-ins are the reward 'one'"):

        @plugin("reward", "another paper", name="one")
        def second() -> float:
            return 2.0

    plugin("advantage", "a paper", name="one")(first)
    with pytest.raises(NoPlugin, match="no reward 'none'; known: one"):
        find("reward", "none")
    with pytest.raises(NoPlugin, match="no data 'x'; known: none"):
        find("data", "x")
