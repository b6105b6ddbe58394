"""The memory of one conversation: entries, what links them, search and frontier."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from cuewalk.memory.config import BuildConfig
from cuewalk.memory.encoder import Encoder, FloatArray
from cuewalk.memory.groups import neighbours
from cuewalk.memory.index import HybridIndex, best, fuse_ranks
from cuewalk.memory.records import Conversation, Entry, Message, Segment

LINK_KINDS = ("segment", "adjacent", "anchor", "group", "similar", "similar_anchor", "near_group", "search")
"""In order of precedence: a candidate linked in several ways is shown under the first.

`segment`: shares a segment; `adjacent`: lies in the previous or next segment; `anchor`: shares a cue anchor;
`group`: lies in the same group; `similar`: among the nearest entries by abstraction; `similar_anchor`: has an anchor
much like one of its own; `near_group`: lies in a neighbouring group; `search`: the next hits of the query, no link.
"""

REMEMBERED_SEARCHES = 1_000


@dataclass(frozen=True, slots=True)
class Link:
    """A candidate: the entry reached, the kind of its first link, and its cosine with the query in [-1, 1]."""

    entry: str
    kind: str
    score: float


@dataclass(frozen=True, slots=True)
class Filter:
    """Cues that an entry must meet, all that are given: a filter of search and frontier that needs no schema."""

    speaker: str | None = None  #: Said by this person (case does not count).
    since: datetime | None = None  #: Said at this time or later,
    until: datetime | None = None  #: or at this time or earlier.
    source: str | None = None  #: Holds this message, or lies in this segment.
    entity: str | None = None  #: One of its anchors, or its abstraction, has this word or phrase.

    def admits(self, entry: Entry) -> bool:
        """Tell whether an entry meets every cue."""
        said = [
            s
            for s in entry.statements
            if (self.speaker is None or s.speaker.casefold() == self.speaker.casefold())
            and (self.since is None or s.time >= self.since)
            and (self.until is None or s.time <= self.until)
        ]
        if not said or (self.source is not None and self.source not in (*entry.sources, *entry.segments)):
            return False
        keys = (*entry.anchors, entry.abstraction)
        return self.entity is None or any(_words(self.entity) in _words(key) for key in keys)


def _words(text: str) -> str:
    """Return a text's words between blanks, so that a phrase in another is one of whole words."""
    return " ".join(["", *re.findall(r"\w+", text.casefold()), ""])


class MemoryGraph:
    """Entries of one conversation with implicit links (none is stored: they follow from the records).

    Args:
        conversation: What the memory was built from.
        segments: In order.
        entries: In order of creation.
        vectors: Unit vectors of the abstractions, (len(entries), d).
        encoder: Encodes queries; must be the one that made the vectors.
        config: What it was built with: search weights and what links entries.
        groups: Group id -> entries; empty where it has none, else every entry is in one.
        digest: Of what it was built from (data, configuration, encoder).
        folder: Where it was read from, if it was; an index that is not flat is kept there.

    A ValueError if vectors and records don't match, no entry covers a message, or groups don't partition the entries.
    """

    def __init__(
        self,
        conversation: Conversation,
        segments: Sequence[Segment],
        entries: Sequence[Entry],
        vectors: FloatArray,
        encoder: Encoder,
        config: BuildConfig,
        groups: Mapping[str, Sequence[str]],
        digest: str,
        folder: Path | None = None,
    ) -> None:
        self.conversation = conversation
        self.segments = tuple(segments)
        self.entries = {entry.id: entry for entry in entries}
        self.order = {entry: position for position, entry in enumerate(self.entries)}
        self.vectors = vectors
        self.anchors = tuple(dict.fromkeys(anchor for entry in entries for anchor in entry.anchors))
        self.encoder = encoder
        self.config = config
        self.groups = {group: tuple(members) for group, members in groups.items()}
        self.digest = digest
        self.folder = folder
        if len(vectors) != len(self.entries):
            raise ValueError(f"memory of {conversation.id!r}: {len(self.entries)} entries, but {len(vectors)} vectors")
        covered = {source for entry in entries for source in entry.sources}
        if missing := [message.id for message in conversation.messages if message.id not in covered]:
            raise ValueError(f"memory of {conversation.id!r}: no entry covers messages {missing[:5]}")
        members = [entry for group in self.groups.values() for entry in group]
        if members and (len(members) != len(self.entries) or set(members) != set(self.entries)):
            raise ValueError(f"memory of {conversation.id!r}: its groups are no partition of its entries")
        self._ids = tuple(self.entries)
        self._links: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
        self._searched: dict[str, list[str]] = {}
        self._writing = Lock()

    def add(self, messages: Sequence[Message]) -> None:
        """Take in later messages: whoever searches next, in any thread, finds them, and a `snapshot` stays as it was.

        Writers take turns. Nothing changes on disk until `save_graph`. A ValueError if an id occurs twice.
        """
        from cuewalk.memory.build import extend_graph  # it imports this module

        with self._writing:
            grown = extend_graph(self, messages)
            grown._writing, grown.folder = self._writing, self.folder
            _ = grown._index  # readers shall not wait for it, each building its own
            self.__dict__ = grown.__dict__

    def snapshot(self) -> "MemoryGraph":
        """Return the graph as it is now, whatever is added later. Nothing is copied."""
        view = object.__new__(MemoryGraph)
        view.__dict__ = self.__dict__  # `add` puts another in its place, and never changes it
        return view

    def search(self, query: str, k: int, exclude: Collection[str] = (), where: Filter | None = None) -> list[Link]:
        """Return the best k entries for a query that are not in `exclude` and meet `where`, by fused rank.

        A ValueError if k < 1.
        """
        if k < 1:
            raise ValueError(f"k = {k}: a search returns at least one entry")
        vector = self.encoder.encode([query])[0]
        chosen = [entry for entry in self._hits(query, vector, where) if entry not in exclude][:k]
        return [Link(entry, "search", self.score(vector, entry)) for entry in chosen]

    def _hits(self, query: str, vector: FloatArray, where: Filter | None) -> list[str]:
        """Return the fused ranking; of whole searches the last are remembered, for a walk asks the same again."""
        if where is not None:
            allowed = [i for i, e in enumerate(self.entries.values()) if where.admits(e)]
            return [self._ids[position] for position, _ in self._index.search(query, vector, allowed)]
        if (found := self._searched.get(query)) is None:
            if len(self._searched) >= REMEMBERED_SEARCHES:
                self._searched.clear()  # another thread may do so at any time
            found = [self._ids[position] for position, _ in self._index.search(query, vector)]
            self._searched[query] = found
        return found

    def frontier(
        self,
        query: str,
        working: Sequence[str],
        exclude: Collection[str],
        kinds: Sequence[str],
        cap: int,
        where: Filter | None = None,
    ) -> list[Link]:
        """Return up to `cap` candidates: what `working` links to and the query's next hits, in one fused order.

        Each kind is a ranking of its own, of the entries so linked by cosine with the query, and of the next search
        hits; they are fused by reciprocal rank: what is linked in several ways comes first. (One ranking of all linked
        entries reaches less: docs/results/memory.md.) `exclude` is what is never returned (all of W, and what was shown
        before), `kinds` are some of `LINK_KINDS`, and every candidate meets `where`. A ValueError if a kind is unknown.
        """
        if unknown := set(kinds) - set(LINK_KINDS):
            raise ValueError(f"unknown link kinds {sorted(unknown)}; choose from {', '.join(LINK_KINDS)}")
        if not cap:
            return []
        vector = self.encoder.encode([query])[0]
        shown: dict[str, str] = {}
        rankings: list[list[int]] = []
        for kind in (kind for kind in LINK_KINDS if kind in kinds):
            if kind == "search":
                found = [hit.entry for hit in self.search(query, cap, exclude, where)]
            else:
                targets = dict.fromkeys(t for entry in working for t in self.links(entry, (kind,)) if t not in exclude)
                allowed = [t for t in targets if where is None or where.admits(self.entries[t])]
                found = sorted(allowed, key=lambda entry: -self.score(vector, entry))
            shown = dict.fromkeys(found, kind) | shown
            rankings.append([self.order[entry] for entry in found])
        fused = [self._ids[place] for place, _ in fuse_ranks(rankings, [1.0] * len(rankings))[:cap]]
        return [Link(entry, shown[entry], self.score(vector, entry)) for entry in fused]

    def links(self, entry_id: str, kinds: Sequence[str] = LINK_KINDS) -> dict[str, str]:
        """Return every entry linked to this one in one of these ways, with the first of them in `LINK_KINDS`."""
        key = (entry_id, tuple(kinds))
        if key in self._links:
            return self._links[key]
        entry, group = self.entries[entry_id], self.group_of.get(entry_id, "")
        near = {self.segment_by_id[segment].position for segment in entry.segments}
        beside = sorted({p + step for p in near for step in (-1, 1) if 0 <= p + step < len(self.segments)} - near)
        # In the order of LINK_KINDS; functions, for some cost time and may not be asked for.
        targets: dict[str, Callable[[], Iterable[str]]] = {
            "segment": lambda: (e for segment in entry.segments for e in self.by_segment[segment]),
            "adjacent": lambda: (e for p in beside for e in self.by_segment[self.segments[p].id]),
            "anchor": lambda: (e for anchor in entry.anchors for e in self._by_anchor[anchor]),
            "group": lambda: self.groups.get(group, ()),
            "similar": lambda: self._nearest(entry_id),
            "similar_anchor": lambda: (e for a in entry.anchors for b in self._alike(a) for e in self._by_anchor[b]),
            "near_group": lambda: (e for other in self.near_groups.get(group, ()) for e in self.groups[other]),
        }
        reached: dict[str, str] = {}
        for kind, reach in targets.items():
            for target in reach() if kind in kinds else ():
                reached.setdefault(target, kind)
        reached.pop(entry_id, None)
        self._links[key] = reached
        return reached

    def _nearest(self, entry_id: str) -> list[str]:
        vector, count = self.vectors[self.order[entry_id]], self.config.nearest + 1
        flat = self.config.index == "Flat"  # exact, the first of equals first; else the index knows faster
        places = best(self.vectors @ vector, count) if flat else self._index.near(vector, count)
        return [self._ids[place] for place in places]

    def _alike(self, anchor: str) -> list[str]:
        """Return the other anchors whose cosine with this one reaches `anchor_similarity`."""
        similarity = self.anchor_vectors @ self.anchor_vectors[self.anchors.index(anchor)]
        alike = [self.anchors[i] for i in np.flatnonzero(similarity >= self.config.anchor_similarity)]
        return [other for other in alike if other != anchor]

    def score(self, query_vector: FloatArray, entry_id: str) -> float:
        """Return the cosine of a query's unit vector with an entry's abstraction."""
        return float(self.vectors[self.order[entry_id]] @ query_vector)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_index", "_writing")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "_writing": Lock()}  # the index is rebuilt when needed

    @cached_property
    def messages(self) -> dict[str, Message]:
        """Return the conversation's messages by id."""
        return {message.id: message for message in self.conversation.messages}

    @cached_property
    def segment_by_id(self) -> dict[str, Segment]:
        """Return the segments by id."""
        return {segment.id: segment for segment in self.segments}

    @cached_property
    def anchor_vectors(self) -> FloatArray:
        """Return the unit vectors of `anchors`, (len(anchors), d); encoded when they are first needed."""
        return self.encoder.encode(self.anchors) if self.anchors else self.vectors[:0]

    @cached_property
    def by_segment(self) -> dict[str, list[str]]:
        """Return the entries of each segment, by its id."""
        members: dict[str, list[str]] = {segment.id: [] for segment in self.segments}
        for entry in self.entries.values():
            for segment in entry.segments:
                members[segment].append(entry.id)
        return members

    @cached_property
    def group_of(self) -> dict[str, str]:
        """Return each entry's group."""
        return {entry: group for group, members in self.groups.items() for entry in members}

    @cached_property
    def centroids(self) -> FloatArray:
        """Return the means of the groups' vectors, in order of `groups`, (K, d)."""
        rows = [self.vectors[[self.order[e] for e in members]].mean(axis=0) for members in self.groups.values()]
        return np.stack(rows) if rows else self.vectors[:0]

    @cached_property
    def near_groups(self) -> dict[str, list[str]]:
        """Return each group's neighbours, nearest first: kNN in both directions."""
        if not self.groups or self.config.groups is None:
            return {}
        ids = list(self.groups)
        near = neighbours(self.centroids, self.config.groups.nearest)
        return {group: [ids[i] for i in others] for group, others in zip(ids, near, strict=True)}

    @cached_property
    def _index(self) -> HybridIndex:
        texts = [f"{entry.abstraction}\n{entry.value}" for entry in self.entries.values()]
        items = [[self.order[entry] for entry in self._by_anchor[anchor]] for anchor in self.anchors]
        weights, factory = self.config.search_weights, self.config.index
        anchors = self.anchor_vectors if weights[1] else self.vectors[:0]
        return HybridIndex(self.vectors, texts, anchors, items, weights, factory=factory, folder=self.folder)

    @cached_property
    def _by_anchor(self) -> dict[str, list[str]]:
        members: dict[str, list[str]] = defaultdict(list)
        for entry in self.entries.values():
            for anchor in entry.anchors:
                members[anchor].append(entry.id)
        return members
