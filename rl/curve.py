"""A served policy as a curve: where it would have stopped under any offset on STOP, from one walk a question.

Decoded greedily, an offset on STOP's score changes where a walk ends and nothing before. So a walk in which STOP is
forbidden holds all of them: with an offset the policy stops before the first action at which STOP's margin is above
minus the offset.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from cuewalk.env import RetrievalEnv, Trajectory
from cuewalk.rl.config import SamplingConfig
from cuewalk.rl.rollout import Row, walk_greedily
from cuewalk.rl.transcript import Chat

OFFSETS = tuple(step / 4 for step in range(-24, 25))
"""What is tried for an operating point."""


@dataclass(frozen=True)
class Served:
    """One question's walk, cut at every place where it could have stopped."""

    walks: tuple[Trajectory, ...]  #: Stopped before the first action, the second, …, and not at all.
    tokens: tuple[int, ...]  #: Of each one's transcript.
    margins: tuple[float, ...]  #: STOP's score less the best other's, before each action.

    def place(self, offset: float) -> int:
        """Return which of the walks the policy takes with this offset on STOP."""
        stops = (place for place, margin in enumerate(self.margins) if margin + offset > 0)
        return next(stops, len(self.margins))


def serve_curves(
    make: Callable[[], Sequence[RetrievalEnv]], model: Any, chat: Chat, sampling: SamplingConfig
) -> list[Served]:
    """Walk each environment that `make` makes as a policy is served, never stopping, and cut it everywhere."""
    rows = walk_greedily(make(), model, chat, replace(sampling, stop_offset=float("-inf")))
    texts = [[step.text for step in row.trajectory.steps] for row in rows]
    cuts: list[list[Trajectory]] = [[] for _ in rows]
    for place in range(max(map(len, texts))):
        for env, said, kept in zip(make(), texts, cuts, strict=True):
            if place < len(said):
                env.reset()
                for action in [*said[:place], "STOP"]:
                    env.step(action)
                kept.append(env.trajectory())
    return [
        Served((*kept, row.trajectory), _tokens(row, len(chat.action("STOP"))), tuple(row.margins))
        for row, kept in zip(rows, cuts, strict=True)
    ]


def _tokens(row: Row, stop: int) -> tuple[int, ...]:
    """Return the transcript's length where STOP, of so many tokens, stands for the first action, the second, …."""
    begins = [at for at, own in enumerate(row.mask) if own and not (at and row.mask[at - 1])]
    return (*(len(row.prompt) + at + stop for at in begins), len(row.prompt) + len(row.completion))


def choose_offset(served: Sequence[Served], rewards: Sequence[Sequence[float]]) -> float:
    """Return the offset of the best mean reward, of equals the nearest to 0; `rewards` are of each walk's cuts."""

    def total(offset: float) -> float:
        return sum(paid[walk.place(offset)] for walk, paid in zip(served, rewards, strict=True))

    return max(sorted(OFFSETS, key=abs), key=total)


def stopping(
    val: tuple[Sequence[float], Sequence[bool]], asked: tuple[Sequence[float], Sequence[bool]]
) -> dict[str, float | None]:
    """Say how well a score tells at the first state whether W holds all the evidence: stop now, or not.

    Both are scores and completeness by question. Returns `auroc` and, with the threshold that is best on `val`,
    `balanced_accuracy` of those asked; None where all are of one kind.
    """
    if any(len(set(complete)) < 2 for _, complete in (val, asked)):
        return {"auroc": None, "balanced_accuracy": None}

    def right(threshold: float, scores: Sequence[float], complete: Sequence[bool]) -> float:
        return float(balanced_accuracy_score(complete, [score >= threshold for score in scores]))

    threshold = max(sorted(set(val[0])), key=lambda value: right(value, *val))
    return {"auroc": float(roc_auc_score(asked[1], asked[0])), "balanced_accuracy": right(threshold, *asked)}
