"""`evolution_report`: the figures of all iterations so far."""

import json
import time

import dagster as dg
from coepg_dagster.assets.about import about, page_link
from coepg_dagster.assets.ledger import RECORD, REPORTED, Loop, tag_run
from coepg_dagster.assets.recovery import keep_record
from coepg_dagster.assets.stage import failing_plainly
from coepg_dagster.resources.store import StoreResource

from coepg_dagster.experiment.versions import code_version
from coepg_dagster.provenance import Record, Ref
from coepg_dagster.reports.evolution import Evolution, ShownLoop, write_report
from coepg_dagster.reports.site import case_study_of
from coepg_dagster.results import results
from coepg_dagster.store import UNPARTITIONED

REPORT = "report.html"


def evolution_report(loop: Loop) -> dg.AssetsDefinition:
    """The report asset of one experiment and seed, over all iterations made so far."""
    page = about(loop, "evolution_report")

    @dg.asset(
        key=loop.key("evolution_report"),
        deps=[loop.key("evaluation"), loop.key("data_quality")],
        code_version=code_version(loop.experiment, "evolution_report"),
        group_name=page.group,
        description=page.description,
        kinds=page.kinds,
        owners=page.owners,
        tags=page.tags,
        metadata=page.metadata,
    )
    def report(context: dg.AssetExecutionContext, store: StoreResource) -> dg.MaterializeResult:  # type: ignore[type-arg]
        with failing_plainly():
            return _made(context, loop, store)

    return report


def _made(context: dg.AssetExecutionContext, loop: Loop, store: StoreResource) -> dg.MaterializeResult[None]:
    started = time.monotonic()
    tag_run(context)
    artifacts = store.store(loop.root)
    records = loop.records(context.instance, artifacts.root)
    read = [record for ref, record in records.items() if ref.asset in REPORTED]
    if not read:
        raise dg.Failure("there is no evaluation yet: materialize iteration 0 first", allow_retries=False)
    table = results(loop.experiment, loop.seed, records, loop.stale(records))
    with artifacts.draft(loop.experiment.name, f"s{loop.seed}", "evolution_report") as draft:
        # only this loop's results, so that the version depends on its inputs alone, and on the minutes that they took
        cases = case_study_of(artifacts.root, loop.experiment, records)
        evolution = Evolution(loop.experiment, loop.seed, table, [ShownLoop(loop.experiment, records)], cases=cases)
        preview = write_report(evolution, draft / REPORT)
        (draft / "results.json").write_text(json.dumps(table, indent=1, sort_keys=True))
        place = (loop.experiment.name, f"s{loop.seed}", "evolution_report", UNPARTITIONED)
        artifact = artifacts.commit(draft, place, ["results.json", REPORT])
    record = Record(
        asset="evolution_report",
        iteration=None,
        data_version=artifact.version,
        run_id=context.run.run_id,
        folder=str(artifact.folder.relative_to(artifacts.root)),
        inputs=[used.as_input() for used in read],
        code_version=code_version(loop.experiment, "evolution_report"),
        config={},
        seed=loop.seed,
        seconds=round(time.monotonic() - started, 3),
        device="cpu",
        figures={"iterations": len({ref.iteration for ref in records if ref.iteration is not None})},
        files=dict(artifact.files),
        sizes=artifact.sizes,
    )
    keep_record(artifacts.root, loop.key("evolution_report"), record)
    return dg.MaterializeResult(
        data_version=dg.DataVersion(artifact.version),
        metadata={
            **page_link(loop, Ref("evolution_report")),
            "figures": dg.MetadataValue.md(preview),
            "file": f"{record.folder}/{REPORT}",  # below the store, which may be moved
            RECORD: dg.MetadataValue.json(record.model_dump(mode="json")),
        },
    )
