import pickle

import numpy as np
import pytest
import torch

from cuewalk.memory import SentenceEncoder
from cuewalk.memory.models import (
    ModelError,
    load_language_model,
    load_tokenizer,
    resolve_model,
    weights_digest,
)


@pytest.mark.parametrize("name", ["smolm2", "./nowhere", "/no/such/folder", "a/b/c"])
def test_an_unknown_model_names_what_is_known(name):
    with pytest.raises(ModelError, match=f"unknown model '{name}'.*minilm, smollm2-135m"):
        resolve_model(name)


def test_a_hub_id_is_passed_on_and_its_absence_explained():
    assert resolve_model("owner/name") == "owner/name"
    with pytest.raises(ModelError, match="cannot load a language model from 'owner/name'"):
        load_language_model("owner/name")


def test_a_folder_without_a_model_is_explained(tmp_path):
    with pytest.raises(ModelError, match="cannot load a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_the_digest_tells_bases_apart_whatever_the_dtype(tiny_model):
    model = load_language_model(str(tiny_model), "float32")
    digest = weights_digest(model)
    assert weights_digest(load_language_model(str(tiny_model), "bfloat16")) == digest
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert weights_digest(model) != digest


def test_the_digest_ignores_adapters(tiny_model):
    from peft import LoraConfig, get_peft_model

    model = load_language_model(str(tiny_model), "float32")
    digest = weights_digest(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert weights_digest(adapted) == digest


def test_many_queries_are_encoded_at_once_and_remembered(monkeypatch):
    encoder, calls = SentenceEncoder("minilm"), []

    def batch(texts, progress):
        calls.append(len(texts))
        return np.ones((len(texts), 2), dtype=np.float32)

    monkeypatch.setattr(encoder, "_batch", batch)
    queries = [f"query {n}" for n in range(64)]
    encoder.encode(queries)
    for query in queries:
        encoder.encode([query])
    assert calls == [64]


def test_the_real_encoder_gives_unit_vectors_that_know_meaning_and_survive_pickling():
    encoder = SentenceEncoder("minilm")
    vectors = encoder.encode(["a dog ran home", "the puppy came back", "interest rates rose"])
    assert vectors.shape == (3, 384) and vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    again = pickle.loads(pickle.dumps(encoder))
    assert again.encode(["a dog ran home"])[0] == pytest.approx(vectors[0], abs=1e-5)


def test_the_packaged_language_model_knows_what_it_should():
    """The weights are the real ones: SmolLM2-135M-Instruct continues a fact."""
    tokenizer = load_tokenizer("smollm2-135m")
    model = load_language_model("smollm2-135m", "bfloat16")
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


def test_half_a_surrogate_pair_does_not_stop_an_encoder_or_a_tokenizer():
    encoder = SentenceEncoder()
    vectors = encoder.encode(["broken \ud800 text", "broken ? text"])
    assert np.allclose(vectors[0], vectors[1], atol=1e-5)


def test_texts_that_come_a_few_at_a_time_are_encoded_once(monkeypatch):
    encoder, calls = SentenceEncoder(), []
    batch = encoder._batch
    monkeypatch.setattr(encoder, "_batch", lambda texts, progress: calls.append(list(texts)) or batch(texts, progress))
    both = encoder.encode(["a dog", "a cat", "a dog"])
    assert (encoder.encode(["a cat"]) == both[1:2]).all() and (both[0] == both[2]).all()
    assert calls == [["a dog", "a cat"]]
