# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler does to a request besides running it once, front to back: each path
through the real engine, shown to have been taken, and against Hugging Face transformers."""

from pathlib import Path

import pytest
from vllm.plugins.composite_attention.engine import engine_version

from tests.e2e.engine import IN_PROCESS, EngineRun, references, run_engine
from tests.tiny_models import (
    GEMMA3,
    GEMMA4,
    Answer,
    largest_difference,
    picture,
    sentence,
)
from tests.tiny_models.check import TOLERANCE

BLOCK = 32
WINDOW = 24
IMAGE = GEMMA3.image_tokens

# An image at 24..39 or so: the first block of 32 tokens ends inside it.
STRADDLING = [GEMMA3.prompt(sentence(1, 20), picture(1), sentence(2, words)) for words in (3, 5, 9)]
OTHER_PICTURE = GEMMA3.prompt(sentence(1, 20), picture(2), sentence(2, 3))
CROWD = [
    GEMMA3.prompt(sentence(seed, 12), picture(seed), sentence(seed + 1, 16), picture(seed + 2))
    for seed in range(10, 18)
]
MANY_TOKENS = 48
SAMPLED = [GEMMA3.text_image_text(seed=7), GEMMA3.several_images(3, seed=8)]
COMPLETIONS = 3


def assert_agree(answer: Answer, reference: Answer) -> None:
    assert answer.tokens == reference.tokens
    assert largest_difference(answer, reference) < TOLERANCE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GEMMA3.build(tmp_path_factory.mktemp("gemma3"), sliding_window=WINDOW)


@pytest.fixture(scope="module")
def crowded(model: Path) -> EngineRun:
    """Steps of 40 tokens, and a KV cache in which the crowd's prompts fit and their answers do
    not."""
    return run_engine(
        GEMMA3,
        model,
        [*([prompt] for prompt in STRADDLING), [OTHER_PICTURE], CROWD, SAMPLED],
        sampling=[
            *[{}] * 4,
            {"max_tokens": MANY_TOKENS},
            {"n": COMPLETIONS, "temperature": 1.0},
        ],
        environment=IN_PROCESS,
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=256,
        max_num_batched_tokens=40,
        max_num_seqs=8,
        num_gpu_blocks_override=28,
        disable_log_stats=False,
    )


def images_of(answer: Answer) -> list[int]:
    """Positions of the prompt's image tokens."""
    token = max(set(answer.prompt_token_ids), key=answer.prompt_token_ids.count)
    return [at for at, other in enumerate(answer.prompt_token_ids) if other == token]


def test_layers_with_and_without_window_are_two_cache_groups(crowded: EngineRun) -> None:
    assert len(crowded.cache_groups) == 2
    assert all(len(layers) == 2 for layers in crowded.cache_groups)


@pytest.mark.parametrize("repetition", [0, 1, 2])
def test_prefix_cache_hits_that_end_inside_an_image_agree(
    crowded: EngineRun, model: Path, repetition: int
) -> None:
    [answer] = crowded.answers[repetition]
    positions = images_of(answer)
    assert len(positions) == IMAGE
    assert positions[0] < BLOCK <= positions[-1]
    assert crowded.cached[repetition] == [BLOCK if repetition else 0]
    [reference] = references(GEMMA3, model, [STRADDLING[repetition]])
    assert_agree(answer, reference)


def test_another_picture_after_the_same_words_is_no_hit(crowded: EngineRun, model: Path) -> None:
    assert crowded.cached[3] == [0]
    [reference] = references(GEMMA3, model, [OTHER_PICTURE])
    assert_agree(crowded.answers[3][0], reference)


def test_preempted_and_recomputed_requests_agree(crowded: EngineRun, model: Path) -> None:
    before, after = (crowded.counters[batch]["vllm:num_preemptions"] for batch in (3, 4))
    assert before == 0
    assert after >= 2
    judged = references(GEMMA3, model, CROWD, MANY_TOKENS)
    for answer, reference in zip(crowded.answers[4], judged, strict=True):
        assert_agree(answer, reference)


def test_several_completions_of_one_prompt_agree(crowded: EngineRun, model: Path) -> None:
    answers = crowded.answers[5]
    assert len({tuple(answer.tokens) for answer in answers}) > len(SAMPLED)
    prompts = [prompt for prompt in SAMPLED for _ in range(COMPLETIONS)]
    judged = references(GEMMA3, model, prompts, given=[answer.tokens for answer in answers])
    for answer, reference in zip(answers, judged, strict=True):
        assert_agree(answer, reference)


REPETITIVE = [
    GEMMA3.prompt(sentence(3, 6), picture(3), sentence(3, 6), sentence(3, 6)),
    GEMMA3.prompt(picture(4), sentence(4, 4), picture(4), sentence(4, 4)),
    GEMMA3.text_only(20, seed=5),
]


@pytest.mark.skipif(
    str(engine_version()).startswith("0.30."),
    reason="vLLM 0.30 cannot speculate on CPU: it looks for Triton's parameters on plain functions",
)
def test_ngram_speculation_agrees(model: Path) -> None:
    run = run_engine(
        GEMMA3,
        model,
        [REPETITIVE],
        new_tokens=MANY_TOKENS,
        environment=IN_PROCESS,
        enforce_eager=True,
        max_num_batched_tokens=64,
        disable_log_stats=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    )
    drafted, accepted = (
        run.counters[0][f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")
    )
    assert drafted > accepted > 0
    judged = references(GEMMA3, model, REPETITIVE, MANY_TOKENS)
    for answer, reference in zip(run.answers[0], judged, strict=True):
        assert_agree(answer, reference)


def test_layers_that_share_anothers_cache_agree(tmp_path: Path) -> None:
    model = GEMMA4.build(tmp_path, num_hidden_layers=6, num_kv_shared_layers=2)
    prompts = [GEMMA4.text_image_text(), GEMMA4.several_images(2, seed=1), GEMMA4.text_only()]
    run = run_engine(GEMMA4, model, [prompts], environment=IN_PROCESS, enforce_eager=True)
    assert sum(map(len, run.cache_groups)) == 4  # of six layers
    for answer, reference in zip(run.answers[0], references(GEMMA4, model, prompts), strict=True):
        assert_agree(answer, reference)


def test_an_fp8_cache_adds_its_rounding_and_nothing_else(model: Path) -> None:
    """Rounding is judged by a prompt of text; the wrong mask would add more than twice as much."""
    prompts = [GEMMA3.text_only(), *SAMPLED]
    run = run_engine(
        GEMMA3,
        model,
        [prompts],
        environment=IN_PROCESS,
        enforce_eager=True,
        kv_cache_dtype="fp8",
    )
    given = [answer.tokens for answer in run.answers[0]]
    right, causal = (
        [
            float((answer.logprobs - reference.logprobs).square().mean().sqrt())
            for answer, reference in zip(
                run.answers[0],
                references(GEMMA3, model, prompts, given=given, causal=forced),
                strict=True,
            )
        ]
        for forced in (False, True)
    )
    of_text, *of_images = right
    assert 0.01 < of_text < 0.25
    assert max(of_images) < 1.5 * of_text
    assert all(2 * ours < other for ours, other in zip(of_images, causal[1:], strict=True))


MIXED = [*SAMPLED, GEMMA3.text_only(), GEMMA3.long_text(120, seed=6)]


def test_two_tensor_parallel_workers_agree(model: Path) -> None:
    run = run_engine(
        GEMMA3,
        model,
        [MIXED],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        enforce_eager=True,
        tensor_parallel_size=2,
    )
    assert "world_size=2" in run.log
    for answer, reference in zip(run.answers[0], references(GEMMA3, model, MIXED), strict=True):
        assert_agree(answer, reference)


def test_both_data_parallel_engines_agree(model: Path) -> None:
    run = run_engine(
        GEMMA3,
        model,
        [MIXED],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        enforce_eager=True,
        data_parallel_size=2,
    )
    assert "EngineCore_DP1" in run.log
    judged = references(GEMMA3, model, MIXED)
    for answer, reference in zip(run.answers[0], judged * 2, strict=True):
        assert_agree(answer, reference)
