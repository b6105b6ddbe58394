"""State as text. The transcript is append-only: the first observation shows all, a later one only what is new."""

import re
import unicodedata
from collections.abc import Iterable

from cuewalk.env.actions import MAX_EXPAND
from cuewalk.env.state import Change, EnvConfig, State
from cuewalk.memory import Link, MemoryGraph
from cuewalk.memory.records import MONTHS

RENDERER = "3"
"""Raised whenever the same state would read differently: a policy is bound to what it was trained on."""

KIND_LETTERS = {
    "segment": "e", "adjacent": "n", "anchor": "a", "group": "g", "similar": "m", "similar_anchor": "c",
    "near_group": "r", "search": "s",
}  # fmt: skip

CANDIDATE = re.compile(r"^(?P<text>.*) (?P<score>\d[a-z]) (?P<label>[A-Za-z])$", re.MULTILINE)
"""A candidate's line in an observation; `plain` sees to it that no other line looks like one."""

UNSEEN = "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]*"
ENDING = re.compile(rf"(\d){UNSEEN}([a-z]){UNSEEN} {UNSEEN}(?=[A-Za-z]\b)")
"""What looks like the end of a candidate's line, whatever of it is invisible (and no control character)."""

QUESTION_WORDS = 60
SPEAKER_WORDS = 6  # documents speak under their headers
MAX_WORD = 10
"""Characters a word may take on average, so that a text without spaces can't flood the transcript."""

INSTRUCTION = (
    f"Which memories answer the question? Reply with one line: EXPAND and 1 to {MAX_EXPAND} letters of candidates, "
    "best first; REFINE and a new search; or STOP."
)


def first_observation(graph: MemoryGraph, question: str, state: State, config: EnvConfig) -> str:
    """Show the whole state: question, costs, budget, W as cut values, F as lines."""
    lines = [
        INSTRUCTION,
        f"Question: {shorten(question, QUESTION_WORDS)}",
        "Read:",
        *_read_lines(graph, state, state.working, config),
        "Candidates:",
        *_candidate_lines(graph, state.frontier, config),
        f"EXPAND costs {config.expand_cost} a letter, REFINE {config.refine_cost}, STOP 0. Budget {state.budget}."
        + ("" if config.price is None else f" Price {100 * config.price:g}."),
    ]
    return "\n".join(lines)


def next_observation(graph: MemoryGraph, state: State, change: Change, config: EnvConfig) -> str:
    """Show what one step changed, and the budget left."""
    lines = []
    if change.bad is not None:
        lines.append(f"Bad action: {change.bad.replace('_', ' ')}.")
    if change.added:
        lines += ["Read:", *_read_lines(graph, state, change.added, config)]
    if change.candidates:
        lines += ["Candidates:", *_candidate_lines(graph, change.candidates, config)]
    lines.append(f"Budget {state.budget}.")
    return "\n".join(lines)


def plain(text: str) -> str:
    """Make untrusted text one line without control, zero-width or bidirectional characters or token brackets.

    One line, so that it can't forge a candidate or an action; what looks like the end of a candidate's line (`7e H`)
    is closed up; `<|` is broken, so that it can't even look like a special token (that it can't become one is the
    tokenizer's part: cuewalk.rl.transcript).
    """
    kept = "".join(c for c in text if c.isspace() or unicodedata.category(c)[0] != "C")
    closed = ENDING.sub(r"\1\2", " ".join(kept.split()))
    return closed.replace("<|", "< |").replace("|>", "| >")


def _read_lines(graph: MemoryGraph, state: State, entries: Iterable[str], config: EnvConfig) -> list[str]:
    """Write `- 7 Caroline 8 May 23: I went to …`: how near to the question, speaker, date, what was said.

    How near the read ones are tells, with the candidates' scores, whether to stop (a regression on both: AUROC .70 on
    left-out conversations, on the candidates' alone .64).
    """
    lines, asked = [], graph.encoder.encode([state.queries[0]])[0]
    for entry_id in entries:
        entry = graph.entries[entry_id]
        date = f"{entry.time.day} {MONTHS[entry.time.month - 1][:3]} {entry.time:%y}"
        said = " / ".join(statement.text for statement in entry.statements if statement.until is None)
        near, speaker = _digit(graph.score(asked, entry_id)), shorten(entry.speaker, SPEAKER_WORDS)
        lines.append(f"- {near} {speaker} {date}: {shorten(said, config.value_words)}")
    return lines


def _candidate_lines(graph: MemoryGraph, candidates: Iterable[tuple[str, Link]], config: EnvConfig) -> list[str]:
    """Write `Caroline: adoption agency interview 7e H`: speaker, abstraction, score digit, link letter, letter.

    The letter comes last, after a space: there the model has read the line, and ` H` is the very token that
    `EXPAND H` names. At the front it is another token, seen before what it stands for.
    """
    lines = []
    for label, link in candidates:
        entry = graph.entries[link.entry]
        text, speaker = plain(entry.abstraction), plain(entry.speaker)
        named = text if text.startswith(speaker) else f"{speaker}: {text}"
        lines.append(
            f"{shorten(named, config.abstraction_words)} {_digit(link.score)}{KIND_LETTERS[link.kind]} {label}"
        )
    return lines


def _digit(score: float) -> int:
    return min(9, max(0, int(10 * score)))


def shorten(text: str, words: int) -> str:
    """Return untrusted text as one line of at most so many words (see `plain`), an ellipsis where it was cut."""
    whole = plain(text)
    cut = " ".join(whole.split(" ")[:words])[: words * MAX_WORD]
    return cut + ("…" if len(cut) < len(whole) else "")
