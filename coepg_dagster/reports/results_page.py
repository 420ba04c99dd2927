"""docs/results.md: the study as people read it, made from its rows and findings; with the figures beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coepg_dagster.evaluation.tables import Table, half_up
from coepg_dagster.reports import paper
from coepg_dagster.reports.figures import save
from coepg_dagster.reports.study import FULL, TRAIN, Finding, Study, command
from coepg_dagster.training.learned import FEW_ROLLOUTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: Final = "images/results"
"""Folder of the figures, beside the page."""
COLUMNS: Final = ("step_sr", "ele_acc", "op_f1")


def write_page(
    study: Study,
    found: Sequence[Finding],
    missing: Sequence[str],
    left_out: Mapping[str, str],
    protocol: str,
    out: Path,
) -> Path:
    """Writes results.md and its figures into `out`; returns the page's path."""
    raw = study.rows()
    results = paper.Results(paper.rows_of([*raw, *study.joint_rows()]), study.splits)
    root = study.root
    name = f"coepg reproduce {root}"
    parts = [
        f"# Results on the embedded benchmark\n\nMade by `{name}`; do not edit. What is compared, and what counts as confirmed, "
        "was fixed before the test splits were scored: [analysis-plan.md](analysis-plan.md). All numbers: "
        "[results.json](results.json). Rates are in per cent, macro over episodes; intervals are 95 %, drawing episodes and "
        "seeds jointly.\n",
        "The benchmark's headroom is **made on purpose**: the base grounder knows element descriptions in one wording, the "
        "planners plan in others. What an iteration gains is mostly the grounder learning the planners' language; "
        f"`{root}_no_gap` is the control without that gap. Nothing here says what the paper's numbers would be.\n",
        _deviation(study),
        "## What each claim came to\n\n" + _findings(found).markdown(),
        _hardly_trained(study),
        _tables(study, results, protocol),
        _figures(study, results, out),
        _live(study),
        _cost(study, results),
        _mechanism(study, results),
        _repeat(study, missing, left_out),
    ]
    page = out / "results.md"
    page.write_text("\n".join(part for part in parts if part))
    return page


def _findings(found: Sequence[Finding]) -> Table:
    rows = tuple(
        (f"{one.claim}", f"**{one.verdict}**" if one.verdict == "confirmed" else one.verdict, one.text) for one in found
    )
    return Table("Claims", ("claim", "here", "what was measured"), rows)


def _last(study: Study) -> int:
    """The last iteration that every seed of the main experiment was scored at."""
    return study.reached((study.root, FULL)) or study.last


def _deviation(study: Study) -> str:
    if _last(study) == study.last:
        return ""
    return (
        f"**Departure from the plan.** The plan compares at k = {study.last}. When this page was written, every seed "
        f"had reached k = {_last(study)} only. What is planned at k = {study.last} is compared at the last iteration that both "
        f"sides reached; each text names it. It says what happens in the first iterations, nothing about M_{study.last}.\n"
    )


def _hardly_trained(study: Study) -> str:
    """What the claims about GRPO are worth where its runs were too small to learn."""
    seen = [int(of["rollouts"]) for run in study.runs for of in run.training.values() if "rollouts" in of]
    few = [rollouts for rollouts in seen if rollouts < FEW_ROLLOUTS]
    if not few:
        return ""
    return (
        f"**GRPO was hardly trained.** {len(few)} of {len(seen)} runs saw fewer than {FEW_ROLLOUTS:,} rollouts (the smallest "
        f"{min(few):,}), which move a planner by chance ([training.md](training.md)). What is said above of GRPO and of its "
        "rewards is about such runs: nothing follows for GRPO that is trained.\n"
    )


def _tables(study: Study, results: paper.Results, protocol: str) -> str:
    root, last, large = study.root, _last(study), f"{study.root}_large"
    by_iteration = paper.table_1(results, root, study.last, protocol)
    if (reached := study.reached((large, FULL))) is not None:
        larger = paper.table_1(results, large, reached, protocol)
        by_iteration = replace(by_iteration, rows=(*by_iteration.rows, *larger.rows))
    tables = [
        by_iteration,
        paper.table_3(results, root, last),
        paper.table_4(results, root, last),
    ]
    notes = [
        f"Any row again: `{command(root, FULL)}/sSEED --through K` or `{command(large, FULL)}/sSEED --through K`, with one of "
        f"the seeds {_seeds(study)}.",
        f"Any row again: `coepg evolve {root}_VARIANT/sSEED --through {last}`, VARIANT being `end_to_end_sft`, `end_to_end` or "
        f"`before_grpo`, after `{command(root, FULL)}/sSEED --through {last}`, whose data and models they start from.",
        f"Any row again: `coepg evolve {root}_VARIANT/sSEED --through {last}`, VARIANT being `no_cdrem`, `uniform`, "
        "`prior_only`, `literal` or `temperature`, after the full loop, whose π_k and ϕ_k they start from.",
    ]
    shown = [f"{table.markdown()}\n{note}\n" for table, note in zip(tables, notes, strict=True)]
    return "## Tables\n\n" + "\n".join(shown)


def _seeds(study: Study) -> str:
    return ", ".join(str(seed) for seed in sorted(study.find(study.root)))


def _figures(study: Study, results: paper.Results, out: Path) -> str:
    root, last = study.root, _last(study)
    sizes = {"small": root}
    if study.find(f"{root}_large"):
        sizes["large"] = f"{root}_large"
    shares = {100.0: root, 50.0: f"{root}_labels_50", 25.0: f"{root}_labels_25"}
    there = {share: name for share, name in shares.items() if study.find(name)}
    drawn: list[tuple[str, str, Figure]] = [
        ("figure-2", "Figure 2: with and without GRPO over iterations", paper.figure_2(results, sizes)),
        ("figure-4", "Figure 4: Step SR against labelled steps", paper.figure_4(results, there, last)),
        ("figure-6", "Figure 6: purity, coverage and diversity of D_k", paper.figure_6(results, root, TRAIN)),
        ("figure-7", "Figure 7: each test split over the iterations", paper.figure_7(results, sizes)),
    ]
    curves = {
        words: [run.curves[last] for run in study.find(root, variant).values() if last in run.curves]
        for variant, words in ((FULL, "C-DREM"), ("no_cdrem", "single grounder"))
    }
    if all(curves.values()):
        title = (
            f"Figure 5: success of GRPO's rollouts on training steps at k = {last}, judged by ϕ_{last} for both rewards (not "
            "Step SR on a test split: see the analysis plan); bands are smallest to largest of the seeds"
        )
        drawn.insert(2, ("figure-5", title, paper.figure_5(curves)))
    folder = out / FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["## Figures\n"]
    for file, title, picture in drawn:
        save(picture, folder / f"{file}.png")
        parts.append(f"{title}.\n\n![{title}]({FIGURES}/{file}.png)\n")
    return "\n".join(parts)


def _live(study: Study) -> str:
    """Success of live play per split, iteration and family, where somebody played."""
    played = {(split, run.reference, k): live for run in study.runs for (k, split), live in run.live.items()}
    if not played:
        return (
            "## Live play\n\nNot played yet: "
            + ", ".join(f"`coepg play {study.root}@{k}`" for k in sorted({0, 1, study.last}))
            + ", then `--collect` again.\n"
        )
    parts = ["## Live play\n"]
    splits = {split for split, _, _ in played}
    for split in (*filter(splits.__contains__, study.splits), *sorted(splits - set(study.splits))):
        columns = {(name, k): live for (of, name, k), live in sorted(played.items()) if of == split}
        families = sorted({family for live in columns.values() for family in live["families"]})
        header = ("family", *(f"{name} M_{k}" for name, k in columns))
        rows = [("**all episodes**", *(_rate(live["success"]) for live in columns.values()))]
        rows += [(family, *(_solved(live["families"].get(family)) for live in columns.values())) for family in families]
        title = f"{split}: success by the page's own reward, in Chromium; per cent, and episodes solved"
        parts.append(Table(title, header, tuple(rows)).markdown())
        most = max(rates["episodes"] for live in columns.values() for rates in live["families"].values())
        commands = ", ".join(f"`coepg play {name}@{k} --split {split} --episodes {most}`" for name, k in columns)
        parts.append(f"Again, with recorded episodes to look at: {commands}.\n")
    return "\n".join(parts)


def _solved(rates: Mapping[str, Any] | None) -> str:
    return "–" if rates is None else f"{rates['solved']}/{rates['episodes']}"


def _rate(rate: Mapping[str, Any]) -> str:
    bounds = rate["ci95"]
    shown = half_up(rate["rate"], 1)
    return shown + (f" [{half_up(bounds[0], 1)}, {half_up(bounds[1], 1)}]" if bounds else "")


def _cost(study: Study, results: paper.Results) -> str:
    """Seconds and model calls of each iteration, per point of Step SR that it gained."""
    rows = []
    before: float | None = None
    for k in range(study.last + 1):
        score = results.cell(study.root, FULL, k, paper.AVERAGE, "step_sr")
        seconds, calls = (results.cell(study.root, FULL, k, TRAIN, name) for name in ("seconds", "model_calls"))
        if score is None or seconds is None or calls is None:
            continue
        gained = None if before is None else score.value - before
        per = [f"{cost.value / gained:,.0f}" if gained and gained > 0 else "–" for cost in (seconds, calls)]
        change = "–" if gained is None else f"{gained:+.1f}"
        rows.append((f"{k}", f"{seconds.value:,.0f}", f"{calls.value:,.0f}", change, *per))
        before = score.value
    if not rows:
        return ""
    header = ("k", "seconds", "model calls", "points gained", "seconds per point", "calls per point")
    table = Table("Mean over seeds; seconds of all assets of an iteration, one core each", header, tuple(rows))
    return (
        f"## Cost\n\n{table.markdown()}\nModel calls are planner samples (candidates and rollouts), grounder answers (verdicts "
        "and rewards) and evaluation; training's own passes are in the seconds.\n"
    )


def _mechanism(study: Study, results: paper.Results) -> str:
    """What D_k was like: where a claim is missed, the reason is looked for here first."""
    rows = []
    for k in range(study.last + 1):
        cells = [
            results.cell(study.root, FULL, k, TRAIN, m) for m in ("purity", "purity_frozen", "diversity", "coverage")
        ]
        cells += [
            results.cell(study.root, FULL, k, TRAIN, m) for m in ("groups_without_spread", "grpo_before", "grpo_after")
        ]
        if any(cells):
            rows.append((f"{k}", *map(paper.text, cells)))
    if not rows:
        return ""
    header = (
        "k",
        "purity",
        "frozen purity",
        "diversity",
        "coverage",
        "groups without spread",
        "before GRPO",
        "after GRPO",
    )
    table = Table(
        "D_k and GRPO over the iterations; per cent, but diversity in plans per step. Before and after: greedy answers on "
        "the same training steps, by ϕ_k alone",
        header,
        tuple(rows),
    )
    return f"## Mechanism\n\n{table.markdown()}"


def _repeat(study: Study, missing: Sequence[str], left_out: Mapping[str, str]) -> str:
    parts = [
        f"## Repeat it\n\n`coepg reproduce {study.root} --jobs N` makes everything that is missing or stale, in N processes, and "
        f"writes this page; `--collect` writes it from what is there. The same seed gives the same numbers on the same machine.\n"
    ]
    if missing or left_out:
        parts.append("Not there when this page was written:\n")
        parts += [f"- {one}" for one in _by_experiment(missing)]
        parts += [f"- {name}: {why}" for name, why in left_out.items()]
        parts.append("")
    causes = {cause.rpartition(": ")[2] for run in study.runs for cause in run.stale}
    if causes:
        loops = sum(bool(run.stale) for run in study.runs)
        parts.append(
            f"{loops} of {len(study.runs)} loops were made by an earlier code or configuration and are stale; `coepg results "
            "EXPERIMENT` names each artifact, and the command above makes them again:\n"
        )
        parts += [f"- {cause}" for cause in sorted(causes)]
        parts.append("")
    return "\n".join(parts)


def _by_experiment(commands: Sequence[str]) -> list[str]:
    """The commands of one experiment's seeds as one line."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for one in commands:
        name, _, rest = one.partition("/s")
        seed, _, options = rest.partition(" ")
        seeds.setdefault((name, options), []).append(seed)
    return [f"`{name}/sSEED {options}`, SEED being {', '.join(of)}" for (name, options), of in seeds.items()]
