# SPDX-License-Identifier: Apache-2.0
"""A batch that replays a CUDA graph must go to the child that the graph was captured with.

The engine decides by level and lengths alone which batches replay one, so every batch that a level
admits is drawn here, whatever its phases and images.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.composite import (
    MMPrefixAttentionRouting,
    PrefillDecodeAttentionRouting,
)

from tests.v1.attention.mock_children import (
    CPU,
    MockLayer,
    batch,
    compose,
    make_child,
    make_config,
)

POLICIES = (MMPrefixAttentionRouting, PrefillDecodeAttentionRouting)
SPEC = MockLayer().get_kv_cache_spec()


@st.composite
def configs(draw: st.DrawFn) -> Any:
    """Of a text or a PrefixLM model with one or two layers, and up to three speculative tokens."""
    layers = {
        f"layer {index}": SimpleNamespace(
            sliding_window=draw(st.none() | st.integers(1, 12)),
            mm_prefix_clamp_sliding_window=draw(st.booleans()),
        )
        for index in range(draw(st.integers(1, 2)))
    }
    tokens = draw(st.integers(0, 3))
    return make_config(
        layers,
        model_config=SimpleNamespace(is_mm_prefix_lm=draw(st.booleans())),
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens) if tokens else None,
    )


@st.composite
def admitted_batches(
    draw: st.DrawFn, level: AttentionCGSupport, config: Any
) -> CommonAttentionMetadata:
    """A batch for which the engine replays a graph at this level, padding rows included.

    Verification makes decodes of `1 + num_speculative_tokens` queries, which is what uniform
    batches are to the engine.
    """
    speculative = config.speculative_config
    lengths = {
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE: st.just(1),
        AttentionCGSupport.UNIFORM_BATCH: st.just(
            1 + (speculative.num_speculative_tokens if speculative else 0)
        ),
        AttentionCGSupport.ALWAYS: st.integers(1, 12),
    }[level]
    requests, images = [], {}
    for index in range(draw(st.integers(1, 4))):
        query_len = draw(lengths)
        seq_len = query_len + draw(st.integers(0, 30))
        requests.append((seq_len, query_len))
        cuts = sorted(draw(st.sets(st.integers(0, seq_len + 5), max_size=6)))
        images[index] = list(zip(cuts[::2], cuts[1::2], strict=False))
    padding = draw(st.integers(0, 2))
    phases = st.lists(st.booleans(), min_size=len(requests), max_size=len(requests))
    told = draw(st.none() | phases.map(lambda some: some + [False] * padding))
    return batch(
        requests,
        images if config.model_config.is_mm_prefix_lm else None,
        padding_rows=padding,
        is_prefilling=None if told is None else torch.tensor(told),
    )


@pytest.mark.parametrize("policy", POLICIES)
@given(st.data())
def test_what_a_policys_level_admits_selects_the_captured_child(
    policy: type[Any], data: st.DataObject
) -> None:
    config = data.draw(configs())
    level = policy.get_cudagraph_support(config, SPEC)
    assume(level is not AttentionCGSupport.NEVER)
    layers = list(config.compilation_config.static_forward_context)
    group = data.draw(st.lists(st.sampled_from(layers), min_size=1, unique=True))
    replayed = data.draw(admitted_batches(level, config))
    assert policy(group, config).select(replayed) == policy.capture_variant


@functools.cache
def leaf(name: str, level: AttentionCGSupport) -> type[Any]:
    return make_child(name, builder={"_cudagraph_support": level})


@st.composite
def composites(draw: st.DrawFn, depth: int = 3, name: str = "child") -> type[Any]:
    """A composite of leaves of any level and of composites, `depth` at the most."""
    children: list[type[Any]] = []
    for place in "gc":
        if depth > 1 and draw(st.booleans()):
            children.append(draw(composites(depth - 1, name + place)))
        else:
            # Mostly the highest, so that the policies' levels decide.
            levels = st.sampled_from([AttentionCGSupport.ALWAYS] * 4 + list(AttentionCGSupport))
            children.append(leaf(name + place, draw(levels)))
    return compose(*children, name=name, routing_policy=draw(st.sampled_from(POLICIES)))


@given(st.data())
def test_what_a_composites_level_admits_is_built_by_the_captured_leaf(data: st.DataObject) -> None:
    """Also of composites in composites, whose choice goes with the metadata."""
    config, composite = data.draw(configs()), data.draw(composites())
    builder_cls = composite.get_builder_cls()
    level = builder_cls.get_cudagraph_support(config, SPEC)
    assume(level is not AttentionCGSupport.NEVER)
    layers = list(config.compilation_config.static_forward_context)
    builder = builder_cls(SPEC, layers, config, CPU)
    replayed = data.draw(admitted_batches(level, config))
    built, captured = builder.build(0, replayed), builder.build_for_cudagraph_capture(replayed)
    assert built.child == captured.child
    assert built._attention_backend_variant == captured._attention_backend_variant
    assert built._attention_backend_variant.made == captured._attention_backend_variant.made


def test_a_level_that_promises_too_much_would_be_seen() -> None:
    """The property is no empty one: at the next higher level, batches choose otherwise."""
    prefill_of_a_verifications_length = batch([(4, 4)], is_prefilling=torch.tensor([True]))
    config = make_config(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    policy = PrefillDecodeAttentionRouting([], config)
    assert policy.select(prefill_of_a_verifications_length) != policy.capture_variant
    verification_in_an_image = batch([(20, 4)], {0: [(10, 19)]})
    mask_policy = MMPrefixAttentionRouting([], config)
    assert mask_policy.select(verification_in_an_image) != mask_policy.capture_variant
