"""Trajectories in lockstep: many environments, one sampler, tokens kept as sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cuewalk.env import RetrievalEnv, Trajectory
from cuewalk.rl.grammar import allowed_ids
from cuewalk.rl.sampler import Sampler
from cuewalk.rl.transcript import Chat, TranscriptError


@dataclass(slots=True)
class Row:
    """One trajectory as tokens: what TRL trains on.

    Attributes:
        prompt: Ids of the first observation in its turn.
        completion: Actions and observations in turn; ends with an action.
        mask: 1 on sampled ids, 0 on observations; as long as `completion`.
        logps: The sampler's log-probabilities; 0.0 on observations.
        trajectory: What happened.
    """

    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    trajectory: Trajectory | None = None

    @property
    def finished(self) -> Trajectory:
        """Return the trajectory of a row that has ended."""
        assert self.trajectory is not None
        return self.trajectory


def walk(
    groups: Sequence[Sequence[RetrievalEnv]],
    sampler: Sampler,
    chat: Chat,
    *,
    seeds: Sequence[int],
    shuffle_labels: bool,
    max_tokens: int,
    grammar_tokens: int | None = None,
) -> list[list[Row]]:
    """Walk all environments to their end, turn by turn.

    Args:
        groups: Environments by question, equally many each; a group starts from one state and one prompt.
        sampler: The engine, with the policy's weights.
        chat: Turns text into ids.
        seeds: One a group, of its letters.
        shuffle_labels: Whether letters are given out at random.
        max_tokens: Of a transcript.
        grammar_tokens: Decode under the action grammar, an action no longer than this; None decodes freely.

    Raises:
        TranscriptError: If a transcript gets longer than `max_tokens`.
    """
    options = {"shuffle_labels": shuffle_labels}
    prompts = []
    for group, seed in zip(groups, seeds, strict=True):
        started = [env.reset(seed=seed, options=options)[0] for env in group]
        prompts.append(chat.first(started[0]))
    envs = [env for group in groups for env in group]
    copies = len(groups[0])
    rows = [Row(list(prompt)) for prompt in prompts for _ in range(copies)]
    for env, row in zip(envs, rows, strict=True):
        _check_length(row, env, max_tokens)
    sampler.begin(prompts, copies)
    live = list(range(len(rows)))
    while live:
        rules = None
        if grammar_tokens is not None:
            states = [envs[number].state for number in live]
            rules = [allowed_ids(chat, state, grammar_tokens) for state in states if state is not None]
        actions, logps = sampler.act(rules)
        kept: list[int] = []
        observations: list[list[int]] = []
        for place, (number, ids, scores) in enumerate(zip(live, actions, logps, strict=True)):
            env, row = envs[number], rows[number]
            _append(row, ids, scores, sampled=True)
            observation, _, ended, _, _ = env.step(chat.read(ids))
            if ended:
                row.trajectory = env.trajectory()
                continue
            # A cut action lacks its end of turn: the template's goes in, as an observed id.
            answer = [*([] if ids[-1] == chat.end else [chat.end]), *chat.following(observation)]
            _append(row, answer, [0.0] * len(answer), sampled=False)
            _check_length(row, env, max_tokens)
            kept.append(place)
            observations.append(answer)
        sampler.observe(kept, observations)
        live = [live[place] for place in kept]
    return [rows[start : start + copies] for start in range(0, len(rows), copies)]


def _append(row: Row, ids: Sequence[int], logps: Sequence[float], *, sampled: bool) -> None:
    row.completion += ids
    row.mask += [int(sampled)] * len(ids)
    row.logps += logps


def _check_length(row: Row, env: RetrievalEnv, max_tokens: int) -> None:
    length = len(row.prompt) + len(row.completion)
    if length > max_tokens:
        raise TranscriptError(
            f"question {env.question.id!r}: a transcript of {length} tokens, more than sampling.max_tokens = "
            f"{max_tokens}; lower env.frontier_cap, env.value_words or env.abstraction_words, or raise the limit"
        )
