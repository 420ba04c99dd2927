"""The worked examples in the docstrings give the numbers that they show."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from coepg_dagster.rewards import calibration, cdrem, estimators, losses, terms, variants


@pytest.mark.parametrize("module", [calibration, cdrem, estimators, losses, terms, variants])
def test_examples_give_what_they_show(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted
    assert not failed
