"""No hook of the installed engine's interfaces is without a rule, and none is answered by the
base class's default where the children say otherwise."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.backends.composite import (
    BACKEND_RULES,
    BUILDER_RULES,
    IMPL_RULES,
    CompositeAttentionBackend,
    CompositeAttentionImpl,
    CompositeAttentionMetadataBuilder,
    Rule,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from tests.v1.attention.mock_children import (
    Answers,
    MockLayer,
    comparable,
    compose,
    make_builder,
    make_child,
    make_config,
    make_impl,
    make_routing,
)

INTERFACES: dict[str, type] = {
    "backend": AttentionBackend,
    "impl": AttentionImpl,
    "builder": AttentionMetadataBuilder,
}
COMPOSITES: dict[str, type] = {
    "backend": CompositeAttentionBackend,
    "impl": CompositeAttentionImpl,
    "builder": CompositeAttentionMetadataBuilder,
}
RULES = {"backend": BACKEND_RULES, "impl": IMPL_RULES, "builder": BUILDER_RULES}


def public_members(interface: str) -> set[str]:
    """Hooks, attributes and declared attributes of an interface and of its bases in vLLM."""
    classes = [c for c in INTERFACES[interface].__mro__ if c.__module__.startswith("vllm.")]
    names = {name for c in classes for name in (*vars(c), *inspect.get_annotations(c))}
    return {name for name in names if not name.startswith("_")}


def members_without_a_rule(interface: str) -> list[str]:
    return sorted(public_members(interface) - RULES[interface].keys())


@pytest.mark.parametrize("interface", INTERFACES)
def test_every_public_member_of_the_engines_interface_has_a_rule(interface: str) -> None:
    assert members_without_a_rule(interface) == []


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("answer", [lambda self: True, property(lambda self: True), False])
def test_a_member_that_an_engine_adds_is_found_and_named(
    interface: str, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INTERFACES[interface], "supports_telepathy", answer, raising=False)
    assert members_without_a_rule(interface) == ["supports_telepathy"]


def composite_of(interface: str, general: Answers, causal: Answers) -> Any:
    """A composite of children that answer one interface's hooks so."""
    answers: list[dict[str, Any]] = [{interface: general}, {interface: causal}]
    return compose(
        make_child("GENERAL", **answers[0]),
        make_child("CAUSAL", **answers[1]),
        routing_policy=make_routing(),
    )


def held(interface: str, composite: Any, on: str) -> Any:
    """What callers hold of a composite: its backend class; its impl or builder, as class or
    instance."""
    if interface == "impl":
        return make_impl(composite) if on == "instance" else composite.get_impl_cls()
    if interface == "builder":
        return make_builder(composite) if on == "instance" else composite.get_builder_cls()
    return composite


def ask(interface: str, composite: Any, hook: str, args: tuple[Any, ...], on: str) -> Any:
    """The answer of the composite's backend class, impl or builder: of the class or an instance."""
    answer = getattr(held(interface, composite, on), hook)
    return answer(*args) if callable(answer) else answer


Combine = Callable[[bool, bool], bool]
TRUTH = [(True, True), (True, False), (False, True), (False, False)]


def both(general: bool, causal: bool) -> bool:
    return general and causal


def either(general: bool, causal: bool) -> bool:
    return general or causal


def generals(general: bool, causal: bool) -> bool:
    return general


def causals(general: bool, causal: bool) -> bool:
    return causal


def never(general: bool, causal: bool) -> bool:
    return False


SPEC = MockLayer().get_kv_cache_spec()

FLAGS: list[tuple[str, str, tuple[Any, ...], Combine]] = [
    ("backend", "supports_dtype", (torch.int8,), both),
    ("backend", "supports_kv_cache_dtype", ("fp8",), both),
    ("backend", "supports_head_size", (72,), both),
    ("backend", "supports_block_size", (16,), both),
    ("backend", "supports_compute_capability", (DeviceCapability(9, 0),), both),
    ("backend", "supports_sliding_window", (), both),
    ("backend", "supports_rswa", (), both),
    ("backend", "supports_attn_type", ("encoder",), both),
    ("backend", "supports_sink", (), both),
    ("backend", "supports_alibi_sqrt", (), both),
    ("backend", "supports_non_causal", (), both),
    ("backend", "supports_per_head_quant_scales", (), both),
    ("backend", "supports_kv_connector", (), both),
    ("backend", "supports_kv_cache_update_bypass", (), both),
    ("backend", "supports_mm_prefix", (), generals),
    ("backend", "supports_batch_invariance", (), never),
    ("backend", "supports_pcp", (), never),
    ("backend", "supports_dcp", (), never),
    ("backend", "supports_non_causal_dcp", (), never),
    ("backend", "supports_device_cpu_query_lens_mismatch", (), never),
    ("impl", "supports_quant_query_input", (), both),
    ("impl", "fused_output_quant_supported", (None,), both),
    ("impl", "supports_dense_mha_prefill", (), both),
    ("impl", "supports_pcp", (), generals),
    ("impl", "fused_rope_kvcache_supported", (), generals),
    ("impl", "fused_qk_norm_rope_kvcache_supported", (), generals),
    ("impl", "fused_qk_norm_mrope_kvcache_supported", (), generals),
    ("impl", "supports_dcp", (), causals),
    ("impl", "can_return_lse_for_decode", (), causals),
    ("impl", "need_to_return_lse_for_decode", (), causals),
    ("impl", "lse_base_on_e", (), causals),
    ("impl", "supports_mtp_with_cp_non_trivial_interleave_size", (), causals),
    ("impl", "is_sparse", (), never),
    ("builder", "requires_block_table_width", (), either),
    ("builder", "supports_update_block_table", (), both),
    ("builder", "supports_draft_decode_metadata_update", (), both),
    ("builder", "use_cascade_attention", (16, None, 4, 2, False, False, False, 8, 1), never),
]
"""Interface, hook, its arguments, and how the composite's answer follows from the children's."""

FLAGS = [flag for flag in FLAGS if hasattr(INTERFACES[flag[0]], flag[1])]
FLAG_IDS = [f"{interface}.{hook}" for interface, hook, *_ in FLAGS]


@pytest.mark.parametrize(("general", "causal"), TRUTH)
@pytest.mark.parametrize(("interface", "hook", "args", "combine"), FLAGS, ids=FLAG_IDS)
def test_yes_or_no_follows_from_the_childrens(
    interface: str, hook: str, args: tuple[Any, ...], combine: Combine, general: bool, causal: bool
) -> None:
    composite = composite_of(interface, {hook: general}, {hook: causal})
    on = "class" if interface == "builder" else "instance"  # a mock builder of True wants a width
    assert ask(interface, composite, hook, args, on) is combine(general, causal)


ATTRIBUTES = [
    (interface, hook, combine)
    for interface, hook, args, combine in FLAGS
    if interface != "backend" and not callable(getattr(INTERFACES[interface], hook))
]


@pytest.mark.parametrize("on", ["class", "instance"])
@pytest.mark.parametrize(("general", "causal"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("interface", "hook", "combine"), ATTRIBUTES, ids=[f"{a[0]}.{a[1]}" for a in ATTRIBUTES]
)
def test_flag_reads_alike_on_the_class_and_on_an_instance(
    interface: str, hook: str, combine: Combine, general: bool, causal: bool, on: str
) -> None:
    composite = composite_of(interface, {hook: general}, {hook: causal})
    if interface == "builder" and on == "instance":
        asks = hook == "requires_block_table_width"
        width: dict[str, Any] = {"block_table_width": 8} if asks else {}
        assert getattr(make_builder(composite, **width), hook) is combine(general, causal)
    else:
        assert ask(interface, composite, hook, (), on) is combine(general, causal)


REFUSED_CHILDREN = ["is_mla", "is_sparse", "is_ssm", "forward_includes_kv_cache_update"]


@pytest.mark.parametrize("hook", REFUSED_CHILDREN)
def test_composite_is_of_no_kind_that_its_children_may_not_be(hook: str) -> None:
    assert ask("backend", composite_of("backend", {}, {}), hook, (), "class") is False


LAYOUTS = KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC
OTHER_SPEC = MockLayer(head_size=96).get_kv_cache_spec()
COMBINATION = (64, torch.float32, "auto", 16, False, False, False, False, DeviceCapability(9, 0))
CONFIGURATION = (*COMBINATION[:8], False, DeviceCapability(9, 0), "decoder")
WRITERS = [
    "do_rope_and_kv_cache_update",
    "do_qk_norm_rope_kvcache_update",
    "do_qk_norm_mrope_kvcache_update",
]

ANSWERS: list[tuple[str, str, tuple[Any, ...], Any, Any, Any]] = [
    ("backend", "supported_dtypes", (), [torch.int8, torch.int16], [torch.int16], [torch.int16]),
    ("backend", "supported_kv_cache_dtypes", (), ["fp8", "int8"], ["int8", "fp4"], ["int8"]),
    ("backend", "get_supported_head_sizes", (), [64, 128], [128, 256], [128]),
    (
        "backend",
        "get_supported_kernel_block_sizes",
        (),
        [MultipleOf(4)],
        [MultipleOf(6)],
        [MultipleOf(12)],
    ),
    ("backend", "supported_kv_cache_layouts", (), LAYOUTS[:2], LAYOUTS[1:], LAYOUTS[1:2]),
    ("backend", "customize_spec", (SPEC,), OTHER_SPEC, OTHER_SPEC, OTHER_SPEC),
    ("backend", "supports_combination", COMBINATION, None, "too hot", "CAUSAL: too hot"),
    (
        "backend",
        "validate_configuration",
        CONFIGURATION,
        ["too old"],
        ["too hot"],
        ["GENERAL: too old", "CAUSAL: too hot"],
    ),
    ("impl", "num_heads", (), 3, 5, 3),
    ("impl", "head_size", (), 3, 5, 3),
    ("impl", "scale", (), 0.3, 0.5, 0.3),
    ("impl", "kv_cache_dtype", (), "fp8", "int8", "fp8"),
    ("impl", "kv_quant_mode", (), "the general's", "the causal's", "the general's"),
    *[("impl", hook, (), "the general's", "the causal's", "the general's") for hook in WRITERS],
    ("builder", "reorder_batch_threshold", (), 4, 2, 2),
    (
        "builder",
        "get_cudagraph_support",
        (make_config(), SPEC),
        AttentionCGSupport.ALWAYS,
        AttentionCGSupport.UNIFORM_BATCH,
        AttentionCGSupport.UNIFORM_BATCH,
    ),
    ("builder", "get_varlen_cudagraph_max_query_len", (make_config(), SPEC), 4, 8, 8),
]
"""Interface, hook, its arguments, the general and the causal child's answer, the composite's."""

ANSWERS = [row for row in ANSWERS if row[1] in public_members(row[0])]
ANSWER_IDS = [f"{interface}.{hook}" for interface, hook, *_ in ANSWERS]


@pytest.mark.parametrize(
    ("interface", "hook", "args", "general", "causal", "expected"), ANSWERS, ids=ANSWER_IDS
)
def test_answer_follows_from_the_childrens(
    interface: str, hook: str, args: tuple[Any, ...], general: Any, causal: Any, expected: Any
) -> None:
    composite = composite_of(interface, {hook: general}, {hook: causal})
    answer = ask(interface, composite, hook, args, "instance")
    assert comparable(answer) == comparable(expected)


def test_preferred_block_size_suits_both_children() -> None:
    composite = compose(
        make_child("GENERAL", block_sizes=[MultipleOf(48)]),
        make_child("CAUSAL", block_sizes=[MultipleOf(32)]),
    )
    assert composite.get_preferred_block_size(16) == 96


TESTED_APART = {
    "backend": {
        # test_composite_factory
        "get_name",
        "get_impl_cls",
        "get_builder_cls",
        "full_cls_name",
        *REFUSED_CHILDREN,
        # above
        "get_preferred_block_size",
    },
    "impl": {
        # test_composite_impl
        "forward",
        "prepare_for_batch",
        "process_weights_after_loading",
        "set_interleaved_v_cache",
        "get_impl_variants",
        "dcp_world_size",
        "dcp_rank",
        "pcp_world_size",
        "pcp_rank",
        "total_cp_world_size",
        "total_cp_rank",
    },
    "builder": {
        # test_composite_builder
        "set_kernel_block_size",
        "build",
        "build_for_cudagraph_capture",
        "build_for_drafting",
        "update_block_table",
        "update_draft_decode_metadata",
    },
}


@pytest.mark.parametrize("interface", INTERFACES)
def test_no_member_is_left_to_the_base_class_unless_its_rule_says_so(interface: str) -> None:
    composite = composite_of(interface, {}, {})
    own = vars(held(interface, composite, "instance")).keys() | vars(COMPOSITES[interface]).keys()
    inherited = [
        name
        for name in public_members(interface) & RULES[interface].keys()
        if RULES[interface][name] is not Rule.DERIVED and name not in own
    ]
    assert inherited == []


@pytest.mark.parametrize("interface", INTERFACES)
def test_every_public_member_of_the_engines_interface_is_given_answers_here(
    interface: str,
) -> None:
    answered = {hook for where, hook, *_ in (*FLAGS, *ANSWERS) if where == interface}
    assert sorted(public_members(interface) - answered - TESTED_APART[interface]) == []


def default_answer(interface: str, hook: str, args: tuple[Any, ...]) -> Any:
    """What vLLM's base class says; None where it declares the attribute only or raises."""
    default = getattr(INTERFACES[interface], hook, None)
    if not callable(default):
        return default
    try:
        static = inspect.getattr_static(INTERFACES[interface], hook)
        return default(*args) if isinstance(static, classmethod) else default(None, *args)
    except (AttributeError, NotImplementedError, TypeError):
        return None


@pytest.mark.parametrize(
    ("interface", "hook", "args", "general", "causal", "expected"), ANSWERS, ids=ANSWER_IDS
)
def test_expected_answer_is_not_the_base_classs_default(
    interface: str, hook: str, args: tuple[Any, ...], general: Any, causal: Any, expected: Any
) -> None:
    default = default_answer(interface, hook, args)
    assert comparable(expected) != comparable(default)
