"""A machine's profile says where things run; it decides no result, and what it cannot run is refused with what it can."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from coepg_dagster.resources.training import default_resources
from hypothesis import given, settings
from hypothesis import strategies as st

from coepg_dagster.experiment.models import PLACE, Models
from coepg_dagster.experiment.schema import Evaluation, Experiment, Regeneration
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.experiment.versions import code_version
from coepg_dagster.jobs import Placement
from coepg_dagster.planning.machine import (
    MACHINE,
    EndpointSettings,
    Machine,
    ProcessSettings,
    TrainingSettings,
    load_machine,
    machine_named,
    place_models,
    trainings,
)
from coepg_dagster.project import Project
from coepg_dagster.provenance import LOOP
from coepg_dagster.training.launch import hardware_refusals, refuse

ROOT = Path(__file__).parents[2]
EXPERIMENTS = Project(ROOT).all_experiments()
MACHINES = {file.stem: load_machine(file) for file in sorted((ROOT / "machines").glob("*.yaml"))}


def what_workers_check(experiment: Experiment, machine: Machine) -> None:
    """Raises what the processes of training would."""
    for config, resource in trainings(experiment):
        placement: Placement = getattr(machine, resource).placement
        refuse(config, placement)
        assert hardware_refusals(placement, machine.gpus, resource) == []


def mended(experiment: Experiment, machine: Machine) -> tuple[Experiment, Machine]:
    """The pair with what the first refusal names first."""
    (first, *_) = machine.refusals(experiment)
    name, value, resource = re.findall(r"`(training_processes|strategy): (\w+)` of (\w+)", first)[0]
    part = getattr(machine, resource).model_copy(update={name: int(value) if value.isdecimal() else value})
    return experiment, machine.model_copy(update={resource: part})


@pytest.mark.parametrize(("name", "on"), list(product(EXPERIMENTS, MACHINES)))
def test_every_experiment_runs_on_every_machine_or_the_nearest_settings_that_do_are_named(name: str, on: str) -> None:
    experiment, machine = EXPERIMENTS[name], MACHINES[on]
    for _ in range(6):
        if not machine.refusals(experiment):
            break
        with pytest.raises((ExperimentError, RuntimeError, AssertionError)):
            what_workers_check(experiment, machine)
        experiment, machine = mended(experiment, machine)
    assert not machine.refusals(experiment)
    what_workers_check(experiment, machine)


def test_there_are_profiles_of_a_laptop_and_of_one_to_eight_cards_on_which_the_paper_runs() -> None:
    assert {machine.gpus for machine in MACHINES.values()} == {0, 1, 2, 4, 8}
    for name, machine in product(("web_3b", "web_7b", "mobile_3b", "mobile_7b"), MACHINES.values()):
        assert machine.refusals(EXPERIMENTS[name]) == []


def test_eight_processes_for_the_papers_batch_are_refused() -> None:
    eight = MACHINES["h100x8"]
    grpo = eight.grpo_cdrem.model_copy(update={"training_processes": 8})
    (why,) = eight.model_copy(update={"grpo_cdrem": grpo}).refusals(EXPERIMENTS["web_7b"])
    assert "`training_processes: 7` of grpo_cdrem" in why and "`grpo.prompts_per_step: 40`" in why


def test_no_setting_of_a_profile_is_one_of_an_experiment() -> None:
    decides = {*Sft.model_fields, *Grpo.model_fields, *Regeneration.model_fields, *Evaluation.model_fields}
    assert not decides & {*TrainingSettings.model_fields, *ProcessSettings.model_fields}
    assert EndpointSettings.model_fields.keys() == PLACE
    assert TrainingSettings.model_fields.keys() - ProcessSettings.model_fields.keys() == (
        Placement.model_fields.keys() - {"processes"} | {"training_processes"}
    )


@settings(max_examples=30)
@given(
    name=st.sampled_from(sorted(EXPERIMENTS)),
    url=st.sampled_from([None, "http://10.0.0.7:8000/v1", "https://elsewhere/v1"]),
    key=st.sampled_from([None, "MY_KEY"]),
    in_flight=st.none() | st.integers(1, 1024),
)
def test_endpoints_of_a_profile_change_no_version(name: str, url: Any, key: Any, in_flight: Any) -> None:
    experiment = EXPERIMENTS[name]
    asked = {
        member.split("/")[-1]: EndpointSettings(base_url=url, api_key_env=key, in_flight=in_flight)
        for member, of in experiment.models.named().items()
        if of.engine == "openai"
    }
    moved = experiment.model_copy(update={"models": place_models(experiment.models, asked)})
    for member in asked if url else ():
        assert all(pool[member].base_url == url for pool in (moved.models.verifiers,) if member in pool)
    assert moved.models.without_places() == experiment.models.without_places()
    for asset in ("benchmark_steps", "open_models", *LOOP):
        assert code_version(moved, asset) == code_version(experiment, asset)


def test_a_model_that_is_loaded_does_not_become_an_endpoint() -> None:
    models: Models = EXPERIMENTS["web_7b"].models
    with pytest.raises(ExperimentError, match="qwen_7b is loaded"):
        place_models(models, {"qwen_7b": EndpointSettings(base_url="http://10.0.0.7:8000/v1")})
    with pytest.raises(ExperimentError, match=r"endpoints: qwen_32b.*needs `base_url`"):
        place_models(models, {"qwen_32b": EndpointSettings(base_url="ftp://x")})
    assert place_models(models, {"of_another_experiment": EndpointSettings()}) == models


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sft: {learning_rate: 1.0}", r"sft.learning_rate: decides results; it belongs in the experiment file"),
        ("grpo_cdrem: {group_size: 4}", "grpo_cdrem.group_size: decides results"),
        ("seeds: [1]", "seeds: decides results"),
        ("batch_size: 1", "batch_size: decides results"),
        ("sft: {procesess: 4}", "key `sft.procesess`: there is no such key"),
        ("sft: {training_processes: yes}", "key `sft.training_processes`"),
        ("regeneration: {strategy: zero3}", "key `regeneration.strategy`: there is no such key"),
        ("card: Voodoo\ngpus: 1", "the card Voodoo is not known; known: RTX-4090-24GB"),
        ("gpus: 4", "`card` and `gpus` go together"),
        ("grpo_cdrem: {launcher: ray, training_processes: 2}", "on Ray a job trains in one process"),
        ("endpoints: {qwen_32b: {model: other}}", "there is no such key"),
        ("vllm: {temperature: 1.0}", "there is no such key"),
        ("name: x", "a machine is named by its file"),
        ("- sft", "must hold a mapping"),
    ],
)
def test_what_a_profile_may_not_hold_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ExperimentError, match=message) as refused:
        load_machine(file)
    assert str(refused.value).startswith(str(file))


def test_the_environment_names_the_machine_that_no_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MACHINE, raising=False)
    assert machine_named(ROOT) is None
    monkeypatch.setenv(MACHINE, "h100x4")
    assert machine_named(ROOT) == MACHINES["h100x4"] and machine_named(ROOT, "laptop") == MACHINES["laptop"]
    monkeypatch.setenv(MACHINE, "nowhere")
    with pytest.raises(ExperimentError, match="there is no machine 'nowhere'; known: h100x1, "):
        machine_named(ROOT)


@pytest.mark.parametrize("on", MACHINES)
def test_the_launchpads_defaults_are_those_of_the_profile(on: str) -> None:
    machine, resources = MACHINES[on], default_resources(MACHINES[on])
    for key in ("sft", "grpo_cdrem", "regeneration"):
        assert resources[key].settings() == getattr(machine, key) and resources[key].overrides() == {}
    assert resources["engines"].serving() == machine.vllm and resources["engines"].machine == on
    models = EXPERIMENTS["web_7b"].models
    assert resources["engines"].placed(models) == place_models(models, machine.endpoints)
