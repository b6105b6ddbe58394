"""A memory graph on disk: one directory with `memory.sqlite`; indexes are rebuilt from it."""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from cuewalk.memory.config import BuildConfig
from cuewalk.memory.encoder import Encoder, SentenceEncoder
from cuewalk.memory.graph import MemoryGraph
from cuewalk.memory.records import Conversation, Entry, Message, Note, Segment

FILE = "memory.sqlite"
APPLICATION = 0x43554557
"""Written in the SQLite header ("CUEW"), so that a foreign database is told from ours."""
SCHEMA = 2

Record = TypeVar("Record")

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

    Readers see the state before or after, never between; a process that dies on the way leaves the state before. A
    StoreError if the directory holds other files, or the memory of another conversation, or can't be written.
    """
    directory, graph = Path(directory), graph.snapshot()
    path = directory / FILE
    if path.exists() and not _blank(path):
        with _opened(path):
            pass  # foreign and damaged files are refused
    elif not path.exists() and directory.exists() and any(directory.iterdir()):
        raise StoreError(f"{directory} is not empty and holds no {FILE}; nothing was written. Choose a new directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("BEGIN IMMEDIATE")
            # An error from here on closes the connection, and so rolls back.
            database.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
            (owner,) = database.execute("SELECT max(value) FROM meta WHERE key = 'conversation'").fetchone()
            if owner not in (None, graph.conversation.id):
                raise StoreError(
                    f"{directory} holds the memory of {owner!r}; nothing was written. Choose another directory for "
                    f"{graph.conversation.id!r}"
                )
            _write(database, graph)
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
        "config": _json(graph.config),
        "notes": _json(conversation.notes),
        "breaks": _json(sorted(conversation.breaks)),
    }
    rows: dict[str, list[tuple[Any, ...]]] = {
        "meta": list(meta.items()),
        "messages": [(i, _json(m)) for i, m in enumerate(conversation.messages)],
        "segments": [(i, _json(s)) for i, s in enumerate(graph.segments)],
        "entries": [(i, _json(e), graph.vectors[i].tobytes()) for i, e in enumerate(graph.entries.values())],
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


def load_graph(directory: str | Path, encoder: Encoder | None = None) -> MemoryGraph:
    """Read a graph back; without an encoder, the one that it was built with is loaded.

    A StoreError if the directory holds no memory, a foreign or damaged file, or one of another schema or encoder.
    """
    path = Path(directory) / FILE
    if not path.is_file() or _blank(path):
        raise StoreError(f"no memory in {directory}: {FILE} is missing. Build one with `cuewalk build`")
    with _opened(path) as (database, meta):
        encoder = encoder or SentenceEncoder(meta["encoder"])
        if meta["encoder"] != encoder.name:
            raise StoreError(
                f"{path} was built with the encoder {meta['encoder']!r}, not {encoder.name!r}; use that one, or "
                f"build it again with `cuewalk build`"
            )
        if (damage := database.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise ValueError(damage)
        names = [table for table in _TABLES if table != "meta"]
        tables = {name: database.execute(f"SELECT * FROM {name} ORDER BY position").fetchall() for name in names}
        if any([row[0] for row in rows] != list(range(len(rows))) for rows in tables.values()):
            raise ValueError("rows are missing")
        messages = tuple(_records(Message, tables["messages"]))
        notes = TypeAdapter(tuple[Note, ...]).validate_json(meta["notes"])
        vectors = np.frombuffer(b"".join(row[2] for row in tables["entries"]), dtype=np.float32)
        return MemoryGraph(
            Conversation(meta["conversation"], messages, notes, frozenset(json.loads(meta["breaks"]))),
            _records(Segment, tables["segments"]),
            _records(Entry, tables["entries"]),
            vectors.reshape(len(tables["entries"]), int(meta["dimension"])).copy(),
            encoder,
            TypeAdapter(BuildConfig).validate_json(meta["config"]),
            {group: json.loads(members) for _, group, members in tables["groups"]},
            meta["digest"],
            Path(directory),
        )


def _blank(path: Path) -> bool:
    """Tell whether a database holds nothing at all: its first writer died before it committed."""
    try:
        with closing(sqlite3.connect(path, timeout=30)) as database:
            return not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    except sqlite3.DatabaseError:
        return False  # damaged or no database: told apart where it is opened


@contextmanager
def _opened(path: Path) -> Iterator[tuple[sqlite3.Connection, dict[str, str]]]:
    """Open a database for reading, with what its table `meta` says; what is foreign or damaged is a StoreError."""
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as database:
            application = database.execute("PRAGMA application_id").fetchone()[0]
            schema = database.execute("PRAGMA user_version").fetchone()[0]
            if application != APPLICATION:
                raise StoreError(f"{path} is a database of another program, not a memory; nothing was changed")
            if schema != SCHEMA:
                raise StoreError(
                    f"{path} is a memory of schema {schema}, this version of cuewalk has {SCHEMA}; nothing was "
                    f"changed. Build it again with `cuewalk build`"
                )
            database.execute("BEGIN")  # one state, whatever a writer does meanwhile
            yield database, dict(database.execute("SELECT key, value FROM meta"))
    except StoreError:
        raise
    except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
        if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN):
            raise StoreError(f"cannot read {path} ({error}): is another program writing, may you read it?") from error
        raise StoreError(
            f"{path} is damaged ({error}); nothing was changed. Restore it, or build it again with `cuewalk build`"
        ) from error


def _json(value: Any) -> str:
    return json.dumps(value, default=lambda part: part.isoformat() if isinstance(part, datetime) else asdict(part))


def _records(kind: type[Record], rows: Iterable[tuple[Any, ...]]) -> list[Record]:
    adapter = TypeAdapter(kind)
    return [adapter.validate_json(row[1]) for row in rows]
