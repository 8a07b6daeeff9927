# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes, before
models and backends are chosen."""

import logging
import os

logger = logging.getLogger("vllm.plugins.composite_attention")


def register() -> None:
    """Register the composites' names and let the platform choose them; safe to call again.

    Beside an engine that this version does not know, it does nothing and says so. So it does where
    it fails, since vLLM would not start otherwise.

    Raises:
        RuntimeError: it fails and `VLLM_ATTENTION_BACKEND`, which only this plugin knows, asks for
            a backend.
    """
    try:
        _register()
    except Exception as error:
        what = f"vllm-composite-attention cannot be loaded ({type(error).__name__}: {error})"
        asked = os.environ.get("VLLM_ATTENTION_BACKEND", "").strip()
        if asked.lower() not in ("", "auto"):
            raise RuntimeError(
                f"{what}, and without it VLLM_ATTENTION_BACKEND={asked} would be ignored: unset "
                "it to start with vLLM's own choice, or install a vllm-composite-attention that "
                "fits this vLLM."
            ) from error
        logger.warning("%s. Stock vLLM behaviour is unchanged.", what)
        logger.debug("What kept vllm-composite-attention from loading:", exc_info=True)


def _register() -> None:
    from vllm.plugins.composite_attention.engine import unsupported_reason

    reason = unsupported_reason()
    if reason is not None:
        asked = os.environ.get("VLLM_ATTENTION_BACKEND")
        ignored = f" VLLM_ATTENTION_BACKEND={asked} is not read." if asked else ""
        logger.warning("%s Stock vLLM behaviour is unchanged.%s", reason, ignored)
        return
    from vllm.plugins.composite_attention import selection

    selection.register()
