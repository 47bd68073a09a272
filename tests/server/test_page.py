"""The chat page in a real browser, against a server that answers what a test says."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

import pytest
from page_backend import SAMPLING, Seen, until

pytestmark = pytest.mark.slow

MARKDOWN = """# Title

Some **bold**, *slanted* and ***both***, `code with <b>`, ~~gone~~, a_snake_case and 2 * 3 * 4.
A second line with [a link](https://example.com/x "title").

```python
def f(x):
\treturn x  # <script>
```

1. first
   - inner

     still inner
   - inner two
2. second
3. third

| a | b |
|:-:|--:|
| 1 \\| 2 | `x` |

> quoted
> text

- [x] done
- [ ] open

---

7. seven
"""


def test_an_answer_is_streamed_and_the_next_question_carries_the_conversation(seen, backend):
    page = seen.ready()
    assert page.title() == "LFM2.5-1.2B-Instruct · lfmfast"
    backend.answer = "Paris is the **capital**."
    seen.ask("What is the capital?\nOf France")
    seen.ended()
    assert seen.answer.inner_text() == "Paris is the capital."
    assert page.locator(".facts").inner_text().startswith("4 tokens · 87.7 tokens/s · first after ")
    assert "12 of 30 prompt tokens cached" in page.locator(".facts").inner_text()
    assert page.inner_text("#context") == "34 of 4096 tokens of context used"
    assert page.evaluate("document.activeElement.id") == "input"
    seen.ask("And of Spain?")
    seen.ended()
    assert backend.bodies[0]["stream"] is True
    assert backend.bodies[0]["messages"] == [{"role": "user", "content": "What is the capital?\nOf France"}]
    assert [message["role"] for message in backend.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert backend.bodies[1]["messages"][1]["content"] == backend.answer
    assert not set(backend.bodies[0]) & set(SAMPLING), "values that nobody set are the server's business"


def test_shift_enter_starts_a_line_and_blank_messages_are_not_sent(seen, backend):
    page = seen.ready()
    page.fill("#input", "   ")
    page.press("#input", "Enter")
    assert page.is_disabled("#send")
    page.fill("#input", "one")
    page.press("#input", "Shift+Enter")
    page.type("#input", "two")
    page.click("#send")
    seen.ended()
    assert [body["messages"][0]["content"] for body in backend.bodies] == ["one\ntwo"]


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stop_ends_the_request_and_keeps_what_came(seen, backend, how):
    page = seen.ready()
    backend.answer, backend.pieces, backend.hold_after = "abcdefgh", 2, 2
    seen.ask()
    page.wait_for_selector(".assistant >> text=abcd")
    assert page.get_attribute("#messages", "aria-busy") == "true"
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    seen.ended()
    assert backend.is_gone.wait(10), "the server is still at it"
    assert seen.answer.inner_text() == "abcd"
    assert page.locator(".facts").inner_text().startswith("Stopped")
    assert page.get_attribute("#messages", "aria-busy") == "false"
    backend.hold_after, backend.answer = None, "efgh"
    page.click("button:text-is('Continue')")
    seen.ended()
    assert seen.answer.inner_text() == "abcdefgh"
    assert backend.bodies[-1]["continue_final_message"] is True
    assert backend.bodies[-1]["messages"][-1] == {"role": "assistant", "content": "abcd"}


def test_stop_while_the_prompt_is_read(seen, backend):
    page = seen.ready()
    backend.hold_after = 0
    seen.ask()
    page.wait_for_selector("text=Reading the prompt, 40 %")
    page.keyboard.press("Escape")
    seen.ended()
    assert backend.is_gone.wait(10)
    seen.ask("again")  # the empty answer is not part of the conversation
    page.wait_for_selector("#stop:visible")
    while len(backend.bodies) < 2:  # the page shows the button before the request has arrived
        page.wait_for_timeout(10)
    assert [message["role"] for message in backend.bodies[1]["messages"]] == ["user", "user"]


def test_markdown(seen, backend):
    page = seen.ready()
    backend.answer, backend.pieces = MARKDOWN, 3
    seen.ask()
    seen.ended()

    def text(selector: str) -> list[str]:
        return seen.answer.locator(selector).all_inner_texts()

    assert text("h3") == ["Title"]
    assert text("strong") == ["bold", "both"] and text("em")[0] == "slanted" and text("del") == ["gone"]
    assert text("p code") == ["code with <b>"]
    assert "a_snake_case and 2 * 3 * 4.\nA second line" in text("p")[0]
    link = seen.answer.locator("a")
    assert link.get_attribute("href") == "https://example.com/x" and "noopener" in link.get_attribute("rel")
    assert seen.answer.locator("pre").text_content() == "def f(x):\n\treturn x  # <script>"
    assert seen.answer.locator(".code span").inner_text() == "python"
    assert seen.answer.locator("ol").first.locator("> li").count() == 3
    assert text("ol ul > li")[1] == "inner two" and "still inner" in text("ol ul > li")[0]
    assert text("th") == ["a", "b"] and text("td") == ["1 | 2", "x"]
    assert seen.answer.locator("td").nth(1).evaluate("node => getComputedStyle(node).textAlign") in ("right", "end")
    assert text("blockquote") == ["quoted\ntext"]
    assert seen.answer.locator("li.task input:checked").count() == 1 and seen.answer.locator("li.task").count() == 2
    assert seen.answer.locator("hr").count() == 1 and seen.answer.locator("ol").last.get_attribute("start") == "7"
    whole = seen.answer.inner_html()
    page.evaluate("showMarkdown(window.other = document.createElement('div'), messages.at(-1).content)")
    assert page.evaluate("other.innerHTML") == whole, "made piece by piece it differs from made at once"


def test_code_is_copied_without_marks(seen, backend):
    page = seen.ready()
    seen.context.grant_permissions(["clipboard-read", "clipboard-write"])
    backend.answer = "```c\nint x;\n\n```\n\nafter"
    seen.ask()
    seen.ended()
    page.get_by_role("button", name="Copy the c code").click()
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "int x;\n"
    page.get_by_role("button", name="Copy the answer").click()
    until(page, "navigator.clipboard.readText().then(text => text.endsWith('after'))")


ATTACKS = [
    "<think><img src=x onerror=window.hit=1></think><form action='https://example.com'><button>x</button></form>",
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "![x](javascript:window.hit=1) ![y](https://example.com/pixel.png)",
    "[click](javascript:window.hit=1) [a](  JaVaScRiPt:window.hit=1) [b](data:text/html,<script>window.hit=1</script>)",
    "[c](vbscript:x) <javascript:window.hit=1> [d](\\x01javascript:window.hit=1)",
    "<svg onload=window.hit=1><style>body{display:none}</style><iframe src='https://example.com'></iframe>",
    "```html\n<script>window.hit = 1</script>\n```",
    '```"><img src=x onerror=window.hit=1>\nx\n```',
    "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| <script>window.hit=1</script> | [x](javascript:hit=1) |",
    '[x](https://example.com/"onmouseover="window.hit=1) <https://example.com/"onclick=window.hit=1>',
    "<base href='https://example.com/'><meta http-equiv=refresh content='0;url=https://example.com'>",
]


def test_html_of_an_answer_is_text(seen, backend):
    page = seen.ready()
    backend.answer, backend.pieces = "\n\n".join(ATTACKS), 5
    seen.ask("<img src=x onerror='window.hit = 1'>")
    seen.ended()
    page.locator("summary").first.click()
    for link in page.locator(".message a").all():
        assert re.match(r"https://example\.com/", link.get_attribute("href"))
        assert link.evaluate("node => [...node.attributes].map(a => a.name).sort().join()") == "href,rel,target"
    tags = page.locator(".message .body *").evaluate_all("nodes => [...new Set(nodes.map(node => node.localName))]")
    assert not set(tags) & {"script", "img", "svg", "style", "iframe", "form", "base", "meta", "object", "embed"}
    assert page.evaluate("window.hit") is None
    assert "<script>window.hit = 1</script>" in page.locator(".message.assistant .body").inner_text()


def test_the_policy_stops_what_gets_in_by_another_way(browser, backend):
    seen = Seen(browser, backend)
    page = seen.ready()
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hit = 1";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.hit = 2'>");
    }""")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None
    assert any("Content Security Policy" in error for error in seen.errors)
    seen.context.close()


@pytest.mark.parametrize("text", [
    "*" * 30000, "**a " * 8000, "[" * 20000, "[]" * 10000 + "(" * 5000, "`" * 199 + "a`" * 8000, "> " * 5000 + "x",
    "".join("  " * i + "- x\n" for i in range(300)), "|" * 20000 + "\n" + "|-" * 10000, "_a*" * 9000, "<" * 20000, "\\" * 9001,
    "```\n" * 5000, "1. " * 5000, "h" * 20000 + "http://" * 3000, "~~a" * 9000, "a\n" * 8000,
], ids=range(16))  # fmt: skip
def test_hostile_markdown_does_not_hang_the_page(seen, backend, text):
    page = seen.ready()
    page.set_default_timeout(20000)
    kept = page.evaluate("""text => {
        const box = document.createElement("div");
        for (const share of [0.5, 0.75, 1]) showMarkdown(box, text.slice(0, text.length * share));
        return box.querySelectorAll("*").length;
    }""", text)  # fmt: skip
    assert kept > 0


def test_the_models_sampling_values_are_shown_and_own_ones_are_sent(seen, backend):
    page = seen.ready()
    page.click("#open-settings")
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "0.3"
    assert page.get_by_label("Min p").get_attribute("placeholder") == "0.15"
    assert page.get_by_label("Seed").get_attribute("placeholder") == "random"
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Most tokens").fill("12")
    page.get_by_label("Top p").fill("3")
    assert page.locator(".invalid >> text=/less than or equal to 1/").is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings", "focus goes back to where it was"
    seen.ask()
    seen.ended()
    body = backend.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["temperature"] == 0.7 and body["max_tokens"] == 12 and "top_p" not in body and "min_p" not in body
    page.reload()  # settings and the conversation are still there
    seen.ready()
    assert seen.answer.inner_text() == "Hello."
    page.click("#open-settings")
    assert page.get_by_label("Temperature").input_value() == "0.7"
    page.get_by_role("button", name="Use the model's values").click()
    page.get_by_role("button", name="Close").click()
    page.click("#new")
    assert page.locator(".message").count() == 0 and page.is_visible("#empty")
    seen.ask()
    seen.ended()
    assert "temperature" not in backend.bodies[1] and len(backend.bodies[1]["messages"]) == 2


def test_errors_are_shown_and_can_be_tried_again(seen, backend):
    page = seen.ready()
    backend.error = (400, {"message": "5000 tokens are more than the context of 4096", "type": "exceed_context_size_error"})
    seen.ask()
    page.wait_for_selector(".failure >> text=5000 tokens are more")
    assert "Error: 5000 tokens are more" in page.inner_text("#said")
    backend.error = None
    page.click("text=Try again")
    seen.ended()
    assert seen.answer.inner_text() == "Hello." and page.locator(".failure:visible").count() == 0
    assert len(backend.bodies[1]["messages"]) == 1
    backend.late_error = "the model failed"
    seen.ask("and now?")
    page.wait_for_selector(".failure >> text=the model failed")
    backend.late_error, backend.cut_after, backend.pieces = None, 1, 3
    page.click("text=Try again")
    page.wait_for_selector(".failure >> text=The connection ended before the answer did.")
    assert seen.answer.inner_text() == "Hel"


def test_a_server_that_loads_or_goes_away(seen, backend):
    page = seen.ready()
    backend.loading = True
    page.reload()
    page.wait_for_selector("#state >> text=loading the model")
    backend.loading = False
    seen.ready()
    backend.stop()
    seen.ask()
    page.wait_for_selector(".failure >> text=The server can't be reached")
    page.wait_for_selector("#state[data-state=bad]")


def test_a_key_is_asked_for_and_sent(seen, backend):
    seen.ready()
    backend.key = "secret"
    page = seen.page
    page.reload()
    page.wait_for_selector("#state >> text=needs an API key")
    seen.ask()
    page.wait_for_selector(".failure >> text=Invalid API Key")
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type("secret")
    page.keyboard.press("Tab")
    seen.ready()
    page.keyboard.press("Escape")
    page.click("text=Try again")
    seen.ended()
    assert seen.answer.inner_text() == "Hello."
    assert "secret" not in json.dumps(page.evaluate("Object.values(localStorage)"))


def test_keyboard_and_names(seen, backend):
    page = seen.ready()
    backend.answer = "Some **answer**."
    seen.ask("question")
    seen.ended()
    assert page.inner_text("#said") == "Some answer."
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, textarea, select, a")].filter(node =>
        !(node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.length)).map(node => node.outerHTML)""")
    assert unnamed == []
    page.evaluate("document.activeElement.blur()")
    names: list[str] = []
    for _ in range(10):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label') "
                                   "|| document.activeElement.textContent"))  # fmt: skip
    assert "Skip to the message field" in names[:2]
    order = ["new", "open-settings", "Copy your message", "Edit your message", "Copy the answer", "Regenerate", "input"]
    assert [name for name in names if name in order] == order


def test_regenerate_and_edit(seen, backend):
    page = seen.ready()
    for text in ("one", "two"):
        seen.ask(text)
        seen.ended()
    backend.answer = "Another."
    page.click("button:text-is('Regenerate')")
    seen.ended()
    assert seen.answer.inner_text() == "Another." and len(backend.bodies[2]["messages"]) == 3
    page.locator(".message.user").first.hover()
    page.locator("button:text-is('Edit')").first.click()
    assert page.locator(".message").count() == 0 and page.input_value("#input") == "one"


@pytest.mark.parametrize("width", [320, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_have_no_sideways_scroll(browser, backend, width, scheme):
    seen = Seen(browser, backend, viewport={"width": width, "height": 700}, color_scheme=scheme)
    page = seen.ready()
    table = "| " + " | ".join(["long words"] * 9) + " |\n" + "|-" * 9
    backend.answer = f"{MARKDOWN}\n{'x' * 400}\n\n```\n{'y' * 400}\n```\n\n{table}\n"
    seen.ask("w" * 300)
    seen.ended()
    sizes = "[document.documentElement, document.body, scroller].map(node => node.scrollWidth - node.clientWidth)"
    assert page.evaluate(sizes) == [0, 0, 0]
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 200) == (scheme == "dark")
    seen.context.close()


def test_scrolling_up_is_respected_while_an_answer_grows(seen, backend):
    page = seen.ready()
    backend.answer, backend.pieces, backend.hold_after = "line\n\n" * 200, 6, 100
    seen.ask()
    until(page, "scroller.scrollHeight > 2500 && scroller.scrollTop > 1000")
    assert page.is_hidden("#to-end")
    page.wait_for_timeout(200)
    page.evaluate("scroller.scrollTop = 0")
    page.wait_for_selector("#to-end:visible")
    page.evaluate("messages.at(-1).content += 'more\\n\\nmore\\n\\n'; draw(messages.at(-1))")
    assert page.evaluate("scroller.scrollTop") == 0
    page.click("#to-end")
    until(page, "atEnd()")


def test_the_page_is_one_answer_that_a_browser_may_keep(backend):
    with urllib.request.urlopen(backend.address) as answer:
        body, headers = answer.read().decode(), answer.headers
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", body) and "<link rel=\"stylesheet\"" not in body
    again = urllib.request.Request(f"{backend.address}/index.html", headers={"If-None-Match": headers["ETag"]})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(again)
    assert error.value.code == 304
    error.value.close()


def test_with_the_real_server(browser, live):
    live.address = live.url
    seen = Seen(browser, live)
    page = seen.ready()
    page.click("#open-settings")
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "0.1"
    page.get_by_label("Temperature").fill("0")
    page.keyboard.press("Escape")
    for question, answer in (("My name is Ada.", "Nice to meet you, Ada!"), ("What is my name?", "Your name is Ada.")):
        seen.ask(question)
        seen.ended()
        assert seen.answer.inner_text() == answer
    assert re.search(r"\d tokens/s · first after .* of \d+ prompt tokens cached", page.locator(".facts").last.inner_text())
    assert re.fullmatch(r"\d+ of 2048 tokens of context used", page.inner_text("#context"))
    page.click("#new")
    seen.ask("Tell me a story.")
    page.keyboard.press("Escape")
    seen.ended()
    seen.ask("word " * 3000)
    page.wait_for_selector(".failure >> text=begin a new chat")
    assert (seen.errors, seen.foreign) == ([], [])
    seen.context.close()
