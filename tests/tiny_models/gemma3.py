"""Gemma 3: pictures attend both ways in every layer, bounded by the window in sliding layers.

vLLM leaves a picture causal that is longer than the sliding window, and so does the reference.
"""

from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
)

from .common import SIGLIP, Family, Parts, alternating_layers, make_tokenizer, text_settings

IMAGE_TOKENS = 16


def assemble(**text: Any) -> Parts:
    tokenizer = make_tokenizer(
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        }
    )
    # A small scalar sharpens attention, so that a picture far back still matters.
    settings = {"sliding_window": 64, "query_pre_attn_scalar": 8}
    side = SIGLIP["image_size"]
    config = Gemma3Config(
        text_config=alternating_layers(text_settings(**settings | text)),
        vision_config=dict(SIGLIP),
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": side, "width": side}),
        tokenizer=tokenizer,
        image_seq_length=IMAGE_TOKENS,
    )
    return Parts(Gemma3ForConditionalGeneration(config), processor)


GEMMA3 = Family(
    name="gemma3",
    assemble=assemble,
    image_tokens=IMAGE_TOKENS,
    placeholder="<start_of_image>",
    type_key="token_type_ids",
    published_names=(("model.vision_tower.", "model.vision_tower.vision_model."),),
)
