"""The two unpartitioned inputs of an experiment: its labelled steps and its open models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.compute as pc
from coepg_dagster.assets.checks import WEIGHTS
from coepg_dagster.assets.stage import Outcome, StageContext

from coepg_dagster.artifacts import STEPS, write_steps
from coepg_dagster.auditing.archive import BASE, MODELS
from coepg_dagster.benchmark import read_benchmark, refuse_steps, wanted_splits
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.schema import Benchmark
from coepg_dagster.experiment.strict import Strict
from coepg_dagster.inference.files import IncompleteCheckpoint
from coepg_dagster.inference.weights import identify, local_folder, pinned
from coepg_dagster.provenance import Asset, NotUsable
from coepg_dagster.store import changes


def benchmark_steps(work: StageContext) -> Outcome:
    """The labelled steps of every split in one table; train, validation and test are disjoint by episode."""
    config: Benchmark = work.loop.experiment.benchmark
    table, counted = read_benchmark(config, work.loop.root, work.loop.imports, work.models.prompts)
    counts = {row["values"]: row["counts"] for row in pc.value_counts(table["split"]).to_pylist()}
    wanted = wanted_splits(config)
    missing = [split for split in wanted if not counts.get(split)]
    if missing:
        left_out = f"; left out were {counted['rejected']}" if counted.get("rejected") else ""
        raise dg.Failure(
            f"{config.path}: no usable step in split {', '.join(missing)} (there are {', '.join(sorted(counts))}{left_out}): "
            "correct the splits under `benchmark`, or the data",
            allow_retries=False,
        )
    if refused := refuse_steps(work.loop.experiment, table):
        raise dg.Failure("; ".join(refused), allow_retries=False)
    write_steps(table, work.draft / STEPS, wanted)
    return Outcome(
        [STEPS],
        {"steps": {split: counts[split] for split in wanted}, **counted},
        config=config.model_dump(mode="json"),
    )


def open_models(work: StageContext) -> Outcome:
    """The base pair and the open members of both pools, each checked to be complete, with its weights' hash or its commit."""
    models = work.models
    entries = identities(work.loop.root, models)
    (work.draft / MODELS).write_text(json.dumps(entries, indent=1, sort_keys=True))
    return Outcome(
        [MODELS],
        {"models": len(entries)},
        config=models.model_dump(mode="json"),
        metadata={"open models": _models_table(entries)},
    )


def _models_table(entries: dict[str, dict[str, Any]]) -> dg.TableMetadataValue:
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
                            "hash of the weights"
                            if "files" in model
                            else "name at the endpoint, hash of the endpoint's description"
                            if "server" in model
                            else "hub revision",
                        ),
                        strict=True,
                    )
                )
            )
            for name, model in entries.items()
        ],
        dg.TableSchema([dg.TableColumn(name) for name in columns]),
    )


def identities(root: Path, models: Models) -> dict[str, dict[str, Any]]:
    """Name → `identity` of each model. Raises dg.Failure that lists what is wrong with all of them."""
    entries: dict[str, dict[str, Any]] = {}
    wrong: dict[str, list[str]] = {}
    known: dict[str, dict[str, Any]] = {}  # a checkpoint of many gigabytes that has two roles is read once
    for name, member in models.named().items():
        key = member.model_dump_json()
        try:
            if key not in known:
                known[key] = identity(root, member)
            entries[name] = known[key]
        except IncompleteCheckpoint as error:
            wrong.setdefault(str(error), []).append(name)
    if wrong:
        raise dg.Failure(
            "\n".join(f"models: {', '.join(names)}: {why}" for why, names in wrong.items()), allow_retries=False
        )
    return entries


def identity(root: Path, member: Member) -> dict[str, Any]:
    """Checkpoint and version of a member: of its weights, or, where these are remote, of its endpoint's description.

    Raises IncompleteCheckpoint if files are missing or damaged.
    """
    if member.engine == "openai":
        server, version = _served(member)
        entry = {"checkpoint": member.model, "version": version, "server": server}
        processor = identify(root, member.checkpoint, weights=False)
        return entry | {"engine": member.engine, "processor": pinned(processor)}
    entry = identify(root, member.model)
    return entry if member.engine is None else entry | {"engine": member.engine}


def _served(member: Member) -> tuple[dict[str, Any], str]:
    """What a member's endpoint reports of its model, and the version of that. Raises EngineRefused where it cannot be reached."""
    from coepg_dagster.inference.endpoint import endpoint_of, served_model, served_version  # here: it takes httpx

    server = served_model(endpoint_of(member))
    return server, served_version(server)


def as_recorded(root: Path, member: Member, entry: dict[str, Any]) -> Member:
    """A member as jobs load it: pinned to the commit in `entry`, its entry of `open_models`.

    Raises NotUsable where its files or its server are other ones now, EngineRefused where the server cannot be reached.
    """
    if member.engine == "openai":
        _, now = _served(member)
        if now != entry["version"]:
            raise NotUsable(
                f"{member.base_url} serves {now}, open_models recorded {entry['version']}: serve that again, or materialize "
                "open_models again to go on with the other"
            )
        return member.model_copy(update={"processor": entry.get("processor", member.processor)})
    return member.model_copy(update={"model": recorded(root, entry)})


def recorded(root: Path, entry: dict[str, Any]) -> str:
    """The checkpoint to load for an entry of `open_models`. Raises NotUsable if its files are not those that were recorded."""
    name = entry["checkpoint"]
    if wrong := changes(entry.get("files", {}), root / name, name, added=False):
        raise NotUsable(
            f"open_models: {'; '.join(wrong)}: restore it, or materialize open_models again to go on with it as it is"
        )
    return pinned(entry)


def register_base(work: StageContext, model: str) -> Outcome:
    """Iteration 0: the artifact is the base model as it is (M_0)."""
    entry = json.loads((work.folder("open_models") / MODELS).read_text())[model]
    return _base(work, entry)


def copy_base(work: StageContext, folder: Path) -> Outcome:
    """An artifact that refers to the same base model as the one in `folder`."""
    return _base(work, json.loads((folder / BASE).read_text()))


def same_model(work: StageContext, asset: Asset, config: Strict) -> Outcome:
    """An artifact that refers to the model of the input `asset`: nothing is trained or copied."""
    record = work.record(asset)
    folder = work.store.root / record.folder
    checkpoint = str(folder.relative_to(work.loop.root) if folder.is_relative_to(work.loop.root) else folder)
    outcome = _base(work, {"checkpoint": checkpoint, "version": record.data_version})
    outcome.config = config.model_dump(mode="json")
    return outcome


def _base(work: StageContext, entry: dict[str, str]) -> Outcome:
    checkpoint, why = pinned(entry), None
    (work.draft / BASE).write_text(json.dumps(entry, sort_keys=True))
    try:
        local_folder(checkpoint, root=work.loop.root)
    except IncompleteCheckpoint as error:
        why = str(error)
    return Outcome([BASE], {}, {WEIGHTS: why}, config={"checkpoint": checkpoint}, metadata={"checkpoint": checkpoint})


def checkpoint_of(root: Path, folder: Path) -> str:
    """The checkpoint to load for a model artifact: its folder, or the model that it refers to. Raises NotUsable."""
    base = folder / BASE
    return recorded(root, json.loads(base.read_text())) if base.exists() else str(folder)
