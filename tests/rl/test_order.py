"""What a run's order is fitted on, what its reader learns, and who orders which conversation in training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuewalk.env import DataError, EnvConfig, Gold, Question, Tasks
from cuewalk.memory import BuildConfig, Conversation, build_graph
from cuewalk.memory.models import load_language_model, weights_digest
from cuewalk.rl import order, reading
from cuewalk.rl.config import Config, ConfigError, ReadingConfig
from cuewalk.rl.data import rank_of
from cuewalk.rl.order import ReadTrainer, fit_order, reading_rows, train_reader, training_rank
from cuewalk.rl.ranker import FEATURES, Ranker
from cuewalk.rl.reading import Reading
from cuewalk.rl.train import train
from tests.conftest import MESSAGES

FLAT = Ranker(("segment", "adjacent", "anchor", "similar"), (0.0,) * (len(FEATURES) + 4), 0.0)


@pytest.fixture
def config(tiny_model, tmp_path, monkeypatch) -> Config:
    monkeypatch.setattr(reading, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(reading, "READ", 3)
    monkeypatch.setattr(order, "OTHERS", 2)
    return Config(
        model=str(tiny_model), dtype="float32", run_dir=str(tmp_path / "run"),
        env=EnvConfig(k=1, budget=2, frontier_cap=3, new_lines=1, order="reader"),
        reading=ReadingConfig(epochs=2, learning_rate=1e-2),
    )  # fmt: skip


@pytest.fixture
def world(encoder):
    """Three conversations of the same messages, two questions each: graphs and tasks."""
    rules = BuildConfig(segment_messages=2, nearest=1, update_threshold=1.01, groups=None)
    graphs = {id_: build_graph(Conversation(id_, MESSAGES), encoder, rules) for id_ in ("a", "b", "c")}
    texts = ("When did the dog come back?", "Who has a garden?")
    questions = tuple(Question(f"{id_}:{n}", id_, text) for id_ in graphs for n, text in enumerate(texts))
    gold = {question.id: Gold("", ("m2",) if question.id.endswith("0") else ("m3",), 4) for question in questions}
    return graphs, Tasks({id_: graph.conversation for id_, graph in graphs.items()}, questions, gold)


def test_a_row_is_one_candidate_with_evidence_and_others_without(config, world, chat):
    graphs, tasks = world
    rows = reading_rows(config, tasks, graphs, FLAT)
    assert len(rows) == 2 * 6 and all(len(row) == 3 for row in rows)
    for number, row in enumerate(rows):
        shown = [chat.tokenizer.decode(read["input_ids"]) for read in row]
        asked = tasks.questions[number // 2].text
        assert all(text.endswith(f"\nQuestion: {asked}") for text in shown)
        held = "He came back on Tuesday" if "dog" in asked else "My garden has a piano"
        assert [held in text for text in shown] == [True, False, False] and shown[1] != shown[2]
        for read in row:
            said = [read["input_ids"][place] for place in read["positions"]]
            assert chat.tokenizer.decode(said) == f" {asked}" and read["targets"] == [[id_] for id_ in said]
    assert rows == reading_rows(config, tasks, graphs, FLAT)
    assert rows != reading_rows(replace(config, seed=1), tasks, graphs, FLAT)
    nothing = Tasks(tasks.conversations, tasks.questions, {q.id: Gold("", ("m9",), 4) for q in tasks.questions})
    assert reading_rows(config, nothing, graphs, FLAT) == []
    with pytest.raises(DataError, match=r"reading.epochs = 2, but no training question .* take env.order = ranker"):
        train_reader(config, None, [])


def test_a_reader_is_trained_on_the_likelihoods_that_it_is_asked_for(config, world, tmp_path, monkeypatch):
    """By the served reader, text by text: the loss is -log softmax of a quarter of log P(question | candidate)."""
    graphs, tasks = world
    rows = reading_rows(config, tasks, graphs, FLAT)[:2]
    reader = reading.LocalReader.from_pretrained(config.model, config.dtype)
    said = []
    for row in rows:
        for read in row:
            shown = reader.tokenizer.decode(read["input_ids"]).partition("\nQuestion:")
            said.append(reader.log_likelihood(reader.read(""), "".join(shown[:2]), shown[2]))
    expected = -(0.25 * torch.tensor(said).view(2, 3)).log_softmax(1)[:, 0].mean()
    losses, original = [], ReadTrainer.compute_loss

    class Noting(ReadTrainer):
        def compute_loss(self, *arguments, **rest):
            losses.append(loss := original(self, *arguments, **rest))
            return loss

    monkeypatch.setattr(order, "ReadTrainer", Noting)
    train_reader(config, tmp_path / "part", rows)
    assert losses[0].item() == pytest.approx(expected.item(), abs=1e-4)


def test_training_sees_the_order_of_those_who_did_not_see_its_conversations(config, world, monkeypatch):
    graphs, tasks = world
    run, seen = Path(config.run_dir), {}
    original = order.train_reader

    def noted(config, folder, rows):
        seen[folder.name] = len(rows)
        original(config, folder, rows)

    monkeypatch.setattr(order, "train_reader", noted)
    run.mkdir()
    fit_order(config, run, tasks, graphs)
    assert seen == {"0": 2 * 2, "1": 2 * 4, "run": 2 * 6}  # a and c are hidden from the first, b from the second
    rank, served = training_rank(config, run, tasks), rank_of(config, run)
    without_a_c, without_b = (rank_of(config, run / "blind" / part) for part in "01")
    assert len({own.digest for own in (without_a_c, without_b, served)}) == 3
    assert without_b.ranker.reading == without_a_c.ranker.reading == served.ranker.reading != None  # noqa: E711
    for id_, own in (("a", without_a_c), ("b", without_b), ("c", without_a_c)):
        links = graphs[id_].frontier("dog", ["e0"], {"e0"}, config.env.links, 5)
        told = [of(graphs[id_], "dog", ["e0"], links).tolist() for of in (rank, own, without_a_c, without_b)]
        assert told[0] == told[1] and told[2] != told[3]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    fit_order(config, run, tasks, graphs)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_the_readers_loss_falls_and_its_base_stays(config, world, tmp_path):
    graphs, tasks = world
    config = replace(config, reading=ReadingConfig(epochs=30, learning_rate=1e-2))
    train_reader(config, tmp_path / "part", reading_rows(config, tasks, graphs, FLAT))
    lines = [json.loads(line) for line in (tmp_path / "part" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert {line["stage"] for line in lines} == {"reading"}
    assert sum(losses[-5:]) / 5 < 0.5 < sum(losses[:5]) / 5
    replace(FLAT, reading=(0.0, 1.0, 0.0)).save(tmp_path / "part" / "ranker.json")
    rank = rank_of(config, tmp_path / "part")
    assert isinstance(rank, Reading)
    base = load_language_model(config.model, config.dtype)
    assert weights_digest(rank.reader.model) == weights_digest(base)
    assert weights_digest(rank.reader.model, adapters=True) == rank.digest != weights_digest(base)
    links = graphs["a"].frontier("Who has a garden?", ["e0"], {"e0"}, config.env.links, 5)
    chances = rank(graphs["a"], "Who has a garden?", ["e0"], links)
    told = {link.entry: chance for link, chance in zip(links, chances, strict=True)}
    assert max([link.entry for link in links][:3], key=told.get) == "e2"


def test_one_conversation_alone_is_ordered_by_what_was_fitted_on_it(config, world, tmp_path):
    graphs, tasks = world
    alone = order.select(tasks, ids=["a:0", "a:1"])
    alone = Tasks({"a": tasks.conversations["a"]}, alone.questions, alone.gold)
    (tmp_path / "run").mkdir()
    fit_order(config, tmp_path / "run", alone, graphs)
    assert not (tmp_path / "run" / "blind").exists() and isinstance(
        training_rank(config, tmp_path / "run", alone), Reading
    )


def test_reading_epochs_without_a_reader_are_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="reading.epochs needs env.order = reader; it is ranker"):
        train(replace(config, env=replace(config.env, order="ranker")))
    assert not (tmp_path / "run").exists()
