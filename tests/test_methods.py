"""docs/methods.md and `coepg plugins` say the same, and each plug-in's overlay is an experiment."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coepg_dagster.cli import app
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.versions import CODE, code_version
from coepg_dagster.project import Project

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "methods.md").read_text("utf-8")
STRATEGIES = PAGE.partition("## Curation and inference\n")[2].partition("\n## ")[0]
SYSTEMS = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]*)\| ([^|]*)\|$", PAGE, re.MULTILINE)
OVERLAYS = sorted((REPOSITORY / "experiments" / "plugins").glob("*.yaml"))
MINE = ("data", "inference")
NAME = re.compile(r"`((?:reward|combiner|advantage|policy_loss|data|inference|check)/[a-z0-9_]+)`")


@pytest.fixture(scope="module")
def listed() -> dict[str, str]:
    """kind/name → status."""
    shown = CliRunner().invoke(app, ["plugins", "--json"])
    assert shown.exit_code == 0
    rows: list[dict[str, Any]] = json.loads(shown.stdout)
    assert all(set(row) == {"kind", "name", "source", "status"} and row["source"] for row in rows)
    names = [f"{row['kind']}/{row['name']}" for row in rows]
    assert len(set(names)) == len(names)
    return {name: row["status"] for name, row in zip(names, rows, strict=True)}


def test_every_system_of_the_table_has_its_row() -> None:
    assert [int(number) for number, *_ in SYSTEMS] == list(range(1, 69))


@pytest.mark.parametrize(("number", "system", "status", "where", "note"), SYSTEMS, ids=[row[0] for row in SYSTEMS])
def test_a_row_says_what_is_there(
    number: str, system: str, status: str, where: str, note: str, listed: dict[str, str]
) -> None:
    names, places = NAME.findall(where), re.findall(r"`([\w/]+\.py)`", where)
    assert set(names) <= set(listed) and all((REPOSITORY / place).is_file() for place in places)
    there = {listed[name] == "built" for name in names} | ({True} if places else set())
    expected = {frozenset(): "not applicable", frozenset({True}): "built", frozenset({False}): "planned"}
    assert status == expected.get(frozenset(there), "partly built")
    assert status != "not applicable" or note.strip(), "a reason"


def test_the_page_has_every_plugin_and_knows_all_that_it_names(listed: dict[str, str]) -> None:
    on_page = set(NAME.findall(PAGE))
    assert on_page <= set(listed)
    assert {name for name in listed if name.split("/")[0] in MINE} <= on_page
    table = re.findall(r"^\| `((?:data|inference)/\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(table) == sorted(n for n, status in listed.items() if status == "built" and n.split("/")[0] in MINE)


def test_every_plugin_has_an_overlay_that_differs_by_it(listed: dict[str, str]) -> None:
    sandbox = load_experiment(REPOSITORY / "experiments" / "sandbox.yaml")
    files = {path.stem: path for path in OVERLAYS}
    for kind, name in (n.split("/") for n, status in listed.items() if status == "built" and n.split("/")[0] in MINE):
        overlay = load_experiment(files[name])
        named = overlay.sft.curation | overlay.grpo.curation if kind == "data" else overlay.evaluation.inference
        assert set(named) == {name} and overlay.table == "sandbox" and overlay.variant == name
        assert any(code_version(overlay, asset) != code_version(sandbox, asset) for asset in CODE)


def test_overlays_of_plugins_are_not_in_the_default_workspace() -> None:
    assert not {path.stem for path in OVERLAYS} & set(Project(REPOSITORY).experiments())


def test_the_example_of_the_page_is_an_experiment(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", STRATEGIES, re.DOTALL)
    shutil.copy(REPOSITORY / "experiments" / "sandbox.yaml", tmp_path)
    (tmp_path / "mine.yaml").write_text(example)
    experiment = load_experiment(tmp_path / "mine.yaml")
    assert list(experiment.sft.curation) == ["seed_rules", "pass_rate"]
    assert experiment.evaluation.inference["region_vote"]["temperature"] == 0.5


def test_a_plugin_of_ones_own_is_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of the page: named in a file, and applied."""
    from coepg_dagster import plugins
    from coepg_dagster.strategies.curation import Rows, curate
    from tests.strategies.test_curation import rows

    monkeypatch.setattr(plugins, "_known", dict(plugins._known))
    [source] = re.findall(r"```python\n(.*?)```", STRATEGIES, re.DOTALL)
    (tmp_path / "theirs.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("theirs")
    shutil.copy(REPOSITORY / "experiments" / "sandbox.yaml", tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "description: x\nparent: sandbox\nsft: {curation: {short_plans: {words: 2}, curriculum: {}}}\n"
    )
    experiment = load_experiment(tmp_path / "mine.yaml")
    items: Rows = rows("press OK", "press the OK button")
    assert curate(items, experiment.sft.curation).left_out == {1: ("short_plans", "long_plan")}
