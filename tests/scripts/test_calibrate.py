from datetime import datetime

import pytest

from cuewalk.env import Gold, Question, Tasks
from cuewalk.env.own import load_synthetic
from cuewalk.judges.answers import score_answer
from cuewalk.memory import Conversation, Message
from cuewalk.scripts.calibrate import RIGHT, WRONG, calibrate, make_answers, wrongly_accepted


@pytest.fixture(scope="module")
def tasks():
    said = tuple(Message(f"m{i}", who, datetime(2024, 5, 1), "x") for i, who in enumerate(("Ann", "Bob")))
    rows = [
        ("q0", "When did Ann move?", "8 May 2023", 2),
        ("q1", "When did Bob swim?", "1 June 2024", 2),
        ("q2", "What does Ann like?", "tea, plums, rain", 1),
        ("q3", "What does Bob like?", "coffee", 1),
    ]
    questions = tuple(Question(id_, "c", text) for id_, text, _, _ in rows)
    gold = {id_: Gold(answer, ("m0",), category) for id_, _, answer, category in rows}
    return Tasks({"c": Conversation("c", said)}, questions, gold)


def test_answers_are_what_their_kind_says(tasks):
    made = {(kind, question.id): answer for kind, question, answer in make_answers(tasks, 10)}
    assert made["exact", "q0"] == "8 May 2023"
    assert made["paraphrase", "q0"] == "On May 8, 2023."
    assert made["paraphrase", "q2"] == "It was rain, plums, tea."
    assert made["paraphrase", "q3"] == "That would be coffee."
    assert made["other_speaker", "q0"] == made["specific", "q0"] == "1 June 2024"
    assert made["other_speaker", "q2"] == "coffee"
    assert made["wrong_date", "q0"] != "8 May 2023" and made["wrong_date", "q0"].endswith("2023")
    assert ("wrong_date", "q2") not in made


def test_a_judges_rates_are_counted_by_kind(tasks):
    rates = {rate.kind: rate for rate in calibrate(lambda q, answer, gold: answer == gold.answer, tasks)}
    assert (rates["exact"].n, rates["exact"].accepted) == (4, 4)
    assert all(rates[kind].accepted == 0 for kind in (*WRONG, "paraphrase"))
    assert rates["exact"].interval == pytest.approx((0.5101, 1.0), abs=1e-3)  # Wilson, 4 of 4
    assert wrongly_accepted(list(rates.values())) == 0.0
    everything = calibrate(lambda *_: True, tasks)
    assert wrongly_accepted([rate for rate in everything if rate.kind in RIGHT]) is None  # nothing to try it on
    assert wrongly_accepted(everything) == 1.0 and all(rate.accepted == rate.n for rate in everything)


def test_real_conversations_yield_every_kind_and_f1_takes_the_exact_for_right():
    tasks = load_synthetic("val", 4)
    made = make_answers(tasks, 20)
    counts = {kind: sum(k == kind for k, _, _ in made) for kind in (*RIGHT, *WRONG)}
    assert min(counts.values()) >= 5
    assert made == make_answers(tasks, 20)
    for kind, question, answer in made:
        same = score_answer(answer, tasks.gold[question.id])["answer_em"]
        assert same == (kind == "exact"), (kind, answer)
