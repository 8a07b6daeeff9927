"""Pairs of any two backends: how they are asked for, named, resolved and pickled."""

import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.plugins.composite_attention import pairs, selection
from vllm.plugins.composite_attention.engine import register_name
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.composite import (
    MMPrefixAttentionRouting,
    PrefillDecodeAttentionRouting,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.cpu_prefix_attn import CPUPrefixAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

MASKED = "CPU_PREFIX_ATTN+CPU_ATTN"
PHASES = "prefill=CPU_PREFIX_ATTN,decode=CPU_ATTN"
PROCESS = (
    "import pickle, sys; member = pickle.loads(bytes.fromhex(sys.argv[1]));"
    "print(member.name, member.get_class().__name__)"
)


@pytest.mark.parametrize("value", ["", "auto", " AUTO "])
def test_auto_asks_for_nothing(value: str) -> None:
    assert pairs.backend_for(value) is None


@pytest.mark.parametrize("value", ["CPU_ATTN", "cpu_attn", " CPU_ATTN "])
def test_a_registered_name_is_that_backend(value: str) -> None:
    assert pairs.backend_for(value) is AttentionBackendEnum.CPU_ATTN


def test_a_masked_pair_joins_general_and_causal_child() -> None:
    backend = pairs.backend_for(MASKED)
    assert backend is not None
    composite = backend.get_class()
    assert composite.child_classes() == (CPUPrefixAttentionBackend, CPUAttentionBackend)  # type: ignore[attr-defined]
    assert composite.routing_policy is MMPrefixAttentionRouting  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [PHASES, "decode=CPU_ATTN, prefill=cpu_prefix_attn"])
def test_a_pair_of_phases_takes_either_order(value: str) -> None:
    backend = pairs.backend_for(value)
    assert backend is not None
    composite = backend.get_class()
    assert composite.child_classes() == (CPUPrefixAttentionBackend, CPUAttentionBackend)  # type: ignore[attr-defined]
    assert composite.routing_policy is PrefillDecodeAttentionRouting  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["CPU_ATTN+CPU_ATTN", "prefill=CPU_ATTN,decode=CPU_ATTN"])
def test_the_same_child_twice_is_that_child(value: str) -> None:
    assert pairs.backend_for(value) is AttentionBackendEnum.CPU_ATTN


@pytest.mark.parametrize("value", [MASKED, PHASES])
def test_a_pair_resolves_by_its_class_path(value: str) -> None:
    backend = pairs.backend_for(value)
    assert backend is not None
    assert resolve_obj_by_qualname(backend.get_path()) is backend.get_class()


@pytest.mark.parametrize("value", [MASKED, PHASES])
def test_a_pairs_classes_are_pickled_by_name(value: str) -> None:
    backend = pairs.backend_for(value)
    assert backend is not None
    composite = backend.get_class()
    for cls in (composite, composite.get_impl_cls(), composite.get_builder_cls()):
        assert pickle.loads(pickle.dumps(cls)) is cls


@pytest.mark.parametrize("value", [MASKED, "CPU_PREFIX_ATTN"])
def test_a_process_that_has_not_loaded_plugins_unpickles_the_member(
    value: str, tmp_path: Path
) -> None:
    backend = pairs.backend_for(value)
    assert backend is not None
    code = [sys.executable, "-c", PROCESS, pickle.dumps(backend).hex()]
    done = subprocess.run(code, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split()[-2:] == [backend.name, backend.get_class().__name__]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("CPU_ATN", "no attention backend 'CPU_ATN'. Did you mean CPU_ATTN"),
        ("CPU_ATTN+NOPE_ATTN", "no attention backend 'NOPE_ATTN'"),
        ("+CPU_ATTN", "A child's name is missing"),
        ("prefill=,decode=CPU_ATTN", "A child's name is missing"),
        ("auto+CPU_ATTN", "'auto' is no child"),
        ("A+B+C", "it must read GENERAL+CAUSAL"),
        ("prefill=CPU_ATTN", "it must read prefill=NAME,decode=NAME"),
        ("prefill=CPU_ATTN,extend=CPU_ATTN", "it must read prefill=NAME,decode=NAME"),
        ("CPU_ATTN+CPU_MLA", "CPU_MLA cannot be a child of"),
        ("CPU_ATTN+FLASHINFER", "FLASHINFER cannot be loaded: No module named"),
        ("CPU_ATTN+CUSTOM", "CUSTOM cannot be loaded: Backend CUSTOM must be registered"),
        ("CPU_PREFIX_ATTN__CPU_ATTN+CPU_ATTN", "no attention backend 'CPU_PREFIX_ATTN__CPU_ATTN'"),
    ],
)
def test_what_cannot_be_composed_is_refused_with_the_reason(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        pairs.backend_for(value)


@pytest.mark.parametrize(
    "name", ["CPU_PREFIX_ATTN__CPU_ATTN", "PREFILL__CPU_PREFIX_ATTN__DECODE__CPU_ATTN"]
)
def test_a_pair_may_be_named_as_its_member_is(name: str) -> None:
    """Configurations and other tools' logs show it so."""
    backend = pairs.backend_for(name)
    assert backend is not None
    assert backend.name == name


def test_an_unknown_attribute_of_the_module_is_one() -> None:
    assert not hasattr(pairs, "nothing")
    assert not hasattr(pairs, "NO__SUCH")


@pytest.fixture
def underscored() -> Iterator[AttentionBackendEnum]:
    """A registered backend whose name looks like that of a pair."""
    name = "MY__ATTN"
    path = "vllm.v1.attention.backends.cpu_prefix_attn.CPUPrefixAttentionBackend"
    yield register_name(name, path)
    for held in (AttentionBackendEnum._member_map_, AttentionBackendEnum._value2member_map_):
        held.pop(name if name in held else path)
    AttentionBackendEnum._member_names_.remove(name)
    if name in vars(AttentionBackendEnum):
        type.__delattr__(AttentionBackendEnum, name)


def test_a_backend_with_a_double_underscore_in_its_name_is_no_pair(
    underscored: AttentionBackendEnum,
) -> None:
    assert pairs.backend_for("my__attn") is underscored
    assert pairs.class_of("MY__ATTN") is CPUPrefixAttentionBackend
    assert pairs.spelled("MY__ATTN") == "MY__ATTN"


@pytest.mark.parametrize(
    ("value", "name", "policy"),
    [
        ("MY__ATTN+CPU_ATTN", "MY__ATTN__CPU_ATTN", MMPrefixAttentionRouting),
        (
            "prefill=MY__ATTN,decode=CPU_ATTN",
            "PREFILL__MY__ATTN__DECODE__CPU_ATTN",
            PrefillDecodeAttentionRouting,
        ),
    ],
)
def test_it_is_a_child_as_any_other(
    underscored: AttentionBackendEnum, value: str, name: str, policy: type
) -> None:
    backend = pairs.backend_for(value)
    assert backend is not None
    assert (backend.name, pairs.spelled(backend.name)) == (name, value)
    composite: Any = backend.get_class()
    assert composite.child_classes() == (CPUPrefixAttentionBackend, CPUAttentionBackend)
    assert composite.routing_policy is policy


def test_the_refusal_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "CPU_ATN")
    with pytest.raises(ValueError, match="VLLM_ATTENTION_BACKEND=CPU_ATN: There is no"):
        selection.asked_by_environment()
