"""Code versions: they change with what an asset reads, and with nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coepg_dagster import yaml_files
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.schema import Experiment, Regeneration
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.experiment.versions import CODE, ONLY_MEASURED, code_version
from tests.experiment.sample import REMOTE, content
from tests.project import REPOSITORY


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
        ({"regeneration__rule": "all"}, {"dataset", "data_quality"}),
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


def test_the_order_of_strategies_counts_where_they_are_applied_in_it() -> None:
    prompts = {"frontier": {}, "mixed_results": {}}
    rows = {"curriculum": {}, "seed_rules": {}}
    for section, strategies, changed in (
        ("grpo", prompts, {"planner", "end_to_end"}),
        ("sft", rows, {"planner_sft", "grounder", "end_to_end"}),
        ("grounder_rl", rows, {"grounder_rl"}),
    ):
        one, other = (
            versions(content(**{section: {"curation": dict(order)}}))
            for order in (strategies.items(), reversed(strategies.items()))
        )
        assert {asset for asset in one if one[asset] != other[asset]} == changed, section


def test_the_size_of_a_batch_counts_wherever_answers_are_sampled() -> None:
    """Answers of a batch are drawn from one generator."""
    for more, changed in (
        ({"evaluation": {"attempts": 2}}, {"evaluation"}),
        ({"evaluation": {"inference": {"region_vote": {}}}}, {"evaluation"}),
        ({"evaluation": {"base_planner": True}}, set()),
        ({"grpo": {"curation": {"mixed_results": {}}}}, {"planner", "end_to_end"}),
        ({"sft": {"curation": {"curriculum": {}}}}, set()),
    ):
        one, other, same = (versions(content(**more, **size)) for size in ({}, {"batch_size": 7}, {"batch_size": 64}))
        assert {asset for asset in one if one[asset] != other[asset]} == changed | {"candidate_plans"}, more
        assert same == one


def test_how_browsers_are_run_changes_no_version() -> None:
    live = versions(content(grpo={"environment": {}}))
    for same in ({"processes": 2}, {"seconds": 5.0}, {"episodes": "recorded"}):
        assert versions(content(grpo={"environment": same})) == live, same
    whole = versions(content(grpo={"environment": {"episodes": "whole"}}))
    longer = versions(content(grpo={"environment": {"episodes": "whole", "max_steps": 9, "processes": 2}}))
    assert len({str(one) for one in (versions(content()), live, whole, longer)}) == 4


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
