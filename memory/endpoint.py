"""Asking a language model behind an OpenAI-compatible endpoint for JSON: fenced prompts, checked replies, a cache."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import diskcache
import openai
from pydantic import BaseModel, ValidationError

from cuewalk.memory.config import ModelConfig
from cuewalk.memory.models import cache_dir, well_formed

SHOWN = 1000
"""Characters of a bad reply that the model sees again when it is asked anew."""

Reply = TypeVar("Reply", bound=BaseModel)


class EndpointError(RuntimeError):
    """Raised when the endpoint can't be asked: unreachable, refusing, or still failing after retries."""


class ReplyError(ValueError):
    """Raised when a model's replies fail validation, however often it was asked."""


@dataclass
class Usage:
    """What an endpoint was asked: every count is of this process, cached replies apart."""

    calls: int = 0  # requests that were answered
    cached: int = 0  # replies taken from the disk cache
    prompt_tokens: int = 0  # as the endpoint counts them
    completion_tokens: int = 0  # likewise
    rejected: int = 0  # replies that failed validation


def fill(template: str, **values: str) -> str:
    """Fill `{{name}}` places of a prompt in one pass, each value in a fence longer than any run of backticks in it.

    One pass: a value that holds `{{other}}` stays text. A fence that the value can't close: it stays data. A KeyError
    if the template names a value that is not given.
    """

    def place(match: re.Match[str]) -> str:
        value = values[match[1]]
        fence = "`" * max([3, *(1 + len(run) for run in re.findall(r"`+", value))])
        return f"{fence}\n{value}\n{fence}"

    return re.sub(r"\{\{(\w+)\}\}", place, template)


def data_line(**fields: Any) -> str:
    """Return untrusted fields as one line of JSON that can neither leave its line nor hold a special token.

    The brackets that special tokens are made of (`<|im_end|>`, `</s>`, `[INST]`) are written as JSON escapes: an
    endpoint's tokenizer finds none, a model reads them all the same.
    """
    text = well_formed(json.dumps(fields, ensure_ascii=False))
    head, *rest = re.split(r"([<>\[\]|\u2028\u2029\x85])", text)
    return head + "".join(f"\\u{ord(part):04x}" if n % 2 == 0 else part for n, part in enumerate(rest))


class Endpoint:
    """One model behind one endpoint. Safe to call from several threads.

    Replies are kept in the folder `cache` (the user's cache where None), by the digest of all that they depend on.
    """

    def __init__(self, config: ModelConfig, cache: str | Path | None = None) -> None:
        self.config = config
        self.usage = Usage()
        key = os.environ.get("OPENAI_API_KEY") or "none"  # a local server wants no key, but the client does
        self._client = openai.OpenAI(base_url=config.base_url, api_key=key, timeout=config.timeout, max_retries=3)
        # JSONDisk: no pickle is ever read from the folder.
        self._cache = diskcache.Cache(str(cache or cache_dir() / "replies"), disk=diskcache.JSONDisk)
        self._lock = Lock()

    def ask(self, prompt: str, schema: type[Reply], check: Callable[[Reply], None] | None = None) -> Reply:
        """Ask for a reply of this schema, which the endpoint is told; a bad one is told why it is, and asked for again.

        Args:
            prompt: The whole prompt; untrusted text in it through `fill`.
            schema: A pydantic model.
            check: Raises ValueError, in words that help the model, on a reply that obeys the schema but is wrong.

        A ReplyError if every attempt fails validation; an EndpointError if the endpoint can't be asked.
        """
        messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
        reason = ""
        for attempt in range(self.config.attempts):
            try:
                text = self._complete(messages, schema)
            except EndpointError as error:
                # With the bad reply it may no longer fit the model's context: no fault of the endpoint.
                if attempt and isinstance(error.__cause__, openai.BadRequestError):
                    break
                raise
            try:
                reply = schema.model_validate_json(text)
                if check is not None:
                    check(reply)
                return reply
            except ValueError as error:  # pydantic's error is one
                reason = _reason(error)
            with self._lock:
                self.usage.rejected += 1
            messages = [
                *messages[:1],
                {"role": "assistant", "content": data_line(reply=text[:SHOWN])},  # what a memory made it say is fenced
                {"role": "user", "content": f"That reply is not valid: {reason}. Reply again, as JSON."},
            ]
        raise ReplyError(
            f"{self.config.model} at {self.config.base_url}: no valid reply in {self.config.attempts} attempts; "
            f"last: {reason}"
        )

    def _complete(self, messages: list[dict[str, str]], schema: type[BaseModel]) -> str:
        """Return a reply's text, from the cache if this very question was answered before."""
        named = {"name": schema.__name__, "schema": _strict(schema), "strict": True}
        form = {"type": "json_schema", "json_schema": named}
        sizes = {"temperature": 0, "seed": 42, "max_tokens": self.config.max_tokens}
        asked = {"model": self.config.model, "messages": messages, "response_format": form, **sizes}
        whole = json.dumps([self.config.base_url, asked], sort_keys=True)
        digest = hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()
        if (known := self._cache.get(digest)) is not None:
            with self._lock:
                self.usage.cached += 1
            return str(known)
        try:
            done: Any = self._client.chat.completions.create(**asked)  # type: ignore[call-overload]
        except openai.OpenAIError as error:
            raise EndpointError(
                f"cannot ask {self.config.model!r} at {self.config.base_url}: {error}. Is the server up, and does it "
                f"serve that model? What was answered so far is cached: start again to go on"
            ) from error
        text = (done.choices[0].message.content or "") if done.choices else ""
        with self._lock:
            self.usage.calls += 1
            if done.usage is not None:
                self.usage.prompt_tokens += done.usage.prompt_tokens
                self.usage.completion_tokens += done.usage.completion_tokens
        if not text:
            return text  # no reply, and none to keep
        self._cache.add(digest, text)  # of two threads that asked the same, both take the first one's reply
        return str(self._cache.get(digest, text))


def _strict(schema: type[BaseModel]) -> dict[str, Any]:
    """Return a JSON schema in the strict form that endpoints ask for: nothing beyond the named properties."""
    tree = schema.model_json_schema()
    for part in (tree, *tree.get("$defs", {}).values()):
        if "properties" in part:
            part |= {"additionalProperties": False, "required": list(part["properties"])}
    return tree


def _reason(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the reply'}: {first['msg']}"
    return str(error)
