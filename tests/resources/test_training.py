"""The three resources: what they replace, and what a run records of it."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
from coepg_dagster.assets.stage import Outcome, StageContext
from coepg_dagster.resources.store import StoreResource
from coepg_dagster.resources.training import (
    AS_WRITTEN,
    EnginesResource,
    GrpoCdremResource,
    RegenerationResource,
    SftResource,
)

from coepg_dagster.experiment.models import Serving
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.jobs import SftJob
from tests.assets.conftest import InProcess
from tests.assets.light import LIGHT_MAKERS, steps_log


def test_what_is_left_empty_is_as_in_the_experiment_file() -> None:
    for resource, config in (
        (SftResource(), Sft(epochs=2)),
        (GrpoCdremResource(), Grpo(group_size=8, micro_batch_size=8)),
        (RegenerationResource(), Regeneration(rule="k_of_n", k=2)),
    ):
        assert resource.resolve(config) == config and resource.overrides() == {}


def test_a_replaced_field_is_checked_like_the_file() -> None:
    assert GrpoCdremResource(max_steps=3, kl_beta=0.0).resolve(Grpo()) == Grpo(max_steps=3, kl_beta=0.0)
    assert SftResource(epochs=0.5).resolve(Sft()).epochs == 0.5
    with pytest.raises(ExperimentError, match=r"resource of Regeneration: .*`rule: k_of_n` needs `k`"):
        RegenerationResource(k=2).resolve(Regeneration())
    with pytest.raises(ExperimentError, match="micro_batch_size 5 does not divide"):
        GrpoCdremResource(micro_batch_size=5).resolve(Grpo())


@pytest.mark.parametrize(
    ("resource", "config", "decided"),
    [
        (SftResource, Sft, set()),
        (GrpoCdremResource, Grpo, set()),
        (RegenerationResource, Regeneration, {"trained_members"}),
    ],
)
def test_every_setting_of_the_file_can_be_replaced_and_is_described_as_there(
    resource: Any, config: Any, decided: set[str]
) -> None:
    shown = resource.model_fields
    assert config.model_fields.keys() - shown.keys() == decided
    for name, field in config.model_fields.items():
        if name in decided:
            continue
        assert field.description and shown[name].description == f"{field.description}. {AS_WRITTEN}"
        choices = [part for part in (field.annotation, *get_args(field.annotation)) if get_origin(part) is Literal]
        assert all(f"`{choice}`" in field.description for literal in choices for choice in get_args(literal)), name


def test_replaced_settings_of_every_type_arrive(light: InProcess) -> None:
    replaced = {
        "max_steps": 5,
        "learning_rate": 1e-3,
        "freeze_vision": True,
        "attention": "eager",
        "lora": {"rank": 4, "alpha": 8},
    }
    assert SftResource(**replaced).resolve(Sft()) == Sft.model_validate(replaced)
    assert light.run(None).success
    assert light.run(0, "planner_sft", config={"resources": {"sft": {"config": replaced}}}).success
    event = light.instance.get_latest_materialization_event(light.loop.key("planner_sft"))
    assert event is not None and event.asset_materialization is not None
    assert event.asset_materialization.metadata["overrides"].value == replaced


def test_every_field_of_the_launchpad_is_described() -> None:
    for resource in (SftResource, GrpoCdremResource, RegenerationResource, EnginesResource, StoreResource):
        assert [name for name, field in resource.model_fields.items() if not field.description] == []


def test_jobs_receive_how_engines_run_here() -> None:
    """Every field, and as where no resource says anything."""
    assert EnginesResource().serving() == Serving()
    changed = {name: field.default for name, field in EnginesResource.model_fields.items()}
    changed |= {"vllm_python": "/opt/python", "vllm_memory": 0.5, "vllm_context": 999, "vllm_arguments": ["--x"]}
    changed |= {"start_minutes": 1.5, "in_flight": 3}
    changed |= {"rollout_memory": 0.2, "rollout_sleep": False, "rollout_server": "http://127.0.0.1:8000"}
    received = EnginesResource(**changed).serving().model_dump()
    assert all(received[name] != default for name, default in Serving().model_dump().items())


class OtherMachine(SftResource):
    """A resource that somebody puts in place of `sft`."""

    queue: str = "night"

    def overrides(self) -> dict[str, Any]:
        return super().overrides() | {"queue": self.queue}


def test_one_resource_is_swapped_and_one_is_overridden_at_launch(light: InProcess) -> None:
    light.settings["resources"] = {"sft": OtherMachine(max_steps=5)}
    assert light.run(None).success
    config = {"resources": {"regeneration": {"config": {"plans_per_planner": 3, "rule": "all"}}}}
    assert light.run(0, config=config).success

    def overrides(asset: Any) -> Any:
        event = light.instance.get_latest_materialization_event(light.loop.key(asset))
        assert event is not None and event.asset_materialization is not None
        return event.asset_materialization.metadata["overrides"].value

    assert overrides("planner_sft") == {"max_steps": 5, "queue": "night"}
    assert overrides("candidate_plans") == {"plans_per_planner": 3, "rule": "all"}


def test_a_run_refuses_sft_where_grpo_could_not_follow(light: InProcess) -> None:
    """Hours of SFT would be for nothing."""

    def trains(work: StageContext) -> Outcome:
        return Outcome([], work.run_job(SftJob))

    light.settings["makers"] = LIGHT_MAKERS | {"planner_sft": trains}
    assert light.run(None).success
    config = {"resources": {"grpo_cdrem": {"config": {"training_processes": 8}}}}
    why = light.why(light.run(0, "planner_sft", config=config))
    assert "cannot be shared by 8 processes" in why and "`training_processes: 7` of grpo_cdrem" in why
    config = {"resources": {"grpo_cdrem": {"config": {"device": "cpu", "strategy": "zero2"}}}}
    assert "strategy zero2 needs GPUs" in light.why(light.run(0, "planner_sft", config=config))


@pytest.mark.parametrize(
    ("section", "settings", "why"),
    [
        ("sft", {"epochs": -1}, "resource of Sft: key `epochs`"),
        ("grpo_cdrem", {"verifiers": ["verifier_x"]}, "`verifiers` names verifier_x; the experiment has verifier_a"),
        ("grpo_cdrem", {"micro_batch_size": 5}, "micro_batch_size 5 does not divide"),
        ("grpo_cdrem", {"tracking": ["paper"]}, "'paper' is no tracker"),
        (
            "regeneration",
            {"rule": "majorty"},
            "resource of Regeneration: key `rule`: Input should be 'any', 'majority'",
        ),
        ("regeneration", {"verifiers": ["verifier_x"]}, "`verifiers` names verifier_x"),
        (
            "regeneration",
            {"processes": 0},
            "resource Regeneration: key `processes`: Input should be greater than or equal to 1",
        ),
        ("engines", {"vllm_memory": 2.0}, "key `memory`: Input should be less than or equal to 1"),
        ("engines", {"endpoints": {"verifier_a": {"in_flight": 1}}}, "endpoints: verifier_a is loaded, not asked"),
    ],
)
def test_the_first_step_refuses_what_a_later_one_could_not_use(
    light: InProcess, section: str, settings: dict[str, Any], why: str
) -> None:
    assert light.run(None).success
    result = light.run(0, config={"resources": {section: {"config": settings}}})
    failed = [event for event in result.all_events if event.is_step_failure]
    assert not result.success and steps_log(light.project)[-1]["k"] is None, "nothing of the iteration was made"
    assert why in light.why(result) and "Traceback" not in str(failed[0].step_failure_data)
