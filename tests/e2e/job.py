# SPDX-License-Identifier: Apache-2.0
"""A function called in a process of its own, so that engines, environments and patches of
different tests stay apart and what they log can be read."""

import gc
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 800
VARIABLE = "VLLM_ATTENTION_BACKEND"


class Outcome(NamedTuple):
    """What a job returned, and everything its process and that process's children wrote."""

    result: Any
    log: str


def run_job(
    job: Callable[..., Any],
    *args: Any,
    environment: dict[str, str] | None = None,
    runner: str = "tests.e2e.job",
    **kwargs: Any,
) -> Outcome:
    """Call `job(*args, **kwargs)` in a process of its own.

    Args:
        job: a function at the top level of a module; its process imports it by name. It, its
            arguments and its result are pickled.
        environment: variables to add.
        runner: the module that the process starts with; it ends in `main`.

    Raises:
        RuntimeError: the process failed; holds its log.
    """
    variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"} | (environment or {})
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "job"
        path.write_bytes(pickle.dumps((job, args, kwargs)))
        done = subprocess.run(
            [sys.executable, "-m", runner, str(path)],
            env=variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{job.__qualname__} ended with {done.returncode}:\n{done.stdout}")
        return Outcome(pickle.loads(path.read_bytes()), done.stdout)


def engine_for_each(
    values: Iterable[str], arguments: dict[str, Any], use: Callable[[Any], Any]
) -> dict[str, Any]:
    """In a job: what `use` returns of an engine, for each value of `VLLM_ATTENTION_BACKEND`; or
    the sentence with which that engine does not start.

    The engines run one after the other, in this process if multiprocessing is switched off.

    Args:
        arguments: of `vllm.LLM`.
        use: gets the `LLM`, which must be gone when it has returned.
    """
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.v1.attention.backends import storage_proof

    results: dict[str, Any] = {}
    for value in values:
        os.environ[VARIABLE] = value
        storage_proof._proven.clear()  # as in a process of its own
        gc.freeze()  # the collections while an engine starts then walk that engine alone
        try:
            llm = LLM(**arguments)
        except ValueError as error:
            results[value] = str(error)
        else:
            results[value] = use(llm)
            del llm
        gc.unfreeze()  # vLLM has frozen the engine too
        gc.collect()
        cleanup_dist_env_and_memory()
    return results


def main() -> None:
    path = Path(sys.argv[1])
    job, args, kwargs = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(job(*args, **kwargs)))


if __name__ == "__main__":
    main()
