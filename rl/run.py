"""A run directory: the resolved configuration, versions, metrics; one run goes on, another is refused."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from cuewalk.rl.config import Config, ConfigError, config_tree

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "faiss-cpu", "sentence-transformers")

# What may change between two starts of one run: a longer one of the same kind goes on where the shorter one ended.
FREE = ("run_dir", "memory_dir", "evaluation", "compare", "grpo.max_steps", "sampling.server", "sampling.stop_offset")


def open_run(config: Config) -> Path:
    """Make the run directory, or go on in it if it holds a run of the same configuration.

    A ConfigError if it holds another run, or files that are none. Nothing is overwritten.
    """
    run, tree = Path(config.run_dir), config_tree(config)
    path = run / "config.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))["config"]
        changed = [place for place in _differences(before, tree) if not place.startswith(FREE)]
        if changed:
            raise ConfigError(
                f"{run} holds a run with other settings ({', '.join(changed[:5])}); nothing was overwritten. "
                f"Choose another run_dir, or go on with the same settings"
            )
    elif run.exists() and any(run.iterdir()):
        raise ConfigError(f"{run} is not empty and holds no run; nothing was overwritten. Choose another run_dir")
    run.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")  # whole or not at all: other processes read it
    partial.write_text(json.dumps({"config": tree, **provenance()}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return run


def provenance() -> dict[str, Any]:
    """Return the commit, the command and the versions that made a result."""
    return {
        "command": " ".join([Path(sys.argv[0]).name.replace("cli.py", "cuewalk"), *sys.argv[1:]]),
        "commit": (_git("rev-parse", "--short=12", "HEAD") or "unknown")
        + ("+changes" if _git("status", "--porcelain") else ""),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in PACKAGES}},
    }


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # an installed copy; git would look in the folders above it
        return ""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _differences(before: Any, after: Any, place: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [d for key in keys for d in _differences(before.get(key), after.get(key), f"{place}.{key}".lstrip("."))]
    return [] if before == after else [place]


@dataclass
class MetricsLog(TrainerCallback):  # type: ignore[misc]
    """Append what a trainer logs to `metrics.jsonl`, one line a step, after `stage`."""

    path: Path
    stage: str

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs:
            row = {"stage": self.stage, "step": state.global_step, **logs}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, default=float) + "\n")


def trainer_defaults(run: Path, stage: str, config: Config) -> dict[str, Any]:
    """Return our defaults of the trainers' settings, which a configuration may override."""
    # transformers renames it: `activation_checkpointing` from 5.24 on.
    names = {f.name for f in fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {
        "output_dir": str(run / stage),
        "seed": config.seed,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,  # the base is loaded in `dtype`; adapters stay float32
        checkpointing: False,  # it would recompute what the shared prefix keeps
        "logging_steps": 1,
        "max_grad_norm": 0.5,
    }


def last_step(stage: Path) -> int:
    """Return the step of a stage's newest whole checkpoint, 0 without one; a half-written one has no state yet."""
    states = stage.glob("checkpoint-*/trainer_state.json")
    return max((int(state.parent.name.split("-")[1]) for state in states), default=0)


def run_trainer(trainer: Any, out: Path) -> None:
    """Train, from the stage's newest whole checkpoint where there is one, and save the adapter in `out`."""
    step = last_step(Path(trainer.args.output_dir))
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{step}" if step else None)
    trainer.save_model(str(out))
