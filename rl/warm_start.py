"""The warm start: supervised learning on oracle picks, with TRL's SFTTrainer."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm
from trl import SFTConfig, SFTTrainer
from trl.models.utils import _ForwardRedirection

from cuewalk.env import Expand, Gold, RetrievalEnv, Stop, Tasks, format_action
from cuewalk.judges import covered
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
    `marks` are the positions where candidates' lines end, and `held` says which of them hold missing evidence.

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
        marks, held = _marked(observation, len(ids), env, gold, chat)
        ended = False
        while not ended:
            action, named = _filled(oracle_action(env, gold), env, config.warm_start.picks)
            said = chat.action(format_action(action))
            positions += range(len(ids), len(ids) + len(said))
            targets += _targets(said, action, named, chat)
            observation, _, ended, _, _ = env.step(format_action(action))
            ids += said if ended else [*said, *chat.following(observation)]
            if not ended:
                more = _marked(observation, len(ids), env, gold, chat)
                marks, held = marks + more[0], held + more[1]
        rows.append({"input_ids": ids, "positions": positions, "targets": targets, "marks": marks, "held": held})
        bar.update()
    bar.close()
    if any(wanted.values()):
        raise ConfigError(
            f"config: warm_start.rows = {config.warm_start.rows} (stop_share {config.warm_start.stop_share}), but only "
            f"{len(rows)} rows can be made of {len(tasks.questions)} questions and k in {config.warm_start.k} "
            f"(short of {wanted[True]} that stop at once, {wanted[False]} that expand); lower rows or change stop_share"
        )
    return rows


def _marked(observation: str, length: int, env: RetrievalEnv, gold: Gold, chat: Chat) -> tuple[list[int], list[bool]]:
    """Return where the lines of candidates end, in ids that end with the observation; and which hold missing gold."""
    missing, links = set(gold.evidence) - covered(env.graph, env.state.working), dict(env.state.frontier)
    marks = chat.marks(observation)
    held = [not missing.isdisjoint(covered(env.graph, [links[label].entry])) for label in marks]
    return [length + back for back in marks.values()], held


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
    """SFT with a set likelihood at action positions, -log Σ_{right ids} π(id), and a pointwise loss at the marks.

    The loss is the mean over the first ids of actions, where it is decided whether to stop, and that over their other
    ids, so that letters don't drown what one id decides; and the mean over the marks. Only these positions go through
    the vocabulary head; TRL sends all of them, completion-only loss or not.
    """

    pointwise = 0.0  #: Weight of the loss at the marks.
    verdicts = (0, 1)  #: The ids of yes and no.
    plain = False  #: The model's hidden states through its head are not its logits.

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Return the loss of one batch."""
        inner = self.accelerator.unwrap_model(model)
        logps, said = _ForwardRedirection()(model, inner, teach_scores, inner, inputs, self.verdicts, self.plain)
        begins = inputs["begins"]
        loss: torch.Tensor = -logps[begins].mean() - logps[~begins].mean()
        held, metrics = inputs["held"], self._metrics["train"]
        metrics["certain"].append(float((logps.exp() > 0.5).float().mean()))
        if self.pointwise and len(held):
            loss = loss + self.pointwise * binary_cross_entropy_with_logits(said, held)
            for name, of in (("evidence", held == 1), ("other", held == 0)):
                if of.any():
                    metrics[f"marked/{name}"].append(said[of].sigmoid().mean().item())
        return loss


def teach_scores(
    model: Any, inputs: dict[str, Any], verdicts: tuple[int, int], plain: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log Σ_{right ids} π(id) at a batch's action positions, (N,), and yes against no at its marks, (M,).

    Both float32; `verdicts` are the ids of yes and no. `plain` sends every position through the head.
    """
    decoder, head = decoder_and_head(model)
    asked = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "use_cache": False}
    states = model(**asked).logits if plain else decoder(**asked).last_hidden_state
    before, marked = states[inputs["rows"], inputs["positions"] - 1], states[inputs["mark_rows"], inputs["marks"]]
    if not plain:
        before, marked = head(before), head(marked)
    right = before.float().log_softmax(-1).gather(1, inputs["targets"]).masked_fill(~inputs["is_target"], -torch.inf)
    yes, no = marked[:, list(verdicts)].float().T
    return right.logsumexp(1), yes - no


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows on the right and list their positions.

    Of actions: `rows`, `positions`, `begins` (N,), `targets` (N, most); of lines: `mark_rows`, `marks`, `held` (M,).
    """
    ids, valid = pad_rows([row["input_ids"] for row in rows], "cpu")
    places = torch.tensor([(i, position) for i, row in enumerate(rows) for position in row["positions"]])
    begins = [position - 1 not in set(row["positions"]) for row in rows for position in row["positions"]]
    marks = torch.tensor([(i, m) for i, row in enumerate(rows) for m in row["marks"]], dtype=torch.long).reshape(-1, 2)
    targets, is_target = pad_rows([right for row in rows for right in row["targets"]], "cpu")
    return {
        "input_ids": ids,
        "attention_mask": valid,
        "rows": places[:, 0],
        "positions": places[:, 1],
        "targets": targets,
        "is_target": is_target.bool(),
        "begins": torch.tensor(begins),
        "mark_rows": marks[:, 0],
        "marks": marks[:, 1],
        "held": torch.tensor([float(held) for row in rows for held in row["held"]]),
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
    trainer.pointwise, trainer.verdicts = config.warm_start.pointwise, chat.verdicts
    run_trainer(trainer, run / "warm_start")
