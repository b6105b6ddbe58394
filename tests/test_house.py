"""The shape of the house: who may import whom, what is packaged, how large a room may get."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "memory": {"memory"},
    "env": {"env", "memory"},
    "judges": {"judges", "env", "memory"},
    "rl": {"rl", "judges", "env", "memory"},
    "scripts": {"scripts", "rl", "judges", "env", "memory"},
}


def modules():
    return [(folder, path) for folder in MAY_IMPORT for path in sorted((ROOT / folder).glob("*.py"))]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_run_one_way():
    seen = set()
    for folder, path in modules():
        ours = {name.split(".")[1] for name in imported(path) if name.startswith("cuewalk.")}
        assert ours <= MAY_IMPORT[folder], f"{path} imports {ours - MAY_IMPORT[folder]}"
        seen |= {(folder, other) for other in ours if other != folder}
    assert ("rl", "judges") in seen and ("judges", "env") in seen and ("env", "memory") in seen


def test_rooms_stay_small():
    lines = {path: len(path.read_text().splitlines()) for _, path in modules()}
    assert {path: n for path, n in lines.items() if n > 500} == {}
    assert 1000 < sum(n for path, n in lines.items() if path.parent.name != "scripts") < 6000


def test_the_package_list_holds_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {p.parent.relative_to(ROOT) for folder in MAY_IMPORT for p in (ROOT / folder).rglob("__init__.py")}
    assert sorted(listed) == sorted(f"cuewalk.{str(p).replace('/', '.')}" for p in found)
    assert all((ROOT / folder / "py.typed").exists() for folder in MAY_IMPORT)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_second_copy_of_a_package_is_refused(folder):
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert f"import cuewalk.{folder}, not {folder}" in done.stderr


def test_the_retriever_loads_neither_trl_nor_vllm():
    script = "import sys, cuewalk.rl; assert not {'trl', 'vllm'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT / "tests")


def test_importing_the_package_turns_off_statistics_unless_the_user_set_it():
    script = "import os, cuewalk.rl; print(os.environ['HF_HUB_DISABLE_TELEMETRY'], os.environ['VLLM_NO_USAGE_STATS'])"
    import os

    clean = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS")}
    run = lambda env: subprocess.run(  # noqa: E731
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=env
    ).stdout.split()
    assert run(clean) == ["1", "1"]
    assert run(clean | {"VLLM_NO_USAGE_STATS": "0"}) == ["1", "0"]


def test_no_text_of_the_non_commercial_data_is_tracked(locomo_path):
    """No sentence of LoCoMo of eight words or more stands in a tracked file."""
    import json

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ours = "\n".join((ROOT / name).read_text(errors="replace") for name in tracked if not name.endswith(".png"))
    for sample in json.loads(locomo_path.read_text()):
        sessions = [v for k, v in sample["conversation"].items() if k.startswith("session_") and isinstance(v, list)]
        texts = [turn["text"] for session in sessions for turn in session] + [row["question"] for row in sample["qa"]]
        for text in texts:
            if len(text.split()) >= 8:
                assert text.strip() not in ours, sample["sample_id"]
