"""The heavy steps as jobs: each a model that can be written to a file, sent to another process, and run there.

A job knows folders and configuration, nothing of Dagster. What it leaves in `out` is the content of an artifact; what
it returns are figures. Work that was finished before a kill is found again in `scratch`.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, TypeAdapter

from coepg_dagster.experiment import Grpo, Member, Models, Regeneration, Serving, Sft, Strict
from coepg_dagster.processes import ended, last_words
from coepg_dagster.progress import Ended, Report
from coepg_dagster.steps import VERDICT_SCHEMA, whole_episodes
from coepg_dagster.training.launch import Placement, is_main

STEPS, CANDIDATES, VERDICTS, DATASET = "steps.arrow", "candidates.parquet", "verdicts.parquet", "dataset.parquet"
SHUFFLED = "shuffled.parquet"
"""Verdicts on other steps' plans (see pools.controls): `step_id` names the screen, `candidate_id` the plan."""
DECISIONS, PREDICTIONS, SCORES = "decisions.parquet", "predictions.parquet", "scores.json"
ROLLOUTS = "rollouts.parquet"


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
    """The steps of one split, in file order. Raises ValueError where there are none, or none within the limit.

    With a `limit`: whole episodes, at most `limit` steps (`whole_episodes`).
    """
    table = all_steps(path)
    start = pc.index(table["split"], split).as_py()
    if start < 0:
        raise ValueError(f"{path} holds no step of split {split!r}")
    return limited(table.slice(start, pc.sum(pc.equal(table["split"], split)).as_py()), limit)


def limited(table: pa.Table, limit: int | None) -> pa.Table:
    """The steps of one split within a limit, see `steps_of`. Raises ValueError where every episode is longer than that."""
    if limit is None or table.num_rows <= limit:
        return table
    chosen = whole_episodes(table, limit)
    if not chosen.num_rows:
        shortest = pc.min(pc.value_counts(table["episode_id"]).field("counts")).as_py()
        raise ValueError(
            f"no episode of split {table['split'][0].as_py()!r} has at most {limit} steps, the shortest has {shortest}: "
            "raise the limit"
        )
    return chosen


class Work(Strict):
    """What every job has."""

    out: Path
    scratch: Path
    steps: Path
    models: Models
    device: str
    batch_size: int
    seed: int
    serving: Serving = Serving()
    visual: Path | None = None  # where embeddings of screenshots are kept for other jobs; None: nowhere

    def device_name(self) -> str:
        """The device as a person would name it."""
        import torch

        return torch.cuda.get_device_name() if self.device.startswith("cuda") else "cpu"

    @abstractmethod
    def run(self, report: Report) -> dict[str, Any]:
        """Does the work and returns its figures."""


class TrainingWork(Work):
    """Training in one process or several."""

    placement: Placement


def validation_of(steps: Path, split: str, config: Grpo) -> pa.Table | None:
    """The steps on which GRPO chooses its weights; None: it keeps the last."""
    return None if config.validate_every is None else steps_of(steps, split, config.validation_steps)


def probed_of(steps: Path, split: str, config: Grpo) -> pa.Table | None:
    """The steps of validation on which GRPO is compared with what it began with; None: it is not."""
    return steps_of(steps, split, config.probe_steps) if config.probe_steps else None


class SftWork(TrainingWork):
    kind: Literal["sft"] = "sft"
    role: Literal["planner", "grounder"]
    init: str
    dataset: Path
    train_split: str
    validation_split: str
    max_plan_tokens: int
    max_point_tokens: int
    config: Sft

    def run(self, report: Report) -> dict[str, Any]:
        from coepg_dagster.training.probe import probe_sft
        from coepg_dagster.training.sft import train_sft

        dataset, steps = pq.read_table(self.dataset), steps_of(self.steps, self.train_split)
        figures = train_sft(
            self.role,
            self.init,
            dataset,
            steps,
            self.models,
            self.config,
            self.seed,
            self.device,
            self.out,
            report,
            scratch=self.scratch,
            placement=self.placement,
        )
        if not self.config.probe_steps or not is_main():
            return figures
        return figures | probe_sft(
            self.role,
            self.init,
            str(self.out),
            dataset,
            steps,
            steps_of(self.steps, self.validation_split),
            self.models,
            self.config.probe_steps,
            (self.max_plan_tokens, self.max_point_tokens),
            self.device,
            self.batch_size,
        )


class GrpoWork(TrainingWork):
    kind: Literal["grpo"] = "grpo"
    init: str
    own_grounder: tuple[str, str]
    verifiers: dict[str, Member]
    dataset: Path
    train_split: str
    validation_split: str
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
            self.serving,
            scratch=self.scratch,
            placement=self.placement,
            validation=validation_of(self.steps, self.validation_split, self.config),
            probed=probed_of(self.steps, self.validation_split, self.config),
        )


class EndToEndWork(TrainingWork):
    kind: Literal["end_to_end"] = "end_to_end"
    init: str
    dataset: Path
    train_split: str
    validation_split: str
    sft: Sft
    grpo: Grpo

    def run(self, report: Report) -> dict[str, Any]:
        from coepg_dagster.training.end_to_end import train_end_to_end

        return train_end_to_end(
            self.init,
            pq.read_table(self.dataset),
            steps_of(self.steps, self.train_split),
            self.models,
            self.sft,
            self.grpo,
            self.seed,
            self.device,
            self.scratch,
            self.out,
            report,
            self.placement,
            validation_of(self.steps, self.validation_split, self.grpo),
            probed_of(self.steps, self.validation_split, self.grpo),
        )


CHUNK = 256
"""Rows of input that one chunk of pool work or evaluation takes, and that a killed run can lose."""


@dataclass(frozen=True)
class Chunk:
    """Rows start .. start + CHUNK of the input, for one model (or pair of models)."""

    member: str
    start: int


class ChunkedWork(Work):
    """Inference over many rows: cut into chunks, spread over processes, each chunk kept as soon as it is done.

    The result does not depend on the number of processes, nor on what was found from a killed run: each chunk has its own
    seed and file. Each process holds one model at a time. On GPUs there is one process per GPU.
    """

    kind: str
    processes: int

    @abstractmethod
    def chunks(self) -> list[Chunk]:
        """All chunks, those of one member together."""

    @abstractmethod
    def open(self, member: str, device: str) -> AbstractContextManager[Callable[[int], pa.Table]]:
        """Loads what `member` needs, for as long as it is needed; gives the function that makes the chunk from a start row."""

    def engine(self, member: Member, device: str, share: int = 1) -> AbstractContextManager[Any]:
        """The engine that answers for `member`; `share` local models are open at once."""
        from coepg_dagster.inference.opening import opened

        return opened(
            member,
            self.models,
            device=device,
            batch_size=self.batch_size,
            serving=self.serving,
            logs=self.scratch,
            share=share,
        )

    @abstractmethod
    def finish(self, parts: dict[str, list[pa.Table]]) -> dict[str, Any]:
        """Writes the result from the chunks of each member; returns the figures."""

    def file_of(self, chunk: Chunk) -> Path:
        """Where a chunk is kept until the job is done."""
        return self.scratch / f"{self.kind}-{chunk.member}-{chunk.start}.parquet"

    def run(self, report: Report) -> dict[str, Any]:
        chunks = self.chunks()
        missing = [chunk for chunk in chunks if not self.file_of(chunk).exists()]
        devices = self._devices()[: len(missing)]
        if len(devices) > 1:
            self._spread(missing, devices, chunks, report)
        elif missing:
            self._make(missing, devices[0], lambda: self._tell(chunks, report))
        return self.figures_of_chunks()

    def figures_of_chunks(self) -> dict[str, Any]:
        """The figures of the work, once every chunk is there."""
        parts: dict[str, list[pa.Table]] = {}
        for chunk in self.chunks():
            parts.setdefault(chunk.member, []).append(pq.read_table(self.file_of(chunk)))
        return self.finish(parts)

    def _devices(self) -> list[str]:
        """The device of each process."""
        if self.device != "cuda":
            return [self.device] * self.processes
        import torch

        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]

    def _tell(self, chunks: list[Chunk], report: Report) -> None:
        report(sum(self.file_of(chunk).exists() for chunk in chunks), len(chunks), {})

    def _make(self, chunks: list[Chunk], device: str, done: Callable[[], None] = lambda: None) -> None:
        # the model before it goes before the next one comes
        for member, of_member in groupby(chunks, key=lambda chunk: chunk.member):
            with self.open(member, device) as make:
                for chunk in of_member:
                    write_table(make(chunk.start), self.file_of(chunk))
                    done()

    def _make_alone(self, chunks: list[Chunk], device: str) -> None:
        """`_make` in a process of its own."""
        import torch

        from coepg_dagster.inference.visual import keep_in

        keep_in(self.visual)
        # torch replaces the thread pool of the process that was forked at its first use, which threads must not race for
        torch.set_num_threads(torch.get_num_threads())
        with last_words():
            self._make(chunks, device)

    def _spread(self, missing: list[Chunk], devices: list[str], chunks: list[Chunk], report: Report) -> None:
        # a forked process need not import torch again; CUDA cannot be used after a fork
        context = multiprocessing.get_context("fork" if devices[0] == "cpu" else "spawn")
        running = [
            context.Process(target=self._make_alone, args=(missing[i :: len(devices)], device))  # type: ignore[attr-defined]
            for i, device in enumerate(devices)
        ]
        for process in running:
            process.start()
        try:
            while any(process.is_alive() for process in running):
                multiprocessing.connection.wait([process.sentinel for process in running if process.is_alive()], 1.0)
                self._tell(chunks, report)
                failed = next((process for process in running if process.exitcode), None)
                if failed is not None:
                    raise Ended(f"a process of this work {ended(failed.exitcode)}")
        finally:
            for process in running:
                process.terminate()
                process.join()


CONTROL = -1
"""The start of a verifier's last chunk, which holds the plan shuffle."""


def starts(rows: int) -> range:
    """The first rows of the chunks of `rows` rows."""
    return range(0, rows, CHUNK)


class CandidatesWork(ChunkedWork):
    kind: Literal["candidates"] = "candidates"
    members: dict[str, Member]
    train_split: str
    max_steps: int | None
    config: Regeneration

    def _steps(self) -> pa.Table:
        return steps_of(self.steps, self.train_split, self.max_steps)

    def chunks(self) -> list[Chunk]:
        rows = self._steps().num_rows
        return [Chunk(name, start) for name in self.members for start in starts(rows)]

    @contextmanager
    def open(self, member: str, device: str) -> Iterator[Callable[[int], pa.Table]]:
        from coepg_dagster.inference.agents import Planner
        from coepg_dagster.inference.screens import Screens
        from coepg_dagster.pools.candidates import write_candidates

        steps = self._steps()
        with self.engine(self.members[member], device) as engine:
            planner = Planner(engine, Screens(steps, engine.resize), self.models.prompts)

            def make(start: int) -> pa.Table:
                seed = zlib.crc32(f"{self.seed}/{member}/{start}".encode())
                return write_candidates(planner, member, steps.slice(start, CHUNK), self.config, seed)

            yield make

    def finish(self, parts: dict[str, list[pa.Table]]) -> dict[str, Any]:
        from coepg_dagster.pools.candidates import mark_duplicates
        from coepg_dagster.pools.verdicts import to_verify

        table = pa.concat_tables([part for tables in parts.values() for part in tables])
        table = mark_duplicates(table, self.config.similar)
        write_table(table, self.out / CANDIDATES)
        gates = pc.value_counts(table["gate"]).to_pylist()
        return {
            "rows": table.num_rows,
            "to_verify": to_verify(table).num_rows,
            **{f"gate_{count['values']}": count["counts"] for count in gates},
        }


class VerdictsWork(ChunkedWork):
    kind: Literal["verdicts"] = "verdicts"
    members: dict[str, Member]
    candidates: Path
    train_split: str
    config: Regeneration
    shuffled_plans: int

    def _asked(self) -> pa.Table:
        """The candidates to verify, those of one screenshot together."""
        from coepg_dagster.pools.verdicts import to_verify

        return to_verify(pq.read_table(self.candidates)).sort_by(
            [("step_id", "ascending"), ("candidate_id", "ascending")]
        )

    def chunks(self) -> list[Chunk]:
        rows = self._asked().num_rows
        return [Chunk(name, start) for name in self.members for start in (*starts(rows), CONTROL)]

    @contextmanager
    def open(self, member: str, device: str) -> Iterator[Callable[[int], pa.Table]]:
        from coepg_dagster.inference.agents import Grounder
        from coepg_dagster.inference.screens import Screens
        from coepg_dagster.pools.controls import shuffled
        from coepg_dagster.pools.verdicts import give_verdicts

        asked = self._asked()
        steps = steps_of(self.steps, self.train_split)
        with self.engine(self.members[member], device) as engine:
            screens = Screens(steps, engine.resize)
            self._resize(member).write_text(json.dumps(engine.resize))
            tokens = self.config.max_point_tokens
            grounder = Grounder(engine, screens, self.models.prompts, self.models.coordinates, tokens)

            def make(start: int) -> pa.Table:
                if start == CONTROL:
                    plans = shuffled(asked, steps, self.config.similar, self.shuffled_plans)
                else:
                    plans = asked.slice(start, CHUNK)
                return give_verdicts(grounder, member, plans, screens)

            yield make

    def _resize(self, member: str) -> Path:
        """How a member's image processor resizes: written when it is loaded, kept like the chunks."""
        return self.scratch / f"resize-{member}.json"

    def finish(self, parts: dict[str, list[pa.Table]]) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        tables, controls = [], []
        for name, (*part, control) in parts.items():
            controls.append(control)
            figures[f"resize_{name}"] = json.loads(self._resize(name).read_text())
            verdicts = pa.concat_tables(part) if part else VERDICT_SCHEMA.empty_table()
            tables.append(verdicts)
            answered = verdicts.filter(pc.is_null(verdicts["failure"]))
            figures[f"hit_rate_{name}"] = 100 * (pc.mean(answered["hit"]).as_py() or 0.0)
            figures[f"failed_{name}"] = verdicts.num_rows - answered.num_rows
        table = pa.concat_tables(tables)
        write_table(table, self.out / VERDICTS)
        write_table(pa.concat_tables(controls), self.out / SHUFFLED)
        return {"rows": table.num_rows, **figures}


class EvaluationWork(ChunkedWork):
    kind: Literal["evaluation"] = "evaluation"
    planner: str
    grounder: str | None  # None: `planner` is an end-to-end agent
    splits: list[str]
    max_steps: int | None
    protocol: str
    max_plan_tokens: int
    max_point_tokens: int
    lost: dict[str, int] = {}  # steps that splits lack, by "split: reason" (readers.importing.Counts)

    def _splits(self) -> dict[str, pa.Table]:
        return {split: steps_of(self.steps, split, self.max_steps) for split in self.splits}

    def _steps(self) -> pa.Table:
        return pa.concat_tables(self._splits().values())

    def chunks(self) -> list[Chunk]:
        return [Chunk("agent", start) for start in starts(self._steps().num_rows)]

    @contextmanager
    def open(self, member: str, device: str) -> Iterator[Callable[[int], pa.Table]]:
        from coepg_dagster.inference.predict import predict, predict_end_to_end

        steps = self._steps()
        if self.grounder is None:
            with self.engine(Member(model=self.planner), device) as agent:
                yield lambda start: predict_end_to_end(
                    agent, steps.slice(start, CHUNK), self.models, self.max_plan_tokens
                )
            return
        tokens = self.max_plan_tokens, self.max_point_tokens
        with (
            self.engine(Member(model=self.planner), device, share=2) as planner,
            self.engine(Member(model=self.grounder), device, share=2) as grounder,
        ):
            yield lambda start: predict(planner, grounder, steps.slice(start, CHUNK), self.models, *tokens)

    def finish(self, parts: dict[str, list[pa.Table]]) -> dict[str, Any]:
        from coepg_dagster.evaluation.score import score_steps
        from coepg_dagster.readers.importing import lost_of

        predictions = pa.concat_tables(parts["agent"])
        write_table(predictions, self.out / PREDICTIONS)
        scores, start = {}, 0
        for split, table in self._splits().items():
            answers = predictions.slice(start, table.num_rows)
            result = score_steps(self.protocol, table, answers, lost=lost_of(self.lost, split))
            scores[split] = json.loads(result.to_json())
            start += table.num_rows
        (self.out / SCORES).write_text(json.dumps(scores, indent=1, sort_keys=True))
        return scores


AnyWork = Annotated[
    SftWork | GrpoWork | EndToEndWork | CandidatesWork | VerdictsWork | EvaluationWork, Field(discriminator="kind")
]
_WORK: TypeAdapter[Any] = TypeAdapter(AnyWork)


def parse_work(text: str) -> Work:
    """The job that another process wrote with `model_dump_json`, as it is."""
    work: Work = _WORK.validate_json(text)
    return work


def read_work(path: Path) -> Work:
    """The job of a file; device `auto` becomes the one that is there."""
    work = parse_work(path.read_text())
    if work.device != "auto":
        return work
    import torch

    return work.model_copy(update={"device": "cuda" if torch.cuda.is_available() else "cpu"})
