"""xMemory's groups: entries of one theme, kept in shape by an objective while the memory grows (section 3 and 4)."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from scipy.cluster.hierarchy import fcluster, linkage

from cuewalk.memory.encoder import FloatArray
from cuewalk.memory.index import best

EPS = 1e-8


@dataclass(frozen=True)
class GroupConfig:
    """How groups grow. The paper states the cap; the other values are chosen for MiniLM (docs/results/memory.md)."""

    cap: PositiveInt = 12  #: Entries a group at most (the paper's 12).
    #: A new entry joins the nearest group if its cosine with the centroid is at least this, else it opens one.
    attach: float = 0.7
    coherence: float = 0.35  #: A group whose mean pairwise cosine is below this may be split.
    #: A group of at most so many entries may be merged, and so may one that no other has among its nearest.
    small: PositiveInt = 2
    merge: float = 0.5  #: Groups are merged only if their centroids' cosine is at least this.
    nearest: PositiveInt = 10  #: Neighbouring groups a group looks at, and the context in which a move is scored.
    split: bool = True  #: Whether groups are split (over the cap they always are).
    join: bool = True  #: Whether groups are merged.


def objective(centroids: FloatArray, sizes: Sequence[int]) -> float:
    """Return f = SparsityScore + SemScore of a partition (xMemory eq. 1-3).

    SparsityScore = N² / (K Σ n_k²), in (1/K, 1]; SemScore = mean over groups of cohesion · g(s). A group's cohesion is
    the mean cosine of its members with their centroid; for unit vectors that is the centroid's length. g is the bell
    around the median of s, the cosine with the nearest other centroid, as wide as its median absolute deviation.
    One group: s = 0, so g = 1. Three always: the nearest pair shares s, the deviation's median is 0, and the third's
    term vanishes. `centroids` are the means of the members' unit vectors, (K, d), `sizes` their numbers, (K,).
    """
    count = np.asarray(sizes, dtype=np.float64)
    if not len(count):
        return 0.0
    sparsity = float(count.sum() ** 2 / (len(count) * (count**2).sum()))
    cohesion = np.linalg.norm(centroids, axis=1)
    if len(count) == 1:
        return sparsity + float(cohesion[0])
    unit = centroids / np.maximum(cohesion, EPS)[:, None]
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -np.inf)
    nearest = cosine.max(axis=1)
    deviation = nearest - np.median(nearest)
    spread = float(np.median(np.abs(deviation))) + EPS
    return sparsity + float(np.mean(cohesion * np.exp(-(deviation**2) / (2 * spread**2))))


class Groups:
    """A partition of entry positions that grows by batches; nothing is ever lost from it.

    A group's id is stable: after a split the largest part keeps it (of equal ones that with the oldest member), a
    merged group keeps the id of its larger half. Where groups exist already, `members` says which positions each holds.
    """

    def __init__(self, config: GroupConfig, members: Mapping[str, Sequence[int]] | None = None) -> None:
        self.config = config
        self.members = {group: list(positions) for group, positions in (members or {}).items()}
        self.reassigned: set[int] = set()
        """Positions whose group changed after the batch that brought them (the paper's reassignment ratio)."""
        self._made = 1 + max((int(group[1:]) for group in self.members), default=-1)
        self._centroids: dict[str, FloatArray] = {}
        # What follows from the centroids, until one changes: all of them with their lengths, and who is near whom.
        self._matrix: tuple[FloatArray, FloatArray] | None = None
        self._near: dict[str, dict[str, float]] = {}

    def add(self, positions: Collection[int], vectors: FloatArray) -> None:
        """Take in one batch: attach each new position, then split and merge what that touched.

        `vectors` are the unit vectors of all entries, (n, d); positions are its new rows, and known ones that changed.
        """
        known = {p: group for group, members in self.members.items() for p in members}
        for group in (self.members.keys() - self._centroids.keys()) | {known[p] for p in positions if p in known}:
            self._set(group, self.members[group], vectors)
        touched = dict.fromkeys(self._attach(position, vectors) for position in positions if position not in known)
        for group in [g for g in touched if self._may_split(g)]:
            touched |= dict.fromkeys(self._split(group, vectors))
        if self.config.join:
            self._merge(touched, vectors)
        now = {p: group for group, members in self.members.items() for p in members}
        self.reassigned |= {p for p, group in known.items() if now[p] != group}

    def _set(self, group: str, members: list[int], vectors: FloatArray) -> None:
        self.members[group] = members
        self._centroids[group] = vectors[members].mean(axis=0)
        self._matrix = None
        self._near.clear()

    def _new(self, members: list[int], vectors: FloatArray) -> str:
        group = f"g{self._made}"
        self._made += 1
        self._set(group, members, vectors)
        return group

    def _cosines(self, vector: FloatArray) -> FloatArray:
        """Return the dot products of a vector with the centroids' directions, in order of `members`."""
        if self._matrix is None:
            matrix = np.stack([self._centroids[group] for group in self.members])
            self._matrix = matrix, np.maximum(np.linalg.norm(matrix, axis=1), EPS)
        cosines: FloatArray = self._matrix[0] @ vector / self._matrix[1]
        return cosines

    def _attach(self, position: int, vectors: FloatArray) -> str:
        if self.members:
            cosines = self._cosines(vectors[position])
            if cosines.max() >= self.config.attach:
                group = list(self.members)[cosines.argmax()]
                self._set(group, [*self.members[group], position], vectors)
                return group
        return self._new([position], vectors)

    def _may_split(self, group: str) -> bool:
        size = len(self.members[group])
        if size > self.config.cap or not self.config.split or size < 4:
            return size > self.config.cap
        length = float(np.linalg.norm(self._centroids[group]))
        return (size * length**2 - 1) / (size - 1) < self.config.coherence  # the mean pairwise cosine

    def _split(self, group: str, vectors: FloatArray) -> list[str]:
        """Split a group the way that f likes best, if it likes it better than no split (over the cap: in any case)."""
        members, around = self.members[group], list(self._nearest(group))
        chosen = [members]
        highest = self._score(around, chosen, vectors) if len(members) <= self.config.cap else -np.inf
        for parts in _partitions(members, vectors, self.config.cap):
            score = self._score(around, parts, vectors)
            if score > highest + EPS:
                chosen, highest = parts, score
        chosen.sort(key=lambda part: (-len(part), part[0]))
        self._set(group, chosen[0], vectors)
        return [group, *(self._new(part, vectors) for part in chosen[1:])]

    def _merge(self, touched: Iterable[str], vectors: FloatArray) -> None:
        """Merge small or isolated groups near what was touched, each time the pair that f gains most by."""
        waiting = {near for group in touched for near in (group, *self._nearest(group))}
        while waiting:
            pairs: dict[frozenset[str], tuple[str, str]] = {}
            for group in sorted(waiting, key=lambda g: int(g[1:])):
                size, near = len(self.members[group]), self._nearest(group)
                if size > self.config.small and any(group in self._nearest(other) for other in near):
                    continue  # neither small nor isolated
                for other in list(near)[:5]:
                    if near[other] >= self.config.merge and size + len(self.members[other]) <= self.config.cap:
                        pairs.setdefault(frozenset((group, other)), (group, other))
            gains = {pair: self._gain(*pair, vectors) for pair in pairs.values()}
            if max(gains.values(), default=0.0) <= EPS:
                return
            pair = max(gains, key=gains.__getitem__)
            keep, gone = sorted(pair, key=lambda g: (-len(self.members[g]), self.members[g][0]))
            del self._centroids[gone]
            self._set(keep, sorted(self.members[keep] + self.members.pop(gone)), vectors)
            waiting = {keep, *self._nearest(keep)}

    def _gain(self, group: str, other: str, vectors: FloatArray) -> float:
        """Return what f gains if two groups are merged."""
        around = [near for near in {**self._nearest(group), **self._nearest(other)} if near not in (group, other)]
        merged = self._score(around, [self.members[group] + self.members[other]], vectors)
        return merged - self._score([*around, group, other], [], vectors)

    def _score(self, around: Sequence[str], parts: Sequence[list[int]], vectors: FloatArray) -> float:
        """Return f of some groups as they are, together with these parts."""
        centroids = [*(self._centroids[group] for group in around), *(vectors[part].mean(axis=0) for part in parts)]
        return objective(np.stack(centroids), [*(len(self.members[group]) for group in around), *map(len, parts)])

    def _nearest(self, group: str) -> dict[str, float]:
        """Return the cosines with a group's neighbours, the nearest first."""
        if group not in self._near:
            own, ids = self._centroids[group], list(self.members)
            cosines = self._cosines(own) / max(float(np.linalg.norm(own)), EPS)
            cosines[ids.index(group)] = -np.inf
            count = min(self.config.nearest, len(ids) - 1)
            self._near[group] = {ids[i]: float(cosines[i]) for i in best(cosines, count)}
        return self._near[group]


def _partitions(members: list[int], vectors: FloatArray, cap: int) -> list[list[list[int]]]:
    """Return candidate splits: average linkage cut into 2 and 3 parts, and near equal parts along the main axis.

    Not more parts at once: f likes singletons best of all.
    """
    rows = vectors[members].astype(np.float64)
    tree = linkage(rows, "average")  # on unit vectors the distance follows the cosine
    found = [fcluster(tree, count, "maxclust") for count in (2, 3)]
    centred = rows - rows.mean(axis=0)
    order = np.argsort(centred @ np.linalg.svd(centred, full_matrices=False)[2][0], kind="stable")
    axis = np.empty(len(members), dtype=int)
    for part, places in enumerate(np.array_split(order, max(2, -(-len(members) // cap)))):
        axis[places] = part
    partitions = [
        [[members[i] for i in np.flatnonzero(labels == label)] for label in np.unique(labels)]
        for labels in (*found, axis)
    ]
    return [parts for parts in partitions if len(parts) > 1 and max(map(len, parts)) <= cap]


def neighbours(centroids: FloatArray, count: int) -> list[list[int]]:
    """Return each group's neighbours, nearest first, of centroids (K, d), by kNN in both directions.

    They are its `count` nearest with a positive cosine, and those that it is among the nearest of.
    """
    unit = centroids / np.maximum(np.linalg.norm(centroids, axis=1), EPS)[:, None]
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -np.inf)
    near: list[set[int]] = [set() for _ in range(len(unit))]
    for group, row in enumerate(cosine):
        for other in best(row, count):
            if row[other] > 0:
                near[group].add(other)
                near[other].add(group)
    return [sorted(others, key=lambda o: -cosine[group, o]) for group, others in enumerate(near)]
