"""How often a judge accepts answers that are right, and answers that are wrong, made from the data itself."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from scipy.stats import binomtest
from tqdm import tqdm

from cuewalk.env.records import Gold, Question, Tasks, words
from cuewalk.env.tasks import select
from cuewalk.judges.answers import score_answer
from cuewalk.judges.correctness import ByEndpoint, ByReader, Correctness
from cuewalk.judges.trajectory import load_correctness
from cuewalk.memory import MemoryGraph, SentenceEncoder
from cuewalk.memory.reader import LocalReader
from cuewalk.memory.records import MONTHS, format_date
from cuewalk.rl.config import Config, ConfigError
from cuewalk.rl.data import load_graphs, load_part

Accepts = Callable[[Question, str, Gold], bool]
"""(question, answer, gold) -> whether the judge takes the answer for right."""

SCORES = ("answer_em", "answer_f1", "answer_f1_xmemory", "bleu1", "rouge_l")
JUDGES = (*SCORES, "likelihood", "llm")
"""What can be calibrated: every judge of an answer's text."""
RIGHT = ("exact", "paraphrase")
WRONG = ("vague", "specific", "other_speaker", "wrong_date")
_DATE = re.compile(rf"\b(\d{{1,2}}) ({'|'.join(MONTHS)}),? (\d{{4}})\b")
_VAGUE = ("some time ago", "something they talked about", "it depends on the situation", "a person they know")


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of n answers of a kind were accepted, with a 95% Wilson interval."""

    kind: str
    n: int
    accepted: int

    @property
    def interval(self) -> tuple[float, float]:
        """Return the interval of the share, (0, 1) where nothing was asked."""
        if not self.n:
            return 0.0, 1.0
        found = binomtest(self.accepted, self.n).proportion_ci(method="wilson")
        return float(found.low), float(found.high)


def make_answers(tasks: Tasks, per_kind: int, seed: int = 0) -> list[tuple[str, Question, str]]:
    """Make answers of each kind to questions of the data; (kind, question, answer).

    Right: `exact`, the gold answer; `paraphrase`, the same in a sentence, dates in another format. Wrong: `vague`, true
    of anything; `specific`, the gold answer of another question of the same category and conversation;
    `other_speaker`, of one that names another person; `wrong_date`, a date some days off.

    Args:
        tasks: Questions with gold answers.
        per_kind: At most so many of each.
        seed: Of the choice.
    """
    draw = random.Random(seed)
    questions = [question for question in tasks.questions if tasks.gold[question.id].answer.strip()]
    draw.shuffle(questions)
    made: dict[str, list[tuple[str, Question, str]]] = {kind: [] for kind in (*RIGHT, *WRONG)}
    speakers = {id_: {m.speaker for m in c.messages} for id_, c in tasks.conversations.items()}
    named = {q.id: {name for name in speakers[q.conversation_id] if name in q.text} for q in questions}
    for question in questions:
        gold = tasks.gold[question.id]
        others = [
            other
            for other in questions
            if other.conversation_id == question.conversation_id
            and tasks.gold[other.id].category == gold.category
            and words(tasks.gold[other.id].answer).isdisjoint(words(gold.answer))
        ]
        elsewhere = [o for o in others if named[o.id] and named[question.id] and not named[o.id] & named[question.id]]
        found = {
            "exact": gold.answer,
            "paraphrase": _paraphrase(gold.answer),
            "vague": draw.choice(_VAGUE),
            "specific": tasks.gold[draw.choice(others).id].answer if others else None,
            "other_speaker": tasks.gold[draw.choice(elsewhere).id].answer if elsewhere else None,
            "wrong_date": _shift(gold.answer, draw.choice((-30, -9, -4, 3, 8, 40))),
        }
        for kind, answer in found.items():
            if answer is not None and len(made[kind]) < per_kind:
                made[kind].append((kind, question, answer))
    return [row for rows in made.values() for row in rows]


def calibrate(accepts: Accepts, tasks: Tasks, per_kind: int = 50, seed: int = 0) -> list[Rate]:
    """Ask a judge about answers of every kind; a JudgeError if the judge can't tell."""
    asked = make_answers(tasks, per_kind, seed)
    counts = {kind: [0, 0] for kind in (*RIGHT, *WRONG)}
    for kind, question, answer in tqdm(asked, desc="calibrate", unit="answer", disable=None):
        counts[kind][0] += 1
        counts[kind][1] += accepts(question, answer, tasks.gold[question.id])
    return [Rate(kind, n, accepted) for kind, (n, accepted) in counts.items()]


def check_judge(config: Config) -> None:
    """Refuse to train on a judge of answers that takes wrong ones for right: a policy would learn to please it.

    A ConfigError if it accepts more of the wrong answers than `judge.most_wrong`, or the validation questions have no
    answers to try it on; a JudgeError if its endpoint can't be asked.
    """
    if config.judge.correctness == "evidence":  # it looks at no answer
        return
    named = "answer_f1" if config.judge.correctness == "answer" else config.judge.correctness
    tasks = select(load_part(config.data, "val"), evidence=True)
    rates = calibrate(judge_of(named, config, tasks), tasks, per_kind=20, seed=config.seed)
    share = wrongly_accepted(rates)
    if share is None:
        raise ConfigError(
            f"config: no validation question has an answer to try judge.correctness = {config.judge.correctness} on; "
            f"add some, or judge by evidence"
        )
    if share > config.judge.most_wrong:
        judge = f"llm, {config.judge.llm.model!r}," if named == "llm" else named
        told = ", ".join(f"{rate.kind} {rate.accepted} of {rate.n}" for rate in rates if rate.kind in WRONG)
        raise ConfigError(
            f"config: the judge {judge} accepts {share:.0%} of the wrong answers ({told}), more than judge.most_wrong "
            f"= {config.judge.most_wrong:.0%} (see `cuewalk calibrate {named}`); take a stricter judge, or raise "
            f"judge.most_wrong to train on it all the same"
        )


def judge_of(name: str, config: Config, tasks: Tasks) -> Accepts:
    """Return the judge of this name, one of `JUDGES`; the reader of `likelihood` sees the memories of the tasks."""
    if name == "llm":
        return by_endpoint(load_correctness(replace(config.judge, correctness="llm")))
    if name == "likelihood":
        graphs = load_graphs(config, tasks.conversations, SentenceEncoder(config.encoder))
        return by_likelihood(LocalReader.from_pretrained(config.judge.reader), graphs)
    return by_score(name)


def by_score(name: str, least: float = 0.5) -> Accepts:
    """Return the judge that accepts an answer whose score (one of `score_answer`'s) is at least this."""
    return lambda question, answer, gold: score_answer(answer, gold)[name] >= least


def by_endpoint(judge: Correctness) -> Accepts:
    """Return the judge that grades through an endpoint."""
    assert isinstance(judge, ByEndpoint)
    return lambda question, answer, gold: judge.grade(question.text, answer, gold.answer)


def by_likelihood(reader: LocalReader, graphs: Mapping[str, MemoryGraph]) -> Accepts:
    """Return the judge that accepts what a reader of the gold evidence finds at least as likely as the gold answer."""

    def accepts(question: Question, answer: str, gold: Gold) -> bool:
        graph, wanted = graphs[question.conversation_id], set(gold.evidence)
        entries = [entry.id for entry in graph.entries.values() if wanted & set(entry.sources)]
        judge = ByReader(reader, "likelihood")
        given, reference = (
            judge(graph, question, replace(gold, answer=text), entries) for text in (answer, gold.answer)
        )
        return given >= reference

    return accepts


def wrongly_accepted(rates: Sequence[Rate]) -> float | None:
    """Return the share of wrong answers that were accepted, over all their kinds; None where there was none to try."""
    wrong = [rate for rate in rates if rate.kind in WRONG]
    asked = sum(rate.n for rate in wrong)
    return sum(rate.accepted for rate in wrong) / asked if asked else None


def _paraphrase(answer: str) -> str:
    """Say the same in other words, as far as that is certain without a model."""
    dated = _DATE.sub(lambda m: f"{m[2][:3]} {m[1]}, {m[3]}", answer)
    parts = [part.strip() for part in dated.split(",")]
    if dated == answer and len(parts) > 2:
        return f"It was {', '.join(reversed(parts))}."
    return f"That would be {dated}." if dated == answer else f"On {dated}."


def _shift(answer: str, days: int) -> str | None:
    """Return an answer with its date moved, None where it holds none."""
    match = _DATE.search(answer)
    if not match:
        return None
    try:
        date = datetime(int(match[3]), MONTHS.index(match[2]) + 1, int(match[1]))
    except ValueError:
        return None  # such as 31 June: no date after all
    return answer.replace(match[0], format_date(date + timedelta(days=days)))
