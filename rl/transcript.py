"""Observations as token ids: tokenised once, appended only, untrusted text kept from being special tokens."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from cuewalk.env import LABELS
from cuewalk.memory.models import well_formed


class TranscriptError(ValueError):
    """Raised when a model's tokenizer or a transcript can't be used."""


class Chat:
    """A tokenizer's chat template, cut once into the pieces that stand around observations and actions.

    Sampled ids are kept and never tokenised again, so that what is trained on is what was sampled. The text of an
    observation is encoded with special tokens switched off; only the template's own pieces may hold any.

    Args:
        tokenizer: With a chat template and an end-of-turn token as `eos_token`.

    A TranscriptError if a label is more than one token, or the template does not keep turns in order.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end: int = tokenizer.eos_token_id
        # Those not marked as special would be one token whatever is switched off: Qwen's <tool_call> is one.
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if not token.special]
        longest_first = sorted((text for text in added if len(text.strip()) > 1), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.count = cache(lambda text: len(self.untrusted(text)))  # of tokens; an evaluation counts an entry often
        marks = {"cuewalkfirst": "user", "cuewalkaction": "assistant", "cuewalksecond": "user"}
        turns = [{"role": role, "content": mark} for mark, role in marks.items()]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        parts: list[str] = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                raise TranscriptError(f"{tokenizer.name_or_path}: its chat template drops or reorders turns")
            parts.append(before)
        head, reply, between = parts
        if not between.startswith(tokenizer.eos_token):
            raise TranscriptError(
                f"{tokenizer.name_or_path}: a turn ends with {between[:12]!r}, not with eos_token "
                f"{tokenizer.eos_token!r}; set the tokenizer's eos_token to its end-of-turn token"
            )
        self._head = self._template(head)
        self._reply = self._template(reply)
        self._between = self._template(between[len(tokenizer.eos_token) :])
        self.letters: dict[str, int] = {}
        for label in LABELS:
            ids = self.untrusted(f"EXPAND {label}")[len(self.untrusted("EXPAND")) :]
            if len(ids) != 1:
                raise TranscriptError(
                    f"{tokenizer.name_or_path}: the label {label!r} is {len(ids)} tokens after 'EXPAND', not one; "
                    f"use a model whose tokenizer keeps ' {label}' whole"
                )
            self.letters[label] = ids[0]

    def first(self, observation: str) -> list[int]:
        """Return the prompt: the first observation in its turn, up to where the policy speaks."""
        return [*self._head, *self.untrusted(observation), *self._reply]

    def following(self, observation: str) -> list[int]:
        """Return what stands between the end of an action and the next one."""
        return [*self._between, *self.untrusted(observation), *self._reply]

    def action(self, text: str) -> list[int]:
        """Return an action's ids with its end of turn, as the warm start teaches them."""
        return [*self.untrusted(text), self.end]

    def read(self, ids: Iterable[int]) -> str:
        """Return the text of sampled ids; an end of turn at the end is left out, other special tokens are shown."""
        kept = list(ids)
        return str(self.tokenizer.decode(kept[:-1] if kept and kept[-1] == self.end else kept))

    def untrusted(self, text: str) -> list[int]:
        """Encode text in which nothing may become a special token."""
        ids = self.tokenizer(self._broken(text), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return list(ids)

    def _broken(self, text: str) -> str:
        return self._added.sub(lambda found: f"{found[0][0]} {found[0][1:]}", well_formed(text))

    def _template(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
