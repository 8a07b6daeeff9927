# SPDX-License-Identifier: Apache-2.0
"""`matrix --prove` where Triton's kernels run, in Triton's interpreter."""

import json
from typing import Any

import pytest

from tests.e2e.triton_interpreter import run_interpreted


def proven_pairs() -> str:
    import contextlib
    import io

    from vllm.plugins.composite_attention.__main__ import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["matrix", "--prove", "--format", "json"])
    return out.getvalue()


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, str], tuple[bool, str | None]]:
    result, _ = run_interpreted(proven_pairs)
    answer = json.loads(result[result.index("{\n") :])
    return {
        (pair["general"], pair["causal"]): (pair["proven"], pair["reason"])
        for pair in answer["pairs"]
    }


@pytest.mark.parametrize("pair", [("CPU_PREFIX_ATTN", "CPU_ATTN"), ("CPU_ATTN", "CPU_PREFIX_ATTN")])
def test_pairs_that_store_alike_are_proven(pairs: dict[Any, Any], pair: tuple[str, str]) -> None:
    assert pairs[pair] == (True, None)


@pytest.mark.parametrize("pair", [("TRITON_ATTN", "CPU_ATTN"), ("CPU_ATTN", "TRITON_ATTN")])
def test_a_pair_that_stores_differently_is_refused(
    pairs: dict[Any, Any], pair: tuple[str, str]
) -> None:
    """vLLM's own factory takes it, and every token after the first comes out wrong."""
    proven, reason = pairs[pair]
    assert not proven
    assert "they store keys and values differently" in (reason or "")


def test_a_pair_that_does_not_run_here_is_left_unproven(pairs: dict[Any, Any]) -> None:
    assert pairs["TRITON_ATTN", "FLASH_ATTN"] == (False, None)
