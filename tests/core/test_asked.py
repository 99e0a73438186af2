import argparse

import pytest
from bench import asked


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (asked.at_least(1), "-1", "must be a whole number of at least 1, got '-1'"),
        (asked.at_least(1), "nan", "must be a whole number of at least 1, got 'nan'"),
        (asked.at_least(0), "-1", "must be a whole number of at least 0, got '-1'"),
        (asked.seconds, "nan", "must be more than 0 seconds, got 'nan'"),
        (asked.seconds, "-1", "must be more than 0 seconds, got '-1'"),
        (asked.seconds, "soon", "must be more than 0 seconds, got 'soon'"),
        (asked.file_to_write, "no/such/x.json", "the folder no/such is missing"),
        (asked.file_to_write, ".", "is a folder"),
        (asked.trace, "mixtral-8", "must be NAME=PATH:EXPERTS, got 'mixtral-8'"),
        (asked.trace, "a=no.npz:8", "no.npz: No such file"),
        (asked.trace, "a=/dev/null:8", "/dev/null: unknown kind of file ''"),
        (asked.lab, "no/such.toml", "no/such.toml: No such file"),
        (asked.lab, "/dev/null", "missing key 'nodes'"),
        (asked.trace, "a=even:nan", "must be a whole number of at least 1, got 'nan'"),
        (asked.runs, "no/such.json", "give a file that python -m bench.train_step saved"),
        (asked.runs, "/dev/null", "give a file that python -m bench.train_step saved"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_before_any_work(kind, given, said, capsys):
    parser = argparse.ArgumentParser(prog="x")
    parser.add_argument("--value", type=kind)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([f"--value={given}"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_what_can_be_done_is_taken(tmp_path):
    assert asked.at_least(0)("0") == 0
    assert asked.seconds("inf") == float("inf")
    assert asked.trace("a=even:16") == ("a", "even", 16)
    assert asked.file_to_write(f"{tmp_path}/x.json") == tmp_path / "x.json"


def test_runs_are_told_from_other_files(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": {"summary": {}}}')
    assert asked.runs(str(path)) == {"a": {"summary": {}}}
    path.write_text('{"a": 1}')
    with pytest.raises(argparse.ArgumentTypeError, match="holds no runs"):
        asked.runs(str(path))
