"""Runs batches through the real CPU kernel behind a backend, with a paged cache."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

from tests.compiled import skip_without_compiled_operators
from tests.dense_reference import dense_attention, image_mask

BLOCK_SIZE = 32
torch.cpu._init_amx()  # in an engine the model's matrix products have done it before attention


@dataclass
class Request:
    """`seq_len` tokens, of which the last `query_len` are this step's queries."""

    seq_len: int
    query_len: int
    images: list[tuple[int, int]] = field(default_factory=list)


def make_config(
    folder: Path,
    dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
    block_size: int = BLOCK_SIZE,
) -> VllmConfig:
    """A vLLM configuration without weights; enough for attention layers and builders."""
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=128,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=128,
        vocab_size=64,
        max_position_embeddings=1 << 16,
    ).save_pretrained(folder)
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype=dtype)
    cache = CacheConfig(block_size=block_size, cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]
    return VllmConfig(model_config=model, cache_config=cache, device_config=DeviceConfig("cpu"))


class KernelUnderTest:
    """Attention layers of one group behind `backend`, and the group's metadata builder."""

    def __init__(
        self,
        config: VllmConfig,
        backend: type[AttentionBackend],
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_size: int = 32,
        windows: Sequence[int | None] = (None,),
        clamped: bool = True,
        num_blocks: int = 256,
        **impl_args: Any,
    ) -> None:
        skip_without_compiled_operators()
        self.impl_args = impl_args
        self.clamped = clamped
        dtype: Any = config.model_config.dtype
        self.dtype: torch.dtype = dtype
        self.block_size = config.cache_config.block_size
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config), set_default_torch_dtype(self.dtype):
            self.layers = [
                Attention(
                    num_heads,
                    head_size,
                    head_size**-0.5,
                    num_kv_heads,
                    cache_config=config.cache_config,
                    per_layer_sliding_window=window,
                    prefix=f"layers.{index}",
                    mm_prefix_clamp_sliding_window=clamped and window is not None,
                    attn_backend=backend,
                    **impl_args,
                )
                for index, window in enumerate(windows)
            ]
            spec: Any = self.layers[0].get_kv_cache_spec(config)
            self.builder = backend.get_builder_cls()(
                spec, [layer.layer_name for layer in self.layers], config, torch.device("cpu")
            )
        self.cache = torch.zeros(
            num_blocks, num_kv_heads, self.block_size, 2 * head_size, dtype=spec.dtype
        )
        self.elsewhere = 0.0
        """What the cache holds where no token of the batch is."""
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size

    def random_keys(self, num_tokens: int) -> torch.Tensor:
        """(num_tokens, kv_heads, head_size) numbers that the cache's dtype holds exactly, so that
        how the kernel rounds plays no part."""
        keys = torch.randn(num_tokens, self.num_kv_heads, self.head_size).to(self.dtype)
        name = self.layers[0].kv_cache_dtype
        if not name.startswith("fp8"):
            return keys
        grid = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
        return keys.to(grid).to(self.dtype)

    def metadata(
        self, requests: Sequence[Request], generator: np.random.Generator
    ) -> tuple[CommonAttentionMetadata, torch.Tensor]:
        """The batch's common metadata with a block table in random order, and every token's
        slot, request by request."""
        blocks_of = [-(-max(r.seq_len, 1) // self.block_size) for r in requests]
        blocks = generator.permutation(np.arange(1, len(self.cache)))[: sum(blocks_of)]
        table = np.zeros((len(requests), max(blocks_of)), np.int32)
        slots = []
        for row, (request, count) in enumerate(zip(requests, blocks_of, strict=True)):
            table[row, :count], blocks = blocks[:count], blocks[count:]
            position = np.arange(request.seq_len)
            slots.append(
                table[row, position // self.block_size] * self.block_size
                + position % self.block_size
            )
        starts = torch.tensor(np.cumsum([0] + [r.query_len for r in requests]), dtype=torch.int32)
        lengths = torch.tensor([r.seq_len for r in requests], dtype=torch.int32)
        scheduled = [s[len(s) - r.query_len :] for s, r in zip(slots, requests, strict=True)]
        return (
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                seq_lens_cpu_upper_bound=lengths,
                num_reqs=len(requests),
                num_actual_tokens=int(starts[-1]),
                max_query_len=max(r.query_len for r in requests),
                max_seq_len=int(lengths.max()),
                block_table_tensor=torch.from_numpy(table),
                slot_mapping=torch.from_numpy(np.concatenate(scheduled).astype(np.int64)),
                mm_req_doc_ranges={i: r.images for i, r in enumerate(requests) if r.images},
            ),
            torch.from_numpy(np.concatenate(slots).astype(np.int64)),
        )

    def errors(
        self,
        requests: Sequence[Request],
        seed: int = 0,
        *,
        prepare: Callable[[Any], object] = lambda metadata: None,
        judged_as: Sequence[Request] | None = None,
    ) -> list[float]:
        """Largest difference to the dense reference, one per layer, relative to the largest
        reference output.

        Args:
            prepare: sees the built metadata before the layers run.
            judged_as: the requests that the reference answers, if not the same.
        """
        torch.manual_seed(seed)
        common, all_slots = self.metadata(requests, np.random.default_rng(seed))
        key, value = (self.random_keys(len(all_slots)) for _ in range(2))
        rows = (common.num_actual_tokens, self.num_heads, self.head_size)
        query = torch.randn(rows).to(self.dtype)
        metadata = self.builder.build(0, common)
        prepare(metadata)
        judged = judged_as or requests
        return [
            self._error(layer, judged, metadata, all_slots, query, key, value)
            for layer in self.layers
        ]

    def _error(
        self,
        layer: Any,
        requests: Sequence[Request],
        metadata: Any,
        all_slots: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> float:
        self.cache.fill_(self.elsewhere)
        layer.impl.do_kv_cache_update(layer, key, value, self.cache, all_slots)
        output = torch.full_like(query, torch.nan)
        lengths = [r.seq_len for r in requests]
        queries = [r.query_len for r in requests]
        fresh = torch.cat(
            [k[len(k) - n :] for k, n in zip(key.split(lengths), queries, strict=True)]
        )
        layer.impl.forward(layer, query, fresh, fresh, self.cache, metadata, output)
        expected = torch.cat(
            [
                dense_attention(
                    q,
                    k,
                    v,
                    image_mask(
                        r.seq_len, r.images, window=layer.sliding_window, clamped=self.clamped
                    ),
                    self.head_size**-0.5,
                    soft_cap=self.impl_args.get("logits_soft_cap") or 0.0,
                    alibi_slopes=self.impl_args.get("alibi_slopes"),
                    sinks=self.impl_args.get("sinks"),
                )
                for r, q, k, v in zip(
                    requests,
                    query.split(queries),
                    key.split(lengths),
                    value.split(lengths),
                    strict=True,
                )
            ]
        )
        return float((output.double() - expected).abs().max() / expected.abs().max())


def visible_keys(
    backend: type[AttentionBackend],
    seq_len: int,
    images: list[tuple[int, int]],
    window: int | None = None,
) -> torch.Tensor:
    """(seq_len, seq_len) bool: which keys each query of one prefill attends, asked of the kernel.

    With equal scores and the values' rows one-hot, each output row holds the weights of its keys,
    `head_size` keys at a time.
    """
    head_size = 128
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), torch.float32)
    kernel = KernelUnderTest(
        config,
        backend,
        num_heads=1,
        num_kv_heads=1,
        head_size=head_size,
        windows=(window,),
    )
    common, slots = kernel.metadata([Request(seq_len, seq_len, images)], np.random.default_rng(0))
    layer: Any = kernel.layers[0]
    metadata = kernel.builder.build(0, common)
    nothing = torch.zeros(seq_len, 1, head_size)
    seen = []
    for first in range(0, seq_len, head_size):
        value = torch.eye(seq_len)[:, first : first + head_size]
        value = torch.nn.functional.pad(value, (0, head_size - value.shape[1]))[:, None]
        layer.impl.do_kv_cache_update(layer, nothing, value, kernel.cache, slots)
        output = torch.empty(seq_len, 1, head_size)
        layer.impl.forward(layer, nothing, nothing, value, kernel.cache, metadata, output)
        seen.append(output[:, 0] > 0)
    return torch.cat(seen, dim=1)[:, :seq_len]
