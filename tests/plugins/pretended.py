# SPDX-License-Identifier: Apache-2.0
"""vLLM's own platforms and backend classes for GPUs, without a GPU.

`ask(kind, cases)` starts a process in which vLLM believes that it runs on CUDA, ROCm or XPU: the
platform class is vLLM's own, only what it would ask of the device is answered here, and what cannot
be imported without the device or the package (compiled kernels, FlashInfer) is an empty stand-in.
Each case is then put to the platform's `get_attn_backend_cls`. Nothing is computed; so the storage
proof, which would write on the device, is answered by the case.
"""

import functools
import importlib.machinery
import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.compiled import skip_without_compiled_operators

PLATFORMS = {
    "cuda": "vllm.platforms.cuda.CudaPlatformBase",
    "rocm": "vllm.platforms.rocm.RocmPlatform",
    "xpu": "vllm.platforms.xpu.XPUPlatform",
}
CUDA_MODULES = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
FLASHINFER_MODULES = (
    "flashinfer",
    "flashinfer.decode",
    "flashinfer.prefill",
    "flashinfer.utils",
)
XPU_MODULES = (
    "vllm_xpu_kernels",
    "vllm_xpu_kernels._C",
    "vllm_xpu_kernels._moe_C",
    "vllm_xpu_kernels._xpu_C",
    "vllm_xpu_kernels.flash_attn_interface",
    "vllm_xpu_kernels.rotary",
)


def ask(
    kind: str, cases: list[dict[str, Any]], *, modules: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """What vLLM chooses in each case on a platform of this kind, in a process of its own.

    Args:
        kind: `cuda`, `rocm` or `xpu`.
        cases: each with `capability` (major, minor) and fields of vLLM's `AttentionSelectorConfig`
            (`dtype` by its name); `selected`, a backend's name or pair, `unproven`, the storage
            proof's reason against any pair, and `environment`, for the variable, may be there.
        modules: further modules to stand in for, such as `FLASHINFER_MODULES`.

    Returns:
        For each case `chosen`, the backend's registry name, or `refused`, the error's sentence;
        `candidates`, as `[name, reasons]`; and `proven`, the pairs that were put to the proof.
    """
    skip_without_compiled_operators()  # vLLM looks at a model's classes, and they at operators
    process = subprocess.run(
        [sys.executable, "-m", "tests.plugins.pretended", kind, *modules],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


class Anything:
    """Whatever is imported from a stand-in."""


def _stand_in(name: str) -> None:
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def attribute(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Anything

    module.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[name] = module


def _become(kind: str) -> Any:
    """Make vLLM's `current_platform` one of this kind and return it."""
    for name in {"cuda": CUDA_MODULES, "xpu": XPU_MODULES}.get(kind, ()):
        _stand_in(name)
    import torch

    if kind == "rocm":
        properties: Any = SimpleNamespace(gcnArchName="gfx942")
        torch.cuda.get_device_properties = lambda *_: properties
        # Its import computes with Triton's types, which are absent without a device.
        sys.modules["vllm.v1.attention.backends.ultraquant_attn"] = None  # type: ignore[assignment]
    from vllm import platforms
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils.import_utils import resolve_obj_by_qualname

    base: Any = resolve_obj_by_qualname(PLATFORMS[kind])

    class Pretended(base):  # type: ignore[misc]
        capability: DeviceCapability | None = None
        device_type = "cpu"  # where tensors can be made

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
            return cls.capability

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            floor = capability if isinstance(capability, tuple) else divmod(capability, 10)
            return cls.capability is not None and cls.capability >= floor

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"a pretended {kind} device"

    platforms._current_platform = Pretended()  # type: ignore[assignment]
    if kind == "cuda":  # whose FlashAttention 4 comes as Python files that the CPU wheel lacks
        from vllm.vllm_flash_attn import flash_attn_interface

        flash_attn_interface.FA4_AVAILABLE = True
    return platforms.current_platform


@functools.cache
def _config_of(layer: Any) -> Any:
    from vllm.plugins.composite_attention import one_layer

    return one_layer.vllm_config(layer, masked=layer.use_mm_prefix)


def _answer(platform: Any, case: dict[str, Any]) -> dict[str, Any]:
    import os

    import torch
    from vllm.config import set_current_vllm_config
    from vllm.platforms.interface import DeviceCapability
    from vllm.plugins.composite_attention import choosing, pairs
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends import storage_proof
    from vllm.v1.attention.selector import AttentionSelectorConfig

    capability = case.pop("capability", None)
    type(platform).capability = capability and DeviceCapability(*capability)
    selected, unproven = case.pop("selected", None), case.pop("unproven", {})
    os.environ["VLLM_ATTENTION_BACKEND"] = case.pop("environment", "")
    proven: list[str] = []

    def written(layer: Any, impl: Any, *_: Any) -> str | None:
        name = impl.backend_cls.get_name()
        proven.append(name)
        return unproven.get(name)

    storage_proof._first_difference = written  # type: ignore[assignment]
    layer = {"kv_cache_dtype": "auto", "block_size": None, "use_mm_prefix": True, **case}
    layer["dtype"] = getattr(torch, layer["dtype"])
    config = AttentionSelectorConfig(**layer)
    answer: dict[str, Any] = {"proven": proven}
    with set_current_vllm_config(_config_of(config)):
        answer["candidates"] = list(choosing.candidates(platform, config, 8))
        proven.clear()
        storage_proof._proven.clear()
        try:
            named = pairs.backend_for(selected or os.environ["VLLM_ATTENTION_BACKEND"])
            path = type(platform).get_attn_backend_cls(named, config, 8)
            answer["chosen"] = resolve_obj_by_qualname(path).get_name()
        except ValueError as error:
            answer["refused"] = str(error)
    return answer


def main() -> None:
    kind, *modules = sys.argv[1:]
    for name in modules:
        _stand_in(name)
    platform = _become(kind)
    from vllm.plugins import composite_attention

    composite_attention.register()
    print(json.dumps([_answer(platform, case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
