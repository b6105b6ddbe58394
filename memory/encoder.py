"""Text to unit vectors."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from sentence_transformers import SentenceTransformer

from cuewalk.memory.models import ModelError, resolve_model

FloatArray = npt.NDArray[np.float32]


class Encoder(Protocol):
    """What the graph needs of an encoder."""

    name: str

    def encode(self, texts: Sequence[str], *, progress: bool = False) -> FloatArray:
        """Return unit vectors of shape (len(texts), dimension)."""
        ...


class SentenceEncoder:
    """A sentence-transformers model; texts it saw one at a time (queries) are remembered.

    Args:
        name: `minilm`, a local path or a hub id.
        batch_size: Texts a forward pass.

    Raises:
        ModelError: If the model can't be found or loaded.
    """

    def __init__(self, name: str = "minilm", batch_size: int = 64) -> None:
        self.name = name
        self.batch_size = batch_size
        try:
            self._model = SentenceTransformer(resolve_model(name))
        except OSError as error:
            raise ModelError(f"cannot load an encoder from {name!r}: {error}") from error
        self._remember()

    def encode(self, texts: Sequence[str], *, progress: bool = False) -> FloatArray:
        """Return unit vectors of shape (len(texts), dimension)."""
        return self._one(texts[0]) if len(texts) == 1 else self._batch(texts, progress)

    def _remember(self) -> None:
        self._one = lru_cache(maxsize=4096)(lambda text: self._batch([text], progress=False))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_one"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remember()

    def _batch(self, texts: Sequence[str], progress: bool) -> FloatArray:
        vectors = self._model.encode(
            list(texts), batch_size=self.batch_size, normalize_embeddings=True, show_progress_bar=progress
        )
        return np.asarray(vectors, dtype=np.float32).reshape(len(texts), -1)
