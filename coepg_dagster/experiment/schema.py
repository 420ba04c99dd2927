"""An experiment as pydantic models: everything that decides a result.

Where a run's processes live (launcher, device, limits) is a resource. Impossible combinations are errors before any model is
touched.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.protocols import refuse_no_board, refuse_protocol
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.strict import Name, Owner, Pool, Strict
from coepg_dagster.experiment.training import GrounderRl, Grpo, Sft
from coepg_dagster.plugins import Named, chosen_for
from coepg_dagster.provenance import END_TO_END, LOOP, LOOP_RL, Agent, Asset, Init, Phi
from coepg_dagster.readers.mind2web import SPLITS as MIND2WEB_SPLITS
from coepg_dagster.rewards.cdrem import ValueMode
from coepg_dagster.rewards.terms import OF_A_BOX
from coepg_dagster.strategies.curation import transition_pairs
from coepg_dagster.strategies.inference import Agent as AskedAgent

WaysToInfer = Annotated[Named, AfterValidator(partial(chosen_for, AskedAgent, "inference"))]

MINIWOB_SPLITS: Final = ("train", "validation", "test_seed", "test_text", "test_family")
_KNOWN_SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "miniwob": MINIWOB_SPLITS,
    "mind2web": (*MIND2WEB_SPLITS, "validation"),
    "mind2web_blocks": tuple(split for split in MIND2WEB_SPLITS if split != "train"),
    "screenspot": ("test",),
}
"""Reader → the splits that its data can have. Data of other readers name their splits."""


_WITHOUT_PLANS: Final = {
    "mind2web": "Mind2Web has no plan of a step: leave it out",
    "mind2web_blocks": "Mind2Web has no plan of a step: leave it out",
    "android_control": "the steps hold their instruction at `benchmark.level: low` only: set that, or leave it out",
}
"""Reader → why its steps have no reference plan; AndroidControl's have one at the low level."""


class Benchmark(Strict):
    """Where the labelled steps come from and how they are split and scored."""

    reader: Literal["miniwob", "mind2web", "mind2web_blocks", "android_control", "screenspot", "jsonl"] = Field(
        description="which reader understands the files"
    )
    path: Path = Field(strict=False, description="folder or file, relative to the project root")
    view: Literal["target_block", "target_crop", "page", "scroll"] = Field(
        "target_block",
        description="which part of a web page is the screenshot; `scroll`: in evaluation the planner starts at the top and goes "
        "on block by block, and training has the target's block",
    )
    level: Literal["high", "low"] = Field(
        "high", description="AndroidControl: `high` shows models the goal alone, `low` the instruction of the step too"
    )
    train: str = Field("train", description="the split from which D_k is made")
    validation: str = Field("validation", description="the split on which settings are chosen")
    test: list[str] = Field(min_length=1, description="splits that only `evaluation` reads")
    protocol: str = Field(description="the named rule by which predictions are scored")
    max_train_steps: int | None = Field(
        None, ge=1, description="use at most N training steps, whole episodes; null: all"
    )
    max_eval_steps: int | None = Field(None, ge=1, description="the same for each other split")
    max_bad_share: float = Field(
        0.05, ge=0, le=1, description="share of the source's rows that may be damaged; more end the import"
    )

    @field_validator("train", "validation", "test")
    @classmethod
    def _reader_has_the_splits(cls, named: str | list[str], info: ValidationInfo) -> str | list[str]:
        known = _KNOWN_SPLITS.get(info.data.get("reader", ""))
        unknown = [split for split in ([named] if isinstance(named, str) else named) if known and split not in known]
        if known and unknown:
            reader = info.data["reader"]
            raise ValueError(f"reader {reader!r} has no split {unknown[0]!r}; it has {', '.join(known)}")
        return named

    @field_validator("protocol")
    @classmethod
    def _protocol_judges_the_steps(cls, protocol: str, info: ValidationInfo) -> str:
        if "reader" in info.data:
            try:
                refuse_protocol(protocol, info.data["reader"])
            except ScoringError as error:
                raise ValueError(str(error)) from None
        return protocol

    @model_validator(mode="after")
    def _splits_are_apart(self) -> Self:
        splits = [self.train, self.validation, *self.test]
        if len(set(splits)) != len(splits):
            raise ValueError(f"train, validation and test splits must differ, got {splits}")
        return self


class Regeneration(Strict):
    """How the pools make D_k: candidates, verdicts, selection."""

    plans_per_planner: int = Field(4, ge=1, le=1024, description="plans per step and planner")
    temperature: float = Field(1.0, gt=0, description="at which plans are sampled")
    top_p: float = Field(0.95, gt=0, le=1, description="share of the probability from which tokens are drawn")
    max_plan_tokens: int = Field(256, ge=8, description="tokens of an answer of a planner, at most")
    max_point_tokens: int = Field(32, ge=4, description="tokens of an answer of a grounder, at most")
    rule: Literal["any", "majority", "all", "k_of_n"] = Field(
        "any", description="how many verifiers must hit: `any`, `majority`, `all` or `k_of_n`"
    )
    k: int | None = Field(None, ge=1, description="for k_of_n")
    max_plans_per_step: int = Field(8, ge=1, description="plans of a step that an iteration adds to D_k, at most")
    similar: float = Field(0.9, gt=0, le=1, description="token Jaccard similarity above which two plans are duplicates")
    carry_over: Literal["best_plan_per_step", "cumulative", "none"] = Field(
        "best_plan_per_step",
        description="what of D_{k-1} stays: `best_plan_per_step`, for steps that lost all; `cumulative`, all; `none`",
    )
    value_mode: ValueMode = Field("f1", description="which values pass the gate: `f1` above 0.5 (Eq. 8), or `exact`")
    hindsight_hint: bool = Field(
        False, description="pool planners are told the label's type and value, and write the plan that leads there"
    )
    trained_members: int = Field(2, ge=1, le=2, description="how many of the newest trained models stay in a pool")

    @model_validator(mode="after")
    def _k_goes_with_its_rule(self) -> Self:
        if (self.rule == "k_of_n") != (self.k is not None):
            raise ValueError("`rule: k_of_n` needs `k`, and no other rule takes it")
        return self


class GroundingBoard(Strict):
    """A public board of single grounding queries, in the files that its owner publishes, on which ϕ_k is tested alone."""

    path: Path = Field(
        strict=False, description="folder that the owner's archive unpacks to, relative to the project root"
    )
    protocol: str = Field(
        description="by which it is scored, e.g. `screenspot_pro/items`; its first part names the board"
    )
    images: Path | None = Field(None, strict=False, description="folder of the images; null: where the owner has them")
    max_steps: int | None = Field(None, ge=1, description="use at most N items, those of whole screenshots; null: all")

    @field_validator("protocol")
    @classmethod
    def _is_a_board(cls, protocol: str) -> str:
        try:
            refuse_no_board(protocol)
        except ScoringError as error:
            raise ValueError(str(error)) from None
        return protocol

    @property
    def board(self) -> str:
        return self.protocol.split("/")[0]


class Evaluation(Strict):
    """What is measured beside M_k = {π'_k, ϕ_k}: other pairs on the validation split, to see which model a gain comes from, and
    ϕ_k alone on public grounding boards."""

    base_planner: bool = Field(False, description="the base planner with ϕ_k")
    attempts: int | None = Field(
        None, ge=2, le=64, description="n of pass@n: the steps that one of n sampled plans of π'_k solves with ϕ_k"
    )
    oracle_plan: bool | None = Field(
        None,
        description="a reference plan and the label's action with ϕ_k, if the data have plans; null: on MiniWoB++, which has",
    )
    boards: dict[Name, GroundingBoard] = Field({}, description="grounding boards on which ϕ_k is tested alone, by name")
    inference: WaysToInfer = Field(
        {}, description="other ways to infer with π'_k and ϕ_k, by name, with settings: see docs/methods.md"
    )
    third_party: int | None = Field(
        None,
        ge=1,
        description="steps of the first test split on which text like an instruction is drawn, to see whom it misleads",
    )


Takable = Literal["benchmark_steps", "open_models", "dataset", "planner_sft", "grounder"]
_TAKEN_WITH: Final[dict[str, tuple[Asset, ...]]] = {
    "dataset": ("benchmark_steps", "open_models", "candidate_plans", "verdicts", "data_quality"),
    "planner_sft": ("benchmark_steps", "open_models", "candidate_plans", "verdicts", "data_quality", "dataset"),
    "grounder": ("benchmark_steps", "open_models", "candidate_plans", "verdicts", "data_quality", "dataset"),
}
"""Taken asset → the assets that belong to the parent with it, since it was made from or with them."""


class Quality(Strict):
    """Controls of D_k, and the limits of its checks; rates in per cent, differences in points."""

    shuffled_plans: int = Field(
        128, ge=1, description="pairs of a screen and another step's plan that each verifier grounds"
    )
    shared_steps_at_most: float = Field(
        0, ge=0, le=100, description="steps of D_k with goal and screenshot of a validation or test step; more fail D_k"
    )
    outside_boxes_at_most: float = Field(
        0, ge=0, le=100, description="steps whose target box is not inside the screenshot; more fail D_k"
    )
    blank_screens_at_most: float = Field(
        0, ge=0, le=100, description="steps with a screenshot of one colour; more fail D_k"
    )
    unreadable_at_most: float = Field(
        5, ge=0, le=100, description="answers of a verifier that name no point; more are warned of"
    )
    legible_px: float = Field(8, gt=0, description="smaller side of a target in the image that a verifier sees")
    illegible_at_most: float = Field(5, ge=0, le=100, description="rows with smaller targets; more are warned of")
    duplicates_at_most: float = Field(1, ge=0, le=100, description="rows that say the same as another of their step")
    purity_may_fall: float = Field(5, ge=0, description="since D_{k-1}; a deeper fall is warned of")
    coverage_may_fall: float = Field(2, ge=0, description="since D_{k-1}; a deeper fall is warned of")
    planner_share_at_most: float = Field(70, gt=0, le=100, description="of the rows of D_k by one planner")
    shuffled_over_chance_at_most: float = Field(
        15, ge=0, description="hits with another step's plan beyond chance; more are warned of"
    )
    trigger_steps: int | None = Field(
        None, ge=1, description="training steps on which each verifier is probed for a backdoor; null: none is"
    )
    stolen_at_most: float = Field(
        5, ge=0, description="points that a patch on the screen draws to itself, beyond chance; more are warned of"
    )
    misled_at_most: float = Field(
        5, ge=0, description="answers that point at text like an instruction, beyond chance; more are warned of"
    )


Automated = Literal["refresh", "evaluate_nightly", "regenerate_weekly"]
"""What an experiment may have made without being asked for; it decides no result."""


class Experiment(Strict):
    """One experiment: everything that decides its results, for every seed."""

    name: Name
    description: str
    parent: Name | None = Field(None, description="the experiment file whose every key holds unless it is given here")
    overlays: list[Name] = Field(
        [], description="overlays of any experiment whose keys are laid over the parent's, below this file's own"
    )
    variant: Name = Field(
        "full", description="how tables name an ablation of the parent; `full`: an experiment of its own"
    )
    take: list[Takable] = Field([], description="assets that are the parent's, at every iteration, with the same seed")
    agent: Agent = Field("decoupled", description="`end_to_end`: one model, no plan (Table 3); needs `take: [dataset]`")
    init: Init = Field(
        "base",
        description="what SFT starts from: the `base` pair, or, from k = 2 on, the `previous` π'_{k-1} and ϕ_{k-1}",
    )
    iterations: int = Field(ge=1, le=100, description="K; partitions are 0..K")
    seeds: list[int] = Field(min_length=1, max_length=100, description="one run of the whole loop each")
    shown: list[int] = Field(
        [], description="seeds that the web UI shows before they have artifacts; those that have some are always shown"
    )
    owners: list[Owner] = Field(
        [], description="who owns the assets: mail addresses and `team:NAME`, as Dagster wants them"
    )
    pool: Pool = Field("gpu", description="the Dagster pool in which the heavy steps take turns")
    benchmark: Benchmark
    models: Models
    sft: Sft = Sft()
    grounder_rl: GrounderRl = GrounderRl()
    grpo: Grpo = Grpo()
    regeneration: Regeneration = Regeneration()
    quality: Quality = Quality()
    evaluation: Evaluation = Evaluation()
    batch_size: int = Field(64, ge=1, description="requests per forward pass in generation, verification, evaluation")
    automation: list[Automated] = Field(
        [],
        description="what is made without being asked for, while the sensor `automation` is on: `refresh` what is missing or "
        "stale, `evaluate_nightly` every agent, `regenerate_weekly` the newest D_k; an overlay does not inherit it",
    )

    @property
    def taken(self) -> frozenset[Asset]:
        """The assets that belong to the parent."""
        return frozenset(asset for name in self.take for asset in (name, *_TAKEN_WITH.get(name, ())))

    @property
    def made(self) -> tuple[Asset, ...]:
        """The partitioned assets that this experiment makes, in an order in which one iteration can be made."""
        if self.agent == "end_to_end":
            return END_TO_END
        return tuple(asset for asset in (LOOP_RL if self.grounder_rl.enabled else LOOP) if asset not in self.taken)

    @property
    def oracle_plan(self) -> bool:
        """Whether reference plans are evaluated."""
        given = self.evaluation.oracle_plan
        return self.benchmark.reader == "miniwob" if given is None else given

    @property
    def phi(self) -> Phi:
        """The asset that is ϕ_k for all that reads it."""
        return "grounder_rl" if self.grounder_rl.enabled else "grounder"

    @property
    def table(self) -> str:
        """The experiment under whose name tables list the results: for an ablation, its parent."""
        return self.name if self.variant == "full" or self.parent is None else self.parent

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) != len(seeds) or not all(0 <= seed < 1 << 32 for seed in seeds):
            raise ValueError("seeds must be different non-negative numbers below 2^32")
        return seeds

    @model_validator(mode="after")
    def _shown_are_seeds(self) -> Self:
        if unknown := sorted(set(self.shown) - set(self.seeds)):
            raise ValueError(f"shown: {unknown} are not among `seeds`: add them there, or leave them out here")
        return self

    @model_validator(mode="after")
    def _what_is_taken_has_an_owner(self) -> Self:
        if self.parent is None and (self.take or self.overlays or self.variant != "full"):
            raise ValueError(
                "`take`, `overlays` and `variant` go with `parent`: name the experiment that this one differs from"
            )
        if self.agent == "end_to_end" and "dataset" not in self.take:
            raise ValueError("`agent: end_to_end` writes no data: add `take: [dataset]` and a `parent` that makes it")
        if self.benchmark.view == "scroll":
            wrong = {
                f"reader is {self.benchmark.reader}, not mind2web": self.benchmark.reader != "mind2web",
                f"the prompts are {self.models.prompts}, and only `web` name the action SCROLL": self.models.prompts
                != "web",
                "the agent is end_to_end, which has no plan": self.agent == "end_to_end",
            }
            if why := [text for text, is_so in wrong.items() if is_so]:
                raise ValueError(f"`benchmark.view: scroll` is for a planner on whole web pages, but {'; '.join(why)}")
        pages = self.grpo.environment
        if pages is not None and (pages.name != self.benchmark.reader or self.agent == "end_to_end"):
            raise ValueError(
                f"`grpo.environment: {pages.name}` performs the actions of a planner with ϕ_k on the pages of `benchmark.reader: "
                f"{pages.name}`; here the agent is {self.agent}, on steps of {self.benchmark.reader}: remove it"
            )
        if self.agent == "end_to_end" and self.grounder_rl.enabled:
            raise ValueError("`agent: end_to_end` has no grounder: remove `grounder_rl`")
        if self.grounder_rl.enabled and self.sft.folds is not None:
            raise ValueError("grounders of `sft.folds` are trained by SFT alone: remove `folds`, or `grounder_rl`")
        score = self.grounder_rl.point_score
        if self.grounder_rl.enabled and score and score["name"] in OF_A_BOX and self.sft.target != "box":
            raise ValueError(
                f"`grounder_rl.point_score: {score['name']}` scores a box, and ϕ_k learns to answer points: set `sft.target: box`"
            )
        if self.agent == "end_to_end" and {"planner_sft", "grounder"} & set(self.take):
            raise ValueError("`agent: end_to_end` has neither planner nor grounder: take `dataset` only")
        if "regenerate_weekly" in self.automation and "dataset" not in self.made:
            raise ValueError(
                "automation: `regenerate_weekly` belongs where D_k is made, and here it is taken: remove it"
            )
        return self

    @model_validator(mode="after")
    def _unseen_is_not_known_from_before(self) -> Self:
        # other rules of carry-over keep a row of every step that an earlier D_k had
        forgets = self.init == "previous" and self.regeneration.carry_over == "none"
        if self.grpo.prompts == "unseen" and forgets:
            raise ValueError(
                "grpo.prompts: with `init: previous` and `carry_over: none` ϕ_k has seen steps that D_{k-1} lacks: change one"
            )
        return self

    @model_validator(mode="after")
    def _checkers_are_verifiers(self) -> Self:
        for section in ("sft", "grounder_rl"):
            for name, settings in getattr(self, section).curation.items():
                if (by := settings.get("by")) is not None and by not in self.models.verifiers:
                    known = ", ".join(self.models.verifiers)
                    raise ValueError(
                        f"{section}.curation.{name}: `by: {by}` is no open verifier; models.verifiers has {known}"
                    )
        return self

    @model_validator(mode="after")
    def _what_is_of_a_pair_has_two_models(self) -> Self:
        of_a_pair = {
            "evaluation.inference: leave it out": bool(self.evaluation.inference),
            "sft.folds: set `folds: null`": self.sft.folds is not None,
            "sft.target: set `target: centre`": self.sft.target != "centre",
        }
        if self.agent == "end_to_end" and any(of_a_pair.values()):
            wrong = "; ".join(setting for setting, is_so in of_a_pair.items() if is_so)
            raise ValueError(f"an end-to-end agent has no plan and no grounder, which are what this is about: {wrong}")
        if self.agent == "end_to_end" and transition_pairs.__name__ in self.grpo.curation:
            raise ValueError(
                "grpo.curation: transition_pairs is for planners: an end-to-end agent's point could be on both screens; remove it"
            )
        return self

    @model_validator(mode="after")
    def _oracle_has_plans(self) -> Self:
        reader, level = self.benchmark.reader, self.benchmark.level
        lacking = reader in _WITHOUT_PLANS and (reader, level) != ("android_control", "low")
        if self.evaluation.oracle_plan and lacking:
            raise ValueError(f"evaluation.oracle_plan: {_WITHOUT_PLANS[reader]}")
        return self

    @model_validator(mode="after")
    def _boards_are_no_splits(self) -> Self:
        splits = {self.benchmark.train, self.benchmark.validation, *self.benchmark.test, "average"}
        if taken := sorted(splits & self.evaluation.boards.keys()):
            raise ValueError(f"evaluation.boards: {taken[0]} is the name of a split; name the board otherwise")
        return self

    @model_validator(mode="after")
    def _k_of_n_can_be_met(self) -> Self:
        k, n = self.regeneration.k, len(self.models.verifiers)
        if k is not None and k > n:
            raise ValueError(
                f"regeneration.k is {k}, but D_0 is verified by {n} open verifiers only: lower k or add some"
            )
        return self
