"""The settings of training: SFT, and GRPO of the planner and of the grounder with its plug-ins."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from coepg_dagster.experiment.strict import Strict
from coepg_dagster.plugins import Chosen, Kind, Named, chosen, chosen_for, find
from coepg_dagster.rewards import losses  # its functions are found by name
from coepg_dagster.rewards.answers import refuse_inputs
from coepg_dagster.rewards.cdrem import ValueMode
from coepg_dagster.rewards.composite import Composite, Role
from coepg_dagster.rewards.estimators import GIVEN, by_episodes, drop_spreadless, is_estimator, maxrl
from coepg_dagster.strategies.curation import Prompts, Rows, transition_pairs

Attention = Literal["sdpa", "flash_attention_2", "eager"]
"""`sdpa`: the kernels of torch; `flash_attention_2`: the package flash-attn; `eager`: plain matrix products."""

RowStrategies = Annotated[Named, AfterValidator(partial(chosen_for, Rows, "data"))]
PromptStrategies = Annotated[Named, AfterValidator(partial(chosen_for, Prompts, "data"))]

GrounderTarget = Literal["centre", "box"]
"""What ϕ learns to answer: `centre`, the point in the middle of the box; `box`, the box, which is read as its centre."""


class Lora(Strict):
    """Low-rank adapters (LoRA) of every linear layer, merged into the weights after training."""

    rank: int = Field(64, ge=1, description="r")
    alpha: float = Field(64.0, gt=0, description="adapters are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of SFT only")


class Sft(Strict):
    """Supervised fine-tuning of π_k and ϕ_k on D_{k-1} (TRL's SFTTrainer), from the models that `init` names."""

    epochs: float = Field(3.0, gt=0, le=10_000, description="passes over D_{k-1}")
    max_steps: int | None = Field(None, ge=1, description="optimizer steps, whatever `epochs` says; null: as it says")
    batch_size: int = Field(96, ge=1, description="rows per optimizer step, over all devices")
    micro_batch_size: int = Field(4, ge=1, description="rows per device and forward pass")
    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="share of the steps with linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    freeze_vision: bool = Field(False, description="leave the vision tower as it is")
    recompute: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of layers whose activations a GPU computes again: 1 needs least memory, 0 is fastest",
    )
    compile: bool = Field(False, description="compile each layer on a GPU: faster after a minute")
    max_tokens: int | None = Field(
        None, ge=16, description="rows with more tokens, visual ones included, are dropped and counted; null: none"
    )
    lora: Lora | None = Field(None, description="train adapters instead of the weights; null: full fine-tuning")
    attention: Attention = Field(
        "sdpa", description="`sdpa`, `flash_attention_2` or `eager`; another one in use is an error"
    )
    target: GrounderTarget = Field(
        "centre", description="what ϕ_k learns to answer: the `centre` of the box, or the `box`"
    )
    folds: int | None = Field(
        None,
        ge=2,
        le=10,
        description="n more grounders, each trained without a part of the episodes, verify that part for ϕ_k; null: ϕ_k does",
    )
    curation: RowStrategies = Field(
        {}, description="data strategies for the rows of D_{k-1}, by name, with settings: see docs/methods.md"
    )
    packing: bool = Field(
        False,
        description="the rows of a step share a row of a pass, in which its screenshot is computed once; the batch sizes are "
        "means then",
    )
    probe_steps: int = Field(
        128,
        ge=0,
        description="steps of training, and of validation, that base and result are compared on; 0: they are not",
    )

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            )
        return self

    @model_validator(mode="after")
    def _packed_rows_have_a_mask(self) -> Self:
        if self.packing and self.attention == "flash_attention_2":
            raise ValueError("packing: `attention: flash_attention_2` takes no mask for packed rows: set `sdpa`")
        return self


MIN_LR_RATE: Final = 0.1
"""The end of the schedule `cosine_with_min_lr`, as a share of the learning rate."""
VISUAL_MEMORY: Final = 1 << 30
"""Limit of the visual embeddings that a process holds, in bytes; the newest are kept."""


class Replay(Strict):
    """ARPO's experience replay, by its code's values: which answers are kept, and which groups get one of them."""

    size: int = Field(8, ge=1, description="answers kept for each prompt, first in, first out")
    success: float = Field(0.1, ge=0, description="the reward above which an answer is kept")
    below_mean: float = Field(0.2, gt=0, description="groups with a lower mean reward get one, if also …")
    below_std: float = Field(0.05, gt=0, description="… the standard deviation of their rewards is lower than this")


class Environment(Strict):
    """Live pages that reward GRPO in the place of graders (`training.page_reward`)."""

    name: Literal["miniwob"] = Field("miniwob", description="the pages, which must be those of `benchmark.reader`")
    episodes: Literal["recorded", "whole"] = Field(
        "recorded",
        description="`recorded`: a rollout is one action at a recorded step; `whole`: it is an episode, played from its first "
        "page to its end, and the page's reward is that of each of its steps",
    )
    max_steps: int = Field(8, ge=1, le=64, description="whole: steps after which an episode ends without a reward")
    processes: int = Field(8, ge=1, le=256, description="browsers, each in a process of its own")
    seconds: float = Field(60.0, gt=0, description="after which a browser that gives no answer is replaced")


class PolicyTraining(Strict):
    """Training of a policy by GRPO (TRL's GRPOTrainer), with the plug-ins that its reward and objective are made of."""

    enabled: bool = True
    prompts_per_step: int = Field(42, ge=1, description="prompts per optimizer step")
    group_size: int = Field(7, ge=2, le=1024, description="G, rollouts per prompt")
    micro_batch_size: int = Field(
        7, ge=1, description="rollouts per device and forward pass; a group is one row, and never cut"
    )
    rollouts: Literal["transformers", "vllm"] = Field(
        "transformers", description="who samples them: `transformers` or `vllm`"
    )
    max_steps: int | None = Field(None, ge=1, description="ends training earlier, or later, than `num_train_epochs`")
    num_train_epochs: int = Field(1, ge=1, description="passes over the prompts, each in another order")
    num_iterations: int = Field(1, ge=1, description="μ, updates with the same rollouts")
    learning_rate: float = Field(5e-7, gt=0, description="peak learning rate")
    lr_scheduler_type: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = Field(
        "cosine",
        description="`cosine`, `cosine_with_min_lr` (ends at a tenth of the rate), `linear` or `constant_with_warmup`",
    )
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="share of the steps with linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    adam_beta2: float = Field(0.999, gt=0, lt=1, description="β2 of AdamW")
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo"] = Field(
        "grpo",
        description="TRL's loss; `grpo`, `dr_grpo`, `dapo` and `bnpo` differ in how tokens are averaged, `cispo`, `sapo` and "
        "`luspo` in how the ratio counts",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="whose spread an advantage is divided by: that of its `group`, of the `batch`, or `none`"
    )
    temperature: float = Field(0.9, gt=0, description="at which rollouts are sampled")
    kl_beta: float = Field(0.01, ge=0, description="β, weight of KL(π‖π_k)")
    clip_epsilon: float = Field(0.2, gt=0, lt=1, description="ε, the clip range of the probability ratio")
    epsilon_high: float | None = Field(None, gt=0, description="the upper clip; null: `clip_epsilon` too")
    delta: float | None = Field(
        None, gt=0, description="limit of the ratio where the advantage is negative (two-sided clipping); null: none"
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="of what the probability ratio is: of each `token`, or of the `sequence` (GSPO)"
    )
    max_plan_tokens: int = Field(256, ge=8, description="tokens of a sampled answer, at most")
    max_tokens: int | None = Field(
        None, ge=16, description="prompts that could become longer with their plan are dropped and counted; null: none"
    )
    lora: Lora | None = Field(None, description="train adapters instead of the weights; null: full fine-tuning")
    attention: Attention = Field(
        "sdpa", description="`sdpa`, `flash_attention_2` or `eager`; another one in use is an error"
    )
    freeze_vision: bool = Field(True, description="leave the vision tower as it is")
    point_score: Chosen | None = Field(
        None, description="reward plug-in that scores a predicted place, in the place of Acc_j (Eq. 3); null: `hit`"
    )
    terms: dict[str, Chosen] = Field(
        {}, description="reward plug-ins about the answer, by name, each with its `weight` and settings"
    )
    combiner: Chosen | None = Field(
        None, description="combiner plug-in that makes one reward of the parts; null: `gate` (Eq. 9)"
    )
    advantage: list[Chosen] = Field(
        [], description="advantage plug-ins that follow Eq. 10, in their order; empty: none"
    )
    policy_loss: Chosen | None = Field(None, description="policy_loss plug-in: a factor of β for each rollout; null: 1")
    max_num_gen_batches: int = Field(
        1,
        ge=1,
        description="DAPO's dynamic sampling, by verl's name: how often a step samples, at most, until all its groups have "
        "spread; groups without are asked another prompt. 1: never again",
    )
    replay: Replay | None = Field(
        None, description="ARPO: earlier successes replace the first answer of groups without any; null: they do not"
    )

    _role: ClassVar[Role] = "planner"

    @field_validator("point_score", "combiner", "policy_loss", mode="before")
    @classmethod
    def _one_plugin(cls, value: Any, info: ValidationInfo) -> Any:
        kinds: dict[str | None, Kind] = {"point_score": "reward", "combiner": "combiner", "policy_loss": "policy_loss"}
        return None if value is None else chosen(kinds[info.field_name], value)

    @field_validator("terms", mode="before")
    @classmethod
    def _plugins_with_weights(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("give a mapping, e.g. `{format: {weight: 0.1}}`")
        terms = {}
        for name, given in value.items():
            settings = {"weight": given} if isinstance(given, int | float) else {} if given is None else given
            if not isinstance(settings, dict):
                raise ValueError(f"{name!r:.80}: give a weight, or a mapping with `weight` and settings")
            terms[name] = chosen("reward", {**settings, "name": name}, weight=(float, inspect.Parameter.empty))
        return terms

    @field_validator("advantage", mode="before")
    @classmethod
    def _plugins_in_order(cls, value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("give a list, e.g. `[rloo, {name: sngs, kappa: 1.0}]`")
        made = [chosen("advantage", each) for each in value]
        for each in made:
            refuse_inputs(find("advantage", each["name"]), GIVEN)
        late = [each["name"] for each in made[1:] if is_estimator(each["name"])]
        if late:
            raise ValueError(f"{late[0]} computes advantages anew, so that what comes before it is lost: put it first")
        return made

    @property
    def composite(self) -> Composite:
        """The reward that the plug-ins make."""
        given = {"point_score": self.point_score, "combiner": self.combiner}
        return Composite(terms=self.terms, **{name: choice for name, choice in given.items() if choice is not None})

    def by_labels(self) -> Self:
        """The same settings with Eq. 9 as the reward: what measures a policy, whatever it is trained with."""
        plain: dict[str, Any] = {"point_score": None, "terms": {}, "combiner": None, "environment": None}
        return self.model_copy(update={name: value for name, value in plain.items() if name in type(self).model_fields})

    @model_validator(mode="after")
    def _plugins_go_together(self) -> Self:
        self.composite.refuse(self._role)
        if self.policy_loss:
            refuse_inputs(find("policy_loss", self.policy_loss["name"]), losses.GIVEN)
        if not self.kl_beta and self.policy_loss:
            raise ValueError(f"policy_loss {self.policy_loss['name']} is a factor of `kl_beta`, which is 0")
        if self.kl_beta and any(each["name"] == drop_spreadless.__name__ for each in self.advantage):
            raise ValueError("advantage: drop_spreadless leaves groups out, but their KL term counts: set `kl_beta: 0`")
        needs = {maxrl.__name__, losses.guirlvg_kl.__name__}
        negative = [each["name"] for each in (*self.advantage, self.policy_loss) if each and each["name"] in needs]
        if negative and self.composite.lowest < 0:
            raise ValueError(
                f"{negative[0]} needs rewards of 0 or more, and these go down to {self.composite.lowest:g}: remove it, or the "
                "negative weights and the point scores below 0"
            )
        if compared := by_episodes(self.advantage):
            if self._role == "grounder":
                raise ValueError(f"advantage: {compared[0]} is for steps of an episode; a grounder's prompts are plans")
            if self.max_num_gen_batches > 1:
                raise ValueError(
                    f"max_num_gen_batches asks prompts of other episodes, and advantage {compared[0]} compares the steps of one: "
                    "remove one of them"
                )
        if self.lora is not None and self.lora.dropout:
            raise ValueError(
                "lora.dropout is of SFT only: rollouts are sampled without it, and an update with it would not fit them: "
                "set `dropout: 0`"
            )
        return self

    @model_validator(mode="after")
    def _loss_uses_its_settings(self) -> Self:
        unused = {"cispo": ("clip_epsilon", "delta"), "sapo": ("clip_epsilon", "epsilon_high", "delta")}
        for name in unused.get(self.loss_type, ()):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: the loss `{self.loss_type}` does not use it; leave it at its default")
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            raise ValueError("epsilon_high: the loss `cispo` limits the ratio itself by it: set 1 or more, e.g. 4.0")
        by_sequence = self.importance_sampling_level == "sequence"
        if by_sequence and self.loss_type in ("dr_grpo", "dapo", "bnpo", "cispo"):
            raise ValueError(
                f"importance_sampling_level: the loss `{self.loss_type}` would weigh a ratio of the `sequence` by its length: "
                "set `token`, or `loss_type: grpo`"
            )
        if self.loss_type == "luspo" and not by_sequence:
            raise ValueError("importance_sampling_level: the loss `luspo` is one of the `sequence`: set that")
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        rollouts = self.prompts_per_step * self.group_size
        if rollouts % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} does not divide the {rollouts} rollouts of a step"
            )
        return self

    def pass_size(self, *, packs: bool, processes: int = 1) -> int:
        """Number of rollouts of a pass: `micro_batch_size`, rounded up to whole groups if groups are packed.

        Args:
            packs: whether a group is one row.
            processes: number of processes that share an optimizer step.
        """
        groups, torn = divmod(self.prompts_per_step, processes)
        if not packs or torn:
            return self.micro_batch_size
        wanted = -(-self.micro_batch_size // self.group_size)
        return self.group_size * min(
            n for n in range(1, groups + 1) if groups % n == 0 and (n >= wanted or n == groups)
        )


class GrounderRl(PolicyTraining):
    """GRPO of ϕ_k after its supervised fine-tuning, on the plans of D_{k-1}: the reward is the score of its own place.

    The paper trains its grounder by supervised fine-tuning only, so this is off by default.
    """

    enabled: bool = Field(False, description="true: ϕ_k is the grounder after GRPO")
    max_plan_tokens: int = Field(32, ge=4, description="tokens of a sampled answer, at most")
    curation: RowStrategies = Field(
        {}, description="data strategies for the rows that are its prompts, by name, with settings: see docs/methods.md"
    )

    _role: ClassVar[Role] = "grounder"


class Grpo(PolicyTraining):
    """GRPO of π'_k from π_k with the C-DREM reward (Eq. 3 to 10; TRL's GRPOTrainer)."""

    enabled: bool = Field(True, description="false: π'_k is π_k (ablation `no GRPO`)")
    prompts: Literal["dataset", "unseen"] = Field(
        "dataset",
        description="training steps to ask about: `dataset`, those with a row in D_{k-1}; `unseen`, those without one",
    )
    max_prompts: int | None = Field(
        None, ge=1, description="at most so many of these steps, whole episodes, always the same; null: all"
    )
    curation: PromptStrategies = Field(
        {}, description="data strategies for these prompts, by name, with settings: see docs/methods.md"
    )
    validate_every: int | None = Field(
        None,
        ge=1,
        description="steps between two validations, of which the best weights are kept; null: the last",
    )
    validation_steps: int = Field(256, ge=1, description="how many steps of the validation split, whole episodes")
    probe_steps: int = Field(
        128,
        ge=0,
        description="steps of training, and of validation, that π_k and π'_k are compared on; 0: they are not",
    )
    probe_between: int = Field(4, ge=0, description="number of such comparisons between the first step and the last")
    confidence: Literal["probability", "log_probability", "constant"] = Field(
        "probability",
        description="c_j of Eq. 5: `probability`, exp(mean log p); `log_probability`, the literal equation; `constant`, 1",
    )
    confidence_temperature: float = Field(
        1.0, gt=0, description="τ, w_j ∝ exp(σ_j c_j / τ); 1 is Eq. 5, below 1 the surer grounders weigh more"
    )
    ensemble: bool = Field(True, description="false: ϕ_k alone rewards (ablation `w/o C-DREM`)")
    own_prior: float = Field(2.0, ge=0, description="σ of ϕ_k")
    verifier_prior: float = Field(1.0, ge=0, description="σ of each open verifier")
    value_mode: ValueMode = Field("f1", description="which values are right: `f1` above 0.5 (Eq. 8), or `exact`")
    environment: Environment | None = Field(
        None,
        description="live pages that perform the action at ϕ_k's point, and decide the reward; null: graders do, Eq. 9",
    )

    @model_validator(mode="after")
    def _prompts_fill_a_step(self) -> Self:
        if self.max_prompts is not None and self.max_prompts < self.prompts_per_step:
            raise ValueError(
                f"max_prompts {self.max_prompts} is below the {self.prompts_per_step} prompts_per_step: raise it, or lower those"
            )
        return self

    @property
    def plays(self) -> Environment | None:
        """The live pages on which a rollout is a whole episode; None: a rollout is one answer."""
        return self.environment if self.environment is not None and self.environment.episodes == "whole" else None

    def pass_size(self, *, packs: bool, processes: int = 1) -> int:
        """As for other policies; of whole episodes so many that their steps, at most, are `micro_batch_size` rows."""
        if self.plays is None:
            return super().pass_size(packs=packs, processes=processes)
        most = max(1, self.micro_batch_size // self.plays.max_steps)
        return max(n for n in range(1, most + 1) if self.prompts_per_step * self.group_size % n == 0)

    @model_validator(mode="after")
    def _whole_episodes_are_sampled_here(self) -> Self:
        wrong = {
            "max_num_gen_batches: 1": self.max_num_gen_batches > 1,
            "replay: null": self.replay is not None,
            "rollouts: transformers": self.rollouts != "transformers",
            "max_tokens: null": self.max_tokens is not None,
        }
        if self.plays and any(wrong.values()):
            raise ValueError(
                "`environment: {episodes: whole}` asks at each step what the pages then show: set "
                + ", ".join(setting for setting, is_so in wrong.items() if is_so)
            )
        for each in self.advantage:
            if self.plays and "areas" in find("advantage", each["name"]).inputs:
                raise ValueError(
                    f"advantage: {each['name']} asks for a label's target, which a step of a whole episode has not: remove it"
                )
        return self

    @model_validator(mode="after")
    def _the_page_alone_rewards(self) -> Self:
        named = [name for name in ("point_score", "terms", "combiner") if getattr(self, name)]
        if self.environment is not None and named:
            raise ValueError(f"`environment` decides the reward alone: remove {' and '.join(named)}")
        if self.environment is not None and transition_pairs.__name__ in self.curation:
            raise ValueError(
                "`environment` performs actions for a goal, which transition_pairs have not: remove one of them"
            )
        return self
