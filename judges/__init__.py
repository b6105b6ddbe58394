"""Score a finished trajectory against gold."""

if __name__ != "cuewalk.judges":  # a second copy would break isinstance
    raise ImportError("import cuewalk.judges, not judges (run `make install` once)")

from cuewalk.judges.evidence import JudgeError, covered, evidence_recall
from cuewalk.judges.trajectory import PRESETS, JudgeConfig, TrajectoryJudge, Verdict, redundancy

__all__ = [
    "PRESETS", "JudgeConfig", "JudgeError", "TrajectoryJudge", "Verdict", "covered", "evidence_recall", "redundancy",
]  # fmt: skip
