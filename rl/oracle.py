"""The walker that sees the gold: teacher of the warm start, ceiling and reference of an evaluation."""

from cuewalk.env import EnvConfig, Expand, Gold, State, Stop
from cuewalk.env.actions import MAX_EXPAND
from cuewalk.judges import covered
from cuewalk.memory import MemoryGraph


def oracle_picks(state: State, graph: MemoryGraph, gold: Gold, config: EnvConfig) -> list[str]:
    """Return the labels to expand now, best first: greedily those that cover most of the gold still missing.

    Empty where the evidence is complete or no candidate holds any of it: the oracle then stops. It looks one hop
    ahead: a candidate without gold is never taken for what lies behind it.
    """
    missing = set(gold.evidence) - covered(graph, state.working)
    holds = {label: covered(graph, [link.entry]) for label, link in state.frontier}
    affordable = min(MAX_EXPAND, state.budget // config.expand_cost)
    picks: list[str] = []
    while missing and len(picks) < affordable:
        best = max(holds, key=lambda label: len(holds[label] & missing), default=None)
        if best is None or not holds[best] & missing:
            break
        picks.append(best)
        missing -= holds.pop(best)
    return picks


def oracle_action(state: State, graph: MemoryGraph, gold: Gold, config: EnvConfig) -> Expand | Stop:
    """Return the oracle's action."""
    picks = oracle_picks(state, graph, gold, config)
    return Expand(tuple(picks)) if picks else Stop()
