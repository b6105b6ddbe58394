"""From messages to a memory graph: segments, candidates, create-or-update, cue anchors, groups; and growing one."""

import hashlib
import re
from collections import Counter
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
from cuewalk.memory.records import MONTHS, Conversation, Entry, Message, Note, Segment, Statement, say


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair (abstraction, value) that becomes an entry or updates one; its value is statements, oldest first."""

    abstraction: str
    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """What a candidate does to an existing entry (Memora eq. 5).

    Attributes:
        entry: The entry's id.
        text: The merged value, which supersedes what the entry says; None unites both as they are.
        abstraction: A refined abstraction; None keeps the entry's.
    """

    entry: str
    text: str | None = None
    abstraction: str | None = None


class Extractor(Protocol):
    """The four steps of construction that can be done with a model or without."""

    def segment(self, conversation: Conversation, done: Sequence[Segment]) -> list[Segment]:
        """Return all segments, those of `done` first; the last of them may have grown."""
        ...

    def extract(
        self, conversation: Conversation, segments: Sequence[Segment], fresh: Collection[str]
    ) -> tuple[list[Segment], list[list[Candidate]]]:
        """Return the segments, perhaps with summaries, and each one's candidates, which cover its `fresh` messages."""
        ...

    def choose(self, asked: Sequence[tuple[Candidate, Sequence[Entry]]]) -> list[Update | None]:
        """Return for each candidate which of the entries above γ (best first) it updates, if any: the selector J."""
        ...

    def name_anchors(self, entries: Sequence[Entry], changed: Collection[str]) -> list[tuple[str, ...]]:
        """Return the cue anchors of every entry; only those of `changed` must be found anew."""
        ...


def build_graph(
    conversation: Conversation,
    encoder: Encoder,
    config: BuildConfig | None = None,
    *,
    extractor: Extractor | None = None,
    progress: bool = False,
) -> MemoryGraph:
    """Build the memory of one conversation; every message ends in at least one entry.

    Args:
        conversation: What is remembered.
        encoder: Of abstractions, anchors and later queries.
        config: The rules.
        extractor: What segments and extracts; the one that `config` names where None.
        progress: Show a bar while texts are encoded.
    """
    config = config or BuildConfig()
    return _grow(conversation, (), (), None, encoder, config, extractor or _configured(config), progress)


def extend_graph(
    graph: MemoryGraph, messages: Sequence[Message], notes: Sequence[Note] = (), *, extractor: Extractor | None = None
) -> MemoryGraph:
    """Return a graph that holds these later messages too; the given one stays as it is.

    Entries keep their ids. Offline, and without notes, it equals a graph built from all messages at once but for the
    order in which groups were formed.
    """
    old = graph.conversation
    conversation = replace(old, messages=(*old.messages, *messages), notes=(*old.notes, *notes))
    entries, extractor = tuple(graph.entries.values()), extractor or _configured(graph.config)
    return _grow(
        conversation, graph.segments, entries, graph.vectors, graph.encoder, graph.config, extractor, False,
        graph.groups,
    )  # fmt: skip


def _configured(config: BuildConfig) -> Extractor:
    if config.extractor == "offline":
        return OfflineExtractor(config)
    from cuewalk.memory.extract import LLMExtractor  # it imports this module, and the client of an endpoint

    return LLMExtractor(config)


def _grow(
    conversation: Conversation,
    done: Sequence[Segment],
    known: Sequence[Entry],
    known_vectors: FloatArray | None,
    encoder: Encoder,
    config: BuildConfig,
    extractor: Extractor,
    progress: bool,
    known_groups: dict[str, tuple[str, ...]] | None = None,
) -> MemoryGraph:
    old = {source for entry in known for source in entry.sources}
    fresh = {message.id for message in conversation.messages} - old
    segments = extractor.segment(conversation, done)
    segments, batches = extractor.extract(conversation, segments, fresh)
    texts = [candidate.abstraction for batch in batches for candidate in batch]
    found = encoder.encode(texts, progress=progress) if texts else np.zeros((0, 1), dtype=np.float32)
    entries, changed = list(known), set[str]()
    vectors = known_vectors if known_vectors is not None else np.zeros((0, found.shape[1]), dtype=np.float32)
    places = {entry.id: place for place, entry in enumerate(entries)}
    groups = None
    if config.groups:
        members = {group: [places[entry] for entry in ids] for group, ids in (known_groups or {}).items()}
        groups = Groups(config.groups, members)
    segment_of = {message: segment.id for segment in segments for message in segment.messages}
    start = 0
    for batch in batches:
        rows, start = found[start : start + len(batch)], start + len(batch)
        before = len(entries)
        vectors, touched = consolidate(entries, vectors, batch, rows, segment_of, extractor, encoder, config)
        changed |= touched
        if groups is not None and len(entries) > before:
            groups.add(range(before, len(entries)), vectors)
    named = extractor.name_anchors(entries, changed)
    entries = [replace(entry, anchors=anchors) for entry, anchors in zip(entries, named, strict=True)]
    return MemoryGraph(
        conversation,
        segments,
        entries,
        vectors,
        encoder,
        config,
        {group: tuple(entries[p].id for p in members) for group, members in groups.members.items()} if groups else {},
        build_digest(conversation, config, encoder.name),
    )


def build_digest(conversation: Conversation, config: BuildConfig, encoder: str) -> str:
    """Return a digest of everything that a built memory depends on."""
    said = (conversation.id, conversation.messages, conversation.notes, sorted(conversation.breaks))
    text = repr((said, sorted(asdict(config).items()), encoder))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def consolidate(
    entries: list[Entry],
    vectors: FloatArray,
    batch: Sequence[Candidate],
    rows: FloatArray,
    segment_of: dict[str, str],
    extractor: Extractor,
    encoder: Encoder,
    config: BuildConfig,
) -> tuple[FloatArray, set[str]]:
    """Create or update an entry for each candidate of one segment (Memora eq. 2-5); `entries` grows in place.

    A candidate is compared with the entries that were there before its segment, k nearest, those above γ.

    Args:
        entries: So far.
        vectors: Their abstractions' vectors, (n, d).
        batch: The candidates.
        rows: Their vectors, (len(batch), d).
        segment_of: Message id -> segment id.
        extractor: Chooses the entry to update.
        encoder: For refined abstractions.
        config: γ and k.

    Returns:
        The vectors of all entries afterwards, and the ids of those created or updated.
    """
    similarity = rows @ vectors.T if len(vectors) else np.zeros((len(batch), 0))
    near = [
        [entries[i] for i in np.argsort(-row, kind="stable")[: config.update_candidates]
         if row[i] >= config.update_threshold]
        for row in similarity
    ]  # fmt: skip
    chosen: dict[int, Update | None] = dict.fromkeys(range(len(batch)))
    asked = [i for i in range(len(batch)) if near[i]]
    chosen |= dict(zip(asked, extractor.choose([(batch[i], near[i]) for i in asked]), strict=True))
    places = {entry.id: place for place, entry in enumerate(entries)}
    changed, created = set(), []
    for number, candidate in enumerate(batch):
        update = chosen[number]
        if update is None:
            segments = _segments(candidate.statements, segment_of)
            entries.append(Entry(f"e{len(entries)}", candidate.abstraction, candidate.statements, segments))
            created.append(rows[number])
            changed.add(entries[-1].id)
            continue
        place = places[update.entry]
        entries[place] = _updated(entries[place], candidate, update, segment_of)
        changed.add(update.entry)
        if update.abstraction:
            vectors = vectors.copy()  # the graph this one grew from may share it
            vectors[place] = encoder.encode([update.abstraction])[0]
    return np.concatenate([vectors, np.stack(created)]) if created else vectors, changed


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
    return replace(
        entry,
        abstraction=update.abstraction or entry.abstraction,
        statements=statements,
        segments=_segments(statements, segment_of),
    )


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

    def extract(
        self, conversation: Conversation, segments: Sequence[Segment], fresh: Collection[str]
    ) -> tuple[list[Segment], list[list[Candidate]]]:
        """Return each segment's candidates in order of their first message."""
        messages = {message.id: message for message in conversation.messages}
        order = {message: place for place, message in enumerate(messages)}
        notes = (
            [n for n in conversation.notes if n.text.strip() and set(fresh) & set(n.sources)]
            if self.config.notes
            else []
        )
        cited = {source for note in notes for source in note.sources}
        found: dict[str, list[Candidate]] = {}
        for note in notes:
            sources = sorted(set(note.sources), key=order.__getitem__)
            candidate = Candidate(note.text.strip(), tuple(say(messages[source]) for source in sources))
            found.setdefault(sources[0], []).append(candidate)
        batches = []
        for segment in segments:
            if self.config.unit == "segment":
                said = tuple(say(messages[id_]) for id_ in segment.messages if id_ in fresh)
                whole = "\n".join(statement.line for statement in said)
                batches.append([Candidate(self._cut(whole), said)] if said else [])
                continue
            batch = []
            for id_ in segment.messages:
                batch += found.get(id_, [])
                if id_ in fresh and id_ not in cited:
                    batch.append(self.candidate(messages[id_]))
            batches.append(batch)
        return list(segments), batches

    def candidate(self, message: Message) -> Candidate:
        """Return a message as a candidate of its own."""
        return Candidate(f"{message.speaker}: {self._cut(message.text)}", (say(message),))

    def _cut(self, text: str) -> str:
        return (
            " ".join(text.split()[: self.config.abstraction_words or None]) if self.config.abstraction_words else text
        )

    def choose(self, asked: Sequence[tuple[Candidate, Sequence[Entry]]]) -> list[Update | None]:
        """Take the most similar entry of the same speaker: the same words about somebody else are another fact."""
        choices: list[Update | None] = []
        for candidate, near in asked:
            same = [entry for entry in near if entry.speaker == candidate.statements[0].speaker]
            choices.append(Update(same[0].id) if same else None)
        return choices

    def name_anchors(self, entries: Sequence[Entry], changed: Collection[str]) -> list[tuple[str, ...]]:
        """Name "main entity + key aspect", here the speaker and a word that few of his entries share.

        Only anchors that join at least two entries are kept: an anchor with one entry is no link.
        """
        aspects = [_aspects(entry) for entry in entries]
        carriers = Counter(
            (entry.speaker, word) for entry, words in zip(entries, aspects, strict=True) for word in words
        )
        limit = max(2, len(entries) // 50)  # a word in more entries than this says little about any of them
        result = []
        for entry, words in zip(entries, aspects, strict=True):
            shared = [word for word in words if 2 <= carriers[entry.speaker, word] <= limit]
            shared.sort(key=lambda word: (carriers[entry.speaker, word], word))
            result.append(tuple(f"{entry.speaker} {word}" for word in shared[: self.config.anchors_per_entry]))
        return result


def _aspects(entry: Entry) -> set[str]:
    words = {_stem(word) for word in re.findall(r"[^\W\d_]{4,}", f"{entry.abstraction}\n{entry.value}".lower())}
    return words - set(ENGLISH_STOP_WORDS) - {entry.speaker.lower()} - {month.lower() for month in MONTHS}


def _stem(word: str) -> str:
    """Cut a plural: enough to join `camps` with `camp`, without a stemmer's surprises in a shown text."""
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 4 else word
