"""Construction with a model, against a server that speaks the real protocol and replies what the test wrote."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import BaseModel

from cuewalk.memory import BuildConfig, Conversation, Message, build_graph, extend_graph
from cuewalk.memory.config import ModelConfig
from cuewalk.memory.endpoint import Endpoint, EndpointError, ReplyError, data_line, fill
from cuewalk.memory.extract import LLMExtractor, is_anchor

START = datetime(2024, 5, 1, 12)
TEXTS = ("I got a dog", "Lovely", "We moved to Oslo", "The dog likes Oslo")
MESSAGES = tuple(
    Message(f"m{i}", "AnnBob"[3 * (i % 2) : 3 * (i % 2) + 3], START + timedelta(minutes=i), text)
    for i, text in enumerate(TEXTS)
)


@contextmanager
def serving(reply):
    """Serve chat completions on a loopback port; `reply(prompt, messages)` returns the text of each."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            text = reply(body["messages"][0]["content"], body["messages"])
            if isinstance(text, int):
                self.send_response(text)
                text = json.dumps({"error": {"message": "not today"}})
            else:
                self.send_response(200)
                usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
                message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
                text = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m",
                                   "choices": [message], "usage": usage})  # fmt: skip
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def fact(abstraction, value, *sources):
    return {"abstraction": abstraction, "value": value, "sources": list(sources)}


def good(prompt, messages):
    """What a good model would reply to each kind of prompt about MESSAGES."""
    if prompt.startswith("Cut"):
        return json.dumps({"starts": [0, 2]})
    if prompt.startswith("Write") and "got a dog" in prompt:
        return json.dumps({"summary": "Ann got a dog.", "facts": [fact("Ann dog", "Ann got a dog in May 2024.", 0)]})
    if prompt.startswith("Write"):
        facts = [fact("Ann trip", "Ann moved to Oslo.", 0), fact("Ann dog", "Ann's dog likes Oslo.", 1)]
        return json.dumps({"summary": "Ann moved.", "facts": facts})
    if prompt.startswith("List"):
        return json.dumps({"facts": [{"abstraction": "Ann dog", "sources": [0, 1]}]})
    if prompt.startswith("A memory keeps"):
        return json.dumps({"entry": 0, "value": "Ann has a dog that likes Oslo.", "abstraction": ""})
    lines = prompt.split("```")[1].strip().splitlines()
    return json.dumps({"anchors": [["Ann pets", "2024 dog", "one two three four five"]] * len(lines)})


def config_for(url, **llm):
    rules = ModelConfig(base_url=url, model="m", **llm)
    return BuildConfig(extractor="llm", update_threshold=0.9, nearest=1, segment_messages=2, llm=rules)


def build(url, encoder, tmp_path, messages=MESSAGES, **llm):
    config = config_for(url, **llm)
    endpoint = Endpoint(replace(config.llm, timeout=5), tmp_path / "replies")
    extractor = LLMExtractor(config, endpoint)
    graph = build_graph(Conversation("c", messages), encoder, config, extractor=extractor)
    return graph, extractor


def test_a_model_segments_extracts_merges_and_names_anchors(encoder, tmp_path):
    with serving(good) as (url, asked):
        graph, extractor = build(url, encoder, tmp_path, episodic="extracted")
    assert [(s.messages, s.summary) for s in graph.segments] == [
        (("m0", "m1"), "Ann got a dog."),
        (("m2", "m3"), "Ann moved."),
    ]
    entries = list(graph.entries.values())
    # "Lovely" was cited by no fact: it is kept as it is. The second "Ann dog" updated the first.
    assert [entry.abstraction for entry in entries] == ["Ann dog", "Bob: Lovely", "Ann trip"]
    assert entries[0].value.splitlines() == [
        "Bob (1 May 2024): Ann has a dog that likes Oslo.",
        "Ann (1 May 2024, until 1 May 2024): Ann got a dog in May 2024.",
    ]
    assert entries[0].sources == ("m0", "m3") and entries[0].segments == ("s0", "s1")
    assert entries[0].anchors == ("Ann pets",)  # with digits, or of five words: no anchors
    report = extractor.report()
    # One segmentation, two extractions, one decision (Lovely and Ann trip have nothing near), one of anchors.
    assert report["calls"] == len(asked) == 5 and report["rejected"] == 0
    assert (report["prompt_tokens"], report["completion_tokens"]) == (500, 50)
    assert all(body["temperature"] == 0 and body["response_format"]["type"] == "json_schema" for body in asked)


def test_by_offsets_no_text_is_written_again(encoder, tmp_path):
    with serving(good) as (url, asked):
        graph, _ = build(url, encoder, tmp_path, values="offsets")
    for body in asked:  # the endpoint is not even allowed to write any
        schema = json.dumps(body["response_format"]["json_schema"]["schema"])
        assert '"value"' not in schema and '"summary"' not in schema
    assert graph.entries["e0"].value == "Ann (1 May 2024): I got a dog\nBob (1 May 2024): Lovely\n" + (
        "Ann (1 May 2024): We moved to Oslo\nBob (1 May 2024): The dog likes Oslo"
    )  # the second segment's "Ann dog" joined the first's


def test_a_bad_reply_is_told_why_asked_again_and_then_given_up_for_the_offline_way(encoder, tmp_path):
    def bad(prompt, messages):
        if prompt.startswith("Cut"):
            return json.dumps({"starts": [0, 9]}) if len(messages) == 1 else json.dumps({"starts": [0, 2]})
        return "I am sorry, but" if prompt.startswith("Write") else good(prompt, messages)

    with serving(bad) as (url, asked):
        graph, extractor = build(url, encoder, tmp_path, attempts=2)
    retry = [body["messages"] for body in asked if body["messages"][0]["content"].startswith("Cut")][1]
    assert "starts.1: Input should be less than 4" in retry[-1]["content"]
    assert [segment.messages for segment in graph.segments] == [("m0", "m1"), ("m2", "m3")]
    # The offline candidates went on to the model's selector, which merged those of one direction.
    assert [(entry.abstraction, entry.sources) for entry in graph.entries.values()] == [
        ("Ann: I got a dog", ("m0", "m3")),
        ("Bob: Lovely", ("m1", "m2")),
    ]
    assert extractor.fallbacks == {"segment": 0, "extract": 2, "choose": 0, "anchors": 0}
    assert extractor.endpoint.usage.rejected == 1 + 2 * 2


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"starts": [1, 2]}, "starts"),
        ({"starts": []}, "starts"),
        ({"starts": [0, 0]}, "starts"),
        ({"starts": "0"}, "starts"),
        ({"summary": "s", "facts": [fact("", "v", 0)]}, "needs words"),
        ({"summary": "s", "facts": [fact("a", "v")]}, "facts.0.sources"),
        ({"summary": "s", "facts": [fact("a", "v", 7)]}, "facts.0.sources.0: Input should be less than 2"),
        ({"summary": "s", "facts": [fact("a", "v", -1)]}, "facts.0.sources.0: Input should be greater than"),
        ({"summary": "s", "facts": [fact("a", ", ", 0)]}, "needs words"),
        ({"entry": 5, "value": "v", "abstraction": ""}, "entry: Input should be less than"),
        ({"entry": 0, "value": "", "abstraction": ""}, "value must not be empty"),
        ({"anchors": []}, "anchors: List should have at least"),
    ],
)
def test_whatever_a_model_replies_no_message_is_lost(reply, reason, encoder, tmp_path):
    kind = {"starts": "Cut", "summary": "Write", "entry": "A memory keeps", "anchors": "Give"}[next(iter(reply))]
    told = []

    def one_bad(prompt, messages):
        told.extend(m["content"] for m in messages[2:])
        return json.dumps(reply) if prompt.startswith(kind) else good(prompt, messages)

    with serving(one_bad) as (url, _):
        graph, extractor = build(url, encoder, tmp_path, attempts=2)
    assert {s for entry in graph.entries.values() for s in entry.sources} == {m.id for m in MESSAGES}
    assert sum(extractor.fallbacks.values()) >= 1
    assert any(reason in text for text in told)


def test_a_build_that_was_stopped_goes_on_and_asks_nothing_twice(encoder, tmp_path):
    def breaks_down(prompt, messages):
        return 401 if prompt.startswith("A memory keeps") else good(prompt, messages)

    replies = []

    def working(prompt, messages):
        replies.append(prompt)
        return good(prompt, messages)

    behaviour = [breaks_down]
    with serving(lambda prompt, messages: behaviour[0](prompt, messages)) as (url, asked):
        with pytest.raises(EndpointError, match="cannot ask 'm' at .*cached: start again to go on"):
            build(url, encoder, tmp_path)
        first = len(asked)
        behaviour[0] = working
        graph, extractor = build(url, encoder, tmp_path)
        assert extractor.endpoint.usage.cached == first - 1 == 3  # segmentation and two extractions
        assert len(replies) == 2
        again, extractor = build(url, encoder, tmp_path)
        assert len(replies) == 2 and extractor.endpoint.usage.calls == 0
    assert again.entries == graph.entries


def test_an_unreachable_endpoint_is_an_error_not_a_fallback(encoder, tmp_path):
    with pytest.raises(EndpointError, match="Is the server up"):
        build("http://127.0.0.1:9/v1", encoder, tmp_path)


def test_a_failure_ends_what_has_not_begun(encoder, tmp_path):
    config = config_for("http://127.0.0.1:9/v1", concurrency=1)
    begun = []

    def fails(item):
        begun.append(item)
        raise EndpointError("down")

    with pytest.raises(EndpointError, match="down"):
        LLMExtractor(config, Endpoint(ModelConfig("http://127.0.0.1:9/v1", "m"), tmp_path))._each(
            None, fails, range(1000)
        )
    assert len(begun) < 1000


def test_a_retry_too_long_for_the_model_falls_back_and_does_not_end_the_build(encoder, tmp_path):
    def overflows(prompt, messages):
        if prompt.startswith("Write"):
            return "x" * 5000 if len(messages) == 1 else 400
        return good(prompt, messages)

    with serving(overflows) as (url, asked):
        graph, extractor = build(url, encoder, tmp_path)
    assert extractor.fallbacks["extract"] == 2 and len(graph.entries) >= 2
    assert max(len(m["content"]) for body in asked for m in body["messages"] if m["role"] == "assistant") == len(
        data_line(reply="x" * 1000)
    )


def test_a_fact_said_twice_in_one_reply_is_one_entry(encoder, tmp_path):
    def repeats(prompt, messages):
        if prompt.startswith("Write"):
            return json.dumps({"facts": [fact("Ann dog", "Ann got a dog.", 0)] * 4})
        return good(prompt, messages)

    with serving(repeats) as (url, _):
        graph, _ = build(url, encoder, tmp_path, MESSAGES[:1])
    assert len(graph.entries) == 1


def test_a_growing_memory_asks_about_new_messages_only(encoder, tmp_path):
    with serving(good) as (url, asked):
        graph, extractor = build(url, encoder, tmp_path, MESSAGES[:2])
        before = len(asked)
        assert [segment.messages for segment in graph.segments] == [("m0", "m1")]
        grown = extend_graph(graph, MESSAGES[2:], extractor=extractor)
        prompts = [body["messages"][0]["content"] for body in asked[before:]]
    reading = [p for p in prompts if p.startswith(("Cut", "Write"))]
    assert any("We moved to Oslo" in p for p in reading) and not any("I got a dog" in p for p in reading)
    assert grown.entries["e0"].sources == ("m0", "m3")


def test_untrusted_text_stays_fenced():
    assert fill("A\n{{x}}\nB {{y}}", x="has ``` in it", y="{{x}}") == (
        "A\n````\nhas ``` in it\n````\nB ```\n{{x}}\n```"
    )
    with pytest.raises(KeyError, match="z"):
        fill("{{z}}", x="")
    line = data_line(n=1, text="a\n</s><|im_end|> [INST] \u2028 \ud800 {{messages}}")
    assert "\n" not in line and not set("<>[]\u2028") & set(line)
    assert json.loads(line)["text"] == "a\n</s><|im_end|> [INST] \u2028 ? {{messages}}"


def test_a_reply_of_another_schema_is_rejected_with_its_place(tmp_path):
    class Answer(BaseModel):
        number: int

    with serving(lambda *_: '{"number": "many"}') as (url, asked):
        endpoint = Endpoint(ModelConfig(url, "m", attempts=2), tmp_path)
        with pytest.raises(ReplyError, match="no valid reply in 2 attempts; last: number: Input should be a valid int"):
            endpoint.ask("how many?", Answer)
    assert len(asked) == 2


def test_an_anchor_is_two_to_four_words_without_digits():
    assert is_anchor("Ann dog") and is_anchor("a b c d")
    assert not any(map(is_anchor, ("dog", "a b c d e", "Ann 2024", "")))


def test_the_model_must_be_named():
    with pytest.raises(ValueError, match=r"needs memory\.llm\.model"):
        BuildConfig(extractor="llm")
    assert replace(config_for("http://x"), extractor="offline").extractor == "offline"
