"""The trajectory judge: correctness, redundancy and cost, each by its name, combined by a preset."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Literal, get_args

import numpy as np
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from cuewalk.env.environment import Trajectory
from cuewalk.env.records import Gold
from cuewalk.env.state import Ending
from cuewalk.judges.correctness import ByEndpoint, ByReader, Correctness, by_evidence
from cuewalk.memory import MemoryGraph
from cuewalk.memory.config import ModelConfig
from cuewalk.memory.endpoint import Endpoint
from cuewalk.memory.reader import LocalReader

Preset = Literal["price", "paper", "memora-code", "gated"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
STEPS = 4
"""Steps at which the released scorer's cost is full (`memora-code`); rollouts there may take 5."""


@dataclass(frozen=True)
class JudgeConfig:
    """How a trajectory is scored."""

    preset: Preset = "price"  #: `price` (default), `paper`, `memora-code` or `gated`.
    #: `evidence` (share of the gold messages told), `answer` (F1 of a local reader's answer), `likelihood` (the local
    #: reader's probability of the gold answer) or `llm` (an endpoint answers and grades).
    correctness: Literal["evidence", "answer", "likelihood", "llm"] = "evidence"
    reader: str = "smollm2-135m"  #: Of `answer` and `likelihood`: `smollm2-135m`, a local path or a hub id.
    llm: ModelConfig = field(default_factory=ModelConfig)  #: The endpoint of `llm`.
    price: NonNegativeFloat = 0.015  #: λ, what an added entry costs (`price`, `gated`), where env.price is null.
    redundancy_weight: NonNegativeFloat = 0.005  #: ρ, of the redundancy among added entries (`price`, `gated`).
    bad_penalty: NonNegativeFloat = 0.05  #: Of a bad action (`price`, `gated`).
    budget_penalty: NonNegativeFloat = 0.02  #: Of an ending by budget against one by choice (`price`, `gated`).
    similarity: float = 0.8  #: δ, the cosine above which two entries say the same (eq. 16; not given in the paper).
    #: w1, w2, w3 of correctness, redundancy and cost (`paper`, eq. 18; `memora-code`: its trainer's values).
    weights: tuple[float, float, float] = (1.0, 0.4, 0.4)
    #: Share of wrong answers that a judge of answers may accept in calibration before training is refused.
    most_wrong: NonNegativeFloat = 0.2

    def __post_init__(self) -> None:
        if self.correctness == "llm" and not self.llm.model:
            raise ValueError("judge.correctness = llm needs judge.llm.model, its name at the endpoint")
        if self.redundancy_weight > self.price:
            raise ValueError(
                f"judge.redundancy_weight = {self.redundancy_weight} is above judge.price = {self.price}: an entry "
                f"that is good for nothing could pay by diluting the redundancy of the others"
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says: the reward, its components by name, and the reason in words."""

    reward: float
    components: Mapping[str, float]
    reason: str


class TrajectoryJudge:
    """Score finished trajectories against gold. One function for training and evaluation.

    C(W) is the correctness of a set of entries, in [0, 1]; W_0 the first search, W_T the end, n the entries added.
    `price`, the paper's linear form on what the walk added; stopping at once scores exactly 0:
        R = C(W_T) - C(W_0) - c,  c = λ·n + ρ·redundancy of the added + .05·bad actions + .02 if the budget ended it.
    `paper` (Memora App. C, eq. 16-18, as printed):
        J = w1·C(W_T) - w2·Redund - w3·Cost, with Redund over all pairs, i = j included, and Cost = what was spent.
    `memora-code`, the released scorer:
        J = w1·C(W_T) - w2·mean over pairs of (cos + 1)/2 of the values - w3·min(1, steps/4 + .2·refinements).
    `gated`: what was spent only shrinks a success, and a question complete at the start counts as one:
        R = C(W_T)·(1 - min(1, c)) - C(W_0).
    """

    def __init__(self, config: JudgeConfig | None = None, correctness: Correctness | None = None) -> None:
        self.config = config or JudgeConfig()
        self.correctness = correctness or load_correctness(self.config)

    def score(self, trajectory: Trajectory, graph: MemoryGraph, gold: Gold) -> Verdict:
        """Return the verdict on one trajectory; a JudgeError where the correctness can't be told."""
        config, (w1, w2, w3) = self.config, self.config.weights
        correct = self.correctness(graph, trajectory.question, gold, trajectory.working)
        if config.preset == "paper":
            repeated = redundancy(graph, trajectory.working, config.similarity, diagonal=True)
            parts = {"correctness": w1 * correct, "redundancy": -w2 * repeated, "cost": -w3 * trajectory.cost}
        elif config.preset == "memora-code":
            refined = sum(step.kind == "refine" for step in trajectory.steps)
            spent = min(1.0, len(trajectory.steps) / STEPS + 0.2 * refined)
            alike = _value_similarity(graph, trajectory.working)
            parts = {"correctness": w1 * correct, "redundancy": -w2 * alike, "cost": -w3 * spent}
        else:
            first = self.correctness(graph, trajectory.question, gold, trajectory.first)
            repeated = redundancy(graph, trajectory.added, config.similarity)
            price = config.price if trajectory.price is None else trajectory.price
            costs = {
                "price": -price * len(trajectory.added),
                "redundancy": -min(config.redundancy_weight, price) * repeated,
                "bad_actions": -config.bad_penalty * len(trajectory.bad),
                "budget_ending": -config.budget_penalty if trajectory.ending is Ending.BUDGET else 0.0,
            }
            gate = correct * min(1.0, -sum(costs.values()))
            parts = {"gain": correct - first, **(costs if config.preset == "price" else {"gate": -gate})}
        reason = f"correctness {correct:.2f}, {len(trajectory.added)} entries added, cost {trajectory.cost}"
        return Verdict(sum(parts.values()), parts, f"{reason}, {trajectory.ending}")


def load_correctness(config: JudgeConfig) -> Correctness:
    """Return the function that `config.correctness` names; a ModelError where its reader can't be loaded."""
    if config.correctness == "evidence":
        return by_evidence
    if config.correctness == "llm":
        return ByEndpoint(Endpoint(config.llm))
    return ByReader(LocalReader.from_pretrained(config.reader), config.correctness)


def _value_similarity(graph: MemoryGraph, entries: Sequence[str]) -> float:
    """Return the mean of (cos + 1)/2 over pairs of different entries' values; 0 where there is no pair."""
    if len(entries) < 2:
        return 0.0
    vectors = np.stack([graph.encoder.encode([graph.entries[entry].value])[0] for entry in entries])
    above = np.triu_indices(len(entries), 1)
    return float(((vectors @ vectors.T)[above] + 1).mean() / 2)


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
