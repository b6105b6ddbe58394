"""The things a memory is made of, as frozen records (vocabulary of Memora and xMemory)."""

from dataclasses import dataclass
from datetime import datetime

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
"""English, whatever the locale: dates in memories must read alike everywhere."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `id` is unique within its conversation only."""

    id: str
    speaker: str
    time: datetime
    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence that came with the data and says what some messages tell (LoCoMo's `observation` rows)."""

    text: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, with the notes that came with them (none for a user's own conversation).

    Raises:
        ValueError: If there is no message, an id occurs twice, or a note cites an unknown message.
    """

    id: str
    messages: tuple[Message, ...]
    notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError(f"conversation {self.id!r} has no messages; leave it out or give it at least one")
        ids = {message.id for message in self.messages}
        if len(ids) != len(self.messages):
            raise ValueError(f"conversation {self.id!r} has {len(self.messages)} messages but {len(ids)} ids")
        for note in self.notes:
            if unknown := set(note.sources) - ids:
                raise ValueError(f"conversation {self.id!r}: a note cites unknown messages {sorted(unknown)}")


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous messages that form one local event; `position` is its place in the conversation."""

    id: str
    position: int
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One memory: what it is about (`abstraction`, the search key) and what it says (`value`).

    Attributes:
        id: Unique within its graph, stable while the graph grows.
        abstraction: Memora's primary abstraction a_i: a short phrase, the only text of it that is embedded.
        value: The concrete text v_i, one line a message: date, speaker, what was said.
        speaker: Who said it (the first source's speaker).
        time: When it was first said.
        sources: Ids of the messages it holds, in order. Each one's text is in `value`.
        segments: Ids of the segments these messages lie in.
        anchors: Cue anchors, "main entity + key aspect", shared with other entries.
    """

    id: str
    abstraction: str
    value: str
    speaker: str
    time: datetime
    sources: tuple[str, ...]
    segments: tuple[str, ...]
    anchors: tuple[str, ...]
