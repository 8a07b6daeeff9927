# SPDX-License-Identifier: Apache-2.0
"""A Gemma 3 of the 4B model's layer shapes, and processes that serve it: vLLM with this project,
stock vLLM, and Hugging Face transformers. Each lives in a process of its own and answers one
command at a time, so that they can be measured in turns on the same cores."""

import dataclasses
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.tiny_models import GEMMA3, Family, Prompt, gemma3, picture, sentence
from tests.tiny_models.common import SIGLIP, Parts

OURS, STOCK, HUGGING_FACE = "this project", "stock vLLM", "transformers"
IMAGE_TOKENS = 256
WINDOW = 1024
LAYERS = ("sliding_attention", "sliding_attention", "full_attention")
TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": WINDOW,
    "layer_types": list(LAYERS),
}
VISION = SIGLIP | {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "image_size": 224,
}


def assemble(**text: Any) -> Parts:
    """Gemma 3 4B's layers, three of them, with a picture of 256 tokens and two vision layers."""
    saved = gemma3.SIGLIP, gemma3.IMAGE_TOKENS
    gemma3.SIGLIP, gemma3.IMAGE_TOKENS = VISION, IMAGE_TOKENS
    try:
        return gemma3.assemble(**TEXT | text)
    finally:
        gemma3.SIGLIP, gemma3.IMAGE_TOKENS = saved


FAMILY: Family = dataclasses.replace(GEMMA3, assemble=assemble, image_tokens=IMAGE_TOKENS)


def model(folder: Path, **text: Any) -> Path:
    """The checkpoint, written into `folder` unless it is there; `text` changes its layers."""
    written = folder / "written"
    if not written.exists():
        FAMILY.build(folder, **text)
        written.touch()
    return folder


def text_prompts(count: int, words: int = 128) -> list[Prompt]:
    return [FAMILY.text_only(words, seed) for seed in range(count)]


def image_prompts(count: int, images: Sequence[int] = (1, 2, 3, 4)) -> list[Prompt]:
    """`count` prompts, with as many pictures as `images` says in turns, and text around each."""
    prompts = []
    for number in range(count):
        pieces: list[Any] = [sentence(number, 20)]
        for index in range(images[number % len(images)]):
            pieces += [picture(10 * number + index, (224, 224)), sentence(number + index, 20)]
        prompts.append(FAMILY.prompt(*pieces))
    return prompts


@dataclasses.dataclass(frozen=True)
class Served:
    """How one batch was served, in seconds from its arrival."""

    first_tokens: list[float]
    """Of each request."""
    end: float
    tokens: int
    """Generated in all."""
    attention: float = 0.0
    """Spent in attention layers until every request had its first token, where it was asked for."""
    prompt_lens: tuple[int, ...] = ()

    @property
    def time_to_first_token(self) -> float:
        return float(np.mean(self.first_tokens))

    @property
    def decode(self) -> float:
        """Per token, after every request has its first."""
        return (self.end - max(self.first_tokens)) / (self.tokens - len(self.first_tokens))


class Engine:
    """One of the three in a process of its own."""

    def __init__(self, who: str, folder: Path, dtype: str = "bfloat16", **options: Any) -> None:
        self.who = who
        # Before the process starts, since vLLM and OpenMP read them as they are imported.
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if who == STOCK:
            environment["VLLM_PLUGINS"] = ""
        saved = dict(os.environ)
        os.environ.update(environment)
        try:
            context = multiprocessing.get_context("spawn")
            self.pipe, other = context.Pipe()
            self.process = context.Process(
                target=_serve, args=(other, who, folder, dtype, options), daemon=True
            )
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(saved)
        other.close()
        self.started = False

    def serve(self, prompts: Sequence[Prompt], new_tokens: int, attention: bool = False) -> Served:
        """Answer the prompts, which arrive together, greedily with `new_tokens` tokens each.

        Raises:
            RuntimeError: the process failed; holds its traceback.
        """
        if not self.started:
            self._answer()
            self.started = True
        self.pipe.send((prompts, new_tokens, attention))
        return self._answer()

    def _answer(self) -> Any:
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.who} failed:\n{answer}")
        return answer

    def close(self) -> None:
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()


def _serve(pipe: Any, who: str, folder: Path, dtype: str, options: dict[str, Any]) -> None:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        make = _hugging_face if who == HUGGING_FACE else _vllm
        answer = make(folder, dtype, options)
        pipe.send(None)
        while True:
            pipe.send(answer(*pipe.recv()))
    except (EOFError, BrokenPipeError):
        return
    except Exception:
        pipe.send(traceback.format_exc())


def _vllm(folder: Path, dtype: str, options: dict[str, Any]) -> Callable[..., Served]:
    from vllm import LLM, SamplingParams

    from tests.tiny_models import engine as requests

    settings: dict[str, Any] = {
        "dtype": dtype,
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "max_num_seqs": 32,
        "max_logprobs": 0,
    }
    llm = LLM(**FAMILY.llm_arguments(folder, **settings | options))
    engine = llm.llm_engine
    clock = _Clock()

    def answer(prompts: Sequence[Prompt], new_tokens: int, attention: bool) -> Served:
        sampling = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        clock.watch(attention)
        began = time.perf_counter()
        for number, request in enumerate(requests.requests(prompts)):
            engine.add_request(str(number), request, sampling)
        first: dict[str, float] = {}
        lengths: dict[str, int] = {}
        tokens = 0
        attending = 0.0
        while engine.has_unfinished_requests():
            outputs: list[Any] = engine.step()
            attending = attending if len(first) == len(prompts) else clock.seconds
            for output in outputs:
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - began)
                if output.finished:
                    tokens += len(output.outputs[0].token_ids)
                    lengths[output.request_id] = len(output.prompt_token_ids)
        end = time.perf_counter() - began
        names = [str(number) for number in range(len(prompts))]
        return Served(
            [first[name] for name in names],
            end,
            tokens,
            attending,
            tuple(lengths[name] for name in names),
        )

    return answer


class _Clock:
    """Adds up what CPU_ATTN's forward takes while it watches; stock calls it once a layer."""

    def __init__(self) -> None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        self.seconds = 0.0
        self.impl: Any = CPUAttentionBackendImpl
        self.forward = self.impl.forward

    def watch(self, on: bool) -> None:
        self.seconds = 0.0
        self.impl.forward = self.timed() if on else self.forward

    def timed(self) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return self.forward(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return forward


def _hugging_face(folder: Path, dtype: str, options: dict[str, Any]) -> Callable[..., Served]:
    from transformers import AutoModelForImageTextToText, AutoProcessor, StoppingCriteriaList
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    processor: Any = AutoProcessor.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model.eval()
    processor.tokenizer.padding_side = "left"

    @torch.inference_mode()
    def answer(prompts: Sequence[Prompt], new_tokens: int, attention: bool) -> Served:
        times: list[float] = []

        def note(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter() - began)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        began = time.perf_counter()
        inputs = processor(
            text=[prompt.text for prompt in prompts],
            images=[prompt.images for prompt in prompts] if prompts[0].images else None,
            padding=True,
            return_tensors="pt",
        )
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        made = model.generate(
            **inputs,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([note]),
        )
        end = time.perf_counter() - began
        tokens = (made.shape[1] - inputs["input_ids"].shape[1]) * len(prompts)
        return Served([times[0]] * len(prompts), end, tokens)

    return answer
