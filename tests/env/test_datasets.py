import json
import os
import shutil
from contextlib import suppress
from datetime import datetime
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuewalk.env import DataError, Gold, Question, Tasks, load_json, load_longmemeval, load_perltqa
from cuewalk.env.own import DEALT, deal, parse_record, read_records, silver_evidence
from cuewalk.env.tasks import CATEGORIES, PARTS, embedded, splits
from cuewalk.memory import Message
from cuewalk.rl.config import ConfigError, DataConfig, parse_config
from cuewalk.rl.data import load_part
from cuewalk.scripts.check import HOW_TO_ASK, check
from cuewalk.scripts.cli import main


def real(name: str) -> Path:
    folder = os.environ.get("CUEWALK_DATA")
    if not folder or not (Path(folder) / name).exists():
        pytest.skip(f"CUEWALK_DATA is not set, or has no {name}")
    return Path(folder) / name


# --- LongMemEval ---


def haystack(**changes):
    """A question of LongMemEval's format, in words of our own: the later session comes first, one turn is blank."""
    said = lambda role, content, **more: {"role": role, "content": content, **more}  # noqa: E731
    return {
        "question_id": "q1",
        "question_type": "knowledge-update",
        "question": " Where is my bike now? ",
        "answer": 7,
        "question_date": "2023/06/01 (Thu) 10:00",
        "haystack_dates": ["2023/05/30 (Tue) 23:40", "2023/05/29 (Mon) 08:05"],
        "haystack_session_ids": ["answer_secret_2", "answer_secret_1"],
        "haystack_sessions": [
            [said("user", "It is at gate 7 now. ", has_answer=True), said("assistant", "Good."), said("user", "Bye")],
            [said("user", " "), said("assistant", "Hello?"), said("user", "My bike is at gate 2.", has_answer=True)],
        ],
        "answer_session_ids": ["answer_secret_1", "answer_secret_2"],
    } | changes


@pytest.fixture
def lme(tmp_path, monkeypatch):
    parts = {"longmemeval": {"train": ("q1",), "val": (), "test": ("q2",)}}
    monkeypatch.setattr("cuewalk.env.datasets.splits", lambda: parts)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([haystack(), haystack(question_id="q2"), haystack(question_id="q1_abs")]))
    return path


def test_a_longmemeval_question_is_a_conversation_with_neutral_ids(lme):
    tasks = load_longmemeval(lme, "train", pinned=False)
    assert tasks.questions == (Question("q1", "q1", "Where is my bike now?"),)
    assert tasks.gold == {"q1": Gold("7", ("s1:3", "s2:1"), 6)}
    conversation = tasks.conversations["q1"]
    assert conversation.messages == (
        Message("s1:2", "assistant", datetime(2023, 5, 29, 8, 5), "Hello?"),
        Message("s1:3", "user", datetime(2023, 5, 29, 8, 5), "My bike is at gate 2."),
        Message("s2:1", "user", datetime(2023, 5, 30, 23, 40), "It is at gate 7 now."),
        Message("s2:2", "assistant", datetime(2023, 5, 30, 23, 40), "Good."),
        Message("s2:3", "user", datetime(2023, 5, 30, 23, 40), "Bye"),
    )
    assert conversation.breaks == {"s1:2", "s2:1"}  # a session opens a segment
    assert "secret" not in repr(tasks)


def test_an_abstention_goes_with_its_base_id_and_has_no_gold(lme):
    tasks = load_longmemeval(lme, "train", pinned=False, unanswerable=True)
    assert [question.id for question in tasks.questions] == ["q1_abs"]
    assert tasks.gold == {"q1_abs": Gold("", (), 5)}
    assert load_longmemeval(lme, "test", pinned=False, unanswerable=True).questions == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is no JSON .*truncated.*cuewalk download longmemeval"),
        ([haystack(question_id="q3")], "lacks 1 questions of train, such as 'q1'"),
        ([haystack(haystack_dates=["2023/05/30 (Tue) 23:40"])], "is not of the format: ValueError"),
        ([haystack(haystack_dates=["30 May", "31 May"])], "is not of the format: ValueError"),
        ([haystack(question_type="new")], "is not of the format: KeyError 'new'"),
        ([{"question": "?"}], "is not of the format: KeyError 'question_id'"),
        ({"q1": 1}, "is not of the format: TypeError"),
    ],
)
def test_a_bad_longmemeval_file_is_refused(lme, content, message):
    lme.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=message):
        load_longmemeval(lme, "train", pinned=False)


def test_only_the_published_files_are_taken_for_longmemeval(lme, tmp_path):
    with pytest.raises(DataError, match=r"mine.json is no published file of longmemeval; get one with `cuewalk down"):
        load_longmemeval(lme, "train")
    with pytest.raises(DataError, match=r"no data at .*longmemeval_oracle.json. Get it with `cuewalk download longm"):
        load_longmemeval(tmp_path, "train")
    lme.rename(tmp_path / "longmemeval_s_cleaned.json")
    with pytest.raises(DataError, match="expected d6f21ea9d60a"):
        load_longmemeval(tmp_path / "longmemeval_s_cleaned.json", "train")
    with pytest.raises(DataError, match="KeyError 'dev'"):
        load_longmemeval(tmp_path / "longmemeval_s_cleaned.json", "dev", pinned=False)


def test_the_real_oracle_gives_470_questions_in_parts_that_share_nothing():
    path = real("longmemeval_oracle.json")
    parts = {part: load_longmemeval(path.parent, part) for part in PARTS}
    assert {part: len(tasks.questions) for part, tasks in parts.items()} == {"train": 59, "val": 19, "test": 392}
    assert {part: sum(len(g.evidence) for g in tasks.gold.values()) for part, tasks in parts.items()} == {
        "train": 119, "val": 40, "test": 727}  # fmt: skip
    assert sum(len(c.messages) for tasks in parts.values() for c in tasks.conversations.values()) == 10_288
    for tasks in parts.values():
        assert "answer_" not in repr(sorted({m.id for c in tasks.conversations.values() for m in c.messages}))
        for question in tasks.questions:
            gold, known = tasks.gold[question.id], {m.id for m in tasks.conversations[question.id].messages}
            assert gold.evidence and set(gold.evidence) <= known and gold.category in CATEGORIES
            assert not question.id.endswith("_abs")
    apart = [load_longmemeval(path.parent, part, unanswerable=True) for part in PARTS]
    assert [len(tasks.questions) for tasks in apart] == [2, 1, 26]
    assert all(gold == Gold("", (), 5) for tasks in apart for gold in tasks.gold.values())
    stored = {row["question_id"]: row for row in json.loads(path.read_bytes())}
    member = json.loads(real("longmemeval_splits_membuilder.json").read_bytes())
    for a, b in combinations(PARTS, 2):
        said = [{m.text for c in parts[p].conversations.values() for m in c.messages} for p in (a, b)]
        assert not {text for text in said[0] & said[1] if len(text.split()) > 12}  # pleasantries recur
        held = [{s for id_ in parts[p].gold for s in stored[id_]["haystack_session_ids"]} for p in (a, b)]
        assert not held[0] & held[1]
    # No abstention twin of a training question, and no session of one, is among MemBuilder's test questions.
    tested = [stored[id_] for id_ in member["test"]]
    for part in ("train", "val"):
        assert not set(parts[part].gold) & {row["question_id"].removesuffix("_abs") for row in tested}
        sessions = {s for id_ in parts[part].gold for s in stored[id_]["answer_session_ids"]}
        assert not sessions & {s for row in tested for s in row["answer_session_ids"]}
    assert {id_ for id_ in member["test"] if not id_.endswith("_abs")} <= set(parts["test"].gold)


# --- PerLTQA ---


def asked(question, answer, reference):
    return {"Question": question, "Answer": answer, "Reference Memory": reference, "Memory Anchors": [{"x": [-1, -1]}]}


def character(**changes):
    event = lambda text, when: {"content": f"{text} happened.", "summary": text, "Creation Time": when}  # noqa: E731
    return {
        "profile": {"Protagonist": "Ann", "Age": 28},
        "profile_description": "SECRET PROSE",
        "social_relationship": {
            "4_0": {"Supporting Characters": "Bob", "Description": "Ann's brother", "Relationship": "brother"}
        },
        "events": {"4_0_0": event("A fair", "May 12, 2022"), "4_0_1": event("An old war", "73 BC")},
        "dialogues": {
            "4_0_0#0": {"events": "4_0_0", "contents": {"2022-05-13 10:00": ["Ann: Hi", "Bob: Ho"]}},
            "4_0_0#1": {"events": "4_0_0", "contents": {"2022-05-14 10:00": ["Bob: Again"]}},
        },
    } | changes


def write_perltqa(folder, memory, questions, name="Ann"):
    (folder / "perltmem_en_v2.json").write_text(json.dumps({name: memory, "Eve": memory}))
    (folder / "perltqa_en_v2.json").write_text(json.dumps([{name: questions}, {"dragon beautiful": questions}]))


QUESTIONS = {
    "profile": [asked("How old is Ann?", "28", "Age"), asked("How old is Ann?", "28 years", "Age")],
    "social_relationship": [{"4_0": [asked("Who is Bob?", "Her brother", "['4_0']")]}],
    "events": [{"4_0_0": [asked("What happened?", "A fair", "['4_0_0', '4_0_1']"), asked("Lost?", "?", "['9_9_9']")]}],
    "dialogues": [{"4_0_0#0": [asked("What did Bob say?", "Ho", "['4_0_0#0']")]}],
}


def test_a_perltqa_character_is_a_conversation_of_one_message_a_memory(tmp_path):
    write_perltqa(tmp_path, character(), QUESTIONS)
    tasks = load_perltqa(tmp_path, "test", pinned=False)  # SHA-256 of "Ann" modulo 20 is 18
    first, last = datetime(2022, 5, 13, 10), datetime(2022, 5, 14, 10)
    assert tasks.conversations["Ann"].messages == (
        Message("profile:Protagonist", "Ann", last, "Protagonist: Ann"),
        Message("profile:Age", "Ann", last, "Age: 28"),
        Message("social_relationship:4_0", "Ann", last, "Bob, brother, Ann's brother"),
        Message("events:4_0_0", "Ann", first, "A fair (May 12, 2022): A fair happened."),
        Message("dialogues:4_0_0#0", "Ann", first, "Ann: Hi\nBob: Ho"),
        Message("dialogues:4_0_0#1", "Ann", last, "Bob: Again"),
        Message("events:4_0_1", "Ann", last, "An old war (73 BC): An old war happened."),
    )
    opened = {"profile:Protagonist", "social_relationship:4_0", "events:4_0_0", "events:4_0_1"}
    assert tasks.conversations["Ann"].breaks == opened
    assert tasks.gold == {
        "Ann:profile:0": Gold("28", ("profile:Age",), 4),  # asked twice, counts once
        "Ann:social_relationship:0": Gold("Her brother", ("social_relationship:4_0",), 4),
        "Ann:events:0": Gold("A fair", ("events:4_0_0", "events:4_0_1"), 1),
        "Ann:events:1": Gold("?", (), 4),
        "Ann:dialogues:0": Gold("Ho", ("dialogues:4_0_0#0",), 4),
    }
    assert list(tasks.conversations) == ["Ann"]  # Eve has no questions, the dragon no memory


def test_relations_in_a_string_and_impossible_times_are_read(tmp_path):
    relations = repr(character()["social_relationship"])
    dialogues = {"4_0_0#0": {"events": "4_0_0", "contents": {"2022-02-30 10:00": ["Ann: Hi"]}}}
    write_perltqa(tmp_path, character(social_relationship=relations, dialogues=dialogues), QUESTIONS)
    messages = load_perltqa(tmp_path, "test", pinned=False).conversations["Ann"].messages
    assert messages[2].text == "Bob, brother, Ann's brother"
    assert {message.time for message in messages} == {datetime(2000, 1, 1)}  # none of it has a time


def test_perltqa_is_split_by_character_and_bad_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no data at .*perltmem_en_v2.json. Get it with `cuewalk download perltqa`"):
        load_perltqa(tmp_path, "train")
    write_perltqa(tmp_path, character(), QUESTIONS)
    with pytest.raises(DataError, match="expected fb3011d78bab"):
        load_perltqa(tmp_path, "train")
    for part in ("train", "val", "dev"):
        with pytest.raises(DataError, match=f"none of its 1 characters is in {part}"):
            load_perltqa(tmp_path, part, pinned=False)
    write_perltqa(tmp_path, character(social_relationship="{'a':"), QUESTIONS)
    with pytest.raises(DataError, match="is not of the format: SyntaxError"):
        load_perltqa(tmp_path, "test", pinned=False)
    write_perltqa(tmp_path, {"profile": {}}, QUESTIONS)
    with pytest.raises(DataError, match="is not of the format: KeyError 'social_relationship'"):
        load_perltqa(tmp_path, "test", pinned=False)


def test_the_parts_of_perltqa_are_a_partition(tmp_path):
    found = {}
    for name in (f"name {n}" for n in range(60)):
        write_perltqa(tmp_path, character(), QUESTIONS, name)
        for part in PARTS:
            with suppress(DataError):
                found.setdefault(next(iter(load_perltqa(tmp_path, part, pinned=False).conversations)), []).append(part)
    assert len(found) == 60 and all(len(parts) == 1 for parts in found.values())
    assert {part for parts in found.values() for part in parts} == set(PARTS)


def test_the_real_sample_of_perltqa_refers_to_memories_that_it_has(tmp_path):
    for kind in ("mem", "qa"):
        shutil.copyfile(real(f"perltqa_sample_{kind}_en_v2.json"), tmp_path / f"perlt{kind}_en_v2.json")
    tasks = load_perltqa(tmp_path, "test", pinned=False)
    assert len(tasks.questions) == 19 and len(tasks.conversations["Zhang Xiaohong"].messages) == 26
    lost = [id_ for id_, gold in tasks.gold.items() if not gold.evidence]
    assert lost == ["Zhang Xiaohong:dialogues:2"]  # the sample was cut


# --- a run's data ---


def test_a_run_takes_them_by_name(lme, tmp_path, monkeypatch):
    monkeypatch.setenv("CUEWALK_DATA", str(tmp_path))
    for source in ("longmemeval", "perltqa"):
        with pytest.raises(DataError, match=f"no data at {tmp_path}/.*`cuewalk download {source}`"):
            load_part(DataConfig(source=source), "train")
    with pytest.raises(DataError, match="no published file of longmemeval"):
        load_part(DataConfig(source="longmemeval", path=str(lme)), "train")
    monkeypatch.delenv("CUEWALK_DATA")
    with pytest.raises(DataError, match="no perltqa: set data.path or the environment variable CUEWALK_DATA"):
        load_part(DataConfig(source="perltqa"), "train")
    with pytest.raises(ConfigError, match=r"data.source"):
        parse_config({"data": {"source": "longmem"}})


def test_every_source_has_a_commit_a_digest_and_a_licence():
    for source in embedded("sources.json").values():
        assert source["licence"] and source["citation"]
        for about in source["files"].values():
            assert len(about["sha256"]) == 64 and len([p for p in about["url"].split("/") if len(p) == 40]) == 1


# --- a user's own file ---


def chat(*texts, **more):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)], **more}


def written(path, content) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_list_json_lines_and_an_object_hold_the_same_conversations(tmp_path):
    chats = [chat("Hi", "Ho", id=f"n{n}", create_time=1_700_000_000) for n in range(3)]
    lines = "\ufeff" + "\n".join(map(json.dumps, chats)) + "\n\n"
    forms = [chats, {"conversations": chats}, lines]
    loaded = [load_json(written(tmp_path / "a.json", form), "train") for form in forms]
    assert loaded[0] == loaded[1] == loaded[2]
    one = read_records(written(tmp_path / "b.jsonl", json.dumps(chats[0])))
    assert [record["id"] for record in one] == ["n0"]


def test_roles_become_speakers_and_parts_of_a_message_one_text(tmp_path):
    rows = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {}}, "here"],
         "timestamp": "2024-05-01T12:00:00+02:00"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "Thanks", "create_time": 1_714_560_000_000},
    ]  # fmt: skip
    record = read_records(written(tmp_path / "a.json", [{"messages": rows}]))[0]
    assert list(parse_record(record).conversations["c0"].messages) == [
        Message("2", "user", datetime(2024, 5, 1, 10), "Look:\nhere"),
        Message("4", "assistant", datetime(2024, 5, 1, 10, 1), "I see."),  # a minute later
        Message("5", "user", datetime(2024, 5, 1, 10, 40), "Thanks"),
    ]


def test_a_named_speaker_goes_before_the_role_and_own_keys_hide_nothing(tmp_path):
    row = {"role": "user", "speaker": "Ann", "content": "Hi", "time": "2024-05-01"}
    record = read_records(written(tmp_path / "a.json", [{"messages": [row], "place": "Oslo", "file_time": "?"}]))[0]
    assert parse_record(record).conversations["c0"].messages == (Message("1", "Ann", datetime(2024, 5, 1), "Hi"),)
    assert record["place"] == f"{tmp_path / 'a.json'}: conversations[0]"


def test_messages_without_a_time_start_at_the_files(tmp_path):
    path = written(tmp_path / "a.json", [chat("Hi", "Ho")])
    os.utime(path, (1_714_560_000, 1_714_560_000))
    messages = parse_record(read_records(path)[0]).conversations["c0"].messages
    assert [m.time for m in messages] == [datetime(2024, 5, 1, 10, 40), datetime(2024, 5, 1, 10, 41)]


def test_a_tree_is_read_along_its_current_branch(tmp_path):
    node = lambda parent, role=None, text="": {  # noqa: E731
        "parent": parent,
        "message": role and {"author": {"role": role}, "create_time": None,
                             "content": {"content_type": "text", "parts": [text]}},
    }  # fmt: skip
    mapping = {"r": node(None), "a": node("r", "user", "Hi"), "b": node("a", "assistant", "old"),
               "c": node("a", "assistant", "new")}  # fmt: skip
    record = {"title": "t", "create_time": 1_714_560_000.5, "mapping": mapping, "current_node": "c"}
    messages = parse_record(read_records(written(tmp_path / "a.json", [record]))[0]).conversations["c0"].messages
    assert [(m.id, m.speaker, m.text) for m in messages] == [("1", "user", "Hi"), ("2", "assistant", "new")]
    assert messages[0].time == datetime(2024, 5, 1, 10, 40, 0, 500_000)
    mapping["r"] = node("c")
    with pytest.raises(DataError, match=r"conversations\[0\] is not of the format: KeyError 'c'"):
        parse_record(read_records(written(tmp_path / "a.json", [record]))[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"messages": []}\n{"mess', r"is no JSON .*nor is each line .*The format is in the README"),
        ("5", "is no list of objects with `messages`"),
        ([[{"role": "user"}]], "is no list of objects with `messages`"),
        ({"chats": []}, "is no list of objects with `messages`"),
        ([chat()] * 3, r"conversations\[\d\] is not of the format: ValueError conversation 'c\d' has no messages"),
        ([{"messages": [{"role": "user"}]}] * 3, "is not of the format: KeyError 'content'"),
        ([{"messages": ["Hi"]}] * 3, "is not of the format"),
        ([chat("Hi", create_time="soon")] * 3, "is not of the format: ValidationError"),
        ([chat("Hi"), chat("Ho")], "or none of 3 or more"),
        ([chat("Hi", split="train"), chat("Ho"), chat("Hu")], "give each conversation a `split`"),
    ],
)
def test_a_bad_file_is_told_what_is_wrong(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        load_json(written(tmp_path / "a.json", content), "train")


def test_conversations_are_dealt_out_with_questions_first_and_always_alike():
    records = [{"id": f"n{n}", "questions": [1] * (n >= 5)} for n in range(8)]
    parts = deal(records)
    assert sorted(parts[5:]) == sorted(DEALT[:3]) == sorted(PARTS)  # each part gets one that has questions
    assert sorted(parts) == sorted(DEALT)
    assert deal(records[::-1])[::-1] == parts  # whatever their order in the file
    assert deal([record | {"split": "val"} for record in records]) == ["val"] * 8


@given(st.integers(3, 40))
def test_every_part_gets_a_conversation(count):
    parts = deal([{"id": n} for n in range(count)])
    assert set(parts) == set(PARTS) and parts.count("train") >= count // 2 - 1


SAID = [
    Message("1", "Ann", datetime(2024, 5, 1), "I moved to Oslo."),
    Message("2", "Bob", datetime(2024, 5, 1), "Oslo is cold, and Bergen wet"),
    Message("3", "Bob", datetime(2024, 5, 1), "My dog likes it"),
]


@pytest.mark.parametrize(
    ("question", "answer", "silver"),
    [
        ("Where did Ann move?", "Oslo", ("1",)),  # shares the speaker's name
        ("Where to?", "to Oslo", ("1", "2")),
        ("What is wet?", "Bergen in Norway", ("2",)),  # half of the words
        ("What is wet?", "Bergen in northern Norway", ()),  # a third of them
        ("Who?", "of the", ()),  # no content word
        ("What animal?", "A dog", ("3",)),
        ("Where?", "Paris", ()),
    ],
)
def test_silver_evidence_is_what_holds_the_answers_words(question, answer, silver):
    assert silver_evidence(question, answer, SAID) == silver


def test_words_that_stand_everywhere_are_no_evidence():
    messages = [Message(str(n), "Ann", datetime(2024, 5, 1), "Oslo") for n in range(4)]
    assert silver_evidence("Where?", "Oslo", messages) == ()
    assert silver_evidence("Where?", "Oslo", messages[:3]) == ("0", "1", "2")


def own(id_, *questions, **more):
    rows = [{"id": m.id, "speaker": m.speaker, "time": m.time.isoformat(), "text": m.text} for m in SAID]
    return {"id": id_, "messages": rows, "questions": list(questions), **more}


GIVEN = {"id": "g", "text": "Where?", "answer": "Oslo", "evidence": ["1"]}
SILVER = {"text": "What animal?", "answer": "a dog"}
NONE = {"text": "Who?", "answer": "Eve", "evidence": []}


def test_silver_gold_is_marked(tmp_path):
    path = written(tmp_path / "a.json", [own("x", GIVEN, SILVER, NONE, split="train")])
    assert load_json(path, "train").gold == {
        "x:g": Gold("Oslo", ("1",), 4),
        "x:2": Gold("a dog", ("3",), 4, silver=True),
        "x:3": Gold("Eve", (), 4),
    }


def test_two_questions_of_one_id_are_refused(tmp_path):
    path = written(tmp_path / "a.json", [own("x", GIVEN, GIVEN, split="train")])
    with pytest.raises(DataError, match="two questions have the id x:g"):
        load_json(path, "train")


def test_results_say_how_many_questions_are_silver(graph, conversation):
    import pandas as pd

    from cuewalk.env import EnvConfig
    from cuewalk.judges import TrajectoryJudge
    from cuewalk.rl.config import Config
    from cuewalk.rl.data import Memories
    from cuewalk.scripts.evaluate import COLUMNS, Bench, summarise

    questions = (Question("toy:0", "toy", "Where is the dog?"), Question("toy:1", "toy", "And the trip?"))
    gold = {"toy:0": Gold("", ("m1",), 4, silver=True), "toy:1": Gold("", ("m4",), 4)}
    bench = Bench(Config(), Tasks({"toy": conversation}, questions, gold), Memories({"toy": graph}, EnvConfig()),
                  TrajectoryJudge(), None)  # fmt: skip
    rows = [("stop", q.id, "recall_at_8", 1.0) for q in questions]
    assert summarise(bench, pd.DataFrame(rows, columns=COLUMNS), ["toy:0", "toy:1"])["data"]["n_silver"] == 1


# --- cuewalk build --check ---


def test_a_good_file_is_told_what_it_holds(tmp_path, capsys):
    path = written(tmp_path / "a.json", [own(n, GIVEN, SILVER, NONE) for n in ("x", "y", "z")])
    lines, ready = check(path)
    assert ready and lines[0] == f"{path}: 3 conversations, parts dealt out"
    counts = "1 conversations, 3 messages, 3 questions: 1 with evidence, 1 silver, 1 without"
    assert lines[1:4] == [f"  train {counts}", f"  val   {counts}", f"  test  {counts}"]
    assert any("3 questions have no evidence" in line and "'x:3'" in line for line in lines)
    assert any("no `split` is given" in line for line in lines)
    assert lines[-1] == "A policy can be trained on it."
    assert main(["build", "--check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_all_that_is_wrong_is_listed_at_once(tmp_path, capsys):
    bad = own("x", {"id": "g", "text": "?", "answer": "a", "evidence": ["8", "9"]}, GIVEN, split="train")
    bad["messages"] += [bad["messages"][0]]
    late = own("y", GIVEN, split="val")
    late["messages"][2]["time"] = "2024-04-01"
    path = written(
        tmp_path / "a.json", [bad, late, chat("Hi", id="y", split="extra"), {"messages": [1], "split": "test"}]
    )
    assert main(["build", "--check", str(path)]) == 2
    out = capsys.readouterr().out
    for line in (
        "two messages have the id '1'", "two questions have the id 'g'", "cites the unknown message '8'",
        "cites the unknown message '9'", "2 conversations have the id 'y'", "conversations[3] is not of the format",
        "y: 1 messages are earlier than the one before, such as '3'", "1 messages have no time",
        "extra 1 conversations, 1 messages, 0 questions: 0 with evidence, 0 silver, 0 without; no part that is used",
        "no question with evidence in test: there is nothing to report",
        "No policy can be trained on it: what is wrong above.",
    ):  # fmt: skip
        assert line in out, line


def test_without_questions_it_says_how_to_write_some(tmp_path, capsys):
    path = written(tmp_path / "a.jsonl", "\n".join(json.dumps(chat("I moved to Oslo", "Nice")) for _ in range(3)))
    assert main(["build", "--check", str(path)]) == 2
    out = capsys.readouterr().out
    assert HOW_TO_ASK in out and "No policy can be trained on it: no question of train has evidence." in out
    example = next(line for line in HOW_TO_ASK.splitlines() if line.startswith("  {"))
    tasks = parse_record({"place": "p", "file_time": 0} | own("x", json.loads(example) | {"evidence": ["1"]}))
    assert tasks.gold["x:q1"] == Gold("Oslo", ("1",), 4)  # the example is of the format


def test_the_check_names_a_file_that_is_not_there_and_build_wants_one_of_both(tmp_path, capsys):
    assert main(["build", "--check", str(tmp_path / "none.json")]) == 2
    assert "no data at" in capsys.readouterr().err
    assert main(["build"]) == 2
    assert "give --config FILE to build memories, or --check FILE" in capsys.readouterr().err


def test_the_frozen_parts_of_longmemeval_are_disjoint_and_have_no_abstentions():
    parts = splits()["longmemeval"]
    assert {part: len(set(ids)) for part, ids in parts.items()} == {"train": 59, "val": 19, "test": 392}
    assert len({id_ for ids in parts.values() for id_ in ids}) == 470
    assert not [id_ for ids in parts.values() for id_ in ids if "_abs" in id_]
