"""The composite's impl: both children's are built, each batch goes to one, one writes the cache."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.backends.composite import IMPL_RULES, Rule

from tests.v1.attention.mock_children import (
    ALL_FORMATS,
    CAUSAL,
    GENERAL,
    Call,
    MockBackend,
    MockLayer,
    batch,
    compose,
    make_builder,
    make_child,
    make_impl,
    make_routing,
    pair,
)

EITHER = [pytest.param(GENERAL, id="general"), pytest.param(CAUSAL, id="causal")]


def metadata_for(variant: int | None) -> Any:
    """Metadata as the composite's builder marks it, as far as impls look at it."""
    return None if variant is None else SimpleNamespace(_attention_backend_variant=variant)


IMPL_ARGS = (4, 64, 0.125, 2, [0.5] * 4, 128, "fp8", 30.0, "decoder", "layers.0")
IMPL_NAMES = list(inspect.signature(AttentionImpl.__init__).parameters)[1 : 1 + len(IMPL_ARGS)]


@pytest.mark.parametrize("variant", EITHER)
def test_both_children_are_built_with_the_same_arguments(variant: int) -> None:
    sinks = torch.ones(4)
    impl = compose(*pair()).get_impl_cls()(*IMPL_ARGS, sinks=sinks)
    child = impl.get_impl_variants()[variant]
    taken = [getattr(child, name) for name in (*IMPL_NAMES, "sinks")]
    assert taken == [*IMPL_ARGS, sinks]


@pytest.mark.parametrize(
    "error", [TypeError("no sinks"), ValueError("no sinks"), NotImplementedError("no sinks")]
)
@pytest.mark.parametrize("told", ["GENERAL", "CAUSAL", "no sinks"])
def test_a_causal_child_that_cannot_take_the_arguments_is_a_value_error(
    error: Exception, told: str
) -> None:
    composite = compose(make_child("GENERAL"), make_child("CAUSAL", init_error=error))
    with pytest.raises(ValueError, match=told):
        make_impl(composite)


def test_impl_variants_are_both_childrens_the_general_first() -> None:
    children = pair()
    variants = make_impl(compose(*children)).get_impl_variants()
    assert [type(v) for v in variants] == [child.get_impl_cls() for child in children]


VARIANTS = [pytest.param(None, GENERAL, id="no metadata"), (GENERAL, GENERAL), (CAUSAL, CAUSAL)]


@pytest.mark.parametrize(("variant", "chosen"), VARIANTS)
def test_impl_for_metadata_is_the_one_of_its_variant(variant: int | None, chosen: int) -> None:
    impl = make_impl(compose(*pair()))
    expected = impl.get_impl_variants()[chosen]
    assert impl.get_impl_for_metadata(metadata_for(variant)) is expected


def answering_children(hook: str) -> tuple[type[MockBackend], type[MockBackend]]:
    return tuple(  # type: ignore[return-value]
        make_child(name, impl={hook: f"{name}'s answer"}) for name in ("GENERAL", "CAUSAL")
    )


@pytest.mark.parametrize(("variant", "chosen"), VARIANTS)
def test_forward_is_the_one_of_the_metadatas_variant(variant: int | None, chosen: int) -> None:
    impl = make_impl(compose(*answering_children("forward")))
    answer = impl.forward(None, None, None, None, None, metadata_for(variant), None)
    assert answer == ["GENERAL's answer", "CAUSAL's answer"][chosen]


@pytest.mark.parametrize("variant", EITHER)
def test_the_other_childs_forward_does_not_run(variant: int) -> None:
    children = answering_children("forward")
    impl = make_impl(compose(*children))
    impl.forward(None, None, None, None, None, metadata_for(variant), None)
    assert children[1 - variant].called("forward") == []


@pytest.mark.parametrize("variant", EITHER)
def test_forward_hands_on_every_argument(variant: int) -> None:
    children = answering_children("forward")
    metadata = metadata_for(variant)
    args = ("layer", "query", "key", "value", "cache", metadata, "output", "scale", "block scale")
    make_impl(compose(*children)).forward(*args)
    names = list(inspect.signature(AttentionImpl.forward).parameters)[1:]
    (call,) = children[variant].called("forward")
    assert (dict(zip(names, call.args, strict=False)) | call.kwargs) == dict(
        zip(names, args, strict=True)
    )


@pytest.mark.parametrize(("variant", "chosen"), VARIANTS)
@pytest.mark.parametrize("place", EITHER)
def test_only_the_batchs_impl_is_prepared(variant: int | None, chosen: int, place: int) -> None:
    children = pair(impl={"prepare_for_batch": None})
    metadata = metadata_for(variant)
    make_impl(compose(*children)).prepare_for_batch(metadata)
    expected = [Call("prepare_for_batch", (metadata,))] if place == chosen else []
    assert children[place].called("prepare_for_batch") == expected


WRITERS = [
    "do_kv_cache_update",
    "do_rope_and_kv_cache_update",
    "do_qk_norm_rope_kvcache_update",
    "do_qk_norm_mrope_kvcache_update",
]


def write(self: Any, *args: Any, **kwargs: Any) -> str:
    """A child's writer."""
    return f"written by {self.name}"


@pytest.mark.parametrize("place", EITHER)
@pytest.mark.parametrize("writer", WRITERS)
def test_only_the_general_child_writes_the_kv_cache(writer: str, place: int) -> None:
    children = pair(impl={writer: write})
    getattr(make_impl(compose(*children)), writer)("layer", cache="cache")
    expected = [Call(writer, ("layer",), {"cache": "cache"})] if place == GENERAL else []
    assert children[place].called(writer) == expected


@pytest.mark.parametrize("writer", WRITERS)
def test_writers_answer_is_the_general_childs(writer: str) -> None:
    impl = make_impl(compose(*pair(impl={writer: write})))
    assert getattr(impl, writer)() == "written by GENERAL"


def do_nothing(self: Any, *args: Any) -> None:
    """A child's hook."""


@pytest.mark.parametrize("place", EITHER)
@pytest.mark.parametrize(
    ("hook", "args"),
    [("process_weights_after_loading", (torch.bfloat16,)), ("set_interleaved_v_cache", ())],
)
def test_set_up_is_done_by_both_children(hook: str, args: tuple[Any, ...], place: int) -> None:
    children = pair(impl={hook: do_nothing})
    getattr(make_impl(compose(*children)), hook)(*args)
    assert children[place].called(hook) == [Call(hook, args)]


ATTRIBUTES: list[tuple[str, Any]] = [
    ("num_heads", 4),
    ("num_kv_heads", 2),
    ("head_size", 8),
    ("scale", 8**-0.5),
    ("sliding_window", 128),
    ("alibi_slopes", [0.5] * 4),
    ("attn_type", "decoder"),
    ("kv_sharing_target_layer_name", "layers.0"),
    ("logits_soft_cap", 30.0),
    ("sinks", "sinks"),
    ("kv_cache_dtype", "fp8"),
]


def impl_with_attributes() -> Any:
    return make_impl(
        compose(*pair()),
        sliding_window=128,
        alibi_slopes=[0.5] * 4,
        attn_type="decoder",
        kv_sharing_target_layer_name="layers.0",
        logits_soft_cap=30.0,
        sinks="sinks",
        kv_cache_dtype="fp8",
    )


@pytest.mark.parametrize(("attribute", "value"), ATTRIBUTES)
def test_attributes_that_callers_read_are_there(attribute: str, value: Any) -> None:
    assert getattr(impl_with_attributes(), attribute) == value


@pytest.mark.parametrize("attribute", ["dcp_world_size", "pcp_world_size", "total_cp_world_size"])
def test_without_context_parallelism_the_world_is_one_rank(attribute: str) -> None:
    assert getattr(make_impl(compose(*pair())), attribute) == 1


@pytest.mark.parametrize("attribute", ["dcp_rank", "pcp_rank", "total_cp_rank"])
def test_without_context_parallelism_the_rank_is_the_first(attribute: str) -> None:
    assert getattr(make_impl(compose(*pair())), attribute) == 0


SET = [
    *[name for name, _ in ATTRIBUTES],
    "supports_quant_query_input",
    "supports_pcp",
    "supports_dcp",
    "lse_base_on_e",
    "need_to_return_lse_for_decode",
    "dcp_world_size",
    "dcp_rank",
    "some_new_attribute",
]


@pytest.mark.parametrize("place", EITHER)
@pytest.mark.parametrize("attribute", SET)
def test_setting_an_attribute_reaches_the_child(attribute: str, place: int) -> None:
    impl = impl_with_attributes()
    value = object()
    setattr(impl, attribute, value)
    assert getattr(impl.get_impl_variants()[place], attribute) is value


@pytest.mark.parametrize(
    "attribute", [name for name in SET if name != "supports_quant_query_input"]
)
def test_an_attribute_reads_as_it_was_set(attribute: str) -> None:
    impl = impl_with_attributes()
    value = object()
    setattr(impl, attribute, value)
    assert getattr(impl, attribute) is value


def test_an_attribute_reads_as_the_general_child_has_changed_it_since() -> None:
    impl = impl_with_attributes()
    impl.sinks = "set on the composite"
    impl.get_impl_variants()[GENERAL].sinks = "changed by the child"
    assert impl.sinks == "changed by the child"


def test_an_attribute_that_only_the_causal_child_has_is_there() -> None:
    composite = compose(make_child("GENERAL"), make_child("CAUSAL", impl={"_k_scale_cache": "c"}))
    assert make_impl(composite)._k_scale_cache == "c"


def test_an_attribute_that_neither_child_has_is_not_there() -> None:
    assert not hasattr(make_impl(compose(*pair())), "some_new_attribute")


@pytest.mark.parametrize("variant", EITHER)
def test_either_child_attends_over_what_was_written_once(variant: int) -> None:
    """Causal attention over the shared cache, against the keys and values themselves."""
    children = pair(stores=ALL_FORMATS[5])
    composite = compose(*children, routing_policy=make_routing(variant))
    layer = MockLayer(composite)
    builder = make_builder(composite, {"layer": layer})
    common = batch([(20, 20), (7, 7)])
    torch.manual_seed(0)
    key, value = torch.randn(27, 2, 8), torch.randn(27, 2, 8)
    cache = torch.zeros(8, 2, 16, 16)
    layer.impl.do_kv_cache_update(layer, key, value, cache, common.slot_mapping)  # type: ignore[attr-defined]
    output = torch.empty(27, 4, 8)
    metadata = builder.build(0, common)
    layer.impl.forward(layer, torch.zeros(27, 4, 8), key, value, cache, metadata, output)  # type: ignore[arg-type]
    # With equal scores the last query's output is the mean of its sequence's values.
    torch.testing.assert_close(output[19, 0], value[:20, 0].mean(0))


def test_a_writer_that_the_general_child_lacks_is_not_the_causal_childs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(IMPL_RULES, "write_in_a_new_way", Rule.OF_GENERAL)
    causal = make_child("CAUSAL", impl={"write_in_a_new_way": write})
    impl = make_impl(compose(make_child("GENERAL"), causal))
    assert not hasattr(impl, "write_in_a_new_way")
