# SPDX-License-Identifier: Apache-2.0
"""The routing decision, one a step and KV cache group, beside that of vLLM's own composite."""

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, Target, at_least, at_most, measure

TOPIC = "routing decision"
PROFILE = (
    "Routing: vLLM's decision spends its time on reading tensors element by element and on the "
    "ranges of every request; ours takes the requests with several queries out of two arrays and "
    "reads the ranges of those alone, in a plain loop, which beats any conversion to an array."
)
SIZES = (16, 256, 1024)
TARGETS = {16: 5, 256: 20, 1024: 25}
TEXT_ONLY = "text only, 4 queries each"
TEXT_ONLY_AT_256 = 50
LIVE = "one live image among decodes"
SCENARIOS = (
    TEXT_ONLY,
    "one text prefill among decodes, 4 past images each",
    "4-token verification, 4 past images each",
    LIVE,
)


def stock_composite() -> Any:
    """The installed engine's own `composite.py`, which this project's package of that name hides;
    loaded from its file."""
    import vllm

    path = Path(vllm.__file__).parent / "v1/attention/backends/composite.py"
    spec = importlib.util.spec_from_file_location("vllm_own_composite", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(scenario: str, num_reqs: int) -> Any:
    """Host metadata of a step of `num_reqs` requests, with lists and tuples of their own as the
    model runner makes them."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    query_lens = np.ones(num_reqs, np.int64)
    images = 4
    if scenario == TEXT_ONLY:
        query_lens[:], images = 4, 0
    elif scenario.startswith("4-token"):
        query_lens[:] = 4
    elif scenario == LIVE:
        query_lens[-1] = 600
    else:
        query_lens[-1] = 200
    random = np.random.default_rng(0)
    seq_lens = 2400 + random.integers(0, 400, num_reqs)
    ranges = {}
    for request in range(num_reqs):
        starts = 300 * np.arange(images) + random.integers(10, 40)
        ranges[request] = list(zip(starts.tolist(), (starts + 255).tolist(), strict=True))
    if scenario == LIVE:
        end = int(seq_lens[-1])
        ranges[num_reqs - 1][-1] = (end - 300, end - 45)
    rows = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=rows,
        query_start_loc_cpu=rows,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=num_reqs,
        num_actual_tokens=int(rows[-1]),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.zeros(num_reqs, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(int(rows[-1]), dtype=torch.int64),
        mm_req_doc_ranges=ranges,
    )


def run(quick: bool) -> Iterator[Row]:
    """Every scenario at every size, and how far each grows with the number of requests."""
    from vllm.v1.attention.backends.composite import requires_mm_prefix

    theirs = stock_composite().requires_mm_prefix
    pairs, seconds = (5, 0.002) if quick else (41, 0.02)
    for scenario in SCENARIOS:
        medians = {}
        for size in SIZES:
            common = batch(scenario, size)
            expected = scenario == LIVE
            assert requires_mm_prefix(common) is theirs(common) is expected, scenario
            taken = measure(
                partial(requires_mm_prefix, common),
                partial(theirs, common),
                pairs=pairs,
                seconds=seconds,
            )
            row = taken.row(
                TOPIC,
                f"{size} requests: {scenario}",
                "vLLM's own composite",
                taken.speedup,
                target=_target(scenario, size),
                panel="routing decision by requests",
                series=scenario,
                x=size,
            )
            medians[size] = taken.ours
            yield row
        if scenario != LIVE:
            yield _growth(scenario, medians)


def _target(scenario: str, size: int) -> Target:
    if scenario == TEXT_ONLY and size == 256:
        return at_least(TEXT_ONLY_AT_256)
    return at_least(TARGETS[size])


def _growth(scenario: str, times: dict[int, np.ndarray]) -> Row:
    """Of one decision from the smallest number of requests to the largest."""
    small, large = min(SIZES), max(SIZES)
    growth = times[large] / times[small]
    low, ratio, high = np.percentile(growth, (25, 50, 75)).tolist()
    ours, theirs = (float(np.median(times[size])) * 1e6 for size in (large, small))
    return Row(
        TOPIC,
        f"growth from {small} to {large} requests: {scenario}",
        f"ours with {small}",
        ours,
        theirs,
        "us",
        ratio,
        low,
        high,
        len(growth),
        at_most(large / small),
    )
