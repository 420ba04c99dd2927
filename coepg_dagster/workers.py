"""The heavy steps as jobs: each a model that can be written to a file, sent to another process, and run there.

A job knows folders and configuration, nothing of Dagster. What it leaves in `out` is the content of an artifact; what
it returns are figures. Work that was finished before a kill is found again in `scratch`.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, TypeAdapter

from coepg_dagster.experiment import Grpo, Models, Regeneration, Sft, Strict
from coepg_dagster.progress import Report
from coepg_dagster.steps import VERDICT_SCHEMA

STEPS, CANDIDATES, VERDICTS, DATASET = "steps.arrow", "candidates.parquet", "verdicts.parquet", "dataset.parquet"
DECISIONS, PREDICTIONS, SCORES = "decisions.parquet", "predictions.parquet", "scores.json"


def write_table(table: pa.Table, path: Path) -> None:
    """Parquet, written so that equal tables give equal bytes however they are cut into chunks, in one rename."""
    partial = path.with_suffix(".partial")
    pq.write_table(table.combine_chunks(), partial, compression="zstd", store_schema=False, write_page_index=False)
    partial.rename(path)


def write_steps(table: pa.Table, path: Path, splits: Sequence[str]) -> None:
    """Steps as an Arrow file, one split after the other, so that each is read back as a slice of mapped memory."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        for split in splits:
            for batch in table.filter(pc.field("split") == split).to_batches(max_chunksize=64):
                writer.write_batch(batch)


def all_steps(path: Path) -> pa.Table:
    """Every step of a file of `write_steps`, memory-mapped: screenshots cost no memory until they are looked at."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def steps_of(path: Path, split: str, limit: int | None = None) -> pa.Table:
    """The steps of one split, in file order, at most `limit`. Raises ValueError where there are none."""
    table = all_steps(path)
    start = pc.index(table["split"], split).as_py()
    if start < 0:
        raise ValueError(f"{path} holds no step of split {split!r}")
    rows = pc.sum(pc.equal(table["split"], split)).as_py()
    return table.slice(start, rows if limit is None else min(rows, limit))


class Work(Strict):
    """What every job has."""

    out: Path
    scratch: Path
    steps: Path
    models: Models
    device: str
    batch_size: int
    seed: int

    def device_name(self) -> str:
        """The device as a person would name it."""
        import torch

        return torch.cuda.get_device_name() if self.device.startswith("cuda") else "cpu"

    @abstractmethod
    def run(self, report: Report) -> dict[str, Any]:
        """Does the work and returns its figures."""


class SftWork(Work):
    kind: Literal["sft"] = "sft"
    role: Literal["planner", "grounder"]
    init: str
    dataset: Path
    train_split: str
    config: Sft

    def run(self, report: Report) -> dict[str, Any]:
        from coepg_dagster.training.sft import train_sft

        return train_sft(
            self.role,
            self.init,
            pq.read_table(self.dataset),
            steps_of(self.steps, self.train_split),
            self.models,
            self.config,
            self.seed,
            self.device,
            self.out,
            report,
        )


class GrpoWork(Work):
    kind: Literal["grpo"] = "grpo"
    init: str
    own_grounder: tuple[str, str]
    verifiers: dict[str, str]
    dataset: Path
    train_split: str
    max_point_tokens: int
    config: Grpo

    def run(self, report: Report) -> dict[str, Any]:
        from coepg_dagster.training.grpo import train_grpo

        return train_grpo(
            self.init,
            self.own_grounder,
            self.verifiers,
            pq.read_table(self.dataset),
            steps_of(self.steps, self.train_split),
            self.models,
            self.config,
            self.max_point_tokens,
            self.batch_size,
            self.seed,
            self.device,
            self.out,
            report,
        )


CHUNK = 256
"""Steps (candidates) or candidates (verdicts) that a killed run can lose."""


class CandidatesWork(Work):
    kind: Literal["candidates"] = "candidates"
    members: dict[str, str]
    train_split: str
    max_steps: int | None
    config: Regeneration

    def run(self, report: Report) -> dict[str, Any]:
        from coepg_dagster.inference.agents import Planner
        from coepg_dagster.inference.screens import Screens
        from coepg_dagster.pools.candidates import mark_duplicates, write_candidates
        from coepg_dagster.pools.verdicts import to_verify

        steps = steps_of(self.steps, self.train_split, self.max_steps)
        of = steps.num_rows * len(self.members)

        def member(name: str, checkpoint: str, before: int) -> list[pa.Table]:
            agent = None
            parts = []
            for start in range(0, steps.num_rows, CHUNK):
                path = self.scratch / f"candidates-{name}-{start}.parquet"
                if not path.exists():
                    if agent is None:
                        engine = _engine(self, checkpoint)
                        agent = Planner(engine, Screens(steps, engine.resize), self.models.prompts)
                    chunk = steps.slice(start, CHUNK)
                    seed = zlib.crc32(f"{self.seed}/{name}/{start}".encode())
                    write_table(write_candidates(agent, name, chunk, self.config, seed), path)
                parts.append(pq.read_table(path))
                report(before + min(start + CHUNK, steps.num_rows), of, {})
            return parts

        tables = [
            part
            for i, (name, checkpoint) in enumerate(self.members.items())
            for part in member(name, checkpoint, i * steps.num_rows)
        ]
        table = mark_duplicates(pa.concat_tables(tables), self.config.similar)
        write_table(table, self.out / CANDIDATES)
        gates = pc.value_counts(table["gate"]).to_pylist()
        return {
            "rows": table.num_rows,
            "to_verify": to_verify(table).num_rows,
            **{f"gate_{count['values']}": count["counts"] for count in gates},
        }


class VerdictsWork(Work):
    kind: Literal["verdicts"] = "verdicts"
    members: dict[str, str]
    candidates: Path
    train_split: str
    config: Regeneration

    def run(self, report: Report) -> dict[str, Any]:
        from coepg_dagster.inference.agents import Grounder
        from coepg_dagster.inference.screens import Screens
        from coepg_dagster.pools.verdicts import give_verdicts, to_verify

        steps = steps_of(self.steps, self.train_split)
        asked = to_verify(pq.read_table(self.candidates)).sort_by("step_id")
        of = asked.num_rows * len(self.members)
        tables, figures = [], {}
        for i, (name, checkpoint) in enumerate(self.members.items()):
            grounder = None
            parts = []
            for start in range(0, asked.num_rows, CHUNK):
                path = self.scratch / f"verdicts-{name}-{start}.parquet"
                if not path.exists():
                    if grounder is None:
                        engine = _engine(self, checkpoint)
                        screens = Screens(steps, engine.resize)
                        grounder = Grounder(
                            engine, screens, self.models.prompts, self.models.coordinates, self.config.max_point_tokens
                        )
                    write_table(give_verdicts(grounder, name, asked.slice(start, CHUNK), screens), path)
                parts.append(pq.read_table(path))
                report(i * asked.num_rows + min(start + CHUNK, asked.num_rows), of, {})
            verdicts = pa.concat_tables(parts) if parts else None
            if verdicts is not None:
                tables.append(verdicts)
                answered = verdicts.filter(pc.is_null(verdicts["failure"]))
                figures[f"hit_rate_{name}"] = 100 * (pc.mean(answered["hit"]).as_py() or 0.0)
                figures[f"failed_{name}"] = verdicts.num_rows - answered.num_rows
        table = pa.concat_tables(tables) if tables else VERDICT_SCHEMA.empty_table()
        write_table(table, self.out / VERDICTS)
        return {"rows": table.num_rows, **figures}


class EvaluationWork(Work):
    kind: Literal["evaluation"] = "evaluation"
    planner: str
    grounder: str
    splits: list[str]
    max_steps: int | None
    protocol: str
    max_plan_tokens: int
    max_point_tokens: int

    def run(self, report: Report) -> dict[str, Any]:
        import json

        from coepg_dagster.evaluation.score import score_steps
        from coepg_dagster.inference.predict import predict

        tables = [steps_of(self.steps, split, self.max_steps) for split in self.splits]
        steps = pa.concat_tables(tables)
        predictions = predict(
            _engine(self, self.planner),
            _engine(self, self.grounder),
            steps,
            self.models,
            self.max_plan_tokens,
            self.max_point_tokens,
            report,
        )
        write_table(predictions, self.out / PREDICTIONS)
        scores = {}
        for split, table in zip(self.splits, tables, strict=True):
            of_split = predictions.filter(pc.is_in(predictions["step_id"], table["step_id"].combine_chunks()))
            scores[split] = json.loads(score_steps(self.protocol, table, of_split).to_json())
        (self.out / SCORES).write_text(json.dumps(scores, indent=1, sort_keys=True))
        return scores


def _engine(work: Work, checkpoint: str) -> Any:
    from coepg_dagster.inference.transformers_engine import TransformersEngine

    return TransformersEngine(checkpoint, dtype=work.models.dtype, device=work.device, batch_size=work.batch_size)


AnyWork = Annotated[SftWork | GrpoWork | CandidatesWork | VerdictsWork | EvaluationWork, Field(discriminator="kind")]
_WORK: TypeAdapter[Any] = TypeAdapter(AnyWork)


def read_work(path: Path) -> Work:
    """The job that another process wrote with `model_dump_json`; device `auto` becomes the one that is there."""
    work: Work = _WORK.validate_json(path.read_text())
    if work.device != "auto":
        return work
    import torch

    return work.model_copy(update={"device": "cuda" if torch.cuda.is_available() else "cpu"})
