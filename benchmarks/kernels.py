# SPDX-License-Identifier: Apache-2.0
"""Attention layers of published shapes behind both backends, on a vLLM configuration of their
own, with the paged cache filled; shared by the topics that measure kernels and metadata."""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.v1.attention.cpu_kernel import KernelUnderTest, Request, make_config

IMAGE_TOKENS = 256
BLOCK_SIZE = 128
"""What vLLM takes on CPU unless it is told another size."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """An attention layer of a published model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int


GEMMA3_4B = Shape("Gemma 3 4B", 8, 4, 256)
GEMMA3_27B = Shape("Gemma 3 27B", 32, 16, 128)


@functools.cache
def backends() -> tuple[Any, Any]:
    """This project's CPU composite, and stock CPU_ATTN."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.cpu_prefix_attn import CPUPrefixAttentionBackend

    return CPUPrefixAttentionBackend, CPUAttentionBackend


def kernels(
    shape: Shape, dtype: str, window: int | None, requests: Sequence[Request]
) -> tuple[KernelUnderTest, KernelUnderTest]:
    """One layer with its builder behind this project's composite, and one behind CPU_ATTN, each
    with a cache that holds the requests."""
    made = []
    num_blocks = 1 + sum(-(-request.seq_len // BLOCK_SIZE) for request in requests)
    for backend in backends():
        with tempfile.TemporaryDirectory() as folder:
            config = make_config(Path(folder), DTYPES[dtype], block_size=BLOCK_SIZE)
        made.append(
            KernelUnderTest(
                config,
                backend,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_size=shape.head_size,
                windows=(window,),
                num_blocks=num_blocks,
            )
        )
    return made[0], made[1]


def prompt(num_tokens: int, num_images: int, image_tokens: int = IMAGE_TOKENS) -> Request:
    """A prefill of `num_tokens` with `num_images` images at equal distances, text between."""
    every = num_tokens // num_images
    before = (every - image_tokens) // 2
    starts = [index * every + before for index in range(num_images)]
    return Request(num_tokens, num_tokens, [(s, s + image_tokens - 1) for s in starts])


class Layer:
    """One prefill through one layer: its cache written, its metadata built on demand."""

    def __init__(self, kernel: KernelUnderTest, requests: Sequence[Request]) -> None:
        torch.manual_seed(0)
        self.kernel = kernel
        self.common, slots = kernel.metadata(requests, np.random.default_rng(0))
        rows = self.common.num_actual_tokens
        self.query = torch.randn(rows, kernel.num_heads, kernel.head_size).to(kernel.dtype)
        self.key, self.value = (kernel.random_keys(len(slots)) for _ in range(2))
        self.output = torch.empty_like(self.query)
        layer: Any = kernel.layers[0]
        layer.impl.do_kv_cache_update(layer, self.key, self.value, kernel.cache, slots)
        self.metadata: Any = None

    def build(self) -> Any:
        """Build the step's metadata."""
        self.metadata = self.kernel.builder.build(0, self.common)
        return self.metadata

    def attend(self) -> torch.Tensor:
        """Attend with the metadata that was built last."""
        layer: Any = self.kernel.layers[0]
        return layer.impl.forward(
            layer, self.query, self.key, self.value, self.kernel.cache, self.metadata, self.output
        )

    def step(self) -> torch.Tensor:
        """Build the metadata and attend."""
        self.build()
        return self.attend()
