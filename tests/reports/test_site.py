"""The pages of a loop as files: all are there, lead to each other, are made again when something changed, and tell the truth."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from coepg_dagster.artifacts import CANDIDATES, STEPS
from coepg_dagster.auditing.archive import NotFound
from coepg_dagster.auditing.marks import MARKS, add_mark, marking
from coepg_dagster.auditing.trace import what_to_mark
from coepg_dagster.provenance import Ref
from coepg_dagster.reports.site import Site
from coepg_dagster.reports.trace import trace_page
from tests.auditing.loop import Hand
from tests.chromium import NEEDS_CHROMIUM
from tests.reports.loop import site_of, trained


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory) -> Hand:
    return trained(tmp_path_factory.mktemp("loop"))


@pytest.fixture(scope="module")
def site(hand: Hand, tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = site_of(hand, tmp_path_factory.mktemp("pages") / "hand")
    for page in site.pages():
        site.make(page)
    return site


def test_every_link_leads_to_a_page(site: Site) -> None:
    pages = {file.name for file in site.folder.glob("*.html")}
    assert pages == set(site.pages()) and len(pages) == 3 + 2 + 6
    linked = set()
    for page in pages:
        addresses = re.findall(r'(?:href|src)="([^"#?:]+)(?:#[^"]*)?"', (site.folder / page).read_text())
        assert [a for a in addresses if not (site.folder / unquote(a)).exists()] == [], page
        linked |= set(addresses)
    assert pages <= linked


def test_nothing_comes_from_the_network(site: Site) -> None:
    for page in site.folder.glob("*.html"):
        assert "http" not in re.sub('data:image[^"]*', "", page.read_text()), page


def test_a_page_is_made_again_when_what_it_shows_changed(tmp_path: Path) -> None:
    hand = trained(tmp_path)
    first = site_of(hand, tmp_path / "out")
    page = first.make("planner-1.html")
    made = page.stat().st_mtime_ns
    assert first.make("planner-1.html").stat().st_mtime_ns == made
    hand.model("planner", 1, "others")
    assert site_of(hand, tmp_path / "out").make("planner-1.html").stat().st_mtime_ns > made


def test_a_page_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    hand = trained(tmp_path)
    site = site_of(hand, tmp_path / "out")
    with pytest.raises(NotFound, match=r"no page audit-7.html yet"):
        site.make("audit-7.html")
    file = next((hand.store.root / "hand" / "s1" / "candidate_plans" / "1").glob(f"*/{CANDIDATES}"))
    file.write_text("broken")
    with pytest.raises(NotFound, match="has other content than when it was made"):
        site.make("audit-1.html")
    assert not (tmp_path / "out" / ".made" / "audit-1.html").exists()


def test_pages_and_traces_know_a_grounder_that_learnt_by_grpo_as_a_verifier(tmp_path: Path) -> None:
    hand = Hand(tmp_path, "grounder_rl").whole()
    assert site_of(hand, tmp_path / "out").make_all() == []
    version = hand.newest[Ref("grounder_rl", 1)].data_version
    assert version in (tmp_path / "out" / "audit-1.html").read_text()
    assert "grounder_rl[1]" in trace_page(hand.archive, "hand/s1", 1, "0")
    # its answers are on its own page, not on that of the grounder before
    judged = [(tmp_path / "out" / page).read_text() for page in ("grounder_rl-1.html", "grounder-1.html")]
    assert ["one more" in page for page in judged] == [True, False]


def test_an_audit_page_of_another_versions_settings_says_so(tmp_path: Path) -> None:
    hand = trained(tmp_path)
    dataset = hand.newest[Ref("dataset", 1)]
    hand.newest[dataset.ref] = dataset.model_copy(update={"config": dataset.config | {"later": 1}})
    [line] = site_of(hand, tmp_path / "out").make_all()
    assert line.startswith("audit-1.html: the settings of dataset[1]")


def test_where_files_are_gone_all_other_pages_are_made(tmp_path: Path) -> None:
    hand, out = trained(tmp_path), tmp_path / "out"
    weights = hand.store.root / hand.newest[Ref("grounder", 1)].folder
    aside = weights.rename(tmp_path / "aside")
    [line] = site_of(hand, out).make_all()
    assert line.startswith("grounder-1.html: grounder[1] ") and "is not in the store any more" in line
    assert all((out / page).exists() for page in site_of(hand, out).pages())
    assert "is not in the store any more" in (out / "grounder-1.html").read_text()
    aside.rename(weights)
    assert site_of(hand, out).make_all() == []
    assert "is not in the store any more" not in (out / "grounder-1.html").read_text()
    (hand.store.root / hand.newest[Ref("benchmark_steps")].folder / STEPS).unlink()
    shutil.rmtree(out)
    assert {line.partition("-1.html: ")[0] for line in site_of(hand, out).make_all()} >= {
        "audit",
        "grounder",
        "planner",
    }


def test_the_audit_page_names_members_and_versions(site: Site, hand: Hand) -> None:
    text = (site.folder / "audit-1.html").read_text()
    for record in hand.newest.values():
        if record.asset in ("dataset", "verdicts", "candidate_plans", "open_models"):
            assert record.data_version in text
    assert "grounder[1]" in text and "of judge" in text  # weights of the open verifier


def test_the_audit_page_counts_what_trainings_left_out(tmp_path: Path) -> None:
    hand = trained(tmp_path)
    before = site_of(hand, tmp_path / "out").make("audit-0.html").read_text()
    ref = Ref("grounder", 1)
    figures = {"curation": {"seed_rules": {"of": 9, "left_out": 2, "generic_plan": 2}}}
    hand.newest[ref] = hand.newest[ref].model_copy(update={"figures": figures, "run_id": "another"})
    text = site_of(hand, tmp_path / "out").make("audit-0.html").read_text()
    assert "seed_rules" not in before and "grounder[1]: seed_rules left out 2 of 9 (2 generic_plan)." in text


def test_a_trace_page_says_what_the_trace_says(hand: Hand) -> None:
    kept = trace_page(hand.archive, "hand/s1", 1, "0")
    assert "byte for byte" in kept and "s#planner_1#1" in kept and "not verified" in kept
    dropped = trace_page(hand.archive, "hand/s1", 1, "s#planner_1#1")
    assert "This candidate was dropped" in dropped and 'class="point"' in dropped


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_every_page_opens_in_chromium(site: Site, tab: Any) -> None:
    tab.goto("about:blank")
    for page in site.pages():
        tab.goto(f"file://{site.folder / page}")
        assert tab.locator("h1").count() == 1
        for picture in tab.locator("img:not([loading=lazy])").all():
            assert picture.evaluate("image => image.naturalWidth") > 0, page
    tab.goto(f"file://{site.folder / 'lineage.html'}")
    tab.locator("g#dataset-1 a").first.click()
    tab.locator("#found", has_text="of 4 candidates").wait_for()  # three of D_1, and the row that it carried over


@pytest.mark.browser
@NEEDS_CHROMIUM
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_can_be_read_in_light_and_dark_and_nothing_is_clipped(site: Site, tab: Any, scheme: str) -> None:
    tab.emulate_media(color_scheme=scheme)
    look = """() => {
      const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
      const light = (color) => rgb(color).slice(0, 3).reduce((sum, part) => sum + part / 3, 0);
      const style = getComputedStyle(document.body);
      const parts = [...document.querySelectorAll(".scroll, .map")];
      const clipped = parts.filter((part) => part.scrollWidth > part.clientWidth + 1);
      const beyond = document.documentElement.scrollWidth - innerWidth;
      return [light(style.backgroundColor), light(style.color), beyond, clipped.length];
    }"""
    for page in site.pages():
        tab.goto("about:blank")
        tab.goto(f"file://{site.folder / page}")
        paper, ink, beyond, clipped = tab.evaluate(look)
        assert (paper < 60 and ink > 190) if scheme == "dark" else (paper > 230 and ink < 60), page
        assert beyond <= 0 and clipped == 0, page
    tab.emulate_media(color_scheme="light")


def test_a_mark_needs_no_new_page(tmp_path: Path) -> None:
    hand = trained(tmp_path)
    page = site_of(hand, tmp_path / "out").make("audit-1.html")
    made, marks = page.stat().st_mtime_ns, page.parent / "audit-1" / "marks.js"
    assert '"marks":[]' in marks.read_text()
    said = marking({"mark": "veto", "by": "anna", "reason": "</script>"})
    add_mark(hand.store.root / "hand" / "s1" / MARKS, said, 1, *what_to_mark(hand.archive, "hand/s1", 1, "0"))
    again = site_of(hand, tmp_path / "out").make("audit-1.html")
    assert again.stat().st_mtime_ns == made and '"plan":"one more"' in marks.read_text()
