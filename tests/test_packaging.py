"""What a wheel holds: every package of the source tree."""

from __future__ import annotations

import tomllib

from tests.project import REPOSITORY


def test_every_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    core = {path.parent for path in (REPOSITORY / "coepg_dagster").rglob("__init__.py")}
    names = {str(folder.relative_to(REPOSITORY)).replace("/", ".") for folder in core}
    assert set(listed) == names | {"coepg_dagster.assets", "coepg_dagster.resources"}
