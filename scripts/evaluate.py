"""Evaluation on held-out conversations: every policy in one table, measured by the same functions."""

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from pydantic import TypeAdapter
from sklearn.metrics import roc_auc_score
from tqdm import tqdm

from cuewalk.env import Question, Tasks, Trajectory
from cuewalk.env.render import CANDIDATE, RENDERER
from cuewalk.env.tasks import DataError, select, splits
from cuewalk.judges import JudgeError, TrajectoryJudge, covered, evidence_recall
from cuewalk.memory import SentenceEncoder
from cuewalk.memory.models import load_language_model, load_tokenizer
from cuewalk.rl.config import Config, ConfigError, config_tree
from cuewalk.rl.data import Memories, load_graphs, load_part, rank_of
from cuewalk.rl.export import GRAMMAR
from cuewalk.rl.oracle import oracle_action
from cuewalk.rl.ranker import Ranker
from cuewalk.rl.rollout import walk_greedily
from cuewalk.rl.run import provenance
from cuewalk.rl.transcript import Chat
from cuewalk.scripts import baselines
from cuewalk.scripts.baselines import THRESHOLDS, expand_likely, searching_oracle
from cuewalk.scripts.curve import OFFSETS, Record, Served, choose_offset, cut, record, stopping
from cuewalk.scripts.grammar import lawful
from cuewalk.scripts.measures import EQUAL_ENTRIES, Remembered, measure_entries, measure_walk, reward_of, tokens_read
from cuewalk.scripts.paired import compare
from cuewalk.scripts.results import read_metrics

Found = tuple[Sequence[str] | Trajectory, int]
"""A working set, or a walk and the set it ended with; and the tokens of the language model, 0 without one."""

COLUMNS = ("policy", "question", "measure", "value")
"""Of the long table that holds all measures; a value is None where it is not known."""

Measured = tuple[str, str, str, float | None]

TOP_K = (5, 8, 10, 20)
COMPARED = ("recall_at_8", "recall_at_300t", "evidence_recall", "reward")


class Altered(Chat):
    """A transcript that differs from what the environment says: a control on what a policy reads."""

    def __init__(self, tokenizer: Any, alter: Callable[[str], str]) -> None:
        super().__init__(tokenizer)
        self.alter = alter

    def first(self, observation: str) -> list[int]:
        """Return the altered prompt."""
        return super().first(self.alter(observation))

    def following(self, observation: str) -> list[int]:
        """Return the altered observation."""
        return super().following(self.alter(observation))


def no_text(observation: str) -> str:
    """Blank the candidates: speaker and text go; score, link and letter stay."""
    return CANDIDATE.sub(r"… \g<score> \g<label>", observation)


def other_question(observation: str) -> str:
    """Ask something that the candidates were not found for."""
    return re.sub(r"^Question: .*$", "Question: What colour is the neighbour's bicycle?", observation, flags=re.M)


@dataclass(frozen=True)
class Bench:
    """What every policy is measured on."""

    config: Config
    tasks: Tasks
    memories: Memories
    judge: TrajectoryJudge
    chat: Chat

    def search(self, k: int, questions: Sequence[Question]) -> list[Found]:
        """Retrieve by plain search: no environment, so no reward."""
        hits = [self.memories.graphs[question.conversation_id].search(question.text, k) for question in questions]
        return [([hit.entry for hit in found], 0) for found in hits]

    def search_adaptively(self, threshold: float | None, questions: Sequence[Question]) -> list[Found]:
        """Retrieve as many of the first 20 hits as their cosines ask for, see `baselines.adaptive_count`."""
        found: list[Found] = []
        for question in questions:
            hits = self.memories.graphs[question.conversation_id].search(question.text, max(TOP_K))
            count = baselines.adaptive_count([hit.score for hit in hits], threshold)
            found.append(([hit.entry for hit in hits[:count]], 0))
        return found

    def lines_told(self) -> float | None:
        """Return how well the scores at the lines of the first states tell which hold missing evidence: an AUROC."""
        shown, holds = list[float](), list[bool]()
        for question in self.tasks.questions:
            env = self.memories.env(question)
            env.reset()
            missing = set(self.tasks.gold[question.id].evidence) - covered(env.graph, env.state.working)
            shown += [link.score for _, link in env.state.frontier]
            holds += [not missing.isdisjoint(covered(env.graph, [link.entry])) for _, link in env.state.frontier]
        return float(roc_auc_score(holds, shown)) if len(set(holds)) == 2 else None

    def walk(self, policy: baselines.Scripted, questions: Sequence[Question]) -> list[Found]:
        """Retrieve by a policy without a model."""
        return [(baselines.run_scripted(policy, self.memories.env(q), self.tasks.gold[q.id]), 0) for q in questions]

    def serve(self, model: Any, grammar: bool, questions: Sequence[Question]) -> list[Found]:
        """Retrieve by a policy with a language model, as it is served."""
        envs = [self.memories.env(question) for question in questions]
        sampling = self.config.sampling
        allow = lawful(self.chat, sampling.max_action_tokens) if grammar else None
        rows = walk_greedily(envs, model, self.chat, sampling, allow)
        return [(row.trajectory, len(row.prompt) + len(row.completion)) for row in rows]

    def curves(self, policy: str, model: Any, questions: Sequence[Question]) -> dict[str, Served]:
        """Walk a policy's whole curve, question by question; what was walked before is read from the run directory."""
        path = self.kept(policy)
        kept = TypeAdapter(dict[str, Record]).validate_json(path.read_bytes() if path.exists() else b"{}")
        todo, size = [q for q in questions if q.id not in kept], self.config.evaluation.batch
        for start in tqdm(range(0, len(todo), size), desc=policy, unit="batch", disable=None):
            envs = [self.memories.env(question) for question in todo[start : start + size]]
            kept |= {walk.question: walk for walk in record(envs, model, self.chat, self.config.sampling)}
            _write(path, TypeAdapter(dict[str, Record]).dump_json(kept))
        return {q.id: cut(kept[q.id], partial(self.memories.env, q)) for q in questions}

    def kept(self, policy: str) -> Path:
        """Return the file in the run directory that holds what a policy said."""
        path = Path(self.config.run_dir) / "walks" / f"{policy.replace(' ', '_')}-{self.digest(policy)}.json"
        path.parent.mkdir(exist_ok=True)
        return path

    def digest(self, policy: str) -> str:
        """Return a digest of what decides how a policy walks: weights, memories, rules and what is shown of them."""
        free: dict[str, Any] = {"run_dir": "", "memory_dir": "", "evaluation": None, "grpo": {}, "judge": None}
        tree = config_tree(self.config) | free
        tree["sampling"] = {key: tree["sampling"][key] for key in ("max_action_tokens", "max_tokens")}
        for training in ("compare", "budgets", "prices"):
            tree.pop(training)
        graphs = sorted(graph.digest for graph in self.memories.graphs.values())
        asked = sorted((question.id, question.text) for question in self.tasks.questions)
        whole = hashlib.sha256(repr((tree, graphs, asked, RENDERER, GRAMMAR)).encode("utf-8", "surrogatepass"))
        run = Path(self.config.run_dir)
        adapters = (run / name / "adapter_model.safetensors" for name in (policy.split()[0], "reader"))
        for path in (*adapters, run / "ranker.json"):
            whole.update(path.read_bytes() if path.exists() else b"")
        return whole.hexdigest()[:12]

    def best(self, served: Sequence[Served]) -> tuple[float, float]:
        """Return the offset on STOP with the best mean reward, and that reward."""
        judged = [(walk, [self.reward(end) for end in walk.walks]) for walk in served]
        told = [(walk, [paid for paid in own if paid is not None]) for walk, own in judged if None not in own]
        if not told:
            raise JudgeError("the judge failed on every validation question; no offset on STOP can be chosen")
        served, rewards = [walk for walk, _ in told], [own for _, own in told]
        offset = choose_offset(served, rewards)
        paid = [own[walk.place(offset)] for walk, own in zip(served, rewards, strict=True)]
        return offset, sum(paid) / len(paid)

    def reward(self, walked: Trajectory) -> float | None:
        """Return what a walk earned; None, and counted as `judge_failed`, where the judge can't tell."""
        graph, gold = self.memories.graphs[walked.question.conversation_id], self.tasks.gold[walked.question.id]
        return reward_of(self.judge, walked, graph, gold)

    def points(self, served: Mapping[str, Served]) -> list[dict[str, float]]:
        """Return a policy's curve: means over the questions by offset on STOP."""
        rows = []
        for offset in OFFSETS:
            for walk in served.values():
                taken = walk.walks[walk.place(offset)]
                graph, gold = self.memories.graphs[taken.question.conversation_id], self.tasks.gold[taken.question.id]
                tokens = sum(self.chat.count(graph.entries[entry].value) for entry in taken.working)
                found = {"entries": len(taken.working), "evidence_recall": evidence_recall(graph, taken.working, gold)}
                rows.append({"offset": offset, **found, "context_tokens": tokens})
        means: list[dict[str, float]] = pd.DataFrame(rows).groupby("offset").mean().reset_index().to_dict("records")
        return means

    def scores(self, kind: str | None, served: Mapping[str, Served]) -> tuple[list[float], list[bool]]:
        """Return what speaks for stopping at the first state, and whether that is right, by question.

        The margin of STOP, or (None) how low the best candidate scores: the rule that a policy must beat.
        """
        found: tuple[list[float], list[bool]] = ([], [])
        for walk in served.values():
            env = self.memories.env(walk.walks[0].question)
            env.reset()
            best = max((link.score for _, link in env.state.frontier), default=0.0)
            found[0].append(walk.margins[0] if kind else -best)
            found[1].append(evidence_recall(env.graph, walk.walks[0].working, self.tasks.gold[env.question.id]) == 1.0)
        return found

    def measure(
        self,
        policy: str,
        questions: Sequence[Question],
        retrieve: Callable[..., list[Found]],
        batch: int = 1,
        *,
        timed: bool = True,
    ) -> list[Measured]:
        """Measure a policy, `batch` questions at a time; return rows of the long table, see `COLUMNS`."""
        rows: list[Measured] = []
        with tqdm(total=len(questions), desc=policy, unit="question", disable=None) as bar:
            for start in range(0, len(questions), batch):
                asked = questions[start : start + batch]
                started = time.perf_counter()
                results = retrieve(asked)
                seconds = (time.perf_counter() - started) / len(asked)
                for question, (found, tokens) in zip(asked, results, strict=True):
                    graph, gold = self.memories.graphs[question.conversation_id], self.tasks.gold[question.id]
                    entries = found.working if isinstance(found, Trajectory) else found
                    delta = self.config.judge.similarity
                    measures = measure_entries(graph, question, gold, entries, self.chat.count, delta)
                    if isinstance(found, Trajectory):
                        paid = self.reward(found)
                        measures |= measure_walk(graph, found, gold, paid) | {"judge_failed": float(paid is None)}
                        tokens += tokens_read(self.memories.env(question), [step.text for step in found.steps])
                    measures |= {"inference_tokens": float(tokens), "seconds": seconds if timed else None}
                    rows += [(policy, question.id, name, value) for name, value in measures.items()]
                bar.update(len(asked))
        return rows


def _write(path: Path, content: bytes) -> None:
    partial_file = path.with_suffix(".part")
    partial_file.write_bytes(content)
    partial_file.replace(path)  # whole or not at all


def _cut(served: Mapping[str, Served], offset: float, questions: Sequence[Question]) -> list[Found]:
    """Return where each walk ends with this offset on STOP, and its tokens."""
    places = [(served[question.id], served[question.id].place(offset)) for question in questions]
    return [(walk.walks[place], walk.tokens[place]) for walk, place in places]


def evaluate(config: Config) -> dict[str, Any]:
    """Measure all policies of a trained run; return the one results form.

    Policies without a model see all questions of the part; those with one see `evaluation.model_questions`. Both
    are also given on the model's questions, so that the rows of one table compare.
    """
    run = Path(config.run_dir)
    if not (run / "config.json").exists():
        raise ConfigError(f"no run in {run}; train one first with `cuewalk train --config …`")
    part = select(load_part(config.data, config.evaluation.part), evidence=True)
    val = select(load_part(config.data, "val"), evidence=True)
    if not part.questions or not val.questions:
        raise DataError("no held-out question has gold evidence; the `evidence` judge can't score any")
    graphs = load_graphs(config, {**part.conversations, **val.conversations}, SentenceEncoder(config.encoder))
    rank = rank_of(config, run)
    memories = Memories(graphs, config.env, rank and Remembered(rank))
    bench = Bench(config, part, memories, TrajectoryJudge(config.judge), Chat(load_tokenizer(config.model)))
    scripted: dict[str, baselines.Scripted] = {
        "stop": baselines.expand_top(0),
        "random": baselines.random_walk,
        "expand_top=1": baselines.expand_top(1),
        "expand_top=3": baselines.expand_top(3),
        "expand_top=4": baselines.expand_top(4),
        "expand_all": baselines.expand_top(config.env.budget),
        "oracle_one_hop": oracle_action,
        "oracle": searching_oracle,
    }
    if (run / "ranker.json").exists():  # where there was something to learn
        ranker = Ranker.load(run / "ranker.json")
        scripted["ranker"] = expand_likely(ranker, choose_threshold(ranker, val, memories, bench.judge))
    retrievers: dict[str, Callable[..., list[Found]]] = {
        **{f"top_k={k}": partial(bench.search, k) for k in TOP_K},
        "adaptive_k=gap": partial(bench.search_adaptively, None),
        "adaptive_k=threshold": partial(bench.search_adaptively, nearest_threshold(replace(bench, tasks=val))),
        **{name: partial(bench.walk, policy) for name, policy in scripted.items()},
    }
    measured = [row for name, retrieve in retrievers.items() for row in bench.measure(name, part.questions, retrieve)]
    lines = [{"order": config.env.order, "auroc": bench.lines_told()}]
    if config.env.order == "reader":  # what the reader is worth
        alone = replace(bench, memories=Memories(graphs, replace(config.env, order="ranker"), Remembered(ranker)))
        for count in (3, 4):
            taken = partial(alone.walk, baselines.expand_top(count))
            measured += alone.measure(f"unread_top={count}", part.questions, taken)
        lines.append({"order": "ranker", "auroc": alone.lines_told()})
    asked = model_questions(config, part)
    base = partial(load_language_model, config.model, config.dtype)
    for name in ("untrained", "untrained_grammar") if "untrained" in config.evaluation.policies else ():
        serve = partial(bench.serve, base(), name == "untrained_grammar")
        measured += bench.measure(name, asked, serve, config.evaluation.batch)
    more: dict[str, list[dict[str, Any]]] = {"curves": [], "stopping": [], "controls": []}
    for name in ("warm_start", "trained"):
        if name in config.evaluation.policies and (run / name / "adapter_config.json").exists():
            rows, found = measure_adapter(bench, replace(bench, tasks=val), name, asked)
            measured += rows
            more = {key: [*known, *(row for row in found[key] if row not in known)] for key, known in more.items()}
    whole = pd.DataFrame(measured, columns=COLUMNS)
    conversation = whole["question"].map({question.id: question.conversation_id for question in part.questions})
    whole.assign(conversation=conversation).to_csv(run / f"measures_{config.evaluation.part}.csv", index=False)
    return summarise(bench, whole, [question.id for question in asked]) | more | {"lines": lines}


def measure_adapter(
    bench: Bench, on_val: Bench, name: str, asked: Sequence[Question]
) -> tuple[list[Measured], dict[str, list[dict[str, Any]]]]:
    """Measure a trained adapter as it is and with the offset on STOP that is best on validation.

    Also returned: its curve over offsets, how well it knows when to stop beside the rule on the best candidate's score,
    and what a warm start earns on validation where it can't read.
    """
    from cuewalk.rl.adapters import load_adapter  # peft is loaded only where an adapter is

    model, sampling = load_adapter(bench.config, Path(bench.config.run_dir) / name), bench.config.sampling
    tried = on_val.curves(f"{name} on validation", model, on_val.tasks.questions)
    offset, paid = on_val.best(list(tried.values()))
    controls = [{"policy": name, "control": None, "reward": paid}]
    gate = bench.config.evaluation.controls and name == "warm_start"  # reading is looked for before GRPO
    for control in (no_text, other_question) if gate else ():
        blind = replace(on_val, chat=Altered(on_val.chat.tokenizer, control))
        walks = blind.curves(f"{name} with {control.__name__}", model, on_val.tasks.questions)
        controls.append({"policy": name, "control": control.__name__, "reward": on_val.best(list(walks.values()))[1]})
    if bench.config.evaluation.part == "val":
        served = {question.id: tried[question.id] for question in asked}
    else:
        served = bench.curves(name, model, asked)
    rows = []
    for label, chosen in ((name, sampling.stop_offset), (f"{name}+offset", offset)):
        rows += bench.measure(label, asked, partial(_cut, served, chosen), len(asked), timed=False)
    rule, lead = ((on_val.scores(by, tried), bench.scores(by, served)) for by in (None, "margin"))
    stops = [{"policy": "top_score", **stopping(*rule)}, {"policy": name, **stopping(*lead)}]
    curve = {"policy": name, "chosen": offset, "points": bench.points(served)}
    return rows, {"curves": [curve], "stopping": stops, "controls": controls}


def nearest_threshold(val: Bench) -> float:
    """Return the cosine from which on a validation question has eight hits on average, as many as `top_k=8`."""
    graphs = val.memories.graphs
    scores = [[hit.score for hit in graphs[q.conversation_id].search(q.text, max(TOP_K))] for q in val.tasks.questions]

    def off(threshold: float) -> float:
        return abs(float(np.mean([baselines.adaptive_count(own, threshold) for own in scores])) - EQUAL_ENTRIES)

    return float(min(np.arange(0.1, 0.9, 0.02), key=off))


def choose_threshold(ranker: Ranker, val: Tasks, memories: Memories, judge: TrajectoryJudge) -> float:
    """Return the chance from which on taking a candidate paid best on the validation questions."""

    def reward(threshold: float) -> float:
        walked = ((baselines.run_scripted(expand_likely(ranker, threshold), memories.env(q), val.gold[q.id]), q)
                  for q in val.questions)  # fmt: skip
        paid = (reward_of(judge, t, memories.graphs[q.conversation_id], val.gold[q.id]) for t, q in walked)
        return sum(reward for reward in paid if reward is not None)

    return max(THRESHOLDS, key=reward)


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
    return select(part, ids=[question.id for question in first_by_digest(part.questions, wanted)]).questions


def first_by_digest(questions: Sequence[Question], count: int) -> list[Question]:
    """Return the first so many by the digest of their ids: a sample that is fixed, and grows by more of them."""
    return sorted(questions, key=lambda question: hashlib.sha256(question.id.encode()).hexdigest())[:count]


def summarise(bench: Bench, measured: pd.DataFrame, asked: Sequence[str]) -> dict[str, Any]:
    """Turn the long table into the one results form: means by policy, and paired comparisons on common questions."""
    config, tasks = bench.config, bench.tasks
    everyone, clean = len(tasks.questions), [q.id for q in tasks.questions if tasks.gold[q.id].clean]
    rows = []
    for policy, own in measured.groupby("policy", sort=False):
        whole = own["question"].nunique() == everyone
        recall = own[own["question"].isin(clean) & (own["measure"] == "recall_at_8")]["value"].mean()
        row = _mean_row(policy, "all" if whole else "asked", own)
        rows.append(row | {"recall_at_8_clean": None if pd.isna(recall) else float(recall)})
        if whole and len(asked) < everyone:
            rows.append(_mean_row(policy, "asked", own[own["question"].isin(asked)]))
    conversation = {question.id: question.conversation_id for question in tasks.questions}
    by_question = measured.pivot(index="question", columns=["measure", "policy"], values="value")
    comparisons = []
    rivals = ("stop", "top_k=8", "untrained_grammar", "expand_top=3", "expand_top=4", "unread_top=4", "ranker",
              "warm_start", "warm_start+offset")  # fmt: skip
    pairs = [(a, b) for a in ("trained", "trained+offset") for b in rivals if a != b]
    for a, b in [*pairs, ("expand_top=4", "unread_top=4"), ("ranker", "top_k=8"), ("oracle", "stop")]:
        for metric in COMPARED:
            both = by_question.reindex(columns=[(metric, a), (metric, b)]).dropna()
            if len(both):
                paired = compare(both[metric, a].to_dict(), both[metric, b].to_dict(), conversation)
                comparisons.append({"metric": metric, "a": a, "b": b, **paired})
    part = config.evaluation.part
    return {
        "name": Path(config.run_dir).name,
        **provenance(),
        "seeds": [config.seed],
        "data": {
            "dataset": config.data.source,
            "split": f"{config.data.split}/{part}" if config.data.source == "locomo" else part,
            "n": everyone,
            "n_clean": len(clean),
            "n_silver": sum(tasks.gold[question.id].silver for question in tasks.questions),
            "n_asked": len(asked),
            "asked": list(asked) if len(asked) < everyone else "all",
        },
        "rows": rows,
        "comparisons": comparisons,
        "training": _training_facts(Path(config.run_dir)),
    }


def _mean_row(policy: str, questions: str, own: pd.DataFrame) -> dict[str, Any]:
    means = own.groupby("measure", sort=False)["value"].mean()
    known = means.astype(object).where(means.notna(), None)
    return {"policy": policy, "questions": questions, "n": own["question"].nunique(), "reward": None, **known}


def _training_facts(run: Path) -> dict[str, Any]:
    """Return what a reader wants to know of the training: steps, groups, live ones, seconds.

    Groups per hour are those sampled, replaced ones too; rows of a group that are not distinct are computed once.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    steps, seconds = read_metrics(path)
    counts = {"groups": "groups/all", "groups_live": "groups/live", "groups_replaced": "groups/replaced"}
    sums = {name: sum(int(line[key]) for line in steps.values()) for name, key in counts.items()}
    hours = sum(line["step_time"] for line in steps.values()) / 3600
    speed = {
        "groups_per_hour": sum(sums[name] for name in ("groups", "groups_replaced")) / hours if hours else None,
        "distinct_trajectories": fmean(line["groups/distinct_trajectories"] for line in steps.values())
        if steps
        else None,
    }
    return {"grpo_steps": len(steps), **sums, **speed, "seconds": seconds}
