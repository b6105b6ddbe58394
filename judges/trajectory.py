"""The trajectory judge: correctness, redundancy and cost, each by its name, combined by a preset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cuewalk.env.environment import Trajectory
from cuewalk.env.records import Gold
from cuewalk.env.state import Ending
from cuewalk.judges.evidence import evidence_recall
from cuewalk.memory import MemoryGraph

PRESETS = ("price", "paper")


@dataclass(frozen=True)
class JudgeConfig:
    """How a trajectory is scored.

    Attributes:
        preset: `price` (default) or `paper`.
        price: λ, what an added entry costs (`price`).
        redundancy_weight: ρ, of the redundancy among added entries (`price`).
        bad_penalty: Of a bad action (`price`).
        budget_penalty: Of an ending by budget against one by choice (`price`).
        similarity: δ, the cosine above which two entries say the same (eq. 16; not given in the paper).
        weights: w1, w2, w3 of correctness, redundancy and cost (`paper`, eq. 18; the released trainer's values).
    """

    preset: str = "price"
    price: float = 0.015
    redundancy_weight: float = 0.005
    bad_penalty: float = 0.05
    budget_penalty: float = 0.02
    similarity: float = 0.8
    weights: tuple[float, float, float] = (1.0, 0.4, 0.4)

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"judge.preset = {self.preset!r}; choose from {', '.join(PRESETS)}")
        if len(self.weights) != 3:
            raise ValueError(f"judge.weights = {self.weights}: three numbers, of correctness, redundancy and cost")
        for name in ("price", "redundancy_weight", "bad_penalty", "budget_penalty"):
            if getattr(self, name) < 0:
                raise ValueError(f"judge.{name} = {getattr(self, name)}: must not be negative")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says: the reward, its components by name, and the reason in words."""

    reward: float
    components: Mapping[str, float]
    reason: str


class TrajectoryJudge:
    """Score finished trajectories against gold. One function for training and evaluation.

    `price`, the paper's linear form on what the walk added:
        R = recall(W_T) - recall(W_0) - λ·entries added - ρ·redundancy of the added - .05·bad actions,
        and .02 less where the budget ended it. Stopping at once scores exactly 0.
    `paper` (Memora App. C, eq. 16-18, as printed):
        J = w1·Ground - w2·Redund - w3·Cost, with Ground = recall(W_T), Redund with i = j included, and
        Cost = what was spent.
    """

    def __init__(self, config: JudgeConfig | None = None) -> None:
        self.config = config or JudgeConfig()

    def score(self, trajectory: Trajectory, graph: MemoryGraph, gold: Gold) -> Verdict:
        """Return the verdict on one trajectory; a JudgeError if the question has no gold evidence."""
        config = self.config
        recall = evidence_recall(graph, trajectory.working, gold)
        if config.preset == "paper":
            ground, redundant, cost = config.weights
            repeated = redundancy(graph, trajectory.working, config.similarity, diagonal=True)
            paid = -cost * trajectory.cost
            components = {"correctness": ground * recall, "redundancy": -redundant * repeated, "cost": paid}
            reason = f"recall {recall:.2f}, redundancy {repeated:.2f}, cost {trajectory.cost}"
        else:
            gain = recall - evidence_recall(graph, trajectory.first, gold)
            added = len(trajectory.added)
            components = {
                "gain": gain,
                "price": -config.price * added,
                "redundancy": -config.redundancy_weight * redundancy(graph, trajectory.added, config.similarity),
                "bad_actions": -config.bad_penalty * len(trajectory.bad),
                "budget_ending": -config.budget_penalty if trajectory.ending is Ending.BUDGET else 0.0,
            }
            reason = f"recall {recall:.2f}, gain {gain:.2f} for {added} entries, {trajectory.ending}"
        return Verdict(sum(components.values()), components, reason)


def redundancy(graph: MemoryGraph, entries: Sequence[str], similarity: float, *, diagonal: bool = False) -> float:
    """Return the share of pairs that say the same (Memora eq. 16): cosine of abstractions above δ.

    In [0, 1]; 0 where there is no pair. With the `diagonal` as printed, (1/|W|²) Σ over all i, j, so that i = j counts
    and the floor is 1/|W|; else over the |W|(|W|-1) pairs of different entries. `similarity` is δ.
    """
    n = len(entries)
    pairs = n**2 if diagonal else n * (n - 1)
    if not pairs:
        return 0.0
    vectors = graph.vectors[[graph.order[entry] for entry in entries]]
    alike = vectors @ vectors.T > similarity
    np.fill_diagonal(alike, diagonal)  # a vector's cosine with itself is 1, whatever rounding says
    return float(alike.sum()) / pairs
