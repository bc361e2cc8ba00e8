"""The page in a real browser: what it shows, that hostile names run nothing, that no request leaves the loopback."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from browser import Browser, find_browser, open_browser
from drivetrain_tracking import JSONLTracker
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.spool.line import encode
from drivetrain_tracking.view.run_collection import RunCollection
from drivetrain_tracking.view.server import ViewServer
from logged_runs import BEGAN, start_line, value_lines, write_log

pytestmark = [
    pytest.mark.costly,
    pytest.mark.skipif(
        find_browser() is None,
        reason="no Chromium here: apt-get install chromium, to drive the page in a browser",
    ),
]

IS_READY = (
    "document.body.dataset.state === 'ready' && document.querySelectorAll('canvas[aria-label]').length === {}"
)
LABELS = "[...document.querySelectorAll('canvas')].map(one => one.getAttribute('aria-label'))"
HOSTILE = [
    "<script>window.wasRun = true; alert(1)</script>",
    '<img src=x onerror="window.wasRun = true">',
    "\"'`><svg onload=alert(1)>&amp;${alert(1)}{{1}}",
    "left \u202egpj.exe\u202c right \u2066x\u2069 \u200f",
    "__proto__",
    "a/" + "x" * 10_000,
    "line\nbreak\ttab\0null\x1b[31m",
    "\ud800 half",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    collection = RunCollection(folders)
    with ViewServer(collection) as server, collection:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


def open_page(browser: Browser, address: str, *, num_panels: int) -> None:
    browser.requests.clear(), browser.errors.clear(), browser.dialogs.clear()
    browser.open(address)
    browser.wait_for(IS_READY.format(num_panels))


def canvas_box(browser: Browser, number: int = 0) -> tuple[float, float, float, float]:
    box = browser.evaluate(
        f"(() => {{ const box = document.querySelectorAll('canvas')[{number}].getBoundingClientRect(); "
        "return [box.left, box.top, box.width, box.height]; })()"
    )
    return (box[0], box[1], box[2], box[3])


def test_runs_are_shown_zoomed_compared_and_followed(browser: Browser, tmp_path: Path) -> None:
    speed = {"throughput": {"samples_per_second": 120.5}, "memory": {"peak_bytes": 3e9}}
    for name, lr in (("one", 0.1), ("two", 0.2)):
        write_log(
            tmp_path / name, [start_line(name, {"lr": lr, "seed": 1}), *value_lines(range(101), **speed)]
        )
    with served(tmp_path) as address:
        open_page(browser, address, num_panels=3)
        loss, throughput, memory = browser.evaluate(LABELS)
        assert loss.startswith("loss: 2 curves, step 0 to step 100, values from ")
        assert throughput.startswith(
            "throughput/samples_per_second: 2 curves, step 0 to step 100, values from 108."
        )
        assert memory.startswith(
            "memory/peak_bytes: 2 curves, step 0 to step 100, values from 2.7 GB to 3.3 GB"
        )
        beside = browser.evaluate("document.querySelectorAll('#system canvas').length")
        assert beside == 2, "throughput and memory stand beside the loss"

        left, top, width, _ = canvas_box(browser)
        for kind, at in (
            ("mousePressed", 0.5),
            ("mouseMoved", 0.6),
            ("mouseMoved", 0.75),
            ("mouseReleased", 0.75),
        ):
            browser.mouse(kind, left + at * width, top + 60)
        browser.wait_for(f"!{LABELS}[0].includes('step 0 to')")
        zoomed = [label.split(", ")[1] for label in browser.evaluate(LABELS)]
        assert len(set(zoomed)) == 1, f"all panels show the same range: {zoomed}"
        tip = browser.wait_for("document.querySelector('.tip:not([hidden])')?.innerText")
        assert "one" in tip
        assert "two" in tip
        browser.evaluate("document.getElementById('reset').click()")
        browser.wait_for(f"{LABELS}[0].includes('step 0 to step 100')")

        browser.evaluate("document.querySelector('[data-view=differences]').click()")
        rows = browser.wait_for(
            "[...document.querySelectorAll('tr.differs')].map(row => row.innerText).join('|')"
        )
        assert rows.split() == ["lr", "0.1", "0.2"]
        browser.evaluate("document.querySelector('[data-view=curves]').click()")

        write_log(tmp_path / "one", value_lines(range(101, 151), **speed))
        browser.wait_for(f"{LABELS}[0].includes('step 0 to step 150')")
    assert (browser.errors, browser.dialogs) == ([], [])


def test_the_list_says_in_words_how_runs_ended(browser: Browser, tmp_path: Path) -> None:
    ends: list[tuple[str, RunState]] = [("good", "finished"), ("bad", "failed"), ("shot", "killed")]
    for name, state in ends:
        tracker = JSONLTracker(tmp_path / name)
        tracker.start(name, {})
        tracker.log({"loss": 1.0}, step=0)
        tracker.end(state)
    write_log(tmp_path / "open", [start_line("open"), *value_lines([1])])
    with served(tmp_path) as address:
        open_page(browser, address, num_panels=1)
        items = browser.evaluate("[...document.querySelectorAll('#runs li')].map(item => item.innerText)")
    lines = [[line.strip() for line in item.splitlines() if line.strip()] for item in items]
    assert sorted(lines) == [
        ["bad", "failed: it ended by an error, or without saying that it is finished"],
        ["good"],
        ["open", "●"],
        ["shot", "killed: it was stopped before its end"],
    ]


def test_axes_smoothing_and_the_choice_of_runs_and_metrics(browser: Browser, tmp_path: Path) -> None:
    nan = {"step": 60, "time": BEGAN + 60, "loss": "NaN"}
    write_log(tmp_path / "one", [start_line("one"), *value_lines(range(60), lr=0.5), nan])
    write_log(
        tmp_path / "two",
        [*value_lines(range(40)), *({**line, "attempt": 2} for line in value_lines(range(20, 30)))],
    )
    change = (
        "(() => {{ const one = document.getElementById('{}'); {}; one.dispatchEvent(new Event('{}')); }})()"
    )
    with served(tmp_path) as address:
        open_page(browser, address, num_panels=2)
        assert "× NaN, ┄ logged again" in browser.evaluate(LABELS)[0]
        browser.evaluate(change.format("axis", "one.value = 'relative'", "change"))
        browser.wait_for(f"{LABELS}[0].includes('0 s to 1:00') || {LABELS}[0].includes('0 s to 0:01:00')")
        browser.evaluate(change.format("smoothing", "one.value = 0.9", "input"))
        browser.evaluate(change.format("logarithmic", "one.checked = true", "change"))
        browser.wait_for(f"{LABELS}[0].includes('values from 0.5')")
        browser.evaluate(change.format("filter", "one.value = 'LR'", "input"))
        assert browser.evaluate("document.getElementById('metrics').innerText").split() == ["lr", "60"]
        browser.evaluate("document.querySelector('#metrics input').click()")
        browser.wait_for("document.querySelectorAll('canvas').length === 1")
        browser.evaluate("document.querySelector('#runs input').click()")
        browser.wait_for(f"{LABELS}[0].startsWith('loss: 1 curve,')")
    assert (browser.errors, browser.dialogs) == ([], [])


def test_the_page_is_reached_by_keyboard_and_every_control_has_a_name(
    browser: Browser, tmp_path: Path
) -> None:
    write_log(tmp_path, [start_line(), *value_lines(range(101))])
    with served(tmp_path) as address:
        open_page(browser, address, num_panels=1)
        for _ in range(20):
            browser.press("Tab")
            if browser.evaluate("document.activeElement.tagName") == "CANVAS":
                break
        browser.press("ArrowRight")
        assert browser.wait_for("document.querySelector('.spoken').textContent").startswith("step 50: ")
        browser.press("+")
        browser.wait_for(f"{LABELS}[0].includes('step 25 to step 75')")
        browser.press("Escape")
        browser.wait_for(f"{LABELS}[0].includes('step 0 to step 100')")
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "checkbox", "combobox", "slider", "searchbox", "image"}
    found = [node for node in nodes if not node["ignored"] and node["role"]["value"] in wanted]
    assert {node["role"]["value"] for node in found} >= {
        "button",
        "checkbox",
        "combobox",
        "slider",
        "searchbox",
    }
    assert [node for node in found if not node.get("name", {}).get("value")] == []


# The texts whose contrast with what is behind them is below that of the guidelines for accessible content (WCAG 2.2,
# 4.5 : 1), and the highest contrast of a pixel of the first curve's picture.
CONTRASTS = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((one) => one / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = parts(getComputedStyle(one).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const weak = [];
  for (const element of document.querySelectorAll("body *")) {
    const has_text = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!has_text || !element.checkVisibility() || element.disabled) continue;
    const found = contrast(parts(getComputedStyle(element).color), behind(element));
    if (found < 4.5) weak.push(`${element.tagName} ${element.textContent.trim().slice(0, 30)}: ${found.toFixed(1)}`);
  }
  const canvas = document.querySelector("canvas[aria-label]");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let curve = 1;
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 200) curve = Math.max(curve, contrast(pixels.slice(i, i + 3), behind(canvas)));
  return [weak, curve, light(behind(document.body))];
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_curves_are_readable_by_day_and_by_night(
    browser: Browser, tmp_path: Path, dark: bool
) -> None:
    write_log(tmp_path, [start_line(), *value_lines([3, 1, 2])])
    with served(tmp_path) as address:
        browser.open(address, dark=dark)
        browser.wait_for(IS_READY.format(1))
        weak, curve, background = browser.evaluate(CONTRASTS)
    assert weak == []
    assert curve >= 3
    assert (background < 0.1) == dark


def test_hostile_names_are_text_and_run_nothing(browser: Browser, tmp_path: Path) -> None:
    for number, name in enumerate(HOSTILE):
        config = {name: name}
        records = [start_line(name, config), {"event": "info", "time": BEGAN, "info": config}]
        values = {name: 1.5, "note": {name: name}}
        media = {name: {"kind": "text", "data": name, "caption": name}}
        write_log(tmp_path / f"run-{number}", [*records, *value_lines(range(3), **values, media=media)])
    named = tmp_path / "<img src=x onerror=alert(1)> \u202e'\""
    write_log(named, value_lines(range(3)))
    with served(tmp_path) as address:
        open_page(browser, address, num_panels=1 + len(HOSTILE))
        page = browser.evaluate("document.body.innerText")
        assert HOSTILE[0] in page
        assert HOSTILE[1] in page
        assert "left ⟨U+202E⟩gpj.exe" in page
        assert "<img src=x onerror=alert(1)> ⟨U+202E⟩'\"" in page
        assert "line⟨U+000A⟩break" in page
        assert "\u202e" not in page
        assert browser.evaluate("document.body.scrollWidth <= window.innerWidth"), (
            "a long name widens nothing"
        )
        for view in ("differences", "details"):
            browser.evaluate(f"document.querySelector('[data-view={view}]').click()")
            browser.wait_for(f"document.querySelector('#view-{view} select') !== null")
            assert (
                browser.evaluate(f"document.querySelectorAll('#view-{view} :is(script, img, svg)').length")
                == 0
            )
        shown = browser.evaluate("document.querySelector('#view-details').innerText")
        assert HOSTILE[0] in shown or "<" in shown
        assert browser.evaluate("window.wasRun === undefined")
        assert browser.evaluate(
            "({}).polluted === undefined && Object.getPrototypeOf({}) === Object.prototype"
        )
    assert (browser.errors, browser.dialogs) == ([], [])


def test_an_inline_script_would_be_refused(browser: Browser, tmp_path: Path) -> None:
    write_log(tmp_path, value_lines(range(3)))
    with served(tmp_path) as address:
        open_page(browser, address, num_panels=1)
        browser.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.wasRun = true\">');"
            "document.head.append(Object.assign(document.createElement('script'), {text: 'window.wasRun = true'}))"
        )
        outside = browser.evaluate("fetch('http://127.0.0.2/').then(() => 'sent', () => 'refused')")
        assert (outside, browser.evaluate("window.wasRun === undefined")) == ("refused", True)
    assert any("Content Security Policy" in error for error in browser.errors)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("import('/smoothing.js').then(m => m.smooth([1, 1, 1], 0.9))", [1, 1, 1]),
        ("import('/smoothing.js').then(m => m.smooth([0, 1], 0.5))", [0, 2 / 3]),
        ("import('/smoothing.js').then(m => m.smooth([3, 1], 0))", [3, 1]),
        ("import('/scale.js').then(m => m.linearTicks(0, 1, 5))", [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ("import('/scale.js').then(m => m.linearTicks(5, 5, 5))", [5]),
        ("import('/scale.js').then(m => m.linearTicks(-1e308, 1e308, 4).length > 0)", True),
        ("import('/scale.js').then(m => m.logarithmicTicks(0.01, 1000, 10))", [0.01, 0.1, 1, 10, 100, 1000]),
        ("import('/scale.js').then(m => m.durationTicks(0, 600, 5))", [0, 120, 240, 360, 480, 600]),
        ("import('/scale.js').then(m => m.valueRange([{x: [0, 1, 9], y: [-2, 4, 99]}], 0, 1, true))", [4 / 2, 8]),
        ("import('/nearest.js').then(m => [-5, 1.4, 1.6, 99].map(x => m.nearestIndex([0, 1, 2], x)))", [0, 1, 2, 2]),
        ("import('/nearest.js').then(m => m.nearestIndex([], 1))", -1),
        ("import('/text.js').then(m => [0, 1e-9, 123456.7, 1e21, 0.1 + 0.2].map(m.formatNumber))",
         ["0", "1e-9", "123460", "1e21", "0.3"]),
        ("import('/text.js').then(m => [5, 75, 3725, 90061].map(m.formatSeconds))",
         ["5 s", "0:01:15", "1:02:05", "1 d 1:01:01"]),
    ],
)  # fmt: skip
def test_the_pages_arithmetic(browser: Browser, tmp_path: Path, expression: str, value: object) -> None:
    write_log(tmp_path, value_lines(range(3)))
    with served(tmp_path) as address:
        browser.open(address)
        assert browser.evaluate(expression) == (
            pytest.approx(value) if isinstance(value, list) and not isinstance(value[0], str) else value
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_million_points_are_shown_while_they_are_read_and_zoomed(
    browser: Browser, tmp_path: Path
) -> None:
    last = 10_000_000 - 1
    with (tmp_path / "log.jsonl").open("wb") as file:
        for step in range(last + 1):
            value = 1000.0 if step == 7_654_321 else step % 97 / 97
            file.write(encode({"step": step, "time": BEGAN + step, "loss": value}))
    with served(tmp_path) as address:
        browser.open(address)
        browser.wait_for("document.getElementById('status').textContent.includes('reading')")
        browser.wait_for("document.querySelectorAll('canvas[aria-label]').length === 1")
        ends = time.monotonic() + 600
        while browser.evaluate("document.body.dataset.state") != "ready":
            assert time.monotonic() < ends
            time.sleep(0.5)
        said = browser.wait_for(f"{LABELS}[0].includes('step 9999999,') && {LABELS}[0]")
        assert "values from -50 to 1050" in said, f"the one high value among ten million is shown: {said}"
        left, top, width, _ = canvas_box(browser)
        for kind, at in (("mousePressed", 0.2), ("mouseMoved", 0.3), ("mouseReleased", 0.3)):
            browser.mouse(kind, left + at * width, top + 60)
        browser.wait_for(f"!{LABELS}[0].includes('values from -50')")


def test_no_request_leaves_the_loopback(tmp_path: Path) -> None:
    write_log(tmp_path / "run", [start_line(HOSTILE[1]), *value_lines(range(3))])
    with open_browser(tmp_path) as own, served(tmp_path / "run") as address:
        open_page(own, address, num_panels=1)
        asked = {urlsplit(request).netloc for request in own.requests}
        assert asked == {urlsplit(address).netloc}
    log = json.loads((tmp_path / "net.json").read_text())
    kinds = {number: name for name, number in log["constants"]["logEventTypes"].items()}
    events = [(kinds[event["type"]], event.get("params", {})) for event in log["events"]]
    asked = {
        urlsplit(given["url"]).netloc for _, given in events if given.get("initiator") == address.rstrip("/")
    }
    assert asked == {urlsplit(address).netloc}, (
        "requests of other origins are the browser's own, to its maker"
    )
    # The browser opens a UDP socket to learn whether the machine has IPv6, and sends nothing through it.
    assert [given for kind, given in events if kind == "UDP_BYTES_SENT"] == []
