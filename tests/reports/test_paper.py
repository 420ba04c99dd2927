"""The paper's tables and figures from rows of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.reports.figures import png_bytes
from coepg_dagster.reports.html import render
from coepg_dagster.reports.paper import (
    figure_2,
    figure_4,
    figure_5,
    figure_6,
    figure_7,
    grpo_progress,
    paper_table_1,
    table_1,
    table_2,
    table_3,
    table_4,
)
from coepg_dagster.results import AVERAGE, FULL, Cells, Row
from coepg_dagster.steps import ROLLOUT_SCHEMA

SPLITS = ["test_seed", "test_text"]


def row(value: float, ci95: Any = None, **change: Any) -> Row:
    of = {
        "experiment": "sandbox",
        "variant": FULL,
        "seed": 13,
        "k": 3,
        "split": "test_seed",
        "metric": "step_sr",
        "protocol": "miniwob/point, macro",
    }
    low, high = ci95 or (None, None)
    return Row(**(of | change), value=value, low=low, high=high)


def cells_of(rows: list[Row], splits: list[str] = SPLITS) -> Cells:
    return Cells(rows, splits)


def whole() -> Cells:
    """Three iterations, three seeds, and one ablation."""
    rows = []
    for seed in (13, 42, 1234):
        for k in range(4):
            for split in SPLITS:
                for metric in ("ele_acc", "op_f1", "step_sr"):
                    rows.append(row(40 + 5 * k + seed % 3, seed=seed, k=k, split=split, metric=metric))
            for metric in ("purity", "purity_frozen", "diversity", "coverage"):
                rows.append(row(2 + k, seed=seed, k=k, split="train", metric=metric, protocol="rule any"))
    rows += [row(50, variant="uniform", split=split) for split in SPLITS]
    return cells_of(rows)


def test_a_row_over_all_seeds_comes_before_the_mean_of_the_seeds() -> None:
    single = [row(40, seed=1), row(50, seed=2)]
    mean = cells_of(single).cell("sandbox", FULL, 3, "test_seed", "step_sr")
    assert mean is not None and (mean.value, mean.ci95) == (45, None)
    joint = cells_of([*single, row(46, (41, 51), seed=None)]).cell("sandbox", FULL, 3, "test_seed", "step_sr")
    assert joint is not None and joint.text() == "46.0 [41.0, 51.0]"


@given(st.integers(1, 30), st.integers(1, 3))
def test_cells_of_many_iterations(iterations: int, seeds: int) -> None:
    rows = [
        row(k + seed, (k, k + 9), k=k, seed=seed, split=split)
        for k in range(iterations)
        for seed in range(seeds)
        for split in SPLITS
    ]
    cells = cells_of(rows)
    for split in (*SPLITS, AVERAGE):
        series = cells.series("sandbox", FULL, split, "step_sr")
        assert [(k, cell.value) for k, cell in series] == [
            (k, pytest.approx(k + (seeds - 1) / 2)) for k in range(iterations)
        ]
        assert [cell.ci95 is None for _, cell in series] == [seeds > 1] * iterations
        of_seeds = cells.seeds("sandbox", FULL, split, "step_sr")
        assert list(of_seeds) == list(range(seeds))
        assert all([k for k, _ in of] == list(range(iterations)) for of in of_seeds.values())
    assert cells.cell("sandbox", FULL, iterations, SPLITS[0], "step_sr") is None


def test_the_average_needs_every_split() -> None:
    assert cells_of([row(40)]).cell("sandbox", FULL, 3, AVERAGE, "step_sr") is None
    both = [row(40, (37, 43)), row(60, (56, 64), split="test_text")]
    average = cells_of(both).cell("sandbox", FULL, 3, AVERAGE, "step_sr")
    # splits of one pair of models have independent errors: half-widths 3 and 4 make 5 / 2
    assert average is not None and average.text() == "50.0 [47.5, 52.5]"
    given_one = [*both, row(51, (45, 55), split=AVERAGE, seed=None)]
    average = cells_of(given_one).cell("sandbox", FULL, 3, AVERAGE, "step_sr")
    assert average is not None and average.text() == "51.0 [45.0, 55.0]"


def test_several_seeds_get_no_interval_that_leaves_the_seeds_out() -> None:
    rows = [row(40, (37, 43), seed=seed, split=split) for seed in (1, 2) for split in SPLITS]
    average = cells_of(rows).cell("sandbox", FULL, 3, AVERAGE, "step_sr")
    assert average is not None and average.ci95 is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_the_mean_of_the_seeds_is_between_them(values: list[float]) -> None:
    cell = cells_of([row(v, seed=i) for i, v in enumerate(values)]).cell("sandbox", FULL, 3, "test_seed", "step_sr")
    assert cell is not None and min(values) - 1e-9 <= cell.value <= max(values) + 1e-9


VIEWS: list[Callable[[Cells], Any]] = [
    lambda cells: table_1(cells, {"sandbox": 3}),
    lambda cells: table_3(cells, "sandbox", 3),
    lambda cells: table_4(cells, "sandbox", 3),
    lambda cells: figure_2(cells, {"small": "sandbox"}),
    lambda cells: figure_4(cells, {50: "half", 100: "sandbox"}, 3),
    lambda cells: figure_7(cells, {"small": "sandbox", "half": "half"}),
]


@pytest.mark.parametrize("view", VIEWS)
def test_no_table_and_no_figure_mixes_protocols(view: Callable[[Cells], Any]) -> None:
    def rows(protocol: str) -> list[Row]:
        full = [row(40, k=k, split=split) for split in SPLITS for k in (1, 3)]
        change = {"protocol": protocol}
        others = [{"variant": "no_grpo"}, {"variant": "uniform"}, {"variant": "end_to_end"}, {"experiment": "half"}]
        return full + [row(50, split=s, **other | change) for other in others for s in SPLITS] + [row(1, k=2, **change)]

    view(cells_of(rows("miniwob/point, macro (steps lost)")))
    with pytest.raises(ScoringError, match="one table holds one protocol"):
        view(cells_of(rows("mind2web/seeact, macro")))


def test_table_1_and_what_is_missing() -> None:
    table = table_1(whole(), {"sandbox": 4})
    assert table.rows[0][:3] == ("sandbox M_0 (base pair)", "miniwob/point, macro", "40.7")
    assert table.rows[3][-1] == "55.7"
    assert table.rows[4][1] == "missing: `coepg evolve sandbox --through 4`"
    assert len({len(cells) for cells in (table.header, *table.rows)}) == 1
    assert paper_table_1().rows[-1][-1] == "58.4"


def test_on_the_papers_splits_its_rows_come_first() -> None:
    splits = ["test_task", "test_website", "test_domain"]
    rows = [row(60, split=split, metric=m) for split in splits for m in ("ele_acc", "op_f1", "step_sr")]
    table = table_1(cells_of(rows, splits), {"sandbox": 3})
    assert table.rows[0][0] == "GPT-4 + Choice" and table.rows[-1][-1] == "60.0"
    assert "Cross-Website Op.F1" in table.header


def test_table_2() -> None:
    of = {"metric": "step_acc", "protocol": "android_control/os_atlas, macro"}
    rows = [row(v, experiment=name, split="test", **of) for name, v in (("sandbox", 70.0), ("sandbox_low", 80.0))]
    table = table_2(cells_of(rows, ["test"]), {"high": "sandbox", "low": "sandbox_low"}, 3)
    assert table.rows[-1] == ("sandbox M_3", "android_control/os_atlas, macro", "70.0", "80.0", "75.0")
    assert table.rows[-2][1] == "missing: `coepg evolve sandbox --through 2`"


def test_tables_3_and_4_hold_the_papers_numbers_and_the_commands_of_missing_rows() -> None:
    third, fourth = table_3(whole(), "sandbox", 3), table_4(whole(), "sandbox", 3)
    assert third.rows[0][1] == "missing: `coepg evolve sandbox_end_to_end_sft --through 3`"
    assert third.rows[3] == ("decoupled, SFT and GRPO", "55.7", "53.5")
    by_name = {cells[0]: cells[1:] for cells in fourth.rows}
    assert by_name["full"] == ("55.67", "55.0 to 56.0", "58.41")
    assert by_name["w/o Confidence & Prior (uniform)"] == ("50.00", "–", "57.01")
    assert "sandbox_no_cdrem" in fourth.markdown()


def test_html_is_escaped_and_commands_are_code() -> None:
    html = render("table.html", table=table_4(whole(), "<b>sandbox</b>", 3))
    assert "<b>" not in html and "&lt;b&gt;" in html and "<code>coepg evolve" in html


def rollout(step: int, gate: str, hits: list[bool]) -> dict[str, Any]:
    graders = [
        {"grounder": f"g{i}", "x": 1.0, "y": 1.0, "hit": hit, "tokens": 2, "mean_logprob": -0.1, "confidence": 0.9}
        | {"prior": 1.0, "weight": 0.5, "seconds": 0.01, "failure": None}
        for i, hit in enumerate(hits)
    ]
    common = {"group": 0, "step_id": "s", "text": "", "plan": "p", "reward": 1.0, "advantage": 0.0}
    return common | {"optimizer_step": step, "gate": gate, "graders": graders}


def test_progress_during_grpo_by_hand() -> None:
    rows = [
        rollout(0, "passed", [True, False]),
        rollout(0, "passed", [False, True]),
        rollout(0, "wrong_type", []),
        rollout(0, "passed", []),  # no target
        rollout(1, "passed", [True, True]),
    ]
    table = pa.Table.from_pylist(rows, ROLLOUT_SCHEMA)
    assert grpo_progress(table, "g0", window=1) == [(0, 50.0), (1, 100.0)]
    assert grpo_progress(table, "g1", window=2) == [(0, 50.0), (1, 75.0)]


def lines(axes: Any) -> dict[str, list[float]]:
    curves = {}
    for container in axes.containers:
        curves[container.get_label()] = [round(float(v), 2) for v in container.lines[0].get_ydata()]
    return curves


def test_figures_show_the_rows() -> None:
    cells = whole()
    second = figure_2(cells, {"small": "sandbox", "large": "sandbox_large"})
    assert lines(second.axes[0]) == {"small, with GRPO": [40.67, 45.67, 50.67, 55.67]}
    assert second.axes[1].lines[0].get_ydata()[-1] == 58.4
    fourth = figure_4(cells, {25: "sandbox_labels_25", 100: "sandbox"}, 3)
    assert lines(fourth.axes[0]) == {"M_0": [40.67], "M_3": [55.67]}
    sixth = figure_6(cells, "sandbox")
    assert (
        lines(sixth.axes[0])["purity, frozen verifiers"] == [2, 3, 4, 5] and lines(sixth.axes[1])["diversity"][0] == 2
    )
    seventh = figure_7(cells, {"small": "sandbox"})
    assert [axes.get_title() for axes in seventh.axes] == SPLITS
    fifth = figure_5({"C-DREM": [[(0, 10.0), (1, 30.0)], [(0, 20.0), (1, 50.0)]]})
    assert list(fifth.axes[0].lines[0].get_ydata()) == [15.0, 40.0]
    assert png_bytes(fifth) == png_bytes(fifth)


def test_figures_of_nothing_are_empty_and_not_errors() -> None:
    nothing = cells_of([])
    for drawn in (
        figure_2(nothing, {"small": "x"}),
        figure_6(nothing, "x"),
        figure_7(nothing, {"s": "x"}),
        figure_5({}),
    ):
        assert png_bytes(drawn).startswith(b"\x89PNG")
