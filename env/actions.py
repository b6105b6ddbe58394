"""The action grammar: one line, `EXPAND H T` (1 to 4 letters), `REFINE <query>` or `STOP`."""

import re
import string
from dataclasses import dataclass

LABELS = string.ascii_uppercase + string.ascii_lowercase
"""Every label there is. Each must be one token for the policy's tokenizer (checked when one is loaded)."""

MAX_EXPAND = 4

BAD_REASONS = (
    "unparsable", "several_actions", "trailing_text", "over_the_cap", "repeated_label",  # of the text alone
    "unknown_label", "taken_label", "empty_frontier", "repeated_query",  # in this state
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expand:
    """Move these candidates into the working set, best first."""

    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refine:
    """Search again with this query; its new hits become candidates."""

    query: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Keep what was gathered."""


@dataclass(frozen=True, slots=True)
class Bad:
    """Text that is no legal action, under one of `BAD_REASONS`. Data, not an error."""

    reason: str


Action = Expand | Refine | Stop | Bad


def parse_action(text: str) -> Action:
    """Read one action; never raises. White space around the line is ignored, nothing else is."""
    line = text.strip()
    if "\n" in line:
        rest = [part for part in line.splitlines()[1:] if part.strip()]
        several = any(part.split()[0] in ("EXPAND", "REFINE", "STOP") for part in rest)
        return Bad("several_actions" if several else "trailing_text")
    if line == "STOP":
        return Stop()
    if line.startswith("STOP "):
        return Bad("trailing_text")
    if match := re.fullmatch(r"EXPAND((?: [A-Za-z])+)", line):
        labels = tuple(match.group(1).split())
        if len(set(labels)) < len(labels):
            return Bad("repeated_label")
        return Expand(labels) if len(labels) <= MAX_EXPAND else Bad("over_the_cap")
    if re.match(r"EXPAND(?: [A-Za-z])+\b", line):
        return Bad("trailing_text")
    if match := re.fullmatch(r"REFINE (\S.*)", line):
        return Refine(match.group(1))
    return Bad("unparsable")


def format_action(action: Expand | Refine | Stop) -> str:
    """Write an action as the grammar has it."""
    match action:
        case Expand(labels):
            return f"EXPAND {' '.join(labels)}"
        case Refine(query):
            return f"REFINE {query}"
        case Stop():
            return "STOP"
