"""The audit page of D_k, opened as a file in real Chromium."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.pools.selection import select
from coepg_dagster.provenance import NotUsable
from coepg_dagster.reports.audit import CHUNK, AuditOf, PoolMember, write_audit
from tests.chromium import NEEDS_CHROMIUM
from tests.conftest import HEIGHT, WIDTH, png, step, step_table
from tests.pools.tables import candidate, candidates, row, rows, verdict, verdicts

BAD = "<script>alert(1)</script>"
STEPS = 90
TARGET = (30, 40, 60, 70)
BOX_COLOUR, HIT_COLOUR, TARGET_COLOUR = (0, 166, 81), (31, 119, 180), (20, 20, 120)
CONFIG = Regeneration(max_plans_per_step=1)


def write(folder: Path) -> Path:
    """D_2 of 90 steps, each with three candidates: one kept, one dropped by its gate, one a miss (or, every third, a repeat)."""
    steps, plans, votes = [], [], []
    for i in range(STEPS):
        name = f"s{i:02}"
        same = png((255, 255, 255), TARGET)
        steps.append(
            step(
                name,
                screenshot=same if i else png((250, 240, 255), TARGET),
                boxes=[[30.0, 40.0, 60.0, 70.0]],
                family="login-user" if i % 2 else "click-button",
                goal=f"Press number {i}" if i else BAD,
                history=["before"] if i else [],
            )
        )
        plans.append(candidate(name, "open", 0, f"press the {i}th button" if i else BAD))
        votes.append(verdict(f"{name}#open#0", "verifier_a", True, x=45.0, y=50.0))
        votes.append(verdict(f"{name}#open#0", "verifier_b", None if i == 2 else False, x=None if i in (2, 4) else 5.0))
        plans.append(candidate(name, "planner_2", 0, "type it", action_type="TYPE", gate="wrong_type"))
        if i % 3 == 2:
            plans.append(candidate(name, "planner_2", 1, f"Press the {i}th button", duplicate_of=f"{name}#open#0"))
        else:
            plans.append(candidate(name, "planner_2", 1, "press something"))
            votes += [verdict(f"{name}#planner_2#1", verifier, False) for verifier in ("verifier_a", "verifier_b")]
    tables = step_table(*steps), candidates(*plans), verdicts(*votes)
    kept, decisions = select(*tables, CONFIG, 2, None)
    carried = rows(row("s00", "an older plan", made_in=1))
    dataset = pa.concat_tables([kept, carried])
    about = AuditOf(
        "light/s1",
        2,
        CONFIG,
        made_from=[("verdicts[2]", "0123abcd", "run1")],
        members=[PoolMember("open", "planner", BAD, "9876"), PoolMember("verifier_b", "verifier", "b", "5432")],
    )
    return write_audit(folder, about, *tables, decisions, dataset)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("audit"))


def test_each_screenshot_is_stored_once(page: Path) -> None:
    assert sum(file.is_file() for file in (page.parent / "screens").rglob("*")) == 2
    assert not list(page.parent.rglob("*.partial"))


def test_every_candidate_is_in_the_data_with_its_reason(page: Path) -> None:
    text = (page.parent / "audit-2" / "index.js").read_text()
    index = json.loads(text.removeprefix("window.coepgAudit=").removesuffix(";\n"))
    assert len(index["decision"]) == 3 * STEPS + 1
    entries: list[dict[str, Any]] = []
    for number in range(-(-len(index["decision"]) // CHUNK)):
        chunk = (page.parent / "audit-2" / f"rows-{number}.js").read_text()
        entries += json.loads(chunk.removeprefix(f'coepgLoaded("rows-{number}",').removesuffix(");\n"))["rows"]
    by_candidate = {entry["candidate"]: entry for entry in entries if entry["madeIn"] == 2}
    assert by_candidate["s03#open#0"]["why"] == "1 of 2 verifiers hit"
    assert by_candidate["s03#open#0"]["row"] == "light/s1@2#3" and by_candidate["s03#planner_2#0"]["row"] is None
    assert by_candidate["s03#planner_2#0"]["why"] == "its action type is TYPE, the label's CLICK"
    assert by_candidate["s02#planner_2#1"]["why"] == "says the same as s02#open#0"
    assert by_candidate["s02#planner_2#1"]["votes"] == by_candidate["s02#open#0"]["votes"]
    assert by_candidate["s02#open#0"]["why"] == "1 of 1 verifiers hit"
    assert next(entry for entry in entries if entry["madeIn"] == 1)["row"] == f"light/s1@2#{STEPS}"


def test_the_page_says_how_many_of_its_cards_are_no_candidates(page: Path) -> None:
    lead = " ".join(re.sub("<[^>]+>", "", page.read_text().partition('"lead"')[2].partition("</p>")[0]).split())
    assert f"chosen from {3 * STEPS} candidate plans and from 1 row that D1 held and no new plan replaced" in lead
    assert f"for {STEPS} steps: {3 * STEPS + 1} cards" in lead


def test_the_index_can_be_sorted_by(page: Path) -> None:
    text = (page.parent / "audit-2" / "index.js").read_text()
    index = json.loads(text.removeprefix("window.coepgAudit=").removesuffix(";\n"))
    assert max(index["repeats"]) == STEPS and index["repeats"][0] == 1  # "type it" at every step
    assert set(index["confidence"]) == {-1, 905}  # exp(-0.1); a plan that the gate stopped was not judged
    texts = (page.parent / "audit-2" / "texts.js").read_text()
    search = json.loads(texts.removeprefix('coepgLoaded("texts",').removesuffix(");\n"))
    assert len(search["same"]) == len(index["decision"]) and len(search["ids"]) == STEPS


def test_a_verifier_is_listed_with_the_share_of_its_answers_that_name_no_point(page: Path) -> None:
    rows = page.read_text().split("<tr>")
    assert ["0.7 %" in row for row in rows if "verifier_b" in row] == [True]  # 1 of 149 answers


def test_a_table_of_other_steps_is_refused(tmp_path: Path) -> None:
    plans = candidates(candidate("other", "open", 0, None))
    decisions = pa.table({"candidate_id": ["other#open#0"], "step_id": ["other"], "decision": ["unparsed"]})
    with pytest.raises(NotUsable, match="1 steps with candidates are not in the table of steps"):
        write_audit(
            tmp_path, AuditOf("light/s1", 0, CONFIG), step_table(step("s")), plans, verdicts(), decisions, rows()
        )


def pixels(shot: bytes) -> Image.Image:
    return Image.open(io.BytesIO(shot)).convert("RGB")


def near(image: Image.Image, x: float, y: float, colour: tuple[int, int, int]) -> bool:
    """Whether a pixel within one of (x, y) has the colour, within what antialiasing does."""
    around = [image.getpixel((round(x) + i, round(y) + j)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    return any(max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) < 40 for pixel in around)  # type: ignore[arg-type]


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_box_and_points_lie_on_the_right_pixels(page: Path, tab: Any) -> None:
    tab.goto(f"file://{page}#search=s05")
    tab.locator("article").first.wait_for()
    screen = tab.locator("article[data-candidate='s05#open#0'] .screen")
    screen.locator("img").evaluate("image => image.decode()")
    area = screen.bounding_box()
    picture = pixels(tab.screenshot())
    border = 1
    scale = (area["width"] - 2 * border) / WIDTH
    assert scale == pytest.approx((area["height"] - 2 * border) / HEIGHT, abs=0.02)

    def at(x: float, y: float) -> tuple[float, float]:
        return area["x"] + border + x * scale, area["y"] + border + y * scale

    for x, y in ((30, 55), (60, 55), (45, 40), (45, 70)):  # the middle of each edge
        assert near(picture, *at(x, y), BOX_COLOUR)
    assert near(picture, *at(33, 67), TARGET_COLOUR)  # the screenshot itself lies under the box
    assert near(picture, *at(10, 100), (255, 255, 255)) and not near(picture, *at(33, 67), BOX_COLOUR)
    x, y = at(45, 50)
    for i, j in ((4, 0), (-4, 0), (0, 4), (0, -4)):  # the ring of the hit
        assert near(picture, x + i, y + j, HIT_COLOUR)
    assert not near(picture, x + 12, y, HIT_COLOUR)


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_an_auditor_filters_and_pages(page: Path, tab: Any) -> None:
    tab.goto("about:blank")
    tab.goto(f"file://{page}")
    count = tab.locator("#found")
    shown = tab.locator("article")
    count.filter(has_text="271 of 271").wait_for()
    assert shown.count() == 24
    first = shown.first.get_attribute("data-candidate")
    tab.locator("#pager button", has_text="next").click()
    tab.locator("#pager", has_text="page 2 of 12").wait_for()
    assert shown.first.get_attribute("data-candidate") != first
    tab.get_by_label("decision").select_option("kept")
    count.filter(has_text=f"{STEPS} of 271").wait_for()
    tab.get_by_label("verifier_b").select_option("no answer")
    count.filter(has_text="1 of 271").wait_for()
    assert shown.first.get_attribute("data-candidate") == "s02#open#0"
    assert "out of memory" in shown.first.inner_text()
    tab.reload()  # the filters are part of the address
    count.filter(has_text="1 of 271").wait_for()
    tab.get_by_role("button", name="clear").click()
    tab.get_by_label("planner").select_option("planner_2")
    tab.get_by_label("search").fill("LOGIN-user 7")
    count.filter(has_text="26 of 271").wait_for()  # two plans for each odd number with a 7 in it
    tab.get_by_role("button", name="clear").click()
    tab.get_by_label("action").select_option("CLICK")
    count.filter(has_text="271 of 271").wait_for()


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_sorted_walked_through_by_key_and_saved_as_csv(page: Path, tab: Any) -> None:
    tab.goto("about:blank")
    tab.goto(f"file://{page}")
    shown = tab.locator("article")
    tab.get_by_label("sort").select_option("repeats")
    tab.locator("article", has_text=f"{STEPS} candidates say this plan").first.wait_for()
    assert "type it" in shown.first.inner_text()
    tab.get_by_label("sort").select_option("disagreement")
    tab.locator("article", has_text="1 of 2 verifiers hit").first.wait_for()
    hit, miss = (tab.locator("td", has_text=vote) for vote in ("hit", "miss"))
    assert shown.filter(has=hit).filter(has=miss).count() == 24
    tab.get_by_label("sort").blur()
    for _ in range(25):  # beyond the page
        tab.keyboard.press("j")
        tab.locator("article.chosen").wait_for()
    tab.locator("#pager", has_text="page 2 of 12").wait_for()
    tab.keyboard.press("k")
    tab.keyboard.press("p")
    tab.locator("#pager", has_text="page 1 of 12").wait_for()
    tab.keyboard.press("/")
    tab.keyboard.type("s00")
    tab.locator("#found", has_text="4 of 271").wait_for()
    assert not tab.locator("article button").count()  # a file cannot be written to
    with tab.expect_download() as download:
        tab.locator("#csv").click()
    saved = Path(download.value.path()).read_bytes().decode("utf-8-sig")
    table = list(csv.DictReader(io.StringIO(saved, newline="")))
    assert download.value.suggested_filename == "audit-2.csv"
    assert {row["plan"] for row in table} == {BAD, "type it", "press something", "an older plan"}
    assert next(row for row in table if row["plan"] == BAD)["verifier_a: vote"] == "hit"


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_no_cell_of_the_csv_is_a_formula(page: Path, tab: Any) -> None:
    tab.goto("about:blank")
    tab.goto(f"file://{page}")
    tab.locator("article").first.wait_for()
    starts = ["=", "+", "-", "@", "\t", "\r", "\n", " =", "\t\n@", "＝", "－", "\xa0+", "\0="]
    for start in starts:
        text = f'{start}cmd|"/c calc"!A1'
        [[cell]] = csv.reader(io.StringIO(tab.evaluate("text => cell(text)", text), newline=""))
        assert cell == f"'{text}"
    for plain in ("click 1 + 1", 'say "no", then\ngo', "'=1", ""):
        [[cell]] = csv.reader(io.StringIO(tab.evaluate("text => cell(text)", plain), newline=""))
        assert cell == plain
    assert [tab.evaluate("value => cell(value)", value) for value in (-1.5, None)] == ['"-1.5"', '""']


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_foreign_text_is_text(page: Path, tab: Any) -> None:
    tab.goto("about:blank")
    tab.goto(f"file://{page}#search=s00")
    tab.locator("article").first.wait_for()
    text = tab.locator("article[data-candidate='s00#open#0']").first.inner_text()
    assert text.count(BAD) == 2 and tab.locator("script[src*=alert], article script").count() == 0
    assert BAD not in page.read_text() and "&lt;script&gt;" in page.read_text()


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_a_screenshot_grows_when_it_is_clicked(page: Path, tab: Any) -> None:
    tab.goto(f"file://{page}#search=s05")
    screen = tab.locator("article[data-candidate='s05#open#0'] .screen")
    before = screen.bounding_box()["width"]
    screen.click()
    grown = tab.locator("dialog .screen")
    assert grown.bounding_box()["width"] > before and grown.locator("rect.box").count() == 1
    grown.click()
    assert not tab.locator("dialog[open]").count()
