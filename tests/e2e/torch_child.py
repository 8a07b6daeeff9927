# SPDX-License-Identifier: Apache-2.0
"""A backend of the tests' own that keeps its keys and values where another backend does, and
attends over them densely in torch.

It is written for reading, not for speed: the mask is built, request by request, and attention is
`tests/dense_reference.py`. As a child of a composite it shares no code with the other child, so
what both make of one cache can be compared.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.plugins.composite_attention.engine import register_name
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from tests.dense_reference import dense_attention, image_mask


@dataclass
class TorchMetadata:
    """What a batch is: tensors as in `CommonAttentionMetadata`, image ranges by request."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    images: dict[int, list[tuple[int, int]]]


class TorchMetadataBuilder(AttentionMetadataBuilder[TorchMetadata]):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def build(
        self, common_prefix_len: int, batch: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchMetadata:
        return TorchMetadata(
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table_tensor,
            batch.mm_req_doc_ranges or {},
        )


class TorchImpl(AttentionImpl):
    """Dense attention over the keys and values that `views` finds in a cache."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype = scale, kv_cache_dtype
        self.window, self.soft_cap = sliding_window, logits_soft_cap or 0.0
        self.alibi_slopes = alibi_slopes

    @staticmethod
    def views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in `cache`, each a view of (blocks, heads, block_size, head_size).

        `cache` is vLLM's logical (blocks, heads, block_size, 2 * head_size). Here, as in
        TRITON_ATTN, each row holds a key and then its value.
        """
        key, value = cache.chunk(2, dim=-1)
        return key, value

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        used = slot_mapping[slot_mapping >= 0]
        block, offset = used // kv_cache.shape[2], used % kv_cache.shape[2]
        for view, rows in zip(self.views(kv_cache), (key, value), strict=True):
            view[block, :, offset] = rows[: len(slot_mapping)][slot_mapping >= 0]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TorchMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        clamped = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        starts = attn_metadata.query_start_loc.tolist()
        for request, seq_len in enumerate(attn_metadata.seq_lens.tolist()):
            queries = slice(starts[request], starts[request + 1])
            if queries.start == queries.stop:
                continue
            blocks = attn_metadata.block_table[request].long()
            blocks = blocks[: -(-seq_len // kv_cache.shape[2])]
            keys, values = (
                view[blocks].transpose(1, 2).flatten(0, 1)[:seq_len]
                for view in self.views(kv_cache)
            )
            images = attn_metadata.images.get(request, ())
            mask = image_mask(seq_len, images, window=self.window, clamped=clamped)
            attended = dense_attention(
                query[queries],
                keys,
                values,
                mask,
                self.scale,
                soft_cap=self.soft_cap,
                alibi_slopes=self.alibi_slopes,
            )
            output[queries] = attended.to(output.dtype)
        return output


class TorchBackend(AttentionBackend):
    """Shares TRITON_ATTN's cache."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]

    @staticmethod
    def get_name() -> str:
        return "TORCH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TorchImpl]:
        return TorchImpl

    @staticmethod
    def get_builder_cls() -> type[TorchMetadataBuilder]:
        return TorchMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True


class TorchLikeCPUImpl(TorchImpl):
    @staticmethod
    def views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """CPU_ATTN's float32 cache: for each block and head all keys, one dimension of all tokens
        after the other, and then all values, one token after the other."""
        blocks, heads, tokens, content = cache.shape
        planes = cache.view(blocks, heads, 2, tokens * content // 2)
        key = planes[:, :, 0].view(blocks, heads, content // 2, tokens)
        value = planes[:, :, 1].view(blocks, heads, tokens, content // 2)
        return key.transpose(2, 3), value


class TorchLikeCPUBackend(TorchBackend):
    """Shares CPU_ATTN's cache."""

    @staticmethod
    def get_name() -> str:
        return "TORCH_CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TorchLikeCPUImpl]:
        return TorchLikeCPUImpl

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


def register() -> None:
    """Make the names known, in this process."""
    for backend in (TorchBackend, TorchLikeCPUBackend):
        register_name(backend.get_name(), f"{backend.__module__}.{backend.__name__}")
