"""A configuration's questions and memory graphs."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from cuewalk.env import EnvConfig, Question, Rank, RetrievalEnv, Tasks, load_json, load_locomo
from cuewalk.env.datasets import load_longmemeval, load_perltqa
from cuewalk.env.own import load_synthetic
from cuewalk.env.tasks import PARTS, DataError
from cuewalk.memory import Conversation, Encoder, MemoryGraph, build_graph, load_graph, save_graph
from cuewalk.memory.build import build_digest, load_extractor
from cuewalk.memory.models import load_tokenizer
from cuewalk.memory.reader import LocalReader
from cuewalk.rl.config import Config, ConfigError, DataConfig
from cuewalk.rl.ranker import Ranker
from cuewalk.rl.reading import Reading


@dataclass(frozen=True)
class Memories:
    """What a run's environments are made of: graphs by conversation, rules, and the rank if the rules want one."""

    graphs: Mapping[str, MemoryGraph]
    rules: EnvConfig
    rank: Rank | None = None

    def env(self, question: Question, rules: EnvConfig | None = None) -> RetrievalEnv:
        """Return the environment of one question, under other rules where they are given."""
        return RetrievalEnv(self.graphs[question.conversation_id], question, rules or self.rules, rank=self.rank)


def rank_of(config: Config, folder: Path) -> Ranker | Reading | None:
    """Return what orders the candidates in a run, a blind part of one, or a policy; a DataError where it is missing."""
    if config.env.order == "search":
        return None
    ranker = Ranker.load(folder / "ranker.json")
    if config.env.order == "ranker":
        return ranker
    if ranker.reading is None:
        raise DataError(f"the ranker in {folder} has no reader; train again, or take order = ranker in another run_dir")
    return Reading(ranker, reader_of(config, folder))


def reader_of(config: Config, folder: Path) -> LocalReader:
    """Return a folder's reader: the base model, with an adapter where one was trained; a DataError without that."""
    if not config.reading.epochs:
        return LocalReader.from_pretrained(config.model, config.dtype)
    if not (folder / "reader" / "adapter_config.json").exists():
        raise DataError(f"no trained reader in {folder}; train, or export, again")
    from cuewalk.rl.adapters import load_adapter  # peft is loaded only where an adapter is

    return LocalReader(load_adapter(config, folder / "reader"), load_tokenizer(config.model))


def load_part(config: DataConfig, part: str, *, unanswerable: bool = False) -> Tasks:
    """Return the conversations, questions and gold of `train`, `val` or `test`; or the questions that nothing answers.

    A DataError if the data can't be had, a ConfigError if what is asked for does not exist.
    """
    try:
        if unanswerable and config.source not in ("locomo", "longmemeval"):
            raise DataError(f"{config.source} has no unanswerable questions; locomo and longmemeval do")
        if config.source == "synthetic":
            return load_synthetic(part, config.conversations[PARTS.index(part)])
        if config.source == "json" and config.path is not None:
            return load_json(config.path, part)
        if config.source == "json":
            raise DataError("data.path is not set; give the file with your conversations")
        path = config.path or os.environ.get("CUEWALK_DATA")
        if path is None:
            raise DataError(f"no {config.source}: set data.path or the environment variable CUEWALK_DATA to its folder")
        if config.source == "locomo":
            return load_locomo(path, config.split, part, unanswerable=unanswerable)
        if config.source == "longmemeval":
            return load_longmemeval(path, part, unanswerable=unanswerable)
        return load_perltqa(path, part)
    except ValueError as error:
        raise error if isinstance(error, DataError) else ConfigError(f"config: data: {error}") from error


def load_graphs(config: Config, conversations: Mapping[str, Conversation], encoder: Encoder) -> dict[str, MemoryGraph]:
    """Return the memory graph of each conversation: read from `memory_dir` where it was built before, else built."""
    graphs, extractor = {}, load_extractor(config.memory)
    for conversation in tqdm(conversations.values(), desc="memories", unit="conversation", disable=None):
        digest = build_digest(conversation, config.memory, encoder.name)
        safe = re.sub(r"[^\w.-]", "_", conversation.id)[:80]
        folder = Path(config.memory_dir) / f"{safe}-{digest[:12]}"
        if (folder / "memory.sqlite").exists():
            graphs[conversation.id] = load_graph(folder, encoder)
        else:
            graphs[conversation.id] = build_graph(conversation, encoder, config.memory, extractor=extractor)
            save_graph(graphs[conversation.id], folder)
    if counts := extractor.report():
        print("memories, asked of the model:", ", ".join(f"{name} {value:.0f}" for name, value in counts.items()))
    return graphs
