"""What any retrieval system returns, blocks of context with the messages they show, and what is measured of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from cuewalk.env import Gold, Question, Trajectory
from cuewalk.env.records import words
from cuewalk.judges import JudgeError
from cuewalk.memory import MemoryGraph
from cuewalk.memory.records import Message, say
from cuewalk.scripts.measures import EQUAL_ENTRIES, EQUAL_TOKENS, Measures, measure_entries


@dataclass(frozen=True, slots=True)
class Piece:
    """What counts as one entry where systems are compared at equal entries: an entry, a message, or a sentence."""

    text: str
    sources: tuple[str, ...]  #: Ids of the messages whose text it shows, or whose citing sentence.
    entry: str | None = None  #: The entry that it is, if it is one.


@dataclass(frozen=True)
class Block:
    """A stretch of context as a reader sees it: an entry, a chunk, a segment."""

    pieces: tuple[Piece, ...]

    @cached_property
    def text(self) -> str:
        """Return what is shown."""
        return "\n".join(piece.text for piece in self.pieces)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Return the ids of the messages that are shown."""
        return tuple(dict.fromkeys(source for piece in self.pieces for source in piece.sources))


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What a system found for one question."""

    blocks: tuple[Block, ...]  #: The most useful first.
    inference_tokens: int = 0  #: That its own calls of language models took, prompts and replies.
    trajectory: Trajectory | None = None  #: The walk that led there, of a system that walks the environment.


Retrieve = Callable[[MemoryGraph, Question], Retrieved]
"""The one protocol of every system: a memory and a question -> what a reader is to read. It never sees gold."""


def entry_blocks(graph: MemoryGraph, entries: Iterable[str]) -> tuple[Block, ...]:
    """Return entries as blocks, each shown by its value."""
    found = (graph.entries[id_] for id_ in entries)
    return tuple(Block((Piece(entry.value, entry.sources, entry.id),)) for entry in found)


def message_block(messages: Iterable[Message]) -> Block:
    """Return messages word for word as one block, each a piece."""
    return Block(tuple(Piece(say(message).line, (message.id,)) for message in messages))


def measure_blocks(
    graph: MemoryGraph,
    question: Question,
    gold: Gold,
    found: Retrieved,
    count_tokens: Callable[[str], int],
    similarity: float,
) -> Measures:
    """Measure what a system found by the rules of `measure_entries`, whatever its blocks are made of.

    A message counts as found where a piece shows it. `recall_at_8` and `recall_at_300t` cut the pieces after 8 (300
    tokens) or top them up from the first search's ranking, without entries that are there or whose messages all stand
    there word for word. `blocks_to_cover` and `tokens_to_cover` are xMemory's: blocks and tokens, in order, until every
    content word of the answer was shown, None where that never happens (`answer_covered` 0) or the answer has none.
    `ndcg` and `redundancy` are of entries alone, else None; `similarity` is δ of the redundancy.

    A JudgeError if the question has no gold evidence.
    """
    wanted = set(gold.evidence)
    if not wanted:
        raise JudgeError("the question has no gold evidence; leave it out, or judge its answer")
    pieces = [piece for block in found.blocks for piece in block.pieces]
    given = {piece.entry for piece in pieces if piece.entry is not None}
    told = {source for piece in pieces if piece.entry is None for source in piece.sources}
    given |= {entry.id for entry in graph.entries.values() if told.issuperset(entry.sources)}
    hits = graph.search(question.text, 60, exclude=given)
    ranking = [*pieces, *(block.pieces[0] for block in entry_blocks(graph, [hit.entry for hit in hits]))]
    fitting = int(np.searchsorted(np.cumsum([count_tokens(p.text) for p in ranking]), EQUAL_TOKENS, side="right"))

    def recall(shown: Iterable[Piece]) -> float:
        return len(wanted & {source for piece in shown for source in piece.sources}) / len(wanted)

    whole, at_eight = recall(pieces), recall(ranking[:EQUAL_ENTRIES])
    tokens = [count_tokens(block.text) for block in found.blocks]
    measures: Measures = {
        "recall_at_8": at_eight,
        "recall_at_300t": recall(ranking[:fitting]),
        "evidence_recall": whole,
        "all_evidence": float(whole == 1.0),
        "precision": _share([not wanted.isdisjoint(piece.sources) for piece in pieces]),
        "ndcg": None,
        "redundancy": None,
        "entries": float(len(pieces)),
        "blocks": float(len(found.blocks)),
        "context_tokens": float(sum(tokens)),
        "inference_tokens": float(found.inference_tokens),
        "sources_per_entry": sum(len(piece.sources) for piece in pieces) / len(pieces) if pieces else None,
        f"recall_at_8_c{gold.category}": at_eight,
        **cover_answer([block.text for block in found.blocks], tokens, gold.answer),
    }
    entries = [piece.entry for piece in pieces if piece.entry is not None]
    if entries and len(entries) == len(pieces):
        measures |= measure_entries(graph, question, gold, entries, count_tokens, similarity)
    return measures


def cover_answer(texts: Sequence[str], tokens: Sequence[int], answer: str) -> Measures:
    """Return how soon the texts show every content word of an answer, and the share of them that all texts show."""
    wanted = words(answer) - set(ENGLISH_STOP_WORDS)
    measures: Measures = dict.fromkeys(("answer_words", "answer_covered", "blocks_to_cover", "tokens_to_cover"))
    if not wanted:
        return measures
    missing = set(wanted)
    for number, text in enumerate(texts, start=1):
        missing -= words(text)
        if not missing:
            measures |= {"blocks_to_cover": float(number), "tokens_to_cover": float(sum(tokens[:number]))}
            break
    return measures | {"answer_words": 1 - len(missing) / len(wanted), "answer_covered": float(not missing)}


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None
