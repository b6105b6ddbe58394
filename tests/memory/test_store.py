import os
import random
import signal
import sqlite3
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from cuewalk.memory import (
    BuildConfig,
    Conversation,
    Message,
    StoreError,
    build_graph,
    extend_graph,
    load_graph,
    save_graph,
)
from tests.conftest import MESSAGES, WordEncoder, at


def test_a_saved_graph_comes_back_equal(graph, encoder, tmp_path):
    save_graph(graph, tmp_path / "memory")
    again = load_graph(tmp_path / "memory", encoder)
    assert again.entries == graph.entries
    assert again.segments == graph.segments
    assert again.conversation == graph.conversation
    assert (again.vectors == graph.vectors).all()
    assert (again.digest, again.config, again.groups) == (graph.digest, graph.config, graph.groups)
    assert again.frontier("dog", ["e0"], {"e0"}, ("segment", "search"), 9) == graph.frontier(
        "dog", ["e0"], {"e0"}, ("segment", "search"), 9
    )


def test_saving_again_replaces_the_same_conversation(graph, conversation, encoder, tmp_path):
    save_graph(graph, tmp_path)
    fewer = build_graph(conversation, encoder, BuildConfig(update_threshold=-1.0))
    assert len(fewer.entries) < len(graph.entries)
    save_graph(fewer, tmp_path)
    assert load_graph(tmp_path, encoder).entries == fewer.entries


def test_another_conversations_memory_is_not_overwritten(graph, conversation, encoder, tmp_path):
    save_graph(graph, tmp_path)
    other = build_graph(Conversation("other", conversation.messages), encoder)
    with pytest.raises(StoreError, match="holds the memory of 'toy'; nothing was written"):
        save_graph(other, tmp_path)
    assert load_graph(tmp_path, encoder).conversation.id == "toy"


def test_a_folder_with_other_files_is_refused(graph, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"not empty and holds no memory.sqlite; nothing was written"):
        save_graph(graph, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_missing_memory_says_how_to_build_one(encoder, tmp_path):
    with pytest.raises(StoreError, match="Build one with `cuewalk build`"):
        load_graph(tmp_path, encoder)


def test_a_foreign_database_is_refused_and_left_alone(encoder, tmp_path):
    with sqlite3.connect(tmp_path / "memory.sqlite") as database:
        database.execute("CREATE TABLE theirs (x)")
    before = (tmp_path / "memory.sqlite").read_bytes()
    with pytest.raises(StoreError, match="a database of another program"):
        load_graph(tmp_path, encoder)
    assert (tmp_path / "memory.sqlite").read_bytes() == before


@pytest.mark.parametrize("damage", ["garbage", "truncated", "row gone", "table gone"])
def test_a_damaged_memory_is_refused_with_the_remedy(graph, encoder, tmp_path, damage):
    save_graph(graph, tmp_path)
    path = tmp_path / "memory.sqlite"
    if damage == "garbage":
        path.write_bytes(b"not a database at all, but long enough to look like one" * 50)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        database = sqlite3.connect(path)
        database.execute("DELETE FROM entries WHERE position = 5" if damage == "row gone" else "DROP TABLE meta")
        database.commit()
        database.close()
    with pytest.raises(StoreError, match=r"is damaged .*build it again with `cuewalk build`"):
        load_graph(tmp_path, encoder)


def test_another_encoders_memory_is_refused(graph, encoder, tmp_path):
    class Other:
        name = "other"
        encode = encoder.encode

    save_graph(graph, tmp_path)
    with pytest.raises(StoreError, match="was built with the encoder 'words', not 'other'"):
        load_graph(tmp_path, Other())


def test_a_later_schema_is_refused(graph, encoder, tmp_path):
    save_graph(graph, tmp_path)
    database = sqlite3.connect(tmp_path / "memory.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match="schema 99, this version of cuewalk has 2"):
        load_graph(tmp_path, encoder)


def longer(count):
    """The toy conversation and so many messages after it."""
    texts = ("dog garden", "a trip", "piano", "nothing", "dog trip")
    return [Message(f"n{i}", "Ann", at(9) + timedelta(minutes=7 * i), f"{texts[i % 5]} {i}") for i in range(count)]


def test_of_a_grown_memory_only_what_changed_is_written(graph, encoder, tmp_path):
    save_graph(graph, tmp_path)
    database = sqlite3.connect(tmp_path / "memory.sqlite", isolation_level=None)
    database.execute("CREATE TABLE log (position INTEGER)")
    for event in ("INSERT", "UPDATE"):
        body = "INSERT INTO log VALUES (NEW.position)"
        database.execute(f"CREATE TRIGGER on_{event} AFTER {event} ON entries BEGIN {body}; END")
    grown = extend_graph(graph, longer(2))
    save_graph(grown, tmp_path)
    # e2 now shares the word "garden" with a new message, and so has an anchor; 6 and 7 are new.
    assert [p for (p,) in database.execute("SELECT position FROM log")] == [2, 6, 7]
    database.close()
    assert load_graph(tmp_path, encoder).entries == grown.entries
    later = [Message("z", "Bob", at(20), "dog")]
    again = extend_graph(load_graph(tmp_path, encoder), later)
    assert (again.entries, again.groups) == (extend_graph(grown, later).entries, extend_graph(grown, later).groups)


def _append_for_ever(directory, written):
    """Grow the memory by one message at a time and say so after each was saved; ends by being killed."""
    encoder = WordEncoder()
    graph = load_graph(directory, encoder)
    waiting = longer(2000)[len(graph.messages) - len(MESSAGES) :]
    os.write(written, b"r")
    for message in waiting:
        graph = extend_graph(graph, [message])
        save_graph(graph, directory)
        os.write(written, b".")


def test_killed_at_random_moments_nothing_that_was_saved_is_lost(conversation, encoder, tmp_path):
    config = BuildConfig(segment_messages=2, nearest=1, update_threshold=1.01)
    save_graph(build_graph(conversation, encoder, config), tmp_path)
    draw, acknowledged = random.Random(0), len(MESSAGES)
    for _ in range(50):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:  # pragma: no cover - it is killed
            try:
                _append_for_ever(tmp_path, writing)
            finally:
                os._exit(1)
        os.close(writing)
        assert os.read(reading, 1) == b"r"
        time.sleep(draw.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        saved = len(os.read(reading, 1 << 16))
        os.close(reading)
        graph = load_graph(tmp_path, encoder)
        acknowledged += saved
        assert acknowledged <= len(graph.messages) <= acknowledged + 1  # one may be saved and not yet said
        acknowledged = len(graph.messages)
    whole = build_graph(
        replace(conversation, messages=(*MESSAGES, *longer(acknowledged - len(MESSAGES)))), encoder, config
    )
    assert graph.entries == whole.entries and (graph.vectors == whole.vectors).all()
    assert acknowledged > len(MESSAGES) + 5


def test_killed_in_its_first_save_a_memory_is_absent_not_foreign(graph, encoder, tmp_path):
    database = sqlite3.connect(tmp_path / "memory.sqlite")
    database.execute("PRAGMA journal_mode = WAL")
    database.close()
    with pytest.raises(StoreError, match="Build one with"):
        load_graph(tmp_path, encoder)
    save_graph(graph, tmp_path)
    assert load_graph(tmp_path, encoder).entries == graph.entries


def test_a_memory_that_is_locked_is_not_called_damaged(graph, encoder, tmp_path, monkeypatch):
    save_graph(graph, tmp_path)
    connect = sqlite3.connect
    monkeypatch.setattr("cuewalk.memory.store.sqlite3.connect", lambda *a, **k: connect(*a, **(k | {"timeout": 0})))
    with sqlite3.connect(tmp_path / "memory.sqlite", isolation_level=None) as writer:
        writer.execute("PRAGMA locking_mode = EXCLUSIVE")
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("INSERT INTO meta VALUES ('x', 'y')")
        with pytest.raises(StoreError, match="cannot read .*is another program writing"):
            load_graph(tmp_path, encoder)
        writer.execute("ROLLBACK")


def test_readers_beside_a_writer_see_one_state_or_the_other(graph, encoder, tmp_path):
    save_graph(graph, tmp_path)
    stop, seen, faults = threading.Event(), set(), []

    def read():
        while not stop.is_set():
            try:
                found = load_graph(tmp_path, encoder)
                assert len(found.entries) == len(found.messages)  # one each in this conversation
                seen.add(len(found.entries))
            except Exception as error:  # reported by the test itself
                faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    growing = graph
    for message in longer(40):
        growing = extend_graph(growing, [message])
        save_graph(growing, tmp_path)
    stop.set()
    for reader in readers:
        reader.join()
    assert faults == [] and len(seen) > 1


def test_a_disk_that_is_full_leaves_what_was_there(graph, encoder, tmp_path, monkeypatch):
    save_graph(graph, tmp_path)

    def full(database, graph):
        database.execute("DELETE FROM entries")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("cuewalk.memory.store._write", full)
    with pytest.raises(StoreError, match="disk is full.*what it held before is whole"):
        save_graph(graph, tmp_path)
    assert load_graph(tmp_path, encoder).entries == graph.entries


def test_an_index_that_is_not_flat_is_kept_beside_its_memory_and_made_anew_when_stale(conversation, encoder, tmp_path):
    config = BuildConfig(segment_messages=2, update_threshold=1.01, index="HNSW8")
    built = build_graph(conversation, encoder, config)
    save_graph(built, tmp_path)
    graph = load_graph(tmp_path, encoder)
    assert [hit.entry for hit in graph.search("dog", 2)] == ["e0", "e5"]
    (kept,) = tmp_path.glob("*.faiss")
    stamp = kept.stat().st_mtime_ns
    assert load_graph(tmp_path, encoder).search("dog", 2) == graph.search("dog", 2)
    assert kept.stat().st_mtime_ns == stamp  # read, not built again
    kept.write_bytes(b"damaged")  # it follows from the memory: made anew
    assert load_graph(tmp_path, encoder).search("dog", 2) == graph.search("dog", 2)
    grown = extend_graph(graph, longer(1))
    save_graph(grown, tmp_path)
    assert "e6" in {hit.entry for hit in load_graph(tmp_path, encoder).search("dog garden", 7)}
    (other,) = tmp_path.glob("*.faiss")
    assert other != kept
    with pytest.raises(ValueError, match="memory.index = 'Nonsense' is no FAISS factory string"):
        build_graph(conversation, encoder, replace(config, index="Nonsense")).search("dog", 1)


def test_an_index_that_can_not_be_kept_answers_all_the_same(conversation, encoder, tmp_path, monkeypatch, caplog):
    config = BuildConfig(segment_messages=2, update_threshold=1.01, index="HNSW8")
    save_graph(build_graph(conversation, encoder, config), tmp_path)
    expected = load_graph(tmp_path, encoder).search("dog", 3)
    for kept in tmp_path.glob("*.faiss"):
        kept.unlink()

    def full(index, name):
        Path(name).write_bytes(b"half")
        raise RuntimeError("No space left on device")

    monkeypatch.setattr("cuewalk.memory.index.faiss.write_index", full)
    assert load_graph(tmp_path, encoder).search("dog", 3) == expected
    assert "the index is not kept, and built again next time: No space left" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("memory.sqlite")] == []
