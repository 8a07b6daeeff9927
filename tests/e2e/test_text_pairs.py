# SPDX-License-Identifier: Apache-2.0
"""Pairs on CPU that serve a text model: CPU_ATTN with a torch backend that keeps its keys and
values where CPU_ATTN does, in vLLM's engine with its V1 model runner, against transformers and
against CPU_ATTN alone, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import text_model, torch_child
from tests.e2e.child_spy import Notes, Step, spy
from tests.e2e.engine import IN_PROCESS
from tests.e2e.job import Outcome, engine_for_each, run_job
from tests.tiny_models import Answer, engine, largest_difference
from tests.tiny_models.check import TOLERANCE
from tests.tiny_models.common import VOCABULARY

CPU, TORCH = "CPUAttentionBackendImpl", "TorchLikeCPUImpl"
SINGLE = "CPU_ATTN"
PAIRS = {
    "prefill=CPU_ATTN,decode=CPU_ATTN": (CPU, CPU),
    "prefill=TORCH_CPU_ATTN,decode=CPU_ATTN": (TORCH, CPU),
    "prefill=CPU_ATTN,decode=TORCH_CPU_ATTN": (CPU, TORCH),
    "CPU_ATTN+TORCH_CPU_ATTN": (TORCH, TORCH),
}
"""The child that must serve steps with a prefill in them, and steps of decodes. A text model's
batches are all the causal child's in a pair by image mask; the general child writes the cache."""

NEW_TOKENS = 8
STEP_TOKENS = 64
PROMPTS = [
    torch.randint(20, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
    for length in (12, 40, 150)
]
TOKENS = [prompt.tolist() for prompt in PROMPTS]
PREFILLS = [[12, 12, 40], [1, 1, 62], [1, 1, 62], [1, 1, 14]]
"""Query lengths: the longest prompt takes four steps of at most 64 tokens, more than one block of
the cache, the last three of them beside decodes."""


def serve(model: Path, values: list[str]) -> dict[str, tuple[list[Answer], Notes]]:
    """Answer `PROMPTS` with one engine for each value of `VLLM_ATTENTION_BACKEND`."""
    from vllm import SamplingParams
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    torch_child.register()
    notes = spy(CPUAttentionBackendImpl, torch_child.TorchImpl)

    def answers(llm: Any) -> tuple[list[Answer], Notes]:
        prompts = [{"prompt_token_ids": prompt} for prompt in TOKENS]
        sampling = SamplingParams(**engine.sampling(NEW_TOKENS))
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return list(map(engine.answer, outputs)), notes.take()

    arguments = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_logprobs": -1,
        "enforce_eager": True,
        "max_num_batched_tokens": STEP_TOKENS,
    }
    return engine_for_each(values, arguments, answers)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model.build(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def outcome(model: Path) -> Outcome:
    return run_job(serve, model, [SINGLE, *PAIRS], environment=IN_PROCESS)


@pytest.fixture(scope="module")
def judge(model: Path) -> list[Answer]:
    return text_model.references(model, TOKENS, NEW_TOKENS)


@pytest.mark.parametrize("value", [SINGLE, *PAIRS])
def test_a_text_model_agrees_with_transformers(
    value: str, outcome: Outcome, judge: list[Answer]
) -> None:
    for answer, reference in zip(outcome.result[value][0], judge, strict=True):
        assert answer.tokens == reference.tokens
        assert largest_difference(answer, reference) < TOLERANCE


@pytest.mark.parametrize("value", PAIRS)
def test_a_pair_agrees_with_the_single_backend(value: str, outcome: Outcome) -> None:
    answers, alone = outcome.result[value][0], outcome.result[SINGLE][0]
    for answer, single in zip(answers, alone, strict=True):
        assert answer.tokens == single.tokens
        assert largest_difference(answer, single) < TOLERANCE


@pytest.mark.parametrize("value", PAIRS)
def test_each_child_serves_the_steps_that_are_its_own(value: str, outcome: Outcome) -> None:
    prefill, decode = PAIRS[value]
    steps = [Step(prefill, lens) for lens in PREFILLS]
    steps += [Step(decode, [1, 1, 1])] * 4 + [Step(decode, [1])] * 3
    notes = outcome.result[value][1]
    assert len(notes.steps) == 3
    for layer in notes.steps.values():
        assert layer == steps


@pytest.mark.parametrize("value", [value for value in PAIRS if "TORCH" in value])
def test_the_bytes_of_both_children_were_compared_and_equal(value: str, outcome: Outcome) -> None:
    notes = outcome.result[value][1]
    [(written, difference)] = notes.compared
    assert written > 0
    assert difference is None
    assert notes.attended == 0


def test_one_backend_for_both_phases_is_that_backend(outcome: Outcome) -> None:
    value = "prefill=CPU_ATTN,decode=CPU_ATTN"
    assert outcome.result[value][1].compared == []
    assert f"VLLM_ATTENTION_BACKEND={value}: using attention backend CPU_ATTN." in outcome.log
