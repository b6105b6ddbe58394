import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuewalk.memory.groups import GroupConfig, Groups, neighbours, objective


def unit(rows):
    rows = np.asarray(rows, dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def f(vectors, parts):
    return objective(np.stack([vectors[part].mean(axis=0) for part in parts]), [len(part) for part in parts])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([5] * 10 + [1], 0.9420), ([5] * 9 + [6], 0.9966), ([12] * 10 + [1], 0.9237), ([7] * 9, 1.0)],
)
def test_sparsity_is_one_for_equal_sizes_and_falls_with_their_spread(sizes, expected):
    nothing_in_common = np.zeros((len(sizes), 3))  # no cohesion: what is left is the sparsity
    assert objective(nothing_in_common, sizes) == pytest.approx(expected, abs=1e-4)


def test_the_objective_at_its_edges():
    axes = np.eye(4, dtype=np.float32)
    assert objective(np.zeros((0, 4)), []) == 0.0
    assert f(axes, [[0]]) == pytest.approx(2.0)  # one singleton
    assert f(axes, [[0, 1, 2, 3]]) == pytest.approx(1.5)  # cohesion 1 / sqrt(4)
    assert f(axes, [[0], [1]]) == pytest.approx(2.0)
    three = unit([[1, 0, 0], [1, 0.5, 0], [0, 0, 1]])
    assert f(three, [[0], [1], [2]]) == pytest.approx(1 + 2 / 3)  # the third's term vanishes
    pairs = unit([[1, 0, 0, 0], [1, 0.2, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0.9]])
    assert f(pairs, [[0], [1], [2], [3]]) == pytest.approx(1 + np.exp(-0.5), abs=1e-5)


def test_cohesion_is_the_centroids_length():
    vectors = unit(np.random.default_rng(0).normal(size=(6, 5)))
    mean = vectors.mean(axis=0)
    by_definition = np.mean(vectors @ mean / np.linalg.norm(mean))
    assert objective(mean[None], [6]) == pytest.approx(1 + by_definition, abs=1e-6)


def test_a_new_entry_joins_its_nearest_group_or_opens_one():
    vectors = unit([[1, 0, 0], [0, 1, 0], [1, 0.2, 0], [0, 0.1, 1]])
    groups = Groups(GroupConfig(attach=0.9, small=1, merge=0.99))
    groups.add([0, 1], vectors)
    groups.add([2, 3], vectors)
    assert groups.members == {"g0": [0, 2], "g1": [1], "g2": [3]}
    assert groups.reassigned == set()


def test_over_the_cap_a_group_is_split_and_the_larger_part_keeps_its_id():
    near_x = [[1, 0.02 * i, 0] for i in range(3)]
    near_y = [[0.5, 1, 0.01 * i] for i in range(2)]
    vectors = unit([*near_x, *near_y])
    groups = Groups(GroupConfig(cap=4, attach=0.3, join=False, split=False))  # the cap holds even so
    groups.add(range(4), vectors)
    assert groups.members == {"g0": [0, 1, 2, 3]}
    groups.add([4], vectors)
    assert groups.members == {"g0": [0, 1, 2], "g1": [3, 4]}
    assert groups.reassigned == {3}  # 4 came with the batch


def test_an_incoherent_group_is_split_where_f_gains_by_it():
    vectors = unit([[1, 0.1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0.1], [0, 0, 1, 0]])
    rules = GroupConfig(attach=-1, coherence=0.9, join=False)
    groups = Groups(rules)
    groups.add(range(4), vectors)
    # Alone: f = 1 + .7 as one, 1 + .9988 as two equal pairs.
    assert sorted(map(sorted, groups.members.values())) == [[0, 1], [2, 3]]
    kept = Groups(GroupConfig(attach=-1, coherence=-1, join=False))
    kept.add(range(4), vectors)
    assert kept.members == {"g0": [0, 1, 2, 3]}  # coherent enough by that rule: no split is tried
    # Five alike and one apart: cutting the one off costs sparsity 36/(2·26) = .69, gains less cohesion: left alone.
    lopsided = unit([*[[1, 0, 0.01 * i] for i in range(5)], [1, 0.9, 0]])
    whole = Groups(GroupConfig(attach=-1, coherence=0.999, join=False))
    whole.add(range(6), lopsided)
    parts = list(whole.members.values())
    assert f(lopsided, parts) >= f(lopsided, [[0, 1, 2, 3, 4, 5]])


def test_a_singleton_is_merged_where_f_gains_and_keeps_the_larger_groups_id():
    rng = np.random.default_rng(1)
    centres = np.eye(6)
    vectors = unit([centres[i // 4] + 0.02 * rng.normal(size=6) for i in range(20)] + [centres[0] + 0.9 * centres[5]])
    apart = Groups(GroupConfig(attach=0.95, merge=0.4, join=False))
    apart.add(range(21), vectors)
    assert apart.members["g5"] == [20]
    joined = Groups(GroupConfig(attach=0.95, merge=0.4))
    joined.add(range(20), vectors)
    joined.add([20], vectors)
    assert joined.members["g0"] == [0, 1, 2, 3, 20]
    assert f(vectors, list(joined.members.values())) > f(vectors, list(apart.members.values()))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    cap=st.sampled_from([1, 2, 5, 12]),
    attach=st.sampled_from([-1.0, 0.2, 0.6]),
    split=st.booleans(),
    join=st.booleans(),
)
def test_no_member_is_ever_lost_whatever_grows(seed, batches, cap, attach, split, join):
    vectors = unit(np.random.default_rng(seed).normal(size=(sum(batches), 6)))
    groups = Groups(GroupConfig(cap=cap, attach=attach, merge=0.0, split=split, join=join, nearest=3))
    start = 0
    for size in batches:
        groups.add(range(start, start + size), vectors[: start + size])
        start += size
        everyone = sorted(p for members in groups.members.values() for p in members)
        assert everyone == list(range(start))
        assert max(map(len, groups.members.values())) <= cap
    assert groups.reassigned <= set(range(start))
    again = Groups(groups.config, groups.members)  # as read back from disk
    again.add(range(start, start), vectors)
    assert sorted(p for members in again.members.values() for p in members) == list(range(start))


def test_neighbours_are_fresh_in_both_directions():
    centroids = unit([[1, 0], [0.9, 0.4], [0.5, 0.9]])
    assert neighbours(centroids, 1) == [[1], [0, 2], [1]]  # 1's nearest is 0, but 2's is 1: both know
    assert neighbours(unit([[1, 0], [-1, 0]]), 1) == [[], []]  # a negative cosine is no neighbour


def test_groups_that_were_read_back_take_in_new_entries():
    vectors = unit([[1, 0, 0], [0, 1, 0], [1, 0.2, 0]])
    groups = Groups(GroupConfig(attach=0.9, merge=0.99), {"g0": [0], "g1": [1]})
    groups.add([2], vectors)
    assert groups.members == {"g0": [0, 2], "g1": [1]}


def test_an_entry_is_compared_with_groups_by_their_vectors_of_now():
    vectors = unit([[1, 0, 0], [0, 1, 0], [0, 0.1, 1]])
    groups = Groups(GroupConfig(attach=0.9, merge=0.99))
    groups.add([0, 1], vectors)
    moved = unit([[0, 0, 1], [0, 1, 0], [0, 0.1, 1]])  # the first one's abstraction was refined
    groups.add([0, 2], moved)
    assert groups.members == {"g0": [0, 2], "g1": [1]} and groups.reassigned == set()
