# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes, before
models and backends are chosen."""

import logging

from vllm.plugins.composite_attention.engine import unsupported_reason

logger = logging.getLogger("vllm.plugins.composite_attention")


def register() -> None:
    """Register the composites' names and let the platform choose them; safe to call again.

    Beside an engine that this version does not know, it does nothing and says so.
    """
    reason = unsupported_reason()
    if reason is not None:
        logger.warning("%s Stock vLLM behaviour is unchanged.", reason)
        return
    from vllm.plugins.composite_attention import selection

    selection.register()
