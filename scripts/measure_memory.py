"""Measure the memory on LoCoMo and write docs/results/memory.{json,md}.

    CUEWALK_DATA=path/to/data python scripts/measure_memory.py [--out docs/results/memory] [--only links,context]

Choices are made on the conversations 26, 30, 41, 43, 47 (`dev`); 42, 44, 48, 49, 50 (`test`) are reported apart.
Sections: sizes, links, refining, context, evidence, ablations. Those not in --only stay as the file has them.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from tqdm import tqdm

from cuewalk.env import Expand, Gold, Question, Refine, RetrievalEnv, Tasks, load_locomo
from cuewalk.env.state import EnvConfig, apply
from cuewalk.env.tasks import join_tasks, select
from cuewalk.judges import covered, evidence_recall
from cuewalk.memory import LINK_KINDS, BuildConfig, MemoryGraph, SentenceEncoder, build_graph
from cuewalk.memory.groups import GroupConfig, Groups, objective
from cuewalk.memory.models import load_tokenizer
from cuewalk.memory.reader import LocalReader
from cuewalk.rl.oracle import oracle_action
from cuewalk.scripts.baselines import run_scripted
from cuewalk.scripts.contexts import FORMS, Form, render_context
from cuewalk.scripts.expansion import expand_while_surer
from cuewalk.scripts.hierarchy import select_backbone
from cuewalk.scripts.inspection import describe
from cuewalk.scripts.paired import compare
from cuewalk.scripts.results import made_by, measure, table

CAP = 24
DEFAULT = EnvConfig().links
PAPERS = {
    "Memora": {"entries": 344},
    "xMemory": {"entries": 290, "groups": 65, "group_size_mean": 4.48, "reassigned": 0.4491},
}
XMEMORY_COVER = {"naive RAG": (10.81, 1979.26), "xMemory": (5.66, 975)}
READER_QUESTIONS = 60


class Remembering:
    """An encoder that encodes a text once, however many memories are built from it."""

    def __init__(self) -> None:
        self._encoder = SentenceEncoder()
        self.name = self._encoder.name
        self._known: dict[str, Any] = {}

    def encode(self, texts: Sequence[str], *, progress: bool = False) -> Any:
        """Return unit vectors, (len(texts), d)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        self._known |= dict(zip(new, self._encoder.encode(new) if new else (), strict=True))
        return np.stack([self._known[text] for text in texts])


ENCODER = Remembering()


@cache
def tokens(text: str) -> int:
    """Return how many tokens of SmolLM2 a text has."""
    return len(_tokenizer()(text, add_special_tokens=False)["input_ids"])


@cache
def _tokenizer() -> Any:
    return load_tokenizer("smollm2-135m")


@cache
def load(split: str) -> Tasks:
    """Return the questions with evidence of `dev` or `test`."""
    folder = os.environ["CUEWALK_DATA"]
    parts = ("train", "val") if split == "dev" else ("test",)
    return select(join_tasks(load_locomo(folder, "conv-4-1-5", part) for part in parts), evidence=True)


def build(split: str, config: BuildConfig) -> dict[str, MemoryGraph]:
    """Build the memories of a split."""
    bar = tqdm(load(split).conversations.items(), desc=f"memories, {split}", disable=None, leave=False)
    return {id_: build_graph(conversation, ENCODER, config) for id_, conversation in bar}


def each(split: str, graphs: dict[str, MemoryGraph]) -> list[tuple[MemoryGraph, Question, Gold]]:
    """Return every question with its graph and gold."""
    tasks = load(split)
    return [(graphs[q.conversation_id], q, tasks.gold[q.id]) for q in tasks.questions]


def mean(values: Sequence[float]) -> float:
    """Return the mean as a plain float."""
    return float(np.mean(values))


def reassigned(graph: MemoryGraph, rules: GroupConfig) -> tuple[Groups, float]:
    """Group a memory's entries again, segment by segment, and return the share that changed groups on the way."""
    groups, entries = Groups(rules), list(graph.entries.values())
    starts = [i for i, e in enumerate(entries) if i == 0 or e.segments[0] != entries[i - 1].segments[0]]
    for start, end in zip(starts, [*starts[1:], len(entries)], strict=True):
        groups.add(range(start, end), graph.vectors[:end])
    return groups, len(groups.reassigned) / len(entries)


def sizes() -> dict[str, Any]:
    """Entries, anchors and groups of each conversation, beside the papers'."""
    found: dict[str, Any] = {}
    for split in ("dev", "test"):
        for id_, graph in build(split, BuildConfig()).items():
            rules = graph.config.groups
            assert rules is not None
            found[id_] = {"split": split, **describe(graph), "reassigned": reassigned(graph, rules)[1]}
    return {"conversations": found, "papers": PAPERS}


def links() -> dict[str, Any]:
    """What the first search finds, and what one and two hops reach, by kind of link."""
    kinds: dict[str, tuple[str, ...]] = {kind: (kind,) for kind in LINK_KINDS if kind != "search"}
    kinds |= {"all": tuple(k for k in LINK_KINDS if k != "search"), "next_hits": ("search",), "default": DEFAULT,
              "everything": LINK_KINDS}  # fmt: skip
    rows, comparisons = [], []
    for split in ("dev", "test"):
        asked = each(split, build(split, BuildConfig()))
        for k in (5, 8, 10, 20):
            recall = mean([evidence_recall(g, [h.entry for h in g.search(q.text, k)], gold) for g, q, gold in asked])
            rows.append({"links": "none", "hops": 0, "k": k, "split": split, "reachable": recall,
                         "oracle_recall": recall, "oracle_entries": float(k), "frontier": 0.0})  # fmt: skip
        by_kind: dict[str, list[tuple[float, ...]]] = {}
        for name, ways in tqdm(kinds.items(), desc=f"links, {split}", disable=None):
            measured = [_one_hop(graph, question, gold, ways) for graph, question, gold in asked]
            by_kind[name] = measured
            columns = np.array(measured).mean(axis=0)
            rows.append({"links": name, "hops": 1, "k": 5, "split": split, "reachable": columns[0],
                         "oracle_recall": columns[1], "oracle_entries": columns[2], "frontier": columns[3],
                         "frontier_tokens": columns[4], "context_tokens": columns[5]})  # fmt: skip
            if name != "next_hits":
                rows.append(_two_hops(asked, name, ways, split))
        conversation = {question.id: question.conversation_id for _, question, _ in asked}
        for name in ("all", "default", "everything"):
            for column, metric in ((1, "oracle_recall"), (4, "frontier_tokens"), (5, "context_tokens")):
                a, b = (
                    {q.id: row[column] for (_, q, _), row in zip(asked, by_kind[which], strict=True)}
                    for which in (name, "next_hits")
                )
                comparisons.append({"metric": metric, "a": name, "b": "next_hits", "split": split,
                                    **compare(a, b, conversation)})  # fmt: skip
        rows += _walks(split, asked)
    return {"rows": rows, "comparisons": comparisons}


def _one_hop(graph: MemoryGraph, question: Question, gold: Gold, kinds: Sequence[str]) -> tuple[float, ...]:
    """Return reachable (uncut), oracle recall and entries at F <= 24, |F|, and tokens of F and of the oracle's W."""
    working = [hit.entry for hit in graph.search(question.text, 5)]
    wanted = set(gold.evidence)
    reach = {entry for w in working for entry in graph.links(w, kinds)}
    frontier = [link.entry for link in graph.frontier(question.text, working, set(working), kinds, CAP)]
    missing, picks = wanted - covered(graph, working), []
    while missing:
        best = max(frontier, key=lambda e: len(missing & set(graph.entries[e].sources)), default=None)
        if best is None or not missing & set(graph.entries[best].sources):
            break
        picks.append(best)
        missing -= set(graph.entries[best].sources)
    found = [*working, *picks]
    shown = sum(tokens(" ".join(graph.entries[e].abstraction.split()[:8])) for e in frontier)
    read = sum(tokens(graph.entries[e].value) for e in found)
    return (evidence_recall(graph, {*working, *reach}, gold), evidence_recall(graph, found, gold), float(len(found)),
            float(len(frontier)), float(shown), float(read))  # fmt: skip


def _two_hops(asked: Sequence[tuple[MemoryGraph, Question, Gold]], name: str, kinds: Sequence[str], split: str) -> Any:
    """Return what two hops reach when nothing is cut, and how much that is."""
    recall, size = [], []
    for graph, question, gold in asked:
        working = [hit.entry for hit in graph.search(question.text, 5)]
        one = {entry for w in working for entry in graph.links(w, kinds)} | set(working)
        two = one | {entry for w in one for entry in graph.links(w, kinds)}
        recall.append(evidence_recall(graph, two, gold))
        size.append(float(len(two)))
    return {"links": name, "hops": 2, "k": 5, "split": split, "reachable": mean(recall), "oracle_recall": None,
            "oracle_entries": None, "frontier": mean(size)}  # fmt: skip


def _walks(split: str, asked: Sequence[tuple[MemoryGraph, Question, Gold]]) -> list[dict[str, Any]]:
    """Return the oracle's walk in the environment itself, budget 6, by what its frontier holds."""
    rows = []
    for name, kinds in (("default", DEFAULT), ("next_hits", ("search",)), ("everything", LINK_KINDS)):
        recall, size = [], []
        for graph, question, gold in asked:
            env = RetrievalEnv(graph, question, EnvConfig(links=kinds))
            walked = run_scripted(oracle_action, env, gold)
            recall.append(evidence_recall(graph, walked.working, gold))
            size.append(float(len(walked.working)))
        rows.append({"links": f"walk, {name}", "hops": 6, "k": 5, "split": split, "reachable": None,
                     "oracle_recall": mean(recall), "oracle_entries": mean(size), "frontier": float(CAP)})  # fmt: skip
    return rows


def refining() -> list[dict[str, Any]]:
    """What a refined query could bring where nothing in F helps: anchors of W, which a small policy could copy.

    `some` is the share of those questions in which at least one anchor's new lines hold missing evidence, as an oracle
    would choose it; `each` the mean share of the anchors that do, as chance would.
    """
    rows = []
    for split, lines in product(("dev", "test"), (2, 4)):
        rules, asked = EnvConfig(new_lines=lines), each(split, build(split, BuildConfig()))
        incomplete, found = 0, list[list[bool]]()
        for graph, question, gold in asked:
            env = RetrievalEnv(graph, question, rules)
            env.reset()
            missing = set(gold.evidence) - covered(graph, env.state.working)
            incomplete += bool(missing)
            if not missing or isinstance(oracle_action(env, gold), Expand):
                continue
            queries = dict.fromkeys(anchor for entry in env.state.working for anchor in graph.entries[entry].anchors)
            shown = [apply(env.state, Refine(query), graph, rules)[1].candidates for query in queries]
            found.append([bool(missing & covered(graph, [link.entry for _, link in new])) for new in shown])
        rows.append({
            "split": split, "new_lines": lines, "n": len(asked), "incomplete": incomplete, "out_of_reach": len(found),
            "anchors": mean([len(own) for own in found]), "some": mean([any(own) for own in found]),
            "each": mean([mean(own) for own in found if own]),
        })  # fmt: skip
    return rows


def context_sources(graph: MemoryGraph, entries: Sequence[str], form: Form = "entries") -> set[str]:
    """Return the ids of the messages that a context tells of: cited by entries shown, or in segments shown raw."""
    told: set[str] = set()
    for entry in (graph.entries[id_] for id_ in entries):
        if form != "segment":
            told |= set(entry.sources)
        if form in ("segment", "segment+entries"):
            told |= {message for id_ in entry.segments for message in graph.segment_by_id[id_].messages}
    return told


def context() -> list[dict[str, Any]]:
    """Tokens and evidence told of the first search's five entries, in each context form."""
    rows = []
    for split in ("dev", "test"):
        asked = each(split, build(split, BuildConfig()))
        for form in FORMS:
            told, size = [], []
            for graph, question, gold in asked:
                entries = [hit.entry for hit in graph.search(question.text, 5)]
                wanted = set(gold.evidence)
                told.append(len(context_sources(graph, entries, form) & wanted) / len(wanted))
                size.append(float(tokens(render_context(graph, entries, form))))
            rows.append({"form": form, "split": split, "k": 5, "evidence": mean(told), "tokens": mean(size)})
    return rows


def evidence() -> dict[str, Any]:
    """XMemory's evidence analysis: blocks and tokens until every content word of the answer was shown."""
    methods = ("rag", "top_k", "stage I")
    rag = BuildConfig(notes=False, unit="segment", abstraction_words=0, update_threshold=1.01, groups=None,
                      search_weights=(1.0, 0.0, 0.0))  # fmt: skip
    rows = []
    for split in ("dev", "test"):
        chunks, graphs = build(split, rag), build(split, BuildConfig())
        tasks = load(split)
        blocks: dict[str, list[list[str]]] = {name: [] for name in methods}
        for question in tqdm(tasks.questions, desc=f"evidence, {split}", disable=None):
            chunk, graph = chunks[question.conversation_id], graphs[question.conversation_id]
            found = {"rag": (chunk, chunk.search(question.text, 20)), "top_k": (graph, graph.search(question.text, 20)),
                     "stage I": (graph, select_backbone(graph, question.text, 20))}  # fmt: skip
            for name, (owner, hits) in found.items():
                blocks[name].append([owner.entries[hit.entry].value for hit in hits])
        for name in methods:
            rows.append({"method": name, "split": split, **_cover(blocks[name], tasks)})
    return {"rows": rows, "reader": _surer(), "papers": XMEMORY_COVER}


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - set(ENGLISH_STOP_WORDS)


def _cover(blocks: Sequence[Sequence[str]], tasks: Tasks) -> dict[str, float]:
    """Over the answers that the 20 blocks cover: blocks and tokens needed, in order; hits over all blocks."""
    need, cost, hits, complete = [], [], [], []
    for question, texts in zip(tasks.questions, blocks, strict=True):
        units = _words(tasks.gold[question.id].answer)
        if not units:
            continue
        hits += [len(units & _words(text)) for text in texts]
        left, spent = set(units), 0
        for number, text in enumerate(texts, start=1):
            left -= _words(text)
            spent += tokens(text)
            if not left:
                need.append(float(number))
                cost.append(float(spent))
                break
        complete.append(not left)
    count = len(hits)
    return {"n": len(complete), "covered": mean([float(done) for done in complete]), "blocks": mean(need),
            "tokens": mean(cost), "hit_1": hits.count(1) / count, "hit_2": hits.count(2) / count,
            "hit_more": sum(hit > 2 for hit in hits) / count}  # fmt: skip


def _surer() -> list[dict[str, Any]]:
    """Stage II on dev with SmolLM2 as the reader: what it adds, against the same entries without it."""
    reader = LocalReader.from_pretrained("smollm2-135m")
    graphs, tasks = build("dev", BuildConfig()), load("dev")
    rows = []
    questions = sorted(tasks.questions, key=lambda q: q.id[::-1])[:READER_QUESTIONS]
    for name in ("search", "stage I"):
        before, after, tokens_before, tokens_after, probed, fell = [], [], [], [], [], []
        for question in tqdm(questions, desc=f"stage II after {name}", disable=None):
            graph, wanted = graphs[question.conversation_id], set(tasks.gold[question.id].evidence)
            hits = select_backbone(graph, question.text, 8) if name == "stage I" else graph.search(question.text, 8)
            entries = [hit.entry for hit in hits]
            done = expand_while_surer(graph, question.text, entries, reader)
            told = {s for e in entries for s in graph.entries[e].sources}
            raw = {m for s in graph.segments if s.id in done.raw for m in s.messages}
            before.append(len(told & wanted) / len(wanted))
            after.append(len((told | raw) & wanted) / len(wanted))
            tokens_before.append(float(sum(tokens(graph.entries[e].value) for e in entries)))
            tokens_after.append(float(tokens(done.text)))
            probed.append(float(done.tokens))
            fell.append(done.uncertainty[0] - done.uncertainty[-1])
        rows.append({"first": name, "n": len(questions), "evidence_before": mean(before), "evidence": mean(after),
                     "tokens_before": mean(tokens_before), "tokens": mean(tokens_after),
                     "reader_tokens": mean(probed), "uncertainty_fell": mean(fell)})  # fmt: skip
    return rows


def ablations() -> list[dict[str, Any]]:
    """The memory with one thing changed: size, search, one-hop oracle, and groups that changed on the way."""
    base, rules = BuildConfig(), GroupConfig()
    variants: dict[str, BuildConfig] = {
        "default": base,
        "without notes": replace(base, notes=False),
        "no abstraction": replace(base, notes=False, abstraction_words=0),
        "no abstraction, chunks": replace(base, notes=False, abstraction_words=0, unit="segment"),
        "no update": replace(base, update_threshold=1.01),
        "no anchors": replace(base, anchors_per_entry=0),
        "anchors in search": replace(base, search_weights=(2.0, 1.0, 1.0)),
        "no groups": replace(base, groups=None),
        "split only": replace(base, groups=replace(rules, join=False)),
        "merge only": replace(base, groups=replace(rules, split=False)),
        "neither": replace(base, groups=replace(rules, split=False, join=False)),
        **{f"cap {cap}": replace(base, groups=replace(rules, cap=cap)) for cap in (8, 10, 12, 14)},
    }
    rows = []
    for split in ("dev", "test"):
        for name, config in tqdm(variants.items(), desc=f"ablations, {split}", disable=None):
            graphs = build(split, config)
            asked = each(split, graphs)
            row: dict[str, Any] = {"ablation": name, "split": split}
            row["entries"] = mean([float(len(graph.entries)) for graph in graphs.values()])
            for k in (5, 8):
                found = [evidence_recall(g, [h.entry for h in g.search(q.text, k)], gold) for g, q, gold in asked]
                row[f"recall_at_{k}"] = mean(found)
            row["tokens_at_8"] = mean(
                [float(sum(tokens(g.entries[h.entry].value) for h in g.search(q.text, 8))) for g, q, _ in asked]
            )
            measured = np.array([_one_hop(g, q, gold, DEFAULT) for g, q, gold in asked]).mean(axis=0)
            row["oracle_recall"] = float(measured[1])
            if config.groups:
                row["group_links"] = mean([_one_hop(g, q, gold, ("group",))[1] for g, q, gold in asked])
                row["stage_I_at_8"] = mean([evidence_recall(g, _backbone(g, q, 8), gold) for g, q, gold in asked])
                again = [(g, *reassigned(g, config.groups)) for g in graphs.values()]
                row["groups"] = mean([float(len(groups.members)) for _, groups, _ in again])
                row["group_size_mean"] = row["entries"] / row["groups"]
                row["reassigned"] = mean([share for _, _, share in again])
                row["objective"] = mean(
                    [objective(np.stack([g.vectors[m].mean(axis=0) for m in groups.members.values()]),
                               [len(m) for m in groups.members.values()])
                     for g, groups, _ in again]
                )  # fmt: skip
            rows.append(row)
    return rows


def _backbone(graph: MemoryGraph, question: Question, k: int) -> list[str]:
    found = [link.entry for link in select_backbone(graph, question.text, k)]
    return found + [h.entry for h in graph.search(question.text, max(1, k - len(found)), found)][: k - len(found)]


def markdown(result: dict[str, Any]) -> str:
    """Return the result as tables."""
    parts = [
        "# The memory, measured",
        f"{made_by(result)} LoCoMo, questions of categories 1 to 4 with "
        f"evidence; `dev` is what was chosen on (conversations 26, 30, 41, 43, 47; n = {result['data']['n_dev']}), "
        f"`test` the other five (n = {result['data']['n_test']}). Tokens are SmolLM2's. Nothing here used a language "
        "model but the rows of stage II.",
    ]
    if "sizes" in result:
        rows = [{"conversation": id_, **row} for id_, row in result["sizes"]["conversations"].items()]
        rows += [{"conversation": f"{name} (paper)", **row} for name, row in result["sizes"]["papers"].items()]
        parts += ["## Sizes", "Beside the papers' means over the same ten conversations, built with a model.",
                  table(rows, ("conversation", "split", "messages", "segments", "entries", "anchors",
                                "anchors_per_entry", "groups", "group_size_mean", "singletons", "objective",
                                "reassigned"))]  # fmt: skip
    if "links" in result:
        rows = sorted(result["links"]["rows"], key=lambda row: (row["split"], row["hops"], row["k"]))
        parts += ["## Links",
                  "`reachable`: share of the evidence in the first search (k) and within so many hops, nothing cut "
                  f"(`frontier` is then its size for two hops). `oracle_recall`: every useful one of at most {CAP} "
                  "candidates taken. `all` are the links alone, `next_hits` the control that lists the query's next "
                  "hits, `default` the environment's frontier, `everything` both in full; `walk` rows are the oracle "
                  "in the environment, six expansions at most.",
                  table(rows, ("links", "hops", "k", "split", "reachable", "oracle_recall", "oracle_entries",
                                "frontier", "frontier_tokens", "context_tokens")),
                  "Paired differences from `next_hits` at the same cap of 24; 95% interval by t over conversations.",
                  table(result["links"]["comparisons"], ("metric", "a", "b", "split", "difference", "low", "high",
                                                          "n"))]  # fmt: skip
    if "refining" in result:
        parts += ["## Refining", "Where W lacks evidence and no candidate holds it: the anchors of W's entries as new "
                  "queries. `some`: share of those questions in which one of them shows missing evidence among its new "
                  "lines; `each`: mean share of the anchors that do.",
                  table(result["refining"], ("split", "new_lines", "n", "incomplete", "out_of_reach", "anchors", "some",
                                             "each"))]  # fmt: skip
    if "context" in result:
        parts += ["## Context forms", "The first search's five entries, shown in four ways (Memora's ablation).",
                  table(result["context"], ("form", "split", "k", "evidence", "tokens"))]  # fmt: skip
    if "evidence" in result:
        papers = ", ".join(f"{name} {b} blocks, {t} tokens" for name, (b, t) in result["evidence"]["papers"].items())
        parts += ["## Evidence density",
                  "Blocks and tokens, in order of rank and among 20, until every content word of the gold answer was "
                  "shown, over the answers that were covered; share of blocks with 1, 2 and more of those words. "
                  f"The xMemory paper's figures (another encoder, blocks of about 180 tokens): {papers}.",
                  table(result["evidence"]["rows"], ("method", "split", "n", "covered", "blocks", "tokens", "hit_1",
                                                      "hit_2", "hit_more")),
                  "Stage II, SmolLM2-135M as the reader, 8 entries first, dev: evidence in the context and its tokens "
                  "before and after; tokens that went through the reader.",
                  table(result["evidence"]["reader"], ("first", "n", "evidence_before", "evidence", "tokens_before",
                                                        "tokens", "reader_tokens", "uncertainty_fell"))]  # fmt: skip
    if "ablations" in result:
        parts += ["## Ablations", "One thing changed at a time. `oracle_recall` is one hop over the default frontier; "
                  "`reassigned` the share of entries whose group changed after they came (the paper: 44.9%, without "
                  "merge 26.2%, without split 17.3%).",
                  table(result["ablations"], ("ablation", "split", "entries", "recall_at_5", "recall_at_8",
                                               "tokens_at_8", "oracle_recall", "group_links", "stage_I_at_8", "groups",
                                               "group_size_mean", "reassigned", "objective"))]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def head() -> dict[str, Any]:
    """Return what the result says of its data; ends with a message where there is none."""
    if "CUEWALK_DATA" not in os.environ:
        raise SystemExit("set CUEWALK_DATA to the folder of locomo10.json (see README, Data)")
    sizes = {f"n_{split}": len(load(split).questions) for split in ("dev", "test")}
    return {"data": {"dataset": "locomo", "split": "dev: 26 30 41 43 47, test: 42 44 48 49 50", **sizes}}


if __name__ == "__main__":
    functions = (sizes, links, refining, context, evidence, ablations)
    measure(__doc__, "memory", {function.__name__: function for function in functions}, head, markdown)
