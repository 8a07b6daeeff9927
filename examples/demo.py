"""The same prompts with a real picture, answered three ways: stock vLLM, vLLM with this project,
and Hugging Face transformers as the judge.

Builds a small Gemma 3 with random weights and a local tokenizer, so nothing is downloaded. Prints
the next token's log-probabilities and the largest difference to transformers, and writes a picture
of the attention mask that each engine's kernel applies to the prompt. Exits with status 1 unless
stock vLLM differs from transformers and this project agrees with it to 1e-3.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.engine import WITHOUT_PLUGIN, references, run_engine  # noqa: E402
from tests.tiny_models import GEMMA3, Answer, Prompt, largest_difference  # noqa: E402

TOLERANCE = 1e-3
NEW_TOKENS = 8
WINDOW = 32
DRAWN = "one picture"
STOCK, OURS = "stock vLLM", "this project"
BACKENDS = {
    STOCK: "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
    OURS: "vllm.v1.attention.backends.cpu_prefix_attn.CPUPrefixAttentionBackend",
}


def prompts() -> dict[str, Prompt]:
    """What is asked, by the name it has in the table."""
    return {
        "text only": GEMMA3.text_only(),
        "one picture": GEMMA3.text_image_text(),
        "two pictures": GEMMA3.several_images(2),
        "picture first": GEMMA3.image_first(seed=3),
    }


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is going on and how long it took."""
    print(f"{what} ...", end=" ", flush=True)
    began = time.monotonic()
    yield
    print(f"{time.monotonic() - began:.1f} s", flush=True)


def ask_engine(who: str, model: Path) -> list[Answer]:
    """Answer the prompts with vLLM's offline engine, in a process of its own."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"} | (WITHOUT_PLUGIN if who == STOCK else {})
    asked = [list(prompts().values())]
    run = run_engine(
        GEMMA3, model, asked, new_tokens=NEW_TOKENS, environment=quiet, enforce_eager=True
    )
    return run.answers[0]


def applied_masks(token_ids: list[int]) -> dict[str, torch.Tensor]:
    """(tokens, tokens) bool for each engine: the keys that each query of this prompt attends, asked
    of the kernel itself."""
    from vllm.plugins import load_general_plugins
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from tests.v1.attention.cpu_kernel import visible_keys

    load_general_plugins()
    soft_token = max(set(token_ids), key=token_ids.count)  # each picture is a row of this one
    image = [i for i, token in enumerate(token_ids) if token == soft_token]
    return {
        who: visible_keys(
            resolve_obj_by_qualname(path), len(token_ids), [(image[0], image[-1])], WINDOW
        )
        for who, path in BACKENDS.items()
    }


def draw_masks(masks: dict[str, torch.Tensor], to: Path) -> None:
    """Draw both engines' masks of one prompt side by side as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    causal, ours = masks[STOCK], masks[OURS]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 5.4), sharey=True, layout="constrained")
    colours = ListedColormap(["#f4f4f4", "#33658a", "#f26419"])
    for axis, (who, mask) in zip(axes, masks.items(), strict=True):
        axis.imshow(mask.int() + (mask & ~causal).int(), cmap=colours, vmin=0, vmax=2)
        axis.set_title(who)
        axis.set_xlabel("key position")
    axes[0].set_ylabel("query position")
    added = int((ours & ~causal).sum())
    figure.suptitle(
        f"Keys that each query attends, sliding-window layer of {WINDOW}\n"
        f"blue: attended by both   orange: {added} pairs inside the picture that stock vLLM hides"
    )
    figure.savefig(to, dpi=110)


def print_table(answers: dict[str, list[Answer]], judge: list[Answer]) -> dict[str, float]:
    """Print the table and return each engine's largest difference to the judge."""
    print(f"\n{'log-probability of the next token':36}{'transformers':>14}", end="")
    print("".join(f"{who:>14}" for who in answers))
    for index, name in enumerate(prompts()):
        token = judge[index].tokens[0]
        row = [judge[index], *(given[index] for given in answers.values())]
        print(f"  {name:34}" + "".join(f"{float(r.logprobs[0, token]):14.4f}" for r in row))
    largest = {who: max(map(largest_difference, given, judge)) for who, given in answers.items()}
    print(f"{'largest difference to transformers':50}", end="")
    print("".join(f"{value:14.1e}" for value in largest.values()))
    print(f"  (whole vocabulary, {NEW_TOKENS} tokens a prompt, up to the first other choice)\n")
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--png", type=Path, default=ROOT / "out" / "mask.png", help="the picture")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with step("Building a small Gemma 3 with random weights"):
            model = GEMMA3.build(Path(folder), sliding_window=WINDOW)
        asked = list(prompts().values())
        with step(f"Asking transformers for {NEW_TOKENS} tokens of {len(asked)} prompts"):
            judge = references(GEMMA3, model, asked, NEW_TOKENS)
        answers = {}
        for who in BACKENDS:
            with step(f"Asking vLLM's engine: {who}"):
                answers[who] = ask_engine(who, model)
    logging.disable(logging.WARNING)
    with step("Asking both kernels which keys they attend"):
        masks = applied_masks(judge[list(prompts()).index(DRAWN)].prompt_token_ids)

    largest = print_table(answers, judge)
    options.png.parent.mkdir(parents=True, exist_ok=True)
    draw_masks(masks, options.png)
    print(f"The attention masks of '{DRAWN}' are drawn in {options.png}")
    stock_differs, ours_agrees = largest[STOCK] > TOLERANCE, largest[OURS] < TOLERANCE
    if stock_differs and ours_agrees:
        print(
            "This project agrees with transformers; stock vLLM does not: it lets no image token "
            "see the rest of its picture."
        )
        return 0
    print(
        f"NOT as it should be: stock vLLM {'differs' if stock_differs else 'agrees'} and this "
        f"project {'agrees' if ours_agrees else 'differs'}."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
