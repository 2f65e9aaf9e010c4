"""The web page in Chromium, with a real server and tiny models."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from afterglow.testing import models
from afterglow.testing.models.scripted import write_scripted_model
from support.browser import CHROMIUM, FLAGS, MISSING
from support.media_files import encode_image
from support.media_prompts import color_image
from support.server_process import ServerProcess, run_server, wait_until

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.browser]

HOSTILE = "<img src=x onerror=alert(1)>"
HOSTILE_MODEL = "<img onerror>"
ANSWER = f"""A **strong** word, a [link](https://example.com/) and {HOSTILE}.

| a | b |
|---|--:|
| 1 | <script>alert(2)</script> |

- [bad](javascript:alert(3))

```python
print("<b>")
```
"""
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "<svg onload=alert(4)>"}}\n</tool_call>'
CONTEXT_TOKENS = 32_768
LONG_PROMPT = "The tide comes in twice a day, and the moon is why. " * 560
PATIENCE_MS = 60_000  # machines are busy
LARGE_TREE_NODES = 10_000


@pytest.fixture(scope="module")
def server(caches_of_our_own: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a model that never ends, one that plays a script and has a hostile name, and a vision model."""
    path = tmp_path_factory.mktemp("models") / "scripted.gguf"
    write_scripted_model(path, [CALL, "The result is in."], answer_without_tools=ANSWER)
    shutil.copy(models.get_path("colors"), (vision := tmp_path_factory.mktemp("vision")) / "colors.gguf")
    shutil.copy(models.get_path("projector-colors"), vision / "mmproj.gguf")
    with run_server(
        f"tiny={models.get_path('successor-attention')}",
        f"{HOSTILE_MODEL}={path}",
        str(vision / "colors.gguf"),
        *("--context", str(CONTEXT_TOKENS), "--sequences", "4"),
        AFTERGLOW_CACHE=str(tmp_path_factory.mktemp("disk")),
        AFTERGLOW_DISK_CACHE="on",
    ) as process:
        yield process


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None, MISSING
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser profile of its own for each test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, server: ServerProcess) -> Iterator[Page]:
    """The page with the scripted model. Errors of its scripts and alerts fail the test."""
    problems: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.goto(server.url)
    choose_model(page, HOSTILE_MODEL)
    yield page
    assert not problems


def choose_model(page: Page, name: str) -> None:
    page.locator(".model-picker summary").click()
    page.locator(".models .choose").filter(has_text=name).click()
    expect(page.locator(".model-picker summary .model-name")).to_have_text(name)


def send(page: Page, text: str) -> None:
    page.locator("#composer-text").fill(text)
    page.locator("#send").click()


def ask(page: Page, text: str) -> None:
    """Send a message and wait for the whole response."""
    count = page.locator("ag-message").count()
    send(page, text)
    expect(page.locator("ag-message")).to_have_count(count + 2)
    wait_for_response(page)


def wait_for_response(page: Page) -> None:
    expect(page.locator("ag-message").last).to_have_attribute("data-role", "assistant")
    expect(page.locator("ag-message").last).to_have_attribute("aria-busy", "false")
    expect(page.locator("#send")).to_be_visible()


def get_last_text(page: Page) -> str:
    return page.locator("ag-message .text").last.inner_text()


def get_tree(server: ServerProcess, model: str) -> dict[str, Any]:
    tree: dict[str, Any] = server.http.get("/tree", params={"model": model}).json()
    return tree


# --- chat


def test_a_chat_streams_and_shows_markdown(page: Page) -> None:
    choose_model(page, "tiny")
    send(page, "hello")
    expect(page.locator("ag-message .text").last).to_have_text(re.compile("abcdef"))
    first = len(get_last_text(page))
    expect(page.locator("ag-message").last).to_have_attribute("aria-busy", "true")
    assert wait_until(60, lambda: len(get_last_text(page)) > first + 50)
    expect(page.locator(".streaming .message-status")).to_have_text(re.compile(r"tokens · [\d.]+ tok/s"))
    page.locator("#stop").click()
    expect(page.locator(".note")).to_have_text(re.compile("Stopped"))
    choose_model(page, HOSTILE_MODEL)
    ask(page, "Show me markdown")
    last = page.locator("ag-message .text").last
    expect(last.locator("strong")).to_have_text("strong")
    expect(last.locator("a")).to_have_attribute("href", "https://example.com/")
    expect(last.locator("td").nth(1)).to_have_text("<script>alert(2)</script>")
    expect(last.locator(".code-block code")).to_have_text('print("<b>")')
    expect(page.locator(".cost").last).to_have_text(re.compile(r"reused [\d,]+ of [\d,]+, computed [\d,]+"))
    expect(page.locator(".context")).to_have_text(re.compile(r"^[\d,]+ of 32,768 tokens$"))


def test_thoughts_are_folded(page: Page) -> None:
    deltas = [{"reasoning_content": "First I think."}, {"content": "Then I answer."}]
    chunks = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    stream = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    ask(page, "Think!")
    reasoning = page.locator("ag-message details.reasoning").last
    expect(reasoning.locator("summary")).to_have_text("Reasoning")
    expect(reasoning.locator(".reasoning-text")).to_be_hidden()
    reasoning.locator("summary").click()
    expect(reasoning.locator(".reasoning-text")).to_have_text("First I think.")
    assert get_last_text(page) == "Then I answer."


def test_stop_ends_a_request_in_its_prefill(page: Page, server: ServerProcess) -> None:
    choose_model(page, "tiny")
    send(page, LONG_PROMPT)
    status = page.locator(".streaming .message-status")
    expect(status).to_have_text(re.compile(r"prefill [\d,]+ of [\d,]+"))
    page.locator("#stop").click()
    expect(page.locator(".note")).to_have_text(re.compile("Stopped"))
    assert wait_until(60, lambda: not server.is_busy())
    newest = server.http.get("/requests").json()["requests"][0]
    assert (newest["state"], newest["generated_tokens"]) == ("cancelled", 0)
    assert newest["prefill_done"] < newest["prompt_tokens"]
    choose_model(page, HOSTILE_MODEL)
    ask(page, "hello")
    assert "strong" in get_last_text(page)


def test_escape_stops_a_response_whichever_button_asked_for_it(page: Page) -> None:
    choose_model(page, "tiny")
    send(page, "hello")
    for count in (1, 2):
        expect(page.locator("ag-message .text").last).to_have_text(re.compile("abcdef"))
        page.keyboard.press("Escape")
        expect(page.locator(".note")).to_have_text(re.compile("Stopped"))
        if count == 1:
            page.get_by_role("button", name="Regenerate").click()


def test_an_edit_makes_a_branch_that_appears_in_the_tree(
    page: Page, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    watcher = page.context.new_page()
    watcher.goto(f"{server.url}/#/cache")
    expect(watcher.locator(".live-requests")).to_contain_text("Nothing is running")
    shared = "A question about rivers that is long enough to share a prefix: "
    ask(page, f"{shared}the Rhine?")
    page.get_by_role("button", name="Edit: a new branch").first.click()
    page.locator("textarea.edit").fill(f"{shared}the Danube?")
    page.get_by_role("button", name="Send as a new branch").click()
    started = time.perf_counter()
    expect(watcher.locator('g.node[aria-label*="Danube"]')).to_have_count(1)
    seconds = time.perf_counter() - started
    with capsys.disabled():
        print(f"\na branch is drawn {seconds:.2f} s after it was sent")
    watcher.close()
    expect(page.locator(".branch-number").first).to_have_text("2/2")
    wait_for_response(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".branch-number").nth(1)).to_have_text("2/2")
    page.get_by_role("button", name="Previous branch").first.click()
    expect(page.locator("ag-message .text").first).to_have_text(f"{shared}the Rhine?")
    page.locator(".tab").filter(has_text="Cache").click()
    branches = [page.locator(f'g.node[aria-label*="{river}"]') for river in ("Rhine", "Danube")]
    for branch in branches:
        expect(branch).to_have_count(1)
    by_id = {node["id"]: node for node in get_tree(server, HOSTILE_MODEL)["nodes"]}
    parents = {by_id[branch.get_attribute("data-id") or ""]["parent"] for branch in branches}
    assert len(parents) == 1
    assert by_id[parents.pop()]["sharers"] >= 2


def test_messages_stay_as_they_are_when_the_next_one_is_sent(page: Page) -> None:
    ask(page, "Show me code")
    code = page.locator(".code-block pre").first
    code.evaluate("code => { code.style.width = '40px'; code.scrollLeft = 10; }")
    ask(page, "And more of it")
    assert code.evaluate("code => code.scrollLeft") == 10


def test_an_edit_stays_while_the_settings_change(page: Page) -> None:
    ask(page, "What is an edit?")
    page.get_by_role("button", name="Edit: a new branch").first.click()
    page.locator("textarea.edit").fill("A better question")
    page.locator("#settings").click()
    page.locator("ag-settings input[name=temperature]").fill("0.5")
    page.keyboard.press("Tab")
    expect(page.locator("textarea.edit")).to_have_value("A better question")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("ag-message .text").first).to_have_text("What is an edit?")
    page.get_by_role("button", name="Edit: a new branch").first.click()
    page.locator("textarea.edit").fill("A better question")
    page.get_by_role("button", name="Send as a new branch").click()
    expect(page.locator(".branch-number").first).to_have_text("2/2")
    wait_for_response(page)
    page.get_by_role("button", name="Previous branch").first.click()
    expect(page.locator("ag-message .text").first).to_have_text("What is an edit?")


def test_a_reload_keeps_branches_settings_and_the_open_conversation(page: Page) -> None:
    page.locator("#settings").click()
    page.locator("ag-settings textarea").first.fill("You are a lighthouse.")
    page.locator("ag-settings input[name=temperature]").fill("0.5")
    page.keyboard.press("Tab")
    ask(page, "Who are you?")
    page.get_by_role("button", name="Edit: a new branch").first.click()
    page.locator("textarea.edit").fill("Where are you?")
    page.keyboard.press("Enter")
    expect(page.locator(".branch-number").first).to_have_text("2/2")
    wait_for_response(page)
    before = page.locator(".messages").inner_text()
    page.reload()
    expect(page.locator(".branch-number").first).to_have_text("2/2")
    assert page.locator(".messages").inner_text() == before
    expect(page.locator(".conversations .current .title")).to_have_text("Who are you?")
    page.locator("#settings").click()
    expect(page.locator("ag-settings textarea").first).to_have_value("You are a lighthouse.")
    expect(page.locator("ag-settings input[name=temperature]")).to_have_value("0.5")


def test_a_sampling_value_may_lie_between_the_steps_of_its_input(page: Page) -> None:
    page.locator("#settings").click()
    for name, value in {"temperature": "0.72", "min_p": "0.025", "top_k": "2.5"}.items():
        page.locator(f"ag-settings input[name={name}]").fill(value)
        page.keyboard.press("Tab")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "How warm is it?")
    body = request.value.post_data_json
    assert (body["temperature"], body["min_p"], "top_k" in body) == (0.72, 0.025, False)


def test_a_reload_after_a_look_at_the_cache_keeps_the_open_conversation(page: Page) -> None:
    ask(page, "Which tide is the highest?")
    address = page.url
    for name in ("Cache", "Chat"):
        page.locator(".tab").filter(has_text=name).click()
    expect(page).to_have_url(address)
    page.reload()
    expect(page.locator("ag-message")).to_have_count(2)


def test_a_title_can_be_written_while_the_list_is_refreshed(page: Page) -> None:
    ask(page, "What is a title?")
    row = page.locator(".conversations .current")
    row.hover()
    row.get_by_role("button", name="Rename").click()
    page.keyboard.type("A title ")
    page.locator("ag-sidebar").evaluate("sidebar => sidebar.refresh()")  # as when a response is saved
    page.keyboard.type("of two parts")
    page.keyboard.press("Enter")
    expect(page.locator(".conversations .current .title")).to_have_text("A title of two parts")


def test_a_title_that_cannot_be_saved_can_be_written_again(page: Page) -> None:
    ask(page, "What is a name?")
    error = {"error": {"message": "no space is left"}}
    page.route("**/conversations/*", lambda route: route.fulfill(status=503, json=error), times=1)
    row = page.locator(".conversations .current")
    for title in ("One name", "Another name"):
        row.hover()
        row.get_by_role("button", name="Rename").click()
        page.keyboard.type(title)
        composed = {"key": "Enter", "isComposing": True, "bubbles": True}  # ends the input of a Japanese word
        row.locator("input").dispatch_event("keydown", composed)
        expect(row.locator("input")).to_have_value(title)
        page.keyboard.press("Enter")
        expect(row.locator(".title")).to_have_text("What is a name?" if title == "One name" else title)


def test_what_was_imported_before_an_error_is_listed(page: Page) -> None:
    def build(title: str, parent: str | None) -> dict[str, Any]:
        message = {"id": "a", "parent": parent, "message": {"role": "user", "content": "x"}}
        return {"title": title, "messages": [message]}

    document = {"conversations": [build("A whole import", None), build("A damaged import", "gone")]}
    file = {"name": "all.json", "mimeType": "application/json", "buffer": json.dumps(document).encode()}
    page.locator("#import-file").set_input_files([file])  # type: ignore[list-item]
    expect(page.locator(".toast")).to_contain_text("no message 'gone'")
    expect(page.locator(".conversations .title").first).to_have_text("A whole import")


def test_the_focus_stays_in_the_list_while_it_is_refreshed(page: Page) -> None:
    ask(page, "What is a focus?")
    row = page.locator(".conversations .current .conversation")
    expect(row).to_be_visible()
    page.wait_for_timeout(1000)  # the refresh after the response
    row.focus()
    page.locator("ag-sidebar").evaluate("sidebar => sidebar.refresh()")  # as when a response is saved
    expect(row).to_be_focused()
    row.hover()
    page.locator(".conversations .current").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Keep").click()
    expect(row).to_be_visible()


def test_a_killed_engine_shows_and_recovers(page: Page, server: ServerProcess) -> None:
    choose_model(page, "tiny")
    send(page, "go on")
    expect(page.locator("ag-message .text").last).to_have_text(re.compile("abcdef"))
    for engine in server.list_engines():
        engine.kill()
    problem = page.locator("ag-message .problem")
    expect(problem).to_be_visible(timeout=PATIENCE_MS)
    expect(problem).to_have_text(re.compile("engine", re.IGNORECASE))
    problem.get_by_role("button", name="Try again").click()
    expect(page.locator("ag-message .text").last).to_have_text(re.compile("abcdef"))
    expect(problem).to_have_count(0)
    page.locator("#stop").click()
    expect(page.locator(".model-picker summary .state-name")).to_have_text("ready")


def test_nothing_that_a_model_a_file_or_a_tool_says_becomes_markup(page: Page) -> None:
    page.locator("#settings").click()
    page.locator("ag-settings textarea[name=tools]").fill(json.dumps([TOOL]))
    page.keyboard.press("Tab")
    name = f"{HOSTILE}.txt"
    file = {"name": name, "mimeType": "text/plain", "buffer": HOSTILE.encode()}
    page.locator("ag-composer input[type=file]").set_input_files([file])  # type: ignore[list-item]
    expect(page.locator("ag-composer .file-name")).to_have_text(name)
    ask(page, HOSTILE)
    expect(page.locator(".call pre")).to_have_text(re.compile(re.escape("<svg onload=alert(4)>")))
    page.locator(".results textarea").fill(HOSTILE)
    page.get_by_role("button", name="Send the results").click()
    expect(page.locator("ag-message[data-role=tool] .text")).to_have_text(HOSTILE)
    expect(page.locator("ag-message .text").last).to_have_text("The result is in.")
    page.locator("ag-settings textarea[name=tools]").fill("")
    page.keyboard.press("Tab")
    ask(page, "and without tools?")
    assert HOSTILE in get_last_text(page)
    expect(page.locator("ag-message .file-name")).to_have_text(name)
    expect(page.locator(".conversations .current .title")).to_have_text(HOSTILE)
    expect(page.locator(".message-head").filter(has_text=HOSTILE_MODEL).first).to_be_visible()
    page.reload()
    expect(page.locator("ag-message")).to_have_count(6)
    page.locator(".tab").filter(has_text="Cache").click()
    expect(page.locator(".request").first).to_contain_text("without tools")
    for markup in ("img", "main svg[onload]", "main script", "ag-message b", "[onerror]", "a[href^=javascript]"):
        expect(page.locator(markup)).to_have_count(0)


def test_an_image_is_attached_and_a_model_that_sees_nothing_is_named(page: Page) -> None:
    image = color_image("R")
    png = encode_image(Image.frombytes("RGB", (image.width, image.height), image.pixels))
    picker = page.locator("ag-composer input[type=file]")
    picker.set_input_files([{"name": "red.png", "mimeType": "image/png", "buffer": png}])
    expect(page.locator("ag-composer img")).to_have_attribute("alt", "red.png")
    send(page, "Which colour?")
    expect(page.locator(".toast")).to_contain_text("does not accept image")
    expect(page.locator("ag-message")).to_have_count(0)
    choose_model(page, "colors")
    ask(page, "Which colour?")
    assert get_last_text(page) == "R"
    page.reload()
    expect(page.locator("ag-message img")).to_have_attribute("src", re.compile("^data:image/png;base64,"))


def test_text_can_be_dragged_into_the_message(page: Page) -> None:
    page.evaluate(
        """() => {
            const text = document.createElement("p");
            text.id = "dragged";
            text.draggable = true;
            text.textContent = "A dragged word";
            text.addEventListener("dragstart", event => event.dataTransfer.setData("text/plain", "A dragged word"));
            document.querySelector(".messages").append(text);
        }"""
    )
    page.locator("#dragged").drag_to(page.locator("#composer-text"))
    expect(page.locator("#composer-text")).to_have_value("A dragged word")


def test_text_from_an_office_program_is_pasted_as_text(page: Page) -> None:
    def paste(*types: str) -> bool:
        """Paste a picture with texts of some types. Return whether the browser inserts the text itself."""
        script = """types => {
            const data = new DataTransfer();
            data.items.add(new File(["x"], "picture.png", { type: "image/png" }));
            for (const type of types) data.setData(type, "1 2");
            const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
            return document.querySelector("#composer-text").dispatchEvent(event);
        }"""
        is_inserted: bool = page.evaluate(script, types)
        return is_inserted

    assert paste("text/plain", "text/html")
    expect(page.locator("ag-composer .file-name")).to_have_count(0)
    assert not paste("text/html")  # a picture of a web page
    expect(page.locator("ag-composer .file-name")).to_have_text("picture.png")


def test_a_message_waits_for_the_file_that_is_attached_to_it(page: Page) -> None:
    page.evaluate(
        """() => {
            const read = File.prototype.arrayBuffer;
            File.prototype.arrayBuffer = async function () {
                await new Promise(resolve => setTimeout(resolve, 1000));
                return read.call(this);
            };
        }"""
    )
    file = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"Low tide is at noon."}
    page.locator("ag-composer input[type=file]").set_input_files([file])  # type: ignore[list-item]
    ask(page, "When is low tide?")
    expect(page.locator("ag-message .file-name")).to_have_text("notes.txt")
    expect(page.locator("ag-composer .file-name")).to_have_count(0)


def test_a_server_with_keys_asks_for_one_and_keeps_it_for_the_tab(browser: Browser, context: BrowserContext) -> None:
    arguments = (f"tiny={models.get_path('successor-attention')}", "--lazy-load", "--api-key", "secret")
    with run_server(*arguments) as server:
        page = context.new_page()
        page.goto(server.url)
        for key in ("wrong", "secret\u200b", "secret"):  # a space without width comes with copied text
            page.locator("#api-key").fill(key)
            page.locator("#use-key").click()
            if key != "secret":
                expect(page.locator("#api-key")).to_have_value("")
        expect(page.locator(".model-picker summary")).to_contain_text("tiny")
        page.reload()
        expect(page.locator(".model-picker summary")).to_contain_text("tiny")
        expect(page.locator("#api-key")).to_have_count(0)
        other = context.new_page()  # another tab has a session of its own
        other.goto(server.url)
        expect(other.locator("#api-key")).to_be_visible()


def test_the_page_works_where_the_browser_blocks_its_storage(context: BrowserContext, server: ServerProcess) -> None:
    """As with all cookies blocked: reading the attribute raises an error."""
    for name in ("localStorage", "sessionStorage"):
        context.add_init_script(
            f"Object.defineProperty(window, '{name}', {{get() {{ throw new DOMException('no', 'SecurityError'); }}}});"
        )
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    choose_model(page, HOSTILE_MODEL)
    page.get_by_role("button", name="Light, dark or as the system").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    ask(page, "Hello")
    assert get_last_text(page)
    assert not problems


def test_the_page_sends_no_requests_while_it_waits_for_a_key(context: BrowserContext) -> None:
    with run_server(f"tiny={models.get_path('successor-attention')}", "--lazy-load", "--api-key", "secret") as server:
        page = context.new_page()
        paths: list[str] = []
        page.on("request", lambda request: paths.append(urlsplit(request.url).path))
        page.clock.install()
        page.goto(server.url)
        for key in ("wrong", "secret"):
            expect(page.locator("#api-key")).to_be_visible()
            expect(page.locator("#api-key")).to_have_value("")
            paths.clear()
            page.clock.run_for(10_000)
            page.wait_for_timeout(200)
            assert not [path for path in paths if not path.startswith("/web/")]
            page.locator("#api-key").fill(key)
            page.locator("#use-key").click()
        expect(page.locator(".model-picker summary")).to_contain_text("tiny")
        page.clock.run_for(10_000)
        page.wait_for_timeout(200)
        assert paths.count("/v1/models") <= 5  # one with the key, and one every three seconds


def test_a_tab_keeps_its_model_when_another_one_chooses_another(page: Page, server: ServerProcess) -> None:
    other = page.context.new_page()
    other.goto(server.url)
    choose_model(other, "tiny")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "Who answers?")
    assert request.value.post_data_json["model"] == HOSTILE_MODEL
    other.reload()
    expect(other.locator(".model-picker summary .model-name")).to_have_text("tiny")


def test_the_model_menu_keeps_the_focus_while_models_are_used(page: Page, server: ServerProcess) -> None:
    page.locator(".model-picker summary").click()
    button = page.get_by_role("button", name="Unload tiny")
    button.focus()
    server.complete("abc")  # changes the time of the last use
    for _ in range(2):
        with page.expect_response("**/v1/models"):
            pass
    expect(button).to_be_focused()


def test_the_model_menu_stays_open_while_a_model_is_loaded(page: Page) -> None:
    picker = page.locator(".model-picker")
    picker.locator("summary").click()
    for name in ("Unload colors", "Load colors"):
        picker.get_by_role("button", name=name).click()
    expect(picker.get_by_role("button", name="Unload colors")).to_be_enabled()
    page.locator("#composer-text").click()
    expect(picker.locator(".models")).to_be_hidden()


# --- the prefix tree


def run_random_operations(server: ServerProcess, count: int) -> None:
    """Chats that branch, grow and repeat, with pins and deletions between them."""
    choose = random.Random(7)
    words = ["tide", "moon", "sea", "wind", "sand", "gull"]
    paths = [[f"story {number} " * 12] for number in range(3)]
    for _ in range(count):
        path = choose.choice(paths)
        kind = choose.random()
        if kind < 0.35:
            paths.append(path := [*path[: choose.randint(1, len(path))], choose.choice(words) * 3])
        elif kind < 0.7:
            path.append(choose.choice(words) * choose.randint(1, 12))
        elif kind < 0.85 and (nodes := get_tree(server, "tiny")["nodes"]):
            action = choose.choice(("pin", "unpin", "forget"))
            server.post(f"/tree/{action}", {"model": "tiny", "id": choose.choice(nodes)["id"]})
            continue
        server.complete(" ".join(path[-8:]), max_tokens=1)


def check_tree_in_page(page: Page, server: ServerProcess) -> None:
    """The drawn nodes are those of the engine, with widths in proportion to their tokens."""
    choose_model(page, "tiny")
    page.locator(".tab").filter(has_text="Cache").click()
    expect(page.locator("g.node").first).to_be_visible()
    by_id = {node["id"]: node for node in get_tree(server, "tiny")["nodes"]}

    def read_drawn() -> list[dict[str, Any]]:
        script = """groups => groups.map(group => ({id: group.dataset.id, hidden: Number(group.dataset.hidden ?? 0),
            width: group.querySelector('rect').getBBox().width}))"""
        drawn: list[dict[str, Any]] = page.locator("g.node").evaluate_all(script)
        return drawn

    assert wait_until(60, lambda: sum(node["hidden"] or 1 for node in read_drawn()) == len(by_id))
    drawn = read_drawn()
    assert {node["id"] for node in drawn} <= set(by_id)
    alone = [node for node in drawn if not node["hidden"]]
    assert len(alone) > 10
    scales = [
        node["width"] / (by_id[node["id"]]["end"] - by_id[node["id"]]["start"]) for node in alone if node["width"] > 60
    ]
    assert max(scales) < 1.1 * min(scales)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.full)])
def test_the_tree_equals_that_of_the_engine_after_random_operations(
    page: Page, server: ServerProcess, count: int
) -> None:
    run_random_operations(server, count)
    check_tree_in_page(page, server)


def select_node(page: Page, label: str) -> None:
    """Click a node of the tree until it is selected: the tree may be drawn again during the click."""
    node = page.locator(f'g.node[aria-label*="{label}"]').first

    def click() -> bool:
        node.click()
        return "selected" in (node.get_attribute("class") or "")

    assert wait_until(60, click), f"the node with {label!r} is not selected"


def test_a_prefix_is_pinned_exported_continued_forked_and_forgotten(page: Page, server: ServerProcess) -> None:
    server.post(
        "/cache/clear", {"model": HOSTILE_MODEL}
    )  # long prefixes of other tests would leave no width for this one
    ask(page, "Tell me about lighthouses on the coast of Brittany.")
    page.locator(".tab").filter(has_text="Cache").click()
    label = "lighthouses on the coast"
    select_node(page, label)

    def press(name: str) -> None:
        page.locator(".card").get_by_role("button", name=name, exact=True).click()

    press("Pin")
    expect(page.locator("g.node.selected.pinned")).to_have_count(1)
    assert [found for found in get_tree(server, HOSTILE_MODEL)["nodes"] if found["pinned"] and label in found["text"]]
    with page.expect_download() as download:
        press("Export")
    assert download.value.suggested_filename.endswith(".tar")
    press("Unpin")
    expect(page.locator("g.node.selected:not(.pinned)")).to_have_count(1)
    press("Continue from here")
    expect(page.locator("ag-message")).to_have_count(2)
    expect(page.locator("ag-message").last).to_contain_text("strong")
    ask(page, "And in Ireland?")
    page.locator(".tab").filter(has_text="Cache").click()
    select_node(page, label)
    press("Fork")
    expect(page.locator("#composer-text")).to_have_value("Tell me about lighthouses on the coast of Brittany.")
    expect(page.locator("ag-message")).to_have_count(0)
    page.locator(".tab").filter(has_text="Cache").click()
    select_node(page, label)
    press("Forget")
    expect(page.locator(f'g.node[aria-label*="{label}"]')).to_have_count(0)
    assert not [found for found in get_tree(server, HOSTILE_MODEL)["nodes"] if label in found["text"]]


def test_a_prefix_that_ends_in_a_question_is_continued_in_the_composer(page: Page, server: ServerProcess) -> None:
    server.post("/cache/clear", {"model": HOSTILE_MODEL})
    for question in ("How high is the tide in Brest?", "How high is the tide in Calais?"):
        messages = [{"role": "system", "content": "You watch the sea."}, {"role": "user", "content": question}]
        server.post("/v1/chat/completions", {"model": HOSTILE_MODEL, "messages": messages})
    page.locator(".tab").filter(has_text="Cache").click()
    select_node(page, "You watch the sea")
    page.locator(".card").get_by_role("button", name="Continue from here", exact=True).click()
    expect(page.locator("#composer-text")).to_have_value("How high is the tide in")
    page.locator("#settings").click()
    expect(page.locator("ag-settings textarea").first).to_have_value("You watch the sea.")
    error = {"error": {"message": "the template raised: no user query found"}}
    page.route("**/apply-template", lambda route: route.fulfill(status=400, json=error))
    page.locator(".tab").filter(has_text="Cache").click()
    page.locator(".card").get_by_role("button", name="Continue from here", exact=True).click()
    expect(page.locator("ag-text-dialog textarea")).to_have_value(re.compile("You watch the sea"))


def test_a_click_counts_although_the_page_draws_during_it(page: Page, server: ServerProcess) -> None:
    """Facts that become longer must not move the buttons away from the pointer."""
    server.post("/cache/clear", {"model": HOSTILE_MODEL})
    ask(page, "Which lighthouse is the tallest one in Europe?")
    page.locator(".tab").filter(has_text="Cache").click()

    def press(selector: str, redraw: str) -> None:
        page.locator(selector).first.hover()
        page.locator(".card").evaluate("card => card.querySelector('dl')?.style.setProperty('min-height', '30rem')")
        page.mouse.down()
        page.locator("ag-tree").evaluate(redraw)
        page.mouse.up()

    press('g.node[aria-label*="lighthouse"]', "tree => tree.draw()")
    expect(page.locator('g.node.selected[aria-label*="lighthouse"]')).to_have_count(1)
    press(".card button:has-text('Pin')", "tree => tree.dispatchEvent(new CustomEvent('hover', { detail: null }))")
    expect(page.locator("g.node.selected.pinned")).to_have_count(1)


def build_large_tree(size: int) -> dict[str, Any]:
    """A tree of the contract with many nodes."""
    nodes: list[dict[str, Any]] = []
    for number in range(size):
        parent = nodes[number * 7919 % (len(nodes) // 3 + 1)] if nodes else None
        start = parent["end"] if parent else 0
        end = start + 16 + number * 104_729 % 400
        tiers = {"device": 0, "ram": 0, "disk": 0, "checkpoint": 0, ("device", "ram", "disk")[number % 3]: end - start}
        nodes.append(
            {
                **{"id": f"n{number}", "parent": parent and parent["id"], "start": start, "end": end},
                **{"text": f"prefix {number}", "tiers": tiers, "bytes": {"ram": 1, "disk": 1}, "checkpoints": []},
                **{"pinned": False, "hits": 1, "sharers": 1, "last_used_seconds_ago": 1.0, "seconds_saved": 0.1},
                **{"requests": [], "sequence": None, "folded": 0},
            }
        )
    return {"model": HOSTILE_MODEL, "version": 1, "block_size": 64, "nodes": nodes, "total_nodes": size}


def test_ten_thousand_nodes_are_drawn(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    tree = build_large_tree(LARGE_TREE_NODES)

    def respond(route: Route) -> None:
        route.fulfill(json=tree) if "since=" not in route.request.url else route.fulfill(status=304)

    page.route("**/tree?*", respond)
    page.locator("ag-tree").evaluate(
        "tree => tree.addEventListener('drawn', event => { tree.lastDrawing = event.detail; })"
    )
    page.locator(".tab").filter(has_text="Cache").click()
    expect(page.locator("g.node").nth(100)).to_be_attached()
    drawing = page.locator("ag-tree").evaluate("tree => { tree.draw(); return tree.lastDrawing; }")
    with capsys.disabled():
        count, milliseconds = drawing["rectangles"], drawing["milliseconds"]
        print(f"\n{LARGE_TREE_NODES:,} nodes: {count:,} rectangles in {milliseconds:.0f} ms")
    assert 100 < drawing["rectangles"] < LARGE_TREE_NODES
    assert drawing["milliseconds"] < 5000


def test_the_tree_of_an_adapter_is_sent_only_if_it_has_changed(page: Page) -> None:
    tree = build_large_tree(3) | {"model": "the model of the adapter"}
    page.route("**/tree?*", lambda route: route.fulfill(json=tree))
    with page.expect_request(lambda request: "/tree?" in request.url and "since=1" in request.url):
        page.locator(".tab").filter(has_text="Cache").click()


def test_live_requests_and_reasons_are_shown(page: Page, server: ServerProcess) -> None:
    page.locator(".tab").filter(has_text="Cache").click()
    expect(page.locator(".live-requests")).to_contain_text("Nothing is running")
    rows = page.locator(".request").filter(has_text="Why is the sky blue?")
    count = rows.count()
    for date in ("2026-11-16", "2026-11-17"):
        system = {
            "role": "system",
            "content": f"{'Be kind and brief. ' * 20} It was {date} when we began. Think twice.",
        }
        messages = [system, {"role": "user", "content": "Why is the sky blue?"}]
        server.post("/v1/chat/completions", {"model": HOSTILE_MODEL, "messages": messages})
    expect(rows).to_have_count(count + 2)  # the newest one is the first
    row = rows.first
    expect(row).to_contain_text("because:")
    row.get_by_role("button", name="Compare both texts").click()
    marks = page.locator("dialog.difference mark")
    expect(marks.first).to_contain_text("2026-11-16")
    expect(marks.filter(has_text="2026-11-17")).to_have_count(1)


def test_the_chat_can_be_used_after_going_back_from_the_reason_of_a_response(page: Page) -> None:
    ask(page, "Why was this computed?")
    page.locator(".cost").click()
    expect(page.locator("dialog.difference")).to_be_visible()
    page.go_back()
    expect(page.locator("dialog.difference")).to_be_hidden()
    ask(page, "And this?")
    assert "strong" in get_last_text(page)


def test_a_hidden_tab_with_the_cache_holds_no_connection(page: Page) -> None:
    def show(state: str) -> None:
        page.evaluate(
            """state => {
                Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
                document.dispatchEvent(new Event("visibilitychange"));
            }""",
            state,
        )

    with page.expect_request("**/events?*"):
        page.locator(".tab").filter(has_text="Cache").click()
    with page.expect_event("requestfailed", lambda request: "/events?" in request.url):
        show("hidden")
    with page.expect_request("**/events?*"):
        show("visible")
    expect(page.locator(".live-requests")).to_contain_text("Nothing is running")


def test_a_request_that_ends_while_the_view_opens_is_listed(page: Page, server: ServerProcess) -> None:
    def respond(route: Route) -> None:  # the list of requests is read before the tree, the events after it
        messages = [{"role": "user", "content": "Who asks between the list and the events?"}]
        server.post("/v1/chat/completions", {"model": HOSTILE_MODEL, "messages": messages})
        route.continue_()

    page.route("**/tree?*", respond, times=1)
    page.locator(".tab").filter(has_text="Cache").click()
    expect(page.locator(".request").first).to_contain_text("between the list and the events")


def test_the_shortcuts_work_with_the_characters_that_macos_types_for_them(page: Page) -> None:
    ask(page, "hello Mac")

    def press(key: str, code: str) -> None:
        event = {"key": key, "code": code, "altKey": True, "bubbles": True}
        page.locator("body").dispatch_event("keydown", event)

    press("™", "Digit2")
    expect(page.locator("ag-cache")).to_be_visible()
    press("¡", "Digit1")
    expect(page.locator("ag-message")).to_have_count(2)
    press("b", "KeyN")  # a keyboard with other letters
    expect(page.locator("ag-message")).to_have_count(2)
    press("Dead", "KeyN")
    expect(page.locator("ag-message")).to_have_count(0)


def test_the_views_work_with_the_keyboard_and_on_a_narrow_screen(page: Page) -> None:
    ask(page, "hello keyboard")
    page.keyboard.press("Alt+2")
    expect(page.locator(".tab[aria-current=page]")).to_have_text("Cache")  # as screen readers say it
    tree = page.locator("svg.icicle")
    expect(page.locator("g.node").first).to_be_visible()
    tree.focus()
    page.keyboard.press("Home")
    expect(page.locator("g.node.selected")).to_have_count(1)
    expect(page.locator(".card")).to_contain_text("Shared by")
    page.keyboard.press("Alt+1")
    page.set_viewport_size({"width": 380, "height": 700})
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 380
    expect(page.locator("ag-sidebar")).to_be_hidden()
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("ag-sidebar")).to_be_visible()
    unnamed = (
        "buttons => buttons.filter(button => !(button.getAttribute('aria-label') || button.textContent.trim())).length"
    )
    assert page.locator("button").evaluate_all(unnamed) == 0
