"""The audit page of D_k: a gallery of every candidate, kept or dropped, with filters and paging in the browser.

One HTML file, a folder of data scripts (an index to filter by, cards of CHUNK candidates each, texts to search), and the
screenshots as image files. It opens from a file and from a server, and needs no network.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from coepg_dagster.artifacts import whole
from coepg_dagster.auditing.marks import same_plan
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.pools.quality import unreadable_by_verifier
from coepg_dagster.pools.selection import DUPLICATE, KEPT, NOT_VERIFIED, OVER_CAP, VETOED
from coepg_dagster.provenance import NotUsable
from coepg_dagster.reports.html import TEMPLATES, ScreenFiles, render, script, shown_steps
from coepg_dagster.steps import (
    CANDIDATE_SCHEMA,
    GATE_NO_ANSWER,
    GATE_UNPARSED,
    GATE_WRONG_TYPE,
    GATE_WRONG_VALUE,
    rows_in_batches,
)

CHUNK: Final = 200
"""Candidates in one data script."""
CARRIED: Final = "carried"
"""The decision shown for a row that D_k carried over from D_{k-1}."""
NOT_QUERIED, MISS, HIT, NO_ANSWER = range(4)
"""The verdict of a verifier on a candidate, as in audit.js."""
RULES: Final = {
    "any": "at least one verifier hits the target",
    "majority": "more than half of the verifiers that answered hit the target",
    "all": "every verifier that answered hits the target",
}


@dataclass(frozen=True)
class PoolMember:
    """A model of the pools: its name in the tables, role, checkpoint and version."""

    name: str
    role: str
    model: str
    version: str  # data version, hash of the weights, or commit of the hub


@dataclass(frozen=True)
class AuditOf:
    """The heading of the page, above the gallery."""

    loop: str  # EXPERIMENT/sSEED
    iteration: int
    config: Regeneration
    made_from: Sequence[tuple[str, str, str]] = ()  # (artifact, data version, run)
    members: Sequence[PoolMember] = ()
    left_out: Sequence[str] = ()  # what data strategies left out of the trainings on D_k, a sentence for each
    crumbs: Sequence[tuple[str, str]] = ()  # (text, address)
    trace: Callable[[int, str], str] | None = None  # (k, row or candidate) → address of its trace, where one is served

    @property
    def name(self) -> str:
        """The name of the page, without its ending."""
        return f"audit-{self.iteration}"


@dataclass
class _Columns:
    """The columns of the index, one entry per candidate; names are coded as numbers in the order of appearance."""

    names: dict[str, dict[str, int]] = field(
        default_factory=lambda: {name: {} for name in ("decision", "planner", "action", "verifier")}
    )
    decision: list[int] = field(default_factory=list)
    planner: list[int] = field(default_factory=list)
    action: list[int] = field(default_factory=list)
    votes: list[int] = field(default_factory=list)  # base 4, the first verifier lowest
    step: list[int] = field(default_factory=list)
    confidence: list[int] = field(
        default_factory=list
    )  # mean over the verifiers that gave one, per mille; -1: none did
    same: list[str | None] = field(default_factory=list)  # `same_plan` of the plan, None where there is none
    plans: list[str] = field(default_factory=list)  # for the search

    def repeats(self) -> list[int]:
        """How many candidates of D_k, whatever their step, have the plan of each; 0 without a plan."""
        counts = Counter(self.same)
        return [0 if same is None else counts[same] for same in self.same]

    def code(self, column: str, name: str) -> int:
        known = self.names[column]
        return known.setdefault(name, len(known))


def write_audit(
    folder: Path,
    about: AuditOf,
    steps: pa.Table,
    candidates: pa.Table,
    verdicts: pa.Table,
    decisions: pa.Table,
    dataset: pa.Table,
) -> Path:
    """Writes the audit page of D_k into `folder` and returns its file.

    `steps` holds at least the steps of the other tables; its screenshots are read one at a time, so it may be mapped memory.
    Rows that D_k carried over are listed among the candidates of their step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / about.name
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    columns = _Columns()
    for name in verdicts["verifier"].unique().to_pylist():
        columns.code("verifier", name)
    rows = _rows(about, candidates, verdicts, decisions, dataset, columns)
    wanted = set(rows)
    screens, cards, shown, texts, ids = ScreenFiles(folder), _Cards(data), 0, [], []
    for step in shown_steps(steps, wanted, screens):
        label = columns.code("action", step["action"])
        texts.append(f"{step['family']} {step['goal']} {step['instruction'] or ''} {step['id']}".lower())
        ids.append(step["id"])
        for row in rows[step["id"]]:
            columns.decision.append(columns.code("decision", row.pop("decision")))
            columns.planner.append(columns.code("planner", row.pop("planner")))
            columns.action.append(label)
            columns.votes.append(sum(vote[1] * 4 ** vote[0] for vote in row["votes"]))
            columns.step.append(shown)
            columns.confidence.append(_confidence(row["votes"]))
            columns.same.append(None if row["plan"] is None else same_plan(row["plan"]))
            row["same"] = columns.same[-1]
            columns.plans.append(f"{row['plan'] or row['text'] or ''} {row['candidate']} {row['id'] or ''}".lower())
            row["why"] = _why(row.pop("reason"), row, step, about.config)
            cards.add(row | {"step": shown}, step)
        shown += 1
    cards.flush()
    if shown < len(wanted):
        raise NotUsable(f"{len(wanted) - shown} steps with candidates are not in the table of steps: it is another one")
    index = {
        "perChunk": CHUNK,
        "folder": about.name,
        "iteration": about.iteration,
        "repeats": columns.repeats(),
        "names": {name: list(known) for name, known in columns.names.items()},
        **{name: getattr(columns, name) for name in ("decision", "planner", "action", "votes", "step", "confidence")},
    }
    (data / "index.js").write_text(script("window.coepgAudit=", index), "ascii")
    search = {"steps": texts, "plans": columns.plans, "ids": ids, "same": columns.same}
    (data / "texts.js").write_text(script('coepgLoaded("texts",', search, ")"), "ascii")
    write_marks(folder, about.name, [], live=False)
    shutil.copyfile(TEMPLATES / "audit.js", folder / "audit.js")
    page = folder / f"{about.name}.html"
    config = about.config
    page.write_text(
        render(
            "audit.html",
            name=f"{about.loop}@{about.iteration}",
            loop_name=about.loop,
            iteration=about.iteration,
            rows=dataset.num_rows,
            candidates=candidates.num_rows,
            steps=shown,
            carried=len(columns.same) - candidates.num_rows,
            made_from=about.made_from,
            members=about.members,
            left_out=about.left_out,
            unreadable=unreadable_by_verifier(verdicts),
            rule=_rule(config),
            cap=config.max_plans_per_step,
            folder=about.name,
            crumbs=about.crumbs,
        ),
        "utf-8",
    )
    return page


def write_marks(folder: Path, name: str, marks: Sequence[Mapping[str, Any]], live: bool) -> None:
    """Writes what auditors marked (`auditing.marks.shown_marks`) beside the audit page `name`, which takes longer to make.

    `live`: the page is served, so that an auditor can mark more.
    """
    with whole(folder / name / "marks.js") as draft:
        draft.write_text(script("window.coepgMarks=", {"live": live, "marks": marks}), "ascii")


class _Cards:
    """Writes the data of the cards, CHUNK candidates to a script, with the steps that they belong to."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._written = folder, 0
        self._rows: list[dict[str, Any]] = []
        self._steps: dict[int, dict[str, Any]] = {}

    def add(self, row: dict[str, Any], step: dict[str, Any]) -> None:
        self._rows.append(row)
        self._steps[row["step"]] = step
        if len(self._rows) == CHUNK:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            name = f"rows-{self._written}"
            content = {"rows": self._rows, "steps": self._steps}
            (self._folder / f"{name}.js").write_text(script(f'coepgLoaded("{name}",', content, ")"), "ascii")
            self._written += 1
            self._rows, self._steps = [], {}


def _rows(
    about: AuditOf,
    candidates: pa.Table,
    verdicts: pa.Table,
    decisions: pa.Table,
    dataset: pa.Table,
    columns: _Columns,
) -> dict[str, list[dict[str, Any]]]:
    """Step id → data of the cards of its candidates and of its carried-over rows."""
    votes = _votes(verdicts, columns)
    decided = dict(
        zip(decisions["candidate_id"].to_pylist(), decisions["decision"].to_pylist(), strict=True),
    )
    numbers: dict[str, int] = {}
    by_step: dict[str, list[dict[str, Any]]] = defaultdict(list)
    carried = []
    ids: dict[str, str] = {}
    for number, row in enumerate(dataset.to_pylist()):
        if row["made_in"] == about.iteration:
            numbers[row["candidate_id"]] = number
            ids[row["candidate_id"]] = row["row_id"]
        else:
            carried.append((number, row))
    for row in rows_in_batches(candidates, CANDIDATE_SCHEMA.names):
        candidate = row["candidate_id"]
        decision = decided[candidate]
        # verifiers do not see a duplicate plan; it has the votes of its original
        seen = votes.get(row["duplicate_of"] or candidate, [])
        by_step[row["step_id"]].append(
            _row(about, candidate, row | {"row_id": ids.get(candidate)}, numbers.get(candidate), about.iteration, seen)
            | {"decision": decision, "reason": (decision, row["duplicate_of"])}
        )
    for number, row in carried:
        by_step[row["step_id"]].append(
            _row(about, row["candidate_id"], row | {"text": None}, number, row["made_in"], [])
            | {"decision": CARRIED, "reason": (CARRIED, None)}
        )
    return by_step


def _row(
    about: AuditOf, candidate: str, row: dict[str, Any], number: int | None, made_in: int, votes: list[list[Any]]
) -> dict[str, Any]:
    what = candidate if number is None else str(number)
    return {
        "row": None if number is None else f"{about.loop}@{about.iteration}#{what}",
        "id": row["row_id"],
        "candidate": candidate,
        "planner": row["planner"],
        "plan": row["plan"],
        "text": row["text"] if row["plan"] is None else None,
        "action": row["action_type"],
        "value": row["value"],
        "madeIn": made_in,
        "votes": votes,
        "trace": about.trace(about.iteration, what) if about.trace else None,
    }


def _votes(verdicts: pa.Table, columns: _Columns) -> dict[str, list[list[Any]]]:
    """Candidate id → votes [verifier code, NOT_QUERIED to NO_ANSWER, x, y (px), confidence, note where there is no point]."""
    by_candidate: dict[str, list[list[Any]]] = defaultdict(list)
    for batch in verdicts.to_batches(max_chunksize=10_000):
        for vote in batch.to_pylist():
            state = NO_ANSWER if vote["failure"] is not None else HIT if vote["hit"] else MISS
            x, y, logprob = vote["x"], vote["y"], vote["mean_logprob"]
            confidence = None if logprob is None else round(math.exp(min(0.0, logprob)), 4)
            point = [None, None] if x is None else [round(x, 2), round(y, 2)]
            note = (vote["failure"] or f"no point: {vote['text']}") if x is None else None
            code = columns.code("verifier", vote["verifier"])
            by_candidate[vote["candidate_id"]].append([code, state, *point, confidence, note])
    for cast in by_candidate.values():
        cast.sort(key=lambda vote: vote[0])
    return by_candidate


def _confidence(votes: list[list[Any]]) -> int:
    given = [confidence for *_, confidence, _ in votes if confidence is not None]
    return round(1000 * sum(given) / len(given)) if given else -1


def _why(reason: tuple[str, str | None], row: dict[str, Any], step: dict[str, Any], config: Regeneration) -> str:
    """One sentence on why the candidate is in D_k or not."""
    decision, original = reason
    hits = sum(vote[1] == HIT for vote in row["votes"])
    answered = sum(vote[1] in (HIT, MISS) for vote in row["votes"])
    verdict = f"{hits} of {answered} verifiers hit" if row["votes"] else "the action has no target: nothing to verify"
    return {
        KEPT: verdict,
        NOT_VERIFIED: f"{verdict}; kept if {_rule(config)}",
        DUPLICATE: f"says the same as {original}",
        VETOED: "an auditor vetoed it before this version was made",
        OVER_CAP: f"{verdict}, but the step has {config.max_plans_per_step} plans that rank higher",
        CARRIED: f"in D_{row['madeIn']} already; no new plan of the step took its place",
        GATE_NO_ANSWER: "the server of its planner gave no answer",
        GATE_UNPARSED: "the answer is no plan",
        GATE_WRONG_TYPE: f"its action type is {row['action']}, the label's {step['action']}",
        GATE_WRONG_VALUE: f"its value is {row['value']!r}, the label's {step['value']!r}",
    }[decision]


def _rule(config: Regeneration) -> str:
    return RULES.get(config.rule, f"at least {config.k} verifiers hit the target")
