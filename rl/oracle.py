"""The walker that sees the gold: teacher of the warm start, ceiling and reference of an evaluation."""

from cuewalk.env import Expand, Gold, RetrievalEnv, Stop
from cuewalk.judges import covered


def oracle_action(env: RetrievalEnv, gold: Gold) -> Expand | Stop:
    """Return the labels to expand now, best first: greedily those that cover most of the gold still missing.

    It stops where the evidence is complete or no candidate holds any of it: none is taken for what lies behind it.
    """
    missing = set(gold.evidence) - covered(env.graph, env.state.working)
    holds = {label: covered(env.graph, [link.entry]) for label, link in env.state.frontier}
    picks: list[str] = []
    while missing and len(picks) < env.affordable:
        best = max(holds, key=lambda label: len(holds[label] & missing), default=None)
        if best is None or not holds[best] & missing:
            break
        picks.append(best)
        missing -= holds.pop(best)
    return Expand(tuple(picks)) if picks else Stop()
