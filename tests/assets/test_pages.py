"""The page server: what it serves, to whom, and where the metadata of artifacts lead."""

from __future__ import annotations

import http.client
import os
import socket
import threading
from itertools import product
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import dagster as dg
import uvicorn
from coepg_dagster.assets.pages import page_app
from starlette.applications import Starlette
from starlette.routing import Mount

from coepg_dagster.provenance import Ref
from tests.assets.conftest import InProcess
from tests.deployment import free_port


def test_pages_are_served_and_metadata_leads_to_them(light: InProcess) -> None:
    light.make(0)
    result = light.defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=light.instance, asset_selection=[light.loop.key("evolution_report")]
    )
    assert result.success
    (light.project.root / "experiments" / "draft.yaml").write_text("")
    Path(os.fsdecode(os.fsencode(light.project.root) + b"/experiments/caf\xe9.yaml")).write_text("")
    port = free_port()
    pages = page_app(light.project, light.instance)
    app = Starlette(routes=[Mount("/pages", pages), Mount("/", pages)])
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    threading.Thread(target=server.run, args=([socket.create_server(("127.0.0.1", port))],), daemon=True).start()

    def ask(path: str) -> tuple[int, str, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", path)
        answer = connection.getresponse()
        reply = answer.status, answer.read().decode(), answer.headers
        connection.close()
        return reply

    try:
        in_use, _, unused = ask("/")[1].partition("of which nothing was made yet")
        assert "light/s1/evolution.html" in in_use and "<td>0</td>" in in_use and "light/s2" not in in_use
        assert "light/s2/index.html" in unused and "light/s1" not in unused
        for path, text in (
            ("/", "draft.yaml: the file must hold a mapping"),
            ("/", r"caf\udce9.yaml: the file must hold a mapping"),
            ("/light/s1/lineage.html", 'href="/assets/light/s1/planner_sft?'),
            ("/light/s1/", "Iteration 0"),
            ("/light/s1/index.html", "Iteration 0"),
            ("/light/s1/lineage.html", "Lineage of light/s1"),
            ("/light/s1/evolution.html", "40.0 [35.0, 60.0]"),
            ("/light/s1/grounder-0.html", "Nothing was trained"),
        ):
            status, body, headers = ask(path)
            assert status == 200 and text in body, path
            assert "default-src 'none'" in headers["Content-Security-Policy"]
        for prefix, path in product(("", "/pages"), ("/light/", "/light", "/light/s1")):
            status, at = 307, prefix + path
            while status == 307:
                status, _, headers = ask(at)
                at = urljoin(f"http://127.0.0.1:{port}{at}", headers.get("Location", ""))
                at = urlsplit(at).path
            assert (status, at) == (200, f"{prefix}/light/s1/index.html")  # the links of an index are relative
        for path, why in (
            ("/light/index.html", "no such seed"),
            ("/dark", "no experiment"),
            ("/light/s1/audit-0.html", "cannot be read"),  # the light loop has no tables
            ("/light/s1/audit-9.html", "no page audit-9.html yet"),
            ("/light/s1/../../../dagster.yaml", "there is no"),
            ("/light/s1/..%2f..%2f..%2fdagster.yaml", "there is no"),
            ("/light/s1/%2e%2e/%2e%2e/%2e%2e/dagster.yaml", "there is no"),
            ("/light/s1/%2fetc/hostname", "there is no"),
            ("/light/s1/a%00b", "there is no"),
            ("/light/s1/.made/lineage.html", "no page"),
            ("/light/s1/trace.html", "give a trace as"),
            ("/light/s9/index.html", "no such seed"),
        ):
            status, body, _ = ask(path)
            assert status == 404 and why in body, (path, body)
    finally:
        server.should_exit = True
    for asset, page in (("dataset", "audit-0.html"), ("planner", "planner-0.html"), ("evaluation", "evolution.html")):
        record = light.instance.fetch_materializations(light.loop.key(asset), limit=1).records[0]  # type: ignore[arg-type]
        assert record.asset_materialization is not None
        link = record.asset_materialization.metadata["page"]
        assert link == dg.MetadataValue.url(f"/pages/light/s1/{page}")
        stored = str(record.asset_materialization.metadata)
        assert str(light.project.root) not in stored and "127.0.0.1" not in stored and "localhost" not in stored
    assert light.loop.record(light.instance, Ref("evolution_report")) is not None
