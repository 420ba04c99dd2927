"""Reliability curves of grounders: hit rate against confidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coepg_dagster.rewards.calibration import Calibration

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import: only where a figure is drawn


def reliability_figure(calibrations: Mapping[str, Calibration]) -> Figure:
    """A reliability curve per grounder, with the share of answers in each bin of confidence below.

    Points are bins that hold an answer, at their mean confidence; bars are 95 % intervals of the hit rate. On the diagonal
    confidence equals the hit rate.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    curves, shares = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    curves.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for name, calibration in calibrations.items():
        bins = [b for b in calibration.bins if b.n]
        x, y = [b.confidence for b in bins], [b.hit_rate for b in bins]
        low = [b.hit_rate - b.ci95[0] for b in bins]  # type: ignore[operator,index]
        high = [b.ci95[1] - b.hit_rate for b in bins]  # type: ignore[operator,index]
        worth = "–" if calibration.auroc is None else f"{calibration.auroc:.2f}"
        label = f"{name}: ECE {100 * calibration.ece:.1f} %, AUROC {worth}, n = {calibration.n}"
        curves.errorbar(x, y, yerr=[low, high], marker="o", capsize=2, label=label)
        shares.step(
            [*(b.low for b in calibration.bins), 1.0],
            [*(100 * b.n / calibration.n for b in calibration.bins), 100 * calibration.bins[-1].n / calibration.n],
            where="post",
        )
    curves.set_ylabel("hit rate")
    curves.set_ylim(0, 1)
    curves.grid(alpha=0.3)
    if calibrations:
        curves.legend(frameon=False, loc="upper left", fontsize="small")
    shares.set_ylabel("answers, %")
    shares.set_xlabel("confidence, exp(mean log p) of the coordinate tokens")
    shares.set_xlim(0, 1)
    shares.grid(alpha=0.3)
    return figure
