"""Cuewalk in LangChain, with the real langchain-core; `make test-extras` installs it."""

import asyncio

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed here: `make test-extras` installs it")

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda

from cuewalk.rl import Retriever
from cuewalk.scripts.langchain_retriever import CuewalkRetriever

ASKED = "When did the dog come back?"
pytestmark = pytest.mark.extras


@pytest.fixture
def retriever(graph):
    return CuewalkRetriever(retriever=Retriever.without_policy(), graph=graph, budget=0)


def test_a_document_is_an_entry_with_its_date_and_sources(retriever, graph):
    documents = retriever.invoke(ASKED)
    assert [document.id for document in documents] == [hit.entry for hit in graph.search(ASKED, 5)]
    first = next(document for document in documents if document.id == "e0")
    assert first.page_content == "Ann (1 May 2024): The dog ran away"
    assert first.metadata == {
        "date": "2024-05-01T12:00:00", "speaker": "Ann", "sources": ["m1"], "ending": "search",
        "fallback": "no policy was given",
    }  # fmt: skip


def test_it_runs_in_chains_batches_and_coroutines(retriever):
    expected = retriever.invoke(ASKED)
    chain = retriever | RunnableLambda(lambda documents: [document.id for document in documents])
    assert chain.invoke(ASKED) == [document.id for document in expected]
    assert retriever.batch([ASKED, ASKED]) == [expected, expected]
    assert asyncio.run(retriever.ainvoke(ASKED)) == expected


def test_what_is_added_meanwhile_is_found(conversation, encoder, graph):
    from cuewalk.memory import BuildConfig, build_graph
    from tests.conftest import at

    mine = build_graph(conversation, encoder, BuildConfig(segment_messages=2, update_threshold=1.01))
    retriever = CuewalkRetriever(retriever=Retriever.without_policy(), graph=mine)
    message = type(conversation.messages[0])("m7", "Ann", at(9), "The trip to the piano maker")
    mine.add([message])
    assert "m7" in [source for document in retriever.invoke("piano maker") for source in document.metadata["sources"]]


def test_a_walk_that_can_not_be_finished_is_told_to_the_callbacks(graph):
    class Heard(BaseCallbackHandler):
        def __init__(self):
            self.errors = []

        def on_retriever_error(self, error, **_):
            self.errors.append(type(error).__name__)

    ours = Retriever.without_policy()
    ours.fallback = None
    heard = Heard()
    with pytest.raises(RuntimeError, match="no policy was given"):
        CuewalkRetriever(retriever=ours, graph=graph).invoke(ASKED, {"callbacks": [heard]})
    assert heard.errors == ["SamplerError"]
