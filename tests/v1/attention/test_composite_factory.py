"""Making a composite: one class per set of arguments, its names, and the children it refuses."""

import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.composite import (
    CompositeAttentionRouting,
    MMPrefixAttentionRouting,
    create_composite_attention_backend,
)
from vllm.v1.attention.backends.cpu_prefix_attn import CPUPrefixAttentionBackend

from tests.v1.attention.mock_children import compose, make_child, make_routing, pair

OPTIONS: dict[str, Any] = {
    "name": "SomeComposite",
    "backend_name": "SOME_COMPOSITE",
    "module": "some.module",
    "routing_policy": MMPrefixAttentionRouting,
    "head_sizes": (64, 128),
    "kernel_block_sizes": (16, 32),
    "device_major": 9,
}


def test_same_arguments_give_the_same_class() -> None:
    children = pair()
    first = create_composite_attention_backend(*children, **OPTIONS)
    assert create_composite_attention_backend(*children, **OPTIONS) is first


def test_order_of_keywords_does_not_matter() -> None:
    children = pair()
    first = create_composite_attention_backend(*children, **OPTIONS)
    backwards = dict(reversed(OPTIONS.items()))
    assert create_composite_attention_backend(*children, **backwards) is first


def test_children_by_keyword_are_the_same_children() -> None:
    general, causal = pair()
    first = create_composite_attention_backend(general, causal, **OPTIONS)
    by_keyword = create_composite_attention_backend(
        causal_backend=causal, general_backend=general, **OPTIONS
    )
    assert by_keyword is first


def test_defaults_written_out_give_the_same_class() -> None:
    children = pair()
    written_out = compose(*children, head_sizes=(), kernel_block_sizes=(), device_major=None)
    assert written_out is compose(*children)


@pytest.mark.parametrize("option", ["head_sizes", "kernel_block_sizes"])
def test_lists_and_tuples_are_the_same_argument(option: str) -> None:
    children = pair()
    as_tuple = create_composite_attention_backend(*children, **OPTIONS)
    as_list = OPTIONS | {option: list(OPTIONS[option])}
    assert create_composite_attention_backend(*children, **as_list) is as_tuple


@pytest.mark.parametrize(
    "other",
    [
        {"name": "OtherComposite"},
        {"backend_name": "OTHER_COMPOSITE"},
        {"module": "other.module"},
        {"routing_policy": make_routing()},
        {"head_sizes": (64,)},
        {"kernel_block_sizes": (16,)},
        {"device_major": 8},
    ],
    ids=lambda other: next(iter(other)),
)
def test_any_other_argument_gives_another_class(other: dict[str, Any]) -> None:
    children = pair()
    first = create_composite_attention_backend(*children, **OPTIONS)
    assert create_composite_attention_backend(*children, **(OPTIONS | other)) is not first


def test_children_the_other_way_round_give_another_class() -> None:
    general, causal = pair()
    assert compose(general, causal) is not compose(causal, general)


def test_same_child_twice_gives_that_child() -> None:
    child = make_child("CHILD")
    assert compose(child, child) is child


def test_two_children_of_one_name_are_two_children() -> None:
    general, causal = make_child("CHILD"), make_child("CHILD")
    assert compose(general, causal) not in (general, causal)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("__name__", "SomeComposite"),
        ("__qualname__", "SomeComposite"),
        ("__module__", "some.module"),
    ],
)
def test_class_carries_name_and_module(attribute: str, value: str) -> None:
    composite = create_composite_attention_backend(*pair(), **OPTIONS)
    assert getattr(composite, attribute) == value


def test_full_class_name_is_module_and_name() -> None:
    composite = create_composite_attention_backend(*pair(), **OPTIONS)
    assert composite.full_cls_name() == ("some.module", "SomeComposite")


def test_backend_name_is_what_get_name_returns() -> None:
    assert create_composite_attention_backend(*pair(), **OPTIONS).get_name() == "SOME_COMPOSITE"


@pytest.mark.parametrize("index", [0, 1], ids=["general_backend_cls", "causal_backend_cls"])
def test_class_names_its_children(index: int) -> None:
    children = pair()
    composite = compose(*children)
    named = (composite.general_backend_cls, composite.causal_backend_cls)
    assert named[index] is children[index]


def test_composite_is_an_attention_backend() -> None:
    assert issubclass(compose(*pair()), AttentionBackend)


def test_composites_keep_their_own_children() -> None:
    first_children, second_children = pair(), pair()
    first, _ = compose(*first_children), compose(*second_children)
    assert first.general_backend_cls is first_children[0]


def test_class_is_pickled_by_name_where_its_module_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composite = create_composite_attention_backend(*pair(), **OPTIONS)
    module = ModuleType("some.module")
    module.SomeComposite = composite  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some", ModuleType("some"))
    monkeypatch.setitem(sys.modules, "some.module", module)
    assert pickle.loads(pickle.dumps(composite)) is composite


def test_cpu_composite_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(CPUPrefixAttentionBackend)) is CPUPrefixAttentionBackend


REFUSED = [
    ({"forward_includes_kv_cache_update": True}, "separate KV cache updates"),
    ({"is_mla": True}, "MLA"),
    ({"is_sparse": True}, "sparse"),
    ({"is_ssm": True}, "state-space"),
]


@pytest.mark.parametrize("place", [0, 1], ids=["as general child", "as causal child"])
@pytest.mark.parametrize(("answers", "why"), REFUSED, ids=[next(iter(a)) for a, _ in REFUSED])
def test_child_of_a_kind_that_cannot_share_is_refused(
    place: int, answers: dict[str, bool], why: str
) -> None:
    children = [make_child("REFUSED_CHILD", backend=answers), make_child("GOOD_CHILD")]
    with pytest.raises(ValueError, match=why):
        compose(children[place], children[1 - place])


@pytest.mark.parametrize("place", [0, 1], ids=["as general child", "as causal child"])
@pytest.mark.parametrize(
    "answers", [a for a, _ in REFUSED], ids=[next(iter(a)) for a, _ in REFUSED]
)
def test_refusal_begins_with_the_refused_childs_name(place: int, answers: dict[str, bool]) -> None:
    children = [make_child("REFUSED_CHILD", backend=answers), make_child("GOOD_CHILD")]
    with pytest.raises(ValueError, match=r"^REFUSED_CHILD "):
        compose(children[place], children[1 - place])


def without(*names: str) -> type[Any]:
    """A policy of the protocol that leaves these to it."""
    complete = make_routing()
    members = {n: m for n, m in vars(complete).items() if n not in (*names, "__dict__")}
    return type("HalfAPolicy", (CompositeAttentionRouting,), members)


def policy(**members: Any) -> type[Any]:
    """A whole policy, but for these members."""
    return type("HalfAPolicy", (make_routing(),), members)


MISUSES = [
    ({"general_backend": "TRITON_ATTN"}, "'TRITON_ATTN' cannot be a child of Misused: it is no"),
    ({"causal_backend": None}, "None cannot be a child of Misused: it is no backend class"),
    ({"causal_backend": []}, r"\[\] cannot be a child of Misused"),
    ({"causal_backend": dict}, "<class 'dict'> cannot be a child of Misused"),
    ({"routing_policy": None}, "routing_policy of Misused must be a CompositeAttentionRouting"),
    ({"routing_policy": object()}, "must be a CompositeAttentionRouting class, not <object"),
    ({"routing_policy": dict}, "dict cannot be the routing_policy of Misused: it lacks capture_"),
    ({"routing_policy": without("select")}, "HalfAPolicy cannot be .* it lacks select "),
    (
        {"routing_policy": without("get_cudagraph_support", "variant_uses_mm_prefix")},
        "it lacks get_cudagraph_support and variant_uses_mm_prefix ",
    ),
    ({"routing_policy": make_routing(capture_variant=2)}, "its capture_variant is 2, and there"),
    ({"head_sizes": 64}, "head_sizes of Misused must be a sequence of ints, not 64"),
    ({"kernel_block_sizes": "16"}, "kernel_block_sizes of Misused must be .* not '16'"),
    ({"head_sizes": ("64",)}, r"must be a sequence of ints, not \('64',\)"),
    ({"device_major": "9"}, "device_major of Misused must be an int or None, not '9'"),
    ({"name": None}, "name of a composite must be a string, not None"),
    ({"backend_name": ["MISUSED"]}, r"backend_name of a composite must be .* not \['MISUSED'\]"),
    ({"module": pickle}, "module of a composite must be a string, not <module"),
    ({"routing_policy": policy(capture_variant=1.0)}, "its capture_variant is 1.0, and there"),
    ({"routing_policy": policy(select=None)}, "HalfAPolicy cannot be .*: its select is no method"),
    ({"routing_policy": policy(__init__=object.__init__)}, "its __init__ cannot be called"),
    (
        {"routing_policy": policy(get_cudagraph_support=lambda self, config, spec: None)},
        r"its get_cudagraph_support cannot be called on the class with \(vllm_config, kv_cache_s",
    ),
    (
        {"routing_policy": policy(variant_uses_mm_prefix=lambda self, variant: True)},
        r"its variant_uses_mm_prefix cannot be called on the class with \(variant\)",
    ),
]


@pytest.mark.parametrize(("argument", "sentence"), MISUSES)
def test_an_argument_that_is_not_what_it_should_be_is_refused_in_a_sentence(
    argument: dict[str, Any], sentence: str
) -> None:
    general, causal = pair()
    right = {"general_backend": general, "causal_backend": causal, "routing_policy": make_routing()}
    named = {"name": "Misused", "backend_name": "MISUSED", "module": __name__}
    arguments: dict[str, Any] = right | named | argument
    with pytest.raises(ValueError, match=sentence):
        create_composite_attention_backend(**arguments)


@pytest.mark.parametrize("none", [None, (), [], iter(())], ids=["None", "()", "[]", "iterator"])
def test_no_sizes_admit_all_and_make_the_same_class(none: Any) -> None:
    general, causal = pair()
    composite = compose(general, causal, head_sizes=none, kernel_block_sizes=None)
    assert composite is compose(general, causal)
    assert composite.supports_head_size(64)


def test_sizes_may_come_from_a_generator() -> None:
    general, causal = pair()
    composite = compose(general, causal, head_sizes=(size for size in (64, 128)))
    assert composite.head_sizes == (64, 128)


@pytest.mark.parametrize("class_of", [
    lambda backend: backend.get_impl_cls(),
    lambda backend: backend.get_builder_cls(),
], ids=["impl", "builder"])  # fmt: skip
def test_the_classes_of_a_composite_are_pickled_by_name(class_of: Any) -> None:
    cls = class_of(CPUPrefixAttentionBackend)
    assert pickle.loads(pickle.dumps(cls)) is cls
