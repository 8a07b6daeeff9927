# SPDX-License-Identifier: Apache-2.0
"""Where vLLM chooses an attention backend, and the composites that it may choose now."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.plugins.composite_attention.engine import register_name
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention import selector
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
    platform = type(current_platform)
    around: list[tuple[Any, str, Callable[..., Any]]] = [
        (EngineArgs, "create_engine_config", _with_environment),
        (platform, "get_attn_backend_cls", _choose),
    ]
    if current_platform.is_cpu():
        around.append((platform, "check_and_update_config", _keep_images_whole))
    else:
        around.append((VllmConfig, "try_verify_and_update_config", _without_the_models_wish))
    for owner, method, _ in around:  # all of it or nothing
        getattr(owner, method)
    _register_names()
    for variable in VARIABLES:  # vLLM warns of variables with its prefix that it does not know
        envs.environment_variables.setdefault(variable, functools.partial(os.environ.get, variable))
    AttentionBackendEnum.__reduce_ex__ = _reduce_by_name  # type: ignore[assignment, method-assign]
    for owner, method, wrapper in around:
        _wrap(owner, method, wrapper)


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
    attention = arguments.attention_config
    given = arguments.attention_backend or attention.backend
    by_kind = getattr(attention, "backend_per_kind", None)
    if asked and (given is not None or by_kind):
        logger.warning_once(
            "The attention backend %s, given as an argument, wins over %s=%s.",
            getattr(given, "name", given or str(by_kind)),
            VARIABLE,
            asked,
        )
    if given is not None or (backend := asked_by_environment()) is None:
        return stock(arguments, *args, **kwargs)
    from vllm.plugins.composite_attention.pairs import spelled

    logger.info_once("%s=%s: using attention backend %s.", VARIABLE, asked, spelled(backend.name))
    # vLLM remembers its answers, and does not know that this variable has a part in them.
    getattr(selector._cached_get_attn_backend, "cache_clear", bool)()
    arguments.attention_backend = backend
    try:
        return stock(arguments, *args, **kwargs)
    finally:
        arguments.attention_backend = None  # the caller may use them again


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


def _without_the_models_wish(stock: Callable[[Any], None], vllm_config: Any) -> None:
    """Leave the choice open where only the model's configuration has made it: Gemma 4 asks for
    TRITON_ATTN on every layer where its largest heads need it. A drafter that shares its layers'
    cache reads that wish, so with speculative decoding it stands; so it does for a diffusion model,
    whose canvas attends without causality."""
    attention = vllm_config.attention_config
    unset = attention.backend is None
    stock(vllm_config)
    wish = unset and attention.backend is AttentionBackendEnum.TRITON_ATTN
    others = ("speculative_config", "diffusion_config")
    needed = any(getattr(vllm_config, other, None) is not None for other in others)
    if wish and vllm_config.model_config.is_mm_prefix_lm and not needed:
        attention.backend = None


def _choose(
    stock: Callable[..., str],
    selected_backend: Any,
    attn_selector_config: Any,
    num_heads: int | None = None,
) -> str:
    """The class path of the backend for a layer: what the user has named, else the best composite
    for a decoder layer that needs the image mask, else vLLM's choice.

    Raises:
        ValueError: the user has named a backend that cannot serve this layer here.
    """
    selected, config = selected_backend, attn_selector_config
    if selected is not None and (_is_ours(selected) or _is_lost_on_cpu(selected)):
        if config.attn_type == AttentionType.DECODER:
            return _named(selected, config, num_heads)
        logger.info_once(
            "%s serves decoder layers only: this model's other layers keep vLLM's own backend.",
            selected.name,
        )
        selected = None
    if selected is not None and selected is _valid_in_environment():
        return _named_by_environment(stock, selected, config, num_heads)
    masked = config.use_mm_prefix and config.attn_type == AttentionType.DECODER
    if masked and current_platform.is_cpu() and selected is AttentionBackendEnum.CPU_ATTN:
        _warn_of_causal_images()
    # On CPU vLLM has but one choice, and the name of another is a model's wish, not a user's.
    elif masked and (selected is None or current_platform.is_cpu()):
        composite = _best_composite(config, num_heads)
        if composite is not None:
            return composite
    return stock(selected, config, num_heads)


def _valid_in_environment() -> AttentionBackendEnum | None:
    try:
        return asked_by_environment()
    except ValueError:
        return None  # an argument has won over it, or the engine would not have started


def _is_lost_on_cpu(backend: Any) -> bool:
    """Whether vLLM, which takes no notice of names on CPU, would pass over a backend that somebody
    else has registered. One of vLLM's own may be the model's wish instead of the user's."""
    return current_platform.is_cpu() and not backend.get_path().startswith("vllm.")


def _named(selected: Any, config: Any, num_heads: int | None) -> str:
    from vllm.plugins.composite_attention import choosing, pairs

    name = pairs.spelled(selected.name)
    backend = pairs.class_of(name)
    if reasons := choosing.reasons_against(backend, current_platform, config):
        raise ValueError(
            f"{name} was asked for and cannot serve this model's layers on this device: "
            f"{'; '.join(reasons)}. {_what_can(config, num_heads)}"
        )
    logger.info_once("Using %s, which was asked for by name.", name)
    return selected.get_path()


def _named_by_environment(
    stock: Callable[..., str], selected: Any, config: Any, num_heads: int | None
) -> str:
    from vllm.plugins.composite_attention import choosing, pairs

    try:
        backend = pairs.class_of(selected.name)
        if not choosing.runs_here(backend, current_platform):
            raise ValueError("It does not run on CPU.")
        path = stock(selected, config, num_heads)
    except ValueError as error:
        raise ValueError(
            f"{VARIABLE} asks for {selected.name}. {error} {_what_can(config, num_heads)}"
        ) from error
    if config.attn_type != AttentionType.DECODER:
        return path
    if not issubclass(resolve_obj_by_qualname(path), backend):  # vLLM has taken no notice of it
        return _named(selected, config, num_heads)
    if config.use_mm_prefix and current_platform.is_cpu():
        _warn_of_causal_images()
    return path


def _warn_of_causal_images() -> None:
    logger.warning_once(
        "CPU_ATTN was asked for by name: the image tokens of this model, which should "
        "attend both ways, get the causal mask. Leave the backend unset for the right one."
    )


def _what_can(config: Any, num_heads: int | None) -> str:
    from vllm.plugins.composite_attention import choosing

    able = choosing.candidates(current_platform, config, num_heads)
    names = " or ".join(candidate.name for candidate in able if not candidate.reasons)
    return f"Name {names} instead, or leave the backend unset." if names else "Nothing else can."


def _best_composite(config: Any, num_heads: int | None) -> str | None:
    from vllm.plugins.composite_attention import choosing, pairs

    refused = []
    for candidate in choosing.composites(current_platform, config, num_heads):
        if not candidate.reasons:
            backend: Any = pairs.backend_for(candidate.name)
            logger.info_once(
                "Using %s: image tokens of this model attend both ways, for which "
                "%s alone has no mask.",
                candidate.name,
                backend.get_class().causal_backend_cls.get_name(),
            )
            return backend.get_path()
        refused.append(f"{candidate.name} cannot serve ({'; '.join(candidate.reasons)})")
    if refused and current_platform.is_cpu():
        logger.warning_once(
            "The decoder layers keep vLLM's own backend, which masks image tokens causally: %s.",
            "; ".join(refused),
        )
    elif refused:
        logger.info_once("No composite for the decoder layers: %s.", "; ".join(refused))
    return None
