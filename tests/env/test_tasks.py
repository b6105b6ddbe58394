import json
from datetime import datetime
from itertools import combinations

import pytest

from cuewalk.env import DataError, Question, load_json
from cuewalk.env.tasks import (
    LOCOMO_SHA256,
    load_locomo,
    parse_locomo_time,
    repair_evidence,
    select,
    splits,
)


@pytest.mark.parametrize(
    ("stored", "repaired"),
    [
        (["D8:6; D9:17"], ("D8:6", "D9:17")),
        (["D10:19"], ()),
        (["D1:18", "D", "D1:20"], ("D1:18", "D1:20")),
        (["D:11:26"], ("D11:26",)),
        (["D9:1 D4:4 D4:6"], ("D9:1", "D4:4", "D4:6")),
        (["D30:05"], ("D30:5",)),
        (["D4:5", "D4:5"], ("D4:5",)),
        ([], ()),
    ],
)
def test_one_rule_repairs_all_evidence(stored, repaired):
    known = ["D8:6", "D9:17", "D1:18", "D1:20", "D11:26", "D9:1", "D4:4", "D4:6", "D30:5", "D4:5"]
    assert repair_evidence(stored, known) == repaired


def test_dates_are_read_in_any_locale():
    assert parse_locomo_time("1:56 pm on 8 May, 2023") == datetime(2023, 5, 8, 13, 56)
    assert parse_locomo_time("12:09 am on 13 September, 2023") == datetime(2023, 9, 13, 0, 9)
    with pytest.raises(DataError, match="expected the form '1:56 pm on 8 May, 2023'"):
        parse_locomo_time("2023-05-08")


def test_no_split_shares_a_conversation_between_its_parts():
    assert set(splits()) == {"conv-4-1-5", "conv-4-1-5-b", "memory-r1", "ablations", "longmemeval"}
    for parts in splits().values():
        for a, b in combinations(("train", "val", "test"), 2):
            assert not set(parts[a]) & set(parts[b])
        assert all(id_.split(":")[0] in parts["test"] for id_ in parts.get("test_200", ()))
    assert len(set(splits()["conv-4-1-5"]["test_200"])) == 200
    assert splits()["conv-4-1-5"]["test"] == splits()["conv-4-1-5-b"]["train"]
    used = splits()["ablations"]["train"] + splits()["ablations"]["test"]  # choices never look at a test conversation
    assert used == splits()["conv-4-1-5"]["train"]


def sample(**changes):
    """A file of LoCoMo's format, in words of our own, with its known irregularities."""
    turns = [
        {"speaker": "Ann", "dia_id": "D1:1", "text": " I adopted a dog. \n"},
        {
            "speaker": "Bob",
            "dia_id": "D1:2",
            "text": "Nice!",
            "blip_caption": "a brown dog",
            "query": "SECRET QUERY",
        },
    ]
    data = {
        "qa": [
            {"question": "What did Ann adopt? ", "answer": "a dog", "evidence": ["D1:1"], "category": 4},
            {"question": "How many?", "answer": 1, "evidence": ["D1:01; D1:2"], "category": 1},
            {"question": "A trap?", "adversarial_answer": "yes", "evidence": ["D1:1"], "category": 5},
            {"question": "What did Ann adopt?", "answer": "a dog", "evidence": ["D1:1"], "category": 4},
            {"question": "Why?", "answer": "love", "evidence": [], "category": 3},
        ],
        "conversation": {
            "speaker_a": "Ann",
            "speaker_b": "Bob",
            "session_1_date_time": "1:56 pm on 8 May, 2023",
            "session_1": turns,
            "session_2_date_time": "2:00 pm on 9 May, 2023",
            "session_10_date_time": "2:00 pm on 11 May, 2023",
            "session_10": [{"speaker": "Ann", "dia_id": "D10:1", "text": "Last."}],
        },
        "event_summary": {"events_session_1": {"Ann": ["SECRET EVENT"]}},
        "observation": {"session_1_observation": {"Ann": [["Ann has a dog.", "D1:1, D1:2"]], "Bob": []}},
        "session_summary": {"session_1_summary": "SECRET SUMMARY"},
        "sample_id": "conv-26",
    }
    return data | changes


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A one-conversation file, and a split that asks for it."""
    monkeypatch.setattr("cuewalk.env.tasks.splits", lambda: {"mine": {"train": ("conv-26",), "val": (), "test": ()}})
    path = tmp_path / "locomo10.json"
    path.write_text(json.dumps([sample()]))
    return path


def test_a_locomo_file_is_loaded_by_the_rules(small):
    tasks = load_locomo(small, "mine", "train", sha256=None)
    conversation = tasks.conversations["conv-26"]
    assert [m.id for m in conversation.messages] == ["D1:1", "D1:2", "D10:1"]  # by number, no empty session 2
    assert conversation.messages[0].text == "I adopted a dog."
    assert conversation.messages[1].text == "Nice! [shares a photo: a brown dog]"
    assert conversation.notes[0].sources == ("D1:1", "D1:2")
    assert [q.id for q in tasks.questions] == ["conv-26:0", "conv-26:1", "conv-26:4"]  # no trap, no duplicate
    assert tasks.gold["conv-26:1"].answer == "1"
    assert tasks.gold["conv-26:1"].evidence == ("D1:1", "D1:2")
    assert not tasks.gold["conv-26:1"].clean  # position 1 of conv-26 is in the errata
    assert tasks.gold["conv-26:0"].clean
    assert [q.id for q in select(tasks, evidence=True, clean=True).questions] == ["conv-26:0"]


def test_what_nothing_answers_is_loaded_apart_without_evidence(small):
    trap = load_locomo(small, "mine", "train", sha256=None, unanswerable=True)
    assert trap.questions == (Question("conv-26:2", "conv-26", "A trap?"),)
    (gold,) = trap.gold.values()
    assert (gold.answer, gold.evidence, gold.category) == ("", (), 5)
    assert trap.conversations == load_locomo(small, "mine", "train", sha256=None).conversations


def test_gold_and_annotations_are_never_in_a_conversation(small):
    text = repr(load_locomo(small, "mine", "train", sha256=None).conversations)
    assert "SECRET" not in text and "How many" not in text


def test_bad_files_say_what_to_do(small, tmp_path):
    with pytest.raises(DataError, match=r"no data at .*Get locomo10.json with `cuewalk download locomo`"):
        load_locomo(tmp_path / "none", "mine", "train")
    with pytest.raises(DataError, match="has SHA-256 .*expected 79fa87e90f04.*Download it again"):
        load_locomo(small, "mine", "train")
    small.write_text(small.read_text()[:200])
    with pytest.raises(DataError, match="is no JSON .*truncated"):
        load_locomo(small, "mine", "train", sha256=None)
    small.write_text(json.dumps([sample(sample_id="conv-1")]))
    with pytest.raises(DataError, match=r"lacks the conversations \['conv-26'\]"):
        load_locomo(small, "mine", "train", sha256=None)
    with pytest.raises(ValueError, match="unknown split 'yours'; choose from mine"):
        load_locomo(small, "yours", "train")
    with pytest.raises(ValueError, match="unknown part 'dev'; choose from train, val, test"):
        load_locomo(small, "mine", "dev")


def own(**changes):
    message = {"id": 1, "speaker": "Ann", "time": "2024-05-01T12:00", "text": "I moved to Oslo."}
    question = {"id": "a", "text": "Where does Ann live?", "answer": "Oslo", "evidence": [1]}
    return {"id": "chat", "split": "train", "messages": [message], "questions": [question]} | changes


def test_a_users_own_file_is_loaded(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"conversations": [own(), own(id="later", split="test")]}))
    tasks = load_json(path, "train")
    assert [q.id for q in tasks.questions] == ["chat:a"]
    assert tasks.gold["chat:a"].evidence == ("1",) and tasks.gold["chat:a"].category == 4
    assert tasks.conversations["chat"].messages[0].time == datetime(2024, 5, 1, 12)


NOWHERE = {"id": 1, "text": "?", "answer": "", "evidence": [9]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"conversations": [own(), {"split": "train"}]}, "is no list of objects with `messages`"),
        ({"conversations": [own(), own(messages=[{}])]}, r"conversations\[1\] is not of the format: KeyError"),
        ({"conversations": [own(messages=[])]}, "has no messages"),
        ({"conversations": [own(questions=[NOWHERE])]}, r"unknown messages \['9'\]"),
        ({"conversations": [own(split="dev")]}, "no conversation with split 'train'"),
        ({"conversations": [own(), own()]}, r"ids occur twice: \['chat'"),
    ],
)  # fmt: skip
def test_a_users_bad_file_is_told_where(tmp_path, content, message):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        load_json(path, "train")


def test_the_real_file_gives_the_published_counts(locomo_path):
    counts = {}
    for part in ("train", "val", "test"):
        tasks = load_locomo(locomo_path, "conv-4-1-5", part, sha256=LOCOMO_SHA256)
        counts[part] = (len(tasks.questions), len(select(tasks, evidence=True).questions))
        for question in tasks.questions:
            known = {m.id for m in tasks.conversations[question.conversation_id].messages}
            assert set(tasks.gold[question.id].evidence) <= known
    # 827 in test less 11 exact duplicates; 4 questions of the data set have no evidence.
    assert counts == {"train": (632, 630), "val": (81, 81), "test": (816, 814)}


def test_the_real_file_gives_the_published_adversarial_questions(locomo_path):
    parts = [load_locomo(locomo_path, "conv-4-1-5", part, unanswerable=True) for part in ("train", "val", "test")]
    # 446 in all: 192 less repeated ones, 24, and 230.
    assert [len(tasks.questions) for tasks in parts] == [192, 24, 230]


def test_no_training_question_evidence_or_conversation_is_in_a_test_set(locomo_path):
    for split in splits().keys() - {"longmemeval"}:
        parts = {part: load_locomo(locomo_path, split, part) for part in ("train", "test")}
        said = {p: {(i, m.id) for i, c in t.conversations.items() for m in c.messages} for p, t in parts.items()}
        assert not said["train"] & said["test"]
        assert not {q.id for q in parts["train"].questions} & {q.id for q in parts["test"].questions}
