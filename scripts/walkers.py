"""Systems that walk the environment, adapted to the one protocol: scripted, trained, and prompted policies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from pydantic import BaseModel

from cuewalk.env import EnvConfig, Gold, Question, Rank, RetrievalEnv, Trajectory
from cuewalk.memory import MemoryGraph
from cuewalk.memory.endpoint import Endpoint, ReplyError, data_line, fill
from cuewalk.rl.config import SamplingConfig
from cuewalk.rl.rollout import walk_greedily
from cuewalk.rl.transcript import Chat
from cuewalk.scripts.baselines import Scripted, run_scripted
from cuewalk.scripts.blocks import Retrieved, entry_blocks
from cuewalk.scripts.measures import read_so_far

NO_GOLD = Gold("", (), 0)
"""What a scripted policy gets in the gold's place, unless it is the oracle."""


def walked(env: RetrievalEnv, trajectory: Trajectory, tokens: int = 0, before: int = 0) -> Retrieved:
    """Return what a walk gathered, in order of entry; a reader's tokens since `before` are added to the policy's."""
    read = read_so_far(env.rank) - before
    return Retrieved(entry_blocks(env.graph, trajectory.working), tokens + read, trajectory)


@dataclass(frozen=True)
class Walker:
    """A scripted policy. The oracle alone is given the gold, by question id."""

    policy: Scripted
    rules: EnvConfig
    rank: Rank | None = None
    gold: Mapping[str, Gold] | None = None

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Walk to the end."""
        before, env = read_so_far(self.rank), RetrievalEnv(graph, question, self.rules, rank=self.rank)
        gold = self.gold[question.id] if self.gold else NO_GOLD
        return walked(env, run_scripted(self.policy, env, gold), before=before)


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy with a local language model, greedy, one question at a time."""

    model: Any
    chat: Chat
    sampling: SamplingConfig
    rules: EnvConfig
    rank: Rank | None = None

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Walk to the end; every token of the transcript counts once."""
        before, env = read_so_far(self.rank), RetrievalEnv(graph, question, self.rules, rank=self.rank)
        (row,) = walk_greedily([env], self.model, self.chat, self.sampling)
        return walked(env, row.trajectory, len(row.prompt) + len(row.completion), before)


class Said(BaseModel):
    """What a prompted model replies."""

    action: str


@dataclass(frozen=True)
class PromptedPolicy:
    """Memora's prompted policy (2026, section 4.1): a model behind an endpoint is shown the walk, and says the action.

    Its words are data: what is no legal action is a bad one, as from any policy, and so is a reply that never obeys
    the schema. An EndpointError if the endpoint can't be asked. Tokens are `count`'s, of each prompt and the action
    said, so that replies from the cache count alike.
    """

    endpoint: Endpoint
    count: Callable[[str], int]
    rules: EnvConfig
    rank: Rank | None = None

    def __call__(self, graph: MemoryGraph, question: Question) -> Retrieved:
        """Walk to the end."""
        before, env = read_so_far(self.rank), RetrievalEnv(graph, question, self.rules, rank=self.rank)
        template = files("cuewalk.scripts").joinpath("prompt_walk.txt").read_text(encoding="utf-8")
        lines = [data_line(shown=line) for line in env.reset()[0].splitlines()]
        tokens = 0
        while env.state.ending is None:
            prompt = fill(template, transcript="\n".join(lines))
            try:
                action = self.endpoint.ask(prompt, Said).action
            except ReplyError:
                action = ""
            tokens += self.count(prompt) + self.count(action)
            observation = env.step(action)[0]
            lines += [data_line(action=action), *(data_line(shown=line) for line in observation.splitlines())]
        return walked(env, env.trajectory(), tokens, before)
