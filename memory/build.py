"""From messages to a memory graph, offline: with nothing but the encoder."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from cuewalk.memory.encoder import Encoder, FloatArray
from cuewalk.memory.graph import MemoryGraph
from cuewalk.memory.records import MONTHS, Conversation, Entry, Message, Segment


@dataclass(frozen=True)
class BuildConfig:
    """How a memory is built.

    Attributes:
        notes: Use the notes that came with the data as abstractions. Users have none: report both ways.
        segment_messages: A segment ends after so many messages,
        gap_minutes: or where the next message comes later than this.
        abstraction_words: Without a note, an abstraction is the message's first words, this many.
        update_threshold: γ (Memora eq. 3): an abstraction at least this similar updates its entry. 1.01 turns
            updating off (Memora's ablation).
        update_candidates: k (Memora eq. 2): how many nearest entries are considered.
        anchors_per_entry: At most so many cue anchors an entry.
        nearest: `similar` links an entry.
        search_weights: Of abstractions, anchors and BM25 in the rank fusion.
    """

    notes: bool = True
    segment_messages: int = 6
    gap_minutes: int = 30
    abstraction_words: int = 24
    update_threshold: float = 0.85
    update_candidates: int = 5
    anchors_per_entry: int = 3
    nearest: int = 5
    search_weights: tuple[float, float, float] = (1.0, 0.0, 1.0)

    def __post_init__(self) -> None:
        for name in ("segment_messages", "gap_minutes", "abstraction_words", "update_candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory.{name} = {getattr(self, name)}: must be at least 1")
        if len(self.search_weights) != 3 or min(self.search_weights) < 0 or not self.search_weights[0]:
            raise ValueError(f"memory.search_weights = {self.search_weights}: three numbers >= 0, the first > 0")


def build_graph(
    conversation: Conversation, encoder: Encoder, config: BuildConfig | None = None, *, progress: bool = False
) -> MemoryGraph:
    """Build the memory of one conversation; every message ends in at least one entry.

    Segments, candidate (abstraction, sources) pairs, create-or-update by abstraction similarity, cue anchors.
    """
    config = config or BuildConfig()
    segments = cut_segments(conversation.messages, config)
    candidates = find_candidates(conversation, config)
    vectors = encoder.encode([abstraction for abstraction, _ in candidates], progress=progress)
    entries, kept = consolidate(conversation, segments, candidates, vectors, config)
    entries = attach_anchors(entries, config.anchors_per_entry)
    anchors = list(dict.fromkeys(anchor for entry in entries for anchor in entry.anchors))
    anchor_vectors = (
        encoder.encode(anchors, progress=progress)
        if anchors and config.search_weights[1]
        else np.zeros((len(anchors), vectors.shape[1]), dtype=np.float32)
    )
    return MemoryGraph(
        conversation,
        segments,
        entries,
        kept,
        anchor_vectors,
        encoder,
        weights=config.search_weights,
        nearest=config.nearest,
        digest=build_digest(conversation, config, encoder.name),
    )


def build_digest(conversation: Conversation, config: BuildConfig, encoder: str) -> str:
    """Return a digest of everything that a built memory depends on."""
    text = repr((conversation, sorted(asdict(config).items()), encoder))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def cut_segments(messages: Sequence[Message], config: BuildConfig) -> list[Segment]:
    """Cut messages into blocks at pauses and at `segment_messages`."""
    blocks: list[list[Message]] = []
    for message in messages:
        pause = blocks and message.time - blocks[-1][-1].time > timedelta(minutes=config.gap_minutes)
        if not blocks or pause or len(blocks[-1]) == config.segment_messages:
            blocks.append([])
        blocks[-1].append(message)
    return [Segment(f"s{i}", i, tuple(m.id for m in block)) for i, block in enumerate(blocks)]


def find_candidates(conversation: Conversation, config: BuildConfig) -> list[tuple[str, tuple[str, ...]]]:
    """Return (abstraction, sources) pairs in order of first source: the notes, and every message no note cites."""
    order = {message.id: position for position, message in enumerate(conversation.messages)}
    notes = [note for note in conversation.notes if note.sources and note.text.strip()] if config.notes else []
    cited = {source for note in notes for source in note.sources}
    found = [(note.text.strip(), tuple(sorted(set(note.sources), key=order.__getitem__))) for note in notes]
    for message in conversation.messages:
        if message.id not in cited:
            words = message.text.split()[: config.abstraction_words]
            found.append((f"{message.speaker}: {' '.join(words)}", (message.id,)))
    return sorted(found, key=lambda pair: order[pair[1][0]])


def consolidate(
    conversation: Conversation,
    segments: Sequence[Segment],
    candidates: Sequence[tuple[str, tuple[str, ...]]],
    vectors: FloatArray,
    config: BuildConfig,
) -> tuple[list[Entry], FloatArray]:
    """Create or update an entry for each candidate (Memora eq. 2-5).

    The offline selector J takes the most similar entry above γ among the nearest k, if the same person said
    it: the same words about somebody else are another fact. The entry keeps its abstraction (its identity)
    and unites sources and segments.

    Returns:
        The entries, and their abstractions' vectors, (n, d).
    """
    messages = {message.id: message for message in conversation.messages}
    order = {message: position for position, message in enumerate(messages)}
    segment_of = {message: segment.id for segment in segments for message in segment.messages}
    kept: list[int] = []  # the candidate whose abstraction each entry keeps
    sources: list[set[str]] = []
    for position, (_, cited) in enumerate(candidates):
        speaker = messages[cited[0]].speaker
        similarity = vectors[kept] @ vectors[position]
        near = np.argsort(-similarity, kind="stable")[: config.update_candidates]
        same = [
            int(i)
            for i in near
            if similarity[i] >= config.update_threshold and messages[candidates[kept[i]][1][0]].speaker == speaker
        ]
        if same:
            sources[same[0]] |= set(cited)
        else:
            kept.append(position)
            sources.append(set(cited))
    entries = []
    for number, (position, cited_by) in enumerate(zip(kept, sources, strict=True)):
        said = [messages[source] for source in sorted(cited_by, key=order.__getitem__)]
        entries.append(
            Entry(
                id=f"e{number}",
                abstraction=candidates[position][0],
                value="\n".join(format_message(message) for message in said),
                speaker=said[0].speaker,
                time=said[0].time,
                sources=tuple(message.id for message in said),
                segments=tuple(dict.fromkeys(segment_of[message.id] for message in said)),
                anchors=(),
            )
        )
    return entries, vectors[kept]


def format_message(message: Message) -> str:
    """Return a message as an entry's value shows it: `Ann (8 May 2023): text`."""
    return f"{message.speaker} ({format_date(message.time)}): {' '.join(message.text.split())}"


def format_date(time: datetime) -> str:
    """Return a day without depending on the locale: `8 May 2023`."""
    return f"{time.day} {MONTHS[time.month - 1]} {time.year}"


def attach_anchors(entries: Sequence[Entry], per_entry: int) -> list[Entry]:
    """Give each entry its cue anchors: "main entity + key aspect", here speaker + a word that few entries share.

    Only anchors that join at least two entries are kept: an anchor with one entry is no link.
    """
    aspects = [_aspects(entry) for entry in entries]
    carriers = Counter((entry.speaker, word) for entry, words in zip(entries, aspects, strict=True) for word in words)
    limit = max(2, len(entries) // 50)  # a word in more entries than this says little about any of them
    result = []
    for entry, words in zip(entries, aspects, strict=True):
        shared = [word for word in words if 2 <= carriers[entry.speaker, word] <= limit]
        shared.sort(key=lambda word: (carriers[entry.speaker, word], word))
        anchors = tuple(f"{entry.speaker} {word}" for word in shared[:per_entry])
        result.append(replace(entry, anchors=anchors))
    return result


def _aspects(entry: Entry) -> set[str]:
    words = {_stem(word) for word in re.findall(r"[^\W\d_]{4,}", f"{entry.abstraction}\n{entry.value}".lower())}
    return words - set(ENGLISH_STOP_WORDS) - {entry.speaker.lower()} - {month.lower() for month in MONTHS}


def _stem(word: str) -> str:
    """Cut a plural: enough to join `camps` with `camp`, without a stemmer's surprises in a shown text."""
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 4 else word
