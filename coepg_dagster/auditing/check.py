"""`coepg audit`: checks every file and every row of a loop against what was recorded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow.parquet as pq

from coepg_dagster.artifacts import CANDIDATES, DATASET, STEPS, VERDICTS, all_steps
from coepg_dagster.auditing.archive import Archive, NotFound, place_of
from coepg_dagster.auditing.trace import disagreements, home_of, readable
from coepg_dagster.provenance import Record
from coepg_dagster.steps import short_hash


def check(archive: Archive, loop: str) -> dict[str, Any]:
    """{"artifacts", "files", "rows": how many were checked, "tampered": one line for each difference}.

    Checks the files of the current artifacts of `loop` (EXPERIMENT/sSEED) and of all that they were made from, and every row
    of each current D_k against its step and screenshot, its candidate and its verdicts. Raises NotFound for an empty loop.
    """
    current = [record for place, record in archive.current.items() if place.startswith(f"{loop}/")]
    if not current:
        raise NotFound(f"{loop} has no artifacts yet: run `coepg evolve {loop} --through 0` first")
    checked = {record.folder: record for one in current for record in archive.lineage(one)}
    tampered = [line for record in checked.values() for line in archive.damage(record)]
    rows = 0
    for record in current:
        if record.asset == "dataset":
            try:
                count, lines = _rows(archive, record)
            except NotFound as error:
                lines, count = [f"{record.ref}: its rows cannot be checked: {error}"], 0
            rows, tampered = rows + count, tampered + lines
    return {
        "artifacts": len(checked),
        "files": sum(len(record.files) for record in checked.values()),
        "rows": rows,
        "tampered": tampered,
    }


def _rows(archive: Archive, dataset: Record) -> tuple[int, list[str]]:
    """(number of rows of one version of D_k, one line for each fault in them)."""
    with readable(archive, dataset, DATASET):
        table = pq.read_table(archive.folder(dataset) / DATASET)
    by_home: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        by_home[row["made_in"]].append(row)
    lines = []
    for made_in, rows in by_home.items():
        home = home_of(archive, dataset, made_in)
        verdicts = archive.made_by(home.input("verdicts"))
        candidates = archive.made_by(verdicts.input("candidate_plans"))
        benchmark = archive.made_by(candidates.input("benchmark_steps"))
        with readable(archive, verdicts, VERDICTS):
            votes: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for vote in pq.read_table(archive.folder(verdicts) / VERDICTS).to_pylist():
                votes[vote["candidate_id"]].append(vote)
        with readable(archive, candidates, CANDIDATES):
            plans = {c["candidate_id"]: c for c in pq.read_table(archive.folder(candidates) / CANDIDATES).to_pylist()}
        with readable(archive, benchmark, STEPS):
            steps = _steps(archive, benchmark, {row["step_id"] for row in rows})
        for row in rows:
            step, plan = steps.get(row["step_id"]), plans.get(row["candidate_id"])
            if step is None or plan is None:
                lines.append(f"row {row['row_id']} (step {row['step_id']}): its {'plan' if step else 'step'} is gone")
            else:
                lines += disagreements(row, step, plan, votes[row["candidate_id"]])
    return table.num_rows, [f"{place_of(dataset)}: {line}" for line in lines]


def _steps(archive: Archive, benchmark: Record, wanted: set[str]) -> dict[str, dict[str, Any]]:
    table = all_steps(archive.folder(benchmark) / STEPS)
    labels = table.select(["step_id", "action_type", "value", "boxes"]).to_pylist()
    return {
        label["step_id"]: label | {"screenshot": {"hash": short_hash(encoded.as_py())}}
        for label, encoded in zip(labels, table["screenshot"], strict=True)
        if label["step_id"] in wanted
    }
