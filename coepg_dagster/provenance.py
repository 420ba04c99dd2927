"""Provenance: the graph of the loop, the record of each artifact, and which artifacts are stale.

The graph is acyclic over iterations: D_{k-1} → π_k, ϕ_k → π'_k → D_k. A record names the exact version of each input that was
read. An artifact is stale if such a version is not the current one, its code or configuration changed, its files are lost, or
one of its inputs is stale. Lost files are made again and make nothing else stale, unless they come out differently. We compute
this ourselves, since Dagster marks only direct readers and skips assets with many upstream partitions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from coepg_dagster.refusal import Refusal

Asset = Literal[
    "benchmark_steps",
    "open_models",
    "planner_sft",
    "grounder",
    "grounder_rl",
    "planner",
    "end_to_end",
    "candidate_plans",
    "verdicts",
    "dataset",
    "data_quality",
    "evaluation",
    "evolution_report",
]

SHARED: Final[tuple[Asset, ...]] = ("benchmark_steps", "open_models")
LOOP: Final[tuple[Asset, ...]] = (
    "planner_sft",
    "grounder",
    "planner",
    "candidate_plans",
    "verdicts",
    "dataset",
    "data_quality",
    "evaluation",
)
"""The partitioned assets, in an order in which one iteration can be made."""

LOOP_RL: Final[tuple[Asset, ...]] = (*LOOP[:2], "grounder_rl", *LOOP[2:])
"""The same where the grounder learns by GRPO too."""

END_TO_END: Final[tuple[Asset, ...]] = ("end_to_end", "evaluation")
"""The partitioned assets of an end-to-end agent, which is one model and writes no data."""

ORDER: Final[tuple[Asset, ...]] = ("end_to_end", *LOOP_RL)
"""Every partitioned asset, in an order in which one iteration can be made."""

MODELS_OF_LOOP: Final[frozenset[Asset]] = frozenset({"planner_sft", "grounder", "grounder_rl", "planner", "end_to_end"})
"""The models. In iteration 0 they are the base models, whatever the settings of training."""

Agent = Literal["decoupled", "end_to_end"]
"""The agent that is evaluated: planner and grounder, or one model that answers type, value and point."""

Init = Literal["base", "previous"]
"""What SFT starts from in each iteration: the base models, or from iteration 2 on the models of the iteration before."""

Phi = Literal["grounder", "grounder_rl"]
"""The asset that is ϕ_k for all that reads it: the grounder after SFT, or after GRPO too."""

CROSSING: Final[tuple[Asset, ...]] = ("dataset", "planner", "grounder", "grounder_rl", "end_to_end")
"""The assets of iteration k that iteration k + 1 may read, through their twins under previous/."""


@dataclass(frozen=True)
class Ref:
    """One artifact of an experiment and seed: an asset and its iteration (None: unpartitioned)."""

    asset: Asset
    iteration: int | None = None

    def __str__(self) -> str:
        return self.asset if self.iteration is None else f"{self.asset}[{self.iteration}]"


_WITHIN: Final[dict[Asset, tuple[Asset, ...]]] = {
    "planner_sft": ("benchmark_steps", "open_models"),
    "grounder": ("benchmark_steps", "open_models"),
    "grounder_rl": ("grounder",),
    "planner": ("planner_sft", "grounder"),
    "candidate_plans": ("planner", "benchmark_steps", "open_models"),
    "verdicts": ("candidate_plans", "grounder", "benchmark_steps", "open_models"),
    "dataset": ("verdicts",),
    "data_quality": ("dataset", "verdicts"),
    "evaluation": ("planner", "grounder", "benchmark_steps", "open_models"),
    "end_to_end": ("benchmark_steps", "open_models"),
}
_EVALUATION_END_TO_END: Final[tuple[Asset, ...]] = ("end_to_end", "benchmark_steps")
_BEFORE: Final[dict[Asset, tuple[Asset, ...]]] = {
    "planner_sft": ("dataset",),
    "grounder": ("dataset",),
    "grounder_rl": ("dataset",),
    "planner": ("dataset",),
    "candidate_plans": ("planner",),
    "verdicts": ("grounder",),
    "dataset": ("dataset",),
    "data_quality": ("dataset",),
    "end_to_end": ("dataset",),
}
CONTINUED: Final[dict[Asset, Asset]] = {"planner_sft": "planner", "grounder": "grounder", "end_to_end": "end_to_end"}
"""With `init: previous`: trained model → the asset of iteration k - 1 that its training starts from."""


_UNUSED_AT_START: Final = {
    ("planner_sft", "benchmark_steps"),
    ("grounder", "benchmark_steps"),
    ("planner", "grounder"),
    ("candidate_plans", "planner"),
    ("verdicts", "grounder"),
    ("end_to_end", "benchmark_steps"),
}
"""Iteration 0 trains nothing and its pools hold open models only."""


def continued(asset: Asset, phi: Phi = "grounder") -> Asset:
    """With `init: previous`: the asset of iteration k - 1 that the training of `asset` starts from."""
    before = CONTINUED[asset]
    return phi if before == "grounder" else before


def inputs_of(ref: Ref, agent: Agent = "decoupled", init: Init = "base", phi: Phi = "grounder") -> list[Ref]:
    """The exact inputs of `ref`: no iteration before 0 exists, and no trained model before iteration 1."""
    k = ref.iteration
    if k is None:
        return []
    within: list[Ref] = []
    one_model = agent == "end_to_end" and ref.asset == "evaluation"
    for asset in _EVALUATION_END_TO_END if one_model else _WITHIN[ref.asset]:
        if k > 0 or (ref.asset, asset) not in _UNUSED_AT_START:
            within.append(Ref(asset, None if asset in SHARED else k))
    read_before = _BEFORE.get(ref.asset, ())
    if init == "previous" and ref.asset in CONTINUED:
        read_before = (*read_before, CONTINUED[ref.asset])
    # iteration 0 has no trained models: iteration 1 has none of them in its pools, and starts from the base models
    before = [Ref(a, k - 1) for a in read_before if k > 1 or (k == 1 and a == "dataset")]
    read = within + before
    if ref.asset == "grounder_rl":
        return read
    return [Ref(phi, one.iteration) if one.asset == "grounder" else one for one in read]


class Input(BaseModel):
    """One version that was read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    asset: Asset
    iteration: int | None
    data_version: str
    run_id: str
    folder: str
    taken_from: str | None = None  # the parent loop that the artifact belongs to; None: this loop

    @property
    def ref(self) -> Ref:
        return Ref(self.asset, self.iteration)


class Record(BaseModel):
    """The facts about a materialized artifact, kept in the metadata of its materialization."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    asset: Asset
    iteration: int | None
    data_version: str
    run_id: str
    folder: str
    inputs: list[Input]
    code_version: str
    config: dict[str, Any]
    seed: int
    seconds: float
    device: str
    figures: dict[str, Any]
    files: dict[str, str] = {}  # name → SHA-256 of every file in `folder` as it was made
    sizes: dict[str, int] = {}  # name → bytes of each
    failed_checks: list[str] = []  # blocking ones
    accepted_stale_input: bool = False
    place: dict[str, Any] = {}  # where its worker ran; changes no result

    @property
    def ref(self) -> Ref:
        return Ref(self.asset, self.iteration)

    def input(self, asset: Asset) -> Input:
        """The version of `asset` that was read."""
        return next(used for used in self.inputs if used.asset == asset)

    def as_input(self, taken_from: str | None = None) -> Input:
        """This artifact as an input of another; `taken_from` names the parent loop that it belongs to."""
        return Input(
            asset=self.asset,
            iteration=self.iteration,
            data_version=self.data_version,
            run_id=self.run_id,
            folder=self.folder,
            taken_from=taken_from,
        )


@dataclass(frozen=True)
class Stale:
    """Why an artifact is stale: the earliest cause, and the artifact `root` that has it, from which on all is to be made."""

    ref: Ref
    root: Ref
    cause: str
    spreads: bool = True  # whether artifacts made from it are stale too; False: only its files are lost

    def __str__(self) -> str:
        return self.cause if self.root == self.ref else f"{self.root}: {self.cause}"


def staleness(
    records: Mapping[Ref, Record],
    code_versions: Mapping[Asset, str],
    taken: Collection[Asset] = (),
    stale_where_taken: Mapping[Ref, Stale] | None = None,
    lost: Mapping[Ref, str] | None = None,
    changed: Mapping[Ref, str] | None = None,
) -> dict[Ref, Stale]:
    """The stale artifacts among `records` (the current ones), with root causes; what is made from a stale one is stale too.

    `code_versions` holds the present version of each asset's code and configuration; the models of iteration 0 were not
    trained and do not depend on it. The report is checked as the rest is: its inputs are those in its record. For assets
    `taken` from a parent, `stale_where_taken` has the result of the parent. `lost` has the artifacts whose files are lost, and
    `changed` those of which something else that was read has changed, with the message.
    """
    stale: dict[Ref, Stale] = {}
    for ref in sorted(records, key=_order):
        record = records[ref]
        if ref.asset in taken:
            if stale_where_taken and ref in stale_where_taken:
                stale[ref] = stale_where_taken[ref]
            continue
        code = None if ref.iteration == 0 and ref.asset in MODELS_OF_LOOP else code_versions.get(ref.asset)
        cause = _direct_cause(record, records, code) or (changed or {}).get(ref)
        causes = [why for used in record.inputs if (why := stale.get(used.ref)) and why.spreads]
        if cause is not None:
            causes.append(Stale(ref, ref, cause))
        if causes:
            stale[ref] = replace(min(causes, key=lambda why: _order(why.root)), ref=ref)
        elif lost and ref in lost:
            stale[ref] = Stale(ref, ref, lost[ref], spreads=False)
    return stale


def _direct_cause(record: Record, records: Mapping[Ref, Record], code_version: str | None) -> str | None:
    if code_version is not None and record.code_version != code_version:
        return f"code or configuration changed ({record.code_version} → {code_version})"
    for used in record.inputs:
        current = records.get(used.ref)
        if current is None:
            return f"its input {used.ref} is gone"
        if current.data_version != used.data_version:
            return f"{used.ref} is now {current.data_version}, it read {used.data_version}"
    return None


def _order(ref: Ref) -> tuple[int, int]:
    if ref.iteration is None:
        return (-1, 0) if ref.asset in SHARED else (1 << 30, 0)
    return ref.iteration, ORDER.index(ref.asset)


def to_make(
    records: Mapping[Ref, Record],
    stale: Mapping[Ref, Stale],
    through: int,
    assets: Sequence[Asset] = LOOP,
    agent: Agent = "decoupled",
    init: Init = "base",
    phi: Phi = "grounder",
) -> dict[int, list[Asset]]:
    """Iteration → those of `assets` that are missing, stale, or follow one of these, for the iterations 0..`through`."""
    needed: set[Ref] = set()
    plan: dict[int, list[Asset]] = {}
    for k in range(through + 1):
        for asset in assets:
            ref = Ref(asset, k)
            why = stale.get(ref)
            follows = any(used in needed for used in inputs_of(ref, agent, init, phi))
            if ref not in records or (why is not None and why.spreads) or follows:
                needed.add(ref)
            if ref in needed or why is not None:
                plan.setdefault(k, []).append(asset)
    return plan


def in_one_run(
    made: Sequence[Asset],
    k: int,
    assets: Sequence[Asset] = LOOP,
    agent: Agent = "decoupled",
    init: Init = "base",
    phi: Phi = "grounder",
) -> list[Asset]:
    """The first assets of `made`, in order, that one run can make in iteration `k`.

    An asset between two of them that is not made again is current for the second only if the first does not change.
    """
    run: list[Asset] = []
    unsure: set[Ref] = set()
    for asset in assets:
        read = inputs_of(Ref(asset, k), agent, init, phi)
        if asset not in made:
            if any(used in unsure or (used.iteration == k and used.asset in run) for used in read):
                unsure.add(Ref(asset, k))
        elif any(used in unsure for used in read):
            break
        else:
            run.append(asset)
    return run


class NotUsable(Refusal, RuntimeError):
    """An input of an iteration must not be used; the message ends with what to do."""


def assert_usable(
    ref: Ref,
    record: Record | None,
    stale: Stale | None,
    failed_in_backfill: str | None,
    accept_stale_input: bool,
    lost: str | None = None,
) -> Record:
    """The record of `ref`, if an artifact may be made from it. Raises NotUsable, checked in this order, if

    1. it does not exist;
    2. a blocking check on it failed;
    3. the running backfill contains it but did not make it: it failed or was skipped there (`failed_in_backfill` says so);
    4. its files are gone (`lost` says which);
    5. it is stale, unless `accept_stale_input`.
    """
    if record is None:
        raise NotUsable(f"{ref} does not exist: materialize {ref} first")
    if record.failed_checks:
        failed = ", ".join(record.failed_checks)
        raise NotUsable(f"{ref}: blocking check failed: {failed}; look at the check, then materialize {ref} again")
    if failed_in_backfill is not None:
        raise NotUsable(f"{ref} {failed_in_backfill}; look at why it failed, then materialize {ref} again")
    if lost is not None:
        raise NotUsable(f"{ref}: {lost}; materialize {ref} again")
    if stale is not None and not accept_stale_input:
        remedy = f"materialize {_from(stale.root, ref)} first, or set accept_stale_input to use it as it is"
        raise NotUsable(f"{ref} is stale ({stale}): {remedy}")
    return record


def _from(root: Ref, ref: Ref) -> str:
    """What is to be made where `ref` is stale since `root`."""
    first, last = root.iteration, ref.iteration
    if first is None:
        return root.asset
    return f"iteration {last}" if first == last else f"iterations {first} to {last}"
