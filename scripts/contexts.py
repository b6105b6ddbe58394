"""What a reader gets to see of the entries found: Memora's four context forms."""

from collections.abc import Sequence
from typing import Literal, get_args

from cuewalk.memory import MemoryGraph
from cuewalk.memory.records import say
from cuewalk.scripts.expansion import segment_summary

Form = Literal["segment+entries", "segment", "summary+entries", "entries"]
FORMS: tuple[Form, ...] = get_args(Form)


def render_context(graph: MemoryGraph, entries: Sequence[str], form: Form = "entries") -> str:
    """Return the text for a reader; entries of the same segments stand together, in order of first appearance.

    The forms: `segment+entries` (raw segments, then what the entries say), `segment`, `summary+entries`, `entries`. A
    message that stands in a segment is not repeated: an entry that only repeats some shows its abstraction alone.
    """
    if form not in FORMS:
        raise ValueError(f"context form {form!r}; choose from {', '.join(FORMS)}")
    clusters: dict[tuple[str, ...], list[str]] = {}
    for id_ in entries:
        clusters.setdefault(graph.entries[id_].segments, []).append(id_)
    lines: list[str] = []
    shown: set[str] = set()
    for ids, members in clusters.items():
        new = [graph.segment_by_id[id_] for id_ in ids if id_ not in shown]
        if form != "entries":
            shown |= set(ids)
        if form in ("segment", "segment+entries"):
            lines += [say(graph.messages[message]).line for segment in new for message in segment.messages]
        elif form == "summary+entries":
            lines += [segment_summary(graph, segment) for segment in new]
        if form != "segment":
            for member in members:
                entry = graph.entries[member]
                told = set("\n".join(lines).splitlines()) if form == "segment+entries" else set()
                rest = [line for line in entry.value.splitlines() if line not in told]
                lines += [f"- {line}" for line in rest or [entry.abstraction]]
    return "\n".join(lines)
