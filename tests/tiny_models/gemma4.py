"""Gemma 4 with `use_bidirectional_attention="vision"`, and its unified kind without vision tower.

Pictures attend both ways in sliding layers only, and no key lies further back than the window.
For the unified kind transformers lifts the mask in full layers too, and past the window, while
vLLM serves it like Gemma 4; its reference therefore is transformers given vLLM's mask.
"""

from typing import Any

import torch
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4UnifiedAudioFeatureExtractor,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedImageProcessor,
    Gemma4UnifiedProcessor,
    Gemma4UnifiedVideoProcessor,
    Gemma4VideoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from .common import Family, Parts, alternating_layers, make_tokenizer, text_settings

# The least that the image processors allow. A picture takes the largest grid of its own shape
# that fits, so 63 tokens with 80x64 pixels.
MOST_IMAGE_TOKENS = 70


def tokenizer_and_settings(text: dict[str, Any]) -> tuple[PreTrainedTokenizerFast, dict[str, Any]]:
    tokenizer = make_tokenizer(
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "audio_token": "<audio_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
            "video_token": "<|video|>",
        }
    )
    settings = {
        "sliding_window": 96,
        "global_head_dim": 64,
        "use_bidirectional_attention": "vision",
    }
    return tokenizer, {
        "text_config": alternating_layers(text_settings(**settings | text)),
        "boi_token_id": tokenizer.boi_token_id,
        "eoi_token_id": tokenizer.eoi_token_id,
        "image_token_id": tokenizer.image_token_id,
        "boa_token_id": tokenizer.boa_token_id,
        "eoa_token_index": tokenizer.eoa_token_id,
        "audio_token_id": tokenizer.audio_token_id,
        "video_token_id": tokenizer.video_token_id,
        "audio_config": None,
    }


def assemble(**text: Any) -> Parts:
    tokenizer, settings = tokenizer_and_settings({"hidden_size_per_layer_input": 0} | text)
    config = Gemma4Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "position_embedding_size": 256,
            "default_output_length": MOST_IMAGE_TOKENS,
        },
        **settings,
    )
    processor = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=MOST_IMAGE_TOKENS),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(),
        image_seq_length=MOST_IMAGE_TOKENS,
    )
    return Parts(soften(Gemma4ForConditionalGeneration(config)), processor)


def assemble_unified(**text: Any) -> Parts:
    tokenizer, settings = tokenizer_and_settings(text)
    config = Gemma4UnifiedConfig(
        vision_config={
            "mm_embed_dim": 64,
            "mm_posemb_size": 256,
            "output_proj_dims": 64,
            "num_soft_tokens": MOST_IMAGE_TOKENS,
        },
        **settings,
    )
    processor = Gemma4UnifiedProcessor(
        feature_extractor=Gemma4UnifiedAudioFeatureExtractor(),
        image_processor=Gemma4UnifiedImageProcessor(max_soft_tokens=MOST_IMAGE_TOKENS),
        tokenizer=tokenizer,
        video_processor=Gemma4UnifiedVideoProcessor(),
        image_seq_length=MOST_IMAGE_TOKENS,
    )
    return Parts(soften(Gemma4UnifiedForConditionalGeneration(config)), processor)


def soften(model: PreTrainedModel) -> PreTrainedModel:
    """Shrink the queries: scores are not scaled here, and too sharp ones magnify rounding."""
    for layer in model.get_decoder().layers:
        layer.self_attn.q_norm.weight.data.mul_(0.4)
    return model


def masks(types: torch.Tensor, config: PreTrainedConfig) -> dict[str, dict[str, torch.Tensor]]:
    """Gemma 4's additive masks, of shape (1, 1, T, T), for token types of shape (1, T).

    A full layer is causal. A sliding one adds the keys of the query's own picture, and both are
    bounded by the window: query q sees key k if k > q - W and (k <= q or in q's picture).
    """
    is_image = types[0].bool()
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, -1))
    number = torch.where(is_image, starts.cumsum(0), 0)
    same_image = (number[:, None] == number) & is_image
    query = torch.arange(len(is_image))[:, None]
    key = query.T
    causal = key <= query
    sliding = (causal | same_image) & (key > query - config.text_config.sliding_window)
    lowest = torch.finfo(torch.float32).min
    visible = {"full_attention": causal, "sliding_attention": sliding}
    return {
        "attention_mask": {
            kind: torch.where(seen, 0.0, lowest)[None, None] for kind, seen in visible.items()
        }
    }


GEMMA4 = Family(
    name="gemma4",
    assemble=assemble,
    image_tokens=63,
    placeholder="<image_soft_token>",
    type_key="mm_token_type_ids",
    keeps_long_images=True,
    engine_options={"limit_mm_per_prompt": {"video": 0, "audio": 0}},
)
GEMMA4_UNIFIED = Family(
    name="gemma4_unified",
    assemble=assemble_unified,
    image_tokens=63,
    placeholder="<image_soft_token>",
    type_key="mm_token_type_ids",
    keeps_long_images=True,
    explicit_masks=masks,
    published_names=(
        ("model.embed_vision.multimodal_embedder.", "model.embed_vision."),
        ("model.embed_vision.", "model.vision_embedder."),
    ),
    engine_options={"limit_mm_per_prompt": {"video": 0, "audio": 0}},
)
