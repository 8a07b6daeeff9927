# SPDX-License-Identifier: Apache-2.0
"""Every test runs in a process in which vLLM has loaded its plugins, as its own processes do.

Property tests take their settings from here: `quick` draws the same few examples in every run,
`HYPOTHESIS_PROFILE=fuzz` many new ones.
"""

import os

from hypothesis import settings
from vllm.plugins import load_general_plugins

load_general_plugins()

settings.register_profile("quick", max_examples=150, derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", max_examples=10_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
