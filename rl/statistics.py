"""Paired comparisons over conversations, honest about how few of those there are."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats


def compare(
    a: Mapping[str, float], b: Mapping[str, float], conversation: Mapping[str, str], *, seed: int = 0
) -> dict[str, Any]:
    """Compare two policies by question.

    Args:
        a: Question id -> value (averaged over seeds first).
        b: The same questions' values under the other policy.
        conversation: Question id -> conversation id.
        seed: Of the bootstrap.

    Returns:
        `difference` (the mean of the conversations' mean paired differences), `low` and `high` (95%, t over the
        conversations; None with fewer than two), `detectable` (the smallest true difference found with 80% power),
        `question_low` and `question_high` (95% bootstrap of the question mean, stratified by conversation),
        `by_conversation`, `n`.

    Raises:
        ValueError: If the two don't hold the same questions.
    """
    if a.keys() != b.keys() or not a:
        raise ValueError(f"a paired comparison needs the same questions on both sides; got {len(a)} and {len(b)}")
    grouped: dict[str, list[float]] = {}
    for question in sorted(a):
        grouped.setdefault(conversation[question], []).append(a[question] - b[question])
    means = {id_: float(np.mean(values)) for id_, values in grouped.items()}
    values = list(means.values())
    result: dict[str, Any] = {
        "difference": float(np.mean(values)),
        "low": None,
        "high": None,
        "detectable": None,
    }
    if len(values) > 1:
        error, freedom = float(stats.sem(values)), len(values) - 1
        half = float(stats.t.ppf(0.975, freedom)) * error
        result |= {
            "low": result["difference"] - half,
            "high": result["difference"] + half,
            "detectable": float(stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)) * error,
        }
    low, high = _bootstrap(list(grouped.values()), seed)
    return {**result, "question_low": low, "question_high": high, "by_conversation": means, "n": len(a)}


def _bootstrap(strata: Sequence[Sequence[float]], seed: int, draws: int = 2000) -> tuple[float, float]:
    """Return the 95% percentile interval of the overall mean, questions drawn anew within each conversation."""
    random = np.random.default_rng(seed)
    total = sum(len(stratum) for stratum in strata)
    sums = np.zeros(draws)
    for stratum in strata:
        sums += random.choice(np.asarray(stratum), size=(draws, len(stratum))).sum(axis=1)
    low, high = np.percentile(sums / total, [2.5, 97.5])
    return float(low), float(high)
