"""vLLM as the sampler: against transformers with a real vLLM on the CPU (marked), and what needs no vLLM."""

# ruff: noqa: F811 (fixtures of another file, imported and asked for)

import importlib.util
import json
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel

from cuewalk.env import EnvConfig, RetrievalEnv
from cuewalk.judges import Verdict
from cuewalk.memory.models import load_language_model
from cuewalk.rl.adapters import new_adapter
from cuewalk.rl.config import Config, ConfigError, SamplingConfig, parse_config
from cuewalk.rl.grpo import WalkTrainer, importance_weights
from cuewalk.rl.rollout import walk
from cuewalk.rl.sampler import TransformersSampler
from cuewalk.rl.transcript import Chat
from cuewalk.rl.vllm_sampler import InProcess, SamplerError, Server, VLLMSampler, check_vllm
from tests.memory.test_vllm import SETTINGS, serving
from tests.rl.test_training import config, run_grpo, tasks  # noqa: F401


def real(test):
    """Mark a test that needs vLLM."""
    absent = importlib.util.find_spec("vllm") is None
    why = "vllm is not installed here: `make test-vllm` installs it"
    return pytest.mark.vllm(pytest.mark.skipif(absent, reason=why)(test))


CLOSE = 1e-3  # of log-probabilities in fp32; a changed adapter moves them by more than a hundred times that
RULES = EnvConfig(k=1, budget=6, frontier_cap=3, new_lines=1)


def changed(model, scale, seed):
    """Change the adapter's weights as a step of training would, but more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(scale * torch.randn(weight.shape, generator=generator))
    return model


def scored(model, prompt, ids):
    """Score ids the simple way: one row, one forward pass, no cache."""
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].float().log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None]).squeeze(1)


@pytest.fixture(scope="module")
def job(tiny_model):
    return Config(model=str(tiny_model), dtype="float32", sampling=SamplingConfig(engine="vllm", max_action_tokens=8))


@pytest.fixture(scope="module")
def in_process(job):
    os.environ.update(SETTINGS)
    return InProcess(job, 16)


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """Serve the tiny model, and give the address."""
    options = ["--model", str(tiny_model), "--dtype", "float32", "--max-model-len", "2100", "--enable-lora"]
    options += ["--max-lora-rank", "16", "--logprobs-mode", "processed_logprobs"]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with serving(log, *options, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as address:
        yield address


@pytest.fixture(params=["in_process", "server"])
def engine(request):
    found = request.getfixturevalue(request.param)
    return Server(found) if isinstance(found, str) else found


class Acting(Chat):
    """Take what a random model says, which is no action, for a query, so that a walk has as many turns as budget."""

    def read(self, ids):
        return "REFINE dog " + " ".join(f"word{id_}" for id_ in ids[:2])


def walked(sampler, graph, question, chat, copies=3, seeds=(7,)):
    envs = [[RetrievalEnv(graph, question, RULES) for _ in range(copies)]]
    ((*rows,),) = walk(envs, sampler, chat, seeds=list(seeds), max_tokens=2048)
    return rows


@real
def test_greedy_walks_are_those_of_transformers(engine, job, graph, question, chat, tmp_path):
    model = changed(new_adapter(job).eval(), 0.05, 1)
    ours = VLLMSampler(engine, chat.end, 8, tmp_path / "a", temperature=0.0)
    ours.hand_over(model, 1)
    theirs = TransformersSampler(model, chat.end, 8, temperature=0)
    chat = Acting(chat.tokenizer)
    found, expected = walked(ours, graph, question, chat), walked(theirs, graph, question, chat)
    turns = len(found[0].trajectory.steps)
    print(f"{turns} turns, {len(found[0].prompt)} + {len(found[0].completion)} ids")  # seen with `pytest -s`
    assert turns >= 5 and len(found[0].prompt) + len(found[0].completion) > 256  # two blocks of vLLM's cache
    for row, other in zip(found, expected, strict=True):
        assert (row.completion, row.mask) == (other.completion, other.mask)
        assert row.logps == pytest.approx(other.logps, abs=CLOSE)
    assert ours.tokens == theirs.tokens


@real
def test_every_changed_adapter_is_the_one_that_samples_and_a_stale_one_is_noticed(engine, job, tmp_path):
    model = new_adapter(job).eval()
    prompt = [(11 * i) % 900 + 10 for i in range(150)]
    sampler = VLLMSampler(engine, 2, 8, tmp_path / "a", seed="s")
    sampler.hand_over(model, 0)
    for step in range(1, 4):
        changed(model, 0.05, step)
        with pytest.raises(SamplerError, match=r"differ by \d\.\d{4} on average"):
            sampler.check(model)  # the weights moved, and were not handed over
        sampler.hand_over(model, step)
        assert len(list((tmp_path / "a").iterdir())) == 1  # older adapters are gone
        written = PeftModel.from_pretrained(
            load_language_model(job.model, "float32", "cpu"), next((tmp_path / "a").iterdir())
        )
        sampler.begin([prompt], 4)
        actions, logps = sampler.act()
        for ids, scores in zip(actions, logps, strict=True):
            assert torch.tensor(scores) == pytest.approx(scored(written.eval(), prompt, ids), abs=CLOSE)


@real
def test_actions_end_at_the_end_of_turn_or_the_limit_and_seeds_repeat(engine, job, tmp_path):
    model = new_adapter(job).eval()
    sampler = VLLMSampler(engine, 2, 5, tmp_path / "a", seed="s")
    runs = []
    for step in (1, 1, 2):
        sampler.hand_over(model, step)
        sampler.begin([[5, 6, 7] * 50], 4)
        runs.append(sampler.act()[0])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(ids) for ids in runs[0]}) > 1  # the copies of a prompt have seeds of their own
    end = runs[0][0][2]  # make the third id the end of turn: the same draw now stops there
    sampler = VLLMSampler(engine, end, 5, tmp_path / "a", seed="s")
    sampler.hand_over(model, 1)
    sampler.begin([[5, 6, 7] * 50], 4)
    actions, logps = sampler.act()
    assert actions[0] == runs[0][0][: runs[0][0].index(end) + 1] and len(actions[0]) == len(logps[0])
    assert all(ids[-1] == end or len(ids) == 5 for ids in actions)


@real
def test_log_probabilities_are_of_the_tempered_distribution(engine, job, tmp_path):
    model = changed(new_adapter(job).eval(), 0.05, 1)
    VLLMSampler(engine, 2, 5, tmp_path / "a", temperature=0.5).hand_over(model, 1)  # its check compares them


@real
def test_both_flavours_sample_alike(in_process, server, job, graph, question, chat, tmp_path):
    model = changed(new_adapter(job).eval(), 0.05, 1)
    rows = []
    for number, engine in enumerate((in_process, Server(server))):
        sampler = VLLMSampler(engine, chat.end, 8, tmp_path / str(number), seed="s")
        sampler.hand_over(model, 1)
        rows.append(walked(sampler, graph, question, chat))
    for row, other in zip(*rows, strict=True):
        assert row.completion == other.completion
        assert row.logps == pytest.approx(other.logps, abs=CLOSE)


@real
@pytest.mark.slow
def test_rounding_in_bf16_is_within_the_tolerance_and_another_policy_is_not(tmp_path):
    os.environ.update(SETTINGS)
    job = Config(sampling=SamplingConfig(engine="vllm"))  # SmolLM2 in bf16, as people train it
    model = changed(new_adapter(job).eval(), 0.02, 1)
    sampler = VLLMSampler(InProcess(job, 16), 2, 8, tmp_path / "a", seed="s")
    sampler.hand_over(model, 1)
    changed(model, 0.1, 2)
    with pytest.raises(SamplerError, match=r"in torch.bfloat16 0.15 on average is allowed"):
        sampler.check(model)


@real
def test_an_adapter_that_is_not_there_is_refused_by_the_server(server, job, tmp_path):
    with pytest.raises(SamplerError, match="can't be asked for v1/load_lora_adapter"):
        Server(server).load("nothing", tmp_path / "nothing")
    check_vllm(server, 2)
    check_vllm(None, 1)


class InTurn:
    """A judge that pays every row more than the one before it: a group is live, whatever a random model says."""

    scored = 0

    def score(self, trajectory, graph, gold) -> Verdict:
        self.scored += 1
        return Verdict(float(self.scored), {}, "")


@real
def test_a_training_step_samples_with_vllm_and_logs_how_far_it_is(
    server,
    config,
    tasks,
    graph,
    chat,
    tmp_path,
):
    sampling = replace(config.sampling, engine="vllm", server=server)
    config = replace(config, grpo=config.grpo | {"max_steps": 2}, sampling=sampling)
    before, after, _ = run_grpo(config, tasks, graph, chat, tmp_path / "run", InTurn())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "sampling/logp_difference_mean" in line]
    assert [line["groups/live"] for line in steps] == [2, 2]
    for line in steps:
        assert 0 < line["sampling/logp_difference_mean"] <= line["sampling/logp_difference_max"] < CLOSE
        assert line["sampling/weight_mean"] == pytest.approx(1, abs=CLOSE)


def test_a_server_without_the_engine_that_asks_it_is_refused():
    tree = {"sampling": {"server": "http://127.0.0.1:8000"}}
    with pytest.raises(ConfigError, match=r"sampling.server = 'http://127.0.0.1:8000' needs sampling.engine = vllm"):
        parse_config(tree)
    assert parse_config({"sampling": tree["sampling"] | {"engine": "vllm"}}).sampling.server == "http://127.0.0.1:8000"


class Fixed:
    """An engine that answers what it is told."""

    def __init__(self, *found):
        self.found = list(found)

    def load(self, name, path):
        pass

    def complete(self, prompts, seeds, options):
        return self.found


def test_the_grammar_is_refused_and_so_are_replies_that_do_not_add_up(tmp_path):
    sampler = VLLMSampler(Fixed(([5, 2], [-1.0, None])), 2, 8, tmp_path)
    sampler._draw, sampler.tokens = SimpleNamespace(getrandbits=lambda bits: 0), 0
    sampler.begin([[1]], 1)
    with pytest.raises(ValueError, match="the action grammar needs a TransformersSampler"):
        sampler.act([lambda ids: None])
    for wrong in (([5, 2], [-1.0, None]), ([5], [float("nan")]), ([], []), ([5] * 9, [-1.0] * 9), ([5], [-9999.0])):
        sampler.engine.found = [wrong]
        with pytest.raises(SamplerError, match="vLLM gave the ids"):
            sampler.act()
    sampler.engine.found = [([5, 2], [-1.0, -2.0])]
    assert sampler.act() == ([[5, 2]], [[-1.0, -2.0]])


def test_a_run_is_refused_before_it_starts_where_vllm_is_missing_or_untried(monkeypatch):
    monkeypatch.setattr("cuewalk.rl.vllm_sampler.find_spec", lambda name: None)
    with pytest.raises(SamplerError, match=r"pip install cuewalk\[vllm\]"):
        check_vllm(None, 1)
    monkeypatch.setattr("cuewalk.rl.vllm_sampler.find_spec", lambda name: "there")
    with pytest.raises(SamplerError, match=r"2 processes need a server"):
        check_vllm(None, 2)
    for version, tried in (("0.28.9", 0), ("0.29.0", 1), ("0.30.1+cpu", 1), ("0.31.0", 0), ("1.0.29.0", 0), ("dev", 0)):
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        if tried:
            check_vllm(None, 1)
        else:
            with pytest.raises(SamplerError, match=f"{version} was not tried: install vllm>=0.29,<0.31"):
                check_vllm(None, 1)


@contextmanager
def replying(body, status=200, kind="application/json", delay=0.0):
    """Answer every request on a loopback port with one body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(delay)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            with suppress(OSError):  # who asked may have given up
                self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    stub = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=stub.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{stub.server_port}/v1/"
    finally:
        stub.shutdown()
        thread.join()
        stub.server_close()


CHOICE = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ("not JSON", 200, "text/plain"),
        ("not JSON", 200, "application/json"),
        ("[]", 200, "application/json"),
        ("null", 200, "application/json"),
        (json.dumps({"choices": []}), 200, "application/json"),
        (json.dumps({"choices": [CHOICE, CHOICE]}), 200, "application/json"),
        (json.dumps({"choices": [{"token_ids": [5], "logprobs": None}]}), 200, "application/json"),
        (json.dumps({"choices": [{"text": "hello"}]}), 200, "application/json"),
        (json.dumps({"error": "no such model"}), 404, "application/json"),
    ],
)
def test_a_server_that_answers_oddly_is_named_with_what_to_do(body, status, kind):
    with replying(body, status, kind) as address, pytest.raises(SamplerError, match="can't be asked.* Start `VLLM_"):
        Server(address, timeout=5).complete([[1, 2]], [0], {})


def test_a_server_that_answers_well_is_read_and_its_version_checked():
    with replying(json.dumps({"choices": [CHOICE]})) as address:
        assert Server(address, timeout=5).complete([[1], [2]], [0, 1], {}) == [([5], [-1.0])] * 2
    with replying(json.dumps({"version": "0.30.0"})) as address:
        check_vllm(address, 4)
    with replying(json.dumps({"version": "0.33.0"})) as address, pytest.raises(SamplerError, match="0.33.0.*not tried"):
        check_vllm(address, 1)


def test_a_server_that_is_gone_is_said_to_be():
    with replying("") as address:
        pass
    with pytest.raises(SamplerError, match="can't be asked for version.*APIConnectionError"):
        check_vllm(address, 1)


def test_a_server_that_hangs_is_given_up():
    with replying("{}", delay=0.4) as address, pytest.raises(SamplerError, match="APITimeoutError"):
        Server(address, timeout=0.1).complete([[1, 2]], [0], {})


def test_importance_weights_are_truncated_and_outside_the_mask_nothing():
    trained = torch.tensor([[-1.0, -1.0, -1.0, -9.0]])
    sampled = torch.tensor([[-1.0, -1.5, -4.0, 0.0]])
    weights = importance_weights(trained, sampled, torch.tensor([[True, True, True, False]]))
    assert weights.tolist() == [[1.0, pytest.approx(1.6487, abs=1e-4), 3.0, 0.0]]  # e^0, e^.5, e^3 cut to 3


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
def test_the_corrected_loss_is_trls_with_its_own_correction(
    loss_type,
    config,
    tasks,
    graph,
    chat,
    tmp_path,
    monkeypatch,
):
    """TRL's `token_truncate` on the same batch: it multiplies each token's loss by the same truncated ratio."""
    config = replace(config, grpo=config.grpo | {"max_steps": 1, "learning_rate": 0.0, "loss_type": loss_type})
    seen = {}
    original = WalkTrainer._compute_loss

    def keep(self, model, inputs):
        seen["inputs"], seen["trainer"] = dict(inputs), self
        return original(self, model, inputs)

    monkeypatch.setattr(WalkTrainer, "_compute_loss", keep)
    run_grpo(config, tasks, graph, chat, tmp_path / "run")
    monkeypatch.undo()
    trainer, inputs = seen["trainer"], seen["inputs"]
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    exact = inputs["sampling_per_token_logps"]
    inputs["sampling_per_token_logps"] = exact + noise  # a sampler that is off by one nat
    weights = importance_weights(exact, exact + noise, mask)
    assert (weights == 3.0).any() and (weights[mask] < 0.5).any()
    inputs["importance_sampling_ratio"] = weights

    def loss_and_gradient(**settings):
        for name, value in settings.items():
            setattr(trainer, name, value)
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, dict(inputs))
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    plain, plain_gradient = loss_and_gradient(corrects=False, use_vllm=False)
    theirs, their_gradient = loss_and_gradient(corrects=False, use_vllm=True, vllm_importance_sampling_correction=True)
    ours, our_gradient = loss_and_gradient(corrects=True, use_vllm=False)
    assert ours == pytest.approx(theirs, rel=1e-3) and ours != pytest.approx(plain, rel=0.1)
    size = their_gradient.abs().max()
    assert (
        (our_gradient - their_gradient).abs().max()
        < 1e-3 * size
        < 0.1 * size
        < (our_gradient - plain_gradient).abs().max()
    )
    log = trainer._metrics["train"]
    assert log["sampling/logp_difference_mean"] == [pytest.approx(noise[mask].abs().mean().item(), abs=1e-4)]
    assert log["sampling/logp_difference_max"] == [pytest.approx(noise[mask].abs().max().item(), abs=1e-4)]
    assert log["sampling/weight_mean"] == [pytest.approx(weights[mask].mean().item(), abs=1e-4)]
