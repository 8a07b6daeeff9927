# SPDX-License-Identifier: Apache-2.0
"""The CPU composite, `CPU_PREFIX_ATTN`: CPU_ATTN for every batch, cut into segments where the
image mask is live. Stock CPU_ATTN has no image mask and applies the causal one instead."""

import copy
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.plugins.composite_attention.engine import cpu_causal_flag_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.composite import (
    MMPrefixAttentionRouting,
    create_composite_attention_backend,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.prefix_segments import (
    PrefixSegmentsMetadataBuilder,
    create_prefix_segments_backend,
)
from vllm.v1.kv_cache_interface import KVCacheSpec


class CPUChildMetadataBuilder(CPUAttentionMetadataBuilder):
    """CPU_ATTN's builder, which finds its layers' windows inside a composite too."""

    def _group_sliding_window(self) -> int:
        # CPU_ATTN looks only at layers whose impl is its own; behind a composite it would see
        # no window and schedule sliding layers over every key.
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        windows = {
            impl.sliding_window
            for layer in layers.values()
            for impl in layer.impl.get_impl_variants()
            if isinstance(impl, CPUAttentionBackendImpl)
        }
        return windows.pop() if len(windows) == 1 else -1


class CPUChildBackend(CPUAttentionBackend):
    """CPU_ATTN as a child of a composite."""

    @staticmethod
    def get_builder_cls() -> type[CPUChildMetadataBuilder]:
        return CPUChildMetadataBuilder

    # vLLM never asks CPU_ATTN what it declares, and so it serves more than that: sinks, blocks of
    # 16 tokens, and a cache dtype by name that is the model's own.
    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        named = kv_cache_dtype in ("float32", "bfloat16", "float16")
        return named or super().supports_kv_cache_dtype(kv_cache_dtype)


class CPUSegmentsMetadataBuilder(PrefixSegmentsMetadataBuilder):
    """Segments for CPU_ATTN, whose schedule depends on the window."""

    causal_flag_dtype = cpu_causal_flag_dtype()
    window_size: int

    def build_wider(self, common_attn_metadata: CommonAttentionMetadata, window: int) -> Any:
        # A plan for more keys than the window shows may give a thread none that it shows, whose
        # part of the answer is wrong where the layer has sinks.
        wider = copy.copy(self)
        wider.window_size = window
        return super(CPUSegmentsMetadataBuilder, wider).build_wider(common_attn_metadata, window)


CPUSegmentsBackend = create_prefix_segments_backend(
    CPUChildBackend,
    name="CPUSegmentsBackend",
    backend_name="CPU_ATTN with segments",
    module=__name__,
    builder=CPUSegmentsMetadataBuilder,
)

CPUPrefixAttentionBackend = create_composite_attention_backend(
    CPUSegmentsBackend,
    CPUChildBackend,
    name="CPUPrefixAttentionBackend",
    backend_name="CPU_PREFIX_ATTN",
    module=__name__,
    routing_policy=MMPrefixAttentionRouting,
)
