"""Sampling actions turn by turn, each token computed once: a group's trajectories share one sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from cuewalk.memory.models import decoder_and_head, run_decoder
from cuewalk.rl.scoring import shares_prompts

Allowed = Callable[[list[int]], list[int] | None]
"""The ids of an action so far -> the ids that may follow, or None where any may."""

PROMPT, NOBODY = 0, -1  # owners of cache slots; trajectory r of a group owns those marked r + 1


@dataclass(eq=False)
class TransformersSampler:
    """Sampling with transformers, on a CPU or a GPU, from a model with or without adapters in evaluation mode.

    A group is one sequence: its prompt, then whatever its trajectories said and saw, one after another as they went;
    each token sees the prompt and its own trajectory (tree attention). So nothing is computed twice, trajectories of
    unequal length need no padding among them, and one that has ended costs nothing. An action's last id is computed
    together with the observation that follows it, for no decision hangs on it before. An action ends with the id
    `end`, or is cut after `max_action_tokens`. Temperature 0 takes the likeliest id (log-probabilities are then at
    temperature 1); any other needs a generator. `stop_offset` is added to the score of the id `stop` where an action
    begins, after `margins` noted by how much it is above the best other.
    """

    model: Any
    end: int
    max_action_tokens: int
    temperature: float = 1.0
    generator: torch.Generator | None = None
    stop: int | None = None
    stop_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature > 0 and self.generator is None:
            raise ValueError("sampling at a temperature needs a generator; pass temperature=0 for the likeliest action")
        self.tokens = self.padding = 0  # computed, and computed for nothing
        self.margins: list[float] = []
        self._decoder, self._head = decoder_and_head(self.model)

    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]], copies: int) -> None:
        """Compute each prompt once and start `copies` trajectories from it, side by side, in order of the prompts."""
        self._cache = DynamicCache(config=self.model.config)
        self._owner = torch.zeros(len(prompts), 0, dtype=torch.long, device=self.model.device)
        lengths = [len(prompt) for prompt in prompts]
        hidden = self._append([[(id_, PROMPT, place) for place, id_ in enumerate(ids)] for ids in prompts])
        logits = self._head(hidden[range(len(prompts)), [length - 1 for length in lengths]])
        self._logits = logits.repeat_interleave(copies, dim=0)
        self._rows = [(group, copy + 1) for group in range(len(prompts)) for copy in range(copies)]
        self._lengths = [length for length in lengths for _ in range(copies)]  # of the whole transcript, row by row
        self._last: list[list[int]] = [[]] * len(self._rows)

    @torch.no_grad()
    def act(self, allowed: Sequence[Allowed] | None = None) -> tuple[list[list[int]], list[list[float]]]:
        """Sample one action for each row: its ids (with the end of turn, where it came) and log-probabilities."""
        ids: list[list[int]] = [[] for _ in self._rows]
        logps: list[list[float]] = [[] for _ in self._rows]
        logits, open_rows = self._logits, list(range(len(self._rows)))
        while open_rows:
            if allowed is not None:
                free, logits = logits, torch.full_like(logits, -torch.inf)
                for place, row in enumerate(open_rows):
                    may = allowed[row](ids[row])
                    kept = slice(None) if may is None else may
                    logits[place, kept] = free[place, kept]
            if self.stop is not None and not ids[open_rows[0]]:
                others = logits.float().clone()  # in bf16 a small offset would be rounded away
                stop = others[:, self.stop].clone()
                others[:, self.stop] = -torch.inf
                self.margins = (stop - others.amax(1)).tolist()
                others[:, self.stop] = stop + self.stop_offset
                logits = others
            scores = (logits.float() / (self.temperature or 1.0)).log_softmax(-1)
            if self.temperature:
                chosen = torch.multinomial(scores.exp(), 1, generator=self.generator).squeeze(1)
            else:
                chosen = scores.argmax(-1)
            picked = scores.gather(1, chosen[:, None]).squeeze(1).tolist()
            for row, token, logp in zip(open_rows, chosen.tolist(), picked, strict=True):
                ids[row].append(token)
                logps[row].append(logp)
            open_rows = [r for r in open_rows if ids[r][-1] != self.end and len(ids[r]) < self.max_action_tokens]
            if open_rows:
                logits = self._forward(open_rows, [ids[row][-1:] for row in open_rows])
        self._last = [row[-1:] for row in ids]
        return ids, logps

    @torch.no_grad()
    def observe(self, rows: Sequence[int], observations: Sequence[Sequence[int]]) -> None:
        """Keep only these rows (numbered as now), and append what the environment answered."""
        if rows:
            new = [[*self._last[row], *seen] for row, seen in zip(rows, observations, strict=True)]
            self._logits = self._forward(rows, new)
            self._rows = [self._rows[row] for row in rows]
            self._lengths = [self._lengths[row] for row in rows]

    def _forward(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append ids to these rows, at least one to each, and return the logits after each row's last, (rows, V)."""
        parts: list[list[tuple[int, int, int]]] = [[] for _ in self._owner]
        last = []
        for row, ids in zip(rows, new, strict=True):
            group, copy = self._rows[row]
            parts[group] += [(id_, copy, self._lengths[row] + place) for place, id_ in enumerate(ids)]
            self._lengths[row] += len(ids)
            last.append((group, len(parts[group]) - 1))
        groups, places = zip(*last, strict=True)
        logits: torch.Tensor = self._head(self._append(parts)[list(groups), list(places)])
        return logits

    def _append(self, parts: Sequence[Sequence[tuple[int, int, int]]]) -> torch.Tensor:
        """Append (id, owner, position) to each group's sequence; return the hidden states, (groups, longest, H)."""
        filler = (0, NOBODY, 0)
        whole = pad_sequence([torch.tensor([*part, filler]) for part in parts], batch_first=True)[:, :-1]
        for row, part in enumerate(parts):
            whole[row, len(part) :] = torch.tensor(filler)
        ids, owner, positions = whole.to(self.model.device).unbind(-1)
        before, self._owner = self._owner.shape[1], torch.cat([self._owner, owner], dim=1)
        self.tokens += sum(map(len, parts))
        self.padding += ids.numel() - sum(map(len, parts))
        mask = None  # a prompt is an ordinary causal sequence, with what fills it up behind it
        if before:
            seen, asking = self._owner[:, None, None, :], owner[:, None, :, None]
            slots = torch.arange(self._owner.shape[1], device=ids.device)
            mask = ((seen == PROMPT) | (seen == asking)) & (slots <= slots[before:, None])
        return run_decoder(self._decoder, ids, self._cache, mask, positions)


def fitting_sampler(model: Any, max_tokens: int) -> type[TransformersSampler]:
    """Return the sampler for a model and transcripts of so many tokens."""
    return TransformersSampler if shares_prompts(model, max_tokens) else PlainSampler


class PlainSampler(TransformersSampler):
    """The same for models that can't share a prompt: each row's whole text is computed anew for each id."""

    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]], copies: int) -> None:
        """Start `copies` trajectories from each prompt, side by side, in order of the prompts."""
        self._texts = [list(prompt) for prompt in prompts for _ in range(copies)]
        self._rows = [(row, 0) for row in range(len(self._texts))]
        self._lengths, self._last = [0] * len(self._rows), [[]] * len(self._rows)
        self._logits = self._forward(range(len(self._rows)), self._last)

    def _forward(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> torch.Tensor:
        logits: dict[tuple[int, ...], torch.Tensor] = {}  # rows that say the same are computed once
        asked = []
        for row, ids in zip(rows, new, strict=True):
            text = self._texts[self._rows[row][0]]
            text += ids
            asked.append(tuple(text))
            if asked[-1] not in logits:
                self.tokens += len(text)
                ids_now = torch.tensor([text], device=self.model.device)
                logits[asked[-1]] = self.model(input_ids=ids_now, logits_to_keep=1).logits[0, -1]
        return torch.stack([logits[text] for text in asked])
