"""Pages of replays and simulations, runs compared."""

import json
import re

import pytest
from tests.report import sample
from typer.testing import CliRunner

from moeyard.cli.app import app
from moeyard.errors import InvalidFile, MoeyardError
from moeyard.report import write_report
from moeyard.report.compare import compare_runs


def test_every_page_is_one_file_of_less_than_8_mb(all_pages):
    for page in all_pages.values():
        assert page.stat().st_size < 8e6
        markup = re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.S)
        assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', markup)


def test_a_replay_that_is_not_finished_has_no_page_yet(tmp_path):
    (tmp_path / "replay.npz").write_bytes(b"")
    with pytest.raises(InvalidFile, match=r"a replay that is not finished; .* --resume"):
        write_report(tmp_path)


def test_the_page_of_a_replay_says_what_was_found(tmp_path):
    html = write_report(sample.a_replay(tmp_path / "r")).read_text()
    text = re.sub(r"<script.*?</script>|<[^>]+>", " ", html, flags=re.S)
    assert "quota x auto, the best" in text
    assert "50%" in text
    assert "has no past" in text


def test_runs_are_compared_with_the_first_and_say_where_they_differ(tmp_path):
    found = compare_runs([sample.a_replay(tmp_path / "a"), sample.a_replay(tmp_path / "b", 0.5, "last")])
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
    one, two = sample.a_replay(tmp_path / "a"), sample.a_replay(tmp_path / "b", 0.5)
    done = CliRunner().invoke(
        app, ["compare", str(one), str(two), "--json", "--out", str(tmp_path / "c.html")]
    )
    assert done.exit_code == 0, done.output
    assert [line["ratio"] for line in json.loads(done.output)["lines"]] == pytest.approx([1, 0.5, 0.5, 0.25])
    assert (tmp_path / "c.html").stat().st_size > 1e6
    done = CliRunner().invoke(app, ["compare", str(one), str(two)])
    assert "x first" in done.output
