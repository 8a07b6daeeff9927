# SPDX-License-Identifier: Apache-2.0
"""Routing policies: which child of a composite serves a batch.

A policy reads host lengths and image ranges of the batch, decides for the whole of it, and says up
to which level of CUDA graphs its decision cannot change between capture and replay.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

GENERAL, CAUSAL = 0, 1
"""The variants: the first child and the second."""


def requires_mm_prefix(
    metadata: CommonAttentionMetadata, *, unclamped_window: bool = False
) -> bool:
    """Whether any query of this batch sees a key that the causal mask hides.

    Request `i` has its queries at positions `begin .. end-1`, where `end` is
    `seq_lens_cpu_upper_bound[i]` (exact for prefill) and `begin = end - query_len`. Its image
    ranges `mm_req_doc_ranges[i]` are inclusive absolute `(start, stop)`; one with
    `start >= stop` never counts. A range needs the mask if `start < end - 1` and
    `stop > begin`: then some scheduled query lies before some key of its image. A single
    query has no key after it, so decodes and images wholly in the past never need it.

    Args:
        metadata: the batch; only host tensors are read.
        unclamped_window: the layers have a sliding window that image ranges are not clamped
            to. The mask then also reveals keys *behind* the window, so that a single query
            inside an image counts too: the test becomes `start < end` and `stop >= begin`.

    Raises:
        ValueError: there are ranges but no `seq_lens_cpu_upper_bound`.
    """
    images, seq_lens = metadata.mm_req_doc_ranges, metadata.seq_lens_cpu_upper_bound
    if not images:
        return False
    # By far the most frequent batch, told without a look at its requests.
    if metadata.max_query_len <= 1 and not unclamped_window and seq_lens is not None:
        return False
    if not any(images.values()):
        return False
    if seq_lens is None:
        raise ValueError(
            "The batch has image ranges but no seq_lens_cpu_upper_bound, without which the "
            "positions of its queries are unknown on the host. The model runner must set it "
            "in CommonAttentionMetadata."
        )
    query_start = metadata.query_start_loc_cpu.numpy()
    query_lens = query_start[1:] - query_start[:-1]
    (requests,) = (query_lens > (0 if unclamped_window else 1)).nonzero()
    ends = seq_lens.numpy()[requests]
    begins = ends - query_lens[requests]
    # An image must reach past the one and start before the other.
    low, high = (begins - 1, ends) if unclamped_window else (begins, ends - 1)
    # The ranges are lists of tuples, which a loop reads faster than numpy can take them in.
    for request, past, before in zip(requests.tolist(), low.tolist(), high.tolist(), strict=True):
        for start, stop in images.get(request, ()):
            if stop > past and start < before and start < stop:
                return True
    return False


def has_unclamped_window(layer: object) -> bool:
    """Whether an attention layer has a sliding window but does not clamp image ranges to it."""
    return getattr(layer, "sliding_window", None) is not None and not getattr(
        layer, "mm_prefix_clamp_sliding_window", False
    )


class CompositeAttentionRouting(Protocol):
    """Which child serves a batch. One policy object is made per metadata builder."""

    capture_variant: ClassVar[int]
    """The child used in graph capture; `select` must return it for every batch that the
    level of `get_cudagraph_support` allows to be replayed."""

    def __init__(self, layer_names: list[str], vllm_config: VllmConfig) -> None:
        """`layer_names` are the attention layers of the builder's group."""

    def select(self, metadata: CommonAttentionMetadata) -> int:
        """The variant for this batch: 0 the first (general) child, 1 the second (causal)."""
        ...

    @staticmethod
    def get_cudagraph_support(
        vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """The level up to which routing cannot change between capture and replay."""
        ...

    @staticmethod
    def variant_uses_mm_prefix(variant: int) -> bool:
        """Whether this child is given batches whose image mask it must apply."""
        ...


class MMPrefixAttentionRouting(CompositeAttentionRouting):
    """Batches whose current queries need the image mask to the general child, others causal."""

    capture_variant: ClassVar[int] = CAUSAL

    def __init__(self, layer_names: list[str], vllm_config: VllmConfig) -> None:
        self.unclamped_window = any_unclamped_window(vllm_config, layer_names)

    def select(self, metadata: CommonAttentionMetadata) -> int:
        """GENERAL where `requires_mm_prefix` says so."""
        masked = requires_mm_prefix(metadata, unclamped_window=self.unclamped_window)
        return GENERAL if masked else CAUSAL

    @staticmethod
    def get_cudagraph_support(
        vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Graphs of single queries, which never need the mask; none behind an unclamped window,
        where even a decode can."""
        single_queries = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER if any_unclamped_window(vllm_config) else single_queries

    @staticmethod
    def variant_uses_mm_prefix(variant: int) -> bool:
        """The general child alone is given masked batches."""
        return variant == GENERAL


class PrefillDecodeAttentionRouting(MMPrefixAttentionRouting):
    """Batches with a prefill in them to the general child, pure decodes to the causal child.

    Verification of speculative tokens is decoding. A prefill is told from it by `is_prefilling`,
    since both may have `1 + num_speculative_tokens` queries; where an engine does not say, every
    longer request is taken for a prefill. A request of one query is a decode whatever its phase,
    because the runners replay graphs of decodes for it. A batch that needs the image mask is the
    general child's.
    """

    def __init__(self, layer_names: list[str], vllm_config: VllmConfig) -> None:
        super().__init__(layer_names, vllm_config)
        self.decode_query_len = 1 + _num_speculative_tokens(vllm_config)

    def select(self, metadata: CommonAttentionMetadata) -> int:
        """GENERAL for a batch with a prefill or a live image mask."""
        return GENERAL if self._has_prefill(metadata) else super().select(metadata)

    def _has_prefill(self, metadata: CommonAttentionMetadata) -> bool:
        if metadata.max_query_len <= 1:
            return False
        query_lens = np.diff(metadata.query_start_loc_cpu.numpy())
        if metadata.is_prefilling is None:
            return bool((query_lens > self.decode_query_len).any())
        phases = metadata.is_prefilling.numpy()[: len(query_lens)]  # either may be padded further
        return bool((phases & (query_lens[: len(phases)] > 1)).any())

    @staticmethod
    def get_cudagraph_support(
        vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Graphs of uniform decodes. With speculative tokens only those of single queries, since
        the runners replay the longer ones for prefills of that length too; none where images may
        come to layers with an unclamped window."""
        masks_images = getattr(vllm_config.model_config, "is_mm_prefix_lm", True)
        if masks_images and any_unclamped_window(vllm_config):
            return AttentionCGSupport.NEVER
        if _num_speculative_tokens(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH


def _num_speculative_tokens(vllm_config: VllmConfig) -> int:
    speculative = getattr(vllm_config, "speculative_config", None)
    return (speculative and speculative.num_speculative_tokens) or 0


def attention_layers(
    vllm_config: VllmConfig, layer_names: Iterable[str] | None = None
) -> list[Any]:
    """The model's attention layers, or those of the given names that it has."""
    layers = vllm_config.compilation_config.static_forward_context
    names = layers if layer_names is None else layer_names
    return [layers[name] for name in names if name in layers]


def any_unclamped_window(vllm_config: VllmConfig, layer_names: Iterable[str] | None = None) -> bool:
    """Whether any of these layers, or of the model's, has an unclamped window."""
    return any(map(has_unclamped_window, attention_layers(vllm_config, layer_names)))
