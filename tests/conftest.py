"""A graph small enough to work by hand, and a tiny random language model with a real tokenizer."""

import os
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from cuewalk.env import Gold, Question
from cuewalk.memory import BuildConfig, Conversation, MemoryGraph, Message, build_graph

AXES = ("dog", "garden", "piano", "trip")


class WordEncoder:
    """Unit vectors that can be worked out by hand: one axis a known word, a fifth for texts with none of them.

    It stands for the encoder where a test asserts numbers; the real one is used where its quality matters.
    """

    name = "words"

    def encode(self, texts, *, progress=False):
        rows = []
        for text in texts:
            words = text.lower().replace(":", " ").replace("?", " ").replace(".", " ").split()
            row = [float(words.count(axis)) for axis in AXES]
            rows.append([*row, 0.0 if any(row) else 1.0])
        vectors = np.array(rows, dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def at(day: int, minute: int = 0) -> datetime:
    return datetime(2024, 5, day, 12, minute)


# Two sessions; segments of two messages: s0 = m1 m2, s1 = m3, s2 = m4 m5, s3 = m6.
MESSAGES = (
    Message("m1", "Ann", at(1, 0), "The dog ran away"),
    Message("m2", "Bob", at(1, 1), "He came back on Tuesday"),
    Message("m3", "Ann", at(1, 2), "My garden has a piano"),
    Message("m4", "Bob", at(8, 0), "The trip was long"),
    Message("m5", "Ann", at(8, 1), "We left at noon"),
    Message("m6", "Bob", at(8, 2), "The dog likes the garden"),
)


@pytest.fixture(scope="session")
def encoder() -> WordEncoder:
    return WordEncoder()


@pytest.fixture(scope="session")
def conversation() -> Conversation:
    return Conversation("toy", MESSAGES)


@pytest.fixture(scope="session")
def graph(conversation, encoder) -> MemoryGraph:
    """Entries e0..e5, one a message; `nearest` 1 keeps the links few."""
    return build_graph(
        conversation, encoder, BuildConfig(segment_messages=2, nearest=1, update_threshold=1.01, groups=None)
    )


@pytest.fixture(scope="session")
def question() -> Question:
    return Question("toy:1", "toy", "When did the dog come back?")


@pytest.fixture(scope="session")
def gold() -> Gold:
    return Gold("Tuesday", ("m1", "m2"), category=4)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random two-layer Llama under SmolLM2's own tokenizer, saved as a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from cuewalk.memory.models import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM on a CPU knows none smaller
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def chat(tiny_model):
    from cuewalk.memory.models import load_tokenizer
    from cuewalk.rl.transcript import Chat

    return Chat(load_tokenizer(str(tiny_model)))


@pytest.fixture(scope="session")
def locomo_path() -> Path:
    folder = os.environ.get("CUEWALK_DATA")
    if not folder:
        pytest.skip("CUEWALK_DATA is not set: the real LoCoMo is not here")
    return Path(folder) / "locomo10.json"
