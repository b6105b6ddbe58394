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
from cuewalk.rl.rollout import walk_greedily
from cuewalk.rl.transcript import Chat

OFFSETS = (0.0, *(side * (0.0625 + step / 4) for step in range(32) for side in (-1, 1)))
"""What is tried for an operating point, nearest to 0 first; off the grid on which a bf16 model's margins lie."""


@dataclass(frozen=True)
class Record:
    """What a policy said where it could not stop: enough to make the walk again without the model."""

    question: str  #: Its id.
    texts: tuple[str, ...]  #: Its actions.
    margins: tuple[float, ...]  #: STOP's score less the best other's, before each action.
    tokens: tuple[int, ...]  #: Of the transcript, had it stopped before the first action, the second, …; and whole.


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


def record(envs: Sequence[RetrievalEnv], model: Any, chat: Chat, sampling: SamplingConfig) -> list[Record]:
    """Walk each environment as a policy is served, but never stopping."""
    records, stop = [], len(chat.action("STOP"))
    for row in walk_greedily(envs, model, chat, replace(sampling, stop_offset=float("-inf"))):
        begins = [at for at, own in enumerate(row.mask) if own and not (at and row.mask[at - 1])]
        tokens = (*(len(row.prompt) + at + stop for at in begins), len(row.prompt) + len(row.completion))
        texts = tuple(step.text for step in row.trajectory.steps)
        records.append(Record(row.env.question.id, texts, tuple(row.margins), tokens))
    return records


def cut(kept: Record, make: Callable[[], RetrievalEnv]) -> Served:
    """Make a recorded walk again, in an environment that `make` makes, and stop it everywhere it could have stopped."""
    walks = []
    for place in range(len(kept.texts) + 1):
        env = make()
        env.reset()
        for action in (*kept.texts[:place], "STOP"):
            if env.state.ending is None:
                env.step(action)
        walks.append(env.trajectory())
    return Served(tuple(walks), kept.tokens, kept.margins)


def choose_offset(served: Sequence[Served], rewards: Sequence[Sequence[float]]) -> float:
    """Return the offset of the best mean reward, of equals the nearest to 0; `rewards` are of each walk's cuts."""

    def total(offset: float) -> float:
        return sum(paid[walk.place(offset)] for walk, paid in zip(served, rewards, strict=True))

    return max(OFFSETS, key=total)


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
