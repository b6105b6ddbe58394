"""Build, keep, search and save the memory graph. Imports no other folder of this project."""

if __name__ != "cuewalk.memory":  # a second copy of the classes would break isinstance
    raise ImportError("import cuewalk.memory, not memory (run `make install` once)")

from cuewalk.memory.build import build_graph, extend_graph
from cuewalk.memory.config import BuildConfig
from cuewalk.memory.encoder import Encoder, SentenceEncoder
from cuewalk.memory.graph import LINK_KINDS, Filter, Link, MemoryGraph
from cuewalk.memory.records import Conversation, Entry, Message, Note, Segment, Statement
from cuewalk.memory.store import StoreError, load_graph, save_graph

__all__ = [
    "LINK_KINDS", "BuildConfig", "Conversation", "Encoder", "Entry", "Filter", "Link", "MemoryGraph", "Message", "Note",
    "Segment", "SentenceEncoder", "Statement", "StoreError", "build_graph", "extend_graph", "load_graph", "save_graph",
]  # fmt: skip
