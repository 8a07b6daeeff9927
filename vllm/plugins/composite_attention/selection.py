# SPDX-License-Identifier: Apache-2.0
"""Where vLLM chooses an attention backend, and the composites that it may choose now."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

logger = init_logger(__name__)

COMPOSITES = {
    "CPU_PREFIX_ATTN": "vllm.v1.attention.backends.cpu_prefix_attn.CPUPrefixAttentionBackend",
}
"""Registry name and class path of each composite that this project adds."""

WHOLE_IMAGE_SCHEDULER = "vllm.plugins.composite_attention.scheduling.WholeImageScheduler"


def register() -> None:
    """Make the composites' names known and wrap the platform's choice, each only once."""
    for name, path in COMPOSITES.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
    platform = type(current_platform)
    if current_platform.is_cpu():
        _wrap(platform, "check_and_update_config", _keep_images_whole)
        _wrap(platform, "get_attn_backend_cls", _composite_or_stock)


def _wrap(platform: Any, hook: str, around: Callable[..., Any]) -> None:
    """Replace a class method of the platform by `around`, which gets the stock one first."""
    stock = getattr(platform, hook)
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    setattr(platform, hook, classmethod(wrapper))


def _keep_images_whole(stock: Callable[[Any], None], vllm_config: Any) -> None:
    """Have each image scheduled in one step: where a step's end cuts an image, its queries cannot
    see the keys that only the next step computes. On CPU vLLM does not ask for that at all."""
    stock(vllm_config)
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if model is None or not model.is_mm_prefix_lm or not scheduler.is_multimodal_model:
        return
    scheduler.disable_chunked_mm_input = True
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = WHOLE_IMAGE_SCHEDULER
        logger.info_once("Image tokens of this model attend both ways: each image in one step.")
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
    """The CPU composite's class path if it is to serve this layer; None for vLLM's own choice.

    It serves decoder layers of models that need the image mask, and any layer for which the
    user has named it. A model's own wish for a GPU backend is no user's choice, so only
    CPU_ATTN by name keeps the image mask off.

    Args:
        selected: the backend that the configuration names, or None.
        config: vLLM's `AttentionSelectorConfig` of the layer.
    """
    composite = AttentionBackendEnum["CPU_PREFIX_ATTN"]
    is_decoder = config.attn_type == AttentionType.DECODER
    if selected is not composite and not (config.use_mm_prefix and is_decoder):
        return None
    if selected is AttentionBackendEnum.CPU_ATTN:
        logger.warning_once(
            "CPU_ATTN was asked for by name: the image tokens of this model, which should "
            "attend both ways, get the causal mask. Leave the backend unset for the right one."
        )
        return None
    settings = config._asdict() | {"device_capability": current_platform.get_device_capability()}
    reasons = composite.get_class().validate_configuration(**settings)
    if reasons:
        logger.warning_once(
            "CPU_PREFIX_ATTN cannot serve these %s layers (%s). They keep vLLM's own backend, "
            "which masks image tokens causally.",
            AttentionType(config.attn_type).value,
            "; ".join(reasons),
        )
        return None
    logger.info_once(
        "Using CPU_PREFIX_ATTN: image tokens of this model attend both ways, for which "
        "CPU_ATTN alone has no mask."
    )
    return composite.get_path()
