"""The training job: memories, warm start, GRPO; each part is skipped where the run directory has it."""

import os
from pathlib import Path

# Before trl is imported: no notice that `rollout_func` may change, for its version is pinned.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from accelerate import PartialState
from peft import LoraConfig
from transformers import set_seed
from trl import SFTConfig

from cuewalk.env.tasks import DataError, select
from cuewalk.judges import TrajectoryJudge
from cuewalk.memory import SentenceEncoder
from cuewalk.memory.models import load_tokenizer
from cuewalk.rl.adapters import load_adapter, new_adapter
from cuewalk.rl.config import Config, ConfigError, check_options
from cuewalk.rl.data import Memories, load_graphs, load_part
from cuewalk.rl.grpo import Rollouts, prepare_arguments, train_grpo
from cuewalk.rl.order import fit_order, training_rank
from cuewalk.rl.run import last_step, open_run
from cuewalk.rl.transcript import Chat
from cuewalk.rl.vllm_sampler import check_vllm
from cuewalk.rl.warm_start import teach_rows, warm_start


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
    if config.reading.epochs and config.env.order != "reader":
        raise ConfigError(f"config: reading.epochs needs env.order = reader; it is {config.env.order}: remove it")
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
    fit_order(config, run, tasks, graphs)
    if not config.warm_start.rows and not arguments.max_steps:  # the order alone
        return run
    memories = Memories(graphs, config.env, training_rank(config, run, tasks))
    if config.warm_start.rows and not (run / "warm_start" / "adapter_config.json").exists():
        warm_start(config, run, new_adapter(config), chat, teach_rows(config, tasks, memories, chat))
        state.wait_for_everyone()
    start = run / "warm_start"
    model = load_adapter(config, start, trainable=True) if start.exists() else new_adapter(config)
    train_grpo(config, run, model, Rollouts(config, tasks, memories, chat, judge))
    return run
