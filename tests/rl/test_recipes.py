"""The recipes in `configs/` and the guide to training: each job is accepted, each name in the guide exists."""

# ruff: noqa: F811 (fixtures of another file, imported and asked for)

import json
import re
from collections import defaultdict
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from peft import LoraConfig
from trl import GRPOConfig, SFTConfig

from cuewalk.env import LABELS
from cuewalk.judges import TrajectoryJudge
from cuewalk.rl import Config, load_config
from cuewalk.rl.config import check_options, config_tree, parse_config
from cuewalk.rl.data import Memories
from cuewalk.rl.grpo import WalkTrainer, prepare_arguments
from cuewalk.rl.run import trainer_defaults
from cuewalk.rl.train import new_adapter
from cuewalk.rl.warm_start import teach_rows, warm_start
from tests.rl.test_training import config, run_grpo, tasks  # noqa: F401

ROOT = Path(__file__).parents[2]
LAUNCHES = sorted((ROOT / "configs").glob("accelerate_*.yaml"))
JOBS = sorted(set((ROOT / "configs").glob("*.yaml")) - set(LAUNCHES))
GUIDE = (ROOT / "docs" / "training.md").read_text()
QUOTED = re.findall(r"`([^`\n]+)`", GUIDE)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_each_job_is_accepted_as_training_accepts_it(path, tmp_path):
    job = load_config(path)
    assert parse_config(config_tree(job)) == job
    assert f"--config configs/{path.name}" in path.read_text()
    arguments = prepare_arguments(job, tmp_path)
    assert arguments.num_generations >= 2 and arguments.per_device_train_batch_size % arguments.num_generations == 0
    check_options(job.sft, SFTConfig, "sft")
    check_options(job.lora, LoraConfig, "lora")
    SFTConfig(**{**trainer_defaults(tmp_path, "sft", job), **job.sft})
    LoraConfig(**job.lora)
    assert job.env.most_labels <= len(LABELS)
    assert job.warm_start.picks <= job.env.budget


@pytest.mark.parametrize(
    ("name", "kind", "stage"),
    [("accelerate_ddp.yaml", "MULTI_GPU", None), ("accelerate_zero2.yaml", "DEEPSPEED", 2)],
)
def test_accelerate_reads_its_files_and_starts_two_processes_without_autocast(name, kind, stage):
    path = ROOT / "configs" / name
    found = load_config_from_file(str(path))  # raises on a key that accelerate does not know
    assert (found.distributed_type.value, found.num_processes, found.mixed_precision) == (kind, 2, "no")
    command = re.search(r"accelerate launch (--config_file .*)", path.read_text()).group(1).split()
    assert command[1] == f"configs/{name}" and {"scripts/train.py", command[-1]} == set(command[2:]) - {"--config"}
    assert all((ROOT / part).is_file() for part in (command[1], command[2], command[-1]))
    asked, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(path), *command[2:]])
    )
    assert (asked.use_deepspeed, asked.multi_gpu) == (stage is not None, stage is None)
    assert (asked.num_processes, asked.mixed_precision) == (2, "no")
    assert stage is None or asked.zero_stage == stage


def test_every_recipe_is_a_job_or_a_launch_that_is_tested_here():
    assert [path.name for path in LAUNCHES] == ["accelerate_ddp.yaml", "accelerate_zero2.yaml"]
    assert {"demo", "locomo_cpu", "locomo_1gpu"} <= {path.stem for path in JOBS}


@pytest.fixture
def logged(config, tasks, graph, chat, tmp_path):
    """Names that the two stages log, by stage: one step of each on a tiny model, and the check of vLLM's scores."""
    run = tmp_path / "run"
    few = replace(config.warm_start, rows=2, k=(1,))
    config = replace(config, grpo=config.grpo | {"max_steps": 1}, warm_start=few)
    run_grpo(config, tasks, graph, chat, run, TrajectoryJudge())
    rows = teach_rows(config, tasks, Memories({"toy": graph}, config.env), chat)
    warm_start(config, run, new_adapter(config), chat, rows)
    names = defaultdict(set)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        names[json.loads(line)["stage"]] |= set(json.loads(line))
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(gather=lambda values: values), _metrics={"train": defaultdict(list)}
    )
    scores = {"sampling_per_token_logps": torch.zeros(1, 2), "advantages": torch.ones(1)}
    WalkTrainer._correct(trainer, scores, torch.zeros(1, 2), torch.ones(1, 2).bool())
    names["grpo"] |= set(trainer._metrics["train"])
    return names


def test_every_curve_in_the_guide_is_logged_and_every_curve_of_ours_is_in_the_guide(logged):
    told = {name for name in QUOTED if re.fullmatch(r"[a-z_]+/[a-z_]+", name)}
    assert len(told) > 30 and told - logged["grpo"] - logged["warm_start"] == set()
    of_trl = ("completions", "rewards", "clip_ratio")
    assert {name for name in logged["grpo"] - told if "/" in name and name.split("/")[0] not in of_trl} == set()
    for title, stage in (("Warm start", "warm_start"), ("GRPO", "grpo")):
        section = GUIDE.split(f"\n### {title}\n")[1].split("\n## ")[0].split("\n### ")[0]
        cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
        names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
        assert len(names) > 2 and names - logged[stage] == set()


def test_every_setting_in_the_guide_exists():
    passed = {"grpo": GRPOConfig, "sft": SFTConfig, "lora": LoraConfig}
    sections = {f.name: f.type for f in fields(Config)}
    settings = {name for text in QUOTED for name in re.findall(r"(?<![\w./])([a-z_]+\.[a-z_]+)(?![\w./])", text)}
    files = ("md", "json")
    settings = {name for name in settings if name.split(".")[0] in sections and name.split(".")[1] not in files}
    assert len(settings) > 25
    for name in settings:
        section, key = name.split(".")
        kinds = (passed.get(section, sections[section]), *get_args(sections[section]))
        owner = next(kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind))
        assert key in {f.name for f in fields(owner)}, name


def test_every_file_the_guide_links_to_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", GUIDE)
    named = [name for text in QUOTED for name in re.findall(r"configs/\w+\.yaml|scripts/\w+\.py", text)]
    assert links and named
    assert all((ROOT / "docs" / link).exists() for link in links) and all((ROOT / name).is_file() for name in named)
