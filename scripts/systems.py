"""The systems of a comparison: which there are, what each needs, and how it is loaded."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pydantic.dataclasses
from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from cuewalk.env import EnvConfig, Gold, Rank
from cuewalk.env.render import RENDERER
from cuewalk.env.tasks import select
from cuewalk.judges import TrajectoryJudge
from cuewalk.memory import SentenceEncoder
from cuewalk.memory.config import ModelConfig
from cuewalk.memory.endpoint import Endpoint
from cuewalk.memory.models import load_tokenizer
from cuewalk.memory.reader import LocalReader
from cuewalk.rl.config import Config, ConfigError, check_options
from cuewalk.rl.data import Memories, load_graphs, load_part, rank_of
from cuewalk.rl.ranker import Ranker
from cuewalk.rl.transcript import Chat
from cuewalk.scripts import baselines
from cuewalk.scripts import retrievers as kinds
from cuewalk.scripts.baselines import expand_likely, searching_oracle
from cuewalk.scripts.blocks import Retrieve
from cuewalk.scripts.evaluate import TOP_K, choose_threshold
from cuewalk.scripts.walkers import PromptedPolicy, TrainedPolicy, Walker


@pydantic.dataclasses.dataclass(frozen=True)
class CompareConfig:
    """What is compared, the section `compare:` of a configuration."""

    systems: tuple[str, ...] | None = None  #: By name; null takes every one that has what it needs.
    #: `all` of the part `evaluation.part`, or a number n: the first n by the digest of their ids.
    questions: PositiveInt | Literal["all"] = "all"
    reader: str | None = None  #: A local model that answers from what was found, and decides in xMemory's stage II.
    endpoint: ModelConfig | None = None  #: Of the prompted policy, and of the strict judge.
    judge: bool = False  #: Let the endpoint judge the reader's answers.
    #: So many questions that nothing answers are asked too, of LoCoMo or LongMemEval: does the reader say so?
    unanswerable: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.judge and (self.reader is None or self.endpoint is None):
            raise ValueError("compare.judge needs compare.reader, whose answers it judges, and compare.endpoint")
        if self.unanswerable and self.reader is None:
            raise ValueError("compare.unanswerable needs compare.reader, which answers, or says that nothing does")


def parse_options(config: Config) -> CompareConfig:
    """Return the section `compare:`; a ConfigError where it has an unknown key or a value that is not allowed."""
    check_options(config.compare, CompareConfig, "compare")
    if isinstance(endpoint := config.compare.get("endpoint"), Mapping):
        check_options(endpoint, ModelConfig, "compare.endpoint")
    try:
        return TypeAdapter(CompareConfig).validate_python(config.compare)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in ("compare", *first["loc"]))
        raise ConfigError(f"config: {place}: {first['msg']} (got {first['input']!r})") from error


@dataclass(frozen=True)
class Kit:
    """What systems and measures need, models loaded when they are first used."""

    config: Config
    options: CompareConfig
    gold: Mapping[str, Gold]  #: By question id; for the oracle alone.

    @cached_property
    def chat(self) -> Chat:
        """Return what counts tokens: the policy's tokenizer."""
        return Chat(load_tokenizer(self.config.model))

    @cached_property
    def reader(self) -> LocalReader:
        """Return the reader; a ModelError if it can't be loaded."""
        assert self.options.reader is not None
        return LocalReader.from_pretrained(self.options.reader)

    @cached_property
    def endpoint(self) -> Endpoint:
        """Return the endpoint."""
        assert self.options.endpoint is not None
        return Endpoint(self.options.endpoint)

    @cached_property
    def judge(self) -> TrajectoryJudge:
        """Return what rewards a walk."""
        return TrajectoryJudge(self.config.judge)


@dataclass(frozen=True)
class System:
    """One row of the comparison, loaded when it is run."""

    name: str
    idea: str  #: What it is, in a line.
    key: str  #: All that decides what it finds besides memories and questions.
    load: Callable[[], Retrieve]
    model: bool = False  #: Whether it asks a language model: it is then not warmed up.


def list_systems(kit: Kit) -> dict[str, System]:
    """Return every system that has what it needs, by name, in the order of the table."""
    config, count = kit.config, kit.chat.count
    vectors = kinds.Vectors(Path(config.memory_dir))
    found: dict[str, Retrieve] = {
        "full_context": kinds.FullContext(),
        "random": kinds.RandomEntries(),
        "chunks_500=3": kinds.Chunks(vectors, count, 500, 3),
        "chunks_500=20": kinds.Chunks(vectors, count, 500, 20),
        "chunks_180=20": kinds.Chunks(vectors, count, 180, 20),
        "messages=20": kinds.Chunks(vectors, count, 1, 20),
        "flat_facts": kinds.FlatFacts(),
        "linked_notes": kinds.LinkedNotes(),
        "segments+facts": kinds.SegmentsAndFacts(vectors),
        "tiers": kinds.Tiers(vectors),
        "compressed": kinds.Compressed(vectors),
        "breadth_first": kinds.BreadthFirst(),
        "pagerank": kinds.PageRank(),
        "summaries+facts": kinds.SummariesAndFacts(vectors),
        **({"stage_1": kinds.Backbone()} if config.memory.groups is not None else {}),
        **{f"top_k={k}": kinds.Search(k) for k in TOP_K},
    }
    code = hashlib.sha256(Path(kinds.__file__).read_bytes()).hexdigest()  # a changed rule is another system
    systems = [System(name, _idea(each), f"{each!r} {code}", _given(each)) for name, each in found.items()]
    if kit.options.reader is not None and config.memory.groups is not None:
        idea, key = _idea(kinds.Expanded), f"stage II, reader {kit.options.reader} {code}"
        systems.append(System("stage_1+2", idea, key, lambda: kinds.Expanded(kit.reader), model=True))
    return {system.name: system for system in [*systems, *_walkers(kit)]}


def walking_rules(config: Config) -> tuple[EnvConfig, Rank | None]:
    """Return the environment's rules and rank; in search order where the run directory has no ranker yet."""
    ranked = (Path(config.run_dir) / "ranker.json").exists()
    rules = config.env if ranked else replace(config.env, order="search")
    return rules, rank_of(config, Path(config.run_dir)) if ranked else None


def _walkers(kit: Kit) -> list[System]:
    """Return what walks the environment: scripted, ranker, prompted, trained, oracle."""
    config, options = kit.config, kit.options
    run = Path(config.run_dir)
    rules, rank = walking_rules(config)
    ranker = Ranker.load(run / "ranker.json") if (run / "ranker.json").exists() else None
    key = repr((rules, rank, RENDERER))
    scripted = {
        "stop": (baselines.expand_top(0), "The environment's free first search, kept as it is."),
        "random_walk": (baselines.random_walk, "Candidates taken at random, then a stop."),
        "expand_top=4": (baselines.expand_top(4), "The first four candidates, one whole action, unread."),
    }
    systems = [
        System(name, idea, f"{name} {key}", _given(Walker(policy, rules, rank)))
        for name, (policy, idea) in scripted.items()
    ]
    if ranker is not None:

        def likely() -> Retrieve:
            val = select(load_part(config.data, "val"), evidence=True)
            graphs = load_graphs(config, val.conversations, SentenceEncoder(config.encoder))
            threshold = choose_threshold(ranker, val, Memories(graphs, rules, rank), kit.judge)
            return Walker(expand_likely(ranker, threshold), rules, rank)

        idea = "Candidates that the ranker (and a reader beside it) finds likely; its threshold chosen on validation."
        systems.append(System("ranker", idea, f"ranker {ranker!r} {key}", likely))
    if (endpoint := options.endpoint) is not None:
        idea = f"{_idea(PromptedPolicy)} Here {endpoint.model}."
        prompted = lambda: PromptedPolicy(kit.endpoint, kit.chat.count, rules, rank)  # noqa: E731
        systems.append(System("prompted", idea, f"prompted {endpoint!r} {key}", prompted, model=True))
    if (weights := run / "trained" / "adapter_model.safetensors").exists():

        def trained() -> Retrieve:
            from cuewalk.rl.adapters import load_adapter  # peft is loaded only where an adapter is

            return TrainedPolicy(load_adapter(config, run / "trained"), kit.chat, config.sampling, rules, rank)

        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        whole = repr((digest, config.model, config.dtype, config.sampling, key))
        systems.append(System("trained", f"The policy trained in {run.name}.", whole, trained, model=True))
    gold = kit.gold
    oracle = Walker(searching_oracle, rules, rank, gold)
    return [*systems, System("oracle", "The walker that sees the gold: what the budget can reach.", f"oracle {key}",
                             _given(oracle))]  # fmt: skip


def _given(retrieve: Retrieve) -> Callable[[], Retrieve]:
    return lambda: retrieve


def _idea(system: Any) -> str:
    """Return the first line of a system's docstring."""
    return str(system.__doc__).splitlines()[0]
