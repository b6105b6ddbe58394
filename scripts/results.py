"""What the measuring scripts share: sections measured apart into one JSON file, and its Markdown twin."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuewalk.rl.run import provenance


def measure(
    description: str | None,
    name: str,
    sections: Mapping[str, Callable[[], Any]],
    head: Callable[[], Any],
    text: Callable[[dict[str, Any]], str],
) -> None:
    """Read the command line, measure the sections asked for, and write after each one.

    Args:
        description: Of the command, for its `--help`.
        name: Of the result, and of its files under docs/results.
        sections: Name -> what measures it. Those not asked for are kept from the file as it is.
        head: Returns further fields of the result.
        text: Turns the result into Markdown.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--out", default=f"docs/results/{name}", help="folder and name of the files")
    parser.add_argument("--only", default=",".join(sections), help="sections, comma separated")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(sections):
        parser.error(f"unknown sections {sorted(unknown)}; choose from {', '.join(sections)}")
    path = Path(options.out).with_suffix(".json")
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    result |= {"name": name, **provenance(), "seeds": [0], **head()}
    path.parent.mkdir(parents=True, exist_ok=True)
    for section in (section for section in sections if section in chosen):
        result[section] = sections[section]()
        # Sections may be measured apart: each says by which command and commit.
        result.setdefault("made", {})[section] = {key: result[key] for key in ("command", "commit")}
        path.write_text(json.dumps(result, indent=1, default=float) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(text(result), encoding="utf-8")
        print(f"{section}: written to {path}", flush=True)


def made_by(result: Mapping[str, Any]) -> str:
    """Say which command made which sections, at which commit."""
    sections: dict[tuple[str, str], list[str]] = {}
    for name, made in result["made"].items():
        sections.setdefault((made["command"], made["commit"]), []).append(name)
    told = [f"{', '.join(names)} by `{command}` at {commit}" for (command, commit), names in sections.items()]
    return f"Made: {'; '.join(told)}."


def evaluation_name(part: str) -> str:
    """Return the name, without an ending, of an evaluation in its run directory; what is reported is of `test`."""
    return "evaluation" if part == "test" else f"evaluation_{part}"


def read_metrics(path: Path) -> tuple[dict[int, dict[str, Any]], dict[str, float]]:
    """Return GRPO's lines by step (of a step run twice, the later), and the seconds of each stage."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = {line["step"]: line for line in lines if line["stage"] == "grpo" and "groups/live" in line}
    return steps, {line["stage"]: line["train_runtime"] for line in lines if "train_runtime" in line}


def race(tasks: Sequence[Callable[[], Any]], times: int) -> list[float]:
    """Run the tasks in turns, `times` rounds; return each one's median in seconds."""
    seconds: list[list[float]] = [[] for _ in tasks]
    for _ in range(times):
        for task, kept in zip(tasks, seconds, strict=True):
            started = time.perf_counter()
            task()
            kept.append(time.perf_counter() - started)
    return [statistics.median(kept) for kept in seconds]


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return these columns of the rows as a Markdown table."""
    cells = [[row.get(column) for column in columns] for row in rows]
    shown = [["–" if c is None else f"{c:.3f}" if isinstance(c, float) else c for c in line] for line in cells]
    return markdown_table(columns, shown)


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return cells as they are as a Markdown table."""
    head, *lines = ("| " + " | ".join(map(str, cells)) + " |" for cells in (titles, *rows))
    return "\n".join([head, "|" + "---|" * len(titles), *lines])


def interval(low: float | None, high: float | None) -> str:
    """Return an interval as tables show it."""
    return "–" if low is None or high is None else f"{low:+.3f} … {high:+.3f}"
