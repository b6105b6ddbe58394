"""A memory graph on disk: one directory with `memory.sqlite`; indexes are rebuilt from it."""

import json
import sqlite3
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from cuewalk.memory.encoder import Encoder
from cuewalk.memory.graph import MemoryGraph
from cuewalk.memory.records import Conversation, Entry, Message, Segment

FILE = "memory.sqlite"
APPLICATION = 0x43554557
"""Written in the SQLite header ("CUEW"), so that a foreign database is told from ours."""
SCHEMA = 1


class StoreError(ValueError):
    """Raised when a directory holds no memory of ours, or a damaged one. Nothing in it was changed."""


def save_graph(graph: MemoryGraph, directory: str | Path) -> None:
    """Write a graph into a directory, in one transaction.

    Raises:
        StoreError: If the directory holds other files, or the memory of another conversation.
    """
    directory = Path(directory)
    path = directory / FILE
    if path.exists():
        with _open(path) as existing:
            owner = _meta(existing, path)["conversation"]
        if owner != graph.conversation.id:
            raise StoreError(
                f"{directory} holds the memory of {owner!r}; nothing was written. Choose another directory for "
                f"{graph.conversation.id!r}"
            )
    elif directory.exists() and any(directory.iterdir()):
        raise StoreError(f"{directory} is not empty and holds no {FILE}; nothing was written. Choose a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("BEGIN IMMEDIATE")
        for table, columns in _TABLES.items():
            database.execute(f"DROP TABLE IF EXISTS {table}")
            database.execute(f"CREATE TABLE {table} ({columns})")
        meta = {
            "conversation": graph.conversation.id,
            "encoder": graph.encoder.name,
            "dimension": str(graph.vectors.shape[1]),
            "digest": graph.digest,
            "weights": json.dumps(graph.weights),
            "nearest": str(graph.nearest),
        }
        database.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        database.executemany(
            "INSERT INTO messages VALUES (?, ?, ?, ?, ?)",
            [(i, m.id, m.speaker, m.time.isoformat(), m.text) for i, m in enumerate(graph.conversation.messages)],
        )
        database.executemany(
            "INSERT INTO segments VALUES (?, ?, ?)",
            [(s.position, s.id, json.dumps(s.messages)) for s in graph.segments],
        )
        database.executemany(
            "INSERT INTO entries VALUES (?, ?, ?, ?)",
            [
                (
                    i,
                    entry.id,
                    json.dumps(asdict(entry), default=datetime.isoformat),
                    graph.vectors[i].tobytes(),
                )
                for i, entry in enumerate(graph.entries.values())
            ],
        )
        database.executemany(
            "INSERT INTO anchors VALUES (?, ?, ?)",
            [(i, anchor, graph.anchor_vectors[i].tobytes()) for i, anchor in enumerate(graph.anchors)],
        )
        database.execute(f"PRAGMA application_id = {APPLICATION}")
        database.execute(f"PRAGMA user_version = {SCHEMA}")
        database.execute("COMMIT")
    finally:
        database.close()


_TABLES = {
    "meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "messages": "position INTEGER PRIMARY KEY, id TEXT NOT NULL, speaker TEXT NOT NULL, time TEXT NOT NULL, text TEXT",
    "segments": "position INTEGER PRIMARY KEY, id TEXT NOT NULL, messages TEXT NOT NULL",
    "entries": "position INTEGER PRIMARY KEY, id TEXT NOT NULL, record TEXT NOT NULL, vector BLOB NOT NULL",
    "anchors": "position INTEGER PRIMARY KEY, text TEXT NOT NULL, vector BLOB NOT NULL",
}


def load_graph(directory: str | Path, encoder: Encoder) -> MemoryGraph:
    """Read a graph back.

    Raises:
        StoreError: If the directory holds no memory, a foreign or a damaged file, a memory of another schema,
            or one built with another encoder.
    """
    path = Path(directory) / FILE
    if not path.is_file():
        raise StoreError(f"no memory in {directory}: {FILE} is missing. Build one with `cuewalk build`")
    with _open(path) as database:
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
            messages = tuple(
                Message(id_, speaker, datetime.fromisoformat(time), text)
                for id_, speaker, time, text in database.execute(
                    "SELECT id, speaker, time, text FROM messages ORDER BY position"
                )
            )
            segments = [
                Segment(id_, position, tuple(json.loads(ids)))
                for position, id_, ids in database.execute("SELECT * FROM segments ORDER BY position")
            ]
            rows = database.execute("SELECT record, vector FROM entries ORDER BY position").fetchall()
            anchors = database.execute("SELECT vector FROM anchors ORDER BY position").fetchall()
            return MemoryGraph(
                Conversation(meta["conversation"], messages),
                segments,
                [_entry(json.loads(record)) for record, _ in rows],
                _matrix([vector for _, vector in rows], int(meta["dimension"])),
                _matrix([vector for (vector,) in anchors], int(meta["dimension"])),
                encoder,
                weights=tuple(json.loads(meta["weights"])),
                nearest=int(meta["nearest"]),
                digest=meta["digest"],
            )
        except StoreError:
            raise
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
            raise StoreError(_damaged(path, str(error))) from error


class _open:
    """Open a database for reading, telling a foreign or damaged file from ours."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> sqlite3.Connection:
        self._database = sqlite3.connect(self._path)
        try:
            application = self._database.execute("PRAGMA application_id").fetchone()[0]
            schema = self._database.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise StoreError(_damaged(self._path, str(error))) from error
        if application != APPLICATION or schema != SCHEMA:
            self._database.close()
            what = "a database of another program" if application != APPLICATION else f"schema {schema}"
            raise StoreError(f"{self._path} is {what}, not a memory of schema {SCHEMA}; nothing was changed")
        return self._database

    def __exit__(self, *_: object) -> None:
        self._database.close()


def _meta(database: sqlite3.Connection, path: Path) -> dict[str, str]:
    try:
        meta: dict[str, str] = dict(database.execute("SELECT key, value FROM meta"))
        return {key: meta[key] for key in ("conversation", "encoder", "dimension", "digest", "weights", "nearest")}
    except (sqlite3.DatabaseError, KeyError) as error:
        raise StoreError(_damaged(path, str(error))) from error


def _damaged(path: Path, reason: str) -> str:
    return f"{path} is damaged ({reason}); nothing was changed. Restore it, or build it again with `cuewalk build`"


def _entry(record: dict[str, Any]) -> Entry:
    lists = {key: tuple(record[key]) for key in ("sources", "segments", "anchors")}
    return Entry(**{**record, **lists, "time": datetime.fromisoformat(record["time"])})


def _matrix(blobs: list[bytes], dimension: int) -> Any:
    flat = np.frombuffer(b"".join(blobs), dtype=np.float32)
    return flat.reshape(len(blobs), dimension).copy()
