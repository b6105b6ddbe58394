"""A user's own conversations: JSON, JSONL or a chat export; dealt out to parts and given silver evidence if need be."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from cuewalk.env.records import Gold, Question, Tasks, words
from cuewalk.env.tasks import PARTS, DataError, join_tasks, read_data, reading
from cuewalk.memory.records import Conversation, Message

DEALT = ("train", "val", "test", "train", "train", "test", "train", "train")
"""The part of each conversation in turn where a file gives no split."""


def load_synthetic(part: str, conversations: int) -> Tasks:
    """Load the first so many conversations of a part of scripts/make_synthetic.py's data; a ValueError for too many."""
    tasks = _load(Path(__file__).with_name("synthetic.json"), part)
    if not 1 <= conversations <= len(tasks):
        raise ValueError(f"{conversations} conversations for {part}: the synthetic data has {len(tasks)}")
    return join_tasks(tasks[:conversations])


def load_json(path: str | Path, part: str) -> Tasks:
    """Load one part of a user's file (README, "Your own conversations"); a DataError names the place that is wrong."""
    return join_tasks(_load(Path(path), part))


def _load(path: Path, part: str) -> list[Tasks]:
    records = read_records(path)
    tasks = [parse_record(record) for record, dealt in zip(records, deal(records), strict=True) if dealt == part]
    if not tasks:
        raise DataError(f"{path} has no conversation with split {part!r}; each needs one of {', '.join(PARTS)}")
    return tasks


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return a file's conversations, each with `id`, `place` and `file_time`; a DataError if it has no known format."""
    content = read_data(path, "The format is in the README, section `Your own conversations`")
    if isinstance(content, dict):
        content = content.get("conversations", [content])
    rows = content if isinstance(content, list) else [None]
    if not all(isinstance(row, dict) and {"messages", "mapping"} & row.keys() for row in rows):
        raise DataError(f"{path} is no list of objects with `messages`, one a line, or under the key `conversations`")
    time = path.stat().st_mtime
    places = [{"place": f"{path}: conversations[{n}]", "file_time": time} for n in range(len(rows))]
    return [{"id": f"c{n}"} | row | about for n, (row, about) in enumerate(zip(rows, places, strict=True))]


def deal(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the part of each conversation: its `split`, or dealt out by conversation where none has any.

    Dealt are those with questions first, then by the SHA-256 of their ids, in turn to the parts of `DEALT`. A DataError
    if only some have a split, or there are fewer than 3 to deal out.
    """
    given = [record.get("split") for record in records]
    if all(given):
        return [str(split) for split in given]
    if any(given) or len(given) < len(PARTS):
        raise DataError("give each conversation a `split` (train, val, test), or none of 3 or more: they are dealt out")
    digests = [hashlib.sha256(str(record["id"]).encode()).hexdigest() for record in records]
    order = sorted(range(len(records)), key=lambda n: (not records[n].get("questions"), digests[n]))
    return [DEALT[order.index(number) % len(DEALT)] for number in range(len(records))]


def parse_record(record: Mapping[str, Any]) -> Tasks:
    """Return a conversation's tasks; a DataError names its place in the file and what is wrong.

    What has no time comes a minute after the message before, the first at its conversation's time or the file's.
    """
    with reading(record["place"]):
        messages: list[Message] = []
        time = time_of(record) or datetime(2000, 1, 1)
        for place, row in enumerate(rows_of(record), 1):
            speaker = str(row["author"]["role"] if "author" in row else row.get("speaker") or row["role"])
            text = text_of(row["text"] if "text" in row else row["content"])
            if text.strip() and speaker not in ("system", "developer"):  # what these say is no part of the conversation
                time = time_of(row) or (time + timedelta(minutes=1) if messages else time)
                messages.append(Message(str(row.get("id", place)), speaker, time, text))
        conversation = Conversation(str(record["id"]), tuple(messages))
        known, questions, gold = {message.id for message in messages}, [], {}
        for place, row in enumerate(record.get("questions") or [], 1):
            question = Question(f"{conversation.id}:{row.get('id', place)}", conversation.id, row["text"])
            answer, evidence = str(row["answer"]), tuple(str(id_) for id_ in row.get("evidence") or [])
            if unknown := [id_ for id_ in evidence if id_ not in known]:
                raise ValueError(f"question {question.id} cites unknown messages {unknown}")
            if question.id in gold:
                raise ValueError(f"two questions have the id {question.id}")
            silver = () if evidence else silver_evidence(question.text, answer, messages)
            gold[question.id] = Gold(answer, evidence or silver, int(row.get("category", 4)), silver=bool(silver))
            questions.append(question)
        return Tasks({conversation.id: conversation}, tuple(questions), gold)


def silver_evidence(question: str, answer: str, messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the ids of the messages that hold most content words of the answer, at least half of them.

    Of equals, those that share most words with the question; where more than 3 are left, none: such words say nothing.
    """
    wanted, asked = words(answer) - ENGLISH_STOP_WORDS, words(question) - ENGLISH_STOP_WORDS
    said = {message.id: words(f"{message.speaker} {message.text}") for message in messages}
    scores = {id_: (len(wanted & held), len(asked & held)) for id_, held in said.items()}
    most = max(scores.values())
    best = [id_ for id_ in scores if scores[id_] == most]
    return tuple(best) if 0 < len(wanted) <= 2 * most[0] and len(best) <= 3 else ()


def rows_of(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return a conversation's messages as they are stored; of a tree (`mapping`) the thread to its `current_node`."""
    if "messages" in record:
        return list(record["messages"])
    mapping, node, thread = dict(record["mapping"]), record["current_node"], []
    while node:
        entry = mapping.pop(node)  # so that a tree which bites its tail ends in a KeyError
        thread += [entry["message"]] if entry.get("message") else []
        node = entry.get("parent")
    return thread[::-1]


def text_of(content: Any) -> str:
    """Return a message's text: a string, or the text parts of a list; images and tool calls have none."""
    content = content.get("text", content.get("parts")) if isinstance(content, Mapping) else content
    return "\n".join(filter(None, map(text_of, content))) if isinstance(content, list) else content or ""


def time_of(row: Mapping[str, Any]) -> datetime | None:
    """Return when something was said, in UTC where it names a zone, if it says so: ISO 8601, or time since 1970."""
    given = [row[key] for key in ("time", "timestamp", "create_time", "file_time") if row.get(key) is not None]
    time = TypeAdapter(datetime).validate_python(given[0]) if given else None
    return time.astimezone(UTC).replace(tzinfo=None) if time and time.tzinfo else time
