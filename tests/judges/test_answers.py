import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuewalk.env import Gold
from cuewalk.judges.answers import score_answer


def scores(prediction, answer, category=4):
    return score_answer(prediction, Gold(answer, (), category))


def test_an_exact_answer_scores_one_everywhere():
    assert scores("7 May 2023", "7 May 2023") == pytest.approx(
        {"answer_em": 1.0, "answer_f1": 1.0, "answer_f1_xmemory": 1.0, "bleu1": 1.0, "rouge_l": 1.0}
    )


def test_bleu_has_its_brevity_penalty():
    assert scores("may 2023", "7 may 2023")["bleu1"] == pytest.approx(0.60653, abs=1e-5)
    assert scores("on 7 may 2023 .", "7 may 2023")["bleu1"] == pytest.approx(0.6)


def test_locomos_f1_stems_and_counts_and_leaves_articles_out():
    # "the dogs and dogs": the, and gone; stems dog dog. Gold "a dog": dog. Common 1 of 2 and 1: 2/3.
    assert scores("the dogs and dogs", "a dog")["answer_f1"] == pytest.approx(2 / 3)
    assert scores("adopting", "adopted")["answer_f1"] == 1.0
    assert scores("adopting", "adopted")["answer_f1_xmemory"] == 0.0
    assert scores("Dog!", "the dog")["answer_em"] == 1.0


def test_xmemorys_f1_is_over_sets_and_keeps_articles():
    # {the, dog} and {a, dog}: 1 of 2 and 2.
    assert scores("The dog dog.", "a dog")["answer_f1_xmemory"] == pytest.approx(0.5)


def test_multi_hop_answers_are_scored_by_their_parts():
    # hiking: 1; swimming: best of (0, 1) = 1; pottery: 0.
    assert scores("hiking, swimming", "swimming, hiking, pottery", 1)["answer_f1"] == pytest.approx(2 / 3)
    assert scores("hiking, swimming", "swimming, hiking, pottery", 4)["answer_f1"] == pytest.approx(0.8)


def test_of_open_domain_gold_the_explanation_is_left_out():
    assert scores("Yes", "Yes; she said so twice", 3)["answer_em"] == 1.0
    assert scores("Yes", "Yes; she said so twice", 4)["answer_em"] == 0.0


@given(prediction=st.text(max_size=40), answer=st.text(min_size=1, max_size=40), category=st.sampled_from([1, 2, 3, 4]))
def test_any_text_scores_between_nothing_and_all(prediction, answer, category):
    assert all(0 <= value <= 1 + 1e-9 for value in scores(prediction, answer, category).values())


def test_an_empty_answer_scores_nothing():
    assert set(scores("", "Oslo").values()) == {0.0}
    assert scores("", "the")["answer_em"] == 0.0  # both are nothing after normalisation, and nothing is no answer
