"""The models of an experiment: the base pair, the members of the pools, the judge, and how vLLM serves them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

from coepg_dagster.capabilities import EngineName, require
from coepg_dagster.experiment.strict import Name, Strict
from coepg_dagster.geometry import Space
from coepg_dagster.prompts import Style


def may_hold_key(address: str) -> bool:
    """Whether an address has a part in which a key may be given: a user, a query or a fragment."""
    url = urlsplit(address)
    user = "@" in (url.netloc or address)  # without a scheme all is a path
    return user or bool(url.query or url.fragment)


def refuse_keys(base_url: str | None, api_key_env: str | None) -> None:
    """Raises ValueError, which does not repeat it, where the address of an endpoint or the name of a variable holds a key."""
    if may_hold_key(base_url or ""):
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
            raise ValueError(
                f"{', '.join(taken)}: the trained members have such names; give the open model another name"
            )
        # by name: of plans that say the same the first counts, and the order in a file is in no version
        return dict(sorted(pool.items()))

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
