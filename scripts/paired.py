"""Paired comparisons over conversations, honest about how few of those there are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats


def compare(
    a: Mapping[str, float], b: Mapping[str, float], conversation: Mapping[str, str], *, seed: int = 0
) -> dict[str, Any]:
    """Compare two policies by question; `a` and `b` map the same question ids to values (averaged over seeds first).

    Returns `difference` (the mean of the conversations' mean paired differences), `low` and `high` (95%, t over the
    conversations; None with fewer than two), `detectable` (the smallest true difference found with 80% power),
    `question_low` and `question_high` (95% bootstrap of the question mean, stratified by conversation, from `seed`;
    None where each conversation has one question),
    `by_conversation`, `n`. A ValueError if the two don't hold the same questions.
    """
    if a.keys() != b.keys() or not a:
        raise ValueError(f"a paired comparison needs the same questions on both sides; got {len(a)} and {len(b)}")
    strata = (pd.Series(a) - pd.Series(b)).sort_index().groupby(dict(conversation), sort=False)
    means = strata.mean()
    difference = float(means.mean())
    result: dict[str, Any] = {"difference": difference, "low": None, "high": None, "detectable": None,
                              "question_low": None, "question_high": None}  # fmt: skip
    if len(means) > 1:
        error = float(stats.sem(means))
        t, power = (float(stats.t.ppf(share, len(means) - 1)) for share in (0.975, 0.8))
        result |= {"low": difference - t * error, "high": difference + t * error, "detectable": (t + power) * error}
    draw = np.random.default_rng(seed)  # questions are drawn anew within each conversation, 2000 times
    sums = np.sum([draw.choice(stratum, size=(2000, len(stratum))).sum(axis=1) for _, stratum in strata], axis=0)
    low, high = (float(bound) for bound in np.percentile(sums / len(a), [2.5, 97.5]))
    if len(means) < len(a):  # else one question a conversation: within it there is nothing to draw
        result |= {"question_low": low, "question_high": high}
    return {**result, "by_conversation": means.to_dict(), "n": len(a)}
