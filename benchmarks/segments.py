"""Splitting a batch into segments and building its metadata, beside what CPU_ATTN builds for the
same batch, for the batch as it is cut, and beside the attention that the metadata is for."""

import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Pairs, Row, at_most, measure
from benchmarks.kernels import GEMMA3_4B, Layer, kernels, prompt

TOPIC = "metadata"
NUM_REQUESTS, NUM_IMAGES, NUM_TOKENS = 64, 8, 8 * 280
ATTENDED = 2
"""Requests whose attention is measured; it is in proportion to their number."""


def run(quick: bool) -> Iterator[Row]:
    """Each dtype, with full attention and a window."""
    for dtype in ("float32", "bfloat16"):
        for window in (None, 1024):
            yield from _rows(dtype, window, quick)


def _rows(dtype: str, window: int | None, quick: bool) -> Iterator[Row]:
    blocks = NUM_REQUESTS * -(-NUM_TOKENS // 32) + 2
    ours, stock = kernels(GEMMA3_4B, dtype, window, num_blocks=blocks)
    requests = [prompt(NUM_TOKENS, NUM_IMAGES)] * NUM_REQUESTS
    common, _ = ours.metadata(requests, np.random.default_rng(0))
    cut = _as_cut(ours.builder, common)
    name = f"{NUM_REQUESTS} requests, {NUM_IMAGES} images each, {dtype}"
    name += f", window {window}" if window else ""
    pairs = 5 if quick else 101
    build = functools.partial(ours.builder.build, 0, common)
    of_batch = measure(build, functools.partial(stock.builder.build, 0, common), pairs=pairs)
    yield of_batch.row(
        TOPIC, name, "CPU_ATTN's build, not cut", of_batch.slowdown, target=at_most(2)
    )
    of_cut = measure(build, functools.partial(stock.builder.build, 0, cut), pairs=pairs)
    yield of_cut.row(TOPIC, name, "CPU_ATTN's build, cut already", of_cut.slowdown)

    layer = Layer(ours, requests[:ATTENDED])
    layer.build()
    layer.attend()
    began = time.perf_counter()
    layer.attend()
    attention = (time.perf_counter() - began) * NUM_REQUESTS / ATTENDED
    share = Pairs(of_batch.ours, np.full_like(of_batch.ours, attention))
    yield share.row(
        TOPIC, name, "attention of one layer", 100 * share.slowdown, target=at_most(2, " %")
    )


def _as_cut(builder: Any, common: Any) -> Any:
    """The batch as this project hands it to CPU_ATTN's builder, with a request a segment."""
    segments = builder.children[0]
    seen: list[Any] = []

    def spy(*args: Any) -> Any:
        seen.append(type(segments)._as_requests(segments, *args))
        return seen[-1]

    segments._as_requests = spy
    segments.build(0, common)
    del segments._as_requests
    return seen[0]
