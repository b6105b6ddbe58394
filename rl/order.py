"""The order of the candidates, fitted and trained once a run: a ranker, and a reader beside it.

With a reader there are three of each: those of the run, and two that are blind to one half of the training
conversations and order it in training, so that there, as in use, nothing is ordered by who saw its evidence.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import Trainer, TrainingArguments
from trl.models.utils import _ForwardRedirection

from cuewalk.env import DataError, Rank, Tasks
from cuewalk.env.tasks import select
from cuewalk.judges import covered
from cuewalk.memory import MemoryGraph
from cuewalk.memory.models import load_tokenizer, well_formed
from cuewalk.rl.adapters import new_adapter
from cuewalk.rl.config import Config
from cuewalk.rl.data import rank_of, reader_of
from cuewalk.rl.ranker import Ranker, first_pool, fit_ranker
from cuewalk.rl.reading import Reading, fit_reading, texts
from cuewalk.rl.run import MetricsLog, run_trainer, trainer_defaults
from cuewalk.rl.scoring import shares_prompts
from cuewalk.rl.warm_start import collate, teach_scores

OTHERS, HARDEST = 5, 16  # beside one that holds evidence: so many candidates of the best so many that hold none
SHARPNESS = 0.25  # of the softmax over log-likelihoods; learnt beside the adapter it stayed there


def blind_parts(config: Config, run: Path, tasks: Tasks) -> dict[Path, list[str]]:
    """Return which conversations a folder's ranker and reader don't see; nothing without a reader, or for just one."""
    ids = list(tasks.conversations)
    parts = (ids[::2], ids[1::2]) if config.env.order == "reader" and len(ids) > 1 else ()
    return {run / "blind" / str(number): part for number, part in enumerate(parts)}


def training_rank(config: Config, run: Path, tasks: Tasks) -> Rank | None:
    """Return what orders the candidates of training walks: each conversation's blind rank where there is one."""
    if not (parts := blind_parts(config, run, tasks)):
        return rank_of(config, run)
    ranks = readings(config, parts)
    return lambda graph, *state: ranks[graph.conversation.id](graph, *state)


def fit_order(config: Config, run: Path, tasks: Tasks, graphs: Mapping[str, MemoryGraph]) -> None:
    """Fit the ranker and, where `env.order` wants one, its reader; what is there already is kept.

    A DataError where the training questions can't tell candidates with evidence from those without.
    """
    state, blind = PartialState(), blind_parts(config, run, tasks)
    for folder, hidden in {**blind, run: []}.items():
        fit_part(config, folder, hidden, tasks, graphs)
    with state.main_process_first():
        if config.env.order == "reader" and Ranker.load(run / "ranker.json").reading is None:
            weights = fit_reading(readings(config, blind or {run: [*tasks.conversations]}), tasks, graphs, config.env)
            for folder in (*blind, run):  # the run's own last: then all is there
                replace(Ranker.load(folder / "ranker.json"), reading=weights).save(folder / "ranker.json")


def fit_part(
    config: Config, folder: Path, hidden: Sequence[str], tasks: Tasks, graphs: Mapping[str, MemoryGraph]
) -> None:
    """Fit a folder's ranker, and train its reader, on all but the hidden conversations."""
    state, seen = PartialState(), [q.id for q in tasks.questions if q.conversation_id not in hidden]
    own = select(tasks, ids=seen)
    with state.main_process_first():
        try:
            if not (folder / "ranker.json").exists():
                fit_ranker(own, graphs, config.env).save(folder / "ranker.json")
        except DataError:
            if config.env.order != "search":  # else it is a row of the evaluation, and left out there
                raise
    if config.env.order == "reader" and config.reading.epochs:
        if not (folder / "reader" / "adapter_config.json").exists():
            train_reader(config, folder, reading_rows(config, own, graphs, Ranker.load(folder / "ranker.json")))
        state.wait_for_everyone()


def readings(config: Config, parts: Mapping[Path, Sequence[str]]) -> dict[str, Reading]:
    """Return the ranker and reader of each folder by the conversations that it is to order."""
    found = dict[str, Reading]()
    for folder, ids in parts.items():
        found |= dict.fromkeys(ids, Reading(Ranker.load(folder / "ranker.json"), reader_of(config, folder)))
    return found


def reading_rows(config: Config, tasks: Tasks, graphs: Mapping[str, MemoryGraph], ranker: Ranker) -> list[list[Any]]:
    """Return what a reader learns from, `reading.epochs` rows a question: a candidate that holds evidence, then others.

    Of each candidate: `input_ids` of its text and the question, and the `positions` and `targets` of the question's.
    The first search counts as candidates too; a question of which nothing is found makes no row.
    """
    draw, tokenizer = random.Random(f"reading {config.seed}"), load_tokenizer(config.model)

    def ids(text: str) -> list[int]:
        return list(tokenizer(well_formed(text), add_special_tokens=False, split_special_tokens=True)["input_ids"])

    rows = []
    for question in tqdm(tasks.questions, desc="reading rows", unit="question", disable=None):
        graph, wanted = graphs[question.conversation_id], set(tasks.gold[question.id].evidence)
        working, links, _ = first_pool(graph, question, tasks.gold[question.id], config.env)
        best = np.argsort(-ranker(graph, question.text, working, links), kind="stable")
        found = [*working, *(links[place].entry for place in best)]
        holding = [entry for entry in found if not covered(graph, [entry]).isdisjoint(wanted)]
        others = [entry for entry in found if entry not in holding][:HARDEST]
        for _ in range(config.reading.epochs if holding and len(others) >= OTHERS else 0):
            row = []
            for entry in (draw.choice(holding), *draw.sample(others, OTHERS)):
                read, asked = map(ids, texts(graph.entries[entry], question.text))
                positions = list(range(len(read), len(read) + len(asked)))
                row.append({"input_ids": read + asked, "positions": positions, "targets": [[id_] for id_ in asked]})
            rows.append(row)
    return rows


class ReadTrainer(Trainer):  # type: ignore[misc]
    """A softmax over each row's SHARPNESS · log P(question | candidate), as DPR's over scores (arXiv 2004.04906)."""

    plain = False  #: As of `TeachTrainer`.

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Return the loss of one batch, log(OTHERS + 1) = 1.79 where nothing is known."""
        inner = self.accelerator.unwrap_model(model)
        logps = _ForwardRedirection()(model, inner, teach_scores, inner, inputs, self.plain)
        said = torch.zeros(len(inputs["input_ids"]), device=logps.device).index_add(0, inputs["rows"], logps)
        loss: torch.Tensor = -(SHARPNESS * said.view(-1, OTHERS + 1)).log_softmax(1)[:, 0].mean()
        return loss


def train_reader(config: Config, folder: Path, rows: list[list[dict[str, Any]]]) -> None:
    """Train an adapter to read and save it as `folder/reader`; goes on from a checkpoint. A DataError without rows."""
    if not rows:
        raise DataError(f"reading.epochs = {config.reading.epochs}, but no training question has evidence among its "
                        f"candidates: set it to 0, or take env.order = ranker, in another run_dir")  # fmt: skip
    own = {"learning_rate": config.reading.learning_rate, "per_device_train_batch_size": 4, "num_train_epochs": 1,
           "warmup_steps": 10, "save_steps": 25, "save_total_limit": 1, "remove_unused_columns": False}  # fmt: skip
    trainer = ReadTrainer(
        model=new_adapter(config),
        args=TrainingArguments(**trainer_defaults(folder, "reading", config), **own),
        train_dataset=rows,
        data_collator=lambda batch: collate([candidate for row in batch for candidate in row]),
        callbacks=[MetricsLog(folder / "metrics.jsonl", "reading")],
    )
    trainer.plain = not shares_prompts(trainer.model, config.sampling.max_tokens)
    run_trainer(trainer, folder / "reader")
