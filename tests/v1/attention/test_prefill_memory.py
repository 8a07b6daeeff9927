# SPDX-License-Identifier: Apache-2.0
"""What a prefill with images allocates, metadata and one layer's attention, by tracing it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.cpu_prefix_attn import CPUPrefixAttentionBackend

from tests.allocations import Allocations, allocations
from tests.v1.attention.cpu_kernel import KernelUnderTest, Request, make_config

load_general_plugins()
IMAGE = 256


def prefill(
    folder: Path, backend: Any, num_tokens: int, window: int | None, image: int = IMAGE
) -> Allocations:
    """Of one prefill of `num_tokens`, a half of which are images."""
    images = [(start, start + image - 1) for start in range(image // 2, num_tokens, 2 * image)]
    requests = [Request(num_tokens, num_tokens, images)]
    num_blocks = num_tokens // 32 + 2
    config = make_config(folder, torch.float32)
    kernel = KernelUnderTest(config, backend, windows=(window,), num_blocks=num_blocks)
    common, slots = kernel.metadata(requests, np.random.default_rng(0))
    # As wide as for a model of 131072 tokens, of which the prompt uses a part.
    table = torch.zeros(1, 131072 // 32, dtype=torch.int32)
    table[:, : num_tokens // 32] = common.block_table_tensor
    common = common.replace(block_table_tensor=table)
    key, value = (kernel.random_keys(len(slots)) for _ in range(2))
    query = torch.randn(num_tokens, kernel.num_heads, kernel.head_size)
    output = torch.empty_like(query)
    layer: Any = kernel.layers[0]
    layer.impl.do_kv_cache_update(layer, key, value, kernel.cache, slots)

    def step() -> None:
        metadata = kernel.builder.build(0, common)
        layer.impl.forward(layer, query, key, value, kernel.cache, metadata, output)

    return allocations(step)


@pytest.mark.parametrize("num_tokens", [2048, 8192])
@pytest.mark.parametrize("window", [None, 1024])
def test_images_take_at_most_16_bytes_a_token_more_than_stock(
    tmp_path: Path, num_tokens: int, window: int | None
) -> None:
    ours = prefill(tmp_path, CPUPrefixAttentionBackend, num_tokens, window)
    stock = prefill(tmp_path, CPUAttentionBackend, num_tokens, window)
    assert ours.peak - stock.peak <= 16 * num_tokens


@pytest.mark.parametrize("window", [None, 1024, 64], ids=["full", "window", "window < image"])
def test_nothing_grows_with_queries_times_keys(tmp_path: Path, window: int | None) -> None:
    small, large = (
        prefill(tmp_path, CPUPrefixAttentionBackend, num_tokens, window)
        for num_tokens in (2048, 8192)
    )
    assert large.peak <= 4.5 * small.peak
    assert large.largest < 8192 * 8192 / 8  # a bit a pair


def test_one_image_as_long_as_the_prompt_grows_with_its_tokens(tmp_path: Path) -> None:
    small, large = (
        prefill(tmp_path, CPUPrefixAttentionBackend, num_tokens, 64, image=num_tokens // 2)
        for num_tokens in (2048, 8192)
    )
    assert large.peak <= 4.5 * small.peak


@pytest.mark.parametrize(
    "mask",
    [lambda: torch.ones(2048, 2048, dtype=torch.bool), lambda: np.ones((2048, 2048), bool)],
    ids=["torch", "numpy"],
)
def test_a_dense_mask_would_be_seen(mask: Any) -> None:
    assert allocations(mask).peak >= 2048 * 2048


def test_a_dense_mask_inside_an_operator_would_be_seen() -> None:
    query = torch.randn(1, 1, 2048, 8)
    mask = torch.ones(2048, 2048, dtype=torch.bool)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    assert allocations(attend).largest >= 2048 * 2048
