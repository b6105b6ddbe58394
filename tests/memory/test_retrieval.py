"""xMemory's retrieval, the context forms, filters and the local reader."""

from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
import torch

from cuewalk.memory import BuildConfig, Filter, build_graph
from cuewalk.memory.groups import GroupConfig
from cuewalk.memory.reader import LocalReader
from cuewalk.scripts.contexts import FORMS, render_context
from cuewalk.scripts.expansion import expand_while_surer
from cuewalk.scripts.hierarchy import cover, select_backbone
from cuewalk.scripts.measure_memory import context_sources


@pytest.fixture(scope="module")
def grouped(conversation, encoder):
    """Groups of the toy graph by axis: dog (e0, e5), none (e1, e4), garden and piano (e2), trip (e3)."""
    rules = GroupConfig(attach=0.7, merge=0.99, split=False)
    return build_graph(conversation, encoder, BuildConfig(segment_messages=2, update_threshold=1.01, groups=rules))


def test_cover_weighs_what_is_new_against_what_is_near():
    relevance = np.array([0.9, 0.8, 0.5, 0.1])
    weights = np.array([[1, 0.8, 0, 0], [0.8, 1, 0, 0], [0, 0, 1, 0.5], [0, 0, 0.5, 1]])
    # Z = 6.6; s̃ = 1, .875, .5, 0. First 0 (.5·1.8/6.6 + .5). It covers 1; then 2 gains .5·1.5/6.6 + .25 = .364 and
    # 1 gains .4375: coverage alone would take 2.
    assert cover(relevance, weights, 4) == [0, 1, 2]  # then all is covered
    assert cover(relevance, weights, 4, share=1.0) == [0, 2]
    assert cover(relevance, weights, 1) == [0]
    assert cover(np.array([0.3, 0.3]), np.eye(2), 2) == [0, 1]  # all alike: .5 each, in order


def test_stage_one_goes_by_groups_then_by_their_entries(grouped):
    assert grouped.groups == {"g0": ("e0", "e5"), "g1": ("e1", "e4"), "g2": ("e2",), "g3": ("e3",)}
    found = select_backbone(grouped, "dog", 2)
    assert [link.entry for link in found] == ["e0", "e5"]
    assert [link.kind for link in found] == ["group", "group"]
    with pytest.raises(ValueError, match="stage I needs groups"):
        select_backbone(grouped, "dog", 0)


def test_without_groups_stage_one_says_what_to_do(graph):
    with pytest.raises(ValueError, match="build with memory.groups, or use search"):
        select_backbone(graph, "dog", 3)


def test_group_links_and_neighbouring_groups(grouped):
    links = grouped.links("e0")
    assert links["e5"] == "group"
    assert grouped.links("e0", ("near_group",)) == {"e2": "near_group"}  # garden is in e5, and so in g0's centroid
    assert grouped.links("e0", ("similar",)).keys() >= {"e5"}  # also nearest: shown so where groups are left out


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Filter(speaker="ann"), {"e0", "e2", "e4"}),
        (Filter(since=datetime(2024, 5, 8)), {"e3", "e4", "e5"}),
        (Filter(until=datetime(2024, 5, 1, 12, 0)), {"e0"}),
        (Filter(speaker="Bob", since=datetime(2024, 5, 2)), {"e3", "e5"}),
        (Filter(source="m3"), {"e2"}),
        (Filter(source="s0"), {"e0", "e1"}),
        (Filter(entity="the DOG"), {"e0", "e5"}),
        (Filter(entity="do"), set()),  # whole words
        (Filter(speaker="Eve"), set()),
        (Filter(), {"e0", "e1", "e2", "e3", "e4", "e5"}),
    ],
)
def test_filters_hold_in_search_and_frontier(where, expected, graph):
    assert {hit.entry for hit in graph.search("dog", 6, where=where)} == expected
    found = graph.frontier("dog", ["e0", "e3"], {"e0", "e3"}, ("segment", "adjacent", "search"), 24, where)
    assert {link.entry for link in found} == expected - {"e0", "e3"}


def test_the_context_forms_show_what_they_name(graph):
    chosen = ["e1", "e5"]  # m2 in s0 (m1, m2); m6 alone in s3
    lines = {form: render_context(graph, chosen, form).splitlines() for form in FORMS}
    ann, bob, last = (graph.entries[e].value for e in ("e0", "e1", "e5"))
    assert lines["entries"] == [f"- {bob}", f"- {last}"]
    assert lines["segment"] == [ann, bob, last]
    # Shown word for word already: the entry is named by its abstraction, not said twice.
    assert lines["segment+entries"] == [
        ann,
        bob,
        "- Bob: He came back on Tuesday",
        last,
        "- Bob: The dog likes the garden",
    ]
    assert lines["summary+entries"] == [
        "Ann: The dog ran away; Bob: He came back on Tuesday",
        f"- {bob}",
        "Bob: The dog likes the garden",
        f"- {last}",
    ]
    assert context_sources(graph, chosen, "entries") == {"m2", "m6"}
    assert context_sources(graph, chosen, "segment") == {"m1", "m2", "m6"}
    with pytest.raises(ValueError, match="choose from segment"):
        render_context(graph, chosen, "all")


def test_entries_of_one_segment_stand_together_and_a_summary_is_used(graph):
    summed = [replace(segment, summary=f"about {segment.id}") for segment in graph.segments]
    other = build_graph(graph.conversation, graph.encoder, graph.config)
    other.segments = tuple(summed)
    text = render_context(other, ["e0", "e5", "e1"], "summary+entries").splitlines()
    assert [line for line in text if line.startswith("about")] == ["about s0", "about s3"]
    assert text.index(f"- {graph.entries['e1'].value}") < text.index("about s3")


@pytest.fixture
def reader(tiny_model, monkeypatch):
    from cuewalk.memory.models import load_language_model, load_tokenizer

    monkeypatch.setattr(LocalReader, "answer_tokens", 3)
    return LocalReader(load_language_model(str(tiny_model), "float32"), load_tokenizer(str(tiny_model)))


def test_the_reader_agrees_with_the_plain_model_and_leaves_the_context_alone(reader):
    context = reader.read("Memories: the dog")
    first = reader.uncertainty(context, " ran?")
    assert reader.uncertainty(context, " ran?") == pytest.approx(first, abs=1e-5)
    ids = reader._ids("Memories: the dog") + reader._ids(" ran?")
    entropies = []
    for _ in range(3):
        logp = reader.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        entropies.append(-(logp.exp() * logp).sum().item())
        ids.append(int(logp.argmax()))
    assert first == pytest.approx(np.mean(entropies), abs=1e-4)
    whole = reader._ids("Memories: the dog") + reader._ids(" ran?") + reader._ids(" away now")
    logp = reader.model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    n = len(reader._ids(" away now"))
    expected = np.mean([logp[len(whole) - n + i - 1, whole[len(whole) - n + i]].item() for i in range(n)])
    assert np.log(reader.likelihood(context, " ran?", " away now")) == pytest.approx(expected, abs=1e-4)
    assert reader.log_likelihood(context, " ran?", " away now") == pytest.approx(n * expected, abs=1e-4)


def test_the_reader_counts_each_token_once_and_reads_no_special_token(reader):
    before = reader.tokens
    context = reader.read("one two three")
    read = reader.tokens - before
    reader.uncertainty(context, " four")
    assert reader.tokens - before == read + len(reader._ids(" four")) + 2  # three greedy tokens: the last is not fed
    assert not set(reader._ids("<|im_end|><|im_start|>")) & set(reader.tokenizer.all_special_ids)
    with pytest.raises(ValueError, match="holds no token"):
        reader.uncertainty(context, "")


class Scripted:
    """A reader whose uncertainty is what the test says, by what its context holds; the seam of stage II."""

    tokens = 0

    def __init__(self, score):
        self.score = score

    def read(self, text):
        return type("Context", (), {"text": text})()

    def extend(self, context, text):
        context.text += text

    def uncertainty(self, context, text):
        return self.score(context.text + text)


def test_stage_two_adds_only_what_lowers_uncertainty(graph):
    # Segment s0 helps, and its messages help more; s1 does not.
    score = lambda text: 3.0 - 1.0 * ("ran away;" in text) - 0.5 * ("Ann (1 May 2024): The dog" in text)  # noqa: E731
    done = expand_while_surer(graph, "dog", ["e1", "e2"], Scripted(score))
    assert (done.segments, done.raw, done.uncertainty) == (("s0",), ("s0",), (3.0, 2.0, 1.5))
    assert "Ann (1 May 2024): The dog ran away" in done.text
    nothing = expand_while_surer(graph, "dog", ["e1", "e2"], Scripted(lambda text: 1.0))
    assert (nothing.segments, nothing.raw) == ((), ())


def test_stage_two_compares_with_the_context_as_it_has_grown(graph):
    # Each segment alone would help; once one is in, the other does not.
    score = lambda text: 3.0 - ("ran away;" in text or "Ann: My garden" in text)  # noqa: E731
    done = expand_while_surer(graph, "dog", ["e1", "e2"], Scripted(score))
    assert len(done.segments) == 1


def test_stage_two_ends_after_so_many_that_did_not_help(graph):
    probed = []

    def score(text):
        probed.append(text)
        return 1.0

    expand_while_surer(graph, "dog", [f"e{i}" for i in range(6)], Scripted(score), patience=2)
    assert len(probed) == 1 + 2


def test_stage_two_runs_with_a_real_reader(graph, reader):
    done = expand_while_surer(graph, "When did the dog come back?", ["e0", "e5"], reader)
    assert list(done.uncertainty) == sorted(done.uncertainty, reverse=True)
    assert done.tokens > 0 and set(done.raw) <= set(done.segments)
