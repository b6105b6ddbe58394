from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuewalk.memory import BuildConfig, Conversation, Message, Note, Statement, build_graph, extend_graph
from cuewalk.memory.build import Candidate, OfflineExtractor, Update, build_digest
from cuewalk.memory.records import say

PLAIN = BuildConfig(segment_messages=2, nearest=1, update_threshold=1.01)


def test_segments_end_at_a_pause_and_at_the_limit(conversation):
    segments = OfflineExtractor(PLAIN).segment(conversation)
    assert [segment.messages for segment in segments] == [("m1", "m2"), ("m3",), ("m4", "m5"), ("m6",)]
    assert [segment.position for segment in segments] == [0, 1, 2, 3]


def test_a_message_becomes_an_entry_with_its_date_and_speaker(graph):
    entry = graph.entries["e1"]
    assert entry.abstraction == "Bob: He came back on Tuesday"
    assert entry.value == "Bob (1 May 2024): He came back on Tuesday"
    assert (entry.speaker, entry.sources, entry.segments) == ("Bob", ("m2",), ("s0",))


def test_an_abstraction_is_cut_and_a_value_is_not():
    message = Message("m", "Ann", datetime(2024, 1, 2), "one two three four")
    assert OfflineExtractor(replace(PLAIN, abstraction_words=2)).candidate(message).abstraction == "Ann: one two"
    assert OfflineExtractor(replace(PLAIN, abstraction_words=0)).candidate(message).abstraction == (
        "Ann: one two three four"
    )
    assert say(message).line == "Ann (2 January 2024): one two three four"


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
        replace(entry, statements=(replace(entry.statements[0], text=text),))
        for entry, text in ((entries[0], "we camped by lakes"), (entries[2], "that lake again"))
    ]
    named = OfflineExtractor(PLAIN).name_anchors([*twice, *entries[3:]], set())
    assert named[0] == named[1] == ("Ann lake",)
    assert OfflineExtractor(PLAIN).name_anchors(twice[:1], set()) == [()]  # an anchor with one entry is no link


@pytest.mark.parametrize("field", ["segment_messages", "gap_minutes", "update_candidates"])
def test_a_setting_below_one_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}\n.*should be greater than 0"):
        BuildConfig(**{field: 0})


class Merging(OfflineExtractor):
    """Merges whatever is above γ into the nearest entry, as a model would that finds a fact changed."""

    def choose(self, asked):
        return [Update(near[0].id, f"now {pair.statements[0].text}", "Ann: piano") for pair, near in asked]


def test_a_superseded_value_is_kept_with_its_dates(encoder):
    start = datetime(2024, 1, 1)
    texts = ("dog in Oslo", "dog in Bergen", "dog in Rome")
    messages = tuple(Message(f"m{i}", "Ann", start + timedelta(days=i), text) for i, text in enumerate(texts))
    config = replace(PLAIN, update_threshold=0.9)
    graph = build_graph(Conversation("c", messages[:2]), encoder, config, extractor=Merging(config))
    entry = graph.entries["e0"]
    assert entry.value.splitlines() == [
        "Ann (2 January 2024): now dog in Bergen",
        "Ann (1 January 2024, until 2 January 2024): dog in Oslo",
    ]
    assert (entry.abstraction, entry.sources) == ("Ann: piano", ("m0", "m1"))
    assert (graph.vectors[0] == encoder.encode(["Ann: piano"])[0]).all()  # found under its new abstraction
    # The refined abstraction is about a piano: the third is something new, and the first graph stays as it was.
    grown = extend_graph(graph, messages[2:], extractor=Merging(config))
    assert list(grown.entries) == ["e0", "e1"] and list(graph.entries) == ["e0"]
    again = extend_graph(graph, [replace(messages[2], text="piano")], extractor=Merging(config))
    assert [(s.text, s.until and s.until.day) for s in again.entries["e0"].statements] == [
        ("dog in Oslo", 2),
        ("now dog in Bergen", 3),
        ("now piano", None),
    ]


def test_two_candidates_of_one_segment_lose_nothing_in_one_entry(encoder):
    start = datetime(2024, 1, 1)
    messages = tuple(Message(f"m{i}", "Ann", start + timedelta(days=i // 2), "dog") for i in range(4))
    config = replace(PLAIN, update_threshold=0.9)
    graph = build_graph(Conversation("c", messages), encoder, config, extractor=Merging(config))
    # m0 and m1 are one segment: neither sees the other. m2 and m3 both merge into e0.
    assert [entry.sources for entry in graph.entries.values()] == [("m0", "m2", "m3"), ("m1",)]
    assert [s.until is None for s in graph.entries["e0"].statements] == [False, False, True]


def test_a_grown_graph_equals_one_built_at_once(encoder):
    start = datetime(2024, 1, 1)
    said = ["dog", "garden", "dog trip", "piano", "trip", "dog garden trip", "piano dog", "garden"]
    messages = tuple(Message(f"m{i}", "AB"[i % 2], start + timedelta(hours=i // 3), t) for i, t in enumerate(said))
    whole = build_graph(Conversation("c", messages), encoder, PLAIN)
    for cut in range(1, len(messages)):
        first = build_graph(Conversation("c", messages[:cut]), encoder, PLAIN)
        grown = extend_graph(first, messages[cut:])
        assert grown.entries == whole.entries and grown.segments == whole.segments, cut
        assert grown.digest == whole.digest and (grown.vectors == whole.vectors).all()
        assert {e for members in grown.groups.values() for e in members} == set(grown.entries)


def test_a_graph_that_grows_by_nothing_stays_as_it_is(graph):
    grown = extend_graph(graph, [])
    assert grown.entries == graph.entries and (grown.vectors == graph.vectors).all()


def test_a_whole_segment_can_be_an_entry(conversation, encoder):
    config = replace(PLAIN, unit="segment", abstraction_words=0)
    entries = list(build_graph(conversation, encoder, config).entries.values())
    assert [entry.sources for entry in entries] == [("m1", "m2"), ("m3",), ("m4", "m5"), ("m6",)]
    assert entries[0].abstraction == entries[0].value == "\n".join(s.line for s in entries[0].statements)


def test_a_statement_says_who_when_and_until_when():
    day = datetime(2024, 2, 1)
    assert (
        Statement("Ann", day, "x", ("m",), datetime(2024, 3, 2)).line == "Ann (1 February 2024, until 2 March 2024): x"
    )
    assert Candidate("a", ()).statements == ()


def test_search_weights_are_checked():
    with pytest.raises(ValueError, match="three numbers >= 0, the first > 0"):
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
