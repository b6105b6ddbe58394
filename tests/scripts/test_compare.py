import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cuewalk.env import DataError, Gold, Question, Tasks
from cuewalk.rl.config import Config, ConfigError, parse_config
from cuewalk.rl.ranker import FEATURES, Ranker
from cuewalk.scripts import compare as module
from cuewalk.scripts import systems as systems_module
from cuewalk.scripts.cli import main
from cuewalk.scripts.compare import chosen_systems, compare, efficient, holm, p_value, prepare, replay
from cuewalk.scripts.compare_report import markdown, write_comparison
from cuewalk.scripts.evaluate import first_by_digest
from cuewalk.scripts.systems import list_systems, parse_options
from cuewalk.scripts.viewer import read_walks
from tests.conftest import MESSAGES, WordEncoder
from tests.memory.test_extract import serving

SOME = ("full_context", "random", "flat_facts", "top_k=8", "stop", "oracle")


def toy(id_, split):
    """The toy conversation with three questions, the last without evidence."""
    said = [{"id": m.id, "speaker": m.speaker, "time": m.time.isoformat(), "text": m.text} for m in MESSAGES]
    asked = [
        {
            "id": "1",
            "text": "When did the dog come back?",
            "answer": "Tuesday",
            "evidence": ["m1", "m2"],
            "category": 1,
        },
        {"id": "2", "text": "Where is the piano?", "answer": "in the garden", "evidence": ["m3"], "category": 4},
        {"id": "3", "text": "Who?", "answer": "Zoe", "evidence": []},
    ]
    return {"id": id_, "split": split, "messages": said, "questions": asked}


@pytest.fixture
def config(tmp_path, tiny_model, monkeypatch) -> Config:
    for place in (module, systems_module):
        monkeypatch.setattr(place, "SentenceEncoder", lambda name: WordEncoder())
    monkeypatch.setenv("CUEWALK_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "own.json"
    data.write_text(json.dumps({"conversations": [toy("a", "test"), toy("b", "test"), toy("c", "val")]}))
    tree = {
        "model": str(tiny_model),
        "encoder": "words",
        "run_dir": str(tmp_path / "run"),
        "memory_dir": str(tmp_path / "memory"),
        "data": {"source": "json", "path": str(data)},
        "memory": {"segment_messages": 2, "nearest": 1, "update_threshold": 1.01, "groups": None},
        "env": {"k": 1, "budget": 2, "frontier_cap": 4, "new_lines": 1, "order": "ranker"},
        "compare": {"systems": list(SOME)},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(tree))
    return parse_config(tree)


def rows_of(result, policy):
    return next(row for row in result["rows"] if row["policy"] == policy)


def written(out) -> dict[str, Path]:
    return {path.name.rpartition("-")[0]: path for path in out.with_name(f"{out.name}.rows").glob("*.json")}


def test_the_result_has_the_one_form_and_exact_values(config, tmp_path):
    result = compare(config, tmp_path / "toy")
    assert {"name", "command", "commit", "seeds", "versions", "data", "rows", "comparisons"} <= result.keys()
    assert result["data"] == {"dataset": "json", "split": "test", "n": 4, "n_part": 4, "n_clean": 4, "n_silver": 0,
                              "n_unanswerable": 0}  # fmt: skip
    assert [row["policy"] for row in result["rows"]] == list(SOME)
    whole = rows_of(result, "full_context")
    assert (whole["evidence_recall"], whole["entries"], whole["blocks"], whole["failed"]) == (1.0, 6.0, 4.0, 0)
    # k = 1 finds m1 of m1 and m2; and m3 for the second question.
    stop = rows_of(result, "stop")
    assert (stop["evidence_recall"], stop["entries"], stop["steps"], stop["reward"]) == (0.75, 1.0, 1.0, 0.0)
    best = rows_of(result, "oracle")
    assert (best["evidence_recall"], best["entries"]) == (1.0, 1.5)  # one more for the first question
    # Nothing was built by a model, and a reader would be shown the context of four questions.
    assert (whole["construction_tokens"], whole["total_tokens"]) == (0, pytest.approx(4 * whole["context_tokens"]))
    assert whole["seconds_p50"] <= whole["seconds_p95"] and whole["recall_at_8_c1"] == whole["recall_at_8_c4"] == 1.0
    pairs = {(c["a"], c["b"]) for c in result["comparisons"]}
    assert pairs == {(name, "top_k=8") for name in SOME if name != "top_k=8"}  # there is no trained policy
    text = markdown(result)
    assert "`flat_facts`: Flat facts: entries by dense search alone" in text and "Published, not remade" in text


def test_a_stopped_comparison_goes_on_with_what_is_missing(config, tmp_path):
    out = tmp_path / "toy"
    first = compare(config, out)
    files = written(out)
    assert set(files) == {"full_context", "random", "flat_facts", "top_k=8", "stop", "oracle"}
    before = {name: (path.stat().st_mtime_ns, path.read_bytes()) for name, path in files.items()}
    files["flat_facts"].unlink()
    again = compare(config, out)
    after = {name: (path.stat().st_mtime_ns, path.read_bytes()) for name, path in written(out).items()}
    assert {name for name in before if after[name] != before[name]} == {"flat_facts"}
    bare = lambda row: {k: v for k, v in row.items() if not k.startswith("seconds")}  # noqa: E731
    assert [bare(row) for row in again["rows"]] == [bare(row) for row in first["rows"]]


def test_a_question_that_failed_is_asked_again_alone(config, tmp_path):
    out = tmp_path / "toy"
    compare(config, out)
    path = written(out)["stop"]
    tree = json.loads(path.read_text())
    kept = {row["question"]: row for row in tree["rows"]}
    tree["rows"][1] = {"question": "a:2", "error": "the server was gone"}
    path.write_text(json.dumps(tree))
    compare(config, out)
    new = {row["question"]: row for row in json.loads(path.read_text())["rows"]}
    assert new.keys() == kept.keys() and {id_ for id_ in new if new[id_] != kept[id_]} <= {"a:2"}
    assert "error" not in new["a:2"] and new["a:2"]["evidence_recall"] == kept["a:2"]["evidence_recall"]


def test_what_decides_a_row_is_in_its_files_name(config, tmp_path):
    def names(config):
        contest = prepare(config, tmp_path / "toy")
        return {system.name: contest.path(system).name for system in chosen_systems(contest)}

    first = names(config)
    assert names(replace(config, memory_dir="elsewhere", seed=3)) == first
    other = names(replace(config, env=replace(config.env, budget=1)))
    assert {name for name in first if other[name] != first[name]} == {"stop", "oracle"}
    changed = names(replace(config, memory=replace(config.memory, nearest=2)))
    assert not set(changed.values()) & set(first.values())


def test_a_damaged_file_is_named(config, tmp_path):
    out = tmp_path / "toy"
    compare(config, out)
    written(out)["random"].write_text("{")
    with pytest.raises(DataError, match=r"random-.*delete it"):
        compare(config, out)


def test_no_system_sees_gold_but_the_oracle(config, tmp_path):
    class Forbidden(dict):
        def __getitem__(self, key):
            raise AssertionError("a system looked at the gold")

    contest = prepare(config, tmp_path / "toy")
    kit = replace(contest.kit, gold=Forbidden(contest.kit.gold))
    assert isinstance(next(iter(contest.kit.gold.values())), Gold)
    graphs = module.load_graphs(config, contest.tasks.conversations, WordEncoder())
    question = contest.questions[0]
    for system in list_systems(kit).values():
        retrieve, graph = system.load(), graphs[question.conversation_id]
        if system.name == "oracle":
            with pytest.raises(AssertionError, match="looked at the gold"):
                retrieve(graph, question)
        else:
            assert retrieve(graph, question).blocks


def test_rows_and_results_hold_no_text_of_the_data(config, tmp_path):
    out = tmp_path / "toy"
    result = compare(config, out)
    kept = json.dumps(result) + "".join(path.read_text() for path in written(out).values())
    assert not [m.text for m in MESSAGES if m.text in kept] and "Tuesday" not in kept and "come back" not in kept


def test_a_server_that_is_down_costs_one_row_and_is_asked_again(config, tmp_path):
    out = tmp_path / "toy"
    up = [False]

    def reply(prompt, messages):
        return json.dumps({"action": "STOP"}) if up[0] else 400

    with serving(reply) as (url, asked):
        tree = {"systems": ["top_k=8", "prompted"], "endpoint": {"base_url": url, "model": "m", "timeout": 5}}
        config = replace(config, compare=tree)
        result = compare(config, out)
        assert [row["policy"] for row in result["rows"]] == ["top_k=8"] and len(asked) == module.GIVE_UP
        up[0] = True
        result = compare(config, out)
        # Both conversations say the same: the second's replies come from the cache, and count alike.
        assert rows_of(result, "prompted")["n"] == 4 and len(asked) == module.GIVE_UP + 2
        kept = {row["question"]: row for row in json.loads(written(out)["prompted"].read_text())["rows"]}
        assert kept["a:1"]["inference_tokens"] == kept["b:1"]["inference_tokens"] > 100
        compare(config, out)
        assert len(asked) == module.GIVE_UP + 2


def test_a_reader_answers_and_a_strict_judge_grades(config, tmp_path, tiny_model):
    with serving(lambda prompt, messages: json.dumps({"reason": "no", "correct": False})) as (url, asked):
        tree = {
            "systems": ["stop"],
            "reader": str(tiny_model),
            "judge": True,
            "endpoint": {"base_url": url, "model": "m"},
        }
        result = compare(replace(config, compare=tree), tmp_path / "toy")
    row = rows_of(result, "stop")
    assert 0 <= row["answer_f1"] <= 1 and row["reader_tokens"] > row["context_tokens"] and row["judge"] == 0.0
    assert "answer F1" in markdown(result) and len(asked) <= 4


def test_what_nothing_answers_is_measured_by_whether_the_reader_abstains(config, tmp_path, tiny_model, monkeypatch):
    tree = {"systems": ["stop", "top_k=8"], "reader": str(tiny_model), "unanswerable": 2}
    config = replace(config, compare=tree)
    with pytest.raises(DataError, match="json has no unanswerable questions"):
        compare(config, tmp_path / "toy")
    load, traps = module.load_part, [Question(f"a:trap{i}", "a", f"Who sang {i}?") for i in range(3)]

    def with_traps(data, part, unanswerable=False):
        known = load(data, part)
        apart = Tasks(known.conversations, tuple(traps), {q.id: Gold("", (), 5) for q in traps})
        return apart if unanswerable else known

    def said(contest, question, found):  # of the traps the first says nothing is known, and search is too long to read
        if len(found.blocks) > 1:
            return None
        return "I think that is Not Mentioned." if question.id in ("a:trap0", "a:1") else "Tuesday"

    monkeypatch.setattr(module, "load_part", with_traps)
    monkeypatch.setattr(module.Contest, "ask", said)
    asked = {question.id for question in first_by_digest(traps, 2)}
    assert asked == {"a:trap0", "a:trap2"}
    result = compare(config, tmp_path / "toy")
    stop, search = rows_of(result, "stop"), rows_of(result, "top_k=8")
    assert (stop["n"], stop["failed"], result["data"]["n_unanswerable"]) == (4, 0, 2)
    assert stop["abstained"] == 0.5 and stop["abstained_wrongly"] == 0.25
    assert search["abstained"] is search["abstained_wrongly"] is search["answer_f1"] is None
    kept = json.loads(written(tmp_path / "toy")["stop"].read_text())["rows"]
    assert {row["question"] for row in kept} == asked | {"a:1", "a:2", "b:1", "b:2"}
    assert "| abstained | wrongly |" in (text := markdown(result)) and "abstained: share of 2 further questions" in text


def test_walks_are_replayed_from_what_was_kept(config, tmp_path):
    out = tmp_path / "toy"
    result = compare(config, out)
    walks = replay(config, out, questions=1)
    assert [(walk.system, walk.question.id) for walk in walks] == [("stop", "a:1"), ("oracle", "a:1")]
    assert walks[0].trajectory.steps[0].text == "STOP" and walks[0].verdict.reward == 0.0
    kept = {row["question"]: row for row in json.loads(written(out)["oracle"].read_text())["rows"]}
    assert walks[1].verdict.reward == kept["a:1"]["reward"]
    assert len(walks[1].trajectory.working) == kept["a:1"]["entries"]
    assert rows_of(result, "oracle")["n"] == 4


def test_what_was_trained_joins_and_is_a_rival(config, tmp_path, tiny_model):
    from peft import LoraConfig, get_peft_model

    from cuewalk.memory.models import load_language_model

    run = tmp_path / "run"
    model = get_peft_model(load_language_model(str(tiny_model), "float32"), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(run / "trained")
    kinds = ("segment", "adjacent", "anchor", "similar")
    Ranker(kinds, tuple(float(name == "cosine") for name in (*FEATURES, *kinds)), 0.0).save(run / "ranker.json")
    assert systems_module.walking_rules(config)[0].order == "ranker"
    some = {"systems": ["top_k=8", "ranker", "trained", "stop"], "questions": 2}
    result = compare(replace(config, dtype="float32", compare=some), tmp_path / "toy")
    assert [row["policy"] for row in result["rows"]] == ["top_k=8", "stop", "ranker", "trained"]
    assert rows_of(result, "trained")["inference_tokens"] > 100 > rows_of(result, "ranker")["inference_tokens"] == 0
    pairs = {(c["a"], c["b"]) for c in result["comparisons"] if c["metric"] == "recall_at_8"}
    assert pairs == {(a, "top_k=8") for a in ("ranker", "trained", "stop")} | {
        (a, "trained") for a in ("ranker", "stop")
    }
    walks = replay(replace(config, dtype="float32", compare=some), tmp_path / "toy", questions=1)
    assert [walk.system for walk in walks] == ["stop", "ranker", "trained"]


def test_the_page_holds_every_walk_and_stays_in_the_run_directory_where_texts_are_not_ours(config, tmp_path):
    result, paths = write_comparison(config, tmp_path / "out" / "toy")
    assert paths[-1] == tmp_path / "run" / "toy.html"
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', paths[-1].read_text(), flags=re.S)
    data = json.loads(found.group(1))
    assert data["result"]["rows"] == json.loads(json.dumps(result["rows"]))
    assert sorted((walk["policy"], walk["question"]["id"]) for walk in data["walks"]) == [
        (policy, f"{conversation}:{number}")
        for policy in ("oracle", "stop") for conversation in "ab" for number in (1, 2)
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "toy.json", "toy.md", "toy.rows", "toy_frontier.png",
    ]  # fmt: skip


def test_results_are_put_into_one_with_their_walks(config, tmp_path, capsys):
    out = tmp_path / "docs"
    for name in ("toy", "again"):
        write_comparison(replace(config, run_dir=str(out)), out / name)  # so that the pages lie beside the results
    assert main(["compare", "--join", str(out / "toy"), str(out / "again"), "--out", str(out / "all")]) == 0
    assert str(out / "all.html") in capsys.readouterr().out
    result = json.loads((out / "all.json").read_text())
    assert [(row["policy"], row["dataset"], row["split"]) for row in result["rows"]] == [
        (name, "json", "test") for name in [*SOME] * 2
    ]
    assert result["data"]["n"] == 8 and [part["name"] for part in result["made"]] == ["toy", "again"]
    assert len(read_walks(out / "all.html")) == 16 and read_walks(out / "toy.html") == read_walks(out / "all.html")[:8]
    assert "[toy.md](toy.md)" in (out / "all.md").read_text()
    assert main(["compare", "--join", str(out / "none"), "--out", str(out / "all")]) == 2
    assert "there is no result" in capsys.readouterr().err


def test_p_values_are_corrected_by_holm():
    # Sorted .01 .03 .04: times 3, 2, 1, never falling.
    assert holm([0.01, 0.04, None, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), None, pytest.approx(0.06)]
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == [] and holm([None]) == [None]


def test_p_values_are_those_of_a_t_test():
    # t = 2 / (1/√3) = 3.4641 with 2 degrees of freedom: p = 1 - t/√(2 + t²) = 1 - 3.4641/3.7417.
    assert p_value([1.0, 2.0, 3.0]) == pytest.approx(0.074180, abs=1e-6)
    assert (p_value([0.5]), p_value([0.0, 0.0]), p_value([0.1, 0.1])) == (None, 1.0, 0.0)


def test_every_comparison_of_a_metric_is_one_family(config, tmp_path):
    own = [c for c in compare(config, tmp_path / "toy")["comparisons"] if c["metric"] == "recall_at_300t"]
    assert len(own) == 5
    for name in ("p", "p_questions"):
        assert [c[f"{name}_holm"] for c in own] == holm([c[name] for c in own])
    assert all(set(c["by_conversation"]) == {"a", "b"} for c in own)


def test_the_frontier_is_what_nothing_beats_in_both():
    rows = [
        {"policy": name, "context_tokens": tokens, "evidence_recall": recall}
        for name, tokens, recall in (("d", 40, 0.9), ("a", 10, 0.5), ("c", 30, 0.5), ("b", 20, 0.8), ("oracle", 5, 1.0))
    ]
    assert efficient(rows) == ["a", "b", "d"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sytems": []}, "did you mean 'systems'"),
        ({"endpoint": {"modell": "x"}}, "did you mean 'model'"),
        ({"questions": 0}, "compare.questions"),
        ({"judge": True}, "compare.judge needs compare.reader"),
        ({"unanswerable": 5}, "compare.unanswerable needs compare.reader"),
    ],
)
def test_a_mistake_in_the_section_is_named(section, message):
    with pytest.raises(ConfigError, match=message):
        parse_options(Config(compare=section))


def test_a_system_that_is_not_there_is_an_error(config, tmp_path):
    with pytest.raises(ConfigError, match=r"no stage_1, trained here; there are full_context"):
        compare(replace(config, compare={"systems": ["trained", "stage_1"]}), tmp_path / "toy")


def test_a_sample_of_questions_can_grow(config, tmp_path):
    out = tmp_path / "toy"
    few = compare(replace(config, compare={"systems": ["stop"], "questions": 2}), out)
    kept = {row["question"]: row for row in json.loads(written(out)["stop"].read_text())["rows"]}
    assert rows_of(few, "stop")["n"] == 2 == len(kept) and few["data"]["n_part"] == 4
    assert rows_of(compare(replace(config, compare={"systems": ["stop"]}), out), "stop")["n"] == 4
    grown = {row["question"]: row for row in json.loads(written(out)["stop"].read_text())["rows"]}
    assert len(grown) == 4 and grown.items() >= kept.items()


def test_the_command_writes_its_files_and_teaches(config, tmp_path, capsys):
    out = tmp_path / "docs" / "toy"
    assert main(["compare", "--config", str(tmp_path / "job.yaml"), "--out", str(out), "compare.questions=1"]) == 0
    shown = capsys.readouterr().out
    assert "| oracle | 1 |" in shown and "toy_frontier.png" in shown and "answer F1" not in shown
    assert (out.with_name("toy_frontier.png")).read_bytes()[:4] == b"\x89PNG"
    assert json.loads(out.with_name("toy.json").read_text())["name"] == "toy"
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "cuewalk compare --config configs/demo.yaml --out" in capsys.readouterr().out
