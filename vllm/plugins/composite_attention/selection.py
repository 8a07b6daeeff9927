# SPDX-License-Identifier: Apache-2.0
"""Where vLLM chooses an attention backend, and the composites that it may choose now."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.plugins.composite_attention.engine import register_name
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

logger = init_logger(__name__)

COMPOSITES = {
    "CPU_PREFIX_ATTN": "vllm.v1.attention.backends.cpu_prefix_attn.CPUPrefixAttentionBackend",
}
"""Registry name and class path of each composite that this project adds."""

PAIRS = "vllm.plugins.composite_attention.pairs"
"""The module that makes pairs of any two backends; imported only when one is asked for."""

VARIABLE = "VLLM_ATTENTION_BACKEND"
VARIABLES = (VARIABLE, "VLLM_COMPOSITE_STORAGE_PROOF")

WHOLE_IMAGE_SCHEDULER = "vllm.plugins.composite_attention.scheduling.WholeImageScheduler"


def register() -> None:
    """Make the composites' names known and wrap the platform's choice, each only once."""
    _register_names()
    for variable in VARIABLES:  # vLLM warns of variables with its prefix that it does not know
        envs.environment_variables.setdefault(variable, functools.partial(os.environ.get, variable))
    AttentionBackendEnum.__reduce_ex__ = _reduce_by_name  # type: ignore[assignment, method-assign]
    _wrap(EngineArgs, "create_engine_config", _with_environment)
    platform = type(current_platform)
    if current_platform.is_cpu():
        _wrap(platform, "check_and_update_config", _keep_images_whole)
        _wrap(platform, "get_attn_backend_cls", _composite_or_stock)


def _reduce_by_name(backend: AttentionBackendEnum, protocol: Any) -> Any:
    """Pickle our members by name: the engine core unpickles its configuration before it loads
    plugins, and a value that is not registered yet is an error."""
    if _is_ours(backend):
        return member, (backend.name, backend.value)
    return type(backend), (backend.value,)


def _is_ours(backend: Any) -> bool:
    return backend.name in COMPOSITES or str(backend.value).startswith(PAIRS)


def member(name: str, path: str) -> AttentionBackendEnum:
    """The registry's member of this name, in a process that may not have loaded plugins yet."""
    _register_names()
    return register_name(name, path)


def _register_names() -> None:
    for name, path in COMPOSITES.items():
        register_name(name, path)


def asked_by_environment() -> AttentionBackendEnum | None:
    """The backend that `VLLM_ATTENTION_BACKEND` asks for.

    Raises:
        ValueError: nobody knows a name in it, or its pair cannot be composed.
    """
    if not os.environ.get(VARIABLE):
        return None
    from vllm.plugins.composite_attention.pairs import backend_for

    try:
        return backend_for(os.environ[VARIABLE])
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={os.environ[VARIABLE]}: {error}") from error


def _with_environment(stock: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any) -> Any:
    """Take `VLLM_ATTENTION_BACKEND` as if `--attention-backend` had been given, unless it has."""
    asked = os.environ.get(VARIABLE)
    given = arguments.attention_backend or arguments.attention_config.backend
    if asked and given is not None:
        logger.warning_once(
            "The attention backend %s, given as an argument, wins over %s=%s.",
            getattr(given, "name", given),
            VARIABLE,
            asked,
        )
    elif (backend := asked_by_environment()) is not None:
        arguments.attention_backend = backend
        logger.info_once("%s=%s: using attention backend %s.", VARIABLE, asked, backend.name)
    return stock(arguments, *args, **kwargs)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of `owner`, or its class method, by `around`, which gets the stock one
    first; once."""
    stock = getattr(owner, name)
    if hasattr(stock, "_of_composite_attention"):
        return

    @functools.wraps(stock)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    wrapper._of_composite_attention = True  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(wrapper) if inspect.ismethod(stock) else wrapper)


def _keep_images_whole(stock: Callable[[Any], None], vllm_config: Any) -> None:
    """Have each image scheduled in one step, unless the user has asked for CPU_ATTN and with it for
    the causal mask: where a step's end cuts an image, its queries cannot see the keys that only the
    next step computes."""
    stock(vllm_config)
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if model is None or not model.is_mm_prefix_lm or not scheduler.is_multimodal_model:
        return
    if vllm_config.attention_config.backend is AttentionBackendEnum.CPU_ATTN:
        return
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = WHOLE_IMAGE_SCHEDULER
        # An image longer than this would wait for ever while another request runs.
        scheduler.long_prefill_token_threshold = 0
        logger.info_once("Each image is scheduled in one step, so that its tokens see each other.")
    elif scheduler.scheduler_cls != WHOLE_IMAGE_SCHEDULER:
        logger.warning_once(
            "The scheduler %s may end a step inside an image, whose first part then does not see "
            "its last. %s never does.",
            scheduler.scheduler_cls,
            WHOLE_IMAGE_SCHEDULER,
        )


def _composite_or_stock(
    stock: Callable[..., str],
    selected_backend: Any,
    attn_selector_config: Any,
    *args: Any,
    **kw: Any,
) -> str:
    path = cpu_composite_path(selected_backend, attn_selector_config)
    return path or stock(selected_backend, attn_selector_config, *args, **kw)


def cpu_composite_path(selected: Any, config: Any) -> str | None:
    """The class path of the composite that is to serve this layer on CPU; None for vLLM's choice.

    Decoder layers of models that need the image mask get CPU_PREFIX_ATTN; a composite that the
    user has named serves every decoder layer. A model's own wish for a GPU backend is no user's
    choice, so only CPU_ATTN by name keeps the image mask off.

    Args:
        selected: the backend that the configuration names, or None.
        config: vLLM's `AttentionSelectorConfig` of the layer.

    Raises:
        ValueError: the user has named a backend that cannot serve this layer on CPU.
    """
    if config.attn_type != AttentionType.DECODER:
        return None
    if selected is not None and _is_ours(selected):
        if reasons := _reasons_against(selected, config):
            raise ValueError(
                f"{selected.name} was asked for and cannot serve this model's layers on this "
                f"device: {'; '.join(reasons)}. Leave the attention backend unset, or name another."
            )
        logger.info_once("Using %s, which was asked for by name.", selected.name)
        return selected.get_path()
    by_environment = selected is not None and selected is asked_by_environment()
    if by_environment and not _runs_on_cpu(selected):
        raise ValueError(
            f"{VARIABLE} asks for {selected.name}, which does not run on CPU. CPU_PREFIX_ATTN and "
            "CPU_ATTN do; or leave the variable unset."
        )
    if not config.use_mm_prefix:
        return None
    composite = AttentionBackendEnum["CPU_PREFIX_ATTN"]
    if selected is AttentionBackendEnum.CPU_ATTN:
        logger.warning_once(
            "CPU_ATTN was asked for by name: the image tokens of this model, which should "
            "attend both ways, get the causal mask. Leave the backend unset for the right one."
        )
        return None
    if reasons := _reasons_against(composite, config):
        logger.warning_once(
            "CPU_PREFIX_ATTN cannot serve these decoder layers (%s). They keep vLLM's own backend, "
            "which masks image tokens causally.",
            "; ".join(reasons),
        )
        return None
    logger.info_once(
        "Using CPU_PREFIX_ATTN: image tokens of this model attend both ways, for which "
        "CPU_ATTN alone has no mask."
    )
    return composite.get_path()


def _reasons_against(backend: AttentionBackendEnum, config: Any) -> list[str]:
    settings = config._asdict() | {"device_capability": current_platform.get_device_capability()}
    reasons = backend.get_class().validate_configuration(**settings)
    children: Any = getattr(backend.get_class(), "child_classes", tuple)()
    return reasons + [
        f"{child.get_name()} does not run on CPU"
        for child in children
        if child.get_name() in AttentionBackendEnum.__members__
        and not _runs_on_cpu(AttentionBackendEnum[child.get_name()])
    ]


def _runs_on_cpu(backend: AttentionBackendEnum) -> bool:
    path = backend.get_path()
    if not path.startswith("vllm.") or _is_ours(backend):
        return True  # somebody's own, or a composite, whose children are asked
    interpreted = HAS_TRITON and backend.name.startswith("TRITON_ATTN")
    return interpreted or backend.name.startswith(("CPU_", "AMX_"))
