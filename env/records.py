"""What a task is: a question that the environment may know, and the gold that only judges and the oracle see."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cuewalk.memory.records import Conversation


@dataclass(frozen=True, slots=True)
class Question:
    """What the environment may know. Group by `id`, never by text: equal texts can be different questions."""

    id: str
    conversation_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Gold:
    """What only judges and the oracle see."""

    answer: str  #: The reference answer.
    evidence: tuple[str, ...]  #: Ids of the messages that support it; empty where the data give none.
    #: 1 multi-hop, 2 temporal, 3 open-domain, 4 single-hop, 6 knowledge-update (not in LoCoMo); 5
    #: where nothing answers. Compare by number: names differ between papers.
    category: int
    clean: bool = True  #: False where the errata mark the answer or the evidence wrong.
    silver: bool = False  #: True where the evidence was guessed from the answer's words, see `silver_evidence`.


@dataclass(frozen=True)
class Tasks:
    """Conversations with questions about them, and the gold apart, by question id."""

    conversations: Mapping[str, Conversation]
    questions: tuple[Question, ...]
    gold: Mapping[str, Gold]


def words(text: str) -> set[str]:
    """Return a text's words in lower case."""
    return set(re.findall(r"\w+", text.lower()))
