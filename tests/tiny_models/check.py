"""Compare the references with what vLLM's engine computes: `python -m tests.tiny_models.check`.

Stock vLLM on CPU is expected to agree with the forced causal reference everywhere, and with the
right one on text only. That shows that checkpoints, processors and references mean the same model
on both sides, without any code of this project. With `--with-plugin` the installed plugin is not
kept out, and the right reference is the one to agree with.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from . import FAMILIES, Family, Prompt, Reference

TOLERANCE = 1e-3
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
) -> list[Reference]:
    """Greedy answers of vLLM's offline engine, in the references' form."""
    from vllm import LLM, SamplingParams

    llm = LLM(**family.llm_arguments(folder, enforce_eager=True, **options))
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, logprobs=-1, ignore_eos=True, detokenize=False
    )
    requests = [
        {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}
        for text, images in prompts
    ]
    answers = []
    for output in llm.generate(requests, sampling, use_tqdm=False):
        completion = output.outputs[0]
        rows = [[row[token].logprob for token in range(len(row))] for row in completion.logprobs]
        answers.append(
            Reference(
                list(output.prompt_token_ids),
                list(completion.token_ids),
                torch.tensor(rows, dtype=torch.float64),
            )
        )
    return answers


def difference(answer: Reference, reference: Reference) -> float:
    """Largest difference of log-probabilities up to the first token that the two disagree on."""
    if answer.prompt_token_ids != reference.prompt_token_ids:
        raise ValueError(
            f"the prompt was encoded as {answer.prompt_token_ids} by vLLM and as "
            f"{reference.prompt_token_ids} by transformers"
        )
    pairs = zip(answer.tokens, reference.tokens, strict=True)
    agreeing = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    compared = len(answer.tokens) if agreeing is None else agreeing + 1
    return float((answer.logprobs - reference.logprobs)[:compared].abs().max())


def check(family: Family, with_plugin: bool) -> bool:
    """Print one line a prompt and tell whether the engine agreed with the expected reference."""
    prompts = cases(family)
    texts, images = zip(*prompts.values(), strict=True)
    with tempfile.TemporaryDirectory() as folder:
        path = family.build(Path(folder))
        answers = engine_answers(family, path, list(prompts.values()), NEW_TOKENS)
        right = family.reference_logprobs(path, texts, images, NEW_TOKENS)
        causal = family.reference_logprobs(path, texts, images, NEW_TOKENS, causal=True)
    agrees = True
    for name, *row in zip(prompts, answers, right, causal, strict=True):
        answer, *references = row
        to_right, to_causal = (difference(answer, reference) for reference in references)
        agrees &= (to_right if with_plugin else to_causal) < TOLERANCE
        print(f"{family.name:12} {name:12} {to_right:16.2e} {to_causal:16.2e}", flush=True)
    return agrees


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(FAMILIES), action="append")
    parser.add_argument("--with-plugin", action="store_true", help="let installed plugins load")
    parser.add_argument("--here", action="store_true", help="run in this process, not in one each")
    options = parser.parse_args()
    names = options.family or list(FAMILIES)
    if options.here:
        return not all([check(FAMILIES[name], options.with_plugin) for name in names])

    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if not options.with_plugin:
        environment["VLLM_PLUGINS"] = ""
    print(f"{'family':12} {'prompt':12} {'to right mask':>16} {'to forced causal':>16}")
    failed = []
    for name in names:
        command = [sys.executable, "-m", __spec__.name, "--here", "--family", name]
        command += ["--with-plugin"] if options.with_plugin else []
        if subprocess.run(command, env=environment).returncode:
            failed.append(name)
    expected = "the right mask" if options.with_plugin else "forced causal"
    print(f"expected to equal {expected} to {TOLERANCE:g}:", failed or "all do")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
