"""docs/methods.md, the section on rewards: a reward of one's own is one function, found by its entry point; the examples load."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coepg_dagster import plugins
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.plugins import NoPlugin, find, load_entry_points
from coepg_dagster.rewards.answers import Answers
from tests.project import REPOSITORY

SECTION = (REPOSITORY / "docs" / "methods.md").read_text("utf-8").partition("## Rewards and objectives\n")[2]
SECTION = SECTION.partition("\n## ")[0]
COMBINED, OVERLAYS, OWN = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the page's function, as pip installs it."""
    [source] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    (tmp_path / "their_rewards.py").write_text(source)
    info = tmp_path / "their_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[coepg_dagster.plugins]\ntheirs = their_rewards\n")
    monkeypatch.setattr(plugins, "_known", dict(plugins._known))
    monkeypatch.syspath_prepend(tmp_path)
    load_entry_points.cache_clear()
    yield
    load_entry_points.cache_clear()
    sys.modules.pop("their_rewards", None)


def experiment(folder: Path, text: str) -> Experiment:
    """A file in a copy of the shipped experiments."""
    shutil.copytree(REPOSITORY / "experiments", folder / "experiments", dirs_exist_ok=True)
    (folder / "experiments" / "mine.yaml").write_text(text)
    return load_experiment(folder / "experiments" / "mine.yaml")


@pytest.mark.usefixtures("installed")
def test_a_reward_of_ones_own_is_one_function(tmp_path: Path) -> None:
    grpo = experiment(tmp_path, OWN).grpo
    assert grpo.terms == {"short_plan": {"name": "short_plan", "weight": 0.1, "words": 8}}
    answers = Answers(np.full((3, 4), np.nan), np.zeros((0, 4)), (1.0, 1.0), plans=["click OK", "", "a " * 9])
    assert grpo.composite.term_scores(answers)["short_plan"].tolist() == [1, 0, 0]


def test_without_the_package_there_is_no_such_reward() -> None:
    with pytest.raises(NoPlugin, match="there is no reward 'short_plan'"):
        find("reward", "short_plan")


def test_the_examples_of_the_page_are_experiments(tmp_path: Path) -> None:
    combined = experiment(tmp_path, COMBINED).grpo
    assert combined.point_score == {"name": "gui_g2", "alpha": 0.25} and [a["name"] for a in combined.advantage] == [
        "rloo",
        "sngs",
    ]
    both = experiment(tmp_path, OVERLAYS).grpo
    assert both.point_score == {"name": "se_gui"} and [a["name"] for a in both.advantage] == ["sngs"]


def test_each_plugin_has_a_row_and_each_row_an_overlay() -> None:
    kinds = ("reward", "combiner", "advantage", "policy_loss")
    shipped = {f"{one.kind}/{one.name}" for one in plugins.plugins() if one.kind in kinds}
    rows = [line for line in SECTION.splitlines() if line.startswith("| `") and line.count("|") == 7]
    named = {name for row in rows for name in re.findall(r"`((?:reward|combiner|advantage|policy_loss)/\w+)`", row)}
    assert named == shipped
    files = {path.stem for path in (REPOSITORY / "experiments" / "plugins").glob("*.yaml")}
    overlays = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[5])}
    assert overlays <= files
