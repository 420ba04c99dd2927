"""`coepg trace`: where a row of D_k, or a candidate that was dropped, came from, and what was trained on it.

Everything is read from the stored tables and records of the versions that were really read, current or not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coepg_dagster.artifacts import CANDIDATES, CURATION, DATASET, DECISIONS, STEPS, VERDICTS, all_steps
from coepg_dagster.auditing.archive import MODELS, Archive, NotFound, loop_of
from coepg_dagster.auditing.marks import MARKS, VETOES, read_marks, same_plan, shown_marks
from coepg_dagster.pools.selection import KEPT
from coepg_dagster.provenance import Asset, Input, Record
from coepg_dagster.steps import short_hash

ROW_ID: Final = re.compile(r"r[0-9a-f]{16}")
_MEMBER: Final = re.compile(r"(planner|grounder)_(\d+)")
TRAINED_ON: Final[Mapping[Asset, str]] = {
    "planner_sft": "plans and actions (SFT)",
    "grounder": "plans and boxes (SFT)",
    "grounder_rl": "its plan is a prompt (GRPO)",
    "planner": "its step is a prompt (GRPO)",
}


@dataclass(frozen=True)
class Place:
    """What `coepg trace` looks up: a row id alone, or a row or candidate of EXPERIMENT@k."""

    what: str  # row id, number of a row from 0, or candidate id
    reference: str | None = None  # EXPERIMENT@k or EXPERIMENT/sSEED@k, see `experiment.split_iteration`


def parse_place(text: str) -> Place:
    """Reads ROW: a row id, or EXPERIMENT@k# and the number of a row from 0, a row id or a candidate id. Raises NotFound."""
    if ROW_ID.fullmatch(text):
        return Place(text)
    reference, _, what = text.partition("#")
    if not what:
        raise NotFound(
            f"{text!r:.80} names no row: give a row id (r and 16 hex digits), or EXPERIMENT@k#N for row N of D_k, counted "
            "from 0, or EXPERIMENT@k#CANDIDATE_ID; e.g. sandbox@1#0"
        )
    return Place(what, reference)


def find_row(archive: Archive, row_id: str) -> tuple[Record, dict[str, Any]]:
    """(newest version of D_k that holds the row, the row), in any loop. Raises NotFound for no such loop, or for several."""
    matches: dict[str, tuple[Record, dict[str, Any]]] = {}
    for record in reversed([record for record in archive.records if record.asset == "dataset"]):
        loop = loop_of(record)
        if loop not in matches and (archive.store / record.folder).is_dir():
            rows = _select(archive, record, DATASET, "row_id", row_id)
            if rows:
                matches[loop] = record, rows[0]
    if not matches:
        raise NotFound(f"no D_k in the store holds row {row_id}: it was pruned, or the id is of another project")
    if len(matches) > 1:
        places = ", ".join(f"{loop}@{record.iteration}#{row_id}" for loop, (record, _) in sorted(matches.items()))
        raise NotFound(f"row {row_id} is in several experiments: name one of {places}")
    return next(iter(matches.values()))


def trace(archive: Archive, loop: str, k: int, what: str) -> dict[str, Any]:
    """The provenance of row `what` of D_k of `loop` (EXPERIMENT/sSEED): its number from 0, its id, or a candidate's id.

    Returns {"row", "step", "plan", "planner", "verdicts", "rule", "marks", "dropped", "trained", "parents"}. The current D_k
    is searched first, then older versions. Raises NotFound.
    """
    dataset, row = _find(archive, loop, k, what)
    return trace_candidate(archive, dataset, what) if row is None else trace_row(archive, dataset, row)


def what_to_mark(archive: Archive, loop: str, k: int, what: str) -> tuple[str, str | None, str]:
    """(step id, plan, id) of a row or candidate `what` of D_k, see `trace`; the plan of an unreadable answer is None."""
    dataset, row = _find(archive, loop, k, what)
    if row is None:
        verdicts = archive.made_by(dataset.input("verdicts"))
        candidates = archive.made_by(verdicts.input("candidate_plans"))
        [row] = _select(archive, candidates, CANDIDATES, "candidate_id", what)
    return row["step_id"], row["plan"], row.get("row_id", what)


def _find(archive: Archive, loop: str, k: int, what: str) -> tuple[Record, dict[str, Any] | None]:
    """(version of D_k, its row `what`; None where `what` is a candidate). Raises NotFound."""
    dataset = archive.newest(loop, "dataset", k)
    if not re.fullmatch(r"[0-9]{1,9}", what):
        for version in (dataset, *(r for r in archive.versions(loop, "dataset") if r.iteration == k)):
            if (archive.store / version.folder).is_dir():
                if ROW_ID.fullmatch(what):
                    rows = _select(archive, version, DATASET, "row_id", what)
                    if rows:
                        return version, rows[0]
                elif _select(archive, version, DECISIONS, "candidate_id", what):
                    return version, None
        raise NotFound(f"{loop}@{k} has neither a row nor a candidate {what!r}; see `decisions` in {dataset.folder}")
    table = pq.read_table(archive.folder(dataset) / DATASET)
    if int(what) >= table.num_rows:
        raise NotFound(f"D_{k} of {loop} has {table.num_rows} rows: the last one is {loop}@{k}#{table.num_rows - 1}")
    return dataset, table.slice(int(what), 1).to_pylist()[0]


def trace_row(archive: Archive, dataset: Record, row: dict[str, Any]) -> dict[str, Any]:
    """The provenance of a row (DATASET_SCHEMA) of one version of D_k; see `trace`."""
    if "row_id" not in row:
        raise NotFound(f"{dataset.ref} was made by an older coepg, without row ids: materialize {dataset.ref} again")
    home = home_of(archive, dataset, row["made_in"])
    return _trace(archive, home, row["candidate_id"], row, _versions_with(archive, home, row["row_id"]))


def trace_candidate(archive: Archive, dataset: Record, candidate_id: str) -> dict[str, Any]:
    """The provenance of a candidate, kept or dropped, of one version of D_k; see `trace`."""
    rows = _select(archive, dataset, DATASET, "candidate_id", candidate_id)
    mine = [row for row in rows if row["made_in"] == dataset.iteration]
    if mine:
        return trace_row(archive, dataset, mine[0])
    return _trace(archive, dataset, candidate_id, None, [])


def _trace(
    archive: Archive, home: Record, candidate_id: str, row: dict[str, Any] | None, holders: list[tuple[Record, int]]
) -> dict[str, Any]:
    """`home`: the version of D_k whose pools wrote the candidate; `holders`: (version of D_k, number of its row there)."""
    verdicts = archive.made_by(home.input("verdicts"))
    candidates = archive.made_by(verdicts.input("candidate_plans"))
    models = archive.made_by(candidates.input("open_models"))
    benchmark = archive.made_by(candidates.input("benchmark_steps"))
    [candidate] = _select(archive, candidates, CANDIDATES, "candidate_id", candidate_id)
    step_id = candidate["step_id"]
    all_of_step = {one["candidate_id"]: one for one in _select(archive, candidates, CANDIDATES, "step_id", step_id)}
    decisions = {one["candidate_id"]: one["decision"] for one in _select(archive, home, DECISIONS, "step_id", step_id)}
    rows = {
        one["candidate_id"]: one
        for one in _select(archive, home, DATASET, "step_id", step_id)
        if one["made_in"] == home.iteration
    }
    judged = candidate["duplicate_of"] or candidate_id
    votes = [one for one in _select(archive, verdicts, VERDICTS, "step_id", step_id) if one["candidate_id"] == judged]
    step = step_of(archive, benchmark, step_id)
    parents = archive.lineage(home)[1:]
    problems = [line for record in (home, *parents) for line in archive.damage(record)]
    if row is not None:
        problems += disagreements(row, step, candidate, votes)
    return {
        "row": {
            "id": row and row["row_id"],
            "experiment": loop_of(home),
            "made_in": home.iteration,
            "decision": decisions[candidate_id],
            "action_type": row and row["action_type"],
            "value": row and row["value"],
            "box": row and row["box"],
            "datasets": [
                {**_named(archive, holder), "number": number, "carried_over": holder.iteration != home.iteration}
                for holder, number in holders
            ],
            "tampered": problems,
        },
        "step": step,
        "plan": {
            name: candidate[name]
            for name in ("candidate_id", "sample", "text", "plan", "action_type", "value", "gate", "duplicate_of")
        },
        "planner": {
            **member(archive, candidate["planner"], candidates, models),
            "prompt": {"style": models.config["prompts"], "hash": candidate["prompt_hash"]},
            "seed": candidate["sampling_seed"],
            "sampling": {
                name: candidates.config[name]
                for name in ("plans_per_planner", "temperature", "top_p", "max_plan_tokens")
            },
            "written_in": _named(archive, candidates),
        },
        "verdicts": [
            {
                **member(archive, vote["verifier"], verdicts, models),
                "hit": vote["hit"],
                "point": None if vote["x"] is None else [vote["x"], vote["y"]],
                # rounding can put a mean log-probability just above 0
                "confidence": None if vote["mean_logprob"] is None else math.exp(min(0.0, vote["mean_logprob"])),
                "mean_logprob": vote["mean_logprob"],
                "tokens": vote["tokens"],
                "text": vote["text"],
                "failure": vote["failure"],
                "given_in": _named(archive, verdicts),
            }
            for vote in votes
        ],
        "rule": {
            **{name: home.config[name] for name in ("rule", "k", "max_plans_per_step", "similar", "carry_over")},
            "hits": sum(vote["hit"] for vote in votes if vote["failure"] is None),
            "answered": sum(vote["failure"] is None for vote in votes),
            "score": row and row["score"],
            "kept_for_this_step": [one["row_id"] for one in rows.values()],
            "applied_in": _named(archive, home),
            "vetoes": home.figures.get(VETOES),
        },
        "marks": [
            mark
            for mark in shown_marks(read_marks(archive.store / loop_of(home) / MARKS), home)
            if mark["step_id"] == step_id
            and (mark["plan"] is None or same_plan(mark["plan"]) == same_plan(candidate["plan"] or ""))
        ],
        "dropped": [
            {
                **{name: other[name] for name in ("candidate_id", "planner", "plan", "text", "duplicate_of")},
                "reason": decisions[name_],
                "duplicate_of_row": rows[original]["row_id"] if (original := other["duplicate_of"]) in rows else None,
            }
            for name_, other in all_of_step.items()
            if name_ != candidate_id and decisions[name_] != KEPT
        ],
        "trained": [
            {
                **_named(archive, reader),
                "loop": loop_of(reader),
                "on": _named(archive, holder),
                "how": _how(archive, reader, row, step_id),
            }
            for holder, _ in holders
            for reader in archive.readers(holder)
            if reader.asset in TRAINED_ON and _trained_on(reader)
        ],
        "parents": [_parent(archive, record) for record in parents],
    }


def _trained_on(model: Record) -> bool:
    """Whether a model that read a D_k was trained on its steps: GRPO may ask about others (`grpo.prompts: unseen`)."""
    return model.asset != "planner" or model.config.get("prompts") != "unseen"


def _how(archive: Archive, model: Record, row: dict[str, Any] | None, step_id: str) -> str:
    """What a model learnt of a row, or which data strategy left the row, or its step as a prompt, out of its training."""
    file = archive.store / model.folder / CURATION
    if file.exists():
        of_row = row["row_id"] if row is not None and model.asset != "planner" else None
        for one in _select(archive, model, CURATION, "step_id", step_id):
            if one["row_id"] == of_row:
                return f"left out by {one['strategy']}: {one['reason']}"
    return TRAINED_ON[model.asset]


def step_of(archive: Archive, benchmark: Record, step_id: str) -> dict[str, Any]:
    """A benchmark step as a dict; the screenshot is given by file, row, size and hash. Raises NotFound."""
    file = archive.folder(benchmark) / STEPS
    with readable(archive, benchmark, STEPS):
        table = all_steps(file)
    at = pc.index(table["step_id"], pa.scalar(step_id)).as_py()
    if at < 0:
        raise NotFound(f"{file} holds no step {step_id}: the file is not the one that {benchmark.data_version} names")
    [step] = table.slice(at, 1).to_pylist()
    encoded = step.pop("screenshot")
    return {
        **step,
        "screenshot": {
            "file": f"{benchmark.folder}/{STEPS}",
            "row": at,
            "bytes": len(encoded),
            "hash": short_hash(encoded),
        },
        "read_from": _named(archive, benchmark),
    }


def disagreements(
    row: dict[str, Any], step: dict[str, Any], candidate: dict[str, Any], votes: Iterable[dict[str, Any]]
) -> list[str]:
    """Where a row of D_k contradicts its step, its candidate or its verdicts: one line each, with the row's id."""
    answered = [vote for vote in votes if vote["failure"] is None]
    pairs = {
        "screenshot": (row["screenshot_hash"], step["screenshot"]["hash"]),
        "action type": (row["action_type"], step["action_type"]),
        "value": (row["value"], step["value"]),
        "plan": (row["plan"], candidate["plan"]),
        "planner": (row["planner"], candidate["planner"]),
        "number of hits": (row["hits"], sum(vote["hit"] for vote in answered)),
        "number of answers": (row["answered"], len(answered)),
    }
    lines = [
        f"row {row['row_id']} (step {row['step_id']}): its {what} was {was!r}, and is {now!r} where it came from"
        for what, (was, now) in pairs.items()
        if was != now
    ]
    if row["box"] is not None and row["box"] not in step["boxes"]:
        lines.append(f"row {row['row_id']} (step {row['step_id']}): its box {row['box']} is none of the step's boxes")
    return lines


def member(archive: Archive, name: str, reader: Record, models: Record) -> dict[str, Any]:
    """The model behind a pool member when `reader` (candidate_plans or verdicts) was made: its iteration and weights."""
    trained = _MEMBER.fullmatch(name)
    if trained:
        # a verifier is ϕ_k, after GRPO too where that is trained
        assets = ("planner",) if trained[1] == "planner" else ("grounder", "grounder_rl")
        used = next(u for u in reader.inputs if u.asset in assets and u.iteration == int(trained[2]))
        return {"name": name, "model": f"{used.ref}", "iteration": used.iteration, "weights": used.data_version}
    role = "planners" if reader.asset == "candidate_plans" else "verifiers"
    entry = json.loads((archive.folder(models) / MODELS).read_text())[f"{role}/{name}"]
    return {"name": name, "model": entry["checkpoint"], "iteration": None, "weights": entry["version"]}


def home_of(archive: Archive, dataset: Record, made_in: int) -> Record:
    """The version of D_`made_in` from which `dataset` carried over the rows of that iteration."""
    while dataset.iteration is not None and dataset.iteration > made_in:
        dataset = archive.made_by(dataset.input("dataset"))
    return dataset


def _versions_with(archive: Archive, home: Record, row_id: str) -> list[tuple[Record, int]]:
    """(version of D_k, number of the row there) for `home` and every version that carried the row over."""
    holders, todo = [], [home]
    while todo:
        version = todo.pop(0)
        if not (archive.store / version.folder).is_dir():
            continue
        number = pc.index(
            pq.read_table(archive.store / version.folder / DATASET, columns=["row_id"])["row_id"], row_id
        ).as_py()
        if number >= 0:
            holders.append((version, number))
            todo += [reader for reader in archive.readers(version) if reader.asset == "dataset"]
    return holders


def _select(archive: Archive, record: Record, file: str, column: str, value: str) -> list[dict[str, Any]]:
    path = archive.folder(record) / file
    with readable(archive, record, file):
        if column not in pq.read_schema(path).names:
            raise NotFound(f"{record.ref} was made by an older coepg, without {column}: materialize {record.ref} again")
        return list(pq.read_table(path, filters=[(column, "==", value)]).to_pylist())


@contextmanager
def readable(archive: Archive, record: Record, file: str) -> Iterator[None]:
    """Turns an error in reading a table of `record` into NotFound, with the changes to its files."""
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        changed = "; ".join(archive.damage(record)) or "its files are unchanged"
        raise NotFound(f"{record.folder}/{file} cannot be read ({error}): {changed}") from None


def _named(archive: Archive, record: Record) -> dict[str, Any]:
    """An artifact by asset, iteration, version, run and folder."""
    return {
        "asset": record.asset,
        "iteration": record.iteration,
        "data_version": record.data_version,
        "run_id": record.run_id,
        "folder": record.folder,
        "current": archive.is_current(record),
    }


def _parent(archive: Archive, record: Record) -> dict[str, Any]:
    about = _named(archive, record) | {
        "inputs": [_used(used) for used in record.inputs],
        "config": record.config,
        "seed": record.seed,
        "code_version": record.code_version,
        "device": record.device,
        "tampered": archive.damage(record),
    }
    if record.asset == "open_models":
        models = json.loads((archive.folder(record) / MODELS).read_text())
        about["models"] = {name: {"checkpoint": m["checkpoint"], "version": m["version"]} for name, m in models.items()}
    return about


def _used(used: Input) -> dict[str, Any]:
    return {"asset": used.asset, "iteration": used.iteration, "data_version": used.data_version, "folder": used.folder}
