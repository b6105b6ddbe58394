"""Groups an hour of a whole training job, as one process and as two: `cuewalk benchmark job`."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from cuewalk.rl.config import load_config
from cuewalk.scripts.controls import prepare
from cuewalk.scripts.results import read_metrics

CONFIG, STEPS = Path("configs/locomo_cpu.yaml"), 5


def job() -> list[dict[str, Any]]:
    """Train for some steps from the warm start of a finished run of configs/locomo_cpu.yaml, twice.

    Once as one process with all threads, once as two that share them. `merged` is the share of trajectories that were
    like another of their group, and computed with it. A ConfigError where there is no such run.
    """
    rows = []
    for count in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            settings = [f"run_dir={folder}/run", f"grpo.max_steps={STEPS}"]
            run = prepare(Path(load_config(CONFIG).run_dir), config := load_config(CONFIG, settings))
            command = [sys.executable, "-m", "cuewalk.scripts.cli", "train", "--config", str(CONFIG), *settings]
            where = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads() // count or 1)}
            subprocess.run([*command, "--processes", str(count)], env=where, check=True)
            rows.append({"benchmark": f"{CONFIG.name}, processes: {count}", "unit": "groups/hour", **rate(run)})
            rows[-1]["merged"] = 1 - rows[-1].pop("distinct") / config.grpo.get("num_generations", 8)
    return rows


def rate(run: Path) -> dict[str, float]:
    """Return a run's groups an hour, those that were replaced counted, and its different trajectories a group."""
    steps, _ = read_metrics(run / "metrics.jsonl")
    asked = sum(line["groups/all"] + line["groups/replaced"] for line in steps.values())
    hours = sum(line["step_time"] for line in steps.values()) / 3600
    return {"ours": asked / hours, "distinct": fmean(line["groups/distinct_trajectories"] for line in steps.values())}
