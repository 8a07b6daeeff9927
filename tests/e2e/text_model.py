# SPDX-License-Identifier: Apache-2.0
"""A tiny text model of random weights, and transformers' answers to judge by."""

from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.tiny_models.common import (
    Answer,
    alternating_layers,
    draw_weights,
    make_tokenizer,
    no_progress_bars,
    text_settings,
)


def build(folder: Path, *, window: int = 24, layers: int = 3) -> Path:
    """Write a Gemma 3 text model in float32 with layers that alternate between sliding and full
    attention, the first a sliding one, and its tokenizer into `folder`."""
    settings = text_settings(
        num_hidden_layers=layers, sliding_window=window, query_pre_attn_scalar=8
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(Gemma3TextConfig(**alternating_layers(settings)))
        draw_weights(model, 1.5)
    for part in (model.float(), make_tokenizer({})):
        part.save_pretrained(folder)
    return folder


@torch.inference_mode()
def references(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
    """Greedy answers of transformers to prompts of token ids, each step without a cache."""
    with no_progress_bars():
        model = Gemma3ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    answers = []
    for prompt in prompts:
        ids, rows = torch.tensor([prompt]), []
        for _ in range(new_tokens):
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
            rows.append(logits.double().log_softmax(-1))
            ids = torch.cat([ids, rows[-1].argmax().view(1, 1)], dim=1)
        answers.append(Answer(prompt, ids[0, len(prompt) :].tolist(), torch.stack(rows)))
    return answers
