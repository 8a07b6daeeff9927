# SPDX-License-Identifier: Apache-2.0
"""A routing policy and a composite of one's own; docs/composing.md explains them."""

from typing import ClassVar

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.composite import create_composite_attention_backend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.cpu_prefix_attn import CPUPrefixAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheSpec

LONG = 32


class LongPromptRouting:
    """Steps that compute `LONG` or more tokens of one request to the general child."""

    capture_variant: ClassVar[int] = 1

    def __init__(self, layer_names: list[str], vllm_config: VllmConfig) -> None:
        pass

    def select(self, metadata: CommonAttentionMetadata) -> int:
        return 0 if metadata.max_query_len >= LONG else 1

    @staticmethod
    def get_cudagraph_support(
        vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @staticmethod
    def variant_uses_mm_prefix(variant: int) -> bool:
        return True


MyComposite = create_composite_attention_backend(
    CPUPrefixAttentionBackend,
    CPUAttentionBackend,
    name="MyComposite",
    backend_name="CUSTOM",
    module=__name__,
    routing_policy=LongPromptRouting,
)


def register() -> None:
    register_backend(AttentionBackendEnum.CUSTOM)(MyComposite)
