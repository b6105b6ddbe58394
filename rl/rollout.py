"""Trajectories in lockstep: many environments, one sampler, tokens kept as sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cuewalk.env import RetrievalEnv, Trajectory
from cuewalk.rl.config import SamplingConfig
from cuewalk.rl.grammar import allowed_ids
from cuewalk.rl.sampler import Sampler, TransformersSampler
from cuewalk.rl.transcript import Chat, TranscriptError


@dataclass(slots=True)
class Row:
    """One trajectory as tokens: what TRL trains on.

    Attributes:
        env: Where it is walked.
        prompt: Ids of the first observation in its turn.
        completion: Actions and observations in turn; ends with an action.
        mask: 1 on sampled ids, 0 on observations; as long as `completion`.
        logps: The sampler's log-probabilities; 0.0 on observations.
    """

    env: RetrievalEnv
    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    @property
    def trajectory(self) -> Trajectory:
        """Return what happened, once it has ended."""
        return self.env.trajectory()


def walk(
    groups: Sequence[Sequence[RetrievalEnv]],
    sampler: Sampler,
    chat: Chat,
    *,
    max_tokens: int,
    seeds: Sequence[int] | None = None,
    grammar_tokens: int | None = None,
) -> list[list[Row]]:
    """Walk all environments to their end, turn by turn.

    Args:
        groups: Environments by question, equally many each; a group starts from one state and one prompt.
        sampler: The engine, with the policy's weights.
        chat: Turns text into ids.
        max_tokens: Of a transcript.
        seeds: One a group: letters are given out at random; None gives them out in order.
        grammar_tokens: Decode under the action grammar, an action no longer than this; None decodes freely.

    Raises:
        TranscriptError: If a transcript gets longer than `max_tokens`.
    """
    options = {"shuffle_labels": seeds is not None}
    prompts: list[list[int]] = []
    rows: list[Row] = []
    drawn: Sequence[int | None] = seeds or [None] * len(groups)
    for group, seed in zip(groups, drawn, strict=True):
        started = [env.reset(seed=seed, options=options)[0] for env in group]
        prompts.append(chat.first(started[0]))
        rows += [Row(env, list(prompts[-1])) for env in group]
        _check_length(rows[-1], max_tokens)
    copies = len(groups[0])
    sampler.begin(prompts, copies)
    live = rows
    while live:
        rules = None
        if grammar_tokens is not None:
            rules = [allowed_ids(chat, row.env.state, grammar_tokens) for row in live]
        actions, logps = sampler.act(rules)
        kept: list[int] = []
        observations: list[list[int]] = []
        for place, (row, ids, scores) in enumerate(zip(live, actions, logps, strict=True)):
            _append(row, ids, scores, sampled=True)
            observation, _, ended, _, _ = row.env.step(chat.read(ids))
            if ended:
                continue
            # A cut action lacks its end of turn: the template's goes in, as an observed id.
            answer = [*([] if ids[-1] == chat.end else [chat.end]), *chat.following(observation)]
            _append(row, answer, [0.0] * len(answer), sampled=False)
            _check_length(row, max_tokens)
            kept.append(place)
            observations.append(answer)
        sampler.observe(kept, observations)
        live = [live[place] for place in kept]
    return [rows[start : start + copies] for start in range(0, len(rows), copies)]


def walk_greedily(
    envs: Sequence[RetrievalEnv], model: Any, chat: Chat, sampling: SamplingConfig, *, grammar: bool = False
) -> list[Row]:
    """Walk one environment a question as a policy is served: the likeliest actions, letters in order."""
    limit = sampling.max_action_tokens
    sampler = TransformersSampler(model, chat.end, limit, temperature=0)
    rules = limit if grammar else None
    groups = walk([[env] for env in envs], sampler, chat, max_tokens=sampling.max_tokens, grammar_tokens=rules)
    return [row for (row,) in groups]


def _append(row: Row, ids: Sequence[int], logps: Sequence[float], *, sampled: bool) -> None:
    row.completion += ids
    row.mask += [int(sampled)] * len(ids)
    row.logps += logps


def _check_length(row: Row, max_tokens: int) -> None:
    length = len(row.prompt) + len(row.completion)
    if length > max_tokens:
        raise TranscriptError(
            f"question {row.env.question.id!r}: a transcript of {length} tokens, more than sampling.max_tokens = "
            f"{max_tokens}; lower env.frontier_cap, env.value_words or env.abstraction_words, or raise the limit"
        )
