from copy import copy
from dataclasses import replace

import pytest

from cuewalk.env import Change, Ending, Gold, Step, Trajectory
from cuewalk.judges import (
    JudgeConfig,
    JudgeError,
    TrajectoryJudge,
    answer_words,
    covered,
    evidence_recall,
    redundancy,
)


def walked(question, first=("e0",), added=(), ending=Ending.STOPPED, bad=0):
    steps = [Step("x", "bad", Change(cost=1, bad="unparsable"), 0)] * bad
    steps += [Step("x", "expand", Change(added=added, cost=len(added)), 0)] if added else []
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
    assert verdict.reason == "recall 1.00, gain 0.50 for 2 entries, budget"


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


def test_paper_is_equation_18_as_printed(graph, question, gold):
    judge = TrajectoryJudge(JudgeConfig(preset="paper", weights=(1.0, 0.4, 0.1)))
    verdict = judge.score(walked(question, added=("e1", "e4")), graph, gold)
    # recall 1; W = e0 e1 e4: (3 + 2) / 9; cost 2.
    assert verdict.reward == pytest.approx(1.0 - 0.4 * 5 / 9 - 0.1 * 2)
    assert judge.score(walked(question), graph, gold).reward == pytest.approx(0.5 - 0.4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "lenient"}, "judge.preset = 'lenient'; choose from price, paper"),
        ({"price": -1.0}, "judge.price = -1.0: must not be negative"),
        ({"weights": (1.0,)}, "three numbers"),
    ],
)
def test_settings_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        JudgeConfig(**values)
