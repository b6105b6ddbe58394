import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cuewalk.env import EnvConfig, Expand, Gold, Question, RetrievalEnv, Tasks
from cuewalk.env.state import apply, first_state
from cuewalk.judges import JudgeError, TrajectoryJudge, covered
from cuewalk.memory import Link
from cuewalk.memory.models import load_language_model
from cuewalk.rl import Config
from cuewalk.rl.config import SamplingConfig
from cuewalk.rl.data import Memories
from cuewalk.rl.oracle import oracle_action
from cuewalk.rl.ranker import FEATURES, Ranker, features, fit_ranker
from cuewalk.rl.rollout import walk_greedily
from cuewalk.scripts import baselines
from cuewalk.scripts.baselines import expand_likely
from cuewalk.scripts.curve import Record, Served, choose_offset, cut, record, stopping
from cuewalk.scripts.evaluate import (
    COLUMNS,
    Altered,
    Bench,
    nearest_threshold,
    no_text,
    other_question,
    summarise,
)
from cuewalk.scripts.grammar import lawful
from cuewalk.scripts.measures import measure_entries, measure_walk
from cuewalk.scripts.paired import compare
from cuewalk.scripts.report import markdown

RULES = EnvConfig(k=1, budget=3, frontier_cap=4, new_lines=1)


def words(text):
    return len(text.split())


def test_recall_at_8_tops_up_from_the_first_ranking_and_cuts(graph, question, gold):
    found = measure_entries(graph, question, gold, ["e3"], words, 0.8)
    # Six entries in all: topped up to 8, everything is there, and the walk's own recall stays what it was.
    assert (found["recall_at_8"], found["evidence_recall"]) == (1.0, 0.0)
    assert found["recall_at_8_c4"] == 1.0 and found["precision"] == 0.0 and found["entries"] == 1.0
    assert found["context_tokens"] == words(graph.entries["e3"].value)


def test_recall_at_300_tokens_takes_what_fits(graph, question, gold):
    ranking = ["e3", *[hit.entry for hit in graph.search(question.text, 60, exclude={"e3"})]]
    both = max(ranking.index("e0"), ranking.index("e1"))
    per_entry = 300 // both  # the entry that completes the evidence is just past 300 tokens
    assert measure_entries(graph, question, gold, ["e3"], lambda _: per_entry, 0.8)["recall_at_300t"] == 0.5
    assert measure_entries(graph, question, gold, ["e3"], lambda _: 300 // (both + 1), 0.8)["recall_at_300t"] == 1.0
    assert measure_entries(graph, question, gold, ["e3"], lambda _: 301, 0.8)["recall_at_300t"] == 0.0


def test_ndcg_is_one_where_the_gold_comes_first(graph, question, gold):
    assert measure_entries(graph, question, gold, ["e0", "e1"], words, 0.8)["ndcg"] == pytest.approx(1.0)
    late = measure_entries(graph, question, gold, ["e3", "e0", "e4", "e1"], words, 0.8)["ndcg"]
    ideal = 1 / np.log2(2) + 1 / np.log2(3)
    assert late == pytest.approx((1 / np.log2(3) + 1 / np.log2(5)) / ideal)


def test_a_walk_is_measured_by_its_ending_and_cost(graph, question, gold):
    env = RetrievalEnv(graph, question, RULES)
    trajectory = baselines.run_scripted(baselines.expand_top(3), env, gold)
    assert measure_walk(graph, trajectory, gold, 0.25) == {
        "reward": 0.25, "steps": 1.0, "cost": 3.0, "budget": 3.0, "bad_actions": 0.0,
        "stop_when_complete": None, "go_when_incomplete": 1.0,
        "stop_early": 0.0, "stop_late": 0.0, "stop_right": 0.0, "complete_at_start": 0.0,
        "ended_stopped": 0.0, "ended_budget": 1.0, "ended_malformed": 0.0,
    }  # fmt: skip


def test_stopping_is_right_when_all_is_there_and_only_then(graph, question):
    def measured(policy, *evidence):
        gold = Gold("x", evidence, 4)
        trajectory = baselines.run_scripted(policy, RetrievalEnv(graph, question, RULES), gold)
        found = measure_walk(graph, trajectory, gold, 0.0)
        keys = (
            "stop_when_complete",
            "go_when_incomplete",
            "stop_early",
            "stop_late",
            "stop_right",
            "complete_at_start",
        )
        return tuple(found[key] for key in keys)

    assert measured(baselines.expand_top(0), "m1") == (1.0, None, 0.0, 0.0, 1.0, 1.0)
    assert measured(baselines.expand_top(0), "m2") == (None, 0.0, 1.0, 0.0, 0.0, 0.0)
    assert measured(baselines.expand_top(1), "m1") == (0.5, None, 0.0, 1.0, 0.0, 1.0)  # too late, then right
    assert measured(oracle_action, "m1", "m2") == (1.0, 1.0, 0.0, 0.0, 1.0, 0.0)


def most_found(state, graph, rules, gold):
    """Try every walk of single expansions; return the most evidence that any of them gathers."""
    best = len(covered(graph, state.working) & gold)
    for label, _ in state.frontier if state.ending is None else ():
        best = max(best, most_found(apply(state, Expand((label,)), graph, rules)[0], graph, rules, gold))
    return best


def test_the_searching_oracle_finds_what_the_best_of_all_walks_finds_nearly_always(graph):
    missed = {1: [], 2: [], 3: []}
    for text, budget, cap, size in itertools.product(("dog", "trip", "piano in the garden"), (1, 2, 3), (1, 2), (1, 2)):
        rules = EnvConfig(k=1, budget=budget, frontier_cap=cap, new_lines=1)
        for evidence in itertools.combinations(graph.messages, size):
            env = RetrievalEnv(graph, Question("q", graph.conversation.id, text), rules)
            found = baselines.run_scripted(baselines.searching_oracle, env, Gold("", evidence, 4)).working
            best = most_found(first_state(graph, text, rules), graph, rules, set(evidence))
            missed[budget].append(best - len(covered(graph, found) & set(evidence)))
    assert set(missed[1]) == {0}
    later = np.array(missed[2] + missed[3])
    assert later.min() == 0 and 0 < np.mean(later > 0) < 0.12  # two hops, greedily


def test_a_judge_that_fails_leaves_the_walk_measured_and_is_counted(bench, question, gold):
    def failing(*_):
        raise JudgeError("no verdict")

    broken = replace(bench, judge=TrajectoryJudge(correctness=failing))
    rows = broken.measure("walk", [question], partial(broken.walk, baselines.expand_top(1)))
    found = {name: value for _, _, name, value in rows}
    assert (found["reward"], found["judge_failed"]) == (None, 1.0) and found["evidence_recall"] is not None
    with pytest.raises(JudgeError, match="failed on every validation question"):
        broken.best([Served((baselines.run_scripted(oracle_action, bench.memories.env(question), gold),), (1,), ())])


def test_scripted_policies_do_what_their_names_say(graph, question, gold):
    run = lambda policy: baselines.run_scripted(policy, RetrievalEnv(graph, question, RULES), gold)  # noqa: E731
    assert run(baselines.expand_top(0)).added == ()
    frontier = RetrievalEnv(graph, question, RULES)
    frontier.reset()
    shown = [link.entry for _, link in frontier.state.frontier]
    assert run(baselines.expand_top(1)).added == (shown[0],)
    assert run(baselines.expand_top(2)).added == tuple(shown[:2])
    assert run(oracle_action).added == ("e1",)
    assert run(baselines.random_walk).working == run(baselines.random_walk).working


def test_no_expansion_is_dearer_than_the_budget(graph, question, gold):
    dear = EnvConfig(k=1, budget=3, frontier_cap=4, new_lines=1, expand_cost=2)
    walked = baselines.run_scripted(baselines.expand_top(4), RetrievalEnv(graph, question, dear), gold)
    assert len(walked.added) == 1 and walked.cost == 2 and walked.ending == "stopped"
    likely = expand_likely(lambda graph, query, working, links: np.ones(len(links)), 0.5)
    walked = baselines.run_scripted(likely, RetrievalEnv(graph, question, dear), gold)
    assert len(walked.added) == 1 and walked.cost == 2


def dog_tasks(conversation, evidence):
    questions = tuple(Question(f"toy:{i}", "toy", "dog " * (i % 3 + 1)) for i in range(30))
    return Tasks({"toy": conversation}, questions, {q.id: Gold("", evidence, 4) for q in questions})


def test_the_ranker_learns_which_candidates_hold_evidence(graph, conversation, tmp_path):
    tasks = dog_tasks(conversation, ("m6",))
    ranker = fit_ranker(tasks, {"toy": graph}, RULES)
    assert ranker.kinds == ("segment", "adjacent", "anchor", "similar")
    env = RetrievalEnv(graph, tasks.questions[0], RULES)
    walked = baselines.run_scripted(expand_likely(ranker, 0.5), env, tasks.gold["toy:0"])
    assert walked.added == ("e5",)
    env.reset()
    links = [link for _, link in env.state.frontier]
    assert features(graph, "dog", env.state.working, links, ranker.kinds).shape == (4, len(FEATURES) + 4)
    assert features(graph, "dog", env.state.working, [], ranker.kinds).shape == (0, len(FEATURES) + 4)
    chances = ranker(graph, "dog", env.state.working, links)
    assert [link.entry for link in links][int(np.argmax(chances))] == "e5" and 0 < chances.min() < chances.max() < 1
    ranker.save(tmp_path / "ranker.json")
    assert Ranker.load(tmp_path / "ranker.json") == ranker
    with pytest.raises(ValueError, match="with and without evidence"):
        fit_ranker(dog_tasks(conversation, ("m1",)), {"toy": graph}, RULES)


def test_the_ranker_takes_by_the_chances_that_it_ordered_by(graph, conversation):
    """Its score stands in place of the cosine then, and its order in place of the search's: neither may be read."""
    tasks = dog_tasks(conversation, ("m6",))
    ranker = fit_ranker(tasks, {"toy": graph}, RULES)
    ordered = RetrievalEnv(
        graph, tasks.questions[0], EnvConfig(k=1, budget=3, frontier_cap=2, order="ranker"), rank=ranker
    )
    ordered.reset()
    pool = graph.frontier("dog ", ordered.state.working, set(ordered.state.working), RULES.links, 8)
    chances = sorted(ranker(graph, "dog ", ordered.state.working, pool))[::-1]
    assert [link.score**2 for _, link in ordered.state.frontier] == pytest.approx(chances[:2])
    gold = tasks.gold["toy:0"]
    between = (chances[0] + chances[1]) / 2
    assert len(baselines.run_scripted(expand_likely(ranker, between), ordered, gold).added) == 1
    assert baselines.run_scripted(expand_likely(ranker, chances[0] + 0.01), ordered, gold).added == ()
    first = [link for _, link in ordered.state.frontier][:1]
    assert features(graph, "dog", ["e0"], first, ())[0, 0] == pytest.approx(
        features(graph, "dog", ["e0"], [replace(first[0], score=0.0)], ())[0, 0]
    )


def test_a_walk_without_a_budget_keeps_the_first_search(graph, question, gold, tiny_model, chat):
    model = load_language_model(str(tiny_model), "float32", device="cpu")
    env = RetrievalEnv(graph, question, EnvConfig(k=1, budget=0))
    (row,) = walk_greedily([env], model, chat, SamplingConfig(max_action_tokens=8))
    assert row.trajectory.working == ("e0",) and row.trajectory.ending == "budget" and not row.completion
    assert baselines.run_scripted(baselines.expand_top(1), env, gold) == row.trajectory
    (kept,) = record([env], model, chat, SamplingConfig(max_action_tokens=8))
    assert cut(kept, lambda: env).walks == (row.trajectory,)


def test_a_ranker_that_is_absent_or_of_other_features_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train first"):
        Ranker.load(tmp_path / "ranker.json")
    (tmp_path / "ranker.json").write_text('{"features": ["cosine"], "kinds": [], "weights": [1.0], "bias": 0.0}')
    with pytest.raises(ValueError, match="other features"):
        Ranker.load(tmp_path / "ranker.json")


def test_features_are_what_their_names_say(graph):
    """By hand: W is e0, `The dog ran away` by Ann; candidates e5, `The dog likes the garden`, and e1, without a dog."""
    links = [Link("e5", "similar", 0.7), Link("e1", "segment", 0.0)]
    dog, other = features(graph, "When was Bob with the dog?", ["e0"], links, ("segment", "similar"))
    half = 0.5**0.5  # dog and garden are two axes: the cosine of e5 with e0, which has the dog alone
    by_name = dict(zip((*FEATURES, "segment", "similar"), dog, strict=True))
    assert by_name["cosine"] == pytest.approx(half) and by_name["speaker_named"] == 1.0 and not by_name["of_another"]
    assert by_name["nearest"] == by_name["mean_near"] == by_name["near_first"] == pytest.approx(half)
    assert by_name["asks_when"] == by_name["similar"] == 1.0 and by_name["segment"] == 0.0
    assert by_name["asks"] == by_name["tells_when"] == 0.0
    assert by_name["read_most"] == by_name["read_mean"] == pytest.approx(1.0)  # the question has no axis but the dog's
    assert by_name["apart"] == by_name["apart_from_first"] == pytest.approx(np.log(6))
    assert by_name["search_rank"] == pytest.approx(np.log(2))  # second to e0
    assert other[FEATURES.index("tells_when")] == 1.0 and tuple(other[-2:]) == (1.0, 0.0)  # "on Tuesday"
    assert not features(graph, "Who is Bob?", ["e0"], links, ())[1, FEATURES.index("tells_when")]  # nobody asks when
    assert features(graph, "Did Ann come back?", ["e0"], links[1:], ())[0, FEATURES.index("of_another")] == 1.0


def test_differences_are_averaged_by_conversation_with_a_t_interval():
    a = {"q1": 1.0, "q2": 0.0, "q3": 1.0, "q4": 1.0}
    b = {"q1": 0.0, "q2": 0.0, "q3": 0.0, "q4": 0.5}
    home = {"q1": "x", "q2": "x", "q3": "y", "q4": "z"}
    found = compare(a, b, home)
    assert found["by_conversation"] == {"x": 0.5, "y": 1.0, "z": 0.5}
    assert found["difference"] == pytest.approx(2 / 3)
    interval = stats.ttest_1samp([0.5, 1.0, 0.5], 0).confidence_interval(0.95)
    assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))
    error = stats.sem([0.5, 1.0, 0.5])
    assert found["detectable"] == pytest.approx((stats.t.ppf(0.975, 2) + stats.t.ppf(0.8, 2)) * error)
    assert found["question_low"] <= np.mean([1, 0, 1, 0.5]) <= found["question_high"]
    assert found["n"] == 4


def test_one_conversation_has_no_t_interval_and_unequal_questions_are_refused():
    alone = compare({"q": 1.0}, {"q": 0.5}, {"q": "x"})
    assert (alone["difference"], alone["low"], alone["detectable"]) == (0.5, None, None)
    with pytest.raises(ValueError, match="the same questions on both sides"):
        compare({"q": 1.0}, {"r": 1.0}, {"q": "x", "r": "x"})


def test_one_question_a_conversation_has_a_t_interval_and_no_bootstrap():
    own = {"a": 1.0, "b": 0.0, "c": 1.0}
    found = compare(own, dict.fromkeys(own, 0.0), {name: name for name in own})
    assert (found["question_low"], found["question_high"], found["n"]) == (None, None, 3) and found["low"] is not None


def test_the_bootstrap_is_stratified_and_seeded():
    a = {f"q{i}": float(i % 2) for i in range(40)}
    b = dict.fromkeys(a, 0.0)
    home = {q: "x" if int(q[1:]) < 20 else "y" for q in a}
    first, again = compare(a, b, home), compare(a, b, home)
    assert first == again
    assert first["question_low"] == pytest.approx(0.35, abs=0.06)
    constant = {q: 1.0 if home[q] == "x" else 0.0 for q in a}
    assert compare(constant, b, home)["question_low"] == 0.5  # nothing varies within a conversation


def test_a_report_shows_losses_as_plainly_as_gains():
    row = {
        "policy": "trained",
        "questions": "all",
        "n": 2,
        "reward": -0.1,
        "recall_at_8": 0.5,
        "recall_at_8_c4": 0.5,
    }
    result = {
        "name": "x", "command": "cuewalk evaluate", "commit": "abc", "seeds": [0], "versions": {},
        "data": {"dataset": "synthetic", "split": "s", "n": 2, "n_clean": 2, "n_asked": 2},
        "rows": [row, replace_policy(row, "stop")],
        "comparisons": [{"metric": "reward", "a": "trained", "b": "stop", "n": 2,
                         **compare({"q": -0.1, "r": -0.1}, {"q": 0.0, "r": 0.0}, {"q": "x", "r": "y"})}],
        "training": {}, "lines": [{"order": "ranker", "auroc": 0.75}],
    }  # fmt: skip
    text = markdown(result)
    assert "| ranker | 0.750 |" in text
    wide = result | {"rows": [row | {"recall_at_8_c10": 0.25, "recall_at_8_clean": 0.5}]}
    assert "| policy | n | c4 | c10 | clean |" in markdown(wide)
    assert "| trained | 2 | 0.500 | – | – | -0.100 |" in text
    assert "| reward | trained − stop | -0.100 | -0.100 … -0.100 |" in text


def replace_policy(row, name):
    return row | {"policy": name, "reward": 0.0}


class Bound:
    """What `summarise` reads of a bench."""

    def __init__(self, tasks, run):
        self.config, self.tasks = Config(run_dir=str(run)), tasks


def test_means_are_of_what_is_known_and_pairs_of_what_both_have(conversation, tmp_path):
    questions = tuple(Question(f"toy:{i}", "toy", "?") for i in range(3))
    tasks = Tasks({"toy": conversation}, questions, {q.id: Gold("", ("m1",), 4, q.id != "toy:0") for q in questions})
    values = {("stop", "recall_at_8"): (0.0, 0.5, 1.0), ("stop", "answer_words"): (None, 0.5, 1.0),
              ("stop", "recall_at_8_c4"): (0.0, 0.5, 1.0), ("top_k=8", "answer_words"): (None, None, None),
              ("trained", "recall_at_8"): (1.0, 1.0)}  # fmt: skip
    rows = [(p, f"toy:{i}", name, value) for (p, name), found in values.items() for i, value in enumerate(found)]
    result = summarise(Bound(tasks, tmp_path), pd.DataFrame(rows, columns=COLUMNS), ["toy:0", "toy:1"])
    assert result["rows"] == [
        {"policy": "stop", "questions": "all", "n": 3, "reward": None, "recall_at_8": 0.5, "answer_words": 0.75,
         "recall_at_8_c4": 0.5, "recall_at_8_clean": 0.75},
        {"policy": "stop", "questions": "asked", "n": 2, "reward": None, "recall_at_8": 0.25, "answer_words": 0.5,
         "recall_at_8_c4": 0.25},
        {"policy": "top_k=8", "questions": "all", "n": 3, "reward": None, "answer_words": None,
         "recall_at_8_clean": None},
        {"policy": "top_k=8", "questions": "asked", "n": 2, "reward": None, "answer_words": None},
        {"policy": "trained", "questions": "asked", "n": 2, "reward": None, "recall_at_8": 1.0,
         "recall_at_8_clean": 1.0},
    ]  # fmt: skip
    ((metric, a, b, n, difference),) = (
        (c["metric"], c["a"], c["b"], c["n"], c["difference"]) for c in result["comparisons"]
    )
    assert (metric, a, b, n, difference) == ("recall_at_8", "trained", "stop", 2, 0.75)
    assert result["data"]["n_clean"] == 2 and result["data"]["asked"] == ["toy:0", "toy:1"]
    json.dumps(result)


def test_every_cut_of_one_walk_is_the_walk_the_policy_takes_with_that_offset(
    graph, question, tiny_model, chat, monkeypatch
):
    """Under the grammar, so that a random model acts: what is derived equals decoding anew under each offset."""
    model = load_language_model(str(tiny_model), "float32", device="cpu")
    rules = EnvConfig(k=1, budget=6, frontier_cap=4, new_lines=1)
    others = [question, Question("toy:2", "toy", "Who has a garden?")]
    make = lambda: [RetrievalEnv(graph, asked, rules) for asked in others]  # noqa: E731
    lawfully = partial(walk_greedily, allow=lawful(chat, 8))
    monkeypatch.setattr("cuewalk.scripts.curve.walk_greedily", lawfully)
    kept = record(make(), model, chat, SamplingConfig(max_action_tokens=8))
    served = [cut(walk, lambda place=place: make()[place]) for place, walk in enumerate(kept)]
    margins = sorted(margin for walk in served for margin in walk.margins)
    between = [(a + b) / 2 for a, b in itertools.pairwise(margins)]
    seen = set()
    for offset in [0.0, -min(margins) + 1, -max(margins) - 1, *(-middle for middle in between)]:
        rows = lawfully(make(), model, chat, SamplingConfig(max_action_tokens=8, stop_offset=offset))
        for row, walk in zip(rows, served, strict=True):
            place = walk.place(offset)
            assert row.trajectory == walk.walks[place]
            assert len(row.prompt) + len(row.completion) == walk.tokens[place]
            seen.add(place)
    assert len(seen) > 2


def walk_with(margins):
    return Served(tuple(range(len(margins) + 1)), tuple(range(len(margins) + 1)), margins)


@pytest.fixture
def bench(graph, conversation, question, gold, chat, tmp_path):
    return bench_of(Config(env=RULES, run_dir=str(tmp_path)), graph, conversation, question, gold, chat)


def test_an_adaptive_search_takes_what_is_above_the_gap_or_the_threshold():
    scores = [0.9, 0.5, 0.85, 0.45, 0.4]  # hits come by fused rank; the largest gap is .85 to .5
    assert baselines.adaptive_count(scores, None) == 2 + 5
    assert [baselines.adaptive_count(scores, threshold) for threshold in (0.5, 0.86, 0.95)] == [3, 1, 1]
    assert baselines.adaptive_count([0.3], None) == 1


def test_the_threshold_of_an_adaptive_search_gives_eight_hits_on_validation(bench):
    # Cosines of the six entries with "dog come back": 1 for e0, 1/√2 for e5, 0 for the others; eight there are not.
    assert nearest_threshold(bench) == pytest.approx(0.1)
    ((found, tokens),) = bench.search_adaptively(0.9, bench.tasks.questions)
    assert (found, tokens) == (["e0"], 0)


def test_the_scores_shown_are_rated_by_what_their_lines_hold(bench):
    """Scores of the four candidates are cosines .71, 0, 0, 0; e1, one of the last, holds what is missing."""
    assert bench.lines_told() == pytest.approx((0 + 0.5 + 0.5) / 3)


def test_an_offset_stops_before_the_first_action_where_stop_then_leads():
    walk = walk_with((-2.0, -0.5, 1.0))
    assert [walk.place(offset) for offset in (-2.0, 0.0, 0.75, 3.0)] == [3, 2, 1, 0]
    rewards = [[0.0, 0.3, 0.1, -0.1]]
    assert 0.5 < choose_offset([walk], rewards) <= 2.0  # one action and then to stop pays best
    assert choose_offset([walk], [[0.1] * 4]) == 0.0  # of equals the nearest to none


def test_stopping_is_told_by_ranks_and_by_the_threshold_of_validation():
    val = [0.9, 0.8, 0.2, 0.1], [True, True, False, False]
    assert stopping(val, ([0.85, 0.3, 0.79], [True, False, True])) == {"auroc": 1.0, "balanced_accuracy": 0.75}
    assert stopping(val, ([0.5], [True])) == {"auroc": None, "balanced_accuracy": None}


def test_controls_alter_what_is_read_and_nothing_else(graph, question, chat):
    env = RetrievalEnv(graph, question, RULES)
    shown = env.reset()[0]
    lines = shown.splitlines()
    blank = no_text(shown).splitlines()
    candidates = range(lines.index("Candidates:") + 1, len(lines) - 1)
    assert len(candidates) == 4
    for place, (before, after) in enumerate(zip(lines, blank, strict=True)):
        assert after == (f"… {before[-4:]}" if place in candidates else before)
    asked = other_question(shown).splitlines()
    assert [i for i, pair in enumerate(zip(lines, asked, strict=True)) if pair[0] != pair[1]] == [1]
    altered = Altered(chat.tokenizer, no_text)
    assert altered.first(shown) == chat.first(no_text(shown)) != chat.first(shown)
    assert altered.following("Candidates:\nBob: He came 3e C\nBudget 2.") == chat.following(
        "Candidates:\n… 3e C\nBudget 2."
    )


def bench_of(config, graph, conversation, question, gold, chat):
    tasks = Tasks({"toy": conversation}, (question,), {question.id: gold})
    return Bench(config, tasks, Memories({"toy": graph}, config.env), TrajectoryJudge(), chat)


def test_a_curve_and_its_best_offset_are_read_off_the_walks(graph, conversation, question, gold, chat):
    """Two expansions, the second useless; STOP leads by -1 before the first and by .5 before the second."""
    bench = bench_of(Config(env=RULES), graph, conversation, question, gold, chat)
    env = bench.memories.env(question)
    env.reset()
    useful = next(label for label, link in env.state.frontier if link.entry == "e1")
    other = next(label for label, link in env.state.frontier if link.entry != "e1")
    kept = Record(question.id, (f"EXPAND {useful}", f"EXPAND {other}"), (-1.0, 0.5), (10, 20, 30))
    served = {question.id: cut(kept, lambda: bench.memories.env(question))}
    points = {point["offset"]: point for point in bench.points(served)}
    assert [points[o]["entries"] for o in (-7.8125, -0.5625, 0.0, 0.8125, 1.0625, 7.8125)] == [3, 3, 2, 2, 1, 1]
    assert [points[o]["evidence_recall"] for o in (-0.5625, 0.0, 1.0625)] == [1.0, 1.0, 0.5]
    assert bench.best(list(served.values())) == (0.0, pytest.approx(0.5 - 0.015))
    scores, complete = bench.scores("margin", served)
    assert (scores, complete) == ([-1.0], [False])
    assert bench.scores(None, served)[0] == [-max(link.score for _, link in env.state.frontier)]


def test_walks_are_kept_under_all_that_decides_them(graph, conversation, question, gold, chat, tmp_path):
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "adapter_model.safetensors").write_bytes(b"weights")
    config = Config(env=RULES, run_dir=str(tmp_path))
    of = lambda config: bench_of(config, graph, conversation, question, gold, chat).digest("trained on validation")  # noqa: E731
    first = of(config)
    assert of(replace(config, sampling=SamplingConfig(stop_offset=1.0), memory_dir="elsewhere")) == first
    changed = [replace(config, env=replace(RULES, budget=2)), replace(config, dtype="float32"),
               replace(config, memory=replace(config.memory, nearest=3)),
               replace(config, sampling=SamplingConfig(max_action_tokens=9))]  # fmt: skip
    (tmp_path / "ranker.json").write_bytes(b"other")
    another = of(config)
    (tmp_path / "reader").mkdir()
    (tmp_path / "reader" / "adapter_model.safetensors").write_bytes(b"reader")
    assert len({first, another, of(config), *map(of, changed)}) == 3 + len(changed)
