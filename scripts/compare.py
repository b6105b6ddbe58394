"""The comparison: every kind of system of the papers, on the same questions, memories, encoder and counting.

A row is there when what it needs is: the trained policy and the ranker where the run directory holds them, the second
stage of xMemory where `compare.reader` names a model, Memora's prompted policy where `compare.endpoint` does. Every
system's measures are kept question by question beside the result, and only what is missing or failed is run again.
"""

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from tqdm import tqdm

from cuewalk.env import DataError, Gold, Question, RetrievalEnv, Tasks, Trajectory
from cuewalk.env.tasks import UNANSWERABLE, select
from cuewalk.judges import JudgeError, Verdict
from cuewalk.judges.answers import score_answer
from cuewalk.judges.correctness import ByEndpoint
from cuewalk.memory import MemoryGraph, SentenceEncoder
from cuewalk.memory.build import build_digest
from cuewalk.memory.endpoint import EndpointError
from cuewalk.memory.reader import TooLong
from cuewalk.rl.config import Config, ConfigError, config_tree
from cuewalk.rl.data import load_graphs, load_part
from cuewalk.rl.run import provenance
from cuewalk.rl.transcript import TranscriptError
from cuewalk.scripts.blocks import Retrieve, Retrieved, measure_blocks
from cuewalk.scripts.evaluate import first_by_digest
from cuewalk.scripts.measures import Measures, measure_walk
from cuewalk.scripts.paired import compare as compare_paired
from cuewalk.scripts.systems import Kit, System, list_systems, parse_options, walking_rules

MEASURING = "1"
"""Raised whenever the same retrieval would be measured differently: kept rows are then made anew."""

COMPARED = ("recall_at_8", "recall_at_300t", "evidence_recall", "answer_f1", "judge")
RIVALS = ("top_k=8", "trained")
ASK = """
If the memories do not answer the question, the answer is: Not mentioned.
Question: {question}
Short answer:"""
ABSTAINED = ("not mentioned", "no information available")
"""What LoCoMo counts as an abstention, wherever it stands in an answer (category 5)."""
SAVE_EVERY = 20
GIVE_UP = 3
"""Questions in a row at which an endpoint fails before a system is left for the next start."""

Row = dict[str, Any]
"""One question's measures of one system; with `error` alone where it failed, and `actions` where it walked."""


@dataclass(frozen=True)
class Contest:
    """What every system is measured on."""

    kit: Kit
    tasks: Tasks  #: The whole part, with evidence.
    questions: tuple[Question, ...]  #: Those asked.
    unanswerable: tuple[Question, ...]  #: Asked too, and measured by whether the reader abstains.
    rows: Path  #: Where measures are kept.

    @cached_property
    def base_key(self) -> str:
        """Return a digest of what every system's measures depend on."""
        config = self.kit.config
        told = self.tasks.conversations.values()
        memories = sorted(build_digest(conversation, config.memory, config.encoder) for conversation in told)
        gold = sorted((q.id, q.text, repr(self.tasks.gold[q.id])) for q in self.tasks.questions)
        reader = self.kit.options.reader and (self.kit.options.reader, ASK)
        asked = (reader, self.kit.options.judge and self.kit.options.endpoint)
        whole = repr((MEASURING, memories, gold, config.model, config.judge, asked))
        return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()

    def path(self, system: System) -> Path:
        """Return the file of a system's rows; its name holds the digest of all that they depend on."""
        digest = hashlib.sha256(f"{self.base_key} {system.key}".encode()).hexdigest()[:12]
        return self.rows / f"{re.sub(r'[^A-Za-z0-9=.]+', '_', system.name)}-{digest}.json"

    def measure(self, system: System) -> dict[str, Row]:
        """Return a system's rows by question; what is missing or failed before is run."""
        path = self.path(system)
        kept = _read_rows(path)
        todo = [q for q in (*self.questions, *self.unanswerable) if "error" in kept.get(q.id, {"error": ""})]
        if not todo:
            return kept
        retrieve = system.load()
        # Read anew for each system: none finds the searches that another one did remembered.
        needed = {q.conversation_id: self.tasks.conversations[q.conversation_id] for q in todo}
        graphs = load_graphs(self.kit.config, needed, SentenceEncoder(self.kit.config.encoder))
        warm, failures = set[str](), 0
        for asked, question in enumerate(tqdm(todo, desc=system.name, unit="question", disable=None), start=1):
            graph = graphs[question.conversation_id]
            if graph.conversation.id not in warm:  # indexes are built before the clock starts
                warm.add(graph.conversation.id)
                graph.search("warm up", 1)
                if not system.model:
                    retrieve(graph, replace(question, text="warm up"))
            kept[question.id] = self.measure_one(retrieve, graph, question)
            failures = failures + 1 if "error" in kept[question.id] else 0
            if asked % SAVE_EVERY == 0:
                _write_rows(path, system, kept)
            if failures == GIVE_UP:
                break
        _write_rows(path, system, kept)
        return kept

    def measure_one(self, retrieve: Retrieve, graph: MemoryGraph, question: Question) -> Row:
        """Ask one question; a failure of an endpoint, a judge or a transcript is a row that says so."""
        gold = self.tasks.gold[question.id]
        try:
            started = time.perf_counter()
            found = retrieve(graph, question)
            seconds = time.perf_counter() - started
            if gold.category == UNANSWERABLE:
                said = self.ask(question, found)
                return {"question": question.id, "abstained": None if said is None else float(abstains(said))}
            count, similarity = self.kit.chat.count, self.kit.config.judge.similarity
            row: Row = {**measure_blocks(graph, question, gold, found, count, similarity), "seconds": seconds}
            if (walk := found.trajectory) is not None:
                row |= measure_walk(graph, walk, gold, self.kit.judge.score(walk, graph, gold).reward)
                row["actions"] = [step.text for step in walk.steps]
            if self.kit.options.reader is not None:
                row |= self.answer(question, gold, found)
        except (EndpointError, JudgeError, TranscriptError) as error:
            return {"question": question.id, "error": str(error)}
        return {"question": question.id, **row}

    def ask(self, question: Question, found: Retrieved) -> str | None:
        """Let the reader answer from the blocks; None where they are longer than the model can read."""
        reader = self.kit.reader
        text = "Memories:\n" + "".join(f"{block.text}\n" for block in found.blocks)
        ask = ASK.format(question=" ".join(question.text.split()))
        try:
            return reader.answer(reader.read(text), ask)
        except TooLong:
            return None

    def answer(self, question: Question, gold: Gold, found: Retrieved) -> Measures:
        """Measure the reader's answer; all None where there is none."""
        before, said = self.kit.reader.tokens, self.ask(question, found)
        if said is None:
            return {name: None for name in (*score_answer("", gold), "abstained_wrongly")}
        measures: Measures = {**score_answer(said, gold), "abstained_wrongly": float(abstains(said))}
        measures["reader_tokens"] = float(self.kit.reader.tokens - before)
        if self.kit.options.judge:
            measures["judge"] = float(ByEndpoint(self.kit.endpoint).grade(question.text, said, gold.answer))
        return measures


def compare(config: Config, out: Path) -> dict[str, Any]:
    """Measure every system; return the one results form, with what is efficient and what was published beside.

    Rows are kept in the folder `out` with `.rows` after its name. A ConfigError if a system is asked for by a name
    there is none of, or one that lacks what it needs; a DataError if there is no question with evidence.
    """
    contest = prepare(config, out)
    systems = chosen_systems(contest)
    return summarise(contest, out.name, systems, {system.name: contest.measure(system) for system in systems})


def prepare(config: Config, out: Path) -> Contest:
    """Return what is compared on; a ConfigError or DataError as `compare` says."""
    options = parse_options(config)
    part = select(load_part(config.data, config.evaluation.part), evidence=True)
    questions = part.questions
    if options.questions != "all":
        chosen = first_by_digest(questions, options.questions)
        questions = select(part, ids=[question.id for question in chosen]).questions
    if not questions:
        raise DataError("no question of this part has gold evidence; there is nothing to compare by")
    none, rows = tuple[Question, ...](), out.with_name(f"{out.name}.rows")
    if options.unanswerable:
        apart = load_part(config.data, config.evaluation.part, unanswerable=True)
        known = {**part.conversations, **apart.conversations}, part.questions, {**part.gold, **apart.gold}
        part, none = Tasks(*known), tuple(first_by_digest(apart.questions, options.unanswerable))
    return Contest(Kit(config, options, part.gold), part, questions, none, rows)


def abstains(answer: str) -> bool:
    """Tell whether an answer says that nothing answers."""
    return any(sign in answer.lower() for sign in ABSTAINED)


def chosen_systems(contest: Contest) -> list[System]:
    """Return the systems asked for; a ConfigError where one has not what it needs, or there is none of that name."""
    systems, wanted = list_systems(contest.kit), contest.kit.options.systems
    if unknown := set(wanted or ()) - systems.keys():
        raise ConfigError(
            f"compare.systems: no {', '.join(sorted(unknown))} here; there are {', '.join(systems)} (others need "
            f"compare.reader, compare.endpoint, memory.groups, or a trained run in run_dir)"
        )
    return [system for name, system in systems.items() if wanted is None or name in wanted]


def _read_rows(path: Path) -> dict[str, Row]:
    if not path.exists():
        return {}
    try:
        return {row["question"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} holds no rows of a comparison ({error}); delete it to measure that system anew"
        ) from error


def _write_rows(path: Path, system: System, rows: Mapping[str, Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"system": system.name, "idea": system.idea, "rows": list(rows.values())}
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(tree) + "\n", encoding="utf-8")
    partial.replace(path)  # whole or not at all


def summarise(
    contest: Contest, name: str, systems: Sequence[System], measured: Mapping[str, Mapping[str, Row]]
) -> dict[str, Any]:
    """Turn every system's rows into the one results form."""
    config, tasks, asked = contest.kit.config, contest.tasks, contest.questions
    good = {
        s: [rows[q.id] for q in asked if "error" not in rows.get(q.id, {"error": ""})] for s, rows in measured.items()
    }
    table = {s: pd.DataFrame(rows).set_index("question") for s, rows in good.items() if rows}
    clean = [question.id for question in asked if tasks.gold[question.id].clean]
    construction = 0 if config.memory.extractor == "offline" else None  # a model's tokens are not kept with a memory
    rows = []
    for system in (system for system in systems if system.name in table):
        own = table[system.name]
        means = own.drop(columns="actions", errors="ignore").astype(float).mean()
        row = {key: None if pd.isna(value) else float(value) for key, value in means.items()}
        at_clean = own["recall_at_8"].reindex(clean).mean()
        said = [measured[system.name].get(question.id, {}).get("abstained") for question in contest.unanswerable]
        silent = [value for value in said if value is not None]
        used = float((own["context_tokens"] + own["inference_tokens"]).sum())
        rows.append({
            "policy": system.name, "idea": system.idea, "questions": "all", "n": len(own),
            "failed": len(asked) - len(own), "reward": None, **row,
            "recall_at_8_clean": None if pd.isna(at_clean) else float(at_clean),
            "seconds_p50": float(own["seconds"].quantile(0.5)), "seconds_p95": float(own["seconds"].quantile(0.95)),
            "construction_tokens": construction,
            "abstained": sum(silent) / len(silent) if silent else None,
            "total_tokens": None if construction is None else construction + used,
        })  # fmt: skip
    source = config.data.source
    return {
        "name": name,
        **provenance(),
        "seeds": [config.seed],
        "data": {
            "dataset": source,
            "split": f"{config.data.split}/{config.evaluation.part}" if source == "locomo" else config.evaluation.part,
            "n": len(asked),
            "n_part": len(tasks.questions),
            "n_clean": len(clean),
            "n_silver": sum(tasks.gold[question.id].silver for question in asked),
            "n_unanswerable": len(contest.unanswerable),
        },
        "settings": {key: config_tree(config)[key] for key in ("encoder", "model", "memory", "env", "compare")},
        "rows": rows,
        "comparisons": compare_all(table, {question.id: question.conversation_id for question in asked}),
        "efficient": efficient(rows),
        "published": json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8")),
    }


def compare_all(table: Mapping[str, pd.DataFrame], conversation: Mapping[str, str]) -> list[dict[str, Any]]:
    """Compare every system with each rival, by question, on those that both were asked.

    `p` is of a t-test over the conversations' mean differences (None with fewer than two), `p_questions` over the
    questions' differences; `p_holm` and `p_questions_holm` are corrected for all comparisons of that metric.
    """
    found: list[dict[str, Any]] = []
    for metric in COMPARED:
        own = []
        for place, rival in enumerate(RIVALS):
            for system in (system for system in table if system not in RIVALS[: place + 1]):  # each pair once
                if rival not in table or not all(metric in table[side] for side in (system, rival)):
                    continue
                both = pd.concat([table[system][metric], table[rival][metric]], axis=1, keys=["a", "b"]).dropna()
                if both.empty:
                    continue
                paired = compare_paired(both["a"].to_dict(), both["b"].to_dict(), conversation)
                means = list(paired["by_conversation"].values())
                tests = {"p": p_value(means), "p_questions": p_value(list(both["a"] - both["b"]))}
                few = paired["by_conversation"] if len(means) <= 20 else None  # of hundreds nobody reads each
                own.append({"metric": metric, "a": system, "b": rival, **paired, "by_conversation": few, **tests})
        for name in ("p", "p_questions"):
            for row, corrected in zip(own, holm([row[name] for row in own]), strict=True):
                row[f"{name}_holm"] = corrected
        found += own
    return found


def p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p of a one-sample t-test against 0; 1 where all are 0, None with fewer than two."""
    if len(differences) < 2:
        return None
    if np.ptp(differences) == 0:  # no spread: the test divides by it
        return 1.0 if differences[0] == 0 else 0.0
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for their number (Holm 1979); those that are None are no comparison."""
    order = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (value, place) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * value))
        corrected[place] = highest
    return corrected


def efficient(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the systems beside which none shows more evidence in no more context tokens, the fewest tokens first.

    The oracle, which sees the gold, is not counted.
    """
    found, highest = list[str](), -1.0
    for row in sorted(rows, key=lambda row: (row["context_tokens"], -row["evidence_recall"])):
        if row["policy"] != "oracle" and row["evidence_recall"] > highest:
            highest = row["evidence_recall"]
            found.append(row["policy"])
    return found


@dataclass(frozen=True)
class Walked:
    """One system's walk for one question, as a viewer shows it. It holds the data set's texts, and gold."""

    system: str
    graph: MemoryGraph
    question: Question
    gold: Gold
    trajectory: Trajectory
    verdict: Verdict


def replay(config: Config, out: Path, questions: int = 10) -> list[Walked]:
    """Walk again, from the actions kept beside a result, what each walking system did on the first questions.

    No policy is asked: the environment is deterministic. By question, then by system.
    """
    contest = prepare(config, out)
    rules, rank = walking_rules(config)
    shown = contest.questions[:questions]
    needed = {q.conversation_id: contest.tasks.conversations[q.conversation_id] for q in shown}
    graphs = load_graphs(config, needed, SentenceEncoder(config.encoder))
    kept = {system.name: _read_rows(contest.path(system)) for system in chosen_systems(contest)}
    walks = []
    for question in shown:
        graph, gold = graphs[question.conversation_id], contest.tasks.gold[question.id]
        for name, rows in kept.items():
            if (actions := rows.get(question.id, {}).get("actions")) is not None:
                env = RetrievalEnv(graph, question, rules, rank=rank)
                env.reset()
                for action in actions:
                    env.step(action)
                walk = env.trajectory()
                walks.append(Walked(name, graph, question, gold, walk, contest.kit.judge.score(walk, graph, gold)))
    return walks
