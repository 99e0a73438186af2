"""HybridEP's tables done again: verdicts follow from their figures, and domains from the sizes."""

import pytest

from moeyard.reproduce import datacenters, hybridep
from moeyard.reproduce.datacenters import Far, Winner
from moeyard.reproduce.hybridep import Cell


def test_a_cell_within_a_fifth_of_the_papers_ratio_is_close():
    assert [Cell("", 2.0, ours).close for ours in (1.61, 2.0, 2.39, 1.59, 2.41)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_what_is_far_off_is_named_with_what_the_papers_own_times_imply():
    near = Cell("6 MB on 16 GPUs", 1.0, 1.1, 0.4)
    slow = Cell("12 MB on 16 GPUs", 2.0, 1.2, 0.41)
    odd = Cell("24 MB on 16 GPUs", 2.0, 3.0, 0.99)
    given = Cell("192 MB on 16 GPUs", 2.0, 2.0, 1.0, fitted=True)
    assert (
        hybridep.judge_data([near, given])
        == "1 of 1 speedups that were not fitted are within 20% of the paper's."
    )
    said = hybridep.judge_data([near, slow, odd, given])
    assert said.startswith("1 of 3 speedups")
    assert "12 MB on 16 GPUs (-40%), 24 MB on 16 GPUs (+50%)" in said
    assert "In 1 of these" in said
    assert "0.41 to 0.41 of the rate" in said
    assert "In 24 MB on 16 GPUs it is not that" in said


def test_the_other_verdicts_follow_from_their_figures():
    assert "within 20% at 32 MB and 2 MB" in hybridep.judge_experts([1.2], [2.5])
    below = hybridep.judge_experts([1.0], [1.5])
    assert "within 20% at 32 MB." in below
    assert "2 MB -42%" in below
    assert "at neither end" in hybridep.judge_experts([1.6], [4.0])
    assert "2 MB +56%" in hybridep.judge_experts([1.6], [4.0])
    said = hybridep.judge_ablation([Cell("a", 2.0, 2.1), Cell("b", 2.0, 1.2), Cell("c", 2.0, 4.0)])
    assert said.startswith("1 of 3")
    assert "less here in b (-40%)" in said
    assert "more in c (+100%)" in said
    assert "All shares are the paper's." in hybridep.judge_modelling([], [], True, 3)
    assert "x are the paper's only if" in hybridep.judge_modelling(["x"], [], True, 3)
    neither = hybridep.judge_modelling(["x"], ["y"], False, 3)
    assert (
        "Other shares than the paper's: x; with bytes for bits y. The numbers of transfers are not all"
        in neither
    )


def test_skew_is_told_from_the_points():
    def point(routing, ratio, took=1.0, gbit=1.0):
        return Far(24.0, gbit, routing, ratio, 1.0, (2, 1, 1), took)

    said = datacenters.judge_far([point("even", 1.1), point("even", 1.4, 7.0, 10.0), point("Zipf 1", 2.0)])
    assert "24 MB, even: 1.10-1.40 x, inside the claimed range; 24 MB, Zipf 1: 2.00-2.00 x, beyond" in said
    assert "Skew makes domains pay more" in said
    assert "Unlike in the paper, domains pay more the faster" in said
    assert "slowest point took 7 s" in said
    other = datacenters.judge_far([point("even", 1.4), point("even", 1.3, 1.0, 10.0), point("Zipf 1", 1.1)])
    assert "does not make" in other
    assert "As in the paper, domains pay more the slower" in other


@pytest.mark.parametrize(
    ("ranks", "size", "rows", "experts"), [(8, 2, 24, 8), (16, 4, 48, 48), (32, 32, 0, 992)]
)
def test_transfers_are_those_of_the_papers_table(ranks, size, rows, experts):
    counted, formula = hybridep.transfers(ranks, size)
    assert counted == formula == (rows, experts)


def test_domains_pay_where_rows_are_many_and_the_wan_is_slow():
    slow, fast = (datacenters.far_point(20, gbit, 0.0, megabytes=192.0) for gbit in (1.0, 100.0))
    assert slow.sizes == (20, 1, 1)
    assert slow.plain / slow.domains > fast.plain / fast.domains > 1
    few = datacenters.far_point(20, 1.0, 0.0, megabytes=0.1, expert=32.0)
    assert few.sizes == (1, 1, 1)
    assert few.plain == pytest.approx(few.domains)


def test_the_map_is_told_from_its_places():
    plain = Winner(1.0, 8.0, 6.0, (1, 1, 1), 1.0)
    won = [Winner(1.0, 2.0, 24.0, (4, 1, 8), 3.0), Winner(10.0, 2.0, 24.0, (2, 1, 4), 2.0)]
    assert [str(one) for one in (plain, *won)] == ["plain, 1.00 x", "all, 3.00 x", "2x1x4, 2.00 x"]
    assert datacenters.judge_winners([plain]) == "Plain wins in all 1 places."
    said = datacenters.judge_winners([plain, *won])
    assert (
        "Domains win in 2 of 3 places, most with 2 MB experts, 24 MB of rows and 1 Gbit/s (3.00 x)." in said
    )
    assert "more than 0.75 of its expert's bytes" in said
    coded = Winner(1.0, 8.0, 6.0, (1, 1, 8), 1.2, (4, 1, 8), 1.5)
    assert str(coded) == "inside, 1.20 x; coded all, 1.50 x"
    assert "gains in 1 of these, at most 1.25 x more" in datacenters.judge_winners([plain, *won, coded])
    many, few = datacenters.winner(10, 0.36, 192, gpus=16), datacenters.winner(10, 32, 6, gpus=16)
    assert many.ratio > 5
    assert few.sizes == (1, 1, 1)
    assert few.ratio == pytest.approx(1.0)
    middle = datacenters.winner(10, 8, 96, gpus=16)
    assert middle.coded_ratio > 1.1 * middle.ratio > 1.1


def test_the_map_is_drawn_a_panel_for_each_rate_and_codec():
    places = [
        [Winner(gbit, 2.0, data, (4, 1, 8), 3.0, (4, 1, 8), 5.0) for data in (6, 24)] for gbit in (1, 10)
    ]
    figure = datacenters._map(places)
    assert [one.text for one in figure.layout.annotations] == [
        "1 Gbit/s, uncompressed", "10 Gbit/s, uncompressed", "1 Gbit/s, bits:1", "10 Gbit/s, bits:1",
    ]  # fmt: skip
    assert [*figure.data[0].text] == [["all<br>3.00 x"] * 2]
    assert [*figure.data[3].text] == [["all<br>5.00 x"] * 2]
