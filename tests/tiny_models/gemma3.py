"""Gemma 3: pictures attend both ways in every layer, bounded by the window in sliding layers.

vLLM leaves the picture causal in all layers where it is longer than the sliding window, so there
the reference is the causal one.
"""

from typing import Any

from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from .common import Family, Parts, make_tokenizer, text_settings

IMAGE_TOKENS = 16


def assemble(*, sliding_window: int = 64, **text: Any) -> Parts:
    tokenizer = make_tokenizer(
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        }
    )
    text = text_settings(
        sliding_window=sliding_window,
        query_pre_attn_scalar=32,
        **text,
    )
    text.setdefault(
        "layer_types",
        ["sliding_attention", "full_attention"] * (text["num_hidden_layers"] // 2),
    )
    config = Gemma3Config(
        text_config=text,
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
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
    tower_prefix=("vision_tower.", "vision_tower.vision_model."),
)
build = GEMMA3.build
reference_logprobs = GEMMA3.reference_logprobs
