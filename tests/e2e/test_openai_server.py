"""The OpenAI server with the official client and a picture as data URL, against transformers."""

import base64
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from PIL import Image

from tests.e2e.engine import references
from tests.tiny_models import GEMMA3, picture
from tests.tiny_models.check import TOLERANCE

START_SECONDS = 600
CHAT_TEMPLATE = (
    "<bos> {% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else ' <start_of_image> ' }}"
    "{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GEMMA3.build(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a server that runs as a user starts it, on a free port of the loopback."""
    log = tmp_path_factory.mktemp("server") / "log"
    template = log.parent / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024"]
    command += ["--chat-template", str(template), "--enforce-eager", "--max-logprobs", "20"]
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        )
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(client):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(1)
        yield client
    finally:
        server.terminate()
        server.wait(60)


def _answers(client: OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except Exception:
        return False


def as_data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def ask(client: OpenAI, *parts: dict[str, Any]) -> dict[int, float]:
    """The first generated token's log-probabilities of the 20 likeliest tokens, by token id."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": list(parts)}],  # type: ignore[misc, list-item]
        max_tokens=1,
        temperature=0,
        logprobs=True,
        top_logprobs=20,
        extra_body={"return_tokens_as_token_ids": True, "ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    return {
        int(top.token.removeprefix("token_id:")): top.logprob
        for top in logprobs.content[0].top_logprobs
    }


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": as_data_url(picture(seed))}}


@pytest.mark.parametrize(
    ("parts", "prompt"),
    [
        ([text("look at the red tree")], GEMMA3.prompt("look at the red tree")),
        (
            [text("look at"), image(7), text("and describe")],
            GEMMA3.prompt("look at", picture(7), "and describe"),
        ),
        (
            [image(7), text("or"), image(8), text("which")],
            GEMMA3.prompt(picture(7), "or", picture(8), "which"),
        ),
    ],
    ids=["text only", "one picture", "two pictures"],
)
def test_the_server_agrees_with_transformers(
    client: OpenAI, model: Path, parts: list[dict[str, Any]], prompt: Any
) -> None:
    [reference] = references(GEMMA3, model, [prompt], 1)
    for token, logprob in ask(client, *parts).items():
        assert logprob == pytest.approx(float(reference.logprobs[0, token]), abs=TOLERANCE)


def test_a_malformed_picture_is_a_client_error_and_the_server_goes_on(client: OpenAI) -> None:
    from openai import BadRequestError

    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(BadRequestError):
        ask(client, broken, text("describe"))
    assert ask(client, text("look"))
