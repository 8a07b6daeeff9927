"""A composite as a child of another one."""

import pytest
import torch

from tests.v1.attention.mock_children import (
    CAUSAL,
    GENERAL,
    TEXT_BATCH,
    MockLayer,
    batch,
    compose,
    make_builder,
    make_child,
    make_impl,
    make_routing,
)


@pytest.mark.parametrize(
    ("outer", "inner", "leaf"),
    [
        (GENERAL, GENERAL, "GENERAL"),
        (GENERAL, CAUSAL, "GENERAL"),
        (CAUSAL, GENERAL, "INNER_GENERAL"),
        (CAUSAL, CAUSAL, "INNER_CAUSAL"),
    ],
)
def test_a_composite_inside_a_composite_runs_the_leaf_that_built_the_metadata(
    outer: int, inner: int, leaf: str
) -> None:
    leaves = [make_child("INNER_GENERAL", masks_images=True), make_child("INNER_CAUSAL")]
    nested = compose(*leaves, routing_policy=make_routing(inner))
    general = make_child("GENERAL", masks_images=True)
    composite = compose(general, nested, routing_policy=make_routing(outer), name="Outer")
    layer = MockLayer(composite)
    metadata = make_builder(composite).build(0, batch(*TEXT_BATCH))
    query, cache = torch.zeros(8, 4, 8), torch.zeros(4, 2, 16, 16)
    layer.impl.forward(layer, query, query, query, cache, metadata, query)  # type: ignore[arg-type]
    ran = [child.name for child in (general, *leaves) if child.called("forward")]
    assert ran == [leaf]


def test_impl_variants_of_a_nested_composite_are_the_leaves() -> None:
    leaves = [make_child(name) for name in ("GENERAL", "INNER_GENERAL", "INNER_CAUSAL")]
    composite = compose(leaves[0], compose(leaves[1], leaves[2]))
    variants = make_impl(composite).get_impl_variants()
    assert [type(variant) for variant in variants] == [leaf.get_impl_cls() for leaf in leaves]


def test_an_inner_composite_without_a_common_block_size_leaves_none_to_the_outer() -> None:
    inner = compose(make_child("A", block_sizes=[16]), make_child("B", block_sizes=[48]))
    outer = compose(make_child("GENERAL"), inner)
    assert outer.get_supported_kernel_block_sizes() == []
