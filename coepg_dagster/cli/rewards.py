"""The commands `coepg rewards …`: other variants of the reward, and what the graders' answers were worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coepg_dagster.cli.common import Iteration, echo, open_iteration, print_table, refuse, refuse_lost, two_decimals

if TYPE_CHECKING:
    from coepg_dagster.provenance import Asset, Record


app = typer.Typer(
    no_args_is_help=True,
    help="Rewards that other variants would have given, and calibration of the grounders' confidence.",
)


@app.command("recompute")
def rewards_recompute(
    reference: Iteration,
    variant: Annotated[str, typer.Option(help="no_cdrem, uniform, prior, literal, probability or temperature")],
    temperature: Annotated[float | None, typer.Option(help="τ of the variant `temperature`; default 0.25")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    out: Annotated[Path | None, typer.Option(help="Parquet file for the rewards of every rollout")] = None,
) -> None:
    """Rewards and advantages that another variant of C-DREM would have given the rollouts of π'_k. Runs no model."""
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import ROLLOUTS, write_table
    from coepg_dagster.rewards.variants import needs_more, recompute, summary, variant_named

    record, folder = _record_of(reference, "planner")
    if not (folder / ROLLOUTS).exists():
        refuse(f"{reference} has no {ROLLOUTS}: this planner was not made by GRPO, so nothing was rewarded")
    # older records lack what was the default then
    scale, functions = record.config.get("scale_rewards", "group"), record.config.get("advantage", [])
    made = recompute(pq.read_table(folder / ROLLOUTS), variant_named(variant), temperature, scale, functions)
    logged = record.config["confidence"]
    facts = {"of": reference, "variant": variant, "temperature": temperature, "logged_confidence": logged} | summary(
        made
    )
    facts["advantages_need_more"] = needs_more(functions)
    if out is not None:
        write_table(made, out)
    if as_json:
        echo(json.dumps(facts))
        return
    rows = [
        [label, f"{facts[name]:.4g}", f"{facts[f'{name}_logged']:.4g}"]
        for label, name in (("mean reward", "mean_reward"), ("share of groups without spread", "frac_reward_zero_std"))
    ]
    print_table(f"{reference}: {facts['rollouts']} rollouts", ("", variant, f"as trained ({logged})"), rows)
    for name in ("same_reward", "same_advantage", "same_sign"):
        if facts[name] is not None:
            echo(f"{name.replace('_', ' ')}: {facts[name]:.1f} % of the rollouts")
    if beyond := facts["advantages_need_more"]:
        echo(f"advantages are not compared: those of {', '.join(beyond)} need more than the rollouts tell")
    echo(f"largest difference of a reward: {facts['largest_difference']:.4g}")


@app.command("calibration")
def rewards_calibration(
    reference: Iteration,
    out: Annotated[Path | None, typer.Option(help="folder for calibration.json and the figures")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """How well each grounder's confidence predicts hits: ECE, Brier score, AUROC and reliability curve.

    From the verdicts of iteration k, and from the rollouts of π'_k where it was trained with GRPO.
    """
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import ROLLOUTS, VERDICTS
    from coepg_dagster.reports.calibration import reliability_figure
    from coepg_dagster.reports.figures import save
    from coepg_dagster.rewards.calibration import as_json as plain
    from coepg_dagster.rewards.calibration import of_rollouts, of_verdicts

    by_source = {"verdicts": of_verdicts(pq.read_table(_record_of(reference, "verdicts")[1] / VERDICTS))}
    rollouts = _record_of(reference, "planner")[1] / ROLLOUTS
    if rollouts.exists():
        by_source["rollouts"] = of_rollouts(pq.read_table(rollouts))
    facts = {source: plain(calibrations) for source, calibrations in by_source.items()}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "calibration.json").write_text(json.dumps(facts, indent=1))
        for source, calibrations in by_source.items():
            save(reliability_figure(calibrations), out / f"reliability-{source}.png")
    if as_json:
        echo(json.dumps(facts))
        return
    heads = ("grounder", "answers", "hit rate, %", "confidence, %", "ECE, %", "Brier", "AUROC")
    for source, calibrations in by_source.items():
        rows = []
        for name, one in calibrations.items():
            rates = (f"{100 * rate:.1f}" for rate in (one.hit_rate, one.confidence, one.ece))
            rows.append([name, str(one.n), *rates, f"{one.brier:.3f}", two_decimals(one.auroc)])
        print_table(f"{reference}: confidence against hits, {source}", heads, rows)


@app.command("agreement")
def rewards_agreement(
    reference: Iteration,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """How often C-DREM and the live pages that rewarded π'_k say the same of an answer."""
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import ROLLOUTS
    from coepg_dagster.training.page_reward import agreement

    rollouts = _record_of(reference, "planner")[1] / ROLLOUTS
    facts = agreement(pq.read_table(rollouts, columns=["parts", "graders"]).to_pylist() if rollouts.exists() else [])
    if not facts["rollouts"]:
        refuse(
            f"{reference} was not rewarded by live pages at recorded steps: set `grpo.environment`, as "
            "experiments/plugins/live_pages.yaml does"
        )
    if as_json:
        echo(json.dumps(facts))
        return
    rows = [
        ("answers", str(facts["rollouts"])),
        ("both say the same, %", two_decimals(facts["agree"])),
        ("Cohen's kappa", two_decimals(facts["kappa"])),
        ("of what C-DREM accepts the page rewards, %", two_decimals(facts["cdrem_is_right"])),
        ("of what the page rewards C-DREM accepts, %", two_decimals(facts["page_is_found"])),
        ("the hit of ϕ_k and the page say the same, %", two_decimals(facts["own_hit_agrees"])),
    ]
    print_table(f"{reference}: C-DREM and the page", ("", ""), rows)


def _record_of(reference: str, asset: Asset) -> tuple[Record, Path]:
    """The current version of an asset of `EXPERIMENT@k` and its folder; exits with a message where there is none."""
    project, experiment, seed, k = open_iteration(reference)
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.provenance import Ref

    loop = Loop(experiment, seed, project.root)
    record = loop.record(open_instance(project), Ref(asset, k))
    if record is None:
        refuse(f"{reference} has no {asset}: run `coepg evolve {experiment.name}/s{seed} --through {k}` first")
    refuse_lost(loop, record)
    return record, project.store / record.folder
