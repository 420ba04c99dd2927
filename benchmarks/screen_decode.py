"""Web pages as screenshots: cropped once at import, against decoding the whole page for every use.

Full pages of Mind2Web's size (1280 × 5200 px, JPEG, made here) go through the Mind2Web reader, which decodes each once with
both cores and stores the block that holds the target. From there the loop reads it USES times (planner and grounder see it
for three epochs of SFT each, and once more in GRPO), as often as the plain way decodes, cuts and resizes the whole page. The
import is counted. Both use two threads, in turns, and must give images of the same size that differ by JPEG's error at most.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from benchmarks import baseline
from coepg_dagster.inference.screens import Screens
from coepg_dagster.readers.images import Resize
from coepg_dagster.readers.importing import Options, load_benchmark

NAME = "screen_decode"
PAGES, USES, REPETITIONS, THREADS = 24, 7, 3, 2
WIDTH, HEIGHT = 1280, 5200
RESIZE = Resize()


def page(rng: np.random.Generator) -> bytes:
    """A page of text lines, panels and photographs."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for top in range(20, HEIGHT - 400, 420):
        photo = rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)
        image.paste(Image.fromarray(photo).resize((420, 300), Image.Resampling.BICUBIC), (40, top))
        draw.rectangle((500, top, 1240, top + 300), fill=tuple(int(c) for c in rng.integers(200, 255, 3)))
        for line in range(14):
            words = "".join(chr(int(c)) for c in rng.integers(97, 123, 90))
            draw.text((510, top + 8 + 20 * line), words, fill="black", font_size=14)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=90)
    return out.getvalue()


def rows(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Rows of Multimodal-Mind2Web, one target each, somewhere on the page."""
    made = []
    for i in range(PAGES):
        x, y = int(rng.integers(0, WIDTH - 200)), int(rng.integers(0, HEIGHT - 100))
        attributes = json.dumps({"bounding_box_rect": f"{x},{y},120,30"})
        made.append(
            {
                "action_uid": f"a{i}",
                "operation": json.dumps({"op": "CLICK", "value": ""}),
                "pos_candidates": [json.dumps({"tag": "a", "attributes": attributes})],
                "website": "site",
                "annotation_id": f"t{i}",
                "confirmed_task": "Do it",
                "screenshot": {"bytes": page(rng), "path": None},
                "action_reprs": ["[a] x -> CLICK"],
                "target_action_index": "0",
            }
        )
    return made


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    log = baseline.Log(NAME)
    folder = Path(tempfile.mkdtemp(prefix="coepg-bench-"))
    try:
        measure(folder, log)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, log: baseline.Log) -> None:
    source = folder / "source" / "data" / "train-00000.parquet"
    source.parent.mkdir(parents=True)
    schema = pa.schema(
        [
            (name, pa.list_(pa.string()) if name in ("pos_candidates", "action_reprs") else pa.string())
            for name in ("action_uid", "operation", "pos_candidates", "website", "annotation_id", "confirmed_task")
        ]
        + [("screenshot", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))]
        + [("action_reprs", pa.list_(pa.string())), ("target_action_index", pa.string())]
    )
    pages = rows(np.random.default_rng(5))
    pq.write_table(pa.Table.from_pylist(pages, schema), source, row_group_size=4)
    encoded = {f"{row['annotation_id']}_{row['action_uid']}": row["screenshot"]["bytes"] for row in pages}
    imports = 0

    def imported(workers: int, shrink: bool = False) -> pa.Table:
        nonlocal imports
        imports += 1
        options = Options(workers=workers, resize=RESIZE, shrink=shrink)
        return load_benchmark("mind2web", source.parent.parent, folder / str(imports), options)[0]

    table, shrunk = imported(THREADS), imported(THREADS, shrink=True)
    if table.num_rows != PAGES:
        raise AssertionError(f"the reader kept {table.num_rows} of {PAGES} pages")
    views = dict(zip(table["step_id"].to_pylist(), table["view"].to_pylist(), strict=True))
    ids = list(views) * USES
    resize = (RESIZE.factor, RESIZE.min_pixels, RESIZE.max_pixels)

    def of(steps: pa.Table) -> Callable[[str], Image.Image]:
        """Step id → image as the loop reads it: decodes the stored bytes, in each thread separately, without a cache."""
        in_thread = threading.local()

        def look(step_id: str) -> Image.Image:
            if not hasattr(in_thread, "screens"):
                in_thread.screens = Screens(steps, resize, cached_bytes=0)
            image: Image.Image = in_thread.screens.image(step_id)
            return image

        return look

    stored = of(table)

    def whole_page(step_id: str) -> Image.Image:
        with Image.open(io.BytesIO(encoded[step_id])) as image:
            block = image.convert("RGB").crop(tuple(views[step_id]))
        return block.resize(RESIZE.of(block.size), Image.Resampling.BICUBIC)

    worst = 0.0
    for step_id in views:
        a, b = (np.asarray(image, dtype=np.float32) for image in (stored(step_id), whole_page(step_id)))
        if a.shape != b.shape:
            raise AssertionError(f"{step_id}: images of {a.shape} and {b.shape}")
        worst = max(worst, float(np.abs(a - b).mean()))

    def shown(look: Callable[[str], Image.Image]) -> Callable[[], float]:
        def run() -> float:
            with ThreadPoolExecutor(THREADS) as pool:
                return seconds(lambda: list(pool.map(lambda step_id: look(step_id).size, ids)))

        return run

    timed = baseline.interleaved(
        {
            "import, 2 threads": lambda: seconds(lambda: imported(2)),
            "import, 1 thread": lambda: seconds(lambda: imported(1)),
            "stored blocks": shown(stored),
            "blocks stored in the model's size": shown(of(shrunk)),
            "whole pages": shown(whole_page),
        },
        REPETITIONS,
    )
    shows = len(ids)
    ours = [a + b for a, b in zip(timed["import, 2 threads"], timed["stored blocks"], strict=True)]
    value, against = shows / baseline.median(ours), shows / baseline.median(timed["whole pages"])
    for name, times in timed.items():
        log(f"{name}: {', '.join(f'{t:.2f}' for t in times)} s")
    log(f"{value:.1f} against {against:.1f} images/s, import counted: {value / against:.2f} times")
    baseline.write(
        NAME,
        command=baseline.command_line(),
        value=value,
        unit="images/s",
        against=against,
        ratio=value / against,
        repetitions={"seconds": timed},
        device=baseline.cpu_name(),
        against_what="decoding, cutting and resizing the whole page each time a model is to see it",
        uses=USES,
        pages=PAGES,
        page_size=[WIDTH, HEIGHT],
        threads=THREADS,
        ratio_without_import=baseline.median(timed["whole pages"]) / baseline.median(timed["stored blocks"]),
        ratio_without_import_in_the_models_size=baseline.median(timed["whole pages"])
        / baseline.median(timed["blocks stored in the model's size"]),
        import_speedup_of_two_threads=baseline.median(timed["import, 1 thread"])
        / baseline.median(timed["import, 2 threads"]),
        mean_difference=worst,
    )


if __name__ == "__main__":
    main()
