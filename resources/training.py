"""The resources of the loop: `sft`, `grpo_cdrem`, `regeneration`, and `engines` for vLLM.

The first three say where processes run (launcher, device, limits; the defaults are those of a machine's profile) and may
replace hyper-parameters of the experiment file for one run, from the Launchpad. An empty field is as in the experiment file;
the metadata show what was used.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import dagster as dg
from coepg_dagster.resources import ray_worker, worker
from coepg_dagster.resources.launcher import job_environment, run_process
from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from coepg_dagster.experiment.models import Models, Serving
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.experiment.strict import Strict, checked
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.jobs import ChunkedJob, Job, TrainingJob
from coepg_dagster.planning.machine import (
    PROCESS_SECTIONS,
    EndpointSettings,
    Machine,
    ProcessSettings,
    TrainingSettings,
    place_models,
)

Config = TypeVar("Config", bound=Strict)
AS_WRITTEN: Final = "Empty: as in the experiment file."


def _resource(config: type[Strict]) -> Any:
    """A resource with the fields of `config`, without its limits: `settings` asks these, and says plainly what is wrong."""
    fields: dict[str, Any] = {name: _without_limits(field) for name, field in config.model_fields.items()}
    return create_model(config.__name__, __base__=dg.ConfigurableResource, **fields)


def _without_limits(field: FieldInfo) -> tuple[Any, Any]:
    return field.annotation, Field(field.default, description=field.description)


class Processes(_resource(ProcessSettings)):  # type: ignore[misc]
    """Where the heavy steps run."""

    def settings(self) -> ProcessSettings:
        """Where they run, as in a machine's profile. Raises ExperimentError."""
        return self._checked(ProcessSettings)

    def _checked(self, kind: type[Config]) -> Config:
        given = {name: getattr(self, name) for name in kind.model_fields}
        return checked(kind, given, f"resource {type(self).__name__.removesuffix('Resource')}")

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
        settings = sorted(set(type(self).model_fields) - set(TrainingSettings.model_fields))
        return {name: getattr(self, name) for name in settings if getattr(self, name) is not None}


class Training(_resource(TrainingSettings), Processes):  # type: ignore[misc]
    """Training in one process, or through `accelerate launch` in several of one machine."""

    def settings(self) -> TrainingSettings:
        return self._checked(TrainingSettings)

    def placement(self, kind: type[Job]) -> dict[str, Any]:
        trains = issubclass(kind, TrainingJob)
        return {"placement": self.settings().placement} if trains else super().placement(kind)


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
    elif (isinstance(kind, type) and issubclass(kind, Strict)) or get_origin(kind) is dict:
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
        _engine_field(name): _without_limits(field) for name, field in Serving.model_fields.items()
    }
    return create_model("Engines", __base__=dg.ConfigurableResource, **fields)


def _engine_field(name: str) -> str:
    return f"vllm_{name}" if name in _OF_VLLM else name


class EnginesResource(_engines()):  # type: ignore[misc]
    """How vLLM runs on this machine, if an experiment uses it (`models.engine`, or a pool member's `engine`), and endpoints."""

    machine: str | None = Field(default=None, description="The profile below `machines/` that the defaults are from.")
    endpoints: dict[str, Any] = Field(default={}, description=f"{Machine.model_fields['endpoints'].description}")

    def serving(self) -> Serving:
        """The settings as jobs take them."""
        given = {name: getattr(self, _engine_field(name)) for name in Serving.model_fields}
        return checked(Serving, given, "resource engines")

    def placed(self, models: Models) -> Models:
        """The models, asked at the endpoints of this machine. Raises ExperimentError."""
        return place_models(
            models,
            {name: checked(EndpointSettings, given, f"endpoints: {name}") for name, given in self.endpoints.items()},
        )


def resource_config(machine: Machine) -> dict[str, dict[str, Any]]:
    """A machine's profile as the configuration of the resources: every setting, but those that are empty."""
    config = {key: getattr(machine, key).model_dump() for key in PROCESS_SECTIONS}
    serving = {_engine_field(name): value for name, value in machine.vllm.model_dump().items()}
    endpoints = {name: where.model_dump(exclude_none=True) for name, where in machine.endpoints.items()}
    config["engines"] = serving | {"machine": machine.name, "endpoints": endpoints}
    return {key: {name: value for name, value in fields.items() if value is not None} for key, fields in config.items()}


def default_resources(machine: Machine | None = None) -> dict[str, Any]:
    """The resources of a code location, by key, with the settings of `machine`."""
    config = resource_config(machine) if machine else {}
    kinds = {
        "sft": SftResource,
        "grpo_cdrem": GrpoCdremResource,
        "regeneration": RegenerationResource,
        "engines": EnginesResource,
    }
    return {key: kind(**config.get(key, {})) for key, kind in kinds.items()}
