"""Views of one KV cache allocation, by bytes: what is aligned, left alone and refused.

vLLM calls the alignment up to 0.28; the KV cache tensors here are like that version's.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec
from vllm.v1.worker.gpu.attn_utils import (
    _align_mixed_attention_kv_cache_views,
    _restride_blocks_first_kv_cache_to_kv_first_storage,
)
from vllm.v1.worker.utils import AttentionGroup

CacheShape = Callable[[int, int, int, int], tuple[int, ...]]


def backend(name: str, shape: CacheShape) -> type[AttentionBackend]:
    """A backend whose cache shape is `shape(blocks, block size, KV heads, head size)`."""

    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return shape(num_blocks, block_size, num_kv_heads, head_size)

    methods = {
        "get_name": staticmethod(lambda: name),
        "get_kv_cache_shape": staticmethod(get_kv_cache_shape),
    }
    return type(name, (AttentionBackend,), methods)


KVFirst = backend("KV_FIRST", lambda n, b, h, d: (2, n, b, h, d))
BlocksFirst = backend("BLOCKS_FIRST", lambda n, b, h, d: (n, 2, b, h, d))
FusedByToken = backend("FUSED_BY_TOKEN", lambda n, b, h, d: (n, b, h, 2 * d))
FusedByHead = backend("FUSED_BY_HEAD", lambda n, b, h, d: (n, h, b, 2 * d))
DoubledHeads = backend("DOUBLED_HEADS", lambda n, b, h, d: (n, 2 * h, b, d))
HeadsFirst = backend("HEADS_FIRST", lambda n, b, h, d: (h, n, b, 2 * d))


@dataclass
class Layer:
    """A layer of an allocation with blocks of `kernel_block` tokens; `order` is the physical
    order of its cache's dimensions."""

    name: str
    backend: Any
    kernel_block: int = 8
    heads: int = 3
    head_size: int = 4
    dtype: torch.dtype = torch.float32
    order: Sequence[int] | None = None
    spec: KVCacheSpec | None = None


@dataclass
class Allocation:
    """Random bytes for `num_blocks` manager blocks of `block_size` tokens, `start` bytes into
    their storage, and one view of them for each layer."""

    layers: list[Layer]
    num_blocks: int = 3
    block_size: int = 8
    start: int = 0
    block_stride: int = 0
    raw: torch.Tensor = field(init=False)
    caches: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        first = self.layers[0]
        page = 2 * self.block_size * first.heads * first.head_size * first.dtype.itemsize
        random = torch.Generator().manual_seed(0)
        size = (self.start + self.num_blocks * page,)
        storage = torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
        self.raw = storage[self.start :]
        self.caches = {layer.name: self.view(layer) for layer in self.layers}

    @property
    def shared_by(self) -> list[str]:
        return [layer.name for layer in self.layers]

    def view(self, layer: Layer) -> torch.Tensor:
        blocks = self.num_blocks * self.block_size // layer.kernel_block
        shape = layer.backend.get_kv_cache_shape(
            blocks, layer.kernel_block, layer.heads, layer.head_size
        )
        order = layer.order or range(len(shape))
        physical = self.raw.view(layer.dtype).view([shape[dim] for dim in order])
        return physical.permute([list(order).index(dim) for dim in range(len(shape))])

    def manager_block(self, name: str, block: int) -> tuple[bytes, bytes]:
        """K and V of manager block `block` in the view of layer `name`."""
        k, v = self.k_and_v(name, block)
        return bytes_of(k), bytes_of(v)

    def k_and_v(self, name: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = next(layer for layer in self.layers if layer.name == name)
        ratio = self.block_size // layer.kernel_block
        kernel_blocks = slice(block * ratio, (block + 1) * ratio)
        cache = self.caches[name]
        if layer.backend is KVFirst:
            return cache[0, kernel_blocks], cache[1, kernel_blocks]
        return cache[kernel_blocks, 0], cache[kernel_blocks, 1]

    def kv_first_bytes(self, block: int) -> tuple[bytes, bytes]:
        """K and V of a manager block by arithmetic: V of all blocks lies behind K of all."""
        half = len(self.raw) // 2
        size = half // self.num_blocks
        return (
            bytes_of(self.raw[block * size : (block + 1) * size]),
            bytes_of(self.raw[half + block * size : half + (block + 1) * size]),
        )


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def attention_spec(layer: Layer) -> AttentionSpec:
    return FullAttentionSpec(
        block_size=layer.kernel_block,
        num_kv_heads=layer.heads,
        head_size=layer.head_size,
        dtype=layer.dtype,
    )


def align(
    *allocations: Allocation,
    kernel_block_sizes: list[int] | None = None,
    caches: dict[str, torch.Tensor] | None = None,
    described: bool = True,
    cache_dtype: str = "auto",
    **options: Any,
) -> None:
    """Align the views of `allocations`, in which each layer is a group of its own."""
    layers = [layer for allocation in allocations for layer in allocation.layers]
    groups = [
        AttentionGroup(layer.backend, [layer.name], layer.spec or attention_spec(layer), number)
        for number, layer in enumerate(layers)
    ]
    config: Any = SimpleNamespace(kv_cache_tensors=list(allocations))
    views: dict[str, torch.Tensor] = {}
    for allocation in allocations:
        views.update(allocation.caches)
    _align_mixed_attention_kv_cache_views(
        groups if described else [],
        views if caches is None else caches,
        [layer.kernel_block for layer in layers]
        if kernel_block_sizes is None
        else kernel_block_sizes,
        cache_dtype,
        config,
        **options,
    )


def geometry(*allocations: Allocation) -> dict[str, tuple[Any, ...]]:
    return {
        name: (cache.shape, cache.stride(), cache.storage_offset(), cache.data_ptr())
        for allocation in allocations
        for name, cache in allocation.caches.items()
    }


def mixed(num_blocks: int = 3, **both: Any) -> Allocation:
    return Allocation([Layer("k", KVFirst, **both), Layer("b", BlocksFirst, **both)], num_blocks)


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("kernel_blocks", [(8, 8), (4, 4), (8, 2), (2, 8)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str
)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("kv_first_comes_first", [True, False])
def test_a_block_is_the_same_bytes_in_both_views(
    num_blocks: int,
    kernel_blocks: tuple[int, int],
    dtype: torch.dtype,
    heads: int,
    kv_first_comes_first: bool,
) -> None:
    layers = [
        Layer("k", KVFirst, kernel_blocks[0], heads, dtype=dtype),
        Layer("b", BlocksFirst, kernel_blocks[1], heads, dtype=dtype),
    ]
    allocation = Allocation(layers if kv_first_comes_first else layers[::-1], num_blocks)
    align(allocation)
    for block in range(num_blocks):
        expected = allocation.kv_first_bytes(block)
        assert allocation.manager_block("k", block) == expected
        assert allocation.manager_block("b", block) == expected


@pytest.mark.parametrize(("writer", "reader"), [("k", "b"), ("b", "k")])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_what_one_view_writes_the_other_reads_and_nothing_else_changes(
    writer: str, reader: str, block: int
) -> None:
    allocation = mixed()
    align(allocation)
    before = {other: allocation.manager_block(reader, other) for other in range(3)}
    k, v = allocation.k_and_v(writer, block)
    k.copy_(torch.arange(k.numel()).view(k.shape))
    v.copy_(-torch.arange(v.numel()).view(v.shape))
    written = (bytes_of(k), bytes_of(v))
    after = {other: allocation.manager_block(reader, other) for other in range(3)}
    assert after == before | {block: written}


def test_views_disagree_before_they_are_aligned() -> None:
    allocation = mixed(num_blocks=2)
    assert allocation.manager_block("k", 1) != allocation.manager_block("b", 1)


def test_a_cache_in_which_every_size_is_2_is_aligned() -> None:
    layer: dict[str, Any] = {"kernel_block": 2, "heads": 2, "head_size": 2}
    allocation = Allocation(
        [Layer("b", BlocksFirst, **layer), Layer("k", KVFirst, **layer)],
        num_blocks=2,
        block_size=2,
    )
    align(allocation)
    assert allocation.manager_block("b", 1) == allocation.kv_first_bytes(1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_all_blocks_first_views_of_one_allocation_follow(order: tuple[int, ...]) -> None:
    layers = [
        Layer("k", KVFirst),
        Layer("b", BlocksFirst),
        Layer("c", BlocksFirst, kernel_block=4, heads=6, head_size=2),
    ]
    allocation = Allocation([layers[i] for i in order])
    align(allocation)
    for name, block in itertools.product("kbc", range(3)):
        assert allocation.manager_block(name, block) == allocation.kv_first_bytes(block)


def test_several_kv_first_views_are_no_obstacle() -> None:
    allocation = Allocation([Layer("k", KVFirst), Layer("b", BlocksFirst), Layer("l", KVFirst)])
    align(allocation)
    assert allocation.manager_block("b", 2) == allocation.kv_first_bytes(2)


def test_views_of_different_element_sizes_are_aligned() -> None:
    allocation = Allocation(
        [
            Layer("b", BlocksFirst, dtype=torch.bfloat16, head_size=4),
            Layer("k", KVFirst, dtype=torch.uint8, head_size=8),
        ]
    )
    align(allocation)
    assert allocation.manager_block("b", 2) == allocation.kv_first_bytes(2)


def test_views_that_start_inside_their_storage_stay_there() -> None:
    allocation = Allocation([Layer("b", BlocksFirst), Layer("k", KVFirst)], start=64)
    align(allocation)
    assert allocation.caches["b"].storage_offset() == 16  # 64 bytes of float32
    assert allocation.manager_block("b", 2) == allocation.kv_first_bytes(2)


def test_heads_before_tokens_within_a_block_stay_so() -> None:
    allocation = Allocation([Layer("b", BlocksFirst, order=(0, 1, 3, 2, 4)), Layer("k", KVFirst)])
    align(allocation)
    # K of all blocks is 3 blocks x 8 tokens x 3 heads x 4; within a block, heads outermost.
    assert allocation.caches["b"].stride() == (96, 288, 4, 32, 1)


def test_pages_with_padding_keep_it() -> None:
    k_first = Layer("k", KVFirst, head_size=8)
    allocation = Allocation([k_first])
    # 6 of 8 elements a head are used: blocks of 144 elements in pages of 192.
    page = 8 * 3 * 8
    padded = allocation.raw.view(torch.float32).as_strided(
        (3, 2, 8, 3, 6), (2 * page, 8 * 3 * 6, 18, 6, 1)
    )
    allocation.caches["b"] = padded
    allocation.layers.append(Layer("b", BlocksFirst, head_size=6))
    align(allocation)
    assert padded.stride() == (page, 3 * page, 18, 6, 1)


def test_nothing_is_copied_and_shapes_stay() -> None:
    allocation = mixed()
    held = allocation.caches["b"]
    shape, pointer, content = held.shape, held.data_ptr(), bytes_of(allocation.raw)
    align(allocation)
    assert allocation.caches["b"] is held
    assert (held.shape, held.data_ptr()) == (shape, pointer)
    assert bytes_of(allocation.raw) == content


def test_the_kv_first_view_is_not_touched() -> None:
    allocation = mixed()
    before = geometry(allocation)["k"]
    align(allocation)
    assert geometry(allocation)["k"] == before


def test_aligning_twice_changes_nothing_more() -> None:
    allocation = Allocation(
        [Layer("k", KVFirst, kernel_block=8), Layer("b", BlocksFirst, kernel_block=2)], start=32
    )
    align(allocation)
    once = geometry(allocation)
    align(allocation)
    assert geometry(allocation) == once


def test_blocks_first_view_that_already_keeps_k_before_v_is_as_it_was() -> None:
    allocation = Allocation([Layer("k", KVFirst), Layer("b", BlocksFirst, order=(1, 0, 2, 3, 4))])
    before = geometry(allocation)
    align(allocation)
    assert geometry(allocation) == before


def test_backend_that_takes_only_its_own_head_count_is_aligned() -> None:
    def one_head(n: int, b: int, h: int, d: int) -> tuple[int, ...]:
        if h != 1:
            raise ValueError("one head only")
        return n, 2, b, h, d

    allocation = Allocation(
        [Layer("b", backend("ONE_HEAD", one_head), heads=1), Layer("k", KVFirst, heads=1)]
    )
    align(allocation)
    assert allocation.manager_block("b", 2) == allocation.kv_first_bytes(2)


def test_backend_is_asked_for_its_shape_once() -> None:
    asked = []

    def shape(n: int, b: int, h: int, d: int) -> tuple[int, ...]:
        asked.append((n, b, h, d))
        return n, 2, b, h, d

    counted = backend("COUNTED", shape)
    allocation = Allocation([Layer("b", counted), Layer("k", KVFirst), Layer("c", counted)])
    asked.clear()  # the views of the allocation
    align(allocation)
    align(allocation)
    assert len(asked) == 1


def test_backend_is_asked_with_the_cache_dtype() -> None:
    dtypes = []

    class Asked(BlocksFirst):  # type: ignore[misc,valid-type]
        @staticmethod
        def get_kv_cache_shape(*numbers: int, cache_dtype_str: str = "auto") -> tuple[int, ...]:
            dtypes.append(cache_dtype_str)
            return BlocksFirst.get_kv_cache_shape(*numbers)  # type: ignore[attr-defined]

    allocation = Allocation([Layer("b", Asked), Layer("k", KVFirst)])
    dtypes.clear()
    align(allocation, cache_dtype="fp8_e5m2")
    assert dtypes == ["fp8_e5m2"]


def is_unchanged_by(action: Any, *allocations: Allocation) -> bool:
    before = geometry(*allocations)
    action()
    return geometry(*allocations) == before


@pytest.mark.parametrize(
    "layers",
    [
        [Layer("b", BlocksFirst), Layer("f", FusedByToken)],
        [Layer("f", FusedByHead, heads=2), Layer("g", FusedByToken, heads=2)],
        [Layer("k", KVFirst), Layer("l", KVFirst)],
        [Layer("f", FusedByToken), Layer("g", FusedByToken)],
    ],
    ids=["blocks first and fused", "fused twice", "K/V first twice", "one backend"],
)
def test_layers_that_agree_are_left_alone(layers: list[Layer]) -> None:
    allocation = Allocation(layers)
    assert is_unchanged_by(lambda: align(allocation), allocation)


def test_kv_first_view_that_keeps_a_block_together_agrees_with_fused_ones() -> None:
    allocation = Allocation([Layer("k", KVFirst, order=(1, 0, 2, 3, 4)), Layer("f", FusedByToken)])
    assert is_unchanged_by(lambda: align(allocation), allocation)


def test_layers_of_different_allocations_do_not_meet() -> None:
    alone, other = Allocation([Layer("k", KVFirst)]), Allocation([Layer("f", FusedByToken)])
    assert is_unchanged_by(lambda: align(alone, other), alone, other)


def test_packed_tensors_are_left_alone() -> None:
    allocation = mixed()
    allocation.block_stride = 2 * 8 * 3 * 4 * 4
    assert is_unchanged_by(lambda: align(allocation), allocation)


@pytest.mark.parametrize("layer", ["k", "b"])
def test_allocation_with_a_page_aligned_layer_is_left_alone(layer: str) -> None:
    allocation = mixed()
    assert is_unchanged_by(lambda: align(allocation, page_aligned_layers={layer}), allocation)


def test_other_allocations_than_the_page_aligned_one_are_aligned() -> None:
    allocation = mixed()
    align(allocation, page_aligned_layers={"of another allocation"})
    assert allocation.manager_block("b", 2) == allocation.kv_first_bytes(2)


@pytest.mark.parametrize("layer", [0, 1])
def test_layer_without_an_attention_spec_is_left_alone(layer: int) -> None:
    allocation = mixed()
    allocation.layers[layer].spec = KVCacheSpec(block_size=8)
    assert not isinstance(allocation.layers[layer].spec, AttentionSpec)
    assert is_unchanged_by(lambda: align(allocation), allocation)


def test_group_without_a_kernel_block_size_is_left_alone() -> None:
    allocation = mixed()
    assert is_unchanged_by(lambda: align(allocation, kernel_block_sizes=[8]), allocation)


@pytest.mark.parametrize("layer", ["k", "b"])
def test_layer_without_a_view_is_passed_over(layer: str) -> None:
    allocation = mixed()
    caches = {name: cache for name, cache in allocation.caches.items() if name != layer}
    assert is_unchanged_by(lambda: align(allocation, caches=caches), allocation)


def test_allocation_that_no_group_describes_is_left_alone() -> None:
    allocation = mixed()
    assert is_unchanged_by(lambda: align(allocation, described=False), allocation)


def test_allocation_without_blocks_is_left_alone() -> None:
    allocation = mixed(num_blocks=0)
    assert is_unchanged_by(lambda: align(allocation), allocation)


def test_nothing_to_align_is_no_error() -> None:
    assert is_unchanged_by(align)


REFUSED = {
    "fused by token": Layer("f", FusedByToken),
    "fused by token, block size 2": Layer("f", FusedByToken, kernel_block=2),
    "fused by token, two heads": Layer("f", FusedByToken, heads=2),
    "fused by token, head size 1": Layer("f", FusedByToken, head_size=1),
    "fused by head": Layer("f", FusedByHead),
    "fused by head, two heads": Layer("f", FusedByHead, heads=2),
    "one head, doubled": Layer("f", DoubledHeads, heads=1),
    "heads first": Layer("f", HeadsFirst),
    "heads first, two heads": Layer("f", HeadsFirst, heads=2),
    "K and V interleaved by token": Layer("f", BlocksFirst, order=(0, 2, 1, 3, 4)),
}


def beside_kv_first(layer: Layer, num_blocks: int = 3, kv_first_leads: bool = True) -> Allocation:
    kv_first = Layer("k", KVFirst, layer.kernel_block, layer.heads, layer.head_size)
    return Allocation([kv_first, layer] if kv_first_leads else [layer, kv_first], num_blocks)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("kv_first_leads", [True, False])
def test_view_that_cannot_follow_is_refused(
    case: str, num_blocks: int, kv_first_leads: bool
) -> None:
    with pytest.raises(ValueError, match="share one KV cache allocation"):
        align(beside_kv_first(REFUSED[case], num_blocks, kv_first_leads))


@pytest.mark.parametrize(
    "part",
    [
        r"k \(KV_FIRST, shape \(2, 3, 16, 1, 2\)\)",
        r"f \(FUSED_BY_TOKEN, shape \(3, 16, 1, 4\)\)",
        "f counts blocks first and has no K/V axis of its own at dimension 1",
        r"--attention-backend \(attention_config.backend\)",
        "attention_backend in --speculative-config",
    ],
)
def test_refusal_names_layers_backends_shapes_and_remedy(part: str) -> None:
    layer = Layer("f", FusedByToken, kernel_block=16, heads=1, head_size=2)
    kv_first = Layer("k", KVFirst, kernel_block=16, heads=1, head_size=2)
    with pytest.raises(ValueError, match=part):
        align(Allocation([kv_first, layer], block_size=16))


@pytest.mark.parametrize("case", REFUSED)
def test_no_view_is_changed_where_one_is_refused(case: str) -> None:
    good, bad = mixed(), beside_kv_first(REFUSED[case])
    good.layers = [replace(layer, name=f"good {layer.name}") for layer in good.layers]
    good.caches = {f"good {name}": cache for name, cache in good.caches.items()}
    before = geometry(good, bad)
    with pytest.raises(ValueError, match="share one KV cache allocation"):
        align(good, bad)
    assert geometry(good, bad) == before


def test_views_beside_a_refused_one_in_its_allocation_are_not_changed() -> None:
    allocation = Allocation(
        [Layer("b", BlocksFirst), Layer("k", KVFirst), Layer("f", FusedByToken)]
    )
    before = geometry(allocation)
    with pytest.raises(ValueError, match="f counts blocks first"):
        align(allocation)
    assert geometry(allocation) == before


@pytest.mark.parametrize("neighbour", [KVFirst, BlocksFirst, FusedByHead])
def test_backend_that_tells_no_shape_cannot_share_with_another(neighbour: Any) -> None:
    # As from vLLM 0.29 on, where the engine lays out all views.
    silent = type("SILENT", (AttentionBackend,), {"get_name": staticmethod(lambda: "SILENT")})
    allocation = Allocation([Layer("s", FusedByToken), Layer("n", neighbour)])
    allocation.layers[0].backend = silent
    with pytest.raises(ValueError, match="the backend of s does not tell its layout"):
        align(allocation)


def test_backend_that_tells_no_shape_can_share_with_itself() -> None:
    silent = type("SILENT", (AttentionBackend,), {"get_name": staticmethod(lambda: "SILENT")})
    allocation = Allocation([Layer("s", FusedByToken), Layer("t", FusedByToken)])
    for layer in allocation.layers:
        layer.backend = silent
    assert is_unchanged_by(lambda: align(allocation), allocation)


def test_backend_that_takes_only_two_heads_cannot_tell_them_from_k_and_v() -> None:
    def two_heads(n: int, b: int, h: int, d: int) -> tuple[int, ...]:
        assert h == 2
        return n, h, b, 2, d  # heads before K/V

    layer = Layer("f", backend("TWO_HEADS", two_heads), heads=2)
    with pytest.raises(ValueError, match="f counts blocks first"):
        align(beside_kv_first(layer))


def test_backend_that_takes_only_one_head_cannot_pass_two_of_it_for_k_and_v() -> None:
    def doubled_head(n: int, b: int, h: int, d: int) -> tuple[int, ...]:
        assert h == 1
        return n, 2 * h, b, d

    layer = Layer("f", backend("ONE_HEAD_DOUBLED", doubled_head), heads=1)
    with pytest.raises(ValueError, match="f counts blocks first"):
        align(beside_kv_first(layer))


def test_backend_that_counts_slots_instead_of_blocks_is_refused() -> None:
    layer = Layer("f", backend("SLOTS", lambda n, b, h, d: (n * b, 2, h, d)))
    with pytest.raises(ValueError, match="the backend of f does not tell its layout"):
        align(beside_kv_first(layer))


def test_view_of_another_shape_than_its_backend_tells_is_refused() -> None:
    allocation = mixed()
    allocation.caches["b"] = allocation.raw.view(torch.float32).view(3, 3, 8, 2, 4)
    with pytest.raises(ValueError, match="b has another shape than its backend tells"):
        align(allocation)


def test_block_count_that_does_not_divide_the_storage_is_refused() -> None:
    allocation = mixed()  # K of all blocks is 3 x 8 x 3 x 4 = 288 elements
    allocation.caches["b"] = allocation.raw.view(torch.float32)[:120].view(5, 2, 1, 3, 4)
    with pytest.raises(ValueError, match="b has blocks of another size than the others"):
        align(allocation)


def test_view_of_half_the_storage_is_refused() -> None:
    allocation = mixed(num_blocks=4)
    allocation.caches["b"] = allocation.caches["b"][:2]
    with pytest.raises(ValueError, match="b has blocks of another size than the others"):
        align(allocation)


def test_kv_first_view_whose_blocks_are_not_one_behind_the_other_is_refused() -> None:
    heads_before_blocks = (0, 3, 1, 2, 4)
    layers = [Layer("k", KVFirst, order=heads_before_blocks), Layer("b", BlocksFirst)]
    with pytest.raises(ValueError, match="k does not keep its blocks one behind the other"):
        align(Allocation(layers))


def test_no_view_is_changed_where_a_later_allocation_is_refused() -> None:
    fine = mixed()
    padded = Allocation([Layer("c", KVFirst), Layer("d", BlocksFirst)])
    storage = torch.zeros(480)  # tightly behind the last padded block, so d would reach beyond it
    padded.caches["c"] = storage.as_strided((2, 4, 8, 1, 4), (256, 64, 4, 4, 1))
    padded.caches["d"] = storage.as_strided((4, 2, 14, 1, 4), (112, 56, 4, 4, 1))

    def refused() -> None:
        with pytest.raises(ValueError, match="d has blocks of another size than the others"):
            align(fine, padded)

    assert is_unchanged_by(refused, fine, padded)


def test_view_that_would_reach_behind_its_allocation_is_refused() -> None:
    allocation = Allocation([Layer("c", KVFirst), Layer("d", BlocksFirst)])
    storage = torch.zeros(496)  # V of the last block would end at 503
    allocation.caches["c"] = storage.as_strided((2, 4, 8, 1, 4), (256, 64, 4, 4, 1))
    allocation.caches["d"] = storage.as_strided((4, 2, 14, 1, 4), (128, 56, 4, 4, 1))
    with pytest.raises(ValueError, match="d would reach behind the end of the allocation"):
        align(allocation)


def test_views_made_in_inference_mode_are_aligned_outside_it() -> None:
    with torch.inference_mode():
        allocation = mixed()
    align(allocation)
    assert allocation.manager_block("b", 1) == allocation.manager_block("k", 1)


def test_views_that_start_at_different_bytes_are_refused() -> None:
    allocation = mixed(num_blocks=4)
    allocation.caches["b"] = allocation.caches["b"][1:3]
    with pytest.raises(ValueError, match="b does not start where the others start"):
        align(allocation)


def test_blocks_larger_than_those_of_the_storage_are_refused() -> None:
    allocation = mixed(num_blocks=4)
    allocation.caches["k"] = allocation.raw[: len(allocation.raw) // 2].view(torch.float32)
    allocation.caches["k"] = allocation.caches["k"].view(2, 2, 8, 3, 4)
    with pytest.raises(ValueError, match="b has blocks of another size than the others"):
        align(allocation)


def test_kv_first_views_that_part_k_and_v_differently_are_refused() -> None:
    allocation = Allocation(
        [
            Layer("k", KVFirst),
            Layer("l", KVFirst, order=(1, 0, 2, 3, 4)),
            Layer("b", BlocksFirst),
        ]
    )
    with pytest.raises(ValueError, match="l keeps K and V at another distance"):
        align(allocation)


@pytest.mark.parametrize("shape", [(3, 16, 1, 4), (3, 1, 2), (2, 2)], ids=str)
def test_view_without_a_k_v_axis_is_refused_by_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"shape {shape} has no K/V axis")):
        _restride_blocks_first_kv_cache_to_kv_first_storage(torch.zeros(shape))


def test_view_is_restrided_in_place_to_k_before_v() -> None:
    cache = torch.zeros(5, 2, 16, 3, 4)
    _restride_blocks_first_kv_cache_to_kv_first_storage(cache)
    # K or V of a block is 16 x 3 x 4 = 192 elements, K of 5 blocks 960.
    assert (cache.shape, cache.stride()) == ((5, 2, 16, 3, 4), (192, 960, 12, 4, 1))
