"""The resources of the loop: `sft`, `grpo_cdrem`, `regeneration`, and `engines` for vLLM.

The first three say where processes run (launcher, device, limits) and may replace hyper-parameters of the experiment file
for one run, from the Launchpad. An empty field is as in the experiment file; the metadata show what was used.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, Self, TypeVar, get_args, get_origin

import dagster as dg
from coepg_dagster.resources import ray_worker, worker
from coepg_dagster.resources.launcher import job_environment, run_process
from pydantic import Field, create_model, model_validator

from coepg_dagster.experiment import Grpo, Regeneration, Serving, Sft, Strict, checked
from coepg_dagster.jobs import ChunkedJob, Job, OnAnomaly, Placement, Strategy, TrainingJob

Config = TypeVar("Config", bound=Strict)
AS_WRITTEN: Final = "Empty: as in the experiment file."


class Processes(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Where the heavy steps run."""

    launcher: Literal["subprocess", "ray"] = Field(
        default="subprocess",
        description="Where a job's process is started: on this machine, or on a Ray cluster that sees the same paths.",
    )
    ray_address: str = Field(
        default="auto",
        description="For `ray`: the cluster, as `host:6379`, `ray://host:10001`, or `auto` on a node of it.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="`cpu`, `cuda`, or `auto`: a GPU if there is one."
    )
    threads: int = Field(
        default=1, ge=1, description="CPU threads of a job; 1 is fastest for tiny models on few cores."
    )
    processes: int = Field(
        default=2, ge=1, description="Processes that share inference over many rows on a CPU; with GPUs, one per GPU."
    )
    timeout_minutes: float = Field(default=7 * 24 * 60, gt=0, description="A job that takes longer is ended.")
    grace_seconds: float = Field(
        default=20,
        gt=0,
        description="How long a cancelled job has to save and end, first after SIGINT, then after SIGTERM. Give training "
        "of a large model the time of an optimizer step and of a checkpoint.",
    )

    def placement(self, kind: type[Job]) -> dict[str, Any]:
        """The fields of a job of `kind` that say where it runs; they do not change its result."""
        return {"processes": self.processes} if issubclass(kind, ChunkedJob) else {}

    def launch(self, context: dg.AssetExecutionContext, job: Job, root: Path) -> dict[str, Any]:
        """Runs `job` in its own process, in the folder `root`; returns {"figures", "device", "seconds"}."""
        on_ray = self.launcher == "ray"
        env = job_environment(self.threads) | ({ray_worker.ADDRESS: self.ray_address} if on_ray else {})
        return run_process(
            context,
            job,
            root,
            env,
            timeout_minutes=self.timeout_minutes,
            grace_seconds=self.grace_seconds,
            module=ray_worker.MODULE if on_ray else worker.MODULE,
        )

    def resolve(self, config: Config) -> Config:
        """`config` with the fields that this resource replaces. Raises ExperimentError."""
        fields = type(config).model_fields
        replaced = {name: value for name, value in self.overrides().items() if name in fields}
        return checked(type(config), config.model_dump() | replaced, f"resource of {type(config).__name__}")

    def overrides(self) -> dict[str, Any]:
        """Field → value that this resource replaces in the experiment file."""
        settings = sorted(set(type(self).model_fields) - set(Training.model_fields))
        return {name: getattr(self, name) for name in settings if getattr(self, name) is not None}


class Training(Processes):
    """Training in one process, or through `accelerate launch` in several of one machine."""

    training_processes: int = Field(
        default=1,
        ge=1,
        description="Processes that share an optimizer step, one per GPU. Batch sizes stay those of a step.",
    )
    strategy: Strategy = Field(
        default="ddp",
        description="What each process holds. `ddp`: everything; `zero2`: a part of the optimizer's state (DeepSpeed); `zero3`: "
        "a part of the weights too; `fsdp`: as `zero3`, by torch.",
    )
    save_every: int = Field(
        default=50,
        ge=0,
        description="Optimizer steps between two checkpoints, from which a killed run continues. 0: only when it is "
        "cancelled.",
    )
    on_anomaly: OnAnomaly = Field(
        default="stop",
        description="When groups have no spread, reward, KL or loss run away, or memory grows steadily. `stop`: saves, ends, and "
        "says what to change; `warn`: logs that and continues. A loss that is not a number always ends training.",
    )

    @model_validator(mode="after")
    def _ray_trains_in_one_process(self) -> Self:
        if self.launcher == "ray" and (self.training_processes > 1 or self.strategy != "ddp"):
            raise ValueError("on Ray a job trains in one process: leave out `training_processes` and `strategy`")
        return self

    def placement(self, kind: type[Job]) -> dict[str, Any]:
        placed = Placement(
            processes=self.training_processes,
            strategy=self.strategy,
            save_every=self.save_every,
            on_anomaly=self.on_anomaly,
        )
        return {"placement": placed} if issubclass(kind, TrainingJob) else super().placement(kind)


def _overridable(base: type[Processes], config: type[Strict], *decided: str) -> Any:
    """`base` with a field for each setting of `config`, except those that are `decided` before a run starts."""
    fields: dict[str, Any] = {
        name: (_in_launchpad(field.annotation), Field(None, description=f"{field.description}. {AS_WRITTEN}"))
        for name, field in config.model_fields.items()
        if name not in decided
    }
    return create_model(f"{config.__name__}Overrides", __base__=base, **fields)


def _in_launchpad(annotation: Any) -> Any:
    """A setting's type as an optional Dagster field; `resolve` checks the value against the experiment's type."""
    kind = annotation
    if NoneType in get_args(annotation):
        (kind,) = set(get_args(annotation)) - {NoneType}
    if get_origin(kind) is Literal:
        kind = str
    elif isinstance(kind, type) and issubclass(kind, Strict):
        kind = dict[str, Any]
    return kind | None


class SftResource(_overridable(Training, Sft)):  # type: ignore[misc]
    """Supervised fine-tuning of π_k and ϕ_k."""


class GrpoCdremResource(_overridable(Training, Grpo)):  # type: ignore[misc]
    """GRPO of π'_k with the confidence-weighted reward ensemble."""

    verifiers: list[str] | None = Field(
        default=None, description=f"Which open verifiers reward beside ϕ_k. {AS_WRITTEN}"
    )


class RegenerationResource(_overridable(Processes, Regeneration, "trained_members")):  # type: ignore[misc]
    """The pools: candidate plans, verdicts, D_k; and the evaluation of an iteration's agent."""

    verifiers: list[str] | None = Field(default=None, description=f"Which open verifiers give verdicts. {AS_WRITTEN}")


_OF_VLLM: Final = ("python", "memory", "context", "arguments")
"""Settings of `Serving` that are called `vllm_…` in the Launchpad."""


def _engines() -> Any:
    """A resource with a field for each setting of `Serving`."""
    fields: dict[str, Any] = {
        _engine_field(name): (field.annotation, field) for name, field in Serving.model_fields.items()
    }
    return create_model("Engines", __base__=dg.ConfigurableResource, **fields)


def _engine_field(name: str) -> str:
    return f"vllm_{name}" if name in _OF_VLLM else name


class EnginesResource(_engines()):  # type: ignore[misc]
    """How vLLM runs on this machine, if an experiment uses it (`models.engine`, or a pool member's `engine`)."""

    def serving(self) -> Serving:
        """The settings as jobs take them."""
        return Serving(**{name: getattr(self, _engine_field(name)) for name in Serving.model_fields})


def default_resources() -> dict[str, Any]:
    """The resources of a code location, by key."""
    return {
        "sft": SftResource(),
        "grpo_cdrem": GrpoCdremResource(),
        "regeneration": RegenerationResource(),
        "engines": EnginesResource(),
    }
