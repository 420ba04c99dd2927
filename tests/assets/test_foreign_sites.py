"""What a web site elsewhere could make a user's browser do to the served web UI: nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import dagster as dg
import pytest
from coepg_dagster.assets.pages import ui_server
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from coepg_dagster.project import Project
from tests.chromium import ARGUMENTS, CHROMIUM, NEEDS_CHROMIUM
from tests.deployment import free_port

WIPE = 'mutation { wipeAssets(assetPartitionRanges: [{assetKey: {path: ["mine"]}}]) { __typename } }'
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def stored() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as instance:
        yield instance


@pytest.fixture
def instance(stored: dg.DagsterInstance) -> dg.DagsterInstance:
    """An instance with an asset that a foreign site would like to wipe."""
    stored.wipe_assets([dg.AssetKey("mine")])
    stored.report_runless_asset_event(dg.AssetMaterialization("mine"))
    return stored


def is_there(instance: dg.DagsterInstance) -> bool:
    return instance.get_latest_materialization_event(dg.AssetKey("mine")) is not None


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    root = tmp_path_factory.mktemp("served")
    (root / "experiments").mkdir()
    (root / "workspace.yaml").write_text("load_from: []\n")
    return Project(root)


HERE = "http://127.0.0.1:3000"
SOCKET = "ws://127.0.0.1:3000/graphql"


@pytest.fixture(scope="module")
def client(project: Project, stored: dg.DagsterInstance) -> Iterator[TestClient]:
    with ui_server(project, stored, ["127.0.0.1", "localhost"], "https://agents.example.org:8443/") as server:
        yield TestClient(server.config.app, base_url=HERE)  # type: ignore[arg-type]


def test_a_program_and_the_ui_itself_may_write(client: TestClient, instance: dg.DagsterInstance) -> None:
    for headers in (
        {},
        {"Origin": HERE},
        {"Origin": "https://agents.example.org:8443"},
        {"Sec-Fetch-Site": "same-origin"},
    ):
        instance.report_runless_asset_event(dg.AssetMaterialization("mine"))
        answer = client.post("/graphql", json={"query": WIPE}, headers=headers)
        assert answer.status_code == 200 and not is_there(instance), (headers, answer.text)
    with client.websocket_connect(SOCKET, headers={"Origin": HERE}, subprotocols=["graphql-ws"]) as socket:
        socket.send_json({"type": "connection_init"})
        assert socket.receive_json()["type"] == "connection_ack"
    assert "GraphiQL" in client.get("/graphql", headers={"Accept": "text/html"}).text


SIMPLE = [
    {"content": json.dumps({"query": WIPE}), "headers": {"Content-Type": "text/plain; application/json"}},
    {"content": WIPE, "headers": {"Content-Type": "text/plain;application/graphql"}},
    {"data": {"a": "b"}, "params": {"query": WIPE}},
    {"params": {"query": WIPE}},
]  # fmt: skip
"""Requests that a page may send to any server without asking it first."""


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://127.0.0.1:3001", "http://localhost:3000",
                                    "http://agents.example.org", "http://127.0.0.1:3000.evil.example"])  # fmt: skip
def test_no_other_origin_writes(client: TestClient, instance: dg.DagsterInstance, origin: str) -> None:
    for request in SIMPLE:
        headers = {"Origin": origin} | request.get("headers", {})
        assert client.post("/graphql", **(request | {"headers": headers})).status_code == 403
    assert client.post("/report_asset_materialization/mine", json={}, headers={"Origin": origin}).status_code == 403
    with pytest.raises(WebSocketDisconnect), client.websocket_connect(SOCKET, headers={"Origin": origin}):
        pass
    assert is_there(instance)
    assert len(instance.fetch_materializations(dg.AssetKey("mine"), limit=9).records) == 1


def test_no_mutation_stands_in_an_address(client: TestClient, instance: dg.DagsterInstance) -> None:
    """An image has such an address, and a browser names no origin when it loads one."""
    for path in ("/graphql", "/graphql/", "//graphql"):
        for headers in ({}, {"Accept": "image/*"}, {"Sec-Fetch-Site": "cross-site"}):
            client.get(path, params={"query": WIPE}, headers=headers)
            client.head(path, params={"query": WIPE}, headers=headers)
    assert client.get("/graphql", params={"query": WIPE}).status_code == 405 and is_there(instance)
    crossing = {"Sec-Fetch-Site": "cross-site"}
    assert client.post("/graphql", params={"query": WIPE}, headers=crossing).status_code == 403 and is_there(instance)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ["/pages/", "/server_info", "/pages/x/s1/audit-1.html"])
def test_no_other_site_loads_a_page_into_itself_and_its_links_work(client: TestClient, site: str, path: str) -> None:
    own = client.get(path).status_code
    assert own in (200, 404)
    for mode, kind in (("no-cors", "image"), ("no-cors", "script"), ("cors", "empty"), ("navigate", "iframe"),
                       ("navigate", "object"), ("same-origin", "document"), ("", "")):  # fmt: skip
        crossing = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": kind}
        assert client.get(path, headers=crossing).status_code == 403
        assert client.head(path, headers=crossing).status_code == 403
        here = crossing | {"Sec-Fetch-Site": "same-origin"}
        assert client.get(path, headers=here).status_code == own
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert client.get(path, headers=link).status_code == own
    assert client.get(path, headers=link | {"Sec-Fetch-Site": "none"}).status_code == own


def test_no_other_host_name_is_answered(client: TestClient, instance: dg.DagsterInstance) -> None:
    """DNS rebinding: the page's own origin, with a name that now leads here."""
    for host in ("evil.example", "evil.example:3000", "127.0.0.1.evil.example", "127.0.0.1@evil.example", ""):
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert client.post("/graphql", json={"query": WIPE}, headers=headers).status_code == 400
        assert client.get("/pages/", headers=headers).status_code == 400
    assert is_there(instance)


ATTACK = """<!doctype html><iframe name=hidden></iframe>
<form id=f method=post target=hidden enctype=text/plain action="@graphql?query=QUERY"><input name=a></form>
<img src="@graphql?query=QUERY"><script src="@graphql?query=QUERY"></script>
<script>
const done = [];
const post = (type, body) => fetch("@graphql", {method: "POST", mode: "no-cors", headers: {"Content-Type": type}, body});
const query = decodeURIComponent("QUERY");
done.push(post("text/plain; application/json", JSON.stringify({query})), post("text/plain;application/graphql", query));
done.push(fetch("@graphql?query=QUERY", {method: "POST", mode: "no-cors"}), fetch("@graphql?query=QUERY", {mode: "no-cors"}));
done.push(fetch("@graphql", {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify({query})}));
done.push(new Promise((end) => { const s = new WebSocket("@graphql".replace("http", "ws"), "graphql-ws");
  s.onopen = () => { window.opened = true; end(); }; s.onerror = end; }));
navigator.sendBeacon("@graphql?query=QUERY", "x");
document.getElementById("f").submit();
Promise.allSettled(done).then(() => setTimeout(() => document.title = "done", 300));
</script>"""


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_a_hostile_page_in_a_real_browser(project: Project, instance: dg.DagsterInstance) -> None:
    from urllib.parse import quote

    playwright = pytest.importorskip("playwright.sync_api")
    port = free_port()
    page = ATTACK.replace("@", f"http://127.0.0.1:{port}/").replace("QUERY", quote(WIPE))

    class Hostile(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ui_server(project, instance, ["127.0.0.1", "localhost"]) as server, playwright.sync_playwright() as started:
        server.config.port = port
        serving = threading.Thread(target=server.run, daemon=True)
        serving.start()
        elsewhere = HTTPServer(("127.0.0.1", 0), Hostile)
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        try:
            browser = started.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
            for name in ("127.0.0.1", "localhost"):
                tab: Any = browser.new_page()
                tab.goto(f"http://{name}:{elsewhere.server_port}/")
                tab.wait_for_function("document.title === 'done'")
                assert tab.evaluate("window.opened") is None
            assert is_there(instance)
            own: Any = browser.new_page()
            own.goto(f"http://127.0.0.1:{port}/server_info")  # a page of ours without a policy of its own
            own.evaluate("query => fetch('/graphql?query=' + encodeURIComponent(query), {method: 'POST'})", WIPE)
            assert not is_there(instance)
            browser.close()
        finally:
            elsewhere.shutdown()
            server.should_exit = True
            serving.join(20)
