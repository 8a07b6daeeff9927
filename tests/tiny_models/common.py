"""What all tiny models share: words, pictures, prompts, random weights, the reference run."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.utils import logging as transformers_logging

WORDS = tuple(
    "a an the this that is are was in on of to and or not with look at here now then what which "
    "where who how many do you see describe picture image photo drawing compare first second "
    "third both left right top bottom red green blue yellow dark light circle square line cat "
    "dog bird tree house river mountain sky sun moon star road car boat cup book table window "
    "door hand eye man woman child city water fire stone small large old new fast slow one two "
    "three four five please answer question because before after under over near far again".split()
)
NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
VOCABULARY = 320
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "vision_use_head": False,
}
Size = tuple[int, int]


class Prompt(NamedTuple):
    """A prompt as vLLM takes it: text with placeholders, and the pictures in order."""

    text: str
    images: list[Image.Image]


class Answer(NamedTuple):
    """A greedy answer to one prompt, of Hugging Face or of an engine.

    `prompt_token_ids` is the prompt with its placeholders expanded; `tokens` are the T generated
    tokens, `logprobs` the float64 log-probabilities of shape (T, vocabulary) they came from.
    """

    prompt_token_ids: list[int]
    tokens: list[int]
    logprobs: torch.Tensor


class Parts(NamedTuple):
    """A checkpoint before it is saved: the model, its weights still to be drawn, its processor."""

    model: PreTrainedModel
    processor: ProcessorMixin


@dataclass(frozen=True)
class Family:
    """How one model family is built, prompted and judged.

    Attributes:
        name: short name, for tables and test ids.
        assemble: makes model and processor; its keyword arguments are `build`'s overrides.
        image_tokens: tokens that one picture takes with default settings.
        placeholder: the text that stands for one picture in a prompt for vLLM.
        type_key: the model input, one number a token, that Hugging Face makes its mask from.
        image_type, text_type: its value where tokens attend both ways and where they are causal.
        hidden_placeholder: what Hugging Face's processor wants before the prompt for each picture
            where vLLM inserts the picture by itself.
        leading_image_only: a prompt can hold one picture at most, in front.
        keeps_long_images: whether vLLM opens the mask for a picture longer than the window.
        explicit_masks: makes the mask inputs instead, where the model's own mask is not vLLM's.
        published_names: (start of a weight's name in transformers, in published checkpoints);
            the first that fits is replaced.
        engine_options: arguments of `vllm.LLM` that the family needs besides the common ones.
    """

    name: str
    assemble: Callable[..., Parts]
    image_tokens: int
    placeholder: str
    type_key: str
    image_type: int = 1
    text_type: int = 0
    hidden_placeholder: str = ""
    leading_image_only: bool = False
    keeps_long_images: bool = False
    explicit_masks: Callable[[torch.Tensor, PreTrainedConfig], Mapping[str, Any]] | None = None
    published_names: tuple[tuple[str, str], ...] = ()
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, folder: Path, *, seed: int = 0, gain: float = 1.5, **overrides: Any) -> Path:
        """Write a complete float32 checkpoint into `folder` and return it.

        Args:
            seed: of the random weights; the same arguments give the same bytes.
            gain: spread of the weights; more makes masks matter more, and rounding too.
            overrides: settings of the text model, such as `sliding_window=16`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, processor = self.assemble(**overrides)
            draw_weights(model, gain)
        tensors = model.state_dict()
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file(
            {self.published_name(name): tensor.contiguous() for name, tensor in tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        model.config.architectures = [type(model).__name__]
        model.config.dtype = torch.float32
        model.config.save_pretrained(folder)
        processor.save_pretrained(folder)
        return folder

    def published_name(self, name: str) -> str:
        """The name that a weight has in the family's published checkpoints."""
        for ours, theirs in self.published_names:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def llm_arguments(self, folder: Path, *, images: int = 8, **more: Any) -> dict[str, Any]:
        """Arguments with which `vllm.LLM` loads the checkpoint in `folder` and gives all logprobs.

        `images` is the most pictures a prompt may hold; `more` is added, or replaces.
        """
        limit = {"image": 1 if self.leading_image_only else images}
        limit |= self.engine_options.get("limit_mm_per_prompt", {})
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": "float32",
            "max_model_len": 2048,
            "max_logprobs": -1,
            "disable_log_stats": True,
        }
        return arguments | dict(self.engine_options) | {"limit_mm_per_prompt": limit} | more

    def prompt(self, *pieces: str | Image.Image) -> Prompt:
        """Join texts and pictures into a prompt, or raise ValueError if the family cannot."""
        images = [piece for piece in pieces if isinstance(piece, Image.Image)]
        if self.leading_image_only and images and images != list(pieces[:1]):
            raise ValueError(f"{self.name} takes one picture at most, before the text")
        texts = [piece if isinstance(piece, str) else self.placeholder for piece in pieces]
        return Prompt(" ".join(filter(None, texts)), images)

    def text_only(self, words: int = 12, seed: int = 0) -> Prompt:
        """A prompt of `words` words without a picture."""
        return self.prompt(sentence(seed, words))

    def text_image_text(self, seed: int = 0, size: Size = (80, 64), words: int = 8) -> Prompt:
        """A picture with `words` words on both sides; only behind it if the family wants that."""
        before = [] if self.leading_image_only else [sentence(seed, words)]
        return self.prompt(*before, picture(seed, size), sentence(seed + 1, words))

    def several_images(self, count: int = 2, seed: int = 0, size: Size = (80, 64)) -> Prompt:
        """Text, then `count` different pictures, each followed by text."""
        pieces: list[str | Image.Image] = [sentence(seed, 5)]
        for index in range(count):
            pieces += [picture(seed + index, size), sentence(seed + index + 1, 4 + index)]
        return self.prompt(*pieces)

    def image_first(self, seed: int = 0, size: Size = (80, 64)) -> Prompt:
        """A picture, then text."""
        return self.prompt(picture(seed, size), sentence(seed, 8))

    def image_last(self, seed: int = 0, size: Size = (80, 64)) -> Prompt:
        """Text, then a picture."""
        return self.prompt(sentence(seed, 8), picture(seed, size))

    def long_text(self, words: int = 600, seed: int = 0, image: bool = True) -> Prompt:
        """`words` words, with a picture after nine tenths of them (or in front)."""
        if not image:
            return self.text_only(words, seed)
        before = 0 if self.leading_image_only else words * 9 // 10
        head = [sentence(seed, before)] if before else []
        return self.prompt(*head, picture(seed, (80, 64)), sentence(seed + 1, words - before))

    def model_inputs(self, processor: ProcessorMixin, prompt: Prompt) -> dict[str, torch.Tensor]:
        """Hugging Face's tensors for one prompt, without those its masks are made from."""
        if prompt.images:
            text = self.hidden_placeholder * len(prompt.images) + prompt.text
            encoded = processor(text=text, images=prompt.images, return_tensors="pt")
        else:
            encoded = processor.tokenizer(prompt.text, return_tensors="pt")
        unwanted = {self.type_key, "token_type_ids", "mm_token_type_ids", "attention_mask"}
        unwanted |= {"labels", "num_crops", "num_soft_tokens_per_image"}
        return {name: value for name, value in encoded.items() if name not in unwanted}

    def both_ways(self, ids: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
        """Which tokens, of shape (1, T), vLLM lets attend both ways within their picture."""
        is_image = ids == config.image_token_id
        window = getattr(config.text_config, "sliding_window", None)
        if window is None or self.keeps_long_images:
            return is_image
        runs, lengths = is_image[0].unique_consecutive(return_counts=True)
        return (runs & (lengths <= window)).repeat_interleave(lengths)[None]

    def mask_inputs(self, types: torch.Tensor, config: PreTrainedConfig) -> Mapping[str, Any]:
        """What tells the model which tokens, of shape (1, T), attend both ways."""
        if self.explicit_masks:
            return self.explicit_masks(types, config)
        return {self.type_key: types}

    @torch.inference_mode()
    def reference_logprobs(
        self,
        folder: Path,
        prompts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        max_new_tokens: int,
        *,
        causal: bool = False,
        given: Sequence[Sequence[int]] | None = None,
    ) -> list[Answer]:
        """Greedy answers of Hugging Face transformers, one request at a time.

        Every step runs the whole sequence again with eager attention, so no cache can hide an
        error of the mask. The mask is the one that vLLM defines for the family: images attend both
        ways, one block an image, text is causal. With `causal=True` everything is causal, which is
        what an engine without image masks computes. End-of-sequence tokens do not stop it.

        Args:
            folder: a checkpoint written by `build`.
            prompts: texts with placeholders; `images`: for each text its pictures.
            given: the answers' tokens, where not the greedy ones are to be judged.
        """
        processor = AutoProcessor.from_pretrained(folder)
        model = load_model(folder)
        answers = []
        for index, (text, pictures) in enumerate(zip(prompts, images, strict=True)):
            inputs = self.model_inputs(processor, Prompt(text, list(pictures)))
            prompt_ids = inputs.pop("input_ids")
            both_ways = self.both_ways(prompt_ids, model.config) & (not causal)
            types = torch.where(both_ways, self.image_type, self.text_type)
            ids, rows = prompt_ids, []
            for _ in range(max_new_tokens):
                types = torch.nn.functional.pad(
                    types, (0, ids.shape[1] - types.shape[1]), value=self.text_type
                )
                mask = self.mask_inputs(types, model.config)
                output = model(input_ids=ids, **inputs, **mask, use_cache=False)
                rows.append(output.logits[0, -1].double().log_softmax(-1))
                token = int(rows[-1].argmax()) if given is None else given[index][len(rows) - 1]
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            generated = ids[0, prompt_ids.shape[1] :].tolist()
            answers.append(Answer(prompt_ids[0].tolist(), generated, torch.stack(rows)))
        return answers


def largest_difference(answer: Answer, reference: Answer) -> float:
    """Largest difference of log-probabilities, up to the first token the two disagree on.

    Raises ValueError if they do not answer the same prompt.
    """
    if answer.prompt_token_ids != reference.prompt_token_ids:
        raise ValueError(
            f"these answer different prompts: {answer.prompt_token_ids} and "
            f"{reference.prompt_token_ids}"
        )
    pairs = enumerate(zip(answer.tokens, reference.tokens, strict=True), start=1)
    comparable = next((n for n, (one, other) in pairs if one != other), len(answer.tokens))
    return float((answer.logprobs - reference.logprobs)[:comparable].abs().max())


def picture(seed: int, size: Size = (80, 64)) -> Image.Image:
    """A deterministic RGB picture of `size` (width, height): colour gradients and shapes."""
    rng = np.random.default_rng(seed)
    width, height = size
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    slopes = rng.uniform(-1, 1, (3, 2))
    waves = [np.sin(3 * (a * across + b * down) + 2 * i) for i, (a, b) in enumerate(slopes)]
    canvas = Image.fromarray(np.uint8(127.5 * (1 + np.stack(waves, -1))))
    draw = ImageDraw.Draw(canvas)
    for index in range(4):
        left, top = rng.uniform(0, 0.6, 2) * size
        right, bottom = (left, top) + rng.uniform(0.15, 0.4, 2) * size
        shape = draw.ellipse if index % 2 else draw.rectangle
        shape((left, top, right, bottom), fill=tuple(int(c) for c in rng.integers(0, 256, 3)))
    return canvas


def sentence(seed: int, words: int) -> str:
    """`words` words of the vocabulary, chosen by `seed`."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def make_tokenizer(
    named: Mapping[str, str], *, bos_by_default: bool = True
) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, padded with numbered ones to `VOCABULARY` entries.

    Args:
        named: further special tokens, by the attribute under which the processor looks them up.
        bos_by_default: whether an encoded text starts with `<bos>`.
    """
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *named.values()]
    entries = [*special, *NEWLINES, *WORDS]
    entries += [f"word{index}" for index in range(VOCABULARY - len(entries))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(entries)}, "<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in NEWLINES])
    if bos_by_default:
        tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", entries.index("<bos>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens=dict(named),
    )


def text_settings(**overrides: Any) -> dict[str, Any]:
    """Settings that the text models have in common, with `overrides` on top."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    return settings | overrides


def alternating_layers(settings: dict[str, Any]) -> dict[str, Any]:
    """Add layer types to `settings`, if it has none: sliding, full, sliding, full, ..."""
    kinds = itertools.cycle(["sliding_attention", "full_attention"])
    return {"layer_types": list(itertools.islice(kinds, settings["num_hidden_layers"]))} | settings


def draw_weights(model: Any, gain: float) -> None:
    """Draw matrices anew so that signals keep their size, and stir norms and biases a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(gain / math.sqrt(parameter[0].numel()) * noise)
        # Input and output embeddings are one matrix. Were it as large as the layers' updates, each
        # token would predict itself; the final norm gives the logits their spread back.
        embeddings = model.get_input_embeddings().weight
        embeddings.mul_(0.1)
        model.get_decoder().norm.weight.add_(9.0)
        # Hugging Face refuses a sequence with more placeholder tokens than picture features, so
        # they must never be generated: their logit is 0, which is far from the largest.
        for modality in ("image", "video", "audio"):
            if (token := getattr(model.config, f"{modality}_token_id", None)) is not None:
                embeddings[token] = 0


def load_model(folder: Path) -> PreTrainedModel:
    """Load a checkpoint in float32 with eager attention; refuse one with missing weights."""
    with no_progress_bars():
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    model, report = loaded
    problems = {kind: names for kind, names in report.items() if names}
    if problems:
        raise RuntimeError(f"the checkpoint in {folder} does not fit its model: {problems}")
    return model.eval()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' loading bars out of tables and test output."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
