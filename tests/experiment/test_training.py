"""Settings of training: passes, rewards and plug-ins."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from trl import GRPOConfig, GRPOTrainer

from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.experiment.training import Grpo
from tests.experiment.sample import content, error, write


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


def test_dropout_is_of_sft_only(tmp_path: Path) -> None:
    """Rollouts are sampled without it."""
    lora: dict[str, Any] = {"rank": 4, "dropout": 0.1}
    for section in ("grpo", "grounder_rl"):
        assert "lora.dropout is of SFT only" in error(tmp_path, content(**{section: {"lora": lora}}))
        load_experiment(write(tmp_path, content(**{section: {"lora": lora | {"dropout": 0}}})))
    load_experiment(write(tmp_path, content(sft={"lora": lora})))


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
        (
            {"terms": {"length": -0.1}, "advantage": ["maxrl"]},
            "maxrl needs rewards of 0 or more, and these go down to -0.1: remove it, or the negative weights",
        ),
        (
            {"terms": {"format": 0.1, "length": -0.5}, "policy_loss": "guirlvg_kl"},
            "guirlvg_kl needs rewards of 0 or more, and these go down to -0.5",
        ),
        (
            {"loss_type": "cispo"},
            "epsilon_high: the loss `cispo` limits the ratio itself by it: set 1 or more, e.g. 4.0",
        ),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high: the loss `cispo` limits the ratio itself"),
        ({"loss_type": "cispo", "epsilon_high": 4.0, "delta": 2.0}, "delta: the loss `cispo` does not use it"),
        ({"loss_type": "luspo"}, "importance_sampling_level: the loss `luspo` is one of the `sequence`: set that"),
        (
            {"loss_type": "dapo", "importance_sampling_level": "sequence"},
            "importance_sampling_level: the loss `dapo` would weigh a ratio of the `sequence` by its length",
        ),
        (
            {"terms": {"hyperclick": 1}, "combiner": {"name": "weighted_sum", "place": 0}},
            "'hyperclick' alone is hacked by a low confidence",
        ),
    ],
)
def test_a_plugin_that_cannot_be_is_refused_with_what_can(tmp_path: Path, grpo: Any, message: str) -> None:
    assert message in error(tmp_path, content(grpo=grpo))


def test_what_needs_rewards_of_0_or_more_has_them(tmp_path: Path) -> None:
    for needs in ({"advantage": ["maxrl"]}, {"policy_loss": "guirlvg_kl"}):
        refused = error(tmp_path, content(grounder_rl={"point_score": "infigui_g1", **needs}))
        assert "needs rewards of 0 or more, and these go down to -1: remove it" in refused
        for fits in ({"point_score": "gui_g2"}, {"combiner": "gui_libra"}, {"terms": {"format": 0.1}}):
            load_experiment(write(tmp_path, content(grounder_rl={**fits, **needs})))


def gradients(config: Grpo, ratios: torch.Tensor) -> list[float]:
    """Of TRL's own loss by each token's log-probability: two answers of two tokens, advantages 1 and -1, and these ratios."""
    trainer = object.__new__(GRPOTrainer)
    alone = SimpleNamespace(num_processes=1, reduce=lambda value, **_: value, gather=lambda value: value)
    logps, mask = torch.full((2, 2), -1.0, requires_grad=True), torch.ones(2, 2)
    args = GRPOConfig(output_dir="x", delta=config.delta, use_cpu=True, bf16=False)
    vars(trainer).update(
        args=args,
        accelerator=alone,
        model=SimpleNamespace(training=False),
        loss_type=config.loss_type,
        importance_sampling_level=config.importance_sampling_level,
        epsilon_low=config.clip_epsilon,
        epsilon_high=config.clip_epsilon if config.epsilon_high is None else config.epsilon_high,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        max_completion_length=2,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros(2, 2), None),
    )
    ids = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), mask.long())
    old = {"old_per_token_logps": (logps - ratios.log()).detach(), "num_items_in_batch": torch.tensor(4)}
    inputs = {**ids, **old, "completion_mask": mask, "advantages": torch.tensor([1.0, -1.0])}
    GRPOTrainer._compute_loss(trainer, None, inputs).backward()
    assert logps.grad is not None
    return logps.grad.flatten().tolist()  # type: ignore[no-any-return]


LOSSES = get_args(Grpo.model_fields["loss_type"].annotation)
USABLE = {"cispo": {"epsilon_high": 4.0}, "luspo": {"importance_sampling_level": "sequence"}}
"""What a loss needs besides the defaults."""


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("setting", [{"clip_epsilon": 0.4}, {"epsilon_high": 1.6}, {"delta": 1.5}], ids=str)
def test_what_a_loss_does_not_use_is_refused(loss: str, setting: dict[str, float]) -> None:
    plain: dict[str, Any] = {"loss_type": loss, **USABLE.get(loss, {})}
    batches = [torch.full((2, 2), ratio) for ratio in (0.7, 1.3, 3.0)]
    default = Grpo.model_validate(plain)
    changed = default.model_copy(update=setting)
    uses = any(gradients(default, ratios) != gradients(changed, ratios) for ratios in batches)
    try:
        assert Grpo.model_validate(plain | setting) == changed and uses
    except ValidationError as refused:
        assert not uses and f"the loss `{loss}` does not use it" in str(refused)


@pytest.mark.parametrize("loss", LOSSES)
def test_before_the_first_update_no_loss_damps_the_gradient(loss: str) -> None:
    """At ratio 1 each token has its share of the mean over four tokens, or over two answers: no limit of the ratio cuts it."""
    ones = torch.ones(2, 2)
    config = Grpo.model_validate({"loss_type": loss, **USABLE.get(loss, {})})
    made = gradients(config, ones)
    share = 0.5 if loss == "luspo" else 0.25
    assert made == pytest.approx([-share, -share, share, share])
