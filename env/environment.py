"""`RetrievalEnv`: one trajectory over one memory graph for one question, as a Gymnasium environment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from cuewalk.env.actions import LABELS, MAX_EXPAND, Refine, parse_action
from cuewalk.env.records import Question
from cuewalk.env.render import first_observation, next_observation
from cuewalk.env.state import Change, Ending, EnvConfig, Rank, State, apply, first_state
from cuewalk.memory import Encoder, Link, MemoryGraph


@dataclass(frozen=True, slots=True)
class Step:
    """One action and what came of it: the policy's raw text, what it was read as, and the change."""

    text: str
    kind: str
    change: Change
    budget: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished run of the environment, all that a judge needs besides graph and gold."""

    question: Question  #: What was asked.
    first: tuple[str, ...]  #: W_0, the free first search.
    steps: tuple[Step, ...]  #: In order.
    working: tuple[str, ...]  #: W as it ended, in order of entry.
    ending: Ending  #: How it ended.
    budget: int  #: B it started with.
    frontier: tuple[tuple[str, Link], ...] = ()  #: F_0, label and candidate, as it was shown; to follow the walk again.
    price: float | None = None  #: λ as it was told, None where it was not.

    @property
    def added(self) -> tuple[str, ...]:
        """Return what the walk added to the first search."""
        return self.working[len(self.first) :]

    @property
    def cost(self) -> int:
        """Return what was spent."""
        return sum(step.change.cost for step in self.steps)

    @property
    def bad(self) -> tuple[str, ...]:
        """Return the reasons of the bad actions, in order."""
        return tuple(step.change.bad for step in self.steps if step.change.bad is not None)


class TextSpace(gymnasium.Space[str]):
    """Any text. `gymnasium.spaces.Text` admits a finite alphabet and a length; memories have neither.

    Samples are well-formed actions, so that random agents and `check_env` can drive the environment.
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=(), dtype=None, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Return `STOP`, or `EXPAND` with one label."""
        if self.np_random.random() < 0.2:
            return "STOP"
        return f"EXPAND {LABELS[int(self.np_random.integers(len(LABELS)))]}"

    def contains(self, x: Any) -> bool:
        """Tell whether x is text."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)


class RetrievalEnv(gymnasium.Env[str, str]):
    """Walk a memory graph: gather what answers the question, under a budget.

    Description: Memora's retrieval process (section 4.1, Algorithm 1): state (q, W, F, b), see `State`. Reset runs the
        free first search. The same class with the same renderer is used to train, evaluate and serve.
    Action space: Text, one line: `EXPAND H T` (1-4 letters of candidates, best first), `REFINE <query>`, `STOP`.
        Anything else is a bad action: it gets a one-line error, costs `bad_cost` and is counted under its reason.
    Observation space: Text. The first shows question, W, F and budget, each later one only what is new.
    Rewards: 0 while it goes on; at the end `score(trajectory)`, called once, or 0 without one.
    Episode end: `terminated` with `info["ending"]` `stopped` (by choice), `budget` (nothing left, or a legal action was
        dearer than what is left) or `malformed` (two bad actions in a row). The budget is state: never `truncated`.
    Information: `budget`, `working` (entry ids), `bad` (reason or None), `ending` (None until the end).
    Version history: v0, first.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(
        self,
        graph: MemoryGraph,
        question: Question,
        config: EnvConfig | None = None,
        score: Callable[[Trajectory], float] | None = None,
        rank: Rank | None = None,
    ) -> None:
        if question.conversation_id != graph.conversation.id:
            raise ValueError(
                f"question {question.id!r} is about conversation {question.conversation_id!r}, but the graph is of "
                f"{graph.conversation.id!r}"
            )
        self.graph = graph
        self.question = question
        self.config = config or EnvConfig()
        self.score = score
        self.rank = rank
        if (self.config.order == "search") != (rank is None):
            raise ValueError(f"env.order = {self.config.order!r}: pass rank= unless it is 'search', and only then")
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self._state: State | None = None

    @property
    def state(self) -> State:
        """Return where the trajectory stands; a RuntimeError before the first reset."""
        if self._state is None:
            raise RuntimeError("call reset() before step()")
        return self._state

    @property
    def affordable(self) -> int:
        """Return how many candidates one expansion may name now: at most `MAX_EXPAND`, and what the budget pays."""
        return min(MAX_EXPAND, self.state.budget // self.config.expand_cost)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start over.

        Args:
            seed: Of this environment's randomness (the letters, where they are shuffled).
            options: `{"shuffle_labels": True}` deals the letters at random: in training none means a place.
        """
        super().reset(seed=seed)
        shuffle = bool((options or {}).get("shuffle_labels"))
        letters = LABELS[: self.config.most_labels]  # a policy never meets others
        self.labels = "".join(self.np_random.permutation(list(letters))) if shuffle else letters
        state = first_state(self.graph, self.question.text, self.config, self.labels, self.rank)
        self._state, self.first, self.frontier, self.steps = state, state.working, state.frontier, list[Step]()
        observation = first_observation(self.graph, self.question.text, state, self.config)
        return observation, self._info(None)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one action, given as text: a TypeError if it is none.

        A RuntimeError if the environment was not reset, or the trajectory has ended.
        """
        if not isinstance(action, str):
            raise TypeError(f"an action is text such as 'EXPAND A', got {type(action).__name__} {action!r}")
        if self.state.ending is not None:
            raise RuntimeError(f"the trajectory has ended ({self.state.ending}); call reset() before step()")
        parsed = parse_action(action)
        self._state, change = apply(self.state, parsed, self.graph, self.config, self.labels, self.rank)
        kind = type(parsed).__name__.lower() if change.bad is None else "bad"
        self.steps.append(Step(action, kind, change, self.state.budget))
        ended = self.state.ending is not None
        observation = next_observation(self.graph, self.state, change, self.config)
        reward = float(self.score(self.trajectory())) if ended and self.score is not None else 0.0
        return observation, reward, ended, False, self._info(change.bad)

    def trajectory(self) -> Trajectory:
        """Return the finished trajectory; a RuntimeError where it has not ended."""
        state = self._state
        if state is None or state.ending is None:
            raise RuntimeError("the trajectory has not ended yet")
        steps, budget, price = tuple(self.steps), self.config.budget, self.config.price
        return Trajectory(self.question, self.first, steps, state.working, state.ending, budget, self.frontier, price)

    def _info(self, bad: str | None) -> dict[str, Any]:
        return {"budget": self.state.budget, "working": self.state.working, "bad": bad, "ending": self.state.ending}


def step_together(envs: Sequence[RetrievalEnv], actions: Sequence[str]) -> list[tuple[str, float, bool, bool, Any]]:
    """Step many environments, one action each; the queries among them are encoded in one call an encoder."""
    queries: dict[int, tuple[Encoder, list[str]]] = {}
    for env, action in zip(envs, actions, strict=True):
        if isinstance(parsed := parse_action(action), Refine):
            queries.setdefault(id(env.graph.encoder), (env.graph.encoder, []))[1].append(parsed.query)
    for encoder, texts in queries.values():
        for start in range(0, len(texts), 64):  # remembered until each environment searches; more at once are not
            encoder.encode(texts[start : start + 64])
    return [env.step(action) for env, action in zip(envs, actions, strict=True)]
