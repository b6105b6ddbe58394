"""Synthetic conversations of two people over many sessions, with questions and gold evidence; own words only.

A conversation is made of short threads. A *topic thread* has an opener that names the topic ("how is the pottery
thing going?") and a reply that tells the fact, mostly in other words than the question uses ("the second glaze
cracked, so I switched to raku"): the question finds the opener, and the evidence lies beside it. A fact told *in
passing* has no opener and stands alone among small talk, which plain search and one hop may both miss. Both people
tell about the same topics, so each one's facts distract from the other's.

Names, topics, values and templates are in `synthetic.json`, apart for each split.
"""

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Any

from cuewalk.env.records import Gold, Question, Tasks
from cuewalk.memory.build import format_date
from cuewalk.memory.records import Conversation, Message

SPLITS = ("train", "val", "test")
MULTI_HOP, TEMPORAL, OPEN_DOMAIN, SINGLE_HOP, UPDATE = 1, 2, 3, 4, 6

MIN_MESSAGES = 40
SESSION_MESSAGES = 11  # on average
CONTENT = 0.8  # share of the messages that topic threads may take before small talk fills the rest
PAUSED = 0.2  # share of topic threads in which something comes between opener and reply
PASSING = 0.5  # share of the facts of lists, bridges and updates that are told in passing

Words = Mapping[str, Any]
Frame = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Line:
    speaker: int
    text: str
    tag: int | None = None  # which fact it tells


@dataclass(frozen=True, slots=True)
class _Ask:
    text: str
    answer: str
    tags: tuple[int, ...]
    category: int
    days_before: int | None = None  # temporal: the answer is this many days before the evidence


@dataclass
class _Draft:
    """A conversation in the making."""

    rng: random.Random
    words: Words
    speakers: tuple[str, str]
    times: Sequence[datetime]  # of the sessions
    threads: list[list[tuple[_Line, ...]]] = field(default_factory=list)  # of each session
    asks: list[_Ask] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)  # third persons not yet introduced
    tags: int = 0


def generate(split: str, *, conversations: int, seed: int, messages: int = 125) -> Tasks:
    """Make conversations with about 25 questions each; the same arguments give the same tasks.

    Args:
        split: `train`, `val` or `test`: they share no name, topic, value or template.
        conversations: How many; the first n are the same however many are asked for.
        seed: Any number.
        messages: Of each conversation, at least 40. There are about 25 questions from 125 messages on, and fewer
            in shorter conversations.

    Raises:
        ValueError: If an argument is out of range.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
    if conversations < 1:
        raise ValueError(f"conversations = {conversations}: must be at least 1")
    if messages < MIN_MESSAGES:
        raise ValueError(f"messages = {messages}: must be at least {MIN_MESSAGES}")
    made: dict[str, Conversation] = {}
    questions: list[Question] = []
    gold: dict[str, Gold] = {}
    for index in range(conversations):
        id_ = f"synthetic-{split}-{seed}-{index}"
        draft = _draft(random.Random(id_), load_words()[split], messages)
        made[id_], sources = _assemble(draft, id_, messages)
        times = {message.id: message.time for message in made[id_].messages}
        for number, ask in enumerate(draft.asks):
            question = Question(f"{id_}-q{number}", id_, ask.text)
            evidence = tuple(sources[tag] for tag in ask.tags)
            answer = ask.answer
            if ask.days_before is not None:
                answer = format_date(times[evidence[0]] - timedelta(days=ask.days_before))
            questions.append(question)
            gold[question.id] = Gold(answer, evidence, ask.category)
    return Tasks(made, tuple(questions), gold)


@cache
def load_words() -> Mapping[str, Words]:
    """Return the word lists and templates of every split."""
    text = files("cuewalk.env").joinpath("synthetic.json").read_text(encoding="utf-8")
    words: Mapping[str, Words] = json.loads(text)
    return words


def _draft(rng: random.Random, words: Words, messages: int) -> _Draft:
    """Choose speakers, dates and topics, and write the topic threads."""
    first, second = rng.sample(words["names"], 2)
    sessions = max(4, round(messages / SESSION_MESSAGES))
    strangers = rng.sample(words["slots"]["friend"], len(words["slots"]["friend"]))
    draft = _Draft(rng, words, (first, second), _dates(rng, sessions), [[] for _ in range(sessions)], [], strangers)
    waiting = {kind: rng.sample(frames, len(frames)) for kind, frames in words["frames"].items()}
    for kind in _ORDER:
        size = sum(len(thread) + 0.4 for threads in draft.threads for thread in threads) + 2 * sessions
        if size > CONTENT * messages:
            break
        if waiting[kind]:
            _WRITERS[kind](draft, waiting[kind].pop())
    return draft


def _dates(rng: random.Random, sessions: int) -> list[datetime]:
    time = datetime(2023, rng.randint(1, 12), rng.randint(1, 28), rng.randint(13, 20), rng.randint(0, 59))
    dates = [time]
    while len(dates) < sessions:
        hours = rng.choice((5, 24, 49, 75, 120, 170, 240))
        time = (time + timedelta(hours=hours, minutes=rng.randint(0, 50))).replace(second=0)
        if time.hour < 13:  # nobody talks at night
            time = time.replace(hour=rng.randint(13, 20))
        dates.append(time)
    return dates


# One writer a kind of topic. Each lets both people tell their facts and asks about them.


def _write_single(draft: _Draft, frame: Frame) -> None:
    values = draft.rng.sample(frame["values"], 2)
    for who, value in enumerate(values):
        tag = _tell(draft, _sessions(draft, 1)[0], who, frame["open"], frame["tell"], v=value)
        _ask(draft, who, frame["ask"], value, (tag,), SINGLE_HOP)


def _write_temporal(draft: _Draft, frame: Frame) -> None:
    """The same event for both people, on different dates."""
    for who in (0, 1):
        session = _sessions(draft, 1)[0]
        phrase, days = _when(draft.rng, draft.times[session])
        tag = _tell(draft, session, who, frame["open"], frame["tell"], when=phrase)
        _ask(draft, who, frame["ask"], "", (tag,), TEMPORAL, days)


def _write_open(draft: _Draft, frame: Frame) -> None:
    for who, (value, answer) in enumerate(draft.rng.sample(frame["pairs"], 2)):
        tag = _tell(draft, _sessions(draft, 1)[0], who, frame["open"], frame["tell"], v=value)
        _ask(draft, who, frame["ask"], answer, (tag,), OPEN_DOMAIN)


def _write_list(draft: _Draft, frame: Frame) -> None:
    """Two or three things of one sort, in different sessions, one of them in passing."""
    values = draft.rng.sample(frame["values"], 5)
    for who, own in enumerate((values[:2], values[2:])):
        sessions = _sessions(draft, len(own))
        passing = draft.rng.randrange(len(own))
        tags = [
            _tell(draft, session, who, None, frame["pass"], v=value)
            if number == passing
            else _tell(draft, session, who, frame["open"], frame["tell"], v=value)
            for number, (session, value) in enumerate(zip(sessions, own, strict=True))
        ]
        _ask(draft, who, frame["ask"], ", ".join(own), tuple(tags), MULTI_HOP)


def _write_bridge(draft: _Draft, frame: Frame) -> None:
    """First a third person is introduced by name, in a later session the asked fact about that name is told."""
    for who, value in enumerate(draft.rng.sample(frame["values"], 2)):
        stranger = draft.strangers.pop()
        first, second = _sessions(draft, 2)
        news = None if draft.rng.random() < PASSING else draft.words["news"]
        introduced = _tell(draft, first, who, frame["open"], frame["tell"], e=stranger)
        told = _tell(draft, second, who, news, frame["second"], e=stranger, v=value)
        _ask(draft, who, frame["ask"], value, (introduced, told), MULTI_HOP)


def _write_update(draft: _Draft, frame: Frame) -> None:
    """One of the two changes a value told before; the other's value stays."""
    changer = draft.rng.randrange(2)
    before, now, other = draft.rng.sample(frame["values"], 3)
    first, second = _sessions(draft, 2)
    old = _tell(draft, first, changer, frame["open"], frame["tell"], v=before)
    if draft.rng.random() < PASSING:
        new = _tell(draft, second, changer, None, frame["pass"], v=now)
    else:
        new = _tell(draft, second, changer, frame["reopen"], frame["change"], v=now)
    _tell(draft, _sessions(draft, 1)[0], 1 - changer, frame["open"], frame["tell"], v=other)
    _ask(draft, changer, frame["ask_now"], now, (new,), UPDATE)
    _ask(draft, changer, frame["ask_before"], before, (old, new), UPDATE)


_WRITERS: Mapping[str, Callable[[_Draft, Frame], None]] = {
    "single": _write_single,
    "temporal": _write_temporal,
    "open": _write_open,
    "list": _write_list,
    "bridge": _write_bridge,
    "update": _write_update,
}
_ORDER = (
    *("single", "list", "update", "temporal", "bridge", "single"),
    *("list", "update", "open", "single", "temporal", "bridge"),
    *("single", "update", "list", "temporal", "single", "open"),
)


def _sessions(draft: _Draft, count: int) -> list[int]:
    """Choose different sessions, in order, among those with the fewest messages so far."""
    sizes = [sum(len(thread) for thread in threads) for threads in draft.threads]
    emptiest = sorted(range(len(sizes)), key=lambda session: sizes[session] + draft.rng.uniform(0, 4))
    return sorted(emptiest[:count])


def _tell(
    draft: _Draft, session: int, who: int, openers: Sequence[str] | None, tells: Sequence[str], **given: str
) -> int:
    """Add a thread in which `who` tells a fact, asked by the other with an opener or in passing; return its tag."""
    rng, words = draft.rng, draft.words
    tag = draft.tags
    draft.tags += 1
    reply = _fill(draft, who, tells, **given)
    if openers is None:
        draft.threads[session].append((_Line(who, _join(reply, _maybe(draft, who, "tails", 0.5)), tag),))
        return tag
    opener = _join(_maybe(draft, 1 - who, "ask_leads", 0.6), _fill(draft, 1 - who, openers, **given))
    lines = [_Line(1 - who, opener)]
    if rng.random() < PAUSED:
        wait, go_on = rng.choice(words["pauses"])
        lines += [_Line(who, _fill(draft, who, [wait])), _Line(1 - who, _fill(draft, 1 - who, [go_on]))]
    reply = _join(_maybe(draft, who, "tell_leads", 0.4), reply, _maybe(draft, who, "tails", 0.5))
    draft.threads[session].append((*lines, _Line(who, reply, tag)))
    return tag


def _ask(
    draft: _Draft,
    who: int,
    templates: Sequence[str],
    answer: str,
    tags: tuple[int, ...],
    category: int,
    days: int | None = None,
) -> None:
    text = draft.rng.choice(templates).format(name=draft.speakers[who])
    draft.asks.append(_Ask(text, answer, tags, category, days))


def _maybe(draft: _Draft, speaker: int, key: str, share: float) -> str:
    return _fill(draft, speaker, draft.words[key]) if draft.rng.random() < share else ""


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _fill(draft: _Draft, speaker: int, templates: Sequence[str], **given: str) -> str:
    """Choose a template and fill it; what is not given is drawn from the split's slots."""
    template = draft.rng.choice(templates)
    values = dict(given, you=draft.speakers[1 - speaker])
    for _, name, _, _ in string.Formatter().parse(template):
        if name == "day":
            values[name] = draft.rng.choice(_WEEKDAYS)
        elif name == "friend":
            # Third persons who play a part (`e`) are not also passers-by.
            free = [friend for friend in draft.words["slots"][name] if friend in draft.strangers]
            values.setdefault(name, draft.rng.choice(free))
        elif name and name not in values:
            values[name] = draft.rng.choice(draft.words["slots"][name])
    text = template.format(**values)
    return text[0].upper() + text[1:]


_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _when(rng: random.Random, time: datetime) -> tuple[str, int]:
    """Return a phrase for a day before `time`, and how many days before."""
    days = rng.randint(1, 7)
    weekday = _WEEKDAYS[(time - timedelta(days=days)).weekday()]
    phrases = {1: "yesterday", 2: "the day before yesterday", 7: "exactly a week ago"}
    return phrases.get(days, rng.choice((f"this past {weekday}", f"{days} days ago"))), days


# From threads to messages: two people taking turns, with small talk between and around the threads.


def _assemble(draft: _Draft, id_: str, messages: int) -> tuple[Conversation, dict[int, str]]:
    """Put the threads in order, fill up with small talk, and number the messages.

    Returns:
        The conversation, and the message id of each fact.
    """
    rng = draft.rng
    sessions = [_session(draft, threads) for threads in draft.threads]
    missing = messages - sum(len(lines) for lines in sessions)
    while missing > 1:
        smallest = min(range(len(sessions)), key=lambda session: len(sessions[session]) + rng.uniform(0, 6))
        _insert_chat(draft, sessions[smallest])
        missing -= 2
    result: list[Message] = []
    sources: dict[int, str] = {}
    for number, (time, lines) in enumerate(zip(draft.times, sessions, strict=True), start=1):
        pace = rng.choice((0, 0, 1, 2))  # minutes between messages; 0: the session has one time
        for turn, line in enumerate(lines, start=1):
            message = f"D{number}:{turn}"
            at = time + timedelta(minutes=pace * (turn - 1))
            result.append(Message(message, draft.speakers[line.speaker], at, line.text))
            if line.tag is not None:
                sources[line.tag] = message
    return Conversation(id_, tuple(result)), sources


def _session(draft: _Draft, threads: list[tuple[_Line, ...]]) -> list[_Line]:
    rng = draft.rng
    rng.shuffle(threads)
    speaker = rng.randrange(2)
    lines = [_Line(speaker, _fill(draft, speaker, draft.words["greetings"]))]
    for thread in threads:
        if thread[0].speaker == lines[-1].speaker:
            other = 1 - lines[-1].speaker
            lines.append(_Line(other, _fill(draft, other, draft.words["reactions"])))
        lines += thread
    speaker = 1 - lines[-1].speaker
    lines.append(_Line(speaker, _fill(draft, speaker, draft.words["goodbyes"])))
    return lines


def _insert_chat(draft: _Draft, lines: list[_Line]) -> None:
    """Insert two messages of small talk where they do not part an opener from its reply."""
    places = [
        place
        for place in range(1, len(lines))
        if lines[place].tag is None and (place == len(lines) - 1 or lines[place - 1].tag is not None)
    ]
    place = draft.rng.choice(places)
    speaker = 1 - lines[place - 1].speaker
    remark, answer = draft.rng.choice(draft.words["chat"])
    lines[place:place] = [
        _Line(speaker, _fill(draft, speaker, [remark])),
        _Line(1 - speaker, _fill(draft, 1 - speaker, [answer])),
    ]
