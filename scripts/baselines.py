"""Scripted policies, walking the same environment."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from cuewalk.env import Expand, Gold, RetrievalEnv, Stop, Trajectory, format_action
from cuewalk.env.state import apply
from cuewalk.judges import covered
from cuewalk.rl.oracle import oracle_action
from cuewalk.rl.ranker import Ranker

Scripted = Callable[[RetrievalEnv, Gold], Expand | Stop]
"""A scripted policy: the environment as it stands -> the next action. Only the oracle looks at the gold."""


THRESHOLDS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5)


def run_scripted(policy: Scripted, env: RetrievalEnv, gold: Gold, seed: int = 0) -> Trajectory:
    """Walk one environment to its end."""
    env.reset(seed=seed)
    while env.state.ending is None:
        env.step(format_action(policy(env, gold)))
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


def expand_likely(ranker: Ranker, threshold: float) -> Scripted:
    """Return the policy that takes the likeliest candidates from this chance on, at most four at a time.

    Where a ranker ordered the candidates, their chances are those that it gave when they were shown.
    """

    def policy(env: RetrievalEnv, gold: Gold) -> Expand | Stop:
        state = env.state
        shown = [link for _, link in state.frontier]
        chances = ranker(env.graph, state.query, state.working, shown)
        if env.rank is not None:
            chances = np.array([link.score**2 for link in shown])
        likely = [int(i) for i in np.argsort(-chances, kind="stable") if chances[i] >= threshold]
        labels = tuple(state.frontier[i][0] for i in likely[: env.affordable])
        return Expand(labels) if labels else Stop()

    return policy


def searching_oracle(env: RetrievalEnv, gold: Gold) -> Expand | Stop:
    """Look two hops ahead: where no candidate holds missing gold, take the one behind which most of it appears.

    The ceiling of an evaluation: of recall, not of any one reward, and greedy over two hops (a test holds it against
    every walk there is on a small graph). It takes one candidate at a time, for each shows its own links; one behind
    which there is gold it takes only if the budget then reaches that too. Refining is left out: with the gold at hand,
    any query finds anything.
    """
    one, state, cost = oracle_action(env, gold), env.state, env.config.expand_cost
    if isinstance(one, Expand):
        return Expand(one.labels[:1])
    missing = set(gold.evidence) - covered(env.graph, state.working)
    if not missing or state.budget < 2 * cost:
        return Stop()
    behind = {}
    for label, _ in state.frontier:
        shown = apply(state, Expand((label,)), env.graph, env.config, env.labels, env.rank)[1].candidates
        behind[label] = len(missing & covered(env.graph, [link.entry for _, link in shown]))
    best = max(behind, key=lambda label: behind[label], default=None)
    return Expand((best,)) if best is not None and behind[best] else Stop()


def adaptive_count(scores: Sequence[float], threshold: float | None) -> int:
    """Return how many hits of these cosines to take, at least one: those from the threshold on.

    With None those above the largest gap and five more (Adaptive-k, EMNLP 2025).
    """
    ordered = np.sort(scores)[::-1]
    if threshold is not None:
        return max(1, int((ordered >= threshold).sum()))
    return 6 + int(np.argmax(ordered[:-1] - ordered[1:])) if len(ordered) > 1 else 1
