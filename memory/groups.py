"""xMemory's groups: entries of one theme, kept in shape by an objective while the memory grows (section 3 and 4)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

from cuewalk.memory.encoder import FloatArray

EPS = 1e-8


@dataclass(frozen=True)
class GroupConfig:
    """How groups grow. The paper states the cap; the other values are chosen for MiniLM (docs/results/memory.md).

    Attributes:
        cap: Entries a group at most (the paper's 12).
        attach: A new entry joins the nearest group if its cosine with the centroid is at least this, else it opens one.
        coherence: A group whose mean pairwise cosine is below this may be split.
        small: A group of at most so many entries may be merged, and so may an isolated one, which no other group has
            among its nearest.
        merge: Groups are merged only if their centroids' cosine is at least this.
        nearest: Neighbouring groups a group looks at, and the context in which a move is scored.
        split: Whether groups are split (over the cap they always are).
        join: Whether groups are merged.
    """

    cap: int = 12
    attach: float = 0.7
    coherence: float = 0.35
    small: int = 2
    merge: float = 0.5
    nearest: int = 10
    split: bool = True
    join: bool = True

    def __post_init__(self) -> None:
        for name in ("cap", "small", "nearest"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory.groups.{name} = {getattr(self, name)}: must be at least 1")


def objective(centroids: FloatArray, sizes: Sequence[int]) -> float:
    """Return f = SparsityScore + SemScore of a partition (xMemory eq. 1-3).

    SparsityScore = N² / (K Σ n_k²), in (1/K, 1]; SemScore = mean over groups of cohesion · g(s). A group's cohesion is
    the mean cosine of its members with their centroid; for unit vectors that is the centroid's length. g is the bell
    around the median of s, the cosine with the nearest other centroid, as wide as its median absolute deviation.
    One group: s = 0, so g = 1. Three always: the nearest pair shares s, the deviation's median is 0, and the third's
    term vanishes.

    Args:
        centroids: Means of the members' unit vectors, (K, d).
        sizes: Members of each group, (K,).
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
    merged group keeps the id of its larger half.

    Args:
        config: The rules.
        members: Group id -> positions, where groups exist already.
    """

    def __init__(self, config: GroupConfig, members: Mapping[str, Sequence[int]] | None = None) -> None:
        self.config = config
        self.members = {group: list(positions) for group, positions in (members or {}).items()}
        self.reassigned: set[int] = set()
        """Positions whose group changed after the batch that brought them (the paper's reassignment ratio)."""
        self._made = 1 + max((int(group[1:]) for group in self.members), default=-1)
        self._centroids: dict[str, FloatArray] = {}

    def add(self, positions: Iterable[int], vectors: FloatArray) -> None:
        """Take in one batch of new positions: attach each, then split and merge what that touched.

        Args:
            positions: New rows of `vectors`.
            vectors: Unit vectors of all entries, (n, d).
        """
        known = {p: group for group, members in self.members.items() for p in members}
        touched = dict.fromkeys(self._attach(position, vectors) for position in positions)
        self._centroids = {group: self._mean(group, vectors) for group in self.members}
        for group in [g for g in touched if self._may_split(g)]:
            touched |= dict.fromkeys(self._split(group, vectors))
        if self.config.join:
            self._merge(touched, vectors)
        now = {p: group for group, members in self.members.items() for p in members}
        self.reassigned |= {p for p, group in known.items() if now[p] != group}

    def centroids(self, vectors: FloatArray) -> tuple[list[str], FloatArray]:
        """Return the group ids, and the means of their members' vectors, (K, d)."""
        return list(self.members), np.stack([self._mean(group, vectors) for group in self.members])

    def _mean(self, group: str, vectors: FloatArray) -> FloatArray:
        mean: FloatArray = vectors[self.members[group]].mean(axis=0)
        return mean

    def _new(self, positions: list[int]) -> str:
        group = f"g{self._made}"
        self._made += 1
        self.members[group] = positions
        return group

    def _attach(self, position: int, vectors: FloatArray) -> str:
        best, similarity = "", -np.inf
        if self._centroids:
            ids, matrix = list(self._centroids), np.stack(list(self._centroids.values()))
            cosine = matrix @ vectors[position] / np.maximum(np.linalg.norm(matrix, axis=1), EPS)
            best, similarity = ids[int(cosine.argmax())], float(cosine.max())
        if similarity >= self.config.attach:
            self.members[best].append(position)
        else:
            best = self._new([position])
        self._centroids[best] = self._mean(best, vectors)
        return best

    def _may_split(self, group: str) -> bool:
        size = len(self.members[group])
        if size > self.config.cap or not self.config.split or size < 4:
            return size > self.config.cap
        length = float(np.linalg.norm(self._centroids[group]))
        return (size * length**2 - 1) / (size - 1) < self.config.coherence  # the mean pairwise cosine

    def _split(self, group: str, vectors: FloatArray) -> list[str]:
        """Split a group the way that f likes best, if it likes it better than no split (over the cap: in any case)."""
        members = self.members[group]
        around = [g for g in self._near(group) if g != group]
        best: list[list[int]] = [members]
        highest = self._score(around, [members], vectors) if len(members) <= self.config.cap else -np.inf
        for parts in _partitions(members, vectors, self.config.cap):
            score = self._score(around, parts, vectors)
            if score > highest + EPS:
                best, highest = parts, score
        best.sort(key=lambda part: (-len(part), part[0]))
        self.members[group] = best[0]
        made = [group, *(self._new(part) for part in best[1:])]
        for id_ in made:
            self._centroids[id_] = self._mean(id_, vectors)
        return made

    def _merge(self, touched: Iterable[str], vectors: FloatArray) -> None:
        """Merge small or isolated groups near what was touched, each time the pair that f gains most by."""
        waiting = {near for group in touched for near in self._near(group)}
        while waiting:
            best: tuple[float, str, str] | None = None
            for group in sorted(waiting, key=lambda g: int(g[1:])):
                if len(self.members[group]) > self.config.small and not self._isolated(group):
                    continue
                for other, cosine in self._nearest(group)[:5]:
                    if cosine < self.config.merge or len(self.members[group] + self.members[other]) > self.config.cap:
                        continue
                    around = [g for g in {**self._near(group), **self._near(other)} if g not in (group, other)]
                    together = [self.members[group] + self.members[other]]
                    gain = self._score(around, together, vectors)
                    gain -= self._score(around, [self.members[group], self.members[other]], vectors)
                    if gain > EPS and (best is None or gain > best[0]):
                        best = (gain, group, other)
            if best is None:
                return
            _, group, other = best
            keep, gone = sorted((group, other), key=lambda g: (-len(self.members[g]), self.members[g][0]))
            self.members[keep] = sorted(self.members[keep] + self.members.pop(gone))
            del self._centroids[gone]
            self._centroids[keep] = self._mean(keep, vectors)
            waiting = set(self._near(keep))

    def _score(self, around: Sequence[str], parts: Sequence[list[int]], vectors: FloatArray) -> float:
        """Return f of some groups as they are, together with these parts."""
        centroids = [self._centroids[group] for group in around] + [vectors[part].mean(axis=0) for part in parts]
        sizes = [len(self.members[group]) for group in around] + [len(part) for part in parts]
        return objective(np.stack(centroids), sizes)

    def _nearest(self, group: str) -> list[tuple[str, float]]:
        ids = list(self._centroids)
        matrix = np.stack(list(self._centroids.values()))
        length = np.maximum(np.linalg.norm(matrix, axis=1), EPS)
        own = self._centroids[group]
        cosine = matrix @ own / (length * max(float(np.linalg.norm(own)), EPS))
        order = [int(i) for i in np.argsort(-cosine, kind="stable") if ids[i] != group][: self.config.nearest]
        return [(ids[i], float(cosine[i])) for i in order]

    def _near(self, group: str) -> dict[str, None]:
        return dict.fromkeys([group, *(other for other, _ in self._nearest(group))])

    def _isolated(self, group: str) -> bool:
        """Tell whether none of a group's nearest has it among its own nearest."""
        return all(group not in self._near(other) for other, _ in self._nearest(group))


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
    """Return each group's neighbours: its `count` nearest with a positive cosine, and those it is among the nearest of.

    Args:
        centroids: (K, d).
        count: k of the kNN.
    """
    unit = centroids / np.maximum(np.linalg.norm(centroids, axis=1), EPS)[:, None]
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -np.inf)
    near: list[set[int]] = [set() for _ in range(len(unit))]
    for group, row in enumerate(cosine):
        for other in np.argsort(-row, kind="stable")[:count]:
            if row[other] > 0:
                near[group].add(int(other))
                near[int(other)].add(group)
    return [sorted(others, key=lambda o: -cosine[group, o]) for group, others in enumerate(near)]
