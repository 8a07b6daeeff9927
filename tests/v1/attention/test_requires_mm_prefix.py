"""When a batch goes to the child with the image mask: safe against the dense masks, exact by the
contract's formula, and constant where graphs are replayed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.composite import MMPrefixAttentionRouting, requires_mm_prefix

from tests.dense_reference import image_mask
from tests.v1.attention.mock_children import CAUSAL, GENERAL, MockLayer, batch, make_config

Requests = Sequence[tuple[int, int]]
Images = Mapping[int, Sequence[tuple[int, int]]]


def by_formula(requests: Requests, images: Images, unclamped_window: bool) -> bool:
    """The contract's sentence, request by request and range by range."""
    for index, (seq_len, query_len) in enumerate(requests):
        end, begin = seq_len, seq_len - query_len
        for start, stop in images.get(index, ()):
            if start >= stop or query_len == 0:
                continue
            if unclamped_window and start < end and stop >= begin:
                return True
            if not unclamped_window and query_len > 1 and start < end - 1 and stop > begin:
                return True
    return False


def masks_differ(
    requests: Requests, images: Images, window: int | None = None, clamped: bool = True
) -> bool:
    """Whether some scheduled query sees an existing key with the image mask that it does not see
    with the causal one."""
    for index, (seq_len, query_len) in enumerate(requests):
        causal = image_mask(seq_len, window=window)
        masked = image_mask(seq_len, images.get(index, ()), window=window, clamped=clamped)
        queries = slice(seq_len - query_len, seq_len)
        if not torch.equal(causal[queries], masked[queries]):
            return True
    return False


CASES: list[tuple[str, Requests, Images, bool]] = [
    ("an image inside the prefill", [(10, 10)], {0: [(3, 6)]}, True),
    ("an image first", [(10, 10)], {0: [(0, 3)]}, True),
    ("an image last", [(10, 10)], {0: [(6, 9)]}, True),
    ("an image alone", [(4, 4)], {0: [(0, 3)]}, True),
    ("a two-token image", [(10, 10)], {0: [(3, 4)]}, True),
    ("a one-token image", [(10, 10)], {0: [(3, 3)]}, False),
    ("one-token images beside a longer one", [(10, 10)], {0: [(1, 1), (4, 6), (8, 8)]}, True),
    ("a reversed range", [(10, 10)], {0: [(6, 3)]}, False),
    ("a chunk that begins inside an image", [(10, 5)], {0: [(3, 8)]}, True),
    ("a chunk that begins at an image's last token", [(10, 5)], {0: [(2, 5)]}, False),
    ("a chunk that begins at an image's last but one", [(10, 5)], {0: [(2, 6)]}, True),
    ("a chunk that ends inside an image", [(10, 5)], {0: [(7, 20)]}, True),
    ("a chunk that ends with an image's first token", [(10, 5)], {0: [(9, 20)]}, False),
    ("a chunk that ends with an image's second token", [(10, 5)], {0: [(8, 20)]}, True),
    ("a chunk wholly inside an image", [(10, 5)], {0: [(2, 20)]}, True),
    ("a two-token chunk inside an image", [(10, 2)], {0: [(2, 20)]}, True),
    ("a past image", [(10, 5)], {0: [(0, 4)]}, False),
    ("several past images", [(20, 5)], {0: [(0, 3), (4, 7), (9, 14)]}, False),
    ("past images before a live one", [(20, 5)], {0: [(0, 3), (4, 7), (16, 18)]}, True),
    ("adjacent images that meet where the chunk begins", [(10, 5)], {0: [(0, 4), (5, 9)]}, True),
    ("adjacent images, the chunk ending between them", [(5, 5)], {0: [(0, 4), (5, 9)]}, True),
    ("an image that begins after the chunk", [(5, 5)], {0: [(5, 9)]}, False),
    ("a range beyond the sequence", [(10, 10)], {0: [(10, 19)]}, False),
    ("a range far beyond the sequence", [(10, 10)], {0: [(100, 190)]}, False),
    ("unsorted ranges, the live one first", [(20, 5)], {0: [(16, 18), (0, 3)]}, True),
    ("unsorted ranges, the live one last", [(5, 5)], {0: [(9, 12), (1, 3)]}, True),
    ("a decode after its image", [(10, 1)], {0: [(2, 5)]}, False),
    ("a single query inside an image", [(5, 1)], {0: [(2, 8)]}, False),
    ("a request without queries", [(10, 0)], {0: [(2, 8)]}, False),
    ("a request without tokens", [(0, 0)], {0: [(0, 3)]}, False),
    ("only the last of many requests", [(9, 9)] * 30 + [(8, 8)], {30: [(2, 5)]}, True),
    ("an image of a request without queries", [(9, 9), (8, 0)], {1: [(2, 5)]}, False),
    ("an image of a decode beside a text prefill", [(9, 9), (8, 1)], {1: [(2, 9)]}, False),
    ("an empty list beside a live image", [(9, 9), (8, 8)], {0: [], 1: [(2, 5)]}, True),
    ("ranges of a request that is not in the batch", [(9, 9)], {1: [(2, 5)], 7: [(2, 5)]}, False),
]
NAMES = [name for name, *_ in CASES]


@pytest.mark.parametrize(("requests", "images", "needed"), [c[1:] for c in CASES], ids=NAMES)
def test_mask_is_needed_where_a_query_precedes_a_key_of_its_image(
    requests: Requests, images: Images, needed: bool
) -> None:
    assert requires_mm_prefix(batch(requests, images)) is needed


@pytest.mark.parametrize(("requests", "images", "needed"), [c[1:] for c in CASES], ids=NAMES)
def test_expected_decisions_agree_with_the_dense_masks(
    requests: Requests, images: Images, needed: bool
) -> None:
    assert masks_differ(requests, images) is needed


@pytest.mark.parametrize(
    ("requests", "images", "needed"),
    [
        pytest.param([(10, 1)], {0: [(2, 12)]}, True, id="a single query inside an image"),
        pytest.param([(10, 1)], {0: [(2, 9)]}, True, id="a single query at an image's end"),
        pytest.param([(10, 1)], {0: [(9, 12)]}, True, id="a single query at an image's start"),
        pytest.param([(10, 1)], {0: [(2, 8)]}, False, id="a single query after its image"),
        pytest.param([(10, 1)], {0: [(9, 9)]}, False, id="a single query that is its image"),
        pytest.param([(10, 5)], {0: [(1, 5)]}, True, id="a chunk that begins with an image's end"),
        pytest.param([(10, 5)], {0: [(1, 4)]}, False, id="a past image"),
        pytest.param([(10, 5)], {0: [(9, 20)]}, True, id="a chunk that ends with an image's start"),
        pytest.param([(10, 5)], {0: [(10, 20)]}, False, id="an image after the chunk"),
        pytest.param([(10, 0)], {0: [(2, 12)]}, False, id="a request without queries"),
        pytest.param([(10, 10)], {0: [(6, 3)]}, False, id="a reversed range"),
    ],
)
def test_behind_an_unclamped_window_every_query_inside_an_image_needs_the_mask(
    requests: Requests, images: Images, needed: bool
) -> None:
    assert requires_mm_prefix(batch(requests, images), unclamped_window=True) is needed


@pytest.mark.parametrize("unclamped_window", [False, True])
def test_padding_rows_change_nothing(unclamped_window: bool) -> None:
    live = batch([(8, 8)], {0: [(2, 5)]}, padding_rows=3)
    past = batch([(20, 5)], {0: [(2, 5)], 2: [(0, 3)]}, padding_rows=3)
    assert [requires_mm_prefix(b, unclamped_window=unclamped_window) for b in (live, past)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("images", [None, {}, {0: []}, {0: [], 1: []}])
@pytest.mark.parametrize("unclamped_window", [False, True])
def test_text_only_batches_need_no_lengths_on_the_host(
    images: Images | None, unclamped_window: bool
) -> None:
    text = batch([(8, 8), (9, 1)], images, host_lengths=False)
    assert requires_mm_prefix(text, unclamped_window=unclamped_window) is False


@pytest.mark.parametrize("unclamped_window", [False, True])
def test_image_ranges_without_lengths_on_the_host_are_an_error(unclamped_window: bool) -> None:
    images = batch([(8, 8)], {0: [(2, 5)]}, host_lengths=False)
    with pytest.raises(ValueError, match="seq_lens_cpu_upper_bound"):
        requires_mm_prefix(images, unclamped_window=unclamped_window)


def test_only_host_tensors_are_read() -> None:
    unreadable = torch.empty(2, dtype=torch.int32, device="meta")
    live = batch([(8, 8)], {0: [(2, 5)]}, query_start_loc=unreadable, seq_lens=unreadable)
    assert requires_mm_prefix(live) is True


def random_batch(generator: np.random.Generator) -> tuple[Requests, Images]:
    """Up to four requests, a third of them decodes, with up to four ranges each: mostly real
    images, now and then one token, reversed or beyond the sequence, in any order."""
    requests, images = [], {}
    for index in range(generator.integers(1, 5)):
        seq_len = int(generator.integers(0, 25))
        lengths = (1, int(generator.integers(0, seq_len + 1)), seq_len)
        requests.append((seq_len, min(seq_len, lengths[generator.integers(3)])))
        if generator.random() < 0.8:
            start = generator.integers(0, 28, size=generator.integers(0, 5))
            stop = start + generator.integers(-2, 9, size=len(start))
            images[index] = list(zip(start.tolist(), stop.tolist(), strict=True))
    return requests, images


SWEEP = 12  # seeds, of 300 batches each


@pytest.mark.parametrize("unclamped_window", [False, True])
@pytest.mark.parametrize("seed", range(SWEEP))
def test_random_batches_are_decided_by_the_formula(seed: int, unclamped_window: bool) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(300):
        requests, images = random_batch(generator)
        decided = requires_mm_prefix(batch(requests, images), unclamped_window=unclamped_window)
        assert decided is by_formula(requests, images, unclamped_window), (requests, images)


@pytest.mark.parametrize("window", [None, 1, 3, 12])
@pytest.mark.parametrize("seed", range(SWEEP // 4))
def test_random_batches_go_causal_exactly_where_the_dense_masks_agree(
    seed: int, window: int | None
) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(100):
        requests, images = random_batch(generator)
        decided = requires_mm_prefix(batch(requests, images))
        assert decided is masks_differ(requests, images, window), (requests, images)


@pytest.mark.parametrize("window", [1, 2, 4, 30], ids="shortest short middling longest".split())
@pytest.mark.parametrize("seed", range(SWEEP // 4))
def test_random_batches_behind_an_unclamped_window_go_causal_only_where_the_dense_masks_agree(
    seed: int, window: int
) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(100):
        requests, images = random_batch(generator)
        if not requires_mm_prefix(batch(requests, images), unclamped_window=True):
            assert not masks_differ(requests, images, window, clamped=False), (requests, images)


FULL: dict[str, Any] = {"sliding_window": None}
CLAMPED = {"sliding_window": 4, "mm_prefix_clamp_sliding_window": True}
UNCLAMPED = {"sliding_window": 4, "mm_prefix_clamp_sliding_window": False}
FULL_UNCLAMPED = {"sliding_window": None, "mm_prefix_clamp_sliding_window": False}
MIXED = {"full": FULL, "clamped": CLAMPED, "unclamped": UNCLAMPED}


def config_of(layers: Mapping[str, Mapping[str, Any]]) -> Any:
    return make_config({name: MockLayer(**arguments) for name, arguments in layers.items()})


@pytest.mark.parametrize(
    ("group", "unclamped"),
    [
        (["full"], False),
        (["clamped"], False),
        (["full", "clamped"], False),
        (["unclamped"], True),
        (["full", "unclamped"], True),
        (["clamped", "unclamped"], True),
    ],
)
def test_unclamped_window_is_about_the_layers_of_the_group(
    group: list[str], unclamped: bool
) -> None:
    assert MMPrefixAttentionRouting(group, config_of(MIXED)).unclamped_window is unclamped


@pytest.mark.parametrize(
    ("layers", "level"),
    [
        ({}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ({"a": FULL}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ({"a": FULL_UNCLAMPED}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ({"a": FULL, "b": CLAMPED}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ({"a": UNCLAMPED}, AttentionCGSupport.NEVER),
        ({"a": FULL, "b": CLAMPED, "c": UNCLAMPED}, AttentionCGSupport.NEVER),
    ],
)
def test_graph_support_is_about_all_layers_of_the_model(
    layers: dict[str, Any], level: AttentionCGSupport
) -> None:
    config, spec = config_of(layers), MockLayer().get_kv_cache_spec()
    assert MMPrefixAttentionRouting.get_cudagraph_support(config, spec) is level


def test_modules_that_are_no_attention_layers_have_no_window() -> None:
    config = make_config({"attention": MockLayer(), "experts": torch.nn.Identity()})
    spec = MockLayer().get_kv_cache_spec()
    level = MMPrefixAttentionRouting.get_cudagraph_support(config, spec)
    assert level is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_the_causal_child_is_captured() -> None:
    assert MMPrefixAttentionRouting.capture_variant == CAUSAL


@pytest.mark.parametrize(("variant", "masked"), [(GENERAL, True), (CAUSAL, False)])
def test_only_the_general_child_must_support_the_image_mask(variant: int, masked: bool) -> None:
    assert MMPrefixAttentionRouting.variant_uses_mm_prefix(variant) is masked


@pytest.mark.parametrize(
    ("layer", "common", "variant"),
    [
        (FULL, batch([(8, 8)], {0: [(2, 5)]}), GENERAL),
        (FULL, batch([(8, 8)]), CAUSAL),
        (FULL, batch([(8, 1)], {0: [(2, 9)]}), CAUSAL),
        (CLAMPED, batch([(8, 1)], {0: [(2, 9)]}), CAUSAL),
        (UNCLAMPED, batch([(8, 1)], {0: [(2, 9)]}), GENERAL),
        (UNCLAMPED, batch([(8, 1)], {0: [(2, 5)]}), CAUSAL),
    ],
    ids=[
        "live image",
        "text",
        "decode inside an image",
        "decode inside an image, clamped window",
        "decode inside an image, unclamped window",
        "decode after an image, unclamped window",
    ],
)
def test_policy_selects_the_general_child_where_its_layers_need_the_mask(
    layer: dict[str, Any], common: CommonAttentionMetadata, variant: int
) -> None:
    assert MMPrefixAttentionRouting(["a"], config_of({"a": layer})).select(common) == variant


@pytest.mark.parametrize("layer", [FULL, CLAMPED], ids=["full attention", "clamped window"])
def test_replayed_batches_select_the_captured_child(layer: dict[str, Any]) -> None:
    routing = MMPrefixAttentionRouting(["a"], config_of({"a": layer}))
    generator = np.random.default_rng(0)
    for _ in range(200):
        requests, images = random_batch(generator)
        decodes = [(max(seq_len, 1), 1) for seq_len, _ in requests]
        assert routing.select(batch(decodes, images)) == routing.capture_variant, (decodes, images)
