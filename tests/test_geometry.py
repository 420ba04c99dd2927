"""Coordinate spaces, and Qwen-VL's resize against transformers' own."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as reference

from coepg_dagster.geometry import Box, Point, Size, Space, SpaceMismatch, Viewport, smart_resize

SIDE = st.integers(1, 4000)
SIZES = st.builds(Size, SIDE, SIDE).filter(lambda s: max(s.width, s.height) < 200 * min(s.width, s.height))
SETTINGS = st.sampled_from([(28, 3136, 50176), (28, 3136, 1_843_200), (32, 65536, 16_777_216), (28, 784, 12_845_056)])


@given(SIZES, SETTINGS)
def test_smart_resize_is_that_of_transformers(size: Size, settings: tuple[int, int, int]) -> None:
    factor, low, high = settings
    ours = smart_resize(size, factor=factor, min_pixels=low, max_pixels=high)
    assert (ours.height, ours.width) == reference(size.height, size.width, factor, low, high)


@given(SIZES, SETTINGS)
def test_a_resized_image_is_not_resized_again(size: Size, settings: tuple[int, int, int]) -> None:
    """The processors of the trainers see images that were resized already."""
    factor, low, high = settings
    once = smart_resize(size, factor=factor, min_pixels=low, max_pixels=high)
    assume(once.width * once.height <= high)  # an extreme strip cannot be made small enough
    assert smart_resize(once, factor=factor, min_pixels=low, max_pixels=high) == once


def test_a_strip_is_refused() -> None:
    with pytest.raises(ValueError, match="crop it"):
        smart_resize(Size(20100, 100), factor=28, min_pixels=3136, max_pixels=50176)


@given(SIZES, SIZES, st.floats(0, 1), st.floats(0, 1), st.sampled_from(Space))
def test_every_space_and_back_within_a_pixel(original: Size, resized: Size, u: float, v: float, space: Space) -> None:
    view = Viewport(original, resized)
    point = Point(u * original.width, v * original.height, Space.ORIGINAL)
    back = view.point(view.point(point, space), Space.ORIGINAL)
    assert (back.x, back.y) == pytest.approx((point.x, point.y), abs=1e-6 * max(original.width, original.height))


@given(SIZES, st.data())
def test_rounding_in_the_models_space_costs_half_a_pixel_there(original: Size, data: st.DataObject) -> None:
    resized = smart_resize(original, factor=28, min_pixels=3136, max_pixels=1_843_200)
    view = Viewport(original, resized)
    x, y = data.draw(st.floats(0, original.width)), data.draw(st.floats(0, original.height))
    seen = view.point(Point(x, y, Space.ORIGINAL), Space.RESIZED)
    back = view.point(Point(round(seen.x), round(seen.y), Space.RESIZED), Space.ORIGINAL)
    assert abs(back.x - x) <= 0.5 * original.width / resized.width + 1e-9
    assert abs(back.y - y) <= 0.5 * original.height / resized.height + 1e-9


@given(SIZES, SIZES, st.lists(st.floats(0, 1), min_size=6, max_size=6), st.sampled_from(Space))
def test_a_hit_is_a_hit_in_every_space(original: Size, resized: Size, at: list[float], space: Space) -> None:
    view = Viewport(original, resized)
    (x1, x2), (y1, y2) = sorted(at[:2]), sorted(at[2:4])
    unit_box, point = Box(x1, y1, x2, y2, Space.UNIT), Point(at[4], at[5], Space.UNIT)
    margin = min(abs(point.x - x1), abs(point.x - x2), abs(point.y - y1), abs(point.y - y2))
    assume(margin > 1e-9)  # a point on the border may fall to either side of it in rounding
    assert view.box(unit_box, space).contains(view.point(point, space)) == unit_box.contains(point)


def test_borders_belong_to_the_box() -> None:
    box = Box(10, 20, 30, 40, Space.ORIGINAL)
    corners = [Point(x, y, Space.ORIGINAL) for x in (10, 30) for y in (20, 40)]
    assert all(box.contains(point) for point in corners)
    assert not box.contains(Point(30.001, 40, Space.ORIGINAL))
    assert box.centre == Point(20, 30, Space.ORIGINAL)


def test_mixing_spaces_raises() -> None:
    with pytest.raises(SpaceMismatch, match=r"resized.*original"):
        Box(0, 0, 1, 1, Space.ORIGINAL).contains(Point(0, 0, Space.RESIZED))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="in order"):
        Box(2, 0, 1, 1, Space.ORIGINAL)
    with pytest.raises(ValueError, match="no area"):
        Size(0, 5)
