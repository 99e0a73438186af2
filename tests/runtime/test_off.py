"""MOEYARD=off and self_check: what a user tries first when something looks odd."""

import pytest
from harness import launch

torch = pytest.importorskip("torch")

import moeyard as my  # noqa: E402
from moeyard.program import OUTPUT  # noqa: E402
from moeyard.runtime.options import Options, in_force  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]


def test_off_is_torchs_own_all_to_all_and_the_same_numbers():
    for rank, found in enumerate(launch("off_cases:off", 4, 60)):
        on, off = found["on"], found["off"]
        assert on["planned"] > 0
        assert on["copies"]
        assert not on["collective"]
        assert on["said"] == ""
        assert off["collective"]
        assert off["planned"] == 0
        assert not off["copies"]
        assert off["said"].count("MOEYARD=off") == (rank == 0)
        assert off["loss"] == pytest.approx(on["loss"], rel=1e-12)
        for name in ("grad", "experts"):
            torch.testing.assert_close(off[name], on[name], rtol=1e-10, atol=1e-12)


def test_off_on_one_rank_is_refused():
    assert launch("off_cases:one_rank_off", 4, 60, victim=2) == [(2,)] * 4


def test_an_unknown_switch_is_refused(monkeypatch):
    monkeypatch.setenv("MOEYARD", "of")
    with pytest.raises(my.errors.UnknownName, match="'of'"):
        in_force(Options())


@pytest.mark.parametrize("off", [False, True])
def test_self_check_names_what_differs(off):
    assert OUTPUT == 2  # what off_cases spoils
    for fresh, used, again, plans, message, ranks in launch("off_cases:checked", 4, 60, off=off):
        assert fresh == 2
        assert used == again == 2 * min(plans, 16)
        assert plans > 1
        assert "the way there: rank 1 got another row 1 from rank" in message
        assert 1 in ranks
