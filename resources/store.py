"""The store of artifacts as a resource."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
from pydantic import Field

from coepg_dagster.store import Store


class StoreResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Where artifacts lie, and whether stale ones may be read."""

    root: str = Field(default="store", description="Folder of all artifacts, relative to the project.")
    accept_stale_input: bool = Field(
        default=False,
        description="Let a step read an input that is stale. What was read is recorded, and this switch too.",
    )

    def store(self, project: Path) -> Store:
        """The store of a project."""
        return Store(project / self.root)
