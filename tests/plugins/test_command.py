# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm.plugins.composite_attention`: its answers for the configurations of real models,
which are written here, and its exit statuses. Heads: Gemma 3 4B has 8 of 256 elements, 27B 32 of
128, each with five sliding-window layers to a full one; Gemma 4's full layers have heads of 512."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    Gemma3Config,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3NextConfig,
)
from vllm.plugins.composite_attention import doctor, matrix
from vllm.plugins.composite_attention.__main__ import main
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.tiny_models import gemma4
from tests.v1.attention import mock_children
from tests.v1.attention.mock_children import CacheFormat, compose, make_child

GEMMA3_4B = {"num_hidden_layers": 34, "head_dim": 256, "num_attention_heads": 8}
GEMMA3_27B = {"num_hidden_layers": 62, "head_dim": 128, "num_attention_heads": 32}


@pytest.fixture(autouse=True)
def without_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM logs to the standard output; the command's process does without."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration of each model, and no weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, text in (("gemma-3-4b", GEMMA3_4B), ("gemma-3-27b", GEMMA3_27B)):
        config = Gemma3Config(
            architectures=["Gemma3ForConditionalGeneration"],
            text_config={"num_key_value_heads": 4, "sliding_window": 1024, **text},
        )
        config.save_pretrained(folder / name)
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    parts = gemma4.assemble(
        head_dim=256, global_head_dim=512, num_hidden_layers=6, layer_types=layers
    )
    parts.model.config.architectures = ["Gemma4ForConditionalGeneration"]
    parts.model.config.save_pretrained(folder / "gemma-4")
    parts.processor.save_pretrained(folder / "gemma-4")
    llama = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=32,
    )
    llama.save_pretrained(folder / "llama-3-8b")
    return folder


@pytest.fixture(scope="module")
def other_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations of models in which not every layer is causal attention."""
    folder = tmp_path_factory.mktemp("other_models")
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 64,
    }
    for name, kind, architecture, changes in (
        ("mamba", MambaConfig, "MambaForCausalLM", {}),
        (
            "jamba",
            JambaConfig,
            "JambaForCausalLM",
            {"attn_layer_period": 2, "attn_layer_offset": 1},
        ),
        ("qwen3-next", Qwen3NextConfig, "Qwen3NextForCausalLM", {"head_dim": 64}),
        ("bert", BertConfig, "BertModel", {"num_hidden_layers": 2}),
    ):
        config = kind(architectures=[architecture], **{**sizes, **changes})
        config.save_pretrained(folder / name)
    return folder


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gemma-3-4b", [(29, 256, True), (5, 256, False)]),
        ("gemma-3-27b", [(52, 128, True), (10, 128, False)]),
        ("gemma-4", [(5, 256, True), (1, 512, False)]),
    ],
)
def test_explain_tells_a_models_layers_and_their_composite(
    models: Path, capsys: pytest.CaptureFixture[str], name: str, layers: list[tuple[int, ...]]
) -> None:
    answers = explained(capsys, str(models / name))
    kinds = [
        (a["layer"]["layers"], a["layer"]["head_size"], a["layer"]["windowed"]) for a in answers
    ]
    assert kinds == layers
    assert [answer["chosen"] for answer in answers] == ["CPU_PREFIX_ATTN"] * len(layers)
    stock = dict(answers[0]["candidates"])["CPU_ATTN"]
    assert stock == ["it has no image mask: image tokens would attend causally"]


def test_explain_leaves_a_text_model_to_vllm(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (answer,) = explained(capsys, str(models / "llama-3-8b"))
    assert (answer["layer"]["layers"], answer["layer"]["head_size"]) == (32, 128)
    assert answer["chosen"] == "CPU_ATTN"


def test_explain_hands_vllm_its_own_arguments(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(models / "gemma-3-4b")
    answers = explained(capsys, model, "--attention-backend", "CPU_ATTN", "--dtype", "float32")
    assert {answer["chosen"] for answer in answers} == {"CPU_ATTN"}
    assert {answer["reason"] for answer in answers} == {"CPU_ATTN was asked for"}


def test_explain_refuses_what_the_engine_would(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN+FLASH_ATTN")
    assert main(["explain", str(models / "gemma-3-4b")]) == 1
    assert "refused" in (out := capsys.readouterr().out)
    assert "FLASH_ATTN does not run on CPU. Name CPU_PREFIX_ATTN instead" in out


def test_explain_says_that_the_engine_would_not_start(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH")
    assert main(["explain", str(models / "llama-3-8b")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("The engine would not start: VLLM_ATTENTION_BACKEND=FLASH: There is no")
    assert "FLASH_ATTN" in err


def test_explain_says_in_json_that_the_engine_would_not_start(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH")
    assert main(["explain", str(models / "llama-3-8b"), "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert refused.startswith("VLLM_ATTENTION_BACKEND=FLASH: There is no attention backend")


def test_explain_proves_a_composite_that_is_asked_for(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does, when it builds the first layers' metadata builder."""
    pair = compose(
        make_child("GENERAL", stores=CacheFormat("packed"), masks_images=True),
        make_child("CAUSAL", stores=CacheFormat("planes")),
        backend_name="CUSTOM",
    )
    monkeypatch.setattr(mock_children, "MockComposite", pair, raising=False)
    register_backend(AttentionBackendEnum.CUSTOM, f"{mock_children.__name__}.MockComposite")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "CUSTOM")
    try:
        assert main(["explain", "--head-size", "64", "--json"]) == 1
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["chosen"] is None
    assert "store keys and values differently" in answer["reason"]


@pytest.mark.parametrize(
    ("name", "layers"),
    [("mamba", []), ("jamba", [(2, 64)]), ("qwen3-next", [(1, 64)]), ("bert", [(2, 64)])],
)
def test_explain_counts_layers_with_attention_only(
    other_models: Path, capsys: pytest.CaptureFixture[str], name: str, layers: list[tuple[int, int]]
) -> None:
    answers = explained(capsys, str(other_models / name))
    kinds = [(answer["layer"]["layers"], answer["layer"]["head_size"]) for answer in answers]
    assert kinds == layers


def test_explain_says_so_where_no_layer_has_attention(
    other_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(other_models / "mamba")]) == 0
    assert "It has no layers of attention" in capsys.readouterr().out


def test_explain_leaves_an_encoder_to_vllm(
    other_models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "CPU_PREFIX_ATTN")
    (answer,) = explained(capsys, str(other_models / "bert"))
    assert answer["chosen"] == "CPU_ATTN"
    assert answer["reason"] == "CPU_PREFIX_ATTN was asked for, not taken by vLLM here"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention"]}, "(34) must be equal to the number of `layer_types`"),
        ({"num_attention_heads": 0}, "ZeroDivisionError: "),
    ],
)
def test_explain_refuses_a_configuration_that_is_wrong(
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    said: str,
) -> None:
    config = json.loads((models / "gemma-3-4b" / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["explain", str(tmp_path)]) == 1
    sentence = capsys.readouterr().err.splitlines()[-1]  # vLLM logs an error before it
    assert sentence.startswith("The engine would not start: ")
    assert said in sentence


def test_show_answers_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "12/12:3-6", "--window", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["child"] == "general"
    assert answer["settings"]["window"] == 8
    (request,) = answer["requests"]
    spans = [(part["kind"], part["queries"]) for part in request["segments"]]
    assert spans == [("causal", [0, 2]), ("image", [3, 6]), ("causal", [7, 11])]


@pytest.mark.parametrize(("target", "status"), [("/dev/full", 2), (None, 0)], ids=["full", "pipe"])
def test_an_answer_that_nobody_takes_ends_without_a_traceback(
    target: str | None, status: int
) -> None:
    command = [sys.executable, "-m", "vllm.plugins.composite_attention", "doctor"]
    reading, writing = os.pipe()
    os.close(reading)
    with open(target or writing, "w") as out:
        if target:
            os.close(writing)
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert ("cannot be written" in done.stderr) == bool(target)


def test_explain_takes_a_layer_of_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--head-size", "48", "--window"]) == 0
    out = capsys.readouterr().out
    assert "1 layer: head size 48, sliding window\n  CPU_ATTN  (automatic)" in out
    assert "CPU_PREFIX_ATTN  CPU_ATTN with segments: head_size not supported" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain"], "Give a MODEL, or describe a layer with --head-size N."),
        (
            ["explain", "--head-size", "64", "--dtype", "float7"],
            "float7 is no floating-point",
        ),
        (["explain", "--head-size", "64", "--swim"], "--swim goes to vLLM, with a MODEL only."),
        (["explain", "--head-size", "64", "--dtype", "int8"], "int8 is no floating-point dtype"),
        (["show", "12"], "is no request"),
        (["show", "8/8", "--window", "9" * 30], "tokens is wider than any mask."),
        (["show", f"8/20:16-{'9' * 30}"], "ends beyond any sequence."),
        (["explain", "x", "--window"], "describe a layer of no MODEL"),
    ],
)
def test_misuse_ends_with_2_and_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["swim"],
        ["doctor", "--swim"],
        ["matrix", "x"],
        ["matrix", "--prove", "--head-size", "0"],
    ],
)
def test_an_unknown_argument_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


@pytest.fixture(scope="module")
def all_pairs() -> matrix.Matrix:
    return matrix.all_pairs()


def reasons(table: matrix.Matrix) -> dict[tuple[str, str], str | None]:
    return {(pair.general, pair.causal): pair.reason for pair in table.pairs}


def test_the_matrix_holds_each_ordered_pair_once(all_pairs: matrix.Matrix) -> None:
    names = {pair.general for pair in all_pairs.pairs}
    assert len(all_pairs.pairs) == len(names) ** 2
    assert {"CPU_ATTN", "CPU_PREFIX_ATTN", "TRITON_ATTN", "FLASH_ATTN"} <= names


@pytest.mark.parametrize(
    ("general", "causal", "reason"),
    [
        ("TRITON_ATTN", "FLASH_ATTN", None),
        ("CPU_PREFIX_ATTN", "CPU_ATTN", None),
        ("TRITON_ATTN", "ROCM_ATTN", "they ask for different KV cache specs"),
        ("FLEX_ATTENTION", "CPU_ATTN", "they have no KV cache layout in common"),
    ],
)
def test_the_matrix_says_what_joins_and_why_not(
    all_pairs: matrix.Matrix, general: str, causal: str, reason: str | None
) -> None:
    found = reasons(all_pairs)[general, causal]
    assert found is None if reason is None else reason in (found or "")


def test_the_matrix_says_who_can_be_no_child(all_pairs: matrix.Matrix) -> None:
    assert "its forward writes the KV cache itself" in all_pairs.alone["TRITON_MLA"]
    assert all_pairs.alone["FLASHINFER"].startswith("it cannot be loaded: No module named")


def test_the_matrix_marks_who_has_the_image_mask(all_pairs: matrix.Matrix) -> None:
    assert {"TRITON_ATTN", "CPU_PREFIX_ATTN"} <= set(all_pairs.masking)
    assert "CPU_ATTN" not in all_pairs.masking


FOUR = matrix.Matrix(
    [
        matrix.Pair("A", "A", None),
        matrix.Pair("A", "B", None),
        matrix.Pair("B", "A", "they differ"),
        matrix.Pair("B", "B", None),
    ],
    ["A"],
    {"C": "it is no child", "D": "it is no child"},
)


def test_the_table_numbers_its_reasons() -> None:
    lines = matrix.as_table(FOUR).splitlines()
    assert " 1 A*   =  +" in lines
    assert " 2 B    1  =" in lines
    assert "  1  they differ" in lines
    assert "in no composite: C, D" in lines


def test_the_markdown_table_has_a_row_and_a_column_each() -> None:
    text = matrix.as_markdown(FOUR)
    assert (
        "| general \\ causal | A | B |\n| --- | --- | --- |\n| A\\* | = | + |\n| B | 1 | = |"
        in text
    )


def test_the_json_holds_all() -> None:
    table = json.loads(matrix.as_json(FOUR))
    assert table["pairs"][2] == {
        "general": "B",
        "causal": "A",
        "reason": "they differ",
        "proven": False,
    }
    assert (table["masking"], table["alone"]) == (FOUR.masking, FOUR.alone)


def test_doctor_finds_no_problem_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ours, in front of vLLM's own" in out
    assert "no problems" in out


@pytest.mark.parametrize(
    ("variable", "value", "topic"),
    [
        ("VLLM_PLUGINS", "", "plugin"),
        ("VLLM_ATTENTION_BACKEND", "FLASH", "environment"),
        ("VLLM_ATTENTION_BACKEND", "FLASH_ATTN", "environment"),
        ("VLLM_ATTENTION_BACKEND", "CPU_ATTN+FLASH_ATTN", "environment"),
        ("VLLM_ATTENTION_BACKEND", "CUSTOM", "environment"),
    ],
)
def test_doctor_names_a_problem_and_ends_with_1(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    topic: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["doctor", "--json"]) == 1
    found = [doctor.Finding(**finding) for finding in json.loads(capsys.readouterr().out)]
    assert [finding.topic for finding in found if finding.problem] == [topic]


def test_help_imports_neither_models_nor_pictures() -> None:
    program = (
        "import sys, runpy; sys.argv = ['x', '--help']\n"
        "try: runpy.run_module('vllm.plugins.composite_attention', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = 'transformers', 'matplotlib', 'vllm.config', 'vllm.engine.arg_utils'\n"
        "print(*(name for name in heavy if name in sys.modules), file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (process.returncode, process.stderr.strip()) == (0, "")
    assert all(command in process.stdout for command in ("explain", "matrix", "show", "doctor"))
