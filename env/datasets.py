"""LongMemEval and PerLTQA as conversations, questions and gold, in frozen parts (docs/data.md says what was chosen)."""

import ast
import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from cuewalk.env.records import Gold, Question, Tasks
from cuewalk.env.tasks import PARTS, UNANSWERABLE, DataError, embedded, join_tasks, read_data, reading, splits
from cuewalk.memory.records import Conversation, Message

LONGMEMEVAL_TYPES = {
    "multi-session": 1, "temporal-reasoning": 2, "single-session-preference": 3, "single-session-user": 4,
    "single-session-assistant": 4, "knowledge-update": 6,
}  # fmt: skip
"""LongMemEval's question types as numbers of `CATEGORIES`. A preference's answer is a rubric: its F1 means nothing."""


def load_longmemeval(path: str | Path, part: str, *, unanswerable: bool = False, pinned: bool = True) -> Tasks:
    """Load one part of LongMemEval (cleaned): 59, 19 and 392 questions; or its abstentions, the `…_abs` of those.

    A question has a conversation of its own, with its id. Sessions are numbered in order of time, and `s3:12` is the
    12th turn of the third: stored ids tell which sessions hold the answer. Evidence are the turns with `has_answer`.

    `path` is longmemeval_oracle.json or its folder, or the file of S or M, which have the same questions. No base id
    and no session with evidence, nor one with its words, is in two parts: docs/data.md. `pinned`: only published files.

    A DataError if the file is missing, another one, damaged, or lacks a question, or the part is unknown.
    """
    path = Path(path) / "longmemeval_oracle.json" if Path(path).is_dir() else Path(path)
    content = _read(path, "longmemeval", pinned)
    with reading(str(path)):
        rows = {row["question_id"]: row for row in content}
        ids = splits()["longmemeval"][part]
        if missing := [id_ for id_ in ids if id_ not in rows]:
            raise DataError(f"{path} lacks {len(missing)} questions of {part}, such as {missing[0]!r}")
        asked = [twin for id_ in ids if (twin := f"{id_}_abs") in rows] if unanswerable else ids
        return join_tasks(_haystack(rows[id_]) for id_ in asked)


def _haystack(row: Mapping[str, Any]) -> Tasks:
    sessions = sorted(zip(row["haystack_dates"], row["haystack_sessions"], strict=True), key=lambda pair: pair[0])
    messages, breaks, evidence = [], set(), []
    for number, (date, turns) in enumerate(sessions, 1):
        time = datetime.strptime(re.sub(r" \(\w+\)", "", date), "%Y/%m/%d %H:%M")  # `2023/05/30 (Tue) 23:40`
        told = [(f"s{number}:{place}", turn) for place, turn in enumerate(turns, 1) if turn["content"].strip()]
        messages += [Message(id_, turn["role"], time, turn["content"].strip()) for id_, turn in told]
        breaks |= {id_ for id_, _ in told[:1]}
        evidence += [id_ for id_, turn in told if turn.get("has_answer")]
    question = Question(row["question_id"], row["question_id"], row["question"].strip())
    gold = Gold(str(row["answer"]).strip(), tuple(evidence), LONGMEMEVAL_TYPES[row["question_type"]])
    if question.id.endswith("_abs"):  # its answer says why there is none
        gold = Gold("", (), UNANSWERABLE)
    conversation = Conversation(question.id, tuple(messages), breaks=frozenset(breaks))
    return Tasks({question.id: conversation}, (question,), {question.id: gold})


def load_perltqa(path: str | Path, part: str, *, pinned: bool = True) -> Tasks:
    """Load one part of PerLTQA (en_v2) from the folder with perltmem_en_v2.json and perltqa_en_v2.json.

    A conversation is a character's memories, one a message: fields of the profile, relations, then each event with its
    dialogues, which open a segment. Evidence is the reference memory, with ids such as `events:4_0_0`. A question is
    `name:section:place`, of category 4, or 1 if it refers to several memories; repeated ones count once.

    Parts are by character: the SHA-256 of the name, modulo 20, is below 8 for train, below 11 for val. `pinned` and
    errors as in `load_longmemeval`; a DataError too if no character that has memories is in the part.
    """
    names = ("perltmem_en_v2.json", "perltqa_en_v2.json")
    memories, asked = (_read(Path(path) / name, "perltqa", pinned) for name in names)
    with reading(str(path)):
        known = {name: own for row in asked for name, own in row.items() if name in memories}
        places = {name: int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 for name in known}
        chosen = [name for name, place in places.items() if part == PARTS[(place >= 8) + (place >= 11)]]
        if not chosen:
            raise DataError(f"{path}: none of its {len(known)} characters is in {part}")
        return join_tasks(_character(name, memories[name], known[name]) for name in chosen)


def _character(name: str, memory: Mapping[str, Any], sections: Mapping[str, Any]) -> Tasks:
    relations, events, dialogues = memory["social_relationship"], memory["events"], memory["dialogues"]
    relations = ast.literal_eval(relations) if isinstance(relations, str) else relations  # 25 are strings
    said = {id_: _when(min(row["contents"], default="")) for id_, row in dialogues.items()}
    dated = {f"events:{row['events']}": said[id_] for id_, row in reversed(dialogues.items())}  # the first one's
    dated |= {f"dialogues:{id_}": time for id_, time in said.items()}
    latest = max(filter(None, said.values()), default=datetime(2000, 1, 1))
    blocks = [{f"profile:{field}": f"{field}: {value}" for field, value in memory["profile"].items()}]
    keys = ("Supporting Characters", "Relationship", "Description")
    blocks.append({f"social_relationship:{id_}": ", ".join(row[key] for key in keys) for id_, row in relations.items()})
    for event, row in events.items():
        own = {id_: dialogue["contents"].values() for id_, dialogue in dialogues.items() if dialogue["events"] == event}
        lines = {f"dialogues:{id_}": "\n".join(line for part in parts for line in part) for id_, parts in own.items()}
        blocks.append({f"events:{event}": f"{row['summary']} ({row['Creation Time']}): {row['content']}"} | lines)
    texts = {id_: text for block in blocks for id_, text in block.items()}
    messages = tuple(Message(id_, name, dated.get(id_) or latest, text) for id_, text in texts.items())
    questions, gold, seen = [], {}, set()
    for section, stored in sections.items():
        rows = stored if section == "profile" else [row for part in stored for own in part.values() for row in own]
        for place, row in enumerate(rows):
            cited = row["Reference Memory"]  # a field of the profile, or a list of ids as Python writes it
            cited = ast.literal_eval(cited) if cited.startswith("[") else [cited]
            evidence = tuple(dict.fromkeys(id_ for part in cited if (id_ := f"{section}:{part}") in texts))
            question = Question(f"{name}:{section}:{place}", name, row["Question"].strip())
            if (question.text, evidence) not in seen:
                seen.add((question.text, evidence))
                questions.append(question)
                gold[question.id] = Gold(str(row["Answer"]).strip(), evidence, 1 if len(evidence) > 1 else 4)
    conversation = Conversation(name, messages, breaks=frozenset(next(iter(block)) for block in blocks if block))
    return Tasks({name: conversation}, tuple(questions), gold)


def _when(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # these times were made by a model
        return None


def _read(path: Path, name: str, pinned: bool) -> Any:
    digests = {file: about["sha256"] for s in embedded("sources.json").values() for file, about in s["files"].items()}
    if pinned and path.is_file() and path.name not in digests:
        raise DataError(f"{path} is no published file of {name}; get one with `cuewalk download {name}`")
    return read_data(path, f"Get it with `cuewalk download {name}`", digests.get(path.name) if pinned else None)
