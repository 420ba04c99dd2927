"""An experiment file (YAML) as pydantic models. Unknown keys, wrong types and impossible combinations are errors.

Everything that decides a result stands here; where a run's processes live (launcher, device, limits) is a resource.
Each error names the file, the key and what to do, and comes before any model is touched.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from coepg_dagster import yaml_files
from coepg_dagster.capabilities import EngineName, require
from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.protocols import refuse_no_board, refuse_protocol
from coepg_dagster.geometry import Space
from coepg_dagster.plugins import Chosen, Kind, Named, chosen, chosen_for, find
from coepg_dagster.prompts import Style
from coepg_dagster.provenance import END_TO_END, LOOP, LOOP_RL, Agent, Asset, Init, Phi
from coepg_dagster.readers.mind2web import SPLITS as MIND2WEB_SPLITS
from coepg_dagster.refusal import Refusal
from coepg_dagster.rewards import losses  # its functions are found by name
from coepg_dagster.rewards.answers import refuse_inputs
from coepg_dagster.rewards.cdrem import ValueMode
from coepg_dagster.rewards.composite import Composite, Role
from coepg_dagster.rewards.estimators import GIVEN, by_episodes, drop_spreadless, is_estimator
from coepg_dagster.rewards.terms import OF_A_BOX
from coepg_dagster.strategies.curation import Prompts, Rows, transition_pairs
from coepg_dagster.strategies.inference import Agent as AskedAgent

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)]
"""Names become parts of asset keys and of paths."""
Pool = Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=60)]
"""As Dagster wants the names of its pools."""
Owner = Annotated[
    str, StringConstraints(pattern=r"^(team:\S+|\w[\w.%+-]*@[A-Za-z0-9.-]+\.[A-Za-z]{2,7})$", max_length=100)
]
"""As Dagster wants the owners of assets."""


class ExperimentError(Refusal, ValueError):
    """An experiment file that cannot be used; the message names file and key, and says what to do."""


class Strict(BaseModel):
    """Base of all configuration: unknown keys and other types are refused, values cannot be changed afterwards.

    No type stands for another, but that a whole number may stand for a real one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    def fingerprint(self) -> str:
        """Twelve hex digits that change with any value."""
        return fingerprint(self.model_dump(mode="json"))


def fingerprint(value: Any) -> str:
    """Twelve hex digits of the SHA-256 of `value` as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


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
    validation: str = Field("validation", description="the split for every choice")
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


def refuse_keys(base_url: str | None, api_key_env: str | None) -> None:
    """Raises ValueError, which does not repeat it, where the address of an endpoint or the name of a variable holds a key."""
    url = urlsplit(base_url or "")
    if url.username or url.password or url.query:
        raise ValueError("base_url must hold no key: name its environment variable in `api_key_env`")
    if api_key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", api_key_env):
        raise ValueError("api_key_env is the *name* of an environment variable, not the key")


def _no_address(model: str) -> str:
    if "://" in model:
        raise ValueError("an address is no model: name a folder, or `OWNER/NAME` of the hub")
    return model


Checkpoint = Annotated[str, StringConstraints(min_length=1), AfterValidator(_no_address)]
"""A folder or a model of the hub."""


class Member(Strict):
    """An open model of a pool, and the engine that answers for it. Plain text is the model alone."""

    model: Checkpoint = Field(
        description="local folder or hub model (`OWNER/NAME`, or `OWNER/NAME@REVISION`); for `openai`, its name at the endpoint",
    )
    engine: EngineName | None = Field(None, description="null: as `models.engine` says")
    processor: Checkpoint | None = Field(
        None, description="openai: folder or hub name of the served model's processor; null: `model`"
    )
    base_url: str | None = Field(None, description="openai: the endpoint, up to /v1")
    api_key_env: str | None = Field(None, description="openai: the environment variable that holds the key")
    in_flight: int = Field(16, ge=1, le=1024, description="openai: requests at a time, of each process")
    timeout_seconds: float = Field(120.0, gt=0, description="openai: after which a request has failed")

    @model_validator(mode="before")
    @classmethod
    def _plain_text(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _settings_go_with_an_endpoint(self) -> Self:
        if self.engine != "openai":
            given = sorted(ENDPOINT & self.model_fields_set)
            if given:
                raise ValueError(
                    f"{', '.join(given)}: only `engine: openai` has an endpoint; remove it, or set `engine`"
                )
            return self
        url = urlsplit(self.base_url or "")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("`engine: openai` needs `base_url`, e.g. `http://10.0.0.7:8000/v1`")
        refuse_keys(self.base_url, self.api_key_env)
        return self

    @property
    def checkpoint(self) -> str:
        """The folder or hub model whose files are read here; for a model behind an endpoint, its processor."""
        return self.processor or self.model

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> Any:
        default = {name: field.default for name, field in type(self).model_fields.items()}
        changed = {name: value for name, value in dump(self).items() if value != default[name]}
        return self.model if set(changed) == {"model"} else changed

    def without_place(self) -> Member:
        """The member with only the settings that decide its answers: without its address and limits of requests."""
        return self.model_copy(update={name: type(self).model_fields[name].default for name in PLACE})


PLACE: Final = frozenset({"base_url", "api_key_env", "in_flight", "timeout_seconds"})
ENDPOINT: Final = PLACE | {"processor"}


class Models(Strict):
    """The checkpoints that an experiment starts from: local folders or hub models (`OWNER/NAME@REVISION`), safetensors only."""

    base_planner: Checkpoint
    base_grounder: Checkpoint
    planners: dict[Name, Member] = Field(description="members of the planner pool Π besides the trained ones")
    verifiers: dict[Name, Member] = Field(description="members of the verifier pool Φ besides the trained ones")
    judge: Member | None = Field(
        None, description="a grounder in no pool, that judges every π'_k beside ϕ_k, on all splits; null: none"
    )
    engine: EngineName = Field("transformers", description="what answers for checkpoints: `transformers` or `vllm`")
    prompts: Style = Field("web", description="`web`, `mobile`, or `compact` for models trained on nothing else")
    coordinates: Space = Field(
        Space.RESIZED, strict=False, description="space in which grounders answer (Qwen2.5-VL: resized)"
    )
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    @field_validator("base_planner", "base_grounder", mode="before")
    @classmethod
    def _base_is_trained(cls, base: Any) -> Any:
        if isinstance(base, dict) and base.get("engine") in ("vllm", "openai"):
            require(base["engine"], "training")
        return base

    @field_validator("engine")
    @classmethod
    def _serves_what_is_trained(cls, engine: EngineName) -> EngineName:
        require(engine, "own checkpoints")
        return engine

    @field_validator("planners", "verifiers")
    @classmethod
    def _pool_has_members(cls, pool: dict[str, Member]) -> dict[str, Member]:
        if not pool:
            raise ValueError("a pool needs at least one member: name an open model, e.g. `{qwen_7b: Qwen/…}`")
        taken = [name for name in pool if re.fullmatch(r"(planner|grounder)_\d+", name)]
        if taken:
            raise ValueError(f"{', '.join(taken)}: the trained members have such names; call the open model otherwise")
        return pool

    @model_validator(mode="after")
    def _judge_rewards_nobody(self) -> Self:
        rewarding = [name for name, member in self.verifiers.items() if self.judge and member.model == self.judge.model]
        if rewarding:
            raise ValueError(
                f"judge: it is the verifier {rewarding[0]}, which rewards what it would judge; use another"
            )
        return self

    @field_validator("coordinates")
    @classmethod
    def _whole_numbers(cls, space: Space) -> Space:
        if space is Space.UNIT:
            raise ValueError("grounders answer in whole numbers, which say nothing in `unit` space: use `norm_1000`")
        return space

    def engine_of(self, member: Member) -> EngineName:
        """The engine of a member of a pool."""
        return member.engine or self.engine

    def named(self) -> dict[str, Member]:
        """Every model by its name in the record: the base pair, `planners/NAME` and `verifiers/NAME`."""
        return {
            "base_planner": Member(model=self.base_planner),
            "base_grounder": Member(model=self.base_grounder),
            **{f"planners/{name}": member for name, member in self.planners.items()},
            **{f"verifiers/{name}": member for name, member in self.verifiers.items()},
            **({"judge": self.judge} if self.judge else {}),
        }

    def checkpoints(self) -> list[str]:
        """Every checkpoint that is loaded here: local folders and hub models, each once."""
        return list(dict.fromkeys(member.model for member in self.named().values() if member.engine != "openai"))

    def without_places(self) -> Models:
        """The same models without the addresses of endpoints (`Member.without_place`)."""
        pools = {"planners": self.planners, "verifiers": self.verifiers}
        return self.model_copy(
            update={
                "judge": self.judge and self.judge.without_place(),
                **{
                    pool: {name: member.without_place() for name, member in members.items()}
                    for pool, members in pools.items()
                },
            }
        )


class Serving(Strict):
    """How vLLM runs here; no setting changes an answer."""

    python: str | None = Field(None, description="interpreter that has vLLM, for servers; null: vLLM is installed here")
    memory: float = Field(0.85, gt=0, le=1, description="share of a GPU for all vLLM models that are open at once")
    context: int = Field(16384, ge=256, description="longest prompt and answer, in tokens, visual ones included")
    arguments: list[str] = Field(default=[], description="more arguments of the servers")
    start_minutes: float = Field(20.0, gt=0, description="a server that does not answer by then is given up")
    in_flight: int = Field(64, ge=1, description="requests at a time, of each server")
    rollout_memory: float = Field(
        0.3, gt=0, le=1, description="share of a GPU for the vLLM that samples GRPO's rollouts"
    )
    rollout_sleep: bool = Field(True, description="it gives that memory up while the policy is updated")
    rollout_server: str | None = Field(
        None, description="a vLLM server on other GPUs that samples them instead, e.g. `http://127.0.0.1:8000`"
    )

    @model_validator(mode="after")
    def _holds_no_key(self) -> Self:
        # every setting is in the metadata of what was made with it
        refuse_keys(self.rollout_server, None)
        if any(re.match(r"--(api[-_]key|hf[-_]token)\b", argument) for argument in self.arguments):
            raise ValueError("arguments must hold no key: set VLLM_API_KEY or HF_TOKEN where Dagster is started")
        return self


Attention = Literal["sdpa", "flash_attention_2", "eager"]
"""`sdpa`: the kernels of torch; `flash_attention_2`: the package flash-attn; `eager`: plain matrix products."""


GrounderTarget = Literal["centre", "box"]
"""What ϕ learns to answer: `centre`, the point in the middle of the box; `box`, the box, which is read as its centre."""


class Lora(Strict):
    """Low-rank adapters (LoRA) of every linear layer, merged into the weights after training."""

    rank: int = Field(64, ge=1, description="r")
    alpha: float = Field(64.0, gt=0, description="an adapter counts alpha / rank times")
    dropout: float = Field(0.0, ge=0, lt=1)


class Sft(Strict):
    """Supervised fine-tuning of π_k and ϕ_k on D_{k-1} (TRL's SFTTrainer), from the models that `init` names."""

    epochs: float = Field(3.0, gt=0, le=10_000, description="passes over D_{k-1}")
    max_steps: int | None = Field(None, ge=1, description="optimizer steps, whatever `epochs` says; null: as it says")
    batch_size: int = Field(96, ge=1, description="rows per optimizer step, over all devices")
    micro_batch_size: int = Field(4, ge=1, description="rows per device and forward pass")
    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="share of the steps in which the rate rises")
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
    curation: Named = Field(
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

    @field_validator("curation")
    @classmethod
    def _strategies_are_for_rows(cls, named: Named) -> Named:
        return chosen_for(Rows, "data", named)

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
    num_iterations: int = Field(1, ge=1, description="μ, updates by the same rollouts")
    learning_rate: float = Field(5e-7, gt=0, description="peak learning rate")
    lr_scheduler_type: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = Field(
        "cosine",
        description="`cosine`, `cosine_with_min_lr` (ends at a tenth of the rate), `linear` or `constant_with_warmup`",
    )
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="share of the steps in which the rate rises")
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
    clip_epsilon: float = Field(0.2, gt=0, lt=1, description="ε, how far the probability ratio counts")
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
        if compared := by_episodes(self.advantage):
            if self._role == "grounder":
                raise ValueError(f"advantage: {compared[0]} is for steps of an episode; a grounder's prompts are plans")
            if self.max_num_gen_batches > 1:
                raise ValueError(
                    f"max_num_gen_batches asks prompts of other episodes, and advantage {compared[0]} compares the steps of one: "
                    "remove one of them"
                )
        if self.delta is not None and self.loss_type in ("cispo", "sapo"):
            raise ValueError(f"delta: the loss `{self.loss_type}` does not use it; remove it")
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
    curation: Named = Field(
        {}, description="data strategies for the rows that are its prompts, by name, with settings: see docs/methods.md"
    )

    _role: ClassVar[Role] = "grounder"

    @field_validator("curation")
    @classmethod
    def _strategies_are_for_rows(cls, named: Named) -> Named:
        return chosen_for(Rows, "data", named)


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
    curation: Named = Field(
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

    @field_validator("curation")
    @classmethod
    def _strategies_are_for_prompts(cls, named: Named) -> Named:
        return chosen_for(Prompts, "data", named)


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
    max_plans_per_step: int = Field(8, ge=1, description="rows per step of D_k")
    similar: float = Field(0.9, gt=0, le=1, description="plans with a token Jaccard above this are one plan")
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
            raise ValueError("`k` goes with `rule: k_of_n`, and only with it")
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
    inference: Named = Field(
        {}, description="other ways to infer with π'_k and ϕ_k, by name, with settings: see docs/methods.md"
    )
    third_party: int | None = Field(
        None,
        ge=1,
        description="steps of the first test split on which text like an instruction is drawn, to see whom it misleads",
    )

    @field_validator("inference")
    @classmethod
    def _ways_are_known(cls, named: Named) -> Named:
        return chosen_for(AskedAgent, "inference", named)


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
    def _inference_has_two_models(self) -> Self:
        if self.agent == "end_to_end" and self.evaluation.inference:
            raise ValueError("evaluation.inference: an end-to-end agent has no plan and no grounder: leave it out")
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


def load_experiment(path: Path) -> Experiment:
    """The experiment in the YAML file `path`, named as the file. Raises ExperimentError.

    A file with a `parent` holds only what differs: mappings are merged key by key; other values, and pools, replace those of
    the parent. `description`, `take`, `overlays`, `variant`, `agent`, `shown` and `automation` are not inherited. With
    `overlays` it holds what these files hold too, wherever their own parents are; two that differ in a key which this file
    does not give are an error.
    """
    return _load(path, ())


_NOT_INHERITED: Final = ("description", "parent", "take", "overlays", "variant", "agent", "shown", "automation")
"""Keys that an overlay does not inherit."""
_WHOLE: Final = ("planners", "verifiers", "point_score", "combiner", "policy_loss")
"""Mappings that are not merged: a pool in an overlay has exactly the members given there, a plug-in its own settings."""


def _load(path: Path, children: tuple[Path, ...]) -> Experiment:
    raw, parent = _read(path), None
    if "name" in raw:
        raise ExperimentError(f"{path}: key `name`: an experiment is named by its file; remove the key")
    if raw.get("parent") is not None:
        parent_file = _parent_file(path, raw["parent"])
        if parent_file in (path, *children):
            raise ExperimentError(f"{path}: key `parent`: {raw['parent']} has this file as its parent, or is it")
        try:
            parent = _load(parent_file, (path, *children))
        except ExperimentError as error:
            raise ExperimentError(f"{path}: key `parent`: {raw['parent']} cannot be used: {error}") from None
        inherited = parent.model_dump(mode="json", exclude={"name", *_NOT_INHERITED}, exclude_unset=True)
        raw = _merged(inherited, _with_overlays(path, raw, (path, *children)))
    experiment = checked(Experiment, raw | {"name": path.stem}, path)
    if parent is not None:
        _check_overlay(path, experiment, parent)
    return experiment


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml_files.read(path)
    except yaml_files.BadYaml as error:
        raise ExperimentError(str(error)) from None
    if not isinstance(raw, dict):
        raise ExperimentError(f"{path}: the file must hold a mapping of keys, see experiments/sandbox.yaml")
    return raw


ABLATIONS: Final = "ablations"
"""Folder below `experiments/` whose variants form a separate code location."""
PLUGINS: Final = "plugins"
"""The same for an overlay of each plug-in, which the web UI does not load by itself."""


def _parent_file(path: Path, name: Any) -> Path:
    """The parent's file: beside the overlay, or for one in a folder of overlays one folder above."""
    folders = (path.parent, path.parent.parent) if path.parent.name in (ABLATIONS, PLUGINS) else (path.parent,)
    return _file_named(path, "parent", name, folders)


def _file_named(path: Path, key: str, name: Any, folders: Sequence[Path]) -> Path:
    """The first file of that name in `folders`. Raises ExperimentError, which names the `key` of `path`."""
    try:
        TypeAdapter(Name).validate_python(name, strict=True)
    except ValidationError:
        raise ExperimentError(f"{path}: key `{key}`: {name!r:.80} is no name of an experiment; correct it") from None
    files = [folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()]
    if not files:
        raise ExperimentError(
            f"{path}: key `{key}`: there is no {name}.yaml in {' or '.join(map(str, folders))}; correct the name"
        )
    return files[0]


def _with_overlays(path: Path, raw: dict[str, Any], children: tuple[Path, ...]) -> dict[str, Any]:
    """`raw`, the content of `path`, laid over that of its `overlays`. Raises ExperimentError if two of these conflict."""
    names = raw.get("overlays")
    if not isinstance(names, list):
        return raw  # none, or refused when the whole file is checked
    root = path.parent.parent if path.parent.name in (ABLATIONS, PLUGINS) else path.parent
    own, below, owner = _leaves(raw), dict[str, Any](), dict[tuple[str, ...], tuple[Path, Any]]()
    for name in names:
        file = _file_named(path, "overlays", name, (path.parent, root, root / PLUGINS, root / ABLATIONS))
        if file in children:
            raise ExperimentError(f"{path}: key `overlays`: {name} has this file among its overlays, or is it")
        held = _read(file)
        if held.get("parent") is None:
            raise ExperimentError(
                f"{path}: key `overlays`: {file} is no overlay, since it has no `parent`; name another"
            )
        held = {k: v for k, v in _with_overlays(file, held, (file, *children)).items() if k not in _NOT_INHERITED}
        for key, value in _leaves(held).items():
            other, before = owner.setdefault(key, (file, value))
            if before != value and not any(key[: len(given)] == given for given in own):
                raise ExperimentError(
                    f"{path}: key `overlays`: {other} and {file} differ in `{'.'.join(key)}` ({before!r:.80} and "
                    f"{value!r:.80}): give it in this file, or leave one out"
                )
        below = _merged(below, held)
    return _merged(below, raw)


def _leaves(raw: dict[str, Any], *above: str) -> dict[tuple[str, ...], Any]:
    """Key path → value, of everything that `_merged` does not merge deeper."""
    leaves: dict[tuple[str, ...], Any] = {}
    for key, value in raw.items():
        deeper = isinstance(value, dict) and value and key not in _WHOLE
        leaves |= _leaves(value, *above, str(key)) if deeper else {(*above, str(key)): value}
    return leaves


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mapping by mapping."""
    result = dict(below)
    for key, value in above.items():
        deeper = isinstance(value, dict) and isinstance(below.get(key), dict) and key not in _WHOLE
        result[key] = _merged(below[key], value) if deeper else value
    return result


def _check_overlay(path: Path, experiment: Experiment, parent: Experiment) -> None:
    """Raises ExperimentError if the parent does not make what is taken, or made it with other settings than the overlay's."""
    if experiment.take and parent.take:
        raise ExperimentError(
            f"{path}: key `take`: {parent.name} takes artifacts itself; name the experiment that makes them as `parent`"
        )
    if experiment.take and not set(experiment.seeds) <= set(parent.seeds):
        raise ExperimentError(
            f"{path}: key `seeds`: {parent.name} has {parent.seeds} only; take from these, or add there"
        )
    if experiment.take and experiment.iterations > parent.iterations:
        raise ExperimentError(f"{path}: key `iterations`: {parent.name} has {parent.iterations} only; raise it there")
    for asset in sorted(experiment.taken):
        if code_version(experiment, asset) != code_version(parent, asset):
            raise ExperimentError(
                f"{path}: key `take`: {asset} is {parent.name}'s, but this file changes settings that decide it; "
                "remove them, or take less"
            )


Config = TypeVar("Config", bound=Strict)


def checked(kind: type[Config], values: Any, source: Path | str) -> Config:
    """`values` as configuration. Raises ExperimentError with a line for each wrong key, which begins with `source`."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ExperimentError("\n".join(_explain(source, problem) for problem in error.errors())) from None


_REMEDIES = {
    "extra_forbidden": "there is no such key; remove it or correct its spelling",
    "missing": "the key is missing; add it",
    "bool_type": "a boolean is written as true or false",
}


def _explain(source: Path | str, problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"]) or "(whole file)"
    remedy = _REMEDIES.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    if problem["type"] in ("string_pattern_mismatch", "string_unicode") and key != "pool":
        remedy = "use lower-case letters, digits and _, starting with a letter"
    # what stands where it should not may be a key
    plain = problem["type"] not in ("missing", "value_error", "extra_forbidden") and not isinstance(
        problem["input"], dict | list
    )
    got = f" (got {problem['input']!r:.200})" if plain else ""
    return f"{source}: {f'key `{key}`' if key != 'name' else 'the name of the file'}: {remedy}{got}"


class Experiments(dict[str, Experiment]):
    """Experiments by name, in alphabetical order; `left_out` has the files that cannot be used, with the reason."""

    left_out: dict[str, str]

    def __init__(self, experiments: Mapping[str, Experiment], left_out: Mapping[str, str]) -> None:
        super().__init__(experiments)
        self.left_out = dict(left_out)

    def named(self, name: str) -> Experiment:
        """The experiment `name`. Raises ExperimentError if there is none, or with what is wrong with its file."""
        if name in self:
            return self[name]
        if name in self.left_out:
            raise ExperimentError(self.left_out[name])
        raise ExperimentError(f"there is no experiment {name!r:.80}; known: {', '.join(self) or 'none'}")


def find_experiments(folder: Path) -> Experiments:
    """The experiments in `folder`. A file that cannot be used is left out with the reason; hidden files are ignored."""
    experiments, left_out = {}, {}
    for path in experiment_files(folder):
        try:
            experiments[path.stem] = load_experiment(path)
        except ExperimentError as error:
            left_out[_printable(path.stem)] = _printable(str(error))
    return Experiments(experiments, left_out)


def experiment_files(folder: Path) -> list[Path]:
    """The files of the experiments in `folder`, in alphabetical order."""
    return sorted(path for path in folder.glob("*.yaml") if not path.name.startswith("."))


def _printable(text: str) -> str:
    """`text` without the halves of surrogate pairs that stand for bytes of a file name that is no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def split_reference(reference: str, named: Callable[[str], Experiment]) -> tuple[Experiment, int]:
    """(experiment, seed) of `NAME` (its first seed) or `NAME/sSEED`; `named` finds NAME. Raises ExperimentError."""
    name, stroke, seed_part = reference.partition("/")
    experiment = named(name)
    if not stroke:
        return experiment, experiment.seeds[0]
    seeds = {f"s{seed}": seed for seed in experiment.seeds}
    if seed_part not in seeds:
        choice = ", ".join(f"{name}/{seed}" for seed in seeds)
        raise ExperimentError(f"{reference}: {name} has no such seed; use {name} or one of {choice}")
    return experiment, seeds[seed_part]


def split_iteration(reference: str, named: Callable[[str], Experiment]) -> tuple[Experiment, int, int]:
    """(experiment, seed, k) of `NAME@k` or `NAME/sSEED@k`; `named` finds NAME. Raises ExperimentError."""
    name, _, k = reference.rpartition("@")
    if not (name and k.isascii() and k.isdecimal()):
        raise ExperimentError(f"{reference!r:.80} names no iteration: write EXPERIMENT@k, e.g. sandbox@1")
    experiment, seed = split_reference(name, named)
    if k.lstrip("0")[4:] or int(k) > experiment.iterations:
        raise ExperimentError(f"{reference:.80}: {experiment.name} has the iterations 0..{experiment.iterations}")
    return experiment, seed, int(k)


CODE: Final[dict[str, int]] = {
    "benchmark_steps": 2,
    "open_models": 2,
    "planner_sft": 1,
    "grounder": 1,
    "grounder_rl": 1,
    "planner": 2,
    "candidate_plans": 2,
    "verdicts": 2,
    "dataset": 3,
    "data_quality": 4,
    "evaluation": 1,
    "end_to_end": 1,
    "evolution_report": 4,
}
"""Raise an asset's number when its code changes so that the same inputs would give another result."""


_OPTIONAL_POLICY: Final = frozenset(
    {"max_tokens", "lora", "attention", "rollouts", "delta", "importance_sampling_level"}
    | {"point_score", "terms", "combiner", "advantage", "policy_loss", "max_num_gen_batches", "replay"}
)
_OPTIONAL: Final[dict[type[Strict], frozenset[str]]] = {
    Sft: frozenset({"max_tokens", "lora", "attention", "target", "curation", "folds", "packing"}),
    GrounderRl: _OPTIONAL_POLICY,
    Grpo: _OPTIONAL_POLICY
    | {"prompts", "max_prompts", "curation", "value_mode", "validate_every", "validation_steps", "environment"},
    Regeneration: frozenset({"value_mode", "hindsight_hint"}),
    Models: frozenset({"judge"}),
    Evaluation: frozenset({"oracle_plan", "boards", "inference", "third_party"}),
    Quality: frozenset({"trigger_steps"}),
    Environment: frozenset({"episodes", "max_steps"}),
}
"""Settings that a code version leaves out at their default, so that artifacts made without them stay current."""


ONLY_MEASURED: Final[dict[type[Strict], frozenset[str]]] = {
    Sft: frozenset({"probe_steps"}),
    Grpo: frozenset({"probe_steps", "probe_between"}),
    Environment: frozenset({"processes", "seconds"}),
}
"""Settings that change no artifact's content: of measurements during training, and of how browsers are run."""


def _left_out(part: Strict, name: str) -> bool:
    """Whether a code version leaves a setting out: it changes nothing, or is one of _OPTIONAL with its default."""
    if name in ONLY_MEASURED.get(type(part), ()):
        return True
    return name in _OPTIONAL.get(type(part), ()) and getattr(part, name) == type(part).model_fields[name].default


def _counted(part: Strict, keys: set[str] | None = None) -> dict[str, Any]:
    """The settings of a section, or those of `keys`, that a code version counts, as JSON has them."""
    counted = {}
    for name, value in part.model_dump(mode="json", include=keys).items():
        if not _left_out(part, name):
            of_part = getattr(part, name, None)
            counted[name] = _counted(of_part) if isinstance(of_part, Environment) else value
    return counted


def code_version(experiment: Experiment, asset: str) -> str:
    """The version of all that decides an asset's content besides its inputs: its code, and the configuration that it reads."""
    pools, quality, input_format = experiment.regeneration, experiment.quality, {"prompts", "coordinates", "dtype"}
    # the default engine is left out, as settings of _OPTIONAL are
    answers = input_format | ({"engine"} if experiment.models.engine != "transformers" else set())
    evaluation = experiment.evaluation.model_copy(update={"oracle_plan": experiment.oracle_plan or None})
    init: list[tuple[Strict, set[str] | None]] = [(experiment, {"init"})] if experiment.init != "base" else []
    validation: list[tuple[Strict, set[str] | None]] = []
    if experiment.grpo.validate_every is not None:
        validation = [(experiment.benchmark, {"validation"})]
    reads: dict[str, list[tuple[Strict, set[str] | None]]] = {
        "benchmark_steps": [
            (experiment.benchmark, {"reader", "path", "view", "level", "train", "validation"}),
            # whether a TYPE needs a target depends on the prompts (`needs_target`); public benchmarks define it
            *([(experiment.models, {"prompts"})] if experiment.benchmark.reader == "jsonl" else []),
        ],
        "open_models": [(experiment.models.without_places(), set(Models.model_fields) - {"engine"})],
        "planner_sft": [(experiment.sft, None), (experiment.models, input_format), *init],
        "grounder": [(experiment.sft, None), (experiment.models, input_format), *init],
        "grounder_rl": [(experiment.grounder_rl, None), (experiment.models, input_format)],
        "planner": [
            (experiment.grpo, None),
            (pools, {"max_point_tokens"}),
            (experiment.models, answers),
            *validation,
        ],
        "candidate_plans": [
            (
                pools,
                {"plans_per_planner", "temperature", "top_p", "max_plan_tokens", "similar", "trained_members"}
                | {"value_mode", "hindsight_hint"},
            ),
            (experiment.benchmark, {"train", "max_train_steps"}),
            (experiment, {"batch_size"}),  # the plans of a batch are drawn from one generator
            (experiment.models, answers),
        ],
        "verdicts": [
            (pools, {"max_point_tokens", "trained_members"}),
            (quality, {"shuffled_plans", "trigger_steps"}),
            (experiment.models, answers),
        ],
        "dataset": [
            (pools, {"rule", "k", "max_plans_per_step", "carry_over"}),
            (experiment.benchmark, {"train", "max_train_steps"}),
            (quality, {"shared_steps_at_most", "outside_boxes_at_most", "blank_screens_at_most"}),
        ],
        "data_quality": [(quality, {"legible_px"})],
        "evaluation": [
            (experiment.benchmark, {"validation", "test", "protocol", "max_eval_steps"}),
            (pools, {"max_plan_tokens", "max_point_tokens"}),
            (experiment.models, answers),
            *([(experiment.models.without_places(), {"judge"})] if experiment.models.judge else []),
            *([(evaluation, None)] if evaluation != Evaluation() else []),
        ],
        "end_to_end": [
            (experiment.sft, None),
            (experiment.grpo, None),
            (experiment.models, input_format),
            *validation,
            *init,
        ],
        "evolution_report": [],
    }
    read = [_counted(part, keys) for part, keys in reads[asset]]
    return f"{CODE[asset]}-{fingerprint(read)[:8]}"
