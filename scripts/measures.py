"""What is measured of one question's retrieved entries, for every policy and retriever alike."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from sklearn.metrics import ndcg_score

from cuewalk.env import Gold, Question, Rank, RetrievalEnv, Trajectory
from cuewalk.env.records import words
from cuewalk.judges import JudgeError, TrajectoryJudge, covered, evidence_recall, redundancy
from cuewalk.memory import Link, MemoryGraph
from cuewalk.rl.ranker import Ranker
from cuewalk.rl.reading import Reading

EQUAL_ENTRIES = 8
EQUAL_TOKENS = 300

Measures = dict[str, float | None]


def measure_entries(
    graph: MemoryGraph,
    question: Question,
    gold: Gold,
    entries: Sequence[str],
    count_tokens: Callable[[str], int],
    similarity: float,
) -> Measures:
    """Measure a working set, entries in order of entry.

    `recall_at_8` and `recall_at_300t` are the comparison at equal entries and equal context tokens: the working
    set cut after 8 entries (300 tokens), or topped up to them from the first search's ranking. The gold must have
    evidence; `similarity` is δ of the redundancy.
    """
    wanted = set(gold.evidence)
    ranking = [*entries, *(hit.entry for hit in graph.search(question.text, 60, exclude=set(entries)))]
    tokens = [count_tokens(graph.entries[entry].value) for entry in ranking]
    fitting = int(np.searchsorted(np.cumsum(tokens), EQUAL_TOKENS, side="right"))
    relevant = {entry: float(not wanted.isdisjoint(covered(graph, [entry]))) for entry in graph.entries}
    truth = np.array([list(relevant.values())])
    places = {entry: len(ranking) - place for place, entry in enumerate(ranking)}
    order = np.array([[float(places.get(entry, 0)) for entry in graph.entries]])
    recall = evidence_recall(graph, entries, gold)
    at_eight = evidence_recall(graph, ranking[:EQUAL_ENTRIES], gold)
    return {
        "recall_at_8": at_eight,
        "recall_at_300t": evidence_recall(graph, ranking[:fitting], gold),
        "evidence_recall": recall,
        "all_evidence": float(recall == 1.0),
        "precision": sum(relevant[entry] for entry in entries) / len(entries),
        "ndcg": float(ndcg_score(truth, order, k=EQUAL_ENTRIES)) if len(relevant) > 1 else recall,
        "answer_words": answer_words(graph, entries, gold),
        "redundancy": redundancy(graph, entries, similarity),
        "entries": float(len(entries)),
        "context_tokens": float(sum(tokens[: len(entries)])),
        "sources_per_entry": sum(len(graph.entries[entry].sources) for entry in entries) / len(entries),
        f"recall_at_8_c{gold.category}": at_eight,
    }


def measure_walk(graph: MemoryGraph, trajectory: Trajectory, gold: Gold, reward: float | None) -> Measures:
    """Measure how a trajectory went.

    `stop_when_complete` and `go_when_incomplete` are the shares of right decisions where W held all the evidence, and
    where it did not; the mean of the two over questions is the balanced accuracy of stopping. `stop_early`: it stopped
    while evidence was missing, in reach or not; `stop_late`: it went on although none was; `stop_right`: neither;
    `complete_at_start`: W_0 held it all.
    """
    working, right = list(trajectory.first), {True: list[bool](), False: list[bool]()}
    solved = evidence_recall(graph, working, gold) == 1.0
    for step in trajectory.steps:
        complete = evidence_recall(graph, working, gold) == 1.0
        right[complete].append((step.kind == "stop") == complete)
        working += step.change.added
    early, late = trajectory.ending == "stopped" and evidence_recall(graph, working, gold) < 1.0, not all(right[True])
    return {
        "reward": reward,
        "steps": float(len(trajectory.steps)),
        "cost": float(trajectory.cost),
        "budget": float(trajectory.budget),
        "bad_actions": float(len(trajectory.bad)),
        "stop_when_complete": float(np.mean(right[True])) if right[True] else None,
        "go_when_incomplete": float(np.mean(right[False])) if right[False] else None,
        "stop_early": float(early),
        "stop_late": float(late),
        "stop_right": float(trajectory.ending == "stopped" and not early and not late),
        "complete_at_start": float(solved),
        **{f"ended_{ending}": float(trajectory.ending == ending) for ending in ("stopped", "budget", "malformed")},
    }


class Remembered:
    """A rank that is asked once for each state: all policies of an evaluation begin in the same one."""

    def __init__(self, rank: Ranker | Reading) -> None:
        self.rank = rank
        self.tokens = 0  #: That a reader took, counted again whenever its order is.
        self._known: dict[tuple[Any, ...], tuple[npt.NDArray[np.float64], int]] = {}

    def __call__(
        self, graph: MemoryGraph, query: str, working: Sequence[str], links: Sequence[Link]
    ) -> npt.NDArray[np.float64]:
        """Return each candidate's chance, (len(links),)."""
        key = (graph.conversation.id, graph.digest, query, *working, "", *(link.entry for link in links))
        if key not in self._known:
            before = read_so_far(self.rank)
            chances = self.rank(graph, query, working, links)
            self._known[key] = chances, read_so_far(self.rank) - before
        chances, read = self._known[key]
        self.tokens += read
        return chances.copy()


def tokens_read(env: RetrievalEnv, texts: Sequence[str] = ()) -> int:
    """Return the tokens that a reader takes on a walk of these actions, 0 without one; the walk is made again."""
    before = read_so_far(env.rank)
    if isinstance(env.rank, Reading | Remembered):
        env.reset()
        for text in texts:
            env.step(text)
    return read_so_far(env.rank) - before


def read_so_far(rank: Rank | None) -> int:
    """Return the tokens that a rank's reader took so far; 0 without one."""
    return rank.tokens if isinstance(rank, Reading | Remembered) else 0


def reward_of(judge: TrajectoryJudge, walked: Trajectory, graph: MemoryGraph, gold: Gold) -> float | None:
    """Return what a walk earned; None where the judge can't tell: never a score of 0."""
    try:
        return judge.score(walked, graph, gold).reward
    except JudgeError:
        return None


def answer_words(graph: MemoryGraph, entries: Sequence[str], gold: Gold) -> float | None:
    """Return the share of the gold answer's content words in the text shown; None if it has no content word."""
    wanted = words(gold.answer) - set(ENGLISH_STOP_WORDS)
    if not wanted:
        return None
    shown = words("\n".join(graph.entries[entry].value for entry in entries))
    return len(wanted & shown) / len(wanted)
