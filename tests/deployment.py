"""A Dagster deployment for tests: real daemon and web server over one project, driven through GraphQL.

The daemon looks oftener, so that tests wait less: for backfills every 3 seconds (of 30), for sensors that are due every second
(of 5), for queued runs every second (of 5), for runs to try again every second (of 5), for runs that are gone every 5 (of 20).
It starts a new code server when it is told (`load_anew`) in place of every minute. Of the light project, runs are forks of a
server that has imported Dagster (`assets/light_location.py`), and give their slots back a second after their end (of 10).
Nothing else differs from `make ui`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import dagster as dg
import yaml
from coepg_dagster.assets.about import PAGES
from coepg_dagster.assets.ledger import make_databases

from coepg_dagster.project import Project
from tests.project import REPOSITORY

LOCATION: Final = "coepg"
_DAEMON: Final = """
import signal

import dagster as dg
from dagster._daemon import controller, sensor
from dagster._daemon.cli import main

controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 3
sensor.MIN_INTERVAL_LOOP_TIME = 1
dg.QueuedRunCoordinator.dequeue_interval_seconds = 1
dg.DagsterInstance.run_monitoring_poll_interval_seconds = 5

controller.RELOAD_WORKSPACE_INTERVAL = 36_000
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(True))
look = controller.DagsterDaemonController.check_workspace_freshness
controller.DagsterDaemonController.check_workspace_freshness = (
    lambda self, last: look(self, 0 if told and told.pop() else last)
)
main()
"""
_WEB: Final = """
import socket, sys
from coepg_dagster.assets.ledger import open_instance
from coepg_dagster.assets.pages import ui_server
from coepg_dagster.project import find_project

project = find_project()
with ui_server(project, open_instance(project), ["127.0.0.1", "localhost"]) as server:
    server.run(sockets=[socket.create_server(("127.0.0.1", int(sys.argv[1])))])
"""
FINISHED: Final = {"SUCCESS", "FAILURE", "CANCELED"}
Key = Sequence[str]


class Deployment:
    """A running daemon and web server; `close` ends both and all that they started."""

    def __init__(self, project: Project, location: Path, **env: str) -> None:
        self.project = project
        self.home = project.prepare_dagster_home()
        workspace = project.root / "workspace.yaml"
        place = {"relative_path": str(location), "location_name": LOCATION, "working_directory": str(REPOSITORY)}
        workspace.write_text(yaml.safe_dump({"load_from": [{"python_file": place}]}))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.pages_url = f"{self.url}{PAGES}"
        self._env = os.environ | {"DAGSTER_HOME": str(self.home), "COEPG_ROOT": str(project.root)} | env
        self._env["DAGSTER_GRPC_TIMEOUT_SECONDS"] = "300"  # busy machines answer late
        self._env["DAGSTER_EVENT_LOG_CONSUMER_DAEMON_INTERVAL_SECONDS"] = "1"
        self._logs = [(self.home / name).open("wb") for name in ("daemon.log", "webserver.log")]
        commands: list[list[str | Path]] = [
            [sys.executable, "-c", _DAEMON, "run", "-w", workspace],
            [sys.executable, "-c", _WEB, str(self.port)],
        ]
        self._instance = dg.DagsterInstance.from_config(str(self.home))
        make_databases(self._instance)
        self._processes = [
            subprocess.Popen(command, cwd=REPOSITORY, env=self._env, stdout=log, stderr=log, start_new_session=True)
            for command, log in zip(commands, self._logs, strict=True)
        ]
        try:
            self.wait(self._is_up, "the web server to load the code location", 400)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the daemon, the web server, and every run of theirs."""
        for process in self._processes:
            process.send_signal(signal.SIGINT)
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for log in self._logs:
            log.close()
        self._instance.dispose()

    def load_anew(self) -> None:
        """Has the daemon load the code location again, as it does every minute of its own accord."""
        self._processes[0].send_signal(signal.SIGUSR1)

    def _is_up(self) -> bool:
        dead = [process.args for process in self._processes if process.poll() is not None]
        assert not dead, f"{dead} ended: see {self.home}"
        try:
            data = self.graphql("{ workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError {"
                                 " __typename ... on PythonError { message } } } } } }")  # fmt: skip
        except ConnectionError:
            return False
        entries = data["workspaceOrError"]["locationEntries"]
        loaded = [entry["locationOrLoadError"] for entry in entries if entry["locationOrLoadError"]]
        assert all(entry["__typename"] == "RepositoryLocation" for entry in loaded), loaded
        return len(loaded) == 1

    def graphql(self, query: str, **variables: Any) -> Any:
        """The data of a GraphQL answer."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        server = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            server.request("POST", "/graphql", body, {"Content-Type": "application/json"})
            answer = json.loads(server.getresponse().read())
        finally:
            server.close()
        assert "errors" not in answer, answer["errors"]
        return answer["data"]

    def wait(self, ready: Callable[[], Any], what: str, seconds: float = 1500) -> Any:
        """What `ready` returns as soon as that is true; asked less often the longer it takes, since asking costs the CPU."""
        start = time.monotonic()
        while (waited := time.monotonic() - start) < seconds:
            value = ready()
            if value:
                return value
            time.sleep(min(0.3 + waited / 20, 2))
        raise AssertionError(f"waited {seconds} s for {what}; logs are in {self.home}")

    def backfill(self, keys: Iterable[Key], partitions: Sequence[str]) -> str:
        """Launches a backfill of assets, as the UI's button does; returns its id."""
        result = self.graphql(
            "mutation($p: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $p) { __typename"
            " ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }",
            p={"assetSelection": [{"path": list(key)} for key in keys], "partitionNames": list(partitions)},
        )["launchPartitionBackfill"]
        assert "backfillId" in result, result
        return str(result["backfillId"])

    def backfill_status(self, backfill_id: str) -> str:
        """REQUESTED, COMPLETED_SUCCESS, COMPLETED_FAILED, FAILED, …"""
        data = self.graphql(
            "query($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } } }",
            id=backfill_id,
        )
        return str(data["partitionBackfillOrError"]["status"])

    def wait_backfill(self, backfill_id: str, seconds: float = 1500) -> str:
        """The status of a backfill when it is done."""

        def done() -> str | None:
            status = self.backfill_status(backfill_id)
            return None if status in ("REQUESTED", "CANCELING", "FAILING") else status

        return str(self.wait(done, f"backfill {backfill_id}", seconds))

    def launch(
        self,
        keys: Iterable[Key],
        partition: str | None,
        config: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
        parent: str | None = None,
    ) -> str:
        """Launches one run of assets, as the UI's button does; returns its id. `parent`: again from its failure."""
        tags = dict(tags or {}) | ({"dagster/partition": partition} if partition is not None else {})
        metadata: dict[str, Any] = {"tags": [{"key": key, "value": value} for key, value in tags.items()]}
        if parent is not None:
            metadata |= {"parentRunId": parent, "rootRunId": parent}
            metadata["tags"].append({"key": "dagster/is_resume_retry", "value": "true"})
        result = self.graphql(
            "mutation($p: ExecutionParams!) { launchPipelineExecution(executionParams: $p) { __typename"
            " ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }"
            " ... on RunConfigValidationInvalid { errors { message } } } }",
            p={
                "selector": self.repository
                | {"pipelineName": "__ASSET_JOB", "assetSelection": [{"path": list(key)} for key in keys]},
                "runConfigData": config or {},
                "mode": "default",
                "executionMetadata": metadata,
            },
        )["launchPipelineExecution"]
        assert "run" in result, result
        return str(result["run"]["runId"])

    @property
    def repository(self) -> dict[str, str]:
        return {"repositoryLocationName": LOCATION, "repositoryName": "__repository__"}

    def terminate(self, run_id: str) -> None:
        """Cancels a run, as the UI's button does."""
        self.graphql(
            "mutation($id: String!) { terminateRun(runId: $id, terminatePolicy: SAFE_TERMINATE) { __typename } }",
            id=run_id,
        )

    def status(self, run_id: str) -> str:
        data = self.graphql("query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }", id=run_id)
        return str(data["runOrError"]["status"])

    def wait_run(self, run_id: str, *statuses: str, seconds: float = 1500) -> str:
        """The status of a run when it is one of `statuses` (none named: when it is finished)."""
        wanted = set(statuses) or FINISHED

        def reached() -> str | None:
            status = self.status(run_id)
            assert status in wanted or status not in FINISHED, f"{run_id} is {status}: {self.why(run_id)}"
            return status if status in wanted else None

        return str(self.wait(reached, f"run {run_id} to be {wanted}", seconds))

    def runs(self, **tags: str) -> list[dict[str, Any]]:
        """Runs that carry `tags` (`__` in a name stands for `/`), oldest first: runId, status, tags, assets."""
        runs = self.graphql(
            "query($f: RunsFilter!) { runsOrError(filter: $f) { ... on Runs { results { runId status creationTime"
            " tags { key value } assetSelection { path } } } } }",
            f={"tags": [{"key": key.replace("__", "/"), "value": value} for key, value in tags.items()]},
        )["runsOrError"]["results"]
        for run in runs:
            run["tags"] = {tag["key"]: tag["value"] for tag in run["tags"]}
        return sorted(runs, key=lambda run: run["creationTime"])

    def why(self, run_id: str) -> str:
        """The messages of the failed steps of a run."""
        events = self.graphql(
            "query($id: ID!) { logsForRun(runId: $id) { ... on EventConnection { events { __typename"
            " ... on ExecutionStepFailureEvent { stepKey failureMetadata { description }"
            " error { message cause { message } } } } } } }",
            id=run_id,
        )["logsForRun"]["events"]
        failures = [event for event in events if event["__typename"] == "ExecutionStepFailureEvent"]
        return "\n".join(json.dumps(failure) for failure in failures)

    def process_of(self, run_id: str) -> int:
        """Id of the process that Dagster's code server started for a run."""
        events = self.graphql(
            "query($id: ID!) { logsForRun(runId: $id) { ... on EventConnection { events {"
            " ... on MessageEvent { message } } } } }",
            id=run_id,
        )["logsForRun"]["events"]
        started = (re.search(r"Started process for run \(pid: (\d+)\)", event.get("message", "")) for event in events)
        return int(next(match for match in started if match)[1])

    def stale(self, keys: Iterable[Key], partition: str) -> dict[str, list[str]]:
        """Last part of the key → reasons, for the assets that Dagster marks as stale in `partition`."""
        nodes = self.graphql(
            "query($k: [AssetKeyInput!]!, $p: String!) { assetNodes(assetKeys: $k) { assetKey { path }"
            " staleStatus(partition: $p) staleCauses(partition: $p) { reason } } }",
            k=[{"path": list(key)} for key in keys],
            p=partition,
        )["assetNodes"]
        return {
            node["assetKey"]["path"][-1]: [cause["reason"] for cause in node["staleCauses"]]
            for node in nodes
            if node["staleStatus"] == "STALE"
        }

    def switch_on(self, *sensors: str) -> None:
        """Turns sensors on."""
        for name in sensors:
            result = self.graphql(
                "mutation($s: SensorSelector!) { startSensor(sensorSelector: $s) { __typename } }",
                s=self.repository | {"sensorName": name},
            )
            assert result["startSensor"]["__typename"] == "Sensor", result

    def switch_off(self, sensor: str) -> None:
        """Turns a sensor off."""
        data = self.graphql(
            "query($s: SensorSelector!) { sensorOrError(sensorSelector: $s) { ... on Sensor { sensorState { id } } } }",
            s=self.repository | {"sensorName": sensor},
        )
        stopped = self.graphql(
            "mutation($id: String!) { stopSensor(id: $id) { __typename } }",
            id=data["sensorOrError"]["sensorState"]["id"],
        )
        assert stopped["stopSensor"]["__typename"] == "StopSensorMutationResult", stopped

    def ticks(self, name: str) -> list[dict[str, Any]]:
        """The ticks of a sensor, newest first: status, timestamp (when it began), runIds, error."""
        data = self.graphql(
            "query($s: InstigationSelector!) { instigationStateOrError(instigationSelector: $s) {"
            " ... on InstigationState { ticks { status timestamp runIds error { message } } } } }",
            s=self.repository | {"name": name},
        )
        ticks: list[dict[str, Any]] = data["instigationStateOrError"]["ticks"]
        return ticks


class Webhook(HTTPServer):
    """Takes posts on the loopback address and keeps them."""

    def __init__(self, status: int = 200) -> None:
        self.taken: list[dict[str, Any]] = []
        taken = self.taken

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?token=secret"


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
