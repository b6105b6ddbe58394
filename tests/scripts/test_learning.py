"""Runs joined: a question is averaged over the runs that asked it, conversations of all folds stand side by side."""

import json
import sys

import pandas as pd
import pytest

from cuewalk.env import DataError
from cuewalk.scripts.measure_learning import asked_alone, everyone, join, main, read_run

MEASURES = {"reward": 0.1, "entries": 8.0, "context_tokens": 400.0, "recall_at_300t": 0.5, "evidence_recall": 0.5}


def a_run(path, values, seed=0):
    """Write what an evaluation leaves: `values` are policy -> question -> recall@8."""
    path.mkdir()
    rows = [
        (policy, question, name, value, question.partition(":")[0])
        for policy, own in values.items()
        for question, recall in own.items()
        for name, value in {"recall_at_8": recall, **MEASURES}.items()
    ]
    pd.DataFrame(rows, columns=["policy", "question", "measure", "value", "conversation"]).to_csv(
        path / "measures_test.csv", index=False
    )
    asked = [question for question in next(iter(values.values())) if not question.endswith("unasked")]
    result = {
        "name": path.name, "command": "cuewalk evaluate", "commit": "abc", "versions": {}, "seeds": [seed],
        "data": {"dataset": "toy", "split": "fold/test", "n": 3, "n_clean": 3, "n_asked": len(asked), "asked": asked},
        "training": {"grpo_steps": 2, "groups": 8, "groups_live": 7, "groups_per_hour": 500.0,
                     "distinct_trajectories": 5.0, "seconds": {"warm_start": 60.0, "grpo": 30.0}},
        "stopping": [{"policy": "trained", "auroc": 0.6, "balanced_accuracy": 0.55}],
        "controls": [{"policy": "trained", "control": None, "reward": 0.1}],
        "lines": [{"order": "reader", "auroc": 0.9}],
        "curves": [{"policy": "trained", "chosen": 0.0, "points": [
            {"offset": 0.0, "entries": 6.0 + seed, "evidence_recall": 0.7, "context_tokens": 90.0}]}],
    }  # fmt: skip
    (path / "evaluation.json").write_text(json.dumps(result))
    return path


@pytest.fixture
def runs(tmp_path):
    """Fold one twice, with two seeds, and fold two once."""
    return [
        a_run(tmp_path / "one", {"trained": {"a:1": 1.0, "a:2": 0.0, "a:unasked": 0.0},
                                 "ranker": {"a:1": 0.5, "a:2": 0.5}}),
        a_run(tmp_path / "two", {"trained": {"a:1": 0.0, "a:2": 0.0}, "ranker": {"a:1": 0.5, "a:2": 0.5}}, seed=1),
        a_run(tmp_path / "other", {"trained": {"b:1": 1.0}, "ranker": {"b:1": 0.5}}),
    ]  # fmt: skip


def test_seeds_are_averaged_by_question_and_folds_joined(runs):
    found = join([asked_alone(read_run(run, "test")) for run in runs], (("trained", "ranker"), ("trained", "absent")))
    rows = {row["policy"]: row for row in found["rows"]}
    # a:1 is (1 + 0) / 2, a:2 is 0, b:1 is 1; what was not asked of the models is left out.
    assert (rows["trained"]["n"], rows["trained"]["recall_at_8"]) == (3, 0.5)
    assert rows["ranker"]["recall_at_8"] == 0.5 and rows["ranker"]["recall_at_8_c1"] is None
    (recall,) = [c for c in found["comparisons"] if c["metric"] == "recall_at_8"]
    # By conversation: a ((.5 - .5) + (0 - .5)) / 2 = -.25, b +.5.
    assert recall["by_conversation"] == {"a": -0.25, "b": 0.5}
    assert recall["difference"] == 0.125 and recall["n"] == 3
    assert {c["b"] for c in found["comparisons"]} == {"ranker"}
    assert found["curves"] == [
        {"policy": "trained", "offset": 0.0, "entries": pytest.approx(19 / 3), "evidence_recall": pytest.approx(0.7),
         "context_tokens": 90.0}
    ]  # fmt: skip


def test_the_command_writes_the_result_without_ids_of_questions(runs, tmp_path, monkeypatch):
    out = tmp_path / "docs" / "learning"
    monkeypatch.setattr(sys, "argv", ["measure_learning", *map(str, runs), "--out", str(out)])
    monkeypatch.setattr("cuewalk.scripts.measure_learning.PAIRS", (("trained", "ranker"),))
    main()
    result = json.loads(out.with_suffix(".json").read_text())
    assert result["seeds"] == [0, 1] and [run["name"] for run in result["runs"]] == ["one", "two", "other"]
    assert "asked" not in result["runs"][0]["data"]
    shown = out.with_suffix(".md").read_text()
    assert "| trained − ranker | +0.125 |" in shown and "| one | trained | everything | 0.100 |" in shown
    assert "| one | fold/test | 0 | 2 |" in shown and "500.000" in shown
    assert (tmp_path / "docs" / "learning_curves.png").read_bytes()[:4] == b"\x89PNG"


def test_other_trainings_stand_beside_the_run_whose_warm_start_they_share(runs, tmp_path, monkeypatch):
    a_run(tmp_path / "shuffled", {"trained": {"a:1": 0.0, "a:2": 0.0}, "ranker": {"a:1": 0.5, "a:2": 0.5}})
    out = tmp_path / "learning"
    arguments = ["measure_learning", str(runs[0]), "--out", str(out), "--beside", f"placebo={tmp_path / 'shuffled'}"]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    found = json.loads(out.with_suffix(".json").read_text())["beside"]
    shown = {row["policy"]: row["recall_at_8"] for row in found["rows"]}
    assert shown == {"trained": 0.5, "placebo": 0.0, "ranker": 0.5}  # one order, and so one ranker's row
    (recall,) = [c for c in found["comparisons"] if c["metric"] == "recall_at_8"]
    assert (recall["a"], recall["b"], recall["difference"]) == ("trained", "placebo", 0.5)
    assert [(run["name"], run["validation"]) for run in found["runs"]] == [("trained", 0.1), ("placebo", 0.1)]
    assert "| recall_at_8 | trained − placebo | +0.500 |" in out.with_suffix(".md").read_text()


def test_another_order_stands_beside_the_runs_fold_by_fold(runs, tmp_path, monkeypatch):
    same, other = {"a:1": 0.5, "a:2": 0.5}, {"a:1": 0.5, "a:2": 0.0}
    a_run(tmp_path / "base", {"ranker": other, "expand_top=4": same})
    a_run(tmp_path / "base_b", {"ranker": {"b:1": 0.25}, "expand_top=4": {"b:1": 0.5}})
    for run, order in ((runs[0], same), (runs[2], {"b:1": 0.5})):
        rows = pd.read_csv(run / "measures_test.csv")
        more = rows[rows["policy"] == "ranker"].assign(policy="expand_top=4")
        pd.concat([rows, more]).to_csv(run / "measures_test.csv", index=False)
        assert len(more) == 6 * len(order)
    out = tmp_path / "learning"
    base = f"base={tmp_path / 'base'},{tmp_path / 'base_b'}"
    monkeypatch.setattr(
        sys, "argv", ["measure_learning", str(runs[0]), str(runs[2]), "--out", str(out), "--beside", base]
    )
    main()
    found = json.loads(out.with_suffix(".json").read_text())["beside"]
    shown = {row["policy"]: row["recall_at_8"] for row in found["rows"]}
    # The first four of both are the same; the ranker's differ by (0 + .5) / 2 on a, .25 on b.
    assert shown == {"trained": pytest.approx(2 / 3), "ranker": 0.5, "expand_top=4": 0.5, "base ranker": 0.25}
    (recall,) = [pair for pair in found["comparisons"] if pair["metric"] == "recall_at_8"]
    assert (recall["a"], recall["b"], recall["by_conversation"]) == ("ranker", "base ranker", {"a": 0.25, "b": 0.25})
    wide = pd.read_csv(tmp_path / "learning_questions.csv.gz", index_col=["conversation", "question"])
    assert wide["base ranker recall_at_8"].dropna().to_dict() == {
        ("a", "a:1"): 0.5,
        ("a", "a:2"): 0.0,
        ("b", "b:1"): 0.25,
    }
    assert wide.loc[("a", "a:unasked"), "trained recall_at_8"] == 0.0


def test_all_questions_are_for_policies_without_a_model(tmp_path):
    questions = {"a:1": 1.0, "a:2": 0.0, "a:unasked": 1.0}
    run = a_run(tmp_path / "one", {"trained": {"a:1": 1.0, "a:2": 1.0}, "expand_top=4": questions,
                                   "top_k=8": dict.fromkeys(questions, 0.0)})  # fmt: skip
    found = everyone([read_run(run, "test")])
    assert [(row["policy"], row["n"]) for row in found["rows"]] == [("expand_top=4", 3), ("top_k=8", 3)]
    assert found["comparisons"][0]["difference"] == pytest.approx(2 / 3)


def test_a_run_that_was_not_evaluated_is_named(tmp_path, runs):
    with pytest.raises(DataError, match=r"none/evaluation.json is missing; run `cuewalk evaluate`"):
        read_run(tmp_path / "none", "test")
    with pytest.raises(DataError, match="evaluation_val.json is missing"):
        read_run(runs[0], "val")
