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

from cuewalk.memory.models import cache_dir

SHOWN = 1000
"""Characters of a bad reply that the model sees again when it is asked anew."""

Reply = TypeVar("Reply", bound=BaseModel)


class EndpointError(RuntimeError):
    """Raised when the endpoint can't be asked: unreachable, refusing, or still failing after retries."""


class ReplyError(ValueError):
    """Raised when a model's replies fail validation, however often it was asked."""


@dataclass
class Usage:
    """What an endpoint was asked: every count is of this process, cached replies apart.

    Attributes:
        calls: Requests that were answered.
        cached: Replies taken from the disk cache.
        prompt_tokens: As the endpoint counts them.
        completion_tokens: Likewise.
        rejected: Replies that failed validation.
        prompt_words: Of the requests that were answered.
        unwritten_words: That their replies stood for without writing them.
    """

    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rejected: int = 0
    prompt_words: int = 0
    unwritten_words: int = 0


def fill(template: str, **values: str) -> str:
    """Fill `{{name}}` places of a prompt in one pass, each value in a fence longer than any run of backticks in it.

    One pass: a value that holds `{{other}}` stays text. A fence that the value can't close: it stays data.

    Raises:
        KeyError: If the template names a value that is not given.
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
    text = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace").decode()
    head, *rest = re.split(r"([<>\[\]|\u2028\u2029\x85])", text)
    return head + "".join(f"\\u{ord(part):04x}" if n % 2 == 0 else part for n, part in enumerate(rest))


class Endpoint:
    """One model behind one endpoint. Safe to call from several threads.

    Args:
        base_url: Such as `http://localhost:8000/v1`.
        model: Its name there.
        timeout: Seconds a request may take.
        attempts: How often a question is asked before a reply that fails validation is given up.
        max_tokens: Of a reply.
        cache: Folder of the replies, by the digest of everything they depend on; the user's cache where None.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        timeout: float = 120.0,
        attempts: int = 3,
        max_tokens: int = 2048,
        cache: str | Path | None = None,
    ) -> None:
        self.model = model
        self.base_url = base_url
        self.usage = Usage()
        self._attempts = attempts
        self._max_tokens = max_tokens
        key = os.environ.get("OPENAI_API_KEY") or "none"  # a local server wants no key, but the client does
        self._client = openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=3)
        # JSONDisk: no pickle is ever read from the folder.
        self._cache = diskcache.Cache(str(cache or cache_dir() / "replies"), disk=diskcache.JSONDisk)
        self._lock = Lock()

    def ask(
        self, prompt: str, schema: type[Reply], check: Callable[[Reply], None] | None = None, unwritten: int = 0
    ) -> Reply:
        """Ask for a reply of this schema; one that fails is told why and asked again.

        Args:
            prompt: The whole prompt; untrusted text in it through `fill`.
            schema: A pydantic model; the endpoint is asked to obey its JSON schema.
            check: Raises ValueError, in words that help the model, on a reply that obeys the schema but is wrong.
            unwritten: Words that the reply stands for (offsets instead of text); counted in `usage`.

        Raises:
            ReplyError: If every attempt fails validation.
            EndpointError: If the endpoint can't be asked.
        """
        messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
        reason = ""
        for attempt in range(self._attempts):
            try:
                text = self._complete(messages, schema, unwritten)
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
                {"role": "assistant", "content": text[:SHOWN]},
                {"role": "user", "content": f"That reply is not valid: {reason}. Reply again, as JSON."},
            ]
        raise ReplyError(
            f"{self.model} at {self.base_url}: no valid reply in {self._attempts} attempts; last: {reason}"
        )

    def _complete(self, messages: list[dict[str, str]], schema: type[BaseModel], unwritten: int) -> str:
        """Return a reply's text, from the cache if this very question was answered before."""
        form = {
            "type": "json_schema",
            "json_schema": {"name": schema.__name__, "schema": _strict(schema), "strict": True},
        }
        asked = [self.base_url, self.model, self._max_tokens, form, messages]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
        if (known := self._cache.get(digest)) is not None:
            with self._lock:
                self.usage.cached += 1
            return str(known)
        try:
            done: Any = self._client.chat.completions.create(  # type: ignore[call-overload]
                model=self.model,
                messages=messages,
                response_format=form,
                temperature=0,
                seed=42,
                max_tokens=self._max_tokens,
            )
        except openai.OpenAIError as error:
            raise EndpointError(
                f"cannot ask {self.model!r} at {self.base_url}: {error}. Is the server up, and does it serve that "
                f"model? What was answered so far is cached: start again to go on"
            ) from error
        text = done.choices[0].message.content or ""
        with self._lock:
            self.usage.calls += 1
            self.usage.prompt_words += sum(len(message["content"].split()) for message in messages)
            self.usage.unwritten_words += unwritten
            if done.usage is not None:
                self.usage.prompt_tokens += done.usage.prompt_tokens
                self.usage.completion_tokens += done.usage.completion_tokens
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
