"""Evaluation on held-out conversations: every policy in one table, measured by the same functions."""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cuewalk.env import Question, RetrievalEnv, Tasks, Trajectory
from cuewalk.env.tasks import DataError, select, splits
from cuewalk.judges import TrajectoryJudge
from cuewalk.memory import MemoryGraph, SentenceEncoder
from cuewalk.memory.models import load_language_model, load_tokenizer
from cuewalk.rl import baselines
from cuewalk.rl.config import Config, ConfigError
from cuewalk.rl.data import load_graphs, load_part
from cuewalk.rl.measures import Measures, measure_entries, measure_walk
from cuewalk.rl.oracle import oracle_action
from cuewalk.rl.report import write_report
from cuewalk.rl.rollout import walk_greedily
from cuewalk.rl.run import provenance, read_metrics
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

    def measure(
        self, question: Question, found: Sequence[str] | Trajectory, seconds: float, tokens: int = 0
    ) -> Measures:
        """Measure a working set, or a walk and the set it ended with; `tokens` are the language model's."""
        graph, gold = self.graphs[question.conversation_id], self.tasks.gold[question.id]
        entries = found.working if isinstance(found, Trajectory) else found
        measures = measure_entries(graph, question, gold, entries, self.count_tokens, self.config.judge.similarity)
        if isinstance(found, Trajectory):
            measures |= measure_walk(found, self.judge.score(found, graph, gold).reward)
        return measures | {"inference_tokens": float(tokens), "seconds": seconds}


def evaluate(config: Config, prefix: Path | None = None) -> tuple[dict[str, Any], list[Path]]:
    """Measure all policies of a trained run; write JSON, Markdown and plots; return the result and the files.

    Policies without a model see all questions of the part; those with one see `evaluation.model_questions`. Both
    are also given on the model's questions, so that the rows of one table compare. `prefix` is where the files go
    and how their names begin, by default `run_dir/evaluation`.
    """
    run = Path(config.run_dir)
    if not (run / "config.json").exists():
        raise ConfigError(f"no run in {run}; train one first with `cuewalk train --config …`")
    chat = Chat(load_tokenizer(config.model))
    part = select(load_part(config.data, config.evaluation.part), evidence=True)
    train = select(load_part(config.data, "train"), evidence=True, clean=True)
    val = select(load_part(config.data, "val"), evidence=True)
    if not part.questions or not val.questions:
        raise DataError("no held-out question has gold evidence; the `evidence` judge can't score any")
    conversations = {**part.conversations, **train.conversations, **val.conversations}
    graphs = load_graphs(config, conversations, SentenceEncoder(config.encoder))
    judge = TrajectoryJudge(config.judge)
    bench = Bench(config, part, graphs, judge, chat)
    ranker = baselines.Ranker(config.seed)
    ranker.fit(train, val, graphs, config.env, judge)
    found = {f"top_k={k}": measure_search(bench, k) for k in TOP_K}
    scripted: dict[str, baselines.Scripted] = {
        "stop": baselines.expand_top(0),
        "random": baselines.random_walk,
        "expand_top=1": baselines.expand_top(1),
        "expand_top=3": baselines.expand_top(3),
        "expand_all": baselines.expand_top(config.env.budget),
        "ranker": ranker,
        "oracle": oracle_action,
    }
    found |= {name: measure_scripted(bench, policy, name) for name, policy in scripted.items()}
    asked = model_questions(config, part)
    from cuewalk.rl.train import load_adapter  # peft is loaded only where an adapter is

    base = partial(load_language_model, config.model, config.dtype)
    adapters = [name for name in ("warm_start", "trained") if (run / name / "adapter_config.json").exists()]
    models = {"untrained": base, "untrained_grammar": base}
    models |= {name: partial(load_adapter, config, run / name) for name in adapters}
    for name, load in models.items():
        found[name] = measure_model(bench, asked, load(), name, grammar=name == "untrained_grammar")
    result = summarise(bench, found, [question.id for question in asked])
    return result, write_report(result, run / "metrics.jsonl", prefix or run / "evaluation")


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


def measure_search(bench: Bench, k: int) -> ByQuestion:
    """Measure plain search: no environment, so no reward."""
    found = {}
    for question in bench.tasks.questions:
        started = time.perf_counter()
        entries = [hit.entry for hit in bench.graphs[question.conversation_id].search(question.text, k)]
        found[question.id] = bench.measure(question, entries, time.perf_counter() - started)
    return found


def measure_scripted(bench: Bench, policy: baselines.Scripted, name: str) -> ByQuestion:
    """Measure a policy without a model."""
    found = {}
    for question in tqdm(bench.tasks.questions, desc=name, unit="question", disable=None):
        started = time.perf_counter()
        env = RetrievalEnv(bench.graphs[question.conversation_id], question, bench.config.env)
        trajectory = baselines.run_scripted(policy, env, bench.tasks.gold[question.id])
        found[question.id] = bench.measure(question, trajectory, time.perf_counter() - started)
    return found


def measure_model(bench: Bench, questions: Sequence[Question], model: Any, name: str, grammar: bool) -> ByQuestion:
    """Measure a policy with a language model, as it is served."""
    config, found = bench.config, {}
    with tqdm(total=len(questions), desc=name, unit="question", disable=None) as bar:
        for start in range(0, len(questions), config.evaluation.batch):
            batch = questions[start : start + config.evaluation.batch]
            envs = [RetrievalEnv(bench.graphs[q.conversation_id], q, config.env) for q in batch]
            started = time.perf_counter()
            rows = walk_greedily(envs, model, bench.chat, config.sampling, grammar=grammar)
            seconds = (time.perf_counter() - started) / len(batch)
            for question, row in zip(batch, rows, strict=True):
                tokens = len(row.prompt) + len(row.completion)
                found[question.id] = bench.measure(question, row.trajectory, seconds, tokens)
                bar.update()
    return found


def summarise(bench: Bench, found: dict[str, ByQuestion], asked: Sequence[str]) -> dict[str, Any]:
    """Turn measures by question into the one results form: rows, and paired comparisons on common questions."""
    config, gold = bench.config, bench.tasks.gold
    conversation = {question.id: question.conversation_id for question in bench.tasks.questions}
    everyone = list(conversation)
    rows = []
    for policy, measured in found.items():
        row = _mean_row(policy, measured, list(measured), "all" if len(measured) == len(everyone) else "asked")
        clean = [id_ for id_ in measured if gold[id_].clean]
        rows.append(row | {"recall_at_8_clean": _mean(measured, clean, "recall_at_8")})
        if len(asked) < len(everyone) and len(measured) == len(everyone):
            rows.append(_mean_row(policy, measured, asked, "asked"))
    comparisons = []
    pairs = [("trained", other) for other in ("stop", "top_k=8", "untrained_grammar", "ranker", "warm_start")]
    for a, b in [*pairs, ("ranker", "top_k=8"), ("oracle", "stop")]:
        for metric in COMPARED:
            left, right = _known(found.get(a, {}), metric), _known(found.get(b, {}), metric)
            if both := left.keys() & right.keys():
                paired = compare({i: left[i] for i in both}, {i: right[i] for i in both}, conversation)
                comparisons.append({"metric": metric, "a": a, "b": b, **paired})
    part = config.evaluation.part
    return {
        "name": Path(config.run_dir).name,
        **provenance(),
        "seeds": [config.seed],
        "data": {
            "dataset": config.data.source,
            "split": f"{config.data.split}/{part}" if config.data.source == "locomo" else part,
            "n": len(everyone),
            "n_clean": sum(gold[id_].clean for id_ in everyone),
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


def _mean(measured: ByQuestion, ids: Iterable[str], name: str) -> float | None:
    known = _known(measured, name)
    values = [known[id_] for id_ in ids if id_ in known]
    return float(np.mean(values)) if values else None


def _known(measured: ByQuestion, name: str) -> dict[str, float]:
    return {id_: value for id_, measures in measured.items() if (value := measures.get(name)) is not None}


def _training_facts(run: Path) -> dict[str, Any]:
    """Return what a reader wants to know of the training: steps, groups, live ones, seconds."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    steps, seconds = read_metrics(path)
    return {
        "grpo_steps": len(steps),
        "groups": sum(int(line["groups/all"]) for line in steps.values()),
        "groups_live": sum(int(line["groups/live"]) for line in steps.values()),
        "groups_replaced": sum(int(line["groups/replaced"]) for line in steps.values()),
        "seconds": seconds,
    }
