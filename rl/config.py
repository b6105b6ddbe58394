"""One YAML file a job: frozen dataclasses for our knobs, and mappings passed straight to TRL and PEFT."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic.dataclasses
import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from cuewalk.env import EnvConfig
from cuewalk.env.actions import MAX_EXPAND
from cuewalk.judges import JudgeConfig
from cuewalk.memory import BuildConfig


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-3` as text; people mean a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


class ConfigError(ValueError):
    """Raised when a configuration has an unknown key or a value that is not allowed."""


@dataclass(frozen=True)
class DataConfig:
    """Where conversations and questions come from."""

    #: `synthetic` (embedded); `locomo`, `longmemeval`, `perltqa` (see `cuewalk download`); `json` (a file of yours).
    source: Literal["synthetic", "locomo", "longmemeval", "perltqa", "json"] = "synthetic"
    #: The file or its folder; for the downloaded ones the environment variable CUEWALK_DATA where this is null.
    path: str | None = None
    split: str = "conv-4-1-5"  #: Which frozen split of LoCoMo.
    #: How many synthetic ones for train, val and test (there are 24, 4 and 8).
    conversations: tuple[int, int, int] = (8, 2, 4)


@pydantic.dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised learning on oracle picks before GRPO."""

    #: Training rows: one is a question walked by the oracle from one k. 0 leaves the warm start out.
    rows: NonNegativeInt = 800
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (2, 3, 5, 8)  #: First-search sizes of the rows.
    #: Share of rows on which the oracle stops at once. Unweighted, about three quarters: imitation then always stops.
    stop_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    #: Candidates an expansion names at least: the oracle's, then the first of the list (those are learnt soonest).
    picks: Annotated[int, Field(ge=1, le=MAX_EXPAND)] = 1


@pydantic.dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How actions are sampled in training. Evaluation is greedy."""

    engine: Literal["transformers", "vllm"] = "transformers"  #: What samples; evaluation is transformers' always.
    server: str | None = None  #: With `vllm`: address of a running vLLM server; null runs vLLM in this process.
    temperature: PositiveFloat = 1.0  #: Of the softmax; log-probabilities are of the tempered distribution.
    max_action_tokens: Annotated[int, Field(ge=8)] = 24  #: An action longer than this is cut, and so unparsable.
    max_tokens: int = 2048  #: Of a whole transcript.
    replacements: NonNegativeInt = 2  #: How often a group whose rewards are all equal is replaced by another question.
    #: Added to STOP's score where a served policy begins an action; an evaluation says which is best on validation.
    stop_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.server is not None and self.engine != "vllm":
            raise ValueError(f"sampling.server = {self.server!r} needs sampling.engine = vllm")


@pydantic.dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """What is measured."""

    part: Literal["val", "test"] = "test"  #: `val` or `test`. Tune on val; look at test once a reported result.
    #: Rows with a model, and their questions: `all`, `test_200` (a list of LoCoMo's), or the first n by their digests.
    policies: tuple[Literal["untrained", "warm_start", "trained"], ...] = ("untrained", "warm_start", "trained")
    model_questions: PositiveInt | Literal["all", "test_200"] = "all"
    batch: PositiveInt = 16  #: Questions walked in lockstep.
    controls: bool = True  #: The warm start walks validation blind, and with another question, too.


@pydantic.dataclasses.dataclass(frozen=True)
class ReadingConfig:
    """What a reader (`env.order: reader`) learns before it orders candidates."""

    #: Passes over the training questions; 0: it is the base model as it is. Its adapter has the shape of `lora`.
    epochs: NonNegativeInt = 0
    learning_rate: PositiveFloat = 3e-4


@dataclass(frozen=True)
class Config:
    """A whole job. `grpo`, `sft` and `lora` go to TRL's GRPOConfig, SFTConfig and PEFT's LoraConfig as they are."""

    model: str = "smollm2-135m"  #: `smollm2-135m`, a local path or a hub id of an instruct model.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  #: Of the base weights; adapters are float32.
    encoder: str = "minilm"  #: `minilm`, a local path or a hub id.
    run_dir: str = "checkpoints/run"  #: Where this run keeps everything; a later start goes on from what is there.
    memory_dir: str = "checkpoints/memory"  #: Where built memories are kept, by content; shared between runs.
    seed: int = 0  #: Of everything random.
    data: DataConfig = field(default_factory=DataConfig)
    memory: BuildConfig = field(default_factory=BuildConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    #: Budgets and prices that training walks draw from; empty: env.budget and env.price, as evaluation has them.
    budgets: tuple[PositiveInt, ...] = ()
    prices: tuple[NonNegativeFloat, ...] = ()
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    grpo: dict[str, Any] = field(default_factory=dict)
    sft: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    compare: dict[str, Any] = field(default_factory=dict)  #: Of `cuewalk compare`: scripts/systems.py.

    def training_rules(self, draw: int) -> EnvConfig:
        """Return the rules of a training walk; any number may be its draw."""
        budgets, prices = self.budgets or (self.env.budget,), self.prices or (self.env.price,)
        return replace(self.env, budget=budgets[draw % len(budgets)], price=prices[draw // 7 % len(prices)])


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides (values are YAML too).

    A ConfigError if the file is missing or no mapping, a key is unknown, or a value is not allowed.
    """
    path = Path(path)
    if not path.is_file():
        known = ", ".join(str(p) for p in sorted(path.parent.glob("*.yaml"))) or "none beside it"
        raise ConfigError(f"no configuration at {path}; found: {known}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
        for override in overrides:
            _override(tree, override)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} or an override is no YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of {', '.join(f.name for f in fields(Config))}")
    return parse_config(tree)


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Turn a nested mapping into a checked configuration; a ConfigError names an unknown key or a value not allowed."""
    _check_keys(tree, Config, "")
    try:
        return TypeAdapter(Config).validate_python(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"config: {place}: {first['msg']} (got {first['input']!r})") from error


def check_options(options: Mapping[str, Any], owner: type, section: str) -> None:
    """Check the keys of a pass-through mapping against the class that takes them; ConfigError names an unknown one."""
    known = [f.name for f in fields(owner)]
    for key in options:
        if key not in known:
            raise ConfigError(_unknown(f"{section}.{key}", key, known, f"options of {owner.__name__}"))


def config_tree(config: Config) -> dict[str, Any]:
    """Return a configuration as plain data, as `config.json` keeps it."""
    tree: dict[str, Any] = to_jsonable_python(config)
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigError(f"override {override!r}: write section.key=value, for instance env.budget=4")
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {section!r} is no section")
    tree[last] = yaml.load(value, _Loader)


def _check_keys(tree: Mapping[str, Any], owner: Any, prefix: str) -> None:
    known = {f.name: f.type for f in fields(owner)}
    for key, value in tree.items():
        if key not in known:
            raise ConfigError(_unknown(f"{prefix}{key}", str(key), list(known), "known keys"))
        kinds = (known[key], *get_args(known[key]))
        sections = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
        if not sections or (value is None and known[key] not in sections):  # no section, or an optional one left out
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"config: {prefix}{key} is a section; got {value!r}")
        _check_keys(value, sections[0], f"{prefix}{key}.")


def _unknown(place: str, key: str, known: list[str], what: str) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"{what}: {', '.join(sorted(known))}"
    return f"config: unknown key {place!r}; {hint}"
