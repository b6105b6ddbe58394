"""A local language model that reads a context: how unsure it is of its answer, how likely it finds a given one."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from cuewalk.memory.models import decoder_and_head, load_language_model, load_tokenizer, run_decoder, well_formed


class TooLong(ValueError):
    """Raised when a text is longer than the model can read."""


@dataclass
class Context:
    """What a reader has read so far, as keys and values; `text` is for people."""

    text: str
    cache: DynamicCache

    @property
    def length(self) -> int:
        """Return the tokens read."""
        return int(self.cache.get_seq_length())


class LocalReader:
    """Reads a context once and asks several things of it; each token goes through the model once.

    Text is encoded with special tokens switched off, whatever it holds. Prompts are plain text, without a chat
    template: so xMemory measures uncertainty, and so a base model can read too. Uncertainty is
    averaged over at most `answer_tokens` greedy tokens.
    """

    answer_tokens = 8

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.tokens = 0  #: That went through the model so far.
        self.limit: int = getattr(model.config, "max_position_embeddings", None) or 10**9
        self._decoder, self._head = decoder_and_head(model)

    @classmethod
    def from_pretrained(cls, name: str, dtype: str = "bfloat16") -> "LocalReader":
        """Load a reader by a model's name (`smollm2-135m`), folder or hub id; a ModelError if that can't be done."""
        return cls(load_language_model(name, dtype), load_tokenizer(name))

    def read(self, text: str) -> Context:
        """Read a new context; a text without a token leaves it empty."""
        context = Context("", DynamicCache(config=self.model.config))
        self.extend(context, text)
        return context

    def extend(self, context: Context, text: str) -> None:
        """Read on: append a text to a context."""
        if ids := self._ids(text):
            self._feed(context, ids)
        context.text += text

    def forget(self, context: Context, length: int) -> None:
        """Cut a context back to its first tokens; `text` is left to the caller."""
        if length < context.length:
            context.cache.crop(length - context.length)  # a negative number: so many are removed

    def uncertainty(self, context: Context, text: str) -> float:
        """Return U: the mean predictive entropy, in nats, of the answer that follows context and text.

        The answer is the model's own greedy one, at most `answer_tokens` long; its end counts as a token. (xMemory's
        code takes the mean negative log-likelihood of the greedy tokens instead; the paper says predictive entropy.)
        The context is left as it was. A ValueError if the text holds no token.
        """
        steps = self._greedy(context, text, self.answer_tokens)
        return sum(-(logp.exp() * logp).sum().item() for _, logp in steps) / len(steps)

    def answer(self, context: Context, text: str, tokens: int = 24) -> str:
        """Return the greedy answer after context and text: its first line, at most so many tokens."""
        ids = [id_ for id_, _ in self._greedy(context, text, tokens)]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip().partition("\n")[0].strip()

    def likelihood(self, context: Context, text: str, answer: str) -> float:
        """Return exp of the mean log-probability of an answer's tokens after context and text, in (0, 1].

        A ValueError if text or answer hold no token.
        """
        return math.exp(self.log_likelihood(context, text, answer) / len(self._some(answer)))

    def log_likelihood(self, context: Context, text: str, answer: str) -> float:
        """Return log P(answer | context, text), in nats; errors as of `likelihood`."""
        length = context.length
        before, after = self._some(text), self._some(answer)
        logp = self._feed(context, [*before, *after[:-1]], len(after)).log_softmax(-1)
        self.forget(context, length)
        return float(logp.gather(-1, torch.tensor(after, device=logp.device)[:, None]).sum())

    def _greedy(self, context: Context, text: str, tokens: int) -> list[tuple[int, torch.Tensor]]:
        """Return the greedy tokens after context and text, each with the log-probabilities it was chosen by."""
        length, steps = context.length, list[tuple[int, torch.Tensor]]()
        logits = self._feed(context, self._some(text))[-1]
        while True:
            logp = logits.log_softmax(-1)
            steps.append((int(logp.argmax()), logp))
            if steps[-1][0] == self.tokenizer.eos_token_id or len(steps) == tokens:
                self.forget(context, length)
                return steps
            logits = self._feed(context, [steps[-1][0]])[-1]

    @torch.no_grad()
    def _feed(self, context: Context, ids: list[int], last: int = 1) -> torch.Tensor:
        """Append ids to a context; return the logits of the last positions, (last, vocabulary)."""
        if context.length + len(ids) > self.limit:
            raise TooLong(f"{context.length + len(ids)} tokens, but this model reads {self.limit}; cut the memories")
        self.tokens += len(ids)
        hidden = run_decoder(self._decoder, torch.tensor([ids], device=self.model.device), context.cache)
        logits: torch.Tensor = self._head(hidden[0, -last:]).float()
        return logits

    def _ids(self, text: str) -> list[int]:
        ids = self.tokenizer(well_formed(text), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return list(ids)

    def _some(self, text: str) -> list[int]:
        if ids := self._ids(text):
            return ids
        raise ValueError(f"{text!r} holds no token; there is nothing to ask after")
