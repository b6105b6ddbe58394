"""Every block marked ```python in README.md and docs/*.md runs, a file's blocks one after another.

They share one namespace a file and a folder of their own, in which `my-policy` is an exported policy (of the tiny
random model). A block that can't run here is marked ```text.
"""

import os
import re
from pathlib import Path

import pytest

from tests.rl.test_export import made  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if BLOCK.search(path.read_text())]


def blocks(text: str):
    """Return each block with the number of its first line."""
    return [(text[: match.start(1)].count("\n"), match[1]) for match in BLOCK.finditer(text)]


def test_the_documents_have_blocks():
    assert {"README.md", "api.md", "memory.md"} <= {path.name for path in FILES}
    assert blocks("a\n```python\nx = 1\n```\n```text\nno\n```\n```python\ny\nz\n```\n") == [
        (2, "x = 1\n"),
        (8, "y\nz\n"),
    ]


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_every_block_runs(path, made, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    os.symlink(made[0], "my-policy")
    namespace = {"__name__": "document"}
    for line, source in blocks(path.read_text()):
        exec(compile("\n" * line + source, str(path), "exec"), namespace)
