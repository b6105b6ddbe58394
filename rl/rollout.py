"""Trajectories in lockstep: many environments, one sampler, tokens kept as sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cuewalk.env import RetrievalEnv, Trajectory
from cuewalk.env.environment import step_together
from cuewalk.rl.config import SamplingConfig
from cuewalk.rl.sampler import Allowed, fitting_sampler
from cuewalk.rl.transcript import Chat, TranscriptError


class Sampler(Protocol):
    """An engine that samples for rows side by side; `TransformersSampler` says what each method does."""

    tokens: int  #: Computed so far.
    margins: list[float]  #: By how much STOP led at each row's last action; empty where the engine does not tell.

    def begin(self, prompts: Sequence[Sequence[int]], copies: int) -> None:
        """Start `copies` rows from each prompt."""

    def act(self, allowed: Sequence[Allowed] | None = None) -> tuple[list[list[int]], list[list[float]]]:
        """Return an action a row: ids and log-probabilities."""

    def observe(self, rows: Sequence[int], observations: Sequence[Sequence[int]]) -> None:
        """Keep these rows, and append what was observed."""


@dataclass(slots=True)
class Row:
    """One trajectory as tokens: what TRL trains on."""

    env: RetrievalEnv  #: Where it is walked.
    prompt: list[int]  #: Ids of the first observation in its turn.
    completion: list[int] = field(default_factory=list)  #: Actions and observations in turn; ends with an action.
    mask: list[int] = field(default_factory=list)  #: 1 on sampled ids, 0 on observations; as long as `completion`.
    logps: list[float] = field(default_factory=list)  #: The sampler's log-probabilities; 0.0 on observations.
    margins: list[float] = field(default_factory=list)  #: The sampler's of STOP, one an action, where it notes them.

    @property
    def trajectory(self) -> Trajectory:
        """Return what happened, once it has ended."""
        return self.env.trajectory()

    def append(self, ids: Sequence[int], logps: Sequence[float], *, sampled: bool) -> None:
        """Append an action, or what was observed, to the completion."""
        self.completion += ids
        self.mask += [int(sampled)] * len(ids)
        self.logps += logps

    def check_length(self, max_tokens: int) -> None:
        """Raise a TranscriptError where the transcript is longer than `max_tokens`."""
        if (length := len(self.prompt) + len(self.completion)) > max_tokens:
            raise TranscriptError(
                f"question {self.env.question.id!r}: a transcript of {length} tokens, more than sampling.max_tokens = "
                f"{max_tokens}; lower env.frontier_cap, env.value_words or env.abstraction_words, or raise the limit"
            )


def walk(
    groups: Sequence[Sequence[RetrievalEnv]],
    sampler: Sampler,
    chat: Chat,
    *,
    max_tokens: int,
    seeds: Sequence[int] | None = None,
    allow: Callable[[RetrievalEnv], Allowed] | None = None,
) -> list[list[Row]]:
    """Walk all environments to their end, turn by turn.

    Args:
        groups: Environments by question, equally many each; a group starts from one state and one prompt.
        sampler: The engine, with the policy's weights.
        chat: Turns text into ids.
        max_tokens: Of a transcript.
        seeds: One a group: letters are given out at random; None gives them out in order.
        allow: What may follow in a state, where decoding is not free.

    A TranscriptError if a transcript gets longer than `max_tokens`.
    """
    options = {"shuffle_labels": seeds is not None}
    rows: list[Row] = []
    drawn: Sequence[int | None] = seeds or [None] * len(groups)
    for group, seed in zip(groups, drawn, strict=True):
        started = [env.reset(seed=seed, options=options)[0] for env in group]
        prompt = chat.first(started[0])
        rows += [Row(env, list(prompt)) for env in group]
        rows[-1].check_length(max_tokens)
    copies = len(groups[0])
    sampler.begin([row.prompt for row in rows[::copies]], copies)
    live = [row for row in rows if row.env.state.ending is None]  # none with a budget of 0
    while live:
        rules = None if allow is None else [allow(row.env) for row in live]
        actions, logps = sampler.act(rules)
        for row, margin in zip(live, sampler.margins, strict=False):
            row.margins.append(margin)
        answers: dict[int, list[int]] = {}
        stepped = step_together([row.env for row in live], [chat.read(ids) for ids in actions])
        for place, (row, ids, (observation, _, ended, _, _)) in enumerate(zip(live, actions, stepped, strict=True)):
            row.append(ids, logps[place], sampled=True)
            if not ended:
                # A cut action lacks its end of turn: the template's goes in, as an observed id.
                answers[place] = [*([] if ids[-1] == chat.end else [chat.end]), *chat.following(observation)]
                row.append(answers[place], [0.0] * len(answers[place]), sampled=False)
                row.check_length(max_tokens)
        sampler.observe(list(answers), list(answers.values()))
        live = [live[place] for place in answers]
    return [rows[start : start + copies] for start in range(0, len(rows), copies)]


def walk_greedily(
    envs: Sequence[RetrievalEnv],
    model: Any,
    chat: Chat,
    sampling: SamplingConfig,
    allow: Callable[[RetrievalEnv], Allowed] | None = None,
) -> list[Row]:
    """Walk one environment a question as a policy is served: the likeliest actions, letters in order."""
    limit = sampling.max_action_tokens
    stop = (chat.action("STOP")[0], sampling.stop_offset)
    sampler = fitting_sampler(model, sampling.max_tokens)(model, chat.end, limit, 0, None, *stop)
    groups = walk([[env] for env in envs], sampler, chat, max_tokens=sampling.max_tokens, allow=allow)
    return [row for (row,) in groups]
