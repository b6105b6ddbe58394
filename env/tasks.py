"""Loaders: questions and gold from LoCoMo, obeying frozen splits by conversation; what all loaders share."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from cuewalk.env.records import Gold, Question, Tasks
from cuewalk.memory.records import MONTHS, Conversation, Message, Note

LOCOMO_SHA256 = "79fa87e90f04081343b8c8debecb80a9a6842b76a7aa537dc9fdf651ea698ff4"
PARTS = ("train", "val", "test")
UNANSWERABLE = 5  # LoCoMo's adversarial category
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 6: "knowledge-update"}


class DataError(ValueError):
    """Raised when a data file is missing, damaged, of another version, or does not hold what was asked for."""


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Turn what parsing another or a damaged file raises into a DataError that names the place."""
    try:
        yield
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, SyntaxError, OverflowError, OSError) as error:
        raise DataError(f"{place} is not of the format: {type(error).__name__} {error}") from error


@cache
def embedded(name: str) -> Any:
    """Return the content of a JSON file of this package."""
    return json.loads(files("cuewalk.env").joinpath(name).read_bytes())


@cache
def splits() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Return the frozen splits: name -> part -> conversation ids (`test_200`: question ids); `longmemeval` is apart."""
    stored = embedded("splits.json")
    return {name: {part: tuple(ids) for part, ids in parts.items()} for name, parts in stored.items()}


def load_locomo(
    path: str | Path, split: str, part: str, *, unanswerable: bool = False, sha256: str | None = LOCOMO_SHA256
) -> Tasks:
    """Load one part of a split of `locomo10.json`: categories 1 to 4, evidence repaired, duplicates once.

    Or, `unanswerable`, category 5: nothing in the conversation answers; there is no evidence, and no answer.

    Indexed are the messages with their image captions, and the `observation` rows as notes; never the questions,
    `event_summary`, or the stock-photo `query`.

    `path` is the file, or the folder that holds `locomo10.json`; `split` is `conv-4-1-5`, `conv-4-1-5-b`, `memory-r1`
    or `ablations`; `sha256` is the file's digest, None to accept any file of the format.

    A DataError if the file is missing, another one, damaged or lacks a conversation; a ValueError for an unknown part.
    """
    names = [name for name in splits() if name != "longmemeval"]
    for what, given, known in (("split", split, names), ("part", part, PARTS)):
        if given not in known:
            raise ValueError(f"unknown {what} {given!r}; choose from {', '.join(known)}")
    path = Path(path)
    path = path / "locomo10.json" if path.is_dir() else path
    content = read_data(path, "Get locomo10.json with `cuewalk download locomo`", sha256)
    samples = {sample["sample_id"]: sample for sample in content}
    if missing := [id_ for id_ in splits()[split][part] if id_ not in samples]:
        raise DataError(f"{path} lacks the conversations {missing} of {split}/{part}")
    return join_tasks(_locomo_sample(samples[id_], unanswerable) for id_ in splits()[split][part])


def join_tasks(parts: Iterable[Tasks]) -> Tasks:
    """Unite tasks of different conversations; a DataError where a conversation or question id occurs twice."""
    whole = Tasks({}, (), {})
    for part in parts:
        if twice := (whole.conversations.keys() & part.conversations) or (whole.gold.keys() & part.gold):
            raise DataError(f"ids occur twice: {sorted(twice)[:5]}; ids must be unique over the whole data set")
        conversations, gold = {**whole.conversations, **part.conversations}, {**whole.gold, **part.gold}
        whole = Tasks(conversations, whole.questions + part.questions, gold)
    return whole


def select(tasks: Tasks, *, evidence: bool = False, clean: bool = False, ids: Iterable[str] | None = None) -> Tasks:
    """Keep the questions that have evidence, that the errata leave alone, or whose id is listed."""
    kept = set(tasks.gold if ids is None else ids)
    kept &= {id_ for id_, gold in tasks.gold.items() if (gold.evidence or not evidence) and (gold.clean or not clean)}
    questions = tuple(question for question in tasks.questions if question.id in kept)
    return Tasks(tasks.conversations, questions, tasks.gold)


def repair_evidence(stored: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return LoCoMo evidence ids by the one rule that mends all: find `D1:2` patterns, keep known ids once."""
    found = [f"D{int(a)}:{int(b)}" for text in stored for a, b in re.findall(r"D:?(\d+):(\d+)", text)]
    existing = set(known)
    return tuple(dict.fromkeys(id_ for id_ in found if id_ in existing))


def _locomo_sample(sample: Mapping[str, Any], unanswerable: bool) -> Tasks:
    raw = sample["conversation"]
    sessions = sorted(int(key.split("_")[1]) for key in raw if re.fullmatch(r"session_\d+", key))
    messages = []
    for session in sessions:
        time = parse_locomo_time(raw[f"session_{session}_date_time"])
        for turn in raw[f"session_{session}"]:
            caption = f" [shares a photo: {turn['blip_caption'].strip()}]" if turn.get("blip_caption") else ""
            messages.append(Message(turn["dia_id"], turn["speaker"].strip(), time, turn["text"].strip() + caption))
    known = [message.id for message in messages]
    notes = [
        Note(text.strip(), repair_evidence([reference] if isinstance(reference, str) else reference, known))
        for session in sessions
        for rows in sample["observation"].get(f"session_{session}_observation", {}).values()
        for text, reference in rows
    ]
    errata = _errata().get(sample["sample_id"], frozenset())
    questions, gold, seen = [], {}, set()
    for position, row in enumerate(sample["qa"]):
        text, evidence = row["question"].strip(), repair_evidence(row["evidence"] if not unanswerable else (), known)
        if (row["category"] == UNANSWERABLE) != unanswerable or (text, evidence) in seen:
            continue
        seen.add((text, evidence))
        question = Question(f"{sample['sample_id']}:{position}", sample["sample_id"], text)
        questions.append(question)
        answer = "" if unanswerable else str(row["answer"]).strip()
        gold[question.id] = Gold(answer, evidence, row["category"], position not in errata)
    conversation = Conversation(sample["sample_id"], tuple(messages), tuple(notes))
    return Tasks({conversation.id: conversation}, tuple(questions), gold)


def parse_locomo_time(text: str) -> datetime:
    """Parse `1:56 pm on 8 May, 2023` in any locale."""
    match = re.fullmatch(r"(\d+):(\d+) (am|pm) on (\d+) (\w+), (\d+)", text.strip())
    if not match:
        raise DataError(f"not a LoCoMo session date: {text!r}; expected the form '1:56 pm on 8 May, 2023'")
    hour, minute, half, day, month, year = match.groups()
    hours = int(hour) % 12 + (12 if half == "pm" else 0)
    return datetime(int(year), MONTHS.index(month) + 1, int(day), hours, int(minute))


@cache
def _errata() -> Mapping[str, frozenset[int]]:
    """Positions whose gold is marked wrong: answers, and citations too, for evidence is what is trained on."""
    marked = embedded("errata.json")["questions"].items()
    return {id_: frozenset(kinds["answer"] + kinds["citation"]) for id_, kinds in marked}


def read_data(path: Path, remedy: str, sha256: str | None = None) -> Any:
    """Return a JSON file's content, or the list of the values on its lines; a DataError if it can't or mustn't be."""
    if not path.is_file():
        raise DataError(f"no data at {path}. {remedy}")
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DataError(
            f"{path} has SHA-256 {found[:12]}…, expected {sha256[:12]}…: truncated, edited or another version. "
            f"Download it again; scores on another file are not comparable"
        )
    try:
        return json.loads(content)
    except ValueError as whole:
        try:
            return json.loads(b"[" + b",\n".join(line for line in content.split(b"\n") if line.strip()) + b"]")
        except ValueError as error:
            raise DataError(f"{path} is no JSON ({whole}), nor is each line ({error}): truncated? {remedy}") from error
