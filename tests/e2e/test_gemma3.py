"""Gemma 3 through vLLM's engine against Hugging Face transformers, in float32."""

from pathlib import Path

import pytest

from tests.e2e.engine import IN_PROCESS, WITHOUT_PLUGIN, EngineRun, references, run_engine
from tests.tiny_models import GEMMA3, Answer, Prompt, largest_difference
from tests.tiny_models.check import TOLERANCE

WINDOW = 24
PROMPTS = {
    "text only": GEMMA3.text_only(),
    "one image": GEMMA3.text_image_text(),
    "two images": GEMMA3.several_images(2, seed=1),
    "five images": GEMMA3.several_images(5, seed=2),
    "image first": GEMMA3.image_first(seed=3),
    "image last": GEMMA3.image_last(seed=4),
    "long": GEMMA3.long_text(300, seed=5),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GEMMA3.build(tmp_path_factory.mktemp("gemma3"), sliding_window=WINDOW)


@pytest.fixture(scope="module")
def judge(model: Path) -> dict[str, Answer]:
    prompts = list(PROMPTS.values())
    return dict(zip(PROMPTS, references(GEMMA3, model, prompts), strict=True))


def batches_of(*batches: list[str]) -> list[list[Prompt]]:
    return [[PROMPTS[name] for name in batch] for batch in batches]


@pytest.fixture(scope="module")
def eager(model: Path) -> EngineRun:
    everything = list(PROMPTS)
    return run_engine(
        GEMMA3,
        model,
        batches_of(everything, ["one image"], ["one image", "text only"]),
        environment=IN_PROCESS,
        enforce_eager=True,
    )


@pytest.fixture(scope="module")
def chunked(model: Path) -> EngineRun:
    """Steps of at most 40 tokens: the prompts of 40 to 320 tokens need several."""
    return run_engine(
        GEMMA3,
        model,
        batches_of(["long"], ["five images"], list(PROMPTS)),
        environment=IN_PROCESS,
        enforce_eager=True,
        max_num_batched_tokens=40,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )


@pytest.fixture(scope="module")
def compiled(model: Path) -> EngineRun:
    """As a user gets it: compiled, the engine core in a process of its own."""
    return run_engine(GEMMA3, model, batches_of(list(PROMPTS)))


@pytest.fixture(scope="module")
def stock(model: Path) -> EngineRun:
    return run_engine(
        GEMMA3,
        model,
        batches_of(["text only", "one image"]),
        environment=IN_PROCESS | WITHOUT_PLUGIN,
        enforce_eager=True,
    )


@pytest.fixture(scope="module")
def narrow(model: Path) -> EngineRun:
    """Settings that stock vLLM takes: blocks of 16 tokens, and long prompts held to 8 a step."""
    return run_engine(
        GEMMA3,
        model,
        batches_of(list(PROMPTS)),
        environment=IN_PROCESS,
        enforce_eager=True,
        block_size=16,
        long_prefill_token_threshold=8,
    )


def assert_agree(answer: Answer, reference: Answer) -> None:
    assert answer.tokens == reference.tokens
    assert largest_difference(answer, reference) < TOLERANCE


@pytest.mark.parametrize("name", PROMPTS)
def test_eager_agrees_with_transformers(
    eager: EngineRun, judge: dict[str, Answer], name: str
) -> None:
    assert_agree(eager.answers[0][list(PROMPTS).index(name)], judge[name])


def test_a_repeated_prompt_from_the_prefix_cache_agrees(
    eager: EngineRun, judge: dict[str, Answer]
) -> None:
    assert_agree(eager.answers[1][0], judge["one image"])


@pytest.mark.parametrize("position", [0, 1])
def test_an_image_and_a_text_request_in_one_batch_agree(
    eager: EngineRun, judge: dict[str, Answer], position: int
) -> None:
    assert_agree(eager.answers[2][position], judge[["one image", "text only"][position]])


@pytest.mark.parametrize("batch", [0, 1])
def test_a_prompt_longer_than_a_scheduler_step_agrees(
    chunked: EngineRun, judge: dict[str, Answer], batch: int
) -> None:
    assert_agree(chunked.answers[batch][0], judge[["long", "five images"][batch]])


@pytest.mark.parametrize("name", PROMPTS)
def test_requests_that_share_short_steps_agree(
    chunked: EngineRun, judge: dict[str, Answer], name: str
) -> None:
    assert_agree(chunked.answers[2][list(PROMPTS).index(name)], judge[name])


@pytest.mark.parametrize("name", PROMPTS)
def test_small_blocks_and_a_limit_below_the_image_agree(
    narrow: EngineRun, judge: dict[str, Answer], name: str
) -> None:
    assert_agree(narrow.answers[0][list(PROMPTS).index(name)], judge[name])


@pytest.mark.parametrize("name", PROMPTS)
def test_compiled_in_its_own_process_agrees(
    compiled: EngineRun, judge: dict[str, Answer], name: str
) -> None:
    assert_agree(compiled.answers[0][list(PROMPTS).index(name)], judge[name])


def test_the_log_says_what_was_chosen_and_why(compiled: EngineRun) -> None:
    lines = [line for line in compiled.log.splitlines() if "Using CPU_PREFIX_ATTN" in line]
    assert len(lines) == 1
    assert "image tokens of this model attend both ways" in lines[0]


def test_an_image_that_fits_no_step_is_refused_at_the_start(model: Path) -> None:
    with pytest.raises(RuntimeError, match="An image of this model takes up to 16 tokens"):
        run_engine(
            GEMMA3,
            model,
            [],
            environment=IN_PROCESS,
            enforce_eager=True,
            max_num_batched_tokens=64,
            max_num_scheduled_tokens=12,
        )


@pytest.mark.parametrize("value", ["CPU_PREFIX_ATTN", "prefill=CPU_PREFIX_ATTN,decode=CPU_ATTN"])
def test_a_backend_from_the_environment_serves(
    value: str, model: Path, judge: dict[str, Answer]
) -> None:
    run = run_engine(
        GEMMA3,
        model,
        batches_of(["one image", "text only"]),
        environment={"VLLM_ATTENTION_BACKEND": value},
        enforce_eager=True,
    )
    for answer, name in zip(run.answers[0], ["one image", "text only"], strict=True):
        assert_agree(answer, judge[name])


def test_an_unknown_backend_in_the_environment_stops_the_start(model: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"no attention backend 'CPU_ATN'\. Did you mean CPU_ATTN"
    ):
        run_engine(GEMMA3, model, [], environment={"VLLM_ATTENTION_BACKEND": "CPU_ATN"})


def test_stock_vllm_is_wrong_with_an_image(
    stock: EngineRun, judge: dict[str, Answer], model: Path
) -> None:
    [causal] = references(GEMMA3, model, [PROMPTS["one image"]], causal=True)
    assert largest_difference(stock.answers[0][1], judge["one image"]) > 0.1
    assert largest_difference(stock.answers[0][1], causal) < TOLERANCE


def test_stock_vllm_is_right_without_one(stock: EngineRun, judge: dict[str, Answer]) -> None:
    assert_agree(stock.answers[0][0], judge["text only"])


def test_cpu_attn_by_name_is_the_users_and_warned_of(model: Path) -> None:
    run = run_engine(
        GEMMA3,
        model,
        batches_of(["one image"]),
        environment=IN_PROCESS,
        enforce_eager=True,
        attention_config={"backend": "CPU_ATTN"},
    )
    [causal] = references(GEMMA3, model, [PROMPTS["one image"]], causal=True)
    assert largest_difference(run.answers[0][0], causal) < TOLERANCE
    assert "CPU_ATTN was asked for by name" in run.log
