"""How correct a set of memories is for a question, four ways; each in [0, 1], each raising where it can't tell."""

from collections.abc import Callable, Sequence
from importlib.resources import files

from pydantic import BaseModel

from cuewalk.env.records import Gold, Question
from cuewalk.judges.answers import score_answer
from cuewalk.judges.evidence import JudgeError, evidence_recall
from cuewalk.memory import MemoryGraph
from cuewalk.memory.endpoint import Endpoint, EndpointError, Reply, ReplyError, data_line, fill
from cuewalk.memory.reader import Context, LocalReader, TooLong

Correctness = Callable[[MemoryGraph, Question, Gold, Sequence[str]], float]
"""(graph, question, gold, entries) -> correctness in [0, 1]."""


class Answer(BaseModel):
    """What a reader says."""

    answer: str


class Grade(BaseModel):
    """Reason before verdict."""

    reason: str
    correct: bool


def by_evidence(graph: MemoryGraph, question: Question, gold: Gold, entries: Sequence[str]) -> float:
    """Return the share of the gold evidence that the entries tell. Offline and deterministic."""
    return evidence_recall(graph, entries, gold)


class ByReader:
    """What a local model makes of the memories: the F1 of its answer, or how likely it finds the gold one.

    `answer` is LoCoMo's F1 of its greedy answer; `likelihood` the geometric mean probability it gives to a token of the
    gold answer, exp(mean log p). It sees values with their dates. Working sets that begin alike share keys and values.

    Args:
        reader: The model.
        kind: `answer` or `likelihood`.
    """

    def __init__(self, reader: LocalReader, kind: str) -> None:
        self.reader = reader
        self.kind = kind
        self._context: Context | None = None
        self._read: list[tuple[str, int]] = []  # texts in the context, and its length after each
        self._known: dict[tuple[str, str, tuple[str, ...]], float] = {}

    def __call__(self, graph: MemoryGraph, question: Question, gold: Gold, entries: Sequence[str]) -> float:
        """Return the score; a working set that was asked about before is not read again.

        A JudgeError if the gold answer has no token, or the memories are more than the reader can take.
        """
        key = (question.id, gold.answer, tuple(graph.entries[entry].value for entry in entries))
        if key in self._known:
            return self._known[key]
        ask = f"\nQuestion: {' '.join(question.text.split())}\nShort answer:"
        if self.kind == "likelihood" and not gold.answer.strip():
            raise JudgeError("the gold answer is empty; leave the question out, or judge by evidence")
        try:
            context = self._reread([f"{value}\n" for value in key[2]])
            if self.kind == "answer":
                self._known[key] = score_answer(self.reader.answer(context, ask), gold)["answer_f1"]
            else:
                self._known[key] = self.reader.likelihood(context, ask, f" {gold.answer.strip()}")
        except TooLong as error:
            raise JudgeError(str(error)) from error
        return self._known[key]

    def _reread(self, texts: list[str]) -> Context:
        """Return the context of these texts, keeping as much of the last one as begins alike."""
        if self._context is None:
            self._context = self.reader.read("Memories:\n")
            self._read = [("", self._context.length)]
        kept = 1
        while kept < len(self._read) and kept <= len(texts) and self._read[kept][0] == texts[kept - 1]:
            kept += 1
        self.reader.forget(self._context, self._read[kept - 1][1])
        del self._read[kept:]
        for text in texts[kept - 1 :]:
            self.reader.extend(self._context, text)
            self._read.append((text, self._context.length))
        return self._context


class ByEndpoint:
    """A model behind an endpoint answers from the memories, and grades the answer strictly: 0 or 1."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def __call__(self, graph: MemoryGraph, question: Question, gold: Gold, entries: Sequence[str]) -> float:
        """Return 1 for a correct answer.

        A JudgeError if the endpoint can't be asked or replies nonsense: the trajectory is then left out.
        """
        lines = "\n".join(data_line(memory=graph.entries[entry].value) for entry in entries)
        prompt = _prompt("answer", memories=lines, question=data_line(question=question.text))
        return float(self.grade(question.text, self._ask(prompt, Answer).answer, gold.answer))

    def grade(self, question: str, answer: str, reference: str) -> bool:
        """Tell whether an answer is correct; an empty one is not, and nobody is asked.

        A JudgeError if the endpoint can't be asked or replies nonsense.
        """
        if not answer.strip():
            return False
        shown = {"question": question, "reference": reference, "answer": answer}
        return self._ask(_prompt("grade", **{k: data_line(**{k: v}) for k, v in shown.items()}), Grade).correct

    def _ask(self, prompt: str, schema: type[Reply]) -> Reply:
        try:
            return self.endpoint.ask(prompt, schema)
        except (EndpointError, ReplyError) as error:
            raise JudgeError(str(error)) from error


def _prompt(name: str, **values: str) -> str:
    return fill(files("cuewalk.judges").joinpath(f"prompt_{name}.txt").read_text(encoding="utf-8"), **values)
