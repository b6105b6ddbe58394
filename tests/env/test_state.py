import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuewalk.env import LABELS, Bad, Ending, EnvConfig, Expand, Refine, RetrievalEnv, Stop
from cuewalk.env.actions import BAD_REASONS
from cuewalk.env.state import apply, first_state

RULES = EnvConfig(k=1, budget=3, frontier_cap=3, new_lines=1, links=("segment", "adjacent", "similar", "search"))


def test_the_first_state_is_the_free_search_and_its_frontier(graph):
    state = first_state(graph, "dog", RULES)
    assert state.working == ("e0",)
    # e5: nearest and best next hit; then by fused rank the segment e1 and the adjacent e2 with the hits.
    assert [label for label, _ in state.frontier] == ["A", "B", "C"]
    assert state.frontier[0][1].entry == "e5"
    assert (state.budget, state.shown, state.ending) == (3, 3, None)


def test_expanding_moves_entries_pays_for_each_and_shows_new_candidates(graph):
    state = first_state(graph, "dog", RULES)
    entries = {label: link.entry for label, link in state.frontier}
    after, change = apply(state, Expand(("B", "A")), graph, RULES)
    assert after.working == ("e0", entries["B"], entries["A"])  # in the order named
    assert change.added == (entries["B"], entries["A"])
    assert (change.cost, after.budget) == (2, 1)
    assert [label for label, _ in after.frontier] == ["C", "D"]
    assert [label for label, _ in change.candidates] == ["D"]
    assert after.taken == {"A", "B"}


def test_refining_searches_anew_and_its_hits_are_read_before_they_are_paid(graph):
    state = first_state(graph, "dog", RULES)
    after, change = apply(state, Refine("piano"), graph, RULES)
    assert (after.query, after.working, change.cost) == ("piano", state.working, 1)
    assert after.queries == ("dog", "piano")
    known = {"e0", *(link.entry for _, link in state.frontier)}
    assert len(change.candidates) == 1 and change.candidates[0][1].entry not in known


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Expand(("Z",)), "unknown_label"),
        (Expand(("A", "Z")), "unknown_label"),
        (Refine(" DOG "), "repeated_query"),
        (Refine("do\u200bg?!"), "repeated_query"),
        (Bad("unparsable"), "unparsable"),
    ],
)
def test_a_bad_action_costs_changes_nothing_and_is_named(graph, action, reason):
    state = first_state(graph, "dog", RULES)
    after, change = apply(state, action, graph, RULES)
    assert (change.bad, change.cost, after.budget, after.bad_streak) == (reason, 1, 2, 1)
    assert (after.working, after.frontier, after.ending) == (state.working, state.frontier, None)


def test_a_taken_label_stays_taken(graph):
    state, _ = apply(first_state(graph, "dog", RULES), Expand(("A",)), graph, RULES)
    after, change = apply(state, Expand(("A",)), graph, RULES)
    assert change.bad == "taken_label" and after.working == state.working


def test_an_empty_frontier_can_not_be_expanded(graph):
    rules = EnvConfig(k=6, budget=3, frontier_cap=3, new_lines=1)
    state = first_state(graph, "dog", rules)
    assert state.frontier == ()
    assert apply(state, Expand(("A",)), graph, rules)[1].bad == "empty_frontier"


def test_the_second_bad_action_in_a_row_ends_it_and_a_good_one_between_does_not(graph):
    state = first_state(graph, "dog", RULES)
    once, _ = apply(state, Bad("unparsable"), graph, RULES)
    assert apply(once, Bad("unparsable"), graph, RULES)[0].ending is Ending.MALFORMED
    between, _ = apply(once, Expand(("A",)), graph, RULES)
    again, _ = apply(between, Bad("unparsable"), graph, RULES)
    assert again.ending is Ending.BUDGET and again.budget == 0  # 3 - 1 - 1 - 1, not malformed


def test_stopping_is_free(graph):
    after, change = apply(first_state(graph, "dog", RULES), Stop(), graph, RULES)
    assert (after.ending, after.budget, change.cost) == (Ending.STOPPED, 3, 0)


def test_a_legal_action_dearer_than_the_budget_is_not_executed(graph):
    rules = EnvConfig(k=1, budget=1, frontier_cap=3, new_lines=1)
    state = first_state(graph, "dog", rules)
    after, change = apply(state, Expand(("A", "B")), graph, rules)
    assert after.ending is Ending.BUDGET
    assert (after.working, after.budget, change.added, change.cost) == (("e0",), 1, (), 0)


def test_spending_the_last_of_the_budget_ends_it(graph):
    after, change = apply(first_state(graph, "dog", RULES), Expand(("A", "B", "C")), graph, RULES)
    assert after.ending is Ending.BUDGET and after.budget == 0 and len(change.added) == 3
    assert first_state(graph, "dog", EnvConfig(budget=0)).ending is Ending.BUDGET


def test_an_ended_trajectory_takes_no_action(graph):
    ended, _ = apply(first_state(graph, "dog", RULES), Stop(), graph, RULES)
    with pytest.raises(ValueError, match=r"has ended \(stopped\); call reset"):
        apply(ended, Stop(), graph, RULES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"k": 0}, "k\n.*should be greater than 0"),
        ({"budget": -1}, "budget\n.*greater than or equal to 0"),
        ({"links": ("friend",)}, r"unknown kinds \['friend'\]"),
        ({"budget": 9}, "24 \\+ budget 9 x new_lines 4 = 60 labels, but there are 52 letters"),
    ],
)
def test_rules_that_can_not_hold_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        EnvConfig(**values)


ACTIONS = st.one_of(
    st.just(Stop()),
    st.lists(st.sampled_from(LABELS[:10]), min_size=1, max_size=4, unique=True).map(lambda x: Expand(tuple(x))),
    st.sampled_from(["dog", "piano garden", "trip", "noon"]).map(Refine),
    st.sampled_from(BAD_REASONS).map(Bad),
)


@settings(max_examples=300)
@given(
    actions=st.lists(ACTIONS, min_size=12, max_size=12),
    k=st.integers(1, 7),
    budget=st.integers(0, 6),
    cap=st.integers(0, 6),
    new=st.integers(0, 4),
)
def test_whatever_is_done_the_process_keeps_its_promises(actions, k, budget, cap, new, graph):
    rules = EnvConfig(k=k, budget=budget, frontier_cap=cap, new_lines=new)
    state = first_state(graph, "dog", rules)
    given_out = [label for label, _ in state.frontier]
    steps = 0
    for action in actions:
        if state.ending is not None:
            break
        before, (state, change) = state, apply(state, action, graph, rules)
        steps += 1
        assert state.working[: len(before.working)] == before.working  # W never shrinks
        assert len(set(state.working)) == len(state.working)
        assert not {link.entry for _, link in state.frontier} & set(state.working)
        assert 0 <= state.budget == before.budget - change.cost
        given_out += [label for label, _ in change.candidates]
        assert len(set(given_out)) == len(given_out)  # labels are never reused
        assert (change.bad is None) or (state.working == before.working)
    assert state.ending is not None  # every trajectory ends
    assert steps <= budget + 1


def test_a_rank_chooses_from_a_wider_pool_and_its_say_is_the_score(graph, question):
    """Four times the lines shown are ranked; the chances' square roots are the scores."""
    rules = EnvConfig(k=1, budget=3, frontier_cap=1, new_lines=1, order="ranker")
    asked = []

    def last_first(graph, query, working, links):
        asked.append((query, tuple(working), len(links)))
        return np.arange(len(links)) / 16

    env = RetrievalEnv(graph, question, rules, rank=last_first)
    env.reset()
    pool = graph.frontier(question.text, ("e0",), {"e0"}, rules.links, 4)
    ((label, link),) = env.state.frontier
    assert (link.entry, link.score) == (pool[-1].entry, (3 / 16) ** 0.5)
    env.step(f"EXPAND {label}")
    env.step("REFINE garden")
    first, expanded, refined = asked
    assert first == (question.text, ("e0",), 4) and expanded[1] == ("e0", link.entry) and refined[0] == "garden"


def test_the_order_and_the_rank_go_together(graph, question):
    with pytest.raises(ValueError, match="pass rank= unless it is 'search', and only then"):
        RetrievalEnv(graph, question, EnvConfig(order="ranker"))
    with pytest.raises(ValueError, match="pass rank="):
        RetrievalEnv(graph, question, EnvConfig(), rank=lambda *_: np.zeros(0))


@pytest.mark.parametrize(
    "queries", [("\u0915\u0940", "\u0915\u0947"), ("\U0001f436", "\U0001f431"), ("dog 1", "dog 2")]
)
def test_queries_that_differ_in_a_sign_are_other_queries(queries, graph):
    rules = EnvConfig(k=1, budget=4)
    state = first_state(graph, "dog", rules)
    for query in queries:
        state, change = apply(state, Refine(query), graph, rules)
        assert change.bad is None
