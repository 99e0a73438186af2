"""Pages of replays and simulations, runs compared; and every page as a phone and a dark screen show it."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from tests.report import sample
from typer.testing import CliRunner

import moeyard as my
from moeyard.advise import IDEAS, Advice, Choice
from moeyard.breakeven import Grid
from moeyard.cli.app import app
from moeyard.errors import InvalidFile, MoeyardError
from moeyard.formats.replays import save_replay
from moeyard.model import STAND_IN
from moeyard.replay.result import FIGURES, Replay, Way
from moeyard.report import write_report
from moeyard.report.advice import advice_page
from moeyard.report.compare import compare_runs, comparison_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def a_replay(folder, scale=1.0, forecast="ahead"):
    steps = tuple(range(0, 50, 10))
    ways = tuple(
        Way(planner, "auto", {name: scale * factor * np.linspace(1, 2, 5) for name in FIGURES})
        for planner, factor in (("static", 2.0), ("quota", 1.0))
    )
    rows = {"static": np.arange(20.0).reshape(5, 4), "quota": np.ones((5, 4))}
    asked = {"forecast": forecast, "network": "estimate", "overlap": True, "slots": 1}
    found = Replay(
        asked, {"trace": "x"}, steps, np.full(5, 0.5), np.array([np.nan, 0.1, 0.2, 0.1, 0.1]), ways, rows
    )
    folder.mkdir()
    save_replay(found, folder)
    return folder


def an_advice():
    choice = Choice("quota", "auto", 1, 0.5, 0.001, 0.9)
    today = Choice("static", "direct", None, 1.0, 0.001, 0.4)
    alone = dict.fromkeys(IDEAS, today)
    found = Advice(today, alone, choice, choice, 0.2, 0.1, 10**9, None, 3, 2)
    cluster, demand = sample.cluster(), my.Demand(np.full((16, 16), 9))
    placement = my.place(cluster, demand, "static")
    served = my.assign(cluster, demand, placement)
    step = my.simulate_step(cluster, STAND_IN, [placement] * 2, [served] * 2, network="ports")
    grid = Grid(
        "bytes/s of a nic",
        "rows per rank",
        np.array([1e9, 1e10]),
        np.array([10.0, 1e5]),
        np.array([[0.5, -0.2], [0.1, 0]]),
    )
    return advice_page(found, {"trace": "x"}, {"today": step}, [grid], "yr.Yard()")


@pytest.fixture(scope="module")
def all_pages(tmp_path_factory):
    """One of each kind."""
    top = tmp_path_factory.mktemp("pages")
    cluster = sample.cluster()
    traffic = my.workload("zipf:0.9", cluster.num_ranks, mb=1)
    my.simulate(cluster, my.schedule(cluster, traffic, "rails")).save(top / "t.npz")
    (top / "b.json").write_text(json.dumps(sample.bench_data()))
    runs = [a_replay(top / "one"), a_replay(top / "two", 0.5, "last")]
    (top / "c.html").write_text(comparison_page(compare_runs(runs)).html(), encoding="utf-8")
    (top / "a.html").write_text(an_advice().html(), encoding="utf-8")
    return {
        "advice": top / "a.html",
        "run": write_report(sample.write_run(top / "run")),
        "replay": write_report(runs[0]),
        "timeline": write_report(top / "t.npz"),
        "bench": write_report(top / "b.json"),
        "comparison": top / "c.html",
    }


FRAME = """<!doctype html><body><iframe id="f" width="{width}" height="900" src="{page}"></iframe><pre id="found"></pre><script>
window.addEventListener("load", function () {{ setTimeout(function () {{
  var page = document.getElementById("f").contentDocument, box = page.documentElement;
  document.getElementById("found").textContent = JSON.stringify({{
    wide: box.scrollWidth, room: box.clientWidth, figures: page.querySelectorAll(".js-plotly-plot").length,
    drawn: page.querySelectorAll(".js-plotly-plot .main-svg").length, paper: getComputedStyle(page.body).backgroundColor,
    text: [...page.querySelectorAll(".js-plotly-plot .xtick text")].map(t => t.style.fill)[0] || "",
    reach: page.querySelectorAll("[tabindex='0'][aria-label]").length}});
}}, 1500); }});</script></body>"""


def look(tmp_path, page, width, dark):
    """What a browser sees of a page so wide."""
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, page=page.as_uri()))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr",
               "--virtual-time-budget=5000", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", frame.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)[1].replace("&quot;", '"'))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; Debian's package is `chromium`")
@pytest.mark.parametrize("kind", ["run", "replay", "timeline", "bench", "comparison", "advice"])
def test_every_page_fits_a_phone_and_a_dark_screen(all_pages, tmp_path, kind):
    seen = look(tmp_path, all_pages[kind], 390, dark=True)
    assert seen["wide"] <= seen["room"], "scrolls sideways"
    assert seen["figures"] >= 1
    assert seen["drawn"] >= seen["figures"]
    assert seen["reach"] >= seen["figures"]  # by keyboard
    assert seen["paper"] == "rgb(18, 24, 31)"
    assert seen["text"] == "rgb(230, 235, 240)"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; Debian's package is `chromium`")
def test_a_light_screen_has_dark_text(all_pages, tmp_path):
    seen = look(tmp_path, all_pages["replay"], 1200, dark=False)
    assert seen["paper"] == "rgb(245, 247, 250)"
    assert seen["text"] == "rgb(28, 39, 51)"


def test_every_page_is_one_file_of_less_than_8_mb(all_pages):
    for page in all_pages.values():
        assert page.stat().st_size < 8e6
        markup = re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.S)
        assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', markup)


def test_the_page_of_a_replay_says_what_was_found(tmp_path):
    html = write_report(a_replay(tmp_path / "r")).read_text()
    text = re.sub(r"<script.*?</script>|<[^>]+>", " ", html, flags=re.S)
    assert "quota x auto, the best" in text
    assert "50%" in text
    assert "has no past" in text


def test_runs_are_compared_with_the_first_and_say_where_they_differ(tmp_path):
    found = compare_runs([a_replay(tmp_path / "a"), a_replay(tmp_path / "b", 0.5, "last")])
    assert [(line.run, line.name) for line in found.lines] == [
        ("a", "static x auto"), ("a", "quota x auto"), ("b", "static x auto"), ("b", "quota x auto"),
    ]  # fmt: skip
    assert [found.ratio(line) for line in found.lines] == pytest.approx([1, 0.5, 0.5, 0.25])
    assert ("forecast, a", "ahead") in found.conditions
    assert ("forecast, b", "last") in found.conditions
    assert ("trace", "x") in found.alike


def test_training_runs_and_benchmarks_are_compared_too(tmp_path):
    one, two = (sample.write_run(tmp_path / name, steps=3) for name in ("one", "two"))
    found = compare_runs([one, two / "run.json"])
    assert [line.name for line in found.lines] == ["plain", "moeyard"] * 2
    (tmp_path / "b.json").write_text(json.dumps(sample.bench_data()))
    bench = tmp_path / "b.json"
    assert compare_runs([bench, bench]).what == "an exchange"
    with pytest.raises(MoeyardError, match="different things"):
        compare_runs([one, bench])
    with pytest.raises(MoeyardError, match="at least two"):
        compare_runs([one])
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InvalidFile, match="no run, no replay"):
        compare_runs([tmp_path / "x.json", bench])


def test_the_command(tmp_path):
    one, two = a_replay(tmp_path / "a"), a_replay(tmp_path / "b", 0.5)
    done = CliRunner().invoke(
        app, ["compare", str(one), str(two), "--json", "--out", str(tmp_path / "c.html")]
    )
    assert done.exit_code == 0, done.output
    assert [line["ratio"] for line in json.loads(done.output)["lines"]] == pytest.approx([1, 0.5, 0.5, 0.25])
    assert (tmp_path / "c.html").stat().st_size > 1e6
    done = CliRunner().invoke(app, ["compare", str(one), str(two)])
    assert "x first" in done.output
