# SPDX-License-Identifier: Apache-2.0
"""Two attention backends behind one interface, over one KV cache.

`create_composite_attention_backend` joins a *general* child (variant 0) and a *causal* child
(variant 1) with a routing policy that names the child for each batch. How each hook of vLLM's
three interfaces follows from the two children is written once, in the tables
`BACKEND_RULES`, `IMPL_RULES` and `BUILDER_RULES`; the classes below them hold only the hooks
that need more than a table can say.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.plugins.composite_attention.engine import (
    kernel_block_sizes,
    run_engine_file,
    unsupported_reason,
    without_repeats,
)
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.composite_routing import (
    CAUSAL,
    GENERAL,
    CompositeAttentionRouting,
    MMPrefixAttentionRouting,
    PrefillDecodeAttentionRouting,
    requires_mm_prefix,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = [
    "CompositeAttentionBackend",
    "CompositeAttentionImpl",
    "CompositeAttentionMetadataBuilder",
    "CompositeAttentionRouting",
    "MMPrefixAttentionRouting",
    "PrefillDecodeAttentionRouting",
    "create_composite_attention_backend",
    "requires_mm_prefix",
]


class Rule(Enum):
    """How one hook of the composite follows from the same hook of its two children."""

    ALL = "true if it is for both"
    ANY = "true if it is for either"
    INTERSECT = "what both list, in the general child's order; an empty list admits anything"
    OF_GENERAL = "the general child's"
    OF_CAUSAL = "the causal child's"
    BOTH = "done by both, the general child first"
    BY_BATCH = "done by the child that the batch's metadata names"
    REFUSE = "no, whatever the children say"
    OWN = "written out in the class below"
    DERIVED = "vLLM's base class answers it, from hooks ruled here or from the process group"


ALL, ANY, INTERSECT, OF_GENERAL, OF_CAUSAL, BOTH, BY_BATCH, REFUSE, OWN, DERIVED = Rule

BACKEND_RULES: dict[str, Rule] = {
    "supports_dtype": ALL,
    "supports_kv_cache_dtype": ALL,
    "supports_sliding_window": ALL,
    "supports_rswa": ALL,
    "supports_attn_type": ALL,
    "supports_sink": ALL,
    "supports_alibi_sqrt": ALL,
    "supports_non_causal": ALL,
    "supports_per_head_quant_scales": ALL,
    "supports_kv_connector": ALL,  # either child may run between two transfers
    "supports_kv_cache_update_bypass": ALL,  # keys are left out before the child is known
    "supported_dtypes": INTERSECT,
    "supported_kv_cache_dtypes": INTERSECT,
    "supports_batch_invariance": REFUSE,  # one request's image changes another's kernel
    "supports_pcp": REFUSE,  # a rank routes by its own host lengths: ranks could differ
    "supports_dcp": REFUSE,
    "supports_non_causal_dcp": REFUSE,
    "supports_device_cpu_query_lens_mismatch": REFUSE,  # routing reads the host's lengths
    "is_mla": REFUSE,  # the factory lets no child in for which one of these three holds
    "is_sparse": REFUSE,
    "is_ssm": REFUSE,
    "forward_includes_kv_cache_update": REFUSE,  # one writer, apart from either forward
    "get_name": OWN,
    "get_impl_cls": OWN,
    "get_builder_cls": OWN,
    "get_supported_head_sizes": OWN,
    "supports_head_size": OWN,
    "supports_compute_capability": OWN,
    "get_supported_kernel_block_sizes": OWN,
    "supports_block_size": OWN,
    "supports_mm_prefix": OWN,
    "supports_combination": OWN,
    "validate_configuration": OWN,
    "supported_kv_cache_layouts": OWN,
    "customize_spec": OWN,
    "get_preferred_block_size": DERIVED,
    "full_cls_name": DERIVED,
}

IMPL_RULES: dict[str, Rule] = {
    "supports_quant_query_input": ALL,  # the layer quantises before the child is known
    "fused_output_quant_supported": ALL,
    "supports_dense_mha_prefill": ALL,
    "supports_pcp": OF_GENERAL,
    "supports_dcp": OF_CAUSAL,  # decode-side: the causal child is the one that decodes
    "can_return_lse_for_decode": OF_CAUSAL,
    "need_to_return_lse_for_decode": OF_CAUSAL,
    "lse_base_on_e": OF_CAUSAL,
    "supports_mtp_with_cp_non_trivial_interleave_size": OF_CAUSAL,
    "do_kv_cache_update": OF_GENERAL,  # one storage, one writer
    "fused_rope_kvcache_supported": OF_GENERAL,
    "do_rope_and_kv_cache_update": OF_GENERAL,
    "fused_qk_norm_rope_kvcache_supported": OF_GENERAL,
    "do_qk_norm_rope_kvcache_update": OF_GENERAL,
    "fused_qk_norm_mrope_kvcache_supported": OF_GENERAL,
    "do_qk_norm_mrope_kvcache_update": OF_GENERAL,
    "num_heads": OF_GENERAL,
    "head_size": OF_GENERAL,
    "scale": OF_GENERAL,
    "kv_cache_dtype": OF_GENERAL,
    "kv_quant_mode": OF_GENERAL,
    "process_weights_after_loading": BOTH,
    "set_interleaved_v_cache": BOTH,
    "prepare_for_batch": BY_BATCH,
    "forward": BY_BATCH,
    "is_sparse": REFUSE,
    "get_impl_variants": OWN,
    "dcp_world_size": DERIVED,  # of the process group, the same for composite and children
    "dcp_rank": DERIVED,
    "pcp_world_size": DERIVED,
    "pcp_rank": DERIVED,
    "total_cp_world_size": DERIVED,
    "total_cp_rank": DERIVED,
}

BUILDER_RULES: dict[str, Rule] = {
    "requires_block_table_width": ANY,
    "supports_update_block_table": ALL,
    "supports_draft_decode_metadata_update": ALL,  # and of single queries the policy's routing
    "update_draft_decode_metadata": BY_BATCH,
    "update_block_table": OWN,
    "set_kernel_block_size": OWN,  # of vLLM 0.30 and 0.31
    "use_cascade_attention": REFUSE,  # of 0.30 and 0.31: asked before the batch is routed
    "build": OWN,
    "build_for_cudagraph_capture": OWN,
    "build_for_drafting": OWN,
    "get_cudagraph_support": OWN,
    "get_varlen_cudagraph_max_query_len": OWN,
    "reorder_batch_threshold": OWN,
}


def _apply(rule: Rule, answers: Sequence[Any]) -> Any:
    """Combine the children's `answers`, the general child's first."""
    if rule is ALL:
        return all(answers)
    if rule is ANY:
        return any(answers)
    if rule is INTERSECT:
        return _intersect(answers)
    return answers[CAUSAL if rule is OF_CAUSAL else GENERAL]


def _intersect(lists: Sequence[Iterable[Any] | None]) -> list[Any]:
    general, causal = (list(entries or ()) for entries in lists)
    if not general or not causal:
        return general or causal
    return [entry for entry in general if entry in causal]


class _Ruled:
    """A hook that a rule answers from the children: on a class from their classes, on an
    instance from theirs. Setting it on an instance sets it on both children."""

    def __init__(self, name: str, rule: Rule) -> None:
        self.name = name
        self.rule = rule

    def __get__(self, instance: Any, owner: Any) -> Any:
        children = getattr(instance, "children", None) or owner.child_classes()
        if self.rule is OF_GENERAL or self.rule is OF_CAUSAL:
            return getattr(_apply(self.rule, children), self.name)
        hooks = [getattr(child, self.name) for child in children]
        if not all(map(callable, hooks)):
            return _apply(self.rule, hooks)
        return lambda *args, **kwargs: _apply(self.rule, [hook(*args, **kwargs) for hook in hooks])

    def __set__(self, instance: Any, value: Any) -> None:
        # vLLM's __new__ sets flags before the children exist, and theirs does so for them.
        for child in getattr(instance, "children", ()):
            setattr(child, self.name, value)


T = TypeVar("T", bound=type)


def ruled_by(rules: dict[str, Rule]) -> Callable[[T], T]:
    """Class decorator: give `cls` the hooks that `rules` answers without code of their own."""

    def decorate(cls: T) -> T:
        for name, rule in rules.items():
            if rule is REFUSE and hasattr(cls, name):
                is_flag = isinstance(getattr(cls, name), bool)
                setattr(cls, name, False if is_flag else classmethod(lambda cls, *_, **__: False))
            elif rule in (ALL, ANY, INTERSECT, OF_GENERAL, OF_CAUSAL, BOTH):
                setattr(cls, name, _Ruled(name, rule))
        return cls

    return decorate


@ruled_by(BACKEND_RULES)
class CompositeAttentionBackend(AttentionBackend):
    """The backend class of a composite; the factory binds the attributes below."""

    general_backend_cls: ClassVar[type[AttentionBackend]]
    causal_backend_cls: ClassVar[type[AttentionBackend]]
    routing_policy: ClassVar[type[CompositeAttentionRouting]]
    backend_name: ClassVar[str]
    impl_cls: ClassVar[type["CompositeAttentionImpl"]]
    builder_cls: ClassVar[type["CompositeAttentionMetadataBuilder"]]
    head_sizes: ClassVar[tuple[int, ...]]
    kernel_block_sizes: ClassVar[tuple[int, ...]]
    device_major: ClassVar[int | None]

    @classmethod
    def child_classes(cls) -> tuple[type[AttentionBackend], type[AttentionBackend]]:
        """The general and the causal child."""
        return cls.general_backend_cls, cls.causal_backend_cls

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return cls.backend_name

    @classmethod
    def get_impl_cls(cls) -> type["CompositeAttentionImpl"]:  # type: ignore[override]
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type["CompositeAttentionMetadataBuilder"]:  # type: ignore[override]
        return cls.builder_cls

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes of both children that the composite admits; an empty list admits any."""
        return _intersect(
            [
                cls.head_sizes,
                _intersect([c.get_supported_head_sizes() for c in cls.child_classes()]),
            ]
        )

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return (not cls.head_sizes or head_size in cls.head_sizes) and all(
            child.supports_head_size(head_size) for child in cls.child_classes()
        )

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        if cls.device_major is not None and getattr(capability, "major", None) != cls.device_major:
            return False
        return all(child.supports_compute_capability(capability) for child in cls.child_classes())

    @classmethod
    def get_supported_kernel_block_sizes(  # type: ignore[override]
        cls, kv_cache_spec: KVCacheSpec | None = None
    ) -> list[int | MultipleOf]:
        """Kernel block sizes, in tokens, that both children accept; with nothing in common, none.

        Those that the composite lists, where it lists any; otherwise every combination of a
        size of one child with a size of the other.
        """
        general, causal = (
            _kernel_block_sizes(child, kv_cache_spec) for child in cls.child_classes()
        )
        if cls.kernel_block_sizes:
            general = _common_block_sizes(cls.kernel_block_sizes, general)
        return _common_block_sizes(general, causal)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        if not cls.get_supported_kernel_block_sizes():
            return False  # the base class takes an empty list for "any"
        return super().supports_block_size(block_size) and all(
            child.supports_block_size(block_size) for child in cls.child_classes()
        )

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether each child that the policy gives image-masked batches can mask them."""
        return all(
            child.supports_mm_prefix()
            for variant, child in enumerate(cls.child_classes())
            if cls.routing_policy.variant_uses_mm_prefix(variant)
        )

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """The first child's reason against this combination, with its name; None if it works."""
        for child, reason in cls._child_reasons("supports_combination", args, kwargs):
            return f"{child.get_name()}: {reason}"
        return None

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Reasons against this configuration: each child's with its name, then the composite's.

        Takes what `AttentionBackend.validate_configuration` of the installed engine takes. The
        image mask is asked only of the children that the policy gives masked batches.
        """
        by_child = list(cls._child_reasons("validate_configuration", args, kwargs))
        explained = {reason for _, reason in by_child}
        reasons = [f"{child.get_name()}: {reason}" for child, reason in by_child]
        reasons += [
            r for r in super().validate_configuration(*args, **kwargs) if r not in explained
        ]
        try:
            cls.supported_kv_cache_layouts()
        except ValueError as error:
            reasons.append(str(error))
        return list(dict.fromkeys(reasons))

    @classmethod
    def _child_reasons(
        cls, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterable[tuple[type[AttentionBackend], str]]:
        given = inspect.signature(getattr(AttentionBackend, hook)).bind(*args, **kwargs).arguments
        for variant, child in enumerate(cls.child_classes()):
            masked = given["use_mm_prefix"] and cls.routing_policy.variant_uses_mm_prefix(variant)
            reasons = getattr(child, hook)(**{**given, "use_mm_prefix": masked}) or ()
            for reason in (reasons,) if isinstance(reasons, str) else reasons:
                yield child, reason

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        """KV cache layouts that both children read, in the general child's order of preference;
        None where neither has a preference.

        Raises:
            ValueError: both name layouts and none is in common.
        """
        general, causal = (child.supported_kv_cache_layouts() for child in cls.child_classes())
        if general is None or causal is None:
            return causal if general is None else general
        common = tuple(layout for layout in general if layout in causal)
        if not common:
            raise ValueError(
                f"{_names(*cls.child_classes())} have no KV cache layout in common, so they "
                "cannot share one cache. Choose another pair."
            )
        return common

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The KV cache spec that both children ask for.

        Raises:
            ValueError: they ask for different ones.
        """
        general, causal = (child.customize_spec(spec) for child in cls.child_classes())
        if general != causal:
            raise ValueError(
                f"{_names(*cls.child_classes())} ask for different KV cache specs, so they "
                f"cannot share one cache: {_differences(general, causal)}. Choose another pair."
            )
        return general


def _names(*children: type[AttentionBackend]) -> str:
    return " and ".join(child.get_name() for child in children)


def _differences(spec: KVCacheSpec, other: KVCacheSpec) -> str:
    mine, theirs = (
        {"type": type(part).__name__} | getattr(part, "__dict__", {}) for part in (spec, other)
    )
    return ", ".join(
        f"{field} {mine.get(field)} against {theirs.get(field)}"
        for field in mine | theirs
        if mine.get(field) != theirs.get(field)
    )


def _kernel_block_sizes(
    child: type[AttentionBackend], kv_cache_spec: KVCacheSpec | None
) -> list[int | MultipleOf]:
    sizes = kernel_block_sizes(child, kv_cache_spec)
    if not sizes and issubclass(child, CompositeAttentionBackend):
        return []  # nothing in common; elsewhere an empty list admits any size
    return sizes or [MultipleOf(1)]


def _common_block_sizes(
    first: Iterable[int | MultipleOf], second: Iterable[int | MultipleOf]
) -> list[int | MultipleOf]:
    common = (_common_block_size(a, b) for a in first for b in second)
    return without_repeats(size for size in common if size is not None)


def _common_block_size(a: int | MultipleOf, b: int | MultipleOf) -> int | MultipleOf | None:
    if isinstance(a, MultipleOf) and isinstance(b, MultipleOf):
        return MultipleOf(math.lcm(a.base, b.base))
    if isinstance(a, MultipleOf):
        a, b = b, a
    fits = a % b.base == 0 if isinstance(b, MultipleOf) else a == b  # type: ignore[operator]
    return a if fits else None


@ruled_by(IMPL_RULES)
class CompositeAttentionImpl(AttentionImpl):
    """Both children's impls for one layer; each batch goes to the one its metadata names.

    Attributes that no rule names, such as `sliding_window` or `sinks`, are read from the
    general child, and setting one reaches both.
    """

    backend_cls: ClassVar[type[CompositeAttentionBackend]]
    children: tuple[AttentionImpl, AttentionImpl]

    @classmethod
    def child_classes(cls) -> tuple[type[AttentionImpl], type[AttentionImpl]]:
        """The impl classes of the general and the causal child."""
        general, causal = cls.backend_cls.child_classes()
        return general.get_impl_cls(), causal.get_impl_cls()  # type: ignore[return-value]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build both children's impls with the same arguments.

        Raises:
            ValueError: the causal child cannot take them.
        """
        general_cls, causal_cls = self.child_classes()
        general = general_cls(*args, **kwargs)
        try:
            causal = causal_cls(*args, **kwargs)
        except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
            names = _names(*self.backend_cls.child_classes())
            raise ValueError(
                f"{names} cannot be joined for this layer: the general child takes its "
                f"arguments and the causal child does not ({error}). Choose another pair."
            ) from error
        self.children = (general, causal)

    def get_impl_variants(self) -> tuple[AttentionImpl, ...]:
        """The impls that do the work, the general child's first."""
        return tuple(leaf for child in self.children for leaf in child.get_impl_variants())  # type: ignore[misc]

    def get_impl_for_metadata(self, attn_metadata: Any) -> AttentionImpl:
        """The child's impl for this batch. None (a profiling run) goes to the general child."""
        if attn_metadata is None:
            return self.children[GENERAL]
        return self.children[_variant_of(attn_metadata, self.backend_cls)]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        impl = self.get_impl_for_metadata(attn_metadata)
        try:
            return impl.forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        except Exception as error:
            _say_whose(error, self.backend_cls, self.children.index(impl), "forward")
            raise

    def prepare_for_batch(self, attn_metadata: Any) -> None:
        self.get_impl_for_metadata(attn_metadata).prepare_for_batch(attn_metadata)

    def __getattr__(self, name: str) -> Any:
        # A ruled hook that its child lacks is not to be answered by the other one.
        if name == "children" or name.startswith("__") or name in IMPL_RULES:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        child = next((c for c in self.children if hasattr(c, name)), self.children[GENERAL])
        return getattr(child, name)

    def __setattr__(self, name: str, value: Any) -> None:
        children = self.__dict__.get("children", ())
        ruled = IMPL_RULES.get(name, DERIVED) is not DERIVED
        if ruled or not children or name in self.__dict__:
            super().__setattr__(name, value)
        for child in () if ruled else children:
            setattr(child, name, value)


@ruled_by(BUILDER_RULES)
class CompositeAttentionMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Both children's metadata builders for one group of layers, and the policy between them.

    Each metadata object carries `_attention_backend_variant`, the child that it is for.
    """

    backend_cls: ClassVar[type[CompositeAttentionBackend]]
    children: tuple[AttentionMetadataBuilder[Any], AttentionMetadataBuilder[Any]]

    @classmethod
    def child_classes(cls) -> tuple[type[AttentionMetadataBuilder[Any]], ...]:
        """The builder classes of the general and the causal child."""
        return tuple(child.get_builder_cls() for child in cls.backend_cls.child_classes())

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        *,
        block_table_width: int | None = None,
        **extras: Any,
    ) -> None:
        """Build both children's builders; `block_table_width` goes only to one that asks for it.

        Raises:
            ValueError: the children store keys and values differently (`storage_proof`).
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        width = {} if block_table_width is None else {"block_table_width": block_table_width}
        general, causal = (
            builder_cls(
                kv_cache_spec,
                layer_names,
                vllm_config,
                device,
                **(width if builder_cls.requires_block_table_width else {}),
                **extras,
            )
            for builder_cls in self.child_classes()
        )
        self.children = (general, causal)
        self.routing = self.backend_cls.routing_policy(layer_names, vllm_config)
        thresholds = (child.reorder_batch_threshold for child in self.children)
        self.reorder_batch_threshold = min((t for t in thresholds if t is not None), default=None)
        level = self.routing.get_cudagraph_support(vllm_config, kv_cache_spec)
        if level is AttentionCGSupport.NEVER:
            # Recorded in a draft's graph, the update would go on for the captured child alone.
            self.supports_draft_decode_metadata_update = False
        if all(hasattr(child, "_get_workspace_buffer") for child in self.children):
            self.set_workspace_buffer(self._get_workspace_buffer())
        from vllm.v1.attention.backends.storage_proof import prove_one_storage

        prove_one_storage(
            self.backend_cls, kv_cache_spec, layer_names, vllm_config, device, self.children
        )

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """The weakest of both children's levels and the policy's."""
        sources: tuple[Any, ...] = (*cls.child_classes(), cls.backend_cls.routing_policy)
        levels = [source.get_cudagraph_support(vllm_config, kv_cache_spec) for source in sources]
        for source, level in zip(sources, levels, strict=True):
            if not isinstance(level, AttentionCGSupport):
                raise ValueError(
                    f"get_cudagraph_support of {source.__name__} gives {level!r}, which is no "
                    "AttentionCGSupport."
                )
        return min(levels, key=attrgetter("value"))

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        """The capture child's, where the policy keeps routing constant for uniform batches."""
        policy = cls.backend_cls.routing_policy
        level = policy.get_cudagraph_support(vllm_config, kv_cache_spec)
        if level.value < AttentionCGSupport.UNIFORM_BATCH.value:
            return None
        child = cls.child_classes()[policy.capture_variant]
        return child.get_varlen_cudagraph_max_query_len(vllm_config, kv_cache_spec)

    def set_kernel_block_size(self, kernel_block_size: int) -> None:
        """Tell both children the kernel's block size, in tokens."""
        self.kernel_block_size = kernel_block_size
        for child in self.children:
            child.set_kernel_block_size(kernel_block_size)  # type: ignore[attr-defined, unused-ignore]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **extras: Any,
    ) -> Any:
        """The routed child's metadata for this batch."""
        variant = self._routed(common_attn_metadata)
        build = self.children[variant].build
        taken = {name: extras[name] for name in extras if _takes(build, name)}
        try:
            metadata = build(common_prefix_len, common_attn_metadata, fast_build, **taken)
        except Exception as error:
            _say_whose(error, self.backend_cls, variant, "build")
            raise
        return self._named(metadata, variant)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """The capture child's metadata, whatever the batch."""
        variant = self.routing.capture_variant
        child = self.children[variant]
        return self._named(child.build_for_cudagraph_capture(common_attn_metadata), variant)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> Any:
        """The routed child's metadata for a drafting step."""
        variant = self._routed(common_attn_metadata)
        child = self.children[variant]
        return self._named(child.build_for_drafting(common_attn_metadata, draft_index), variant)

    def update_block_table(
        self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Any:
        """The metadata's own child updates it; the variant stays with it."""
        variant = _variant_of(metadata, self.backend_cls)
        child = self.children[variant]
        return self._named(child.update_block_table(metadata, blk_table, slot_mapping), variant)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        child = self.children[_variant_of(metadata, self.backend_cls)]
        child.update_draft_decode_metadata(metadata)

    def _get_workspace_buffer(self) -> torch.Tensor | None:
        """The workspace of the first child that has one; the runner shares it between groups."""
        for child in self.children:
            if hasattr(child, "_get_workspace_buffer"):
                return child._get_workspace_buffer()
        return None

    def set_workspace_buffer(self, workspace_buffer: torch.Tensor | None) -> None:
        """Hand one workspace to each child that takes one."""
        for child in self.children:
            if workspace_buffer is not None and hasattr(child, "set_workspace_buffer"):
                child.set_workspace_buffer(workspace_buffer)

    def _routed(self, batch: CommonAttentionMetadata) -> int:
        """The policy's variant for this batch."""
        variant = self.routing.select(batch)
        if variant not in (GENERAL, CAUSAL):
            raise ValueError(
                f"{type(self.routing).__name__}, the routing_policy of "
                f"{self.backend_cls.get_name()}, selects {variant!r}, and there are 0 (general) "
                "and 1 (causal)."
            )
        return int(variant)

    def _named(self, metadata: Any, variant: int) -> Any:
        """`metadata`, carrying the variant that it is for, also where its class is frozen or has
        slots.

        Raises:
            TypeError: the child built none, or one that can carry nothing.
        """
        made = getattr(metadata, "_attention_backend_variant", None)
        choice = Choice(variant, {**getattr(made, "made", {}), self.backend_cls: variant})
        try:
            object.__setattr__(metadata, "_attention_backend_variant", choice)
        except (AttributeError, TypeError):  # slots: its class must say it
            try:
                metadata_cls: Any = type(metadata)
                named = _class_of_choice(metadata_cls, tuple(choice.made.items()))
                object.__setattr__(metadata, "__class__", named)
            except TypeError as error:
                child = self.backend_cls.child_classes()[variant].get_name()
                raise TypeError(
                    f"The metadata that {child} builds is a {type(metadata).__name__}, which "
                    f"cannot carry the choice of {self.backend_cls.get_name()}: let it be a plain "
                    "object or a dataclass."
                ) from error
        return metadata


def _say_whose(
    error: Exception, backend_cls: type[CompositeAttentionBackend], variant: int, hook: str
) -> None:
    child = backend_cls.child_classes()[variant].get_name()
    role = "general" if variant == GENERAL else "causal"
    error.add_note(f"Raised by {hook} of {child}, the {role} child of {backend_cls.get_name()}.")


class Choice(int):
    """The variant that the outermost composite chose, as the engine reads it, with what each
    composite inside it chose for the same metadata."""

    made: dict[type, int]

    def __new__(cls, variant: int, made: dict[type, int]) -> "Choice":
        self = super().__new__(cls, variant)
        self.made = made
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return int(self), self.made


def _variant_of(metadata: Any, backend_cls: type) -> int:
    choice = metadata._attention_backend_variant
    return choice.made.get(backend_cls, choice) if isinstance(choice, Choice) else choice


@functools.cache
def _class_of_choice(metadata_cls: type, made: tuple[tuple[type, int], ...]) -> type:
    plain: Any = getattr(metadata_cls, "_without_variant", metadata_cls)
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    choice = Choice(made[-1][1], dict(made))
    extra = {"__slots__": (), "_without_variant": plain, "_attention_backend_variant": choice}
    return type(plain.__name__, (plain,), names | extra)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def create_composite_attention_backend(
    general_backend: type[AttentionBackend],
    causal_backend: type[AttentionBackend],
    *,
    name: str,
    backend_name: str,
    module: str,
    routing_policy: type[CompositeAttentionRouting],
    head_sizes: Iterable[int] | None = (),
    kernel_block_sizes: Iterable[int] | None = (),
    device_major: int | None = None,
) -> type[AttentionBackend]:
    """Join two backends into one that `routing_policy` switches between, batch by batch.

    The same arguments give the same class. The same child twice gives that child back.

    Args:
        general_backend: variant 0, which also writes the KV cache for both.
        causal_backend: variant 1.
        name: the class's name; `module` must hold it under this name for it to be pickled.
        backend_name: what `get_name()` returns, a member of `AttentionBackendEnum`.
        module: the class's `__module__`.
        routing_policy: a `CompositeAttentionRouting`.
        head_sizes: head sizes to serve, of those that both children do; None or empty for all.
        kernel_block_sizes: kernel block sizes, in tokens, to choose from; None or empty for all.
        device_major: the only major compute capability to serve; None for all.

    Raises:
        ValueError: a child writes the KV cache in its `forward`, or is an MLA, sparse or
            state-space backend; or an argument is not what it should be.
    """
    for option, text in (("name", name), ("backend_name", backend_name), ("module", module)):
        if not (isinstance(text, str) and text):
            raise ValueError(f"{option} of a composite must be a string, not {text!r}.")
    for child in (general_backend, causal_backend):
        if not (isinstance(child, type) and issubclass(child, AttentionBackend)):
            raise ValueError(f"{child!r} cannot be a child of {name}: it is no backend class.")
    _refuse_policy(routing_policy, name)
    if not (device_major is None or isinstance(device_major, int)):
        raise ValueError(f"device_major of {name} must be an int or None, not {device_major!r}.")
    return _create(
        general_backend,
        causal_backend,
        name,
        backend_name,
        module,
        routing_policy,
        _ints(head_sizes, f"head_sizes of {name}"),
        _ints(kernel_block_sizes, f"kernel_block_sizes of {name}"),
        device_major,
    )


def _ints(given: Any, what: str) -> tuple[int, ...]:
    if given is None:
        return ()
    sizes = tuple(given) if isinstance(given, Iterable) else (given, None)
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"{what} must be a sequence of ints, not {given!r}.")
    return sizes


def _refuse_policy(policy: Any, composite: str) -> None:
    if not isinstance(policy, type):
        raise ValueError(
            f"routing_policy of {composite} must be a CompositeAttentionRouting class, not "
            f"{policy!r}."
        )
    wanted = ("capture_variant", "select", "get_cudagraph_support", "variant_uses_mm_prefix")
    missing = [
        name
        for name in wanted
        # What a policy inherits from the protocol itself says nothing.
        if getattr(policy, name, None) is getattr(CompositeAttentionRouting, name, None)
    ]
    cannot = f"{policy.__name__} cannot be the routing_policy of {composite}"
    if missing:
        raise ValueError(
            f"{cannot}: it lacks {' and '.join(missing)} (see CompositeAttentionRouting)."
        )
    variant = policy.capture_variant  # type: ignore[attr-defined]
    if not isinstance(variant, int) or variant not in (GENERAL, CAUSAL):
        raise ValueError(
            f"{cannot}: its capture_variant is {variant!r}, and there are 0 (general) and "
            "1 (causal)."
        )
    called_by_us = {
        "__init__": (policy, "layer_names, vllm_config"),
        "get_cudagraph_support": (policy.get_cudagraph_support, "vllm_config, kv_cache_spec"),  # type: ignore[attr-defined]
        "variant_uses_mm_prefix": (policy.variant_uses_mm_prefix, "variant"),  # type: ignore[attr-defined]
    }
    if not callable(policy.select):  # type: ignore[attr-defined]
        raise ValueError(f"{cannot}: its select is no method.")
    for hook, (function, arguments) in called_by_us.items():
        try:
            inspect.signature(function).bind(*arguments.split(", "))
        except TypeError as error:
            raise ValueError(
                f"{cannot}: its {hook} cannot be called on the class with ({arguments}), as "
                f"CompositeAttentionRouting says: {error}."
            ) from error


@functools.cache
def _create(
    general_backend: type[AttentionBackend],
    causal_backend: type[AttentionBackend],
    name: str,
    backend_name: str,
    module: str,
    routing_policy: type[CompositeAttentionRouting],
    head_sizes: tuple[int, ...],
    kernel_block_sizes: tuple[int, ...],
    device_major: int | None,
) -> type[AttentionBackend]:
    if general_backend is causal_backend:
        return general_backend
    for child in (general_backend, causal_backend):
        refuse_child(child, f"{name} of {_names(general_backend, causal_backend)}")

    def bind(cls: type, suffix: str, where: str, **attributes: Any) -> Any:
        names = {"__module__": module, "__qualname__": name + where, "__doc__": cls.__doc__}
        return type(name + suffix, (cls,), names | attributes)

    backend = bind(
        CompositeAttentionBackend,
        "",
        "",
        general_backend_cls=general_backend,
        causal_backend_cls=causal_backend,
        routing_policy=routing_policy,
        backend_name=backend_name,
        head_sizes=head_sizes,
        kernel_block_sizes=kernel_block_sizes,
        device_major=device_major,
    )
    # The qualified names are paths that pickle can follow.
    backend.impl_cls = bind(CompositeAttentionImpl, "Impl", ".impl_cls", backend_cls=backend)
    backend.builder_cls = bind(
        CompositeAttentionMetadataBuilder, "MetadataBuilder", ".builder_cls", backend_cls=backend
    )
    return backend


def refuse_child(child: type[AttentionBackend], composite: str) -> None:
    """Raise ValueError, with the reason, if a backend can be no child of any composite.

    Args:
        child: the backend.
        composite: what it was to be a child of, for the sentence.
    """
    if child.forward_includes_kv_cache_update:
        raise ValueError(
            f"{child.get_name()} cannot be a child of {composite}: its forward writes the KV "
            "cache itself, and a composite needs separate KV cache updates "
            "(forward_includes_kv_cache_update = False)."
        )
    for kind, hook in (("MLA", "is_mla"), ("sparse", "is_sparse"), ("state-space", "is_ssm")):
        if getattr(child, hook, bool)():
            raise ValueError(
                f"{child.get_name()} cannot be a child of {composite}: it is a {kind} "
                "backend, and composites join backends of ordinary attention only."
            )


if unsupported_reason() is not None:
    # Beside an engine that this version does not know, its own file of this name takes over.
    run_engine_file(Path(__file__).parent.with_suffix(".py"), globals())
