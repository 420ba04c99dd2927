"""Settings of training: passes, rewards and plug-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        ({"loss_type": "cispo", "delta": 2.0}, "the loss `cispo` does not use it"),
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
