# SPDX-License-Identifier: Apache-2.0
"""The subcommand `show`: for a list of requests, which child serves their batch and why, how each
request is cut into segments, and the mask, in the terminal and as a picture.

The decision is the routing policies' own and the cuts are the splitter's own. Only the mask is
written here, by its definition, for those two to be seen against.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

NOTATION = """\
A request is QUERY/SEQ[p][:START-STOP,...]: QUERY tokens of this step, at the end of SEQ tokens, and
the first and last position of each image, counted from 0.

  12/12:3-6,8-11    a prefill of 12 tokens with two images
  1/40:3-6          a decode with an image in its past
  8/20:16-30        a chunk that ends inside an image
  4/40p             p marks a prefill, where 4 tokens might be a verification of speculative tokens
                    as well; with any request marked, the others count as decodes

example:
  python -m vllm.plugins.composite_attention show 12/12:3-6,8-11 1/40:3-6 --window 8 --png mask.png
"""
REQUEST = re.compile(r"(\d+)/(\d+)(p?)(?::(\d+-\d+(?:,\d+-\d+)*))?")

CHILDREN = ("general", "causal")
MAX_PAIRS = 1 << 26  # of query and key in one request: a mask of 64 MB
MAX_PANELS = 24
TEXT_ROWS, TEXT_COLUMNS = 48, 96
HIDDEN, CAUSAL, OPENED, PARTLY = ".x#+"


@dataclass(frozen=True)
class Request:
    """`seq_len` tokens, of which the last `query_len` are this step's queries, and the inclusive
    absolute `(start, stop)` of each image. `prefilling` marks a prefill."""

    query_len: int
    seq_len: int
    images: tuple[tuple[int, int], ...] = ()
    prefilling: bool = False

    @property
    def begin(self) -> int:
        """The position of the first query."""
        return self.seq_len - self.query_len

    def __str__(self) -> str:
        text = f"{self.query_len}/{self.seq_len}" + "p" * self.prefilling
        return text + ":" * bool(self.images) + ",".join(map(_span, self.images))


class Settings(NamedTuple):
    """How the batch is routed and masked."""

    policy: str = "mm-prefix"
    window: int | None = None
    """The layers' sliding window, in tokens."""
    clamped: bool = True
    """Whether it bounds what an image's queries see of their image."""
    speculative_tokens: int = 0

    def __str__(self) -> str:
        kind = "clamped" if self.clamped else "unclamped"
        text = f"{self.policy}, " + (f"{kind} window {self.window}" if self.window else "no window")
        tokens = self.speculative_tokens
        return text + (f", {tokens} speculative tokens" if tokens else "")


class Segment(NamedTuple):
    """Consecutive queries that a kernel with a causal flag takes as a request; positions are
    inclusive `(first, last)`."""

    kind: str
    """`causal` text, or `image`: each query sees every key before the segment's end."""
    queries: tuple[int, int]
    keys: tuple[int, int]
    """What some query of it sees."""
    window: int | None
    """The sliding window to run it with, in tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's arguments to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Draw what is routed where, and the mask, for a batch of these requests: which child of a\n"
        "composite serves it and why, each request's segments, and which keys each query sees."
    )
    parser.epilog = NOTATION
    parser.add_argument("requests", nargs="+", metavar="REQUEST", help="see below")
    parser.add_argument(
        "--policy",
        choices=("mm-prefix", "prefill-decode"),
        default="mm-prefix",
        help="route by image mask (default) or by phase",
    )
    parser.add_argument("--window", type=int, metavar="W", help="the layers' sliding window")
    parser.add_argument(
        "--unclamped", action="store_true", help="the window does not bound what an image sees"
    )
    parser.add_argument(
        "--speculative-tokens", type=int, default=0, metavar="N", help="of each verification"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, without the masks")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the masks as a picture too")


def run(arguments: argparse.Namespace) -> int:
    """Print, and draw where `--png` says so; the exit status, 0.

    Raises:
        ValueError: the requests or settings make no batch, or the picture cannot be made; the
            sentence says why.
    """
    settings = Settings(
        arguments.policy, arguments.window, not arguments.unclamped, arguments.speculative_tokens
    )
    if settings.window is None and not settings.clamped:
        raise ValueError("--unclamped is about a sliding window: give --window W too.")
    if settings.window is not None and settings.window > MAX_PAIRS:
        raise ValueError(f"A sliding window of {settings.window} tokens is wider than any mask.")
    if settings.window is not None and settings.window < 1:
        raise ValueError(f"A sliding window of {settings.window} tokens sees nothing; at least 1.")
    if settings.speculative_tokens < 0:
        raise ValueError(f"{settings.speculative_tokens} speculative tokens cannot be; at least 0.")
    requests = [parse_request(text) for text in arguments.requests]
    if arguments.png is not None and len(requests) > MAX_PANELS:
        raise ValueError(f"A picture holds {MAX_PANELS} requests and {len(requests)} were given.")

    headline, segments = describe_batch(requests, settings), split(requests, settings)
    form = as_json if arguments.json else as_text
    print("\n".join(form(requests, settings, headline, segments)))
    if arguments.png is not None:
        try:
            draw(requests, settings, headline, segments).savefig(arguments.png, format="png")
        except ImportError as error:
            raise ValueError("--png needs matplotlib: pip install matplotlib.") from error
        except OSError as error:
            raise ValueError(f"{arguments.png} cannot be written: {error.strerror}.") from error
        if not arguments.json:
            print(f"\nThe picture is in {arguments.png}.")
    return 0


def parse_request(text: str) -> Request:
    """The request that this notation means.

    Raises:
        ValueError: it means none.
    """
    match = REQUEST.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no request: it must read QUERY/SEQ[p][:START-STOP,...], such as "
            "12/12:3-6,8-11."
        )
    query_len, seq_len = int(match[1]), int(match[2])
    numbers = [int(number) for number in re.findall(r"\d+", match[4] or "")]
    images = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    if not 1 <= query_len <= seq_len:
        raise ValueError(
            f"{text}: {query_len} queries of {seq_len} tokens cannot be. The queries are the last "
            "tokens of the sequence, at least one."
        )
    if query_len * seq_len > MAX_PAIRS:
        raise ValueError(f"{text}: the mask is too large to draw; at most {MAX_PAIRS} pairs.")
    last = -1
    for start, stop in sorted(images):
        if start > stop:
            raise ValueError(f"{text}: image {start}-{stop} ends before it starts.")
        if stop >= MAX_PAIRS:
            raise ValueError(f"{text}: image {start}-{stop} ends beyond any sequence.")
        if start <= last:
            raise ValueError(f"{text}: image {start}-{stop} overlaps the image before it.")
        last = stop
    return Request(query_len, seq_len, images, bool(match[3]))


def attention_mask(request: Request, settings: Settings) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(query_len, seq_len) bool: may the query in row q see the key in column k.

    Causal and within the last `window` keys, or in the same image; `clamped` bounds the past of
    the latter by the window too.
    """
    q = np.arange(request.begin, request.seq_len)[:, None]
    k = np.arange(request.seq_len)[None, :]
    recent = k > q - (settings.window or request.seq_len)
    mask = (k <= q) & recent
    for start, stop in request.images:
        same_image = (start <= q) & (q <= stop) & (start <= k) & (k <= stop)
        mask |= same_image & recent if settings.clamped else same_image
    return mask


def select(requests: Sequence[Request], settings: Settings) -> int:
    """The policy's variant for a batch of these requests: 0 general, 1 causal."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.composite import (
        MMPrefixAttentionRouting,
        PrefillDecodeAttentionRouting,
    )

    by_phase = settings.policy == "prefill-decode"
    layer = SimpleNamespace(
        sliding_window=settings.window, mm_prefix_clamp_sliding_window=settings.clamped
    )
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        speculative_config=SimpleNamespace(num_speculative_tokens=settings.speculative_tokens),
    )
    policy = PrefillDecodeAttentionRouting if by_phase else MMPrefixAttentionRouting
    query_lens = [request.query_len for request in requests]
    starts = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32)
    lengths = torch.tensor([request.seq_len for request in requests], dtype=torch.int32)
    phases = [request.prefilling for request in requests]
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(requests),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.zeros(len(requests), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        is_prefilling=torch.tensor(phases) if any(phases) else None,
        mm_req_doc_ranges={i: list(r.images) for i, r in enumerate(requests) if r.images},
    )
    return policy(["layer"], config).select(batch)


def describe_batch(requests: Sequence[Request], settings: Settings) -> str:
    """The policy's choice and its reason: the first request that the general child alone can
    serve, asked by itself."""
    child = CHILDREN[select(requests, settings)]
    if child == "causal":
        reason = "No query sees more than the causal mask shows it"
        reason += ", and none is a prefill's." if settings.policy == "prefill-decode" else "."
    else:
        # Beside a decode that carries the mark if some request does, for phases to be known.
        beside = Request(1, 1, prefilling=any(request.prefilling for request in requests))

        def alone(request: Request) -> bool:
            return CHILDREN[select([request, beside], settings)] == "general"

        index, first = next(pair for pair in enumerate(requests) if alone(pair[1]))
        if alone(replace(first, images=())):
            reason = f"Request {index} is a prefill of {first.query_len} queries."
        else:
            image = next(i for i in first.images if alone(replace(first, images=(i,))))
            reason = f"Request {index} has queries in its image {_span(image)} that see " + (
                "keys after them." if settings.clamped else "all of it, beyond the window too."
            )
    count = f"{len(requests)} request" + "s" * (len(requests) > 1)
    return f"{count} ({settings}): {child} child. {reason}"


def split(requests: Sequence[Request], settings: Settings) -> list[list[Segment]]:
    """The segments of each request, in order."""
    from vllm.v1.attention.backends.prefix_segments import split_into_segments

    starts = np.cumsum([0] + [request.query_len for request in requests])
    cut = split_into_segments(
        starts,
        np.array([request.seq_len for request in requests]),
        {index: list(request.images) for index, request in enumerate(requests)},
        sliding_window=settings.window,
        clamped=settings.clamped,
    )
    segments: list[list[Segment]] = [[] for _ in requests]
    for index, row, count, end, causal, wider in zip(*(c.tolist() for c in cut), strict=True):
        first = requests[index].begin + row - int(starts[index])
        window = wider or settings.window
        # To the kernel, the segment's last query is at its last key.
        left = 0 if window is None else max(0, end - count + 1 - window)
        kind = "causal" if causal else "image"
        queries = (first, first + count - 1)
        segments[index].append(Segment(kind, queries, (left, end - 1), window))
    return segments


def as_text(
    requests: Sequence[Request],
    settings: Settings,
    headline: str,
    segments: Sequence[Sequence[Segment]],
) -> Iterator[str]:
    """The lines of the terminal's output."""
    yield headline
    yield f"mask: {HIDDEN} hidden  {CAUSAL} causal  {OPENED} opened by an image  A B .. images"
    for index, request in enumerate(requests):
        yield f"\nrequest {index}  {request}"
        for kind, queries, keys, window in segments[index]:
            line = f"  {kind:<8}queries {_span(queries):<12}keys {_span(keys):<12}"
            yield (line + (f"window {window}" if window else "")).rstrip()
        yield from _mask_as_text(request, settings)


def as_json(
    requests: Sequence[Request],
    settings: Settings,
    headline: str,
    segments: Sequence[Sequence[Segment]],
) -> Iterator[str]:
    """A JSON object: `settings`, `child`, `answer` and, of each request, its `segments`."""
    answer = {
        "settings": settings._asdict(),
        "child": CHILDREN[select(requests, settings)],
        "answer": headline,
        "requests": [
            {"request": str(request), "segments": [segment._asdict() for segment in parts]}
            for request, parts in zip(requests, segments, strict=True)
        ],
    }
    yield json.dumps(answer, indent=2)


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]}-{span[1]}"


def _mask_as_text(request: Request, settings: Settings) -> Iterator[str]:
    """A row a query and a character a key, or several of each where there are too many."""
    tall, wide = -(-request.query_len // TEXT_ROWS), -(-request.seq_len // TEXT_COLUMNS)
    if tall * wide > 1:
        yield (
            f"  scaled down to {tall} x {wide} (queries x keys) a character, {OPENED} if an image "
            f"opens any of them, {PARTLY} if some are hidden"
        )
    rows = np.arange(0, request.query_len, tall)
    columns = np.arange(0, request.seq_len, wide)

    def in_blocks(how: np.ufunc, cells: np.ndarray) -> np.ndarray:
        return how.reduceat(how.reduceat(cells, rows, axis=0), columns, axis=1)

    mask, causal = (attention_mask(r, settings) for r in (request, replace(request, images=())))
    drawn = np.full((len(rows), len(columns)), HIDDEN)
    drawn[in_blocks(np.logical_or, mask)] = PARTLY
    drawn[in_blocks(np.logical_and, mask)] = CAUSAL
    drawn[in_blocks(np.logical_or, mask & ~causal)] = OPENED

    letters = np.full(request.seq_len, " ")
    for index, (start, stop) in enumerate(sorted(request.images)):
        letters[start : stop + 1] = chr(ord("A") + index % 26)
    above = [max(block.tolist()) for block in np.split(letters, columns[1:])]
    beside = [max(block.tolist()) for block in np.split(letters[request.begin :], rows[1:])]
    label = len(str(request.seq_len - 1))
    yield (" " * (label + 5) + "".join(above)).rstrip()
    for position, letter, line in zip(rows + request.begin, beside, drawn, strict=True):
        yield f"  {position:>{label}} {letter} {''.join(line)}"


COLORS = {"hidden": "#f4f4f4", "causal": "#4c78a8", "opened by an image": "#f58518"}
IMAGE_TOKENS = "#54a24b"
PANEL = 3.6  # inches


def draw(
    requests: Sequence[Request],
    settings: Settings,
    headline: str,
    segments: Sequence[Sequence[Segment]],
) -> Any:
    """A matplotlib figure of the masks, a panel a request, under the batch's headline.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import textwrap

    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns = min(3, len(requests))
    rows = -(-len(requests) // columns)
    size = (max(2, columns) * PANEL, rows * (PANEL + 0.6) + 0.8)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    for index, request in enumerate(requests):
        axes = figure.add_subplot(rows, columns, index + 1)
        begin, end = request.begin, request.seq_len
        mask, causal = (attention_mask(r, settings) for r in (request, replace(request, images=())))
        axes.imshow(
            mask.astype(np.int8) + (mask & ~causal),
            cmap=ListedColormap(list(COLORS.values())),
            vmin=0,
            vmax=2,
            extent=(-0.5, end - 0.5, end - 0.5, begin - 0.5),
            aspect="auto",
            interpolation="nearest",
        )
        shape = float(np.clip(request.query_len / end, 0.1, 1))
        axes.set_box_aspect(shape)
        strip: dict[str, Any] = {"fc": IMAGE_TOKENS, "ec": "white", "clip_on": False}
        for start, stop in request.images:  # above the keys and beside the queries
            first, last = max(start, begin), min(stop, end - 1)
            if start <= last:
                axes.axvspan(start - 0.5, last + 0.5, 1 + 0.01 / shape, 1 + 0.03 / shape, **strip)
            if first <= last:
                axes.axhspan(first - 0.5, last + 0.5, 1.01, 1.03, **strip)
        for segment in segments[index][1:]:
            axes.axhline(segment.queries[0] - 0.5, color="black", linewidth=0.8)
        axes.set(xlim=(-0.5, end - 0.5), ylim=(end - 0.5, begin - 0.5))
        axes.set_xlabel("key position", fontsize=8)
        axes.set_ylabel("query position", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.locator_params(integer=True, nbins=8, min_n_ticks=1)
        title = textwrap.fill(f"request {index}: {request}", 44, break_on_hyphens=False)
        axes.set_title(title, fontsize=9, pad=9)
    figure.suptitle(textwrap.fill(headline, int(13 * size[0])), fontsize=9)
    handles: list[Any] = [Patch(facecolor=color, label=name) for name, color in COLORS.items()]
    handles.append(Patch(facecolor=IMAGE_TOKENS, label="image tokens"))
    handles.append(Line2D([], [], color="black", linewidth=0.8, label="segments meet"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
    return figure
