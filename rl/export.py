"""Exporting a trained policy, and using it: `Retriever` needs neither trl nor vllm."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuewalk.env import Question, Rank, RetrievalEnv, Trajectory
from cuewalk.env.render import RENDERER
from cuewalk.memory import Entry, MemoryGraph
from cuewalk.memory.models import load_language_model, load_tokenizer, weights_digest
from cuewalk.rl.config import Config, config_tree, parse_config
from cuewalk.rl.data import rank_of
from cuewalk.rl.ranker import Ranker
from cuewalk.rl.rollout import walk_greedily
from cuewalk.rl.transcript import Chat

GRAMMAR = "1"


class ExportError(ValueError):
    """Raised when there is nothing to export, or an exported policy can't be used here."""


def export_policy(run: str | Path, out: str | Path, *, merged: bool = True) -> Path:
    """Write a run's trained policy into a new directory.

    It holds `adapter/` (PEFT), `merged/` (a plain model, in the configured dtype), the tokenizer in both, and
    `policy.json`: grammar and renderer version, configuration and its digest, digest of the base weights.

    An ExportError if the run has no trained adapter, or `out` is not empty. Nothing is overwritten.
    """
    run, out = Path(run), Path(out)
    if not (run / "trained" / "adapter_config.json").exists():
        raise ExportError(f"no trained adapter in {run}; train first with `cuewalk train --config …`")
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out} is not empty; nothing was overwritten. Choose a new directory")
    from peft import PeftModel

    config = parse_config(json.loads((run / "config.json").read_text(encoding="utf-8"))["config"])
    ranker = rank_of(config, run)
    tokenizer = load_tokenizer(config.model)
    base = load_language_model(config.model, config.dtype, device="cpu")
    digest = weights_digest(base)
    model = PeftModel.from_pretrained(base, str(run / "trained"))
    for adapter in model.peft_config.values():
        adapter.base_model_name_or_path = config.model  # not this machine's path
    model.save_pretrained(out / "adapter")
    tokenizer.save_pretrained(out / "adapter")
    if merged:
        model.merge_and_unload().save_pretrained(out / "merged")
        tokenizer.save_pretrained(out / "merged")
    tree = config_tree(config)
    policy = {
        "format": 1,
        "grammar": GRAMMAR,
        "renderer": RENDERER,
        "base": config.model,
        "base_digest": digest,
        "config_digest": hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest(),
        "config": tree,
        "data": config.data.source,
    }
    if isinstance(ranker, Ranker):
        ranker.save(out / "ranker.json")
    (out / "policy.json").write_text(json.dumps(policy, indent=1) + "\n", encoding="utf-8")
    return out


@dataclass(frozen=True)
class Retrieval:
    """What a retriever found: entries in order of entry, and the walk that led there."""

    entries: tuple[Entry, ...]
    trajectory: Trajectory


@dataclass
class Retriever:
    """A trained policy in use, greedy.

    Example:
        >>> retriever = Retriever.from_pretrained("policy")  # doctest: +SKIP
        >>> retriever.retrieve(graph, "When did Ann adopt the dog?").entries  # doctest: +SKIP
    """

    model: Any
    chat: Chat
    config: Config
    rank: Rank | None

    @classmethod
    def from_pretrained(cls, path: str | Path, *, base: str | None = None) -> "Retriever":
        """Load an exported policy: the adapter on its base model.

        Args:
            path: A directory that `cuewalk export` wrote.
            base: Name or path of the base model, where it is not to be had under its own name here.

        An ExportError if the directory is no export, of another grammar or renderer, or the base's weights are not
        those that the adapter was trained on; a ModelError if the base can't be loaded.
        """
        path = Path(path)
        if not (path / "policy.json").is_file():
            raise ExportError(f"{path} is no exported policy: policy.json is missing. Make one with `cuewalk export`")
        policy = json.loads((path / "policy.json").read_text(encoding="utf-8"))
        for key, ours in (("grammar", GRAMMAR), ("renderer", RENDERER)):
            if policy[key] != ours:
                raise ExportError(
                    f"{path} speaks {key} {policy[key]!r}, this version of cuewalk {ours!r}; use the version that "
                    f"exported it, or train again"
                )
        from peft import PeftModel

        config = parse_config(policy["config"])
        model = load_language_model(base or policy["base"], config.dtype)
        if weights_digest(model) != policy["base_digest"]:
            raise ExportError(
                f"{path} was trained on other weights than {base or policy['base']!r} has here; pass base= with the "
                f"right ones, or use its merged/ model"
            )
        model = PeftModel.from_pretrained(model, str(path / "adapter")).eval()
        return cls(model, Chat(load_tokenizer(str(path / "adapter"))), config, rank_of(config, path))

    def retrieve(self, graph: MemoryGraph, question: str, *, budget: int | None = None) -> Retrieval:
        """Walk a graph for one question; the budget is that of the training where None."""
        return self.retrieve_batch([(graph, question)], budget=budget)[0]

    def retrieve_batch(self, asked: Sequence[tuple[MemoryGraph, str]], *, budget: int | None = None) -> list[Retrieval]:
        """Walk many, each a graph and a question, in lockstep: the same walks in less time."""
        if not asked:
            return []
        rules = self.config.env if budget is None else replace(self.config.env, budget=budget)
        questions = [(graph, Question("question", graph.conversation.id, text)) for graph, text in asked]
        walkers = [RetrievalEnv(graph, question, rules, rank=self.rank) for graph, question in questions]
        trajectories = [row.trajectory for row in walk_greedily(walkers, self.model, self.chat, self.config.sampling)]
        found = zip(asked, trajectories, strict=True)
        return [Retrieval(tuple(graph.entries[e] for e in taken.working), taken) for (graph, _), taken in found]
