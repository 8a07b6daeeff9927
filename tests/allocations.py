# SPDX-License-Identifier: Apache-2.0
"""What a piece of work allocates: by torch's allocator, inside compiled operators too, and by
numpy and Python. Memory that a kernel takes past both of them (CPU_ATTN's scratch, which is there
before any batch and the same for every backend) is not seen."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import torch


class Allocations(NamedTuple):
    """Bytes: the most that was held at once over what was held before, and the largest piece
    that torch allocated."""

    peak: int
    largest: int


def allocations(work: Callable[[], object]) -> Allocations:
    """Trace one run of `work`, after one run that warms it up."""
    work()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        of_python = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]"
    )
    held = peak = largest = 0
    for _, change in changes:
        held += change
        peak, largest = max(peak, held), max(largest, change)
    return Allocations(peak + of_python, largest)
