"""The three resources: what they replace, and what a run records of it."""

from __future__ import annotations

from typing import Any

import pytest
from coepg_dagster.assets.making import RESOURCES
from coepg_dagster.resources.store import StoreResource
from coepg_dagster.resources.training import (
    EnginesResource,
    GrpoCdremResource,
    RegenerationResource,
    SftResource,
    default_resources,
)
from pydantic import ValidationError

from coepg_dagster.experiment import Grpo, Regeneration, Serving, Sft
from tests.assets.conftest import InProcess


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
    with pytest.raises(ValidationError, match="goes with `rule: k_of_n`"):
        RegenerationResource(k=2).resolve(Regeneration())
    with pytest.raises(ValidationError, match="micro_batch_size 5 does not divide"):
        GrpoCdremResource(micro_batch_size=5).resolve(Grpo())


def test_every_field_of_the_launchpad_is_described() -> None:
    for resource in (SftResource, GrpoCdremResource, RegenerationResource, EnginesResource, StoreResource):
        assert [name for name, field in resource.model_fields.items() if not field.description] == []
    assert {*RESOURCES.values(), "engines"} == set(default_resources())


def test_jobs_are_told_how_engines_run_here() -> None:
    """Every field, and with the same defaults as where no resource says anything."""
    assert EnginesResource().serving() == Serving()
    changed = {name: field.default for name, field in EnginesResource.model_fields.items()}
    changed |= {"vllm_python": "/opt/python", "vllm_memory": 0.5, "vllm_context": 999, "vllm_arguments": ["--x"]}
    changed |= {"start_minutes": 1.5, "in_flight": 3}
    changed |= {"rollout_memory": 0.2, "rollout_sleep": False, "rollout_server": "http://127.0.0.1:8000"}
    told = EnginesResource(**changed).serving().model_dump()
    assert all(told[name] != default for name, default in Serving().model_dump().items())


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
