# SPDX-License-Identifier: Apache-2.0
"""The composites that vLLM ships go through this project's factory, and answer every hook as
vLLM's own factory lets them, except where that gives a default and ours the children's answer."""

import pytest
from vllm.v1.attention.backends.composite import CompositeAttentionBackend
from vllm.v1.attention.backends.triton_flash_attn import TritonFlashAttentionBackend

from tests.v1.attention.engine_composites import SHIPPED, Answers, ask

DIFFERENCES = {
    "backend.supported_kv_cache_dtypes": "both children list more than the base class does",
    "backend.supported_kv_cache_layouts": "no preference, as of both children; not all of them",
    "backend.supports_attn_type": "TRITON_ATTN and FLASH_ATTN both take encoder layers",
    "backend.supports_non_causal": "both children do",
    "impl.do_qk_norm_mrope_kvcache_update": "the general child writes; not an error",
    "impl.prepare_for_batch": "the batch's child is prepared; not nobody",
    "impl.set_interleaved_v_cache": "both children are told; not nobody",
    "impl.fused_qk_norm_mrope_kvcache_supported": "the general child is asked",
    "builder.build_for_drafting": "the child's own hook builds; not the one for other batches",
    "builder.update_block_table": "the metadata's child does it; not an error",
    "builder.update_draft_decode_metadata": "the metadata's child does it; not an error",
}
"""Hooks that answer otherwise, and why ours is right."""

ASKED_THEMSELVES = {"backend.get_impl_cls", "backend.get_builder_cls"}


@pytest.fixture(scope="module", name="said")
def _said() -> Answers:
    return ask()


def differing(said: Answers, module: str) -> set[str]:
    return {hook for hook, (ours, vllms) in said[module].items() if ours != vllms}


def test_vllms_module_calls_this_projects_factory() -> None:
    assert issubclass(TritonFlashAttentionBackend, CompositeAttentionBackend)


@pytest.mark.parametrize("module", SHIPPED)
def test_every_hook_answers_as_vllms_own_factory_lets_it_but_those_listed(
    module: str, said: Answers
) -> None:
    assert sorted(differing(said, module) - DIFFERENCES.keys() - ASKED_THEMSELVES) == []


@pytest.mark.parametrize("hook", DIFFERENCES)
def test_each_difference_listed_is_one(hook: str, said: Answers) -> None:
    if not any(hook in answers for answers in said.values()):
        pytest.skip("this vLLM has no such hook")
    assert any(hook in differing(said, module) for module in SHIPPED)


@pytest.mark.parametrize("module", SHIPPED)
def test_some_configuration_is_accepted_and_some_refused(module: str, said: Answers) -> None:
    ours, _ = said[module]["backend.validate_configuration"]
    assert set(ours) == {"accepted", "refused"}
