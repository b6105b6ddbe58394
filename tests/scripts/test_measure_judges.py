"""The cheats: each does what its name says, and what was measured of them holds."""

import json
from pathlib import Path

import pytest

from cuewalk.env import EnvConfig, RetrievalEnv
from cuewalk.judges import TrajectoryJudge
from cuewalk.scripts.measure_judges import CHEATS, walk

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "judges.json"


@pytest.mark.parametrize(
    ("name", "ending", "added", "reward"),
    [
        ("stop at once", "stopped", 0, 0.0),
        ("repeat the query", "malformed", 0, -0.1),  # twice bad in a row
        ("always malformed", "malformed", 0, -0.1),
        ("flood of refines", "budget", 0, -0.02),
        ("copy the question", "stopped", 0, 0.0),
        ("budget as a stop", "budget", 3, None),  # the second action is dearer than what is left
    ],
)
def test_a_cheat_does_what_its_name_says(name, ending, added, reward, graph, question, gold):
    walked = walk(RetrievalEnv(graph, question, EnvConfig(k=1, budget=4, frontier_cap=5, new_lines=1)), CHEATS[name])
    assert (walked.ending, len(walked.added)) == (ending, added)
    verdict = TrajectoryJudge().score(walked, graph, gold)
    assert reward is None or verdict.reward == pytest.approx(reward)
    assert verdict.components["budget_ending"] == (-0.02 if ending == "budget" else 0.0)


def test_under_price_no_cheat_earns_what_the_honest_walker_does_where_there_is_something_to_find():
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["cheats"]["rows"]
    paid = {(row["data"], row["policy"]): row["reward"]
            for row in rows if (row["preset"], row["stratum"]) == ("price", "reachable")}  # fmt: skip
    sets = {data for data, _ in paid}
    assert len(sets) == 3
    for data in sets:
        cheats = [paid[data, name] for name in CHEATS]
        assert max(cheats) < paid[data, "heuristic"] < paid[data, "oracle"]
