import json
import resource
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import torch

from cuewalk.env import EnvConfig, RetrievalEnv
from cuewalk.env.render import RENDERER
from cuewalk.memory.models import load_language_model, load_tokenizer
from cuewalk.rl import Config, ExportError, Retriever, export_policy
from cuewalk.rl.adapters import new_adapter
from cuewalk.rl.config import EvaluationConfig
from cuewalk.rl.data import rank_of
from cuewalk.rl.export import GRAMMAR, _config
from cuewalk.rl.ranker import FEATURES, Ranker
from cuewalk.rl.reading import Reading
from cuewalk.rl.run import open_run
from cuewalk.rl.sampler import TransformersSampler
from cuewalk.rl.vllm_sampler import SamplerError
from tests.memory.test_vllm import serving
from tests.rl.test_vllm_sampler import real

IDS = list(range(5, 25))

LOGITS = """
import sys, torch
from cuewalk.rl import Retriever
retriever = Retriever.from_pretrained(sys.argv[1])
assert "trl" not in sys.modules and "vllm" not in sys.modules
logits = retriever.model(torch.tensor([{ids}])).logits
torch.save(logits, sys.argv[2])
"""


def finished(tiny_model, tmp_path):
    """Return a finished run, its adapter random so that it changes the logits, and its model."""
    config = Config(model=str(tiny_model), dtype="float32", run_dir=str(tmp_path / "run"), env=EnvConfig(k=1, budget=2))
    open_run(config)
    model = new_adapter(config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "run" / "trained")
    return tmp_path / "run", model


@pytest.fixture
def run(tiny_model, tmp_path):
    return finished(tiny_model, tmp_path)


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory):
    """Return a policy that was exported once for all tests that only read it, and its model."""
    folder = tmp_path_factory.mktemp("made")
    path, model = finished(tiny_model, folder)
    return export_policy(path, folder / "policy"), model.eval()


def test_an_export_gives_equal_logits_in_a_fresh_process(run, tmp_path):
    path, model = run
    out = export_policy(path, tmp_path / "policy")
    script = LOGITS.format(ids=IDS)
    subprocess.run([sys.executable, "-c", script, str(out), str(tmp_path / "logits.pt")], check=True, cwd=tmp_path)
    fresh = torch.load(tmp_path / "logits.pt", weights_only=True)
    with torch.no_grad():
        live = model(torch.tensor([IDS])).logits
        base = load_language_model(str(json.loads((out / "policy.json").read_text())["base"]), "float32")
        merged = load_language_model(str(out / "merged"), "float32")(torch.tensor([IDS])).logits
        assert (base(torch.tensor([IDS])).logits - live).abs().max() > 1e-3  # the adapter does something
    assert torch.equal(fresh, live)
    assert torch.allclose(merged, live, atol=1e-4)


def test_an_export_names_what_it_is_bound_to_and_no_path_of_this_machine(run, tmp_path):
    path, _ = run
    out = export_policy(path, tmp_path / "policy", merged=False)
    policy = json.loads((out / "policy.json").read_text())
    assert {"grammar", "renderer", "base", "base_digest", "config"} <= set(policy)
    assert not (out / "merged").exists()
    adapter = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == policy["base"]
    assert policy.pop("base") == policy["config"].pop("model")  # the one place that is needed
    assert str(tmp_path.parent) not in json.dumps(policy)


def test_a_retriever_walks_a_graph(run, tmp_path, graph):
    path, _ = run
    retriever = Retriever.from_pretrained(export_policy(path, tmp_path / "policy", merged=False))
    found = retriever.retrieve(graph, "When did the dog come back?")
    assert found.entries[0].id == "e0"
    assert found.trajectory.question.text == "When did the dog come back?"
    assert retriever.retrieve(graph, "trip", budget=1).trajectory.budget == 1
    retriever.config = replace(retriever.config, env=replace(retriever.config.env, price=0.01))
    assert retriever.retrieve(graph, "trip").trajectory.price == 0.01
    dear = retriever.retrieve(graph, "trip", price=0.05).trajectory
    assert (dear.price, dear.budget) == (0.05, retriever.config.env.budget)
    asked = [(graph, "When did the dog come back?"), (graph, "trip"), (graph, "Who has a garden?")]
    assert retriever.retrieve_batch(asked, budget=1) == [retriever.retrieve(*one, budget=1) for one in asked]


def test_the_order_alone_can_be_served_without_a_model(run, tmp_path, graph, monkeypatch):
    path, _ = run
    out = export_policy(path, tmp_path / "policy", merged=False)
    monkeypatch.setattr("cuewalk.rl.export.load_language_model", None)  # not called
    found = Retriever.from_pretrained(out, order_only=True).retrieve(graph, "When did the dog come back?", budget=2)
    env = RetrievalEnv(graph, found.trajectory.question, replace(EnvConfig(k=1), budget=2))
    env.reset()
    best = sorted((link for _, link in env.state.frontier), key=lambda link: -link.score)[:2]
    assert found.trajectory.added == tuple(link.entry for link in best) and found.ending == "budget"


def test_an_export_carries_the_ranker_that_orders_its_candidates(run, tmp_path, graph):
    path, _ = run
    kept = json.loads((path / "config.json").read_text())
    kept["config"]["env"]["order"] = "ranker"
    (path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="train first"):
        export_policy(path, tmp_path / "policy", merged=False)
    ranker = Ranker(("segment",), tuple([0.0] * len(FEATURES) + [1.0]), -1.0)
    ranker.save(path / "ranker.json")
    retriever = Retriever.from_pretrained(export_policy(path, tmp_path / "other", merged=False))
    assert retriever.rank == ranker
    assert retriever.retrieve(graph, "trip").entries


def test_an_order_alone_is_exported_and_says_that_it_is_one(run, tmp_path, graph, monkeypatch):
    path, _ = run
    (path / "trained").rename(tmp_path / "apart")
    with pytest.raises(ExportError, match="no trained adapter and no order in"):
        export_policy(path, tmp_path / "none")
    kept = json.loads((path / "config.json").read_text())
    kept["config"] |= {"env": kept["config"]["env"] | {"order": "reader"}, "reading": {"epochs": 1}}
    (path / "config.json").write_text(json.dumps(kept))
    Ranker(("segment",), tuple([0.0] * len(FEATURES) + [1.0]), -1.0, (1.0, 0.1, 0.0)).save(path / "ranker.json")
    (tmp_path / "apart").rename(path / "reader")  # any adapter can read
    monkeypatch.setattr("cuewalk.rl.reading.cache_dir", lambda: tmp_path / "cache")
    out = export_policy(path, tmp_path / "order")
    assert sorted(part.name for part in out.iterdir()) == ["policy.json", "ranker.json", "reader"]
    config = json.loads((out / "reader" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == json.loads((out / "policy.json").read_text())["base"]
    retriever = Retriever.from_pretrained(out, order_only=True)
    assert retriever.rank.digest == rank_of(_config(kept["config"]), path).digest
    assert retriever.retrieve(graph, "trip", budget=1).ending == "budget"
    with pytest.raises(ExportError, match="holds an order without a policy: pass order_only=True"):
        Retriever.from_pretrained(out)


def test_a_reader_of_other_weights_is_refused_though_no_policy_is_asked(run, tmp_path, tiny_model, monkeypatch):
    path, _ = run
    kept = json.loads((path / "config.json").read_text())
    kept["config"]["env"]["order"] = "reader"
    (path / "config.json").write_text(json.dumps(kept))
    Ranker(("segment",), tuple([0.0] * len(FEATURES) + [1.0]), -1.0, (1.0, 0.1, 0.0)).save(path / "ranker.json")
    monkeypatch.setattr("cuewalk.rl.reading.cache_dir", lambda: tmp_path / "cache")
    out = export_policy(path, tmp_path / "policy", merged=False)
    rank = Retriever.from_pretrained(out, order_only=True).rank
    assert isinstance(rank, Reading) and rank.ranker.reading == (1.0, 0.1, 0.0)
    other = load_language_model(str(tiny_model), "float32")
    with torch.no_grad():
        other.model.embed_tokens.weight[0] += 1
    other.save_pretrained(tmp_path / "other")
    load_tokenizer(str(tiny_model)).save_pretrained(tmp_path / "other")
    with pytest.raises(ExportError, match="trained on other weights"):
        Retriever.from_pretrained(out, base=str(tmp_path / "other"), order_only=True)


def test_a_policy_of_an_older_version_is_read_whatever_its_evaluation_was_called(run, tmp_path):
    out = export_policy(run[0], tmp_path / "policy", merged=False)
    policy = json.loads((out / "policy.json").read_text())
    policy["config"]["evaluation"] = {"untrained": False}
    (out / "policy.json").write_text(json.dumps(policy))
    assert Retriever.from_pretrained(out).config.evaluation == EvaluationConfig()


def test_another_base_is_refused(run, tmp_path, tiny_model):
    path, _ = run
    out = export_policy(path, tmp_path / "policy", merged=False)
    other = load_language_model(str(tiny_model), "float32")
    with torch.no_grad():
        other.model.embed_tokens.weight[0] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ExportError, match="was trained on other weights than .*pass base= with the right ones"):
        Retriever.from_pretrained(out, base=str(tmp_path / "other"))


@pytest.mark.parametrize(("key", "ours"), [("grammar", GRAMMAR), ("renderer", RENDERER)])
def test_another_language_is_refused(run, tmp_path, key, ours):
    path, _ = run
    out = export_policy(path, tmp_path / "policy", merged=False)
    policy = json.loads((out / "policy.json").read_text())
    (out / "policy.json").write_text(json.dumps(policy | {key: "0"}))
    with pytest.raises(ExportError, match=f"speaks {key} '0', this version of cuewalk '{ours}'"):
        Retriever.from_pretrained(out)


def test_nothing_is_overwritten_and_nothing_is_exported_from_nothing(run, tmp_path):
    path, _ = run
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ExportError, match="is not empty; nothing was overwritten"):
        export_policy(path, tmp_path / "mine")
    with pytest.raises(ExportError, match="no trained adapter and no order in .*train first"):
        export_policy(tmp_path, tmp_path / "out")
    with pytest.raises(ExportError, match=r"policy.json is missing. Make one with `cuewalk export`"):
        Retriever.from_pretrained(tmp_path / "mine")


def test_a_run_directory_of_another_run_is_refused_and_a_longer_run_goes_on(tmp_path):
    from cuewalk.rl import ConfigError

    config = Config(run_dir=str(tmp_path / "run"))
    open_run(config)
    open_run(replace(config, grpo={"max_steps": 50}))
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(env.budget\); nothing was overwritten"):
        open_run(replace(config, env=EnvConfig(budget=3)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        open_run(replace(config, run_dir=str(tmp_path / "mine")))


@pytest.fixture
def exported(made):
    return made[0]


@pytest.fixture
def mine(exported, tmp_path):
    """A copy to change."""
    return shutil.copytree(exported, tmp_path / "policy", ignore=shutil.ignore_patterns("merged"))


@contextmanager
def completing(reply):
    """Serve vLLM's protocol on a loopback port: `reply(body)` is what stands in `choices[0]`; None breaks the line."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            choice = reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if choice is not None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps({"choices": [choice]}).encode())

        def log_message(self, *_):
            pass

    stub = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{stub.server_port}"
    finally:
        stub.shutdown()
        stub.server_close()


def engine(model, chat):
    """Reply as vLLM does, with a model's own scores and likeliest actions."""

    def reply(body):
        prompt = body["prompt"]
        if "prompt_logprobs" in body:
            with torch.no_grad():
                scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            at = [{str(id_): {"logprob": scores[place, id_].item()}} for place, id_ in enumerate(prompt[1:])]
            return {"prompt_logprobs": [None, *at]}
        sampler = TransformersSampler(model, chat.end, body["max_tokens"], temperature=0)
        sampler.begin([prompt], 1)
        (ids,), (logps,) = sampler.act()
        return {"token_ids": ids, "logprobs": {"token_logprobs": logps}}

    return reply


def test_a_server_answers_as_the_model_here(made, graph, chat):
    exported, model = made
    ours = Retriever.from_pretrained(exported)
    with completing(engine(model, chat)) as address:
        theirs = Retriever.from_pretrained(exported, server=address)
        assert theirs.model is None
        for text in ("When did the dog come back?", "trip", "Who has a garden?"):
            assert theirs.retrieve(graph, text) == ours.retrieve(graph, text)


def test_a_server_with_another_model_is_refused(exported, tiny_model, chat):
    """The base itself, and a merged model, which is the policy."""
    base = load_language_model(str(tiny_model), "float32")
    with (
        completing(engine(base, chat)) as address,
        pytest.raises(ExportError, match=r"has another model than .*Start `vllm serve .*policy/merged --served-model"),
    ):
        Retriever.from_pretrained(exported, server=address)
    with completing(engine(load_language_model(str(exported / "merged"), "float32"), chat)) as address:
        Retriever.from_pretrained(exported, server=address)


def test_what_a_server_can_not_do_is_refused(mine):
    policy = json.loads((mine / "policy.json").read_text())
    policy["config"]["sampling"]["stop_offset"] = -0.5
    (mine / "policy.json").write_text(json.dumps(policy))
    with pytest.raises(ExportError, match=r"its sampling.stop_offset is not 0, which a server can't add"):
        Retriever.from_pretrained(mine, server="http://127.0.0.1:9")


@real
def test_a_real_vllm_server_on_the_export_acts_as_transformers(exported, graph, tmp_path):
    options = ["--model", str(exported / "merged"), "--served-model-name", "cuewalk", "--dtype", "float32"]
    with serving(tmp_path / "server.log", *options, "--max-model-len", "2100") as address:
        ours = Retriever.from_pretrained(exported)
        theirs = Retriever.from_pretrained(exported, server=address)
        asked = [(graph, text) for text in ("When did the dog come back?", "trip", "Who has a garden?")]
        found, expected = theirs.retrieve_batch(asked), ours.retrieve_batch(asked)
        acts = [[step.text for step in one.trajectory.steps] for one in found]
        assert acts == [[step.text for step in one.trajectory.steps] for one in expected] and any(acts)
        assert found == expected


def stopping_after(replies, reply):
    """Reply so many times, then be gone: each connection ends without a word."""
    left = iter(range(replies))
    return lambda body: reply(body) if next(left, None) is not None else None


def said(chat, text):
    """Reply with one action, whatever is asked; to the check with scores that `exported` has too."""
    ids = chat.action(text)
    return {"token_ids": ids, "logprobs": {"token_logprobs": [-0.1] * len(ids)}}


def known(exported, reply):
    """Reply to the check as the export's own model would, else as asked."""
    probe = json.loads((exported / "policy.json").read_text())["probe"]
    at = [{str(id_): {"logprob": logp}} for id_, logp in zip(probe["said"], probe["logps"], strict=True)]
    return lambda body: {"prompt_logprobs": [None, *at]} if "prompt_logprobs" in body else reply(body)


def test_a_server_that_goes_mid_walk_is_an_error_or_a_stated_search(exported, graph, chat):
    """It answers the check and the first turn, and is gone at the second."""
    for fallback in (None, "search"):
        reply = known(exported, stopping_after(1, lambda body: said(chat, "REFINE trip")))
        with completing(reply) as address:
            retriever = Retriever.from_pretrained(exported, server=address, timeout=5, fallback=fallback)
            begun = time.monotonic()
            if fallback is None:
                with pytest.raises(SamplerError, match=r"can't be asked for v1/completions.*Start `vllm serve"):
                    retriever.retrieve(graph, "dog")
            else:
                found = retriever.retrieve(graph, "dog")
                assert [e.id for e in found.entries] == [hit.entry for hit in graph.search("dog", 3)]  # k 1, budget 2
                assert found.ending == "search" and found.trajectory is None
                assert "can't be asked" in found.fallback and found.as_dict()["fallback"] == found.fallback
            assert time.monotonic() - begun < 10


def test_a_server_that_hangs_is_given_up(exported, graph):
    reply = known(exported, lambda body: time.sleep(3))
    with completing(reply) as address:
        retriever = Retriever.from_pretrained(exported, server=address, timeout=0.2, fallback="search")
        begun = time.monotonic()
        assert "APITimeoutError" in retriever.retrieve(graph, "dog").fallback
        assert time.monotonic() - begun < 5  # three tries, and the pauses between them


@pytest.mark.parametrize(
    ("text", "reason"),
    [("I think it was Tuesday.", "unparsable"), ("EXPAND A A A A A A", "unparsable"), ("<|im_end|>\n", "unparsable")],
)
def test_garbage_from_a_model_is_an_answer_that_says_so(exported, graph, chat, text, reason):
    with completing(known(exported, lambda body: said(chat, text))) as address:
        found = Retriever.from_pretrained(exported, server=address).retrieve(graph, "dog")
    assert found.ending in ("malformed", "budget") and found.entries == (graph.entries["e0"],)
    assert all(step.change.bad for step in found.trajectory.steps)


@pytest.mark.parametrize(
    "choice", [{}, {"token_ids": [], "logprobs": {"token_logprobs": []}}, {"text": "STOP"}, "x", 1]
)
def test_garbage_from_a_server_is_an_error_or_a_stated_search(exported, graph, choice):
    with completing(known(exported, lambda body: choice)) as address:
        with pytest.raises(SamplerError):
            Retriever.from_pretrained(exported, server=address).retrieve(graph, "dog")
        found = Retriever.from_pretrained(exported, server=address, fallback="search").retrieve(graph, "dog")
    assert found.ending == "search" and found.fallback


def test_a_model_that_is_busy_is_not_waited_for_forever(exported, graph, monkeypatch):
    retriever = Retriever.from_pretrained(exported, timeout=0.1)
    with retriever._lock, pytest.raises(SamplerError, match=r"other threads used the model for 0.1 s"):
        retriever.retrieve(graph, "dog")
    assert retriever.retrieve(graph, "dog").entries  # and it is free again

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("cuewalk.rl.export.walk_greedily", fail)  # a fault on the way leaves the model free
    with pytest.raises(RuntimeError, match="out of memory"):
        retriever.retrieve(graph, "dog")
    assert not retriever._lock.locked()


def test_a_result_tells_memories_the_walk_and_why_it_stopped(exported, graph, chat):
    actions = iter(("REFINE trip", "STOP"))
    with completing(known(exported, lambda body: said(chat, next(actions)))) as address:
        found = Retriever.from_pretrained(exported, server=address).retrieve(graph, "When did the dog come back?")
    assert found.as_dict() == {
        "memories": [
            {"id": "e0", "date": "2024-05-01T12:00:00", "speaker": "Ann", "sources": ["m1"],
             "text": "Ann (1 May 2024): The dog ran away"},
        ],
        "walk": [
            {"action": "REFINE trip", "added": [], "bad": None, "budget": 1},
            {"action": "STOP", "added": [], "bad": None, "budget": 1},
        ],
        "ending": "stopped",
        "fallback": None,
    }  # fmt: skip


def test_without_a_policy_search_answers_and_says_so(graph):
    found = Retriever.without_policy().retrieve(graph, "dog", budget=0)
    assert [e.id for e in found.entries] == [hit.entry for hit in graph.search("dog", 5)]
    assert found.ending == "search" and found.fallback == "no policy was given" and found.as_dict()["walk"] == []
    assert len(Retriever.without_policy().retrieve(graph, "dog").entries) == 6  # all there are; at most 5 + 6


@pytest.mark.parametrize(("budget", "message"), [(-1, "greater than or equal to 0"), (99, "lower one of them")])
def test_a_budget_that_is_not_allowed_is_refused(graph, budget, message):
    with pytest.raises(ExportError, match=f"budget = {budget}: .*{message}"):
        Retriever.without_policy().retrieve(graph, "dog", budget=budget)
    with pytest.raises(ExportError, match="price = 0.02: this policy was trained without prices"):
        Retriever.without_policy().retrieve(graph, "dog", price=0.02)
    told = Retriever.without_policy()
    told.config = replace(told.config, env=replace(told.config.env, price=0.02))
    with pytest.raises(ExportError, match="price = -1: .*greater than or equal to 0"):
        told.retrieve(graph, "dog", price=-1)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"grammar": "1"}', "\x00"])
def test_a_damaged_policy_file_is_refused(tmp_path, text):
    (tmp_path / "policy.json").write_text(text)
    with pytest.raises(ExportError, match=r"policy.json is damaged .*export the policy again"):
        Retriever.from_pretrained(tmp_path)


def test_a_hub_id_is_fetched_without_pickles(exported, graph, monkeypatch):
    """The hub's client is a stub here: what it is asked for is what is tested."""
    asked = {}

    def snapshot(repository, **options):
        asked.update(options, repository=repository)
        return str(exported)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert Retriever.from_pretrained("ann/my-policy").retrieve(graph, "dog").entries
    assert asked["repository"] == "ann/my-policy"
    from fnmatch import fnmatch

    taken = lambda name: any(fnmatch(name, pattern) for pattern in asked["allow_patterns"])  # noqa: E731
    files = [str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()]
    assert {name for name in files if not taken(name)} == {name for name in files if name.startswith("merged/")} | (
        {"adapter/README.md"} & set(files)
    )
    assert not taken("adapter/adapter_model.bin") and not taken("adapter/training.pkl")


def test_a_hub_id_that_can_not_be_fetched_says_why():
    """HF_HUB_OFFLINE is set in all tests: this is the real client, without a network."""
    with pytest.raises(ExportError, match="'ann/my-policy' is no directory here, and can't be fetched from the hub"):
        Retriever.from_pretrained("ann/my-policy")


@pytest.mark.parametrize("room", [200_000, 5_000_000])
def test_a_disk_that_is_full_leaves_no_half_export(run, tmp_path, room):
    """A limit on the size of a file stands for the full disk: reached by the tokenizer, and by the merged weights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(ExportError, match=r"cannot write the policy to .*large.*nothing of it was kept"):
            export_policy(run[0], tmp_path / "out" / "policy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "out").iterdir()) == []
    assert export_policy(run[0], tmp_path / "out" / "policy").is_dir()
