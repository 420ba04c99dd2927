"""Serves the pages of a project on the loopback address, beside Dagster's web UI: live lineage maps, and reports.

`/` lists them, `/lineage/EXPERIMENT/sSEED` is drawn from the event log when it is asked for, so that it is never out of date.
"""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import dagster as dg
import jinja2
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.assets.report import REPORT

from coepg_dagster.experiment import ExperimentError, split_reference
from coepg_dagster.project import ABLATIONS, Project
from coepg_dagster.provenance import Ref
from coepg_dagster.reports.lineage import lineage_page

_INDEX = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Co-EPG pages</title>
<style>body{font:16px/1.6 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}</style>
<h1>Pages of this project</h1>
<ul>{% for name in names %}<li>{{ name }}: <a href="/lineage/{{ name }}">lineage map</a>,
<a href="/report/{{ name }}">evolution report</a></li>{% endfor %}</ul>
{% if dagster %}<p><a href="{{ dagster }}">Dagster</a></p>{% endif %}</html>"""


def lineage_of(loop: Loop, instance: dg.DagsterInstance, dagster: str | None = None) -> str:
    """The lineage map of a loop as it is now; `dagster` is the address of the web UI, for links."""
    records = loop.records(instance)
    times = {ref: made for ref in records if (made := _made_at(loop, instance, ref)) is not None}
    return lineage_page(loop.experiment, loop.seed, records, loop.stale(records), times, dagster)


def _made_at(loop: Loop, instance: dg.DagsterInstance, ref: Ref) -> float | None:
    partition = loop.partition(ref)
    found = instance.fetch_materializations(
        dg.AssetRecordsFilter(loop.key(ref.asset), asset_partitions=[partition] if partition else None), limit=1
    ).records
    return found[0].timestamp if found else None


def write_lineage(project: Project, loop: Loop, instance: dg.DagsterInstance) -> str:
    """Writes the lineage map of a loop below the store and returns its path."""
    page = project.store / "pages" / loop.experiment.name / f"s{loop.seed}" / "lineage.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    partial = page.with_suffix(".partial")
    partial.write_text(lineage_of(loop, instance))
    partial.replace(page)
    return str(page)


def page_server(project: Project, instance: dg.DagsterInstance, port: int, dagster: str | None) -> ThreadingHTTPServer:
    """A server of the project's pages on 127.0.0.1, to be run with `serve_forever`; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                self._answer(403, "only for this machine")  # another name that leads here is an attack on the browser
                return
            path = unquote(urlsplit(self.path).path).strip("/")
            kind, _, reference = path.partition("/")
            try:
                experiments = project.experiments() | project.experiments(ABLATIONS)
                if not path:
                    names = [f"{name}/s{seed}" for name, found in experiments.items() for seed in found.seeds]
                    page = jinja2.Environment(autoescape=True).from_string(_INDEX)
                    self._answer(200, page.render(names=names, dagster=dagster))
                    return
                experiment, seed = split_reference(reference, experiments)
            except ExperimentError as error:
                self._answer(404, str(error), "text/plain")
                return
            loop = Loop(experiment, seed, project.root)
            if kind == "lineage":
                self._answer(200, lineage_of(loop, instance, dagster))
            elif kind == "report" and (report := loop.report(instance)) is not None:
                self._answer(200, (project.store / report.folder / REPORT).read_text())
            else:
                self._answer(404, f"there is no {kind} of {loop.name} yet", "text/plain")

        def _answer(self, status: int, text: str, kind: str = "text/html") -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are nobody's business."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
