"""Progress of long work."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coepg_dagster.refusal import Refusal

Report = Callable[[int, int, Mapping[str, float]], None]
"""Called with (done, of, figures) as the work advances; `figures` may be empty."""


class Ended(Refusal, RuntimeError):
    """A job ended before it was done; the message says why and what to do."""
