"""The page of one row of D_k, or of a candidate that was dropped: `auditing.trace`, with the screenshot and the points."""

from __future__ import annotations

import base64

from coepg_dagster.artifacts import all_steps
from coepg_dagster.auditing.archive import Archive
from coepg_dagster.auditing.text import marked
from coepg_dagster.auditing.trace import trace
from coepg_dagster.reports.html import image_type, render
from coepg_dagster.reports.site import trace_address


def trace_page(archive: Archive, loop: str, k: int, what: str) -> str:
    """The trace of row or candidate `what` of D_k of `loop` (EXPERIMENT/sSEED) as one file of HTML. Raises NotFound."""
    provenance = trace(archive, loop, k, what)
    step = provenance["step"]
    steps = all_steps(archive.store / step["screenshot"]["file"])
    image = bytes(steps["screenshot"][step["screenshot"]["row"]].as_py())
    shown = {
        "id": step["step_id"],
        "width": step["width"],
        "height": step["height"],
        "boxes": step["boxes"],
        "screenshot": f"data:image/{image_type(image)};base64,{base64.b64encode(image).decode()}",
    }
    points = [
        {"x": vote["point"] and vote["point"][0], "y": vote["point"] and vote["point"][1], "hit": vote["hit"]}
        | {"name": vote["name"], "color": color}
        for color, vote in enumerate(provenance["verdicts"])
    ]
    return render(
        "trace.html",
        provenance=provenance,
        step=shown,
        points=points,
        reference=f"{loop}@{k}#{what}",
        k=k,
        address=trace_address,
        marked=marked,
        crumbs=[(loop, "index.html"), (f"audit of D_{k}", f"audit-{k}.html"), ("lineage map", "lineage.html")],
    )
