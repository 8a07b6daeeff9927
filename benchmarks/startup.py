# SPDX-License-Identifier: Apache-2.0
"""What the plugin adds to a process of vLLM and to an engine's start.

The import is timed in fresh processes that have imported what vLLM's engine core and worker import
anyway: how much longer `load_general_plugins` takes, and the import of the backend that the engine
then uses, than stock's. An engine's start is the time in which `vllm.LLM` is made, in fresh
processes in turns. Its noise is larger than the bound, so the time spent in this project's own
code during a start is measured as well.
"""

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Pairs, Row, at_most

PROFILE = (
    "Start: what the plugin wraps is imported by vLLM anyway; composites, pairs and the storage "
    "proof are imported only when one of them is asked for."
)
ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {
    True: "vllm.v1.attention.backends.cpu_prefix_attn",
    False: "vllm.v1.attention.backends.cpu_attn",
}
IMPORT = """
import sys, time
import vllm.v1.engine.core, vllm.v1.engine.async_llm, vllm.engine.arg_utils
import vllm.v1.worker.cpu_worker, vllm.v1.core.sched.scheduler
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
current_platform.is_cpu()
before = time.perf_counter()
load_general_plugins()
__import__(sys.argv[1])
print("seconds", time.perf_counter() - before)
"""
START = """
import sys, time
from pathlib import Path
from vllm import LLM
from tests.tiny_models import GEMMA3
from benchmarks.startup import watch
clock = watch() if sys.argv[2] == "watch" else float
before = time.perf_counter()
llm = LLM(**GEMMA3.llm_arguments(Path(sys.argv[1]), enforce_eager=True))
print("seconds", time.perf_counter() - before, clock())
"""


def run(quick: bool) -> Iterator[Row]:
    """Import, then start; a quick run makes one engine and watches it."""
    pairs = 1 if quick else 5
    times = np.array([
        [_seconds(IMPORT, plugin, BACKENDS[plugin])[0] for plugin in (True, False)]
        for _ in range(pairs)
    ])  # fmt: skip
    taken = Pairs(times[:, 0], times[:, 1])
    yield taken.row(
        "import",
        "loading plugins and the backend",
        "stock",
        1e3 * (taken.ours - taken.theirs),
        unit="ms",
        target=at_most(50, " ms"),
    )
    from tests.tiny_models import GEMMA3

    with tempfile.TemporaryDirectory() as folder:
        model = str(GEMMA3.build(Path(folder)))
        starts = []
        for pair in range(0 if quick else 6):
            order = (True, False) if pair % 2 else (False, True)
            taken_in_turn = {plugin: _seconds(START, plugin, model, "")[0] for plugin in order}
            starts.append([taken_in_turn[True], taken_in_turn[False]])
        watched = np.array(
            [_seconds(START, True, model, "watch") for _ in range(1 if quick else 3)]
        )
    own = Pairs(watched[:, 1], watched[:, 0] - watched[:, 1])
    yield own.row(
        "engine start", "time in this project's own code", "the rest of the start",
        100 * own.slowdown, unit="s", target=at_most(1, " %"),
    )  # fmt: skip
    if starts:
        times = np.array(starts)
        taken = Pairs(times[:, 0], times[:, 1])
        yield taken.row(
            "engine start", "tiny Gemma 3", "stock", 100 * (taken.slowdown - 1), unit="s",
            target=at_most(1, " %"),
            floor="Starts differ from each other by more than that; see the row before.",
        )  # fmt: skip


def _seconds(script: str, plugin: bool, *arguments: str) -> list[float]:
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    if not plugin:
        environment["VLLM_PLUGINS"] = ""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if done.returncode or not lines:
        raise RuntimeError(f"A process of vLLM ended with {done.returncode}:\n{done.stderr}")
    return [float(number) for number in lines[-1].split()[1:]]


def watch() -> Callable[[], float]:
    """Time every entry into this project's code in this process; the result tells the sum."""
    from vllm.plugins.composite_attention import scheduling, selection
    from vllm.v1.attention.backends import composite, storage_proof

    spent = 0.0
    inside = False

    def timed(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent, inside
            if inside:
                return function(*args, **kwargs)
            inside, began = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                inside, spent = False, spent + time.perf_counter() - began

        setattr(owner, name, wrapper)

    for owner, name in (
        (selection, "register"),
        (selection, "_best_composite"),
        (storage_proof, "prove_one_storage"),
        (scheduling, "MultiModalBudget"),
        (composite.CompositeAttentionImpl, "__init__"),
    ):
        timed(owner, name)
    return lambda: spent
