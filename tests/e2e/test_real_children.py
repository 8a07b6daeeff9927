# SPDX-License-Identifier: Apache-2.0
"""TRITON_ATTN and a torch backend over one KV cache, as the two children of a composite, in vLLM's
engine and Triton's interpreter, against transformers, in float32.

Each pair is asked for by `VLLM_ATTENTION_BACKEND`, as a user does. Spies note the child whose
kernel ran for each layer and step, and what the storage proof compared.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.v1.attention.backends.composite import (
    MMPrefixAttentionRouting,
    PrefillDecodeAttentionRouting,
    create_composite_attention_backend,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from tests.e2e import torch_child
from tests.e2e.child_spy import Notes, Step, spy
from tests.e2e.engine import references
from tests.e2e.job import Outcome, engine_for_each
from tests.e2e.torch_child import TorchBackend, TorchImpl
from tests.e2e.triton_interpreter import run_interpreted
from tests.tiny_models import GEMMA3, Answer, engine, largest_difference
from tests.tiny_models.check import CLEAR, TOLERANCE

NEW_TOKENS = 21
"""One from the prefill, then 20 from decodes."""
STEP_TOKENS = 64
WINDOW = 32
PROMPTS = {
    "text": GEMMA3.text_only(),
    "one image": GEMMA3.text_image_text(),
    "two images": GEMMA3.several_images(2, seed=1),
}
BATCHES = [{"text": 4, "one image": NEW_TOKENS, "two images": NEW_TOKENS}, {"text": 2}]
"""Prompts that are answered together, and the tokens to generate. The three of the first batch have
more tokens than a step, so that two images are prefilled beside decodes."""


class DecodingTritonImpl(TritonAttentionImpl):
    """TRITON_ATTN as a third child that can be told from the first."""


class DecodingTritonBackend(TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[DecodingTritonImpl]:
        return DecodingTritonImpl


ByPhase = create_composite_attention_backend(
    TorchBackend,
    DecodingTritonBackend,
    name="ByPhase",
    backend_name="torch or Triton by phase",
    module=__name__,
    routing_policy=PrefillDecodeAttentionRouting,
)
ThreeWays = create_composite_attention_backend(
    TritonAttentionBackend,
    ByPhase,
    name="ThreeWays",
    backend_name="CUSTOM",
    module=__name__,
    routing_policy=MMPrefixAttentionRouting,
)
"""TRITON_ATTN for images; for the rest torch where there is a prefill, else TRITON_ATTN."""


class Run(NamedTuple):
    """What came out of one engine."""

    answers: list[dict[str, Answer]]
    notes: Notes


def serve(model: Path, values: list[str]) -> dict[str, Run | str]:
    """Answer `BATCHES` with one engine for each value of `VLLM_ATTENTION_BACKEND`."""
    from vllm import SamplingParams

    torch_child.register()
    register_backend(AttentionBackendEnum.CUSTOM)(ThreeWays)
    notes = spy(TritonAttentionImpl, TorchImpl)

    def answers(llm: Any) -> Run:
        answered = []
        for batch in BATCHES:
            requests = engine.requests([PROMPTS[name] for name in batch])
            sampling = [SamplingParams(**engine.sampling(tokens)) for tokens in batch.values()]
            outputs = llm.generate(requests, sampling, use_tqdm=False)
            answered.append(dict(zip(batch, map(engine.answer, outputs), strict=True)))
        return Run(answered, notes.take())

    options: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": STEP_TOKENS}
    return engine_for_each(values, GEMMA3.llm_arguments(model, **options), answers)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, a sliding and a full one, because the interpreter is slow."""
    folder = tmp_path_factory.mktemp("gemma3")
    return GEMMA3.build(folder, num_hidden_layers=2, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def judge(model: Path) -> dict[str, Answer]:
    answers = references(GEMMA3, model, list(PROMPTS.values()), NEW_TOKENS)
    return dict(zip(PROMPTS, answers, strict=True))


TRITON, TORCH = "TritonAttentionImpl", "TorchImpl"
PAIRS = {
    "TRITON_ATTN+TORCH_ATTN": (TRITON, TORCH, TORCH),
    "TORCH_ATTN+TRITON_ATTN": (TORCH, TRITON, TRITON),
    "prefill=TRITON_ATTN,decode=TORCH_ATTN": (TRITON, TRITON, TORCH),
    "prefill=TORCH_ATTN,decode=TRITON_ATTN": (TORCH, TORCH, TRITON),
    "CUSTOM": (TRITON, TORCH, "DecodingTritonImpl"),
}
"""The child that must serve prefills with live images, other prefills, and decodes."""
LYING = "TRITON_ATTN+CPU_ATTN"
"""They agree on every declared layout and store at different places."""


@pytest.fixture(scope="module")
def outcome(model: Path) -> Outcome:
    return run_interpreted(serve, model, [*PAIRS, LYING])


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def served(pair: str, outcome: Outcome) -> Run:
    run = outcome.result[pair]
    assert not isinstance(run, str), run
    return run


@pytest.mark.parametrize("number", range(len(BATCHES)))
def test_prefill_and_twenty_decodes_agree_with_transformers(
    number: int, served: Run, judge: dict[str, Answer]
) -> None:
    for name, tokens in BATCHES[number].items():
        answer, (prompt, wanted, logprobs) = served.answers[number][name], judge[name]
        reference = Answer(prompt, wanted[:tokens], logprobs[:tokens])
        assert answer.tokens == reference.tokens
        assert largest_difference(answer, reference) < TOLERANCE


def test_each_child_serves_the_steps_that_are_its_own(pair: str, served: Run) -> None:
    image_prefill, text_prefill, decode = PAIRS[pair]
    expected = [
        # What stands before the two images, the text, all of the one image; then the two images.
        Step(image_prefill, [8, 13, 37]),
        Step(image_prefill, [1, 1, 47]),
        *[Step(decode, [1, 1, 1])] * 2,  # until the text has its four tokens
        *[Step(decode, [1, 1])] * 17,
        Step(decode, [1]),  # the two images began a step later
        Step(text_prefill, [13]),
        Step(decode, [1]),
    ]
    assert len(served.notes.steps) == 2
    for steps in served.notes.steps.values():
        assert steps == expected


def test_the_bytes_of_both_children_were_compared_and_equal(pair: str, served: Run) -> None:
    """Once for each composite of the nest, and never by attending over a cache."""
    composites = 2 if pair == "CUSTOM" else 1
    assert len(served.notes.compared) == composites
    for written, difference in served.notes.compared:
        assert written > 0
        assert difference is None
    assert served.notes.attended == 0


def test_the_log_names_the_pair_and_the_runner(pair: str, outcome: Outcome) -> None:
    assert f"VLLM_ATTENTION_BACKEND={pair}: using attention backend" in outcome.log
    assert "Using V2 Model Runner" in outcome.log


def test_the_causal_mask_would_not_agree(model: Path, judge: dict[str, Answer]) -> None:
    names = ["one image", "two images"]
    prompts = [PROMPTS[name] for name in names]
    for name, causal in zip(
        names, references(GEMMA3, model, prompts, NEW_TOKENS, causal=True), strict=True
    ):
        assert largest_difference(causal, judge[name]) > CLEAR


def test_a_pair_that_lies_is_refused_by_name(outcome: Outcome) -> None:
    assert outcome.result[LYING].startswith(
        "TRITON_ATTN and CPU_ATTN cannot share a KV cache: they store keys and values differently"
    )
