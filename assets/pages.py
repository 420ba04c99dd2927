"""The pages of a project: written below its store or into a folder, and served below `/pages` by Dagster's web server.

`/` lists the loops, those in use first; `/EXPERIMENT/sSEED/PAGE` is a page of `coepg_dagster.reports.site`, made again when
its data have changed; `/EXPERIMENT/sSEED/trace.html?k=K&row=ROW` is the trace of a row or of a dropped candidate. All that
the server writes at somebody's word is a mark: `POST /EXPERIMENT/sSEED/marks`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import uvicorn
from coepg_dagster.assets.about import PAGES
from coepg_dagster.assets.internals import web_ui
from coepg_dagster.assets.ledger import Loop, archive
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from coepg_dagster import jsonlines
from coepg_dagster.artifacts import whole
from coepg_dagster.auditing.archive import Archive, NotFound
from coepg_dagster.auditing.marks import NotMarked, add_mark, marking
from coepg_dagster.auditing.trace import what_to_mark
from coepg_dagster.experiment.files import split_reference
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.project import Project
from coepg_dagster.provenance import Ref
from coepg_dagster.refusal import Refusal
from coepg_dagster.reports.evolution import ShownLoop
from coepg_dagster.reports.html import render
from coepg_dagster.reports.lineage import LineageView, lineage_page
from coepg_dagster.reports.site import INDEX, Site
from coepg_dagster.reports.trace import trace_page

TRACE = "trace.html"
MAX_BODY = 16_384
"""Bytes that a request to write may have."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def view_of(loop: Loop, instance: dg.DagsterInstance) -> LineageView:
    """The current state of a loop."""
    records = loop.records(instance)
    times = {ref: made for ref in records if (made := _made_at(loop, instance, ref)) is not None}
    return LineageView(loop.experiment, loop.seed, records, loop.stale(records), times)


def _made_at(loop: Loop, instance: dg.DagsterInstance, ref: Ref) -> float | None:
    partition = loop.partition(ref)
    events = instance.fetch_materializations(
        dg.AssetRecordsFilter(loop.key(ref.asset), asset_partitions=[partition] if partition else None), limit=1
    ).records
    return events[0].timestamp if events else None


def pages_folder(project: Project, loop: Loop) -> Path:
    """The folder of the pages of a loop."""
    return project.store / "pages" / loop.experiment.name / f"s{loop.seed}"


def site_of(
    project: Project, loop: Loop, instance: dg.DagsterInstance, folder: Path | None = None, dagster: str | None = None
) -> Site:
    """The pages of a loop in `folder` (None: below the store); `dagster`: address of the web UI if they are served."""
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
    """All experiments with the same root as this one, following `parent`; the root included."""
    known = project.all_experiments()

    def root(experiment: Experiment) -> str:
        parent = known.get(experiment.parent or "")
        return root(parent) if parent else experiment.name

    return [experiment for experiment in known.values() if root(experiment) == root(loop.experiment)]


def _made(experiments: list[Experiment], loop: Loop, instance: dg.DagsterInstance) -> list[ShownLoop]:
    """The results, at this loop's seed, of those `experiments` that descend from its experiment."""
    family = {loop.experiment.name}
    for _ in experiments:  # no chain of parents is longer
        family |= {experiment.name for experiment in experiments if experiment.parent in family}
    loops = [Loop(of, loop.seed, loop.root) for of in experiments if loop.seed in of.seeds and of.name in family]
    return [
        ShownLoop(one.experiment, one.records(instance))
        for one in loops
        if one.experiment.name != loop.experiment.name
        and instance.get_latest_materialization_event(one.key("evaluation")) is not None
    ]


def write_pages(project: Project, loop: Loop, instance: dg.DagsterInstance, folder: Path) -> tuple[Path, list[str]]:
    """Writes every page of a loop into `folder`, as files that need no server.

    Returns the index, and a line for each page that cannot be made.
    """
    left_out = site_of(project, loop, instance, folder).make_all()
    return folder / INDEX, left_out


def lineage_of(loop: Loop, instance: dg.DagsterInstance, dagster: str | None = None) -> str:
    """The lineage map of a loop as one HTML page; `dagster` is the address of the web UI, for links."""
    return lineage_page(view_of(loop, instance), dagster)


def write_lineage(project: Project, loop: Loop, instance: dg.DagsterInstance) -> str:
    """Writes the lineage map of a loop below the store and returns its path."""
    page = pages_folder(project, loop) / "lineage-map.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    with whole(page) as draft:
        draft.write_text(lineage_of(loop, instance), "utf-8")
    return str(page)


@contextmanager
def ui_server(
    project: Project, instance: dg.DagsterInstance, hosts: Sequence[str], public_url: str | None = None
) -> Iterator[uvicorn.Server]:
    """A server of Dagster's web UI with the project's pages below PAGES, as one application.

    It answers requests for `hosts` only: any other host name is an attack on the browser (DNS rebinding). It refuses writes that
    another web site sends by way of a browser (`OwnPagesOnly`). Neither part has a login.

    Args:
        public_url: where people open it, if a reverse proxy changes the port.
    """
    with web_ui(instance, project.root / "workspace.yaml") as app:
        pages = [
            Route(PAGES, lambda _: RedirectResponse(f"{PAGES}/")),
            Mount(PAGES, page_app(project, instance, public_url)),
        ]
        app.router.routes[:0] = pages  # Dagster's last route answers every path
        app.add_middleware(OwnPagesOnly, public_url=public_url)
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
        yield uvicorn.Server(uvicorn.Config(app, log_level="warning"))


class OwnPagesOnly:
    """Refuses what another web site could make a user's browser write to Dagster, which executes it without asking who sends it.

    Refused are requests other than GET and HEAD, and websockets, that a browser sends for another origin; and GraphQL by GET,
    since a mutation could stand in the address of an image. A browser names the origin in all of them. So are pages and files
    that another site loads into itself, each of which may take this server minutes to make; its links may be followed. Programs
    name nothing and are let through.
    """

    def __init__(self, app: ASGIApp, public_url: str | None = None) -> None:
        self._app, self._public_url = app, public_url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app if scope["type"] == "lifespan" else self._refusal(scope) or self._app
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        crossing = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
            if crossing and not followed:
                return PlainTextResponse("another site loads this: open it directly", 403)
            if scope["path"].rstrip("/").endswith("/graphql") and "text/html" not in headers.get("accept", ""):
                return PlainTextResponse("send GraphQL by POST", 405, {"Allow": "POST"})
            return None
        origin = headers.get("origin")
        if not crossing and (origin is None or _is_own(headers, self._public_url)):
            return None
        if scope["type"] == "websocket":
            return WebSocketClose(code=1008)  # before it is accepted: status 403
        return PlainTextResponse(f"{origin or 'another site'} is not an origin of this server: open it directly", 403)


def _is_own(headers: Headers, public_url: str | None) -> bool:
    """Whether the origin that a browser names is that of this server."""
    origin, host = headers.get("origin"), headers.get("host", "")
    public = (public_url or "").rstrip("/")
    return origin in (f"http://{host}", f"https://{host}") or (public != "" and origin == public)


def page_app(project: Project, instance: dg.DagsterInstance, public_url: str | None = None) -> Starlette:
    """The project's pages, with links to Dagster's web UI on the same address; `public_url` as for `ui_server`."""
    # one request makes a page or a trace, which takes up to gigabytes; the others wait
    one_at_a_time = threading.Lock()

    def loops(request: Request) -> Response:
        experiments = project.all_experiments()
        in_use, unused = [], []
        for experiment in experiments.values():
            for loop in (Loop(experiment, seed, project.root) for seed in experiment.seeds):
                if project.is_in_use(experiment, loop.seed):
                    evaluated = instance.get_materialized_partitions(loop.key("evaluation"))
                    in_use.append((loop.name, experiment.description, sorted(evaluated, key=int)))
                else:
                    unused.append(loop.name)
        text = render(
            "loops.html",
            in_use=in_use,
            unused=unused,
            left_out=list(experiments.left_out.values()),
            crumbs=[("Dagster", "/")],
        )
        return HTMLResponse(text, headers=_HEADERS)

    def loop_of(wanted: Mapping[str, str]) -> Loop:
        reference = "/".join(wanted[part] for part in ("name", "seed") if part in wanted)
        return Loop(*split_reference(reference, project.experiment), project.root)

    def start(request: Request) -> Response:
        """To the index of a loop, where its links lead somewhere; relative, since a proxy may serve us below another path."""
        wanted = request.path_params
        up = "../" if "seed" in wanted else ""
        return RedirectResponse(f"{up}{loop_of(wanted).name}/{INDEX}", headers=_HEADERS)

    def page(request: Request) -> Response:
        loop, name = loop_of(request.path_params), request.path_params["page"] or INDEX
        if name == TRACE:
            with one_at_a_time:
                text = _trace(archive(project, instance), loop, request.query_params)
            return HTMLResponse(text, headers=_HEADERS)
        if name.endswith(".html"):
            with one_at_a_time:
                text = site_of(project, loop, instance, dagster="").make(name).read_text("utf-8")
            return HTMLResponse(text, headers=_HEADERS)
        folder = pages_folder(project, loop).resolve()
        file = folder / name
        if not file.is_file() or not file.resolve().is_relative_to(folder) or ".made" in file.parts:
            raise NotFound(f"there is no {name} of {loop.name}")
        return FileResponse(file, headers=_HEADERS)

    async def mark(request: Request) -> Response:
        if why := _foreign(request.headers, public_url):
            return PlainTextResponse(why, 403, _HEADERS)
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > MAX_BODY:
                return PlainTextResponse(f"a mark has at most {MAX_BODY:,} bytes", 413, _HEADERS)
        wanted = request.path_params
        try:
            marks = await run_in_threadpool(_mark, project, instance, f"{wanted['name']}/{wanted['seed']}", content)
        except Refusal as error:
            return PlainTextResponse(str(error), 400, _HEADERS)
        return JSONResponse(marks, headers=_HEADERS)

    def missing(request: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), 404, _HEADERS)

    return Starlette(
        routes=[
            Route("/", loops),
            Route("/{name}/{seed}/marks", mark, methods=["POST"]),
            Route("/{name}", start),
            Route("/{name}/{seed}", start),
            Route("/{name}/{seed}/{page:path}", page),
        ],
        exception_handlers={Refusal: missing},
    )


def _foreign(headers: Headers, public_url: str | None) -> str | None:
    """Why a request to write does not come from one of our pages; else None.

    A browser names the origin of every POST, and sends JSON to another origin only where that allows it, which we never do. So no
    other web site can set a mark in the name of somebody who has our pages open.
    """
    if not _is_own(headers, public_url):
        origin = headers.get("origin") or "a request without an origin"
        return f"marks are set from the audit pages of this server, not from {origin}"
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return "a mark is sent as application/json"
    return None


def _mark(project: Project, instance: dg.DagsterInstance, reference: str, content: bytes) -> list[dict[str, Any]]:
    """Sets the mark in the body of a request; returns the marks of that D_k. Raises Refusal."""
    try:
        sent = jsonlines.parse(content)
    except jsonlines.NotJson as error:
        raise NotMarked(f"the mark is refused: {error}") from None
    k, what = (sent.pop("k", None), sent.pop("what", None)) if isinstance(sent, dict) else (None, None)
    if type(k) is not int or not isinstance(what, str):
        raise NotMarked("the mark is refused: it names D_k by `k`, a whole number, and a row or candidate by `what`")
    loop = Loop(*split_reference(reference, project.experiment), project.root)
    owner, versions = f"{loop.owner('dataset')}/s{loop.seed}", archive(project, instance)
    said, named = marking(sent), what_to_mark(versions, owner, k, what)
    add_mark(loop.marks(), said, k, *named)
    return site_of(project, loop, instance, dagster="").marks(versions.newest(owner, "dataset", k))


def _trace(versions: Archive, loop: Loop, query: Mapping[str, str]) -> str:
    k = query.get("k", "")
    if not (k.isascii() and k.isdecimal() and len(k) < 10) or "row" not in query:
        raise NotFound(
            f"give a trace as {TRACE}?k=ITERATION&row=ROW, where ROW is a number from 0, a row id, or a candidate id"
        )
    owner = f"{loop.owner('dataset')}/s{loop.seed}"
    return trace_page(versions, owner, int(k), query["row"])
