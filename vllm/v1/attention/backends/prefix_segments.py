# SPDX-License-Identifier: Apache-2.0
"""Image masks without masks: a request split into causal and non-causal segments.

The mask of a PrefixLM is *causal, or in the same image*. For the queries of one image
`(start, stop)` that is simply *every key up to stop*; for the text between images it is causal.
So each request is cut into consecutive segments, and each segment becomes a request of its own
to a kernel that takes a causal flag per request: the same query rows, the same block-table row,
a `seq_len` that ends with the segment. Nothing is built that grows with query x key.
"""

import copy
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.composite_routing import (
    MMPrefixAttentionRouting,
    attention_layers,
    has_unclamped_window,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

LARGEST_TABLE = 1 << 20
"""Entries of a block table, of 4 bytes, up to which each segment gets its own row in it."""


class Segments(NamedTuple):
    """A batch cut into segments that cover each scheduled query once, in order.

    Every array has one entry a segment.
    """

    request: np.ndarray
    """int64: index of the request that it belongs to."""
    first_row: np.ndarray
    """int64: its first row in the batch's query tensor."""
    num_rows: np.ndarray
    """int64: its number of queries, at least one."""
    end: np.ndarray
    """int64: the position after the last key that it sees, its `seq_len`."""
    causal: np.ndarray
    """bool: causal text, or queries of an image, each of which sees every key before `end`."""
    window: np.ndarray
    """int64: the sliding window to run it with, in tokens; 0 for the layer's own, or none."""

    def take(self, index: np.ndarray) -> "Segments":
        return Segments(*(column[index] for column in self))


def split_into_segments(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    ranges: Mapping[int, Sequence[tuple[int, int]]],
    *,
    sliding_window: int | None = None,
    clamped: bool = True,
) -> Segments:
    """Cut a batch into causal text segments and non-causal image segments.

    A chunk that starts or ends inside an image uses the keys that are there. A kernel's
    sliding window is symmetric without causality, so an image of at most `sliding_window`
    tokens gets exactly its left bound; a longer one is cut further (`_cut_to_window`).

    Args:
        query_start_loc: (num_reqs + 1,) the first query row of each request.
        seq_lens: (num_reqs or more,) tokens of each request, this step's queries included;
            exact for requests that have image ranges.
        ranges: inclusive absolute `(start, stop)` of each image in any order, per request
            index; one with `start >= stop` does not count.
        sliding_window: the layer's window, in tokens; None for full attention.
        clamped: whether the window also bounds what an image's queries see of their image.

    Raises:
        ValueError: two ranges of a request overlap, one starts before the sequence, or the
            sliding window is less than one token.
    """
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"A sliding window of {sliding_window} tokens sees nothing; at least 1.")
    query_start_loc, seq_lens = (array.astype(np.int64) for array in (query_start_loc, seq_lens))
    seq_lens = seq_lens[: len(query_start_loc) - 1]
    images = _scheduled_images(query_start_loc, seq_lens, ranges)
    if sliding_window is not None:
        images = _cut_to_window(images, sliding_window, clamped)
    return _segments(query_start_loc, seq_lens, images)


class _Images(NamedTuple):
    """Scheduled queries of images, or of parts of them; one entry each, in rows of the batch."""

    start: np.ndarray  # where the image starts, maybe before its request's first row
    first: np.ndarray  # the first query
    after: np.ndarray  # after the last query
    end: np.ndarray  # after the last key of the image that exists
    window: np.ndarray | None  # None: the layer's own for all

    def take(self, index: np.ndarray) -> "_Images":
        columns: Any = (column if column is None else column[index] for column in self)
        return _Images(*columns)


def _scheduled_images(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    ranges: Mapping[int, Sequence[tuple[int, int]]],
) -> _Images:
    request, counts, start, stop = _flattened(ranges, len(seq_lens))
    if not _in_order(counts, start, stop):
        request, counts, start, stop = _sorted(request, counts, start, stop)
    to_row = query_start_loc[1:] - seq_lens  # from positions
    shift = to_row[request].repeat(counts)
    end = seq_lens[request].repeat(counts)
    start = np.minimum(start, end) + shift  # no sum of a bound as it comes: it might overflow
    first = np.maximum(start, query_start_loc[request].repeat(counts))
    after = np.minimum(stop, end - 1) + (shift + 1)
    images = _Images(start, first, after, after, None)
    live = first < after
    return images if live.all() else images.take(live.nonzero()[0])


def _flattened(
    ranges: Mapping[int, Sequence[tuple[int, int]]], num_reqs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The requests that have images, how many each has, and the images' starts and stops."""
    request = [request for request, images in ranges.items() if images and request < num_reqs]
    lists = [ranges[one] for one in request] if len(request) < len(ranges) else ranges.values()
    counts = np.fromiter(map(len, lists), np.int64, len(request))
    try:
        start, stop = zip(*chain.from_iterable(lists), strict=True) if request else ((), ())
        # `struct` takes integers in several times as fast as numpy.
        packed = [struct.pack(f"{len(one)}q", *one) for one in (start, stop)]
    except (TypeError, ValueError, struct.error) as error:
        wrong = next(
            (one, image) for one in request for image in ranges[one] if not _is_pair(image)
        )
        raise ValueError(
            f"{wrong[1]!r} is no image range of request {wrong[0]}: it must be (start, stop), two "
            "integers of 64 bits."
        ) from error
    starts, stops = (np.frombuffer(one, np.int64) for one in packed)
    return np.fromiter(request, np.int64, len(request)), counts, starts, stops


def _is_pair(image: Any) -> bool:
    try:
        return len(struct.pack(f"{len(image)}q", *image)) == 16
    except (TypeError, struct.error):
        return False


def _in_order(counts: np.ndarray, start: np.ndarray, stop: np.ndarray) -> bool:
    """Whether each request's images follow each other and hold more than one token."""
    follows = start[1:] > stop[:-1]
    follows[counts[:-1].cumsum() - 1] = True  # from one request to the next
    return bool(follows.all() and (start < stop).all() and start.min(initial=0) >= 0)


def _sorted(
    request: np.ndarray, counts: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The ranges that count, in order, each with its own request, refusing what has no mask."""
    request = request.repeat(counts)
    order = np.lexsort((start, request))
    order = order[(start < stop)[order]]
    request, start, stop = request[order], start[order], stop[order]
    _refuse_bad_ranges(request, start, stop)
    return request, np.ones_like(request), start, stop


def _refuse_bad_ranges(request: np.ndarray, start: np.ndarray, stop: np.ndarray) -> None:
    overlap = (request[1:] == request[:-1]) & (start[1:] <= stop[:-1])
    if overlap.any():
        at = int(overlap.argmax())
        raise ValueError(
            f"Image ranges ({start[at]}, {stop[at]}) and ({start[at + 1]}, {stop[at + 1]}) of "
            f"request {request[at]} overlap, so the mask they ask for is undefined. Ranges are "
            "inclusive (start, stop) positions and must be disjoint."
        )
    if (start < 0).any():
        at = int((start < 0).argmax())
        raise ValueError(
            f"Image range ({start[at]}, {stop[at]}) of request {request[at]} starts before the "
            "sequence. Ranges are inclusive (start, stop) positions counted from 0."
        )


def _cut_to_window(images: _Images, sliding_window: int, clamped: bool) -> _Images:
    """Cut images longer than the window into pieces that a symmetric window masks exactly.

    A piece is given to the kernel as the *last* rows before `end`. That moves its queries
    right by `shift`, the distance of its last query from the image's last key; a window of
    `shift + sliding_window` moves the left bound back to where it was, and reaches `end` on
    the right as long as the piece has no more rows than that. So pieces double in length
    towards the image's start, and their number grows with its logarithm: with a window of 8, an
    image at 0..19 is cut into queries 12..19 with window 8 and 0..11 with window 16.

    Unclamped, queries more than the window behind the image's start see the image from its
    start, a bound that does not move with them: those are pieces of one query.
    """
    seen = images.end - (images.first if clamped else images.start)
    long = seen > sliding_window
    if not long.any():
        return images
    images = images._replace(window=np.zeros_like(images.first))
    pieces = [images.take(np.flatnonzero(~long))]
    rolling = images.take(np.flatnonzero(long))
    if not clamped:
        whole_from = np.maximum(rolling.start + sliding_window, rolling.first)
        count = np.maximum(rolling.after - whole_from, 0)
        single = rolling.take(np.repeat(np.arange(len(count)), count))
        place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        query = np.repeat(whole_from, count) + place
        window = single.end - single.start
        pieces.append(single._replace(first=query, after=query + 1, window=window))
        rolling = rolling._replace(after=np.minimum(rolling.after, whole_from))

    while len(rolling.first):
        rolling = rolling.take(np.flatnonzero(rolling.first < rolling.after))
        window = rolling.end - rolling.after + sliding_window
        first = np.maximum(rolling.first, rolling.after - window)
        pieces.append(rolling._replace(first=first, window=window))
        rolling = rolling._replace(after=first)
    return _Images(*map(np.concatenate, zip(*pieces, strict=True)))


def _segments(query_start_loc: np.ndarray, seq_lens: np.ndarray, images: _Images) -> Segments:
    """The segments of a batch: the given images, or pieces of images, and the text between."""
    cuts = np.concatenate([query_start_loc, images.first, images.after])
    cuts.sort()
    new = cuts[1:] != cuts[:-1]
    first_row, after = cuts[:-1][new], cuts[1:][new]
    counts = first_row.searchsorted(query_start_loc)
    counts = counts[1:] - counts[:-1]
    end = after + (seq_lens - query_start_loc[1:]).repeat(counts)
    request = np.arange(len(counts)).repeat(counts)
    causal = np.ones(len(first_row), bool)
    window = np.zeros(len(first_row), np.int64)

    at = first_row.searchsorted(images.first)
    causal[at] = False
    if images.window is not None:
        window[at] = images.window
        end[at] += images.end - images.after
    return Segments(request, first_row, after - first_row, end, causal, window)


class ImageMask(NamedTuple):
    """What decides how one layer masks images."""

    sliding_window: int | None
    clamped: bool

    @classmethod
    def of(cls, layer: Any) -> "ImageMask":
        """Of an attention layer; full attention has nothing to clamp to."""
        window = getattr(layer, "sliding_window", None)
        return cls(window, window is None or not has_unclamped_window(layer))

    def cut(self, images: _Images) -> _Images:
        """The pieces in which this mask takes images: `images` itself if it takes them whole."""
        if self.sliding_window is None:
            return images
        return _cut_to_window(images, self.sliding_window, self.clamped)


@dataclass
class SegmentBatch:
    """The child's metadata for a batch cut for one kind of image mask."""

    segments: Any
    """For every row, with the layer's own window."""
    again: list[tuple[int, torch.Tensor, Any]] = field(default_factory=list)
    """Rows to attend again: with which window, 0 for the layer's own, the (num_rows,) int64 rows,
    and the child's metadata for them alone."""


@dataclass
class PrefixSegmentsMetadata:
    """What one group of layers needs for a batch whose image mask is live."""

    batches: dict[ImageMask, SegmentBatch]
    build_causal: Callable[[], Any]
    """Builds the child's metadata for the same batch without image mask."""
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None
    """The image ranges. A model whose full-attention layers are causal (Gemma 4) sets this to
    None before its forward, as it does with the metadata of vLLM's own backends."""

    @functools.cached_property
    def causal(self) -> SegmentBatch:
        """The same batch without image mask, for layers that the model clears; few models do."""
        return SegmentBatch(self.build_causal())

    def batch_for(self, mask: ImageMask) -> SegmentBatch:
        """The batch as a layer with this mask attends it.

        One metadata object may serve both full-attention and sliding layers (with the hybrid
        KV cache manager off), and the model clears it for the former only.
        """
        if self.mm_prefix_range is None and mask.sliding_window is None:
            return self.causal
        return self.batches[mask]


class PrefixSegmentsImpl:
    """Mixin before a child's impl class: attends a `PrefixSegmentsMetadata` segment by segment,
    and any other metadata as the child does."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend `query` (num_tokens, num_heads, head_size) over `kv_cache`, into `output` of the
        same shape; `key` and `value` (num_tokens, num_kv_heads, head_size) are in the cache."""
        scales = (output_scale, output_block_scale)
        if not isinstance(attn_metadata, PrefixSegmentsMetadata):
            forward = super().forward  # type: ignore[misc]
            return forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        batch = attn_metadata.batch_for(ImageMask.of(layer))
        self.forward(layer, query, key, value, kv_cache, batch.segments, output, *scales)
        for window, rows, metadata in batch.again:
            inputs = (part if part is None else part[rows] for part in (query, key, value))
            again = torch.empty_like(output[rows])
            impl: Any = self.with_window(window) if window else self
            impl.forward(layer, *inputs, kv_cache, metadata, again, *scales)
            output[rows] = again
        return output

    def with_window(self, window: int) -> Any:
        """This impl with a sliding window of `window` tokens on both sides."""
        wider = copy.copy(self)
        reach = window - 1
        is_pair = isinstance(self.sliding_window, tuple)  # type: ignore[attr-defined]
        wider.sliding_window = (reach, reach) if is_pair else window  # type: ignore[attr-defined]
        return wider


class PrefixSegmentsMetadataBuilder:
    """Mixin before a child's builder class: cuts a batch whose image mask is live into segments
    and builds the child's metadata for those."""

    causal_flag_dtype: ClassVar[torch.dtype] = torch.int32
    kv_cache_spec: KVCacheSpec
    supports_update_block_table = False

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        **extras: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **extras)  # type: ignore[call-arg]
        layers = attention_layers(vllm_config, layer_names)
        self.masks = list(dict.fromkeys(map(ImageMask.of, layers)))

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """The child's, as far as the image mask leaves batches uncut."""
        child = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        uncut = MMPrefixAttentionRouting.get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(child, uncut, key=lambda level: level.value)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """The child's own metadata where no mask of the group is live, else
        `PrefixSegmentsMetadata`.

        Raises:
            ValueError: image ranges without `seq_lens_cpu_upper_bound`, or bad ranges
                (`split_into_segments`).
        """
        build = functools.partial(
            super().build,  # type: ignore[misc]
            common_prefix_len,
            fast_build=fast_build,
        )
        ranges = common_attn_metadata.mm_req_doc_ranges or {}
        if not any(ranges.values()):
            return build(common_attn_metadata)
        seq_lens = common_attn_metadata.seq_lens_cpu_upper_bound
        if seq_lens is None:
            raise ValueError(
                "The batch has image ranges but no seq_lens_cpu_upper_bound, so it cannot be "
                "cut into segments. The model runner must set it in CommonAttentionMetadata."
            )
        starts = common_attn_metadata.query_start_loc_cpu.numpy().astype(np.int64)
        lengths = seq_lens.numpy()[: len(starts) - 1].astype(np.int64)  # it may be padded further
        images = _scheduled_images(starts, lengths, ranges)
        if not len(images.first):
            return build(common_attn_metadata)

        def batch_of(pieces: _Images) -> SegmentBatch:
            return self._batch(common_attn_metadata, _segments(starts, lengths, pieces), build)

        batches: dict[ImageMask, SegmentBatch] = {}
        of_whole_images = None
        for mask in self.masks:
            pieces = mask.cut(images)
            if pieces is images:
                of_whole_images = batches[mask] = of_whole_images or batch_of(images)
            else:
                batches[mask] = batch_of(pieces)
        return PrefixSegmentsMetadata(
            batches, functools.partial(build, common_attn_metadata), ranges
        )

    def build_wider(self, common_attn_metadata: CommonAttentionMetadata, window: int) -> Any:
        """The child's metadata for rows that are attended with a window of `window` tokens instead
        of the layers'. A child whose metadata depends on the window overrides this."""
        return super().build(0, common_attn_metadata)  # type: ignore[misc]

    def _batch(
        self, common: CommonAttentionMetadata, segments: Segments, build: Any
    ) -> SegmentBatch:
        num_blocks = -(-int(segments.end.max()) // self.kv_cache_spec.block_size)
        single = segments.request[0] == segments.request[-1]
        if single or len(segments.request) * num_blocks <= LARGEST_TABLE:
            apart, rest = _wide_apart(segments)
        else:
            apart, rest = _cut_requests_apart(segments)
        return SegmentBatch(
            build(self._as_requests(common, rest, None)),
            [self._again(common, segments, group, build) for group in apart],
        )

    def _again(
        self, common: CommonAttentionMetadata, segments: Segments, group: np.ndarray, build: Any
    ) -> tuple[int, torch.Tensor, Any]:
        part = segments.take(group)
        rows = torch.from_numpy(_rows_of(part)).to(common.slot_mapping.device)
        packed = part._replace(first_row=np.cumsum(part.num_rows) - part.num_rows)
        as_requests = self._as_requests(common, packed, rows)
        window = int(part.window[0])
        wider = functools.partial(self.build_wider, window=window)
        return window, rows, (wider if window else build)(as_requests)

    def _as_requests(
        self, common: CommonAttentionMetadata, segments: Segments, rows: torch.Tensor | None
    ) -> CommonAttentionMetadata:
        """`common` with a request a segment; of the given rows only, where they are given."""
        assert common.seq_lens_cpu_upper_bound is not None
        device = common.seq_lens.device
        lengths = common.seq_lens_cpu_upper_bound.numpy()
        after_end = (segments.end - lengths[segments.request]).astype(np.int32)
        starts = np.append(segments.first_row, segments.first_row[-1] + segments.num_rows[-1])
        starts_cpu = torch.from_numpy(starts.astype(np.int32))
        longest = int(segments.end.max())
        # Of the block table no more than is read, since it is as wide as the model's longest text.
        num_blocks = -(-longest // self.kv_cache_spec.block_size)
        first, last = segments.request[[0, -1]].tolist()

        def of_rows(tensor: Any) -> Any:
            return tensor if tensor is None or rows is None else tensor[rows]

        def of_requests(tensor: Any) -> Any:
            return tensor if tensor is None else _take(tensor, segments.request)

        as_requests = copy.copy(common)  # `replace` would take three times as long
        vars(as_requests).update(
            query_start_loc=starts_cpu.to(device),
            query_start_loc_cpu=starts_cpu,
            # The device's lengths, since the host's are only a bound for decodes.
            seq_lens=of_requests(common.seq_lens).add_(torch.from_numpy(after_end).to(device)),
            seq_lens_cpu_upper_bound=torch.from_numpy(segments.end.astype(np.int32)),
            num_reqs=len(segments.request),
            num_actual_tokens=common.num_actual_tokens if rows is None else len(rows),
            max_query_len=int(segments.num_rows.max()),
            max_seq_len=longest,
            block_table_tensor=(
                common.block_table_tensor[first : first + 1, :num_blocks].expand(
                    len(segments.request), -1
                )
                if first == last  # many segments of a long request would be many long rows
                else of_requests(common.block_table_tensor[:, :num_blocks])
            ),
            slot_mapping=of_rows(common.slot_mapping),
            positions=of_rows(common.positions),
            is_prefilling=of_requests(common.is_prefilling),
            causal=torch.from_numpy(segments.causal).to(device, self.causal_flag_dtype),
            mm_req_doc_ranges=None,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        return as_requests


def _take(tensor: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """`tensor[index]`; on the host without torch's threads, which take longer to meet than to
    copy these few rows, and on a busy machine as long as a slice of the scheduler."""
    if tensor.device.type == "cpu":
        return torch.from_numpy(tensor.numpy().take(index, axis=0))
    return tensor[torch.from_numpy(index).to(tensor.device)]


def _wide_apart(segments: Segments) -> tuple[list[np.ndarray], Segments]:
    """The segments with a window of their own, as indices by window, and all with those narrow:
    they are attended again, and until then as cheaply as their rows allow."""
    wide = segments.window > 0
    if not wide.any():
        return [], segments
    narrow = segments._replace(
        causal=segments.causal | wide, end=np.where(wide, segments.num_rows, segments.end)
    )
    return _grouped(wide, segments.window), narrow


def _cut_requests_apart(segments: Segments) -> tuple[list[np.ndarray], Segments]:
    """The segments of requests with images, as indices by request and window, and the batch
    uncut, with those requests narrow. Alone, a request's segments share one row of the block
    table; together they would have a table that grows with segments times blocks."""
    with_images = np.zeros(segments.request[-1] + 1, bool)
    with_images[segments.request[~segments.causal]] = True
    apart = with_images[segments.request]
    starts = np.flatnonzero(np.diff(segments.request, prepend=-1))
    num_rows = np.add.reduceat(segments.num_rows, starts)
    uncut = segments.take(starts)._replace(
        num_rows=num_rows,
        end=np.where(apart[starts], num_rows, segments.end[starts]),
        causal=np.ones(len(starts), bool),
    )
    return _grouped(apart, segments.window, segments.request), uncut


def _grouped(which: np.ndarray, *keys: np.ndarray) -> list[np.ndarray]:
    """The indices at which `which` is set, one array for each combination of `keys`."""
    at = np.flatnonzero(which)
    of = np.stack(keys)[:, at]
    order = np.lexsort(of)
    new = np.flatnonzero((np.diff(of[:, order]) != 0).any(0)) + 1
    return np.split(at[order], new)


def _rows_of(segments: Segments) -> np.ndarray:
    """(sum of num_rows,) int64: the query rows of these segments, in order."""
    before = np.cumsum(segments.num_rows) - segments.num_rows
    shift = np.repeat(segments.first_row - before, segments.num_rows)
    return shift + np.arange(len(shift))


class PrefixSegmentsBackend:
    """Mixin before a child's backend class: the child, with image masks for decoder layers."""

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return False  # its prefix would have to be cut into the segments as well

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


def create_prefix_segments_backend(
    child: type[AttentionBackend],
    *,
    name: str,
    backend_name: str,
    module: str,
    builder: type[PrefixSegmentsMetadataBuilder] = PrefixSegmentsMetadataBuilder,
) -> type[AttentionBackend]:
    """A backend that is `child` with support for the image mask, by way of segments.

    Args:
        child: a backend whose kernel takes a causal flag per request, as a tensor in
            `CommonAttentionMetadata.causal`, and whose window is symmetric without causality.
        name: the class's name; `module` must hold it under this name for it to be pickled.
        backend_name: what messages call it; no member of the registry, since it is a child only.
        module: the class's `__module__`.
        builder: the mixin to put before the child's builder, for a child that needs its own.
    """

    def mix(suffix: str, *bases: type, **attributes: Any) -> Any:
        names = {"__module__": module, "__qualname__": name + suffix, "__doc__": bases[0].__doc__}
        return type(name + suffix, bases, names | attributes)

    impl_cls = mix("Impl", PrefixSegmentsImpl, child.get_impl_cls())
    builder_cls = mix("MetadataBuilder", builder, child.get_builder_cls())
    return mix(
        "",
        PrefixSegmentsBackend,
        child,
        get_name=staticmethod(lambda: backend_name),
        get_impl_cls=staticmethod(lambda: impl_cls),
        get_builder_cls=staticmethod(lambda: builder_cls),
    )
