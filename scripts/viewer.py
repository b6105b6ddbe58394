"""A result as one self-contained HTML page: the frontier, the tables, and walks that can be followed step by step.

The page is `viewer.html` with the data put in. It asks nothing of any network: its policy forbids every request, and
allows no script and no style but the two it was written with. All text of memories, questions and policies is hostile:
it travels as JSON in which nothing can end the element, and the page only ever sets it as text.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from cuewalk.env import Gold, Question, Trajectory, parse_action
from cuewalk.env.actions import Expand
from cuewalk.env.render import plain
from cuewalk.env.tasks import CATEGORIES
from cuewalk.judges import Verdict, covered
from cuewalk.memory import Link, MemoryGraph
from cuewalk.memory.records import format_date

LICENSED = {"locomo": "CC BY-NC 4.0", "perltqa": "CC BY-NC 4.0"}
"""Data sets whose text must not be passed on: a page without walks says so."""


def describe_walk(
    policy: str, trajectory: Trajectory, graph: MemoryGraph, question: Question, gold: Gold, verdict: Verdict | None
) -> dict[str, Any]:
    """Return one walk as plain data, all that the page needs to show it again.

    `first` and `frontier` are W_0 and F_0; each of `steps` says what was done and what changed. A candidate's `from`
    are the working set's entries that link to it by its kind; none for a hit of the query. `entries` are the texts of
    all that was read or shown, `marked` those of them that are gold: entry -> the gold messages it covers. Texts are
    made plain (one line a statement, no control or bidirectional characters). `verdict` is None where no judge spoke.
    """
    steps, seen = [], [*trajectory.first, *(link.entry for _, link in trajectory.frontier)]
    for step in trajectory.steps:
        action, change = parse_action(step.text), step.change
        seen += [link.entry for _, link in change.candidates]
        steps.append({
            "action": plain(step.text.strip().replace("\n", " ⏎ ")),
            "kind": step.kind,
            "labels": list(action.labels) if isinstance(action, Expand) else [],
            "done": step.kind == "stop" or (step.kind != "bad" and change.cost > 0),  # false: dearer than the budget
            "bad": change.bad,
            "cost": change.cost,
            "budget": step.budget,
            "added": list(change.added),
            "candidates": _candidates(graph, change.candidates, change.added),
        })  # fmt: skip
    wanted = set(gold.evidence)
    holds = {entry: covered(graph, [entry]) & wanted for entry in dict.fromkeys(seen)}
    return {
        "policy": policy,
        "conversation": graph.conversation.id,
        "graph": graph.digest[:12],
        "question": {"id": question.id, "text": plain(question.text)},
        "category": CATEGORIES.get(gold.category, str(gold.category)),
        "gold": {"answer": plain(gold.answer), "evidence": [_message(graph, source) for source in gold.evidence]},
        "entries": {entry: _entry(graph, entry) for entry in holds},
        "marked": {entry: sorted(found) for entry, found in holds.items() if found},
        "first": list(trajectory.first),
        "frontier": _candidates(graph, trajectory.frontier, trajectory.first),
        "budget": trajectory.budget,
        "steps": steps,
        "ending": str(trajectory.ending),
        "verdict": verdict and {
            "reward": round(verdict.reward, 5),
            "parts": {name: round(part, 5) + 0.0 for name, part in verdict.components.items()},  # no -0.0
            "reason": verdict.reason,
        },
    }  # fmt: skip


def write_html(result: Mapping[str, Any], walks: Iterable[Mapping[str, Any]], path: str | Path) -> Path:
    """Write a result and walks of `describe_walk` as one HTML page; return its path.

    `result` has the one results form. The page also understands, and shows nothing where they are missing:
    in a row, `MEASURE_low` and `MEASURE_high` (its interval), `dataset` and `split` (one page may hold several data
    sets; also in `comparisons`) and text under any other key; in a comparison, any further number; `curves`; and
    `published`, rows of anything. A measure that is missing or None is shown as a dash.

    A ValueError where a number is not finite (JSON has no such numbers; use None).
    """
    entries: dict[str, dict[str, Any]] = {}
    kept = []
    for walk in walks:  # walks over one memory share their entries
        entries.setdefault(walk["graph"], {}).update(walk["entries"])
        kept.append({key: value for key, value in walk.items() if key != "entries"})
    data = {"result": result, "walks": kept, "entries": entries, "categories": CATEGORIES, "licensed": LICENSED}
    page = files("cuewalk.scripts").joinpath("viewer.html").read_text(encoding="utf-8")
    for tag in ("style", "script"):
        (own,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.S)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        page = page.replace(f"@@{tag}@@", f"sha256-{digest}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.replace("@@data@@", as_json(data)), encoding="utf-8", newline="\n")
    return path


def read_walks(path: Path) -> list[dict[str, Any]]:
    """Return the walks of a page that `write_html` wrote, as `describe_walk` gave them."""
    (own,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.S)
    data = json.loads(own)
    return [walk | {"entries": data["entries"][walk["graph"]]} for walk in data["walks"]]


def as_json(data: Any) -> str:
    """Return data as JSON that may stand in a script element: ASCII, without `<`, `>` and `&`."""
    text = json.dumps(data, allow_nan=False, default=float, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _candidates(
    graph: MemoryGraph, candidates: Iterable[tuple[str, Link]], origins: Sequence[str]
) -> list[dict[str, Any]]:
    """Describe candidates that came into F after `origins` were read."""
    return [
        {
            "label": label,
            "entry": link.entry,
            "kind": link.kind,
            "score": round(link.score, 3),
            "from": [origin for origin in origins if link.entry in graph.links(origin, (link.kind,))],
        }
        for label, link in candidates
    ]


def _entry(graph: MemoryGraph, entry_id: str) -> dict[str, Any]:
    entry = graph.entries[entry_id]
    value = [plain(line) for line in entry.value.split("\n")]
    return {"abstraction": plain(entry.abstraction), "value": value}


def _message(graph: MemoryGraph, message_id: str) -> dict[str, str]:
    """Describe a gold message; one that the data set cites but does not hold has no text."""
    message = graph.messages.get(message_id)
    said = message and f"{message.speaker} ({format_date(message.time)}): {message.text}"
    return {"id": message_id, "text": plain(said or "(not in the conversation)")}
