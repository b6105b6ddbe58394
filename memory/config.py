"""How a memory is built: one frozen dataclass, a section `memory:` of the configuration file."""

from dataclasses import dataclass, field
from typing import Literal

from cuewalk.memory.groups import GroupConfig


@dataclass(frozen=True)
class ModelConfig:
    """Construction with a model, on an OpenAI-compatible endpoint; the key is read from OPENAI_API_KEY.

    Attributes:
        base_url: Of the endpoint, such as `http://localhost:8000/v1`.
        model: Name under which it serves the model.
        concurrency: Requests in flight at most.
        attempts: How often a reply that fails validation is asked for before the offline extractor takes over.
        timeout: Seconds a request may take.
        max_tokens: Of a reply.
        episodic: A segment's episodic memory: `raw` messages, or an `extracted` summary beside them.
        values: `offsets` lets a fact's value be its messages word for word, so that no text is written again;
            `written` asks for self-contained sentences (absolute dates, pronouns resolved).
    """

    base_url: str = "http://localhost:8000/v1"
    model: str = ""
    concurrency: int = 8
    attempts: int = 3
    timeout: float = 120.0
    max_tokens: int = 2048
    episodic: Literal["raw", "extracted"] = "raw"
    values: Literal["offsets", "written"] = "written"

    def __post_init__(self) -> None:
        for name in ("concurrency", "attempts", "timeout", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory.llm.{name} = {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class BuildConfig:
    """How a memory is built.

    Attributes:
        extractor: `offline` needs nothing but the encoder; `llm` asks the endpoint of `llm`.
        notes: Use the notes that came with the data as abstractions. Users have none: report both ways.
        unit: What an entry is made of offline: a `message`, or a whole `segment` (a chunk, as plain RAG has it).
        segment_messages: A segment ends after so many messages,
        gap_minutes: or where the next message comes later than this.
        abstraction_words: Without a note, an abstraction is the first words, this many; 0 takes all of them (the
            ablation "no abstraction").
        update_threshold: γ (Memora eq. 3): an abstraction at least this similar may update its entry. 1.01 turns
            updating off (Memora's ablation).
        update_candidates: k (Memora eq. 2): how many nearest entries are considered.
        anchors_per_entry: At most so many cue anchors an entry.
        anchor_similarity: Anchors at least this alike are linked (Memora's relaxed frontier).
        nearest: `similar` links an entry.
        search_weights: Of abstractions, anchors and BM25 in the rank fusion.
        index: A FAISS factory string for the abstractions; `Flat` is exact, and right up to 100,000 entries.
        groups: xMemory's groups; null leaves them out.
        llm: For the extractor `llm`.
    """

    extractor: Literal["offline", "llm"] = "offline"
    notes: bool = True
    unit: Literal["message", "segment"] = "message"
    segment_messages: int = 6
    gap_minutes: int = 30
    abstraction_words: int = 24
    update_threshold: float = 0.85
    update_candidates: int = 5
    anchors_per_entry: int = 3
    anchor_similarity: float = 0.85
    nearest: int = 5
    search_weights: tuple[float, float, float] = (1.0, 0.0, 1.0)
    index: str = "Flat"
    groups: GroupConfig | None = field(default_factory=GroupConfig)
    llm: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        for name in ("segment_messages", "gap_minutes", "update_candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory.{name} = {getattr(self, name)}: must be at least 1")
        if self.abstraction_words < 0:
            raise ValueError(f"memory.abstraction_words = {self.abstraction_words}: at least 1, or 0 for all words")
        if len(self.search_weights) != 3 or min(self.search_weights) < 0 or not self.search_weights[0]:
            raise ValueError(f"memory.search_weights = {self.search_weights}: three numbers >= 0, the first > 0")
        if self.extractor == "llm" and not self.llm.model:
            raise ValueError(
                "memory.extractor = llm needs memory.llm.model, the name under which the endpoint serves it"
            )
