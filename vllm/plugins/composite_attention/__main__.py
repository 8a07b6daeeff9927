# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm.plugins.composite_attention`: explains what is chosen and why.

Exit status: 0 all well; 1 what was asked about does not work here; 2 the command was misused.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from vllm.plugins.composite_attention import doctor, explain, matrix, show

COMMANDS = {
    "explain": (explain, "which attention backend a model's layers would get here, and why"),
    "matrix": (matrix, "which of the engine's backends can be joined, and why others cannot"),
    "show": (show, "what is routed where, and the mask, for a batch of requests"),
    "doctor": (doctor, "versions, what stands in for vLLM's own files, and what is active"),
}


def parser() -> argparse.ArgumentParser:
    """The command line; `command` names one of `COMMANDS`."""
    main = argparse.ArgumentParser(
        prog="python -m vllm.plugins.composite_attention",
        description="What vLLM's composite attention backends do here, and why.",
        epilog="exit status: 0 all well; 1 what was asked about does not work here; 2 misuse",
    )
    commands = main.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=f"Say {help_text}.")
        module.add_arguments(command)
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed, rest = parser().parse_known_args(given)
    module = COMMANDS[parsed.command][0]
    if rest and module is not explain:  # which hands what it does not know to vLLM
        parser().parse_args(given)
    parsed.rest = rest
    try:
        status: int = module.run(parsed)
        sys.stdout.flush()
    except ValueError as error:
        print(f"{parsed.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if isinstance(error, BrokenPipeError):  # `| head`
            return 0
        print(f"{parsed.command}: the answer cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return status


def without_log() -> None:
    """Keep vLLM's log out of the answer, unless it has been asked for."""
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        logging.getLogger("vllm").setLevel(logging.ERROR)


if __name__ == "__main__":
    without_log()
    sys.exit(main())
