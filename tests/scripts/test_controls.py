"""Controls: what shuffles, what imitates, what credits a pick; all from one warm start, which stays as it was."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cuewalk.env import Ending, Gold, RetrievalEnv
from cuewalk.judges import TrajectoryJudge
from cuewalk.rl.adapters import new_adapter
from cuewalk.rl.config import ConfigError
from cuewalk.rl.data import Memories
from cuewalk.rl.grpo import WalkTrainer, train_grpo
from cuewalk.rl.rollout import Row
from cuewalk.scripts.controls import (
    Enumerated,
    PerPick,
    Picks,
    Placebo,
    Rejecting,
    Weighing,
    enumerating,
    pick_advantages,
    prepare,
    spread,
    steps_for,
)
from cuewalk.scripts.throughput import rate
from tests.rl.test_training import RULES, ByLetters, config, tasks  # noqa: F401 - fixtures


def scored_by(kind, advantages, monkeypatch, size=2, step=0):
    """Return the advantages that a control makes of GRPO's, without a trainer."""
    monkeypatch.setattr(
        WalkTrainer, "_generate_and_score_completions", lambda self, inputs: {"advantages": torch.tensor(inputs)}
    )
    control = object.__new__(kind)
    control.num_generations, control.args = size, SimpleNamespace(seed=0)
    control.state = SimpleNamespace(global_step=step)
    return control._generate_and_score_completions(advantages)["advantages"].tolist()


def test_a_placebo_shuffles_the_advantages_of_a_step_anew_in_each(monkeypatch):
    own = [float(value) for value in range(16)]
    first, again, next_one = (scored_by(Placebo, own, monkeypatch, step=step) for step in (0, 0, 1))
    assert sorted(first) == own and first != own
    assert first == again != next_one


def test_rejection_keeps_the_best_of_each_live_group(monkeypatch):
    advantages = [0.5, -0.25, 0.5, -0.75, 0.0, 0.0, 0.0, 0.0]
    assert scored_by(Rejecting, advantages, monkeypatch, size=4) == [1, 0, 1, 0, 0, 0, 0, 0]


def test_a_pick_is_compared_with_those_who_came_as_far():
    # Two walks of two picks and one that stopped at once: at the first pick all three, then the two, then the two.
    assert pick_advantages([[0.6, 0.1, 0.0], [0.0], [0.3, 0.3, 0.2]]) == [
        pytest.approx([0.3, -0.1, -0.1]), pytest.approx([-0.3]), pytest.approx([0.0, 0.1, 0.1])
    ]  # fmt: skip


@pytest.fixture
def row(graph, question, chat):
    """Two letters, then STOP, as tokens: EXPAND is 4 ids, a letter one."""
    env = RetrievalEnv(graph, question, replace(RULES, frontier_cap=3))
    prompt = chat.first(env.reset()[0])
    made = Row(env, prompt)
    for action in ("EXPAND A B", "STOP"):
        said = chat.action(action)
        made.append(said, [0.0] * len(said), sampled=True)
        observation, _, ended, _, _ = env.step(action)
        if not ended:
            made.append(chat.following(observation), [0.0] * 99, sampled=False)
    return made


def test_each_id_has_the_credit_of_the_pick_that_it_decides(row, chat):
    found = spread(row, [10.0, 20.0, 30.0], chat.end)
    sampled = [value for value, own in zip(found, row.mask, strict=True) if own]
    expand, stop = len(chat.untrusted("EXPAND")), len(chat.action("STOP"))
    # EXPAND decides the first pick as A does, B the second; the action's end and STOP decide against a third.
    assert sampled == [*[10.0] * expand, 10.0, 20.0, 30.0, *[30.0] * stop]
    assert not any(value for value, own in zip(found, row.mask, strict=True) if not own)


def test_a_pick_earns_what_it_found_less_its_price_and_the_end_the_rest(row, graph, question, config, chat):  # noqa: F811
    sources = [graph.entries[entry].sources for entry in row.trajectory.working]
    gold = Gold("x", (sources[2][0], "elsewhere"), 4)  # half of it is the second pick's
    tasks = SimpleNamespace(gold={question.id: gold})  # noqa: F811
    picks = Picks(config, tasks, Memories({"toy": graph}, config.env), chat, TrajectoryJudge())
    price = config.judge.price
    assert row.trajectory.ending is Ending.STOPPED
    assert picks.returns(row, 0.4) == pytest.approx([0.4, 0.4 + price, 0.4 + price - (0.5 - price)])
    row.env.config = replace(row.env.config, price=0.1)  # told, and so what a pick pays
    assert picks.returns(row, 0.4) == pytest.approx([0.4, 0.5, 0.1])


def test_credit_a_pick_trains(config, tasks, graph, chat, tmp_path):  # noqa: F811
    (tmp_path / "run").mkdir()
    config = replace(config, grpo=config.grpo | {"max_steps": 1})
    model, before = new_adapter(config), {}
    for name, weights in model.named_parameters():
        before[name] = weights.detach().clone()
    picks = Picks(config, tasks, Memories({"toy": graph}, config.env), chat, ByLetters())
    train_grpo(config, tmp_path / "run", model, picks, PerPick)
    assert picks.credit and any(not torch.equal(before[name], p) for name, p in model.named_parameters())


ONE_STEP = {"max_steps": 1, "learning_rate": 0.0}


def test_an_enumerated_group_is_every_action_once_and_its_gradient_exact(config, tasks, graph, chat, tmp_path):  # noqa: F811
    """The gradient is that of the expected reward, Σ_a π(a) Q(a), over STOP and each letter; nothing is sampled."""
    config = enumerating(replace(config, grpo=config.grpo | {"per_device_train_batch_size": 10, **ONE_STEP}))
    (tmp_path / "run").mkdir()
    source = Enumerated(config, tasks, Memories({"toy": graph}, config.env), chat, TrajectoryJudge())
    seen, original = {}, WalkTrainer._compute_loss

    def keep(self, model, inputs):
        seen["inputs"], seen["trainer"] = dict(inputs), self
        return original(self, model, inputs)

    WalkTrainer._compute_loss = keep
    try:
        train_grpo(config, tmp_path / "run", new_adapter(config), source, Weighing)
    finally:
        WalkTrainer._compute_loss = original
    inputs, trainer = seen["inputs"], seen["trainer"]
    assert source.log["groups/distinct_trajectories"] == 5.0
    texts = [chat.read(ids[mask.bool()]) for ids, mask in zip(
        inputs["completion_ids"], inputs["completion_mask"], strict=True)]  # fmt: skip
    assert [text.split()[0] for text in texts] == ["STOP", *["EXPAND"] * 4] * 2
    assert (inputs["tool_mask"] * inputs["completion_mask"]).sum(1).tolist() == [1, 2, 2, 2, 2] * 2
    trainer.model.zero_grad()
    original(trainer, trainer.model, inputs).backward()
    ours = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    expected = 0.0
    for row in range(10):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        said = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
        logits = trainer.model(input_ids=torch.cat([prompt, said])[None]).logits[0].float().log_softmax(-1)
        logps = logits[len(prompt) - 1 : -1].gather(1, said[:, None]).squeeze(1)
        decided = inputs["tool_mask"][row][: len(said)].bool()
        expected = expected + logps[decided].sum().exp() * inputs["advantages"][row]
    (-5 * expected / inputs["num_items_in_batch"]).backward()
    theirs = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    scale = max(float(grad.abs().max()) for grad in theirs.values())  # small: a random model hardly acts
    assert scale > 0 and ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert torch.allclose(ours[name] / scale, grad / scale, atol=1e-4), name


def test_enumerated_groups_have_a_row_for_every_action(config):  # noqa: F811
    assert enumerating(config).grpo["num_generations"] == config.env.frontier_cap + 1 == 5
    assert enumerating(config).grpo["per_device_train_batch_size"] == 5
    for wrong in ({"beta": 0.1}, {"loss_type": "grpo"}):
        with pytest.raises(ConfigError, match="exact gradient only without grpo.beta"):
            enumerating(replace(config, grpo=config.grpo | wrong))


def test_a_control_has_a_run_of_its_own_with_the_same_start(config, tmp_path):  # noqa: F811
    source = tmp_path / "source"
    with pytest.raises(ConfigError, match="no warm start in"):
        prepare(source, config)
    (source / "warm_start").mkdir(parents=True)
    (source / "warm_start" / "adapter_config.json").write_text("{}")
    (source / "ranker.json").write_text("{}")
    for part in ("reader", "blind/0/reader"):
        (source / part).mkdir(parents=True)
        (source / part / "adapter_config.json").write_text("{}")
    run = prepare(source, config)
    assert run == tmp_path / "run" and (run / "warm_start" / "adapter_config.json").exists()
    assert (run / "ranker.json").exists() and (run / "config.json").exists() and not (run / "trained").exists()
    assert all((run / part / "adapter_config.json").exists() for part in ("reader", "blind/0/reader"))
    with pytest.raises(ConfigError, match="other settings"):
        prepare(source, replace(config, seed=5))


def test_more_teaching_takes_the_time_that_grpo_took(tmp_path):
    with pytest.raises(ConfigError, match="tells no time of grpo or warm_start; finish that run"):
        steps_for(tmp_path)
    lines = [{"stage": "warm_start", "step": step, "certain": 0.5} for step in range(1, 11)]
    lines.append({"stage": "warm_start", "step": 10, "train_runtime": 25.0, "train_steps_per_second": 0.2})  # resumed
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match="tells no time of grpo"):
        steps_for(tmp_path)
    lines += [{"stage": "grpo", "step": step, "groups/live": 4.0, "step_time": 15.0} for step in (1, 2)]
    lines.append({"stage": "grpo", "step": 2, "train_runtime": 15.0})  # of its second half alone
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert steps_for(tmp_path) == 6


def test_the_rate_of_a_job_counts_every_process_and_what_was_replaced(tmp_path):
    lines = [
        {"stage": "grpo", "step": step, "groups/live": 4.0, "groups/all": 4.0, "groups/replaced": float(step),
         "groups/distinct_trajectories": 4.0 + step, "step_time": 30.0}
        for step in (1, 2)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    # 4 + 1 and 4 + 2 in a minute; what is logged counts every process.
    assert rate(tmp_path) == {"ours": pytest.approx(11 * 60), "distinct": 5.5}
