"""Many threads asking while the memory grows: nothing wrong, nothing lost, memory steady."""

import asyncio
import gc
import pickle
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest

from cuewalk.env import EnvConfig
from cuewalk.memory import BuildConfig, Conversation, Message, SentenceEncoder, build_graph, save_graph
from cuewalk.rl import Config, Retriever
from cuewalk.rl.config import SamplingConfig
from tests.conftest import AXES, MESSAGES, WordEncoder

RULES = EnvConfig(k=2, budget=2, frontier_cap=6, new_lines=2)
BUILD = BuildConfig(segment_messages=2, nearest=2, update_threshold=1.01)
WRITES = 25


class Scripted:
    """A policy at the sampler's seam: refines to a word of the question's, then takes its first candidate, then stops.

    It reads the prompt that it is given, so that a prompt of another thread's walk would show.
    """

    def __init__(self, chat):
        self.chat = chat

    def complete(self, prompts, seeds, options):
        return [(ids, [0.0] * len(ids)) for ids in map(self.act, prompts)]

    def act(self, prompt):
        text = self.chat.tokenizer.decode(prompt)
        asked = text.partition("Question: ")[2].splitlines()[0]
        turn = text.count("assistant") - 1
        return self.chat.action([f"REFINE {asked.split()[-1]} again", "EXPAND A", "STOP"][turn])


def retriever(chat, **changes):
    return Retriever(None, chat, Config(env=RULES), None, server=Scripted(chat), **changes)


def later(number: int) -> Message:
    return Message(f"n{number}", "Ann", MESSAGES[-1].time + timedelta(minutes=1 + number), f"The piano of zone{number}")


def grown(encoder, writes: int):
    messages = (*MESSAGES, *map(later, range(writes)))
    return build_graph(Conversation("toy", messages), encoder, BUILD)


@pytest.fixture
def encoder():
    return WordEncoder()


@pytest.fixture
def eager():
    """Let threads interrupt each other at nearly every step."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_eight_threads_ask_a_thousand_questions_while_the_memory_grows(chat, encoder):
    graph, ours = grown(encoder, 0), retriever(chat)
    written, faults, answers = threading.Event(), [], []
    newest = -1

    def ask(number):
        sure = newest  # what was added before the question was asked must be found by it
        text = f"Where is zone{max(0, sure)}" if number % 2 else f"question {number} about the {AXES[number % 4]}"
        try:
            view = graph.snapshot()
            found = ours.retrieve(view, text)
            if number % 2 and sure >= 0:
                assert found.entries[0].sources == (f"n{sure}",), (sure, found.entries)
            answers.append((len(view.entries), text, found))
        except Exception as error:  # reported by the test itself
            faults.append(error)

    def write():
        nonlocal newest
        for number in range(WRITES):
            graph.add([later(number)])
            newest = number
            time.sleep(0.1)
        written.set()

    writer = threading.Thread(target=write)
    with ThreadPoolExecutor(8) as pool:
        writer.start()
        list(pool.map(ask, range(1000)))
    writer.join()
    assert faults == [] and len(answers) == 1000
    assert set(graph.messages) == {m.id for m in (*MESSAGES, *map(later, range(WRITES)))}
    sizes = {size for size, _, _ in answers}
    assert len(sizes) > 5  # writes did go on
    # Each answer is the one that a thread alone gets from a memory built of the same messages.
    for size in sizes:
        fresh = grown(encoder, size - len(MESSAGES))
        for _, text, found in [answer for answer in answers if answer[0] == size][:20]:
            assert ours.retrieve(fresh, text) == found


def test_memory_stays_steady(chat, encoder, monkeypatch):
    monkeypatch.setattr("cuewalk.memory.graph.REMEMBERED_SEARCHES", 50)
    graph, ours = grown(encoder, 4), retriever(chat)

    def serve(start):
        with ThreadPoolExecutor(8) as pool:
            assert all(
                pool.map(lambda n: ours.retrieve(graph, f"question {n} garden").entries, range(start, start + 200))
            )
        gc.collect()

    serve(0)
    tracemalloc.start()
    serve(200)
    before = tracemalloc.get_traced_memory()[0]
    serve(400)
    grew = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grew < 100_000, f"{grew} bytes more after 200 questions"


def test_searches_may_be_forgotten_at_any_time(encoder):
    class Forgetful(dict):
        def __setitem__(self, key, value):
            """Forget at once, as another thread may."""

    graph = grown(encoder, 2)
    expected = graph.search("piano", 3)
    graph._searched = Forgetful()
    assert graph.search("piano", 3) == expected


def test_writers_take_turns_and_lose_nothing(eager, encoder):
    graph = grown(encoder, 0)
    first = [Message(f"a{n}", "Ann", later(99).time + timedelta(minutes=n), f"note {n}") for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda message: graph.add([message]), first))
    assert set(graph.messages) == {m.id for m in (*MESSAGES, *first)}


def test_an_added_message_is_found_at_once_and_a_snapshot_stays(encoder, tmp_path):
    graph = grown(encoder, 0)
    view, before = graph.snapshot(), list(graph.entries)
    graph.add([later(0)])
    assert graph.search("zone0", 1)[0].entry == "e6" and graph.messages["n0"] == later(0)
    assert list(view.entries) == before and "n0" not in view.messages
    assert [hit.entry for hit in view.search("zone0", 9)] == [hit.entry for hit in grown(encoder, 0).search("zone0", 9)]
    again = pickle.loads(pickle.dumps(graph))
    again.add([later(1)])
    assert "n1" in again.messages and "n1" not in graph.messages
    with pytest.raises(ValueError, match="8 messages but 7 ids"):
        graph.add([later(0)])
    assert graph.search("zone0", 1)[0].entry == "e6"


def test_saving_beside_a_writer_saves_one_state(encoder, tmp_path):
    from cuewalk.memory import load_graph

    graph = grown(encoder, 0)
    writer = threading.Thread(target=lambda: [graph.add([later(n)]) for n in range(10)])
    writer.start()
    while writer.is_alive():
        save_graph(graph, tmp_path / "memory")
    writer.join()
    save_graph(graph, tmp_path / "memory")
    assert load_graph(tmp_path / "memory", encoder).entries == graph.entries


def test_many_questions_at_once_from_coroutines(chat, encoder):
    graph, ours = grown(encoder, 0), retriever(chat)

    async def ask():
        return await asyncio.gather(*(ours.aretrieve(graph, f"Where is the {axis}?") for axis in AXES))

    assert asyncio.run(ask()) == [ours.retrieve(graph, f"Where is the {axis}?") for axis in AXES]


def test_what_the_encoder_remembers_is_used_by_one_thread_at_a_time(monkeypatch):
    """A thread that forgets all must not do so between another's encoding and its reading."""
    monkeypatch.setattr("cuewalk.memory.encoder.REMEMBERED", 1)
    encoder, inside, met = SentenceEncoder(), [], []

    def batch(texts, progress):
        inside.append(texts)
        time.sleep(0.001)
        met.append(len(inside))
        inside.pop()
        return np.ones((len(texts), 4), dtype=np.float32)

    monkeypatch.setattr(encoder, "_batch", batch)
    with ThreadPoolExecutor(8) as pool:
        assert all(len(rows) == 1 for rows in pool.map(lambda n: encoder.encode([f"text {n}"]), range(64)))
    assert set(met) == {1}


def test_the_real_encoder_serves_questions_beside_a_writer():
    encoder = SentenceEncoder()
    texts = [f"Where did number {n} go on holiday?" for n in range(65)]
    with ThreadPoolExecutor(8) as pool:
        whole = pool.submit(encoder.encode, texts)  # more than a batch, as a writer asks
        found = [row[0] for row in pool.map(lambda text: encoder.encode([text]), texts)]
    assert abs(whole.result() - found).max() < 1e-5


@pytest.mark.slow
def test_thirty_two_questions_to_a_real_model_while_the_memory_grows(tmp_path):
    """SmolLM2, untrained: what it says is mostly no action, and each question gets its answer all the same."""
    from cuewalk.memory.models import load_language_model, load_tokenizer
    from cuewalk.rl.transcript import Chat

    graph = grown(SentenceEncoder(), 0)
    rules = EnvConfig(k=2, budget=2, frontier_cap=4, new_lines=1)
    model = load_language_model("smollm2-135m")
    config = Config(env=rules, sampling=SamplingConfig(max_action_tokens=8))
    ours = Retriever(model, Chat(load_tokenizer("smollm2-135m")), config, None)
    texts = [f"When did the {AXES[n % 4]} come up, question {n}?" for n in range(32)]
    views = [graph.snapshot()]

    def ask(number):
        if number % 4 == 0:
            graph.add([later(number)])
            views.append(graph.snapshot())
        view = graph.snapshot()
        return view, ours.retrieve(view, texts[number])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(32)))
    assert len(graph.messages) == len(MESSAGES) + 8
    for number in (0, 9, 18, 27):  # the same as alone
        view, answer = found[number]
        assert answer == ours.retrieve(view, texts[number])
    assert all(len(answer.entries) >= 2 and answer.ending in ("stopped", "budget", "malformed") for _, answer in found)
