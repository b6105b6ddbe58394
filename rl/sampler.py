"""Sampling actions turn by turn: the cache is kept across turns, and a group's prompt is computed once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from cuewalk.memory.models import decoder_and_head, run_decoder
from cuewalk.rl.scoring import pad_rows

Allowed = Callable[[list[int]], list[int] | None]
"""The ids of an action so far -> the ids that may follow, or None where any may."""


@dataclass(eq=False)
class TransformersSampler:
    """Sampling with transformers, on a CPU or a GPU, from a model with or without adapters in evaluation mode.

    Cache slots are laid out alike for all rows, so a row shorter than its neighbours has slots that are masked
    out; positions count a row's own tokens only. An action's last id is computed together with the observation
    that follows it, for no decision hangs on it before. An action ends with the id `end`, or is cut after
    `max_action_tokens`. Temperature 0 takes the likeliest id (log-probabilities are then at temperature 1); any other
    needs a generator.
    """

    model: Any
    end: int
    max_action_tokens: int
    temperature: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.temperature > 0 and self.generator is None:
            raise ValueError("sampling at a temperature needs a generator; pass temperature=0 for the likeliest action")
        self.tokens = 0
        self._decoder, self._head = decoder_and_head(self.model)

    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]], copies: int) -> None:
        """Compute each prompt once and give it `copies` rows, side by side, in the order of the prompts."""
        self._cache = DynamicCache(config=self.model.config)
        self._mask = torch.zeros(len(prompts), 0, dtype=torch.long, device=self.model.device)
        self._logits = self._forward(prompts)
        self._cache.batch_repeat_interleave(copies)
        self._mask = self._mask.repeat_interleave(copies, dim=0)
        self._logits = self._logits.repeat_interleave(copies, dim=0)
        self._last: list[list[int]] = [[]] * len(self._logits)

    @torch.no_grad()
    def act(self, allowed: Sequence[Allowed] | None = None) -> tuple[list[list[int]], list[list[float]]]:
        """Sample one action for each row: its ids (with the end of turn, where it came) and log-probabilities."""
        logits, count = self._logits, len(self._logits)
        ids: list[list[int]] = [[] for _ in range(count)]
        logps: list[list[float]] = [[] for _ in range(count)]
        open_rows = list(range(count))
        while open_rows:
            if allowed is not None:
                logits = logits.clone()
                for row in open_rows:
                    if (may := allowed[row](ids[row])) is not None:
                        kept = logits[row, may].clone()
                        logits[row] = -torch.inf
                        logits[row, may] = kept
            scores = (logits.float() / (self.temperature or 1.0)).log_softmax(-1)
            if self.temperature:
                chosen = torch.multinomial(scores.exp(), 1, generator=self.generator).squeeze(1)
            else:
                chosen = scores.argmax(-1)
            tokens, picked = chosen.tolist(), scores.gather(1, chosen[:, None]).squeeze(1).tolist()
            for row in open_rows:
                ids[row].append(tokens[row])
                logps[row].append(picked[row])
            open_rows = [r for r in open_rows if ids[r][-1] != self.end and len(ids[r]) < self.max_action_tokens]
            if open_rows:
                logits = self._forward([[tokens[row]] if row in open_rows else [] for row in range(count)])
        self._last = [row[-1:] for row in ids]
        return ids, logps

    @torch.no_grad()
    def observe(self, rows: Sequence[int], observations: Sequence[Sequence[int]]) -> None:
        """Keep only these rows (numbered as now), and append what the environment answered."""
        if not rows:
            return
        index = torch.tensor(list(rows), device=self.model.device)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]
        self._logits = self._forward([[*self._last[row], *new] for row, new in zip(rows, observations, strict=True)])

    def _forward(self, new: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append ids to each row (none for some) and return the logits after each row's last one, (B, V)."""
        ids, valid = pad_rows(new, self.model.device)
        lengths = self._mask.sum(1, keepdim=True)
        positions = (lengths + valid.cumsum(1) - 1).clamp(min=0)
        self._mask = torch.cat([self._mask, valid], dim=1)
        self.tokens += int(valid.sum())
        hidden = run_decoder(self._decoder, ids, self._cache, self._mask, positions)
        last = (valid.sum(1) - 1).clamp(min=0)
        logits: torch.Tensor = self._head(hidden[torch.arange(len(ids), device=ids.device), last])
        return logits
