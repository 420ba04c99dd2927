"""Projects with light makers, and the tools to run them in process."""

from __future__ import annotations

import io
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from coepg_dagster.assets.automation import WEBHOOK
from coepg_dagster.assets.evolve import evolve_through
from coepg_dagster.assets.ledger import Loop
from rich.console import Console

from coepg_dagster.experiment.versions import CODE
from coepg_dagster.project import Project
from coepg_dagster.provenance import LOOP, SHARED, Asset, Ref
from tests.assets.light import automate, light_definitions, light_project
from tests.deployment import Deployment, Webhook


@dataclass
class InProcess:
    """A light project with an instance of its own, run in this process."""

    project: Project
    instance: dg.DagsterInstance
    settings: dict[str, Any] = field(default_factory=dict)
    _built: tuple[Any, dg.Definitions] | None = None

    @property
    def loop(self) -> Loop:
        experiment = self.project.experiments()["light"]
        return Loop(experiment, experiment.seeds[0], self.project.root)

    @property
    def defs(self) -> dg.Definitions:
        """Loaded anew where files, settings or code have changed since; a daemon too goes on with what it has loaded."""
        files = self.project.experiments()
        used = {name: self.project.seeds_in_use(one) for name, one in files.items()}
        read = {path: path.read_text() for path in (self.project.root / "experiments").rglob("*.yaml")}
        now = self.project.root, read, used, dict(self.settings), dict(CODE)
        if self._built is None or self._built[0] != now:
            self._built = now, light_definitions(self.project, **self.settings)
        return self._built[1]

    def make(self, through: int) -> None:
        """Makes the inputs and the iterations 0..`through` of this fresh project: a copy of one in which they were made."""
        folder, databases = _made((self.project.root / "experiments" / "light.yaml").read_text(), through)
        shutil.copytree(Path(folder.name) / "project", self.project.root, symlinks=True, dirs_exist_ok=True)
        for content, database in zip(databases, _databases(self.instance), strict=True):
            copy = sqlite3.connect(":memory:")
            copy.deserialize(content)
            copy.backup(database)
            copy.close()

    def run(
        self, iteration: int | None, *assets: Asset, loop: Loop | None = None, config: dict[str, Any] | None = None
    ) -> dg.ExecuteInProcessResult:
        """Runs assets of one iteration (all of it, without any named), or unpartitioned ones."""
        loop = loop or self.loop
        names = assets or (SHARED if iteration is None else LOOP)
        return self.defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=self.instance,
            partition_key=None if iteration is None else str(iteration),
            asset_selection=[loop.key(asset) for asset in names],
            run_config=config or {},
            raise_on_error=False,
        )

    def evolve(self, through: int) -> tuple[int, str]:
        """As `coepg evolve`: the number of its runs, and its output."""
        output = io.StringIO()
        runs = evolve_through(self.defs, self.instance, self.loop, through, Console(file=output, width=500))
        return runs, output.getvalue()

    def version(self, asset: Asset, iteration: int | None) -> str:
        record = self.loop.record(self.instance, Ref(asset, iteration))
        assert record is not None
        return record.data_version

    def why(self, result: dg.ExecuteInProcessResult) -> str:
        """The message of the first failed step."""
        failed = next(event for event in result.all_events if event.is_step_failure)
        data = failed.step_failure_data
        if data.user_failure_data and data.user_failure_data.description:
            return data.user_failure_data.description
        assert data.error is not None
        return (data.error.cause or data.error).message


@cache
def _made(experiment: str, through: int) -> tuple[tempfile.TemporaryDirectory[str], list[bytes]]:
    """A light project with this experiment in which iterations were made, and the databases of its instance."""
    folder = tempfile.TemporaryDirectory()
    with dg.DagsterInstance.ephemeral() as instance:
        light = InProcess(light_project(Path(folder.name) / "project"), instance)
        (light.project.root / "experiments" / "light.yaml").write_text(experiment)
        if through:
            light.make(through - 1)
        else:
            assert light.run(None).success
        assert light.run(through).success
        return folder, [database.serialize() for database in _databases(instance)]


def _databases(instance: dg.DagsterInstance) -> list[sqlite3.Connection]:
    """Of its runs and of its events."""
    storages: list[Any] = [instance.run_storage, instance.event_log_storage]
    return [storage._held_conn.connection.driver_connection for storage in storages]


@pytest.fixture
def light(tmp_path: Path) -> Iterator[InProcess]:
    """A fresh light project in which nothing was made yet."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield InProcess(light_project(tmp_path / "project"), instance)


@pytest.fixture(scope="session")
def webhook() -> Iterator[Webhook]:
    """Where the alerts of the deployment go."""
    with Webhook() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory, webhook: Webhook) -> Iterator[Deployment]:
    """A running daemon and web server over four light experiments, each with a pool of its own."""
    project = light_project(tmp_path_factory.mktemp("deployment") / "project", "other", "driven", "timed", seconds=0.1)
    automate(project, "driven", "refresh")
    automate(project, "timed", "refresh", "evaluate_nightly", "regenerate_weekly")
    timed = project.root / "experiments" / "timed.yaml"
    timed.write_text(timed.read_text().replace("[1, 2]", "[1]"))
    settings = project.root / "dagster.yaml"
    settings.write_text(settings.read_text().replace("run_end_seconds: 10", "run_end_seconds: 1"))
    location = Path(__file__).with_name("light_location.py")
    deployment = Deployment(project, location, **{WEBHOOK: webhook.url})
    try:
        yield deployment
    finally:
        deployment.close()
