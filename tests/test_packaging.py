"""What a wheel holds: every package of the source tree, and every file in it."""

from __future__ import annotations

import tomllib

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
