"""Rows that come grouped by expert, as after a dispatch: any number of experts, weights that are read again, nothing done in vain."""

import pytest

torch = pytest.importorskip("torch")
from block_oracle import error, make  # noqa: E402

from moeyard.errors import InvalidModel  # noqa: E402
from moeyard.runtime.block import expert_block, grouped_experts, grouped_linear  # noqa: E402
from moeyard.runtime.block.plain import PlainParts  # noqa: E402


def test_an_activation_that_draws_is_refused():
    case = make(6, 16, 8, 3, 2)
    given, index, _ = case.leaves(torch.float32)
    stacks = given["gate_up"], given["down"]
    with pytest.raises(InvalidModel, match="draws random numbers"):
        expert_block(given["x"], index, None, *stacks, activation=torch.nn.Dropout(0.5))
    with torch.no_grad():  # nobody computes it again
        expert_block(given["x"], index, None, *stacks, activation=torch.nn.Dropout(0.5))


@pytest.mark.parametrize("again", [False, True], ids=["saved", "read again"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_times_their_experts_own_matrix(dtype, transposed, again):
    """grouped_linear against a loop over experts; the second has no rows."""
    generator = torch.Generator().manual_seed(4)
    counts = [3, 0, 5]
    rows, weight, bias, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((8, 16), (3, 12, 16), (3, 12), (8, 12))
    )
    leaves = [one.clone().requires_grad_() for one in (rows, weight, bias)]
    parts = zip(leaves[0].split(counts), leaves[1], leaves[2], strict=True)
    wanted = torch.cat([part @ matrix.T + more for part, matrix, more in parts])
    wanted.backward(grad)
    given = [one.to(dtype).requires_grad_() for one in (rows, weight.mT if transposed else weight, bias)]
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    lent = given[1].detach().clone()
    found = grouped_linear(
        given[0],
        ends,
        given[1],
        bias=given[2],
        transposed=transposed,
        counts=counts,
        again=(lambda: [lent]) if again else None,
    )
    if again:
        with torch.no_grad():
            given[1].zero_()  # a workspace that somebody else uses meanwhile
    found.backward(grad.to(dtype))
    limit = 1e-12 if dtype == torch.float64 else 1e-6
    assert error(found, wanted.detach()) < limit
    for one, leaf in zip(given, leaves, strict=True):
        got = one.grad.mT if one.dim() == 3 and transposed else one.grad
        assert error(got, leaf.grad) < limit


def test_a_rank_may_have_no_expert():
    """Then it has no rows, and its gradients are of nothing, but there."""
    given = [torch.zeros(shape, requires_grad=True) for shape in ((0, 16), (0, 16, 16), (0, 16, 8))]
    ends = torch.zeros(0, dtype=torch.int32)
    grouped_experts(given[0], ends, *given[1:], counts=()).sum().backward()
    assert [one.grad.shape for one in given] == [one.shape for one in given]
    with pytest.raises(InvalidModel, match="2 rows, but no expert"):
        grouped_experts(torch.zeros(2, 16), ends, *given[1:])


def test_what_is_known_to_have_no_tail_is_not_cleared(monkeypatch):
    case = make(6, 16, 8, 3, 1)
    given, index, _ = case.leaves(torch.float32)
    cleared = []
    monkeypatch.setattr(PlainParts, "clear_tail", lambda *_: cleared.append(1))
    counts = torch.bincount(index.reshape(-1), minlength=3)
    ends = counts.cumsum(0).to(torch.int32)
    for known in (counts.tolist(), None):
        grouped_experts(given["x"], ends, given["gate_up"], given["down"], counts=known).sum().backward()
    assert len(cleared) == 2


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_over_choices_are_wide_whether_or_not_all_are_choices(weighted):
    """bf16 rows with bf16 weights: one rounding, at the end."""
    generator = torch.Generator().manual_seed(6)
    routing = PlainParts().route(torch.randint(0, 5, (30, 8), generator=generator), 5)
    rows = torch.randn(240, 16, generator=generator).bfloat16()
    weights = torch.rand(30, 8, generator=generator).bfloat16() if weighted else None
    wanted = rows.double()[routing.row.long()]
    wanted = (wanted * weights.double().unsqueeze(-1)).sum(1) if weighted else wanted.sum(1)
    for whole in (False, True):
        found = PlainParts().gather_sum(rows, routing, weights, torch.float32, whole=whole)
        assert error(found, wanted) < 1e-6
