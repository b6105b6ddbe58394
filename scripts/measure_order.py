"""Measure the order of the candidates on LoCoMo, and what a reader adds to it: docs/results/order.{json,md}.

    CUEWALK_DATA=path/to/data python -m cuewalk.scripts.measure_order [--out docs/results/order]

On the conversations that settings are chosen on (26, 30, 41, 43, 47), each half with a ranker, and a reader, trained on
the other half. What is trained is kept in checkpoints/order: the same command goes on where it ended.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cuewalk.env import Rank, RetrievalEnv, Tasks
from cuewalk.env.tasks import select
from cuewalk.judges import evidence_recall
from cuewalk.memory import BuildConfig, MemoryGraph
from cuewalk.rl.config import Config, load_config
from cuewalk.rl.order import blind_parts, fit_part, readings
from cuewalk.rl.reading import Reading, fit_reading
from cuewalk.scripts.baselines import expand_top, run_scripted
from cuewalk.scripts.measure_memory import build, head, load, tokens
from cuewalk.scripts.measures import measure_entries, tokens_read
from cuewalk.scripts.paired import compare
from cuewalk.scripts.results import interval, made_by, markdown_table, measure, table

EPOCHS = {"ranker": 0, "reader": 0, "trained reader": 1}  # of the reader's training, by order
PAIRS = (("reader", "ranker"), ("trained reader", "reader"), ("trained reader", "ranker"))
KS, COUNTS = (3,), (1, 2, 3, 4)
METRICS = ("recall_at_8", "recall_at_300t", "evidence_recall")
NAMES = (*METRICS, "context_tokens", "inference_tokens", "reward")


def ranks(config: Config, run: Path, tasks: Tasks, graphs: Mapping[str, MemoryGraph]) -> dict[str, Reading]:
    """Return what orders each conversation, fitted and trained on the half of them that it is not in."""
    parts = blind_parts(config, run, tasks)
    for folder, hidden in parts.items():
        fit_part(config, folder, hidden, tasks, graphs)
    found = readings(config, parts)
    weights = fit_reading(found, tasks, graphs, config.env)
    return {id_: replace(own, ranker=replace(own.ranker, reading=weights)) for id_, own in found.items()}


def picks() -> dict[str, list[dict[str, Any]]]:
    """Measure a first search of k entries, then so many candidates as they are ordered; by order, k and count."""
    recipe = load_config(Path(__file__).parents[1] / "configs" / "locomo_cpu.yaml")
    tasks, graphs = load("dev"), build("dev", BuildConfig())
    known = select(tasks, clean=True)
    found: dict[tuple[str, int, int], dict[str, list[Any]]] = defaultdict(dict)
    for order, epochs in EPOCHS.items():
        config = replace(recipe, reading=replace(recipe.reading, epochs=epochs))
        by_conversation = ranks(config, Path("checkpoints/order") / str(epochs), known, graphs)
        for k, question in tqdm(list(product(KS, tasks.questions)), desc=order, unit="question", disable=None):
            gold, rules = tasks.gold[question.id], replace(recipe.env, k=k)
            own_rank = by_conversation[question.conversation_id]
            rank: Rank = own_rank.ranker if order == "ranker" else own_rank
            walker = RetrievalEnv(graphs[question.conversation_id], question, rules, rank=rank)
            read, walked = float(tokens_read(walker)), run_scripted(expand_top(rules.budget), walker, gold)
            first = evidence_recall(walker.graph, walked.first, gold)
            for count in range(rules.budget + 1):
                entries = walked.working[: k + count]
                own = measure_entries(walker.graph, question, gold, entries, tokens, recipe.judge.similarity)
                gain = evidence_recall(walker.graph, entries, gold) - first
                own |= {"inference_tokens": read, "reward": gain - recipe.judge.price * count}
                found[order, k, count][question.id] = [own[name] for name in NAMES]
    rows = [
        {"order": order, "k": k, "picks": count, **dict(zip(NAMES, np.mean(list(own.values()), axis=0), strict=True))}
        for (order, k, count), own in found.items()
    ]
    conversation = {question.id: question.conversation_id for question in tasks.questions}
    pairs = []
    for (a, b), k, count, name in product(PAIRS, KS, COUNTS, METRICS):
        one, other = ({id_: row[NAMES.index(name)] for id_, row in found[of, k, count].items()} for of in (a, b))
        pairs.append({"a": a, "b": b, "k": k, "picks": count, "metric": name, **compare(one, other, conversation)})
    return {"rows": rows, "pairs": pairs}


def markdown(result: dict[str, Any]) -> str:
    """Return the result as tables."""
    columns = ("order", "k", "picks", *NAMES)
    paired = [
        (f"{row['a']} − {row['b']}", *(row[key] for key in ("k", "picks", "metric", "n")), f"{row['difference']:+.3f}",
         interval(row["low"], row["high"]))
        for row in result["picks"]["pairs"]
    ]  # fmt: skip
    parts = [
        "# The order of the candidates, measured",
        f"{made_by(result)} LoCoMo, conversations 26, 30, 41, 43, 47 (n = {result['data']['n_dev']}), the frontier of "
        "configs/locomo_cpu.yaml. A first search of k entries, then so many candidates, as a ranker orders them "
        "(`ranker`), or with SmolLM2-135M reading its best twelve, as it is (`reader`) or trained to read (`trained "
        "reader`); each trained on the half of these conversations that the one ordered is not in. `reward` is what "
        "the picks earn at the default price, `inference_tokens` what the reader read.",
        table(result["picks"]["rows"], columns),
        "By question, averaged within each conversation; 95% interval by t over conversations.",
        markdown_table(("a − b", "k", "picks", "metric", "n", "difference", "interval"), paired),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    measure(__doc__, "order", {"picks": picks}, head, markdown)
