"""What `coepg pretrain` makes: one YAML file of towers (warmed-up vision models) and the checkpoints grown on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from coepg_dagster.experiment.strict import Strict, checked
from coepg_dagster.sandbox.pretraining.tiny_models import Preset
from coepg_dagster.sandbox.pretraining.wordings import Vagueness, Wording
from coepg_dagster.yaml_files import read as read_yaml

Share = Annotated[float, Field(ge=0, le=1)]


class PretrainingStage(Strict):
    """How long and how fast one stage trains."""

    steps: Annotated[int, Field(ge=1)]
    """Optimizer steps."""
    batch: Annotated[int, Field(ge=1)] = 64
    """Screens per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-3
    """Peak learning rate: reached after `warm_up` steps, then a cosine decay to 3 %."""
    warm_up: Annotated[int, Field(ge=1)] = 200
    """Steps until the learning rate reaches its peak."""
    seed: int = 0
    """Seed of the batches."""
    families: Annotated[list[str], Field(min_length=1)] | None = None
    """Families whose screens it sees (`general-page`: pages made for pretraining); null: all."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Time limit: ends the stage early, with the learning rate decayed. Such a stage is not reproducible to the bit."""


class TowerStage(PretrainingStage):
    """A vision tower, warmed up with dense labels per visual token."""

    preset: Preset
    """Size of the whole model."""
    init_seed: int = 0
    """Seed of the initial weights."""


class VaguenessSettings(Strict):
    """See `wordings.Vagueness`."""

    families: Share = 0.0
    """Share of the task families on which the planner is often vague."""
    often: Share = 0.0
    """Probability of a vague plan on those families."""
    seldom: Share = 0.0
    """Probability of a vague plan on the other families."""

    def value(self) -> Vagueness:
        return Vagueness(self.families, self.often, self.seldom)


class Checkpoint(PretrainingStage):
    """One shipped model: its role, tower and wordings."""

    role: Literal["planner", "grounder"]
    """Whether it answers with plans or with points."""
    tower: str
    """Name of the tower it starts from."""
    wordings: dict[Wording, Annotated[float, Field(gt=0)]]
    """Wordings of the plans it writes (planner) or understands (grounder), with weights."""
    vagueness: VaguenessSettings = VaguenessSettings()
    """Planner only: how often its plans are vague."""
    text_tokens: Annotated[int, Field(ge=32, le=1024)] = 192
    """Length of a training sequence after the screen."""
    label_tokens: Annotated[int, Field(ge=8, le=1024)] = 72
    """Most answer tokens in a training sequence."""
    dense_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the dense loss, in addition to the loss on answers."""
    data_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the training screens it sees; a smaller share makes a weaker pool member."""
    swap: Share = 0.5
    """Planner only: share of typed values replaced by random strings."""
    use: str = ""
    """Its use, for the model card."""
    notes: str = ""
    """Further notes for the model card: how a setting was chosen, what was observed."""

    @model_validator(mode="after")
    def _has_wording(self) -> Checkpoint:
        if not self.wordings:
            raise ValueError("`wordings` is empty; name at least one of A, B, C, D")
        return self


class Recipe(Strict):
    """All models of the embedded benchmark."""

    vocabulary: Annotated[int, Field(ge=700)] = 1472
    """Most tokens of the shared tokenizer."""
    least_screens: Annotated[int, Field(ge=1)] = 1
    """Words on fewer screens than this are spelled."""
    towers: dict[str, TowerStage]
    """Name → tower."""
    checkpoints: dict[str, Checkpoint]
    """Name of the checkpoint and of its directory → checkpoint."""

    @model_validator(mode="after")
    def _towers_exist(self) -> Recipe:
        for name, checkpoint in self.checkpoints.items():
            if checkpoint.tower not in self.towers:
                raise ValueError(
                    f"checkpoint {name!r} starts from tower {checkpoint.tower!r}; there are {[*self.towers]}"
                )
        return self


def read(path: Path) -> Recipe:
    """The recipe in a YAML file. Raises BadYaml, or ExperimentError with the keys that are wrong."""
    return checked(Recipe, read_yaml(path), path)
