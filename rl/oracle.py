"""The walker that sees the gold: teacher of the warm start, ceiling and reference of an evaluation."""

from cuewalk.env import Expand, Gold, RetrievalEnv, Stop
from cuewalk.env.state import apply
from cuewalk.judges import covered


def oracle_action(env: RetrievalEnv, gold: Gold) -> Expand | Stop:
    """Return the labels to expand now, best first: greedily those that cover most of the gold still missing.

    It stops where the evidence is complete or no candidate holds any of it. It looks one hop ahead: a candidate
    without gold is never taken for what lies behind it.
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


def searching_oracle(env: RetrievalEnv, gold: Gold) -> Expand | Stop:
    """Look two hops ahead: where no candidate holds missing gold, take the one behind which most of it appears.

    The ceiling of an evaluation. It takes one candidate at a time, for each shows its own links; one behind which
    there is gold it takes only if the budget then reaches that too. Refining is left out: with the gold at hand, any
    query finds anything.
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
