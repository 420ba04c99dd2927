"""An auditor marks rows on the served audit page; nobody else can."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import uvicorn
from coepg_dagster.assets.ledger import RECORD, Loop
from coepg_dagster.assets.pages import MAX_BODY, page_app
from starlette.testclient import TestClient

from coepg_dagster.auditing.marks import MARKS, read_marks
from coepg_dagster.project import Project
from tests.assets.light import EXPERIMENT
from tests.auditing.loop import LOOP_NAME, Hand
from tests.chromium import ARGUMENTS, CHROMIUM, NEEDS_CHROMIUM
from tests.deployment import free_port

HERE = "http://127.0.0.1:3001"
ADDRESS = f"/{LOOP_NAME}/marks"
SENT = {"k": 1, "what": "s#planner_1#0", "mark": "veto", "by": "anna", "reason": "<img src=x>"}


@dataclass
class Served:
    """The loop written by hand, with the records of its versions in a Dagster instance."""

    hand: Hand
    instance: dg.DagsterInstance

    @property
    def project(self) -> Project:
        return Project(self.hand.root)

    @property
    def loop(self) -> Loop:
        return Loop(self.project.experiments()["hand"], 1, self.hand.root)

    @property
    def file(self) -> Path:
        return self.project.store / LOOP_NAME / MARKS

    def report(self, since: int = 0) -> None:
        """Reports the records from number `since` on, as their runs would."""
        for record in self.hand.records[since:]:
            self.instance.report_runless_asset_event(
                dg.AssetMaterialization(
                    self.loop.key(record.asset),
                    partition=self.loop.partition(record.ref),
                    metadata={RECORD: dg.MetadataValue.json(record.model_dump(mode="json"))},
                )
            )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    hand = Hand(tmp_path).whole()
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "hand.yaml").write_text(EXPERIMENT.replace("iterations: 2", "iterations: 1"))
    with dg.DagsterInstance.ephemeral() as instance:
        served = Served(hand, instance)
        served.report()
        yield served


def client(served: Served) -> TestClient:
    return TestClient(page_app(served.project, served.instance), base_url=HERE, headers={"Origin": HERE})


def test_a_mark_from_the_page_is_in_the_store_and_makes_d_k_stale(served: Served) -> None:
    with client(served) as browser:
        answer = browser.post(ADDRESS, json=SENT)
        assert answer.status_code == 200
        assert [(one["plan"], one["by"], one["counts"]) for one in answer.json()] == [("one more", "anna", True)]
        records = served.loop.records(served.instance)
        assert {ref.iteration for ref in served.loop.stale(records) if ref.asset == "dataset"} >= {1}
        assert str(records.changed[next(ref for ref in records if str(ref) == "dataset[1]")]).startswith("its vetoes")
        script = browser.get(f"/{LOOP_NAME}/audit-1.html") and browser.get(f"/{LOOP_NAME}/audit-1/marks.js")
        shown = json.loads(script.text.removeprefix("window.coepgMarks=").removesuffix(";\n"))
        assert shown["live"] and [one["reason"] for one in shown["marks"]] == ["<img src=x>"]
        traced = browser.get(f"/{LOOP_NAME}/trace.html", params={"k": 1, "row": "s#planner_1#0"}).text
        assert "&lt;img src=x&gt;" in traced and "<img src=x>" not in traced
    assert len(read_marks(served.file)) == 1
    served.file.write_text("no mark\n")
    assert "marks.jsonl:1 is no mark" in next(iter(served.loop.records(served.instance).changed.values()))


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://127.0.0.1:3000"}, 403),  # another server on this machine
        ({"Content-Type": "text/plain"}, 403),  # what a form or a simple request can send
        ({"Content-Type": "application/x-www-form-urlencoded"}, 403),
    ],
)
def test_no_other_site_can_mark(served: Served, headers: dict[str, str], code: int) -> None:
    with client(served) as browser:
        whole = {"Content-Type": "application/json"} | headers
        assert browser.post(ADDRESS, content=json.dumps(SENT), headers=whole).status_code == code
    assert not served.file.exists()


def test_what_is_no_mark_is_refused_and_says_why(served: Served) -> None:
    json_type = {"Content-Type": "application/json"}
    with client(served) as browser:
        for content, why in (
            (b"", "invalid JSON"),
            (b"[" * 10_000, "nested too deeply"),
            (b"[]", "names D_k by `k`"),
            (b"\xff", "not UTF-8"),
            *(
                (json.dumps(SENT | change).encode(), why)
                for change, why in (
                    ({"k": True}, "`k`, a whole number"),
                    ({"k": 1e9}, "`k`, a whole number"),
                    ({"k": 7}, "has no dataset[7]"),
                    ({"what": ["s"]}, "a row or candidate by `what`"),
                    ({"what": "../../etc"}, "neither a row nor a candidate"),
                    ({"reason": "x" * 1001}, "reason"),
                    ({"reason": "\n"}, "reason"),
                    ({"by": None}, "by"),
                    ({"mark": "delete"}, "mark"),
                    ({"mark": "withdraw"}, "nothing to withdraw"),
                    ({"plan": "another"}, "plan"),
                )
            ),
        ):
            answer = browser.post(ADDRESS, content=content, headers=json_type)
            assert answer.status_code == 400 and why in answer.text, (content[:80], answer.text)
        assert browser.post(ADDRESS, content=b" " * (MAX_BODY + 1), headers=json_type).status_code == 413
        assert browser.post("/nothing/s1/marks", json=SENT).status_code == 400
        assert browser.put(ADDRESS, json=SENT).status_code == 405
    assert not served.file.exists()


def test_no_address_leads_out_of_the_pages(served: Served, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (secret / "inner").mkdir(parents=True)
    for file in (secret / "file.png", secret / "inner" / "file.png"):
        file.write_text("not to be seen")
    with client(served) as browser:
        assert browser.get(f"/{LOOP_NAME}/audit-1.html").status_code == 200
        pages = served.project.store / "pages" / LOOP_NAME
        (pages / "one.png").symlink_to(secret / "file.png")
        (pages / "folder").symlink_to(secret)
        (pages / "loop").symlink_to("loop")
        (pages / "up").symlink_to("../../..")
        names = (
            "one.png",
            "folder/file.png",
            "folder/inner/file.png",
            "folder",
            "loop",
            "up/hand/s1/marks.jsonl",
            "",
            ".made",
        )
        ways = ("..%2f", "%2e%2e/", "..%5c", "....//", "%252e%252e%252f", "%00", "\u2025/", "//", "%c0%ae%c0%ae/")
        for name in (
            *names,
            *(way * 6 + str(secret / "file.png").lstrip("/") for way in ways),
            *(way + "file.png" for way in ways),
        ):
            answer = browser.get(f"/{LOOP_NAME}/{name}")
            assert "not to be seen" not in answer.text and answer.status_code in (200, 404), (name, answer.status_code)
            assert answer.status_code == 404 or "<h1>hand/s1</h1>" in answer.text, name
        for name in ("%2e%2e", "..%2f..", "<script>", "%00", "x" * 4000, "hand%0d%0aX-A:b", "\u202ednah"):
            answer = browser.get(f"/{name}/s1/index.html")
            assert (
                answer.status_code == 404
                and "x-a" not in answer.headers
                and answer.headers["x-content-type-options"] == "nosniff"
            )
            assert answer.headers["content-type"].startswith("text/plain")
        for k in ("9" * 5000, "\u0661", "\u00b2", "-1", "1e3", "0x1", " 1", "9999999999"):
            assert browser.get(f"/{LOOP_NAME}/trace.html", params={"k": k, "row": "0"}).status_code == 404, k
        for row in (
            "9" * 5000,
            "\u0661",
            "-1",
            "../0",
            "\0",
            "x" * 5000,
            "r" + "0" * 16,
            "' or 1=1",
            "\ud800".encode("utf-8", "replace"),
        ):
            assert browser.get(f"/{LOOP_NAME}/trace.html", params={"k": 1, "row": row}).status_code == 404, row


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_an_auditor_vetoes_with_the_keyboard_and_takes_it_back(served: Served) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    port = free_port()
    app = page_app(served.project, served.instance)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    threading.Thread(target=server.run, daemon=True).start()
    errors: list[str] = []
    try:
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
            tab: Any = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="dark")
            tab.on("pageerror", lambda error: errors.append(str(error)))
            tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            tab.goto(f"http://127.0.0.1:{port}/{LOOP_NAME}/audit-1.html")
            card = tab.locator("article[data-candidate='s#planner_1#0']")
            card.wait_for()
            tab.keyboard.press("j")
            assert "chosen" in (card.get_attribute("class") or "")
            tab.keyboard.press("v")
            tab.get_by_label("your name").fill("anna")
            tab.get_by_label("reason").fill("<b>wrong</b>")
            tab.get_by_label("reason").press("Enter")
            card.get_by_text("vetoed by anna").wait_for()
            assert "<b>wrong</b>; the next version leaves it out" in card.inner_text()
            tab.get_by_label("marked", exact=True).select_option("veto")
            tab.locator("#found", has_text="1 of ").wait_for()
            tab.reload()  # the mark is in the store
            card.get_by_role("button", name="withdraw").click()
            assert tab.get_by_label("your name").input_value() == "anna"
            tab.get_by_label("reason").fill("a mistake")
            tab.locator("#marking button", has_text="withdraw").click()
            tab.locator("#found", has_text="0 of ").wait_for()
            browser.close()
    finally:
        server.should_exit = True
    assert [one.mark for one in read_marks(served.file)] == ["veto", "withdraw"] and not errors
