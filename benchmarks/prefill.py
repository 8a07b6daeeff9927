# SPDX-License-Identifier: Apache-2.0
"""One layer's prefill of a prompt with images, beside stock CPU_ATTN (causal, so it attends fewer
query-key pairs) and beside dense-mask SDPA, which is what a kernel without segments would need;
then text through a sliding-window layer."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import peak
from benchmarks.harness import Pairs, Row, at_least, at_most, measure
from benchmarks.kernels import GEMMA3_4B, GEMMA3_27B, Layer, Shape, kernels, prompt
from tests.dense_reference import image_mask
from tests.v1.attention.cpu_kernel import Request

TOPIC = "image prefill"
PROFILE = (
    "Prefill: all of the time is CPU_ATTN's kernel, so segments must add no work to it: an image "
    "is one segment, a window keeps its bounds, and a piece of an image longer than the window is "
    "attended with the narrowest window that holds it. A sliding layer was planned without its "
    "window, since CPU_ATTN's builder knows only its own impl; the child looks into the composite."
)
SIZES = ((2048, 4), (4096, 8), (8192, 16))
WINDOW = 1024
LONG_IMAGES = (1024, 2048, 4096)
"""Tokens of images longer than a window of `SHORT_WINDOW`."""
SHORT_WINDOW = 256


def run(quick: bool) -> Iterator[Row]:
    """Both shapes at every length, with full attention and a window, in both dtypes; then images
    longer than the window."""
    for shape in (GEMMA3_4B,) if quick else (GEMMA3_4B, GEMMA3_27B):
        for dtype in ("float32", "bfloat16"):
            for window in (None,) if quick and dtype == "float32" else (None, WINDOW):
                for num_tokens, num_images in SIZES[:1] if quick else SIZES:
                    yield from _rows(shape, dtype, window, num_tokens, num_images, quick)
    yield from _long_images(quick)
    yield from _text(quick)


def _rows(
    shape: Shape, dtype: str, window: int | None, num_tokens: int, num_images: int, quick: bool
) -> Iterator[Row]:
    request = prompt(num_tokens, num_images)
    ours, stock = _layers(shape, dtype, window, request)
    share = pairs_attended(request, window) / pairs_attended(
        Request(num_tokens, num_tokens), window
    )
    series = f"{shape.name}, {dtype}" + (f", window {window}" if window else "")
    what = f"{series}, {num_tokens} tokens, {num_images} images"
    pairs = 3 if quick else 15
    label = series.removeprefix(f"{shape.name}, ")

    def place(beside: str) -> dict[str, Any]:
        return {"panel": f"{shape.name}, {beside} by tokens", "series": label, "x": num_tokens}

    taken = measure(ours.attend, stock.attend, pairs=pairs)
    yield taken.row(
        TOPIC,
        f"{what}, per query-key pair ({share:.3f} as many)",
        "stock CPU_ATTN, causal",
        taken.slowdown / share,
        unit="ms",
        target=at_most(1.03),
        **place("CPU_ATTN (causal)"),
    )
    if num_tokens == (SIZES[0] if quick else SIZES[1])[0]:
        yield _beside_the_peak(what, shape, dtype, pairs_attended(request, window), taken)
    dense = Dense(ours, request, window)
    error = float((dense.attend() - ours.attend()).abs().max() / ours.output.abs().max())
    assert error < (1e-4 if dtype == "float32" else 3e-2), error
    taken = measure(ours.attend, dense.attend, pairs=2 if quick else 5, limit=4)
    wanted = 4.5 if window and num_tokens >= 4096 else 2
    yield taken.row(
        TOPIC,
        what,
        "dense-mask SDPA",
        taken.speedup,
        unit="ms",
        target=at_least(wanted),
        floor=f"The dense mask makes {num_tokens**2 / pairs_attended(request, window):.2f} times "
        "as many pairs; at the same speed a pair that is the ratio.",
        **place("dense-mask SDPA"),
    )


def _beside_the_peak(what: str, shape: Shape, dtype: str, attended: int, taken: Pairs) -> Row:
    """The operations of the pairs attended, two products of a multiply and an add each, at the
    speed of a matrix product."""
    operations = 4 * attended * shape.num_heads * shape.head_size
    floor = Pairs(taken.ours, np.full_like(taken.ours, operations / peak.operations(dtype)))
    return floor.row(
        TOPIC,
        what,
        f"{operations / 1e9:.0f} GFLOP at the matrix product's measured peak",
        floor.slowdown,
        unit="ms",
    )


def _layers(shape: Shape, dtype: str, window: int | None, request: Request) -> tuple[Layer, Layer]:
    ours, stock = (Layer(k, [request]) for k in kernels(shape, dtype, window, [request]))
    ours.build()
    stock.build()
    return ours, stock


def pairs_attended(request: Request, window: int | None, chunk: int = 1024) -> int:
    """Query-key pairs of the dense mask, counted some queries at a time."""
    counted = 0
    key = torch.arange(request.seq_len)
    for first in range(0, request.seq_len, chunk):
        query = torch.arange(first, min(first + chunk, request.seq_len))[:, None]
        seen = key <= query
        for start, stop in request.images:
            seen |= (query >= start) & (query <= stop) & (key >= start) & (key <= stop)
        if window:
            seen &= key > query - window
        counted += int(seen.sum())
    return counted


class Dense:
    """The same layer by torch's SDPA with a dense mask; the mask is there already."""

    def __init__(self, layer: Layer, request: Request, window: int | None) -> None:
        parts = (layer.query, layer.key, layer.value)
        self.query, self.key, self.value = (p.transpose(0, 1)[None].contiguous() for p in parts)
        self.mask = image_mask(request.seq_len, request.images, window=window)[None, None]

    def attend(self) -> torch.Tensor:
        """(tokens, heads, head_size), as the layer's output."""
        attended = torch.nn.functional.scaled_dot_product_attention(
            self.query, self.key, self.value, attn_mask=self.mask, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


def _long_images(quick: bool) -> Iterator[Row]:
    """Images longer than the window: what one costs beside one of half its tokens, divided by how
    many times as many pairs of its queries and keys there are."""
    sizes: Sequence[int] = LONG_IMAGES[:2] if quick else LONG_IMAGES
    for dtype in ("bfloat16",) if quick else ("float32", "bfloat16"):
        for half, size in itertools.pairwise(sizes):
            small, large = (
                _layers(GEMMA3_4B, dtype, SHORT_WINDOW, prompt(n + 64, 1, n))[0]
                for n in (half, size)
            )
            taken = measure(large.attend, small.attend, pairs=3 if quick else 11, limit=6)
            yield taken.row(
                TOPIC,
                f"{dtype}, an image of {size} tokens, window {SHORT_WINDOW}: cost beside half of "
                "it, per query x key of the image",
                f"an image of {half}",
                taken.slowdown / (size / half) ** 2,
                unit="ms",
                target=at_most(1),
                panel="image longer than the window by its tokens",
                series=dtype,
                x=size,
            )


def _text(quick: bool) -> Iterator[Row]:
    """Text through a sliding-window layer, metadata and attention."""
    size = 2048 if quick else 4096
    steps = {
        f"prefill of {size} tokens": [Request(size, size)],
        f"decode of 32 requests of {size} tokens": [Request(size, 1)] * 32,
    }
    for dtype in ("bfloat16",) if quick else ("float32", "bfloat16"):
        for step, requests in steps.items():
            ours, stock = (Layer(k, requests) for k in kernels(GEMMA3_4B, dtype, WINDOW, requests))
            taken = measure(
                ours.step,
                stock.step,
                pairs=5 if quick else 41,
                seconds=0.0 if quick else 0.02,
                limit=6,
            )
            yield taken.row(
                "sliding-window layer",
                f"text only, {dtype}, {step}",
                "stock CPU_ATTN",
                taken.speedup,
                unit="ms",
                target=at_least(0.99),
            )
