"""vLLM's own functions of the module, with ours inside, on composites and plain backends."""

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.composite import (
    MMPrefixAttentionRouting,
    PrefillDecodeAttentionRouting,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.attn_utils import AttentionCGSupportInfo, compute_mm_prefix_ranges
from vllm.v1.worker.gpu.model_states import default as default_model_state

from tests.v1.attention.mock_children import (
    CAUSAL,
    CPU,
    GENERAL,
    IMAGE_BATCH,
    TEXT_BATCH,
    MockLayer,
    batch,
    compose,
    make_child,
    pair,
)

ALWAYS = {"_cudagraph_support": AttentionCGSupport.ALWAYS}


class Runner:
    """The state that the GPU model runner keeps for these functions.

    `groups` holds the layers of each KV cache group by name; `microbatches` above 1 switches
    microbatching on.
    """

    def __init__(self, *groups: Mapping[str, MockLayer], microbatches: int = 1) -> None:
        self.config = VllmConfig()
        self.config.model_config = cast(ModelConfig, SimpleNamespace(max_model_len=1024))
        self.config.parallel_config.ubatch_size = microbatches if microbatches > 1 else 0
        for layers in groups:
            self.config.compilation_config.static_forward_context.update(layers)
        self.kv_cache_config = KVCacheConfig(
            num_blocks=4,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(list(layers), next(iter(layers.values())).get_kv_cache_spec())
                for layers in groups
            ],
        )
        self.attn_groups, self.support, self.kernel_block_sizes = attn_utils.init_attn_backend(
            self.kv_cache_config, self.config, CPU
        )

    def builder(self, kv_group: int = 0, group: int = 0, microbatch: int = 0) -> Any:
        return self.attn_groups[kv_group][group].get_metadata_builder(microbatch)

    def build(self, common: CommonAttentionMetadata, **options: Any) -> dict[str, Any]:
        """The metadata of each layer for this batch."""
        return attn_utils.build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=common.num_reqs,
            num_tokens=common.num_actual_tokens,
            query_start_loc_gpu=common.query_start_loc,
            query_start_loc_cpu=common.query_start_loc_cpu,
            max_query_len=common.max_query_len,
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            block_tables=[common.block_table_tensor] * len(self.attn_groups),
            slot_mappings=common.slot_mapping.expand(len(self.attn_groups), -1),
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound,
            mm_req_doc_ranges=common.mm_req_doc_ranges,
            **options,
        )


def children_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The child that built each layer's metadata."""
    return {layer: built.child for layer, built in metadata.items()}


def workspaces(runner: Runner, kv_group: int, group: int = 0, microbatch: int = 0) -> list[int]:
    """The memory addresses of the workspaces that a group's builders hold."""
    builder = runner.builder(kv_group, group, microbatch)
    return [child.workspace.data_ptr() for child in getattr(builder, "children", [builder])]


def test_composite_and_plain_layers_of_one_kv_group_get_groups_of_their_own() -> None:
    composite, plain = compose(*pair()), make_child("PLAIN")
    runner = Runner({"a": MockLayer(composite), "b": MockLayer(plain), "c": MockLayer(composite)})
    assert [(group.backend, group.layer_names) for group in runner.attn_groups[0]] == [
        (composite, ["a", "c"]),
        (plain, ["b"]),
    ]


def test_composite_s_group_builds_both_children_s_builders() -> None:
    general, causal = pair()
    runner = Runner({"a": MockLayer(compose(general, causal))})
    assert [type(child) for child in runner.builder().children] == [
        general.get_builder_cls(),
        causal.get_builder_cls(),
    ]


def test_kernel_block_size_is_one_that_both_children_and_the_neighbour_take() -> None:
    general = make_child("GENERAL", masks_images=True, block_sizes=[MultipleOf(16)])
    causal = make_child("CAUSAL", block_sizes=[32, 64])
    plain = make_child("PLAIN", block_sizes=[16, 32])
    runner = Runner(
        {
            "a": MockLayer(compose(general, causal), block_size=128),
            "b": MockLayer(plain, block_size=128),
        }
    )
    assert runner.kernel_block_sizes == [32]


def test_kv_groups_keep_the_engine_s_order() -> None:
    composite, plain = compose(*pair()), make_child("PLAIN")
    runner = Runner({"b": MockLayer(plain)}, {"a": MockLayer(composite)})
    assert [[group.backend for group in groups] for groups in runner.attn_groups] == [
        [plain],
        [composite],
    ]


def test_graph_support_is_this_project_s_class() -> None:
    assert type(Runner({"a": MockLayer(make_child("PLAIN"))}).support) is AttentionCGSupportInfo


def test_routing_lowers_graph_support_of_children_that_always_support_graphs() -> None:
    runner = Runner({"a": MockLayer(compose(*pair(builder=ALWAYS)))})
    assert runner.support == AttentionCGSupportInfo(
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "MockComposite"
    )


@pytest.mark.parametrize("composite_first", [True, False])
def test_weakest_group_sets_graph_support(composite_first: bool) -> None:
    layers = {
        "a": MockLayer(compose(*pair(builder=ALWAYS))),
        "b": MockLayer(make_child("NO_GRAPHS")),  # NEVER is the interface's default
    }
    groups = [{name: layer} for name, layer in layers.items()]
    runner = Runner(*(groups if composite_first else groups[::-1]))
    assert runner.support == AttentionCGSupportInfo(AttentionCGSupport.NEVER, "NoGraphsBackend")


def test_window_that_images_may_leave_rules_graphs_out_in_whichever_group_it_is() -> None:
    composite = compose(*pair(builder=ALWAYS))
    runner = Runner(
        {"a": MockLayer(composite)},
        {"b": MockLayer(make_child("PLAIN", builder=ALWAYS), sliding_window=8)},
    )
    assert runner.support == AttentionCGSupportInfo(AttentionCGSupport.NEVER, "MockComposite")


def test_group_built_elsewhere_narrows_what_the_engine_s_function_returned() -> None:
    support = Runner({"a": MockLayer(compose(*pair(builder=ALWAYS)))}).support
    assert support.narrow(AttentionCGSupport.NEVER, "EncoderOnly") == AttentionCGSupportInfo(
        AttentionCGSupport.NEVER, "EncoderOnly"
    )


def test_composite_is_named_as_needing_exact_host_query_lengths() -> None:
    runner = Runner(
        {
            "b": MockLayer(
                make_child("PLAIN", backend={"supports_device_cpu_query_lens_mismatch": True})
            )
        },
        {"a": MockLayer(compose(*pair(backend={"supports_device_cpu_query_lens_mismatch": True})))},
    )
    unsupported = attn_utils.get_query_lens_mismatch_unsupported_backend(runner.attn_groups)
    assert unsupported == "MockComposite"


def test_composite_s_workspace_goes_to_its_neighbour() -> None:
    composite = MockLayer(compose(*pair(workspace=True)))
    runner = Runner({"a": composite}, {"b": MockLayer(make_child("PLAIN", workspace=True))})
    first, second = workspaces(runner, 0)
    assert first == second
    assert workspaces(runner, 1) == [first]


def test_neighbour_s_workspace_goes_to_both_children() -> None:
    composite = MockLayer(compose(*pair(workspace=True)))
    runner = Runner({"b": MockLayer(make_child("PLAIN", workspace=True))}, {"a": composite})
    (shared,) = workspaces(runner, 0)
    assert workspaces(runner, 1) == [shared, shared]


def test_two_composites_share_one_workspace() -> None:
    first = MockLayer(compose(*pair(workspace=True)))
    second = MockLayer(compose(*pair(workspace=True), name="OtherComposite"))
    runner = Runner({"a": first}, {"b": second})
    assert len({*workspaces(runner, 0), *workspaces(runner, 1)}) == 1


def test_composite_without_workspaces_does_not_end_the_sharing_between_others() -> None:
    sharing = make_child("ONE", workspace=True), make_child("TWO", workspace=True)
    runner = Runner(
        {"a": MockLayer(compose(*pair()))},
        {"b": MockLayer(sharing[0])},
        {"c": MockLayer(sharing[1])},
    )
    assert workspaces(runner, 1) == workspaces(runner, 2)


@pytest.fixture(name="runner")
def _runner() -> Runner:
    """A composite's layer and, in the next KV group, a plain one."""
    return Runner({"a": MockLayer(compose(*pair()))}, {"b": MockLayer(make_child("PLAIN"))})


def test_live_image_goes_to_the_general_child_and_leaves_plain_layers_alone(
    runner: Runner,
) -> None:
    assert children_of(runner.build(batch(*IMAGE_BATCH))) == {"a": "GENERAL", "b": "PLAIN"}


def test_text_goes_to_the_causal_child(runner: Runner) -> None:
    assert children_of(runner.build(batch(*TEXT_BATCH)))["a"] == "CAUSAL"


def test_image_in_the_past_goes_to_the_causal_child(runner: Runner) -> None:
    assert children_of(runner.build(batch([(20, 4)], {0: [(2, 5)]})))["a"] == "CAUSAL"


def test_metadata_names_the_child_by_its_variant(runner: Runner) -> None:
    variants = [
        runner.build(batch(*given))["a"]._attention_backend_variant
        for given in (IMAGE_BATCH, TEXT_BATCH)
    ]
    assert variants == [GENERAL, CAUSAL]


def test_graph_capture_uses_the_causal_child_whatever_the_batch(runner: Runner) -> None:
    metadata = runner.build(batch(*IMAGE_BATCH), for_cudagraph_capture=True)
    assert children_of(metadata)["a"] == "CAUSAL"


REPLAYED = [
    pytest.param(
        MMPrefixAttentionRouting,
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        [
            batch([(9, 1), (20, 1)], {0: [(2, 7)], 1: [(15, 25)]}),  # an image behind, one around
            batch([(9, 1)], padding_rows=3),
        ],
        id="image mask",
    ),
    pytest.param(
        PrefillDecodeAttentionRouting,
        AttentionCGSupport.UNIFORM_BATCH,
        [
            batch([(9, 1), (20, 1)], is_prefilling=torch.tensor([False, False])),
            batch([(9, 1)], padding_rows=1, is_prefilling=torch.tensor([True, False])),
        ],
        id="phases",
    ),
]


@pytest.mark.parametrize(("policy", "level", "replayed"), REPLAYED)
def test_batches_that_replay_at_the_level_given_go_to_the_child_captured(
    policy: type[Any], level: AttentionCGSupport, replayed: list[CommonAttentionMetadata]
) -> None:
    composite = compose(*pair(builder=ALWAYS), routing_policy=policy)
    runner = Runner({"a": MockLayer(composite)})
    given = attn_utils.get_attn_cg_support(runner.attn_groups, runner.config)
    captured = runner.build(replayed[0], for_cudagraph_capture=True)
    built = [children_of(runner.build(common)) for common in replayed]
    assert (given.min_cg_support, built) == (level, [children_of(captured)] * len(replayed))


@pytest.mark.parametrize(("policy", "level", "replayed"), REPLAYED)
def test_a_batch_above_the_level_given_may_go_to_the_other_child(
    policy: type[Any], level: AttentionCGSupport, replayed: list[CommonAttentionMetadata]
) -> None:
    runner = Runner({"a": MockLayer(compose(*pair(), routing_policy=policy))})
    prefill = batch(*IMAGE_BATCH, is_prefilling=torch.tensor([True]))
    captured = runner.build(replayed[0], for_cudagraph_capture=True)
    assert children_of(runner.build(prefill)) != children_of(captured)


@pytest.mark.parametrize("common", [batch(*IMAGE_BATCH), batch(*TEXT_BATCH)], ids=["image", "text"])
@pytest.mark.parametrize("takes", [["num_accepted_tokens"], []], ids=["taken", "not taken"])
def test_extra_arguments_that_the_model_gives_reach_a_child_that_takes_them(
    takes: list[str], common: CommonAttentionMetadata
) -> None:
    runner = Runner({"a": MockLayer(compose(*pair(build_takes=takes)))})
    model = SimpleNamespace(
        get_extra_common_attn_kwargs=lambda group, num_reqs: {},
        get_extra_attn_kwargs=lambda builder, num_reqs: {"num_accepted_tokens": num_reqs},
    )
    built = runner.build(common, model_specific_attn_metadata=model)
    assert built["a"].extras == ({"num_accepted_tokens": 1} if takes else {})


def test_layers_of_one_group_share_their_metadata() -> None:
    composite = compose(*pair())
    runner = Runner({"a": MockLayer(composite), "b": MockLayer(composite)})
    metadata = runner.build(batch(*IMAGE_BATCH))
    assert metadata["a"] is metadata["b"]


def test_each_kv_group_routes_by_its_own_layers_windows() -> None:
    composite = compose(*pair())
    runner = Runner(
        {"full": MockLayer(composite)}, {"unclamped": MockLayer(composite, sliding_window=4)}
    )
    # A single query inside an image sees keys behind an unclamped window, and nothing more
    # than causal attention does without one.
    decode_in_image = batch([(8, 1)], {0: [(2, 12)]})
    assert children_of(runner.build(decode_in_image)) == {
        "full": "CAUSAL",
        "unclamped": "GENERAL",
    }


def test_ranges_of_the_runner_s_requests_reach_the_routing(runner: Runner) -> None:
    image = MultiModalFeatureSpec(None, "image", "hash", PlaceholderRange(2, 4))
    audio = MultiModalFeatureSpec(None, "audio", "hash", PlaceholderRange(2, 4))
    routed = [
        children_of(
            runner.build(batch([(8, 8)], compute_mm_prefix_ranges(["request"], {"request": [it]})))
        )["a"]
        for it in (image, audio)
    ]
    assert routed == ["GENERAL", "CAUSAL"]


def test_each_microbatch_has_builders_of_its_own() -> None:
    runner = Runner({"a": MockLayer(compose(*pair()))}, microbatches=3)
    builders = [runner.builder(microbatch=number) for number in range(3)]
    everyone = [*builders, *(child for builder in builders for child in builder.children)]
    assert len(set(map(id, everyone))) == 9


def test_builders_of_all_microbatches_share_one_workspace() -> None:
    runner = Runner(
        {"a": MockLayer(compose(*pair(workspace=True)))},
        {"b": MockLayer(make_child("PLAIN", workspace=True))},
        microbatches=2,
    )
    held = [workspaces(runner, group, 0, number) for group in (0, 1) for number in (0, 1)]
    assert len({address for addresses in held for address in addresses}) == 1


def test_microbatches_of_one_step_are_routed_each_by_its_own_requests() -> None:
    runner = Runner({"a": MockLayer(compose(*pair()))}, microbatches=2)
    metadata = [
        runner.build(batch(*IMAGE_BATCH), ubatch_idx=0),
        runner.build(batch(*TEXT_BATCH), ubatch_idx=1),
    ]
    assert [children_of(built)["a"] for built in metadata] == ["GENERAL", "CAUSAL"]


def test_microbatch_is_built_by_its_own_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner({"a": MockLayer(compose(*pair()))}, microbatches=2)
    used = []
    for number in (0, 1):
        builder = runner.builder(microbatch=number)
        monkeypatch.setattr(builder, "build", lambda *_, number=number, **__: used.append(number))
    runner.build(batch(*TEXT_BATCH), ubatch_idx=1)
    assert used == [1]


def test_runner_s_model_state_calls_this_project_s_ranges() -> None:
    ranges = default_model_state.compute_mm_prefix_ranges
    if ranges.__module__ == "vllm.v1.attention.backends.utils":
        pytest.skip("from vLLM 0.33 on the runner takes the function from there")
    source = inspect.getsourcefile(ranges)
    assert source is not None
    assert source.endswith("vllm/v1/worker/gpu/attn_utils/__init__.py")
