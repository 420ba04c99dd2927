"""Common parts of all figures: size, style, axes over k, PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import: only where a figure is drawn


def figure(width: float = 7, height: float = 3.6) -> Figure:
    """An empty figure; inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def over_k(axes: Any, iterations: Sequence[int], label: str) -> None:
    """Labels axes whose x is the iteration."""
    axes.set_xticks(sorted(set(iterations)))
    axes.set_xlabel("iteration k")
    dress(axes, label)


def dress(axes: Any, label: str) -> None:
    """Adds a grid, the label of the y axis, and a legend where a series has a label."""
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize="small")


def png_bytes(drawn: Figure, dpi: int = 110) -> bytes:
    """A figure as PNG of 128 colours, a third of the size; the same figure gives the same bytes."""
    full, small = io.BytesIO(), io.BytesIO()
    drawn.savefig(full, format="png", dpi=dpi)
    Image.open(full).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def png(drawn: Figure) -> str:
    """A figure as base64 PNG."""
    return base64.b64encode(png_bytes(drawn)).decode()


def save(drawn: Figure, file: Path, dpi: int = 110) -> None:
    """Writes a figure as a PNG file."""
    file.write_bytes(png_bytes(drawn, dpi))
