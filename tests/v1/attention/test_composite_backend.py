"""What a composite says it supports, and whose reason it gives when it does not."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from tests.v1.attention.mock_children import (
    MockLayer,
    comparable,
    compose,
    make_child,
    make_routing,
    pair,
)

BOTH_MASK = make_routing(masked_variants=(0, 1))
CAUSAL_MASKS = make_routing(masked_variants=(1,))


TRUTH = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(("general", "causal"), TRUTH)
@pytest.mark.parametrize(
    ("child_option", "supported", "other", "hook", "asked"),
    [
        ("dtypes", torch.float32, torch.bfloat16, "supports_dtype", torch.float32),
        ("kv_cache_dtypes", "fp8", "auto", "supports_kv_cache_dtype", "fp8"),
        ("head_sizes", 64, 128, "supports_head_size", 64),
    ],
    ids=["dtype", "KV cache dtype", "head size"],
)
def test_listed_values_need_both_children(
    general: bool,
    causal: bool,
    child_option: str,
    supported: Any,
    other: Any,
    hook: str,
    asked: Any,
) -> None:
    listed: list[dict[str, Any]] = [
        {child_option: [supported if yes else other]} for yes in (general, causal)
    ]
    composite = compose(make_child("GENERAL", **listed[0]), make_child("CAUSAL", **listed[1]))
    assert getattr(composite, hook)(asked) is (general and causal)


def test_children_without_a_list_of_head_sizes_take_any() -> None:
    assert compose(*pair()).supports_head_size(72)


def test_head_sizes_listed_are_those_of_both_children() -> None:
    children = make_child("GENERAL", head_sizes=[64, 128]), make_child("CAUSAL", head_sizes=[128])
    assert compose(*children).get_supported_head_sizes() == [128]


@pytest.mark.parametrize(("head_size", "supported"), [(64, True), (128, False), (256, False)])
def test_head_sizes_of_the_composite_narrow_further(head_size: int, supported: bool) -> None:
    composite = compose(*pair(head_sizes=[64, 128]), head_sizes=(64, 256))
    assert composite.supports_head_size(head_size) is supported


@pytest.mark.parametrize(("general", "causal"), TRUTH)
def test_compute_capability_needs_both_children(general: bool, causal: bool) -> None:
    children = [
        make_child(name, backend={"supports_compute_capability": answer})
        for name, answer in (("GENERAL", general), ("CAUSAL", causal))
    ]
    composite = compose(*children)
    assert composite.supports_compute_capability(DeviceCapability(9, 0)) is (general and causal)


@pytest.mark.parametrize(
    ("device_major", "supported"), [(None, True), (9, True), (8, False), (10, False)]
)
def test_device_major_narrows_to_one_major_capability(
    device_major: int | None, supported: bool
) -> None:
    composite = compose(*pair(), device_major=device_major)
    assert composite.supports_compute_capability(DeviceCapability(9, 0)) is supported


@pytest.mark.parametrize(
    ("policy", "general", "causal", "supported"),
    [
        (make_routing(), True, False, True),
        (make_routing(), False, True, False),
        (make_routing(), True, True, True),
        (CAUSAL_MASKS, False, True, True),
        (CAUSAL_MASKS, True, False, False),
        (BOTH_MASK, True, True, True),
        (BOTH_MASK, True, False, False),
        (BOTH_MASK, False, True, False),
    ],
)
def test_image_mask_is_demanded_of_the_children_that_the_policy_names(
    policy: Any, general: bool, causal: bool, supported: bool
) -> None:
    children = [
        make_child(name, masks_images=masks)
        for name, masks in (("GENERAL", general), ("CAUSAL", causal))
    ]
    assert compose(*children, routing_policy=policy).supports_mm_prefix() is supported


ASKED = inspect.signature(AttentionBackend.validate_configuration).parameters
CONFIGURATION: dict[str, Any] = {
    "head_size": 64,
    "dtype": torch.float32,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": True,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}
COMBINATION = {
    name: CONFIGURATION[name]
    for name in inspect.signature(AttentionBackend.supports_combination).parameters
}


def test_configuration_that_both_children_take_has_no_reason_against_it() -> None:
    assert compose(*pair()).validate_configuration(**CONFIGURATION) == []


REASONS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("head size", {"head_sizes": [128]}, {}, "head_size not supported"),
    ("dtype", {"dtypes": [torch.float16]}, {}, "dtype not supported"),
    ("KV cache dtype", {"kv_cache_dtypes": ["fp8"]}, {}, "kv_cache_dtype not supported"),
    ("block size", {"block_sizes": [MultipleOf(32)]}, {}, "block_size not supported"),
    ("sinks", {}, {"has_sink": True}, "attention sinks not supported"),
    ("sliding window", {}, {"has_sliding_window": True}, "sliding window not supported"),
    (
        "compute capability",
        {"backend": {"supports_compute_capability": False}},
        {},
        "compute capability not supported",
    ),
    (
        "KV connector",
        {"backend": {"supports_kv_connector": False}},
        {"use_kv_connector": True},
        "KV connector not supported",
    ),
    (
        "combination",
        {"backend": {"supports_combination": "no sinks with fp8"}},
        {},
        "no sinks with fp8",
    ),
]
REASONS = [row for row in REASONS if row[2].keys() <= ASKED.keys()]
ABLE = {"supports_sink": True, "supports_sliding_window": True}


@pytest.mark.parametrize("unable", ["GENERAL", "CAUSAL"])
@pytest.mark.parametrize(
    ("child", "asked", "reason"), [r[1:] for r in REASONS], ids=[r[0] for r in REASONS]
)
def test_reason_carries_the_name_of_the_child_that_gives_it(
    unable: str, child: dict[str, Any], asked: dict[str, Any], reason: str
) -> None:
    children = [
        make_child(name, masks_images=True, **(child if name == unable else {"backend": ABLE}))
        for name in ("GENERAL", "CAUSAL")
    ]
    reasons = compose(*children).validate_configuration(**(CONFIGURATION | asked))
    assert reasons == [f"{unable}: {reason}"]


def test_a_reason_that_both_children_give_is_reported_for_each() -> None:
    reasons = compose(*pair(dtypes=[torch.float16])).validate_configuration(**CONFIGURATION)
    assert reasons == ["GENERAL: dtype not supported", "CAUSAL: dtype not supported"]


def test_every_reason_of_a_child_is_reported() -> None:
    causal = make_child("CAUSAL", backend={"validate_configuration": ["too old", "too small"]})
    composite = compose(make_child("GENERAL", masks_images=True), causal)
    reasons = composite.validate_configuration(**CONFIGURATION)
    assert reasons == ["CAUSAL: too old", "CAUSAL: too small"]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"head_sizes": (128,)}, "head_size not supported"),
        ({"kernel_block_sizes": (32,)}, "block_size not supported"),
        ({"device_major": 8}, "compute capability not supported"),
    ],
    ids=["head_sizes", "kernel_block_sizes", "device_major"],
)
def test_what_only_the_composite_narrows_is_reported_too(
    option: dict[str, Any], reason: str
) -> None:
    assert compose(*pair(), **option).validate_configuration(**CONFIGURATION) == [reason]


def test_an_image_mask_that_the_general_child_lacks_is_reported_with_its_name() -> None:
    composite = compose(make_child("GENERAL"), make_child("CAUSAL", masks_images=True))
    reasons = composite.validate_configuration(**CONFIGURATION)
    assert reasons == ["GENERAL: partial multimodal token full attention not supported"]


def test_configuration_may_be_given_in_order() -> None:
    composite = compose(*pair(dtypes=[torch.float16]))
    reasons = composite.validate_configuration(*CONFIGURATION.values())
    assert reasons == ["GENERAL: dtype not supported", "CAUSAL: dtype not supported"]


NEVER = [
    ("supports_pcp", "use_pcp", "PCP"),
    ("supports_dcp", "use_dcp", "DCP"),
    ("supports_batch_invariance", "use_batch_invariant", "batch invariance"),
    ("supports_device_cpu_query_lens_mismatch", "use_adaptive_verification", "query lens"),
]

NEVER = [row for row in NEVER if row[1] in ASKED]


@pytest.mark.parametrize(("hook", "asked", "reason"), NEVER, ids=[hook for hook, *_ in NEVER])
def test_what_routing_rules_out_is_refused_though_both_children_can(
    hook: str, asked: str, reason: str
) -> None:
    reasons = compose(*pair(backend={hook: True})).validate_configuration(
        **(CONFIGURATION | {asked: True})
    )
    assert [reason in r for r in reasons] == [True]


@pytest.mark.parametrize("unable", ["GENERAL", "CAUSAL"])
def test_combination_carries_the_name_of_the_child_that_refuses_it(unable: str) -> None:
    children = [
        make_child(name, backend={"supports_combination": "too hot" if name == unable else None})
        for name in ("GENERAL", "CAUSAL")
    ]
    assert compose(*children).supports_combination(**COMBINATION) == f"{unable}: too hot"


def test_combination_that_both_children_take_is_supported() -> None:
    assert compose(*pair()).supports_combination(**COMBINATION) is None


def refuses_image_mask(
    cls: Any,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    block_size: int | None,
    use_mla: bool,
    has_sink: bool,
    use_sparse: bool,
    use_mm_prefix: bool,
    device_capability: Any,
) -> str | None:
    """A child's `supports_combination`."""
    return "no image masks" if use_mm_prefix else None


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (make_routing(masked_variants=(0,)), "GENERAL: no image masks"),
        (make_routing(masked_variants=(1,)), "CAUSAL: no image masks"),
    ],
    ids=["policy masks the general child", "policy masks the causal child"],
)
def test_combination_asks_only_the_masked_child_about_the_image_mask(
    policy: Any, reason: str
) -> None:
    children = pair(backend={"supports_combination": refuses_image_mask})
    composite = compose(*children, routing_policy=policy)
    assert composite.supports_combination(*COMBINATION.values()) == reason


Sizes = Sequence[int | MultipleOf]


@pytest.mark.parametrize(
    ("general", "causal", "common"),
    [
        ([MultipleOf(16)], [MultipleOf(24)], [MultipleOf(48)]),
        ([MultipleOf(16)], [MultipleOf(32)], [MultipleOf(32)]),
        ([MultipleOf(1)], [MultipleOf(16)], [MultipleOf(16)]),
        ([64], [MultipleOf(16)], [64]),
        ([MultipleOf(16)], [64], [64]),
        ([40], [MultipleOf(16)], []),
        ([MultipleOf(16)], [40], []),
        ([64], [64], [64]),
        ([32], [64], []),
        ([16, 32, 64], [64, 32, 128], [32, 64]),
        ([16, 32, 48, 64], [MultipleOf(32)], [32, 64]),
        ([16, MultipleOf(64)], [16, 128], [16, 128]),
    ],
)
def test_block_sizes_are_the_intersection(general: Sizes, causal: Sizes, common: Sizes) -> None:
    composite = compose(
        make_child("GENERAL", block_sizes=general), make_child("CAUSAL", block_sizes=causal)
    )
    found = composite.get_supported_kernel_block_sizes()
    assert set(comparable(found)) == set(comparable(list(common)))


def test_intersection_is_of_the_sizes_for_the_asked_kv_cache_spec() -> None:
    large = replace(MockLayer().get_kv_cache_spec(), head_size=512)

    def sizes(cls: Any, kv_cache_spec: Any = None) -> Sizes:
        return [32] if kv_cache_spec is not None and kv_cache_spec.head_size == 512 else [16, 32]

    composite = compose(*pair(backend={"get_supported_kernel_block_sizes": sizes}))
    assert composite.get_supported_kernel_block_sizes(large) == [32]


@pytest.mark.parametrize(
    ("listed", "general", "causal", "common"),
    [
        ((16, 32, 64), [MultipleOf(16)], [MultipleOf(32)], [32, 64]),
        ((16, 32), [MultipleOf(1)], [MultipleOf(1)], [16, 32]),
        ((64, 16), [MultipleOf(16)], [MultipleOf(16)], [64, 16]),
        ((16, 32), [16, 32, 64], [32, 64], [32]),
        ((16, 32), [MultipleOf(32)], [MultipleOf(16)], [32]),
        ((16,), [MultipleOf(16)], [MultipleOf(32)], []),
    ],
)
def test_listed_block_sizes_are_those_that_both_accept(
    listed: tuple[int, ...], general: Sizes, causal: Sizes, common: Sizes
) -> None:
    composite = compose(
        make_child("GENERAL", block_sizes=general),
        make_child("CAUSAL", block_sizes=causal),
        kernel_block_sizes=listed,
    )
    assert composite.get_supported_kernel_block_sizes() == common


@pytest.mark.parametrize(
    ("block_size", "supported"), [(48, True), (96, True), (16, False), (24, False), (None, True)]
)
def test_block_size_must_suit_both_children(block_size: int | None, supported: bool) -> None:
    composite = compose(
        make_child("GENERAL", block_sizes=[MultipleOf(16)]),
        make_child("CAUSAL", block_sizes=[MultipleOf(24)]),
    )
    assert composite.supports_block_size(block_size) is supported


NOTHING_IN_COMMON: list[dict[str, Any]] = [
    {"general": [32], "causal": [64], "listed": ()},
    {"general": [MultipleOf(16)], "causal": [MultipleOf(32)], "listed": (16,)},
]


@pytest.mark.parametrize("sizes", NOTHING_IN_COMMON, ids=["intersection", "listed"])
@pytest.mark.parametrize("block_size", [None, 16, 32, 64, 128])
def test_with_nothing_in_common_no_block_size_is_supported(
    sizes: dict[str, Any], block_size: int | None
) -> None:
    composite = compose(
        make_child("GENERAL", block_sizes=sizes["general"]),
        make_child("CAUSAL", block_sizes=sizes["causal"]),
        kernel_block_sizes=sizes["listed"],
    )
    assert composite.supports_block_size(block_size) is False


def test_with_nothing_in_common_no_configuration_is_valid() -> None:
    composite = compose(
        make_child("GENERAL", masks_images=True, block_sizes=[32]),
        make_child("CAUSAL", block_sizes=[64]),
    )
    reasons = composite.validate_configuration(**(CONFIGURATION | {"block_size": None}))
    assert reasons == ["block_size not supported"]


def test_a_child_without_a_list_of_block_sizes_takes_any() -> None:
    composite = compose(make_child("GENERAL", block_sizes=[]), make_child("CAUSAL"))
    assert comparable(composite.get_supported_kernel_block_sizes()) == ["multiple of 16"]


def test_a_block_size_that_several_combinations_give_is_listed_once() -> None:
    sizes = [16, MultipleOf(16), MultipleOf(32)]
    composite = compose(*pair(block_sizes=sizes))
    found = comparable(composite.get_supported_kernel_block_sizes())
    assert found == [16, "multiple of 16", "multiple of 32"]


HEADS, TOKENS, BLOCKS = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC


@pytest.mark.parametrize(
    ("general", "causal", "common"),
    [
        ([HEADS, TOKENS], [HEADS, TOKENS], (HEADS, TOKENS)),
        ([HEADS, TOKENS, BLOCKS], [BLOCKS, HEADS], (HEADS, BLOCKS)),
        ([HEADS, TOKENS], [TOKENS], (TOKENS,)),
        (None, [TOKENS, HEADS], (TOKENS, HEADS)),
        ([TOKENS, HEADS], None, (TOKENS, HEADS)),
    ],
)
def test_layouts_are_those_that_both_children_read(
    general: Any, causal: Any, common: tuple[KVCacheLayout, ...]
) -> None:
    composite = compose(
        make_child("GENERAL", layouts=general), make_child("CAUSAL", layouts=causal)
    )
    assert set(composite.supported_kv_cache_layouts()) == set(common)


def test_children_that_read_any_layout_make_a_composite_that_reads_any() -> None:
    layouts = compose(*pair(layouts=None)).supported_kv_cache_layouts()
    assert layouts is None or set(layouts) == set(KVCacheLayout)


def test_layouts_of_one_order_keep_it() -> None:
    composite = compose(*pair(layouts=[TOKENS, BLOCKS, HEADS]))
    assert composite.supported_kv_cache_layouts() == (TOKENS, BLOCKS, HEADS)


def test_children_without_a_common_layout_are_named() -> None:
    composite = compose(
        make_child("GENERAL", layouts=[HEADS]), make_child("CAUSAL", layouts=[TOKENS])
    )
    with pytest.raises(ValueError, match="GENERAL and CAUSAL"):
        composite.supported_kv_cache_layouts()


def test_children_without_a_common_layout_make_no_configuration_valid() -> None:
    composite = compose(
        make_child("GENERAL", masks_images=True, layouts=[HEADS]),
        make_child("CAUSAL", layouts=[TOKENS]),
    )
    reasons = composite.validate_configuration(**CONFIGURATION)
    assert ["layout" in reason for reason in reasons] == [True]


def packed(cls: Any, spec: Any) -> Any:
    """A child's `customize_spec`."""
    return replace(spec, num_head_slots=1)


def test_spec_that_both_children_ask_for_is_the_composites() -> None:
    spec = MockLayer().get_kv_cache_spec()
    composite = compose(*pair(backend={"customize_spec": packed}))
    assert composite.customize_spec(spec) == replace(spec, num_head_slots=1)


@pytest.mark.parametrize("place", [0, 1], ids=["general child packs", "causal child packs"])
def test_children_that_ask_for_different_specs_are_named(place: int) -> None:
    children = [
        make_child(name, backend={"customize_spec": packed} if place == index else {})
        for index, name in enumerate(("GENERAL", "CAUSAL"))
    ]
    with pytest.raises(ValueError, match="GENERAL and CAUSAL"):
        compose(*children).customize_spec(MockLayer().get_kv_cache_spec())
