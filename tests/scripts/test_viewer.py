import base64
import hashlib
import json
import re
import shutil
from datetime import datetime
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuewalk.env import EnvConfig, Gold, Question, RetrievalEnv
from cuewalk.judges import TrajectoryJudge
from cuewalk.memory import BuildConfig, Conversation, Message, build_graph
from cuewalk.scripts.viewer import as_json, describe_walk, write_html

RULES = EnvConfig(k=1, budget=4, frontier_cap=3, new_lines=1, links=("segment", "adjacent", "similar", "search"))
ATTACK = "</script><img src=x onerror=\"document.title='pwned'\"> ${1} <!-- \u202etxet\u202c & dog"
RESULT = {
    "name": "toy", "command": "cuewalk compare", "commit": "abc", "seeds": [0], "versions": {"python": "3.11"},
    "data": {"dataset": "synthetic", "split": "test", "n": 2},
    "rows": [
        {"policy": "top_k=5", "n": 2, "recall_at_8": 0.5, "evidence_recall": 0.5, "context_tokens": 100.0,
         "recall_at_8_low": 0.4, "recall_at_8_high": 0.6, "recall_at_8_c4": 0.5, "reward": None},
        {"policy": "hand", "n": 2, "recall_at_8": 0.75, "evidence_recall": 1.0, "context_tokens": 60.0, "reward": 0.4,
         "ended_stopped": 0.5, "ended_budget": 0.5, "ended_malformed": 0.0},
    ],
    "comparisons": [{"metric": "recall_at_8", "a": "hand", "b": "top_k=5", "difference": 0.25, "low": 0.1, "high": 0.4,
                     "detectable": None, "by_conversation": {"toy": 0.25}}],
}  # fmt: skip


def walked(actions, graph, question, gold, rules=RULES, policy="hand"):
    env = RetrievalEnv(graph, question, rules)
    env.reset()
    for action in actions:
        env.step(action)
    trajectory = env.trajectory()
    return describe_walk(policy, trajectory, graph, question, gold, TrajectoryJudge().score(trajectory, graph, gold))


@pytest.fixture(scope="module")
def hand(graph, question, gold):
    return walked(("EXPAND Z", "EXPAND B", "REFINE piano", "STOP"), graph, question, gold)


@pytest.fixture(scope="module")
def hostile(encoder):
    """Every text that a memory, a question or a policy can bring is an attack."""
    messages = tuple(Message(f"m{i}", ATTACK, datetime(2024, 5, 1 + i), f"{ATTACK} {i}") for i in range(3))
    rules = BuildConfig(segment_messages=2, nearest=1, update_threshold=1.01, groups=None)
    graph = build_graph(Conversation("toy", messages), encoder, rules)
    asked, told = Question("toy:2", "toy", ATTACK), Gold(ATTACK, ("m2",), category=2)
    actions = (f"REFINE dog {ATTACK}", f"{ATTACK}\nSTOP", "EXPAND A", "STOP")
    return walked(actions, graph, asked, told, policy=ATTACK)


def test_a_walk_is_described_exactly(hand):
    """W_0 is e0 (m1); e5 shares `dog` (cosine 1/√2), e1 (m2) its segment, e2 lies in the next one."""
    assert {key: hand[key] for key in ("policy", "conversation", "category", "first", "budget", "ending")} == {
        "policy": "hand", "conversation": "toy", "category": "single-hop", "first": ["e0"], "budget": 4,
        "ending": "stopped"}  # fmt: skip
    assert hand["question"] == {"id": "toy:1", "text": "When did the dog come back?"}
    assert hand["gold"] == {
        "answer": "Tuesday",
        "evidence": [
            {"id": "m1", "text": "Ann (1 May 2024): The dog ran away"},
            {"id": "m2", "text": "Bob (1 May 2024): He came back on Tuesday"},
        ],
    }
    assert hand["frontier"] == [
        {"label": "A", "entry": "e5", "kind": "similar", "score": 0.707, "from": ["e0"]},
        {"label": "B", "entry": "e1", "kind": "segment", "score": 0.0, "from": ["e0"]},
        {"label": "C", "entry": "e2", "kind": "adjacent", "score": 0.0, "from": ["e0"]},
    ]
    bad, expand, refine, stop = hand["steps"]
    nothing = {"added": [], "candidates": []}
    assert bad == {"action": "EXPAND Z", "kind": "bad", "labels": ["Z"], "done": False, "bad": "unknown_label",
                   "cost": 1, "budget": 3, **nothing}  # fmt: skip
    assert expand == {
        "action": "EXPAND B", "kind": "expand", "labels": ["B"], "done": True, "bad": None, "cost": 1, "budget": 2,
        "added": ["e1"],
        "candidates": [{"label": "D", "entry": "e4", "kind": "similar", "score": 0.0, "from": ["e1"]}]}  # fmt: skip
    assert refine["candidates"] == [{"label": "E", "entry": "e3", "kind": "search", "score": 0.0, "from": []}]
    assert (refine["kind"], refine["labels"], refine["done"], refine["budget"]) == ("refine", [], True, 1)
    assert stop == {"action": "STOP", "kind": "stop", "labels": [], "done": True, "bad": None, "cost": 0, "budget": 1,
                    **nothing}  # fmt: skip
    assert hand["marked"] == {"e0": ["m1"], "e1": ["m2"]}
    assert list(hand["entries"]) == ["e0", "e5", "e1", "e2", "e4", "e3"]
    assert hand["entries"]["e1"] == {
        "abstraction": "Bob: He came back on Tuesday", "value": ["Bob (1 May 2024): He came back on Tuesday"]
    }  # fmt: skip
    # gain 1/2, one entry added at .015, one bad action at .05
    assert hand["verdict"] == {
        "reward": 0.435,
        "parts": {"gain": 0.5, "price": -0.015, "redundancy": 0.0, "bad_actions": -0.05, "budget_ending": 0.0},
        "reason": "correctness 1.00, 1 entries added, cost 3, stopped",
    }


def test_an_action_dearer_than_the_budget_is_told_from_one_that_was_done(graph, question, gold):
    rules = EnvConfig(k=1, budget=2, frontier_cap=3, new_lines=0, links=RULES.links)
    walk = walked(("EXPAND A", "EXPAND B C"), graph, question, gold, rules)
    assert [(step["labels"], step["done"], step["cost"]) for step in walk["steps"]] == [
        (["A"], True, 1), (["B", "C"], False, 0)]  # fmt: skip
    assert walk["ending"] == "budget"


def test_gold_that_the_conversation_does_not_hold_is_named_and_a_walk_needs_no_verdict(graph, question):
    env = RetrievalEnv(graph, question, RULES)
    env.reset()
    env.step("STOP")
    walk = describe_walk("stop", env.trajectory(), graph, question, Gold("", ("m9",), category=9), None)
    assert walk["gold"]["evidence"] == [{"id": "m9", "text": "(not in the conversation)"}]
    assert (walk["marked"], walk["verdict"], walk["category"]) == ({}, None, "9")


def data_of(page):
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)
    return json.loads(block)


def test_hostile_text_stays_data(hostile, tmp_path):
    page = write_html(RESULT | {"name": ATTACK}, [hostile], tmp_path / "page.html").read_text()
    assert page.count("</script>") == 2 and "<img" not in page and page.isascii() is False  # the template's own arrows
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u2028\u2029]", page)
    data = data_of(page)
    assert data["result"]["name"] == data["walks"][0]["policy"] == ATTACK
    clean = ATTACK.replace("\u202e", "").replace("\u202c", "")
    assert data["walks"][0]["question"]["text"] == clean
    assert data["walks"][0]["steps"][0]["action"] == f"REFINE dog {clean}"
    assert data["walks"][0]["steps"][1]["action"] == f"{clean} ⏎ STOP"
    assert data["entries"][hostile["graph"]]["e0"]["value"] == [f"{clean} (1 May 2024): {clean} 0"]


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_data_survives_and_can_not_end_the_element(data):
    text = as_json(data)
    assert json.loads(text) == data
    assert text.isascii() and not set(text) & set("<>&")


def test_a_number_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_html(RESULT | {"rows": [{"policy": "x", "recall_at_8": float("nan")}]}, [], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_page_refers_to_nothing_outside_and_sets_text_only(hand, tmp_path):
    template = files("cuewalk.scripts").joinpath("viewer.html").read_text(encoding="utf-8")
    outside = r"https?:|//[\w.]|\bsrc\s*=|\.src\b|href=\"(?!#)|url\(|\bimport\b"
    calls = r"fetch|XMLHttp|WebSocket|EventSource|Beacon|Worker|RTC"
    assert re.findall(f"{outside}|{calls}", template) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|Storage", template) == []
    page = write_html(RESULT, [hand], tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    assert "@@" not in page and len(page.encode()) < 75_000
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    own = {tag: re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.S) for tag in ("script", "style")}
    for tag, (text,) in own.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy


def test_walks_over_one_memory_share_their_entries(hand, graph, question, gold, tmp_path):
    other = walked(("STOP",), graph, question, gold, policy="stop")
    data = data_of(write_html(RESULT, iter([hand, other]), tmp_path / "page.html").read_text())
    assert [walk["policy"] for walk in data["walks"]] == ["hand", "stop"] and "entries" not in data["walks"][0]
    assert list(data["entries"]) == [graph.digest[:12]] and len(data["entries"][graph.digest[:12]]) == 6


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra `dev`)")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"no Chromium is installed (looked for {', '.join(names)})")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path)
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Open a page; no error, and no request but the one for the page itself, may have come of it in the end."""
    opened = []

    def visit(path, **options):
        page = browser.new_context(reduced_motion="reduce", **options).new_page()
        page.set_default_timeout(10_000)
        page.asked, page.errors = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda line: page.errors.append(line.text) if line.type == "error" else None)
        page.goto(path.as_uri())
        opened.append((page, path.as_uri()))
        return page

    yield visit
    for page, address in opened:
        assert (page.asked, page.errors) == ([address], [])
        page.context.close()


def text(page, selector):
    return " ".join(page.locator(selector).inner_text().split())


def listed(page, selector):
    return [" ".join(item.split()) for item in page.locator(selector).all_inner_texts()]


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_a_walk_is_followed_with_the_keyboard(visit, hand, graph, question, gold, tmp_path, width):
    stop = walked(("STOP",), graph, question, gold, policy="stop")
    dark = {"color_scheme": "dark"} if width == 360 else {}
    page = visit(
        write_html(RESULT, [hand, stop], tmp_path / "page.html"), viewport={"width": width, "height": 740}, **dark
    )
    press = page.keyboard.press
    for key in ("Tab", "Enter", "Tab", "Tab", "Tab"):  # the link that skips the figures, question, policy, first step
        press(key)
    assert page.evaluate("document.activeElement.innerText") == "1 bad action"
    fits = "[document.documentElement.scrollWidth, innerWidth]"
    assert page.evaluate(fits) == [width, width]

    gold_at = '#task li[data-message="{}"]'.format
    assert text(page, gold_at("m1")) == "★ gold ✓ found Ann (1 May 2024): The dog ran away"
    assert text(page, gold_at("m2")) == "★ gold a candidate Bob (1 May 2024): He came back on Tuesday"
    says = (
        "Step 1 of 4. The policy says EXPAND Z Bad action: unknown label. Costs 1; 3 of 4 left. Nothing else changes."
    )
    assert text(page, "#says") == says
    assert text(page, "#left") == "Budget left ●●●● 4 of 4"
    first = [
        "A Bob: The dog likes the garden similar, from #1 score 0.71",
        "B Bob: He came back on Tuesday ★ gold same segment, from #1 score 0.00",
        "C Ann: My garden has a piano next segment, from #1 score 0.00",
    ]
    assert listed(page, "#frontier-list li") == first
    assert listed(page, "#working-list li") == ["#1 Ann (1 May 2024): The dog ran away ★ gold first search"]
    assert page.locator("#outcome").is_hidden()

    press("ArrowRight")
    assert page.evaluate("document.activeElement.innerText") == "2 EXPAND B"
    assert text(page, "#says").endswith(
        "EXPAND B Expands B. 1 entry read, 1 of them gold. 1 new candidate. Costs 1; 2 of 4 left."
    )
    chosen = first[1].replace("★ gold", "✓ chosen ★ gold")
    assert listed(page, "#frontier-list li") == [first[0], chosen, first[2]]
    assert page.locator("#frontier-list li.chosen").get_attribute("data-label") == "B"
    assert page.locator("#map path.link.on").count() == 1
    label = "Graph of this step: 1 entry in the working set, 3 candidates; B chosen. The lists hold the same."
    assert page.locator("#map").get_attribute("aria-label") == label
    assert page.locator("#map path.star").count() == 2

    press("ArrowRight")
    assert "REFINE piano Searches again. 1 new candidate. Costs 1; 1 of 4 left." in text(page, "#says")
    assert listed(page, "#working-list li")[1:] == [
        "#2 Bob (1 May 2024): He came back on Tuesday ★ gold taken as B in step 2 new"
    ]
    assert listed(page, "#frontier-list li")[2] == "D Ann: We left at noon new similar, from #2 score 0.00"
    assert text(page, gold_at("m2")).startswith("★ gold ✓ found")

    press("ArrowRight")
    assert (
        text(page, "#says")
        == "Step 4 of 4. The policy says STOP Stops. 2 of 2 gold messages found; 1 of the budget is left."
    )
    assert listed(page, "#frontier-list li")[3] == "E Bob: The trip was long new search hit score 0.00"
    press("ArrowRight")
    assert text(page, "#says").endswith("it stopped by choice. 2 of 2 gold messages found; reward +0.435.")
    assert listed(page, "#outcome tr") == [
        "evidence gained +0.500", "price of what was added −0.015", "redundancy 0.000", "bad actions −0.050",
        "ended by the budget 0.000", "reward +0.435"]  # fmt: skip
    assert page.evaluate(fits) == [width, width]
    assert page.locator("#next").is_disabled() and page.locator("#steps [aria-current=step]").inner_text() == "End"
    press("ArrowRight")  # there is nothing after the end
    assert page.locator("#steps [aria-current=step]").inner_text() == "End"
    press("Home")
    assert text(page, "#says") == says

    page.locator("#next").focus()
    for _ in range(4):
        press("Enter")
    assert page.evaluate("document.activeElement.id") == "back"  # not lost with the button that was turned off
    press("Enter")
    assert "STOP Stops." in text(page, "#says")

    page.get_by_role("combobox", name="Policy", exact=True).focus()
    press("ArrowDown")
    assert text(page, "#steps") == "1 STOP End"


@pytest.mark.slow
def test_tables_and_plot_show_what_was_measured(visit, hand, tmp_path):
    page = visit(write_html(RESULT, [hand], tmp_path / "page.html"))
    first_column = "#measures tbody th"
    assert listed(page, first_column) == ["top_k=5", "hand"]
    assert listed(page, "#measures tbody tr >> nth=0")[0] == "top_k=5 0.500 0.400 to 0.600 0.500 – 2"
    page.get_by_role("button", name="reward").press("Enter")
    assert listed(page, first_column) == ["hand", "top_k=5"]  # what is missing comes last
    assert page.get_by_role("columnheader", name="reward").get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="recall@8").press("Enter")
    page.get_by_role("button", name="recall@8").press("Enter")
    assert listed(page, first_column) == ["top_k=5", "hand"]  # ascending
    page.get_by_label("Endings").check()
    assert page.get_by_role("img", name="stopped 0.500, budget 0.500, malformed 0.000").is_visible()
    page.get_by_label("By category").check()
    assert listed(page, "#measures thead th") == ["policy", "single-hop", "n"]
    assert listed(page, "#pairs tbody tr") == ["hand − top_k=5 +0.250 +0.100 to +0.400 – – +0.250"]
    assert page.locator("#published").count() == 0
    page.locator("#series button").first.focus()
    assert text(page, "#readout") == "top_k=5: recall 0.500 at 100 context tokens"
    page.keyboard.press("ArrowRight")
    assert text(page, "#readout") == "hand: recall 1.000 at 60.0 context tokens"
    assert page.locator("#chart path.best").count() == 1


@pytest.mark.slow
def test_hostile_text_is_shown_and_does_nothing(visit, hostile, tmp_path):
    published = [{"system": ATTACK, "score": 1.0}]
    result = {"name": ATTACK, "rows": [{"policy": ATTACK, ATTACK: 1.0}], "published": published}
    page = visit(write_html(result, [hostile], tmp_path / "page.html"), viewport={"width": 360, "height": 740})
    for _ in range(5):
        page.locator("#walk").press("ArrowRight")
    assert page.title() == ATTACK.replace("\u202e", "").replace("\u202c", "").replace("_", " ") + ": Cuewalk"
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2
    assert "<img src=x" in text(page, "#working-list") and "<img src=x" in text(page, "#measures")
    loose = """[...document.querySelectorAll("body *:not(script):not(bdi)")].filter(
        (node) => [...node.childNodes].some((child) => child.nodeType === 3 && /[\u202a-\u202e]/.test(child.data)))"""
    assert page.evaluate(f"{loose}.length") == 0  # what turns the direction stands in a bdi, which isolates it
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]


@pytest.mark.slow
def test_without_walks_the_page_says_why(visit, tmp_path):
    result = RESULT | {"data": {"dataset": "locomo"}}
    page = visit(write_html(result, [], tmp_path / "page.html"))
    assert "the conversations of locomo are licensed CC BY-NC 4.0" in text(page, "#walks")
    assert page.locator("#walk").count() == 0 and page.locator("#measures tbody tr").count() == 2
    bare = visit(write_html({"name": "bare", "rows": [], "comparisons": []}, [], tmp_path / "bare.html"))
    assert "none was given to it" in text(bare, "#walks") and "Nothing to plot" in text(bare, "#readout")


@pytest.mark.slow
def test_the_page_itself_forbids_requests_and_foreign_scripts(browser, tmp_path):
    """What the page does not try it could not do either."""
    page = browser.new_page()
    refused = []
    page.on("console", lambda line: refused.append(line.text) if "Content Security Policy" in line.text else None)
    page.goto(write_html(RESULT, [], tmp_path / "page.html").as_uri())
    assert page.evaluate("() => new Promise((done) => setTimeout(done, 50, document.title))") == "toy: Cuewalk"
    page.evaluate(
        "() => document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))"
    )
    assert page.evaluate("() => fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert page.title() == "toy: Cuewalk" and len(refused) >= 2
    page.close()
