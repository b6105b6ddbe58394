"""The comparison for people: a Markdown twin of the JSON, the frontier as a picture, and one page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from cuewalk.env import DataError
from cuewalk.env.tasks import CATEGORIES
from cuewalk.rl.config import Config
from cuewalk.rl.run import provenance
from cuewalk.scripts.compare import compare, replay
from cuewalk.scripts.report import table
from cuewalk.scripts.results import interval, markdown_table
from cuewalk.scripts.viewer import describe_walk, read_walks, write_html

FOUND = {
    "recall_at_8": "recall@8", "recall_at_300t": "recall@300t", "evidence_recall": "recall", "precision": "precision",
    "answer_words": "answer words", "answer_f1": "answer F1", "answer_em": "EM", "judge": "judge",
    "abstained": "abstained", "abstained_wrongly": "wrongly", "reward": "reward",
}  # fmt: skip
COST = {
    "entries": "entries", "blocks": "blocks", "context_tokens": "tokens", "inference_tokens": "LM tokens",
    "total_tokens": "total tokens", "blocks_to_cover": "blocks to cover", "tokens_to_cover": "tokens to cover",
    "answer_covered": "covered", "ms": "ms, mean", "ms_p50": "P50", "ms_p95": "P95", "failed": "failed",
}  # fmt: skip
WALKS = {"steps": "steps", "cost": "cost", "ended_stopped": "stopped", "ended_budget": "budget",
         "ended_malformed": "malformed", "stop_early": "too early", "stop_late": "too late",
         "stop_right": "right"}  # fmt: skip
FREE_TO_SHOW = ("synthetic",)
"""Data sets whose texts may stand in a page beside the results; the page of others goes into the run directory."""


def write_comparison(config: Config, out: Path) -> tuple[dict[str, Any], list[Path]]:
    """Compare, and write `out.json`, `out.md`, `out_frontier.png` and the page; return the result and the paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    result = compare(config, out)
    paths = [out.with_name(out.name + end) for end in (".json", ".md", "_frontier.png")]
    paths[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(result), encoding="utf-8")
    plot_frontier(result, paths[2])
    free = config.data.source in FREE_TO_SHOW
    page = out.with_name(f"{out.name}.html") if free else Path(config.run_dir) / f"{out.name}.html"
    shown = replay(config, out)
    walks = [describe_walk(w.system, w.trajectory, w.graph, w.question, w.gold, w.verdict) for w in shown]
    return result, [*paths, write_html(result, walks, page)]


def join_comparisons(parts: Sequence[Path], out: Path) -> list[Path]:
    """Put results of several data sets into one: `out.json`, `out.md` with a short table each, and one page.

    `parts` are folder and name, as `--out` gave them; the walks of their pages beside them come along. A DataError
    where one is missing.
    """
    if missing := [part for part in parts if not part.with_name(f"{part.name}.json").exists()]:
        raise DataError(f"there is no result {missing[0]}.json; make it with `cuewalk compare --out {missing[0]}`")
    results = [json.loads(part.with_name(f"{part.name}.json").read_text(encoding="utf-8")) for part in parts]
    shown = [{"dataset": result["data"]["dataset"], "split": result["data"]["split"]} for result in results]
    joined = {
        "name": out.name,
        **provenance(),
        "seeds": sorted({seed for result in results for seed in result["seeds"]}),
        "data": {"dataset": ", ".join(of["dataset"] for of in shown), "split": None,
                 "n": sum(result["data"]["n"] for result in results)},
        "rows": [row | of for result, of in zip(results, shown, strict=True) for row in result["rows"]],
        "comparisons": [c | of for result, of in zip(results, shown, strict=True) for c in result["comparisons"]],
        "made": [{key: result[key] for key in ("name", "command", "commit", "data")} for result in results],
        "published": results[0]["published"],
    }  # fmt: skip
    pages = [page for part in parts if (page := part.with_name(f"{part.name}.html")).exists()]
    walks = [walk for page in pages for walk in read_walks(page)]
    paths = [out.with_name(f"{out.name}.{kind}") for kind in ("json", "md", "html")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    paths[0].write_text(json.dumps(joined, indent=1) + "\n", encoding="utf-8")
    columns = ("recall_at_8", "recall_at_300t", "evidence_recall", "context_tokens", "inference_tokens")
    titles = {key: (FOUND | COST)[key] for key in columns}
    text = ["# Every kind of system, on several data sets", f"Put together by `{joined['command']}`."]
    for part, result in zip(parts, results, strict=True):
        data = result["data"]
        text += [
            f"## {data['dataset']} {data['split']}, {data['n']} questions",
            f"Whole, with intervals: [{part.name}.md]({part.name}.md). Made by `{result['command']}` at commit "
            f"{result['commit']}.",
            table(result["rows"], titles),
        ]
    paths[1].write_text("\n\n".join(text) + "\n", encoding="utf-8")
    write_html(joined, walks, paths[2])
    return paths


def markdown(result: dict[str, Any]) -> str:
    """Return the whole result as Markdown."""
    data, rows = result["data"], result["rows"]
    milli = {"seconds": "ms", "seconds_p50": "ms_p50", "seconds_p95": "ms_p95"}
    rows = [row | {name: 1000 * row[key] for key, name in milli.items()} for row in rows]
    categories = sorted(
        {key for row in rows for key in row if key.startswith("recall_at_8_")}, key=lambda k: (len(k), k)
    )
    walks, own = [row for row in rows if "steps" in row], {row["policy"]: row for row in rows}
    tested = {(c["a"], c["b"], c["metric"]): c for c in result["comparisons"]}
    parts = [
        f"# {result['name']}: every kind of system, the same questions",
        f"Made by `{result['command']}` at commit {result['commit']}, seed {result['seeds'][0]}. Data: "
        f"{data['dataset']} {data['split']}, {data['n']} of {data['n_part']} questions with evidence "
        f"({data['n_clean']} without a known error in their gold).",
        "The systems are retrieval ideas over this package's memory (one encoder, one set of segments, entries, "
        "anchors and groups), not the products; what the papers measured of those is at the end, and not comparable.",
        "\n".join(f"- `{row['policy']}`: {row['idea']}" for row in rows),
        "## What was found",
        "recall@8 and recall@300t: share of the gold evidence messages shown within 8 entries (300 tokens), cut or "
        "topped up by plain search; a raw message counts as one entry. recall: in all that was returned."
        + _answered(result),
        table(rows, known_columns(FOUND, rows)),
        "## At what cost",
        "Means a question, but for total tokens: construction, and for all questions what a reader is shown and what "
        f"the system's own models took. Tokens are those of {result['settings']['model']}. To cover: until all "
        "content words of the gold answer were shown, over the answers that were covered. Milliseconds from question "
        "to context, indexes built; this machine, one question at a time.",
        table(rows, known_columns(COST, rows)),
        f"![recall against context tokens]({result['name']}_frontier.png)",
        "Without the oracle, which sees the gold, nothing shows more in as few context tokens than: "
        + ", ".join(f"`{name}` ({own[name]['context_tokens']:.0f}: {own[name]['evidence_recall']:.3f})"
                    for name in result["efficient"]) + ".",
        "## recall@8 by category",
        f"{', '.join(f'{number} {name}' for number, name in CATEGORIES.items())}; `clean` leaves out the questions "
        "whose gold the errata mark wrong.",
        table(rows, {key: key.removeprefix("recall_at_8_") for key in categories}),
    ]  # fmt: skip
    if walks:
        parts += ["## Walks", table(walks, WALKS)]
    parts += [
        "## Paired differences",
        "The first less the second, by question, averaged within each conversation; 95% interval by t over the "
        "conversations (none with fewer than two) and by a bootstrap over questions. p: of t-tests over conversations "
        "and over questions, corrected by Holm for all comparisons of the metric. Many questions of few conversations "
        "are not independent: where both are given, believe the first.",
    ]
    if detectable := [c["detectable"] for c in tested.values() if c["detectable"] and c["metric"] != "judge"]:
        parts.append(f"Smallest difference found with 80% power: {min(detectable):.3f} to {max(detectable):.3f}.")
    parts.append(markdown_table(
        ("metric", "a − b", "difference", "t interval", "question interval", "n", "p", "p, questions"),
        [(c["metric"], f"{c['a']} − {c['b']}", f"{c['difference']:+.3f}", interval(c["low"], c["high"]),
          interval(c["question_low"], c["question_high"]), c["n"], _p(c["p_holm"]), _p(c["p_questions_holm"]))
         for c in tested.values()],
    ))  # fmt: skip
    columns = ("dataset", "system", "score", "f1", "bleu", "tokens", "reader", "judge", "questions", "source")
    parts += [
        "## Published, not remade",
        "What the papers report of the products, with the reader and the judge that they used. Their judges are "
        "lenient, their memories written by a large model, their questions other ones: set beside each other, not "
        "beside the tables above.",
        markdown_table(columns, [["–" if row[c] is None else row[c] for c in columns] for row in result["published"]]),
    ]
    return "\n\n".join(parts) + "\n"


def _answered(result: dict[str, Any]) -> str:
    if (reader := result["settings"]["compare"].get("reader")) is None:
        return ""
    apart = result["data"]["n_unanswerable"]
    return f" Answers are {reader}'s, from what was returned alone." + (
        f" abstained: share of {apart} further questions, which nothing answers, to which it says so; wrongly: share "
        "of the others to which it says so too." if apart else ""
    )  # fmt: skip


def plot_frontier(result: dict[str, Any], path: Path) -> None:
    """Plot recall against context tokens: a point a system, and the line of those that none but the oracle beats."""
    points = sorted(result["rows"], key=lambda row: row["context_tokens"])
    figure, axes = plt.subplots(figsize=(8, 5))
    best = [point for point in points if point["policy"] in result["efficient"]]
    line = [[point[of] for point in best] for of in ("context_tokens", "evidence_recall")]
    axes.step(*line, where="post", color="0.7", zorder=1)
    for place, point in enumerate(points):
        axes.scatter(
            point["context_tokens"], point["evidence_recall"], marker="osD^vP*X"[place % 8], s=34, zorder=2,
            label=f"{point['policy']}  ({point['context_tokens']:.0f}, {point['evidence_recall']:.2f})",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set(xlabel="context tokens a question (mean)", ylabel="share of the evidence shown", ylim=(0, 1.03))
    axes.set_title(f"{result['data']['dataset']} {result['data']['split']}, n = {result['data']['n']}", fontsize=10)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), title="by tokens", title_fontsize=7)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def known_columns(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the columns that some row has a value for."""
    return {key: title for key, title in columns.items() if any(row.get(key) is not None for row in rows)}


def _p(value: float | None) -> str:
    return "–" if value is None else "< .001" if value < 0.001 else f"{value:.3f}"
