import pickle

import numpy as np
import pytest

from cuewalk.memory import BuildConfig, MemoryGraph, build_graph
from cuewalk.memory.index import HybridIndex, fuse_ranks


def test_ranks_are_fused_by_weighted_reciprocal_rank():
    fused = dict(fuse_ranks([[7, 8], [8]], (1.0, 2.0)))
    assert fused == pytest.approx({7: 1 / 6, 8: 1 / 7 + 2 / 6})
    assert [item for item, _ in fuse_ranks([[7, 8], [8]], (1.0, 2.0))] == [8, 7]
    assert fuse_ranks([[1, 2], [2, 1]], (1.0, 1.0))[0][0] == 1  # a tie keeps the first ranking's order


def test_search_fuses_words_and_meaning(graph):
    # dense: e0 (1, dog), e5 (.707, dog garden); words: "dog" in e0 and e5, "back" only in e1.
    hits = graph.search("When did the dog come back?", 3)
    assert hits[0].entry in ("e0", "e5") and {hit.entry for hit in hits} >= {"e0", "e5"}
    scores = {hit.entry: hit.score for hit in hits}
    assert scores["e0"] == pytest.approx(1.0)
    assert scores["e5"] == pytest.approx(np.sqrt(0.5))
    assert all(hit.kind == "search" for hit in hits)
    assert "e0" not in {hit.entry for hit in graph.search("dog", 6, exclude={"e0"})}


def test_search_wants_a_positive_k(graph):
    with pytest.raises(ValueError, match="k = 0"):
        graph.search("dog", 0)


def test_links_have_kinds_and_the_first_kind_wins(graph):
    # e0 (m1, s0): segment e1; adjacent segment s1 e2; nearest by cosine is e5 (.707).
    assert graph.links("e0") == {"e1": "segment", "e2": "adjacent", "e5": "similar"}
    # e2 (m3, s1) lies between s0 and s2; its nearest, e5 (garden, .5), is in s3.
    assert graph.links("e2") == {
        "e0": "adjacent",
        "e1": "adjacent",
        "e3": "adjacent",
        "e4": "adjacent",
        "e5": "similar",
    }


def test_the_frontier_fuses_links_with_the_next_hits(graph):
    found = graph.frontier("dog", ["e0"], {"e0"}, ("segment", "adjacent", "similar", "search"), 24)
    # e5 is both linked (cosine .707, the best link) and the best next hit: first, under its link's kind.
    assert (found[0].entry, found[0].kind) == ("e5", "similar")
    assert {link.entry for link in found} == {"e1", "e2", "e3", "e4", "e5"}
    assert {link.entry: link.kind for link in found}["e3"] == "search"


def test_the_frontier_obeys_kinds_cap_and_exclusions(graph):
    assert [link.entry for link in graph.frontier("dog", ["e0"], {"e0"}, ("segment",), 24)] == ["e1"]
    assert len(graph.frontier("dog", ["e0"], {"e0"}, ("segment", "search"), 2)) == 2
    assert graph.frontier("dog", ["e0"], {"e0", "e1"}, ("segment",), 24) == []
    with pytest.raises(ValueError, match=r"unknown link kinds \['friend'\]"):
        graph.frontier("dog", ["e0"], set(), ("friend",), 24)


def test_search_without_a_known_word_falls_back_to_meaning(graph):
    assert [hit.entry for hit in graph.search("dog", 1)] == ["e0"]
    assert len(graph.search("zzz", 6)) == 6


def test_anchor_search_is_off_unless_weighted():
    vectors = np.eye(3, dtype=np.float32)
    anchors = np.array([[0, 0, 1]], dtype=np.float32)
    query = np.array([0.1, 0.0, 0.99], dtype=np.float32)
    with_anchors = HybridIndex(vectors, ["a", "b", "c"], anchors, [[1]], (1.0, 1.0, 0.0))
    without = HybridIndex(vectors, ["a", "b", "c"], anchors, [[1]], (1.0, 0.0, 0.0))
    # dense order 2, 0, 1; the anchor lifts 1: 1/8 + 1/6 > 1/6.
    assert [item for item, _ in with_anchors.search("x", query)] == [1, 2, 0]
    assert [item for item, _ in without.search("x", query)] == [2, 0, 1]


def test_a_graph_refuses_vectors_that_do_not_match(graph):
    with pytest.raises(ValueError, match="6 entries, but 5 vectors"):
        MemoryGraph(graph.conversation, graph.segments, list(graph.entries.values()), graph.vectors[:5],
                    graph.encoder, graph.config, {}, "")  # fmt: skip
    with pytest.raises(ValueError, match=r"no entry covers messages \['m6'\]"):
        MemoryGraph(graph.conversation, graph.segments, list(graph.entries.values())[:5], graph.vectors[:5],
                    graph.encoder, graph.config, {}, "")  # fmt: skip


def test_a_pickled_graph_searches_alike(graph):
    again = pickle.loads(pickle.dumps(graph))
    assert again.search("dog", 3) == graph.search("dog", 3)


def test_one_locomo_conversation_builds_and_finds_its_evidence(locomo_path):
    """The numbers of the design hold roughly: first search k=5 covers more than half of the evidence."""
    from cuewalk.env.tasks import load_locomo, select
    from cuewalk.judges import evidence_recall
    from cuewalk.memory import SentenceEncoder

    tasks = select(load_locomo(locomo_path, "conv-4-1-5", "val"), evidence=True)
    graph = build_graph(tasks.conversations["conv-30"], SentenceEncoder(), BuildConfig())
    assert 300 <= len(graph.entries) <= 600
    recall = [
        evidence_recall(graph, [hit.entry for hit in graph.search(q.text, 5)], tasks.gold[q.id])
        for q in tasks.questions
    ]
    assert 0.5 < np.mean(recall) < 0.8
