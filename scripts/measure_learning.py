"""What was learnt, over all runs: seeds averaged by question, folds joined; writes docs/results/learning.{json,md}.

Train and evaluate each run first (`cuewalk train`, `cuewalk evaluate`); this joins what those left in their run
directories, and asks no model. What was trained otherwise, from the same warm start (scripts/controls.py) or with
another order, stands beside them; one a fold, with commas:

  python -m cuewalk.scripts.measure_learning checkpoints/locomo_cpu checkpoints/locomo_cpu_b
    --beside placebo=checkpoints/locomo_cpu_placebo base_reader=checkpoints/base,checkpoints/base_b
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

from cuewalk.env import DataError
from cuewalk.rl.run import provenance
from cuewalk.scripts.paired import compare
from cuewalk.scripts.results import evaluation_name, interval, markdown_table, table

ON_ALL = (("trained", "top_k=8"), ("trained", "expand_top=4"), ("expand_top=4", "unread_top=4"),
          ("expand_top=4", "top_k=8"), ("unread_top=4", "top_k=8"), ("ranker", "top_k=8"),
          ("oracle", "stop"), ("oracle", "expand_top=4"))  # fmt: skip
ORDERED = ("expand_top=1", "expand_top=3", "expand_top=4", "ranker")
"""Policies without a model that take what their order shows: another order makes others of them."""
METRICS = ("recall_at_8", "recall_at_300t", "evidence_recall", "reward")
SHOWN = ("recall_at_8", "recall_at_300t", "evidence_recall", "reward", "entries", "context_tokens", "inference_tokens",
         "ended_malformed", "recall_at_8_c1", "recall_at_8_c2", "recall_at_8_c3", "recall_at_8_c4")  # fmt: skip
PAIRS = (
    ("trained", "top_k=8"), ("trained", "expand_top=4"), ("trained", "unread_top=4"), ("trained", "ranker"),
    ("trained", "warm_start"), ("expand_top=4", "unread_top=4"), ("expand_top=3", "unread_top=3"),
    ("unread_top=4", "top_k=8"), ("trained+offset", "warm_start+offset"), ("trained+offset", "expand_top=4"),
    ("warm_start+offset", "expand_top=4"), ("expand_top=4", "top_k=8"), ("ranker", "top_k=8"),
    ("oracle", "trained"), ("oracle", "expand_top=4"),
)  # fmt: skip


Run = tuple[dict[str, Any], pd.DataFrame]
"""An evaluation, and its measures by question."""


def read_run(run: Path, part: str) -> Run:
    """Return a run's evaluation and its measures by question; a DataError where it was not evaluated yet."""
    paths = run / f"{evaluation_name(part)}.json", run / f"measures_{part}.csv"
    if missing := [path for path in paths if not path.exists()]:
        raise DataError(f"{missing[0]} is missing; run `cuewalk evaluate` on that run first")
    result = json.loads(paths[0].read_text(encoding="utf-8"))
    if not result["data"]["split"].endswith(part):
        raise DataError(f"{paths[0]} is of {result['data']['split']}, not of {part}")
    return result, pd.read_csv(paths[1])


def asked_alone(run: Run) -> Run:
    """Return a run's measures of the questions that its models were asked: the rows of a table compare on the same."""
    result, measured = run
    asked = result["data"]["asked"]
    return result, measured if asked == "all" else measured[measured["question"].isin(asked)]


def everyone(runs: Sequence[Run]) -> dict[str, Any]:
    """Return rows and comparisons on all questions, of the policies that were asked them all."""
    whole = list[Run]()
    for _, measured in runs:
        counts = measured.groupby("policy")["question"].nunique()
        whole.append(({"curves": []}, measured[measured["policy"].isin(counts[counts == counts.max()].index)]))
    return join(whole, ON_ALL)


def beside(runs: Sequence[Run], others: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return rows and comparisons of the runs' policies and of what was trained otherwise, fold by fold.

    Others' policies have their name in front. Those of `ORDERED` are left out where the order is the runs' own.
    """
    kept = ("warm_start", "warm_start+offset", "trained", "trained+offset", *ORDERED)
    folds = list[Run]()
    for fold in range(min(map(len, others.values()))):
        measured = [runs[fold][1][runs[fold][1]["policy"].isin(kept)]]
        measured += [_renamed(name, given[fold][1]) for name, given in others.items()]
        folds.append(({"curves": []}, pd.concat(measured)))
    pairs = [(f"trained{end}", f"{name}{end}") for name in others for end in ("", "+offset")]
    found = join(folds, [*pairs, *((of, f"{name} {of}") for name in others for of in ORDERED)])
    differ = {pair["b"] for pair in found["comparisons"] if any(pair["by_conversation"].values())}
    shown = [row for row in found["rows"] if " " not in row["policy"] or row["policy"] in differ]
    pairs_shown = [pair for pair in found["comparisons"] if " " not in pair["b"] or pair["b"] in differ]
    told_runs = [
        {"name": name, "command": result["command"], "training": result["training"],
         "validation": next((row["reward"] for row in result["controls"] if row["policy"] == "trained"), None)}
        for name, given in {"trained": runs, **others}.items() for result, _ in given
    ]  # fmt: skip
    return {"rows": shown, "comparisons": pairs_shown, "runs": told_runs}


def _renamed(name: str, measured: pd.DataFrame) -> pd.DataFrame:
    told = {"trained": name, "trained+offset": f"{name}+offset"} | {of: f"{name} {of}" for of in ORDERED}
    return measured.assign(policy=measured["policy"].map(told)).dropna(subset="policy")


def by_question(measured: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return one row a question, one column a policy and measure: so that anybody can make the intervals again."""
    whole = pd.concat(measured)
    whole = whole[whole["measure"].isin((*METRICS, "entries", "context_tokens"))]
    wide = whole.pivot_table("value", ["conversation", "question"], ["policy", "measure"])
    wide.columns = [" ".join(names) for names in wide.columns]
    return wide.round(6)


def join(runs: Sequence[Run], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return rows, paired comparisons and curves over all runs; a question is averaged over the runs it is in."""
    whole = pd.concat([measured for _, measured in runs])
    mean = whole.groupby(["policy", "measure", "question"])["value"].mean()
    conversation = dict(zip(whole["question"], whole["conversation"], strict=True))
    policies = [name for name in whole["policy"].unique() if all(name in set(own["policy"]) for _, own in runs)]
    rows = []
    for policy in policies:
        own = mean[policy]
        values = {
            name: float(own[name].mean()) if name in own.index.levels[0] and name in own else None for name in SHOWN
        }
        rows.append({"policy": policy, "n": own["recall_at_8"].size, **values})
    comparisons = []
    for a, b in pairs:
        for metric in METRICS:
            if (a, metric) in mean.index and (b, metric) in mean.index:
                both = pd.concat([mean[a, metric], mean[b, metric]], axis=1, keys=["a", "b"]).dropna()
                paired = compare(both["a"].to_dict(), both["b"].to_dict(), conversation)
                comparisons.append({"metric": metric, "a": a, "b": b, **paired})
    points = defaultdict(list)
    for result, _ in runs:
        for curve in result["curves"]:
            for point in curve["points"]:
                points[curve["policy"], point["offset"]].append(point)
    curves = [
        {"policy": policy, **{key: fmean(point[key] for point in own) for key in own[0]}}
        for (policy, _), own in points.items()
    ]
    return {"rows": rows, "comparisons": comparisons, "curves": curves}


def markdown(result: dict[str, Any]) -> str:
    """Return the joined result as Markdown."""
    detectable = [c["detectable"] for c in result["comparisons"] if c["metric"] == "recall_at_8" and c["detectable"]]
    return "\n\n".join([
        "# Learning",
        f"Made by `{result['command']}` at commit {result['commit']} from the runs below; each says how it was made. "
        "A question asked in several runs is averaged over them first. "
        + (f"Smallest difference in recall@8 found with 80% power: {min(detectable):.3f} to {max(detectable):.3f}."
           if detectable else "With one conversation there is no interval over conversations."),
        "## Policies, the same questions for all",
        table(result["rows"], ("policy", "n", *SHOWN)),
        f"![recall against entries and tokens]({result['name']}_curves.png)",
        "## Paired differences",
        "By question, averaged within each conversation; 95% interval by t over the conversations, and beside it the "
        "bootstrap over questions within conversations.",
        _pairs(result["comparisons"]),
        *_models_text(result["runs"]),
        "## What the order tells",
        "How well the scores at the lines of the first states tell which hold missing evidence (AUROC over all lines).",
        table([row | {"run": run["name"]} for run in result["runs"] for row in run["lines"]],
              ("run", "order", "auroc")),
        *_beside_text(result),
        *_everyone_text(result),
        "## Runs",
        table([{"run": run["name"], **run["data"], "seed": run["seeds"][0], "commit": run["commit"], **run["training"],
                **{f"{stage}_seconds": seconds for stage, seconds in run["training"].get("seconds", {}).items()}}
               for run in result["runs"]],
              ("run", "split", "seed", "n_asked", "grpo_steps", "groups", "groups_live", "groups_per_hour",
               "distinct_trajectories", "reading_seconds", "warm_start_seconds", "grpo_seconds", "commit")),
    ]) + "\n"  # fmt: skip


def _models_text(runs: Sequence[dict[str, Any]]) -> list[str]:
    if not any(run["stopping"] for run in runs):  # orders alone
        return []
    return [
        "## Knowing when to stop",
        "At the first state: does the margin of STOP tell whether the evidence is complete? Beside it the rule on the "
        "best candidate's score; thresholds from validation.",
        table([row | {"run": run["name"]} for run in runs for row in run["stopping"]],
              ("run", "policy", "auroc", "balanced_accuracy")),
        "## Does it read?",
        "Best mean reward on validation over all offsets on STOP: with everything shown, with the candidates' text "
        "blanked, and with another question asked. A policy that reads loses by both.",
        table([row | {"run": run["name"], "sees": row["control"] or "everything"}
               for run in runs for row in run["controls"]], ("run", "policy", "sees", "reward")),
    ]  # fmt: skip


def _everyone_text(result: dict[str, Any]) -> list[str]:
    if "everyone" not in result:
        return []
    return [
        "## All questions, of the policies that were asked them all",
        table(result["everyone"]["rows"], ("policy", "n", *SHOWN)),
        _pairs(result["everyone"]["comparisons"]),
    ]


def _beside_text(result: dict[str, Any]) -> list[str]:
    if "beside" not in result:
        return []
    own = result["beside"]
    return [
        "## Trained otherwise",
        "From the same warm start by `python -m cuewalk.scripts.controls`, or with another order; on the same "
        "questions; `+offset` is chosen on validation for each.",
        table(own["rows"], ("policy", "n", *SHOWN)),
        _pairs(own["comparisons"]),
        "Mean reward on validation with the offset on STOP that is best there, and what trained and measured it:",
        "\n".join(
            f"- `{run['name']}` {'–' if run['validation'] is None else format(run['validation'], '.3f')}: "
            f"`{run['command']}`"
            for run in own["runs"]
        ),
    ]


def _pairs(comparisons: Sequence[Mapping[str, Any]]) -> str:
    rows = [(c["metric"], f"{c['a']} − {c['b']}", f"{c['difference']:+.3f}", interval(c["low"], c["high"]),
             interval(c["question_low"], c["question_high"]), c["n"],
             ", ".join(f"{name} {value:+.3f}" for name, value in c["by_conversation"].items()))
            for c in comparisons]  # fmt: skip
    titles = ("metric", "a − b", "difference", "t interval", "question interval", "n", "by conversation")
    return markdown_table(titles, rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot recall against entries and against tokens: search and every model as a curve, the rest as points."""
    rows, curves = pd.DataFrame(result["rows"]), pd.DataFrame(result["curves"])
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.5), sharey=True)
    cost = {"entries": "entries in the working set (mean)", "context_tokens": "context tokens a question (mean)"}
    for axes, (of, title) in zip(panels, cost.items(), strict=True):
        search = rows[rows["policy"].str.startswith("top_k")].sort_values(of)
        axes.plot(search[of], search["evidence_recall"], color="0.6", marker=".", label="search, top k")
        for policy, own in curves.groupby("policy") if len(curves) else ():
            line = own.sort_values(of)
            axes.plot(line[of], line["evidence_recall"], label=f"{policy}, by offset on STOP")
        for place, row in enumerate(rows.drop(search.index).to_dict("records")):
            axes.plot(row[of], row["evidence_recall"], "osD^vP*X"[place % 8], ms=5, label=row["policy"])
        axes.set(xlabel=title)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="share of the evidence found")
    panels[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    """Read the command line, join the runs, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories that were evaluated")
    parser.add_argument("--beside", nargs="*", default=[], metavar="NAME=RUN,…", help="trained otherwise, one a fold")
    parser.add_argument("--part", default="test", choices=("val", "test"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/learning"), help="folder and name of the files")
    options = parser.parse_args()
    named = dict(pair.partition("=")[::2] for pair in options.beside)
    try:
        whole = [read_run(run, options.part) for run in options.runs]
        others = {
            name: [asked_alone(read_run(Path(run), options.part)) for run in given.split(",")]
            for name, given in named.items()
        }
    except DataError as error:
        parser.error(str(error))
    runs = [asked_alone(run) for run in whole]
    told = (
        "name", "command", "commit", "versions", "seeds", "data", "training", "stopping", "controls", "lines",
    )  # fmt: skip
    facts = [{key: result[key] for key in told} for result, _ in runs]
    for fact in facts:  # ids of the questions stay in each run's own result
        fact["data"] = {key: value for key, value in fact["data"].items() if key != "asked"}
    result = {
        "name": options.out.name,
        **provenance(),
        "seeds": sorted({s for f in facts for s in f["seeds"]}),
        **join(runs, PAIRS),
    }
    result["runs"] = facts
    if any(own["data"]["asked"] != "all" for own, _ in whole):  # else it says the same again
        result["everyone"] = everyone(whole)
    if others:
        result["beside"] = beside(runs, others)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    options.out.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    plot(result, options.out.with_name(f"{options.out.name}_curves.png"))
    measured = [own for _, own in whole] + [_renamed(name, own) for name, given in others.items() for _, own in given]
    table_file = options.out.with_name(f"{options.out.name}_questions.csv.gz")
    by_question(measured).to_csv(table_file, compression={"method": "gzip", "mtime": 0})
    print(f"written to {options.out}.json, .md, _curves.png and _questions.csv.gz")


if __name__ == "__main__":
    main()
