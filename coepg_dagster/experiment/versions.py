"""Code versions: what decides an artifact's content besides its inputs, as a short text."""

from __future__ import annotations

from typing import Any, Final

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Evaluation, Experiment, Quality, Regeneration
from coepg_dagster.experiment.strict import Strict, fingerprint
from coepg_dagster.experiment.training import Environment, GrounderRl, Grpo, Sft

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
        if _left_out(part, name):
            continue
        of_part = getattr(part, name)
        counted[name] = _counted(of_part) if isinstance(of_part, Environment) else value
        # strategies are applied in the order of the file, and JSON's keys are sorted
        if name == "curation" and list(value) != sorted(value):
            counted[name] = list(value.items())
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
    # answers of a batch are drawn from one generator; the default is left out where it was not counted from the beginning
    at_once: list[tuple[Strict, set[str] | None]] = [(experiment, {"batch_size"})]
    sampled = at_once if experiment.batch_size != Experiment.model_fields["batch_size"].default else []
    asked = sampled if experiment.grpo.curation else []  # its pass rates are of sampled answers
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
            *asked,
        ],
        "candidate_plans": [
            (
                pools,
                {"plans_per_planner", "temperature", "top_p", "max_plan_tokens", "similar", "trained_members"}
                | {"value_mode", "hindsight_hint"},
            ),
            (experiment.benchmark, {"train", "max_train_steps"}),
            *at_once,
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
        "data_quality": [
            (quality, {"legible_px"}),
            *([(pools, {"rule", "k"})] if pools.rule != "any" else []),
        ],
        "evaluation": [
            (experiment.benchmark, {"validation", "test", "protocol", "max_eval_steps"}),
            (pools, {"max_plan_tokens", "max_point_tokens"}),
            (experiment.models, answers),
            *([(experiment.models.without_places(), {"judge"})] if experiment.models.judge else []),
            *([(evaluation, None)] if evaluation != Evaluation() else []),
            *(sampled if evaluation.attempts or evaluation.inference else []),
        ],
        "end_to_end": [
            (experiment.sft, None),
            (experiment.grpo, None),
            (experiment.models, input_format),
            *validation,
            *init,
            *asked,
        ],
        "evolution_report": [],
    }
    read = [_counted(part, keys) for part, keys in reads[asset]]
    return f"{CODE[asset]}-{fingerprint(read)[:8]}"
