"""A pair of backends serves only where both are seen to keep keys and values at the same places."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.v1.attention.backends import storage_proof
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.cpu_prefix_attn import (
    CPUChildBackend,
    CPUPrefixAttentionBackend,
    CPUSegmentsBackend,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from tests.v1.attention.cpu_kernel import KernelUnderTest, make_config
from tests.v1.attention.mock_children import (
    ALL_FORMATS,
    BLOCK_SIZE,
    CPU,
    CacheFormat,
    MockBackend,
    MockLayer,
    batch,
    compose,
    make_builder,
    make_child,
    pair,
)
from tests.v1.attention.mock_children import (
    make_config as mock_config,
)

PACKED, *OTHERS = ALL_FORMATS
VALUE_FIRST = CacheFormat(value_first=True)
REFUSED = "GENERAL and CAUSAL cannot share a KV cache"


def serve(composite: Any, **layer: Any) -> Any:
    """Make a group of one layer behind the composite and its builder, as the engine does."""
    return make_builder(composite, {"layer": MockLayer(composite, **layer)})


def composite_of(general: CacheFormat, causal: CacheFormat) -> Any:
    return compose(make_child("GENERAL", stores=general), make_child("CAUSAL", stores=causal))


@pytest.mark.parametrize("stored", ALL_FORMATS, ids=str)
def test_children_that_store_alike_serve(stored: CacheFormat) -> None:
    assert serve(composite_of(stored, stored)) is not None


@pytest.mark.parametrize("general", ALL_FORMATS, ids=str)
def test_children_that_store_differently_are_refused(general: CacheFormat) -> None:
    for causal in ALL_FORMATS:
        if causal != general:
            with pytest.raises(ValueError, match=REFUSED):
                serve(composite_of(general, causal))


@pytest.mark.parametrize("told", ["GENERAL", "CAUSAL", "first at block 1, head 0, token 0, byte"])
def test_refusal_names_both_children_and_the_first_difference(told: str) -> None:
    with pytest.raises(ValueError, match=told):
        serve(composite_of(PACKED, VALUE_FIRST))


def test_first_difference_of_token_major_storage_is_where_the_second_head_should_be() -> None:
    """In a block of two heads, eight elements of keys and as many of values, the first head's
    first token is at the same place either way; its second token is not."""
    with pytest.raises(ValueError, match="first at block 1, head 0, token 1, byte"):
        serve(composite_of(PACKED, CacheFormat(token_major=True)))


KINDS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"kv_cache_dtype": "fp8"},
    {"head_size": 64},
    {"num_heads": 8, "num_kv_heads": 8},
    {"block_size": 32},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_children_that_store_alike_serve_every_kind_of_cache(kind: dict[str, Any]) -> None:
    assert serve(composite_of(OTHERS[0], OTHERS[0]), **kind) is not None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_children_that_store_differently_serve_no_kind_of_cache(kind: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        serve(composite_of(PACKED, VALUE_FIRST), **kind)


def test_formats_that_are_one_for_a_single_head_serve_it() -> None:
    composite = composite_of(PACKED, CacheFormat(token_major=True))
    assert serve(composite, num_heads=4, num_kv_heads=1) is not None


LAYOUTS = [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLNHC]


def composite_in(layout: KVCacheLayout, causal: CacheFormat) -> Any:
    return compose(
        make_child("GENERAL", layouts=[layout], stores=PACKED),
        make_child("CAUSAL", layouts=[layout], stores=causal),
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_children_that_store_alike_serve_in_any_layout(layout: KVCacheLayout) -> None:
    assert serve(composite_in(layout, PACKED)) is not None


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_refusal_names_the_layout_of_the_cache(layout: KVCacheLayout) -> None:
    with pytest.raises(ValueError, match=layout.name):
        serve(composite_in(layout, VALUE_FIRST))


def proofs(child: type[MockBackend]) -> int:
    """How often this child's writer has been run."""
    return len(child.called("do_kv_cache_update"))


def test_a_pair_is_proven_when_its_builder_is_made() -> None:
    general, causal = pair()
    serve(compose(general, causal))
    assert (proofs(general), proofs(causal)) == (1, 1)


def test_a_proven_pair_is_not_proven_again() -> None:
    general, causal = pair()
    composite = compose(general, causal)
    for _ in range(3):
        serve(composite)
    assert proofs(causal) == 1


@pytest.mark.parametrize(
    "other",
    KINDS,
    ids=str,
)
def test_another_kind_of_cache_is_proven_by_itself(other: dict[str, Any]) -> None:
    general, causal = pair()
    composite = compose(general, causal)
    serve(composite)
    serve(composite, **other)
    assert proofs(causal) == 2


def test_another_layout_is_proven_by_itself() -> None:
    layouts = [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC]
    children = [make_child(name, layouts=layouts) for name in ("GENERAL", "CAUSAL")]
    composite = compose(*children)
    for layout in layouts:
        layer = MockLayer(composite)
        cache = SimpleNamespace(block_size=BLOCK_SIZE, kv_cache_layout=layout.name)
        config = mock_config({"layer": layer}, cache_config=cache)
        composite.get_builder_cls()(layer.get_kv_cache_spec(), ["layer"], config, CPU)
    assert proofs(children[1]) == 2


def test_another_pair_is_proven_by_itself() -> None:
    general, causal = pair()
    serve(compose(general, causal))
    serve(compose(make_child("OTHER"), causal))
    assert proofs(causal) == 2


def test_a_refused_pair_is_refused_again() -> None:
    composite = composite_of(PACKED, VALUE_FIRST)
    for _ in range(2):
        with pytest.raises(ValueError, match="GENERAL and CAUSAL"):
            serve(composite)


def test_building_metadata_proves_nothing() -> None:
    general, causal = pair()
    builder = serve(compose(general, causal))
    for _ in range(3):
        builder.build(0, batch([(8, 8)]))
    assert proofs(causal) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_pair_inside_a_composite_is_proven_as_well(place: int) -> None:
    """Its causal child writes no keys: only the pair's own proof can show where it looks."""
    children: list[Any] = [make_child("FIRST"), make_child("SECOND")]
    children[place] = composite_of(PACKED, VALUE_FIRST)
    with pytest.raises(ValueError, match=REFUSED):
        serve(compose(*children, name="Outer"))


def asked_before_any_layer(composite: Any) -> str | None:
    with patch.object(storage_proof, "get_current_vllm_config", mock_config):
        return storage_proof.reason_against(composite, CPU, head_size=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("stored", ALL_FORMATS, ids=str)
def test_before_any_layer_children_that_store_alike_may_be_chosen(stored: CacheFormat) -> None:
    assert asked_before_any_layer(composite_of(stored, stored)) is None


@pytest.mark.parametrize("causal", OTHERS, ids=str)
def test_before_any_layer_children_that_store_differently_are_seen(causal: CacheFormat) -> None:
    reason = asked_before_any_layer(composite_of(PACKED, causal))
    assert "they store keys and values differently" in (reason or "")


def test_before_any_layer_every_layout_that_may_come_is_proven() -> None:
    general, causal = pair()
    assert asked_before_any_layer(compose(general, causal)) is None
    assert proofs(causal) == len(KVCacheLayout)


@pytest.mark.parametrize(("causal", "differs"), [(PACKED, False), (VALUE_FIRST, True)], ids=str)
def test_a_default_device_does_not_keep_it_from_proving(causal: CacheFormat, differs: bool) -> None:
    """vLLM makes layers with the model's device as torch's default, and no generator of a CPU's
    random numbers fills a tensor there."""
    with torch.device("meta"):
        reason = asked_before_any_layer(composite_of(PACKED, causal))
    assert ("they store keys and values differently" in (reason or "")) == differs
    assert (reason is None) != differs


def test_the_proof_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPOSITE_STORAGE_PROOF", "0")
    assert serve(composite_of(PACKED, VALUE_FIRST)) is not None


def test_a_pair_joined_unproven_is_proven_once_the_proof_is_on_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    composite = composite_of(PACKED, VALUE_FIRST)
    with monkeypatch.context() as off:
        off.setenv("VLLM_COMPOSITE_STORAGE_PROOF", "0")
        serve(composite)
    with pytest.raises(ValueError, match="GENERAL and CAUSAL"):
        serve(composite)


@pytest.mark.parametrize("value", ["1", ""])
def test_any_other_value_of_the_switch_leaves_the_proof_on(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("VLLM_COMPOSITE_STORAGE_PROOF", value)
    with pytest.raises(ValueError, match="GENERAL and CAUSAL"):
        serve(composite_of(PACKED, VALUE_FIRST))


def test_refusal_names_the_switch() -> None:
    with pytest.raises(ValueError, match="VLLM_COMPOSITE_STORAGE_PROOF=0"):
        serve(composite_of(PACKED, VALUE_FIRST))


def test_callers_random_numbers_are_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    serve(compose(*pair()))
    assert torch.equal(torch.rand(1), expected)


CANNOT_BE_CALLED = [
    NotImplementedError("needs a layer"),
    AttributeError("needs a layer"),
    RuntimeError("needs a GPU"),
    AssertionError("needs a GPU"),
    TypeError("takes other arguments"),
]
NO_WRITER = CANNOT_BE_CALLED[0]


def composite_with_a_reader(
    reader: str, reads: CacheFormat, error: Exception = NO_WRITER, **options: Any
) -> Any:
    """Of the two children, `reader` has no writer that can be called; the other one stores
    `PACKED`."""
    return compose(
        *(
            make_child(name, stores=reads, writer_error=error, **options)
            if name == reader
            else make_child(name, stores=PACKED)
            for name in ("GENERAL", "CAUSAL")
        )
    )


BY_READING = pytest.mark.parametrize("reader", ["CAUSAL", "GENERAL"])


@BY_READING
def test_a_child_without_a_writer_serves_where_it_reads_what_the_other_stores(reader: str) -> None:
    assert serve(composite_with_a_reader(reader, PACKED)) is not None


@BY_READING
def test_a_child_without_a_writer_is_refused_where_it_reads_otherwise(reader: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        serve(composite_with_a_reader(reader, VALUE_FIRST))


@pytest.mark.parametrize("error", CANNOT_BE_CALLED, ids=lambda e: type(e).__name__)
def test_a_writer_that_cannot_be_called_is_no_reason_against_a_pair(error: Exception) -> None:
    assert serve(composite_with_a_reader("CAUSAL", PACKED, error)) is not None


@pytest.mark.parametrize("reads", OTHERS, ids=str)
def test_no_way_of_reading_otherwise_is_taken_for_the_same(reads: CacheFormat) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        serve(composite_with_a_reader("CAUSAL", reads))


LAYERS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"sliding_window": 4},
    {"logits_soft_cap": 2.0},
    {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    {"sinks": torch.ones(4)},
]
LAYER_IDS = [next(iter(layer)) + str(layer.get("dtype", "")) for layer in LAYERS]


@pytest.mark.parametrize("layer", LAYERS, ids=LAYER_IDS)
def test_reading_proves_every_kind_of_layer(layer: dict[str, Any]) -> None:
    assert serve(composite_with_a_reader("CAUSAL", PACKED), **layer) is not None


@pytest.mark.parametrize("layer", LAYERS, ids=LAYER_IDS)
def test_reading_otherwise_is_seen_in_every_kind_of_layer(layer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        serve(composite_with_a_reader("CAUSAL", VALUE_FIRST), **layer)


@BY_READING
def test_a_child_that_can_neither_write_nor_read_is_refused_by_name(reader: str) -> None:
    composite = composite_with_a_reader(reader, PACKED, reader_error=RuntimeError("no kernel"))
    with pytest.raises(ValueError, match="GENERAL and CAUSAL"):
        serve(composite)


def test_children_of_which_neither_can_write_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"GENERAL and CAUSAL .* could not be shown"):
        serve(compose(*pair(writer_error=NO_WRITER)))


def test_children_that_read_alike_but_not_what_is_stored_are_refused() -> None:
    """Their outputs agree with each other and not with dense attention over the keys."""
    composite = compose(
        make_child("GENERAL", stores=PACKED, reads=VALUE_FIRST),
        make_child("CAUSAL", stores=VALUE_FIRST, writer_error=NO_WRITER),
    )
    with pytest.raises(ValueError, match="GENERAL and CAUSAL"):
        serve(composite)


def does_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """A child's `forward` that leaves the output as it is."""


def test_kernels_that_write_no_output_prove_nothing() -> None:
    composite = compose(
        make_child("GENERAL", impl={"forward": does_nothing}),
        make_child("CAUSAL", impl={"forward": does_nothing}, writer_error=NO_WRITER),
    )
    with pytest.raises(ValueError, match="GENERAL and CAUSAL"):
        serve(composite)


CPU_CASES: list[tuple[torch.dtype, str]] = [
    (torch.float32, "auto"),
    (torch.bfloat16, "auto"),
    (torch.float16, "auto"),
    (torch.bfloat16, "fp8"),
]


def writes_of(
    monkeypatch: pytest.MonkeyPatch, impl_cls: type[CPUAttentionBackendImpl]
) -> list[str]:
    """Record by class which impls write a cache through the real kernel."""
    written: list[str] = []
    kernel = impl_cls.do_kv_cache_update

    def record(self: Any, *args: Any) -> None:
        written.append(type(self).__name__)
        kernel(self, *args)

    monkeypatch.setattr(impl_cls, "do_kv_cache_update", record)
    return written


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), CPU_CASES, ids=lambda case: str(case).removeprefix("torch.")
)
def test_cpu_composite_is_proven_with_its_real_writers(
    dtype: torch.dtype, kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = writes_of(monkeypatch, CPUAttentionBackendImpl)
    # A head size and count of this test's own, which nothing has proven before.
    KernelUnderTest(
        make_config(tmp_path, dtype, kv_cache_dtype),
        CPUPrefixAttentionBackend,
        num_heads=5,
        num_kv_heads=5,
        head_size=96,
    )
    assert written == ["CPUSegmentsBackendImpl", "CPUAttentionBackendImpl"]


class SwappedImpl(CPUAttentionBackendImpl):
    """CPU_ATTN with keys and values the other way round in the cache."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
    ) -> None:
        super().do_kv_cache_update(layer, value, key, *rest)


class SwappedBackend(CPUChildBackend):
    @staticmethod
    def get_name() -> str:
        return "SWAPPED"

    @staticmethod
    def get_impl_cls() -> type[SwappedImpl]:
        return SwappedImpl


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), CPU_CASES[:2])
def test_a_real_kernel_that_stores_otherwise_is_refused(
    dtype: torch.dtype, kv_cache_dtype: str, tmp_path: Path
) -> None:
    composite = compose(CPUSegmentsBackend, SwappedBackend, backend_name="CPU_PREFIX_ATTN")
    with pytest.raises(
        ValueError, match="CPU_ATTN with segments and SWAPPED cannot share a KV cache"
    ):
        KernelUnderTest(make_config(tmp_path, dtype, kv_cache_dtype), composite)
