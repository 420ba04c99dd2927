"""What a user does in the web UI, in real Chromium."""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from coepg_dagster.provenance import LOOP, SHARED, Ref
from tests.assets.light import plant
from tests.chromium import ARGUMENTS, CHROMIUM, NEEDS_CHROMIUM
from tests.deployment import Deployment

playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright (extra `dev`)")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    NEEDS_CHROMIUM,
]
LOOP_NAME = "other/s2"
PATIENCE = 240_000
"""Milliseconds; two busy cores start a run slowly."""


@pytest.fixture(scope="module")
def page(deployment: Deployment) -> Iterator[playwright.Page]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(PATIENCE)
        yield page
        browser.close()


def picture(page: playwright.Page, name: str) -> None:
    """Leaves a screenshot where COEPG_PICTURES asks for it."""
    folder = os.environ.get("COEPG_PICTURES")
    if folder:
        page.screenshot(path=f"{folder}/ui-{name}.png")


def keys(*assets: str) -> list[list[str]]:
    return [["other", asset] if asset in SHARED else ["other", "s2", asset] for asset in assets]


def boxes(page: playwright.Page, *names: str) -> dict[str, Any]:
    """Where the graph draws assets or groups: name → x, y, width, height, px of the window."""
    found = {name: page.locator("svg foreignObject").get_by_text(name, exact=True).first for name in names}
    for node in found.values():
        node.wait_for()
    page.wait_for_timeout(2000)  # the graph moves into place
    return {name: node.bounding_box() for name, node in found.items()}


def test_a_user_sees_one_experiment_from_left_to_right(deployment: Deployment, page: playwright.Page) -> None:
    selection = 'key:"other/*" and not key:"other/s1/*"'
    page.goto(f"{deployment.url}/asset-groups?asset-selection={quote(selection)}")
    parts = boxes(page, "other_inputs", "other_s2_iteration", "other_s2_evaluation")
    inputs, iteration, evaluation = (box["x"] for box in parts.values())
    assert inputs < iteration < evaluation
    assert all(box["x"] > 0 and box["x"] + box["width"] < 1600 for box in parts.values())


def test_a_user_sees_an_iteration_without_scrolling(deployment: Deployment, page: playwright.Page) -> None:
    page.goto(f"{deployment.url}/locations/coepg/asset-groups/other_s2_iteration")
    order = ["planner_sft", "candidate_plans", "verdicts"]
    nodes = boxes(page, *order, "dataset", "grounder", "planner")
    assert all(box["x"] > 0 and box["x"] + box["width"] < 1600 for box in nodes.values())
    assert all(box["y"] > 0 and box["y"] + box["height"] < 1000 for box in nodes.values())
    assert sorted(order, key=lambda name: nodes[name]["x"]) == order
    picture(page, "iteration")


@pytest.fixture(scope="module")
def made(deployment: Deployment) -> str:
    """As the UI does where one partition is chosen for all: one run that makes the unpartitioned ones first, then k = 0."""
    run = deployment.launch(keys(*SHARED, *LOOP), "0")
    assert deployment.wait_run(run, "SUCCESS")
    return run


def test_a_user_watches_an_iteration(deployment: Deployment, page: playwright.Page, made: str) -> None:
    page.goto(f"{deployment.url}/runs/{made}")
    page.get_by_text("Success", exact=True).first.wait_for()
    page.get_by_text("other__s2__evaluation").first.wait_for()


def test_a_user_reads_a_partition_and_why_it_is_stale(deployment: Deployment, page: playwright.Page, made: str) -> None:
    assert deployment.wait_run(deployment.launch(keys(*LOOP), "1"), "SUCCESS")
    plant(deployment.project, "salt", LOOP_NAME, Ref("dataset", 0))
    assert deployment.wait_run(deployment.launch(keys("dataset", "data_quality"), "0"), "SUCCESS")
    page.goto(f"{deployment.url}/assets/other/s2/planner_sft?view=partitions&partition=1")
    page.get_by_text("seconds", exact=True).first.wait_for()
    stale = page.get_by_text(re.compile(r"Unsynced"))
    stale.first.hover()
    page.get_by_text("has a new data version").wait_for()
    page.get_by_text("other / s2 / previous / dataset").wait_for()
    picture(page, "partition")


def test_a_twin_leads_to_what_it_stands_for(deployment: Deployment, page: playwright.Page) -> None:
    twin = f"{deployment.url}/assets/other/s2/previous/dataset"
    for view in ("events", "overview"):  # each observation, and the newest; `Partitions` shows materializations alone
        page.goto(f"{twin}?view={view}")
        page.get_by_text("stands for", exact=True).first.wait_for()
        link = page.locator("a[href='/assets/other/s2/dataset?view=partitions&partition=0']").first
        link.wait_for()
        page.locator("a[href='/pages/other/s2/audit-0.html']").first.wait_for()
    page.goto(deployment.url + str(link.get_attribute("href")))
    page.get_by_text("Latest materialization").first.wait_for()


def test_a_user_follows_the_link_to_the_lineage_map(deployment: Deployment, page: playwright.Page) -> None:
    page.goto(f"{deployment.url}/assets/other/s2/planner_sft?view=overview")
    page.get_by_text("Eq. 1").first.wait_for()
    page.get_by_text("coepg/role: planner").wait_for()
    link = page.get_by_role("link", name="lineage map").first
    link.wait_for()
    picture(page, "asset")
    page.goto(f"{deployment.url}{link.get_attribute('href')}")
    page.get_by_text("Lineage of other/s2").wait_for()
    assert page.locator("g.stale#planner_sft-1").count() == 1 and page.locator("g.current#planner_sft-0").count() == 1
    page.locator("dd").filter(has_text=re.compile(r"dataset\[0\] is now \w+, it read \w+")).first.wait_for()
    picture(page, "lineage-map")
    page.locator("g#planner_sft-1 a").get_by_text("in Dagster").click()
    page.wait_for_url(re.compile("/assets/other/s2/planner_sft"))


def test_pages_answer_this_machine_only(deployment: Deployment) -> None:
    def status(path: str, host: str) -> int:
        server = http.client.HTTPConnection("127.0.0.1", deployment.port)
        server.request("GET", path, headers={"Host": host})
        code = server.getresponse().status
        server.close()
        return code

    here = f"127.0.0.1:{deployment.port}"
    assert status("/pages/", here) == 200 and status("/pages/other/s2/lineage.html", here) == 200
    assert status("/pages", here) == 307 and status("/", "localhost:8080") == 200  # as through a tunnel
    assert status("/pages/other/s2/lineage.html", "example.com:80") == status("/graphql", "example.com") == 400
    assert status("/pages/nothing/s1/lineage.html", here) == 404
    assert status("/pages/../../etc/passwd", here) == 404
    assert status("/pages/other/s2/../../../dagster.yaml", here) == 404


def test_a_user_reads_the_evolution_report(deployment: Deployment, page: playwright.Page, made: str) -> None:
    assert deployment.wait_run(deployment.launch(keys("evolution_report"), None), "SUCCESS")
    page.goto(f"{deployment.url}/assets/other/s2/evolution_report?view=overview")
    address = deployment.url + str(page.get_by_role("link", name="report", exact=True).first.get_attribute("href"))
    deployment.wait(lambda: _is_there(page, address), "the report to be recorded")
    for title in ("Figure 7: Step SR of each test split", "Figure 6: quality of D_k"):
        figure = page.get_by_role("img", name=title)
        assert figure.evaluate("image => image.naturalWidth") > 300


def _is_there(page: playwright.Page, address: str) -> bool:
    answer = page.goto(address)
    return answer is not None and answer.status == 200
