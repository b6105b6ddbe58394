"""Measure speed, each part beside the usual way and beside its floor, in one run: `cuewalk benchmark [PART …]`.

  sample  trajectories: ours, each turn generated from the whole history again, and bare forward passes
  train   one loss and its gradient: ours, TRL's own path on the same rows, and one bare pass over P + G·R tokens
  step    the two together
  env     the environment alone, by memory size and batch; its share of a rollout
  search  dense search beside bare FAISS; the frontier
  build   a memory built, beside encoding its texts
  serve   one question at a time, time by part
  workers two processes of one thread beside one
  job     groups an hour, if asked for: goes on from a finished run of configs/locomo_cpu.yaml

The model is SmolLM2-135M with LoRA on its upper half, as configs/locomo_cpu.yaml trains it; the memories are the
embedded synthetic ones. All numbers are medians; ratios above 1 mean that ours is faster.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from trl import GRPOTrainer

from cuewalk.env import Expand, Question, RetrievalEnv, Tasks, format_action
from cuewalk.env.environment import step_together
from cuewalk.env.own import load_synthetic
from cuewalk.memory import BuildConfig, Conversation, Entry, MemoryGraph, Message, Segment, SentenceEncoder, build_graph
from cuewalk.memory.encoder import FloatArray
from cuewalk.memory.index import HybridIndex
from cuewalk.memory.models import decoder_and_head, load_tokenizer, run_decoder
from cuewalk.memory.records import say
from cuewalk.rl.adapters import new_adapter
from cuewalk.rl.config import parse_config
from cuewalk.rl.grpo import WalkTrainer, prepare_arguments
from cuewalk.rl.rollout import walk
from cuewalk.rl.run import provenance
from cuewalk.rl.sampler import TransformersSampler
from cuewalk.rl.transcript import Chat
from cuewalk.scripts.grammar import lawful
from cuewalk.scripts.results import race, table
from cuewalk.scripts.throughput import job

Row = dict[str, Any]

GROUP, TURNS, ROUNDS = 8, 3, 3
CONFIG = parse_config({"env": {"value_words": 14}, "lora": {"layers_to_transform": list(range(15, 30))}})


@dataclass(frozen=True)
class Script:
    """One trajectory's tokens: the prompt, then actions and what was observed after each (nothing after the last)."""

    prompt: list[int]
    turns: list[tuple[list[int], list[int]]]

    @property
    def completion(self) -> list[int]:
        """Return actions and observations in turn."""
        return [id_ for action, seen in self.turns for id_ in (*action, *seen)]

    @property
    def mask(self) -> list[int]:
        """Return 1 on actions, 0 on observations."""
        return [int(own) for action, seen in self.turns for own in [True] * len(action) + [False] * len(seen)]


@cache
def chat() -> Chat:
    """Return the model's transcript coder."""
    return Chat(load_tokenizer(CONFIG.model))


@cache
def memories() -> tuple[Tasks, dict[str, MemoryGraph]]:
    """Return synthetic questions and their memories."""
    tasks, encoder = load_synthetic("val", 2), SentenceEncoder()
    return tasks, {id_: build_graph(told, encoder) for id_, told in tasks.conversations.items()}


@cache
def policy() -> Any:
    """Return the model with a fresh adapter, in evaluation mode."""
    return new_adapter(CONFIG).eval()


def scripts(groups: int, size: int = GROUP, turns: int = TURNS) -> list[list[Script]]:
    """Return the tokens of scripted walks: one to three random letters a turn; no two of a group are alike."""
    tasks, graphs = memories()
    draw, rules, found = random.Random(0), replace(CONFIG.env, budget=4 * turns, new_lines=1), []
    for question in tasks.questions[:groups]:
        group: dict[tuple[str, ...], Script] = {}
        while len(group) < size:
            env = RetrievalEnv(graphs[question.conversation_id], question, rules)
            prompt, said, parts = chat().first(env.reset(seed=0)[0]), list[str](), list[tuple[list[int], list[int]]]()
            for turn in range(turns):
                letters = draw.sample([label for label, _ in env.state.frontier], draw.choice((1, 1, 2, 3)))
                said.append(format_action(Expand(tuple(letters))))
                observation = env.step(said[-1])[0]
                seen = chat().following(observation) if turn < turns - 1 else []
                parts.append((chat().action(said[-1]), seen))
            group[tuple(said)] = Script(prompt, parts)
        found.append(list(group.values()))
    return found


def sample_ours(model: Any, groups: Sequence[Sequence[Script]]) -> TransformersSampler:
    """Sample with the cache kept across turns; the tokens chosen are the script's."""
    rows = [script for group in groups for script in group]
    sampler = TransformersSampler(model, chat().end, 24, 1.0, torch.Generator().manual_seed(0))
    sampler.begin([group[0].prompt for group in groups], len(groups[0]))
    for turn in range(len(rows[0].turns)):
        actions = [script.turns[turn][0] for script in rows]
        sampler.act([lambda ids, action=action: [action[len(ids)]] for action in actions])  # type: ignore[misc]
        if rows[0].turns[turn][1]:
            sampler.observe(range(len(rows)), [script.turns[turn][1] for script in rows])
    return sampler


def sample_usually(model: Any, groups: Sequence[Sequence[Script]]) -> None:
    """Generate each turn from the whole history again, as TRL's `environment_factory` does inside."""
    rows = [script for group in groups for script in group]
    histories = [list(script.prompt) for script in rows]
    for turn in range(len(rows[0].turns)):
        ids, valid = _left(histories)
        longest = max(len(script.turns[turn][0]) for script in rows)
        model.generate(input_ids=ids, attention_mask=valid, do_sample=True, top_k=0, max_new_tokens=longest,
                       min_new_tokens=longest, pad_token_id=chat().end)  # fmt: skip
        for history, script in zip(histories, rows, strict=True):
            history += [*script.turns[turn][0], *script.turns[turn][1]]


@torch.no_grad()
def sample_bare(model: Any, groups: Sequence[Sequence[Script]]) -> None:
    """Run as many tokens through bare forward passes: a prompt once, then what its trajectories still say and see."""
    decoder, head = decoder_and_head(model)
    cache, count = DynamicCache(config=model.config), len(groups)
    rows = [script for group in groups for script in group]
    length = round(statistics.mean(len(group[0].prompt) for group in groups))
    head(run_decoder(decoder, torch.full((count, length), 5), cache)[:, -1])
    for turn in range(len(rows[0].turns)):
        # An action's last id is computed together with the observation after it, so an action of n needs n - 1 steps.
        lengths = [len(script.turns[turn][0]) - 1 for script in rows]
        for step in range(max(lengths)):
            still = -(-sum(length > step for length in lengths) // count)
            head(run_decoder(decoder, torch.full((count, still), 5), cache))
        if rows[0].turns[turn][1]:
            seen = -(-sum(len(script.turns[turn][1]) + 1 for script in rows) // count)
            head(run_decoder(decoder, torch.full((count, seen), 5), cache)[:, -len(rows) // count :])


def _left(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [torch.tensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_side="left")
    valid = pad_sequence([torch.ones_like(t) for t in tensors], batch_first=True, padding_side="left")
    return ids, valid


def sample() -> list[Row]:
    """Sampling, with its growth by group size, turns and questions."""
    rows: list[Row] = []
    shapes = {(1, 8, 3): ROUNDS, (4, 8, 3): 1, (1, 4, 3): 1, (1, 16, 3): 1, (1, 8, 1): 1, (1, 8, 6): 1}
    for (questions, size, turns), rounds in shapes.items():
        groups = scripts(questions, size, turns)
        model, count = policy(), questions * size
        sampler = sample_ours(model, groups)
        sample_bare(model, groups)  # warm, all of them
        ours, usual, bare = race([partial(way, model, groups) for way in (sample_ours, sample_usually, sample_bare)],
                                 rounds)  # fmt: skip
        rows.append({"benchmark": f"sample, {questions} x {size}, {turns} turns", "unit": "trajectories/s",
                     "ours": count / ours, "baseline": count / usual, "floor": count / bare,
                     "vs_baseline": usual / ours, "vs_floor": bare / ours, "tokens": sampler.tokens,
                     "padding": sampler.padding / (sampler.tokens + sampler.padding)})  # fmt: skip
    return rows


def batch(groups: Sequence[Sequence[Script]]) -> dict[str, Any]:
    """Return the rows as TRL hands them to its loss."""
    rows = [script for group in groups for script in group]
    prompts, prompt_mask = _left([script.prompt for script in rows])
    right = partial(pad_sequence, batch_first=True)
    completions = [torch.tensor(script.completion) for script in rows]
    masks = [torch.tensor(script.mask) for script in rows]
    advantages = torch.tensor([(-1.0) ** place * (1 + place % 3) for place in range(len(rows))])
    return {"prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": right(completions),
            "completion_mask": right([torch.ones_like(row) for row in completions]), "tool_mask": right(masks),
            "advantages": advantages, "num_items_in_batch": torch.tensor(sum(int(m.sum()) for m in masks))}  # fmt: skip


@cache
def trainer() -> WalkTrainer:
    """Return the trainer around the policy; it never trains, its losses are timed."""
    config = replace(CONFIG, grpo={"per_device_train_batch_size": GROUP})
    folder = Path(tempfile.mkdtemp())
    prompts = [[{"role": "user", "content": "?"}]] * GROUP
    return WalkTrainer(
        model=policy(),
        args=prepare_arguments(config, folder),
        reward_funcs=lambda **_: [0.0],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=chat().tokenizer,
    )


def train_ours(inputs: dict[str, Any]) -> None:
    """One loss and its gradient, our way."""
    trainer().model.zero_grad()
    trainer()._compute_loss(trainer().model, inputs).backward()  # type: ignore[no-untyped-call]


def train_usually(inputs: dict[str, Any]) -> None:
    """One loss and its gradient, TRL's way, without gradient checkpointing (which would make it slower still)."""
    owner: Any = trainer()
    owner.model.zero_grad()
    owner._get_per_token_logps_and_entropies = partial(GRPOTrainer._get_per_token_logps_and_entropies, owner)
    try:
        GRPOTrainer._compute_loss(owner, owner.model, inputs).backward()
    finally:
        del owner._get_per_token_logps_and_entropies


def train_bare(groups: Sequence[Sequence[Script]]) -> None:
    """One bare forward and backward pass over a group's prompt and different completions, actions through the head."""
    model = trainer().model
    model.zero_grad()
    decoder, head = decoder_and_head(model)
    for group in groups:
        different = {tuple(script.completion): script for script in group}.values()
        count = len(group[0].prompt) + sum(len(script.completion) for script in different)
        scored = sum(sum(script.mask) for script in different)
        hidden = decoder(input_ids=torch.full((1, count), 5), use_cache=False).last_hidden_state[0]
        head(hidden[-scored:]).float().log_softmax(-1)[:, 0].sum().backward()


def train() -> list[Row]:
    """The loss of one group, all rows different and half of them alike, and peak memory."""
    rows: list[Row] = []
    twice = [[script for script in group[: GROUP // 2] for _ in range(2)] for group in scripts(1)]
    for name, groups in (("8 different rows", scripts(1)), ("4 different rows, twice", twice)):
        inputs = batch(groups)
        ours, usual, bare = race([partial(train_ours, inputs), partial(train_usually, inputs),
                                  partial(train_bare, groups)], ROUNDS)  # fmt: skip
        tokens = sum(len(s.prompt) + len(s.completion) for group in groups for s in group)
        rows.append({"benchmark": f"train, {name}", "unit": "groups/s", "ours": 1 / ours, "baseline": 1 / usual,
                     "floor": 1 / bare, "vs_baseline": usual / ours, "vs_floor": bare / ours,
                     "tokens": tokens})  # fmt: skip
    ours, usual = (_apart(_peak, way.__name__) for way in (train_ours, train_usually))
    rows.append({"benchmark": "train, peak memory", "unit": "GB", "ours": ours, "baseline": usual,
                 "vs_baseline": usual / ours})  # fmt: skip
    return rows


def _apart(task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of this module in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(task, *arguments).result()


def _peak(way: str) -> float:
    """Return the peak memory of this process after one loss, model included, in GB (Linux tells it by process)."""
    globals()[way](batch(scripts(1)))
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024**2


def step() -> list[Row]:
    """A whole training step of one group: sampling, loss, gradient."""
    groups = scripts(1)
    inputs, model = batch(groups), trainer().model

    ours = [partial(sample_ours, model, groups), partial(train_ours, inputs)]
    usual = [partial(sample_usually, model, groups), partial(train_usually, inputs)]
    bare = [partial(sample_bare, model, groups), partial(train_bare, groups)]
    tasks = [lambda both=both: [part() for part in both] for both in (ours, usual, bare)]
    seconds = race(tasks, ROUNDS)
    return [{"benchmark": "step, 1 x 8, 3 turns", "unit": "groups/hour", "ours": 3600 / seconds[0],
             "baseline": 3600 / seconds[1], "floor": 3600 / seconds[2], "vs_baseline": seconds[1] / seconds[0],
             "vs_floor": seconds[2] / seconds[0]}]  # fmt: skip


def large(count: int) -> tuple[MemoryGraph, list[Question]]:
    """Make a memory of so many entries with random vectors: the encoder is real, and encodes the queries."""
    encoder, draw = SentenceEncoder(), np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(2000)])
    said = [" ".join(row) for row in words[draw.integers(len(words), size=(count, 12))]]
    start = datetime(2024, 1, 1)
    messages = tuple(Message(f"m{i}", "AB"[i % 2], start + timedelta(minutes=i), text) for i, text in enumerate(said))
    segments = [Segment(f"s{p}", p, tuple(m.id for m in messages[6 * p : 6 * p + 6])) for p in range(-(-count // 6))]
    entries = [Entry(f"e{i}", m.text, (say(m),), (f"s{i // 6}",)) for i, m in enumerate(messages)]
    conversation, config = Conversation("large", messages), BuildConfig(groups=None)
    graph = MemoryGraph(conversation, segments, entries, _unit(draw, count), encoder, config, {}, "")
    asked = words[draw.integers(len(words), size=(5 * 64, 5))]
    return graph, [Question(f"q{i}", "large", " ".join(row)) for i, row in enumerate(asked)]


def _unit(draw: np.random.Generator, count: int) -> FloatArray:
    vectors = draw.standard_normal((count, 384), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def env() -> list[Row]:
    """Steps a second by memory size and batch: a refinement, then three expansions; and its share of a rollout."""
    rows: list[Row] = []
    for entries in (600, 100_000):
        graph, questions = large(entries)
        graph.search("", 1)  # builds the index
        for together in (1, 64):
            seconds = []
            for turn in range(5):
                envs = [RetrievalEnv(graph, q) for q in questions[turn * 64 : turn * 64 + together]]
                started, steps = time.perf_counter(), 0
                for walker in envs:
                    walker.reset(seed=0)
                live = envs
                while live:
                    done = step_together(live, [_refine_then_expand(walker) for walker in live])
                    steps += len(live)
                    live = [walker for walker, answer in zip(live, done, strict=True) if not answer[2]]
                seconds.append((time.perf_counter() - started) / steps)
            rows.append({"benchmark": f"env, {entries} entries, {together} at once, resets included",
                         "unit": "steps/s", "ours": 1 / statistics.median(seconds)})  # fmt: skip
    shares = [_share(question) for question in memories()[0].questions[:3]]
    rows.append({"benchmark": "env, share of a rollout of 8", "unit": "share", "ours": statistics.median(shares)})
    return rows


def _share(question: Question) -> float:
    """Return the share of a rollout's time that its environment takes: the same actions again without a model."""
    graph = memories()[1][question.conversation_id]
    loaded = _as_loaded(graph)
    walkers = [RetrievalEnv(loaded, question, CONFIG.env) for _ in range(GROUP)]
    sampler = TransformersSampler(policy(), chat().end, 12, 1.0, torch.Generator().manual_seed(0))
    started = time.perf_counter()
    walk([walkers], sampler, chat(), max_tokens=2048, seeds=[0], allow=lawful(chat(), 12))
    whole = time.perf_counter() - started
    loaded = _as_loaded(graph)
    again = [RetrievalEnv(loaded, question, CONFIG.env) for _ in range(GROUP)]
    started = time.perf_counter()
    for walker in again:
        walker.reset(seed=0, options={"shuffle_labels": True})
    for turn in range(max(len(walker.steps) for walker in walkers)):
        live = [place for place, walker in enumerate(walkers) if turn < len(walker.steps)]
        step_together([again[place] for place in live], [walkers[place].steps[turn].text for place in live])
    return (time.perf_counter() - started) / whole


def _as_loaded(graph: MemoryGraph) -> MemoryGraph:
    """Return the memory as it is after loading: nothing encoded or searched, no link followed; its index is built."""
    entries = list(graph.entries.values())
    parts = (graph.conversation, graph.segments, entries, graph.vectors, SentenceEncoder(), graph.config, graph.groups)
    fresh = MemoryGraph(*parts, graph.digest)
    fresh.search("", 1)
    return fresh


def _refine_then_expand(walker: RetrievalEnv) -> str:
    if not walker.steps:
        return f"REFINE more of {walker.question.text}"
    return f"EXPAND {walker.state.frontier[0][0]}" if len(walker.steps) < 4 else "STOP"


def search() -> list[Row]:
    """Dense search beside bare FAISS at equal results, and the frontier of five entries."""
    draw, rows = np.random.default_rng(0), list[Row]()
    for count in (10_000, 100_000, 1_000_000):
        vectors = _unit(draw, count)
        queries = vectors[:20] + 0.05 * draw.standard_normal((20, 384), dtype=np.float32)
        index = HybridIndex(vectors, ["x"] * count, np.zeros((0, 1), np.float32), [], (1.0, 0.0, 0.0))
        flat = faiss.IndexFlatIP(384)
        flat.add(vectors)
        found = [[i for i, _ in index.search("", query)] for query in queries]
        bare = [flat.search(query[None], 200)[1][0].tolist() for query in queries]
        ways = [partial(index.search, ""), lambda query, flat=flat: flat.search(query[None], 200)]
        seconds = race([lambda way=way, qs=queries: [way(query) for query in qs] for way in ways], 5)  # type: ignore[misc]
        rows.append({"benchmark": f"dense search, {count} vectors", "unit": "queries/s", "ours": 20 / seconds[0],
                     "floor": 20 / seconds[1], "vs_floor": seconds[1] / seconds[0],
                     "same": float(found == bare)})  # fmt: skip
        del index, flat, vectors
    for entries in (600, 100_000):
        graph, questions = large(entries)
        cold, warm = list[float](), list[float]()
        for question in questions[:20]:
            working = [hit.entry for hit in graph.search(question.text, 5)]
            for kept in (cold, warm):
                started = time.perf_counter()
                graph.frontier(question.text, working, set(working), CONFIG.env.links, 24)
                kept.append(time.perf_counter() - started)
        for name, kept in (("links not yet followed", cold), ("links known", warm)):
            rows.append({"benchmark": f"frontier, {entries} entries, {name}", "unit": "ms",
                         "ours": 1000 * statistics.median(kept)})  # fmt: skip
    return rows


def build() -> list[Row]:
    """One memory built, beside bare encoding of its abstractions."""
    told = next(iter(load_synthetic("val", 1).conversations.values()))
    encoder = SentenceEncoder()
    texts = [entry.abstraction for entry in build_graph(told, encoder).entries.values()]
    texts *= 1 + 64 // len(texts)  # more than a few, so that none is remembered
    ours, bare = race([lambda: build_graph(told, SentenceEncoder()), lambda: SentenceEncoder().encode(texts)], 3)
    count = len(told.messages)
    return [{"benchmark": f"build, {count} messages", "unit": "messages/s", "ours": count / ours, "floor": count / bare,
             "vs_floor": bare / ours}]  # fmt: skip


def serve() -> list[Row]:
    """One question at a time, greedy: seconds by part, the model's token by token."""
    tasks, graphs = memories()
    parts: dict[str, list[float]] = {"first search and frontier": [], "prompt": [], "an action": [], "whole": []}
    for question in tasks.questions[:8]:
        walker = RetrievalEnv(graphs[question.conversation_id], question, CONFIG.env)
        started = time.perf_counter()
        prompt = chat().first(walker.reset()[0])
        parts["first search and frontier"].append(time.perf_counter() - started)
        sampler = TransformersSampler(policy(), chat().end, 12, temperature=0)
        before = time.perf_counter()
        sampler.begin([prompt], 1)
        parts["prompt"].append(time.perf_counter() - before)
        before = time.perf_counter()
        sampler.act([lambda ids: [chat().end] if len(ids) == 5 else None])
        parts["an action"].append(time.perf_counter() - before)
        walker = RetrievalEnv(graphs[question.conversation_id], question, CONFIG.env)
        started = time.perf_counter()
        walk([[walker]], TransformersSampler(policy(), chat().end, 12, temperature=0), chat(), max_tokens=2048,
             allow=lawful(chat(), 12))  # fmt: skip
        parts["whole"].append(time.perf_counter() - started)
    return [{"benchmark": f"serve, {name}", "unit": "s", "ours": statistics.median(kept)}
            for name, kept in parts.items()]  # fmt: skip


def workers() -> list[Row]:
    """Trajectories of two processes of one thread beside one such process."""
    rates = []
    for count in (1, 2):
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            started = [pool.submit(_sample_alone, 3) for _ in range(count)]
            rates.append(sum(done.result() for done in started))
    return [{"benchmark": "sample, two processes of one thread", "unit": "trajectories/s", "ours": rates[1],
             "baseline": rates[0], "vs_baseline": rates[1] / rates[0]}]  # fmt: skip


def _sample_alone(times: int) -> float:
    """Sample one group on one thread, again and again; return trajectories a second."""
    torch.set_num_threads(1)
    sample_ours(policy(), groups := scripts(1))
    return GROUP / race([partial(sample_ours, policy(), groups)], times)[0]


PARTS: dict[str, Callable[[], list[Row]]] = {
    part.__name__: part for part in (sample, train, step, env, search, build, serve, workers, job)
}


def benchmark(parts: Sequence[str], out: Path) -> None:
    """Measure these parts and write `out.json` and `out.md` after each; the other parts' rows stay as they were."""
    path = out.with_suffix(".json")
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    made = provenance()
    result |= {"name": out.name, **made, "seeds": [0], "threads": torch.get_num_threads(),
               "data": {"dataset": "synthetic", "split": "val", "n": 2}}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        rows = [{"part": part, **row, "commit": made["commit"]} for row in PARTS[part]()]
        result["rows"] = [row for row in result["rows"] if row["part"] != part] + rows
        result["rows"].sort(key=lambda row: list(PARTS).index(row["part"]))
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
        print(table(rows, COLUMNS), f"\n{part}: written to {path}", flush=True)


COLUMNS = ("benchmark", "unit", "ours", "baseline", "floor", "vs_baseline", "vs_floor", "padding", "merged", "same")


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    return "\n\n".join([
        "# Speed",
        f"Made by `cuewalk benchmark` on {result['threads']} threads of a CPU (the JSON has each row's commit). All "
        f"sides in turns in one run: medians of {ROUNDS} rounds, one where only the shape grows. Ratios above 1 mean "
        "that ours is faster. `baseline` is the usual way: each turn generated from the whole history again, TRL's own "
        "loss on the same rows; of two processes, one such. `floor` is bare forward (and backward) passes over as many "
        "tokens in one sequence, bare FAISS, or bare encoding. `padding` and `merged`: shares of "
        "ids computed for nothing, and of trajectories computed with an equal one. `same`: equal results.",
        table(result["rows"], COLUMNS),
    ]) + "\n"  # fmt: skip
