"""LoRA adapters on the base model: a fresh one, and one read back."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from cuewalk.memory.models import load_language_model
from cuewalk.rl.config import Config

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def new_adapter(config: Config) -> Any:
    """Return the base model with a fresh LoRA adapter, dropout 0; lora.target_modules names others than LINEAR's."""
    base = load_language_model(config.model, config.dtype)
    defaults = {"r": 16, "lora_alpha": 32, "target_modules": LINEAR, "task_type": "CAUSAL_LM"}
    torch.manual_seed(config.seed)
    return get_peft_model(base, LoraConfig(**{**defaults, **config.lora, "lora_dropout": 0.0}))


def load_adapter(config: Config, path: Path, *, trainable: bool = False) -> Any:
    """Return the base model with a saved adapter."""
    return PeftModel.from_pretrained(load_language_model(config.model, config.dtype), str(path), is_trainable=trainable)
