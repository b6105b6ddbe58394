"""Training on a tiny random model: what moves, what does not, what is masked, what resumes."""

import inspect
import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GraniteConfig, GraniteForCausalLM
from trl import GRPOTrainer

from cuewalk.env import EnvConfig, Expand, Gold, Question, RetrievalEnv, Stop, Tasks
from cuewalk.judges import JudgeConfig, JudgeError, TrajectoryJudge, Verdict
from cuewalk.memory import BuildConfig, Conversation, Message, build_graph
from cuewalk.rl import Config
from cuewalk.rl.adapters import new_adapter
from cuewalk.rl.config import SamplingConfig, WarmStartConfig
from cuewalk.rl.data import Memories
from cuewalk.rl.grpo import Group, Rollouts, WalkTrainer, summarise, train_grpo
from cuewalk.rl.oracle import oracle_action
from cuewalk.rl.rollout import Row
from cuewalk.rl.run import last_step
from cuewalk.rl.warm_start import _filled, _targets, collate, teach_rows, teach_scores, warm_start
from cuewalk.scripts.baselines import run_scripted, searching_oracle
from cuewalk.scripts.evaluate import Bench
from tests.conftest import at

RULES = EnvConfig(k=1, budget=3, frontier_cap=4, new_lines=1)


@pytest.fixture
def config(tiny_model, tmp_path) -> Config:
    return Config(
        model=str(tiny_model),
        dtype="float32",
        run_dir=str(tmp_path / "run"),
        env=RULES,
        warm_start=WarmStartConfig(rows=8, k=(1, 2), stop_share=0.5),
        sampling=SamplingConfig(max_action_tokens=8, replacements=0),
        grpo={"num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 2,
              "learning_rate": 1e-2, "warmup_steps": 0, "disable_tqdm": True},
        sft={"per_device_train_batch_size": 4, "warmup_steps": 0, "learning_rate": 1e-2, "disable_tqdm": True},
    )  # fmt: skip


@pytest.fixture
def tasks(conversation) -> Tasks:
    texts = [
        "When did the dog come back?",
        "Who has a garden?",
        "What about the trip?",
        "Where is the piano?",
    ]
    gold = [
        Gold("Tuesday", ("m2",), 4),
        Gold("Ann", ("m3", "m6"), 1),
        Gold("noon", ("m4",), 2),
        Gold("x", ("m1",), 4),
    ]
    questions = tuple(Question(f"toy:{i}", "toy", text) for i, text in enumerate(texts))
    return Tasks({"toy": conversation}, questions, {q.id: g for q, g in zip(questions, gold, strict=True)})


class ByLetters:
    """A judge for a model that can't act: it pays by the letters written, so that groups are live."""

    def score(self, trajectory, graph, gold) -> Verdict:
        reward = sum(map(ord, trajectory.steps[0].text)) % 17 / 17
        return Verdict(reward, {"letters": reward}, "")


def rollouts(config, tasks, graph, chat, judge=None) -> Rollouts:
    return Rollouts(config, tasks, Memories({"toy": graph}, config.env), chat, judge or ByLetters())


def run_grpo(config, tasks, graph, chat, path, judge=None):
    """Train as `train` does, from the same fresh adapter each time."""
    path.mkdir(exist_ok=True)
    model = new_adapter(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    source = rollouts(config, tasks, graph, chat, judge)
    train_grpo(config, path, model, source)
    return before, dict(model.named_parameters()), source


def test_steps_move_the_adapter_and_no_base_weight(config, tasks, graph, chat, tmp_path):
    config = replace(config, grpo=config.grpo | {"max_steps": 1})
    before, after, source = run_grpo(config, tasks, graph, chat, tmp_path / "run")
    assert source.log["groups/live"] > 0
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("lora_" in name for name in moved)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["stage"] == "grpo" and lines[0]["groups/all"] == 2
    assert {"reward/letters", "ended/malformed", "actions/stop", "bad/unparsable", "entropy",
            "groups/dead_one_trajectory", "groups/distinct_trajectories"} <= set(lines[0])  # fmt: skip


def test_a_model_that_cannot_share_prompts_is_warmed_up_and_trained_all_the_same(config, tasks, graph, chat, tmp_path):
    sizes = AutoConfig.from_pretrained(config.model).to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "bos_token_id", "eos_token_id", "initializer_range")  # fmt: skip
    torch.manual_seed(0)
    GraniteForCausalLM(GraniteConfig(**{key: sizes[key] for key in kept}, logits_scaling=3.0)).save_pretrained(
        path := tmp_path / "granite"
    )
    config = replace(
        config, model=str(path), warm_start=WarmStartConfig(rows=2, k=(1,)), grpo=config.grpo | {"max_steps": 1}
    )
    rows = teach_rows(config, tasks, Memories({"toy": graph}, config.env), chat)
    (tmp_path / "run").mkdir()
    model = new_adapter(config)
    with pytest.warns(UserWarning, match="granite models can't share a prompt's forward pass"):
        warm_start(config, tmp_path / "run", model, chat, rows)
    expected = teach_scores(model.eval(), batch := collate(rows), plain=True)
    scores = model(torch.tensor([rows[0]["input_ids"]])).logits[0].log_softmax(-1)
    at = rows[0]["positions"][0]
    assert expected[0].item() == pytest.approx(scores[at - 1, rows[0]["targets"][0]].logsumexp(0).item(), abs=1e-4)
    assert teach_scores(model, batch)[0].item() != pytest.approx(expected[0].item(), abs=1e-2)
    with pytest.warns(UserWarning, match="granite"):
        before, after, source = run_grpo(config, tasks, graph, chat, tmp_path / "run")
    assert source.log["groups/live"] > 0 and any(not torch.equal(before[name], after[name]) for name in before)


def test_two_steps_and_two_resumed_are_four(config, tasks, graph, chat, tmp_path):
    _, straight, _ = run_grpo(config, tasks, graph, chat, tmp_path / "straight")
    half = replace(config, grpo=config.grpo | {"max_steps": 2})
    _, halfway, _ = run_grpo(half, tasks, graph, chat, tmp_path / "halves")
    _, resumed, _ = run_grpo(config, tasks, graph, chat, tmp_path / "halves")
    lora = [name for name in straight if "lora_" in name]
    assert any(not torch.equal(halfway[name], straight[name]) for name in lora)
    for name in lora:
        assert torch.equal(resumed[name], straight[name]), name


def test_a_checkpoint_written_by_half_counts_neither_to_resume_nor_as_done(tmp_path):
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step < 10:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert last_step(tmp_path) == 4
    assert last_step(tmp_path / "nothing") == 0


def test_a_step_without_a_live_group_changes_nothing_and_is_counted(config, tasks, graph, chat, tmp_path):
    config = replace(config, grpo=config.grpo | {"max_steps": 1})
    judge = TrajectoryJudge(JudgeConfig(bad_penalty=0.0, price=0.0, budget_penalty=0.0, redundancy_weight=0.0))
    before, after, source = run_grpo(config, tasks, graph, chat, tmp_path / "run", judge)
    assert source.log["groups/live"] == 0
    assert sum(value for name, value in source.log.items() if "groups/dead_" in name) == 2
    assert all(torch.equal(before[name], after[name]) for name in before)


class FakeTrainer:
    """What `Rollouts` reads of TRL's trainer."""

    def __init__(self, model, size):
        self.model = model
        self.num_generations = size
        self.state = type("State", (), {"global_step": 0})()
        told = {"process_index": 0, "num_processes": 2, "unwrap_model": staticmethod(lambda m: m)}
        self.accelerator = type("A", (), told)()


class Stopping:
    """A sampler whose rows all stop at once."""

    tokens, margins = 0, ()

    def __init__(self, chat):
        self.said = chat.action("STOP")

    def begin(self, prompts, copies):
        self.rows = len(prompts) * copies

    def act(self, allowed=None):
        return [self.said] * self.rows, [[0.0] * len(self.said)] * self.rows

    def observe(self, rows, observations):
        pass


def prompts_for(questions, size):
    return [[{"role": "user", "content": q.text, "question_id": q.id}] for q in questions for _ in range(size)]


def test_rollouts_give_trl_rows_in_order_with_observations_masked(config, tasks, graph, chat):
    source = rollouts(config, tasks, graph, chat)
    out = source(prompts_for(tasks.questions[:2], 3), FakeTrainer(new_adapter(config), 3))
    assert [len(out[key]) for key in out] == [6] * 5
    for ids, mask, logps in zip(out["completion_ids"], out["env_mask"], out["logprobs"], strict=True):
        assert len(ids) == len(mask) == len(logps)
    first, second = (chat.tokenizer.decode(out["prompt_ids"][row]) for row in (0, 3))
    assert tasks.questions[0].text in first and tasks.questions[1].text in second
    assert out["prompt_ids"][0] == out["prompt_ids"][2]


def test_a_training_walk_draws_its_budget_and_a_group_shares_it(config, tasks, graph, chat, tmp_path):
    config = replace(config, budgets=(1, 3))
    source, sampler = rollouts(config, tasks, graph, chat), Stopping(chat)
    taken = []
    for source.step in range(6):
        groups = source.collect(tasks.questions, 2, sampler)
        taken += [{row.env.config.budget for row in group.rows} for group in groups]
    assert all(len(budgets) == 1 for budgets in taken) and set.union(*taken) == {1, 3}
    rows = teach_rows(config, tasks, Memories({"toy": graph}, config.env), chat)
    shown = [re.search(r"Budget (\d)\.", chat.read(row["input_ids"]))[1] for row in rows]
    assert set(shown) == {"1", "3"}
    assert config.env.budget == RULES.budget  # what evaluation and export have
    assert replace(config, budgets=()).training_rules(5) == config.env
    many = replace(config, prices=(0.01, 0.02, 0.03))
    assert {(many.training_rules(n).budget, many.training_rules(n).price) for n in range(42)} == {
        (budget, price) for budget in (1, 3) for price in (0.01, 0.02, 0.03)
    }


def test_dead_groups_are_replaced_and_what_stays_dead_is_masked(config, tasks, graph, chat):
    asked = []

    class DeadUntilPiano:
        def score(self, trajectory, graph, gold):
            asked.append(trajectory.question.id)
            reward = float(len(asked)) if trajectory.question.id == "toy:3" else 0.5
            return Verdict(reward, {}, "")

    config = replace(config, sampling=replace(config.sampling, replacements=2))
    source = rollouts(config, tasks, graph, chat, DeadUntilPiano())
    out = source(prompts_for(tasks.questions[:1], 2), FakeTrainer(new_adapter(config), 2))
    assert source.log["groups/replaced"] in (2, 4)
    live = asked[-1] == "toy:3"
    assert source.log["groups/live"] == 2 * float(live)  # TRL logs the mean over two processes
    assert any(any(mask) for mask in out["env_mask"]) == live
    assert len(set(asked[::2])) == len(asked) // 2  # never the same question again


def test_a_judge_that_fails_is_no_reward_and_counted(config, tasks, graph, chat):
    class Failing:
        def score(self, trajectory, graph, gold):
            raise JudgeError("no verdict")

    source = rollouts(config, tasks, graph, chat, Failing())
    out = source(prompts_for(tasks.questions[:1], 2), FakeTrainer(new_adapter(config), 2))
    assert out["walk_reward"] == [None, None]
    assert source.log["judge/failed"] == 2 * 2


def test_training_and_evaluation_pay_a_walk_alike(config, tasks, graph, chat):
    memories = Memories({"toy": graph}, config.env)
    source = Rollouts(config, tasks, memories, chat, TrajectoryJudge(config.judge))
    bench = Bench(config, tasks, memories, TrajectoryJudge(config.judge), chat)
    paid = []
    for actions in (["STOP"], ["EXPAND A", "STOP"], ["nothing", "STOP"], ["EXPAND A B", "REFINE trip"], ["x", "y"]):
        env = memories.env(tasks.questions[0])
        env.reset(seed=0)
        for action in actions:
            if env.state.ending is None:
                env.step(action)
        trained = source.verdict(Row(env, [], mask=[1])).reward
        rows = bench.measure("walk", tasks.questions[:1], lambda _, env=env: [(env.trajectory(), 0)])
        assert {name: value for _, _, name, value in rows}["reward"] == trained
        paid.append(trained)
    assert paid[0] == 0.0 and len(set(paid)) > 2


def test_the_cause_of_death_is_told(config, tasks, graph, chat):
    source = rollouts(config, tasks, graph, chat)

    def group(question, *walks):
        rows = []
        for actions in walks:
            env = RetrievalEnv(graph, question, RULES)
            env.reset(seed=0)
            for action in actions:
                env.step(action)
            rows.append(Row(env, []))
        return Group(question, rows, [Verdict(0.0, {}, "")] * len(rows))

    dog = tasks.questions[0]
    assert source.cause(group(dog, ["STOP"], ["STOP"])) == "one_trajectory"
    assert source.cause(group(dog, ["x", "y"], ["x", "z"])) == "all_malformed"
    assert source.cause(group(tasks.questions[2], ["STOP"], ["EXPAND A", "STOP"])) == "solved_at_start"
    useless = group(tasks.questions[1], ["EXPAND B", "STOP"], ["STOP"])
    found = {s for row in useless.rows for e in row.trajectory.added for s in graph.entries[e].sources}
    expected = "equal_rewards" if found & {"m3", "m6"} else "nothing_reachable"
    assert source.cause(useless) == expected
    parts = summarise([useless], Counter(["nothing_reachable"]), 1)
    assert parts["ended/stopped"] == 1.0 and parts["actions/expand"] == pytest.approx(1 / 3)
    assert parts["groups/dead_nothing_reachable"] == 1.0 and parts["entries_added"] == 0.5


def test_the_private_method_we_replace_is_trls():
    """Raise the TRL version by hand only: the loss must still call this method with these arguments."""
    theirs = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    assert list(theirs)[:6] == [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
    ]
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    assert loss.count("self._get_per_token_logps_and_entropies(") == 1
    assert 'completion_mask * inputs["tool_mask"]' in loss
    assert "_compute_loss" in vars(WalkTrainer) and "_get_per_token_logps_and_entropies" in vars(WalkTrainer)


def test_a_micro_batch_holds_whole_groups(config, tasks, graph, chat, tmp_path, monkeypatch):
    seen, original = [], WalkTrainer._compute_loss

    def keep(self, model, inputs):
        seen.append(inputs["prompt_ids"].tolist())
        return original(self, model, inputs)

    monkeypatch.setattr(WalkTrainer, "_compute_loss", keep)
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "save_steps": 3}
    run_grpo(replace(config, grpo=config.grpo | changes), tasks, graph, chat, tmp_path / "run")
    assert len(seen) == 6 and all(first == second for first, second in seen)
    assert len({tuple(rows[0]) for rows in seen}) > 2


def test_observation_tokens_have_no_loss_and_ours_is_trls(config, tasks, graph, chat, tmp_path):
    """The same batch through TRL's own scoring of every position: equal loss and gradient."""
    config = replace(config, grpo=config.grpo | {"max_steps": 1, "learning_rate": 0.0})
    seen = {}
    original = WalkTrainer._compute_loss

    def keep(self, model, inputs):
        seen["inputs"], seen["trainer"] = {k: v for k, v in inputs.items()}, self
        return original(self, model, inputs)

    WalkTrainer._compute_loss = keep
    try:
        run_grpo(config, tasks, graph, chat, tmp_path / "run")
    finally:
        WalkTrainer._compute_loss = original
    trainer, inputs = seen["trainer"], seen["inputs"]
    assert int((inputs["completion_mask"] * (1 - inputs["tool_mask"])).sum()) > 0  # there are observations
    results = []
    for method in (WalkTrainer._compute_loss, GRPOTrainer._compute_loss):
        trainer.model.zero_grad()
        if method is GRPOTrainer._compute_loss:
            trainer._get_per_token_logps_and_entropies = lambda *a, **k: GRPOTrainer._get_per_token_logps_and_entropies(
                trainer, *a, **k
            )
        loss = method(trainer, trainer.model, inputs)
        loss.backward()
        results.append(
            (
                loss.item(),
                {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None},
            )
        )
    (ours, our_grads), (theirs, their_grads) = results
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert our_grads.keys() == their_grads.keys()
    for name, grad in our_grads.items():
        assert torch.allclose(grad, their_grads[name], atol=1e-5), name


def test_the_oracle_takes_the_fewest_candidates_that_hold_missing_gold(graph, question):
    env = RetrievalEnv(graph, question, RULES)
    env.reset(seed=0)
    by_entry = {link.entry: label for label, link in env.state.frontier}
    assert oracle_action(env, Gold("", ("m1", "m2"), 4)) == Expand((by_entry["e1"],))
    assert oracle_action(env, Gold("", ("m1",), 4)) == Stop()  # complete at the start
    out_of_reach = ({f"m{i}" for i in range(1, 7)} - {"m1"} - {graph.entries[e].sources[0] for e in by_entry}).pop()
    assert oracle_action(env, Gold("", (out_of_reach,), 4)) == Stop()
    both = Gold("", tuple(graph.entries[e].sources[0] for e in list(by_entry)[:2]), 4)
    assert len(oracle_action(env, both).labels) == 2


def test_the_searching_oracle_goes_through_an_entry_without_gold_if_the_budget_reaches(encoder, question):
    # Search shows only e0 (dog); links lead e0 -> e1 (its segment) -> e2, e3 (the next segment). Gold: m4, in e3.
    said = ("dog", "nothing", "nothing at all", "the trip")
    messages = tuple(Message(f"m{i + 1}", "AB"[i % 2], at(1, i), text) for i, text in enumerate(said))
    rules = BuildConfig(segment_messages=1, update_threshold=1.01, groups=None)
    chain = build_graph(Conversation("toy", messages), encoder, rules)
    gold = Gold("", ("m3",), 4)
    walks = {}
    for budget in (1, 2, 3):
        config = EnvConfig(k=1, budget=budget, frontier_cap=4, new_lines=2, links=("adjacent",))
        env = RetrievalEnv(chain, Question("q", "toy", "dog?"), config)
        walks[budget] = [run_scripted(policy, env, gold).added for policy in (oracle_action, searching_oracle)]
    assert walks == {1: [(), ()], 2: [(), ("e1", "e2")], 3: [(), ("e1", "e2")]}
    env = RetrievalEnv(chain, Question("q", "toy", "dog?"), EnvConfig(k=1, links=("adjacent",)))
    assert run_scripted(searching_oracle, env, Gold("", ("m1",), 4)).added == ()  # complete at the start


def test_any_order_of_the_gold_letters_is_a_target(chat):
    said = chat.action("EXPAND H T")
    letters = [chat.letters["H"], chat.letters["T"]]
    before, end = [[i] for i in said[:-3]], [[chat.end]]
    assert _targets(said, Expand(("H", "T")), 2, chat) == [*before, letters, letters[1:], *end]
    assert _targets(said, Expand(("H", "T")), 1, chat) == [*before, letters[:1], letters[1:], *end]  # T fills up
    stop = chat.action("STOP")
    assert _targets(stop, Stop(), 0, chat) == [[i] for i in stop]


def test_an_expansion_is_filled_up_with_the_first_of_the_list(graph, question):
    env = RetrievalEnv(graph, question, RULES)
    env.reset(seed=0)
    assert _filled(Expand(("B",)), env, 1) == (Expand(("B",)), 1)
    assert _filled(Expand(("B",)), env, 3) == (Expand(("B", "A", "C")), 1)
    assert _filled(Expand(("B",)), env, 4) == (Expand(("B", "A", "C")), 1)  # the budget is 3
    assert _filled(Stop(), env, 3) == (Stop(), 0)


def test_teaching_rows_hold_the_oracles_walks(config, tasks, graph, chat):
    config = replace(config, warm_start=WarmStartConfig(rows=2, k=(1,), stop_share=0.5))
    rows = teach_rows(config, tasks, Memories({"toy": graph}, config.env), chat)
    assert len(rows) == 2
    for row in rows:
        said = [row["input_ids"][p] for p in row["positions"]]
        assert all(id_ in right for id_, right in zip(said, row["targets"], strict=True))
        assert said[-1] == chat.end and row["positions"][-1] == len(row["input_ids"]) - 1
    texts = ["".join(chat.tokenizer.decode([row["input_ids"][p] for p in row["positions"]])) for row in rows]
    assert sorted("EXPAND" in text for text in texts) == [False, True]
    with pytest.raises(ValueError, match=r"warm_start.rows = 99 .*lower rows or change stop_share"):
        more = replace(config, warm_start=WarmStartConfig(rows=99))
        teach_rows(more, tasks, Memories({"toy": graph}, config.env), chat)


def test_the_set_likelihood_sums_over_what_is_right(config):
    model = new_adapter(config)
    rows = [
        {"input_ids": [5, 6, 7, 8, 2], "positions": [3, 4], "targets": [[8, 9], [2]]},
        {"input_ids": [5, 6, 2], "positions": [2], "targets": [[2]]},
    ]
    batch = collate(rows)
    assert batch["begins"].tolist() == [True, False, True]
    found = teach_scores(model, batch)
    scores = model(torch.tensor([rows[0]["input_ids"]])).logits[0].log_softmax(-1)
    short = model(torch.tensor([rows[1]["input_ids"]])).logits[0].log_softmax(-1)
    expected = [scores[2, [8, 9]].logsumexp(0), scores[3, 2], short[1, 2]]
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)


def test_the_warm_start_lowers_its_loss_and_saves_an_adapter(config, tasks, graph, chat, tmp_path):
    config = replace(config, warm_start=WarmStartConfig(rows=2, k=(1,)), sft=config.sft | {"num_train_epochs": 12})
    rows = teach_rows(config, tasks, Memories({"toy": graph}, config.env), chat)
    tmp_path.joinpath("run").mkdir()
    warm_start(config, tmp_path / "run", new_adapter(config), chat, rows)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    assert set(load_file(tmp_path / "run" / "warm_start" / "adapter_model.safetensors"))
