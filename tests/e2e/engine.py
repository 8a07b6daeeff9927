"""vLLM's engine in a process of its own, and its answers beside the references.

A module of tests starts one engine, hands it batch after batch and compares the answers; the
process keeps engines of different modules and settings apart, and its log can be read.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
    log: str


def run_engine(
    family: Family,
    folder: Path,
    batches: Sequence[Sequence[Prompt]],
    *,
    new_tokens: int = 6,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> EngineRun:
    """Start `vllm.LLM` on the checkpoint in `folder` and answer `batches` one after the other.

    Args:
        environment: variables to add; by default the engine core has its own process, as for
            a user.
        options: arguments of `vllm.LLM`.

    Raises:
        RuntimeError: the engine's process failed; holds its log.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job, result = Path(scratch) / "job", Path(scratch) / "result"
        torch.save((family.name, folder, batches, new_tokens, options, result), job)
        variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"} | (environment or {})
        command = [sys.executable, "-m", "tests.e2e.engine", str(job)]
        done = subprocess.run(
            command,
            env=variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"The engine's process ended with {done.returncode}:\n{done.stdout}")
        return EngineRun(torch.load(result, weights_only=False), done.stdout)


def references(
    family: Family, folder: Path, prompts: Sequence[Prompt], new_tokens: int = 6, **how: Any
) -> list[Answer]:
    """Hugging Face's answers to `prompts`; `how` goes to `Family.reference_logprobs`."""
    texts, images = zip(*prompts, strict=True)
    return family.reference_logprobs(folder, texts, images, new_tokens, **how)


def main() -> None:
    from vllm import LLM, SamplingParams

    family, folder, batches, new_tokens, options, result = torch.load(
        sys.argv[1], weights_only=False
    )
    llm = LLM(**FAMILIES[family].llm_arguments(folder, **options))
    sampling = SamplingParams(**engine.sampling(new_tokens))
    answers = [
        list(map(engine.answer, llm.generate(engine.requests(batch), sampling, use_tqdm=False)))
        for batch in batches
    ]
    torch.save(answers, result)


if __name__ == "__main__":
    main()
