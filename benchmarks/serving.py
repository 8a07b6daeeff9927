# SPDX-License-Identifier: Apache-2.0
"""Text-only serving, decode, and prompts with images, end to end through the engines."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.engines import (
    HUGGING_FACE,
    IMAGE_TOKENS,
    LAYERS,
    OURS,
    STOCK,
    WINDOW,
    Engine,
    Served,
    image_prompts,
    model,
    text_prompts,
)
from benchmarks.harness import Pairs, Row, Target, at_least, in_turns
from benchmarks.prefill import pairs_attended
from tests.tiny_models import Prompt
from tests.v1.attention.cpu_kernel import Request

PROFILE = (
    "Serving: beside the kernels a step's own cost is the routing decision and the metadata, once "
    "per KV cache group; both were cut down above until they are lost in the noise of a step."
)
FOLDER = Path(__file__).resolve().parent.parent / "out" / "benchmarks" / "models"
Quantity = Callable[[Served], float]


def run(quick: bool) -> Iterator[Row]:
    """One engine each of ours, stock and transformers, all alive, asked in turns."""
    if quick:  # a quarter as wide, and not compiled
        folder = model(FOLDER / "narrow", hidden_size=640, intermediate_size=2560)
    else:
        folder = model(FOLDER / "wide")
    engines = {who: Engine(who, folder, enforce_eager=quick) for who in (OURS, STOCK)}
    try:
        yield from _text_and_decode(engines, quick)
        engines[HUGGING_FACE] = Engine(HUGGING_FACE, folder)
        yield from _end_to_end(engines, quick)
    finally:
        for engine in engines.values():
            engine.close()


def per_token(served: Served) -> float:
    """Seconds a generated token, prefill included."""
    return served.end / served.tokens


def _text_and_decode(engines: dict[str, Engine], quick: bool) -> Iterator[Row]:
    new_tokens = 8 if quick else 64
    for batch, pairs in ((1, 3), (8, 3)) if quick else ((1, 15), (8, 11), (32, 7)):
        text = _in_turns(engines, STOCK, text_prompts(batch), new_tokens, pairs)
        images = _in_turns(engines, STOCK, image_prompts(batch, [1]), new_tokens, pairs)
        for topic, served, quantity in (
            ("text-only serving", text, per_token),
            ("decode of text", text, lambda s: s.decode),
            ("decode after an image", images, lambda s: s.decode),
        ):
            yield _row(
                f"{topic}, time a token", f"batch {batch}", STOCK, served, quantity, at_least(0.99),
                panel="serving by batch", series=topic, x=batch,
            )  # fmt: skip


def _end_to_end(engines: dict[str, Engine], quick: bool) -> Iterator[Row]:
    count, new_tokens = (4, 8) if quick else (16, 64)
    prompts = image_prompts(count)
    name = f"{count} requests with 1 to 4 images, {new_tokens} tokens out"
    served = _in_turns(engines, STOCK, prompts, new_tokens, 2 if quick else 5)
    watched = engines[STOCK].serve(prompts, new_tokens, attention=True)
    share = _share(prompts, watched.prompt_lens)
    beside = f"{STOCK} ({100 * (1 - 1 / share):.1f} % fewer prefill pairs)"
    metrics: list[tuple[str, Quantity, float, float]] = [
        ("time a token", per_token, watched.end, 3),
        ("time to first token", lambda s: s.time_to_first_token, max(watched.first_tokens), 1.8),
    ]
    for what, quantity, whole, _ in metrics:
        attending = watched.attention / whole
        yield _row(f"end to end, {what}", name, beside, served, quantity, at_least(0.95))
        yield _row(
            f"end to end, {what}",
            f"{name}; share taken out ({100 * attending:.1f} % of stock's time is prefill's "
            "attention)",
            beside,
            served,
            quantity,
            at_least(0.97),
            # What stock would take if it attended as many pairs.
            factor=1 + attending * (share - 1),
        )
    served = _in_turns(engines, HUGGING_FACE, prompts, new_tokens, 1 if quick else 2)
    for what, quantity, _, bound in metrics:
        yield _row(
            f"end to end, {what}", name, "transformers, SDPA, one batch", served, quantity,
            at_least(bound),
        )  # fmt: skip


def _in_turns(
    engines: dict[str, Engine], other: str, prompts: Sequence[Prompt], new_tokens: int, pairs: int
) -> list[tuple[Served, Served]]:
    """Ours and the other's, pair by pair, after a warm-up of each; at most for half a minute,
    once there are three."""
    order = [OURS, other]
    for who in order:
        engines[who].serve(prompts, 2)
    taken = []
    for turn in in_turns(pairs, limit=30):
        answers = {who: engines[who].serve(prompts, new_tokens) for who in (order[i] for i in turn)}
        taken.append((answers[OURS], answers[other]))
    return taken


def _row(
    topic: str,
    what: str,
    against: str,
    served: Sequence[tuple[Served, Served]],
    quantity: Quantity,
    target: Target,
    *,
    factor: float = 1.0,
    panel: str = "",
    series: str = "",
    x: float = 0,
) -> Row:
    times = np.array([[quantity(one) for one in pair] for pair in served])
    pairs = Pairs(times[:, 0], times[:, 1])
    return pairs.row(
        topic, what, against, pairs.speedup * factor, unit="ms", target=target,
        panel=panel, series=series, x=x,
    )  # fmt: skip


def _share(prompts: Sequence[Prompt], lengths: Sequence[int]) -> float:
    """How many times the query-key pairs of the causal mask the image mask has, over all layers
    and prompts' prefills."""
    ours = stock = 0
    for prompt, length in zip(prompts, lengths, strict=True):
        # Where the images stand does not change how many pairs they add, up to the window.
        room = (length - len(prompt.images) * IMAGE_TOKENS) // (len(prompt.images) + 1)
        starts = [room + index * (IMAGE_TOKENS + room) for index in range(len(prompt.images))]
        images = [(start, start + IMAGE_TOKENS - 1) for start in starts]
        for layer in LAYERS:
            window = WINDOW if layer == "sliding_attention" else None
            ours += pairs_attended(Request(length, length, images), window)
            stock += pairs_attended(Request(length, length), window)
    return ours / stock
