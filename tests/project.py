"""A project of its own for a test: its own store and Dagster home, the repository's data and models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


def make_project(folder: Path, *experiments: Path) -> Path:
    """`folder` as a project with these experiment files."""
    (folder / "experiments").mkdir(parents=True)
    for file in experiments:
        shutil.copy(file, folder / "experiments")
    for name in ("data", "models", "dagster.yaml", "workspace.yaml"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def coepg(project: Path, *arguments: str) -> subprocess.Popen[str]:
    """The `coepg` command in a project, started; its output is captured."""
    outside = {name: value for name, value in os.environ.items() if name not in ("DAGSTER_HOME", "COEPG_ROOT")}
    return subprocess.Popen(
        [Path(sys.executable).parent / "coepg", *arguments],
        cwd=project,
        env=outside | {"COLUMNS": "200", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(project: Path, *arguments: str) -> str:
    """What a `coepg` command prints to stdout; fails the test with what it said where it does not exit with 0."""
    process = coepg(project, *arguments)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, f"coepg {' '.join(arguments)}: exit {process.returncode}\n{out}\n{err}"
    return out
