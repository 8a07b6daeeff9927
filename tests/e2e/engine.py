"""vLLM's engine in a process of its own, and its answers beside the references.

A module of tests starts one engine, hands it batch after batch and compares the answers; the
process keeps engines of different modules and settings apart, and its log can be read.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import FAMILIES, Answer, Family, Prompt, engine

ROOT = Path(__file__).resolve().parents[2]
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
WITHOUT_PLUGIN = {"VLLM_PLUGINS": ""}


@dataclass
class EngineRun:
    """What came out of one engine: for each batch its answers, and what the engine logged."""

    answers: list[list[Answer]]
    """A request's several completions one after the other."""
    log: str
    cached: list[list[int]]
    """For each batch and request the tokens of its prompt that were in the prefix cache."""
    counters: list[dict[str, float]]
    """vLLM's own counters since the start, after each batch; empty with `disable_log_stats`."""
    cache_groups: list[list[str]]
    """Layers by KV cache group; empty if the engine core has a process of its own."""


def run_engine(
    family: Family,
    folder: Path,
    batches: Sequence[Sequence[Prompt]],
    *,
    new_tokens: int = 6,
    sampling: Sequence[dict[str, Any]] | None = None,
    environment: dict[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
    **options: Any,
) -> EngineRun:
    """Start `vllm.LLM` on the checkpoint in `folder` and answer `batches` one after the other.

    Args:
        sampling: for each batch arguments of `SamplingParams` that replace the greedy ones.
        environment: variables to add; by default the engine core has its own process, as for
            a user.
        prepare: a function at the top level of a module, called first in the engine's process.
        options: arguments of `vllm.LLM`. With `data_parallel_size`, which is `AsyncLLM`'s, each
            rank answers each batch, rank 0 first.

    Raises:
        RuntimeError: the engine's process failed; holds its log.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job, result = Path(scratch) / "job", Path(scratch) / "result"
        each = [engine.sampling(new_tokens) | more for more in sampling or [{}] * len(batches)]
        torch.save((family.name, folder, batches, each, prepare, options, result), job)
        variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"} | (environment or {})
        command = [sys.executable, "-m", "tests.e2e.engine", str(job)]
        log = Path(scratch) / "log"  # a pipe would be held open by a process that outlives it
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                env=variables,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        written = log.read_text(errors="replace")
        if done.returncode:
            raise RuntimeError(f"The engine's process ended with {done.returncode}:\n{written}")
        answers, *facts = torch.load(result, weights_only=False)
        return EngineRun(answers, written, *facts)


def references(
    family: Family, folder: Path, prompts: Sequence[Prompt], new_tokens: int = 6, **how: Any
) -> list[Answer]:
    """Hugging Face's answers to `prompts`; `how` goes to `Family.reference_logprobs`."""
    texts, images = zip(*prompts, strict=True)
    return family.reference_logprobs(folder, texts, images, new_tokens, **how)


def main() -> None:
    job = torch.load(sys.argv[1], weights_only=False)
    family, folder, batches, sampling, prepare, options, result = job
    if prepare:
        prepare()
    from vllm import LLM, SamplingParams

    arguments = FAMILIES[family].llm_arguments(folder, **options)
    if "data_parallel_size" in options:
        torch.save((asyncio.run(_on_every_rank(arguments, batches, sampling)), [], [], []), result)
        return
    llm = LLM(**arguments)
    answers, cached, counters = [], [], []
    for batch, how in zip(batches, sampling, strict=True):
        outputs = llm.generate(engine.requests(batch), SamplingParams(**how), use_tqdm=False)
        answers.append([answer for output in outputs for answer in engine.answers(output)])
        cached.append([output.num_cached_tokens for output in outputs])
        counters.append({} if llm.llm_engine.logger_manager is None else _counters(llm))
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    groups = core.scheduler.kv_cache_config.kv_cache_groups if core else []
    torch.save((answers, cached, counters, [list(g.layer_names) for g in groups]), result)


async def _on_every_rank(
    arguments: dict[str, Any],
    batches: Sequence[Sequence[Prompt]],
    sampling: Sequence[dict[str, Any]],
) -> list[list[Answer]]:
    """Each batch's answers from rank 0, then from rank 1, and so on, all at once."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def ask(request: Any, how: dict[str, Any], rank: int, name: str) -> Answer:
        asked = llm.generate(request, SamplingParams(**how), name, data_parallel_rank=rank)
        async for output in asked:
            last = output
        return engine.answer(last)

    try:
        return [
            await asyncio.gather(
                *(
                    ask(request, how, rank, f"{number}-{rank}-{index}")
                    for rank in range(arguments["data_parallel_size"])
                    for index, request in enumerate(engine.requests(batch))
                )
            )
            for number, (batch, how) in enumerate(zip(batches, sampling, strict=True))
        ]
    finally:
        llm.shutdown()


def _counters(llm: Any) -> dict[str, float]:
    metrics = llm.get_metrics()
    return {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}


if __name__ == "__main__":
    main()
