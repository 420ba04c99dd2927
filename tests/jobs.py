"""Training jobs on a CPU, from tables in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pyarrow as pa

from coepg_dagster.artifacts import DATASET, STEPS, write_steps, write_table
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.jobs import GrpoJob, SftJob, TrainingJob
from coepg_dagster.steps import STEP_SCHEMA

Data = tuple[pa.Table, pa.Table, Models]
"""D_{k-1}, the training steps, and how checkpoints are asked."""
J = TypeVar("J", bound=TrainingJob)


def quiet(done: int, of: int, figures: Any) -> None:
    """A Report that nobody reads."""


def beside(out: Path) -> Path:
    """A scratch folder for what is made in `out`."""
    return out.with_name(f"{out.name}-scratch")


def training_job(
    kind: type[J], out: Path, data: Data, init: Path | str, validation: pa.Table | None = None, **settings: Any
) -> J:
    """A job whose tables lie in its scratch folder. Where there is no `validation` split, nothing is probed."""
    dataset, steps, models = data
    scratch = beside(out)
    scratch.mkdir(parents=True, exist_ok=True)
    splits = {"train": steps} | ({} if validation is None else {"validation": validation})
    position, field = STEP_SCHEMA.get_field_index("split"), STEP_SCHEMA.field("split")
    named = [table.set_column(position, field, [[split] * table.num_rows]) for split, table in splits.items()]
    write_steps(pa.concat_tables(named), scratch / STEPS, list(splits))
    write_table(dataset, scratch / DATASET)
    if validation is None:
        for name, value in settings.items():
            if isinstance(value, Sft | Grpo):
                settings[name] = value.model_copy(update={"probe_steps": 0})
    common: dict[str, Any] = {"device": "cpu", "batch_size": 8, "seed": 5, "models": models, "init": str(init)}
    places: dict[str, Any] = {"out": out, "scratch": scratch, "steps": scratch / STEPS, "dataset": scratch / DATASET}
    return kind(**places, train_split="train", validation_split="validation", **common | settings)


def sft_job(out: Path, data: Data, role: Any, init: Path | str, config: Sft, **more: Any) -> SftJob:
    """SFT of a planner, a grounder or an end-to-end agent from `init`."""
    tokens = {"max_plan_tokens": 16, "max_point_tokens": 8}
    return training_job(SftJob, out, data, init, **tokens | {"role": role, "config": config} | more)


def grpo_job(
    out: Path,
    data: Data,
    init: Path | str,
    grounder: Path | str,
    config: Grpo,
    verifiers: Mapping[str, Path | Member] = MappingProxyType({}),
    **more: Any,
) -> GrpoJob:
    """GRPO of the planner `init`, rewarded by a grounder and verifiers."""
    members = {name: one if isinstance(one, Member) else str(one) for name, one in verifiers.items()}
    about = {"grounder": ("grounder_1", str(grounder)), "verifiers": members, "max_point_tokens": 8}
    return training_job(GrpoJob, out, data, init, **about | {"config": config} | more)
