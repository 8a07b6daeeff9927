"""Every PrefixLM family that transformers can build, through vLLM's engine, against transformers.

Where vLLM defines a family's mask otherwise than transformers does by default, the reference is
transformers given vLLM's mask: PaliGemma masks only the picture both ways, not the whole prompt;
Gemma 4 Unified opens only sliding layers, within the window; Gemma 3 and PaliGemma 2 leave a
picture that is longer than the window causal.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.engine import IN_PROCESS, references, run_engine
from tests.tiny_models import (
    GEMMA3,
    GEMMA4,
    GEMMA4_UNIFIED,
    PALIGEMMA,
    PALIGEMMA2,
    Answer,
    Family,
    largest_difference,
)
from tests.tiny_models.check import TOLERANCE, cases


@dataclass
class Case:
    """A family, how its model is built, and how the engine is told to serve it."""

    family: Family
    build: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


CASES = {
    "gemma4": Case(GEMMA4),
    "gemma4, pictures longer than the window": Case(GEMMA4, {"sliding_window": 24}),
    "gemma4, one cache group for both kinds of layer": Case(
        GEMMA4,
        {"sliding_window": 24, "global_head_dim": 32},
        {"disable_hybrid_kv_cache_manager": True},
    ),
    "gemma4 unified": Case(GEMMA4_UNIFIED),
    "paligemma": Case(PALIGEMMA),
    "paligemma2": Case(PALIGEMMA2),
    "gemma3, pictures longer than the window": Case(GEMMA3, {"sliding_window": 8}),
    "gemma3, one cache group for both kinds of layer": Case(
        GEMMA3, {}, {"disable_hybrid_kv_cache_manager": True}
    ),
}

Answers = dict[str, tuple[Answer, Answer]]
"""For each prompt the engine's answer and transformers'."""


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    case: Case = request.param
    model = case.family.build(tmp_path_factory.mktemp(case.family.name), **case.build)
    prompts = cases(case.family)
    asked = list(prompts.values())
    run = run_engine(
        case.family, model, [asked], environment=IN_PROCESS, enforce_eager=True, **case.engine
    )
    judged = references(case.family, model, asked)
    return dict(zip(prompts, zip(run.answers[0], judged, strict=True), strict=True))


def test_each_prompt_agrees_with_transformers(answers: Answers) -> None:
    differences = {name: largest_difference(*pair) for name, pair in answers.items()}
    assert max(differences.values()) < TOLERANCE, differences


def test_each_greedy_answer_is_transformers(answers: Answers) -> None:
    for ours, theirs in answers.values():
        assert ours.tokens == theirs.tokens
