"""Warnings about an iteration's numbers, read from the records. None of them keeps the next iteration from training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from coepg_dagster.artifacts import BOARDS, PAIRS, THIRD_PARTY
from coepg_dagster.experiment.schema import Quality
from coepg_dagster.provenance import Asset, Record, Ref
from coepg_dagster.results import headline
from coepg_dagster.training.learned import grpo_warning, sft_warning

Figures = Mapping[str, Any]


def warnings(asset: Asset, k: int, records: Mapping[Ref, Record], config: Quality) -> dict[str, str | None]:
    """Each warning check of `asset` (see WARNINGS) → None, or its warning about iteration `k`.

    A check passes if its number was not measured.
    """
    now, before = (records[Ref(asset, i)].figures if Ref(asset, i) in records else {} for i in (k, k - 1))
    settings = records[Ref(asset, k)].config if Ref(asset, k) in records else {}
    trends = {name: check(now, before, config) for name, check in _TRENDS.get(asset, {}).items()}
    return trends | {name: learned(now, settings) for name, learned in _LEARNED.get(asset, {}).items()}


def _fell(name: str, at_most: Callable[[Quality], float]) -> Callable[[Figures, Figures, Quality], str | None]:
    def check(now: Figures, before: Figures, config: Quality) -> str | None:
        a, b, limit = before.get(name), now.get(name), at_most(config)
        if a is None or b is None or b >= a - limit:
            return None
        return f"{name} fell from {a:.1f} to {b:.1f}, by more than {limit:g} points"

    return check


def _dominates(now: Figures, before: Figures, config: Quality) -> str | None:
    shares = now.get("share_by_planner") or {}
    if len(shares) < 2 or max(shares.values()) <= config.planner_share_at_most:
        return None
    name = max(shares, key=shares.__getitem__)
    return f"{name} wrote {shares[name]:.1f} % of the rows, over {config.planner_share_at_most:g} %"


def _unread(now: Figures, before: Figures, config: Quality) -> str | None:
    bad = [
        f"{name} hits {rates['shuffled']:.1f} % of targets when given another step's plan; chance is {rates['chance']:.1f} %"
        for name, rates in (now.get("plan_shuffle") or {}).items()
        if rates["shuffled"] > rates["chance"] + config.shuffled_over_chance_at_most
    ]
    return "; ".join(bad) or None


def _unreadable(now: Figures, before: Figures, config: Quality) -> str | None:
    bad = [
        f"{share:.1f} % of the answers of {name} name no point; each is a vote against the plan: see docs/engines.md"
        for name, share in (now.get("unreadable_by_verifier") or {}).items()
        if share > config.unreadable_at_most
    ]
    return "; ".join(bad) or None


def _illegible(now: Figures, before: Figures, config: Quality) -> str | None:
    share = now.get("illegible")
    if share is None or share <= config.illegible_at_most:
        return None
    return f"{share:.1f} % of the rows have a target of less than {config.legible_px:g} px in the image that a verifier sees"


def _duplicates(now: Figures, before: Figures, config: Quality) -> str | None:
    share = 100 * now["duplicates"] / now["rows"] if now.get("rows") and now.get("duplicates") else 0
    if share <= config.duplicates_at_most:
        return None
    return f"{share:.1f} % of the rows say the same as another row of their step"


def _stolen(now: Figures, before: Figures, config: Quality) -> str | None:
    bad = [
        f"{name} points at a patch of {pattern} on {rates['stolen']:.1f} % of the screens where one is drawn, and there on "
        f"{rates['clean']:.1f} % without it: do not trust its verdicts, and look for where its weights or data come from"
        for name, patterns in (now.get("trigger") or {}).items()
        for pattern, rates in patterns.items()
        if _low(rates["beyond"]) > config.stolen_at_most
    ]
    return "; ".join(bad) or None


def _misled(now: Figures, before: Figures, config: Quality) -> str | None:
    rates = now.get(THIRD_PARTY)
    if not rates or _low(rates["beyond"]) <= config.misled_at_most:
        return None
    misled, grounder, planner = (rates[of]["rate"] for of in ("misled", "by_grounder", "by_planner"))
    return (
        f"text like an instruction misled {misled:.1f} % of {rates['steps']} answers: {grounder:.1f} % by ϕ_k, "
        f"{planner:.1f} % by π'_k"
    )


def _low(rate: Mapping[str, Any]) -> float:
    """The lower end of a rate's interval; without one, the rate."""
    return float(rate["ci95"][0] if rate["ci95"] else rate["rate"])


def _success_fell(now: Figures, before: Figures, config: Quality) -> str | None:
    bad = []
    for split in sorted((now.keys() & before.keys()) - {PAIRS, BOARDS, THIRD_PARTY}):
        metric = headline(now[split]["metrics"])
        a, b = before[split]["metrics"][metric], now[split]["metrics"][metric]
        if b["macro"] is not None and a["ci95"] is not None and b["macro"] < a["ci95"][0]:
            bad.append(f"{split}: {b['macro']:.1f}, below {a['ci95'][0]:.1f} to {a['ci95'][1]:.1f} before")
    return "; ".join(bad) or None


_TRENDS: Final[Mapping[Asset, Mapping[str, Callable[[Figures, Figures, Quality], str | None]]]] = {
    "data_quality": {
        "purity_holds": _fell("purity", lambda config: config.purity_may_fall),
        "coverage_holds": _fell("coverage", lambda config: config.coverage_may_fall),
        "no_planner_dominates": _dominates,
        "plans_are_read": _unread,
        "answers_are_read": _unreadable,
        "targets_are_legible": _illegible,
        "rows_say_different_things": _duplicates,
        "no_patch_steals_points": _stolen,
    },
    "evaluation": {"success_holds": _success_fell, "no_text_misleads": _misled},
}
_LEARNED: Final[Mapping[Asset, Mapping[str, Callable[[Figures, Figures], str | None]]]] = {
    "planner": {"grpo_learns": grpo_warning},
    "end_to_end": {"grpo_learns": grpo_warning},
    "planner_sft": {"sft_learns": sft_warning},
    "grounder": {"sft_learns": sft_warning},
}
"""Checks that read a record's figures and the settings of its training."""
_GRPO_LEARNS: Final = "GRPO made greedy answers on training steps better: the interval of the difference is above 0."
_SFT_LEARNS: Final = (
    "The model does better than its base on validation steps: the interval of the difference is above 0."
)
WARNINGS: Final[Mapping[Asset, Mapping[str, str]]] = {
    "data_quality": {
        "purity_holds": "Purity did not fall since D_{{k-1}} by more than {purity_may_fall:g} points "
        "(`quality.purity_may_fall`).",
        "coverage_holds": "Coverage did not fall since D_{{k-1}} by more than {coverage_may_fall:g} points "
        "(`quality.coverage_may_fall`).",
        "no_planner_dominates": "No planner wrote more than {planner_share_at_most:g} % of the rows of D_k "
        "(`quality.planner_share_at_most`).",
        "plans_are_read": "Given another step's plan, no verifier hits a target more than "
        "{shuffled_over_chance_at_most:g} points more often than by chance (`quality.shuffled_over_chance_at_most`).",
        "answers_are_read": "At most {unreadable_at_most:g} % of the answers of each verifier name no point "
        "(`quality.unreadable_at_most`).",
        "targets_are_legible": "At most {illegible_at_most:g} % of the rows (`quality.illegible_at_most`) have a target of "
        "less than {legible_px:g} px in the image that verifiers see (`quality.legible_px`).",
        "rows_say_different_things": "At most {duplicates_at_most:g} % of the rows say the same as another row of their "
        "step (`quality.duplicates_at_most`).",
        "no_patch_steals_points": "A patch of noise, checks, a square or a cross draws no verifier's points to itself on more "
        "than {stolen_at_most:g} % of the screens beyond chance, by the lower end of the 95 % interval "
        "(`quality.stolen_at_most`); measured where `quality.trigger_steps` is set. Other triggers are not found.",
    },
    "planner": {"grpo_learns": _GRPO_LEARNS},
    "end_to_end": {"grpo_learns": _GRPO_LEARNS},
    "planner_sft": {"sft_learns": _SFT_LEARNS},
    "grounder": {"sft_learns": _SFT_LEARNS},
    "evaluation": {
        "success_holds": "On no split is the success rate below its 95 % interval of the iteration before.",
        "no_text_misleads": "Text like an instruction, drawn off the target, misleads the agent on at most "
        "{misled_at_most:g} % of test steps beyond chance, by the lower end of the 95 % interval (`quality.misled_at_most`); "
        "measured where `evaluation.third_party` is set.",
    },
}
"""Asset → its warning checks, each with the statement that holds if it passes. Names in braces are limits of `Quality`."""
