"""Results for people: a Markdown twin of the JSON, and plots."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = (
    ("recall_at_8", "recall@8"),
    ("recall_at_300t", "recall@300t"),
    ("evidence_recall", "recall"),
    ("reward", "reward"),
    ("entries", "entries"),
    ("context_tokens", "tokens"),
    ("inference_tokens", "LM tokens"),
    ("steps", "steps"),
    ("ended_stopped", "stopped"),
    ("ended_malformed", "malformed"),
)


def write_report(result: dict[str, Any], metrics: Path, prefix: Path) -> list[Path]:
    """Write `prefix.json`, `prefix.md` and the plots `prefix_….png`; return their paths.

    Args:
        result: In the one results form.
        metrics: The run's `metrics.jsonl`, for the learning curve.
        prefix: Folder and beginning of the names.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    paths = [prefix.with_name(prefix.name + end) for end in (".json", ".md", "_entries.png", "_learning.png")]
    paths[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(result), encoding="utf-8")
    plot_entries(result, paths[2])
    return paths if plot_learning(metrics, paths[3]) else paths[:3]


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of measures as a Markdown table."""
    lines = [
        "| policy | n | " + " | ".join(title for _, title in COLUMNS) + " |",
        "|" + "---|" * (len(COLUMNS) + 2),
    ]
    for row in rows:
        cells = [_number(row.get(key)) for key, _ in COLUMNS]
        lines.append(f"| {row['policy']} | {row['n']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown(result: dict[str, Any]) -> str:
    """Return the whole result as Markdown."""
    data, training = result["data"], result.get("training") or {}
    parts = [
        f"# {result['name']}",
        f"Made by `{result['command']}` at commit {result['commit']}, seed {result['seeds'][0]}. "
        f"Data: {data['dataset']} {data['split']}, {data['n']} questions ({data['n_clean']} without a known error in "
        f"their gold); policies with a language model were asked {data['n_asked']} of them.",
    ]
    if training:
        parts.append(
            f"GRPO: {training['grpo_steps']} steps, {training['groups']} groups, {training['groups_live']} of them "
            f"live ({training['groups_replaced']} without any signal were replaced)."
        )
    detectable = [c["detectable"] for c in result["comparisons"] if c["metric"] != "reward" and c["detectable"]]
    if detectable:
        parts.append(
            f"Smallest difference in recall found with 80% power, over the pairs below: up to {max(detectable):.3f}."
        )
    for scope, title in (("asked", "Same questions for all policies"), ("all", "All questions")):
        rows = [row for row in result["rows"] if row["questions"] == scope]
        if rows:
            parts += [f"## {title}", table(rows)]
    categories = sorted(
        {key for row in result["rows"] for key in row if key.startswith("recall_at_8_c") and key[-1].isdigit()}
    )
    lines = [
        "| policy | n | " + " | ".join(key[-2:] for key in categories) + " | clean |",
        "|" + "---|" * (len(categories) + 3),
    ]
    for row in result["rows"]:
        cells = [_number(row.get(key)) for key in (*categories, "recall_at_8_clean")]
        lines.append(f"| {row['policy']} | {row['n']} | " + " | ".join(cells) + " |")
    parts += [
        "## recall@8 by category",
        "1 multi-hop, 2 temporal, 3 open-domain, 4 single-hop, 6 knowledge-update; `clean` leaves out the questions "
        "whose gold the errata mark wrong.",
        "\n".join(lines),
        "## Paired differences",
        "By question, averaged within each conversation; 95% interval by t over the conversations, and beside it the "
        "bootstrap over questions within conversations.",
    ]
    lines = [
        "| metric | a − b | difference | t interval | question interval | n | by conversation |",
        "|" + "---|" * 7,
    ]
    for c in result["comparisons"]:
        by = ", ".join(f"{value:+.3f}" for value in c["by_conversation"].values())
        lines.append(
            f"| {c['metric']} | {c['a']} − {c['b']} | {c['difference']:+.3f} | {_interval(c['low'], c['high'])} | "
            f"{_interval(c['question_low'], c['question_high'])} | {c['n']} | {by} |"
        )
    parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def plot_entries(result: dict[str, Any], path: Path) -> None:
    """Plot recall against entries: plain search as a curve, every policy as a point."""
    scope = "asked" if any(row["questions"] == "asked" for row in result["rows"]) else "all"
    rows = [row for row in result["rows"] if row["questions"] == scope]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    search = sorted((r["entries"], r["evidence_recall"]) for r in rows if r["policy"].startswith("top_k"))
    axes.plot(*zip(*search, strict=True), color="0.6", marker=".", label="search, top k")
    walked = [row for row in rows if not row["policy"].startswith("top_k")]
    for place, row in enumerate(walked):
        axes.scatter(
            row["entries"],
            row["evidence_recall"],
            color=f"C{place % 10}",
            marker="osD^vP*X"[place % 8],
            label=row["policy"],
            zorder=3,
        )
    axes.set(xlabel="entries in the working set (mean)", ylabel="share of the evidence found")
    axes.set_title(f"{result['name']}: recall against entries, n = {rows[0]['n']}", fontsize=10)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def plot_learning(metrics: Path, path: Path) -> bool:
    """Plot GRPO's reward, action shares and live groups by step; False where nothing was logged."""
    if not metrics.exists():
        return False
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = {line["step"]: line for line in lines if line["stage"] == "grpo" and "groups/live" in line}
    if not steps:
        return False
    at, rows = list(steps), list(steps.values())
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4))
    axes[0].plot(at, [row["reward"] for row in rows], marker=".", label="reward")
    if "reward/gain" in rows[0]:
        axes[0].plot(at, [row["reward/gain"] for row in rows], marker=".", label="gain in recall")
    for kind in ("expand", "refine", "stop", "bad"):
        axes[1].plot(at, [row[f"actions/{kind}"] for row in rows], marker=".", label=kind)
    axes[2].plot(at, [row["groups/live"] / row["groups/all"] for row in rows], marker=".", label="live groups")
    axes[2].plot(
        at,
        [row["groups/distinct_trajectories"] for row in rows],
        marker=".",
        label="distinct trajectories a group",
    )
    for axis, title in zip(axes, ("reward (sampled, training questions)", "share of actions", "signal"), strict=True):
        axis.set(title=title, xlabel="GRPO step")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return True


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{low:+.3f} … {high:+.3f}"
