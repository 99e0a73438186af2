"""The report pages: complete and self-contained; test_browser.py looks at them."""

import json
import re

import numpy as np
import pytest
from tests.report import sample
from typer.testing import CliRunner

from moeyard.cli.app import app
from moeyard.errors import InvalidFile
from moeyard.provenance import CLOCKED, Network
from moeyard.report import Section, badges, load_run, run_page, write_report
from moeyard.report.figures import rails_heat
from moeyard.report.page import wordy


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = sample.write_run(tmp_path_factory.mktemp("page") / "run", events=[sample.EVENT])
    return write_report(folder)


def test_a_page_holds_everything_and_asks_the_network_for_nothing(page):
    html = page.read_text()
    markup = re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', markup)
    assert "@import" not in markup
    assert "Plotly.newPlot" in html


def sections(folder):
    return {section.title: section for section in run_page(load_run(folder)).sections}


def texts(section):
    return [badge.text for badge in badges(section.origins)]


def test_every_figure_says_how_it_came_about(page):
    made = run_page(load_run(page.parent))
    for section in made.sections:
        assert badges(section.origins), section.title
    for title in ("Where the time goes", "Iteration time", "One step, rank by rank"):
        assert texts(sections(page.parent)[title]) == ["measured, shaped network, emulated accelerator"]
    assert "modelled, simulated network" in texts(sections(page.parent)["Bytes arrived"])[1]
    assert {name for name, _ in made.conditions} >= {"cluster", "law", "machine"}
    with pytest.raises(ValueError, match="no provenance"):
        Section("A figure", {})


def test_what_gloo_hides_is_modelled_and_what_was_counted_is_measured(page):
    section = sections(page.parent)["Rows per rail"]
    assert texts(section) == ["plain: modelled, shaped network", "moeyard: measured, shaped network"]
    titles = [one.text for one in section.figure.layout.annotations]
    assert titles[:2] == ["plain (modelled)<br>sent", "plain (modelled)<br>received"]
    assert titles[2:] == ["moeyard<br>sent", "moeyard<br>received"]


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ("shaped", "a shaped network on one machine"),
        ("loopback", "was not shaped"),
        ("cluster", "the cluster"),
    ],
)
def test_a_page_says_of_its_own_network_and_of_no_other(tmp_path, network, says):
    folder = sample.write_run(tmp_path / network, steps=3, network=Network(network))
    html = re.sub(r"<script.*?</script>", "", write_report(folder).read_text(), flags=re.S)
    assert says in html
    others = {"shaped", "loopback", "cluster"} - {network}
    assert not [other for other in others if f"{other} network" in html]


def test_no_badge_says_published_of_what_we_measured(page):
    assert "published" not in re.sub(
        r"<script.*?</script>|<style.*?</style>", "", page.read_text(), flags=re.S
    )


def test_the_bars_are_as_long_as_the_iteration(page):
    run = load_run(page.parent)
    figure = sections(page.parent)["Where the time goes"].figure
    for i, mode in enumerate(run.modes):
        assert np.isclose(sum(bar.x[i] for bar in figure.data), mode.steps[-1]["seconds"])


@pytest.mark.parametrize("key", ["exchange_s", "rows_per_rail", "loss"])
def test_a_figure_without_a_label_is_not_shown(tmp_path, key):
    folder = sample.write_run(tmp_path / "run", steps=3)
    data = json.loads((folder / "run.json").read_text())
    del data["summary"]["moeyard"]["provenance"][key]
    (folder / "run.json").write_text(json.dumps(data))
    with pytest.raises(InvalidFile, match=f"moeyard: {key} does not say"):
        write_report(folder)


def test_ranks_of_one_node_have_no_picture_of_rails(tmp_path):
    folder = sample.write_run(tmp_path / "run", steps=3)
    data = json.loads((folder / "run.json").read_text())
    for mode in ("plain", "moeyard"):
        rows = data["summary"][mode]["rows_per_rail"]
        data["summary"][mode]["rows_per_rail"] = {way: np.zeros_like(rows[way]).tolist() for way in rows}
    (folder / "run.json").write_text(json.dumps(data))
    section = sections(folder)["Rows per rail"]
    assert section.figure is None
    assert "no row left its node" in section.note


def test_rows_that_crossed_once_stand_beside_those_that_would_have(tmp_path):
    folder = sample.write_run(tmp_path / "run", steps=3)
    assert "once" not in sections(folder)["Rows per rail"].note
    data = json.loads((folder / "run.json").read_text())
    data["summary"]["moeyard"] |= {"rows_sent": 500.0, "rows_plain": 1000.0}
    data["summary"]["plain"] |= {"rows_sent": 1000.0, "rows_plain": 1000.0}
    for name in ("rows_sent", "rows_plain"):
        for mode in ("plain", "moeyard"):
            data["summary"][mode]["provenance"][name] = data["summary"][mode]["provenance"]["loss"]
    (folder / "run.json").write_text(json.dumps(data))
    note = sections(folder)["Rows per rail"].note
    first = np.array(data["summary"]["moeyard"]["rows_per_rail"]["out"]).sum(axis=0)[0]
    assert (
        "moeyard: a token crosses to a node once, so 500 of the 1000 rows between nodes were sent (50%)"
        in note
    )
    assert f"{first:.0f} of {2 * first:.0f}" in note
    assert "plain: a token" not in note


def test_words_begin_at_the_left_and_numbers_keep_their_units(page):
    rows = [("a", "1.5 s", "-", "2 of 3"), ("b", "-20%", "", "none")]
    section = Section("x", {CLOCKED: ""}, columns=("who", "time", "less", "done"), rows=rows)
    assert wordy(section) == [True, False, False, True]
    html = page.read_text()
    assert '<td class="words">moeyard</td>' in html
    assert '<td class="words">4.27 s</td>' not in html
    assert "<td>4.27 s</td>" in html


def test_maps_of_rails_stand_two_in_a_line_whatever_the_number_of_modes(page):
    rows = {
        name: dict.fromkeys(("out", "in"), np.ones((4, 4)))
        for name in ("plain (modelled)", "direct", "moeyard")
    }
    figure = rails_heat(rows)
    left = sorted({one.domain[0] for one in figure.select_xaxes()})
    assert len(left) == 2
    assert len({one.domain for one in figure.select_yaxes()}) == 3
    assert figure.layout.height > 3 * 4 * 46
    assert [one.text for one in figure.layout.annotations][:2] == [
        "plain (modelled)<br>sent",
        "plain (modelled)<br>received",
    ]
    assert [one.showscale for one in figure.data] == [False, True, False, False, False, False]


def test_curves_that_part_are_said_to(tmp_path):
    folder = sample.write_run(tmp_path / "run", steps=3)
    assert sections(folder)["Loss"].note.startswith("The lines lie on each other")
    path = folder / "moeyard" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["loss"] += 0.1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sections(folder)["Loss"].note.startswith("The lines do NOT lie on each other")


def test_a_run_without_a_step_is_one_line(tmp_path):
    folder = sample.write_run(tmp_path / "run", steps=3)
    data = json.loads((folder / "run.json").read_text()) | {"modes": []}
    (folder / "run.json").write_text(json.dumps(data))
    with pytest.raises(InvalidFile, match="no mode has done a step"):
        write_report(folder)


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
    assert "predicted: modelled, simulated network" in html
    assert "measured, shaped network" in html
    unlabelled = {k: v for k, v in sample.bench_data().items() if k != "provenance"}
    path.write_text(json.dumps(unlabelled))
    with pytest.raises(InvalidFile, match="provenance"):
        write_report(path)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.json", "{", "not JSON"),
        ("x.json", "{}", "not an exchange benchmark"),
        ("x.json", "[1, 2]", r"is a JSON object, got \[1, 2\]"),
        ("x.json", "[" * 90000, "nested too deep"),
        ("x.json", '{"a": ' + "1" * 5000 + "}", "a number of more digits"),
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


def test_a_folder_without_a_page_says_what_was_looked_for(tmp_path):
    with pytest.raises(
        InvalidFile, match=r"neither run\.json, of `moeyard train --out`, nor replay\.json, of"
    ):
        write_report(tmp_path)
    folder = sample.write_run(tmp_path / "run", steps=3)
    (folder / "run.json").unlink()
    with pytest.raises(InvalidFile, match=r"has not ended; `moeyard watch .*run` follows it"):
        write_report(folder)


def test_the_command(tmp_path):
    folder = sample.write_run(tmp_path / "run", steps=3)
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "a.html")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a.html").stat().st_size > 1e6


def test_losses_are_the_same_by_the_rounding_of_what_was_computed_in(tmp_path):
    folder = sample.write_run(tmp_path / "run")
    path = folder / "run.json"
    data = json.loads(path.read_text())
    limits = {}
    for dtype in ("float32", "bfloat16"):
        path.write_text(json.dumps(data | {"dtype": dtype}))
        limits[dtype] = load_run(folder).same_loss
    assert 0 < limits["float32"] < 1e-4 < limits["bfloat16"] < 1 / 256
    path.write_text(json.dumps(data | {"dtype": "float8"}))
    with pytest.raises(InvalidFile, match="float8"):
        load_run(folder)
