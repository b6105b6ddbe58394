"""What other people get: the model card, and the way to the hub (its client is a stub here)."""

import json
from typing import ClassVar

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError

from cuewalk.memory.models import PACKAGED
from cuewalk.rl import Config, ExportError
from cuewalk.rl.config import DataConfig, config_tree
from cuewalk.scripts.publish import push_policy, write_card

ROW = {"policy": "trained", "n": 98, "recall_at_8": 0.75923, "recall_at_300t": 0.7, "reward": None, "entries": 5.5}


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a card for a base and a source, and gives it as read by the hub's own parser."""

    def write(base="smollm2-135m", source="synthetic", results=True):
        out = tmp_path / "my-policy"
        out.mkdir(exist_ok=True)
        data = DataConfig(source=source, path="/secret/data")
        tree = config_tree(Config(model=base, run_dir="/secret/run", memory_dir="/secret/memory", data=data))
        policy = {
            "base": base,
            "base_digest": "f" * 64,
            "grammar": "1",
            "renderer": "2",
            "config": tree,
        }
        (out / "policy.json").write_text(json.dumps(policy))
        if results:
            data = {"dataset": source, "split": "test", "n": 98}
            found = {"command": "cuewalk evaluate", "commit": "abc", "data": data, "rows": [ROW]}
            (tmp_path / "evaluation.json").write_text(json.dumps(found))
        write_card(tmp_path, out)
        return ModelCard.load(out / "README.md")

    return write


def test_a_card_names_base_licence_results_configuration_and_use(written):
    card = written()
    front = card.data.to_dict()
    assert front["base_model"] == PACKAGED["smollm2-135m"][2] and front["library_name"] == "peft"
    assert front["license"] == "apache-2.0" and "cuewalk" in front["tags"]
    assert "`cuewalk evaluate`, commit abc, synthetic, test (98 questions):" in card.text
    assert "| trained | 98 | 0.759 | 0.700 | – | 5.500 | – |" in card.text  # context_tokens was not measured
    assert 'Retriever.from_pretrained("my-policy")' in card.text and "digest `ffffffffffffffff`" in card.text
    config = yaml.safe_load(card.text.split("```yaml\n")[1].split("```")[0])
    assert config["env"]["budget"] == 6 and config["warm_start"]["rows"] == 800
    assert "/secret" not in card.content


@pytest.mark.parametrize("source", ["locomo", "perltqa"])
def test_weights_trained_on_non_commercial_data_say_so(written, source):
    card = written(source=source)
    assert card.data.license == "cc-by-nc-4.0"
    assert "(CC BY-NC 4.0): these weights are for non-commercial use" in card.text


def test_what_is_not_known_is_not_claimed(written, tmp_path):
    card = written(source="json", results=False)
    assert card.data.license is None and "whose terms are for its maker to state" in card.text
    assert "Not measured yet" in card.text
    assert written(base="ann/model").data.license is None  # the base may allow less than the data
    assert written(base="ann/model").data.base_model == "ann/model"
    local = tmp_path / "base"
    local.mkdir()
    card = written(base=str(local))
    assert card.data.base_model is None and "pass `base=` with yours" in card.text and str(tmp_path) not in card.content


class Hub:
    """The hub's client, as far as it is used."""

    calls: ClassVar = []
    fault = None

    def create_repo(self, repo_id, **options):
        if self.fault:
            raise self.fault
        self.calls.append(("create_repo", repo_id, options))
        return f"https://hub/{repo_id}"

    def upload_folder(self, **options):
        self.calls.append(("upload_folder", options["repo_id"], options["folder_path"]))


def test_a_push_makes_a_private_repository_and_uploads_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("cuewalk.scripts.publish.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    assert push_policy(tmp_path, "ann/policy") == "https://hub/ann/policy"
    made, sent = Hub.calls
    assert made == ("create_repo", "ann/policy", {"private": True, "exist_ok": True})
    assert sent == ("upload_folder", "ann/policy", tmp_path)


def test_a_push_that_is_refused_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("cuewalk.scripts.publish.HfApi", Hub)
    monkeypatch.setattr(Hub, "fault", LocalTokenNotFoundError("no token"))
    with pytest.raises(ExportError, match=r"could not be pushed to 'ann/policy': no token.*hf auth login"):
        push_policy(tmp_path, "ann/policy")


def test_a_push_without_a_network_is_an_error():
    """HF_HUB_OFFLINE is set in all tests: this is the real client, refusing at once."""
    with pytest.raises(ExportError, match="could not be pushed"):
        push_policy("nowhere", "ann/policy")
