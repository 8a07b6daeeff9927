# SPDX-License-Identifier: Apache-2.0
"""Soak the OpenAI server with this project active: `python -m tools.soak --minutes 2`.

A tiny Gemma 3 is served on the loopback with a KV cache that is too small for its load. Requests of
every kind come 32 at once from this process, good and bad, and each answer is compared with that of
the same request alone: token for token, at temperature 0 in float32. Anything else than expected is
a finding; with findings the exit status is 1.
"""

import argparse
import asyncio
import base64
import io
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
from openai import APIStatusError, AsyncOpenAI

from tests.tiny_models import GEMMA3, picture, sentence

MOST_IMAGES = 4
MODEL_LENGTH = 512
LEAST_REQUESTS = 300
START_SECONDS = 600
REQUEST_SECONDS = 300
LARGEST_GROWTH = 0.03
TEMPLATE = (
    "<bos> {% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else ' <start_of_image> ' }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
SERVER = {
    "dtype": "float32",
    "max-model-len": MODEL_LENGTH,
    "max-num-batched-tokens": 128,
    "max-num-seqs": 16,
    "block-size": 32,
    "num-gpu-blocks-override": 96,
    "limit-mm-per-prompt": f'{{"image": {MOST_IMAGES}}}',
    "max-logprobs": 1,
}


class Case(NamedTuple):
    """A request of the catalogue, and what is to become of it."""

    kind: str
    parts: list[dict[str, Any]]
    new_tokens: int = 24
    status: int = 200
    cut_after: int | None = None
    """Tokens of the stream after which the client goes away."""


def words(seed: int, count: int) -> dict[str, Any]:
    return {"type": "text", "text": sentence(seed, count)}


def image(seed: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    picture(seed, (48 + 8 * (seed % 5), 64)).save(buffer, "PNG")
    return image_url(buffer.getvalue())


def image_url(content: bytes) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def catalogue() -> list[Case]:
    """Every request that is ever sent: eight of each kind."""
    cases = []
    for n in range(8):
        seed = 100 * n
        text, one = [words(seed, 10 + 6 * n)], [words(seed, 6), image(seed), words(seed + 1, 8)]
        many = [words(seed, 4)]
        for index in range(2 + n % (MOST_IMAGES - 1)):
            many += [image(seed + index), words(seed + index + 2, 3 + 2 * index)]
        long = [words(seed, 200), image(seed + 9), words(seed + 3, 120 + 10 * n)]
        cases += [
            Case("text", text, 40),
            Case("one image", one, 40),
            Case("many images", many),
            Case("long prompt", long),
            # Prompts that begin alike and end apart: their prefix may be in the cache or not.
            Case("repeated prompt", [words(7, 20), image(7), words(8 + n % 2, 12)], 16),
            Case("cut stream", one if n % 2 else many, 40, cut_after=3 + n),
            Case("malformed image", [image_url(BROKEN[n % len(BROKEN)]), *text], status=400),
            Case("too many images", [image(seed)] * (MOST_IMAGES + 1 + n) + text, status=400),
            Case("oversize prompt", [words(seed, MODEL_LENGTH + 50 * n), *one], status=400),
        ]
    return cases


BROKEN = [b"", b"\0\0\0", b"no picture at all", b"\x89PNG\r\n\x1a\n" + b"\xff" * 200]


@dataclass
class Tally:
    """What became of the requests of one kind."""

    sent: int = 0
    as_expected: int = 0
    seconds: list[float] = field(default_factory=list)


class Answer(NamedTuple):
    """The answer to one request: its tokens, or the HTTP status of its error."""

    status: int
    tokens: list[str]


@dataclass
class Soak:
    """One run against a server that is up."""

    client: AsyncOpenAI
    alone: dict[int, Answer] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, int]] = field(default_factory=list)
    """Bytes by process, twice a second."""
    running: list[float] = field(default_factory=list)

    async def ask(self, case: Case, *, whole: bool = False) -> Answer:
        """The answer to `case`; to the end, whether it is to be cut or not, if `whole`."""
        tokens: list[str] = []
        try:
            stream: Any = await self.client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": case.parts}],  # type: ignore[misc, list-item]
                max_tokens=case.new_tokens,
                temperature=0,
                logprobs=True,
                stream=True,
                extra_body={"return_tokens_as_token_ids": True, "ignore_eos": True},
            )
            async with stream:
                async for chunk in stream:
                    for choice in chunk.choices:
                        logprobs = choice.logprobs
                        tokens += [top.token for top in (logprobs and logprobs.content) or ()]
                    if not whole and case.cut_after and len(tokens) >= case.cut_after:
                        break
        except APIStatusError as error:
            return Answer(error.status_code, tokens)
        return Answer(200, tokens)

    async def check(self, index: int, case: Case) -> None:
        tally = self.tallies.setdefault(case.kind, Tally())
        tally.sent += 1
        began = time.monotonic()
        try:
            answer = await asyncio.wait_for(self.ask(case), REQUEST_SECONDS)
        except Exception as error:
            self.findings[f"{case.kind}: {type(error).__name__}: {error}"] += 1
            return
        tally.seconds.append(time.monotonic() - began)
        wrong = difference(case, answer, self.alone[index])
        if wrong is None:
            tally.as_expected += 1
        else:
            self.findings[f"{case.kind}: {wrong}"] += 1

    async def run_alone(self, cases: list[Case]) -> None:
        """Each request with the server to itself."""
        for index, case in enumerate(cases):
            self.alone[index] = answer = await self.ask(case, whole=True)
            if answer.status != case.status:
                self.findings[f"{case.kind}, alone: HTTP {answer.status}"] += 1

    async def run_together(self, cases: list[Case], minutes: float, at_once: int) -> None:
        """Random requests, `at_once` in flight, for that long and until there were enough."""
        chance, until = random.Random(0), time.monotonic() + 60 * minutes
        sent = 0

        async def worker() -> None:
            nonlocal sent
            while time.monotonic() < until or sent < LEAST_REQUESTS:
                sent += 1
                index = chance.randrange(len(cases))
                await self.check(index, cases[index])

        await asyncio.gather(*(worker() for _ in range(at_once)))

    async def watch(self, server: psutil.Process) -> None:
        """Note the server's memory and load every half second."""
        while True:
            self.memory.append(await asyncio.to_thread(memory_of, server))
            metrics = await asyncio.to_thread(metrics_of, self.client)
            self.running.append(metrics["vllm:num_requests_running"])
            await asyncio.sleep(0.5)


def difference(case: Case, answer: Answer, alone: Answer) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if answer.status != case.status:
        return f"HTTP {answer.status} instead of {case.status}"
    if case.status != 200:
        return None
    expected = case.new_tokens
    if case.cut_after is not None:
        expected = min(max(case.cut_after, len(answer.tokens)), case.new_tokens)
    if len(answer.tokens) != expected or len(alone.tokens) != case.new_tokens:
        return f"{len(answer.tokens)} tokens instead of {expected}"
    for at, (token, other) in enumerate(zip(answer.tokens, alone.tokens, strict=False)):
        if token != other:
            return f"token {at} is {token}, and {other} alone"
    return None


def growth_of(memory: list[int]) -> float:
    """How much a straight line through the second half of these numbers grows, by their mean."""
    half = np.array(memory[len(memory) // 2 :], dtype=float)
    if len(half) < 2:
        return 0.0
    slope = np.polyfit(np.arange(len(half)), half, 1)[0]
    return float(slope * (len(half) - 1) / half.mean())


def fifths(series: list[Any]) -> list[Any]:
    """Six of its entries, evenly spaced, the first and the last among them."""
    return [series[round(part * (len(series) - 1) / 5)] for part in range(6)]


def memory_of(server: psutil.Process) -> dict[str, int]:
    """Bytes of the server and each of its children that no other process has."""
    held: Counter[str] = Counter()
    for process in [server, *server.children(recursive=True)]:
        try:
            held[process.name()] += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return held


def metrics_of(client: AsyncOpenAI) -> Counter[str]:
    """vLLM's metrics by name, added up over their labels."""
    text = httpx.get(f"{str(client.base_url).removesuffix('/v1/')}/metrics", timeout=60).text
    metrics: Counter[str] = Counter()
    for name, value in re.findall(r"^(vllm:\w+)\S* (\S+)$", text, re.MULTILINE):
        metrics[name] += float(value)  # type: ignore[assignment]
    return metrics


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """A server of the tiny model, as a user starts it: its address, process and log."""
    model, log, template = GEMMA3.build(folder / "model"), folder / "log", folder / "template"
    template.write_text(TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = SERVER | {
        "model": model,
        "served-model-name": "tiny",
        "chat-template": template,
        "host": "127.0.0.1",
        "port": port,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--disable-uvicorn-access-log"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while not is_healthy(address):
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"The server does not start:\n{log.read_text()[-5000:]}")
            time.sleep(1)
        yield address, server, log
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


async def soak(address: str, server: psutil.Process, minutes: float, at_once: int) -> Soak:
    """Ask every request alone, then all together, and alone once more."""
    async with AsyncOpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=REQUEST_SECONDS
    ) as client:
        run, cases = Soak(client), catalogue()
        await run.run_alone(cases)
        watcher = asyncio.create_task(run.watch(server))
        await run.run_together(cases, minutes, at_once)
        watcher.cancel()
        for index in range(0, len(cases), 7):
            await run.check(index, cases[index])
        await asyncio.sleep(1)  # what was cut is aborted by then
    return run


def judge(run: Soak, address: str, log: str) -> dict[str, str]:
    """Figures of the run as a whole; what is not as it should be goes to its findings."""
    if not is_healthy(address):
        run.findings["the server is not healthy at the end"] += 1
        return {}
    metrics = metrics_of(run.client)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        if metrics[f"vllm:{name}"]:
            run.findings[f"{name} is {metrics[f'vllm:{name}']} at the end"] += 1
    if not metrics["vllm:num_preemptions_total"]:
        run.findings["nothing was preempted: the load is too small"] += 1
    memory = [sum(held.values()) for held in run.memory]
    growth = growth_of(memory)
    if growth > LARGEST_GROWTH:
        run.findings[f"memory grew by {growth:.1%} in the second half"] += 1
    if "Using CPU_PREFIX_ATTN" not in log:
        run.findings["the project is not active"] += 1
    for line in log.splitlines():
        if "Traceback" in line or " CRITICAL " in line:
            run.findings[f"in the server's log: {line.strip()}"] += 1
    return {
        "requests running, at most": f"{max(run.running):.0f}",
        "preemptions": f"{metrics['vllm:num_preemptions_total']:.0f}",
        "prompt tokens from the prefix cache": (
            f"{metrics['vllm:prefix_cache_hits_total']:.0f} of "
            f"{metrics['vllm:prefix_cache_queries_total']:.0f}"
        ),
        "memory, first and last": (
            f"{memory[0] / 2**20:.0f} and {memory[-1] / 2**20:.0f} MiB, "
            f"{growth:+.2%} in the second half"
        ),
        "memory by process, MiB, a fifth of the time between": "; ".join(
            f"{name} {' '.join(f'{held[name] / 2**20:.0f}' for held in fifths(run.memory))}"
            for name in run.memory[-1]
        ),
    }


def stop(server: subprocess.Popen[bytes], findings: Counter[str]) -> None:
    """End the server as an operator does; all its processes must go."""
    children = psutil.Process(server.pid).children(recursive=True)
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        findings["the server does not end"] += 1
    _, left = psutil.wait_procs(children, timeout=30)
    for process in left:
        findings["a process of the server outlives it"] += 1
        process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--at-once", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (address, server, log):
        process = psutil.Process(server.pid)
        began = time.monotonic()
        run = asyncio.run(soak(address, process, options.minutes, options.at_once))
        seconds = time.monotonic() - began
        figures = judge(run, address, log.read_text(errors="replace"))
        stop(server, run.findings)
        tail = log.read_text(errors="replace")[-5000:]
    print(f"{'kind':18} {'sent':>6} {'as expected':>12} {'median s':>9} {'longest s':>10}")
    for kind, tally in sorted(run.tallies.items()):
        median, longest = statistics.median(tally.seconds or [0]), max(tally.seconds or [0])
        print(f"{kind:18} {tally.sent:6} {tally.as_expected:12} {median:9.2f} {longest:10.2f}")
    sent, expected = (
        sum(getattr(tally, name) for tally in run.tallies.values())
        for name in ("sent", "as_expected")
    )
    print(f"{'all':18} {sent:6} {expected:12}   in {seconds:.0f} s, {options.at_once} at once")
    for name, figure in figures.items():
        print(f"{name}: {figure}")
    for finding, count in run.findings.items():
        print(f"FINDING, {count} times: {finding}")
    if run.findings:
        print(f"The end of the server's log:\n{tail}")
    print("findings" if run.findings else "no findings")
    return bool(run.findings)


if __name__ == "__main__":
    sys.exit(main())
