"""The two unpartitioned inputs of an experiment: its labelled steps and its open models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
from coepg_dagster.assets.making import Making, Outcome
from safetensors import SafetensorError, safe_open

from coepg_dagster.auditing.archive import BASE, MODELS
from coepg_dagster.experiment import Benchmark, Strict, fingerprint
from coepg_dagster.provenance import Asset
from coepg_dagster.readers.importing import Options, load_benchmark
from coepg_dagster.readers.miniwob import load_snapshot
from coepg_dagster.store import digests
from coepg_dagster.workers import STEPS, write_steps

WEIGHTS = "weights_are_whole"
"""Blocking check on every model artifact."""


def benchmark_steps(work: Making) -> Outcome:
    """Every split's labelled steps in one table, train, validation and test disjoint by episode."""
    config: Benchmark = work.loop.experiment.benchmark
    table, counted = read_benchmark(config, work.loop.root, work.store.root / ".imports")
    counts = {row["values"]: row["counts"] for row in pc.value_counts(table["split"]).to_pylist()}
    wanted = [config.train, config.validation, *config.test]
    missing = [split for split in wanted if not counts.get(split)]
    why = f"no steps in split {', '.join(missing)} (there are: {', '.join(sorted(counts))})" if missing else None
    write_steps(table, work.draft / STEPS, [split for split in wanted if split not in missing])
    return Outcome(
        [STEPS],
        {"steps": {split: counts.get(split, 0) for split in wanted}, **counted},
        {"splits_are_there": why},
        config=config.model_dump(mode="json"),
    )


def read_benchmark(config: Benchmark, root: Path, imports: Path) -> tuple[pa.Table, dict[str, Any]]:
    """The steps of a benchmark, and what its import left out or noticed; imported files are kept under `imports`."""
    if config.reader == "miniwob":
        return load_snapshot(root / config.path), {}
    out = imports / fingerprint([config.reader, str(config.path), config.view, config.level])
    options = Options(view=config.view, level=config.level)
    table, counts = load_benchmark(config.reader, root / config.path, out, options)
    return table, {"rejected": dict(sorted(counts.rejected.items())), "noticed": dict(sorted(counts.noticed.items()))}


def open_models(work: Making) -> Outcome:
    """The base pair and the open members of both pools, each with the hash of its weights."""
    models = work.models
    named = {"base_planner": models.base_planner, "base_grounder": models.base_grounder}
    named |= {f"planners/{name}": path for name, path in models.planners.items()}
    named |= {f"verifiers/{name}": path for name, path in models.verifiers.items()}
    root = work.loop.root
    found: dict[str, dict[str, Any]] = {}
    for name, path in named.items():
        found[name] = {"checkpoint": path, "version": weights_version(root, path)}
        if (root / path).is_dir():  # of a hub model the commit says it all
            found[name]["files"] = digests(root / path)
    (work.draft / MODELS).write_text(json.dumps(found, indent=1, sort_keys=True))
    return Outcome(
        [MODELS],
        {"models": len(found)},
        config=models.model_dump(mode="json"),
        metadata={"open models": _models_table(found)},
    )


def _models_table(found: dict[str, dict[str, Any]]) -> dg.TableMetadataValue:
    columns = ("model", "checkpoint", "version", "version is the")
    return dg.MetadataValue.table(
        [
            dg.TableRecord(
                dict(
                    zip(
                        columns,
                        (
                            name,
                            model["checkpoint"],
                            model["version"],
                            "hash of the weights" if "files" in model else "hub revision",
                        ),
                        strict=True,
                    )
                )
            )
            for name, model in found.items()
        ],
        dg.TableSchema([dg.TableColumn(name) for name in columns]),
    )


def is_local(root: Path, checkpoint: str) -> bool:
    """Whether a checkpoint is a folder below `root`, there or not, and no name on the hub."""
    return checkpoint.startswith((".", "/")) or checkpoint.count("/") != 1 or (root / checkpoint).parent.is_dir()


def weights_version(root: Path, checkpoint: str) -> str:
    """A hash of the weights of a local folder below `root`; of a hub model, its commit. Raises FileNotFoundError."""
    folder = root / checkpoint
    if not folder.is_dir():
        if is_local(root, checkpoint):
            raise FileNotFoundError(
                f"there is no checkpoint folder {checkpoint}: make it, or correct `models` in the file"
            )
        from huggingface_hub import HfApi

        return str(HfApi().model_info(checkpoint).sha)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors: other weight formats are refused; convert it first")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def register_base(work: Making, model: str) -> Outcome:
    """Iteration 0: the artifact is the base model as it is (M_0)."""
    entry = json.loads((work.folder("open_models") / MODELS).read_text())[model]
    return _base(work, entry)


def copy_base(work: Making, folder: Path) -> Outcome:
    """An artifact that is the same base model as the one in `folder`."""
    return _base(work, json.loads((folder / BASE).read_text()))


def same_model(work: Making, asset: Asset, config: Strict) -> Outcome:
    """An artifact that is the model of the input `asset` as it is: nothing is trained, nothing is copied."""
    record = work.record(asset)
    folder = work.store.root / record.folder
    checkpoint = str(folder.relative_to(work.loop.root) if folder.is_relative_to(work.loop.root) else folder)
    outcome = _base(work, {"checkpoint": checkpoint, "version": record.data_version})
    outcome.config = config.model_dump(mode="json")
    return outcome


def _base(work: Making, entry: dict[str, str]) -> Outcome:
    checkpoint = entry["checkpoint"]
    (work.draft / BASE).write_text(json.dumps(entry, sort_keys=True))
    why = None
    for file in sorted((work.loop.root / checkpoint).glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as tensors:  # checks the header against the file's size
                why = None if tensors.keys() else f"{file} holds no tensors"
        except SafetensorError as error:
            why = f"{file}: {error}"
    return Outcome([BASE], {}, {WEIGHTS: why}, config={"checkpoint": checkpoint}, metadata={"checkpoint": checkpoint})


def checkpoint_of(folder: Path) -> str:
    """What to load for a model artifact: its own folder, or the base model that it stands for."""
    base = folder / BASE
    checkpoint: str = json.loads(base.read_text())["checkpoint"] if base.exists() else str(folder)
    return checkpoint
