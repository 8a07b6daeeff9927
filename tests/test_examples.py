# SPDX-License-Identifier: Apache-2.0
"""The composite of docs/composing.md, installed as a plugin and served by vLLM's engine, against
transformers, in float32."""

import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport

from tests.e2e import text_model
from tests.e2e.engine import IN_PROCESS
from tests.e2e.job import ROOT, VARIABLE, Outcome, engine_for_each, run_job
from tests.tiny_models import Answer, engine, largest_difference
from tests.tiny_models.check import TOLERANCE
from tests.tiny_models.common import VOCABULARY

EXAMPLES = ROOT / "examples"
NEW_TOKENS = 4
SHORT, LONG = (
    torch.randint(20, VOCABULARY, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    for length in (31, 32)
)
"""Prompts on either side of the example's limit."""


class Served(NamedTuple):
    """Answers to `SHORT` and `LONG`; what was selected, with the longest query; and how often each
    child ran."""

    answers: list[Answer]
    selected: list[tuple[int, int]]
    ran: Counter[str]


def serve(model: Path) -> dict[str, Served | str]:
    """Answer the two prompts, one after the other, with the example's composite."""
    from vllm import SamplingParams
    from vllm.plugins import load_general_plugins

    from tests.e2e.child_spy import watch

    load_general_plugins()
    import my_composite  # type: ignore[import-not-found]

    selected: list[tuple[int, int]] = []
    ran: Counter[str] = Counter()

    def note_selected(call: dict[str, Any], variant: int) -> None:
        selected.append((call["metadata"].max_query_len, variant))

    def note_run(call: dict[str, Any], _: Any) -> None:
        if call["attn_metadata"] is not None:
            ran[type(call["self"]).__name__] += 1

    watch(my_composite.LongPromptRouting, "select", note_selected)
    for child in my_composite.MyComposite.child_classes():
        watch(child.get_impl_cls(), "forward", note_run)

    def answers(llm: Any) -> Served:
        sampling = SamplingParams(**engine.sampling(NEW_TOKENS))
        answered = []
        for prompt in (SHORT, LONG):
            [output] = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
            answered.append(engine.answer(output))
        return Served(answered, selected, ran)

    arguments = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_logprobs": -1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    return engine_for_each(["CUSTOM"], arguments, answers)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model.build(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def outcome(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The example as a package that is installed: a module and its entry point on the path."""
    installed = tmp_path_factory.mktemp("installed")
    metadata = installed / "my_composite-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-composite\nVersion: 1\n")
    entry_point = "[vllm.general_plugins]\nmy_composite = my_composite:register\n"
    (metadata / "entry_points.txt").write_text(entry_point)
    path = os.pathsep.join([str(EXAMPLES), str(installed)])
    return run_job(serve, model, environment=IN_PROCESS | {"PYTHONPATH": path})


@pytest.fixture
def served(outcome: Outcome) -> Served:
    run = outcome.result["CUSTOM"]
    assert isinstance(run, Served), run
    return run


def test_my_composite_agrees_with_transformers(served: Served, model: Path) -> None:
    references = text_model.references(model, [SHORT, LONG], NEW_TOKENS)
    for answer, reference in zip(served.answers, references, strict=True):
        assert answer.tokens == reference.tokens
        assert largest_difference(answer, reference) < TOLERANCE


def test_only_the_long_prompt_goes_to_the_general_child(served: Served) -> None:
    decodes = [(1, 1)] * (NEW_TOKENS - 1)
    per_group = [(31, 1), *decodes, (32, 0), *decodes]
    # Sliding and full layers have KV cache groups, and so builders, of their own.
    groups = len(served.selected) // len(per_group)
    assert served.selected == [decision for decision in per_group for _ in range(groups)]


def test_both_children_really_ran(served: Served) -> None:
    """In each of the three layers the long prompt on the general child, all else on the causal
    one; both end in CPU_ATTN's impl."""
    assert served.ran == {
        "CPUPrefixAttentionBackendImpl": 3,
        "CPUAttentionBackendImpl": 3 * 2 * NEW_TOKENS,
    }


def test_its_name_is_visible_in_the_log(outcome: Outcome) -> None:
    assert f"{VARIABLE}=CUSTOM: using attention backend CUSTOM." in outcome.log


def test_an_image_mask_is_demanded_of_both_children() -> None:
    """Of which CPU_ATTN has none, as the page says."""
    from examples import my_composite

    assert not my_composite.MyComposite.supports_mm_prefix()
    level = my_composite.LongPromptRouting.get_cudagraph_support(VllmConfig(), None)  # type: ignore[arg-type]
    assert level is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_the_page_quotes_the_example() -> None:
    page = (ROOT / "docs" / "composing.md").read_text()
    assert f"```python\n{(EXAMPLES / 'my_composite.py').read_text()}```\n" in page
