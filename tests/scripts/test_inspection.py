from cuewalk.memory import BuildConfig, build_graph
from cuewalk.memory.groups import GroupConfig
from cuewalk.scripts.inspection import describe, draw, report


def test_a_memory_is_described_by_exact_counts(conversation, encoder):
    rules = GroupConfig(attach=0.7, merge=0.99, split=False)
    graph = build_graph(conversation, encoder, BuildConfig(segment_messages=2, update_threshold=1.01, groups=rules))
    found = describe(graph)
    assert {k: found[k] for k in ("messages", "segments", "entries", "coverage", "anchors", "groups")} == {
        "messages": 6, "segments": 4, "entries": 6, "coverage": 1.0, "anchors": 0, "groups": 4}  # fmt: skip
    assert (found["group_size_mean"], found["group_size_max"], found["singletons"]) == (1.5, 2, 2)
    assert found["group_sizes"] == {1: 2, 2: 2} and 0 < found["objective"] < 2
    text = report(graph, samples=2)
    assert "coverage                1.000" in text and "group sizes             2 of 1, 2 of 2" in text
    assert "e3  Bob: The trip was long" in text and "Bob (8 May 2024): The trip was long" in text


def test_without_groups_it_is_described_too(graph):
    assert describe(graph)["groups"] == 0 and describe(graph)["objective"] == 0.0


def test_the_surroundings_of_a_query_are_drawn(graph, tmp_path):
    path = draw(graph, "Where is the dog, for $5?", tmp_path / "graph.png", k=2)
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000
