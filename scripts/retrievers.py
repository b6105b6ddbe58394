"""Every kind of system that the papers compare with, as its retrieval idea over this package's memory.

None of them is the product of that name: segments, entries, anchors, groups and encoder are this package's own, the
same for all, so that what differs is how context is chosen. Sizes (k and the like) are those that the systems' own
papers or released settings give, where they say. A piece of several messages is ranked by its nearest one: small
encoders read 256 tokens, and cut longer texts off (chunks of 500 tokens found .34 of the evidence at k = 3 when they
were encoded whole, .51 so, on LoCoMo's validation conversation).
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import networkx
import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from cuewalk.env import Question
from cuewalk.env.records import words
from cuewalk.memory import MemoryGraph, Segment
from cuewalk.memory.encoder import FloatArray
from cuewalk.memory.index import best, fuse_ranks
from cuewalk.memory.reader import LocalReader
from cuewalk.memory.records import format_date, say
from cuewalk.scripts.blocks import Block, Piece, Retrieved, entry_blocks, message_block
from cuewalk.scripts.expansion import expand_while_surer
from cuewalk.scripts.hierarchy import select_backbone

KEPT_WORDS = {
    *("no", "not", "never", "none", "nothing", "nobody", "neither", "nor", "without", "cannot"),
    *("one", "two", "three", "four", "five", "six", "eight", "nine", "ten", "eleven", "twelve", "fifteen", "twenty"),
    *("first", "last", "forty", "fifty", "sixty", "hundred"),
}
DROPPED_WORDS = ENGLISH_STOP_WORDS - KEPT_WORDS
"""What compression leaves out: stop words but negations and numbers."""


class Vectors:
    """Vectors of the texts that a system ranks besides entries, one set a memory and name, encoded once.

    Kept in `folder` (a memory's digest is in the file's name, so a stale one is never read), and nowhere if None.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._last: dict[tuple[str, str], FloatArray] = {}

    def __call__(self, graph: MemoryGraph, name: str, texts: Callable[[], Sequence[str]]) -> FloatArray:
        """Return the unit vectors, (texts, d)."""
        key = (name, graph.digest)
        if key not in self._last:
            if len(self._last) >= 32:
                self._last.clear()
            self._last[key] = self._read(graph, name, texts)
        return self._last[key]

    def _read(self, graph: MemoryGraph, name: str, texts: Callable[[], Sequence[str]]) -> FloatArray:
        path = None if self.folder is None else self.folder / f"vectors-{name}-{graph.digest[:16]}.npy"
        if path is not None and path.exists():
            stored: FloatArray = np.load(path, allow_pickle=False)
            return stored
        lines = texts()
        vectors = graph.encoder.encode(lines) if lines else graph.vectors[:0]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".part.npy")
            np.save(partial, vectors)
            partial.replace(path)  # whole or not at all
        return vectors


def messages_near(graph: MemoryGraph, question: Question, vectors: Vectors) -> dict[str, float]:
    """Return each message's cosine with the question, by id, in order."""
    lines = lambda: [say(message).line for message in graph.conversation.messages]  # noqa: E731
    scores = vectors(graph, "messages", lines) @ _encode(graph, question)
    return {m.id: float(score) for m, score in zip(graph.conversation.messages, scores, strict=True)}


def segments_near(graph: MemoryGraph, near: dict[str, float], k: int) -> list[Segment]:
    """Return the k segments with the nearest messages, best first."""
    scores = np.array([max(near[message] for message in segment.messages) for segment in graph.segments])
    return [graph.segments[place] for place in best(scores, k)]


def entries_near(graph: MemoryGraph, question: Question, k: int) -> list[str]:
    """Return the k entries with the nearest abstractions, best first: dense search alone."""
    ids = list(graph.entries)
    return [ids[place] for place in best(graph.vectors @ _encode(graph, question), k)]


def _encode(graph: MemoryGraph, question: Question) -> FloatArray:
    vector: FloatArray = graph.encoder.encode([question.text])[0]
    return vector


def _segment_block(graph: MemoryGraph, segment: Segment) -> Block:
    return message_block(graph.messages[message] for message in segment.messages)


@dataclass(frozen=True)
class FullContext:
    """All messages, in order: nothing is chosen."""

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return every segment."""
        return Retrieved(tuple(_segment_block(graph, segment) for segment in graph.segments))


@dataclass(frozen=True)
class Chunks:
    """Plain RAG: runs of whole messages of at most so many tokens, by dense search.

    500 tokens and k = 3 are Memora's baseline; 180 tokens and k = 20 xMemory's, whose blocks have 183 on average. With
    1 token every message is a chunk of its own, as is one longer than the limit.
    """

    vectors: Vectors = field(repr=False)
    count: Callable[[str], int] = field(repr=False)  #: Of tokens.
    tokens: int = 500
    k: int = 3

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the k chunks with the nearest messages."""
        near = messages_near(graph, question, self.vectors)
        chunks = cut_chunks(graph, self.count, self.tokens)
        scores = np.array([max(near[message] for message in chunk) for chunk in chunks])
        places = best(scores, self.k)
        return Retrieved(tuple(message_block(graph.messages[m] for m in chunks[place]) for place in places))


@lru_cache(maxsize=8)
def cut_chunks(graph: MemoryGraph, count: Callable[[str], int], tokens: int) -> tuple[tuple[str, ...], ...]:
    """Return the message ids of each chunk, in order; a message is never cut."""
    chunks: list[tuple[str, ...]] = []
    size = 0
    for message in graph.conversation.messages:
        length = count(say(message).line)
        if not chunks or size + length > tokens:
            chunks.append(())
            size = 0
        chunks[-1] += (message.id,)
        size += length
    return tuple(chunks)


@dataclass(frozen=True)
class FlatFacts:
    """Flat facts: entries by dense search alone, no links. The idea of Mem0 (Chhikara et al. 2025)."""

    k: int = 10

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the k nearest entries."""
        return Retrieved(entry_blocks(graph, entries_near(graph, question, self.k)))


@dataclass(frozen=True)
class LinkedNotes:
    """Notes with one hop of links: the nearest entries and all that each is linked to. The idea of A-Mem (Xu 2025).

    A-Mem has a model choose links among a note's nearest notes; here these are links as they are (`similar`).
    """

    k: int = 5
    kinds: tuple[str, ...] = ("similar",)

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the k nearest entries, then what they link to, in their order."""
        first = entries_near(graph, question, self.k)
        linked = (target for entry in first for target in graph.links(entry, self.kinds))
        return Retrieved(entry_blocks(graph, dict.fromkeys([*first, *linked])))


@dataclass(frozen=True)
class SegmentsAndFacts:
    """The raw text of the nearest segments, and the nearest entries. The idea of Nemori (Nan et al. 2025)."""

    vectors: Vectors = field(repr=False)
    segments: int = 2
    k: int = 10

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the entries, then the segments: what is short and sure comes first, as in xMemory's contexts."""
        found = segments_near(graph, messages_near(graph, question, self.vectors), self.segments)
        raw = tuple(_segment_block(graph, segment) for segment in found)
        return Retrieved(entry_blocks(graph, entries_near(graph, question, self.k)) + raw)


@dataclass(frozen=True)
class Tiers:
    """Short, middle and long term, the recent preferred. The idea of MemoryOS (Kang et al. 2025).

    Middle: the segments with the best cosine + `weight` · exp(-age / `days`), age counted from the last message, and
    of their messages the nearest. Long: the nearest entries. Short: the last messages. (MemoryOS counts in a segment's
    heat how often it was found; a memory here is not changed by being asked.)
    """

    vectors: Vectors = field(repr=False)
    segments: int = 5
    pages: int = 10  #: Messages of them.
    k: int = 10
    last: int = 7
    weight: float = 0.1
    days: float = 30.0

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the pages, the entries, and the last messages that are no page."""
        near = messages_near(graph, question, self.vectors)
        now = max(message.time for message in graph.conversation.messages)
        scores = []
        for segment in graph.segments:
            age = (now - graph.messages[segment.messages[-1]].time).total_seconds() / 86400
            scores.append(max(near[m] for m in segment.messages) + self.weight * math.exp(-age / self.days))
        inside = [m for place in best(np.array(scores), self.segments) for m in graph.segments[place].messages]
        pages = sorted(inside, key=lambda message: -near[message])[: self.pages]
        recent = [m for m in graph.conversation.messages[-self.last :] if m.id not in pages]
        middle = tuple(message_block([graph.messages[page]]) for page in pages)
        long = entry_blocks(graph, entries_near(graph, question, self.k))
        return Retrieved(middle + long + tuple(message_block([message]) for message in recent))


@dataclass(frozen=True)
class Compressed:
    """Messages filtered and compressed before they are searched. The idea of LightMem (Fang et al. 2025).

    A message with fewer than `least` content words is dropped; of the others the stop words are, but negations and
    numbers. LightMem asks a small model which tokens to keep; this rule keeps every content word, so a message that is
    left counts as shown.
    """

    vectors: Vectors = field(repr=False)
    k: int = 20
    least: int = 3

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the k nearest compressed messages."""
        left = compress_messages(graph, self.least)
        name = f"compressed{self.least}"
        scores = self.vectors(graph, name, lambda: [piece.text for piece in left]) @ _encode(graph, question)
        return Retrieved(tuple(Block((left[place],)) for place in best(scores, self.k)))


@lru_cache(maxsize=8)
def compress_messages(graph: MemoryGraph, least: int) -> tuple[Piece, ...]:
    """Return what is left of the messages with at least so many content words, in order."""
    left = []
    for message in graph.conversation.messages:
        kept = [word for word in message.text.split() if not _is_filler(word)]
        if len(words(" ".join(kept)) - DROPPED_WORDS) >= least:
            text = f"{message.speaker} ({format_date(message.time)}): {' '.join(kept)}"
            left.append(Piece(text, (message.id,)))
    return tuple(left)


def _is_filler(word: str) -> bool:
    parts = words(word)
    return bool(parts) and parts <= DROPPED_WORDS


@dataclass(frozen=True)
class BreadthFirst:
    """Hybrid search and breadth-first search over shared anchors, their ranks fused. The idea of Zep (2025).

    The walk starts from the first hits; of what it reaches, fewer steps come first, then the nearer entry.
    """

    k: int = 20
    seeds: int = 5
    depth: int = 2

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the k best entries of the two rankings, fused by reciprocal rank."""
        vector = _encode(graph, question)
        hits = [hit.entry for hit in graph.search(question.text, self.k)]
        layer = hits[: self.seeds]
        reached, seen = list[str](), set(layer)
        for _ in range(self.depth):
            targets = dict.fromkeys(t for entry in layer for t in graph.links(entry, ("anchor",)) if t not in seen)
            layer = sorted(targets, key=lambda entry: -graph.score(vector, entry))
            reached += layer
            seen.update(layer)
        rankings = [[graph.order[entry] for entry in ranking] for ranking in (hits, reached)]
        ids = list(graph.entries)
        fused = [ids[place] for place, _ in fuse_ranks(rankings, (1.0, 1.0))]
        return Retrieved(entry_blocks(graph, fused[: self.k]))


@dataclass(frozen=True)
class PageRank:
    """Personalised PageRank over entries and anchors. The idea of HippoRAG 2 (Gutiérrez et al. 2025).

    An entry is joined with its anchors, and anchors with those much alike. The walk restarts, half of the time, at the
    `seeds` anchors nearest to the question (by their cosine), and at entries (by theirs, normalised, times
    `entry_weight`). HippoRAG's own .05 suits facts that a model wrote; offline, an anchor is a speaker and a rare word:
    .05 found .51 of the evidence at k = 10 on LoCoMo's validation conversation, .5 finds .70.
    """

    k: int = 10
    seeds: int = 5
    damping: float = 0.5
    entry_weight: float = 0.5

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the k entries that the walk visits most; of equal ones the nearer first."""
        vector = _encode(graph, question)
        near = graph.vectors @ vector
        low, spread = float(near.min()), float(np.ptp(near))
        normal = (near - low) / spread if spread > 0 else np.ones(len(near))
        restart = {
            entry: self.entry_weight * float(weight) for entry, weight in zip(graph.entries, normal, strict=True)
        }
        cosines = graph.anchor_vectors @ vector if graph.anchors else np.zeros(0)
        for place in best(cosines, self.seeds) if graph.anchors else ():
            restart[_anchor_node(graph.anchors[place])] = max(0.0, float(cosines[place]))
        visits = networkx.pagerank(_joined(graph), alpha=self.damping, personalization=restart, max_iter=500)
        ranked = sorted(graph.entries, key=lambda entry: (-visits[entry], -near[graph.order[entry]]))
        return Retrieved(entry_blocks(graph, ranked[: self.k]))


@lru_cache(maxsize=8)
def _joined(graph: MemoryGraph) -> Any:
    """Return entries and anchors as a networkx graph."""
    joined = networkx.Graph()
    joined.add_nodes_from(graph.entries)
    joined.add_edges_from(
        (entry.id, _anchor_node(anchor)) for entry in graph.entries.values() for anchor in entry.anchors
    )
    similarity = np.triu(graph.anchor_vectors @ graph.anchor_vectors.T, 1)
    for a, b in np.argwhere(similarity >= graph.config.anchor_similarity):
        joined.add_edge(_anchor_node(graph.anchors[a]), _anchor_node(graph.anchors[b]))
    return joined


def _anchor_node(anchor: str) -> str:
    return f"anchor: {anchor}"  # entries are named e0, e1, …


@dataclass(frozen=True)
class SummariesAndFacts:
    """Summaries of the nearest segments, and the nearest entries. The idea of LangMem.

    Offline a summary is its entries' abstractions. One shows a message only where it holds its text, or a whole
    sentence that cites it.
    """

    vectors: Vectors = field(repr=False)
    segments: int = 3
    k: int = 10

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the entries, then the summaries."""
        found = segments_near(graph, messages_near(graph, question, self.vectors), self.segments)
        summaries = tuple(summary_block(graph, segment) for segment in found)
        return Retrieved(entry_blocks(graph, entries_near(graph, question, self.k)) + summaries)


def summary_block(graph: MemoryGraph, segment: Segment) -> Block:
    """Return a segment's summary: the extracted one, which cites nothing, or its entries' abstractions, one a piece."""
    if segment.summary:
        return Block((Piece(segment.summary, ()),))
    pieces = []
    notes = _notes(graph)
    for entry in (graph.entries[id_] for id_ in graph.by_segment[segment.id]):
        told = [s for s in entry.sources if " ".join(graph.messages[s].text.split()) in entry.abstraction]
        pieces.append(Piece(entry.abstraction, tuple(dict.fromkeys([*notes.get(entry.abstraction, ()), *told]))))
    return Block(tuple(pieces))


def _notes(graph: MemoryGraph) -> dict[str, tuple[str, ...]]:
    return {note.text.strip(): note.sources for note in graph.conversation.notes}


@dataclass(frozen=True)
class Backbone:
    """Stage I of xMemory (Hu et al. 2026, eq. 4-5): groups, then entries, chosen to cover; fewer than k may come."""

    k: int = 10

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the entries chosen; a ValueError if the graph has no groups."""
        return Retrieved(entry_blocks(graph, [link.entry for link in select_backbone(graph, question.text, self.k)]))


@dataclass(frozen=True)
class Expanded:
    """Stages I and II of xMemory: segments and messages are added while they make the reader surer."""

    reader: LocalReader = field(repr=False)
    k: int = 10

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the entries, then each segment's summary, and its messages not shown yet where they were added."""
        entries = [link.entry for link in select_backbone(graph, question.text, self.k)]
        done = expand_while_surer(graph, question.text, entries, self.reader)
        shown = {source for entry in entries for source in graph.entries[entry].sources}
        blocks = list(entry_blocks(graph, entries))
        for id_ in done.segments:
            blocks.append(summary_block(graph, graph.segment_by_id[id_]))
            if id_ in done.raw:
                new = [m for m in graph.segment_by_id[id_].messages if m not in shown]
                blocks.append(message_block(graph.messages[message] for message in new))
                shown.update(new)
        return Retrieved(tuple(blocks), done.tokens)


@dataclass(frozen=True)
class Search:
    """Memora's semantic retriever (2026): the best k entries of hybrid search, in one step."""

    k: int = 8

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return the k best entries."""
        return Retrieved(entry_blocks(graph, [hit.entry for hit in graph.search(question.text, self.k)]))


@dataclass(frozen=True)
class RandomEntries:
    """Entries drawn at random, without repetition: the floor. The seed is the question's id."""

    k: int = 8

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Return k entries, or all where there are fewer."""
        ids = list(graph.entries)
        return Retrieved(entry_blocks(graph, random.Random(question.id).sample(ids, min(self.k, len(ids)))))
