"""The report pages: complete, self-contained, and as a browser shows them."""

import json
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest
from tests.report import sample
from typer.testing import CliRunner

from moeyard.cli.app import app
from moeyard.errors import InvalidFile
from moeyard.report import badges, load_run, run_page, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVENT = {"event": "rail lost", "step": 6, "detail": "node 2 rail 1; step repeated"}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = sample.write_run(tmp_path_factory.mktemp("page") / "run", events=[EVENT])
    return write_report(folder)


def chromium(*arguments):
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--v=0",
    ]
    done = subprocess.run(
        [*command, "--virtual-time-budget=6000", *arguments], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode(), done.stderr.decode()


def drawn(path):
    """Share of a PNG's bytes that differ from what its filter predicts from their neighbours: near zero for a blank page."""
    data, at, parts = path.read_bytes(), 8, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"IDAT":
            parts.append(data[at + 8 : at + 8 + size])
        at += 12 + size
    return float((np.frombuffer(zlib.decompress(b"".join(parts)), np.uint8) != 0).mean())


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; Debian's package is `chromium`")
def test_a_browser_shows_every_figure_without_complaint(page, tmp_path):
    dom, log = chromium("--dump-dom", page.as_uri())
    assert "CONSOLE" not in log, [line for line in log.splitlines() if "CONSOLE" in line]
    figures = re.findall(r'id="figure-\d+"', dom)
    assert len(figures) >= 10
    assert len(re.findall(r'class="main-svg"', dom)) >= len(figures)  # plotly drew each
    assert "rail lost" in dom
    shot = tmp_path / "page.png"
    chromium(f"--screenshot={shot}", "--window-size=1366,4000", page.as_uri())
    assert drawn(shot) > 0.01


def test_a_page_holds_everything_and_asks_the_network_for_nothing(page):
    html = page.read_text()
    markup = re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', markup)
    assert "@import" not in markup
    assert "Plotly.newPlot" in html


def test_every_figure_says_how_it_came_about(page):
    made = run_page(load_run(page.parent))
    for section in made.sections:
        assert badges(section.kinds), section.title
    times = [s for s in made.sections if s.title in ("Comparison", "Where the time goes", "Iteration time")]
    assert all("emulated accelerator" in s.kinds for s in times)
    assert {name for name, _ in made.conditions} >= {"cluster", "law", "machine"}


def test_the_comparison_says_what_the_run_measured(page):
    run = load_run(page.parent)
    table = next(s for s in run_page(run).sections if s.title == "Comparison")
    assert [row[0] for row in table.rows] == ["plain", "moeyard"]
    assert table.rows[1][4] == f"{run.modes[1].summary['x_bound']:.2f}"


def test_the_page_of_a_benchmark(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(sample.bench_data()))
    html = write_report(path).read_text()
    assert "zipf:1.2" in html
    assert "predicted" in html


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.json", "{", "not JSON"),
        ("x.json", "{}", "not an exchange benchmark"),
        ("none.json", None, "no such file"),
    ],
)
def test_bad_input_is_one_line(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidFile, match=says):
        write_report(tmp_path / name)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(InvalidFile, match=r"run\.json"):
        load_run(tmp_path)


def test_the_command(tmp_path):
    folder = sample.write_run(tmp_path / "run", steps=3)
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "a.html")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a.html").stat().st_size > 1e6
