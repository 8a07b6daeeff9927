# SPDX-License-Identifier: Apache-2.0
"""Routing and cutting of random batches, against the dense mask: what makes either safe."""

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.composite import (
    MMPrefixAttentionRouting,
    PrefillDecodeAttentionRouting,
)
from vllm.v1.attention.backends.prefix_segments import Segments, split_into_segments

from tests.dense_reference import image_mask
from tests.v1.attention.mock_children import CAUSAL, GENERAL, batch, make_config


class Row(NamedTuple):
    """A request, maybe without queries, and its image ranges, some of which do not count."""

    seq_len: int
    query_len: int
    images: list[tuple[int, int]]

    def opened(self, window: int | None, clamped: bool) -> bool:
        """Whether some scheduled query sees a key that the causal mask hides."""
        masks = [
            image_mask(self.seq_len, images, window=window, clamped=clamped)
            for images in (self.images, [])
        ]
        masked, causal = (mask[self.seq_len - self.query_len :] for mask in masks)
        return not torch.equal(masked, causal)

    def queries_in_an_image(self) -> bool:
        """Whether a scheduled query lies in an image of two tokens or more."""
        queries = range(self.seq_len - self.query_len, self.seq_len)
        return any(
            start <= q <= stop for start, stop in self.images if start < stop for q in queries
        )


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Ranges in any order: past, live, ahead of the sequence, adjacent, of one token, empty; often
    with an end at or next to an end of the scheduled queries, where decisions turn."""
    seq_len = draw(st.integers(0, 40))
    query_len = draw(st.integers(0, seq_len) | st.just(min(seq_len, 1)) | st.just(seq_len))
    ends = [seq_len - query_len, seq_len]
    turns = sorted({max(0, end + offset) for end in ends for offset in (-1, 0, 1, 2)})
    places = st.integers(0, seq_len + 12) | st.sampled_from(turns) | st.sampled_from(turns)
    cuts = sorted(draw(st.sets(places, max_size=6)))
    images = list(zip(cuts[::2], [cut - 1 for cut in cuts[1::2]], strict=False))
    nothing = draw(st.lists(places.map(lambda at: (at, at)), max_size=1))
    return Row(seq_len, query_len, draw(st.permutations(images + nothing)))


BATCHES = st.lists(rows(), min_size=1, max_size=3)
WINDOWS = st.none() | st.integers(1, 45)


def metadata(requests: list[Row], **fields: Any) -> CommonAttentionMetadata:
    images = {index: request.images for index, request in enumerate(requests) if request.images}
    return batch([(r.seq_len, r.query_len) for r in requests], images, **fields)


def layers(*masks: tuple[int | None, bool]) -> dict[str, object]:
    """A layer for each window and whether it clamps images to it."""
    return {
        f"layer {index}": SimpleNamespace(
            sliding_window=window, mm_prefix_clamp_sliding_window=clamped
        )
        for index, (window, clamped) in enumerate(masks)
    }


@given(BATCHES, st.lists(st.tuples(WINDOWS, st.booleans()), min_size=1, max_size=3))
def test_where_routing_is_causal_the_image_mask_is_the_causal_mask(
    requests: list[Row], masks: list[tuple[int | None, bool]]
) -> None:
    """For each layer of the group; full attention has nothing to clamp to."""
    group = layers(*masks)
    policy = MMPrefixAttentionRouting(list(group), make_config(group))
    if policy.select(metadata(requests)) == CAUSAL:
        for window, clamped in masks:
            assert not any(request.opened(window, clamped) for request in requests)


@given(BATCHES, WINDOWS)
def test_where_no_window_is_unclamped_routing_is_general_only_if_needed(
    requests: list[Row], window: int | None
) -> None:
    group = layers((window, True))
    policy = MMPrefixAttentionRouting(list(group), make_config(group))
    needed = any(request.opened(window, clamped=True) for request in requests)
    assert policy.select(metadata(requests)) == (GENERAL if needed else CAUSAL)


@given(BATCHES, st.integers(1, 45))
def test_behind_an_unclamped_window_routing_is_general_for_every_query_in_an_image(
    requests: list[Row], window: int
) -> None:
    """The contract's exception: whether the image reaches behind the window is not asked."""
    group = layers((window, False))
    policy = MMPrefixAttentionRouting(list(group), make_config(group))
    counts = any(request.queries_in_an_image() for request in requests)
    assert policy.select(metadata(requests)) == (GENERAL if counts else CAUSAL)


@given(BATCHES, WINDOWS, st.booleans(), st.integers(0, 3), st.data())
def test_by_phase_the_general_child_serves_prefills_and_live_masks_alone(
    requests: list[Row],
    window: int | None,
    clamped: bool,
    speculative_tokens: int,
    data: st.DataObject,
) -> None:
    group = layers((window, clamped))
    config = make_config(
        group, speculative_config=SimpleNamespace(num_speculative_tokens=speculative_tokens)
    )
    policy = PrefillDecodeAttentionRouting(list(group), config)
    told = data.draw(
        st.none() | st.lists(st.booleans(), min_size=len(requests), max_size=len(requests))
    )
    phases = None if told is None else torch.tensor(told)
    variant = policy.select(metadata(requests, is_prefilling=phases))
    prefill = any(
        (request.query_len > 1 + speculative_tokens)
        if told is None
        else (told[index] and request.query_len > 1)
        for index, request in enumerate(requests)
    )
    if clamped or window is None:
        masked = any(request.opened(window, clamped=True) for request in requests)
    else:
        masked = any(request.queries_in_an_image() for request in requests)
    assert variant == (GENERAL if prefill or masked else CAUSAL)


def cut(requests: list[Row], window: int | None, clamped: bool) -> Segments:
    return split_into_segments(
        np.cumsum([0] + [request.query_len for request in requests]),
        np.array([request.seq_len for request in requests]),
        {index: request.images for index, request in enumerate(requests)},
        sliding_window=window,
        clamped=clamped,
    )


@given(BATCHES, WINDOWS, st.booleans())
def test_segments_cover_each_query_once_in_order(
    requests: list[Row], window: int | None, clamped: bool
) -> None:
    segments = cut(requests, window, clamped)
    covered = [
        (int(request), int(row))
        for request, first, count in zip(*segments[:3], strict=True)
        for row in range(first, first + count)
    ]
    owner = itertools.chain.from_iterable(
        [index] * request.query_len for index, request in enumerate(requests)
    )
    assert covered == [(index, row) for row, index in enumerate(owner)]
    assert (segments.num_rows >= 1).all()


@given(BATCHES, WINDOWS, st.booleans())
def test_segments_are_the_mask(requests: list[Row], window: int | None, clamped: bool) -> None:
    """A kernel that runs each as a request, whose last query is at its last key, attends the keys
    of the dense mask: up to the segment's end, up to the query if causal, and less than a window
    away on both sides."""
    attended = [torch.zeros(r.query_len, r.seq_len, dtype=torch.bool) for r in requests]
    starts = list(itertools.accumulate((r.query_len for r in requests), initial=0))
    for index, row, count, end, causal, wider in zip(
        *(column.tolist() for column in cut(requests, window, clamped)), strict=True
    ):
        position = torch.arange(end - count, end)[:, None]
        key = torch.arange(requests[index].seq_len)[None, :]
        seen = (key <= position) if causal else (key < end)
        if window is not None:
            seen = seen & ((key - position).abs() < (wider or window))
        first = row - starts[index]
        attended[index][first : first + count] = seen
    for request, found in zip(requests, attended, strict=True):
        mask = image_mask(request.seq_len, request.images, window=window, clamped=clamped)
        assert torch.equal(found, mask[request.seq_len - request.query_len :])
