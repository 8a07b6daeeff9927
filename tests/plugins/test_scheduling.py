"""Where the scheduler ends a step, for a request with images at positions 10..29 and 40..59."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import PlaceholderRange
from vllm.plugins.composite_attention.scheduling import WholeImageScheduler
from vllm.v1.core.sched.scheduler import Scheduler

IMAGES = [(10, 29), (40, 59)]


def feature(start: int, stop: int, modality: str = "image") -> Any:
    position = PlaceholderRange(offset=start, length=stop + 1 - start)
    return SimpleNamespace(modality=modality, mm_position=position)


def scheduled(
    computed: int,
    new: int,
    monkeypatch: pytest.MonkeyPatch,
    modality: str = "image",
    largest_step: int = 50,
) -> int:
    """How many of `new` tokens after `computed` ones are left for this step."""
    request = SimpleNamespace(
        has_encoder_inputs=True,
        num_prompt_tokens=80,
        mm_features=[feature(*image, modality) for image in IMAGES],
    )
    monkeypatch.setattr(
        Scheduler, "_try_schedule_encoder_inputs", lambda self, r, computed, new, *rest, **kw: new
    )
    scheduler: Any = WholeImageScheduler.__new__(WholeImageScheduler)
    scheduler.largest_step = largest_step
    return scheduler._try_schedule_encoder_inputs(request, computed, new, 100)


@pytest.mark.parametrize(
    ("computed", "new", "left"),
    [
        (0, 10, 10),  # ends where the first image starts
        (0, 11, 10),  # would take one token of it
        (0, 29, 10),  # would leave one token of it
        (0, 30, 30),  # takes it whole
        (10, 5, 0),  # starts with it and cannot finish
        (10, 20, 20),
        (20, 5, 0),  # inside it after a prefix cache hit, and cannot finish
        (20, 10, 10),
        (0, 45, 40),
        (30, 50, 50),
        (80, 1, 1),  # decode
    ],
)
def test_a_step_never_ends_inside_an_image(
    computed: int, new: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scheduled(computed, new, monkeypatch) == left


def test_audio_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scheduled(0, 15, monkeypatch, modality="audio") == 15


def test_an_image_that_fits_no_step_is_cut_rather_than_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert scheduled(10, 12, monkeypatch, largest_step=12) == 12
