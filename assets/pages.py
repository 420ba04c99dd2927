"""The pages of a project: written below its store or into a folder, and served on the loopback address beside Dagster's web UI.

`/` lists the loops; `/EXPERIMENT/sSEED/PAGE` is a page of `coepg_dagster.reports.site`, made again when what it shows has
changed; `/EXPERIMENT/sSEED/trace.html?k=K&row=ROW` is the trace of a row or of a dropped candidate.
"""

from __future__ import annotations

import mimetypes
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import dagster as dg
from coepg_dagster.assets.ledger import Loop, archive

from coepg_dagster.artifacts import whole
from coepg_dagster.auditing.archive import Archive, NotFound
from coepg_dagster.experiment import Experiment, split_reference
from coepg_dagster.project import Project
from coepg_dagster.provenance import Ref
from coepg_dagster.refusal import Refusal
from coepg_dagster.reports.evolution import Member
from coepg_dagster.reports.html import render
from coepg_dagster.reports.lineage import lineage_page
from coepg_dagster.reports.site import INDEX, Site, View
from coepg_dagster.reports.trace import trace_page

TRACE = "trace.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; script-src 'self'; base-uri 'none'"


def view_of(loop: Loop, instance: dg.DagsterInstance) -> View:
    """A loop as it is now."""
    records = loop.records(instance)
    times = {ref: made for ref in records if (made := _made_at(loop, instance, ref)) is not None}
    return View(loop.experiment, loop.seed, records, loop.stale(records), times)


def _made_at(loop: Loop, instance: dg.DagsterInstance, ref: Ref) -> float | None:
    partition = loop.partition(ref)
    found = instance.fetch_materializations(
        dg.AssetRecordsFilter(loop.key(ref.asset), asset_partitions=[partition] if partition else None), limit=1
    ).records
    return found[0].timestamp if found else None


def pages_folder(project: Project, loop: Loop) -> Path:
    """Where the pages of a loop lie."""
    return project.store / "pages" / loop.experiment.name / f"s{loop.seed}"


def site_of(
    project: Project, loop: Loop, instance: dg.DagsterInstance, folder: Path | None = None, dagster: str | None = None
) -> Site:
    """The pages of a loop in `folder`, or below the store; `dagster`: address of the web UI where they are served."""
    experiments = _family(project, loop)
    return Site(
        folder or pages_folder(project, loop),
        archive(project, instance),
        view_of(loop, instance),
        dagster,
        live=dagster is not None,
        family=lambda: _made(experiments, loop, instance),
        experiments=experiments,
    )


def _family(project: Project, loop: Loop) -> list[Experiment]:
    """The experiment that this one goes back to, and all that say only how they differ from it, or from one that does."""
    known = project.all_experiments()

    def root(experiment: Experiment) -> str:
        above = known.get(experiment.parent or "")
        return root(above) if above else experiment.name

    return [experiment for experiment in known.values() if root(experiment) == root(loop.experiment)]


def _made(experiments: list[Experiment], loop: Loop, instance: dg.DagsterInstance) -> list[Member]:
    """What those of them that descend from this one's experiment have measured at its seed."""
    below = {loop.experiment.name}
    for _ in experiments:  # as deep as it can be
        below |= {experiment.name for experiment in experiments if experiment.parent in below}
    loops = [Loop(of, loop.seed, loop.root) for of in experiments if loop.seed in of.seeds and of.name in below]
    return [
        Member(one.experiment, one.records(instance))
        for one in loops
        if one.experiment.name != loop.experiment.name
        and instance.get_latest_materialization_event(one.key("evaluation")) is not None
    ]


def write_pages(project: Project, loop: Loop, instance: dg.DagsterInstance, folder: Path) -> list[Path]:
    """Writes every page of a loop into `folder`; they stand alone as files."""
    site = site_of(project, loop, instance, folder)
    return [site.make(page) for page in site.pages()]


def lineage_of(loop: Loop, instance: dg.DagsterInstance, dagster: str | None = None) -> str:
    """The lineage map of a loop as it is now, alone; `dagster` is the address of the web UI, for links."""
    view = view_of(loop, instance)
    return lineage_page(view.experiment, view.seed, view.records, view.stale, view.times, dagster)


def write_lineage(project: Project, loop: Loop, instance: dg.DagsterInstance) -> str:
    """Writes the lineage map of a loop below the store and returns its path."""
    page = pages_folder(project, loop) / "lineage-map.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    with whole(page) as draft:
        draft.write_text(lineage_of(loop, instance), "utf-8")
    return str(page)


def page_server(project: Project, instance: dg.DagsterInstance, port: int, dagster: str | None) -> ThreadingHTTPServer:
    """A server of the project's pages on 127.0.0.1, to be run with `serve_forever`; port 0 takes a free one."""
    one_at_a_time = threading.Lock()  # a page is made by one request, the others wait for it

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                self._answer(403, "only for this machine")  # another name that leads here is an attack on the browser
                return
            address = urlsplit(self.path)
            path = unquote(address.path).strip("/")
            try:
                experiments = project.all_experiments()
                if not path:
                    loops = [f"{name}/s{seed}" for name, found in experiments.items() for seed in found.seeds]
                    crumbs = [("Dagster", dagster)] if dagster else []
                    left_out = list(experiments.left_out.values())
                    self._answer(200, render("loops.html", loops=loops, left_out=left_out, crumbs=crumbs))
                    return
                name, seed, page = ([*path.split("/", 2), "", ""])[:3]
                experiment, number = split_reference(f"{name}/{seed}" if seed else name, experiments)
                loop = Loop(experiment, number, project.root)
                query = {key: values[0] for key, values in parse_qs(address.query).items()}
                self._page(loop, page or INDEX, query)
            except Refusal as error:
                self._answer(404, str(error), "text/plain")

        def _page(self, loop: Loop, page: str, query: dict[str, str]) -> None:
            if page == TRACE:
                found = archive(project, instance)
                self._answer(200, _trace(found, loop, query))
            elif page.endswith(".html"):
                with one_at_a_time:
                    file = site_of(project, loop, instance, dagster=dagster or "").make(page)
                    body = file.read_bytes()
                self._send(200, body, "text/html; charset=utf-8")
            else:
                folder = pages_folder(project, loop).resolve()
                file = (folder / page).resolve()
                if not file.is_relative_to(folder) or not file.is_file() or ".made" in file.parts:
                    raise NotFound(f"there is no {page} of {loop.name}")
                kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
                self._send(200, file.read_bytes(), kind)

        def _answer(self, status: int, text: str, kind: str = "text/html") -> None:
            self._send(status, text.encode(), f"{kind}; charset=utf-8")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", _POLICY)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are nobody's business."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def _trace(found: Archive, loop: Loop, query: dict[str, str]) -> str:
    if not query.get("k", "").isdecimal() or "row" not in query:
        raise NotFound(
            f"a trace is asked for as {TRACE}?k=ITERATION&row=ROW: a number from 0, a row id, or a candidate id"
        )
    owner = f"{loop.owner('dataset')}/s{loop.seed}"
    return trace_page(found, owner, int(query["k"]), query["row"])
