# SPDX-License-Identifier: Apache-2.0
"""An attention layer of no model, for questions that are asked outside of an engine: vLLM's
backends read the configuration that is current, and its model's."""

import tempfile
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.plugins.composite_attention.pairs import backend_for, class_of
from vllm.utils.torch_utils import set_default_torch_dtype


def vllm_config(
    config: Any, num_heads: int = 4, num_kv_heads: int = 2, masked: bool = False
) -> VllmConfig:
    """vLLM's configuration for a model whose only layer is that of `config`.

    Args:
        config: vLLM's `AttentionSelectorConfig` of the layer.
        num_heads: its query heads.
        num_kv_heads: its KV heads.
        masked: whether the model needs the image mask.
    """
    llama = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=num_heads * config.head_size,
        head_dim=config.head_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=1,
        intermediate_size=64,
        vocab_size=64,
    )
    with tempfile.TemporaryDirectory() as folder:
        llama.save_pretrained(folder)
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype=config.dtype)
    model.model_arch_config = replace(model.model_arch_config, is_mm_prefix_lm=masked)
    cache = CacheConfig(cache_dtype=config.kv_cache_dtype or "auto", block_size=config.block_size)
    device = DeviceConfig(torch.device(current_platform.device_type))
    return VllmConfig(model_config=model, cache_config=cache, device_config=device)


def refusal(name: str, config: Any, num_heads: int = 4, num_kv_heads: int = 2) -> str | None:
    """Why the children of a composite cannot serve a layer on this device with one KV cache, found
    as it is when the engine starts, by a layer of its own; None if they can.

    Args:
        name: the composite, as `VLLM_ATTENTION_BACKEND` takes it.
        config: vLLM's `AttentionSelectorConfig` of the layer; without a block size, the smallest
            from 16 tokens on.
        num_heads: its query heads.
        num_kv_heads: its KV heads.
    """
    backend: Any = class_of(name)
    backend_for(name)  # registers the name, which layers look up
    config = config._replace(block_size=config.block_size or _block_size(backend))
    settings = vllm_config(config, num_heads, num_kv_heads)
    device = torch.device(current_platform.device_type)
    try:
        with set_current_vllm_config(settings), set_default_torch_dtype(config.dtype):
            layer = Attention(
                num_heads,
                config.head_size,
                config.head_size**-0.5,
                num_kv_heads,
                cache_config=settings.cache_config,
                prefix="layers.0",
                attn_backend=backend,
            )
            spec = layer.get_kv_cache_spec(settings)
            backend.get_builder_cls()(spec, [layer.layer_name], settings, device)
    except Exception as error:
        return str(error)
    return None


def _block_size(backend: Any) -> int:
    sizes = [getattr(size, "base", size) for size in backend.get_supported_kernel_block_sizes()]
    return max(min(sizes, default=16), 16)
