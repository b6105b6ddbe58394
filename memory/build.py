"""From messages to a memory graph: segments, candidates, create-or-update, cue anchors, groups; and growing one."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Protocol

import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from cuewalk.memory.config import BuildConfig
from cuewalk.memory.encoder import Encoder, FloatArray
from cuewalk.memory.graph import MemoryGraph
from cuewalk.memory.groups import Groups
from cuewalk.memory.index import best
from cuewalk.memory.records import MONTHS, Conversation, Entry, Message, Note, Segment, Statement, say


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair (abstraction, value) that becomes an entry or updates one; its value is statements, oldest first."""

    abstraction: str
    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """What a candidate does to an existing entry, by its id (Memora eq. 5).

    `text` is the merged value, which supersedes the entry's, None unites both; `abstraction` a refined one, if any.
    """

    entry: str
    text: str | None = None
    abstraction: str | None = None


Extracted = tuple[list[Segment], list[list[Candidate]]]
"""Segments, and the candidates of each."""


class Extractor(Protocol):
    """The four steps of construction that can be done with a model or without."""

    def segment(self, conversation: Conversation, done: Sequence[Segment]) -> list[Segment]:
        """Return all segments, those of `done` first; the last of them may have grown."""

    def extract(self, conversation: Conversation, segments: Sequence[Segment], fresh: Collection[str]) -> Extracted:
        """Return the segments, perhaps with summaries, and each one's candidates, which cover its `fresh` messages."""

    def choose(self, asked: Sequence[tuple[Candidate, Sequence[Entry]]]) -> list[Update | None]:
        """Return for each candidate which of the entries above γ (best first) it updates, if any: the selector J."""

    def name_anchors(self, entries: Sequence[Entry], changed: Collection[str]) -> list[tuple[str, ...]]:
        """Return the cue anchors of every entry; only those of `changed` must be found anew."""

    def report(self) -> dict[str, float]:
        """Return what was counted on the way; nothing without a model."""


def build_graph(
    conversation: Conversation,
    encoder: Encoder,
    config: BuildConfig | None = None,
    *,
    extractor: Extractor | None = None,
    progress: bool = False,
) -> MemoryGraph:
    """Build the memory of one conversation; every message ends in at least one entry.

    The encoder is for abstractions, anchors and later queries; the extractor, what segments and extracts, is the one
    that `config` names where None; `progress` shows a bar while texts are encoded.
    """
    return _grow(None, conversation, encoder, config or BuildConfig(), extractor, progress)


def extend_graph(
    graph: MemoryGraph, messages: Sequence[Message], notes: Sequence[Note] = (), *, extractor: Extractor | None = None
) -> MemoryGraph:
    """Return a graph that holds these later messages too; the given one stays as it is.

    Entries keep their ids. Offline, without notes, it is what one build of all messages gives, but for groups' order.
    """
    old = graph.conversation
    conversation = replace(old, messages=(*old.messages, *messages), notes=(*old.notes, *notes))
    return _grow(graph, conversation, graph.encoder, graph.config, extractor, progress=False)


def load_extractor(config: BuildConfig) -> Extractor:
    """Return the extractor that the configuration names."""
    if config.extractor == "offline":
        return OfflineExtractor(config)
    from cuewalk.memory.extract import LLMExtractor  # it imports this module, and the client of an endpoint

    return LLMExtractor(config)


def _grow(
    old: MemoryGraph | None,
    conversation: Conversation,
    encoder: Encoder,
    config: BuildConfig,
    extractor: Extractor | None,
    progress: bool,
) -> MemoryGraph:
    extractor = extractor or load_extractor(config)
    entries = list(old.entries.values()) if old else []
    told = {source for entry in entries for source in entry.sources}
    segments = extractor.segment(conversation, old.segments if old else ())
    fresh = {message.id for message in conversation.messages} - told
    segments, batches = extractor.extract(conversation, segments, fresh)
    texts = [candidate.abstraction for batch in batches for candidate in batch]
    found = encoder.encode(texts, progress=progress) if texts else np.zeros((0, 1), dtype=np.float32)
    vectors = old.vectors if old else np.zeros((0, found.shape[1]), dtype=np.float32)
    groups = None
    if config.groups:
        members = {group: [old.order[id_] for id_ in ids] for group, ids in old.groups.items()} if old else {}
        groups = Groups(config.groups, members)
    segment_of = {message: segment.id for segment in segments for message in segment.messages}
    changed: set[str] = set()
    start = 0
    for batch in filter(None, batches):
        rows, start = found[start : start + len(batch)], start + len(batch)
        chosen = _choose(batch, rows, entries, vectors, extractor, config)
        touched, created = set(), []
        for candidate, row, choice in zip(batch, rows, chosen, strict=True):
            if choice is None:
                place, within = len(entries), _segments(candidate.statements, segment_of)
                entries.append(Entry(f"e{place}", candidate.abstraction, candidate.statements, within))
                created.append(row)
            else:
                place, update = choice
                entries[place] = _updated(entries[place], candidate, update, segment_of)
                if update.abstraction:
                    vectors = vectors.copy()  # the graph this one grew from may share it
                    vectors[place] = encoder.encode([update.abstraction])[0]
            touched.add(place)
        vectors = np.concatenate([vectors, np.stack(created)]) if created else vectors
        changed |= {entries[place].id for place in touched}
        if groups is not None:
            groups.add(sorted(touched), vectors)
    named = extractor.name_anchors(entries, changed)
    entries = [replace(entry, anchors=anchors) for entry, anchors in zip(entries, named, strict=True)]
    grouped = {id_: [entries[p].id for p in members] for id_, members in groups.members.items()} if groups else {}
    digest = build_digest(conversation, config, encoder.name)
    return MemoryGraph(conversation, segments, entries, vectors, encoder, config, grouped, digest)


def build_digest(conversation: Conversation, config: BuildConfig, encoder: str) -> str:
    """Return a digest of everything that a built memory depends on."""
    said = (conversation.id, conversation.messages, conversation.notes, sorted(conversation.breaks))
    text = repr((said, sorted(asdict(config).items()), encoder))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _choose(
    batch: Sequence[Candidate],
    rows: FloatArray,
    entries: Sequence[Entry],
    vectors: FloatArray,
    extractor: Extractor,
    config: BuildConfig,
) -> list[tuple[int, Update] | None]:
    """Return which entry each candidate of one segment updates, by its place, if any (Memora eq. 2-4).

    A candidate is compared with the entries that were there before its segment, k nearest, those above γ.
    """
    near = [
        {entries[i].id: i for i in best(row, config.update_candidates) if row[i] >= config.update_threshold}
        for row in (rows @ vectors.T if len(vectors) else np.zeros((len(batch), 0)))
    ]
    asked = [number for number, places in enumerate(near) if places]
    updates = extractor.choose([(batch[number], [entries[i] for i in near[number].values()]) for number in asked])
    chosen = {n: (near[n][update.entry], update) for n, update in zip(asked, updates, strict=True) if update}
    return [chosen.get(number) for number in range(len(batch))]


def _updated(entry: Entry, candidate: Candidate, update: Update, segment_of: dict[str, str]) -> Entry:
    """Unite an entry with a candidate; what a merged value supersedes is kept with the date it ended."""
    statements = entry.statements
    if update.text is None:
        statements += tuple(s for s in candidate.statements if not set(s.sources) <= set(entry.sources))
    else:
        first = candidate.statements[0]
        current = [s for s in statements if s.until is None]
        told = [source for s in (*current, *candidate.statements) for source in s.sources]
        merged = Statement(first.speaker, first.time, update.text, tuple(dict.fromkeys(told)))
        statements = (*(replace(s, until=s.until or first.time) for s in statements), merged)
    abstraction, segments = update.abstraction or entry.abstraction, _segments(statements, segment_of)
    return replace(entry, abstraction=abstraction, statements=statements, segments=segments)


def _segments(statements: Sequence[Statement], segment_of: dict[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(segment_of[source] for statement in statements for source in statement.sources))


class OfflineExtractor:
    """Construction with nothing but the encoder. Deterministic.

    Segments are cut at pauses and at a length; a candidate is a note with the messages it cites, or a message that no
    note cites; an update unites what one person says twice; an anchor is the speaker and a word that few entries share.
    """

    def __init__(self, config: BuildConfig) -> None:
        self.config = config

    def segment(self, conversation: Conversation, done: Sequence[Segment] = ()) -> list[Segment]:
        """Cut messages into blocks at pauses, at headers and at `segment_messages`; what is cut stays cut."""
        blocks: list[list[Message]] = []
        for message in conversation.messages:
            pause = blocks and message.time - blocks[-1][-1].time > timedelta(minutes=self.config.gap_minutes)
            full = blocks and len(blocks[-1]) == self.config.segment_messages
            if not blocks or pause or full or message.id in conversation.breaks:
                blocks.append([])
            blocks[-1].append(message)
        return [Segment(f"s{i}", i, tuple(m.id for m in block)) for i, block in enumerate(blocks)]

    def extract(self, conversation: Conversation, segments: Sequence[Segment], fresh: Collection[str]) -> Extracted:
        """Return each segment's candidates in order of their first message."""
        messages = {message.id: message for message in conversation.messages}
        order = {message: place for place, message in enumerate(messages)}
        new = [[messages[id_] for id_ in segment.messages if id_ in fresh] for segment in segments]
        if self.config.unit == "segment":
            return list(segments), [[self._whole(said)] if said else [] for said in new]
        found: dict[str, list[Candidate]] = defaultdict(list)  # by the first message
        cited: set[str] = set()
        for note in conversation.notes if self.config.notes else ():
            if note.text.strip() and any(source in fresh for source in note.sources):
                sources = sorted(set(note.sources), key=order.__getitem__)
                candidate = Candidate(note.text.strip(), tuple(say(messages[source]) for source in sources))
                found[sources[0]].append(candidate)
                cited.update(sources)
        for message in (message for said in new for message in said if message.id not in cited):
            found[message.id].append(self.candidate(message))
        return list(segments), [[c for id_ in segment.messages for c in found[id_]] for segment in segments]

    def candidate(self, message: Message) -> Candidate:
        """Return a message as a candidate of its own."""
        return Candidate(f"{message.speaker}: {self._cut(message.text)}", (say(message),))

    def _whole(self, said: Sequence[Message]) -> Candidate:
        statements = tuple(map(say, said))
        return Candidate(self._cut("\n".join(statement.line for statement in statements)), statements)

    def report(self) -> dict[str, float]:
        """Return nothing: no model was asked."""
        return {}

    def _cut(self, text: str) -> str:
        most = self.config.abstraction_words
        return " ".join(text.split()[:most]) if most else text

    def choose(self, asked: Sequence[tuple[Candidate, Sequence[Entry]]]) -> list[Update | None]:
        """Take the most similar entry of the same speaker: the same words about somebody else are another fact."""
        return [
            next((Update(entry.id) for entry in near if entry.speaker == candidate.statements[0].speaker), None)
            for candidate, near in asked
        ]

    def name_anchors(self, entries: Sequence[Entry], changed: Collection[str]) -> list[tuple[str, ...]]:
        """Name "main entity + key aspect", here the speaker and a word that few of his entries share.

        Only anchors that join at least two entries are kept: an anchor with one entry is no link.
        """
        told = [(entry.speaker, _aspects(entry)) for entry in entries]
        carriers = Counter((speaker, word) for speaker, words in told for word in words)
        limit = max(2, len(entries) // 50)  # a word in more entries than this says little about any of them
        result = []
        for speaker, words in told:
            shared = [word for word in words if 2 <= carriers[speaker, word] <= limit]
            shared.sort(key=lambda word: (carriers[speaker, word], word))
            result.append(tuple(f"{speaker} {word}" for word in shared[: self.config.anchors_per_entry]))
        return result


def _aspects(entry: Entry) -> set[str]:
    said = re.findall(r"[^\W\d_]{4,}", f"{entry.abstraction}\n{entry.value}".lower())
    return set(map(_stem, said)).difference(ENGLISH_STOP_WORDS, [entry.speaker.lower()], map(str.lower, MONTHS))


def _stem(word: str) -> str:
    """Cut a plural: enough to join `camps` with `camp`, without a stemmer's surprises in a shown text."""
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 4 else word
