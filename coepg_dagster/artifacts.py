"""The files of artifacts: their names, tables of steps, and atomic writing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coepg_dagster.refusal import Refusal
from coepg_dagster.steps import whole_episodes

STEPS, CANDIDATES, VERDICTS, DATASET = "steps.arrow", "candidates.parquet", "verdicts.parquet", "dataset.parquet"
SHUFFLED = "shuffled.parquet"
"""Verdicts on other steps' plans (see pools.controls): `step_id` names the screen, `candidate_id` the plan."""
TRIGGERS = "triggers.parquet"
"""Verifiers' answers on screens with a patch that could be a trigger (see pools.threats), where an experiment asks for them."""
CONTENT = "third_party.parquet"
THIRD_PARTY = "third_party"
"""Figure of an evaluation: how often text on the screen misleads the agent (see pools.threats)."""
DECISIONS, PREDICTIONS, SCORES = "decisions.parquet", "predictions.parquet", "scores.json"
PAIRS = "pairs"
"""Figure of an evaluation: the scores of other pairs of models than the agent (`jobs.EvaluationJob`), by pair and split."""
BY = "by_"
"""What the name of a pair begins with that is the agent by another way to infer: `by_zoom`."""
PAIR_PREDICTIONS = "pair_predictions.parquet"
BOARDS = "boards"
"""Figure of an evaluation: the scores of ϕ_k alone on grounding boards, by name; each with `source`, the version of its files."""
BOARD_PREDICTIONS = "board_predictions.parquet"
FOLD = "fold_{}"
"""Folder, below that of ϕ_k, of the grounder that was trained without one part of the episodes (`steps.fold_of`)."""
ROLLOUTS = "rollouts.parquet"
CURATION = "curation.parquet"
"""What data strategies left out of a training (CURATION_SCHEMA), beside the weights; not part of their data version."""


class NoSteps(Refusal, ValueError):
    """A split without steps, or without an episode within a limit."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields the path of a draft, which replaces `path` in one move once it is written.

    If writing fails, `path` stays as it was and no draft is left. The draft's name has the thread's id, so that two writers
    of the same file do not collide.
    """
    draft = path.with_name(f".{path.name}.{threading.get_native_id()}.partial")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def append_line(path: Path, line: bytes) -> None:
    """Appends a line to a file; it is on the disk before this returns. One process at a time appends to a file."""
    with path.open("ab+") as stream:
        if stream.tell() and (stream.seek(-1, os.SEEK_END), stream.read(1))[1] != b"\n":
            line = b"\n" + line  # somebody edited the file, or a write was cut off
        stream.write(line + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


SEAL: Final = ".crc32c"


def checksum(path: Path) -> str:
    """CRC-32C of a file, as eight hexadecimal digits. It finds damage, not forgery, at the speed of memory."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total = google_crc32c.extend(total, block)
    return f"{total:08x}"


def seal(path: Path) -> None:
    """Writes the checksum of a finished file beside it, for `intact`."""
    with whole(_seal_of(path)) as draft:
        draft.write_text(checksum(path))


def intact(path: Path) -> bool:
    """Whether a file is as it was when it was sealed. One that is not, or was never sealed, must be made again."""
    try:
        return _seal_of(path).read_text() == checksum(path)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _seal_of(path: Path) -> Path:
    return path.with_name(path.name + SEAL)


def write_table(table: pa.Table, path: Path) -> None:
    """Writes Parquet as one chunk, so that equal tables give equal bytes whatever their chunks."""
    with whole(path) as draft:
        pq.write_table(table.combine_chunks(), draft, compression="zstd", store_schema=False, write_page_index=False)


def write_steps(table: pa.Table, path: Path, splits: Sequence[str]) -> None:
    """Writes steps as an Arrow file, split after split, so that each split is read as a slice of mapped memory."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        for split in splits:
            for batch in table.filter(pc.field("split") == split).to_batches(max_chunksize=64):
                writer.write_batch(batch)


def all_steps(path: Path) -> pa.Table:
    """All steps of a file of `write_steps`, memory-mapped: screenshots cost no memory until they are read."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def steps_of(path: Path, split: str, limit: int | None = None, setting: str = "the limit") -> pa.Table:
    """The steps of one split, in file order. Raises NoSteps if there are none, or none within the limit.

    With a `limit`: whole episodes, at most `limit` steps (`whole_episodes`); `setting` is its name in messages.
    """
    table = all_steps(path)
    start = pc.index(table["split"], split).as_py()
    if start < 0:
        raise NoSteps(f"{path} holds no step of split {split!r}")
    return limited(table.slice(start, pc.sum(pc.equal(table["split"], split)).as_py()), limit, setting)


def limited(table: pa.Table, limit: int | None, setting: str = "the limit") -> pa.Table:
    """The steps of one split within a limit, see `steps_of`. Raises NoSteps if every episode is longer."""
    if limit is None or table.num_rows <= limit:
        return table
    chosen = whole_episodes(table, limit)
    if not chosen.num_rows:
        shortest = pc.min(pc.value_counts(table["episode_id"]).field("counts")).as_py()
        raise NoSteps(
            f"no episode of split {table['split'][0].as_py()!r} has at most {limit} steps, the shortest has {shortest}: "
            f"raise {setting}"
        )
    return chosen
