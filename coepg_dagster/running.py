"""Runs jobs.

Training is run by its trainer. Inference over many rows is divided into chunks, which are distributed over processes. Each
chunk is written as soon as it is done.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coepg_dagster.artifacts import (
    BOARD_PREDICTIONS,
    BOARDS,
    BY,
    CANDIDATES,
    CONTENT,
    FOLD,
    PAIR_PREDICTIONS,
    PAIRS,
    PREDICTIONS,
    SCORES,
    SHUFFLED,
    THIRD_PARTY,
    TRIGGERS,
    VERDICTS,
    all_steps,
    intact,
    limited,
    seal,
    steps_of,
    whole,
    write_table,
)
from coepg_dagster.experiment.models import Member
from coepg_dagster.inference.engine import EngineChanged
from coepg_dagster.jobs import (
    CandidatesJob,
    ChunkedJob,
    EndToEndJob,
    EvaluationJob,
    GrounderRlJob,
    GrpoJob,
    Job,
    SftJob,
    VerdictsJob,
)
from coepg_dagster.processes import ended, last_words, visible
from coepg_dagster.progress import Ended, Report
from coepg_dagster.readers.boards import SPLIT
from coepg_dagster.steps import VERDICT_SCHEMA, fold_of


def run(job: Job, report: Report) -> dict[str, Any]:
    """Runs a job and returns its figures."""
    match job:
        case SftJob():
            from coepg_dagster.training.sft import train_sft

            return train_sft(job, report)
        case GrounderRlJob():
            from coepg_dagster.training.grpo import train_grounder_rl

            return train_grounder_rl(job, report)
        case GrpoJob():
            from coepg_dagster.training.grpo import train_grpo

            return train_grpo(job, report)
        case EndToEndJob():
            from coepg_dagster.training.end_to_end import train_end_to_end

            return train_end_to_end(job, report)
        case ChunkedJob():
            return chunked(job).run(report)
    raise TypeError(f"nothing runs a {type(job).__name__}")


CHUNK = 256
"""Input rows of a chunk of pool work or evaluation; a killed run loses at most this much for each process."""

J = TypeVar("J", bound=ChunkedJob)
W = TypeVar("W")


@dataclass(frozen=True)
class Chunk:
    """Rows start .. start + CHUNK of the input, for one model (or pair of models)."""

    member: str
    start: int


def next_chunk(left: Sequence[Chunk], held: str | None) -> Chunk:
    """The chunk of `left` that a free worker makes: of the member that it holds, else of the one with the most chunks left."""
    waiting = Counter(chunk.member for chunk in left)
    member = held if held in waiting else waiting.most_common(1)[0][0]
    return next(chunk for chunk in left if chunk.member == member)


def taker(chunk: Chunk, idle: Sequence[W], held: Mapping[W, str | None]) -> W:
    """Which of the workers without work makes a chunk that came back: one that holds its member, else the last."""
    return next((worker for worker in idle if held.get(worker) == chunk.member), idle[-1])


class Chunked(ABC, Generic[J]):
    """A job in chunks, each with its seed and its file.

    The result does not depend on the number of processes, nor on chunks that a killed run had finished. Each process holds the
    models of one member at a time.
    """

    def __init__(self, job: J) -> None:
        self.job = job

    @abstractmethod
    def chunks(self) -> list[Chunk]:
        """All chunks, those of one member together."""

    @abstractmethod
    def open(self, member: str, device: str) -> AbstractContextManager[Callable[[int], pa.Table]]:
        """A context with the models of `member` loaded; yields the function from start row to chunk."""

    @abstractmethod
    def finish(self, parts: dict[str, list[pa.Table]]) -> dict[str, Any]:
        """Writes the result from the chunks of each member; returns the figures."""

    def engine(self, member: Member, device: str, share: int = 1) -> AbstractContextManager[Any]:
        """The engine of `member`; `share` local models are open at once."""
        from coepg_dagster.inference.opening import opened

        return opened(member, self.job.model_copy(update={"device": device}), logs=self.job.scratch, share=share)

    def file_of(self, chunk: Chunk) -> Path:
        """The file of a chunk until the job is done."""
        return self.job.scratch / f"{self.job.kind}-{chunk.member}-{chunk.start}.parquet"

    def is_there(self, chunk: Chunk) -> bool:
        """Whether a chunk was finished, and is undamaged."""
        return intact(self.file_of(chunk))

    def missing(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those of `chunks` that are to be made; what is there of them, damaged or of a changed model, is removed."""
        changed = [member for member in {chunk.member for chunk in chunks} if self._changed(member).exists()]
        missing = [chunk for chunk in chunks if chunk.member in changed or not self.is_there(chunk)]
        for chunk in missing:
            self.file_of(chunk).unlink(missing_ok=True)
        for member in changed:
            self._changed(member).unlink()
        return missing

    def _changed(self, member: str) -> Path:
        """The file that says that a member's model was changed while it worked."""
        return self.job.scratch / f"{self.job.kind}-{member}-changed"

    @contextmanager
    def holding(self, member: str, device: str) -> Iterator[Callable[[Chunk], None]]:
        """A context with the models of `member` loaded; yields what makes the file of a chunk.

        No chunk of the member is used if its model is found to have changed meanwhile, which is asked at the end. The next run
        removes them: until this one has ended, other processes may finish more.
        """
        try:
            with self.open(member, device) as make:

                def keep(chunk: Chunk) -> None:
                    write_table(make(chunk.start), self.file_of(chunk))
                    seal(self.file_of(chunk))

                yield keep
        except EngineChanged:
            self._changed(member).touch()
            raise

    def run(self, report: Report) -> dict[str, Any]:
        """Makes the chunks that are missing or damaged, and returns the figures."""
        chunks = self.chunks()
        missing = self.missing(chunks)
        devices = self._devices()[: len(missing)]
        if len(devices) > 1:
            self._spread(missing, devices, chunks, report)
        elif missing:
            self._make(missing, devices[0], lambda: self._report(chunks, report))
        return self.figures()

    def figures(self) -> dict[str, Any]:
        """Writes the result and returns the figures, once all chunks exist."""
        parts: dict[str, list[pa.Table]] = {}
        for chunk in self.chunks():
            parts.setdefault(chunk.member, []).append(pq.read_table(self.file_of(chunk)))
        return self.finish(parts)

    def _devices(self) -> list[str]:
        """The device of each process."""
        if self.job.device != "cuda":
            return [self.job.device] * self.job.processes
        import torch

        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]

    def _report(self, chunks: list[Chunk], report: Report) -> None:
        report(sum(self.file_of(chunk).exists() for chunk in chunks), len(chunks), {})

    def _make(self, chunks: list[Chunk], device: str, done: Callable[[], None] = lambda: None) -> None:
        # the models of one member are closed before those of the next are loaded
        for member, of_member in groupby(chunks, key=lambda chunk: chunk.member):
            with self.holding(member, device) as keep:
                for chunk in of_member:
                    keep(chunk)
                    done()

    def _make_in_process(self, chunks: list[Chunk], device: str) -> None:
        """Runs `_make` in a new process, which sees one GPU: every vLLM that it opens, also beside another, looks for it anew."""
        os.environ.update(visible(device))  # before a library counts the GPUs

        import torch

        from coepg_dagster.inference.visual import keep_in

        keep_in(self.job.visual)
        # after a fork torch replaces its thread pool at the first use; doing it here keeps threads from racing for it
        torch.set_num_threads(torch.get_num_threads())
        with last_words():
            self._make(chunks, device.partition(":")[0])

    def _spread(self, missing: list[Chunk], devices: list[str], chunks: list[Chunk], report: Report) -> None:
        # fork saves the import of torch, but CUDA cannot be used after a fork
        context = multiprocessing.get_context("fork" if devices[0] == "cpu" else "spawn")
        running = [
            context.Process(target=self._make_in_process, args=(missing[i :: len(devices)], device))  # type: ignore[attr-defined]
            for i, device in enumerate(devices)
        ]
        for process in running:
            process.start()
        try:
            while any(process.is_alive() for process in running):
                multiprocessing.connection.wait([process.sentinel for process in running if process.is_alive()], 1.0)
                self._report(chunks, report)
                failed = next((process for process in running if process.exitcode), None)
                if failed is not None:
                    raise Ended(f"a process of this work {ended(failed.exitcode)}")
        finally:
            for process in running:
                process.terminate()
                process.join()


CONTROL, TRIGGER = -1, -2
"""The start of a verifier's last chunk, which holds the plan shuffle."""


def starts(rows: int) -> range:
    """The first rows of the chunks of `rows` rows."""
    return range(0, rows, CHUNK)


class Candidates(Chunked[CandidatesJob]):
    """Each member of Π writes plans."""

    def _steps(self) -> pa.Table:
        return steps_of(self.job.steps, self.job.train_split, self.job.max_steps)

    def chunks(self) -> list[Chunk]:
        rows = self._steps().num_rows
        return [Chunk(name, start) for name in self.job.members for start in starts(rows)]

    @contextmanager
    def open(self, member: str, device: str) -> Iterator[Callable[[int], pa.Table]]:
        from coepg_dagster.inference.agents import Planner
        from coepg_dagster.inference.screens import Screens
        from coepg_dagster.pools.candidates import write_candidates

        steps = self._steps()
        with self.engine(self.job.members[member], device) as engine:
            planner = Planner(engine, Screens(steps, engine.resize), self.job.models.prompts)

            def make(start: int) -> pa.Table:
                seed = zlib.crc32(f"{self.job.seed}/{member}/{start}".encode())
                return write_candidates(planner, member, steps.slice(start, CHUNK), self.job.config, seed)

            yield make

    def finish(self, parts: dict[str, list[pa.Table]]) -> dict[str, Any]:
        from coepg_dagster.pools.candidates import mark_duplicates
        from coepg_dagster.pools.verdicts import to_verify

        table = pa.concat_tables([part for tables in parts.values() for part in tables])
        table = mark_duplicates(table, self.job.config.similar)
        write_table(table, self.job.out / CANDIDATES)
        gates = pc.value_counts(table["gate"]).to_pylist()
        return {
            "rows": table.num_rows,
            "to_verify": to_verify(table).num_rows,
            **{f"gate_{count['values']}": count["counts"] for count in gates},
        }


class Verdicts(Chunked[VerdictsJob]):
    """Each member of Φ grounds the candidates, and in its last chunk the plans of the plan shuffle."""

    def _to_verify(self) -> pa.Table:
        """The candidates to verify, those of one screenshot together."""
        from coepg_dagster.pools.verdicts import to_verify

        return to_verify(pq.read_table(self.job.candidates)).sort_by(
            [("step_id", "ascending"), ("candidate_id", "ascending")]
        )

    def _parts(self, member: str) -> dict[str, tuple[str, pa.Table]]:
        """Name → (checkpoint, candidates) of each model that verifies for a member: itself, or the grounders of its folds."""
        candidates, checkpoint = self._to_verify(), self.job.members[member].model
        folds = self.job.folds.get(member)
        if folds is None:
            return {member: (checkpoint, candidates)}
        steps = steps_of(self.job.steps, self.job.train_split).select(["step_id", "episode_id"])
        fold = {row["step_id"]: fold_of(row["episode_id"], folds) for row in steps.to_pylist()}
        of_rows = [fold[step_id] for step_id in candidates["step_id"].to_pylist()]
        return {
            f"{member}.{FOLD.format(i)}": (
                str(Path(checkpoint) / FOLD.format(i)),
                candidates.filter(pa.array([of == i for of in of_rows], pa.bool_())),
            )
            for i in range(folds)
        } | {member: (checkpoint, candidates.slice(0, 0))}

    def chunks(self) -> list[Chunk]:
        last = (TRIGGER, CONTROL) if self.job.trigger_steps else (CONTROL,)
        return [
            Chunk(name, start)
            for member in self.job.members
            for name, (_, candidates) in self._parts(member).items()
            for start in (*starts(candidates.num_rows), *(last if name == member else ()))
        ]

    @contextmanager
    def open(self, member: str, device: str) -> Iterator[Callable[[int], pa.Table]]:
        from coepg_dagster.inference.agents import Grounder
        from coepg_dagster.inference.screens import Screens
        from coepg_dagster.pools.controls import shuffled
        from coepg_dagster.pools.threats import plans_of, probe_triggers
        from coepg_dagster.pools.verdicts import give_verdicts

        name = member.partition(".")[0]
        checkpoint, candidates = self._parts(name)[member]
        steps = steps_of(self.job.steps, self.job.train_split)
        with self.engine(self.job.members[name].model_copy(update={"model": checkpoint}), device) as engine:
            screens = Screens(steps, engine.resize)
            with whole(self._resize(member)) as draft:
                draft.write_text(json.dumps(engine.resize))
            seal(self._resize(member))
            tokens = self.job.config.max_point_tokens
            models = self.job.models

            def on(table: pa.Table) -> Grounder:
                return Grounder(engine, Screens(table, engine.resize), models.prompts, models.coordinates, tokens)

            grounder = Grounder(engine, screens, models.prompts, models.coordinates, tokens)

            def make(start: int) -> pa.Table:
                if start == TRIGGER:
                    assert self.job.trigger_steps is not None
                    return probe_triggers(name, on, steps, plans_of(self._to_verify()), self.job.trigger_steps)
                if start == CONTROL:
                    plans = shuffled(self._to_verify(), steps, self.job.config.similar, self.job.shuffled_plans)
                else:
                    plans = candidates.slice(start, CHUNK)
                return give_verdicts(grounder, name, plans, screens)

            yield make

    def is_there(self, chunk: Chunk) -> bool:
        # the engine is opened again for the last chunk where its `resize` is damaged
        return super().is_there(chunk) and (chunk.start != CONTROL or intact(self._resize(chunk.member)))

    def _resize(self, member: str) -> Path:
        """The file with `resize` of a member's engine, written when it is loaded and kept as chunks are."""
        return self.job.scratch / f"resize-{member}.json"

    def finish(self, parts: dict[str, list[pa.Table]]) -> dict[str, Any]:
        from coepg_dagster.rewards.calibration import of_verdicts

        figures: dict[str, Any] = {}
        tables, controls, triggers = [], [], []
        for name in self.job.members:
            *part, control = [table for of in self._parts(name) for table in parts.get(of, [])]
            controls.append(control)
            if self.job.trigger_steps:
                triggers.append(part.pop())
            figures[f"resize_{name}"] = json.loads(self._resize(name).read_text())
            verdicts = pa.concat_tables(part) if part else VERDICT_SCHEMA.empty_table()
            tables.append(verdicts)
            answered = verdicts.filter(pc.is_null(verdicts["failure"]))
            figures[f"hit_rate_{name}"] = 100 * (pc.mean(answered["hit"]).as_py() or 0.0)
            figures[f"failed_{name}"] = verdicts.num_rows - answered.num_rows
            if measured := of_verdicts(verdicts).get(name):
                figures[f"calibration_{name}"] = {"ece": measured.ece, "brier": measured.brier, "auroc": measured.auroc}
        table = pa.concat_tables(tables)
        write_table(table, self.job.out / VERDICTS)
        write_table(pa.concat_tables(controls), self.job.out / SHUFFLED)
        if triggers:
            write_table(pa.concat_tables(triggers), self.job.out / TRIGGERS)
        return {"rows": table.num_rows, **figures}


AGENT, JUDGE, BASE_PLANNER, ATTEMPTS, ORACLE_PLAN = "agent", "judge", "base_planner", "attempts", "oracle_plan"
"""The pairs of models that an evaluation scores: π'_k with ϕ_k, π'_k with the judge, the base planner with ϕ_k, the best of n
sampled plans of π'_k with ϕ_k, and reference plans with ϕ_k. The agent by another way to infer is called `by_NAME`."""


_BOARD = "board-"
"""Begins the name of the chunks in which ϕ_k is tested alone on a grounding board."""


class Evaluation(Chunked[EvaluationJob]):
    """The agent predicts, and its predictions are scored; so are those of other pairs, and of the grounder alone on boards."""

    def _splits(self, pair: str) -> dict[str, pa.Table]:
        splits = self.job.splits if pair in (AGENT, JUDGE) else self.job.splits[:1]
        return {split: steps_of(self.job.steps, split, self.job.max_steps) for split in splits}

    def _steps(self, pair: str) -> pa.Table:
        if pair.startswith(_BOARD):
            board = self.job.boards[pair.removeprefix(_BOARD)]
            return limited(pa.concat_tables(map(all_steps, board.steps)), board.max_steps)
        return pa.concat_tables(self._splits(pair).values())

    def chunks(self) -> list[Chunk]:
        job = self.job
        others = {BASE_PLANNER: job.base_planner, ATTEMPTS: job.attempts, ORACLE_PLAN: job.oracle_plans}
        pairs = [
            AGENT,
            *(pair for pair, wanted in others.items() if wanted),
            *(BY + name for name in job.inference),
            *(_BOARD + name for name in job.boards),
        ]
        chunks = [Chunk(pair, start) for pair in pairs for start in starts(self._steps(pair).num_rows)]
        if not job.third_party:
            return chunks
        return [*chunks, *(Chunk(THIRD_PARTY, start) for start in starts(self._probed().num_rows))]

    def _probed(self) -> pa.Table:
        """The steps on which third-party content is drawn."""
        from coepg_dagster.pools.threats import chosen

        job = self.job
        return chosen(steps_of(job.steps, job.splits[1], job.max_steps), job.third_party or 0)

    @contextmanager
    def _open_probe(self, device: str) -> Iterator[Callable[[int], pa.Table]]:
        from coepg_dagster.inference.agents import Grounder, Planner
        from coepg_dagster.inference.screens import Screens
        from coepg_dagster.pools.threats import probe_content

        job, steps, models = self.job, self._probed(), self.job.models
        assert job.grounder is not None
        with (
            self.engine(Member(model=job.planner), device, share=2) as pi,
            self.engine(Member(model=job.grounder), device, share=2) as phi,
        ):

            def planner(table: pa.Table) -> Planner:
                return Planner(pi, Screens(table, pi.resize), models.prompts)

            def grounder(table: pa.Table) -> Grounder:
                screens = Screens(table, phi.resize)
                return Grounder(phi, screens, models.prompts, models.coordinates, job.max_point_tokens)

            yield lambda start: probe_content(planner, grounder, steps.slice(start, CHUNK), job.max_plan_tokens)

    @contextmanager
    def open(self, member: str, device: str) -> Iterator[Callable[[int], pa.Table]]:
        from coepg_dagster.inference.asking import AskedPair, predict_by
        from coepg_dagster.inference.engine import Sampling
        from coepg_dagster.inference.predict import predict_end_to_end, predict_samples, predict_with_plans
        from coepg_dagster.inference.scrolling import is_scrolled, predict_scrolling

        if member == THIRD_PARTY:
            with self._open_probe(device) as probe:
                yield probe
            return
        job, steps = self.job, self._steps(member)
        if job.grounder is None:
            with self.engine(Member(model=job.planner), device) as agent:
                yield lambda start: of_pair(
                    AGENT, [predict_end_to_end(agent, steps.slice(start, CHUNK), job.models, job.max_plan_tokens)]
                )
            return
        if member == ORACLE_PLAN or member.startswith(_BOARD):
            plans, tokens = job.oracle_plans or {}, job.max_point_tokens
            if member != ORACLE_PLAN:  # the query of a board takes the place of the plan
                plans = dict(zip(steps["step_id"].to_pylist(), steps["goal"].to_pylist(), strict=True))
            with self.engine(Member(model=job.grounder), device) as grounder:
                yield lambda start: of_pair(
                    member,
                    [predict_with_plans(grounder, plans, steps.slice(start, CHUNK), job.models, tokens)],
                )
            return
        grounder_of = {member: Member(model=job.grounder)}
        if member == AGENT and job.judge:
            grounder_of[JUDGE] = job.judge
        predict = predict_scrolling if is_scrolled(steps) else predict_samples
        planner_of = job.base_planner if member == BASE_PLANNER else job.planner
        assert planner_of is not None
        with ExitStack() as stack:
            planner, *grounders = (
                stack.enter_context(self.engine(model, device, share=1 + len(grounder_of)))
                for model in (Member(model=planner_of), *grounder_of.values())
            )

            def make(start: int) -> pa.Table:
                chunk = steps.slice(start, CHUNK)
                if member.startswith(BY):
                    limits, name = (job.max_plan_tokens, job.max_point_tokens), member.removeprefix(BY)
                    pair = AskedPair(planner, grounders[0], chunk, job.models, limits, job.seed + start)
                    return of_pair(member, [predict_by(name, job.inference[name], pair, chunk)])
                sampling = Sampling(job.max_plan_tokens)
                if member == ATTEMPTS:
                    assert job.attempts is not None
                    sampling = Sampling(
                        job.max_plan_tokens, temperature=1.0, samples=job.attempts, seed=job.seed + start
                    )
                tables = predict(planner, grounders, chunk, job.models, sampling, job.max_point_tokens)
                return pa.concat_tables(map(of_pair, grounder_of, tables))

            yield make

    def finish(self, parts: dict[str, list[pa.Table]]) -> dict[str, Any]:
        from coepg_dagster.evaluation.score import score_attempts
        from coepg_dagster.inference.asking import calibration_of_points, planner_passes
        from coepg_dagster.readers.importing import lost_of

        alone = {name: pa.concat_tables(parts.pop(_BOARD + name)) for name in self.job.boards}
        probed = parts.pop(THIRD_PARTY, None)
        # only predictions on pages that were scrolled have a block
        made = pa.concat_tables((part for of in parts.values() for part in of), promote_options="default")
        scores: dict[str, dict[str, Any]] = {}
        for pair in pc.unique(made["pair"]).to_pylist():
            rows = made.filter(pc.equal(made["pair"], pair))
            attempts = [rows.filter(pc.equal(rows["attempt"], i)) for i in pc.unique(rows["attempt"]).to_pylist()]
            scores[pair], start = {}, 0
            for split, table in self._splits(pair).items():
                answers = [attempt.slice(start, table.num_rows) for attempt in attempts]
                result = score_attempts(self.job.protocol, table, answers, lost=lost_of(self.job.lost, split))
                scores[pair][split] = json.loads(result.to_json())
                if pair == ATTEMPTS:
                    scores[pair][split]["planner_passes"] = planner_passes(table, answers)
                if pair.startswith(BY) and (measured := calibration_of_points(table, answers[0])):
                    scores[pair][split]["calibration"] = measured.to_json()
                start += table.num_rows
        of_agent = pc.equal(made["pair"], AGENT)
        write_table(made.filter(of_agent).drop_columns(["pair", "attempt"]), self.job.out / PREDICTIONS)
        agent = scores.pop(AGENT)
        (self.job.out / SCORES).write_text(json.dumps(agent, indent=1, sort_keys=True))
        figures = agent | ({BOARDS: self._on_boards(alone)} if alone else {})
        if probed:
            figures |= {THIRD_PARTY: self._misled(pa.concat_tables(probed))}
        if not scores:
            return figures
        write_table(made.filter(pc.invert(of_agent)), self.job.out / PAIR_PREDICTIONS)
        return figures | {PAIRS: scores}

    def _misled(self, probed: pa.Table) -> dict[str, Any] | None:
        """Writes the answers on screens with third-party content, and counts them."""
        from coepg_dagster.pools.threats import content_rates

        write_table(probed, self.job.out / CONTENT)
        return content_rates(probed)

    def _on_boards(self, alone: dict[str, pa.Table]) -> dict[str, Any]:
        """Writes the predictions of ϕ_k alone, and scores them."""
        from coepg_dagster.evaluation.labels import BoardLabels
        from coepg_dagster.evaluation.score import score_board
        from coepg_dagster.readers.importing import lost_of

        tables = [made.append_column("board", pa.repeat(name, made.num_rows)) for name, made in alone.items()]
        write_table(pa.concat_tables(tables).drop_columns(["pair", "attempt"]), self.job.out / BOARD_PREDICTIONS)
        scores = {}
        for name, made in alone.items():
            board = self.job.boards[name]
            labels = BoardLabels.read(board.protocol.split("/")[0], board.labels)
            result = score_board(board.protocol, labels, made, lost=lost_of(board.lost, SPLIT))
            scores[name] = json.loads(result.to_json()) | {"source": board.source}
        return scores


def of_pair(pair: str, attempts: Sequence[pa.Table]) -> pa.Table:
    """The predictions of a pair with its name and the number of the attempt in two more columns."""
    return pa.concat_tables(
        table.append_column("pair", pa.repeat(pair, table.num_rows)).append_column(
            "attempt", pa.repeat(pa.scalar(i, pa.int32()), table.num_rows)
        )
        for i, table in enumerate(attempts)
    )


_CHUNKED: Final[dict[type[Job], type[Chunked[Any]]]] = {
    CandidatesJob: Candidates,
    VerdictsJob: Verdicts,
    EvaluationJob: Evaluation,
}


def chunked(job: ChunkedJob) -> Chunked[Any]:
    """The Chunked of a job."""
    return _CHUNKED[type(job)](job)
