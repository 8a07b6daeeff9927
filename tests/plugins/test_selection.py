"""What the plugin registers, and which backend it has vLLM choose for a layer."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.platforms import current_platform
from vllm.plugins import composite_attention
from vllm.plugins.composite_attention import choosing, engine, pairs, selection
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig

COMPOSITE = "vllm.v1.attention.backends.cpu_prefix_attn.CPUPrefixAttentionBackend"
STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


@pytest.fixture(autouse=True)
def warnings_are_said_again(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """vLLM's loggers do not propagate and say some things once; here they do, and again."""
    from vllm import logger

    for name in ("_print_info_once", "_print_warning_once"):
        getattr(logger, name).cache_clear()
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(caplog.handler)
    yield
    vllm_logger.removeHandler(caplog.handler)


def chosen(selected: AttentionBackendEnum | None = None, **layer: Any) -> str:
    config = AttentionSelectorConfig(
        **{
            "head_size": 64,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": "auto",
            "block_size": None,
            "use_mm_prefix": True,
            **layer,
        }
    )
    return current_platform.get_attn_backend_cls(selected, config, num_heads=4)  # type: ignore[arg-type]


def test_a_decoder_layer_that_needs_the_image_mask_gets_the_composite() -> None:
    assert chosen() == COMPOSITE


def test_the_log_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen()
    assert "Using CPU_PREFIX_ATTN: image tokens of this model attend both ways" in caplog.text


@pytest.mark.parametrize(
    "layer",
    [
        {"use_mm_prefix": False},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"attn_type": AttentionType.ENCODER_DECODER},
    ],
    ids=["text-only model", "encoder-only layer", "cross attention"],
)
def test_every_other_layer_keeps_what_it_had(layer: dict[str, Any]) -> None:
    assert chosen(**layer) == STOCK


def test_mla_layers_keep_what_they_had() -> None:
    assert "mla" in chosen(use_mla=True)


@pytest.mark.parametrize("name", ["TRITON_ATTN", "FLASH_ATTN"])
def test_a_models_wish_for_a_gpu_backend_does_not_defeat_it(name: str) -> None:
    assert chosen(AttentionBackendEnum[name]) == COMPOSITE


def test_the_composite_by_name_serves_a_text_only_model_too() -> None:
    assert chosen(AttentionBackendEnum["CPU_PREFIX_ATTN"], use_mm_prefix=False) == COMPOSITE


def test_cpu_attn_by_name_is_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(AttentionBackendEnum.CPU_ATTN) == STOCK
    assert "CPU_ATTN was asked for by name" in caplog.text


@pytest.mark.parametrize(
    "layer", [{"block_size": 16}, {"kv_cache_dtype": "bfloat16"}, {"has_sink": True}], ids=str
)
def test_what_cpu_attn_serves_without_declaring_it_gets_the_composite(
    layer: dict[str, Any],
) -> None:
    assert chosen(**layer) == COMPOSITE


def test_what_the_composite_cannot_serve_stays_stock_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert chosen(use_dcp=True) == STOCK
    assert "which masks image tokens causally: CPU_PREFIX_ATTN cannot serve (" in caplog.text
    assert "DCP not supported" in caplog.text


def test_a_gpu_backend_by_environment_is_refused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH_ATTN")
    with pytest.raises(ValueError, match=r"asks for FLASH_ATTN\. It does not run on CPU"):
        chosen(AttentionBackendEnum.FLASH_ATTN, use_mm_prefix=False)


def test_a_backend_that_cannot_be_imported_is_refused_by_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    with pytest.raises(ValueError, match="FLASHINFER cannot be loaded: No module named"):
        chosen(AttentionBackendEnum.FLASHINFER, use_mm_prefix=False)


def test_another_kind_of_cpu_backend_by_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM would serve an MLA layer with CPU_MLA, whatever is asked for."""
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "CPU_ATTN")
    with pytest.raises(ValueError, match=r"CPU_ATTN was asked for .* MLA not supported"):
        chosen(AttentionBackendEnum.CPU_ATTN, use_mla=True, use_mm_prefix=False)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("somebody.no_such_module.Backend", "No module named 'somebody'"),
        (f"{__name__}.NoSuchBackend", f"module '{__name__}' has no attribute 'NoSuchBackend'"),
    ],
)
def test_a_class_that_is_not_where_it_was_registered_is_refused_by_name(
    path: str, why: str, custom: AttentionBackendEnum
) -> None:
    register_backend(custom, path)
    with pytest.raises(ValueError, match=f"^CUSTOM cannot be loaded: {why}"):
        chosen(custom)


def test_a_composite_by_name_says_which_layers_it_does_not_serve(
    caplog: pytest.LogCaptureFixture,
) -> None:
    composite = AttentionBackendEnum["CPU_PREFIX_ATTN"]
    with caplog.at_level(logging.INFO, "vllm"):
        assert chosen(composite, attn_type=AttentionType.ENCODER_ONLY) == STOCK
    assert "CPU_PREFIX_ATTN serves decoder layers only" in caplog.text


class SomebodysBackend(CPUAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True


@pytest.fixture
def custom() -> Iterator[AttentionBackendEnum]:
    register_backend(AttentionBackendEnum.CUSTOM)(SomebodysBackend)
    yield AttentionBackendEnum.CUSTOM
    AttentionBackendEnum.CUSTOM.clear_override()


@pytest.mark.parametrize("environment", ["", "CUSTOM"], ids=["argument", "environment"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_backend_that_somebody_has_registered_serves_where_it_is_asked_for(
    masked: bool, environment: str, custom: AttentionBackendEnum, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", environment)
    assert chosen(custom, use_mm_prefix=masked) == f"{__name__}.SomebodysBackend"
    assert chosen(custom, attn_type=AttentionType.ENCODER_ONLY) == STOCK


def test_triton_by_environment_serves_where_it_runs_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In Triton's interpreter."""
    monkeypatch.setattr(choosing, "HAS_TRITON", True)
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
    triton = AttentionBackendEnum.TRITON_ATTN
    assert chosen(triton) == triton.get_path()


def test_a_composite_by_name_that_cannot_serve_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"CPU_PREFIX_ATTN was asked for .* DCP not supported"):
        chosen(AttentionBackendEnum["CPU_PREFIX_ATTN"], use_dcp=True)


def test_a_pair_of_gpu_backends_by_name_is_refused_by_its_children() -> None:
    """FLASH_ATTN would compare the device's capability, and a CPU has none."""
    selected = pairs.backend_for("CPU_ATTN+FLASH_ATTN")
    with pytest.raises(
        ValueError, match=r"CPU_ATTN\+FLASH_ATTN .*: FLASH_ATTN does not run on CPU"
    ):
        chosen(selected)


def engine_arguments(backend: str | None, by_kind: dict[str, str] | None = None) -> Any:
    attention = SimpleNamespace(backend=None, backend_per_kind=by_kind or {})
    return SimpleNamespace(attention_backend=backend, attention_config=attention)


def backend_given(arguments: Any) -> Any:
    """The backend that vLLM then reads from the arguments."""
    return selection._with_environment(lambda arguments: arguments.attention_backend, arguments)


def test_the_environment_acts_as_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "cpu_prefix_attn")
    assert backend_given(engine_arguments(None)) is AttentionBackendEnum["CPU_PREFIX_ATTN"]


def test_arguments_that_serve_twice_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = engine_arguments(None)
    for name in ("CPU_PREFIX_ATTN", "CPU_ATTN"):
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", name)
        assert backend_given(arguments) is AttentionBackendEnum[name]
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND")
    assert backend_given(arguments) is None


def test_what_vllm_has_remembered_does_not_outlive_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgotten = Mock()
    monkeypatch.setattr(
        selector, "_cached_get_attn_backend", SimpleNamespace(cache_clear=forgotten)
    )
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "CPU_ATTN")
    backend_given(engine_arguments(None))
    forgotten.assert_called_once_with()


def test_an_argument_wins_over_the_environment_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "CPU_PREFIX_ATTN")
    assert backend_given(engine_arguments("CPU_ATTN")) == "CPU_ATTN"
    assert "CPU_ATTN, given as an argument, wins over" in caplog.text


def test_backends_by_kind_win_over_the_environment_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "CPU_PREFIX_ATTN")
    backend_given(engine_arguments(None, {"sliding_window": "CPU_ATTN"}))
    assert "{'sliding_window': 'CPU_ATTN'}, given as an argument, wins over" in caplog.text


def test_an_argument_wins_over_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "NOPE_ATTN")
    assert backend_given(engine_arguments("CPU_ATTN")) == "CPU_ATTN"
    assert chosen(AttentionBackendEnum.CPU_ATTN) == STOCK


def test_loading_twice_changes_nothing() -> None:
    before = current_platform.get_attn_backend_cls
    members = list(AttentionBackendEnum.__members__)
    composite_attention.register()
    assert current_platform.get_attn_backend_cls is before  # type: ignore[attr-defined]
    assert list(AttentionBackendEnum.__members__) == members


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0.0"])
def test_an_unknown_engine_is_left_alone_with_a_sentence(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "engine_version", lambda: version)
    monkeypatch.setattr(selection, "register", lambda: pytest.fail("it must stand aside"))
    composite_attention.register()
    assert f"works with vLLM 0.30 to 0.33 and stands aside beside vLLM {version}" in caplog.text


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0", "0.33.1rc1", "0.31.0+cpu"])
def test_a_known_engine_is_supported(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "engine_version", lambda: version)
    assert engine.unsupported_reason() is None


def engine_config(
    *, is_mm_prefix_lm: bool = True, scheduler_cls: Any = None, backend: Any = None
) -> Any:
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend),
        model_config=SimpleNamespace(is_mm_prefix_lm=is_mm_prefix_lm),
        scheduler_config=SimpleNamespace(
            is_multimodal_model=True,
            disable_chunked_mm_input=False,
            scheduler_cls=scheduler_cls,
            long_prefill_token_threshold=7,
        ),
    )


def configured(config: Any) -> Any:
    selection._keep_images_whole(lambda config: None, config)
    return config.scheduler_config


def test_images_that_attend_both_ways_are_scheduled_whole() -> None:
    assert configured(engine_config()).scheduler_cls == selection.WHOLE_IMAGE_SCHEDULER


def test_who_asks_for_cpu_attn_keeps_its_scheduler() -> None:
    scheduler = configured(engine_config(backend=AttentionBackendEnum.CPU_ATTN))
    assert scheduler.scheduler_cls is None
    assert scheduler.long_prefill_token_threshold == 7


def test_no_threshold_keeps_an_image_from_its_step() -> None:
    assert configured(engine_config()).long_prefill_token_threshold == 0


def test_other_models_keep_their_scheduler() -> None:
    scheduler = configured(engine_config(is_mm_prefix_lm=False))
    assert scheduler.scheduler_cls is None


def test_a_scheduler_of_the_users_is_kept_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert configured(engine_config(scheduler_cls="their.Scheduler")).scheduler_cls == (
        "their.Scheduler"
    )
    assert "their.Scheduler may end a step inside an image" in caplog.text


def after_the_models_wish(
    *,
    given: str | None = None,
    drafter: bool = False,
    diffusion: bool = False,
    masked: bool = True,
) -> AttentionBackendEnum | None:
    """The backend after a model like Gemma 4 has asked for TRITON_ATTN where none is given."""

    def wish(vllm_config: Any) -> None:
        if vllm_config.attention_config.backend is None:
            vllm_config.attention_config.backend = AttentionBackendEnum.TRITON_ATTN

    vllm_config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=given and AttentionBackendEnum[given]),
        model_config=SimpleNamespace(is_mm_prefix_lm=masked),
        speculative_config=SimpleNamespace() if drafter else None,
        diffusion_config=SimpleNamespace() if diffusion else None,
    )
    selection._without_the_models_wish(wish, vllm_config)
    return vllm_config.attention_config.backend


def test_a_models_wish_leaves_the_choice_of_a_composite_open() -> None:
    assert after_the_models_wish() is None


@pytest.mark.parametrize("given", ["TRITON_ATTN", "FLASH_ATTN"])
def test_what_the_user_names_is_no_models_wish(given: str) -> None:
    assert after_the_models_wish(given=given) is AttentionBackendEnum[given]


def test_a_drafter_keeps_the_backend_that_the_model_has_asked_for() -> None:
    assert after_the_models_wish(drafter=True) is AttentionBackendEnum.TRITON_ATTN


def test_a_diffusion_model_keeps_the_backend_that_it_has_asked_for() -> None:
    assert after_the_models_wish(diffusion=True) is AttentionBackendEnum.TRITON_ATTN


def test_a_text_model_keeps_its_wish() -> None:
    assert after_the_models_wish(masked=False) is AttentionBackendEnum.TRITON_ATTN
