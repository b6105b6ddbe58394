"""Evaluation on held-out conversations: every policy in one table, measured by the same functions."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cuewalk.env import Question, RetrievalEnv, Tasks
from cuewalk.env.tasks import DataError, select, splits
from cuewalk.judges import TrajectoryJudge
from cuewalk.memory import MemoryGraph, SentenceEncoder
from cuewalk.memory.models import load_language_model, load_tokenizer
from cuewalk.rl import baselines
from cuewalk.rl.config import Config, ConfigError
from cuewalk.rl.data import load_graphs, load_part
from cuewalk.rl.measures import Measures, measure_entries, measure_walk
from cuewalk.rl.report import write_report
from cuewalk.rl.rollout import walk
from cuewalk.rl.run import provenance
from cuewalk.rl.sampler import TransformersSampler
from cuewalk.rl.statistics import compare
from cuewalk.rl.transcript import Chat

ByQuestion = dict[str, Measures]
TOP_K = (5, 8, 10, 20)
COMPARED = ("recall_at_8", "recall_at_300t", "evidence_recall", "reward")


@dataclass(frozen=True)
class Bench:
    """What every policy is measured on."""

    config: Config
    tasks: Tasks
    graphs: dict[str, MemoryGraph]
    judge: TrajectoryJudge
    chat: Chat

    @cached_property
    def count_tokens(self) -> Callable[[str], int]:
        """Return the function that counts a text's tokens by the model's tokenizer."""
        return lru_cache(maxsize=None)(lambda text: len(self.chat.untrusted(text)))

    def entries(self, question: Question, entries: Sequence[str]) -> Measures:
        """Measure a working set."""
        graph, gold = self.graphs[question.conversation_id], self.tasks.gold[question.id]
        return measure_entries(graph, question, gold, entries, self.count_tokens, self.config.judge.similarity)


def evaluate(config: Config, prefix: Path | None = None) -> tuple[dict[str, Any], list[Path]]:
    """Measure all policies; write JSON, Markdown and plots; return the result and the files.

    Policies without a model see all questions of the part; those with one see `evaluation.model_questions`. Both
    are also given on the model's questions, so that the rows of one table compare.

    Args:
        config: Of a run that was trained.
        prefix: Where the files go and how their names begin; `run_dir/evaluation` where None.
    """
    run = Path(config.run_dir)
    if not (run / "config.json").exists():
        raise ConfigError(f"no run in {run}; train one first with `cuewalk train --config …`")
    chat = Chat(load_tokenizer(config.model))
    encoder = SentenceEncoder(config.encoder)
    part = select(load_part(config.data, config.evaluation.part), evidence=True)
    train = select(load_part(config.data, "train"), evidence=True, clean=True)
    val = select(load_part(config.data, "val"), evidence=True)
    if not part.questions or not val.questions:
        raise DataError("no held-out question has gold evidence; the `evidence` judge can't score any")
    graphs = load_graphs(config, _all(part, train, val), encoder)
    judge = TrajectoryJudge(config.judge)
    bench = Bench(config, part, graphs, judge, chat)
    ranker = baselines.Ranker(config.seed)
    ranker.fit(train, val, graphs, config.env, judge)
    found: dict[str, ByQuestion] = {}
    for k in TOP_K:
        found[f"top_k={k}"] = measure_search(bench, k)
    scripted: dict[str, baselines.Scripted] = {
        "stop": baselines.stop,
        "random": baselines.random_walk,
        "expand_top=1": baselines.expand_top(1),
        "expand_top=3": baselines.expand_top(3),
        "expand_all": baselines.expand_top(config.env.budget),
        "ranker": ranker,
        "oracle": baselines.oracle,
    }
    for name, policy in scripted.items():
        found[name] = measure_scripted(bench, policy, name)
    asked = model_questions(config, part)
    for name, model, grammar in policies_with_model(config, run):
        found[name] = measure_model(bench, asked, model(), name, grammar=grammar)
    result = summarise(config, bench, found, [question.id for question in asked])
    return result, write_report(result, run / "metrics.jsonl", prefix or run / "evaluation")


def _all(*parts: Tasks) -> Tasks:
    conversations = {id_: c for part in parts for id_, c in part.conversations.items()}
    return Tasks(conversations, (), {})


def model_questions(config: Config, part: Tasks) -> tuple[Question, ...]:
    """Return the questions that policies with a model are measured on."""
    wanted = config.evaluation.model_questions
    if wanted == "all":
        return part.questions
    if wanted == "test_200":
        listed = splits()[config.data.split].get("test_200")
        if config.data.source != "locomo" or config.evaluation.part != "test" or listed is None:
            raise ConfigError("evaluation.model_questions = test_200 is a list for LoCoMo conv-4-1-5, part test")
        return select(part, ids=listed).questions
    chosen = sorted(part.questions, key=lambda q: hashlib.sha256(q.id.encode()).hexdigest())[: int(wanted)]
    return select(part, ids=[question.id for question in chosen]).questions


def policies_with_model(config: Config, run: Path) -> list[tuple[str, Callable[[], Any], bool]]:
    """Return (name, loader, under the grammar) of each policy that this run can show."""
    from cuewalk.rl.train import load_adapter  # peft is loaded only where an adapter is

    def base() -> Any:
        return load_language_model(config.model, config.dtype)

    rows: list[tuple[str, Callable[[], Any], bool]] = [
        ("untrained", base, False),
        ("untrained_grammar", base, True),
    ]
    for name in ("warm_start", "trained"):
        if (run / name / "adapter_config.json").exists():
            rows.append((name, lambda name=name: load_adapter(config, run / name), False))  # type: ignore[misc]
    return rows


def measure_search(bench: Bench, k: int) -> ByQuestion:
    """Measure plain search: no environment, so no reward."""
    found = {}
    for question in bench.tasks.questions:
        started = time.perf_counter()
        entries = baselines.search_only(bench.graphs[question.conversation_id], question, k)
        seconds = time.perf_counter() - started
        found[question.id] = bench.entries(question, entries) | {"inference_tokens": 0.0, "seconds": seconds}
    return found


def measure_scripted(bench: Bench, policy: baselines.Scripted, name: str) -> ByQuestion:
    """Measure a policy without a model."""
    found = {}
    for question in tqdm(bench.tasks.questions, desc=name, unit="question", disable=None):
        graph, gold = bench.graphs[question.conversation_id], bench.tasks.gold[question.id]
        started = time.perf_counter()
        trajectory = baselines.run_scripted(policy, RetrievalEnv(graph, question, bench.config.env), gold)
        seconds = time.perf_counter() - started
        reward = bench.judge.score(trajectory, graph, gold).reward
        walked = measure_walk(trajectory, reward) | {"inference_tokens": 0.0, "seconds": seconds}
        found[question.id] = bench.entries(question, trajectory.working) | walked
    return found


def measure_model(
    bench: Bench, questions: Sequence[Question], model: Any, name: str, *, grammar: bool = False
) -> ByQuestion:
    """Measure a policy with a language model, greedy; letters in order, as it is served."""
    sampling, size = bench.config.sampling, bench.config.evaluation.batch
    found = {}
    bar = tqdm(total=len(questions), desc=name, unit="question", disable=None)
    for start in range(0, len(questions), size):
        batch = questions[start : start + size]
        envs = [[RetrievalEnv(bench.graphs[q.conversation_id], q, bench.config.env)] for q in batch]
        sampler = TransformersSampler(model, bench.chat.end, sampling.max_action_tokens, temperature=0)
        started = time.perf_counter()
        groups = walk(
            envs,
            sampler,
            bench.chat,
            seeds=[0] * len(batch),
            shuffle_labels=False,
            max_tokens=sampling.max_tokens,
            grammar_tokens=sampling.max_action_tokens if grammar else None,
        )
        seconds = (time.perf_counter() - started) / len(batch)
        for question, (row,) in zip(batch, groups, strict=True):
            graph, gold = bench.graphs[question.conversation_id], bench.tasks.gold[question.id]
            reward = bench.judge.score(row.finished, graph, gold).reward
            tokens = float(len(row.prompt) + len(row.completion))
            walked = measure_walk(row.finished, reward) | {"inference_tokens": tokens, "seconds": seconds}
            found[question.id] = bench.entries(question, row.finished.working) | walked
            bar.update()
    bar.close()
    return found


def summarise(config: Config, bench: Bench, found: dict[str, ByQuestion], asked: Sequence[str]) -> dict[str, Any]:
    """Turn measures by question into the one results form: rows, and paired comparisons on common questions."""
    everyone = [question.id for question in bench.tasks.questions]
    clean = {id_ for id_ in everyone if bench.tasks.gold[id_].clean}
    rows = []
    for policy, measured in found.items():
        row = _mean_row(policy, measured, list(measured), "all" if len(measured) == len(everyone) else "asked")
        rows.append(row | {"recall_at_8_clean": _mean(measured, [i for i in measured if i in clean], "recall_at_8")})
        if len(asked) < len(everyone) and len(measured) == len(everyone):
            rows.append(_mean_row(policy, measured, asked, "asked"))
    conversation = {question.id: question.conversation_id for question in bench.tasks.questions}
    comparisons = []
    pairs = [("trained", other) for other in ("stop", "top_k=8", "untrained_grammar", "ranker", "warm_start")]
    for a, b in [*pairs, ("ranker", "top_k=8"), ("oracle", "stop")]:
        for metric in COMPARED:
            if a in found and b in found and (pair := _paired(found[a], found[b], metric)):
                comparisons.append({"metric": metric, "a": a, "b": b, **compare(*pair, conversation)})
    return {
        "name": Path(config.run_dir).name,
        **provenance(),
        "seeds": [config.seed],
        "data": {
            "dataset": config.data.source,
            "split": f"{config.data.split}/{config.evaluation.part}"
            if config.data.source == "locomo"
            else f"seed {config.data.seed}/{config.evaluation.part}",
            "n": len(everyone),
            "n_clean": len(clean),
            "n_asked": len(asked),
            "asked": list(asked) if len(asked) < len(everyone) else "all",
        },
        "rows": rows,
        "comparisons": comparisons,
        "training": _training_facts(Path(config.run_dir)),
    }


def _mean_row(policy: str, measured: ByQuestion, ids: Sequence[str], questions: str) -> dict[str, Any]:
    names = dict.fromkeys(name for id_ in ids for name in measured[id_])
    means = {name: _mean(measured, ids, name) for name in names}
    return {"policy": policy, "questions": questions, "n": len(ids), "reward": None, **means}


def _mean(measured: ByQuestion, ids: Sequence[str], name: str) -> float | None:
    values = [value for id_ in ids if (value := measured[id_].get(name)) is not None]
    return float(np.mean(values)) if values else None


def _paired(a: ByQuestion, b: ByQuestion, metric: str) -> tuple[dict[str, float], dict[str, float]] | None:
    """Return both policies' values on the questions that both were measured on."""
    left, right = {}, {}
    for id_ in a.keys() & b.keys():
        x, y = a[id_].get(metric), b[id_].get(metric)
        if x is not None and y is not None:
            left[id_], right[id_] = x, y
    return (left, right) if left else None


def _training_facts(run: Path) -> dict[str, Any]:
    """Return what a reader wants to know of the training: steps, groups, live ones, seconds."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = {line["step"]: line for line in lines if line["stage"] == "grpo" and "groups/live" in line}
    runtime = {line["stage"]: line["train_runtime"] for line in lines if "train_runtime" in line}
    return {
        "grpo_steps": len(steps),
        "groups": sum(int(line["groups/all"]) for line in steps.values()),
        "groups_live": sum(int(line["groups/live"]) for line in steps.values()),
        "groups_replaced": sum(int(line["groups/replaced"]) for line in steps.values()),
        "seconds": runtime,
    }
