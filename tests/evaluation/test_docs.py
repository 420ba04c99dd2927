"""The tables of docs/protocols.md are those that the commands make."""

from __future__ import annotations

from pathlib import Path

import pytest

from coepg_dagster.evaluation import statistics
from coepg_dagster.evaluation.protocols import protocols_markdown

from .shared import PREDICTIONS, needs_data, protocols_table, score_under_all

PAGE = (Path(__file__).parents[2] / "docs/protocols.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    return PAGE.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0]


def test_the_list_of_protocols() -> None:
    assert section("protocols") == protocols_markdown().strip(), (
        "docs/protocols.md: paste what `coepg protocols` prints"
    )


@needs_data
@pytest.mark.parametrize(
    ("name", "file", "family"),
    [
        ("high", "guir1_3b.androidcontrol_high.jsonl.gz", "android_control"),
        ("low", "guir1_3b.androidcontrol_low.jsonl.gz", "android_control"),
        ("screenspot", "guir1_3b_cpt55_a.screenspot.jsonl.gz", "screenspot"),
    ],
)
def test_the_differences(name: str, file: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 20)  # the table shows no intervals
    table = protocols_table(score_under_all(PREDICTIONS / "gui_r1" / file, "gui_r1", family))
    assert section(name) in table.markdown()
