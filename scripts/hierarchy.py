"""xMemory's stage I: a backbone of entries, chosen to be relevant and to cover."""

import numpy as np
import numpy.typing as npt

from cuewalk.memory.encoder import FloatArray
from cuewalk.memory.graph import Link, MemoryGraph
from cuewalk.memory.groups import neighbours
from cuewalk.memory.index import best

POOL, GROUPS = 10, 5
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
