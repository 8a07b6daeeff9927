"""The composite's metadata builder: which child builds which batch, and the variant that every
metadata object carries from there on."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

from tests.v1.attention.mock_children import (
    CAUSAL,
    CPU,
    GENERAL,
    IMAGE_BATCH,
    TEXT_BATCH,
    Call,
    FrozenMetadata,
    FrozenSlottedMetadata,
    MockBackend,
    MockLayer,
    MockMetadata,
    SlottedMetadata,
    batch,
    compose,
    make_builder,
    make_child,
    make_config,
    make_impl,
    make_routing,
    pair,
)

EITHER = [pytest.param(GENERAL, id="general"), pytest.param(CAUSAL, id="causal")]
NAMES = ["GENERAL", "CAUSAL"]
SPEC = MockLayer().get_kv_cache_spec()


def routed(variant: int, **both: Any) -> tuple[tuple[type[MockBackend], type[MockBackend]], Any]:
    """Two children and a builder whose policy always selects `variant`, but captures the other."""
    children = pair(**both)
    policy = make_routing(variant, capture_variant=1 - variant)
    return children, make_builder(compose(*children, routing_policy=policy))


SHOWS_ITSELF = {"build": lambda self, *args: self}
"""Answers of a child's builder whose metadata is the builder, so that tests can look at it."""


def child_builder(builder: Any, variant: int) -> Any:
    """The builder of a child that `SHOWS_ITSELF`, inside a composite's."""
    builder.routing.variant = variant
    return builder.build(0, batch(*TEXT_BATCH))


@pytest.mark.parametrize("place", EITHER)
@pytest.mark.parametrize("asking", [{GENERAL}, {CAUSAL}, {GENERAL, CAUSAL}], ids=str)
def test_block_table_width_goes_only_to_a_child_that_asks(asking: set[int], place: int) -> None:
    children = [
        make_child(name, builder={"requires_block_table_width": index in asking})
        for index, name in enumerate(NAMES)
    ]
    make_builder(compose(*children), block_table_width=8)
    (call,) = children[place].called("__init__")
    assert call.kwargs == ({"block_table_width": 8} if place in asking else {})


@pytest.mark.parametrize(
    "attribute", ["kv_cache_spec", "layer_names", "vllm_config", "device"], ids=str
)
@pytest.mark.parametrize("place", [*EITHER, pytest.param(None, id="composite")])
def test_composite_and_children_are_built_for_the_same_group(
    attribute: str, place: int | None
) -> None:
    given = {
        "kv_cache_spec": SPEC,
        "layer_names": ["layers.0", "layers.1"],
        "vllm_config": make_config(),
        "device": CPU,
    }
    composite = compose(*pair(builder=SHOWS_ITSELF), routing_policy=make_routing())
    builder = composite.get_builder_cls()(**given)
    asked = builder if place is None else child_builder(builder, place)
    assert getattr(asked, attribute) is given[attribute]


@pytest.mark.parametrize(
    ("general", "causal", "threshold"),
    [(None, None, None), (1, None, 1), (None, 8, 8), (4, 2, 2), (2, 4, 2), (4, 4, 4)],
)
def test_reorder_threshold_is_the_smaller(
    general: int | None, causal: int | None, threshold: int | None
) -> None:
    composite = compose(
        make_child("GENERAL", builder={"reorder_batch_threshold": general}),
        make_child("CAUSAL", builder={"reorder_batch_threshold": causal}),
    )
    assert make_builder(composite).reorder_batch_threshold == threshold


needs_kernel_block_size = pytest.mark.skipif(
    not hasattr(AttentionMetadataBuilder, "set_kernel_block_size"),
    reason="from vLLM 0.32 on builders are not told the kernel's block size",
)


@needs_kernel_block_size
@pytest.mark.parametrize("place", [*EITHER, pytest.param(None, id="composite")])
def test_kernel_block_size_reaches_both_children_and_is_there_to_read(place: int | None) -> None:
    builder = make_builder(compose(*pair(builder=SHOWS_ITSELF), routing_policy=make_routing()))
    builder.set_kernel_block_size(64)
    asked = builder if place is None else child_builder(builder, place)
    assert asked.kernel_block_size == 64


ALWAYS, UNIFORM = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH
SINGLE, NEVER = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.NEVER


@pytest.mark.parametrize(
    ("general", "causal", "policy", "weakest"),
    [
        (ALWAYS, ALWAYS, ALWAYS, ALWAYS),
        (UNIFORM, ALWAYS, ALWAYS, UNIFORM),
        (ALWAYS, UNIFORM, ALWAYS, UNIFORM),
        (ALWAYS, ALWAYS, UNIFORM, UNIFORM),
        (SINGLE, UNIFORM, ALWAYS, SINGLE),
        (ALWAYS, SINGLE, UNIFORM, SINGLE),
        (UNIFORM, ALWAYS, SINGLE, SINGLE),
        (NEVER, UNIFORM, SINGLE, NEVER),
        (SINGLE, NEVER, UNIFORM, NEVER),
        (UNIFORM, SINGLE, NEVER, NEVER),
    ],
)
def test_graph_support_is_the_weakest_of_both_children_and_the_policy(
    general: AttentionCGSupport,
    causal: AttentionCGSupport,
    policy: AttentionCGSupport,
    weakest: AttentionCGSupport,
) -> None:
    composite = compose(
        make_child("GENERAL", builder={"_cudagraph_support": general}),
        make_child("CAUSAL", builder={"_cudagraph_support": causal}),
        routing_policy=make_routing(cudagraph_support=policy),
    )
    assert composite.get_builder_cls().get_cudagraph_support(make_config(), SPEC) is weakest


needs_varlen_graphs = pytest.mark.skipif(
    not hasattr(AttentionMetadataBuilder, "get_varlen_cudagraph_max_query_len"),
    reason="vLLM 0.30 has no graphs of variable query lengths",
)


@needs_varlen_graphs
@pytest.mark.parametrize(
    ("capture_variant", "policy", "longest"),
    [
        pytest.param(CAUSAL, ALWAYS, 8, id="constant routing, causal child captured"),
        pytest.param(GENERAL, ALWAYS, 4, id="constant routing, general child captured"),
        pytest.param(CAUSAL, NEVER, None, id="no constant routing"),
    ],
)
def test_variable_length_graphs_reach_as_far_as_the_policy_keeps_routing_constant(
    capture_variant: int, policy: AttentionCGSupport, longest: int | None
) -> None:
    composite = compose(
        make_child("GENERAL", builder={"get_varlen_cudagraph_max_query_len": 4}),
        make_child("CAUSAL", builder={"get_varlen_cudagraph_max_query_len": 8}),
        routing_policy=make_routing(capture_variant=capture_variant, cudagraph_support=policy),
    )
    builder_cls = composite.get_builder_cls()
    assert builder_cls.get_varlen_cudagraph_max_query_len(make_config(), SPEC) == longest


@needs_varlen_graphs
def test_where_only_single_token_decodes_are_constant_no_longer_graph_is_offered() -> None:
    composite = compose(
        *pair(builder={"get_varlen_cudagraph_max_query_len": 8}),
        routing_policy=make_routing(cudagraph_support=SINGLE),
    )
    longest = composite.get_builder_cls().get_varlen_cudagraph_max_query_len(make_config(), SPEC)
    assert longest in (None, 1)


def build(builder: Any) -> Any:
    return builder.build(common_prefix_len=0, common_attn_metadata=batch(*TEXT_BATCH))


def capture(builder: Any) -> Any:
    """Capture of a builder that `routed` made: it builds with the child that is not selected."""
    return builder.build_for_cudagraph_capture(batch(*TEXT_BATCH))


def draft(builder: Any) -> Any:
    return builder.build_for_drafting(common_attn_metadata=batch(*TEXT_BATCH), draft_index=2)


BUILDS = [build, capture, draft]
Build = Callable[[Any], Any]


@pytest.mark.parametrize("variant", EITHER)
@pytest.mark.parametrize("build_with", BUILDS)
def test_metadata_is_the_chosen_childs(build_with: Build, variant: int) -> None:
    _, builder = routed(1 - variant if build_with is capture else variant)
    assert build_with(builder).child == NAMES[variant]


@pytest.mark.parametrize("variant", EITHER)
@pytest.mark.parametrize("build_with", BUILDS)
def test_metadata_carries_its_variant(build_with: Build, variant: int) -> None:
    _, builder = routed(1 - variant if build_with is capture else variant)
    assert build_with(builder)._attention_backend_variant == variant


@pytest.mark.parametrize("variant", EITHER)
@pytest.mark.parametrize("build_with", BUILDS)
def test_the_other_child_builds_nothing(build_with: Build, variant: int) -> None:
    children, builder = routed(1 - variant if build_with is capture else variant)
    build_with(builder)
    assert children[1 - variant].called("build") == []


@pytest.mark.parametrize("variant", EITHER)
@pytest.mark.parametrize("metadata_cls", [SlottedMetadata, FrozenMetadata, FrozenSlottedMetadata])
@pytest.mark.parametrize("build_with", BUILDS)
def test_metadata_that_forbids_new_attributes_carries_its_variant(
    build_with: Build, metadata_cls: type[Any], variant: int
) -> None:
    _, builder = routed(
        1 - variant if build_with is capture else variant, metadata_cls=metadata_cls
    )
    assert build_with(builder)._attention_backend_variant == variant


@pytest.mark.parametrize("metadata_cls", [SlottedMetadata, FrozenMetadata, FrozenSlottedMetadata])
def test_metadata_that_forbids_new_attributes_is_still_of_its_class(
    metadata_cls: type[Any],
) -> None:
    _, builder = routed(CAUSAL, metadata_cls=metadata_cls)
    assert isinstance(build(builder), metadata_cls)


@pytest.mark.parametrize("metadata_cls", [SlottedMetadata, FrozenMetadata, FrozenSlottedMetadata])
def test_metadata_of_one_class_from_both_children_keeps_apart(metadata_cls: type[Any]) -> None:
    _, builder = routed(CAUSAL, metadata_cls=metadata_cls)
    causal = build(builder)
    builder.routing.variant = GENERAL
    general = build(builder)
    variants = [m._attention_backend_variant for m in (general, causal)]
    assert variants == [GENERAL, CAUSAL]


@pytest.mark.parametrize("built", [None, {}, (1,)], ids=["None", "dict", "tuple"])
def test_metadata_that_can_carry_nothing_is_refused_with_the_childs_name(built: Any) -> None:
    _, builder = routed(CAUSAL, builder={"build": lambda self, *_, **__: built})
    with pytest.raises(TypeError, match=f"that CAUSAL builds is a {type(built).__name__}, which"):
        build(builder)


@pytest.mark.parametrize("selected", [2, None, -1, "general"])
def test_a_policy_that_selects_no_child_is_named(selected: Any) -> None:
    _, builder = routed(CAUSAL)
    builder.routing.variant = selected
    with pytest.raises(ValueError, match=rf"^MockRouting, .* selects {selected!r}, and there are"):
        build(builder)


@pytest.mark.parametrize("selected", [True, 1.0, np.int64(1), np.True_], ids=repr)
def test_a_policy_may_select_with_what_equals_a_variant(selected: Any) -> None:
    _, builder = routed(CAUSAL)
    builder.routing.variant = selected
    assert build(builder)._attention_backend_variant == CAUSAL


def test_a_level_that_is_none_is_refused_with_its_sources_name() -> None:
    composite = compose(*pair(), routing_policy=make_routing(cudagraph_support=cast(Any, 2)))
    with pytest.raises(ValueError, match=r"^get_cudagraph_support of MockRouting gives 2, which"):
        composite.get_builder_cls().get_cudagraph_support(make_config(), SPEC)


@pytest.mark.parametrize(
    ("described", "variant"), [(IMAGE_BATCH, GENERAL), (TEXT_BATCH, CAUSAL)], ids=["image", "text"]
)
def test_image_batches_are_built_by_the_general_child(described: Any, variant: int) -> None:
    metadata = make_builder(compose(*pair())).build(0, batch(*described))
    assert metadata._attention_backend_variant == variant


def test_each_batch_is_routed_anew() -> None:
    builder = make_builder(compose(*pair()))
    built = [builder.build(0, batch(*b)) for b in (IMAGE_BATCH, TEXT_BATCH, IMAGE_BATCH)]
    assert [m._attention_backend_variant for m in built] == [GENERAL, CAUSAL, GENERAL]


def test_capture_of_the_image_policy_uses_the_causal_child_whatever_the_batch() -> None:
    builder = make_builder(compose(*pair()))
    metadata = builder.build_for_cudagraph_capture(batch(*IMAGE_BATCH))
    assert metadata._attention_backend_variant == CAUSAL


@pytest.mark.parametrize("fast_build", [False, True])
def test_build_hands_on_prefix_length_batch_and_haste(fast_build: bool) -> None:
    children, builder = routed(CAUSAL)
    common = batch(*TEXT_BATCH)
    builder.build(5, common, fast_build)
    assert children[CAUSAL].called("build") == [Call("build", (5, common, fast_build))]


@pytest.mark.parametrize("variant", EITHER)
def test_extra_arguments_of_build_reach_a_child_that_takes_them(variant: int) -> None:
    _, builder = routed(variant, build_takes=["num_accepted_tokens"])
    metadata = builder.build(0, batch(*TEXT_BATCH), num_accepted_tokens=3)
    assert metadata.extras == {"num_accepted_tokens": 3}


@pytest.mark.parametrize("variant", EITHER)
def test_a_child_that_does_not_take_extra_arguments_of_build_gets_none(variant: int) -> None:
    _, builder = routed(variant)
    metadata = builder.build(0, batch(*TEXT_BATCH), num_accepted_tokens=3)
    assert metadata.extras == {}


def test_of_several_extra_arguments_a_child_gets_those_it_takes() -> None:
    _, builder = routed(CAUSAL, build_takes=["num_accepted_tokens"])
    metadata = builder.build(0, batch(*TEXT_BATCH), num_accepted_tokens=3, prefix_sums=4)
    assert metadata.extras == {"num_accepted_tokens": 3}


def build_anything(
    self: Any, common_prefix_len: int, common: Any, fast: bool, **extras: Any
) -> Any:
    """A child's `build`."""
    return self.metadata("build", common, extras)


def test_a_child_that_takes_any_argument_of_build_gets_all() -> None:
    _, builder = routed(CAUSAL, builder={"build": build_anything})
    metadata = builder.build(0, batch(*TEXT_BATCH), num_accepted_tokens=3, prefix_sums=4)
    assert metadata.extras == {"num_accepted_tokens": 3, "prefix_sums": 4}


def build_draft(self: Any, common_attn_metadata: Any, draft_index: int) -> Any:
    """A child's `build_for_drafting`."""
    return self.metadata("build_for_drafting", common_attn_metadata, {"draft_index": draft_index})


@pytest.mark.parametrize("variant", EITHER)
def test_childs_own_drafting_build_gets_the_draft_index(variant: int) -> None:
    _, builder = routed(variant, builder={"build_for_drafting": build_draft})
    assert draft(builder).extras == {"draft_index": 2}


@pytest.mark.parametrize("variant", EITHER)
def test_child_without_a_drafting_build_builds_fast(variant: int) -> None:
    children, builder = routed(variant)
    common = batch(*TEXT_BATCH)
    builder.build_for_drafting(common, 2)
    assert children[variant].called("build") == [Call("build", (0, common, True))]


def build_capture(self: Any, common_attn_metadata: Any) -> Any:
    """A child's `build_for_cudagraph_capture`."""
    return self.metadata("build_for_cudagraph_capture", common_attn_metadata)


def test_childs_own_capture_build_is_used() -> None:
    _, builder = routed(GENERAL, builder={"build_for_cudagraph_capture": build_capture})
    assert capture(builder).hook == "build_for_cudagraph_capture"


@pytest.mark.parametrize("place", EITHER)
@pytest.mark.parametrize("variant", EITHER)
def test_draft_metadata_is_updated_by_the_child_that_built_it(variant: int, place: int) -> None:
    children, builder = routed(variant, builder={"update_draft_decode_metadata": None})
    metadata = draft(builder)
    builder.routing.variant = 1 - variant  # routing may have changed since
    builder.update_draft_decode_metadata(metadata)
    expected = [Call("update_draft_decode_metadata", (metadata,))] if place == variant else []
    assert children[place].called("update_draft_decode_metadata") == expected


@pytest.mark.parametrize(("level", "recorded"), [(SINGLE, True), (NEVER, False)])
def test_draft_metadata_is_updated_in_graphs_only_where_decodes_keep_their_child(
    level: AttentionCGSupport, recorded: bool
) -> None:
    children = pair(builder={"supports_draft_decode_metadata_update": True})
    builder = make_builder(compose(*children, routing_policy=make_routing(cudagraph_support=level)))
    assert builder.supports_draft_decode_metadata_update is recorded


TABLE, SLOTS = torch.tensor([[7]], dtype=torch.int32), torch.arange(8)


@pytest.mark.parametrize("place", EITHER)
@pytest.mark.parametrize("variant", EITHER)
def test_block_table_is_updated_by_the_child_that_built_the_metadata(
    variant: int, place: int
) -> None:
    children, builder = routed(variant)
    metadata = build(builder)
    builder.routing.variant = 1 - variant
    builder.update_block_table(metadata, TABLE, SLOTS)
    expected = [Call("update_block_table", (metadata, TABLE, SLOTS))] if place == variant else []
    assert children[place].called("update_block_table") == expected


def in_place(self: Any, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
    """A child's `update_block_table` that changes the object it is given."""
    metadata.block_table = blk_table
    return metadata


def anew(self: Any, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
    """A child's `update_block_table` that builds another object, which carries no variant."""
    return MockMetadata(self.name, "anew", metadata.common, blk_table, slot_mapping, {})


UPDATES: list[Any] = [
    pytest.param({}, id="a copy"),
    pytest.param({"builder": {"update_block_table": in_place}}, id="the same object"),
    pytest.param({"builder": {"update_block_table": anew}}, id="a new object"),
    pytest.param({"metadata_cls": SlottedMetadata}, id="slots"),
    pytest.param({"metadata_cls": FrozenMetadata}, id="frozen"),
    pytest.param({"metadata_cls": FrozenSlottedMetadata}, id="frozen slots"),
]


@pytest.mark.parametrize("variant", EITHER)
@pytest.mark.parametrize("child", UPDATES)
def test_updated_metadata_carries_the_variant(child: dict[str, Any], variant: int) -> None:
    _, builder = routed(variant, **child)
    metadata = build(builder)
    builder.routing.variant = 1 - variant
    updated = builder.update_block_table(metadata, TABLE, SLOTS)
    assert updated._attention_backend_variant == variant


@pytest.mark.parametrize("child", UPDATES)
def test_updated_metadata_has_the_new_block_table(child: dict[str, Any]) -> None:
    _, builder = routed(CAUSAL, **child)
    assert builder.update_block_table(build(builder), TABLE, SLOTS).block_table is TABLE


@pytest.mark.parametrize("child", UPDATES)
def test_metadata_that_another_group_has_updated_keeps_its_variant(child: dict[str, Any]) -> None:
    children = pair(**child)
    first = make_builder(compose(*children, routing_policy=make_routing(GENERAL)))
    second = make_builder(compose(*children, routing_policy=make_routing(CAUSAL)))
    metadata = build(first)
    second.update_block_table(metadata, TABLE, SLOTS)
    assert metadata._attention_backend_variant == GENERAL


def one_object(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
    """A child's `build` that fills one object again and again, as for graph replay."""
    if not hasattr(self, "reused"):
        self.reused = self.metadata("build", common)
    return self.reused


def test_reused_metadata_objects_keep_each_childs_variant() -> None:
    _, builder = routed(CAUSAL, builder={"build": one_object})
    built = []
    for variant in (CAUSAL, GENERAL, CAUSAL, GENERAL):
        builder.routing.variant = variant
        built.append(build(builder))
    assert [m._attention_backend_variant for m in built] == [CAUSAL, GENERAL, CAUSAL, GENERAL]


@pytest.mark.parametrize("metadata_cls", [MockMetadata, SlottedMetadata])
@pytest.mark.parametrize("variant", EITHER)
def test_fast_prefill_s_copy_of_the_metadata_goes_to_the_child_that_built_it(
    variant: int, metadata_cls: type[Any]
) -> None:
    """Layers that share another's KV cache get vLLM's subclass of the composite."""
    composite = compose(*pair(metadata_cls=metadata_cls), routing_policy=make_routing(variant))
    fast = create_fast_prefill_custom_backend("FastPrefill", composite)
    copied = make_builder(fast).build(0, batch([(8, 1)]))
    impl = make_impl(fast)
    assert impl.get_impl_for_metadata(copied) is impl.get_impl_variants()[variant]


def workspace_builder(general: bool, causal: bool) -> Any:
    """A composite's builder; `general` and `causal`: whether that child has a workspace."""
    children = [
        make_child(name, workspace=has, builder=SHOWS_ITSELF)
        for name, has in zip(NAMES, (general, causal), strict=True)
    ]
    return make_builder(compose(*children, routing_policy=make_routing()))


@pytest.mark.parametrize("variant", EITHER)
def test_children_share_the_workspace_that_the_runner_gets(variant: int) -> None:
    builder = workspace_builder(True, True)
    given = builder._get_workspace_buffer()
    assert child_builder(builder, variant).workspace is given


def test_children_share_a_workspace_though_no_runner_asks_for_it() -> None:
    builder = workspace_builder(True, True)
    buffers = [child_builder(builder, v)._get_workspace_buffer() for v in (GENERAL, CAUSAL)]
    assert buffers[0] is buffers[1]


@pytest.mark.parametrize("variant", EITHER)
def test_workspace_of_the_runner_reaches_both_children(variant: int) -> None:
    builder = workspace_builder(True, True)
    shared = torch.zeros(4)
    builder.set_workspace_buffer(shared)
    assert child_builder(builder, variant)._get_workspace_buffer() is shared


@pytest.mark.parametrize("variant", EITHER)
def test_the_only_childs_workspace_is_the_runners(variant: int) -> None:
    builder = workspace_builder(variant == GENERAL, variant == CAUSAL)
    given = builder._get_workspace_buffer()
    assert child_builder(builder, variant).workspace is given


@pytest.mark.parametrize("variant", EITHER)
def test_workspace_of_the_runner_reaches_the_only_child_that_takes_one(variant: int) -> None:
    builder = workspace_builder(variant == GENERAL, variant == CAUSAL)
    shared = torch.zeros(4)
    builder.set_workspace_buffer(shared)
    assert child_builder(builder, variant).workspace is shared


def test_without_a_child_that_has_one_there_is_no_workspace() -> None:
    assert workspace_builder(False, False)._get_workspace_buffer() is None
