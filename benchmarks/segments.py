# SPDX-License-Identifier: Apache-2.0
"""Splitting a batch into segments and building its metadata, beside what CPU_ATTN builds for the
same batch, for the batch as it is cut, and beside the attention that the metadata is for."""

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Pairs, Row, at_most, measure
from benchmarks.kernels import GEMMA3_4B, Layer, kernels, prompt

TOPIC = "metadata"
PROFILE = (
    "Metadata: a fifth is the child's own build, a sixth reading the ranges out of Python's "
    "tuples, the rest some sixty calls of numpy at 0.5 to 5 us. So a batch is cut once for all "
    "layers, in rows, with few passes; the causal metadata is built only when a model asks for it; "
    "small gathers go through numpy, since torch's threads take longer to meet than to copy."
)
NUM_REQUESTS, NUM_IMAGES, NUM_TOKENS = 64, 8, 8 * 280
ATTENDED = 2
"""Requests whose attention is measured; it is in proportion to their number."""


def run(quick: bool) -> Iterator[Row]:
    """Each dtype, with full attention and a window."""
    for dtype in ("bfloat16",) if quick else ("float32", "bfloat16"):
        for window in (None,) if quick else (None, 1024):
            yield from _rows(dtype, window, quick)


def _rows(dtype: str, window: int | None, quick: bool) -> Iterator[Row]:
    requests = [prompt(NUM_TOKENS, NUM_IMAGES)] * NUM_REQUESTS
    ours, stock = kernels(GEMMA3_4B, dtype, window, requests)
    common, _ = ours.metadata(requests, np.random.default_rng(0))
    cut = _as_cut(ours.builder, common)
    name = f"{NUM_REQUESTS} requests, {NUM_IMAGES} images each, {dtype}"
    name += f", window {window}" if window else ""
    pairs, seconds = (5, 0.002) if quick else (41, 0.01)
    build = functools.partial(ours.builder.build, 0, common)
    stock_build = functools.partial(stock.builder.build, 0, common)

    def least() -> None:
        _read(common.mm_req_doc_ranges or {})
        stock.builder.build(0, cut)

    of_batch = measure(build, stock_build, pairs=pairs, seconds=seconds)
    floor = measure(least, stock_build, pairs=pairs, seconds=seconds)
    yield of_batch.row(
        TOPIC,
        name,
        "CPU_ATTN's build, not cut",
        of_batch.slowdown,
        target=at_most(2),
        floor=(
            f"The floor is {statistics.median(floor.slowdown):.1f}x: CPU_ATTN's own build of the "
            f"batch as it is cut, with {cut.num_reqs} requests for {NUM_REQUESTS}, and one pass "
            f"over the {NUM_REQUESTS * NUM_IMAGES} ranges in Python's tuples. The rest is calls "
            "of numpy on short arrays, each with its fixed cost."
        ),
    )
    yield floor.row(
        TOPIC, f"{name}: floor, the cut batch's own build and a pass over the ranges",
        "CPU_ATTN's build, not cut", floor.slowdown,
    )  # fmt: skip
    of_cut = measure(
        build, functools.partial(stock.builder.build, 0, cut), pairs=pairs, seconds=seconds
    )
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


def _read(ranges: Mapping[int, Sequence[tuple[int, int]]]) -> list[int]:
    return [*itertools.chain.from_iterable(itertools.chain.from_iterable(ranges.values()))]


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
