"""Faster kernels, the same numbers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from coepg_dagster.inference.attention import attend_shared_keys, with_room


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**16))
def test_heads_that_share_keys_attend_as_with_repeated_keys(
    rows: int, shared: int, groups: int, length: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, shared * groups, 1, 8, generator=draw)
    key, value = (torch.randn(rows, shared, length, 8, generator=draw) for _ in range(2))
    mask = torch.rand(rows, 1, 1, length, generator=draw) < 0.7
    mask[..., -1] = True  # a token sees itself
    output, _ = attend_shared_keys(None, query, key, value, mask, scaling=0.3)
    repeated = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_a_cache_with_room_holds_what_one_that_is_copied_holds() -> None:
    draw = torch.Generator().manual_seed(0)

    def keys_and_values(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(rows, 2, tokens, 4, generator=draw) for _ in range(2))  # type: ignore[return-value]

    grown, roomy = DynamicCache(), DynamicCache()
    for layer in range(2):
        prefix = keys_and_values(3, 5)
        grown.update(*prefix, layer)
        roomy.update(*prefix, layer)
    owner = torch.tensor([2, 0, 0, 1])
    grown.batch_select_indices(owner)
    roomy = with_room(roomy, owner, 4)
    kept = torch.tensor([0, 3])
    for rows, tokens in ((4, 3), (2, 1)):
        if rows == 2:
            grown.batch_select_indices(kept)
            roomy.batch_select_indices(kept)
        for layer in range(2):
            new = keys_and_values(rows, tokens)
            for output, expected in zip(roomy.update(*new, layer), grown.update(*new, layer), strict=True):
                assert torch.equal(output, expected)
        assert roomy.get_seq_length() == grown.get_seq_length()
