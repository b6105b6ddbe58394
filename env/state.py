"""The decision process: state (q, W, F, b), and one pure transition (Memora, Algorithm 1, made explicit)."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt
import pydantic.dataclasses
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from cuewalk.env.actions import LABELS, Action, Bad, Expand, Refine, Stop
from cuewalk.memory import LINK_KINDS, Link, MemoryGraph

Rank = Callable[[MemoryGraph, str, Sequence[str], Sequence[Link]], npt.NDArray[np.float64]]
"""Graph, query, W and candidates -> each candidate's chance of being worth its price, in [0, 1]."""

POOL = 4
"""A rank chooses from so many times the candidates that are shown."""


class Ending(StrEnum):
    """How a trajectory ended."""

    STOPPED = "stopped"
    BUDGET = "budget"
    MALFORMED = "malformed"


@pydantic.dataclasses.dataclass(frozen=True)
class EnvConfig:
    """The rules. Training, evaluation and serving may differ in them; the class that follows them is one."""

    k: PositiveInt = 5  #: Entries of the free first search, W_0.
    budget: NonNegativeInt = 6  #: B, what a trajectory may spend.
    #: λ of the reward where walks are told it, in place of the judge's: a policy can then be asked for more or less.
    price: NonNegativeFloat | None = None
    frontier_cap: NonNegativeInt = 24  #: Candidates shown at the start, |F_0|.
    new_lines: NonNegativeInt = 4  #: Candidates added by one later step at most.
    #: What comes first: `search` (ranks fused), `ranker` (learnt in training) or `reader` (its best, read by a model).
    order: Literal["search", "ranker", "reader"] = "search"
    #: Link kinds that make candidates (`search` alone is the control `next_hits`); the default reached most in trials.
    links: tuple[str, ...] = ("segment", "adjacent", "anchor", "similar", "search")
    expand_cost: PositiveInt = 1  #: Of one entry.
    refine_cost: PositiveInt = 1  #: Of one new query.
    bad_cost: PositiveInt = 1  #: Of a bad action.
    #: An entry's value is cut for the policy after so many words (a reader gets all of it).
    value_words: PositiveInt = 20
    abstraction_words: PositiveInt = 8  #: A candidate's abstraction is cut after so many words.

    def __post_init__(self) -> None:
        if unknown := set(self.links) - set(LINK_KINDS):
            raise ValueError(f"env.links: unknown kinds {sorted(unknown)}; choose from {', '.join(LINK_KINDS)}")
        if self.most_labels > len(LABELS):
            raise ValueError(
                f"env: frontier_cap {self.frontier_cap} + budget {self.budget} x new_lines {self.new_lines} = "
                f"{self.most_labels} labels, but there are {len(LABELS)} letters; lower one of them"
            )

    @property
    def most_labels(self) -> int:
        """Return how many labels a trajectory can give out."""
        return self.frontier_cap + self.budget * self.new_lines


@dataclass(frozen=True, slots=True)
class State:
    """Where a trajectory stands."""

    query: str  #: q, the current query.
    working: tuple[str, ...]  #: W, entry ids in order of entry.
    #: F, label -> candidate, in order of showing; labels taken are gone from it.
    frontier: tuple[tuple[str, Link], ...]
    budget: int  #: b.
    queries: tuple[str, ...]  #: Every query searched so far.
    taken: frozenset[str] = frozenset()  #: Labels that were expanded.
    shown: int = 0  #: How many labels were given out (they are never reused).
    bad_streak: int = 0  #: Bad actions in a row.
    ending: Ending | None = None  #: None while the trajectory goes on.


@dataclass(frozen=True, slots=True)
class Change:
    """What one step changed, all that an observation needs to tell."""

    added: tuple[str, ...] = ()  #: Entries that came into W.
    candidates: tuple[tuple[str, Link], ...] = ()  #: Lines that came into F, label and candidate.
    cost: int = 0  #: What was spent.
    bad: str | None = None  #: Why the action was bad, one of `BAD_REASONS`, else None.


def first_state(
    graph: MemoryGraph, question: str, config: EnvConfig, labels: str = LABELS, rank: Rank | None = None
) -> State:
    """Run the free first search: W_0 is its best k, F_0 what they link to and the next hits."""
    working = tuple(hit.entry for hit in graph.search(question, config.k))
    pool = graph.frontier(question, working, set(working), config.links, config.frontier_cap * (POOL if rank else 1))
    found = _chosen(pool, graph, question, working, config.frontier_cap, rank)
    frontier = tuple(zip(labels, found, strict=False))
    ending = Ending.BUDGET if config.budget == 0 else None
    return State(question, working, frontier, config.budget, (question,), shown=len(frontier), ending=ending)


def apply(
    state: State, action: Action, graph: MemoryGraph, config: EnvConfig, labels: str = LABELS, rank: Rank | None = None
) -> tuple[State, Change]:
    """Return the next state and what changed. Pure.

    A legal action dearer than the budget is not executed and ends the trajectory as `budget`; so does a budget of 0
    after any action. A bad action costs `bad_cost`, at most what is left; the second in a row ends it as `malformed`.

    A ValueError if the trajectory has ended.
    """
    if state.ending is not None:
        raise ValueError(f"the trajectory has ended ({state.ending}); call reset before another step")
    if isinstance(action, Stop):
        return replace(state, ending=Ending.STOPPED, bad_streak=0), Change()
    if isinstance(action, Bad):
        return _bad(state, action.reason, config)
    if reason := _fault(action, state):
        return _bad(state, reason, config)
    cost = config.refine_cost if isinstance(action, Refine) else config.expand_cost * len(action.labels)
    if cost > state.budget:
        return replace(state, ending=Ending.BUDGET, bad_streak=0), Change()
    added: tuple[str, ...] = ()
    wide = config.new_lines * (POOL if rank else 1)
    if isinstance(action, Refine):
        state = replace(state, query=action.query, queries=(*state.queries, action.query))
        pool = graph.search(action.query, wide, _known(state)) if wide else []
    else:
        candidates, taken = dict(state.frontier), state.taken | set(action.labels)
        added = tuple(candidates[label].entry for label in action.labels)
        kept = tuple((label, link) for label, link in state.frontier if label not in taken)
        state = replace(state, working=state.working + added, frontier=kept, taken=taken)
        pool = graph.frontier(state.query, added, _known(state), config.links, wide)
    found = _chosen(pool, graph, state.query, state.working, config.new_lines, rank)
    lines = tuple(zip(labels[state.shown :], found, strict=False))
    frontier, shown, budget = state.frontier + lines, state.shown + len(lines), state.budget - cost
    ending = Ending.BUDGET if budget == 0 else None
    state = replace(state, frontier=frontier, shown=shown, budget=budget, bad_streak=0, ending=ending)
    return state, Change(added, lines, cost)


def _chosen(
    pool: list[Link], graph: MemoryGraph, query: str, working: Sequence[str], cap: int, rank: Rank | None
) -> list[Link]:
    """Return the candidates that are shown; a rank chooses a part of the pool, and what it says is their score."""
    if rank is None:
        return pool
    chances = rank(graph, query, working, pool)
    best = np.argsort(-chances, kind="stable")[:cap]
    # A chance is small for most; its square root spreads the digits that are shown.
    return [replace(pool[place], score=float(chances[place]) ** 0.5) for place in best]


def _fault(action: Expand | Refine, state: State) -> str | None:
    """Return why a well-formed action is not legal in this state."""
    if isinstance(action, Refine):
        return "repeated_query" if _same(action.query) in map(_same, state.queries) else None
    if not state.frontier:
        return "empty_frontier"
    if state.taken.intersection(action.labels):
        return "taken_label"
    return None if dict(state.frontier).keys() >= set(action.labels) else "unknown_label"


def _bad(state: State, reason: str, config: EnvConfig) -> tuple[State, Change]:
    cost = min(config.bad_cost, state.budget)
    streak = state.bad_streak + 1
    budget = state.budget - cost
    ending = Ending.MALFORMED if streak == 2 else Ending.BUDGET if budget == 0 else None
    return replace(state, budget=budget, bad_streak=streak, ending=ending), Change(cost=cost, bad=reason)


def _known(state: State) -> set[str]:
    return {*state.working, *(link.entry for _, link in state.frontier)}


def _same(query: str) -> str:
    return "".join(c for c in query.casefold() if unicodedata.category(c)[0] not in "CPZ")
