"""Prompts and answers in the form that vLLM's engine takes and gives; does not import vLLM."""

from collections.abc import Sequence
from typing import Any

import torch

from .common import Answer, Prompt


def requests(prompts: Sequence[Prompt]) -> list[Any]:
    """What `vllm.LLM.generate` takes for `prompts`."""
    return [
        {"prompt": text} | ({"multi_modal_data": {"image": images}} if images else {})
        for text, images in prompts
    ]


def sampling(new_tokens: int) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` for greedy answers with every log-probability."""
    return {
        "temperature": 0,
        "max_tokens": new_tokens,
        "logprobs": -1,
        "ignore_eos": True,
        "detokenize": False,
    }


def answer(output: Any) -> Answer:
    """The first answer in a `vllm.RequestOutput` that was made with `sampling`."""
    return answers(output)[0]


def answers(output: Any) -> list[Answer]:
    """All answers in it, several where `n` of them were asked for."""
    return [
        Answer(
            list(output.prompt_token_ids),
            list(completion.token_ids),
            torch.tensor(
                [[row[token].logprob for token in range(len(row))] for row in completion.logprobs],
                dtype=torch.float64,
            ),
        )
        for completion in output.outputs
    ]
