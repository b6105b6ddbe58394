"""Scores of an answer's text against the gold answer, each under the name of who uses it."""

import re
import string
from collections import Counter

from nltk.stem import PorterStemmer
from nltk.tokenize import word_tokenize
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from rouge_score.rouge_scorer import RougeScorer

from cuewalk.env.records import Gold

_STEMMER = PorterStemmer()
_ROUGE = RougeScorer(["rougeL"], use_stemmer=True)


def score_answer(prediction: str, gold: Gold) -> dict[str, float]:
    """Return every score of one answer, each in [0, 1].

    `answer_em`: equal after LoCoMo's normalisation; `answer_f1`: LoCoMo's official F1 (stems, with multiplicity; of
    multi-hop answers the mean over the gold's comma-separated parts, of open-domain ones what stands before the first
    `;`); `answer_f1_xmemory`: over sets of tokens; `bleu1`: NLTK's, smoothing method 1; `rouge_l`: with stems.
    """
    reference = gold.answer.split(";")[0].strip() if gold.category == 3 else gold.answer
    words = [word_tokenize(text.lower(), preserve_line=True) for text in (reference, prediction)]
    return {
        "answer_em": float(bool(_normal(prediction)) and _normal(prediction) == _normal(reference)),
        "answer_f1": _parts_f1(prediction, reference) if gold.category == 1 else _stem_f1(prediction, reference),
        "answer_f1_xmemory": _set_f1(prediction, reference),
        "bleu1": float(
            sentence_bleu([words[0]], words[1], (1, 0, 0, 0), SmoothingFunction().method1) if words[1] else 0
        ),
        "rouge_l": float(_ROUGE.score(reference, prediction)["rougeL"].fmeasure),
    }


def _normal(text: str) -> str:
    """Return LoCoMo's normal form: lower case, no punctuation, no `a`, `an`, `the`, `and`."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the|and)\b", " ", bare).split())


def _stem_f1(prediction: str, reference: str) -> float:
    a, b = (Counter(_STEMMER.stem(word) for word in _normal(text).split()) for text in (prediction, reference))
    return _f1((a & b).total(), a.total(), b.total())


def _parts_f1(prediction: str, reference: str) -> float:
    parts = reference.split(",")
    return sum(max(_stem_f1(given, part) for given in prediction.split(",")) for part in parts) / len(parts)


def _set_f1(prediction: str, reference: str) -> float:
    a, b = (set(re.sub(r"[.,!?]", " ", text.lower()).split()) for text in (prediction, reference))
    return _f1(len(a & b), len(a), len(b))


def _f1(common: int, given: int, wanted: int) -> float:
    return 2 * common / (given + wanted) if common else 0.0
