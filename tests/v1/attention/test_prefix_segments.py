"""The split into segments, against the dense mask: a segment's queries must see exactly the keys
that the mask gives them, under the semantics of a kernel with a symmetric window."""

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.prefix_segments import Segments, split_into_segments

from tests.dense_reference import image_mask

Requests = list[tuple[int, int, list[tuple[int, int]]]]
"""(seq_len, query_len, images) of each request."""


def split(requests: Requests, window: int | None = None, clamped: bool = True) -> Segments:
    starts = np.cumsum([0] + [query_len for _, query_len, _ in requests])
    lengths = np.array([seq_len for seq_len, _, _ in requests])
    ranges = {i: images for i, (_, _, images) in enumerate(requests)}
    return split_into_segments(starts, lengths, ranges, sliding_window=window, clamped=clamped)


def attended(segments: Segments, requests: Requests, window: int | None) -> list[torch.Tensor]:
    """(query_len, seq_len) bool per request: the keys that a kernel attends which is given the
    segments as requests. Its window of `w` tokens reaches `w - 1` keys to both sides, its causal
    flag hides keys to the right, and a segment's last query sits at its last key."""
    seen = [torch.zeros(query_len, seq_len, dtype=torch.bool) for seq_len, query_len, _ in requests]
    starts = np.cumsum([0] + [query_len for _, query_len, _ in requests])
    for request, first_row, num_rows, end, causal, own_window in zip(*segments, strict=True):
        reach = own_window or window
        for row in range(num_rows):
            position = end - num_rows + row
            key = torch.arange(requests[request][0])
            visible = key < end
            if causal:
                visible &= key <= position
            if reach is not None:
                visible &= (key > position - reach) & (key < position + reach)
            seen[request][first_row - starts[request] + row] |= visible
    return seen


def assert_exact(requests: Requests, window: int | None = None, clamped: bool = True) -> None:
    segments = split(requests, window, clamped)
    rows = [
        row
        for f, n in zip(segments.first_row, segments.num_rows, strict=True)
        for row in range(f, f + n)
    ]
    assert rows == list(range(sum(query_len for _, query_len, _ in requests)))
    given = attended(segments, requests, window)
    for (seq_len, query_len, images), seen in zip(requests, given, strict=True):
        # Of images that go on after this chunk, only the tokens that are there count.
        there = [(start, min(stop, seq_len - 1)) for start, stop in images if start < stop]
        expected = image_mask(seq_len, there, window=window, clamped=clamped)
        assert torch.equal(seen, expected[seq_len - query_len :])


EDGES: dict[str, Requests] = {
    "no image": [(9, 9, [])],
    "one image between text": [(20, 20, [(5, 12)])],
    "image first": [(20, 20, [(0, 7)])],
    "image last": [(20, 20, [(12, 19)])],
    "image alone": [(8, 8, [(0, 7)])],
    "adjacent images": [(20, 20, [(3, 8), (9, 14)])],
    "images out of order": [(30, 30, [(20, 25), (2, 9)])],
    "chunk begins inside an image": [(20, 10, [(5, 14)])],
    "chunk ends inside an image": [(12, 12, [(5, 19)])],
    "chunk lies inside an image": [(12, 4, [(5, 19)])],
    "past image": [(20, 5, [(2, 9)])],
    "image in the future": [(10, 10, [(14, 19)])],
    "one-token image": [(10, 10, [(4, 4)])],
    "reversed range": [(10, 10, [(7, 3)])],
    "decode after an image": [(20, 1, [(2, 9)])],
    "decode of an image's last token": [(10, 1, [(2, 9)])],
    "request without queries": [(20, 0, [(2, 9)]), (10, 10, [(1, 5)])],
    "padding rows": [(10, 10, [(1, 5)]), (0, 0, []), (0, 0, [])],
    "mixed batch": [
        (30, 30, [(4, 9), (15, 20)]),
        (50, 1, [(3, 9)]),
        (40, 12, []),
        (25, 7, [(20, 30)]),
    ],
}


@pytest.mark.parametrize("requests", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("window", [None, 1, 3, 7, 64])
@pytest.mark.parametrize("clamped", [True, False], ids=["clamped", "unclamped"])
def test_segments_attend_what_the_mask_says(
    requests: Requests, window: int | None, clamped: bool
) -> None:
    assert_exact(requests, window, clamped)


@pytest.mark.parametrize("seed", range(300))
def test_segments_of_random_batches_attend_what_the_mask_says(seed: int) -> None:
    random = np.random.default_rng(seed)
    requests: Requests = []
    for _ in range(random.integers(1, 7)):
        seq_len = int(random.integers(1, 90))
        cuts = np.unique(random.integers(0, seq_len + 10, 2 * random.integers(0, 5)))
        images = [(int(a), int(b) - 1) for a, b in zip(cuts[0::2], cuts[1::2], strict=False)]
        random.shuffle(images)
        requests.append((seq_len, int(random.integers(0, seq_len + 1)), images))
    if not any(query_len for _, query_len, _ in requests):
        requests.append((5, 5, [(1, 3)]))
    window = None if seed % 3 == 0 else int(random.integers(1, 40))
    assert_exact(requests, window, clamped=bool(seed % 2))


def test_text_only_is_one_causal_segment_a_request() -> None:
    segments = split([(30, 30, []), (12, 1, [])])
    assert segments.request.tolist() == [0, 1]
    assert segments.end.tolist() == [30, 12]
    assert segments.causal.tolist() == [True, True]


def test_an_image_longer_than_the_window_needs_a_logarithm_of_pieces() -> None:
    # Lengths 8, 16, 32, 64, ... towards its start: 1000 = 8 + 16 + ... + 256 + 496
    segments = split([(1000, 1000, [(0, 999)])], window=8)
    assert segments.num_rows.tolist() == [496, 256, 128, 64, 32, 16, 8]
    assert segments.window.tolist() == [512, 256, 128, 64, 32, 16, 8]


@pytest.mark.parametrize(
    "images",
    [[(2, 6), (6, 9)], [(5, 9), (2, 6)], [(2, 9), (4, 5)]],
    ids=["touch", "order", "inside"],
)
def test_overlapping_images_are_refused(images: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"Image ranges .* of request 1 overlap"):
        split([(12, 12, []), (12, 12, images)])


def test_an_image_before_the_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(-3, 4\) of request 0 starts before the sequence"):
        split([(12, 12, [(-3, 4)])])
