"""Text to unit vectors."""

from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from sentence_transformers import SentenceTransformer

from cuewalk.memory.models import ModelError, resolve_model, well_formed

FloatArray = npt.NDArray[np.float32]
REMEMBERED = 20_000
"""Vectors kept for texts seen before: 30 MB of MiniLM's."""


class Encoder(Protocol):
    """What the graph needs of an encoder."""

    name: str

    def encode(self, texts: Sequence[str], *, progress: bool = False) -> FloatArray:
        """Return unit vectors of shape (len(texts), dimension)."""


class SentenceEncoder:
    """A sentence-transformers model (`minilm`, a local path or a hub id), so many texts a forward pass.

    Texts that come a few at a time (queries) are remembered. A ModelError if the model can't be found or loaded.
    """

    def __init__(self, name: str = "minilm", batch_size: int = 64) -> None:
        self.name = name
        self.batch_size = batch_size
        try:
            self._model = SentenceTransformer(resolve_model(name))
        except OSError as error:
            raise ModelError(f"cannot load an encoder from {name!r}: {error}") from error
        self._known: dict[str, FloatArray] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.batch_size)  # loaded again where it is unpickled

    def encode(self, texts: Sequence[str], *, progress: bool = False) -> FloatArray:
        """Return unit vectors of shape (len(texts), dimension)."""
        if len(texts) > self.batch_size:  # a memory that grows: whoever searches does not wait for it
            return self._batch(texts, progress)
        with self._lock:
            if new := [text for text in dict.fromkeys(texts) if text not in self._known]:
                if len(self._known) > REMEMBERED:
                    self._known.clear()
                    new = list(dict.fromkeys(texts))
                self._known |= dict(zip(new, self._batch(new, progress), strict=True))
            return np.stack([self._known[text] for text in texts])

    def _batch(self, texts: Sequence[str], progress: bool) -> FloatArray:
        vectors = self._model.encode(
            [well_formed(text) for text in texts],
            batch_size=self.batch_size, normalize_embeddings=True, show_progress_bar=progress,
        )  # fmt: skip
        return np.asarray(vectors, dtype=np.float32).reshape(len(texts), -1)
