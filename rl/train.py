"""The training job: memories, warm start, GRPO; each part is skipped where the run directory has it."""

import os
from pathlib import Path
from typing import Any

# Before trl is imported: no notice that `rollout_func` may change, for its version is pinned.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import set_seed
from trl import SFTConfig

from cuewalk.env.tasks import DataError, select
from cuewalk.judges import TrajectoryJudge
from cuewalk.memory import SentenceEncoder
from cuewalk.memory.models import load_language_model, load_tokenizer
from cuewalk.memory.reader import LocalReader
from cuewalk.rl.config import Config, ConfigError, check_options
from cuewalk.rl.data import Memories, load_graphs, load_part, rank_of
from cuewalk.rl.grpo import Rollouts, prepare_arguments, train_grpo
from cuewalk.rl.ranker import fit_ranker
from cuewalk.rl.reading import fit_reading
from cuewalk.rl.run import last_step, open_run
from cuewalk.rl.transcript import Chat
from cuewalk.rl.vllm_sampler import check_vllm
from cuewalk.rl.warm_start import teach_rows, warm_start

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Every linear module of Llama-like models (Memora's choice); set lora.target_modules for others."""


def train(config: Config) -> Path:
    """Run a whole training job and return its run directory.

    A ConfigError, DataError, ModelError, SamplerError or StoreError before any training, with what to do.
    """
    tasks = select(load_part(config.data, "train"), evidence=True, clean=True)
    if not tasks.questions:
        raise DataError("no training question has gold evidence; `cuewalk build --check FILE` says what a file lacks")
    # Refused before anything is written:
    arguments = prepare_arguments(config, Path(config.run_dir))
    check_options(config.sft, SFTConfig, "sft")
    check_options(config.lora, LoraConfig, "lora")
    for key in ("label_smoothing_factor", "max_length", "remove_unused_columns", "dataset_kwargs"):
        if config.sft.get(key):
            raise ConfigError(f"config: sft.{key} has no effect on rows made for a set likelihood; remove it")
    if config.prices and config.env.price is None:
        raise ConfigError("config: prices needs env.price, the one of them that evaluation and serving tell; set it")
    if config.lora.get("lora_dropout"):
        raise ConfigError("config: lora.lora_dropout must be 0: the sampler and the trainer would see two policies")
    judge = TrajectoryJudge(config.judge)
    chat = Chat(load_tokenizer(config.model))
    state = PartialState(cpu=not torch.cuda.is_available())
    if config.sampling.engine == "vllm":
        check_vllm(config.sampling.server, state.num_processes)
    with state.main_process_first():
        run = open_run(config)
    wants_more = 0 < last_step(run / "grpo") < arguments.max_steps
    if (run / "trained" / "adapter_config.json").exists() and not wants_more:
        return run
    set_seed(config.seed)
    with state.main_process_first():  # the others read what it built
        graphs = load_graphs(config, tasks.conversations, SentenceEncoder(config.encoder))
        if not (run / "ranker.json").exists():
            try:
                ranker = fit_ranker(tasks, graphs, config.env)
                if config.env.order == "reader":
                    own = (tasks, graphs, config.env)  # the reader is let go: the rank loads it again
                    ranker = fit_reading(ranker, LocalReader.from_pretrained(config.model, config.dtype), *own)
                ranker.save(run / "ranker.json")
            except DataError:
                if config.env.order != "search":  # else it is a row of the evaluation, and left out there
                    raise
        memories = Memories(graphs, config.env, rank_of(config, run))
    if config.warm_start.rows and not (run / "warm_start" / "adapter_config.json").exists():
        warm_start(config, run, new_adapter(config), chat, teach_rows(config, tasks, memories, chat))
        state.wait_for_everyone()
    start = run / "warm_start"
    model = load_adapter(config, start, trainable=True) if start.exists() else new_adapter(config)
    train_grpo(config, run, model, Rollouts(config, tasks, memories, chat, judge))
    return run


def new_adapter(config: Config) -> Any:
    """Return the base model with a fresh LoRA adapter, dropout 0."""
    base = load_language_model(config.model, config.dtype)
    defaults = {"r": 16, "lora_alpha": 32, "target_modules": LINEAR, "task_type": "CAUSAL_LM"}
    torch.manual_seed(config.seed)
    return get_peft_model(base, LoraConfig(**{**defaults, **config.lora, "lora_dropout": 0.0}))


def load_adapter(config: Config, path: Path, *, trainable: bool = False) -> Any:
    """Return the base model with a saved adapter."""
    return PeftModel.from_pretrained(load_language_model(config.model, config.dtype), str(path), is_trainable=trainable)
