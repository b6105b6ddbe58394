"""The reader in the order: its columns and weights worked by hand, its disk, its fit, and a real one."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from cuewalk.env import DataError, EnvConfig, Gold, Question, RetrievalEnv, Tasks
from cuewalk.memory import BuildConfig, Conversation, Message, build_graph
from cuewalk.memory.reader import LocalReader
from cuewalk.rl import data, reading
from cuewalk.rl.config import parse_config
from cuewalk.rl.data import rank_of
from cuewalk.rl.ranker import FEATURES, Ranker
from cuewalk.rl.reading import Reading, fit_reading
from cuewalk.scripts.measures import Remembered, tokens_read
from tests.conftest import at

RULES = EnvConfig(k=1, budget=2, frontier_cap=3, new_lines=1, order="reader")
FLAT = Ranker(("segment", "adjacent", "anchor", "similar"), (0.0,) * (len(FEATURES) + 4), 0.0)
"""Finds everything as likely as not, so that the order is the pool's."""


class Weights(torch.nn.Linear):
    dtype = torch.float32


WEIGHTS = Weights(1, 1)


class Scripted:
    """A reader that finds the question likely after what the test names, ten tokens a candidate; and counts calls."""

    def __init__(self, likely):
        self.likely, self.tokens, self.asked, self.model = likely, 0, [], WEIGHTS

    def read(self, text):
        return text

    def log_likelihood(self, context, text, answer):
        self.asked.append((text, answer))
        self.tokens += 10
        return -5.0 if self.likely in text else -9.0


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(reading, "READ", 3)


def test_what_a_reader_finds_likely_comes_first(graph):
    """By hand: three are read, one of them 4 nats above the others, so 8/3 above the mean, the others 4/3 below."""
    ranker = replace(FLAT, reading=(1.0, 0.3, -1.0))
    read = Reading(ranker, Scripted("garden has"))
    links = graph.frontier("dog", ["e0"], {"e0"}, RULES.links, 5)
    assert [link.entry for link in links][:3] == ["e5", "e2", "e1"]
    chances = read(graph, "dog", ["e0"], links)
    expected = 1 / (1 + np.exp(-(np.array([-4, 8, -4]) / 3 * 0.3 - 1)))
    assert chances == pytest.approx([*expected, 0.5, 0.5])  # the others are left to the ranker
    assert read.reader.asked[1] == ("Ann: Ann (1 May 2024): My garden has a piano\nQuestion:", " dog")
    env = RetrievalEnv(graph, Question("q", "toy", "dog"), RULES, rank=read)
    env.reset()
    assert [link.entry for _, link in env.state.frontier] == ["e4", "e3", "e2"]  # .5, .5, .45


def test_a_pool_that_is_no_longer_than_what_is_read_is_left_to_the_ranker(graph):
    read = Reading(replace(FLAT, reading=(1.0, 9.0, 0.0)), Scripted("dog"))
    links = graph.frontier("dog", ["e0"], {"e0"}, RULES.links, 3)
    assert read(graph, "dog", ["e0"], links).tolist() == [0.5] * 3 and read.reader.asked == []


def test_what_was_read_is_kept_and_its_tokens_are_told_again(graph):
    ranker = replace(FLAT, reading=(1.0, 0.3, -1.0))
    links = graph.frontier("dog", ["e0"], {"e0"}, RULES.links, 5)
    first, again = Reading(ranker, Scripted("garden")), Reading(ranker, Scripted("nothing"))
    assert first(graph, "dog", ["e0"], links).tolist() == again(graph, "dog", ["e0"], links).tolist()
    assert (len(first.reader.asked), len(again.reader.asked)) == (3, 0) and first.tokens == again.tokens == 30
    assert tokens_read(RetrievalEnv(graph, Question("q", "toy", "dog"), RULES, rank=again)) == 30
    assert tokens_read(RetrievalEnv(graph, Question("q", "toy", "dog"), replace(RULES, order="ranker"), rank=FLAT)) == 0
    other = Scripted("nothing")
    other.model = Weights(1, 1)
    assert Reading(ranker, other)(graph, "dog", ["e0"], links).tolist() != first(graph, "dog", ["e0"], links).tolist()
    coarse = Scripted("nothing")
    coarse.model = Weights(1, 1)
    coarse.model.load_state_dict(WEIGHTS.state_dict())
    coarse.model.dtype = torch.bfloat16
    Reading(ranker, coarse)(graph, "dog", ["e0"], links)
    assert len(coarse.asked) == 3  # the same weights in another precision say something else


def test_an_evaluation_asks_a_rank_once_for_each_state_and_counts_its_tokens_each_time(graph):
    read = Reading(replace(FLAT, reading=(1.0, 0.3, -1.0)), Scripted("garden"))
    known = Remembered(read)
    question = Question("q", "toy", "dog")
    envs = [RetrievalEnv(graph, question, RULES, rank=rank) for rank in (read, known, known)]
    assert [tokens_read(env) for env in envs] == [30, 30, 30] and read.tokens == 60
    assert envs[0].state.frontier == envs[1].state.frontier == envs[2].state.frontier
    links = graph.frontier("dog", ["e0"], {"e0"}, RULES.links, 5)
    known(graph, "dog", ["e0"], links)[0] = 9.0  # a caller may change what it was given
    assert known(graph, "dog", ["e0"], links).tolist() == read(graph, "dog", ["e0"], links).tolist()
    assert known(graph, "dog", ["e0"], links[:4]).shape == (4,) and known(graph, "piano", ["e0"], links).shape == (5,)


def test_tokens_of_later_lists_count_where_they_are_read(graph):
    """Of five candidates one is shown; the four that are left after it are again more than three."""
    rules, said = replace(RULES, frontier_cap=1, new_lines=2), Scripted("garden")
    rank = Reading(replace(FLAT, reading=(1.0, 0.3, 0.0)), said)
    env = RetrievalEnv(graph, Question("q", "toy", "dog"), rules, rank=rank)
    assert tokens_read(env) == 30
    assert tokens_read(env, ["EXPAND A", "STOP"]) == 60


def test_threads_do_not_mix_up_what_each_text_took(graph):
    class Slow(Scripted):
        def log_likelihood(self, context, text, answer):
            said = super().log_likelihood(context, text, answer)
            time.sleep(0.01)
            return said

    read = Reading(replace(FLAT, reading=(1.0, 0.3, -1.0)), Slow("garden"))
    links = graph.frontier("dog", ["e0"], {"e0"}, RULES.links, 5)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda query: read(graph, query, ["e0"], links), ["dog", "garden", "piano", "trip"]))
    assert read.tokens == 4 * 30
    again = Reading(read.ranker, Scripted("nothing"))
    for query in ("dog", "garden", "piano", "trip"):
        again(graph, query, ["e0"], links)
    assert again.tokens == 4 * 30 and again.reader.asked == []  # as it was kept


def test_its_weights_are_fitted_on_who_holds_evidence(graph, conversation):
    questions = tuple(Question(f"toy:{i}", "toy", "dog " * (i % 3 + 1)) for i in range(30))
    tasks = Tasks({"toy": conversation}, questions, {q.id: Gold("", ("m3",), 4) for q in questions})
    weights = fit_reading({"toy": Reading(FLAT, Scripted("garden has"))}, tasks, {"toy": graph}, RULES)
    assert weights[1] > 0.1
    ranker = replace(FLAT, reading=weights)
    env = RetrievalEnv(graph, questions[0], RULES, rank=Reading(ranker, Scripted("garden has")))
    env.reset()
    assert env.state.frontier[0][1].entry == "e2"
    nothing = Tasks({"toy": conversation}, questions, {q.id: Gold("", ("m1",), 4) for q in questions})
    with pytest.raises(DataError, match="more than 3 candidates, some with evidence and some without"):
        fit_reading({"toy": Reading(FLAT, Scripted("dog"))}, nothing, {"toy": graph}, RULES)


def test_a_run_whose_ranker_has_no_reader_is_refused(tmp_path, monkeypatch):
    config = parse_config({"env": {"order": "reader"}})
    FLAT.save(tmp_path / "ranker.json")
    with pytest.raises(DataError, match="has no reader; train again, or take order = ranker"):
        rank_of(config, tmp_path)
    fitted = replace(FLAT, reading=(1.0, 0.5, -1.0))
    fitted.save(tmp_path / "ranker.json")
    monkeypatch.setattr(data.LocalReader, "from_pretrained", lambda name, dtype: Scripted(f"{name} {dtype}"))
    found = rank_of(config, tmp_path)
    assert found.ranker == fitted and found.reader.likely == "smollm2-135m bfloat16"
    assert rank_of(parse_config({"env": {"order": "ranker"}}), tmp_path) == fitted
    assert rank_of(parse_config({}), tmp_path) is None


@pytest.mark.slow
def test_a_real_reader_finds_a_question_likelier_after_what_it_is_about(encoder):
    said = ("The dog ran off to the harbour", "Lunch was late", "I paid the rent", "My bike is red", "It rains a lot")
    messages = tuple(Message(f"m{n}", "Ann", at(1, n), text) for n, text in enumerate(said))
    graph = build_graph(
        Conversation("five", messages), encoder, BuildConfig(segment_messages=2, update_threshold=1.01, groups=None)
    )
    read = Reading(replace(FLAT, reading=(1.0, 1.0, 0.0)), LocalReader.from_pretrained("smollm2-135m"))
    links = graph.frontier("What colour is Ann's bike?", ["e1"], {"e1"}, RULES.links, 4)
    assert len(links) == 4
    chances = read(graph, "What colour is Ann's bike?", ["e1"], links)
    assert links[int(np.argmax(chances))].entry == "e3" and max(chances) > 0.7
