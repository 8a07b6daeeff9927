# SPDX-License-Identifier: Apache-2.0
"""Proof that two backends store keys and values at the same places of one KV cache.

Children of a composite may agree on every declared layout and still order K and V differently
within a block. Each then reads the other's bytes as something else: wrong answers, no error.
So both write the same keys and values through the same slots, once per kind of cache, and the
bytes must be equal.
"""

import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    VllmConfig,
    get_current_vllm_config,
    get_layers_from_vllm_config,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    get_kv_quant_mode,
)

logger = init_logger(__name__)

SWITCH = "VLLM_COMPOSITE_STORAGE_PROOF"
"""Environment variable; `0` joins pairs unproven."""

NUM_BLOCKS = 3
_proven: set[tuple[Any, ...]] = set()


def prove_one_storage(
    backend: Any,
    kv_cache_spec: KVCacheSpec,
    layer_names: list[str],
    vllm_config: VllmConfig,
    device: torch.device,
    builders: Iterable[Any],
) -> None:
    """Prove that both children of a composite store keys and values alike; once per pair, cache
    dtype, head size, head count and block size.

    Both children's writers fill a zeroed cache of the engine's own shape, on its device, and
    the bytes are compared. Where only one child's writer can be called apart from the engine,
    both attend over what it has written instead, and their outputs must agree with each other
    and with dense attention.

    Args:
        backend: the composite's backend class.
        kv_cache_spec: of the group; only an `AttentionSpec` is proven.
        layer_names: the group's layers; the first one's impls are used.
        vllm_config: holds the layers and the KV cache layout.
        device: where the scratch caches are made.
        builders: both children's metadata builders, for the second kind of proof.

    Raises:
        ValueError: the children differ; names both and the first difference.
    """
    if os.environ.get(SWITCH) == "0" or not isinstance(kv_cache_spec, AttentionSpec):
        return
    layers = get_layers_from_vllm_config(
        vllm_config,
        AttentionLayerBase,  # type: ignore[type-abstract]
        layer_names,
    )
    layer: Any = next(iter(layers.values()), None)
    impl = None if layer is None else _impl_of(backend, layer.impl)
    if impl is None:
        logger.warning_once(
            "That %s store keys and values alike was not proven: no layer has its impl.",
            " and ".join(child.get_name() for child in backend.child_classes()),
        )
        return
    layout = _layouts(backend, vllm_config)[0]
    reason = _refusal(layer, impl, backend, kv_cache_spec, layout, device, tuple(builders))
    if reason is not None:
        raise ValueError(
            f"{reason} Name another pair or a single backend with --attention-backend, or set "
            f"{SWITCH}=0 to join them unproven."
        )


def reason_against(
    backend: Any,
    device: torch.device,
    *,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
    num_kv_heads: int = 2,
) -> str | None:
    """Why the two children of a composite cannot share a KV cache, before there is any layer;
    None if they can. Both must write the same bytes; nothing is attended. vLLM's configuration
    must be the current one, since impls read it.

    Args:
        backend: the composite's backend class; impls are made of it as for a plain layer.
        device: where the scratch caches are made.
        head_size: elements of a key or a value of one head.
        dtype: of keys and values.
        kv_cache_dtype: as `--kv-cache-dtype` takes it.
        num_kv_heads: KV heads of the scratch caches; there are as many query heads.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    cache_dtype = STR_DTYPE_TO_TORCH_DTYPE.get(kv_cache_dtype, dtype)
    try:
        sizes = [getattr(n, "base", n) for n in backend.get_supported_kernel_block_sizes()]
        spec = backend.customize_spec(
            FullAttentionSpec(
                block_size=max(min(sizes, default=16), 16),
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                dtype=cache_dtype,
                kv_quant_mode=get_kv_quant_mode(kv_cache_dtype),
            )
        )
        impl = backend.get_impl_cls()(
            num_kv_heads, head_size, head_size**-0.5, num_kv_heads, None, None, kv_cache_dtype
        )
    except Exception as error:  # whatever it is, such a pair is no choice
        return f"it cannot be made for such a layer: {error}"
    one = torch.ones(1, device=device, dtype=torch.float32)
    layer = SimpleNamespace(
        impl=impl,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        **dict.fromkeys(("_q_scale", "_k_scale", "_v_scale"), one),
        **dict.fromkeys(("_q_scale_float", "_k_scale_float", "_v_scale_float"), 1.0),
    )
    layouts = _layouts(backend, get_current_vllm_config())
    try:
        refusals = [_refusal(layer, impl, backend, spec, each, device, ()) for each in layouts]
    except Exception as error:
        return f"that its children store keys and values alike could not be shown: {error}"
    return next(filter(None, refusals), None)


def _refusal(
    layer: Any,
    impl: Any,
    backend: Any,
    spec: AttentionSpec,
    layout: KVCacheLayout,
    device: torch.device,
    builders: tuple[Any, ...],
) -> str | None:
    case = (
        *backend.child_classes(),
        spec.dtype,
        impl.kv_cache_dtype,
        spec.head_size,
        spec.num_kv_heads,
        spec.block_size,
        layout,
        device.type,
    )
    if case in _proven:
        return None
    try:
        difference = _first_difference(layer, impl, spec, layout, device, builders)
        found = "they store keys and values differently, so each would read the other's as"
        found += f" something else. {difference}"
    except UnprovableError as error:
        difference = str(error)
        found = f"that they store keys and values alike could not be shown. {difference}"
    if difference is not None:
        names = " and ".join(child.get_name() for child in backend.child_classes())
        return (
            f"{names} cannot share a KV cache: {found} "
            f"(cache dtype {spec.dtype}, head size {spec.head_size}, "
            f"{spec.num_kv_heads} KV heads, blocks of {spec.block_size} "
            f"tokens, layout {layout.name})."
        )
    _proven.add(case)
    return None


def _impl_of(backend: Any, impl: Any) -> Any:
    """The impl of the composite `backend`: `impl` itself, or the one nested in it."""
    if getattr(type(impl), "backend_cls", None) is backend:
        return impl
    found = (_impl_of(backend, child) for child in getattr(impl, "children", ()))
    return next(filter(None, found), None)


class UnprovableError(Exception):
    """Neither kind of proof can be carried out here."""


def _layouts(backend: Any, vllm_config: VllmConfig) -> tuple[KVCacheLayout, ...]:
    """The engine's KV cache layout, or those that it may still choose from."""
    name = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if isinstance(name, str):
        return (KVCacheLayout[name],)
    return backend.supported_kv_cache_layouts() or tuple(KVCacheLayout)


def _scratch_cache(
    spec: AttentionSpec, layout: KVCacheLayout, device: torch.device
) -> torch.Tensor:
    shape = compute_layer_kv_cache_shape_bytes(spec, NUM_BLOCKS)
    strides = compute_layout_strides(spec, NUM_BLOCKS, 1, layout)[1:]
    num_bytes = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    raw = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    return torch.as_strided(raw, shape, strides).view(spec.dtype)


def _first_difference(
    layer: Any,
    impl: Any,
    spec: AttentionSpec,
    layout: KVCacheLayout,
    device: torch.device,
    builders: tuple[Any, ...],
) -> str | None:
    general, causal = impl.children
    num_tokens = spec.block_size + spec.block_size // 2 + 1
    # A sequence over two blocks in reverse order; block 0 is the engine's padding block.
    block_table = torch.tensor([[2, 1]], dtype=torch.int32, device=device)
    position = torch.arange(num_tokens, device=device)
    slots = block_table[0, position // spec.block_size].long() * spec.block_size
    slots += position % spec.block_size

    random = torch.Generator("cpu").manual_seed(0)
    shape = (num_tokens, layer.num_kv_heads, layer.head_size)
    dtype = getattr(layer, "dtype", torch.get_default_dtype())
    # vLLM makes layers with the device as torch's default.
    key, value = (
        torch.randn(shape, generator=random, device="cpu").to(device, dtype) for _ in range(2)
    )

    caches = [_scratch_cache(spec, layout, device) for _ in range(2)]
    written = [
        cache
        for child, cache in zip((general, causal), caches, strict=True)
        if _writes(child, layer, key, value, cache, slots)
    ]
    if len(written) == 2:
        return _first_different_byte(*written)
    if not written:
        raise UnprovableError("Neither child's KV cache writer can be called here.")
    if not builders:
        raise UnprovableError("Only one child's KV cache writer can be called here.")
    try:
        return _reads_differently(layer, impl, builders, key, value, written[0], block_table, slots)
    except Exception as error:
        raise UnprovableError(f"Attending over a scratch cache failed: {error}.") from error


def _writes(
    child: Any,
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> bool:
    try:
        child.do_kv_cache_update(layer, key, value, cache, slots)
    except Exception as error:
        logger.debug("%s cannot write a scratch cache here: %s", type(child).__name__, error)
        return False
    return True


def _first_different_byte(written: torch.Tensor, other: torch.Tensor) -> str | None:
    ours, theirs = (cache.contiguous().view(torch.uint8) for cache in (written, other))
    differs = (ours != theirs).nonzero()
    if len(differs) == 0:
        return None
    at = differs[0].tolist()
    axes = ", ".join(f"{axis} {i}" for axis, i in zip(_AXES, at, strict=True))
    return (
        f"Of {ours.numel()} bytes {len(differs)} differ, first at {axes}: "
        f"{int(ours[tuple(at)])} against {int(theirs[tuple(at)])}"
    )


_AXES = ("block", "head", "token", "byte")


def _reads_differently(
    layer: Any,
    impl: Any,
    builders: tuple[Any, ...],
    key: torch.Tensor,
    value: torch.Tensor,
    written: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
) -> str | None:
    num_tokens = len(slots)
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cpu")
    length = torch.tensor([num_tokens], dtype=torch.int32, device="cpu")
    batch = CommonAttentionMetadata(
        query_start_loc=starts.to(slots.device),
        query_start_loc_cpu=starts,
        seq_lens=length.to(slots.device),
        seq_lens_cpu_upper_bound=length,
        num_reqs=1,
        num_actual_tokens=1,
        max_query_len=1,
        max_seq_len=num_tokens,
        block_table_tensor=block_table,
        slot_mapping=slots[-1:],
    )
    if slots.device.type == "cpu":
        torch.cpu._init_amx()  # a process asks for these instructions once, or is killed by them
    random = torch.Generator("cpu").manual_seed(1)
    shape = (1, layer.num_heads, layer.head_size)
    query = torch.randn(shape, generator=random, device="cpu").to(key)
    outputs = []
    for child, builder in zip(impl.children, builders, strict=True):
        out = torch.zeros_like(query)
        child.forward(layer, query, key[-1:], value[-1:], written, builder.build(0, batch), out)
        outputs.append(out.float())
    expected = _attended(layer, impl.children[0], query, key, value)
    for name, output, wanted in (
        ("the causal child's differs from the general child's", outputs[1], outputs[0]),
        ("the general child's differs from dense attention", outputs[0], expected),
    ):
        if wanted is None:
            continue
        difference, peak = (float(t.abs().max()) for t in (output - wanted, wanted))
        if not (peak > 0 and difference <= 0.02 * peak):
            return f"Attending over one cache {name} by {difference:.3g}."
    return None


def _attended(
    layer: Any, impl: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor | None:
    """(1, heads, head_size) float: dense attention of the last position; None for a layer with
    more to it than a window (soft cap, alibi, sinks)."""
    if getattr(impl, "logits_soft_cap", None) or any(
        getattr(impl, name, None) is not None for name in ("alibi_slopes", "sinks")
    ):
        return None
    window = getattr(layer, "sliding_window", None) or len(key)
    key, value = (part[-window:].double().transpose(0, 1)[None] for part in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        query.double().transpose(0, 1)[None], key, value, scale=impl.scale, enable_gqa=True
    )
    return output[0].transpose(0, 1).float()
