# SPDX-License-Identifier: Apache-2.0
"""Check composites on a GPU against a dense reference, and time them against single backends.

One attention layer a backend, through its real metadata builder and impl over one paged KV cache,
with what the engine would schedule: prefills with images, text prefills and decodes. Exit status:
0, 1 if a composite answers wrongly or cannot run, 2 if there is nothing to run on.

    python -m benchmarks.gpu_check                             # those chosen automatically
    python -m benchmarks.gpu_check TRITON_ATTN+FLASH_ATTN prefill=TRITON_ATTN,decode=FLASH_ATTN
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import harness
from tests.dense_reference import dense_attention, image_mask
from tests.v1.attention.cpu_kernel import Request

HEADS, KV_HEADS = 8, 4
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 2e-3}
"""Of the largest output; float32 leaves room for products in TF32."""


class Case(NamedTuple):
    """A batch and the part of the engine's work that it stands for."""

    name: str
    requests: list[Request]

    @property
    def has_images(self) -> bool:
        """Whether the batch needs the image mask."""
        return any(request.images and request.query_len > 1 for request in self.requests)


def cases(image: int) -> list[Case]:
    """With images of `image` tokens and texts in proportion."""
    two = [(image // 4, image // 4 + image - 1), (2 * image, 3 * image - 1)]
    decodes = [Request(image + 37 * row, 1, [(3, image // 2)]) for row in range(1, 9)]
    return [
        Case("image prefill", [Request(4 * image, 4 * image, two)]),
        # As after a prefix cache hit. No chunk ends inside one (`scheduling.py`).
        Case("chunk from inside an image", [Request(3 * image + image // 2, image, two)]),
        Case("image prefill among decodes", [*decodes[:3], Request(3 * image, 3 * image, two[:1])]),
        Case("text prefill", [Request(4 * image, 4 * image), Request(image, image // 2)]),
        Case("decode", decodes),
    ]


@dataclass(frozen=True)
class Shape:
    """An attention layer."""

    head_size: int
    window: int | None
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"head size {self.head_size}, window {self.window}, {str(self.dtype)[6:]}"


class Layer:
    """A layer of a backend with its builder and a KV cache of the engine's shape and layout."""

    def __init__(self, backend: Any, shape: Shape, device: torch.device, num_blocks: int) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention import Attention
        from vllm.plugins.composite_attention.one_layer import vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype
        from vllm.v1.attention.selector import AttentionSelectorConfig
        from vllm.v1.kv_cache_interface import (
            KVCacheLayout,
            compute_layer_kv_cache_shape_bytes,
            compute_layout_strides,
        )

        self.shape, self.device = shape, device
        self.block_size = max(32, backend.get_preferred_block_size(32))
        settings = AttentionSelectorConfig(shape.head_size, shape.dtype, "auto", self.block_size)
        self.config = vllm_config(settings, HEADS, KV_HEADS, masked=True)
        current = set_current_vllm_config(self.config)
        with current, set_default_torch_dtype(shape.dtype), torch.device(device):
            layer: Any = Attention(
                HEADS,
                shape.head_size,
                shape.head_size**-0.5,
                KV_HEADS,
                cache_config=self.config.cache_config,
                per_layer_sliding_window=shape.window,
                prefix="layers.0",
                mm_prefix_clamp_sliding_window=shape.window is not None,
                attn_backend=backend,
            )
            self.layer = layer
            spec: Any = layer.get_kv_cache_spec(self.config)
            builder_cls = backend.get_builder_cls()
            wide = builder_cls.requires_block_table_width
            extras = {"block_table_width": num_blocks} if wide else {}
            self.builder = builder_cls(spec, [layer.layer_name], self.config, device, **extras)
        layout = (backend.supported_kv_cache_layouts() or tuple(KVCacheLayout))[0]
        size = compute_layer_kv_cache_shape_bytes(spec, num_blocks)
        strides = compute_layout_strides(spec, num_blocks, 1, layout)[1:]
        last = sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        raw = torch.zeros(last + 1, dtype=torch.int8, device=device)
        self.cache = raw.as_strided(size, strides).view(spec.dtype)

    def prepare(self, case: Case) -> None:
        """Write every key of the case's requests, and build the batch's metadata."""
        from vllm.config import set_current_vllm_config

        requests, random = case.requests, np.random.default_rng(0)
        torch.manual_seed(0)
        tokens = sum(request.seq_len for request in requests)
        rows = sum(request.query_len for request in requests)
        size, dtype = self.shape.head_size, self.shape.dtype
        self.key, self.value = torch.randn(2, tokens, KV_HEADS, size).to(self.device, dtype)
        self.query = torch.randn(rows, HEADS, size).to(self.device, dtype)
        self.output = torch.full_like(self.query, torch.nan)
        common, slots = self._batch(requests, random)
        self.layer.impl.do_kv_cache_update(self.layer, self.key, self.value, self.cache, slots)
        with set_current_vllm_config(self.config):
            self.metadata = self.builder.build(0, common)
        scheduled = [
            part[len(part) - request.query_len :]
            for request, part in zip(requests, self._by_request(self.key, requests), strict=True)
        ]
        self.fresh = torch.cat(scheduled)

    def attend(self) -> torch.Tensor:
        """The kernel's answer for the prepared batch, on the device when it returns."""
        impl, given = self.layer.impl, (self.query, self.fresh, self.fresh, self.cache)
        impl.forward(self.layer, *given, self.metadata, self.output)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return self.output

    def error(self, case: Case) -> float:
        """The largest difference to dense attention in float64, of the largest output."""
        self.prepare(case)
        output = self.attend().double().cpu()
        starts = np.cumsum([request.query_len for request in case.requests])[:-1].tolist()
        expected = torch.cat(
            [
                dense_attention(
                    query,
                    key,
                    value,
                    image_mask(request.seq_len, request.images, window=self.shape.window),
                    self.shape.head_size**-0.5,
                )
                for request, query, key, value in zip(
                    case.requests,
                    self.query.cpu().tensor_split(starts),
                    self._by_request(self.key.cpu(), case.requests),
                    self._by_request(self.value.cpu(), case.requests),
                    strict=True,
                )
            ]
        )
        return float((output - expected).abs().max() / expected.abs().max())

    @staticmethod
    def _by_request(tensor: torch.Tensor, requests: Sequence[Request]) -> tuple[torch.Tensor, ...]:
        return tensor.split([request.seq_len for request in requests])

    def _batch(
        self, requests: Sequence[Request], random: np.random.Generator
    ) -> tuple[Any, torch.Tensor]:
        """The batch's common metadata over blocks in random order, and every token's slot."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = [-(-request.seq_len // self.block_size) for request in requests]
        blocks = random.permutation(np.arange(1, len(self.cache)))  # 0 is the engine's padding
        table = np.zeros((len(requests), max(counts)), np.int32)
        slots = []
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            table[row, :count], blocks = blocks[:count], blocks[count:]
            position = np.arange(request.seq_len)
            block = table[row, position // self.block_size].astype(np.int64)
            slots.append(block * self.block_size + position % self.block_size)
        scheduled = [s[len(s) - r.query_len :] for s, r in zip(slots, requests, strict=True)]
        query_lens = [request.query_len for request in requests]
        starts = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32)
        lengths = torch.tensor([request.seq_len for request in requests], dtype=torch.int32)
        images = {row: request.images for row, request in enumerate(requests)}
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(requests),
            num_actual_tokens=sum(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=int(lengths.max()),
            block_table_tensor=torch.from_numpy(table).to(self.device),
            slot_mapping=torch.from_numpy(np.concatenate(scheduled)).to(self.device),
            is_prefilling=torch.tensor([query_len > 1 for query_len in query_lens]),
            mm_req_doc_ranges=images if any(images.values()) else None,
        )
        return common, torch.from_numpy(np.concatenate(slots)).to(self.device)


def check(
    name: str, backend: Any, shape: Shape, device: torch.device, image: int = 64
) -> Iterator[bool]:
    """Print how far each case's answer, with images of `image` tokens, is off; is it right."""
    where = f"{name}, {shape}"
    try:
        layer = Layer(backend, shape, device, num_blocks=256)
    except Exception as error:
        print(f"FAIL  {where}: cannot be made: {error}")
        yield False
        return
    for case in cases(image):
        try:
            error = layer.error(case)
        except Exception as failure:  # of any kind: a kernel that does not run is the finding
            print(f"FAIL  {where}, {case.name}: {type(failure).__name__}: {failure}")
            yield False
            continue
        right = error <= TOLERANCE[shape.dtype]
        print(f"{'ok  ' if right else 'FAIL'}  {where}, {case.name}: {error:.1e}", flush=True)
        yield right


def timed(
    name: str, backend: Any, shape: Shape, device: torch.device, image: int, pairs: int
) -> Iterator[harness.Row]:
    """The kernels of a composite in turns with each of its children's alone, where that masks."""
    from vllm.plugins.composite_attention.choosing import leaves
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours = Layer(backend, shape, device, num_blocks=1024)
    known = AttentionBackendEnum.__members__
    names = dict.fromkeys(leaf.get_name() for leaf in leaves(backend) if leaf.get_name() in known)
    for alone in names:
        single = known[alone].get_class()
        theirs = Layer(single, shape, device, num_blocks=1024)
        for case in cases(image):
            if case.has_images and not single.supports_mm_prefix():
                continue
            for layer in (ours, theirs):
                layer.prepare(case)
            measured = harness.measure(ours.attend, theirs.attend, pairs=pairs, seconds=0.01)
            ratios = measured.slowdown
            yield measured.row(f"{name}, {shape}", case.name, alone, ratios)


def chosen(shape: Shape) -> list[str]:
    """The composites that would be chosen automatically for a layer that masks images, or come
    first among the platform's own."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.plugins.composite_attention import choosing, one_layer
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(
        shape.head_size,
        shape.dtype,
        "auto",
        None,
        use_mm_prefix=True,
        has_sliding_window=shape.window is not None,
    )
    with set_current_vllm_config(one_layer.vllm_config(config, HEADS, KV_HEADS, masked=True)):
        candidates = list(choosing.candidates(current_platform, config, HEADS))
    able = [candidate.name for candidate in candidates if not candidate.reasons]
    first = able[:1]
    if first and "+" not in first[0]:
        first = [n for n in first if choosing.is_composite(AttentionBackendEnum[n].get_class())]
    return first


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="as VLLM_ATTENTION_BACKEND takes them")
    parser.add_argument("--device", default="cuda", help="cuda (default), xpu or cpu")
    parser.add_argument("--head-sizes", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 96], help="0 for none")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--image", type=int, default=64, help="tokens of a checked image")
    parser.add_argument("--timed-image", type=int, default=256, help="tokens of a timed image")
    parser.add_argument("--pairs", type=int, default=20, help="timings each; 0 to check only")
    options = parser.parse_args(argv)

    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.plugins.composite_attention import pairs

    load_general_plugins()
    there = current_platform.device_type or "none"
    if there != options.device:
        print(
            f"There is no {options.device} device here: vLLM finds {there}. Run this on a machine "
            "with one and a vLLM built for it; --device cpu checks the CPU composite instead."
        )
        return 2
    device = torch.device(options.device)
    answers, rows = [], []
    for head_size in options.head_sizes:
        for window in options.windows:
            shape = Shape(head_size, window or None, DTYPES[options.dtype])
            names = options.names or chosen(shape)
            if not names:
                print(f"none  {shape}: no composite would be chosen here")
            for name in names:
                try:
                    asked: Any = pairs.backend_for(name)
                except ValueError as error:
                    parser.error(str(error))
                if asked is None:
                    parser.error(f"{name} names no backend")
                right = list(check(name, asked.get_class(), shape, device, options.image))
                answers += right
                if all(right) and options.pairs:
                    rows += timed(
                        name, asked.get_class(), shape, device, options.timed_image, options.pairs
                    )
    if rows:
        print("\nKernels in turns; a ratio above 1 means that the composite takes longer.\n")
        print(harness.table(rows))
    print(f"\n{answers.count(False)} of {len(answers)} answers wrong.")
    if not answers:
        return 2
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
