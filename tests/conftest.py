"""Every test runs in a process in which vLLM has loaded its plugins, as its own processes do."""

from vllm.plugins import load_general_plugins

load_general_plugins()
