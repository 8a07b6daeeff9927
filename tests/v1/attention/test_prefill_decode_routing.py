"""`PrefillDecodeAttentionRouting`: which child serves prefills, decodes and verifications."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.composite import PrefillDecodeAttentionRouting

from tests.v1.attention.mock_children import MockLayer, batch, make_config

PREFILL, DECODE = 0, 1
SPECULATIVE_TOKENS = 3


def config(*, speculative: bool = False, masks_images: bool = True, **layer: Any) -> Any:
    tokens = SimpleNamespace(num_speculative_tokens=SPECULATIVE_TOKENS) if speculative else None
    return make_config(
        {"layer": MockLayer(**layer)},
        speculative_config=tokens,
        model_config=SimpleNamespace(is_mm_prefix_lm=masks_images),
    )


def select(
    requests: list[tuple[int, int]],
    prefilling: list[bool] | None = None,
    *,
    speculative: bool = False,
    images: dict[int, list[tuple[int, int]]] | None = None,
    **layer: Any,
) -> int:
    policy = PrefillDecodeAttentionRouting(["layer"], config(speculative=speculative, **layer))
    phases = None if prefilling is None else torch.tensor(prefilling)
    return policy.select(batch(requests, images, is_prefilling=phases))


def support(**how: Any) -> AttentionCGSupport:
    spec: Any = None
    return PrefillDecodeAttentionRouting.get_cudagraph_support(config(**how), spec)


@pytest.mark.parametrize("prefilling", [None, [False, False]])
def test_a_batch_of_single_queries_decodes(prefilling: list[bool] | None) -> None:
    assert select([(30, 1), (9, 1)], prefilling) == DECODE


@pytest.mark.parametrize("prefilling", [None, [False, True]])
def test_one_prefill_among_decodes_takes_the_general_child(prefilling: list[bool] | None) -> None:
    assert select([(30, 1), (9, 9)], prefilling) == PREFILL


def test_a_prefill_as_long_as_a_verification_is_a_prefill() -> None:
    length = 1 + SPECULATIVE_TOKENS
    assert select([(30, length), (length, length)], [False, True], speculative=True) == PREFILL


@pytest.mark.parametrize("prefilling", [None, [False, False]])
def test_verifications_decode(prefilling: list[bool] | None) -> None:
    length = 1 + SPECULATIVE_TOKENS
    assert select([(30, length), (40, length)], prefilling, speculative=True) == DECODE


def test_a_prefill_chunk_of_one_query_decodes_as_its_graph_does() -> None:
    assert select([(30, 1), (9, 1)], [False, True]) == DECODE


def test_padding_rows_are_no_prefills() -> None:
    policy = PrefillDecodeAttentionRouting(["layer"], config())
    padded = batch([(30, 1)], padding_rows=3, is_prefilling=torch.tensor([False] * 4))
    assert policy.select(padded) == DECODE


def test_a_live_image_takes_the_general_child_whatever_the_phase() -> None:
    images = {0: [(5, 25)]}
    assert select([(20, 3)], [False], speculative=True, images=images) == PREFILL


def test_a_single_query_in_an_image_behind_an_unclamped_window_takes_the_general_child() -> None:
    assert select([(20, 1)], images={0: [(5, 19)]}, sliding_window=8) == PREFILL


def test_it_captures_the_decode_child() -> None:
    assert PrefillDecodeAttentionRouting.capture_variant == DECODE


def test_only_the_prefill_child_must_mask_images() -> None:
    uses = map(PrefillDecodeAttentionRouting.variant_uses_mm_prefix, (PREFILL, DECODE))
    assert list(uses) == [True, False]


def test_graphs_of_uniform_decodes_are_allowed() -> None:
    assert support() is AttentionCGSupport.UNIFORM_BATCH


def test_with_speculative_tokens_only_graphs_of_single_queries_are() -> None:
    # The runners replay a graph of uniform decodes for prefills of that length too.
    assert support(speculative=True) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_where_images_come_to_an_unclamped_window_no_graph_is() -> None:
    assert support(sliding_window=8) is AttentionCGSupport.NEVER


def test_a_text_models_sliding_window_keeps_its_graphs() -> None:
    assert support(sliding_window=8, masks_images=False) is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("speculative", [False, True])
def test_every_batch_that_the_graph_level_admits_selects_the_captured_child(
    speculative: bool,
) -> None:
    assert support(speculative=speculative).value <= AttentionCGSupport.UNIFORM_BATCH.value
    random = np.random.default_rng(0)
    for _ in range(200):
        lengths = random.integers(1, 60, random.integers(1, 9)).tolist()
        phases = (random.random(len(lengths)) < 0.3).tolist()
        images = {i: [(0, int(n) // 2)] for i, n in enumerate(lengths)}
        chosen = select([(n, 1) for n in lengths], phases, speculative=speculative, images=images)
        assert chosen == PrefillDecodeAttentionRouting.capture_variant
