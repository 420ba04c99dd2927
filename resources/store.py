"""The store of artifacts as a resource."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
from pydantic import Field

from coepg_dagster.store import Store


class StoreResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Where artifacts lie, and whether stale ones may be read."""

    root: str = Field(description="Folder of all artifacts.")
    accept_stale_input: bool = Field(
        default=False,
        description="Let a step read an input that is stale. What was read is recorded, and this switch too.",
    )

    def store(self) -> Store:
        """The store below `root`."""
        return Store(Path(self.root))
