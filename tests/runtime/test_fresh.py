"""Parameters that change between a gather and its use, or between a forward and its backward: the numbers of training without
replicas, or an error. Never those of other weights."""

import pytest
from harness import cases_of, launch

torch = pytest.importorskip("torch")

from moeyard.runtime.codec.message import checksum_of, checksum_there, number_of  # noqa: E402
from moeyard.runtime.layers.fresh import _same, _sums  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(request):
    return launch("fresh_cases:everything", 2, 150, cases=cases_of(request))


@pytest.mark.parametrize(
    "case",
    [
        "unfrozen",
        "skipped",
        "other_model",
        "not_stepped",
        "inferred",
        "whole_by_fsdp",
        "taught",
        "clamped",
        "written_by_one",
        "evaluated_in_turn",
        "served_apart",
        "closed_over",
        "not_taken",
        "read_meanwhile",
        "put_back_elsewhere",
        "moved_between",
        "many_between",
        "router_alone",
        "replaced_by_one",
        "collected_by_one",
        "begun_by_one",
        "put_back_elsewhere, coded",
        "evaluated_between, coded",
        "evaluated_between_again, coded",
        "read_meanwhile, coded",
        "sent_meanwhile, coded",
    ],
)
def test_the_numbers_are_those_without_replicas(found, case):
    for rank in found:
        without, with_replicas = rank[case]
        assert with_replicas == pytest.approx(without, rel=1e-9, abs=1e-12)
        assert max(without) > 0


@pytest.mark.cases("lossy", "lossy, other receivers")
def test_a_codec_that_loses_bits_says_that_the_backwards_replicas_are_others(found):
    for rank in found:
        for case in ("lossy", "lossy, other receivers"):
            assert rank[case]
            assert "bits:1" in rank[case][0]
            assert "not the same" in rank[case][0]


@pytest.mark.cases("changed")
@pytest.mark.parametrize("case", ["changed", "changed_fused", "changed_and_dropped", "changed_by_closure"])
def test_gradients_of_other_weights_than_the_forwards_are_refused(found, case):
    for rank in found:
        assert "changed between a forward and its backward pass" in rank[case][1]
    assert all(
        "modified by an inplace operation" in rank["changed"][0] for rank in found
    )  # torch's own, without replicas


def test_a_router_whose_weights_cross_with_the_rows_is_recomputed_as_it_was():
    for without, with_replicas in launch("odd_cases:weights_that_cross", 4, 100):
        assert with_replicas == pytest.approx(without, rel=1e-9)
        assert max(without) > 0


@pytest.mark.cases("refused_for_one")
def test_where_the_weights_of_one_rank_changed_all_are_told(found):
    for rank in found:
        assert "between a forward and its backward pass (those of rank 0), and" in rank["refused_for_one"][1]


@pytest.mark.cases("swapped")
def test_weights_that_were_put_in_and_back_count_as_the_same(found):
    for rank in found:
        without, with_replicas = rank["swapped"]
        evaluated = with_replicas[:: len(with_replicas) // 3]
        assert evaluated == pytest.approx(without, rel=1e-9)
        assert min(norm for norm in with_replicas[1:3]) > 0


@pytest.mark.cases("begun")
def test_evaluations_and_recomputed_layers_gather_ahead_as_well(found):
    """Two of three layers have one before them, in both forwards; the first step of all plans."""
    assert [rank["begun"] >= 0.8 * 6 * 2 * 2 for rank in found] == [True] * len(found), found[0]["begun"]


WRITES = {
    "all signs": lambda stack: stack.neg_(),
    "a little": lambda stack: stack.mul_(1.01),
    "the first value": lambda stack: stack.view(-1)[0].add_(1),
    "the last value": lambda stack: stack.view(-1)[-1].neg_(),
    "experts change places": lambda stack: stack.copy_(stack.flip(0)),
    "rows change places": lambda stack: stack.copy_(stack.flip(1)),
    "columns change places": lambda stack: stack.copy_(stack.flip(2)),
    "two values change places": lambda stack: stack[:, 1, 1:3].copy_(stack[:, 1, 1:3].flip(1)),
    "two rows change signs": lambda stack: stack[0, :2].neg_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 128, 256), (3, 64, 33), (2, 127, 64), (2, 127, 127)])
@pytest.mark.parametrize("way", [number_of, _sums], ids=["a number", "sums, as on CUDA"])
def test_the_mark_of_parameters_shows_every_write(way, shape, kind, write):
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(kind)
    other = stack.clone()
    mark = way(stack.view(-1))
    assert _same(mark, way(other.view(-1)))
    write(other)
    assert not torch.equal(stack, other)
    assert not _same(mark, way(other.view(-1)))


ALIKE = {
    "doubled": (1.0, lambda stack: stack.mul_(2)),
    "halved": (1.0, lambda stack: stack.mul_(0.5)),
    "four times": (1.0, lambda stack: stack.mul_(4)),
    "ones for zeros": (0.0, lambda stack: stack.fill_(1)),
    "other signs": (1.0, lambda stack: stack.fill_(-1)),
    "signs of zeros": (0.0, lambda stack: stack.fill_(-0.0)),
}


@pytest.mark.parametrize(("scale", "write"), ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("even", [False, True], ids=["values", "one value"])
@pytest.mark.parametrize(
    ("kind", "side"),
    [(torch.float64, 128), (torch.float32, 128), (torch.float32, 512), (torch.bfloat16, 128)],
)
@pytest.mark.parametrize("way", [number_of, _sums], ids=["a number", "sums, as on CUDA"])
def test_the_mark_shows_what_adds_the_same_to_every_word(way, kind, side, even, scale, write):
    """A power of two times all values, in stacks whose sizes are powers of two: sums of words times their places come out the same."""
    shape = 8, side, side
    values = torch.ones(shape) if even else torch.randn(shape, generator=torch.Generator().manual_seed(1))
    stack = (values * scale).to(kind)
    mark = way(stack.view(-1))
    write(stack)
    assert not _same(mark, way(stack.view(-1)))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 63, 128, 256])
def test_the_number_of_a_diagonal_shows_where_it_lies(size, kind):
    stack = torch.eye(size, dtype=kind).repeat(2, 1, 1)
    others = stack.flip(1), stack.roll(1, 1), stack.roll(2, 2), -stack
    assert len({number_of(one.contiguous().view(-1)) for one in (stack, *others)}) == 5


@pytest.mark.parametrize("length", [0, 1, 2, 7, 500, (1 << 23) + 3])
def test_the_checksum_is_the_same_on_a_device(length):
    """By torch's operations, as where there is no kernel."""
    words = torch.randint(-(2**31), 2**31, (length,), generator=torch.Generator().manual_seed(length))
    assert checksum_there(words.to(torch.int32)) == checksum_of(words.to(torch.int32))
