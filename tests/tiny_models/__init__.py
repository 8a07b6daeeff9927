"""Tiny random models of the PrefixLM families, and Hugging Face's answers to judge by.

Each family module holds `Family` objects that write a complete checkpoint without any download
and compute reference log-probabilities with transformers alone. Nothing here but `check` imports
vLLM, so the references are independent of every engine; `engine` translates to and from it.

Not here, though vLLM opens their masks too: Molmo 2, BAGEL and Moondream 3 (transformers 5.19 has
no such models to judge by), DiffusionGemma (needs vLLM's V2 model runner) and DeepSeek V4 with
vision (sparse attention, which vLLM does not have on CPU).
"""

from .common import Answer, Family, Prompt, largest_difference, picture, sentence
from .gemma3 import GEMMA3
from .gemma4 import GEMMA4, GEMMA4_UNIFIED
from .paligemma import PALIGEMMA, PALIGEMMA2

FAMILIES = {
    family.name: family for family in (GEMMA3, GEMMA4, GEMMA4_UNIFIED, PALIGEMMA, PALIGEMMA2)
}

__all__ = [
    "FAMILIES",
    "GEMMA3",
    "GEMMA4",
    "GEMMA4_UNIFIED",
    "PALIGEMMA",
    "PALIGEMMA2",
    "Answer",
    "Family",
    "Prompt",
    "largest_difference",
    "picture",
    "sentence",
]
