"""Text of data sets and models stays text on every kind of page: no script runs, nothing is added, nothing is turned round."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from coepg_dagster.assets.pages import page_app
from starlette.testclient import TestClient

from coepg_dagster.auditing.marks import MARKS, add_mark, marking
from coepg_dagster.project import Project
from coepg_dagster.reports.evolution import write_report
from coepg_dagster.reports.trace import trace_page
from tests.assets.light import EXPERIMENT
from tests.auditing import loop as by_hand
from tests.auditing.loop import Hand
from tests.chromium import NEEDS_CHROMIUM
from tests.reports import loop as written
from tests.reports import test_evolution as evolutions
from tests.reports.loop import site_of, trained
from tests.reports.test_lineage import experiment

PAYLOAD = (
    "</script><script>window.hit=1</script>\"'><img src=x onerror='window.hit=1'><svg/onload=window.hit=1>"
    "<a href=javascript:window.hit=1>{{7*7}}</a>\u202egnp\x1b]0;t\x07\u2028`${window.hit=1}`"
)
FOREIGN = {"step_id", "episode_id", "family", "goal", "history", "value", "text", "plan", "candidate_id", "duplicate_of",
           "failure"}  # fmt: skip
"""Columns whose text comes from a data set or a model."""


def poisoned(table: pa.Table) -> pa.Table:
    """The table with PAYLOAD behind every text of FOREIGN."""

    def planted(name: str, value: Any) -> Any:
        if name not in FOREIGN or value is None:
            return value
        return [one + PAYLOAD for one in value] + [PAYLOAD] if isinstance(value, list) else value + PAYLOAD

    rows = [{name: planted(name, value) for name, value in row.items()} for row in table.to_pylist()]
    return pa.Table.from_pylist(rows, table.schema)


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hand]:
    """The loop written by hand with PAYLOAD in all of its tables, in marks and in the experiment's description."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_hand, "TABLE", poisoned(by_hand.TABLE))
        patch.setattr(by_hand, "WRITTEN", {k: poisoned(table) for k, table in by_hand.WRITTEN.items()})
        patch.setattr(by_hand, "GIVEN", {k: poisoned(table) for k, table in by_hand.GIVEN.items()})
        patch.setattr(
            written,
            "ROWS",
            [
                row | {name: row[name] and row[name] + PAYLOAD for name in ("text", "plan", "step_id")}
                for row in written.ROWS
            ],
        )
        yaml = EXPERIMENT.replace(
            "a loop of small JSON files", json.dumps(PAYLOAD.replace("\x1b", "").replace("\x07", ""))
        )
        patch.setattr(written, "EXPERIMENT", yaml)
        hand = trained(tmp_path_factory.mktemp("loop"))
        said = {
            "mark": "flag",
            "by": PAYLOAD[:50],
            "reason": "".join(c for c in PAYLOAD if c.isprintable() or c == "\u202e"),
        }
        add_mark(hand.store.root / "hand" / "s1" / MARKS, marking(said), 1, "s" + PAYLOAD, "one more" + PAYLOAD, "x")
        (hand.root / "experiments").mkdir()
        (hand.root / "experiments" / "hand.yaml").write_text(yaml.replace("iterations: 2", "iterations: 1"))
        (hand.root / "experiments" / "<img src=x onerror='window.hit=1'>.yaml").write_text(
            "a: '<svg onload=window.hit=1>'"
        )
        yield hand


@pytest.fixture(scope="module")
def pages(hand: Hand, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A file of each kind of page, without the policy that a server sends along."""
    folder = tmp_path_factory.mktemp("pages")
    site = site_of(hand, folder, live=True)
    files = [site.make(page) for page in site.pages()]
    for name, what in (("kept", "0"), ("dropped", "s#planner_1#1" + PAYLOAD)):
        files.append(folder / f"trace-{name}.html")
        files[-1].write_text(trace_page(hand.archive, "hand/s1", 1, what), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evolutions, "STEPS", poisoned(evolutions.STEPS))
        plain = evolutions.predictions
        patch.setattr(
            evolutions, "predictions", lambda **hits: answers(plain(**{k + PAYLOAD: v for k, v in hits.items()}))
        )
        files.append(folder / "cases.html")
        write_report(evolutions.evolution(experiment(hand.root)), files[-1])
    with dg.DagsterInstance.ephemeral() as instance:
        client = TestClient(page_app(Project(hand.root), instance))
        files.append(folder / "loops.html")
        files[-1].write_text(client.get("/").text, "utf-8")
    return files


def answers(predictions: pa.Table) -> pa.Table:
    """The predictions with the label's value, which PAYLOAD is."""
    return predictions.set_column(
        predictions.column_names.index("value"), "value", pa.array([PAYLOAD] * predictions.num_rows)
    )


LOOK = """() => ({
  hit: window.hit ?? 0,
  elements: document.querySelectorAll("[onerror], [onload], img[src=x], a[href^='javascript:']").length,
  scripts: [...document.scripts].filter((script) => !script.getAttribute("src")).map((script) => script.textContent),
  turned: /[\\u202a-\\u202e\\u2066-\\u2069\\u001b]/.test(document.body.textContent + document.title),
  shown: document.body.textContent.includes("<img src=x onerror="),
})"""


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_no_payload_acts_on_any_page(pages: list[Path], tab: Any) -> None:
    kinds = {"index", "lineage", "evolution", "audit", "planner", "grounder", "planner_sft", "trace", "cases", "loops"}
    assert {file.stem.split("-")[0] for file in pages} == kinds
    dialogs: list[str] = []
    tab.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    shown = set()
    for file in pages:
        tab.goto("about:blank")
        tab.goto(f"file://{file}")
        if file.stem.startswith("audit"):
            tab.locator("article").first.wait_for()
            tab.keyboard.press("j")
            tab.get_by_role("searchbox").fill("onerror")
            tab.locator("#found", has_text="of ").wait_for()
            for summary in tab.locator("article summary").all():
                summary.click()
            tab.locator(".screen").first.click()
            tab.locator("dialog[open] .screen").click()
        seen = tab.evaluate(LOOK)
        assert not seen["hit"] and not seen["elements"] and not seen["scripts"] and not seen["turned"], (
            file.name,
            seen,
        )
        if seen["shown"]:
            shown.add(file.stem.split("-")[0])
    assert not dialogs and shown >= {"index", "audit", "planner", "grounder", "trace", "cases", "loops"}, shown
