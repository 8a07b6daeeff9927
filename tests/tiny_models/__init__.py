"""Tiny random models of the PrefixLM families, and Hugging Face's answers to judge by.

Each family module holds `Family` objects that write a complete checkpoint without any download
and compute reference log-probabilities with transformers alone. vLLM is imported by `check`
only, so the references are independent of every engine.
"""

from .common import Family, Prompt, Reference, picture, sentence
from .gemma3 import GEMMA3

FAMILIES = {family.name: family for family in (GEMMA3,)}

__all__ = ["FAMILIES", "GEMMA3", "Family", "Prompt", "Reference", "picture", "sentence"]
