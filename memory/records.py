"""The things a memory is made of, as frozen records (vocabulary of Memora and xMemory)."""

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

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

    `id` is unique within the data set; `breaks` are ids of messages that open a segment whatever the clock says (a
    document's headers). A ValueError if there is no message, an id occurs twice, or a note cites an unknown message.
    """

    id: str
    messages: tuple[Message, ...]
    notes: tuple[Note, ...] = ()
    breaks: frozenset[str] = frozenset()

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
    """Contiguous messages (their ids, in order) that form one local event, with its place in the conversation.

    `id` is unique within its graph; `summary` is an extracted episodic memory, empty where the raw messages are it.
    """

    id: str
    position: int
    messages: tuple[str, ...]
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing that an entry says: a message word for word, or a sentence that cites messages."""

    speaker: str  #: Who said it (the first source's speaker).
    time: datetime  #: When (the first source's time).
    text: str  #: On one line.
    sources: tuple[str, ...]  #: Ids of the messages it tells of, in order.
    until: datetime | None = None  #: When a later statement took its place; None while it holds.

    @property
    def line(self) -> str:
        """Return it as a reader sees it: `Ann (8 May 2023): text`, and `until 1 June 2023` where that is over."""
        over = "" if self.until is None else f", until {format_date(self.until)}"
        return f"{' '.join(self.speaker.split())} ({format_date(self.time)}{over}): {self.text}"


@dataclass(frozen=True)
class Entry:
    """One memory: what it is about (`abstraction`, the search key) and what it says (`value`). xMemory's component."""

    id: str  #: Unique within its graph, stable while the graph grows.
    abstraction: str  #: Memora's primary abstraction a_i: a short phrase, the only text of it that is embedded.
    statements: tuple[Statement, ...]  #: What it says, oldest first, superseded ones among them.
    segments: tuple[str, ...]  #: Ids of the segments its sources lie in.
    anchors: tuple[str, ...] = ()  #: Cue anchors, "main entity + key aspect", shared with other entries.

    @cached_property
    def value(self) -> str:
        """Return the memory value v_i, one line a statement: what holds, then what held before."""
        return "\n".join(statement.line for statement in sorted(self.statements, key=lambda s: s.until is not None))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Return the ids of the messages that the value tells of."""
        return tuple(dict.fromkeys(source for statement in self.statements for source in statement.sources))

    @property
    def speaker(self) -> str:
        """Return who said it first."""
        return self.statements[0].speaker

    @property
    def time(self) -> datetime:
        """Return when it was first said."""
        return self.statements[0].time


def format_date(time: datetime) -> str:
    """Return a day without depending on the locale: `8 May 2023`."""
    return f"{time.day} {MONTHS[time.month - 1]} {time.year}"


def say(message: Message) -> Statement:
    """Return a message word for word, as a statement."""
    return Statement(message.speaker, message.time, " ".join(message.text.split()), (message.id,))
