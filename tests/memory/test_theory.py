"""Memora appendix D: what restricted memories equal, and what neither of those can return."""

import hashlib
from datetime import datetime, timedelta

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cuewalk.memory import BuildConfig, Conversation, Entry, Filter, MemoryGraph, Message, Segment, build_graph
from cuewalk.memory.records import say


class HashEncoder:
    """A random direction a text: ties have probability 0, and nothing is alike by accident of wording."""

    name = "hash"

    def encode(self, texts, *, progress=False):
        rows = []
        for text in texts:
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
            rows.append(np.random.default_rng(seed).normal(size=8))
        rows = np.array(rows, dtype=np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def messages(count):
    start = datetime(2024, 1, 1)
    return tuple(Message(f"m{i}", "AB"[i % 2], start + timedelta(minutes=i), f"text {i}") for i in range(count))


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 40), size=st.integers(1, 7), k=st.integers(1, 12), query=st.text(max_size=8))
def test_without_abstractions_and_anchors_it_is_flat_retrieval_over_chunks(count, size, k, query):
    """D.1: one entry a chunk, a(s) = v(s) = s, search then stop = top k chunks, in order."""
    config = BuildConfig(unit="segment", abstraction_words=0, segment_messages=size, update_threshold=1.01,
                         search_weights=(1.0, 0.0, 0.0), anchors_per_entry=0, groups=None)  # fmt: skip
    graph = build_graph(Conversation("c", messages(count)), HashEncoder(), config)
    said = [say(message).line for message in messages(count)]
    chunks = ["\n".join(said[i : i + size]) for i in range(0, count, size)]
    assert [entry.value for entry in graph.entries.values()] == chunks
    encoder = HashEncoder()
    top = np.argsort(-(encoder.encode(chunks) @ encoder.encode([query])[0]), kind="stable")[:k]
    assert [hit.entry for hit in graph.search(query, k)] == [f"e{i}" for i in top]


def entity_graph(owners, vectors, delta):
    """One entry a message, each with exactly one anchor: its entity."""
    said = messages(len(owners))
    entries = [
        Entry(f"e{i}", f"a{i}", (say(message),), ("s0",), (f"entity x{owner}",))
        for i, (message, owner) in enumerate(zip(said, owners, strict=True))
    ]

    class Entities(HashEncoder):
        def encode(self, texts, *, progress=False):
            return np.stack([vectors[int(text.removeprefix("entity x"))] for text in texts])

    return MemoryGraph(
        Conversation("c", said), [Segment("s0", 0, tuple(m.id for m in said))], entries,
        np.eye(len(entries), 3, dtype=np.float32), Entities(),
        BuildConfig(anchor_similarity=delta, groups=None), {}, "",
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    owners=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    delta=st.sampled_from([0.2, 0.4, 0.6]),
    depth=st.integers(0, 4),
    data=st.data(),
)
def test_with_one_anchor_an_entry_it_is_breadth_first_search_over_entities(seed, owners, delta, depth, data):
    """D.2: C = V, cue ~ cue iff cosine >= δ; L expansions of everything = entities within L hops of the seeds."""
    vectors = np.random.default_rng(seed).normal(size=(8, 3)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    graph = entity_graph(owners, vectors, delta)
    seeds = data.draw(st.sets(st.sampled_from(sorted(set(owners))), min_size=1))
    working = [f"e{i}" for i, owner in enumerate(owners) if owner in seeds]
    for _ in range(depth):
        links = graph.frontier("0", working, set(working), ("anchor", "similar_anchor"), 1000)
        working += [link.entry for link in links]
    witness = nx.Graph()
    witness.add_nodes_from(set(owners))
    present = sorted(set(owners))
    witness.add_edges_from((a, b) for a in present for b in present if a < b and vectors[a] @ vectors[b] >= delta)
    within = {node for s in seeds for node in nx.single_source_shortest_path_length(witness, s, cutoff=depth)}
    assert set(working) == {f"e{i}" for i, owner in enumerate(owners) if owner in within}


def test_a_gate_on_both_keys_returns_what_neither_alone_can():
    """D.5: {α(m) ∈ A_q} ∩ {Γ(m) meets C_q}; here abstractions near the query, and an anchor."""
    said = messages(6)
    near, far = [1.0, 0.0], [0.0, 1.0]
    vectors = np.array([near, near, near, far, far, near], dtype=np.float32)
    anchors = [("Ann dog",), ("Bob dog",), ("Ann dog",), ("Ann dog",), ("Bob cat",), ("Bob cat",)]
    entries = [Entry(f"e{i}", f"a{i}", (say(message),), ("s0",), anchors[i]) for i, message in enumerate(said)]

    class Fixed(HashEncoder):
        def encode(self, texts, *, progress=False):
            return np.array([near] * len(texts), dtype=np.float32)

    graph = MemoryGraph(
        Conversation("c", said), [Segment("s0", 0, tuple(m.id for m in said))], entries, vectors,
        Fixed(), BuildConfig(search_weights=(1.0, 0.0, 0.0), groups=None), {}, "",
    )  # fmt: skip
    target = {"e0", "e2"}
    gated = {hit.entry for hit in graph.search("q", 6, where=Filter(entity="Ann dog")) if hit.score > 0.5}
    assert gated == target
    assert all({hit.entry for hit in graph.search("q", k)} != target for k in range(1, 7))
    walks = [{*w, *(link.entry for link in graph.frontier("q", w, set(w), ("anchor",), 9))} for w in (["e0"], ["e2"])]
    assert walks == [{"e0", "e2", "e3"}] * 2  # by the anchor alone e3 comes too
