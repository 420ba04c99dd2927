"""What an experiment file may not hold, and that the message names the file, the key and the remedy."""

from __future__ import annotations

import contextlib
import re
import shutil
import typing
from pathlib import Path
from typing import Any

import pytest

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.grounding import BOARDS
from coepg_dagster.evaluation.protocols import PROTOCOLS, SOP_PREFIX, refuse_protocol
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.schema import Benchmark, Experiment, Quality, Regeneration
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.experiment.versions import code_version
from tests.experiment.sample import MIND2WEB, PHONE, REMOTE, content, error, write
from tests.project import REPOSITORY


@pytest.mark.parametrize(
    ("change", "key", "remedy"),
    [
        ({"sed": [1]}, "sed", "there is no such key; did you mean `seeds`?"),
        ({"colour": 1}, "colour", "there is no such key; remove it or correct its spelling"),
        ({"sft__learning_rat": 1}, "sft.learning_rat", "did you mean `learning_rate`?"),
        ({"sft__num_train_epochs": 1}, "sft.num_train_epochs", "did you mean `epochs`?"),
        ({"sft__lora": {"rnk": 4}}, "sft.lora.rnk", "did you mean `rank`?"),
        ({"grpo__beta": 0.1}, "grpo.beta", "did you mean `kl_beta`?"),
        ({"models__verifiers": {"v": {"model": "x", "procesor": "y"}}}, "models.verifiers.v.procesor", "`processor`?"),
        ({"grpo__group_sizes": 7}, "grpo.group_sizes", "did you mean `group_size`?"),
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
        ({"models__planners": {"planner_1": "x"}}, "models.planners", "give the open model another name"),
        ({"models__verifiers": {"grounder_2": "x"}}, "models.verifiers", "give the open model another name"),
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
        ({"regeneration__k": 2}, "regeneration", "`rule: k_of_n` needs `k`, and no other rule takes it"),
        ({"regeneration__rule": "k_of_n"}, "regeneration", "`rule: k_of_n` needs `k`, and no other rule takes it"),
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


def test_values_cannot_be_changed_afterwards(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, content()))
    with pytest.raises(ValueError, match="frozen"):
        experiment.grpo.group_size = 3  # type: ignore[misc]


def test_reference_plans_are_evaluated_where_the_data_always_have_them(tmp_path: Path) -> None:
    def version(**evaluation: Any) -> tuple[bool, str]:
        loaded = load_experiment(write(tmp_path, content(evaluation=evaluation)))
        return loaded.oracle_plan, code_version(loaded, "evaluation")

    assert version()[0] and version() == version(oracle_plan=True)
    assert not version(oracle_plan=False)[0] and version(oracle_plan=False) != version()
    web = load_experiment(REPOSITORY / "experiments" / "web_7b.yaml")
    assert not web.oracle_plan, "Mind2Web has no plan of a step"


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
