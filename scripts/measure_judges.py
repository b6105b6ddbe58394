"""Score cheats, an honest walker and the oracle under every preset; calibrate answer judges; count what was attacked.

    python scripts/measure_judges.py [--out docs/results/judges] [--only cheats,calibration,agreement,fuzz]

Synthetic test conversations, and LoCoMo's validation conversation where CUEWALK_DATA names its folder; cheats on its
training conversations too, each beside an honest walker that was trained on the others. Questions are told apart by
what the first search left: `solved`, `reachable` (a candidate holds missing gold), `unreachable`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cuewalk.env import EnvConfig, Gold, Question, RetrievalEnv, Tasks, format_action, load_locomo
from cuewalk.env.own import load_synthetic
from cuewalk.env.tasks import CATEGORIES, select
from cuewalk.judges import PRESETS, JudgeConfig, TrajectoryJudge, covered, evidence_recall
from cuewalk.memory import Entry, MemoryGraph, SentenceEncoder, build_graph
from cuewalk.memory.models import load_tokenizer
from cuewalk.memory.reader import LocalReader
from cuewalk.rl.ranker import Ranker, fit_ranker
from cuewalk.scripts.baselines import expand_likely, searching_oracle
from cuewalk.scripts.calibrate import by_likelihood, by_score, calibrate
from cuewalk.scripts.measures import answer_words
from cuewalk.scripts.results import made_by, measure, table

SCORES = ("answer_em", "answer_f1", "answer_f1_xmemory", "bleu1", "rouge_l")
ROOT = Path(__file__).parents[1]
Policy = Callable[[RetrievalEnv], str]
Data = tuple[Tasks, dict[str, MemoryGraph]]


def first_letters(count: int) -> Policy:
    """Take the first lines unread, then stop."""

    def policy(env: RetrievalEnv) -> str:
        labels = [label for label, _ in env.state.frontier][: min(4, count - len(env.state.taken), env.state.budget)]
        return f"EXPAND {' '.join(labels)}" if labels else "STOP"

    return policy


def one_by_one(env: RetrievalEnv) -> str:
    """Take the first line, one a step, as long as there is budget; unlike `expand all` it sees what each links to."""
    frontier = env.state.frontier
    return f"EXPAND {frontier[0][0]}" if frontier else f"REFINE {env.question.text} {len(env.steps)}"


def near_duplicates(env: RetrievalEnv) -> str:
    """Take what is most like what is there already, three times."""
    graph, state = env.graph, env.state
    if len(state.taken) == 3 or not state.frontier:
        return "STOP"
    have = graph.vectors[[graph.order[entry] for entry in state.working]]
    return f"EXPAND {max(state.frontier, key=lambda f: (have @ graph.vectors[graph.order[f[1].entry]]).max())[0]}"


def overspend(env: RetrievalEnv) -> str:
    """Take three lines unread, then ask for more than the budget has: an end that costs nothing but its penalty."""
    labels = [label for label, _ in env.state.frontier]
    return f"EXPAND {' '.join(labels[: 3 if not env.steps else 4])}" if labels else "STOP"


# Each gets the environment and replies with text, as a policy does.
CHEATS: dict[str, Policy] = {
    "stop at once": lambda env: "STOP",
    "never stop": one_by_one,
    "expand all": first_letters(6),
    "first letters unread": first_letters(3),
    "repeat the query": lambda env: f"REFINE {env.question.text}",
    "flood of refines": lambda env: f"REFINE {env.question.text} {len(env.steps)}",
    "copy the question": lambda env: f"REFINE about: {env.question.text}" if not env.steps else "STOP",
    "always malformed": lambda env: "I would expand A",
    "near-duplicates": near_duplicates,
    "budget as a stop": overspend,
}


def walk(env: RetrievalEnv, policy: Policy) -> Any:
    """Return the trajectory of a policy that speaks text."""
    env.reset(seed=0)
    ended = False
    while not ended:
        _, _, ended, _, _ = env.step(policy(env))
    return env.trajectory()


def stratum(graph: MemoryGraph, question: Question, gold: Gold) -> str:
    """Return what the first search left of a question."""
    env = RetrievalEnv(graph, question)
    env.reset()
    missing = set(gold.evidence) - covered(graph, env.state.working)
    if not missing:
        return "solved"
    seen = covered(graph, [link.entry for _, link in env.state.frontier])
    return "reachable" if missing & seen else "unreachable"


def data_sets() -> dict[str, tuple[Data, Data]]:
    """Return by name what is scored, and what the honest walker is trained on."""
    encoder = SentenceEncoder()

    def built(tasks: Tasks) -> Data:
        tasks = select(tasks, evidence=True)
        return tasks, {id_: build_graph(c, encoder) for id_, c in tqdm(tasks.conversations.items(), desc="memories")}

    found = {"synthetic": (built(load_synthetic("test", 8)), built(load_synthetic("train", 12)))}
    if folder := os.environ.get("CUEWALK_DATA"):
        train = select(load_locomo(folder, "conv-4-1-5", "train"), clean=True)
        found["locomo val"] = (built(load_locomo(folder, "conv-4-1-5", "val")), built(train))
    return found


def honest_walker(train: Data) -> Policy:
    """Return the ranker, fitted on all conversations but the one asked: it takes what is likelier than the price."""
    tasks, graphs = train

    @cache
    def fitted(left_out: str | None) -> Ranker:
        kept = [question.id for question in tasks.questions if question.conversation_id != left_out]
        return fit_ranker(select(tasks, ids=kept), graphs, EnvConfig())

    def policy(env: RetrievalEnv) -> str:
        asked = env.question.conversation_id
        ranker = fitted(asked if asked in tasks.conversations else None)
        return format_action(expand_likely(ranker, JudgeConfig().price)(env, Gold("", (), 4)))

    return policy


def oracle_for(tasks: Tasks) -> Policy:
    """Return the oracle as a policy that speaks text."""
    return lambda env: format_action(searching_oracle(env, tasks.gold[env.question.id]))


def fat(graph: MemoryGraph) -> MemoryGraph:
    """Return the same memory with every four entries merged into one: the cheat of a builder, not of a walker."""
    entries, merged = list(graph.entries.values()), []
    for start in range(0, len(entries), 4):
        four = entries[start : start + 4]
        statements = tuple(s for entry in four for s in entry.statements)
        segments = tuple(dict.fromkeys(s for entry in four for s in entry.segments))
        merged.append(Entry(f"e{start // 4}", four[0].abstraction, statements, segments))
    vectors = graph.vectors[::4].copy()
    config = replace(graph.config, groups=None)
    return MemoryGraph(graph.conversation, graph.segments, merged, vectors, graph.encoder, config, {}, "")


def cheats() -> dict[str, Any]:
    """Mean reward of every cheat, of an honest walker and of the oracle, by preset and stratum."""
    rows, checks = [], []
    sets = data_sets()
    if "locomo val" in sets:
        sets["locomo train, left out"] = (sets["locomo val"][1],) * 2
    for name, (scored, train) in sets.items():
        tasks, graphs = scored
        policies = CHEATS | {"heuristic": honest_walker(train), "oracle": oracle_for(tasks)}
        strata = {q.id: stratum(graphs[q.conversation_id], q, tasks.gold[q.id]) for q in tasks.questions}
        for policy, play in tqdm(policies.items(), desc=f"cheats, {name}"):
            walked = [(q, walk(RetrievalEnv(graphs[q.conversation_id], q), play)) for q in tasks.questions]
            for preset in PRESETS:
                judge = TrajectoryJudge(JudgeConfig(preset=preset))
                reward = {q.id: judge.score(t, graphs[q.conversation_id], tasks.gold[q.id]).reward for q, t in walked}
                for part in ("solved", "reachable", "unreachable", "all"):
                    chosen = [r for id_, r in reward.items() if part in ("all", strata[id_])]
                    rows.append({"data": name, "preset": preset, "policy": policy, "stratum": part, "n": len(chosen),
                                 "reward": float(np.mean(chosen))})  # fmt: skip
        if train[0] is not tasks:
            checks.append({"data": name, **_fat_entries(tasks, graphs)})
    return {"rows": rows, "fat_entries": checks}


def _fat_entries(tasks: Tasks, graphs: dict[str, MemoryGraph]) -> dict[str, float]:
    """Recall of plain search at 8 entries and at 300 tokens, over entries as built and merged by fours."""
    tokenizer = load_tokenizer("smollm2-135m")
    merged = {id_: fat(graph) for id_, graph in graphs.items()}
    found: dict[str, list[float]] = {}
    for question in tasks.questions:
        gold = tasks.gold[question.id]
        for kind, memory in (("plain", graphs), ("fat", merged)):
            graph = memory[question.conversation_id]
            ranking = [hit.entry for hit in graph.search(question.text, 40)]
            found.setdefault(f"{kind}_at_8", []).append(evidence_recall(graph, ranking[:8], gold))
            spent, fitting = 0, []
            for entry in ranking:
                spent += len(tokenizer(graph.entries[entry].value, add_special_tokens=False)["input_ids"])
                if spent > 300:
                    break
                fitting.append(entry)
            found.setdefault(f"{kind}_at_300t", []).append(evidence_recall(graph, fitting, gold))
    return {name: float(np.mean(values)) for name, values in found.items()}


def calibration() -> list[dict[str, Any]]:
    """Acceptance by kind of answer, of every judge of answers that needs no endpoint."""
    rows = []
    reader = LocalReader.from_pretrained("smollm2-135m")
    for name, ((tasks, graphs), _) in data_sets().items():
        judges = {f"{score} >= .5": by_score(score) for score in SCORES}
        judges["likelihood (SmolLM2-135M)"] = by_likelihood(reader, graphs)
        for judge, accepts in judges.items():
            for rate in calibrate(accepts, tasks, 40):
                low, high = rate.interval
                share = rate.accepted / rate.n if rate.n else None
                row = {"data": name, "judge": judge, "kind": rate.kind, "n": rate.n}
                rows.append(row | {"accepted": share, "low": low, "high": high})
    return rows


def agreement() -> list[dict[str, Any]]:
    """How far `answer_words` agrees with `evidence` on the first search's eight entries, by category."""
    rows = []
    for name, ((tasks, graphs), _) in data_sets().items():
        pairs: dict[int, list[tuple[float, float]]] = {}
        for question in tasks.questions:
            gold, graph = tasks.gold[question.id], graphs[question.conversation_id]
            entries = [hit.entry for hit in graph.search(question.text, 8)]
            words = answer_words(graph, entries, gold)
            if words is not None:
                pairs.setdefault(gold.category, []).append((evidence_recall(graph, entries, gold), words))
        for category, found in sorted(pairs.items()):
            a, b = np.array(found).T
            rows.append({"data": name, "category": f"{category} {CATEGORIES.get(category, '')}", "n": len(found),
                         "evidence": float(a.mean()), "answer_words": float(b.mean()),
                         "agree": float(np.mean((a >= 0.5) == (b >= 0.5))),
                         "correlation": float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else None})  # fmt: skip
    return rows


def fuzz() -> dict[str, Any]:
    """Run the attack tests on 100,000 hypothesis cases."""
    cases = 100_000
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/env/test_hostile.py",
        "-k",
        "fuzz",
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"CUEWALK_FUZZ": str(cases)}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    if done.returncode:
        print(done.stdout[-3000:])
    walks = max(300, cases // 20)  # as in tests/env/test_hostile.py
    return {"cases": cases, "walks": walks, "passed": done.returncode == 0, "seconds": time.perf_counter() - started}


def markdown(result: dict[str, Any]) -> str:
    """Return the result as tables."""
    parts = ["# The judges, measured", made_by(result)]
    if "cheats" in result:
        rows = result["cheats"]["rows"]
        for data in dict.fromkeys(row["data"] for row in rows):
            for part in ("reachable", "all"):
                chosen = [r for r in rows if r["data"] == data and r["stratum"] == part]
                by = {(r["policy"], r["preset"]): r["reward"] for r in chosen}
                lines = [{"policy": policy, **{preset: by[policy, preset] for preset in PRESETS}}
                         for policy in dict.fromkeys(r["policy"] for r in chosen)]  # fmt: skip
                parts += [f"## Mean reward, {data}, {part} (n = {chosen[0]['n']})", table(lines, ("policy", *PRESETS))]
        parts += ["`heuristic`, the honest walker, is the ranker of `rl/ranker.py`, trained on other conversations; "
                  "`oracle` knows the gold. The JSON also holds the solved and unreachable questions.",
                  "## Fat entries", "Recall of plain search over the memory as built, and with every four entries "
                  "merged into one: a cheat at equal entries, where it pays at all; at equal tokens it loses.",
                  table(result["cheats"]["fat_entries"], ("data", "plain_at_8", "fat_at_8", "plain_at_300t",
                                                           "fat_at_300t"))]  # fmt: skip
    if "calibration" in result:
        parts += ["## Calibration", "Share of answers accepted, by kind, with a 95% Wilson interval. `exact` and "
                  "`paraphrase` are right, the others wrong.",
                  table(result["calibration"], ("data", "judge", "kind", "n", "accepted", "low", "high"))]  # fmt: skip
    if "agreement" in result:
        parts += ["## `answer_words` beside `evidence`",
                  "Eight entries of plain search; `agree`: both at least half, or both below.",
                  table(result["agreement"], ("data", "category", "n", "evidence", "answer_words", "agree",
                                               "correlation"))]  # fmt: skip
    if "fuzz" in result:
        done = result["fuzz"]
        parts += ["## Attacks", f"{done['cases']} generated texts through each of the renderer, the grammar and the "
                  f"prompts' fences, {done['walks']} walks of the whole environment over hostile memories: "
                  f"{'no' if done['passed'] else 'A'} failure, {done['seconds']:.0f} s."]  # fmt: skip
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    functions = (cheats, calibration, agreement, fuzz)
    measure(__doc__, "judges", {function.__name__: function for function in functions}, dict, markdown)
