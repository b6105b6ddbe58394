from copy import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuewalk.env import Change, Ending, Gold, Step, Trajectory
from cuewalk.judges import (
    PRESETS,
    JudgeConfig,
    JudgeError,
    TrajectoryJudge,
    covered,
    evidence_recall,
    redundancy,
)
from cuewalk.judges.correctness import by_evidence
from cuewalk.judges.trajectory import load_correctness
from cuewalk.memory.config import ModelConfig
from cuewalk.scripts.measures import answer_words


def walked(question, first=("e0",), added=(), ending=Ending.STOPPED, bad=0):
    steps = [Step("x", "bad", Change(cost=1, bad="unparsable"), 0)] * bad
    steps += [Step("x", "expand", Change(added=added, cost=len(added)), 0)] if added else []
    steps += [Step("STOP", "stop", Change(), 0)] if ending is Ending.STOPPED else []
    return Trajectory(question, first, tuple(steps), first + added, ending, 6)


def test_evidence_is_what_the_entries_hold_and_show(graph, gold):
    assert covered(graph, ["e0", "e3"]) == {"m1", "m4"}
    assert evidence_recall(graph, ["e0"], gold) == 0.5
    assert evidence_recall(graph, ["e0", "e1", "e5"], gold) == 1.0
    assert evidence_recall(graph, [], gold) == 0.0


def test_covered_is_what_a_statement_cites_and_so_shows(graph, gold):
    entry = graph.entries["e0"]
    told = replace(entry.statements[0], text="Ann's dog came back on Tuesday", sources=("m1", "m2"))
    past = replace(entry.statements[0], text="It was away", sources=("m6",), until=entry.time)
    other = copy(graph)
    other.entries = graph.entries | {"e0": replace(entry, statements=(past, told))}
    assert covered(other, ["e0"]) == {"m1", "m2", "m6"}  # what held before is shown too
    assert covered(graph, ["e0"]) == {"m1"}


def test_a_question_without_evidence_is_an_error_not_a_zero(graph, question):
    with pytest.raises(JudgeError, match="no gold evidence; leave it out"):
        TrajectoryJudge().score(walked(question), graph, Gold("x", (), 4))


def test_answer_words_are_content_words_in_the_text_shown(graph):
    assert answer_words(graph, ["e1"], Gold("on Tuesday", (), 4)) == 1.0
    assert answer_words(graph, ["e1"], Gold("Tuesday evening", (), 4)) == 0.5
    assert answer_words(graph, ["e1"], Gold("of the", (), 4)) is None


def test_redundancy_is_equation_16_with_and_without_the_diagonal(graph):
    # cosines: e1 and e4 have no known word: 1. e0 (dog) with e5 (dog garden): .707.
    assert redundancy(graph, ["e1", "e4", "e0"], 0.8, diagonal=True) == pytest.approx((3 + 2) / 9)
    assert redundancy(graph, ["e1", "e4", "e0"], 0.8) == pytest.approx(2 / 6)
    assert redundancy(graph, ["e0", "e5"], 0.7) == 1.0
    assert redundancy(graph, ["e0", "e5"], 0.75) == 0.0
    assert redundancy(graph, ["e0"], 0.8) == 0.0
    assert redundancy(graph, ["e0"], 0.8, diagonal=True) == 1.0
    assert redundancy(graph, [], 0.8, diagonal=True) == 0.0


def test_price_is_gain_less_what_was_added(graph, question, gold):
    judge = TrajectoryJudge(JudgeConfig(price=0.015, redundancy_weight=0.005))
    verdict = judge.score(walked(question, added=("e1", "e4"), bad=1, ending=Ending.BUDGET), graph, gold)
    assert verdict.components == pytest.approx(
        {"gain": 0.5, "price": -0.03, "redundancy": -0.005, "bad_actions": -0.05, "budget_ending": -0.02}
    )
    assert verdict.reward == pytest.approx(0.395)
    assert verdict.reason == "correctness 1.00, 2 entries added, cost 3, budget"


def test_under_price_stopping_at_once_is_exactly_zero_and_only_use_pays(graph, question, gold):
    score = lambda **how: TrajectoryJudge().score(walked(question, **how), graph, gold).reward  # noqa: E731
    assert score() == 0.0
    assert score(first=("e0", "e1")) == 0.0  # complete at the start: still nothing for nothing
    assert score(added=("e3",)) == pytest.approx(-0.015)
    assert score(added=("e3", "e2")) < score(added=("e3",)) < 0 < score(added=("e1",))
    assert score(ending=Ending.MALFORMED, bad=2) < score(bad=1) < 0
    assert score(added=("e1",), ending=Ending.BUDGET) == pytest.approx(score(added=("e1",)) - 0.02)


def test_a_useful_entry_pays_if_and_only_if_its_share_exceeds_the_price(graph, question, gold):
    for price, sign in ((0.49, 1), (0.51, -1)):
        judge = TrajectoryJudge(JudgeConfig(price=price, redundancy_weight=0))
        assert judge.score(walked(question, added=("e1",)), graph, gold).reward * sign > 0


def test_a_price_that_a_walk_was_told_is_what_it_pays(graph, question, gold):
    told = replace(walked(question, added=("e1", "e4")), price=0.1)
    parts = TrajectoryJudge(JudgeConfig(price=0.015, redundancy_weight=0.005)).score(told, graph, gold).components
    assert parts["price"] == pytest.approx(-0.2) and parts["redundancy"] == pytest.approx(-0.005)
    free = TrajectoryJudge().score(replace(told, price=0.0), graph, gold).components
    assert free["price"] == free["redundancy"] == 0.0  # never above the price


def test_paper_is_equation_18_as_printed(graph, question, gold):
    judge = TrajectoryJudge(JudgeConfig(preset="paper", weights=(1.0, 0.4, 0.1)))
    verdict = judge.score(walked(question, added=("e1", "e4")), graph, gold)
    # recall 1; W = e0 e1 e4: (3 + 2) / 9; cost 2.
    assert verdict.reward == pytest.approx(1.0 - 0.4 * 5 / 9 - 0.1 * 2)
    assert judge.score(walked(question), graph, gold).reward == pytest.approx(0.5 - 0.4)


def test_memora_code_is_the_released_formula(graph, question, gold):
    judge = TrajectoryJudge(JudgeConfig(preset="memora-code"))
    # Stop at once: one step of four. W = e0 alone: no pair.
    assert judge.score(walked(question), graph, gold).components == pytest.approx(
        {"correctness": 0.5, "redundancy": 0.0, "cost": -0.4 * 0.25}
    )
    # W = e0 (dog), e1 and e4 (neither): cosines 0, 0, 1 -> mean of (.5, .5, 1); two steps.
    verdict = judge.score(walked(question, added=("e1", "e4")), graph, gold)
    assert verdict.components == pytest.approx(
        {"correctness": 1.0, "redundancy": -0.4 * (0.5 + 0.5 + 1.0) / 3, "cost": -0.4 * 0.5}
    )


def test_gated_costs_only_shrink_a_success(graph, question, gold):
    judge = TrajectoryJudge(JudgeConfig(preset="gated", redundancy_weight=0))
    score = lambda **how: judge.score(walked(question, **how), graph, gold).reward  # noqa: E731
    assert score() == 0.0 and score(first=("e0", "e1")) == 0.0
    assert score(added=("e1",)) == pytest.approx(1.0 * (1 - 0.015) - 0.5)
    assert score(first=("e3",), added=("e2",)) == 0.0  # nothing was found: there is nothing to shrink
    assert score(first=("e0", "e1"), added=("e3",)) == pytest.approx(-0.015)  # complete at the start counts as one
    assert score(first=("e0", "e1"), added=("e2", "e3")) < score(first=("e0", "e1"), added=("e3",))


POOL = ("e1", "e2", "e3", "e4", "e5")


@given(
    added=st.lists(st.sampled_from(POOL), unique=True, max_size=4),
    one=st.sampled_from(POOL),
    price=st.floats(0.005, 0.6),
    ending=st.sampled_from([Ending.STOPPED, Ending.BUDGET]),
    bad=st.integers(0, 2),
)
def test_one_more_entry_pays_if_and_only_if_its_share_exceeds_the_price(
    added, one, price, ending, bad, graph, question
):
    gold = Gold("x", ("m1", "m2", "m5"), 4)
    added = tuple(entry for entry in added if entry != one)
    judge = TrajectoryJudge(JudgeConfig(price=price, redundancy_weight=0.0))
    score = lambda entries: judge.score(walked(question, added=entries, bad=bad, ending=ending), graph, gold).reward  # noqa: E731
    share = 1 / 3 if one in ("e1", "e4") else 0.0
    assert score((*added, one)) - score(added) == pytest.approx(share - price)
    diluting = TrajectoryJudge(JudgeConfig(price=price, redundancy_weight=price))
    if not share:  # good for nothing: it lowers the score, however it changes the redundancy
        assert diluting.score(walked(question, added=(*added, one)), graph, gold).reward < diluting.score(
            walked(question, added=added), graph, gold).reward  # fmt: skip


def test_a_question_complete_at_the_start_has_something_to_teach_when_a_group_over_expands(graph, question, gold):
    rewards = [
        TrajectoryJudge().score(walked(question, first=("e0", "e1"), added=entries), graph, gold).reward
        for entries in ((), ("e3",), ("e2", "e3"))
    ]
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) == 3


def test_every_kind_of_correctness_goes_through_every_preset(graph, question, gold):
    asked = []

    def half(graph, question, gold, entries):
        asked.append(tuple(entries))
        return 0.5

    for preset in PRESETS:
        verdict = TrajectoryJudge(JudgeConfig(preset=preset), half).score(walked(question), graph, gold)
        assert verdict.reward == pytest.approx(sum(verdict.components.values()))
    assert set(asked) == {("e0",)}


def test_a_correctness_is_loaded_by_its_name(tiny_model):
    assert load_correctness(JudgeConfig()) is by_evidence
    reader = load_correctness(JudgeConfig(correctness="likelihood", reader=str(tiny_model)))
    assert reader.kind == "likelihood"
    endpoint = load_correctness(JudgeConfig(correctness="llm", llm=ModelConfig(model="m"))).endpoint
    assert endpoint.config.model == "m"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "lenient"}, "preset\n.*'price', 'paper', 'memora-code' or 'gated'"),
        ({"correctness": "llm"}, "needs judge.llm.model"),
        ({"price": 0.001}, "could pay by diluting"),
        ({"price": -1.0}, "price\n.*greater than or equal to 0"),
        ({"weights": (1.0,)}, "weights.1\n.*Field required"),
    ],
)
def test_settings_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        JudgeConfig(**values)
