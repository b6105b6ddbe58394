"""xMemory's stage II: a context grows while that makes a reader surer of its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from cuewalk.memory import MemoryGraph, Segment
from cuewalk.memory.reader import LocalReader
from cuewalk.memory.records import say


@dataclass(frozen=True, slots=True)
class Expansion:
    """What stage II decided."""

    text: str  #: The context as the reader read it.
    segments: tuple[str, ...]  #: Segments whose episodic memory was added, in order.
    raw: tuple[str, ...]  #: Those whose messages were added too.
    uncertainty: tuple[float, ...]  #: U before anything was added, and after each thing that was (falling).
    tokens: int  #: That went through the reader, probes included.


def expand_while_surer(
    graph: MemoryGraph, query: str, entries: Sequence[str], reader: LocalReader, probes: int = 10, patience: int = 3
) -> Expansion:
    """Add segments, then their messages, only where that lowers the reader's uncertainty (xMemory section 5, stage II).

    The context starts as the entries' values. Their segments are tried by similarity to the query and the support of
    the entries chosen: the summary first, and where it helped the messages not shown yet. Each is compared with the
    context as it has grown (ΔU > 0), not with the bare entries, which are from stage I or any search. At most `probes`
    segments are tried; it ends after `patience` in a row that did not help.
    """
    before = reader.tokens
    vector = graph.encoder.encode([query])[0]
    ask = f"\nQuestion: {query}\nShort answer:"
    values = "\n".join(graph.entries[entry].value for entry in entries)
    context = reader.read(f"Memories:\n{values}\n")
    trace = [reader.uncertainty(context, ask)]
    shown = {source for entry in entries for source in graph.entries[entry].sources}
    support: dict[str, float] = {}
    for entry in entries:
        for id_ in graph.entries[entry].segments:
            support[id_] = max(support.get(id_, -1.0), graph.score(vector, entry))
    similarity = {id_: max(graph.score(vector, entry) for entry in graph.by_segment[id_]) for id_ in support}
    ranked = sorted(support, key=lambda id_: -(similarity[id_] + 0.5 * support[id_]))[:probes]
    taken: list[str] = []
    raw: list[str] = []
    failures = 0

    def helps(text: str) -> bool:
        now = reader.uncertainty(context, text + ask)
        if now >= trace[-1]:
            return False
        reader.extend(context, text)
        trace.append(now)
        return True

    for id_ in ranked:
        if failures == patience:
            break
        if not helps(segment_summary(graph, graph.segment_by_id[id_]) + "\n"):
            failures += 1
            continue
        failures = 0
        taken.append(id_)
        new = [message for message in graph.segment_by_id[id_].messages if message not in shown]
        if new and helps("\n".join(say(graph.messages[message]).line for message in new) + "\n"):
            raw.append(id_)
            shown |= set(new)
    return Expansion(context.text, tuple(taken), tuple(raw), tuple(trace), reader.tokens - before)


def segment_summary(graph: MemoryGraph, segment: Segment) -> str:
    """Return a segment's extracted episodic memory; offline, where there is none, its entries' abstractions."""
    return segment.summary or "; ".join(graph.entries[entry].abstraction for entry in graph.by_segment[segment.id])
