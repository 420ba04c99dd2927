"""Rows, intervals and findings of a study, on runs whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.provenance import Ref
from coepg_dagster.reports.findings import findings
from coepg_dagster.reports.results_page import write_page
from coepg_dagster.reports.study import BY_JUDGE, DOMAIN, STEP_SR, Study, missing_runs, success_by_episode
from coepg_dagster.results import FULL
from tests.reports.runs import SPLITS, judge, measured, measured_row, played, run, study


def test_success_by_episode_is_the_mean_of_its_steps() -> None:
    judged = pa.table({"episode_id": ["a", "a", "b", "b"], "step_sr": [1.0, 0.0, 1.0, None]})
    one = success_by_episode(judged, "step_sr")
    assert one.episodes == ("a", "b") and one.above.tolist() == [0.5, 1.0]


def test_rows_are_one_for_each_run_split_and_metric_and_no_average() -> None:
    both = study(run(FULL, 1, {0: 0.2, 1: 0.5}), run("uniform", 1, {1: 0.5}))
    rows = both.rows()
    assert len(rows) == 6 and {row.split for row in rows} == set(SPLITS)
    assert {(row.experiment, row.variant) for row in rows} == {("box", "full"), ("box", "uniform")}
    joint = both.joint_rows()
    assert {row.seed for row in joint} == {None} and "average" in {row.split for row in joint}
    written = rows[0].to_json()
    assert (written["iteration"], written["ci95"], written["protocol"]) == (0, [0.0, 100.0], "miniwob/point, macro")


def test_measures_of_the_data_have_intervals_over_episodes() -> None:
    one = run(FULL, 1, {0: 0.2, 1: 0.5})
    for k in (0, 1):
        one.data[k] = {"purity": measured(0.5 + k / 4)}
        one.rows.append(measured_row(one, k, "train", "purity", one.data[k]["purity"].value or 0, protocol="rule any"))
    purity = [row for row in study(one).rows() if row.metric == "purity"]
    assert [row.value for row in purity] == [one.data[k]["purity"].value for k in (0, 1)]
    assert all(row.low is not None and row.high is not None and row.low < (row.value or 0) < row.high for row in purity)
    joint = [row for row in study(one).joint_rows() if row.metric == "purity"]
    assert [row.protocol for row in joint] == ["rule any"] * 2


def test_a_study_of_two_protocols_is_refused() -> None:
    other = run("uniform", 1, {1: 0.5})
    other.rows = [row.model_copy(update={"protocol": "mind2web/seeact, macro"}) for row in other.rows]
    with pytest.raises(ScoringError, match=r"box_uniform/s1 by mind2web/seeact, macro, box/s1 by miniwob/point, macro"):
        study(run(FULL, 1, {0: 0.2, 1: 0.5}), other)


def test_boards_have_protocols_of_their_own(tmp_path: Path) -> None:
    one = run(FULL, 1, {0: 0.2, 1: 0.5})
    by = {"protocol": "screenspot/uground, macro"}
    one.rows += [measured_row(one, 1, "screenspot", metric, 50.0, **by) for metric in ("acc", "acc_micro")]
    assert "## Grounding boards" in _page(study(one), tmp_path)


def test_a_study_of_step_accuracy_has_a_page_too(tmp_path: Path) -> None:
    runs = [
        judge(run(FULL, seed, {0: 0.2, 1: 0.5, 2: 0.6, 3: 0.6}), {0: 0.3, 1: 0.6, 2: 0.6, 3: 0.7}) for seed in (1, 2)
    ]
    for one in runs:
        by = {"protocol": "android_control/gui_r1, macro"}
        renamed = [row.model_copy(update=by | {"metric": row.metric.replace("sr", "acc", 1)}) for row in one.rows]
        one.rows = [*renamed, *(measured_row(one, 1, split, "type_acc", 77.7, **by) for split in ("test_a", "test_b"))]
    page, of = _page(study(*runs), tmp_path), study(*runs)
    assert {row.metric for row in of.joint_rows()} == {"step_acc", "step_acc_judge"}
    assert "Step SR" not in page and "points of mean step accuracy by the judge, 2 seeds" in page
    assert "test_a type | test_a grounding | test_a step accuracy" in page and "| 77.7 | – |" in page
    assert "Table 3" not in page and "figure-2" not in page and "figure-7" in page


def test_the_page_names_what_is_missing_and_the_command_of_every_row(tmp_path: Path) -> None:
    one = study(run(FULL, 1, {0: 0.2, 1: 0.5}))
    why = "code or configuration changed (1 → 2)"
    one.runs[0].stale = {Ref("planner", 1): why, Ref("evaluation", 1): f"planner[1]: {why}"}
    wanted = {"box/s1": ("box", FULL, 1, range(4)), "box_uniform/s1": ("box", "uniform", 1, range(3, 4))}
    missing = missing_runs(one, wanted)
    assert missing == ["coepg evolve box/s1 --through 3", "coepg evolve box_uniform/s1 --from 3 --through 3"]
    assert missing_runs(one, {"box/s1": ("box", FULL, 1, range(1, 2))}) == []
    # an overlay of fewer iterations than the study: no command goes beyond them
    assert missing_runs(one, {"box_no/s1": ("box", "no", 1, range(3))}) == ["coepg evolve box_no/s1 --through 2"]
    page = write_page(one, findings(one), missing, {"box_large": "models/large is not there"}, tmp_path)
    text = page.read_text()
    for line in (
        "superiority: above 0 | holds for one seed, on stale inputs | +",
        "No run here has a judge: the measure is **Step SR by ϕ_k**",
        "- `coepg evolve box/sSEED --through 3`, SEED being 1",
        "- `coepg evolve box_uniform/sSEED --from 3 --through 3`, SEED being 1",
        "box_large: models/large is not there",
        "what the loop gains is the domain",
        "`coepg evolve box/sSEED --through K`",
    ):
        assert line in text
    assert "1 of 1 loops" in text and "- code or configuration changed (1 → 2)" in text
    assert (tmp_path / "images" / "results" / "figure-7.png").stat().st_size > 1000


def test_the_page_says_where_grpo_was_hardly_trained(tmp_path: Path) -> None:
    small, large = run(FULL, 1, {0: 0.2, 1: 0.5}), run(FULL, 2, {0: 0.2, 1: 0.5})

    def page_text(rollouts: int) -> str:
        for one, seen in ((small, rollouts), (large, 20_000)):
            one.rows = [row for row in one.rows if row.split != "train"]
            values = {"rollouts": seen, "grpo_before": 50.0, "grpo_after": 56.0}
            one.rows += [measured_row(one, 1, "train", name, value) for name, value in values.items()]
        both = study(small, large)
        return write_page(both, findings(both), [], {}, tmp_path).read_text()

    few = page_text(1024)
    assert "**GRPO was hardly trained.** 1 of 2 runs saw fewer than 10,000 rollouts (the smallest 1,024)" in few
    assert "| 50.0 | 56.0 |" in few and "before GRPO" in few
    assert "hardly trained" not in page_text(10_000)


def test_the_page_has_rows_of_both_sizes_and_a_table_of_live_play_for_each_split(tmp_path: Path) -> None:
    one, large = run(FULL, 1, {0: 0.2, 1: 0.5}), run(FULL, 1, {0: 0.3, 1: 0.6}, "box_large")
    for k, split in ((0, "test_a"), (1, "test_a"), (1, "test_b")):
        one.live[k, split] = played({f"menus_{split}": 25.0}, episodes=4)
    both = study(one, large)
    text = write_page(both, findings(both), [], {}, tmp_path).read_text()
    assert "| box M_1 |" in text and "| box_large M_1 |" in text and "| box_large M_2 |" not in text
    by_split = text.split("**test_b: success")
    assert "menus_test_a | 1/4 | 1/4 |" in by_split[0] and "menus_test_a" not in by_split[1]
    assert "`coepg play box/s1@1 --split test_b --episodes 4`" in by_split[1]


def test_the_page_combines_live_play_of_several_seeds(tmp_path: Path) -> None:
    runs = [run(FULL, seed, {0: 0.2, 1: 0.5}) for seed in (1, 2, 3)]
    for one, rate in zip(runs, (20.0, 40.0, 60.0), strict=True):
        one.live[1, "test_a"] = played({"menus": rate, "tabs": rate})
    both = study(*runs)
    rate = both.live_rate(1, "test_a")
    assert rate is not None and (rate[0].value, rate[0].seeds, rate[0].over) == (40, 3, "seeds and families")
    text = write_page(both, findings(both), [], {}, tmp_path).read_text()
    assert "box M_1, 3 seeds" in text
    assert [row.value for row in both.joint_rows() if row.metric == "success_rate_macro"] == [40]
    runs[2].live[1, "test_a"] = played({"menus": 60.0, "tabs": 60.0}, episodes=3)  # others
    assert both.players([1], "test_a") == [1, 2]


def test_the_page_says_who_judges(tmp_path: Path) -> None:
    both = study(judge(run(FULL, 1, {0: 0.2, 1: 0.5}), {0: 0.3, 1: 0.4}), run("uniform", 1, {1: 0.5}))
    text = write_page(both, findings(both), [], {}, tmp_path).read_text()
    assert "The primary measure is **Step SR by the judge**" in text
    assert "| box M_1 |" in text.split("## Who judges")[1].split("## Tables")[0] and "uniform M_1" not in text


def test_the_page_shows_what_is_new_to_the_base_pair(tmp_path: Path) -> None:
    both = study(*(run("full", seed, {0: 0.3, 1: 0.6, 3: 0.6}) for seed in (1, 2)))
    assert "## The new domain" not in write_page(both, findings(both), [], {}, tmp_path).read_text()
    for one in both.runs:
        one.success |= {(k, "test_a" + DOMAIN, STEP_SR): measured(rate, one.seed) for k, rate in ((0, 0.1), (1, 0.7))}
    text = write_page(both, findings(both), [], {}, tmp_path).read_text()
    row = next(line for line in text.splitlines() if line.startswith("| test_a/domain, Step SR by ϕ_k |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    gain = np.mean([100 * (measured(0.7, seed).above - measured(0.1, seed).above).mean() for seed in (1, 2)])
    assert cells[3:5] == ["–", "–"] and cells[5].startswith(f"+{gain:.1f} [") and cells[6] == "–"
    assert "test_b/domain" not in text


def test_the_page_says_which_model_gained(tmp_path: Path) -> None:
    whole, before = run(FULL, 1, {0: 0.2, 1: 0.5}), run("before_grpo", 1, {1: 0.4})
    for one, k, metric, value in (
        (whole, 0, "step_sr", 20.0),
        (whole, 0, "step_sr_judge", 25.0),
        (whole, 1, "step_sr_base_planner", 31.0),
        (before, 1, "step_sr_judge", 42.0),
        (whole, 1, "step_sr_judge", 53.0),
        (whole, 1, "step_sr_oracle_plan", 81.0),
    ):
        one.rows.append(measured_row(one, k, "validation", metric, value))
    parts = _page(study(whole, before), tmp_path).split("## What each part brings")[1].split("## Tables")[0]
    assert "| base planner and ϕ_k: SFT of ϕ alone | 20.0 | 31.0 | – | – |" in parts
    assert "| π_k and the judge: SFT of π alone | 25.0 | 42.0 |" in parts
    assert "| π'_k and the judge: GRPO too | 25.0 | 53.0 |" in parts
    assert "| reference plans and ϕ_k | – | 81.0 |" in parts and "best of several" not in parts
    assert "What each part brings" not in _page(study(run(FULL, 1, {0: 0.2, 1: 0.5})), tmp_path)


def test_shares_of_labels_are_shown_where_all_of_them_are(tmp_path: Path) -> None:
    whole, quarter = run(FULL, 1, {0: 0.2, 1: 0.5, 3: 0.6}), run(FULL, 1, {0: 0.2, 1: 0.4}, "box_labels_25")
    assert "Figure 4: Step SR at k = 1 against labelled steps" in _page(study(whole, quarter), tmp_path)
    assert "Figure 4: Step SR at k = 3 against labelled steps" in _page(study(whole), tmp_path)


def test_a_page_names_the_first_cause_of_what_is_stale(tmp_path: Path) -> None:
    one = run(FULL, 1, {0: 0.2, 1: 0.5})
    one.stale = {
        Ref(
            "planner", 1
        ): "planner_sft[1]: its files are gone from the store: box/s1/planner_sft/1/x/model.safetensors",
        Ref("evaluation", 1): "planner[1]: code or configuration changed (1-a → 1-b)",
    }
    page = _page(study(one), tmp_path)
    assert "1 of 1 loops have artifacts that are stale" in page and "safetensors" not in page
    assert "- files are not in the store" in page and "- code or configuration changed (1-a → 1-b)" in page


def test_the_page_says_what_each_step_of_an_iteration_adds(tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2, 3):
        for variant, rates in ((FULL, {0: 0.2, 1: 0.8}), ("before_grpo", {1: 0.5})):
            one = run(variant, seed, rates)
            for k, rate in rates.items():
                one.success[k, "validation", BY_JUDGE] = measured(rate, seed)
                one.rows.append(measured_row(one, k, "validation", "step_sr_judge", 100 * rate))
            runs.append(one)
    of = study(*runs)
    of_grpo = of.difference(("box", FULL, 1), ("box", "before_grpo", 1), [1, 2, 3], "validation", BY_JUDGE)
    page = _page(of, tmp_path).split("## What each part brings")[1].split("## Tables")[0]
    assert of_grpo.ci95 is not None and 0 < of_grpo.ci95[0] < 30 < of_grpo.ci95[1]
    assert f"| GRPO: the judge, π'_k − π_k | {of_grpo.signed} | – | – |" in page
    assert "| π'_k and the judge: GRPO too |" in page and "SFT of ϕ: reference plans" not in page
    del runs[-1].success[1, "validation", BY_JUDGE]
    assert of.seeds_with(("box", "before_grpo", 1), "validation", BY_JUDGE) == [1, 2]


def _page(of: Study, folder: Path) -> str:
    return write_page(of, findings(of), [], {}, folder).read_text()


def test_a_page_on_other_data_says_nothing_of_the_embedded_benchmark(tmp_path: Path) -> None:
    one = study(run(FULL, 1, {0: 0.2, 1: 0.5}))
    out, words = tmp_path / "store/pages/box/results", ("embedded", "MiniWoB", "analysis-plan", "## Live play")
    out.mkdir(parents=True)
    one.embedded = False
    text = write_page(one, findings(one), [], {}, out, docs="../../docs/").read_text()
    assert text.startswith("# Results of box\n") and not [word for word in words if word in text]
    assert "](../../docs/protocols.md#" in text and "](protocols.md" not in text
    one.embedded = True
    text = write_page(one, findings(one), [], {}, tmp_path).read_text()
    assert text.startswith("# Results on the embedded benchmark\n") and all(word in text for word in words)
    assert "](analysis-plan.md)" in text
