"""Experiment files: what is refused, and that the message names the file, the key and the remedy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster import yaml_files
from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.grounding import BOARDS
from coepg_dagster.evaluation.protocols import PROTOCOLS, SOP_PREFIX, refuse_protocol
from coepg_dagster.experiment import (
    CODE,
    ONLY_MEASURED,
    Benchmark,
    Experiment,
    ExperimentError,
    Grpo,
    Member,
    Models,
    Quality,
    Regeneration,
    Sft,
    code_version,
    find_experiments,
    load_experiment,
    split_reference,
)
from coepg_dagster.project import Project

REPOSITORY = Path(__file__).parent.parent


MIND2WEB = {"reader": "mind2web", "path": "data", "test": ["test_task"], "protocol": "mind2web/seeclick"}
PHONE = {"reader": "android_control", "path": "data", "test": ["test"], "protocol": "android_control/os_atlas"}
REMOTE = {"model": "x", "engine": "openai", "base_url": "http://x/v1"}


def content(**change: Any) -> dict[str, Any]:
    """A small valid file; `change` replaces values by dotted key, None removes a key."""
    raw: dict[str, Any] = {
        "description": "a test",
        "iterations": 2,
        "seeds": [1, 2],
        "benchmark": {"reader": "miniwob", "path": "data", "test": ["test_seed"], "protocol": "miniwob/point"},
        "models": {
            "base_planner": "a",
            "base_grounder": "b",
            "planners": {"open_p": "c"},
            "verifiers": {"open_v": "d", "open_w": "e"},
        },
    }
    for key, value in change.items():
        *path, last = key.split("__")
        place = raw
        for part in path:
            place = place.setdefault(part, {})
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    return raw


def write(folder: Path, raw: Any, name: str = "exp") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml_files.dump(raw))
    return path


def error(folder: Path, raw: Any, name: str = "exp") -> str:
    with pytest.raises(ExperimentError) as refused:
        load_experiment(write(folder, raw, name))
    return str(refused.value)


def test_the_name_is_the_files(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, content()))
    assert (experiment.name, experiment.grpo.group_size, experiment.regeneration.rule) == ("exp", 7, "any")


@pytest.mark.parametrize("file", sorted((REPOSITORY / "experiments").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_experiments_of_the_repository_load(file: Path) -> None:
    assert load_experiment(file).description


@pytest.mark.parametrize(
    ("change", "key", "remedy"),
    [
        ({"sed": [1]}, "sed", "there is no such key; remove it or correct its spelling"),
        ({"grpo__group_sizes": 7}, "grpo.group_sizes", "correct its spelling"),
        ({"models__planners": None}, "models.planners", "the key is missing; add it"),
        ({"iterations": "three"}, "iterations", "valid integer"),
        ({"iterations": 1.5}, "iterations", "integer"),
        ({"seeds": 13}, "seeds", "list"),
        ({"grpo__enabled": "perhaps"}, "grpo.enabled", "boolean is written as true or false"),
        ({"sft__learning_rate": "fast"}, "sft.learning_rate", "number"),
        ({"sft__learning_rate": float("inf")}, "sft.learning_rate", "finite"),
        ({"sft__epochs": float("nan")}, "sft.epochs", "finite"),
        ({"iterations": 0}, "iterations", "greater than or equal to 1"),
        ({"iterations": 10**8}, "iterations", "less than or equal to 100"),
        ({"seeds": [*range(101)]}, "seeds", "at most 100 items"),
        ({"seeds": [2**32]}, "seeds", "different non-negative numbers below 2^32"),
        ({"regeneration__plans_per_planner": 10**6}, "regeneration.plans_per_planner", "less than or equal to"),
        ({"pool": "a b"}, "pool", "should match"),
        ({"pool": ""}, "pool", "should match"),
        ({"benchmark__protocol": "miniwob/pointt"}, "benchmark.protocol", "is not known; choose from miniwob/point, "),
        ({"benchmark__protocol": "sop/pointt"}, "benchmark.protocol", "is not known"),
        ({"benchmark__protocol": "android_control/qwen"}, "benchmark.protocol", "does not judge the actions of reader"),
        ({"benchmark__protocol": "screenspot/uground"}, "benchmark.protocol", "does not judge the actions of reader"),
        ({"benchmark__protocol": "mind2web/seeact"}, "benchmark.protocol", "needs chosen element"),
        ({"benchmark__protocol": "sop/miniwob/point"}, "benchmark.protocol", "a history that the model wrote itself"),
        ({"benchmark__train": "trian"}, "benchmark.train", "has no split 'trian'; it has train, validation, test_seed"),
        ({"benchmark__validation": "dev"}, "benchmark.validation", "has no split 'dev'"),
        ({"benchmark__test": ["test_seed", "test_tast"]}, "benchmark.test", "has no split 'test_tast'"),
        ({"benchmark__path": 7}, "benchmark.path", "not a valid path"),
        ({"seeds": []}, "seeds", "at least 1 item"),
        ({"seeds": [1, 1]}, "seeds", "different non-negative numbers"),
        ({"seeds": [-1]}, "seeds", "different non-negative numbers"),
        ({"models__planners": {}}, "models.planners", "at least one member: name an open model"),
        ({"models__verifiers": {}}, "models.verifiers", "at least one member"),
        ({"models__planners": {"planner_1": "x"}}, "models.planners", "call the open model otherwise"),
        ({"models__verifiers": {"grounder_2": "x"}}, "models.verifiers", "call the open model otherwise"),
        ({"models__engine": "openai"}, "models.engine", "use `vllm`, which serves them locally"),
        ({"models__engine": "tgi"}, "models.engine", "'transformers', 'vllm' or 'openai'"),
        ({"models__base_planner": REMOTE}, "models.base_planner", "give a local folder or a hub name"),
        ({"models__base_grounder": {"model": "x", "engine": "vllm"}}, "models.base_grounder", "vLLM does not train"),
        ({"models__planners__p": {"model": "x", "engine": "openai"}}, "models.planners.p", "needs `base_url`"),
        ({"models__planners__p": REMOTE | {"base_url": "ftp://x/v1"}}, "models.planners.p", "needs `base_url`"),
        ({"models__planners__p": REMOTE | {"base_url": "http://me:pw@x/v1"}}, "models.planners.p", "hold no key"),
        ({"models__planners__p": REMOTE | {"api_key_env": "sk-1"}}, "models.planners.p", "the *name* of"),
        ({"models__planners__p": REMOTE | {"engine": "vllm"}}, "models.planners.p", "only `engine: openai` has"),
        (
            {"models__planners__p": {"model": "x", "in_flight": 3}},
            "models.planners.p",
            "in_flight: only `engine: openai`",
        ),
        ({"models__planners__p": REMOTE | {"in_flight": True}}, "models.planners.p.in_flight", "valid integer"),
        ({"models__planners__p": REMOTE | {"timeout_seconds": True}}, "models.planners.p.timeout_seconds", "number"),
        ({"models__planners__p": 7}, "models.planners.p", "valid dictionary"),
        ({"sft__lora": {"rank": True}}, "sft.lora.rank", "valid integer"),
        ({"models__planners__p": REMOTE | {"url": "x"}}, "models.planners.p.url", "correct its spelling"),
        ({"models__coordinates": "unit"}, "models.coordinates", "use `norm_1000`"),
        ({"models__coordinates": "miles"}, "models.coordinates", "'original', 'resized', 'norm_1000'"),
        ({"benchmark__test": []}, "benchmark.test", "at least 1 item"),
        ({"sft__curation": {"seed_rule": {}}}, "sft.curation", "no data 'seed_rule'; known: attention_filter, "),
        (
            {"sft__curation": {"mixed_results": {}}},
            "sft.curation",
            "mixed_results is not for rows; those that are: atte",
        ),
        (
            {"grpo__curation": {"label_check": {}}},
            "grpo.curation",
            "label_check is not for prompts; those that are: cu",
        ),
        (
            {"grpo__curation": {"frontier": {"share": 2.0}}},
            "grpo.curation",
            "setting `share` of frontier: Input should be less than",
        ),
        (
            {"grpo__curation": {"frontier": {"shares": 1}}},
            "grpo.curation",
            "frontier has no setting 'shares'; it has share",
        ),
        ({"sft__curation": {"label_check": {}}}, "sft.curation", "label_check needs the setting `by`"),
        (
            {"sft__curation": {"label_check": {"by": "x"}}},
            "(whole file)",
            "no open verifier; models.verifiers has open_v",
        ),
        ({"sft__curation": ["seed_rules"]}, "sft.curation", "valid dictionary"),
        ({"sft__curation": {"seed_rules": None}}, "sft.curation.seed_rules", "valid dictionary"),
        (
            {"evaluation__inference": {"vote": {}}},
            "evaluation.inference",
            "no inference 'vote'; known: best_of_plans, ",
        ),
        (
            {"evaluation__inference": {"zoom": {"share": 0}}},
            "evaluation.inference",
            "setting `share` of zoom: Input should be great",
        ),
        ({"benchmark__test": ["train"]}, "benchmark", "must differ"),
        ({"benchmark__train": "test_seed"}, "benchmark", "must differ"),
        ({"benchmark__reader": "mindweb"}, "benchmark.reader", "miniwob"),
        ({"regeneration__k": 2}, "regeneration", "goes with `rule: k_of_n`"),
        ({"regeneration__rule": "k_of_n"}, "regeneration", "goes with `rule: k_of_n`"),
        ({"regeneration": {"rule": "k_of_n", "k": 3}}, "(whole file)", "lower k or add some"),
        ({"sft__batch_size": 10}, "sft", "not a multiple of micro_batch_size 4"),
        ({"grpo__micro_batch_size": 5}, "grpo", "does not divide the 294 rollouts"),
        ({"grpo__group_size": 1}, "grpo.group_size", "greater than or equal to 2"),
        ({"name": "other"}, "name", "named by its file; remove the key"),
        (
            {"evaluation": {"oracle_plan": True}, "benchmark": MIND2WEB},
            "(whole file)",
            "Mind2Web has no plan of a step",
        ),
        ({"evaluation": {"oracle_plan": True}, "benchmark": PHONE}, "(whole file)", "at `benchmark.level: low` only"),
        (
            {"evaluation": {"boards": {"b": {"path": "x", "protocol": "mind2web/seeclick"}}}},
            "evaluation.boards.b.protocol",
            "is of no grounding board; choose from screenspot/gui_r1",
        ),
        (
            {"evaluation": {"boards": {"test_seed": {"path": "x", "protocol": "osworld_g/items"}}}},
            "(whole file)",
            "test_seed is the name of a split",
        ),
        (
            {"init": "previous", "grpo__prompts": "unseen", "regeneration__carry_over": "none"},
            "(whole file)",
            "ϕ_k has seen",
        ),
        ({"take": ["dataset"]}, "(whole file)", "go with `parent`"),
        ({"variant": "other"}, "(whole file)", "go with `parent`"),
        ({"automation": ["nightly"]}, "automation.0", "'evaluate_nightly'"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], key: str, remedy: str) -> None:
    message = error(tmp_path, content(**change))
    assert message.startswith(f"{tmp_path / 'exp.yaml'}: key `{key}`")
    assert remedy in message


def other_values(annotation: Any) -> list[Any]:
    """Values of types that do not belong into a field, though they could be taken for one that does."""
    if annotation == list[int]:
        return [[True], [1.0], ["1"], 1, {"1": 1}]
    kinds = {annotation, *typing.get_args(annotation)}
    if bool in kinds:
        return [1, 0, "true", "yes", 1.0]
    if float in kinds:
        return [True, "1", "1e-5", [1.0]]
    if int in kinds:
        return [True, 1.0, "1", "1:30", [1]]
    if list in {typing.get_origin(kind) for kind in kinds}:
        return ["test_seed", [1], [None]]
    return [1, True, 1.5, ["x"]]


SECTIONS = {"sft": Sft, "grpo": Grpo, "regeneration": Regeneration, "quality": Quality, "benchmark": Benchmark}


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_no_type_stands_for_another(section: str, tmp_path: Path) -> None:
    fields = SECTIONS[section].model_fields if section else Experiment.model_fields
    plain = {name: field for name, field in fields.items() if name not in (*SECTIONS, "models", "name", "parent")}
    for name, field in plain.items():
        for value in other_values(field.annotation):
            key = f"{section}__{name}" if section else name
            assert f"key `{key.replace('__', '.')}" in error(tmp_path, content(**{key: value})), f"{key}: {value!r}"


def test_a_number_may_be_written_in_any_way_of_yaml_1_2(tmp_path: Path) -> None:
    raw = yaml_files.dump(content()) + "sft: {learning_rate: 1e-5, epochs: 2}\nbatch_size: 0x10\n"
    experiment = load_experiment(write(tmp_path, raw))
    assert (experiment.sft.learning_rate, experiment.sft.epochs, experiment.batch_size) == (1e-5, 2.0, 16)
    assert isinstance(experiment.sft.epochs, float)


def test_a_protocol_is_taken_where_it_can_judge_what_the_reader_gives() -> None:
    """Every protocol of the registry, alone and under SOP, with every reader."""
    taken: dict[str, set[str]] = {}
    for reader in typing.get_args(Benchmark.model_fields["reader"].annotation):
        for name in (*PROTOCOLS, *(SOP_PREFIX + name for name in PROTOCOLS)):
            with contextlib.suppress(ScoringError):
                refuse_protocol(name, reader)
                taken.setdefault(reader, set()).add(name)
    points = {f"android_control/{name}" for name in ("os_atlas", "gui_r1", "ui_genie", "qwen", "strict14")}
    boxes = {"miniwob/point", "mind2web/uground", "mind2web/seeclick"}
    elements = {"screenspot/gui_r1", "screenspot/uground"}
    assert taken == {
        **dict.fromkeys(("miniwob", "mind2web", "mind2web_blocks"), boxes),
        "android_control": points,
        "screenspot": elements | {"screenspot_v2/items"},
        "jsonl": points | boxes | elements | {board.name for board in BOARDS},
    }


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    message = error(tmp_path, content(iterations="x", sed=1, models__base_planner=None))
    assert {line.split("`")[1] for line in message.splitlines()} == {"iterations", "sed", "models.base_planner"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("[" * 1000, "not valid YAML"),
    ],
)
def test_what_is_no_experiment_file(tmp_path: Path, raw: str, expected: str) -> None:
    message = error(tmp_path, raw)
    assert message.startswith(str(tmp_path / "exp.yaml"))
    assert expected in message


def test_keys_that_are_no_names(tmp_path: Path) -> None:
    assert "exp.yaml" in error(tmp_path, yaml_files.dump(content()) + "\n1: 2\n")


def test_a_file_name_that_is_no_name(tmp_path: Path) -> None:
    assert "lower-case letters, digits and _" in error(tmp_path, content(), "My-Exp")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"nothing\.yaml: there is no such file"):
        load_experiment(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ExperimentError, match=r"binary\.yaml: cannot be read"):
        load_experiment(tmp_path / "binary.yaml")
    with pytest.raises(ExperimentError, match="cannot be read"):
        load_experiment(tmp_path)


def test_values_cannot_be_changed_afterwards(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, content()))
    with pytest.raises(ValueError, match="frozen"):
        experiment.grpo.group_size = 3  # type: ignore[misc]


def test_references(tmp_path: Path) -> None:
    write(tmp_path, content(), "one")
    write(tmp_path, content(seeds=[5]), "two")
    experiments = find_experiments(tmp_path)
    assert list(experiments) == ["one", "two"]
    assert split_reference("one", experiments.named) == (experiments["one"], 1)
    assert split_reference("one/s2", experiments.named) == (experiments["one"], 2)
    with pytest.raises(ExperimentError, match="no experiment 'three'; known: one, two"):
        split_reference("three", experiments.named)
    for wrong in ("two/s1", "two/5", "two/s", "two/s5x", "two/s5/s5", "two/", "two/s²", "two/s٥", "two/s05"):
        with pytest.raises(ExperimentError, match="two/s5"):
            split_reference(wrong, experiments.named)


# code versions


def versions(raw: dict[str, Any]) -> dict[str, str]:
    experiment = Experiment.model_validate(raw | {"name": "exp"})
    return {asset: code_version(experiment, asset) for asset in CODE}


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"description": "another"}, set()),
        ({"automation": ["refresh", "evaluate_nightly", "regenerate_weekly"]}, set()),
        ({"iterations": 9}, set()),
        ({"seeds": [3]}, set()),
        ({"sft__learning_rate": 1e-3}, {"planner_sft", "grounder", "end_to_end"}),
        ({"grpo__kl_beta": 0.5}, {"planner", "end_to_end"}),
        ({"grpo__validate_every": 4}, {"planner", "end_to_end"}),
        ({"regeneration__rule": "all"}, {"dataset"}),
        ({"regeneration__temperature": 0.5}, {"candidate_plans"}),
        ({"batch_size": 7}, {"candidate_plans"}),
        ({"regeneration__max_point_tokens": 9}, {"planner", "verdicts", "evaluation"}),
        ({"benchmark__max_train_steps": 5}, {"candidate_plans", "dataset"}),
        ({"benchmark__max_eval_steps": 5}, {"evaluation"}),
        ({"benchmark__max_bad_share": 0.5}, set()),
        ({"benchmark__test": ["test_seed", "test_text"]}, {"evaluation"}),
        ({"models__engine": "vllm"}, {"planner", "candidate_plans", "verdicts", "evaluation"}),
        ({"models__verifiers__open_v": {"model": "d", "engine": "vllm"}}, {"open_models"}),
        (
            {"models__prompts": "compact"},
            set(CODE) - {"benchmark_steps", "dataset", "data_quality", "evolution_report"},
        ),
    ],
)
def test_a_code_version_changes_with_what_its_asset_reads(change: dict[str, Any], changed: set[str]) -> None:
    before, after = versions(content()), versions(content(**change))
    assert {asset for asset in CODE if before[asset] != after[asset]} == changed


def test_prompts_decide_which_actions_of_user_data_need_a_target() -> None:
    one, other = (versions(content(benchmark__reader="jsonl", models__prompts=style)) for style in ("web", "mobile"))
    assert one["benchmark_steps"] != other["benchmark_steps"]


def test_the_place_and_the_speed_of_an_endpoint_change_nothing() -> None:
    one = versions(content(models__verifiers__far=REMOTE))
    place = {"base_url": "https://y/v1", "api_key_env": "KEY", "in_flight": 99, "timeout_seconds": 3.0}
    assert versions(content(models__verifiers__far=REMOTE | place)) == one
    assert versions(content(models__verifiers__far=REMOTE | {"processor": "z"})) != one


def test_a_member_is_written_as_it_was_read() -> None:
    """Plain text stays plain text, in files and in fingerprints."""
    models = Experiment.model_validate(content(models__verifiers__far=REMOTE) | {"name": "exp"}).models
    assert models.model_dump(mode="json")["verifiers"] == {"open_v": "d", "open_w": "e", "far": REMOTE}
    assert Models.model_validate(models.model_dump(mode="json")) == models
    assert [models.engine_of(member) for member in models.verifiers.values()] == ["transformers"] * 2 + ["openai"]


@pytest.mark.parametrize("section", [Sft, Grpo, Regeneration])
def test_every_setting_of_a_section_is_read_by_some_asset(section: Any) -> None:
    """A setting that no code version covers could be changed with nothing becoming stale."""
    name = {Sft: "sft", Grpo: "grpo", Regeneration: "regeneration"}[section]
    others: dict[str, Any] = {
        "max_tokens": {"max_tokens": 4096},
        "rollouts": {"rollouts": "vllm"},
        "lora": {"lora": {"rank": 8}},
        "attention": {"attention": "eager"},
        "validate_every": {"validate_every": 4},
        "rule": {"rule": "all"},
        "k": {"rule": "k_of_n", "k": 1},
        "carry_over": {"carry_over": "none"},
        "confidence": {"confidence": "constant"},
        "prompts": {"prompts": "unseen"},
        "max_prompts": {"max_prompts": 100},
        "max_steps": {"max_steps": 4},
        "max_num_gen_batches": {"max_num_gen_batches": 2},
        "replay": {"replay": {}},
        "environment": {"environment": {}},
        "batch_size": {"batch_size": 8},
        "micro_batch_size": {"micro_batch_size": 2},
        "prompts_per_step": {"prompts_per_step": 7},
        "group_size": {"group_size": 14},
        "num_train_epochs": {"num_train_epochs": 2},
        "num_iterations": {"num_iterations": 2},
        "lr_scheduler_type": {"lr_scheduler_type": "linear"},
        "loss_type": {"loss_type": "dapo"},
        "scale_rewards": {"scale_rewards": "batch"},
        "epsilon_high": {"epsilon_high": 0.3},
        "target": {"target": "box"},
        "folds": {"folds": 2},
        "value_mode": {"value_mode": "exact"},
        "curation": {"curation": {"curriculum": {}}},
        "delta": {"delta": 2.0},
        "importance_sampling_level": {"importance_sampling_level": "sequence"},
        "point_score": {"point_score": "lpo"},
        "terms": {"terms": {"format": 0.1}},
        "combiner": {"combiner": "ui_s1"},
        "advantage": {"advantage": ["rloo"]},
        "policy_loss": {"policy_loss": "guirlvg_kl"},
    }
    for key, default in section().model_dump().items():
        if key in others:
            value = others[key]
        elif isinstance(default, bool):
            value = {key: not default}
        elif isinstance(default, int):
            value = {key: default - 1}
        else:
            value = {key: default / 2 or 0.1}
        if key == "micro_batch_size" and name == "grpo":
            value = {key: 14}
        decides = key not in ONLY_MEASURED.get(section, ())
        assert (versions(content(**{name: value})) != versions(content())) == decides, f"{name}.{key}"


def test_how_browsers_are_run_changes_no_version() -> None:
    live = versions(content(grpo={"environment": {}}))
    for same in ({"processes": 2}, {"seconds": 5.0}, {"episodes": "recorded"}):
        assert versions(content(grpo={"environment": same})) == live, same
    whole = versions(content(grpo={"environment": {"episodes": "whole"}}))
    longer = versions(content(grpo={"environment": {"episodes": "whole", "max_steps": 9, "processes": 2}}))
    assert len({str(one) for one in (versions(content()), live, whole, longer)}) == 4


# overlays

OVERLAY: dict[str, Any] = {"description": "an ablation", "parent": "exp", "grpo": {"kl_beta": 0.5}}


def overlay(folder: Path, **change: Any) -> Path:
    """An overlay of `content()`, in a folder of its own below it."""
    write(folder, content(grpo={"group_size": 6, "kl_beta": 0.1}, automation=["refresh"]))
    (folder / "ablations").mkdir(exist_ok=True)
    return write(folder / "ablations", OVERLAY | change, "over")


def test_an_overlay_says_only_what_differs(tmp_path: Path) -> None:
    experiment = load_experiment(overlay(tmp_path, variant="other", models={"verifiers": {"open_v": "d"}}))
    assert (experiment.grpo.kl_beta, experiment.grpo.group_size, experiment.seeds) == (0.5, 6, [1, 2])
    assert experiment.models.verifiers == {"open_v": Member(model="d")} and experiment.models.base_planner == "a"
    assert (experiment.table, experiment.variant, experiment.taken) == ("exp", "other", frozenset())
    assert experiment.automation == []  # as it is not inherited
    again = write(tmp_path / "ablations", {"description": "of an overlay", "parent": "over", "iterations": 1}, "third")
    third = load_experiment(again)
    assert (third.grpo.kl_beta, third.iterations, third.variant, third.table) == (0.5, 1, "full", "third")


def test_what_is_taken_brings_what_it_was_made_from(tmp_path: Path) -> None:
    experiment = load_experiment(overlay(tmp_path, take=["planner_sft", "grounder"]))
    assert experiment.made == ("planner", "evaluation")
    assert {"dataset", "verdicts", "data_quality", "benchmark_steps", "open_models"} < experiment.taken
    data_only = load_experiment(overlay(tmp_path, take=["dataset"], grpo={}))
    assert data_only.made == ("planner_sft", "grounder", "planner", "evaluation")
    one_model = load_experiment(overlay(tmp_path, take=["dataset"], agent="end_to_end"))
    assert one_model.made == ("end_to_end", "evaluation")


@pytest.mark.parametrize(
    ("change", "key", "remedy"),
    [
        ({"parent": "nothing"}, "parent", "there is no nothing.yaml in"),
        ({"parent": "over"}, "parent", "has this file as its parent, or is it"),
        ({"description": None}, "description", "valid string"),
        ({"grpo": {"kl_betta": 0.5}}, "grpo.kl_betta", "correct its spelling"),
        ({"take": ["evaluation"]}, "take.0", "'dataset'"),
        ({"take": ["dataset"], "seeds": [1, 9]}, "seeds", "exp has [1, 2] only"),
        ({"take": ["dataset"], "iterations": 3}, "iterations", "exp has 2 only: raise it there"),
        ({"take": ["grounder"], "sft": {"epochs": 1}}, "take", "grounder is exp's, but this file changes settings"),
        ({"take": ["open_models"], "models": {"base_planner": "z"}}, "take", "open_models is exp's, but"),
        ({"take": ["planner_sft", "grounder"], "init": "previous"}, "take", "grounder is exp's, but this file changes"),
        ({"agent": "end_to_end"}, "(whole file)", "add `take: [dataset]`"),
        ({"agent": "end_to_end", "take": ["dataset", "grounder"]}, "(whole file)", "take `dataset` only"),
        ({"take": ["dataset"], "automation": ["regenerate_weekly"]}, "(whole file)", "belongs where D_k is made"),
    ],
)
def test_what_is_refused_in_an_overlay(tmp_path: Path, change: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        load_experiment(overlay(tmp_path, **change))
    named = [line for line in str(refused.value).splitlines() if f"over.yaml: key `{key}`" in line]
    assert named and remedy.split(":")[0] in named[0]


def test_a_broken_parent_is_named_by_its_file(tmp_path: Path) -> None:
    file = overlay(tmp_path)
    write(tmp_path, content(sed=1))
    with pytest.raises(ExperimentError, match=r"over\.yaml: key `parent`: exp cannot be used: .*exp\.yaml: key `sed`"):
        load_experiment(file)


def test_a_bad_file_costs_only_its_experiment_and_what_builds_on_it(tmp_path: Path) -> None:
    write(tmp_path, content(), "good")
    write(tmp_path, OVERLAY | {"parent": "good"}, "child")
    write(tmp_path, "description: [half a dra", "draft")
    write(tmp_path, OVERLAY | {"parent": "draft"}, "grandchild")
    write(tmp_path, content(), "good copy")
    write(tmp_path, OVERLAY | {"parent": "good", "take": ["planner_sft", "grounder"], "init": "previous"}, "taker")
    write(tmp_path, OVERLAY | {"parent": "taker"}, "of_taker")
    shutil.copy(tmp_path / "good.yaml", os.fsencode(tmp_path) + b"/caf\xe9.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    for hidden in ("._good.yaml", ".yaml", ".good.yaml.swp"):
        (tmp_path / hidden).write_bytes(b"\x00\x05\x16\x07 Mac OS X \xb0")
    (tmp_path / ".#good.yaml").symlink_to("me@here.1234")
    experiments = find_experiments(tmp_path)
    assert list(experiments) == ["child", "good"]
    reasons = {
        "draft": "draft.yaml, line 1, column 25: not valid YAML",
        "grandchild": "grandchild.yaml: key `parent`: draft cannot be used",
        "good copy": "good copy.yaml: the name of the file: use lower-case letters, digits and _",
        "taker": "taker.yaml: key `take`: grounder is good's, but this file changes settings",
        "of_taker": "of_taker.yaml: key `parent`: taker cannot be used: ",
        r"caf\udce9": r"caf\udce9.yaml: the name of the file: use lower-case letters, digits and _",
        "folder": "folder.yaml: cannot be read",
        "gone": "gone.yaml: there is no such file",
    }
    assert experiments.left_out.keys() == reasons.keys()
    for name, why in reasons.items():
        assert why in experiments.left_out[name]
        with pytest.raises(ExperimentError, match=re.escape(why)):
            split_reference(name, experiments.named)
    with pytest.raises(ExperimentError, match="no experiment 'other'; known: child, good"):
        split_reference("other", experiments.named)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(Experiment.model_fields)), VALUES, st.booleans())
def test_whatever_a_file_holds_it_costs_no_other(key: str, value: Any, parent: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, content(), "good")
        raw = {"description": "x", "parent": "good", key: value} if parent else content() | {key: value}
        (folder / "other.yaml").write_text(json.dumps(raw), "utf-8")
        found = find_experiments(folder)
        assert "good" in found and ("other" in found) is not ("other" in found.left_out)
        assert found.left_out.get("other", "other.yaml").find("other.yaml") >= 0


def test_an_ablation_has_a_unique_name(tmp_path: Path) -> None:
    folder = tmp_path / "experiments"
    (folder / "ablations").mkdir(parents=True)
    for file in (folder / "one", folder / "ablations" / "one", folder / "ablations" / "two"):
        write(file.parent, content(description=str(file)), file.name)
    experiments = Project(tmp_path).all_experiments()
    assert {name: one.description for name, one in experiments.items()} == {
        "one": str(folder / "one"),
        "two": str(folder / "ablations" / "two"),
    }
    assert "has the same name: rename one" in experiments.left_out["one"]


def test_an_experiment_that_is_named_is_found_as_among_all_and_no_other_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read, actually = tmp_path / "experiments", list[str](), yaml_files.read
    (folder / "ablations").mkdir(parents=True)
    for place, name in ((folder, "one"), (folder, "bad"), (folder / "ablations", "one"), (folder / "ablations", "bad")):
        write(place, content(description=str(place)), name)
    write(folder / "ablations", {"parent": "one", "description": "its child"}, "child")
    (folder / "bad.yaml").write_text("seeds: none")
    (folder / ".hidden.yaml").write_bytes((folder / "one.yaml").read_bytes())
    project = Project(tmp_path)
    known = project.all_experiments()
    for name in ("one", "child"):
        with monkeypatch.context() as patch:
            patch.setattr("coepg_dagster.yaml_files.read", lambda path: (read.append(path.stem), actually(path))[1])
            assert project.experiment(name) == known.named(name)
    assert read == ["one", "child", "one"]
    for name in ("bad", ".hidden", "../experiments/one", "none", "", "\udcff"):
        with pytest.raises(ExperimentError) as among_all:
            known.named(name)
        with pytest.raises(ExperimentError, match=re.escape(str(among_all.value))):
            project.experiment(name)


@pytest.mark.parametrize("parent", ["../exp", "/etc/passwd", "x" * 5000, ["exp"], 3, True, "Exp", ""])
def test_a_parent_is_a_name(tmp_path: Path, parent: Any) -> None:
    with pytest.raises(ExperimentError, match=r"over\.yaml: key `parent`: .* is no name of an experiment"):
        load_experiment(overlay(tmp_path, parent=parent))


def test_nothing_is_taken_from_an_overlay_that_takes(tmp_path: Path) -> None:
    overlay(tmp_path, take=["dataset"], grpo={})
    second = write(tmp_path / "ablations", {"description": "x", "parent": "over", "take": ["dataset"]}, "second")
    with pytest.raises(ExperimentError, match="over takes artifacts itself"):
        load_experiment(second)


def test_ablations_of_the_repository_differ_from_the_sandbox_in_what_they_say_only() -> None:
    folder = Path(__file__).parent.parent / "experiments"
    sandbox = load_experiment(folder / "sandbox.yaml")
    changes = {
        "no_cdrem": {"grpo.ensemble"},
        "no_grpo": {"grpo.enabled"},
        "before_grpo": {"grpo.enabled"},
        "uniform": {"grpo.own_prior", "grpo.verifier_prior"},
        "prior_only": {"grpo.confidence"},
        "literal": {"grpo.confidence"},
        "temperature": {"grpo.confidence_temperature"},
        "validated": {"grpo.validate_every"},
        "labels_25": {"benchmark.max_train_steps", "grpo.max_prompts"},
        "labels_50": {"benchmark.max_train_steps", "grpo.max_prompts"},
        "init_base": {"init"},
    }
    for name, expected in changes.items():
        other = load_experiment(folder / "ablations" / f"sandbox_{name}.yaml")
        before, after = (experiment.model_dump(mode="json") for experiment in (sandbox, other))
        different = {
            f"{part}.{key}"
            for part in ("benchmark", "models", "sft", "grpo", "regeneration")
            for key in before[part]
            if before[part][key] != after[part][key]
        } | {key for key in ("init",) if before[key] != after[key]}
        assert different == expected
        assert all(before[key] == after[key] for key in ("iterations", "seeds", "batch_size", "pool"))


@given(st.integers(1, 12), st.integers(2, 8), st.integers(1, 4), st.data())
def test_a_pass_holds_whole_groups_and_passes_are_equal(
    prompts: int, group: int, processes: int, data: st.DataObject
) -> None:
    micro = data.draw(st.sampled_from([m for m in range(1, prompts * group + 1) if prompts * group % m == 0]))
    config = Grpo(prompts_per_step=prompts, group_size=group, micro_batch_size=micro)
    assert config.pass_size(packs=False, processes=processes) == micro
    size = config.pass_size(packs=True, processes=processes)
    if prompts % processes:
        assert size == micro, "groups are shared by processes"
    else:
        assert size % group == 0 and (prompts * group // processes) % size == 0
        assert size >= min(micro, prompts * group // processes)


def test_grounding_boards_make_other_evaluations_and_nothing_else() -> None:
    board = {"path": "x", "protocol": "screenspot_pro/items"}
    for others in ({}, {"base_planner": True}):
        plain, none, with_board = (
            Experiment.model_validate(content(evaluation=others | more) | {"name": "exp"})
            for more in ({}, {"boards": {}}, {"boards": {"pro": board}})
        )
        for asset in CODE:
            versions = [code_version(one, asset) for one in (plain, none, with_board)]
            assert versions[0] == versions[1] and (versions[2] != versions[0]) == (asset == "evaluation")


# plug-ins

PLUGIN_FILES = sorted((REPOSITORY / "experiments" / "plugins").glob("*.yaml"))


CHANGED = {
    "sft": {"planner_sft", "grounder", "end_to_end"},
    "grounder_rl": {"grounder_rl", "planner"},
    "grpo": {"planner", "end_to_end"},
    "evaluation": {"evaluation"},
}


@pytest.mark.parametrize("file", PLUGIN_FILES, ids=lambda path: path.stem)
def test_an_overlay_of_a_plugin_changes_its_stage_only(file: Path) -> None:
    experiment, folders = load_experiment(file), (file.parent, file.parent.parent)
    [parent] = [path for folder in folders if (path := folder / f"{experiment.parent}.yaml").exists()]
    before = load_experiment(parent)
    content = yaml_files.read(file)
    files = [content, *(yaml_files.read(file.with_name(f"{name}.yaml")) for name in content.get("overlays", []))]
    sections = set(CHANGED) & set().union(*files)
    differs = [asset for asset in CODE if code_version(experiment, asset) != code_version(before, asset)]
    assert differs and set(differs) <= set.union(*(CHANGED[section] for section in sections))


def test_reference_plans_are_evaluated_where_the_data_always_have_them(tmp_path: Path) -> None:
    def version(**evaluation: Any) -> tuple[bool, str]:
        loaded = load_experiment(write(tmp_path, content(evaluation=evaluation)))
        return loaded.oracle_plan, code_version(loaded, "evaluation")

    assert version()[0] and version() == version(oracle_plan=True)
    assert not version(oracle_plan=False)[0] and version(oracle_plan=False) != version()
    web = load_experiment(REPOSITORY / "experiments" / "web_7b.yaml")
    assert not web.oracle_plan, "Mind2Web has no plan of a step"


@pytest.mark.parametrize("score", ["infigui_r1_box", "step_gui_box"])
def test_a_reward_of_boxes_is_for_a_grounder_that_answers_boxes(score: str, tmp_path: Path) -> None:
    learns: dict[str, Any] = {"enabled": True, "point_score": score}
    with pytest.raises(ExperimentError, match=r"set `sft\.target: box`"):
        load_experiment(write(tmp_path, content(grounder_rl=learns)))
    load_experiment(write(tmp_path, content(grounder_rl=learns, sft={"target": "box"})))
    load_experiment(write(tmp_path, content(grounder_rl={**learns, "enabled": False})))


def test_a_plugin_is_a_name_or_a_mapping_and_has_all_its_settings(tmp_path: Path) -> None:
    grpo = {
        "point_score": "gui_g2",
        "terms": {"format": 0.1, "length": {"weight": 1, "most": 300}},
        "advantage": ["rloo"],
    }
    loaded = load_experiment(write(tmp_path, content(grpo=grpo))).grpo
    assert loaded.point_score == {"name": "gui_g2", "alpha": 0.5} and loaded.combiner is None
    assert loaded.terms == {
        "format": {"name": "format", "weight": 0.1},
        "length": {"name": "length", "weight": 1.0, "free": 120, "most": 300},
    }
    assert loaded.advantage == [{"name": "rloo"}] and loaded == Grpo.model_validate_json(loaded.model_dump_json())
    assert loaded.by_labels().composite == Grpo().composite


@pytest.mark.parametrize(
    ("grpo", "message"),
    [
        ({"point_score": "gui_g3"}, "`grpo.point_score`: there is no reward 'gui_g3'; known: format, gui_g1, "),
        ({"point_score": {"alpha": 1}}, "`grpo.point_score`: name a reward, as `NAME`"),
        ({"point_score": {"name": "gui_g2", "beta": 1}}, "gui_g2 has no setting 'beta'; it has alpha"),
        ({"point_score": {"name": "gui_g2", "alpha": 0}}, "setting `alpha` of gui_g2: Input should be greater than 0"),
        (
            {"point_score": {"name": "gui_g2", "alpha": "1"}},
            "setting `alpha` of gui_g2: Input should be a valid number",
        ),
        ({"point_score": "gui_g1"}, "`grpo`: the reward 'gui_g1' asks for areas"),
        ({"terms": {"format": None}}, "`grpo.terms`: format needs the setting `weight`"),
        ({"terms": ["format"]}, "`grpo.terms`: give a mapping"),
        ({"combiner": "gui_r1"}, "the combiner 'gui_r1' asks for format"),
        ({"advantage": "rloo"}, "`grpo.advantage`: give a list"),
        ({"advantage": ["sngs", "rloo"]}, "rloo computes advantages anew"),
        ({"advantage": ["drop_spreadless"], "kl_beta": 0.1}, "set `kl_beta: 0`"),
        ({"policy_loss": "guirlvg_kl", "kl_beta": 0}, "policy_loss guirlvg_kl is a factor of `kl_beta`, which is 0"),
        ({"loss_type": "cispo", "delta": 2.0}, "the loss `cispo` does not use it"),
        (
            {"terms": {"hyperclick": 1}, "combiner": {"name": "weighted_sum", "place": 0}},
            "'hyperclick' alone is hacked by a low confidence",
        ),
    ],
)
def test_a_plugin_that_cannot_be_is_refused_with_what_can(tmp_path: Path, grpo: Any, message: str) -> None:
    assert message in error(tmp_path, content(grpo=grpo))


def combined(folder: Path, first: Any, second: Any, **own: Any) -> Path:
    """A file that combines two overlays of another experiment."""
    write(folder, content(grpo={"group_size": 6}))
    (folder / "plugins").mkdir(exist_ok=True)
    for name, grpo in (("one", first), ("two", second)):
        write(folder / "plugins", {"description": name, "parent": "elsewhere", "take": ["dataset"], "grpo": grpo}, name)
    return write(folder, {"description": "both", "parent": "exp", "overlays": ["one", "two"], **own}, "both")


def test_two_overlays_combine_without_code(tmp_path: Path) -> None:
    first = {"point_score": {"name": "gui_g2", "alpha": 0.25}, "terms": {"format": 0.1}}
    both = load_experiment(combined(tmp_path, first, {"advantage": ["sngs"], "terms": {"length": 0.2}}))
    assert both.grpo.point_score == {"name": "gui_g2", "alpha": 0.25} and set(both.grpo.terms) == {"format", "length"}
    assert both.grpo.advantage[0]["name"] == "sngs" and both.grpo.group_size == 6 and not both.take
    same = load_experiment(combined(tmp_path, first, first))
    assert same.grpo.point_score == first["point_score"]


def test_overlays_that_conflict_are_refused_with_key_and_files(tmp_path: Path) -> None:
    values = ({"point_score": "gui_g2"}, {"point_score": "se_gui"})
    with pytest.raises(
        ExperimentError, match=r"one\.yaml and .*two\.yaml differ in `grpo\.point_score`.*give it in this"
    ):
        load_experiment(combined(tmp_path, *values))
    assert load_experiment(combined(tmp_path, *values, grpo={"point_score": "lpo"})).grpo.point_score == {"name": "lpo"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overlays": ["three"]}, "key `overlays`: there is no three.yaml in"),
        ({"overlays": ["both"]}, "key `overlays`: both has this file among its overlays, or is it"),
        ({"overlays": ["exp"]}, "is no overlay, since it has no `parent`"),
        ({"overlays": ["../one"]}, "is no name of an experiment"),
        ({"overlays": "one"}, "valid list"),
    ],
)
def test_what_is_no_overlay_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(message)):
        load_experiment(combined(tmp_path, {"kl_beta": 0.2}, {"clip_epsilon": 0.1}, **change))


def test_overlays_of_plugins_are_in_a_code_location_that_the_ui_does_not_load() -> None:
    project = Project(REPOSITORY)
    assert project.location_of("se_gui") == ("plugins", "coepg_dagster.plugged")
    assert (
        project.location_of("sandbox_no_cdrem")[0] == "reproductions" and project.location_of("sandbox")[0] == "coepg"
    )
    assert "se_gui" in project.all_experiments() and "se_gui" not in project.experiments()
    assert "plugged" not in (REPOSITORY / "workspace.yaml").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "reader is miniwob, not mind2web"),
        ({"models": {"prompts": "compact"}}, "the prompts are compact, and only `web` name the action SCROLL"),
        ({"agent": "end_to_end", "take": ["dataset"]}, "the agent is end_to_end, which has no plan"),
    ],
)
def test_pages_are_scrolled_by_a_planner_of_the_web_only(tmp_path: Path, change: Any, message: str) -> None:
    shutil.copy(REPOSITORY / "experiments" / ("sandbox.yaml" if not change else "web_3b.yaml"), tmp_path / "web.yaml")
    write(tmp_path, {"description": "x", "parent": "web", "benchmark": {"view": "scroll"}, **change}, "mine")
    with pytest.raises(ExperimentError, match=re.escape(message)):
        load_experiment(tmp_path / "mine.yaml")
    shutil.copy(REPOSITORY / "experiments" / "web_3b.yaml", tmp_path / "web.yaml")
    write(tmp_path, {"description": "x", "parent": "web", "benchmark": {"view": "scroll"}}, "mine")
    assert load_experiment(tmp_path / "mine.yaml").benchmark.view == "scroll"
