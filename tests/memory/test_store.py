import sqlite3

import pytest

from cuewalk.memory import BuildConfig, Conversation, StoreError, build_graph, load_graph, save_graph


def test_a_saved_graph_comes_back_equal(graph, encoder, tmp_path):
    save_graph(graph, tmp_path / "memory")
    again = load_graph(tmp_path / "memory", encoder)
    assert again.entries == graph.entries
    assert again.segments == graph.segments
    assert again.conversation == graph.conversation
    assert (again.vectors == graph.vectors).all()
    assert (again.digest, again.weights, again.nearest) == (graph.digest, graph.weights, graph.nearest)
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
        database.execute("DELETE FROM entries WHERE id = 'e5'" if damage == "row gone" else "DROP TABLE meta")
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
    with pytest.raises(StoreError, match="schema 99, not a memory of schema 1"):
        load_graph(tmp_path, encoder)
