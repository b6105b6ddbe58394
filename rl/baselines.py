"""Policies without a language model, walking the same environment."""

import random
from collections.abc import Callable

from cuewalk.env import Expand, Gold, RetrievalEnv, Stop, Trajectory, format_action

Scripted = Callable[[RetrievalEnv, Gold], Expand | Stop]
"""A scripted policy: the environment as it stands -> the next action. Only the oracle looks at the gold."""


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
