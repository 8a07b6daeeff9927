# SPDX-License-Identifier: Apache-2.0
"""The subcommand `explain`: which attention backend vLLM would take for each kind of a model's
decoder layers on this machine, and what speaks against each other candidate."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

EPILOG = """\
MODEL is a folder or a name, as vLLM takes it; only its configuration is read. What follows it and
is not listed above goes to vLLM: --kv-cache-dtype fp8, --dtype bfloat16, --attention-backend ...
Without MODEL, the layer is described by --head-size and the other options.

examples:
  python -m vllm.plugins.composite_attention explain google/gemma-3-4b-it --kv-cache-dtype fp8
  python -m vllm.plugins.composite_attention explain --head-size 256 --kv-cache-dtype fp8

exit status: 0 every layer gets a backend; 1 the engine would not start; 2 misuse
"""


class Layer(NamedTuple):
    """A kind of decoder layer."""

    layers: int
    head_size: int
    windowed: bool
    num_heads: int


class Answer(NamedTuple):
    """What a kind of layer gets."""

    layer: Layer

    chosen: str | None
    """The backend's name; None where the choice is refused."""

    reason: str
    """Why it is that one: `automatic`, or who has asked for it; or the refusal's sentence."""

    candidates: list[Any]
    """`choosing.Candidate`s: those considered when nobody asks, the best first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's arguments to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.usage = "%(prog)s [-h] [--json] MODEL [vLLM's arguments ...]\n"
    parser.usage += "       %(prog)s [-h] [--json] --head-size N [options]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help="whose layers; see below")
    parser.add_argument("--dtype", metavar="T", help="default: the model's, or bfloat16")
    parser.add_argument("--kv-cache-dtype", metavar="T", help="default: auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    layer = parser.add_argument_group("a layer of no model")
    layer.add_argument("--head-size", type=positive, metavar="N", help="elements of one head")
    layer.add_argument("--num-heads", type=positive, metavar="N", help="default: 8")
    layer.add_argument("--window", action="store_true", help="it has a sliding window")
    layer.add_argument("--causal", action="store_true", help="it needs no image mask")


def positive(text: str) -> int:
    """A number from the command line, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 1")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Print the answers; the exit status, 1 where a choice is refused.

    Raises:
        ValueError: neither or both of a model and a layer are given.
    """
    if (arguments.model is None) == (arguments.head_size is None):
        raise ValueError("Give a MODEL, or describe a layer with --head-size N.")
    if arguments.model and (arguments.window or arguments.causal or arguments.num_heads):
        raise ValueError("--window, --causal and --num-heads describe a layer of no MODEL.")
    arguments.num_heads = arguments.num_heads or 8
    try:
        title, found = answers(arguments)
    except _RefusedError as error:
        if arguments.json:
            print(json.dumps({"refused": str(error)}, indent=2))
        print(f"The engine would not start: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps([a._asdict() | {"layer": a.layer._asdict()} for a in found], indent=2))
    else:
        none = [] if found else ["", "It has no layers of attention among its decoder's."]
        print("\n".join([title, *none, *(line for answer in found for line in as_text(answer))]))
    return int(any(answer.chosen is None for answer in found))


class _RefusedError(Exception):
    """vLLM takes no such arguments or model."""


def answers(arguments: argparse.Namespace) -> tuple[str, list[Answer]]:
    """A line on what was asked about, and what each kind of its decoder layers gets."""
    from vllm.config import set_current_vllm_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    settings, layers, masked, asked = (
        _of_no_model(arguments) if arguments.model is None else _of_model(arguments)
    )
    with set_current_vllm_config(settings):
        found = [_answer(layer, settings, masked, asked) for layer in layers]
    from vllm.platforms import current_platform

    images = "image tokens attend both ways" if masked else "causal throughout"
    what = arguments.model or "a layer of no model"
    return f"{what} on {_device(current_platform)}: {images}", found


def _of_model(arguments: argparse.Namespace) -> tuple[Any, list[Layer], bool, bool]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins.composite_attention.selection import asked_by_environment
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="explain"))
    named = {"--dtype": arguments.dtype, "--kv-cache-dtype": arguments.kv_cache_dtype}
    ours = [part for name, value in named.items() if value for part in (name, value)]
    given, unknown = parser.parse_known_args(["--model", arguments.model, *ours, *arguments.rest])
    if unknown:
        raise ValueError(f"Neither this command nor vLLM takes {' '.join(unknown)}.")
    try:
        engine = EngineArgs.from_cli_args(given)
        asked = engine.attention_backend or engine.attention_config.backend
        asked = asked or asked_by_environment()
        settings = engine.create_engine_config()
        layers = layers_of(settings)
    except Exception as error:  # a configuration can be wrong in any way
        raise _RefusedError(_sentence(error)) from error
    masked = settings.model_config.is_mm_prefix_lm
    return settings, layers, masked, asked is not None


def _of_no_model(arguments: argparse.Namespace) -> tuple[Any, list[Layer], bool, bool]:
    import torch
    from vllm.plugins.composite_attention import one_layer
    from vllm.plugins.composite_attention.selection import asked_by_environment
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if arguments.rest:
        raise ValueError(f"{' '.join(arguments.rest)} goes to vLLM, with a MODEL only.")
    dtype = getattr(torch, arguments.dtype or "bfloat16", None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{arguments.dtype} is no floating-point dtype, such as bfloat16.")
    layer = AttentionSelectorConfig(
        arguments.head_size, dtype, arguments.kv_cache_dtype or "auto", None
    )
    try:
        settings = one_layer.vllm_config(
            layer, arguments.num_heads, arguments.num_heads, masked=not arguments.causal
        )
        settings.attention_config.backend = asked_by_environment()
    except Exception as error:  # no layer of no model can be any size
        raise _RefusedError(_sentence(error)) from error
    kind = Layer(1, arguments.head_size, arguments.window, arguments.num_heads)
    asked = settings.attention_config.backend is not None
    return settings, [kind], not arguments.causal, asked


def layers_of(settings: Any) -> list[Layer]:
    """The kinds of a model's layers with attention, by its configuration; of a model with an
    encoder besides, the decoder's.

    Raises:
        ValueError: the configuration names the types of fewer layers than there are.
    """
    model, parallel = settings.model_config, settings.parallel_config
    text = model.hf_text_config
    number = 0 if model.is_attention_free else model.model_arch_config.total_num_hidden_layers
    types = getattr(text, "layer_types", None)
    blocks = (getattr(text, "layers_block_type", None) or types) if model.is_hybrid else None
    for names in (types, blocks):
        if names is not None and len(names) < number:
            raise ValueError(f"The model has {number} layers and types of {len(names)}.")
    window = getattr(text, "sliding_window", None)
    kinds: dict[Layer, int] = {}
    for i in range(number):
        if blocks is not None and not _attends(blocks[i]):
            continue
        sizes = model.model_arch_config[i]
        windowed = bool(window) and (types is None or "sliding" in types[i])
        heads = model.get_num_attention_heads(parallel, sizes)
        kind = Layer(0, sizes.head_size, windowed, heads)
        kinds[kind] = kinds.get(kind, 0) + 1
    return [kind._replace(layers=count) for kind, count in kinds.items()]


def _attends(block: str) -> bool:
    """Whether a layer of this type, in a model that mixes them, has attention over a KV cache."""
    return block == "hybrid" or ("attention" in block and "linear" not in block)


def _answer(layer: Layer, settings: Any, masked: bool, asked: bool) -> Answer:
    from vllm.platforms import current_platform
    from vllm.plugins.composite_attention import choosing, one_layer
    from vllm.plugins.composite_attention.pairs import spelled
    from vllm.utils.import_utils import resolve_obj_by_qualname

    question = _question(layer, settings, masked)
    named = settings.attention_config.backend
    candidates: list[Any] = []
    chosen: str | None
    try:
        candidates += choosing.candidates(current_platform, question, layer.num_heads)
        path = current_platform.get_attn_backend_cls(named, question, layer.num_heads)
        backend = resolve_obj_by_qualname(path)
        chosen = spelled(backend.get_name())
        reason = _reason(named and spelled(named.name), chosen, asked)
        if named is not None and choosing.is_composite(backend):
            refusal = one_layer.refusal(named.name, question, layer.num_heads, layer.num_heads)
            chosen, reason = (chosen, reason) if refusal is None else (None, refusal)
    except Exception as error:  # whatever a backend raises
        chosen, reason = None, _sentence(error)
    return Answer(layer, chosen, reason, candidates)


def _reason(named: str | None, chosen: str, asked: bool) -> str:
    if asked:
        return f"{named} was asked for" + ("" if named == chosen else ", not taken by vLLM here")
    return "the model asks for it" if named == chosen else "automatic"


def _question(layer: Layer, settings: Any, masked: bool) -> Any:
    """vLLM's `AttentionSelectorConfig` for this layer, as vLLM itself makes it."""
    from vllm.v1.attention import selector

    asked: dict[str, Any] = {}
    with _replaced(selector, "_cached_get_attn_backend", asked.update):
        selector.get_attn_backend(
            layer.head_size,
            settings.model_config.dtype,
            settings.cache_config.cache_dtype,
            use_mla=settings.model_config.use_mla,
            use_mm_prefix=masked,
            has_sliding_window=layer.windowed,
            attn_type=_attn_type(settings.model_config),
            num_heads=layer.num_heads,
        )
    return asked["attn_selector_config"]


def _attn_type(model: Any) -> str:
    from vllm.v1.attention.backend import AttentionType

    encodes = model.attn_type == AttentionType.ENCODER_ONLY
    return AttentionType.ENCODER_ONLY if encodes else AttentionType.DECODER


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)


def as_text(answer: Answer) -> Iterator[str]:
    """For a terminal: the layer, what it gets, and each other candidate with what speaks against
    it."""
    layer = answer.layer
    window = ", sliding window" if layer.windowed else ""
    number = f"{layer.layers} layer{'s' if layer.layers > 1 else ''}"
    yield ""
    yield f"{number}: head size {layer.head_size}{window}"
    yield f"  {answer.chosen or 'refused'}  ({answer.reason})"
    others = [(name, reasons) for name, reasons in answer.candidates if name != answer.chosen]
    wide = max((len(name) for name, _ in others), default=0)
    for name, reasons in others:
        yield f"    {name:{wide}}  {'; '.join(reasons) or 'could serve'}"


def _device(platform: Any) -> str:
    capability = platform.get_device_capability()
    if capability is None:
        return platform.device_type
    return f"{platform.get_device_name()} (capability {capability.as_version_str()})"


def _sentence(error: Exception) -> str:
    """What an error says; of a validation error, the sentence in it."""
    problems = getattr(error, "errors", None)
    if callable(problems):
        return "; ".join(str(problem["msg"]) for problem in problems())
    said = " ".join(str(error).split())
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
