"""Tasks, and the environment in which a policy walks a memory graph."""

if __name__ != "cuewalk.env":  # a second copy would register the environment twice
    raise ImportError("import cuewalk.env, not env (run `make install` once)")

import gymnasium as _gymnasium

from cuewalk.env.actions import LABELS, Bad, Expand, Refine, Stop, format_action, parse_action
from cuewalk.env.datasets import load_longmemeval, load_perltqa
from cuewalk.env.environment import RetrievalEnv, Step, Trajectory
from cuewalk.env.own import load_json
from cuewalk.env.records import Gold, Question, Tasks
from cuewalk.env.state import Change, Ending, EnvConfig, Rank, State
from cuewalk.env.tasks import DataError, load_locomo

_gymnasium.register("cuewalk/MemoryRetrieval-v0", entry_point="cuewalk.env.environment:RetrievalEnv")

__all__ = [
    "LABELS", "Bad", "Change", "DataError", "Ending", "EnvConfig", "Expand", "Gold", "Question", "Rank",
    "Refine", "RetrievalEnv", "State", "Step", "Stop", "Tasks", "Trajectory", "format_action", "load_json",
    "load_locomo", "load_longmemeval", "load_perltqa", "parse_action",
]  # fmt: skip
