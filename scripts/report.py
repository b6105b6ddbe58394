"""Results for people: a Markdown twin of the JSON, and plots."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

from cuewalk.env.tasks import CATEGORIES
from cuewalk.scripts.results import interval, markdown_table, read_metrics

COLUMNS = {
    "recall_at_8": "recall@8",
    "recall_at_300t": "recall@300t",
    "evidence_recall": "recall",
    "reward": "reward",
    "entries": "entries",
    "context_tokens": "tokens",
    "inference_tokens": "LM tokens",
    "steps": "steps",
    "ended_stopped": "stopped",
    "ended_malformed": "malformed",
    "stop_early": "too early",
    "stop_late": "too late",
    "stop_right": "right",
}


def write_report(result: dict[str, Any], metrics: Path, prefix: Path) -> list[Path]:
    """Write `prefix.json`, `prefix.md` and the plots `prefix_….png`; return their paths.

    The learning curve is read from `metrics`, the run's `metrics.jsonl`.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    paths = [prefix.with_name(prefix.name + end) for end in (".json", ".md", "_entries.png", "_learning.png")]
    paths[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(result), encoding="utf-8")
    plot_entries(result, paths[2])
    return paths if plot_learning(metrics, paths[3]) else paths[:3]


def same_questions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows on the questions that policies with a model were asked: one row a policy, all comparable."""
    return [row for row in rows if row["questions"] == "asked"] or rows


def table(rows: list[dict[str, Any]], columns: Mapping[str, str] = COLUMNS) -> str:
    """Return rows of measures as a Markdown table; `columns` are keys and titles."""
    numbers = [[_number(row.get(key)) for key in columns] for row in rows]
    cells = [[row["policy"], row["n"], *found] for row, found in zip(rows, numbers, strict=True)]
    return markdown_table(["policy", "n", *columns.values()], cells)


def markdown(result: dict[str, Any]) -> str:
    """Return the whole result as Markdown."""
    data, training = result["data"], result.get("training") or {}
    parts = [
        f"# {result['name']}",
        f"Made by `{result['command']}` at commit {result['commit']}, seed {result['seeds'][0]}. "
        f"Data: {data['dataset']} {data['split']}, {data['n']} questions ({data['n_clean']} without a known error in "
        f"their gold); policies with a language model were asked {data['n_asked']} of them."
        + (f" {data['n_silver']} have silver evidence, guessed from the answer." if data.get("n_silver") else ""),
    ]
    if data["split"].endswith("val"):
        parts.append("Offsets, the ranker's threshold and the stopping thresholds were chosen on these very questions.")
    if training.get("grpo_steps"):
        parts.append(
            f"GRPO: {training['grpo_steps']} steps, {training['groups']} groups, {training['groups_live']} of them "
            f"live ({training['groups_replaced']} without any signal were replaced); {training['groups_per_hour']:.0f} "
            f"groups an hour, replaced ones counted, with {training['distinct_trajectories']:.1f} different "
            f"trajectories in one: equal ones are computed once."
        )
    if detectable := [c["detectable"] for c in result["comparisons"] if c["metric"] != "reward" and c["detectable"]]:
        parts.append(
            f"Smallest difference in recall found with 80% power, over the pairs below: up to {max(detectable):.3f}."
        )
    for scope, title in (("asked", "Same questions for all policies"), ("all", "All questions")):
        if rows := [row for row in result["rows"] if row["questions"] == scope]:
            parts += [f"## {title}", table(rows)]
    categories = {key: key.removeprefix("recall_at_8_") for row in result["rows"] for key in row if "_at_8_" in key}
    ordered = dict(sorted(categories.items(), key=lambda item: (len(item[1]), item[1])))  # c1, c2, …, c10, clean
    comparisons = [
        (
            c["metric"],
            f"{c['a']} − {c['b']}",
            f"{c['difference']:+.3f}",
            interval(c["low"], c["high"]),
            interval(c["question_low"], c["question_high"]),
            c["n"],
            ", ".join(f"{value:+.3f}" for value in c["by_conversation"].values()),
        )
        for c in result["comparisons"]
    ]
    if result.get("stopping"):
        parts += [
            "## Knowing when to stop",
            "At the first state: does a policy's score for STOP tell whether the evidence is complete? Balanced "
            "accuracy at the threshold that is best on validation. `top_score` is the rule that stops where the best "
            "candidate scores low. Offsets on STOP chosen on validation for the reward: "
            + ", ".join(f"{curve['policy']} {curve['chosen']:+.2f}" for curve in result["curves"]) + ".",
            markdown_table(("policy", "AUROC", "balanced accuracy"), [
                (row["policy"], _number(row["auroc"]), _number(row["balanced_accuracy"])) for row in result["stopping"]
            ]),
            "## Does it read?",
            "Best mean reward on the validation questions over all offsets on STOP: as it is, with the candidates' "
            "text blanked, and with another question asked. A policy that reads loses by both.",
            markdown_table(("policy", "sees", "reward"), [
                (row["policy"], row["control"] or "everything", _number(row["reward"])) for row in result["controls"]
            ]),
        ]  # fmt: skip
    parts += [
        "## What the order tells",
        "How well the scores at the candidates' lines of the first states tell which of them hold missing evidence "
        "(AUROC over all lines).",
        markdown_table(("order", "AUROC"), [(row["order"], _number(row["auroc"])) for row in result["lines"]]),
    ]
    titles = ("metric", "a − b", "difference", "t interval", "question interval", "n", "by conversation")
    parts += [
        "## recall@8 by category",
        f"{', '.join(f'{number} {name}' for number, name in CATEGORIES.items())}; `clean` leaves out the questions "
        "whose gold the errata mark wrong.",
        table(result["rows"], ordered),
        "## Paired differences",
        "By question, averaged within each conversation; 95% interval by t over the conversations, and beside it the "
        "bootstrap over questions within conversations.",
        markdown_table(titles, comparisons),
    ]
    return "\n\n".join(parts) + "\n"


def plot_entries(result: dict[str, Any], path: Path) -> None:
    """Plot recall against entries: plain search as a curve, every policy as a point."""
    rows = pd.DataFrame(same_questions(result["rows"]))
    figure, axes = plt.subplots(figsize=(7, 4.5))
    search = rows[rows["policy"].str.startswith("top_k")].sort_values("entries")
    axes.plot(search["entries"], search["evidence_recall"], color="0.6", marker=".", label="search, top k")
    for place, row in enumerate(rows.drop(search.index).itertuples()):
        axes.plot(row.entries, row.evidence_recall, "osD^vP*X"[place % 8], label=row.policy)
    for curve in result.get("curves", []):
        points = pd.DataFrame(curve["points"])
        axes.plot(points["entries"], points["evidence_recall"], lw=1, label=f"{curve['policy']}, offsets on STOP")
    axes.set(xlabel="entries in the working set (mean)", ylabel="share of the evidence found")
    axes.set_title(f"{result['name']}: recall against entries, n = {rows['n'][0]}", fontsize=10)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def plot_learning(metrics: Path, path: Path) -> bool:
    """Plot GRPO's reward, action shares and live groups by step; False where nothing was logged."""
    steps = pd.DataFrame(read_metrics(metrics)[0] if metrics.exists() else {}).T
    if steps.empty:
        return False
    steps["share_live"] = steps["groups/live"] / steps["groups/all"]
    panels = {
        "reward (sampled, training questions)": {"reward": "reward", "reward/gain": "gain in recall"},
        "share of actions": {f"actions/{kind}": kind for kind in ("expand", "refine", "stop", "bad")},
        "signal": {"share_live": "live groups", "groups/distinct_trajectories": "distinct trajectories a group"},
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        known = steps.filter(list(curves)).astype(float)  # a judge may have no gain among its components
        known.rename(columns=curves).plot(ax=axis, title=title, xlabel="GRPO step", marker=".", grid=True)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return True


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"
