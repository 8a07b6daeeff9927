"""PaliGemma 1 and 2: one picture in front of the text, full attention, or alternating in version 2.

The published models attend both ways over the whole prompt, and transformers does so by default.
vLLM opens the mask for the picture's tokens only, and in version 2 only if they fit into the
window; the references follow it, by token types that name just these tokens.
"""

from functools import partial
from typing import Any

from transformers import (
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    SiglipImageProcessor,
)

from .common import SIGLIP, Family, Parts, alternating_layers, make_tokenizer, text_settings

IMAGE_TOKENS = 16
TEXT_KINDS: dict[int, dict[str, Any]] = {
    1: {"model_type": "gemma"},
    # transformers does not apply this model's final soft cap here, vLLM would.
    2: {
        "model_type": "gemma2",
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
        "final_logit_softcapping": None,
    },
}


def assemble(version: int, **text: Any) -> Parts:
    tokenizer = make_tokenizer({"image_token": "<image>"}, bos_by_default=False)
    side = SIGLIP["image_size"]
    processor = PaliGemmaProcessor(
        image_processor=SiglipImageProcessor(
            size={"height": side, "width": side}, image_seq_length=IMAGE_TOKENS
        ),
        tokenizer=tokenizer,
    )
    # The processor has added more than a thousand tokens for places and segments.
    settings = text_settings(vocab_size=len(tokenizer), **TEXT_KINDS[version] | text)
    if version == 2:
        settings = alternating_layers(settings)
    config = PaliGemmaConfig(
        text_config=settings,
        vision_config=dict(SIGLIP),
        projection_dim=settings["hidden_size"],
        hidden_size=settings["hidden_size"],
        vocab_size=settings["vocab_size"],
        image_token_index=tokenizer.image_token_id,
    )
    return Parts(PaliGemmaForConditionalGeneration(config), processor)


PALIGEMMA, PALIGEMMA2 = (
    Family(
        name=name,
        assemble=partial(assemble, version),
        image_tokens=IMAGE_TOKENS,
        placeholder="",
        type_key="token_type_ids",
        image_type=0,
        text_type=1,
        hidden_placeholder="<image>",
        leading_image_only=True,
        published_names=(("model.vision_tower.", "model.vision_tower.vision_model."),),
    )
    for version, name in ((1, "paligemma"), (2, "paligemma2"))
)
