# SPDX-License-Identifier: Apache-2.0
"""The composites that vLLM itself ships, made by this project's factory and by vLLM's own.

`ask()` gives what either one's classes answer to every hook of the installed engine's interfaces.
It asks in a process of its own, in which FlashInfer, which cannot be installed without a GPU, is
an empty stand-in and the children's impls and builders only note what is called: nothing is
computed.
"""

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

BACKENDS = "vllm.v1.attention.backends"
SHIPPED = {
    "triton_flash_attn": "TritonFlashAttentionBackend",
    "triton_flashinfer": "TritonFlashInferBackend",
}
"""Module and class of each composite that vLLM ships."""

FLASHINFER = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
Answers = dict[str, dict[str, list[list[str]]]]


def ask() -> Answers:
    """By module and hook (`interface.name`), the answers to the same questions of this project's
    class and of vLLM's own, as text."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.v1.attention.engine_composites"],
        env=os.environ | {"VLLM_HAS_FLASHINFER_CUBIN": "1"},  # else vLLM looks on the network
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def both_factories() -> Iterator[tuple[str, list[Any]]]:
    """For each module of `SHIPPED`, its class of this project's factory and of vLLM's own."""
    for name in FLASHINFER:
        sys.modules[name] = MagicMock(__spec__=importlib.util.spec_from_loader(name, None))
    fa_utils = importlib.import_module(f"{BACKENDS}.fa_utils")
    fa_utils.get_flash_attn_version = lambda *_, **__: 4  # type: ignore[attr-defined]
    ours = importlib.import_module(f"{BACKENDS}.composite")
    engines = module_from_file(ours.__name__, f"{ours.__path__[0]}.py")
    for module, title in SHIPPED.items():
        shipped = importlib.import_module(f"{BACKENDS}.{module}")
        sys.modules[ours.__name__] = engines
        again = module_from_file(shipped.__name__, str(shipped.__file__))
        sys.modules[ours.__name__] = ours
        yield module, [getattr(made, title) for made in (shipped, again)]


def module_from_file(name: str, path: str) -> ModuleType:
    """What is in this file, as a module that no import finds."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Noting:
    """Replaces what the children's classes do by a note of the call."""

    def __init__(self, composite: Any) -> None:
        self.calls: list[str] = []
        for child in (composite.general_backend_cls, composite.causal_backend_cls):
            impl, builder = child.get_impl_cls(), child.get_builder_cls()
            name = child.get_name()
            impl.__init__ = lambda self, *args, **kwargs: self.__dict__.update(kwargs)
            builder.__init__ = lambda self, *args: None
            for cls, hooks in ((impl, ACTIONS["impl"]), (builder, ACTIONS["builder"])):
                for hook in hooks:
                    if hasattr(cls, hook):
                        setattr(cls, hook, self.noting(f"{name}.{hook}"))

    def noting(self, what: str) -> Any:
        def call(_: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(what)
            return SimpleNamespace()

        return call


METADATA = [SimpleNamespace(_attention_backend_variant=variant) for variant in (0, 1)]
BATCH = "a batch"
ACTIONS: dict[str, dict[str, list[tuple[Any, ...]]]] = {
    "impl": {
        "forward": [(None, None, None, None, None, metadata, None) for metadata in METADATA],
        "prepare_for_batch": [(metadata,) for metadata in METADATA],
        "process_weights_after_loading": [(None,)],
        "fused_output_quant_supported": [(None,)],
        "fused_rope_kvcache_supported": [()],
        "fused_qk_norm_rope_kvcache_supported": [()],
        "fused_qk_norm_mrope_kvcache_supported": [()],
        "do_kv_cache_update": [()],
        "do_rope_and_kv_cache_update": [()],
        "do_qk_norm_rope_kvcache_update": [()],
        "do_qk_norm_mrope_kvcache_update": [()],
        "set_interleaved_v_cache": [()],
    },
    "builder": {
        "build": [(0, BATCH)],
        "build_for_cudagraph_capture": [(BATCH,)],
        "build_for_drafting": [(BATCH, 1)],
        "update_block_table": [(metadata, None, None) for metadata in METADATA],
        "update_draft_decode_metadata": [(metadata,) for metadata in METADATA],
        "set_kernel_block_size": [(64,)],
    },
}
"""Hooks that act, and arguments to call them with; the children's calls are the answer."""
UNDECLARED = {"impl": {"do_kv_cache_update"}}
"""Hooks that vLLM calls and its interface does not have."""


def questions() -> dict[str, list[tuple[Any, ...]]]:
    """Arguments to ask the other hooks with that take any."""
    import torch
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability

    from tests.v1.attention.mock_children import MockLayer

    capabilities = [DeviceCapability(*of) for of in ((8, 0), (9, 0), (10, 0))]
    combinations = list(
        itertools.product(
            (128, 256),  # head size
            (torch.float16, torch.float32),
            ("auto", "fp8"),
            (16, 64),  # block size
            (False,),  # MLA
            (False, True),  # sinks
            (False,),  # sparse
            (False, True),  # image mask
            capabilities,
        )
    )
    config = VllmConfig()
    config.model_config = MagicMock(get_num_attention_heads=lambda _: 8)
    spec = MockLayer(head_size=256, dtype=torch.bfloat16).get_kv_cache_spec()
    return {
        "supports_head_size": [(size,) for size in (128, 256, 512)],
        "supports_dtype": [(torch.float32,), (torch.float16,), (torch.bfloat16,)],
        "supports_kv_cache_dtype": [(kind,) for kind in (None, "auto", "bfloat16", "fp8")],
        "supports_block_size": [(size,) for size in (None, 16, 64, 128)],
        "supports_compute_capability": [(capability,) for capability in capabilities],
        "supports_attn_type": [("decoder",), ("encoder",), ("encoder_only",)],
        "get_preferred_block_size": [(16,), (64,)],
        "customize_spec": [(spec,)],
        "supports_combination": combinations,
        "validate_configuration": [(*of[:8], False, of[8], "decoder") for of in combinations],
        "get_cudagraph_support": [(config, spec)],
        "get_varlen_cudagraph_max_query_len": [(config, spec)],
        "use_cascade_attention": [(64, None, 4, 2, False, False, False, 8, 1)],
        **ACTIONS["impl"],
        **ACTIONS["builder"],
    }


def answers(asked: Any, hook: str, arguments: list[tuple[Any, ...]], calls: list[str]) -> list[str]:
    """Of a hook that acts the children's calls, else its answer; an error by its sentence."""
    from tests.v1.attention.mock_children import comparable

    found = []
    for given in arguments:
        calls.clear()
        try:
            answer = getattr(asked, hook)
            answer = answer(*given) if callable(answer) else answer
            if hook == "validate_configuration":  # who gives which reason has tests of its own
                answer = "refused" if answer else "accepted"
            elif hook == "get_impl_variants":
                answer = [type(impl).__name__ for impl in answer]
            found.append(", ".join(calls) or str(comparable(answer)))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def main() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    from tests.v1.attention.mock_children import CPU, MockLayer, make_config
    from tests.v1.attention.test_composite_hooks import INTERFACES, public_members

    arguments = questions()
    impl_arguments = {"num_heads": 4, "head_size": 256, "scale": 0.0625, "kv_cache_dtype": "auto"}
    builder_arguments: Any = (MockLayer().get_kv_cache_spec(), [], make_config(), CPU)
    said: Answers = {}
    with set_current_vllm_config(VllmConfig()):
        for module, composites in both_factories():
            calls = Noting(composites[0]).calls
            asked = {
                "backend": composites,
                "impl": [made.get_impl_cls()(**impl_arguments) for made in composites],
                "builder": [made.get_builder_cls()(*builder_arguments) for made in composites],
            }
            for builder in asked["builder"]:
                builder.routing.select = lambda batch: 1
            said[module] = {
                f"{interface}.{hook}": [
                    answers(one, hook, arguments.get(hook, [()]), calls) for one in asked[interface]
                ]
                for interface in INTERFACES
                for hook in sorted(public_members(interface) | UNDECLARED.get(interface, set()))
            }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
