"""A loop of two iterations written by hand: real tables, selection, store and records; models are small files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.numpy import save_file

from coepg_dagster.artifacts import CANDIDATES, DATASET, DECISIONS, STEPS, VERDICTS, write_steps, write_table
from coepg_dagster.auditing.archive import MODELS, Archive
from coepg_dagster.auditing.marks import MARKS, read_marks, vetoes
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.pools.selection import VETOED, select
from coepg_dagster.provenance import Asset, Phi, Record, Ref, inputs_of
from coepg_dagster.store import UNPARTITIONED, Store, digests
from tests.conftest import png, step, step_table
from tests.pools.tables import candidate, candidates, verdict, verdicts

LOOP_NAME = "hand/s1"
BOX = [10.0, 10.0, 20.0, 20.0]
TABLE = step_table(
    step("s", screenshot=png(box=(10, 10, 20, 20)), boxes=[BOX]),
    step("t", screenshot=png((200, 255, 255), (10, 10, 20, 20)), boxes=[BOX]),
    step("u", split="test_seed", screenshot=png((0, 255, 255), (10, 10, 20, 20)), boxes=[BOX]),
)
WRITTEN = {
    0: candidates(
        candidate("s", "open", 0, "one"),
        candidate("s", "open", 1, "one", duplicate_of="s#open#0"),
        candidate("t", "open", 0, "two"),
        candidate("t", "open", 1, None),
    ),
    1: candidates(
        candidate("s", "planner_1", 0, "one more"),
        candidate("s", "planner_1", 1, "way off"),
        candidate("t", "planner_1", 0, "nothing"),
    ),
}
GIVEN = {
    0: verdicts(verdict("s#open#0", "judge", True), verdict("t#open#0", "judge", True)),
    1: verdicts(
        *(verdict(f"s#planner_1#{i}", name, i == 0) for name in ("judge", "grounder_1") for i in range(2)),
        verdict("t#planner_1#0", "judge", False),
        verdict("t#planner_1#0", "grounder_1", None),
    ),
}
CONFIG = Regeneration()


class Hand:
    """The loop in a folder; `make` adds one version of one artifact, made from the newest versions of its inputs."""

    def __init__(self, root: Path, phi: Phi = "grounder") -> None:
        self.root, self.store, self.phi = root, Store(root / "store"), phi
        self.records: list[Record] = []
        self.newest: dict[Ref, Record] = {}
        self.runs = 0
        for name in ("base", "judge"):
            (root / "models" / name).mkdir(parents=True)
            (root / "models" / name / "model.safetensors").write_text(f"weights of {name}")

    @property
    def archive(self) -> Archive:
        return Archive(self.records, self.store.root, self.root)

    def make(
        self, asset: Asset, k: int | None, write: Callable[[Path], list[str]], config: Any = None, figures: Any = None
    ) -> Record:
        ref = Ref(asset, k)
        self.runs += 1
        place = (*(LOOP_NAME.split("/") if k is not None else ["hand"]), asset, UNPARTITIONED if k is None else str(k))
        with self.store.draft(*place) as draft:
            made = self.store.commit(draft, place, write(draft))
        record = Record(
            asset=asset,
            iteration=k,
            data_version=made.version,
            run_id=f"run-{self.runs}",
            folder=str(made.folder.relative_to(self.store.root)),
            inputs=[self.newest[used].as_input() for used in inputs_of(ref, phi=self.phi)],
            code_version="1",
            config=config or {},
            seed=1,
            seconds=1,
            device="cpu",
            figures=figures or {},
            files=dict(made.files),
        )
        self.records.append(record)
        self.newest[ref] = record
        return record

    def model(self, asset: Asset, k: int, weights: str) -> Record:
        """A version of a model with one tensor, which says `weights`."""

        def write(draft: Path) -> list[str]:
            letters = np.frombuffer(weights.ljust(24).encode(), np.uint8).astype(np.float32)
            save_file({"weights": letters}, draft / "model.safetensors")
            return ["model.safetensors"]

        return self.make(asset, k, write)

    def data(self, k: int, written: pa.Table | None = None, given: pa.Table | None = None) -> None:
        """candidate_plans, verdicts and dataset of iteration k."""
        written, given = WRITTEN[k] if written is None else written, GIVEN[k] if given is None else given
        config = CONFIG.model_dump(mode="json")
        self.make("candidate_plans", k, lambda draft: _table(draft, CANDIDATES, written), config)
        self.make("verdicts", k, lambda draft: _table(draft, VERDICTS, given), config)
        self.dataset(k)

    def dataset(self, k: int, config: Regeneration = CONFIG) -> Record:
        import pyarrow.parquet as pq

        def read(asset: Asset, at: int, file: str) -> pa.Table:
            return pq.read_table(self.store.root / self.newest[Ref(asset, at)].folder / file)

        def write(draft: Path) -> list[str]:
            previous = read("dataset", k - 1, DATASET) if k else None
            plans, votes = read("candidate_plans", k, CANDIDATES), read("verdicts", k, VERDICTS)
            rows, decisions = select(TABLE.slice(0, 2), plans, votes, config, k, previous, read_vetoes.covers)
            figures.update(read_vetoes.figures(decisions["decision"].to_pylist().count(VETOED)))
            return _table(draft, DATASET, rows) + _table(draft, DECISIONS, decisions)

        read_vetoes = vetoes(read_marks(self.store.root / LOOP_NAME / MARKS), k)
        figures: dict[str, Any] = {"rows": 2}
        return self.make("dataset", k, write, config.model_dump(mode="json"), figures)

    def whole(self) -> Hand:
        """Everything through D_1."""

        def steps(draft: Path) -> list[str]:
            write_steps(TABLE, draft / STEPS, ["train", "test_seed"])
            return [STEPS]

        def models(draft: Path) -> list[str]:
            def entry(name: str) -> dict[str, Any]:
                place = f"models/{name}"
                return {"checkpoint": place, "version": f"of {name}", "files": digests(self.root / place)}

            named = {"base_planner": "base", "planners/open": "base", "verifiers/judge": "judge"}
            return _text(draft, MODELS, json.dumps({name: entry(model) for name, model in named.items()}))

        self.make("benchmark_steps", None, steps)
        self.make("open_models", None, models, {"prompts": "compact"})
        models_of_loop: list[Asset] = [
            "planner_sft",
            "grounder",
            *([] if self.phi == "grounder" else [self.phi]),
            "planner",
        ]
        for asset in models_of_loop:
            self.model(asset, 0, "base")
        self.data(0)
        for asset in models_of_loop:
            self.model(asset, 1, f"trained {asset}")
        self.data(1)
        return self


def _text(draft: Path, name: str, text: str) -> list[str]:
    (draft / name).write_text(text)
    return [name]


def _table(draft: Path, name: str, table: pa.Table) -> list[str]:
    write_table(table, draft / name)
    return [name]
