"""A project of its own for a test: its own store and Dagster home, the repository's data and models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from coepg_dagster.resources.launcher import job_environment
from coepg_dagster.resources.warm import WarmProcess
from typer.testing import CliRunner

from coepg_dagster.cli import app

REPOSITORY = Path(__file__).parent.parent
_NUMBERS = count()


def make_project(folder: Path, *experiments: Path) -> Path:
    """`folder` as a project with these experiment files."""
    (folder / "experiments").mkdir(parents=True)
    for file in experiments:
        shutil.copy(file, folder / "experiments")
    for name in ("data", "models", "machines", "dagster.yaml", "workspace.yaml"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def coepg(project: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The `coepg` command in a project, started, with more variables in its environment; its output is captured."""
    return subprocess.Popen(
        [Path(sys.executable).parent / "coepg", *arguments],
        cwd=project,
        env=_outside(os.environ) | {"COLUMNS": "200", "HF_HUB_OFFLINE": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _outside(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that do not say which project it is."""
    return {name: value for name, value in environment.items() if name not in ("DAGSTER_HOME", "COEPG_ROOT")}


class Forked:
    """The `coepg` command in a project, as a fork of a process that has the heavy libraries imported."""

    def __init__(self, project: Path, *arguments: str) -> None:
        self._output = project / f"output-{next(_NUMBERS)}"
        self._output.mkdir()
        self._process = WarmProcess(
            "coepg_dagster.cli",
            arguments,
            env=_outside(job_environment(1)) | {"COLUMNS": "200"},
            cwd=project,
            output=self._output / "out",
            errors=self._output / "err",
            starts_jobs=True,
        )

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits for its end; what it printed to stdout and to stderr."""
        self.returncode = self._process.wait(timeout)
        return (self._output / "out").read_text(), (self._output / "err").read_text()


def run(project: Path, *arguments: str) -> str:
    """What a `coepg` command prints to stdout, run in this process; fails the test where it does not exit with 0."""
    code, out, err = tell(project, *arguments)
    assert code == 0, f"coepg {' '.join(arguments)}: exit {code}\n{out}\n{err}"
    return out


def tell(project: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a `coepg` command, run in this process: one that needs no Dagster definitions."""
    place = {"COEPG_ROOT": str(project), "DAGSTER_HOME": str(project / ".dagster"), "COLUMNS": "200"}
    result = CliRunner(env=place).invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
