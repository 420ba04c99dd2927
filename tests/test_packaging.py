"""What a wheel holds: every package of the source tree, and every file in it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from tests.project import REPOSITORY


def test_every_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    core = {path.parent for path in (REPOSITORY / "coepg_dagster").rglob("__init__.py")}
    names = {str(folder.relative_to(REPOSITORY)).replace("/", ".") for folder in core}
    assert set(listed) == names | {"coepg_dagster.assets", "coepg_dagster.resources"}


def test_every_file_of_a_package_is_in_the_wheel() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    data = {
        file
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for file in (REPOSITORY / package.replace(".", "/")).glob(pattern)
    }
    files = {file for file in (REPOSITORY / "coepg_dagster").rglob("*") if file.is_file()}
    others = {file for file in files if file.suffix not in (".py", ".pyc")}
    assert others and others == data


def test_a_build_warns_of_nothing_and_holds_the_templates(tmp_path: Path) -> None:
    """setuptools takes folders of data for packages that somebody forgot, where it collects data on its own."""
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q"]
    places = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib")]
    ended = subprocess.run([*build, *places], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "absent from" not in ended.stderr + ended.stdout
    shipped = REPOSITORY / "coepg_dagster" / "reports" / "templates"
    built = tmp_path / "lib" / "coepg_dagster" / "reports" / "templates"
    assert {file.name for file in built.iterdir()} == {file.name for file in shipped.iterdir()}
