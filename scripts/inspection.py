"""Looking into a memory: counts, samples, and a picture of the graph around a query."""

from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import networkx as nx
import numpy as np

from cuewalk.memory.graph import LINK_KINDS, MemoryGraph
from cuewalk.memory.groups import objective

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def describe(graph: MemoryGraph) -> dict[str, Any]:
    """Return what a memory holds: counts, coverage, means an entry, sizes and objective of its groups."""
    entries = list(graph.entries.values())
    carried = Counter(anchor for entry in entries for anchor in entry.anchors)
    sizes = sorted((len(members) for members in graph.groups.values()), reverse=True)
    told = {source for entry in entries for source in entry.sources}
    return {
        "messages": len(graph.messages),
        "segments": len(graph.segments),
        "messages_per_segment": len(graph.messages) / len(graph.segments),
        "segments_with_summary": sum(bool(segment.summary) for segment in graph.segments),
        "entries": len(entries),
        "coverage": len(told & graph.messages.keys()) / len(graph.messages),
        "sources_per_entry": float(np.mean([len(entry.sources) for entry in entries])),
        "sources_per_entry_max": max(len(entry.sources) for entry in entries),
        "superseded_statements": sum(s.until is not None for entry in entries for s in entry.statements),
        "anchors": len(graph.anchors),
        "anchors_per_entry": float(np.mean([len(entry.anchors) for entry in entries])),
        "entries_per_anchor": float(np.mean(list(carried.values()))) if carried else 0.0,
        "groups": len(sizes),
        "group_size_mean": float(np.mean(sizes)) if sizes else 0.0,
        "group_size_max": sizes[0] if sizes else 0,
        "singletons": sizes.count(1),
        "group_sizes": dict(sorted(Counter(sizes).items())),
        "objective": objective(graph.centroids, [len(members) for members in graph.groups.values()]),
    }


def report(graph: MemoryGraph, samples: int = 3) -> str:
    """Return `describe` as lines for people, with a few entries."""
    lines = [f"memory of {graph.conversation.id}, encoder {graph.encoder.name}"]
    for name, value in describe(graph).items():
        if isinstance(value, dict):
            value = ", ".join(f"{count} of {size}" for size, count in value.items()) or "none"
        shown = f"{value:.3f}" if isinstance(value, float) else value
        lines.append(f"  {name.replace('_', ' '):24}{shown}")
    step = max(1, len(graph.entries) // max(1, samples))
    for entry in list(graph.entries.values())[::step][:samples]:
        kinds = Counter(graph.links(entry.id).values())
        links = ", ".join(f"{kinds[kind]} {kind}" for kind in LINK_KINDS if kinds[kind]) or "none"
        lines += ["", f"  {entry.id}  {entry.abstraction}", *(f"      {line}" for line in entry.value.splitlines())]
        lines += [f"      anchors: {', '.join(entry.anchors) or 'none'}", f"      links: {links}"]
    return "\n".join(lines)


def draw(graph: MemoryGraph, query: str, path: str | Path, k: int = 5, cap: int = 20) -> Path:
    """Draw what a query finds: its first k entries, and at most `cap` that they link to, nearest to the query first.

    Colours are kinds of link; the path's ending names the format (`.png`, `.svg`).
    """
    hits = [hit.entry for hit in graph.search(query, k)]
    found = graph.frontier(query, hits, hits, [kind for kind in LINK_KINDS if kind != "search"], cap)
    picture = nx.Graph()
    picture.add_edges_from(("?", hit, {"kind": "search"}) for hit in hits)
    for link in found:
        for hit in hits:
            if (kind := graph.links(hit).get(link.entry)) is not None:
                picture.add_edge(hit, link.entry, kind=kind)
    places = nx.kamada_kawai_layout(picture)
    figure, axes = plt.subplots(figsize=(12, 8))
    for number, kind in enumerate(LINK_KINDS):
        edges = [(a, b) for a, b, data in picture.edges(data=True) if data["kind"] == kind]
        if edges:
            drawn = nx.draw_networkx_edges(picture, places, edges, edge_color=f"C{number}", ax=axes, width=1.5)
            drawn.set_label("first search" if kind == "search" else kind)
    others = [link.entry for link in found]
    for nodes, color in ((["?"], "black"), (hits, "0.3"), (others, "0.75")):
        nx.draw_networkx_nodes(picture, places, nodes, node_size=60, node_color=color, ax=axes)
    for node, (x, y) in places.items():
        text = query if node == "?" else graph.entries[node].abstraction
        shown = " ".join(text.split()[:7]).replace("$", r"\$")  # a lone $ would start a formula
        axes.annotate(shown, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.legend(fontsize=8, loc="lower left")
    axes.set_title(f"{graph.conversation.id}: {len(hits)} entries found, {len(others)} linked to them", fontsize=10)
    axes.axis("off")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return Path(path)
