# SPDX-License-Identifier: Apache-2.0
"""Of two children with random storage formats, the proof accepts exactly those that put every
element at the same place."""

import functools
import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import KVCacheLayout

from tests.v1.attention.mock_children import MockLayer, compose, make_builder, make_child

AXES = ("side", "token", "head", "element")
LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLNHC)


@dataclass(frozen=True)
class Format:
    """Where a block holds keys and values: `order` names its axes from the slowest to the
    fastest, of which `side` is keys or values.

    `side` first makes planes of keys and of values, last it interleaves them, before `element`
    alone it packs a key and its value into a row; `token` before `head` is token-major.
    """

    order: tuple[str, ...]
    value_first: bool

    @property
    def near(self) -> "Format":
        """The same with tokens and heads changed over, which leaves a block's ends in place."""
        other = {"token": "head", "head": "token"}
        return Format(tuple(other.get(axis, axis) for axis in self.order), self.value_first)

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the engine's (blocks, heads, block_size, 2 * head_size), each a view
        of (blocks, block_size, heads, head_size)."""
        blocks, heads, tokens, content = cache.shape
        sizes = dict(zip(AXES, (2, tokens, heads, content // 2), strict=True))
        block = cache.as_strided((blocks, heads * tokens * content), (cache.stride(0), 1))
        block = block.view(blocks, *(sizes[axis] for axis in self.order))
        first, second = block.permute(0, *(1 + self.order.index(axis) for axis in AXES)).unbind(1)
        return (second, first) if self.value_first else (first, second)

    def places(self, heads: int, tokens: int, head_size: int) -> list[int]:
        """The place in the block of each element of the keys and then of the values."""
        sizes = dict(zip(AXES, (2, tokens, heads, head_size), strict=True))
        steps, step = {}, 1
        for axis in reversed(self.order):
            steps[axis], step = step, step * sizes[axis]
        sides = (1, 0) if self.value_first else (0, 1)
        axes = (sides, *(range(sizes[axis]) for axis in AXES[1:]))
        offsets = (
            np.array(list(axis)) * steps[name] for name, axis in zip(AXES, axes, strict=True)
        )
        side, token, head, element = np.ix_(*offsets)
        return (side + token + head + element).ravel().tolist()


FORMATS = [
    Format(order, value_first)
    for order in itertools.permutations(AXES)
    for value_first in (False, True)
]


@functools.cache
def child(name: str, stored: Any, layout: KVCacheLayout, writes: bool) -> type[Any]:
    error = None if writes else NotImplementedError("needs a layer")
    return make_child(name, stores=stored, layouts=[layout], writer_error=error)


@given(
    general=st.sampled_from(FORMATS),
    causal=st.sampled_from(FORMATS),
    kinship=st.sampled_from(["alike", "near", "any"]),
    writes=st.sampled_from([(True, True)] * 3 + [(True, False), (False, True)]),
    heads=st.integers(1, 3),
    block_size=st.sampled_from([16, 32, 48]),
    head_size=st.sampled_from([1, 2, 8, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    fp8=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)
def test_it_accepts_exactly_children_that_store_alike(
    general: Format,
    causal: Format,
    kinship: str,
    writes: tuple[bool, bool],
    heads: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    fp8: bool,
    layout: KVCacheLayout,
) -> None:
    """Where one child cannot write, both attend over what the other one wrote."""
    formats = (general, {"alike": general, "near": general.near, "any": causal}[kinship])
    children = [
        child(name, stored, layout, can_write)
        for name, stored, can_write in zip(("GENERAL", "CAUSAL"), formats, writes, strict=True)
    ]
    composite = compose(*children)
    layer = MockLayer(
        composite,
        num_heads=2 * heads,
        num_kv_heads=heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        # Reading compares with attention over the keys as they were, so they must be kept exactly.
        kv_cache_dtype="fp8" if fp8 and all(writes) else "auto",
    )
    first, second = (stored.places(heads, block_size, head_size) for stored in formats)
    refusal = "GENERAL and CAUSAL cannot share a KV cache"
    with nullcontext() if first == second else pytest.raises(ValueError, match=refusal):
        make_builder(composite, {"layer": layer})
    for backend in children:
        backend.calls.clear()  # which hold the caches
