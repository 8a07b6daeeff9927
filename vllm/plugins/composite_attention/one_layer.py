# SPDX-License-Identifier: Apache-2.0
"""An attention layer of no model, for questions that are asked outside of an engine: vLLM's
backends read the configuration that is current, and its model's."""

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig
from vllm.platforms import current_platform


def vllm_config(config: Any, num_heads: int = 4, num_kv_heads: int = 2) -> VllmConfig:
    """vLLM's configuration for a model whose only layer is that of `config`.

    Args:
        config: vLLM's `AttentionSelectorConfig` of the layer.
        num_heads: its query heads.
        num_kv_heads: its KV heads.
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
    cache = CacheConfig(cache_dtype=config.kv_cache_dtype or "auto", block_size=config.block_size)
    device = DeviceConfig(torch.device(current_platform.device_type))
    return VllmConfig(model_config=model, cache_config=cache, device_config=device)
