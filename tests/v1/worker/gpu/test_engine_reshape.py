"""vLLM 0.28's own reshaping of KV caches, the last that calls our alignment, on real storage."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, MambaSpec
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.utils import AttentionGroup

from tests.v1.worker.gpu.test_kv_cache_alignment import (
    BlocksFirst,
    FusedByHead,
    KVFirst,
    bytes_of,
)

pytestmark = pytest.mark.skipif(
    not hasattr(attn_utils, "_reshape_kv_cache"),
    reason="from vLLM 0.29 on the engine lays out all views alike and does not align them",
)

NUM_BLOCKS = 4
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
HALF = NUM_BLOCKS * SPEC.block_size * SPEC.num_kv_heads * SPEC.head_size  # K of all blocks


def reshape(
    layers: dict[str, tuple[type[AttentionBackend] | Any, Any]], kernel_block_size: int = 16
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The raw allocation of these `(backend, spec)` layers, counting up in float32, and the
    views that the engine makes of it."""
    raw = torch.arange(2 * HALF, dtype=torch.float32).view(torch.int8)
    groups = [
        AttentionGroup(backend, [name], spec, number)
        for number, (name, (backend, spec)) in enumerate(layers.items())
    ]
    tensors: Any = {"size": raw.numel(), "shared_by": list(layers)}
    views = attn_utils._reshape_kv_cache(
        attn_groups=groups,
        kv_cache_raw_tensors=dict.fromkeys(layers, raw),
        cache_dtype="auto",
        kernel_block_sizes=[kernel_block_size] * len(layers),
        shared_kv_cache_layers={},
        kv_cache_config=SimpleNamespace(kv_cache_tensors=[KVCacheTensor(**tensors)]),
    )
    return raw, views


@pytest.mark.parametrize("kernel_block_size", [16, 8])
@pytest.mark.parametrize("order", [("k", "b"), ("b", "k")])
def test_mixed_layers_address_the_same_bytes(
    kernel_block_size: int, order: tuple[str, str]
) -> None:
    layers = {"k": (KVFirst, SPEC), "b": (BlocksFirst, SPEC)}
    raw, views = reshape({name: layers[name] for name in order}, kernel_block_size)
    block = kernel_block_size * SPEC.num_kv_heads * SPEC.head_size
    for number in range(NUM_BLOCKS * 16 // kernel_block_size):
        values = torch.arange(number * block, (number + 1) * block, dtype=torch.float32)
        expected = (bytes_of(values), bytes_of(values + HALF))
        assert (bytes_of(views["k"][0, number]), bytes_of(views["k"][1, number])) == expected
        assert (bytes_of(views["b"][number, 0]), bytes_of(views["b"][number, 1])) == expected
    assert {view.data_ptr() for view in views.values()} == {raw.data_ptr()}


def test_fused_layer_with_two_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"f \(FUSED_BY_HEAD, shape \(4, 2, 16, 16\)\)"):
        reshape({"k": (KVFirst, SPEC), "f": (FusedByHead, SPEC)})


def test_allocation_shared_with_mamba_state_keeps_its_pages() -> None:
    state = MambaSpec(
        block_size=16,
        shapes=((SPEC.page_size_bytes // 4,),),
        dtypes=(torch.float32,),
    )
    layers = {"k": (KVFirst, SPEC), "b": (BlocksFirst, SPEC), "m": (None, state)}
    _, views = reshape(layers)
    page = SPEC.page_size_bytes // 4
    values = torch.arange(3 * page, 3 * page + page // 2, dtype=torch.float32)
    assert bytes_of(views["k"][0, 3]) == bytes_of(views["b"][3, 0]) == bytes_of(values)
