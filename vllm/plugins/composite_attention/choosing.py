# SPDX-License-Identifier: Apache-2.0
"""Which backends could serve a decoder layer on a platform, in the order in which they are tried,
and what speaks against each.

The rule for models that need the image mask: the backend that the platform prefers *with* the mask
is joined with the one that it prefers *without*. Both orders and all reasons are the platform's
and the backends' own, so nothing is listed here that they know.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.plugins.composite_attention import pairs
from vllm.triton_utils import HAS_TRITON
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.storage_proof import reason_against

ABOVE_EVERY_FLOOR = DeviceCapability(99, 0)
"""Stands for the compute capability of platforms that have none (CPU, XPU)."""


class Candidate(NamedTuple):
    """A backend that was considered for a layer."""

    name: str
    """As `VLLM_ATTENTION_BACKEND` takes it."""

    reasons: list[str]
    """What speaks against it; empty if it can serve."""


def candidates(platform: Any, config: Any, num_heads: int | None = None) -> Iterator[Candidate]:
    """The backends for a layer that names none: first the composites, if it is a decoder layer
    that needs the image mask, then the platform's own.

    Args:
        platform: vLLM's `current_platform`.
        config: vLLM's `AttentionSelectorConfig` of the layer.
        num_heads: the layer's query heads, where they are known.
    """
    if config.use_mm_prefix and config.attn_type == AttentionType.DECODER:
        yield from composites(platform, config, num_heads)
    yield from of_platform(platform, config, num_heads)


def composites(platform: Any, config: Any, num_heads: int | None = None) -> Iterator[Candidate]:
    """The composites that have the image mask, the best first."""
    if platform.is_cpu():
        yield judged("CPU_PREFIX_ATTN", platform, config)
        return
    valid = (c.name for c in of_platform(platform, config, num_heads) if not c.reasons)
    masking = next(valid, None)
    if masking is None or is_composite(AttentionBackendEnum[masking].get_class()):
        return  # one of vLLM's own composites comes first: it stands
    for fast in of_platform(platform, config._replace(use_mm_prefix=False), num_heads):
        if fast.name == masking:
            return  # nothing is preferred to it without the mask either
        name = f"{masking}+{fast.name}"
        if fast.reasons:
            yield Candidate(name, [f"{fast.name}: {reason}" for reason in fast.reasons])
        else:
            yield judged(name, platform, config)


def of_platform(platform: Any, config: Any, num_heads: int | None = None) -> list[Candidate]:
    """The platform's own order for this layer."""
    if not hasattr(type(platform), "get_valid_backends"):  # it has one choice
        backend = resolve_obj_by_qualname(stock_choice(platform)(None, config, num_heads))
        unmasked = config.use_mm_prefix and not backend.supports_mm_prefix()
        return [Candidate(backend.get_name(), [NO_MASK] if unmasked else [])]
    valid, invalid = platform.get_valid_backends(
        device_capability=platform.get_device_capability(),
        attn_selector_config=config,
        num_heads=num_heads,
    )
    # CUDA's entries hold their priority, ROCm's only where they are valid: the rest come last.
    order: list[tuple[int, Candidate]] = []
    for entry in valid:
        backend = next(part for part in entry if isinstance(part, AttentionBackendEnum))
        order.append((entry[-1], Candidate(backend.name, [])))
    for backend, why in invalid.items():
        priority, reasons = why if isinstance(why, tuple) else (LAST, why)
        order.append((priority, Candidate(backend.name, reasons)))
    return [candidate for _, candidate in sorted(order, key=lambda entry: entry[0])]


LAST = 1000
NO_MASK = "it has no image mask: image tokens would attend causally"


def stock_choice(platform: Any) -> Callable[..., str]:
    """The platform's `get_attn_backend_cls` as vLLM has it."""
    chooser = type(platform).get_attn_backend_cls
    return getattr(chooser, "__wrapped__", chooser)


def judged(name: str, platform: Any, config: Any) -> Candidate:
    """What speaks against a named backend or pair for this layer. A pair is proven to share its
    storage; one of this project's composites only when it serves."""
    try:
        backend = pairs.class_of(name)
    except ValueError as error:
        return Candidate(name, [str(error)])
    reasons = reasons_against(backend, platform, config)
    if not reasons and pairs.is_pair(name):
        reason = reason_against(
            backend,
            torch.device(platform.device_type),
            head_size=config.head_size,
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype or "auto",
        )
        reasons = [] if reason is None else [reason]
    return Candidate(name, reasons)


def reasons_against(backend: type[AttentionBackend], platform: Any, config: Any) -> list[str]:
    """What a backend and its children say against this layer, and children that the platform does
    not run."""
    elsewhere = [leaf.get_name() for leaf in leaves(backend) if not runs_here(leaf, platform)]
    if elsewhere:
        return [f"{name} does not run on CPU" for name in elsewhere]
    capability = platform.get_device_capability() or ABOVE_EVERY_FLOOR
    return backend.validate_configuration(**config._asdict(), device_capability=capability)


def is_composite(backend: type) -> bool:
    """Whether a backend class joins two children."""
    return hasattr(backend, "child_classes")


def leaves(backend: type) -> Iterator[Any]:
    """The backends that do the work, the general child's first."""
    children: tuple[type, ...] = getattr(backend, "child_classes", tuple)()
    if not children:
        yield backend
    for child in children:
        yield from leaves(child)


def runs_here(backend: type, platform: Any) -> bool:
    """Whether a backend's kernels, or its children's, run on a platform, so far as they do not
    say it themselves: CUDA's backends say nothing of CPUs. There, those made for it run, Triton's
    in its interpreter, and whatever is not vLLM's own."""
    return not platform.is_cpu() or all(map(_runs_on_cpu, leaves(backend)))


def _runs_on_cpu(backend: type[AttentionBackend]) -> bool:
    name = backend.get_name()
    if not backend.__module__.startswith("vllm."):
        return True
    interpreted = HAS_TRITON and name.startswith("TRITON_ATTN")
    return interpreted or name.startswith(("CPU_", "AMX_"))
