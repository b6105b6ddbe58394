"""Construction with a model (Memora section 3): segments, facts, updates and cue anchors asked of an endpoint."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from threading import Lock
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, create_model
from tqdm.contrib.concurrent import thread_map

from cuewalk.memory.build import Candidate, Extracted, OfflineExtractor, Update
from cuewalk.memory.config import BuildConfig
from cuewalk.memory.endpoint import Endpoint, ReplyError, data_line, fill
from cuewalk.memory.records import Conversation, Entry, Message, Segment, Statement, say

BLOCK = 40
"""Messages a segmentation call looks at; a block also ends where the offline segmenter sees a pause or a header."""
ENTRIES_A_CALL = 10
MOST_SOURCES = 4
"""Messages a written sentence may cite: one that claims to tell of a whole segment tells of none."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Check = Callable[[Any], None]


def _numbers(below: int, most: int) -> Any:
    """Return the type of a list of 1 to `most` numbers from 0 to `below` - 1; the endpoint is held to its bounds."""
    return Annotated[list[Annotated[int, Field(ge=0, lt=below)]], Field(min_length=1, max_length=most)]


class LLMExtractor:
    """Asks a model; what it can't answer validly, the offline extractor answers, and it is counted.

    Every reply is cached by content: a build that was killed goes on where it was, and asks nothing twice. An endpoint
    that is given is asked instead of the one that `config.llm` names; an EndpointError from any step if it can't be.
    """

    def __init__(self, config: BuildConfig, endpoint: Endpoint | None = None) -> None:
        self.config = config
        self.endpoint = endpoint or Endpoint(config.llm)
        self.offline = OfflineExtractor(replace(config, notes=False, unit="message"))
        self.fallbacks = {"segment": 0, "extract": 0, "choose": 0, "anchors": 0}
        self._lock = Lock()

    def report(self) -> dict[str, float]:
        """Return calls, tokens and fallbacks; cached replies count nowhere but in `cached`."""
        return asdict(self.endpoint.usage) | {f"fallback_{step}": count for step, count in self.fallbacks.items()}

    def segment(self, conversation: Conversation, done: Sequence[Segment] = ()) -> list[Segment]:
        """Return the segments so far, and those of the later messages: the model names where each begins."""
        messages = {message.id: message for message in conversation.messages}
        old = {message for segment in done for message in segment.messages}
        later = replace(conversation, messages=tuple(m for m in conversation.messages if m.id not in old), notes=())
        wide = OfflineExtractor(replace(self.config, segment_messages=BLOCK))
        blocks = [[messages[id_] for id_ in segment.messages] for segment in wide.segment(later)]

        def cut(block: Sequence[Message]) -> list[tuple[str, ...]]:
            schema = create_model("Starts", starts=_numbers(len(block), len(block)))

            def check(reply: Any) -> None:
                if reply.starts != sorted(set(reply.starts)) or reply.starts[0] != 0:
                    raise ValueError("starts must increase, beginning with 0")

            reply = self._ask("segment", "segment", schema, check, messages=_lines(block))
            if reply is None:
                alone = replace(later, messages=tuple(block))
                return [segment.messages for segment in self.offline.segment(alone)]
            ends = [*reply.starts[1:], len(block)]
            return [tuple(m.id for m in block[a:b]) for a, b in zip(reply.starts, ends, strict=True)]

        found = [ids for cuts in self._each("segments", cut, blocks) for ids in cuts]
        return [*done, *(Segment(f"s{i}", i, ids) for i, ids in enumerate(found, start=len(done)))]

    def extract(self, conversation: Conversation, segments: Sequence[Segment], fresh: Collection[str]) -> Extracted:
        """Return the segments, with summaries if they are asked for, and each one's facts.

        A message that no fact cites becomes a candidate as it is, so that none is lost.
        """
        messages = {message.id: message for message in conversation.messages}

        def read(segment: Segment) -> tuple[Segment, list[Candidate]]:
            said = [messages[id_] for id_ in segment.messages if id_ in fresh]
            if not said:
                return segment, []
            summary, facts = self._facts(said)
            cited = {source for fact in facts for statement in fact.statements for source in statement.sources}
            facts += [self.offline.candidate(message) for message in said if message.id not in cited]
            order = {message.id: place for place, message in enumerate(said)}
            facts.sort(key=lambda fact: order[fact.statements[0].sources[0]])
            return replace(segment, summary=summary or segment.summary), facts

        pairs = self._each("facts", read, segments)
        return [segment for segment, _ in pairs], [facts for _, facts in pairs]

    def _facts(self, said: Sequence[Message]) -> tuple[str, list[Candidate]]:
        """Return a summary, if one is asked for, and the facts that a model finds; nothing where its replies fail."""
        written, extracted = self.config.llm.values == "written", self.config.llm.episodic == "extracted"
        told: dict[str, Any] = {"value": str} if written else {}
        sources = _numbers(len(said), MOST_SOURCES if written else len(said))
        fact: Any = create_model("Fact", abstraction=str, **told, sources=sources)
        summary: dict[str, Any] = {"summary": str} if extracted else {}
        schema = create_model("Facts", **summary, facts=list[fact])

        def check(reply: Any) -> None:
            for fact in reply.facts:
                if not _says(fact.abstraction) or (written and not _says(fact.value)):
                    raise ValueError("every fact needs words in each of its fields")

        prompt = "extract" if written or extracted else "offsets"
        reply = self._ask("extract", prompt, schema, check, messages=_lines(said))
        if reply is None:
            return "", []
        facts = []
        for fact in reply.facts:
            cited = [said[n] for n in sorted(set(fact.sources))]
            statements = tuple(map(say, cited))
            if written:
                ids = tuple(message.id for message in cited)
                statements = (Statement(cited[0].speaker, cited[0].time, _flat(fact.value), ids),)
            facts.append(Candidate(_flat(fact.abstraction), statements))
        return _flat(reply.summary) if extracted else "", list(dict.fromkeys(facts))

    def choose(self, asked: Sequence[tuple[Candidate, Sequence[Entry]]]) -> list[Update | None]:
        """Ask the model which entry each candidate belongs to (the selector J), and for the merged value."""
        written = self.config.llm.values == "written"

        def decide(pair: tuple[Candidate, Sequence[Entry]]) -> Update | None:
            candidate, near = pair
            told: dict[str, Any] = {"value": str} if written else {}
            entry = Annotated[int, Field(ge=-1, lt=len(near))]
            schema = create_model("Choice", entry=entry, **told, abstraction=str)

            def check(reply: Any) -> None:
                if written and reply.entry >= 0 and not _says(reply.value):
                    raise ValueError("value must not be empty when an entry is named")

            fact = data_line(abstraction=candidate.abstraction, value="\n".join(s.line for s in candidate.statements))
            entries = "\n".join(data_line(n=n, abstraction=e.abstraction, value=e.value) for n, e in enumerate(near))
            prompt = "update" if written else "join"
            reply = self._ask("choose", prompt, schema, check, fact=fact, entries=entries)
            if reply is None:
                return self.offline.choose([pair])[0]
            if reply.entry < 0:
                return None
            refined = _flat(reply.abstraction) if _says(reply.abstraction) else None
            return Update(near[reply.entry].id, _flat(reply.value) if written else None, refined)

        return self._each(None, decide, asked)

    def name_anchors(self, entries: Sequence[Entry], changed: Collection[str]) -> list[tuple[str, ...]]:
        """Ask for the anchors of what changed; one that exists already in other letters is used as it is."""
        asked = [entry for entry in entries if entry.id in changed]
        kept = {entry.id: entry.anchors for entry in entries if entry.id not in changed}
        existing = sorted({anchor for anchors in kept.values() for anchor in anchors})
        calls = [asked[i : i + ENTRIES_A_CALL] for i in range(0, len(asked), ENTRIES_A_CALL)]

        def name(batch: Sequence[Entry]) -> Sequence[Sequence[str]]:
            few: Any = Annotated[list[str], Field(max_length=self.config.anchors_per_entry)]
            lists: Any = Annotated[list[few], Field(min_length=len(batch), max_length=len(batch))]
            shown = "\n".join(data_line(n=n, abstraction=e.abstraction, value=e.value) for n, e in enumerate(batch))
            known = "\n".join(data_line(anchor=a) for a in existing)
            schema = create_model("Anchors", anchors=lists)
            reply = self._ask("anchors", "anchors", schema, None, entries=shown, anchors=known)
            return self.offline.name_anchors(batch, changed) if reply is None else reply.anchors

        spelling = {anchor.casefold(): anchor for anchor in existing}
        found = [anchors for batch in self._each("anchors", name, calls) for anchors in batch]
        for entry, anchors in zip(asked, found, strict=True):
            good = [a for a in map(_flat, anchors) if is_anchor(a) and a.casefold() != entry.abstraction.casefold()]
            named = dict.fromkeys(spelling.setdefault(anchor.casefold(), anchor) for anchor in good)
            kept[entry.id] = tuple(named)[: self.config.anchors_per_entry]
        return [kept[entry.id] for entry in entries]

    def _ask(self, step: str, name: str, schema: type[BaseModel], check: Check | None, **values: str) -> Any:
        """Ask with one of our prompts; None, counted as a fallback of this step, where no reply is valid."""
        prompt = fill(files("cuewalk.memory").joinpath(f"prompt_{name}.txt").read_text(encoding="utf-8"), **values)
        try:
            return self.endpoint.ask(prompt, schema, check)
        except ReplyError:
            with self._lock:
                self.fallbacks[step] += 1
            return None

    def _each(self, title: str | None, task: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Run a task on every item, so many at a time, results in order; a failure ends what has not begun."""
        hidden = True if title is None else None  # None: where no terminal is
        return thread_map(task, items, max_workers=self.config.llm.concurrency, desc=title, disable=hidden)


def is_anchor(text: str) -> bool:
    """Tell whether a text can be a cue anchor: 2 to 4 words, no digits."""
    return 2 <= len(text.split()) <= 4 and not any(c.isdigit() for c in text)


def _lines(messages: Sequence[Message]) -> str:
    return "\n".join(
        data_line(n=n, time=f"{m.time:%Y-%m-%d %H:%M}", speaker=m.speaker, text=m.text) for n, m in enumerate(messages)
    )


def _says(text: str) -> bool:
    """Tell whether a text has a letter or a digit: a comma is no fact."""
    return any(c.isalnum() for c in text)


def _flat(text: str) -> str:
    return " ".join(text.split())
