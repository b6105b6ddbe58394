"""A language model reads the candidates: evidence lies where it finds the question likely, once it has read them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import diskcache
import numpy as np
import numpy.typing as npt
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression
from tqdm import tqdm

from cuewalk.env import DataError, EnvConfig, Tasks
from cuewalk.env.render import QUESTION_WORDS, shorten
from cuewalk.memory import Entry, Link, MemoryGraph
from cuewalk.memory.models import cache_dir, weights_digest
from cuewalk.memory.reader import LocalReader
from cuewalk.rl.ranker import Ranker, first_pool

READ, CANDIDATE_WORDS = 12, 40
"""So many of the ranker's best candidates are read; a smaller pool (of later steps, with few lines) is left to it."""
FITTED_ON = 200  # questions, each with twelve rows, for three weights


@dataclass
class Reading:
    """A ranker whose best candidates the base model has read: a rank of the environment, as the ranker itself.

    The log odds of evidence are a · the ranker's + b · (log P(question | candidate) - its mean over those read) + c
    (query likelihood: Ponte and Croft, 1998), with (a, b, c) from `ranker.reading`. What it said is kept on disk.
    """

    ranker: Ranker
    reader: LocalReader = field(repr=False)
    tokens: int = field(default=0, repr=False)  #: What was read so far, that from the disk too.
    digest: str = field(init=False)  #: Of the reader's weights, its adapter's too.
    _lock: Any = field(default_factory=Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.digest = weights_digest(self.reader.model, adapters=True)
        self._cache = diskcache.Cache(str(cache_dir() / "likelihoods"), disk=diskcache.JSONDisk)  # never a pickle

    def __call__(
        self, graph: MemoryGraph, query: str, working: Sequence[str], links: Sequence[Link]
    ) -> npt.NDArray[np.float64]:
        """Return each candidate's chance of holding missing evidence, (len(links),)."""
        chances = self.ranker(graph, query, working, links)
        if self.ranker.reading is not None and len(links) > READ:
            best, rows = self.rows(graph, query, links, chances)
            chances[best] = expit(rows @ np.array(self.ranker.reading))
        return chances

    def rows(
        self, graph: MemoryGraph, query: str, links: Sequence[Link], chances: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Return the places of the best candidates, (n,), and what is known of them, (n, 3): the columns of a, b, c."""
        best = np.argsort(-chances, kind="stable")[:READ]
        said = np.array([self._likelihood(graph.entries[links[place].entry], query) for place in best])
        odds = logit(np.clip(chances[best], 1e-6, 1 - 1e-6))
        return best, np.column_stack([odds, said - said.mean(), np.ones(len(best))])

    def _likelihood(self, entry: Entry, query: str) -> float:
        read, asked = texts(entry, query)
        what = repr((self.digest, str(self.reader.model.dtype), read, asked))
        key = hashlib.sha256(what.encode("utf-8", "surrogatepass")).hexdigest()
        with self._lock:  # what was read is told by a difference
            if (known := self._cache.get(key)) is None:
                before = self.reader.tokens
                known = [self.reader.log_likelihood(self.reader.read(""), read, asked), self.reader.tokens - before]
                self._cache[key] = known
            self.tokens += known[1]
        return float(known[0])


def texts(entry: Entry, query: str) -> tuple[str, str]:
    """Return what a reader reads of a candidate, and what it is asked the likelihood of."""
    read = f"{shorten(f'{entry.speaker}: {entry.value}', CANDIDATE_WORDS)}\nQuestion:"
    return read, " " + shorten(query, QUESTION_WORDS)


def fit_reading(
    readings: Mapping[str, Reading], tasks: Tasks, graphs: Mapping[str, MemoryGraph], rules: EnvConfig
) -> tuple[float, ...]:
    """Return the weights (a, b, c), fitted on some training questions; a DataError if no evidence is in reach.

    Each conversation is ordered and read by those that did not see it, if there are such: of what they were trained
    on they are too sure.
    """
    rows, labels = [], list[bool]()
    by_digest = sorted(tasks.questions, key=lambda question: hashlib.sha256(question.id.encode()).hexdigest())
    for question in tqdm(by_digest[:FITTED_ON], desc="reading", unit="question", disable=None):
        graph = graphs[question.conversation_id]
        working, links, held = first_pool(graph, question, tasks.gold[question.id], rules)
        if len(links) > READ:
            reading = readings[question.conversation_id]
            best, own = reading.rows(graph, question.text, links, reading.ranker(graph, question.text, working, links))
            rows.append(own)
            labels += [held[place] for place in best]
    if len(set(labels)) < 2:
        raise DataError(f"env.order = reader needs first lists of more than {READ} candidates, some with evidence and "
                        f"some without; got {len(labels)} of one kind: take ranker, in another run_dir")  # fmt: skip
    weights = LogisticRegression(fit_intercept=False, max_iter=3000).fit(np.concatenate(rows), labels).coef_[0]
    return tuple(weights.tolist())
