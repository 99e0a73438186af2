"""What annoyed at the command line, each with what it does now."""

import importlib
import os
import re
import subprocess
import sys

import pytest
import typer
from bench import commands

import moeyard as my
from moeyard.cli import complete, show
from moeyard.cli.app import COMMANDS, app
from moeyard.kernels.signatures import table
from moeyard.lab.loads import STANDARD, fitting_mb, lab_traffic, standard


def refused(result, *says):
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    for word in says:
        assert word in err


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (("schedule", "h200-2x8", "balanced", "--mb", "1"), my.SCHEDULERS),
        (
            ("plan", "h200-2x8", "mixtral-8", "--planner", "static", "--planner", "balanced"),
            ("static", "balanced"),
        ),
        (
            (
                "replay",
                "lab-2x2",
                "mixtral-8",
                "--records",
                "2",
                "--layers",
                "1",
                "--planner",
                "balanced",
                "--jobs",
                "1",
            ),
            ("balanced",),
        ),
    ],
)
def test_names_stay_whole_at_60_columns(call, monkeypatch, command, names):
    module = importlib.import_module(
        f"moeyard.cli.{command[0]}"
    )  # before what it takes from `show` is another
    for place in (module, show):
        monkeypatch.setattr(place, "console", narrow)
    out = call(*command)[1]
    assert max(map(len, out.splitlines())) <= 60
    for name in names:
        assert any(line.split()[:1] == [name] for line in out.splitlines()), out


def test_columns_that_do_not_fit_are_left_out_and_named(monkeypatch):
    monkeypatch.setattr(show, "console", narrow)
    rows = show.table("name", ">time", "?>first", "?>second")
    rows.add_row("a" * 30, "1.23 ms", "9" * 8, "8" * 8)
    out = narrow()
    with out.capture() as seen:
        out.print(rows)
    text = seen.get()
    assert "a" * 30 in text
    assert "9" * 8 in text
    assert "8" * 8 not in text
    assert "too narrow for: second" in text


def test_a_table_that_cannot_be_narrower_is_broken_and_not_cut(monkeypatch):
    """As the map of `moeyard reproduce hybridep`: columns that may not be left out."""
    cells = [f"over the wan {n}.25 x, coded {n}.75 x" for n in range(4)]
    monkeypatch.setattr(show, "console", narrow)
    rows = show.table("wan, expert", *(f">{n} MB" for n in range(4)))
    rows.add_row("10 Gbit/s, 0.36 MB", *cells)
    out = narrow()
    with out.capture() as seen:
        out.print(rows)
    text = seen.get()
    assert max(map(len, text.splitlines())) <= 60
    for word in " ".join(["10 Gbit/s, 0.36 MB", *cells]).split():
        assert word in text


def test_a_pipe_gets_tables_whole_and_names_as_they_are(capsys):
    name = "[/b] a[b]c :100: " + 130 * "n"
    rows = show.table("name", ">time", "?>more")
    rows.add_row(name, "1.23 ms", "9")
    show.console().print(rows)
    show.console().print("[/i] [bold]x :smile:")
    out = capsys.readouterr().out
    assert name in out
    assert "[/i] [bold]x :smile:" in out
    assert any(line.rstrip().endswith("9") for line in out.splitlines())


def test_a_mark_that_does_not_fit_is_left_out_without_a_word(monkeypatch):
    monkeypatch.setattr(show, "console", narrow)
    rows = show.table("name", ">time", "?")
    rows.add_row("a" * 47, "1.23 ms", "<- best")
    out = narrow()
    with out.capture() as seen:
        out.print(rows)
    assert "a" * 47 in seen.get()
    assert "too narrow" not in seen.get()


def narrow():
    from rich.console import Console

    return Console(width=60, highlight=False)


def test_an_ascii_locale_gets_plain_output(root):
    environment = os.environ | {
        "PYTHONPATH": str(root / "src"),
        "PYTHONIOENCODING": "ascii",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
    }
    command = [
        sys.executable,
        "-m",
        "moeyard",
        "schedule",
        "h200-2x8",
        "balanced",
        "--mb",
        "1",
        "--scheduler",
        "direct",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    done.stdout.decode("ascii")


def test_lab_bench_has_defaults_that_every_lab_can_do():
    for name in ("lab-2x2", "lab-4x4"):
        cluster = my.Cluster.load(name)
        mb = fitting_mb(cluster)
        chosen = standard(cluster, mb, 2048)
        assert "balanced" in chosen
        assert len(chosen) >= len(STANDARD) - 1
        for one in chosen:
            assert lab_traffic(cluster, one, mb, 2048).rows.sum() > 0
    assert fitting_mb(my.Cluster.load("lab-4x4")) == 45.0
    with pytest.raises(my.MoeyardError, match="positive"):
        standard(cluster, -1.0, 2048)


def test_a_cluster_that_is_no_lab_is_refused(call):
    for command in (
        ("lab", "run", "h200-4x8", "--", "x.py"),
        ("lab", "bench", "h200-4x8"),
        ("lab", "calibrate", "h200-4x8"),
    ):
        refused(call(*command), "not a lab", "lab-2x2 or lab-4dc or lab-4x4")
    refused(call("train", "--lab", "h200-4x8"), "not a lab")


def test_a_method_that_is_none_is_named_before_a_rank_starts(call, monkeypatch):
    monkeypatch.setattr("moeyard.lab.bench.run", lambda *_, **__: pytest.fail("ranks were started"))
    refused(
        call("lab", "bench", "lab-2x2", "--method", "gloo", "--method", "rils"),
        "'rils'",
        "did you mean 'rails'",
    )


def test_a_rail_or_a_wan_port_is_named_in_full(call):
    for given, says in (
        (("break", "1"), "NODE RAIL wanted, got 1;"),
        (("break", "--wan", "0", "3"), "--wan 0 wanted, got 3;"),
        (("slow", "--wan", "1"), "--wan 1 FACTOR wanted, got nothing;"),
        (("slow", "1", "0.5", "0.5"), "two whole numbers, got 1 0.5"),
        (("mend", "0", "1", "2"), "NODE RAIL wanted, got 0 1 2;"),
        (("slow", "--wan", "1", "0.1", "--lab", "nobody"), "lab nobody: "),
    ):
        refused(call("lab", *given), says)


def test_no_lab_is_said_to_be_none(call, monkeypatch):
    pytest.importorskip("pyroute2")
    monkeypatch.setattr("moeyard.lab.labs", list)
    status, out, _ = call("lab", "list")
    assert status == 0
    assert out.startswith("no lab runs here")


def test_a_lab_that_does_not_answer_hides_no_other(call, monkeypatch):
    pytest.importorskip("pyroute2")
    from moeyard.lab import LabError

    def ask(order, lab):
        if lab == "1":
            raise LabError("lab 1: timed out; running: 1, 2")
        return {"spec": {"nodes": 2, "ranks_per_node": 4}, "target": "hello.py"}

    monkeypatch.setattr("moeyard.lab.labs", lambda: ["1", "2"])
    monkeypatch.setattr("moeyard.lab.ask", ask)
    status, out, _ = call("lab", "list")
    assert status == 0
    assert out.splitlines() == ["1: no answer (lab 1: timed out; running: 1, 2)", "2: 2 x 4 ranks, hello.py"]


def test_train_without_a_lab_leaves_nothing(call, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    refused(call("train", "--out", tmp_path / "run"), "neither --lab nor torchrun")
    assert not (tmp_path / "run").exists()


def test_a_misspelt_name_is_named(call):
    refused(call("plan", "h200-4x8", "mixtrl-8"), "unknown trace 'mixtrl-8'", "did you mean 'mixtral-8'")
    refused(call("simulate", "h200-2x8,", "zipf:0.9"), "cluster 'h200-2x8,' has an empty name beside a comma")
    refused(call("warm", "trian"), "unknown group of kernels 'trian'", "did you mean 'train'")


def test_the_help_of_warm_lists_its_groups(call):
    text = call("warm", "--help")[1]
    assert all(name in text for name in table().commands)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("advise", "h200-2x8", "mixtral-8"), "--out"),
        (("compare", "a", "b"), "--out"),
        (("simulate", "h200-2x8", "zipf:0.9"), "--npz"),
        (("schedule", "h200-2x8", "zipf:0.9"), "--save"),
        (("plan", "h200-2x8", "mixtral-8"), "--save"),
        (("report", "."), "--out"),
        (("reproduce", "rails"), "--page"),
        (("record", "model", "text"), "--out"),
        (("lab", "bench", "lab-2x2"), "--out"),
        (("lab", "bench", "lab-2x2"), "--report"),
        (("lab", "calibrate", "lab-2x2"), "--out"),
    ],
)
def test_where_nothing_can_be_written_is_said_before_the_work(call, tmp_path, command, option):
    refused(call(*command, option, tmp_path / "none" / "x"), option, "there is no folder", "none; make it")
    refused(call(*command, option, tmp_path), option, "a folder; name a file in it")


def test_who_waits_is_told_how_long(capsys, monkeypatch):
    clock = iter((100.0, 101.0, 110.0, 111.0, 190.0))
    monkeypatch.setattr(show, "monotonic", lambda: next(clock))
    with show.Waiting("records", 20) as waiting:
        for done in (1, 2, 3, 19):  # too soon, told, too soon after that, nearly over
            waiting.update(done)
    told = [line for line in capsys.readouterr().err.splitlines() if "to go" in line]
    assert told == ["2 of 20 records; about 90 s to go"]


def test_what_is_slow_says_so_before(call, monkeypatch):
    def stop(*_, **__):
        raise my.MoeyardError("stop")

    monkeypatch.setattr("moeyard.lab.bench.bench", stop)
    monkeypatch.setattr("moeyard.lab.calibrate.calibrate", stop)
    err = call(
        "lab", "bench", "lab-2x2", "--method", "auto", "--method", "direct", "--repeat", 3, "--mb", 10
    )[2]
    first = err.splitlines()[0]
    assert "x 2 methods x 3 times: at least " in first
    assert int(first.split("at least ")[1].split()[0]) > 1
    assert call("lab", "calibrate", "lab-2x2")[2].startswith("measuring; with the start of the ranks usually")


TIMED = """
from moeyard.cli import simulate as command
from moeyard.kernels.compile import _Objects

began, loaded, load = [], [], _Objects.load_overload
class Clock:
    perf_counter = staticmethod(lambda: began.append(len(loaded)) or 0.0)
command.time = Clock
_Objects.load_overload = lambda self, *given: loaded.append(self) or load(self, *given)
from moeyard.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code
print(loaded and began)
"""


def test_the_first_simulation_is_timed_without_the_loading_of_kernels(root):
    """In a process of its own, where nothing is loaded yet: as many kernels when its clock stops as when it starts."""
    there = os.environ | {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        [sys.executable, "-c", TIMED, "simulate", "h200-2x8", "zipf:0.9", "--mb", "4", "--json"],
        env=there,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    start, stop = eval(done.stdout.splitlines()[-1])
    assert 0 < start == stop


def test_every_command_has_a_summary_that_is_not_cut_and_an_example(call):
    out = " ".join(call("--help")[1].split())
    for name, command in COMMANDS.items():
        assert command.summary in out
        assert f"moeyard {name}" in command.examples, name
    assert "--install-completion" in out


def test_so_has_every_command_of_a_lab(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = " ".join(call("lab", "--help")[1].split())
    for name in commands.in_lab():
        said = call("lab", name, "--help")[1]
        assert f"moeyard lab {name}" in said.split("Examples:")[1]
        assert " ".join(said.split("\n\n")[1].split()) in out, name


def test_the_page_of_commands_is_what_they_say():
    assert commands.text() == commands.PAGE.read_text(), "python -m bench.commands writes it"


def offered():
    """(command, option or argument, what its help says, the names that a shell offers for it)"""
    top = typer.main.get_command(app)
    context = top.make_context("moeyard", [], resilient_parsing=True)
    found = [(name, top.get_command(context, name)) for name in COMMANDS]
    found += [(f"lab {name}", one) for name, one in found[-1][1].commands.items()]
    for name, command in found:
        for param in command.params:
            names = [item.value for item in param.shell_complete(context, "")]
            if names and getattr(param, "_custom_shell_complete", None):
                yield name, param.name, param.help, names


def test_every_choice_is_listed_in_the_help():
    said = list(offered())
    assert len(said) > 20
    for command, param, text, names in said:
        if names == complete.clusters(""):
            assert "moeyard clusters" in text or "with commas between" in text, (command, param)
            continue
        missing = [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]
        assert not missing, (command, param, missing)


COMPLETED = {
    "schedule h200-2": "h200-2x8",
    "schedule h200-2x8 zi": "zipf",
    "schedule h200-2x8 balanced --scheduler sp": "spread",
    "plan h200-2x8 mixt": "mixtral-8",
    "plan h200-2x8 mixtral-8 --planner qu": "quota",
    "plan h200-2x8 mixtral-8 --policy qu": "quota",
    "simulate lab-2x2,h200-4": "lab-2x2,h200-4x8",
    "replay h200-2x8 rot": "rotating-hotspot",
    "replay h200-2x8 burst --forecast or": "oracle",
    "replay h200-2x8 burst --backend das": "dask",
    "simulate h200-2x8 balanced,hot --backend das": "dask",
    "advise h200-2x8 olmoe-64 --model deepseek-v3": "deepseek-v3",
    "train --mode plain,domains+": "plain,domains+codec",
    "train --lab lab-4d": "lab-4dc",
    "train --skew ol": "olmoe-64",
    "demo --lab lab-2x": "lab-2x2",
    "reproduce hy": "hybridep",
    "lab bench lab-2d": "lab-2dc",
    "lab bench lab-2x2 --method glo": "gloo",
    "rec": "record",
}


@pytest.mark.parametrize("line", COMPLETED)
def test_a_shell_completes_names(call, monkeypatch, line):
    words = f"moeyard {line}"
    monkeypatch.setenv("_MOEYARD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert COMPLETED[line] in call()[1].split()


# --- options of train as a file


@pytest.fixture
def seen(monkeypatch):
    """What train would have been asked for."""
    asked = {}
    monkeypatch.setattr(
        "moeyard.cli.train._under_torchrun", lambda options, json: asked.update(vars(options))
    )
    return asked


def test_train_takes_its_options_from_a_file_and_the_command_line_counts_more(call, tmp_path, seen):
    path = tmp_path / "train.toml"
    path.write_text(
        'steps = 32\nlearning-rate = 0.5\nskew = "mixtral-8"\n[set]\nhidden_size = 512\nact = "relu"\n'
    )
    assert call("train", "--options", path, "--steps", 3)[0] == 0
    assert (seen["steps"], seen["learning_rate"], seen["skew"]) == (3, 0.5, "mixtral-8")
    assert seen["config"] == {"hidden_size": 512, "act": "relu"}


@pytest.mark.parametrize(
    ("text", "says"),
    [("stps = 3", "did you mean 'steps'"), ("steps = ", "not TOML"), ("set = 3", "a table")],
)
def test_a_file_of_options_that_is_wrong_is_one_line(call, tmp_path, seen, text, says):
    (tmp_path / "t.toml").write_text(text)
    refused(call("train", "--options", tmp_path / "t.toml"), says, "t.toml")
    assert not seen


def test_plan_folds_a_trace_of_other_ranks_and_says_so(call):
    status, out, _ = call("plan", "h200-2x8", "mixtral-8", "--planner", "static")
    assert status == 0
    assert "folded: 32 ranks on 16: every 2 neighbours are one" in out


@pytest.mark.parametrize(
    "command", [("simulate", "lab-2x2", "balanced"), ("replay", "lab-2x2", "balanced", "--out", "none")]
)
@pytest.mark.parametrize("backend", ["frob", "loky:8000", ""])
def test_a_backend_that_is_none_is_refused_before_anything_is_made(
    call, tmp_path, monkeypatch, command, backend
):
    monkeypatch.chdir(tmp_path)
    refused(call(*command, "--backend", backend), repr(backend), "loky, threading, dask, ray", "dask:ADDRESS")
    assert not (tmp_path / "none").exists()
