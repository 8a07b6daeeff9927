# SPDX-License-Identifier: Apache-2.0
"""The subcommand `matrix`: which pairs of the engine's decoder backends can be joined, and the one
reason why each other pair cannot."""

import argparse
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm.plugins.composite_attention.explain import positive

CAPTION = (
    "rows: the general child (* has the image mask); columns: the causal child\n"
    "+ can be joined    p proven here to share a KV cache    = the same backend    "
    "a number: the reason below"
)


class Pair(NamedTuple):
    """Two backends, by their registry names."""

    general: str
    causal: str

    reason: str | None
    """Why they cannot be joined; None if they can."""

    proven: bool = False
    """Both have written a KV cache here, and the bytes were equal."""


class Matrix(NamedTuple):
    """What can be joined with what."""

    pairs: list[Pair]

    masking: list[str]
    """The backends that have the image mask."""

    alone: dict[str, str]
    """The backends that can be no child of any composite, and why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's arguments to its parser."""
    parser.add_argument(
        "--format", choices=("table", "markdown", "json"), default="table", help="default: table"
    )
    parser.add_argument(
        "--prove",
        action="store_true",
        help="also have both children of each pair that runs on this machine write a KV cache, "
        "and compare the bytes",
    )
    parser.add_argument(
        "--head-size", type=positive, default=64, metavar="N", help="of the caches (default: 64)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the matrix; the exit status, 0."""
    matrix = all_pairs()
    if arguments.prove:
        matrix = matrix._replace(pairs=list(_proven(matrix.pairs, arguments.head_size)))
    formats = {"table": as_table, "markdown": as_markdown, "json": as_json}
    print(formats[arguments.format](matrix))
    return 0


def all_pairs() -> Matrix:
    """Every pair of the installed engine's backends for decoder layers, joined by the factory."""
    from vllm.plugins import load_general_plugins
    from vllm.plugins.composite_attention import pairs
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.composite import refuse_child
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    children: dict[str, Any] = {}
    alone: dict[str, str] = {}
    for name in AttentionBackendEnum.__members__:
        if pairs.is_made_here(AttentionBackendEnum[name]):
            continue
        try:
            backend: Any = pairs.class_of(name)
        except ValueError as error:
            alone[name] = str(error).replace(f"{name} cannot", "it cannot", 1)
            continue
        if not backend.supports_attn_type(AttentionType.DECODER):
            alone[name] = "it serves no decoder layers"
        else:
            try:
                refuse_child(backend, "a composite")
                children[name] = backend
            except ValueError as error:
                alone[name] = _without(str(error), backend.get_name())
    joined = [Pair(g, c, _reason(g, c)) for g in children for c in children]
    masking = [name for name, backend in children.items() if backend.supports_mm_prefix()]
    return Matrix(joined, masking, alone)


def _reason(general: str, causal: str) -> str | None:
    import torch
    from vllm.plugins.composite_attention.pairs import class_of
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if general == causal:
        return None
    both = " and ".join(class_of(name).get_name() for name in (general, causal))
    try:
        pair = class_of(f"{general}+{causal}")
        pair.customize_spec(
            FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        )
        pair.supported_kv_cache_layouts()
    except ValueError as error:
        return _without(str(error), both).removesuffix(" Choose another pair.")
    if not pair.get_supported_kernel_block_sizes():
        return "they have no kernel block size in common."
    return None


def _without(sentence: str, names: str) -> str:
    """The sentence without the names that the table gives already."""
    return sentence.removeprefix(f"{names} cannot be a child of a composite: ").replace(
        names, "they"
    )


def _proven(pairs: list[Pair], head_size: int) -> Iterator[Pair]:
    import torch
    from vllm.platforms import current_platform
    from vllm.plugins.composite_attention import choosing, one_layer
    from vllm.plugins.composite_attention.pairs import class_of
    from vllm.v1.attention.selector import AttentionSelectorConfig

    layer = AttentionSelectorConfig(head_size, torch.bfloat16, "auto", None)
    for pair in pairs:
        name = f"{pair.general}+{pair.causal}"
        joined = pair.reason is None and pair.general != pair.causal
        if joined and choosing.runs_here(class_of(name), current_platform):
            reason = one_layer.refusal(name, layer)
            pair = pair._replace(reason=reason, proven=reason is None)
        yield pair


def as_table(matrix: Matrix) -> str:
    """For a terminal: a grid of marks, the reasons by their numbers, and who can be no child."""
    names = list(dict.fromkeys(pair.general for pair in matrix.pairs))
    reasons: dict[str, int] = {}
    marks = {(pair.general, pair.causal): _mark(pair, reasons) for pair in matrix.pairs}
    wide = max(map(len, names), default=0) + 2
    lines = [CAPTION, ""]
    lines.append(" " * (wide + 3) + "".join(f"{i:>3}" for i, _ in enumerate(names, 1)))
    for i, general in enumerate(names, 1):
        row = "".join(f"{marks[general, causal]:>3}" for causal in names)
        lines.append(f"{i:>2} {general + ('*' if general in matrix.masking else ''):{wide}}{row}")
    return "\n".join([*lines, *_notes(matrix, reasons)])


def as_markdown(matrix: Matrix) -> str:
    """The same as a Markdown table."""
    names = list(dict.fromkeys(pair.general for pair in matrix.pairs))
    reasons: dict[str, int] = {}
    marks = {(pair.general, pair.causal): _mark(pair, reasons) for pair in matrix.pairs}
    lines = ["| general \\ causal | " + " | ".join(names) + " |"]
    lines.append("| --- |" + " --- |" * len(names))
    for general in names:
        star = "\\*" if general in matrix.masking else ""
        row = " | ".join(marks[general, causal] for causal in names)
        lines.append(f"| {general}{star} | {row} |")
    caption = CAPTION.replace("*", "\\*").split("\n")
    return "\n\n".join([*caption, "\n".join(lines), *filter(None, _notes(matrix, reasons))])


def as_json(matrix: Matrix) -> str:
    """The same as a JSON object: `pairs`, `masking` and `alone`."""
    pairs = [pair._asdict() for pair in matrix.pairs]
    return json.dumps(matrix._asdict() | {"pairs": pairs}, indent=2)


def _mark(pair: Pair, reasons: dict[str, int]) -> str:
    if pair.general == pair.causal:
        return "="
    if pair.reason is None:
        return "p" if pair.proven else "+"
    return str(reasons.setdefault(pair.reason, len(reasons) + 1))


def _notes(matrix: Matrix, reasons: dict[str, int]) -> Iterator[str]:
    for reason, number in reasons.items():
        yield f"{number:>3}  {reason}"
    names: dict[str, list[str]] = {}
    for name, reason in matrix.alone.items():
        names.setdefault(reason, []).append(name)
    for reason, alone in names.items():
        yield ""
        yield f"in no composite: {', '.join(alone)}"
        yield f"     {reason}"
