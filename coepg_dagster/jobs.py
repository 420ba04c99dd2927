"""The heavy steps as jobs: plain data that can be written to a file, sent to another process, and run there (`running`).

A job has folders and configuration, and is independent of Dagster. Its result in `out` is the content of an artifact; running
it returns figures. `scratch` keeps finished work, so that a killed job continues from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, TypeAdapter

from coepg_dagster.artifacts import steps_of
from coepg_dagster.experiment.models import Member, Models, Serving
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.experiment.strict import Strict, fingerprint
from coepg_dagster.experiment.training import GrounderRl, GrounderTarget, Grpo, Sft
from coepg_dagster.plugins import Named
from coepg_dagster.progress import Ended

Strategy = Literal["ddp", "zero2", "zero3", "fsdp"]
OnAnomaly = Literal["stop", "warn"]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Placement(Strict):
    """Where a training job runs and how often it saves; nothing here decides what it learns."""

    processes: int = Field(1, ge=1, description="one per GPU")
    strategy: Strategy = "ddp"
    save_every: int = Field(0, ge=0, description="optimizer steps between two checkpoints; 0: only on a signal")
    on_anomaly: OnAnomaly = Field("stop", description="what happens when training goes wrong, see training/monitor.py")
    tracking: list[Tracker] = Field([], description="trackers that show the log, see training/tracking.py")

    @property
    def spread(self) -> bool:
        """Whether `accelerate launch` starts the processes; DeepSpeed and FSDP need it for one too."""
        return self.processes > 1 or self.strategy != "ddp"

    @property
    def sharded(self) -> bool:
        """Whether no process holds the whole model."""
        return self.strategy in ("zero3", "fsdp")


ALONE: Final = Placement()
"""One process, no checkpoints."""


class Job(Strict):
    """The fields of every job."""

    out: Path
    scratch: Path
    steps: Path
    models: Models
    device: str
    batch_size: int
    seed: int
    serving: Serving = Serving()
    visual: Path | None = None  # folder of the embeddings of screenshots shared with other jobs; None: not shared
    tracked: Path | None = None  # folder of TensorBoard's files, which outlive the job; None: in the scratch folder

    def device_name(self) -> str:
        """The name of the device for people, such as that of the GPU."""
        import torch

        return torch.cuda.get_device_name() if self.device.startswith("cuda") else "cpu"


class TrainingJob(Job):
    """Training of a model from checkpoint `init` on D_{k-1}, in one process or several."""

    init: str
    dataset: Path
    train_split: str
    validation_split: str
    placement: Placement = ALONE
    checkers: dict[str, Member] = {}  # open verifiers that data strategies ask (`strategies.curation.label_check`)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def first_device(self) -> str:
        """The device on which the model is loaded. A sharded model is never whole on one GPU."""
        return "cpu" if self.placement.sharded else self.device

    def rows(self) -> pa.Table:
        """D_{k-1} (DATASET_SCHEMA)."""
        return pq.read_table(self.dataset)

    def train_steps(self) -> pa.Table:
        """The labelled steps of the train split (STEP_SCHEMA)."""
        return steps_of(self.steps, self.train_split)

    def validation_steps(self, limit: int | None = None, setting: str = "the limit") -> pa.Table:
        """The labelled steps of the validation split; with a `limit`, that of `setting`, whole episodes of at most so many."""
        return steps_of(self.steps, self.validation_split, limit, setting)


class SftJob(TrainingJob):
    """Supervised fine-tuning of a planner, a grounder, or an end-to-end agent."""

    kind: Literal["sft"] = "sft"
    role: Literal["planner", "grounder", "end_to_end"]
    max_plan_tokens: int
    max_point_tokens: int
    config: Sft

    @property
    def target(self) -> GrounderTarget:
        """What a grounder answers."""
        return self.config.target

    @property
    def answer_tokens(self) -> int:
        """The longest answer of the model."""
        return self.max_point_tokens if self.role == "grounder" else self.max_plan_tokens


class GrpoJob(TrainingJob):
    """GRPO of a planner.

    `grounder` is (name, checkpoint) of ϕ_k, which has prior `config.own_prior`; None: `init` is an end-to-end agent, judged
    by the point in its answer. `verifiers` are the open ones, unused if `config.ensemble` is false. `batch_size` and
    `max_point_tokens` are those of the grounders.
    """

    kind: Literal["grpo"] = "grpo"
    grounder: tuple[str, str] | None
    verifiers: dict[str, Member]
    max_point_tokens: int
    config: Grpo


class GrounderRlJob(TrainingJob):
    """GRPO of a grounder on the plans of D_{k-1}."""

    kind: Literal["grounder_rl"] = "grounder_rl"
    role: Literal["grounder"] = "grounder"
    target: GrounderTarget = "centre"
    config: GrounderRl

    @property
    def answer_tokens(self) -> int:
        """The longest answer of the model."""
        return self.config.max_plan_tokens


class EndToEndJob(TrainingJob):
    """SFT, then GRPO, of the end-to-end agent."""

    kind: Literal["end_to_end"] = "end_to_end"
    sft: Sft
    grpo: Grpo


class ChunkedJob(Job):
    """Inference over many rows, spread over `processes` on a CPU; on GPUs there is one process per GPU."""

    kind: str
    processes: int


class CandidatesJob(ChunkedJob):
    """Plans of every member of Π for every training step."""

    kind: Literal["candidates"] = "candidates"
    members: dict[str, Member]
    train_split: str
    max_steps: int | None
    config: Regeneration


class VerdictsJob(ChunkedJob):
    """Verdicts of every member of Φ on the candidates."""

    kind: Literal["verdicts"] = "verdicts"
    members: dict[str, Member]
    candidates: Path
    train_split: str
    config: Regeneration
    shuffled_plans: int
    folds: dict[str, int] = {}  # member → how many grounders below its checkpoint verify a part of the episodes each
    trigger_steps: int | None = None


class BoardItems(Strict):
    """A grounding board as an evaluation reads it."""

    steps: list[Path]  # Arrow files (READER_SCHEMA) of its import
    labels: Path  # its label files
    protocol: str
    max_steps: int | None = None
    lost: dict[str, int] = {}  # items that could not be read, as in EvaluationJob
    source: str = ""  # version of the files


class EvaluationJob(ChunkedJob):
    """Predictions of an agent on every split, and their scores.

    To see which model a gain comes from, other pairs are scored too: the planner with the `judge` on every split, and on the
    first split `base_planner` with the grounder, the best of `attempts` sampled plans of the planner with the grounder, and
    the grounder with the plans `oracle_plans` (by step id) and the labels' actions, and the agent by each way of `inference`.
    On `boards` the grounder is tested alone.
    """

    kind: Literal["evaluation"] = "evaluation"
    planner: str
    grounder: str | None  # None: `planner` is an end-to-end agent
    judge: Member | None = None
    base_planner: str | None = None
    attempts: int | None = None
    oracle_plans: dict[str, str] | None = None
    inference: Named = {}
    third_party: int | None = None  # steps of the second split, the first test split, that are probed (pools.threats)
    splits: list[str]
    max_steps: int | None
    protocol: str
    max_plan_tokens: int
    max_point_tokens: int
    lost: dict[str, int] = {}  # steps that splits lack, by "split: reason" (readers.importing.Counts)
    boards: dict[str, BoardItems] = {}


AnyJob = Annotated[
    SftJob | GrpoJob | GrounderRlJob | EndToEndJob | CandidatesJob | VerdictsJob | EvaluationJob,
    Field(discriminator="kind"),
]
_JOB: TypeAdapter[Any] = TypeAdapter(AnyJob)


def seed_of(seed: int, artifact: str) -> int:
    """The seed of the job that makes an artifact; different steps of a loop with `seed` draw different numbers."""
    return int(fingerprint([seed, artifact]), 16) % (1 << 31)


def parse_job(text: str) -> Job:
    """The job that another process wrote with `model_dump_json`."""
    job: Job = _JOB.validate_json(text)
    return job


def read_job(path: Path) -> Job:
    """The job in a file; device `auto` becomes `cuda` if there is a GPU, else `cpu`. Raises Ended if it is `cuda` without one."""
    job = parse_job(path.read_text())
    if job.device not in ("auto", "cuda"):
        return job
    import torch

    if torch.cuda.is_available():
        return job.model_copy(update={"device": "cuda"})
    if job.device == "cuda":
        raise Ended(
            "device: cuda: torch sees no GPU here: use `auto` or `cpu`, or look at the driver and CUDA_VISIBLE_DEVICES"
        )
    return job.model_copy(update={"device": "cpu"})
