"""The pages of one loop, each made from the records and stored tables of the versions that its artifacts read.

A folder with `index.html`, the lineage map, the evolution report, an audit page per D_k and a page per model, linked with each
other by relative addresses: it opens from files, and from the page server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from coepg_dagster.artifacts import (
    BOARDS,
    CANDIDATES,
    DATASET,
    DECISIONS,
    PREDICTIONS,
    ROLLOUTS,
    STEPS,
    VERDICTS,
    all_steps,
)
from coepg_dagster.auditing.archive import MODELS as OPEN_MODELS
from coepg_dagster.auditing.archive import Archive, NotFound, loop_of, selected_by
from coepg_dagster.auditing.marks import MARKS, VETOES, read_marks, shown_marks
from coepg_dagster.auditing.trace import member, readable
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.strict import fingerprint
from coepg_dagster.provenance import Asset, Record, Ref
from coepg_dagster.reports.audit import AuditOf, PoolMember, write_audit, write_marks
from coepg_dagster.reports.evolution import Evolution, ShownLoop, case_study, write_report
from coepg_dagster.reports.html import render
from coepg_dagster.reports.lineage import SYMBOLS, LineageView, key_number, lineage_page, subscript
from coepg_dagster.reports.model import ModelOf, Votes, training_notes, write_model
from coepg_dagster.reports.paper import grpo_progress
from coepg_dagster.results import FULL, board_notes, results
from coepg_dagster.steps import STEP_SCHEMA
from coepg_dagster.strategies.curation import curation_text

INDEX, LINEAGE, EVOLUTION = "index.html", "lineage.html", "evolution.html"
LAYOUT: Final = 6
"""Version of the pages; raise it when they change, so that existing pages are made again."""
MODELS: Final[dict[Asset, str]] = {
    "planner_sft": "The planner after supervised fine-tuning on D of the iteration before (Eq. 1).",
    "planner": "The planner after GRPO with the confidence-weighted reward of its grounders, C-DREM (Eq. 3 to 10).",
    "grounder": "The grounder after supervised fine-tuning on D of the iteration before (Eq. 2).",
    "grounder_rl": "The grounder after SFT and GRPO on the plans of the D before, rewarded by its own places.",
    "end_to_end": "One model that answers type, value and point, without a plan.",
}
"""Asset with a model page → its first sentence."""
_AUDITED: Final[tuple[Asset, ...]] = ("candidate_plans", "verdicts", "dataset", "data_quality")
LOG = "training_log.jsonl"


def page_of(ref: Ref) -> str | None:
    """The file of the page that shows an artifact; None where there is none."""
    if ref.asset in ("evaluation", "evolution_report"):
        return EVOLUTION
    if ref.asset in _AUDITED:
        return f"audit-{ref.iteration}.html"
    return f"{ref.asset}-{ref.iteration}.html" if ref.asset in MODELS else None


class Site:
    """The pages of the loop `view`, in `folder`.

    Args:
        family: the other loops of the same seed that were made from the same experiment file.
        experiments: all experiments of the family, for the drawing of parents and overlays.
        dagster: address of the web UI, for links, "" where it serves the pages too; None for files without a server.
        live: the pages are served, so that rows can link to their trace.
    """

    def __init__(
        self,
        folder: Path,
        archive: Archive,
        view: LineageView,
        dagster: str | None = None,
        *,
        live: bool = False,
        family: Callable[[], Sequence[ShownLoop]] = lambda: (),
        experiments: Sequence[Experiment] = (),
    ) -> None:
        self.folder, self.archive, self.view = folder, archive, view
        self._family, self._experiments = cache(family), experiments
        self._dagster, self._live = dagster, live

    def pages(self) -> dict[str, str]:
        """File → title of every page that can be made now."""
        pages = {INDEX: "all pages", LINEAGE: "lineage map", EVOLUTION: "evolution report"}
        for ref in sorted(self.view.records, key=lambda ref: (ref.iteration or 0, str(ref))):
            if ref.asset == "dataset":
                pages[str(page_of(ref))] = f"audit of D{subscript(ref.iteration)}"
            elif ref.asset in MODELS:
                pages[str(page_of(ref))] = f"{SYMBOLS[ref.asset]}{subscript(ref.iteration)} {ref.asset}"
        return pages

    def make(self, page: str) -> Path:
        """Writes a page and its files, unless it exists and was made from the same versions. Raises NotFound."""
        if page not in self.pages():
            raise NotFound(f"{self.view.name} has no page {page} yet: there are {', '.join(self.pages())}")
        self.folder.mkdir(parents=True, exist_ok=True)
        file, stamp = self.folder / page, self.folder / ".made" / page
        now = self._made_from(page)
        if not (file.exists() and stamp.exists() and stamp.read_text() == now):
            self._write(page)
            stamp.parent.mkdir(exist_ok=True)
            stamp.write_text(now)
        if page.startswith("audit-"):  # marks come and go; the rest of the page takes long to make
            dataset = self.view.records[Ref("dataset", int(page.removesuffix(".html").removeprefix("audit-")))]
            write_marks(self.folder, page.removesuffix(".html"), self.marks(dataset), self._live)
        return file

    def make_all(self) -> list[str]:
        """Makes every page. Returns a line for each that cannot be made, as in a store without weights; it says so itself."""
        left_out = []
        for page, title in self.pages().items():
            try:
                self.make(page)
            except NotFound as why:
                left_out.append(f"{page}: {why}")
                text = render("left_out.html", title=f"{self.view.name}: {title}", why=why, crumbs=self._crumbs())
                self._text(page, text)
                (self.folder / ".made" / page).unlink(missing_ok=True)  # so that it is tried again
        return left_out

    def marks(self, dataset: Record) -> list[dict[str, Any]]:
        """The marks that concern a D_k, see `shown_marks`."""
        file = self.archive.store / loop_of(dataset) / MARKS
        return shown_marks(read_marks(file), dataset, dataset.iteration)

    def _made_from(self, page: str) -> str:
        """A fingerprint of everything that the page depends on: layout, settings, shown versions and their staleness."""
        view = self.view
        whole = page in (INDEX, LINEAGE, EVOLUTION)
        shown = [ref for ref in view.records if whole or page_of(ref) == page]
        versions = sorted((str(ref), view.records[ref].data_version, view.records[ref].run_id) for ref in shown)
        stale = sorted((str(ref), str(view.stale[ref])) for ref in shown if ref in view.stale)
        beside = []
        if page.startswith("audit-"):
            beside = [
                (str(r.ref), r.data_version, r.run_id)
                for ref in shown
                if ref.asset == "dataset"
                for r in self._curated(view.records[ref])
            ]
        if page == EVOLUTION:
            beside = [
                (m.experiment.name, str(r.ref), r.data_version) for m in self._family() for r in m.records.values()
            ]
        if (evaluation := self._tested(page)) is not None:
            beside = [(str(evaluation.ref), evaluation.data_version, evaluation.run_id)]
        if page == LINEAGE:
            beside = [(one.name, one.fingerprint(), "") for one in self._experiments]
        made_by = [LAYOUT, self._dagster, self._live, view.experiment.fingerprint()]
        return fingerprint([*made_by, versions, stale, sorted(beside)])

    def _tested(self, page: str) -> Record | None:
        """The evaluation that tested the ϕ_k of a page alone, on grounding boards; None where there is none."""
        for ref, evaluation in self.view.records.items():
            if ref.asset == "evaluation" and BOARDS in evaluation.figures:
                grounder = self.view.records.get(Ref(self.view.experiment.phi, ref.iteration))
                if grounder is not None and page == page_of(grounder.ref) and grounder.as_input() in evaluation.inputs:
                    return evaluation
        return None

    def _curated(self, dataset: Record) -> list[Record]:
        """The current models trained on a D_k of whose rows or prompts data strategies left some out."""
        assert dataset.iteration is not None
        after = (self.view.records.get(Ref(asset, dataset.iteration + 1)) for asset in MODELS)
        return [one for one in after if one and one.figures.get("curation") and dataset.as_input() in one.inputs]

    def _write(self, page: str) -> None:
        name, _, k = page.removesuffix(".html").rpartition("-")
        if page == INDEX:
            self._text(page, self._index())
        elif page == LINEAGE:
            self._text(page, self._lineage())
        elif page == EVOLUTION:
            write_report(self._evolution(), self.folder / page)
        elif name == "audit":
            self._audit(self.view.records[Ref("dataset", int(k))])
        else:
            self._model(self.view.records[Ref(name, int(k))])  # type: ignore[arg-type]

    def _lineage(self) -> str:
        view = self.view
        listed = view.records.get(Ref("open_models"))
        file = self.archive.store / listed.folder / OPEN_MODELS if listed else None
        return lineage_page(
            view,
            self._dagster,
            page_of,
            json.loads(file.read_text()) if file and file.exists() else None,
            self._experiments,
            lambda name, seed: f"../../{name}/s{seed}/{LINEAGE}" if self._live else None,
            self._crumbs(),
        )

    def _loops(self) -> list[ShownLoop]:
        return [ShownLoop(self.view.experiment, self.view.records), *self._family()]

    def _evolution(self) -> Evolution:
        view = self.view
        loops = self._loops()
        progress = {}
        for loop in loops:
            of = loop.experiment
            variant = FULL if of.name == view.experiment.name else of.variant
            if variant in (FULL, "no_cdrem") and (of.name == view.experiment.name or of.parent == view.experiment.name):
                curve = self._progress(loop)
                if curve and variant not in progress:
                    progress[variant] = [curve]
        return Evolution(
            view.experiment,
            view.seed,
            results(view.experiment, view.seed, view.records, view.stale),
            loops,
            progress,
            case_study_of(self.archive.store, view.experiment, view.records),
            self._crumbs(),
        )

    def _progress(self, loop: ShownLoop) -> list[tuple[int, float]]:
        """`grpo_progress` of the newest planner of a loop; empty where its rollouts are missing."""
        planners = [ref for ref in loop.records if ref.asset == "planner" and ref.iteration]
        if not planners:
            return []
        newest = max(planners, key=lambda ref: ref.iteration or 0)
        file = self.archive.store / loop.records[newest].folder / ROLLOUTS
        return grpo_progress(pq.read_table(file), f"grounder_{newest.iteration}") if file.exists() else []

    def _text(self, page: str, text: str) -> None:
        (self.folder / page).write_text(text, "utf-8")

    def _crumbs(self) -> list[tuple[str, str]]:
        top = [] if self._dagster is None else [("Dagster", f"{self._dagster}/")]
        return [(self.view.name, INDEX), ("lineage map", LINEAGE), ("evolution report", EVOLUTION), *top]

    def _index(self) -> str:
        view = self.view
        rows = []
        for k in range(view.experiment.iterations + 1):
            refs = sorted((ref for ref in view.records if ref.iteration == k), key=lambda ref: str(ref))
            cells = [
                (ref, page_of(ref), key_number(view.experiment, view.records[ref]), ref in view.stale) for ref in refs
            ]
            if cells:
                rows.append((k, cells))
        return render("index.html", view=view, rows=rows, crumbs=self._crumbs())

    def _table(self, record: Record, file: str) -> pa.Table:
        folder = self.archive.folder(record)
        with readable(self.archive, record, file):
            return pq.read_table(folder / file)

    def _steps(self, benchmark: Record) -> pa.Table:
        """Mapped memory."""
        with readable(self.archive, benchmark, STEPS):
            return all_steps(self.archive.folder(benchmark) / STEPS)

    def _audit(self, dataset: Record) -> None:
        archive = self.archive
        verdicts = archive.made_by(dataset.input("verdicts"))
        candidates = archive.made_by(verdicts.input("candidate_plans"))
        models = archive.made_by(candidates.input("open_models"))
        benchmark = archive.made_by(candidates.input("benchmark_steps"))
        plans, votes = self._table(candidates, CANDIDATES), self._table(verdicts, VERDICTS)
        members = [
            PoolMember(name, role, model["model"], model["weights"])
            for role, reader, names in (
                ("planner", candidates, plans["planner"].unique().to_pylist()),
                ("verifier", verdicts, votes["verifier"].unique().to_pylist()),
            )
            for name in names
            for model in [member(archive, name, reader, models)]
        ]
        assert dataset.iteration is not None
        write_audit(
            self.folder,
            AuditOf(
                loop=self.view.name,
                iteration=dataset.iteration,
                config=selected_by(dataset),
                made_from=[
                    *(
                        (f"vetoes, {read['lines']} lines of {loop_of(dataset)}/{MARKS}", read["version"], "")
                        for read in [dataset.figures.get(VETOES)]
                        if read
                    ),
                    *((str(r.ref), r.data_version, r.run_id) for r in archive.lineage(dataset)),
                ],
                members=members,
                left_out=[f"{r.ref}: {text}" for r in self._curated(dataset) for text in curation_text(r.figures)],
                crumbs=self._crumbs(),
                trace=trace_address if self._live else None,
            ),
            self._steps(benchmark),
            plans,
            votes,
            self._table(dataset, DECISIONS),
            self._table(dataset, DATASET),
        )

    def _model(self, record: Record) -> None:
        page = str(page_of(record.ref))
        tested = self._tested(page)
        folder = self.archive.folder(record)
        log = [json.loads(line) for line in (folder / LOG).read_text().splitlines()] if (folder / LOG).exists() else []
        above = self.archive.lineage(record)
        benchmark = next((one for one in above if one.asset == "benchmark_steps"), None)
        rollouts = self._table(record, ROLLOUTS) if (folder / ROLLOUTS).exists() else None
        write_model(
            self.folder,
            page,
            ModelOf(
                name=self.view.name,
                symbol=f"{SYMBOLS[record.asset]}{subscript(record.iteration)}",
                what=MODELS[record.asset],
                facts=_facts(record, key_number(self.view.experiment, record)),
                config=record.config,
                made_from=[(str(used.ref), used.data_version, page_of(used.ref)) for used in record.inputs],
                crumbs=self._crumbs(),
                notes=[*training_notes(record.figures), *(board_notes(tested) if tested else [])],
            ),
            log,
            self._steps(benchmark) if benchmark else STEP_SCHEMA.empty_table(),
            rollouts,
            self._votes_of(record) if record.asset == self.view.experiment.phi else None,
        )

    def _votes_of(self, grounder: Record) -> Votes | None:
        """The verdicts of this version of ϕ_k in the pool of iteration k; None where there are none."""
        verdicts = self.view.records.get(Ref("verdicts", grounder.iteration))
        if verdicts is None or not any(used == grounder.as_input() for used in verdicts.inputs):
            return None
        candidates = self._table(self.archive.made_by(verdicts.input("candidate_plans")), CANDIDATES)
        ids, plans = candidates["candidate_id"].to_pylist(), candidates["plan"].to_pylist()
        given, name = self._table(verdicts, VERDICTS), f"grounder_{grounder.iteration}"
        return Votes(given, dict(zip(ids, plans, strict=True)), name)


def case_study_of(store: Path, experiment: Experiment, records: Mapping[Ref, Record]) -> list[dict[str, Any]]:
    """`case_study` of a loop, from the stored predictions; empty where fewer than two iterations have them."""
    evaluations = {ref.iteration: r for ref, r in records.items() if ref.asset == "evaluation" and ref.iteration}
    files = {k: store / record.folder / PREDICTIONS for k, record in evaluations.items()}
    predictions = {k: pq.read_table(file) for k, file in files.items() if file.exists()}
    if len(predictions) < 2:
        return []
    steps = store / evaluations[max(predictions)].input("benchmark_steps").folder / STEPS
    if not steps.exists():
        return []
    return case_study(experiment.benchmark.protocol, all_steps(steps), predictions, experiment.benchmark.test)


def trace_address(k: int, what: str) -> str:
    """The address of the trace of a row or a candidate of D_k, relative to the pages of its loop."""
    from urllib.parse import urlencode

    return f"trace.html?{urlencode({'k': k, 'row': what})}"


def _facts(record: Record, number: str) -> Sequence[tuple[str, str]]:
    facts = [("data version", record.data_version), ("run", record.run_id[:8]), ("device", record.device)]
    facts += [("seconds", f"{record.seconds:.0f}")]
    return [*facts, ("key number", number)] if number and not number.endswith(" s") else facts
