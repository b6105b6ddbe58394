"""The ranker without a language model: it orders a frontier, and is the rival that a policy must beat."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from cuewalk.env import DataError, EnvConfig, Gold, Question, Tasks
from cuewalk.env.records import words
from cuewalk.env.state import POOL, first_state
from cuewalk.judges import covered
from cuewalk.memory import Link, MemoryGraph
from cuewalk.memory.records import MONTHS

FEATURES = (
    "cosine", "search_rank", "nearest", "mean_near", "near_first", "shared_words", "speaker_named", "of_another",
    "words", "asks", "asks_when", "tells_when", "apart", "apart_from_first", "read_most", "read_mean",
)  # fmt: skip
DAYS = "(mon|tues|wednes|thurs|fri|satur|sun|yester|to)day|tomorrow|last|next|ago|since|(week|month|year)s?"
TELLS_WHEN = re.compile(rf"\b({DAYS}|{'|'.join(MONTHS)})\b", re.IGNORECASE)
Pool = tuple[tuple[str, ...], list[Link], list[bool]]


@dataclass(frozen=True)
class Ranker:
    """Logistic regression on numbers a candidate has before it is read.

    Trained on the training questions' evidence; the environment orders candidates by it. Chances are of holding
    missing evidence. (Boosted trees on the same numbers found less on left-out conversations.)
    """

    kinds: tuple[str, ...]  #: Link kinds that are features: 1 where some entry of W reaches the candidate so.
    weights: tuple[float, ...]  #: One a feature, `FEATURES` and then `kinds`.
    bias: float
    reading: tuple[float, ...] | None = None  #: How a reader changes its chances: see `rl/reading.py`.

    def __call__(
        self, graph: MemoryGraph, query: str, working: Sequence[str], links: Sequence[Link]
    ) -> npt.NDArray[np.float64]:
        """Return each candidate's chance of holding missing evidence, (len(links),)."""
        rows = features(graph, query, working, links, self.kinds)
        chances: npt.NDArray[np.float64] = expit(rows @ np.array(self.weights) + self.bias)
        return chances

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps({"features": FEATURES, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)  # whole or not at all

    @classmethod
    def load(cls, path: Path) -> "Ranker":
        """Read it; a DataError where it is absent or of other features than this version's."""
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            if tuple(tree.pop("features")) == FEATURES:
                reading = tree.get("reading")
                return cls(tuple(tree["kinds"]), tuple(tree["weights"]), tree["bias"], reading and tuple(reading))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"no ranker in {path} ({error}); env.order needs one: train first") from error
        raise DataError(f"the ranker in {path} was trained on other features than this version of cuewalk has")


def fit_ranker(tasks: Tasks, graphs: Mapping[str, MemoryGraph], rules: EnvConfig) -> Ranker:
    """Train on the pool of every first frontier; a DataError where no candidate holds missing evidence, or all do."""
    kinds = tuple(kind for kind in rules.links if kind != "search")
    rows, labels = [], list[bool]()
    for question in tqdm(tasks.questions, desc="ranker", unit="question", disable=None):
        graph = graphs[question.conversation_id]
        working, links, held = first_pool(graph, question, tasks.gold[question.id], rules)
        rows.append(features(graph, question.text, working, links, kinds))
        labels += held
    if len(set(labels)) < 2:
        raise DataError(f"the ranker needs candidates with and without evidence; got {len(labels)} of one kind")
    scaler = StandardScaler().fit(whole := np.concatenate(rows))
    model = LogisticRegression(C=0.1, max_iter=3000).fit(scaler.transform(whole), labels)
    weights = model.coef_[0] / scaler.scale_
    return Ranker(kinds, tuple(weights.tolist()), float(model.intercept_[0] - weights @ scaler.mean_))


def first_pool(graph: MemoryGraph, question: Question, gold: Gold, rules: EnvConfig) -> Pool:
    """Return what the first search found, all that a rank chooses the first lines from, and which of it is evidence."""
    working = first_state(graph, question.text, replace(rules, order="search")).working
    links = graph.frontier(question.text, working, set(working), rules.links, POOL * rules.frontier_cap)
    missing = set(gold.evidence) - covered(graph, working)
    return working, links, [not covered(graph, [link.entry]).isdisjoint(missing) for link in links]


def features(
    graph: MemoryGraph, query: str, working: Sequence[str], links: Sequence[Link], kinds: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Return one row a candidate, (len(links), len(FEATURES) + len(kinds)); counts as logarithms."""
    ranking = {hit.entry: place for place, hit in enumerate(graph.search(query, 200))}
    vector = graph.encoder.encode([query])[0]
    positions = [graph.order[entry] for entry in working]
    asked = words(query)
    asks_when = not asked.isdisjoint(("when", "date", "day", "month", "year"))
    known = graph.vectors[positions]
    named = asked & {message.speaker.lower() for message in graph.conversation.messages}
    read = known @ vector
    reached = [{target for entry in working for target in graph.links(entry, (kind,))} for kind in kinds]
    rows = []
    for link in links:
        entry, at = graph.entries[link.entry], graph.order[link.entry]
        near = known @ graph.vectors[at]
        told = words(f"{entry.abstraction} {entry.value}")
        said = " ".join(statement.text for statement in entry.statements)  # a value has its date written in
        counts = (ranking.get(entry.id, 200), min(abs(at - p) for p in positions), abs(at - positions[0]), len(told))
        speaker, (rank, apart, apart_from_first, length) = entry.speaker.lower(), np.log1p(counts)
        rows.append([
            graph.score(vector, entry.id), rank, near.max(), near.mean(), near[0],
            len(asked & told) / max(1, len(asked)), speaker in asked, bool(named - {speaker}), length,
            "?" in said, asks_when, asks_when and TELLS_WHEN.search(said) is not None,
            apart, apart_from_first, read.max(), read.mean(), *(entry.id in targets for targets in reached),
        ])  # fmt: skip
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(FEATURES) + len(kinds))
