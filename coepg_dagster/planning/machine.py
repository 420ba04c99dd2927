"""A machine's profile, `machines/NAME.yaml`: where the heavy steps run there, and on what. Nothing in it changes a result.

`coepg plan` and `coepg evolve` take it with `--on NAME`. COEPG_MACHINE names the one that the code locations start with: the
defaults of the Launchpad, and of all runs of automation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from coepg_dagster import yaml_files
from coepg_dagster.experiment.models import PLACE, Member, Models, Serving, may_hold_key, refuse_keys
from coepg_dagster.experiment.schema import Experiment, Regeneration
from coepg_dagster.experiment.strict import ExperimentError, Name, Strict, checked
from coepg_dagster.experiment.training import Grpo, PolicyTraining, Sft
from coepg_dagster.jobs import OnAnomaly, Placement, Strategy, Tracker
from coepg_dagster.planning.estimates import CARDS
from coepg_dagster.training.launch import hardware_refusals, refusals, section_of

MACHINE: Final = "COEPG_MACHINE"
"""Environment variable with the name of the profile to use where no command names one."""

PROCESS_SECTIONS: Final = ("sft", "grpo_cdrem", "regeneration")
"""The sections of a profile that are resources with processes."""
NO_GPU: Final = "{}: `device: cuda`, and there is no GPU: set `device: auto` or `cpu`"


class ProcessSettings(Strict):
    """Where the processes of a heavy step run."""

    launcher: Literal["subprocess", "ray"] = Field(
        "subprocess",
        description="Where a job's process is started: on this machine, or on a Ray cluster that sees the same paths.",
    )
    ray_address: str = Field(
        "auto", description="For `ray`: the cluster, as `host:6379`, `ray://host:10001`, or `auto` on a node of it."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`cpu`, `cuda`, or `auto`: a GPU if there is one."
    )
    threads: int = Field(1, ge=1, description="CPU threads of a job; for tiny models 1 is mostly fastest.")
    processes: int = Field(
        2, ge=1, description="Processes that share inference over many rows on a CPU; with GPUs, one per GPU."
    )
    timeout_minutes: float = Field(7 * 24 * 60, gt=0, description="A job that takes longer is ended.")
    grace_seconds: float = Field(
        20,
        gt=0,
        description="How long a cancelled job has to save and end, first after SIGINT, then after SIGTERM. Give training "
        "of a large model the time of an optimizer step and of a checkpoint.",
    )

    @model_validator(mode="after")
    def _address_holds_no_key(self) -> Self:
        if may_hold_key(self.ray_address):
            raise ValueError("ray_address must hold no key: it is written into the record of every artifact")
        return self


class TrainingSettings(ProcessSettings):
    """Where training runs: in one process, or through `accelerate launch` in several of one machine."""

    training_processes: int = Field(
        1,
        ge=1,
        description="Processes that share an optimizer step, one per GPU. Batch sizes stay those of a step.",
    )
    strategy: Strategy = Field(
        "ddp",
        description="What each process holds. `ddp`: everything; `zero2`: a part of the optimizer's state (DeepSpeed); `zero3`: "
        "a part of the weights too; `fsdp`: as `zero3`, by torch.",
    )
    save_every: int = Field(
        50,
        ge=0,
        description="Optimizer steps between two checkpoints, from which a killed run continues. 0: only when it is "
        "cancelled.",
    )
    on_anomaly: OnAnomaly = Field(
        "stop",
        description="When groups have no spread, reward, KL or loss run away, or memory grows steadily. `stop`: saves, ends, and "
        "says what to change; `warn`: logs that and continues. A loss that is not a number always ends training.",
    )
    tracking: list[str] = Field(  # Dagster's configuration has no lists of literals
        [],
        description="Trackers that show the log of a training: `tensorboard`, `wandb`, `mlflow`, `trackio`. They read addresses "
        "and keys from the environment.",
    )

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if self.launcher == "ray" and (self.training_processes > 1 or self.strategy != "ddp"):
            raise ValueError("on Ray a job trains in one process: leave out `training_processes` and `strategy`")
        for name in self.tracking:
            if name not in get_args(Tracker):
                raise ValueError(f"{name!r} is no tracker: choose from {', '.join(get_args(Tracker))}")
        return self

    @property
    def placement(self) -> Placement:
        """The settings as training jobs take them."""
        return Placement(
            processes=self.training_processes,
            strategy=self.strategy,
            save_every=self.save_every,
            on_anomaly=self.on_anomaly,
            tracking=[tracker for tracker in get_args(Tracker) if tracker in self.tracking],
        )


class EndpointSettings(Strict):
    """Where an open model of the experiments answers, if not at the `base_url` of the experiment file; null: as there."""

    base_url: str | None = Field(None, description="the endpoint, up to /v1")
    api_key_env: str | None = Field(None, description="the environment variable that holds its key")
    in_flight: int | None = Field(None, ge=1, le=1024, description="requests at a time, of each process")
    timeout_seconds: float | None = Field(None, gt=0, description="after which a request has failed")

    @model_validator(mode="after")
    def _holds_no_key(self) -> Self:
        refuse_keys(self.base_url, self.api_key_env)
        return self


class Machine(Strict):
    """A profile. Its sections are the resources of a run; what they lack is as by default."""

    name: Name
    description: str = ""
    card: str | None = Field(
        None, description="its GPUs, as `--gpu` of `coepg plan` knows them; null: it computes on CPUs"
    )
    gpus: int = Field(0, ge=0, le=1024, description="how many of them")
    sft: TrainingSettings = TrainingSettings()
    grpo_cdrem: TrainingSettings = TrainingSettings()
    regeneration: ProcessSettings = ProcessSettings()
    vllm: Serving = Field(Serving(), description="how vLLM runs there; its servers run beside what they answer")
    endpoints: dict[Name, EndpointSettings] = Field(
        {}, description="member of a pool, or `judge` → where it answers; only members with `engine: openai`"
    )

    @model_validator(mode="before")
    @classmethod
    def _decides_no_result(cls, raw: Any) -> Any:
        sections: dict[str, type[Strict]] = {"sft": Sft, "grpo_cdrem": Grpo, "regeneration": Regeneration}
        decides = [key for key in raw if key in Experiment.model_fields.keys() - cls.model_fields.keys()]
        for section, config in sections.items():
            part = raw.get(section)
            decides += [
                f"{section}.{key}" for key in (part if isinstance(part, dict) else ()) if key in config.model_fields
            ]
        if decides:
            raise ValueError(f"{', '.join(decides)}: decides results; it belongs in the experiment file")
        return raw

    @field_validator("card")
    @classmethod
    def _card_is_known(cls, card: str | None) -> str | None:
        if card is not None and card not in CARDS:
            raise ValueError(f"the card {card} is not known; known: {', '.join(CARDS)}")
        return card

    @model_validator(mode="after")
    def _cards_are_counted(self) -> Self:
        if (self.card is None) != (self.gpus == 0):
            raise ValueError("`card` and `gpus` go together: give both, or neither for a machine without GPUs")
        return self

    @property
    def spread(self) -> bool:
        """Whether a training runs in several processes, or needs GPUs for its strategy."""
        return self.sft.placement.spread or self.grpo_cdrem.placement.spread

    def refusals(self, experiment: Experiment, gpus: int | None = None) -> list[str]:
        """Why an iteration k > 0 of an experiment cannot be trained here, with what can; empty: no reason is known.

        Args:
            gpus: those that there really are; None: as the profile says.
        """
        there = self.gpus if gpus is None else gpus
        why = [
            line
            for config, resource in trainings(experiment)
            for line in training_refusals(config, getattr(self, resource), resource, there)
        ]
        pools = self.regeneration
        if pools.device == "cuda" and not there and pools.launcher != "ray":
            why.append(NO_GPU.format("regeneration"))
        try:
            place_models(experiment.models, self.endpoints)
        except ExperimentError as error:
            why.append(str(error))
        return list(dict.fromkeys(why))


def trainings(experiment: Experiment) -> list[tuple[Sft | PolicyTraining, Literal["sft", "grpo_cdrem"]]]:
    """Each training of an iteration k > 0, and the resource that says where it runs."""
    made, found = set(experiment.made), list[tuple[Sft | PolicyTraining, Literal["sft", "grpo_cdrem"]]]()
    if made & {"planner_sft", "grounder"}:
        found.append((experiment.sft, "sft"))
    if "end_to_end" in made:
        found.append((experiment.sft, "grpo_cdrem"))
    if "grounder_rl" in made:
        found.append((experiment.grounder_rl, "grpo_cdrem"))
    if experiment.grpo.enabled and made & {"planner", "end_to_end"}:
        found.append((experiment.grpo, "grpo_cdrem"))
    return found


def training_refusals(
    config: Sft | PolicyTraining, settings: TrainingSettings, resource: str, gpus: int | None = None
) -> list[str]:
    """Why training cannot run with these settings, with what can. The processes of training refuse the same; loads nothing.

    Args:
        resource: the name of `settings`, for messages.
        gpus: of the machine; None: not known.
    """
    why, there = refusals(config, settings.placement, resource), 0 if settings.device == "cpu" else gpus
    if there is None or settings.launcher == "ray":  # a node of the cluster may have what this machine lacks
        return why
    why += hardware_refusals(settings.placement, there, resource)
    if there:
        return why
    if settings.device == "cuda":
        why.append(NO_GPU.format(resource))
    if config.attention == "flash_attention_2":
        part = section_of(config)
        why.append(f"{part}.attention: flash_attention_2 needs a GPU and there is none: set `{part}.attention: sdpa`")
    if isinstance(config, PolicyTraining) and config.rollouts == "vllm":
        part = section_of(config)
        why.append(f"{part}.rollouts: vllm needs a GPU and there is none: set `{part}.rollouts: transformers`")
    return why


def place_models(models: Models, endpoints: Mapping[str, EndpointSettings]) -> Models:
    """The same models, asked where `endpoints` says. Raises ExperimentError.

    Names that the experiment lacks are left out: a machine serves many experiments.
    """

    def placed(name: str, member: Member) -> Member:
        if name not in endpoints:
            return member
        if models.engine_of(member) != "openai":
            raise ExperimentError(
                f"endpoints: {name} is loaded, not asked: set its `engine: openai` in the experiment file"
            )
        given = {key: value for key, value in endpoints[name].model_dump().items() if value is not None}
        assert given.keys() <= PLACE
        return checked(Member, member.model_dump() | given, f"endpoints: {name}")

    pools = {
        pool: {name: placed(name, member) for name, member in getattr(models, pool).items()}
        for pool in ("planners", "verifiers")
    }
    return models.model_copy(update={**pools, "judge": models.judge and placed("judge", models.judge)})


def load_machine(path: Path) -> Machine:
    """The profile in the YAML file `path`, named as the file. Raises ExperimentError."""
    try:
        raw = yaml_files.read(path)
    except yaml_files.BadYaml as error:
        raise ExperimentError(str(error)) from None
    if not isinstance(raw, dict) or "name" in raw:
        raise ExperimentError(
            f"{path}: the file must hold a mapping of keys without `name`: a machine is named by its file"
        )
    return checked(Machine, raw | {"name": path.stem}, path)


def machine_named(root: Path, name: str | None = None) -> Machine | None:
    """The profile `name` of a project, else that in COEPG_MACHINE; None: neither is given. Raises ExperimentError."""
    name = name or os.environ.get(MACHINE) or None
    if name is None:
        return None
    files = {file.stem: file for file in sorted((root / "machines").glob("*.yaml"))}
    if name not in files:
        raise ExperimentError(
            f"there is no machine {name!r:.80}; known: {', '.join(files) or 'none'} ({root / 'machines'})"
        )
    return load_machine(files[name])
