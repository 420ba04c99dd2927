"""The partitioned assets of the loop, for one experiment and seed: what each is made from, and by which job.

Keys have the prefix EXPERIMENT/sSEED. An asset that the next iteration reads is read there through its twin under
previous/, since Dagster refuses the cycle D_k → π_{k+1} → D_{k+1} even though it is acyclic over partitions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
from coepg_dagster.assets.checks import WEIGHTS
from coepg_dagster.assets.ledger import with_hints
from coepg_dagster.assets.shared import (
    as_recorded,
    benchmark_steps,
    checkpoint_of,
    copy_base,
    open_models,
    recorded,
    register_base,
    same_model,
)
from coepg_dagster.assets.stage import Outcome, StageContext, StageFunction, chosen

from coepg_dagster.artifacts import (
    BOARD_PREDICTIONS,
    BOARDS,
    CANDIDATES,
    CONTENT,
    DATASET,
    DECISIONS,
    FOLD,
    PAIR_PREDICTIONS,
    PAIRS,
    PREDICTIONS,
    SCORES,
    SHUFFLED,
    STEPS,
    THIRD_PARTY,
    TRIGGERS,
    VERDICTS,
    all_steps,
    steps_of,
    write_table,
)
from coepg_dagster.auditing.archive import MODELS, selected_by
from coepg_dagster.auditing.marks import read_marks, vetoes
from coepg_dagster.benchmark import read_board, reference_plans, refuse_prompts
from coepg_dagster.experiment.models import Member
from coepg_dagster.experiment.strict import ExperimentError, Strict
from coepg_dagster.experiment.training import GrounderRl, Grpo, Sft
from coepg_dagster.inference.weights import deciding_files
from coepg_dagster.jobs import CandidatesJob, EndToEndJob, EvaluationJob, GrounderRlJob, GrpoJob, SftJob, VerdictsJob
from coepg_dagster.pools.candidates import pool_members
from coepg_dagster.pools.controls import dataset_checks
from coepg_dagster.pools.quality import Regenerated
from coepg_dagster.pools.quality import data_quality as measure_quality
from coepg_dagster.pools.selection import VETOED, select
from coepg_dagster.pools.threats import trigger_rates
from coepg_dagster.provenance import Asset, NotUsable, Record, Ref, continued
from coepg_dagster.training.cards import Trained, write_card

QUALITY = "quality.json"


def planner_sft(work: StageContext) -> Outcome:
    """π_k: the planner after supervised fine-tuning on D_{k-1} (Eq. 1). Iteration 0: the base planner."""
    return _sft(work, "planner_sft")


def grounder(work: StageContext) -> Outcome:
    """ϕ_k: the grounder after supervised fine-tuning on D_{k-1} (Eq. 2). Iteration 0: the base grounder."""
    return _sft(work, "grounder")


def _sft(work: StageContext, asset: Literal["planner_sft", "grounder"]) -> Outcome:
    experiment, role = work.loop.experiment, "planner" if asset == "planner_sft" else "grounder"
    if work.k == 0:
        return register_base(work, f"base_{role}")
    data, steps = work.inputs[Ref("dataset", work.k - 1)], work.record("benchmark_steps")
    of = steps.figures["steps"][experiment.benchmark.train]
    if why := refuse_prompts(experiment, f"D_{work.k - 1}", data.figures["covered_steps"], of):
        raise ExperimentError("; ".join(why))  # GRPO would fail after this
    checkpoint, base = _start(work, asset, f"base_{role}")
    config = work.process.resolve(experiment.sft)
    checkers = _checkers(work, config)
    result = work.run_job(
        SftJob,
        role=role,
        init=checkpoint,
        dataset=_previous_dataset(work),
        steps=work.folder("benchmark_steps") / STEPS,
        train_split=experiment.benchmark.train,
        validation_split=experiment.benchmark.validation,
        max_plan_tokens=experiment.regeneration.max_plan_tokens,
        max_point_tokens=experiment.regeneration.max_point_tokens,
        config=config,
        checkers=checkers,
    )
    return _trained(work, result, config, base)


def _checkers(
    work: StageContext, config: Sft | GrounderRl, reader: Literal["grounder"] | None = None
) -> dict[str, Member]:
    """The open verifiers that data strategies for rows ask, pinned to the versions of this step's input, or of `reader`'s."""
    names = sorted({settings["by"] for settings in config.curation.values() if "by" in settings})
    if not names:
        return {}
    open_models = work.read_by(reader, "open_models") if reader else work.folder("open_models")
    return _recorded(work, chosen(work.models.verifiers, names), "verifiers", _models(open_models))


def _start(work: StageContext, asset: Asset, base: str) -> tuple[str, Source]:
    """The checkpoint that training of `asset` starts from, and its name for the card.

    It is the model `base` of the open ones, or with `init: previous`, from iteration 2 on, the model of k - 1.
    """
    previous = work.inputs.get(Ref(continued(asset, work.loop.experiment.phi), work.k - 1))
    if previous is not None:
        return checkpoint_of(work.loop.root, work.store.root / previous.folder), _artifact("base", previous)
    entry = _models(work.folder("open_models"))[base]
    return recorded(work.loop.root, entry), _model("base", entry)


def grounder_rl(work: StageContext) -> Outcome:
    """ϕ_k after GRPO on the plans of D_{k-1} too, rewarded by the place of its own answer. Iteration 0: ϕ_0."""
    experiment = work.loop.experiment
    if work.k == 0:
        return copy_base(work, work.folder("grounder"))
    config = experiment.grounder_rl
    result = work.run_job(
        GrounderRlJob,
        init=checkpoint_of(work.loop.root, work.folder("grounder")),
        dataset=_previous_dataset(work),
        steps=work.read_by("grounder", "benchmark_steps") / STEPS,
        train_split=experiment.benchmark.train,
        validation_split=experiment.benchmark.validation,
        target=experiment.sft.target,
        config=config,
        checkers=_checkers(work, config, reader="grounder"),
    )
    return _trained(work, result, config, _artifact("base", work.record("grounder")))


def planner(work: StageContext) -> Outcome:
    """π'_k: the planner after GRPO with the C-DREM reward of ϕ_k and the open verifiers (Eq. 3 to 10). Iteration 0: π_0.

    Without GRPO (`grpo.enabled: false`) it is π_k as it is.
    """
    experiment = work.loop.experiment
    if work.k == 0:
        return copy_base(work, work.folder("planner_sft"))
    config = work.process.resolve(experiment.grpo)
    if not config.enabled:
        return same_model(work, "planner_sft", config)
    models = _models(work.read_by("planner_sft", "open_models"))
    verifiers = _recorded(work, chosen(work.models.verifiers, work.process.verifiers), "verifiers", models)
    result = work.run_job(
        GrpoJob,
        init=checkpoint_of(work.loop.root, work.folder("planner_sft")),
        grounder=(f"grounder_{work.k}", checkpoint_of(work.loop.root, work.folder(experiment.phi))),
        verifiers=verifiers,
        dataset=_previous_dataset(work),
        steps=work.read_by("planner_sft", "benchmark_steps") / STEPS,
        train_split=experiment.benchmark.train,
        validation_split=experiment.benchmark.validation,
        max_point_tokens=experiment.regeneration.max_point_tokens,
        config=config,
    )
    graders = [_artifact("rewarded by", work.record(experiment.phi))]
    graders += [_model("rewarded by", models[f"verifiers/{name}"]) for name in verifiers if config.ensemble]
    return _trained(work, result, config, _artifact("base", work.record("planner_sft")), *graders)


def end_to_end(work: StageContext) -> Outcome:
    """The end-to-end agent of Table 3, from the steps and labels of D_{k-1}. Iteration 0: its base.

    Its base is the base planner, which knows tasks and learns to point. On the sandbox's validation split this does better
    than to start from the base grounder, which knows positions (Step SR 56.7 against 47.0 after SFT on one D_1).
    """
    experiment = work.loop.experiment
    if work.k == 0:
        return register_base(work, "base_planner")
    grpo = work.process.resolve(experiment.grpo)
    checkpoint, base = _start(work, "end_to_end", "base_planner")
    result = work.run_job(
        EndToEndJob,
        init=checkpoint,
        dataset=_previous_dataset(work),
        steps=work.folder("benchmark_steps") / STEPS,
        train_split=experiment.benchmark.train,
        validation_split=experiment.benchmark.validation,
        sft=experiment.sft,
        grpo=grpo,
        checkers=_checkers(work, experiment.sft),
    )
    return _trained(work, result, grpo, base)


def candidate_plans(work: StageContext) -> Outcome:
    """Plans for every training step by every member of Π: the open planners, π'_k and π'_{k-1}."""
    experiment = work.loop.experiment
    config = work.process.resolve(experiment.regeneration)
    open_planners = _recorded(work, work.models.planners, "planners", _models(work.folder("open_models")))
    result = work.run_job(
        CandidatesJob,
        members=pool_members(open_planners, _trained_members(work, "planner")),
        steps=work.folder("benchmark_steps") / STEPS,
        train_split=experiment.benchmark.train,
        max_steps=experiment.benchmark.max_train_steps,
        config=config,
    )
    return _outcome([CANDIDATES], result, config)


def verdicts(work: StageContext) -> Outcome:
    """The point of every member of Φ (the open verifiers, ϕ_k, ϕ_{k-1}) for every candidate, with its confidence (Eq. 3, 6)."""
    experiment = work.loop.experiment
    config = work.process.resolve(experiment.regeneration)
    asked = chosen(work.models.verifiers, work.process.verifiers)
    open_verifiers = _recorded(work, asked, "verifiers", _models(work.folder("open_models")))
    trained = _trained_members(work, experiment.phi)
    rows_of_folds = {name: _fold_rows(work, int(name.rpartition("_")[2])) for name in trained}
    folds = {name: len(rows) for name, rows in rows_of_folds.items() if rows}
    result = work.run_job(
        VerdictsJob,
        members=pool_members(open_verifiers, trained),
        candidates=work.folder("candidate_plans") / CANDIDATES,
        steps=work.folder("benchmark_steps") / STEPS,
        train_split=experiment.benchmark.train,
        config=config,
        shuffled_plans=experiment.quality.shuffled_plans,
        folds=folds,
        **({"trigger_steps": trigger} if (trigger := experiment.quality.trigger_steps) else {}),
    )
    return _outcome([VERDICTS, SHUFFLED, *([TRIGGERS] if trigger else [])], result, config)


def _fold_rows(work: StageContext, k: int) -> list[int]:
    """The rows that the grounder of each fold of ϕ_k was trained on; empty without folds."""
    rows: list[int] = work.inputs[Ref(work.loop.experiment.phi, k)].figures.get("fold_rows", [])
    return rows


def dataset(work: StageContext) -> Outcome:
    """D_k: the verified plans (o, h, p, a) with the label's action, and why each other candidate was dropped."""
    experiment = work.loop.experiment
    vetoed = vetoes(read_marks(work.loop.marks(work.store.root)), work.k)
    config = work.process.resolve(experiment.regeneration)
    steps_file = work.read_by("verdicts", "benchmark_steps") / STEPS
    steps = steps_of(steps_file, experiment.benchmark.train, experiment.benchmark.max_train_steps)
    rows, decisions = select(
        steps,
        pq.read_table(work.read_by("verdicts", "candidate_plans") / CANDIDATES),
        pq.read_table(work.folder("verdicts") / VERDICTS),
        config,
        work.k,
        pq.read_table(_previous_dataset(work)) if work.k > 0 else None,
        vetoed.covers,
    )
    write_table(rows, work.draft / DATASET)
    write_table(decisions, work.draft / DECISIONS)
    covered = len(set(rows["step_id"].to_pylist()))
    return Outcome(
        [DATASET, DECISIONS],
        {"rows": rows.num_rows, "covered_steps": covered, "of_steps": steps.num_rows}
        | vetoed.figures(decisions["decision"].to_pylist().count(VETOED)),
        dataset_checks(rows, all_steps(steps_file), experiment.benchmark.train, experiment.quality),
        config=config.model_dump(mode="json"),
    )


def data_quality(work: StageContext) -> Outcome:
    """Purity, diversity and coverage of D_k (Fig. 6), agreement of its verifiers, controls, and its drift since D_{k-1}."""
    experiment = work.loop.experiment
    config = experiment.regeneration
    verdict_record = work.record("verdicts")
    previous = work.previous_folder("dataset")
    made = Regenerated(
        steps_of(
            work.read_by("verdicts", "benchmark_steps") / STEPS,
            experiment.benchmark.train,
            experiment.benchmark.max_train_steps,
        ),
        pq.read_table(work.read_by("verdicts", "candidate_plans") / CANDIDATES),
        pq.read_table(work.folder("verdicts") / VERDICTS),
        pq.read_table(work.folder("dataset") / DATASET),
        selected_by(work.record("dataset")),  # its rule, which verdicts do not depend on
        frozenset(experiment.models.verifiers),
    )
    figures = measure_quality(
        made,
        pq.read_table(work.folder("verdicts") / SHUFFLED),
        pq.read_table(work.folder("dataset") / DECISIONS),
        pq.read_table(previous / DATASET) if previous else None,
        experiment.quality,
        [tuple(size) for name, size in verdict_record.figures.items() if name.startswith("resize_")],
    )
    if (probed := work.folder("verdicts") / TRIGGERS).exists():
        figures["trigger"] = trigger_rates(pq.read_table(probed))
    (work.draft / QUALITY).write_text(json.dumps(figures, indent=1, sort_keys=True))
    return Outcome([QUALITY], figures, config=config.model_dump(mode="json"))


def evaluation(work: StageContext) -> Outcome:
    """The agent M_k = {π'_k, ϕ_k} on validation and on every test split, greedy, under the experiment's protocol.

    Where the experiment names grounding boards, ϕ_k alone on each of them too, under the board's own protocol.
    """
    experiment = work.loop.experiment
    benchmark = experiment.benchmark
    decoupled = experiment.agent == "decoupled"
    config = work.process.resolve(experiment.regeneration)
    pairs: dict[str, Any] = {}
    if decoupled:
        models, judge = _models(work.folder("open_models")), work.models.judge
        pairs["attempts"] = experiment.evaluation.attempts
        pairs["judge"] = judge and as_recorded(work.loop.root, judge, models["judge"])
        if experiment.evaluation.base_planner and work.k > 0:  # at 0 it is the agent's
            pairs["base_planner"] = recorded(work.loop.root, models["base_planner"])
        pairs["inference"] = experiment.evaluation.inference
        if experiment.oracle_plan:
            pairs["oracle_plans"] = _reference_plans(work)
        boards = experiment.evaluation.boards
        pairs["boards"] = {name: read_board(board, work.loop.root, work.loop.imports) for name, board in boards.items()}
        if experiment.evaluation.third_party:
            pairs["third_party"] = experiment.evaluation.third_party
    result = work.run_job(
        EvaluationJob,
        **pairs,
        planner=checkpoint_of(work.loop.root, work.folder("planner" if decoupled else "end_to_end")),
        grounder=checkpoint_of(work.loop.root, work.folder(experiment.phi)) if decoupled else None,
        steps=work.folder("benchmark_steps") / STEPS,
        splits=[benchmark.validation, *benchmark.test],
        max_steps=benchmark.max_eval_steps,
        protocol=benchmark.protocol,
        max_plan_tokens=config.max_plan_tokens,
        max_point_tokens=config.max_point_tokens,
        lost=work.record("benchmark_steps").figures.get("lost", {}),
    )
    figures = result["figures"]
    content = [PREDICTIONS, SCORES]
    more = ((PAIRS, PAIR_PREDICTIONS), (BOARDS, BOARD_PREDICTIONS), (THIRD_PARTY, CONTENT))
    content += [file for key, file in more if key in figures]
    return _outcome(content, result, benchmark)


def _reference_plans(work: StageContext) -> dict[str, str]:
    """The reference plans of the validation steps. The sandbox has them in its snapshot, which must not have changed."""
    benchmark, record = work.loop.experiment.benchmark, work.record("benchmark_steps")
    if benchmark.reader == "miniwob" and work.loop.source_changed(record):
        why = f"{benchmark.path} has changed since benchmark_steps was made: materialize benchmark_steps again"
        raise NotUsable(with_hints(why, work.loop.where_taken("benchmark_steps", work.k)))
    steps = steps_of(work.folder("benchmark_steps") / STEPS, benchmark.validation, benchmark.max_eval_steps)
    return reference_plans(benchmark, work.loop.root, steps)


MAKERS: dict[Asset, StageFunction] = {
    "benchmark_steps": benchmark_steps,
    "open_models": open_models,
    "planner_sft": planner_sft,
    "grounder": grounder,
    "grounder_rl": grounder_rl,
    "planner": planner,
    "end_to_end": end_to_end,
    "candidate_plans": candidate_plans,
    "verdicts": verdicts,
    "dataset": dataset,
    "data_quality": data_quality,
    "evaluation": evaluation,
}


def _previous_dataset(work: StageContext) -> Path:
    folder = work.previous_folder("dataset")
    assert folder is not None  # inputs_of() names it from iteration 1 on
    return folder / DATASET


def _trained_members(work: StageContext, asset: Asset) -> dict[str, Member]:
    """The trained members of a pool, newest first: of k, and of k - 1 from iteration 2 on."""
    if work.k == 0:
        return {}
    name = "grounder" if asset == "grounder_rl" else asset  # it is ϕ_k for everybody else
    members = {f"{name}_{work.k}": Member(model=checkpoint_of(work.loop.root, work.folder(asset)))}
    before = work.previous_folder(asset)
    if before is not None and work.loop.experiment.regeneration.trained_members > 1:
        members[f"{name}_{work.k - 1}"] = Member(model=checkpoint_of(work.loop.root, before))
    return members


def _recorded(work: StageContext, members: dict[str, Member], pool: str, models: dict[str, Any]) -> dict[str, Member]:
    """The members of a pool, pinned to the versions in `models`, the list of an `open_models` artifact."""
    return {name: as_recorded(work.loop.root, member, models[f"{pool}/{name}"]) for name, member in members.items()}


def _trained(work: StageContext, result: dict[str, Any], config: Strict, base: Source, *others: Source) -> Outcome:
    """A model that was trained from `base` on D_{k-1}, and its card."""
    experiment = work.loop.experiment
    data = work.inputs[Ref("dataset", work.k - 1)]
    rows = f"data, {data.figures['rows']:,} rows of {data.figures['covered_steps']:,} steps"
    if isinstance(config, Grpo) and config.prompts == "unseen":
        rows += ", none of them a prompt of GRPO"
    trained = Trained(
        loop=f"{experiment.name}/s{work.loop.seed}",
        ref=work.ref,
        base=base[1],
        made_from=[base, _artifact(rows, data), *others],
        benchmark=experiment.benchmark,
        models=experiment.models,
        settings=config.model_dump(mode="json"),
        figures=result["figures"],
        seed=work.loop.seed,
        device=result["device"],
        seconds=result["seconds"],
    )
    write_card(work.draft, trained, work.loop.root)
    folds = [FOLD.format(i) for i in range(len(result["figures"].get("fold_rows", ())))]
    content = deciding_files(work.draft)
    content += [f"{fold}/{file}" for fold in folds for file in deciding_files(work.draft / fold)]
    return _outcome(content, result, config, {WEIGHTS: None})


Source = tuple[str, str, str]
"""What a model was made from, for its card: (purpose, name, version)."""


def _artifact(why: str, record: Record) -> Source:
    return why, str(record.ref), record.data_version


def _model(why: str, entry: dict[str, Any]) -> Source:
    return why, entry["checkpoint"], entry["version"]


def _models(folder: Path) -> dict[str, Any]:
    """The list of an `open_models` artifact."""
    listed: dict[str, Any] = json.loads((folder / MODELS).read_text())
    return listed


def _outcome(
    content: list[str], result: dict[str, Any], config: Strict, checks: dict[str, str | None] | None = None
) -> Outcome:
    return Outcome(
        content,
        result["figures"],
        checks or {},
        config=config.model_dump(mode="json"),
        device=result["device"],
        seconds=result["seconds"],
    )
