"""Build hook: an editable install cannot put these modules beside vLLM's, so refuse it."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RefuseEditable(BuildHookInterface):
    """Stop `pip install -e` before it leaves an installation that silently does nothing."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raise where `version` is 'editable'; called by hatchling before each build."""
        if version == "editable":
            raise RuntimeError(
                "vllm-composite-attention cannot be installed with -e: its modules live inside "
                "vLLM's own folders, which an editable install does not reach, and vLLM would "
                "run without them. Use `pip install .` and repeat it after each change "
                "(`make install` does)."
            )
