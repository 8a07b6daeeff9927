# SPDX-License-Identifier: Apache-2.0
"""Image ranges as nobody would send them in good faith. They decide how a batch is routed and
cut, so they must cost no more than their number and reach nothing but their own request."""

import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.plugins import load_general_plugins
from vllm.plugins.composite_attention.scheduling import WholeImageScheduler
from vllm.v1.attention.backends import prefix_segments
from vllm.v1.attention.backends.composite import (
    PrefillDecodeAttentionRouting,
    requires_mm_prefix,
)
from vllm.v1.attention.backends.cpu_prefix_attn import CPUPrefixAttentionBackend
from vllm.v1.attention.backends.prefix_segments import Segments, split_into_segments
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.attn_utils import compute_mm_prefix_ranges

from tests.v1.attention.cpu_kernel import KernelUnderTest, Request, make_config
from tests.v1.attention.mock_children import batch
from tests.v1.attention.mock_children import make_config as mock_config

load_general_plugins()

Images = list[tuple[int, int]]
FAR = 2**63 - 1
FEW, MANY = 2048, 8192
"""Tokens of a small and of a large prefill, of a quarter as many and as many images."""
LINEAR = 1.2 * MANY / FEW


def images_of_one_token(length: int) -> Images:
    return [(at, at) for at in range(length)]


def images_of_two_tokens(length: int) -> Images:
    return [(at, at + 1) for at in range(0, length - 1, 2)]


def images_of_every_length(length: int) -> Images:
    """2 tokens, 3 tokens, 4 tokens, ...: as many different windows as can be."""
    images, start = [], 0
    for tokens in range(2, length):
        if start + tokens > length:
            break
        images.append((start, start + tokens - 1))
        start += tokens
    return images


def one_image(length: int) -> Images:
    return [(0, length - 1)]


SHAPES = [images_of_one_token, images_of_two_tokens, images_of_every_length, one_image]
WINDOWS = [
    pytest.param(None, True, id="full"),
    pytest.param(1, True, id="window"),
    pytest.param(1, False, id="unclamped window"),
]


def named(shape: Any) -> str:
    return shape.__name__.replace("_", " ")


def split(lengths: Sequence[int], images: Sequence[Images], **mask: Any) -> Segments:
    """Of prefills of these lengths."""
    starts = np.cumsum([0, *lengths])
    return split_into_segments(starts, np.array(lengths), dict(enumerate(images)), **mask)


def calls_of(work: Callable[[], object]) -> int:
    """How many functions `work` calls, of Python and of C."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def bytes_of(work: Callable[[], object]) -> int:
    """The most that `work` holds at once, of Python's and numpy's."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", SHAPES, ids=named)
@pytest.mark.parametrize(("window", "clamped"), WINDOWS)
@pytest.mark.parametrize("cost", [calls_of, bytes_of], ids=["calls", "bytes"])
def test_cutting_costs_no_more_than_in_proportion(
    shape: Callable[[int], Images], window: int | None, clamped: bool, cost: Any
) -> None:
    few, many = (
        cost(partial(split, [n], [shape(n)], sliding_window=window, clamped=clamped))
        for n in (FEW, MANY)
    )
    assert many <= LINEAR * few


@pytest.mark.parametrize("shape", SHAPES, ids=named)
@pytest.mark.parametrize(("window", "clamped"), WINDOWS)
def test_there_are_no_more_segments_than_queries(
    shape: Callable[[int], Images], window: int | None, clamped: bool
) -> None:
    segments = split([MANY], [shape(MANY)], sliding_window=window, clamped=clamped)
    assert len(segments.request) <= MANY
    assert segments.num_rows.min() >= 1
    assert segments.num_rows.sum() == MANY


def test_images_of_one_token_cut_nothing() -> None:
    assert len(split([MANY], [images_of_one_token(MANY)]).request) == 1


class Counted(list[tuple[int, int]]):
    """Image ranges that count how often one is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for image in super().__iter__():
            Counted.looks += 1
            yield image


@pytest.mark.parametrize("unclamped", [False, True])
def test_routing_looks_at_each_range_once(unclamped: bool) -> None:
    # Wholly in the past, so that none of them ends the search.
    common = batch([(MANY + 2, 2)] * 3)
    common.mm_req_doc_ranges = {i: Counted(images_of_two_tokens(MANY - 8)) for i in range(3)}
    Counted.looks = 0
    assert requires_mm_prefix(common, unclamped_window=unclamped) is False
    assert Counted.looks <= sum(map(len, common.mm_req_doc_ranges.values()))


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
@pytest.mark.parametrize("shape", [images_of_two_tokens, images_of_every_length], ids=named)
@pytest.mark.parametrize(("window", "clamped"), WINDOWS)
def test_metadata_grows_no_more_than_in_proportion(
    tmp_path: Path,
    shape: Callable[[int], Images],
    window: int | None,
    clamped: bool,
    others: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_segments, "LARGEST_TABLE", 0)  # as for far larger ones
    config = make_config(tmp_path, torch.float32)
    held, calls = [], []
    for length in (FEW, MANY):
        kernel = KernelUnderTest(
            config,
            CPUPrefixAttentionBackend,
            windows=(window,),
            clamped=clamped,
            num_blocks=2 * length // 32 + 2,
        )
        requests = [Request(length, length, shape(length))] * (1 + others)
        common, _ = kernel.metadata(requests, np.random.default_rng(0))
        build = partial(kernel.builder.build, 0, common)
        build()
        held.append(bytes_of(build))
        calls.append(calls_of(build))
    assert held[1] <= LINEAR * held[0]
    assert calls[1] <= LINEAR * calls[0]


@pytest.mark.parametrize(("window", "clamped"), WINDOWS[:2])
@pytest.mark.parametrize("largest_table", [0, 1 << 20], ids=["apart", "together"])
def test_cut_apart_or_together_the_answer_is_the_same(
    tmp_path: Path,
    window: int | None,
    clamped: bool,
    largest_table: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_segments, "LARGEST_TABLE", largest_table)
    config = make_config(tmp_path, torch.float32)
    kernel = KernelUnderTest(config, CPUPrefixAttentionBackend, windows=(window,), clamped=clamped)
    requests = [
        Request(70, 70, images_of_two_tokens(70)),
        Request(90, 1, [(3, 9)]),
        Request(80, 40, images_of_every_length(80)),
        Request(33, 12, [(10, 32)]),
        Request(64, 64),
    ]
    assert max(kernel.errors(requests)) < 1e-5


AT_THE_ENDS: dict[str, Images] = {
    "beyond the sequence": [(60, 5000)],
    "behind the sequence": [(64, 200), (300, 400)],
    "as far as integers go": [(60, FAR)],
    "nothing but far": [(FAR - 1, FAR)],
    "the whole sequence": [(0, 63)],
    "the first and the last tokens": [(0, 1), (62, 63)],
    "reversed": [(40, 20), (63, 0)],
    "of one token, many times the same": [(5, 5)] * 4000,
}


@pytest.mark.parametrize("images", AT_THE_ENDS.values(), ids=AT_THE_ENDS)
@pytest.mark.parametrize("query_len", [64, 20, 2])
@pytest.mark.parametrize("largest_table", [0, 1 << 20], ids=["apart", "together"])
def test_no_key_of_another_request_is_reached(
    tmp_path: Path,
    images: Images,
    query_len: int,
    largest_table: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All other blocks hold what would drown the request's own keys and values."""
    monkeypatch.setattr(prefix_segments, "LARGEST_TABLE", largest_table)
    config = make_config(tmp_path, torch.float32)
    kernel = KernelUnderTest(config, CPUPrefixAttentionBackend, windows=(None, 24))
    kernel.elsewhere = 1e4
    requests = [Request(64, query_len, images), Request(50, 1), Request(90, 30, [(65, 80)])]
    there = [(a, min(b, 63)) for a, b in images if a < min(b, 63)]
    judged = [Request(64, query_len, there), *requests[1:]]
    assert max(kernel.errors(requests, judged_as=judged)) < 1e-5


@pytest.mark.parametrize("images", AT_THE_ENDS.values(), ids=AT_THE_ENDS)
def test_no_segment_ends_behind_its_request(images: Images) -> None:
    lengths = [64, 50]
    segments = split(lengths, [images, images])
    assert (segments.end <= np.array(lengths)[segments.request]).all()
    assert (segments.end >= segments.num_rows).all()


@pytest.mark.parametrize("cost", [calls_of, bytes_of], ids=["calls", "bytes"])
def test_images_in_the_worst_order_cost_no_more_than_in_proportion(cost: Any) -> None:
    few, many = (cost(partial(split, [n], [images_of_two_tokens(n)[::-1]])) for n in (FEW, MANY))
    assert many <= LINEAR * few


MALFORMED: list[list[Any]] = [
    [(1, 2, 3), (4,)],  # four numbers, as two pairs have
    [(1, 2, 3), (5, 6, 7)],
    [(1,), (2, 3, 4)],
    [()],
    [(1, 2.5)],
    [(None, 3)],
    ["ab"],
    [7],
    [(0, 2**63)],
]


@pytest.mark.parametrize("images", MALFORMED, ids=repr)
def test_what_is_no_range_is_refused_and_never_paired_anew(images: list[Any]) -> None:
    with pytest.raises(ValueError, match="is no image range of request 1"):
        split([12, 12], [[(1, 2)], images])


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([(2, 6), (6, 9)], "overlap"),
        ([(2, 9), (3, 4)], "overlap"),
        ([(2, 5), (2, 5)], "overlap"),
        ([(-3, 4)], "starts before the sequence"),
        ([(-FAR, FAR)], "starts before the sequence"),
    ],
)
def test_ranges_without_a_meaning_are_refused(images: Images, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        split([12, 12], [[], images])


def test_ranges_of_requests_that_are_not_there_count_for_nothing() -> None:
    segments = split([12], [[], [(1, 5)], [(2, 9)]])
    assert segments.causal.tolist() == [True]
    common = batch([(12, 12)], {3: [(1, 5)]})
    assert requires_mm_prefix(common) is False


@pytest.mark.parametrize("images", [[(2, 9)], []], ids=["image", "text"])
def test_lengths_of_padding_behind_the_requests_are_not_read(images: Images) -> None:
    starts, lengths = np.array([0, 12, 13]), np.array([12, 40, 10**6, -1])
    padded = split_into_segments(starts, lengths, {0: images})
    exact = split_into_segments(starts, lengths[:2], {0: images})
    for one, other in zip(padded, exact, strict=True):
        assert one.tolist() == other.tolist()
    common = batch([(12, 12), (40, 1)], {0: images})
    common.seq_lens_cpu_upper_bound = torch.from_numpy(lengths.astype(np.int32))
    assert requires_mm_prefix(common) is bool(images)


def test_a_padded_batch_is_built_like_the_exact_one(tmp_path: Path) -> None:
    config = make_config(tmp_path, torch.float32)
    kernel = KernelUnderTest(config, CPUPrefixAttentionBackend)
    requests = [Request(40, 40, [(5, 20)]), Request(50, 1)]
    common, _ = kernel.metadata(requests, np.random.default_rng(0))
    exact = kernel.builder.build(0, common)
    common.seq_lens_cpu_upper_bound = torch.tensor([40, 50, 0, 999], dtype=torch.int32)
    padded = kernel.builder.build(0, common)
    [(mask, batch_of)] = exact.batches.items()
    assert padded.batches[mask].segments.seq_lens.tolist() == batch_of.segments.seq_lens.tolist()


def test_phases_of_padding_behind_the_requests_are_not_read() -> None:
    routing = PrefillDecodeAttentionRouting([], mock_config())
    common = batch([(12, 1), (40, 3)])
    common.is_prefilling = torch.tensor([False, False, True, True])
    assert routing.select(common) == 1


@pytest.mark.parametrize(
    "position",
    [
        PlaceholderRange(offset=3, length=4, is_embed=torch.zeros(4, dtype=torch.bool)),
        PlaceholderRange(offset=3, length=0, is_embed=torch.zeros(0, dtype=torch.bool)),
    ],
    ids=["a placeholder without embeddings", "a placeholder without tokens"],
)
def test_an_image_without_embeddings_has_no_range(position: PlaceholderRange) -> None:
    features: Any = {"a": [SimpleNamespace(modality="image", mm_position=position)]}
    assert compute_mm_prefix_ranges(["a"], features) == {0: []}


def test_a_step_looks_at_the_tokens_of_one_image_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    class Position(PlaceholderRange):
        def extract_embeds_range(self) -> Images:
            nonlocal looks
            looks += 1
            return [(self.offset, self.offset + self.length - 1)]

    request = SimpleNamespace(
        has_encoder_inputs=True,
        num_prompt_tokens=20_000,
        mm_features=[
            SimpleNamespace(modality="image", mm_position=Position(offset=at, length=4))
            for at in range(0, 20_000, 4)
        ],
    )
    monkeypatch.setattr(
        Scheduler, "_try_schedule_encoder_inputs", lambda self, r, computed, new, *rest, **kw: new
    )
    scheduler: Any = WholeImageScheduler.__new__(WholeImageScheduler)
    scheduler.largest_step = 50
    assert scheduler._try_schedule_encoder_inputs(request, 1000, 50, 100) == 48
    assert looks == 1
