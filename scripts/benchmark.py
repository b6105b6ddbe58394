"""Measure speed, each part beside the usual way and beside its floor, in one run: `cuewalk benchmark [PART …]`.

  sample  trajectories: ours, each turn generated from the whole history again, and bare forward passes
  train   one loss and its gradient: ours, TRL's own path on the same rows, and one bare pass over P + G·R tokens
  step    the two together
  env     the environment alone, by memory size and batch; its share of a rollout
  search  dense search beside bare FAISS; the frontier
  build   a memory built, beside encoding its texts
  serve   one question at a time, time by part
  workers two processes of one thread beside one

The model is SmolLM2-135M with LoRA on its upper half, as configs/locomo_cpu.yaml trains it; the memories are the
embedded synthetic ones. All numbers are medians; ratios above 1 mean that ours is faster.
"""

import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from trl import GRPOTrainer

from cuewalk.env import EnvConfig, Expand, Question, RetrievalEnv, Tasks, format_action
from cuewalk.env.environment import step_together
from cuewalk.env.tasks import load_synthetic
from cuewalk.memory import BuildConfig, Conversation, Entry, MemoryGraph, Message, Segment, SentenceEncoder, build_graph
from cuewalk.memory.encoder import FloatArray
from cuewalk.memory.index import HybridIndex
from cuewalk.memory.models import decoder_and_head, load_tokenizer, run_decoder
from cuewalk.memory.records import say
from cuewalk.rl.config import Config, parse_config
from cuewalk.rl.grpo import WalkTrainer, prepare_arguments
from cuewalk.rl.rollout import walk
from cuewalk.rl.sampler import TransformersSampler
from cuewalk.rl.train import new_adapter
from cuewalk.rl.transcript import Chat
from cuewalk.scripts.results import race, table

GROUP = 8
TURNS = 3
ROUNDS = 3
CONFIG = parse_config({"env": {"value_words": 14}, "lora": {"layers_to_transform": list(range(15, 30))}})


@dataclass(frozen=True)
class Script:
    """One trajectory's tokens: the prompt, then actions and what was observed after each (nothing after the last)."""

    prompt: list[int]
    turns: list[tuple[list[int], list[int]]]

    @property
    def completion(self) -> list[int]:
        """Return actions and observations in turn."""
        return [id_ for action, seen in self.turns for id_ in (*action, *seen)]

    @property
    def mask(self) -> list[int]:
        """Return 1 on actions, 0 on observations."""
        return [int(own) for action, seen in self.turns for own in [True] * len(action) + [False] * len(seen)]


@cache
def chat() -> Chat:
    """Return the model's transcript coder."""
    return Chat(load_tokenizer(CONFIG.model))


@cache
def memories() -> tuple[Tasks, dict[str, MemoryGraph]]:
    """Return synthetic questions and their memories."""
    tasks, encoder = load_synthetic("val", 2), SentenceEncoder()
    return tasks, {id_: build_graph(told, encoder) for id_, told in tasks.conversations.items()}


@cache
def policy() -> Any:
    """Return the model with a fresh adapter, in evaluation mode."""
    return new_adapter(CONFIG).eval()


def scripts(groups: int, size: int = GROUP, turns: int = TURNS) -> list[list[Script]]:
    """Return the tokens of scripted walks: one to three random letters a turn; no two of a group are alike."""
    tasks, graphs = memories()
    draw, rules, found = random.Random(0), replace(CONFIG.env, budget=4 * turns, new_lines=2), []
    for question in tasks.questions[:groups]:
        group: dict[tuple[str, ...], Script] = {}
        while len(group) < size:
            env = RetrievalEnv(graphs[question.conversation_id], question, rules)
            prompt, said, parts = chat().first(env.reset(seed=0)[0]), list[str](), list[tuple[list[int], list[int]]]()
            for turn in range(turns):
                letters = draw.sample([label for label, _ in env.state.frontier], draw.choice((1, 1, 2, 3)))
                said.append(format_action(Expand(tuple(letters))))
                observation = env.step(said[-1])[0]
                seen = chat().following(observation) if turn < turns - 1 else []
                parts.append((chat().action(said[-1]), seen))
            group[tuple(said)] = Script(prompt, parts)
        found.append(list(group.values()))
    return found


def sample_ours(model: Any, groups: Sequence[Sequence[Script]]) -> TransformersSampler:
    """Sample with the cache kept across turns; the tokens chosen are the script's."""
    rows = [script for group in groups for script in group]
    sampler = TransformersSampler(model, chat().end, 24, 1.0, torch.Generator().manual_seed(0))
    sampler.begin([group[0].prompt for group in groups], len(groups[0]))
    for turn in range(len(rows[0].turns)):
        actions = [script.turns[turn][0] for script in rows]
        sampler.act([lambda ids, action=action: [action[len(ids)]] for action in actions])  # type: ignore[misc]
        if rows[0].turns[turn][1]:
            sampler.observe(range(len(rows)), [script.turns[turn][1] for script in rows])
    return sampler


def sample_usually(model: Any, groups: Sequence[Sequence[Script]]) -> None:
    """Generate each turn from the whole history again, as TRL's `environment_factory` does inside."""
    rows = [script for group in groups for script in group]
    histories = [list(script.prompt) for script in rows]
    for turn in range(len(rows[0].turns)):
        ids, valid = _left(histories)
        longest = max(len(script.turns[turn][0]) for script in rows)
        model.generate(input_ids=ids, attention_mask=valid, do_sample=True, top_k=0, max_new_tokens=longest,
                       min_new_tokens=longest, pad_token_id=chat().end)  # fmt: skip
        for history, script in zip(histories, rows, strict=True):
            history += [*script.turns[turn][0], *script.turns[turn][1]]


@torch.no_grad()
def sample_bare(model: Any, groups: Sequence[Sequence[Script]]) -> None:
    """Run the same tokens through bare forward passes of even shape: no padding, no choosing."""
    rows = [script for group in groups for script in group]
    decoder, head = decoder_and_head(model)
    cache = DynamicCache(config=model.config)
    length = round(statistics.mean(len(group[0].prompt) for group in groups))
    head(run_decoder(decoder, torch.full((len(groups), length), 5), cache)[:, -1])
    cache.batch_repeat_interleave(len(groups[0]))
    for turn in range(len(rows[0].turns)):
        # An action's last id is computed together with the observation after it, so an action of n needs n - 1 steps.
        for _ in range(max(len(script.turns[turn][0]) for script in rows) - 1):
            head(run_decoder(decoder, torch.full((len(rows), 1), 5), cache)[:, -1])
        if rows[0].turns[turn][1]:
            seen = round(statistics.mean(len(script.turns[turn][1]) + 1 for script in rows))
            head(run_decoder(decoder, torch.full((len(rows), seen), 5), cache)[:, -1])


def _left(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [torch.tensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_side="left")
    valid = pad_sequence([torch.ones_like(t) for t in tensors], batch_first=True, padding_side="left")
    return ids, valid


def sample() -> dict[str, Any]:
    """Sampling, with its growth by group size, turns and questions."""
    rows = []
    for questions, size, turns in ((1, 8, 3), (4, 8, 3), (1, 4, 3), (1, 16, 3), (1, 8, 1), (1, 8, 6)):
        groups = scripts(questions, size, turns)
        model, count = policy(), questions * size
        sampler = sample_ours(model, groups)
        ours, usual, bare = race([partial(way, model, groups) for way in (sample_ours, sample_usually, sample_bare)],
                                 ROUNDS)  # fmt: skip
        rows.append({"benchmark": f"sample, {questions} x {size}, {turns} turns", "unit": "trajectories/s",
                     "ours": count / ours, "baseline": count / usual, "floor": count / bare,
                     "vs_baseline": usual / ours, "vs_floor": bare / ours, "tokens": sampler.tokens,
                     "padding": sampler.padding / (sampler.tokens + sampler.padding)})  # fmt: skip
    return {"rows": rows}


def batch(groups: Sequence[Sequence[Script]]) -> dict[str, Any]:
    """Return the rows as TRL hands them to its loss."""
    rows = [script for group in groups for script in group]
    prompts, prompt_mask = _left([script.prompt for script in rows])
    right = partial(pad_sequence, batch_first=True)
    completions = [torch.tensor(script.completion) for script in rows]
    masks = [torch.tensor(script.mask) for script in rows]
    advantages = torch.tensor([(-1.0) ** place * (1 + place % 3) for place in range(len(rows))])
    return {"prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": right(completions),
            "completion_mask": right([torch.ones_like(row) for row in completions]), "tool_mask": right(masks),
            "advantages": advantages, "num_items_in_batch": torch.tensor(sum(int(m.sum()) for m in masks))}  # fmt: skip


@cache
def trainer() -> WalkTrainer:
    """Return the trainer around the policy; it never trains, its losses are timed."""
    config = replace(CONFIG, grpo={"per_device_train_batch_size": GROUP})
    folder = Path(tempfile.mkdtemp())
    prompts = [[{"role": "user", "content": "?"}]] * GROUP
    return WalkTrainer(model=policy(), args=prepare_arguments(config, folder, GROUP), reward_funcs=lambda **_: [0.0],
                       train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=chat().tokenizer)  # fmt: skip


def train_ours(inputs: dict[str, Any]) -> None:
    """One loss and its gradient, our way."""
    trainer().model.zero_grad()
    trainer()._compute_loss(trainer().model, inputs).backward()


def train_usually(inputs: dict[str, Any]) -> None:
    """One loss and its gradient, TRL's way, without gradient checkpointing (which would make it slower still)."""
    owner = trainer()
    owner.model.zero_grad()
    owner._get_per_token_logps_and_entropies = partial(GRPOTrainer._get_per_token_logps_and_entropies, owner)
    try:
        GRPOTrainer._compute_loss(owner, owner.model, inputs).backward()
    finally:
        del owner._get_per_token_logps_and_entropies


def train_bare(groups: Sequence[Sequence[Script]]) -> None:
    """One bare forward and backward pass over each group's P + G·R tokens, action positions through the head."""
    model = trainer().model
    model.zero_grad()
    decoder, head = decoder_and_head(model)
    for group in groups:
        count = len(group[0].prompt) + sum(len(script.completion) for script in group)
        scored = sum(sum(script.mask) for script in group)
        hidden = decoder(input_ids=torch.full((1, count), 5), use_cache=False).last_hidden_state[0]
        head(hidden[-scored:]).float().log_softmax(-1)[:, 0].sum().backward()


def train() -> dict[str, Any]:
    """The loss of one group, all rows different and half of them alike, and peak memory."""
    rows = []
    for name, groups in (("8 different rows", scripts(1)), ("4 different rows, twice", _doubled(scripts(1)))):
        inputs = batch(groups)
        ours, usual, bare = race([partial(train_ours, inputs), partial(train_usually, inputs),
                                  partial(train_bare, groups)], ROUNDS)  # fmt: skip
        tokens = sum(len(s.prompt) + len(s.completion) for group in groups for s in group)
        rows.append({"benchmark": f"train, {name}", "unit": "groups/s", "ours": 1 / ours, "baseline": 1 / usual,
                     "floor": 1 / bare, "vs_baseline": usual / ours, "vs_floor": bare / ours, "tokens": tokens})  # fmt: skip
    peaks = {way.__name__: _apart(_peak, way.__name__) for way in (train_ours, train_usually)}
    rows.append({"benchmark": "train, peak memory", "unit": "GB", "ours": peaks["train_ours"],
                 "baseline": peaks["train_usually"], "vs_baseline": peaks["train_usually"] / peaks["train_ours"]})  # fmt: skip
    return {"rows": rows}


def _doubled(groups: list[list[Script]]) -> list[list[Script]]:
    return [[script for script in group[: GROUP // 2] for _ in range(2)] for group in groups]


def _apart(task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of this module in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(task, *arguments).result()


def _peak(way: str) -> float:
    """Return the peak memory of one loss, model included, in GB."""
    globals()[way](batch(scripts(1)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def step() -> dict[str, Any]:
    """A whole training step of one group: sampling, loss, gradient."""
    groups = scripts(1)
    inputs, model = batch(groups), trainer().model

    def ours() -> None:
        sample_ours(model, groups)
        train_ours(inputs)

    def usual() -> None:
        sample_usually(model, groups)
        train_usually(inputs)

    def bare() -> None:
        sample_bare(model, groups)
        train_bare(groups)

    seconds = race([ours, usual, bare], ROUNDS)
    return {"rows": [{"benchmark": "step, 1 x 8, 3 turns", "unit": "groups/hour", "ours": 3600 / seconds[0],
                      "baseline": 3600 / seconds[1], "floor": 3600 / seconds[2], "vs_baseline": seconds[1] / seconds[0],
                      "vs_floor": seconds[2] / seconds[0]}]}  # fmt: skip


if __name__ == "__main__":
    import sys
    for name in sys.argv[1:]:
        for row in globals()[name]()["rows"]:
            print({k: round(v,3) if isinstance(v,float) else v for k,v in row.items()}, flush=True)
