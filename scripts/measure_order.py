"""Measure the order of the candidates on LoCoMo, and what a reader adds to it: docs/results/order.{json,md}.

    CUEWALK_DATA=path/to/data python -m cuewalk.scripts.measure_order [--out docs/results/order]

On the conversations that settings are chosen on (26, 30, 41, 43, 47), each with a ranker trained on the others.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cuewalk.env import RetrievalEnv
from cuewalk.env.tasks import select
from cuewalk.judges import evidence_recall
from cuewalk.memory import BuildConfig
from cuewalk.memory.reader import LocalReader
from cuewalk.rl.config import load_config
from cuewalk.rl.ranker import Ranker, fit_ranker
from cuewalk.rl.reading import Reading, fit_reading
from cuewalk.scripts.baselines import expand_top, run_scripted
from cuewalk.scripts.measure_memory import build, head, load, tokens
from cuewalk.scripts.measures import measure_entries, tokens_read
from cuewalk.scripts.paired import compare
from cuewalk.scripts.results import interval, made_by, markdown_table, measure, table

ORDERS = ("ranker", "reader")
NAMES = ("recall_at_8", "recall_at_300t", "evidence_recall", "context_tokens", "inference_tokens", "reward")


def picks() -> dict[str, list[dict[str, Any]]]:
    """Measure a first search of k entries, then so many candidates as they are ordered; by order, k and count."""
    recipe = load_config(Path(__file__).parents[1] / "configs" / "locomo_cpu.yaml")
    tasks, graphs = load("dev"), build("dev", BuildConfig())
    reader = LocalReader.from_pretrained(recipe.model, recipe.dtype)
    found: dict[tuple[str, int, int], dict[str, list[Any]]] = defaultdict(dict)
    for (order, k), left_out in tqdm(list(product(product(ORDERS, (3, 5)), graphs)), desc="order", disable=None):
        rules = replace(recipe.env, k=k, order=order)  # type: ignore[arg-type]
        others = select(tasks, ids=[q.id for q in tasks.questions if q.conversation_id != left_out], clean=True)
        ranker = fit_ranker(others, graphs, rules)
        rank: Ranker | Reading = ranker
        if order == "reader":
            rank = Reading(fit_reading(ranker, reader, others, graphs, rules), reader)
        for question in (q for q in tasks.questions if q.conversation_id == left_out):
            gold, env = tasks.gold[question.id], RetrievalEnv(graphs[left_out], question, rules, rank=rank)
            read, walked = float(tokens_read(env)), run_scripted(expand_top(rules.budget), env, gold)
            first = evidence_recall(env.graph, walked.first, gold)
            for count in range(rules.budget + 1):
                entries = walked.working[: k + count]
                own = measure_entries(env.graph, question, gold, entries, tokens, recipe.judge.similarity)
                gain = evidence_recall(env.graph, entries, gold) - first
                own |= {"inference_tokens": read, "reward": gain - recipe.judge.price * count}
                found[order, k, count][question.id] = [own[name] for name in NAMES]
    rows = [
        {"order": order, "k": k, "picks": count, **dict(zip(NAMES, np.mean(list(own.values()), axis=0), strict=True))}
        for (order, k, count), own in found.items()
    ]
    conversation = {question.id: question.conversation_id for question in tasks.questions}
    pairs = []
    for k, count, name in product((3, 5), (3, 4), ("recall_at_8", "recall_at_300t", "evidence_recall")):
        a, b = ({id_: own[NAMES.index(name)] for id_, own in found[order, k, count].items()} for order in ORDERS[::-1])
        pairs.append({"k": k, "picks": count, "metric": name, **compare(a, b, conversation)})
    return {"rows": rows, "pairs": pairs}


def markdown(result: dict[str, Any]) -> str:
    """Return the result as tables."""
    columns = ("order", "k", "picks", *NAMES)
    paired = [
        (*(row[key] for key in ("k", "picks", "metric", "n")), f"{row['difference']:+.3f}",
         interval(row["low"], row["high"]))
        for row in result["picks"]["pairs"]
    ]  # fmt: skip
    parts = [
        "# The order of the candidates, measured",
        f"{made_by(result)} LoCoMo, conversations 26, 30, 41, 43, 47 (n = {result['data']['n_dev']}), the frontier of "
        "configs/locomo_cpu.yaml. A first search of k entries, then so many candidates, as a ranker orders them that "
        "was trained on the other conversations (`ranker`), or with SmolLM2-135M reading its best twelve (`reader`). "
        "`reward` is what the picks earn at the default price, `inference_tokens` what the reader read.",
        table(result["picks"]["rows"], columns),
        "Reader less ranker, by question, averaged within each conversation; 95% interval by t over conversations.",
        markdown_table(("k", "picks", "metric", "n", "difference", "interval"), paired),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    measure(__doc__, "order", {"picks": picks}, head, markdown)
