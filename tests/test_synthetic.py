import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from cuewalk.env.own import load_synthetic
from cuewalk.env.records import Question, Tasks
from cuewalk.memory import LINK_KINDS, MemoryGraph, SentenceEncoder, build_graph
from cuewalk.memory.records import Message

ROOT = Path(__file__).parents[1]
SCRIPT = spec_from_file_location("make_synthetic", ROOT / "scripts" / "make_synthetic.py")
assert SCRIPT is not None and SCRIPT.loader is not None
maker = module_from_spec(SCRIPT)
sys.modules["make_synthetic"] = maker  # dataclasses look their module up
SCRIPT.loader.exec_module(maker)
SPLITS, generate, load_words = maker.SPLITS, maker.generate, maker.load_words

MANY = 20
SEEDS = (0, 1, 2)
EACH = 8  # conversations a seed in the measurement: with fewer a share swings by .04 and more


@pytest.fixture(scope="module", params=SPLITS)
def tasks(request: pytest.FixtureRequest) -> Tasks:
    return generate(request.param, conversations=MANY, seed=7)


def evidence_of(tasks: Tasks, question: Question) -> list[Message]:
    by_id = {message.id: message for message in tasks.conversations[question.conversation_id].messages}
    return [by_id[id_] for id_ in tasks.gold[question.id].evidence]


def content_words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-zà-ÿ]{3,}", text.lower())} - set(ENGLISH_STOP_WORDS)


def strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for child in node.values():
            yield from strings(child)
    elif isinstance(node, list):
        for child in node:
            yield from strings(child)


def test_same_arguments_give_the_same_tasks_and_other_seeds_others() -> None:
    first = generate("val", conversations=2, seed=3)
    assert first == generate("val", conversations=2, seed=3)
    other = generate("val", conversations=2, seed=4)
    texts = {message.text for c in first.conversations.values() for message in c.messages}
    assert texts != {message.text for c in other.conversations.values() for message in c.messages}


def test_the_first_conversations_do_not_depend_on_how_many_are_asked_for() -> None:
    few, more = (generate("test", conversations=n, seed=3) for n in (2, 3))
    assert list(more.conversations.items())[:2] == list(few.conversations.items())
    assert more.questions[: len(few.questions)] == few.questions


def test_output_is_pinned() -> None:
    tasks = generate("train", conversations=1, seed=0)
    messages = tasks.conversations["synthetic-train-0-0"].messages
    assert (messages[0].id, messages[-1].id) == ("D1:1", "D10:14")
    assert tasks.questions[0].text == "Which garment is Clara knitting?"


@pytest.mark.parametrize(("a", "b"), [*itertools.combinations(SPLITS, 2)])
def test_splits_share_no_string(a: str, b: str) -> None:
    """No template, name, topic, value or slot word of one split occurs in another."""
    words = load_words()
    assert not set(strings(words[a])) & set(strings(words[b]))


@pytest.mark.parametrize(("a", "b"), [*itertools.combinations(SPLITS, 2)])
def test_splits_share_no_person_and_no_message(a: str, b: str) -> None:
    one, two = (generate(split, conversations=MANY, seed=0) for split in (a, b))

    def seen(tasks: Tasks) -> set[str]:
        messages = [m for c in tasks.conversations.values() for m in c.messages]
        return {m.text for m in messages} | {m.speaker for m in messages} | {q.text for q in tasks.questions}

    assert not seen(one) & seen(two)


def test_conversations_alternate_between_two_speakers_over_dated_sessions(tasks: Tasks) -> None:
    for id_, conversation in tasks.conversations.items():
        assert conversation.id == id_ and id_.startswith("synthetic-") and not conversation.notes
        assert len(conversation.messages) == 135
        sessions = itertools.groupby(conversation.messages, lambda m: m.id.split(":")[0])
        ends = None
        for number, (name, group) in enumerate(sessions, start=1):
            messages = list(group)
            assert [m.id for m in messages] == [f"{name}:{i}" for i in range(1, len(messages) + 1)]
            assert name == f"D{number}"
            assert all(a.speaker != b.speaker for a, b in itertools.pairwise(messages))
            assert all(b.time - a.time <= timedelta(minutes=30) for a, b in itertools.pairwise(messages))
            assert messages[0].time.date() == messages[-1].time.date()
            assert ends is None or messages[0].time - ends > timedelta(minutes=30)
            ends = messages[-1].time
        assert len({m.speaker for m in conversation.messages}) == 2


@pytest.mark.parametrize("messages", [75, 76, 110, 300])
def test_any_size(messages: int) -> None:
    tasks = generate("val", conversations=3, seed=1, messages=messages)
    assert {len(c.messages) for c in tasks.conversations.values()} == {messages}
    assert all(evidence_of(tasks, question) for question in tasks.questions)


def test_questions_have_unique_ids_and_evidence_that_exists(tasks: Tasks) -> None:
    ids = [question.id for question in tasks.questions]
    assert len(set(ids)) == len(ids) and set(ids) == set(tasks.gold)
    assert all(1 <= len(evidence_of(tasks, question)) <= 3 for question in tasks.questions)
    per_conversation = Counter(question.conversation_id for question in tasks.questions)
    assert all(18 <= n <= 30 for n in per_conversation.values())
    assert 22 <= len(ids) / MANY <= 27


def test_evidence_is_a_small_part(tasks: Tasks) -> None:
    evidence = {(q.conversation_id, id_) for q in tasks.questions for id_ in tasks.gold[q.id].evidence}
    assert len(evidence) < 0.3 * sum(len(c.messages) for c in tasks.conversations.values())


def test_every_kind_occurs_in_its_share(tasks: Tasks) -> None:
    counts = Counter(gold.category for gold in tasks.gold.values())
    shares = {category: count / len(tasks.gold) for category, count in counts.items()}
    expected = {1: 0.30, 2: 0.16, 3: 0.085, 4: 0.34, 6: 0.11}
    assert set(shares) == set(expected)
    assert all(abs(shares[category] - share) < 0.06 for category, share in expected.items()), shares


def test_the_answer_stands_in_the_evidence(tasks: Tasks) -> None:
    """Except temporal ones (told relative to the session) and open-domain ones (inferred)."""
    for question in tasks.questions:
        gold = tasks.gold[question.id]
        text = " ".join(message.text for message in evidence_of(tasks, question)).lower()
        if gold.category not in (2, 3):
            assert all(part.lower() in text for part in gold.answer.split(", ")), (question, gold)


def test_a_temporal_answer_is_the_date_that_the_evidence_tells(tasks: Tasks) -> None:
    asked = [question for question in tasks.questions if tasks.gold[question.id].category == 2]
    numbers = ["zero", "one", "two", "three", "four", "five", "six", "seven"]
    for question in asked:
        (message,) = evidence_of(tasks, question)
        days = [n for n in range(1, 8) if f"{(message.time - timedelta(days=n)):past %A}" in message.text]
        days += [n for n, word in enumerate(numbers) if f"{word} days ago" in message.text]
        days += [7] * ("a week ago" in message.text) + [2] * ("before yesterday" in message.text)
        days = days or [1] * ("yesterday" in message.text)
        date = message.time - timedelta(days=days[0])
        assert tasks.gold[question.id].answer == f"{date.day} {date:%B} {date.year}"


def test_multi_hop_evidence_lies_in_different_sessions(tasks: Tasks) -> None:
    for question in tasks.questions:
        if tasks.gold[question.id].category == 1:
            sessions = [id_.split(":")[0] for id_ in tasks.gold[question.id].evidence]
            assert len(sessions) >= 2 and len(set(sessions)) == len(sessions)


def test_an_update_changes_a_value_told_before(tasks: Tasks) -> None:
    asked = [question for question in tasks.questions if tasks.gold[question.id].category == 6]
    before = [question for question in asked if len(tasks.gold[question.id].evidence) == 2]
    assert 0 < len(before) < len(asked)
    for question in before:
        old, new = evidence_of(tasks, question)
        assert old.time < new.time and old.speaker == new.speaker
        assert tasks.gold[question.id].answer.lower() in old.text.lower()
        assert tasks.gold[question.id].answer.lower() not in new.text.lower()


def test_questions_share_few_content_words_with_their_evidence(tasks: Tasks) -> None:
    """At most a quarter of a question's content words (without names) on average, often none."""
    shares = []
    for question in tasks.questions:
        names = {m.speaker.lower() for m in tasks.conversations[question.conversation_id].messages}
        asked = content_words(question.text) - names
        for message in evidence_of(tasks, question):
            shares.append(len(asked & content_words(message.text)) / len(asked))
    assert sum(shares) / len(shares) <= 0.25
    assert sum(share == 0 for share in shares) / len(shares) >= 0.4


def test_the_other_person_tells_about_the_same_topic(tasks: Tasks) -> None:
    """A distractor: for nearly every question there is one of the same kind about the other person."""
    found = []
    for question in tasks.questions:
        messages = tasks.conversations[question.conversation_id].messages
        a, b = sorted({message.speaker for message in messages})
        own = a if a in question.text else b
        assert own in question.text
        assert {message.speaker for message in evidence_of(tasks, question)} == {own}
        others = [q for q in tasks.questions if q.conversation_id == question.conversation_id and own not in q.text]
        topics = {topic_of(q.text, (a, b)) for q in others}
        found.append(topic_of(question.text, (a, b)) in topics)
    assert sum(found) / len(found) > 0.9


def topic_of(text: str, speakers: tuple[str, str]) -> str:
    for speaker in speakers:
        text = text.replace(speaker, "{name}")
    for words in load_words().values():
        for frame in itertools.chain.from_iterable(words["frames"].values()):
            if text in [*frame.get("ask", ()), *frame.get("ask_now", ()), *frame.get("ask_before", ())]:
                topic: str = frame["topic"]
                return topic
    raise AssertionError(text)


def test_two_conversations_rarely_share_evidence(tasks: Tasks) -> None:
    told: dict[str, set[str]] = {id_: set() for id_ in tasks.conversations}
    for question in tasks.questions:
        told[question.conversation_id] |= {message.text for message in evidence_of(tasks, question)}
    pairs = list(itertools.combinations(told.values(), 2))
    assert sum(len(a & b) for a, b in pairs) / len(pairs) < 0.4  # of about 36 messages


def test_no_template_is_left_unfilled(tasks: Tasks) -> None:
    for conversation in tasks.conversations.values():
        for message in conversation.messages:
            assert not re.search(r"[{}]|  |^[a-z]| [.,!?]", message.text), message
    assert not any(re.search(r"[{}]", question.text) for question in tasks.questions)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"split": "dev", "conversations": 1}, "unknown split 'dev'; choose from train, val, test"),
        ({"split": "val", "conversations": 0}, "conversations = 0"),
        ({"split": "val", "conversations": 1, "messages": 74}, "messages = 74: must be at least 75"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        generate(seed=0, **arguments)


def measure(tasks: Tasks, graphs: dict[str, MemoryGraph]) -> list[tuple[float, float, float, bool]]:
    """Of each question: recall at 5, with 6 picks of F0, with its first 3, and whether it is unreachable."""
    rows = []
    for question in tasks.questions:
        graph = graphs[question.conversation_id]
        gold = set(tasks.gold[question.id].evidence)

        def covered(entries: list[str], graph: MemoryGraph = graph, gold: set[str] = gold) -> set[str]:
            return {source for entry in entries for source in graph.entries[entry].sources} & gold

        working = [hit.entry for hit in graph.search(question.text, 5)]
        frontier = [link.entry for link in graph.frontier(question.text, working, working, LINK_KINDS, 24)]
        first = covered(working)
        picks = [entry for entry in frontier if covered([entry]) - first][:6]
        oracle = covered([*working, *picks])
        blind = covered([*working, *frontier[:3]])
        unreachable = first != gold and oracle == first
        rows.append((len(first) / len(gold), len(oracle) / len(gold), len(blind) / len(gold), unreachable))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_search_is_imperfect_one_hop_helps_and_some_stays_unreachable(split: str) -> None:
    encoder = SentenceEncoder("minilm")
    rows = []
    for seed in SEEDS:
        tasks = generate(split, conversations=EACH, seed=seed)
        graphs = {id_: build_graph(conversation, encoder) for id_, conversation in tasks.conversations.items()}
        found = measure(tasks, graphs)
        rows += found
        print(split, seed, *[f"{sum(column) / len(found):.3f}" for column in zip(*found, strict=True)])
    first, oracle, blind, unreachable = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    assert 0.45 <= first <= 0.70
    assert oracle >= 0.85
    assert blind - first < 0.5 * (oracle - first)
    assert 0.15 <= unreachable <= 0.25


@pytest.mark.parametrize(("split", "count"), list(zip(SPLITS, maker.COUNTS, strict=True)))
def test_the_embedded_file_is_what_the_script_makes(split: str, count: int) -> None:
    made = generate(split, conversations=count, seed=0)
    loaded = load_synthetic(split, count)
    assert loaded.conversations == made.conversations
    assert [q.text for q in loaded.questions] == [q.text for q in made.questions]
    assert list(loaded.gold.values()) == list(made.gold.values())
    assert list(load_synthetic(split, 1).conversations) == list(made.conversations)[:1]


def test_more_than_the_file_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="9 conversations for test: the synthetic data has 8"):
        load_synthetic("test", 9)
