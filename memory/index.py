"""Hybrid search over entries: dense on abstractions and anchors, BM25 on abstraction and value, fused by ranks."""

from collections.abc import Sequence
from typing import Any

import bm25s
import faiss
import numpy as np

from cuewalk.memory.encoder import FloatArray

RRF_K = 60
"""The constant of reciprocal rank fusion (Cormack et al. 2009; Memora's code uses it too)."""


def fuse_ranks(rankings: Sequence[Sequence[int]], weights: Sequence[float]) -> list[tuple[int, float]]:
    """Fuse rankings by weighted reciprocal rank: score(x) = sum_r w_r / (60 + rank_r(x)), ranks from 1.

    Returns:
        (item, score), best first; ties keep the order of first appearance.
    """
    scores: dict[int, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, item in enumerate(ranking, start=1):
            scores[item] = scores.get(item, 0.0) + weight / (RRF_K + rank)
    return sorted(scores.items(), key=lambda pair: -pair[1])


class HybridIndex:
    """Flat and exact. Items are positions 0..n-1.

    Args:
        vectors: Unit vectors of the abstractions, (n, d).
        texts: n texts for BM25.
        anchor_vectors: Unit vectors of the anchors, (m, d).
        anchor_items: For each anchor the positions that carry it.
        weights: Of the three rankings (abstractions, anchors, BM25) in the fusion; 0 leaves one out.
        depth: How far down each ranking the fusion looks.
    """

    def __init__(
        self,
        vectors: FloatArray,
        texts: Sequence[str],
        anchor_vectors: FloatArray,
        anchor_items: Sequence[Sequence[int]],
        weights: tuple[float, float, float],
        depth: int = 200,
    ) -> None:
        self._weights = weights
        self._depth = min(depth, len(texts))
        self._anchor_items = anchor_items
        self._dense = _flat(vectors)
        self._anchors = _flat(anchor_vectors)
        self._vocabulary: dict[str, int] | None = None
        tokens = bm25s.tokenize(list(texts), stopwords="en", show_progress=False, return_ids=False)
        if any(tokens):  # bm25s can't index a corpus without a single word
            self._bm25 = bm25s.BM25()
            self._bm25.index(tokens, show_progress=False)
            self._vocabulary = self._bm25.vocab_dict

    def search(self, text: str, vector: FloatArray) -> list[tuple[int, float]]:
        """Rank items for one query given as text and as unit vector (d,); at most `depth` a ranking are fused."""
        dense = self._dense.search(vector[None], self._depth)[1][0].tolist()
        rankings = [dense, self._by_anchor(vector), self._by_words(text)]
        return fuse_ranks(rankings, self._weights)

    def _by_anchor(self, vector: FloatArray) -> list[int]:
        if not self._weights[1] or not self._anchors.ntotal:
            return []
        nearest = self._anchors.search(vector[None], min(10, self._anchors.ntotal))[1][0]
        return list(dict.fromkeys(item for anchor in nearest for item in self._anchor_items[anchor]))

    def _by_words(self, text: str) -> list[int]:
        if not self._weights[2] or self._vocabulary is None:
            return []
        words: Any = bm25s.tokenize([text], stopwords="en", show_progress=False, return_ids=False)[0]
        known = [word for word in words if word in self._vocabulary]
        if not known:
            return []
        scores = self._bm25.get_scores(known)
        order = np.argsort(-scores, kind="stable")[: self._depth]
        return [int(item) for item in order if scores[item] > 0]


def _flat(vectors: FloatArray) -> Any:
    index = faiss.IndexFlatIP(vectors.shape[1] if vectors.ndim == 2 and vectors.shape[1] else 1)
    if len(vectors):
        index.add(np.ascontiguousarray(vectors, dtype=np.float32))
    return index
