"""docs/dagster-loops.md: its example runs as it stands there, and its table is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from tests.project import REPOSITORY

PAGE = (REPOSITORY / "docs" / "dagster-loops.md").read_text()
SEEN, MADE = dg.AssetObservation, dg.AssetMaterialization


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(code)


class Loop:
    """The example, with an instance of its own."""

    def __init__(self, instance: dg.DagsterInstance, emits: tuple[type, ...] | None = None) -> None:
        names: dict[str, Any] = {"__name__": "loop"}
        exec(compile(example(), "docs/dagster-loops.md", "exec", dont_inherit=True), names)  # noqa: S102
        if emits is not None:
            names["EMITS"] = emits
        self.defs, self.instance, self.cursor = names["defs"], instance, None
        self.tick()

    def run(self, k: str, *assets: str) -> bool:
        keys = [dg.AssetKey(asset) for asset in assets or ("model", "data")]
        job = self.defs.resolve_implicit_global_asset_job_def()
        return bool(
            job.execute_in_process(
                instance=self.instance, partition_key=k, asset_selection=keys, raise_on_error=False
            ).success
        )

    def tick(self) -> list[tuple[str, ...]]:
        """(partition, assets) of each run that the conditions ask for."""
        evaluated = dg.evaluate_automation_conditions(self.defs, self.instance, cursor=self.cursor)
        self.cursor = evaluated.cursor
        runs: dict[str, list[str]] = {}
        for result in evaluated.results:
            for k in result.true_subset.expensively_compute_partition_keys():
                runs.setdefault(k, []).append(result.key.path[-1])
        return [(k, *runs[k]) for k in sorted(runs)]

    def settle(self) -> list[tuple[str, ...]]:
        """Makes what the conditions ask for until they ask for nothing."""
        made: list[tuple[str, ...]] = []
        while runs := self.tick():
            assert len(made) < 9, made
            for k, *assets in runs:
                self.run(k, *assets)
            made += runs
        return made

    def stale(self) -> list[str]:
        graph = self.defs.resolve_asset_graph()
        resolver = CachingStaleStatusResolver(self.instance, graph, LoadingContextForTest(self.instance))
        nodes = [(asset, str(k)) for k in range(4) for asset in ("model", "data")]
        return [f"{a}[{k}]" for a, k in nodes if resolver.get_status(dg.AssetKey(a), k).value == "STALE"]


pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOP_STORE", str(tmp_path))


WHOLE = [(k, "model", "data") for k in "123"]


def test_the_example_does_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(example().splitlines()) <= 60
    with dg.DagsterInstance.ephemeral() as instance:
        loop = Loop(instance)
        assert not loop.run("1")  # without iteration 0
        assert loop.run("0") and loop.settle() == WHOLE
        assert loop.run("0") and loop.settle() == [] and loop.stale() == []
        monkeypatch.setenv("LOOP_SALT", "x")
        assert loop.run("0", "data") and loop.stale() == ["model[1]"]
        assert loop.settle() == WHOLE and loop.stale() == []


ROWS = {
    (SEEN,): ([], "exact"),
    (MADE,): (WHOLE[:1], "lost"),
    (MADE, SEEN): (WHOLE[:1], "wrong"),
    (SEEN, MADE): (WHOLE[:1], "exact"),
}


@pytest.mark.parametrize("emits", ROWS)
def test_the_rows_of_the_table(emits: tuple[type, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, staleness = ROWS[emits]
    with dg.DagsterInstance.ephemeral() as instance:
        loop = Loop(instance, emits)
        loop.run("0")
        assert loop.tick() == asked
        loop.run("1")
        assert loop.stale() == (["model[1]"] if staleness == "wrong" else [])
        monkeypatch.setenv("LOOP_SALT", "x")
        loop.run("0", "data")
        assert loop.stale() == ([] if staleness == "lost" else ["model[1]"])
    (row,) = [line for line in PAGE.splitlines() if line.strip("| *").startswith(_said(emits))]
    assert staleness in row and ("never" in row) == (not asked)


def _said(emits: tuple[type, ...]) -> str:
    first, *then = ["an observation" if event is SEEN else "a materialization" for event in emits]
    return f"{first}, then {then[0]}" if then else f"{first} |"
