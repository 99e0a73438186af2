"""Every page as a browser shows it: each figure drawn, nothing complained of, what the mouse points at said, on a phone and a desk, dark
and light; and the live page as it follows a run."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; Debian's package is `chromium`"),
    pytest.mark.skipif(DRIVER is None, reason="no chromedriver on this machine; Debian's package is `chromium-driver`"),
]  # fmt: skip
KINDS = ["run", "replay", "timeline", "bench", "comparison", "advice", "paper"]
LATER = [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in ("run", "timeline")]
PAPER = {True: "rgb(18, 24, 31)", False: "rgb(245, 247, 250)"}
TEXT = {True: "rgb(230, 235, 240)", False: "rgb(28, 39, 51)"}

SEEN = """
var box = document.documentElement, figures = [...document.querySelectorAll(".js-plotly-plot")];
return {wide: box.scrollWidth, room: box.clientWidth, figures: figures.length,
  drawn: figures.filter(f => f.querySelector(".main-svg") && f.getBoundingClientRect().height > 50).length,
  marks: figures.filter(f => f.querySelector(".plot path, .plot image, .plot text, .cartesianlayer path, .hm image")).length,
  paper: getComputedStyle(document.body).backgroundColor,
  text: [...document.querySelectorAll(".js-plotly-plot .xtick text")].map(t => t.style.fill)[0] || "",
  reach: document.querySelectorAll("[tabindex='0'][aria-label]").length}
"""


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: pip install -e '.[dev]'"
    )
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for one in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(one)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


def open_page(browser, address, width, dark):
    """The page on a screen so wide; what its console says is an error."""
    browser.get("about:blank")  # a live page of the test before asks on, and nobody answers
    browser.get_log("browser")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get(address)
    until(
        browser,
        "return [...document.querySelectorAll('.js-plotly-plot')].every(f => f.querySelector('.main-svg'))",
    )
    assert browser.get_log("browser") == []


def until(browser, script, seconds=20):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, 0.1).until(lambda driver: driver.execute_script(script))


@pytest.mark.parametrize(
    ("kind", "width", "dark"),
    [(kind, 390, True) for kind in KINDS]
    + [("run", 1366, False), ("replay", 390, False), ("replay", 1366, True)]
    + [pytest.param(kind, 1366, False, marks=pytest.mark.long) for kind in KINDS if kind != "run"],
)
def test_every_figure_is_drawn_on_every_screen(all_pages, browser, kind, width, dark):
    open_page(browser, all_pages[kind].as_uri(), width, dark)
    seen = browser.execute_script(SEEN)
    assert seen["wide"] <= seen["room"] <= width, "scrolls sideways"
    assert seen["figures"] >= (10 if kind == "run" else 1)
    assert seen["drawn"] == seen["figures"]
    assert seen["marks"] == seen["figures"], "a figure without a mark in it"
    assert seen["reach"] >= seen["figures"]  # by keyboard
    assert (seen["paper"], seen["text"]) == (PAPER[dark], TEXT[dark])


TITLES = """
return [...document.querySelectorAll(".js-plotly-plot .annotation-text")].map(t => t.getBoundingClientRect())
  .map(b => [b.left, b.top, b.right, b.bottom])
"""


def test_a_map_of_many_panels_can_be_read_on_a_phone(all_pages, browser):
    open_page(browser, all_pages["paper"].as_uri(), 390, dark=False)
    boxes = browser.execute_script(TITLES)
    assert len(boxes) == 6
    for one, other in itertools.combinations(boxes, 2):
        beside = one[2] <= other[0] or other[2] <= one[0]
        assert beside or one[3] <= other[1] or other[3] <= one[1], "titles lie on one another"


POINT = """
var panel = document.querySelectorAll(".js-plotly-plot")[arguments[0]].querySelector(".nsewdrag");
panel.scrollIntoView({block: "center"});  // a figure of many panels is taller than the screen
var box = panel.getBoundingClientRect();
return [box.left, box.top, box.width, box.height]
"""


# plotly says it in a frame of its own, which a busy machine draws late
TOLD = """
var done = arguments[0], left = 8;
(function look() {
  if (document.querySelector(".hoverlayer .hovertext")) done(true);
  else if (left-- == 0) done(false);
  else setTimeout(look, 50);
})()
"""


@pytest.mark.parametrize("kind", ["run", "timeline", *LATER])
def test_what_the_mouse_points_at_is_said(all_pages, browser, kind):
    """A walk of the mouse across each figure: a text appears somewhere."""
    open_page(browser, all_pages[kind].as_uri(), 1366, dark=False)
    silent = []
    for i in range(browser.execute_script("return document.querySelectorAll('.js-plotly-plot').length")):
        left, top, width, height = browser.execute_script(POINT, i)
        if not any(
            _said(browser, left + x * width, top + y * height)
            for y in (0.5, 0.8, 0.2, 0.95)
            for x in (0.3, 0.5, 0.1, 0.7)
        ):
            silent.append(i)
    assert silent == []
    assert browser.get_log("browser") == []


def _said(browser, x, y):
    for dx in (0, 2):
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x + dx, "y": y})
    return browser.execute_async_script(TOLD)


def test_an_event_is_on_the_page_of_its_run(all_pages, browser):
    open_page(browser, all_pages["run"].as_uri(), 1366, dark=False)
    assert "rail lost" in browser.execute_script("return document.body.innerText")


@pytest.fixture
def followed(tmp_path):
    """(a run's folder, the server of its page, what writes a mode's entries)"""
    pytest.importorskip("uvicorn", reason="pip install 'moeyard[live]'")
    from moeyard.live.server import Server

    def write(mode, *entries):
        (tmp_path / mode).mkdir(exist_ok=True)
        with (tmp_path / mode / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in entries)

    server = Server(tmp_path, order=lambda asked: "done")
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield tmp_path, server, write
    server.stop()
    thread.join(10)


def a_step(number, nodes=1, rails=2):
    rows = [[n + r for r in range(rails)] for n in range(nodes)]
    return {
        "step": number,
        "seconds": 0.5 + number,
        "loss": 2.0,
        "rows_per_rail": {"out": rows, "in": rows},
    }


def test_the_live_page_follows_and_shows_a_cut_rail(followed, browser):
    folder, server, write = followed
    (folder / "options.json").write_text(json.dumps({"steps": 9, "modes": ["moeyard"]}))
    write("moeyard", a_step(0))
    browser.get(server.address)
    until(browser, "return document.body.innerText.includes('1 of 9')")
    write("moeyard", a_step(1), {"step": 1, "event": "rail lost", "detail": "node 0 rail 1"})
    until(browser, "return document.body.innerText.includes('rail lost')", 4)  # it looks every second
    write("moeyard", a_step(2))
    until(browser, "return document.body.innerText.includes('3 of 9')", 4)
    severe = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert severe == []


LIVE = """
var box = document.documentElement, svg = document.getElementById("seconds");
return {wide: box.scrollWidth, room: box.clientWidth, paper: getComputedStyle(document.body).backgroundColor,
  lines: [...svg.querySelectorAll("polyline")].map(l => getComputedStyle(l).stroke + l.getAttribute("stroke-dasharray")),
  names: [...document.querySelector(".names").children].map(n => n.textContent),
  buttons: document.querySelectorAll("#buttons button[aria-label]").length,
  reach: document.querySelectorAll("#rails[tabindex='0'][aria-label]").length}
"""


@pytest.mark.parametrize(("width", "dark"), [(390, True), (390, False), (1366, True), (1366, False)])
def test_the_live_page_tells_many_modes_apart_on_every_screen(followed, browser, width, dark):
    folder, server, write = followed
    modes = ["plain", "direct", "home", "replicas", "shadow", "prophet", "sync", "all"]
    (folder / "options.json").write_text(json.dumps({"steps": 9, "modes": modes}))
    for mode in modes:
        write(mode, a_step(0, 4, 8), a_step(1, 4, 8))
    open_page(browser, server.address, width, dark)
    until(browser, "return document.querySelectorAll('#seconds polyline').length == 8")
    seen = browser.execute_script(LIVE)
    assert seen["wide"] <= seen["room"] <= width, "scrolls sideways"
    assert seen["paper"] == PAPER[dark]
    assert len(set(seen["lines"])) == len(modes)
    assert sorted(seen["names"]) == sorted(modes)
    assert (seen["buttons"], seen["reach"]) == (3 * 4 * 8, 1)


CUT = """
import sys
from moeyard.cli.train import in_lab
from moeyard.train import Options

options = Options(sys.argv[1], modes=("moeyard",), steps=6, batch=1, length=32, compute=200000.0, timeout=4.0, faults=((2, "break", 1, 1, 0.0),))
in_lab("lab-2x2", options, "rails", quiet=True)
"""


@pytest.mark.long
def test_the_live_page_of_a_real_run_shows_its_cut_rail_within_two_steps(root, followed, browser, rails):
    """The rail is cut in step 2, counted from 0: whoever looks sees it lost before step 4 has ended."""
    folder, server, _ = followed
    job = subprocess.Popen(
        [sys.executable, "-c", CUT, str(folder)], env=os.environ | {"PYTHONPATH": str(root / "src")}
    )
    try:
        browser.get(server.address)
        until(browser, "return document.body.innerText.includes('rail lost')", 120)
        shown = browser.execute_script("return document.getElementById('now').innerText")
        done = int(shown.split(" of ")[0].split()[-1])
        assert done <= 4, shown
        assert "node 1 rail 1" in browser.execute_script("return document.getElementById('events').innerText")
        assert job.wait(120) == 0
        until(browser, "return document.body.innerText.includes('6 of 6')", 10)
    finally:
        job.kill()
        job.wait()
