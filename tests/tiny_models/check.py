"""Compare the references with what vLLM's engine computes: `python -m tests.tiny_models.check`.

Stock vLLM on CPU is expected to agree with the forced causal reference, and to be far from the
right one wherever there is a picture. That shows that checkpoints, processors and references mean
the same model on both sides, without any code of this project. With `--with-plugin` the installed
plugin is not kept out, and the right reference is the one to agree with.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import FAMILIES, Answer, Family, Prompt, engine, largest_difference

TOLERANCE = 1e-3
CLEAR = 0.1
NEW_TOKENS = 6


def cases(family: Family) -> dict[str, Prompt]:
    """The prompts that a family is compared on, by name."""
    prompts = {
        "text only": family.text_only(),
        "one image": family.text_image_text(),
        "long text": family.long_text(),
    }
    if not family.leading_image_only:
        prompts |= {
            "two images": family.several_images(2),
            "image first": family.image_first(seed=3, size=(64, 96)),
            "image last": family.image_last(seed=4),
        }
    return prompts


def engine_answers(
    family: Family, folder: Path, prompts: list[Prompt], new_tokens: int, **options: Any
) -> list[Answer]:
    """Greedy answers of vLLM's offline engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(**family.llm_arguments(folder, **options))
    outputs = llm.generate(
        engine.requests(prompts),
        SamplingParams(**engine.sampling(new_tokens)),
        use_tqdm=False,
    )
    return [engine.answer(output) for output in outputs]


def check(family: Family, with_plugin: bool, window: int | None) -> bool:
    """Print one line a prompt and tell whether the engine gave what is expected of it."""
    prompts = cases(family)
    texts, images = zip(*prompts.values(), strict=True)
    overrides = {} if window is None else {"sliding_window": window}
    with tempfile.TemporaryDirectory() as folder:
        path = family.build(Path(folder), **overrides)
        answers = engine_answers(
            family, path, list(prompts.values()), NEW_TOKENS, enforce_eager=True
        )
        right = family.reference_logprobs(path, texts, images, NEW_TOKENS)
        causal = family.reference_logprobs(path, texts, images, NEW_TOKENS, causal=True)
    passed = True
    for name, *row in zip(prompts, answers, right, causal, strict=True):
        to_right, to_causal = (largest_difference(row[0], reference) for reference in row[1:])
        wanted, other = (to_right, to_causal) if with_plugin else (to_causal, to_right)
        # Where the family's mask is causal by definition, both references are one.
        alike = largest_difference(row[1], row[2]) == 0
        passed &= wanted < TOLERANCE and (alike or other > CLEAR)
        print(f"{family.name:15} {name:12} {to_right:16.2e} {to_causal:16.2e}", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(FAMILIES), action="append")
    parser.add_argument("--with-plugin", action="store_true", help="let installed plugins load")
    parser.add_argument("--sliding-window", type=int, help="instead of the family's default")
    parser.add_argument("--here", action="store_true", help="run in this process, not in one each")
    options = parser.parse_args()
    names = options.family or list(FAMILIES)
    if options.here:
        arguments = options.with_plugin, options.sliding_window
        return not all(check(FAMILIES[name], *arguments) for name in names)

    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if not options.with_plugin:
        environment["VLLM_PLUGINS"] = ""
    print(f"{'family':15} {'prompt':12} {'to right mask':>16} {'to forced causal':>16}", flush=True)
    failed = []
    for name in names:
        command = [sys.executable, "-m", "tests.tiny_models.check", "--here", "--family", name]
        command += ["--with-plugin"] if options.with_plugin else []
        if options.sliding_window is not None:
            command += ["--sliding-window", str(options.sliding_window)]
        if subprocess.run(command, env=environment).returncode:
            failed.append(name)
    expected = "the right mask" if options.with_plugin else "forced causal"
    verdict = f"not so for {', '.join(failed)}" if failed else "so it is"
    print(f"expected to equal {expected} to {TOLERANCE:g} and clearly not the other: {verdict}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
