"""What a benchmark leaves behind, and that every committed baseline is whole."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import baseline, table
from tests.project import REPOSITORY

FIELDS = {"name", "commit", "device", "command", "value", "unit", "against", "ratio", "repetitions", "log"}
MEASURED = {"command": "python -m x", "value": 6.0, "unit": "rollouts/s", "against": 2.0, "ratio": 3.0}


def test_a_baseline_holds_the_measurement_and_where_it_was_made(tmp_path: Path) -> None:
    (tmp_path / "speed.log").write_text("…")
    file = baseline.write("speed", **MEASURED, repetitions=[5.9, 6.1], folder=tmp_path, against_what="a loop")
    facts = json.loads(file.read_text())
    assert facts.keys() >= FIELDS
    assert {key: facts[key] for key in MEASURED} == MEASURED
    assert (facts["repetitions"], facts["against_what"]) == ([5.9, 6.1], "a loop")
    assert facts["log"].endswith("speed.log")
    assert facts["versions"]["torch"]
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, text=True).strip()
    assert facts["commit"].removesuffix("-dirty") == head


def test_a_copy_without_git_names_its_commit_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(baseline.COMMIT, "abc123")
    assert baseline.commit() == "abc123"


@pytest.mark.parametrize("wrong", [{"value": None}, {"reason": "no GPU"}])
def test_no_value_without_a_reason_and_no_reason_beside_a_value(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the reason why there is none"):
        baseline.write("speed", **MEASURED | wrong, repetitions=[], folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_run_says_why(tmp_path: Path) -> None:
    nothing = {"value": None, "ratio": None, "against": None, "reason": "needs a GPU"}
    facts = json.loads(baseline.write("speed", **MEASURED | nothing, repetitions=[], folder=tmp_path).read_text())
    assert (facts["value"], facts["reason"], facts["log"]) == (None, "needs a GPU", None)


def test_a_number_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        baseline.write("speed", **MEASURED | {"ratio": float("nan")}, repetitions=[], folder=tmp_path)


def test_runs_take_turns() -> None:
    order: list[str] = []

    def run(name: str) -> Any:
        return lambda: float(len(order.append(name) or order))  # type: ignore[func-returns-value]

    assert baseline.interleaved({"a": run("a"), "b": run("b")}, 2) == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


@pytest.mark.parametrize("file", sorted(baseline.FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_every_committed_baseline_is_whole(file: Path) -> None:
    facts = json.loads(file.read_text())
    assert facts.keys() >= FIELDS
    assert facts["name"] == file.stem
    assert facts["commit"]
    assert (facts["value"] is None) == ("reason" in facts)
    if facts["log"]:
        assert (REPOSITORY / facts["log"]).is_file()


def test_the_table_of_baselines_replaces_the_one_before(tmp_path: Path) -> None:
    baseline.write("speed", **MEASURED, repetitions=[], folder=tmp_path, device="a CPU", against_what="a loop")
    nothing = {"value": None, "ratio": None, "against": None, "reason": "needs a GPU"}
    baseline.write("verifier", **MEASURED | nothing, repetitions=[], folder=tmp_path, device="a CPU")
    rows = table.table(tmp_path).splitlines()
    assert rows[2].startswith(
        "| [`speed`](../benchmarks/baselines/speed.json) | a CPU | 6 rollouts/s | 2: a loop | 3 |"
    )
    assert "| not run: needs a GPU | – | – |" in rows[3]
    page = f"Text\n{table.BEGIN}\nold\n{table.END}\nmore"
    once = table.put(page, "new")
    assert once == f"Text\n{table.BEGIN}\nnew\n{table.END}\nmore" == table.put(once, "new")
    with pytest.raises(ValueError, match="no markers"):
        table.put("Text", "new")
    assert table.BEGIN in table.PAGE.read_text() and table.END in table.PAGE.read_text()
