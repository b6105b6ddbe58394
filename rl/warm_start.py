"""The warm start: supervised learning on oracle picks, with TRL's SFTTrainer."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from trl import SFTConfig, SFTTrainer
from trl.models.utils import _ForwardRedirection

from cuewalk.env import Expand, RetrievalEnv, Stop, Tasks, format_action
from cuewalk.memory.models import decoder_and_head
from cuewalk.rl.config import Config, ConfigError
from cuewalk.rl.data import Memories
from cuewalk.rl.oracle import oracle_action
from cuewalk.rl.run import MetricsLog, run_trainer, trainer_defaults
from cuewalk.rl.scoring import pad_rows, shares_prompts
from cuewalk.rl.transcript import Chat


def teach_rows(config: Config, tasks: Tasks, memories: Memories, chat: Chat) -> list[dict[str, Any]]:
    """Return training rows: transcripts of the oracle's walks, letters shuffled.

    Each row has `input_ids`, the `positions` of action ids, and for each its `targets`: the ids that are right
    there. A letter's targets are all picks not yet named: any order of the gold letters is right, then the end.

    A ConfigError if there are fewer than `warm_start.rows` (question, k) pairs of a kind to choose from.
    """
    draw = random.Random(f"warm start {config.seed}")
    # Round by round, so that few rows are of many questions: in each, every question once, with a k of its own.
    ks = config.warm_start.k
    pairs = []
    for turn in range(len(ks)):
        asked = [(question, ks[(place + turn) % len(ks)]) for place, question in enumerate(tasks.questions)]
        pairs += draw.sample(asked, len(asked))
    stops = round(config.warm_start.rows * config.warm_start.stop_share)
    wanted = {True: stops, False: config.warm_start.rows - stops}
    rows: list[dict[str, Any]] = []
    bar = tqdm(total=config.warm_start.rows, desc="oracle walks", unit="row", disable=None)
    for number, (question, k) in enumerate(pairs):
        if not any(wanted.values()):
            break
        env = memories.env(question, replace(config.training_rules(number), k=k))
        observation, _ = env.reset(seed=config.seed * 1_000_003 + number, options={"shuffle_labels": True})
        gold = tasks.gold[question.id]
        at_once = isinstance(oracle_action(env, gold), Stop)
        if not wanted[at_once]:
            continue
        wanted[at_once] -= 1
        ids, positions, targets = chat.first(observation), list[int](), list[list[int]]()
        ended = False
        while not ended:
            action, named = _filled(oracle_action(env, gold), env, config.warm_start.picks)
            said = chat.action(format_action(action))
            positions += range(len(ids), len(ids) + len(said))
            targets += _targets(said, action, named, chat)
            observation, _, ended, _, _ = env.step(format_action(action))
            ids += said if ended else [*said, *chat.following(observation)]
        rows.append({"input_ids": ids, "positions": positions, "targets": targets})
        bar.update()
    bar.close()
    if any(wanted.values()):
        raise ConfigError(
            f"config: warm_start.rows = {config.warm_start.rows} (stop_share {config.warm_start.stop_share}), but only "
            f"{len(rows)} rows can be made of {len(tasks.questions)} questions and k in {config.warm_start.k} "
            f"(short of {wanted[True]} that stop at once, {wanted[False]} that expand); lower rows or change stop_share"
        )
    return rows


def _filled(action: Expand | Stop, env: RetrievalEnv, picks: int) -> tuple[Expand | Stop, int]:
    """Fill an expansion up to `picks` labels with the first of the list; return it and how many the oracle named."""
    if isinstance(action, Stop):
        return action, 0
    free = [label for label, _ in env.state.frontier if label not in action.labels]
    labels = (*action.labels, *free[: max(0, min(picks, env.affordable) - len(action.labels))])
    return Expand(labels), len(action.labels)


def _targets(said: Sequence[int], action: Expand | Stop, held: int, chat: Chat) -> list[list[int]]:
    """Return what is right at each id of an action: the id itself, or any letter not yet named of its kind.

    The first `held` letters hold evidence, in any order; those after them fill up, in any order too.
    """
    if isinstance(action, Stop):
        return [[id_] for id_ in said]
    letters = [chat.letters[label] for label in action.labels]
    first = len(said) - 1 - len(letters)
    named = [letters[i:held] if i < held else letters[i:] for i in range(len(letters))]
    return [[id_] for id_ in said[:first]] + named + [[said[-1]]]


class TeachTrainer(SFTTrainer):  # type: ignore[misc]
    """SFT with a set likelihood at action positions, -log Σ_{right ids} π(id).

    The loss is the mean over the first ids of actions, where it is decided whether to stop, and that over their other
    ids, so that letters don't drown what one id decides. Only these positions go through the vocabulary head; TRL sends
    all of them, completion-only loss or not.
    """

    plain = False  #: The model's hidden states through its head are not its logits.

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Return the loss of one batch."""
        inner = self.accelerator.unwrap_model(model)
        logps = _ForwardRedirection()(model, inner, teach_scores, inner, inputs, self.plain)
        self._metrics["train"]["certain"].append(float((logps.exp() > 0.5).float().mean()))
        loss: torch.Tensor = -logps[inputs["begins"]].mean() - logps[~inputs["begins"]].mean()
        return loss


def teach_scores(model: Any, inputs: dict[str, Any], plain: bool = False) -> torch.Tensor:
    """Return log Σ_{right ids} π(id) at a batch's positions, (N,) float32; `plain` sends all through the head."""
    decoder, head = decoder_and_head(model)
    asked = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "use_cache": False}
    states = model(**asked).logits if plain else decoder(**asked).last_hidden_state
    before = states[inputs["rows"], inputs["positions"] - 1]
    logps = (before if plain else head(before)).float().log_softmax(-1)
    right: torch.Tensor = logps.gather(1, inputs["targets"]).masked_fill(~inputs["is_target"], -torch.inf)
    return right.logsumexp(1)


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows on the right and list their `rows`, `positions` and `begins` (N,), and `targets` (N, most)."""
    ids, valid = pad_rows([row["input_ids"] for row in rows], "cpu")
    places = torch.tensor([(i, position) for i, row in enumerate(rows) for position in row["positions"]])
    begins = [position - 1 not in set(row["positions"]) for row in rows for position in row["positions"]]
    targets, is_target = pad_rows([right for row in rows for right in row["targets"]], "cpu")
    return {
        "input_ids": ids,
        "attention_mask": valid,
        "rows": places[:, 0],
        "positions": places[:, 1],
        "targets": targets,
        "is_target": is_target.bool(),
        "begins": torch.tensor(begins),
    }


def warm_start(config: Config, run: Path, model: Any, chat: Chat, rows: list[dict[str, Any]]) -> None:
    """Train the model's adapter on oracle walks and save it as `run/warm_start`; goes on from a checkpoint."""
    defaults = {
        # Small batches and a high rate: at 3e-4 and 8 rows a step, 240 rows teach the words but not the letters.
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "warmup_steps": 5,
        "lr_scheduler_type": "cosine",
        "save_steps": 25,
        "save_total_limit": 1,
    }
    fixed = {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    arguments = SFTConfig(**{**trainer_defaults(run, "sft", config), **defaults, **config.sft, **fixed})
    trainer = TeachTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        data_collator=collate,
        processing_class=chat.tokenizer,
        callbacks=[MetricsLog(run / "metrics.jsonl", "warm_start")],
    )
    trainer.plain = not shares_prompts(model, config.sampling.max_tokens)
    run_trainer(trainer, run / "warm_start")
