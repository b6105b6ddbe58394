"""How a memory is built: one frozen dataclass, a section `memory:` of the configuration file."""

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from cuewalk.memory.groups import GroupConfig


@dataclass(frozen=True)
class ModelConfig:
    """Construction with a model, on an OpenAI-compatible endpoint; the key is read from OPENAI_API_KEY."""

    base_url: str = "http://localhost:8000/v1"  #: Of the endpoint, such as `http://localhost:8000/v1`.
    model: str = ""  #: Name under which it serves the model.
    concurrency: PositiveInt = 8  #: Requests in flight at most.
    attempts: PositiveInt = 3  #: How often a valid reply is asked for before the offline extractor takes over.
    timeout: PositiveFloat = 120.0  #: Seconds a request may take.
    max_tokens: PositiveInt = 2048  #: Of a reply.
    #: A segment's episodic memory: `raw` messages, or an `extracted` summary beside them.
    episodic: Literal["raw", "extracted"] = "raw"
    #: `offsets` lets a fact's value be its messages word for word, so that no text is written again; `written` asks for
    #: self-contained sentences (absolute dates, pronouns resolved).
    values: Literal["offsets", "written"] = "written"


@dataclass(frozen=True)
class BuildConfig:
    """How a memory is built."""

    #: `offline` needs nothing but the encoder; `llm` asks the endpoint of `llm`.
    extractor: Literal["offline", "llm"] = "offline"
    notes: bool = True  #: Use the notes that came with the data as abstractions. Users have none: report both ways.
    #: What an entry is made of offline: a `message`, or a whole `segment` (a chunk, as plain RAG has it).
    unit: Literal["message", "segment"] = "message"
    segment_messages: PositiveInt = 6  #: A segment ends after so many messages,
    gap_minutes: PositiveInt = 30  #: or where the next message comes later than this.
    #: Without a note, an abstraction is the first words, this many; 0 takes all of them (the ablation "no
    #: abstraction").
    abstraction_words: NonNegativeInt = 24
    #: γ (Memora eq. 3): an abstraction at least this similar may update its entry. 1.01 turns updating off (Memora's
    #: ablation).
    update_threshold: float = 0.85
    update_candidates: PositiveInt = 5  #: k (Memora eq. 2): how many nearest entries are considered.
    anchors_per_entry: NonNegativeInt = 3  #: At most so many cue anchors an entry.
    anchor_similarity: float = 0.85  #: Anchors at least this alike are linked (Memora's relaxed frontier).
    nearest: NonNegativeInt = 5  #: `similar` links an entry.
    #: Of abstractions, anchors and BM25 in the rank fusion.
    search_weights: tuple[float, float, float] = (1.0, 0.0, 1.0)
    #: A FAISS factory string for the abstractions; `Flat` is exact, and right up to 100,000 entries.
    index: str = "Flat"
    groups: GroupConfig | None = field(default_factory=GroupConfig)  #: xMemory's groups; null leaves them out.
    llm: ModelConfig = field(default_factory=ModelConfig)  #: For the extractor `llm`.

    def __post_init__(self) -> None:
        if min(self.search_weights) < 0 or not self.search_weights[0]:
            raise ValueError(f"memory.search_weights = {self.search_weights}: three numbers >= 0, the first > 0")
        if self.extractor == "llm" and not self.llm.model:
            raise ValueError("memory.extractor = llm needs memory.llm.model, its name at the endpoint")
