"""Cuewalk as a LangChain retriever; needs the extra `langchain`."""

from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import InstanceOf

from cuewalk.memory import MemoryGraph
from cuewalk.rl.export import Retriever


class CuewalkRetriever(BaseRetriever):  # type: ignore[misc]
    """A memory and a policy as a LangChain `BaseRetriever`: a document an entry, in order of entry.

    A document's metadata: `date`, `speaker`, `sources` (message ids), and of the walk `ending` and `fallback`.
    """

    retriever: InstanceOf[Retriever]
    graph: InstanceOf[MemoryGraph]
    budget: int | None = None  #: That of the training where None.

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        told = self.retriever.retrieve(self.graph, query, budget=self.budget).as_dict()
        why = {"ending": told["ending"], "fallback": told["fallback"]}
        return [Document(page_content=m.pop("text"), id=m.pop("id"), metadata=m | why) for m in told["memories"]]
