import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cuewalk.env import EnvConfig
from cuewalk.env.render import RENDERER
from cuewalk.memory.models import load_language_model
from cuewalk.rl import Config, ExportError, Retriever, export_policy
from cuewalk.rl.export import GRAMMAR
from cuewalk.rl.ranker import FEATURES, Ranker
from cuewalk.rl.run import open_run
from cuewalk.rl.train import new_adapter

IDS = list(range(5, 25))

LOGITS = """
import sys, torch
from cuewalk.rl import Retriever
retriever = Retriever.from_pretrained(sys.argv[1])
assert "trl" not in sys.modules and "vllm" not in sys.modules
logits = retriever.model(torch.tensor([{ids}])).logits
torch.save(logits, sys.argv[2])
"""


@pytest.fixture
def run(tiny_model, tmp_path):
    """A finished run, its adapter random so that it changes the logits."""
    config = Config(model=str(tiny_model), dtype="float32", run_dir=str(tmp_path / "run"), env=EnvConfig(k=1, budget=2))
    open_run(config)
    model = new_adapter(config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "run" / "trained")
    return tmp_path / "run", model


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
    assert {"grammar", "renderer", "base", "base_digest", "config_digest", "config"} <= set(policy)
    assert not (out / "merged").exists()
    adapter = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == policy["base"]


def test_a_retriever_walks_a_graph(run, tmp_path, graph):
    path, _ = run
    retriever = Retriever.from_pretrained(export_policy(path, tmp_path / "policy", merged=False))
    found = retriever.retrieve(graph, "When did the dog come back?")
    assert found.entries[0].id == "e0"
    assert found.trajectory.question.text == "When did the dog come back?"
    assert retriever.retrieve(graph, "trip", budget=1).trajectory.budget == 1
    asked = [(graph, "When did the dog come back?"), (graph, "trip"), (graph, "Who has a garden?")]
    assert retriever.retrieve_batch(asked, budget=1) == [retriever.retrieve(*one, budget=1) for one in asked]


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
    with pytest.raises(ExportError, match="no trained adapter in .*train first"):
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
