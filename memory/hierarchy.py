"""xMemory's retrieval: a backbone chosen to cover (stage I), expanded while the reader grows surer (stage II)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuewalk.memory.encoder import FloatArray
from cuewalk.memory.graph import Link, MemoryGraph
from cuewalk.memory.groups import neighbours
from cuewalk.memory.index import best
from cuewalk.memory.reader import LocalReader
from cuewalk.memory.records import Segment, say

POOL = 10
GROUPS = 5
"""Nearest groups that open the pool, and groups chosen from it (the released code's budget)."""


def select_backbone(graph: MemoryGraph, query: str, k: int, share: float = 0.5) -> list[Link]:
    """Choose entries by stage I (xMemory eq. 4-5): groups near the query and their neighbours, then their entries.

    Each level is chosen greedily by coverage and relevance, and ends when everything is covered: fewer than k entries
    may come back. `share` is that of coverage: .5 is eq. 5, .7 the released code. A ValueError without groups or k < 1.
    """
    if not graph.groups or k < 1:
        raise ValueError(f"stage I needs groups and k >= 1 (k = {k}); build with memory.groups, or use search")
    vector = graph.encoder.encode([query])[0]
    ids = list(graph.groups)
    length = np.maximum(np.linalg.norm(graph.centroids, axis=1), 1e-8)
    relevance = graph.centroids @ vector / length
    nearest = [ids[i] for i in best(relevance, POOL)]
    pool = list(dict.fromkeys([*nearest, *(near for group in nearest for near in graph.near_groups[group])]))
    rows = np.array([ids.index(group) for group in pool])
    chosen = cover(relevance[rows], _weights(graph.centroids[rows], graph), GROUPS, share)
    candidates = [entry for i in chosen for entry in graph.groups[pool[i]]]
    vectors = graph.vectors[[graph.order[entry] for entry in candidates]]
    picked = cover(vectors @ vector, _weights(vectors, graph), k, share)
    return [Link(candidates[i], "group", float(vectors[i] @ vector)) for i in picked]


def cover(
    relevance: npt.NDArray[np.floating], weights: npt.NDArray[np.floating], budget: int, share: float = 0.5
) -> list[int]:
    """Choose items greedily: argmax_i share · Σ_{u ∈ Δ(i;R)} w_iu / Z + (1 - share) · s̃_i (xMemory eq. 5).

    Δ(i;R) is what i would newly cover, itself included; w, (n, n), is 0 where there is no edge and 1 on the diagonal; Z
    is the sum of all weights; s̃ the relevance, (n,), min-max normalised (all equal: .5). Ends when all is covered or at
    the budget; ties go to the more relevant. Returns positions in order of choice.
    """
    low, spread = float(relevance.min()), float(np.ptp(relevance))
    normal = (relevance - low) / spread if spread > 0 else np.full(len(relevance), 0.5)
    total = float(weights.sum())
    order = np.array(best(relevance, len(relevance)))
    uncovered = np.ones(len(relevance), dtype=bool)
    chosen: list[int] = []
    while uncovered.any() and len(chosen) < min(budget, len(relevance)):
        gain = share * (weights @ uncovered) / total + (1 - share) * normal
        gain[chosen] = -np.inf
        chosen.append(int(order[np.argmax(gain[order])]))
        uncovered &= weights[chosen[-1]] <= 0
    return chosen


def _weights(vectors: FloatArray, graph: MemoryGraph) -> npt.NDArray[np.floating]:
    """Return kNN edges weighted by cosine, 1 from each item to itself, (n, n)."""
    assert graph.config.groups is not None
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-8)
    weights = np.eye(len(vectors))
    for i, near in enumerate(neighbours(vectors, graph.config.groups.nearest)):
        weights[i, near] = unit[near] @ unit[i]
    return weights


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
