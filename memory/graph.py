"""The memory of one conversation: entries, what links them, search and frontier."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cuewalk.memory.encoder import Encoder, FloatArray
from cuewalk.memory.index import HybridIndex, fuse_ranks
from cuewalk.memory.records import Conversation, Entry, Message, Segment

LINK_KINDS = ("segment", "adjacent", "anchor", "similar", "search")
"""In order of precedence: a candidate linked in several ways is shown under the first.

`segment`: shares a segment; `adjacent`: lies in the previous or next segment; `anchor`: shares a cue anchor;
`similar`: among the nearest entries by abstraction; `search`: the next hits of the query, no link at all.
"""


@dataclass(frozen=True, slots=True)
class Link:
    """A candidate: the entry reached, the kind of its first link, and its cosine with the query in [-1, 1]."""

    entry: str
    kind: str
    score: float


class MemoryGraph:
    """Entries of one conversation with implicit links (none is stored: they follow from the records).

    Args:
        conversation: What the memory was built from.
        segments: In order.
        entries: In order of first source.
        vectors: Unit vectors of the abstractions, (len(entries), d).
        anchor_vectors: Unit vectors of `anchors`, (len(anchors), d).
        encoder: Encodes queries; must be the one that made the vectors.
        weights: Of abstractions, anchors and BM25 in search.
        nearest: How many `similar` links an entry has.
        digest: Of what it was built from (data, configuration, encoder).

    Raises:
        ValueError: If vectors and records don't match, or a message is not covered by any entry.
    """

    def __init__(
        self,
        conversation: Conversation,
        segments: Sequence[Segment],
        entries: Sequence[Entry],
        vectors: FloatArray,
        anchor_vectors: FloatArray,
        encoder: Encoder,
        *,
        weights: tuple[float, float, float],
        nearest: int,
        digest: str,
    ) -> None:
        self.conversation = conversation
        self.segments = tuple(segments)
        self.entries = {entry.id: entry for entry in entries}
        self.order = {entry: position for position, entry in enumerate(self.entries)}
        self.vectors = vectors
        self.anchor_vectors = anchor_vectors
        self.anchors = tuple(dict.fromkeys(anchor for entry in entries for anchor in entry.anchors))
        self.encoder = encoder
        self.weights = weights
        self.nearest = nearest
        self.digest = digest
        if len(vectors) != len(self.entries) or len(anchor_vectors) != len(self.anchors):
            raise ValueError(
                f"memory of {conversation.id!r}: {len(self.entries)} entries and {len(self.anchors)} anchors, "
                f"but {len(vectors)} and {len(anchor_vectors)} vectors"
            )
        covered = {source for entry in entries for source in entry.sources}
        if missing := [message.id for message in conversation.messages if message.id not in covered]:
            raise ValueError(f"memory of {conversation.id!r}: no entry covers messages {missing[:5]}")
        self._ids = tuple(self.entries)
        self._links: dict[str, dict[str, str]] = {}

    def search(self, query: str, k: int, exclude: Collection[str] = ()) -> list[Link]:
        """Return the best k entries for a query that are not in `exclude`, by fused rank.

        Raises:
            ValueError: If k < 1.
        """
        if k < 1:
            raise ValueError(f"k = {k}: a search returns at least one entry")
        vector = self.encoder.encode([query])[0]
        hits = (self._ids[position] for position, _ in self._index.search(query, vector))
        chosen = [entry for entry in hits if entry not in exclude][:k]
        return [Link(entry, "search", self.score(vector, entry)) for entry in chosen]

    def frontier(
        self, query: str, working: Sequence[str], exclude: Collection[str], kinds: Sequence[str], cap: int
    ) -> list[Link]:
        """Return up to `cap` candidates: what `working` links to and the query's next hits, in one fused order.

        Two rankings are fused by reciprocal rank: the linked entries by cosine with the query, and the next
        search hits; a candidate in both comes first.

        Args:
            query: The current query.
            working: Entries whose links are followed.
            exclude: Entries never returned (all of W, and what was shown before).
            kinds: Which of `LINK_KINDS` to use.
            cap: At most so many.

        Raises:
            ValueError: If a kind is unknown.
        """
        if unknown := set(kinds) - set(LINK_KINDS):
            raise ValueError(f"unknown link kinds {sorted(unknown)}; choose from {', '.join(LINK_KINDS)}")
        if not cap:
            return []
        vector = self.encoder.encode([query])[0]
        reached: dict[str, str] = {}
        for entry in working:
            for target, kind in self.links(entry).items():
                if target not in exclude and kind in kinds:
                    known = reached.get(target, kind)
                    reached[target] = min(known, kind, key=LINK_KINDS.index)
        linked = sorted(reached, key=lambda entry: -self.score(vector, entry))
        found = [hit.entry for hit in self.search(query, cap, exclude)] if "search" in kinds else []
        fused = fuse_ranks([[self.order[e] for e in linked], [self.order[e] for e in found]], (1.0, 1.0))
        best = [self._ids[position] for position, _ in fused[:cap]]
        return [Link(entry, reached.get(entry, "search"), self.score(vector, entry)) for entry in best]

    def links(self, entry_id: str) -> dict[str, str]:
        """Return every entry linked to this one, with the kind of the link (the first of `LINK_KINDS`)."""
        if entry_id in self._links:
            return self._links[entry_id]
        entry = self.entries[entry_id]
        reached: dict[str, str] = {}

        def add(targets: Sequence[str], kind: str) -> None:
            for target in targets:
                if target != entry_id:
                    reached.setdefault(target, kind)

        for segment in entry.segments:
            add(self._by_segment[segment], "segment")
        positions = {self._position[segment] for segment in entry.segments}
        for position in sorted({p + step for p in positions for step in (-1, 1)} - positions):
            if 0 <= position < len(self.segments):
                add(self._by_segment[self.segments[position].id], "adjacent")
        for anchor in entry.anchors:
            add(self._by_anchor[anchor], "anchor")
        similarity = self.vectors @ self.vectors[self.order[entry_id]]
        add([self._ids[p] for p in np.argsort(-similarity, kind="stable")[: self.nearest + 1]], "similar")
        self._links[entry_id] = reached
        return reached

    def score(self, query_vector: FloatArray, entry_id: str) -> float:
        """Return the cosine of a query's unit vector with an entry's abstraction."""
        return float(self.vectors[self.order[entry_id]] @ query_vector)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_index"}  # rebuilt when needed

    @cached_property
    def messages(self) -> dict[str, Message]:
        """Return the conversation's messages by id."""
        return {message.id: message for message in self.conversation.messages}

    @cached_property
    def _index(self) -> HybridIndex:
        texts = [f"{entry.abstraction}\n{entry.value}" for entry in self.entries.values()]
        items = [[self.order[entry] for entry in self._by_anchor[anchor]] for anchor in self.anchors]
        return HybridIndex(self.vectors, texts, self.anchor_vectors, items, self.weights)

    @cached_property
    def _by_segment(self) -> dict[str, list[str]]:
        members: dict[str, list[str]] = {segment.id: [] for segment in self.segments}
        for entry in self.entries.values():
            for segment in entry.segments:
                members[segment].append(entry.id)
        return members

    @cached_property
    def _position(self) -> dict[str, int]:
        return {segment.id: segment.position for segment in self.segments}

    @cached_property
    def _by_anchor(self) -> dict[str, list[str]]:
        members: dict[str, list[str]] = defaultdict(list)
        for entry in self.entries.values():
            for anchor in entry.anchors:
                members[anchor].append(entry.id)
        return members
