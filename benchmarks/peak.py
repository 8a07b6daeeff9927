# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, measured: the floor of what is done on it."""

import functools
import time
from collections.abc import Callable

import torch

SIZE = 2048
COPIED = 1 << 28


@functools.cache
def operations(dtype: str) -> float:
    """Floating-point operations a second of torch's matrix product in this dtype."""
    left, right = (torch.randn(SIZE, SIZE).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * SIZE**3 / _shortest(lambda: left @ right)


@functools.cache
def bandwidth() -> float:
    """Bytes a second that a copy reads and writes, out of the caches."""
    source = torch.zeros(COPIED, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED / _shortest(lambda: target.copy_(source))


def described() -> str:
    """All of it in a line."""
    products = (f"{operations(d) / 1e9:.0f} GFLOP/s in {d}" for d in ("float32", "bfloat16"))
    return f"matrix product {', '.join(products)}; copy {bandwidth() / 1e9:.1f} GB/s"


def _shortest(work: Callable[[], object], runs: int = 8) -> float:
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
