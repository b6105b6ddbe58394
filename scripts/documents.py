"""Documents as conversations: a Markdown or plain text file, segmented by its headers."""

from datetime import datetime
from pathlib import Path

from markdown_it import MarkdownIt

from cuewalk.memory.records import Conversation, Message


def read_document(path: str | Path, time: datetime | None = None) -> Conversation:
    """Read a file: each block under a header is a message, each header opens a segment.

    The speaker of a block is its headers, joined (`Install > From source`), or the file's name above the first one. Any
    text file is read so; one without headers is cut like a conversation. `time` is when what it says was said, the
    file's modification time where None. A ValueError if it is no UTF-8 text, or holds none.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}); convert it first") from error
    time = time or datetime.fromtimestamp(path.stat().st_mtime)
    lines = text.splitlines()
    messages: list[Message] = []
    breaks: set[str] = set()
    headers: dict[int, str] = {}
    opened = False
    tokens = MarkdownIt().parse(text)
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            level = int(token.tag[1])
            headers = {k: v for k, v in headers.items() if k < level} | {level: following.content}
            opened = True
        elif token.map and token.level == 0 and token.nesting >= 0 and token.type != "inline":
            block = "\n".join(lines[slice(*token.map)]).strip()
            id_ = f"b{len(messages)}"
            messages.append(Message(id_, " > ".join(headers.values()) or path.stem, time, block))
            if opened:
                breaks.add(id_)
                opened = False
    if not messages:
        raise ValueError(f"{path} holds no text below its headers; nothing to remember")
    return Conversation(path.stem, tuple(messages), breaks=frozenset(breaks))
