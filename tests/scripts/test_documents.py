from datetime import datetime

import pytest

from cuewalk.memory import BuildConfig, build_graph
from cuewalk.scripts.documents import read_document

TEXT = """Before any header.

# Guide

Welcome.

## Install

Run make.

```
# not a header
make demo
```

- one
- two

# Use

Ask it.
"""


def test_headers_open_segments_and_blocks_are_messages(tmp_path, encoder):
    path = tmp_path / "manual.md"
    path.write_text(TEXT)
    document = read_document(path, datetime(2024, 1, 2))
    assert [(m.speaker, m.text) for m in document.messages] == [
        ("manual", "Before any header."),
        ("Guide", "Welcome."),
        ("Guide > Install", "Run make."),
        ("Guide > Install", "```\n# not a header\nmake demo\n```"),
        ("Guide > Install", "- one\n- two"),
        ("Use", "Ask it."),
    ]
    graph = build_graph(document, encoder, BuildConfig(update_threshold=1.01))
    assert [segment.messages for segment in graph.segments] == [("b0",), ("b1",), ("b2", "b3", "b4"), ("b5",)]
    assert graph.entries["e2"].abstraction == "Guide > Install: Run make."


def test_plain_text_is_cut_like_a_conversation(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("One paragraph\nof two lines.\n\nAnother.")
    document = read_document(path)
    assert [(m.speaker, m.text) for m in document.messages] == [
        ("notes", "One paragraph\nof two lines."),
        ("notes", "Another."),
    ]
    assert document.breaks == frozenset()


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.md").write_text("# Only a header\n")
    with pytest.raises(ValueError, match="is no UTF-8 text"):
        read_document(tmp_path / "a.md")
    with pytest.raises(ValueError, match="holds no text below its headers"):
        read_document(tmp_path / "b.md")
