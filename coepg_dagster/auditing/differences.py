"""`coepg diff`: what differs between two iterations: rows of D_k and why, models, and results with their intervals."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from coepg_dagster.artifacts import CANDIDATES, DATASET, DECISIONS, PREDICTIONS, STEPS, all_steps
from coepg_dagster.auditing.archive import BASE, Archive, NotFound
from coepg_dagster.auditing.trace import TRAINED_ON, readable
from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.result import Result
from coepg_dagster.evaluation.score import compare, score_steps
from coepg_dagster.provenance import LOOP, Asset, Input, Record

_FIELDS: Final = ("planner", "carried_over", "action_type", "value", "box", "votes", "screenshot_hash")
"""Columns that are compared between two rows with the same plan for the same step."""


@dataclass(frozen=True)
class Side:
    """An iteration to compare: its name, k, the experiment that makes each of its assets, and the seed."""

    name: str
    k: int
    owner: Callable[[Asset], str]
    seed: int

    def loop(self, asset: Asset) -> str:
        """EXPERIMENT/sSEED in which an asset of this iteration is made."""
        return f"{self.owner(asset)}/s{self.seed}"

    def there(self, archive: Archive, asset: Asset) -> Record | None:
        """The current version of an asset of this iteration; None where there is none."""
        return archive.current.get(f"{self.loop(asset)}/{asset}/{self.k}")


def differences(archive: Archive, a: Side, b: Side) -> dict[str, Any]:
    """{"a", "b", "data", "models", "results"} of two iterations, from A to B; None for what one of them lacks.

    Raises NotFound where one of them has no D_k.
    """
    d_a, d_b = (archive.newest(side.loop("dataset"), "dataset", side.k) for side in (a, b))
    return {
        "a": a.name,
        "b": b.name,
        "data": data(archive, d_a, d_b),
        "models": {
            asset: made
            for asset in TRAINED_ON
            if (made := _models(archive, a.there(archive, asset), b.there(archive, asset))) or asset in LOOP
        },
        "results": _results(archive, a.there(archive, "evaluation"), b.there(archive, "evaluation")),
    }


def data(archive: Archive, a: Record, b: Record) -> dict[str, Any]:
    """Rows that two versions of D_k share, and those gained, lost and changed from `a` to `b`, each with the reason.

    Two rows are the same row if they have the same plan for the same step.
    """
    rows_a, rows_b = _rows(archive, a), _rows(archive, b)
    there, here = _written(archive, a), _written(archive, b)
    gained = [_absent(row, there) for key, row in rows_b.items() if key not in rows_a]
    lost = [_absent(row, here) for key, row in rows_a.items() if key not in rows_b]
    changed = []
    for key in sorted(rows_a.keys() & rows_b.keys()):
        was, now = rows_a[key], rows_b[key]
        fields = {name: [was[name], now[name]] for name in _FIELDS if was[name] != now[name]}
        if fields:
            rows = [was["row_id"], now["row_id"]]
            changed.append({"rows": rows, "step_id": key[0], "plan": key[1], "changes": fields})
    return {
        "versions": [a.data_version, b.data_version],
        "rows": [len(rows_a), len(rows_b)],
        "same": len(rows_a.keys() & rows_b.keys()) - len(changed),
        "gained": gained,
        "lost": lost,
        "changed": changed,
        "why": {
            "gained": dict(Counter(one["why"] for one in gained).most_common()),
            "lost": dict(Counter(one["why"] for one in lost).most_common()),
            "changed": dict(Counter(name for one in changed for name in one["changes"]).most_common()),
        },
    }


def _rows(archive: Archive, record: Record) -> dict[tuple[str, str], dict[str, Any]]:
    with readable(archive, record, DATASET):
        table = pq.read_table(archive.folder(record) / DATASET)
    if "row_id" not in table.column_names:
        raise NotFound(f"{record.ref} was made by an older coepg, without row ids: materialize {record.ref} again")
    return {
        (row["step_id"], row["plan"]): row
        | {"carried_over": row["made_in"] != record.iteration, "votes": f"{row['hits']} of {row['answered']}"}
        for row in table.to_pylist()
    }


_Written = tuple[dict[tuple[str, str], str], set[str], set[str]]
"""Of the candidates of one version of D_k: (step, plan) → decision, their steps, their planners."""


def _written(archive: Archive, dataset: Record) -> _Written:
    candidates = archive.made_by(archive.made_by(dataset.input("verdicts")).input("candidate_plans"))
    columns = ["candidate_id", "step_id", "planner", "plan"]
    with readable(archive, candidates, CANDIDATES):
        plans = pq.read_table(archive.folder(candidates) / CANDIDATES, columns=columns).to_pylist()
    with readable(archive, dataset, DECISIONS):
        table = pq.read_table(archive.folder(dataset) / DECISIONS)
    decisions = dict(zip(table["candidate_id"].to_pylist(), table["decision"].to_pylist(), strict=True))
    decided: dict[tuple[str, str], str] = {}
    for plan in plans:
        decided.setdefault((plan["step_id"], plan["plan"]), decisions[plan["candidate_id"]])
    return decided, {plan["step_id"] for plan in plans}, {plan["planner"] for plan in plans}


def _absent(row: dict[str, Any], written: _Written) -> dict[str, Any]:
    """A row that the other version lacks, with the reason; `written`: the candidates of the other version."""
    decided, steps, planners = written
    decision = decided.get((row["step_id"], row["plan"]))
    if decision is not None:
        why = f"written there too, and dropped: {decision}"
    elif row["step_id"] not in steps:
        why = "no plan was written for its step there"
    elif row["carried_over"]:
        why = "carried over from an earlier iteration here, not written there"
    elif row["planner"] not in planners:
        why = f"{row['planner']} was not in the pool there"
    else:
        why = f"{row['planner']} did not write it there"
    return {"row": row["row_id"], "step_id": row["step_id"], "plan": row["plan"], "why": why}


def _models(archive: Archive, a: Record | None, b: Record | None) -> dict[str, Any] | None:
    """Weights, inputs and settings of a model that differ; None where one of the two does not exist."""
    if a is None or b is None:
        return None
    used_a, used_b = (
        {_relative(used, record): f"{used.ref} {used.data_version}" for used in record.inputs} for record in (a, b)
    )
    return {
        "versions": [a.data_version, b.data_version],
        "same_weights": a.data_version == b.data_version,
        "distance": _distance(archive, a, b),
        "inputs": _pairs(used_a, used_b),
        "settings": _pairs(a.config, b.config),
        "code": _pairs({"code_version": a.code_version}, {"code_version": b.code_version}),
        "seeds": [a.seed, b.seed],
    }


def _relative(used: Input, reader: Record) -> str:
    """The name of an input without its k: its asset, with `previous/` where it is of the iteration before."""
    before = used.iteration is not None and used.iteration != reader.iteration
    return f"previous/{used.asset}" if before else used.asset


def _pairs(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    """Key → [value in a, value in b], where they differ; None for a missing key."""
    return {key: [a.get(key), b.get(key)] for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _distance(archive: Archive, a: Record, b: Record) -> float | None:
    """`weights_distance`; None too where the weights are not in the store."""
    if not all((archive.store / record.folder).is_dir() for record in (a, b)):
        return None
    try:
        return weights_distance(_checkpoint(archive, a), _checkpoint(archive, b))
    except SafetensorError as error:
        changed = "; ".join(archive.damage(a) + archive.damage(b)) or "their files are unchanged"
        raise NotFound(f"the weights of {a.folder} or {b.folder} cannot be read ({error}): {changed}") from None


def _checkpoint(archive: Archive, record: Record) -> Path:
    """The folder of a model's weights: the artifact's, or that of the base checkpoint that it names."""
    folder = archive.folder(record)
    base = folder / BASE
    return archive.root / json.loads(base.read_text())["checkpoint"] if base.exists() else folder


def weights_distance(a: Path, b: Path) -> float | None:
    """‖A − B‖ / ‖A‖ over all tensors of two checkpoints, read one by one.

    None where their tensors differ in name or shape, or where a checkpoint is not a local folder (a hub model).
    """

    def tensors(folder: Path) -> dict[str, Path]:
        files = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                files.update(dict.fromkeys(opened.keys(), file))
        return files

    here, there = tensors(a), tensors(b)
    if not here or here.keys() != there.keys():
        return None
    apart = size = 0.0
    for name, file in here.items():
        with safe_open(file, framework="pt") as one, safe_open(there[name], framework="pt") as other:
            x, y = one.get_tensor(name).float(), other.get_tensor(name).float()
        if x.shape != y.shape:
            return None
        apart, size = apart + float((x - y).square().sum()), size + float(x.square().sum())
    return math.sqrt(apart / size) if size else None


def _results(archive: Archive, a: Record | None, b: Record | None) -> dict[str, Any] | None:
    """Split → metrics of B minus A, paired by step, with 95 % intervals; None where one was not evaluated."""
    if a is None or b is None:
        return None
    results: dict[str, Any] = {}
    scored_a, scored_b = (_scored(archive, record) for record in (a, b))
    for split in sorted(scored_a.keys() & scored_b.keys()):
        try:
            results[split] = compare(scored_a[split], scored_b[split]).as_dict()
        except ScoringError as error:
            results[split] = {"not_comparable": str(error)}
    return results


def _scored(archive: Archive, evaluation: Record) -> dict[str, Result]:
    """Split → the result of an evaluation, from its stored predictions."""
    benchmark = archive.made_by(evaluation.input("benchmark_steps"))
    with readable(archive, evaluation, PREDICTIONS):
        predictions = pq.read_table(archive.folder(evaluation) / PREDICTIONS)
    with readable(archive, benchmark, STEPS):
        steps = all_steps(archive.folder(benchmark) / STEPS).drop_columns(["screenshot"])
    steps = steps.filter(pc.is_in(steps["step_id"], predictions["step_id"]))
    results = {}
    for split in sorted(set(steps["split"].to_pylist())):
        mine = steps.filter(pc.equal(steps["split"], split))
        answers = predictions.filter(pc.is_in(predictions["step_id"], mine["step_id"]))
        results[split] = score_steps(evaluation.config["protocol"], mine, answers)
    return results
