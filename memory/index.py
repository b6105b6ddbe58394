"""Hybrid search over entries: dense on abstractions and anchors, BM25 on abstraction and value, fused by ranks."""

import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import bm25s
import faiss
import numpy as np
import numpy.typing as npt
from nltk.stem import PorterStemmer

from cuewalk.memory.encoder import FloatArray

RRF_K = 5
"""The constant of reciprocal rank fusion (Cormack et al. 2009), who take 60 for rankings of thousands; among the few
hundred entries of a memory that makes the first places nearly equal (chosen on validation conversations)."""

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG, whatever the user's logging says

_stem = lru_cache(maxsize=100_000)(PorterStemmer().stem)


def fuse_ranks(rankings: Sequence[Sequence[int]], weights: Sequence[float]) -> list[tuple[int, float]]:
    """Fuse rankings by weighted reciprocal rank: score(x) = sum_r w_r / (5 + rank_r(x)), ranks from 1.

    Returns:
        (item, score), best first; ties keep the order of first appearance.
    """
    scores: dict[int, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, item in enumerate(ranking, start=1):
            scores[item] = scores.get(item, 0.0) + weight / (RRF_K + rank)
    return sorted(scores.items(), key=lambda pair: -pair[1])


def best(scores: npt.NDArray[np.floating], count: int) -> list[int]:
    """Return the positions of the highest scores, best first; of equal ones the first comes first."""
    kept = np.arange(len(scores))
    if 0 < count < len(scores):  # a sort of all of them is slow in a large memory
        kept = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    order: list[int] = kept[np.argsort(-scores[kept], kind="stable")][:count].tolist()
    return order


class HybridIndex:
    """Search over n items, positions 0..n-1, of which there are vectors (n, d) and texts.

    Anchors have vectors too, (m, d), and the positions that carry each. The weights are of the three rankings
    (abstractions, anchors, BM25) in the fusion, 0 leaves one out; `depth` is how far down each it looks. `factory` is
    FAISS's name for the index of the abstractions (`Flat` is exact; a ValueError if FAISS knows none of that name);
    one that takes long to build is kept in `folder`, by the content of its vectors.
    """

    def __init__(
        self,
        vectors: FloatArray,
        texts: Sequence[str],
        anchor_vectors: FloatArray,
        anchor_items: Sequence[Sequence[int]],
        weights: tuple[float, float, float],
        depth: int = 200,
        factory: str = "Flat",
        folder: Path | None = None,
    ) -> None:
        self._weights = weights
        self._vectors = vectors
        self._depth = min(depth, len(texts))
        self._anchor_items = anchor_items
        self._dense = _kept(vectors, factory, folder) if folder and factory != "Flat" else _index(vectors, factory)
        self._anchors = _index(anchor_vectors, "Flat")
        self._bm25 = bm25s.BM25(k1=0.9, b=0.4)  # for short passages, as Anserini sets them
        self._vocabulary: dict[str, int] = {}
        tokens = _stems(texts)
        if any(tokens):  # bm25s can't index a corpus without a single word
            self._bm25.index(tokens, show_progress=False)
            self._vocabulary = self._bm25.vocab_dict

    def search(self, text: str, vector: FloatArray, allowed: Sequence[int] | None = None) -> list[tuple[int, float]]:
        """Rank items for one query given as text and as unit vector (d,); at most `depth` a ranking are fused.

        Where `allowed` is given, only these items are ranked, and each of them exactly.
        """
        if allowed is None:
            near = self.near(vector, self._depth)
            rankings = [near, self._by_anchor(vector), self._by_words(text)[: self._depth]]
            return fuse_ranks(rankings, self._weights)
        inside = set(allowed)
        dense = [allowed[i] for i in best(self._vectors[list(allowed)] @ vector, len(allowed))]
        others = [[i for i in ranking if i in inside] for ranking in (self._by_anchor(vector), self._by_words(text))]
        return fuse_ranks([dense, *others], self._weights)

    def near(self, vector: FloatArray, count: int) -> list[int]:
        """Return the items whose vectors are nearest to this one (d,), by the dense index alone."""
        found: list[int] = self._dense.search(vector[None], count)[1][0].tolist()
        return [item for item in found if item >= 0]  # FAISS fills up with -1

    def _by_anchor(self, vector: FloatArray) -> list[int]:
        if not self._weights[1] or not self._anchors.ntotal:
            return []
        nearest = self._anchors.search(vector[None], min(10, self._anchors.ntotal))[1][0]
        return list(dict.fromkeys(item for anchor in nearest for item in self._anchor_items[anchor]))

    def _by_words(self, text: str) -> list[int]:
        known = [word for word in _stems([text])[0] if word in self._vocabulary] if self._weights[2] else []
        scores = self._bm25.get_scores(known) if known else np.zeros(0)
        return best(scores, int((scores > 0).sum()))


def _stems(texts: Sequence[str]) -> Any:
    """Return each text's words without stop words, as stems: what was "adopted" is found by "adopting"."""
    stemmer = lambda words: [_stem(word) for word in words]  # noqa: E731
    return bm25s.tokenize(list(texts), stopwords="en", show_progress=False, return_ids=False, stemmer=stemmer)


def _kept(vectors: FloatArray, factory: str, folder: Path) -> Any:
    """Read an index from its folder, or build it and write it there; indexes of other vectors are removed."""
    digest = hashlib.sha256(factory.encode() + vectors.tobytes()).hexdigest()[:16]
    path = folder / f"abstractions-{digest}.faiss"
    try:
        return faiss.read_index(str(path))
    except RuntimeError:  # not there, or damaged
        index = _index(vectors, factory)
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        faiss.write_index(index, str(partial))
        partial.replace(path)  # whole or not at all
        for stale in set(folder.glob("abstractions-*.faiss")) - {path}:
            stale.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # the disk is full, or not ours to write
        logging.getLogger(__name__).warning("the index is not kept, and built again next time: %s", error)
        partial.unlink(missing_ok=True)
    return index


def _index(vectors: FloatArray, factory: str) -> Any:
    try:
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(f"memory.index = {factory!r} is no FAISS factory string, such as Flat or HNSW32") from error
    if len(vectors):
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
        if not index.is_trained:
            index.train(rows)
        index.add(rows)
    return index
