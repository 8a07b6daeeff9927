# SPDX-License-Identifier: Apache-2.0
"""What a user sees when something breaks: the plugin, a composite, a child or a process."""

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import IN_PROCESS, EngineRun, references, run_engine
from tests.tiny_models import GEMMA3, Answer, largest_difference
from tests.tiny_models.check import TOLERANCE

PROMPTS = [GEMMA3.text_image_text(seed=1), GEMMA3.text_only()]
PROJECT = "vllm-composite-attention"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GEMMA3.build(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def causal(model: Path) -> list[Answer]:
    """What stock vLLM answers on CPU."""
    return references(GEMMA3, model, PROMPTS, causal=True)


def run(model: Path, **how: Any) -> EngineRun:
    how["environment"] = IN_PROCESS | how.get("environment", {})
    return run_engine(GEMMA3, model, [PROMPTS], enforce_eager=True, **how)


def assert_stock(run: EngineRun, causal: list[Answer]) -> None:
    for answer, reference in zip(run.answers[0], causal, strict=True):
        assert largest_difference(answer, reference) < TOLERANCE


def lines_with(run: EngineRun, words: str) -> int:
    return sum(words in line for line in run.log.splitlines())


def without_selection() -> None:
    """The plugin's module cannot be imported."""
    sys.modules["vllm.plugins.composite_attention.selection"] = None  # type: ignore[assignment]


def without_the_composite() -> None:
    """The composite's module cannot be imported."""
    sys.modules["vllm.v1.attention.backends.cpu_prefix_attn"] = None  # type: ignore[assignment]


def test_a_plugin_that_fails_leaves_stock_vllm_with_one_warning(
    model: Path, causal: list[Answer]
) -> None:
    result = run(model, prepare=without_selection)
    assert_stock(result, causal)
    assert lines_with(result, f"{PROJECT} cannot be loaded (ModuleNotFoundError: ") == 1


@pytest.mark.parametrize(
    "how",
    [
        {"environment": {"VLLM_ATTENTION_BACKEND": "CPU_PREFIX_ATTN"}},
        {"attention_backend": "CPU_PREFIX_ATTN"},
    ],
    ids=["environment", "argument"],
)
def test_a_plugin_that_fails_stops_the_start_if_its_backend_was_asked_for(
    model: Path, how: dict[str, Any]
) -> None:
    with pytest.raises(RuntimeError) as error:
        run(model, prepare=without_selection, **how)
    assert "CPU_PREFIX_ATTN" in str(error.value).splitlines()[-1]


def test_a_composite_that_fails_to_import_leaves_stock_vllm_with_one_warning(
    model: Path, causal: list[Answer]
) -> None:
    result = run(model, prepare=without_the_composite)
    assert_stock(result, causal)
    assert lines_with(result, "CPU_PREFIX_ATTN cannot be loaded: ") == 1


@pytest.mark.parametrize(
    "how",
    [
        {"environment": {"VLLM_ATTENTION_BACKEND": "CPU_PREFIX_ATTN"}},
        {"attention_backend": "CPU_PREFIX_ATTN"},
    ],
    ids=["environment", "argument"],
)
def test_a_composite_that_fails_to_import_stops_the_start_if_it_was_asked_for(
    model: Path, how: dict[str, Any]
) -> None:
    with pytest.raises(RuntimeError, match="cpu_prefix_attn"):
        run(model, prepare=without_the_composite, **how)


def break_child(owner: str, hook: str) -> None:
    """Let the general child's `hook` raise for batches with an image."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.attention.backends.cpu_prefix_attn import CPUSegmentsBackend

    cls: Any = getattr(CPUSegmentsBackend, owner)()
    stock = getattr(cls, hook)

    def out_of_order(*args: Any, **kwargs: Any) -> Any:
        if any(hasattr(argument, "batches") for argument in args) or hook == "build":
            raise ArithmeticError("the kernel is out of order")
        return stock(*args, **kwargs)

    setattr(cls, hook, out_of_order)


def break_forward() -> None:
    break_child("get_impl_cls", "forward")


def break_build() -> None:
    break_child("get_builder_cls", "build")


@pytest.mark.parametrize(("prepare", "hook"), [(break_forward, "forward"), (break_build, "build")])
def test_a_childs_error_is_its_own_and_names_the_child(
    model: Path, prepare: Any, hook: str
) -> None:
    with pytest.raises(RuntimeError) as error:
        run(model, prepare=prepare)
    assert re.search(
        ".*ArithmeticError: the kernel is out of order\n"
        f".*Raised by {hook} of CPU_ATTN with segments, the general child of CPU_PREFIX_ATTN\\.$",
        str(error.value),
        re.MULTILINE,
    )


def kill_the_worker() -> None:
    """Kill the worker half a second after the first request."""
    import psutil
    from vllm import LLM

    stock = LLM.generate

    def kill() -> None:
        below = psutil.Process().children(recursive=True)
        [worker] = [one for one in below if "VLLM::Worker" in " ".join(one.cmdline())]
        worker.kill()

    def generate(*args: Any, **kwargs: Any) -> Any:
        threading.Timer(0.5, kill).start()
        return stock(*args, **kwargs)

    LLM.generate = generate  # type: ignore[method-assign]


@pytest.mark.timeout(300)
def test_a_killed_worker_ends_requests_with_the_engines_error(model: Path) -> None:
    with pytest.raises(RuntimeError) as error:
        run_engine(
            GEMMA3,
            model,
            [PROMPTS],
            new_tokens=1900,
            sampling=[{"logprobs": None}],
            prepare=kill_the_worker,
            enforce_eager=True,
            distributed_executor_backend="mp",
        )
    assert "EngineDeadError: EngineCore encountered an issue" in str(error.value)
