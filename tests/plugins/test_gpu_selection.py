# SPDX-License-Identifier: Apache-2.0
"""What is chosen on GPUs, asked of vLLM's own platforms and backend classes without a GPU
(`pretended.py`).

The tables are what the backends' documentation promises. FLASH_ATTN begins at capability 8.0, takes
heads up to 256 (512 with FlashAttention 4) and an fp8 cache with its versions 3 and 4 only.
FLASHINFER begins at 8.0 and takes heads of 64, 128, 256 and 512. TRITON_ATTN takes an fp8 cache
from 8.9 on, and alone computes in float32. vLLM's own composites are for 9.0 and 10.0 with heads of
256 and 512."""

from itertools import product
from typing import Any

import pytest

from tests.plugins.pretended import FLASHINFER_MODULES, ask

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
HEAD_SIZES = [64, 128, 256, 512]
DTYPES = ["float16", "bfloat16", "float32"]
CACHE_DTYPES = ["auto", "fp8"]

ALONE = "TRITON_ATTN"
FLASH = "TRITON_ATTN__FLASH_ATTN"
FLASHINFER = "TRITON_ATTN__FLASHINFER"
FLASH_4 = "FLASH_ATTN__FLASHINFER"

# Per capability, what is chosen for heads of 64, 128, 256 and 512, with FlashInfer installed.
CHOSEN = {
    "auto": {
        (7, 5): [ALONE, ALONE, ALONE, ALONE],
        (8, 0): [FLASH, FLASH, FLASH, FLASHINFER],
        (8, 6): [FLASH, FLASH, FLASH, FLASHINFER],
        (8, 9): [FLASH, FLASH, FLASH, FLASHINFER],
        (9, 0): [FLASH, FLASH, "TRITON_FLASH_ATTN", "TRITON_FLASH_ATTN"],
        (10, 0): [FLASH_4, FLASH_4, "TRITON_FLASHINFER", "TRITON_FLASHINFER"],
        (12, 0): [FLASH, FLASH, FLASH, FLASHINFER],
    },
    "fp8": {
        (7, 5): [ALONE, ALONE, ALONE, ALONE],
        (8, 0): [ALONE, ALONE, ALONE, ALONE],
        (8, 6): [ALONE, ALONE, ALONE, ALONE],
        (8, 9): [FLASHINFER, FLASHINFER, FLASHINFER, FLASHINFER],
        (9, 0): [FLASH, FLASH, "TRITON_FLASH_ATTN", "TRITON_FLASH_ATTN"],
        (10, 0): [FLASH_4, FLASH_4, "TRITON_FLASHINFER", "TRITON_FLASHINFER"],
        (12, 0): [FLASHINFER, FLASHINFER, FLASHINFER, FLASHINFER],
    },
}

# Per capability, cache dtype, head size and dtype: why a pair is passed over.
REFUSED = [
    ((7, 5), "auto", 128, "float16", "FLASH_ATTN", "compute capability not supported"),
    ((7, 5), "auto", 128, "float16", "FLASHINFER", "compute capability not supported"),
    ((8, 6), "auto", 512, "bfloat16", "FLASH_ATTN", "head_size not supported"),
    ((8, 9), "fp8", 128, "bfloat16", "FLASH_ATTN", "kv_cache_dtype not supported"),
    ((8, 6), "fp8", 128, "bfloat16", "FLASHINFER", "requires SM89+"),
    ((12, 0), "auto", 256, "float32", "FLASH_ATTN", "dtype not supported"),
    ((12, 0), "auto", 256, "float32", "FLASHINFER", "dtype not supported"),
]

CASES = [
    {"capability": capability, "head_size": size, "dtype": dtype, "kv_cache_dtype": cache}
    for capability, size, dtype, cache in product(CAPABILITIES, HEAD_SIZES, DTYPES, CACHE_DTYPES)
]

AMPERE = {"capability": (8, 6), "head_size": 128, "dtype": "bfloat16"}
HOPPER = {"capability": (9, 0), "head_size": 256, "dtype": "bfloat16"}
TURING = {"capability": (7, 5), "head_size": 128, "dtype": "float16"}


DIFFERS = "they differ, first at token 3"
OTHER_CASES: dict[str, dict[str, Any]] = {
    "text only": {**AMPERE, "use_mm_prefix": False},
    "encoder": {**AMPERE, "attn_type": "encoder_only"},
    "the first pair differs": {**AMPERE, "unproven": {FLASH: DIFFERS}},
    "all pairs differ": {**AMPERE, "unproven": {FLASH: DIFFERS, FLASHINFER: DIFFERS}},
    "vLLM's own by name": {**AMPERE, "selected": "TRITON_ATTN"},
    "a pair by name": {**AMPERE, "selected": "TRITON_ATTN+FLASHINFER"},
    "a pair by name, encoder": {
        **AMPERE,
        "selected": "TRITON_ATTN+FLASHINFER",
        "attn_type": "encoder_only",
    },
    "a pair by name on Turing": {**TURING, "selected": "TRITON_ATTN+FLASH_ATTN"},
    "the mask on the wrong child": {**AMPERE, "selected": "FLASH_ATTN+TRITON_ATTN"},
    "no mask by name": {**AMPERE, "environment": "FLASH_ATTN"},
    "phases": {**AMPERE, "selected": "prefill=TRITON_ATTN,decode=FLASHINFER"},
    "dcp": {**AMPERE, "use_dcp": True},
    "batch invariance": {**AMPERE, "use_batch_invariant": True},
    "sinks": {**AMPERE, "has_sink": True},
    "vLLM's own composite by name": {**HOPPER, "selected": "TRITON_FLASH_ATTN"},
}


def key(case: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(case["capability"]), case["kv_cache_dtype"], case["head_size"], case["dtype"]


@pytest.fixture(scope="module")
def on_cuda() -> list[dict[str, Any]]:
    return ask("cuda", [*CASES, *OTHER_CASES.values()], modules=FLASHINFER_MODULES)


@pytest.fixture(scope="module")
def with_flashinfer(on_cuda: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return dict(zip(map(key, CASES), on_cuda, strict=False))


@pytest.fixture(scope="module")
def others(on_cuda: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return dict(zip(OTHER_CASES, on_cuda[len(CASES) :], strict=True))


@pytest.fixture(scope="module")
def without_flashinfer() -> dict[tuple[Any, ...], dict[str, Any]]:
    cases = [case for case in CASES if case["dtype"] == "bfloat16"]
    return dict(zip(map(key, cases), ask("cuda", cases), strict=True))


def chosen_by_size(answers: dict[tuple[Any, ...], dict[str, Any]], *case: Any) -> list[str]:
    capability, cache, dtype = case
    return [answers[capability, cache, size, dtype]["chosen"] for size in HEAD_SIZES]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache", CACHE_DTYPES)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_best_composite_is_chosen(
    with_flashinfer: Any, capability: tuple[int, int], cache: str, dtype: str
) -> None:
    chosen = chosen_by_size(with_flashinfer, capability, cache, dtype)
    assert chosen == CHOSEN[cache][capability]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_float32_leaves_one_backend(with_flashinfer: Any, capability: tuple[int, int]) -> None:
    assert chosen_by_size(with_flashinfer, capability, "auto", "float32") == [ALONE] * 4


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0)], ids=str)
def test_without_flashinfer_flash_attn_serves_what_it_can(
    without_flashinfer: Any, capability: tuple[int, int]
) -> None:
    chosen = chosen_by_size(without_flashinfer, capability, "auto", "bfloat16")
    assert chosen == [FLASH, FLASH, FLASH, ALONE]
    assert chosen_by_size(without_flashinfer, capability, "fp8", "bfloat16") == [ALONE] * 4


def test_without_flashinfer_its_absence_is_the_reason(without_flashinfer: Any) -> None:
    candidates = dict(without_flashinfer[(8, 6), "auto", 512, "bfloat16"]["candidates"])
    assert "No module named 'flashinfer'" in candidates["TRITON_ATTN+FLASHINFER"][0]


@pytest.mark.parametrize(
    ("capability", "cache", "size", "dtype", "child", "reason"), REFUSED, ids=str
)
def test_a_pair_is_passed_over_for_its_childs_reason(
    with_flashinfer: Any,
    capability: tuple[int, int],
    cache: str,
    size: int,
    dtype: str,
    child: str,
    reason: str,
) -> None:
    candidates = dict(with_flashinfer[capability, cache, size, dtype]["candidates"])
    assert reason in "; ".join(candidates[f"TRITON_ATTN+{child}"])


def test_every_chosen_pair_was_proven(with_flashinfer: Any) -> None:
    pairs = [answer for answer in with_flashinfer.values() if "__" in answer["chosen"]]
    assert pairs
    assert all(answer["chosen"] in answer["proven"] for answer in pairs)


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        ("text only", "FLASH_ATTN"),
        ("encoder", ALONE),
        ("the first pair differs", FLASHINFER),
        ("all pairs differ", ALONE),
        ("vLLM's own by name", ALONE),
        ("a pair by name", FLASHINFER),
        ("a pair by name, encoder", ALONE),
        ("phases", "PREFILL__TRITON_ATTN__DECODE__FLASHINFER"),
        ("batch invariance", ALONE),
        ("vLLM's own composite by name", "TRITON_FLASH_ATTN"),
    ],
)
def test_other_layers_and_names(others: Any, case: str, chosen: str) -> None:
    assert others[case].get("chosen") == chosen, others[case]


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (
            "a pair by name on Turing",
            "TRITON_ATTN+FLASH_ATTN was asked for and cannot serve this model's layers on this "
            "device: FLASH_ATTN: compute capability not supported. Name TRITON_ATTN or "
            "FLEX_ATTENTION instead, or leave the backend unset.",
        ),
        ("the mask on the wrong child", "FLASH_ATTN: partial multimodal token full attention"),
        ("dcp", "No valid attention backend found"),
        ("no mask by name", "VLLM_ATTENTION_BACKEND asks for FLASH_ATTN."),
        ("no mask by name", "Name TRITON_ATTN+FLASH_ATTN or TRITON_ATTN+FLASHINFER or TRITON_ATTN"),
    ],
)
def test_a_refusal_names_the_reason_and_what_can_serve(
    others: Any, case: str, sentence: str
) -> None:
    assert sentence in others[case].get("refused", ""), others[case]


def test_rocm_keeps_its_own_for_the_pair_asks_for_two_caches() -> None:
    (answer,) = ask("rocm", [{"capability": (9, 4), "head_size": 128, "dtype": "bfloat16"}])
    assert answer["chosen"] == "TRITON_ATTN"
    (reason,) = dict(answer["candidates"])["TRITON_ATTN+ROCM_ATTN"]
    assert "TRITON_ATTN and ROCM_ATTN ask for different KV cache specs" in reason


def test_xpu_joins_its_backend_with_the_mask_and_its_fast_one() -> None:
    cases = [
        {"head_size": 128, "dtype": "bfloat16"},
        {"head_size": 512, "dtype": "bfloat16"},
        {"head_size": 128, "dtype": "float32"},
        {"head_size": 128, "dtype": "bfloat16", "use_mm_prefix": False},
    ]
    chosen = [answer["chosen"] for answer in ask("xpu", cases)]
    assert chosen == [FLASH, ALONE, ALONE, "FLASH_ATTN"]
