# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/gpu_check.py` has never met a GPU here; its checking is tried on CPU."""

from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.cpu_prefix_attn import CPUChildBackend, CPUSegmentsBackend

from benchmarks import gpu_check
from tests.e2e.triton_interpreter import run_interpreted
from tests.v1.attention.mock_children import compose

ON_CPU = "--device cpu --head-sizes 64 --timed-image 64 --dtype float32 --windows 0 24".split()
CASES = [case.name for case in gpu_check.cases(64)]
WITH_IMAGES = [case.name for case in gpu_check.cases(64) if case.has_images]


def wrong_cases(backend: Any) -> list[str]:
    shape = gpu_check.Shape(head_size=64, window=24, dtype=torch.float32)
    right = gpu_check.check("a pair", backend, shape, torch.device("cpu"))
    return [name for name, ok in zip(CASES, right, strict=True) if not ok]


def test_what_is_chosen_on_cpu_is_right_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([*ON_CPU, "--pairs", "1"]) == 0
    out = capsys.readouterr().out
    assert "0 of 10 answers wrong." in out
    timings = [line for line in out.splitlines() if line.startswith("| CPU_PREFIX_ATTN")]
    assert len(timings) == 4  # text prefill and decode, which CPU_ATTN alone can do, each window


def test_a_backend_without_the_image_mask_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["CPU_ATTN", *ON_CPU, "--pairs", "1"]) == 1
    out = capsys.readouterr().out
    assert "6 of 10 answers wrong." in out
    assert sum(line.startswith("FAIL  CPU_ATTN") for line in out.splitlines()) == 6
    assert "| CPU_ATTN" not in out  # what is wrong is not timed


def test_a_name_that_nobody_knows_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        gpu_check.main(["CPU_ATN", *ON_CPU])
    assert exit_.value.code == 2
    assert "There is no attention backend 'CPU_ATN'" in capsys.readouterr().err


class OffImpl(CPUAttentionBackendImpl):
    """5 % too much."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs).mul_(1.05)


class OffBackend(CPUChildBackend):
    @staticmethod
    def get_impl_cls() -> type[OffImpl]:
        return OffImpl


def pair(general: Any, causal: Any) -> Any:
    return compose(general, causal, backend_name="CPU_PREFIX_ATTN")  # layers look the name up


def test_a_wrong_causal_child_is_caught_where_it_serves() -> None:
    wrong = wrong_cases(pair(CPUSegmentsBackend, OffBackend))
    assert wrong == [name for name in CASES if name not in WITH_IMAGES]


def test_a_general_child_without_the_image_mask_is_caught() -> None:
    class Child(CPUChildBackend):
        """Another class, since a child with itself is that child."""

    assert wrong_cases(pair(CPUChildBackend, Child)) == WITH_IMAGES


def test_a_pair_that_cannot_be_made_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    class Unmade(CPUChildBackend):
        @staticmethod
        def get_builder_cls() -> Any:
            raise RuntimeError("needs a device")

    shape = gpu_check.Shape(head_size=64, window=None, dtype=torch.float32)
    backend = pair(CPUSegmentsBackend, Unmade)
    assert list(gpu_check.check("a pair", backend, shape, torch.device("cpu"))) == [False]
    assert "cannot be made: needs a device" in capsys.readouterr().out


def check_triton() -> int:
    options = "--device cpu --head-sizes 64 --image 16 --dtype float32 --windows 24 --pairs 0"
    return gpu_check.main(["TRITON_ATTN", *options.split()])


def test_a_gpus_kernel_is_right_in_tritons_interpreter() -> None:
    status, log = run_interpreted(check_triton)
    assert status == 0
    assert "0 of 5 answers wrong." in log


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "There is no cuda device here: vLLM finds cpu." in capsys.readouterr().out
