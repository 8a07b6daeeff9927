"""The CPU composite's real kernel against the float64 dense reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.cpu_prefix_attn import CPUPrefixAttentionBackend
from vllm.v1.attention.backends.prefix_segments import PrefixSegmentsMetadata

from tests.v1.attention.cpu_kernel import KernelUnderTest, Request, make_config, visible_keys

# Relative to the largest output: rounding of the kernel's accumulation and of its result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
MIXED = [
    Request(100, 100, [(10, 40), (41, 60)]),
    Request(50, 1, [(3, 9)]),
    Request(300, 120, [(170, 200), (210, 215), (290, 305)]),
    Request(64, 64, [(0, 63)]),
    Request(40, 40),
]

MakeKernel = Callable[..., KernelUnderTest]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VllmConfig]:
    made: dict[Any, VllmConfig] = {}

    def config(dtype: torch.dtype = torch.float32, kv_cache_dtype: str = "auto") -> VllmConfig:
        if (dtype, kv_cache_dtype) not in made:
            folder = tmp_path_factory.mktemp("config")
            made[dtype, kv_cache_dtype] = make_config(folder, dtype, kv_cache_dtype)
        return made[dtype, kv_cache_dtype]

    return config


@pytest.fixture(scope="module")
def kernel(configs: Callable[..., VllmConfig]) -> MakeKernel:
    def make(
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
        backend: Any = CPUPrefixAttentionBackend,
        **how: Any,
    ) -> KernelUnderTest:
        return KernelUnderTest(configs(dtype, kv_cache_dtype), backend, **how)

    return make


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 64, 16])
def test_each_dtype_and_window_agrees(
    kernel: MakeKernel, dtype: torch.dtype, window: int | None
) -> None:
    assert kernel(dtype, windows=(window,)).errors(MIXED) < [TOLERANCE[dtype]]


@pytest.mark.parametrize("head_size", CPUAttentionBackend.get_supported_head_sizes())
def test_each_head_size_agrees(kernel: MakeKernel, head_size: int) -> None:
    assert kernel(head_size=head_size, windows=(64,)).errors(MIXED) < [TOLERANCE[torch.float32]]


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_each_block_size_agrees(tmp_path: Path, block_size: int, window: int | None) -> None:
    config = make_config(tmp_path, torch.float32, block_size=block_size)
    under_test = KernelUnderTest(config, CPUPrefixAttentionBackend, windows=(window,))
    assert under_test.errors(MIXED) < [TOLERANCE[torch.float32]]


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16"])
def test_a_cache_dtype_by_name_that_is_the_models_agrees(
    kernel: MakeKernel, kv_cache_dtype: str
) -> None:
    assert kernel(torch.bfloat16, kv_cache_dtype).errors(MIXED) < [TOLERANCE[torch.bfloat16]]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("window", [None, 16])
def test_each_fp8_cache_agrees(kernel: MakeKernel, kv_cache_dtype: str, window: int | None) -> None:
    under_test = kernel(torch.bfloat16, kv_cache_dtype, windows=(window,))
    assert under_test.errors(MIXED) < [TOLERANCE[torch.bfloat16]]


@pytest.mark.parametrize(
    "feature",
    [
        # the only dtype of sinks that the kernel of vLLM 0.30 takes
        {"sinks": torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.bfloat16)},
        {"logits_soft_cap": 5.0},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    ],
    ids=lambda feature: next(iter(feature)),
)
@pytest.mark.parametrize("window", [None, 64, 16])
def test_sinks_soft_cap_and_alibi_hold_for_images(
    kernel: MakeKernel, feature: dict[str, Any], window: int | None
) -> None:
    assert kernel(windows=(window,), **feature).errors(MIXED) < [TOLERANCE[torch.float32]]


@pytest.mark.parametrize("clamped", [True, False], ids=["clamped", "unclamped"])
@pytest.mark.parametrize("window", [1, 5, 24, 100])
def test_images_longer_than_the_window_agree(
    kernel: MakeKernel, window: int, clamped: bool
) -> None:
    batch = [Request(400, 400, [(20, 300)]), Request(350, 100, [(100, 340)]), Request(90, 1)]
    under_test = kernel(windows=(window,), clamped=clamped)
    assert under_test.errors(batch) < [TOLERANCE[torch.float32]]


def test_full_and_sliding_layers_of_one_group_agree(kernel: MakeKernel) -> None:
    errors = kernel(windows=(None, 16, 64)).errors(MIXED)
    assert all(error < TOLERANCE[torch.float32] for error in errors)  # no NaN, as max() might


def clear(metadata: PrefixSegmentsMetadata) -> None:
    """What Gemma 4 does to the metadata of its full-attention layers before each forward."""
    assert metadata.mm_prefix_range
    metadata.mm_prefix_range = None


def test_clearing_the_ranges_makes_full_layers_causal(kernel: MakeKernel) -> None:
    images, text = [Request(100, 100, [(10, 40)])], [Request(100, 100)]
    full, _ = kernel(windows=(None, 64)).errors(images, prepare=clear, judged_as=text)
    assert full < TOLERANCE[torch.float32]


def test_clearing_the_ranges_leaves_sliding_layers_of_the_group(kernel: MakeKernel) -> None:
    _, sliding = kernel(windows=(None, 64)).errors([Request(100, 100, [(10, 40)])], prepare=clear)
    assert sliding < TOLERANCE[torch.float32]


def test_padding_rows_and_empty_requests_are_left_alone(kernel: MakeKernel) -> None:
    batch = [Request(40, 40, [(5, 20)]), Request(30, 0, [(2, 9)]), Request(0, 0), Request(0, 0)]
    assert kernel().errors(batch) < [TOLERANCE[torch.float32]]


def test_many_requests_agree(kernel: MakeKernel) -> None:
    batch = [Request(20 + i, 20 + i if i % 3 else 1, [(i % 7, 9 + i % 9)]) for i in range(120)]
    assert kernel(windows=(32,), num_blocks=512).errors(batch) < [TOLERANCE[torch.float32]]


def test_text_only_batches_run_on_the_causal_child(kernel: MakeKernel) -> None:
    variants: list[int] = []
    kernel().errors(
        [Request(40, 40)], prepare=lambda m: variants.append(m._attention_backend_variant)
    )
    assert variants == [1]


def test_images_in_the_past_run_on_the_causal_child(kernel: MakeKernel) -> None:
    variants: list[int] = []
    batch = [Request(40, 10, [(5, 20)]), Request(60, 1, [(2, 50)])]
    kernel(clamped=True, windows=(16,)).errors(
        batch, prepare=lambda m: variants.append(m._attention_backend_variant)
    )
    assert variants == [1]


def test_the_schedule_knows_the_layers_window(kernel: MakeKernel) -> None:
    builder: Any = kernel(windows=(64, 64)).builder
    assert [child.window_size for child in builder.children] == [64, 64]


def test_stock_cpu_attn_masks_the_image_causally(tmp_path: Path) -> None:
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    assert torch.equal(visible_keys(CPUAttentionBackend, 20, [(5, 12)]), causal)


def test_the_composite_opens_the_image_and_nothing_else() -> None:
    expected = torch.ones(20, 20, dtype=torch.bool).tril()
    expected[5:13, 5:13] = True
    assert torch.equal(visible_keys(CPUPrefixAttentionBackend, 20, [(5, 12)]), expected)
