import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cuewalk.memory import Conversation, Message, SentenceEncoder, build_graph, save_graph
from cuewalk.rl.adapters import new_adapter
from cuewalk.rl.config import load_config
from cuewalk.scripts.cli import launch_command, main
from tests.memory.test_extract import serving

ROOT = Path(__file__).parents[2]

SMALL = {
    "dtype": "float32",
    "data": {"source": "synthetic", "conversations": [1, 1, 1]},
    "env": {"k": 2, "frontier_cap": 4, "new_lines": 1, "budget": 2, "value_words": 6, "abstraction_words": 4},
    "warm_start": {"rows": 4, "k": [2]},
    "sampling": {"max_action_tokens": 8, "replacements": 0},
    "evaluation": {"model_questions": 4},
    "sft": {"per_device_train_batch_size": 4},
    "grpo": {"num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 2, "save_steps": 1},
}


def write(tmp_path, tiny_model, **changes) -> Path:
    tree = SMALL | {
        "model": str(tiny_model),
        "run_dir": str(tmp_path / "run"),
        "memory_dir": str(tmp_path / "memory"),
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(tree | changes))
    return path


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("build", "train", "evaluate", "export", "configs/demo.yaml", "env.budget=4"):
        assert word in text


def test_build_says_what_is_in_the_memories_and_does_not_build_twice(tmp_path, tiny_model, capsys):
    path = write(tmp_path, tiny_model)
    assert main(["build", "--config", str(path)]) == 0
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 4 and "entries" in first and str(tmp_path / "memory") in first
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "memory").rglob("memory.sqlite")}
    assert len(made) == 3
    assert main(["build", "--config", str(path)]) == 0
    assert capsys.readouterr().out == first
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "memory").rglob("memory.sqlite")} == made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modell": "x"}, "did you mean 'model'?"),
        ({"model": "smolm"}, "unknown model 'smolm'"),
        ({"data": {"source": "json", "path": "nowhere.json"}}, "no data at nowhere.json"),
        ({"data": {"source": "json"}}, "data.path is not set"),
        ({"data": {"source": "synthetic", "conversations": [99, 1, 1]}}, "config: data: 99 conversations for train"),
        ({"data": {"source": "locomo", "split": "mine", "path": "nowhere"}}, "config: data: unknown split 'mine'"),
        ({"warm_start": {"rows": 9999}}, "only"),
        ({"lora": {"lora_dropout": 0.1}}, "lora.lora_dropout must be 0"),
        ({"prices": [0.01, 0.02]}, "prices needs env.price"),
        ({"sft": {"label_smoothing_factor": 0.1}}, "no effect on rows made for a set likelihood"),
        ({"lora": {"rank": 4}}, "unknown key 'lora.rank'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(tmp_path, tiny_model, capsys, changes, message):
    assert main(["train", "--config", str(write(tmp_path, tiny_model, **changes))]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run" / "trained").exists()


def test_a_refused_setting_leaves_nothing_behind(tmp_path, tiny_model, capsys):
    assert main(["train", "--config", str(write(tmp_path, tiny_model, sft={"learning_rat": 1.0}))]) == 2
    assert "did you mean 'learning_rate'?" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and not (tmp_path / "memory").exists()


def test_locomo_without_its_folder_says_how_to_name_it(tmp_path, tiny_model, capsys, monkeypatch):
    monkeypatch.delenv("CUEWALK_DATA", raising=False)
    assert main(["train", "--config", str(write(tmp_path, tiny_model, data={"source": "locomo"}))]) == 2
    assert "set data.path or the environment variable CUEWALK_DATA" in capsys.readouterr().err


def test_questions_without_evidence_are_refused(tmp_path, tiny_model, capsys):
    message = {"id": "1", "speaker": "Ann", "time": "2024-05-01T12:00", "text": "I moved to Oslo."}
    question = {"id": "a", "text": "Where?", "answer": "Bergen"}  # no message says so: no silver evidence
    data = {"conversations": [{"id": "c", "split": "train", "messages": [message], "questions": [question]}]}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    path = write(tmp_path, tiny_model, data={"source": "json", "path": str(tmp_path / "mine.json")})
    assert main(["train", "--config", str(path)]) == 2
    assert "no training question has gold evidence" in capsys.readouterr().err


def test_inspect_says_what_is_in_a_memory_and_draws_it(tmp_path, tiny_model, capsys):
    main(["build", "--config", str(write(tmp_path, tiny_model))])
    folder = next((tmp_path / "memory").iterdir())
    capsys.readouterr()
    picture = tmp_path / "graph.png"
    assert (
        main(["inspect", str(folder), "--query", "Where was the trip?", "--out", str(picture), "--samples", "1"]) == 0
    )
    said = capsys.readouterr().out
    assert "coverage                1.000" in said and f"Drawn: {picture}" in said and picture.stat().st_size > 10_000
    assert main(["inspect", str(tmp_path)]) == 2
    assert "memory.sqlite is missing" in capsys.readouterr().err


def test_a_person_walks_and_sees_the_reward(tmp_path, tiny_model, capsys, monkeypatch):
    path = write(tmp_path, tiny_model)
    said = iter(["EXPAND A", "STOP"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert main(["play", "--config", str(path), "--question", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Budget") >= 2 and "Reward" in shown and "price" in shown and "The oracle" in shown

    def gone(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", gone)
    assert main(["play", "--config", str(path)]) == 0
    assert "Reward 0.000" in capsys.readouterr().out  # nobody there: that is to stop at once
    assert main(["play", "--config", str(path), "--question", "999"]) == 2
    assert "--question 999: there are" in capsys.readouterr().err


def test_calibrate_prints_acceptance_by_kind(tmp_path, tiny_model, capsys):
    path = write(tmp_path, tiny_model)
    assert main(["calibrate", "answer_em", "--config", str(path), "--per-kind", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["right", "exact", "accepted", "1.00"] and len(lines) == 6
    assert lines[2].split()[:4] == ["wrong", "vague", "accepted", "0.00"]
    likelihood = ["calibrate", "likelihood", "--config", str(path), "--per-kind", "2", f"judge.reader={tiny_model}"]
    assert main(likelihood) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:4] == ["right", "exact", "accepted", "1.00"]


@pytest.mark.parametrize(("generous", "status"), [(True, 2), (False, 0)])
def test_training_on_a_judge_that_accepts_wrong_answers_is_refused(
    generous, status, tmp_path, tiny_model, capsys, monkeypatch
):
    def reply(prompt, messages):
        reference, answer = (
            json.loads(line)[key]
            for key, line in zip(
                ("reference", "answer"), [part for part in prompt.splitlines() if part.startswith("{")][1:], strict=True
            )
        )
        return json.dumps({"reason": "it seems so", "correct": generous or answer == reference})  # fmt: skip

    monkeypatch.setenv("CUEWALK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cuewalk.rl.train.train_grpo", lambda *_: None)
    with serving(reply) as (url, asked):
        judge = {"correctness": "llm", "llm": {"base_url": url, "model": "m"}}
        path = write(tmp_path, tiny_model, judge=judge, warm_start={"rows": 0})
        assert main(["train", "--config", str(path)]) == status
        assert asked
    if generous:
        said = capsys.readouterr().err
        assert "accepts 100% of the wrong answers (vague 20 of 20, " in said and "judge.most_wrong = 20%" in said
        assert not (tmp_path / "run").exists()


def test_an_unknown_argument_is_refused(tmp_path, tiny_model):
    with pytest.raises(SystemExit):
        main(["build", "--config", str(write(tmp_path, tiny_model)), "--fast"])
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path), "a=b"])


def test_evaluating_nothing_says_to_train(tmp_path, tiny_model, capsys):
    assert main(["evaluate", "--config", str(write(tmp_path, tiny_model))]) == 2
    assert "train one first with `cuewalk train" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_job_as_a_user_launches_it(tmp_path, tiny_model):
    """`accelerate launch`, then evaluate and export, each in its own process; the tiny model learns nothing."""
    path = write(tmp_path, tiny_model, env=SMALL["env"] | {"order": "reader"}, reading={"epochs": 1})
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "CUEWALK_CACHE": str(tmp_path / "cache")}
    run = lambda *command: subprocess.run(  # noqa: E731
        [sys.executable, "-m", *command],
        check=True,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    launched = run("accelerate.commands.launch", "--num_processes", "1", "scripts/train.py", "--config", str(path))
    assert "trained policy in" in launched.stdout
    again = run("cuewalk.scripts.cli", "train", "--config", str(path))
    assert "trained policy in" in again.stdout and "train_runtime" not in again.stdout  # nothing was done twice
    printed = run("cuewalk.scripts.cli", "evaluate", "--config", str(path)).stdout
    result = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    policies = {row["policy"] for row in result["rows"]}
    walked = {
        "stop",
        "random",
        "expand_top=1",
        "expand_top=3",
        "expand_top=4",
        "expand_all",
        "ranker",
        "oracle_one_hop",
        "oracle",
    }
    assert policies == walked | {f"top_k={k}" for k in (5, 8, 10, 20)} | {
        "untrained", "untrained_grammar", "warm_start", "warm_start+offset", "trained", "trained+offset",
        "adaptive_k=gap", "adaptive_k=threshold", "unread_top=3", "unread_top=4",
    }  # fmt: skip
    assert [curve["policy"] for curve in result["curves"]] == ["warm_start", "trained"]
    assert [row["policy"] for row in result["stopping"]] == ["top_score", "warm_start", "trained"]
    assert [row["control"] for row in result["controls"]] == [None, "no_text", "other_question", None]
    asked = {row["policy"]: row for row in result["rows"] if row["questions"] == "asked"}
    assert asked.keys() == policies and all(row["n"] == 4 for row in asked.values())
    assert asked["top_k=5"]["reward"] is None and asked["stop"]["reward"] == 0.0
    assert asked["oracle"]["evidence_recall"] >= asked["stop"]["evidence_recall"]
    assert asked["untrained_grammar"]["ended_malformed"] == 0.0
    assert asked["expand_top=3"]["inference_tokens"] > 100 > asked["unread_top=3"]["inference_tokens"] == 0
    assert {"name", "command", "commit", "seeds", "versions", "data", "rows", "comparisons"} <= set(result)
    for name in ("evaluation.md", "evaluation_entries.png", "evaluation_learning.png"):
        assert (tmp_path / "run" / name).stat().st_size > 100 and name in printed
    walks = {file: file.stat().st_mtime_ns for file in (tmp_path / "run" / "walks").iterdir()}
    assert len(walks) == 2 * 2 + 2  # two adapters: on test, on validation; the warm start twice blind
    run("cuewalk.scripts.cli", "evaluate", "--config", str(path))
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run" / "walks").iterdir()} == walks  # none again
    again = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert [again[key] for key in ("curves", "stopping", "controls")] == [
        result[key] for key in ("curves", "stopping", "controls")
    ]
    run("cuewalk.scripts.cli", "evaluate", "--config", str(path), "evaluation.policies=[trained]")
    alone = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert policies - {row["policy"] for row in alone["rows"]} == {
        "untrained", "untrained_grammar", "warm_start", "warm_start+offset",
    }  # fmt: skip
    run("cuewalk.scripts.cli", "export", str(tmp_path / "run"), str(tmp_path / "policy"))
    assert (tmp_path / "policy" / "policy.json").exists()
    assert (tmp_path / "policy" / "reader" / "adapter_model.safetensors").exists()
    order = ("warm_start.rows=0", "grpo.max_steps=0", f"run_dir={tmp_path / 'order'}")
    run("cuewalk.scripts.cli", "train", "--config", str(path), *order)  # the order alone, and what it is worth
    assert {part.name for part in (tmp_path / "order").iterdir() if part.is_dir()} == {"reader", "reading"}
    run("cuewalk.scripts.cli", "evaluate", "--config", str(path), *order, "evaluation.policies=[]")
    alone = json.loads((tmp_path / "order" / "evaluation.json").read_text())
    assert {row["policy"] for row in alone["rows"]} == walked | {f"top_k={k}" for k in (5, 8, 10, 20)} | {
        "adaptive_k=gap", "adaptive_k=threshold", "unread_top=3", "unread_top=4",
    }  # fmt: skip
    memory = next((tmp_path / "memory").iterdir())
    told = run("cuewalk.scripts.cli", "retrieve", str(tmp_path / "policy"), str(memory), "Where?", "--order-only")
    assert "Ended: budget" in told.stdout


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(tmp_path, tiny_model):
    """Each rank takes half of the questions. Enumerated groups leave nothing to chance, so the adapters are equal."""
    grpo = {"max_steps": 2, "save_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0}
    common = {"warm_start": {"rows": 0}, "sampling": {"max_action_tokens": 8},
              "env": {"k": 1, "budget": 3, "frontier_cap": 4, "new_lines": 1}}  # fmt: skip
    adapters = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        path = write(folder, tiny_model, **common, grpo=grpo | {"per_device_train_batch_size": 10 // processes})
        new_adapter(load_config(path)).save_pretrained(folder / "run" / "warm_start")
        command = [
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(processes),
            "-m",
            "cuewalk.scripts.controls",
            "enumerated",
            "--config",
            str(path),
            "--out",
            str(folder / "out"),
        ]
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False,
            env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        adapters[processes] = load_file(folder / "out" / "trained" / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 1e-3 for name, tensor in adapters[1].items() if "lora_B" in name)  # it moved
    for name, tensor in adapters[1].items():
        assert torch.allclose(tensor, adapters[2][name], atol=1e-5), name


@pytest.fixture(scope="module")
def remembered(tmp_path_factory):
    """Return the folder of a memory of two messages, one of which plays tricks on a terminal."""
    messages = (
        Message("1", "Ann", datetime(2024, 5, 1, 12, 0), "I moved to Oslo."),
        Message("2", "Bob", datetime(2024, 5, 1, 12, 1), "Did your\x1b[2J dog\u202e like the trip?"),
    )
    folder = tmp_path_factory.mktemp("memory") / "chat-1"
    save_graph(build_graph(Conversation("chat-1", messages), SentenceEncoder()), folder)
    return folder


def test_retrieve_answers_without_a_policy_and_says_so(remembered, capsys):
    assert main(["retrieve", "search", str(remembered), "Where does Ann live?", "--budget", "1"]) == 0
    assert capsys.readouterr().out == (
        "e0 [1]\n  Ann (1 May 2024): I moved to Oslo.\ne1 [2]\n  Bob (1 May 2024): Did your[2J dog like the trip?\n"
        "Ended: search (no policy was given)\n"
    )
    assert main(["retrieve", "search", str(remembered), "Where does Ann live?", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [memory["sources"] for memory in found["memories"]] == [["1"], ["2"]] and found["ending"] == "search"


def test_retrieve_with_a_policy_prints_the_walk(remembered, tmp_path, tiny_model, capsys):
    from tests.rl.test_export import finished

    finished(tiny_model, tmp_path)
    policy = str(tmp_path / "policy")
    assert main(["export", str(tmp_path / "run"), policy, "--no-merged"]) == 0
    assert (tmp_path / "policy" / "README.md").read_text().startswith("---\n") and capsys.readouterr().out
    assert main(["retrieve", policy, str(remembered), "Where does Ann live?"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "e0 [1]" and shown[-1] in ("Ended: malformed", "Ended: budget", "Ended: stopped")
    assert [line for line in shown if line.startswith("> ")]
    assert main(["retrieve", policy, str(remembered), "Where does Ann live?", "--order-only", "--budget", "1"]) == 0
    assert "Ended: budget" in capsys.readouterr().out  # the whole budget, and no model
    assert main(["retrieve", policy, str(tmp_path / "nowhere"), "Where?"]) == 2
    assert "memory.sqlite is missing" in capsys.readouterr().err
    assert main(["retrieve", policy, str(remembered), "Where?", "--budget", "99"]) == 2
    assert "budget = 99" in capsys.readouterr().err
    assert main(["retrieve", policy, str(remembered), "Where?", "--server", "http://127.0.0.1:9"]) == 2
    assert "Start `vllm serve" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["retrieve", "serve"])
def test_help_of_what_people_use_gives_an_example(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"examples:\n  cuewalk {command} my-policy checkpoints/memory/NAME" in capsys.readouterr().out


def test_serving_without_the_extra_says_what_to_install(remembered, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    monkeypatch.delitem(sys.modules, "cuewalk.scripts.mcp_server", raising=False)
    assert main(["serve", "search", str(remembered)]) == 2
    assert "pip install 'cuewalk[mcp]'" in capsys.readouterr().err


def test_several_processes_are_started_by_accelerate_or_torchrun():
    asked = ["--config", "a.yaml", "seed=1"]
    end = ["-m", "cuewalk.scripts.train", *asked]
    assert launch_command(2, asked, gpus=True) == [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", *end,
    ]  # fmt: skip
    assert launch_command(3, asked, gpus=False) == [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3", *end,
    ]  # fmt: skip
    from accelerate.commands.launch import launch_command_parser  # the flags are accelerate's own

    read = launch_command_parser().parse_args(launch_command(2, asked, gpus=True)[3:])
    assert read.multi_gpu and read.num_processes == 2 and read.module
    assert (read.training_script, read.training_script_args) == ("cuewalk.scripts.train", asked)


def test_train_starts_processes_only_where_several_are_asked_for(tmp_path, tiny_model, capsys, monkeypatch):
    started = []

    def run(command, env, check):
        started.append((command, env.get("ACCELERATE_USE_CPU")))
        return subprocess.CompletedProcess(command, 7)

    path = str(write(tmp_path, tiny_model, model="smolm"))  # refused before any training
    monkeypatch.setattr("cuewalk.scripts.cli.subprocess.run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["train", "--config", path, "seed=1", "--processes", "2", "env.k=1"]) == 7  # the exit status is theirs
    assert started == [(launch_command(2, ["--config", path, "seed=1", "env.k=1"], gpus=False), "true")]
    assert main(["train", "--config", path]) == 2
    assert "unknown model 'smolm'" in capsys.readouterr().err and len(started) == 1
    assert main(["train", "--config", path, "--processes", "0"]) == 2
