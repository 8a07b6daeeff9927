"""Small real attention backends for tests of the composite, and the configs and batches around
them.

`make_child` makes a subclass of each of vLLM's three interfaces. Every hook can be given an
answer, every call is recorded, keys and values are really stored (in a `CacheFormat` of choice)
and really attended over, in float64.
"""

import copy
import inspect
import itertools
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, cast

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.composite import (
    CompositeAttentionRouting,
    MMPrefixAttentionRouting,
    create_composite_attention_backend,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVCacheSpec

from tests.dense_reference import dense_attention, image_mask

GENERAL, CAUSAL = 0, 1
CPU = torch.device("cpu")
BLOCK_SIZE = 16
Answers = Mapping[str, Any]


@dataclass(frozen=True)
class CacheFormat:
    """Where a block of the cache holds keys and values. Every combination is different.

    `packed`: a row of key then value per head and token; `interleaved`: alternating elements of
    both in that row; `planes`: all keys of the block, then all values.
    """

    arrangement: Literal["packed", "interleaved", "planes"] = "packed"
    value_first: bool = False
    token_major: bool = False

    def __str__(self) -> str:
        first = "value" if self.value_first else "key"
        return f"{self.arrangement}, {first} first, {'token' if self.token_major else 'head'}-major"

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in `cache`, each a view of (blocks, block_size, heads, head_size).

        `cache` is vLLM's logical (blocks, heads, block_size, 2 * head_size), of which each block
        is one dense piece of memory.
        """
        blocks, heads, tokens, content = cache.shape
        memory = cache.as_strided((blocks, heads * tokens * content), (cache.stride(0), 1))
        inner = (tokens, heads) if self.token_major else (heads, tokens)
        if self.arrangement == "packed":
            pair = memory.view(blocks, *inner, 2, content // 2).movedim(-2, 0)
        elif self.arrangement == "interleaved":
            pair = memory.view(blocks, *inner, content // 2, 2).movedim(-1, 0)
        else:
            pair = memory.view(blocks, 2, *inner, content // 2).movedim(1, 0)
        first, second = pair if self.token_major else pair.transpose(2, 3)
        return (second, first) if self.value_first else (first, second)


ALL_FORMATS = [
    CacheFormat(arrangement, value_first, token_major)  # type: ignore[arg-type]
    for arrangement, value_first, token_major in itertools.product(
        ("packed", "interleaved", "planes"), (False, True), (False, True)
    )
]


@dataclass(frozen=True)
class Call:
    """One call of a hook of a child."""

    hook: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class MockMetadata:
    """What a mock builder builds: by which child and hook, and of what."""

    child: str
    hook: str
    common: CommonAttentionMetadata
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    extras: Mapping[str, Any]


def _metadata_class(name: str, **options: Any) -> type[Any]:
    return make_dataclass(name, [(f.name, f.type) for f in fields(MockMetadata)], **options)


SlottedMetadata = _metadata_class("SlottedMetadata", slots=True)
FrozenMetadata = _metadata_class("FrozenMetadata", frozen=True)
FrozenSlottedMetadata = _metadata_class("FrozenSlottedMetadata", frozen=True, slots=True)


class MockBackend(AttentionBackend):
    """Base of the backends that `make_child` makes."""

    name: ClassVar[str]
    calls: ClassVar[list[Call]]
    """Calls of the hooks that were given an answer, of `forward`, `do_kv_cache_update` and the
    builder's `build*`, on any class or instance of this child; oldest first."""
    impl_cls: ClassVar[type["MockImpl"]]
    builder_cls: ClassVar[type["MockBuilder"]]
    forward_includes_kv_cache_update = False

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type["MockImpl"]:  # type: ignore[override]
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type["MockBuilder"]:  # type: ignore[override]
        return cls.builder_cls

    @classmethod
    def called(cls, *hooks: str) -> list[Call]:
        """The recorded calls of these hooks, oldest first."""
        return [call for call in cls.calls if call.hook in hooks]


class MockImpl(AttentionImpl[Any]):
    """Stores keys and values in a `CacheFormat`, and attends over them in float64."""

    name: ClassVar[str]
    calls: ClassVar[list[Call]]
    stores: ClassVar[CacheFormat]
    reads: ClassVar[CacheFormat]
    init_error: ClassVar[Exception | None]
    writer_error: ClassVar[Exception | None]
    reader_error: ClassVar[Exception | None]
    instance_answers: ClassVar[Answers]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = alibi_slopes
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        for name, answer in self.instance_answers.items():
            setattr(self, name, answer)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self.calls.append(Call("do_kv_cache_update", (layer, key, value, kv_cache, slot_mapping)))
        if self.writer_error is not None:
            raise self.writer_error
        written = slot_mapping >= 0  # the engine pads with -1
        slots = slot_mapping[written]
        for view, new in zip(self.stores.views(kv_cache), (key, value), strict=True):
            at = (slots // view.shape[1], slots % view.shape[1])
            view[at] = new[: len(written)][written].to(view.dtype)

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
        """Causal attention over what the cache holds, read in this child's format."""
        self.calls.append(Call("forward", (attn_metadata, output_scale, output_block_scale)))
        if self.reader_error is not None:
            raise self.reader_error
        if attn_metadata is None:
            return output
        starts = attn_metadata.common.query_start_loc_cpu.tolist()
        keys, values = self.reads.views(kv_cache)
        for row, length in enumerate(attn_metadata.common.seq_lens.tolist()):
            rows = slice(starts[row], starts[row + 1])
            position = torch.arange(length)
            at = (
                attn_metadata.block_table[row, position // keys.shape[1]].long(),
                position % keys.shape[1],
            )
            output[rows] = dense_attention(
                query[rows],
                keys[at],
                values[at],
                image_mask(length, window=self.sliding_window),
                self.scale,
                soft_cap=self.logits_soft_cap or 0.0,
                alibi_slopes=self.alibi_slopes,
                sinks=self.sinks,
            ).to(output)
        return output


class MockBuilder(AttentionMetadataBuilder[Any]):
    """Builds a `MockMetadata`, or another class of the same fields."""

    name: ClassVar[str]
    calls: ClassVar[list[Call]]
    metadata_cls: ClassVar[type[Any]]
    build_takes: ClassVar[frozenset[str]]

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        **extras: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.calls.append(Call("__init__", (), extras))
        allowed = {"block_table_width"} if self.requires_block_table_width else set()
        _refuse_unknown(f"{self.name}'s builder", extras, allowed)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **extras: Any,
    ) -> Any:
        self.calls.append(
            Call("build", (common_prefix_len, common_attn_metadata, fast_build), extras)
        )
        _refuse_unknown("build()", extras, self.build_takes)
        return self.metadata("build", common_attn_metadata, extras)

    def update_block_table(
        self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Any:
        """New metadata over another block table, as most of vLLM's builders make it."""
        self.calls.append(Call("update_block_table", (metadata, blk_table, slot_mapping)))
        updated = copy.copy(metadata)
        object.__setattr__(updated, "block_table", blk_table)
        object.__setattr__(updated, "slot_mapping", slot_mapping)
        return updated

    def metadata(
        self, hook: str, common: CommonAttentionMetadata, extras: Answers | None = None
    ) -> Any:
        """What this builder's hooks return."""
        tensors = common.block_table_tensor, common.slot_mapping
        return self.metadata_cls(self.name, hook, common, *tensors, dict(extras or {}))


class MockWorkspaceBuilder(MockBuilder):
    """A builder with a workspace, made at the first request as FlashInfer's is."""

    workspace: torch.Tensor | None = None

    def _get_workspace_buffer(self) -> torch.Tensor:
        if self.workspace is None:
            self.workspace = torch.zeros(8)
        return self.workspace

    def set_workspace_buffer(self, workspace_buffer: torch.Tensor) -> None:
        self.workspace = workspace_buffer


def _refuse_unknown(where: str, extras: Answers, allowed: Iterable[str]) -> None:
    for name in extras.keys() - set(allowed):
        raise TypeError(f"{where} got an unexpected keyword argument '{name}'")


def make_child(
    name: str,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32),
    kv_cache_dtypes: Sequence[str] = ("auto",),
    head_sizes: Sequence[int] = (),
    block_sizes: Sequence[int | MultipleOf] = (MultipleOf(BLOCK_SIZE),),
    layouts: Sequence[KVCacheLayout] | None = None,
    masks_images: bool = False,
    stores: CacheFormat = ALL_FORMATS[0],
    reads: CacheFormat | None = None,
    init_error: Exception | None = None,
    writer_error: Exception | None = None,
    reader_error: Exception | None = None,
    metadata_cls: type[Any] = MockMetadata,
    build_takes: Sequence[str] = (),
    workspace: bool = False,
    backend: Answers | None = None,
    impl: Answers | None = None,
    builder: Answers | None = None,
) -> type[MockBackend]:
    """A new backend class; two calls never give the same.

    Args:
        name: its `get_name()`.
        dtypes, kv_cache_dtypes, head_sizes, block_sizes, layouts, masks_images: what it supports;
            empty `head_sizes` for any, None for any layout.
        stores: the format its writer stores in.
        reads: the format its kernel reads; None for the one it stores in.
        init_error, writer_error, reader_error: raised by the impl's constructor,
            `do_kv_cache_update` and `forward`.
        metadata_cls: what its builder builds, with the fields of `MockMetadata`.
        build_takes: keyword arguments that its `build` takes besides the base class's.
        workspace: whether its builder has the workspace protocol.
        backend, impl, builder: answers of other hooks of the three interfaces. A function is the
            hook itself (a class method where the interface has one); anything else is what the
            hook answers, or the attribute's value.
    """
    calls: list[Call] = []
    common: dict[str, Any] = {"name": name, "calls": calls, "__module__": __name__}
    title = name.title().replace("_", "")
    impl_hooks = _hooks(AttentionImpl, impl or {})
    impl_cls = type(
        f"{title}Impl",
        (MockImpl,),
        common
        | {
            "stores": stores,
            "reads": reads or stores,
            "init_error": init_error,
            "writer_error": writer_error,
            "reader_error": reader_error,
            # vLLM's __new__ sets some flags on the instance, over the class's.
            "instance_answers": {k: v for k, v in impl_hooks.items() if v is (impl or {})[k]},
        }
        | impl_hooks,
    )
    builder_cls = type(
        f"{title}MetadataBuilder",
        (MockWorkspaceBuilder if workspace else MockBuilder,),
        common
        | {"metadata_cls": metadata_cls, "build_takes": frozenset(build_takes)}
        | {"build": _build_taking(build_takes)}
        | _hooks(AttentionMetadataBuilder, builder or {}),
    )
    answers = {
        "supported_dtypes": list(dtypes),
        "supported_kv_cache_dtypes": list(kv_cache_dtypes),
        "get_supported_head_sizes": list(head_sizes),
        "get_supported_kernel_block_sizes": list(block_sizes),
        "supported_kv_cache_layouts": None if layouts is None else tuple(layouts),
        "supports_mm_prefix": masks_images,
    } | dict(backend or {})
    return type(
        f"{title}Backend",
        (MockBackend,),
        common
        | {"impl_cls": impl_cls, "builder_cls": builder_cls}
        | _hooks(AttentionBackend, answers),
    )


def _hooks(interface: type, answers: Answers) -> dict[str, Any]:
    """The members of a subclass of `interface` that gives these answers."""
    return {name: _hook(interface, name, answer) for name, answer in answers.items()}


def _hook(interface: type, name: str, answer: Any) -> Any:
    is_function = isinstance(answer, types.FunctionType)
    if not is_function and not callable(getattr(interface, name, None)):
        return answer

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(Call(name, args, kwargs))
        return answer(self, *args, **kwargs) if is_function else answer

    of_class = isinstance(inspect.getattr_static(interface, name, None), classmethod | staticmethod)
    return classmethod(hook) if of_class else hook


def _build_taking(names: Sequence[str]) -> Any:
    """`MockBuilder.build` with these keyword arguments in its signature."""

    def build(self: MockBuilder, *args: Any, **kwargs: Any) -> Any:
        return MockBuilder.build(self, *args, **kwargs)

    given = inspect.signature(MockBuilder.build)
    fixed = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in names]
    build.__signature__ = given.replace(parameters=fixed + named)  # type: ignore[attr-defined]
    return build


def comparable(answer: Any) -> Any:
    """`answer`, or what it lists, so that equal block sizes are equal: until vLLM 0.32 two
    `MultipleOf` are not."""
    if isinstance(answer, MultipleOf):
        return f"multiple of {answer.base}"
    return list(map(comparable, answer)) if isinstance(answer, list) else answer


def make_routing(
    variant: int = CAUSAL,
    *,
    capture_variant: int = CAUSAL,
    cudagraph_support: AttentionCGSupport = AttentionCGSupport.ALWAYS,
    masked_variants: Sequence[int] = (GENERAL,),
) -> type[CompositeAttentionRouting]:
    """A policy that always selects `variant`; `policy.variant` may be set to another later."""

    def select(self: Any, metadata: CommonAttentionMetadata) -> int:
        return self.variant

    def initialise(self: Any, layer_names: list[str], vllm_config: VllmConfig) -> None:
        self.layer_names = layer_names

    return type(
        "MockRouting",
        (CompositeAttentionRouting,),
        {
            "variant": variant,
            "capture_variant": capture_variant,
            "__init__": initialise,
            "select": select,
            "get_cudagraph_support": staticmethod(lambda config, spec: cudagraph_support),
            "variant_uses_mm_prefix": staticmethod(lambda variant: variant in masked_variants),
        },
    )


def compose(
    general: type[AttentionBackend], causal: type[AttentionBackend], **options: Any
) -> type[Any]:
    """A composite of the two, `MMPrefixAttentionRouting` between them unless said otherwise."""
    defaults: dict[str, Any] = {
        "name": "MockComposite",
        "backend_name": "MOCK_COMPOSITE",
        "module": __name__,
        "routing_policy": MMPrefixAttentionRouting,
    }
    return create_composite_attention_backend(general, causal, **(defaults | options))


def pair(**both: Any) -> tuple[type[MockBackend], type[MockBackend]]:
    """A general child, which masks images, and a causal one; `both` goes to both."""
    return make_child("GENERAL", masks_images=True, **both), make_child("CAUSAL", **both)


class MockLayer(AttentionLayerBase):
    """An attention layer with the attributes that builders, policies and impls read."""

    def __init__(
        self,
        backend: type[AttentionBackend] | None = None,
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_size: int = 8,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
        block_size: int = BLOCK_SIZE,
        sliding_window: int | None = None,
        mm_prefix_clamp_sliding_window: bool = False,
        **impl_args: Any,
    ) -> None:
        self.backend = backend
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.mm_prefix_clamp_sliding_window = mm_prefix_clamp_sliding_window
        if backend is not None:
            self.impl = backend.get_impl_cls()(  # type: ignore[assignment]
                num_heads,
                head_size,
                head_size**-0.5,
                num_kv_heads,
                sliding_window=sliding_window,
                kv_cache_dtype=kv_cache_dtype,
                **impl_args,
            )

    def get_attn_backend(self) -> type[AttentionBackend]:
        assert self.backend is not None
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig | None = None) -> FullAttentionSpec:
        """Of float32, bfloat16 and float16 caches the layer's dtype; of fp8 ones bytes."""
        return FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype if self.kv_cache_dtype == "auto" else torch.float8_e4m3fn,
        )


def make_config(layers: Mapping[str, object] | None = None, **sections: Any) -> VllmConfig:
    """A vLLM configuration in which these layers are registered by name. `sections` replaces
    whole sections, such as `speculative_config`."""
    defaults = {
        "compilation_config": SimpleNamespace(static_forward_context=dict(layers or {})),
        "cache_config": SimpleNamespace(block_size=BLOCK_SIZE, kv_cache_layout=None),
        "model_config": SimpleNamespace(max_model_len=1024, dtype=torch.float32),
        "scheduler_config": SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=1024),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "speculative_config": None,
    }
    return cast(VllmConfig, SimpleNamespace(**(defaults | sections)))


def make_builder(
    backend: type[AttentionBackend], layers: Mapping[str, MockLayer] | None = None, **extras: Any
) -> Any:
    """The backend's builder for one group of these layers; without layers nothing is proven
    about the children's storage."""
    layers = layers or {}
    spec = next(iter(layers.values()), MockLayer()).get_kv_cache_spec()
    return backend.get_builder_cls()(spec, list(layers), make_config(layers), CPU, **extras)


def make_impl(backend: type[AttentionBackend], **impl_args: Any) -> Any:
    """One layer's impl."""
    return MockLayer(backend, **impl_args).impl


def batch(
    requests: Sequence[tuple[int, int]],
    images: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    *,
    padding_rows: int = 0,
    host_lengths: bool = True,
    block_size: int = BLOCK_SIZE,
    **fields: Any,
) -> CommonAttentionMetadata:
    """A batch of `(seq_len, query_len)` requests.

    Args:
        requests: per request its sequence length, this step's queries included.
        images: inclusive absolute `(start, stop)` ranges by request index.
        padding_rows: rows of no query and no sequence after the requests.
        host_lengths: whether `seq_lens_cpu_upper_bound` is there.
        block_size: of the block table, in which no two rows share a block.
        fields: other fields of `CommonAttentionMetadata`.
    """
    rows = [*requests, *[(0, 0)] * padding_rows]
    ends = itertools.accumulate((query_len for _, query_len in rows), initial=0)
    starts = torch.tensor(list(ends), dtype=torch.int32)
    lengths = torch.tensor([seq_len for seq_len, _ in rows], dtype=torch.int32)
    width = max(1, *(-(-seq_len // block_size) for seq_len, _ in rows))
    table = torch.arange(1, 1 + len(rows) * width, dtype=torch.int32).view(len(rows), width)
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (seq_len, query_len) in enumerate(rows)
        for position in range(seq_len - query_len, seq_len)
    ]
    given: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lengths,
        "seq_lens_cpu_upper_bound": lengths if host_lengths else None,
        "num_reqs": len(rows),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(query_len for _, query_len in rows),
        "max_seq_len": max(seq_len for seq_len, _ in rows),
        "block_table_tensor": table,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
        "mm_req_doc_ranges": (
            None if images is None else {row: list(ranges) for row, ranges in images.items()}
        ),
    }
    return CommonAttentionMetadata(**(given | fields))


IMAGE_BATCH = [(8, 8)], {0: [(2, 5)]}
"""One prefill with a live image: `batch(*IMAGE_BATCH)` goes to the general child."""

TEXT_BATCH = ([(8, 8)],)
"""One prefill without images: `batch(*TEXT_BATCH)` goes to the causal child."""
