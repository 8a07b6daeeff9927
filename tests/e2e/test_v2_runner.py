"""vLLM's V2 model runner with this project's helpers, against transformers, in float32.

The runner and the kernels of TRITON_ATTN are vLLM's own and run in Triton's interpreter. One
engine a configuration; spies note what the runner asks of `attn_utils` and what it then decides.
"""

import copy
import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, BertConfig, BertModel
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends import composite
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.attn_utils import AttentionCGSupportInfo

from tests.e2e.engine import references
from tests.e2e.triton_interpreter import run_interpreted, serve_with
from tests.tiny_models import GEMMA3, Answer, engine, largest_difference
from tests.tiny_models.check import CLEAR, TOLERANCE
from tests.tiny_models.common import VOCABULARY, make_tokenizer, sentence

NEW_TOKENS = 3
STEP_TOKENS = 64
WINDOW = 32
PROMPTS = {
    "text": GEMMA3.text_only(),
    "one image": GEMMA3.text_image_text(),
    "two images": GEMMA3.several_images(2, seed=1),
}
TOGETHER, ALONE = list(PROMPTS), ["text"]
"""Batches. Together they have more tokens than a step, so that the two images are prefilled in
the second one, beside the decodes of the other two requests."""
ENCODER_BACKEND = "EncoderOnlyAttention_CPUAttentionBackend"
"""What vLLM calls CPU_ATTN where it serves encoder layers."""


class Asked(NamedTuple):
    """One call of `compute_mm_prefix_ranges` and its answer."""

    requests: list[str]
    sliding_window: int | None
    ranges: dict[int, list[tuple[int, int]]]


class Step(NamedTuple):
    """One step's metadata: what it was made from, and the children that it is for."""

    query_lens: list[int]
    ranges: dict[int, list[tuple[int, int]]] | None
    variants: set[int | None]


@dataclass
class Notes:
    """What the spies saw, in the order of the runner's calls."""

    files: dict[str, str] = field(default_factory=dict)
    support: list[AttentionCGSupportInfo] = field(default_factory=list)
    narrowed: list[AttentionCGSupportInfo] = field(default_factory=list)
    decisions: list[dict[CUDAGraphMode, Any]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    kernels: set[str] = field(default_factory=set)


def spy() -> Notes:
    """Watch this project's functions where the runner finds them, and what it does with them."""
    from triton.runtime.interpreter import GridExecutor
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.model_states import default as model_state

    notes = Notes()

    def watch(owner: Any, name: str, note: Callable[[dict[str, Any], Any], None]) -> None:
        real = getattr(owner, name)
        notes.files[name] = inspect.getfile(real)

        @functools.wraps(real)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            note(inspect.signature(real).bind(*args, **kwargs).arguments, result)
            return result

        setattr(owner, name, watched)

    def note_ranges(call: dict[str, Any], ranges: dict[int, Any]) -> None:
        notes.asked.append(Asked(list(call["req_ids"]), call["sliding_window"], ranges))

    def note_step(call: dict[str, Any], metadata: dict[str, Any]) -> None:
        lens = call["query_start_loc_cpu"].diff().tolist()
        variants = [getattr(m, "_attention_backend_variant", None) for m in metadata.values()]
        chosen = {None if variant is None else int(variant) for variant in variants}
        notes.steps.append(Step(lens, call["mm_req_doc_ranges"], chosen))

    resolve = CompilationConfig.resolve_cudagraph_mode_and_sizes

    def note_decision(call: dict[str, Any], _: CUDAGraphMode) -> None:
        # The CPU platform has switched graphs off. What would it be had the user asked for them?
        config = copy.copy(call.pop("self"))
        decided: dict[CUDAGraphMode, Any] = {}
        for wish in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY):
            config.cudagraph_mode = wish
            try:
                decided[wish] = resolve(config, **call)
            except ValueError as refusal:
                decided[wish] = str(refusal)
        notes.decisions.append(decided)

    watch(model_runner, "init_attn_backend", lambda _, made: notes.support.append(made[1]))
    watch(AttentionCGSupportInfo, "narrow", lambda _, info: notes.narrowed.append(info))
    watch(CompilationConfig, "resolve_cudagraph_mode_and_sizes", note_decision)
    watch(model_state, "compute_mm_prefix_ranges", note_ranges)
    watch(model_state, "build_attn_metadata", note_step)
    watch(GridExecutor, "__call__", lambda call, _: notes.kernels.add(call["self"].fn.__name__))
    return notes


def serve(
    model: Path, batches: list[list[str]], backend: Callable[[], type] | None = None
) -> tuple[list[dict[str, Answer]], Notes]:
    """Answer `batches` of `PROMPTS` with the backend that `backend` makes, or with the plugin's."""
    from vllm import LLM, SamplingParams

    if backend is not None:
        serve_with(backend())
    notes = spy()
    options: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": STEP_TOKENS}
    llm = LLM(**GEMMA3.llm_arguments(model, **options))
    sampling = SamplingParams(**engine.sampling(NEW_TOKENS))
    answers = []
    for batch in batches:
        requests = engine.requests([PROMPTS[name] for name in batch])
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        answers.append(dict(zip(batch, map(engine.answer, outputs), strict=True)))
    return answers, notes


def embed(model: Path, text: str) -> tuple[torch.Tensor, Notes]:
    """The embedding of `text` by an encoder; its attention groups are built by its model state."""
    from vllm import LLM

    notes = spy()
    llm = LLM(str(model), runner="pooling", dtype="float32", max_model_len=64, enforce_eager=True)
    [output] = llm.embed([text], use_tqdm=False)
    return torch.tensor(output.outputs.embedding), notes


def triton() -> type[AttentionBackend]:
    return AttentionBackendEnum.TRITON_ATTN.get_class()


def pair(causal: type[AttentionBackend], factory: Any = composite) -> type[AttentionBackend]:
    """TRITON_ATTN for images and `causal` for the rest, joined by `factory`."""
    return factory.create_composite_attention_backend(
        triton(),
        causal,
        name="TritonPair",
        backend_name="CUSTOM",
        module=__name__,
        routing_policy=factory.MMPrefixAttentionRouting,
    )


def pair_of_triton() -> type[AttentionBackend]:
    return pair(type("CausalTritonBackend", (triton(),), {}))


def lying_pair() -> type[AttentionBackend]:
    return pair(AttentionBackendEnum.CPU_ATTN.get_class())


def lying_pair_of_vllm() -> type[AttentionBackend]:
    """The same from vLLM's own factory, in the file that ours stands in for."""
    path = Path(inspect.getfile(composite)).parent.with_suffix(".py")
    spec = importlib.util.spec_from_file_location("vllm_composite", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return pair(AttentionBackendEnum.CPU_ATTN.get_class(), module)


@dataclass
class Run:
    """What came out of one engine."""

    answers: list[dict[str, Answer]]
    notes: Notes
    log: str


def run(model: Path, *args: Any) -> Run:
    (answers, notes), log = run_interpreted(serve, model, *args)
    return Run(answers, notes, log)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, a sliding and a full one, because the interpreter is slow."""
    folder = tmp_path_factory.mktemp("gemma3")
    return GEMMA3.build(folder, num_hidden_layers=2, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def judge(model: Path) -> dict[str, Answer]:
    answers = references(GEMMA3, model, list(PROMPTS.values()), NEW_TOKENS)
    return dict(zip(PROMPTS, answers, strict=True))


@pytest.fixture(scope="module")
def plugin(model: Path) -> Run:
    return run(model, [TOGETHER, ALONE])


@pytest.fixture(scope="module")
def triton_alone(model: Path) -> Run:
    return run(model, [TOGETHER], triton)


@pytest.fixture(scope="module")
def triton_pair(model: Path) -> Run:
    return run(model, [TOGETHER, ALONE], pair_of_triton)


@pytest.fixture(params=["plugin", "triton_alone", "triton_pair"])
def any_run(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(request.param)


def image_ranges(answer: Answer, model: Path) -> list[tuple[int, int]]:
    """The first and last position of each run of image tokens in a prompt."""
    image = AutoConfig.from_pretrained(model).image_token_id
    ranges = []
    for token, run in groupby(enumerate(answer.prompt_token_ids), key=lambda at: at[1]):
        positions = [position for position, _ in run]
        if token == image:
            ranges.append((positions[0], positions[-1]))
    return ranges


def test_requests_together_agree_with_transformers(any_run: Run, judge: dict[str, Answer]) -> None:
    for name, answer in any_run.answers[0].items():
        assert answer.tokens == judge[name].tokens
        assert largest_difference(answer, judge[name]) < TOLERANCE


def test_the_causal_mask_would_not_agree(model: Path, judge: dict[str, Answer]) -> None:
    names = ["one image", "two images"]
    prompts = [PROMPTS[name] for name in names]
    for name, causal in zip(
        names, references(GEMMA3, model, prompts, NEW_TOKENS, causal=True), strict=True
    ):
        assert largest_difference(causal, judge[name]) > CLEAR


def test_the_v2_runner_served(any_run: Run) -> None:
    assert "Using V2 Model Runner" in any_run.log
    assert "_prepare_prefill_inputs_kernel" in any_run.notes.kernels


def test_the_plugin_chose_the_cpu_composite(plugin: Run) -> None:
    assert "Using CPU_PREFIX_ATTN" in plugin.log
    assert "kernel_unified_attention" not in plugin.notes.kernels


@pytest.mark.parametrize("name", ["triton_alone", "triton_pair"])
def test_triton_s_own_kernels_wrote_and_attended(name: str, request: pytest.FixtureRequest) -> None:
    kernels = request.getfixturevalue(name).notes.kernels
    assert {"kernel_unified_attention", "reshape_and_cache_kernel_flash"} <= kernels


def test_the_runner_calls_this_project_s_functions(any_run: Run) -> None:
    ours = attn_utils.__file__
    assert any_run.notes.files["compute_mm_prefix_ranges"] == ours
    assert any_run.notes.files["narrow"] == ours
    assert [type(info) for info in any_run.notes.support] == [AttentionCGSupportInfo]


def test_the_runner_asks_for_each_request_s_image_ranges(
    any_run: Run, judge: dict[str, Answer], model: Path
) -> None:
    """Whatever the order of the batch, with the layers' window, at every step."""
    wanted = [image_ranges(judge[name], model) for name in TOGETHER]
    together = [asked for asked in any_run.notes.asked if len(asked.requests) == len(TOGETHER)]
    assert len(together) >= 2
    for asked in together:
        order = [int(request.partition("-")[0]) for request in asked.requests]
        assert sorted(order) == [0, 1, 2]
        assert asked.ranges == dict(enumerate(wanted[number] for number in order))
        assert asked.sliding_window == WINDOW


def test_the_ranges_reach_the_metadata_builders(any_run: Run) -> None:
    assert [step.ranges for step in any_run.notes.steps] == [
        asked.ranges for asked in any_run.notes.asked
    ]


@pytest.mark.parametrize("name", ["plugin", "triton_pair"])
def test_each_step_is_routed_by_its_images(name: str, request: pytest.FixtureRequest) -> None:
    notes = request.getfixturevalue(name).notes
    routed = [(sorted(step.query_lens), step.variants) for step in notes.steps]
    assert routed == [
        ([8, 13, 37], {0}),  # what stands before the two images, the text, all of the one image
        ([1, 1, 47], {0}),  # the two images beside two decodes
        ([1, 1, 1], {1}),
        ([1], {1}),
        ([13], {1}),  # the text alone
        ([1], {1}),
        ([1], {1}),
    ]


def test_a_composite_s_graph_level_reaches_the_decision(triton_pair: Run) -> None:
    """Both children allow all graphs; routing behind the unclamped window allows none."""
    level = AttentionCGSupportInfo(AttentionCGSupport.NEVER, "TritonPair")
    assert triton_pair.notes.support == triton_pair.notes.narrowed == [level]
    [decision] = triton_pair.notes.decisions
    assert decision[CUDAGraphMode.FULL_DECODE_ONLY] == CUDAGraphMode.NONE
    assert "not supported with TritonPair backend" in decision[CUDAGraphMode.FULL]


def test_a_lone_child_s_graph_level_reaches_the_decision(triton_alone: Run) -> None:
    assert triton_alone.notes.narrowed == [AttentionCGSupportInfo(AttentionCGSupport.ALWAYS, None)]
    assert triton_alone.notes.decisions == [
        {wish: wish for wish in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY)}
    ]


def test_without_a_window_decode_graphs_stay(tmp_path: Path) -> None:
    model = GEMMA3.build(tmp_path, num_hidden_layers=1, layer_types=["full_attention"])
    notes = run(model, [], pair_of_triton).notes
    level = AttentionCGSupportInfo(AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "TritonPair")
    assert notes.narrowed == [level]
    decode_only = CUDAGraphMode.FULL_DECODE_ONLY
    assert notes.decisions == [{CUDAGraphMode.FULL: decode_only, decode_only: decode_only}]


def test_groups_built_elsewhere_narrow_the_level(tmp_path: Path) -> None:
    """An encoder has no KV cache group: its model state builds its attention groups."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    reference = BertModel(config).eval()
    tokenizer = make_tokenizer({})
    for part in (reference, tokenizer):
        part.save_pretrained(tmp_path)
    text = sentence(0, 9)

    (embedding, notes), _ = run_interpreted(embed, tmp_path, text)

    with torch.inference_mode():
        hidden = reference(**tokenizer(text, return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(embedding, torch.nn.functional.normalize(hidden[0, 0], dim=0))
    assert notes.support == [AttentionCGSupportInfo()]
    level = AttentionCGSupportInfo(AttentionCGSupport.NEVER, ENCODER_BACKEND)
    assert notes.narrowed == [level]
    assert notes.decisions[0][CUDAGraphMode.FULL_DECODE_ONLY] == CUDAGraphMode.NONE


def test_a_pair_that_lies_is_refused_before_it_serves(model: Path) -> None:
    """Declared layouts agree, but K and V lie at different places of a block."""
    with pytest.raises(RuntimeError, match="ValueError: TRITON_ATTN and CPU_ATTN cannot share"):
        run(model, [["text"]], lying_pair)


def test_vllm_s_own_factory_serves_wrong_tokens_with_it(
    model: Path, judge: dict[str, Answer]
) -> None:
    answer = run(model, [["one image"]], lying_pair_of_vllm).answers[0]["one image"]
    right = judge["one image"]
    assert answer.tokens[0] == right.tokens[0]  # the prefill's; the decodes read the cache
    assert float((answer.logprobs[1] - right.logprobs[1]).abs().max()) > CLEAR
