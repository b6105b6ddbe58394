"""Correctness by evidence: which gold messages a set of entries covers. Offline and deterministic."""

from collections.abc import Iterable

from cuewalk.env.records import Gold
from cuewalk.memory import MemoryGraph


class JudgeError(RuntimeError):
    """Raised when a judge can't score a trajectory. It is then left out and counted, never scored 0."""


def covered(graph: MemoryGraph, entries: Iterable[str]) -> set[str]:
    """Return the ids of the messages that these entries tell of: cited by a statement, and so shown in the value."""
    return {source for entry in entries for source in graph.entries[entry].sources}


def evidence_recall(graph: MemoryGraph, entries: Iterable[str], gold: Gold) -> float:
    """Return the share of the gold evidence that the entries cover, in [0, 1].

    A JudgeError if the question has no gold evidence.
    """
    if not gold.evidence:
        raise JudgeError("the question has no gold evidence; leave it out, or judge its answer")
    return len(covered(graph, entries) & set(gold.evidence)) / len(gold.evidence)
