"""Make env/synthetic.json: conversations of two people over many sessions, with questions and gold evidence.

    python scripts/make_synthetic.py            # writes the file that the demo and the tests use

Own words only.

A conversation is made of short threads between small talk. In most, one person asks about a topic ("how is
the pottery thing going?") and the other's reply tells a fact in other words than the question about it will
use ("the second glaze cracked, so I switched to raku"): the question finds the opener, and the evidence lies
beside it or shares a name with it. Some facts are told unasked after naming the topic, which plain search
finds; some in passing, which search and one hop often miss. Both people tell about the same topics, so each
one's facts distract from the other's.

Names, topics, values and templates are in `synthetic_words.json`, apart for each split. The shares below were set
by measuring search and frontier on all splits (`tests/test_synthetic.py` holds the ranges).
"""

import json
import random
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from cuewalk.env.records import Gold, Question, Tasks
from cuewalk.memory.records import Conversation, Message, format_date

HERE = Path(__file__).parent
SPLITS = ("train", "val", "test")
COUNTS = (24, 4, 8)  # conversations of each split in the file
MULTI_HOP, TEMPORAL, OPEN_DOMAIN, SINGLE_HOP, UPDATE = 1, 2, 3, 4, 6

MIN_MESSAGES = 75
SESSION_MESSAGES = 14  # on average
CONTENT = 0.75  # share of the messages that topic threads may take before small talk fills the rest
PAUSED = 0.2  # share of topic threads in which something comes between opener and reply
DIRECT = 0.3  # share of the facts told without being asked, after naming the topic
ECHO = 0.35  # share of the replies that name the topic themselves
BURIED = 0.65  # share of the facts told in passing that come at the end of a message about something else
PASSING = 0.7  # share of the facts of lists, bridges and updates that are told in passing

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
    threads: list[list[tuple[_Line, ...]]]  # of each session
    strangers: list[str]  # third persons who will play a part
    friends: Sequence[str]  # third persons who are only mentioned
    asks: list[_Ask] = field(default_factory=list)
    uses: Counter[str] = field(default_factory=Counter)  # of templates
    tags: int = 0


def generate(split: str, *, conversations: int, seed: int, messages: int = 135) -> Tasks:
    """Make conversations with about 25 questions each; the same arguments give the same tasks.

    Args:
        split: `train`, `val` or `test`: they share no name, topic, value or template.
        conversations: How many; the first n are the same however many are asked for.
        seed: Any number.
        messages: Of each conversation, at least 75. There are about 25 questions at 135 messages, fewer in
            shorter conversations and no more than about 40 in longer ones.

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
    words: Mapping[str, Words] = json.loads((HERE / "synthetic_words.json").read_text(encoding="utf-8"))
    return words


def _draft(rng: random.Random, words: Words, messages: int) -> _Draft:
    """Choose speakers, dates and topics, and write the topic threads."""
    first, second = rng.sample(words["names"], 2)
    sessions = max(4, round(messages / SESSION_MESSAGES))
    others = rng.sample(words["slots"]["friend"], len(words["slots"]["friend"]))
    parts = 2 * len(words["frames"]["bridge"])
    threads: list[list[tuple[_Line, ...]]] = [[] for _ in range(sessions)]
    draft = _Draft(rng, words, (first, second), _dates(rng, sessions), threads, others[:parts], others[parts:])
    waiting = {kind: rng.sample(frames, len(frames)) for kind, frames in words["frames"].items()}
    for kind in _ORDER:
        size = sum(len(thread) + 0.4 for threads in draft.threads for thread in threads) + 3 * sessions
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
        if not 13 <= time.hour <= 21:  # nobody talks at night, and no session runs past midnight
            time = (time + timedelta(hours=3)).replace(hour=rng.randint(13, 20))
        dates.append(time)
    return dates


# One writer a kind of topic. Each lets both people tell their facts and asks about them.


def _write_single(draft: _Draft, frame: Frame) -> None:
    values = draft.rng.sample(frame["values"], 2)
    for who, value in enumerate(values):
        tag = _tell(draft, _sessions(draft, 1)[0], who, frame["open"], frame["tell"], frame["topic"], v=value)
        _ask(draft, who, frame["ask"], value, (tag,), SINGLE_HOP)


def _write_temporal(draft: _Draft, frame: Frame) -> None:
    """The same event for both people, on different dates."""
    for who in (0, 1):
        session = _sessions(draft, 1)[0]
        phrase, days = _when(draft.rng, draft.times[session])
        tag = _tell(draft, session, who, frame["open"], frame["tell"], frame["topic"], when=phrase)
        _ask(draft, who, frame["ask"], "", (tag,), TEMPORAL, days)


def _write_open(draft: _Draft, frame: Frame) -> None:
    for who, (value, answer) in enumerate(draft.rng.sample(frame["pairs"], 2)):
        tag = _tell(draft, _sessions(draft, 1)[0], who, frame["open"], frame["tell"], frame["topic"], v=value)
        _ask(draft, who, frame["ask"], answer, (tag,), OPEN_DOMAIN)


def _write_list(draft: _Draft, frame: Frame) -> None:
    """Three things of one sort in different sessions: one mostly when asked, one unasked, one in passing."""
    values = draft.rng.sample(frame["values"], 6)
    openers = {"asked": frame["open"], "unasked": None}
    for who, own in enumerate((values[:3], values[3:])):
        ways = draft.rng.sample(("asked", "unasked", "passing"), 3)
        tags = [
            _tell(draft, session, who, None, frame["pass"], v=value)
            if way == "passing"
            else _tell(draft, session, who, openers[way], frame["tell"], frame["topic"], v=value)
            for session, value, way in zip(_sessions(draft, 3), own, ways, strict=True)
        ]
        _ask(draft, who, frame["ask"], ", ".join(own), tuple(tags), MULTI_HOP)


def _write_bridge(draft: _Draft, frame: Frame) -> None:
    """First a third person is introduced by name, in a later session the asked fact about them is told."""
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
    old = _tell(draft, first, changer, frame["open"], frame["tell"], frame["topic"], v=before)
    if passing := draft.rng.random() < PASSING:
        new = _tell(draft, second, changer, None, frame["pass"], v=now)
    else:
        new = _tell(draft, second, changer, frame["reopen"], frame["change"], frame["topic"], v=now)
    third = _sessions(draft, 1)[0]
    kept = _tell(draft, third, 1 - changer, frame["open"], frame["tell"], frame["topic"], v=other)
    if not passing:
        _ask(draft, changer, frame["ask_now"], now, (new,), UPDATE)
    _ask(draft, changer, frame["ask_before"], before, (old, new), UPDATE)
    _ask(draft, 1 - changer, frame["ask_now"], other, (kept,), SINGLE_HOP)


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
    draft: _Draft,
    session: int,
    who: int,
    openers: Sequence[str] | None,
    tells: Sequence[str],
    topic: str = "",
    **given: str,
) -> int:
    """Add a thread in which `who` tells a fact, and return the fact's tag.

    Asked with one of `openers`, unasked after naming `topic`, or in passing if neither is given.
    """
    rng = draft.rng
    tag = draft.tags
    draft.tags += 1
    reply = _fill(draft, who, tells, **given)
    if topic and (openers is None or rng.random() < DIRECT):
        reply = _join(_fill(draft, who, draft.words["announces"], topic=topic), reply)
        openers = None
    elif openers is None:
        reply = _join(_maybe(draft, who, "asides", BURIED), reply)
    if openers is None:
        draft.threads[session].append((_Line(who, _join(reply, _maybe(draft, who, "tails", 0.5)), tag),))
        return tag
    opener = _join(_maybe(draft, 1 - who, "ask_leads", 0.9), _fill(draft, 1 - who, openers, **given))
    lines = [_Line(1 - who, opener)]
    if rng.random() < PAUSED:
        wait, go_on = _exchange(draft, "pauses", who)
        lines += [_Line(who, wait), _Line(1 - who, go_on)]
    if topic and rng.random() < ECHO:
        lead = _fill(draft, who, draft.words["echoes"], topic=topic)
    else:
        lead = _maybe(draft, who, "tell_leads", 0.15)
    reply = _join(lead, reply, _maybe(draft, who, "tails", 0.25))
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


def _exchange(draft: _Draft, key: str, speaker: int) -> tuple[str, str]:
    """Choose a remark and what the other says to it; both speak of the same things."""
    answers = dict(draft.words[key])
    remark = _choose(draft, list(answers))
    things = {name: _slot(draft, name) for name in ("day", *draft.words["slots"])}
    return _complete(draft, speaker, remark, things), _complete(draft, 1 - speaker, answers[remark], things)


def _maybe(draft: _Draft, speaker: int, key: str, share: float) -> str:
    return _fill(draft, speaker, draft.words[key]) if draft.rng.random() < share else ""


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _choose(draft: _Draft, templates: Sequence[str]) -> str:
    """Choose one of the templates that this conversation has used least."""
    fewest = min(draft.uses[template] for template in templates)
    template = draft.rng.choice([template for template in templates if draft.uses[template] == fewest])
    draft.uses[template] += 1
    return template


def _fill(draft: _Draft, speaker: int, templates: Sequence[str], **given: str) -> str:
    """Choose a template and fill it; what is not given is drawn from the split's slots."""
    return _complete(draft, speaker, _choose(draft, templates), given)


def _complete(draft: _Draft, speaker: int, template: str, values: Mapping[str, str]) -> str:
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    drawn = {name: _slot(draft, name) for name in sorted(names - {"you", *values})}
    text = template.format(**values, **drawn, you=draft.speakers[1 - speaker])
    return text[0].upper() + text[1:]


def _slot(draft: _Draft, name: str) -> str:
    if name == "day":
        return draft.rng.choice(_WEEKDAYS)
    if name == "friend":
        return draft.rng.choice(draft.friends)
    value: str = draft.rng.choice(draft.words["slots"][name])
    return value


_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven")


def _when(rng: random.Random, time: datetime) -> tuple[str, int]:
    """Return a phrase for a day before `time`, and how many days before."""
    days = rng.randint(1, 7)
    weekday = _WEEKDAYS[(time - timedelta(days=days)).weekday()]
    phrases = {1: "yesterday", 2: "the day before yesterday", 7: "exactly a week ago"}
    return phrases.get(days, rng.choice((f"this past {weekday}", f"{_NUMBERS[days]} days ago"))), days


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
    if missing == 1:
        last = 1 - sessions[-1][-1].speaker
        sessions[-1].append(_Line(last, _fill(draft, last, draft.words["goodbyes"])))
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
    lines = [_small_talk(draft, speaker, _fill(draft, speaker, draft.words["greetings"]))]
    lines.append(_small_talk(draft, 1 - speaker, _fill(draft, 1 - speaker, draft.words["returns"])))
    for thread in threads:
        if thread[0].speaker == lines[-1].speaker:
            other = 1 - lines[-1].speaker
            lines.append(_small_talk(draft, other, _fill(draft, other, draft.words["reactions"])))
        lines += thread
    speaker = 1 - lines[-1].speaker
    lines.append(_Line(speaker, _fill(draft, speaker, draft.words["goodbyes"])))
    return lines


def _small_talk(draft: _Draft, speaker: int, text: str) -> _Line:
    return _Line(speaker, _join(text, _maybe(draft, speaker, "asides", 0.7)))


def _insert_chat(draft: _Draft, lines: list[_Line]) -> None:
    """Insert two messages of small talk where they do not part an opener from its reply."""
    places = [
        place
        for place in range(2, len(lines))
        if lines[place].tag is None and (place == len(lines) - 1 or lines[place - 1].tag is not None)
    ]
    place = draft.rng.choice(places)
    speaker = 1 - lines[place - 1].speaker
    remark, answer = _exchange(draft, "chat", speaker)
    lines[place:place] = [_small_talk(draft, speaker, remark), _small_talk(draft, 1 - speaker, answer)]


def as_json(tasks: Tasks, split: str) -> list[str]:
    """Return each conversation in the format for people's own data, one message and one question a line."""
    texts = []
    for id_, conversation in tasks.conversations.items():
        messages = [
            {"id": m.id, "speaker": m.speaker, "time": m.time.isoformat(timespec="minutes"), "text": m.text}
            for m in conversation.messages
        ]
        questions = []
        for question in tasks.questions:
            if question.conversation_id == id_:
                gold = tasks.gold[question.id]
                number = question.id.rsplit("-", 1)[1]
                questions.append({"id": number, "text": question.text, "answer": gold.answer,
                                  "evidence": gold.evidence, "category": gold.category})  # fmt: skip
        rows = {key: ",\n".join(map(json.dumps, value)) for key, value in (("m", messages), ("q", questions))}
        texts.append(
            f'{{"id": "{id_}", "split": "{split}",\n"messages": [\n{rows["m"]}],\n"questions": [\n{rows["q"]}]}}'
        )
    return texts


def main() -> None:
    """Write the file."""
    parts = [
        text
        for split, count in zip(SPLITS, COUNTS, strict=True)
        for text in as_json(generate(split, conversations=count, seed=0), split)
    ]
    path = HERE.parent / "env" / "synthetic.json"
    path.write_text('{"conversations": [\n' + ",\n".join(parts) + "]}\n", encoding="utf-8")
    print(f"{path}: {len(parts)} conversations")


if __name__ == "__main__":
    main()
