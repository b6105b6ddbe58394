"""A memory graph on disk: one directory with `memory.sqlite`; indexes are rebuilt from it."""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from cuewalk.memory.config import BuildConfig
from cuewalk.memory.encoder import Encoder
from cuewalk.memory.graph import MemoryGraph
from cuewalk.memory.records import Conversation, Entry, Message, Note, Segment

FILE = "memory.sqlite"
APPLICATION = 0x43554557
"""Written in the SQLite header ("CUEW"), so that a foreign database is told from ours."""
SCHEMA = 2

_TABLES = {
    "meta": ("key TEXT PRIMARY KEY", "value TEXT NOT NULL"),
    "messages": ("position INTEGER PRIMARY KEY", "record TEXT NOT NULL"),
    "segments": ("position INTEGER PRIMARY KEY", "record TEXT NOT NULL"),
    "entries": ("position INTEGER PRIMARY KEY", "record TEXT NOT NULL", "vector BLOB NOT NULL"),
    "groups": ("position INTEGER PRIMARY KEY", "id TEXT NOT NULL", "members TEXT NOT NULL"),
}


class StoreError(ValueError):
    """Raised when a directory holds no memory of ours, or a damaged one. Nothing in it was changed."""


def save_graph(graph: MemoryGraph, directory: str | Path) -> None:
    """Write a graph into a directory, in one transaction; of a memory that grew, only what changed is written.

    Readers see the state before or after, never between; a process that dies on the way leaves the state before.

    Raises:
        StoreError: If the directory holds other files, or the memory of another conversation, or can't be written.
    """
    directory = Path(directory)
    path = directory / FILE
    if path.exists() and not _blank(path):
        with _opened(path) as existing:
            owner = _meta(existing, path)["conversation"]
        if owner != graph.conversation.id:
            raise StoreError(
                f"{directory} holds the memory of {owner!r}; nothing was written. Choose another directory for "
                f"{graph.conversation.id!r}"
            )
    elif not path.exists() and directory.exists() and any(directory.iterdir()):
        raise StoreError(f"{directory} is not empty and holds no {FILE}; nothing was written. Choose a new directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("BEGIN IMMEDIATE")
            _write(database, graph)  # an error on the way closes the connection, and so rolls back
            database.execute("COMMIT")
    except (sqlite3.OperationalError, OSError) as error:
        raise StoreError(f"cannot write the memory to {directory} ({error}); what it held before is whole") from error


def _write(database: sqlite3.Connection, graph: MemoryGraph) -> None:
    conversation = graph.conversation
    meta = {
        "conversation": conversation.id,
        "encoder": graph.encoder.name,
        "dimension": str(graph.vectors.shape[1]),
        "digest": graph.digest,
        "config": _json(asdict(graph.config)),
        "notes": _json([asdict(note) for note in conversation.notes]),
        "breaks": _json(sorted(conversation.breaks)),
    }
    rows: dict[str, list[tuple[Any, ...]]] = {
        "meta": list(meta.items()),
        "messages": [(i, _json(asdict(m))) for i, m in enumerate(conversation.messages)],
        "segments": [(i, _json(asdict(s))) for i, s in enumerate(graph.segments)],
        "entries": [(i, _json(asdict(e)), graph.vectors[i].tobytes()) for i, e in enumerate(graph.entries.values())],
        "groups": [(i, group, _json(members)) for i, (group, members) in enumerate(graph.groups.items())],
    }
    for table, columns in _TABLES.items():
        database.execute(f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(columns)})")
        key, *names = (column.split()[0] for column in columns)
        changed = " OR ".join(f"{name} IS NOT excluded.{name}" for name in names)
        database.executemany(
            f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))}) ON CONFLICT ({key}) DO UPDATE SET "
            f"{', '.join(f'{name} = excluded.{name}' for name in names)} WHERE {changed}",
            rows[table],
        )
        if table != "meta":
            database.execute(f"DELETE FROM {table} WHERE position >= ?", (len(rows[table]),))
    database.execute(f"PRAGMA application_id = {APPLICATION}")
    database.execute(f"PRAGMA user_version = {SCHEMA}")


def load_graph(directory: str | Path, encoder: Encoder) -> MemoryGraph:
    """Read a graph back.

    Raises:
        StoreError: If the directory holds no memory, a foreign or a damaged file, a memory of another schema,
            or one built with another encoder.
    """
    path = Path(directory) / FILE
    if not path.is_file() or _blank(path):
        raise StoreError(f"no memory in {directory}: {FILE} is missing. Build one with `cuewalk build`")
    with _opened(path) as database:
        database.execute("BEGIN")  # one state, whatever a writer does meanwhile
        meta = _meta(database, path)
        if meta["encoder"] != encoder.name:
            raise StoreError(
                f"{path} was built with the encoder {meta['encoder']!r}, not {encoder.name!r}; use that one, or "
                f"build it again with `cuewalk build`"
            )
        try:
            damage = database.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if damage != "ok":
                raise StoreError(_damaged(path, damage))
            tables = {
                table: database.execute(f"SELECT * FROM {table} ORDER BY position").fetchall()
                for table in _TABLES
                if table != "meta"
            }
            if any([row[0] for row in rows] != list(range(len(rows))) for rows in tables.values()):
                raise StoreError(_damaged(path, "rows are missing"))
            dimension = int(meta["dimension"])
            return MemoryGraph(
                Conversation(
                    meta["conversation"],
                    tuple(_read(Message, record) for _, record in tables["messages"]),
                    _read(tuple[Note, ...], meta["notes"]),
                    frozenset(json.loads(meta["breaks"])),
                ),
                [_read(Segment, record) for _, record in tables["segments"]],
                [_read(Entry, record) for _, record, _ in tables["entries"]],
                _matrix([vector for *_, vector in tables["entries"]], dimension),
                encoder,
                _read(BuildConfig, meta["config"]),
                {group: json.loads(members) for _, group, members in tables["groups"]},
                meta["digest"],
                Path(directory),
            )
        except StoreError:
            raise
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
            raise StoreError(_damaged(path, str(error))) from error


def _blank(path: Path) -> bool:
    """Tell whether a database holds nothing at all: its first writer died before it committed."""
    try:
        with closing(sqlite3.connect(path, timeout=30)) as database:
            return not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    except sqlite3.DatabaseError:
        return False  # damaged or no database: told apart where it is opened


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database for reading, telling a foreign or damaged file from ours."""
    database = sqlite3.connect(path, isolation_level=None, timeout=30)
    try:
        try:
            application = database.execute("PRAGMA application_id").fetchone()[0]
            schema = database.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise StoreError(_damaged(path, str(error))) from error
        if application != APPLICATION:
            raise StoreError(f"{path} is a database of another program, not a memory; nothing was changed")
        if schema != SCHEMA:
            raise StoreError(
                f"{path} is a memory of schema {schema}, this version of cuewalk has {SCHEMA}; nothing was changed. "
                f"Build it again with `cuewalk build`"
            )
        yield database
    finally:
        database.close()


def _meta(database: sqlite3.Connection, path: Path) -> dict[str, str]:
    try:
        meta: dict[str, str] = dict(database.execute("SELECT key, value FROM meta"))
        keys = ("conversation", "encoder", "dimension", "digest", "config", "notes", "breaks")
        return {key: meta[key] for key in keys}
    except (sqlite3.DatabaseError, KeyError) as error:
        raise StoreError(_damaged(path, str(error))) from error


def _damaged(path: Path, reason: str) -> str:
    return f"{path} is damaged ({reason}); nothing was changed. Restore it, or build it again with `cuewalk build`"


def _json(value: Any) -> str:
    return json.dumps(value, default=datetime.isoformat)


def _read(record: Any, text: str) -> Any:
    return _adapter(record).validate_json(text)


@cache
def _adapter(record: Any) -> TypeAdapter[Any]:
    return TypeAdapter(record)


def _matrix(blobs: Sequence[bytes], dimension: int) -> Any:
    flat = np.frombuffer(b"".join(blobs), dtype=np.float32)
    return flat.reshape(len(blobs), dimension).copy()
