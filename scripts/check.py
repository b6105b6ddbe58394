"""What a user's own file holds, and what it lacks to be trained on."""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from cuewalk.env import DataError, Gold, Tasks
from cuewalk.env.own import deal, parse_record, read_records, rows_of, time_of
from cuewalk.env.tasks import CATEGORIES, PARTS

HOW_TO_ASK = """Questions go into the conversations, as a list `questions` beside the messages. One of them:
  {"id": "q1", "text": "Where does Ann live?", "answer": "Oslo", "evidence": ["12"]}
`text` and `answer` (a few words) are needed. `evidence` lists the messages that answer it, by their ids, or by their
places from 1 where they have none; without it, messages that hold the answer's words are taken, and marked silver. Ask
what somebody would ask months later, in several conversations: 100 or more for train, 20 each for val and test."""


def check(path: str | Path) -> tuple[list[str], bool]:
    """Return what to tell about a file, line by line, and whether a policy can be trained on it.

    A DataError if it can't be read as conversations at all.
    """
    records = read_records(Path(path))
    wrong: list[str] = []
    try:
        parts = deal(records)
        dealt = not any(record.get("split") for record in records)
    except DataError as error:
        wrong.append(str(error))
        parts, dealt = [str(record.get("split")) for record in records], False
    parsed: list[tuple[str, Tasks]] = []
    for record, part in zip(records, parts, strict=True):
        faults = _faults(record)
        if not faults:
            try:
                parsed.append((part, parse_record(record)))
            except DataError as error:
                faults = [str(error)]
        wrong += faults
    for id_, times in Counter(str(record["id"]) for record in records).items():
        if times > 1:
            wrong.append(f"{times} conversations have the id {id_!r}")
    lines = [f"{path}: {len(records)} conversations, parts {'dealt out' if dealt else 'as its `split`s say'}"]
    usable = Counter[str]()
    for part in dict.fromkeys([*PARTS, *parts]):
        own = [tasks for name, tasks in parsed if name == part]
        gold = [one for tasks in own for one in tasks.gold.values()]
        usable[part] = sum(bool(one.evidence) for one in gold)
        messages = sum(len(c.messages) for tasks in own for c in tasks.conversations.values())
        unused = "" if part in PARTS else "; no part that is used"
        lines.append(f"  {part:6}{len(own)} conversations, {messages} messages, {_questions(gold)}{unused}")
    lines += [f"wrong: {line}" for line in wrong]
    lines += [f"note:  {line}" for line in _notes(records, [tasks for _, tasks in parsed], dealt)]
    for part, what in (("val", "choose settings on"), ("test", "report")):
        if not usable[part]:
            lines.append(f"note:  no question with evidence in {part}: there is nothing to {what}")
    if not any(tasks.questions for _, tasks in parsed):
        lines.append(f"\n{HOW_TO_ASK}\n")
    ready = bool(usable["train"]) and not wrong
    reason = "what is wrong above" if wrong else "no question of train has evidence"
    return [*lines, "A policy can be trained on it." if ready else f"No policy can be trained on it: {reason}."], ready


def _faults(record: Mapping[str, Any]) -> list[str]:
    """Return all ids that occur twice, or are cited and unknown, which reading the file names the first of."""
    try:
        rows, questions = rows_of(record), record.get("questions") or []
        ids = [str(row.get("id", place)) for place, row in enumerate(rows, 1)]
        asked = [str(row.get("id", place)) for place, row in enumerate(questions, 1)]
        cited = [(a, str(id_)) for a, row in zip(asked, questions, strict=True) for id_ in row.get("evidence") or []]
    except (KeyError, TypeError, AttributeError, ValueError):
        return []  # parsing says what is wrong
    twice = {"messages": Counter(ids), "questions": Counter(asked)}
    found = [f"two {what} have the id {id_!r}" for what, all_ in twice.items() for id_, n in all_.items() if n > 1]
    found += [f"question {question!r} cites the unknown message {id_!r}" for question, id_ in cited if id_ not in ids]
    return [f"{record['place']} ({record['id']}): {line}" for line in found]


def _notes(records: list[dict[str, Any]], parsed: list[Tasks], dealt: bool) -> list[str]:
    notes = []
    if dealt:
        notes.append("no `split` is given: whole conversations are dealt out, those with questions first, always alike")
    untimed = sum(len(_untimed(record)) for record in records)
    if untimed:
        notes.append(
            f"{untimed} messages have no time: each comes a minute after the one before, the first at its "
            f"conversation's time or, without one, at the file's"
        )
    for tasks in parsed:
        for id_, conversation in tasks.conversations.items():
            late = [b.id for a, b in pairwise(conversation.messages) if b.time < a.time]
            if late:
                notes.append(f"{id_}: {len(late)} messages are earlier than the one before, such as {late[0]!r}")
    gold = {id_: one for tasks in parsed for id_, one in tasks.gold.items()}
    if without := [id_ for id_, one in gold.items() if not one.evidence]:
        notes.append(
            f"{len(without)} questions have no evidence, and no few messages hold their answer's words: they are left "
            f"out, such as {without[0]!r}"
        )
    if strange := sorted({one.category for one in gold.values()} - CATEGORIES.keys()):
        notes.append(f"categories {strange} are not among {', '.join(f'{n} {name}' for n, name in CATEGORIES.items())}")
    return notes


def _untimed(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    try:
        return [row for row in rows_of(record) if time_of(row) is None]
    except (KeyError, TypeError, AttributeError, ValueError):
        return []  # parsing says what is wrong


def _questions(gold: list[Gold]) -> str:
    silver = sum(one.silver for one in gold)
    given = sum(bool(one.evidence) for one in gold) - silver
    return f"{len(gold)} questions: {given} with evidence, {silver} silver, {len(gold) - given - silver} without"
