# SPDX-License-Identifier: Apache-2.0
"""Alignment of K/V-first and blocks-first views of one allocation, for random shapes."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.worker.gpu.test_kv_cache_alignment import (
    Allocation,
    BlocksFirst,
    KVFirst,
    Layer,
    align,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


@st.composite
def mixed_allocations(draw: st.DrawFn) -> Allocation:
    """Layers of both orders, at least one of each, whose token is the same number of bytes, made
    up of different heads, head sizes and dtypes, in kernel blocks of different sizes."""
    token = 4 * draw(st.integers(1, 12))  # bytes of a key
    block_size = draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16]))

    def layer(name: str, backend: Any, order: Any) -> Layer:
        dtype = draw(st.sampled_from(DTYPES))
        elements = token // dtype.itemsize
        heads = draw(st.sampled_from([n for n in range(1, elements + 1) if elements % n == 0]))
        kernel_blocks = [n for n in range(1, block_size + 1) if block_size % n == 0]
        kernel_block = draw(st.sampled_from(kernel_blocks))
        return Layer(name, backend, kernel_block, heads, elements // heads, dtype, order)

    inner = st.permutations([2, 3, 4])  # of token, head and element within K or V of a block
    orders: dict[Any, Any] = {
        KVFirst: inner.map(lambda inside: (0, 1, *inside)),
        # Already as the storage is, or to be aligned.
        BlocksFirst: st.builds(
            lambda outside, inside: (*outside, *inside), st.permutations([0, 1]), inner
        ),
    }
    backends = [KVFirst, BlocksFirst, *draw(st.lists(st.sampled_from([KVFirst, BlocksFirst])))]
    layers = [
        layer(f"layer {index}", backend, draw(orders[backend]))
        for index, backend in enumerate(draw(st.permutations(backends[:5])))
    ]
    return Allocation(
        layers,
        num_blocks=draw(st.integers(1, 5)),
        block_size=block_size,
        start=4 * draw(st.integers(0, 8)),
    )


def addressed(allocation: Allocation, layer: Layer, block: int, value: bool) -> list[int]:
    """The bytes of the allocation that K or V of a block are, found by writing to each."""
    allocation.raw.zero_()
    every_byte_1 = torch.ones(layer.dtype.itemsize, dtype=torch.uint8).view(layer.dtype)
    allocation.k_and_v(layer.name, block)[value].copy_(every_byte_1)
    return allocation.raw.nonzero().flatten().tolist()


@given(mixed_allocations())
def test_a_block_id_addresses_the_same_bytes_in_every_view(allocation: Allocation) -> None:
    """Those of the K/V-first order: K of all blocks, then V of all blocks."""
    align(allocation)
    half = len(allocation.raw) // 2
    size = half // allocation.num_blocks
    for layer in allocation.layers:
        for block in range(allocation.num_blocks):
            for value in (False, True):
                first = value * half + block * size
                assert addressed(allocation, layer, block, value) == [*range(first, first + size)]
