"""Trackers: where the log of a training is shown while it goes on.

They change nothing that is learned and are no part of the artifact, whose `training_log.jsonl` holds the same numbers. Each
reads addresses and keys from the environment (WANDB_API_KEY, MLFLOW_TRACKING_URI, …): no setting, record or log holds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from coepg_dagster.jobs import Placement, TrainingJob
from coepg_dagster.progress import Ended

PROJECT = "coepg-dagster"
"""The project, or experiment, of a tracker, where the environment names no other."""
_NAMED_BY = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}


def missing(trackers: Iterable[str]) -> list[str]:
    """The trackers that are not installed in this environment. The name of each is that of its package."""
    return [name for name in trackers if find_spec(name) is None]


def refuse_missing(placement: Placement) -> None:
    """Raises Ended if a tracker is not installed where the training runs."""
    if lacking := missing(placement.tracking):
        raise Ended(
            f"tracking: {', '.join(lacking)} is not installed here: pip install {' '.join(lacking)}, "
            "or leave it out of `tracking`"
        )


def tracker_callbacks(job: TrainingJob) -> list[Any]:
    """The callbacks of transformers that pass a trainer's log on; TensorBoard's files are in `job.tracked`.

    A training that continues adds to the files of TensorBoard, and is another run of the other trackers.
    """
    from transformers.integrations import TensorBoardCallback
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    for tracker in job.placement.tracking:
        if tracker in _NAMED_BY:
            os.environ.setdefault(_NAMED_BY[tracker], PROJECT)
    callbacks = [kind() for kind in get_reporting_integration_callbacks(list(job.placement.tracking))]
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = str(job.tracked or job.scratch / "tracking")
    return callbacks


def tracker_settings(job: TrainingJob) -> dict[str, Any]:
    """TrainingArguments that name the run; the callbacks are those of `tracker_callbacks` alone."""
    name = job.tracked.name if job.tracked else job.scratch.name
    return {"report_to": "none", "run_name": name, "project": PROJECT}
