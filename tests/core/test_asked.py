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
    assert asked.file_to_write(f"{tmp_path}/x.json") == tmp_path / "x.json"
