"""`smart_resize` is what the real image processors of Qwen2.5-VL and Qwen3-VL do; round trips through their grids."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from coepg_dagster.geometry import Point, Size, Space, Viewport, smart_resize

FAMILIES = {  # patch size, merge size, min_pixels, max_pixels
    "Qwen2.5-VL": (14, 2, 56 * 56, 1280 * 28 * 28),
    "Qwen3-VL": (16, 2, 65_536, 1_843_200),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_resize_is_the_processors(family: str) -> None:
    """The processors are built locally, with each family's patch size; nothing is downloaded."""
    from transformers import Qwen2VLImageProcessor

    patch, merge, low, high = FAMILIES[family]
    processor = Qwen2VLImageProcessor(
        patch_size=patch, merge_size=merge, size={"shortest_edge": low, "longest_edge": high}
    )
    rng = np.random.default_rng(5)
    for _ in range(12):
        size = Size(int(rng.integers(20, 1700)), int(rng.integers(20, 1700)))
        grid = processor(images=[Image.new("RGB", (size.width, size.height))], return_tensors="np")["image_grid_thw"][0]
        seen = Size(int(grid[2]) * patch, int(grid[1]) * patch)
        assert smart_resize(size, factor=patch * merge, min_pixels=low, max_pixels=high) == seen
        port = Viewport(size, seen)
        for x, y in rng.integers(0, (size.width, size.height), (20, 2)).tolist():
            back = port.point(port.point(Point(x, y, Space.ORIGINAL), Space.RESIZED), Space.ORIGINAL)
            assert abs(back.x - x) < 1 and abs(back.y - y) < 1
