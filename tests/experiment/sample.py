"""A small valid experiment file, and what is said about one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coepg_dagster import yaml_files
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.strict import ExperimentError

MIND2WEB = {"reader": "mind2web", "path": "data", "test": ["test_task"], "protocol": "mind2web/seeclick"}
PHONE = {"reader": "android_control", "path": "data", "test": ["test"], "protocol": "android_control/os_atlas"}
REMOTE = {"model": "x", "engine": "openai", "base_url": "http://x/v1"}


def content(**change: Any) -> dict[str, Any]:
    """A small valid file; `change` replaces values by dotted key, None removes a key."""
    raw: dict[str, Any] = {
        "description": "a test",
        "iterations": 2,
        "seeds": [1, 2],
        "benchmark": {"reader": "miniwob", "path": "data", "test": ["test_seed"], "protocol": "miniwob/point"},
        "models": {
            "base_planner": "a",
            "base_grounder": "b",
            "planners": {"open_p": "c"},
            "verifiers": {"open_v": "d", "open_w": "e"},
        },
    }
    for key, value in change.items():
        *path, last = key.split("__")
        place = raw
        for part in path:
            place = place.setdefault(part, {})
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    return raw


def write(folder: Path, raw: Any, name: str = "exp") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml_files.dump(raw))
    return path


def error(folder: Path, raw: Any, name: str = "exp") -> str:
    with pytest.raises(ExperimentError) as refused:
        load_experiment(write(folder, raw, name))
    return str(refused.value)
