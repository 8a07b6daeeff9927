# SPDX-License-Identifier: Apache-2.0
"""`VLLM_ATTENTION_BACKEND` from a user's side: each kind of value and each refusal, in the offline
`LLM` and in the OpenAI server, on a model with images, against transformers, in float32."""

import gc
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from tests.e2e.engine import IN_PROCESS, references
from tests.e2e.job import VARIABLE, Outcome, engine_for_each, run_job
from tests.e2e.test_openai_server import CHAT_TEMPLATE, ask, image, text
from tests.tiny_models import GEMMA3, Answer, engine, largest_difference, picture
from tests.tiny_models.check import CLEAR, TOLERANCE

PROMPT = GEMMA3.text_image_text()
NEW_TOKENS = 4
START_SECONDS = 600


class Value(NamedTuple):
    """What a value that is accepted puts into the configuration, and whether the image mask is
    then applied."""

    backend: str | None
    masked: bool = True


VALUES = {
    "auto": Value(None),
    "cpu_prefix_attn": Value("CPU_PREFIX_ATTN"),
    "CPU_ATTN": Value("CPU_ATTN", masked=False),
    "CPU_PREFIX_ATTN+CPU_ATTN": Value("CPU_PREFIX_ATTN__CPU_ATTN"),
    "prefill=CPU_PREFIX_ATTN,decode=CPU_ATTN": Value("PREFILL__CPU_PREFIX_ATTN__DECODE__CPU_ATTN"),
}
GIVEN, OVERRULED = "CPU_PREFIX_ATTN", "NOPE_ATTN"  # which nobody knows
PAIR = "prefill=CPU_PREFIX_ATTN,decode=CPU_ATTN"
UNKNOWN, NOT_HERE = "CPU_ATN", "TRITON_ATTN+FLASH_ATTN"
REFUSED = {
    UNKNOWN: f"{VARIABLE}=CPU_ATN: There is no attention backend 'CPU_ATN'. Did you mean CPU_ATTN",
    "CPU_ATTN+NOPE_ATTN": "There is no attention backend 'NOPE_ATTN'. Did you mean ",
    "CPU_ATTN+CPU_MLA": "CPU_MLA cannot be a child of .*: its forward writes the KV cache itself",
    "prefill=CPU_ATTN": "it must read prefill=NAME,decode=NAME",
    "FLASH_ATTN": r"FLASH_ATTN\. It does not run on CPU\. Name CPU_PREFIX_ATTN instead",
    NOT_HERE: r"TRITON_ATTN\+FLASH_ATTN .*cannot serve .*: TRITON_ATTN does not run on CPU; "
    "FLASH_ATTN does not run on CPU. Name CPU_PREFIX_ATTN instead",
    "CPU_ATTN+CPU_PREFIX_ATTN": "cannot serve .*CPU_ATTN: .*partial multimodal token full attention"
    " not supported",
}
"""Values that are refused, each with its reason: no such name, no pair, no form, not here, and a
general child without an image mask."""


class Seen(NamedTuple):
    """A process, and the backend of its `vllm_config`."""

    pid: int
    backend: str | None


def backend_of(owner: Any) -> Seen:
    backend = owner.vllm_config.attention_config.backend
    return Seen(os.getpid(), backend and backend.name)


def look(worker: Any, core: Seen | None) -> tuple[Seen, Seen | None]:
    """In a worker's process: what the worker has, and what the engine core has sent along."""
    return backend_of(worker), core


class SeenByEngineCore:
    """Becomes a `Seen` in the process of the engine core, where it is unpickled on its way to a
    worker: no call of vLLM's returns what the core has."""

    def __reduce__(self) -> Any:
        return look_in_engine_core, ()


def look_in_engine_core() -> Seen:
    from vllm.v1.engine.core import EngineCore

    gc.unfreeze()  # vLLM hides from the collector what it has when it starts to serve
    [core] = (thing for thing in gc.get_objects() if EngineCore in type(thing).__mro__)
    return backend_of(core)


class Served(NamedTuple):
    """The answer to `PROMPT`, and the configuration in each process."""

    answer: Answer
    front_end: Seen
    engine_core: Seen
    worker: Seen


def answer_and_look(llm: Any) -> Served:
    from vllm import SamplingParams

    sampling = SamplingParams(**engine.sampling(NEW_TOKENS))
    [output] = llm.generate(engine.requests([PROMPT]), sampling, use_tqdm=False)
    in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    core = look_in_engine_core() if in_process else SeenByEngineCore()
    [seen] = llm.collective_rpc(look, args=(core,))
    worker, engine_core = (Seen(*one) for one in seen)
    return Served(engine.answer(output), backend_of(llm.llm_engine), engine_core, worker)


def serve(model: Path, values: list[str]) -> dict[str, Served | str]:
    """One engine for each value."""
    arguments = GEMMA3.llm_arguments(model, enforce_eager=True)
    return engine_for_each(values, arguments, answer_and_look)


def serve_all(model: Path) -> tuple[dict[str, Served | str], Served | str]:
    """One engine for each value, and one with an argument too."""
    served = serve(model, [*VALUES, *REFUSED])
    arguments = GEMMA3.llm_arguments(model, enforce_eager=True, attention_backend=GIVEN)
    return served, engine_for_each([OVERRULED], arguments, answer_and_look)[OVERRULED]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GEMMA3.build(tmp_path_factory.mktemp("gemma3"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def judge(model: Path) -> dict[bool, Answer]:
    """transformers' answer with the image mask, and with the causal one."""
    return {
        masked: references(GEMMA3, model, [PROMPT], NEW_TOKENS, causal=not masked)[0]
        for masked in (True, False)
    }


def test_the_two_masks_can_be_told_apart(judge: dict[bool, Answer]) -> None:
    assert largest_difference(judge[False], judge[True]) > CLEAR


@pytest.fixture(scope="module")
def outcome(model: Path) -> Outcome:
    """One process, and in it one engine after the other."""
    return run_job(serve_all, model, environment=IN_PROCESS)


@pytest.mark.parametrize("asked", VALUES)
def test_the_engine_has_the_backend_and_answers_as_transformers_does(
    asked: str, outcome: Outcome, judge: dict[bool, Answer]
) -> None:
    served = outcome.result[0][asked]
    assert isinstance(served, Served), served
    backend, masked = VALUES[asked]
    assert {seen.backend for seen in served[1:]} == {backend}
    assert served.answer.tokens == judge[masked].tokens
    assert largest_difference(served.answer, judge[masked]) < TOLERANCE


@pytest.mark.parametrize("asked", VALUES)
def test_the_log_says_what_was_asked_for(asked: str, outcome: Outcome) -> None:
    """As the user might have: a pair in the form of the variable, a name in capitals."""
    said = asked if VALUES[asked].backend and "__" in str(VALUES[asked].backend) else asked.upper()
    told = f"{VARIABLE}={asked}: using attention backend {said}." in outcome.log
    assert told == (VALUES[asked].backend is not None)
    assert told or f"{VARIABLE}={asked}: using" not in outcome.log


@pytest.mark.parametrize("asked", REFUSED)
def test_the_engine_does_not_start_and_says_why(asked: str, outcome: Outcome) -> None:
    sentence = outcome.result[0][asked]
    assert isinstance(sentence, str), f"The engine started: {sentence}"
    assert re.search(REFUSED[asked], sentence), sentence


def test_an_argument_wins_with_one_warning_that_names_both(
    outcome: Outcome, judge: dict[bool, Answer]
) -> None:
    served = outcome.result[1]
    assert isinstance(served, Served), served
    assert {seen.backend for seen in served[1:]} == {GIVEN}
    assert largest_difference(served.answer, judge[True]) < TOLERANCE
    warnings = [line for line in outcome.log.splitlines() if "wins over" in line]
    assert len(warnings) == 1
    assert "WARNING" in warnings[0]
    assert GIVEN in warnings[0]
    assert f"{VARIABLE}={OVERRULED}" in warnings[0]


def test_front_end_engine_core_and_worker_have_the_backend(
    model: Path, judge: dict[bool, Answer]
) -> None:
    environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # else no function reaches a worker
    served = run_job(serve, model, [PAIR], environment=environment).result[PAIR]
    assert isinstance(served, Served), served
    assert {seen.backend for seen in served[1:]} == {VALUES[PAIR].backend}
    assert len({seen.pid for seen in served[1:]}) == 3
    assert largest_difference(served.answer, judge[True]) < TOLERANCE


@dataclass
class Server:
    """A server that was started with one value of the variable."""

    process: subprocess.Popen[bytes]
    client: OpenAI
    log: Path

    def wait_until_it_answers(self) -> None:
        until = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            try:
                if self.client.models.list().data:
                    return
            except Exception:
                time.sleep(1)


def start_server(model: Path, folder: Path, asked: str) -> Server:
    template, log = folder / "template.jinja", folder / "log"
    template.write_text(CHAT_TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024"]
    command += ["--chat-template", str(template), "--enforce-eager", "--max-logprobs", "20"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", VARIABLE: asked}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    url = f"http://127.0.0.1:{port}/v1"
    return Server(process, OpenAI(base_url=url, api_key="none", max_retries=0), log)


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One server for each of these values, which start side by side."""
    started = {
        asked: start_server(model, tmp_path_factory.mktemp("server"), asked)
        for asked in (PAIR, UNKNOWN, NOT_HERE)
    }
    try:
        yield started
    finally:
        for server in started.values():
            server.process.terminate()
        for server in started.values():
            server.process.wait(60)


def test_the_server_answers_with_the_backend(servers: dict[str, Server], model: Path) -> None:
    prompt = GEMMA3.prompt("look at", picture(7), "and describe")
    [reference] = references(GEMMA3, model, [prompt], 1)
    server = servers[PAIR]
    server.wait_until_it_answers()
    answer = ask(server.client, text("look at"), image(7), text("and describe"))
    assert answer
    for token, logprob in answer.items():
        assert logprob == pytest.approx(float(reference.logprobs[0, token]), abs=TOLERANCE)
    lines = server.log.read_text().splitlines()
    told = f"{VARIABLE}={PAIR}: using attention backend {PAIR}."
    assert any("APIServer" in line and told in line for line in lines)
    used = f"Using {PAIR}, which was asked for by name."
    assert any("(Worker" in line and used in line for line in lines), "\n".join(lines)


@pytest.mark.parametrize("asked", [UNKNOWN, NOT_HERE])
def test_the_server_does_not_start_and_says_why(asked: str, servers: dict[str, Server]) -> None:
    server = servers[asked]
    assert server.process.wait(START_SECONDS) != 0
    assert re.search(REFUSED[asked], server.log.read_text()), server.log.read_text()
