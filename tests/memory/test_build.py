from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuewalk.memory import BuildConfig, Conversation, Message, Note, build_graph
from cuewalk.memory.build import attach_anchors, build_digest, cut_segments, find_candidates, format_message

PLAIN = BuildConfig(segment_messages=2, nearest=1, update_threshold=1.01)


def test_segments_end_at_a_pause_and_at_the_limit(conversation):
    segments = cut_segments(conversation.messages, PLAIN)
    assert [segment.messages for segment in segments] == [("m1", "m2"), ("m3",), ("m4", "m5"), ("m6",)]
    assert [segment.position for segment in segments] == [0, 1, 2, 3]


def test_a_message_becomes_an_entry_with_its_date_and_speaker(graph):
    entry = graph.entries["e1"]
    assert entry.abstraction == "Bob: He came back on Tuesday"
    assert entry.value == "Bob (1 May 2024): He came back on Tuesday"
    assert (entry.speaker, entry.sources, entry.segments) == ("Bob", ("m2",), ("s0",))


def test_an_abstraction_is_cut_and_a_value_is_not():
    message = Message("m", "Ann", datetime(2024, 1, 2), "one two three four")
    config = replace(PLAIN, abstraction_words=2)
    assert find_candidates(Conversation("c", (message,)), config) == [("Ann: one two", ("m",))]
    assert format_message(message) == "Ann (2 January 2024): one two three four"


def test_notes_are_used_and_uncited_messages_still_covered(conversation, encoder):
    noted = replace(conversation, notes=(Note("Ann's dog returned.", ("m2", "m1")),))
    entries = list(build_graph(noted, encoder, PLAIN).entries.values())
    assert entries[0].abstraction == "Ann's dog returned."
    assert entries[0].sources == ("m1", "m2")  # in order of the conversation
    assert entries[0].value.splitlines() == [
        "Ann (1 May 2024): The dog ran away",
        "Bob (1 May 2024): He came back on Tuesday",
    ]
    assert {s for entry in entries for s in entry.sources} == {"m1", "m2", "m3", "m4", "m5", "m6"}
    without = build_graph(noted, encoder, replace(PLAIN, notes=False))
    assert next(iter(without.entries.values())).abstraction == "Ann: The dog ran away"


def test_update_unites_what_one_person_says_twice_and_keeps_persons_apart(encoder):
    start = datetime(2024, 1, 1)
    said = [("Ann", "dog trip"), ("Bob", "trip dog"), ("Ann", "trip dog dog"), ("Ann", "piano")]
    messages = tuple(Message(f"m{i}", who, start + timedelta(days=i), text) for i, (who, text) in enumerate(said))
    graph = build_graph(Conversation("c", messages), encoder, replace(PLAIN, update_threshold=0.9))
    # cos((1,0,0,1), (2,0,0,1)) = 3/sqrt(10) = .949 >= .9: m2 joins m0; Bob's m1 is equal to m0 but another person's.
    assert [entry.sources for entry in graph.entries.values()] == [("m0", "m2"), ("m1",), ("m3",)]
    first = graph.entries["e0"]
    assert first.abstraction == "Ann: dog trip"  # the identity stays
    assert first.segments == ("s0", "s2")
    apart = build_graph(Conversation("c", messages), encoder, replace(PLAIN, update_threshold=0.95))
    assert len(apart.entries) == 4


def test_anchors_join_entries_of_one_speaker_that_share_a_rare_word(graph):
    entries = list(graph.entries.values())
    twice = [
        replace(entries[0], value="Ann: we camped by lakes"),
        replace(entries[2], value="Ann: that lake again"),
    ]
    linked = attach_anchors([*twice, *entries[3:]], per_entry=3)
    assert linked[0].anchors == linked[1].anchors == ("Ann lake",)
    assert attach_anchors(twice[:1], 3)[0].anchors == ()  # an anchor with one entry is no link


@pytest.mark.parametrize("field", ["segment_messages", "gap_minutes", "abstraction_words", "update_candidates"])
def test_a_setting_below_one_is_refused(field):
    with pytest.raises(ValueError, match=f"memory.{field} = 0: must be at least 1"):
        BuildConfig(**{field: 0})


def test_search_weights_are_checked():
    with pytest.raises(ValueError, match="three numbers"):
        BuildConfig(search_weights=(0.0, 1.0, 1.0))


def test_the_digest_follows_data_configuration_and_encoder(conversation):
    base = build_digest(conversation, PLAIN, "words")
    assert base == build_digest(conversation, replace(PLAIN), "words")
    other = replace(conversation, messages=conversation.messages[:-1])
    assert len({base, build_digest(other, PLAIN, "words"), build_digest(conversation, BuildConfig(), "words"),
                build_digest(conversation, PLAIN, "minilm")}) == 4  # fmt: skip


def test_an_empty_conversation_and_a_stray_note_are_refused():
    with pytest.raises(ValueError, match="has no messages; leave it out"):
        Conversation("empty", ())
    message = Message("m1", "Ann", datetime(2024, 1, 1), "hello")
    with pytest.raises(ValueError, match=r"cites unknown messages \['m9'\]"):
        Conversation("c", (message,), (Note("x", ("m9",)),))
    with pytest.raises(ValueError, match="2 messages but 1 ids"):
        Conversation("c", (message, message))


@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["Ann", "Bob"]), st.text(max_size=30), st.integers(0, 90)),
        min_size=1,
        max_size=15,
    ),
    limit=st.integers(1, 4),
    threshold=st.sampled_from([0.5, 0.9, 1.01]),
)
def test_every_message_is_covered_whatever_is_said(turns, limit, threshold, encoder):
    time, messages = datetime(2024, 1, 1), []
    for i, (who, text, minutes) in enumerate(turns):
        time += timedelta(minutes=minutes)
        messages.append(Message(f"m{i}", who, time, text))
    config = BuildConfig(segment_messages=limit, update_threshold=threshold)
    graph = build_graph(Conversation("c", tuple(messages)), encoder, config)
    assert {s for entry in graph.entries.values() for s in entry.sources} == {m.id for m in messages}
    assert [m for segment in graph.segments for m in segment.messages] == [m.id for m in messages]
    for entry in graph.entries.values():
        assert len(entry.value.splitlines()) == len(entry.sources)
