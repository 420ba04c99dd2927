"""Where the published predictions and samples lie; tests skip without them. They are read, never copied."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("COEPG_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (DATA / "published_predictions").is_dir(),
    reason=f"published predictions not found in {DATA}; set COEPG_SHARED_DATA to their folder",
)
PREDICTIONS = DATA / "published_predictions"
SAMPLES = DATA / "benchmark_samples"
