"""Policies without a language model, walking the same environment."""

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import HistGradientBoostingClassifier

from cuewalk.env import DataError, EnvConfig, Expand, Gold, RetrievalEnv, Stop, Tasks, Trajectory, format_action
from cuewalk.judges import TrajectoryJudge, covered
from cuewalk.judges.evidence import words
from cuewalk.memory import LINK_KINDS, MemoryGraph

Scripted = Callable[[RetrievalEnv, Gold], Expand | Stop]
"""A scripted policy: the environment as it stands -> the next action. Only the oracle looks at the gold."""


def run_scripted(policy: Scripted, env: RetrievalEnv, gold: Gold, seed: int = 0) -> Trajectory:
    """Walk one environment to its end."""
    env.reset(seed=seed)
    ended = False
    while not ended:
        _, _, ended, _, _ = env.step(format_action(policy(env, gold)))
    return env.trajectory()


def random_walk(env: RetrievalEnv, gold: Gold) -> Expand | Stop:
    """Stop with probability one third, else expand one candidate at random; the seed is the question's id."""
    draw = random.Random(f"{env.question.id}/{len(env.steps)}")
    if not env.state.frontier or draw.random() < 1 / 3:
        return Stop()
    return Expand((draw.choice(env.state.frontier)[0],))


def expand_top(count: int) -> Scripted:
    """Return the policy that takes the first `count` candidates unread, then stops; 0 keeps the first search."""

    def policy(env: RetrievalEnv, gold: Gold) -> Expand | Stop:
        left = count - len(env.state.taken)
        labels = tuple(label for label, _ in env.state.frontier[: min(left, env.affordable)])
        return Expand(labels) if labels else Stop()

    return policy


class Ranker:
    """Gradient boosting on numbers a candidate has before it is read, trained on the training questions' evidence.

    The rival that a policy must beat. It expands the likeliest candidate while its probability is above a
    threshold, chosen on the validation questions for the judge's reward.
    """

    def __init__(self, seed: int = 0) -> None:
        self._model = HistGradientBoostingClassifier(max_iter=150, learning_rate=0.05, random_state=seed)
        self.threshold = 0.5

    def fit(
        self, train: Tasks, val: Tasks, graphs: dict[str, MemoryGraph], config: EnvConfig, judge: TrajectoryJudge
    ) -> None:
        """Train on every first frontier of `train`, then choose the threshold on `val`.

        A DataError where no training candidate holds evidence, or all do.
        """
        rows, labels = [], []
        for question in train.questions:
            env = RetrievalEnv(graphs[question.conversation_id], question, config)
            env.reset()
            evidence = train.gold[question.id].evidence
            rows.append(features(env))
            labels += [not covered(env.graph, [link.entry]).isdisjoint(evidence) for _, link in env.state.frontier]
        if len(set(labels)) < 2:
            raise DataError(f"the ranker needs candidates with and without evidence; got {len(labels)} of one kind")
        self._model.fit(np.concatenate(rows), np.array(labels))

        def reward(threshold: float) -> float:
            self.threshold = threshold
            total = 0.0
            for question in val.questions:
                graph, gold = graphs[question.conversation_id], val.gold[question.id]
                trajectory = run_scripted(self, RetrievalEnv(graph, question, config), gold)
                total += judge.score(trajectory, graph, gold).reward
            return total

        self.threshold = max((0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5), key=reward)

    def __call__(self, env: RetrievalEnv, gold: Gold) -> Expand | Stop:
        """Take the likeliest candidates above the threshold, at most four at a time."""
        if not env.state.frontier:
            return Stop()
        chances = self._model.predict_proba(features(env))[:, 1]
        likely = [int(i) for i in np.argsort(-chances, kind="stable") if chances[i] >= self.threshold]
        labels = tuple(env.state.frontier[i][0] for i in likely[: env.affordable])
        return Expand(labels) if labels else Stop()


def features(env: RetrievalEnv) -> npt.NDArray[np.float64]:
    """Return one row a candidate of the frontier: scores, places, links and surface, (|F|, 11 + len(LINK_KINDS))."""
    graph, state = env.graph, env.state
    ranking = {hit.entry: place for place, hit in enumerate(graph.search(state.query, 100))}
    positions = [graph.order[entry] for entry in state.working]
    working = graph.vectors[positions]
    question = words(state.query)
    wants_date = any(word in question for word in ("when", "date", "day", "month", "year"))
    rows = []
    for place, (_, link) in enumerate(state.frontier):
        entry = graph.entries[link.entry]
        near = working @ graph.vectors[graph.order[entry.id]]
        told = words(f"{entry.abstraction} {entry.value}")
        shared = len(question & told) / max(1, len(question))
        apart = min(abs(graph.order[entry.id] - position) for position in positions)
        ranked = [link.score, place, ranking.get(entry.id, 100), float(near.max()), float(near.mean())]
        surface = [shared, entry.speaker.lower() in question, len(told), wants_date, len(entry.sources), apart]
        rows.append([*ranked, *surface, *(link.kind == kind for kind in LINK_KINDS)])
    return np.array(rows, dtype=np.float64).reshape(len(rows), 11 + len(LINK_KINDS))
