"""The page at `/` in headless Chromium: what it shows, what it sends, and to whom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import starquill
from starquill.server import page as page_module
from tests.server.chromium import ALT, NO_CHROMIUM, PROGRAM, Browser, Page, chromium
from tests.server.page_server import USAGE, Fake, Token, chunk, serving

in_chromium = pytest.mark.skipif(PROGRAM is None, reason=NO_CHROMIUM)
FINISHED = "document.querySelector('#status').textContent.includes('tokens,')"
VALUE = "document.querySelector('#code').value"
CURSOR = "document.querySelector('#code').selectionStart"
GHOST = "[...document.querySelectorAll('.token')].map((token) => token.textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture(scope="module")
def _serving() -> Iterator[tuple[Fake, str]]:
    fake = Fake()
    with serving(fake.app()) as address:
        yield fake, address


@pytest.fixture
def fake(_serving: tuple[Fake, str]) -> Fake:
    """The server's answers, as they are at first."""
    shared, fresh = _serving[0], Fake()
    for each in fields(Fake):
        setattr(shared, each.name, getattr(fresh, each.name))
    return shared


@pytest.fixture
def address(_serving: tuple[Fake, str]) -> str:
    return _serving[1]


@pytest.fixture
def page(browser: Browser, fake: Fake, address: str) -> Iterator[Page]:
    """The page, empty. Whatever a test did, it asked this server alone and broke nothing."""
    with browser.page(f"{address}/") as opened:
        opened.until("document.querySelector('#slots').textContent === '8'")
        opened.evaluate("document.querySelector('#code').select()")
        opened.type(" ")
        opened.evaluate("document.execCommand('delete')")
        assert opened.evaluate(VALUE) == ""
        yield opened
        assert [url for url in opened.asked_urls() if not url.startswith(f"{address}/")] == []
        expected = "Failed to load resource" if fake.failed else None
        assert [c for c in opened.complaints() if expected is None or expected not in c] == []


def suggest(page: Page, before: str, after: str = "") -> None:
    """Type, put the cursor between the two, press Tab and wait for the end of the answer."""
    page.type(before + after)
    for _ in after:
        page.press("ArrowLeft")
    page.press("Tab")
    page.until(FINISHED)


def test_files_their_types_and_the_policy() -> None:
    app = FastAPI()
    app.include_router(page_module.router)
    client = TestClient(app)
    html = client.get("/")
    assert html.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:href|src)="([^"]+)"', html.text))
    assert named == {"page/page.js", "page/page.css", "page/icon.svg"}
    for path, kind in {
        "/page/page.js": "text/javascript; charset=utf-8",
        "/page/page.css": "text/css; charset=utf-8",
        "/page/icon.svg": "image/svg+xml",
    }.items():
        got = client.get(path)
        assert (got.status_code, got.headers["content-type"]) == (200, kind)
        assert client.head(path).status_code == 200
        policy = got.headers["content-security-policy"]
        assert policy == html.headers["content-security-policy"]
        sources = {source for part in policy.split(";") for source in part.split()[1:]}
        assert sources == {"'none'", "'self'"}
    assert client.get("/openapi.json").json()["paths"] == {}


@pytest.mark.parametrize("name", ["page.py", "..%2fpage.py", "%2e%2e/page.py", ".", "index.htm"])
def test_no_other_file_is_served(name: str) -> None:
    app = FastAPI()
    app.include_router(page_module.router)
    assert TestClient(app).get(f"/page/{name}").status_code == 404


@in_chromium
def test_tab_suggests_and_tab_accepts(page: Page, fake: Fake) -> None:
    before = "def add(a, b):\n    "
    suggest(page, before)
    assert page.evaluate(GHOST) == ["return", " a", " +", " b"]
    assert page.evaluate(VALUE) == before
    assert page.evaluate("document.querySelector('#view').innerText") == f"{before}return a + b "
    assert "return a + b" in page.text("#said")
    page.press("Tab")
    assert page.evaluate(VALUE) == f"{before}return a + b"
    assert page.evaluate(CURSOR) == len(f"{before}return a + b")
    assert page.evaluate(GHOST) == []
    (asked,) = fake.asked
    assert asked["prompt"] == before
    assert "suffix" not in asked
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True}
    assert asked["model"] == "quill-small"
    page.evaluate("document.execCommand('undo')")
    assert page.evaluate(VALUE) == before


@in_chromium
def test_in_the_middle_the_text_after_the_cursor_is_the_suffix(page: Page, fake: Fake) -> None:
    before, after = "def add(a, b):\n    ", "\n\nprint(add(1, 2))\n"
    suggest(page, before, after)
    (asked,) = fake.asked
    assert (asked["prompt"], asked["suffix"]) == (before, after)
    assert page.text("#view") == f"{before}return a + b{after} "
    page.press("Tab")
    assert page.evaluate(VALUE) == f"{before}return a + b{after}"
    assert page.evaluate(CURSOR) == len(f"{before}return a + b")


@in_chromium
def test_blank_lines_after_the_cursor_are_no_suffix(page: Page, fake: Fake) -> None:
    suggest(page, "def add(a, b):\n    ", "\n\n")
    page.click(".token")
    assert "suffix" not in fake.asked[0]
    assert page.evaluate(VALUE) == "def add(a, b):\n    return a + b\n\n"


@in_chromium
def test_tokens_are_coloured_by_their_probability(page: Page) -> None:
    suggest(page, "x")
    tokens = page.evaluate(
        "[...document.querySelectorAll('.token')].map((token) => ({p: token.dataset.p,"
        " colour: getComputedStyle(token).color,"
        " line: getComputedStyle(token).textDecorationLine}))"
    )
    assert [token["p"] for token in tokens] == ["0.900", "0.400", "0.970", "0.200"]
    assert len({token["colour"] for token in tokens}) == 4
    assert [token["line"] for token in tokens] == ["none", "underline", "none", "underline"]


@in_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_colour_can_be_read(browser: Browser, fake: Fake, address: str, dark: bool) -> None:
    """At least 4.5:1 against the pane, whatever the probability, as WCAG asks of text."""
    with browser.page(f"{address}/", dark=dark) as page:
        contrasts = page.evaluate(
            """(() => {
              const canvas = new OffscreenCanvas(1, 1).getContext("2d");
              const light = (colour) => {
                canvas.fillStyle = colour;
                canvas.fillRect(0, 0, 1, 1);
                const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((byte) =>
                  byte / 255 <= 0.04045 ? byte / 3294.6 : ((byte / 255 + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
              };
              const pane = document.querySelector(".pane");
              const paper = light(getComputedStyle(pane).backgroundColor);
              const token = document.createElement("span");
              token.className = "token";
              document.querySelector("#view").append(token);
              return [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1].map((p) => {
                token.style.setProperty("--p", p);
                const ink = light(getComputedStyle(token).color);
                return Math.max(ink, paper) / Math.min(ink, paper);
              });
            })()"""
        )
        assert (page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")) == dark
    assert len(contrasts) == 11
    assert min(contrasts) >= 4.5, contrasts


@in_chromium
def test_pointing_at_a_token_shows_what_else_was_likely(page: Page) -> None:
    suggest(page, "x")
    assert page.evaluate("document.querySelector('#card').hidden")
    page.point_at(".token:nth-child(2)")
    page.until("!document.querySelector('#card').hidden")
    rows = "[...document.querySelectorAll('.choice')].map((row) => row.innerText.split('\\n'))"
    assert page.evaluate(rows) == [[" b", "50 %"], [" a", "40 %"]]
    assert page.text(".chosen").startswith(" a")
    page.point_at("h1")
    page.until("document.querySelector('#card').hidden")


@in_chromium
def test_tokens_can_be_looked_at_with_the_keys(page: Page) -> None:
    suggest(page, "x")
    page.press("ArrowDown", ALT)
    assert page.text("#said") == "return 90 %, yield 5.0 %"
    page.press("ArrowDown", ALT)
    assert page.text("#said") == " b 50 %,  a 40 %"
    assert page.text(".looked-at") == " a"
    page.press("ArrowUp", ALT)
    assert page.text(".looked-at") == "return"


@in_chromium
@pytest.mark.parametrize("how", ["Escape", "typing", "ArrowLeft", "the button", "a click"])
def test_what_drops_a_suggestion_ends_the_request(page: Page, fake: Fake, how: str) -> None:
    fake.hold_after = 2
    page.type("x = ")
    page.press("Tab")
    page.until(f"{GHOST}.length === 2")
    assert not fake.left.is_set()
    match how:
        case "typing":
            page.type("1")
        case "the button":
            page.click("#drop")
        case "a click":
            page.click("#code")
        case key:
            page.press(key)
    assert fake.left.wait(60), "the server still writes"
    page.until(f"{GHOST}.length === 0")
    assert page.evaluate(VALUE) == ("x = 1" if how == "typing" else "x = ")
    assert page.text("#status") == "Dropped"
    assert page.evaluate("document.querySelector('#error').hidden")


@in_chromium
def test_tab_while_it_writes_takes_what_is_there(page: Page, fake: Fake) -> None:
    fake.hold_after = 2
    page.type("x = ")
    page.press("Tab")
    page.until(f"{GHOST}.length === 2")
    page.press("Tab")
    assert page.evaluate(VALUE) == "x = return a"
    assert fake.left.wait(60), "the server still writes"
    fake.hold_after = None
    page.press("Tab")
    page.until(FINISHED)
    assert fake.asked[1]["prompt"] == "x = return a"


@in_chromium
def test_facts_and_figures(page: Page, fake: Fake) -> None:
    assert page.evaluate("document.querySelector('#model').value") == "quill-small"
    assert page.text("#context") == "16,384 tokens"
    assert page.text("#slots") == "8"
    fake.hold_after = 1
    page.type("x")
    page.press("Tab")
    page.until(f"{GHOST}.length === 1")
    assert re.fullmatch(r"\d+ ms", page.text("#first"))
    assert (page.text("#rate"), page.text("#status")) == ("–", "Writing")
    fake.resume.set()
    page.until(FINISHED)
    assert re.fullmatch(r"[\d.]+ tok/s", page.text("#rate"))
    assert page.text("#count") == "4"
    assert page.text("#prompt") == "1,234 tokens"
    assert page.text("#cached") == "1,200"
    assert page.text("#status") == "4 tokens, ended by the model"


@in_chromium
def test_settings_are_sent_and_checked(page: Page, fake: Fake) -> None:
    for name, value in {"max-tokens": "7", "temperature": "0.5"}.items():
        page.evaluate(f"document.querySelector('#{name}').value = '{value}'")
    suggest(page, "x")
    assert (fake.asked[0]["max_tokens"], fake.asked[0]["temperature"]) == (7, 0.5)
    page.press("Escape")
    page.evaluate("document.querySelector('#max-tokens').value = '0'")
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "max-tokens"
    assert len(fake.asked) == 1


BROKEN = (chunk(Token("ab", 0.5)),)
FAULT = {"error": {"message": "the cache is full", "code": 500}}


@in_chromium
@pytest.mark.parametrize(
    ("failure", "answer", "shown", "kept"),
    [
        ((400, '{"error": {"message": "no suffix here"}}'), (), "no suffix here (400)", ""),
        ((503, '{"error": "busy"}'), (), "busy (503)", ""),
        ((502, "a proxy's words"), (), "a proxy's words (502)", ""),
        (None, BROKEN, "the answer broke off before its end; ask again", "ab"),
        (None, (*BROKEN, FAULT, "[DONE]"), "the cache is full", "ab"),
    ],
)
def test_errors_are_shown(
    page: Page,
    fake: Fake,
    failure: tuple[int, str] | None,
    answer: tuple[Any, ...],
    shown: str,
    kept: str,
) -> None:
    fake.failure, fake.answer = failure, answer
    page.type("x")
    page.press("Tab")
    page.until("!document.querySelector('#error').hidden")
    assert page.text("#error") == shown
    assert page.evaluate(GHOST) == ([kept] if kept else [])
    assert not page.evaluate("document.body.classList.contains('working')")
    page.press("Escape")
    fake.failure, fake.answer = None, Fake().answer
    page.press("Tab")
    page.until(FINISHED)
    assert page.evaluate("document.querySelector('#error').hidden")


@in_chromium
def test_a_server_that_is_gone(browser: Browser) -> None:
    with ExitStack() as server, ExitStack() as tab:
        address = server.enter_context(serving(Fake().app()))
        page = tab.enter_context(browser.page(f"{address}/"))
        page.until("document.querySelector('#slots').textContent === '8'")
        server.close()
        page.press("Tab")
        page.until("!document.querySelector('#error').hidden")
        assert page.text("#error").startswith("the server cannot be reached")


@in_chromium
def test_a_key_is_asked_for_and_kept_in_memory_alone(
    browser: Browser, fake: Fake, address: str
) -> None:
    fake.key = "secret"
    with browser.page(f"{address}/") as page:
        page.until("document.activeElement.id === 'key'")
        assert page.text("#error") == "the server wants an API key"
        page.type("wrong")
        page.press("Enter")
        page.until("document.querySelector('#error').textContent.includes('refused')")
        page.until("document.activeElement.id === 'key'")
        page.type("secret")
        page.press("Enter")
        page.until("document.querySelector('#slots').textContent === '8'")
        assert page.evaluate("document.querySelector('#key-form').hidden")
        assert page.evaluate("document.activeElement.id") == "code"
        page.press("Tab")
        page.until(FINISHED)
        stored = "[document.cookie, localStorage.length, sessionStorage.length, location.href]"
        assert page.evaluate(stored) == ["", 0, 0, f"{address}/"]
        assert "secret" not in page.evaluate("document.documentElement.outerHTML")
        page.open(f"{address}/?again")
        page.until("document.activeElement.id === 'key'")
        assert all(url.startswith(f"{address}/") for url in page.asked_urls())


@in_chromium
def test_text_and_tokens_that_do_not_match(page: Page, fake: Fake) -> None:
    """Half characters, held-back text and markup: what is accepted is the text, to the letter."""
    fake.answer = (
        chunk(Token("\ufffd", 0.8), text=""),
        chunk(Token("\ufffd", 0.3), text="é"),
        chunk(Token("<b>", 0.9), text="<b"),
        chunk(Token("<img src=/nowhere onerror=alert(1)>", 0.6), text=">\n\t<img src=/nowhere>"),
        chunk(text="\r\n&amp;"),
        chunk(Token("<|endoftext|>", 0.7), text="", finish="stop"),
        USAGE,
        "[DONE]",
    )
    suggest(page, "x")
    assert page.evaluate(GHOST) == ["é", "<b", ">\n\t<img src=/nowhere>", "\r\n&amp;"]
    assert page.evaluate("document.querySelectorAll('.token *').length") == 0
    assert page.evaluate("document.querySelector('.token').dataset.p") == "0.300"
    page.press("Tab")
    assert page.evaluate(VALUE) == "xé<b>\n\t<img src=/nowhere>\n&amp;"


@in_chromium
def test_nothing_to_add(page: Page, fake: Fake) -> None:
    fake.answer = (chunk(Token("<|endoftext|>", 0.9), text="", finish="stop"), USAGE, "[DONE]")
    page.type("x")
    page.press("Tab")
    page.until("document.querySelector('#status').textContent.startsWith('Nothing to add')")
    assert page.evaluate("document.querySelector('#accept').disabled")


@in_chromium
def test_the_keyboard_is_not_caught_in_the_editor(page: Page) -> None:
    page.press("Escape")
    assert page.text("#status") == "Tab now leaves the editor"
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "ask"
    page.press("Enter")
    page.until(FINISHED)
    assert page.evaluate("document.activeElement.id") == "code"


@in_chromium
def test_a_new_line_keeps_the_indentation(page: Page) -> None:
    page.type("if x:\n    y()")
    page.press("Enter")
    page.type("z()")
    assert page.evaluate(VALUE) == "if x:\n    y()\n    z()"


@in_chromium
def test_what_is_drawn_lies_on_what_is_typed(page: Page, fake: Fake) -> None:
    """The text area never scrolls by itself: it has room for all lines and columns."""
    fake.answer = (chunk(Token("a\nb\nc\nd\ne", 0.5)), *fake.answer)
    page.type("\n".join(["x = " + "y" * 300, *(f"\tline {i} — ß 你" for i in range(80)), ""]))
    suggest(page, "z")
    sizes = page.evaluate(
        "((c) => [c.scrollHeight - c.clientHeight, c.scrollWidth - c.clientWidth])"
        "(document.querySelector('#code'))"
    )
    assert sizes == [0, 0]
    assert page.text("#lines").split("\n") == [str(i) for i in range(1, 87)]
    seen = page.evaluate(
        "((t, s) => t.bottom <= s.bottom && t.top >= s.top)"
        "(document.querySelector('#ghost').getBoundingClientRect(),"
        " document.querySelector('#scroll').getBoundingClientRect())"
    )
    assert seen, "the suggestion is out of sight"


@in_chromium
def test_no_other_host_can_be_asked(browser: Browser, fake: Fake, address: str) -> None:
    with browser.page(f"{address}/") as page:
        refused = page.evaluate(
            "new Promise((done) => {"
            " document.addEventListener('securitypolicyviolation',"
            " (event) => done(event.effectiveDirective));"
            " fetch('http://elsewhere.invalid/').catch(() => {}); })"
        )
    assert refused == "connect-src"


@in_chromium
def test_with_the_real_routes(browser: Browser) -> None:
    """The embedded model, behind a key, completes at the end and in the middle."""
    from starquill.engine.loop import EngineLoop
    from starquill.server.app import create_app
    from starquill.server.options import ServerOptions

    engine = starquill.Engine(starquill.load("default"))
    app = create_app(engine, ServerOptions("default", api_key="secret"))
    with EngineLoop(engine), serving(app) as address, browser.page(f"{address}/") as page:
        page.until("document.activeElement.id === 'key'")
        page.type("secret")
        page.press("Enter")
        page.until("document.querySelector('#model').value === 'default'")
        page.until(f"document.querySelector('#slots').textContent === '{engine.options.slots}'")
        page.evaluate("document.querySelector('#max-tokens').value = '16'")
        for before, after in [("def add(a, b):\n    return", ""), ("def add(", "):\n    return a")]:
            page.evaluate("document.querySelector('#code').select()")
            suggest(page, before, after)
            ghost = "".join(page.evaluate(GHOST))
            scores = page.evaluate(
                "[...document.querySelectorAll('.token')].map((token) => Number(token.dataset.p))"
            )
            assert scores
            assert all(0 < score <= 1 for score in scores)
            page.point_at(".token")
            page.until("document.querySelectorAll('.choice').length >= 5")
            page.press("Tab")
            assert page.evaluate(VALUE) == before + ghost + after
            assert re.fullmatch(r"\d+ tokens", page.text("#prompt"))
        assert [c for c in page.complaints() if "(Unauthorized)" not in c] == []
        assert [url for url in page.asked_urls() if not url.startswith(f"{address}/")] == []
