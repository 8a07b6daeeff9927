# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a prefill with 16 images, metadata and one layer's attention, by tracing the
allocations of torch, numpy and Python; beside stock CPU_ATTN and dense-mask SDPA."""

from collections.abc import Iterator

import torch

from benchmarks.harness import Row, Target, at_most
from benchmarks.kernels import BLOCK_SIZE, GEMMA3_4B, Layer, kernels, prompt
from benchmarks.prefill import WINDOW, Dense
from tests.allocations import allocations

TOPIC = "peak memory"
PROFILE = (
    "Memory: the largest piece was the block table, copied for each segment as wide as the model's "
    "longest text; now only the columns that the batch reads are."
)
NUM_TOKENS, NUM_IMAGES = 8192, 16
LONGEST = 131072
"""Tokens that the block table has room for, as for a published Gemma 3."""


def run(quick: bool) -> Iterator[Row]:
    """One prefill; the ratio is bytes a token over the other's."""
    yield from _rows("bfloat16", None, dense_too=True)
    for dtype, window in () if quick else (("bfloat16", WINDOW), ("float32", None)):
        yield from _rows(dtype, window)


def _rows(dtype: str, window: int | None, dense_too: bool = False) -> Iterator[Row]:
    request = prompt(NUM_TOKENS, NUM_IMAGES)
    ours, stock = (Layer(k, [request]) for k in kernels(GEMMA3_4B, dtype, window, [request]))
    for layer in (ours, stock):
        table = layer.common.block_table_tensor
        wide = torch.nn.functional.pad(table, (0, LONGEST // BLOCK_SIZE - table.shape[1]))
        layer.common = layer.common.replace(block_table_tensor=wide)

    def dense() -> torch.Tensor:
        return Dense(ours, request, window).attend()

    name = f"{NUM_TOKENS} tokens, {NUM_IMAGES} images, {dtype}"
    name += f", window {window}" if window else ""
    taken = allocations(ours.step).peak
    comparisons = [("stock CPU_ATTN", allocations(stock.step).peak, at_most(16, " B/token"))]
    if dense_too:
        comparisons.append(("dense-mask SDPA", allocations(dense).peak, at_most(0, " B/token")))
    for against, other, target in comparisons:
        yield _row(name, against, taken, other, target)


def _row(name: str, against: str, ours: int, theirs: int, target: Target) -> Row:
    more = (ours - theirs) / NUM_TOKENS
    return Row(TOPIC, name, against, ours / 1024, theirs / 1024, "KiB", more, more, more, 1, target)
